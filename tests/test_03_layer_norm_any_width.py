"""Page 03 in Triton's interpreter (or on a GPU, where there is one)."""

import itertools

import hypothesis
import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st

import layer_norm_cases as cases
from any_case import any_layer_norm
from layer_norm_cases import Case
from tutorial import load

NAME = "03-layer-norm-any-width"
page = load(NAME)
MORE = {"num_warps": 4, "per_sm": 4}
FORWARD = {
    "rows": {"ROWS": 2, "CHUNK": 32, "HINT": "", "num_warps": 4},
    "one row": {"ROWS": 1, "CHUNK": 32, "HINT": "", "num_warps": 4},
    "sweeps": {"CHUNK": 32, "num_warps": 4},
    "slices": {"ROWS": 2, "CHUNK": 32} | MORE,
    "shifted": {"ROWS": 2, "CHUNK": 32, "STAGES": 2} | MORE,
}
BACKWARD = {
    "rows": {"ROWS": 2, "CHUNK": 32, "STAGES": 2} | MORE,
    "one row": {"ROWS": 1, "CHUNK": 32, "STAGES": 3} | MORE,
    "slices": {"ROWS": 2, "CHUNK": 32} | MORE,
    "shared": {"ROWS": 2, "CHUNK": 32} | MORE,
}
# Every kernel occurs, with the backward kernels that may follow it.
PAIRS = (
    ("rows", "rows"),
    ("one row", "one row"),
    ("sweeps", "slices"),
    ("slices", "shared"),
    ("shifted", "one row"),
)


def run(case, module=page):
    cases.run(module.layer_norm, case, module.DEVICE)


def force(patch, module, pair):
    """Let the rule always answer with these two plans."""
    first, second = pair

    def plan(name, options):
        return "rows" if name == "one row" else name, dict(options)

    patch.setattr(
        module, "plan_forward", lambda *_: plan(first, FORWARD[first])
    )
    patch.setattr(
        module, "plan_backward", lambda *_: plan(second, BACKWARD[second])
    )


@pytest.fixture(params=PAIRS, ids=" and ".join)
def pair(request, monkeypatch):
    force(monkeypatch, page, request.param)
    return request.param


# Slices need rows of at least one chunk. Words hold float32.
def possible(pair, N, dtype):
    if pair[1] in ("slices", "shared") and N < 32:
        return False
    return not (dtype == torch.float64 and pair[1] == "shared")


def every_possible(widths, dtypes):
    """Parametrize a test with pairs, widths and dtypes that go together."""
    return pytest.mark.parametrize(
        ("pair", "N", "dtype"),
        [
            given
            for given in itertools.product(PAIRS, widths, dtypes)
            if possible(*given)
        ],
        indirect=["pair"],
    )


@every_possible([33, 64], cases.DTYPES)
def test_every_kernel_and_dtype(pair, N, dtype):
    run(Case((3,), (N,), dtype))


# Multiples of 8 and of the chunk, and neither.
@every_possible([1, 31, 32, 72, 130], [torch.float16])
def test_every_kernel_and_width(pair, N, dtype):
    run(Case((3,), (N,), dtype))


@pytest.mark.parametrize("M", [1, 9])
@pytest.mark.parametrize("N", [40, 37])
def test_every_kernel_and_number_of_rows(pair, M, N):
    run(Case((M,), (N,), torch.float16))


def test_rows_that_start_anywhere_keep_their_neighbors_out(pair):
    """A row of NaN makes no other row NaN, whatever shares its 16 bytes."""
    x, w, b, dy = (t.detach() for t in page.inputs(11, 37, torch.float16))
    x[4], dy[7] = float("nan"), float("inf")
    y, mean, rstd = page.forward(x, w, b, 1e-5)
    dx = torch.empty_like(x)
    page.backward(dy, x, w, mean, rstd, dx, None, None)
    others = [i for i in range(11) if i not in (4, 7)]
    assert y[others].isfinite().all() and y[7].isfinite().all()
    assert dx[others].isfinite().all()
    assert y[4].isnan().all() and not dx[7].isfinite().any()


