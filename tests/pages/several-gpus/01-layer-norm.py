"""What must hold of the page "Layer norm over several GPUs"."""

import builtins
import contextlib
import functools
import gc
import inspect
import itertools
import os
import shutil
import subprocess
import sys
import threading
import time
import types

import pytest
import torch
import torch.distributed as dist

import ranks as several
import tutorial
from compiled.declared import Kernel, Kernels
from measurements.figure import series


def run(page, M, N, dtype):
    x, dy = torch.empty(2, M, N, dtype=dtype, device=page.DEVICE)
    w, b = torch.empty(2, N, dtype=dtype, device=page.DEVICE)
    _, stats = page.forward(x, w, b, 1e-5)
    page.forward(x, w, b, 1e-5, (N,))
    page.backward(dy, x, w, stats)
    page.backward(dy, x, w, stats, (N,))


def also(page, M, N, dtype):
    x, dy = torch.empty(2, 5, 1000, dtype=dtype, device=page.DEVICE)
    w, b = torch.empty(2, 1000, dtype=dtype, device=page.DEVICE)
    parts = torch.empty(2, 2, 5, device=page.DEVICE)
    y, stats = torch.empty_like(x), parts[0]
    given = x, w, b, y, stats, parts, 5, 1e-5, 1000, (1000, 24)
    page._forward[(5,)](*given, **page.lanes(1000))
    page.backward(dy, x, w, stats)
    page._move[(5,)](x, y, x.numel(), 1, 1, BLOCK_SIZE=4096)  # the ceiling


def whole_rows(page, M, N, dtype, warps=0):
    x = torch.empty(M, N, dtype=dtype, device=page.DEVICE)
    w = torch.empty(N, dtype=dtype, device=page.DEVICE)
    plan = page.lanes(N)
    plan["num_warps"] = warps or plan["num_warps"]
    page.forward(x, w, w, 1e-5, plan=plan)


def ask_for_gpus(page):
    """As the script does when it is loaded: see test_kernels_compiled.py."""
    assert torch.cuda.device_count() == 2


PUBLISHED = "2026-11-22"

KERNELS = Kernels(
    run=run,
    also=also,
    M=4096,
    N=[4096, 32768],
    dtype="bfloat16",
    sizes={
        "bfloat16": [1024, 2048, 4096, 8192, 16384, 32768],
        "float16": [4096],
        "float32": [2048, 8192],
    },
    kernels={
        "_part": Kernel(
            look="""
            The row is loaded once, by 16 bytes.
            Threads wait for each other in three sums, and two numbers are
            stored.
            """,
            true=lambda code: [
                code.narrow("load") == 0,
                len(code.lines("shuffle")) == 3,
            ],
            narrow_stores=2,  # mean and M2
        ),
        "_forward": Kernel(
            look="""
            Shown as it merges parts: no thread waits for another, as no sum is
            left.
            """,
            true=lambda code: [code.count("shuffle") == 0],
            narrow_loads=2,  # mean and M2 of a part
            narrow_stores=2,  # mean and rstd
        ),
        "_row_sums": Kernel(
            look="""
            ``dy``, ``w`` and ``x`` are read once, by 16 bytes; two sums are
            stored.
            """,
            true=lambda code: [len(code.lines("shuffle")) == 2],
            narrow_loads=2,  # mean and rstd
            narrow_stores=2,
        ),
        "_backward": Kernel(
            look="""
            Shown with sums that are known: no thread waits for another within
            a row, and loads of the rows that follow are asked for ahead.
            """,
            true=lambda code: [(code.count("copy") > 0) != code.amd],
            true_at={16384: lambda code: [len(code.lines("load")) == 4]},
            copies=True,
            narrow_copies=15,  # w, and four numbers of each row
            spills={2048: 8, 8192: 8},  # in float32
        ),
    },
)


def of_two_kernels(figure):
    read = figure("layer-norm-parts-dram", "H200")
    one, two = read.all_medians("triton"), read.all_medians("two")
    same = two.most / two.least < 1.02 and one.most / one.least < 1.02
    assert same, "at every width"
    yield (
        f"With two kernels, DRAM delivers ``x`` {two.median:.1f} times on the "
        "H200, at every width. With one it delivers it "
        f"{one.median:.1f} times."
    )
    warps = figure("layer-norm-parts-warps", "H200")
    planned, sixteen = warps.shares("triton"), warps.shares("sixteen")
    yield (
        f"On the H200 our plan reaches {series(planned, '%')} of a copy at "
        f"the four widths, and sixteen warps reach {series(sixteen, '%')}."
    )
    half_a, three_quarters, half_b, same = (
        warps.ratio("triton", "sixteen", N) for N in (4096, 8192, 16384, 32768)
    )
    cause = min(half_a, half_b) > three_quarters > same
    assert cause, "the less is in flight, the slower"
    # KB in flight do not explain everything.
    yield from (
        f"the same 64 KB give {planned[1]}% at 8192 columns and {planned[3]}% "
        "at 32768,",
        f"the same 32 KB give {sixteen[0]}% at 4096 and {sixteen[2]}% at "
        "16384.",
    )
    assert planned[3] < min(planned[:3]), "one program on an SM"
    assert sixteen[2] < min(sixteen[:2]), "one program on an SM"
    assert abs(same - 1) < 0.03, "the same plan, the same speed"


