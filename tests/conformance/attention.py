"""Attention: function(query, key, value, scale=...), four dimensions each.

AnyAttention also takes is_causal and enable_gqa, float32, any head dimension
from 1 to 256, and no keys at all.
"""

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
    lead: tuple = (2, 2)  # batch and heads of the keys
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
    causal: bool = False
    group: int = 1  # heads of queries for each head of the keys


def plain(ones, **changes):
    """Arguments that are right, but for the shapes that change."""
    shapes = {"query": (1, 2, 8, 16), "key": (1, 2, 9, 16)}
    shapes["value"] = shapes["key"]
    shapes |= changes
    return [ones(*shape, dtype=HALF) for shape in shapes.values()]


def of(change):
    return lambda ones: change(*plain(ones))


def shaped(**changes):
    return lambda ones: plain(ones, **changes)


def float32(tensors):
    return [t.float() for t in tensors]


REFUSED = (
    Mistake(TypeError, "int64", of(lambda *t: [u.long() for u in t])),
    Mistake(
        TypeError,
        "key has torch.bfloat16",
        of(lambda q, k, v: (q, k.bfloat16(), v)),
    ),
    Mistake(
        TypeError,
        "value has torch.float32",
        of(lambda q, k, v: (q, k, v.float())),
    ),
    Mistake(
        ValueError, "key is on meta", of(lambda q, k, v: (q, k.to("meta"), v))
    ),
    Mistake(
        ValueError, "query has 3 dimensions", of(lambda q, k, v: (q[0], k, v))
    ),
    Mistake(
        ValueError,
        "head dimension of key is 32",
        shaped(key=(1, 2, 9, 32)),
    ),
    Mistake(
        ValueError,
        "head dimension of value is 32",
        shaped(value=(1, 2, 9, 32)),
    ),
    Mistake(ValueError, "key has 2 sequences", shaped(key=(2, 2, 9, 16))),
    Mistake(ValueError, "value has 8 rows", shaped(value=(1, 2, 8, 16))),
    *(
        Mistake(ValueError, "scale is", plain, {"scale": scale})
        for scale in (0.0, -1.0, float("nan"), float("inf"))
    ),
)


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
        batch, heads = case.lead
        of_queries = batch, heads * case.group, case.queries, case.D
        of_keys = batch, heads, case.keys, case.D
        shapes = {
            "query": of_queries,
            "key": of_keys,
            "value": of_keys,
            "dy": of_queries,
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
        how = {"scale": case.scale}
        if case.causal:
            how["is_causal"] = True
        if case.group > 1:
            how["enable_gqa"] = True
        y = function(*given, **how)
        found = {"y": y.detach()}
        inputs = dict(zip(names, given, strict=True))
        return found | gradients([y], [tensors["dy"]], inputs)

    def exact(self, case, tensors, found):
        """dquery, dkey and dvalue belong to the y that was returned."""
        q, k, v, dy = (t.double() for t in tensors.values())
        k, v = (t.repeat_interleave(case.group, 1) for t in (k, v))
        y = found["y"].double()
        scale = case.D**-0.5 if case.scale is None else case.scale
        # Sizes count in what bounds.py allows of each: some half units of
        # float32. That is far more than TF32, three times, is off by.
        noise = torch.finfo(SINGLE).eps / 2 * HALF_UNITS
        # Powers and ds are operands of products, so they are rounded to the
        # type of the inputs: by half a unit, or a unit where the interpreter
        # cuts, and beside 0 by half the smallest number. What is below the
        # normal numbers of float32 may count as 0, so it may be off by the
        # smallest of these: p, and ds once more.
        kind = torch.finfo(case.dtype)
        operand = kind.eps / 2 / noise
        seen = torch.ones(
            case.queries, case.keys, dtype=torch.bool, device=q.device
        )
        if case.causal:
            seen = seen.tril()  # query 0 sees key 0, as in PyTorch
        flushed = seen * (torch.finfo(SINGLE).smallest_normal / noise)
        tiny = flushed + seen * (kind.smallest_normal * kind.eps / 2 / noise)
        score = (scale * q @ k.mT).masked_fill(~seen, -torch.inf)
        p = score.softmax(-1)
        # An exponent is off by its size: that of the terms of a score.
        terms = 1 + scale * q.abs() @ k.mT.abs()
        off = terms + (p * terms).sum(-1, keepdim=True)
        delta = (dy * y).sum(-1, keepdim=True)
        dp = dy @ v.mT
        ds = p * (dp - delta)
        # The size of what is added up for ds, and how far p is off.
        around = dy.abs() @ v.mT.abs() + (dy * y).abs().sum(-1, keepdim=True)
        ds_size = (p * off + flushed) * around + (operand * ds.abs() + tiny)
        if case.dtype == BRAIN and q.device.type == "cpu":
            # There y is rounded after the kernel, and delta before.
            ds_size += operand * p * (dy * y).abs().sum(-1, keepdim=True)
        p_size = p * off + (operand * p + tiny)

        def of_group(t):
            """Added up over the heads of queries of each head of the keys."""
            return t.unflatten(1, (case.lead[1], case.group)).sum(2)

        want = {
            "y": (p @ v, p_size @ v.abs()),
            "dquery": (scale * ds @ k, scale * ds_size @ k.abs()),
            "dkey": (
                of_group(scale * ds.mT @ q),
                of_group(scale * ds_size.mT @ q.abs()),
            ),
            "dvalue": (of_group(p.mT @ dy), of_group(p_size.mT @ dy.abs())),
        }
        asked = dict(
            zip(("dquery", "dkey", "dvalue"), case.wanted, strict=True)
        )
        # y may be off by its rounding, too, and delta with it.
        count = case.group * case.queries + case.keys
        return {
            name: Expected(value, size, case.dtype, count)
            for name, (value, size) in want.items()
            if asked.get(name, True)
        }

    def mistakes(self):
        """What every page refuses, and what is not taken without more."""
        return (
            *REFUSED,
            Mistake(TypeError, "float32", of(lambda *t: float32(t))),
            Mistake(
                ValueError,
                "head dimension is 24",
                of(lambda *t: [u.repeat(1, 1, 1, 3)[..., :24] for u in t]),
            ),
            Mistake(ValueError, "key has 1 heads", shaped(key=(1, 1, 9, 16))),
            Mistake(
                ValueError,
                "there is no key",
                shaped(key=(1, 2, 0, 16), value=(1, 2, 0, 16)),
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


# Head dimensions of all widths of tiles, and of rows that a descriptor does
# not take; more keys than queries, and fewer; nothing to attend to.
ANY_SIZES = (
    *SIZES,
    ((1, 2), 40, 60, 65),
    ((1, 2), 3, 0, 16),
    ((2, 1), 33, 20, 80),
    ((1, 1), 20, 30, 1),
    ((1, 1), 40, 20, 256),
    ((2, 0), 4, 5, 24),
)


@dataclasses.dataclass(frozen=True)
class AnyAttention(Attention):
    dtypes: tuple = (HALF, BRAIN, SINGLE)
    sizes: tuple = ANY_SIZES

    def axes(self, on_gpu):
        more = {"causal": (False, True), "group": (1, 2, 3)}
        return super().axes(on_gpu) | more

    def random_axes(self):
        from hypothesis import strategies as st

        short = st.integers(0, 3)
        sizes = st.tuples(
            st.tuples(short, short),
            st.integers(0, 150),
            st.integers(0, 150),
            st.integers(1, 70),
        )
        return {("lead", "queries", "keys", "D"): sizes}

    def mistakes(self):
        grouped = {"enable_gqa": True}
        return (
            *REFUSED,
            Mistake(
                TypeError,
                "query has torch.float64",
                of(lambda *t: [u.double() for u in t]),
            ),
            *(
                Mistake(
                    ValueError,
                    f"head dimension is {D}: 1 to 256",
                    lambda ones, D=D: [ones(1, 2, 3, D, dtype=HALF)] * 3,
                )
                for D in (0, 257)
            ),
            Mistake(
                ValueError,
                "key has 1 heads, .* without enable_gqa",
                shaped(key=(1, 1, 9, 16)),
            ),
            Mistake(
                ValueError,
                "key has 2 heads, and query has 3, .* multiple",
                shaped(query=(1, 3, 8, 16)),
                grouped,
            ),
            Mistake(
                ValueError,
                "key has 0 heads",
                shaped(key=(1, 0, 9, 16)),
                grouped,
            ),
            Mistake(
                ValueError,
                "value has 1 heads, and key has 2",
                shaped(value=(1, 1, 9, 16)),
                grouped,
            ),
        )

    def huge(self, function, device, N, slack=1):
        """As above, causal, and two heads of queries for each of the keys:
        the first and the last head of the keys are judged."""
        heads = 2**30 // (N * 64) + slack
        given = [
            torch.empty(1, n * heads, N, 64, dtype=HALF, device=device)
            for n in (2, 1, 1, 2)
        ]
        for t in given:
            t.normal_()
        q, k, v = (t.requires_grad_() for t in given[:3])
        y = function(q, k, v, is_causal=True, enable_gqa=True)
        grads = torch.autograd.grad(y, (q, k, v), given[3])
        case = AttentionCase(
            lead=(1, 1), queries=N, keys=N, D=64, causal=True, group=2
        )
        for head in 0, heads - 1:
            two, one = (slice(n * head, n * (head + 1)) for n in (2, 1))
            parts = two, one, one, two
            names = ("query", "key", "value", "dy")
            tensors = {
                name: t.detach()[:, part]
                for name, t, part in zip(names, given, parts, strict=True)
            }
            found = {"y": y.detach()[:, two]} | {
                f"d{name}": t[:, part]
                for name, t, part in zip(names, grads, parts, strict=False)
            }
            self.judge(case, tensors, found)

    def model(self, function):
        """A causal layer of a model that computes so, and PyTorch's: three
        heads of 48 numbers, which share one head of keys."""

        class Ours(torch.nn.Module):
            def __init__(self, N):
                super().__init__()
                self.to_qkv = torch.nn.Linear(N, 5 * 48)
                self.back = torch.nn.Linear(3 * 48, N)

            def attend(self, *qkv):
                return function(*qkv, is_causal=True, enable_gqa=True)

            def forward(self, x):
                qkv = self.to_qkv(x).half().unflatten(-1, (5, 48))
                q, k, v = qkv.transpose(1, 2).split([3, 1, 1], dim=1)
                y = self.attend(q, k, v).transpose(1, 2).flatten(2)
                return x + self.back(y.float())

        class Theirs(Ours):
            def attend(self, *qkv):
                return F.scaled_dot_product_attention(
                    *qkv, is_causal=True, enable_gqa=True
                )

        return Ours, Theirs
