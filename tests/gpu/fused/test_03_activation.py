"""A function as a constant: on a GPU, at full size."""

import pytest
import torch
import torch.nn.functional as F

import layer_norm_cases as plain
import sanitizer
from tutorial import load

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

NAME = "fused/03-activation"
page = load(NAME)
HALF, SINGLE = torch.float16, torch.float32


def mean_of(dtype):
    return torch.promote_types(dtype, SINGLE)


def compare(name, M, N, dtype, weight=True, bias=True):
    """Against PyTorch in float64."""
    given = [t.detach() for t in page.inputs(M, N, dtype)]
    given[0] = 3 * given[0]
    found = []
    for kind in dtype, torch.float64:
        x, w, b, dy = (t.to(kind) for t in given)
        leaves = [x, *[w] * weight, *[b] * bias]
        for t in leaves:
            t.requires_grad_()
        w, b = w if weight else None, b if bias else None
        if kind == dtype and dtype != torch.float64:
            y = page.activation_layer_norm(x, N, w, b, name)
        elif found:
            y = F.layer_norm(page.TORCH[name](x), (N,), w, b)
        else:
            y = page.activation_layer_norm(x, N, w, b, name)
        found.append((y, *torch.autograd.grad(y, leaves, dy)))
    unit = torch.finfo(dtype).eps / 2
    factor = {SINGLE: 32, torch.float64: 64}.get(dtype, 1)
    # One column has no slope: dx is what rounding leaves of dy times rstd.
    rest = torch.finfo(mean_of(dtype)).eps * 1e5**0.5 * dy.norm() * (N == 1)
    for got, want in zip(*found, strict=True):
        assert got.dtype == dtype
        limit = 1.1 * factor * unit * want.norm() + rest
        assert (got - want).norm() <= limit, N


STEPS = [1, 31, 512, 768, 1000, 1024, 1536, 1544, 3072, 3080, 4096, 6152]


@pytest.mark.parametrize("N", [*STEPS, 7168, 7281, 8191, 8192])
@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh"])
def test_steps(name, N):
    compare(name, 1101, N, HALF)
    compare(name, 301, N, torch.bfloat16)
    compare(name, 301, (N + 1) // 2, SINGLE)
    compare(name, 301, (N + 3) // 4, torch.float64)


@pytest.mark.parametrize("N", [1000, 8192])
def test_without_parameters(N):
    for weight, bias in (True, False), (False, True), (False, False):
        compare("silu", 301, N, HALF, weight, bias)


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh"])
def test_value_and_slope_far_out(name):
    near = torch.linspace(-50, 50, 2048, dtype=torch.float64)
    far = torch.tensor([-1e30, -1e4, -90.0, -43.1, 20.1, 40.1, 1e4, 1e30])
    x = torch.cat([near, far.double()]).requires_grad_()
    want = page.TORCH[name](x)
    (slope_of,) = torch.autograd.grad(want.sum(), x)
    slope_of = slope_of.nan_to_num(0, 0, 0)
    x = x.detach().float().cuda()
    slope = torch.empty_like(x)
    y = page.apply(x, page.ACTIVATIONS[name], slope)
    for got, expected in (y, want.detach()), (slope, slope_of):
        torch.testing.assert_close(
            got.double().cpu(), expected, rtol=2e-5, atol=2e-6
        )


@pytest.mark.parametrize("N", [1000, 3072, 8192])
def test_same_bits_100_times(N):
    x, w, b, dy = page.inputs(1101, N, HALF)

    def again():
        y = page.activation_layer_norm(x, N, w, b)
        return y, *torch.autograd.grad(y, (x, w, b), dy)

    first = again()
    for _ in range(100):
        assert all(map(torch.equal, first, again()))


@pytest.mark.parametrize("layout", plain.LAYOUTS)
def test_layouts(layout):
    def fill(shape):
        return torch.randn(shape, device="cuda").half()

    torch.manual_seed(0)
    x, dy = (plain.LAYOUTS[layout]((30, 40, 25), fill) for _ in "12")
    found = []
    for kind in HALF, torch.float64:
        leaf = x.detach().to(kind).requires_grad_()
        norm = F.layer_norm(F.silu(leaf), (40, 25))
        if kind == HALF:
            leaf = x.detach().requires_grad_()
            norm = page.activation_layer_norm(leaf, (40, 25))
        (dx,) = torch.autograd.grad(norm, leaf, dy.to(kind))
        found.append((norm, dx))
    # Where x is one number, rstd is 316, and rounding is all that is left.
    rest = 2**-23 * 1e5**0.5 * dy.double().norm() * (layout == "one number")
    for got, want in zip(*found, strict=True):
        assert (got - want).norm() <= 2**-10 * want.norm() + rest + 1e-3


def test_more_than_2_31_elements():
    M, N = 2**31 // 8192 + 5, 8192
    x = torch.empty(M, N, dtype=HALF, device="cuda").normal_()
    y, mean, rstd = page.forward(x, None, None, 1e-5, page._silu)
    w = torch.ones(N, dtype=HALF, device="cuda")
    # dy is y: nothing comes back through the norm.
    dx, _ = page.backward(y, x, w, mean, rstd, page._silu)
    for rows in slice(0, 64), slice(M - 64, M):
        expected = F.layer_norm(F.silu(x[rows].double()), (N,))
        assert (y[rows] - expected).norm() <= 2**-11 * expected.norm()
        assert dx[rows].abs().max() < 2e-2


SANITIZED = """
import torch
from tutorial import load
page = load("fused/03-activation")
half, single = torch.float16, torch.float32
for N, dtype in (1000, half), (4096, half), (40, single):
    page.check(301, N, dtype, "silu")
torch.cuda.synchronize()
print("done")
"""


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_sanitizer(tool):
    sanitizer.run(tool, SANITIZED)
