"""The clock of the pages, and the ceiling that it measures.

On a GPU both are tried; nothing else may use it meanwhile. Without one, all
recordings that were made with this clock must agree with each other. What a
recording does not tell, the file of its page may declare:

``COPIES = {"layer-norm-fused": (2, 2)}``
    How many matrices the copy of a benchmark reads and writes. Without it, a
    forward pass reads one and writes one, a backward pass reads two and
    writes one.
``ABOVE_A_COPY = {("layer-norm-forward", "triton", 1024): "why"}``
    The points at which a line is above 102% of its copy: benchmark, provider
    and the size, and the reason, which the page gives, too.
"""

import ast
import contextlib
import json
import os
import re
import subprocess
import sys
import types
from collections import defaultdict

import pytest
import torch
import triton
import triton.language as tl

import tutorial
from compiled import declared
from measurements import recording

PAGES = "layer-norm/01-layer-norm", "norms-and-losses/03-softmax"
WIDTHS = 1024, 1536, 2048, 4096, 8192
# How much two measurements of the same copy may differ, from the largest
# width on that is too narrow to say.
SAME, WIDE = 1.03, 1024
MOST = 102  # % of a copy
# What a method says that used this clock.
METHOD = re.compile(r"CUDA graph of \w+ (calls|launches)\b")
USUAL = (
    "a CUDA graph of several calls, each with inputs of its own and after L2 "
    "was overwritten"
)
MATRICES = {"forward": (1, 1), "backward": (2, 1)}


# On a GPU --------------------------------------------------------------------


@triton.jit
def _nothing():
    pass


@pytest.mark.gpu
@pytest.mark.parametrize("name", PAGES)
def test_an_empty_kernel_takes_no_time(name):
    page = tutorial.load(name)
    median, low, high = page.device_time(lambda: _nothing[(132,)])
    print(f"an empty kernel: {low:.2f}, {median:.2f}, {high:.2f} µs")
    assert low <= median <= high
    assert 0 < median <= 2


@triton.jit
def _copy_to_keep(source_ptr, target_ptr, BLOCK_SIZE: tl.constexpr):
    """A copy that asks L2 to keep what it reads."""
    index = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    row = tl.load(source_ptr + index, eviction_policy="evict_last")
    tl.store(target_ptr + index, row)


