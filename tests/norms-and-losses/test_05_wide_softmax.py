"""Softmax of rows that programs share: in the interpreter, or on a GPU."""

import re

import pytest
import torch
import torch.nn.functional as F
from gather import functions, gathered, original
from triton.runtime.errors import InterpreterError
from triton.runtime.interpreter import TensorHandle

from compiled.aot import Call
from softmax_cases import Case, check
from tutorial import load, source

NAME = "norms-and-losses/05-wide-softmax"
SECTION = NAME.split("/")[0]
page = load(NAME)
page.NUM_SMS = 1  # few programs: a group of them has several rows
DTYPES = torch.float16, torch.bfloat16, torch.float32
KINDS = ("slices", "slices"), ("shifted", "page 03")


@pytest.fixture(autouse=True)
def claims(monkeypatch):
    """A pointer is a multiple of what a kernel claims: the interpreter does
    not care, a load of a GPU fails."""

    def check(handle, name, values):
        if name == "tt.divisibility":
            assert handle.data.flat[0] % values[0] == 0, "a false claim"

    monkeypatch.setattr(TensorHandle, "set_attr", check)


def wanted(x, dy, log):
    exact = x.detach().double().requires_grad_()
    y = (F.log_softmax if log else F.softmax)(exact, -1)
    return y.detach(), *torch.autograd.grad(y, exact, dy.double())


def apply(module, x, log=False, kinds=(None, None)):
    return module.Softmax.apply(x, log, x.dtype, kinds)


def found(module, x, dy, **how):
    x = x.detach().requires_grad_()
    y = apply(module, x, **how)
    return y.detach(), *torch.autograd.grad(y, x, dy)


def right(got, want, dtype):
    limit = torch.finfo(dtype).eps * (8 if dtype == torch.float32 else 1)
    for a, b in zip(got, want, strict=True):
        assert a.isfinite().all()
        assert (a.double() - b).norm() <= limit * b.norm(), (a, b)


def run(M, N, dtype, kinds, log=False, module=page):
    x, dy = (t.detach() for t in module.inputs(M, N, dtype))
    right(
        found(module, x, dy, log=log, kinds=kinds),
        wanted(x, dy, log),
        dtype,
    )


# The kernels of page 03 ------------------------------------------------------

TEXT = source(NAME)


def strangers(text):
    """What is not to the byte what its page has."""
    here = functions(text)
    return [
        name
        for name, number in gathered(text)
        if original(name, number, SECTION) != here[name]
    ]


def test_kernels_are_those_of_their_page():
    assert strangers(TEXT) == []
    names = {name for name, _ in gathered(TEXT)}
    assert {"_softmax_fwd", "_softmax_bwd", "plan_forward"} <= names


def test_a_changed_kernel_is_a_stranger():
    changed = TEXT.replace("m = tl.max(m, 1)[:, None]", "m = tl.max(m, 1)", 1)
    assert strangers(changed) == ["_softmax_fwd"]


def test_constants_are_those_of_their_page():
    three = load("norms-and-losses/03-softmax")
    for name in "LOG2E", "LOWEST":
        assert getattr(page, name).value == getattr(three, name).value


# Both passes -----------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kinds", KINDS)
def test_slices_and_sweeps(kinds, dtype):
    """Rows that begin at 16 bytes, and rows that begin anywhere."""
    run(3, 320, dtype, kinds)
    run(5, 301, dtype, kinds, log=dtype == torch.float16)


@pytest.mark.parametrize("N", [1, 7, 8, 32, 33, 129, 512, 520])
def test_widths(N):
    """Slices that are full, nearly full and nearly empty; one and many."""
    run(2, N, torch.float16, KINDS[N % 2], log=True)


def test_rows():
    for M in 1, 9:
        run(M, 136, torch.bfloat16, KINDS[0])


