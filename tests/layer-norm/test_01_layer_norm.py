"""Page 01 of layer norm in Triton's interpreter (or on a GPU, if there)."""

import hypothesis
import pytest
import torch
import torch.nn.functional as F

import layer_norm_cases as cases
from any_case import any_layer_norm, examples
from compiled.aot import Call
from layer_norm_cases import Case
from tutorial import load, source

NAME = "layer-norm/01-layer-norm"
# The interpreter needs milliseconds for each program: few that take several
# rows, and in the second kernel few that take many columns.
FEW = (
    ("per_sm * NUM_SMS", "7"),
    ("triton.cdiv(2 * N, 16), (", "triton.cdiv(2 * N, 512), ("),
    ("2 * N, 256, 16)", "2 * N, 8, 512)"),
)
page = load(NAME, FEW)
# And forward each row is a program.
SHAPES = [(M, N) for M, N in cases.SHAPES if M < 100]


def run(case, module=page):
    cases.run(module.layer_norm, case, module.DEVICE)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape):
    for dtype in cases.types(*shape):
        run(Case(shape[:1], shape[1:], dtype))


@pytest.mark.parametrize("layout", cases.LAYOUTS)
@pytest.mark.parametrize("which", ["x", "dy", "parameters"])
def test_layouts(which, layout):
    for dtype in cases.DTYPES:
        for lead, shape in ((5,), (33,)), ((2, 3), (4, 7)):
            run(Case(lead, shape, dtype, **{which: layout}))


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("weight_dtype", cases.DTYPES)
def test_mixed_dtypes(dtype, weight_dtype):
    if not page.ON_GPU and cases.wrong_in_interpreter(dtype, weight_dtype):
        pytest.skip("the interpreter stores float64 as bfloat16 wrongly")
    run(Case((7,), (65,), dtype, weight_dtype))


def test_weight_and_bias_of_two_dtypes():
    x, w, b, dy = page.inputs(5, 33, torch.float32)
    b = b.detach().half().requires_grad_()
    y = page.layer_norm(x, 33, w, b)
    dw, db = torch.autograd.grad(y, (w, b), dy)
    x_hat = F.layer_norm(x.detach().double(), (33,))
    torch.testing.assert_close(dw, (dy * x_hat).sum(0).float())
    torch.testing.assert_close(db, dy.double().sum(0).half())


@pytest.mark.parametrize("lead", [(), (3,), (2, 1, 3), (0,), (2, 0)])
@pytest.mark.parametrize("shape", [(1,), (9,), (3, 5)])
def test_dimensions(lead, shape):
    run(Case(lead, shape))


