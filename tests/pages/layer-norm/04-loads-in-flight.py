"""What must hold of the page "Loads in flight"."""

import functools
import re

import pytest
import torch

import tutorial
from compiled.declared import Kernel, Kernels
from conformance import LayerNorm, Mistake, Page
from measurements.figure import series


def run(page, M, N, dtype):
    x, w, b, dy = page.inputs(M, N, dtype)
    torch.autograd.grad(page.layer_norm(x, (N,), w, b), (x, w, b), dy)
    page._read[(page.NUM_SMS,)](
        x.int(), x.int(), 100, LANES=8192, num_warps=32
    )


def also(page, M, N, dtype):
    x, w, b, dy = page.inputs(M, N, dtype)
    for plan in page.PLANS.values():
        y = page.layer_norm(x, (N,), w, b, plan=plan)
        torch.autograd.grad(y, (x, w, b), dy)
    for kernel in (page._read_two, page._read_two_1):
        kernel[(1,)](x.int(), x.int(), 3, LANES=4)
    page._move[(M,)](x, x, M * N // 2, 2, 1, BLOCK_SIZE=4096)  # the ceiling


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
            On NVIDIA GPUs no load of 16 bytes is left: rows come by
            asynchronous copies into shared memory, some before the loop and
            some in it.
            """,
            true=lambda code: [(code.count("copy", 16) > 0) != code.amd],
            narrow_copies=10,  # mean and rstd
            narrow_loads=2,
            copies="any",  # one stage above 8192 columns
            shared=232448,
            spills={15872: 144},  # as the page says: 16384 lanes
        ),
        "_layer_norm_bwd_add_up": Kernel(
            look="""
            A program reads 256 rows of sums of 16 columns, by 16 bytes.
            """,
            true=lambda code: [code.narrow("load") == 0],
            narrow_stores=1,  # of 16 columns
        ),
        "_read": Kernel(
            look="""
            A loop of loads of 4 bytes; where each reads is the value of the
            one before.
            """,
            true=lambda code: [code.count("barrier") == 0, code.spills == 0],
            narrow_loads=8,  # eight lanes for each thread
            narrow_stores=8,
        ),
    },
)


HALF, BFLOAT, SINGLE, DOUBLE = LayerNorm.dtypes
at = LayerNorm.at
PLANS = ("triton", "more programs", "one program")
# At the widths of the three knobs: how many programs on a multiprocessor are
# best with one stage, and how many "more programs" has.
BEST = {1024: 6, 4096: 3, 8192: 1}
MORE = {1024: 6, 4096: 3, 8192: 1}


def by(plan):
    """Layer norm whose backward pass has this plan."""

    def function(page):
        return functools.partial(page.layer_norm, plan=page.PLANS[plan])

    return function


def read_two(load):
    page = load()
    page.exercise_1(page._read_two_1)


def on_the_other_card(figure):
    """What the H200 shows; each order that the H100 has and it has not."""
    knee, programs, warps, stages, used, backward = (
        figure(f"layer-norm-loads-{name}", "H200")
        for name in (
            "knee", "programs", "warps", "stages", "occupancy", "backward"
        )
    )  # fmt: skip
    speeds = knee.medians["reading"]
    best = max(speeds.values())
    assert min(KB for KB in speeds if speeds[KB] >= 0.95 * best) == 32
    one, eight, sixteen, most, twice = (
        knee.median("reading", KB) for KB in (1, 8, 16, 32, 64)
    )
    yield (
        f"On the H200, 1 KB in flight on each SM gives {one} GB/s, 8 KB give "
        f"{eight} GB/s, 16 KB give {sixteen} GB/s, 32 KB give {most} GB/s, "
        f"and 64 KB give {twice} GB/s."
    )
    yield "and that is 32 KB, on the H100 and on the H200."
    eight = 100 * eight / best
    eight.rounding = ".0f"
    before = latency(figure("layer-norm-loads-knee", "H100"), 1)
    assert abs(latency(knee, 1) / before - 1) < 0.05
    yield (
        "The pipe of the H200 is about as long, but wider: a step takes "
        f"{latency(knee, 1)} ns with 1 KB in flight, and with 8 KB we get "
        f"only {eight}% of the best speed."
    )

    shares = {
        N: {count: programs.share(str(N), count) for count in (1, 2, 3, 6, 8)}
        for N in MORE
    }
    for N, count in (1024, 8), (4096, 3), (8192, 1):
        speeds = programs.medians[str(N)]
        assert max(speeds, key=speeds.get) == count
    yield (
        f"On the H200, one program on each SM reaches {shares[1024][1]}%, "
        f"{shares[4096][1]}% and {shares[8192][1]}% of the copy. At 1024 "
        f"columns eight programs are a little faster than six, with "
        f"{shares[1024][8]}% and {shares[1024][6]}%. At 4096 columns three "
        f"are best there, too, with {shares[4096][3]}%, and at 8192 columns "
        "nothing beats one."
    )
    alike = [warps.share("1024", count) for count in (4, 8)]
    assert f"{alike[0]}" == f"{alike[1]}"
    for N, count in ("4096", 4), ("8192", 16):
        speeds = warps.medians[N]
        assert max(speeds, key=speeds.get) == count
    yield (
        "On the H200, at 4096 columns, 4 warps reach "
        f"{warps.share('4096', 4)}% of the copy, 8 reach "
        f"{warps.share('4096', 8)}%, and 32 reach {warps.share('4096', 32)}%. "
        f"At 1024 columns 4 and 8 warps reach {alike[0]}% each. At 8192 "
        f"columns 4 reach {warps.share('8192', 4)}%, 8 reach "
        f"{warps.share('8192', 8)}%, and 16 reach {warps.share('8192', 16)}%."
    )
    alone = backward.us("one program", 8192, 3) / 32
    step = latency(knee, 32) / 1000
    alone.rounding = step.rounding = ".1f"
    yield (
        f"On the H200, each row takes {alone} µs, and an SM needs {step} µs "
        "to read its part."
    )

    middle = [stages.share("4096", number) for number in (1, 2, 3, 5)]
    wide = [stages.share("8192", number) for number in (1, 2, 3, 5)]
    yield (
        f"On the H200, at 4096 columns, one stage reaches {middle[0]}% of the "
        f"copy, two reach {middle[1]}%, three {middle[2]}% and five "
        f"{middle[3]}%; at 8192 columns one reaches {wide[0]}%, two "
        f"{wide[1]}%, three {wide[2]}% and five {wide[3]}%."
    )
    four, five = (
        {N: stages.share(str(N), number) for N in MORE} for number in (4, 5)
    )
    for N in MORE:
        speeds = stages.medians[str(N)]
        assert speeds[2] < speeds[1] < speeds[3]
        assert (five[N] > four[N]) == (N < 8192)
        assert (speeds[5] > speeds[3]) == (N < 8192)
        # Fewer warps are in use, and it is faster all the same.
        assert speeds[5] > shares[N][MORE[N]]
        for provider in "triton", "more programs":
            by_hand = used.median(f"{provider}, by hand", N)
            assert used.median(provider, N) <= by_hand
    yield (
        "On the H200, five stages are better than four at 1024 and 4096 "
        f"columns, by {five[1024] - four[1024]:.1f} and "
        f"{five[4096] - four[4096]:.1f} points."
    )
    counted = figure("layer-norm-loads-occupancy", "H100")
    for N in MORE:
        for plan in "triton", "more programs":
            assert (
                f"{used.median(plan, N):.0f}"
                == f"{counted.median(plan, N):.0f}"
            )
    yield (
        "On the H200 the same shares of the warps are in use, and stages "
        f"reach {five[4096]}% of the copy at 4096 columns, where three "
        f"programs reach {shares[4096][3]}%."
    )
    yield (
        "On the H200, the two speeds are "
        f"{knee.all_medians('reading').most} and "
        f"{backward.median('copy', 8192)} GB/s."
    )

    narrow, above = backward.between(0, 8192), backward.between(8193)
    ahead, many = narrow.shares("triton"), narrow.shares("more programs")
    same = [share for plan in PLANS for share in above.shares(plan)]
    over_torch = backward.ratios("triton", "torch")
    over_compiled = backward.ratios("triton", "torch.compile")
    assert min(over_torch.least, over_compiled.least) > 1
    yield (
        f"On the H200 stages reach {ahead.least}% to {ahead.most}% of the "
        f"copy up to 8192 columns, and more programs reach {many.least}% to "
        f"{many.most}%. Above 8192 columns the three plans reach {min(same)}% "
        f"to {max(same)}%. Stages are {over_torch.least} to "
        f"{over_torch.most} times as fast as PyTorch, and "
        f"{over_compiled.least} to {over_compiled.most} times as fast as "
        "torch.compile."
    )
    gains = {
        N: narrow.ratio("triton", "more programs", N)
        for N in narrow.medians["triton"]
    }
    assert min(gains, key=gains.get) == 4608 and gains[4608] > 1
    assert max(gains, key=gains.get) == 8192
    yield (
        "On the H200, stages gain more, up to "
        f"{gains[8192]} times the speed of more programs at 8192 columns, "
        f"where they reach {narrow.share('triton', 8192)}% and a single "
        f"program reaches {narrow.share('more programs', 8192)}%. They gain "
        "least at 4608 columns, where they reach "
        f"{narrow.share('triton', 4608)}% and more programs reach "
        f"{narrow.share('more programs', 4608)}%."
    )
    yield (
        "On the H200, 8704 columns reach "
        f"{backward.share('triton', 8704)}%, and 15872 columns reach "
        f"{backward.share('triton', 15872)}%."
    )
    yield (
        "On the H200 the two are at "
        f"{backward.share('triton', 15872)}% and "
        f"{backward.share('torch.compile', 15872)}%."
    )


def CLAIMS(figure):
    yield from on_the_other_card(figure)
    knee, programs, warps, stages, used, backward = (
        figure(f"layer-norm-loads-{name}", "H100")
        for name in (
            "knee", "programs", "warps", "stages", "occupancy", "backward"
        )
    )  # fmt: skip
    yield from of_the_knee(knee)
    yield from of_programs(programs)

    assert f"{warps.share('1024', 4)}" == f"{warps.share('1024', 8)}", "each"
    yield (
        "On the H100, at 4096 columns, 4 warps reach "
        f"{warps.share('4096', 4)}% of the copy, 8 reach "
        f"{warps.share('4096', 8)}%, and 32 reach {warps.share('4096', 32)}%. "
        "At 1024 columns 4 and 8 warps are alike with "
        f"{warps.share('1024', 4)}% each, and 16 "
        f"reach {warps.share('1024', 16)}%. Only at 8192 columns are 4 warps "
        f"too few: they reach {warps.share('8192', 4)}%, and 16 reach "
        f"{warps.share('8192', 16)}%."
    )
    as_much = warps.share("8192", 8)
    assert abs(as_much - warps.share("8192", 16)) < 1.5
    yield f"8 warps reach {as_much}%, nearly as much."

    # 32 rows, one after the other.
    alone = backward.us("one program", 8192, 3)
    step = latency(knee, 32) / 1000  # µs until the reading kernel has 32 KB
    step.rounding = ".1f"
    yield (
        f"On the H100 the whole pass takes {alone:.0f} µs (the last figure of "
        f"this page shows its speed), so each row takes {alone / 32} µs."
    )
    yield (
        f"are 32 KB, and an SM needs {step} µs for them if it reads as fast "
        "as our reading kernel at its knee."
    )
    assert step < 0.75 * alone / 32

    middle = [stages.share("4096", number) for number in (1, 2, 3, 5)]
    wide = [stages.share("8192", number) for number in (1, 2, 3, 5)]
    yield (
        f"On the H100, at 4096 columns, one stage reaches {middle[0]}% of the "
        f"copy, two reach {middle[1]}%, three {middle[2]}% and five "
        f"{middle[3]}%; at 8192 columns one reaches {wide[0]}%, two "
        f"{wide[1]}%, three {wide[2]}% and five {wide[3]}%."
    )
    # What the page says of stages without numbers.
    for N, count in MORE.items():
        speeds = stages.medians[str(N)]
        assert speeds[2] < speeds[1] < speeds[3]
        assert (speeds[5] > speeds[3]) == (N < 8192)
        assert speeds[4] > 0.99 * speeds[5]
        # Fewer warps are in use, and it is faster all the same.
        assert speeds[5] > programs.medians[str(N)][count]

    for N in MORE:
        for provider in "triton", "more programs":
            by_hand = used.median(f"{provider}, by hand", N)
            assert used.median(provider, N) <= by_hand
    (a, b), (c, d), (e, f) = (
        [f"{used.median(each, N):.0f}" for each in ("triton", "more programs")]
        for N in (1024, 4096, 8192)
    )
    yield (
        "With stages (Triton) fewer warps are in use than with more programs: "
        f"on the H100, {a}% and {b}% at 1024 columns, {c}% and {d}% at 4096 "
        f"columns, and {e}% and {f}% at 8192 columns."
    )
    yield (
        f"at 4096 columns they reach {stages.share('4096', 5)}% of the copy, "
        f"and three programs reach {programs.share('4096', 3)}%."
    )
    yield (
        "which reads at most "
        f"{knee.all_medians('reading').most} GB/s on the H100. The copy moves "
        f"{backward.median('copy', 8192)} GB/s at 8192 columns,"
    )
    yield from of_all_widths(backward, programs, stages)

    # What we learned.
    for said, figure_of, counts in (
        ("It reaches", programs, {1024: 1, 4096: 1, 8192: 1}),
        ("24, 48 and 32 KB in flight. They reach", programs, MORE),
        ("while they work. They reach", stages, {1024: 5, 4096: 5, 8192: 5}),
    ):
        found = [figure_of.share(str(N), counts[N]) for N in MORE]
        yield f"{said} {series(found, '%')} of the copy."


def latency(knee, KB):
    """ns: bytes in flight, divided by GB/s."""
    step = 132 * 1024 * KB / knee.median("reading", KB)
    step.rounding = ".0f"
    return step


def of_the_knee(knee):
    speeds = knee.medians["reading"]
    best = max(speeds.values())
    assert min(KB for KB in speeds if speeds[KB] >= 0.95 * best) == 32
    assert [*speeds.values()][:6] == sorted([*speeds.values()][:6])
    assert speeds[2] > 1.8 * speeds[1], "nearly twice the speed"
    one, eight, sixteen, most, twice = (
        knee.median("reading", KB) for KB in (1, 8, 16, 32, 64)
    )
    yield (
        f"On the H100, 1 KB in flight on each SM gives {one} GB/s, 8 KB give "
        f"{eight} GB/s, 16 KB give {sixteen} GB/s, 32 KB give {most} GB/s, "
        f"and 64 KB give {twice} GB/s."
    )
    assert 380 < latency(knee, 1) < 480, "a little longer than the chain"
    yield (
        "1 KB on each of 132 SMs, divided by the speed, is "
        f"{latency(knee, 1)} ns."
    )
    share = 100 * eight / best
    share.rounding = ".0f"
    yield f"with 8 KB we get only {share}% of the best speed."
    yield (
        f"a step takes {latency(knee, 8)} ns with 8 KB in flight, and "
        f"{latency(knee, 16)} ns with 16 KB."
    )
    assert 0.96 < twice / most < 1.04, "the pipe is full"
    yield (
        f"With 64 KB in flight a step takes {latency(knee, 64)} ns, twice the "
        f"{latency(knee, 32)} ns that it takes with 32 KB."
    )
    whole = 256e3 / twice  # µs
    whole.rounding = ".0f"
    assert best < 3000
    yield f"Here the kernel takes only {whole} µs,"


def of_programs(programs):
    for N, best in BEST.items():
        speeds = programs.medians[str(N)]
        assert max(speeds, key=speeds.get) == best
        # More help up to the best number, and at 8192 columns never.
        rising = [speeds[count] for count in speeds if count <= best]
        assert rising == sorted(rising)
    one, middle, wide = (programs.share(str(N), 1) for N in BEST)
    most, three = programs.share("1024", 6), programs.share("4096", 3)
    eight = programs.share("1024", 8)
    assert 0 <= most - eight < 1, "no faster"
    yield (
        f"On the H100, one program on each SM reaches {one}% of the copy at "
        f"1024 columns, {middle}% at 4096 columns, and {wide}% at 8192 "
        "columns. At 1024 columns more programs help up to six, which reach "
        f"{most}%, and eight are no faster. At 4096 columns three are best "
        f"and reach {three}%. At 8192 columns nothing beats one."
    )
    yield (
        "it can only cost something, and two reach "
        f"{programs.share('8192', 2)}%."
    )
    # Four programs at 4096 columns: three, and then the fourth.
    four = programs.share("4096", 4)
    assert middle < four < three
    expected = 4 / (3 / three + 1 / middle)
    yield (
        "Three of them work on three quarters of the rows, at "
        f"{three}% of the copy, and when they are done, the fourth works on "
        f"the rest alone, at {middle}%. Together that would be {expected}%, "
        f"and we measured {four}%."
    )
    yield (
        f"8 programs at 1024 columns reach {eight}%, and 2 programs at 4096 "
        f"columns reach {programs.share('4096', 2)}%."
    )


def of_all_widths(backward, programs, stages):
    narrow, wide = backward.between(0, 8192), backward.between(8193)
    ahead, many = narrow.shares("triton"), narrow.shares("more programs")
    same = [share for plan in PLANS for share in wide.shares(plan)]
    yield (
        f"On the H100 stages reach {ahead.least}% to {ahead.most}% of the "
        f"copy up to 8192 columns, and more programs reach {many.least}% to "
        f"{many.most}%. Above 8192 columns the three plans are the same and "
        f"reach {min(same)}% to {max(same)}%."
    )
    over_torch = backward.ratios("triton", "torch")
    over_compiled = backward.ratios("triton", "torch.compile")
    assert min(over_torch.least, over_compiled.least) > 1
    yield (
        f"Stages are {over_torch.least} to {over_torch.most} times as fast as "
        f"PyTorch, and {over_compiled.least} to {over_compiled.most} times as "
        "fast as torch.compile."
    )

    def apart():
        """Points between the two shares of each plan that two figures have."""
        for N, count in MORE.items():
            twice = (
                ("triton", stages.share(str(N), 5)),
                ("more programs", programs.share(str(N), count)),
            )
            for plan, share in twice:
                yield abs(share - backward.share(plan, N))

    yield (
        "Their shares of the copy differ by up to "
        f"{max(apart()):.1f} points between the two."
    )

    def noise(N):
        """% between the three lines of one kernel."""
        speeds = [backward.median(plan, N) for plan in PLANS]
        return 100 * (max(speeds) / min(speeds) - 1)

    yield (
        f"They differ by at most {max(map(noise, (8704, 10240, 15872))):.1f}%."
    )

    gains = narrow.ratios("triton", "more programs")
    at_width = {
        N: narrow.ratio("triton", "more programs", N)
        for N in narrow.medians["triton"]
    }
    assert gains.least == at_width[6144] and at_width[6144] > 1
    for N in 1024, 8192:
        assert at_width[N] > 1.1
    yield (
        f"Up to 8192 columns, stages are {gains.least} to {gains.most} times "
        "as fast as more programs."
    )
    ours, theirs = (
        {N: narrow.share(plan, N) for N in (1024, 6144, 8192)}
        for plan in ("triton", "more programs")
    )
    yield f"It reaches {theirs[8192]}%, and stages reach {ours[8192]}%."
    yield f"They reach {ours[1024]}%, and six programs reach {theirs[1024]}%."
    yield f"They reach {theirs[6144]}%, and stages reach {ours[6144]}%."
    less = backward.share("triton", 8704)
    assert less < 0.95 * ours[8192]
    yield f"there is no room for stages any more: 8704 columns reach {less}%."
    yield (
        f"The compiler spills, and we reach {wide.share('triton', 15872)}%."
    )
    yield (
        f"At 15872 columns we are at {wide.share('triton', 15872)}% of the "
        "copy, and torch.compile is at "
        f"{wide.share('torch.compile', 15872)}%."
    )


CHAIN = "a chain of loads in random order, on an H100, outside this page"

# Numbers with a unit that nothing has measured, and why they are right; and a
# few that were measured on an H100 by kernels that the page does not show.
FACTS = {
    "26 ns if the number is in the small cache inside the SM, 153 ns if it is "
    "in L2, and 362 ns if it comes from DRAM": CHAIN,
    "In 362 ns the clock": CHAIN,
    "362 ns is that of a memory that has nothing else to do": CHAIN,
    "the other 362 ns later": CHAIN,
    "as long as the latency, 362 ns; it holds 8 KB": CHAIN,
    "latency: 362 ns": CHAIN,
    "A load of the chain took 362 ns.": CHAIN,
    "we could read 3.0 TB/s": "the reading of 4 GB, measured on an H100",
    "3.0 TB/s × 362 ns = 1.1 MB": "the product of the two",
    "below the 3.0 TB/s from above. Those came from reading 4 GB": (
        "the reading of 4 GB, on an H100"
    ),
    "this is 48 KB": "3 * 8192 * 2 bytes",
    "The programs on an SM share 227 KB": "SHARED of an H100",
    "they read 256 MB": "the argument MB of the benchmark",
    "at least 95% of the best": "where the cell looks for the knee",
    "95% of {} GB/s": "where the cell looks for the knee",
    "the buffers of 1024 columns take 8.7 MB": "8 * 132 * 2 * 1024 * 4 bytes",
    "matrices of 25 MB": "3 matrices of 4096 * 1024 elements of 2 bytes",
    "one program on each SM take 4.3 MB": "132 * 2 * 4096 * 4 bytes",
    "those of three take 13 MB": "3 * 132 * 2 * 4096 * 4 bytes",
}

PAGE = Page(
    __file__,
    LayerNorm(),
    {plan: by(plan) for plan in PLANS},
    # A small GPU, so that a program has several rows, and several turns of
    # the loop that adds up the programs' sums.
    quick=(
        ("return 132", "return 2"),
        ("ROWS=256,", "ROWS=4,"),
    ),
    cases=(
        at(3, 2049, HALF),
        at(2, 257),
        *(at(17, 65, HALF, function=plan) for plan in PLANS),
    ),
    full=(
        *(
            at(M, N, dtype, function=plan)
            for N in (1000, 1023, 4096, 4608, 16384)
            # More rows than programs, but few: random numbers take most of
            # the time.
            for M, dtype in ((1151, HALF), (300, BFLOAT), (300, SINGLE))
            for plan in PLANS
        ),
        *(at(300, N, DOUBLE) for N in (33, 1151, 8192)),
    ),
    mistakes=(
        Mistake(
            ValueError, "1 to 16384", lambda ones: (ones(1, 16385), (16385,))
        ),
        *(
            Mistake(
                ValueError,
                "eps is .*0 or more",
                lambda ones: (ones(2, 4), (4,)),
                {"eps": eps},
            )
            for eps in (-1e-5, float("nan"))
        ),
    ),
    elsewhere="is on cuda:1: not the current one",
    repeatable=PLANS,
    repeated=tuple(
        at(4096, N, function=plan)
        for N in (1024, 4608, 8192, 15872)
        for plan in PLANS
    ),
    trains=("triton",),
    huge=(8192,),
    huge_functions=("triton",),
    sanitizers=("memcheck", "racecheck", "synccheck"),
    sanitized=(
        *(
            at(700, N, HALF, function=plan)
            for N in (1000, 1001)  # copied ahead, and not
            for plan in PLANS[:2]
        ),
        read_two,
    ),
    mutants={
        "c1 dropped": ("(wdy - x_hat * c1 - c2) * rstd", "(wdy - c2) * rstd"),
        "c2 dropped": (
            "(wdy - x_hat * c1 - c2) * rstd",
            "(wdy - x_hat * c1) * rstd",
        ),
        "masked lanes in the variance": (
            "x_centered = tl.where(mask, x - mean, 0)",
            "x_centered = x - mean",
        ),
        "sums without a place": (
            "sums_ptr += tl.program_id(0) * 2 * N + cols",
            "sums_ptr += cols",
        ),
        "every program once": (
            "tl.range(first, M, step, num_stages=STAGES)",
            "tl.range(first, step, step, num_stages=STAGES)",
        ),
        "only the last row": (
            "        dw += dy * x_hat",
            "        dw = dy * x_hat",
        ),
        "stage 2 stops early": (
            "mask = (rows < programs) & (cols < WIDTH)",
            "mask = (rows < programs - 1) & (cols < WIDTH)",
        ),
        "stage 2 has one turn": (
            "for first in range(0, programs, ROWS):",
            "for first in range(0, 1, ROWS):",
        ),
        "dy with strides of its own": ("dy = dy.contiguous()", ""),
    },
    kills=tuple(
        at(M, N, dy=dy, function=plan)
        for plan in PLANS
        for M, N, dy in (
            (3, 129, "contiguous"),
            (3, 9, "one number"),
            (9, 9, "contiguous"),
        )
    ),
)


def test_the_page_as_it_is(unedited):
    for plan in PLANS:
        case = at(17, 40, HALF)
        PAGE.operation.run(by(plan)(unedited), case, unedited.DEVICE)


@pytest.mark.cpu  # with two multiprocessors there are fewer programs than rows
def test_the_order_of_additions_follows_the_programs(page):
    """Why the same bits are promised for the same plan."""
    tensors = page.given(40, 24, SINGLE)
    first, again, other = (
        page.backward(*tensors, (programs, 1, 2), SINGLE)[1]
        for programs in (2, 2, 3)
    )
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_every_lane_reads_what_its_last_load_says(page):
    """Also where what is read is not 0."""
    x = 8 * (torch.arange(200, dtype=torch.int32, device=page.DEVICE) % 3)
    expected = torch.arange(8, device=page.DEVICE)
    for _ in range(7):
        expected += 8 + x[expected]
    end = torch.zeros_like(x[:8])
    page._read[(2,)](x, end, 7, LANES=4)
    assert end.tolist() == expected.tolist()


def test_script_runs_alone(output):
    assert output.count("Timing needs a GPU") == 1
    places = "[40, 41, 42, 43, 44, 45, 46, 47]"
    assert f"5 steps of 2 × 4 lanes, and at {places}" in output
    assert output.count("each element of y, dx, dw and db is right") == 2


def test_counted_bytes_in_flight(output):
    """Of x and dy: a row more for each stage above one."""
    line = r"N = (\d+), programs (\d), stages (\d): +(\d+) KB"
    found = re.findall(line, output)
    assert len(found) == 8
    for N, programs, stages, kilobytes in (map(int, line) for line in found):
        rows = programs * (1 if stages == 1 else stages - 1)
        assert kilobytes == rows * 2 * 2 * N // 1024


def test_exercise(output):
    right = output.split("right lanes: ")[1:]
    stub, solution = (line.splitlines()[0] for line in right)
    assert "False" in stub and "False" not in solution


@pytest.mark.cpu
def test_plans_of_the_page(unedited):
    """Programs, warps, stages, on an H100."""
    page = unedited
    found = {N: page.best_plan(N) for N in (200, 1024, 2048, 4096, 8192, 9000)}
    assert found == {
        200: (3, 4, 5),
        1024: (3, 4, 5),
        2048: (2, 4, 5),
        4096: (1, 4, 5),
        8192: (1, 8, 5),
        9000: (1, 16, 1),
    }


# What is counted by hand, beside what is compiled ----------------------------


def backward(page, M, N, dtype, plan):
    dy, x = torch.empty(2, M, N, dtype=dtype, device=page.DEVICE)
    mean, rstd = torch.empty(2, M, device=page.DEVICE)
    page.backward(dy, x, dy[0], mean, rstd, plan, dtype)


def backward_calls(plans):
    from compiled.aot import Call

    values = {"M": 4096, "dtype": "float16"}
    return [
        Call(PAGE.name, backward, values | {"N": N, "plan": plan})
        for N, plan in plans
    ]


def test_counted_by_hand_and_compiled(launches, unedited):
    """What the page says of registers, and of shared memory."""
    from compiled import occupancy
    from compiled.limits import Facts

    page = unedited
    plans = [(N, page.one_stage(N)) for N in page.WIDTHS]
    plans += [(N, page.best_plan(N)) for N in page.WIDTHS]
    every = launches(backward_calls(plans))
    for (N, plan), (built, _) in zip(plans, every, strict=True):
        per_sm, warps, stages = plan
        assert built.spills == 0
        most, *_ = occupancy.occupancy(
            "sm_90", built.registers, built.shared, warps
        )
        assert most // warps >= per_sm, N  # all run at a time
        if stages == 1:  # four numbers a lane, and 32 more a thread
            by_hand = 65536 // (4 * N + 32 * 32 * warps)
            assert abs(most // warps - min(by_hand, 64 // warps)) <= 1, N
            assert N < 8192 or most // warps == by_hand == 1
        assert (Facts(built).count("copy") > 0) == (stages > 1)
        rows = 3 * N * 2 * (stages - 1)  # x, dy and w
        assert stages == 1 or rows <= built.shared <= rows + 1024


def reading(page, LANES, warps):
    x = torch.empty(8, dtype=torch.int32, device=page.DEVICE)
    page._read[(page.NUM_SMS,)](x, x, 8, LANES=LANES, num_warps=warps)


def loads_in_flight(sass):
    """The most loads of a thread that it has requested and not yet used."""
    instruction = r"/\*[0-9a-f]+\*/\s+(?:@!?U?P\d+ )?(\S+)\s*([^;]*);"
    waiting, most = set(), 0
    for name, operands in re.findall(instruction, sass):
        registers = re.findall(r"\bR\d+", operands)
        loads = name.startswith("LDG")
        used = registers if name.startswith("ST") else registers[1:]
        waiting.difference_update(used)
        if loads:
            waiting.add(registers[0])
        most = max(most, len(waiting))
    return most


def test_what_the_reading_kernel_has_in_flight(launches):
    """What the page asks for: eight loads of each thread, in programs of 1 to
    32 warps, two of which fit on a multiprocessor."""
    from compiled.aot import Call

    sizes = (1, 2, 4, 8, 16, 32)
    calls = [
        Call(
            PAGE.name,
            reading,
            {"LANES": 256 * warps, "warps": warps},
            sass=True,
        )
        for warps in sizes
    ]
    for warps, (built,) in zip(sizes, launches(calls), strict=True):
        assert loads_in_flight(built.asm["sass"]) == 8
        assert programs_at_a_time(built) >= 2, warps


def programs_at_a_time(built):
    """Those of one kernel that fit on a multiprocessor."""
    from compiled import occupancy

    warps, *_ = occupancy.occupancy(
        "sm_90", built.registers, built.shared, built.num_warps
    )
    return warps // built.num_warps


def test_what_the_page_says_of_warps(launches):
    """How many programs fit, and how wide their loads are."""
    fit = {
        (1024, 4): 9, (1024, 8): 6, (1024, 16): 4, (1024, 32): 2,
        (4096, 4): 3, (4096, 8): 2, (4096, 16): 2, (4096, 32): 1,
        (8192, 8): 1, (8192, 16): 1, (8192, 32): 1,
    }  # fmt: skip
    plans = [(N, (MORE[N], warps, 1)) for N, warps in fit]
    found = [built for built, _ in launches(backward_calls(plans))]
    for (N, warps), built in zip(fit, found, strict=True):
        assert programs_at_a_time(built) == fit[N, warps], (N, warps)
        bytes_of_a_thread = 2 * N // (32 * warps)
        wide = re.findall(r"ld\.global(?:\.v(\d))?\.b(\d+)", built.asm["ptx"])
        widest = max(int(count or 1) * int(bits) for count, bits in wide) // 8
        assert widest == min(16, max(4, bytes_of_a_thread)), (N, warps)
        assert built.spills == 0


def test_what_the_page_says_of_spills(launches):
    """8192 columns in 4 warps do not fit into the registers of a thread. Nor
    do wider rows, if their loop copies ahead."""
    plans = [(8192, (1, 4, 1)), (8704, (1, 16, 2))]
    for built, _ in launches(backward_calls(plans)):
        assert built.spills > 0


def test_masked_elements_take_registers(launches):
    """Those of a tile of 8192 elements for 4608 columns."""
    plans = [(N, (1, 8, 5)) for N in (4608, 8192)]
    few, all_of_them = (
        built.registers for built, _ in launches(backward_calls(plans))
    )
    assert 0.9 * all_of_them <= few <= all_of_them


@pytest.mark.parametrize("stages", [2, 3, 5])
def test_when_a_row_is_requested(launches, stages):
    """At the end of a turn, and there is a place less than stages."""
    ((built, _),) = launches(backward_calls([(4096, (1, 4, stages))]))
    code = built.asm["ttgir"]
    places = re.findall(r"local_alloc : .*memdesc<(\d+)x4096xf16", code)
    assert places == 3 * [str(stages - 1)]  # x, dy and w
    loop = code[code.index("scf.for") :]
    loop = loop[: loop.index("scf.yield")]
    waits = loop.index("ttg.async_wait")
    first = loop.index("ttg.async_copy")
    assert waits < loop.index("ttg.local_load") < loop.index("tt.store")
    assert loop.index("tt.store") < first


def best_plans(page, M, widths, dtype):
    for N in widths:
        backward(page, M, N, dtype, page.best_plan(N, dtype.itemsize))


def test_best_plan_fits_into_the_shared_memory_of_an_older_gpu(launches):
    from compiled import occupancy
    from compiled.aot import Call

    values = {"M": 8, "widths": [8192, 16384], "dtype": "float16"}
    (built,) = launches([Call(PAGE.name, best_plans, values, "sm_80")])
    limits = occupancy.LIMITS["sm_80"]
    kernels = [b for b in built if b.kernel == "_layer_norm_bwd"]
    assert [b.num_stages for b in kernels] == [4, 1]
    for kernel in kernels:
        assert kernel.shared <= limits.shared - limits.reserved


def test_no_stages_are_tried_that_an_older_gpu_has_no_room_for(
    unedited, monkeypatch
):
    """A launch that asks for too much would end the page there."""
    from compiled import occupancy

    page = unedited
    limits = occupancy.LIMITS["sm_80"]
    monkeypatch.setattr(page, "SHARED", limits.shared - limits.reserved)
    monkeypatch.setattr(page, "ON_GPU", True)
    launched = []

    def timed(prepare):
        prepare()()
        return 2, 1, 4

    def launch(dy, x, w, mean, rstd, plan, dtype):
        launched.append((x.shape[1], plan[2]))

    monkeypatch.setattr(page, "device_time", timed)
    monkeypatch.setattr(page, "backward", launch)
    small = page.given
    monkeypatch.setattr(page, "given", lambda M, *of: small(2, *of))
    bytes_moved = 3 * 4096 * 2 * 8192
    speed = bytes_moved / 2 * 1e-3
    monkeypatch.setattr(page, "ceiling", lambda **of: (2 * speed, 0, 0))
    measure = page.bench_stages.fn
    given = {"M": 4096, "dtype": HALF, "mode": "backward"}
    tried = [(N, stages) for stages in (1, 4, 5) for N in page.WIDTHS]
    for N, stages in tried:
        found = measure(stages=stages, provider=str(N), **given)
        if N == 8192 and stages == 4:  # half of the copy, and its quantiles
            assert found == pytest.approx([50, 25, 100])
        assert (found[0] != found[0]) == ((N, stages) == (8192, 5))
    assert launched == [one for one in tried if one != (8192, 5)]


def wider_weights(page, M, N):
    x, dy = torch.empty(2, M, N, dtype=HALF, device=page.DEVICE)
    w, b = torch.empty(2, N, device=page.DEVICE)
    x, w, b = (t.clone().requires_grad_() for t in (x, w, b))
    torch.autograd.grad(page.layer_norm(x, (N,), w, b), (x, w, b), dy)


def test_weights_in_float32_fit_beside_rows_in_16_bits(launches):
    """The loop copies w ahead as well, whose numbers are wider here."""
    from compiled import occupancy
    from compiled.aot import Call

    ((_, built, _),) = launches(
        [Call(PAGE.name, wider_weights, {"M": 8, "N": 8192})]
    )
    limits = occupancy.LIMITS["sm_90"]
    assert built.kernel == "_layer_norm_bwd" and built.num_stages == 3
    assert built.shared <= limits.shared - limits.reserved


@pytest.mark.gpu
def test_every_knob_is_right(page):
    for N in page.WIDTHS:
        tensors = page.given(1151, N, HALF)
        dy, x, _, mean, rstd = (t.double() for t in tensors)
        x_hat = (x - mean) * rstd  # mean and rstd are columns
        expected = torch.stack([(dy * x_hat).sum(0), dy.sum(0)])
        few, warps, _ = page.best_plan(N)
        for plan in (
            page.one_stage(N),
            (8, 8, 1),
            *((few, warps, stages) for stages in (2, 3, 4, 5)),
        ):
            _, out = page.backward(*tensors, plan, SINGLE)
            difference = (out - expected).norm()
            assert difference <= 1e-5 * expected.norm(), (N, plan)


def compiled(page, N, warps, stages):
    dy, x, w, mean, rstd = page.given(64, N, HALF)
    sums = torch.empty(8, 2, N, device=page.DEVICE)
    return page._layer_norm_bwd[(8,)](
        dy, x, w, mean, rstd, torch.empty_like(x), sums, 64, N, N, stages,
        num_warps=warps,
    )  # fmt: skip


@pytest.mark.gpu
def test_compiled_as_the_page_says(page):
    """Four numbers a lane and some 32 more a thread; copies ahead."""
    for N in page.WIDTHS:
        _, warps, _ = page.one_stage(N)
        built = compiled(page, N, warps, 1)
        assert built.n_regs == pytest.approx(32 + N // (8 * warps), rel=0.25)
        assert built.n_spills == 0
        assert "cp.async.c" not in built.asm["ptx"]
        assert "cp.async.c" in compiled(page, N, warps, 4).asm["ptx"]
    assert compiled(page, 8192, 4, 1).n_spills > 0


@pytest.mark.gpu
def test_reading(page):
    """Every program has read its part of the last rows."""
    x = torch.zeros(50, 7, 1024, dtype=torch.int32, device=page.DEVICE)
    lanes = torch.arange(x[0].numel(), device=page.DEVICE)
    for steps in 49, 50:
        page._read[(7,)](x, end := x[0].clone(), steps, LANES=1024)
        assert torch.equal(end.flatten(), (lanes + steps * 7168).int())


@pytest.mark.cpu
def test_every_line_of_the_figures_measures_what_it_says():
    """A call of each provider, at one size: it moves what is counted."""
    calls = []

    def speed(bytes_moved, prepare):
        prepare()()
        calls.append(bytes_moved)
        return 2.0, 1.0, 3.0

    page = tutorial.load(PAGE.name, (("return 132", "return 2"),))
    page.ON_GPU, page.speed = True, speed
    page.best_of_three_compilations = lambda function, measure: measure(
        function
    )
    known = set()
    started = []

    class Read:
        def __getitem__(self, grid):
            return lambda **launch: started.append((grid, launch))

    page._read = Read()
    bench = page.bench_backward.benchmarks
    for provider in bench.line_vals:
        del calls[:]
        values = {"M": 5, "N": 24, "provider": provider}
        assert page.bench_backward.fn(**bench.args | values) == (2, 1, 3)
        tiles = 6 if provider == "copy" else 1
        assert calls == tiles * [3 * 5 * 24 * 2]
    for benchmark, knob in (
        (page.bench_programs, "programs"),
        (page.bench_warps, "warps"),
        (page.bench_stages, "stages"),
    ):
        bench = benchmark.benchmarks
        for N in bench.line_vals:
            del calls[:]
            values = {"M": 2, knob: bench.x_vals[-1], "provider": N}
            assert benchmark.fn(**bench.args | values) == [100, 50, 150]
            tiles = 0 if int(N) in known else 6  # the copy is measured once
            assert calls == (1 + tiles) * [3 * 2 * int(N) * 2]
            known.add(int(N))
    for KB, steps in (1, 488), (32, 15), (64, 7):
        del calls[:], started[:]
        found = page.bench_reading.fn(KB=KB, MB=1, provider="reading")
        assert found == (2, 1, 3)
        assert calls == [steps * 2 * 1024 * KB]
        ((grid, launch),) = started
        assert grid[0] * launch["LANES"] == 2 * 256 * KB
        assert launch["LANES"] == 256 * launch["num_warps"]
        assert launch["num_warps"] <= 32 and launch["steps"] == steps
