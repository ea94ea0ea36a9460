"""What must hold of the page "A lock, and its race"."""

import functools
import re

import pytest
import torch

from compiled.declared import Kernel, Kernels
from conformance import (
    LayerNorm,
    Mistake,
    Page,
    guarded_allocations,
    too_wide,
)
from conformance.layer_norm import full_size
from measurements.figure import Measured
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


def negative_eps(load):
    page = load()
    try:
        page.layer_norm(torch.ones(2, 8, device=page.DEVICE), 8, eps=-1e-5)
    except ValueError:
        return
    raise AssertionError("a negative eps is taken")


def one_launch(load):
    page = load()
    page.exercise_1(page._one_launch_1)


CARDS = "H200", "H100"
MATRICES = 3
SPILLED = {"own buffers": 128, "own locks": 80, "triton": 80}  # a thread


def series(numbers):
    """Numbers as prose lists them."""
    *most, last = map(str, numbers)
    return f"{', '.join(most)} and {last}"


def of_the_race(figure):
    runs = {card: figure("layer-norm-lock-race", card) for card in CARDS}

    def wrong(card, part):
        found = [runs[card].median(part, N) for N in (512, 1024, 2048, 4096)]
        for number in found:
            number.rounding = ".0f"
        return found

    for card in CARDS:
        assert not any(wrong(card, "right")), "the lock is never wrong"
        # What the page says of L1, and that the missing barrier may hide.
        often = min(wrong(card, "no acquire")) >= 90
        assert often, "without acquire nearly all runs are wrong"
    barriers = [
        number for card in CARDS for number in wrong(card, "no barrier")
    ]
    hides = max(barriers) > 0 and min(barriers) == 0
    assert hides, "a missing barrier shows at some width, hides at another"
    acquire, release, barrier = (
        series(wrong("H200", f"no {part}"))
        for part in ("acquire", "release", "barrier")
    )
    yield (
        f"On the H200, at 512, 1024, 2048 and 4096 columns, {acquire} of 100 "
        f"runs are wrong without acquire, {release} without release, and "
        f"{barrier} without the barrier."
    )
    acquire, release, barrier = (
        series(wrong("H100", f"no {part}"))
        for part in ("acquire", "release", "barrier")
    )
    yield (
        f"On the H100 it is {acquire} without acquire, {release} without "
        f"release, and {barrier} without the barrier."
    )


def of_waiting(figure):
    times = {card: figure("layer-norm-lock-waiting", card) for card in CARDS}
    shared_by = 1, 2, 16, 128

    def us(card, N, experiment=""):
        return [times[card].median(f"{N}{experiment}", x) for x in shared_by]

    def without(card, N):
        return us(card, N, ", no waiting")

    def turn(card, N):
        """µs of each further program, from 64 to 128."""
        of = times[card]
        return (of.median(str(N), 128) - of.median(str(N), 64)) / 64

    for card in CARDS:
        for N in 1024, 4096:
            alone = times[card].all_medians(f"{N}, no waiting")
            # Almost flat, and the same where nobody shares.
            flat = alone.most <= 1.15 * alone.least
            assert flat, f"without waiting nothing changes: {card}, {N}"
            same = abs(us(card, N)[0] / without(card, N)[0] - 1) <= 0.05
            assert same, f"one program at a lock waits for nobody: {card}, {N}"
            # Two hardly wait; 128 wait most of the time.
            little = us(card, N)[1] <= 1.1 * without(card, N)[1]
            assert little, f"two at a lock hardly wait: {card}, {N}"
            much = us(card, N)[3] >= 2 * without(card, N)[3]
            assert much, f"128 wait most of the time: {card}, {N}"
            # Few do not come at the same time: less for each than a turn.
            waited = us(card, N)[2] - without(card, N)[2]
            less = waited / 15 < turn(card, N)
            assert less, f"with few programs less than a turn: {card}, {N}"
        longer = turn(card, 1024) < turn(card, 4096)
        assert longer, f"a turn of a wide row takes longer: {card}"
    apart = max(
        abs(100 * us(card, N)[0] / without(card, N)[0] - 100)
        for card in CARDS
        for N in (1024, 4096)
    )
    yield f"They differ by at most {apart:.1f}% there."
    one, two, some, many = us("H200", 4096)
    yield (
        f"On the H200, at 4096 columns, the backward pass takes {one} µs with "
        f"one program at a lock, {two} µs with two, {some} µs with 16, and "
        f"{many} µs with 128. Without waiting the four numbers are "
        f"{series(without('H200', 4096))} µs. At 1024 columns it takes "
        f"{series(us('H200', 1024))} µs, and without waiting "
        f"{series(without('H200', 1024))} µs."
    )
    yield (
        "On the H100, at 4096 columns, it takes "
        f"{series(us('H100', 4096))} µs, and without waiting "
        f"{series(without('H100', 4096))} µs."
    )
    yield (
        "From 64 to 128 programs, each program more makes the pass longer by "
        f"{turn('H200', 4096)} µs on the H200 at 4096 columns, and by "
        f"{turn('H200', 1024)} µs at 1024 columns. On the H100 it is "
        f"{turn('H100', 4096)} µs and {turn('H100', 1024)} µs."
    )


