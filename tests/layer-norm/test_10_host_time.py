"""What the user waits for: in Triton's interpreter, or on a GPU."""

import contextlib
import functools
from types import SimpleNamespace

import hypothesis
import pandas
import pytest
import torch
import torch.nn.functional as F

import layer_norm_cases as cases
from any_case import any_layer_norm, examples
from layer_norm_cases import Case
from tutorial import load

NAME = "layer-norm/10-host-time"
# So few programs that each has several rows.
FEW = ("P = min(M, NUM_SMS * (many if N < 8192 else 1))", "P = min(M, 2)")
page = load(NAME, [FEW])
FORMS = {"plain": page.plain} | {
    name: functools.partial(page.layer_norm, launcher=name)
    for name in page.LAUNCHERS
}


@pytest.fixture(autouse=True)
def no_plans():
    page.PLANS.clear()


def run(case, function=page.layer_norm, module=page):
    cases.run(function, case, module.DEVICE)


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_shapes(dtype):
    for shape in (1, 1), (3, 129), (17, 40), (2, 257):
        run(Case(shape[:1], shape[1:], dtype))


@pytest.mark.parametrize("function", FORMS.values(), ids=FORMS)
def test_every_form(function):
    for _ in range(2):  # the second time there is a plan
        run(Case((17,), (65,), torch.float16), function)
    run(Case((5,), (9,), weight=False), function)


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
    for number in range(32):
        *wanted, weight, bias = (bool(number >> i & 1) for i in range(5))
        run(Case((3,), (9,), weight=weight, bias=bias, wanted=tuple(wanted)))


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


@pytest.mark.parametrize("function", [page.plain, page.layer_norm])
@pytest.mark.parametrize(
    ("error", "names", "arguments"),
    [
        (TypeError, "x", (_tensor(2, 8, dtype=torch.int32), 8)),
        (TypeError, "weight", (_tensor(2, 8), 8, _tensor(8).int())),
        (TypeError, "bias", (_tensor(2, 8), 8, None, _tensor(8).bool())),
        (ValueError, "x.*7", (_tensor(2, 8), 7)),
        (ValueError, "normalized_shape.*0", (_tensor(2, 0), 0)),
        (ValueError, "weight", (_tensor(2, 8), 8, _tensor(7))),
        (ValueError, "bias", (_tensor(2, 8), 8, None, _tensor(2, 4))),
        (ValueError, "weight", (_tensor(2, 8), 8, _tensor(8).to("meta"))),
        (ValueError, "16385.*Every width", (_tensor(1, 16385), 16385)),
    ],
)
def test_mistakes_are_named(function, error, names, arguments):
    for _ in range(2):  # a mistake leaves no plan behind
        with pytest.raises(error, match=names):
            function(*arguments)
    assert not page.PLANS


