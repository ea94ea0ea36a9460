"""What must hold of the page "A linear layer, both passes"."""

import torch

from compiled.declared import Case, Kernel, Kernels
from conformance import Linear, LinearCase, Page

HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
EVERY = (True, True, True)


def layer(page, M, N, K, dtype, activation="gelu"):
    """Both passes of a layer on empty tensors; x and w."""

    def empty(*shape):
        t = torch.empty(shape, dtype=dtype, device=page.DEVICE)
        return t.requires_grad_()

    x, w, b = empty(M, K), empty(N, K), empty(N)
    y = page.linear(x, w, b, activation)
    torch.autograd.grad(y, (x, w, b), torch.empty_like(y))
    return x.detach(), w.detach()


def run(page, M, N, dtype):
    x, w = layer(page, M, N, 4096, dtype)
    saved = page.padded(M, N, dtype, page.DEVICE)
    page.backward(saved, x, w, saved, page._times_slope, EVERY, first=0)
    page.one_tile_a_program(x, w, group=8, stages=3)
    # The last launch of a kernel is the one that its panel shows.
    bias = torch.empty(N, dtype=dtype, device=page.DEVICE)
    page.forward(x, w, bias, page._gelu, keeps_slope=True)


def also(page, M, N, dtype):
    """What is compared, the solution of the exercise, and sizes of 1."""
    x, w = layer(page, M, N, 4096, dtype)
    for act in (page._silu, page._relu):
        page.forward(x, w, None, act)
    for name in ("one tile", "groups", "stages", *page.RUNGS):
        page.climb(x, w, name)
    saved = page.padded(M, N, dtype, page.DEVICE)
    for chain in (page._through_gelu, page._where_positive):
        page.backward(saved, x, w, saved, chain, EVERY)
    order = torch.empty(70, 2, dtype=torch.int32, device=page.DEVICE)
    for place in (page._place, page._snake):
        page._visit[(70,)](order, 10, 7, GROUP=4, PLACE=place)
    for M, N, K in ((1, 1, 1), (1, 4096, 4096), (4096, 1, 64), (4096, 64, 1)):
        layer(page, M, N, K, dtype, "relu")


def plain(page, M, N, dtype):
    """Neither bias nor activation."""
    x = torch.empty(M, 4096, dtype=dtype, device=page.DEVICE)
    w = torch.empty(N, 4096, dtype=dtype, device=page.DEVICE)
    x.requires_grad_()
    w.requires_grad_()
    y = page.linear(x, w)
    torch.autograd.grad(y, (x, w), torch.empty_like(y))


def of_relu(page, M, N, dtype):
    layer(page, M, N, 1024, dtype, "relu")


def odd(page, M, N, dtype):
    """Results that no descriptor stores."""
    layer(page, M, N - 1, 1001, dtype)


def few(page, M, N, dtype):
    """Tokens for a small tile, and several parts."""
    layer(page, 16, N, 4096, dtype)
    layer(page, 300, N, 4096, dtype)


def of_float32(page, M, N, dtype):
    layer(page, M, N, 1024, dtype)


def tf32(page, M, N, dtype):
    switch = torch.backends.cuda.matmul
    before = switch.fp32_precision
    switch.fp32_precision = "tf32"
    try:
        layer(page, M, N, 1024, dtype)
    finally:
        switch.fp32_precision = before


PUBLISHED = "2026-11-27"


def multiplies(code):
    """By Tensor Cores, with tiles from the TMA where there is one."""
    return [
        code.multiplies,
        code.fetches_tiles == (code.target in ("sm_90", "sm_100")),
        code.spills == 0 or code.target == "sm_80",
    ]


LARGE = 227 * 1024