def times_as_long(of, N):
    """That of each way over that of two numbers a row."""
    return {
        way: of.ratio("triton", way, N)
        for way in ("rows", "gathered", "exchanged", "dtensor")
    }


def others_cost(of, N):
    return of.us("triton", N) - of.us("alone", N)


def of_columns_forward(figure):
    of = figure("layer-norm-columns-forward", "H200")
    widest = times_as_long(of, 32768)
    assert widest["rows"] > widest["gathered"] > widest["exchanged"] > 1
    yield (
        f"On two H200s two numbers a row take {of.us('triton', 2048):.0f} µs "
        f"at 2048 columns and {of.us('triton', 32768):.1f} µs at 32768. At "
        f"32768 columns gathered rows take {widest['rows']} times as long "
        f"with PyTorch's kernels and {widest['gathered']} times as long with "
        f"ours. An all-to-all takes {widest['exchanged']} times as long."
    )
    apart = max(
        abs(100 * ratio - 100) for ratio in of.ratios("rows", "dtensor")
    )
    assert apart < 7, "one line nearly hides the other"
    yield f"over all widths they differ by at most {apart:.1f}%."
    kernels = of.us("rows", 32768) - of.us("gathered", 32768)
    exchange = of.us("gathered", 32768) - of.us("triton", 32768)
    assert exchange > kernels > 0, "the gain is that of the exchange"
    yield (
        f"on two H200s, at 32768 columns, our kernels save {kernels:.0f} µs. "
        "Both lines with our kernels differ in what is exchanged, and there "
        f"two numbers a row save {exchange:.0f} µs."
    )
    longer = of.us("gathered", 32768) > 298
    assert longer, "no faster than the data sheet allows"
    grows = others_cost(of, 32768) > others_cost(of, 2048)
    assert grows, "a second reading grows with the width"
    yield (
        "On two H200s the printed difference to the line without them is "
        f"{others_cost(of, 2048):.0f} µs at 2048 columns and "
        f"{others_cost(of, 32768):.0f} µs at 32768."
    )
    assert of.share("alone", 32768) >= 85, "it is not slow by itself"
    yield (
        "On the H200 *No other rank* is at "
        f"{of.share('alone', 32768)}% of the copy at 32768 columns."
    )
    for N in (2048, 4096, 8192, 16384, 32768):
        ahead = min(times_as_long(of, N).values()) > 3
        assert ahead, f"all others take several times as long: {N}"


def of_columns_backward(figure):
    of = figure("layer-norm-columns-backward", "H200")
    widest = times_as_long(of, 32768)
    yield (
        f"On two H200s two numbers a row take {of.us('triton', 2048):.0f} µs "
        f"at 2048 columns and {of.us('triton', 32768):.1f} µs at 32768. At "
        f"32768 columns gathered rows take {widest['rows']} times as long "
        f"with PyTorch's kernels, {widest['gathered']} times as long with "
        f"ours, and {widest['exchanged']} times as long in an all-to-all. "
        f"DTensor takes {widest['dtensor']} times as long."
    )
    assert widest["dtensor"] > widest["rows"], "it gathers x again"
    kernels = of.us("rows", 32768) - of.us("gathered", 32768)
    exchange = of.us("gathered", 32768) - of.us("triton", 32768)
    assert min(kernels, exchange) > 0
    yield (
        f"on two H200s, at 32768 columns, ours save {kernels:.0f} µs of "
        f"gathered rows, and the exchange saves {exchange:.0f} µs more."
    )
    cost = {N: others_cost(of, N) for N in (2048, 16384, 32768)}
    less = 0 < cost[32768] < cost[16384]
    assert less, "with both kernels alone others cost the exchange only"
    yield (
        f"The other ranks cost {cost[2048]:.0f} µs at 2048 columns, "
        f"{cost[16384]:.0f} µs at 16384 and {cost[32768]:.0f} µs at 32768."
    )


def added(rows, way, base, N):
    longer = rows.us(way, N) - rows.us(base, N)
    assert longer > 0, f"{way} takes longer than {base}: {N}"
    return longer


def of_rows(figure):
    rows = figure("layer-norm-rows", "H200")
    one, two, beside = (
        [f"{added(rows, way, base, N):.1f} µs" for N in (1024, 32768)]
        for way, base in (
            ("one", "alone"),
            ("two", "alone"),
            ("beside", "then"),
        )
    )
    hidden = added(rows, "beside", "then", 1024)
    assert hidden < added(rows, "one", "alone", 1024), "its start is hidden"
    more = added(rows, "two", "alone", 1024)
    assert more > added(rows, "one", "alone", 1024), "one is better than two"
    yield (
        f"On two H200s one all-reduce adds {one[0]} at 1024 columns and "
        f"{one[1]} at 32768, where it sends 32 times as much. Two of them add "
        f"{two[0]} and {two[1]}. Beside the matrix product, one adds "
        f"{beside[0]} and {beside[1]}."
    )
    yield f"**Two all-reduces** add {two[0]}."
    yield f"**One all-reduce** adds {one[0]}."
    yield f"**One beside a matrix product** adds {beside[0]}."


