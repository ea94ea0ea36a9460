"""A linear layer: function(input, weight, bias=..., activation=...)."""

import dataclasses

import torch
import torch.nn.functional as F

from conformance import bounds
from conformance.bounds import HALF_UNITS, Expected
from conformance.memory import LAYOUTS
from conformance.operation import (
    AnyCase,
    Operation,
    filler,
    gradients,
    leaves,
)
from conformance.page_files import Mistake

HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
EVERY = (True, True, True)
ACTIVATIONS = (None, "relu", "gelu", "silu")
# Tokens (with what stands before them), features in, features out.
SIZES = (
    ((37,), 51, 29),
    ((1,), 1, 1),
    ((2, 3, 5), 64, 16),
    ((130,), 16, 3),
    ((5,), 129, 128),
    ((64,), 32, 200),
    ((0,), 8, 8),
    ((2, 0), 5, 16),
    ((), 24, 40),
)
WANTED = (
    EVERY,
    (True, False, False),
    (False, True, False),
    (False, False, True),
    (True, True, False),
    (False, False, False),
)


def activate(z, activation):
    """As PyTorch does, in the type of z."""
    if activation == "relu":
        return F.relu(z)
    if activation == "gelu":
        return F.gelu(z, approximate="tanh")
    if activation == "silu":
        return F.silu(z)
    return z


@dataclasses.dataclass(frozen=True)
class LinearCase(AnyCase):
    lead: tuple = (37,)  # the shape of the tokens
    features_in: int = 51
    features_out: int = 29
    dtype: torch.dtype = HALF
    input: str = "contiguous"  # a layout, as the next two
    weight: str = "contiguous"
    dy: str = "contiguous"
    bias: bool = True
    activation: str | None = None
    wanted: tuple = EVERY  # requires_grad of input, weight, bias
    large: float = 1.0  # inputs are so much larger


