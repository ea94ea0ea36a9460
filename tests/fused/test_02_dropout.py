"""Dropout without a mask: in Triton's interpreter, or on a GPU."""

import functools

import add_norm_cases as cases
import gather
import pytest
import torch
from add_norm_cases import Case

import layer_norm_cases as layouts
from tutorial import load, source

NAME = "fused/02-dropout"
# Chunks of 16 columns, so that narrow rows have several, and few programs in
# the last kernel.
SMALL = (
    ("chunk = min(512 // itemsize * warps,", "chunk = min(2 * warps,"),
    (
        "rows = min(1024 // itemsize * warps // chunk, 8)",
        "rows = min(8 * warps // chunk, 8)",
    ),
    ("* 16 + tl.arange(0, 16)", "* 256 + tl.arange(0, 256)"),
    ("(triton.cdiv(2 * N, 16),)", "(triton.cdiv(2 * N, 256),)"),
)
page = load(NAME, SMALL[2:])
small = load(NAME, SMALL)
small.NUM_SMS = 1  # each program has several tiles


@functools.cache
def share_of(M, N, p):
    """What each element is multiplied by: shown by an x of 1."""
    if p == 1:
        return torch.zeros(M, N, dtype=torch.float64, device=page.DEVICE)
    return page.kept(M, N, p, 7) / (1 - p)


def run(case, module=small, p=0.25):
    norm = functools.partial(module.dropout_add_layer_norm, p=p, seed=7)
    M, N = (torch.Size(shape).numel() for shape in (case.lead, case.shape))
    share = share_of(M, N, p).reshape(case.lead + case.shape)
    cases.run(norm, case, module.DEVICE, share)


@pytest.mark.parametrize(("dtype", "stream"), layouts.STREAMS)
def test_types_and_shapes(dtype, stream):
    run(Case((5,), (45,), dtype, stream))


@pytest.mark.parametrize("p", [0, 0.999, 1])
def test_any_share(p):
    run(Case(), p=p)
    run(Case(dtype=torch.float16, stream=torch.float32), p=p)


@pytest.mark.parametrize("layout", layouts.LAYOUTS)
@pytest.mark.parametrize("which", ["x", "ds"])
def test_layouts(which, layout):
    run(Case((2, 1), (4, 6), torch.float16, **{which: layout}))


@pytest.mark.parametrize("lead", [(), (2, 1, 3), (0,)])
def test_dimensions(lead):
    run(Case(lead, (2, 4)))


def test_only_some_gradients():
    cases.only_some(run, lead=(3,), shape=(24,))


@pytest.mark.parametrize("used", ["y", "s"])
def test_one_result_is_used(used):
    run(Case(used=used))


def test_full_size():
    run(Case((1,), (8192,), torch.float16), page)
    run(Case((5,), (40,), torch.float32), page)


def given(M=4, N=40):
    x, residual, *_ = Case((M,), (N,)).tensors(page.DEVICE)
    return x, residual, N


def test_everything_dropped():
    x, residual, N = given()
    x[0, 0] = float("inf")
    _, s = page.dropout_add_layer_norm(x, residual, N, p=1)
    assert torch.equal(s, residual)


@pytest.mark.parametrize("off", [{"p": 0}, {"training": False}])
def test_nothing_dropped(off):
    x, residual, N = given()
    y, s = page.dropout_add_layer_norm(x, residual, N, **off)
    assert torch.equal(s, x + residual)
    x.requires_grad_(), residual.requires_grad_()
    y, s = page.dropout_add_layer_norm(x, residual, N, **off)
    dx, dr = torch.autograd.grad((y + s).sum(), (x, residual))
    assert torch.equal(dx, dr)


def test_two_calls_differ_and_a_seed_of_torch_repeats_them():
    x, residual, N = given()

    def sums():
        return [page.dropout_add_layer_norm(x, residual, N)[1] for _ in "12"]

    torch.manual_seed(3)
    first, second = sums()
    torch.manual_seed(3)
    again = sums()
    assert not torch.equal(first, second)
    assert torch.equal(first, again[0]) and torch.equal(second, again[1])


def test_a_seed_that_is_given_leaves_the_generator_alone():
    x, residual, N = given()
    for more in {"seed": 3}, {"training": False}, {"p": 0}, {"p": 1}:
        state = torch.get_rng_state()
        page.dropout_add_layer_norm(x, residual, N, **more)
        assert torch.equal(torch.get_rng_state(), state)


def test_a_checkpoint_repeats_its_mask():
    x, residual, N = given()
    x.requires_grad_()

    def f(x):
        return page.dropout_add_layer_norm(x, residual, N)[1]

    s = torch.utils.checkpoint.checkpoint(f, x, use_reentrant=False)
    s.sum().backward()
    assert torch.equal(x.grad != 0, s != residual)


SEEDS = (0, 1, 16, 2**31, 2**32, 2**32 + 1, 2**62)


