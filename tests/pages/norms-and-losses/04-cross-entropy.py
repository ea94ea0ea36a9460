"""What must hold of the page "Cross-entropy over a vocabulary"."""

import itertools
import re

import pytest
import torch
import torch.nn.functional as F

from compiled.declared import Case, Kernel, Kernels
from conformance import CrossEntropy, CrossEntropyCase, Page, on_gpu


def run(page, M, N, dtype):
    x, target = page.inputs(M, N, dtype)
    x = x.detach()
    page.read(x, target)()
    given = x, target, None, (-100, 0.0, 0.0)
    g, dx = torch.ones((), device=page.DEVICE), torch.empty_like(x)
    page._scale[(1024,)](dx, g, dx.numel(), 2048)
    page.sweeps(*given, None, g, dx)


def loss(page, M, N, dtype):
    x, target = page.inputs(M, N, dtype)
    page.sweeps(x.detach(), target, None, (-100, 0.0, 0.0))


def gradient(page, M, N, dtype):
    x, target = page.inputs(M, N, dtype)
    x, given = x.detach(), (target, None, (-100, 0.0, 0.0))
    page.sweeps(x, *given, x.new_empty(4, M).float(), x.new_ones(()), x)


def smoothing(page, M, N, dtype):
    x, target = page.inputs(M, N, dtype)
    x, given = x.detach(), (target, None, (-100, 0.1, 1e-4))
    page.sweeps(x, *given)


def both_smoothing(page, M, N, dtype):
    x, target = page.inputs(M, N, dtype)
    x, given = x.detach(), (target, None, (-100, 0.1, 1e-4))
    page.sweeps(x, *given, None, x.new_ones(()), x)


def both_weights(page, M, N, dtype):
    x, target = page.inputs(M, N, dtype)
    w = x.new_ones(N + 1).float()
    x, given = x.detach(), (target, w, (-100, 0.1, 1e-4))
    page.sweeps(x, *given, None, x.new_ones(()), x)


PUBLISHED = "2026-11-23"

KERNELS = Kernels(
    run=run,
    M=8192,
    N=[32000, 128256],
    dtype="bfloat16",
    sizes={
        "bfloat16": [32000, 50257, 65536, 128256, 262144],
        "float16": [128256],
        "float32": [16384, 32000, 50257, 128256],
    },
    kernels={
        "_read": Kernel(
            look="""
            Four loads of 16 bytes a thread, and one number that is stored:
            what it takes to read the logits.
            """,
            true=lambda code: [
                code.loaded == 2 * 8192 or code.amd,  # whose warps are wider
                code.narrow("load") == 0 or code.amd,
            ],
            narrow_stores=1,  # the largest
        ),
        "_cross_entropy": Kernel(
            look="""
            Shown with both sweeps.
            Each has its own loads, all of logits by 16 bytes; only the target,
            what a row keeps and words of other programs are narrower.
            Threads wait for each other once, between the sweeps, and where a
            row has slices once more, for all their words.
            """,
            true=lambda code: [
                (code.count("load", 16) > 0 and code.spills == 0)
                or code.target != "sm_90",
                len(code.lines("shuffle")) == 1 or code.amd,
            ],
            true_at={
                128256: lambda code: [
                    (code.registers <= 64 and code.spills == 0)
                    or code.target != "sm_90"
                ]
            },
            # The target, its logit, the factor, columns at the edges.
            narrow_loads=12,
            narrow_stores=8,  # what a row keeps, columns at the edges
        ),
        "_scale": Kernel(
            look="""
            The factor is loaded first, and a branch leads past everything else
            if it is 1.
            """,
            true=lambda code: [
                code.narrow("load") == 1 or code.amd,
                code.narrow("store") == 0 or code.amd,
            ],
            narrow_loads=1,  # the factor
        ),
    },
    cases={
        "loss": Case(
            run=loss,
            sizes={
                "bfloat16": [32000, 50257, 128256, 262144],
                "float32": [32000],
            },
        ),
        "gradient": Case(
            run=gradient,
            sizes={
                "bfloat16": [32000, 50257, 128256, 262144],
                "float32": [32000],
            },
        ),
        "smoothing": Case(
            run=smoothing,
            sizes={"bfloat16": [32000, 50257, 128256]},
        ),
        "both-smoothing": Case(
            run=both_smoothing,
            sizes={"bfloat16": [32000, 50257, 128256]},
        ),
        "both-weights": Case(
            run=both_weights,
            sizes={"bfloat16": [32000, 50257, 128256]},
            limits={
                "narrow_loads": 140,  # of weights, where rows begin anywhere
            },
        ),
    },
)


