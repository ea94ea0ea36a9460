"""What must hold of the page "Softmax, both passes"."""

import pytest
import torch
import torch.nn.functional as F

import tutorial
from compiled.declared import Case, Kernel, Kernels
from conformance import Page, Softmax, SoftmaxCase, guarded_allocations
from measurements.figure import from_to, series


def run(page, M, N, dtype):
    x, dy = page.inputs(M, N, dtype)
    y = page.in_sweeps(x.detach(), page.plan_sweeps(N, x.itemsize))
    page.forward(x.detach(), plan=page.tile_of(N, x.itemsize, 1))
    page.backward(y, dy, plan=page.plan_backward(2**20, x.itemsize))
    torch.autograd.grad(page.softmax(x), x, dy)


def also(page, M, N, dtype):
    for plan in page.TILES.values():
        page.in_sweeps(page.inputs(5, 1000, dtype)[0], plan)
    for N in 100, 1001:
        x, dy = page.inputs(5, N, dtype)
        torch.autograd.grad(page.log_softmax(x), x, dy)
        torch.autograd.grad(page.softmax(x, 0, torch.float64), x, dy.double())
    for kernel in (page._logsumexp, page._logsumexp_1):
        kernel[(3,)](dy, torch.empty(5, device=x.device), N=1000, BLOCK=64)
    for reads in 1, 2:  # the ceilings of both passes
        page._move[(5,)](x, dy, 5 * 1001 // reads, reads, 1, BLOCK_SIZE=4096)


def log(page, M, N, dtype):
    x, dy = page.inputs(M, N, dtype)
    torch.autograd.grad(page.log_softmax(x), x, dy)


def begins_anywhere(page, M, N, dtype):
    x, dy = page.inputs(M, N, dtype)
    torch.autograd.grad(page.softmax(x), x, dy)


def wide_forward(page, M, N, dtype):
    page.forward(page.inputs(M, N, dtype)[0].detach())


def wide_backward(page, M, N, dtype):
    y, dy = page.inputs(M, N, dtype)
    page.backward(y.detach(), dy)


PUBLISHED = "2026-11-22"

# The page measures both, and says what it cannot tell.
HINT = "a hint to the caches leaves a part of dx to be written later"
IN_L2 = "a copy of dx follows, which finds it in L2"
ABOVE_A_COPY = {
    (plot, provider, N): why
    for plot, providers, why in (
        ("softmax-backward", ("two sweeps", "torch.compile"), HINT),
        ("softmax-backward-next", ("triton", "two sweeps"), IN_L2),
    )
    for provider in providers
    for N in (2048, 4096)
}

KERNELS = Kernels(
    run=run,
    also=also,
    M=4096,
    N=[4096, 16384],
    dtype="bfloat16",
    sizes={
        "bfloat16": [128, 256, 1024, 2048, 4096, 8192, 12288, 16384],
        "float16": [4096, 16384],
        "float32": [1024, 8192],
    },
    kernels={
        "_softmax_fwd_streaming": Kernel(
            look="""
            Each sweep has its own loads of ``x``, all of them by 16 bytes.
            Threads wait for each other only between the sweeps, in the two
            reductions that put their pairs together.
            """,
            true=lambda code: [code.narrow("load") == 0 or code.amd],
        ),
        "_softmax_fwd": Kernel(
            look="""
            ``x`` is read once, by 16 bytes, before the first store.
            There is one power for each element: the sum and ``y`` use the
            same.
            """,
            true=lambda code: [
                code.loaded == code.stored == 2 * 4096
                or code.amd,  # whose warps are wider
                code.narrow("load") == 0 or code.amd,
            ],
        ),
        "_softmax_bwd": Kernel(
            look="""
            ``y`` and ``dy`` are read once, by 16 bytes.
            At 16384 columns they take half of the 128 registers that a thread
            may have, and none is spilled.
            """,
            true=lambda code: [
                code.loaded == 2 * 2 * 4096 or code.amd,
                code.narrow("load") == 0 or code.amd,
            ],
            true_at={
                16384: lambda code: [code.registers <= 128, code.spills == 0]
            },
        ),
        "_softmax_bwd_streaming": Kernel(
            look="""
            Each sweep has its own loads of ``y`` and ``dy``, all of them by
            16 bytes.
            """,
            true=lambda code: [
                len(code.lines("load")) == 4 or code.amd,
                code.narrow("load") == 0 or code.amd,
            ],
        ),
    },
    cases={
        "log": Case(
            run=log,
            sizes={"bfloat16": [256, 1024, 4096, 8192, 16384]},
        ),
        "begins-anywhere": Case(
            run=begins_anywhere,
            sizes={"bfloat16": [1001, 4097, 8191, 16383]},
            limits={
                "narrow_stores": 24,  # both ends of a row
            },
        ),
        "wide-forward": Case(
            run=wide_forward,
            sizes={
                "bfloat16": [24576, 32768, 49152, 65536],
                "float32": [16384, 65536],
            },
        ),
        "wide-backward": Case(
            run=wide_backward,
            sizes={"bfloat16": [24576, 32768], "float32": [16384]},
        ),
    },
)


HALF, SINGLE, DOUBLE = torch.float16, torch.float32, torch.float64
NAMES = "softmax", "log_softmax"
# Narrow rows that are swept, in small tiles.
SWEEPS = (
    ("if row_bytes <= in_one_sweep:", "if False:"),
    ("if row_bytes <= 65536:", "if False:"),
    ('"PAIRS": 32 * warps, "EACH": 16 // itemsize', '"PAIRS": 4, "EACH": 4'),
    ('"BLOCK": lanes', '"BLOCK": 16'),
)


def at(M, N, dtype=SINGLE, name="softmax", **more):
    return SoftmaxCase(shape=(M, N), dtype=dtype, function=name, **more)


def rows_that_are_not_there(load):
    """A program of several rows, whose last are beyond the end."""
    page = load("rows")
    part = torch.rand(4, 13, device=page.DEVICE)[:3]  # not NaN behind it
    with guarded_allocations():
        page.backward(part, part)


def x_is_rounded_first(load):
    page = load("rows")
    x = 2048 + torch.rand(2, 40, device=page.DEVICE)
    y, expected = page.softmax(x, 1, HALF), torch.softmax(x.half(), 1)
    assert torch.allclose(y, expected, atol=1e-4)


# On a GPU: both sides of each step of the rules, rows that begin anywhere; in
# other types a narrow row, the widest in registers and one above.
STEPS = (1, 2, 3, 7, 8, 31, 64, 127, 128, 129, 255, 256, 257, 1000, 1001)
STEPS += (2048, 2049, 4096, 4097, 8192, 8193, 16384, 16385, 16391, 32767)
STEPS += (32768, 32769, 49152, 50257, 65536, 100_003, 2**18, 2**20)
TYPES = (
    *((N, torch.bfloat16) for N in STEPS),
    *((N, HALF) for N in (37, 4096, 16384, 32768, 40000)),
    *((N, SINGLE) for N in (37, 4096, 8192, 8193, 16384, 16385)),
    *((N, DOUBLE) for N in (37, 4096, 4097, 8192, 8193)),
)
PAIRS_OF_TYPES = (
    *((half, SINGLE, 301) for half in (HALF, torch.bfloat16)),
    *((SINGLE, half, 301) for half in (HALF, torch.bfloat16)),
    (torch.bfloat16, DOUBLE, 30),
)


CARD = "H200"  # the one that the page names
HERE = (1024, 2048, 4096, 8192, 16384)


def listed(figure, provider, *widths):
    return series(figure.at(*widths).shares(provider), "%")


def pairs_figure(figure):
    of = figure("softmax-pairs", CARD)
    thread, program, lane = (
        from_to(of.shares(each)) for each in ("triton", "program", "lane")
    )
    # "The three things tell the lines apart": ours is ahead of a pair a lane
    # everywhere, and of a pair a program where its last tile is half empty.
    assert of.ratios("triton", "lane").least > 1
    assert of.at(24576, 40960).ratios("triton", "program").least > 1
    # Rows that leave L1: a pair a lane loses from 24576 to 65536 columns.
    assert of.share("lane", 65536) < of.share("lane", 24576)
    yield (
        f"On the {CARD} a pair for each thread reaches {thread} of the copy, "
        f"a pair for the program reaches {program}, and a pair for each lane "
        f"reaches {lane}."
    )
    yield (
        f"At 40960 columns a pair for each thread reaches "
        f"{of.share('triton', 40960)}% and a pair for the program "
        f"{of.share('program', 40960)}%, and at 65536 columns they reach "
        f"{of.share('triton', 65536)}% and {of.share('program', 65536)}%."
    )
    # The kernel of the rule, at a width where it is this one.
    again = figure("softmax-forward", CARD).share("triton", 65536)
    yield f"is measured once more further down, and reaches {again}% there"
    fallen = of.share("triton", 49152)
    assert of.share("triton", 40960) - fallen > 5
    yield (
        "on the H200, at 49152 columns, a pair for each thread has fallen to "
        f"{fallen}% already."
    )
    full = of.at(16384, 49152)
    ours, theirs = (full.shares(each) for each in ("triton", "program"))
    assert full.ratios("triton", "program").most < 1.05  # "costs little"
    yield (
        f"On the H200 it reaches {theirs[0]}% and {theirs[1]}% there, and a "
        f"pair for each thread {ours[0]}% and {ours[1]}%."
    )
    with_half = figure("softmax-sweeps", CARD).share("two sweeps", 16384)
    assert with_half > ours[0] + 5
    yield (
        f"On the H200 a pair for each thread reaches only {ours[0]}% at 16384 "
        "columns, because this figure has one tile for all widths, which is "
        "made for the widest ones. With half the warps, as ``plan_sweeps`` "
        f"takes them there, it reaches {with_half}% in the next figure."
    )


def sweeps_figure(figure):
    of = figure("softmax-sweeps", CARD)
    widths = (256, *HERE)
    # "Half of the threads have nothing to load", "as we expected".
    assert of.ratio("one sweep", "two sweeps", 256) > 1
    assert of.ratio("two sweeps", "one sweep", 16384) > 1
    assert of.ratio("one sweep", "two sweeps", 4097) > 1.5
    # "We lose 3% at most", on this card, too.
    ruled = of.at(1024, 2048, 4096, 8192)
    assert ruled.ratios("one sweep", "two sweeps").least > 0.965
    # "Both are close to the copy".
    for each in ("one sweep", "two sweeps"):
        assert ruled.shares(each).least > 85
    yield (
        f"On the {CARD}, at 256, 1024, 2048, 4096, 8192 and 16384 columns, "
        f"one sweep reaches {listed(of, 'one sweep', *widths)} of the copy, "
        f"and two sweeps reach {listed(of, 'two sweeps', *widths)}."
    )
    yield (
        "At 4097 columns, where rows begin anywhere, one sweep reaches "
        f"{of.share('one sweep', 4097)}% and two reach "
        f"{of.share('two sweeps', 4097)}%."
    )


def forward_figure(figure):
    of = figure("softmax-forward", CARD)
    ours = from_to(of.between(1024, 24576).shares("triton"))
    yield (
        f"On the {CARD} our kernel reaches {of.share('triton', 256)}% of the "
        f"copy at 256 columns, and {ours} from 1024 to 24576. At 49152 "
        f"columns it reaches {of.share('triton', 49152)}%, and at 65536 "
        f"{of.share('triton', 65536)}%."
    )
    # "The rows under way barely fit into L1, or not at all".
    assert of.share("triton", 65536) < of.share("triton", 24576)
    # From 2048 columns on torch.compile has two sweeps, a pair for each lane.
    compiled = of.between(2048).shares("torch.compile")
    assert of.share("torch.compile", 1024) > compiled.most + 10
    lane = figure("softmax-pairs", CARD).shares("lane")
    assert lane.least > compiled.most + 10  # "does not explain its speed"
    yield (
        f"with one, our kernel reached {from_to(lane)} on the H200 in the "
        "first figure."
    )
    yield (
        f"PyTorch reaches {from_to(of.shares('torch'))} over all widths. "
        f"torch.compile reaches {of.share('torch.compile', 1024)}% at 1024 "
        f"columns, and {from_to(compiled)} from 2048 on."
    )
    yield (
        f"At 4097 columns we reach {of.share('triton', 4097)}%, PyTorch "
        f"{of.share('torch', 4097)}% and torch.compile "
        f"{of.share('torch.compile', 4097)}%."
    )
    if "quack" in of.medians:
        yield (
            f"Among the libraries, quack reaches {from_to(of.shares('quack'))}"
            " over the widths that it takes."
        )
    if "liger" in of.medians:
        yield (
            f"Liger reaches {from_to(of.shares('liger'))} over all widths, "
            f"and {of.share('liger', 4097)}% at 4097 columns."
        )


def backward_figure(figure):
    of = figure("softmax-backward", CARD)
    ours = from_to(of.between(256, 24576).shares("triton"))
    yield (
        f"On the {CARD} our kernel reaches {ours} of the copy from 256 to "
        f"24576 columns, {of.share('triton', 49152)}% at 49152 and "
        f"{of.share('triton', 65536)}% at 65536. PyTorch reaches "
        f"{from_to(of.shares('torch'))} over all widths. At 4097 columns we "
        f"reach {of.share('triton', 4097)}% and torch.compile reaches "
        f"{of.share('torch.compile', 4097)}%."
    )
    # "A line near 100% has little left to gain".
    assert of.between(256, 24576).shares("triton").least > 90
    yield (
        "At 1024, 2048, 4096, 8192 and 16384 columns we reach "
        f"{listed(of, 'triton', *HERE)}, and torch.compile reaches "
        f"{listed(of, 'torch.compile', *HERE)}."
    )
    # "Ahead of the copy at 2048 and 4096 columns, and behind it".
    assert of.at(2048, 4096).shares("two sweeps").least > 100
    assert of.at(8192, 16384).shares("two sweeps").most < 100
    # "By this count the wider rows should be slower. They are faster".
    assert of.share("triton", 65536) > of.share("triton", 49152)
    yield (
        "In two sweeps our own kernel reaches "
        f"{listed(of, 'two sweeps', *HERE[1:])} at 2048, 4096, 8192 and 16384 "
        "columns."
    )
    for library in ("quack", "Liger"):
        if library.lower() in of.medians:
            where = {
                "quack": "the widths that it takes",
                "Liger": "all widths",
            }[library]
            yield (
                f"Backward, {library} reaches "
                f"{from_to(of.shares(library.lower()))} over {where}."
            )


def next_figure(figure):
    of = figure("softmax-backward-next", CARD)
    one, two = (
        listed(of, each, *HERE[1:]) for each in ("triton", "two sweeps")
    )
    yield (
        f"On the {CARD}, at 2048, 4096, 8192 and 16384 columns, one sweep and "
        f"its copy reach {one} of the speed of a copy alone, and two sweeps "
        f"and their copy reach {two}."
    )
    assert of.at(2048, 4096).shares("triton").least > 100
    alone, together = (
        [
            each.us("triton", N, matrices=matrices)
            - each.us("two sweeps", N, matrices=matrices)
            for N in (2048, 4096)
        ]
        for each, matrices in ((figure("softmax-backward", CARD), 3), (of, 5))
    )
    # "A part of what it gains is gone: most at 2048 columns, less at 4096".
    lost = [
        1 - after / before
        for before, after in zip(alone, together, strict=True)
    ]
    assert 1 > lost[0] > 0.5 > lost[1] > 0
    assert 0.8 < together[1] < 1.4  # "about a microsecond"
    yield (
        f"In time, two sweeps alone take {alone[0]:.1f} µs less than one "
        f"sweep at 2048 columns, and {alone[1]:.1f} µs less at 4096. Together "
        f"with the copy they take {together[0]:.1f} and {together[1]:.1f} µs "
        "less."
    )


def losses(figure):
    both = {
        mode: figure(f"softmax-{mode}", CARD)
        for mode in ("forward", "backward")
    }
    most = both["backward"].between(1024, 24576).ratios(
        "torch.compile", "triton"
    ).most  # fmt: skip
    assert most > 1
    # "Ahead from 1024 to 16384 columns".
    ahead = both["backward"].between(1024, 16384).at(*HERE)
    assert ahead.ratios("torch.compile", "triton").least > 1
    yield f"its speed is up to {most:.2f} times ours from 1024 to 24576"
    if "quack" not in both["forward"].medians:
        return
    quack, ours = (
        [
            "{}% and {}%".format(*both[mode].at(*wide).shares(each))
            for mode, wide in (
                ("forward", (49152, 65536)), ("backward", (24576, 49152))
            )
        ]
        for each in ("quack", "triton")
    )  # fmt: skip
    # "Ahead where rows are wide", "backward it is ahead at 24576 and 49152".
    for mode, wide in (
        ("forward", (49152, 65536)), ("backward", (24576, 49152))
    ):  # fmt: skip
        assert both[mode].at(*wide).ratios("quack", "triton").least > 1
    assert both["backward"].ratio("triton", "quack", 65536) > 1
    widest = [
        both["backward"].share(each, 65536) for each in ("quack", "triton")
    ]
    yield (
        f"At 49152 and 65536 columns it reaches {quack[0]} of the copy "
        f"forward on the {CARD}, and we reach {ours[0]}. Backward it is ahead "
        f"at 24576 and 49152 columns: it reaches {quack[1]}, and we reach "
        f"{ours[1]}. At 65536 columns it reaches {widest[0]}%, and we "
        f"{widest[1]}%."
    )
    shares = [
        both["backward"].share(each, 24576) for each in ("liger", "triton")
    ]
    yield (
        f"reaches {shares[0]}% of the copy on the H200, and we {shares[1]}%."
    )


def ladder(figure):
    pairs = figure("softmax-pairs", CARD)
    for each, name in (
        ("program", "the program"),
        ("lane", "each lane"),
        ("triton", "each thread"),
    ):
        yield f"- **A pair for {name}** reaches {pairs.share(each, 40960)}%."
    sweeps = figure("softmax-sweeps", CARD).at(4096, 4097, 16384)
    one, two = (
        series(sweeps.shares(each), "%")
        for each in ("one sweep", "two sweeps")
    )
    yield f"- **One sweep, a row in registers**, reaches {one}."
    yield f"- **Two sweeps** reach {two}. They need few registers"
    of = figure("softmax-backward", CARD)
    ours, pytorch, compiled = (
        listed(of, each, 4096, 16384, 65536)
        for each in ("triton", "torch", "torch.compile")
    )
    yield f"- **Ours** reaches {ours}: one sweep up to 32768 columns"
    yield f"- **PyTorch** reaches {pytorch}, and **torch.compile** {compiled}."


def on_the_other_card(figure):
    of = figure("softmax-pairs", "H100")
    thread, program, lane = (
        from_to(of.shares(each)) for each in ("triton", "program", "lane")
    )
    # "Would do as well from 40960 columns on".
    assert of.between(40960).ratios("program", "triton").least > 1
    ahead = [
        f"{of.share('program', N)}% to {of.share('triton', N)}%"
        for N in (40960, 65536)
    ]
    yield (
        f"On the H100 a pair for each thread reaches {thread} of the copy, a "
        f"pair for the program {program}, and a pair for each lane {lane}. "
        "There the program's pair is ahead at 40960 columns, with "
        f"{ahead[0]}, and at 65536, with {ahead[1]}."
    )
    of = figure("softmax-forward", "H100")
    yield (
        "On the H100 our kernel reaches "
        f"{from_to(of.between(1024, 24576).shares('triton'))} of the copy "
        f"from 1024 to 24576 columns, {of.share('triton', 49152)}% at 49152 "
        f"and {of.share('triton', 65536)}% at 65536. PyTorch reaches "
        f"{from_to(of.shares('torch'))}, torch.compile "
        f"{from_to(of.shares('torch.compile'))}, and quack "
        f"{from_to(of.shares('quack'))}."
    )
    quack, ours = (
        "{}% and {}%".format(*of.at(49152, 65536).shares(each))
        for each in ("quack", "triton")
    )
    yield f"On the H100 quack reaches {quack} forward, and we reach {ours}."
    of = figure("softmax-backward", "H100")
    most = 100 * (of.ratios("quack", "triton").most - 1)
    yield f"Backward it is at most {most:.0f}% ahead there."
    ahead = {
        f"{100 * (of.ratio(each, 'triton', 24576) - 1):.0f}%"
        for each in ("torch.compile", "liger")
    }
    (ahead,) = ahead  # the same for both
    yield (
        f"On the H100, torch.compile and Liger are ahead of us by {ahead} "
        "there."
    )
    yield (
        "On the H100 our kernel reaches "
        f"{from_to(of.between(256, 24576).shares('triton'))} of the copy "
        f"from 256 to 24576 columns, {of.share('triton', 49152)}% at 49152 "
        f"and {of.share('triton', 65536)}% at 65536. PyTorch reaches "
        f"{from_to(of.shares('torch'))}, torch.compile "
        f"{from_to(of.shares('torch.compile'))}, and quack "
        f"{from_to(of.shares('quack'))}."
    )


def CLAIMS(figure):
    yield from pairs_figure(figure)
    yield from sweeps_figure(figure)
    yield from forward_figure(figure)
    yield from backward_figure(figure)
    yield from next_figure(figure)
    yield from losses(figure)
    yield from ladder(figure)
    yield from on_the_other_card(figure)


RECORDED = "recordings of 2026-11-25 on both cards, in the history"

# Numbers with a unit that nothing has measured, and why they are right.
FACTS = {
    "moves 3.35 TB in a second": "an H100, by its data sheet",
    "moves 4.8 TB in a second": "an H200, by its data sheet",
    "the L2 cache has 50 MB": "NVIDIA's data sheet",
    "two sweeps have four times as many": "2048 threads, and 512",
    "With this rule we lose 3% at most": RECORDED,
    "For 3% we": "the same 3%",
    "A line near 100% has": "a number of nobody",
    "lines lie above 100%": "asserted of the figure",
    "has 16.8 MB": "4096 * 2048 * 2 bytes",
    "it has 33.6 MB": "4096 * 4096 * 2 bytes",
    "L2 has 60 MB": "what torch says of the L2 of the H200",
    "that of an H200 has 60 MB": "what torch says",
}

PAGE = Page(
    __file__,
    Softmax(),
    {
        "softmax": lambda page: page.softmax,
        "log_softmax": lambda page: page.log_softmax,
    },
    forms={
        "": (),
        # Chunks of 16 columns, so that narrow rows have several.
        "rows": (
            ("lanes = 512 // itemsize * warps", "lanes = 16"),
            (
                "if row_bytes <= in_one_sweep:",
                "if row_bytes <= 32768:",
            ),
        ),
        "sweeps": SWEEPS,
    },
    cases=(
        # Narrow rows share a program, and a last program has fewer.
        *(
            at(9, N, HALF, name)
            for N in (1, 2, 3, 7, 8, 9, 31, 64, 127, 128, 129, 255)
            for name in NAMES
        ),
        # Both sides of a limit.
        *(
            at(1, N, HALF, name)
            for N in (256, 257, 1000, 4097, 16384, 16385, 32768, 32769, 65539)
            for name in NAMES
        ),
        at(1, 2**20, HALF),
        # Masked to the last few, where each form has an idle lane or none.
        *(
            at(5, N, HALF, name, masked=0.95, form=form)
            for N in (3, 16, 75)
            for name in NAMES
            for form in ("rows", "sweeps")
        ),
    ),
    full=(
        *(
            at(1151 if N <= 32768 else 37, N, dtype, name)
            for N, dtype in TYPES
            for name in NAMES
        ),
        *(
            at(5, N, dtype, name, masked=0.5)
            for N, dtype in TYPES
            for name in NAMES
        ),
        *(
            at(M, N, dtype, name, out=out)
            for N in (37, 4096, 8192, 16384, 40000)
            for dtype, out, M in PAIRS_OF_TYPES
            for name in NAMES
        ),
        *(
            SoftmaxCase(shape=(2, 3, N), dtype=HALF, x=x, dy=dy)
            for N in (75, 40000, 70001)
            for x, dy in (
                ("columns", "transposed"),
                ("unaligned", "one number"),
                ("transposed", "every second"),
                ("one number", "columns"),
                ("every second", "unaligned"),
            )
        ),
        *(
            SoftmaxCase(shape=(13, 150, 75), dtype=HALF, dim=d, function=name)
            for d in (0, 1, 2)
            for name in NAMES
        ),
    ),
    prints={
        "Timing needs a GPU": 5,
        "each element of y and dx is right": 6,
        "both together: maximum 4, sum 1.553": 1,
        "maximum from -inf: sum nan": 1,
        "maximum from the lowest number: sum 0": 1,
        "c 0.10, dx [0.09, -0.02, -0.07]": 1,
        "Warning": 0,
    },
    elsewhere="is on cuda:1: not the current one",
    repeatable=NAMES,
    repeated=tuple(
        at(512, N, torch.bfloat16, name)
        for N in (100, 1000, 4097, 16384, 40000, 100_000)
        for name in NAMES
    ),
    compiled=NAMES,
    # Each width alone: page 05 is the one for shapes that vary.
    compile_options={"dynamic": False},
    compiled_cases=tuple(at(37, N, HALF) for N in (1000, 1001, 40000)),
    graphs=tuple(at(512, N, HALF) for N in (1000, 16384, 40000)),
    huge=(127, 8192, 40000, 100_000),
    huge_functions=("softmax",),
    sanitizers=("memcheck", "racecheck"),
    # The last group of a matrix may end outside of it, and memcheck objects;
    # with 40 rows it does not.
    sanitized=tuple(
        at(40, N, torch.bfloat16, name)
        for N in (100, 1000, 4097, 16384, 40000, 70000)
        for name in NAMES
    ),
    mutants={
        "rows: the maximum is not subtracted": (
            "_exp(xs[c].to(acc) - m)",
            "_exp(xs[c].to(acc))",
        ),
        "rows: idle lanes count": (
            "tl.where(inside, x, other)",
            "tl.where(inside, x, other * 0)",
        ),
        "rows: the neighbors count": ("tl.where(inside,", "tl.where(some,"),
        "rows: store into the neighbors": (
            "tl.store(at, x, mask=inside & (whole == 0))",
            "tl.store(at, x, mask=whole == 0)",
        ),
        "rows: single columns are not stored": (
            "mask=inside & (whole == 0)",
            "mask=inside & whole",
        ),
        "rows that are not there, forward": (
            "M - 1)\n\n    xs",
            "M)\n\n    xs",
        ),
        "rows that are not there, backward": (
            "M - 1)\n\n    # Idle",
            "M)\n\n    # Idle",
        ),
        "rows: dy instead of y dy": ("c += ys[i].to(acc) * dy", "c += dy"),
        "the hidden number is not 0": ("zero=0", "zero=1"),
        "log: the sum is not subtracted": ("y = d - log if", "y = d if"),
        "rows, log: y for its power": (
            "y * (dy - c)\n        _store",
            "dy - y * c\n        _store",
        ),
        "sweeps: the sum of dy dropped": (
            "y * (dy - c)\n        tl.store",
            "y * dy\n        tl.store",
        ),
        "sweeps: a sum does not shrink": (
            "s = s * tl.exp(m - new) + tl.sum(_exp(x - new[:, None])",
            "s = s + tl.sum(_exp(x - new[:, None])",
        ),
        "sweeps: pairs are added as they are": (
            "tl.sum(s * tl.exp(m - top), axis=0)",
            "tl.sum(s, axis=0)",
        ),
        "sweeps: the first maximum is -inf": (
            "tl.full((PAIRS,), LOWEST, acc)",
            'tl.full((PAIRS,), float("-inf"), acc)',
        ),
        "sweeps: the first tile left out": (
            "= (N - 1) // TILE * TILE",
            "= N // TILE * TILE",
        ),
        "sweeps, backward: the first tile left out": (
            "= (N - 1) // BLOCK * BLOCK",
            "= N // BLOCK * BLOCK",
        ),
        "dy with strides of its own": (
            "backward(y, dy.contiguous(),",
            "backward(y, dy,",
        ),
        "x with strides of its own": (
            "movedim(dim, -1).contiguous()",
            "movedim(dim, -1)",
        ),
        "the result stays moved": (".movedim(-1, dim).reshape", ".reshape"),
        "x is not rounded": ("x = x.to(dtype)", "x = x + 0"),
    },
    kills=(
        *(
            case
            for name in NAMES
            for case in (
                *(
                    at(2, 43, HALF, name, masked=0.6, form=form)
                    for form in ("rows", "sweeps")
                ),
                *(at(2, 32, name=name, form=f) for f in ("rows", "sweeps")),
                at(3, 13, HALF, name, form="rows"),
                at(3, 16, HALF, name, form="rows", scale=30.0),
                at(3, 40, name=name, form="rows", scale=200.0),
                SoftmaxCase(
                    shape=(2, 3, 5),
                    dim=1,
                    dy="one number",
                    function=name,
                    form="rows",
                ),
                SoftmaxCase(
                    shape=(3, 4, 5), dim=1, function=name, form="rows"
                ),
                at(2, 32, HALF, name, dy="transposed", form="rows"),
            )
        ),
        at(2, 40, HALF, out=SINGLE, form="rows"),
        rows_that_are_not_there,
        x_is_rounded_first,
    ),
)
FORMS = pytest.mark.parametrize("form", ["rows", "sweeps"])
EACH = pytest.mark.parametrize("name", NAMES)


def pair(page, name):
    """Ours and PyTorch's."""
    return getattr(page, name), getattr(F, name)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (0, 3), (2, 0, 3)])
