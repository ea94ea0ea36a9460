"""Softmax and its logarithm: function(input, dim, dtype)."""

import dataclasses

import torch
import torch.nn.functional as F

from conformance import bounds
from conformance.bounds import Expected
from conformance.memory import LAYOUTS
from conformance.operation import DTYPES, AnyCase, Operation, filler
from conformance.page_files import Mistake

# Shapes and the dimension along which the numbers are divided.
SIZES = (
    ((5, 37), -1),
    ((2, 3, 32), 2),
    ((3, 5, 7), 0),
    ((3, 13, 2), 1),
    ((9, 16), -1),
    ((7,), 0),
    ((0, 3), 1),
    ((2, 75), -1),
)


@dataclasses.dataclass(frozen=True)
class SoftmaxCase(AnyCase):
    shape: tuple = (5, 129)
    dim: int = -1
    dtype: torch.dtype = torch.float32
    out: torch.dtype | None = None  # the argument dtype
    x: str = "contiguous"  # a layout, as the next one
    dy: str = "contiguous"
    scale: float = 1.0
    masked: float = 0.0  # share of x that is -inf; never a whole row


@dataclasses.dataclass(frozen=True)
class Softmax(Operation):
    """A function whose name begins with "log" is the logarithm."""

    dtypes: tuple = DTYPES
    sizes: tuple = SIZES
    Case = SoftmaxCase

    def axes(self, on_gpu):
        return {
            ("shape", "dim"): self.sizes,
            "dtype": self.dtypes,
            "out": (None, *self.dtypes),
            "x": tuple(LAYOUTS),
            "dy": tuple(LAYOUTS),
            "scale": (1.0, 30.0),
            "masked": (0.0, 0.3, 0.95),
        }

    def random_axes(self):
        from hypothesis import strategies as st

        sizes = st.lists(st.integers(0, 20), min_size=1, max_size=3)

        def along(shape):
            dims = st.integers(-len(shape), len(shape) - 1)
            return dims.map(lambda dim: (one_at_least(shape, dim), dim))

        return {("shape", "dim"): sizes.flatmap(along)}

    def possible(self, case, on_gpu):
        # One number, masked, would be a whole row of -inf.
        if case.x == "one number" and case.masked:
            return False
        # The interpreter stores a float64 value as bfloat16 wrongly.
        kinds = case.dtype, case.out
        return on_gpu or kinds != (torch.bfloat16, torch.float64)

    def tensors(self, case, device):
        filled = filler(device, case.seed)
        x = filled(case.x, case.shape, case.dtype, case.scale)
        if case.masked and x.numel():
            generator = torch.Generator().manual_seed(case.seed)
            hidden = torch.rand(case.shape, generator=generator) < case.masked
            hidden.select(case.dim, 0).fill_(False)
            x.masked_fill_(hidden.to(device), -torch.inf)
        dy = filled(case.dy, case.shape, case.out or case.dtype)
        return {"x": x, "dy": dy}

    def results(self, function, case, tensors):
        leaf = tensors["x"].detach().requires_grad_()
        y = function(leaf, case.dim, case.out)
        (dx,) = torch.autograd.grad(y, leaf, tensors["dy"])
        return {"y": y.detach(), "dx": dx}

    def arithmetic(self, case):
        return bounds.arithmetic(case.out or case.dtype)

    def exact(self, case, tensors, found):
        """y is what was returned, rounded: dx must belong to it."""
        kind, dim = case.out or case.dtype, case.dim
        x = tensors["x"].to(kind).double()
        dy, y = tensors["dy"].double(), found["y"].double()
        N = x.shape[dim] if x.dim() else 1
        below = x - x.amax(dim, keepdim=True) if x.numel() else x
        far = below.masked_fill(below == -torch.inf, 0).abs()
        share = torch.softmax(x, dim)
        # An exponent is off by its own size, and so is a sum of powers.
        spread = 1 + far + (share * far).sum(dim, keepdim=True)

        def total(t):
            return t.sum(dim, keepdim=True)

        least = 0.0
        if case.function.startswith("log"):
            want = torch.log_softmax(x, dim)
            power = y.exp()
            dx = dy - power * total(dy)
            size = spread + x.masked_fill(x == -torch.inf, 0).abs()
            sizes = dy.abs() + power * total(dy.abs()) * (
                1 + y.masked_fill(y == -torch.inf, 0).abs()
            )
        else:
            want = share
            dx = y * (dy - total(y * dy))
            size = share * spread
            factor = dy.abs() + total((y * dy).abs())
            sizes = y * factor
            if factor.numel():
                # A y below the normal numbers may count as 0, and the
                # interpreter takes one of bfloat16 for another.
                tiny = torch.finfo(torch.float32).smallest_normal
                least = tiny * factor.max().item()
        before = (case.out,) if case.out else ()
        return {
            "y": Expected(want, size, kind, N),
            # dx may have had the type of y.
            "dx": Expected(dx, sizes, case.dtype, N, before, least),
        }

    def mistakes(self):
        calls = (
            (TypeError, "int64", lambda x: (x.long(),)),
            (TypeError, "int32", lambda x: (x, -1, torch.int32)),
            (TypeError, "complex64", lambda x: (x.to(torch.complex64),)),
            (TypeError, "float8", lambda x: (x.to(torch.float8_e4m3fn),)),
            (ValueError, "input is on meta", lambda x: (x.to("meta"),)),
            (IndexError, "Dimension out of range", lambda x: (x, 2)),
        )

        def arguments(call):
            return lambda ones: call(ones(2, 8))

        return tuple(Mistake(e, words, arguments(f)) for e, words, f in calls)

    def refusable(self, function, device):
        x = torch.randn(2, 8, device=device, requires_grad=True)
        return function(x), x

    def huge(self, function, device, N, slack=5):
        """More than 2**31 elements, some of the first and last rows judged."""
        M, kind, some = 2**31 // N + slack, torch.bfloat16, max(2**27 // N, 1)
        x = torch.empty(M, N, dtype=kind, device=device)
        for part in x.split(some):
            part.normal_()
        x.requires_grad_()
        name = "log_softmax" if "log" in function.__name__ else "softmax"
        y = function(x)
        (dx,) = torch.autograd.grad(y, x, x.detach())
        case = SoftmaxCase(dtype=kind, function=name)
        for rows in slice(0, 64), slice(M - 64, M):
            part = x.detach()[rows]
            found = {"y": y.detach()[rows], "dx": dx[rows]}
            self.judge(case, {"x": part, "dy": part}, found)

    def model(self, function):
        """A layer of a model that computes so, and PyTorch's."""

        class Ours(torch.nn.Module):
            def __init__(self, N):
                super().__init__()

            def forward(self, x):
                return function(x)

        class Theirs(Ours):
            def forward(self, x):
                return F.softmax(x, -1)

        return Ours, Theirs


def one_at_least(shape, dim):
    """A row has a number."""
    shape = [*shape]
    shape[dim] = max(shape[dim], 1)
    return tuple(shape)
