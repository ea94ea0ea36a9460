"""Cross-entropy: function(input, target, weight, ignore_index, reduction,
label_smoothing, z_loss, ahead=ahead)."""

import dataclasses

import torch

from conformance.bounds import Expected
from conformance.layer_norm import SINGLE
from conformance.operation import AnyCase, Operation
from conformance.page_files import Mistake

DTYPES = torch.float16, torch.bfloat16, SINGLE
SIZES = ((3, 37), (4, 136), (5, 203), (9, 64), (3, 257), (3, 7), (1, 1))


@dataclasses.dataclass(frozen=True)
class CrossEntropyCase(AnyCase):
    M: int = 3
    N: int = 37
    dtype: torch.dtype = SINGLE
    weight: bool = False
    ignored: int = -100  # every third target
    reduction: str = "mean"
    smooth: float = 0.0
    z: float = 0.0
    ahead: bool = False
    begin: int = 0  # columns before the first row, in memory
    shift: float = 0.0  # of all logits
    upstream: float = 3.0


@dataclasses.dataclass(frozen=True)
class CrossEntropy(Operation):
    dtypes: tuple = DTYPES
    sizes: tuple = SIZES
    Case = CrossEntropyCase

    def axes(self, on_gpu):
        return {
            ("M", "N"): self.sizes,
            "dtype": self.dtypes,
            "weight": (False, True),
            "ignored": (-100, 0, 10**6),
            "reduction": ("mean", "sum", "none"),
            "smooth": (0.0, 0.1, 1.0),
            "z": (0.0, 1e-2),
            "ahead": (False, True),
            "begin": (0, 1, 3, 8),
            "upstream": (3.0, 1.0, -0.5),
        }

    def random_axes(self):
        from hypothesis import strategies as st

        sizes = st.tuples(st.integers(1, 12), st.integers(1, 300))
        return {("M", "N"): sizes, "begin": st.integers(0, 9)}

    def possible(self, case, on_gpu):
        """The first row is ignored; of no other, a mean is not a number.

        With class 0 ignored, the one class of a row of one column is.
        """
        rare = case.M == 1 or (case.ignored == 0 and case.N < 7)
        return case.reduction != "mean" or not rare

    def tensors(self, case, device):
        generator = torch.Generator().manual_seed(case.N + 1000 * case.seed)

        def normal(*shape):
            return torch.randn(shape, generator=generator)

        flat = 3 * normal(case.M * case.N + case.begin) + case.shift
        x = flat.to(device, case.dtype)[case.begin :].view(case.M, case.N)
        target = torch.randint(case.N, (case.M,), generator=generator)
        target[::3] = case.ignored
        weight = normal(case.N).abs().to(device, case.dtype)
        g = torch.tensor(case.upstream, device=device)
        if case.reduction == "none":
            g = g * normal(case.M).to(device)
        return {
            "input": x,
            "target": target.to(device),
            "weight": weight if case.weight else None,
            "g": g.to(case.dtype),
        }

    def results(self, function, case, tensors):
        leaf = tensors["input"].detach().requires_grad_()
        loss = function(
            leaf, tensors["target"], tensors["weight"], case.ignored,
            case.reduction, case.smooth, case.z, ahead=case.ahead,
        )  # fmt: skip
        (dx,) = torch.autograd.grad(loss, leaf, tensors["g"])
        return {"loss": loss.detach(), "dx": dx}

    def exact(self, case, tensors, found):
        """What is far from 0, as the logits may be, enters as a difference
        from the largest of its row, as in a kernel that keeps both."""
        x, g = tensors["input"].double(), tensors["g"].double()
        live = tensors["target"] != case.ignored
        target = (tensors["target"] * live)[:, None]
        w = torch.ones_like(x[0])
        if tensors["weight"] is not None:
            w = tensors["weight"].double()
        top = x.amax(1, keepdim=True)
        log = (x - top).exp().sum(1, keepdim=True).log()
        power = (x - top - log).exp()
        far = (x - top).abs()
        spread = 1 + far + (power * far).sum(1, keepdim=True)
        lse, off = top + log, (power * spread).sum(1, keepdim=True) + log
        x_t, w_t = x.gather(1, target), w[target] * (1 - case.smooth)
        share = case.smooth * w / case.N
        # The loss of each row, and the size of its terms.
        loss = w_t * (top - x_t + log) + (share * (lse - x)).sum(
            1, keepdim=True
        )
        loss = loss + case.z * lse**2
        size = w_t * ((top - x_t).abs() + off) + 3 * case.z * lse**2
        size = size + (share * (off + x.abs() + top.abs())).sum(
            1, keepdim=True
        )
        # Its gradient.
        hot = torch.zeros_like(x).scatter(1, target, 1.0)
        total = w_t + share.sum()
        dx = power * (total + 2 * case.z * lse) - hot * w_t - share
        sizes = power * (total + 2 * case.z * lse.abs()) * spread
        sizes = sizes + hot * w_t + share
        live = live[:, None]
        loss, size, dx, sizes = (t * live for t in (loss, size, dx, sizes))
        if case.reduction == "none":
            g = g[:, None]
            loss, size = loss[:, 0], size[:, 0]
        else:
            count = 1.0
            if case.reduction == "mean":
                count = (w[target] * live).sum()
            loss, size = (t.sum() / count for t in (loss, size))
            g = g / count
        before = (case.dtype,) if case.ahead else ()
        terms = case.M + case.N
        # Ahead of the factor small numbers of float16 are lost.
        least = 0.0
        if case.ahead:
            kind = torch.finfo(case.dtype)
            least = kind.smallest_normal * kind.eps * g.abs().max().item()
            least *= 1 if case.reduction == "none" else float(count)
        return {
            "loss": Expected(loss, size, case.dtype, terms),
            "dx": Expected(
                g * dx, g.abs() * sizes, case.dtype, terms, before, least
            ),
        }

    def judge(self, case, tensors, found):
        super().judge(case, tensors, found)
        ignored = tensors["target"] == case.ignored
        assert not found["dx"][ignored].any(), "dx of a row that is ignored"

    def mistakes(self):
        kind, value = TypeError, ValueError
        calls = (
            (kind, "float64.*float16", lambda x, t: (x.double(), t)),
            (kind, "input is .*int64", lambda x, t: (x.long(), t)),
            (kind, "target .*float32", lambda x, t: (x, x)),
            (kind, "target .*int32.*int64", lambda x, t: (x, t.int())),
            (value, r"\(2, 8\).*\(3,\)", lambda x, t: (x, t.new_ones(3))),
            (value, r"\(2, 0\)", lambda x, t: (x[:, :0], t)),
            (value, r"weight.*\(7,\)", lambda x, t: (x, t, x[0, 1:])),
            (value, "input.*meta", lambda x, t: (x.to("meta"), t)),
            (value, "target.*meta", lambda x, t: (x, t.to("meta"))),
            (value, "constant weight", lambda x, t: (
                x, t, x[0].clone().requires_grad_())),
            (value, "middle", lambda x, t: (x, t, None, -100, "middle")),
        )  # fmt: skip

        def arguments(call):
            return lambda ones: call(ones(2, 8), ones(2).long())

        return tuple(Mistake(e, words, arguments(f)) for e, words, f in calls)

    def refusable(self, function, device):
        case = CrossEntropyCase()
        x, target, *_ = self.tensors(case, device).values()
        x.requires_grad_()
        return function(x, target), x