def test_odd_shapes(page, shape):
    for name in NAMES:
        x = torch.randn(shape, device=page.DEVICE, requires_grad=True)
        y = getattr(page, name)(x)
        expected = getattr(F, name)(x.detach(), -1)
        assert torch.equal(y, expected) and y.shape == x.shape
        (dx,) = torch.autograd.grad(y.sum(), x)
        assert dx.shape == x.shape and not dx.any()


@FORMS
@EACH
def test_integers_become_another_type(load, name, form):
    page = load(form)
    x = torch.arange(6, device=page.DEVICE).view(2, 3)
    ours, theirs = pair(page, name)
    expected = theirs(x, -1, dtype=SINGLE)
    torch.testing.assert_close(ours(x, -1, SINGLE), expected)


@FORMS
@EACH
def test_what_pytorch_says_of_extremes(load, name, form):
    """Rows that are masked, infinite, NaN, or at the end of the range."""
    page = load(form)
    ours, theirs = pair(page, name)
    inf, nan = torch.inf, torch.nan
    low = torch.finfo(torch.float32).min
    few = [-inf], [low], [-low], [0.0, inf], [nan, 0.0, 0.0], [-inf, low]
    few += [low, -low, 0.0], [-inf, -inf, 3.0], [1e4, -1e4, 0.0]
    rows = [([row[0]] * 21 + row)[-21:] for row in few]
    rows += [([row[-1]] * 21 + row)[-21:] for row in few]
    x = torch.tensor(rows, device=page.DEVICE, requires_grad=True)
    found, expected = ours(x), theirs(x, -1)
    torch.testing.assert_close(found, expected, equal_nan=True)
    dy = torch.ones_like(x)
    for y in found, expected:
        (dx,) = torch.autograd.grad(y, x, dy)
        if y is found:
            first = dx
    torch.testing.assert_close(first, dx, equal_nan=True)