@pytest.mark.parametrize("sms", [1, cases.long(2), 7])
def test_number_of_multiprocessors(pair, sms, monkeypatch):
    # More tiles than programs, and fewer.
    monkeypatch.setattr(page, "NUM_SMS", sms)
    for N in (40, 37) if sms == 2 else (40,):
        run(Case((7,), (N,), torch.float32))
    run(Case((2,), (40,), torch.float32))


@pytest.mark.parametrize("weight", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_only_some_gradients(pair, weight, bias):
    for number in (1, 2, 4, 6, 7) if weight and bias else (1, 7):
        wanted = tuple(bool(number >> i & 1) for i in range(3))
        run(Case((3,), (40,), weight=weight, bias=bias, wanted=wanted))


def test_same_bits_twice(pair):
    case = Case((5,), (43,), torch.float16)
    tensors = case.tensors(page.DEVICE)
    once, twice = (
        cases.gradients(page.layer_norm, case, *tensors) for _ in range(2)
    )
    assert all(map(torch.equal, once, twice))


@pytest.mark.parametrize("shape", cases.LONG_SHAPES, ids=str)
def test_shapes(shape):
    M, N = shape
    for dtype in cases.types(M, N):
        run(Case((M,), (N,), dtype))


@pytest.mark.parametrize("dtype", cases.LONG_DTYPES)
@pytest.mark.parametrize("layout", cases.LAYOUTS)
@pytest.mark.parametrize("which", ["x", "dy", "parameters"])
def test_layouts(which, layout, dtype):
    for lead, shape in ((5,), (40,)), ((2, 3), (4, 7)):
        run(Case(lead, shape, dtype, **{which: layout}))


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("weight_dtype", cases.DTYPES)
def test_mixed_dtypes(dtype, weight_dtype):
    if not page.ON_GPU and cases.wrong_in_interpreter(dtype, weight_dtype):
        pytest.skip("the interpreter stores float64 as bfloat16 wrongly")
    run(Case((7,), (65,), dtype, weight_dtype))


@pytest.mark.parametrize("pair", [PAIRS[3]], ids=" and ".join, indirect=True)
def test_mixed_dtypes_of_shared_rows(pair):
    run(Case((4,), (65,), torch.float16, torch.float32))
    run(Case((4,), (65,), torch.float32, torch.float16))


@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 1, 3), (0,), (2, 0)])
@pytest.mark.parametrize("shape", [(1,), (9,), (3, 5)])
def test_dimensions(lead, shape):
    run(Case(lead, shape))


LIMITS = (512, 1024, 1536, 2560, 3072, 4096, 5120, 10240)


@pytest.mark.parametrize(
    "limit", [N if N in (512, 1024, 5120) else cases.long(N) for N in LIMITS]
)
def test_both_sides_of_each_limit(limit):
    # The last kernel has a program for 16 columns: too many to interpret.
    wanted = (True, limit <= 1024, limit <= 1024)
    for N in limit, limit + 1:
        run(Case((2,), (N,), torch.float16, wanted=wanted))


@pytest.mark.parametrize("N", [14337, 24577, cases.long(49153)])
def test_wide_rows(N):
    # The last kernel has a program for 16 columns: too many to interpret.
    run(Case((1,), (N,), torch.float16, wanted=(True, False, False)))


