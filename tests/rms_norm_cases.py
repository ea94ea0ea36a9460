"""Cases and checks that every RMS norm of these tutorials must pass."""

import dataclasses

import torch

from layer_norm_cases import (
    DTYPES,
    LAYOUTS,
    LONG_DTYPES,
    LONG_SHAPES,
    SHAPES,
    guarded_allocations,
    long_widths,
)

__all__ = [
    "DTYPES",
    "LAYOUTS",
    "LONG_DTYPES",
    "LONG_SHAPES",
    "SHAPES",
    "Case",
    "long_widths",
    "run",
]


@dataclasses.dataclass(frozen=True)
class Case:
    lead: tuple = (17,)  # leading dimensions
    shape: tuple = (129,)  # normalized shape
    dtype: torch.dtype = torch.float32
    weight_dtype: torch.dtype | None = None  # None: as x
    stream_dtype: torch.dtype | None = None  # of residual, s and ds; as x
    fused: bool = True  # with a residual
    x: str = "contiguous"  # a layout, as the next four
    residual: str = "contiguous"
    dy: str = "contiguous"
    ds: str = "contiguous"
    parameters: str = "contiguous"
    weight: bool = True
    wanted: tuple = (True, True, True)  # gradients of x, residual, weight
    used: str = "ys"  # results that a gradient arrives from
    eps: float = 1e-6
    offset: float = 0.0
    casting: str | None = None  # None: rounded once, at the end

    def tensors(self, device):
        """x, residual, weight, dy and ds."""
        generator = torch.Generator().manual_seed(0)

        def filler(dtype, scale, shift):
            def fill(shape):
                value = torch.randn(shape, generator=generator)
                return (shift + scale * value).to(device, dtype)

            return fill

        full = self.lead + self.shape
        stream = self.stream_dtype or self.dtype
        numbers = filler(self.dtype, 1.0, 0.5)
        factor = filler(self.weight_dtype or self.dtype, 0.3, 0.5)
        x = LAYOUTS[self.x](full, numbers)
        residual = LAYOUTS[self.residual](full, filler(stream, 1.0, 0.5))
        weight = LAYOUTS[self.parameters](self.shape, factor)
        dy = LAYOUTS[self.dy](full, filler(self.dtype, 0.1, 0.0))
        ds = LAYOUTS[self.ds](full, filler(stream, 0.1, 0.0))
        residual = residual if self.fused else None
        return x, residual, weight if self.weight else None, dy, ds


def results(functions, case, x, residual, weight, dy, ds):
    """y, s and the gradients of x, residual and weight; None: not wanted."""
    leaves = [
        None if t is None else t.detach().requires_grad_(want)
        for t, want in zip((x, residual, weight), case.wanted, strict=True)
    ]
    norm, add_norm = functions
    x, residual, weight = leaves
    options = {"eps": case.eps}
    if case.offset:  # not every page has it
        options["offset"] = case.offset
    if case.casting:
        options["casting"] = case.casting
    if residual is None:
        outputs = {"y": norm(x, case.shape, weight, **options)}
    else:
        pair = add_norm(x, residual, case.shape, weight, **options)
        outputs = dict(zip("ys", pair, strict=True))
    arriving = {"y": dy, "s": ds}
    used = [name for name in outputs if name in case.used]
    asked = [t for t in leaves if t is not None and t.requires_grad]
    found = iter(())
    if asked:
        found = iter(
            torch.autograd.grad(
                [outputs[name] for name in used],
                asked,
                [arriving[name] for name in used],
                allow_unused=True,
            )
        )
    s = outputs.get("s")
    return (
        outputs["y"].detach(),
        None if s is None else s.detach(),
        *(
            next(found) if t is not None and t.requires_grad else None
            for t in leaves
        ),
    )


def exact(case, x, residual, weight, dy, ds, s):
    """For each result: its value in float64, and the size of its terms.

    s is the sum as it was returned: the rest must belong to it.
    """
    x, dy, ds = x.double(), dy.double(), ds.double()
    n = len(case.shape)
    dims = tuple(range(-n, 0))
    rows = tuple(range(x.dim() - n))
    total = size_s = None
    if residual is not None:
        total = x + residual.double()
        size_s = total.abs()
        x = s.double()
    rstd = ((x**2).mean(dims, keepdim=True) + case.eps) ** -0.5
    x_hat = x * rstd
    w = size_w = 1.0
    if weight is not None:
        w = case.offset + weight.double()
        size_w = abs(case.offset) + weight.double().abs()
    wdy = w * dy
    c = (x_hat * wdy).mean(dims, keepdim=True)
    dx = (wdy - x_hat * c) * rstd
    size = (size_w * dy * rstd).abs()
    if "y" not in case.used:
        dx, size = torch.zeros_like(dx), torch.zeros_like(size)
    if residual is not None and "s" in case.used:
        dx, size = dx + ds, size + ds.abs()
    dw = dy * x_hat
    if rows:
        dw, size_dw = dw.sum(rows), dw.abs().sum(rows)
    else:
        size_dw = dw.abs()
    return (
        (x_hat * w, (x_hat * size_w).abs()),
        (total, size_s),
        (dx, size),
        (dx, size),
        (dw, size_dw),
    )


def check(case, found, device, tensors):
    """found = y, s, dx, dresidual, dw: shape, dtype and error of each.

    The allowed error is half a unit of the result, which is rounded once,
    and 16 half units, in float32 (float64 for float64), of the size of the
    terms in it.
    """
    x, residual, weight, *_ = tensors
    wide = torch.promote_types(case.dtype, torch.float32)
    noise = 16 * torch.finfo(wide).eps / 2
    likes = x, residual, x, residual, weight
    names = "y", "s", "dx", "dresidual", "dw"
    expected = exact(case, *tensors, found[1])
    for name, (value, size), got, like in zip(
        names, expected, found, likes, strict=True
    ):
        if got is None:
            continue
        assert got.shape == value.shape, name
        assert got.dtype == like.dtype, name
        rounding = torch.finfo(got.dtype).eps / 2
        if got.dtype == torch.bfloat16 and device.type == "cpu":
            rounding *= 2  # the interpreter cuts bfloat16, not rounds it
        allowed = rounding * value.norm() + noise * size.norm() + 1e-12
        error = (got.double() - value).norm()
        assert error <= allowed, f"{name}: error {error:.1e} > {allowed:.1e}"


def run(page, case):
    """Run one case between guard bands and check everything about it."""
    tensors = case.tensors(page.DEVICE)
    copies = [None if t is None else t.clone() for t in tensors]
    functions = page.rms_norm, page.add_rms_norm
    with guarded_allocations():
        found = results(functions, case, *tensors)
    for tensor, copy in zip(tensors, copies, strict=True):
        if tensor is not None:
            assert torch.equal(tensor, copy), "an input was written"
    there = True, case.fused, case.weight and "y" in case.used
    for got, want, given in zip(found[2:], case.wanted, there, strict=True):
        assert (got is not None) == (want and given)
    check(case, found, page.DEVICE, tensors)
