"""Cases and checks that every softmax of these tutorials must pass."""

import dataclasses

import torch

from layer_norm_cases import DTYPES, LAYOUTS, guarded_allocations

__all__ = ["DTYPES", "LAYOUTS", "NAMES", "Case", "run"]

NAMES = "softmax", "log_softmax"  # of the functions of a page


@dataclasses.dataclass(frozen=True)
class Case:
    shape: tuple = (5, 129)
    dtype: torch.dtype = torch.float32
    dim: int = -1
    out: torch.dtype | None = None  # the argument dtype
    name: str = "softmax"
    x: str = "contiguous"  # a layout, as the next one
    dy: str = "contiguous"
    scale: float = 1.0
    masked: float = 0.0  # share of x that is -inf; never a whole row

    def tensors(self, device):
        """x and dy."""
        generator = torch.Generator().manual_seed(0)

        def numbers(dtype, scale, masked=0.0):
            def fill(shape):
                value = torch.randn(shape, generator=generator)
                hidden = torch.rand(shape, generator=generator) < masked
                if hidden.dim():
                    hidden.select(self.dim, 0).fill_(False)
                value = (scale * value).masked_fill(hidden, -torch.inf)
                return value.to(device, dtype)

            return fill

        x = numbers(self.dtype, self.scale, self.masked)
        dy = numbers(self.out or self.dtype, 1.0)
        return LAYOUTS[self.x](self.shape, x), LAYOUTS[self.dy](self.shape, dy)


def exact(case, x, dy, y):
    """For y and dx: the value in float64, and the size of its terms.

    y is what was returned, rounded: dx must belong to it.
    """
    log = case.name == "log_softmax"
    x = x.to(case.out or case.dtype).double()
    y, dy, dim = y.double(), dy.double(), case.dim
    below = (x - x.amax(dim, keepdim=True)) if x.numel() else x
    want = getattr(torch, case.name)(x, dim)
    finite = below.masked_fill(below == -torch.inf, 0)
    if log:
        c = dy.sum(dim, keepdim=True)
        dx = dy - y.exp() * c
        size = finite.abs() + x.masked_fill(x == -torch.inf, 0).abs() + 1
        sizes = dy.abs() + (1 + (y * y.exp()).nan_to_num().abs()) * (
            dy.abs().sum(dim, keepdim=True)
        )
    else:
        c = (y * dy).sum(dim, keepdim=True)
        dx = y * (dy - c)
        size = want * (1 + finite.abs())
        sizes = y * (dy.abs() + (y * dy).abs().sum(dim, keepdim=True))
    return (want, size), (dx, sizes)


def check(case, found, device, x, dy):
    """found = y, dx: shape, type and error of each.

    The allowed error is half a unit of the result, which is rounded once,
    and 16 half units, in float32 (float64 for float64), of the size of the
    terms in it. What is minus infinity must be so exactly.
    """
    wide = torch.promote_types(case.out or case.dtype, torch.float32)
    noise = 16 * torch.finfo(wide).eps / 2
    types = case.out or case.dtype, case.dtype
    for (value, size), got, dtype in zip(
        exact(case, x, dy, found[0]), found, types, strict=True
    ):
        assert got.shape == value.shape
        assert got.dtype == dtype
        hidden = value == -torch.inf
        assert torch.equal(hidden, got == -torch.inf)
        rounding = torch.finfo(dtype).eps / 2
        if case.out and got is found[1]:  # dx may have had the type of y
            rounding += torch.finfo(case.out).eps / 2
        if torch.bfloat16 in (dtype, case.out) and device.type == "cpu":
            rounding *= 2  # the interpreter cuts bfloat16, not rounds it
        value, got = value.masked_fill(hidden, 0), got.masked_fill(hidden, 0)
        # In float16 numbers below 2e-8 become 0.
        small = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
        allowed = rounding * value.norm() + noise * size.norm()
        allowed += small * value.numel() ** 0.5
        error = (got.double() - value).norm()
        assert error <= allowed, f"error {error:.1e} > {allowed:.1e}"


def run(page, case):
    """Run one case between guard bands and check everything about it."""
    x, dy = case.tensors(page.DEVICE)
    copies = x.clone(), dy.clone()
    leaf = x.detach().requires_grad_()
    with guarded_allocations():
        y = getattr(page, case.name)(leaf, case.dim, case.out)
        (dx,) = torch.autograd.grad(y, leaf, dy)
    for tensor, copy in zip((x, dy), copies, strict=True):
        assert torch.equal(tensor, copy), "an input was written"
    check(case, (y.detach(), dx), page.DEVICE, x, dy)
