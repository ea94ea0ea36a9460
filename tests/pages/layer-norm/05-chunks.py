"""What must hold of the page "Chunks instead of padding"."""

import torch

from compiled.declared import Case, Kernel, Kernels


def run(page, M, N, dtype):
    x, w, b, dy = page.inputs(M, N, dtype)
    torch.autograd.grad(page.layer_norm(x, (N,), w, b), (x, w, b), dy)


def also(page, M, N, dtype):
    x, w, b, dy = page.inputs(13, 24, dtype)
    torch.autograd.grad(page.layer_norm(x, (24,), w, None), (x, w), dy)
    torch.autograd.grad(page.layer_norm(x, (24,)), x, dy)
    y = page.trained_by(page.padded(page.plan_backward))(x, (24,), w, b)
    torch.autograd.grad(y, (w, b), dy)
    for kernel in (page._row_sums, page._row_sums_1):
        kernel[(3,)](x.float(), w.float(), N=13, CHUNK=8)


def forward(page, M, N, dtype):
    x, w, b, _ = (t.detach() for t in page.inputs(M, N, dtype))
    page.layer_norm(x, (N,), w, b)


SIZES = {
    "float16": [
        256, 1024, 1280, 1536, 2048, 2816, 3584, 4096, 4608, 5120, 6656,
        8192, 8704, 10240,
    ],
    "bfloat16": [4096, 10240],
    "float32": [1024, 2304, 5120],
}  # fmt: skip

KERNELS = Kernels(
    run=run,
    also=also,
    M=4096,
    N=[4096, 4608],
    dtype="float16",
    sizes=SIZES,
    kernels={
        "_layer_norm_fwd_chunks": Kernel(
            look="""
            Each chunk is one load of 16 bytes for each thread; ``x``, ``w``
            and ``b`` are read once.
            """,
            true=lambda code: [
                code.loaded == 3 * 2 * 4096
                or code.amd,  # whose warps are wider
                code.narrow("load") == 0 or code.amd,
            ],
            true_at={
                4608: lambda code: [
                    code.loaded == 3 * 2 * 5 * 1024,  # half a chunk is masked
                ]
            },
            narrow_stores=2,  # mean and rstd
        ),
        "_layer_norm_bwd_chunks": Kernel(
            look="""
            Look at the registers: two sums in float32 for each column, and
            nothing is spilled.
            The rows come by asynchronous copies of 16 bytes.
            """,
            true=lambda code: [code.registers > 128, code.spills == 0],
            copies=True,
            narrow_copies=8,  # mean and rstd
            narrow_stores=8,  # sums of narrow rows
            spills={8704: 8, 9216: 8, 9728: 8, 9984: 8},  # two registers
        ),
        "_add_up_chunks": Kernel(
            look="""
            A program reads the sums of all programs, 16 columns of each, by 16
            bytes.
            On sm_90 and sm_100 it starts early.
            """,
            true=lambda code: [
                code.narrow("load") == 0,
                (code.count("early") == 1)
                == (code.target in ("sm_90", "sm_100")),
            ],
            narrow_stores=1,  # of 16 columns
        ),
    },
    cases={
        "forward": Case(
            run=forward,
            sizes={
                "float16": [12288, 16384, 20480, 24576, 32768],
                "float32": [8192, 12288, 16384],
            },
            kernels={
                "_layer_norm_fwd_chunks": {
                    # Held to registers with which one program more fits.
                    "spills": {16384: 8, 24576: 8},
                },
            },
        ),
    },
)
