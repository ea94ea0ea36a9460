"""What must hold of the page "A lock, and its race"."""

import torch

from compiled.declared import Kernel, Kernels


def run(page, M, N, dtype):
    x, w, b, dy = page.inputs(M, N, dtype)
    torch.autograd.grad(page.layer_norm(x, (N,), w, b), (x, w, b), dy)


def also(page, M, N, dtype):
    x, w, b, dy = page.inputs(M, N, dtype)
    for plan in page.PLANS.values():
        y = page.layer_norm(x, (N,), w, b, plan=plan)
        torch.autograd.grad(y, (x, w, b), dy)
    x = page.inputs(10, 24, torch.float32)[3]
    for kernel in (page._one_launch, page._one_launch_1):
        kernel[(10,)](x, x, x.int(), x, N=24, BLOCK=32)


KERNELS = Kernels(
    run=run,
    also=also,
    M=4096,
    N=[4096],
    dtype="float16",
    sizes={
        "float16": [1024, 4096, 4608, 8192, 8704, 15872],
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
            Look at the end.
            The exchange with ``acquire`` takes the lock; after the stores of
            the sums there is a barrier, and then the exchange with ``release``
            that frees it.
            """,
            true=lambda code: [code.count("release") == 1, not code.unsafe],
            narrow_loads=2,  # mean and rstd
            releases=1,
            spills={15872: 96},
        ),
        "_layer_norm_bwd_add_up": Kernel(
            look="""
            A program reads 256 buffers of 16 columns, by 16 bytes, and stores
            16 numbers.
            """,
            true=lambda code: [code.narrow("load") == 0],
            narrow_stores=1,  # of 16 columns
        ),
    },
)
