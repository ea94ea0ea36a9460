"""Programs that share a row: in Triton's interpreter, or on a GPU."""

import re

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

import layer_norm_cases as cases
from any_case import any_layer_norm, examples
from compiled.aot import Call
from layer_norm_cases import Case
from tutorial import load, source

NAME = "layer-norm/08-shared-rows"
# Slices of 8 to 128 lanes: small rows have several.
SMALL = [("8192 if ON_GPU else 256", "128")]
TYPES = (torch.float16, torch.bfloat16, torch.float32)
page = load(NAME)
small = load(NAME, SMALL)
small.NUM_SMS = 12


def run(case, module=small):
    cases.run(module.layer_norm, case, module.DEVICE)


@pytest.mark.parametrize("dtype", TYPES)
def test_shapes(dtype):
    for shape in (1, 8), (5, 40), (2, 96):
        run(Case(shape[:1], shape[1:], dtype))


@pytest.mark.parametrize("layout", cases.LAYOUTS)
@pytest.mark.parametrize("which", ["x", "dy", "parameters"])
def test_layouts(which, layout):
    run(Case((2, 3), (5, 8), torch.float32, **{which: layout}))


@pytest.mark.parametrize("lead", [(), (0,), (2, 0), (2, 1, 3)])
def test_dimensions(lead):
    run(Case(lead, (40,)))


def test_only_some_gradients():
    for number in 7, 13, 18, 28, 31:
        *wanted, weight, bias = (bool(number >> i & 1) for i in range(5))
        run(Case((1,), (8,), weight=weight, bias=bias, wanted=tuple(wanted)))


# Words hold float32, and rows are a multiple of 8.
ANY = any_layer_norm(
    dtype=st.sampled_from(TYPES),
    weight_dtype=st.sampled_from([None, *TYPES]),
    shape=st.sampled_from([(8,), (5, 8), (2, 3, 16)]),
)


@examples(3)
@hypothesis.given(ANY)
def test_any_case(case):
    run(case)


def test_a_turn_later():
    x = torch.arange(64.0, device=page.DEVICE).reshape(4, 16)
    for later in 0, 1:
        found = page.shared_sums(page._shared_sums, x, 3, later)
        assert found.tolist() == 4 * [[2016.0, 85344.0]]


