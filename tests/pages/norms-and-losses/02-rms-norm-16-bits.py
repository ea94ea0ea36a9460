"""What must hold of the page "RMS norm in 16 bits"."""

import re
from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F

import tutorial
from compiled.declared import Case, Kernel, Kernels
from conformance import Mistake, Page, RmsNorm, takes_the_place, too_wide
from conformance.add_norm import STREAMS
from conformance.rms_norm import both_norms
from measurements.figure import from_to


def run(page, M, N, dtype):
    x, residual, w, dy, ds = page.inputs(M, N, dtype)
    out = page.add_rms_norm(x, residual, (N,), w, 1e-6, "gemma", 1.0)
    torch.autograd.grad(out, (x, residual, w), (dy, ds))


def also(page, M, N, dtype):
    x, _residual, w, dy, _ds = page.inputs(5, 1000, dtype)
    for casting in page.CASTINGS:
        torch.autograd.grad(
            page.rms_norm(x, 1000, w, 1e-6, casting), (x, w), dy
        )
    for kernel in (page._add_norm, page._add_norm_1):
        kernel[(8,)](x.half(), x.half(), x.half(), x.float(), N=64)
    for reads in (1, 2):  # the ceiling
        page._move[(5,)](x, x, 2500, reads, 1, BLOCK_SIZE=4096)


def alone(page, M, N, dtype):
    x, _, w, dy, _ = page.inputs(M, N, dtype)
    torch.autograd.grad(page.rms_norm(x, (N,), w, 1e-6, "llama"), (x, w), dy)


def float32_stream(page, M, N, dtype):
    x, residual, w, dy, ds = page.inputs(M, N, dtype, torch.float32)
    out = page.add_rms_norm(x, residual, (N,), w, 1e-6, "gemma", 1.0)
    torch.autograd.grad(out, (x, residual, w), (dy, ds))


PUBLISHED = "2026-11-22"

KERNELS = Kernels(
    run=run,
    also=also,
    M=4096,
    N=[4096, 8192],
    dtype="bfloat16",
    sizes={
        "bfloat16": [2048, 2560, 3072, 3584, 4096, 5120, 7168, 8192],
        "float16": [8192],
        "float32": [4096],
    },
    kernels={
        "_rms_norm_fwd": Kernel(
            look="""
            Shown as Gemma rounds, with ``1 + w``: the same loads and stores,
            and no conversion between the product and the store of ``y``.
            """,
            true=lambda code: [
                code.loaded == 3 * 2 * 4096
                or code.amd,  # whose warps are wider
                code.narrow("load") == 0 or code.amd,
                len(code.lines("shuffle")) == 1,
            ],
            narrow_stores=1,  # rstd
        ),
        "_rms_norm_bwd": Kernel(
            look="""
            On NVIDIA GPUs asynchronous copies load ``s``, ``dy`` and ``ds``
            ahead.
            """,
            true=lambda code: [
                (code.count("copy", 16) > 0) != code.amd,
                code.spills == 0,
            ],
            copies=True,
            narrow_copies=4,  # rstd, of several rows
            shared=232448,  # all that a program may have on sm_90
        ),
    },
    cases={
        "alone": Case(
            run=alone,
            sizes={"bfloat16": [2048, 4096, 5120, 8192]},
        ),
        "float32-stream": Case(
            run=float32_stream,
            sizes={"bfloat16": [2048, 4096, 8192]},
        ),
    },
)


HALF, SINGLE = torch.float16, torch.float32
BOTH = HALF, torch.bfloat16
at = RmsNorm.at


def normalizes_the_sum_as_it_is_rounded(load):
    page = load()
    x, residual, w = page.inputs(5, 75, HALF)[:3]
    y, s = page.add_rms_norm(x, residual, 75, w, 1e-6)
    assert torch.equal(y, page.rms_norm(s, 75, w, 1e-6))


def a_small_weight_and_its_offset(load):
    page = load()
    x = torch.full((1, 75), 1.0, dtype=HALF, device=page.DEVICE)
    tiny = torch.full_like(x[0], 2.0**-13)
    y = page.rms_norm(3 * x, 75, tiny.requires_grad_(), 1e-6, offset=1.0)
    assert torch.equal(y, x)


