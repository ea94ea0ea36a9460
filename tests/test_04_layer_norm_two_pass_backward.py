"""Page 04 in Triton's interpreter (or on a GPU, where there is one)."""

import hypothesis
import pytest
import torch
import torch.nn.functional as F

import layer_norm_cases as cases
from any_case import any_layer_norm, shapes
from layer_norm_cases import Case
from tutorial import load

NAME = "04-layer-norm-two-pass-backward"
page = load(NAME)
# So small that a small matrix has several bands, splits, tiles and chunks.
SMALL = {
    "ROWS": 2,
    "CHUNK": 32,
    "HOW": "registers",
    "RUN": 2,
    "TALL": 2,
    "COLS": 16,
    "STAGES": 2,
    "num_warps": 4,
    "band": 8,
    "split": 4,
}
PLANS = {
    "registers": SMALL,
    "one tile": SMALL | {"RUN": 1},
    "reversed": SMALL | {"HOW": "reversed", "ROWS": 1, "RUN": 1},
    "forward": SMALL | {"HOW": "forward", "ROWS": 1, "band": 16, "split": 2},
    "one band": SMALL | {"band": 64, "split": 64, "CHUNK": 128},
}


def run(case, module=page):
    cases.run(module.layer_norm, case, module.DEVICE)


@pytest.fixture(params=PLANS)
def plan(request, monkeypatch):
    """Backward by this plan; forward in sweeps if the plan sweeps."""
    options = PLANS[request.param]
    monkeypatch.setattr(page, "plan_backward", lambda *_: dict(options))
    sweeps = {"CHUNK": 32, "num_warps": 4}
    if options["HOW"] == "registers":
        sweeps |= {"ROWS": 2}
    monkeypatch.setattr(page, "plan_forward", lambda *_: sweeps)
    return options


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("N", [1, 50])
def test_every_plan(plan, N, dtype):
    run(Case((11,), (N,), dtype))


@pytest.mark.parametrize("M", [1, 8, 9])
def test_every_plan_and_number_of_rows(plan, M):
    run(Case((M,), (40,), torch.float16))


def test_only_some_gradients_of_every_plan(plan):
    for number in 1, 6, 12, 19, 28, 31:
        *wanted, weight, bias = (bool(number >> i & 1) for i in range(5))
        case = Case((9,), (20,), weight=weight, bias=bias, wanted=wanted)
        run(case)


def test_bits_do_not_depend_on_bands(plan):
    x, w, b, dy = page.example(21, 50, torch.float16)
    _, mean, rstd = page.forward(x, w, b, 1e-5)
    results = []
    for band in plan["band"], plan["band"], 2 * plan["band"]:
        found = [torch.empty_like(t) for t in (x, w, w)]
        options = dict(plan, band=band)
        page.backward(dy, x, w, mean, rstd, *found, options)
        results.append(found)
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


@pytest.mark.parametrize("shape", cases.LONG_SHAPES, ids=str)
def test_shapes(shape):
    M, N = shape
    for dtype in cases.types(M, N):
        run(Case((M,), (N,), dtype))


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


@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 1, 3), (0,), (2, 0)])
@pytest.mark.parametrize("shape", [(1,), (9,), (3, 5)])
def test_dimensions(lead, shape):
    run(Case(lead, shape))


@pytest.mark.parametrize("N", [1024, 1025, 8193, 32769])
def test_each_kind_of_plan(N):
    run(Case((1,), (N,), torch.float16))


@hypothesis.given(
    any_layer_norm(shape=shapes(9, 2)),
)
def test_any_case(case):
    run(case)


def relative(got, expected):
    return page.error(got, expected.reshape(got.shape))


def check_backward(found, x, w, dy, limit=1e-6):
    wide = torch.ones_like(x[0]) if w is None else w
    expected = page.exact(x.reshape(-1, wide.numel()), wide.flatten(),
                          dy.reshape(-1, wide.numel()))  # fmt: skip
    for got, value in zip(found, expected, strict=True):
        assert relative(got, value) <= limit


@pytest.mark.parametrize("saved", ["ours", "torch", "none"])
@pytest.mark.parametrize("weight", [True, False])
def test_layer_norm_backward(plan, saved, weight):
    x, w, b, dy = page.example(13, 45, torch.float32)
    w = w if weight else None
    statistics = {
        "ours": page.forward(x, w, b, 1e-5)[1:],
        "torch": torch.native_layer_norm(x, (45,), w, b, 1e-5)[1:],
        "none": (None, None),
    }[saved]
    found = page.layer_norm_backward(dy, x, w, *statistics)
    assert [t.shape for t in found] == [x.shape, (45,), (45,)]
    check_backward(found, x, w, dy)


