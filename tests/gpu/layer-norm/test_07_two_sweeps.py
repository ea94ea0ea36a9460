"""Two sweeps: on a GPU, at full size."""

import pytest
import torch
import torch.nn.functional as F

import layer_norm_cases as cases
import sanitizer
from layer_norm_cases import Case
from tutorial import load

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

NAME = "layer-norm/07-two-sweeps"
page = load(NAME)


def run(case):
    cases.run(page.layer_norm, case, page.DEVICE)


@pytest.mark.parametrize("N", [1, 1151, 8193, 16384, 49160, 131072])
def test_widths(N):
    for dtype in cases.DTYPES:
        run(Case((37,), (N,), dtype))


@pytest.mark.parametrize("N", [32768, 65536, 100_003])
def test_full_size(N):
    run(Case((1151,), (N,), torch.float16))


@pytest.mark.parametrize("N", [2**20, 2**20 + 1])
def test_a_million_columns(N):
    run(Case((3,), (N,), torch.float16))
    run(Case((3,), (N,), torch.float64))


@pytest.mark.parametrize("layout", cases.LAYOUTS)
@pytest.mark.parametrize("which", ["x", "dy", "parameters"])
def test_layouts(which, layout):
    run(Case((20, 3), (130, 127), torch.float16, **{which: layout}))


@pytest.mark.parametrize("lead", [(), (0,), (1,), (2, 1, 3)])
def test_dimensions(lead):
    run(Case(lead, (20_001,)))


def test_only_some_gradients():
    for number in range(32):
        *wanted, weight, bias = (bool(number >> i & 1) for i in range(5))
        given = {"weight": weight, "bias": bias, "wanted": tuple(wanted)}
        run(Case((5,), (20_000,), **given))


@pytest.mark.parametrize("ratio", [1, 100, 10_000])
def test_variance(ratio):
    errors = [
        page.variance.fn(64, 65536, torch.float32, "forward", ratio, name)[0]
        for name in ("triton", "torch", "squares")
    ]
    assert errors[0] < 1e-7 + 1e-9 * ratio
    assert errors[0] < 1.5 * errors[1]
    assert ratio == 1 or errors[2] > 1e-9 * ratio**2


@pytest.mark.parametrize("N", [8192, 32768, 65537])
def test_same_bits_100_times(N):
    x, w, b, dy = page.inputs(512, N, torch.float16)

    def again():
        y = page.layer_norm(x, (N,), w, b)
        return y, *torch.autograd.grad(y, (x, w, b), dy)

    first = again()
    for _ in range(100):
        assert all(map(torch.equal, first, again()))


@pytest.mark.parametrize("N", [32768, 12345])
def test_more_than_2_31_elements(N):
    M = 2**31 // N + 5
    x = torch.empty(M, N, dtype=torch.float16, device="cuda").normal_()
    y, mean, rstd = page.forward(x, None, None, 1e-5)
    # dy is y, up to its rounding: dx is nearly 0, and so is dw - M.
    dx, dw, _ = page.backward(y, x, None, mean, rstd, 3 * [True])
    for rows in slice(0, 64), slice(M - 64, M):
        expected = F.layer_norm(x[rows].double(), (N,))
        assert (y[rows] - expected).norm() <= 2**-11 * expected.norm()
        assert dx[rows].abs().max() < 1e-2
    assert (dw - M).abs().max() < 0.05 * M


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
page = load("layer-norm/07-two-sweeps")
page.check(page.layer_norm, 3, 20001, torch.float16)
torch.cuda.synchronize()
print("done")
"""


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_sanitizer(tool):
    sanitizer.run(tool, SANITIZED)
