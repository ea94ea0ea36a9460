"""Page 03 on a GPU, at full size."""

import pytest
import torch
import torch.nn.functional as F

import layer_norm_cases as cases
from layer_norm_cases import Case
from tutorial import load

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

page = load("03-layer-norm-any-width")
SIXTEEN_BITS = (torch.float16, torch.bfloat16)
LIMITS = (512, 1024, 1536, 2560, 3072, 4096, 5120, 10240, 14336, 20480)
LIMITS += (
    1152,
    8184,
    16376,
    24576,
    49152,
    65536,
    131072,
    262144,
    524288,
    32768,
)


def run(case):
    cases.run(page.layer_norm, case, page.DEVICE)


@pytest.mark.parametrize("shape", cases.SHAPES, ids=str)
def test_shapes(shape):
    for dtype in cases.DTYPES:
        run(Case(shape[:1], shape[1:], dtype))


@pytest.mark.parametrize("limit", LIMITS)
def test_both_sides_of_each_limit(limit):
    for N in limit - 8, limit - 1, limit, limit + 1, limit + 8:
        run(Case((37,), (N,), torch.float16))
    run(Case((37,), (limit // 2,), torch.float32))


@pytest.mark.parametrize("N", [1, 2**16 - 1, 2**16, 2**16 + 1, 2**20])
@pytest.mark.parametrize("M", [1, 6])
def test_widths(N, M):
    for dtype in cases.DTYPES:
        run(Case((M,), (N,), dtype))


@pytest.mark.parametrize("N", [1000, 4097, 8192, 15872, 65536])
def test_full_size(N):
    for dtype in SIXTEEN_BITS:
        run(Case((4096,), (N,), dtype))


@pytest.mark.parametrize("N", [16384, 65536, 100003, 2**20])
def test_portable_plans(N, monkeypatch):
    monkeypatch.setattr(page, "can_share", lambda dtype: False)
    for dtype in torch.float16, torch.float32:
        run(Case((40,), (N,), dtype))


@pytest.mark.parametrize("layout", cases.LAYOUTS)
@pytest.mark.parametrize("which", ["x", "dy", "parameters"])
def test_layouts(which, layout):
    for shape in ((40, 25), (130, 127)):
        run(Case((20, 3), shape, torch.float16, **{which: layout}))


@pytest.mark.parametrize("N", [65, 16384, 65536])
def test_only_some_gradients(N):
    for number in range(32):
        *wanted, weight, bias = (bool(number >> i & 1) for i in range(5))
        run(Case((5,), (N,), weight=weight, bias=bias, wanted=tuple(wanted)))


@pytest.mark.parametrize("N", [1024, 4608, 15872, 65536, 2**20])
@pytest.mark.parametrize("dtype", SIXTEEN_BITS)
def test_error_no_larger_than_pytorch(N, dtype):
    M = page.height(2048, N * 4, dtype)
    ours = page.errors(page.layer_norm, M, N, dtype)
    theirs = page.errors(F.layer_norm, M, N, dtype)
    for name, a, b in zip(["y", "dx", "dw", "db"], ours, theirs, strict=True):
        assert a <= 1.5 * b, f"{name}: {a:.2e}, PyTorch {b:.2e}"


@pytest.mark.parametrize("N", [256, 1000, 8192, 15872, 65536, 2**20])
def test_same_bits_100_times(N):
    M = page.height(512, N * 8, torch.float16)
    given = [t.detach() for t in page.inputs(M, N, torch.float16)]
    first = page.planned(*given)
    for _ in range(100):
        assert all(map(torch.equal, first, page.planned(*given)))


@pytest.mark.parametrize("N", [32768, 4093, 12345])
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
        assert dx[rows].abs().max() < 1e-2
    assert (dw - M).abs().max() < 0.05 * M


@pytest.mark.parametrize("N", [37, 1151, 4097, 12345, 20001, 65537])
def test_neighbors_stay_out(N):
    """A row of NaN makes no other row NaN, whatever shares its 16 bytes."""
    x, w, b, dy = (t.detach() for t in page.inputs(43, N, torch.float16))
    x[4], dy[7] = float("nan"), float("inf")
    y, mean, rstd = page.forward(x, w, b, 1e-5)
    dx = torch.empty_like(x)
    page.backward(dy, x, w, mean, rstd, dx, None, None)
    others = [i for i in range(43) if i not in (4, 7)]
    assert y[others].isfinite().all() and dx[others].isfinite().all()
    assert y[4].isnan().all() and not dx[7].isfinite().any()


@pytest.mark.parametrize("N", [129, 1151, 2047, 4097, 7777, 12345, 65537])
@pytest.mark.parametrize("M", [1, 9, 300])
def test_rows_that_start_anywhere(N, M):
    for dtype in cases.DTYPES:
        run(Case((M,), (N,), dtype))


@pytest.mark.parametrize("N", [1000, 16384, 65536])
def test_torch_compile(N):
    case = Case((4, 37), (N,), torch.float16)
    tensors = case.tensors(page.DEVICE)
    compiled = torch.compile(page.layer_norm, fullgraph=True)
    found = cases.gradients(compiled, case, *tensors)
    cases.check(case, found, page.DEVICE, tensors)


@pytest.mark.parametrize("N", [1000, 16384, 65536])
def test_cuda_graph(N):
    given = page.inputs(512, N, torch.float16)
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