@pytest.mark.parametrize("kinds", KINDS)
def test_rows_of_infinity_and_of_the_lowest_number(kinds):
    """Masked entries are 0; a row of nothing else is NaN, as in PyTorch; and
    no row is changed by another one."""
    low, infinity = torch.finfo(torch.float32).min, float("inf")
    x = torch.randn(8, 301)
    x[0], x[1], x[2, :200], x[3, 7] = -infinity, low, -infinity, infinity
    x[4, 300], x[5, ::2] = float("nan"), low
    x = x.to(page.DEVICE)
    for log in False, True:
        y = apply(page, x, log, kinds)
        expected = (F.log_softmax if log else F.softmax)(x, -1)
        torch.testing.assert_close(y, expected, equal_nan=True)
    (dx,) = found(page, x, torch.ones_like(x), kinds=kinds)[1:]
    assert dx[[0, 3, 4]].isnan().all()
    assert dx[[1, 2, 5, 6, 7]].abs().max() < 1e-6


def test_y_is_rounded_before_the_sum():
    """Backward, the sum is that of the saved y."""
    x, dy = (t.detach() for t in page.inputs(2, 301, torch.bfloat16))
    y, dx = found(page, x, dy, kinds=KINDS[0])
    y, dy = y.double(), dy.double()
    exact = y * (dy - (y * dy).sum(1, keepdim=True))
    assert (dx - exact).norm() <= 2**-8 * exact.norm()


def test_gradcheck():
    x = torch.randn(2, 5, dtype=torch.float64, device=page.DEVICE)
    x.requires_grad_()
    for function in page.softmax, page.log_softmax:
        assert torch.autograd.gradcheck(function, (x,))


def test_float64_and_its_rule():
    x = torch.randn(2, 301, dtype=torch.float64, device=page.DEVICE)
    torch.testing.assert_close(page.in_shifted(x), F.softmax(x, -1))
    wide = torch.empty(1, 2**20, dtype=torch.float32)
    assert page.pick(False, torch.float64, wide) == "page 03"
    assert page.pick(True, torch.float64, wide.double()) == "page 03"


# The function ----------------------------------------------------------------


@pytest.mark.parametrize("dim", [0, 1, -2, -1])
def test_dimensions(dim):
    x = torch.randn(3, 5, 4, device=page.DEVICE, requires_grad=True)
    dy = torch.randn_like(x)
    y, expected = page.softmax(x, dim), F.softmax(x, dim)
    torch.testing.assert_close(y, expected)
    for a, b in zip(
        torch.autograd.grad(y, x, dy),
        torch.autograd.grad(expected, x, dy),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    "shape", [(), (0,), (0, 3), (3, 0), (2, 1), (0, 2**17)]
)
def test_empties_and_single_numbers(shape):
    x = torch.randn(shape, device=page.DEVICE, requires_grad=True)
    y = page.log_softmax(x, 0 if shape == (0,) else -1)
    torch.testing.assert_close(y, F.log_softmax(x, -1))
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert dx.shape == x.shape


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
@pytest.mark.parametrize("kinds", [KINDS[0], (None, None)])
def test_gradients_of_other_layouts(kinds, name):
    """Of an expanded dy, terms of dx cancel: nothing but errors is left."""
    for dtype in torch.bfloat16, torch.float32:
        x = torch.randn(4, 301).to(page.DEVICE, dtype)
        expanded = torch.randn(4, 1).to(page.DEVICE, dtype).expand(4, 301)
        strided = torch.randn(301, 4).to(page.DEVICE, dtype).T
        for dy in expanded, strided:
            got = found(page, x, dy, log=name == "log_softmax", kinds=kinds)
            check(Case(x.shape, dtype, name=name), got, page.DEVICE, x, dy)


def test_torch_compile():
    """It sees operators, and when a width changes nothing is lost."""
    module = load(NAME)  # its operators are those of the last one loaded
    compiled = torch.compile(
        module.softmax, fullgraph=True, backend="aot_eager"
    )
    for N in 301, 304, 1000:
        x, dy = module.inputs(2, N, torch.bfloat16)
        y, expected = compiled(x), module.softmax(x)
        assert torch.equal(y, expected)
        y, expected = (
            torch.autograd.grad(out, x, dy)[0] for out in (y, expected)
        )
        assert torch.equal(y, expected)


def test_inputs_of_other_layouts_and_types():
    x = torch.randn(301, 8, device=page.DEVICE).T[::2].half()
    for dtype in torch.float16, torch.float32, torch.float64:
        got = page.softmax(x, -1, dtype)
        torch.testing.assert_close(got, F.softmax(x, -1, dtype=dtype))


