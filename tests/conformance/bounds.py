"""How far each element of a result may be from the exact one.

Two things round. A result is rounded to its type: by half a unit of its own
size. And the arithmetic before that rounds, in float32 (float64 for float64):
by half a unit of the size of each term that was added for this element.

How many half units? Eight for what is not a long sum: a handful of
operations, square roots and divisions that a GPU approximates to two units,
and the tree in which a program adds up its lanes; in Triton's interpreter,
where these are exact, the worst element of all cases is off by two. A sum of
n terms adds more,
and how much depends on the order, which is the kernel's own. In the worst
order, one long chain of terms of one sign, the partial sums grow evenly to
the whole, and the errors of the n additions, each spread over one half unit
of its partial sum, have together a standard deviation of sqrt(n) / 3 half
units of the whole (3 = sqrt(3) of an even spread, times sqrt(3) of the sum of
squares). Three standard deviations are sqrt(n); shorter chains and terms of
both signs, which nearly all sums here have, stay far below.

An element by chance near 0 has small terms only if all of its terms are
small, so a zeroed, swapped or missing element shows, however large the matrix
is. Beside that, the errors of a whole result are bound in norm, by eight
half units of the sizes' norm: many elements that are off by a little show
there.
"""

import dataclasses

import torch


@dataclasses.dataclass(frozen=True)
class Expected:
    value: torch.Tensor  # float64
    size: torch.Tensor  # of the terms that were added for each element
    dtype: torch.dtype  # of the result
    count: int = 1  # of the terms in the longest sum
    before: tuple = ()  # types it was rounded to on the way
    least: float = 0.0  # what any element may be off by, more


HALF_UNITS = 8


def arithmetic(*dtypes):
    """The type a kernel computes in."""
    wide = torch.float32
    for dtype in dtypes:
        wide = torch.promote_types(wide, dtype)
    return wide


def compare(name, got, expected, wide):
    """Check the shape, the type and the error of each element."""
    value, dtype = expected.value, expected.dtype
    assert got.shape == value.shape, (
        f"{name}: its shape is {(*got.shape,)}, not {(*value.shape,)}"
    )
    assert got.dtype == dtype, f"{name}: its type is {got.dtype}, not {dtype}"
    got = got.detach().double()
    finite = value.isfinite()
    if not finite.all():
        same = torch.equal(
            got[~finite].nan_to_num(7.0), value[~finite].nan_to_num(7.0)
        )
        assert same, f"{name}: infinity or NaN at other places"
        zero = torch.zeros((), dtype=torch.float64, device=value.device)
        value, got = value.where(finite, zero), got.where(finite, zero)
    size = expected.size.where(finite, 0 * value)
    error = (got - value).abs()
    rounding, least = 0.0, expected.least
    for kind in (dtype, *expected.before):
        unit = torch.finfo(kind).eps
        # The interpreter cuts bfloat16, not rounds it.
        cut = kind == torch.bfloat16 and value.device.type == "cpu"
        rounding += unit if cut else unit / 2
        # Beside 0 numbers lie evenly, and some operations know only 0 there.
        least += torch.finfo(kind).smallest_normal * unit
    least += torch.finfo(wide).smallest_normal
    unit = torch.finfo(wide).eps / 2
    noise = unit * (HALF_UNITS + expected.count**0.5)
    allowed = rounding * value.abs() + noise * size + least
    if not (error <= allowed).all():  # NaN is not
        share = (error / allowed).nan_to_num(torch.inf)
        worst = share.argmax().item()
        at = tuple(i.item() for i in torch.unravel_index(
            torch.tensor(worst), error.shape))  # fmt: skip
        raise AssertionError(
            f"{name}: error {error[at].item():.1e} > "
            f"{allowed[at].item():.1e} at {at}: "
            f"{got[at].item():.6g}, not {value[at].item():.6g}"
        )
    allowed = rounding * value.norm() + unit * HALF_UNITS * size.norm()
    allowed += least * value.numel() ** 0.5
    assert error.norm() <= allowed, (
        f"{name}: error {error.norm():.1e} > {allowed:.1e} in norm"
    )
