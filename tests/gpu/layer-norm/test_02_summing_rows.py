"""Who adds up the rows, on a GPU, at full size."""

import pytest
import torch
import torch.nn.functional as F

import layer_norm_cases as cases
import sanitizer
from layer_norm_cases import Case
from tutorial import load

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

NAME = "layer-norm/02-summing-rows"
page = load(NAME)
DESIGNS = {k: f for k, f in page.DESIGNS.items() if k != "torch"}
REPEATABLE = ("triton", "columns", "split")
EVERY = pytest.mark.parametrize("name", DESIGNS)


def run(case, name="triton"):
    def layer_norm(*given):
        return page.layer_norm(*given, backward=DESIGNS[name])

    cases.run(layer_norm, case, page.DEVICE)


@EVERY
@pytest.mark.parametrize("N", [1000, 1024, 1151, 4608, 8192, 16384])
def test_full_size(name, N):
    # More rows than programs, but few: random numbers take most of the time.
    run(Case((1151,), (N,), torch.float16), name)
    for dtype in torch.bfloat16, torch.float32, torch.float64:
        run(Case((300,), (N,), dtype), name)


@EVERY
def test_shapes(name):
    for shape in cases.SHAPES:
        run(Case(shape[:1], shape[1:], torch.float16), name)
    run(Case((0,), (9,)), name)


@pytest.mark.parametrize("layout", cases.LAYOUTS)
@pytest.mark.parametrize("which", ["x", "dy", "parameters"])
def test_layouts(which, layout):
    for dtype in cases.DTYPES:
        run(Case((20, 30), (40, 25), dtype, **{which: layout}))


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("weight_dtype", cases.DTYPES)
def test_mixed_dtypes(dtype, weight_dtype):
    run(Case((70,), (650,), dtype, weight_dtype))


@pytest.mark.parametrize("name", REPEATABLE)
@pytest.mark.parametrize("N", [1024, 4608, 12288])
def test_same_bits_in_100_runs(name, N):
    given = page.given(4096, N, torch.float16)
    first = DESIGNS[name](*given, torch.float32)
    for _ in range(100):
        again = DESIGNS[name](*given, torch.float32)
        assert all(map(torch.equal, first, again))


def test_atomic_additions_differ():
    given = page.given(4096, 1024, torch.float16)
    first = page.atomics(*given, torch.float32)
    assert any(
        not torch.equal(first[1], page.atomics(*given, torch.float32)[1])
        for _ in range(100)
    )


def norm(t):
    return torch.linalg.vector_norm(t, dtype=torch.float64)


def test_more_than_2_31_elements():
    M, N = 2**31 // 8192 + 5, 8192
    x = torch.empty(M, N, dtype=torch.float16, device="cuda")
    dy = torch.empty_like(x)
    for part in *x.split(16384), *dy.split(16384):
        part.normal_()
    w = torch.rand(N, dtype=torch.float16, device="cuda")
    _, mean, rstd = torch.native_layer_norm(x, (N,), w, w, 1e-5)
    sums = torch.zeros(2, N, dtype=torch.float64, device="cuda")
    for X, DY in zip(x.split(8192), dy.split(8192), strict=True):
        X, DY = X.double(), DY.double()
        sums += torch.stack([(DY * F.layer_norm(X, (N,))).sum(0), DY.sum(0)])
    last = slice(M - 8, M)
    leaf = x[last].double().requires_grad_()
    y = F.layer_norm(leaf, (N,), w.double())
    (end,) = torch.autograd.grad(y, leaf, dy[last].double())
    for name in "triton", "columns", "split", "atomics":
        dx, *found = DESIGNS[name](dy, x, w, mean, rstd, torch.float16)
        assert norm(dx[last] - end) <= 2**-11 * norm(end), name
        for got, want in zip(found, sums, strict=True):
            assert norm(got - want) <= 2**-11 * norm(want), name
        del dx


def _losses(norm, steps=30):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 192), norm(192), torch.nn.GELU(),
        torch.nn.Linear(192, 64),
    ).cuda()  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x = torch.randn(512, 64, device="cuda")
    losses = []
    for _ in range(steps):
        loss = F.mse_loss(model(x), x.roll(1, dims=1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


class Norm(torch.nn.LayerNorm):
    def forward(self, x):
        shape, w, b = self.normalized_shape, self.weight, self.bias
        return page.layer_norm(x, shape, w, b, self.eps)


def test_trains_like_pytorch():
    ours, theirs = _losses(Norm), _losses(torch.nn.LayerNorm)
    assert theirs[-1] < 0.7 * theirs[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=0)


SANITIZED = f"""
import torch
from tutorial import load
page = load("{NAME}")
for dtype in torch.float16, torch.float32:
    x, w, b, dy = page.inputs(300, 1001, dtype)
    for design in {list(DESIGNS)}:
        y = page.layer_norm(x, (1001,), w, b, backward=page.DESIGNS[design])
        torch.autograd.grad(y, (x, w, b), dy)
torch.cuda.synchronize()
print("done")
"""


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_sanitizer(tool):
    sanitizer.run(tool, SANITIZED)
