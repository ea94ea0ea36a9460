"""A lock, and its race: in Triton's interpreter, or on a GPU."""

import functools
import re

import hypothesis
import pytest
import torch

import layer_norm_cases as cases
from any_case import any_layer_norm, examples
from compiled.aot import COMPILER_ADDS_BARRIER, Call
from compiled.limits import Facts
from layer_norm_cases import Case
from tutorial import load, source

NAME = "layer-norm/03-lock"
page = load(NAME)


def run(case, plan=page.lock_once, module=page):
    function = functools.partial(module.layer_norm, plan=plan)
    cases.run(function, case, module.DEVICE)


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_shapes(dtype):
    for shape in (1, 1), (3, 129), (17, 40), (2, 257):
        run(Case(shape[:1], shape[1:], dtype))


@pytest.mark.parametrize("plan", page.PLANS.values())
def test_every_plan(plan):
    run(Case((17,), (65,), torch.float16), plan)


def test_wide_rows():
    run(Case((3,), (2049,), torch.float16))


@pytest.mark.parametrize("layout", cases.LAYOUTS)
@pytest.mark.parametrize("which", ["x", "dy", "parameters"])
def test_layouts(which, layout):
    run(Case((2, 3), (4, 7), torch.float32, **{which: layout}))


@pytest.mark.parametrize("lead", [(), (0,), (2, 0), (2, 1, 3)])
def test_dimensions(lead):
    run(Case(lead, (9,)))


def test_only_some_gradients():
    for number in range(8):
        wanted = tuple(bool(number >> i & 1) for i in range(3))
        run(Case((3,), (9,), wanted=wanted))
        run(Case((2,), (9,), weight=number < 4, bias=number % 4 < 2))


@examples(15)
@hypothesis.given(any_layer_norm())
def test_any_case(case):
    run(case)


def test_weight_and_bias_of_two_types():
    x, w, b, dy = Case((7,), (65,)).tensors(page.DEVICE)
    w, b = w.half().requires_grad_(), b.double().requires_grad_()
    y = page.layer_norm(x, (65,), w, b)
    dw, db = torch.autograd.grad(y, (w, b), dy)
    assert (dw.dtype, db.dtype) == (torch.float16, torch.float64)
    torch.testing.assert_close(db, dy.double().sum(0), rtol=1e-6, atol=1e-6)


def test_rows_wrap_around_the_buffers():
    """Each lock is taken many times; with own buffers there is none."""
    tensors, expected = page.given(60, 9)
    for plan in (60, 7, 1), (60, 1, 1), (60, 60, 1), (11, 3, 1), (11, 11, 1):
        with cases.guarded_allocations():
            _, sums = page.stage_1(*tensors, plan)
        assert page.error(sums, expected) < 1e-6


def _tensor(*shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype, device=page.DEVICE)