def test_the_rule_answers_for_every_width():
    """And what it answers fits the kernels it names."""
    for itemsize in (2, 4, 8):
        for N in {
            *range(1, 3000, 7),
            *(2**i + d for i in range(21) for d in (-1, 0, 1) if 2**i + d),
        }:
            steps = [1] if N * itemsize % 16 == 0 else [1, 16 // itemsize]
            for share, step in itertools.product((True, False), steps):
                kind, options = page.plan_forward(N, itemsize, share, step)
                chunk = options["CHUNK"]
                assert chunk & (chunk - 1) == 0
                assert kind != "slices" or (share and chunk <= N)
                kind, options = page.plan_backward(N, itemsize, share, step)
                chunk = options["CHUNK"]
                assert chunk & (chunk - 1) == 0
                assert kind == "rows" or chunk <= N
                assert kind != "shared" or share


def test_constant_rows_and_large_mean(pair):
    x = torch.full((3, 100), 7.0, device=page.DEVICE)
    y = page.layer_norm(x, (100,), None, None)
    assert y.abs().max() < 1e-4
    x = 10000 + torch.randn(3, 100, device=page.DEVICE)
    y = page.layer_norm(x, (100,), None, None)
    expected = F.layer_norm(x.double(), (100,))
    torch.testing.assert_close(y.double(), expected, atol=5e-3, rtol=0)


def test_variance_of_rows_with_a_large_mean():
    for ratio in 1, 100, 10000:
        for provider in "triton", "sweeps":
            assert page.variance_error(3, 1024, ratio, provider) <= 1e-5
    assert page.variance_error(3, 1024, 10000, "sums of squares") > 0.1


@hypothesis.given(
    any_layer_norm(),
    st.sampled_from([None, *PAIRS]),
)
def test_any_case(case, pair):
    N = torch.Size(case.shape).numel()
    hypothesis.assume(pair is None or possible(pair, N, case.dtype))
    with pytest.MonkeyPatch.context() as patch:
        if pair is not None:
            force(patch, page, pair)
        run(case)


def test_second_derivative_is_refused():
    x = torch.randn(2, 8, device=page.DEVICE, requires_grad=True)
    y = page.layer_norm(x, (8,), None, None).square().sum()
    (dx,) = torch.autograd.grad(y, x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


def _tensor(*shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype, device=page.DEVICE)


@pytest.mark.parametrize(
    ("error", "names", "arguments"),
    [
        (TypeError, "x", (_tensor(2, 8, dtype=torch.int32), 8, None, None)),
        (TypeError, "weight", (_tensor(2, 8), 8, _tensor(8).int(), None)),
        (TypeError, "bias", (_tensor(2, 8), 8, None, _tensor(8).bool())),
        (ValueError, "x.*normalized_shape", (_tensor(2, 8), 7, None, None)),
        (ValueError, "normalized_shape", (_tensor(2, 8), (), None, None)),
        (ValueError, "normalized_shape", (_tensor(8), (2, 8), None, None)),
        (ValueError, "normalized_shape", (_tensor(2, 0), 0, None, None)),
        (ValueError, "weight", (_tensor(2, 8), 8, _tensor(7), None)),
        (ValueError, "bias", (_tensor(2, 8), 8, None, _tensor(2, 4))),
        (ValueError, "eps", (_tensor(2, 8), 8, None, None, -1e-5)),
        (ValueError, "eps", (_tensor(2, 8), 8, None, None, float("nan"))),
        (ValueError, "x", (_tensor(2, 8).to("meta"), 8, None, None)),
        (
            ValueError,
            "weight",
            (_tensor(2, 8), 8, _tensor(8).to("meta"), None),
        ),
        (ValueError, "bias", (_tensor(2, 8), 8, None, _tensor(8).to("meta"))),
    ],
)
def test_mistakes_are_named(error, names, arguments):
    with pytest.raises(error, match=names):
        page.layer_norm(*arguments)


# Each edit must make a check fail with the plans named.
MUTANTS = {
    "idle lanes in the variance": (
        PAIRS[0],
        "        if (c + 1) * CHUNK > N or (STEP > 1 and c == 0):\n"
        "            _,",
        "        if False:\n            _,",
    ),
    "idle lanes in Welford's sums": (
        PAIRS[2],
        "        if N % CHUNK != 0:\n            d = tl.where(mask, d, 0)\n"
        "        share = 1",
        "        share = 1",
    ),
    "sets merged without their distance": (
        PAIRS[2],
        "m2_a + m2_b + d * d * n_a * share",
        "m2_a + m2_b",
    ),
    "slices merged without their distance": (
        PAIRS[3],
        "m2s + n * d * d",
        "m2s",
    ),
    "a column counted twice, forward": (
        PAIRS[3],
        "    d = x.to(tl.float32)\n    if N % CHUNK != 0:",
        "    d = x.to(tl.float32)\n    if False:",
    ),
    "a column counted twice, backward": (
        PAIRS[3],
        "w_once = tl.where(counts, w, 0) if STEP == 1 else w",
        "w_once = w",
    ),
    "a column counted twice, backward, not aligned": (
        PAIRS[3],
        "one, two = tl.where(counts, one, 0), tl.where(counts, two, 0)",
        "one, two = one, two",
    ),
    "columns of other rows in the sums": (
        PAIRS[0],
        "return tl.where(inside, value, 0)",
        "return value",
    ),
    "groups written as a whole": (
        PAIRS[4],
        "whole = (group >= shift) & (group + STEP <= N + shift)",
        "whole = (group + STEP > shift) & (group < N + shift)",
    ),
    "edges not written": (
        PAIRS[4],
        "edge = inside & (whole == 0)",
        "edge = inside & (lane < 0)",
    ),
    "rows of a tile next to each other": (
        PAIRS[4],
        "row = tile // STEP * (STEP * ROWS) + tile % STEP",
        "row = tile * ROWS",
    ),
    "weights not shifted": (
        PAIRS[4],
        "tl.load(ptr + lane - shift + row * 0, mask",
        "tl.load(ptr + lane + row * 0, mask",
    ),
    "sum2 dropped": (PAIRS[1], "w.to(acc) - (d * a + b)", "w.to(acc) - d * a"),
    "sum1 dropped": (PAIRS[1], "w.to(acc) - (d * a + b)", "w.to(acc) - b"),
    "the last tile is not finished": (
        PAIRS[3],
        "group + (tiles - 1 - group) // groups * groups, M,\n",
        "group, M,\n",
    ),
    "store without mask": (
        PAIRS[0],
        "tl.store(at, value, mask=mask)",
        "tl.store(at, value)",
    ),
    "partial rows without mask": (
        PAIRS[0],
        "mask = (row < P) & (col < N)",
        "mask = col < N",
    ),
    "dy with strides of its own": (
        PAIRS[0],
        "dy.reshape(x.shape).contiguous()",
        "dy.reshape(x.shape)",
    ),
    "x with strides of its own": (
        PAIRS[0],
        "rows = x.reshape(-1, N).contiguous()",
        "rows = x.reshape(-1, N)",
    ),
}


def _suite(pair, module):
    with pytest.MonkeyPatch.context() as patch:
        force(patch, module, pair)
        rows = 19
        if pair[1] in ("slices", "shared"):  # slow here, with few programs
            patch.setattr(module, "NUM_SMS", 1)
            rows = 11
        run(Case((rows,), (43,), torch.float32), module)
        run(Case((7,), (44,), torch.float32), module)
        run(Case((3,), (43,), torch.float32, weight=False), module)
        run(Case((3,), (37,), x="columns"), module)
        run(Case((3,), (37,), dy="one number"), module)


@pytest.mark.parametrize("pair", PAIRS, ids=" and ".join)
def test_suite_passes(pair):
    _suite(pair, page)


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_fail(name):
    pair, old, new = MUTANTS[name]
    mutant = load(NAME, [(old, new)])
    with pytest.raises(AssertionError):
        _suite(pair, mutant)


def test_script_runs_alone(output):
    assert output.count("Timing needs a GPU") == 1


def test_pitfalls_and_exercises_show(output):
    assert output.count("wrong:") == output.count("right:") == 4
    assert output.count("all right") == 3  # the three solutions
    assert output.count("wrong rows") == 3  # the three stubs


def test_machine_code_is_shown(output):
    told = [line for line in output.splitlines() if "registers," in line]
    assert len(told) == 8
    assert all(" 0 bytes spilled" in line for line in told[:4] + told[5:])
    assert " 0 bytes spilled" not in told[4]  # one block
    # From column 0, x is loaded by single columns.
    assert "loads of 2 bytes: 56," in told[2] and "2 bytes" in told[6]
    # Aligned lanes: asynchronous copies of 8 bytes.
    assert " 8 bytes:" in told[3] and " 8 bytes:" in told[7]
