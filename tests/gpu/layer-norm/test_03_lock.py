"""A lock, and its race: on a GPU, at full size."""

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

NAME = "layer-norm/03-lock"
page = load(NAME)


def run(case, plan=page.lock_once):
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


@pytest.mark.parametrize("N", [512, 1024, 2048, 4096])
def test_no_run_of_100_is_wrong(N):
    """The lock under contention, with every number of warps."""
    wrong = page.race.fn(32768, N, torch.float16, "backward", "right")
    assert wrong == [0, 0, 0]
    tensors, expected = page.given(32768, N)
    for warps in 1, 4, 8:
        for buffers in 1, 16, 256:
            _, sums = page.stage_1(*tensors, (32768, buffers, warps))
            assert page.error(sums, expected) < 1e-5


def test_the_missing_barrier_is_seen():
    """The narrowest rows of the page lose additions in some run of 100."""
    (wrong, *_) = page.race.fn(
        32768, 512, torch.float16, "backward", "no barrier"
    )
    assert wrong > 0


@pytest.mark.parametrize("N", [1024, 4608, 8192])
def test_own_buffers_give_the_same_bits(N):
    tensors, _ = page.given(4096, N)
    plan = page.own_buffers(4096, N)

    def run():
        return page.backward(*tensors, plan, torch.float32)

    first = run()
    for _ in range(100):
        assert all(map(torch.equal, run(), first))


def test_the_order_at_a_lock_is_not_fixed():
    """Nothing guarantees a difference; here 512 programs meet at one lock,
    and all 100 runs would have to come in one order of them."""
    tensors, _ = page.given(4096, 1024)

    def run():
        return page.stage_1(*tensors, (512, 1, 4))[1]

    first = run()
    assert not all(torch.equal(run(), first) for _ in range(100))


def test_one_launch_in_100_runs():
    """The exercise: the last program sums what all others have stored."""
    assert all(page.exercise_1(page._one_launch_1) for _ in range(100))


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
page = load("layer-norm/03-lock")
for dtype in torch.float16, torch.float32:
    for plan in page.PLANS.values():
        f = functools.partial(page.layer_norm, plan=plan)
        page.check(f, 300, 1001, dtype)
tensors, _ = page.given(300, 1024)
for flaw in page.FLAWS:
    page.stage_1(*tensors, (300, 16, 8), flaw)
page.exercise_1(page._one_launch_1)
torch.cuda.synchronize()
print("done")
"""


@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck"])
def test_sanitizer(tool):
    """Every kernel. As the page says, no tool sees the missing barrier."""
    sanitizer.run(tool, SANITIZED)