def two_gradients_of_two_types(load):
    """That of x is the other, rounded."""
    page = load()
    x, residual, w, dy, ds = page.inputs(5, 75, HALF, SINGLE)
    out = page.add_rms_norm(x, residual, 75, w, 1e-6)
    dx, dresidual = torch.autograd.grad(out, (x, residual), (dy, ds))
    rounded = dresidual.half()
    assert (dx - rounded).abs().max() == 0
    assert not torch.equal(dresidual, rounded.float())


def tiny_rows(load):
    """Without eps the cube of rstd is more than float32 holds, and dx is
    not."""
    page = load()
    torch.manual_seed(0)
    x, dy = torch.randn(2, 19, 40, device=page.DEVICE)
    w = torch.rand(40, device=page.DEVICE)
    x = 1e-13 * x
    results = []
    for function, kind in (
        (page.rms_norm, SINGLE),
        (F.rms_norm, torch.float64),
    ):
        given = [t.to(kind).requires_grad_() for t in (x, w)]
        y = function(given[0], (40,), given[1], 0.0)
        results.append((y, *torch.autograd.grad(y, given, dy.to(kind))))
    for ours, exact in zip(*results, strict=True):
        assert ours.isfinite().all()
        assert (ours - exact).norm() <= 1e-5 * exact.norm()


def bits_of_gemma(load):
    page = load()
    x = torch.randn(5, 75, device=page.DEVICE).half()
    w = torch.rand(75, device=page.DEVICE).half()
    y = page.rms_norm(x, 75, w, 1e-6)
    expected = page.in_torch(x, w, 1e-6, "gemma")
    assert (y == expected).double().mean() > 0.97


def negative_eps(load):
    page = load()
    try:
        page.rms_norm(torch.ones(2, 8, device=page.DEVICE), 8, eps=-1e-5)
    except ValueError:
        return
    raise AssertionError("a negative eps is taken")


CARD = "H200"
MODES = {"forward": "rms-norm-16-bits-forward"}
MODES["backward"] = "rms-norm-16-bits-backward"


def errors(figure):
    of = figure("rms-norm-casting", CARD)
    ratios = {}
    for casting in ("llama", "none"):
        for dtype in ("float16", "bfloat16"):
            ratio = of.median("triton", f"{dtype} {casting}") / of.median(
                "triton", f"{dtype} gemma"
            )
            ratio.rounding = ".2f"
            ratios[casting, dtype] = ratio
            # "Our kernel and PyTorch's steps have the same errors."
            theirs = of.median("torch", f"{dtype} {casting}")
            ours = of.median("triton", f"{dtype} {casting}")
            assert 0.98 < ours / theirs < 1.02
    # "As expected", of two roundings and of three.
    assert all(1.38 < ratios["llama", each] < 1.44 for each in TYPES)
    assert all(1.6 < ratios["none", each] < 2 for each in TYPES)
    # "Eight times as small", and the drawing of the stream has this number.
    once = [of.median("triton", f"{each} gemma") for each in TYPES]
    assert 7.9 < once[1] / once[0] < 8.1
    assert 0.00164 < once[1] < 0.00168
    yield (
        f"On the H200 the error of ``llama`` is {ratios['llama', 'float16']} "
        "times that of ``gemma`` in float16, and "
        f"{ratios['llama', 'bfloat16']} times in bfloat16. That of ``none`` "
        f"is {ratios['none', 'float16']} and {ratios['none', 'bfloat16']} "
        "times as large."
    )


