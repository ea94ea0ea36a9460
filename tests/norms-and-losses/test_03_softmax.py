"""Softmax, both passes: in Triton's interpreter, or on a GPU."""

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F

import softmax_cases as cases
from any_case import layouts
from softmax_cases import DTYPES, LAYOUTS, NAMES, Case
from tutorial import load

NAME = "norms-and-losses/03-softmax"
# Chunks of 16 columns, so that narrow rows have several.
SMALL = (
    ("lanes = 512 // itemsize * warps", "lanes = 16"),
    ("if row < 2048 or (step > 1 and row <= 32768):", "if row <= 32768:"),
)
# Two sweeps of narrow rows, in small tiles.
SWEEPS = (
    ("if row < 2048 or (step > 1 and row <= 32768):", "if False:"),
    ("N * itemsize > 65536", "N > 0"),
    ('"PAIRS": 32 * warps, "EACH": 16 // itemsize', '"PAIRS": 4, "EACH": 4'),
    ('"BLOCK": 32768 // itemsize', '"BLOCK": 16'),
)
page = load(NAME)
small = load(NAME, SMALL)
sweeps = load(NAME, SWEEPS)
FORMS = pytest.mark.parametrize(
    "form", [small, sweeps], ids=["rows", "sweeps"]
)
EACH = pytest.mark.parametrize("name", NAMES)
FUNCTIONS = [(getattr(page, name), getattr(F, name)) for name in NAMES]


def run(case, module=page):
    cases.run(module, case)


@FORMS
@EACH
def test_types(name, form):
    for dtype in DTYPES:
        for N in 1, 16, 37:
            run(Case((3, N), dtype, name=name), form)


@EACH
@pytest.mark.parametrize("N", [1, 2, 3, 7, 8, 9, 31, 64, 127, 128, 129, 255])
def test_narrow_rows_share_a_program(N, name):
    """And a last program has fewer."""
    run(Case((9, N), torch.float16, name=name))


@pytest.mark.parametrize(
    "N", [256, 257, 1000, 4097, 16384, 16385, 32768, 32769, 65539]
)
def test_both_sides_of_a_limit(N):
    run(Case((1, N), torch.float16))
    run(Case((1, N), torch.float16, name="log_softmax"))


def test_a_million_columns():
    run(Case((1, 2**20), torch.float16))


@FORMS
@pytest.mark.parametrize("which", ["x", "dy"])
def test_layouts(which, form):
    for layout in LAYOUTS:
        for N in 28, 32:
            run(Case((2, 3, N), torch.float16, **{which: layout}), form)


@pytest.mark.parametrize("dim", [0, 1, -3, 2])
def test_dimensions(dim):
    for name in NAMES:
        run(Case((3, 5, 7), dim=dim, name=name))
        run(Case((3, 5, 7), dim=dim, x="transposed", dy="one number"))


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (0, 3), (2, 0, 3)])
def test_odd_shapes(shape):
    for name in NAMES:
        x = torch.randn(shape, device=page.DEVICE, requires_grad=True)
        y = getattr(page, name)(x)
        expected = getattr(F, name)(x.detach(), -1)
        assert torch.equal(y, expected) and y.shape == x.shape
        (dx,) = torch.autograd.grad(y.sum(), x)
        assert dx.shape == x.shape and not dx.any()


@FORMS
@EACH
def test_another_type(name, form):
    """x is rounded to the type before, as in PyTorch."""
    pairs = [(a, b) for a in DTYPES for b in DTYPES if a != b]
    for dtype, out in pairs:
        if (dtype, out) == (torch.bfloat16, torch.float64):
            continue  # the interpreter stores dx wrongly
        for N in 16, 37:
            run(Case((3, N), dtype, out=out, name=name), form)
    x = torch.arange(6, device=page.DEVICE).view(2, 3)
    found = getattr(form, name)(x, -1, torch.float32)
    expected = getattr(F, name)(x, -1, dtype=torch.float32)
    torch.testing.assert_close(found, expected)


@FORMS
@EACH
def test_masked(name, form):
    for masked in 0.3, 0.95:
        for N in 3, 16, 75:
            run(Case((5, N), torch.float16, name=name, masked=masked), form)


@FORMS
@EACH
def test_what_pytorch_says_of_extremes(name, form):
    """Rows that are masked, infinite, NaN, or at the end of the range."""
    inf, nan = torch.inf, torch.nan
    low = torch.finfo(torch.float32).min
    few = [-inf], [low], [-low], [0.0, inf], [nan, 0.0, 0.0], [-inf, low]
    few += [low, -low, 0.0], [-inf, -inf, 3.0], [1e4, -1e4, 0.0]
    rows = [([row[0]] * 21 + row)[-21:] for row in few]
    rows += [([row[-1]] * 21 + row)[-21:] for row in few]
    x = torch.tensor(rows, device=page.DEVICE, requires_grad=True)
    found, expected = getattr(form, name)(x), getattr(F, name)(x, -1)
    torch.testing.assert_close(found, expected, equal_nan=True)
    dy = torch.ones_like(x)
    for y in found, expected:
        (dx,) = torch.autograd.grad(y, x, dy)
        if y is found:
            ours = dx
    torch.testing.assert_close(ours, dx, equal_nan=True)


