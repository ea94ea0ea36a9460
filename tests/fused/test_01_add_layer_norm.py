"""Add, then normalize: in Triton's interpreter, or on a GPU."""

import add_norm_cases as cases
import gather
import pytest
import torch
import torch.nn.functional as F
from add_norm_cases import Case

import layer_norm_cases as layouts
from layer_norm_cases import takes_the_place
from tutorial import load, source

NAME = "fused/01-add-layer-norm"
# Chunks of 16 columns, so that narrow rows have several, and few programs in
# the second kernel.
SMALL = (
    ("chunk = min(512 // itemsize * warps,", "chunk = min(2 * warps,"),
    ("rows = min(1024 // itemsize * warps // chunk, 8)",
     "rows = min(8 * warps // chunk, 8)"),
    ("(triton.cdiv(2 * N, 16),)", "(triton.cdiv(2 * N, 256),)"),
    ("2 * N, rows, 16, EARLY", "2 * N, rows, 256, EARLY"),
)  # fmt: skip
page = load(NAME, SMALL[2:])
small = load(NAME, SMALL)
small.NUM_SMS = 1  # each program has several tiles


def run(case, module=small):
    cases.run(module.add_layer_norm, case, module.DEVICE)


@pytest.mark.parametrize(("dtype", "stream"), layouts.STREAMS)
def test_types_and_shapes(dtype, stream):
    for M, N in (1, 8), (3, 17), (2, 40), (9, 136):
        run(Case((M,), (N,), dtype, stream))
    run(Case((5,), (40,), dtype, stream), page)


@pytest.mark.parametrize("layout", layouts.LAYOUTS)
@pytest.mark.parametrize("which", ["x", "residual", "dy", "ds", "parameters"])
def test_layouts(which, layout):
    run(Case((2, 3), (4, 6), torch.float16, **{which: layout}))


@pytest.mark.parametrize("lead", [(), (3,), (2, 1, 3), (0,), (2, 0)])
def test_dimensions(lead):
    for shape in (8,), (2, 4):
        run(Case(lead, shape))


def test_only_some_gradients():
    cases.only_some(run, lead=(3,), shape=(24,))


@pytest.mark.parametrize("used", ["y", "s"])
def test_one_result_is_used(used):
    for wanted in 4 * (True,), (True, False, False, True):
        run(Case(used=used, wanted=wanted))


def test_full_size():
    run(Case((1,), (14336,), torch.float16), page)
    run(Case((1,), (7168,), torch.float32), page)


def test_wider_rows():
    """An addition and kernels that stream, with the same rule of types."""
    run(Case((2,), (14337,), torch.float16, weight=False), page)
    run(Case((2,), (7200,), torch.float16, torch.float32, dy="columns"), page)
    run(Case((2,), (7200,), torch.float32, wanted=(True, True, False, True)),
        page)  # fmt: skip


def test_wider_rows_need_no_pytorch(monkeypatch):
    def refused(*_, **__):
        raise AssertionError("not a kernel of ours")

    monkeypatch.setattr(F, "layer_norm", refused)
    run(Case((1,), (7200,), torch.float32), page)


@pytest.mark.parametrize("N", [40, 7200])
def test_without_a_residual(N):
    x, _, w, b, dy, _ = Case((2,), (N,)).tensors(page.DEVICE)
    found = []
    for norm in page.add_layer_norm, None:
        leaves = [t.clone().requires_grad_() for t in (x, w, b)]
        if norm is None:
            y = F.layer_norm(leaves[0], (N,), *leaves[1:])
        else:
            y, s = norm(leaves[0], None, N, *leaves[1:])
            assert s is leaves[0]
        found.append((y, *torch.autograd.grad(y, leaves, dy)))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("bias", [True, False])
def test_a_module_loads_what_pytorch_saved(bias):
    options = {"bias": bias, "device": page.DEVICE}
    takes_the_place(
        torch.nn.LayerNorm, page.LayerNorm, (4, 6), 1e-3, **options
    )


def test_weight_and_bias_of_two_types():
    x, r, w, b, dy, ds = Case().tensors(page.DEVICE)
    w, b = w.half().requires_grad_(), b.double().requires_grad_()
    y, s = page.add_layer_norm(x, r, 40, w, b)
    dw, db = torch.autograd.grad((y, s), (w, b), (dy, ds), allow_unused=True)
    assert (dw.dtype, db.dtype) == (torch.float16, torch.float64)
    torch.testing.assert_close(db, dy.double().sum(0), rtol=1e-6, atol=1e-6)


def test_gradients_of_two_leaves_are_not_one_tensor():
    """A .grad of its own: who clips one must not clip the other."""
    x, r, *_ = Case().tensors(page.DEVICE)
    x, r = x.clone().requires_grad_(), r.clone().requires_grad_()
    y, s = page.add_layer_norm(x, r, 40)
    (y.square().sum() + s.sum()).backward()
    assert torch.equal(x.grad, r.grad)
    assert x.grad.data_ptr() != r.grad.data_ptr()


def test_a_sum_that_changes_before_the_backward_pass():
    x, r, *_ = Case().tensors(page.DEVICE)
    y, s = page.add_layer_norm(x.requires_grad_(), r, 40)
    with torch.no_grad():
        s.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        y.sum().backward()


def test_same_bits():
    x, r, w, b, dy, ds = small.inputs(40, 24, torch.float32)
    y, s = small.add_layer_norm(x, r, 24, w, b)
    first, again = (
        torch.autograd.grad((y, s), (x, w, b), (dy, ds), retain_graph=True)
        for _ in "12"
    )
    assert all(map(torch.equal, first, again))


