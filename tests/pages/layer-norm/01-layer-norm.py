"""What must hold of the page "Layer normalization, both passes"."""

import torch

from compiled.declared import Kernel, Kernels


def run(page, M, N, dtype):
    x, w, b, dy = page.inputs(M, N, dtype)
    page.in_sweeps(x, w, b, 1e-5)
    y = page.layer_norm(x, (N,), w, b)
    torch.autograd.grad(y, (x, w, b), dy)


KERNELS = Kernels(
    run=run,
    M=4096,
    N=[4096, 15872],
    dtype="float16",
    sizes={
        "float16": [1024, 1536, 4096, 4608, 8192, 8704, 12288, 15872],
        "bfloat16": [4096, 8192],
        "float32": [1024, 4096, 8192],
    },
    kernels={
        "_layer_norm_fwd_streaming": Kernel(
            look="""
            Look for the sweeps: each has its own loads of ``x``, all of them
            by 16 bytes.
            Where the row is one tile, the first two are one.
            """,
            true=lambda code: [
                code.narrow("load") == 0,
                len(code.lines("load")) == 4,
            ],
            true_at={
                15872: lambda code: [
                    code.narrow("load") == 0,
                    len(code.lines("load")) == 5,
                ]
            },
            narrow_stores=2,  # mean and rstd
        ),
        "_layer_norm_fwd": Kernel(
            look="""
            ``x``, ``w`` and ``b`` are read once, all of them by 16 bytes.
            Threads wait for each other only in the two sums: look for the
            shuffles and the barriers.
            """,
            true=lambda code: [
                code.loaded == 3 * 2 * 4096,
                code.narrow("load") == 0,
                len(code.lines("shuffle")) == 2,
                code.lines("barrier") <= code.lines("shuffle"),
            ],
            narrow_stores=2,  # mean and rstd
        ),
        "_layer_norm_bwd": Kernel(
            look="""
            The two sums ``dw`` and ``db`` stay in registers over all rows of a
            program, and are stored once, at the end.
            At 15872 columns not all of them fit beside the row: a part is
            spilled.
            """,
            true=lambda code: [code.count("release") == 0, code.spills == 0],
            true_at={15872: lambda code: [code.spills > 0]},
            narrow_loads=2,  # mean and rstd
            spills={15872: 128},
        ),
        "_layer_norm_bwd_add_up": Kernel(
            look="""
            A program reads 256 buffers at a time, 16 columns of each, by 16
            bytes, and stores 16 sums.
            """,
            true=lambda code: [
                code.loaded == 256 * 16 * 4,
                code.narrow("load") == 0,
            ],
            narrow_stores=1,  # of 16 columns
        ),
    },
)