def of_calls(figure):
    calls = figure("layer-norm-columns-call", "H200")

    def us(way):
        return [f"{calls.us(way, N):.0f} µs" for N in (2048, 32768)]

    ours, unchecked, rows = map(us, ("triton", "unchecked", "rows"))
    compared = calls.us("triton", 2048) - calls.us("unchecked", 2048)
    assert compared > 0
    yield (
        f"On two H200s a call of ``layer_norm`` takes {ours[0]} at 2048 "
        f"columns and {ours[1]} at 32768. ``LayerNorm.apply``, which compares "
        f"nothing, takes {unchecked[0]} and {unchecked[1]}. So the comparison "
        f"takes {compared:.0f} µs of the narrow call. Gathering rows for "
        f"PyTorch's kernels takes {rows[0]} and {rows[1]}."
    )
    device = figure("layer-norm-columns-forward", "H200").us("triton", 2048)
    assert device < calls.us("unchecked", 2048), "the host is slower"
    yield f"on the device that is {device:.0f} µs at 2048 columns."
    assert calls.us("rows", 2048) < calls.us("triton", 2048), "told as a loss"
    yield (
        f"PyTorch's function on gathered rows takes {rows[0]} on two H200s at "
        f"2048 columns, and ours takes {ours[0]} with its comparison of "
        "arguments."
    )


def of_the_ladder(figure):
    for way, name in (
        ("triton", "Two numbers a row"),
        ("exchanged", "All-to-all, our kernels"),
        ("gathered", "Rows gathered, our kernels"),
        ("rows", "Rows gathered"),
        ("dtensor", "DTensor"),
    ):
        forward, backward = (
            figure(f"layer-norm-columns-{mode}", "H200").us(way, 32768)
            for mode in ("forward", "backward")
        )
        # A ratio to the first one, in the text, comes from more digits.
        digits = ".1f" if way == "triton" else ".0f"
        yield (
            f"**{name}** takes {forward:{digits}} µs and {backward:{digits}} "
            "µs."
        )


def on_the_other_card(figure):
    warps = figure("layer-norm-parts-warps", "H100")
    planned, sixteen = warps.shares("triton"), warps.shares("sixteen")
    yield (
        f"On the H100 our plan reaches {series(planned, '%')}, and sixteen "
        f"warps {series(sixteen, '%')}."
    )
    # "Sixteen warps are as fast at 8192 columns".
    assert abs(warps.ratio("triton", "sixteen", 8192) - 1) < 0.01
    for N in (4096, 16384):
        assert warps.ratio("triton", "sixteen", N) > 1.04
    of = figure("layer-norm-columns-forward", "H100")
    widest = times_as_long(of, 32768)
    yield (
        f"On two H100s two numbers a row take {of.us('triton', 2048):.0f} µs "
        f"at 2048 columns and {of.us('triton', 32768):.0f} µs at 32768, where "
        f"gathered rows take {widest['rows']} times as long with PyTorch's "
        f"kernels and {widest['gathered']} times as long with ours, and an "
        f"all-to-all takes {widest['exchanged']} times as long."
    )
    of = figure("layer-norm-columns-backward", "H100")
    # "The fastest way at every width", and DTensor "takes the longest".
    for card in ("H200", "H100"):
        there = figure("layer-norm-columns-backward", card)
        for way in ("rows", "gathered", "exchanged"):
            assert there.ratios("triton", way).least > 1
            assert there.ratios(way, "dtensor").least > 1
    widest = times_as_long(of, 32768)
    yield (
        f"On two H100s they take {of.us('triton', 2048):.0f} µs at 2048 "
        f"columns and {of.us('triton', 32768):.0f} µs at 32768, where "
        f"gathered rows take {widest['rows']} times as long with PyTorch's "
        f"kernels and {widest['gathered']} times as long with ours, an "
        f"all-to-all {widest['exchanged']} times, and DTensor "
        f"{widest['dtensor']} times."
    )
    rows = figure("layer-norm-rows", "H100")
    one, two, beside = (
        f"{added(rows, way, base, 1024):.1f} µs"
        for way, base in (
            ("one", "alone"),
            ("two", "alone"),
            ("beside", "then"),
        )
    )
    yield (
        f"On two H100s, at 1024 columns, one all-reduce adds {one}, two add "
        f"{two}, and one beside the matrix product adds {beside}."
    )
    calls = figure("layer-norm-columns-call", "H100")
    ours, unchecked, gathered = (
        f"{calls.us(way, 2048):.0f} µs"
        for way in ("triton", "unchecked", "rows")
    )
    yield (
        f"On two H100s a call takes {ours} at 2048 columns, {unchecked} "
        f"without the comparison, and {gathered} with gathered rows."
    )


