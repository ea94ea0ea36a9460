"""Chunks instead of padding: in Triton's interpreter, or on a GPU."""

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F

import layer_norm_cases as cases
from any_case import examples
from compiled.aot import Call
from layer_norm_cases import Case
from tutorial import load

NAME = "layer-norm/05-chunks"
# Chunks of 16 or 32 columns, so that narrow rows have several, and few
# programs in the second kernel.
SMALL = (
    ("chunk = min(512 // itemsize * warps,", "chunk = min(8 * warps,"),
    ("rows = 512 // itemsize * warps // chunk", "rows = 16 * warps // chunk"),
    ("(triton.cdiv(2 * N, 16),)", "(triton.cdiv(2 * N, 256),)"),
    ("2 * N, rows, 16, EARLY", "2 * N, rows, 256, EARLY"),
)  # fmt: skip
FEW = SMALL[2:]
page = load(NAME, FEW)
small = load(NAME, SMALL)
small.NUM_SMS = 2  # each program has several tiles


def run(case, module=small):
    cases.run(module.layer_norm, case, module.DEVICE)


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_shapes(dtype):
    for M, N in (1, 8), (3, 8), (17, 24), (2, 40), (5, 136), (130, 8):
        run(Case((M,), (N,), dtype))
        if M < 10:
            run(Case((M,), (N,), dtype), page)


@pytest.mark.parametrize("layout", cases.LAYOUTS)
@pytest.mark.parametrize("which", ["x", "dy", "parameters"])
def test_layouts(which, layout):
    for lead, shape in ((5,), (40,)), ((2, 3), (4, 6)):
        run(Case(lead, shape, torch.float16, **{which: layout}))


@pytest.mark.parametrize("lead", [(), (3,), (2, 1, 3), (0,), (2, 0)])
def test_dimensions(lead):
    for shape in (8,), (2, 4):
        run(Case(lead, shape))


def test_only_some_gradients():
    for number in range(32):
        *wanted, weight, bias = (bool(number >> i & 1) for i in range(5))
        run(Case((5,), (24,), weight=weight, bias=bias, wanted=tuple(wanted)))


def test_weight_and_bias_of_two_types():
    x, w, b, dy = Case((7,), (24,)).tensors(page.DEVICE)
    w, b = w.half().requires_grad_(), b.double().requires_grad_()
    dw, db = torch.autograd.grad(page.layer_norm(x, 24, w, b), (w, b), dy)
    assert (dw.dtype, db.dtype) == (torch.float16, torch.float64)
    torch.testing.assert_close(db, dy.double().sum(0), rtol=1e-6, atol=1e-6)


@examples(20)
@hypothesis.given(
    M=st.integers(0, 20),
    eighths=st.integers(1, 12),
    dtype=st.sampled_from(cases.DTYPES),
    x=st.sampled_from(sorted(cases.LAYOUTS)),
    dy=st.sampled_from(sorted(cases.LAYOUTS)),
    weight=st.booleans(),
    bias=st.booleans(),
)
def test_any_case(M, eighths, **more):
    run(Case((M,), (8 * eighths,), **more))


WIDEST = {2: (32768, 10240), 4: (16384, 5120), 8: (8192, 2560)}


