"""A linear layer and its loss: function(input, linear_weight, target,
linear_bias=, weight=, reduction=, ignore_index=, label_smoothing=,
recompute=)."""

import dataclasses

import torch

from conformance import bounds
from conformance.bounds import HALF_UNITS, Expected
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

HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
EVERY = (True, True, True)
# Dimensions before the features, features, classes.
SIZES = (
    ((2, 20), 37, 24),
    ((70,), 40, 99),
    ((), 24, 40),
    ((1,), 1, 1),
    ((33,), 48, 136),
    ((3, 11), 129, 16),
    ((0,), 8, 5),
    ((130,), 8, 65),
)
WANTED = (
    EVERY,
    (True, False, False),
    (False, True, False),
    (False, False, True),
    (True, True, False),
    (False, False, False),
)


@dataclasses.dataclass(frozen=True)
class LinearCrossEntropyCase(AnyCase):
    lead: tuple = (40,)  # dimensions before the features
    ins: int = 40
    classes: int = 99
    dtype: torch.dtype = HALF
    input: str = "contiguous"  # a layout, as the next two
    linear_weight: str = "contiguous"
    linear_bias: str | None = "contiguous"  # None: there is none
    weight: bool = False
    reduction: str = "mean"
    ignored: int = -100
    ignores: str = "third"  # which targets are ignored: third, none, every
    smooth: float = 0.0
    recompute: bool = False
    wanted: tuple = EVERY  # of input, linear_weight, linear_bias
    upstream: float = 3.0
    large: float = 1.0  # the input is so much larger
    twice: bool = False  # whether the second backward pass is judged


