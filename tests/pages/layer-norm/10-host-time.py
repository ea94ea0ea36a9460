"""What must hold of the page "Host time: what the user waits for"."""

import torch

from compiled.declared import Kernel, Kernels


def run(page, M, N, dtype):
    x, w, b, dy = page.inputs(M, N, dtype)
    plan = page.Plan(torch.Size([N]), x, w, b, 1e-5, page.jit)
    torch.autograd.grad(page.LayerNorm.apply(x, w, b, plan), (x, w, b), dy)


KERNELS = Kernels(
    run=run,
    M=4096,
    N=[4096],
    dtype="float16",
    sizes={
        "float16": [1024, 2048, 4096, 4608, 8192, 15872],
        "bfloat16": [4096],
        "float32": [1024, 4096],
    },
    kernels={
        "_layer_norm_fwd": Kernel(
            look="That of page 01: one read of the row, by 16 bytes.",
            true=lambda code: [
                code.loaded == 3 * 2 * 4096,
                code.narrow("load") == 0,
            ],
            narrow_stores=2,  # mean and rstd
        ),
        "_layer_norm_bwd": Kernel(
            look="""
            That of page 01: the two sums stay in registers over all rows of a
            program.
            """,
            true=lambda code: [code.count("load", 16) > 0, code.spills == 0],
            narrow_loads=2,  # mean and rstd
            spills={15872: 112},
        ),
        "_layer_norm_bwd_add_up": Kernel(
            look="""
            A program reads 64 rows of sums of 16 columns, of ``dw`` and of
            ``db``, by 16 bytes, and stores 16 numbers of each.
            """,
            true=lambda code: [
                code.loaded == 2 * 64 * 16 * 4,
                code.narrow("load") == 0,
            ],
            narrow_stores=2,  # of 16 columns each
        ),
    },
)