@pytest.mark.parametrize(
    ("error", "names", "arguments"),
    [
        (TypeError, "x", (_tensor(2, 8, dtype=torch.int32), (8,))),
        (TypeError, "weight", (_tensor(2, 8), (8,), _tensor(8).int())),
        (TypeError, "bias", (_tensor(2, 8), (8,), None, _tensor(8).bool())),
        (ValueError, "x.*7", (_tensor(2, 8), (7,))),
        (ValueError, "normalized_shape.*0", (_tensor(2, 0), (0,))),
        (ValueError, "normalized_shape", (_tensor(2), ())),
        (ValueError, "x is on", (_tensor(2, 8).to("meta"), (8,))),
        (ValueError, "weight", (_tensor(2, 8), (8,), _tensor(7))),
        (ValueError, "bias", (_tensor(2, 8), (8,), None, _tensor(2, 4))),
        (ValueError, "weight", (_tensor(2, 8), (8,), _tensor(8).to("meta"))),
        (ValueError, "1 to 16384", (_tensor(1, 16385), (16385,))),
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
    "c1 dropped": ("(wdy - x_hat * c1 - c2) * rstd", "(wdy - c2) * rstd"),
    "c2 dropped": (
        "(wdy - x_hat * c1 - c2) * rstd",
        "(wdy - x_hat * c1) * rstd",
    ),
    "masked lanes in the variance": (
        "x = tl.where(cols < N, x - mean, 0)",
        "x = x - mean",
    ),
    "the lock never reads": ("tl.where(state == 2,", "tl.where(state == 3,"),
    "the lock reads what nobody wrote": (
        "old = cols < tl.where(state == 2, N, 0)",
        "old = cols < N",
    ),
    "all add to the buffers of others": (
        "buffer = program % buffers",
        "buffer = program % buffers // 2",
    ),
    "own buffers without a place": (
        "sums_ptr += program * 2 * N + cols",
        "sums_ptr += cols",
    ),
    "every program once": (
        "for i in range(program, M, tl.num_programs(0)):",
        "for i in range(program, tl.num_programs(0), tl.num_programs(0)):",
    ),
    "only the last row": (
        "        dw += dy * x_hat",
        "        dw = dy * x_hat",
    ),
    "stage 2 stops early": (
        "mask = (rows < programs) & (cols < WIDTH)",
        "mask = (rows < programs - 1) & (cols < WIDTH)",
    ),
    "dy with strides of its own": ("dy.contiguous(), ", "dy, "),
}


def _suite(module):
    """A few cases that together catch every mutant."""
    for name in "triton", "own buffers":
        plan = module.PLANS[name]
        run(Case((3,), (129,)), plan, module)
        run(Case((3,), (9,), dy="one number"), plan, module)

    def shared(M, block):
        return 5, 2, 1

    def own(M, block):
        return 3, 3, 1

    run(Case((8,), (9,)), shared, module)
    run(Case((8,), (9,)), own, module)


def test_suite_passes():
    _suite(page)


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_fail(name):
    mutant = load(NAME, [MUTANTS[name]])
    with pytest.raises(AssertionError):
        _suite(mutant)


def test_script_runs_alone(output):
    if not page.ON_GPU:
        assert output.count("Timing needs a GPU") == 1
    assert "sum: 7.0 buffer: 4.0" in output  # the lost addition
    assert output.count("errors below") == 3


def test_exercise(output):
    assert output.count("wrong columns: []") == 1  # the solution
    assert output.count("wrong columns: [0, 1, 2") == 1  # the stub


# What Triton makes of the lock, for GPUs that are not here -------------------

STAGE_1 = """
dy, x = torch.empty(2, M, N, dtype=dtype, device=DEVICE)
w, mean, rstd = dy[0], *torch.empty(2, M, device=DEVICE)
stage_1(dy, x, w, mean, rstd, (M, 8, 4), flaw)
"""


def test_the_parts_of_the_lock_are_in_the_code(launches):
    names = [("sm_90", name) for name in page.FLAWS]
    names += [("gfx942", "right"), ("gfx942", "no barrier")]
    values = {"M": 64, "N": 2048, "dtype": "float16"}
    calls = [
        Call(NAME, STAGE_1, values | {"flaw": name}, target)
        for target, name in names
    ]
    shown = re.findall(r"``((?:st|bar|atom)\.[\w.]+)``", source(NAME))
    right, without = shown[:3], shown[3:]
    assert right[1] == "bar.sync" and "bar.sync" not in without
    for (target, name), (built,) in zip(names, launches(calls), strict=True):
        facts = Facts(built)
        if name == "right":
            assert facts.count("release") == 1 and not facts.unsafe, target
        if name == "no barrier":
            assert bool(facts.unsafe) != COMPILER_ADDS_BARRIER, target
        if target == "sm_90":
            ptx = built.asm["ptx"]
            assert (".acquire.exch" in ptx) == (name != "no acquire")
            assert (".release.exch" in ptx) == (name != "no release")
            # What the page says of the last instructions.
            steps = re.findall(r"st\.global[.\w]*|bar\.sync|atom[.\w]*", ptx)
            if name == "right":
                assert steps[-3:] == right
            if name == "no barrier" and not COMPILER_ADDS_BARRIER:
                assert steps[-2:] == without
