"""Cross-entropy over a vocabulary: on a GPU, at full size."""

import os
import subprocess
import sys

import cross_entropy_cases as cases
import pytest
import torch
import torch.nn.functional as F
from cross_entropy_cases import DTYPES, Case

import sanitizer
from tutorial import load

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

NAME = "norms-and-losses/04-cross-entropy"
page = load(NAME)
VOCABULARIES = 32000, 50257, 65536, 128256, 262144


def run(case):
    cases.run(page, case)


# Both sides of each step of the rule for both sweeps, too.
WIDTHS = [1, 7, 1000, 4099, 32768, 32769, 65537, 100003, *VOCABULARIES]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("N", WIDTHS)
def test_widths(N, dtype):
    for ahead in False, True:
        run(Case(M=61, N=N, dtype=dtype, ahead=ahead))
        run(Case(M=61, N=N, dtype=dtype, ahead=ahead, weight=True, smooth=0.1))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_terms(reduction):
    for terms in {"z": 1e-3}, {"smooth": 0.1}, {"weight": True, "smooth": 0.3}:
        for N in 50257, 128256:
            run(Case(M=61, N=N, reduction=reduction, **terms))
            run(Case(M=61, N=N, reduction=reduction, begin=3, **terms))


def test_logits_far_from_0():
    for shift in -1e5, 1e5:
        run(Case(M=61, N=50257, shift=shift))
        run(Case(M=61, N=50257, shift=shift, ahead=True))


@pytest.mark.parametrize("value", [float("-inf"), torch.finfo().min, 1e4])
def test_extreme_logits(value):
    x = torch.randn(4, 50257, device="cuda")
    x[0, 3:999], x[1, 1:], x[2, :] = value, value, value
    target = torch.tensor([0, 0, 1, -100], device="cuda")
    found = []
    for f, t in (page.cross_entropy, x), (F.cross_entropy, x.double()):
        t.requires_grad_()
        losses = f(t, target, reduction="none")
        found.append((losses, *torch.autograd.grad(losses.sum(), t)))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(
            got.double(), want, rtol=1e-5, atol=1e-6, equal_nan=True
        )


def test_a_target_that_is_no_class_is_nan():
    x = torch.randn(4, 1000, device="cuda", requires_grad=True)
    target = torch.tensor([1, 1000, -1, 2**40], device="cuda")
    losses = page.cross_entropy(x, target, reduction="none")
    (dx,) = torch.autograd.grad(losses.sum(), x)
    for t in losses[:, None], dx:
        assert t.isnan().all(1).tolist() == [False, True, True, True]
    assert page.cross_entropy(x, target).isnan()


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("N", [50257, 128256])
def test_same_bits_100_times(N, ahead):
    x, target = page.inputs(512, N, torch.bfloat16)

    def results():
        loss = page.cross_entropy(x, target, z_loss=1e-4, ahead=ahead)
        return loss, *torch.autograd.grad(loss, x)

    first = results()
    for _ in range(100):
        assert all(map(torch.equal, first, results()))


@pytest.mark.parametrize("N", [50257, 128256, 100003, 262144])
def test_written_over_the_logits(N):
    """No slice is overwritten before all of its row are read."""
    x, target = page.inputs(512, N, torch.bfloat16)
    x, how = x.detach(), (-100, 0.1, 1e-4)
    g, dx = torch.ones((), device="cuda"), torch.empty_like(x)
    rows = page.sweeps(x, target, None, how, None, g, dx)
    for _ in range(20):
        over = x.clone()
        found = page.sweeps(over, target, None, how, None, g, over)
        assert torch.equal(over, dx) and torch.equal(found, rows)