def test_seeds():
    masks = [page.kept(8, 128, 0.5, seed) for seed in SEEDS]
    for i, mask in enumerate(masks):
        for other in masks[:i]:
            assert not torch.equal(mask, other)


@pytest.mark.parametrize("p", [0.01, 0.5])
def test_share_and_neighbors(p):
    mask = page.kept(32, 2048, p, seed=12)
    n = mask.numel()
    sigma = (p * (1 - p) / n) ** 0.5
    assert abs(mask.mean() - (1 - p)) < 4 * sigma
    for other in (
        *(mask.roll(by, 1) for by in (1, 2, 3, 4)), mask.roll(1, 0),
    ):  # fmt: skip
        assert abs((mask * other).mean() - (1 - p) ** 2) < 5 * sigma
    for dim, size in (0, 32), (1, 2048):
        spread = (p * (1 - p) / size) ** 0.5
        largest = (mask.mean(dim) - (1 - p)).abs().max()
        assert largest < 6 * spread + 4 / size


def test_the_mask_depends_on_seed_row_and_column_only():
    mask = page.kept(5, 96, 0.5, 7)
    assert torch.equal(mask[:3, :50], page.kept(3, 50, 0.5, 7))
    ones = torch.ones(5, 96, device=page.DEVICE)
    alone = page.drop(ones, 0.5, 7)
    assert torch.equal(alone != 0, mask != 0)


@pytest.mark.parametrize("four", [True, False])
def test_dropout_alone(four):
    x = torch.rand(3, 3000, device=page.DEVICE) + 1
    y = page.drop(x, 0.25, 5, four)
    assert abs((y != 0).float().mean() - 0.75) < 0.03
    torch.testing.assert_close(y, torch.where(y != 0, x / 0.75, 0))


@pytest.mark.parametrize(
    ("error", "names", "arguments"),
    [
        *cases.mistakes(page.DEVICE),
        (ValueError, "p is 1.5", (*given(), None, None, 1.5)),
        (ValueError, "p is nan", (*given(), None, None, float("nan"))),
        (ValueError, "8193 .*16 KB", given(1, 8193)),
    ],
)
def test_mistakes_are_named(error, names, arguments):
    if "16 KB" in names:
        arguments = (*(t.half() for t in arguments[:2]), 8193)
    with pytest.raises(error, match=names):
        page.dropout_add_layer_norm(*arguments)


def test_folded_functions_are_those_of_page_05():
    theirs = gather.functions(source("layer-norm/05-chunks"))
    ours = gather.functions(source(NAME))
    for name in "_chunk", "_load_chunks":
        assert ours[name] == theirs[name]


# Each edit must make a check fail.
MUTANTS = {
    "no scale": ("x * scale, 0)", "x, 0)"),
    "another mask in the backward pass": (
        "g = _dropout(g, seed,", "g = _dropout(g, seed + 1,"),
    "rows of a tile alike": ("g = _dropout(g, seed, row,",
                             "g = _dropout(g, seed, row * 0 + first,"),
    "the bits of the first chunk": ("_dropout(g, seed, row, c,",
                                    "_dropout(g, seed, row, 0,"),
    "the gradient of x is not dropped": (
        "            g = _dropout(g, seed, row, c, DROP)\n", ""),
    "ds forgotten": (
        "g += tl.load(ds_ptr + at, mask=mask, other=0).to(acc)", "g += 0.0"),
    "dropped after the sum": (
        "_dropout(x.to(acc), seed, row, 0, DROP) + r.to(acc)",
        "_dropout(x.to(acc) + r.to(acc), seed, row, 0, DROP)"),
    "y in the type of s": ("y, s, plan = torch.empty_like(x)",
                           "y, s, plan = torch.empty_like(r)"),
    "dx in the type of s": (
        "torch.empty_like(s, dtype=kind)", "torch.empty_like(s)[..., :1]"),
    "one buffer for all": (
        "sums_ptr += tl.program_id(0) * 2 * N", "sums_ptr += 0"),
    "gradients with strides of their own": (
        "t.reshape(s.shape).contiguous()", "t.reshape(s.shape)"),
}  # fmt: skip


def _suite(module):
    """A few cases that together catch every mutant."""
    module.NUM_SMS = 1
    run(Case((20,), (40,)), module)
    run(Case((3,), (40,), torch.float16, torch.float32), module)
    run(Case((3,), (24,), dy="one number", ds="columns"), module)


def test_suite_passes():
    _suite(load(NAME, SMALL))


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_fail(name):
    mutant = load(NAME, [*SMALL, MUTANTS[name]])
    with pytest.raises((AssertionError, RuntimeError)):
        _suite(mutant)


def test_script_runs_alone(output):
    assert output.count("expected 0.562") == 2
    assert output.count(": right") == 2
    if not page.ON_GPU:
        assert output.count("Timing needs a GPU") == 3


def test_exercise(output):
    assert "each time: True - none in evaluation: False" in output
    assert "each time: True - none in evaluation: True" in output