def CLAIMS(figure):
    for claims in (
        of_two_kernels,
        of_columns_forward,
        of_columns_backward,
        of_rows,
        of_calls,
        of_the_ladder,
        on_the_other_card,
    ):
        yield from claims(figure)


# Numbers with a unit that nothing has measured, and why they are right.
LINK = 450e9  # bytes a second in each direction, by the data sheet
GATHERED = 4096 * 16384 * 2  # bytes that a rank receives at 32768 columns
FACTS = {
    f"sends {32768 // 1024} times as much": "the widths of that sentence",
    "An H200 has 60 MB of it": "what torch says",
    f"4096 columns in 16 bits are {4096 * 4096 * 2 >> 20} MB": "a matrix",
    f"8192 columns are {4096 * 8192 * 2 >> 20} MB": "a matrix",
    "carry 450 GB/s in each direction by the data sheet": "half of 900 GB/s",
    f"a rank receives {GATHERED / 1e6:.0f} MB.": "one matrix of the other",
    f"takes {GATHERED / LINK * 1e6:.0f} µs at least": "what NVLink carries",
    f"all {2 * GATHERED / 1e6:.0f} MB are read": "that of both ranks",
    f"half as much, {GATHERED / 2e6:.0f} MB": "half of the rows",
    f"{GATHERED / 1e6:.0f} MB at 32768 columns": "x of a rank",
    f"at 450 GB/s takes {2 * 32768 * 4 / LINK * 1e6:.1f} µs": "two sums",
    f"It sends {GATHERED / 2e6:.0f} MB there": "half of the rows",
    f"{GATHERED / 2e6:.0f} MB back": "half of the rows",
    f"It sends {GATHERED / 1e6:.0f} MB, and": "one matrix of the other",
}

CPU = pytest.mark.cpu
GPUS = pytest.mark.gpu
HALF, SINGLE = torch.float16, torch.float32
ON_GPU = torch.cuda.is_available()
WORLDS = (1, 2, 3)
LIMITS = {SINGLE: 1e-6, HALF: 2**-11, torch.bfloat16: 2**-8}
if ON_GPU:
    WORLDS = [n for n in (2, 4, 8) if n <= torch.cuda.device_count()]
else:
    # The interpreter cuts bfloat16, and does not round it.
    LIMITS[torch.bfloat16] = 2**-7
EACH = pytest.mark.parametrize("shard", several.SHARDS)