@pytest.mark.parametrize("itemsize", WIDEST)
def test_formulas_answer_for_every_width(itemsize):
    """Powers of two, full warps, and what a thread holds within its limit."""
    for rule, most in zip(
        (page.plan_forward, page.plan_backward), WIDEST[itemsize], strict=True
    ):
        for N in range(8, most + 1, 8):
            plan = rule(N, itemsize)
            rows, chunk, warps = (
                plan[key] for key in ("ROWS", "CHUNK", "num_warps")
            )
            assert all(v & (v - 1) == 0 for v in (rows, chunk, warps))
            assert 2 <= warps <= 16 and rows * chunk * itemsize >= 64
            width = -(-N // chunk) * chunk
            assert width - N < chunk
            held = rows * width * itemsize // (32 * warps)
            if "STAGES" in plan:
                tiles = plan["STAGES"] - 1
                assert 1 <= tiles <= 3
                assert 2 * tiles * rows * width * itemsize <= 98304
                assert held <= 80  # 40 columns of 16 bits
                assert rows <= 8
            else:
                pairs = 2 if N * itemsize <= 2048 else 1
                assert held <= 128
                assert rows * chunk * itemsize == 512 * warps * pairs


def test_widest_rows():
    run(Case((1,), (10240,), torch.float16), page)
    run(Case((2,), (32768,), torch.float16, wanted=3 * (False,)), page)


def test_padded_is_one_tile():
    plan = page.padded(page.plan_backward)(4608, 2)
    assert (plan["ROWS"], plan["CHUNK"], plan["STAGES"]) == (1, 8192, 4)
    x, w, b, dy = page.inputs(3, 24, torch.float32)
    f = page.trained_by(page.padded(page.plan_backward))
    found = torch.autograd.grad(f(x, 24, w, b), (x, w, b), dy)
    expected = F.layer_norm(x.double(), (24,), w.double(), b.double())
    expected = torch.autograd.grad(expected, (x, w, b), dy.double())
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_same_plan_same_bits():
    x, w, b, dy = small.inputs(40, 24, torch.float32)
    y = small.layer_norm(x, 24, w, b)
    first, again = (
        torch.autograd.grad(y, (w, b), dy, retain_graph=True) for _ in "12"
    )
    assert all(map(torch.equal, first, again))


def test_second_derivative_is_refused():
    x = torch.randn(2, 8, device=page.DEVICE, requires_grad=True)
    y = page.layer_norm(x, (8,)).square().sum()
    (dx,) = torch.autograd.grad(y, x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


def _tensor(*shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype, device=page.DEVICE)


EVERY_WIDTH = "multiples of 8.*11-every-width"


@pytest.mark.parametrize(
    ("error", "names", "arguments"),
    [
        (TypeError, "x is .*int32", (_tensor(2, 8, dtype=torch.int32), 8)),
        (TypeError, "weight", (_tensor(2, 8), 8, _tensor(8).int())),
        (ValueError, "x.*normalized_shape", (_tensor(2, 8), 7)),
        (ValueError, "normalized_shape", (_tensor(2, 8), ())),
        (ValueError, "normalized_shape", (_tensor(2, 0), 0)),
        (ValueError, "weight", (_tensor(2, 8), 8, _tensor(7))),
        (ValueError, "bias", (_tensor(2, 8), 8, None, _tensor(2, 4))),
        (ValueError, "eps", (_tensor(2, 8), 8, None, None, -1e-5)),
        (ValueError, "eps", (_tensor(2, 8), 8, None, None, float("nan"))),
        (ValueError, "weight", (_tensor(2, 8), 8, _tensor(8).to("meta"))),
        (ValueError, "1151 .*" + EVERY_WIDTH, (_tensor(2, 1151), 1151)),
        (ValueError, "16392 .*16384", (_tensor(2, 16392), 16392)),
        (
            ValueError,
            "5128 .*5120",
            (_tensor(2, 5128).requires_grad_(), 5128),
        ),
    ],
)
def test_mistakes_are_named(error, names, arguments):
    with pytest.raises(error, match=names):
        page.layer_norm(*arguments)


# Each edit must make a check fail.
MUTANTS = {
    "idle lanes in the variance": (
        "d = tl.where(col < N, xs[c].to(acc) - mean, 0)",
        "d = xs[c].to(acc) - mean",
    ),
    "columns without a mask": ("mask = mask & (col < N)", "mask = mask"),
    "rows without a mask": ("mask = row < left", "mask = row < ROWS"),
    "the first chunk only": (
        "col = c * CHUNK + tl.arange(0, CHUNK)[None, :]",
        "col = tl.arange(0, CHUNK)[None, :]",
    ),
    "w of the first chunk": ("tl.load(w_ptr + at, ",
                             "tl.load(w_ptr + at % CHUNK, "),
    "c1 dropped": ("wdy - (d * c1 + c2)", "wdy - c2"),
    "c2 dropped": ("wdy - (d * c1 + c2)", "wdy - d * c1"),
    "sums of the last tile": ("new_dws += (dws[c] + dw,)",
                              "new_dws += (dw,)"),
    "one buffer for all": ("ptr += tl.program_id(0) * 2 * N", "ptr += 0"),
    "one tile a program": ("tl.program_id(0) * ROWS, M, tl",
                           "tl.program_id(0) * ROWS, 4, tl"),
    "the last buffer left out": ("mask = (rows < programs) &",
                                 "mask = (rows < programs - 1) &"),
    "dy with strides of its own": ("backward(dy.contiguous(),",
                                   "backward(dy,"),
}  # fmt: skip


def _suite(module):
    """A few cases that together catch every mutant."""
    module.NUM_SMS = 2
    run(Case((40,), (24,)), module)
    run(Case((3,), (40,)), module)
    run(Case((3,), (24,), dy="one number"), module)


def test_suite_passes():
    _suite(load(NAME, SMALL))


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_fail(name):
    mutant = load(NAME, [*SMALL, MUTANTS[name]])
    with pytest.raises(AssertionError):
        _suite(mutant)


def test_script_runs_alone(output):
    assert "chunks of 4: True" in output
    if not page.ON_GPU:
        assert output.count("Timing needs a GPU") == 5


def test_exercise(output):
    assert "rows of 13 ones: [16.0" in output  # the stub
    assert output.count("rows of 13 ones: [13.0, 13.0, 13.0]") == 1


BACKWARD = """
dy, x = torch.empty(2, M, N, dtype=dtype, device=DEVICE)
w, mean, rstd = dy[0], *torch.empty(2, M, device=DEVICE)
plan = padded(plan_backward)(N, x.itemsize) | more
backward(dy, x, w, mean, rstd, torch.empty_like(x), dy[:2], plan)
"""


def test_loads_ahead_would_spill_a_tile(launches):
    """Beyond 8192 columns, so there the tile has one stage."""
    values = {"M": 4096, "N": 8704, "dtype": "float16"}
    (alone, _), (ahead, _) = launches(
        Call(NAME, BACKWARD, values | {"more": more})
        for more in ({}, {"STAGES": 2})
    )
    assert alone.spills == 0 < ahead.spills