HALF, SINGLE = torch.float16, torch.float32
INF, LOWEST = float("inf"), torch.finfo(torch.float32).min
DTYPES = CrossEntropy.dtypes


def at(N, dtype=SINGLE, M=3, **more):
    return CrossEntropyCase(M=M, N=N, dtype=dtype, **more)


def of_rows(page, N=37, M=3):
    """Logits and targets."""
    tensors = PAGE.operation.tensors(at(N, M=M), page.DEVICE)
    return tensors["input"], tensors["target"]


def targets_at_each_place(load):
    """At both ends of blocks and edges, and in the middle."""
    page = load()
    x = torch.randn(8, 141, device=page.DEVICE, requires_grad=True)
    target = torch.tensor([0, 0, 127, 128, 131, 66, 139, 140])
    target = target.to(page.DEVICE)
    (dx,) = torch.autograd.grad(page.cross_entropy(x, target), x)
    exact = x.detach().softmax(1) - F.one_hot(target, 141)
    torch.testing.assert_close(8 * dx, exact, rtol=1e-5, atol=1e-6)


VOCABULARIES = (32000, 50257, 65536, 128256, 262144)
# Both sides of each step of the rule for both sweeps, too.
WIDTHS = (1, 7, 1000, 4099, 32768, 32769, 65537, 100_003, *VOCABULARIES)
TERMS = ({"z": 1e-3}, {"smooth": 0.1}, {"weight": True, "smooth": 0.3})
LATER_OR_AHEAD = (False, True)

# Numbers with a unit that nothing has measured, and why they are right.
FACTS = {
    f"reads and writes {128256 * 4096 * 4 / 1e9:.0f} GB of sums": (
        "the gradient of the weight in float32"
    ),
}

PAGE = Page(
    __file__,
    CrossEntropy(),
    {"cross_entropy": lambda page: page.cross_entropy},
    cases=(
        *(at(N, HALF) for N in (9, 128, 257)),
        # What one number for m and the sum would lose.
        *(
            at(203, shift=shift, ahead=ahead)
            for shift in (-1e5, 1e5)
            for ahead in LATER_OR_AHEAD
        ),
    ),
    full=(
        *(
            at(N, dtype, M=61, ahead=ahead, **more)
            for N in WIDTHS
            for dtype in DTYPES
            for ahead in LATER_OR_AHEAD
            for more in ({}, {"weight": True, "smooth": 0.1})
        ),
        *(
            at(N, M=61, reduction=reduction, begin=begin, **terms)
            for N in (50257, 128256)
            for reduction in ("mean", "sum", "none")
            for begin in (0, 3)
            for terms in TERMS
        ),
        *(
            at(50257, M=61, shift=shift, ahead=ahead)
            for shift in (-1e5, 1e5)
            for ahead in LATER_OR_AHEAD
        ),
    ),
    repeatable=("cross_entropy",),
    repeated=tuple(
        at(N, torch.bfloat16, M=512, z=1e-4, ahead=ahead)
        for N in (50257, 128256)
        for ahead in LATER_OR_AHEAD
    ),
    graphs=tuple(
        at(50257, torch.bfloat16, M=64, ahead=ahead)
        for ahead in LATER_OR_AHEAD
    ),
    sanitizers=("memcheck", "racecheck"),
    # Under racecheck programs are so slow that of wider rows one stops
    # waiting, and traps.
    sanitized=tuple(
        at(N, dtype, M=37, smooth=0.1, ahead=ahead)
        for N, dtype in ((50257, torch.bfloat16), (20001, SINGLE))
        for ahead in LATER_OR_AHEAD
    ),
    prints={
        "Timing needs a GPU": 4,
        "errors below": 1,
    },
    mutants={
        "sums are not scaled": (
            "    total *= tl.exp2((m - new) * LOG2E)\n",
            "",
        ),
        "m of one side": ("    total1 *= tl.exp2((m1 - m) * LOG2E)\n", ""),
        "no edges": ("if behind >= 0:", "if behind >= N:"),
        "edges in each slice": ("tl.where(s > 0, -1, body)", "body"),
        "edges of the row before": ("& (col >= -head)", ""),
        "edges of the row behind": (" & (col < N - head)\n", "\n"),
        "one group too many": ("else group < groups", "else group <= groups"),
        "one group too few": ("group < groups", "group < groups - 1"),
        "blocks without a mask are left out": (
            "tl.range(0, tl.minimum(groups, FULL)",
            "tl.range(0, 0",
        ),
        "the target stays": ("tl.where(lane == hot - cols[u], a, 0)", "0"),
        "only the first of a block": ("(hot < end)", "(hot < begin + 4)"),
        "no target at the edges": ("-head, N - head", "-head, 0"),
        "no target before the groups": ("-head, N - head", "0, N - head"),
        "sums of one slice": (
            "        m, total = tl.reduce((ms, totals), 0, _merge)\n",
            "",
        ),
        "logits of one slice": (
            "            sum_x = tl.sum(sum_x)\n",
            "            sum_x = tl.max(sum_x)\n",
        ),
        "weights of the first columns": ("else w_ptr + head", "else w_ptr"),
        "no smoothing in the gradient": ("dx -= e if", "dx -= 0 if"),
        "no smoothing at the target": ("g * (1 - SMOOTH) * w_t", "g * w_t"),
        "z without its factor": ("g * (2 * Z) * lse", "g * Z * lse"),
        "no z in the loss": ("loss + Z * lse * lse", "loss"),
        "m and the sum in one number": (
            'm, total = tl.where(live, m, float("inf")), '
            "tl.where(live, total, 1)",
            'm, total = tl.where(live, lse, float("inf")), 1.0',
        ),
        "ignored rows count": ("live, tl.where", "t == t, tl.where"),
        "ignored rows have a gradient": (
            'm, total = tl.where(live, m, float("inf"))',
            "m, total = m",
        ),
        "one gradient for all rows": ("row * stride", "0 * row"),
        "the mean divides once": ("g / ctx.count if ctx.mean else g", "g"),
        "ahead forgets the factor": ("_scale[", "ctx.mean or _scale["),
    },
    kills=(
        at(203),
        at(208, HALF),
        at(203, HALF, weight=True, smooth=0.3),
        at(137, z=0.1, smooth=0.3, reduction="none"),
        at(203, shift=1e5),
        at(203, ahead=True, smooth=0.3),  # slices
        targets_at_each_place,
    ),
)


