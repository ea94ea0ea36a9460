"""RMS norm and the residual stream: on a GPU, at full size."""

import pytest
import torch
import torch.nn.functional as F

import rms_norm_cases as cases
import sanitizer
from layer_norm_cases import STREAMS
from rms_norm_cases import Case
from tutorial import load

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

NAME = "norms-and-losses/01-rms-norm"
page = load(NAME)
OURS = page.CALLS["triton"]


def run(case):
    cases.run(page, case)


# Both sides of each step of the rules; in other types, a narrow row and the
# widest one.
STEPS = [8, 1000, 4096, 4104, 8192, 8200, 12288, 12296, 16384]
TYPES = [(N, torch.bfloat16) for N in [*STEPS, *page.WIDTHS]]
TYPES += [(N, torch.float16) for N in (37, 2048, 16384)]
TYPES += [(520, torch.float32), (8192, torch.float32)]
TYPES += [(264, torch.float64), (4096, torch.float64)]


@pytest.mark.parametrize(("N", "dtype"), TYPES)
def test_steps(N, dtype):
    run(Case((1151,), (N,), dtype))
    run(Case((1151,), (N,), dtype, fused=False))


@pytest.mark.parametrize("N", [37, 4096, 8192, 16384])
def test_float32_stream(N):
    for half in torch.float16, torch.bfloat16:
        run(Case((1151,), (N,), half, stream_dtype=torch.float32))
        run(Case((301,), (N,), half, weight_dtype=torch.float32))


@pytest.mark.parametrize(("dtype", "stream"), STREAMS)
def test_types(dtype, stream):
    for N in 40, 3000:
        run(Case((301,), (N,), dtype, stream_dtype=stream))


@pytest.mark.parametrize("layout", cases.LAYOUTS)
@pytest.mark.parametrize("which", ["x", "residual", "dy", "ds", "parameters"])
def test_layouts(which, layout):
    run(Case((20, 3), (40, 25), torch.float16, **{which: layout}))


@pytest.mark.parametrize("lead", [(), (0,), (1,), (2, 1, 3)])
def test_dimensions(lead):
    run(Case(lead, (24,)))


@pytest.mark.parametrize("used", ["y", "s", "ys"])
def test_only_some_gradients(used):
    run(Case((5,), (16384,), torch.float16, used=used))


@pytest.mark.parametrize("N", [256, 1000, 4096, 16384])
def test_same_bits_100_times(N):
    given = page.inputs(512, N, torch.float16)
    first = page.results(OURS, *given)
    for _ in range(100):
        assert all(map(torch.equal, first, page.results(OURS, *given)))


def test_more_than_2_31_elements():
    N = 8192
    M = 2**31 // N + 5
    x = torch.empty(M, N, dtype=torch.float16, device="cuda")
    for rows in x.split(16384):
        rows.normal_()
    w = torch.rand(N, device="cuda").requires_grad_()
    y, s = page.add_rms_norm(x.requires_grad_(), x.detach(), (N,), w, 1e-6)
    (dx,) = torch.autograd.grad((y, s), x, (x.detach(), x.detach()))
    for rows in slice(0, 64), slice(M - 64, M):
        X = x.detach()[rows].double()
        S = (2 * X).requires_grad_()
        assert torch.equal(s[rows], S)
        expected = F.rms_norm(S, (N,), w.detach().double(), 1e-6)
        (grad,) = torch.autograd.grad(expected, S, X)
        assert (y[rows] - expected).norm() <= 2**-11 * expected.norm()
        assert (dx[rows] - grad - X).norm() <= 2**-11 * (grad + X).norm()


@pytest.mark.parametrize("N", [1000, 16384])
def test_torch_compile(N):
    compiled = torch.compile(OURS, fullgraph=True)
    given = page.inputs(37, N, torch.float16)
    found, expected = (page.results(f, *given) for f in (compiled, OURS))
    for a, b in zip(found, expected, strict=True):
        assert (a - b).norm() <= 2**-11 * b.norm()


@pytest.mark.parametrize("N", [1000, 16384])
def test_cuda_graph(N):
    given = page.inputs(512, N, torch.float16)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        page.results(OURS, *given)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            found = page.results(OURS, *given)
    with torch.no_grad():
        given[0].normal_()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    expected = page.results(OURS, *given)
    assert all(map(torch.equal, found, expected))


def losses(norm, steps=20):
    torch.manual_seed(0)
    layers = [torch.nn.Linear(96, 96, device="cuda") for _ in range(3)]
    w = torch.ones(96, device="cuda", requires_grad=True)
    parameters = [w, *(p for f in layers for p in f.parameters())]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    x = torch.randn(256, 96, device="cuda")
    found = []
    for _ in range(steps):
        out, s = torch.zeros_like(x), x
        for layer in layers:
            y, s = norm(out, s, w)
            out = F.gelu(layer(y))
        loss = F.mse_loss(s + out, x.roll(1, 0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return torch.stack(found)


def test_trains_like_pytorch():
    ours, theirs = losses(OURS), losses(page.CALLS["torch"])
    assert theirs[-1] < 0.9 * theirs[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=0)


@pytest.mark.parametrize("mode", ["forward", "backward"])
def test_the_ceiling_moves_everything(mode):
    """Each tile moves all rows: sums and copies are right."""
    for tile in page.TILES:
        x, residual, w, dy, ds = page.inputs(16, 2048, torch.float32)
        total = x + residual + (0 if mode == "forward" else ds)
        page.move(*tile, mode, x, residual, w, dy, ds)()
        assert torch.equal(dy, total)
        assert mode == "backward" or torch.equal(ds, total)


SANITIZED = f"""
import torch
from tutorial import load
page = load("{NAME}")
for N, dtype in (1000, torch.float16), (16384, torch.float16):
    page.check(301, N, dtype)
torch.cuda.synchronize()
print("done")
"""


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_sanitizer(tool):
    sanitizer.run(tool, SANITIZED)
