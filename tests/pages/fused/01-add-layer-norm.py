"""What must hold of the page "Add, then normalize"."""

import torch

from compiled.declared import Case, Kernel, Kernels


def run(page, M, N, dtype):
    x, r, w, b, dy, ds = page.inputs(M, N, dtype)
    y, s = page.add_layer_norm(x, r, (N,), w, b)
    torch.autograd.grad((y, s), (x, r, w, b), (dy, ds))
    y = page.Streamed.apply(r, w, b, 1e-5, dtype)
    torch.autograd.grad(y, (r, w, b), dy)


def also(page, M, N, dtype):
    x, r, w, b, dy, _ds = page.inputs(5, 24, dtype)
    y, s = page.add_layer_norm(x, r.detach().float(), (24,), None, b)
    torch.autograd.grad(y, (x, b), dy)
    y, s = page.add_layer_norm(x, None, 24, w)
    torch.autograd.grad(y, (x, w), dy)
    page.WAYS["both"](x, r, None, w, b)
    for kernel in (page._sum_of_three, page._sum_of_three_1):
        kernel[(5,)](x, w, r, s, 24, 32)


def wide(page, M, N, dtype):
    x, r, w, b, dy, ds = page.inputs(M, N, dtype)
    y, s = page.add_layer_norm(x, r, (N,), w, b)
    torch.autograd.grad((y, s), (x, r, w, b), (dy, ds))


SIZES = {
    "float16": [
        512, 1024, 1536, 2560, 4096, 5120, 8192, 8704, 10240, 12288, 14336,
    ],
    "bfloat16": [4096, 14336],
    "float32": [1024, 4096, 7168],
}  # fmt: skip

KERNELS = Kernels(
    run=run,
    also=also,
    M=4096,
    N=[4096, 14336],
    dtype="float16",
    sizes=SIZES,
    kernels={
        "_add_layer_norm_fwd": Kernel(
            look="""
            ``x``, the residual, ``w`` and ``b`` are read once, by 16 bytes,
            ``s`` and ``y`` are written once; nothing is spilled.
            """,
            true=lambda code: [
                code.loaded == 4 * 2 * 4096,
                code.narrow("load") == 0,
                len(code.lines("store")) == 4,
            ],
            true_at={
                14336: lambda code: [
                    code.registers <= 64,
                    code.loaded == 4 * 2 * 16384,
                ]
            },
            narrow_stores=2,  # mean and rstd
            spills={14336: 8},  # in bfloat16
        ),
        "_add_layer_norm_bwd": Kernel(
            look="""
            The rows of three matrices come by asynchronous copies of 16 bytes,
            and one is stored.
            At 14336 columns look for ``xor``: what makes the compiler forget,
            so that next to nothing is spilled.
            """,
            true=lambda code: [
                code.spills == 0,
                (code.count("copy", 16) > 0) != code.amd,
            ],
            true_at={
                14336: lambda code: [code.registers > 200, code.spills <= 88]
            },
            copies=True,
            narrow_copies=8,  # mean and rstd
            narrow_stores=8,  # sums of narrow rows
            spills={12288: 8, 14336: 88},  # 8 in float16
            shared=232448,  # all that a program may have on sm_90
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
        "_layer_norm_fwd_sweeps": Kernel(
            look="""
            ``x``, here the sum, is loaded in two loops, the second time from a
            cache if it is still there; all loads are by 16 bytes.
            """,
            true=lambda code: [
                len(code.lines("load")) == 4,
                code.narrow("load") == 0,
            ],
            narrow_stores=2,  # mean and rstd
        ),
        "_layer_norm_bwd_means": Kernel(
            look="""
            This kernel reads both matrices and stores two numbers a row.
            """,
            true=lambda code: [
                code.narrow("store") == code.count("store") == 2
            ],
            narrow_loads=2,  # mean and rstd
            narrow_stores=2,  # c1 and c2
        ),
        "_layer_norm_bwd_slices": Kernel(
            look="""
            Rows come by asynchronous copies into shared memory; the sums for
            ``dw`` and ``db`` stay in registers and are stored once, after the
            loop.
            """,
            true=lambda code: [(code.count("copy", 16) > 0) != code.amd],
            narrow_loads=12,  # statistics and means of the rows of a tile
            narrow_copies=12,
            copies=True,
        ),
    },
    cases={
        "wide": Case(
            run=wide,
            sizes={"float16": [16384, 20480, 32768]},
        ),
    },
)
