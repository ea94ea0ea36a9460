"""What must hold of the page "RMS normalization and the residual stream"."""

import torch

from compiled.declared import Case, Kernel, Kernels


def run(page, M, N, dtype):
    given = page.inputs(M, N, dtype)
    page.results(page.CALLS["triton"], *given)
    page.move(2048, 4, "backward", *given)()
    page.move(2048, 4, "forward", *given)()


def also(page, M, N, dtype):
    x, residual, w, dy, ds = page.inputs(5, 1000, dtype)
    wide = residual.detach().float().requires_grad_()
    page.results(page.CALLS["triton"], x, wide, w, dy, ds.float())
    torch.autograd.grad(page.rms_norm(x, (1000,), w), (x, w), dy)
    for tile in page.TILES:
        page.move(*tile, "forward", *page.inputs(2, 1024, dtype))()


def alone(page, M, N, dtype):
    x, _, w, dy, _ = page.inputs(M, N, dtype)
    torch.autograd.grad(page.rms_norm(x, (N,), w), (x, w), dy)


def float32_stream(page, M, N, dtype):
    x, residual, w, dy, ds = page.inputs(M, N, dtype)
    wide = residual.detach().float().requires_grad_()
    page.results(page.CALLS["triton"], x, wide, w, dy, ds.float())


SIZES = {
    "bfloat16": [
        2048, 2560, 3072, 3584, 4096, 5120, 7168, 8192, 12288, 16384,
    ],
    "float16": [4096, 16384],
    "float32": [2048, 8192],
}  # fmt: skip

KERNELS = Kernels(
    run=run,
    also=also,
    M=4096,
    N=[4096, 16384],
    dtype="bfloat16",
    sizes=SIZES,
    kernels={
        "_rms_norm_fwd": Kernel(
            look="""
            All loads of ``x`` and of the residual stand before the first
            store.
            Threads wait for each other only in the one sum.
            """,
            true=lambda code: [
                code.loaded == 3 * 2 * 4096
                or code.amd,  # whose warps are wider
                code.narrow("load") == 0 or code.amd,
                code.marks[2 * code.count("load") // 3].number
                == code.first("store"),  # w is later
                len(code.lines("shuffle")) == 1,
            ],
            true_at={16384: lambda code: [code.loaded == 3 * 2 * 16384]},
            narrow_stores=1,  # rstd
        ),
        "_rms_norm_bwd": Kernel(
            look="""
            On NVIDIA GPUs asynchronous copies load ``s``, ``dy`` and ``ds``
            ahead, and only ``w`` is loaded into registers at once.
            At 16384 columns a thread takes nearly all of the 255 registers
            that it may have, and none is spilled.
            """,
            true=lambda code: [
                (code.count("copy", 16) > 0) != code.amd,
                code.loaded == 2 * 4096 or code.amd,
            ],
            true_at={
                16384: lambda code: [
                    code.registers >= 250,
                    code.spills == 0,
                    code.loaded == 2 * 16384,
                ]
            },
            copies=True,
            narrow_copies=4,  # rstd, of several rows
            shared=232448,  # all that a program may have on sm_90
        ),
        "_add_up": Kernel(
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
            narrow_loads=1,  # of few programs
            narrow_stores=1,  # of 16 columns
        ),
        "_move": Kernel(
            look="""
            Shown as the ceiling of the forward pass.
            Nothing but loads and stores of 16 bytes: no thread waits for
            another.
            """,
            true=lambda code: [
                code.narrow("load") == 0,
                code.narrow("store") == 0,
                code.loaded == code.stored == 2 * 2 * 2048,
                code.count("barrier") + code.count("shuffle") == 0,
            ],
        ),
    },
    cases={
        "alone": Case(
            run=alone,
            sizes={"bfloat16": [2048, 4096, 5120, 8192, 12288, 16384]},
        ),
        "float32-stream": Case(
            run=float32_stream,
            sizes={"bfloat16": [2048, 4096, 8192]},
        ),
    },
)
