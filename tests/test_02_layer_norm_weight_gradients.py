"""Page 02 in Triton's interpreter (or on a GPU, where there is one)."""

import hypothesis
import pytest
import torch
import torch.nn.functional as F

import layer_norm_cases as cases
from any_case import any_layer_norm
from layer_norm_cases import Case
from tutorial import load

NAME = "02-layer-norm-weight-gradients"
page = load(NAME)
PARTS = ("dx", "dw", "db")


def run(case, module=page):
    cases.run(module.layer_norm, case, module.DEVICE)


@pytest.mark.parametrize("shape", cases.LONG_SHAPES, ids=str)
def test_shapes(shape):
    M, N = shape
    for dtype in cases.types(M, N):
        run(Case((M,), (N,), dtype))


@pytest.mark.parametrize("N", [1024, 1537, 2048, 4097, 10240])
def test_every_kind_of_tile(N):
    # Several rows are in a tile of narrow rows only.
    run(Case((9 if N < 2048 else 2,), (N,), torch.float16))


@pytest.mark.parametrize("dtype", cases.LONG_DTYPES)
@pytest.mark.parametrize("layout", cases.LAYOUTS)
@pytest.mark.parametrize("which", ["x", "dy", "parameters"])
def test_layouts(which, layout, dtype):
    for lead, shape in ((5,), (33,)), ((2, 3), (4, 7)):
        run(Case(lead, shape, dtype, **{which: layout}))


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
    x_hat = F.layer_norm(x.double(), (65,))
    torch.testing.assert_close(
        dw.double(), (dy * x_hat).sum(0).double(), rtol=1e-3, atol=1e-4
    )
    torch.testing.assert_close(db, dy.double().sum(0), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 1, 3), (0,), (2, 0)])
@pytest.mark.parametrize("shape", [(1,), (9,), (3, 5)])
def test_dimensions(lead, shape):
    run(Case(lead, shape))


