"""What must hold of the page "Chunks instead of padding"."""

import re
from itertools import pairwise

import pytest
import torch

from compiled.declared import Case, Kernel, Kernels
from conformance import LayerNorm, Page, below_zero, negative_eps, too_wide
from measurements.figure import from_to, series


def run(page, M, N, dtype):
    x, w, b, dy = page.inputs(M, N, dtype)
    torch.autograd.grad(page.layer_norm(x, (N,), w, b), (x, w, b), dy)


def also(page, M, N, dtype):
    x, w, _, dy = page.inputs(13, 24, dtype)
    torch.autograd.grad(page.layer_norm(x, (24,), w, None), (x, w), dy)
    torch.autograd.grad(page.layer_norm(x, (24,)), x, dy)
    for kernel in (page._row_sums, page._row_sums_1):
        kernel[(3,)](x.float(), w.float(), N=13, CHUNK=8)
    page._move[(M,)](x, x, M * N // 2, 2, 1, BLOCK_SIZE=4096)  # the ceiling


def forward(page, M, N, dtype):
    x, w, b, _ = (t.detach() for t in page.inputs(M, N, dtype))
    page.layer_norm(x, (N,), w, b)


SIZES = {
    "float16": [
        256, 1024, 1280, 1536, 2048, 2816, 3584, 4096, 4608, 5120, 6656,
        8192, 8704, 10240,
    ],
    "bfloat16": [4096, 10240],
    "float32": [1024, 2304, 5120],
}  # fmt: skip

PUBLISHED = "2026-11-22"

KERNELS = Kernels(
    run=run,
    also=also,
    M=4096,
    N=[4096, 4608],
    dtype="float16",
    sizes=SIZES,
    kernels={
        "_layer_norm_fwd_chunks": Kernel(
            look="""
            Each chunk is one load of 16 bytes for each thread; ``x``, ``w``
            and ``b`` are read once.
            """,
            true=lambda code: [
                code.loaded == 3 * 2 * 4096
                or code.amd,  # whose warps are wider
                code.narrow("load") == 0 or code.amd,
            ],
            true_at={
                4608: lambda code: [
                    code.loaded == 3 * 2 * 5 * 1024,  # half a chunk is masked
                ]
            },
            narrow_stores=2,  # mean and rstd
        ),
        "_layer_norm_bwd_chunks": Kernel(
            look="""
            Look at the registers: two sums in float32 for each column, and
            nothing is spilled.
            The rows come by asynchronous copies of 16 bytes.
            """,
            true=lambda code: [code.registers > 128, code.spills == 0],
            copies=True,
            narrow_copies=8,  # mean and rstd
            narrow_stores=8,  # sums of narrow rows
            spills={8704: 8, 9216: 8, 9728: 8, 9984: 8},  # two registers
        ),
        "_add_up_chunks": Kernel(
            look="""
            A program reads the sums of all programs, 16 columns of each, by 16
            bytes.
            On sm_90 and sm_100 it starts early.
            """,
            true=lambda code: [
                code.narrow("load") == 0,
                (code.count("early") == 1)
                == (code.target in ("sm_90", "sm_100")),
            ],
            narrow_stores=1,  # of 16 columns
        ),
    },
    cases={
        "forward": Case(
            run=forward,
            sizes={
                "float16": [12288, 16384, 20480, 24576, 32768],
                "float32": [8192, 12288, 16384],
            },
            kernels={
                "_layer_norm_fwd_chunks": {
                    # Held to registers with which a second program fits.
                    "spills": {24576: 8},
                },
            },
        ),
    },
)


CARD = "H100"


def rounded(number, rounding):
    number.rounding = rounding
    return number


def lanes_forward(figure):
    """Idle lanes forward: nothing to see."""
    of = figure("layer-norm-chunks-lanes", CARD)
    apart = max(
        abs(100 * (ratio - 1)) for ratio in of.ratios("triton", "tile")
    )
    # "Padding is free": less than what two measurements of one kernel differ.
    assert apart <= 1
    yield (
        f"On the H100 chunks reach {from_to(of.shares('triton'))} of a copy, "
        f"and one tile reaches {from_to(of.shares('tile'))}. Over all widths "
        f"they differ by up to {apart:.1f}%."
    )
    yield f"It reaches {of.share('tile', 4608)}% of a copy, because masked"
    yield (
        "have 10% idle, and reach "
        f"{of.share('triton', 4608)}%. They are equally fast."
    )


def lanes_backward(figure):
    """Idle lanes backward."""
    of = figure("layer-norm-chunks-lanes-backward", CARD)

    def ratio(N):
        return rounded(of.ratio("triton", "tile", N), ".2f")

    for N in (8704, 10240):
        assert ratio(N) >= 1.1, N
    # "No more than at 2560 columns", where no lane is saved.
    for N in (4608, 5120):
        assert 1.01 <= ratio(N) <= ratio(2560), N
    for N in (6656, 8192):
        assert 0.99 <= ratio(N) <= 1.01, N
    a, b, c, d, e, f, g = map(
        ratio, (8704, 10240, 4608, 5120, 2560, 6656, 8192)
    )
    yield (
        f"On the H100 it is {a} at 8704 columns and {b} at 10240, where "
        "chunks have 10240 lanes and the tile has 16384 of them. It is "
        f"{c} at 4608 columns and {d} at 5120, where it is 6144 lanes against "
        "8192 lanes. And "
        f"it is {e}, {f} and {g} at 2560, 6656 and 8192 columns, where both "
        "have the same number of lanes."
    )
    yield f"We have not looked into the {100 * (e - 1):.0f}% at 2560 columns."
    # Most of the difference is due to loads ahead, not all.
    wide = of.at(8704, 10240)
    for N in (8704, 10240):
        gain = of.ratio("triton", "one stage", N) - 1
        assert 0 < of.ratio("one stage", "tile", N) - 1 < gain, N
    alone, tile = wide.shares("one stage"), wide.shares("tile")
    yield (
        f"With a single stage, chunks reach {alone[0]}% of the copy at 8704 "
        f"columns and {alone[1]}% at 10240, where the tile reaches {tile[0]}% "
        f"and {tile[1]}%."
    )
    both = of.at(4608, 8704)
    tile, chunks = both.shares("tile"), both.shares("triton")
    yield f"It reaches {tile[0]}% and {tile[1]}% of the copy."
    yield f"They reach {chunks[0]}% and {chunks[1]}%."


def against_pytorch(figure, mode, copy):
    """Shares of a pass, and how many times as fast it is."""
    of = figure(f"layer-norm-chunks-{mode}", CARD)
    ours, pytorch, compiled = (
        from_to(of.shares(each))
        for each in ("triton", "torch", "torch.compile")
    )
    yield (
        f"{ours} of {copy}, PyTorch reaches {pytorch}, and torch.compile "
        f"reaches {compiled}."
    )
    gain = of.ratios("triton", "torch")
    assert gain.least > 1
    yield (
        f"{mode.capitalize()}, ours is {gain.least} to {gain.most} times as "
        "fast as PyTorch."
    )


def torch_compile(figure):
    """It is faster forward, at one width."""
    of = figure("layer-norm-chunks-forward", CARD)
    widths = list(of.medians["triton"])
    faster = [
        N for N in widths if of.ratio("torch.compile", "triton", N) > 1.01
    ]
    assert faster == [8192]
    compiled = of.share("torch.compile", 8192)
    ours = of.share("triton", 8192)
    yield (
        "At 8192 columns torch.compile is faster than ours: it reaches "
        f"{compiled}%, and ours {ours}%."
    )
    yield (
        "On the H100 it reaches "
        f"{compiled}% of a copy at 8192 columns, and ours {ours}%."
    )
    # "Equal", within the spread of one measurement.
    equal = [512, 15872]
    for N in equal:
        assert abs(of.ratio("triton", "torch.compile", N) - 1) <= 0.01, N
    others = [N for N in widths if N not in faster + equal]
    assert len(others) == 3
    ahead = of.at(*others).ratios("triton", "torch.compile")
    assert ahead.least > 1.05
    yield (
        "at the other three ours is "
        f"{ahead.least} to {ahead.most} times as fast."
    )
    # What w and b cost, with one plan.
    same = (4096, 4608, 8192)
    without = figure("layer-norm-chunks-lanes", CARD).at(*same)
    alone, ours = (each.at(*same).shares("triton") for each in (without, of))
    for bare, whole in zip(alone, ours, strict=True):
        assert bare - whole > 0.5 * (100 - whole), "most of what we lose"
    a, b, c = alone
    yield (
        f"without ``w`` and ``b``, it reached {a}% at 4096 columns, {b}% at "
        f"4608 and {c}% at 8192. With them, it reaches {series(ours, '%')}."
    )
    # Backward it is not.
    of = figure("layer-norm-chunks-backward", CARD)
    gain = of.ratios("triton", "torch.compile")
    assert gain.least > 1
    yield (
        f"It is {gain.least} to {gain.most} times as fast as torch.compile."
    )


def why_backward(figure):
    """What the causes of the backward pass must fit."""
    of = figure("layer-norm-chunks-backward", CARD)
    ours = of.shares("triton")
    assert all(a < b for a, b in pairwise(ours))
    yield (
        f"At 1024 columns we reach {ours[0]}%, because the whole pass takes "
        f"only {of.us('triton', 1024, 3)} µs there."
    )
    # What we lose is on a straight line: as much as the sums, and the same at
    # each width.
    lost = {
        N: of.us("triton", N, 3) - of.us("copy", N, 3)
        for N in of.medians["triton"]
    }
    each = rounded((lost[10240] - lost[1024]) / 9, ".2f")
    same = lost[1024] - each
    for N, time in lost.items():
        assert abs(same + each * N / 1024 - time) <= 0.5, N
    of_sums = rounded(
        2 * 132 * 2 * 4 * 1024 / of.median("copy", 10240) / 1e3, ".2f"
    )
    assert abs(each / of_sums - 1) <= 0.2
    yield (
        f"At 1024 columns we take {lost[1024]} µs longer, at 4608 columns "
        f"{lost[4608]} µs, and at 10240 columns {lost[10240]} µs. All six "
        "widths lie within half a microsecond of a straight line: "
        f"{same} µs, and {each} µs more for each 1024 columns."
    )
    yield f"1.1 MB, twice, which take {of_sums} µs at the speed of the copy."
    # Less than five matrices explain.
    most = of.shares("torch").most
    assert most < 60
    yield f"PyTorch reaches {most}% at most"
    both = of.at(4608, 8704)
    ours, pytorch = both.shares("triton"), both.shares("torch")
    yield f"rows and stages, reaches {ours[0]}% and {ours[1]}%."
    assert f"{pytorch[0]}" == f"{pytorch[1]}", "at both"
    yield f"moves five matrices, and reaches {pytorch[0]}% at both."


def early_start(figure):
    """What the early start of the second kernel is worth."""
    of = figure("layer-norm-chunks-early", CARD)
    alone = "one by one"
    early, late = (
        [of.us(each, N, 3) for N in (1024, 4608, 10240)]
        for each in ("triton", alone)
    )
    # "Hardly anything."
    for one, other in zip(early, late, strict=True):
        assert abs(other / one - 1) <= 0.01
    assert f"{early[0]}" == f"{late[0]}", "with and without"
    saved = [other - one for one, other in zip(early, late, strict=True)]
    assert min(saved[1:]) > 0.2
    assert max(saved[:2]) <= saved[2], "where there is room it gains no more"
    yield (
        f"On the H100 the pass takes {early[0]} µs at 1024 columns, with the "
        "early start and without it. At 4608 columns the early start saves "
        f"{saved[1]} µs of {late[1]} µs, and at 10240 columns {saved[2]} µs "
        f"of {late[2]} µs."
    )


def other_warps(figure):
    """The formula, and with half and twice the warps."""
    forward = figure("layer-norm-chunks-warps-forward", CARD)
    backward = figure("layer-norm-chunks-warps-backward", CARD)
    half, twice = "half the warps", "twice the warps"

    # Half the warps win at no width.
    assert backward.at(1280, 5888, 9984).ratios("triton", half).least > 1.03
    assert abs(backward.ratio("triton", half, 3328) - 1) <= 0.005
    assert forward.ratios("triton", half).least > 1.02
    ours, less, more = (
        from_to(forward.shares(each)) for each in ("triton", half, twice)
    )
    yield (
        f"Forward, on the H100, it reaches {ours} of a copy at these widths, "
        f"half the warps reach {less}, and twice the warps reach {more}."
    )
    # Forward, twice the warps win at two widths, and at no other.
    gains = {N: forward.ratio(twice, "triton", N) for N in (3328, 5888)}
    assert all(gain > 1 for gain in gains.values())
    assert forward.at(1280, 9984).ratios("triton", twice).least > 1
    one, three = (100 * (gain - 1) for gain in gains.values())
    yield (
        f"Here the formula loses: twice the warps are {one:.0f}% faster at "
        f"3328 columns, and {three:.0f}% at 5888."
    )

    # Backward, they lose at every width.
    losses = backward.ratios("triton", twice)
    # "There, twice the warps lose least."
    assert losses.least == backward.ratio("triton", twice, 9984) >= 1.05
    ours = from_to(backward.shares("triton"))
    less, more = (series(backward.shares(each), "%") for each in (half, twice))
    yield (
        f"Backward, it reaches {ours}, half the warps reach {less} at the "
        f"four widths, and twice the warps reach {more}."
    )
    assert backward.ratio("triton", half, 5888) >= 1.15
    lost = 100 * (1 - backward.ratio(half, "triton", 1280))
    assert lost <= 5
    yield (
        f"half the warps lose {lost:.0f}% at the first of the two, and "
        "nothing at the second."
    )
    slower = backward.ratio("triton", half, 9984)
    assert slower >= 5
    yield (
        "At 9984 columns half the warps are slower by a factor of "
        f"{slower:.0f}."
    )

    yield (
        f"at this width they reach {forward.share(half, 9984)}% on the H100, "
        f"and the formula {forward.share('triton', 9984)}%."
    )
    lost = 100 * (1 - forward.ratio(twice, "triton", 9984))
    assert lost >= 2
    yield f"They are {lost:.0f}% slower at this width."


def on_the_other_card(figure):
    """What the H200 shows; each order that the H100 has and it has not."""
    lanes, lanes_backward, forward, backward, early = (
        figure(f"layer-norm-chunks-{name}", "H200")
        for name in (
            "lanes", "lanes-backward", "forward", "backward", "early"
        )
    )  # fmt: skip
    apart = max(abs(100 * (r - 1)) for r in lanes.ratios("triton", "tile"))
    assert apart <= 2
    yield (
        f"On the H200 chunks reach {from_to(lanes.shares('triton'))} of a "
        f"copy, and one tile reaches {from_to(lanes.shares('tile'))}. They "
        f"differ by up to {apart:.1f}% there."
    )

    ratio = {
        N: rounded(lanes_backward.ratio("triton", "tile", N), ".2f")
        for N in lanes_backward.medians["triton"]
    }
    before = figure("layer-norm-chunks-lanes-backward", "H100")
    for N in (8704, 10240):
        assert ratio[N] > 1.1 * before.ratio("triton", "tile", N), N
    for N in (4608, 5120):
        assert 1.01 <= ratio[N] <= ratio[2560], N
    for N in (6656, 8192):
        assert 0.99 <= ratio[N] <= 1.01, N
    yield (
        f"On the H200 chunks gain more above 8192 columns: it is "
        f"{ratio[8704]} at 8704 columns and {ratio[10240]} at 10240. It is "
        f"{ratio[2560]} at 2560 columns, {ratio[4608]} and {ratio[5120]} at "
        f"4608 and 5120, and {ratio[6656]} and {ratio[8192]} at 6656 and 8192."
    )
    wide = lanes_backward.at(8704, 10240)
    alone, tile, chunks = (
        wide.shares(name) for name in ("one stage", "tile", "triton")
    )
    for one, other, most in zip(alone, tile, chunks, strict=True):
        assert 0 < one / other - 1 < most / one - 1
    yield (
        "On the H200, chunks with a single stage reach "
        f"{series(alone, '%')} of the copy at these two widths, the tile "
        f"reaches {series(tile, '%')}, and chunks with loads ahead reach "
        f"{series(chunks, '%')}."
    )

    def shares(of):
        return [
            from_to(of.shares(name))
            for name in ("triton", "torch", "torch.compile")
        ]

    ours, pytorch, compiled = shares(forward)
    gain = forward.ratios("triton", "torch")
    yield (
        f"On the H200 our kernel reaches {ours} of a copy, PyTorch reaches "
        f"{pytorch}, and torch.compile reaches {compiled}. Ours is "
        f"{gain.least} to {gain.most} times as fast as PyTorch."
    )
    over = {
        N: forward.ratio("triton", "torch.compile", N)
        for N in forward.medians["triton"]
    }
    assert 0.98 < over[8192] < 0.995 and 1.005 < over[512] < 1.02
    others = [N for N in over if N not in (512, 8192)]
    assert len(others) == 4 and over[15872] > 1.15
    ahead = forward.at(*others).ratios("triton", "torch.compile")
    assert ahead.least > 1.05
    yield (
        f"At 8192 columns torch.compile reaches "
        f"{forward.share('torch.compile', 8192)}% there, and ours "
        f"{forward.share('triton', 8192)}%. At 512 columns ours is "
        f"{100 * (over[512] - 1):.0f}% faster, and at the other four it is "
        f"{ahead.least} to {ahead.most} times as fast."
    )
    same = (4096, 4608, 8192)
    bare, whole = (
        each.at(*same).shares("triton") for each in (lanes, forward)
    )
    assert all(a > b for a, b in zip(bare, whole, strict=True))
    yield (
        f"On the H200, it reached {series(bare, '%')} without them, and "
        f"reaches {series(whole, '%')} with them."
    )

    ours, pytorch, compiled = shares(backward)
    over_torch = backward.ratios("triton", "torch")
    over_compiled = backward.ratios("triton", "torch.compile")
    assert min(over_torch.least, over_compiled.least) > 1
    yield (
        f"On the H200 our backward pass reaches {ours} of the copy, PyTorch "
        f"reaches {pytorch}, and torch.compile reaches {compiled}. Ours is "
        f"{over_torch.least} to {over_torch.most} times as fast as PyTorch, "
        f"and {over_compiled.least} to {over_compiled.most} times as fast as "
        "torch.compile."
    )
    lost = {
        N: backward.us("triton", N, 3) - backward.us("copy", N, 3)
        for N in backward.medians["triton"]
    }
    line = (lost[10240] - lost[1024]) / (10240 - 1024)
    off = max(lost[N] - lost[1024] - line * (N - 1024) for N in lost)
    assert off > 0.5
    yield (
        f"On the H200 we take {lost[1024]}, {lost[4608]} and {lost[10240]} µs "
        "longer than the copy at these three widths, and the widths between "
        f"lie above the straight line from the first to the last, by up to "
        f"{off:.1f} µs."
    )
    times = {
        name: [early.us(name, N, 3) for N in (1024, 4608, 10240)]
        for name in ("triton", "one by one")
    }
    saved = [
        late - soon
        for soon, late in zip(
            times["triton"], times["one by one"], strict=True
        )
    ]
    assert abs(saved[0]) < 0.1 < min(saved[1:])
    yield (
        f"On the H200 it saves {saved[1]} µs of {times['one by one'][1]} µs "
        f"at 4608 columns, and {saved[2]} µs of {times['one by one'][2]} µs "
        "at 10240."
    )

    half, twice = "half the warps", "twice the warps"
    forward, backward = (
        figure(f"layer-norm-chunks-warps-{mode}", "H200")
        for mode in ("forward", "backward")
    )
    ours, less, more = (
        from_to(forward.shares(each)) for each in ("triton", half, twice)
    )
    gains = {N: forward.ratio(twice, "triton", N) for N in OTHERS}
    assert [N for N in OTHERS if gains[N] > 1] == [5888]
    assert forward.ratios("triton", half).least > 1.02
    yield (
        f"Forward, on the H200, the formula reaches {ours} of a copy, half "
        f"the warps reach {less}, and twice the warps reach {more}. Twice the "
        f"warps are {100 * (gains[5888] - 1):.0f}% faster at 5888 columns, "
        f"and slower at the other three, at 9984 columns by "
        f"{100 * (1 - gains[9984]):.0f}%."
    )
    for each in half, twice:
        assert backward.ratios("triton", each).least > 1.04
    ours = from_to(backward.shares("triton"))
    less, more = (series(backward.shares(each), "%") for each in (half, twice))
    yield (
        f"Backward, it reaches {ours} of the copy there, half the warps reach "
        f"{less}, and twice the warps reach {more}, so there the formula wins "
        "at all four."
    )
    slower = [
        100 * (1 - backward.ratio(half, "triton", N)) for N in (1280, 3328)
    ]
    yield (
        f"On the H200 half the warps lose {slower[0]:.0f}% and "
        f"{slower[1]:.0f}% at these two widths."
    )
    compiled = 100 * (1 / over[8192] - 1)
    yield (
        f"On the H200, it is faster at this width as well, by {compiled:.0f}%."
    )


OTHERS = (1280, 3328, 5888, 9984)  # widths that the formula was not made from


def CLAIMS(figure):
    yield from on_the_other_card(figure)
    yield from lanes_forward(figure)
    yield from lanes_backward(figure)
    yield from against_pytorch(figure, "forward", "a copy")
    yield from against_pytorch(figure, "backward", "the copy")
    yield from torch_compile(figure)
    yield from why_backward(figure)
    yield from early_start(figure)
    yield from other_warps(figure)


# Numbers with a unit that nothing has measured, and why they are right.
FACTS = {
    "3584 of them, or 44%": "3584 / 8192",
    "That is 512 lanes, or 10%": "512 / 5120",
    "has 44% of its lanes idle": "3584 / 8192",
    "have 10% idle": "512 / 5120",
    "1.1 MB, twice": "132 * 2 * 1024 * 4 bytes",
    "60% of the copy": "3 matrices of 5",
}

HALF, BFLOAT, SINGLE, DOUBLE = LayerNorm.dtypes
at = LayerNorm.at
NO_GRADIENTS = 3 * (False,)


def tiny_rows(load):
    """Without eps the cube of rstd is more than float32 holds, and dx is
    not."""
    page = load("small")
    torch.manual_seed(0)
    x, dy = torch.randn(2, 19, 40, device=page.DEVICE)
    w = torch.rand(40, device=page.DEVICE)
    x = 1e-13 * x
    results = []
    for function, kind in (
        (page.layer_norm, SINGLE),
        (torch.nn.functional.layer_norm, DOUBLE),
    ):
        given = [t.to(kind).requires_grad_() for t in (x, w)]
        y = function(given[0], (40,), given[1], None, 0.0)
        results.append(torch.autograd.grad(y, given, dy.to(kind)))
    for ours, exact in zip(*results, strict=True):
        assert ours.isfinite().all()
        assert (ours - exact).norm() <= 1e-5 * exact.norm()


# Chunks of 16 or 32 columns, so that narrow rows have several, and few
# programs, so that each has several tiles.
SMALL = (
    ("chunk = min(512 // itemsize * warps,", "chunk = min(8 * warps,"),
    ("rows = 512 // itemsize * warps // chunk", "rows = 16 * warps // chunk"),
    ("if ON_GPU else 4", "if ON_GPU else 2"),
)
PAGE = Page(
    __file__,
    LayerNorm(
        multiple=8,
        sizes=(
            ((5,), (40,)),
            ((2, 3), (4, 6)),
            ((), (8,)),
            ((2, 0), (2, 4)),
            ((17,), (24,)),
            ((2, 1, 3), (136,)),
            ((1,), (8,)),
        ),
        large=(((20, 30), (40, 25)), ((1000,), (8,)), ((130,), (1024,))),
        most=2560,  # in float64
    ),
    {"layer_norm": lambda page: page.layer_norm},
    # Few programs in the second kernel.
    quick=(("columns_per_program = 16", "columns_per_program = 256"),),
    forms={"": (), "small": SMALL},
    cases=(
        *(
            at(130, 8, dtype, form=form)
            for dtype in LayerNorm.dtypes
            for form in ("", "small")
        ),
        # The widest rows with gradients, and without.
        at(1, 10240, HALF),
        at(2, 32768, HALF, wanted=NO_GRADIENTS),
    ),
    # Both sides of each step of the formulas; in other types, which have the
    # same plans for as many bytes, a narrow row and the widest one.
    full=(
        *(
            at(1151, N, HALF)
            for N in (8, 520, 1024, 1032, 2048, 2056, 4096, 4104, 8200, 10240)
        ),
        *(
            at(1151, N, dtype)
            for dtype, widths in (
                (BFLOAT, (1032, 10240)),
                (SINGLE, (520, 5120)),
                (DOUBLE, (264, 2560)),
            )
            for N in widths
        ),
        *(
            at(301, N, HALF, wanted=NO_GRADIENTS)
            for N in (16384, 16392, 24576, 32768)
        ),
    ),
    mistakes=(
        *below_zero(),
        too_wide(1151, "1151 .*multiples of 8.*Every width"),
        too_wide(16392, "16392 .*16384"),
        too_wide(5128, "5128 .*5120", wanted=True),
    ),
    repeatable=("layer_norm",),
    repeated=tuple(at(4096, N, HALF) for N in (1024, 4608, 10240)),
    trains=("layer_norm",),
    elsewhere="is on cuda:1: not the current one",
    huge=(8192,),
    sanitizers=("memcheck", "racecheck", "synccheck"),
    sanitized=tuple(
        at(701, N, dtype)
        for N, dtype in ((1000, HALF), (4608, HALF), (40, SINGLE))
    ),
    prints={
        "Timing needs a GPU": 7,
        "chunks of 4: True": 1,
        "each element of y, dx, dw and db is right": 2,
        "right: False": 1,
        "rows of 13 ones: [16.0": 1,  # the stub
        "rows of 13 ones: [13.0, 13.0, 13.0]": 1,
    },
    mutants={
        "idle lanes in the variance": (
            "d = tl.where(col < N, xs[c].to(acc) - mean, 0)",
            "d = xs[c].to(acc) - mean",
        ),
        "columns without a mask": ("mask = mask & (col < N)", "mask = mask"),
        "rows without a mask": ("mask = row < left", "mask = row < ROWS"),
        "the first chunk only": (
            "col = c * CHUNK + tl.arange(0, CHUNK)[None, :]",
            "col = tl.arange(0, CHUNK)[None, :]",
        ),
        "w of the first chunk": ("w_ptr + at", "w_ptr + at % CHUNK"),
        "c1 dropped": ("wdy - (d * c1 + c2)", "wdy - c2"),
        "c2 dropped": ("wdy - (d * c1 + c2)", "wdy - d * c1"),
        "sums of the last tile": ("(dws[c] + dw,)", "(dw,)"),
        "one buffer for all": ("ptr += tl.program_id(0) * 2 * N", "ptr += 0"),
        "one tile a program": (
            "        M,\n        tl.num_programs(0) * ROWS,",
            "        4,\n        tl.num_programs(0) * ROWS,",
        ),
        "the last buffer left out": ("rows < programs", "rows < programs - 1"),
        "dy with strides of its own": (
            "backward(dy.contiguous(), x",
            "backward(dy, x",
        ),
        "rstd cubed": (
            "sum1[:, None] * rstd * rstd * rstd / N",
            "sum1[:, None] * (rstd * rstd * rstd / N)",
        ),
        "any eps": ("if not eps >= 0:", "if False:"),
    },
    kills=(
        at(40, 24, form="small"),
        at(3, 40, form="small"),
        at(3, 24, form="small", dy="one number"),
        tiny_rows,
        negative_eps,
    ),
)


# Bytes of an element -> columns of the widest row without gradients, and with.
WIDEST = {2: (32768, 10240), 4: (16384, 5120), 8: (8192, 2560)}


@pytest.mark.parametrize("itemsize", WIDEST)
def test_formulas_answer_for_every_width(page, itemsize):
    """Powers of two, full warps, and what a thread holds within its limit."""
    for rule, most in zip(
        (page.plan_forward, page.plan_backward), WIDEST[itemsize], strict=True
    ):
        for N in range(8, most + 1, 8):
            plan = rule(N, itemsize)
            rows, chunk, warps = (
                plan[key] for key in ("ROWS", "CHUNK", "num_warps")
            )
            assert all(v & (v - 1) == 0 for v in (rows, chunk, warps))
            assert 2 <= warps <= 16 and rows * chunk * itemsize >= 64
            width = -(-N // chunk) * chunk
            assert width - N < chunk
            held = rows * width * itemsize // (32 * warps)
            if "STAGES" in plan:
                tiles = plan["STAGES"] - 1
                assert 1 <= tiles <= 3
                assert 2 * tiles * rows * width * itemsize <= 98304
                assert held <= 80  # 40 columns of 16 bits
                assert rows <= 8
            else:
                pairs = 2 if N * itemsize <= 2048 else 1
                assert held <= 128
                assert rows * chunk * itemsize == 512 * warps * pairs


def test_formula_makes_the_plan_of_the_first_figure(unedited):
    """From 4096 to 8192 columns, so that only w and b are told apart."""
    plan = {"ROWS": 1, "CHUNK": 1024, "HINT": "", "num_warps": 4}
    for N in (4096, 4608, 8192):
        assert unedited.plan_forward(N, 2) == plan


def test_tiny_rows(load):
    tiny_rows(load)


def one_pass(
    page, M, N, dtype, mode, rule, more=None, times=None, vectors=True
):
    """The kernels of one pass with a plan of the page."""
    rule = getattr(page, rule)
    sizes = (N,) if times is None else (N, dtype.itemsize, times)
    plan = rule(*sizes) | (more or {})  # without times it is made by hand
    dy, x = torch.empty(2, M, N, dtype=dtype, device=page.DEVICE)
    if mode == "forward":
        w, b = (dy[0], dy[1]) if vectors else (None, None)
        page.forward(x, w, b, 1e-5, plan)
        return
    mean, rstd = torch.empty(2, M, device=page.DEVICE)
    dx = torch.empty_like(x)
    page.backward(dy, x, dy[0], mean, rstd, dx, dy[:2], plan)


def calls(values, **same):
    from compiled.aot import Call

    same = {"M": 4096, "dtype": "float16"} | same
    return [Call(PAGE.name, one_pass, same | each) for each in values]


@pytest.mark.parametrize("plan", ["plan_by_hand", "plan_of_one_tile"])
def test_plans_by_hand_are_right(page, plan):
    """Also where a row has several chunks, or one with idle lanes."""
    M, widths = (1151, (4608, 8704)) if page.ON_GPU else (3, (2056,))
    for N in widths:
        x, w, b, dy = (t.detach() for t in page.inputs(M, N, SINGLE))
        _, mean, rstd = page.forward(x, w, b, 1e-5, page.plan_forward(N, 4))
        dx = torch.empty_like(x)
        grads = torch.empty(2, N, device=page.DEVICE)
        # In float32 a row takes twice the shared memory.
        more = {"STAGES": min(getattr(page, plan)(N)["STAGES"], 2)}
        page.backward(
            dy, x, w, mean, rstd, dx, grads, getattr(page, plan)(N) | more
        )
        exact = [t.double().requires_grad_() for t in (x, w, b)]
        expected = torch.nn.functional.layer_norm(exact[0], (N,), *exact[1:])
        for ours, right in zip(
            (dx, *grads),
            torch.autograd.grad(expected, exact, dy.double()),
            strict=True,
        ):
            assert (ours - right).norm() <= 1e-5 * right.norm()


def test_loads_ahead_would_spill_a_tile(launches):
    """Beyond 8192 columns, so there the tile has one stage."""
    wide = {"N": 8704, "mode": "backward"}
    tile = {"rule": "plan_of_one_tile"}
    plans = [
        tile,
        tile | {"more": {"STAGES": 3}},
        {"rule": "plan_by_hand"},
    ]
    (alone, _), (ahead, _), _ = launches(calls(plans, **wide))
    assert alone.spills == 0 < ahead.spills


def test_what_the_page_says_of_spills(launches):
    """Registers of a thread that the page names, and bytes that it spills."""
    said = {
        # Made by hand: N, plan, stages.
        (4608, "plan_by_hand", 3): (176, 0),
        (4608, "plan_of_one_tile", 3): (177, 0),
        (8704, "plan_by_hand", 3): (255, 8),
        (8704, "plan_of_one_tile", 3): (255, 360),
        (10240, "plan_by_hand", 3): (254, 0),
    }
    found = launches(
        calls(
            {"N": N, "mode": "backward", "rule": rule, "more": {"STAGES": n}}
            for N, rule, n in said
        )
    )
    assert said == {
        key: (built.registers, built.spills)
        for key, (built, _) in zip(said, found, strict=True)
    }


def test_what_the_page_says_of_other_warps(launches):
    """Backward: registers of a thread, and bytes that it spills."""
    said = {
        (1280, 0.5): 0,
        (3328, 0.5): 0,
        (5888, 0.5): 88,
        (9984, 0.5): 2336,
        (1280, 2): 216,
        (3328, 2): 208,
        (5888, 2): 184,
        (9984, 2): 40,
        (12288, 1): 48,  # a sixth chunk
    }
    found = launches(
        calls(
            (
                {"N": N, "rule": "plan_backward", "times": times}
                for N, times in said
            ),
            mode="backward",
        )
    )
    built = {key: of[0] for key, of in zip(said, found, strict=True)}
    assert said == {key: of.spills for key, of in built.items()}
    assert built[9984, 0.5].registers == 32
    assert all(of.registers <= 128 for (_, t), of in built.items() if t == 2)


def programs_of_an_sm(built):
    each = -(-built.registers // 8) * 8  # a thread gets a multiple of 8
    return 65536 // (each * 32 * built.num_warps)


LIMIT = "if CUDA and 40960 < row <= 49152:"
NO_LIMIT = ((LIMIT, "if False:"),)
HIGHER = ((LIMIT, "if CUDA:"),)


def test_what_the_page_says_of_registers_forward(page, launches):
    """How many programs fit, with the limit and without."""
    from compiled.aot import Call

    # N, times the warps, edit -> registers, programs of an SM, spills.
    said = {
        (8704, 1, ()): (64, 4, 0),
        (9984, 1, ()): (64, 4, 0),
        (9984, 0.5, ()): (127, 4, 0),
        (9984, 2, ()): (61, 2, 0),
        (15872, 1, ()): (127, 2, 0),
        (16392, 1, ()): (64, 2, 0),
        (20480, 1, ()): (64, 2, 0),
        (24576, 1, ()): (64, 2, 8),
        (24576, 1, NO_LIMIT): (88, 1, 0),
        (24584, 1, HIGHER): (64, 2, 80),
    }
    same = {"M": 4096, "dtype": "float16", "mode": "forward"}
    found = launches(
        Call(
            PAGE.name,
            one_pass,
            same | {"N": N, "rule": "plan_forward", "times": times},
            replace=edit,
        )
        for N, times, edit in said
    )
    for (key, expected), (built,) in zip(said.items(), found, strict=True):
        fit = programs_of_an_sm(built)
        assert (built.registers, fit, built.spills) == expected, key
    assert page.plan_forward(20480, 2).keys() == {
        "ROWS", "CHUNK", "HINT", "num_warps"
    }  # fmt: skip
    assert page.plan_forward(9984, 2, times=2)["num_warps"] == 16


def loads(built):
    return re.findall(r"ld\.global\S*", built.asm["ptx"])


def test_what_the_page_says_of_loads_forward(launches):
    """In a tile and in chunks: at 4608 columns loads, at 6656 registers."""

    def built(N, **vectors):
        plan = {"ROWS": 1, "num_warps": 4, "HINT": ""}
        plans = ({"more": plan | {"CHUNK": chunk}} for chunk in (8192, 1024))
        same = {"mode": "forward", "rule": "plan_forward", "times": 1}
        found = launches(calls(plans, N=N, **same, **vectors))
        return [kernel for (kernel,) in found]

    assert [len(loads(of)) for of in built(4608, vectors=False)] == [8, 5]
    tile, chunks = built(6656, vectors=False)
    assert (tile.registers, chunks.registers) == (74, 72)
    assert [*map(programs_of_an_sm, (tile, chunks))] == [6, 7]


def test_why_w_has_as_many_rows_as_the_tile(launches):
    """With a row of its own its loads are narrower, and it changes threads."""
    from compiled.aot import Call

    alone = (("at = row * 0 + col  # of", "at = col  # of"),)
    values = {"M": 4096, "dtype": "float16", "mode": "forward", "times": 1}
    values["rule"] = "plan_forward"
    found = launches(
        Call(PAGE.name, one_pass, values | {"N": N}, replace=edit)
        for N in (256, 4608)
        for edit in ((), alone)
    )
    narrow, own, wide, wide_own = (of[0] for of in found)
    assert all(load.endswith("v4.b32") for load in loads(narrow))
    assert sum(load.endswith("v2.b32") for load in loads(own)) == 2
    barriers = [of.asm["ptx"].count("bar.sync") for of in (narrow, own)]
    assert barriers[0] < barriers[1]
    assert loads(wide) == loads(wide_own)  # of a single row


@pytest.mark.cpu
def test_every_line_of_the_figures_measures_what_it_says():
    """A call of each provider, at one size: it moves what is counted."""
    moved = []

    def speed(bytes_moved, prepare):
        prepare()()
        moved.append(bytes_moved)
        return 2.0, 1.0, 3.0

    page = PAGE.load()
    page.ON_GPU, page.speed = True, speed
    page.best_of_three_compilations = lambda function, measure: measure(
        function
    )
    for benchmark in (
        page.bench_lanes,
        page.bench_lanes_backward,
        page.bench_forward,
        page.bench_backward,
        page.bench_early,
        page.bench_warps_forward,
        page.bench_warps_backward,
    ):
        bench = benchmark.benchmarks
        matrices = 2 if bench.args["mode"] == "forward" else 3
        for provider in bench.line_vals:
            del moved[:]
            values = {"M": 5, "N": 24, "provider": provider}
            assert benchmark.fn(**bench.args | values) == (2, 1, 3)
            tiles = 6 if provider == "copy" else 1
            assert moved == tiles * [matrices * 5 * 24 * 2]
