"""Layer norm: function(x, normalized_shape, weight, bias, eps)."""

import dataclasses
import math

import torch

from conformance import bounds
from conformance.bounds import Expected
from conformance.memory import LAYOUTS
from conformance.operation import (
    DTYPES,
    OWN_LAYOUTS,
    AnyCase,
    Operation,
    filler,
    gradients,
    leaves,
)
from conformance.page_files import Mistake

HALF, SINGLE = torch.float16, torch.float32
EVERY = (True, True, True)
# Leading dimensions and the normalized shape.
SIZES = (
    ((5,), (33,)),
    ((2, 3), (4, 7)),
    ((), (9,)),
    ((2, 0), (3, 5)),
    ((17,), (3,)),
    ((2, 1, 3), (129,)),
    ((1,), (1,)),
)
# And on a GPU.
LARGE = (((20, 30), (40, 25)), ((1000,), (2,)), ((130,), (1023,)))
WANTED = (
    EVERY,
    (True, False, False),
    (False, True, False),
    (False, False, True),
    (False, True, True),
    (False, False, False),
)


@dataclasses.dataclass(frozen=True)
class LayerNormCase(AnyCase):
    lead: tuple = (17,)  # leading dimensions
    shape: tuple = (129,)  # normalized shape
    dtype: torch.dtype = SINGLE
    weight_dtype: torch.dtype | None = None  # None: as x
    bias_dtype: torch.dtype | None = None  # None: as the weight
    x: str = "contiguous"  # a layout, as the next two
    dy: str = "contiguous"
    parameters: str = "contiguous"
    weight: bool = True
    bias: bool = True
    wanted: tuple = EVERY  # requires_grad of x, weight, bias
    eps: float = 1e-5
    mean: float = -2.3  # of x
    scale: float = 0.5


def at(M, N, dtype=SINGLE, **more):
    """A case of a matrix."""
    return LayerNormCase(lead=(M,), shape=(N,), dtype=dtype, **more)


WIDTHS = (1000, 1023, 4096, 4608, 16384)


def full_size(functions, widths=WIDTHS, double=WIDTHS):
    """Cases for a GPU: usual widths, and others, in all types. There are more
    rows than programs, but few: random numbers take most of the time."""
    kinds = (
        (1151, HALF, widths),
        (300, torch.bfloat16, widths),
        (300, SINGLE, widths),
        (300, torch.float64, double),
    )
    return tuple(
        at(M, N, dtype, function=function)
        for M, dtype, columns in kinds
        for N in columns
        for function in functions
    )


