"""Every width behind one function: on a GPU, at full size."""

import functools

import pytest
import torch
import torch.nn.functional as F

import layer_norm_cases as cases
import sanitizer
from layer_norm_cases import Case
from tutorial import load

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

NAME = "layer-norm/11-every-width"
page = load(NAME)
# Bytes of a row.
LIMITS = (20464, 20480, 24560, 32768, 98304, 2 * page.NUM_SMS * page.SLICE)


def run(case, function=page.layer_norm):
    """The second time there are a plan and compiled kernels."""
    for _ in range(2):
        cases.run(function, case, page.DEVICE)


def again(x, w, b, dy):
    y = page.layer_norm(x, x.shape[-1:], w, b)
    return y, *torch.autograd.grad(y, (x, w, b), dy)


@pytest.fixture(autouse=True)
def no_plans():
    page.PLANS.clear()


@pytest.mark.parametrize("limit", LIMITS)
def test_both_sides_of_each_limit(limit):
    N = limit // 2
    M = 37 if N < 100_000 else 3
    for width in N - 8, N - 1, N, N + 1, N + 8:
        run(Case((M,), (width,), torch.float16))
    run(Case((M,), (limit // 4,), torch.float32))
    run(Case((M,), (limit // 8,), torch.float64))


@pytest.mark.parametrize("N", [1, 2, 8, 37, 1000, 1151, 4097, 4608, 15872])
def test_full_size(N):
    run(Case((4096,), (N,), torch.float16))
    run(Case((1151,), (N,), torch.bfloat16))
    for dtype in torch.float32, torch.float64:
        run(Case((300,), (N,), dtype))


@pytest.mark.parametrize("N", [2**16 - 1, 2**16, 100_003, 2**20])
@pytest.mark.parametrize("M", [1, 6])
def test_wide_rows(N, M):
    for dtype in cases.DTYPES:
        run(Case((M,), (N,), dtype))


@pytest.mark.parametrize("kind", page.FORWARD)
def test_every_kind(kind):
    f = functools.partial(page.layer_norm, kernels=(kind, kind))
    for N in (4096, 9000) if kind == "chunks" else (4095, 9001):
        run(Case((701,), (N,), torch.float16), f)
        run(Case((701,), (N,), torch.bfloat16, bias=False), f)
    for number in range(8):
        wanted = tuple(bool(number >> i & 1) for i in range(3))
        run(Case((5,), (1000,), wanted=wanted), f)


@pytest.mark.parametrize("layout", cases.LAYOUTS)
@pytest.mark.parametrize("which", ["x", "dy", "parameters"])
def test_layouts(which, layout):
    for shape in (40, 25), (130, 127), (128, 512):
        run(Case((20, 3), shape, torch.float16, **{which: layout}))


@pytest.mark.parametrize("lead", [(), (0,), (1,), (2, 1, 3)])
def test_dimensions(lead):
    for N in 1001, 20_000, 65536:
        run(Case(lead, (N,), torch.float16))


@pytest.mark.parametrize("N", [256, 1000, 1151, 8192, 15872, 65536, 2**20])
def test_same_bits_100_times(N):
    given = page.inputs(min(512, 2**25 // N), N, torch.float16)
    first = again(*given)
    for _ in range(100):
        assert all(map(torch.equal, first, again(*given)))


@pytest.mark.parametrize("N", [4093, 4096, 12345, 32768])
def test_more_than_2_31_elements(N):
    M = 2**31 // N + 5
    x = torch.empty(M, N, dtype=torch.float16, device="cuda").normal_()
    w = torch.ones(N, device="cuda", requires_grad=True)
    x.requires_grad_()
    y = page.layer_norm(x, N, w)
    # dy is y, up to its rounding: dx is nearly 0, and so is dw - M.
    dx, dw = torch.autograd.grad(y, (x, w), y.detach())
    for rows in slice(0, 64), slice(M - 64, M):
        expected = F.layer_norm(x[rows].double(), (N,))
        assert (y[rows] - expected).norm() <= 2**-11 * expected.norm()
        assert dx[rows].abs().max() < 1e-2
    assert (dw - M).abs().max() < 0.05 * M


@pytest.mark.parametrize("N", [37, 1151, 4097, 12345, 20001, 65537])
def test_neighbors_stay_out(N):
    """A row of NaN makes no other row NaN, whatever shares its 16 bytes."""
    x, w, b, dy = page.inputs(43, N, torch.float16)
    with torch.no_grad():
        x[4], dy[7] = float("nan"), float("inf")
    y = page.layer_norm(x, N, w, b)
    (dx,) = torch.autograd.grad(y, x, dy)
    others = [i for i in range(43) if i not in (4, 7)]
    assert y[others].isfinite().all() and dx[others].isfinite().all()
    assert y[4].isnan().all() and not dx[7].isfinite().any()


def test_another_address_in_one_plan():
    """Kept kernels load by 16 bytes: other addresses must go another way."""
    for N in 1024, 1151:
        memory = torch.randn(300 * N + 1, device="cuda").half()
        views = memory[:-1].view(300, N), memory[1:].view(300, N)
        for x in (*views, *views):
            y = page.layer_norm(x.detach().requires_grad_(), N)
            torch.testing.assert_close(y, F.layer_norm(x, (N,)))
            y.backward(x)
    assert len(page.PLANS) == 2


@pytest.mark.parametrize("N", [1000, 1151, 16384, 65536])
def test_torch_compile(N):
    case = Case((4, 37), (N,), torch.float16)
    tensors = case.tensors(page.DEVICE)
    compiled = torch.compile(page.layer_norm, fullgraph=True)
    found = cases.gradients(compiled, case, *tensors)
    cases.check(case, found, page.DEVICE, tensors)


@pytest.mark.parametrize("N", [1000, 1151, 16384, 65536])
def test_cuda_graph(N):
    given = page.inputs(512, N, torch.float16)
    again(*given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        found = again(*given)
    with torch.no_grad():
        given[0].normal_()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    wide = [t.detach().double().requires_grad_() for t in given]
    y = F.layer_norm(wide[0], (N,), *wide[1:3])
    expected = y, *torch.autograd.grad(y, wide[:3], wide[3])
    for a, b in zip(found, expected, strict=True):
        assert (a - b).norm() <= 2**-11 * b.norm()


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


@pytest.mark.parametrize("key", page.LIBRARIES)
def test_libraries_are_called_rightly(key):
    if page.library(key) is None:
        pytest.skip(f"{key} cannot be imported")
    x, w, b, dy = page.inputs(128, 1024, torch.float16)
    if key == "quack":
        w, b = (t.detach().float().requires_grad_() for t in (w, b))
    wide = [t.detach().double().requires_grad_() for t in (x, w, b)]
    y = page.library(key)(x, (1024,), w, b)
    found = y, *torch.autograd.grad(y, (x, w, b), dy)
    y = F.layer_norm(wide[0], (1024,), *wide[1:])
    expected = y, *torch.autograd.grad(y, wide, dy.double())
    for got, want in zip(found, expected, strict=True):
        assert (got - want).norm() <= 2e-3 * want.norm()


# No shifted rows: their last group may reach beyond the matrix, inside memory.
SANITIZED = """
import sys
import torch
from tutorial import load
page = load("layer-norm/11-every-width")
widths = 1024, 4608, 20000, 65536
# Under racecheck programs are so slow that one stops waiting, and traps.
for N in widths[:-1] if sys.argv[1] == "racecheck" else widths:
    for _ in range(2):
        page.check(page.layer_norm, 70, N, torch.float16)
torch.cuda.synchronize()
print("done")
"""


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_sanitizer(tool):
    sanitizer.run(tool, SANITIZED)
