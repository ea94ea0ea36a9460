"""What must hold of the page "Programs that share a row"."""

import re
from contextlib import contextmanager
from functools import partial

import pytest
import torch

from compiled.declared import Kernel, Kernels
from conformance import LayerNorm, Mistake, Page, on_gpu
from measurements.figure import from_to, series
from tutorial import source


def shared(page, M, N, dtype):
    """Both passes in shared rows, whatever fits on the GPU."""
    x, w, b, dy = (t.detach() for t in page.inputs(M, N, dtype))
    _, mean, rstd = page.forward_shared(x, w, b, 1e-5)
    page.backward_shared(dy, x, w, mean, rstd)


def without_driver(page):
    """Nobody can be asked for occupancy where kernels are only compiled."""
    page.places = lambda compiled: 2**20


def run(page, M, N, dtype):
    without_driver(page)
    shared(page, M, N, dtype)
    page.shared_sums(torch.ones(4, 16, device=page.DEVICE), 100, 1)


def also(page, M, N, dtype):
    without_driver(page)
    page.shared_sums(torch.ones(128, 16, device=page.DEVICE))
    page.shared_sums(torch.ones(33, 16, device=page.DEVICE), warps=1)
    shared(page, 3, 72, dtype)
    # Two sweeps launch page._layer_norm_fwd_sweeps, and backward
    # page._layer_norm_bwd_means and page._layer_norm_bwd_slices.
    x, w, b, dy = page.inputs(3, 1001, dtype)
    y = page.LayerNorm.apply(x, w, b, 1e-5)
    torch.autograd.grad(y, (x, w, b), dy)
    out = x.new_empty(4, dtype=torch.float32)
    for kernel in (page._shared_exponentials, page._shared_exponentials_1):
        page.together(
            kernel,
            programs=4,
            per_sm=1,
            warps=4,
            x_ptr=x.float(),
            out_ptr=out,
            words_ptr=page.empty_words(1, 4),
            LANES=16,
            SLICES=4,
        )
    if page.CUDA:
        page._keep_busy[(4,)](5_000_000, num_warps=32)
    page._move[(M,)](x, x, M * N // 2, 2, 1, BLOCK_SIZE=4096)  # the ceiling


SIZES = {
    "float16": [
        32768, 65536, 98304, 131072, 262144, 393216, 524288, 786432,
        1048576,
    ],
    "bfloat16": [65536, 524288],
    "float32": [65536, 262144],
}  # fmt: skip

PUBLISHED = "2026-11-22"

KERNELS = Kernels(
    run=run,
    also=also,
    M=4096,
    N=[65536, 524288],
    dtype="float16",
    sizes=SIZES,
    kernels={
        "_shared_sums": Kernel(
            look="""
            A word is stored, then four are awaited: the load of 8 bytes stands
            in a loop of its own.
            GPUs of AMD get no PTX: there the page takes two sweeps.
            """,
            true=lambda code: [
                code.amd or code.count("load", 8) == code.count("store", 8) > 0
            ],
            narrow_loads=3,
            narrow_stores=6,
        ),
        "_layer_norm_fwd_shared": Kernel(
            look="""
            ``x`` comes by asynchronous copies, two tiles ahead.
            The loads and stores of 8 bytes are the words by which programs
            tell each other their sums.
            At 524288 columns some registers are spilled.
            """,
            true=lambda code: [
                code.amd
                or (
                    code.count("load", 8) == 1 and code.count("store", 8) == 2
                ),
                (code.count("copy", 16) > 0) != code.amd,
            ],
            true_at={524288: lambda code: [code.spills > 0]},
            narrow_loads=2,  # words
            narrow_stores=4,  # words, mean and rstd
            copies=True,
            # 16 KB of a row in four warps: still faster than half of it in
            # eight.
            spills={524288: 56, 786432: 56, 1048576: 56},
        ),
        "_layer_norm_bwd_shared": Kernel(
            look="""
            Two matrices come by asynchronous copies, and the sums for ``dw``
            and ``db`` stay in registers: look at how many they are.
            """,
            true=lambda code: [
                code.registers > 128,
                code.count("load", 8) > 0,
            ],
            narrow_loads=2,  # words
            narrow_stores=4,  # words of 4 rows
            narrow_copies=12,  # mean and rstd
            copies=True,
        ),
    },
)


HALF, BFLOAT, SINGLE, DOUBLE = LayerNorm.dtypes
DTYPES = HALF, BFLOAT, SINGLE  # that programs share
at = LayerNorm.at


def three_turns(load):
    page = load()
    page.shared_sums(torch.ones(4, 16, device=page.DEVICE), 3, 1)


def tiny_rows(load):
    """Without eps the cube of rstd is more than float32 holds, and dx is
    not."""
    page = load()
    torch.manual_seed(0)
    x, dy = torch.randn(2, 19, 72, device=page.DEVICE)
    w = torch.rand(72, device=page.DEVICE)
    x = 1e-13 * x
    results = []
    for function, kind in (
        (page.layer_norm, SINGLE),
        (torch.nn.functional.layer_norm, DOUBLE),
    ):
        given = [t.to(kind).requires_grad_() for t in (x, w)]
        y = function(given[0], (72,), given[1], None, 0.0)
        results.append(torch.autograd.grad(y, given, dy.to(kind)))
    for ours, exact in zip(*results, strict=True):
        assert ours.isfinite().all()
        assert (ours - exact).norm() <= 1e-5 * exact.norm()


def negative_eps(load):
    page = load()
    try:
        page.layer_norm(torch.ones(2, 8, device=page.DEVICE), 8, eps=-1e-5)
    except ValueError:
        return
    raise AssertionError("a negative eps is taken")


@contextmanager
def in_sweeps(page, **replaced):
    """Which passes went in sweeps; other functions may be replaced."""
    calls = []
    passes = {
        "forward": page.forward_in_sweeps,
        "backward": page.backward_in_sweeps,
    }
    replaced |= {
        f"{name}_in_sweeps": partial(noted, calls, name, function)
        for name, function in passes.items()
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in replaced.items():
            patch.setattr(page, name, value)
        yield calls


def noted(calls, name, function, *arguments, **more):
    calls.append(name)
    return function(*arguments, **more)


def no_room(load):
    """Where programs do not fit, sweeps are taken, and they are right."""
    page = load()
    with in_sweeps(page, together=lambda *arguments, **more: False) as calls:
        LayerNorm().run(page.layer_norm, at(5, 72), page.DEVICE)
    assert calls == BOTH


BOTH = ["forward", "backward"]

CARD = "H100"
FORWARD = "layer-norm-shared-rows-forward"
BACKWARD = "layer-norm-shared-rows-backward"
WIDTHS = 65536, 262144, 393216, 524288, 1048576  # of the forward figure


def times(ratios):
    return f"{ratios.least} to {ratios.most} times as fast as"


def of_the_exchange(figure):
    of = figure("layer-norm-shared-rows-exchange", CARD)

    def us(provider, programs):
        return rounded(of.median(provider, programs), ".2f")

    at_once = of.medians["triton"]
    peak = max(at_once, key=at_once.get)
    assert peak == 32, "the page explains a peak at 32"
    assert of.median("one warp", 64) > of.median("one warp", 32)
    assert of.median("triton", 64) < of.median("triton", 32)
    later = [rounded(x, ".2f") for x in of.all_medians("later")]
    assert max(later) <= 0.5 * at_once[128]
    yield (
        "On the H100, with four warps, a turn that waits at once takes "
        f"{us('triton', 2)} µs with 2 programs, {us('triton', 8)} µs with 8, "
        f"and {us('triton', 128)} µs with 128. It takes longest with 32, "
        f"{us('triton', 32)} µs. With the words of the turn before, a turn "
        f"takes {min(later)} to {max(later)} µs."
    )
    yield (
        f"Then 64 programs need {us('one warp', 64)} µs and 32 need "
        f"{us('one warp', 32)} µs"
    )
    # The fastest copy of the page, by one of 132 SMs.
    copy = figure(FORWARD, CARD).all_medians("copy").most
    moved = us("triton", 128) * copy / 132
    yield (
        f"in {us('triton', 128)} µs an H100 could move {moved:.0f} KB for "
        "each of its SMs"
    )
    yield (
        f"takes {us('triton', 128)} µs if they wait for the words "
        f"at once, and {us('later', 128)} µs if they collect them a turn "
        "later."
    )


def rounded(number, rounding):
    number.rounding = rounding
    return number


def of_the_forward_pass(figure):
    of = figure(FORWARD, CARD)
    ours, sweeps = of.shares("triton"), of.shares("sweeps")
    yield (
        f"On the H100 shared rows reach {from_to(ours)} of a copy, and two "
        f"sweeps reach {from_to(sweeps)}. Forward, ours is "
        f"{times(of.ratios('triton', 'torch'))} PyTorch, and "
        f"{times(of.ratios('triton', 'torch.compile'))} torch.compile."
    )
    assert of.ratios("triton", "torch").least > 1
    assert of.ratios("triton", "torch.compile").least > 1
    # The quarter of idle lanes.
    assert of.share("triton", 393216) == ours.least
    wide = of.between(262144)
    yield (
        "at 65536 columns two sweeps reach "
        f"{of.share('sweeps', 65536)}%, and we reach "
        f"{of.share('triton', 65536)}%. From 262144 columns on we are ahead "
        f"of them, with {from_to(wide.shares('triton'))} against "
        f"{from_to(wide.shares('sweeps'))}. At 393216 columns we reach "
        f"{of.share('triton', 393216)}%, which is our lowest share."
    )
    assert of.ratio("sweeps", "triton", 65536) > 1
    assert wide.ratios("triton", "sweeps").least > 1
    at = partial(of.share, x=1048576)
    # Three matrices for two, where no cache helps: "just below that".
    for N in 393216, 524288, 1048576:
        assert 60 <= of.share("sweeps", N) <= 67
    # "Falls much further", at each step.
    fall = [of.share("torch", N) for N in WIDTHS]
    assert fall == sorted(fall, reverse=True)
    yield f"PyTorch falls much further, to {at('torch')}% at 1048576 columns."
    # "The wider ones" reach less.
    assert of.share("triton", 65536) > wide.shares("triton").most
    yield f"three matrices. They reach {at('sweeps')}% of a copy."
    yield f"- **Shared rows** read it once, and reach {at('triton')}%."
    yield (
        f"- **PyTorch** reaches {at('torch')}% forward, and **torch.compile** "
        f"{at('torch.compile')}%."
    )


def beside_another_kernel(figure):
    of = figure("layer-norm-shared-rows-beside", CARD)

    def us(provider, busy):
        return rounded(of.median(provider, busy), ".0f")

    # It waits, or it does not: there is nothing in between.
    alone = us("triton", 0)
    assert us("triton", 4) <= 1.2 * alone
    assert us("triton", 5) >= 5 * alone
    assert us("sweeps", 16) <= 1.5 * us("sweeps", 0)
    yield (
        "their programs run on the SMs that are free. They take "
        f"{us('sweeps', 2)} µs even beside two:"
    )
    assert us("sweeps", 2) > us("sweeps", 0)
    assert us("triton", 2) > alone
    yield (
        f"on the H100 shared rows take {alone} µs alone and "
        f"{us('triton', 4)} µs beside four of them. With five, 127 SMs are "
        f"left for 128 programs, and ours takes {us('triton', 5)} µs: it has "
        "waited until the other kernel ended. Two sweeps take "
        f"{us('sweeps', 0)} µs alone, and {us('sweeps', 16)} µs beside 16 of "
        "them, because their programs run on the SMs that are free."
    )


def of_the_backward_pass(figure):
    of = figure(BACKWARD, CARD)
    ours, sweeps, torch, compiled = (
        from_to(of.shares(each))
        for each in ("triton", "sweeps", "torch", "torch.compile")
    )
    yield (
        f"On the H100 our backward pass reaches {ours} of the copy, two "
        f"sweeps reach {sweeps}, PyTorch reaches {torch}, and torch.compile "
        f"reaches {compiled}. Backward, ours is "
        f"{times(of.ratios('triton', 'torch'))} PyTorch. It is "
        f"{times(of.ratios('triton', 'torch.compile'))} torch.compile."
    )
    assert of.ratios("triton", "torch").least > 1
    assert of.ratios("triton", "torch.compile").least > 1
    falling = [of.share("triton", N) for N in (65536, 524288, 1048576)]
    assert falling == sorted(falling, reverse=True)
    yield (
        "The wider the rows, the less we reach: "
        f"{of.share('triton', 65536)}% at 65536 columns, "
        f"{of.share('triton', 524288)}% at 524288, and "
        f"{of.share('triton', 1048576)}% at 1048576."
    )
    # "About as near to the copy as forward, or nearer."
    forward = figure(FORWARD, CARD)
    for N in 65536, 524288, 1048576:
        assert of.share("triton", N) >= forward.share("triton", N) - 2, N
    # Seven matrices for three, and fewer threads in wider rows.
    fall = [of.share("torch", N) for N in (65536, 524288, 1048576)]
    assert 43 >= fall[0] > fall[1] > fall[2]
    # "Does best in the widest rows."
    assert of.share("torch.compile", 1048576) == max(
        of.shares("torch.compile")
    )
    at = partial(of.share, x=1048576)
    assert at("sweeps") <= 60 + 3  # five matrices for three
    yield f"five matrices. They reach {at('sweeps')}% of the copy."
    yield f"- **Shared rows** read both once, and reach {at('triton')}%."
    yield (
        f"- **PyTorch** reaches {at('torch')}% backward, and "
        f"**torch.compile** {at('torch.compile')}%."
    )


def on_the_other_card(figure):
    """What the H200 shows; each order that the H100 has and it has not."""
    exchange, forward, beside, backward = (
        figure(f"layer-norm-shared-rows-{name}", "H200")
        for name in ("exchange", "forward", "beside", "backward")
    )
    before = figure("layer-norm-shared-rows-exchange", "H100")
    apart = max(
        abs(100 * (exchange.median(name, x) / before.median(name, x) - 1))
        for name in exchange.medians
        for x in exchange.medians[name]
    )
    yield (
        "On the H200 all of these times are the same, within "
        f"{rounded(apart, '.1f')}%:"
    )
    copy = forward.all_medians("copy").most
    each = rounded(exchange.median("triton", 128), ".2f")
    yield (f"in {each} µs an H200 could even move {each * copy / 132:.0f} KB.")

    ours, sweeps = forward.shares("triton"), forward.shares("sweeps")
    over_torch = forward.ratios("triton", "torch")
    over_compiled = forward.ratios("triton", "torch.compile")
    assert min(over_torch.least, over_compiled.least) > 1
    yield (
        f"On the H200 shared rows reach {from_to(ours)} of a copy, and two "
        f"sweeps reach {from_to(sweeps)}. Ours is {times(over_torch)} "
        f"PyTorch, and {times(over_compiled)} torch.compile."
    )
    lost = {
        N: 100 * (forward.ratio("sweeps", "triton", N) - 1) for N in WIDTHS
    }
    assert [N for N in WIDTHS if lost[N] > 0] == [65536, 393216]
    assert forward.share("triton", 393216) == ours.least
    yield (
        "Two sweeps are ahead of us at two widths there, by "
        f"{rounded(lost[65536], '.1f')}% at 65536 columns and by "
        f"{rounded(lost[393216], '.1f')}% at 393216, where we reach "
        f"{ours.least}%. At the other three we are ahead, with "
        f"{from_to(forward.at(262144, 524288, 1048576).shares('triton'))} "
        "against "
        f"{from_to(forward.at(262144, 524288, 1048576).shares('sweeps'))}."
    )
    for N in 393216, 524288, 1048576:
        assert 60 <= forward.share("sweeps", N) <= 67
    fall = [forward.share("torch", N) for N in WIDTHS]
    assert fall == sorted(fall, reverse=True)

    def us(provider, busy):
        return rounded(beside.median(provider, busy), ".0f")

    assert max(us("triton", n) for n in (2, 4)) < 1.05 * us("triton", 0)
    assert us("triton", 5) > 5 * us("triton", 0)
    yield (
        f"On the H200 shared rows take {us('triton', 0)} µs alone, "
        f"{us('triton', 4)} µs beside four busy SMs, and "
        f"{us('triton', 5)} µs beside five. Two sweeps take "
        f"{us('sweeps', 0)} µs alone, and {us('sweeps', 16)} µs beside 16."
    )

    ours, sweeps, torch, compiled = (
        from_to(backward.shares(each))
        for each in ("triton", "sweeps", "torch", "torch.compile")
    )
    over_torch = backward.ratios("triton", "torch")
    over_compiled = backward.ratios("triton", "torch.compile")
    assert min(over_torch.least, over_compiled.least) > 1
    falling = [backward.share("triton", N) for N in (65536, 524288, 1048576)]
    assert falling == sorted(falling, reverse=True)
    yield (
        f"On the H200 our backward pass reaches {series(falling, '%')} of the "
        f"copy at these three widths, two sweeps reach {sweeps}, PyTorch "
        f"reaches {torch}, and torch.compile reaches {compiled}. Ours is "
        f"{times(over_torch)} PyTorch, and {times(over_compiled)} "
        "torch.compile."
    )
    # "About as near to the copy as forward, or nearer": within 3 points.
    for N in 65536, 524288, 1048576:
        assert backward.share("triton", N) > forward.share("triton", N) - 3.1
    assert backward.share("torch.compile", 1048576) == max(
        backward.shares("torch.compile")
    )
    yield (
        "On the H200 they are ahead of us at 393216 columns as well, where a "
        "quarter of our lanes is idle."
    )


def CLAIMS(figure):
    yield from on_the_other_card(figure)
    yield from of_the_exchange(figure)
    yield from of_the_forward_pass(figure)
    yield from beside_another_kernel(figure)
    yield from of_the_backward_pass(figure)


# Numbers with a unit that nothing has measured, and why they are right.
FACTS = {
    f"a million columns ({2 * 2**20 >> 20} MB)": "2 bytes a column",
    f"{2**29 >> 20} MB a matrix": "the rows that the benchmark takes",
    "These seven matrices leave it 43%": "3 matrices of 7",
    f"as many as {2**29 >> 20} MB have room for": "the same",
    "as before: 128 for 2 MB": "slices of 16 KB",
    "leaves 67% of the copy": "2 matrices of 3",
    "beside the 4 MB that it moves": "2 matrices of 2**20 numbers of 2 bytes",
    "busy for 5 ms": "what the kernel is told",
    "start ours 1 ms later": "what the host is told",
    "about 1 ms after programs": "what the host is told",
    "began to spin for 5 ms": "what the kernel is told",
    "Above 1 MB there are so many words": "128 * SLICE",
    "leaves them 60% of the copy": "3 matrices of 5",
}

PAGE = Page(
    __file__,
    LayerNorm(
        sizes=(  # multiples of 8 are shared, others are swept
            ((5,), (40,)),
            ((2, 3), (5, 8)),
            ((), (40,)),
            ((0,), (40,)),
            ((2, 0), (40,)),
            ((2, 1, 3), (72,)),
            ((1,), (8,)),
            ((17,), (3,)),
            ((3,), (129,)),
        ),
        large=(
            ((20, 3), (130, 128)),
            ((2, 1, 3), (20_000,)),
            ((), (20_000,)),
            ((1,), (2**19,)),
            ((130,), (1023,)),
        ),
    ),
    {"layer_norm": lambda page: page.layer_norm},
    # Slices of 8 to 128 lanes: small rows have several.
    quick=(
        ("8192 if ON_GPU else 256", "128"),
        ("if ON_GPU else 4", "if ON_GPU else 12"),
    ),
    cases=(
        *(at(2, 96, dtype) for dtype in LayerNorm.dtypes),
        at(2, 1600, HALF),  # too wide to be shared there
    ),
    full=(
        *(
            at(M, N, dtype)
            for N in (8, 4104, 65536, 131_080, 393_216, 2**19)
            for M in (1, 37)
            for dtype in DTYPES
        ),
        at(7, 2**20, HALF),
        at(1, 2**20, BFLOAT),
        at(2, 2**20 + 2**18, HALF),  # wider than all programs together
        at(37, 65537, HALF),
        at(37, 65536, DOUBLE),
        *(at(2**26 // N, N, HALF) for N in (32768, 65536, 262_144)),
    ),
    mistakes=(
        *(
            Mistake(
                ValueError,
                rf"\beps is {eps}\b",
                lambda ones: (ones(2, 8), (8,)),
                {"eps": eps},
            )
            for eps in (-1e-05, float("nan"))
        ),
    ),
    elsewhere="is on cuda:1: not the current one",
    repeatable=("layer_norm",),
    repeated=tuple(at(2**25 // N + 1, N, HALF) for N in (65536, 2**19, 2**20)),
    graphs=(at(64, 65536, HALF),),  # its words are filled anew
    trains=("layer_norm",),
    huge=(65536,),
    sanitizers=("memcheck",),
    sanitized=(at(5, 20_008, HALF), three_turns),
    prints={
        "Timing needs a GPU": 2,
        "[2016.0, 85344.0]": 4,
        "72 columns: True": 1,
        "each element of y, dx, dw and db is right": 2,
        "variance 5.25 PyTorch 5.25": 1,
        "right: False": 1,
    },
    mutants={
        "slices are not put together": (
            "tl.sum(m2s + n * d * d, axis=1)",
            "tl.sum(m2s, axis=1)",
        ),
        "slices count alike": (
            "tl.minimum(N - s * WIDTH, WIDTH), 0)",
            "WIDTH, 0)",
        ),
        "words that do not exist": (
            "return tl.where(s < SLICES, a, 0), tl.where(s < SLICES, b, 0)",
            "return a, b",
        ),
        "one word for all slices": (
            "at = words_ptr + row * SLICES + s\n",
            "at = words_ptr + row * SLICES\n",
        ),
        "masked lanes in m2": (
            "d = tl.where(inside, x.to(tl.float32) - mean[:, None], 0)",
            "d = x.to(tl.float32) - mean[:, None]",
        ),
        "the last tile is not finished": (
            "tl.range(start, M + step, step, num_stages=3):",
            "tl.range(start, M, step, num_stages=3):",
        ),
        "the last tile of gradients": (
            "M + step,  # one turn more",
            "M,  # one turn more",
        ),
        "the tile before is this one": ("y = (before.to", "y = (x.to"),
        "the gradients of this tile": (
            "            x_before, dy_before, w,",
            "            x, dy_before, w,",
        ),
        "c1 dropped": ("- (d * c1 + c2)", "- c2"),
        "c2 dropped": ("- (d * c1 + c2)", "- d * c1"),
        "rows that do not exist": ("(row < M - first)", "(row < ROWS)"),
        "sums without a place": ("start // ROWS * 2 * N + cols", "cols"),
        "dy with strides of its own": ("dy = dy.contiguous()", "dy = dy"),
        "rstd cubed": (
            "sum1 * rstd * rstd * rstd / N",
            "sum1 * (rstd * rstd * rstd) / N",
        ),
        "any eps": ("if not eps >= 0:", "if False:"),
        "forward, nobody looks whether it was launched": (
            "    if not launched:\n        return None\n    return y",
            "    return y",
        ),
        "backward, nobody looks whether it was launched": (
            "    if not launched:\n        return None\n    # The last",
            "    # The last",
        ),
    },
    kills=(
        at(5, 72),
        at(2, 8, dy="one number"),
        tiny_rows,
        negative_eps,
        no_room,
    ),
)


def test_a_turn_later(unedited):
    x = torch.arange(64.0, device=unedited.DEVICE).reshape(4, 16)
    for later in 0, 1:
        found = unedited.shared_sums(x, 3, later)
        assert found.tolist() == 4 * [[2016.0, 85344.0]]


@pytest.mark.parametrize("itemsize", [2, 4])
def test_plans_fit(unedited, itemsize, monkeypatch):
    """A row has no more slices than programs fit, in powers of two: on an
    H100, on half of one, and on its smallest slice."""
    for sms in 132, 60, 16:
        monkeypatch.setattr(unedited, "NUM_SMS", sms)
        monkeypatch.setattr(unedited, "SLICE", 8192)
        most = 2 * sms * 8192
        for row in 16, 65536, 2**17 + 16, 2**18, 96 * 8192 + 16, most:
            if row > most:
                continue
            for forward in True, False:
                found = unedited.plan_shared(
                    row // itemsize, itemsize, forward
                )
                (rows, lanes), how = found
                assert lanes & (lanes - 1) == 0
                assert sms * how["per_sm"] * lanes * itemsize >= row
                assert rows * lanes * itemsize <= 32768 // how["per_sm"]


@pytest.mark.parametrize("per_sm", [1, 2, 4])
def test_cuts(unedited, per_sm, monkeypatch):
    """All programs fit, all columns have a slice, and no slice is idle."""
    monkeypatch.setattr(unedited, "NUM_SMS", 132)
    monkeypatch.setattr(unedited, "empty_words", lambda *shape: shape)
    for N in [8, 4096, 65536, 131080, 393216, 600_000, 2**20]:
        for M, rows, lanes in (4096, 2, 4096), (3, 2, 4096), (256, 1, 8192):
            if lanes * 132 * per_sm < N:
                continue
            found = unedited.cut(M, N, rows, lanes, per_sm)
            groups, programs, words, tile = found
            width, padded = tile["WIDTH"], tile["PADDED"]
            assert tile["ROWS"] == rows and tile["LANES"] == lanes
            slices = words[1]
            assert programs == groups * slices <= 132 * per_sm
            assert (slices - 1) * width < N <= slices * width
            assert width <= lanes and width % 64 == 0
            assert slices <= padded
            tiles = -(-M // rows)
            # One row more in every group, for the turn that only finishes.
            assert words[0] >= (tiles + groups) * rows
            if tiles >= groups + 1:
                assert programs >= 132 * per_sm // 2


def test_the_table_of_slices_is_that_of_the_plan(
    unedited, output, monkeypatch
):
    """What the page prints of an H100 is what it would do on one."""
    monkeypatch.setattr(unedited, "NUM_SMS", 132)
    monkeypatch.setattr(unedited, "SLICE", 8192)
    monkeypatch.setattr(unedited, "empty_words", lambda *shape: shape)
    table = output.split("programs that fit  groups", 1)[1]
    lines = [line.split() for line in table.splitlines()[1:7]]
    assert [int(line[0]) for line in lines] == [
        65536, 131072, 262144, 393216, 524288, 1048576
    ]  # fmt: skip
    for line in lines:
        N, fit, groups, slices, width, lanes = map(int, line)
        (rows, planned), how = unedited.plan_shared(N, 2, True)
        found = unedited.cut(4096, N, rows, planned, how["per_sm"])
        assert (fit, lanes) == (132 * how["per_sm"], planned)
        assert found[:2] == (groups, groups * slices)
        assert found[3]["WIDTH"] == width


@pytest.mark.parametrize(
    ("N", "dtype", "swept"),
    [
        (72, SINGLE, []),
        (384, SINGLE, []),
        (73, SINGLE, BOTH),
        (72, DOUBLE, BOTH),
        (1600, HALF, BOTH),
    ],
)
@pytest.mark.cpu
def test_what_is_swept(load, N, dtype, swept):
    """Only what cannot be shared."""
    page = load()
    with in_sweeps(page) as calls:
        LayerNorm().run(page.layer_norm, at(3, N, dtype), page.DEVICE)
    assert calls == swept


def test_where_programs_do_not_fit(load):
    no_room(load)


def test_tiny_rows(load):
    tiny_rows(load)


def test_empty_is_no_number_and_stands_in_the_ptx(unedited):
    halves = torch.tensor([unedited.EMPTY]).view(torch.int32)
    assert halves[0] == halves[1]
    value = halves.view(SINGLE)[0]
    quiet = 1 << 22
    assert value.isnan() and not halves[0] & quiet
    assert f"0x{unedited.EMPTY:016X};" in source(PAGE.name)


def test_exercise(output):
    found = re.findall(
        r"^found: \[([\d.]+),.*\nexact: ([\d.]+)$", output, re.M
    )
    assert len(found) == 2
    assert found[0][0] != found[0][1] and found[1][0] == found[1][1]


def test_words_are_whole_in_ptx(launches):
    """Relaxed accesses of 64 bits, a loop with its trap, and two programs a
    multiprocessor by registers and shared memory."""
    from compiled.aot import Call

    values = {"M": 4096, "N": 2**19, "dtype": "float16"}
    found = launches([Call(PAGE.name, on_a_gpu, values)])[0]
    for built, per_sm in zip(found, (2, 2), strict=True):
        text = built.text
        assert "st.relaxed.gpu.global.b64" in text
        load = r"ld\.relaxed\.gpu\.global\.b64[^@]*@again bra LOAD;\s*@empty"
        assert re.search(load + r" trap;", text)
        assert not re.search(r"ld\.relaxed\S*\.v2", text)
        threads = 32 * built.num_warps * per_sm
        assert built.registers * threads <= 65536
        assert per_sm * (built.shared + 1024) <= 233472
        assert "cp.async" in text


def on_a_gpu(page, M, N, dtype):
    without_driver(page)
    shared(page, M, N, dtype)


def sums(page, programs, warps):
    without_driver(page)
    x = torch.ones(programs, 16, device=page.DEVICE)
    page.shared_sums(x, 1000, 0, warps)


def test_how_the_words_are_divided_among_warps(launches):
    """Up to 32 words each warp has all; above that four warps share them and
    meet, and a single warp has several words for each lane."""
    from compiled.aot import Call

    programs = 8, 32, 33, 64, 128
    calls = [
        Call(PAGE.name, sums, {"programs": each, "warps": warps})
        for warps in (4, 1)
        for each in programs
    ]
    texts = [built.text for (built,) in launches(calls)]
    loads = [text.count("ld.relaxed") for text in texts]
    assert loads == [1, 1, 1, 1, 1, 1, 1, 2, 2, 4]
    meet = ["bar.sync" in text for text in texts]
    assert meet == [False, False, True, True, True] + 5 * [False]


@pytest.mark.gpu
@pytest.mark.parametrize("programs", [33, 128])
@pytest.mark.parametrize("warps", [1, 4])
@pytest.mark.parametrize("later", [0, 1])
def test_a_thousand_turns_of_many_programs(page, later, warps, programs):
    x = torch.arange(16.0 * programs, device="cuda") / (16 * programs)
    found = page.shared_sums(x.reshape(programs, 16), 1000, later, warps)
    expected = torch.stack([x.sum(), (x * x).sum()]).expand(programs, 2)
    torch.testing.assert_close(found, expected)


@pytest.mark.gpu
def test_what_is_measured_is_shared(page):
    """The benchmarks ask for shared rows, and these kernels fit."""
    for bench in page.bench_forward, page.bench_backward:
        for N in bench.benchmarks.x_vals:
            x, w, b, dy = (t.detach() for t in page.inputs(64, N, HALF))
            assert page.can_share(x)
            _, mean, rstd = page.forward_shared(x, w, b, 1e-5)
            assert page.backward_shared(dy, x, w, mean, rstd) is not None


@pytest.mark.gpu
def test_too_many_programs_are_asked_about(load):
    """If CUDA says that they do not fit, nothing is launched, and sweeps are
    taken. Were it not asked, the launch would fail."""
    page = load()
    x = torch.zeros(4096, 16, device="cuda")
    with pytest.raises(RuntimeError, match="4096 programs do not fit"):
        page.shared_sums(x)
    # As if the GPU were larger than it is.
    with in_sweeps(page, NUM_SMS=8 * page.NUM_SMS) as calls:
        LayerNorm().run(page.layer_norm, at(37, 2**18, HALF), page.DEVICE)
    assert calls == BOTH


@pytest.mark.gpu
def test_the_launch_refuses_what_does_not_fit(load):
    """What the question is there for: a cooperative launch that fails."""
    page = load()
    x = torch.zeros(4096, 16, device="cuda")
    with (
        in_sweeps(page, places=lambda compiled: 2**20),
        pytest.raises(RuntimeError, match="cooperative"),
    ):
        page.shared_sums(x)


ALONE = """
import torch
from tutorial import load
soon = "loads, 10000000,", "loads, 1000,"
page = load("layer-norm/08-shared-rows", [soon])
# Three programs, where four words are awaited.
page.together(
    page._shared_sums,
    programs=3,
    per_sm=1,
    warps=4,
    x_ptr=torch.zeros(64, device="cuda"),
    out_ptr=torch.zeros(8, device="cuda"),
    words_ptr=page.empty_words(1, 4),
    turns=1,
    later=0,
    LANES=16,
    SLICES=4,
    PADDED=4,
)
"""


@pytest.mark.gpu
def test_a_word_that_never_comes_is_an_error():
    on_gpu.dies(ALONE)