@dataclasses.dataclass(frozen=True)
class LayerNorm(Operation):
    dtypes: tuple = DTYPES  # that are taken
    sizes: tuple = SIZES  # of the table
    large: tuple = LARGE  # and of the table on a GPU
    multiple: int = 1  # columns are a multiple of it
    most: int = 2**20  # columns of a random case
    # Whether x on "meta" is refused without a GPU, too: a page that asks for
    # the number of the device takes it for the CPU there.
    meta: bool = True
    Case = LayerNormCase
    at = staticmethod(at)
    named = "x", "weight", "bias"

    def usual(self, **fields):
        return at(17, 129 // self.multiple * self.multiple, **fields)

    def axes(self, on_gpu):
        return {
            ("lead", "shape"): self.sizes + self.large * on_gpu,
            "dtype": self.dtypes,
            "weight_dtype": (None, *self.dtypes),
            "bias_dtype": (None, *self.dtypes),
            "x": OWN_LAYOUTS,
            "dy": tuple(LAYOUTS),
            "parameters": OWN_LAYOUTS,
            ("weight", "bias"): (
                (True, True), (True, False), (False, True), (False, False)
            ),
            "wanted": WANTED,
            "eps": (1e-5, 0.1, 1e-12),
        }  # fmt: skip

    def random_axes(self):
        from hypothesis import strategies as st

        lead = st.lists(st.integers(0, 5), max_size=3).map(tuple)
        sizes = st.lists(st.integers(1, 13), min_size=1, max_size=3)
        shape = sizes.map(lambda s: (*s[:-1], s[-1] * self.multiple))
        shape = shape.filter(lambda s: math.prod(s) <= self.most)
        return {("lead", "shape"): st.tuples(lead, shape)}

    def possible(self, case, on_gpu):
        if on_gpu:
            return True
        # The interpreter stores a float64 value as bfloat16 wrongly.
        weight = case.weight_dtype or case.dtype
        kinds = weight, case.bias_dtype or weight
        return case.dtype != torch.float64 or torch.bfloat16 not in kinds

    def tensors(self, case, device):
        filled = filler(device, case.seed)
        full = case.lead + case.shape
        weight = case.weight_dtype or case.dtype
        bias = case.bias_dtype or weight
        parameters = case.parameters, case.shape
        given = {
            "x": filled(case.x, full, case.dtype, case.scale, case.mean),
            "dy": filled(case.dy, full, case.dtype, 0.1),
            "weight": filled(*parameters, weight, 0.3, 0.5),
            "bias": filled(*parameters, bias, 0.3, 0.5),
        }
        given["weight"] = given["weight"] if case.weight else None
        given["bias"] = given["bias"] if case.bias else None
        return {name: given[name] for name in (*self.named, "dy")}

    def results(self, function, case, tensors):
        given = [tensors[name] for name in self.named]
        x, weight, bias = leaves(given, case.wanted)
        y = function(x, case.shape, weight, bias, case.eps)
        inputs = dict(zip(self.named, (x, weight, bias), strict=True))
        return {"y": y.detach(), **gradients(y, tensors["dy"], inputs)}

    def exact(self, case, tensors, found):
        every = exact(case, *(tensors[name] for name in (*self.named, "dy")))
        kinds = {
            "y": tensors["x"],
            **{
                "d" + name: tensors[name]
                for name, want in zip(self.named, case.wanted, strict=True)
                if want and tensors[name] is not None
            },
        }
        return {
            name: Expected(*every[name][:2], like.dtype, every[name][2])
            for name, like in kinds.items()
        }

    def mistakes(self):
        """Wrong types, shapes and devices: the argument is named."""
        n = 8 * self.multiple
        kind, value = TypeError, ValueError
        calls = (
            (kind, r"\bx\b.*int32", lambda x, w: (x.int(), (n,))),
            (kind, r"\bweight\b", lambda x, w: (x, (n,), w.int())),
            (kind, r"\bbias\b", lambda x, w: (x, (n,), None, w.bool())),
            (value, rf"\bx\b.*{n - 1}", lambda x, w: (x, (n - 1,))),
            (value, r"\bx\b|normalized_shape", lambda x, w: (x, ())),
            (value, r"\bx\b|normalized_shape", lambda x, w: (w, (2, n))),
            (value, r"\bx\b|normalized_shape", lambda x, w: (x[:, :0], (0,))),
            (value, r"\bweight\b", lambda x, w: (x, (n,), w[1:])),
            (value, r"\bbias\b", lambda x, w: (x, (n,), None, x[:, 4:])),
            (value, r"\bweight\b", lambda x, w: (x, (n,), w.to("meta"))),
            (value, r"\bbias\b", lambda x, w: (x, (n,), w, w.to("meta"))),
        )
        if self.meta or torch.cuda.is_available():
            nowhere = value, r"\bx\b", lambda x, w: (x.to("meta"), (n,))
            calls = *calls, nowhere

        def arguments(call):
            return lambda ones: call(ones(2, n), ones(n))

        return tuple(Mistake(e, words, arguments(f)) for e, words, f in calls)

    def refusable(self, function, device):
        """A result and the x that it depends on twice."""
        x = torch.randn(2, 8 * self.multiple, device=device)
        x.requires_grad_()
        return function(x, x.shape[1:]), x

    def huge(self, function, device, N, slack=5):
        """More than 2**31 elements, judged some rows at a time."""
        M, kind, some = 2**31 // N + slack, HALF, 2**26 // N
        x = torch.empty(M, N, dtype=kind, device=device)
        dy = torch.empty_like(x)
        for part in *x.split(some), *dy.split(some):
            part.normal_()
        weight, bias = torch.rand(2, N, dtype=kind, device=device)
        given = leaves((x, weight, bias), EVERY)
        y = function(given[0], (N,), *given[1:])
        dx, *sums = torch.autograd.grad(y, given, dy)
        totals = {name: [0.0, 0.0] for name in ("dweight", "dbias")}
        case = LayerNormCase(shape=(N,), dtype=kind)
        parts = (t.split(some) for t in (x, dy, y.detach(), dx))
        for a, b, c, d in zip(*parts, strict=True):
            every = exact(case, a, weight, bias, b)
            for name, got in ("y", c), ("dx", d):
                value, size, count = every[name]
                expected = Expected(value, size, kind, count)
                bounds.compare(name, got, expected, SINGLE)
            for name, total in totals.items():
                total[0] = total[0] + every[name][0]
                total[1] = total[1] + every[name][1]
        for (name, total), got in zip(totals.items(), sums, strict=True):
            bounds.compare(name, got, Expected(*total, kind, M), SINGLE)

    def model(self, function):
        """A layer of a model that computes so, and PyTorch's."""

        class Norm(torch.nn.LayerNorm):
            def forward(self, x):
                shape, w, b = self.normalized_shape, self.weight, self.bias
                return function(x, shape, w, b, self.eps)

        return Norm, torch.nn.LayerNorm


def exact(case, x, weight, bias, dy):
    """For y and each gradient: float64 result, size of the terms in each
    element, and how many were added up."""

    def wide(tensor):
        return None if tensor is None else tensor.detach().double()

    x, weight, bias, dy = map(wide, (x, weight, bias, dy))
    n = len(case.shape)
    dims = tuple(range(-n, 0))
    rows = tuple(range(x.dim() - n))
    N = torch.Size(case.shape).numel()
    M = max(x.numel() // N, 1)

    def mean(t):
        return t.mean(dims, keepdim=True)

    middle = mean(x)
    rstd = (mean((x - middle) ** 2) + case.eps) ** -0.5
    x_hat = (x - middle) * rstd
    # What subtracting the mean leaves has the errors of what it is taken of.
    size_hat = (x.abs() + mean(x.abs())) * rstd
    wdy = dy if weight is None else weight * dy
    c1, c2 = mean(x_hat * wdy), mean(wdy)
    y, size = x_hat, size_hat
    if weight is not None:
        y, size = y * weight, size * weight.abs()
    if bias is not None:
        y, size = y + bias, size + bias.abs()
    sizes = wdy.abs() + mean(wdy.abs()) + size_hat * c1.abs()
    sizes = (sizes + x_hat.abs() * mean(size_hat * wdy.abs())) * rstd
    return {
        "y": (y, size, N),
        "dx": ((wdy - x_hat * c1 - c2) * rstd, sizes, N),
        "dweight": (
            _sum(dy * x_hat, rows), _sum(dy.abs() * size_hat, rows), M
        ),
        "dbias": (_sum(dy, rows), _sum(dy.abs(), rows), M),
    }  # fmt: skip


def _sum(tensor, dims):
    return tensor.sum(dims) if dims else tensor