def both_figures(figure):
    of = {mode: figure(name, CARD) for mode, name in MODES.items()}
    shares = {
        (mode, each): from_to(of[mode].shares(each))
        for mode in MODES
        for each in (
            "triton", "llama", "torch", "torch.compile", "quack", "steps"
        )
    }  # fmt: skip
    # Both modes move the same bytes.
    for mode in MODES:
        ahead = of[mode].ratios("llama", "triton")
        assert ahead.least > 0.96 and ahead.most < 1.04
        assert of[mode].ratios("triton", "steps").least > 1.5  # "slow"
    for mode, subject in (("forward", "kernel"), ("backward", "pass")):
        whose = {"kernel": "our kernel", "pass": "our backward pass"}[subject]
        copy = {"forward": "a copy", "backward": "the copy"}[mode]
        yield (
            f"On the H200 {whose} reaches {shares[mode, 'triton']} of {copy} "
            f"with ``gemma``, and {shares[mode, 'llama']} with ``llama``. "
            f"{mode.capitalize()}, PyTorch reaches {shares[mode, 'torch']}, "
            f"torch.compile {shares[mode, 'torch.compile']}, and quack "
            f"{shares[mode, 'quack']}. The steps reach "
            f"{shares[mode, 'steps']}."
        )
    forward = of["forward"]
    ahead = forward.ratios("llama", "triton")
    assert ahead.least > 1  # "at all widths", and so the most is the most
    most = 100 * (ahead.most - 1)
    most.rounding = ".1f"
    yield f"and they differ by {most}% at most."
    at_8192 = {
        each: forward.share(each, 8192)
        for each in ("triton", "torch.compile", "quack")
    }
    yield (
        f"On the H200 our kernel falls to {at_8192['triton']}% of the copy "
        "at 8192 columns, where torch.compile reaches "
        f"{at_8192['torch.compile']}% and quack {at_8192['quack']}%."
    )
    for rival in ("torch.compile", "quack"):
        # "A little ahead" at 1024 columns, and behind in between.
        assert 1 < forward.ratio(rival, "triton", 1024) < 1.03
        for N in (2048, 4096, 5120):
            assert forward.ratio("triton", rival, N) > 1
    best, there = (
        figure(MODES["forward"], card).ratio("torch.compile", "triton", 8192)
        for card in (CARD, "H100")
    )
    best.rounding = there.rounding = ".2f"
    yield (
        f"**A forward pass of 8192 columns** is {best} times as fast with "
        f"torch.compile as with our kernel on the H200, and {there} times on "
        "the H100."
    )
    # "What the libraries lose in this pass."
    for rival in ("torch", "torch.compile", "quack"):
        assert of["backward"].ratios("triton", rival).least > 1
    backward = of["backward"]
    # "Falls where rows are narrow".
    assert backward.shares("triton").least == backward.share("triton", 1024)
    us, of_copy = (
        backward.us(each, 1024, matrices=3) for each in ("triton", "copy")
    )
    yield (
        f"At 1024 columns both together take {us:.0f} µs, where the copy "
        f"takes {of_copy:.1f} µs."
    )
    apart = max(
        abs(100 * (ratio - 1)) for ratio in backward.ratios("llama", "triton")
    )
    yield f"the two lines lie up to {apart:.1f}% apart."
    yield (
        "3 backward. It reaches "
        f"{shares['forward', 'triton']} of a copy forward, and "
        f"{shares['backward', 'triton']} backward."
    )
    yield (
        f"the same bytes. {shares['forward', 'llama']} forward, and "
        f"{shares['backward', 'llama']} backward. The error of ``y``"
    )
    yield (
        f"a kernel a step. {shares['forward', 'steps']} forward, and "
        f"{shares['backward', 'steps']} backward."
    )


def stream(figure):
    of = figure("rms-norm-stream", CARD)
    longer = of.ratios("triton", "float32")
    # Near the 28 bytes of 16 where rows are wide, and at most that.
    assert longer.least > 1.2 and longer.most <= 1.85
    assert longer[0] == longer.least  # 1024 columns
    times = [of.median(each, 8192) for each in ("float32", "triton")]
    yield (
        f"On the H200 both passes take {longer.least} to {longer.most} times "
        "as long with a stream in float32: at 8192 columns, "
        f"{times[0]:.0f} µs instead of {times[1]:.0f}."
    )
    yield f"and {longer.least} to {longer.most} times the time. Its error"


