"""The layer norm of a sum, and the sum:
function(x, residual, normalized_shape, weight, bias, eps=eps) gives y, s."""

import dataclasses

import torch

from conformance import bounds, layer_norm
from conformance.bounds import Expected
from conformance.layer_norm import HALF, SINGLE, LayerNormCase
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

# One rule on all pages: y has the type of x, and s that of the residual, which
# is that of x or a wider one.
STREAMS = (
    *((dtype, dtype) for dtype in DTYPES),
    (torch.float16, SINGLE),
    (torch.bfloat16, SINGLE),
    (torch.float16, torch.float64),
    (SINGLE, torch.float64),
)
NO_STREAMS = (
    (SINGLE, torch.float16),
    (SINGLE, torch.bfloat16),
    (torch.float64, SINGLE),
    (torch.float16, torch.bfloat16),  # neither holds the other
    (torch.bfloat16, torch.float16),
    (torch.float16, torch.int16),
    (torch.float16, torch.float8_e4m3fn),
)
ALL = (True, True, True, True)
WANTED = (
    ALL,
    (True, False, False, False),
    (False, True, False, False),
    (True, True, False, True),
    (True, False, True, False),
    (False, True, True, True),
)


@dataclasses.dataclass(frozen=True)
class AddNormCase(AnyCase):
    lead: tuple = (5,)  # leading dimensions
    shape: tuple = (40,)  # normalized shape
    dtype: torch.dtype = SINGLE
    stream: torch.dtype | None = None  # of the residual; None: as x
    weight_dtype: torch.dtype | None = None  # None: as x
    x: str = "contiguous"  # a layout, as the next four
    residual: str = "contiguous"
    dy: str = "contiguous"
    ds: str = "contiguous"
    parameters: str = "contiguous"
    weight: bool = True
    bias: bool = True
    wanted: tuple = ALL  # gradients of x, residual, weight, bias
    used: str = "ys"  # results that a gradient arrives from
    eps: float = 1e-5
    p: float = 0.0  # for pages with dropout: see AddNorm.share