def same(page, x, target, **options):
    """Loss and gradient are PyTorch's."""
    found = []
    for f, t in (page.cross_entropy, x), (F.cross_entropy, x.double()):
        t = t.detach().requires_grad_()
        loss = f(t, target, **options)
        found.append((loss, torch.autograd.grad(loss.sum(), t)[0]))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(
            got.double(), want, rtol=1e-5, atol=1e-6, equal_nan=True
        )


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_all_rows_ignored(page, reduction):
    """A mean of nothing is NaN, and the gradient 0, as PyTorch's."""
    x = torch.randn(3, 37, device=page.DEVICE)
    x[0, 5] = 1e5  # exp of it overflows, were it not ignored
    target = torch.full((3,), -100, device=page.DEVICE)
    same(page, x, target, reduction=reduction)
    x.requires_grad_()
    loss = page.cross_entropy(x, target, reduction=reduction, ahead=True)
    (dx,) = torch.autograd.grad(loss.sum(), x)
    assert not dx.any()


@pytest.mark.parametrize("value", [-INF, LOWEST, -1e4, 3e38, INF])
def test_extreme_logits(page, value):
    """Some, all but one, and all of a row; at the target and elsewhere."""
    target = torch.tensor([0, 0, 1, 2, 3], device=page.DEVICE)
    for N in (36, 37, 50257) if page.ON_GPU else (36, 37):
        x = torch.randn(5, N, device=page.DEVICE)
        x[0, 3:9], x[1, 1:], x[2, :], x[3, 2] = 4 * (value,)
        same(page, x, target, reduction="none")


def test_minus_infinity_and_smoothing(page):
    x = torch.randn(2, 37, device=page.DEVICE)
    x[0, 4] = -INF
    target = torch.tensor([1, 2], device=page.DEVICE)
    same(page, x, target, reduction="none", label_smoothing=0.1)


@pytest.mark.parametrize(
    ("shape", "lead"),
    [((7,), ()), ((2, 7, 3), (2, 3)), ((2, 7, 3, 2), (2, 3, 2))],
)
def test_dimensions(page, shape, lead):
    x = torch.randn(shape, device=page.DEVICE)
    target = torch.randint(7, lead, device=page.DEVICE)
    for reduction in "mean", "none":
        same(page, x, target, reduction=reduction)


