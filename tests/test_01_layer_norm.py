"""Page 01 in Triton's interpreter (or on a GPU, where there is one)."""

import hypothesis
import pytest
import torch
import torch.nn.functional as F

import layer_norm_cases as cases
from any_case import any_layer_norm
from layer_norm_cases import Case
from tutorial import load

NAME = "01-layer-norm"
page = load(NAME)


def run(case, module=page):
    cases.run(module.layer_norm, case, module.DEVICE)


@pytest.mark.parametrize("shape", cases.LONG_SHAPES, ids=str)
def test_shapes(shape):
    M, N = shape
    for dtype in cases.types(M, N):
        run(Case((M,), (N,), dtype))


@pytest.mark.parametrize("dtype", cases.LONG_DTYPES)
@pytest.mark.parametrize("layout", cases.LAYOUTS)
@pytest.mark.parametrize("which", ["x", "dy", "parameters"])
def test_layouts(which, layout, dtype):
    for lead, shape in ((5,), (33,)), ((2, 3), (4, 7)):
        run(Case(lead, shape, dtype, **{which: layout}))


def test_all_layouts_at_once():
    for layout in cases.LAYOUTS:
        run(Case((2, 3), (5, 4), x=layout, dy=layout, parameters=layout))


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("weight_dtype", cases.DTYPES)
def test_mixed_dtypes(dtype, weight_dtype):
    if not page.ON_GPU and cases.wrong_in_interpreter(dtype, weight_dtype):
        pytest.skip("the interpreter stores float64 as bfloat16 wrongly")
    run(Case((7,), (65,), dtype, weight_dtype))


@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 1, 3), (0,), (2, 0)])
@pytest.mark.parametrize("shape", [(1,), (9,), (3, 5)])
def test_dimensions(lead, shape):
    run(Case(lead, shape))