@pytest.mark.gpu
@pytest.mark.parametrize("N", WIDTHS)
def test_l2_keeps_nothing_that_a_call_could_use(N):
    """Not even what a kernel asked it to keep, or used twice."""
    page = tutorial.load(PAGES[0])
    M = 4096
    size = 2 * M * N * 2
    copy, _, _ = page.ceiling(1, 1, (M, N), torch.float16)

    def prepare(twice=False):
        source = torch.randn(M, N, device=page.DEVICE).half()
        target = torch.empty_like(source)

        def call():
            kernel = _copy_to_keep[(M * N // 2048,)]
            kernel(source, target, BLOCK_SIZE=2048, num_warps=2)

        def in_place():
            source.mul_(1)  # reads a line, and writes it

        return in_place if twice else call

    asked, _, _ = page.speed(size, prepare)
    twice, _, _ = page.speed(size, lambda: prepare(twice=True))
    print(f"{N} columns, % of a copy: {100 * asked / copy:.0f} where L2 is "
          f"asked to keep, {100 * twice / copy:.0f} in place")  # fmt: skip
    # Were it kept, 1024 columns would be 1.3 times as fast. To ask is worth
    # something by itself: 4% at 2048 columns of an H200.
    assert asked <= 1.1 * copy
    assert twice <= 1.1 * copy


CEILINGS = """
import json, sys
import torch, tutorial
page = tutorial.load(sys.argv[1])
found = {}
for N in map(int, sys.argv[2:]):
    found[N], _, _ = page.ceiling(1, 1, (4096, N), torch.float16)
print(json.dumps(found))
"""


def ceilings(name):
    """GB/s of a matrix that is read and written, in a fresh process."""
    path = str(tutorial.ROOT / "docs" / "_ext")
    done = subprocess.run(
        [sys.executable, "-c", CEILINGS, name, *map(str, WIDTHS)],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.gpu
def test_the_ceiling_is_the_same_in_another_process_and_on_another_page():
    runs = [ceilings(name) for name in (PAGES[0], *PAGES)]
    apart = {}
    for width in runs[0]:
        speeds = [found[width] for found in runs]
        print(width, "columns:", *(f"{speed:.0f}" for speed in speeds), "GB/s")
        apart[width] = max(speeds) / min(speeds)
    assert max(apart.values()) <= SAME, apart


# Without a GPU: the arithmetic -----------------------------------------------


class Device:
    """Stands for torch: an overwriting takes 85 µs, a call 10, and each
    replay begins with 5 that no kernel needs."""

    float32, int8 = "float32", "int8"

    def __init__(self):
        self.now, self.actions = 0.0, None
        self.cuda = types.SimpleNamespace(
            Event=lambda **_: Event(self),
            CUDAGraph=lambda: Graph(self),
            graph=self.graph,
            current_stream=lambda: None,
            synchronize=lambda: None,
        )

    def empty(self, *_, **__):
        return types.SimpleNamespace(zero_=lambda: self.takes(85))

    def takes(self, us):
        if self.actions is None:
            self.now += us
        else:
            self.actions.append(us)

    @contextlib.contextmanager
    def graph(self, graph, stream):
        self.actions = graph.actions
        yield
        self.actions = None


class Event:
    def __init__(self, device):
        self.device = device

    def record(self):
        self.at = self.device.now

    def elapsed_time(self, other):
        return (other.at - self.at) / 1000  # ms


class Graph:
    def __init__(self, device):
        self.device, self.actions = device, []

    def replay(self):
        self.device.now += 5 + sum(self.actions)


@pytest.mark.parametrize("us", [10, 5000])
def test_only_the_call_is_timed(monkeypatch, us):
    """Neither what overwrites L2 nor the beginning of a replay."""
    page = tutorial.load(PAGES[0])
    device = Device()
    monkeypatch.setattr(page, "ON_GPU", True)
    monkeypatch.setattr(page, "torch", device)

    def prepare():
        return lambda: device.takes(us)

    found = page.device_time(prepare)
    assert found == pytest.approx((us, us, us))
    median, low, high = page.speed(us * 1000, prepare)
    assert (low, median, high) == pytest.approx((1, 1, 1))  # GB/s


# Without a GPU: the recordings -----------------------------------------------


def recordings():
    """All that are in the repository: {(card, page): what it holds}."""
    found = {}
    for path in sorted(recording.STORE.glob("*/*/*.json")):
        card = path.relative_to(recording.STORE).parts[0]
        name = f"{path.parent.name}/{path.stem}"
        found[card, name] = recording.read(card, name)
    return found


def timed(data):
    """The benchmarks of a recording that used this clock."""
    for plot, benchmark in data["benchmarks"].items():
        if METHOD.search(benchmark["method"]):
            yield plot, benchmark


def declares(name, what):
    return getattr(declared.loaded(name), what, {})


def copies(found, declares=declares):
    """What was measured of each copy: {(card, M, N, dtype, reads, writes):
    {(page, benchmark): GB/s}}, and the benchmarks that tell too little."""
    same, unknown = defaultdict(dict), []
    for (card, name), data in found.items():
        for plot, benchmark in timed(data):
            args, unit = benchmark["args"], benchmark["unit"]
            matrices = declares(name, "COPIES").get(
                plot, MATRICES.get(args.get("mode"))
            )
            for row in benchmark["rows"]:
                if row["provider"] != "copy" or row["median"] is None:
                    continue
                size = args | row
                shape = size.get("M"), size.get("N"), size.get("dtype")
                if None in (*shape, matrices) or unit != "GB/s":
                    unknown.append(f"{card}, {name}, {plot}")
                elif recording.ranks(benchmark):
                    unknown.append(f"{card}, {name}, {plot}: several GPUs")
                else:
                    key = card, *shape, *matrices
                    same[key][name, plot] = row["median"]
    return same, sorted(set(unknown))


def differing(same):
    """The copies that are not the same everywhere: a line each."""
    for key, speeds in same.items():
        _, _, N, *_ = key
        if N >= WIDE and max(speeds.values()) > SAME * min(speeds.values()):
            card, M, N, dtype, reads, writes = key
            yield (
                f"{card}, {M} x {N}, {dtype}, {reads} read and {writes} "
                "written: "
                + ", ".join(f"{v:.0f} in {p}" for p, v in speeds.items())
            )


def percents(found):
    """(card, page, (benchmark, provider, size), % of its copy)."""
    for (card, name), data in found.items():
        for plot, benchmark in timed(data):
            names = benchmark["x_names"]
            by_copy = {
                recording.x_of(row, names): row["median"]
                for row in benchmark["rows"]
                if row["provider"] == "copy"
            }
            for row in benchmark["rows"]:
                x, value = recording.x_of(row, names), row["median"]
                place = plot, row["provider"], *x
                copy = by_copy.get(x)
                if value is None or row["provider"] == "copy":
                    continue
                if benchmark["unit"] == "% of copy":
                    yield card, name, place, value
                elif benchmark["unit"] == "GB/s" and copy:
                    yield card, name, place, 100 * value / copy
                elif benchmark["unit"] == "µs" and copy:
                    yield card, name, place, 100 * copy / value


def too_fast(found, declares=declares):
    """What is above a copy without a reason, and reasons without need."""
    needed = defaultdict(set)
    for card, name, place, percent in percents(found):
        if percent > MOST:
            needed[name].add(place)
            if not declares(name, "ABOVE_A_COPY").get(place):
                yield f"{card}, {name}, {place}: {percent:.1f}% of a copy"
    for name in sorted({name for _, name in found}):
        for place in declares(name, "ABOVE_A_COPY"):
            if place not in needed[name]:
                yield f"{name}, {place}: declared, and not above {MOST}%"


def compared(found, declares=declares):
    """What there is to compare, in a line each."""
    same, unknown = copies(found, declares)
    wide = {key: speeds for key, speeds in same.items() if key[2] >= WIDE}
    several = sum(len(speeds) > 1 for speeds in wide.values())
    using = {key for key, data in found.items() if any(timed(data))}
    points = sum(1 for _ in percents(found))
    yield f"{len(using)} of {len(found)} recordings use this clock"
    yield from (f"  {card}, {name}" for card, name in sorted(using))
    yield f"of {len(wide)} copies {several} are in more than one benchmark"
    yield f"{points} points have a copy beside them"
    yield from (f"the copy is not known: {place}" for place in unknown)


def test_copies_agree(capsys):
    found = recordings()
    assert found
    with capsys.disabled():
        print("", *compared(found), sep="\n")
    assert not list(differing(copies(found)[0]))


def test_nothing_is_faster_than_a_copy():
    assert not list(too_fast(recordings()))


# Planted faults --------------------------------------------------------------


def planted(speeds, unit="GB/s", plot="p", method=USUAL, **args):
    """A recording of one benchmark: {(N, provider): speed}."""
    args = {"M": 4096, "dtype": "float16", "mode": "forward"} | args
    rows = [
        {"N": N, "provider": provider, "median": v, "low": v, "high": v}
        for (N, provider), v in speeds.items()
    ]
    benchmark = {
        "unit": unit,
        "args": args,
        "method": f"Device time: {method}.",
    }
    benchmark |= {"x_names": ["N"], "rows": rows}
    return {"benchmarks": {plot: benchmark}}


def beside(second, card="a", **more):
    """Two pages, of which the first has copies at two widths."""
    first = planted({(512, "copy"): 900.0, (1024, "copy"): 1000.0})
    return {("a", "x/01"): first, (card, "x/02"): planted(second, **more)}


def nothing(name, what):
    return {}


def test_a_copy_that_differs_is_found():
    def apart(found):
        return list(differing(copies(found, nothing)[0]))

    assert not apart(beside({(1024, "copy"): 1029.0}))
    (line,) = apart(beside({(1024, "copy"): 1031.0}))
    assert "a, 4096 x 1024, float16, 1 read and 1 written" in line
    assert "1000 in ('x/01', 'p'), 1031 in ('x/02', 'p')" in line
    assert len(apart(beside({(1024, "copy"): 960.0}))) == 1
    assert not apart(beside({(512, "copy"): 2000.0}))  # too narrow
    assert not apart(beside({(1024, "triton"): 2000.0}))
    assert not apart(beside({(1024, "copy"): None}))
    # Another card, size, type, operation or clock is another copy.
    other = {(1024, "copy"): 2000.0}
    assert not apart(beside(other, card="b"))
    for more in (
        {"M": 8192},
        {"dtype": "float32"},
        {"mode": "backward"},
        {"method": "timed with do_bench"},
    ):
        assert not apart(beside(other, **more))


def test_declared_matrices_are_compared():
    def declared(name, what):
        return {"p": (2, 1)} if (name, what) == ("x/02", "COPIES") else {}

    found = beside({(1024, "copy"): 2000.0})
    same, unknown = copies(found, declared)
    assert not unknown and not list(differing(same))
    assert same["a", 4096, 1024, "float16", 2, 1] == {("x/02", "p"): 2000}


def test_a_copy_that_is_not_known_is_told():
    for more in ({"mode": "both"}, {"M": None}, {"unit": "µs"}):
        found = beside({(1024, "copy"): 1.0}, **more)
        assert copies(found, nothing)[1] == ["a, x/02, p"]


def test_what_is_faster_than_a_copy_is_found():
    def fast(speeds, declares=nothing, **more):
        return list(
            too_fast({("a", "x/01"): planted(speeds, **more)}, declares)
        )

    copy = {(1024, "copy"): 100.0}
    assert not fast(copy | {(1024, "triton"): 102.0, (2048, "quack"): 500.0})
    assert not fast(copy | {(1024, "quack"): None})
    above = copy | {(1024, "triton"): 102.1}
    place = "p", "triton", 1024
    assert fast(above) == [f"a, x/01, {place}: 102.1% of a copy"]
    assert not fast(above, method="timed with do_bench")
    assert fast({(1024, "1024"): 102.1}, unit="% of copy")
    assert not fast({(1024, "1024"): 102.0}, unit="% of copy")
    assert fast(copy | {(1024, "triton"): 97.0}, unit="µs")
    assert not fast(copy | {(1024, "triton"): 105.0}, unit="µs")

    def because(why):
        return lambda name, what: {place: why} if what != "COPIES" else {}

    assert not fast(above, because("x is read from a cache"))
    assert fast(above, because(""))
    (line,) = fast(copy, because("it was faster once"))
    assert line.endswith("declared, and not above 102%")


def test_what_is_compared_is_said():
    found = beside({(1024, "copy"): 1000.0, (1024, "triton"): 900.0})
    found["a", "x/03"] = planted({}, method="timed with do_bench")
    found["b", "x/01"] = planted({(1024, "copy"): 1.0}, mode="both")
    assert list(compared(found, nothing)) == [
        "3 of 4 recordings use this clock",
        "  a, x/01",
        "  a, x/02",
        "  b, x/01",
        "of 1 copies 1 are in more than one benchmark",
        "1 points have a copy beside them",
        "the copy is not known: b, x/01, p",
    ]


# Every method names this clock ----------------------------------------------


def methods(text):
    """What the measuring functions that use the clock say: {name: text}."""
    functions = {
        node.name: node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef)
    }
    using, before = {"device_time"}, None
    while using != before:
        before = set(using)
        for name, node in functions.items():
            names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
            if names & using:
                using.add(name)
    return {
        name: " ".join((ast.get_docstring(node) or "").split())
        for name, node in functions.items()
        if name in using
        and any("perf_report" in ast.unparse(d) for d in node.decorator_list)
    }


CLOCK = "# Scaffold: the clock.\n"
NEW = [
    name
    for name in map(tutorial.name_of, tutorial.scripts())
    if CLOCK in tutorial.source(name)
]


@pytest.mark.parametrize("name", NEW)
def test_a_page_with_this_clock_says_so_in_each_method(name):
    found = methods(tutorial.source(name))
    assert found
    others = [
        n
        for n, text in found.items()
        if not METHOD.search(text) and not text.startswith("Whole calls,")
    ]
    assert not others, others


def test_a_method_that_says_something_else_is_found():
    text = tutorial.source(PAGES[1])
    other = re.sub(r"graph of several\s+calls", "graph, replayed", text)
    said = methods(other)
    assert set(said) == set(methods(text)) and len(said) == 5
    assert not any(map(METHOD.search, said.values()))
