"""Page 05 in Triton's interpreter (or on a GPU, where there is one)."""

import hypothesis
import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from hypothesis import strategies as st

import layer_norm_cases as cases
from any_case import any_layer_norm
from layer_norm_cases import Case
from tutorial import load

NAME = "05-fused-elementwise-layer-norm"
page = load(NAME)
ROWS = {"ROWS": 2, "CHUNK": 32, "num_warps": 4}
PAIRS = {
    "rows": (
        ROWS | {"STAGES": 2, "per_sm": 1},
        ROWS | {"STAGES": 2, "per_sm": 1, "HIDE": False},
    ),
    "wide": (
        {"CHUNK": 32, "num_warps": 4},
        ROWS | {"STAGES": 2, "per_sm": 1, "SLICES": True},
    ),
}
SIXTEEN_BITS = (torch.float16, torch.bfloat16)


@triton.jit
def _identity(x):
    return x, x * 0 + 1


@triton.jit
def _sigmoid(x):
    y = tl.sigmoid(x)
    return y, y * (1 - y)


def add_zero(module):
    """add_layer_norm as a plain layer norm."""

    def function(x, shape, w, b, eps):
        residual = torch.zeros_like(x)
        return module.add_layer_norm(x, residual, shape, w, b, eps)[0]

    return function


def no_activation(module):
    """activation_layer_norm as a plain layer norm."""
    module.ACTIVATIONS["identity"] = _identity

    def function(x, shape, w, b, eps):
        return module.activation_layer_norm(x, shape, w, b, eps, "identity")

    return function


FORMS = {"add": add_zero, "activation": no_activation}


@pytest.fixture(params=FORMS)
def form(request):
    return FORMS[request.param]


def run(form, case, module=page):
    cases.run(form(module), case, module.DEVICE)


def force(patch, module, name):
    first, second = PAIRS[name]
    patch.setattr(module, "plan_forward", lambda *_: dict(first))
    patch.setattr(module, "plan_backward", lambda *_: dict(second))


@pytest.fixture(params=PAIRS)
def pair(request, monkeypatch):
    force(monkeypatch, page, request.param)
    return request.param


@pytest.mark.parametrize("shape", cases.LONG_SHAPES, ids=str)
def test_shapes(shape):
    M, N = shape
    types = cases.types(M, N)
    for dtype in types:
        run(add_zero, Case((M,), (N,), dtype))
        if types == cases.DTYPES:
            run(no_activation, Case((M,), (N,), dtype))


@cases.long_widths([1, 31, 32, 33, 90], every_type=33)
def test_every_kernel(form, pair, N, dtype):
    run(form, Case((3,), (N,), dtype))


@pytest.mark.parametrize("layout", cases.LAYOUTS)
@pytest.mark.parametrize("which", ["x", "dy", "parameters"])
def test_layouts(form, which, layout):
    for dtype in torch.float16, torch.float32:
        run(form, Case((2, 3), (4, 7), dtype, **{which: layout}))


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("weight_dtype", cases.DTYPES)
def test_weights_of_another_type(form, dtype, weight_dtype):
    if not page.ON_GPU and cases.wrong_in_interpreter(dtype, weight_dtype):
        pytest.skip("the interpreter stores float64 as bfloat16 wrongly")
    run(form, Case((3,), (65,), dtype, weight_dtype))


@pytest.mark.parametrize("lead", [(), (3,), (2, 1, 3), (0,), (2, 0)])
@pytest.mark.parametrize("shape", [(1,), (3, 5)])
def test_dimensions(form, lead, shape):
    run(form, Case(lead, shape))


