"""Page 01 of layer norm on a GPU, at full size."""

import pytest
import torch
import torch.nn.functional as F

import layer_norm_cases as cases
import sanitizer
from layer_norm_cases import Case
from tutorial import load

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

page = load("layer-norm/01-layer-norm")
SIXTEEN_BITS = (torch.float16, torch.bfloat16)


def run(case):
    cases.run(page.layer_norm, case, page.DEVICE)


def gradients(function, x, w, b, dy):
    y = function(x, x.shape[-1:], w, b)
    return y, *torch.autograd.grad(y, (x, w, b), dy)


@pytest.mark.parametrize("shape", cases.SHAPES, ids=str)
def test_shapes(shape):
    for dtype in cases.DTYPES:
        run(Case(shape[:1], shape[1:], dtype))


@pytest.mark.parametrize("N", [1000, 1023, 1151, 4096, 4608, 8192, 15872])
def test_full_size(N):
    for dtype in SIXTEEN_BITS:
        run(Case((4096,), (N,), dtype))
    run(Case((1151,), (N,), torch.float32))


@pytest.mark.parametrize("dtype", [*SIXTEEN_BITS, torch.float32])
def test_the_check_of_the_page(dtype):
    page.check(page.layer_norm, 1151, 8192, dtype)


def test_widest_rows():
    for dtype in cases.DTYPES:
        run(Case((300,), (16384,), dtype))
        run(Case((300,), (16383,), dtype))


@pytest.mark.parametrize("N", [7, 1000, 4609, 16385, 100_000])
def test_three_sweeps(N):
    for dtype in torch.float16, torch.float32, torch.float64:
        x, w, b, _ = (t.detach() for t in page.inputs(70, N, dtype))
        with cases.guarded_allocations():
            y, *_ = page.in_sweeps(x, w, b, 1e-5)
        expected = F.layer_norm(x.double(), (N,), w.double(), b.double())
        unit = torch.finfo(dtype).eps * (0.5 if dtype.itemsize == 2 else 8)
        assert (y - expected).norm() <= unit * expected.norm()


@pytest.mark.parametrize("layout", cases.LAYOUTS)
@pytest.mark.parametrize("which", ["x", "dy", "parameters"])
def test_layouts(which, layout):
    for dtype in cases.DTYPES:
        run(Case((20, 30), (40, 25), dtype, **{which: layout}))


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("weight_dtype", cases.DTYPES)
def test_mixed_dtypes(dtype, weight_dtype):
    run(Case((70,), (650,), dtype, weight_dtype))


def test_only_some_gradients():
    for number in range(32):
        *wanted, weight, bias = (bool(number >> i & 1) for i in range(5))
        run(Case((5,), (33,), weight=weight, bias=bias, wanted=tuple(wanted)))


@pytest.mark.parametrize("lead", [(), (0,), (1,), (2, 1, 3)])
def test_dimensions(lead):
    run(Case(lead, (9,)))


@pytest.mark.parametrize("N", [1024, 4096, 12288])
def test_the_same_bits_every_time(N):
    """A hundred runs: nothing depends on the order of the programs."""
    given = page.inputs(4096, N, torch.float16)
    first = gradients(page.layer_norm, *given)
    for _ in range(100):
        again = gradients(page.layer_norm, *given)
        for a, b in zip(first, again, strict=True):
            assert torch.equal(a, b)


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
    y, dx, dw, db = gradients(page.layer_norm, x, w, b, dy)
    streamed, *_ = page.in_sweeps(x.detach(), w, b, 1e-5)
    sums = torch.zeros(2, N, dtype=torch.float64, device="cuda")
    W, B = w.detach().double(), b.detach().double()
    for part in zip(
        *(t.detach().split(8192) for t in (x, dy, y, streamed, dx)),
        strict=True,
    ):
        X, DY, Y, STREAMED, DX = (t.double() for t in part)
        X_HAT = F.layer_norm(X, (N,))
        sums += torch.stack([(DY * X_HAT).sum(0), DY.sum(0)])
        X.requires_grad_()
        expected = F.layer_norm(X, (N,), W, B)
        (grad,) = torch.autograd.grad(expected, X, DY)
        assert (Y - expected).norm() <= 2**-11 * expected.norm()
        assert (STREAMED - expected).norm() <= 2**-11 * expected.norm()
        assert (DX - grad).norm() <= 2**-11 * grad.norm()
    for found, total in zip((dw, db), sums, strict=True):
        assert (found - total).norm() <= 2**-11 * total.norm()


def test_torch_compile():
    compiled = torch.compile(page.layer_norm, fullgraph=True)
    for dtype in torch.float16, torch.float32:
        case = Case((4, 37), (1000,), dtype)
        tensors = case.tensors(page.DEVICE)
        found = cases.gradients(compiled, case, *tensors)
        cases.check(case, found, page.DEVICE, tensors)


def test_cuda_graph():
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        given = page.inputs(512, 1000, torch.float16)
        gradients(page.layer_norm, *given)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            found = gradients(page.layer_norm, *given)
        with torch.no_grad():
            given[0].normal_()
        for _ in range(3):
            graph.replay()
    torch.cuda.synchronize()
    wide = [t.detach().double().requires_grad_() for t in given]
    for a, b in zip(found, gradients(F.layer_norm, *wide), strict=True):
        assert (a - b).norm() <= 2**-11 * b.norm()


class Norm(torch.nn.LayerNorm):
    def forward(self, x):
        return page.layer_norm(
            x, self.normalized_shape, self.weight, self.bias, self.eps
        )


def _losses(norm, steps=100, N=192):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        norm(N),
        torch.nn.Linear(N, 4 * N),
        torch.nn.GELU(),
        torch.nn.Linear(4 * N, N),
        norm(N),
    ).to(page.DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x = torch.randn(16, 64, N, device=page.DEVICE)
    target = x.roll(1, dims=1) + 0.5 * x**2
    losses = []
    for _ in range(steps):
        loss = F.mse_loss(model(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def test_a_model_trains_as_with_pytorch():
    """100 steps: the two loss curves differ by at most 0.1 %."""
    ours, theirs = _losses(Norm), _losses(torch.nn.LayerNorm)
    assert theirs[-1] < 0.9 * theirs[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=0)


MEMCHECK = """
import torch
from tutorial import load
page = load("layer-norm/01-layer-norm")
for dtype in torch.float16, torch.float32:
    x, w, b, dy = page.inputs(3, 1001, dtype)
    page.in_sweeps(x.detach(), w, b, 1e-5)
    torch.autograd.grad(page.layer_norm(x, 1001, w, b), (x, w, b), dy)
torch.cuda.synchronize()
print("done")
"""


def test_memcheck():
    """Each of the four kernels under compute-sanitizer."""
    printed = sanitizer.run("memcheck", MEMCHECK)
    assert "ERROR SUMMARY: 0 errors" in printed
