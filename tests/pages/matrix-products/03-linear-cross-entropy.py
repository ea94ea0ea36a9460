"""What must hold of the page "A loss without its logits"."""

import pytest
import torch

from conformance import LinearCrossEntropy, LinearCrossEntropyCase, Page

HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32


def step(
    page, tokens, features, classes, dtype, bias=False, weight=False, **more
):
    def empty(*shape):
        t = torch.empty(shape, dtype=dtype, device=page.DEVICE)
        return t.requires_grad_()

    x, w = empty(tokens, features), empty(classes, features)
    b = empty(classes) if bias else None
    target = torch.empty(tokens, dtype=torch.int64, device=page.DEVICE)
    given = [t for t in (x, w, b) if t is not None]
    if weight:
        more["weight"] = empty(classes).detach()
    loss = page.linear_cross_entropy(x, w, target, linear_bias=b, **more)
    torch.autograd.grad(loss, given, torch.empty_like(loss))


def run(page, M, N, dtype, features=4096, **more):
    step(page, M, features, N, dtype, **more)


# Tiles of 16 and 32, so that small cases have several, and short chunks.
SMALL = (
    ("BLOCK = 64 ", "BLOCK = 16 "),
    ("LEAST = 4096 ", "LEAST = 16 "),
    ("(128, 256, 64, 8)", "(32, 32, 16, 8)"),
    ("(128, 128, 64, 4)", "(16, 32, 16, 4)"),
    ("(128, 128, 32, 8)", "(16, 32, 16, 8)"),
    ("(64, 64, 16, 4)", "(16, 32, 16, 4)"),
    ("length < 2048", "length < 40"),
)


def at(lead=(40,), ins=40, classes=99, dtype=HALF, **more):
    return LinearCrossEntropyCase(lead, ins, classes, dtype, **more)


PAGE = Page(
    __file__,
    LinearCrossEntropy(),
    {"linear_cross_entropy": lambda page: page.linear_cross_entropy},
    forms={"small": SMALL, "as it is": ()},
    cases=(
        at((150,), 40, 99),
        at((150,), 40, 99, recompute=True),
        at((150,), 40, 101, reduction="none", weight=True, smooth=0.1),
        at((150,), 40, 99, twice=True, ignores="none"),
        at((70,), 77, 300, form="as it is"),
        at((70,), 77, 300, form="as it is", recompute=True),
    ),
    full=tuple(
        at((tokens,), ins, classes, dtype, recompute=again, **more)
        for tokens, ins, classes, more in (
            (1000, 768, 32000, {}),
            (9000, 256, 5003, {"smooth": 0.1, "weight": True}),
            (600, 1001, 50257, {"reduction": "none"}),
            (5000, 4096, 1024, {"large": 10.0, "upstream": 1.0}),
        )
        for dtype in (HALF, BRAIN, SINGLE)
        for again in (False, True)
    ),
    repeatable=("linear_cross_entropy",),
    repeated=(
        at((9000,), 256, 4096, BRAIN),
        at((9000,), 256, 4096, BRAIN, recompute=True),
        at((2100,), 1024, 8192, BRAIN, reduction="none"),
    ),
    graphs=(
        at((300,), 264, 1000),
        at((300,), 264, 1000, recompute=True),
    ),
    huge=(4096,),
    elsewhere="not the current GPU",
    sanitizers=("memcheck",),
    sanitized=(
        at((300,), 264, 1000, BRAIN),
        at((130,), 77, 301, HALF, recompute=True, weight=True, smooth=0.1),
        at((70,), 40, 99, SINGLE, reduction="none"),
    ),
)


@pytest.fixture
def page_small():
    return PAGE.load("small")


def exact_gradients(page, x, w, target):
    """Of the sum of all losses, in float64."""
    leaves = [t.detach().double().requires_grad_() for t in (x, w)]
    loss = torch.nn.functional.cross_entropy(
        leaves[0] @ leaves[1].T, target, reduction="sum"
    )
    return torch.autograd.grad(loss, leaves)


def skipped(page, skip_below, recompute, tokens=150, classes=300, spread=9.0):
    """Gradients of a sum of losses over a sharp distribution, ours and exact
    ones, and the inputs."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, 24, generator=generator)
    w = torch.randn(classes, 24, generator=generator)
    # Logits fall with the number of the class.
    x[:, 0] = 1
    w[:, 0] = -spread * torch.arange(1, classes + 1).log()
    target = torch.randint(8, (tokens,), generator=generator)
    x, w = (t.to(page.DEVICE).half().requires_grad_() for t in (x, w))
    target = target.to(page.DEVICE)
    loss = page.linear_cross_entropy(
        x, w, target, reduction="sum", skip_below=skip_below,
        recompute=recompute,
    )  # fmt: skip
    found = torch.autograd.grad(loss, (x, w))
    return found, exact_gradients(page, x, w, target), x, w


@pytest.mark.parametrize("recompute", [False, True])
def test_what_is_left_out_is_as_small_as_promised(page_small, recompute):
    """A token loses at most skip_below for each class, and a class as much
    for each token; and there is something to leave out."""
    page = page_small
    unit = torch.finfo(HALF).eps / 2
    skip_below = unit / 300
    (dx, dw), (exact_dx, exact_dw), x, w = skipped(page, skip_below, recompute)
    kept = skipped(page, 0.0, recompute)[0]
    assert not all(map(torch.equal, (dx, dw), kept)), "nothing was left out"
    # What rounds in any case: powers, gradients and results.
    rounding = 4 * unit
    lost_dx = 300 * skip_below * w.abs().max(0).values.double()
    most = lost_dx + rounding * (2 * w.abs().max(0).values.double())
    assert ((dx - exact_dx).abs() <= most).all()
    lost_dw = skip_below * x.abs().sum(0).double()
    most = lost_dw + rounding * x.abs().sum(0).double()
    assert ((dw - exact_dw).abs() <= most).all()


@pytest.mark.parametrize("recompute", [False, True])
def test_all_may_be_left_out(page_small, recompute):
    """If every block is, gradients are 0, and not what was in memory."""
    (dx, dw), _, _, _ = skipped(page_small, 0.9999, recompute, spread=0.0)
    assert not dx[:128].isnan().any() and not dw.isnan().any()