@dataclasses.dataclass(frozen=True)
class LinearCrossEntropy(Operation):
    dtypes: tuple = (HALF, BRAIN, SINGLE)
    sizes: tuple = SIZES
    Case = LinearCrossEntropyCase

    def axes(self, on_gpu):
        return {
            ("lead", "ins", "classes"): self.sizes,
            "dtype": self.dtypes,
            "input": tuple(LAYOUTS),
            "linear_weight": OWN_LAYOUTS,
            "linear_bias": (None, *OWN_LAYOUTS),
            "weight": (False, True),
            "reduction": ("mean", "sum", "none"),
            "ignored": (-100, 0, 10**6),
            "ignores": ("third", "none", "every"),
            "smooth": (0.0, 0.1, 1.0),
            "recompute": (False, True),
            "wanted": WANTED,
            "upstream": (3.0, 1.0, -0.5),
            "large": (1.0, 10.0),
            "twice": (False, True),
        }

    def random_axes(self):
        from hypothesis import strategies as st

        lead = st.lists(st.integers(0, 12), max_size=3).map(tuple)
        some = st.integers(1, 150)
        return {("lead", "ins", "classes"): st.tuples(lead, some, some)}

    def tensors(self, case, device):
        filled = filler(device, case.seed)
        tokens = torch.Size(case.lead).numel()
        generator = torch.Generator().manual_seed(case.seed + case.classes)
        target = torch.randint(case.classes, (tokens,), generator=generator)
        if case.ignores != "none":
            target[:: 3 if case.ignores == "third" else 1] = case.ignored
        weight = torch.rand(case.classes, generator=generator) + 0.1
        g = torch.tensor(case.upstream)
        if case.reduction == "none":
            g = g * torch.randn(case.lead, generator=generator)
        found = {
            "input": filled(
                case.input, (*case.lead, case.ins), case.dtype, case.large
            ),
            "linear_weight": filled(
                case.linear_weight,
                (case.classes, case.ins),
                case.dtype,
                case.ins**-0.5,
            ),
            "target": target.reshape(case.lead).to(device),
            "linear_bias": None,
            "weight": weight.to(device, case.dtype) if case.weight else None,
            "g": g.to(device, case.dtype),
        }
        if case.linear_bias is not None:
            found["linear_bias"] = filled(
                case.linear_bias, (case.classes,), case.dtype
            )
        return found

    def results(self, function, case, tensors):
        names = ("input", "linear_weight", "linear_bias")
        given = leaves([tensors[name] for name in names], case.wanted)
        loss = function(
            given[0],
            given[1],
            tensors["target"],
            linear_bias=given[2],
            weight=tensors["weight"],
            reduction=case.reduction,
            ignore_index=case.ignored,
            label_smoothing=case.smooth,
            recompute=case.recompute,
        )
        inputs = dict(zip(names, given, strict=True))
        wanted = [t for t in given if t is not None and t.requires_grad]
        if case.twice and wanted:
            torch.autograd.grad(
                loss, wanted, torch.ones_like(loss), retain_graph=True
            )
        found = {"loss": loss.detach()}
        return found | gradients([loss], [tensors["g"]], inputs)

    def exact(self, case, tensors, found):
        """Logits enter as differences from logsumexp; each is off by what was
        added up for it, and a power by that share of itself."""
        x = tensors["input"].double().reshape(-1, case.ins)
        w = tensors["linear_weight"].double()
        g = tensors["g"].double().reshape(-1)
        target = tensors["target"].reshape(-1)
        live = target != case.ignored
        target = (target * live)[:, None]
        z = x @ w.T
        terms = x.abs() @ w.abs().T
        if tensors["linear_bias"] is not None:
            bias = tensors["linear_bias"].double()
            z, terms = z + bias, terms + bias.abs()
        weight = torch.ones_like(w[:, 0])
        if tensors["weight"] is not None:
            weight = tensors["weight"].double()
        top = z.amax(1, keepdim=True) if len(z) else z[:, :1]
        log = (z - top).exp().sum(1, keepdim=True).log()
        lse = top + log
        power = (z - lse).exp()
        # How much an exponent is off, and logsumexp.
        far = terms + (z - top).abs() + 1
        off = (power * far).sum(1, keepdim=True) + top.abs() + log
        spread = far + off

        z_t, w_t = z.gather(1, target), weight[target] * (1 - case.smooth)
        share = case.smooth * weight / case.classes
        loss = w_t * (lse - z_t) + (share * (lse - z)).sum(1, keepdim=True)
        size = w_t * (off + terms.gather(1, target) + (top - z_t).abs())
        size = size + (share * (off + terms + (lse - z).abs())).sum(
            1, keepdim=True
        )
        hot = torch.zeros_like(z).scatter(1, target, 1.0)
        total = w_t + share.sum()
        d = power * total - hot * w_t - share
        # Powers and gradients are rounded to the type of the inputs, each by
        # half a unit. Of sizes that count in units of float32:
        unit = torch.finfo(SINGLE).eps * HALF_UNITS
        kind = torch.finfo(case.dtype)
        operand = kind.eps / unit
        tiny = max(
            kind.smallest_normal * kind.eps,
            torch.finfo(SINGLE).smallest_normal,
        )
        d_size = power * total * (spread + operand) + hot * w_t + share
        d_size = d_size + operand * d.abs() + tiny / unit * (1 + total)
        live = live[:, None]
        loss, size, d, d_size = (t * live for t in (loss, size, d, d_size))
        if case.reduction == "none":
            factor = g[:, None]
            loss, size = loss[:, 0], size[:, 0]
        else:
            count = torch.ones((), dtype=torch.float64, device=x.device)
            if case.reduction == "mean":
                count = (weight[target] * live).sum()
            loss, size = (t.sum() / count for t in (loss, size))
            factor = g / count
            if not live.any():
                factor = 0 * g
            factor = factor.expand(len(x))[:, None]
        d, d_size = d * factor, d_size * factor.abs()
        if case.reduction == "none":
            d_size = d_size + tiny / unit * live
        # dx is rounded before it is multiplied by its factor.
        least = kind.smallest_normal * kind.eps
        if len(x):
            least *= max(1.0, factor.abs().max().item())
        tokens = len(x)
        # From chunk to chunk sums of dw may have 16 digits, if it has 16 bits.
        chunk = 16 if x.device.type == "cpu" else 2048  # tokens, at least
        chunks = 0.0 if case.dtype == SINGLE else tokens / chunk
        of_sums = 1 + chunks * 2.0**-16 / unit
        want = {
            "loss": Expected(
                loss.reshape(case.lead) if case.reduction == "none" else loss,
                size.reshape(case.lead) if case.reduction == "none" else size,
                case.dtype,
                case.classes + tokens,
            ),
            "dinput": Expected(
                (d @ w).reshape(*case.lead, case.ins),
                (d_size @ w.abs()).reshape(*case.lead, case.ins),
                case.dtype,
                case.classes + case.ins,
                (case.dtype,),
                least,
            ),
            "dlinear_weight": Expected(
                d.T @ x,
                of_sums * (d_size.T @ x.abs()),
                case.dtype,
                tokens + case.ins,
            ),
            "dlinear_bias": Expected(
                d.sum(0), d_size.sum(0), case.dtype, tokens + case.ins
            ),
        }
        names = ("dinput", "dlinear_weight", "dlinear_bias")
        asked = dict(zip(names, case.wanted, strict=True))
        asked["dlinear_bias"] &= tensors["linear_bias"] is not None
        return {
            name: value for name, value in want.items() if asked.get(name, 1)
        }

    def judge(self, case, tensors, found):
        super().judge(case, tensors, found)
        if "dinput" in found:
            ignored = tensors["target"] == case.ignored
            assert not found["dinput"][ignored].any(), "dx of an ignored token"

    def mistakes(self):
        kind, value = TypeError, ValueError

        def plain(ones, **changes):
            shapes = {"x": (3, 8), "w": (4, 8)}
            shapes |= changes
            x, w = (ones(*shape, dtype=HALF) for shape in shapes.values())
            return x, w, ones(*x.shape[:-1]).long()

        def of(change):
            return lambda ones: change(*plain(ones))

        def shaped(**changes):
            return lambda ones: plain(ones, **changes)

        refused = (
            (kind, "input has torch.int64", of(
                lambda x, w, t: (x.long(), w.long(), t)), {}),
            (kind, "float64", of(
                lambda x, w, t: (x.double(), w.double(), t)), {}),
            (kind, "linear_weight has torch.bfloat16", of(
                lambda x, w, t: (x, w.bfloat16(), t)), {}),
            (kind, "target has torch.int32.*int64", of(
                lambda x, w, t: (x, w, t.int())), {}),
            (kind, "target has torch.float16", of(
                lambda x, w, t: (x, w, x)), {}),
            (kind, "linear_bias has torch.float32", of(
                lambda x, w, t: (x, w, t)),
             {"linear_bias": torch.ones(4)}),
            (kind, "weight has torch.int64", of(
                lambda x, w, t: (x, w, t)),
             {"weight": torch.ones(4).long()}),
            (value, "linear_weight is on meta", of(
                lambda x, w, t: (x, w.to("meta"), t)), {}),
            (value, "target is on meta", of(
                lambda x, w, t: (x, w, t.to("meta"))), {}),
            (value, "input has no dimension", of(
                lambda x, w, t: (x[0, 0], w, t[0])), {}),
            (value, "linear_weight has 1 dimension", of(
                lambda x, w, t: (x, w[0], t)), {}),
            (value, "a class and a feature", shaped(x=(3, 0), w=(4, 0)), {}),
            (value, "a class and a feature", shaped(w=(0, 8)), {}),
            (value, "input has 9 features.*takes 8", shaped(x=(3, 9)), {}),
            (value, r"target is \(2,\).*\(3,\)", of(
                lambda x, w, t: (x, w, t[1:])), {}),
            (value, r"linear_bias is \(5,\)", of(
                lambda x, w, t: (x, w, t)),
             {"linear_bias": torch.ones(5).half()}),
            (value, r"weight is \(5,\)", of(
                lambda x, w, t: (x, w, t)), {"weight": torch.ones(5)}),
            (value, "weight wants a gradient", of(
                lambda x, w, t: (x, w, t)),
             {"weight": torch.ones(4, requires_grad=True)}),
            (value, "reduction is 'middle'", of(
                lambda x, w, t: (x, w, t)), {"reduction": "middle"}),
            *(
                (value, f"label_smoothing is {wrong}", of(
                    lambda x, w, t: (x, w, t)), {"label_smoothing": wrong})
                for wrong in (-0.1, 1.5, float("nan"))
            ),
            *(
                (value, f"skip_below is {wrong}", of(
                    lambda x, w, t: (x, w, t)), {"skip_below": wrong})
                for wrong in (-0.1, 1.0, float("nan"))
            ),
        )  # fmt: skip

        return tuple(Mistake(*one) for one in refused)

    def refusable(self, function, device):
        x = torch.randn(5, 8, device=device, requires_grad=True)
        w = torch.randn(4, 8, device=device)
        target = torch.arange(5, device=device) % 4
        return function(x, w, target), x

    def huge(self, function, device, N, slack=5, ins=64, some=256):
        """More than 2**31 logits: of dx the first and the last tokens are
        judged, of the others all."""
        M = 2**31 // N + slack
        case = LinearCrossEntropyCase(
            lead=(M,), ins=ins, classes=N, dtype=BRAIN, reduction="sum"
        )
        generator = torch.Generator(device).manual_seed(0)

        def normal(*shape):
            return torch.randn(shape, generator=generator, device=device)

        tensors = {
            "input": normal(M, ins).to(BRAIN),
            "linear_weight": (normal(N, ins) * ins**-0.5).to(BRAIN),
            "target": torch.randint(
                N, (M,), generator=generator, device=device
            ),
            "linear_bias": normal(N).to(BRAIN),
            "weight": None,
            "g": torch.tensor(3.0, device=device, dtype=BRAIN),
        }
        tensors["target"][::3] = case.ignored
        found = self.results(function, case, tensors)
        sums = {}
        for start in range(0, M, 2**12):
            rows = slice(start, min(start + 2**12, M))
            part = tensors | {
                name: tensors[name][rows] for name in ("input", "target")
            }
            of_part = dataclasses.replace(case, lead=(len(part["target"]),))
            expected = self.exact(of_part, part, {})
            for name, of in expected.items():
                if name != "dinput":
                    value, size = sums.get(name, (0, 0))
                    sums[name] = value + of.value, size + of.size
                elif start == 0 or rows.stop == M:
                    got = found["dinput"][rows]
                    bounds.compare(name, got, of, self.arithmetic(case))
        for name, (value, size) in sums.items():
            bounds.compare(
                name,
                found[name],
                Expected(value, size, BRAIN, M + N),
                self.arithmetic(case),
            )

    def arithmetic(self, case):
        return bounds.arithmetic(SINGLE)
