"""A linear layer: function(input, weight, bias, activation)."""

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
# Dimensions before the features, old features, new ones.
SIZES = (
    ((2, 3), 37, 24),
    ((40,), 16, 33),
    ((), 24, 40),
    ((1,), 1, 1),
    ((70,), 48, 72),
    ((3, 11), 129, 16),
    ((0,), 8, 5),
    ((2, 0, 3), 16, 8),
    ((100,), 8, 1),
)
WANTED = (
    EVERY,
    (True, False, False),
    (False, True, False),
    (False, False, True),
    (True, True, False),
    (False, False, False),
)


def gelu(z):
    """As F.gelu with approximate="tanh", whose 1 + tanh is 0 far below 0, in
    float64, too."""
    return z * torch.sigmoid((8 / torch.pi) ** 0.5 * (z + 0.044715 * z**3))


ACTIVATIONS = {
    None: lambda z: z,
    "relu": F.relu,
    "gelu": gelu,
    "silu": F.silu,
}


@dataclasses.dataclass(frozen=True)
class LinearCase(AnyCase):
    lead: tuple = (6,)  # dimensions before the features
    ins: int = 40
    outs: int = 24
    dtype: torch.dtype = HALF
    activation: str | None = "gelu"
    input: str = "contiguous"  # a layout, as the next three
    weight: str = "contiguous"
    bias: str | None = "contiguous"  # None: there is none
    dy: str = "contiguous"
    wanted: tuple = EVERY  # requires_grad of input, weight, bias
    large: float = 1.0  # the input is so much larger