def block(figure):
    of = figure("rms-norm-llama", CARD)
    times = {
        N: [of.median(each, N) for each in ("triton", "steps", COMPILED)]
        for N in (1024, 4096)
    }
    yield (
        "On the H200 a block of 1024 columns takes {:.0f} µs with our "
        "module, {:.0f} µs with the steps, and {:.0f} µs compiled."
    ).format(*times[1024])
    yield ("At 4096 columns it takes {:.0f}, {:.0f} and {:.0f} µs.").format(
        *times[4096]
    )
    # How much of a block is its norms: two of them, by the figure before.
    norms = [
        figure("rms-norm-stream", CARD).median("triton", N)
        for N in (1024, 4096)
    ]
    shares = [
        200 * norm / times[N][0]
        for norm, N in zip(norms, (1024, 4096), strict=True)
    ]
    longer = [times[N][1] - times[N][0] for N in (1024, 4096)]
    yield (
        f"took {norms[0]:.1f} µs for both passes of 1024 columns, and "
        f"{norms[1]:.1f} µs of 4096. Two of them are {shares[0]:.1f}% of the "
        f"block with our module at 1024 columns, and {shares[1]:.1f}% at "
        f"4096. With the steps, the block takes {longer[0] / 1e3:.2f} and "
        f"{longer[1] / 1e3:.2f} ms longer."
    )
    gains = [of.ratio("triton", "steps", N) for N in (1024, 4096)]
    # "So the share of the norms falls", and a compiled block is ahead.
    assert gains[0] > gains[1] > 1
    assert of.ratios(COMPILED, "triton").least >= 1
    yield (
        f"Our module makes the block {gains[0]:.2f} times as fast as the "
        f"steps at 1024 columns, and {gains[1]:.2f} times at 4096."
    )


TYPES = ("float16", "bfloat16")
COMPILED = "torch.compile"


def on_the_other_card(figure):
    of = figure(MODES["forward"], "H100")
    at = {
        (each, N): of.share(each, N)
        for each in ("triton", "torch.compile", "quack")
        for N in (1024, 8192)
    }
    yield (
        "On the H100 both are further ahead at 1024 columns, with "
        f"{at['torch.compile', 1024]}% and {at['quack', 1024]}%, where our "
        f"kernel reaches {at['triton', 1024]}%, and they are ahead at 8192, "
        f"with {at['torch.compile', 8192]}% and {at['quack', 8192]}%, where "
        f"it reaches {at['triton', 8192]}%."
    )
    compiled, quack = (
        of.ratio(each, "triton", 1024) for each in ("torch.compile", "quack")
    )
    yield (
        f"torch.compile is {compiled:.2f} times as fast as our kernel there, "
        f"and quack {quack:.2f} times."
    )
    for mode, whose, copy in (
        ("forward", "kernel", "a copy"),
        ("backward", "backward pass", "the copy"),
    ):
        of = figure(MODES[mode], "H100")
        gemma, llama, pytorch, compiled, quack = (
            from_to(of.shares(each))
            for each in ("triton", "llama", "torch", "torch.compile", "quack")
        )
        yield (
            f"On the H100 our {whose} reaches {gemma} of {copy} with "
            f"``gemma``, and {llama} with ``llama``. PyTorch reaches "
            f"{pytorch}, torch.compile {compiled}, quack {quack}, and the "
            f"steps at most {of.shares('steps').most}%."
        )


def CLAIMS(figure):
    yield from errors(figure)
    yield from both_figures(figure)
    yield from stream(figure)
    yield from block(figure)
    yield from on_the_other_card(figure)


# Numbers with a unit that nothing has measured, and why they are right.
FACTS = {
    "or 1.41 times as large": "the square root of 2",
    "make 1.41 times the error of one": "the square root of 2",
    "``y`` is 1.41 times as large": "the square root of 2, as measured",
    "it would make 1.73 times": "the square root of 3",
    "we expect 1.75 times the time": "28 bytes of 16",
    "Bytes explain 1.75 times": "28 bytes of 16",
    "These are 36 bytes where our kernel moves 4, which would leave the "
    "steps 11% of a copy": "4 of 6 + 8 + 4 + 8 + 6 + 4",
    "errors eight times as small": "three bits; CLAIMS asserts it",
    "last sum is about 1%": "a test of the page asserts it",
}

