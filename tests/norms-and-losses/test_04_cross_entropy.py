"""Cross-entropy over a vocabulary: in Triton's interpreter, or on a GPU."""

import itertools
import re

import cross_entropy_cases as cases
import hypothesis
import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from cross_entropy_cases import DTYPES, Case

from tutorial import load

NAME = "norms-and-losses/04-cross-entropy"
page = load(NAME)
INF = float("inf")


def run(case, module=page):
    cases.run(module, case)


@pytest.mark.parametrize("dtype", DTYPES)
def test_widths(dtype):
    for N in (1, 7, 9, 128, 257) if dtype == torch.float32 else (9, 257):
        run(Case(N=N, dtype=dtype))
        run(Case(N=N, dtype=dtype, ahead=True, smooth=0.1, weight=True))


TERMS = [{}, {"smooth": 0.1}, {"z": 1e-2}, {"weight": True}]
TERMS += [{"weight": True, "smooth": 0.3}, {"smooth": 1.0, "z": 0.1}]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("terms", TERMS, ids=str)
def test_terms(terms, reduction):
    for N, dtype in (133, torch.float32), (136, torch.float16):
        case = {"N": N, "dtype": dtype, "reduction": reduction, **terms}
        run(Case(**case))
        run(Case(**case, ahead=True))


@pytest.mark.parametrize("begin", [1, 3, 8])
def test_rows_that_begin_anywhere(begin):
    for N in 3, 37, 64, 203:
        run(Case(N=N, dtype=torch.float16, begin=begin))
        run(Case(N=N, begin=begin, ahead=True))


def test_logits_far_from_0():
    """What one number for m and the sum would lose."""
    for shift in -1e5, 1e5:
        run(Case(N=203, shift=shift))
        run(Case(N=203, shift=shift, ahead=True))


@hypothesis.settings(max_examples=12, deadline=None, derandomize=True)
@hypothesis.given(
    M=st.integers(1, 12),
    N=st.integers(1, 300),
    dtype=st.sampled_from(DTYPES),
    weight=st.booleans(),
    ignored=st.sampled_from([-100, 0, 10**6]),
    reduction=st.sampled_from(["sum", "none"]),  # a mean may be that of none
    smooth=st.sampled_from([0.0, 0.1]),
    z=st.sampled_from([0.0, 1e-3]),
    ahead=st.booleans(),
    begin=st.integers(0, 9),
)
def test_any_case(**fields):
    run(Case(**fields))


def both(x, target, *more, **options):
    """Ours and PyTorch's loss and gradient."""
    found = []
    for f, t in (page.cross_entropy, x), (F.cross_entropy, x.double()):
        t = t.detach().requires_grad_()
        loss = f(t, target, *more, **options)
        found.append((loss, torch.autograd.grad(loss.sum(), t)[0]))
    return found


def same(x, target, *more, **options):
    ours, theirs = both(x, target, *more, **options)
    for got, want in zip(ours, theirs, strict=True):
        torch.testing.assert_close(
            got.double(), want, rtol=1e-5, atol=1e-6, equal_nan=True
        )


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_all_rows_ignored(reduction):
    """A mean of nothing is NaN, and the gradient 0, as PyTorch's."""
    x = torch.randn(3, 37, device=page.DEVICE)
    x[0, 5] = 1e5  # exp of it overflows, were it not ignored
    target = torch.full((3,), -100, device=page.DEVICE)
    same(x, target, reduction=reduction)
    x.requires_grad_()
    loss = page.cross_entropy(x, target, reduction=reduction, ahead=True)
    (dx,) = torch.autograd.grad(loss.sum(), x)
    assert not dx.any()


LOWEST = torch.finfo(torch.float32).min


@pytest.mark.parametrize("value", [-INF, LOWEST, -1e4, 3e38, INF])
def test_extreme_logits(value):
    """Some, all but one, and all of a row; at the target and elsewhere."""
    x = torch.randn(5, 37, device=page.DEVICE)
    x[0, 3:9] = value
    x[1, 1:] = value
    x[2, :] = value
    x[3, 2] = value
    target = torch.tensor([0, 0, 1, 2, 3], device=page.DEVICE)
    same(x, target, reduction="none")
    same(x[:, :36].contiguous(), target, reduction="none")


