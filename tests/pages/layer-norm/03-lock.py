"""What must hold of the page "A lock, and its race"."""

import functools
import re

import pytest
import torch

from compiled.declared import Kernel, Kernels
from conformance import (
    LayerNorm,
    Page,
    below_zero,
    guarded_allocations,
    negative_eps,
    too_wide,
)
from conformance.layer_norm import full_size
from measurements.figure import Measured, series
from tutorial import source


def run(page, M, N, dtype):
    x, w, b, dy = page.inputs(M, N, dtype)
    torch.autograd.grad(page.layer_norm(x, (N,), w, b), (x, w, b), dy)


def also(page, M, N, dtype):
    x, w, b, dy = page.inputs(M, N, dtype)
    for plan in page.PLANS.values():
        y = page.layer_norm(x, (N,), w, b, plan=plan)
        torch.autograd.grad(y, (x, w, b), dy)
    x = page.inputs(10, 24, torch.float32)[3]
    tensors = dy, x, w, x[:, 0], x[:, 0]
    page.stage_1(*tensors, (M, 2, 4, True), flaw="no waiting")
    page._move[(M,)](x, x, M * N // 2, 2, 1, BLOCK_SIZE=4096)  # the ceiling
    for kernel in (page._one_launch, page._one_launch_1):
        kernel[(10,)](x, x, x.int(), x, N=24, BLOCK=32)


PUBLISHED = "2026-11-22"

KERNELS = Kernels(
    run=run,
    also=also,
    M=4096,
    N=[4096],
    dtype="float16",
    sizes={
        "float16": [1024, 4096, 4608, 8192, 8704, 15872],
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
            Look at the end.
            The exchange with ``acquire`` takes the lock; after the stores of
            the sums there is a barrier, and then the exchange with ``release``
            that frees it.
            """,
            true=lambda code: [code.count("release") == 1, not code.unsafe],
            narrow_loads=2,  # mean and rstd
            releases=1,
            spills={15872: 96},
        ),
        "_layer_norm_bwd_add_up": Kernel(
            look="""
            A program reads 256 buffers of 16 columns, by 16 bytes, and stores
            16 numbers.
            """,
            true=lambda code: [code.narrow("load") == 0],
            narrow_stores=1,  # of 16 columns
        ),
    },
)


HALF, BFLOAT, SINGLE, DOUBLE = LayerNorm.dtypes
at = LayerNorm.at
PLANS = ("triton", "own buffers", "own locks", "lock each row")
OWN = PLANS[1:3]  # nobody waits


def by(plan):
    """Layer norm whose backward pass has this plan."""

    def function(page):
        return functools.partial(page.layer_norm, plan=page.PLANS[plan])

    return function


def every_flaw(load):
    """No tool sees the missing barrier, as the page says."""
    page = load()
    tensors, _ = page.given(300, 1024)
    for flaw in page.FLAWS:
        page.stage_1(*tensors, (300, 16, 8, True), flaw)


def one_launch(load):
    page = load()
    page.exercise_1(page._one_launch_1)


MATRICES = 3
SPILLED = {"own buffers": 128, "own locks": 80, "triton": 80}  # a thread
SHARED = 132 * 6, 132 * 3  # programs that share buffers: 1024, 4096 columns
AT_A_TIME = {1024: 9, 4096: 3, 8192: 2}  # programs of a row on an SM


def of_the_race(figure):
    runs = figure("layer-norm-lock-race", "H100")

    def wrong(part):
        found = [runs.median(part, N) for N in (512, 1024, 2048, 4096)]
        for number in found:
            number.rounding = ".0f"
        return found

    assert not any(wrong("right")), "the lock is never wrong"
    # What the page says of L1.
    always = min(wrong("no acquire")) == 100
    assert always, "without acquire all runs are wrong"
    for part in "no release", "no barrier":
        hides = wrong(part)[0] == 100 and wrong(part)[-1] == 0
        assert hides, f"all at 512 columns, none at 4096: {part}"
    acquire, release, barrier = (
        series(wrong(f"no {part}"))
        for part in ("acquire", "release", "barrier")
    )
    yield (
        f"On the H100, at 512, 1024, 2048 and 4096 columns, {acquire} of 100 "
        f"runs are wrong without acquire, {release} without release, and "
        f"{barrier} without the barrier."
    )


def sharing(N, programs):
    """Buffers, and how many programs at most share one: there are as many
    buffers as that many programs at each would need, rounded up."""
    all_programs = dict(zip((1024, 4096), SHARED, strict=True))[N]
    buffers = -(-all_programs // programs)
    return buffers, -(-all_programs // buffers)


def turn(times, N, least, most):
    """µs of each further program at a lock."""
    longer = times.median(str(N), most) - times.median(str(N), least)
    programs = sharing(N, most)[1] - sharing(N, least)[1]
    return Measured(longer / programs, ".2f")


WAITED = 1, 2, 16, 128  # programs at a lock that the page names


def of_waiting(figure):
    times = figure("layer-norm-lock-waiting", "H100")
    few = times.between(1, 32)
    widths = 4096, 1024

    def us(N, experiment=""):
        return [times.median(f"{N}{experiment}", x) for x in WAITED]

    def without(N):
        return us(N, ", no waiting")

    for N in widths:
        same = abs(us(N)[0] / without(N)[0] - 1) <= 0.05
        assert same, f"one program at a lock waits for nobody: {N}"
        # Almost flat, and then not.
        alone = few.all_medians(f"{N}, no waiting")
        flat = alone.most <= 1.15 * alone.least
        assert flat, f"without waiting little changes up to 32: {N}"
        rises = times.between(64).all_medians(f"{N}, no waiting").least
        assert rises > alone.most, f"without waiting it rises at last: {N}"
        # Two do not wait; with many, most of the time is waiting.
        little = us(N)[1] <= 1.01 * us(N)[0]
        assert little, f"two at a lock take no longer than one: {N}"
        much = us(N)[3] >= 2 * without(N)[3]
        assert much, f"128 wait most of the time: {N}"
        # A turn is a turn, but few do not come at the same time.
        steady = (
            abs(turn(times, N, 16, 64) / turn(times, N, 64, 128) - 1) <= 0.05
        )
        assert steady, f"each program more takes the same: {N}"
        less = turn(times, N, 2, 4) < 0.6 * turn(times, N, 64, 128)
        assert less, f"with few programs less than a turn: {N}"
    longer = turn(times, 1024, 64, 128) < turn(times, 4096, 64, 128)
    assert longer, "a turn of a wide row takes longer"
    one, two, some, many = us(4096)
    yield (
        f"On the H100, at 4096 columns, the backward pass takes {one} µs with "
        f"one program at a lock, {two} µs with two, {some} µs with 16, and "
        f"{many} µs with 128. Without waiting the four numbers are "
        f"{series(without(4096))} µs. At 1024 columns it takes "
        f"{series(us(1024))} µs, and without waiting "
        f"{series(without(1024))} µs."
    )
    (b64, s64), (b128, s128) = sharing(4096, 64), sharing(4096, 128)
    (c64, t64), (c128, t128) = sharing(1024, 64), sharing(1024, 128)
    yield (
        f"At 4096 columns {SHARED[1]} programs share {b64} buffers at the "
        f"point 64, and {b128} at the point 128: at most {s64} and {s128} "
        f"programs meet at a lock. At 1024 columns {SHARED[0]} programs share "
        f"{c64} and {c128} buffers, and at most {t64} and {t128} meet."
    )
    apart = max(abs(100 * us(N)[0] / without(N)[0] - 100) for N in widths)
    yield f"They differ by at most {apart:.1f}% there."
    wide, narrow = (without(N)[1] - us(N)[1] for N in widths)
    assert min(wide, narrow) > 0, "two take longer without waiting"
    yield (
        f"With two programs, though, the pass takes {wide} µs longer without "
        f"waiting at 4096 columns, and {narrow} µs longer at 1024 columns."
    )
    eight = [
        times.median(str(N), 8) - times.median(f"{N}, no waiting", 8)
        for N in widths
    ]
    clear = eight[0] >= 2 * wide and eight[1] >= 2 * narrow
    assert clear, "eight at a lock wait, beyond what the experiment changes"
    yield (
        "With eight programs at a lock, waiting makes the pass longer by "
        f"{eight[0]} µs and {eight[1]} µs, which is clearly more."
    )
    wide, narrow = (few.all_medians(f"{N}, no waiting") for N in widths)
    yield (
        f"Up to 32 programs the pass takes {wide.least} to {wide.most} µs at "
        f"4096 columns, and {narrow.least} to {narrow.most} µs at 1024 "
        "columns."
    )
    yield (
        f"With fewer buffers the lines rise, to {without(4096)[3]} and "
        f"{without(1024)[3]} µs."
    )
    yield (
        f"At 4096 columns, from {s64} to {s128} programs, each program more "
        f"makes the pass longer by {turn(times, 4096, 64, 128)} µs, and from "
        f"16 to {s64} by {turn(times, 4096, 16, 64)} µs. At 1024 columns, it "
        f"is {turn(times, 1024, 64, 128)} µs from {t64} to {t128} programs, "
        f"and {turn(times, 1024, 16, 64)} µs from 16 to {t64}."
    )
    yield (
        f"From two to four programs, each program more adds only "
        f"{turn(times, 4096, 2, 4)} µs at 4096 columns, and "
        f"{turn(times, 1024, 2, 4)} µs at 1024 columns,"
    )
    wide, narrow = (Measured(us(N)[3] / without(N)[3], ".1f") for N in widths)
    yield (
        f"Where {s128} or {t128} share one, it takes {wide} and {narrow} "
        "times as long as without waiting, so they spend most of their time "
        "waiting."
    )


def of_the_plans(figure):
    backward = figure("layer-norm-lock-backward", "H100")
    narrow = backward.between(most=8704)  # all but 15872
    widths = sorted(backward.medians["triton"])
    names = (*PLANS, "lock each row, no waiting")

    def span(name):
        of = backward.shares(name)
        return f"{of.least}% to {of.most}%"

    two, buffers, locks, rows, alone = map(span, names)
    yield (
        f"On the H100, two at a lock reach {two} of the copy, own locks reach "
        f"{locks}, and own buffers {buffers}. A lock for each row reaches "
        f"{rows}, and without waiting it would be {alone}."
    )
    yield f"reach {buffers} of the copy. Nobody waits."
    yield f"move the same bytes and reach {locks}. The lock itself"
    yield f"move the same bytes and reach {two}. They need half of the memory"
    yield f"moves 16 bytes a row and reaches {rows}."
    faster = narrow.ratios("own buffers", "triton")
    assert faster.least >= 1, "own buffers are faster, but for 15872"
    saved = Measured(100 * (1 - 1 / faster.most), ".0f")
    yield (
        "Up to 8704 columns no plan is faster than own buffers. They take up "
        f"to {saved}% less time than two at a lock, the plan of our function."
    )
    over_torch = backward.ratios("triton", "torch")
    compiled = backward.ratios("triton", "torch.compile")
    for rival in "torch", "torch.compile":
        faster = backward.ratios("triton", rival).least > 1
        assert faster, f"{rival} is faster at no width"
    yield (
        f"Two at a lock are {over_torch.least} to {over_torch.most} times as "
        f"fast as PyTorch, and {compiled.least} to {compiled.most} times as "
        "fast as torch.compile."
    )
    slower = [
        N for N in widths if backward.ratio("lock each row", "torch", N) < 1
    ]
    assert slower == [1024, 2048, 8192, 8704, 15872], (
        "a lock for each row is slower than PyTorch there"
    )

    def longer(ours, theirs, N):
        return backward.us(ours, N, MATRICES) - backward.us(
            theirs, N, MATRICES
        )

    # 15872 columns are another matter, of which the page speaks.
    costs = [longer("own locks", "own buffers", N) for N in widths[:-1]]
    assert min(costs) > 0, "a lock costs something at each width"
    a, b, c = (
        longer("own locks", "own buffers", N) for N in (1024, 4096, 8192)
    )
    yield (
        f"They take {a} µs longer at 1024 columns, {b} µs at 4096 columns, "
        f"and {c} µs at 8192 columns."
    )
    yield (
        f"The lock itself costs {min(costs)} to {max(costs)} µs up to 8704 "
        "columns."
    )
    less = [longer("own locks", "triton", N) for N in widths]
    assert min(less) > 0, "two at a lock take less time at each width"
    yield (
        f"But they take less, at each of the nine widths, by {min(less)} to "
        f"{max(less)} µs."
    )
    assert len(widths) == 9
    two, buffers, locks = (
        backward.share(name, 15872)
        for name in ("triton", "own buffers", "own locks")
    )
    # The plan with a lock is faster, and so is a lock that nobody shares.
    assert min(two, locks) >= 1.03 * buffers, "faster with locks at 15872"
    assert abs(two / locks - 1) <= 0.04, "shared or not, it is the same there"
    yield (
        f"At 15872 columns, though, two at a lock reach {two}% of the copy, "
        f"and own buffers reach {buffers}%. Is this the merit of the lock? It "
        f"is not: own locks, which nobody shares, reach {locks}%."
    )
    # Six twenty-seconds of the copy, if its buffers came from DRAM.
    wider = backward.between(2048).shares("lock each row")
    assert wider.least > 600 / 22, "more than DRAM alone allows"
    yield (
        f"From 2048 columns on it reaches {wider.least}% to {wider.most}%, so"
    )

    def saved(N):
        """% of its time that a lock for each row would save."""
        ratio = backward.ratio("lock each row, no waiting", each_row, N)
        return Measured(100 * (1 - 1 / ratio), ".0f")

    each_row = "lock each row"
    yield (
        f"At 1024 columns it reaches {backward.share(each_row, 1024)}%. There "
        "programs wait for each other: without waiting, it would take "
        f"{saved(1024)}% less time. At 2048 columns it would be "
        f"{saved(2048)}% less, and at 3072 columns {saved(3072)}%."
    )
    rest = [abs(saved(N)) for N in widths if N >= 4096]
    yield (
        "From 4096 columns on, the two differ by at most "
        f"{max(rest):.1f}%, and at five of six widths the plan that waits is "
        "the faster one."
    )
    ahead = [saved(N) < 0 for N in widths if N >= 4096]
    assert (sum(ahead), len(ahead)) == (5, 6), "mostly it is faster"
    # Unmarked, for nothing measured them.
    met = {N: 132 * programs for N, programs in AT_A_TIME.items()}
    assert met[1024] > 4 * 256, "more than four for each lock"
    yield (
        f"So at 1024 columns {met[1024]} programs run at a time, more than "
        f"four for each of the 256 locks. At 4096 columns {met[4096]} run at "
        f"a time, one or two for each lock, and at 8192 columns {met[8192]}, "
        "which is hardly more than one."
    )


L2 = (
    "triton",
    "own locks",
    "own buffers",
    "lock each row",
    "lock each row, no waiting",
)


def of_traffic(figure):
    l2 = figure("layer-norm-lock-l2", "H100")
    names, each_row = L2[:3], L2[3:]

    def counted(provider, N):
        """By hand: three matrices and the sums of each program."""
        programs = {1024: 792, 4096: 396, 8192: 132, 15872: 132}[N]
        if provider in each_row:
            programs = 4096
        sums = 16 * programs / (2 * MATRICES * 4096)
        return l2.median("copy", N) * (1 + sums)

    def off(provider, N):
        return abs(l2.median(provider, N) / counted(provider, N) - 1)

    for N in 4096, 8192:
        for name in names:
            near = off(name, N) <= 0.04
            assert near, f"counted by hand and by ncu: {name}, {N}"
    assert off("own buffers", 1024) <= 0.02, "and at 1024, without a lock"
    for N in 1024, 4096, 8192, 15872:
        for name in each_row:
            if (name, N) == (each_row[0], 1024):  # which waits
                continue
            near = off(name, N) <= 0.07
            assert near, f"counted by hand and by ncu: {name}, {N}"
    a, b, c = (l2.median(name, 4096) for name in names)
    rows, alone = (l2.median(name, 4096) for name in each_row)
    copy = l2.median("copy", 4096)
    assert 1.4 <= copy <= 1.6, "about half as much again"
    assert abs(rows / alone - 1) <= 0.01, "waiting is no traffic at 4096"
    yield (
        "On the H100, at 4096 columns, the addition of two matrices, which is "
        f"our copy here, is at {copy} and not at 1: L2 moves about half as "
        "much again as a kernel asks for. Two at a lock are at "
        f"{a} there, own locks at {b}, and own buffers at {c}. A lock for "
        f"each row is at {rows}, and at {alone} without waiting."
    )
    a, b, c = (l2.median(name, 1024) for name in names)
    rows, alone = (l2.median(name, 1024) for name in each_row)
    assert rows >= 1.08 * alone, "waiting is traffic at 1024"
    yield (
        f"At 1024 columns the five numbers are {series([a, b, c])}, and "
        f"{rows} and {alone}."
    )
    a, b, c = (l2.median(name, 15872) for name in names)
    assert max(a, b) < c, "more spills without a lock, more traffic"
    yield (
        f"At 15872 columns two at a lock and own locks are at {a} and {b}, "
        f"and own buffers at {c}."
    )
    yield (
        "Multiplied by the number of the copy, that is "
        f"{counted('triton', 4096)} for the first three and "
        f"{counted('lock each row', 4096)} for the last."
    )
    yield (
        "At 1024 columns there are 792 programs, and our count is "
        f"{counted('triton', 1024)} for the first three."
    )

    def more(N):
        """MB that own locks have beyond own buffers."""
        apart = l2.median("own locks", N) - l2.median("own buffers", N)
        return Measured(apart * 2 * MATRICES * 4096 * N / 1e6, ".1f")

    yield (
        f"Own locks have {more(1024)} MB more than own buffers there, and "
        f"{more(4096)} MB more at 4096 columns,"
    )
    by_hand = counted("triton", 15872)

    def spilled(name):
        """Each value is written once for each row, by 512 threads."""
        row = 2 * MATRICES * 15872
        return l2.median("copy", 15872) * 512 * SPILLED[name] / row

    for name in names:
        whole = by_hand + spilled(name)
        near = abs(l2.median(name, 15872) / whole - 1) <= 0.06
        assert near, f"the spilled bytes explain 15872 columns: {name}"
    yield f"At 15872 columns our count is {by_hand} for the first three."
    few, many = spilled("triton"), spilled("own buffers")
    yield (
        "Once we add them and multiply by the number of the copy, our count "
        f"becomes {by_hand + many} for own buffers, and {by_hand + few} for "
        "the two plans with locks."
    )


def on_the_other_card(figure):
    """What the H200 shows; each order that the H100 has and it has not."""
    runs, times, backward, l2 = (
        figure(f"layer-norm-lock-{name}", "H200")
        for name in ("race", "waiting", "backward", "l2")
    )
    at_widths = {
        part: [Measured(of[N], ".0f") for N in (512, 1024, 2048, 4096)]
        for part, of in runs.medians.items()
    }
    assert not any(at_widths["right"]), "the lock is never wrong"
    acquire, release, barrier = (
        at_widths[f"no {part}"] for part in ("acquire", "release", "barrier")
    )
    assert min(acquire) == 100, "without acquire all runs are wrong"
    for part in release, barrier:
        assert part[0] == 100 and part[-1] == 0, "none at 4096 columns"
    assert 0 < barrier[1] < 10
    yield (
        f"On the H200, {series(acquire)} of 100 runs are wrong without "
        f"acquire, {series(release)} without release, and {series(barrier)} "
        "without the barrier."
    )

    of_the_h100 = figure("layer-norm-lock-race", "H100")
    elsewhere = Measured(of_the_h100.median("no barrier", 1024), ".0f")
    yield (
        "At 1024 columns, the lock without the barrier fails in "
        f"{elsewhere} runs of 100 on the H100, and in {barrier[1]} on the "
        "H200:"
    )

    def us(N, programs, experiment=""):
        return times.median(f"{N}{experiment}", programs)

    one, two, some, many = (us(4096, programs) for programs in WAITED)
    alone = [us(4096, programs, ", no waiting") for programs in WAITED]
    yield (
        f"On the H200, at 4096 columns, the backward pass takes {one} µs with "
        f"one program at a lock, {two} µs with two, {some} µs with 16, and "
        f"{many} µs with 128. Without waiting the four numbers are "
        f"{series(alone)} µs."
    )
    before = figure("layer-norm-lock-waiting", "H100")
    wide, narrow = (turn(times, N, 64, 128) for N in (4096, 1024))
    for N in 4096, 1024:
        assert us(N, 2) <= 1.01 * us(N, 1), "two at a lock take no longer"
        for card in times, before:
            steady = turn(card, N, 16, 64) / turn(card, N, 64, 128)
            assert abs(steady - 1) <= 0.05, "each program more is a turn"
        same = turn(times, N, 64, 128) / turn(before, N, 64, 128)
        assert abs(same - 1) < 0.02, "a turn is as long on both cards"
    yield (
        f"On the H200, a turn takes just as long, {wide} µs at 4096 columns "
        f"and {narrow} µs at 1024:"
    )
    wide, narrow = (
        Measured(us(N, 128) / us(N, 128, ", no waiting"), ".1f")
        for N in (4096, 1024)
    )
    yield (
        "so where 99 or 114 programs share one lock, it takes "
        f"{wide} and {narrow} times as long as without waiting."
    )

    def span(name):
        of = backward.shares(name)
        return f"{of.least}% to {of.most}%"

    names = (*PLANS, "lock each row, no waiting")
    two, buffers, locks, rows, alone = map(span, names)
    over_torch = backward.ratios("triton", "torch")
    compiled = backward.ratios("triton", "torch.compile")
    assert min(over_torch.least, compiled.least) > 1
    yield (
        f"On the H200, two at a lock reach {two} of the copy, own locks reach "
        f"{locks}, and own buffers {buffers}. A lock for each row reaches "
        f"{rows}, and without waiting it would be {alone}. Two at a lock are "
        f"{over_torch.least} to {over_torch.most} times as fast as PyTorch, "
        f"and {compiled.least} to {compiled.most} times as fast as "
        "torch.compile."
    )
    # What the page says of no card, or of both.
    assert backward.ratios("torch", "lock each row").least > 1
    narrow = backward.between(most=8704)
    assert narrow.ratios("own buffers", "triton").least >= 1
    assert narrow.ratios("own buffers", "own locks").least >= 1

    def longer(ours, theirs, N):
        return backward.us(ours, N, MATRICES) - backward.us(
            theirs, N, MATRICES
        )

    widths = sorted(backward.medians["triton"])
    less = [longer("own locks", "triton", N) for N in widths]
    more = max(
        Measured(-100 * each / backward.us("triton", N, MATRICES), ".1f")
        for N, each in zip(widths, less, strict=True)
    )
    assert min(less) < 0 < max(less) and more < 1
    yield (
        "On the H200, two at a lock take up to "
        f"{max(less)} µs less than own locks at some widths, and up to "
        f"{-min(less)} µs more at others. The latter is at most {more}% of "
        "the pass."
    )
    two, buffers, locks = (
        backward.share(name, 15872)
        for name in ("triton", "own buffers", "own locks")
    )
    assert min(two, locks) >= 1.03 * buffers and abs(two / locks - 1) < 0.01
    yield (
        f"On the H200 it is the same here: two at a lock reach {two}%, own "
        f"buffers {buffers}%, and own locks {locks}%."
    )
    inside = backward.between(2048, 8192).shares("lock each row")
    wide = backward.at(8704, 15872).shares("lock each row")
    assert inside.least > 600 / 22 > wide.most - 0.2
    yield (
        f"On the H200, it reaches {inside.least}% to {inside.most}% from 2048 "
        f"to 8192 columns, but {series(wide, '%')} at 8704 and 15872 columns."
    )
    saved = [
        Measured(
            100
            * (
                1
                - 1
                / backward.ratio(
                    "lock each row, no waiting", "lock each row", N
                )
            ),
            ".0f",
        )
        for N in widths
    ]
    assert max(abs(each) for each in saved[3:]) < 2.35
    assert sum(each < 0 for each in saved[3:]) == 5
    yield (
        "On the H200, it would take "
        f"{series(saved[:3], '%')} less time at these three widths, and "
        "from 4096 columns on the two plans differ as little as on the H100."
    )

    at_1024 = [l2.median(name, 1024) for name in L2]
    yield (
        "On the H200, at 1024 columns, the five numbers are "
        f"{series(at_1024[:3])}, and {series(at_1024[3:])}."
    )
    assert min(at_1024[:2]) > at_1024[2] and at_1024[3] > 1.04 * at_1024[4]
    before = figure("layer-norm-lock-l2", "H100")
    apart = max(
        abs(100 * l2.median(name, N) / before.median(name, N) - 100)
        for name in (*L2, "copy")
        for N in (4096, 8192, 15872)
    )
    yield (
        "At the other widths, the counts of the two cards differ by at most "
        f"{apart:.1f}%."
    )

    def beyond(N):
        """MB that own locks have beyond own buffers."""
        apart = l2.median("own locks", N) - l2.median("own buffers", N)
        return Measured(apart * 2 * MATRICES * 4096 * N / 1e6, ".1f")

    yield (
        "On the H200, own locks have less of that, "
        f"{beyond(1024)} MB at 1024 columns and {beyond(4096)} MB at 4096."
    )


def CLAIMS(figure):
    yield from on_the_other_card(figure)
    yield from of_the_race(figure)
    yield from of_waiting(figure)
    yield from of_the_plans(figure)
    yield from of_traffic(figure)


# Numbers with a unit that nothing has measured, and why they are right.
FACTS = {
    "half of the buffers saves 4.3 MB": "66 * 2 * 8192 * 4 bytes",
    "three matrices of 67 MB each": "4096 * 8192 * 2 bytes",
    "at most 6 / 22 = 27% of the copy": "6 bytes of 6 + 16",
    "26% more": "16 * 396 / (6 * 4096)",
    "267% more": "16 * 4096 / (6 * 4096)",
}

PAGE = Page(
    __file__,
    LayerNorm(),
    {plan: by(plan) for plan in PLANS},
    # Few programs that take several rows, few locks, and several turns of the
    # loop of stage 2.
    quick=(
        ("return M, min(M, 256), 4, True", "return M, min(M, 4), 4, True"),
        ("NUM_SMS = 132  # of an H100", "NUM_SMS = 1"),
        ("ROWS=256,", "ROWS=4,"),
    ),
    cases=(
        at(3, 2049, HALF),
        at(2, 257),
        *(at(17, 65, HALF, function=plan) for plan in PLANS),
    ),
    full=(
        *full_size(PLANS, double=()),
        *(at(300, N, DOUBLE) for N in (33, 1151, 8192)),
    ),
    mistakes=(
        too_wide(16385, "1 to 16384"),
        *below_zero(),
    ),
    elsewhere="is on cuda:1: not the current one",
    # Where two meet at a lock, their order does not matter.
    repeatable=("triton", *OWN),
    repeated=tuple(
        at(4096, N, HALF, function=plan)
        for N in (1024, 4608, 8192)
        for plan in ("triton", *OWN)
    ),
    trains=("triton",),
    huge=(8192,),
    huge_functions=("triton",),
    sanitizers=("memcheck", "racecheck", "synccheck"),
    sanitized=(
        *(
            at(300, 1001, dtype, function=plan)
            for dtype in (HALF, SINGLE)
            for plan in PLANS
        ),
        every_flaw,
        one_launch,
    ),
    prints={
        "Timing needs a GPU": 1,
        "each element of y, dx, dw and db is right": len(PLANS),
        "sum: 7.0 buffer: 4.0": 1,  # the lost addition
        "wrong columns: [0, 1, 2": 1,  # the stub
        "wrong columns: []": 1,  # the solution
    },
    mutants={
        "c1 dropped": (
            "dx = (wdy - x_hat * c1 - c2) * rstd",
            "dx = (wdy - c2) * rstd",
        ),
        "c2 dropped": (
            "dx = (wdy - x_hat * c1 - c2) * rstd",
            "dx = (wdy - x_hat * c1) * rstd",
        ),
        "masked elements in the variance": (
            "x_centered = tl.where(mask, x - mean, 0)",
            "x_centered = x - mean",
        ),
        "the lock never reads": ("written = state == 2", "written = False"),
        "the lock reads what nobody wrote": (
            "old = cols < tl.where(written, N, 0)",
            "old = cols < N",
        ),
        "all add to the buffers of others": (
            "buffer = program % buffers",
            "buffer = program % buffers // 2",
        ),
        "own buffers without a place": (
            "buffers_ptr + tl.program_id(0) * 2 * N",
            "buffers_ptr",
        ),
        "every program once": (
            "range(tl.program_id(0), M, tl.num_programs(0))",
            "range(tl.program_id(0), tl.num_programs(0), tl.num_programs(0))",
        ),
        "only the last row": (
            "        dw += dy * x_hat\n",
            "        dw = dy * x_hat\n",
        ),
        "stage 2 stops early": (
            "mask = (rows < programs) & (cols < WIDTH)",
            "mask = (rows < programs - 1) & (cols < WIDTH)",
        ),
        "stage 2 has one turn": ("(0, programs, ROWS)", "(0, 1, ROWS)"),
        "dy with strides of its own": ("dy.contiguous(),", "dy,"),
        "any eps": ("if not eps >= 0:", "if False:"),
    },
    kills=(
        *(
            at(M, N, dy=dy, function=plan)
            for plan in PLANS
            for M, N, dy in (
                (3, 129, "contiguous"),
                (3, 9, "one number"),
                (13, 9, "contiguous"),
            )
        ),
        negative_eps,
    ),
)


def test_rows_wrap_around_the_buffers(page):
    """Each lock is taken many times; with own buffers there is none."""
    tensors, expected = page.given(60, 9)
    for programs, buffers in (60, 7), (60, 1), (60, 60), (11, 3), (11, 11):
        for locked in {True, buffers < programs}:
            plan = programs, buffers, 1, locked
            with guarded_allocations():
                _, sums = page.stage_1(*tensors, plan)
            assert page.error(sums, expected) < 1e-6


def test_without_waiting_as_much_is_loaded(page):
    """The experiment: locks of their own, and the loads of the shared lock.
    One program follows the other in the interpreter, so nothing is lost."""
    tensors, expected = page.given(60, 9)
    for buffers in 1, 7, 30, 60:
        plan = 60, buffers, 1, True
        with guarded_allocations():
            _, sums = page.stage_1(*tensors, plan, flaw="no waiting")
        if not page.ON_GPU or buffers == 60:
            assert page.error(sums, expected) < 1e-6


def test_what_is_not_wanted_is_not_there(page):
    tensors, expected = page.given(20, 9)
    plan = 20, 3, 1, True
    dx, sums = page.stage_1(*tensors, plan)
    assert page.stage_1(*tensors, plan, wants_dx=False)[0] is None
    alone, none = page.stage_1(*tensors, plan, wants_sums=False)
    assert none is None and torch.equal(alone, dx)
    assert page.error(sums, expected) < 1e-6


def test_the_page_as_it_is(unedited):
    for plan in PLANS:
        case = at(17, 40, HALF)
        PAGE.operation.run(by(plan)(unedited), case, unedited.DEVICE)


def lock(page, M, N, dtype, flaw):
    dy, x = torch.empty(2, M, N, dtype=dtype, device=page.DEVICE)
    mean, rstd = torch.empty(2, M, device=page.DEVICE)
    page.stage_1(dy, x, dy[0], mean, rstd, (M, 8, 4, True), flaw)


def first_stage(page, M, N, dtype, plan, flaw=""):
    dy, x = torch.empty(2, M, N, dtype=dtype, device=page.DEVICE)
    mean, rstd = torch.empty(2, M, device=page.DEVICE)
    page.stage_1(dy, x, dy[0], mean, rstd, page.PLANS[plan](M, N), flaw)


def test_what_the_page_says_of_plans_and_spills(launches):
    """Programs of each plan on 132 SMs; the kernel with a lock is another one
    than that without, and the same whether a lock is shared or not."""
    from compiled.aot import Call

    names = "triton", "own locks", "own buffers"
    calls = [
        Call(
            PAGE.name,
            first_stage,
            {"M": 4096, "N": N, "dtype": "float16", "plan": name},
        )
        for N in (1024, 4096, 8192, 15872)
        for name in names
    ]
    found = [built for (built,) in launches(calls)]
    grids = [built.grid[0] for built in found]
    assert grids == [792] * 3 + [396] * 3 + [132] * 6
    assert all(built.spills == 0 for built in found[:9])
    spills = {
        name: built.spills
        for name, built in zip(names, found[9:], strict=True)
    }
    assert spills == SPILLED
    assert {built.num_warps for built in found[9:]} == {16}  # 512 threads
    for shared, own in zip(found[0::3], found[1::3], strict=True):
        assert shared.asm["ptx"] == own.asm["ptx"]


def test_how_many_programs_of_a_row_run_at_a_time(launches):
    """Wide rows need more registers: what the page says of who meets."""
    from compiled.aot import Call
    from compiled.occupancy import occupancy

    values = {"M": 4096, "dtype": "float16", "plan": "lock each row"}
    calls = [
        Call(PAGE.name, first_stage, values | {"N": N}) for N in AT_A_TIME
    ]
    found = {}
    for N, (built,) in zip(AT_A_TIME, launches(calls), strict=True):
        warps, _, limits = occupancy(
            "sm_90", built.registers, built.shared, built.num_warps
        )
        assert limits == ["registers"]
        found[N] = warps // built.num_warps
    assert found == AT_A_TIME


def test_the_parts_of_the_lock_are_in_the_code(launches, unedited):
    """What Triton makes of the lock, for GPUs that are not here."""
    from compiled.aot import COMPILER_ADDS_BARRIER, Call
    from compiled.limits import Facts

    names = [("sm_90", name) for name in unedited.FLAWS]
    names += [("gfx942", "right"), ("gfx942", "no barrier")]
    values = {"M": 64, "N": 2048, "dtype": "float16"}
    calls = [
        Call(PAGE.name, lock, values | {"flaw": name}, target)
        for target, name in names
    ]
    text = source(PAGE.name)
    shown = re.findall(r"``((?:st|bar|atom)\.[\w.]+)``", text)
    right, without = shown[:3], shown[3:]
    assert right[1] == "bar.sync" and "bar.sync" not in without
    for (target, name), (built,) in zip(names, launches(calls), strict=True):
        facts = Facts(built)
        if name == "right":
            assert facts.count("release") == 1 and not facts.unsafe, target
        if name == "no barrier":
            assert bool(facts.unsafe) != COMPILER_ADDS_BARRIER, target
        if target == "sm_90":
            ptx = built.asm["ptx"]
            assert (".acquire.exch" in ptx) == (name != "no acquire")
            assert (".release.exch" in ptx) == (name != "no release")
            # What the page says of the last instructions.
            steps = re.findall(r"st\.global[.\w]*|bar\.sync|atom[.\w]*", ptx)
            if name == "right":
                assert steps[-3:] == right
            if name == "no barrier" and not COMPILER_ADDS_BARRIER:
                assert steps[-2:] == without


@pytest.mark.gpu
@pytest.mark.parametrize("N", [512, 1024, 2048, 4096])
def test_no_run_of_100_is_wrong(page, N):
    """The lock under contention, with every number of warps."""
    wrong = page.race.fn(32768, N, HALF, "backward", "right")
    assert wrong == [0, 0, 0]
    tensors, expected = page.given(32768, N)
    for warps in 1, 4, 8:
        for buffers in 1, 16, 256:
            _, sums = page.stage_1(*tensors, (32768, buffers, warps, True))
            assert page.error(sums, expected) < 1e-5


@pytest.mark.gpu
def test_the_missing_barrier_is_seen(page):
    """The narrowest rows of the page lose additions in some run of 100."""
    (wrong, *_) = page.race.fn(32768, 512, HALF, "backward", "no barrier")
    assert wrong > 0


@pytest.mark.gpu
def test_the_order_at_a_lock_is_not_fixed(page):
    """Nothing guarantees a difference; here 512 programs meet at one lock,
    and all 100 runs would have to come in one order of them."""
    tensors, _ = page.given(4096, 1024)

    def sums():
        return page.stage_1(*tensors, (512, 1, 4, True))[1]

    first = sums()
    assert not all(torch.equal(sums(), first) for _ in range(100))


@pytest.mark.gpu
def test_one_launch_in_100_runs(page):
    """The exercise: the last program sums what all others have stored."""
    assert all(page.exercise_1(page._one_launch_1) for _ in range(100))