PAGE = Page(
    __file__,
    RmsNorm(more=(("offset", (0.0, 1.0)),)),
    {"rms_norm": both_norms},
    forms={
        # Chunks of 16 columns, so that narrow rows have several, and each
        # program has several rows.
        "small": (
            (
                "chunk = min(512 // sizes[0] * warps, "
                "triton.next_power_of_2(N))",
                "chunk = 16",
            ),
            (
                "chunk = min(512 // sizes[1] * warps, "
                "triton.next_power_of_2(N))",
                "chunk = 16",
            ),
            ("if ON_GPU else 4", "if ON_GPU else 1"),
        ),
        "wide": (),
    },
    cases=tuple(at(1, N, HALF, form="wide") for N in (4096, 4097, 8192)),
    full=(
        *(
            at(1151, N, dtype, **more)
            for N in (8, 37, 1000, 2048, 4096, 4104, 5120, 8192)
            for dtype in BOTH
            for more in ({"offset": 1.0}, {"fused": False}, {"stream": SINGLE})
        ),
        at(1151, 4096),
        at(301, 2048, torch.float64),
        at(301, 8192, HALF, weight_dtype=SINGLE),
        *(
            at(301, N, dtype, stream=stream)
            for dtype, stream in STREAMS
            for N in (40, 1500)
        ),
    ),
    mistakes=(
        too_wide(4097, "4097 columns.* 4096", lambda x: (x, x)),
        too_wide(4097, "4097 columns.* 4096", lambda x: (x, None)),
        Mistake(
            ValueError,
            "casting is bert",
            lambda ones: (ones(2, 8), ones(2, 8), 8, None, 0, "bert"),
        ),
    ),
    elsewhere="is on cuda:1: not the current one",
    repeatable=("rms_norm",),
    repeated=tuple(
        at(512, N, HALF, stream=SINGLE) for N in (1000, 4096, 8192)
    ),
    trains=("rms_norm",),
    huge=(8192,),
    sanitizers=("memcheck", "racecheck"),
    sanitized=tuple(
        at(301, N, HALF, stream=SINGLE, offset=1.0, casting="llama")
        for N in (1000, 8192)
    ),
    prints={
        "Timing needs a GPU": 2,
        "factor: 1.0 1 + distance: 0.9": 1,
    },
    mutants={
        "offset rounded": ('w.dtype, CASTING != "gemma"', "w.dtype, True"),
        "x_hat rounded": ('half, CASTING != "gemma"', "half, True"),
        "offset dropped forward": ("w, offset,", "w, 0,"),
        "offset dropped backward": (
            "dx = scaled * _factor(ws[c], offset",
            "dx = scaled * _factor(ws[c], 0",
        ),
        "the row sum dropped": ("dx_ptr + at, dx - s * a", "dx_ptr + at, dx"),
        "the row sum dropped of the stream": (
            "_store(dr_ptr + at, dx - s * a,",
            "_store(dr_ptr + at, dx,",
        ),
        "ds dropped": ('_load(ds_ptr + at, c, N, CHUNK, "").to(acc)', "0"),
        "the sum is not rounded": (
            "(s.to(acc) + residuals[c].to(acc)).to(residuals[c].dtype)",
            "s.to(acc) + residuals[c].to(acc)",
        ),
        "store without mask": ("col, value, mask=col < N", "col, value"),
        "sums of the last row": ("(dws[c] + scaled * s,)", "(scaled * s,)"),
        "the cube of rstd": (
            "tl.sum(total) / N * rstd * rstd * rstd",
            "tl.sum(total) / N * (rstd * rstd * rstd)",
        ),
        "a negative eps": ("if not eps >= 0:", "if False:"),
        "dr in the type of x": ("if s.dtype != dy.dtype:", "if False:"),
    },
    kills=(
        at(19, 43, HALF, stream=SINGLE, offset=1.0),
        at(19, 43, HALF),
        at(19, 43, HALF, offset=1.0),
        normalizes_the_sum_as_it_is_rounded,
        a_small_weight_and_its_offset,
        two_gradients_of_two_types,
        bits_of_gemma,
        tiny_rows,
        negative_eps,
    ),
)


