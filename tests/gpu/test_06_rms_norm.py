"""Page 06 on a GPU, at full size."""

import pytest
import torch
import torch.nn.functional as F

import rms_norm_cases as cases
import sanitizer
from rms_norm_cases import Case
from tutorial import load

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

NAME = "06-rms-norm"
page = load(NAME)
HIDDEN = list(page.HIDDEN)
LIMITS = (1024, 1536, 4096, 5120, 12288, 14336, 16384, 20480, 24576, 49152)
SIXTEEN_BITS = (torch.float16, torch.bfloat16)


def run(case):
    cases.run(page, case)


@pytest.mark.parametrize("shape", cases.SHAPES, ids=str)
def test_shapes(shape):
    for dtype in cases.DTYPES:
        run(Case(shape[:1], shape[1:], dtype))
        run(Case(shape[:1], shape[1:], dtype, fused=False, offset=1.0))


@pytest.mark.parametrize("limit", LIMITS)
def test_both_sides_of_each_limit(limit):
    for N in limit - 1, limit, limit + 1:
        run(Case((37,), (N,), torch.float16))
        run(Case((37,), (N,), torch.bfloat16, fused=False))
    run(Case((37,), (limit // 2,), torch.float32))
    run(Case((37,), (limit // 4 + 1,), torch.float64))


@pytest.mark.parametrize("N", [1, 2**16 - 1, 2**16 + 1, 2**20])
@pytest.mark.parametrize("M", [1, 6])
def test_widths(N, M):
    for dtype in cases.DTYPES:
        run(Case((M,), (N,), dtype))


@pytest.mark.parametrize("N", [1000, *HIDDEN, 32768])
def test_full_size(N):
    for fused in False, True:
        run(Case((4096,), (N,), torch.bfloat16, fused=fused, offset=1.0))


@pytest.mark.parametrize("layout", cases.LAYOUTS)
@pytest.mark.parametrize("which", ["x", "residual", "dy", "ds", "parameters"])
def test_layouts(which, layout):
    for shape in ((40, 25), (130, 127)):
        run(Case((20, 3), shape, torch.float16, **{which: layout}))


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("weight_dtype", cases.DTYPES)
def test_mixed_dtypes(dtype, weight_dtype):
    run(Case((70,), (650,), dtype, weight_dtype))
    run(Case((70,), (13000,), dtype, weight_dtype))


@pytest.mark.parametrize("N", [65, 16384, 20000])
@pytest.mark.parametrize("used", ["y", "s", "ys"])
def test_only_some_gradients(N, used):
    for number in range(1, 16):
        *wanted, weight = (bool(number >> i & 1) for i in range(4))
        if any(wanted[:2]) or (wanted[2] and weight and "y" in used):
            wanted = tuple(wanted)
            run(Case((5,), (N,), weight=weight, wanted=wanted, used=used))


@pytest.mark.parametrize("N", [2048, 5120, 16384])
@pytest.mark.parametrize("dtype", [*SIXTEEN_BITS, torch.float32])
def test_error_no_larger_than_pytorch(N, dtype):
    ours = page.errors(*page.OURS, 4096, N, dtype)
    theirs = page.errors(*page.THEIRS, 4096, N, dtype)
    for name, a, b in zip(page.NAMES, ours, theirs, strict=True):
        assert a <= 1.5 * b, f"{name}: {a:.2e}, PyTorch {b:.2e}"
        assert a <= page.tolerance(dtype), name


@pytest.mark.parametrize("N", [256, 1000, 4096, 16384, 65536])
def test_same_bits_100_times(N):
    given = [t.detach() for t in page.inputs(512, N, torch.float16)]
    first = page.planned((None, None), *given)
    for _ in range(100):
        again = page.planned((None, None), *given)
        assert all(map(torch.equal, first, again))


@pytest.mark.parametrize("N", [8192, 32768])
def test_more_than_2_31_elements(N):
    M = 2**31 // N + 5
    x = torch.empty(M, N, dtype=torch.float16, device="cuda")
    for rows in x.split(16384):
        rows.normal_()
    w = torch.rand(N, device="cuda").requires_grad_()
    y, s = page.add_rms_norm(x.requires_grad_(), x.detach(), (N,), w)
    dx, dw = torch.autograd.grad((y, s), (x, w), (x.detach(), x.detach()))
    total = torch.zeros(N, dtype=torch.float64, device="cuda")
    parts = (t.detach().split(2**24 // N) for t in (x, y, s, dx))
    for part in zip(*parts, strict=True):
        X, Y, S, DX = (t.double() for t in part)
        assert torch.equal(S, 2 * X)
        total += (X * F.rms_norm(S, (N,), None, 1e-6)).sum(0)
        S.requires_grad_()
        expected = F.rms_norm(S, (N,), w.detach().double(), 1e-6)
        (grad,) = torch.autograd.grad(expected, S, X)
        assert (Y - expected).norm() <= 2**-11 * expected.norm()
        assert (DX - grad - X).norm() <= 2**-11 * (grad + X).norm()
    assert (dw - total).norm() <= 2**-11 * total.norm()


@pytest.mark.parametrize("N", [1000, 16384, 20000])
def test_torch_compile(N):
    functions = page.rms_norm, page.add_rms_norm
    compiled = [torch.compile(f, fullgraph=True) for f in functions]
    for fused in False, True:
        case = Case((4, 37), (N,), torch.float16, fused=fused, offset=1.0)
        tensors = case.tensors(page.DEVICE)
        found = cases.results(compiled, case, *tensors)
        cases.check(case, found, page.DEVICE, tensors)


@pytest.mark.parametrize("N", [1000, 16384, 20000])
def test_cuda_graph(N):
    given = page.inputs(512, N, torch.float16)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        page.add_results(page.add_rms_norm, *given)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            found = page.add_results(page.add_rms_norm, *given)
    with torch.no_grad():
        given[0].normal_()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    wide = [t.detach().double().requires_grad_() for t in given]
    expected = page.add_results(page.torch_add_rms_norm, *wide)
    for a, b in zip(found, expected, strict=True):
        assert (a - b).norm() <= 2**-11 * b.norm()


class Model(torch.nn.Module):
    """Four blocks with a residual stream and a norm with the factor 1 + w."""

    def __init__(self, add_norm, N=256):
        super().__init__()
        self.add_norm = add_norm
        self.weights = torch.nn.ParameterList(torch.zeros(N) for _ in range(4))
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(
                torch.nn.Linear(N, 2 * N),
                torch.nn.SiLU(),
                torch.nn.Linear(2 * N, N),
            )
            for _ in range(4)
        )

    def forward(self, x):
        residual, out = x, torch.zeros_like(x)
        for block, weight in zip(self.blocks, self.weights, strict=True):
            y, residual = self.add_norm(out, residual, weight)
            out = block(y)
        return residual + out


def _losses(add_norm, steps=100):
    torch.manual_seed(0)
    model = Model(add_norm).to(page.DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(512, 256, device=page.DEVICE)
    target = x.roll(1, dims=1).cumsum(dim=1) / 8
    losses = []
    for _ in range(steps):
        loss = F.mse_loss(model(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def test_training_follows_pytorch():
    """100 steps: the two loss curves differ by at most 0.5 %."""
    ours = _losses(
        lambda x, r, w: page.add_rms_norm(x, r, w.shape, w, offset=1.0)
    )
    theirs = _losses(
        lambda x, r, w: page.torch_add_rms_norm(x, r, w.shape, 1 + w)
    )
    assert theirs[-1] < 0.5 * theirs[0]
    torch.testing.assert_close(ours, theirs, rtol=5e-3, atol=0)


MEMCHECK = f"""
import torch
from tutorial import load
page = load("{NAME}")
for dtype in torch.float16, torch.float32:
    for N in 1001, 26001:
        page.add_results(page.add_rms_norm, *page.inputs(3, N, dtype))
torch.cuda.synchronize()
print("done")
"""


def test_memcheck():
    """Each kernel under compute-sanitizer."""
    printed = sanitizer.run("memcheck", MEMCHECK)
    assert "ERROR SUMMARY: 0 errors" in printed
