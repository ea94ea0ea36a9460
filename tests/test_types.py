"""One rule of types on every page that adds to a stream or normalizes.

y has the type of x, and s that of the residual; a gradient has the type of
what it belongs to. A weight may have a type of its own.
"""

import functools
import itertools

import pytest
import torch
import torch.nn.functional as F

from layer_norm_cases import DTYPES, NO_STREAMS, STREAMS, wrong_in_interpreter
from tutorial import load

N, HALF, SINGLE = 24, torch.float16, torch.float32


def call(name, function, *, bias=True, residual=True, **options):
    """A page as a function of x, the residual, weight and bias."""

    def norm(x, r, w, b):
        given = (x, r) if residual else (x,)
        ys = getattr(load_once(name), function)(
            *given, N, w, *([b] if bias else []), **options
        )
        return ys if residual else (ys, r)

    return norm


load_once = functools.cache(load)
RMS = {"bias": False, "eps": 1e-5}
ADDING = {
    "fused/01": call("fused/01-add-layer-norm", "add_layer_norm"),
    "fused/02": call(
        "fused/02-dropout", "dropout_add_layer_norm", training=False
    ),
    "rms/01": call("norms-and-losses/01-rms-norm", "add_rms_norm", **RMS),
    "rms/02": call(
        "norms-and-losses/02-rms-norm-16-bits", "add_rms_norm", **RMS
    ),
}
ALONE = {
    "fused/03": call(
        "fused/03-activation", "activation_layer_norm", residual=False
    ),
    "rms/01": call(
        "norms-and-losses/01-rms-norm", "rms_norm", residual=False, **RMS
    ),
    "rms/02": call(
        "norms-and-losses/02-rms-norm-16-bits",
        "rms_norm",
        residual=False,
        **RMS,
    ),
}
EXACT = {
    "fused/03": lambda s, w, b: F.layer_norm(F.silu(s), (N,), w, b),
    "rms": lambda s, w, b: F.rms_norm(s, (N,), w, 1e-5),
    "fused": lambda s, w, b: F.layer_norm(s, (N,), w, b),
}


def given(dtype, stream, parameters):
    """x, residual, weight and bias, then dy and ds."""
    torch.manual_seed(0)
    types = dtype, stream, parameters, parameters, dtype, stream
    shapes = [(3, N)] * 2 + [(N,)] * 2 + [(3, N)] * 2
    device = load_once("fused/01-add-layer-norm").DEVICE
    return [
        (0.5 + torch.randn(shape)).to(device, kind)
        for shape, kind in zip(shapes, types, strict=True)
    ]


def check(page, norm, dtype, stream, parameters=None):
    """Types of the results of both passes, and that they are right."""
    x, r, w, b, dy, ds = given(dtype, stream, parameters or dtype)
    leaves = [t.requires_grad_() for t in (x, r, w, b)]
    exact = [t.detach().double().requires_grad_() for t in leaves]
    y, s = norm(*leaves)
    alone = s is r
    assert (y.dtype, s.dtype) == (dtype, stream)
    total = exact[0] if alone else exact[0] + exact[1]
    formula = EXACT.get(page) or EXACT[page[: page.index("/")]]
    want = formula(total, *exact[2:]), total
    ends = ([y], [dy]) if alone else ([y, s], [dy, ds])
    more = {"allow_unused": True}
    found = torch.autograd.grad(ends[0], leaves, ends[1], **more)
    ends = want[: len(ends[0])], [t.double() for t in ends[1]]
    wanted = torch.autograd.grad(ends[0], exact, ends[1], **more)
    pairs = [*zip(found, wanted, leaves, strict=True), (y, want[0], x)]
    for got, value, leaf in pairs:
        assert (got is None) == (value is None)
        if got is None:
            continue
        assert got.dtype == leaf.dtype
        # Of x or of what is given, the coarser: the sum is rounded to s.
        limit = 8 * max(torch.finfo(t).eps for t in (got.dtype, stream))
        assert (got - value).norm() <= limit * value.norm()


@pytest.mark.parametrize(("dtype", "stream"), STREAMS)
@pytest.mark.parametrize("page", ADDING)
def test_a_residual(page, dtype, stream):
    check(page, ADDING[page], dtype, stream)


@pytest.mark.parametrize(("dtype", "stream"), NO_STREAMS)
@pytest.mark.parametrize("page", ADDING)
def test_a_residual_that_cannot_hold_x(page, dtype, stream):
    x, r, w, b, *_ = given(dtype, dtype, dtype)
    with pytest.raises(TypeError, match="residual is"):
        ADDING[page](x, r.to(stream), w, b)


@pytest.mark.parametrize("page", ALONE)
def test_without_a_residual(page):
    for dtype in DTYPES:
        check(page, ALONE[page], dtype, dtype)


@pytest.mark.parametrize("page", [*ADDING, "fused/03"])
def test_parameters_of_another_type(page):
    norm = ADDING.get(page) or ALONE[page]
    pairs = itertools.product((HALF, SINGLE), DTYPES)
    for dtype, parameters in pairs:
        if dtype != parameters and not wrong_in_interpreter(dtype, parameters):
            check(page, norm, dtype, dtype, parameters)