@pytest.mark.parametrize("kinds", KINDS)
def test_16_bits_in_and_float32_out(kinds):
    """And dx has the type of x."""
    x = torch.randn(3, 301, device=page.DEVICE).bfloat16().requires_grad_()
    dy = torch.randn(3, 301, device=page.DEVICE)
    y = page.Softmax.apply(x, False, torch.float32, kinds)
    (dx,) = torch.autograd.grad(y, x, dy)
    assert (y.dtype, dx.dtype) == (torch.float32, torch.bfloat16)
    y_exact, dx_exact = wanted(x, dy, False)
    right((y,), (y_exact,), torch.float32)
    right((dx,), (dx_exact,), torch.bfloat16)


@pytest.mark.parametrize(
    ("error", "names", "arguments"),
    [
        (TypeError, "int64", (torch.ones(2, 8, dtype=torch.int64),)),
        (TypeError, "float8", (torch.ones(2, 8), -1, torch.float8_e5m2)),
        (ValueError, "meta", (torch.ones(2, 8, device="meta"),)),
        (IndexError, "2", (torch.ones(2, 8), 2)),
    ],
)
def test_mistakes_are_named(error, names, arguments):
    with pytest.raises(error, match=names):
        page.softmax(*arguments)


def test_second_derivative_is_refused():
    x = torch.randn(2, 8, device=page.DEVICE, requires_grad=True)
    y = page.softmax(x).square().sum()
    (dx,) = torch.autograd.grad(y, x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


def test_same_bits_twice():
    x, dy = (t.detach() for t in page.inputs(3, 520, torch.bfloat16))
    once, twice = (found(page, x, dy, kinds=KINDS[0]) for _ in range(2))
    assert all(map(torch.equal, once, twice))


@pytest.mark.parametrize("N", [301, 304])
def test_views_that_begin_anywhere(N):
    """Words of 16 bytes are loaded from a copy of such a view."""
    memory = torch.randn(2, 928, device=page.DEVICE).half()
    x, dy = (m[1 : 3 * N + 1].view(3, N) for m in memory)
    assert x.data_ptr() % 16 and dy.data_ptr() % 16
    got = found(page, x, dy, kinds=KINDS[0])
    right(got, wanted(x, dy, False), x.dtype)


# The rule --------------------------------------------------------------------


@pytest.fixture
def h200(monkeypatch):
    monkeypatch.setattr(page, "NUM_SMS", 132)
    monkeypatch.setattr(page, "WARP", 32)


@pytest.mark.parametrize(
    ("N", "forward", "backward"),
    [
        (1, "page 03", "page 03"),
        (16384, "page 03", "page 03"),
        (16385, "shifted", "page 03"),
        (32768, "page 03", "page 03"),
        (32769, "shifted", "slices"),
        (50264, "page 03", "slices"),
        (57344, "page 03", "slices"),
        (57352, "shifted", "slices"),
        (65536, "shifted", "slices"),
        (65537, "slices", "slices"),
        (2**20, "slices", "slices"),
        (2**23, "page 03", "page 03"),  # more slices than programs fit
    ],
)
def test_both_sides_of_each_limit(h200, N, forward, backward):
    x = torch.empty(1, N, dtype=torch.bfloat16)
    assert page.pick(False, x.dtype, x) == forward
    assert page.pick(True, x.dtype, x) == backward


@pytest.mark.parametrize("itemsize", [2, 4])
def test_cuts(h200, itemsize):
    """All lanes have a slice, none is empty, and few lanes are idle."""
    for backward in False, True:
        for N in 24577, 32768, 50257, 65537, 100_003, 2**18 + 1, 2**20 - 3:
            warps, _, chunks = page.plan_shared(backward, N * itemsize)
            each = 16 // itemsize
            parts, width = page.cut(N, each, warps, chunks)
            lanes = N + each - 1 if N % each else N
            assert (parts - 1) * width < lanes <= parts * width
            assert width * itemsize % 16 == 0
            assert width <= chunks * 32 * warps * each
            assert parts * width < 1.05 * N


# Each edit must make a check fail.
MUTANTS = {
    "pairs are not merged": (
        "s = tl.sum(sums * _exp(ms - m), 0)",
        "s = tl.sum(sums, 0)",
    ),
    "words that do not exist": (
        "tl.where(part < PARTS, a, LOWEST), tl.where(part < PARTS, b, 0)",
        "a, b",
    ),
    "one word for all slices": (
        "tl.cast(row, tl.int64) * PARTS + part",
        "tl.cast(row, tl.int64) * PARTS",
    ),
    "lanes of other rows in a sum": (
        "x = tl.where(inside, x, other)",
        "x = x",
    ),
    "the last row is not finished": (
        "    last = first + (M - 1 - first) // groups * groups\n    pairs",
        "    last = first\n    pairs",
    ),
    "this row is finished": (
        "_finish(waits, pairs, y_ptr, before, dtype, LEAST, STEP, LOG)\n"
        "        m, s",
        "_finish(words, pairs, y_ptr, before, dtype, LEAST, STEP, LOG)\n"
        "        m, s",
    ),
    "the gradient of this row": (
        "        _finish_gradient(y1, dy1,",
        "        _finish_gradient(ys, dys,",
    ),
    "columns change places": ("tl.join(low, high)", "tl.join(high, low)"),
    "full chunks that are not": (
        "return (c + 1) * chunk <= lanes and (step == 1 or c > 0)",
        "return (c + 1) * chunk <= lanes",
    ),
    "dy with strides of its own": (
        "ctx.saved_tensors, dy.contiguous()",
        "ctx.saved_tensors, dy",
    ),
}


def _suite(module):
    """A few cases that together catch every mutant."""
    module.NUM_SMS = 1
    run(5, 301, torch.float16, KINDS[0], module=module)
    run(4, 301, torch.float16, KINDS[1], module=module)
    x = torch.randn(2, 301, device=module.DEVICE)
    dy = torch.randn(2, 1, device=module.DEVICE).expand(2, 301)
    got = found(module, x, dy, log=True, kinds=KINDS[0])
    right(got, wanted(x, dy, True), torch.float32)


def test_suite_passes():
    _suite(load(NAME))


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_fail(name):
    mutant = load(NAME, [MUTANTS[name]])
    with pytest.raises(AssertionError):
        _suite(mutant)


def test_a_false_claim_fails():
    mutant = load(NAME, [(" % 16 else t for", " % 1 else t for")])
    with pytest.raises(InterpreterError, match="a false claim"):
        _suite(mutant)


def test_empty_is_no_number():
    halves = torch.tensor([page.EMPTY.value]).view(torch.int32)
    quiet = 1 << 22
    for half in halves:
        assert half[None].view(torch.float32).isnan() and not half & quiet


def test_exercise(output):
    stub, solution = (
        [found == exact for found, exact in zip(*pairs, strict=True)]
        for pairs in (
            [re.findall(r"-?\w+\.\d\d|-?inf", part) for part in line]
            for line in re.findall("found: (.*) exact: (.*)", output)
        )
    )
    assert stub == [True, False, True, True] and all(solution)


def test_script_runs_alone(output):
    assert output.count("errors below") == 6
    if not page.ON_GPU:
        assert output.count("Timing needs a GPU") == 4


# What is compiled ------------------------------------------------------------

BOTH = """
x, dy = inputs(M, N, dtype)
y = Softmax.apply(x, False, dtype, ("slices", "slices"))
torch.autograd.grad(y, x, dy)
"""


def test_words_in_ptx(launches):
    """One relaxed exchange for a row, polls in a loop with an end, and so few
    registers that all programs fit."""
    values = {"M": 1024, "N": 2**17, "dtype": "bfloat16"}
    for built, backward in zip(
        launches([Call(NAME, BOTH, values)])[0], (False, True), strict=True
    ):
        assert "atom.global.gpu.relaxed.exch.b64" in built.text
        assert "ld.volatile.global.b64" in built.text
        assert "trap;" in built.text
        warps, per_sm, _ = page.plan_shared(backward, 2**18)
        assert built.num_warps == warps
        assert built.registers * 32 * warps * per_sm <= 65536
        assert per_sm * (built.shared + 1024) <= 233472