def test_layer_norm_backward_of_any_layout():
    x, w, _, dy = page.example(6, 40, torch.float64)
    x = x.reshape(2, 3, 5, 8).transpose(0, 1)
    dy = dy.reshape(8, 5, 2, 3).permute(3, 2, 1, 0)
    w = w.reshape(8, 5).T
    statistics = torch.native_layer_norm(x, (5, 8), w, None, 1e-5)[1:]
    for mean, rstd in statistics, (None, None):
        found = page.layer_norm_backward(dy, x, w, mean, rstd)
        assert [t.shape for t in found] == [x.shape, (5, 8), (5, 8)]
        flat = x.reshape(6, 40), w.reshape(40), dy.reshape(6, 40)
        check_backward(found, *flat, limit=1e-13)


def test_layer_norm_backward_of_no_rows():
    x, w = torch.empty(0, 9), torch.ones(9)
    for none in (None, None), (torch.empty(0), torch.empty(0)):
        x, w = x.to(page.DEVICE), w.to(page.DEVICE)
        none = [t if t is None else t.to(page.DEVICE) for t in none]
        dx, dw, db = page.layer_norm_backward(x, x, w, *none)
        assert dx.shape == (0, 9)
        assert not dw.any() and not db.any()


def test_recomputed_with_eps():
    x, w, _, dy = page.example(5, 33, torch.float64)
    x *= 1e-3  # so that eps counts
    leaves = [t.clone().requires_grad_() for t in (x, w)]
    y = F.layer_norm(leaves[0], (33,), leaves[1], None, 1e-2)
    expected = torch.autograd.grad(y, leaves, dy)
    found = page.layer_norm_backward(dy, x, w, None, None, 1e-2)
    for got, value in zip(found, expected, strict=False):
        assert relative(got, value) <= 1e-12


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("name", page.STEPS)
def test_every_step(name, dtype):
    half = {torch.float16: 2**-11, torch.bfloat16: 2**-7, torch.float32: 1e-6}
    for M, N in (1, 5), (9, 130), (33, 40):
        x, w, b, dy = page.example(M, N, dtype)
        _, mean, rstd = page.forward(x, w, b, 1e-5)
        with cases.guarded_allocations():
            found = page.step(dy, x, w, mean, rstd, name)
        for got, value in zip(found, page.exact(x, w, dy), strict=True):
            assert relative(got, value) <= half.get(dtype, 1e-13), (M, N)


def test_plan():
    """What the kernel takes for granted."""
    for M in (0, 1, 2, 5, 33, 4096, 4097, 2**21):
        for N in (1, 3, 16, 100, 512, 1024, 4097, 16385, 2**17, 2**20):
            for itemsize in 2, 4, 8:
                plan = page.plan_backward(M, N, itemsize)
                band, split = plan["band"], plan["split"]
                assert band % split == 0
                assert band % (plan["ROWS"] * plan["RUN"]) == 0
                for name in "ROWS", "CHUNK", "TALL", "COLS":
                    assert plan[name] & (plan[name] - 1) == 0 < plan[name]


def _tensor(*shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype, device=page.DEVICE)


@pytest.mark.parametrize(
    ("error", "names", "arguments"),
    [
        (TypeError, "x", (_tensor(2, 8, dtype=torch.int32), 8, None, None)),
        (TypeError, "weight", (_tensor(2, 8), 8, _tensor(8).int(), None)),
        (ValueError, "x.*normalized_shape", (_tensor(2, 8), 7, None, None)),
        (ValueError, "normalized_shape", (_tensor(2, 0), 0, None, None)),
        (ValueError, "bias", (_tensor(2, 8), 8, None, _tensor(2, 4))),
        (ValueError, "eps", (_tensor(2, 8), 8, None, None, -1e-5)),
        (ValueError, "x", (_tensor(2, 8).to("meta"), 8, None, None)),
    ],
)
def test_mistakes_are_named(error, names, arguments):
    with pytest.raises(error, match=names):
        page.layer_norm(*arguments)


@pytest.mark.parametrize(
    ("names", "arguments"),
    [
        ("dy", (_tensor(2, 7), _tensor(2, 8), None, None, None)),
        ("x", (_tensor(2, 8), _tensor(2, 8), _tensor(7), None, None)),
        ("rstd", (_tensor(2, 8), _tensor(2, 8), None, _tensor(2), None)),
        ("mean", (_tensor(2, 8), _tensor(2, 8), None, None, _tensor(2))),
        ("mean", (_tensor(2, 8),) * 2 + (None, _tensor(3), _tensor(2))),
    ],
)
def test_mistakes_of_layer_norm_backward_are_named(names, arguments):
    with pytest.raises(ValueError, match=names):
        page.layer_norm_backward(*arguments)


