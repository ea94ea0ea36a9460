"""What must hold of the page "Two sweeps, and a variance that stays right"."""

import math

import torch

from compiled.declared import Case, Kernel, Kernels


def run(page, M, N, dtype):
    x, w, b, dy = page.inputs(M, N, dtype)
    torch.autograd.grad(page.layer_norm(x, (N,), w, b), (x, w, b), dy)
    for kernel in page._rstd_by_squares, page._rstd_by_welford:
        kernel[(M,)](x.float(), w.float(), N, 4096)


def also(page, M, N, dtype):
    x, w, b, _dy = page.inputs(M, N, dtype)
    page.forward(x, w, b, 1e-5, caches=False)
    x = page.inputs(3, 1000, torch.float32)[0]
    page._rstd_shifted[(3,)](x, x, 1000, 256)


def any_width(page, M, N, dtype):
    x, w, b, dy = page.inputs(M, N, dtype)
    torch.autograd.grad(page.layer_norm(x, (N,), w, b), (x, w, b), dy)


KERNELS = Kernels(
    run=run,
    also=also,
    M=4096,
    N=[32768, 65536],
    dtype="float16",
    sizes={
        "float16": [8192, 16384, 32768, 49152, 65536, 100000, 131072, 1048576],
        "bfloat16": [32768, 65536],
        "float32": [8192, 32768, 65536],
    },
    kernels={
        "_rstd_by_squares": Kernel(
            look="""
            One loop, one load in it: ``x`` and its square are added up in one
            sweep.
            """,
            true=lambda code: [
                code.count("load", 16) == code.count("load"),
                len(code.lines("load")) == 1,
            ],
            narrow_stores=1,  # rstd
        ),
        "_rstd_by_welford": Kernel(
            look="""
            The same loads; between them a mean and ``m2`` for each lane.
            """,
            true=lambda code: [
                code.count("load", 16) == code.count("load"),
                len(code.lines("load")) == 1,
            ],
            narrow_stores=1,  # rstd
        ),
        "_layer_norm_fwd_sweeps": Kernel(
            look="""
            ``x`` is loaded in two loops, the second time from a cache if it is
            still there; all loads are by 16 bytes.
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
        "any": Case(
            run=any_width,
            sizes={
                "float16": [1151, 20001, 1000003],
                "float64": [32768, 65536],
            },
            limits={
                "narrow_loads": math.inf,  # rows that begin anywhere
                "narrow_stores": math.inf,
                "narrow_copies": 12,
                "spills": 112,
            },
        ),
    },
)