@pytest.mark.parametrize("function", [page.plain, page.layer_norm])
def test_second_derivative_is_refused(function):
    x = torch.randn(2, 8, device=page.DEVICE, requires_grad=True)
    y = function(x, (8,)).square().sum()
    (dx,) = torch.autograd.grad(y, x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


# What a plan remembers -------------------------------------------------------


def test_arguments_of_one_kind_share_a_plan():
    x, w = torch.randn(4, 8, device=page.DEVICE), _tensor(8)
    page.layer_norm(x, 8, w, w)
    ((kind, plan),) = page.PLANS.items()
    for again in (x + 1, w), (x.T.contiguous().T, w), (x, w.clone()):
        page.layer_norm(again[0], (8,), again[1], w)
    page.layer_norm(x.requires_grad_(), [8], w, w).sum().backward()
    assert list(page.PLANS.items()) == [(kind, plan)]


def test_other_arguments_have_plans_of_their_own():
    x, w = _tensor(4, 8), _tensor(8)
    calls = [
        (x, 8, w, w),
        (x[:3], 8, w, w),
        (x.half(), 8, w, w),
        (x.view(2, 2, 8), 8, w, w),
        (x, (4, 8)),
        (x, 8, None, w),
        (x, 8, w),
        (x, 8, w, w.half()),
        (x, 8, w, w, 1e-3),
    ]
    for number, arguments in enumerate(calls, 1):
        page.layer_norm(*arguments)
        assert len(page.PLANS) == number
    page.layer_norm(*calls[0], launcher="jit")
    assert len(page.PLANS) == len(calls) + 1


def test_another_device_has_a_plan_of_its_own(monkeypatch):
    x = _tensor(4, 8)
    page.layer_norm(x, 8)
    monkeypatch.setattr(page, "current_device", lambda: 7)
    with pytest.raises(ValueError, match="x is on"):
        page.layer_norm(x, 8)


def test_plans_are_few():
    page.PLANS.update(dict.fromkeys(range(4096)))
    page.layer_norm(_tensor(4, 8), 8)
    assert len(page.PLANS) == 1


def test_what_is_allocated_is_dense():
    plan = page.Plan(
        torch.Size([2, 3]), _tensor(5, 2, 3).half(), _tensor(2, 3).half(),
        _tensor(2, 3).double(), 1e-5, page.jit,
    )  # fmt: skip
    for pattern, shape, dtype in (
        (plan.stats, (5, 2), torch.float32),
        (plan.sums, (2, 2, 6), torch.float32),
        (plan.db, (2, 3), torch.float64),
    ):
        made = torch.empty_like(pattern)
        assert (made.shape, made.dtype) == (shape, dtype)
        assert made.is_contiguous() and pattern.untyped_storage().nbytes() <= 8


# What is kept of a launch ----------------------------------------------------


class Kernel:
    """In place of a compiled one: it notes how it is launched."""

    def __init__(self):
        self.launched = []
        self.function, self.packed_metadata = "function", "packed"

    def __getitem__(self, grid):
        def through_jit(*args, num_warps):
            self.launched.append(("jit", grid, num_warps, *args))
            return Compiled(self)

        return through_jit


class Compiled(SimpleNamespace):
    def __init__(self, kernel):
        super().__init__(
            run=lambda *args: kernel.launched.append(("run", *args)),
            function="function",
            packed_metadata="packed",
        )
        self._launched = kernel.launched

    def __getitem__(self, grid):
        return lambda *args: self._launched.append(("grid", grid, *args))


@pytest.fixture
def driver(monkeypatch):
    active = SimpleNamespace(
        get_current_device=lambda: 3,
        get_current_stream=lambda device: f"stream of {device}",
    )
    fake = SimpleNamespace(runtime=SimpleNamespace(driver=SimpleNamespace()))
    fake.runtime.driver.active = active
    monkeypatch.setattr(page, "triton", fake)


AGAIN = {
    "jit": None,
    "kept": ("grid", (7, 1, 1)),
    "bare": (
        *("run", 7, 1, 1, "stream of 3", "function", "packed"),
        *(None, None, None),
    ),
}


@pytest.mark.parametrize("name", page.LAUNCHERS)
def test_launches(name, driver):
    """First, and where an address is no multiple of 16, Triton chooses."""
    kernel = Kernel()
    launch = page.LAUNCHERS[name](kernel, 7, 11, 12, num_warps=4)
    memory = torch.zeros(64, dtype=torch.uint8)
    start = -memory.data_ptr() % 16
    x, later, odd = memory[start:], memory[start + 16 :], memory[start + 8 :]
    plain = ("jit", (7,), 4)
    expected = []
    for tensors in (x, odd), (x, later), (later, x), (odd, x), (x, None):
        launch(*tensors)
        aligned = odd not in [None if t is not odd else t for t in tensors]
        if AGAIN[name] and aligned and len(expected) > 1:
            places = [0 if t is None else t.data_ptr() for t in tensors]
            expected.append((*AGAIN[name], *places, 11, 12))
        else:
            expected.append((*plain, *tensors, 11, 12))
    assert len(kernel.launched) == len(expected)
    for got, want in zip(kernel.launched, expected, strict=True):
        assert len(got) == len(want)
        assert all(a is b or a == b for a, b in zip(got, want, strict=True))


# The clocks ------------------------------------------------------------------


def test_calls_take_turns(monkeypatch):
    now, order = [0.0], []

    def call(name, us):
        order.append(name)
        now[0] += us * 1e-6 * (10 if len(order) in range(17, 29) else 1)

    monkeypatch.setattr(page.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: order.append("|"))
    calls = {
        n: functools.partial(call, n, us) for n, us in (("a", 5), ("b", 9))
    }
    found = page.in_turns(calls, rounds=5, times=4)
    one = [*"|aaaa||bbbb|"]
    assert order == 6 * one  # the first round warms up
    # One round was disturbed, and the medians do not show it.
    assert found["a"][0] == pytest.approx(5)
    assert found["b"][0] == pytest.approx(9)


def test_what_is_timed():
    """The same results as PyTorch, call after call."""
    for f in page.plain, page.layer_norm:
        results = []
        for function in f, F.layer_norm:
            call = page.prepared("", function, 5, 24, torch.float32)
            call()
            results.append(call())
        assert len(results[0]) == 3
        torch.testing.assert_close(*results)


def test_the_parts_of_a_call():
    calls = page.parts(16, 256, torch.float16)
    assert list(calls) == page.PARTS
    ours, _, empty, torchs = (calls[p]() for p in page.PARTS)
    for found in ours, empty, torchs:
        assert found.shape == (16, 256) and found.dtype == torch.float16
    assert empty.grad_fn and torchs.grad_fn


def test_a_benchmark_has_all_lines_in_turns(monkeypatch):
    if not page.ON_GPU:
        monkeypatch.setattr(page, "ON_GPU", True)
        monkeypatch.setattr(page, "current_device", lambda: -1)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    in_turns, asked = page.in_turns, []

    def short(calls):
        asked.append(list(calls))
        return in_turns(calls, rounds=3, times=1)

    monkeypatch.setattr(page, "in_turns", short)
    lines = ["plain", "triton", "empty", "torch"]
    mark = page.benchmark(
        "x", "both", 5, [24], lines,
        lambda *sizes: {
            p: page.prepared(p, page.LADDER[p], *sizes) for p in lines
        },
    )  # fmt: skip
    for p in lines:
        median, low, high = mark.fn(5, 24, torch.float16, "both", p)
        assert 0 < low <= median <= high
    assert asked == [list(lines)]
    assert mark.benchmarks.line_names == [
        "plain",
        "Triton",
        "empty",
        "PyTorch",
    ]


def test_comparison(capsys, monkeypatch):
    table = pandas.DataFrame(
        {"N": [8, 9], "A (µs)": [2.0, 6], "B (µs)": [1.0, 4]}
    )
    drawn = SimpleNamespace(run=lambda **_: table)
    monkeypatch.setattr(page, "benchmark", lambda *_: drawn)
    page.compare("x", "B", {"A": None, "B": None})
    said = capsys.readouterr().out
    assert "divided by that of B" in said
    assert said.splitlines()[2].split() == ["A", "2.0", "1.5"]
    table.iloc[:, 1:] = float("nan")
    page.compare("x", "B", {"A": None, "B": None})
    assert "needs a GPU" in capsys.readouterr().out


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
    "mean in the place of rstd": (
        "rstd = tl.load(stats_ptr + 2 * i + 1)",
        "rstd = tl.load(stats_ptr + 2 * i)",
    ),
    "sums without a place": (
        "sums_ptr += tl.program_id(0) * 2 * N + cols",
        "sums_ptr += cols",
    ),
    "only the last row": (
        "        dw += dy * x_hat",
        "        dw = dy * x_hat",
    ),
    "the last part forgotten": (
        "mask, at = (rows < programs) & (cols < N)",
        "mask, at = (rows < programs - 1) & (cols < N)",
    ),
    "dy with strides of its own": (
        "launch(dy.contiguous(), x",
        "launch(dy, x",
    ),
    "M left out of the kind": (
        "current_device(), x.shape, x",
        "current_device(), x",
    ),
    "weight left out of the kind": (
        "        weight is not None and (weight.shape, weight.dtype, "
        "weight.device),\n",
        "",
    ),
    "bias left out of the kind": (
        "bias is not None and (bias.shape, bias.dtype, bias.device),",
        "",
    ),
    "eps left out of the kind": ("shape, eps, current", "shape, current"),
}


