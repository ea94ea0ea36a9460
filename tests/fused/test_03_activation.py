"""A function as a constant: in Triton's interpreter, or on a GPU."""

import functools

import gather
import hypothesis
import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl

import layer_norm_cases as plain
from layer_norm_cases import Case
from tutorial import load, source

NAME = "fused/03-activation"
# Chunks of 16 columns, so that narrow rows have several, and few programs in
# the last kernel.
SMALL = (
    ("chunk = min(512 // itemsize * warps,", "chunk = min(2 * warps,"),
    ("rows = 512 // itemsize * warps // chunk", "rows = 4 * warps // chunk"),
    ("* 16 + tl.arange(0, 16)", "* 256 + tl.arange(0, 256)"),
    ("(triton.cdiv(2 * N, 16),)", "(triton.cdiv(2 * N, 256),)"),
)
page = load(NAME, SMALL[2:])
small = load(NAME, SMALL)
small.NUM_SMS = 1  # each program has several tiles


@triton.jit
def _identity(x):
    return x, x * 0 + 1


@triton.jit
def _sigmoid(x):
    y = tl.sigmoid(x)
    return y, y * (1 - y)


def run(case, module=small):
    """As a plain layer norm."""
    norm = functools.partial(
        module.activation_layer_norm, activation=_identity
    )
    plain.run(
        lambda x, shape, w, b, eps: norm(x, shape, w, b, eps=eps),
        case,
        module.DEVICE,
    )


@pytest.mark.parametrize("dtype", plain.DTYPES)
def test_shapes(dtype):
    for M, N in (1, 1), (3, 17), (5, 72):
        run(Case((M,), (N,), dtype))


@pytest.mark.parametrize("layout", plain.LAYOUTS)
@pytest.mark.parametrize("which", ["x", "dy", "parameters"])
def test_layouts(which, layout):
    run(Case((2, 3), (4, 6), torch.float16, **{which: layout}))


@pytest.mark.parametrize("lead", [(), (3,), (2, 1, 3), (0,), (2, 0)])
def test_dimensions(lead):
    run(Case(lead, (2, 4)))


def test_only_some_gradients():
    for number in range(0, 32, 3):
        *wanted, weight, bias = (bool(number >> i & 1) for i in range(5))
        run(Case((5,), (24,), weight=weight, bias=bias, wanted=tuple(wanted)))


@hypothesis.settings(max_examples=6, deadline=None, derandomize=True)
@hypothesis.given(
    M=st.integers(0, 12),
    N=st.integers(1, 90),
    dtype=st.sampled_from(plain.DTYPES),
    x=st.sampled_from(sorted(plain.LAYOUTS)),
    dy=st.sampled_from(sorted(plain.LAYOUTS)),
    weight=st.booleans(),
    bias=st.booleans(),
)
def test_any_case(M, N, **more):
    run(Case((M,), (N,), **more))


def compare(module, name, M, N, dtype):
    """Against PyTorch in float64; the name of an activation."""
    f = module.TORCH[name] if isinstance(name, str) else torch.sigmoid
    given = [t.detach() for t in module.inputs(M, N, dtype)]
    given[0] = 3 * given[0]
    found = []
    for norm, kind in (
        (
            lambda x, w, b: module.activation_layer_norm(x, N, w, b, name),
            dtype,
        ),
        (lambda x, w, b: F.layer_norm(f(x), (N,), w, b), torch.float64),
    ):
        *leaves, dy = (t.to(kind) for t in given)
        y = norm(*(t.requires_grad_() for t in leaves))
        found.append((y, *torch.autograd.grad(y, leaves, dy)))
    unit = torch.finfo(dtype).eps / 2
    factor = {torch.float32: 32, torch.float64: 64}.get(dtype, 1)
    if dtype == torch.bfloat16 and module.DEVICE.type == "cpu":
        factor = 2  # the interpreter cuts
    for got, want in zip(*found, strict=True):
        assert got.dtype == dtype
        assert (got - want).norm() <= 1.1 * factor * unit * want.norm()


@pytest.mark.parametrize("dtype", plain.DTYPES)
@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh"])
def test_activations(name, dtype):
    compare(small, name, 5, 45, dtype)


def test_an_activation_of_0_that_is_not_0():
    compare(small, _sigmoid, 3, 70, torch.float32)