@hypothesis.settings(max_examples=25, deadline=None, derandomize=True)
@hypothesis.given(
    shape=st.lists(st.integers(0, 20), min_size=1, max_size=3).map(tuple),
    dim=st.integers(-3, 2),
    dtype=st.sampled_from(DTYPES),
    name=st.sampled_from(NAMES),
    x=layouts,
    dy=layouts,
    scale=st.sampled_from([0.0, 1.0, 30.0]),
    masked=st.sampled_from([0.0, 0.5]),
    form=st.sampled_from([page, small, sweeps]),
)
def test_any_case(form, shape, dim, **more):
    dim = max(-len(shape), min(dim, len(shape) - 1))
    run(Case((*shape[:-1], shape[-1] + 1), dim=dim, **more), form)


@FORMS
@EACH
def test_gradients_are_derivatives(name, form):
    x = torch.randn(2, 5, device=page.DEVICE, dtype=torch.float64)
    function = getattr(form, name)
    assert torch.autograd.gradcheck(function, x.requires_grad_())


@FORMS
def test_rounding_of_y_stays_in_its_sum(form):
    """In 16 bits dx belongs to the y that was returned, rounded as it is:
    a constant in dy shows it, which the exact y would not."""
    x = torch.randn(3, 75, device=page.DEVICE).half().requires_grad_()
    y = form.softmax(x)
    dy = 1000 + torch.randn(3, 75, device=page.DEVICE).half()
    (dx,) = torch.autograd.grad(y, x, dy)
    y, dy = y.detach().double(), dy.double()
    want = y * (dy - (y * dy).sum(1, keepdim=True))
    assert (dx - want).norm() <= 1e-3 * want.norm()
    exact = torch.softmax(x.detach().double(), 1)
    want = exact * (dy - (exact * dy).sum(1, keepdim=True))
    assert (dx - want).norm() > 5e-3 * want.norm()


@EACH
def test_both_forms_agree(name):
    """Registers and sweeps differ by a rounding at most."""
    x = torch.randn(3, 257, device=page.DEVICE)
    a, b = (getattr(form, name)(x) for form in (small, sweeps))
    torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_every_tile_of_the_first_figure_is_right():
    x = torch.randn(2, 3001, device=page.DEVICE)
    for plan in page.TILES.values():
        y = page.in_sweeps(x, plan)
        torch.testing.assert_close(y, F.softmax(x, 1))


def test_same_bits_twice():
    x, dy = page.inputs(9, 75, torch.float16)
    for form in small, sweeps:
        once, twice = (
            (y := form.softmax(x), *torch.autograd.grad(y, x, dy))
            for _ in range(2)
        )
        assert all(map(torch.equal, once, twice))


