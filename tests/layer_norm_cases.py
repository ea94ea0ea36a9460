"""Cases and checks that every layer norm of these tutorials must pass."""

import contextlib
import dataclasses

import pytest
import torch

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# One rule on all pages: y has the type of x, and s that of the residual, which
# is that of x or a wider one. Pairs that are taken, and pairs that are not.
STREAMS = [
    *((dtype, dtype) for dtype in DTYPES),
    (torch.float16, torch.float32),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float64),
    (torch.float32, torch.float64),
]
NO_STREAMS = [
    (torch.float32, torch.float16),
    (torch.float32, torch.bfloat16),
    (torch.float64, torch.float32),
    (torch.float16, torch.bfloat16),  # neither holds the other
    (torch.bfloat16, torch.float16),
    (torch.float16, torch.int16),
    (torch.float16, torch.float8_e4m3fn),
]

# M from each size, N from each size, without the slow products.
SHAPES = (
    (1, 1),
    (3, 1),
    (1, 2),
    (2, 3),
    (3, 2),
    (17, 17),
    (129, 3),
    (2, 127),
    (3, 128),
    (127, 129),
    (130, 2),
    (131, 17),
    (1000, 2),
    (1, 1000),
    (17, 1023),
    (3, 1151),
    (1023, 17),
    (1151, 1),
    (2, 4608),
)


def long(value):
    """A parameter that make test leaves to make test-all."""
    return pytest.param(value, marks=pytest.mark.long)


# The interpreter needs milliseconds for each row.
LONG_SHAPES = [long(s) if s[0] >= 1000 else s for s in SHAPES]


def types(M, N):
    """Every type for small matrices; types and sizes do not meet."""
    return DTYPES if M < 100 and M * N < 3000 else DTYPES[:1]


# The code that looks at a layout does not look at the type: one type, and
# pairs by chance in test_any_case.
LONG_DTYPES = [torch.float16, *map(long, DTYPES[1:])]


def long_widths(widths, every_type):
    """Parametrize: float16 at each width, every type at one of them."""
    return pytest.mark.parametrize(
        ("N", "dtype"),
        [
            (N, dtype)
            if dtype == torch.float16 or every_type == N
            else pytest.param(N, dtype, marks=pytest.mark.long)
            for N in widths
            for dtype in DTYPES
        ],
    )


def _contiguous(shape, fill):
    """Between two bands of NaN."""
    value = fill(shape)
    return guarded(shape, value.dtype, value.device)[0].copy_(value)


def _columns(shape, fill):
    """Columns of a wider tensor whose other columns are NaN."""
    wide = torch.full((*shape[:-1], shape[-1] + 19), float("nan"))
    wide = wide.to(fill(shape))
    part = wide[..., 7 : 7 + shape[-1]]
    return part.copy_(fill(shape))


def _transposed(shape, fill):
    """The first and the last dimension swapped in memory."""
    return fill(shape).transpose(0, -1).contiguous().transpose(0, -1)


def _every_second(shape, fill):
    """Every second element of a tensor; the others are NaN."""
    wide = torch.full((*shape, 2), float("nan")).to(fill(shape))
    return wide[..., 0].copy_(fill(shape))


def _unaligned(shape, fill):
    """Contiguous, but not at the start of the memory."""
    value = fill(shape)
    flat = value.new_full((value.numel() + 1,), float("nan"))
    return flat[1:].view(shape).copy_(value)


def _one_number(shape, fill):
    """One number with strides of 0, as from sum().backward()."""
    return fill(()).expand(shape)


LAYOUTS = {
    "contiguous": _contiguous,
    "columns": _columns,
    "transposed": _transposed,
    "every second": _every_second,
    "unaligned": _unaligned,
    "one number": _one_number,
}


@dataclasses.dataclass(frozen=True)
class Case:
    lead: tuple = (17,)  # leading dimensions
    shape: tuple = (129,)  # normalized shape
    dtype: torch.dtype = torch.float32
    weight_dtype: torch.dtype | None = None  # None: as x
    x: str = "contiguous"
    dy: str = "contiguous"
    parameters: str = "contiguous"
    weight: bool = True
    bias: bool = True
    wanted: tuple = (True, True, True)  # requires_grad of x, weight, bias
    eps: float = 1e-5

    def tensors(self, device):
        """x, weight, bias and dy."""
        generator = torch.Generator().manual_seed(0)

        def filler(dtype, scale, shift):
            def fill(shape):
                value = torch.randn(shape, generator=generator)
                return (shift + scale * value).to(device, dtype)

            return fill

        p_dtype = self.weight_dtype or self.dtype
        full = self.lead + self.shape
        x = LAYOUTS[self.x](full, filler(self.dtype, 0.5, -2.3))
        dy = LAYOUTS[self.dy](full, filler(self.dtype, 0.1, 0.0))
        layout = LAYOUTS[self.parameters]
        weight = layout(self.shape, filler(p_dtype, 0.3, 0.5))
        bias = layout(self.shape, filler(p_dtype, 0.3, 0.5))
        weight = weight if self.weight else None
        bias = bias if self.bias else None
        return x, weight, bias, dy


def wrong_in_interpreter(dtype, weight_dtype):
    """Triton's interpreter stores a float64 value as bfloat16 wrongly."""
    return dtype == torch.float64 and weight_dtype == torch.bfloat16


