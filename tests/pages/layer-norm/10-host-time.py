"""What must hold of the page "Host time: what the user waits for"."""

import contextlib
import functools
import threading
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from compiled.declared import Kernel, Kernels
from conformance import LAYOUTS, LayerNorm, LayerNormCase, Page, too_wide, warm
from conformance.layer_norm import full_size


def run(page, M, N, dtype):
    x, w, b, dy = page.inputs(M, N, dtype)
    plan = page.Plan(torch.Size([N]), x, w, b, 1e-5, page.jit)
    torch.autograd.grad(page.LayerNorm.apply(x, w, b, plan), (x, w, b), dy)


PUBLISHED = "2026-11-22"

KERNELS = Kernels(
    run=run,
    M=4096,
    N=[4096],
    dtype="float16",
    sizes={
        "float16": [1024, 2048, 4096, 4608, 8192, 15872],
        "bfloat16": [4096],
        "float32": [1024, 4096],
    },
    kernels={
        "_layer_norm_fwd": Kernel(
            look="That of page 01: one read of the row, by 16 bytes.",
            true=lambda code: [
                code.loaded == 3 * 2 * 4096,
                code.narrow("load") == 0,
            ],
            narrow_stores=2,  # mean and rstd
        ),
        "_layer_norm_bwd": Kernel(
            look="""
            That of page 01: the two sums stay in registers over all rows of a
            program.
            """,
            true=lambda code: [code.count("load", 16) > 0, code.spills == 0],
            narrow_loads=2,  # mean and rstd
            spills={15872: 112},
        ),
        "_layer_norm_bwd_add_up": Kernel(
            look="""
            A program reads 64 rows of sums of 16 columns, of ``dw`` and of
            ``db``, by 16 bytes, and stores 16 numbers of each.
            """,
            true=lambda code: [
                code.loaded == 2 * 64 * 16 * 4,
                code.narrow("load") == 0,
            ],
            narrow_stores=2,  # of 16 columns each
        ),
    },
)


HALF, SINGLE, DOUBLE = torch.float16, torch.float32, torch.float64
at = LayerNorm.at
LAUNCHERS = "jit", "kept", "bare"


def by(launcher, warmed=False):
    def function(page):
        found = functools.partial(page.layer_norm, launcher=launcher)
        return warm(found) if warmed else found

    return function


FUNCTIONS = {
    "bare": by("bare"),
    "kept": by("kept"),
    "jit": by("jit"),
    "plain": lambda page: page.plain,
    # With the plan and, on a GPU, the compiled kernels of another call.
    "bare again": by("bare", warmed=True),
    "kept again": by("kept", warmed=True),
}


def kinds_are_told_apart(load):
    """The interpreter forgives a kernel compiled for other arguments."""
    page = load()
    page.PLANS.clear()
    x = torch.ones(5, 7, device=page.DEVICE)
    for weight in None, x[0], x[0].half():
        page.layer_norm(x, 7, weight)
    assert len(page.PLANS) == 3


PAGE = Page(
    __file__,
    LayerNorm(meta=False),
    FUNCTIONS,
    # So few programs that each has several rows.
    quick=(
        ("P = min(M, NUM_SMS * (many if N < 8192 else 1))", "P = min(M, 2)"),
    ),
    cases=(
        at(2, 257),
        at(3, 2049, HALF),
        *(at(17, 65, HALF, function=name) for name in FUNCTIONS),
    ),
    full=full_size(FUNCTIONS),
    mistakes=(too_wide(16385, "16385.*Every width"),),
    repeatable=tuple(FUNCTIONS),
    repeated=tuple(at(4096, N) for N in (1024, 4608, 8192, 15872)),
    graphs=(at(1151, 1000, HALF),),
    trains=("bare",),
    huge=(8192,),
    huge_functions=("bare",),
    sanitizers=("memcheck", "racecheck", "synccheck"),
    sanitized=tuple(
        at(700, 201, HALF, function=name)
        for name in ("jit", "kept again", "bare again")
    ),
    elsewhere="is on cuda:1: not the current one",
    prints={
        "Timing needs a GPU": 2,
        "errors below": 4,
        "wrong: nothing\n": 1,
        (
            "wrong: x in 16 bits, no bias, bias in 16 bits, transposed, "
            "another eps\n"
        ): 1,  # the stub
    },
    mutants={
        "c1 dropped": ("(wdy - x_hat * c1 - c2) * rstd", "(wdy - c2) * rstd"),
        "c2 dropped": ("(wdy - x_hat * c1 - c2)", "(wdy - x_hat * c1)"),
        "masked lanes in the variance": (
            "x = tl.where(cols < N, x - mean, 0)",
            "x = x - mean",
        ),
        "mean in the place of rstd": ("2 * i + 1", "2 * i"),
        "sums without a place": ("tl.program_id(0) * 2 * N + cols", "cols"),
        "only the last row": ("dw += dy * x_hat", "dw = dy * x_hat"),
        "the last part forgotten": ("rows < programs", "rows < programs - 1"),
        "dy with strides of its own": ("dy.contiguous(), x", "dy, x"),
        "M left out of the kind": ("(), x.shape, x", "(), x"),
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
    },
    kills=(
        at(3, 9, HALF, dy="one number"),
        at(9, 9, HALF),
        at(9, 9, HALF, weight_dtype=SINGLE),
        at(9, 9, HALF, weight_dtype=SINGLE, eps=0.1),
        at(9, 9, HALF, weight=False),
        at(9, 9, HALF, weight_dtype=SINGLE, weight=False),
        kinds_are_told_apart,
    ),
)