def test_no_rows(page):
    x = torch.randn(0, 7, device=page.DEVICE)
    for reduction in "mean", "sum", "none":
        same(page, x, x[:, 0].long(), reduction=reduction)


def test_layouts_of_logits_and_targets(page):
    x = torch.randn(37, 5, device=page.DEVICE)
    target = torch.randint(37, (5, 2), device=page.DEVICE)[:, 0]
    same(page, x.T, target)
    same(page, torch.randn(5, 74, device=page.DEVICE)[:, ::2], target)
    same(page, torch.randn(37, device=page.DEVICE).expand(5, 37), target)


@pytest.mark.parametrize("ahead", [False, True])
def test_layouts_of_the_upstream_gradient(page, ahead):
    """One number for all rows, every second of some, and their order."""
    x, target = of_rows(page, M=4)
    x.requires_grad_()
    exact = x.detach().double().requires_grad_()
    loss = page.cross_entropy(x, target, reduction="none", ahead=ahead)
    want = F.cross_entropy(exact, target, reduction="none")
    many = torch.randn(8, device=page.DEVICE)
    for g in many[0].expand(4), many[::2], many[:4].flip(0):
        (dx,) = torch.autograd.grad(loss, x, g, retain_graph=True)
        (expected,) = torch.autograd.grad(want, exact, g, retain_graph=True)
        torch.testing.assert_close(dx.double(), expected, rtol=1e-5, atol=1e-6)


def test_logits_used_twice(page):
    x, target = of_rows(page)
    for ahead in False, True:
        leaf = x.clone().requires_grad_()
        logits = 2 * leaf
        squares = logits.square().sum()
        loss = page.cross_entropy(logits, target, ahead=ahead) + squares
        loss = loss + page.cross_entropy(logits, target.flip(0), ahead=ahead)
        (dx,) = torch.autograd.grad(loss, leaf)
        leaf = x.double().requires_grad_()
        loss = F.cross_entropy(2 * leaf, target) + (2 * leaf).square().sum()
        loss = loss + F.cross_entropy(2 * leaf, target.flip(0))
        (expected,) = torch.autograd.grad(loss, leaf)
        torch.testing.assert_close(dx.double(), expected, rtol=1e-5, atol=1e-6)


def test_backward_twice(page):
    x, target = of_rows(page)
    x.requires_grad_()
    loss = page.cross_entropy(x, target)
    first, second = (
        torch.autograd.grad(loss, x, retain_graph=True)[0] for _ in range(2)
    )
    assert torch.equal(first, second) and first.any()
    assert first.data_ptr() != second.data_ptr()


def test_ahead_has_one_backward_pass(page):
    """It says so: what was handed out may have been changed since."""
    x, target = of_rows(page)
    loss = page.cross_entropy(x.requires_grad_(), target, ahead=True)
    torch.autograd.grad(loss, x, retain_graph=True)
    with pytest.raises(RuntimeError, match="one backward pass"):
        torch.autograd.grad(loss, x)


def test_ahead_is_left_alone_by_a_factor_of_1(page):
    x, target = of_rows(page, N=203)
    for dtype in DTYPES:
        leaf = x.to(dtype).requires_grad_()
        dx = torch.empty_like(leaf)
        g = 1 / (target != -100).sum()
        how = -100, 0.0, 0.0
        page.sweeps(leaf.detach(), target, None, how, None, g, dx)
        loss = page.cross_entropy(leaf, target, ahead=True)
        assert torch.equal(dx, torch.autograd.grad(loss, leaf)[0])


def test_ahead_rounds_before_the_factor(page):
    """Small numbers of float16 are lost, however large the factor is."""
    x = torch.zeros(1, 400, dtype=torch.float16, device=page.DEVICE)
    x[0, 0] = 17.0
    target = torch.zeros(1, dtype=torch.int64, device=page.DEVICE)
    later, ahead = (
        torch.autograd.grad(
            1024 * page.cross_entropy(leaf, target, ahead=when), leaf
        )[0]
        for when in (False, True)
        for leaf in [x.clone().requires_grad_()]
    )
    exact = x.double().softmax(1)[0, 1] * 1024
    assert abs(later[0, 1] - exact) < 1e-2 * exact < abs(ahead[0, 1] - exact)


