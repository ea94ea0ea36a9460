"""Who adds up the rows, in Triton's interpreter (or on a GPU)."""

import re

import hypothesis
import pytest
import torch
import torch.nn.functional as F

import layer_norm_cases as cases
from any_case import any_layer_norm, examples
from layer_norm_cases import Case
from tutorial import load

NAME = "layer-norm/02-summing-rows"
page = load(NAME)
# A program of the interpreter takes 15 ms. With few programs, parts and rows
# in a tile, few rows are enough for several turns of every loop.
FEW = [
    ("return min(M, NUM_SMS), 16", "return 4, 16"),
    ("return min(M, min(per_sm, most) * NUM_SMS), 4", "return 4, 4"),
    ("sums, M, N, 2048 // cols, cols", "sums, M, N, 128 // cols, cols"),
    ("sums, M, N, 32, 32", "sums, M, N, 4, 32"),
    ("max(1, min(16, 32768 // x.shape[1]))", "2"),
]
few = load(NAME, FEW)
DESIGNS = ("triton", "columns", "split", "atomics", "rows")


def run(case, module=few, design="triton"):
    def layer_norm(*given):
        return module.layer_norm(*given, backward=module.DESIGNS[design])

    cases.run(layer_norm, case, module.DEVICE)


@pytest.mark.parametrize(
    "shape", [s for s in cases.SHAPES if s[0] < 20], ids=str
)
def test_shapes(shape):
    M, N = shape
    for dtype in cases.types(M, N):
        run(Case((M,), (N,), dtype))


@pytest.mark.parametrize("design", DESIGNS)
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_every_design(design, dtype):
    run(Case((3,), (129,), dtype), design=design)
    if dtype == torch.float32:
        run(Case((1,), (1,), dtype), design=design)
        run(Case((18,), (3,), dtype), design=design)


def test_the_page_as_it_is():
    run(Case((140,), (17,), torch.float16), page, "columns")


@pytest.mark.parametrize("design", DESIGNS)
def test_no_rows(design):
    run(Case((0,), (9,)), design=design)


@pytest.mark.parametrize("layout", cases.LAYOUTS)
@pytest.mark.parametrize("which", ["x", "dy", "parameters"])
def test_layouts(which, layout):
    run(Case((2, 3), (4, 7), torch.float16, **{which: layout}))


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("weight_dtype", cases.DTYPES)
def test_mixed_dtypes(dtype, weight_dtype):
    if not page.ON_GPU and cases.wrong_in_interpreter(dtype, weight_dtype):
        pytest.skip("the interpreter stores float64 as bfloat16 wrongly")
    run(Case((7,), (65,), dtype, weight_dtype))


def test_weight_and_bias_of_two_types():
    x, w, b, dy = Case((7,), (65,)).tensors(page.DEVICE)
    w, b = w.half().requires_grad_(), b.double().requires_grad_()
    y = page.layer_norm(x, (65,), w, b)
    dw, db = torch.autograd.grad(y, (w, b), dy)
    assert (dw.dtype, db.dtype) == (torch.float16, torch.float64)
    exact = (dy.double() * F.layer_norm(x.double(), (65,))).sum(0)
    assert (dw - exact).norm() <= 2**-11 * exact.norm()
    assert (db - dy.double().sum(0)).norm() <= 1e-6 * db.norm()


@pytest.mark.parametrize("number", range(8))
def test_only_some_gradients(number):
    wanted = tuple(bool(number >> i & 1) for i in range(3))
    run(Case((5,), (33,), wanted=wanted))
    run(Case((2,), (33,), weight=number < 4, bias=number % 4 < 2))


@examples(15)
@hypothesis.given(any_layer_norm())
def test_any_case(case):
    run(case)


def _tensor(*shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype, device=page.DEVICE)