def of_the_plans(figure):
    backward = {
        card: figure("layer-norm-lock-backward", card) for card in CARDS
    }
    h200 = backward["H200"]
    names = (*PLANS, "lock each row, no waiting")
    shares = {
        card: {name: backward[card].shares(name) for name in names}
        for card in CARDS
    }

    def span(card, name):
        of = shares[card][name]
        return f"{of.least}% to {of.most}%"

    two, buffers, locks, rows, alone = (span("H200", name) for name in names)
    yield (
        f"On the H200, two at a lock reach {two} of the copy, own locks reach "
        f"{locks}, and own buffers {buffers}. A lock for each row reaches "
        f"{rows}, and without waiting it would be {alone}."
    )
    yield f"reach {buffers} of the copy. Nobody waits."
    yield f"move the same bytes and reach {locks}. The instructions of a lock"
    yield f"move the same bytes and reach {two}. They need half of the memory"
    yield f"moves 16 bytes a row and reaches {rows}."
    two, buffers, locks, rows, alone = (span("H100", name) for name in names)
    yield (
        f"On the H100, two at a lock reach {two} of its copy, own locks "
        f"{locks}, own buffers {buffers}, and a lock for each row {rows}, or "
        f"{alone} without waiting."
    )
    over_torch = h200.ratios("triton", "torch")
    compiled = h200.ratios("triton", "torch.compile")
    for card in CARDS:
        for rival in "torch", "torch.compile":
            faster = backward[card].ratios("triton", rival).least > 1
            assert faster, f"{rival} is faster at no width: {card}"
    yield (
        f"On the H200, two at a lock are {over_torch.least} to "
        f"{over_torch.most} times as fast as PyTorch, and {compiled.least} to "
        f"{compiled.most} times as fast as torch.compile."
    )

    def longer(ours, theirs):
        """µs, at three widths on the H200."""
        for N in 1024, 4096, 8192:
            yield h200.us(ours, N, MATRICES) - h200.us(theirs, N, MATRICES)

    instructions = list(longer("own locks", "own buffers"))
    waiting = list(longer("triton", "own locks"))
    assert min(instructions + waiting) >= 0, (
        "both take longer: or is it noise?"
    )
    a, b, c = instructions
    yield (
        f"On the H200 own locks take {a} µs longer at 1024 columns, {b} µs at "
        f"4096 columns, and {c} µs at 8192 columns."
    )
    a, b, c = waiting
    yield (
        f"On the H200 two at a lock take {a} µs longer at 1024 columns, {b} "
        f"µs at 4096 columns, and {c} µs at 8192 columns."
    )
    two, buffers, locks = (
        h200.share(name, 15872)
        for name in ("triton", "own buffers", "own locks")
    )
    # The plan with a lock is faster, and so is a lock that nobody shares.
    assert min(two, locks) >= 1.03 * buffers, "faster with locks at 15872"
    assert abs(two / locks - 1) <= 0.04, "shared or not, it is the same there"
    yield (
        f"At 15872 columns, though, two at a lock reach {two}% of the copy on "
        f"the H200, and own buffers reach {buffers}%. Is this the merit of "
        f"the lock? It is not: own locks, which nobody shares, reach {locks}%."
    )
    # Six twenty-seconds of the copy, if its buffers came from DRAM.
    more = shares["H200"]["lock each row"].least > 600 / 22
    assert more, "a lock for each row reaches more than DRAM alone allows"

    def less(N):
        """% of its time that a lock for each row would save."""
        ratio = h200.ratio("lock each row, no waiting", "lock each row", N)
        assert ratio > 1, "a lock for each row waits"
        return Measured(100 * (1 - 1 / ratio), ".0f")

    yield (
        f"Without waiting, it would take {less(1024)}% less time at 1024 "
        f"columns on the H200, and {less(4096)}% less at 4096 columns."
    )


def of_traffic(figure):
    l2 = figure("layer-norm-lock-l2", "H200")
    names = "triton", "own locks", "own buffers"
    each_row = "lock each row", "lock each row, no waiting"

    def counted(provider, N):
        """By hand: three matrices and the sums of each program."""
        programs = {1024: 792, 4096: 396, 8192: 132, 15872: 132}[N]
        if provider in each_row:
            programs = 4096
        sums = 16 * programs / (2 * MATRICES * 4096)
        return l2.median("copy", N) * (1 + sums)

    for N in 1024, 4096, 8192:
        for name in names:
            near = abs(l2.median(name, N) / counted(name, N) - 1) <= 0.06
            assert near, f"counted by hand and by ncu: {name}, {N}"
    for N in 1024, 4096, 8192, 15872:
        for name in each_row:
            near = abs(l2.median(name, N) / counted(name, N) - 1) <= 0.1
            assert near, f"counted by hand and by ncu: {name}, {N}"
    a, b, c = (l2.median(name, 4096) for name in names)
    rows, alone = (l2.median(name, 4096) for name in each_row)
    copy = l2.median("copy", 4096)
    assert 1.4 <= copy <= 1.6, "about half as much again"
    yield (
        "On the H200, the addition of two matrices, which is our copy here, "
        f"is at {copy} and not at 1: L2 moves about half as much again as a "
        "kernel asks for. At 4096 columns two at a lock are at "
        f"{a}, own locks at {b}, and own buffers at {c}. A lock for each row "
        f"is at {rows}, and at {alone} without waiting."
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
        "Multiplied by the number of the copy, that makes "
        f"{many} and {few}, so our count becomes {by_hand + many} for own "
        f"buffers, and {by_hand + few} for the two plans with locks."
    )


def CLAIMS(figure):
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
        ("NUM_SMS = 132  # of an H200", "NUM_SMS = 1"),
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
        *(
            Mistake(
                ValueError,
                rf"\beps is {eps}\b",
                lambda ones: (ones(2, 4), (4,)),
                {"eps": eps},
            )
            for eps in (-1e-05, float("nan"))
        ),
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