@dataclasses.dataclass(frozen=True)
class AddNorm(Operation):
    """share(case, device), if given: what each element of x is multiplied by,
    e.g. by dropout, in float64 and of the shape of x."""

    streams: tuple = STREAMS  # types of x and of the residual
    sizes: tuple = layer_norm.SIZES
    large: tuple = layer_norm.LARGE  # on a GPU
    multiple: int = 1  # columns are a multiple of it
    share: object = None
    more: tuple = ()  # further axes of the page's own: (field, values)
    Case = AddNormCase
    named = "x", "residual", "weight", "bias"

    @staticmethod
    def at(M, N, dtype=SINGLE, stream=None, **more):
        """A case of a matrix."""
        return AddNormCase(
            lead=(M,), shape=(N,), dtype=dtype, stream=stream, **more
        )

    def axes(self, on_gpu):
        return {
            ("lead", "shape"): self.sizes + self.large * on_gpu,
            ("dtype", "stream"): self.streams,
            "x": OWN_LAYOUTS,
            "residual": OWN_LAYOUTS,
            "dy": tuple(LAYOUTS),
            "ds": tuple(LAYOUTS),
            "parameters": OWN_LAYOUTS,
            ("weight", "bias"): (
                (True, True), (True, False), (False, True), (False, False)
            ),
            "wanted": WANTED,
            "used": ("ys", "y", "s"),
            "eps": (1e-5, 0.1),
            **dict(self.more),
        }  # fmt: skip

    def random_axes(self):
        return layer_norm.LayerNorm(multiple=self.multiple).random_axes()

    def possible(self, case, on_gpu):
        # Something must want a gradient, or nothing arrives anywhere.
        return any(case.wanted[:2]) or "y" in case.used

    def arithmetic(self, case):
        return bounds.arithmetic(case.dtype, case.stream or case.dtype)

    def tensors(self, case, device):
        filled = filler(device, case.seed)
        full, stream = case.lead + case.shape, case.stream or case.dtype
        kind = case.weight_dtype or case.dtype
        parameters = case.parameters, case.shape, kind, 0.3, 0.5
        given = {
            "x": filled(case.x, full, case.dtype, 0.5),
            "residual": filled(case.residual, full, stream, 0.5, -2.3),
            "weight": filled(*parameters),
            "bias": filled(*parameters),
            "dy": filled(case.dy, full, case.dtype, 0.1),
            "ds": filled(case.ds, full, stream, 0.1),
        }
        given["weight"] = given["weight"] if case.weight else None
        given["bias"] = given["bias"] if case.bias else None
        return given

    def results(self, function, case, tensors):
        given = [tensors[name] for name in self.named]
        inputs = dict(zip(self.named, leaves(given, case.wanted), strict=True))
        x, residual, weight, bias = inputs.values()
        options = {"eps": case.eps}
        if self.share is not None:
            options["p"] = case.p
        pair = function(x, residual, case.shape, weight, bias, **options)
        outputs = dict(zip("ys", pair, strict=True))
        found = {name: t.detach() for name, t in outputs.items()}
        used = [n for n in case.used if outputs[n].requires_grad]
        arriving = [tensors["d" + name] for name in used]
        used = [outputs[name] for name in used]
        if used:
            found |= gradients(used, arriving, inputs)
        # From s alone nothing arrives at the parameters: None, or 0.
        return {
            name: t
            for name, t in found.items()
            if t is not None or "y" in case.used
        }

    def exact(self, case, tensors, found):
        """s is what was returned: the rest must belong to it."""
        x, residual = (tensors[n].double() for n in ("x", "residual"))
        share = 1.0
        if self.share is not None:
            share = self.share(case, x.device)
        total, s = x * share + residual, found["s"]
        given = LayerNormCase(lead=case.lead, shape=case.shape, eps=case.eps)
        weight, bias, dy = (tensors[n] for n in ("weight", "bias", "dy"))
        every = layer_norm.exact(given, s, weight, bias, dy)
        through, size, N = every["dx"]
        if "y" not in case.used:
            through, size = 0 * through, 0 * size
        if "s" in case.used:
            ds = tensors["ds"].double()
            through, size = through + ds, size + ds.abs()
        stream = tensors["residual"].dtype
        # dx may have had the type of the stream.
        before = (stream,) if stream != case.dtype else ()
        expected = {
            "y": Expected(*every["y"][:2], case.dtype, N),
            "s": Expected(total, (x * share).abs() + residual.abs(), stream),
            "dx": Expected(
                through * share, size * share, case.dtype, N, before
            ),
            "dresidual": Expected(through, size, stream, N),
        }
        for name in "weight", "bias":
            if (t := tensors[name]) is not None:
                value, terms, M = every["d" + name]
                if "y" not in case.used:
                    value, terms = 0 * value, 0 * terms
                expected["d" + name] = Expected(value, terms, t.dtype, M)
        asked = zip(self.named, case.wanted, strict=True)
        missing = {"d" + name for name, want in asked if not want}
        if "y" not in case.used:
            missing |= {"dweight", "dbias"} - set(found)
        return {n: e for n, e in expected.items() if n not in missing}

    def mistakes(self):
        n = 8 * self.multiple
        kind, value = TypeError, ValueError
        calls = (
            (kind, r"\bx\b.*int32", lambda x, w: (x.int(), x, n)),
            (kind, r"\bresidual\b", lambda x, w: (x, x.long(), n)),
            (kind, r"\bweight\b", lambda x, w: (x, x, n, w.int())),
            (value, r"\bx\b.*normalized_shape", lambda x, w: (x, x, n - 1)),
            (value, "normalized_shape", lambda x, w: (x, x, ())),
            (value, r"\bx\b.*normalized_shape", lambda x, w: (
                x[:, :0], x[:, :0], 0)),
            (value, r"\bresidual\b.*2, 4", lambda x, w: (x, x[:, :4], n)),
            (value, r"\bresidual\b", lambda x, w: (x, w, n)),
            (value, r"\bweight\b", lambda x, w: (x, x, n, w[1:])),
            (value, r"\bbias\b", lambda x, w: (x, x, n, None, x[:, 4:])),
            (value, r"\bresidual\b is on", lambda x, w: (x, x.to("meta"), n)),
        )  # fmt: skip

        def arguments(call):
            return lambda ones: call(ones(2, n), ones(n))

        def stream(dtype, other):
            return lambda ones: (ones(2, n).to(dtype), ones(2, n).to(other), n)

        return (
            *(Mistake(e, words, arguments(f)) for e, words, f in calls),
            *(
                Mistake(kind, f"residual.*{str(other)[6:]}", stream(d, other))
                for d, other in NO_STREAMS
            ),
        )

    def refusable(self, function, device):
        x = torch.randn(2, 8 * self.multiple, device=device)
        x.requires_grad_()
        return function(x, x, x.shape[1:])[0], x

    def huge(self, function, device, N, slack=5):
        case = self.at(5, N, HALF, wanted=(True, False, False, False))
        huge(self, function, case, device, slack)

    def model(self, function):
        """A layer of a model that computes so, and PyTorch's."""

        class Norm(torch.nn.LayerNorm):
            def forward(self, x):
                shape, w, b = self.normalized_shape, self.weight, self.bias
                y, s = function(x, x, shape, w, b, eps=self.eps)
                return y + s

        class Theirs(torch.nn.LayerNorm):
            def forward(self, x):
                s = x + x
                return super().forward(s) + s

        return Norm, Theirs


def huge(operation, function, case, device, slack):
    """More than 2**31 elements, some of the first and last rows judged."""
    (N,) = case.shape
    M = 2**31 // N + slack
    x = torch.empty(M, N, dtype=case.dtype, device=device)
    for part in x.split(2**27 // N):
        part.normal_()
    few = operation.tensors(case, device)
    parameters = {name: few[name] for name in operation.named[2:]}
    leaf = x.detach().requires_grad_()
    residual = None if operation.alone else x
    results = function(
        leaf, residual, case.shape, *parameters.values(), eps=case.eps
    )
    named = zip(("y", "s"), results, strict=True)
    outputs = {name: t for name, t in named if t is not None}
    arriving = [x for _ in outputs]
    (dx,) = torch.autograd.grad(list(outputs.values()), leaf, arriving)
    for rows in slice(0, 64), slice(M - 64, M):
        given = dict.fromkeys(("x", "residual", "dy", "ds"), x[rows])
        found = {name: t.detach()[rows] for name, t in outputs.items()}
        found["dx"] = dx[rows]
        operation.judge(case, {**given, **parameters}, found)
