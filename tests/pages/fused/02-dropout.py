"""What must hold of the page "Dropout without a mask"."""

import functools
import itertools

import pytest
import torch

from compiled.declared import Case, Kernel, Kernels
from conformance import (
    AddNorm,
    AddNormCase,
    Mistake,
    Page,
    below_zero,
    too_wide,
)
from conformance.add_norm import STREAMS


def run(page, M, N, dtype):
    x, r, w, b, dy, ds = page.inputs(M, N, dtype)
    y, s = page.dropout_add_layer_norm(x, r, (N,), w, b, 0.1, seed=1)
    torch.autograd.grad((y, s), (x, r, w, b), (dy, ds))
    page.drop(x.detach(), 0.1, 1)


def also(page, M, N, dtype):
    x, r, _w, b, dy, _ds = page.inputs(5, 24, dtype)
    for p in 0.0, 1.0:
        y, _s = page.dropout_add_layer_norm(
            x, r.detach().float(), 24, None, b, p
        )
        torch.autograd.grad(y, (x, b), dy)
    page.drop(x.detach(), 0.1, 1, four=False)
    for reads, writes in (1, 1), (2, 2), (3, 2):  # the ceiling
        page._move[(M,)](x, x, M, reads, writes, BLOCK_SIZE=4096)


def no_dropout(page, M, N, dtype):
    x, r, w, b, dy, ds = page.inputs(M, N, dtype)
    y, s = page.dropout_add_layer_norm(x, r, (N,), w, b, 0.0)
    torch.autograd.grad((y, s), (x, r, w, b), (dy, ds))


PUBLISHED = "2026-11-22"

# The copy reads x and residual and writes s and y; backward it reads s, dy and
# ds and writes two matrices.
COPIES = {
    "dropout-add-layer-norm-forward": (2, 2),
    "dropout-add-layer-norm-backward": (3, 2),
}

KERNELS = Kernels(
    run=run,
    also=also,
    M=4096,
    N=[4096],
    dtype="float16",
    sizes={
        "float16": [1024, 1536, 2560, 4096, 5120, 8192],
        "bfloat16": [8192],
        "float32": [1024, 4096],
    },
    kernels={
        "_dropout_only": Kernel(
            look="""
            Look for the multiplications of the generator, ten rounds of four,
            for every four elements; nothing but ``x`` is loaded.
            """,
            true=lambda code: [
                code.loaded == 2 * 4096,
                code.narrow("load") == 0,
            ],
        ),
        "_dropout_add_layer_norm_fwd": Kernel(
            look="""
            It loads and stores what the kernel without dropout does: no mask
            goes through memory.
            """,
            true=lambda code: [
                code.loaded == 4 * 2 * 4096,
                code.narrow("load") == 0,
                len(code.lines("store")) == 4,
            ],
            narrow_stores=2,  # mean and rstd
        ),
        "_dropout_add_layer_norm_bwd": Kernel(
            look="""
            Three matrices come by asynchronous copies, two are stored, and the
            generator stands in the second half of the loop.
            """,
            true=lambda code: [(code.count("copy", 16) > 0) != code.amd],
            copies=True,
            narrow_copies=8,  # mean and rstd
            narrow_stores=8,  # sums of narrow rows
            shared=232448,  # all that a program may have on sm_90
        ),
        "_add_up": Kernel(
            look="""
            A program reads the sums of all programs, 16 columns of each, by 16
            bytes.
            """,
            true=lambda code: [code.narrow("load") == 0],
            narrow_stores=1,  # of 16 columns
        ),
    },
    cases={
        "no-dropout": Case(
            run=no_dropout,
            sizes={"float16": [1024, 4096, 8192]},
        ),
    },
)


HALF, SINGLE = torch.float16, torch.float32
SEED = 2**40 + 1


