"""What must hold of the page "Loads in flight"."""

import torch

from compiled.declared import Kernel, Kernels


def run(page, M, N, dtype):
    x, w, b, dy = page.inputs(M, N, dtype)
    torch.autograd.grad(page.layer_norm(x, (N,), w, b), (x, w, b), dy)
    page._read[(page.NUM_SMS,)](
        x.int(), x.int(), 100, LANES=16384, num_warps=16
    )


def also(page, M, N, dtype):
    x, w, b, dy = page.inputs(M, N, dtype)
    for plan in page.PLANS.values():
        y = page.layer_norm(x, (N,), w, b, plan=plan)
        torch.autograd.grad(y, (x, w, b), dy)
    for kernel in (page._read_two, page._read_two_1):
        kernel[(1,)](x.int(), x.int(), 3, LANES=4)


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
            On NVIDIA GPUs no load of 16 bytes is left: rows come by
            asynchronous copies into shared memory, some before the loop and
            some in it.
            """,
            true=lambda code: [(code.count("copy", 16) > 0) != code.amd],
            narrow_copies=10,  # mean and rstd
            narrow_loads=2,
            copies="any",  # one stage above 8192 columns
            shared=232448,
            spills={15872: 144},  # as the page says: 16384 lanes
        ),
        "_layer_norm_bwd_add_up": Kernel(
            look="""
            A program reads 256 rows of sums of 16 columns, by 16 bytes.
            """,
            true=lambda code: [code.narrow("load") == 0],
            narrow_stores=1,  # of 16 columns
        ),
        "_read": Kernel(
            look="""
            A loop of loads of 4 bytes; where each reads is the value of the
            one before.
            """,
            true=lambda code: [code.count("barrier") == 0, code.spills == 0],
            narrow_loads=32,  # 16384 lanes, 512 threads
            narrow_stores=32,
        ),
    },
)
