"""Page 01 on a GPU, at full size."""

import pytest
import torch
import torch.nn.functional as F

import layer_norm_cases as cases
import sanitizer
from layer_norm_cases import Case
from tutorial import load

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

page = load("01-layer-norm")
SIZES = [512 * i for i in range(2, 32)]
SIXTEEN_BITS = (torch.float16, torch.bfloat16)


def run(case):
    cases.run(page.layer_norm, case, page.DEVICE)


@pytest.mark.parametrize("shape", cases.SHAPES, ids=str)
def test_shapes(shape):
    for dtype in cases.DTYPES:
        run(Case(shape[:1], shape[1:], dtype))


@pytest.mark.parametrize("N", [1000, 1023, 1151, 4096, 4608, 8192, 15872])
def test_full_size(N):
    for dtype in SIXTEEN_BITS:
        run(Case((4096,), (N,), dtype))
    run(Case((1151,), (N,), torch.float32))


def test_widest_rows():
    for dtype in cases.DTYPES:
        run(Case((300,), (16384,), dtype))
        run(Case((300,), (16383,), dtype))


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


@pytest.mark.parametrize("N", [1024, 4608, 15872])
@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32]
)
def test_error_no_larger_than_pytorch(N, dtype):
    ours = page.errors(page.layer_norm, 4096, N, dtype)
    theirs = page.errors(F.layer_norm, 4096, N, dtype)
    for name, a, b in zip(page.OUTPUTS, ours, theirs, strict=True):
        assert a <= 1.5 * b, f"{name}: {a:.2e}, PyTorch {b:.2e}"
        assert a <= page.tolerance(dtype), name


def test_sums_under_contention():
    """Many rows for each buffer, many times: no addition is lost."""
    M, N = 8192, 2048
    given = page.inputs(M, N, torch.float16)
    wide = [t.detach().double().requires_grad_() for t in given]
    expected = page.results(F.layer_norm, *wide)[2:]
    for _ in range(100):
        for a, b in zip(
            page.results(page.layer_norm, *given)[2:], expected, strict=True
        ):
            assert (a - b).norm() <= 3e-4 * b.norm()


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
    W, B = w.detach().double(), b.detach().double()
    for part in zip(
        *(t.detach().split(8192) for t in (x, dy, y, dx)), strict=True
    ):
        X, DY, Y, DX = (t.double() for t in part)
        X_HAT = F.layer_norm(X, (N,))
        sums += torch.stack([(DY * X_HAT).sum(0), DY.sum(0)])
        X.requires_grad_()
        expected = F.layer_norm(X, (N,), W, B)
        (grad,) = torch.autograd.grad(expected, X, DY)
        assert (Y - expected).norm() <= 2**-11 * expected.norm()
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
    given = page.inputs(512, 1000, torch.float16)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        page.results(page.layer_norm, *given)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            found = page.results(page.layer_norm, *given)
    with torch.no_grad():
        given[0].normal_()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    wide = [t.detach().double().requires_grad_() for t in given]
    for a, b in zip(found, page.results(F.layer_norm, *wide), strict=True):
        assert (a - b).norm() <= 2**-11 * b.norm()


class Norm(torch.nn.Module):
    def __init__(self, N):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(N))
        self.bias = torch.nn.Parameter(torch.zeros(N))

    def forward(self, x):
        return page.layer_norm(x, self.weight.shape, self.weight, self.bias)


class Block(torch.nn.Module):
    def __init__(self, norm, N=192, heads=4):
        super().__init__()
        self.heads = heads
        self.norms = torch.nn.ModuleList([norm(N), norm(N)])
        self.qkv = torch.nn.Linear(N, 3 * N)
        self.project = torch.nn.Linear(N, N)
        self.mlp = torch.nn.Sequential(
            torch.nn.Linear(N, 4 * N),
            torch.nn.GELU(),
            torch.nn.Linear(4 * N, N),
        )

    def forward(self, x):
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for t in self.qkv(self.norms[0](x)).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


def _losses(norm, steps=200):
    torch.manual_seed(0)
    model = Block(norm).to(page.DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x = torch.randn(16, 64, 192, device=page.DEVICE)
    target = x.roll(1, dims=1).cumsum(dim=1) / 8
    losses = []
    for _ in range(steps):
        loss = F.mse_loss(model(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def test_transformer_block_trains_like_pytorch():
    """200 steps: the two loss curves differ by at most 0.1 %."""
    ours, theirs = _losses(Norm), _losses(torch.nn.LayerNorm)
    assert theirs[-1] < 0.5 * theirs[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=0)


MEMCHECK = """
import torch
from tutorial import load
page = load("01-layer-norm")
for dtype in torch.float16, torch.float32:
    page.results(page.layer_norm, *page.inputs(3, 1001, dtype))
torch.cuda.synchronize()
print("done")
"""


def test_memcheck():
    """Each of the three kernels under compute-sanitizer."""
    printed = sanitizer.run("memcheck", MEMCHECK)
    assert "ERROR SUMMARY: 0 errors" in printed