@CPU  # with the compiler of the X-rays
def test_how_much_is_in_flight(launches, output):
    """Registers, programs and bytes of rows that a multiprocessor has at a
    time, as planned and with sixteen warps, as the page says."""
    from compiled.aot import Call
    from compiled.occupancy import occupancy

    given = {"M": 4096, "dtype": "bfloat16"}
    widths = 4096, 8192, 16384, 32768
    plans = [(N, warps) for N in widths for warps in (0, 16)]
    calls = [
        Call(several.NAME, whole_rows, given | {"N": N, "warps": warps})
        for N, warps in plans
    ]
    programs, registers = {}, {}
    for plan, (built,) in zip(plans, launches(calls), strict=True):
        warps, *_ = occupancy(
            "sm_90", built.registers, built.shared, built.num_warps
        )
        programs[plan] = warps // built.num_warps
        registers[plan] = built.registers
    print(programs, registers)
    said = output.partition("as planned: programs")[2].splitlines()[1:5]
    found = [tuple(map(int, line.split())) for line in said]
    assert found == [
        (
            N,
            programs[N, 0],
            programs[N, 0] * N * 2 // 1024,
            programs[N, 16],
            programs[N, 16] * N * 2 // 1024,
        )
        for N in widths
    ]
    text = " ".join(tutorial.source(several.NAME).replace("#", "").split())
    few, many = registers[16384, 16], registers[16384, 0]
    each = -(-few // 8) * 8
    assert f"takes {few} registers then" in text
    assert f"take 512 · {each} = {512 * each} of the 65536" in text
    assert f"as many columns, and takes {many} registers" in text


@pytest.fixture(scope="module", params=WORLDS)
def ranks(request):
    found = several.run(request.param, several.everything)
    for said in found:
        assert isinstance(said, dict), said
    return found


def test_all_results(ranks):
    for found in ranks:
        for case, (ours, _, _) in found["errors"].items():
            if case[1] != "mean":
                assert max(ours) <= LIMITS[case[-1]], case


@EACH
def test_a_mean_of_10000(ranks, shard):
    """At most twice the error of PyTorch's on one rank, over all results."""
    pairs = (found["errors"][shard, "mean"][:2] for found in ranks)
    ours, theirs = (
        torch.tensor(errors).square().mean()
        for errors in zip(*pairs, strict=True)
    )
    assert ours <= 4 * theirs


def test_the_same_bits_on_all_ranks(ranks):
    for case in ranks[0]["errors"]:
        bits = {tuple(found["errors"][case][2]) for found in ranks}
        assert len(bits) == 1, case


@GPUS
@EACH
def test_the_same_bits_100_times(ranks, shard):
    assert [found["bits", shard] for found in ranks] == [1] * len(ranks)


@GPUS
@EACH
def test_graphs(ranks, shard):
    assert all(found["graphs", shard] for found in ranks)


def test_peers_compute_the_same(ranks):
    """DTensor where it runs; where not, it says why."""
    for found in ranks:
        for peers in found["peers"], found.get("wide peers", {}):
            for way, errors in peers.items():
                if way == "dtensor" and isinstance(errors, str):
                    continue
                assert max(errors) < 1e-6, (way, errors)


WRONG_PEERS = {
    "rows that stay": (
        "dx = to_columns(some_dx, group)",
        "dx = some_dx.view(len(x), -1)",
    ),
    "sums of some rows": (
        "        dist.all_reduce(sums, group=group)\n        return dx, sums",
        "        return dx, sums",
    ),
    "rows side by side": (
        "    return torch.cat(parts.unbind(), dim=-1)\n\n\ndef to_columns",
        "    return parts.reshape(parts.shape[1], -1)\n\n\ndef to_columns",
    ),
    "columns of others": (
        "parts = torch.stack(tensor.chunk(group.size(), dim=-1))",
        "parts = torch.stack(tensor.chunk(group.size(), dim=-1)[::-1])",
    ),
}


@CPU
@pytest.mark.parametrize("name", WRONG_PEERS)
def test_a_wrong_peer_is_found(name, monkeypatch):
    monkeypatch.setattr(several, "LIMIT", 20)
    replace = (WRONG_PEERS[name],)
    for found in several.run(2, several.peers, 6, 24, replace=replace):
        assert isinstance(found, dict), found
        assert max(found["exchanged"]) > 1e-3
        assert max(found["gathered"]) < 1e-6


class MadeUpTime:
    """Stands for CUDA: what is done takes the µs that it says."""

    def __init__(self):
        self.now = 0.0
        self.recording = None
        self.meetings = 0
        made_up = self

        class Graph:
            def __init__(self):
                self.spent = []

            def replay(self):
                made_up.now += sum(self.spent)

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                self.at = made_up.now

            def elapsed_time(self, end):
                return (end.at - self.at) / 1000

        self.CUDAGraph, self.Event = Graph, Event

    def spend(self, us):
        if self.recording is None:
            self.now += us
        else:
            self.recording.append(us)

    @contextlib.contextmanager
    def graph(self, graph, stream, capture_error_mode):
        assert capture_error_mode == "thread_local"
        self.recording = graph.spent
        yield
        self.recording = None

    def meet(self, tensor, group):
        self.meetings += 1
        self.spend(12)


@CPU
def test_the_clock_of_a_rank_subtracts_all_but_the_call(monkeypatch):
    """And all calls meet as often: ranks that did not would wait forever."""
    page, meetings = several.loaded(), set()
    for us in 0, 5, 4000:
        cuda = MadeUpTime()
        for name in "CUDAGraph", "Event", "graph":
            monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(
            torch.Tensor, "zero_", lambda t, cuda=cuda: cuda.spend(70)
        )
        monkeypatch.setattr(dist, "all_reduce", cuda.meet)
        call = functools.partial(cuda.spend, us)
        found = page.time_together(lambda: call, None)  # noqa: B023
        assert found == pytest.approx(3 * [us], abs=1e-3)
        meetings.add(cuda.meetings)
    assert len(meetings) == 1


@CPU
@pytest.mark.parametrize("busy_for", [3, 7, 120, 240])
def test_calls_on_the_host_take_turns(monkeypatch, busy_for):
    """A host that is busy half of the time, for some batches or for whole
    rounds, changes nothing."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(dist, "all_reduce", lambda meeting, group: None)
    clock = {"now": 0.0}
    monkeypatch.setattr(time, "perf_counter", lambda: clock["now"])
    calls_made = itertools.count()

    def call(us):
        batches = next(calls_made) // 5
        busy = 3 if batches // busy_for % 2 else 1
        clock["now"] += busy * us * 1e-6

    calls = {
        "one": functools.partial(call, 40.0),
        "twice as long": functools.partial(call, 80.0),
    }
    found = several.loaded().time_in_turns(calls, None)
    assert next(calls_made) == 16 * 150 * 2 * len(calls)
    assert list(found) == list(calls)
    one, other = found.values()
    assert one == pytest.approx(3 * [40])
    assert other == pytest.approx(3 * [80])


@CPU
def test_a_round_that_nobody_repeats_shows(monkeypatch):
    """One round that is faster than all others, and the band up to them."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(dist, "all_reduce", lambda meeting, group: None)
    clock = {"now": 0.0}
    monkeypatch.setattr(time, "perf_counter", lambda: clock["now"])
    calls_made = itertools.count()

    def call():
        fast = next(calls_made) // 300 == 7
        clock["now"] += 40e-6 if fast else 60e-6

    found = several.loaded().time_in_turns({"one": call}, None)
    assert found["one"] == pytest.approx((40, 40, 60))


@CPU
def test_garbage_is_collected_again(monkeypatch):
    """Also if a call fails."""
    page = several.loaded()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(dist, "all_reduce", lambda meeting, group: None)
    seen = set()

    def call():
        seen.add(gc.isenabled())
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        page.time_in_turns({"one": call}, None)
    assert seen == {False}
    assert gc.isenabled()


@CPU
@pytest.mark.parametrize(
    ("cores", "world", "expected"),
    [
        (range(8), 2, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ([1, 3, 5, 7, 9], 2, [[1, 3], [5, 7]]),
        (range(3), 2, [None, None]),  # too few to share
    ],
)
def test_each_rank_keeps_to_its_own_cores(monkeypatch, cores, world, expected):
    page = several.loaded()
    kept = {}
    monkeypatch.setattr(page, "WORLD", world)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(cores))
    for rank in range(world):
        kept[rank] = None
        monkeypatch.setattr(
            os,
            "sched_setaffinity",
            lambda _, some, rank=rank: kept.update({rank: list(some)}),
        )
        page.keep_to_own_cores(rank)
    assert list(kept.values()) == expected


@GPUS
@pytest.mark.skipif(len(WORLDS) == 0, reason="there is one GPU, not two")
def test_the_clock_of_a_rank():
    """Nothing takes no time, a copy as long as by the clock of one GPU, and
    all ranks wait for the slowest."""
    ranks = several.run(2, several.seconds)
    page = several.loaded()
    alone = page.device_time(lambda: several.copying(page))[0]
    for found in ranks:
        assert isinstance(found, dict), found
        assert -1 <= found["nothing"] <= 2
        assert abs(found["copy"] - alone) <= 0.05 * alone + 1
        assert found["uneven"] >= 2 * found["copy"]


ROUGH = "mean = tl.sum(x) / max(N, 1)", "mean = tl.sum(x) / max(N, 1) * {}"


def at_10000(page):
    given = {"how": "uneven", "M": 5, "N": 20, "mean": 1e4}
    return {
        shard: several.errors(page, shard, **given) for shard in several.SHARDS
    }


@CPU
@pytest.mark.parametrize("ulps", [-2, 2])
def test_a_division_as_rough_as_on_a_gpu(ulps):
    """There ``/`` may be off by two units of the last digit."""
    replace = ((ROUGH[0], ROUGH[1].format(1 + ulps * 2**-23)),)
    for found in several.run(2, at_10000, replace=replace):
        assert isinstance(found, dict), found
        for ours, theirs, _ in found.values():
            ours, theirs = map(torch.tensor, (ours, theirs))
            assert ours.square().mean() <= 4 * theirs.square().mean()


def arguments(page):
    """Weights that are missing, gradients that nobody wants, dimensions."""
    x, w, b, dy = several.inputs(page, 4, 6)
    for shard in several.SHARDS:
        for given in (None, None), (w, None), (None, b):
            part = [
                t if t is None else several.cut(t, shard, "uneven")
                for t in (x, *given, dy)
            ]
            leaf = part[0].clone().requires_grad_()
            shape = leaf.shape[1:]
            y = page.layer_norm(leaf, shape, *part[1:3], shard=shard)
            (dx,) = torch.autograd.grad(y, leaf, part[3])
            there = x.double().requires_grad_()
            wide = [None if t is None else t.double() for t in given]
            expected = torch.nn.functional.layer_norm(there, (6,), *wide)
            (exact,) = torch.autograd.grad(expected, there, dy.double())
            for found, value in (y, expected), (dx, exact):
                value = several.cut(value, shard, "uneven")
                assert several.relative(found, value) < 1e-6
    x = torch.randn(2, 3, 2, 4).transpose(0, 1)
    y = page.layer_norm(x, (2, 4))
    torch.testing.assert_close(y, torch.nn.functional.layer_norm(x, (2, 4)))
    return True


def promises(page):
    """What uses a gradient waits for it; nobody must ask."""
    x, w, b, dy = several.inputs(page, 4, 6)
    w, b = (torch.nn.Parameter(t) for t in (w, b))
    page.layer_norm(x[dist.get_rank() :: 2], 6, w, b).backward(dy[:2])
    kind = type(w.grad).__name__
    torch.optim.SGD([w, b], lr=1.0).step()
    return kind, w.detach().tolist()


def subgroups(page):
    """The first two of three ranks; the third has one of its own."""
    pair, alone = dist.new_group([0, 1]), dist.new_group([2])
    group = alone if dist.get_rank() == 2 else pair
    x, w, b, dy = several.inputs(page, 4, 6)
    given = [t.detach().clone().requires_grad_() for t in (x, w, b)]
    y = page.layer_norm(given[0], 6, *given[1:], group=group)
    return torch.autograd.grad(y, given[2], dy)[0].tolist(), dy.sum(0).tolist()


def of_two(page):
    return (
        arguments(page),
        promises(page),
        several.bits(page, "rows", 6, 44, 9),
    )


@CPU
def test_arguments_promises_and_bits():
    for found in several.run(2, of_two):
        assert isinstance(found, tuple), found
        right, (kind, stepped), different = found
        assert right and different == 1
        assert kind == "AsyncCollectiveTensor"
        assert isinstance(stepped[0], float)


@CPU
def test_a_group_is_some_of_the_ranks():
    for rank, (db, one) in enumerate(several.run(3, subgroups)):
        times = 1 if rank == 2 else 2
        torch.testing.assert_close(torch.tensor(db), times * torch.tensor(one))


# Taken on each, and not alike.
DIFFERENT = (
    {"x": torch.Tensor.half},
    {"weight": torch.Tensor.half},
    {"weight": None},
    {"bias": lambda t: t.requires_grad_()},
    {"eps": 1e-3},
    {"shard": "columns"},
    {"all": "columns", "x": lambda t: t[:3]},
    {"all": "columns", "weight": torch.Tensor.half},
    {"all": "columns", "x": torch.Tensor.half},
)
# Not taken on one, or not even described; then on both.
REFUSED = (
    {"bias": lambda t: t[:7]},
    {"x": lambda t: t[:, :7]},
    {"x": torch.Tensor.int},
    {"x": torch.Tensor.double},
    {"x": lambda t: t.to("meta")},
    {"x": None},
    {"weight": "ones"},
    {"normalized_shape": (2, 4)},
    {"normalized_shape": ()},
    {"normalized_shape": "8"},
    {"normalized_shape": (4, 2, 4, 8)},
    {"shard": "row"},
    {"eps": -1e-5},
    {"eps": float("nan")},
    {"on": "all", "eps": -1e-5},
    {"on": "all", "x": None},
    {"on": "all", "x": torch.Tensor.double},
    {"on": "all", "shard": "row"},
)


@CPU
def test_ranks_that_disagree():
    """An error on each, that names the rank and what it has."""
    found = several.run(2, several.disagree, *DIFFERENT, *REFUSED)
    said = zip(DIFFERENT + REFUSED, *found, strict=True)
    for change, mine, theirs in said:
        assert mine == theirs
        rank = 0 if change.get("on") == "all" else 1
        assert mine.startswith(f"ValueError: rank {rank} has {{")
        end = ", rank 0 {" if change in DIFFERENT else "}; taken are "
        assert end in mine
    assert "torch.float64" in found[0][-2]


@GPUS
@pytest.mark.skipif(len(WORLDS) == 0, reason="there is one GPU, not two")
def test_gpus_that_disagree():
    changes = (
        {"x": torch.Tensor.half},
        {"weight": None},
        {"shard": "columns"},
        {"eps": 1e-3},
        {"x": functools.partial(torch.Tensor.to, device="cuda:0")},
        {"weight": functools.partial(torch.Tensor.to, device="cuda:0")},
    )
    found = several.run(2, several.disagree, *changes)
    for mine, theirs in zip(*found, strict=True):
        assert mine == theirs
        assert mine.startswith("ValueError: rank 1 has {")
    assert all("which is not its GPU" in said for said in found[0][-2:])


MUTANTS = {
    "no sum over ranks": (
        'functional.all_reduce(sums, "sum", ctx.group)', "sums"
    ),
    "a mean in place of the sum": ('(sums, "sum", ctx.group)',
                                   '(sums, "avg", ctx.group)'),
    "parts count alike": ("share = COUNTS[rank] / max(n + COUNTS[rank], 1)",
                          "share = 1 / (rank + 1)"),
    "M2 without the distance": ("tl.load(part_ptr + M) + d * d * n * share",
                                "tl.load(part_ptr + M)"),
    "the columns of a rank": ("total = sum(counts)", "total = N"),
    "row sums of a rank": ("dist.all_reduce(c, group=group)", "pass"),
    "a rank whose dx has its own columns": ("TOTAL=total", "TOTAL=N"),
    "one rank's part": ("parts = gathered(parts, group)",
                        "parts = torch.stack([parts] * len(counts))"),
    "one number short": ("tl.store(c_ptr + M + row, tl.sum(wdy))", "pass"),
    "idle lanes": ("tl.where(tl.arange(0, BLOCK) < N, x - mean, 0)",
                   "x - mean"),
    "no call without rows": ("if any(ctx.needs",
                             "if len(x) and any(ctx.needs"),
}  # fmt: skip


@CPU
@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_fail(name, monkeypatch):
    monkeypatch.setattr(several, "LIMIT", 5)  # where one waits for another
    found = several.run(2, several.judge, replace=(MUTANTS[name],))
    assert any(said is not None for said in found)


@CPU
def test_no_mutant_passes():
    assert several.run(2, several.judge) == [None, None]


@CPU
def test_a_rank_that_dies_ends_all(capfd):
    """One has rows of another size; it says so, and nobody waits for it."""
    one = "for tensor in (x, w, b, dy)]\n    wide"
    other = one.replace("(x,", "(x[:, dist.get_rank() :],")
    bad = tutorial.load(several.NAME, [(one, other)])
    start, ranks = time.monotonic(), bad.Ranks()
    with pytest.raises(RuntimeError, match="a rank has ended"):
        ranks(bad.errors, "rows", 4, 8, 0)
    for process in ranks.all:
        assert process.wait(30)
    assert time.monotonic() - start < 90
    assert "[rank1]: Traceback" in capfd.readouterr().err


def test_a_rank_reads_whole_files(tmp_path, monkeypatch):
    """However many definitions a notebook adds, and however often it calls:
    what has a file's name has all of it, from the first to the last moment."""
    page = several.loaded()
    cells = ["".join(inspect.findsource(page.join)[0])]
    shell = types.SimpleNamespace(user_ns={"In": cells})
    monkeypatch.setattr(builtins, "get_ipython", lambda: shell, raising=False)
    seen, partial, done = set(), set(), threading.Event()

    def read():
        while not done.is_set():
            for file in tmp_path.glob("page_*.py"):
                text = file.read_text()
                seen.add(text)
                if "def last" not in text:
                    partial.add((file.name, len(text)))

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for number in range(5):
            cells[1:] = [f"def last(): return {number}"]
            names = {page.written(tmp_path) for _ in range(5)}
            assert len(names) == 1
    finally:
        done.set()
        reader.join()
    assert seen and not partial
    assert len(list(tmp_path.glob("page_*.py"))) == 5


def test_a_tensor_of_another_gpu_is_refused(monkeypatch):
    page = several.loaded()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    here, there, host = (
        types.SimpleNamespace(is_cuda=kind == "cuda", device=device)
        for kind, device in (
            ("cuda", torch.device("cuda", 1)),
            ("cuda", torch.device("cuda", 0)),
            ("cpu", torch.device("cpu")),
        )
    )
    found = [page.elsewhere(t) for t in (here, there, host)]
    assert found == [False, True, False]
    monkeypatch.setattr(page, "elsewhere", lambda t: t.dim() == 1)
    x, w = torch.ones(2, 4), torch.ones(4)
    fits, has = page.described(x, 4, w, None, 1e-5, "rows")
    assert not fits
    assert has["weight"].endswith(", which is not its GPU")
    assert has["x"] == "torch.float32 on cpu"


@CPU
def test_some_ranks_are_timed_and_the_others_wait():
    """Of two by two of three, and all ways of a figure run."""
    for rank, found in enumerate(several.run(3, several.timed, (2,))):
        assert isinstance(found, dict), found
        assert all((took is None) == (rank == 2) for took in found.values())
        assert found[2, "one"] in (None, (2, 1, 3))


@CPU
@pytest.mark.long
@pytest.mark.parametrize("world", [4, 8])
def test_more_ranks(world):
    assert several.run(world, several.judge) == world * [None]


@CPU
@pytest.mark.long
@pytest.mark.parametrize("world", [4, 8])
def test_more_ranks_are_timed(world):
    counts = [count for count in (2, 4, 8) if count <= world]
    for rank, found in enumerate(several.run(world, several.timed, counts)):
        assert isinstance(found, dict), found
        for (ranks, *_), took in found.items():
            assert (took is None) == (rank >= ranks)


@pytest.mark.long
def test_torchrun_says_the_same(tmp_path, output):
    from alone import NO_GPU

    script = shutil.copy(tutorial.script_of(several.NAME), tmp_path)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*launcher, "--nproc-per-node", "2", script],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | NO_GPU,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == output


