"""Two sweeps: in Triton's interpreter, or on a GPU."""

import hypothesis
import pytest
import torch

import layer_norm_cases as cases
from any_case import any_layer_norm, examples
from layer_norm_cases import Case
from tutorial import load

NAME = "layer-norm/07-two-sweeps"
# Tiles of at most 64 lanes: small rows are wide.
SMALL = [
    ("min(size // itemsize,", "min(128 // itemsize,"),
    ("min(8192 // x.itemsize,", "min(128 // x.itemsize,"),
    ("min(4096 // x.itemsize,", "min(64 // x.itemsize,"),
]
page = load(NAME)
small = load(NAME, SMALL)
small.NUM_SMS = 6  # groups of programs, if slices are few


def run(case, module=small):
    cases.run(module.layer_norm, case, module.DEVICE)


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_shapes(dtype):
    for shape in (1, 1), (3, 129), (17, 40), (2, 257), (9, 300):
        run(Case(shape[:1], shape[1:], dtype))


def test_tiles_of_full_size():
    for N in 8192, 9001:
        run(Case((2,), (N,), torch.float16), page)


@pytest.mark.parametrize("layout", cases.LAYOUTS)
@pytest.mark.parametrize("which", ["x", "dy", "parameters"])
def test_layouts(which, layout):
    run(Case((2, 3), (4, 7), torch.float32, **{which: layout}))


@pytest.mark.parametrize("lead", [(), (0,), (2, 0), (2, 1, 3)])
def test_dimensions(lead):
    run(Case(lead, (9,)))


def test_only_some_gradients():
    for number in range(32):
        *wanted, weight, bias = (bool(number >> i & 1) for i in range(5))
        run(Case((3,), (9,), weight=weight, bias=bias, wanted=tuple(wanted)))


@examples(15)
@hypothesis.given(any_layer_norm())
def test_any_case(case):
    run(case)


def test_without_help_for_the_caches():
    x, w, b, _ = Case((3,), (200,)).tensors(small.DEVICE)
    plain, helped = (small.forward(x, w, b, 1e-5, c) for c in (False, True))
    assert all(map(torch.equal, plain, helped))


@pytest.mark.parametrize("ratio", [1, 100, 10_000])
def test_variance(ratio):
    """Welford's error grows with the mean, that of the squares with its
    square."""
    errors = [
        page.variance.fn(64, 65536, torch.float32, "forward", ratio, name)[0]
        for name in ("triton", "squares")
    ]
    assert errors[0] < 1e-7 + 1e-9 * ratio
    assert ratio == 1 or errors[1] > 1e-9 * ratio**2


def test_variance_of_lanes_that_differ():
    """A row that climbs: the lanes' means lie apart."""
    x = torch.arange(500.0, device=small.DEVICE).repeat(2, 1)
    _, mean, rstd = small.forward(x, None, None, 0.0)
    expected = x.double().var(1, correction=0) ** -0.5
    torch.testing.assert_close(mean, x.mean(1))
    torch.testing.assert_close(rstd.double(), expected, rtol=1e-6, atol=0)


def _tensor(*shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype, device=page.DEVICE)


@pytest.mark.parametrize(
    ("error", "names", "arguments"),
    [
        (TypeError, "x", (_tensor(2, 8, dtype=torch.int32), 8)),
        (TypeError, "weight", (_tensor(2, 8), 8, _tensor(8).int())),
        (TypeError, "bias", (_tensor(2, 8), 8, None, _tensor(8).bool())),
        (ValueError, "x.*7", (_tensor(2, 8), 7)),
        (ValueError, "x.*0", (_tensor(2, 0), 0)),
        (ValueError, "weight", (_tensor(2, 8), 8, _tensor(7))),
        (ValueError, "bias", (_tensor(2, 8), 8, None, _tensor(2, 4))),
        (ValueError, "weight", (_tensor(2, 8), 8, _tensor(8).to("meta"))),
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
    "lanes are not put together": (
        "tl.sum(m2 + count * d * d) / N",
        "tl.sum(m2) / N",
    ),
    "all lanes count alike": ("< N, LAST + 1, LAST)", "< N, LAST, LAST)"),
    "the old mean twice": ("m2 += d * d * (1 - share)", "m2 += d * d"),
    "masked lanes in the variance": (
        "d = tl.where(cols < N, x.to(acc) - mean, 0)",
        "d = x.to(acc) - mean",
    ),
    "the last tile is not written": (
        "tile = LAST - i if CACHES else i",
        "tile = i if i < LAST else 0",
    ),
    "c1 without rstd": ("tl.sum(c1) * rstd / N", "tl.sum(c1) / N"),
    "c2 dropped": ("(wdy - x_hat * c1 - c2) * rstd", "(wdy - x_hat * c1)"),
    "sums without a place": (
        "sums_ptr += group * 2 * N + cols",
        "sums_ptr += cols",
    ),
    "every tile once": (
        "tl.range(group * ROWS, M, groups * ROWS, num_stages=3)",
        "tl.range(group * ROWS, groups * ROWS, groups * ROWS)",
    ),
    "rows that do not exist": ("exists = row < M - first", "exists = row < 2"),
    "only the last tile": (
        "dw += tl.sum(dy * x_hat",
        "dw = tl.sum(dy * x_hat",
    ),
    "dy with strides of its own": (
        "dy.contiguous(), *ctx.saved",
        "dy, *ctx.saved",
    ),
}


def _suite(module):
    """A few cases that together catch every mutant."""
    module.NUM_SMS = 6
    run(Case((25,), (129,)), module)
    run(Case((3,), (9,), dy="one number"), module)


def test_suite_passes():
    _suite(load(NAME, SMALL))


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_fail(name):
    mutant = load(NAME, [*SMALL, MUTANTS[name]])
    with pytest.raises(AssertionError):
        _suite(mutant)


def test_exercise():
    assert not page.exercise_1(page._rstd_by_squares)
    assert page.exercise_1(page._rstd_shifted)


def test_a_masked_lane_is_shifted_too():
    """The hint of the exercise."""
    with_zeros = ("other=near) - near", "other=0) - near")
    assert not page.exercise_1(load(NAME, [with_zeros])._rstd_shifted)


def test_script_runs_alone(output):
    if not page.ON_GPU:
        assert output.count("Timing needs a GPU") == 2
    assert "sums of squares: 0.00000" in output
    assert output.count("errors below") == 2