def test_full_size():
    compare(page, "silu", 1, 8192, torch.float16)


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh"])
def test_value_and_slope_far_out(name):
    near = torch.linspace(-50, 50, 64, dtype=torch.float64)
    far = torch.tensor([-1e30, -1e4, -90.0, -43.1, 20.1, 90.0, 1e4, 1e30])
    x = torch.cat([near, far.double()]).requires_grad_()
    want = small.TORCH[name](x)
    (slope_of,) = torch.autograd.grad(want.sum(), x)
    slope_of = slope_of.nan_to_num(0, 0, 0)
    x = x.detach().float().to(page.DEVICE)
    slope = torch.empty_like(x)
    y = page.apply(x, page.ACTIVATIONS[name], slope)
    for got, expected in (y, want.detach()), (slope, slope_of):
        torch.testing.assert_close(
            got.double().cpu(), expected, rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh"])
def test_nan_stays_nan(name):
    x = torch.tensor([1.0, float("nan"), 2.0, 3.0], device=page.DEVICE)
    y = page.apply(x, page.ACTIVATIONS[name])
    assert y.isnan().tolist() == [False, True, False, False]


def test_plain_and_fast_agree():
    x = torch.linspace(-20, 20, 999, device=page.DEVICE)
    slopes = torch.empty(2, 999, device=page.DEVICE)
    y = page.apply(x, page._silu_plain, slopes[0])
    torch.testing.assert_close(page.apply(x, page._silu, slopes[1]), y)
    torch.testing.assert_close(*slopes)


@pytest.mark.parametrize("itemsize", [2, 4, 8])
def test_formulas_answer_for_every_width(itemsize):
    for N in range(1, 16384 // itemsize + 1):
        for rule in page.plan_forward, page.plan_backward:
            plan = rule(N, itemsize)
            rows, chunk, warps = (
                plan[key] for key in ("ROWS", "CHUNK", "num_warps")
            )
            assert all(v & (v - 1) == 0 for v in (rows, chunk, warps))
            assert 2 <= warps <= 16 and rows >= 1
            width = -(-N // chunk) * chunk
            assert width - N < chunk
            if rule is page.plan_forward and N * itemsize > 512:
                # 60 columns of 16 bits a thread
                assert width * itemsize <= 3840 * warps
                # Of wide rows at most a ninth of the lanes are idle, or one
                # chunk of 1 KB.
                idle = (width - N) * itemsize
                assert N * itemsize <= 2048 or (
                    8 * idle <= N * itemsize or idle < 1024
                )
            assert 1 <= plan.get("STAGES", 1) <= 4


def _tensor(*shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype, device=page.DEVICE)


@pytest.mark.parametrize(
    ("error", "names", "arguments"),
    [
        (TypeError, "x is .*int32", (_tensor(2, 8, dtype=torch.int32), 8)),
        (TypeError, "weight", (_tensor(2, 8), 8, _tensor(8).int())),
        (ValueError, "x.*normalized_shape", (_tensor(2, 8), 7)),
        (ValueError, "normalized_shape", (_tensor(2, 8), ())),
        (ValueError, "normalized_shape", (_tensor(2, 0), 0)),
        (ValueError, "weight", (_tensor(2, 8), 8, _tensor(7))),
        (ValueError, "bias", (_tensor(2, 8), 8, None, _tensor(2, 4))),
        (
            ValueError,
            "weight is on",
            (_tensor(2, 8), 8, _tensor(8).to("meta")),
        ),
        (
            ValueError,
            "relu is none of",
            (_tensor(2, 8), 8, None, None, "relu"),
        ),
        (ValueError, "4097 .*16 KB", (_tensor(2, 4097), 4097)),
    ],
)
def test_mistakes_are_named(error, names, arguments):
    with pytest.raises(error, match=names):
        page.activation_layer_norm(*arguments)


def test_second_derivative_is_refused():
    x = torch.randn(2, 8, device=page.DEVICE, requires_grad=True)
    y = page.activation_layer_norm(x, 8).square().sum()
    (dx,) = torch.autograd.grad(y, x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


def test_folded_functions_are_those_of_page_05():
    theirs = gather.functions(source("layer-norm/05-chunks"))
    ours = gather.functions(source(NAME))
    for name in "_chunk", "_load_chunks":
        assert ours[name] == theirs[name]


# Each edit must make a check fail.
MUTANTS = {
    "idle lanes in the mean": ("held += (tl.where(mask, a, 0),)",
                               "held += (a,)"),
    "idle lanes in the variance": (
        "d = tl.where(mask, held[c] - mean, 0)", "d = held[c] - mean"),
    "no slope": ("(d * c1 + c2)) * slope", "(d * c1 + c2))"),
    "c1 dropped": ("(d * c1 + c2)", "c2"),
    "c2 dropped": ("(d * c1 + c2)", "d * c1"),
    "x in place of its function": ("d, dy = a - mean, dys",
                                   "d, dy = xs[c].to(acc) - mean, dys"),
    "sums of the last tile": ("(dbs[c] + dy,)", "(dy,)"),
    "one buffer for all": (
        "sums_ptr += tl.program_id(0) * 2 * N", "sums_ptr += 0"),
    "the slope of a sigmoid": (
        "return x * sigmoid, sigmoid * (1 + x * (1 - sigmoid))\n\n\nreport(",
        "return x * sigmoid, sigmoid * (1 - sigmoid)\n\n\nreport("),
    "dy with strides of its own": ("dy.reshape(x.shape).contiguous()",
                                   "dy.reshape(x.shape)"),
}  # fmt: skip


def _suite(module):
    """A few cases that together catch every mutant."""
    module.NUM_SMS = 1
    compare(module, "silu", 41, 23, torch.float32)
    compare(module, _sigmoid, 3, 23, torch.float32)
    run(Case((3,), (24,), dy="one number"), module)


def test_suite_passes():
    _suite(load(NAME, SMALL))


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_fail(name):
    mutant = load(NAME, [*SMALL, MUTANTS[name]])
    with pytest.raises((AssertionError, RuntimeError)):
        _suite(mutant)


def test_script_runs_alone(output):
    assert "SiLU is right: True" in output
    assert output.count(": right") == 3
    if not page.ON_GPU:
        assert output.count("Timing needs a GPU") == 4


def test_exercise(output):
    assert output.count("dx is right: False") == 1  # the stub
    assert output.count("dx is right: True") == 1
