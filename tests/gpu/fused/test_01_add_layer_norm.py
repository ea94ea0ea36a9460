"""Add, then normalize: on a GPU, at full size."""

import add_norm_cases as cases
import pytest
import torch
import torch.nn.functional as F
from add_norm_cases import Case

import layer_norm_cases as layouts
import sanitizer
from tutorial import load

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

NAME = "fused/01-add-layer-norm"
page = load(NAME)


def run(case):
    cases.run(page.add_layer_norm, case, page.DEVICE)


# Both sides of each step of the formulas.
STEPS = [1, 31, 512, 1000, 1024, 1025, 2048, 4096, 4104, 8192, 8200, 10240]


@pytest.mark.parametrize("N", [*STEPS, 12288, 14336])
def test_steps(N):
    run(Case((1151,), (N,), torch.float16))
    run(Case((301,), (N,), torch.bfloat16))
    run(Case((301,), ((N + 1) // 2,), torch.float32))


@pytest.mark.parametrize(("dtype", "stream"), layouts.STREAMS)
def test_types(dtype, stream):
    for N in 650, 3000:
        run(Case((301,), (N,), dtype, stream))


@pytest.mark.parametrize("N", [14337, 20480, 100_003])
def test_wider_rows(N):
    for dtype in torch.float16, torch.float32:
        run(Case((301,), (N,), dtype, torch.float32))
    run(Case((301,), (N,), torch.bfloat16, weight=False))


def test_wider_rows_give_the_same_bits_100_times():
    x, r, w, b, dy, ds = page.inputs(512, 20480, torch.float16)

    def again():
        y, s = page.add_layer_norm(x, r, 20480, w, b)
        return y, s, *torch.autograd.grad((y, s), (x, w, b), (dy, ds))

    first = again()
    for _ in range(100):
        assert all(map(torch.equal, first, again()))


@pytest.mark.parametrize("layout", layouts.LAYOUTS)
@pytest.mark.parametrize("which", ["x", "residual", "dy", "ds", "parameters"])
def test_layouts(which, layout):
    run(Case((20, 30), (40, 25), torch.float16, **{which: layout}))


@pytest.mark.parametrize("lead", [(), (0,), (1,), (2, 1, 3)])
def test_dimensions(lead):
    run(Case(lead, (24,)))


def test_only_some_gradients():
    cases.only_some(run, lead=(5,), shape=(1000,))


@pytest.mark.parametrize("N", [1024, 4608, 12288])
def test_same_bits_100_times(N):
    x, r, w, b, dy, ds = page.inputs(2048, N, torch.float16)

    def again():
        y, s = page.add_layer_norm(x, r, N, w, b)
        return y, s, *torch.autograd.grad((y, s), (x, w, b), (dy, ds))

    first = again()
    for _ in range(100):
        assert all(map(torch.equal, first, again()))


def test_more_than_2_31_elements():
    M, N = 2**31 // 8192 + 5, 8192
    x = torch.empty(M, N, dtype=torch.float16, device="cuda").normal_()
    residual = torch.empty_like(x).normal_()
    y, s, mean, rstd = page.forward(x, residual, None, None, 1e-5)
    dx = torch.empty_like(s)
    w = torch.ones(N, dtype=torch.float16, device="cuda")
    # dy is y: nothing comes back through the norm, and ds is left.
    page.backward(y, x, s, w, mean, rstd, dx, None)
    for rows in slice(0, 64), slice(M - 64, M):
        exact = x[rows].double() + residual[rows]
        assert (s[rows] - exact).norm() <= 2**-11 * exact.norm()
        expected = F.layer_norm(s[rows].double(), (N,))
        assert (y[rows] - expected).norm() <= 2**-11 * expected.norm()
        assert (dx[rows] - x[rows]).abs().max() < 2e-2


class Block(torch.nn.Module):
    """Two pre-norm layers; the addition at the end of one is in the next."""

    def __init__(self, norm, N=192):
        super().__init__()
        self.norm = norm
        self.layers = torch.nn.ModuleList(
            torch.nn.Sequential(
                torch.nn.Linear(N, 4 * N),
                torch.nn.GELU(),
                torch.nn.Linear(4 * N, N),
            )
            for _ in range(2)
        )
        self.w = torch.nn.Parameter(torch.ones(2, N))
        self.b = torch.nn.Parameter(torch.zeros(2, N))

    def forward(self, x):
        stream, shape = torch.zeros_like(x), x.shape[-1:]
        for layer, w, b in zip(self.layers, self.w, self.b, strict=True):
            y, stream = self.norm(x, stream, shape, w, b)
            x = layer(y)
        return x + stream


def losses(norm, steps=100):
    torch.manual_seed(0)
    model = Block(norm).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x = torch.randn(1024, 192, device="cuda")
    target = x.roll(1, dims=1).cumsum(dim=1) / 8
    found = []
    for _ in range(steps):
        loss = F.mse_loss(model(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return torch.stack(found)


def test_trains_like_pytorch():
    ours, theirs = losses(page.add_layer_norm), losses(page.chain)
    assert theirs[-1] < 0.6 * theirs[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=0)


SANITIZED = """
import torch
from tutorial import load
page = load("fused/01-add-layer-norm")
half, single = torch.float16, torch.float32
for N, dtype in (1000, half), (10240, half), (20480, half), (40, single):
    page.check(301, N, dtype, torch.float32)
torch.cuda.synchronize()
print("done")
"""


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_sanitizer(tool):
    sanitizer.run(tool, SANITIZED)
