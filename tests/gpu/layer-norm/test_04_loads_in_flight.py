"""Loads in flight: on a GPU, at full size."""

import functools

import pytest
import torch
import torch.nn.functional as F

import layer_norm_cases as cases
import sanitizer
from layer_norm_cases import Case
from tutorial import load

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

NAME = "layer-norm/04-loads-in-flight"
page = load(NAME)


def run(case, plan=page.best_plan):
    function = functools.partial(page.layer_norm, plan=plan)
    cases.run(function, case, page.DEVICE)


@pytest.mark.parametrize("plan", page.PLANS.values())
@pytest.mark.parametrize("N", [1000, 1023, 4096, 4608, 16384])
def test_full_size(plan, N):
    # More rows than programs, but few: random numbers take most of the time.
    run(Case((1151,), (N,), torch.float16), plan)
    run(Case((300,), (N,), torch.bfloat16), plan)
    run(Case((300,), (N,), torch.float32), plan)


def test_float64():
    for N in 33, 1151, 8192:
        run(Case((300,), (N,), torch.float64))


@pytest.mark.parametrize("layout", cases.LAYOUTS)
@pytest.mark.parametrize("which", ["x", "dy", "parameters"])
def test_layouts(which, layout):
    run(Case((20, 30), (40, 25), torch.float16, **{which: layout}))


@pytest.mark.parametrize("lead", [(), (0,), (1,), (2, 1, 3)])
def test_dimensions(lead):
    run(Case(lead, (9,)))


@pytest.mark.parametrize("N", [1024, 4608, 8192, 15872])
def test_deterministic(N):
    """100 times the same bits, whatever the order of the programs."""
    for plan in page.PLANS.values():
        x, w, b, dy = page.inputs(4096, N, torch.float32)
        y = page.layer_norm(x, (N,), w, b, plan=plan)

        def again(y=y, leaves=(x, w, b), dy=dy):
            found = torch.autograd.grad(y, leaves, dy, retain_graph=True)
            return torch.cat([t.flatten() for t in found])

        first = again()
        assert all(torch.equal(again(), first) for _ in range(100))


def test_every_knob_is_right():
    for N in page.WIDTHS:
        tensors = page.given(1151, N, torch.float16)
        dy, x, _, mean, rstd = (t.double() for t in tensors)
        x_hat = (x - mean) * rstd  # mean and rstd are columns
        expected = torch.stack([(dy * x_hat).sum(0), dy.sum(0)])
        few, warps, _ = page.best_plan(N)
        for plan in (
            page.one_stage(N),
            (8, 8, 1),
            *((few, warps, stages) for stages in (2, 3, 4, 5)),
        ):
            _, out = page.backward(*tensors, plan, torch.float32)
            difference = (out - expected).norm()
            assert difference <= 1e-5 * expected.norm(), (N, plan)


def compiled(N, warps, stages):
    dy, x, w, mean, rstd = page.given(64, N, torch.float16)
    sums = torch.empty(8, 2, N, device="cuda")
    return page._layer_norm_bwd[(8,)](
        dy, x, w, mean, rstd, torch.empty_like(x), sums, 64, N, N, stages,
        num_warps=warps,
    )  # fmt: skip


def test_compiled_as_the_page_says():
    """Four numbers a lane and some 32 more a thread; copies ahead."""
    for N in page.WIDTHS:
        _, warps, _ = page.one_stage(N)
        built = compiled(N, warps, 1)
        assert built.n_regs == pytest.approx(32 + N // (8 * warps), rel=0.25)
        assert built.n_spills == 0
        assert "cp.async.c" not in built.asm["ptx"]
        assert "cp.async.c" in compiled(N, warps, 4).asm["ptx"]
    assert compiled(8192, 4, 1).n_spills > 0


def test_reading():
    """Every program has read its part of the last rows."""
    x = torch.zeros(50, 7, 1024, dtype=torch.int32, device="cuda")
    for steps in 49, 50:
        page._read[(7,)](x, end := x[0].clone(), steps, LANES=1024)
        expected = torch.arange(x[0].numel(), device="cuda") + steps * 7168
        assert torch.equal(end.flatten(), expected.int())


def test_more_than_2_31_elements():
    M, N = 2**31 // 8192 + 5, 8192
    x = torch.empty(M, N, dtype=torch.float16, device="cuda")
    dy = torch.empty_like(x)
    for part in x, dy:
        for rows in part.split(16384):
            rows.normal_()
    x.requires_grad_()
    w, b = torch.rand(2, N, dtype=torch.float16, device="cuda")
    w, b = w.requires_grad_(), b.requires_grad_()
    y = page.layer_norm(x, (N,), w, b)
    dx, dw, db = torch.autograd.grad(y, (x, w, b), dy)
    sums = torch.zeros(2, N, dtype=torch.float64, device="cuda")
    for X, DY in zip(x.detach().split(8192), dy.split(8192), strict=True):
        X, DY = X.double(), DY.double()
        sums += torch.stack([(DY * F.layer_norm(X, (N,))).sum(0), DY.sum(0)])
    for found, total in zip((dw, db), sums, strict=True):
        assert (found - total).norm() <= 2**-11 * total.norm()
    X = x.detach()[-9:].double().requires_grad_()
    expected = F.layer_norm(X, (N,), w.double(), b.double())
    (grad,) = torch.autograd.grad(expected, X, dy[-9:].double())
    assert (y[-9:] - expected).norm() <= 2**-11 * expected.norm()
    assert (dx[-9:] - grad).norm() <= 2**-11 * grad.norm()


def losses(norm, steps=20):
    torch.manual_seed(0)
    layers = [torch.nn.Linear(96, 96, device="cuda") for _ in range(3)]
    w = torch.ones(96, device="cuda", requires_grad=True)
    b = torch.zeros(96, device="cuda", requires_grad=True)
    parameters = [w, b, *(p for f in layers for p in f.parameters())]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    x = torch.randn(256, 96, device="cuda")
    found = []
    for _ in range(steps):
        h = x
        for layer in layers:
            h = h + F.gelu(layer(norm(h, (96,), w, b)))
        loss = F.mse_loss(h, x.roll(1, 0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return torch.stack(found)


def test_trains_like_pytorch():
    ours, theirs = losses(page.layer_norm), losses(F.layer_norm)
    assert theirs[-1] < 0.9 * theirs[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=0)


SANITIZED = """
import functools
import torch
from tutorial import load
page = load("layer-norm/04-loads-in-flight")
for plan in page.best_plan, page.one_stage:
    f = functools.partial(page.layer_norm, plan=plan)
    page.check(f, 700, 1001, torch.float16)
page.exercise_1(page._read_two_1)
torch.cuda.synchronize()
print("done")
"""


@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck"])
def test_sanitizer(tool):
    sanitizer.run(tool, SANITIZED)
