"""Rows that begin anywhere: on a GPU, at full size."""

import pytest
import torch
import torch.nn.functional as F

import layer_norm_cases as cases
import sanitizer
from layer_norm_cases import Case
from tutorial import load

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

NAME = "layer-norm/06-unaligned-rows"
page = load(NAME)


def run(case):
    cases.run(page.layer_norm, case, page.DEVICE)


# Both sides of each step of the formulas; in other types, which have the same
# plans for as many bytes, a narrow row and the widest one.
STEPS = [1, 7, 507, 2047, 2101, 4097, 4609, 5099, 5101, 8401, 10231]
TYPES = [(N, torch.float16) for N in STEPS]
TYPES += [(1151, torch.bfloat16), (10231, torch.bfloat16)]
TYPES += [(257, torch.float32), (5115, torch.float32)]
TYPES += [(129, torch.float64), (2557, torch.float64)]


@pytest.mark.parametrize(("N", "dtype"), TYPES)
def test_steps(N, dtype):
    run(Case((1151,), (N,), dtype))


@pytest.mark.parametrize("N", [12345, 16381, 16384])
def test_wide_rows_without_gradients(N):
    run(Case((301,), (N,), torch.float16, wanted=3 * (False,)))


@pytest.mark.parametrize("layout", cases.LAYOUTS)
@pytest.mark.parametrize("which", ["x", "dy", "parameters"])
def test_layouts(which, layout):
    run(Case((20, 30), (40, 25), torch.float16, **{which: layout}))


@pytest.mark.parametrize("lead", [(), (0,), (1,), (2, 1, 3)])
def test_dimensions(lead):
    run(Case(lead, (24,)))


@pytest.mark.parametrize("N", [1151, 4097, 10231])
def test_deterministic(N):
    x, w, b, dy = page.inputs(4096, N, torch.float16)
    y = page.layer_norm(x, (N,), w, b)

    def again():
        found = torch.autograd.grad(y, (x, w, b), dy, retain_graph=True)
        return torch.cat([t.flatten() for t in found])

    first = again()
    assert all(torch.equal(again(), first) for _ in range(100))


@pytest.mark.parametrize("first", [0, 3, 8])
def test_columns_of_a_wider_matrix(first):
    x, w, b, dy = page.inputs(1151, 4097, torch.float16)
    wide = torch.full((1151, 4120), float("nan"), device="cuda").half()
    view = wide[:, first : first + 4097].copy_(x.detach()).requires_grad_()
    ours, theirs = (
        torch.autograd.grad(page.layer_norm(t, 4097, w, b), (t, w, b), dy)
        for t in (view, x)
    )
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).norm() <= 2**-10 * b.norm()


def test_more_than_2_31_elements():
    M, N = 2**31 // 8191 + 5, 8191
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
page = load("layer-norm/06-unaligned-rows")
half, single = torch.float16, torch.float32
for N, dtype in (1001, half), (4097, half), (41, single):
    # 704 rows end at a multiple of 16 bytes: no load is out of bounds
    page.check(page.layer_norm, 704, N, dtype)
torch.cuda.synchronize()
print("done")
"""


@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck"])
def test_sanitizer(tool):
    sanitizer.run(tool, SANITIZED)