def share(case, device):
    """What each element is multiplied by: shown by an x of 1."""
    M, N = (torch.Size(s).numel() for s in (case.lead, case.shape))
    kept = share_of(M, N, case.p, str(device))
    return kept.reshape(case.lead + case.shape)


@functools.cache
def share_of(M, N, p, device):
    if p == 1:
        return torch.zeros(M, N, dtype=torch.float64, device=device)
    p = round(p * 2**32) / 2**32  # compared with 32 bits
    return PAGE.load().kept(M, N, p, SEED) / (1 - p)


def at(M, N, dtype=SINGLE, stream=None, p=0.25, **more):
    return AddNorm.at(M, N, dtype, stream, p=p, **more)


def tiny_rows(load):
    """Without eps the cube of rstd is more than float32 holds, and dx is
    not."""
    page = load("small")
    torch.manual_seed(0)
    x, dy = torch.randn(2, 19, 40, device=page.DEVICE)
    w = torch.rand(40, device=page.DEVICE)
    x = (1e-13 * x).requires_grad_()
    y, s = page.dropout_add_layer_norm(
        x, 0 * x.detach(), 40, w, None, p=0, eps=0.0
    )
    (dx,) = torch.autograd.grad(y, x, dy)
    wide = s.detach().double().requires_grad_()
    exact = torch.nn.functional.layer_norm(wide, (40,), w.double(), None, 0.0)
    (right,) = torch.autograd.grad(exact, wide, dy.double())
    assert dx.isfinite().all()
    assert (dx - right).norm() <= 1e-5 * right.norm()


