"""RMS norm and the residual stream: in Triton's interpreter, or on a GPU."""

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F

import layer_norm_cases
import rms_norm_cases as cases
from any_case import layouts, own_layouts
from layer_norm_cases import STREAMS, takes_the_place
from rms_norm_cases import LAYOUTS, Case
from tutorial import load

NAME = "norms-and-losses/01-rms-norm"
# Chunks of 16 columns, so that narrow rows have several, and few programs in
# the last kernel.
SMALL = (
    (
        'chunk = min(512 // min(sizes) * warps, triton.next_power_of_2(N))\n'
        '    hint',
        "chunk = 16\n    hint",
    ),
    (
        'chunk = min(512 // min(sizes) * warps, triton.next_power_of_2(N))\n'
        '    in_flight',
        "chunk = 16\n    in_flight",
    ),
    ("(triton.cdiv(N, 16),)", "(triton.cdiv(N, 256),)"),
    ("*given, 16, early", "*given, 256, early"),
)  # fmt: skip
page = load(NAME, SMALL[2:])
small = load(NAME, SMALL)
small.NUM_SMS = 1  # each program has several rows


def run(case, module=small):
    cases.run(module, case)


# Of x, of the residual and of the weight.
TYPES = [(dtype, stream, dtype) for dtype, stream in STREAMS]
for half in torch.float16, torch.bfloat16:
    TYPES += [
        (half, stream, torch.float32) for stream in (half, torch.float32)
    ]


@pytest.mark.parametrize(("dtype", "stream", "weight"), TYPES)
def test_types(dtype, stream, weight):
    more = {"weight_dtype": weight, "stream_dtype": stream}
    for N in 1, 16, 37:
        run(Case((5,), (N,), dtype, **more))
    run(Case((5,), (37,), dtype, weight_dtype=weight, fused=False))


@pytest.mark.parametrize("M", [1, 2, 9, 27])
def test_rows(M):
    for module in small, page:
        run(Case((M,), (40,), torch.float16), module)


@pytest.mark.parametrize("which", ["x", "residual", "dy", "ds", "parameters"])
def test_layouts(which):
    for layout in LAYOUTS:
        run(Case((2, 3), (4, 7), torch.float16, **{which: layout}))


@pytest.mark.parametrize("lead", [(), (3,), (2, 1, 3), (0,), (2, 0)])
def test_dimensions(lead):
    for shape in (1,), (3, 5):
        run(Case(lead, shape))
        run(Case(lead, shape, fused=False))


@pytest.mark.parametrize("used", ["y", "s", "ys"])
def test_only_some_gradients(used):
    for number in range(1, 16):
        *wanted, weight = (bool(number >> i & 1) for i in range(4))
        if any(wanted[:2]) or (wanted[2] and weight and "y" in used):
            wanted = tuple(wanted)
            run(Case((5,), (40,), weight=weight, wanted=wanted, used=used))


@hypothesis.settings(max_examples=20, deadline=None, derandomize=True)
@hypothesis.given(
    M=st.integers(0, 20),
    N=st.integers(1, 90),
    types=st.sampled_from(TYPES),
    x=own_layouts,
    residual=own_layouts,
    dy=layouts,
    ds=layouts,
    fused=st.booleans(),
    eps=st.sampled_from([1e-12, 1e-6, 0.1]),
)
def test_any_case(M, N, types, **more):
    dtype, stream, weight = types
    types = {"weight_dtype": weight, "stream_dtype": stream}
    run(Case((M,), (N,), dtype, **types, **more))


def test_eps_is_that_of_pytorch():
    """It shows in rows that are smaller than it."""
    for dtype in torch.float16, torch.bfloat16, torch.float32:
        x = torch.full((2, 40), 2.0**-13, dtype=dtype, device=page.DEVICE)
        expected = F.rms_norm(x, (40,))
        assert expected.abs().max() < 0.5
        y, _ = page.add_rms_norm(x, torch.zeros_like(x), 40)
        for found in y, page.rms_norm(x, (40,)):
            torch.testing.assert_close(found, expected)


def test_the_sum_is_what_it_is_in_two_steps():
    """And the fused y is the norm of that s, bit for bit."""
    given = small.inputs(5, 75, torch.float16)
    calls = small.CALLS["triton"], small.CALLS["two steps"]
    fused, steps = (call(*given[:3]) for call in calls)
    assert all(map(torch.equal, fused, steps))