def gradients(function, case, x, weight, bias, dy):
    """y and the gradients that the case wants; None for the others."""
    leaves = [
        None if t is None else t.detach().requires_grad_(want)
        for t, want in zip((x, weight, bias), case.wanted, strict=True)
    ]
    y = function(leaves[0], case.shape, *leaves[1:], case.eps)
    asked = [t for t in leaves if t is not None and t.requires_grad]
    found = iter(torch.autograd.grad(y, asked, dy) if asked else ())
    return y.detach(), *(
        next(found) if t is not None and t.requires_grad else None
        for t in leaves
    )


def exact(case, x, weight, bias, dy):
    """For y, dx, dw, db: float64 result, and size of the terms in it."""

    def wide(tensor):
        return None if tensor is None else tensor.detach().double()

    x, weight, bias, dy = map(wide, (x, weight, bias, dy))
    n = len(case.shape)
    dims = tuple(range(-n, 0))
    rows = tuple(range(x.dim() - n))
    mean = x.mean(dims, keepdim=True)
    variance = ((x - mean) ** 2).mean(dims, keepdim=True)
    rstd = (variance + case.eps) ** -0.5
    x_hat = (x - mean) * rstd
    wdy = dy if weight is None else weight * dy
    c1 = (x_hat * wdy).mean(dims, keepdim=True)
    c2 = wdy.mean(dims, keepdim=True)
    y = x_hat if weight is None else x_hat * weight
    size = y.abs() + (1 if weight is None else weight.abs())
    if bias is not None:
        y, size = y + bias, size + bias.abs()
    dw, db = dy * x_hat, dy
    return {
        "y": (y, size),
        "dx": ((wdy - x_hat * c1 - c2) * rstd, (wdy * rstd).abs()),
        "dw": (_sum(dw, rows), _sum(dw.abs() + dy.abs(), rows)),
        "db": (_sum(db, rows), _sum(db.abs(), rows)),
    }, (1 + (x.abs() * rstd).max().item() if x.numel() else 1)


def _sum(tensor, dims):
    return tensor.sum(dims) if dims else tensor


def check(case, found, device, tensors):
    """found = y, dx, dw, db: shape, dtype and error of each.

    The allowed error has two parts. The result is rounded once to its type:
    half a unit of its own size. And the arithmetic before that (float32, or
    float64 for float64) rounds too: 16 half units of the size of the terms,
    times the size of x in standard deviations, which subtracting the mean
    costs.
    """
    x, weight, bias, _ = tensors
    expected, cancels = exact(case, *tensors)
    wide = torch.promote_types(case.dtype, torch.float32)
    noise = 16 * torch.finfo(wide).eps / 2 * cancels
    likes = (x, x, weight, bias)
    for (name, (value, size)), got, like in zip(
        expected.items(), found, likes, strict=True
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


def run(function, case, device):
    """Run one case between guard bands and check everything about it."""
    tensors = case.tensors(device)
    copies = [None if t is None else t.clone() for t in tensors]
    with guarded_allocations():
        found = gradients(function, case, *tensors)
    for tensor, copy in zip(tensors, copies, strict=True):
        if tensor is not None:
            assert torch.equal(tensor, copy), "an input was written"
    given = (True, case.weight, case.bias)
    for got, want, there in zip(found[1:], case.wanted, given, strict=True):
        assert (got is not None) == (want and there)
    check(case, found, device, tensors)


# Bytes of a guard band. 255 in every byte is NaN in each float type.
GUARD = 4096


def takes_the_place(theirs, ours, *args, **options):
    """A module loads what PyTorch's has saved, and gives the same, with a
    residual, too."""
    theirs, ours = theirs(*args, **options), ours(*args, **options)
    for parameter in theirs.parameters():
        torch.nn.init.uniform_(parameter)
    ours.load_state_dict(theirs.state_dict())
    shape, device = theirs.normalized_shape, theirs.weight.device
    x, residual = torch.randn(2, 3, *shape, device=device)
    torch.testing.assert_close(ours(x), theirs(x))
    y, s = ours(x, residual)
    torch.testing.assert_close(y, theirs(x + residual))
    assert torch.equal(s, x + residual)


def guarded(shape, dtype, device):
    """A tensor of NaN between two bands, and the memory that holds all."""
    shape = torch.Size(shape)
    size = shape.numel() * dtype.itemsize
    memory = torch.full(
        (size + 2 * GUARD,), 255, dtype=torch.uint8, device=device
    )
    return memory[GUARD : GUARD + size].view(dtype).view(shape), memory


@contextlib.contextmanager
def guarded_allocations():
    """Put bands around every tensor that the code inside allocates.

    What torch.empty gives is NaN, so a read of it, or of a band, shows in the
    result. At the end the bands must be untouched.
    """
    memories = []

    def allocate(*shape, dtype=None, device=None, like=None):
        if like is not None:
            shape = like.shape
            dtype = dtype or like.dtype
            device = device or like.device
        elif len(shape) == 1 and not isinstance(shape[0], int):
            shape = shape[0]
        dtype = dtype or torch.get_default_dtype()
        tensor, memory = guarded(shape, dtype, device)
        memories.append(memory)
        return tensor

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", allocate)
        patch.setattr(
            torch, "empty_like", lambda t, **k: allocate(like=t, **k)
        )
        patch.setattr(
            torch, "zeros", lambda *s, **k: allocate(*s, **k).zero_()
        )
        yield
    assert memories, "nothing was allocated"
    for memory in memories:
        assert (memory[:GUARD] == 255).all(), "written before a buffer"
        assert (memory[-GUARD:] == 255).all(), "written behind a buffer"