@FORMS
@EACH
def test_gradients_are_derivatives(load, name, form):
    page = load(form)
    x = torch.randn(2, 5, device=page.DEVICE, dtype=torch.float64)
    function = getattr(page, name)
    assert torch.autograd.gradcheck(function, x.requires_grad_())


@FORMS
def test_rounding_of_y_stays_in_its_sum(load, form):
    """In 16 bits dx belongs to the y that was returned, rounded as it is:
    a constant in dy shows it, which the exact y would not."""
    page = load(form)
    x = torch.randn(3, 75, device=page.DEVICE).half().requires_grad_()
    y = page.softmax(x)
    dy = 1000 + torch.randn(3, 75, device=page.DEVICE).half()
    (dx,) = torch.autograd.grad(y, x, dy)
    y, dy = y.detach().double(), dy.double()
    want = y * (dy - (y * dy).sum(1, keepdim=True))
    assert (dx - want).norm() <= 1e-3 * want.norm()
    exact = torch.softmax(x.detach().double(), 1)
    want = exact * (dy - (exact * dy).sum(1, keepdim=True))
    assert (dx - want).norm() > 5e-3 * want.norm()


@EACH
def test_both_forms_agree(load, name):
    """Registers and sweeps differ by a rounding at most."""
    x = torch.randn(3, 257, device=load().DEVICE)
    a, b = (getattr(load(f), name)(x) for f in ("rows", "sweeps"))
    torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_every_tile_of_the_first_figure_is_right(page):
    x = torch.randn(2, 3001, device=page.DEVICE)
    for plan in page.TILES.values():
        y = page.in_sweeps(x, plan)
        torch.testing.assert_close(y, F.softmax(x, 1))