@dataclasses.dataclass(frozen=True)
class Linear(Operation):
    dtypes: tuple = (HALF, BRAIN, SINGLE)
    sizes: tuple = SIZES
    Case = LinearCase

    def axes(self, on_gpu):
        return {
            ("lead", "ins", "outs"): self.sizes,
            "dtype": self.dtypes,
            "activation": tuple(ACTIVATIONS),
            "input": tuple(LAYOUTS),
            "weight": tuple(LAYOUTS),
            "bias": (None, *LAYOUTS),
            "dy": tuple(LAYOUTS),
            "wanted": WANTED,
            "large": (1.0, 30.0),
        }

    def random_axes(self):
        from hypothesis import strategies as st

        lead = st.lists(st.integers(0, 12), max_size=3).map(tuple)
        features = st.integers(1, 150)
        return {("lead", "ins", "outs"): st.tuples(lead, features, features)}

    def tensors(self, case, device):
        filled = filler(device, case.seed)
        shapes = {
            "input": (*case.lead, case.ins),
            "weight": (case.outs, case.ins),
            "bias": (case.outs,),
            "dy": (*case.lead, case.outs),
        }
        scales = {"input": case.large, "weight": case.ins**-0.5}
        return {
            name: None
            if getattr(case, name) is None
            else filled(
                getattr(case, name), shape, case.dtype, scales.get(name, 1.0)
            )
            for name, shape in shapes.items()
        }

    def results(self, function, case, tensors):
        names = ("input", "weight", "bias")
        given = leaves([tensors[name] for name in names], case.wanted)
        y = function(*given, case.activation)
        found = {"y": y.detach()}
        inputs = dict(zip(names, given, strict=True))
        return found | gradients([y], [tensors["dy"]], inputs)

    def exact(self, case, tensors, found):
        """The slope of ReLU belongs to the y that was returned."""
        given = (t if t is None else t.double() for t in tensors.values())
        x, w, b, dy = given
        lead, x = x.shape[:-1], x.reshape(-1, case.ins)
        dy = dy.reshape(-1, case.outs)
        with torch.enable_grad():
            z = F.linear(x, w, b).detach().requires_grad_()
            y = ACTIVATIONS[case.activation](z)
            (slope,) = torch.autograd.grad(y.sum(), z)
        z, y = z.detach(), y.detach()
        if case.activation == "relu":
            slope = (found["y"].reshape(y.shape) > 0).double()
        # What is added up for z; no activation is steeper than 1.2, nor
        # changes its slope by more than it is given. The exponent of a
        # sigmoid is off by its size, and far out its power counts as 0.
        terms = x.abs() @ w.abs().T
        if b is not None:
            terms += b.abs()
        exponent = (1.6 * z.abs() + 0.072 * z.abs() ** 3).clamp(max=200)
        y_size = 1.2 * terms + y.abs() * exponent * (z < 0)
        slope_size = terms * (slope != 0) + slope.abs() * exponent
        if case.activation in (None, "relu"):
            y_size, slope_size = terms, 0 * terms
        # dz and the slope are rounded to the type of the inputs, each by half
        # a unit, and beside 0 by the smallest number. Of sizes that count in
        # units of float32:
        unit = torch.finfo(SINGLE).eps * HALF_UNITS
        kind = torch.finfo(case.dtype)
        operand = kind.eps / unit
        tiny = max(
            kind.smallest_normal * kind.eps,
            torch.finfo(SINGLE).smallest_normal,
        )
        tiny /= unit
        dz = dy * slope
        dz_size = dy.abs() * (slope_size + tiny) + 2 * operand * dz.abs()
        dz_size += tiny
        if case.activation in (None, "relu"):
            dz_size = dz.abs()
        far = 1e3 * torch.finfo(SINGLE).smallest_normal
        want = {
            "y": Expected(
                y.reshape(*lead, case.outs),
                y_size.reshape(*lead, case.outs),
                case.dtype,
                case.ins,
                least=far,
            ),
            "dinput": Expected(
                (dz @ w).reshape(*lead, case.ins),
                (dz_size @ w.abs()).reshape(*lead, case.ins),
                case.dtype,
                case.outs,
            ),
            "dweight": Expected(
                dz.T @ x, dz_size.T @ x.abs(), case.dtype, len(x)
            ),
            "dbias": Expected(dz.sum(0), dz_size.sum(0), case.dtype, len(x)),
        }
        asked = dict(
            zip(("dinput", "dweight", "dbias"), case.wanted, strict=True)
        )
        asked["dbias"] &= b is not None
        return {
            name: value for name, value in want.items() if asked.get(name, 1)
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
            (TypeError, "int64", of(lambda *t: [u.long() for u in t])),
            (TypeError, "float64", of(lambda *t: [u.double() for u in t])),
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
            (ValueError, "input has no dimension", shaped(input=())),
            (ValueError, "weight has 1 dimensions", shaped(weight=(8,))),
            (
                ValueError,
                "a feature is needed",
                shaped(input=(3, 0), weight=(4, 0)),
            ),
            (
                ValueError,
                "a feature is needed",
                shaped(weight=(0, 8), bias=(0,)),
            ),
            (
                ValueError,
                "input has 9 features, and weight takes 8",
                shaped(input=(3, 9)),
            ),
            (ValueError, r"bias is \(5,\)", shaped(bias=(5,))),
            (ValueError, r"bias is \(1, 4\)", shaped(bias=(1, 4))),
            (
                ValueError,
                "activation is 'tanh'",
                of(lambda x, w, b: (x, w, b, "tanh")),
            ),
        )
        return tuple(Mistake(*one) for one in refused)

    def refusable(self, function, device):
        x = torch.randn(5, 8, device=device, requires_grad=True)
        w = torch.randn(4, 8, device=device)
        return function(x, w), x

    def huge(self, function, device, N, slack=5, ins=64, some=256):
        """More than 2**31 results: of y and dx the first and the last rows
        are judged, of the other gradients all."""
        M = 2**31 // N + slack
        case = LinearCase(lead=(M,), ins=ins, outs=N, dtype=BRAIN)
        shapes = {"input": (M, ins), "weight": (N, ins), "bias": (N,)}
        shapes["dy"] = (M, N)
        tensors = {
            name: torch.empty(shape, dtype=BRAIN, device=device)
            for name, shape in shapes.items()
        }
        for t in tensors.values():
            for part in t.split(max(2**27 // t[0].numel(), 1)):
                part.normal_()
        tensors["weight"] *= ins**-0.5
        found = self.results(function, case, tensors)
        for rows in slice(0, some), slice(M - some, M):
            part = tensors | {
                name: tensors[name][rows] for name in ("input", "dy")
            }
            of_part = dataclasses.replace(
                case, lead=(some,), wanted=(True, False, False)
            )
            self.judge(
                of_part,
                part,
                {name: found[name][rows] for name in ("y", "dinput")},
            )
        sums = {}
        for start in range(0, M, 2**13):
            rows = slice(start, start + 2**13)
            part = tensors | {
                name: tensors[name][rows] for name in ("input", "dy")
            }
            of_part = dataclasses.replace(
                case,
                lead=(len(part["dy"]),),
                wanted=(False, True, True),
            )
            for name, of in self.exact(of_part, part, {}).items():
                if name != "y":
                    value, size = sums.get(name, (0, 0))
                    sums[name] = value + of.value, size + of.size
        for name, (value, size) in sums.items():
            bounds.compare(
                name,
                found[name],
                Expected(value, size, BRAIN, M),
                self.arithmetic(case),
            )

    def model(self, function):
        """A layer of a model that computes so, and PyTorch's."""

        class Ours(torch.nn.Linear):
            def __init__(self, N):
                super().__init__(N, N)

            def forward(self, x):
                return x + function(x, self.weight, self.bias, "gelu")

        class Theirs(Ours):
            def forward(self, x):
                z = F.linear(x, self.weight, self.bias)
                return x + F.gelu(z, approximate="tanh")

        return Ours, Theirs

    def arithmetic(self, case):
        return bounds.arithmetic(SINGLE)