@pytest.fixture(autouse=True)
def no_plans(page):
    page.PLANS.clear()


@pytest.fixture
def ones(page):
    """ones(*shape, dtype=torch.float32)"""
    return functools.partial(torch.ones, device=page.DEVICE)


def step(function, x, w, b, dy):
    y = function(x, w.shape, w, b)
    found = torch.autograd.grad(y, (x, w, b), dy)
    return torch.cat([t.flatten() for t in (y, *found)])


def test_the_same_bits_in_every_form(page):
    for N in (1024, 4608, 8192, 15872) if page.ON_GPU else (24, 65):
        given = page.inputs(4096 if page.ON_GPU else 9, N, SINGLE)
        first = step(page.plain, *given)
        for name, function in FUNCTIONS.items():
            found = step(function(page), *given)
            assert torch.equal(found, first), name


# What a plan remembers -------------------------------------------------------


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_layouts_share_a_plan(page, launcher):
    """Aligned, unaligned and copied tensors, all of one kind, in turns.

    Few columns: kernels of other alignments are compiled quickly.
    """
    function = by(launcher)(page)
    lead = (20, 30) if page.ON_GPU else (1, 2)
    for _ in range(2):
        for which in "x", "dy", "parameters":
            for layout in LAYOUTS:
                case = LayerNormCase(lead, (8, 12), HALF, **{which: layout})
                PAGE.operation.run(function, case, page.DEVICE)
    assert len(page.PLANS) == 1


def test_arguments_of_one_kind_share_a_plan(page, ones):
    x, w = torch.randn(4, 8, device=page.DEVICE), ones(8)
    page.layer_norm(x, 8, w, w)
    ((kind, plan),) = page.PLANS.items()
    for other, weight in (x + 1, w), (x.T.contiguous().T, w), (x, w.clone()):
        page.layer_norm(other, (8,), weight, w)
    page.layer_norm(x.requires_grad_(), [8], w, w).sum().backward()
    assert list(page.PLANS.items()) == [(kind, plan)]


def test_other_arguments_have_plans_of_their_own(page, ones):
    x, w = ones(4, 8), ones(8)
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


def test_another_device_has_a_plan_of_its_own(page, ones, monkeypatch):
    x = ones(4, 8)
    page.layer_norm(x, 8)
    monkeypatch.setattr(page, "current_device", lambda: 7)
    with pytest.raises(ValueError, match="x is on"):
        page.layer_norm(x, 8)


def test_mistakes_leave_no_plan(page, ones):
    for mistake in (*PAGE.mistakes, *PAGE.operation.mistakes()):
        for _ in range(2):
            with pytest.raises(mistake.error, match=mistake.words):
                page.layer_norm(*mistake.arguments(ones))
    assert not page.PLANS


def test_plans_are_few(page, ones):
    page.PLANS.update(dict.fromkeys(range(4096)))
    page.layer_norm(ones(4, 8), 8)
    assert len(page.PLANS) == 1


# What is kept of a launch ----------------------------------------------------


class Kernel:
    """In place of a compiled one: it notes how it is launched."""

    function, packed_metadata = "function", "packed"

    def __init__(self):
        self.launched = []

    def __getitem__(self, grid):
        def through_jit(*args, num_warps):
            self.launched.append(("jit", grid, num_warps, *args))
            return Compiled(self.launched)

        return through_jit


class Compiled:
    function, packed_metadata = "function", "packed"

    def __init__(self, launched):
        self.launched = launched

    def run(self, *args):
        self.launched.append(("run", *args))

    def __getitem__(self, grid):
        return lambda *args: self.launched.append(("grid", grid, *args))


@pytest.fixture
def driver(page, monkeypatch):
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