ALONE = f"""
import torch
from tutorial import load
# All slices store the same word; the others never come.
page = load("{NAME}", [("words_ptr + s, word,", "words_ptr + 0 * s, word,")])
x, target = page.inputs(4, 262144, torch.bfloat16)
g, dx = torch.ones((), device="cuda"), torch.empty_like(x)
page.sweeps(x.detach(), target, None, (-100, 0.0, 0.0), None, g, dx)
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


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("N", [50257, 262144])
def test_more_than_2_31_elements(N, ahead):
    """Rows on both sides, and where 32 bits would have begun anew."""
    M = 2**31 // N + 70
    x = torch.empty(M, N, dtype=torch.bfloat16, device="cuda")
    for rows in x.split(1024):
        rows.normal_()
    target = torch.randint(N, (M,), device="cuda")
    loss = page.cross_entropy(
        x.requires_grad_(), target, reduction="sum", ahead=ahead
    )
    (dx,) = torch.autograd.grad(loss, x)
    losses = page.cross_entropy(x.detach(), target, reduction="none")
    for rows in (
        slice(0, 8),
        slice(2**31 // N - 4, 2**31 // N + 4),
        slice(M - 8, M),
    ):
        exact = x.detach()[rows].double().requires_grad_()
        want = F.cross_entropy(exact, target[rows], reduction="none")
        (expected,) = torch.autograd.grad(want.sum(), exact)
        assert (losses[rows] - want).norm() <= 2**-8 * want.norm()
        assert (dx[rows] - expected).norm() <= 2**-8 * expected.norm()


@pytest.mark.parametrize("ahead", [False, True])
def test_cuda_graph(ahead):
    x, target = page.inputs(64, 50257, torch.bfloat16)

    def step():
        loss = page.cross_entropy(x, target, ahead=ahead)
        return torch.autograd.grad(loss, x)[0]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        expected = step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            found = step()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(found, expected)


@pytest.mark.parametrize("ahead", [False, True])
def test_no_step_waits_for_the_device(ahead):
    x, target = page.inputs(64, 50257, torch.bfloat16)
    w = torch.rand(50257, device="cuda", dtype=torch.bfloat16)

    def step():
        loss = page.cross_entropy(
            x, target, w, label_smoothing=0.1, ahead=ahead
        )
        torch.autograd.grad(loss, x)

    step()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_an_upstream_gradient_of_1_costs_no_sweep():
    """The kernel leaves the gradient as it is: not a bit is written."""
    dx = torch.randn(1000, 1000, device="cuda", dtype=torch.bfloat16)
    before = dx.clone()
    page._scale[(64,)](dx, torch.ones((), device="cuda"), dx.numel(), 2048)
    assert torch.equal(dx, before)
    page._scale[(64,)](
        dx, torch.full((), 2.0, device="cuda"), dx.numel(), 2048
    )
    assert torch.equal(dx, 2 * before)


def test_chunks_hold_less_and_are_right():
    h = torch.randn(4096, 256, device="cuda", dtype=torch.bfloat16) / 16
    w = torch.randn(50257, 256, device="cuda", dtype=torch.bfloat16)
    target = torch.randint(50257, (4096,), device="cuda")
    exact = h.double().requires_grad_(), w.double().requires_grad_()
    loss = F.cross_entropy(F.linear(*exact), target)
    expected = [t.detach() for t in (loss, *torch.autograd.grad(loss, exact))]
    del exact, loss
    held = []
    for rows in 256, 4096:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        found = page.in_chunks(h, w, target, rows)
        held.append(torch.cuda.max_memory_allocated() - before)
        for got, want in zip(found, expected, strict=True):
            assert (got - want).norm() <= 2**-6 * want.norm()
    assert held[0] < held[1] / 2


def test_every_call_computes_the_same():
    def half(x, target):
        return 0.5 * page.AHEAD(x, target)

    for call, factor in (page.LATER, 1), (page.AHEAD, 1), (half, 0.5):
        x, target = page.inputs(64, 32000, torch.bfloat16)
        exact = x.detach().double().requires_grad_()
        want = factor * F.cross_entropy(exact, target)
        (expected,) = torch.autograd.grad(want, exact)
        (dx,) = torch.autograd.grad(call(x, target), x)
        assert (dx - expected).norm() <= 2**-6 * expected.norm()


def test_the_ceiling_reads_everything():
    x = page.inputs(64, 8192, torch.bfloat16)[0].detach()
    x[63, 8191] = 100
    out = torch.empty(64, device="cuda", dtype=x.dtype)
    page._read[(64,)](x, out, 8192, num_warps=8)
    assert torch.equal(out, x.amax(1))


SANITIZED = f"""
import sys
import torch
from tutorial import load
page = load("{NAME}")
half, single = torch.bfloat16, torch.float32
widths = (50257, half), (20001, single), (70001, single)
# Under racecheck programs are so slow that one stops waiting, and traps.
for N, dtype in widths[:2] if sys.argv[1] == "racecheck" else widths:
    for ahead in False, True:
        x, target = page.inputs(37, N, dtype)
        target[3] = -100
        loss = page.cross_entropy(x, target, label_smoothing=0.1, ahead=ahead)
        torch.autograd.grad(2 * loss, x)
h, w = torch.randn(37, 8, device="cuda"), torch.randn(1001, 8, device="cuda")
page.in_chunks(h, w, torch.zeros(37, dtype=torch.int64, device="cuda"), 9)
torch.cuda.synchronize()
print("done")
"""


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_sanitizer(tool):
    sanitizer.run(tool, SANITIZED)
