"""What must hold of the page "A linear layer, both passes"."""

from functools import partial

import torch

from compiled.declared import Case, Kernel, Kernels
from conformance import Linear, LinearCase, Page

HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32


def run(page, M, N, dtype, activation="gelu", K=4096):
    """Both passes of a layer; and the rungs of the ladder."""

    def empty(*shape):
        t = torch.empty(*shape, dtype=dtype, device=page.DEVICE)
        return t.requires_grad_()

    x, w, b = empty(M, K), empty(N, K), empty(N)
    if dtype != SINGLE:
        for rung in page.RUNGS:
            page.by_address(x, w, rung)
    y = page.linear(x, w, b, activation)
    torch.autograd.grad(y, (x, w, b), torch.empty_like(y))


def of_few(page, M, N, dtype):
    """16 tokens: small tiles, in parts."""
    run(page, 16, N, dtype)


def of_one_layout(page, M, N, dtype, activation):
    """Weights that lie by columns, and a dy that does."""

    def empty(*shape):
        t = torch.empty(*shape, dtype=dtype, device=page.DEVICE)
        return t.requires_grad_()

    x, w, b = empty(M, 4096), empty(4096, N).mT, empty(N)
    y = page.linear(x, w, b, activation)
    dy = torch.empty(N, M, dtype=dtype, device=page.DEVICE).mT
    torch.autograd.grad(y, (x, w, b), dy)


def plain(page, M, N, dtype):
    run(page, M, N, dtype, None)


def with_relu(page, M, N, dtype):
    run(page, M, N, dtype, "relu")


def with_silu(page, M, N, dtype):
    run(page, M, N, dtype, "silu")


def by_columns(page, M, N, dtype):
    of_one_layout(page, M, N, dtype, None)


def small(page, M, N, dtype):
    """4096 tokens of 1024 features, and layers with fewer tiles than SMs."""
    run(page, 4096, N, dtype, K=1024)
    run(page, 512, 1024, dtype, K=1024)


def all_rungs(page, M, N, dtype):
    """The rungs that are the kernel of all products, with other plans."""
    x = torch.empty(N, N, dtype=dtype, device=page.DEVICE)
    for rung in page.NAMES:
        if rung != "cublas":
            page.by_rung(rung)(x, x)


def also(page, M, N, dtype):
    """Where float32 is not cut to TF32, and where it is."""
    few = partial(run, page, 16, 512, SINGLE, K=512)
    few(activation=None)
    few(activation="gelu")


PUBLISHED = "2026-11-26"


def multiplies(code):
    """By Tensor Cores, with tiles from the TMA where there is one."""
    return [
        code.multiplies,
        code.fetches_tiles == (code.target in ("sm_90", "sm_100")),
    ]


KERNELS = Kernels(
    run=run,
    also=also,
    M=8192,
    N=[4096],
    dtype="bfloat16",
    sizes={"bfloat16": [1000, 4096, 14336], "float16": [4096]},
    kernels={
        "_linear_fwd_by_address": Kernel(
            look="""
            The last rung that computes addresses: three stages, so loads are
            asynchronous copies, ``cp.async``.
            """,
            true=lambda code: [code.multiplies],
            copies="any",
        ),
        "_linear_product": Kernel(
            look="""
            On sm_90 one instruction, ``wgmma``, multiplies for 4 warps, and
            ``cp.async.bulk.tensor`` fetches a tile.
            Nothing is spilled, though the sums take half of the registers.
            """,
            true=multiplies,
            shared=227 * 1024,
            copies="any",
            narrow_loads=64,  # the bias, once for a tile
            narrow_stores=2,  # db
        ),
        "_linear_add_parts": Kernel(
            look="Sums of parts, in the order of their numbers.",
            true=lambda code: [not code.multiplies],
        ),
    },
    cases={
        "no activation": Case(run=plain, sizes={"bfloat16": [4096]}),
        "relu": Case(run=with_relu, sizes={"bfloat16": [4096]}),
        "silu": Case(run=with_silu, sizes={"bfloat16": [4096]}),
        "by columns": Case(run=by_columns, sizes={"bfloat16": [4096]}),
        "few tokens": Case(run=of_few, sizes={"bfloat16": [4096]}),
        "small": Case(run=small, sizes={"bfloat16": [4096]}),
        "rungs": Case(run=all_rungs, sizes={"bfloat16": [8192]}),
    },
)

# Tiles of 16, so that small cases have several; 4 programs run at a time.
SMALL = (
    (
        "tile_m, tile_n, tile_k, stages, warps = 64, 64, 16, 3, 8",
        "tile_m, tile_n, tile_k, stages, warps = 16, 32, 16, 3, 8",
    ),
    (
        "tile_m, tile_n, tile_k, stages, warps = 64, 128, 64, 4, 4",
        "tile_m, tile_n, tile_k, stages, warps = 16, 16, 32, 4, 4",
    ),
    (
        "tile_m, tile_n, tile_k, stages, warps = 128, 256, 64, 4, 8",
        "tile_m, tile_n, tile_k, stages, warps = 16, 32, 16, 4, 8",
    ),
    (
        "tiles_of_256 = triton.cdiv(M, 128) * triton.cdiv(N, 256)",
        "tiles_of_256 = triton.cdiv(M, 16) * triton.cdiv(N, 32)",
    ),
    ("elif M <= 64:", "elif M <= 20:"),
    ("triton.cdiv(K, tile_k) // 4", "triton.cdiv(K, tile_k)"),
    ('"GROUP": 8,', '"GROUP": 2,'),
)


def layer(tokens, features_in, features_out, dtype=HALF, **more):
    return LinearCase((tokens,), features_in, features_out, dtype, **more)


PAGE = Page(
    __file__,
    Linear(),
    {"linear": lambda page: page.linear},
    quick=(),
    forms={"small": SMALL, "as it is": ()},
    cases=(
        layer(300, 200, 520, activation="gelu"),
        layer(150, 150, 150, SINGLE, activation="silu", large=30.0),
        layer(16, 1000, 40, activation="gelu"),
        layer(700, 20, 30, activation="relu"),
    ),
    full=(
        *(
            layer(*sizes, dtype, activation=activation)
            for sizes in (
                (8192, 4096, 4096),
                (4096, 1024, 4096),
                (1000, 2077, 3001),
                (16, 4096, 4096),
                (1, 4096, 1000),
                (20000, 64, 96),
            )
            for dtype, activation in (
                (BRAIN, "gelu"),
                (HALF, None),
                (HALF, "relu"),
            )
        ),
        layer(1000, 500, 700, SINGLE, activation="silu"),
    ),
    repeatable=("linear",),
    repeated=(
        layer(1000, 1500, 700, activation="gelu"),
        layer(16, 4096, 512, activation="gelu"),
    ),
    graphs=(
        layer(300, 200, 520, activation="gelu"),
        layer(16, 1000, 40),
    ),
    trains=("linear",),
    huge=(4096,),
    elsewhere="not the current GPU",
    sanitizers=("memcheck", "racecheck"),
    sanitized=(
        layer(37, 51, 300, activation="gelu"),
        layer(300, 200, 520, activation="relu"),
        layer(16, 1000, 40),
    ),
    prints={
        "errors below 1%": 3,
        "Timing needs a GPU": 4,
        "exercise 1: right": 1,
        "exercise 1: not yet": 1,
    },
    mutants={},
    kills=(),
)
