"""What must hold of the page "Weight gradients: who adds up the rows?"."""

import torch

from compiled.declared import Kernel, Kernels


def run(page, M, N, dtype):
    x, w, b, dy = (t.detach() for t in page.inputs(M, N, dtype))
    mean, rstd = torch.empty(2, M, device=page.DEVICE)
    for name in "columns", "split", "atomics", "triton":
        page.DESIGNS[name](dy, x, w, mean, rstd, dtype)
    page.layer_norm(x, (N,), w, b)


def also(page, M, N, dtype):
    tensors = page.given(10, 24, torch.float32)
    for keep in page._store, page._atomic_add, page._add_to_few:
        page.by_rows(*tensors, 6, 4, torch.empty(3, 2, 24), keep)


KERNELS = Kernels(
    run=run,
    also=also,
    M=4096,
    N=[4096],
    dtype="float16",
    sizes={
        "float16": [1024, 1536, 4096, 4608, 8192, 8704, 12288],
        "bfloat16": [4096],
        "float32": [1024, 4096],
    },
    kernels={
        "_layer_norm_bwd": Kernel(
            look="""
            Shown with a buffer for each program.
            The loop loads ``x``, ``dy`` and ``w`` by 16 bytes and stores
            ``dx``; the two sums stay in registers and are stored once, after
            it.
            """,
            true=lambda code: [
                code.count("atomic") == 0,
                code.loaded >= 3 * 2 * 4096,
            ],
            narrow_loads=2,  # mean and rstd
        ),
        "_layer_norm_bwd_columns": Kernel(
            look="""
            Shown split over rows.
            A warp reads a few rows of 32 columns, and threads add up the rows
            of a tile only at the end: look for the shuffles after the loop.
            """,
            true=lambda code: [
                code.count("load", 16) > 0 or code.amd,
                code.count("shuffle") > 0,
            ],
            narrow_loads=64,  # mean and rstd of the rows of a tile
            narrow_stores=2,  # one column a thread
        ),
        "_layer_norm_bwd_add_up": Kernel(
            look="""
            16 columns of all buffers a program: 64 bytes side by side, by 16
            bytes.
            """,
            true=lambda code: [
                code.count("load", 16) > 0,
                code.narrow("load") == 0,
            ],
            narrow_loads=1,  # of few buffers
            narrow_stores=1,  # of 16 columns
        ),
        "_layer_norm_fwd": Kernel(
            look="``x``, ``w`` and ``b`` are read once, all by 16 bytes.",
            true=lambda code: [
                code.loaded == 3 * 2 * 4096,
                code.narrow("load") == 0,
            ],
            narrow_stores=2,  # mean and rstd
        ),
    },
)
