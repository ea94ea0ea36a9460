"""Programs that share a row: on a GPU, at full size."""

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

import layer_norm_cases as cases
import sanitizer
from layer_norm_cases import Case
from tutorial import load

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

NAME = "layer-norm/08-shared-rows"
page = load(NAME)
TYPES = (torch.float16, torch.bfloat16, torch.float32)
WIDTHS = [8, 4104, 65536, 131_080, 393_216, 2**19]


def run(case):
    cases.run(page.layer_norm, case, page.DEVICE)


@pytest.mark.parametrize("N", WIDTHS)
@pytest.mark.parametrize("M", [1, 37])
def test_widths(N, M):
    for dtype in TYPES:
        run(Case((M,), (N,), dtype))


def test_a_million_columns():
    run(Case((7,), (2**20,), torch.float16))
    run(Case((1,), (2**20,), torch.bfloat16))


@pytest.mark.parametrize("N", [32768, 65536, 262_144])
def test_full_size(N):
    run(Case((2**26 // N,), (N,), torch.float16))


@pytest.mark.parametrize("layout", cases.LAYOUTS)
@pytest.mark.parametrize("which", ["x", "dy", "parameters"])
def test_layouts(which, layout):
    run(Case((20, 3), (130, 128), torch.float16, **{which: layout}))


@pytest.mark.parametrize("lead", [(), (0,), (1,), (2, 1, 3)])
def test_dimensions(lead):
    run(Case(lead, (20_000,)))


@pytest.mark.parametrize("N", [65536, 2**19, 2**20])
def test_same_bits_100_times(N):
    M = 2**25 // N + 1
    x, w, b, dy = page.inputs(M, N, torch.float16)

    def again():
        y = page.layer_norm(x, (N,), w, b)
        return y, *torch.autograd.grad(y, (x, w, b), dy)

    first = again()
    for _ in range(100):
        assert all(map(torch.equal, first, again()))


@pytest.mark.parametrize("later", [0, 1])
def test_a_turn_later(later):
    x = torch.arange(2048.0, device="cuda").reshape(128, 16) / 2048
    found = page.shared_sums(page._shared_sums, x, 1000, later)
    expected = torch.stack([x.sum(), (x * x).sum()]).expand(128, 2)
    torch.testing.assert_close(found, expected)


def test_cuda_graph():
    """Replayed, its words are filled anew."""
    x, w, b, dy = page.inputs(64, 65536, torch.float16)

    def call():
        y = page.layer_norm(x, (65536,), w, b)
        return torch.autograd.grad(y, (x, w, b), dy)

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        found = call()
    with torch.no_grad():
        x.normal_()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    for got, expected in zip(found, call(), strict=True):
        assert torch.equal(got, expected)


def test_more_than_2_31_elements():
    N = 65536
    M = 2**31 // N + 5
    x = torch.empty(M, N, dtype=torch.float16, device="cuda").normal_()
    x.requires_grad_()
    w = torch.ones(N, device="cuda", requires_grad=True)
    y = page.layer_norm(x, N, w)
    # dy is y, up to its rounding: dx is nearly 0, and so is dw - M.
    dx, dw = torch.autograd.grad(y, (x, w), y.detach())
    x, y = x.detach(), y.detach()
    for rows in slice(0, 64), slice(M - 64, M):
        expected = F.layer_norm(x[rows].double(), (N,))
        assert (y[rows] - expected).norm() <= 2**-11 * expected.norm()
        assert dx[rows].abs().max() < 1e-2
    assert (dw - M).abs().max() < 0.05 * M


def test_too_many_programs_are_refused():
    """A cooperative launch fails; it does not hang."""
    x, out = torch.zeros(2, 16 * 2**17, device="cuda")
    words = page.empty_words(1, 2**17)
    with pytest.raises(RuntimeError, match="cooperative"):
        args = x, out, words, 1, 0, 16, 4
        page.together(page._shared_sums, 2**17, *args, per_sm=1, warps=4)


ALONE = """
import torch
from tutorial import load
soon = "loads, 10000000,", "loads, 1000,"
page = load("layer-norm/08-shared-rows", [soon])
x, out = torch.zeros(64, device="cuda"), torch.zeros(8, device="cuda")
# Three programs, where four words are awaited.
args = x, out, page.empty_words(1, 4), 1, 0, 16, 4
page.together(page._shared_sums, 3, *args, per_sm=1, warps=4)
torch.cuda.synchronize()
print("no error")
"""


def test_a_word_that_never_comes_is_an_error():
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", ALONE], capture_output=True, text=True, env=env
    )
    assert done.returncode and "no error" not in done.stdout
    assert "CUDA error" in done.stderr, done.stderr[-2000:]


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


SANITIZED = """
import torch
from tutorial import load
page = load("layer-norm/08-shared-rows")
page.check(page.layer_norm, 5, 20_008, torch.float16)
page.shared_sums(page._shared_sums, torch.ones(4, 16, device="cuda"), 3, 1)
torch.cuda.synchronize()
print("done")
"""


def test_memcheck():
    sanitizer.run("memcheck", SANITIZED)