def test_castings_are_those_of_the_models(page):
    """Nearly all bits are those of PyTorch's steps; sums round otherwise."""
    torch.manual_seed(0)
    x = torch.randn(40, 200, device=page.DEVICE).half()
    w = torch.rand(200, device=page.DEVICE).half()
    same = {}
    for ours in page.CASTINGS:
        for offset in 0.0, 1.0:
            y = page.rms_norm(x, 200, w, 1e-6, ours, offset)
            for theirs in page.CASTINGS:
                expected = page.in_torch(x, w, 1e-6, theirs, offset)
                share = (y == expected).double().mean().item()
                same[ours, theirs, offset] = share
    for (ours, theirs, offset), share in same.items():
        if ours == theirs:
            assert share > (0.8 if ours == "none" else 0.97), (ours, offset)
        else:
            assert share < 0.85, (ours, theirs, offset)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("casting", ["gemma", "llama"])
def test_castings_at_full_size(page, casting, offset, dtype):
    x = torch.randn(512, 4096, device="cuda").to(dtype)
    w = torch.rand(4096, device="cuda").to(dtype)
    y = page.rms_norm(x, 4096, w, 1e-6, casting, offset)
    expected = page.in_torch(x, w, 1e-6, casting, offset)
    assert (y == expected).double().mean() > 0.97


def test_offset_in_full_precision(page):
    """1 + w is not rounded to 16 bits with gemma, and is with llama."""
    x = torch.randn(5, 75, device=page.DEVICE).half()
    w = torch.full((75,), 2.0**-13, dtype=HALF, device=page.DEVICE)
    assert 1 + w[0] == 1
    expected = F.rms_norm(x.double(), (75,), 1 + w.double(), 1e-6)
    without = F.rms_norm(x.double(), (75,), None, 1e-6)

    def nearer(casting):
        y = page.rms_norm(x, 75, w, 1e-6, casting, 1.0)
        off, all_of_it = y - without, expected - without
        return (off * without).sum() / (all_of_it * without).sum()

    assert nearer("gemma") > 0.5 > nearer("llama")


def test_none_leaves_the_range(page):
    """Each step in float16: the square of 300 is infinite."""
    x = torch.full((2, 40), 300.0, dtype=HALF, device=page.DEVICE)
    ones = torch.ones_like(x)
    for casting in "gemma", "llama":
        torch.testing.assert_close(page.rms_norm(x, 40, casting=casting), ones)
    assert not page.rms_norm(x, 40, casting="none").any()


def test_a_module_loads_what_pytorch_saved(page):
    options = {"eps": 1e-6, "device": page.DEVICE}
    takes_the_place(torch.nn.RMSNorm, page.RMSNorm, 24, **options)


def test_a_residual_that_is_none_is_refused(page):
    x = torch.ones(2, 8, device=page.DEVICE)
    with pytest.raises(TypeError, match="residual"):
        page.add_rms_norm(x, None, 8)


def test_loss_of_the_module(output):
    (line,) = (x for x in output.splitlines() if "loss with the module" in x)
    ours, theirs = map(float, line.split()[-2:])
    assert abs(ours - theirs) < 1e-5 * theirs


def test_the_row_of_the_page(page, output):
    """What can be found by hand is what the page prints, and what a sum of
    fractions gives."""
    row = [Fraction(7), Fraction(24), Fraction(0), Fraction(0)]
    assert sum(x * x for x in row) / 4 == Fraction("12.5") ** 2
    exact = row[0] / Fraction("12.5")
    assert exact == Fraction("0.56") and exact * 256 == Fraction("143.36")
    assert exact * Fraction("1.75") * 256 == Fraction("250.88")
    by_hand = {
        "gemma": round(Fraction("250.88")),
        "llama": round(143 * Fraction("1.75")),
        "none": round(144 * Fraction("1.75")),
    }
    assert round(Fraction(7 * 164, 8)) == 144  # 143.5, to the even one
    for casting, steps in by_hand.items():
        assert f"{casting}: {steps} / 256" in output.splitlines()
    # The table of models has the same numbers.
    assert output.count("251/256") == 3 and output.count("250/256") == 1


def test_the_bits_of_the_steps(output):
    shares = re.findall(r"(\w+): (\d+)% of y have the bits", output)
    assert [casting for casting, _ in shares] == ["gemma", "llama", "none"]
    gemma, llama, none = (int(share) for _, share in shares)
    assert min(gemma, llama) > 97 and none > 80


