"""What must hold of the page "Layer norm over several GPUs"."""

import torch

from compiled.declared import Kernel, Kernels


def run(page, M, N, dtype):
    x, dy = torch.empty(2, M, N, dtype=dtype, device=page.DEVICE)
    w, b = torch.empty(2, N, dtype=dtype, device=page.DEVICE)
    _, stats = page.forward(x, w, b, 1e-5)
    page.forward(x, w, b, 1e-5, (N,))
    page.backward(dy, x, w, stats)
    page.backward(dy, x, w, stats, (N,))


def also(page, M, N, dtype):
    x, dy = torch.empty(2, 5, 1000, dtype=dtype, device=page.DEVICE)
    w, b = torch.empty(2, 1000, dtype=dtype, device=page.DEVICE)
    parts = torch.empty(2, 2, 5, device=page.DEVICE)
    y, stats = torch.empty_like(x), parts[0]
    given = x, w, b, y, stats, parts, 5, 1e-5, 1000, (1000, 24)
    page._forward[(5,)](*given, **page.lanes(1000))
    page.backward(dy, x, w, stats)


KERNELS = Kernels(
    run=run,
    also=also,
    M=4096,
    N=[4096, 32768],
    dtype="bfloat16",
    sizes={
        "bfloat16": [1024, 2048, 4096, 8192, 16384, 32768],
        "float16": [4096],
        "float32": [2048, 8192],
    },
    kernels={
        "_part": Kernel(
            look="""
            The row is loaded once, by 16 bytes.
            Threads wait for each other in three sums, and two numbers are
            stored.
            """,
            true=lambda code: [
                code.narrow("load") == 0,
                len(code.lines("shuffle")) == 3,
            ],
            narrow_stores=2,  # mean and M2
        ),
        "_forward": Kernel(
            look="""
            Shown as it merges parts: no thread waits for another, as no sum is
            left.
            """,
            true=lambda code: [code.count("shuffle") == 0],
            narrow_loads=2,  # mean and M2 of a part
            narrow_stores=2,  # mean and rstd
        ),
        "_row_sums": Kernel(
            look="""
            ``dy``, ``w`` and ``x`` are read once, by 16 bytes; two sums are
            stored.
            """,
            true=lambda code: [len(code.lines("shuffle")) == 2],
            narrow_loads=2,  # mean and rstd
            narrow_stores=2,
        ),
        "_backward": Kernel(
            look="""
            Shown with sums that are known: no thread waits for another within
            a row, and loads of the rows that follow are asked for ahead.
            """,
            true=lambda code: [(code.count("copy") > 0) != code.amd],
            true_at={16384: lambda code: [len(code.lines("load")) == 4]},
            copies=True,
            narrow_copies=15,  # w, and four numbers of each row
            spills={2048: 8, 8192: 8},  # in float32
        ),
    },
)