def test_without_a_gradient_nothing_is_made_ahead(page, monkeypatch):
    x, target = of_rows(page)
    given, sweeps = [], page.sweeps
    monkeypatch.setattr(
        page, "sweeps", lambda *a, **k: given.append(a) or sweeps(*a, **k)
    )
    page.cross_entropy(x, target, ahead=True)
    assert given[0][6] is None


def test_logits_that_are_changed_are_noticed(page):
    x, target = of_rows(page)
    logits = x.requires_grad_() + 0
    loss = page.cross_entropy(logits, target)
    with torch.no_grad():
        logits += 1
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        loss.backward()


@pytest.mark.parametrize("wrong", [-1, 37, 2**31, 2**32 + 3, -(2**40)])
def test_a_target_that_is_no_class(page, wrong):
    """An error where it is cheap to find; its row is NaN in the kernel."""
    x, target = of_rows(page, M=4)
    target[1] = wrong
    if page.DEVICE.type == "cpu":
        with pytest.raises(IndexError, match=rf"target\[1\] is {wrong}, .*36"):
            page.cross_entropy(x, target)
    w = torch.ones(38, device=page.DEVICE)
    for weight in None, w:
        for how in (-100, 0.0, 0.0), (-100, 0.1, 0.1):
            leaf = x.clone().requires_grad_()
            given = leaf, target, weight, how, "none", False
            loss = page.CrossEntropy.apply(*given)
            (dx,) = torch.autograd.grad(loss.sum(), leaf)
            for t in loss[:, None], dx:
                nan = t.isnan().all(1).tolist()
                assert nan == [False, True, False, False]
                assert t.isnan().any(1).tolist() == nan


@pytest.mark.parametrize("rows", [1, 2, 5, 7])
def test_chunks(page, rows):
    """They are written over the logits, rows of which have slices."""
    h = torch.randn(5, 6, device=page.DEVICE)
    w = torch.randn(203, 6, device=page.DEVICE)
    target = torch.tensor([3, -100, 36, 0, 3], device=page.DEVICE)
    found = page.in_chunks(h, w, target, rows)
    exact = h.double().requires_grad_(), w.double().requires_grad_()
    loss = F.cross_entropy(F.linear(*exact), target)
    expected = loss, *torch.autograd.grad(loss, exact)
    for got, want in zip(found, expected, strict=True):
        assert got.shape == want.shape
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)


def test_chunks_sum_in_float32(page):
    """Beside 2048, float16 would lose every 1 that is added."""
    h = torch.ones(24, 1, device=page.DEVICE, dtype=torch.float16)
    h[0] = 2048
    w = torch.zeros(8, 1, device=page.DEVICE, dtype=torch.float16)
    target = torch.zeros(24, device=page.DEVICE, dtype=torch.int64)
    _, _, dw = page.in_chunks(h, w, target, 1)
    share = torch.full((8,), 1 / 8, device=page.DEVICE)
    share[0] -= 1
    exact = share * (2048 + 23) / 24
    torch.testing.assert_close(dw[:, 0].float(), exact, rtol=2e-3, atol=0)


def test_measured_steps_agree(page):
    """Each way of the figures gives the gradients of PyTorch."""
    of = {page.inputs: page.STEPS, page.layer_inputs: page.LAYERS}
    for inputs, ways in of.items():
        given = inputs(5, 203, torch.float32)
        names = {"triton", "ahead", "whole", "torch"} & {*ways}
        found = {n: ways[n](*given)() for n in names}
        assert len(found) == 3
        for one in found.values():
            for got, want in zip(one[-2:], found["torch"], strict=True):
                torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


def test_weights_of_16_bits_are_summed_in_float32(page):
    """The sum of all weights, which smoothing needs."""
    x = torch.randn(2, 999, device=page.DEVICE, dtype=torch.float16)
    w = torch.rand(999, device=page.DEVICE, dtype=torch.float16)
    target = torch.tensor([5, 7], device=page.DEVICE)
    given = target, w, -100, "none", 1.0
    loss = page.cross_entropy(x, *given)
    more = {"reduction": "none", "label_smoothing": 1.0}
    want = F.cross_entropy(x.double(), target, w.double(), **more)
    torch.testing.assert_close(loss.double(), want, rtol=2**-11, atol=0)


def test_rules_answer_for_every_width(page):
    for row in range(16, 2**20, 977):
        for both, more in itertools.product((False, True), repeat=2):
            warps, each, slices, _ = page.plan_for(row, both, more)
            assert warps.bit_count() == 1 and each <= 8 and slices >= 1
            # A lane for each column of the edges.
            assert 32 * warps >= 16


