"""Page 06 in Triton's interpreter (or on a GPU, where there is one)."""

import hypothesis
import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st

import layer_norm_cases
import rms_norm_cases as cases
from any_case import any_case, layouts, own_layouts
from rms_norm_cases import Case, run
from tutorial import load

NAME = "06-rms-norm"
page = load(NAME)
ROWS = {"CHUNK": 32, "num_warps": 4}
MORE = {"STAGES": 3, "HIDE": True, "EARLY": False, "per_sm": 4}
# A forward plan and the backward plan that follows it.
PAIRS = {
    "rows": (
        ("rows", ROWS | {"ROWS": 2, "HINT": ""}),
        ("rows", ROWS | MORE | {"ROWS": 2}),
    ),
    "one row": (
        ("rows", ROWS | {"ROWS": 1, "HINT": ""}),
        ("rows", ROWS | MORE | {"ROWS": 1, "HIDE": False}),
    ),
    "wide": (
        ("sweeps", ROWS),
        ("slices", ROWS | {"ROWS": 2, "per_sm": 4}),
    ),
}


def force(patch, module, name):
    """Let the rule always answer with these two plans."""
    first, second = PAIRS[name]
    patch.setattr(module, "plan_forward", lambda *_: first)
    patch.setattr(module, "plan_backward", lambda *_: second)


@pytest.fixture(params=PAIRS)
def pair(request, monkeypatch):
    force(monkeypatch, page, request.param)


@cases.long_widths([1, 31, 32, 33, 90, 128], every_type=33)
@pytest.mark.parametrize("fused", [False, True], ids=["alone", "fused"])
def test_every_kernel(pair, fused, N, dtype):
    run(page, Case((5,), (N,), dtype, fused=fused, offset=float(fused)))


@pytest.mark.parametrize("M", [1, 2, 4, 9])
def test_every_kernel_and_number_of_rows(pair, M):
    run(page, Case((M,), (72,), torch.float16))


@pytest.mark.parametrize("sms", [1, 2, 7])
def test_number_of_multiprocessors(pair, sms, monkeypatch):
    # More tiles than programs, and fewer.
    monkeypatch.setattr(page, "NUM_SMS", sms)
    run(page, Case((27,), (40,)))
    run(page, Case((2,), (64,)))


@pytest.mark.parametrize("weight", [True, False])
@pytest.mark.parametrize("used", ["y", "s", "ys"])
def test_only_some_gradients(pair, weight, used):
    for number in 1, 2, 3, 4, 7:
        wanted = tuple(bool(number >> i & 1) for i in range(3))
        case = Case((5,), (40,), weight=weight, wanted=wanted, used=used)
        if any(wanted[:2]) or (wanted[2] and weight and "y" in used):
            run(page, case)


def test_same_bits_twice(pair):
    given = page.inputs(9, 75, torch.float16)
    once, twice = (
        page.add_results(page.add_rms_norm, *given) for _ in range(2)
    )
    assert all(map(torch.equal, once, twice))


def test_the_sum_is_what_it_is_in_two_steps(pair):
    """And the fused y is the norm of that s, bit for bit."""
    given = page.inputs(5, 75, torch.float16)
    fused = page.add_results(page.add_rms_norm, *given)
    steps = page.add_results(page.two_steps, *given)
    assert torch.equal(fused[0], steps[0])
    assert torch.equal(fused[1], steps[1])


@pytest.mark.parametrize("shape", cases.LONG_SHAPES, ids=str)
def test_shapes(shape):
    M, N = shape
    for dtype in layer_norm_cases.types(M, N):
        run(page, Case((M,), (N,), dtype))


@pytest.mark.parametrize("dtype", cases.LONG_DTYPES)
@pytest.mark.parametrize("layout", cases.LAYOUTS)
@pytest.mark.parametrize("which", ["x", "residual", "dy", "ds", "parameters"])
def test_layouts(which, layout, dtype):
    for lead, shape in ((5,), (33,)), ((2, 3), (4, 7)):
        run(page, Case(lead, shape, dtype, **{which: layout}))


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("weight_dtype", cases.DTYPES)
def test_mixed_dtypes(dtype, weight_dtype):
    if not page.ON_GPU and layer_norm_cases.wrong_in_interpreter(
        dtype, weight_dtype
    ):
        pytest.skip("the interpreter stores float64 as bfloat16 wrongly")
    run(page, Case((7,), (65,), dtype, weight_dtype))


@pytest.mark.parametrize("lead", [(), (3,), (2, 1, 3), (0,), (2, 0)])
@pytest.mark.parametrize("shape", [(1,), (9,), (3, 5)])
def test_dimensions(lead, shape):
    run(page, Case(lead, shape))
    run(page, Case(lead, shape, fused=False))


FORWARD = (1024, 4096, 5120, 14336, 20480, 24576)
BACKWARD = (1024, 1536, 4096, 12288, 16384)


@pytest.mark.parametrize("limit", sorted({*FORWARD, *BACKWARD}))
def test_both_sides_of_each_limit(limit):
    # The last kernel has a program for 16 columns: too many to interpret.
    only_dx = True, False, False
    for N in limit, limit + 1:
        run(page, Case((1,), (N,), torch.float16, wanted=only_dx))