def test_a_result_that_is_changed_is_noticed(page):
    """y is kept for the backward pass: overwriting it must be an error."""
    x = torch.randn(2, 8, device=page.DEVICE, requires_grad=True)
    y = page.softmax(x)
    with torch.no_grad():
        y += 1
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        y.sum().backward()


@pytest.mark.parametrize("itemsize", [2, 4, 8])
def test_rules_answer_for_every_width(unedited, itemsize):
    page = unedited
    most = 65536 // itemsize
    for N in {1, 2, 3, *range(5, most + 1, 13), most // 2, most, 2**20}:
        for step in {1, 16 // itemsize} if N % (16 // itemsize) else {1}:
            for rule in page.plan_forward, page.plan_backward:
                plan = rule(N, itemsize, step)
                warps = plan["num_warps"]
                assert warps.bit_count() == 1 and warps <= 32
                if "ROWS" not in plan:
                    assert N * itemsize > 16384
                    continue
                chunk, rows = plan["CHUNK"], plan["ROWS"]
                assert chunk.bit_count() == 1
                assert rows == 1 or chunk >= N + step - 1
                held = -(-(N + step - 1) // chunk) * chunk * rows
                assert held * itemsize <= (4096 + 512) * warps


def in_tiles(page, M, N, dtype, name):
    x = torch.empty(M, N, dtype=dtype, device=page.DEVICE)
    page.in_sweeps(x, page.TILES[name])


def test_what_the_page_says_of_registers(unedited, launches):
    """Of the three owners of a pair, and so how many programs an SM has."""
    from compiled.aot import Call

    same = {"M": 4096, "dtype": "bfloat16"}
    for name, registers, programs in (
        ("triton", 32, 2),
        ("program", 64, 2),
        ("lane", 32, 4),
    ):
        found = launches(
            [
                Call(PAGE.name, in_tiles, same | {"N": N, "name": name})
                for N in (16384, 24576, 40960, 49152, 65536)
            ]
        )
        threads = 32 * unedited.TILES[name]["num_warps"]
        for (built,) in found:
            assert -(-built.registers // 8) * 8 == registers, name
            assert min(2048, 65536 // registers) // threads == programs


def test_exercises(unedited):
    assert not unedited.exercise_1(unedited._logsumexp)
    assert unedited.exercise_1(unedited._logsumexp_1)
    assert not unedited.exercise_2(unedited.gradient)
    assert unedited.exercise_2(unedited.gradient_2)


def test_the_check_of_the_page_finds_an_element(load):
    """One element of one row that is 0, in either result."""
    for edit in (
        ("    return y.movedim(-1, dim)", "    return zeroed(y)"),
        ("    return dx, None, None", "    return zeroed(dx), None, None"),
    ):
        page = PAGE.load(edits=[edit])

        def zeroed(tensor):
            tensor = tensor.clone()
            tensor[1, 7] = 0
            return tensor

        page.zeroed = zeroed
        with pytest.raises(AssertionError, match="times the allowed error"):
            page.check(3, 100, torch.bfloat16)


@pytest.mark.gpu
@EACH
@pytest.mark.parametrize("N", [21, 5000, 40000])
def test_what_pytorch_says_of_extremes_of_any_width(page, name, N):
    ours, theirs = pair(page, name)
    inf, nan = torch.inf, torch.nan
    low = torch.finfo(torch.float32).min
    x = torch.zeros(9, N, device="cuda")
    x[0], x[1], x[2] = -inf, low, -low
    x[3, N // 2], x[4, N // 2] = inf, nan
    x[5], x[6] = -inf, -inf
    x[5, -1], x[6, 0], x[7, 1::2], x[8, ::2] = 3.0, low, low, -inf
    x.requires_grad_()
    found, expected = ours(x), theirs(x, 1)
    torch.testing.assert_close(found, expected, equal_nan=True)
    dy = torch.randn_like(x)
    found, expected = (
        torch.autograd.grad(y, x, dy)[0] for y in (found, expected)
    )
    close = {"rtol": 1e-4, "atol": 1e-4, "equal_nan": True}
    torch.testing.assert_close(found, expected, **close)


@pytest.mark.gpu
def test_every_tile_of_the_first_figure_is_right_at_full_size(page):
    x, _ = page.inputs(37, 40000, torch.bfloat16)
    for plan in page.TILES.values():
        y, want = page.in_sweeps(x.detach(), plan), x.double().softmax(1)
        assert (y - want).norm() <= 2**-8 * want.norm()


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
    matrix = 3 * 264 * 2
    for benchmark, matrices in (
        (page.bench_pairs, 2),
        (page.bench_sweeps, 2),
        (page.bench_forward, 2),
        (page.bench_backward, 3),
        (page.bench_next, 5),
    ):
        bench = benchmark.benchmarks
        for provider in bench.line_vals:
            del calls[:]
            values = {"M": 3, "N": 264, "provider": provider}
            if provider == "two sweeps" and matrices == 3:
                values["N"] = 2048  # whose tiles are full
            assert benchmark.fn(**bench.args | values) == (2.0, 1.0, 3.0)
            expected = [matrices * 3 * values["N"] * 2]
            if provider == "copy":
                expected = 6 * [min(matrices, 3) * matrix]
            if provider == "torch.compile":  # both passes, before backward
                expected = [2 * matrix, 3 * matrix] if matrices == 2 else []
            assert calls == expected
    assert page.refuses("quack", 4097) and not page.refuses("quack", 4096)
    assert not page.refuses("liger", 4097)
