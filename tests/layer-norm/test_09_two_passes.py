"""What a second pass costs: in Triton's interpreter, or on a GPU."""

import functools

import hypothesis
import pytest
import torch
import torch.nn.functional as F

import layer_norm_cases as cases
from any_case import any_layer_norm, examples
from compiled import occupancy
from compiled.aot import Call
from layer_norm_cases import Case
from tutorial import load

NAME = "layer-norm/09-two-passes"
# Tiles so small that a small matrix has several, and rows are swept.
SMALL = [
    (
        "block = triton.next_power_of_2(N) if N <= 16384 else 4096\n"
        "        args",
        "block = 16\n        args",
    ),
    (
        "EXAMPLE = lambda *_: ((8, 128, 8), (32, 32, 8), 1)",
        "EXAMPLE = lambda *_: ((2, 16, 4), (4, 16, 4), 1)",
    ),
    ("EXAMPLE()[0], tile, parts", "EXAMPLE()[0], (4, 16, 4), 3"),
]
page, small = load(NAME), load(NAME, SMALL)


def run(case, design="triton", module=page):
    function = functools.partial(module.layer_norm, design=design)
    cases.run(function, case, module.DEVICE)


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_shapes(dtype):
    for shape in (1, 1), (3, 129), (17, 40), (2, 257):
        run(Case(shape[:1], shape[1:], dtype))


@pytest.mark.parametrize("design", page.DESIGNS)
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_every_design(design, dtype):
    run(Case((17,), (65,), dtype), design)
    run(Case((7,), (33,), dtype), design, small)


@pytest.mark.parametrize("M", [0, 1, 5, 13])
@pytest.mark.parametrize("N", [1, 16, 33])
def test_small_tiles(M, N):
    run(Case((M,), (N,)), "rows split", small)
    run(Case((M,), (N,), wanted=(False, True, True)), "one kernel", small)


def test_wide_rows():
    for shape in (2, 2049), (1, 16385):
        run(Case(shape[:1], shape[1:], torch.float16))


@pytest.mark.parametrize("layout", cases.LAYOUTS)
@pytest.mark.parametrize("which", ["x", "dy", "parameters"])
def test_layouts(which, layout):
    run(Case((2, 3), (4, 7), torch.float32, **{which: layout}))


@pytest.mark.parametrize("lead", [(), (0,), (2, 0), (2, 1, 3)])
def test_dimensions(lead):
    run(Case(lead, (9,)))


def test_only_some_gradients():
    for design in "triton", "one kernel":
        for number in range(0, 32, 1 if design == "triton" else 3):
            *wanted, weight, bias = (bool(number >> i & 1) for i in range(5))
            case = Case((3,), (9,), weight=weight, bias=bias, wanted=wanted)
            run(case, design)


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
        (ValueError, "weight", (_tensor(2, 8), (8,), _tensor(7))),
        (ValueError, "bias", (_tensor(2, 8), (8,), None, _tensor(2, 4))),
        (ValueError, "weight", (_tensor(2, 8), (8,), _tensor(8).to("meta"))),
    ],
)
def test_mistakes_are_named(error, names, arguments):
    with pytest.raises(error, match=names):
        page.layer_norm(*arguments)


def test_what_is_too_wide_is_said():
    """One kernel holds a row; columns of a tile are counted in 32 bits."""
    for most, design in (2**14, "one kernel"), (2**25, "triton"):
        w = _tensor(1).expand(most + 8)
        with pytest.raises(ValueError, match=f"of 1 to {most}$"):
            page.layer_norm(w[None], w.shape, w, w, design=design)


def test_no_design_is_charged_for_what_is_not_its_own():
    """The gradient of w[0] fills and copies a matrix, as part of the time."""
    x, w, b, dy = page.inputs(3, 40, torch.float16)
    y = page.layer_norm(x, (40,), w, b)
    with torch.autograd.profiler.profile() as seen:
        torch.autograd.grad(y, (x, w, b), dy)
    names = {event.name for event in seen.function_events}
    assert names and "aten::select_backward" not in names