def test_second_derivative_is_refused():
    x = torch.randn(2, 8, device=page.DEVICE, requires_grad=True)
    y = page.layer_norm(x, (8,), None, None).square().sum()
    (dx,) = torch.autograd.grad(y, x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


# Each edit must make a check fail.
MUTANTS = {
    "c2 dropped": (
        "dx = (g - ((xs[c].to(acc) - mean) * k1 + c2)) * rstd",
        "dx = (g - ((xs[c].to(acc) - mean) * k1)) * rstd",
    ),
    "c1 dropped": (
        "dx = (g - ((xs[c].to(acc) - mean) * k1 + c2)) * rstd",
        "dx = (g - c2) * rstd",
    ),
    "c2 dropped in sweeps": (
        "dx = (g - ((x - mean) * k1 + c2)) * rstd",
        "dx = (g - (x - mean) * k1) * rstd",
    ),
    "first chunk twice": (
        'c = CHUNKS - 1 - i if HOW == "reversed" else i',
        "c = i * 0",
    ),
    "masked lanes in the variance": (
        "if (c + 1) * CHUNK > N:  # idle lanes: 0 again",
        "if (c + 1) * CHUNK > N + CHUNK:",
    ),
    "rows of another split": (
        "left = tl.minimum(M - split * SPLIT, SPLIT)",
        "left = M - split * SPLIT",
    ),
    "splits only of the first band": (
        "split = band * (ONE // BLOCKS) + i // BLOCKS",
        "split = i // BLOCKS",
    ),
    "sums for splits beyond the matrix": (
        "if split < tl.cdiv(M, SPLIT):",
        "if split <= tl.cdiv(M, SPLIT):",
    ),
    "tiles only of the first band": (
        "first = (band * TWO + i - ONE) * RUN",
        "first = (i - ONE) * RUN",
    ),
    "one tile for a program": (
        "last = tl.minimum(first + RUN, tl.cdiv(M, ROWS))",
        "last = tl.minimum(first + 1, tl.cdiv(M, ROWS))",
    ),
    "sums stored beyond the row": (
        "tl.store(at + N, tl.sum(db, 0, keep_dims=True), mask=col < N)",
        "tl.store(at + N, tl.sum(db, 0, keep_dims=True))",
    ),
    "statistics in float32 only": (
        "mean = torch.empty(M, dtype=acc, device=x.device)",
        "mean = torch.empty(M, dtype=torch.float32, device=x.device)",
    ),
    "dy with strides of its own": (
        "rows = dy.reshape(x.shape).contiguous()",
        "rows = dy.reshape(x.shape)",
    ),
}


def _suite(module, patch):
    """A few cases that together catch every mutant."""
    rule = module.plan_forward
    for name in PLANS:
        patch.setattr(
            module, "plan_backward", lambda *_, name=name: dict(PLANS[name])
        )
        sweeps = name in ("reversed", "forward")
        patch.setattr(
            module,
            "plan_forward",
            (lambda *_: {"CHUNK": 32, "num_warps": 4}) if sweeps else rule,
        )
        run(Case((19,), (50,), torch.float32), module)
    run(Case((3,), (9,), torch.float64, dy="one number"), module)


def test_suite_passes(monkeypatch):
    _suite(load(NAME), monkeypatch)


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_fail(name, monkeypatch):
    mutant = load(NAME, [MUTANTS[name]])
    with pytest.raises(AssertionError):
        _suite(mutant, monkeypatch)


def test_forms():
    """The form of the kernels keeps its digits, CK's loses some."""
    for ratio in 1000, 10000:
        ours = page.digits(32, 256, ratio, "triton")
        assert 2 * ours < page.digits(32, 256, ratio, "ck")
    assert page.digits(32, 256, 0, "ck") < 1e-6


def test_script_runs_alone(output):
    assert output.count("Timing needs a GPU") == 1
    assert "relative error: 11." in output  # the formula of the README


def test_pitfalls_and_exercises_show(output):
    assert output.count("wrong:") == output.count("right:") >= 2
    assert output.count("all right") == 3  # the three solutions
    assert output.count("wrong rows: [0, 1, 2") == 1
    assert output.count("wrong columns: [0") == 2