@pytest.mark.parametrize("weight", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_only_some_gradients(form, pair, weight, bias):
    for number in (1, 2, 6, 7):
        wanted = tuple(bool(number >> i & 1) for i in range(3))
        run(form, Case((3,), (33,), weight=weight, bias=bias, wanted=wanted))


@pytest.mark.parametrize("sms", [1, 2, 7])
def test_number_of_multiprocessors(form, pair, sms, monkeypatch):
    monkeypatch.setattr(page, "NUM_SMS", sms)
    run(form, Case((7,), (64,)))
    run(form, Case((2,), (64,)))


@hypothesis.given(
    any_layer_norm(),
    st.sampled_from([None, *PAIRS]),
    st.sampled_from(list(FORMS)),
)
def test_any_case(case, pair, form):
    with pytest.MonkeyPatch.context() as patch:
        if pair is not None:
            force(patch, page, pair)
        run(FORMS[form], case)


# The sum, its gradient, and dropout.


def given(M, N, dtype, layout="contiguous"):
    """x, residual, w, b, dy, ds."""
    generator = torch.Generator().manual_seed(M + N)

    def fill(shift, scale):
        def one(shape):
            value = torch.randn(shape, generator=generator)
            return (shift + scale * value).to(page.DEVICE, dtype)

        return one

    make = cases.LAYOUTS[layout]
    matrices = [fill(0, 0.5), fill(-2.3, 0.5), fill(0, 0.1), fill(0, 0.1)]
    x, residual, dy, ds = (make((M, N), f) for f in matrices)
    w, b = (fill(0.5, 0.3)((N,)) for _ in range(2))
    return x, residual, w, b, dy, ds


def add(module, x, residual, w, b, dy, ds, p=0.0, seed=0):
    """y, s and the gradients of x, residual, w and b."""
    leaves = [t.detach().requires_grad_() for t in (x, residual, w, b)]
    y, s = module.add_layer_norm(
        *leaves[:2], x.shape[-1:], *leaves[2:], 1e-5, p, seed
    )
    grads = torch.autograd.grad((y, s), leaves, (dy, ds))
    return y.detach(), s.detach(), *grads


def check_add(module, tensors, p=0.0, seed=0):
    """Each of the six results against float64, on the s that is returned."""
    x, residual, w, b, dy, ds = tensors
    with cases.guarded_allocations():
        y, s, dx, dr, dw, db = add(module, *tensors, p=p, seed=seed)
    wide = torch.promote_types(x.dtype, residual.dtype)
    assert y.dtype == s.dtype == wide
    kept = module.kept(*x.shape, p, seed) if p else torch.ones_like(x)
    kept = kept.double()
    exact = x.double() * kept / (1 - p) + residual.double()
    # One rounding to the type of s, after those of the arithmetic.
    unit = torch.finfo(wide).eps / 2
    if wide == torch.bfloat16 and not page.ON_GPU:
        unit *= 2  # the interpreter cuts
    fine = torch.finfo(torch.promote_types(wide, torch.float32)).eps
    size = x.double().abs() / (1 - p) + residual.double().abs()
    bound = unit * exact.abs() + 2 * fine * size
    assert ((s.double() - exact).abs() <= bound).all()
    case = Case(x.shape[:-1], x.shape[-1:], wide)
    expected, cancels = cases.exact(case, s, w, b, dy)
    value, size = expected["dx"]
    total = value + ds.double(), size + ds.double().abs()
    noise = 8 * torch.finfo(torch.promote_types(wide, torch.float32)).eps
    through = kept / (1 - p)
    pairs = {
        "y": (y, *expected["y"]),
        "dresidual": (dr, *total),
        "dx": (dx, *(t * through for t in total)),
        "dw": (dw, *expected["dw"]),
        "db": (db, *expected["db"]),
    }
    likes = {"y": s, "dresidual": residual, "dx": x, "dw": w, "db": b}
    for name, (got, value, size) in pairs.items():
        assert got.dtype == likes[name].dtype, name
        rounding = torch.finfo(got.dtype).eps / 2
        if got.dtype == torch.bfloat16 and not page.ON_GPU:
            rounding *= 2
        allowed = rounding * value.norm() + noise * cancels * size.norm()
        error = (got.double() - value).norm()
        assert error <= allowed + 1e-12, f"{name}: {error:.1e} > {allowed:.1e}"


@pytest.mark.parametrize("p", [0.0, 0.25])
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_sum_and_dropout(pair, dtype, p):
    for M, N in (1, 40), (5, 130):
        check_add(page, given(M, N, dtype), p, seed=M)


@pytest.mark.parametrize("layout", cases.LAYOUTS)
def test_layouts_of_residual_and_ds(layout):
    if layout != "one number":
        check_add(page, given(4, 37, torch.float32, layout), 0.5)
    x, residual, w, b, dy, _ = given(4, 37, torch.float32)
    other = given(4, 37, torch.float32, layout)
    check_add(page, (x, residual, w, b, other[4], other[5]), 0.5)
    check_add(page, (x, other[1], w, b, dy, other[5]), 0.5)


@pytest.mark.parametrize("types", [(torch.float16, torch.float32)])
@pytest.mark.parametrize("p", [0.0, 0.5])
def test_a_residual_of_another_type(types, p):
    for a, b in types, types[::-1], (torch.bfloat16, torch.float32):
        first, second = given(4, 40, a), given(4, 40, b)
        wide = given(4, 40, torch.promote_types(a, b))
        x, residual = first[0], second[1]
        check_add(page, (x, residual, *wide[2:]), p, seed=3)


def test_only_one_result_is_used():
    x, residual, w, b, dy, ds = given(4, 37, torch.float64)
    for p in 0.0, 0.5:
        leaves = [t.requires_grad_() for t in (x, residual, w, b)]
        y, s = page.add_layer_norm(x, residual, (37,), w, b, 1e-5, p, 9)
        both = torch.autograd.grad((y, s), leaves, (dy, ds), True)
        of_y = torch.autograd.grad(y, leaves, dy, True)
        of_s = torch.autograd.grad(s, leaves, ds, True)
        for one, two, three in zip(both, of_y, of_s, strict=True):
            torch.testing.assert_close(one, two + three)
        torch.testing.assert_close(of_s[1], ds)


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_only_some_gradients_of_the_sum(pair, p):
    tensors = given(5, 40, torch.float32)
    every = add(page, *tensors, p=p, seed=2)[2:]
    for number in 1, 2, 3, 4, 9, 14:
        leaves = [
            t.detach().requires_grad_(bool(number >> i & 1))
            for i, t in enumerate(tensors[:4])
        ]
        y, s = page.add_layer_norm(*leaves[:2], (40,), *leaves[2:], 1e-5, p, 2)
        asked = [t for t in leaves if t.requires_grad]
        found = torch.autograd.grad(
            [t for t in (y, s) if t.requires_grad],
            asked,
            [g for t, g in ((y, tensors[4]), (s, tensors[5]))
             if t.requires_grad],
            allow_unused=True,
        )  # fmt: skip
        expected = [every[i] for i in range(4) if number >> i & 1]
        uses_s = number & 3
        for got, value in zip(found, expected, strict=True):
            if uses_s:
                assert torch.equal(got, value)


def test_without_dropout_one_tensor_serves_both():
    tensors = given(3, 40, torch.float16)
    dx, dr = add(page, *tensors)[2:4]
    assert dx.data_ptr() == dr.data_ptr()
    dx, dr = add(page, *tensors, p=0.5)[2:4]
    assert dx.data_ptr() != dr.data_ptr()


def test_no_dropout_is_a_probability_of_0():
    tensors = given(3, 72, torch.float16)
    once, twice = (add(page, *tensors, seed=seed) for seed in (1, 2))
    assert all(map(torch.equal, once, twice))


def test_everything_dropped():
    x, residual, w, b, dy, ds = given(3, 72, torch.float32)
    x[0, 0] = float("inf")
    _, s, dx, dr, *_ = add(page, x, residual, w, b, dy, ds, p=1.0)
    assert torch.equal(s, residual)
    assert not dx.any() and dr.any()


@pytest.mark.parametrize("p", [0.01, 0.5])
def test_keep_rate(p):
    kept = page.kept(32, 2048, p, seed=12).double()
    n = kept.numel()
    sigma = (p * (1 - p) / n) ** 0.5
    assert abs(kept.mean() - (1 - p)) < 4 * sigma
    # Neither rows nor columns nor neighbors are alike.
    for other in kept.roll(1, 0), kept.roll(1, 1), kept.roll(4, 1):
        both = (kept * other).mean()
        assert abs(both - (1 - p) ** 2) < 5 * sigma
    for dim, size in (0, 32), (1, 2048):
        spread = (p * (1 - p) / size) ** 0.5
        largest = (kept.mean(dim) - (1 - p)).abs().max()
        assert largest < 6 * spread + 4 / size


def test_the_mask_depends_on_seed_row_and_column_only():
    mask = page.kept(5, 96, 0.5, 7)
    for plan in *(first for first, _ in PAIRS.values()), {
        "ROWS": 4, "CHUNK": 16, "num_warps": 4,
    }:  # fmt: skip
        assert torch.equal(mask, page.kept(5, 96, 0.5, 7, plan))
    assert torch.equal(mask[:3, :50], page.kept(3, 50, 0.5, 7))


def test_seeds():
    masks = [page.kept(8, 128, 0.5, seed) for seed in SEEDS]
    for i, mask in enumerate(masks):
        for other in masks[:i]:
            assert not torch.equal(mask, other)
    for seed, mask in zip(SEEDS, masks, strict=True):
        tensor = torch.tensor([seed], device=page.DEVICE)
        assert torch.equal(mask, page.kept(8, 128, 0.5, tensor))


SEEDS = (0, 1, 16, -1, 2**31, 2**32, 2**32 + 1, 2**62, -(2**63))


def test_a_seed_that_changes_before_the_backward_pass():
    """The mask of the backward pass would be another one: refused."""
    tensors = given(3, 40, torch.float32)
    leaves = [t.detach().requires_grad_() for t in tensors[:4]]
    seed = torch.tensor(4, device=page.DEVICE)
    y, _ = page.add_layer_norm(
        *leaves[:2], (40,), *leaves[2:], 1e-5, 0.5, seed
    )
    seed.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        y.sum().backward()


def test_a_sum_that_changes_before_the_backward_pass():
    tensors = given(3, 40, torch.float32)
    leaves = [t.detach().requires_grad_() for t in tensors[:4]]
    y, s = page.add_layer_norm(*leaves[:2], (40,), *leaves[2:])
    with torch.no_grad():
        s.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        y.sum().backward()


# Activations.


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("name", page.TORCH)
def test_activations(pair, name, dtype):
    f = page.TORCH[name]
    x, _, w, b, dy, _ = given(4, 75, dtype)
    x = (3 * x).detach()
    found, expected = [], []
    for tensors, norm, out in (
        ((x, w, b), lambda x, *a: page.activation_layer_norm(
            x, (75,), *a, 1e-5, name), found),
        ([t.double() for t in (x, w, b)], lambda x, *a: F.layer_norm(
            f(x), (75,), *a), expected),
    ):  # fmt: skip
        leaves = [t.detach().requires_grad_() for t in tensors]
        y = norm(*leaves)
        out += [y, *torch.autograd.grad(y, leaves, dy.to(y.dtype))]
    unit = torch.finfo(dtype).eps / 2
    factor = {torch.float32: 16, torch.float64: 32}.get(dtype, 1)
    if dtype == torch.bfloat16 and not page.ON_GPU:
        factor = 2
    for got, value in zip(found, expected, strict=True):
        assert got.dtype == dtype
        assert (got - value).norm() <= factor * unit * value.norm()


def test_activations_far_out():
    x = torch.tensor([[-1e4, -100.0, -20.0, 0.0, 20.0, 100.0, 1e4]])
    x = x.to(page.DEVICE)
    for name, f in page.TORCH.items():
        leaf = x.clone().requires_grad_()
        wide = x.double().requires_grad_()
        y = page.activation_layer_norm(leaf, (7,), None, None, 1e-5, name)
        expected = F.layer_norm(f(wide), (7,))
        torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-6)
        dy = torch.arange(7.0, device=page.DEVICE)[None]
        (dx,) = torch.autograd.grad(y, leaf, dy)
        (want,) = torch.autograd.grad(expected, wide, dy.double())
        torch.testing.assert_close(dx.double(), want, rtol=1e-4, atol=1e-6)