@pytest.mark.parametrize("name", LAUNCHERS)
def test_launches(page, driver, name):
    """First, and where an address is no multiple of 16, Triton chooses."""
    kernel = Kernel()
    launch = page.LAUNCHERS[name](kernel, 7, 11, 12, num_warps=4)
    memory = torch.zeros(64, dtype=torch.uint8)
    start = -memory.data_ptr() % 16
    x, later, odd = memory[start:], memory[start + 16 :], memory[start + 8 :]
    expected = []
    for tensors in (x, odd), (x, later), (later, x), (odd, x), (x, None):
        launch(*tensors)
        aligned = not any(t is odd for t in tensors)
        if AGAIN[name] and aligned and len(expected) > 1:
            places = [0 if t is None else t.data_ptr() for t in tensors]
            expected.append((*AGAIN[name], *places, 11, 12))
        else:
            expected.append(("jit", (7,), 4, *tensors, 11, 12))
    assert len(kernel.launched) == len(expected)
    for got, want in zip(kernel.launched, expected, strict=True):
        assert len(got) == len(want)
        assert all(a is b or a == b for a, b in zip(got, want, strict=True))


# The clocks ------------------------------------------------------------------


def test_calls_take_turns(page, monkeypatch):
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


def test_what_is_timed(page):
    """The same results as PyTorch, call after call."""
    for f in page.plain, page.layer_norm:
        results = []
        for function in f, F.layer_norm:
            call = page.prepared("", function, 5, 24, SINGLE)
            call()
            results.append(call())
        assert len(results[0]) == 3
        torch.testing.assert_close(*results)


def test_the_parts_of_a_call(page):
    calls = page.parts(16, 256, HALF)
    assert list(calls) == page.PARTS
    ours, _, empty, torchs = (calls[p]() for p in page.PARTS)
    for found in ours, empty, torchs:
        assert found.shape == (16, 256) and found.dtype == HALF
    assert empty.grad_fn and torchs.grad_fn


def test_a_benchmark_has_all_lines_in_turns(page, monkeypatch):
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
        median, low, high = mark.fn(5, 24, SINGLE, "both", p)
        assert 0 < low <= median <= high
    assert asked == [list(lines)]
    names = ["plain", "Triton", "empty", "PyTorch"]
    assert mark.benchmarks.line_names == names


def test_comparison(page, capsys, monkeypatch):
    import pandas

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


def test_exercise(page):
    for missing, part in (
        ("another eps", lambda *args: page.kind_1(*args[:3], 0)),
        ("no weight", lambda x, _, *args: page.kind_1(x, x[0], *args)),
    ):
        with contextlib.redirect_stdout(None):
            assert not page.exercise_1(part), missing


# On a GPU --------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("name", LAUNCHERS)
def test_who_asks_triton(page, name, monkeypatch):
    """Kept kernels go round the just-in-time compiler, if addresses allow."""
    jit = page.triton.runtime.JITFunction
    asked, run = [], jit.run

    def counted(self, *args, **options):
        asked.append(self.__name__)
        return run(self, *args, **options)

    monkeypatch.setattr(jit, "run", counted)
    function, given = by(name)(page), page.inputs(64, 96, HALF)
    step(function, *given)
    assert len(asked) == 3
    step(function, *given)
    assert len(asked) == (6 if name == "jit" else 3)
    x = torch.zeros(64 * 96 + 1, dtype=HALF, device="cuda")[1:]
    function(x.view(64, 96), (96,), *given[1:3])
    assert len(asked) == (7 if name == "jit" else 4)


@pytest.mark.gpu
def test_who_is_seen_by_hooks(page):
    hooks, seen = page.triton.knobs.runtime.launch_enter_hook, []
    if not hasattr(hooks, "add"):
        pytest.skip("this version of Triton takes one hook")
    given = page.inputs(64, 96, HALF)
    names = "plain", *LAUNCHERS
    functions = {name: FUNCTIONS[name](page) for name in names}
    for function in functions.values():
        step(function, *given)
    hooks.add(seen.append)
    try:
        counts = {}
        for name, function in functions.items():
            seen.clear()
            step(function, *given)
            counts[name] = len(seen)
    finally:
        hooks.remove(seen.append)
    assert counts == {"plain": 3, "jit": 3, "kept": 3, "bare": 0}


@pytest.mark.gpu
def test_threads_and_streams_share_a_plan(page):
    given = page.inputs(1151, 1000, HALF)
    expected = step(page.plain, *given)
    torch.cuda.synchronize()
    found, start = {}, threading.Barrier(8)

    def work(number):
        with torch.cuda.stream(torch.cuda.Stream()):
            start.wait()
            found[number] = [step(page.layer_norm, *given) for _ in range(30)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    results = [result for part in found.values() for result in part]
    assert len(results) == 240
    assert all(torch.equal(result, expected) for result in results)