def test_second_derivative_is_refused():
    x = torch.randn(2, 8, device=page.DEVICE, requires_grad=True)
    y, _ = page.add_layer_norm(x, x, (8,))
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


@pytest.mark.parametrize(
    ("error", "names", "arguments"), cases.mistakes(page.DEVICE)
)
def test_mistakes_are_named(error, names, arguments):
    with pytest.raises(error, match=names):
        page.add_layer_norm(*arguments)


@pytest.mark.parametrize("itemsize", [2, 4, 8])
def test_formulas_answer_for_every_width(itemsize):
    for N in range(1, 28672 // itemsize + 1):
        plan = page.plan_forward(N, itemsize)
        assert N <= plan["BLOCK"] < 2 * N
        assert plan["num_warps"] in (1, 2, 4, 8, 16)
        assert plan["BLOCK"] * itemsize <= 2048 * plan["num_warps"]
        plan = page.plan_backward(N, itemsize)
        rows, chunk, warps = (
            plan[key] for key in ("ROWS", "CHUNK", "num_warps")
        )
        assert all(v & (v - 1) == 0 for v in (rows, chunk, warps))
        assert warps in (4, 8) and rows <= 8
        width = -(-N // chunk) * chunk
        assert width - N < chunk
        assert rows * width * itemsize <= 4096 * warps or rows == 1
        assert 1 <= plan["STAGES"] <= 4


def test_both_ways_agree():
    x, r, w, b, *_ = Case().tensors(page.DEVICE)
    (y, s, *_), (z, *_) = (
        page.WAYS[name](x, r, None, w, b) for name in ("triton", "both")
    )
    torch.testing.assert_close(y, z)
    assert torch.equal(s, x + r)


def test_the_chain_is_pytorch():
    x, r, w, b, *_ = Case().tensors(page.DEVICE)
    y, s = page.chain(x, r, (40,), w, b)
    assert torch.equal(s, x + r)
    assert torch.equal(y, F.layer_norm(s, (40,), w, b))


def test_folded_functions_are_those_of_page_05():
    theirs = gather.functions(source("layer-norm/05-chunks"))
    ours = gather.functions(source(NAME))
    for name in "_chunk", "_load_chunks", "_add_up_chunks":
        assert ours[name] == theirs[name]


def test_kernels_for_wide_rows_are_those_of_page_07():
    names = [name for name, page in gather.gathered(source(NAME))
             if page == "07"]  # fmt: skip
    assert len(names) == 5
    for name in names:
        assert gather.functions(source(NAME))[name] == gather.original(
            name, "07"
        )


# Each edit must make a check fail.
MUTANTS = {
    "the sum is not rounded": (
        "(s.to(acc) + r.to(acc)).to(r.dtype)", "s.to(acc) + r.to(acc)"),
    "the residual forgotten": ("(s.to(acc) + r.to(acc))", "(s.to(acc))"),
    "idle lanes in the variance": (
        "d = tl.where(mask, s.to(acc) - mean, 0)", "d = s.to(acc) - mean"),
    "ds forgotten": (
        "g += tl.load(ds_ptr + at, mask=mask, other=0).to(acc)", "g += 0.0"),
    "ds of another row": ("tl.load(ds_ptr + at,",
                          "tl.load(ds_ptr + at - start,"),
    "c1 dropped": ("(d * c1 + c2)", "c2"),
    "c2 dropped": ("(d * c1 + c2)", "d * c1"),
    "w dropped": ("rstd * w.to(acc)", "rstd"),
    "sums of the last tile": ("(dbs[c] + dy,)", "(dy,)"),
    "one buffer for all": (
        "sums_ptr += tl.program_id(0) * 2 * N", "sums_ptr += 0"),
    "one tile a program": (
        "tl.program_id(0) * ROWS, M, tl", "tl.program_id(0) * ROWS, 4, tl"),
    "y in the type of s": ("y, plan = torch.empty_like(x)",
                           "y, plan = torch.empty_like(r)"),
    "no gradient for the residual": ("zip((dx, dx,", "zip((dx, 0 * dx,"),
    "gradients with strides of their own": (
        "t.reshape(s.shape).contiguous()", "t.reshape(s.shape)"),
}  # fmt: skip


def _suite(module):
    """A few cases that together catch every mutant."""
    module.NUM_SMS = 1
    run(Case((40,), (24,)), module)
    run(Case((3,), (40,), torch.float16, torch.float32), module)
    run(Case((3,), (24,), dy="one number", ds="columns"), module)
    x, r, *_ = Case(dtype=torch.float16).tensors(module.DEVICE)
    y, s, *_ = module.forward(x, r, None, None, 1e-5)
    assert (y - F.layer_norm(s.double(), (40,))).norm() < 2**-11 * y.norm()


def test_suite_passes():
    _suite(load(NAME, SMALL))


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_fail(name):
    mutant = load(NAME, [*SMALL, MUTANTS[name]])
    with pytest.raises(AssertionError):
        _suite(mutant)


def test_script_runs_alone(output):
    assert "y is right: True" in output
    assert output.count(": right") == 2
    if not page.ON_GPU:
        assert output.count("Timing needs a GPU") == 3


def test_exercise(output):
    assert not page.exercise_1(page._sum_of_three)
    assert page.exercise_1(page._sum_of_three_1)
    assert output.count("0 sums are wrong") == 2  # 120 of the stub