@dataclasses.dataclass(frozen=True)
class Linear(Operation):
    dtypes: tuple = (HALF, BRAIN, SINGLE)
    sizes: tuple = SIZES
    Case = LinearCase

    def axes(self, on_gpu):
        return {
            ("lead", "features_in", "features_out"): self.sizes,
            "dtype": self.dtypes,
            "input": tuple(LAYOUTS),
            "weight": tuple(LAYOUTS),
            "dy": tuple(LAYOUTS),
            "bias": (True, False),
            "activation": ACTIVATIONS,
            "wanted": WANTED,
            "large": (1.0, 30.0),
        }

    def possible(self, case, on_gpu):
        return bool(case.lead) or "transposed" not in (case.input, case.dy)

    def random_axes(self):
        from hypothesis import strategies as st

        features = st.integers(1, 150)
        sizes = st.tuples(st.tuples(st.integers(0, 150)), features, features)
        return {("lead", "features_in", "features_out"): sizes}

    def tensors(self, case, device):
        filled = filler(device, case.seed)
        features = case.features_in, case.features_out
        scale = features[0] ** -0.5
        dtype = case.dtype
        found = {
            "input": filled(
                case.input, (*case.lead, features[0]), dtype, case.large
            ),
            "weight": filled(
                case.weight, (features[1], features[0]), dtype, scale
            ),
            "bias": None,
        }
        if case.bias:
            found["bias"] = filled("contiguous", features[1:], dtype)
        found["dy"] = filled(case.dy, (*case.lead, features[1]), dtype)
        return found

    def results(self, function, case, tensors):
        names = ("input", "weight", "bias")
        given = leaves([tensors[name] for name in names], case.wanted)
        y = function(*given, activation=case.activation)
        found = {"y": y.detach()}
        inputs = dict(zip(names, given, strict=True))
        return found | gradients([y], [tensors["dy"]], inputs)

    def exact(self, case, tensors, found):
        """Gradients of a relu belong to the y that was returned."""
        x, w, b, dy = (
            None if t is None else t.double() for t in tensors.values()
        )
        flat_x = x.reshape(-1, case.features_in)
        flat_dy = dy.reshape(-1, case.features_out)
        z = flat_x @ w.T
        z_size = flat_x.abs() @ w.T.abs()
        if b is not None:
            z = z + b
            z_size = z_size + b.abs()
        # Of sizes that count in units of float32: operands are rounded to the
        # type of the inputs, dz and the slope, by half a unit each.
        unit = torch.finfo(torch.float32).eps * HALF_UNITS
        kind = torch.finfo(case.dtype)
        operand = 0.0 if case.dtype == SINGLE else kind.eps / unit
        tiny = kind.smallest_normal * kind.eps / unit
        y, y_size, slope, slope_size = _activated(z, z_size, case, found)
        dz = flat_dy * slope
        dz_size = flat_dy.abs() * slope_size
        if case.activation in ("gelu", "silu"):
            # Rounded twice, and the product of two small numbers is 0.
            dz_size += 1.5 * operand * dz.abs()
            dz_size += tiny * (1 + flat_dy.abs())
        want = {
            "y": (y, y_size, case.features_in),
            "dinput": (
                dz @ w,
                (dz.abs() + dz_size) @ w.abs(),
                case.features_out,
            ),
            "dweight": (
                dz.T @ flat_x,
                (dz.abs() + dz_size).T @ flat_x.abs(),
                len(flat_x),
            ),
            "dbias": (dz.sum(0), (dz.abs() + dz_size).sum(0), len(flat_x)),
        }
        shapes = {"y": (*case.lead, case.features_out), "dinput": x.shape}
        asked = dict(
            zip(("dinput", "dweight", "dbias"), case.wanted, strict=True)
        )
        asked["dbias"] &= case.bias
        return {
            name: Expected(
                value.reshape(shapes.get(name, value.shape)),
                size.reshape(shapes.get(name, value.shape)),
                case.dtype,
                max(count, 1),
            )
            for name, (value, size, count) in want.items()
            if asked.get(name, True)
        }

    def mistakes(self):
        def plain(ones, **changes):
            shapes = {"input": (3, 8), "weight": (4, 8), "bias": (4,)}
            shapes |= changes
            return [ones(*shape, dtype=HALF) for shape in shapes.values()]

        def of(change):
            return lambda ones: change(*plain(ones))

        def shaped(**changes):
            return lambda ones: plain(ones, **changes)

        refused = (
            (TypeError, "float64", of(lambda *t: [u.double() for u in t])),
            (TypeError, "int64", of(lambda *t: [u.long() for u in t])),
            (
                TypeError,
                "weight has torch.bfloat16",
                of(lambda x, w, b: (x, w.bfloat16(), b)),
            ),
            (
                TypeError,
                "bias has torch.float32",
                of(lambda x, w, b: (x, w, b.float())),
            ),
            (
                ValueError,
                "weight is on meta",
                of(lambda x, w, b: (x, w.to("meta"), b)),
            ),
            (
                ValueError,
                "weight has 1 dimensions",
                of(lambda x, w, b: (x, w[0], b)),
            ),
            (
                ValueError,
                "input has no dimension",
                of(lambda x, w, b: (x[0, 0], w, b)),
            ),
            (ValueError, "input has 9 features", shaped(input=(3, 9))),
            (ValueError, r"bias has shape \(1,\)", shaped(bias=(1,))),
            (ValueError, r"bias has shape \(4, 1\)", shaped(bias=(4, 1))),
            (
                ValueError,
                r"weight has shape \(0, 8\)",
                shaped(weight=(0, 8), bias=(0,)),
            ),
            (
                ValueError,
                r"weight has shape \(4, 0\)",
                shaped(weight=(4, 0), input=(3, 0)),
            ),
        )
        activations = ("tanh", "", True)
        return (
            *(Mistake(*one) for one in refused),
            *(
                Mistake(
                    ValueError,
                    "activation is",
                    plain,
                    {"activation": activation},
                )
                for activation in activations
            ),
        )

    def refusable(self, function, device):
        x, w, b = (
            torch.randn(shape, device=device).half().requires_grad_()
            for shape in ((3, 8), (4, 8), (4,))
        )
        return function(x, w, b, "gelu"), x

    def huge(self, function, device, N, slack=1):
        """More than 2**31 elements of y; the first and last 64 tokens are
        judged, and of the weight's gradient nothing."""
        tokens = 2**31 // N + slack
        x = torch.empty(tokens, 16, dtype=HALF, device=device).normal_()
        w = torch.empty(N, 16, dtype=HALF, device=device).normal_()
        b = torch.empty(N, dtype=HALF, device=device).normal_()
        dy = torch.empty(tokens, N, dtype=HALF, device=device).normal_()
        x.requires_grad_()
        y = function(x, w, b, "gelu")
        (dx,) = torch.autograd.grad(y, x, dy)
        for some in slice(0, 64), slice(tokens - 64, tokens):
            case = LinearCase(
                lead=(64,),
                features_in=16,
                features_out=N,
                activation="gelu",
                wanted=(True, False, False),
            )
            tensors = {
                "input": x.detach()[some],
                "weight": w,
                "bias": b,
                "dy": dy[some],
            }
            found = {"y": y.detach()[some], "dinput": dx[some]}
            self.judge(case, tensors, found)

    def model(self, function):
        """A layer of a model that computes so, and PyTorch's, in 16 bits."""

        class Ours(torch.nn.Module):
            def __init__(self, N):
                super().__init__()
                self.up = torch.nn.Linear(N, 4 * N)
                self.down = torch.nn.Linear(4 * N, N)

            def apply_layer(self, x, layer, activation=None):
                w, b = layer.weight.half(), layer.bias.half()
                return function(x, w, b, activation)

            def forward(self, x):
                h = self.apply_layer(x.half(), self.up, "gelu")
                return x + self.apply_layer(h, self.down).float()

        class Theirs(Ours):
            def apply_layer(self, x, layer, activation=None):
                w, b = layer.weight.half(), layer.bias.half()
                return activate(F.linear(x, w, b), activation)

        return Ours, Theirs

    def arithmetic(self, case):
        return bounds.arithmetic(torch.float32)


def _activated(z, z_size, case, found):
    """y and the slope, each with its size."""
    if case.activation is None:
        one = torch.ones_like(z)
        return z, z_size, one, 0 * one
    if case.activation == "relu":
        y = found["y"].double().reshape(z.shape)
        slope = (y > 0).double()
        return F.relu(z), z_size, slope, 0 * slope
    u, du = z, torch.ones_like(z)
    if case.activation == "gelu":
        u = 1.5957691216057308 * z * (1 + 0.044715 * z**2)
        du = 1.5957691216057308 * (1 + 0.134145 * z**2)
    # Not by tanh, which leaves nothing of a small number beside 1.
    p, q = torch.sigmoid(u), torch.sigmoid(-u)
    y = z * p
    slope = p + y * q * du
    # An exponent is off by its size, and by what z is off; and a power below
    # the normal numbers of float32 may count as 0.
    off = u.abs() + du * z_size
    single = torch.finfo(SINGLE)
    none = 4 * single.smallest_normal / (single.eps * HALF_UNITS)
    y_size = z_size * p + y.abs() * (1 + q * off) + none * z.abs()
    second = y.abs() * q * du
    slope_size = p * (1 + q * off) + second * (2 + off)
    # And the factors z and du are off.
    slope_size += p * q * (du + z.abs() * (1 + z.abs())) * z_size
    slope_size += none * (1 + z.abs() * du)
    return y, y_size, slope, slope_size