@pytest.mark.parametrize("weight", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_only_some_gradients(weight, bias):
    for number in range(8):
        wanted = tuple(bool(number >> i & 1) for i in range(3))
        run(Case((5,), (33,), weight=weight, bias=bias, wanted=wanted))


def test_more_rows_than_buffers():
    # Every buffer is used several times.
    assert page.GROUP_SIZE_M < 150
    run(Case((300,), (2,), torch.float32))


def test_constant_rows_and_large_mean():
    x = torch.full((3, 100), 7.0, device=page.DEVICE)
    y = page.layer_norm(x, (100,), None, None)
    assert (y == 0).all()
    x = 10000 + torch.randn(3, 100, device=page.DEVICE)
    y = page.layer_norm(x, (100,), None, None)
    expected = F.layer_norm(x.double(), (100,))
    torch.testing.assert_close(y.double(), expected, atol=5e-3, rtol=0)


@hypothesis.given(
    any_layer_norm(),
)
def test_any_case(case):
    run(case)


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_properties_without_reference(dtype):
    x, w, b, dy = Case((7,), (129,), dtype).tensors(page.DEVICE)
    x, w, b = (t.requires_grad_() for t in (x, w, b))
    y = page.layer_norm(x, (129,), w, b)
    dx, dw, db = torch.autograd.grad(y, (x, w, b), dy)
    x, w, b, y, dy, dx, dw, db = (
        t.detach().double() for t in (x, w, b, y, dy, dx, dw, db)
    )
    eps = 4 * torch.finfo(dtype).eps
    x_hat = F.layer_norm(x, (129,))
    size = dx.abs().sum(1)
    assert (dx.sum(1).abs() <= eps * size).all()
    size = (dx * x_hat).abs().sum(1)
    # eps of the layer norm leaves a rest of relative size 1e-4.
    assert ((dx * x_hat).sum(1).abs() <= (eps + 1e-4) * size).all()
    total = (w * dw).sum() + (b * db).sum() - (dy * y).sum()
    assert total.abs() <= eps * (dy * y).abs().sum()


def test_constant_gradient_and_single_column():
    x = torch.randn(4, 16, device=page.DEVICE, requires_grad=True)
    w = torch.rand(16, device=page.DEVICE) + 0.5
    y = page.layer_norm(x, (16,), w, None)
    (dx,) = torch.autograd.grad(y, x, (1 / w).expand(4, 16))
    assert dx.abs().max() < 1e-5
    x = torch.randn(4, 1, device=page.DEVICE, requires_grad=True)
    (dx,) = torch.autograd.grad(page.layer_norm(x, 1, None, None).sum(), x)
    assert (dx == 0).all()


def test_second_derivative_is_refused():
    x = torch.randn(2, 8, device=page.DEVICE, requires_grad=True)
    y = page.layer_norm(x, (8,), None, None).square().sum()
    (dx,) = torch.autograd.grad(y, x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


def _tensor(*shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype, device=page.DEVICE)


@pytest.mark.parametrize(
    ("error", "names", "arguments"),
    [
        (TypeError, "x", (_tensor(2, 8, dtype=torch.int32), 8, None, None)),
        (TypeError, "weight", (_tensor(2, 8), 8, _tensor(8).int(), None)),
        (TypeError, "bias", (_tensor(2, 8), 8, None, _tensor(8).bool())),
        (ValueError, "x.*normalized_shape", (_tensor(2, 8), 7, None, None)),
        (ValueError, "normalized_shape", (_tensor(2, 8), (), None, None)),
        (ValueError, "normalized_shape", (_tensor(8), (2, 8), None, None)),
        (ValueError, "normalized_shape", (_tensor(2, 0), 0, None, None)),
        (ValueError, "weight", (_tensor(2, 8), 8, _tensor(7), None)),
        (ValueError, "bias", (_tensor(2, 8), 8, None, _tensor(2, 4))),
        (ValueError, "eps", (_tensor(2, 8), 8, None, None, -1e-5)),
        (ValueError, "eps", (_tensor(2, 8), 8, None, None, float("nan"))),
        (ValueError, "x", (_tensor(2, 8).to("meta"), 8, None, None)),
        (
            ValueError,
            "weight",
            (_tensor(2, 8), 8, _tensor(8).to("meta"), None),
        ),
        (ValueError, "bias", (_tensor(2, 8), 8, None, _tensor(8).to("meta"))),
        (
            ValueError,
            "normalized_shape.*page 03",
            (_tensor(1, 16385), 16385, None, None),
        ),
    ],
)
def test_mistakes_are_named(error, names, arguments):
    with pytest.raises(error, match=names):
        page.layer_norm(*arguments)


# The last kernel has a program for a few columns: many to interpret.
@pytest.mark.parametrize(
    "sums", [False, pytest.param(True, marks=pytest.mark.long)]
)
def test_widest_row(sums):
    wanted = (True, sums, sums)
    run(Case((1,), (16384,), torch.float16, wanted=wanted))


# Each edit of the kernels must make a check fail.
DX = "c2 = tl.sum(wdy) / N\n            dx = ("
MUTANTS = {
    "c2 dropped": (f"{DX}wdy - x_hat * c1 - c2", f"{DX}wdy - x_hat * c1"),
    "c1 dropped": (f"{DX}wdy - x_hat * c1 - c2", f"{DX}wdy - c2"),
    "masked lanes in the variance": (
        "x = tl.where(mask, x - mean, 0)  # masked lanes: 0 again",
        "x = x - mean",
    ),
    "store without mask": (
        "tl.store(y_ptr + row * N + cols, y, mask=mask)",
        "tl.store(y_ptr + row * N + cols, y)",
    ),
    "sums without mask": (
        "tl.store(db_ptr, db, mask=cols < N)",
        "tl.store(db_ptr, db)",
    ),
    "buffer read before it is written": (
        "old = cols < tl.where(state == 2, N, 0)",
        "old = cols < N",
    ),
    "buffer never read": (
        "old = cols < tl.where(state == 2, N, 0)",
        "old = cols < tl.where(state == 3, N, 0)",
    ),
    "second stage reads every buffer": (
        "mask = (rows < programs) & (cols < N)",
        "mask = (rows < GROUP_SIZE_M) & (cols < N)",
    ),
    "second stage without mask": (
        "dw_ptr + cols, dw, mask=cols < N",
        "dw_ptr + cols, dw",
    ),
    "dy with strides of its own": (
        "dy.reshape(x.shape).contiguous()",
        "dy.reshape(x.shape)",
    ),
    "x with strides of its own": (
        "x.reshape(-1, N).contiguous()",
        "x.reshape(-1, N)",
    ),
    "weight with strides of its own": (
        "weight.reshape(N).contiguous()",
        "weight.reshape(N)",
    ),
    "statistics in float32 only": (
        "acc = torch.promote_types(x.dtype, torch.float32)",
        "acc = torch.float32",
    ),
}


def _suite(module):
    """A few cases that together catch every mutant."""
    for dtype in torch.float32, torch.float64:
        run(Case((3,), (129,), dtype), module)
    run(Case((3,), (9,), x="columns"), module)
    run(Case((3,), (9,), dy="one number"), module)
    run(Case((3,), (9,), parameters="every second"), module)
    run(Case((300,), (3,)), module)  # more rows than buffers


def test_suite_passes():
    _suite(page)


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_fail(name):
    mutant = load(NAME, [MUTANTS[name]])
    with pytest.raises(AssertionError):
        _suite(mutant)


FEW_BUFFERS = ("GROUP_SIZE_M = 128\n", "GROUP_SIZE_M = 2\n")
HALF_SUMS = (
    "sums = torch.empty(2, G, N, dtype=mean.dtype",
    "sums = torch.empty(2, G, N, dtype=x.dtype",
)


def test_sums_in_16_bits_fail():
    # Few buffers, so that each takes many rows.
    case = Case((200,), (8,), torch.float16)
    run(case, load(NAME, [FEW_BUFFERS]))
    with pytest.raises(AssertionError, match=r"d[wb]: error"):
        run(case, load(NAME, [FEW_BUFFERS, HALF_SUMS]))


def test_script_runs_alone(output):
    assert "passed at" in output
    assert output.count("Timing needs a GPU") == 1


def test_pitfalls_and_exercises_show(output):
    assert output.count("wrong:") >= 5
    assert output.count("right:") >= 5
    assert output.count("all right") == 3  # the three solutions
    assert output.count("wrong rows: [0, 1, 2, 3, 4]") == 2  # two stubs
    assert output.count("wrong columns: [0, 1, 2") == 1  # the third stub
