"""What must hold of the page "A linear layer, both passes"."""

import pytest
import torch
import torch.nn.functional as F

from compiled.declared import Case, Kernel, Kernels
from conformance import Linear, LinearCase, Page

HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
EVERY = (True, True, True)


def layer(page, M, N, K, dtype, activation="gelu"):
    """Both passes of a layer on empty tensors."""

    def empty(*shape):
        t = torch.empty(shape, dtype=dtype, device=page.DEVICE)
        return t.requires_grad_()

    x, w, b = empty(M, K), empty(N, K), empty(N)
    y = page.linear(x, w, b, activation)
    torch.autograd.grad(y, (x, w, b), torch.empty_like(y))
    return x.detach(), w.detach(), b.detach()


def run(page, M, N, dtype):
    x, w, b = layer(page, M, N, 4096, dtype)
    saved = page.padded(M, N, dtype, page.DEVICE)
    page.backward(saved, x, w, saved, page._times_slope, EVERY, first=0)
    page.one_tile_a_program(x, w, group=8, stages=3)
    # The last launch of a kernel is the one that its panel shows.
    page.forward(x, w, b, page._gelu, keeps_slope=True)


def also(page, M, N, dtype):
    """What is compared, and the solution of the exercise."""
    x, w, b = layer(page, M, N, 4096, dtype, "silu")
    for name in ("one tile", "groups", "stages", *page.RUNGS):
        page.climb(x, w, name)
    saved = page.padded(M, N, dtype, page.DEVICE)
    page.backward(saved, x, w, saved, page._through_gelu, EVERY)
    order = torch.empty(70, 2, dtype=torch.int32, device=page.DEVICE)
    for place in (page._place, page._snake):
        page._visit[(70,)](order, 10, 7, GROUP=4, PLACE=place)
    layer(page, 16, 4096, 4096, dtype)


def plain(page, M, N, dtype):
    """Neither bias nor activation: results alone."""
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


PUBLISHED = "2026-11-27"

KERNELS = Kernels(
    run=run,
    also=also,
    M=4096,
    N=[4096],
    dtype="bfloat16",
    sizes={
        "bfloat16": [1024, 4096, 14336],
        "float16": [4096],
        "float32": [1024],
    },
    kernels={
        "_one_tile": Kernel(look="Look.", true=lambda code: []),
        "_product": Kernel(look="Look.", true=lambda code: []),
        "_add_parts": Kernel(look="Look.", true=lambda code: []),
        "_first_columns": Kernel(look="Look.", true=lambda code: []),
        "_own_pass": Kernel(look="Look.", true=lambda code: []),
    },
    cases={
        "neither bias nor activation": Case(
            run=plain, sizes={"bfloat16": [4096]}
        ),
        "relu": Case(run=of_relu, sizes={"bfloat16": [4096]}),
        "odd": Case(run=odd, sizes={"bfloat16": [4096]}),
        "few tokens": Case(run=few, sizes={"bfloat16": [4096]}),
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
