"""Attention: function(query, key, value, scale=...), four dimensions each."""

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

HALF, BRAIN = torch.float16, torch.bfloat16
EVERY = (True, True, True)
# Batch and heads, queries, keys, head dimension.
SIZES = (
    ((2, 3), 37, 51, 32),
    ((1, 1), 1, 1, 16),
    ((1, 2), 64, 64, 64),
    ((1, 1), 130, 3, 16),
    ((2, 1), 5, 129, 128),
    ((1, 1), 17, 200, 16),
    ((0, 1), 4, 4, 16),
    ((2, 2), 0, 5, 16),
)
WANTED = (
    EVERY,
    (True, False, False),
    (False, True, False),
    (False, False, True),
    (False, False, False),
)


@dataclasses.dataclass(frozen=True)
class AttentionCase(AnyCase):
    lead: tuple = (2, 2)  # batch and heads
    queries: int = 37
    keys: int = 51
    D: int = 32
    dtype: torch.dtype = HALF
    query: str = "contiguous"  # a layout, as the next three
    key: str = "contiguous"
    value: str = "contiguous"
    dy: str = "contiguous"
    wanted: tuple = EVERY  # requires_grad of query, key, value
    scale: float | None = None
    large: float = 1.0  # queries are so much larger


@dataclasses.dataclass(frozen=True)
class Attention(Operation):
    dtypes: tuple = (HALF, BRAIN)
    sizes: tuple = SIZES
    Case = AttentionCase

    def axes(self, on_gpu):
        return {
            ("lead", "queries", "keys", "D"): self.sizes,
            "dtype": self.dtypes,
            "query": tuple(LAYOUTS),
            "key": tuple(LAYOUTS),
            "value": tuple(LAYOUTS),
            "dy": tuple(LAYOUTS),
            "wanted": WANTED,
            "scale": (None, 0.3, 2.0),
            "large": (1.0, 30.0),
        }

    def random_axes(self):
        from hypothesis import strategies as st

        short = st.integers(0, 3)
        sizes = st.tuples(
            st.tuples(short, short),
            st.integers(0, 150),
            st.integers(1, 150),
            st.sampled_from([16, 32, 64]),
        )
        return {("lead", "queries", "keys", "D"): sizes}

    def tensors(self, case, device):
        filled = filler(device, case.seed)
        shapes = {
            "query": (*case.lead, case.queries, case.D),
            "key": (*case.lead, case.keys, case.D),
            "value": (*case.lead, case.keys, case.D),
            "dy": (*case.lead, case.queries, case.D),
        }
        return {
            name: filled(
                getattr(case, name),
                shape,
                case.dtype,
                case.large if name == "query" else 1.0,
            )
            for name, shape in shapes.items()
        }

    def results(self, function, case, tensors):
        names = ("query", "key", "value")
        given = leaves([tensors[name] for name in names], case.wanted)
        y = function(*given, scale=case.scale)
        found = {"y": y.detach()}
        inputs = dict(zip(names, given, strict=True))
        return found | gradients([y], [tensors["dy"]], inputs)

    def exact(self, case, tensors, found):
        """dquery, dkey and dvalue belong to the y that was returned."""
        q, k, v, dy = (t.double() for t in tensors.values())
        y = found["y"].double()
        scale = case.D**-0.5 if case.scale is None else case.scale
        # Powers and ds are operands of products, so they are rounded to the
        # type of the inputs: by half a unit, or a unit where the interpreter
        # cuts, and beside 0 by the smallest number. A power below the normal
        # numbers of float32 may count as 0. Of sizes that count in units of
        # float32:
        unit = torch.finfo(torch.float32).eps * HALF_UNITS
        operand = torch.finfo(case.dtype).eps / unit
        kind = torch.finfo(case.dtype)
        tiny = max(
            kind.smallest_normal * kind.eps,
            torch.finfo(torch.float32).smallest_normal,
        )
        tiny /= unit
        score = scale * q @ k.mT
        p = score.softmax(-1)
        # An exponent is off by its size: that of the terms of a score.
        terms = 1 + scale * q.abs() @ k.mT.abs()
        off = terms + (p * terms).sum(-1, keepdim=True)
        delta = (dy * y).sum(-1, keepdim=True)
        dp = dy @ v.mT
        ds = p * (dp - delta)
        # The size of what is added up for ds, and how far p is off.
        around = dy.abs() @ v.mT.abs() + (dy * y).abs().sum(-1, keepdim=True)
        ds_size = p * around * off + (operand * ds.abs() + tiny)
        if case.dtype == BRAIN and q.device.type == "cpu":
            # There y is rounded after the kernel, and delta before.
            ds_size += operand * p * (dy * y).abs().sum(-1, keepdim=True)
        p_size = p * off + (operand * p + tiny)
        want = {
            "y": (p @ v, p_size @ v.abs()),
            "dquery": (scale * ds @ k, scale * ds_size @ k.abs()),
            "dkey": (scale * ds.mT @ q, scale * ds_size.mT @ q.abs()),
            "dvalue": (p.mT @ dy, p_size.mT @ dy.abs()),
        }
        asked = dict(
            zip(("dquery", "dkey", "dvalue"), case.wanted, strict=True)
        )
        # y may be off by its rounding, too, and delta with it.
        return {
            name: Expected(value, size, case.dtype, case.queries + case.keys)
            for name, (value, size) in want.items()
            if asked.get(name, True)
        }

    def mistakes(self):
        def plain(ones, **changes):
            shapes = {"query": (1, 2, 8, 16), "key": (1, 2, 9, 16)}
            shapes["value"] = shapes["key"]
            shapes |= changes
            return [ones(*shape, dtype=HALF) for shape in shapes.values()]

        def of(change):
            return lambda ones: change(*plain(ones))

        def shaped(**changes):
            return lambda ones: plain(ones, **changes)

        refused = (
            (TypeError, "float32", of(lambda *t: [u.float() for u in t])),
            (TypeError, "int64", of(lambda *t: [u.long() for u in t])),
            (
                TypeError,
                "key has torch.bfloat16",
                of(lambda q, k, v: (q, k.bfloat16(), v)),
            ),
            (
                ValueError,
                "key is on meta",
                of(lambda q, k, v: (q, k.to("meta"), v)),
            ),
            (
                ValueError,
                "query has 3 dimensions",
                of(lambda q, k, v: (q[0], k, v)),
            ),
            (
                ValueError,
                "head dimension is 24",
                of(lambda *t: [u.repeat(1, 1, 1, 3)[..., :24] for u in t]),
            ),
            (
                ValueError,
                "head dimension of key is 32",
                shaped(key=(1, 2, 9, 32)),
            ),
            (
                ValueError,
                "head dimension of value is 32",
                shaped(value=(1, 2, 9, 32)),
            ),
            (ValueError, "key has 2 sequences", shaped(key=(2, 2, 9, 16))),
            (ValueError, "key has 1 heads", shaped(key=(1, 1, 9, 16))),
            (ValueError, "value has 8 rows", shaped(value=(1, 2, 8, 16))),
            (
                ValueError,
                "there is no key",
                shaped(key=(1, 2, 0, 16), value=(1, 2, 0, 16)),
            ),
        )
        scales = (0.0, -1.0, float("nan"), float("inf"))
        return (
            *(Mistake(*one) for one in refused),
            *(
                Mistake(ValueError, "scale is", plain, {"scale": scale})
                for scale in scales
            ),
        )

    def refusable(self, function, device):
        q, k, v = (
            torch.randn(1, 1, 8, 16, device=device).half().requires_grad_()
            for _ in range(3)
        )
        return function(q, k, v), q

    def huge(self, function, device, N, slack=1):
        """More than 2**31 elements; the first and the last head are judged."""
        heads = 2**31 // (N * 64) + slack
        given = [
            torch.empty(1, heads, N, 64, dtype=HALF, device=device).normal_()
            for _ in range(4)
        ]
        q, k, v = (t.requires_grad_() for t in given[:3])
        y = function(q, k, v)
        grads = torch.autograd.grad(y, (q, k, v), given[3])
        case = AttentionCase(lead=(1, 1), queries=N, keys=N, D=64)
        names = ("dquery", "dkey", "dvalue")
        for head in slice(0, 1), slice(heads - 1, heads):
            tensors = {
                name: t.detach()[:, head]
                for name, t in zip(
                    ("query", "key", "value", "dy"), given, strict=True
                )
            }
            found = {"y": y.detach()[:, head]} | {
                name: t[:, head] for name, t in zip(names, grads, strict=True)
            }
            self.judge(case, tensors, found)

    def model(self, function):
        """A layer of a model that computes so, and PyTorch's; one head of 64
        numbers, in 16 bits."""

        class Ours(torch.nn.Module):
            def __init__(self, N):
                super().__init__()
                self.to_qkv = torch.nn.Linear(N, 192)
                self.back = torch.nn.Linear(64, N)

            def attend(self, q, k, v):
                return function(q, k, v)

            def forward(self, x):
                qkv = self.to_qkv(x).half()[:, None]
                y = self.attend(*qkv.split(64, dim=-1))
                return x + self.back(y[:, 0].float())

        class Theirs(Ours):
            def attend(self, q, k, v):
                return F.scaled_dot_product_attention(q, k, v)

        return Ours, Theirs

    def arithmetic(self, case):
        return bounds.arithmetic(torch.float32)