@pytest.mark.parametrize("weight", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_only_some_gradients(weight, bias):
    for number in range(8):
        wanted = tuple(bool(number >> i & 1) for i in range(3))
        run(Case((5,), (33,), weight=weight, bias=bias, wanted=wanted))


@hypothesis.given(
    any_layer_norm(),
)
def test_any_case(case):
    run(case)


def rung_errors(rung, M, N, dtype, module=page):
    """Errors of dx, dw and db, of a rung between guard bands."""
    dy, x, w, b = module.example(M, N, dtype)
    _, mean, rstd = module.forward(x, w, b, 1e-5)
    expected = module.exact(dy, x, w)
    with cases.guarded_allocations():
        found = rung(dy, x, w, mean, rstd)
    return [module.error(*pair) for pair in zip(found, expected, strict=True)]


ROUNDING = {
    torch.float16: 2**-11,
    torch.bfloat16: 2**-7,  # the interpreter cuts
    torch.float32: 1e-6,
    torch.float64: 1e-14,
}


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("name", page.RUNGS)
def test_every_rung(name, dtype):
    wide = ((2, 600),) if dtype == torch.float16 else ()
    for M, N in (1, 1), (3, 129), (33, 40), *wide:
        if N == 1:
            # dx is exactly 0 there, so it has no relative error.
            dy, x, w, b = page.example(M, N, dtype)
            _, mean, rstd = page.forward(x, w, b, 1e-5)
            dx, dw, db = page.RUNGS[name](dy, x, w, mean, rstd)
            assert dx.item() == 0 and dw.item() == 0
            assert db.item() == dy.item()
        else:
            errors = rung_errors(page.RUNGS[name], M, N, dtype)
            for part, error in zip(PARTS, errors, strict=True):
                assert error <= ROUNDING[dtype], (M, N, part, error)


def test_rows_wrap_around_the_buffers():
    # More rows than locks: every buffer is taken twice or more.
    assert max(rung_errors(page.lock, 300, 9, torch.float32)) <= 1e-6


def test_same_programs_same_bits():
    dy, x, w, b = page.example(40, 130, torch.float32)
    _, mean, rstd = page.forward(x, w, b, 1e-5)
    first = page.pipelined(dy, x, w, mean, rstd, programs=4)
    again = page.pipelined(dy, x, w, mean, rstd, programs=4)
    other = page.pipelined(dy, x, w, mean, rstd, programs=3)
    assert all(map(torch.equal, first, again))
    assert torch.equal(first[0], other[0])
    assert not torch.equal(first[1], other[1])


def _tensor(*shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype, device=page.DEVICE)


@pytest.mark.parametrize(
    ("error", "names", "arguments"),
    [
        (TypeError, "x", (_tensor(2, 8, dtype=torch.int32), 8, None, None)),
        (TypeError, "weight", (_tensor(2, 8), 8, _tensor(8).int(), None)),
        (TypeError, "bias", (_tensor(2, 8), 8, None, _tensor(8).bool())),
        (ValueError, "x.*normalized_shape", (_tensor(2, 8), 7, None, None)),
        (ValueError, "normalized_shape", (_tensor(2, 0), 0, None, None)),
        (ValueError, "weight", (_tensor(2, 8), 8, _tensor(7), None)),
        (ValueError, "bias", (_tensor(2, 8), 8, None, _tensor(2, 4))),
        (ValueError, "eps", (_tensor(2, 8), 8, None, None, -1e-5)),
        (ValueError, "x", (_tensor(2, 8).to("meta"), 8, None, None)),
        (
            ValueError,
            "weight",
            (_tensor(2, 8), 8, _tensor(8).to("meta"), None),
        ),
        (
            ValueError,
            "normalized_shape.*page 03",
            (_tensor(1, 10241), 10241, None, None),
        ),
    ],
)
def test_mistakes_are_named(error, names, arguments):
    with pytest.raises(error, match=names):
        page.layer_norm(*arguments)


def test_second_derivative_is_refused():
    x = torch.randn(2, 8, device=page.DEVICE, requires_grad=True)
    y = page.layer_norm(x, (8,), None, None).square().sum()
    (dx,) = torch.autograd.grad(y, x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


# Each edit must make a check fail.
DX = "(ws[c].to(acc) * dys[c].to(acc) - (x_hat * c1 + c2)) * rstd"
MUTANTS = {
    "c2 dropped": ("- (x_hat * c1 + c2)) * rstd\n", "- x_hat * c1) * rstd\n"),
    "c1 dropped": ("- (x_hat * c1 + c2)) * rstd\n", "- c2) * rstd\n"),
    "masked lanes in the variance": (
        "centered = tl.where(mask, xs[c].to(acc) - mean, 0)",
        "centered = xs[c].to(acc) - mean",
    ),
    "no mask on columns": (
        "mask = (tile * ROWS + row < M) & (col < N)",
        "mask = (tile * ROWS + row < M) & (col >= 0)",
    ),
    "no mask on rows": (
        "mask = (tile * ROWS + row < M) & (col < N)",
        "mask = (tile * ROWS + row >= 0) & (col < N)",
    ),
    "sums without mask": (
        "tl.store(ptr + N + cols, tl.sum(dbs[c], 0), mask=cols < N)",
        "tl.store(ptr + N + cols, tl.sum(dbs[c], 0))",
    ),
    "every row once": (
        "tl.program_id(0), tl.cdiv(M, ROWS), tl.num_programs(0),\n",
        "tl.program_id(0), tl.num_programs(0), tl.num_programs(0),\n",
    ),
    "only the last row of a program": (
        "new_dws += (dws[c] + dys[c].to(acc) * x_hat,)",
        "new_dws += (dys[c].to(acc) * x_hat,)",
    ),
    "sum over the first rows": (
        "for start in range(0, M, ROWS):\n        rows = start + "
        "tl.arange(0, ROWS)[:, None]",
        "for start in range(0, 1, ROWS):\n        rows = start + "
        "tl.arange(0, ROWS)[:, None] * 2",
    ),
    "dy with strides of its own": (
        "dy.reshape(x.shape).contiguous()",
        "dy.reshape(x.shape)",
    ),
    "x with strides of its own": (
        "x.reshape(-1, N).contiguous()",
        "x.reshape(-1, N)",
    ),
    "statistics in float32 only": (
        "acc = torch.promote_types(x.dtype, torch.float32)",
        "acc = torch.float32",
    ),
}


def _suite(module):
    """A few cases that together catch every mutant."""
    for dtype in torch.float32, torch.float64:
        run(Case((3,), (129,), dtype), module)
    run(Case((3,), (9,), x="columns"), module)
    run(Case((3,), (9,), dy="one number"), module)
    run(Case((72,), (129,)), module)  # two tiles for a program


def test_suite_passes():
    _suite(page)


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_fail(name):
    mutant = load(NAME, [MUTANTS[name]])
    with pytest.raises(AssertionError):
        _suite(mutant)


FEW = ("G = 256 if N <= 2048 else 128 if N <= 8192 else 64", "G = 2")
# A rung, and the edits: of the last one is the fault.
RUNG_MUTANTS = {
    "lock never reads": (
        "lock",
        FEW,
        (
            "old = cols < tl.where(state == 2, N, 0)",
            "old = cols < tl.where(state == 3, N, 0)",
        ),
    ),
    "lock reads what nobody wrote": (
        "lock",
        FEW,
        ("old = cols < tl.where(state == 2, N, 0)", "old = cols < N"),
    ),
    "all buffers are added up": (
        "lock",
        ("sum_rows(sums[:M]", "sum_rows(sums"),
    ),
    "atomic sums not cleared": (
        "atomic",
        (
            "sums = torch.zeros(2, N, dtype=mean.dtype",
            "sums = torch.empty(2, N, dtype=mean.dtype",
        ),
    ),
    "columns stop early": (
        "columns",
        (
            "mask = (rows < M)[:, None] & (cols < N)",
            "mask = (rows < 32)[:, None] & (cols < N)",
        ),
    ),
    "persistent takes one row": (
        "persistent",
        (
            "for row in range(tl.program_id(0), M, tl.num_programs(0)):\n"
            "        row_dw",
            "for row in range(tl.program_id(0), 4, tl.num_programs(0)):\n"
            "        row_dw",
        ),
    ),
    "c2 dropped": (
        "columns",
        ("(wdy - (x_hat * c1 + c2)) * rstd", "(wdy - x_hat * c1) * rstd"),
    ),
}


@pytest.mark.parametrize("name", RUNG_MUTANTS)
def test_rung_mutants_fail(name):
    rung, *edits = RUNG_MUTANTS[name]

    def worst(edits):
        module = load(NAME, edits) if edits else page
        errors = rung_errors(module.RUNGS[rung], 33, 5, torch.float32, module)
        # A NaN is an error, and max() would not see it.
        return max(1.0 if e != e else e for e in errors)

    assert worst(edits[:-1]) <= 1e-6
    assert worst(edits) > 1e-6


HALF_SUMS = "dtype=dtype or mean.dtype, device=x.device)"


def test_sums_in_16_bits_fail():
    few = load(NAME, [FEW])
    assert max(rung_errors(few.lock, 200, 8, torch.float16)) <= 2**-11

    def half(*given):
        return few.lock(*given, dtype=torch.float16)

    assert max(rung_errors(half, 200, 8, torch.float16)) > 2**-11


def test_script_runs_alone(output):
    assert "all layouts right" in output
    assert output.count("Timing needs a GPU") == 1


def test_machine_code_shows_the_barrier(output):
    with_barrier, without = (
        next(line for line in output.splitlines() if line.startswith(start))
        for start in ("BARRIER=True", "BARRIER=False")
    )
    assert "bar.sync" in with_barrier
    assert "bar.sync" not in without


def test_pitfalls_and_exercises_show(output):
    assert output.count("wrong:") == output.count("right:") == 3
    assert output.count("all right") == 3  # the three solutions
    assert "right: 0 of" in output
    assert "wrong: 0 of" not in output
    assert output.count("wrong rows: [0, 1, 2") == 1  # one stub
    assert output.count("wrong columns: [0, 1, 2") == 2  # the other two
