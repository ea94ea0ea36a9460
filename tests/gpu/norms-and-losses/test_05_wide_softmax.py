"""Softmax of every width: on a GPU, at full size."""

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

import sanitizer
from softmax_cases import Case, check
from tutorial import load

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

NAME = "norms-and-losses/05-wide-softmax"
page = load(NAME)
KINDS = ("slices", "slices"), ("shifted", "page 03")
WIDE = [32769, 49152, 50257, 65536, 100_003, 2**17, 2**18, 2**20]


def compare(x, dy, log=False, kinds=(None, None), dtype=None):
    x = x.detach().requires_grad_()
    y = page.Softmax.apply(x, log, dtype or x.dtype, kinds)
    (dx,) = torch.autograd.grad(y, x, dy)
    name = "log_softmax" if log else "softmax"
    case = Case(x.shape, x.dtype, out=dtype, name=name)
    check(case, (y.detach(), dx), x.device, x.detach(), dy)


def tensors(M, N, dtype):
    torch.manual_seed(0)
    return torch.randn(2, M, N, device="cuda").to(dtype)


@pytest.mark.parametrize("N", [1, 2, 127, 128, 129, 1000, 4097, 16384, *WIDE])
@pytest.mark.parametrize("log", [False, True])
def test_rule(N, log):
    """Narrow rows, rows of both passes' limits, rows of a million columns."""
    for M in 1, 37:
        for dtype in torch.bfloat16, torch.float16, torch.float32:
            compare(*tensors(M, N, dtype), log)


