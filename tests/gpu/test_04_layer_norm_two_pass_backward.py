"""Page 04 on a GPU, at full size."""

import pytest
import torch
import torch.nn.functional as F

import layer_norm_cases as cases
import sanitizer
from layer_norm_cases import Case
from tutorial import load

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

NAME = "04-layer-norm-two-pass-backward"
page = load(NAME)
SIXTEEN_BITS = (torch.float16, torch.bfloat16)


def run(case):
    cases.run(page.layer_norm, case, page.DEVICE)


@pytest.mark.parametrize("shape", cases.SHAPES, ids=str)
def test_shapes(shape):
    for dtype in cases.DTYPES:
        run(Case(shape[:1], shape[1:], dtype))


@pytest.mark.parametrize("limit", [1024, 5120, 8192, 14336, 24576, 32768])
def test_both_sides_of_each_limit(limit):
    for N in limit - 1, limit, limit + 1:
        run(Case((37,), (N,), torch.float16))
    run(Case((37,), (limit // 2 + 1,), torch.float32))
    run(Case((37,), (limit // 4 + 1,), torch.float64))


@pytest.mark.parametrize("N", [1000, 4097, 8192, 15872, 65536])
def test_full_size(N):
    for dtype in SIXTEEN_BITS:
        run(Case((4096,), (N,), dtype))


@pytest.mark.parametrize("N", [1, 32, 100, 1024])
def test_tall(N):
    run(Case((2**24 // N + 1,), (N,), torch.float16))


@pytest.mark.parametrize("N", [2**16 + 1, 2**20])
@pytest.mark.parametrize("M", [1, 6])
def test_wide(N, M):
    for dtype in cases.DTYPES:
        run(Case((M,), (N,), dtype))


@pytest.mark.parametrize("layout", cases.LAYOUTS)
@pytest.mark.parametrize("which", ["x", "dy", "parameters"])
def test_layouts(which, layout):
    for dtype in cases.DTYPES:
        run(Case((20, 30), (40, 25), dtype, **{which: layout}))


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("weight_dtype", cases.DTYPES)
def test_mixed_dtypes(dtype, weight_dtype):
    run(Case((70,), (650,), dtype, weight_dtype))


@pytest.mark.parametrize("N", [65, 20000])
def test_only_some_gradients(N):
    for number in range(32):
        *wanted, weight, bias = (bool(number >> i & 1) for i in range(5))
        run(Case((50,), (N,), weight=weight, bias=bias, wanted=tuple(wanted)))


@pytest.mark.parametrize("N", [512, 4608, 15872, 65536])
@pytest.mark.parametrize("dtype", [*SIXTEEN_BITS, torch.float32])
def test_error_no_larger_than_pytorch(N, dtype):
    M = page.height(2048, 4 * N)
    ours = page.errors(page.layer_norm, M, N, dtype)
    theirs = page.errors(F.layer_norm, M, N, dtype)
    for name, a, b in zip(["y", "dx", "dw", "db"], ours, theirs, strict=True):
        assert a <= 1.5 * b, f"{name}: {a:.2e}, PyTorch {b:.2e}"


@pytest.mark.parametrize("name", page.STEPS)
def test_every_step(name):
    for M, N in (4096, 1024), (3, 4608), (2**17 + 1, 64), (700, 16384):
        x, w, b, dy = page.example(M, N, torch.float16)
        _, mean, rstd = page.forward(x, w, b, 1e-5)
        found = page.step(dy, x, w, mean, rstd, name)
        for a, e in zip(found, page.exact(x, w, dy), strict=True):
            assert page.error(a, e) <= 2**-11, (M, N)


@pytest.mark.parametrize("N", [512, 1000, 8192, 40000])
def test_layer_norm_backward(N):
    x, w, b, dy = page.example(1000, N, torch.float32)
    saved = torch.native_layer_norm(x, (N,), w, b, 1e-5)[1:]
    for statistics in saved, (None, None):
        found = page.layer_norm_backward(dy, x, w, *statistics)
        for a, e in zip(found, page.exact(x, w, dy), strict=True):
            assert page.error(a, e) <= 1e-6


@pytest.mark.parametrize("N", [64, 1000, 8192, 15872, 65536])
def test_same_bits_100_times(N):
    x, w, b, dy = page.example(page.height(4096, 2 * N), N, torch.float16)
    w = w.float()  # so that rounding hides nothing
    first = page.results(page.layer_norm, x, w, b, dy)
    for _ in range(100):
        again = page.results(page.layer_norm, x, w, b, dy)
        assert all(map(torch.equal, first, again))


@pytest.mark.parametrize("N", [64, 8192, 32768])
def test_more_than_2_31_elements(N):
    M = 2**31 // N + 5
    x = torch.empty(M, N, dtype=torch.float16, device="cuda").normal_()
    y, mean, rstd = page.forward(x, None, None, 1e-5)
    dx = torch.empty_like(x)
    dw, db = torch.empty(2, N, dtype=torch.float32, device="cuda")
    page.backward(y, x, None, mean, rstd, dx, dw, db)
    for rows in slice(0, 64), slice(M - 64, M):
        expected = F.layer_norm(x[rows].double(), (N,))
        assert (y[rows] - expected).norm() <= 2**-11 * expected.norm()
        # dy is y, up to its rounding: dx is nearly 0, and so is dw - M.
        assert dx[rows].abs().max() < 2e-2
    assert abs(dw.double().mean().item() / M - 1) < 1e-3


def test_torch_compile():
    compiled = torch.compile(page.layer_norm, fullgraph=True, dynamic=False)
    for N in 1000, 40000:
        case = Case((4, 37), (N,), torch.float16)
        tensors = case.tensors(page.DEVICE)
        found = cases.gradients(compiled, case, *tensors)
        cases.check(case, found, page.DEVICE, tensors)


@pytest.mark.parametrize("N", [1000, 16384, 65536])
def test_cuda_graph(N):
    x, w, b, dy = page.example(512, N, torch.float16)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        page.results(page.layer_norm, x, w, b, dy)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            found = page.results(page.layer_norm, x, w, b, dy)
    x.normal_()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    wide = [t.double() for t in (x, w, b, dy)]
    for a, e in zip(found, page.results(F.layer_norm, *wide), strict=True):
        assert page.error(a, e) <= 2**-11


def _losses(norm, steps=100):
    torch.manual_seed(0)
    N = 192
    w = torch.nn.Parameter(torch.ones(N, device="cuda"))
    b = torch.nn.Parameter(torch.zeros(N, device="cuda"))
    first, last = (torch.nn.Linear(N, N, device="cuda") for _ in range(2))
    parameters = [w, b, *first.parameters(), *last.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    x = torch.randn(1024, N, device="cuda")
    target = x.roll(1, dims=1).tanh()
    losses = []
    for _ in range(steps):
        y = norm(F.gelu(first(x)), (N,), w, b, 1e-5)
        loss = F.mse_loss(last(y), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def test_trains_like_pytorch():
    """100 steps: the two loss curves differ by at most 0.1 %."""
    ours, theirs = _losses(page.layer_norm), _losses(F.layer_norm)
    assert theirs[-1] < 0.5 * theirs[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=0)


SANITIZED = f"""
import torch
from tutorial import load
page = load("{NAME}")
for M, N, dtype in (
    (300, 1001, torch.float16), (70, 513, torch.float32),
    (1000, 33, torch.float16), (9, 20001, torch.float16),
):
    x, w, b, dy = page.example(M, N, dtype)
    page.results(page.layer_norm, x, w, b, dy)
    page.layer_norm_backward(dy, x, w, None, None)
    _, mean, rstd = page.forward(x, w, b, 1e-5)
    for name in page.STEPS:
        page.step(dy, x, w, mean, rstd, name)
torch.cuda.synchronize()
print("done")
"""


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_sanitizer(tool):
    sanitizer.run(tool, SANITIZED)
