"""Rotary embedding: function(x, cos, sin, interleaved)."""

import dataclasses

import torch

from conformance import bounds
from conformance.bounds import Expected
from conformance.memory import LAYOUTS
from conformance.operation import (
    DTYPES,
    AnyCase,
    Operation,
    filler,
    gradients,
    leaves,
)
from conformance.page_files import Mistake

SINGLE = torch.float32
# Leading dimensions, length, dimension.
SIZES = (
    ((2, 4), 19, 8),
    ((2, 3), 5, 128),
    ((), 7, 2),
    ((5,), 9, 24),
    ((0, 2), 4, 4),
    ((2, 2), 0, 4),
    ((3, 8), 1, 10),
    ((2, 1, 2, 4), 3, 6),
)
# Of x, and of the tables.
TYPES = (
    *((dtype, SINGLE) for dtype in DTYPES),
    *((dtype, dtype) for dtype in DTYPES),
    (torch.float16, torch.bfloat16),
    (SINGLE, torch.float64),
)
# A function of this name rotates a copy of x in place.
IN_PLACE = "in place"


def rotated(x, cos, sin, interleaved):
    """In PyTorch; with abs of everything, and -sin, the size of the terms."""
    if interleaved:
        a, b = x[..., ::2], x[..., 1::2]
        pairs = a * cos - b * sin, b * cos + a * sin
        return torch.stack(pairs, -1).flatten(-2)
    a, b = x.tensor_split(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def sizes(x, cos, sin, interleaved):
    """Of the two terms of each number."""
    signs = torch.ones_like(x)
    half = x.shape[-1] // 2
    # The first number of each pair has a minus before its sine.
    first = (..., slice(0, None, 2) if interleaved else slice(0, half))
    signs[first] = -1
    x, cos, sin = x.abs(), cos.abs(), sin.abs()
    both = rotated(x, cos, -sin, interleaved)  # a cos + b sin, b cos - a sin
    other = rotated(x, cos, sin, interleaved)  # a cos - b sin, b cos + a sin
    return torch.where(signs < 0, both, other)


@dataclasses.dataclass(frozen=True)
class RotaryCase(AnyCase):
    lead: tuple = (2, 4)
    length: int = 19
    D: int = 8
    dtype: torch.dtype = SINGLE
    tables: torch.dtype = SINGLE
    x: str = "contiguous"  # a layout, as the next two
    dy: str = "contiguous"
    angles: str = "contiguous"  # of cos and of sin
    interleaved: bool = False
    wanted: bool = True  # requires_grad of x


@dataclasses.dataclass(frozen=True)
class Rotary(Operation):
    types: tuple = TYPES
    sizes: tuple = SIZES
    Case = RotaryCase

    def axes(self, on_gpu):
        return {
            ("lead", "length", "D"): self.sizes,
            ("dtype", "tables"): self.types,
            "x": tuple(LAYOUTS),
            "dy": tuple(LAYOUTS),
            "angles": tuple(LAYOUTS),
            "interleaved": (False, True),
            "wanted": (True, False),
        }

    def random_axes(self):
        from hypothesis import strategies as st

        sizes = st.tuples(
            st.lists(st.integers(0, 5), max_size=4).map(tuple),
            st.integers(0, 40),
            st.integers(1, 40).map(lambda half: 2 * half),
        )
        return {("lead", "length", "D"): sizes}

    def possible(self, case, on_gpu):
        """In place x has up to four dimensions, and no number twice."""
        if case.function != IN_PLACE:
            return True
        return case.x != "one number" and len(case.lead) <= 2

    def arithmetic(self, case):
        """Tables of float64 are rounded, unless x has float64."""
        return bounds.arithmetic(case.dtype)

    def tensors(self, case, device):
        filled = filler(device, case.seed)
        shape = (*case.lead, case.length, case.D)
        half = (case.length, case.D // 2)
        # Any numbers: nothing needs to know that they are of an angle.
        return {
            "x": filled(case.x, shape, case.dtype),
            "cos": filled(case.angles, half, case.tables),
            "sin": filled(case.angles, half, case.tables),
            "dy": filled(case.dy, shape, case.dtype),
        }

    def results(self, function, case, tensors):
        x, cos, sin, dy = tensors.values()
        (leaf,) = leaves([x], [case.wanted])
        y = function(leaf, cos, sin, interleaved=case.interleaved)
        return {"y": y.detach()} | gradients([y], [dy], {"x": leaf})

    def exact(self, case, tensors, found):
        x, cos, sin, dy = (t.double() for t in tensors.values())
        each = {"y": (x, cos, sin), "dx": (dy, cos, -sin)}
        return {
            name: Expected(
                rotated(*given, case.interleaved),
                sizes(*given, case.interleaved),
                case.dtype,
                2,
            )
            for name, given in each.items()
            if name == "y" or case.wanted
        }

    def mistakes(self):
        def plain(ones):
            return ones(2, 3, 8), ones(3, 4), ones(3, 4)

        def of(change):
            return lambda ones: change(*plain(ones))

        refused = (
            (
                TypeError,
                "has torch.int64",
                of(lambda x, c, s: (x.long(), c, s)),
            ),
            (
                TypeError,
                "has torch.complex64",
                of(lambda x, c, s: (x.to(torch.complex64), c, s)),
            ),
            (
                TypeError,
                "has torch.float8",
                of(lambda x, c, s: (x.to(torch.float8_e4m3fn), c, s)),
            ),
            (
                TypeError,
                "cos has torch.int32",
                of(lambda x, c, s: (x, c.int(), s)),
            ),
            (
                TypeError,
                "sin has torch.int32",
                of(lambda x, c, s: (x, c, s.int())),
            ),
            (
                ValueError,
                "is on meta",
                of(lambda x, c, s: (x.to("meta"), c, s)),
            ),
            (
                ValueError,
                "cos is on meta",
                of(lambda x, c, s: (x, c.to("meta"), s)),
            ),
            (
                ValueError,
                "has 1 dimension",
                of(lambda x, c, s: (x[0, 0], c, s)),
            ),
            (
                ValueError,
                "dimension of .* is 7: even",
                of(lambda x, c, s: (x[..., :7], c, s)),
            ),
            (
                ValueError,
                "dimension of .* is 0: even",
                of(lambda x, c, s: (x[..., :0], c[:, :0], s[:, :0])),
            ),
            (
                ValueError,
                "dimension of .* is 1026: .*1024",
                lambda ones: (ones(3, 1026), ones(3, 513), ones(3, 513)),
            ),
            (
                ValueError,
                r"cos is \(2, 4\), and .* needs \(3, 4\)",
                of(lambda x, c, s: (x, c[:2], s)),
            ),
            (
                ValueError,
                r"cos is \(3, 2\), and .* needs \(3, 4\)",
                of(lambda x, c, s: (x, c[:, :2], s)),
            ),
            (
                ValueError,
                r"sin is \(3, 4, 1\), and .* needs \(3, 4\)",
                of(lambda x, c, s: (x, c, s[..., None])),
            ),
            (
                ValueError,
                "cos requires a gradient",
                of(lambda x, c, s: (x, c.requires_grad_(), s)),
            ),
            (
                ValueError,
                "sin requires a gradient",
                of(lambda x, c, s: (x, c, s.requires_grad_())),
            ),
        )
        return tuple(Mistake(*one) for one in refused)

    def second_derivative(self, function, device):
        """It is right: compared with autograd's, in float64."""
        generator = torch.Generator().manual_seed(0)

        def filled(*shape):
            t = torch.randn(shape, generator=generator, dtype=torch.float64)
            return t.to(device)

        cos, sin = filled(3, 4), filled(3, 4)
        x, factor, direction = (
            filled(2, 3, 8),
            filled(2, 3, 8),
            filled(2, 3, 8),
        )
        for interleaved in (False, True):
            found = []
            for rotate in (function, rotated):
                leaf = x.clone().requires_grad_()
                y = rotate(leaf, cos, sin, interleaved)
                loss = (factor * y.square()).sum()
                (dx,) = torch.autograd.grad(loss, leaf, create_graph=True)
                found += torch.autograd.grad(dx, leaf, direction)
            torch.testing.assert_close(*found)

    def huge(self, function, device, N, slack=4):
        """More than 2**31 numbers; the first and the last head are judged."""
        heads, kind = 2**31 // (N * 128) + slack, torch.bfloat16
        shape = (heads, N, 128)
        x = torch.empty(shape, dtype=kind, device=device)
        for part in x.split(64):
            part.normal_()
        x.requires_grad_()
        cos, sin = torch.randn(2, N, 64, device=device)
        y = function(x, cos, sin)
        (dx,) = torch.autograd.grad(y, x, x.detach())
        case = RotaryCase(lead=(1,), length=N, D=128, dtype=kind)
        for head in slice(0, 1), slice(heads - 1, heads):
            part = x.detach()[head]
            found = {"y": y.detach()[head], "dx": dx[head]}
            given = {"x": part, "cos": cos, "sin": sin, "dy": part}
            self.judge(case, given, found)

    def model(self, function):
        """A layer of a model that rotates what a linear layer gives."""

        class Ours(torch.nn.Module):
            def __init__(self, N):
                super().__init__()
                self.linear = torch.nn.Linear(N, N)
                pair = torch.arange(N // 2)
                position = torch.arange(64)[:, None]
                angle = position * 100.0 ** (-2 * pair / N)
                self.register_buffer("cos", angle.cos())
                self.register_buffer("sin", angle.sin())

            def rotate(self, x):
                return function(x, self.cos, self.sin)

            def forward(self, x):
                return x + self.rotate(self.linear(x))

        class Theirs(Ours):
            def rotate(self, x):
                return rotated(x, self.cos, self.sin, False)

        return Ours, Theirs