def test_minus_infinity_and_smoothing():
    x = torch.randn(2, 37, device=page.DEVICE)
    x[0, 4] = -INF
    target = torch.tensor([1, 2], device=page.DEVICE)
    same(x, target, reduction="none", label_smoothing=0.1)


@pytest.mark.parametrize(
    ("shape", "lead"),
    [((7,), ()), ((2, 7, 3), (2, 3)), ((2, 7, 3, 2), (2, 3, 2))],
)
def test_dimensions(shape, lead):
    x = torch.randn(shape, device=page.DEVICE)
    target = torch.randint(7, lead, device=page.DEVICE)
    for reduction in "mean", "none":
        same(x, target, reduction=reduction)


def test_no_rows():
    x, target = torch.randn(0, 7), torch.empty(0, dtype=torch.int64)
    for reduction in "mean", "sum", "none":
        same(x.to(page.DEVICE), target.to(page.DEVICE), reduction=reduction)


def test_layouts_of_logits_and_targets():
    x = torch.randn(37, 5, device=page.DEVICE)
    target = torch.randint(37, (5, 2), device=page.DEVICE)[:, 0]
    same(x.T, target)
    same(torch.randn(5, 74, device=page.DEVICE)[:, ::2], target)
    same(torch.randn(37, device=page.DEVICE).expand(5, 37), target)


@pytest.mark.parametrize("ahead", [False, True])
def test_layouts_of_the_upstream_gradient(ahead):
    """One number for all rows, every second of some, and their order."""
    x, target, _, _ = Case(M=4).tensors(page.DEVICE)
    x.requires_grad_()
    exact = x.detach().double().requires_grad_()
    loss = page.cross_entropy(x, target, reduction="none", ahead=ahead)
    want = F.cross_entropy(exact, target, reduction="none")
    many = torch.randn(8, device=page.DEVICE)
    for g in many[0].expand(4), many[::2], many[:4].flip(0):
        (dx,) = torch.autograd.grad(loss, x, g, retain_graph=True)
        (expected,) = torch.autograd.grad(want, exact, g, retain_graph=True)
        torch.testing.assert_close(dx.double(), expected, rtol=1e-5, atol=1e-6)


def test_logits_used_twice():
    x, target, _, _ = Case().tensors(page.DEVICE)
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


def test_backward_twice():
    x, target, _, _ = Case().tensors(page.DEVICE)
    x.requires_grad_()
    loss = page.cross_entropy(x, target)
    first, second = (
        torch.autograd.grad(loss, x, retain_graph=True)[0] for _ in range(2)
    )
    assert torch.equal(first, second) and first.any()
    assert first.data_ptr() != second.data_ptr()


def test_ahead_has_one_backward_pass():
    """It says so: what was handed out may have been changed since."""
    x, target, _, _ = Case().tensors(page.DEVICE)
    loss = page.cross_entropy(x.requires_grad_(), target, ahead=True)
    torch.autograd.grad(loss, x, retain_graph=True)
    with pytest.raises(RuntimeError, match="one backward pass"):
        torch.autograd.grad(loss, x)


def test_ahead_is_left_alone_by_a_factor_of_1():
    x, target, _, _ = Case(N=203).tensors(page.DEVICE)
    for dtype in DTYPES:
        leaf = x.to(dtype).requires_grad_()
        dx = torch.empty_like(leaf)
        g = 1 / (target != -100).sum()
        how = -100, 0.0, 0.0
        page.sweeps(leaf.detach(), target, None, how, None, g, dx)
        loss = page.cross_entropy(leaf, target, ahead=True)
        assert torch.equal(dx, torch.autograd.grad(loss, leaf)[0])


def test_ahead_rounds_before_the_factor():
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


def test_without_a_gradient_nothing_is_made_ahead(monkeypatch):
    x, target, _, _ = Case().tensors(page.DEVICE)
    given, sweeps = [], page.sweeps
    monkeypatch.setattr(
        page, "sweeps", lambda *a, **k: given.append(a) or sweeps(*a, **k)
    )
    page.cross_entropy(x, target, ahead=True)
    assert given[0][6] is None


