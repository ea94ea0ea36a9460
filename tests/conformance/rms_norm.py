"""RMS norm, alone or of a sum: function(x, residual, normalized_shape, weight,
**options) gives y, s; without a residual s is None."""

import dataclasses

import torch

from conformance import add_norm, bounds, layer_norm
from conformance.add_norm import STREAMS
from conformance.bounds import Expected
from conformance.layer_norm import HALF, SINGLE
from conformance.memory import LAYOUTS
from conformance.operation import (
    OWN_LAYOUTS,
    AnyCase,
    Operation,
    filler,
    gradients,
    leaves,
)
from conformance.page_files import Mistake

ALL = (True, True, True)
# Of x, of the residual and of the weight.
TYPES = (
    *((dtype, stream, None) for dtype, stream in STREAMS),
    *((half, half, SINGLE) for half in (HALF, torch.bfloat16)),
    *((half, SINGLE, SINGLE) for half in (HALF, torch.bfloat16)),
)


@dataclasses.dataclass(frozen=True)
class RmsNormCase(AnyCase):
    lead: tuple = (17,)  # leading dimensions
    shape: tuple = (129,)  # normalized shape
    dtype: torch.dtype = SINGLE
    stream: torch.dtype | None = None  # of residual, s and ds; None: as x
    weight_dtype: torch.dtype | None = None  # None: as x
    fused: bool = True  # with a residual
    x: str = "contiguous"  # a layout, as the next four
    residual: str = "contiguous"
    dy: str = "contiguous"
    ds: str = "contiguous"
    parameters: str = "contiguous"
    weight: bool = True
    wanted: tuple = ALL  # gradients of x, residual, weight
    used: str = "ys"  # results that a gradient arrives from
    eps: float = 1e-6
    offset: float = 0.0
    casting: str | None = None  # None: rounded once, at the end


