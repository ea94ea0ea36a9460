"""Cases and checks that every layer norm of a sum must pass."""

import dataclasses

import torch

import layer_norm_cases as plain
from layer_norm_cases import LAYOUTS, guarded_allocations

SINGLE = torch.float32
NAMES = "x", "residual", "weight", "bias"


@dataclasses.dataclass(frozen=True)
class Case:
    lead: tuple = (5,)  # leading dimensions
    shape: tuple = (40,)  # normalized shape
    dtype: torch.dtype = SINGLE
    stream: torch.dtype | None = None  # of the residual; None: as x
    x: str = "contiguous"  # a layout, as the next four
    residual: str = "contiguous"
    dy: str = "contiguous"
    ds: str = "contiguous"
    parameters: str = "contiguous"
    weight: bool = True
    bias: bool = True
    wanted: tuple = (True, True, True, True)  # gradients, as NAMES
    used: str = "ys"  # results that a gradient arrives from
    eps: float = 1e-5

    def tensors(self, device):
        """x, residual, weight, bias, dy and ds."""
        generator = torch.Generator().manual_seed(0)

        def filled(layout, shape, dtype, scale, shift):
            def fill(shape):
                value = torch.randn(shape, generator=generator)
                return (shift + scale * value).to(device, dtype)

            return LAYOUTS[layout](shape, fill)

        full, stream = self.lead + self.shape, self.stream or self.dtype
        x = filled(self.x, full, self.dtype, 0.5, 0)
        residual = filled(self.residual, full, stream, 0.5, -2.3)
        weight, bias = (
            filled(self.parameters, self.shape, self.dtype, 0.3, 0.5)
            if there
            else None
            for there in (self.weight, self.bias)
        )
        dy = filled(self.dy, full, self.dtype, 0.1, 0)
        ds = filled(self.ds, full, stream, 0.1, 0)
        return x, residual, weight, bias, dy, ds


def results(function, case, x, residual, weight, bias, dy, ds):
    """y, s and the gradients as NAMES; None where none is wanted."""
    leaves = [
        None if t is None else t.detach().requires_grad_(want)
        for t, want in zip(
            (x, residual, weight, bias), case.wanted, strict=True
        )
    ]
    outputs = function(*leaves[:2], case.shape, *leaves[2:], eps=case.eps)
    arriving = {
        name: pair for name, *pair in zip("ys", outputs, (dy, ds), strict=True)
    }
    used = [arriving[name] for name in case.used]
    used = [(out, grad) for out, grad in used if out.requires_grad]
    asked = [t for t in leaves if t is not None and t.requires_grad]
    found = iter(())
    if asked and used:
        found = iter(
            torch.autograd.grad(
                [out for out, _ in used],
                asked,
                [grad for _, grad in used],
                allow_unused=True,
            )
        )
    return *(t.detach() for t in outputs), *(
        next(found, None) if t is not None and t.requires_grad else None
        for t in leaves
    )


def check(case, found, device, tensors, share=None, s_terms=None):
    """found = y, s, dx, dresidual, dw, db: shape, dtype and error of each.

    share: what dropout multiplied each element of x by; None: by 1.
    Each result may be off by half a unit of its type, and by 16 half units of
    the size of its terms, in the type of the arithmetic.
    """
    x, residual, weight, bias, dy, ds = tensors
    y, s, *grads = found
    wide = torch.promote_types(torch.promote_types(x.dtype, s.dtype), SINGLE)
    share = torch.ones_like(x).double() if share is None else share
    total = x.double() * share + residual.double()
    # The rest must belong to the sum as it was returned.
    given = plain.Case(case.lead, case.shape, case.dtype, eps=case.eps)
    expected, cancels = plain.exact(given, s, weight, bias, dy)
    through, size = expected["dx"]
    if "y" not in case.used:
        through, size = 0 * through, 0 * size
    if "s" in case.used:
        through, size = through + ds.double(), size + ds.double().abs()
    every = {
        "y": (y, *expected["y"], x),
        "s": (s, total, total.abs(), residual),
        "dx": (grads[0], through * share, size * share, x),
        "dresidual": (grads[1], through, size, residual),
        "dw": (grads[2], *expected["dw"], weight),
        "db": (grads[3], *expected["db"], bias),
    }
    for name, (got, value, size, like) in every.items():
        if got is None or (name in ("dw", "db") and case.used == "s"):
            continue
        assert got.shape == like.shape, name
        assert got.dtype == like.dtype, name
        rounding = torch.finfo(got.dtype).eps / 2
        if got.dtype == torch.bfloat16 and device.type == "cpu":
            rounding *= 2  # the interpreter cuts bfloat16, not rounds it
        if name == "dx" and x.dtype != residual.dtype:
            rounding += torch.finfo(residual.dtype).eps / 2  # of the stream
        noise = 16 * torch.finfo(wide).eps / 2 * cancels
        allowed = rounding * value.norm() + noise * size.norm() + 1e-12
        error = (got.double() - value).norm()
        assert error <= allowed, f"{name}: error {error:.1e} > {allowed:.1e}"


def run(function, case, device, share=None):
    """Run one case between guard bands and check everything about it."""
    tensors = case.tensors(device)
    copies = [None if t is None else t.clone() for t in tensors]
    with guarded_allocations():
        found = results(function, case, *tensors)
    for tensor, copy in zip(tensors, copies, strict=True):
        if tensor is not None:
            assert torch.equal(tensor, copy), "an input was written"
    there = True, True, case.weight, case.bias
    for got, want, given in zip(found[2:], case.wanted, there, strict=True):
        assert got is None or (want and given)
        assert got is not None or not (want and given and case.used == "ys")
    check(case, found, device, tensors, share)


def only_some(run, **more):
    """Every choice of gradients that are wanted; of parameters, by turns."""
    for number in range(16):
        wanted = tuple(bool(number >> i & 1) for i in range(4))
        weight, bias = number % 3 > 0, number % 5 > 1
        run(Case(wanted=wanted, weight=weight, bias=bias, **more))


def mistakes(device):
    """What a caller may get wrong: error, words of it, arguments."""

    def ones(*shape, dtype=SINGLE):
        return torch.ones(shape, dtype=dtype, device=device)

    x = ones(2, 8)
    return [
        (TypeError, "x is .*int32", (ones(2, 8, dtype=torch.int32), x, 8)),
        (TypeError, "residual", (x, ones(2, 8, dtype=torch.int64), 8)),
        (TypeError, "weight", (x, x, 8, ones(8).int())),
        (ValueError, "x.*normalized_shape", (x, x, 7)),
        (ValueError, "normalized_shape", (x, x, ())),
        (ValueError, "x.*normalized_shape", (ones(2, 0), ones(2, 0), 0)),
        (ValueError, "residual.*2, 4", (x, ones(2, 4), 8)),
        (ValueError, "residual", (x, ones(8), 8)),
        (ValueError, "weight", (x, x, 8, ones(7))),
        (ValueError, "bias", (x, x, 8, None, ones(2, 4))),
        (ValueError, "residual is on", (x, x.to("meta"), 8)),
    ]