def test_finite_differences():
    """The gradient belongs to the loss that is returned."""
    x = torch.randn(3, 11, device=page.DEVICE, requires_grad=True)
    target = torch.tensor([3, -100, 10], device=page.DEVICE)
    w = torch.rand(11, device=page.DEVICE)

    def f(x):
        terms = {"label_smoothing": 0.2, "z_loss": 0.1}
        return page.cross_entropy(x, target, w, **terms)

    assert torch.autograd.gradcheck(f, x, eps=1e-2, atol=1e-3, rtol=1e-2)


def test_second_derivative_is_refused():
    x, target, _, _ = Case().tensors(page.DEVICE)
    loss = page.cross_entropy(x.requires_grad_(), target).square()
    (dx,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


def test_logits_that_are_changed_are_noticed():
    x, target, _, _ = Case().tensors(page.DEVICE)
    logits = x.requires_grad_() + 0
    loss = page.cross_entropy(logits, target)
    with torch.no_grad():
        logits += 1
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        loss.backward()


@pytest.mark.parametrize("wrong", [-1, 37, 2**31, 2**32 + 3, -(2**40)])
def test_a_target_that_is_no_class(wrong):
    """An error where it is cheap to find; its row is NaN in the kernel."""
    x, target, _, _ = Case(M=4).tensors(page.DEVICE)
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


def _tensor(*shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype, device=page.DEVICE)


INDEX = _tensor(2, dtype=torch.int64)
GIVEN = _tensor(2, 8), INDEX


@pytest.mark.parametrize(
    ("error", "names", "arguments"),
    [
        (TypeError, "float64.*float16", (_tensor(2, 8).double(), INDEX)),
        (TypeError, "input .*int64, target", (_tensor(2, 8).long(), INDEX)),
        (TypeError, "target .*float32", (_tensor(2, 8), _tensor(2, 8))),
        (TypeError, "target .*int32.*int64", (_tensor(2, 8), INDEX.int())),
        (ValueError, r"\(2, 8\).*\(3,\)", (_tensor(2, 8), _tensor(3).long())),
        (ValueError, r"\(2, 0\)", (_tensor(2, 0), INDEX)),
        (ValueError, r"weight.*\(7,\)", (_tensor(2, 8), INDEX, _tensor(7))),
        (ValueError, "input.*meta", (_tensor(2, 8).to("meta"), INDEX)),
        (ValueError, "target.*meta", (_tensor(2, 8), INDEX.to("meta"))),
        (ValueError, "constant weight", (*GIVEN, _tensor(8).requires_grad_())),
        (ValueError, "middle", (_tensor(2, 8), INDEX, None, -100, "middle")),
    ],
)
def test_mistakes_are_named(error, names, arguments):
    with pytest.raises(error, match=names):
        page.cross_entropy(*arguments)


@pytest.mark.parametrize("rows", [1, 2, 5, 7])
def test_chunks(rows):
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


def test_chunks_sum_in_float32():
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


def test_measured_steps_agree():
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


def test_weights_of_16_bits_are_summed_in_float32():
    """The sum of all weights, which smoothing needs."""
    x = torch.randn(2, 999, device=page.DEVICE, dtype=torch.float16)
    w = torch.rand(999, device=page.DEVICE, dtype=torch.float16)
    target = torch.tensor([5, 7], device=page.DEVICE)
    given = target, w, -100, "none", 1.0
    loss = page.cross_entropy(x, *given)
    more = {"reduction": "none", "label_smoothing": 1.0}
    want = F.cross_entropy(x.double(), target, w.double(), **more)
    torch.testing.assert_close(loss.double(), want, rtol=2**-11, atol=0)


def test_same_bits_twice():
    for ahead in False, True:
        x, target, w, _ = Case(N=203, weight=True).tensors(page.DEVICE)
        x.requires_grad_()
        once, twice = (
            (loss, *torch.autograd.grad(loss, x))
            for _ in range(2)
            for loss in [page.cross_entropy(x, target, w, ahead=ahead)]
        )
        assert all(map(torch.equal, once, twice))


def test_rules_answer_for_every_width():
    for row in range(16, 2**20, 977):
        for both, more in itertools.product((False, True), repeat=2):
            warps, each, slices, _ = page.plan_for(row, both, more)
            assert warps.bit_count() == 1 and each <= 8 and slices >= 1
            # A lane for each column of the edges.
            assert 32 * warps >= 16


# Each edit must make a check fail.
MUTANTS = {
    "sums are not scaled": ("    total *= tl.exp2((m - new) * LOG2E)\n", ""),
    "m of one side": ("    total1 *= tl.exp2((m1 - m) * LOG2E)\n", ""),
    "no edges": ("if behind >= 0:", "if behind >= N:"),
    "edges in each slice": ("tl.where(s > 0, -1, body)", "body"),
    "edges of the row before": ("& (col >= -head)", ""),
    "edges of the row behind": (" & (col < N - head)\n", "\n"),
    "one group too many": ("else group < groups", "else group <= groups"),
    "one group too few": ("else group < groups", "else group < groups - 1"),
    "blocks without a mask are left out": (
        "tl.range(0, tl.minimum(groups, FULL)", "tl.range(0, 0"
    ),
    "the target stays": ("tl.where(lane == hot - cols[u], a, 0)", "0"),
    "only the first of a block": ("(hot < end)", "(hot < begin + 4)"),
    "no target at the edges": ("-head, N - head", "-head, 0"),
    "no target before the groups": ("-head, N - head", "0, N - head"),
    "sums of one slice": (
        "        m, total = tl.reduce((ms, totals), 0, _merge)\n", ""
    ),
    "logits of one slice": ("            sum_x = tl.sum(sum_x)\n",
                            "            sum_x = tl.max(sum_x)\n"),
    "weights of the first columns": ("else w_ptr + head\n",
                                     "else w_ptr\n"),
    "no smoothing in the gradient": ("dx -= e if w_ptr", "dx -= 0 if w_ptr"),
    "no smoothing at the target": ("g * (1 - SMOOTH) * w_t", "g * w_t"),
    "z without its factor": ("g * (2 * Z) * lse", "g * Z * lse"),
    "no z in the loss": ("loss + Z * lse * lse", "loss"),
    "m and the sum in one number": (
        'm, total = tl.where(live, m, float("inf")), tl.where(live, total, 1)',
        'm, total = tl.where(live, lse, float("inf")), 1.0',
    ),
    "ignored rows count": (
        "tl.where(live, tl.where(exists", "tl.where(t == t, tl.where(exists"
    ),
    "ignored rows have a gradient": (
        'm, total = tl.where(live, m, float("inf"))', "m, total = m"
    ),
    "one gradient for all rows": ("row * stride", "0 * row"),
    "the mean divides once": ("g / ctx.count if ctx.mean else g", "g"),
    "ahead forgets the factor": (
        "        _scale[", "        ctx.mean or _scale["
    ),
}  # fmt: skip


def places(module):
    """Targets at both ends of blocks and edges, and in the middle."""
    x = torch.randn(8, 141, device=module.DEVICE, requires_grad=True)
    target = torch.tensor([0, 0, 127, 128, 131, 66, 139, 140])
    target = target.to(module.DEVICE)
    (dx,) = torch.autograd.grad(module.cross_entropy(x, target), x)
    exact = x.detach().softmax(1) - F.one_hot(target, 141)
    torch.testing.assert_close(8 * dx, exact, rtol=1e-5, atol=1e-6)


def _suite(module):
    """A few cases that together catch every mutant."""
    run(Case(N=203), module)
    run(Case(N=208, dtype=torch.float16), module)
    run(Case(N=203, dtype=torch.float16, weight=True, smooth=0.3), module)
    run(Case(N=137, z=0.1, smooth=0.3, reduction="none"), module)
    run(Case(N=203, shift=1e5), module)
    run(Case(N=203, ahead=True, smooth=0.3), module)  # slices
    places(module)


def test_suite_passes():
    _suite(page)


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_fail(name):
    with pytest.raises(AssertionError):
        _suite(load(NAME, [MUTANTS[name]]))


def test_script_runs_alone(output):
    if not page.ON_GPU:
        assert output.count("Timing needs a GPU") == 4
    assert "errors below" in output


def test_writing_over_the_logits_lies(output):
    """The other gradient is wrong, and autograd saw no change."""
    before, after = re.search(
        r"before: (\[.*?\]), after: (\[.*?\]), .* saw: 0", output
    ).groups()
    assert before == str([2.0] * 5) != after


def test_exercise(output):
    stub, solution = map(float, re.findall(r"largest error: (\S+)", output))
    assert stub > 1e-3 > 1e-12 > solution