def test_second_derivative_is_refused():
    x = torch.randn(2, 8, device=page.DEVICE, requires_grad=True)
    y = page.layer_norm(x, (8,)).square().sum()
    (dx,) = torch.autograd.grad(y, x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


# What the page says ----------------------------------------------------------


@pytest.fixture
def launched(monkeypatch):
    """(kernel, programs) of what is launched."""
    found = []

    class Spy:
        def __init__(self, name, kernel):
            self.name, self.kernel = name, kernel

        def __getitem__(self, grid):
            found.append((self.name, grid))
            return self.kernel[grid]

    for name in (
        *("_layer_norm_bwd_dx", "_layer_norm_bwd_columns"),
        *("_layer_norm_bwd_add_up", "_layer_norm_bwd_one"),
    ):
        for module in page, small:
            spy = Spy(name[16:], getattr(module, name))
            monkeypatch.setattr(module, name, spy)
    return found


@pytest.mark.parametrize(
    ("wanted", "kernels"),
    [
        ("x", ["dx"]),
        ("w", ["columns", "add_up"]),
        ("b", ["columns", "add_up"]),
        ("xwb", ["dx", "columns", "add_up"]),
    ],
)
def test_what_is_not_wanted_is_not_launched(wanted, kernels, launched):
    x, w, b = _tensor(13, 8), _tensor(8), _tensor(8)
    named = {"x": x, "w": w, "b": b}
    for name in wanted:
        named[name].requires_grad_()
    small.layer_norm(x, (8,), w, b).sum().backward()
    assert [name for name, _ in launched] == kernels
    for name, t in named.items():
        assert (t.grad is not None) == (name in wanted)


def test_the_structure_of_the_example(launched):
    """At its own size: 128 programs for dx, 16 of columns, no more."""
    x, w, _, dy = page.inputs(1024, 512, torch.float32)
    mean, rstd = (torch.ones(1024, device=page.DEVICE) for _ in "ab")
    given = dy, x.detach(), w.detach(), mean, rstd, torch.float32
    with pytest.MonkeyPatch.context() as patch:
        for name in "_layer_norm_bwd_dx", "_layer_norm_bwd_columns":
            kernel = getattr(page, name)
            no = {"kernel": {(128,): _nothing, (16, 1): _nothing}}
            patch.setattr(kernel, "kernel", no["kernel"])
        page.DESIGNS["example 53's tiling"](*given)
    assert launched == [("dx", (128,)), ("columns", (16, 1))]
    page.DESIGNS["one kernel"](*(t[:9] for t in given[:2]), w.detach(),
                               mean[:9], rstd[:9], torch.float32)  # fmt: skip
    assert [name for name, _ in launched[2:]] == ["one", "add_up"]


def _nothing(*args, **options):
    pass


def test_a_row_as_wide_as_a_tile():
    for N in 1, 512, 1024, 4096, 16384:
        (rows, cols, warps), _, parts = page.wide_tiles(4096, N)
        assert cols >= N and rows * cols >= 1024 and 4 <= warps <= 32
        # Some 256 columns for each multiprocessor, each part 64 rows at least.
        assert parts == min(64, 256 * page.NUM_SMS // N)
    assert page.wide_tiles(4096, 16385)[0] == (1, 16384, 32)
    # Tall and narrow matrices have many parts, few rows have one.
    assert page.split(2**21, 32)[2] == 8 * page.NUM_SMS
    assert page.split(32, 1024)[2] == page.split(4096, 40000)[2] == 1


def documented(x, w, dy, mean, rstd, over, count):
    """The formula of the example's documentation, with other statistics."""
    x_hat = (x - mean) * rstd
    dw, db = (dy * x_hat).sum(over), dy.sum(over)
    return w * rstd * (dy - (db + x_hat * dw) / count)


def test_the_documented_formula_is_that_of_batch_normalization():
    torch.manual_seed(0)
    x, dy = torch.randn(2, 7, 5, dtype=torch.double)
    w, b = torch.randn(2, 5, dtype=torch.double)
    x.requires_grad_()
    y = F.batch_norm(x, None, None, w, b, training=True)
    (expected,) = torch.autograd.grad(y, x, dy)
    leaf, x = x, x.detach()
    mean, rstd = x.mean(0), (x.var(0, correction=0) + 1e-5) ** -0.5
    found = documented(x, w, dy, mean, rstd, 0, 7)
    torch.testing.assert_close(found, expected)
    y = F.layer_norm(leaf, (5,), w, b)
    (expected,) = torch.autograd.grad(y, leaf, dy)
    mean = x.mean(1, keepdim=True)
    rstd = (x.var(1, correction=0, keepdim=True) + 1e-5) ** -0.5
    found = documented(x, w, dy, mean, rstd, 0, 5)
    assert (found - expected).norm() > 0.1 * expected.norm()
    # What the kernel of the example computes instead, by its own names.
    ds, db = ((w * dy * t).sum(1, keepdim=True) for t in (x, 1))
    b = (db * mean - ds) * rstd**3 / 5
    c = -b * mean - db * rstd / 5
    torch.testing.assert_close(rstd * w * dy + b * x + c, expected)


def test_same_input_same_bits():
    x, w, b, dy = small.inputs(21, 24, torch.float32)
    found = []
    for _ in range(2):
        y = small.layer_norm(x, (24,), w, b)
        grads = torch.autograd.grad(y, (x, w, b), dy)
        found.append(torch.cat([t.flatten() for t in (y, *grads)]))
    assert torch.equal(*found)


WIDER_WEIGHTS = """
x, dy = torch.empty(2, M, N, dtype=torch.float16, device=DEVICE)
w, b = torch.empty(2, N, device=DEVICE)
x, w, b = (t.clone().requires_grad_() for t in (x, w, b))
y = layer_norm(x, (N,), w, b, design="one kernel")
torch.autograd.grad(y, (x, w, b), dy)
"""


def test_weights_in_float32_fit_beside_rows_in_16_bits(launches):
    """The loop copies w ahead as well, whose numbers are wider here."""
    call = Call(NAME, WIDER_WEIGHTS, {"M": 8, "N": 8192})
    kernels = {built.kernel: built for built in launches([call])[0]}
    limits = occupancy.LIMITS["sm_90"]
    built = kernels["_layer_norm_bwd_one"]
    assert built.num_stages == 3
    assert built.shared <= limits.shared - limits.reserved


# Each edit must make a check fail.
MUTANTS = {
    "c1 dropped": (
        "dx = (wdy - x_hat * c1 - c2) * rstd",
        "dx = (wdy - c2) * rstd",
    ),
    "c2 dropped": (
        "dx = (wdy - x_hat * c1 - c2) * rstd",
        "dx = (wdy - x_hat * c1) * rstd",
    ),
    "the second sweep misses the start": (
        "start = (N - 1) // COLS * COLS - done if sweep else done",
        "start = (N - 1) // COLS * COLS if sweep else done",
    ),
    "masked lanes in the variance": (
        "x = tl.where(cols < N, x - mean, 0)",
        "x = x - mean",
    ),
    "the first rows only": (
        "first = tl.program_id(0).to(tl.int64) * ROWS",
        "first = tl.program_id(0).to(tl.int64) * 0",
    ),
    "columns beyond the end": (
        "mask, at = there & (col < N), first",
        "mask, at = there & (col < N + 1), first",
    ),
    "parts without a place": (
        "sums_ptr += part * 2 * N + col",
        "sums_ptr += col",
    ),
    "each part takes all rows": (
        "range(part * ROWS, M, parts * ROWS)",
        "range(0, M, ROWS)",
    ),
    "the last part forgotten": (
        "mask = (rows < parts) & (cols < WIDTH)",
        "mask = (rows < parts - 1) & (cols < WIDTH)",
    ),
    "dy with strides of its own": (
        "given = dy.contiguous(), *",
        "given = dy, *",
    ),
    "only the last row of one kernel": (
        "        dw += dy * x_hat\n",
        "        dw = dy * x_hat\n",
    ),
}  # fmt: skip


def _suite(module):
    """A few cases that together catch every mutant."""
    module.NUM_SMS = 1
    run(Case((13,), (33,)), "rows split", module)
    run(Case((13,), (9,), dy="one number"), "one kernel", module)


def test_suite_passes():
    _suite(load(NAME, SMALL))


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_fail(name):
    mutant = load(NAME, [*SMALL, MUTANTS[name]])
    with pytest.raises(AssertionError):
        _suite(mutant)


def test_script_runs_alone(output):
    if not page.ON_GPU:
        assert output.count("Timing needs a GPU") == 3
    assert "autograd: rows of dx sum to [0. 0. 0.]\n" in output
    assert "documented: rows of dx sum to [1.11 0.65 3.62]\n" in output
    assert output.count("errors below") == 4


def test_exercise(output):
    stub, solution = (
        float(line.split(": ")[1])
        for line in output.splitlines()
        if line.startswith("error of c1")
    )
    assert stub > 1e-2 and solution < 1e-9
    assert not page.exercise_1(lambda ds, db, m, r, N: (ds * r / N, db / N))