KERNELS = Kernels(
    run=run,
    also=also,
    M=4096,
    N=[4096],
    dtype="bfloat16",
    sizes={
        "bfloat16": [1024, 14336],
        "float16": [4096],
    },
    kernels={
        "_one_tile": Kernel(
            look="""
            On sm_90 each thread copies its part of both tiles with
            ``cp.async``, and ``wgmma`` multiplies them.
            Look at how much of the loop is about addresses.
            """,
            true=lambda code: [
                code.multiplies,
                not code.fetches_tiles,
                (code.count("copy") > 0) != code.amd,
            ],
            shared=LARGE,
            copies="any",
        ),
        "_product": Kernel(
            look="""
            On sm_90 the loop has four ``wgmma``, each of which multiplies 64
            rows by 256 columns and 16 features for half of the warps, and two
            ``cp.async.bulk.tensor``, each of which fetches a tile.
            The powers of GELU stand behind the loop, and nothing is spilled.
            """,
            true=lambda code: [
                *multiplies(code),
                code.warps == 8 or code.target in ("sm_80", "gfx942"),
            ],
            shared=LARGE,
            copies="any",
            narrow_loads=32,  # the bias
            narrow_stores=64,  # where a row is no multiple of 16 bytes
        ),
        "_add_parts": Kernel(
            look="Few bytes, no product: the parts of ``db``, added up.",
            true=lambda code: [not code.multiplies],
            narrow_loads=8,
            narrow_stores=2,
        ),
        "_first_columns": Kernel(
            look="""
            On sm_90 ``wgmma`` takes its left operand from registers here:
            ``dy`` times the slope, multiplied two numbers at a time.
            """,
            true=multiplies,
            shared=LARGE,
            copies="any",
            narrow_stores=1,  # parts of db
        ),
        "_own_pass": Kernel(
            look="Two tiles in, one tile and a row of sums out.",
            true=lambda code: [not code.multiplies, code.spills == 0],
            narrow_stores=1,
        ),
    },
    cases={
        "neither bias nor activation": Case(
            run=plain, sizes={"bfloat16": [4096]}
        ),
        "relu": Case(run=of_relu, sizes={"bfloat16": [4096]}),
        "odd": Case(run=odd, sizes={"bfloat16": [4096]}),
        "few tokens": Case(run=few, sizes={"bfloat16": [4096]}),
        "float32": Case(run=of_float32, sizes={"float32": [1024]}),
        "TF32": Case(
            run=tf32,
            sizes={"float32": [4096]},
            true={"_product": lambda code: [code.multiplies]},
        ),
    },
)


def CLAIMS(figure):
    yield from ()


FACTS = {}

# Tiles of 16, so that small cases have several; parts of two steps.
SMALL = (
    (
        "(128, 256, 64, 8),\n        (128, 128, 64, 8),\n"
        "        (64, 128, 64, 4),\n        (64, 64, 128, 4),",
        "(32, 32, 16, 8),\n        (16, 32, 16, 8),\n        (16, 16, 16, 4),",
    ),
    ("(128, 128, 32, 8), (64, 64, 32, 4)", "(32, 32, 16, 8), (16, 16, 16, 4)"),
    ('"ieee": ((64, 64, 16, 4),)', '"ieee": ((16, 32, 16, 4),)'),
    ("tile = 64, 128\n", "tile = 16, 32\n"),
    ("FIRST_COLUMNS = 4 ", "FIRST_COLUMNS = 2 "),
    ("steps // 4)", "steps // 2)"),
)


def at(lead, ins, outs, dtype=HALF, **more):
    return LinearCase(lead, ins, outs, dtype, **more)


PAGE = Page(
    __file__,
    Linear(),
    {"linear": lambda page: page.linear},
    quick=(),
    forms={"small": SMALL, "as it is": ()},
    cases=(
        at((150,), 24, 40, input="columns"),
        at((2, 3), 37, 24, form="as it is"),
    ),
    repeatable=("linear",),
    prints={
        "errors below 1%": 4,
        "Timing needs a GPU": 8,
        "each tile once: True": 2,
    },
)