def test_one_wrong_element_is_found(page, monkeypatch):
    """The check of the page fails for each result and each mode."""
    right = page.add_rms_norm

    def with_a_fault(which):
        def wrong(*args):
            results = list(right(*args))
            fault = torch.zeros_like(results[which])
            fault[3, 7] = 0.01
            results[which] = results[which] + fault
            return results

        return wrong

    page.check(9, 200, HALF, HALF, "gemma")
    for casting in page.CASTINGS:
        for which in range(2):
            monkeypatch.setattr(page, "add_rms_norm", with_a_fault(which))
            with pytest.raises(AssertionError):
                page.check(9, 200, HALF, HALF, casting)


def test_a_power_of_two_rounds_nothing(page):
    """With such weights gemma and llama have the same bits, in any row."""
    torch.manual_seed(0)
    x = torch.randn(9, 200).bfloat16()
    for w in (1.0, 2.0, 0.5):
        weight = torch.full((200,), w).bfloat16()
        one, two = (
            page.in_torch(x, weight, 1e-6, casting)
            for casting in ("gemma", "llama")
        )
        assert torch.equal(one, two)


def test_the_error_of_a_stream(output):
    """What prose says of 64 additions, and the line that it computes."""
    found = re.findall(r"(\d+) added: bfloat16 (\S+), float32 (\S+)", output)
    errors = {int(k): (float(half), float(one)) for k, half, one in found}
    assert list(errors) == [1, 4, 16, 64]
    for count in (4, 16, 64):
        half, single = errors[count]
        assert 0.8 < half / (0.00166 * (count / 2) ** 0.5) < 1.2
        assert single < 1e-8
    assert 0.009 < errors[64][0] < 0.0105  # "about 1%"


@pytest.mark.cpu
def test_every_line_of_the_figures_measures_what_it_says():
    """A call of each provider, at one size: it moves what is counted."""
    calls = []

    def device_time(prepare):
        prepare()()
        calls.append(None)
        return 2.0, 1.0, 3.0

    def speed(bytes_moved, prepare):
        prepare()()
        calls.append(bytes_moved)
        return 2.0, 1.0, 3.0

    page = tutorial.load(PAGE.name)
    page.ON_GPU, page.device_time, page.speed = True, device_time, speed
    page.best_of_three_compilations = lambda function, measure: measure(
        function
    )
    matrix = 3 * 264 * 2
    for benchmark, matrices in (
        (page.bench_forward, 2),
        (page.bench_backward, 3),
    ):
        bench = benchmark.benchmarks
        for provider in bench.line_vals:
            if provider == "quack":  # another GPU's library
                continue
            page.compiled_speeds.cache_clear()
            del calls[:]
            values = {"M": 3, "N": 264, "provider": provider}
            assert benchmark.fn(**bench.args | values) == (2.0, 1.0, 3.0)
            if provider == "torch.compile":  # both passes at once
                assert calls == [2 * matrix, 3 * matrix]
                continue
            tiles = 6 if provider == "copy" else 1
            assert calls == tiles * [matrices * matrix]
    bench = page.bench_stream.benchmarks
    for provider in bench.line_vals:
        values = {"M": 3, "N": 264, "provider": provider}
        assert page.bench_stream.fn(**bench.args | values) == (2.0, 1.0, 3.0)
    bench = page.bench_block.benchmarks
    for provider in ("triton", "steps"):
        values = {"M": 16, "N": 64, "provider": provider}
        assert page.bench_block.fn(**bench.args | values) == (2.0, 1.0, 3.0)


def test_exercise(output):
    stub, solution = (
        float(line.rpartition(" ")[2])
        for line in output.splitlines()
        if "error of y before" in line
    )
    assert stub > 1e-5 > 1e-6 > solution
    assert "right: False" in output


@pytest.mark.gpu
def test_a_block_trains_like_pytorch(page):
    """Loss and gradients of a block in bfloat16, against PyTorch's."""
    ours, theirs = (
        page.step(256, 128, norm, torch.bfloat16)()
        for norm in (page.RMSNorm, page.LlamaNorm)
    )
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).norm() <= 0.05 * b.norm()