def test_the_rule_answers_for_every_width():
    """And what it answers fits the kernels it names."""
    for itemsize in (2, 4, 8):
        for N in {
            *range(1, 3000, 7),
            *(2**i + d for i in range(21) for d in (-1, 0, 1) if 2**i + d),
        }:
            for more in (0, 1):
                kind, options = page.plan_forward(N, itemsize, bool(more))
                assert options["CHUNK"].bit_count() == 1
                kind, options = page.plan_backward(N, itemsize, 2 + more)
                assert options["CHUNK"].bit_count() == 1
                assert kind == "slices" or options["STAGES"] >= 1


@pytest.mark.parametrize(
    ("tiles", "room"), [(1, 1), (5, 7), (4096, 132), (4096, 264), (4097, 132)]
)
def test_programs(tiles, room):
    """No more than there is room for, no more rounds, none left over."""
    n = page.programs(tiles, room)
    rounds = -(-tiles // room)
    assert n <= room and -(-tiles // n) == rounds
    assert n == 1 or -(-tiles // (n - 1)) > rounds


def test_properties(pair):
    x, _, w, dy, _ = page.inputs(5, 75, torch.float64)
    N, eps = 75, 0.125
    y = page.rms_norm(x, N, w, eps)
    (dx,) = torch.autograd.grad(y, x, dy)
    x = x.detach()
    # Powers of two keep every bit.
    scaled = page.rms_norm(8 * x, N, w, 64 * eps)
    assert torch.equal(scaled, y)
    r2 = 1 / ((x * x).mean(1) + eps)
    c = (x * w * dy).mean(1) * r2.sqrt()
    rest = eps * r2 * N * c
    torch.testing.assert_close((dx * x).sum(1), rest)


def test_large_and_small_numbers():
    """Squares leave the range of float16; rows of 0 stay 0."""
    x = torch.full((2, 40), 300.0, dtype=torch.float16, device=page.DEVICE)
    y = page.rms_norm(x, 40, None)
    torch.testing.assert_close(y, torch.ones_like(y))
    y, s = page.add_rms_norm(x, -x, 40, None)
    assert not y.any() and not s.any()


def test_offset_in_full_precision():
    """1 + w is not rounded to 16 bits."""
    x, *_ = page.inputs(5, 75, torch.float16)
    w = torch.full((75,), 2.0**-13, dtype=torch.float16, device=page.DEVICE)
    y = page.rms_norm(x, 75, w, offset=1.0)
    exact = F.rms_norm(x.double(), (75,), 1 + w.double(), 1e-6)
    rounded = F.rms_norm(x.double(), (75,), None, 1e-6)
    assert 1 + w[0] == 1
    assert ((y - exact) * rounded).sum() < 0.5 * (
        (rounded - exact) * rounded
    ).sum().abs()


@hypothesis.given(
    any_case(
        Case,
        fused=st.booleans(),
        residual=own_layouts,
        ds=layouts,
        wanted=st.tuples(st.just(True), st.booleans(), st.booleans()),
        eps=st.sampled_from([1e-12, 1e-6, 0.1]),
        offset=st.sampled_from([0.0, 1.0]),
    ),
    st.sampled_from([None, *PAIRS]),
)
def test_any_case(case, name):
    with pytest.MonkeyPatch.context() as patch:
        if name is not None:
            force(patch, page, name)
        run(page, case)


def test_second_derivative_is_refused():
    x = torch.randn(2, 8, device=page.DEVICE, requires_grad=True)
    y = page.rms_norm(x, (8,), None).square().sum()
    (dx,) = torch.autograd.grad(y, x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


def test_leaves_do_not_share_their_gradient():
    """x and residual get one gradient; added to, it must not be both's."""
    x, residual = torch.randn(2, 3, 8, device=page.DEVICE)
    x.requires_grad_(), residual.requires_grad_()
    y, s = page.add_rms_norm(x, residual, 8, None)
    (y.sum() + s.sum()).backward()
    before = residual.grad.clone()
    x.grad.zero_()
    assert torch.equal(residual.grad, before)


def test_a_sum_that_is_changed_is_noticed():
    """s is kept for the backward pass: overwriting it must be an error."""
    x, residual = torch.randn(2, 3, 8, device=page.DEVICE)
    y, s = page.add_rms_norm(x.requires_grad_(), residual, 8, None)
    with torch.no_grad():
        s += 1
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        y.sum().backward()


def _tensor(*shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype, device=page.DEVICE)


@pytest.mark.parametrize(
    ("error", "names", "arguments"),
    [
        (TypeError, "x", (_tensor(2, 8, dtype=torch.int32), 8, None)),
        (TypeError, "weight", (_tensor(2, 8), 8, _tensor(8).int())),
        (ValueError, "x.*normalized_shape", (_tensor(2, 8), 7, None)),
        (ValueError, "normalized_shape", (_tensor(2, 8), (), None)),
        (ValueError, "normalized_shape", (_tensor(8), (2, 8), None)),
        (ValueError, "normalized_shape", (_tensor(2, 0), 0, None)),
        (ValueError, "weight", (_tensor(2, 8), 8, _tensor(7))),
        (ValueError, "eps", (_tensor(2, 8), 8, None, -1e-5)),
        (ValueError, "eps", (_tensor(2, 8), 8, None, float("nan"))),
        (ValueError, "offset", (_tensor(2, 8), 8, None, 0, float("nan"))),
        (ValueError, "x", (_tensor(2, 8).to("meta"), 8, None)),
        (ValueError, "weight", (_tensor(2, 8), 8, _tensor(8).to("meta"))),
    ],
)
def test_mistakes_are_named(error, names, arguments):
    with pytest.raises(error, match=names):
        page.rms_norm(*arguments)
    x, *others = arguments
    residual = torch.empty_like(x)
    with pytest.raises(error, match=names):
        page.add_rms_norm(x, residual, *others)


@pytest.mark.parametrize(
    ("error", "residual"),
    [
        (TypeError, None),
        (TypeError, _tensor(2, 8).int()),
        (TypeError, _tensor(2, 8).half()),
        (ValueError, _tensor(8)),
        (ValueError, _tensor(2, 8).to("meta")),
    ],
)
def test_mistakes_of_the_residual(error, residual):
    with pytest.raises(error, match="residual"):
        page.add_rms_norm(_tensor(2, 8), residual, 8, None)


# Each edit must make a check fail with the plans named.
MUTANTS = {
    "the mean is subtracted": (
        "one row",
        "squares += x.to(acc) * x.to(acc)\n    rstd = tl.rsqrt(tl.sum("
        "squares, 1)[:, None]",
        "squares += x.to(acc) * x.to(acc)\n    rstd = tl.rsqrt(tl.sum("
        "squares - x.to(acc), 1)[:, None]",
    ),
    "the row sum dropped": (
        "one row",
        "            dx -= x * a\n",
        "",
    ),
    "one factor r too few": (
        "one row",
        "offset, acc) / N * rstd * rstd * rstd",
        "offset, acc) / N * rstd * rstd",
    ),
    "ds dropped": (
        "rows",
        'dx += _load(at, row, c, left, N, CHUNK, EVEN, "").to(acc)',
        "dx += 0",
    ),
    "ds dropped in slices": (
        "wide",
        "dx += tl.load(ds_ptr + at, mask=mask, other=0).to(acc)",
        "dx += 0",
    ),
    "offset dropped": ("rows", "        w += offset\n", "        w += 0\n"),
    "the sum is not rounded": (
        "rows",
        "return (x.to(acc) + residual.to(acc)).to(x.dtype)",
        "return x.to(acc) + residual.to(acc)",
    ),
    "the hidden number is not 0": (
        "rows",
        "*given, partial, 0, M, offset, N,",
        "*given, partial, 1, M, offset, N,",
    ),
    "store without mask": (
        "rows",
        "tl.store(at, value, mask=mask)",
        "tl.store(at, value)",
    ),
    "the second sweep reads x": (
        "wide",
        "        x_ptr = s_ptr\n",
        "        pass\n",
    ),
    "partial rows without mask": (
        "rows",
        "mask = (row < P) & (col < N)",
        "mask = col < N",
    ),
    "dy with strides of its own": (
        "rows",
        "dy = dy.contiguous()",
        "dy = dy",
    ),
    "residual with strides of its own": (
        "rows",
        "None if residual is None else residual.contiguous()",
        "residual",
    ),
    "the last row is left out": (
        "rows",
        "tl.program_id(0), tl.cdiv(M, ROWS), tl.num_programs(0),",
        "tl.program_id(0), M // ROWS, tl.num_programs(0),",
    ),
}


def _suite(name, module):
    with pytest.MonkeyPatch.context() as patch:
        force(patch, module, name)
        run(module, Case((19,), (43,), torch.float16, offset=1.0))
        run(module, Case((19,), (43,), torch.float32, fused=False))
        run(module, Case((3,), (37,), residual="columns"))
        run(module, Case((3,), (37,), dy="one number"))
        given = module.inputs(5, 75, torch.float16)
        fused = module.add_results(module.add_rms_norm, *given)
        steps = module.add_results(module.two_steps, *given)
        assert torch.equal(fused[0], steps[0])


@pytest.mark.parametrize("name", PAIRS)
def test_suite_passes(name):
    _suite(name, page)


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_fail(name):
    pair, old, new = MUTANTS[name]
    mutant = load(NAME, [(old, new)])
    with pytest.raises(AssertionError):
        _suite(pair, mutant)


def test_script_runs_alone(output):
    assert output.count("Timing needs a GPU") == 1


def test_pitfalls_and_exercises_show(output):
    assert output.count("wrong:") == output.count("right:") == 5
    assert output.count("all right") == 3  # the three solutions
    assert output.count("wrong rows") == 3  # the three stubs


def test_the_order_of_rounding_is_shown(output):
    lines = [line for line in output.splitlines() if "as PyTorch" in line]
    after, before, theirs = lines
    assert "100%" in before and "100%" not in after and "100%" in theirs