def words_in_order(load):
    """The kernel's words are those of plain Python, column by column."""
    page = load("small")
    seed, M, N = 2**40 + 7, 3, 40
    mask = page.kept(M, N, 0.25, seed).tolist()
    for row in range(M):
        for group in range(N // 4):
            words = page.philox(seed, row, group)
            expected = [float(word >= 2**30) for word in words]
            assert mask[row][4 * group : 4 * group + 4] == expected


def eps_below_zero(load):
    """A page that takes a negative eps is found."""
    page = load()
    x = torch.ones(2, 8, device=page.DEVICE)
    try:
        page.dropout_add_layer_norm(x, x, 8, eps=-1e-5)
    except ValueError as error:
        assert "eps is -1" in str(error)
        return
    raise AssertionError("a negative eps is taken")


# Both sides of each step of the formulas.
STEPS = (1, 31, 512, 1000, 1024, 1025, 2048, 4096, 4104, 8191, 8192)
PAGE = Page(
    __file__,
    AddNorm(share=share, more=(("p", (0.25, 0.0, 0.999, 1.0)),)),
    {
        "dropout_add_layer_norm": lambda page: functools.partial(
            page.dropout_add_layer_norm, seed=SEED
        )
    },
    # Few programs in the last kernel.
    quick=(("columns_per_program = 16", "columns_per_program = 256"),),
    forms={
        # Chunks of 16 columns, so that narrow rows have several, and each
        # program has several tiles.
        "small": (
            ("chunk = min(512 // itemsize * warps,", "chunk = min(2 * warps,"),
            ("1024 // itemsize * warps // chunk, 8", "8 * warps // chunk, 8"),
            ("if ON_GPU else 4", "if ON_GPU else 1"),
        ),
        "wide": (),
    },
    cases=(at(1, 8192, HALF, form="wide"), at(5, 40, form="wide")),
    full=(
        *(at(1151, N, HALF) for N in STEPS),
        *(at(301, N, torch.bfloat16) for N in STEPS),
        *(at(301, (N + 1) // 2) for N in STEPS),
        *(
            at(301, N, dtype, stream)
            for dtype, stream in STREAMS
            for N in (650, 2000)
        ),
        *(at(301, 1000, HALF, p=p) for p in (0.0, 0.999, 1.0)),
    ),
    mistakes=(
        *below_zero(inputs=lambda x: (x, x)),
        *(
            Mistake(
                ValueError,
                f"p is {p}",
                lambda ones, p=p: (ones(2, 8), ones(2, 8), 8, None, None, p),
            )
            for p in (1.5, float("nan"))
        ),
        too_wide(4097, "4097 .*16 KB", inputs=lambda x: (x, x)),
    ),
    elsewhere="is on cuda:1: not the current one",
    repeatable=("dropout_add_layer_norm",),
    repeated=tuple(at(1024, N, HALF, p=0.1) for N in (1000, 4096, 8192)),
    sanitizers=("memcheck", "racecheck"),
    sanitized=(at(301, 1000, HALF), at(301, 4096, HALF), at(301, 40)),
    prints={
        "Timing needs a GPU": 3,
        "each element is right": 2,
        "words / 2**32: 0.955 0.750 0.114 0.086": 1,
        "p = 0.25: 1.333 1.333 0.000 0.000": 1,
        "expected 0.562": 2,
        "two calls, the same: False": 1,
        "the same: True": 3,
        "right: False": 1,
        "each time: True - none in evaluation: False": 1,  # the stub
        "each time: True - none in evaluation: True": 1,
    },
    mutants={
        "no scale": ("x * scale, 0)", "x, 0)"),
        "another mask in the backward pass": ("g, seed", "g, seed + 1"),
        "rows of a tile alike": ("g, seed, row", "g, seed, row * 0 + first"),
        "the bits of the first chunk": ("g, seed, row, c", "g, seed, row, 0"),
        "the gradient of x is not dropped": (
            "dx = _dropout(g, seed, row, c, DROP)",
            "dx = g",
        ),
        "ds forgotten": (
            "g += tl.load(ds_ptr + at, mask=mask, other=0).to(acc)",
            "g += 0.0",
        ),
        "dropped after the sum": (
            "_dropout(x.to(acc), seed, row, 0, DROP) + r.to(acc)",
            "_dropout(x.to(acc) + r.to(acc), seed, row, 0, DROP)",
        ),
        "y in the type of s": (
            "y = torch.empty_like(x)\n    s =",
            "y = torch.empty_like(r)\n    s =",
        ),
        "dx in rows of one column": (
            "(s, dtype=ctx.x_dtype)",
            "(s)[..., :1]",
        ),
        "one buffer for all": ("ptr += tl.program_id(0) * 2 * N", "ptr += 0"),
        "gradients with strides of their own": (
            "contiguous_or_none(dy), contiguous_or_none(ds),",
            "dy, ds,",
        ),
        "words in another order": (
            "tl.join(a, c), tl.join(b, d)",
            "tl.join(a, b), tl.join(c, d)",
        ),
        "rstd cubed": (
            "sum1[:, None] * rstd * rstd * rstd / N",
            "sum1[:, None] * (rstd * rstd * rstd / N)",
        ),
        "any eps": ("if not eps >= 0:", "if False:"),
    },
    kills=(
        at(20, 40),
        at(3, 40, HALF, SINGLE),
        at(3, 24, dy="one number", ds="columns"),
        tiny_rows,
        words_in_order,
        eps_below_zero,
    ),
)


def test_tiny_rows(load):
    tiny_rows(load)


def test_words_are_in_order(load):
    words_in_order(load)


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
    for benchmark, matrices in (
        (page.bench_dropout, 2),
        (page.bench_forward, 4),
        (page.bench_backward, 5),
    ):
        bench = benchmark.benchmarks
        for provider in bench.line_vals:
            del moved[:]
            values = {"M": 5, "N": 24, "provider": provider}
            assert benchmark.fn(**bench.args | values) == (2, 1, 3)
            tiles = 6 if provider == "copy" else 1
            assert moved == tiles * [matrices * 5 * 24 * 2]


def given(page, M=4, N=40):
    case = AddNormCase(lead=(M,), shape=(N,))
    tensors = PAGE.operation.tensors(case, page.DEVICE)
    return tensors["x"], tensors["residual"], N


def test_everything_dropped(page):
    x, residual, N = given(page)
    x[0, 0] = float("inf")
    _, s = page.dropout_add_layer_norm(x, residual, N, p=1)
    assert torch.equal(s, residual)


@pytest.mark.parametrize("off", [{"p": 0}, {"training": False}])
def test_nothing_dropped(page, off):
    x, residual, N = given(page)
    y, s = page.dropout_add_layer_norm(x, residual, N, **off)
    assert torch.equal(s, x + residual)
    x.requires_grad_(), residual.requires_grad_()
    y, s = page.dropout_add_layer_norm(x, residual, N, **off)
    dx, dr = torch.autograd.grad((y + s).sum(), (x, residual))
    assert torch.equal(dx, dr)


def test_two_calls_differ_and_a_seed_of_torch_repeats_them(page):
    x, residual, N = given(page)

    def sums():
        return [page.dropout_add_layer_norm(x, residual, N)[1] for _ in "12"]

    torch.manual_seed(3)
    first, second = sums()
    torch.manual_seed(3)
    again = sums()
    assert not torch.equal(first, second)
    assert torch.equal(first, again[0]) and torch.equal(second, again[1])


def test_a_seed_that_is_given_leaves_the_generator_alone(page):
    x, residual, N = given(page)
    for more in {"seed": 3}, {"training": False}, {"p": 0}, {"p": 1}:
        state = torch.get_rng_state()
        page.dropout_add_layer_norm(x, residual, N, **more)
        assert torch.equal(torch.get_rng_state(), state)


def test_a_checkpoint_repeats_its_mask(page):
    x, residual, N = given(page)
    x.requires_grad_()

    def f(x):
        return page.dropout_add_layer_norm(x, residual, N)[1]

    s = torch.utils.checkpoint.checkpoint(f, x, use_reentrant=False)
    s.sum().backward()
    assert torch.equal(x.grad != 0, s != residual)


def test_seeds(page):
    seeds = (0, 1, 16, 2**31, 2**32, 2**32 + 1, 2**62)
    masks = [page.kept(8, 128, 0.5, seed) for seed in seeds]
    for i, mask in enumerate(masks):
        for other in masks[:i]:
            assert not torch.equal(mask, other)


@pytest.mark.parametrize("p", [0.01, 0.25, 0.5])
def test_share_and_neighbors(page, p):
    M, N = (4096, 8192) if page.ON_GPU else (32, 2048)
    mask = page.kept(M, N, p, seed=12)
    sigma = (p * (1 - p) / mask.numel()) ** 0.5
    assert abs(mask.mean() - (1 - p)) < 4 * sigma
    for other in (
        *(mask.roll(by, 1) for by in (1, 2, 3, 4)), mask.roll(1, 0),
    ):  # fmt: skip
        assert abs((mask * other).mean() - (1 - p) ** 2) < 5 * sigma
    for dim, size in (0, M), (1, N):
        spread = (p * (1 - p) / size) ** 0.5
        largest = (mask.mean(dim) - (1 - p)).abs().max()
        assert largest < 6 * spread + 4 / size


def test_the_mask_depends_on_seed_row_and_column_only(page):
    mask = page.kept(5, 96, 0.5, 7)
    assert torch.equal(mask[:3, :50], page.kept(3, 50, 0.5, 7))
    ones = torch.ones(5, 96, device=page.DEVICE)
    alone = page.drop(ones, 0.5, 7)
    assert torch.equal(alone != 0, mask != 0)


@pytest.mark.parametrize("four", [True, False])
def test_dropout_alone(page, four):
    x = torch.rand(3, 3000, device=page.DEVICE) + 1
    y = page.drop(x, 0.25, 5, four)
    assert abs((y != 0).float().mean() - 0.75) < 0.03
    torch.testing.assert_close(y, torch.where(y != 0, x / 0.75, 0))


@pytest.mark.gpu
def test_more_than_2_31_elements(page):
    """A position of 32 bits would repeat the mask."""
    M, N = 2**31 // 8192 + 5, 8192
    x = torch.ones(M, N, dtype=HALF, device="cuda")
    _, s, *_ = page.forward(x, torch.zeros_like(x), None, None, 1e-5, 0.5, 9)
    for rows in slice(0, 64), slice(M - 64, M):
        assert 0.49 < (s[rows] != 0).double().mean() < 0.51
    assert not torch.equal(s[:5], s[-5:])


FACTS = {
    "leave it 80% of the": "2 units over 2.5",
    "so 1.9 times as fast is what we have counted": "7.5 units over 4",
    "8.5 units would leave it 59%": "5 units over 8.5",
    "torch.compile would have 91% if": "5 units over 5.5",
}


def on_the_other_card(figure):
    of = figure("dropout-add-layer-norm-forward", "H100")
    ours, none, pytorch, compiled = (
        of.shares(name)
        for name in ("triton", "no dropout", "torch", "torch.compile")
    )
    yield (
        f"On the H100 our kernel reaches {ours.least}% to {ours.most}% of the "
        f"copy, and {none.least}% to {none.most}% of it without dropout. "
        f"PyTorch reaches {pytorch.least}% to {pytorch.most}%, and "
        f"torch.compile reaches {compiled.least}% to {compiled.most}%."
    )
    of = figure("dropout-add-layer-norm-backward", "H100")
    ours, pytorch, compiled = (
        of.shares(name) for name in ("triton", "torch", "torch.compile")
    )
    yield (
        f"On the H100 ours reaches {ours.least}% to {ours.most}% of the copy, "
        f"PyTorch reaches {pytorch.least}% to {pytorch.most}%, and "
        f"torch.compile reaches {compiled.least}% to {compiled.most}%."
    )


def CLAIMS(figure):
    yield from on_the_other_card(figure)
    alone = figure("dropout-only", "H200")
    four, each = alone.shares("triton"), alone.shares("each")
    theirs = alone.shares("torch")
    assert four.least > 2 * each.most
    yield (
        f"On the H200, dropout reaches {four.least}% to {four.most}% of a "
        "copy if four columns share a call. With a call for each column it "
        f"reaches {each.least}% to {each.most}%. PyTorch reaches "
        f"{theirs.least}% to {theirs.most}%."
    )
    # Not the memory is the limit of the one, but it is that of the other.
    flat = [alone.median("each", N) for N in (1024, 16384)]
    copy = [alone.median("copy", N) for N in (1024, 16384)]
    assert flat[1] / flat[0] < 1.2 < copy[1] / copy[0]
    yield (
        f"hardly rises with the width, from {flat[0]} to {flat[1]} GB/s, "
        f"while the copy rises from {copy[0]} to {copy[1]} GB/s."
    )

    def time(figure, provider, N, matrices):
        """µs that so many matrices of 16 bits take at this speed."""
        return matrices * 4096 * N * 2 / figure.median(provider, N) / 1e3

    calls, ours, least = (
        time(alone, provider, 16384, 2)
        for provider in ("each", "triton", "copy")
    )
    # One after the other they would take longer.
    assert ours < least + calls / 4 / 2
    yield (
        f"At 16384 columns a call for each takes {calls:.1f} µs, and a "
        f"quarter of that is {calls / 4:.1f} µs. The copy takes {least:.1f} "
        f"µs there, and our dropout {ours:.1f} µs"
    )
    assert alone.share("triton", 1024) <= four.least
    ours, least = (
        time(alone, provider, 1024, 2) for provider in ("triton", "copy")
    )
    yield (
        f"The lowest share, {four.least}%, is that of 1024 columns, where "
        f"dropout takes {ours - least:.1f} µs more than the copy, which takes "
        f"{least:.1f} µs."
    )

    forward = figure("dropout-add-layer-norm-forward", "H200")
    ours, none = forward.shares("triton"), forward.shares("no dropout")
    pytorch, compiled = (
        forward.shares("torch"),
        forward.shares("torch.compile"),
    )
    gain = forward.ratios("triton", "torch")
    assert compiled.most < 50
    yield (
        f"On the H200 our kernel reaches {ours.least}% to {ours.most}% of the "
        f"copy, and {none.least}% to {none.most}% of it without dropout. "
        f"PyTorch reaches {pytorch.least}% to {pytorch.most}%, and "
        f"torch.compile reaches {compiled.least}% to {compiled.most}%. "
        f"Forward, ours is {gain.least} to {gain.most} times as fast as "
        "PyTorch."
    )
    yield (
        f"the dropout alone reached {theirs.least}% to {theirs.most}% in the "
        "figure before"
    )
    parts = [
        100 * time(alone, "each", N, 2) / time(forward, "torch.compile", N, 4)
        for N in (1024, 2048, 4096, 8192)
    ]
    yield (
        "dropout alone, with a call for each column, took "
        f"{min(parts):.0f}% to {max(parts):.0f}% of the time that "
        "torch.compile takes here at the same width."
    )
    slowest = min(
        forward.medians["torch.compile"],
        key=forward.medians["torch.compile"].get,
    )
    assert slowest == 5120, "torch.compile reaches least at 5120 columns"
    cost = {
        N: 100 * (1 - forward.ratio("triton", "no dropout", N))
        for N in forward.medians["triton"]
    }
    assert max(cost, key=cost.get) == 1024 and min(cost, key=cost.get) == 8192
    yield (
        f"lines. On the H200 it is {cost[8192]:.0f}% at 8192 columns, and "
        f"{cost[1024]:.0f}% at 1024."
    )
    there = figure("dropout-add-layer-norm-forward", "H100")
    less, more = (
        100 * (1 - there.ratio("triton", "no dropout", N))
        for N in (8192, 1024)
    )
    yield f"On the H100 it is {less:.0f}% and {more:.0f}%."

    backward = figure("dropout-add-layer-norm-backward", "H200")
    ours, pytorch = backward.shares("triton"), backward.shares("torch")
    compiled = backward.shares("torch.compile")
    gain = backward.ratios("triton", "torch")
    assert ours.least > compiled.most
    yield (
        f"On the H200 our backward pass reaches {ours.least}% to "
        f"{ours.most}% of the copy, PyTorch reaches {pytorch.least}% to "
        f"{pytorch.most}%, and torch.compile reaches {compiled.least}% to "
        f"{compiled.most}%. Backward, ours is {gain.least} to {gain.most} "
        "times as fast as PyTorch."
    )
    lowest = backward.share("triton", 1024)
    assert lowest <= ours.least

    def longer(N):
        """µs that our call takes longer than a copy of its bytes."""
        bytes_moved = 5 * 4096 * N * 2
        times = [
            bytes_moved / backward.median(provider, N) / 1e3
            for provider in ("triton", "copy")
        ]
        return times[0] - times[1]

    extra = [longer(N) for N in sorted(backward.medians["triton"])]
    assert extra == sorted(extra), "the wider, the longer"
    yield (
        f"lowest share is {lowest}%, at 1024 columns. In microseconds it is "
        f"the other way round: there our pass takes {extra[0]:.1f} µs longer "
        f"than a copy, and at 8192 columns {extra[-1]:.1f} µs."
    )
    shares = [
        backward.share("triton", N) for N in sorted(backward.medians["triton"])
    ]
    falls = [b < a for a, b in itertools.pairwise(shares)]
    assert falls == [False, True, False, False], "it falls once"
    yield (
        f"our share falls once, from {shares[1]}% at 2048 columns to "
        f"{shares[2]}% at 4096."
    )
