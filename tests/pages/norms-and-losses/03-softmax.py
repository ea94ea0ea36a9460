"""What must hold of the page "Softmax, both passes"."""

import pytest
import torch
import torch.nn.functional as F

import tutorial
from compiled.declared import Case, Kernel, Kernels
from conformance import Page, Softmax, SoftmaxCase, guarded_allocations


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
            Shown for rows of one tile: the second sweep has nothing to load
            again.
            """,
            true=lambda code: [len(code.lines("load")) == 2],
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
    ("if row < 2048 or (step > 1 and row <= 32768):", "if False:"),
    ("N * itemsize > 65536", "N > 0"),
    ('"PAIRS": 32 * warps, "EACH": 16 // itemsize', '"PAIRS": 4, "EACH": 4'),
    ('"BLOCK": 32768 // itemsize', '"BLOCK": 16'),
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


def CLAIMS(figure):
    pairs = figure("softmax-pairs", "H200")
    thread, program, lane = (
        pairs.shares(each) for each in ("triton", "program", "lane")
    )
    yield (
        f"On the H200 a pair for each thread reaches {thread.least}% to "
        f"{thread.most}% of the copy, a pair for the program "
        f"{program.least}% to {program.most}%, and a pair for each lane "
        f"{lane.least}% to {lane.most}%."
    )
    sweeps = figure("softmax-sweeps", "H200")
    for other in "program", "lane":
        assert pairs.ratios("triton", other).least > 1
    near = pairs.between(24576, 40960).shares("triton")
    yield (
        "From 24576 to 40960 columns it reaches "
        f"{near.least}% to {near.most}%. "
        f"At 65536 columns it reaches {pairs.share('triton', 65536)}%, "
        "because a part of the second sweep comes from memory;"
    )
    yield (
        f"At 16384 columns it reaches {pairs.share('triton', 16384)}% with "
        "the 32 warps of this figure. The rule takes 16 there, and reaches "
        f"{sweeps.share('two sweeps', 16384)}%, as the next figure shows."
    )
    # What page 05 counts, on the same card.
    counted = figure(
        "wide-softmax-dram", "H200", page="norms-and-losses/05-wide-softmax"
    )
    assert round(counted.median("page 03", 32768), 1) == 1
    assert counted.median("page 03", 65536) > 1.1
    slower = figure("softmax-pairs", "H100")
    thread, program, lane = (
        slower.shares(each) for each in ("triton", "program", "lane")
    )
    assert ahead_of_ours(slower) == {"program": [32768, 49152, 65536]}
    yield (
        f"On the H100 it reaches {thread.least}% to {thread.most}%, a pair "
        f"for the program {program.least}% to {program.most}%, and a pair for "
        f"each lane {lane.least}% to {lane.most}%."
    )
    yield (
        f"at 32768 columns a pair for the program reaches "
        f"{slower.share('program', 32768)}% of the copy, and a pair for each "
        f"thread {slower.share('triton', 32768)}%."
    )
    one = {N: sweeps.share("one sweep", N) for N in (128, 4096, 4097, 16384)}
    two = {N: sweeps.share("two sweeps", N) for N in one}
    yield (
        f"On the H200, at 4096 columns, one sweep reaches {one[4096]}% of the "
        f"copy, and two reach {two[4096]}%; at 16384 columns one reaches "
        f"{one[16384]}%, and two reach {two[16384]}%. "
        "Two sweeps are slow where rows are narrower than two warps load at "
        f"once: at 128 columns they reach {two[128]}%, and one sweep "
        f"{one[128]}%. And they are slow where rows begin anywhere: at 4097 "
        f"columns they reach {two[4097]}%, and one sweep {one[4097]}%."
    )
    ruled = sweeps.at(1024, 2048, 4096, 8192)
    both = ruled.ratios("two sweeps", "one sweep")
    assert both.least > 0.98 and both.most < 1.03
    h100 = figure("softmax-sweeps", "H100")
    widths = 1024, 2048, 4096, 8192
    for N in widths:
        assert h100.ratio("one sweep", "two sweeps", N) > 1
    assert h100.ratio("two sweeps", "one sweep", 16384) > 1
    ones = ", ".join(f"{h100.share('one sweep', N)}%" for N in widths[:-1])
    twos = ", ".join(f"{h100.share('two sweeps', N)}%" for N in widths[:-1])
    yield (
        "On the H100 one sweep is faster up to 8192 columns: at 1024, 2048, "
        f"4096 and 8192 columns it reaches {ones} and "
        f"{h100.share('one sweep', 8192)}% of the copy, and two sweeps reach "
        f"{twos} and {h100.share('two sweeps', 8192)}%."
    )
    forward = figure("softmax-forward", "H200")
    ours = forward.between(1024, 40960).shares("triton")
    wide = forward.between(49152).shares("triton")
    yield (
        f"On the H200 ours reaches {ours.least}% to {ours.most}% of the copy "
        f"from 1024 to 40960 columns, and {wide.least}% to {wide.most}% from "
        "49152 on, where the cache no longer holds all rows. "
        "Below, at 128 and 256 columns, it reaches "
        f"{forward.share('triton', 128)}% and {forward.share('triton', 256)}"
        f"%, torch.compile {forward.share('torch.compile', 128)}% and "
        f"{forward.share('torch.compile', 256)}%, quack "
        f"{forward.share('quack', 128)}% and {forward.share('quack', 256)}%. "
        "At 4096 columns torch.compile reaches "
        f"{forward.share('torch.compile', 4096)}%, PyTorch "
        f"{forward.share('torch', 4096)}%, Liger "
        f"{forward.share('liger', 4096)}% and quack "
        f"{forward.share('quack', 4096)}%. "
        "quack is faster than ours at 128 and 256 columns, and from 49152 "
        f"columns on: it reaches {forward.share('quack', 57344)}% at 57344 "
        f"columns, where ours reaches {forward.share('triton', 57344)}%."
    )
    assert ahead_of_ours(forward) == {"quack": [128, 256, 49152, 57344, 65536]}
    h100 = figure("softmax-forward", "H100")
    ahead = ahead_of_ours(h100)
    assert set(ahead) == {"torch.compile", "liger", "quack"}
    assert ahead["torch.compile"] == [1024]
    assert set(ahead["liger"]) <= {*ahead["quack"], 1024}
    ours = [N for N in h100.medians["triton"] if N not in ahead["quack"]]
    assert ours == [256, 4097, 16384, 24576]
    yield (
        "On the H100 quack is the fastest at most widths: it reaches "
        f"{h100.share('quack', 4096)}% of the copy at 4096 columns, where "
        f"ours reaches {h100.share('triton', 4096)}%, and "
        f"{h100.share('quack', 32768)}% at 32768, where ours reaches "
        f"{h100.share('triton', 32768)}%. At 1024 columns torch.compile is "
        f"ahead, with {h100.share('torch.compile', 1024)}%, and ours reaches "
        f"{h100.share('triton', 1024)}%. Ours is ahead at 256, 4097, 16384 "
        "and 24576 columns."
    )
    backward = figure("softmax-backward", "H200")
    yield (
        "On the H200, at 4096 columns, ours reaches "
        f"{backward.share('triton', 4096)}% of the copy, torch.compile "
        f"{backward.share('torch.compile', 4096)}%, PyTorch "
        f"{backward.share('torch', 4096)}%, Liger "
        f"{backward.share('liger', 4096)}% and quack "
        f"{backward.share('quack', 4096)}%; at 16384 columns ours reaches "
        f"{backward.share('triton', 16384)}% and torch.compile "
        f"{backward.share('torch.compile', 16384)}%. At 4097, where rows "
        f"begin anywhere, ours reaches {backward.share('triton', 4097)}% and "
        f"torch.compile {backward.share('torch.compile', 4097)}%."
    )
    compiled = {
        N: backward.share("torch.compile", N)
        for N in (1024, 2048, 4096, 8192, 16384)
    }
    ahead = ahead_of_ours(backward)
    assert ahead["torch.compile"] == [128, *compiled]
    apart = [
        abs(100 * (first.median("copy", N) / second.median("copy", N) - 1))
        for first, second in ((sweeps, forward), (pairs, forward))
        for N in first.medians["copy"]
    ]
    assert compiled[8192] - 100 < 1.5 * max(apart) < compiled[4096] - 102
    yield (
        "From 1024 to 16384 columns torch.compile is faster than ours, except "
        f"at 4097: it reaches {compiled[1024]}% at 1024 columns, as ours "
        "does, and "
        f"{compiled[2048]}% at 2048, {compiled[4096]}% at 4096, "
        f"{compiled[8192]}% at 8192 and {compiled[16384]}% at 16384. "
        "More than a copy? The copy is the best of six tiles, and that is "
        "noisy: where the figures of the "
        "forward pass measure the same copy twice, the two "
        f"lie up to {max(apart):.1f}% apart. That may explain most of the "
        f"{compiled[16384]}%, but not the {compiled[2048]}% and the "
        f"{compiled[4096]}%, whose cause we have not found."
    )
    assert f"{compiled[1024]}" == f"{backward.share('triton', 1024)}"
    ours = [backward.share("triton", N) for N in range(40960, 65537, 8192)]
    quack_s = backward.between(40960, 57344).shares("quack")
    liger_s = backward.between(40960).shares("liger")
    narrow = backward.between(0, 32768)
    gains = [narrow.ratios(each, "triton").most for each in ("liger", "quack")]
    gain = 100 * (max(gains) - 1)
    yield (
        "Up to 32768 columns Liger and quack are faster than ours at some "
        f"widths, by {gain:.0f}% at most."
    )
    yield (
        f"It reaches {ours[0]}% at 40960 columns, {ours[1]}% at 49152, "
        f"{ours[2]}% at 57344 and {ours[3]}% at 65536."
    )
    yield (
        f"quack reaches {quack_s.least}% to {quack_s.most}% from 40960 to "
        f"57344 columns, and {backward.share('quack', 65536)}% at 65536; "
        f"Liger reaches {liger_s.least}% to {liger_s.most}% from 40960 "
        "columns on."
    )
    h100 = figure("softmax-backward", "H100")
    ours = h100.between(256, 32768).shares("triton")
    wide = h100.between(40960)
    gain = 100 * (
        h100.between(256, 32768).ratios("torch.compile", "triton").most - 1
    )
    yield (
        f"On the H100 ours reaches {ours.least}% to {ours.most}% of the copy "
        "from 256 to 32768 columns, and torch.compile is faster by "
        f"{gain:.0f}% at most. Above, ours falls from "
        f"{h100.share('triton', 40960)}% to {h100.share('triton', 65536)}%, "
        f"and quack reaches {wide.shares('quack').least}% to "
        f"{wide.shares('quack').most}%."
    )
    assert h100.share("triton", 65536) == wide.shares("triton").least


def ahead_of_ours(figure):
    """The widths at which another line than the copy is faster."""
    ours, found = figure.medians["triton"], {}
    for provider, medians in figure.medians.items():
        faster = [N for N, v in medians.items() if v and v > ours[N]]
        if faster and provider != "copy":
            found[provider] = faster
    return found


UNKNOWN = "the cause is not found; the page says so"
ABOVE_A_COPY = {
    ("softmax-backward", "torch.compile", 2048): UNKNOWN,
    ("softmax-backward", "torch.compile", 4096): UNKNOWN,
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
                "if row < 2048 or (step > 1 and row <= 32768):",
                "if row <= 32768:",
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
            "tl.load(at, mask=some), none)",
            "tl.load(at, mask=some), none * 0)",
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
        "rows that are not there, forward": ("M - 1)  # the", "M)  # the"),
        "rows that are not there, backward": ("M - 1)\n    ys", "M)\n    ys"),
        "rows: dy instead of y dy": (
            "total += dy if LOG else",
            "total += dy if True else",
        ),
        "the hidden number is not 0": ("dy, dx, 0, M, N", "dy, dx, 1, M, N"),
        "log: the sum is not subtracted": ("y = d - log if", "y = d if"),
        "rows, log: y for its power": (
            "y * (dy - total)\n        _store",
            "dy - y * total\n        _store",
        ),
        "sweeps: the sum of dy dropped": (
            "y * (dy - total)\n        tl.store",
            "y * dy\n        tl.store",
        ),
        "sweeps: a sum does not shrink": ("s * tl.exp(m - new) +", "s +"),
        "sweeps: pairs are added as they are": (
            "tl.sum(s * tl.exp(m - top), 0)",
            "tl.sum(s, 0)",
        ),
        "sweeps: the first maximum is -inf": (
            "tl.full((PAIRS,), LOWEST, acc)",
            'tl.full((PAIRS,), float("-inf"), acc)',
        ),
        "sweeps: the first tile left out": (
            "(N - 1) // TILE * TILE - start",
            "N // TILE * TILE - start",
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
                    assert N * itemsize >= 2048
                    continue
                chunk, rows = plan["CHUNK"], plan["ROWS"]
                assert chunk.bit_count() == 1
                assert rows == 1 or chunk >= N + step - 1
                held = -(-(N + step - 1) // chunk) * chunk * rows
                assert held * itemsize <= (4096 + 512) * warps


def test_script_runs_alone(output):
    assert "errors below" in output
    assert output.count("Timing needs a GPU") == 4
    assert "Warning" not in output


def test_exercise(output):
    stub, solution = (
        float(line.rpartition(" ")[2])
        for line in output.splitlines()
        if "change of dx" in line
    )
    assert stub > 1e-3 > 1e-4 > solution


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
    ):
        bench = benchmark.benchmarks
        for provider in bench.line_vals:
            del calls[:]
            values = {"M": 3, "N": 264, "provider": provider}
            assert benchmark.fn(**bench.args | values) == (2.0, 1.0, 3.0)
            tiles = 6 if provider == "copy" else 1
            assert calls == tiles * [matrices * matrix]
    assert page.refuses("quack", 4097) and not page.refuses("quack", 4096)
    assert not page.refuses("liger", 4097)