@pytest.mark.parametrize(
    ("error", "names", "arguments"),
    [
        (TypeError, "x", (_tensor(2, 8, dtype=torch.int32), (8,))),
        (TypeError, "weight", (_tensor(2, 8), (8,), _tensor(8).int())),
        (TypeError, "bias", (_tensor(2, 8), (8,), None, _tensor(8).bool())),
        (ValueError, "x is on", (_tensor(2, 8).to("meta"), (8,))),
        (ValueError, "weight", (_tensor(2, 8), (8,), _tensor(8).to("meta"))),
        (ValueError, "x.*normalized_shape", (_tensor(2, 8), (7,))),
        (ValueError, "normalized_shape", (_tensor(2, 0), (0,))),
        (ValueError, "normalized_shape", (_tensor(2), ())),
        (ValueError, "weight", (_tensor(2, 8), (8,), _tensor(7))),
        (ValueError, "bias", (_tensor(2, 8), (8,), None, _tensor(2, 8))),
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


# Each edit of the page must make a check of the design fail.
FIRST_TILES = "for start in range(part * ROWS, M, parts * ROWS):"
MUTANTS = {
    "c1 dropped": ("triton", "(wdy - x_hat * c1 - c2)", "(wdy - c2)"),
    "c2 dropped": ("triton", "(wdy - x_hat * c1 - c2)", "(wdy - x_hat * c1)"),
    "only the last row": ("triton", "dw += dy * x_hat", "dw = dy * x_hat"),
    "every program a row": (
        "triton",
        "for row in range(tl.program_id(0), M, tl.num_programs(0)):",
        "for row in range(tl.program_id(0), 4, tl.num_programs(0)):",
    ),
    "masked lanes in the variance": (
        "triton",
        "x = tl.where(cols < N, x - mean, 0)",
        "x = x - mean",
    ),
    "all in the first buffer": (
        "triton",
        "sums_ptr += tl.program_id(0) * 2 * N\n    tl.store(sums_ptr, dw",
        "tl.store(sums_ptr, dw",
    ),
    "first buffers only": (
        "triton",
        "mask = (rows < programs) & (cols < WIDTH)",
        "mask = (rows < 3) & (cols < WIDTH)",
    ),
    "a store without its mask": (
        "triton",
        "tl.store(sums_ptr + N, db, mask=mask)",
        "tl.store(sums_ptr + N, db)",
    ),
    "sums not cleared": (
        "atomics",
        "sums = torch.zeros(1, 2,",
        "sums = torch.empty(1, 2,",
    ),
    "a store for an addition": (
        "atomics",
        'tl.atomic_add(sums_ptr + N, db, mask=mask, sem="relaxed")',
        "tl.store(sums_ptr + N, db, mask=mask)",
    ),
    "one tile a program": (
        "columns",
        FIRST_TILES,
        "for start in range(part * ROWS, part * ROWS + 1, parts * ROWS):",
    ),
    "no mask on rows": (
        "columns",
        "mask = (rows < M) & (cols < N)\n        first",
        "mask = (rows >= 0) & (cols < N)\n        first",
    ),
    "parts overlap": (
        "split",
        FIRST_TILES,
        "for start in range(part * ROWS, M, ROWS):",
    ),
    "parts write over each other": (
        "split",
        "sums_ptr += part * 2 * N + cols",
        "sums_ptr += cols",
    ),
    "statistics in float32 only": (
        "triton",
        "acc = torch.promote_types(x.dtype, torch.float32)",
        "acc = torch.float32",
    ),
}


def suite(module, design):
    """A few cases that together catch every mutant."""
    run(Case((3,), (129,), torch.float64), module, design)
    run(Case((18,), (5,)), module, design)


@pytest.mark.parametrize("design", DESIGNS)
def test_suite_passes(design):
    suite(few, design)


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_fail(name):
    design, old, new = MUTANTS[name]
    mutant = load(NAME, [*FEW, (old, new)])
    with pytest.raises(AssertionError):
        suite(mutant, design)


def test_the_order_of_additions_follows_the_programs():
    """Why the same bits are promised for the same number of programs."""
    given = page.given(40, 130, torch.float32)

    def dw(programs):
        sums = torch.empty(programs, 2, 130, device=page.DEVICE)
        page.by_rows(*given, programs, 4, sums, page._store)
        return page.add_up(sums, torch.float32)[0]

    assert torch.equal(dw(4), dw(4))
    assert not torch.equal(dw(4), dw(3))


def test_table_counts_what_is_launched(output, monkeypatch):
    """Its rows of sums are those that the designs write at 4096 columns on an
    H200."""
    written = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda *args, **options: None

    def by_rows(
        dy, x, w, mean, rstd, P=None, warps=None, sums=None, keep=None
    ):
        if sums is not None:
            written.append(P)
        return x

    def add_up(sums, dtype):
        written.append(len(sums))
        return sums[0]

    monkeypatch.setattr(page, "NUM_SMS", 132)
    monkeypatch.setattr(page, "by_rows", by_rows)
    monkeypatch.setattr(page, "add_up", add_up)
    monkeypatch.setattr(page, "_layer_norm_bwd_columns", Kernel())
    dy, stats = torch.empty(4096, 4096, device="meta"), torch.empty(4096)
    table = {
        line[:22].strip(): line.split()[-2:]
        for line in output.splitlines()
        if re.match(r".{22} +[35] +\d+ +\d\.\d\d$", line)
    }
    assert len(table) == 5
    for name, design in (
        ("split, 8 parts", "split"),
        ("396 buffers", "triton"),
        ("396 programs, atomics", "atomics"),
        ("atomics for each row", "rows"),
    ):
        written.clear()
        page.DESIGNS[design](dy, dy, dy[0], stats, stats, torch.float16)
        if design == "split":
            written *= 2  # by the columns' kernel, which is left out here
        rows, units = table[name]
        assert sum(written) == int(rows), name
        matrices = 5 if design == "split" else 3
        assert float(units) == round(matrices + int(rows) / 1024, 2)


def test_script_runs_alone(output):
    if not page.ON_GPU:
        assert output.count("Timing needs a GPU") == 3
    assert output.count("errors below") == 6
    toy = re.search(r"dw by columns: error (.*)", output)
    assert float(toy[1]) < 1e-6


def test_the_stub_is_wrong_and_the_solution_right(output):
    answers = [line for line in output.splitlines() if "buffers:" in line]
    assert answers[-2:] == ["right buffers: []", "right buffers: [0, 1, 2]"]