def test_writing_over_the_logits_lies(output):
    """The other gradient is wrong, and autograd saw no change."""
    before, after = re.search(
        r"before: (\[.*?\]), after: (\[.*?\]), .* saw: 0", output
    ).groups()
    assert before == str([2.0] * 5) != after


def test_exercise(output):
    stub, solution = map(float, re.findall(r"largest error: (\S+)", output))
    assert stub > 1e-3 > 1e-12 > solution


# On a GPU, at full size ------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("N", [50257, 128256, 100003, 262144])
def test_written_over_the_logits(page, N):
    """No slice is overwritten before all of its row are read."""
    x, target = page.inputs(512, N, torch.bfloat16)
    x, how = x.detach(), (-100, 0.1, 1e-4)
    g, dx = torch.ones((), device="cuda"), torch.empty_like(x)
    rows = page.sweeps(x, target, None, how, None, g, dx)
    for _ in range(20):
        over = x.clone()
        found = page.sweeps(over, target, None, how, None, g, over)
        assert torch.equal(over, dx) and torch.equal(found, rows)


ALONE = f"""
import torch
from tutorial import load
# All slices store the same word; the others never come.
same_word = "words_ptr + s, word,", "words_ptr + 0 * s, word,"
page = load("{PAGE.name}", [same_word])
x, target = page.inputs(4, 262144, torch.bfloat16)
g, dx = torch.ones((), device="cuda"), torch.empty_like(x)
page.sweeps(x.detach(), target, None, (-100, 0.0, 0.0), None, g, dx)
"""


@pytest.mark.gpu
def test_a_word_that_never_comes_is_an_error():
    on_gpu.dies(ALONE)


@pytest.mark.gpu
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("N", [50257, 262144])
def test_more_than_2_31_elements(page, N, ahead):
    """Rows on both sides, and where 32 bits would have begun anew."""
    M = 2**31 // N + 70
    x = torch.empty(M, N, dtype=torch.bfloat16, device="cuda")
    for rows in x.split(1024):
        rows.normal_()
    target = torch.randint(N, (M,), device="cuda")
    loss = page.cross_entropy(
        x.requires_grad_(), target, reduction="sum", ahead=ahead
    )
    (dx,) = torch.autograd.grad(loss, x)
    losses = page.cross_entropy(x.detach(), target, reduction="none")
    for rows in (
        slice(0, 8),
        slice(2**31 // N - 4, 2**31 // N + 4),
        slice(M - 8, M),
    ):
        exact = x.detach()[rows].double().requires_grad_()
        want = F.cross_entropy(exact, target[rows], reduction="none")
        (expected,) = torch.autograd.grad(want.sum(), exact)
        assert (losses[rows] - want).norm() <= 2**-8 * want.norm()
        assert (dx[rows] - expected).norm() <= 2**-8 * expected.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("ahead", [False, True])
def test_no_step_waits_for_the_device(page, ahead):
    x, target = page.inputs(64, 50257, torch.bfloat16)
    w = torch.rand(50257, device="cuda", dtype=torch.bfloat16)

    def step():
        loss = page.cross_entropy(
            x, target, w, label_smoothing=0.1, ahead=ahead
        )
        torch.autograd.grad(loss, x)

    step()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_chunks_hold_less_and_are_right(page):
    h = torch.randn(4096, 256, device="cuda", dtype=torch.bfloat16) / 16
    w = torch.randn(50257, 256, device="cuda", dtype=torch.bfloat16)
    target = torch.randint(50257, (4096,), device="cuda")
    exact = h.double().requires_grad_(), w.double().requires_grad_()
    loss = F.cross_entropy(F.linear(*exact), target)
    expected = [t.detach() for t in (loss, *torch.autograd.grad(loss, exact))]
    del exact, loss
    held = []
    for rows in 256, 4096:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        found = page.in_chunks(h, w, target, rows)
        held.append(torch.cuda.max_memory_allocated() - before)
        for got, want in zip(found, expected, strict=True):
            assert (got - want).norm() <= 2**-6 * want.norm()
    assert held[0] < held[1] / 2


@pytest.mark.gpu
def test_the_ceiling_reads_everything(page):
    x = page.inputs(64, 8192, torch.bfloat16)[0].detach()
    x[63, 8191] = 100
    out = torch.empty(64, device="cuda", dtype=x.dtype)
    page._read[(64,)](x, out, 8192, num_warps=8)
    assert torch.equal(out, x.amax(1))
