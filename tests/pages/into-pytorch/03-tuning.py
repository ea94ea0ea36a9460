"""What must hold of the page "From a slow kernel to a fast one"."""

import contextlib
import functools

import pytest
import torch

import tutorial
from compiled.declared import Kernel, Kernels
from conformance import LAYOUTS, Page, RmsNorm, too_wide

HALF, SINGLE, DOUBLE = torch.float16, torch.float32, torch.float64
BRAIN = torch.bfloat16


def run(page, M, N, dtype):
    """The first kernels as they are when nothing is converted or saved."""
    x, w, dy = (t.detach() for t in page.inputs(M, N, dtype))
    _, saved = page.nothing_saved(x, w)
    page.backward_nothing_saved(dy, w, saved)
    _, saved = page.forward(x, w)
    page.backward(dy, w, saved)


def also(page, M, N, dtype):
    x, w, dy = (t.detach() for t in page.inputs(M, N, dtype))
    for design, backward in page.BACKWARDS.items():
        _, saved = page.FORWARD_OF.get(design, page.forward)(x, w)
        backward(dy, w, saved)
    for design in ("more warps", "wide chunk"):
        page.FORWARDS[design](x, w)
    x = torch.empty(5000, dtype=dtype, device=page.DEVICE)
    for reads, writes in ((1, 1), (2, 1)):  # the ceilings of both passes
        page._move[(5,)](x, x, 5000 // 3, reads, writes, BLOCK_SIZE=4096)


PUBLISHED = "2026-11-28"

# Forward x is read and y is written; backward dy is read as well.
COPIES = {
    "tuning-first": (1, 1),
    "tuning-forward": (1, 1),
    "tuning-backward": (2, 1),
}

KERNELS = Kernels(
    run=run,
    also=also,
    M=4096,
    N=[4096],
    dtype="bfloat16",
    sizes={
        "bfloat16": [1024, 2048, 4096, 8192],
        "float16": [4096],
        "float32": [1024, 4096, 8192],
    },
    kernels={
        "_forward_in_chunks": Kernel(
            look="""
            A chunk of 256 columns is two numbers for each of 128 threads, so
            no load has more than 4 bytes. The sum of each chunk needs
            barriers, and they stand in the loop.
            """,
            true=lambda code: [
                code.count("load", 16) == 0,
                code.count("barrier") > 0,
            ],
            narrow_loads=99,
            narrow_stores=99,
        ),
        "_rms_norm_fwd": Kernel(
            look="""
            The row and the weights are loaded once, by 16 bytes.
            Threads wait for each other only in the one sum.
            """,
            true=lambda code: [
                code.loaded == 2 * 2 * 4096,
                code.narrow("load") == 0,
            ],
            narrow_stores=1,  # rstd
        ),
        "_backward_in_chunks": Kernel(
            look="""
            Again no load has more than 4 bytes.
            """,
            true=lambda code: [code.count("load", 16) == 0],
            narrow_loads=99,
            narrow_stores=99,
        ),
        "_rms_norm_bwd": Kernel(
            look="""
            The weights are loaded once, before the loop, and the sums for
            ``dw`` stay in registers until its end.
            """,
            true=lambda code: [code.spills == 0],
            narrow_loads=9,  # rstd
            narrow_copies=9,
            copies="any",
            shared=232448,
        ),
        "_add_up": Kernel(
            look="""
            Sixteen columns of 64 rows of sums at a time.
            """,
            true=lambda code: [code.spills == 0],
            narrow_stores=1,
        ),
    },
)

# What the functions compute --------------------------------------------------


def alone(norm):
    """A norm of the page, as the operation calls it."""

    def of(page):
        def function(x, residual, *args, **options):
            assert residual is None
            return page.rms_norm(x, *args, norm=norm(page), **options), None

        return function

    return of


def negative_eps(load):
    page = load()
    try:
        page.rms_norm(torch.ones(2, 8, device=page.DEVICE), 8, eps=-1e-5)
    except ValueError:
        return
    raise AssertionError("a negative eps is taken")


at = functools.partial(RmsNorm.at, fused=False)


def first(page):
    return page.NORMS["first"]


def searched(page):
    return page.norm_of(page.forward, page.backward_searched)


def relaxed(page):
    return page.norm_of(page.forward, page.backward_relaxed)


PAGE = Page(
    __file__,
    RmsNorm(alone=True),
    {
        "rms_norm": alone(lambda page: page.OURS),
        "first": alone(first),
    },
    # Few programs in all.
    quick=(("else 4\n", "else 2\n"), ("ROWS=64", "ROWS=1")),
    cases=(
        *(at(M, 40, HALF) for M in (1, 2, 27)),
        at(17, 65, HALF),
        *(at(3, 37, dy=dy) for dy in LAYOUTS),
        at(1, 8192, HALF),
        at(2, 4097, HALF),
    ),
    full=(
        *(
            at(1151, N, dtype)
            for N, dtype in (
                *((N, BRAIN) for N in (1000, 1024, 2048, 4096, 8192)),
                *((N, HALF) for N in (37, 8192)),
                *((N, SINGLE) for N in (520, 8192)),
                (264, DOUBLE),
            )
        ),
        *(
            at(301, N, half, weight_dtype=SINGLE)
            for N in (37, 4096)
            for half in (HALF, BRAIN)
        ),
    ),
    mistakes=(too_wide(8193, "8193 columns.* 8192", lambda x: (x, None)),),
    repeatable=("rms_norm",),
    repeated=tuple(at(512, N, HALF) for N in (256, 1000, 4096, 8192)),
    elsewhere="is on cuda:1: not the current one",
    compiled=("rms_norm",),
    compiled_cases=tuple(at(37, N, HALF) for N in (1000, 8192)),
    graphs=tuple(at(512, N, HALF) for N in (1000, 8192)),
    trains=("rms_norm",),
    huge=(8192,),
    huge_functions=("rms_norm",),
    sanitizers=("memcheck", "racecheck"),
    sanitized=tuple(at(301, N, HALF) for N in (1000, 8192)),
    prints={
        "Timing needs a GPU": 3,
        "bytes: 67 MB, 14.0 us\noperations: 84 M, 1.3 us\n": 1,
        "operations per byte: 1.25\n": 1,
        "at the ridge: 14 operations per byte\n": 1,
        "ncu --clock-control none --cache-control all\n": 1,
        "9 x 200: 18 pairs of both passes, each element is right\n": 1,
        "with a search: each element is right\n": 1,
        "candidates that were timed: 14\n": 1,
        "no option: dw is 4 and then 5\n": 1,
        "reset_to_zero: dw is 1 and then 2\n": 1,
        "restore_value: dw is 2 and then 3\n": 1,
        "key ['M', 'N']: 5 searches for 5 calls\n": 1,
        "key ['N']: 2 searches for 5 calls\n": 1,
        "key []: 1 searches for 5 calls\n": 1,
        "kernel F: done\nright: False\n": 1,
        "kernel F: move fewer bytes\n": 1,
    },
    mutants={
        "the mean is subtracted": (
            "rstd = tl.rsqrt(tl.sum(x * x) / N + eps)",
            "rstd = tl.rsqrt(tl.sum(x * x - x) / N + eps)",
        ),
        "one chunk left out": (
            "    rstd = tl.rsqrt(total / N + eps)\n",
            "    rstd = tl.rsqrt(tl.sum(x * x) / N + eps)\n",
        ),
        "the row sum dropped": (
            "(wdy - x_hat * c) * rstd, mask=mask)",
            "wdy * rstd, mask=mask)",
        ),
        "the row sum dropped, in chunks": (
            "(w * dy - x_hat * c) * rstd, mask=mask)",
            "w * dy * rstd, mask=mask)",
        ),
        "x for x_hat": (
            "    factor = rstd  # makes x_hat of x\n    if SAVED:\n",
            "    factor = rstd  # makes x_hat of x\n    if not SAVED:\n",
        ),
        "only the last row": ("dw += dy * x_hat\n", "dw = dy * x_hat\n"),
        "sums without a place": (
            "tl.store(sums_ptr + tl.program_id(0) * N + cols, dw",
            "tl.store(sums_ptr + cols, dw",
        ),
        "sums left over": (
            "for first in range(0, programs, ROWS):",
            "for first in range(0, 1, ROWS):",
        ),
        "dw is not zero at first": (
            "    dw = torch.zeros_like(w, dtype=rstd.dtype)\n"
            "    _backward_in_chunks",
            "    dw = torch.ones_like(w, dtype=rstd.dtype)\n"
            "    _backward_in_chunks",
        ),
        "x_hat in the type of x": (
            "x_hat = torch.empty_like(x, dtype=acc_dtype)",
            "x_hat = torch.empty_like(x, dtype=dtype)",
        ),
        "any eps": ("if not eps >= 0:", "if False:"),
    },
    kills=(
        *(
            at(19, 43, kind, function=function)
            for kind in (HALF, SINGLE)
            for function in ("rms_norm", "first")
        ),
        at(3, 600, HALF, function="first"),  # three chunks
        at(19, 43, x="transposed"),
        at(3, 37, dy="one number"),
        negative_eps,
    ),
)


def test_exercise(page):
    with contextlib.redirect_stdout(None):
        assert not page.exercise_1(page.advice)
        assert page.exercise_1(page.advice_1)


@pytest.mark.parametrize(
    "design", ["one read", "relaxed", "registers", "own sum"]
)
@pytest.mark.parametrize("dtype", [HALF, SINGLE, DOUBLE])
def test_every_design_is_right(page, design, dtype):
    """As the operation asks, at odd sizes."""
    norm = page.norm_of(page.forward, page.BACKWARDS[design])
    function = alone(lambda page: norm)(page)
    for case in (at(19, 43, dtype), at(3, 600, dtype, dy="one number")):
        PAGE.operation.run(function, case, page.DEVICE)


@pytest.mark.parametrize("design", ["more warps", "wide chunk"])
@pytest.mark.parametrize("dtype", [HALF, SINGLE, DOUBLE])
def test_every_forward_design_is_right(page, design, dtype):
    norm = page.norm_of(page.FORWARDS[design], page.backward_own_sum)
    function = alone(lambda page: norm)(page)
    for case in (at(19, 43, dtype), at(3, 600, dtype)):
        PAGE.operation.run(function, case, page.DEVICE)


def test_the_search_is_right(page):
    """With the plan of each candidate."""
    function = alone(searched)(page)
    for M, N in ((19, 43), (3, 600), (1, 8)):
        PAGE.operation.run(function, at(M, N, HALF), page.DEVICE)


def test_every_candidate_is_right(page):
    for plan in page.CANDIDATES:

        def backward(dy, w, saved, plan=plan):
            return page.backward_with(plan, dy, w, saved)

        norm = page.norm_of(page.forward, backward)
        function = alone(lambda page, norm=norm: norm)(page)
        PAGE.operation.run(function, at(40, 43, HALF), page.DEVICE)


def test_which_candidates_fit(page):
    """4 to 64 columns a thread; the fewest warps where none has them."""

    def warps(N):
        configs = [page.config_of(plan) for plan in page.CANDIDATES]
        block = 2 ** (N - 1).bit_length()
        fit = page.that_fit(configs, {}, BLOCK=block)
        return {config.num_warps for config in fit}

    assert warps(200) == {4}
    assert warps(1024) == {4, 8}
    assert warps(4096) == {4, 8, 16}
    assert warps(8192) == {4, 8, 16}


@pytest.mark.gpu
def test_a_graph_cannot_record_a_search(page):
    """As the page says."""
    x, w, dy = (t.detach() for t in page.inputs(64, 136, HALF))
    _, saved = page.forward(x, w)
    kernel = page.searching(page._rms_norm_bwd, ["N"], page.TWO)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError), torch.cuda.graph(graph):
        page.backward_searched(dy, w, saved, kernel)