@pytest.mark.parametrize("weight", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_only_some_gradients(weight, bias):
    for number in range(8):
        wanted = tuple(bool(number >> i & 1) for i in range(3))
        run(Case((5,), (33,), weight=weight, bias=bias, wanted=wanted))


def test_as_many_programs_as_on_the_page():
    for dtype in cases.DTYPES:
        run(Case((5,), (130,), dtype), load(NAME))


@examples(30)
@hypothesis.given(any_layer_norm())
def test_any_case(case):
    run(case)


def streaming_errors(N, dtype, module=page):
    """Relative errors of y, mean and rstd of the kernel with three sweeps."""
    x, w, b, _ = (t.detach() for t in module.inputs(3, N, dtype))
    with cases.guarded_allocations():
        found = module.in_sweeps(x, w, b, 1e-5)
    x, w, b = x.double(), w.double(), b.double()
    rstd = (x.var(dim=1, correction=0) + 1e-5) ** -0.5
    expected = F.layer_norm(x, (N,), w, b), x.mean(dim=1), rstd
    return [
        ((a - b).norm() / b.norm()).item()
        for a, b in zip(found, expected, strict=True)
    ]


@pytest.mark.parametrize("N", [1, 7, 4096, 4097, 9000])
def test_three_sweeps(N):
    for dtype in torch.float16, torch.float32, torch.float64:
        unit = torch.finfo(dtype).eps
        y, mean, rstd = streaming_errors(N, dtype)
        wide = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
        assert y <= max(unit / 2, 8 * wide)
        assert mean <= 8 * wide
        # A row of one column has no variance: rstd is that of eps.
        assert rstd <= 16 * wide


def test_widest_rows():
    run(Case((1,), (16384,), torch.float16))
    run(Case((2,), (16385,), torch.float16, wanted=(False, False, False)))
    x, w, b, _ = page.inputs(1, 20000, torch.float32)
    with torch.no_grad():
        y = page.layer_norm(x, 20000, w, b)
    torch.testing.assert_close(y, F.layer_norm(x, (20000,), w, b))


@pytest.mark.parametrize("which", ["x", "weight", "bias"])
def test_gradients_of_wider_rows_are_refused(which):
    tensors = dict(
        zip(("x", "weight", "bias"), torch.ones(3, 1, 16385), strict=True)
    )
    tensors["weight"], tensors["bias"] = (
        tensors["weight"][0],
        tensors["bias"][0],
    )
    tensors = {name: t.to(page.DEVICE) for name, t in tensors.items()}
    tensors[which].requires_grad_()
    with pytest.raises(ValueError, match=r"16385 columns.*16384.*Every width"):
        page.layer_norm(normalized_shape=16385, **tensors)


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


def test_constant_rows_and_constant_gradients():
    x = torch.full((3, 100), 7.0, device=page.DEVICE)
    assert (page.layer_norm(x, 100) == 0).all()
    x = torch.randn(4, 16, device=page.DEVICE, requires_grad=True)
    w = torch.rand(16, device=page.DEVICE) + 0.5
    y = page.layer_norm(x, (16,), w)
    (dx,) = torch.autograd.grad(y, x, (1 / w).expand(4, 16))
    assert dx.abs().max() < 1e-5


def test_second_derivative_is_refused():
    x = torch.randn(2, 8, device=page.DEVICE, requires_grad=True)
    y = page.layer_norm(x, (8,)).square().sum()
    (dx,) = torch.autograd.grad(y, x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


def _tensor(*shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype, device=page.DEVICE)


@pytest.mark.parametrize(
    ("error", "names", "arguments"),
    [
        (TypeError, "x is .*int32", (_tensor(2, 8, dtype=torch.int32), 8)),
        (TypeError, "weight", (_tensor(2, 8), 8, _tensor(8).int())),
        (TypeError, "bias", (_tensor(2, 8), 8, None, _tensor(8).bool())),
        (TypeError, "x", (_tensor(2, 8).to(torch.float8_e5m2), 8)),
        (ValueError, "x.*normalized_shape", (_tensor(2, 8), 7)),
        (ValueError, "normalized_shape", (_tensor(2, 8), ())),
        (ValueError, "normalized_shape", (_tensor(8), (2, 8))),
        (ValueError, "normalized_shape", (_tensor(2, 0), 0)),
        (ValueError, "weight", (_tensor(2, 8), 8, _tensor(7))),
        (ValueError, "bias", (_tensor(2, 8), 8, None, _tensor(2, 4))),
        (ValueError, "x", (_tensor(2, 8).to("meta"), 8)),
        (ValueError, "weight", (_tensor(2, 8), 8, _tensor(8).to("meta"))),
        (ValueError, "bias", (_tensor(2, 8), 8, None, _tensor(8).to("meta"))),
    ],
)
def test_mistakes_are_named(error, names, arguments):
    with pytest.raises(error, match=names):
        page.layer_norm(*arguments)


def test_defaults_are_those_of_pytorch():
    x = torch.randn(3, 5, device=page.DEVICE)
    torch.testing.assert_close(page.layer_norm(x, (5,)), F.layer_norm(x, (5,)))
    w, b = torch.rand(2, 5, device=page.DEVICE)
    y = page.layer_norm(x, normalized_shape=5, weight=w, bias=b, eps=0.1)
    torch.testing.assert_close(y, F.layer_norm(x, (5,), w, b, 0.1))


# Each edit of the kernels must make a check fail.
MUTANTS = {
    "c2 dropped": (
        "dx = (wdy - x_hat * c1 - c2) * rstd\n            tl",
        "dx = (wdy - x_hat * c1) * rstd\n            tl",
    ),
    "c1 dropped": (
        "dx = (wdy - x_hat * c1 - c2) * rstd\n            tl",
        "dx = (wdy - c2) * rstd\n            tl",
    ),
    "masked lanes in the variance": (
        "x = tl.where(cols < N, x - mean, 0)  # masked",
        "x = x - mean  # masked",
    ),
    "masked lanes in the variance of three sweeps": (
        "x = tl.where(cols < N, x - mean, 0)\n",
        "x = x - mean\n",
    ),
    "first tile in every sweep": (
        "cols = start + tl.arange(0, BLOCK)\n        total += tl.load",
        "cols = tl.arange(0, BLOCK)\n        total += tl.load",
    ),
    "store without mask": (
        "\n    tl.store(y_ptr + row * N + cols, y, mask=cols < N)",
        "\n    tl.store(y_ptr + row * N + cols, y)",
    ),
    "rows of other programs": (
        "range(tl.program_id(0), M, tl.num_programs(0))",
        "range(tl.program_id(0), M, tl.num_programs(0) + 1)",
    ),
    "all programs fill the first buffer": (
        "sums_ptr += tl.program_id(0) * 2 * N + cols",
        "sums_ptr += cols",
    ),
    "sums without mask": (
        "tl.store(sums_ptr + N, db, mask=mask)",
        "tl.store(sums_ptr + N, db)",
    ),
    "buffers that nobody wrote": (
        "mask = (rows < programs) & (cols < WIDTH)",
        "mask = cols < WIDTH",
    ),
    "second kernel without mask": (
        "tl.sum(total, axis=0), mask=cols < WIDTH",
        "tl.sum(total, axis=0)",
    ),
    "dy with strides of its own": ("dy.contiguous(), x, w", "dy, x, w"),
    "x, w and b with strides of their own": (
        "None if t is None else t.contiguous() for t",
        "t for t",
    ),
    "statistics in float32 only": (
        "acc = torch.promote_types(x.dtype, torch.float32)\n"
        "    mean, rstd = torch.empty(2, M, dtype=acc, device=x.device)\n"
        "    block = triton.next_power_of_2(N)\n",
        "acc = torch.float32\n"
        "    mean, rstd = torch.empty(2, M, dtype=acc, device=x.device)\n"
        "    block = triton.next_power_of_2(N)\n",
    ),
}


def _suite(module):
    """A few cases that together catch every mutant."""
    for dtype in torch.float32, torch.float64:
        run(Case((3,), (129,), dtype), module)
    run(Case((3,), (9,), x="columns"), module)
    run(Case((3,), (9,), dy="one number"), module)
    run(Case((17,), (3,)), module)  # more rows than programs
    assert max(streaming_errors(4608, torch.float32, module)) <= 1e-6


def test_suite_passes():
    _suite(page)


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_fail(name):
    mutant = load(NAME, [*FEW, MUTANTS[name]])
    with pytest.raises(AssertionError):
        _suite(mutant)


def test_sums_in_16_bits_fail():
    half = ("dtype=mean.dtype, **new)", "dtype=x.dtype, **new)")
    case = Case((40,), (8,), torch.float16)
    run(case)
    with pytest.raises(AssertionError, match=r"d[wb]: error"):
        run(case, load(NAME, [*FEW, half]))


def test_script_runs_alone(output):
    M, N = (1151, 8192) if page.ON_GPU else (9, 200)
    for dtype in "float16", "float32":
        assert f"{M} x {N}, torch.{dtype}: errors below" in output
    assert "nan" not in output.lower()
    if not page.ON_GPU:
        assert output.count("Timing needs a GPU") == 3


def test_what_the_page_says_of_16_bits():
    text = " ".join(source(NAME).replace("\n#", "").split())
    assert "in float16, 0.1 added 4096 times gives 256." in text
    assert sum(torch.full((4096,), 0.1, dtype=torch.float16)) == 256


def test_programs_are_few_enough_for_the_registers(launches):
    """Those of a multiprocessor run together: its registers are enough."""
    sizes = 1024, 1536, 2048, 4096, 4608, 8064, 8192, 16384
    code = """
x, w, b, dy = inputs(M, N, dtype)
torch.autograd.grad(layer_norm(x, (N,), w, b), (x, w, b), dy)
"""
    values = {"M": 4096, "dtype": "float16"}
    calls = [Call(NAME, code, values | {"N": N}) for N in sizes]
    for N, launched in zip(sizes, launches(calls), strict=True):
        (built,) = (b for b in launched if b.kernel == "_layer_norm_bwd")
        per_sm = built.grid[0] // 132
        assert 1 <= per_sm <= 65536 // (32 * built.num_warps * built.registers)
        assert N >= 4096 or built.spills == 0


def test_stub_fails_and_solution_passes(output):
    # The solution stands in an assertion, so it passed.
    assert output.count("right: False") == 1
    assert output.count("sums of the rows:") == 2