def test_an_activation_of_0_that_is_not_0(pair):
    page.ACTIVATIONS["sigmoid"] = _sigmoid
    x, _, w, b, dy, _ = given(3, 70, torch.float32)
    x.requires_grad_()
    y = page.activation_layer_norm(x, (70,), w, b, 1e-5, "sigmoid")
    expected = F.layer_norm(x.sigmoid(), (70,), w, b)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
    found = (torch.autograd.grad(f, x, dy)[0] for f in (y, expected))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


# What the page says about itself.


def test_counted_units():
    units = {
        (what, mode): [round(n, 1) for n in page.counted(what, mode)]
        for what, mode in page.COUNTED
    }
    assert units == {
        ("add", "forward"): [4, 5],
        ("add", "backward"): [4, 6],
        ("dropout", "forward"): [4, 7.5],
        ("dropout", "backward"): [5, 8.5],
        ("silu", "forward"): [2, 4],
        ("silu", "backward"): [3, 6],
    }


def test_statistics_of_rows_with_a_large_mean():
    for ratio, allowed in (1, 1e-6), (1000, 3e-5), (100000, 3e-3):
        for provider in "triton", "welford":
            error = page.statistics_error(2, 256, ratio, provider)
            assert error <= allowed, (ratio, provider)
    assert page.statistics_error(2, 256, 1000, "squares") > 1e-3