def test_script_runs_alone(output):
    assert output.count("Timing needs a GPU") == 1
    assert output.count("Timing needs two GPUs") == 4
    lines = output.splitlines()
    assert sum("errors below" in line for line in lines) == 4


def test_sum_or_mean(output):
    found = {
        line.partition(":")[0]: line.rpartition(": ")[2]
        for line in output.splitlines()
        if ": dw over" in line
    }
    assert found.pop("nobody adds") not in found.values()
    assert found == {
        "DDP": "[1.0, 1.0, 1.0]",
        "ours": "[2.0, 2.0, 2.0]",
        "ours in DDP": "[2.0, 2.0, 2.0]",
    }


def test_our_example(output):
    """By hand: 1, 3, 1, 3 and 5, 7, 5, 7."""
    for line in (
        "variance: 1.0",
        "from sums of squares: 0.0",
        "merged: 4.0 5.0",
        "of the whole row: 4.0 5.0",
        "the same y: True",
    ):
        assert line in output.splitlines()
    assert output.count("it finds mean 4.0 and variance 5.00") == 2
    assert "rank 0 holds [1.0, 3.0, 1.0, 3.0] and sends [2.0, 4.0]" in output
    assert "rank 1 holds [5.0, 7.0, 5.0, 7.0] and sends [6.0, 4.0]" in output


def test_exercise_1(output):
    stub, solution = (
        float(line.rpartition(" ")[2])
        for line in output.splitlines()
        if line.startswith("the worst element of RMS norm")
    )
    assert stub > 0.1
    assert solution < 1e-5


def test_exercise_2(output):
    stub, solution = (
        line.rpartition(": ")[2]
        for line in output.splitlines()
        if line.startswith("dw over what it should be")
    )
    assert (stub, solution) == ("[2.0, 2.0, 2.0]", "[1.0, 1.0, 1.0]")