@pytest.mark.gpu
def test_what_a_search_adds_up(page):
    """Hundreds of runs, as the page says."""
    first, second = page.growth_of().split(" and then ")
    assert int(first) > 100 and int(second) == int(first) + 1
    said = page.growth_of(reset_to_zero=["sums_ptr"])
    assert said == "1 and then 2"
    assert page.growth_of(restore_value=["sums_ptr"]) == "2 and then 3"


# What is compiled ------------------------------------------------------------


def of_design(page, M, N, dtype, mode, design):
    """Launches the kernels of a design in one pass."""
    x, w, dy = (t.detach() for t in page.inputs(M, N, dtype))
    if mode == "forward":
        page.FORWARDS[design](x, w)
        return
    _, saved = page.FORWARD_OF.get(design, page.forward)(x, w)
    page.BACKWARDS[design](dy, w, saved)


def design_calls(mode, designs, N=4096, **more):
    from compiled.aot import Call

    values = {"M": 4096, "N": N, "dtype": "bfloat16", "mode": mode}
    return [
        Call(PAGE.name, of_design, values | {"design": design}, **more)
        for design in designs
    ]


# What is measured ------------------------------------------------------------


@pytest.mark.cpu
def test_every_line_of_the_figures_measures_what_it_says(monkeypatch):
    """A call of each provider, at one size: it moves what is counted."""
    moved = []

    def speed(bytes_moved, prepare):
        prepare()()
        moved.append(bytes_moved)
        return 2.0, 1.0, 3.0

    # Not that of other tests: it believes that there is a GPU.
    page = tutorial.load(PAGE.name, (*PAGE.quick, ('"cpu")', '"cpu" )')))
    page.ON_GPU, page.speed = True, speed
    page.compile_in_parallel = lambda kernel, arguments: None
    monkeypatch.setattr(
        page.triton.testing,
        "do_bench",
        lambda call, **options: call() or [1, 1, 1],
    )
    page.best_of_three_compilations = lambda function, measure: measure(
        function
    )
    small = {"M": 3, "N": 264}
    for benchmark, mode in (
        (page.bench_first, "forward"),
        (page.bench_forward, "forward"),
        (page.bench_backward, "backward"),
    ):
        bench = benchmark.benchmarks
        for provider in bench.line_vals:
            page.copy_of.cache_clear()
            del moved[:]
            values = small | {"provider": provider}
            found = benchmark.fn(**bench.args | values)
            assert found == (2.0, 1.0, 3.0)
            each = page.matrices_of(mode) * 3 * 264 * 2
            times = {"copy": 6, "torch.compile": 2}.get(provider, 1)
            if provider == "torch.compile":
                if mode == "forward":
                    assert moved == [each, each // 2 * 3]
                continue
            assert moved == times * [each]
    for benchmark, mode in (
        (page.bench_forwards, "forward"),
        (page.bench_backwards, "backward"),
    ):
        bench = benchmark.benchmarks
        for design in bench.x_vals:
            values = small | {"design": design, "provider": "designs"}
            found = benchmark.fn(**bench.args | values)
            assert found == [100.0, 50.0, 150.0]
            assert moved[-1] == page.matrices_of(mode) * 3 * 264 * 2
    assert page.choice_of(3, 264, BRAIN) in page.CANDIDATES
    chosen = []

    def choice_of(M, N, dtype):
        chosen.append((M, N))
        return 2, 4, 1

    page.choice_of = choice_of
    for benchmark in (page.bench_keys, page.bench_rule):
        bench = benchmark.benchmarks
        for provider in bench.line_vals:
            values = small | {"provider": provider}
            assert benchmark.fn(**bench.args | values) == [100, 50, 150]
    assert chosen == [(4096, 264), (64, 264), (3, 264), (3, 512)]
