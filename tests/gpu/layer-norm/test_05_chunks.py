"""Chunks instead of padding: on a GPU, at full size."""

import pytest
import torch
import torch.nn.functional as F

import layer_norm_cases as cases
import sanitizer
from layer_norm_cases import Case
from tutorial import load

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

NAME = "layer-norm/05-chunks"
page = load(NAME)


def run(case):
    cases.run(page.layer_norm, case, page.DEVICE)


# Both sides of each step of the formulas; in other types, which have the same
# plans for as many bytes, a narrow row and the widest one.
STEPS = [8, 520, 1024, 1032, 2048, 2056, 4096, 4104, 8200, 10240]
TYPES = [(N, torch.float16) for N in STEPS]
TYPES += [(1032, torch.bfloat16), (10240, torch.bfloat16)]
TYPES += [(520, torch.float32), (5120, torch.float32)]
TYPES += [(264, torch.float64), (2560, torch.float64)]


@pytest.mark.parametrize(("N", "dtype"), TYPES)
def test_steps(N, dtype):
    run(Case((1151,), (N,), dtype))


@pytest.mark.parametrize("N", [16384, 16392, 24576, 32768])
def test_wide_rows_without_gradients(N):
    run(Case((301,), (N,), torch.float16, wanted=3 * (False,)))


@pytest.mark.parametrize("layout", cases.LAYOUTS)
@pytest.mark.parametrize("which", ["x", "dy", "parameters"])
def test_layouts(which, layout):
    run(Case((20, 30), (40, 25), torch.float16, **{which: layout}))


@pytest.mark.parametrize("lead", [(), (0,), (1,), (2, 1, 3)])
def test_dimensions(lead):
    run(Case(lead, (24,)))


@pytest.mark.parametrize("N", [1024, 4608, 10240])
def test_deterministic(N):
    x, w, b, dy = page.inputs(4096, N, torch.float16)
    y = page.layer_norm(x, (N,), w, b)

    def again():
        found = torch.autograd.grad(y, (x, w, b), dy, retain_graph=True)
        return torch.cat([t.flatten() for t in found])

    first = again()
    assert all(torch.equal(again(), first) for _ in range(100))


def test_every_rung_is_right():
    x, w, b, dy = page.inputs(1151, 4608, torch.float32)
    expected = F.layer_norm(x.double(), (4608,), w.double(), b.double())
    grads = torch.autograd.grad(expected, (x, w, b), dy.double())
    for rule in page.plan_backward, page.padded(page.plan_backward):
        y = page.trained_by(rule)(x, (4608,), w, b)
        found = torch.autograd.grad(y, (x, w, b), dy)
        for a, b_ in zip((y, *found), (expected, *grads), strict=True):
            assert (a - b_).norm() <= 1e-6 * b_.norm()


def test_more_than_2_31_elements():
    M, N = 2**31 // 8192 + 5, 8192
    x = torch.empty(M, N, dtype=torch.float16, device="cuda")
    dy = torch.empty_like(x)
    for rows in (*x.split(16384), *dy.split(16384)):
        rows.normal_()
    x.requires_grad_()
    w, b = torch.rand(2, N, dtype=torch.float16, device="cuda")
    y = page.layer_norm(x, (N,), w, b)
    (dx,) = torch.autograd.grad(y, x, dy)
    last = x.detach()[-9:].double().requires_grad_()
    expected = F.layer_norm(last, (N,), w.double(), b.double())
    (grad,) = torch.autograd.grad(expected, last, dy[-9:].double())
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
import torch
from tutorial import load
page = load("layer-norm/05-chunks")
half, single = torch.float16, torch.float32
for N, dtype in (1000, half), (4608, half), (40, single):
    page.check(page.layer_norm, 701, N, dtype)
torch.cuda.synchronize()
print("done")
"""


@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck"])
def test_sanitizer(tool):
    sanitizer.run(tool, SANITIZED)