@dataclasses.dataclass(frozen=True)
class RmsNorm(Operation):
    types: tuple = TYPES
    sizes: tuple = layer_norm.SIZES
    large: tuple = layer_norm.LARGE  # on a GPU
    more: tuple = ()  # further axes of the page's own: (field, values)
    alone: bool = False  # the page has no norm of a sum
    Case = RmsNormCase
    named = "x", "residual", "weight"

    @staticmethod
    def at(M, N, dtype=SINGLE, **more):
        """A case of a matrix."""
        return RmsNormCase(lead=(M,), shape=(N,), dtype=dtype, **more)

    def usual(self, **fields):
        return self.Case(fused=not self.alone, **fields)

    def case(self, row):
        case = super().case(row)
        return dataclasses.replace(case, fused=False) if self.alone else case

    def axes(self, on_gpu):
        return {
            ("lead", "shape"): self.sizes + self.large * on_gpu,
            ("dtype", "stream", "weight_dtype"): self.types,
            **self.of_a_sum(
                fused=(True, False),
                residual=OWN_LAYOUTS,
                ds=tuple(LAYOUTS),
                used=("ys", "y", "s"),
            ),
            "x": OWN_LAYOUTS,
            "dy": tuple(LAYOUTS),
            "parameters": OWN_LAYOUTS,
            "weight": (True, False),
            "wanted": (
                ALL,
                (True, False, False),
                (False, True, False),
                (False, False, True),
                (False, True, True),
                (True, False, True),
            ),
            "eps": (1e-6, 0.1, 1e-12),
            **dict(self.more),
        }

    def of_a_sum(self, **axes):
        """What only a page with a norm of a sum has."""
        return {} if self.alone else axes

    def random_axes(self):
        return layer_norm.LayerNorm().random_axes()

    def possible(self, case, on_gpu):
        """A gradient must arrive somewhere."""
        if not case.fused and case.used == "s":
            return False
        x, residual, weight = case.wanted
        weight = weight and case.weight and "y" in case.used
        return x or (residual and case.fused) or weight

    def arithmetic(self, case):
        return bounds.arithmetic(case.dtype)

    def tensors(self, case, device):
        filled = filler(device, case.seed)
        full, stream = case.lead + case.shape, case.stream or case.dtype
        factor = case.weight_dtype or case.dtype
        residual = filled(case.residual, full, stream, 1.0, 0.5)
        weight = filled(case.parameters, case.shape, factor, 0.3, 0.5)
        return {
            "x": filled(case.x, full, case.dtype, 1.0, 0.5),
            "residual": residual if case.fused else None,
            "weight": weight if case.weight else None,
            "dy": filled(case.dy, full, case.dtype, 0.1),
            "ds": filled(case.ds, full, stream, 0.1) if case.fused else None,
        }

    def results(self, function, case, tensors):
        given = [tensors[name] for name in self.named]
        inputs = dict(zip(self.named, leaves(given, case.wanted), strict=True))
        x, residual, weight = inputs.values()
        options = {"eps": case.eps}
        if case.offset:  # not every page has it
            options["offset"] = case.offset
        if case.casting:
            options["casting"] = case.casting
        y, s = function(x, residual, case.shape, weight, **options)
        outputs = {"y": y} if residual is None else {"y": y, "s": s}
        found = {name: t.detach() for name, t in outputs.items()}
        used = [n for n in outputs if n in case.used]
        arriving = [tensors["d" + name] for name in used]
        used = [outputs[name] for name in used]
        found |= gradients(used, arriving, inputs)
        return {
            name: t
            for name, t in found.items()
            if t is not None or "y" in case.used
        }

    def exact(self, case, tensors, found):
        """s is what was returned: the rest must belong to it."""
        expected = {}
        x, dy = tensors["x"].double(), tensors["dy"].double()
        n = len(case.shape)
        dims, rows = tuple(range(-n, 0)), tuple(range(x.dim() - n))
        N = torch.Size(case.shape).numel()
        M = max(x.numel() // N, 1)
        stream, before = case.stream or case.dtype, ()
        if case.fused:
            residual = tensors["residual"].double()
            size = x.abs() + residual.abs()
            expected["s"] = Expected(x + residual, size, stream)
            x = found["s"].double()
            # dx may have had the type of the stream.
            before = (stream,) if stream != case.dtype else ()
        rstd = ((x**2).mean(dims, keepdim=True) + case.eps) ** -0.5
        x_hat = x * rstd
        w = size_w = 1.0
        if case.weight:
            weight = tensors["weight"].double()
            w, size_w = case.offset + weight, abs(case.offset) + weight.abs()
        wdy = w * dy
        c = (x_hat * wdy).mean(dims, keepdim=True)
        dx = (wdy - x_hat * c) * rstd
        sizes = (x_hat * wdy).abs().mean(dims, keepdim=True)
        size = ((size_w * dy).abs() + x_hat.abs() * sizes) * rstd
        if "y" not in case.used:
            dx, size = 0 * dx, 0 * size
        if case.fused and "s" in case.used:
            ds = tensors["ds"].double()
            dx, size = dx + ds, size + ds.abs()
        y = Expected(x_hat * w, (x_hat * size_w).abs(), case.dtype, N)
        expected = {"y": y, **expected}
        if case.wanted[0]:
            expected["dx"] = Expected(dx, size, case.dtype, N, before)
        if case.wanted[1] and case.fused:
            expected["dresidual"] = Expected(dx, size, stream, N)
        if case.wanted[2] and case.weight:
            dw = dy * x_hat
            value, size = (t.sum(rows) if rows else t for t in (dw, dw.abs()))
            if "y" not in case.used:
                value, size = 0 * value, 0 * size
            if "y" in case.used or "dweight" in found:
                kind = tensors["weight"].dtype
                expected["dweight"] = Expected(value, size, kind, M)
        return expected

    def mistakes(self):
        kind, value = TypeError, ValueError
        calls = (
            (kind, r"\bx is .*int32", lambda x, w: (x.int(), 8)),
            (kind, r"\bweight is .*int32", lambda x, w: (x, 8, w.int())),
            (value, r"of x.*normalized_shape", lambda x, w: (x, 7)),
            (value, "0 columns", lambda x, w: (x, ())),
            (value, "normalized_shape", lambda x, w: (w, (2, 8))),
            (value, "0 columns", lambda x, w: (x[:, :0], 0)),
            (value, r"\bweight\b", lambda x, w: (x, 8, w[1:])),
            (value, "eps", lambda x, w: (x, 8, None, -1e-5)),
            (value, "eps", lambda x, w: (x, 8, None, float("nan"))),
            (value, "x is on meta", lambda x, w: (x.to("meta"), 8)),
            (value, "weight is", lambda x, w: (x, 8, w.to("meta"))),
        )

        def arguments(call, fused):
            def given(ones):
                x, *others = call(ones(2, 8), ones(8))
                return (x, torch.empty_like(x) if fused else None, *others)

            return given

        residuals = (
            (kind, lambda x: x.int()),
            (value, lambda x: x[0]),
            (value, lambda x: x.to("meta")),
        )

        def with_residual(change):
            return lambda ones: (ones(2, 8), change(ones(2, 8)), 8)

        alone = [
            Mistake(e, words, arguments(f, False)) for e, words, f in calls
        ]
        if self.alone:
            return tuple(alone)
        fused = [
            Mistake(e, words, arguments(f, True)) for e, words, f in calls
        ]
        return (
            *(one for pair in zip(alone, fused, strict=True) for one in pair),
            *(Mistake(e, "residual", with_residual(f)) for e, f in residuals),
        )

    def refusable(self, function, device):
        x = torch.randn(2, 8, device=device, requires_grad=True)
        return function(x, None, (8,), None)[0], x

    def huge(self, function, device, N, slack=5):
        case = self.at(
            5, N, HALF, wanted=(True, False, False), fused=not self.alone
        )
        add_norm.huge(self, function, case, device, slack)

    def model(self, function):
        """A layer of a model that computes so, and PyTorch's."""
        if self.alone:

            class Alone(torch.nn.RMSNorm):
                def forward(self, x):
                    shape, eps = self.normalized_shape, self.eps
                    return function(x, None, shape, self.weight, eps=eps)[0]

            return Alone, torch.nn.RMSNorm

        class Norm(torch.nn.RMSNorm):
            def forward(self, x):
                shape, eps = self.normalized_shape, self.eps
                y, s = function(x, x, shape, self.weight, eps=eps)
                return y + s

        class Theirs(torch.nn.RMSNorm):
            def forward(self, x):
                s = x + x
                return super().forward(s) + s

        return Norm, Theirs


def both_norms(page):
    """A page's norm alone, and its norm of a sum, as one function."""

    def function(x, residual, *args, **options):
        if residual is None:
            return page.rms_norm(x, *args, **options), None
        return page.add_rms_norm(x, residual, *args, **options)

    return function
