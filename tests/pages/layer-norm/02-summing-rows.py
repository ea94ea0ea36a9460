"""What must hold of the page "Weight gradients: who adds up the rows?"."""

import functools
import math
import re

import pytest
import torch

from compiled.declared import Kernel, Kernels
from conformance import LayerNorm, Page, below_zero, too_wide
from conformance.layer_norm import full_size
from measurements.figure import Measured, series


def run(page, M, N, dtype):
    x, w, b, dy = (t.detach() for t in page.inputs(M, N, dtype))
    mean, rstd = torch.empty(2, M, device=page.DEVICE)
    for name in "columns", "split", "atomics", "triton":
        page.DESIGNS[name](dy, x, w, mean, rstd, dtype)
    page.layer_norm(x, (N,), w, b)


def also(page, M, N, dtype):
    tensors = page.given(10, 24, torch.float32)
    for keep in (
        page._store,
        page._atomic_add,
        page._add_to_few,
        page._add_to_few_1,
    ):
        page.by_rows(*tensors, 6, 4, torch.empty(3, 2, 24), keep)
    x, *_ = page.inputs(M, N, dtype)
    for reads in 1, 2:  # the ceilings
        page._move[(M,)](x, x, M * N // 2, reads, 1, BLOCK_SIZE=4096)


PUBLISHED = "2026-11-22"

KERNELS = Kernels(
    run=run,
    also=also,
    M=4096,
    N=[4096],
    dtype="float16",
    sizes={
        "float16": [1024, 1536, 4096, 4608, 8192, 8704, 12288],
        "bfloat16": [4096],
        "float32": [1024, 4096],
    },
    kernels={
        "_layer_norm_bwd": Kernel(
            look="""
            Shown with a buffer for each program.
            The loop loads ``x``, ``dy`` and ``w`` by 16 bytes and stores
            ``dx``; the two sums stay in registers and are stored once, after
            it.
            """,
            true=lambda code: [
                code.count("atomic") == 0,
                code.loaded >= 3 * 2 * 4096,
            ],
            narrow_loads=2,  # mean and rstd
        ),
        "_layer_norm_bwd_columns": Kernel(
            look="""
            Shown split over rows.
            A warp reads a few rows of 32 columns, and threads add up the rows
            of a tile only at the end: look for the shuffles after the loop.
            """,
            true=lambda code: [
                code.count("load", 16) > 0 or code.amd,
                code.count("shuffle") > 0,
            ],
            narrow_loads=64,  # mean and rstd of the rows of a tile
            narrow_stores=2,  # one column a thread
        ),
        "_layer_norm_bwd_add_up": Kernel(
            look="""
            16 columns of all buffers a program: 64 bytes side by side, by 16
            bytes.
            """,
            true=lambda code: [
                code.count("load", 16) > 0,
                code.narrow("load") == 0,
            ],
            narrow_loads=1,  # of few buffers
            narrow_stores=1,  # of 16 columns
        ),
        "_layer_norm_fwd": Kernel(
            look="``x``, ``w`` and ``b`` are read once, all by 16 bytes.",
            true=lambda code: [
                code.loaded == 3 * 2 * 4096,
                code.narrow("load") == 0,
            ],
            narrow_stores=2,  # mean and rstd
        ),
    },
)


WIDE = [512 * i for i in (2, 4, 8, 12, 16, 24)]
# The shares that the count allows: a test compares them with what is printed.
COUNTED = {
    "columns": 60,
    "triton": [66, 74, 80, 85, 92, 92],
    "atomics": [85, 85, 89, 92, 96, 96],
    "rows": 43,
}
COUNT = "what the page counts and prints; a test compares them with COUNTED"
FACTS = {
    f"**Columns** could reach {COUNTED['columns']}%": COUNT,
    f"could reach {series(COUNTED['triton'][:4], '%')} up to 6144": COUNT,
    f"8192 and 12288 columns they could reach {COUNTED['triton'][4]}%": COUNT,
    f"**Atomics, rows** could reach {COUNTED['rows']}%": COUNT,
    f"A little more than {COUNTED['rows']}% is possible": COUNT,
    "**Atomics** could reach "
    f"{COUNTED['atomics'][0]}% to {COUNTED['atomics'][-1]}%": COUNT,
    f"could not reach more than {COUNTED['columns']}% either": COUNT,
}
CARDS = "H100", "H200"
COPIES = {"layer-norm-rows-sums": (1, 1)}
# What our rules start on each multiprocessor, of those that were tried.
OURS = {
    ("buffers", 4096): 3,
    ("atomics", 4096): 3,
    ("split", 4096): 8,
    ("buffers", 1024): 6,
    ("atomics", 1024): 4,
    ("split", 1024): 4,
}


def on_the_other_card(figure):
    """What the H200 shows; each order that the H100 has and it has not."""
    names = "sums", "programs", "designs"
    sums, programs, designs = (
        figure(f"layer-norm-rows-{name}", "H200") for name in names
    )
    sums_h100, _, designs_h100 = (
        figure(f"layer-norm-rows-{name}", "H100") for name in names
    )

    yield (
        f"On the H200, columns reach {sums.share('columns', 1024)}% of a copy "
        f"at 1024 columns and {sums.share('columns', 12288)}% at 12288 "
        f"columns. Split columns reach {sums.share('split', 1024)}% and "
        f"{sums.share('split', 12288)}%, and PyTorch's sums "
        f"{sums.share('torch', 1024)}% and {sums.share('torch', 12288)}%."
    )
    for N in WIDE:
        assert sums.ratio("split", "torch", N) > 1.01, N
        assert (sums.ratio("torch", "columns", N) > 1) == (N <= 6144), N
    # As much is requested, and the copy is faster.
    yield (
        f"At 1024 columns, our sums by columns run at "
        f"{sums.median('columns', 1024)} GB/s on the H200 and at "
        f"{sums_h100.median('columns', 1024)} GB/s on the H100. But the copy "
        "is "
        f"{sums.median('copy', 1024) / sums_h100.median('copy', 1024):.1f} "
        "times as fast on the H200,"
    )
    columns, split = (
        [sums.share(name, N) for N in (4096, 6144)]
        for name in ("columns", "split")
    )
    assert columns[1] < columns[0] and split[1] < split[0] - 3
    yield (
        f"On the H200, columns go from {columns[0]}% to {columns[1]}% there, "
        f"and split columns fall from {split[0]}% to {split[1]}%."
    )

    def started(design, N, count):
        return programs.median(f"{design}, {N}", count)

    best = {
        one: max(programs.medians[", ".join(map(str, one))].values())
        for one in OURS
    }
    off = {one: best[one] / started(*one, OURS[one]) - 1 for one in OURS}
    assert sum(each > 0 for each in off.values()) == 1
    assert best["buffers", 1024] == started("buffers", 1024, 8)
    yield (
        "On the H200, a single other number is faster, by "
        f"{Measured(100 * off['buffers', 1024], '.1f')}%: at 1024 columns, "
        f"eight programs for buffers reach {started('buffers', 1024, 8)} "
        f"GB/s, and six reach {started('buffers', 1024, 6)} GB/s."
    )
    three, four, six = (started("atomics", 4096, n) for n in (3, 4, 6))
    assert three > four > six > 0.95 * four
    yield (
        f"On the H200, atomics are not back either: they reach {three} GB/s "
        f"with three programs, {four} with four and {six} with six."
    )

    def shares(provider):
        found = designs.shares(provider)
        return f"{found.least}% to {found.most}%"

    assert designs.ratios("triton", ["columns", "split"]).least > 1
    assert designs.ratios("triton", ["torch", "torch.compile"]).least > 1
    over_torch = designs.ratios("triton", "torch")
    over_compiled = designs.ratios("triton", "torch.compile")
    yield (
        f"On the H200, buffers reach {shares('triton')} of the copy, "
        f"atomics {shares('atomics')}, split columns "
        f"{shares('split')}, and columns {shares('columns')}. "
        f"An atomic addition for each row reaches {shares('rows')}, "
        f"and PyTorch {shares('torch')}. "
        f"Buffers are {over_torch.least} to {over_torch.most} "
        f"times as fast as PyTorch, and {over_compiled.least} to "
        f"{over_compiled.most} times as fast as torch.compile."
    )
    medians = designs.medians
    ahead = {
        N: Measured(
            100 * (medians["atomics"][N] / medians["triton"][N] - 1), ".1f"
        )
        for N in WIDE
    }
    assert [N for N in WIDE if ahead[N] > 0] == [6144, 8192, 12288]
    yield (
        "Atomics are slower than split columns at 1024 columns, and "
        "ahead of buffers only from 6144 columns on, by at most "
        f"{max(ahead.values())}%."
    )
    # The H100 has the first of these two at 2048 columns as well.
    assert designs.ratio("split", "atomics", 1024) > 1.1
    assert designs.ratio("torch.compile", "columns", 12288) > 1.03
    assert (
        designs.between(0, 8192).ratios("columns", "torch.compile").least > 1
    )
    compiled = 100 * (
        medians["torch.compile"][12288] / medians["split"][12288] - 1
    )
    yield (
        "On that card, torch.compile beats columns at 12288 columns alone, "
        f"where it is also {Measured(compiled, '.0f')}% faster than split "
        "columns."
    )
    assert designs.ratios("torch", "rows").least > 1.05
    assert designs.ratios("torch.compile", "rows").least > 1.05

    reached = [designs.share("triton", N) for N in WIDE]
    assert all(
        ours < designs_h100.share("triton", N)
        for N, ours in zip(WIDE, reached, strict=True)
    )
    yield (
        f"On the H200, buffers reach {series(reached[:4], '%')} up to 6144 "
        f"columns, and {series(reached[4:], '%')} at 8192 and 12288."
    )
    ours, before = (
        [of.us("rows", N, 3) for N in (1024, 12288)]
        for of in (designs, designs_h100)
    )
    for new, old in zip(ours, before, strict=True):
        assert 0.9 < new / old < 1.1
    yield (
        "An addition for each row takes about as long on both cards, "
        f"{ours[0]:.0f} µs on the H200 and {before[0]:.0f} µs on the H100 at "
        f"1024 columns, and {ours[1]:.0f} µs and {before[1]:.0f} µs at 12288:"
    )
    yield (
        f"At 4096 columns it even takes {designs.us('rows', 4096, 3):.0f} µs "
        f"on the H200 and {designs_h100.us('rows', 4096, 3):.0f} µs on the "
        "H100,"
    )


def CLAIMS(figure):
    yield from on_the_other_card(figure)
    sums, programs, designs = (
        figure(f"layer-norm-rows-{name}", "H100")
        for name in ("sums", "programs", "designs")
    )
    dram, bits = (
        [figure(f"layer-norm-rows-{name}", card).medians for card in CARDS]
        for name in ("dram", "bits")
    )
    # Split columns win everywhere; without the split PyTorch does, up to 8192.
    for N in WIDE:
        assert sums.ratio("split", "torch", N) > 1.01, N
        assert N > 8192 or sums.ratio("torch", "columns", N) > 1, N
    yield (
        f"On the H100, columns reach {sums.share('columns', 1024)}% of a copy "
        f"at 1024 columns and {sums.share('columns', 12288)}% at 12288 "
        f"columns. Split columns reach {sums.share('split', 1024)}% and "
        f"{sums.share('split', 12288)}%, and PyTorch's sums "
        f"{sums.share('torch', 1024)}% and {sums.share('torch', 12288)}%."
    )
    # The more is requested at a time, the faster.
    by_columns = [sums.share("columns", N) for N in WIDE]
    speeds = [sums.median("columns", N) for N in WIDE]
    assert speeds == sorted(speeds) and by_columns == sorted(by_columns)
    yield (
        "Columns request 4, 8, 16, 23, 31 and 47 KB on an SM, and reach "
        f"{series(by_columns, '%')} of a copy."
    )
    yield (
        f"the sums are {sums.ratio('split', 'columns', 1024)} times as fast."
    )
    yield (
        "yet their share rises from "
        f"{sums.share('split', 2048)}% to {sums.share('split', 8192)}%."
    )
    assert sums.share("split", 8192) > 1.2 * sums.share("split", 2048)
    # What that does not explain.
    step = {
        name: [sums.share(name, N) for N in (4096, 6144)]
        for name in ("columns", "split", "torch")
    }
    assert all(abs(after - before) <= 2 for before, after in step.values())
    columns, split, pytorch = (
        f"from {before}% to {after}%" for before, after in step.values()
    )
    yield (
        "Between 4096 and 6144 columns the shares hardly change: columns go "
        f"{columns}, split columns {split}, and PyTorch's sums {pytorch}."
    )
    yield (
        "At 2048 columns everything takes "
        f"{sums.us('split', 2048, 2)} µs, and at 8192 columns "
        f"{sums.us('split', 8192, 2)} µs."
    )

    # Each rule is within 3% of the best number.
    for (design, N), ours in OURS.items():
        speeds = programs.medians[f"{design}, {N}"]
        assert speeds[ours] >= 0.97 * max(speeds.values()), (design, N)

    def of_rule(design, N):
        return programs.median(f"{design}, {N}", OURS[design, N])

    def at_best(design, N):
        return max(programs.medians[f"{design}, {N}"].values())

    ahead = max(at_best(*one) / of_rule(*one) - 1 for one in OURS)
    yield f"none of the other numbers is more than {100 * ahead:.1f}% faster."
    buffers, atomics, split = (
        of_rule(design, 4096) for design in ("buffers", "atomics", "split")
    )
    yield (
        f"which reach {buffers} and {atomics} GB/s, and eight for split "
        f"columns, which reach {split} GB/s."
    )
    buffers, atomics, split = (
        of_rule(design, 1024) for design in ("buffers", "atomics", "split")
    )
    yield (
        f"they start six for buffers, which reach {buffers} GB/s, and four "
        f"for atomics and for split columns, which reach {atomics} and "
        f"{split} GB/s."
    )

    def started(design, N, count):
        return programs.median(f"{design}, {N}", count)

    # More programs help up to the rules' numbers. At 4096 columns, a fourth
    # program is nearly alone, and six run in two rounds.
    for (design, N), ours in OURS.items():
        if (design, N) != ("split", 4096):
            found = programs.medians[f"{design}, {N}"].items()
            rising = [speed for count, speed in found if count <= ours]
            assert rising == sorted(rising), (design, N)
    for design in "buffers", "atomics":
        assert started(design, 4096, 4) < 0.95 * started(design, 4096, 3)
    assert started("atomics", 4096, 6) > 1.03 * started("atomics", 4096, 4)
    assert started("buffers", 4096, 6) < started("buffers", 4096, 4)
    yield (
        f"buffers fall to {started('buffers', 4096, 4)} GB/s, and atomics to "
        f"{started('atomics', 4096, 4)} GB/s."
    )
    yield (
        f"Atomics are back at {started('atomics', 4096, 6)} GB/s. Buffers are "
        f"not, with {started('buffers', 4096, 6)} GB/s,"
    )
    eight = started("atomics", 1024, 8)
    assert eight < 0.9 * started("atomics", 1024, 4)
    yield f"with eight, atomics fall to {eight} GB/s,"

    def shares(provider):
        found = designs.shares(provider)
        return f"{found.least}% to {found.most}%"

    # Buffers win over columns everywhere, rows lose to all of ours.
    assert designs.ratios("triton", ["columns", "split"]).least > 1
    assert designs.ratios("triton", ["torch", "torch.compile"]).least > 1
    assert designs.ratios("atomics", "rows").least > 1
    # What is read twice, at all widths.
    assert designs.shares("columns").most <= COUNTED["columns"]
    assert designs.shares("split").most <= COUNTED["columns"]
    # The queue costs more than buffers in narrow rows, and little later.
    assert designs.ratio("triton", "atomics", 1024) > 1
    assert 0.9 < designs.ratio("triton", "atomics", 12288) < 1.1
    yield (
        f"On the H100, buffers reach {shares('triton')} of the copy, "
        f"atomics {shares('atomics')}, split columns "
        f"{shares('split')}, and columns {shares('columns')}. "
        f"An atomic addition for each row reaches {shares('rows')}, "
        f"and PyTorch {shares('torch')}."
    )
    yield (
        f"Buffers are {designs.ratio('triton', 'atomics', 1024)} "
        f"times as fast as atomics at 1024 columns"
    )
    assert 0.97 < designs.ratio("atomics", "split", 1024) < 1.03
    # Atomics are ahead of buffers in wide rows, by less than 5%.
    medians = designs.medians
    for N in 4096, 6144, 8192, 12288:
        assert 1 < medians["atomics"][N] / medians["triton"][N] < 1.05
    over_torch = designs.ratios("triton", "torch")
    over_compiled = designs.ratios("triton", "torch.compile")
    yield (
        f"On the H100, buffers are {over_torch.least} to {over_torch.most} "
        f"times as fast as PyTorch, and {over_compiled.least} to "
        f"{over_compiled.most} times as fast as torch.compile."
    )
    # Where torch.compile wins, and where PyTorch does.
    ahead = designs.ratios("torch.compile", "columns")
    assert [gain > 1 for gain in ahead] == [N in (2048, 12288) for N in WIDE]
    narrow, wide = (100 * (ahead[WIDE.index(N)] - 1) for N in (2048, 12288))
    yield (
        f"it is {narrow:.0f}% faster than columns at 2048 columns and "
        f"{wide:.0f}% at 12288,"
    )
    assert min(narrow, wide) > 3
    ahead = designs.ratios("split", "torch.compile")
    assert (
        all(gain > 1.03 for gain in ahead[:-1]) and abs(ahead[-1] - 1) < 0.01
    )
    ahead = designs.ratios("torch.compile", "rows")
    assert sum(gain > 1 for gain in ahead) == 4
    ahead = designs.ratios("torch", "rows")
    assert [gain > 1 for gain in ahead] == [N <= 2048 for N in WIDE]

    # Beside the count.
    yield (
        f"**Columns** could reach {COUNTED['columns']}%. They reach "
        f"{shares('columns')}, and split columns {shares('split')},"
    )
    counted = COUNTED["triton"]
    reached = [designs.share("triton", N) for N in WIDE]
    for N, most, ours in zip(WIDE, counted, reached, strict=True):
        assert N > 6144 or 0.88 < ours / most < 1.04, "the count explains it"
        assert N <= 6144 or ours / most < 0.95
    yield (
        f"**Buffers** could reach {series(counted[:4], '%')} up to 6144 "
        f"columns. They reach {series(reached[:4], '%')},"
    )
    assert counted[4] == counted[5]
    yield (
        f"At 8192 and 12288 columns they could reach {counted[5]}%, and they "
        f"reach {series(reached[4:], '%')}."
    )
    wide = designs.between(4096).shares("rows")
    assert wide.least / COUNTED["rows"] > 0.85
    assert wide.most / COUNTED["rows"] < 1.1
    assert (
        designs.between(0, 2048).shares("rows").most < 0.75 * COUNTED["rows"]
    )
    yield (
        f"**Atomics, rows** could reach {COUNTED['rows']}%. From 4096 columns "
        f"on they reach {wide.least}% to {wide.most}%. (A little more than "
        f"{COUNTED['rows']}% is possible,"
    )
    assert wide.least == designs.share("rows", 6144)
    yield f"We have not looked into the {wide.least}%, at 6144 columns."
    queue = designs.us("rows", 1024, 3)
    twice = designs.us("rows", 2048, 3)
    assert twice < 1.25 * queue, "nearly as long"
    each = queue / 4096  # µs
    yield (
        f"At 1024 columns they take {queue} µs and at 2048 columns {twice} µs"
    )
    yield f"At 1024 columns, that is one every {1000 * each:.0f} ns."
    fewest, *_, most = COUNTED["atomics"]
    yield (
        f"**Atomics** could reach {fewest}% to {most}%. At 1024 columns they "
        f"reach {designs.share('atomics', 1024)}%."
    )
    yield (
        f"if an addition takes {1000 * each:.0f} ns, the queue takes "
        f"{528 * each:.0f} µs. That is a lot next to the "
        f"{designs.us('copy', 1024, 3)} µs of the whole copy."
    )
    yield (
        f"the copy takes {designs.us('copy', 12288, 3)} µs. There the queue "
        "hardly matters, and atomics reach "
        f"{designs.share('atomics', 12288)}%."
    )
    assert abs(designs.ratio("atomics", "triton", 8192) - 1) < 0.03
    assert designs.share("atomics", 8192) == min(
        designs.between(4096).shares("atomics")
    )
    yield (
        f"At 8192 columns they only reach {designs.share('atomics', 8192)}%,"
    )
    # What is read twice cannot be faster.
    assert designs.shares("torch").most <= COUNTED["columns"]

    # The count is right, and the bits.
    assert dram[0].keys() == dram[1].keys()
    read = [
        Measured(value, ".2f")
        for card in dram
        for medians in card.values()
        for value in medians.values()
    ]
    assert min(read) >= 0.95
    assert max(read) <= 1.05
    yield f"On both cards, all points lie between {min(read)} and {max(read)},"
    for card in bits:
        assert len(card["atomics"]) == 3
        for name in (*REPEATABLE, "torch"):
            assert set(card[name].values()) == {0}
        for name in "atomics", "rows":
            assert set(card[name].values()) == {100}
    yield (
        "On both cards, no run with atomics repeats the first one, at any of "
        "the three widths."
    )

    at_4096 = {
        name: designs.share(name, 4096)
        for name in ("columns", "split", "triton", "atomics", "rows")
    }
    yield f"They reach {at_4096['columns']}%: ``x`` and ``dy`` are read twice"
    yield f"They reach {at_4096['split']}%: there are enough programs"
    yield f"They reach {at_4096['triton']}%, with the same bits every time"
    yield f"They reach {at_4096['atomics']}%, with other bits every time"
    yield f"It reaches {at_4096['rows']}%, because all these bytes"


HALF, SINGLE = torch.float16, torch.float32
at = LayerNorm.at
DESIGNS = ("triton", "columns", "split", "atomics", "rows")
REPEATABLE = ("triton", "columns", "split")


def by(design):
    """Layer norm whose backward pass is of this design."""

    def function(page):
        backward = page.DESIGNS[design]
        return functools.partial(page.layer_norm, backward=backward)

    return function


WIDTHS = (1000, 1024, 1151, 4608, 8192, 16384)
FIRST_TILES = "for start in range(part * ROWS, M, parts * ROWS):"
PAGE = Page(
    __file__,
    LayerNorm(),
    {design: by(design) for design in DESIGNS},
    # A program of the interpreter takes 15 ms. With few programs, parts and
    # rows in a tile, few rows are enough for several turns of every loop.
    quick=(
        ("return min(M, programs_per_sm * NUM_SMS)", "return 4"),
        ("ROWS=128,", "ROWS=8,"),
        ("ROWS=32,", "ROWS=4,"),
        ("return min(max(parts, 4), 16)", "return 2"),
    ),
    cases=(
        *(at(M, N, HALF) for M, N in ((2, 127), (17, 1023), (2, 4608))),
        *(at(M, N, function=f) for M, N in ((18, 3), (0, 9)) for f in DESIGNS),
    ),
    full=full_size(DESIGNS, WIDTHS, WIDTHS),
    mistakes=(
        too_wide(16385, "1 to 16384"),
        *below_zero(),
    ),
    elsewhere="is on cuda:1: not the current one",
    repeatable=REPEATABLE,
    repeated=tuple(
        at(4096, N, HALF, function=design)
        for N in (1024, 4608, 12288)
        for design in REPEATABLE
    ),
    trains=("triton",),
    huge=(8192,),
    huge_functions=DESIGNS[:-1],
    sanitizers=("memcheck", "racecheck"),
    sanitized=tuple(
        at(300, 1001, dtype, function=design)
        for dtype in (HALF, SINGLE)
        for design in DESIGNS
    ),
    prints={
        "Timing needs a GPU": 2,
        "each element of y, dx, dw and db is right": 6,
        "dw and db by columns: right": 1,
        "right buffers: []": 1,
        "right buffers: [0, 1, 2]": 1,
    },
    mutants={
        "c1 dropped": ("(wdy - x_hat * c1 - c2)", "(wdy - c2)"),
        "c2 dropped": ("(wdy - x_hat * c1 - c2)", "(wdy - x_hat * c1)"),
        "only the last row": (
            "dw += dy * x_hat\n        db += dy\n\n        # The formula",
            "dw = dy * x_hat\n        db += dy\n\n        # The formula",
        ),
        "every program a row": (
            "range(tl.program_id(0), M, tl.num",
            "range(tl.program_id(0), 4, tl.num",
        ),
        "masked lanes in the variance": (
            "x_centered = tl.where(mask, x - mean, 0)",
            "x_centered = x - mean",
        ),
        "all in the first buffer": (
            "sums_ptr += tl.program_id(0) * 2 * N\n    tl.store(sums_ptr, dw",
            "tl.store(sums_ptr, dw",
        ),
        "first buffers only": ("(rows < programs)", "(rows < 3)"),
        "a store without its mask": ("N, db, mask=mask)", "N, db)"),
        "sums not cleared": ("sums = torch.zeros(1", "sums = torch.empty(1"),
        "a store for an addition": (
            'tl.atomic_add(sums_ptr + N, db, mask=mask, sem="relaxed")\n\n\n'
            "def add_atomically",
            "tl.store(sums_ptr + N, db, mask=mask)\n\n\ndef add_atomically",
        ),
        "one tile a program": (
            FIRST_TILES,
            "for start in range(part * ROWS, part * ROWS + 1, parts * ROWS):",
        ),
        "no mask on rows": ("mask = (rows < M)", "mask = (rows >= 0)"),
        "parts overlap": (
            FIRST_TILES,
            "for start in range(part * ROWS, M, ROWS):",
        ),
        "parts write over each other": ("part * 2 * N + cols", "cols"),
        "statistics in float32 only": (
            "acc_dtype = torch.promote_types(x.dtype, torch.float32)",
            "acc_dtype = torch.float32",
        ),
    },
    kills=tuple(
        at(M, N, dtype, function=design)
        for design in DESIGNS[:-1]
        for M, N, dtype in ((3, 129, torch.float64), (18, 5, SINGLE))
    ),
)


def test_the_page_as_it_is(unedited):
    function = by("columns")(unedited)
    PAGE.operation.run(function, at(140, 17, HALF), unedited.DEVICE)


def test_the_order_of_additions_follows_the_programs(unedited):
    """Why the same bits are promised for the same number of programs."""
    page = unedited
    given = page.given(40, 130, SINGLE)

    def dw(programs):
        sums = torch.empty(programs, 2, 130, device=page.DEVICE)
        page.by_rows(*given, programs, 4, sums, page._store)
        return page.add_up(sums, SINGLE)[0]

    assert torch.equal(dw(4), dw(4))
    assert not torch.equal(dw(4), dw(3))


@pytest.fixture
def rows_of_sums(unedited, monkeypatch):
    """How many rows of sums a design writes and reads on 132 SMs."""
    counted = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda *, sums_ptr, **others: counted.append(grid[1])

    def by_rows(dy, x, w, mean, rstd, programs, warps, sums=None, keep=None):
        if sums is not None:
            counted.append(programs)
        return x

    def add_up(sums, dtype):
        counted.append(len(sums))
        return sums[0]  # which unpacks into dw and db

    monkeypatch.setattr(unedited, "NUM_SMS", 132)
    monkeypatch.setattr(unedited, "by_rows", by_rows)
    monkeypatch.setattr(unedited, "add_up", add_up)
    monkeypatch.setattr(unedited, "_layer_norm_bwd_columns", Kernel())

    def count(design, N):
        counted.clear()
        dy, stats = torch.empty(4096, N, device="meta"), torch.empty(4096)
        unedited.DESIGNS[design](dy, dy, dy[0], stats, stats, torch.float16)
        return sum(counted)

    return count


def test_table_counts_what_is_launched(output, rows_of_sums):
    """Its rows of sums are those that the designs write at 4096 columns on a
    GPU of 132 SMs."""
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
        rows, matrices_in_all = table[name]
        assert rows_of_sums(design, 4096) == int(rows), name
        matrices = 5 if design == "split" else 3
        moved = matrices + int(rows) / 1024
        assert float(matrices_in_all) == round(moved, 2)


def after(output, heading):
    """The numbers of each line of a table that is printed."""
    lines = output[output.index(heading) :].splitlines()[1:7]
    return [[int(number) for number in line.split()] for line in lines]


def test_shares_are_those_of_the_count(output, rows_of_sums):
    """At all widths; sums of columns that are split hardly change them."""
    table = after(output, "N  columns  buffers  atomics  atomics, rows")
    for N, *shares in table:
        expected = [60] + [
            round(300 / (3 + rows_of_sums(design, N) / 1024))
            for design in ("triton", "atomics", "rows")
        ]
        assert shares == expected
        at_width = WIDE.index(N)
        assert shares == [
            number[at_width] if isinstance(number, list) else number
            for number in COUNTED.values()
        ]
        assert round(300 / (5 + rows_of_sums("split", N) / 1024)) == 60


def sums_alone(page, M, N, dtype, name):
    dy, x = torch.empty(2, M, N, dtype=dtype, device=page.DEVICE)
    mean, rstd = torch.empty(2, M, device=page.DEVICE)
    page.SUMS[name](dy, x, dy[0], mean, rstd, dtype)


def test_programs_and_bytes_of_the_sums(output, launches):
    """What the programs of 132 SMs request, each thread eight elements of x
    and of dy."""
    from compiled import occupancy
    from compiled.aot import Call

    heading = "N   programs  KB on an SM    programs  KB on an SM"
    table = after(output, heading)
    assert len(table) == 6
    values = {"M": 4096, "dtype": "float16"}
    cases = [
        (N, name, programs, KB)
        for N, *numbers in table
        for name, programs, KB in (
            ("columns", *numbers[:2]),
            ("split", *numbers[2:]),
        )
    ]
    calls = [
        Call(PAGE.name, sums_alone, values | {"N": N, "name": name})
        for N, name, *_ in cases
    ]
    for (N, name, programs, KB), (built, *_) in zip(
        cases, launches(calls), strict=True
    ):
        assert math.prod(built.grid) == programs, N
        warps, *_ = occupancy.occupancy(
            "sm_90", built.registers, built.shared, built.num_warps
        )
        assert programs <= 132 * (warps // built.num_warps), (N, name)
        bytes_requested = programs * 32 * built.num_warps * 8 * 2 * 2
        assert round(bytes_requested / 132 / 1024) == KB


@pytest.mark.gpu
def test_atomic_additions_differ(page):
    given = page.given(4096, 1024, HALF)
    first = page.atomics(*given, SINGLE)
    assert any(
        not torch.equal(first[1], page.atomics(*given, SINGLE)[1])
        for _ in range(100)
    )
