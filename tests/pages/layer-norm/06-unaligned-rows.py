"""What must hold of the page "Rows that begin anywhere"."""

import re
from math import gcd

import pytest
import torch

import tutorial
from compiled.declared import Kernel, Kernels
from conformance import (
    LayerNorm,
    Page,
    below_zero,
    guarded_allocations,
    too_wide,
)


def run(page, M, N, dtype):
    x, w, b, dy = page.inputs(M, N + 1, dtype)  # no multiple of 8
    torch.autograd.grad(page.layer_norm(x, (N + 1,), w, b), (x, w, b), dy)


def also(page, M, N, dtype):
    x, w, b, dy = page.inputs(13, 25, dtype)
    page.backward(dy, x, w, *page.forward(x, w, b, 1e-5, 1)[1:], x, None, 1)
    torch.autograd.grad(page.layer_norm(x, (25,), w, None), (x, w), dy)
    torch.autograd.grad(page.layer_norm(x[:, 3:], (22,)), x, dy[:, 3:])
    for plan in page.plans_from_column_0(25, 2):
        page.forward(x, w, b, 1e-5, 1, plan)
    for reads in 1, 2:  # the ceilings of both passes
        page._move[(5,)](x, dy, 13 * 25 // reads, reads, 1, BLOCK_SIZE=4096)
    x = x.detach().float()
    page._sum_of_row[(8,)](x, x, N=13, BLOCK=32, STEP=8)


SIZES = {
    "float16": [
        100, 512, 1150, 2046, 3000, 4096, 6000, 7776, 8190, 8192, 10230,
    ],
    "bfloat16": [4096, 10230],
    "float32": [512, 5110],
}  # fmt: skip

PUBLISHED = "2026-11-22"

KERNELS = Kernels(
    run=run,
    also=also,
    M=4096,
    N=[4096],
    dtype="float16",
    sizes=SIZES,
    kernels={
        "_layer_norm_fwd_shifted": Kernel(
            look="""
            ``x`` comes by asynchronous copies of 8 bytes, although rows begin
            anywhere; ``w`` and ``b`` are the loads of 2 bytes, before the
            loop.
            """,
            true=lambda code: [
                code.count("copy", 8) > 0 or code.amd,
                code.count("copy", 8) == code.count("copy"),
                code.count("load", 2) > 0,
            ],
            narrow_loads=136,  # w and b, before the loop
            narrow_stores=31,  # of 4 columns; mean and rstd; the ends of a row
            narrow_copies=68,  # of 4 columns
            copies=True,
        ),
        "_layer_norm_bwd_shifted": Kernel(
            look="""
            Rows come by copies of 8 bytes; the stores of 2 bytes are the ends
            of a row, those of 4 bytes the sums, after the loop.
            """,
            true=lambda code: [
                code.count("copy", 8) > 0 or code.amd,
                (code.registers > 128 and code.spills == 0)
                or code.target != "sm_90",
            ],
            narrow_loads=40,  # w, before the loop
            narrow_stores=104,  # sums, and the ends of a row
            narrow_copies=64,  # of 4 columns; mean and rstd
            copies=True,
        ),
        "_add_up_chunks": Kernel(
            look="That of page 05.",
            true=lambda code: [
                (code.count("early") == 1)
                == (code.target in ("sm_90", "sm_100"))
            ],
            narrow_loads=32,  # the sums of an odd width begin anywhere
            narrow_stores=1,  # of 16 columns
        ),
    },
)


HALF, BFLOAT, SINGLE, DOUBLE = LayerNorm.dtypes
at = LayerNorm.at
NO_GRADIENTS = 3 * (False,)

# Narrow chunks, so that narrow rows have several, and 8 programs, each with
# several tiles.
SMALL = (
    ("    rows = max(1024 // itemsize // lanes, 1)\n",
     "    rows = 2\n    chunk = min(chunk, 16)\n"),
    ("    rows = max(1024 // itemsize // chunk, 1)\n",
     "    rows = 2\n    chunk = min(chunk, 16)\n"),
    ("        return 4\n", "        return 1\n"),
)  # fmt: skip
# Columns on both sides of each step of the formulas.
STEPS = (1, 7, 507, 2047, 2101, 4097, 4609, 5099, 5101, 8401, 10231)
LOAD_W = "    ws = _load_vector(w_ptr, shift, N, ROWS, CHUNK, STEP)\n"


def tiny_rows(load):
    """Without eps the cube of rstd is more than float32 holds, and dx is
    not."""
    page = load("small")
    torch.manual_seed(0)
    x, dy = torch.randn(2, 19, 35, device=page.DEVICE)
    w = torch.rand(35, device=page.DEVICE)
    x = 1e-13 * x
    results = []
    for function, kind in (
        (page.layer_norm, SINGLE),
        (torch.nn.functional.layer_norm, DOUBLE),
    ):
        given = [t.to(kind).requires_grad_() for t in (x, w)]
        y = function(given[0], (35,), given[1], None, 0.0)
        results.append(torch.autograd.grad(y, given, dy.to(kind)))
    for ours, exact in zip(*results, strict=True):
        assert ours.isfinite().all()
        assert (ours - exact).norm() <= 1e-5 * exact.norm()


# Numbers with a unit that nothing has measured, and why they are right.
FACTS = {
    "eight times as many": "2 bytes a thread in place of 16",
    "eight times the requests": "2 bytes a thread in place of 16",
}
ODD = (1151, 4097, 4098, 4100, 10231)  # no multiple of 8
GAINED = (1151, 4097, 4098, 10231)  # where groups are wider than a row allows


def on_the_other_card(figure):
    """What the H200 shows; each order that the H100 has and it has not."""
    asked, reading, forward, backward = (
        figure(f"layer-norm-unaligned-{name}", "H200")
        for name in ("requests", "reading", "forward", "backward")
    )
    counts = figure("layer-norm-unaligned-requests", "H100").medians
    assert asked.medians == counts
    yield "The H200 counts the same."

    speeds = reading.all_medians("triton")
    slower = [reading.median("zero", N) for N in (4040, 4044, 4042, 4041)]
    yield (
        f"On the H200, the sum in groups reads {speeds.least} to "
        f"{speeds.most} GB/s, and from column 0 it reads {{}} GB/s, {{}} "
        "GB/s, {} GB/s, and {} GB/s.".format(*slower)
    )
    few, many, most = (
        reading.us("zero", N, matrices=1) for N in (4040, 4042, 4041)
    )
    each = 1000 * (most - many) / (63 * 31)  # ns
    assert 0 <= many - few < (most - many) / 4
    assert slower[3] < slower[2] < min(speeds)
    yield (
        f"On the H200 the three take {few} µs, {many} µs and {most} µs, and "
        f"each of the last requests adds {each:.1f} ns."
    )

    at_odd = forward.at(*ODD)
    shares = at_odd.shares("triton")
    ours = forward.shares("triton")
    assert forward.share("triton", 4096) == ours.least
    assert forward.share("triton", 1151) == shares.least
    yield (
        "On the H200 our kernel reaches "
        f"{forward.share('triton', 4096)}% of a copy at 4096 columns, "
        f"{forward.share('triton', 4097)}% at 4097, and {shares.least}% to "
        f"{shares.most}% at the five widths that are no multiple of 8."
    )
    best = forward.share("unshifted", 4096)
    assert best > 1.15 * forward.share("triton", 4096)
    yield (
        "There, one more column even helps, because our plan for 4096 columns "
        "is not the best one on this card. It requests nothing ahead, and the "
        "best of the four plans from column 0, with other warps or with rows "
        f"requested ahead, reaches {best}%."
    )
    alone = [forward.share("unshifted", N) for N in (4100, 4098, 4097)]
    gained = forward.at(*GAINED).ratios("triton", "unshifted")
    assert alone == sorted(alone, reverse=True)
    assert 1 < forward.ratio("triton", "unshifted", 4100) < 1.02
    yield (
        "From column 0, the kernel reaches {}% at 4100 columns, {}% at 4098, "
        "and {}% at 4097. ".format(*alone)
        + f"At 4100 columns groups reach {forward.share('triton', 4100)}%, "
        f"and at the four other widths they are {gained.least} to "
        f"{gained.most} times as fast."
    )

    def faster(passed):
        both = [
            passed.at(*ODD).ratios("triton", rival)
            for rival in ("torch", "torch.compile")
        ]
        assert min(one.least for one in both) > 1
        return [end for one in both for end in (one.least, one.most)]

    yield (
        "At the five widths ours is {} to {} times as fast as PyTorch, and "
        "{} to {} times as fast as torch.compile.".format(*faster(forward))
    )
    shares = backward.at(*ODD).shares("triton")
    farthest = backward.share("triton", 1151)
    assert farthest == min(backward.shares("triton"))
    assert backward.share("triton", 4097) > 0.93 * backward.share(
        "triton", 4096
    )
    yield (
        "On the H200 our backward pass reaches "
        f"{backward.share('triton', 4096)}% of the copy at 4096 columns, "
        f"{backward.share('triton', 4097)}% at 4097, and {shares.least}% to "
        f"{shares.most}% at the five widths. "
        "There it is {} to {} times as fast as PyTorch, and {} to {} times as "
        "fast as torch.compile.".format(*faster(backward))
    )
    for passed in forward, backward:
        theirs = passed.medians["torch"]
        assert min(theirs[4096], theirs[4100]) > 1.05 * max(
            theirs[4097], theirs[4098]
        )
    yield (
        f"On the H200 we reach {farthest}% at 1151 columns, where the pass "
        f"takes {backward.us('triton', 1151, matrices=3)} µs."
    )


def CLAIMS(figure):
    yield from on_the_other_card(figure)
    asked = figure("layer-norm-unaligned-requests", "H100")
    counts = {N: asked.median("zero", N) for N in (4040, 4044, 4042, 4041)}
    groups = {asked.median("triton", N) for N in counts}
    assert counts == {4040: 16, 4044: 32, 4042: 64, 4041: 127}
    assert groups == {16.0}
    yield (
        "On the H100, a row that is loaded from column 0 takes "
        f"{counts[4040]:.0f} requests at 4040 columns, {counts[4044]:.0f} at "
        f"4044, {counts[4042]:.0f} at 4042, and {counts[4041]:.0f} at 4041. "
        f"In groups, it takes {max(groups):.0f} at each of the four widths."
    )

    reading = figure("layer-norm-unaligned-reading", "H100")
    speeds = reading.all_medians("triton")
    slower = [reading.median("zero", N) for N in (4040, 4044, 4042, 4041)]
    yield (
        f"On the H100, the sum in groups reads {speeds.least} to "
        f"{speeds.most} GB/s at the four widths. From column 0 it reads "
        "{} GB/s with 16 requests a row, {} GB/s with 32, {} GB/s with 64, "
        "and {} GB/s with 127.".format(*slower)
    )
    # µs: a matrix, which is read once.
    few, many, most = (
        reading.us("zero", N, matrices=1) for N in (4040, 4042, 4041)
    )
    each = 1000 * (most - many) / (63 * 31)  # ns
    # The last 63 requests cost far more than the 48 before them, and groups
    # are fastest where they matter.
    assert 0 <= many - few < (most - many) / 4
    assert slower[3] < slower[2] < min(speeds)
    yield (
        f"The sum takes {few} µs with 16 requests a row, {many} µs with 64, "
        f"and {most} µs with 127."
    )
    yield f"and each of them adds {each:.1f} ns on average."

    forward = figure("layer-norm-unaligned-forward", "H100")
    # A column more costs little: as the page says in both passes.
    assert forward.share("triton", 4097) >= 0.95 * forward.share(
        "triton", 4096
    )
    alone = [forward.share("unshifted", N) for N in (4100, 4098, 4097)]
    assert alone == sorted(alone, reverse=True)
    gained = forward.at(*GAINED).ratios("triton", "unshifted")
    assert gained.least > 1.03
    shares = forward.at(*ODD).shares("triton")
    assert forward.share("triton", 10231) == shares.least
    assert 0.97 < forward.ratio("triton", "unshifted", 4100) < 1
    # PyTorch's forms for multiples of four, and for other widths.
    theirs = forward.medians["torch"]
    assert min(theirs[4096], theirs[4100]) > 1.3 * max(
        theirs[4097], theirs[4098]
    )
    assert min(forward.at(*ODD).ratios("triton", "torch")) > 1
    assert min(forward.at(*ODD).ratios("triton", "torch.compile")) > 1

    def ours(passed):
        """At 4096 and at 4097 columns, and the least and the most."""
        shares = passed.at(*ODD).shares("triton")
        return (
            passed.share("triton", 4096),
            passed.share("triton", 4097),
            shares.least,
            shares.most,
        )

    def faster(passed):
        both = [
            passed.at(*ODD).ratios("triton", rival)
            for rival in ("torch", "torch.compile")
        ]
        return [end for one in both for end in (one.least, one.most)]

    yield (
        "On the H100 our kernel reaches {}% of a copy at 4096 columns, {}% at "
        "4097, and {}% to {}% at the five widths that are no multiple of 8."
    ).format(*ours(forward))
    yield (
        "The kernel reaches {}% of a copy at 4100 columns, where a thread "
        "takes 8 bytes, {}% at 4098, where it takes 4, and {}% at 4097, where "
        "it takes 2."
    ).format(*alone)
    yield (
        "So at 4100 columns groups gain nothing: they reach "
        f"{forward.share('triton', 4100)}% there. At the four other widths "
        f"they are {gained.least} to {gained.most} times as fast."
    )
    falls = [
        forward.share(provider, N)
        for provider in ("torch", "torch.compile")
        for N in (4096, 4097)
    ]
    before, after, first, then = falls
    assert before > after and first > then
    yield (
        "PyTorch falls from {}% at 4096 columns to {}% at 4097, and "
        "torch.compile from {}% to {}%."
    ).format(*falls)
    yield (
        "At the five widths our kernel is {} to {} times as fast as PyTorch, "
        "and {} to {} times as fast as torch.compile."
    ).format(*faster(forward))

    backward = figure("layer-norm-unaligned-backward", "H100")
    assert backward.share("triton", 4097) >= 0.93 * backward.share(
        "triton", 4096
    )
    theirs = backward.medians["torch"]
    assert min(theirs[4096], theirs[4100]) > 1.05 * max(
        theirs[4097], theirs[4098]
    )
    assert min(backward.at(*ODD).ratios("triton", "torch")) > 1
    assert min(backward.at(*ODD).ratios("triton", "torch.compile")) > 1
    yield (
        "On the H100 our backward pass reaches {}% of the copy at 4096 "
        "columns, {}% at 4097, and {}% to {}% at the five widths that are no "
        "multiple of 8."
    ).format(*ours(backward))
    yield (
        "At these five widths it is {} to {} times as fast as PyTorch, and "
        "{} to {} times as fast as torch.compile."
    ).format(*faster(backward))
    farthest = backward.share("triton", 1151)
    assert farthest == min(backward.shares("triton"))
    yield (
        f"We are farthest from the copy at 1151 columns, with {farthest}%. "
        "There the whole pass takes only "
        f"{backward.us('triton', 1151, matrices=3)} µs,"
    )

    # The ladder, at 4097 columns.
    yield (
        "The forward pass makes 516 requests for a row. On the H100 it "
        f"reaches {forward.share('unshifted', 4097)}% of a copy, because"
    )
    yield (
        "The forward pass reaches "
        f"{forward.share('triton', 4097)}% of a copy, and the backward pass "
        f"{backward.share('triton', 4097)}%."
    )
    yield (
        f"It reaches {forward.share('torch', 4097)}% of a copy forward and "
        f"{backward.share('torch', 4097)}% backward."
    )
    yield (
        "**torch.compile** reaches "
        f"{forward.share('torch.compile', 4097)}% and "
        f"{backward.share('torch.compile', 4097)}%."
    )


PAGE = Page(
    __file__,
    LayerNorm(),
    {"layer_norm": lambda page: page.layer_norm},
    # Few programs in the second kernel.
    quick=(("columns_per_program = 16", "columns_per_program = 256"),),
    forms={"": (), "small": SMALL},
    cases=(
        *(
            at(M, N, dtype, form="small")
            for dtype in LayerNorm.dtypes
            for M, N in ((19, 17), (20, 35), (5, 48))
        ),
        # The widest rows with gradients, and without.
        at(1, 10231, HALF),
        at(2, 16383, HALF, wanted=NO_GRADIENTS),
    ),
    # In other types, which have the same plans for as many bytes, a narrow row
    # and the widest one.
    full=(
        *(at(1151, N, HALF) for N in STEPS),
        *(
            at(1151, N, dtype)
            for dtype, widths in (
                (BFLOAT, (1151, 10231)),
                (SINGLE, (257, 5115)),
                (DOUBLE, (129, 2557)),
            )
            for N in widths
        ),
        *(
            at(301, N, HALF, wanted=NO_GRADIENTS)
            for N in (12345, 16381, 16384)
        ),
    ),
    mistakes=(
        *below_zero(),
        too_wide(8193, "8193 .* 8192 .*Every width"),
        too_wide(5117, "5117 .* 5116 .*Every width", wanted=True),
    ),
    elsewhere="is on cuda:1: not the current one",
    repeatable=("layer_norm",),
    repeated=tuple(at(4096, N, HALF) for N in (1151, 4097, 10231)),
    trains=("layer_norm",),
    huge=(8191,),
    sanitizers=("memcheck", "racecheck", "synccheck"),
    # 704 rows end at a multiple of 16 bytes: no load is out of bounds.
    sanitized=tuple(
        at(704, N, dtype)
        for N, dtype in ((1001, HALF), (4097, HALF), (41, SINGLE))
    ),
    prints={
        "Timing needs a GPU": 2,
        "each element of y, dx, dw and db is right": 2,
        f"13 ones: {8 * [13.0]}": 1,
        "so far apart: {13: 8, 14: 8, 20: 8, 24: 8}": 1,  # the stub
        "so far apart: {13: 8, 14: 4, 20: 2, 24: 1}": 1,
    },
    mutants={
        "columns of other rows in the sums": (
            "        x = tl.where(inside, x, 0)\n    return x",
            "        x = x\n    return x",
        ),
        "groups written as a whole": (
            "mask=mask & whole)",
            "mask=mask & (lane // STEP * STEP < N + shift))",
        ),
        "edges not written": ("inside & (whole == 0)", "inside & (lane < 0)"),
        "the shift of row 0": (
            f"    shift = i % STEP * N % STEP\n{LOAD_W}    bs",
            f"    shift = i * 0\n{LOAD_W}    bs",
        ),
        "w without the shift": ("lane - shift + tl.zeros", "lane + tl.zeros"),
        "sums with the shift": ("(0) * 2 * N - shift", "(0) * 2 * N"),
        "rows without a mask": (
            "mask = row < M - first\n        if",
            "mask = row < M\n        if",
        ),
        "the cube of rstd": (
            "sum1[:, None] * rstd * rstd * rstd / N",
            "sum1[:, None] * (rstd * rstd * rstd / N)",
        ),
        "c1 dropped": ("wdy - (d * c1 + c2)", "wdy - c2"),
        "c2 dropped": ("wdy - (d * c1 + c2)", "wdy - d * c1"),
        "sums of the last tile": ("(dbs[c] + db,)", "(db,)"),
        "programs of other shifts": (
            "return step * min(max(at_a_time // step, 1), tiles)",
            "return min(3, tiles)",
        ),
        "dy with strides of its own": ("dy.contiguous()", "dy"),
    },
    kills=(
        at(20, 35, HALF, form="small"),
        at(3, 9, form="small", dy="one number"),
        tiny_rows,
    ),
)


@pytest.mark.parametrize("first", [0, 3, 8])
@pytest.mark.parametrize("more", [0, 5, 8])
def test_columns_of_a_wider_matrix(load, first, more):
    """Views are read where they are; the other columns are NaN."""
    page, operation = load("small"), PAGE.operation
    M, N = (1151, 4097) if page.ON_GPU else (11, 21)
    case = at(M, N, HALF)
    tensors = operation.tensors(case, page.DEVICE)
    wide = tensors["x"].new_full((M, first + N + more), float("nan"))
    x = wide[:, first : first + N].copy_(tensors["x"])
    tensors["x"] = x
    assert more + first == 0 or x.stride(0) > N
    with guarded_allocations():
        found = operation.results(page.layer_norm, case, tensors)
    operation.judge(case, tensors, found)


def test_when_lanes_are_shifted(page):
    def step(*shape, first=0, dtype=HALF, cut=None):
        flat = torch.zeros(first + 4096, dtype=dtype)[first:]
        x = flat[: shape[0] * shape[1]].view(shape)
        return page.lane_step(cut or shape[1], x[:, :cut])

    assert step(3, 13) == 8 and step(3, 13, dtype=SINGLE) == 4
    assert step(3, 16) == 1  # all rows are aligned
    assert step(3, 13, first=1) == 1  # no row begins where y's does
    assert step(3, 21, cut=13) == 8 and step(3, 16, cut=13) == 1


@pytest.mark.parametrize("itemsize", [2, 4, 8])
def test_formulas_answer_for_every_width(page, itemsize):
    """Powers of two, and what a thread and a multiprocessor hold."""
    for step in 1, 16 // itemsize:
        for rule, most in (
            (page.plan_forward, 32768),
            (page.plan_backward, 20464),
        ):
            for N in {*range(1, 300), *range(301, most // itemsize + 1, 37)}:
                if step > 1 and N % step == 0:
                    continue
                plan = rule(N, itemsize, step)
                rows, chunk, warps = (
                    plan[key] for key in ("ROWS", "CHUNK", "num_warps")
                )
                assert all(v & (v - 1) == 0 for v in (rows, chunk, warps))
                assert warps <= 8
                lanes = -(-(N + step - 1) // chunk) * chunk
                assert lanes - N < chunk + step
                matrices = 2 if rule is page.plan_backward else 1
                tile = matrices * rows * lanes * itemsize
                ahead = (plan["STAGES"] - 1) * tile * (8 // warps)
                assert ahead <= 128 * 1024 or N < 64


@pytest.mark.parametrize("N", range(1, 33))
def test_distance_is_the_least(page, N):
    """Of the solution."""
    least = next(d for d in range(1, 9) if d * N % 8 == 0)
    assert page.distance_1(N) == least


@pytest.mark.parametrize("form", ["small"])
def test_rows_of_tiny_numbers(load, form):
    tiny_rows(load)


# What a warp asks for --------------------------------------------------------


@pytest.mark.cpu
@pytest.mark.parametrize("N", [13, 100, 1000, 4040, 4041, 4042, 4044])
def test_requests_and_sectors_are_those_of_each_thread(page, N):
    """Counted thread by thread, for both kinds of lanes."""
    width = page.bytes_of_a_thread(N)
    assert width == gcd(2 * N, 16)
    for in_groups in False, True:
        requests, sectors = 0, 0
        for row in range(16):
            first, end = 2 * N * row, 2 * N * (row + 1)
            if in_groups:
                first, end, width = first - first % 16, end + -end % 16, 16
            threads = range(first, end, width)
            assert all(at % width == 0 for at in threads)
            for warp in range(0, len(threads), 32):
                requests += 1
                sectors += len(
                    {
                        byte // 32
                        for at in threads[warp : warp + 32]
                        for byte in range(at, min(at + width, end))
                    }
                )
        found = page.mean_of_rows(N, in_groups)
        assert found == pytest.approx((requests / 16, sectors / 16))


def test_what_the_script_prints_of_requests(output):
    line = r"^ +(\d+) +(\d+) +(\d+) +(\d+) +(\d+) +(\d+)$"
    found = re.findall(line, output, re.M)
    assert [tuple(map(int, each)) for each in found] == [
        (4040, 16, 16, 260, 16, 260),
        (4041, 2, 127, 372, 16, 261),
        (4042, 4, 64, 309, 16, 261),
        (4044, 8, 32, 277, 16, 261),
    ]


def sum_of_row(page, M, N, dtype, step):
    x = torch.empty(M, N, dtype=dtype, device=page.DEVICE)
    page._sum_of_row[(M,)](x_ptr=x, sums_ptr=x, N=N, BLOCK=4096, STEP=step)


def forward_alone(page, M, N, dtype, step, changes):
    x = torch.empty(M, N, dtype=dtype, device=page.DEVICE)
    w = torch.empty(N, dtype=dtype, device=page.DEVICE)
    plan = page.plan_forward(N, 2, step) | changes
    page.forward(x, w, w, 1e-5, step, plan)


def compiled(launches, run, several):
    from compiled.aot import Call

    values = {"M": 4096, "dtype": "float16"}
    calls = [Call(PAGE.name, run, values | each) for each in several]
    return [built for ((built, *_),) in ((each,) for each in launches(calls))]


def test_the_sum_loads_as_counted(launches):
    """16 bytes a thread in groups, and from column 0 what divides a row."""
    from compiled import occupancy
    from compiled.limits import Facts

    cases = [
        {"N": N, "step": step}
        for N in (4040, 4041, 4042, 4044)
        for step in (8, 1)
    ]
    for case, built in zip(
        cases, compiled(launches, sum_of_row, cases), strict=True
    ):
        facts = Facts(built)
        width = 16 if case["step"] == 8 else gcd(2 * case["N"], 16)
        warps, *_ = occupancy.occupancy(
            "sm_90", built.registers, built.shared, built.num_warps
        )
        assert warps // built.num_warps == 16
        # 4 warps load 4096 lanes of 2 bytes.
        assert facts.count("load", width) == 4096 * 2 // (128 * width), case
        assert facts.count("load") == facts.count("load", width)


def test_what_the_page_says_of_programs_and_loads(launches):
    """From column 0 at four widths: as many programs fit; only the loads and
    the stores differ. By 2 bytes nothing can be requested ahead."""
    from compiled import occupancy
    from compiled.limits import Facts

    widths = {4096: 16, 4100: 8, 4098: 4, 4097: 2}
    cases = [
        {"N": N, "step": 1, "changes": {"STAGES": stages}}
        for N in widths
        for stages in (1, 3)
    ]
    for case, built in zip(
        cases, compiled(launches, forward_alone, cases), strict=True
    ):
        facts, width = Facts(built), widths[case["N"]]
        warps, *_ = occupancy.occupancy(
            "sm_90", built.registers, built.shared, built.num_warps
        )
        assert warps // built.num_warps == 4
        ahead = case["changes"]["STAGES"] > 1 and width > 2
        assert (facts.count("copy") > 0) == ahead
        if ahead:
            assert facts.count("copy") == facts.count("copy", width)
        else:
            assert facts.count("load") == facts.count("load", width)


@pytest.mark.cpu
def test_plans_that_are_tried_from_column_0(page):
    for N in page.WIDTHS:
        plans = page.plans_from_column_0(N, 2)
        assert plans[0] == page.plan_forward(N, 2, 1)
        assert len(plans) == (2 if N % 2 else 4)
        for plan in plans:
            chunk = plan["CHUNK"]
            assert chunk & (chunk - 1) == 0 and plan["STEP"] == 1


@pytest.mark.cpu
def test_every_line_of_the_figures_measures_what_it_says():
    """A call of each provider, at one size: it moves what is counted."""
    calls = []

    def speed(bytes_moved, prepare):
        prepare()()
        calls.append(bytes_moved)
        return 2.0, 1.0, 3.0

    page = tutorial.load(PAGE.name)
    page.ON_GPU, page.speed = True, speed
    page.best_of_three_compilations = lambda function, measure: measure(
        function
    )
    for bench, matrices in (
        (page.bench_forward, 2),
        (page.bench_backward, 3),
        (page.bench_reading, 1),
    ):
        for provider in bench.benchmarks.line_vals:
            del calls[:]
            values = {"M": 5, "N": 26, "provider": provider}
            found = bench.fn(**bench.benchmarks.args | values)
            assert found == (2, 1, 3)
            if provider == "torch.compile" and matrices == 3:
                assert calls == []  # measured with the forward pass
                continue
            times = {"copy": 6, "unshifted": 4}.get(provider, 1)
            expected = times * [matrices * 5 * 26 * 2]
            if provider == "torch.compile":
                expected += [3 * 5 * 26 * 2]
            assert calls == expected