@pytest.mark.parametrize("N", [16385, 32768, 32769, 65537, 131_071])
def test_limits_of_the_rule_and_float64(N):
    compare(*tensors(133, N, torch.bfloat16))
    x, _ = tensors(5, N, torch.float64)
    y = page.softmax(x)
    torch.testing.assert_close(y, F.softmax(x, -1), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("N", [1, 8, 301, 4097, 30_000, 50257, 2**17])
def test_kinds(N, kinds):
    """Also where the rule would take another one."""
    for M in 1, 300:
        compare(*tensors(M, N, torch.bfloat16), False, kinds)
        compare(*tensors(M, N, torch.float32), True, kinds)


@pytest.mark.parametrize("N", [50257, 2**17])
def test_full_size(N):
    compare(*tensors(2**27 // N, N, torch.bfloat16))


@pytest.mark.parametrize("kinds", KINDS)
def test_infinity_and_the_lowest_number(kinds):
    low, infinity = torch.finfo(torch.float32).min, float("inf")
    x = torch.randn(8, 100_003, device="cuda")
    x[0], x[1], x[2, :90_000], x[3, 7] = -infinity, low, -infinity, infinity
    x[4, 300], x[5, ::2] = float("nan"), low
    for log in False, True:
        y = page.Softmax.apply(x, log, x.dtype, kinds)
        expected = (F.log_softmax if log else F.softmax)(x, -1)
        torch.testing.assert_close(y, expected, equal_nan=True)


def test_types_and_layouts():
    x, dy = tensors(20, 70_001, torch.bfloat16)
    compare(x, dy.float(), dtype=torch.float32)
    compare(x, dy[:, :1].expand_as(x))
    wide = torch.randn(70_001, 20, device="cuda").bfloat16()
    compare(x, wide.T)
    got = page.softmax(wide, 0)
    torch.testing.assert_close(got, F.softmax(wide, 0))
    memory = torch.randn(5 * 70_001 + 1, device="cuda").bfloat16()
    view = memory[1:].view(5, -1)  # it begins at no multiple of 16 bytes
    for kinds in (None, None), *KINDS:
        compare(view, view, kinds=kinds)


@pytest.mark.parametrize("N", [1000, 50257, 2**17, 2**20])
def test_same_bits_100_times(N):
    x, dy = tensors(2**25 // N + 1, N, torch.bfloat16)
    x.requires_grad_()

    def again():
        y = page.softmax(x)
        return y, *torch.autograd.grad(y, x, dy)

    first = again()
    for _ in range(100):
        assert all(map(torch.equal, first, again()))


@pytest.mark.parametrize("N", [50257, 2**17])
def test_cuda_graph(N):
    """Replayed, its words are cleared anew."""
    x, dy = tensors(300, N, torch.bfloat16)
    x.requires_grad_()

    def call():
        y = page.softmax(x)
        return y, *torch.autograd.grad(y, x, dy)

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        got = call()
    with torch.no_grad():
        x.normal_()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert all(map(torch.equal, got, call()))


def test_two_streams():
    """Each call has words of its own; a launch waits for room."""
    x, _ = tensors(300, 2**17, torch.bfloat16)
    expected, found = page.softmax(x), []
    torch.cuda.synchronize()
    for stream in torch.cuda.Stream(), torch.cuda.Stream():
        with torch.cuda.stream(stream):
            found += [page.softmax(x) for _ in range(10)]
    torch.cuda.synchronize()
    assert all(torch.equal(y, expected) for y in found)


def test_torch_compile():
    """One compiled function takes many widths, and has the same bits."""
    compiled = torch.compile(page.softmax, fullgraph=True)
    for N in 50257, 2**17, 1000, 65536, 100_003:
        x, dy = tensors(37, N, torch.bfloat16)
        x.requires_grad_()
        for y, want in zip(*(
            (y, *torch.autograd.grad(y, x, dy))
            for y in (compiled(x), page.softmax(x))
        ), strict=True):  # fmt: skip
            assert torch.equal(y, want)


@pytest.mark.parametrize("N", [50257, 2**17])
def test_more_than_2_31_elements(N):
    M = 2**31 // N + 5
    x = torch.empty(M, N, dtype=torch.bfloat16, device="cuda").normal_()
    x.requires_grad_()
    y = page.softmax(x)
    (dx,) = torch.autograd.grad(y, x, x.detach())
    for rows in slice(0, 8), slice(M - 8, M):
        exact = x.detach()[rows].double().requires_grad_()
        wanted = F.softmax(exact, -1)
        (gradient,) = torch.autograd.grad(wanted, exact, exact.detach())
        assert (y[rows] - wanted).norm() <= 2**-8 * wanted.norm()
        assert (dx[rows] - gradient).norm() <= 2**-8 * gradient.norm()


def test_programs_fit():
    """All programs of a launch run at the same time, at every width."""
    for N in range(32769, 2**20, 37_003):
        for backward in False, True:
            warps, per_sm, chunks = page.plan_shared(backward, 2 * N)
            parts, _ = page.cut(N, 8, warps, chunks)
            assert parts <= page.NUM_SMS * per_sm
    x = torch.zeros(3, 2**24, device="cuda")  # more slices than programs
    assert page.pick(False, x.dtype, x) == "page 03"
    compare(x, x + 1)


def test_too_many_programs_are_refused(monkeypatch):
    """A cooperative launch fails; it does not hang."""
    monkeypatch.setattr(page, "NUM_SMS", 10 * page.NUM_SMS)
    x = torch.zeros(4096, 2**17, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="cooperative"):
        page.in_slices(x)


ALONE = f"""
import torch
from tutorial import load
page = load("{NAME}", [
    ("loads == 10_000_000", "loads == 1000"),
    ("tl.atomic_xchg(at, word,", "tl.atomic_xchg(at, word, part > 0,"),
])
# The first slice of each row publishes nothing.
page.in_slices(torch.zeros(300, 2**17, device="cuda", dtype=torch.bfloat16))
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


@pytest.mark.parametrize("key", ["liger", "quack"])
def test_libraries_are_called_rightly(key):
    if key not in page.CALLS:
        pytest.skip(f"{key} cannot be imported")
    x, dy = tensors(128, 4096, torch.bfloat16)
    x.requires_grad_()
    y = page.CALLS[key](x)
    (dx,) = torch.autograd.grad(y, x, dy)
    y_ours = page.softmax(x)
    (dx_ours,) = torch.autograd.grad(y_ours, x, dy)
    for got, want in (y, y_ours), (dx, dx_ours):
        assert (got - want).norm() <= 2**-7 * want.norm()


# No rows that begin anywhere: their last group may reach beyond the matrix,
# inside memory.
SANITIZED = f"""
import sys
import torch
from tutorial import load
page = load("{NAME}")
widths = 4096, 32768, 40_000, 2**17
# Under racecheck programs are so slow that one stops waiting, and traps.
for N in widths[:2] if sys.argv[1] == "racecheck" else widths:
    page.check(3, N, torch.bfloat16, False)
torch.cuda.synchronize()
print("done")
"""


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_sanitizer(tool):
    sanitizer.run(tool, SANITIZED)