@pytest.mark.parametrize("itemsize", [2, 4, 8])
def test_rules_answer_for_every_width(itemsize):
    most = 65536 // itemsize
    for N in {1, 2, 3, *range(5, most + 1, 13), most // 2, most, 2**20}:
        for step in {1, 16 // itemsize} if N % (16 // itemsize) else {1}:
            for rule in page.plan_forward, page.plan_backward:
                plan = rule(N, itemsize, step)
                warps = plan["num_warps"]
                assert warps.bit_count() == 1 and warps <= 32
                if "ROWS" not in plan:
                    assert N * itemsize >= 2048
                    continue
                chunk, rows = plan["CHUNK"], plan["ROWS"]
                assert chunk.bit_count() == 1
                assert rows == 1 or chunk >= N + step - 1
                held = -(-(N + step - 1) // chunk) * chunk * rows
                assert held * itemsize <= (4096 + 512) * warps


def test_second_derivative_is_refused():
    x = torch.randn(2, 8, device=page.DEVICE, requires_grad=True)
    y = page.softmax(x).square().sum()
    (dx,) = torch.autograd.grad(y, x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


def test_a_result_that_is_changed_is_noticed():
    """y is kept for the backward pass: overwriting it must be an error."""
    x = torch.randn(2, 8, device=page.DEVICE, requires_grad=True)
    y = page.softmax(x)
    with torch.no_grad():
        y += 1
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        y.sum().backward()


@pytest.mark.parametrize("function", [page.softmax, page.log_softmax])
def test_mistakes_are_named(function):
    x = torch.ones(2, 8, device=page.DEVICE)
    with pytest.raises(TypeError, match="int64"):
        function(x.long())
    with pytest.raises(TypeError, match="int32"):
        function(x, dtype=torch.int32)
    with pytest.raises(TypeError, match="complex64"):
        function(x.to(torch.complex64))
    with pytest.raises(TypeError, match="float8"):
        function(x.to(torch.float8_e4m3fn))
    with pytest.raises(ValueError, match="input is on meta"):
        function(x.to("meta"))
    with pytest.raises(IndexError, match="Dimension out of range"):
        function(x, 2)


# Each edit must make a check fail.
MUTANTS = {
    "rows: the maximum is not subtracted": (
        "_exp(xs[c].to(acc) - m)", "_exp(xs[c].to(acc))"
    ),
    "rows: idle lanes count": ("tl.load(at, mask=some), none)",
                               "tl.load(at, mask=some), none * 0)"),
    "rows: the neighbors count": ("tl.where(inside,", "tl.where(some,"),
    "rows: store into the neighbors": (
        "tl.store(at, x, mask=inside & (whole == 0))",
        "tl.store(at, x, mask=whole == 0)",
    ),
    "rows: single columns are not stored": (
        "mask=inside & (whole == 0)", "mask=inside & whole"
    ),
    "rows that are not there, forward": ("M - 1)  # the", "M)  # the"),
    "rows that are not there, backward": ("M - 1)\n    ys", "M)\n    ys"),
    "rows: dy instead of y dy": ("total += dy if LOG else",
                                 "total += dy if True else"),
    "the hidden number is not 0": ("dy, dx, 0, M, N", "dy, dx, 1, M, N"),
    "log: the sum is not subtracted": ("y = d - log if", "y = d if"),
    "rows, log: y for its power": (
        "y * (dy - total)\n        _store", "dy - y * total\n        _store"
    ),
    "sweeps: the sum of dy dropped": (
        "y * (dy - total)\n        tl.store", "y * dy\n        tl.store"
    ),
    "sweeps: a sum does not shrink": ("s * tl.exp(m - new) +", "s +"),
    "sweeps: pairs are added as they are": ("tl.sum(s * tl.exp(m - top), 0)",
                                            "tl.sum(s, 0)"),
    "sweeps: the first maximum is -inf": (
        "tl.full((PAIRS,), LOWEST, acc)",
        'tl.full((PAIRS,), float("-inf"), acc)',
    ),
    "sweeps: the first tile left out": (
        "(N - 1) // TILE * TILE - start", "N // TILE * TILE - start"
    ),
    "dy with strides of its own": ("backward(y, dy.contiguous(),",
                                   "backward(y, dy,"),
    "x with strides of its own": ("movedim(dim, -1).contiguous()",
                                  "movedim(dim, -1)"),
    "the result stays moved": (".movedim(-1, dim).reshape", ".reshape"),
    "x is not rounded": ("x = x.to(dtype)", "x = x + 0"),
}  # fmt: skip


def _suite(edits):
    """A few cases that together catch every mutant."""
    rows, swept = load(NAME, [*SMALL, *edits]), load(NAME, [*SWEEPS, *edits])
    for name in NAMES:
        for module in rows, swept:
            run(Case((2, 43), torch.float16, name=name, masked=0.6), module)
            run(Case((2, 32), name=name), module)
        run(Case((3, 13), torch.float16, name=name), rows)
        run(Case((3, 16), torch.float16, name=name, scale=30.0), rows)
        run(Case((3, 40), name=name, scale=200.0), rows)
        run(Case((2, 3, 5), dim=1, dy="one number", name=name), rows)
        run(Case((3, 4, 5), dim=1, name=name), rows)
        run(Case((2, 32), torch.float16, dy="transposed", name=name), rows)
    run(Case((2, 40), torch.float16, out=torch.float32), rows)
    part = torch.rand(4, 13, device=page.DEVICE)[:3]  # not NaN behind it
    with cases.guarded_allocations():
        rows.backward(part, part)
    x = 2048 + torch.rand(2, 40, device=page.DEVICE)
    y, expected = rows.softmax(x, 1, torch.float16), torch.softmax(x.half(), 1)
    assert torch.allclose(y, expected, atol=1e-4)


def test_suite_passes():
    _suite([])


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_fail(name):
    with pytest.raises((AssertionError, RuntimeError)):
        _suite([MUTANTS[name]])


def test_script_runs_alone(output):
    assert "errors below" in output
    if not page.ON_GPU:
        assert output.count("Timing needs a GPU") == 3
    assert "Warning" not in output


def test_exercise(output):
    stub, solution = (
        float(line.rpartition(" ")[2])
        for line in output.splitlines()
        if "change of dx" in line
    )
    assert stub > 1e-3 > 1e-4 > solution