def test_same_bits_twice():
    given = small.inputs(9, 75, torch.float16)
    once, twice = (
        small.results(small.CALLS["triton"], *given) for _ in range(2)
    )
    assert all(map(torch.equal, once, twice))


def test_large_and_small_numbers():
    """Squares leave the range of float16; rows of 0 stay 0."""
    x = torch.full((2, 40), 300.0, dtype=torch.float16, device=page.DEVICE)
    torch.testing.assert_close(page.rms_norm(x, 40), torch.ones_like(x))
    y, s = page.add_rms_norm(x, -x, 40)
    assert not y.any() and not s.any()


def test_powers_of_two_keep_every_bit():
    x = torch.randn(3, 75, dtype=torch.float64, device=page.DEVICE)
    y = small.rms_norm(x, 75, eps=0.125)
    assert torch.equal(small.rms_norm(8 * x, 75, eps=64 * 0.125), y)


@pytest.mark.parametrize(
    "sizes", [(2,), (2, 2), (2, 4), (2, 8), (4,), (4, 4), (4, 8), (8, 8)]
)
def test_rules_answer_for_every_width(sizes):
    for N in {
        1,
        2,
        3,
        *range(5, 32768 // min(sizes), 13),
        32768 // min(sizes),
    }:
        plan = page.plan_forward(N, sizes)
        assert plan["CHUNK"].bit_count() == plan["num_warps"].bit_count() == 1
        assert 4 <= plan["num_warps"] <= 32
        plan = page.plan_backward(N, (*sizes[-1:], sizes[0], *sizes[1:]))
        assert plan["CHUNK"].bit_count() == 1 and plan["STAGES"] >= 1
        assert plan["per_sm"] * plan["num_warps"] in (8, 16)


@pytest.mark.parametrize("N", [4096, 4097, 14336, 16384])
def test_both_sides_of_a_limit(N):
    # The last kernel has a program for 256 columns here.
    run(Case((1,), (N,), torch.float16), page)


@pytest.mark.parametrize("sms", [1, 2, 7])
def test_programs_have_as_many_rows(sms, monkeypatch):
    """No program more than there are rounds for."""
    monkeypatch.setattr(page, "NUM_SMS", sms)
    run(Case((27,), (40,)), page)
    run(Case((2,), (64,)), page)


def test_a_module_loads_what_pytorch_saved():
    options = {"eps": 1e-3, "device": page.DEVICE}
    takes_the_place(torch.nn.RMSNorm, page.RMSNorm, (4, 6), **options)


def test_second_derivative_is_refused():
    x = torch.randn(2, 8, device=page.DEVICE, requires_grad=True)
    y = page.rms_norm(x, (8,)).square().sum()
    (dx,) = torch.autograd.grad(y, x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


def test_leaves_do_not_share_their_gradient():
    """x and residual get one gradient; added to, it must not be both's."""
    x, residual = torch.randn(2, 3, 8, device=page.DEVICE)
    x.requires_grad_(), residual.requires_grad_()
    y, s = page.add_rms_norm(x, residual, 8)
    (y.sum() + s.sum()).backward()
    before = residual.grad.clone()
    x.grad.zero_()
    assert torch.equal(residual.grad, before)


def test_a_sum_that_is_changed_is_noticed():
    """s is kept for the backward pass: overwriting it must be an error."""
    x, residual = torch.randn(2, 3, 8, device=page.DEVICE)
    y, s = page.add_rms_norm(x.requires_grad_(), residual, 8)
    with torch.no_grad():
        s += 1
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        y.sum().backward()


def _tensor(*shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype, device=page.DEVICE)


@pytest.mark.parametrize(
    ("error", "names", "arguments"),
    [
        (TypeError, "x is .*int32", (_tensor(2, 8, dtype=torch.int32), 8)),
        (TypeError, "weight is .*int32", (_tensor(2, 8), 8, _tensor(8).int())),
        (ValueError, "of x.*normalized_shape", (_tensor(2, 8), 7)),
        (ValueError, "0 columns", (_tensor(2, 8), ())),
        (ValueError, "normalized_shape", (_tensor(8), (2, 8))),
        (ValueError, "0 columns", (_tensor(2, 0), 0)),
        (ValueError, "8193 columns.* 8192", (_tensor(2, 8193), 8193)),
        (ValueError, "weight", (_tensor(2, 8), 8, _tensor(7))),
        (ValueError, "eps", (_tensor(2, 8), 8, None, -1e-5)),
        (ValueError, "eps", (_tensor(2, 8), 8, None, float("nan"))),
        (ValueError, "x is on meta", (_tensor(2, 8).to("meta"), 8)),
        (ValueError, "weight is", (_tensor(2, 8), 8, _tensor(8).to("meta"))),
    ],
)
def test_mistakes_are_named(error, names, arguments):
    with pytest.raises(error, match=names):
        page.rms_norm(*arguments)
    x, *others = arguments
    with pytest.raises(error, match=names):
        page.add_rms_norm(x, torch.empty_like(x), *others)


@pytest.mark.parametrize(
    ("error", "residual"),
    [
        (TypeError, None),
        (TypeError, _tensor(2, 8).int()),
        (ValueError, _tensor(8)),
        (ValueError, _tensor(2, 8).to("meta")),
    ],
)
def test_mistakes_of_the_residual(error, residual):
    with pytest.raises(error, match="residual"):
        page.add_rms_norm(_tensor(2, 8), residual, 8)


# Each edit must make a check fail.
MUTANTS = {
    "the mean is subtracted": (
        "tl.sum(squares) / N", "tl.sum(squares - s.to(acc)) / N"
    ),
    "the row sum dropped": ("dx - s * a, c, N", "dx, c, N"),
    "one factor r too few": ("* rstd * rstd * rstd", "* rstd * rstd"),
    "ds dropped": (
        'dx += _load(ds_ptr + at, c, N, CHUNK, "").to(acc)', "dx += 0"
    ),
    "the sum is not rounded": (
        "(s.to(acc) + more[c].to(acc)).to(more[c].dtype)",
        "s.to(acc) + more[c].to(acc)",
    ),
    "the sum has the type of x": (
        "(s.to(acc) + more[c].to(acc)).to(more[c].dtype)",
        "(s.to(acc) + more[c].to(acc)).to(s.dtype)",
    ),
    "the hidden number is not 0": ("dx, sums, 0, M, N", "dx, sums, 1, M, N"),
    "store without mask": (
        "tl.store(ptr + col, value, mask=col < N)",
        "tl.store(ptr + col, value)",
    ),
    "w of the first chunk": ("_load(w_ptr, c, N, CHUNK, \"\")",
                             "_load(w_ptr, 0, N, CHUNK, \"\")"),
    "the last buffer left out": (
        "(rows < programs) &", "(rows < programs - 1) &"
    ),
    "sums of the last row": ("(dws[c] + scaled * s,)", "(scaled * s,)"),
    "the last row left out": ("tl.program_id(0), M, tl.num_programs(0)",
                              "tl.program_id(0), M - 1, tl.num_programs(0)"),
    "dy with strides of its own": ("backward(dy.contiguous(),",
                                   "backward(dy,"),
    "ds with strides of its own": (
        "None if ds is None else ds.contiguous()", "ds"
    ),
    "residual with strides of its own": (
        "None if residual is None else residual.contiguous()", "residual"
    ),
}  # fmt: skip


def _suite(module):
    """A few cases that together catch every mutant."""
    module.NUM_SMS = 1
    hide = module.plan_backward
    module.plan_backward = lambda *sizes: hide(*sizes) | {"HIDE": True}
    wide = {"stream_dtype": torch.float32}
    run(Case((19,), (43,), torch.float16), module)
    run(Case((19,), (43,), torch.float16, **wide), module)
    run(Case((19,), (43,), fused=False), module)
    for which in "residual", "dy", "ds":
        layout = "columns" if which == "residual" else "one number"
        run(Case((3,), (37,), **{which: layout}), module)
    given = module.inputs(5, 75, torch.float16)[:3]
    calls = module.CALLS["triton"], module.CALLS["two steps"]
    assert all(map(torch.equal, *(call(*given) for call in calls)))


def test_suite_passes():
    _suite(load(NAME, SMALL))


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_fail(name):
    mutant = load(NAME, [*SMALL, MUTANTS[name]])
    with pytest.raises(AssertionError):
        _suite(mutant)


def test_script_runs_alone(output):
    assert "chunks of 4: True" in output
    if not page.ON_GPU:
        assert output.count("Timing needs a GPU") == 2


def test_exercise(output):
    stub, solution = (
        float(line.rpartition(" ")[2])
        for line in output.splitlines()
        if "product with a row" in line
    )
    assert stub > 0.01 > 1e-12 > solution


def test_wrong_types_are_no_case():
    """The table of types holds no pair that the interpreter stores wrongly."""
    for dtype, _, weight in TYPES:
        assert not layer_norm_cases.wrong_in_interpreter(dtype, weight)