def test_the_ceiling_moves_what_it_says():
    a, b, c = torch.randn(3, 5, 77, device=page.DEVICE)
    for read in (a,), (a, b), (a, b, c):
        for count in 1, 2:
            written = [torch.zeros_like(a) for _ in range(count)]
            page.move(read, written)
            for out in written:
                torch.testing.assert_close(out, sum(read))


def test_chains_of_the_benchmark_agree():
    given = page.inputs(3, 40, torch.float32)
    for what in "add", "silu":
        found = page.fused(what, *given[:2], (40,), *given[2:4])
        for norm in page.plain, F.layer_norm:
            expected = page.chain(norm, what, *given[:2], (40,), *given[2:4])
            for got, value in zip(found, expected, strict=True):
                torch.testing.assert_close(got, value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_compiled_in_one_graph(p):
    """The whole function is one graph, and gives the same bits."""
    tensors = given(4, 40, torch.float32)

    def both(*given):
        y, s = page.add_layer_norm(*given[:2], (40,), *given[2:], 1e-5, p, 5)
        z = page.activation_layer_norm(s, (40,), *given[2:], 1e-5, "gelu")
        return y, z

    compiled = torch.compile(both, backend="aot_eager", fullgraph=True)
    found = []
    for f in both, compiled:
        leaves = [t.detach().requires_grad_() for t in tensors[:4]]
        out = f(*leaves)
        grads = torch.autograd.grad(out, leaves, tensors[4:])
        found.append((*out, *grads))
    assert all(map(torch.equal, *found))


def test_second_derivative_is_refused():
    x = torch.randn(2, 8, device=page.DEVICE, requires_grad=True)
    y = page.activation_layer_norm(x, (8,), None, None).square().sum()
    (dx,) = torch.autograd.grad(y, x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


def _tensor(*shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype, device=page.DEVICE)


X = _tensor(2, 8)


@pytest.mark.parametrize(
    ("error", "names", "arguments"),
    [
        (TypeError, "x", (X.int(), X, 8, None, None)),
        (TypeError, "residual", (X, X.int(), 8, None, None)),
        (TypeError, "residual", (X, None, 8, None, None)),
        (ValueError, "residual", (X, _tensor(8), 8, None, None)),
        (ValueError, "residual", (X, X.to("meta"), 8, None, None)),
        (TypeError, "weight", (X, X, 8, _tensor(8).int(), None)),
        (ValueError, "weight", (X, X, 8, _tensor(7), None)),
        (ValueError, "bias", (X, X, 8, None, _tensor(2, 4))),
        (ValueError, "x.*normalized_shape", (X, X, 7, None, None)),
        (ValueError, "normalized_shape", (X, X, (), None, None)),
        (ValueError, "eps", (X, X, 8, None, None, -1e-5)),
        (ValueError, "dropout_p", (X, X, 8, None, None, 1e-5, 1.5)),
        (ValueError, "dropout_p", (X, X, 8, None, None, 1e-5, -0.1)),
        (TypeError, "seed", (X, X, 8, None, None, 1e-5, 0.5, 1.0)),
        (ValueError, "seed", (X, X, 8, None, None, 1e-5, 0.5, 2**63)),
        (TypeError, "seed", (X, X, 8, None, None, 1e-5, 0.5, _tensor(1))),
    ],
)
def test_mistakes_are_named(error, names, arguments):
    with pytest.raises(error, match=names):
        page.add_layer_norm(*arguments)


def test_an_unknown_activation_is_named():
    with pytest.raises(ValueError, match=r"activation is 'tanh'.*silu, gelu"):
        page.activation_layer_norm(X, 8, None, None, 1e-5, "tanh")


# Each edit must make a check fail.
MUTANTS = {
    "the mask forgotten in the backward pass": (
        "g = _dropout(g, seed, row + tile * ROWS, c, DROP)\n        _store",
        "_store",
    ),
    "another mask in the backward pass": (
        "g = _dropout(g, seed, row + tile * ROWS, c, DROP)\n        _store",
        "g = _dropout(g, seed, row + tile + 1, c, DROP)\n        _store",
    ),
    "every row of a tile gets the first mask": (
        "xs[c], r, seed, row + tile * ROWS",
        "xs[c], r, seed, row * 0 + tile * ROWS",
    ),
    "kept elements not scaled": (
        "scale: tl.constexpr = 2**32 / (2**32 - DROP)",
        "scale: tl.constexpr = 1.0",
    ),
    "ds forgotten": (
        "            g += ds.to(acc)\n",
        "            pass\n",
    ),
    "ds through the mask only": (
        "    if dr_ptr is not None:\n        _store(dr_ptr + at, g, row",
        "    g = _dropout(g, seed, row + tile * ROWS, c, DROP)\n"
        "    if dr_ptr is not None:\n        _store(dr_ptr + at, g, row",
    ),
    "slope forgotten": (
        "((x - mean) * a + b)) * slope",
        "((x - mean) * a + b))",
    ),
    "sum not rounded before the norm": (
        "        x = x.to(kind)\n",
        "        x = x.to(acc)\n",
    ),
    "idle lanes after the activation": (
        "        if TAIL:\n"
        "            x = tl.where(_column(c, CHUNK) < N, x, 0)\n",
        "",
    ),
    "sum2 dropped": ("((x - mean) * a + b)", "((x - mean) * a)"),
    "sum1 dropped": ("((x - mean) * a + b)", "(b)"),
    "idle lanes in the variance": (
        "d = tl.where(_column(c, CHUNK) < N, d, 0)  # idle",
        "d = d  # idle",
    ),
    "partial rows without mask": (
        "mask = (row < P) & (col < N)",
        "mask = col < N",
    ),
    "dy with strides of its own": (
        "None if t is None else t.reshape(x.shape).contiguous()",
        "None if t is None else t.reshape(x.shape)",
    ),
    "x with strides of its own": (
        "None if t is None else t.reshape(size).contiguous()",
        "None if t is None else t.reshape(size)",
    ),
}


def _suite(module):
    """A few cases that together catch every mutant."""
    check_add(module, given(7, 43, torch.float16), 0.5)
    x, residual, *rest = given(7, 43, torch.float16)
    check_add(module, (x, residual + 30, *rest))
    check_add(module, given(7, 43, torch.float32), 0.0)
    run(add_zero, Case((19,), (43,)), module)
    run(add_zero, Case((3,), (37,), x="columns"), module)
    run(add_zero, Case((3,), (37,), dy="one number"), module)
    module.ACTIVATIONS["sigmoid"] = _sigmoid
    x, _, w, b, dy, _ = given(3, 70, torch.float32)
    x.requires_grad_()
    y = module.activation_layer_norm(x, (70,), w, b, 1e-5, "sigmoid")
    expected = F.layer_norm(x.sigmoid(), (70,), w, b)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
    found = (torch.autograd.grad(f, x, dy)[0] for f in (y, expected))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def test_suite_passes():
    _suite(page)


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_fail(name):
    mutant = load(NAME, [MUTANTS[name]])
    with pytest.raises(AssertionError):
        _suite(mutant)


WIDE_MUTANTS = {
    "sets merged without their distance": (
        "m2_a + m2_b + d * d * n_a * share",
        "m2_a + m2_b",
    ),
    "idle lanes in Welford's sums": (
        "d = tl.where(mask, a - mean, 0)",
        "d = a - mean",
    ),
    "ds forgotten": (
        "g += tl.load(ds_ptr + at, mask=mask, other=0).to(g.dtype)",
        "pass",
    ),
    "another mask in the backward pass": (
        "g = _dropout(g, seed, row + tile * x.shape[0], c, DROP)",
        "g = _dropout(g, seed, row + tile, c, DROP)",
    ),
    "slices share their sums": (
        "at = ptr + tl.cast(group, tl.int64) * 2 * N + col",
        "at = ptr + col",
    ),
    "the first slice only": (
        "tl.where(s < SLICES, one, 0), tl.where(s < SLICES, two, 0)",
        "tl.where(s < 1, one, 0), tl.where(s < 1, two, 0)",
    ),
    "the last tile not finished": (
        "last = group + (tiles - 1 - group) // groups * groups",
        "last = group",
    ),
    "words of another tile": (
        "at = (first + row) * SLICES + c\n",
        "at = row * SLICES + c\n",
    ),
}


def _wide_suite(module):
    with pytest.MonkeyPatch.context() as patch:
        force(patch, module, "wide")
        patch.setattr(module, "NUM_SMS", 4)
        check_add(module, given(7, 43, torch.float32), 0.5)
        check_add(module, given(1, 70, torch.float32), 0.0)


def test_wide_suite_passes():
    _wide_suite(page)


@pytest.mark.parametrize("name", WIDE_MUTANTS)
def test_wide_mutants_fail(name):
    mutant = load(NAME, [WIDE_MUTANTS[name]])
    with pytest.raises(AssertionError):
        _wide_suite(mutant)


def test_script_runs_alone(output):
    assert "masks agree, same seed, same bits" in output
    assert output.count("Timing needs a GPU") == 1


def test_pitfalls_and_exercises_show(output):
    assert output.count("wrong:") == output.count("right:") == 5
    assert output.count("all right") == 3  # the three solutions
    assert output.count("wrong rows") == 2  # two stubs
    assert output.count("wrong columns") == 1  # and one