@pytest.mark.parametrize("itemsize", [2, 4])
def test_plans_fit(itemsize, monkeypatch):
    """A row has no more slices than programs fit, in powers of two."""
    monkeypatch.setattr(page, "NUM_SMS", 132)
    monkeypatch.setattr(page, "SLICE", 8192)
    for row in 16, 65536, 2**17 + 16, 2**18, 96 * 8192 + 16, 264 * 8192:
        for forward in True, False:
            found = page.plan_shared(row // itemsize, itemsize, forward)
            (rows, lanes), how = found
            assert lanes & (lanes - 1) == 0
            assert 132 * how["per_sm"] * lanes * itemsize >= row
            assert rows * lanes * itemsize <= 32768 // how["per_sm"]


@pytest.mark.parametrize("per_sm", [1, 2, 4])
def test_cuts(per_sm, monkeypatch):
    """All programs fit, all columns have a slice, and no slice is idle."""
    monkeypatch.setattr(page, "NUM_SMS", 132)
    monkeypatch.setattr(page, "empty_words", lambda *shape: shape)
    for N in [8, 4096, 65536, 131080, 393216, 600_000, 2**20]:
        for M, rows, lanes in (4096, 2, 4096), (3, 2, 4096), (256, 1, 8192):
            if lanes * 132 * per_sm < N:
                continue
            found = page.cut(M, N, rows, lanes, per_sm)
            groups, programs, words, (_, _, width, padded) = found
            slices = words[1]
            assert programs == groups * slices <= 132 * per_sm
            assert (slices - 1) * width < N <= slices * width
            assert width <= lanes and width % 64 == 0
            assert slices <= padded
            tiles = -(-M // rows)
            # One row more in every group, for the turn that only finishes.
            assert words[0] >= (tiles + groups) * rows
            if tiles >= groups + 1:
                assert programs >= 132 * per_sm // 2


def _tensor(*shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype, device=page.DEVICE)


@pytest.mark.parametrize(
    ("error", "names", "arguments"),
    [
        (TypeError, "x", (_tensor(2, 8, dtype=torch.int32), 8)),
        (TypeError, "x.*float64", (_tensor(2, 8, dtype=torch.float64), 8)),
        (TypeError, "weight", (_tensor(2, 8), 8, _tensor(8).int())),
        (TypeError, "bias", (_tensor(2, 8), 8, None, _tensor(8).bool())),
        (ValueError, "x.*7", (_tensor(2, 8), 7)),
        (ValueError, "x.*0", (_tensor(2, 0), 0)),
        (ValueError, "weight", (_tensor(2, 8), 8, _tensor(7))),
        (ValueError, "bias", (_tensor(2, 8), 8, None, _tensor(2, 4))),
        (ValueError, "weight", (_tensor(2, 8), 8, _tensor(8).to("meta"))),
        (ValueError, "12 columns.*multiples of 8", (_tensor(2, 12), 12)),
        (ValueError, "Two sweeps", (_tensor(1, 2**22), 2**22)),
    ],
)
def test_mistakes_are_named(error, names, arguments):
    with pytest.raises(error, match=names):
        page.layer_norm(*arguments)


def test_second_derivative_is_refused():
    x = torch.randn(2, 8, device=page.DEVICE, requires_grad=True)
    y = page.layer_norm(x, (8,)).square().sum()
    (dx,) = torch.autograd.grad(y, x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


# Each edit must make a check fail.
MUTANTS = {
    "slices are not put together": (
        "tl.sum(m2s + n * d * d, 1)",
        "tl.sum(m2s, 1)",
    ),
    "slices count alike": (
        "tl.minimum(N - s * WIDTH, WIDTH), 0)",
        "WIDTH, 0)",
    ),
    "words that do not exist": (
        "return tl.where(s < SLICES, a, 0), tl.where(s < SLICES, b, 0)",
        "return a, b",
    ),
    "one word for all slices": (
        "at = words_ptr + row * SLICES + s\n    low",
        "at = words_ptr + row * SLICES\n    low",
    ),
    "masked lanes in m2": (
        "d = tl.where(inside, x.to(tl.float32) - mean[:, None], 0)",
        "d = x.to(tl.float32) - mean[:, None]",
    ),
    "the last tile is not finished": (
        "tl.range(start, M + step, step, num_stages=3):",
        "tl.range(start, M, step, num_stages=3):",
    ),
    "the last tile of gradients": (
        "tl.range(start, M + step, step, num_stages=3,\n",
        "tl.range(start, M, step, num_stages=3,\n",
    ),
    "the tile before is this one": ("y = (before.to", "y = (x.to"),
    "the gradients of this tile": ("_gradients(x1,", "_gradients(x,"),
    "c1 dropped": ("- (d * c1 + c2)", "- c2"),
    "c2 dropped": ("- (d * c1 + c2)", "- d * c1"),
    "rows that do not exist": (
        "inside & (row < M - first)",
        "inside & (row < ROWS)",
    ),
    "sums without a place": (
        "sums_ptr += start // ROWS * 2 * N + cols",
        "sums_ptr += cols",
    ),
    "dy with strides of its own": ("= dy.contiguous(),", "= dy,"),
}


def _suite(module):
    """A few cases that together catch every mutant."""
    module.NUM_SMS = 12
    run(Case((5,), (72,)), module)
    run(Case((2,), (8,), dy="one number"), module)


def test_suite_passes():
    _suite(load(NAME, SMALL))


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_fail(name):
    mutant = load(NAME, [*SMALL, MUTANTS[name]])
    with pytest.raises(AssertionError):
        _suite(mutant)


def test_empty_is_no_number_and_stands_in_the_ptx():
    halves = torch.tensor([page.EMPTY]).view(torch.int32)
    assert halves[0] == halves[1]
    value = halves.view(torch.float32)[0]
    quiet = 1 << 22
    assert value.isnan() and not halves[0] & quiet
    assert f"0x{page.EMPTY:016X};" in source(NAME)


def test_exercise(output):
    found = re.findall(r"^found=([\d.]+); exact: ([\d.]+)$", output, re.M)
    assert len(found) == 2
    assert found[0][0] != found[0][1] and found[1][0] == found[1][1]


def test_script_runs_alone(output):
    if not page.ON_GPU:
        assert output.count("Timing needs a GPU") == 2
    assert output.count("[2016.0, 85344.0]") == 4


# What is compiled ------------------------------------------------------------

BOTH = """
x, w, b, dy = inputs(M, N, dtype)
torch.autograd.grad(layer_norm(x, (N,), w, b), (x, w, b), dy)
"""


def test_words_are_whole_in_ptx(launches):
    """Relaxed accesses of 64 bits, a loop with its trap, and two programs a
    multiprocessor by registers and shared memory."""
    values = {"M": 4096, "N": 2**19, "dtype": "float16"}
    forward, backward = launches([Call(NAME, BOTH, values)])[0]
    for built, per_sm in (forward, 2), (backward, 1):
        text = built.text
        assert "st.relaxed.gpu.global.b64" in text
        load = r"ld\.relaxed\.gpu\.global\.b64[^@]*@again bra LOAD;\s*@empty"
        assert re.search(load + r" trap;", text)
        assert not re.search(r"ld\.relaxed\S*\.v2", text)
        threads = 32 * built.num_warps * per_sm
        assert built.registers * threads <= 65536
        assert per_sm * (built.shared + 1024) <= 233472
        assert "cp.async" in text