def _suite(module):
    """A few cases that together catch every mutant."""
    run = functools.partial(cases.run, module.layer_norm, device=module.DEVICE)
    for case in (
        Case((3,), (9,), torch.float16, dy="one number"),
        Case((9,), (9,), torch.float16),
        Case((9,), (9,), torch.float16, weight_dtype=torch.float32),
        Case((9,), (9,), torch.float16, weight_dtype=torch.float32, eps=0.1),
        Case((9,), (9,), torch.float16, bias=False),
        Case((9,), (9,), torch.float16, torch.float32, bias=False),
        Case((9,), (9,), torch.float16, weight=False),
        Case((9,), (9,), torch.float16, torch.float32, weight=False),
    ):
        run(case)
    # The interpreter forgives a kernel compiled for other arguments.
    plans = len(module.PLANS)
    for weight in None, _tensor(7), _tensor(7).half():
        module.layer_norm(_tensor(5, 7), 7, weight)
    assert len(module.PLANS) == plans + 3


def test_suite_passes():
    _suite(load(NAME, [FEW]))


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_fail(name):
    mutant = load(NAME, [FEW, MUTANTS[name]])
    with pytest.raises(
        (AssertionError, RuntimeError, AttributeError, TypeError)
    ):
        _suite(mutant)


def test_script_runs_alone(output):
    if not page.ON_GPU:
        assert output.count("Timing needs a GPU") == 2
    assert output.count("errors below") == 4


def test_exercise(output):
    assert output.count("wrong: nothing\n") == 1  # the solution
    stub = (
        "wrong: x in 16 bits, no bias, bias in 16 bits, transposed, another "
        "eps\n"
    )
    assert output.count(stub) == 1
    for missing, part in (
        ("another eps", lambda *args: page.kind_1(*args[:3], 0)),
        ("no weight", lambda x, _, *args: page.kind_1(x, x[0], *args)),
    ):
        with contextlib.redirect_stdout(None):
            assert not page.exercise_1(part), missing
