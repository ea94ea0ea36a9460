"""What must hold of the page "What a second pass costs"."""

import torch

from compiled.declared import Kernel, Kernels


def run(page, M, N, dtype):
    x, w, b, dy = page.inputs(M, N, dtype)
    for design in ("one kernel", "triton"):
        y = page.layer_norm(x, (N,), w, b, design=design)
        torch.autograd.grad(y, (x, w, b), dy)


def also(page, M, N, dtype):
    x, _w, b, dy = page.inputs(M, N, dtype)
    for design in page.DESIGNS:
        y = page.layer_norm(x, (N,), None, b, design=design)
        torch.autograd.grad(y, (x, b), dy)


KERNELS = Kernels(
    run=run,
    also=also,
    M=4096,
    N=[4096],
    dtype="float16",
    sizes={
        "float16": [1024, 2048, 4096, 4608, 8192, 15872],
        "bfloat16": [4096],
        "float32": [512, 1024, 2048],
    },
    kernels={
        "_layer_norm_bwd_dx": Kernel(
            look="""
            There are two sweeps in the code and one here: ``x``, ``dy`` and
            ``w`` are read once, by 16 bytes.
            """,
            true=lambda code: [
                code.count("load", 16) * 16 * code.lanes * code.warps
                == 3 * 2 * 4096
            ],
            narrow_loads=2,  # mean and rstd
        ),
        "_layer_norm_bwd_columns": Kernel(
            look="""
            Threads add up the rows of a tile only at the end: look for the
            shuffles after the loop.
            """,
            true=lambda code: [
                code.count("load", 16) > 0,
                code.count("shuffle") > 0,
            ],
            narrow_loads=64,  # mean and rstd of the rows of a tile
            narrow_stores=2,  # one column a thread
        ),
        "_layer_norm_bwd_add_up": Kernel(
            look="""
            A program reads 64 rows of sums of 16 columns, by 16 bytes.
            """,
            true=lambda code: [
                code.loaded == 64 * 16 * 4,
                code.narrow("load") == 0,
            ],
            narrow_stores=1,  # of 16 columns
        ),
        "_layer_norm_bwd_one": Kernel(
            look="""
            The kernel of page 04: on NVIDIA GPUs no load of 16 bytes is left,
            for rows come by asynchronous copies into shared memory.
            """,
            true=lambda code: [(code.count("copy", 16) > 0) != code.amd],
            narrow_copies=10,  # mean and rstd
            narrow_loads=2,
            copies="any",  # one stage above 8192 columns
            shared=232448,
            spills={15872: 144},
        ),
        "_layer_norm_fwd": Kernel(
            look="""
            There are three sweeps in the code and one here: ``x``, ``w`` and
            ``b`` are read once, all by 16 bytes.
            """,
            true=lambda code: [
                code.loaded == 3 * 2 * 4096,
                code.narrow("load") == 0,
            ],
            narrow_stores=2,  # mean and rstd
        ),
    },
)
