r"""
Layer Normalization
===================

Write layer normalization forward and backward in Triton, prove each gradient
formula by running it, and sum weight gradients safely behind a lock.

You will be able to:

* normalize each row of a matrix with a single read of it;
* derive the gradient of a normalization and check every step of the algebra;
* add up a gradient over thousands of programs without losing a term;
* wrap the kernels so that a model can train with them;
* judge an error and a speed by numbers that mean something.

You should know Python and PyTorch, and have seen one Triton kernel.
Without a GPU everything here runs in Triton's interpreter, except the timing.

What is computed
----------------

Layer normalization (Ba, Kiros and Hinton, 2016) works on each row alone.
It moves the row to mean 0, scales it to variance 1, and then gives each
column its own scale :math:`w` and shift :math:`b`:

.. math::

   \hat{x} = \frac{x - \mu}{\sqrt{\sigma^2 + \epsilon}}, \qquad
   y = \hat{x} \cdot w + b

Here :math:`\mu` and :math:`\sigma^2` are the mean and the variance of the row.
The small :math:`\epsilon` keeps the division safe when a row is constant.
The input is a matrix of ``M`` rows and ``N`` columns.
"""

# %%
# Every page of this site starts with the same lines.

import os

import matplotlib.pyplot as plt
import torch

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    # Triton's interpreter runs the same kernels on the CPU, slowly.
    os.environ["TRITON_INTERPRET"] = "1"

import triton
import triton.language as tl

DEVICE = torch.device("cuda" if ON_GPU else "cpu")

# %%
# Forward
# -------
#
# A kernel is one function that many programs run at the same time.
# Here one program takes one row.
# It holds the whole row in registers, so it reads ``x`` from memory once.
# The mean comes first and the variance second, both from those registers.
#
# A block of Triton has a power of two of lanes, a row need not.
# The lanes beyond the row are masked: they load 0 and store nothing.
# A 0 does no harm to the sum of the row.
# It does harm the variance, because 0 minus the mean is not 0.
# So those lanes are set to 0 again after the mean is subtracted.
#
# The arithmetic has the type of the saved statistics.
# That is float32 for float16, bfloat16 and float32, and float64 for float64.


@triton.jit
def _layer_norm_fwd(
    x_ptr,  # (M, N), contiguous
    w_ptr,  # (N,) or None
    b_ptr,  # (N,) or None
    y_ptr,  # (M, N), contiguous
    mean_ptr,  # (M,), kept for the backward pass
    rstd_ptr,  # (M,), 1 / sqrt(variance + eps), kept as well
    eps: tl.constexpr,
    N: tl.constexpr,  # known to the compiler: it can use wide loads
    BLOCK: tl.constexpr,  # power of two, at least N
):
    # 64 bits: M * N may pass 2**31.
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < N
    acc = mean_ptr.dtype.element_ty
    x = tl.load(x_ptr + row * N + cols, mask=mask, other=0).to(acc)
    mean = tl.sum(x) / N
    x = tl.where(mask, x - mean, 0)  # masked lanes: 0 again
    rstd = 1 / tl.sqrt(tl.sum(x * x) / N + eps)
    tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)
    # Loaded only now, w and b take no registers during the sums.
    y = x * rstd
    if w_ptr is not None:
        y *= tl.load(w_ptr + cols, mask=mask).to(acc)
    if b_ptr is not None:
        y += tl.load(b_ptr + cols, mask=mask).to(acc)
    tl.store(y_ptr + row * N + cols, y, mask=mask)


# %%
# A warp is 32 lanes of hardware that work together.
# Each lane loads 16 bytes at a time, so a warp loads 512 bytes.
# One warp for each 1024 bytes of the block keeps two such loads on their way.
# A row wider than one block can hold is refused, not computed slowly.

MAX_ROW_BYTES = 65536


def launch_options(N, dtype):
    """Block size and number of warps for rows of N elements."""
    block = triton.next_power_of_2(N)
    warps = min(max(block * dtype.itemsize // 1024, 1), 16)
    return {"BLOCK": block, "num_warps": warps}


def forward(x, w, b, eps):
    """y, mean and rstd for a contiguous (M, N) x."""
    M, N = x.shape
    acc = torch.promote_types(x.dtype, torch.float32)
    y = torch.empty_like(x)
    mean = torch.empty(M, dtype=acc, device=x.device)
    rstd = torch.empty_like(mean)
    _layer_norm_fwd[(M,)](
        x, w, b, y, mean, rstd, eps, N, **launch_options(N, x.dtype)
    )
    return y, mean, rstd


# %%
# A first check, on an input that is not centered.
# Without a GPU the matrix is small, so that this page ends in seconds.

M, N = (1151, 8192) if ON_GPU else (9, 200)

torch.manual_seed(0)
x = -2.3 + 0.5 * torch.randn(M, N, device=DEVICE)
w, b = torch.rand(2, N, device=DEVICE)
y, mean, rstd = forward(x, w, b, 1e-5)
expected = torch.nn.functional.layer_norm(x, (N,), w, b, 1e-5)
print(f"largest difference: {(y - expected).abs().max():.1e}")
torch.testing.assert_close(y, expected)

# %%
# Backward, on paper that runs
# ----------------------------
#
# The backward pass gets ``dy``, the gradient of the loss with respect to
# ``y``, and owes the gradients ``dx``, ``dw`` and ``db``.
# We derive them one step at a time, and each step is checked.
# The forward pass below is written in plain PyTorch, in float64, and autograd
# keeps every intermediate value, so we can ask it for any gradient we like.

eps = 1e-5
x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
w, b = torch.rand(2, 6, dtype=torch.float64).requires_grad_()
dy = torch.randn(4, 6, dtype=torch.float64)

mu = x.mean(dim=1, keepdim=True)
var = ((x - mu) ** 2).mean(dim=1, keepdim=True)
r = (var + eps) ** -0.5
x_hat = (x - mu) * r
y = x_hat * w + b


def autograd(value):
    """What autograd says about the gradient of value."""
    return torch.autograd.grad(y, value, dy, retain_graph=True)[0]


assert_close = torch.testing.assert_close

# %%
# Step 1: through scale and shift.
# Each column multiplies its gradient by ``w``.
# We call the product ``wdy``; it is the gradient of :math:`\hat{x}`.

wdy = w * dy
assert_close(wdy, autograd(x_hat))

# %%
# Step 2: through :math:`r = (\sigma^2 + \epsilon)^{-1/2}`.
# The whole row was multiplied by :math:`r`, so its gradient is a sum over the
# row; then comes the derivative of the power.

dr = ((x - mu) * wdy).sum(dim=1, keepdim=True)
assert_close(dr, autograd(r))
dvar = dr * -0.5 * r**3
assert_close(dvar, autograd(var))

# %%
# Step 3: through the mean.
# :math:`\mu` was subtracted from each element of the row, which gives a sum
# with a minus sign.
# It also stands inside the variance, but adds nothing there: the derivative
# is a multiple of :math:`\sum_j (x_j - \mu)`, which is 0.

dmu = -(r * wdy).sum(dim=1, keepdim=True)
assert_close(dmu, autograd(mu))

# %%
# Step 4: collect the three ways from ``x`` to the loss.
# ``x`` is used directly, in the variance, and in the mean.

dx = r * wdy + dvar * 2 * (x - mu) / 6 + dmu / 6
assert_close(dx, autograd(x))

# %%
# Step 5: put step 2 and step 3 into it.
# Since :math:`(x - \mu) \, r = \hat{x}`, two row means remain, named ``c1``
# and ``c2`` by tradition:
#
# .. math::
#
#    c_1 = \frac{1}{N} \sum_j \hat{x}_j \, w_j \, dy_j, \qquad
#    c_2 = \frac{1}{N} \sum_j w_j \, dy_j, \qquad
#    dx = (w \cdot dy - \hat{x} \, c_1 - c_2) \; r

c1 = (x_hat * wdy).mean(dim=1, keepdim=True)
c2 = wdy.mean(dim=1, keepdim=True)
dx = (wdy - x_hat * c1 - c2) * r
assert_close(dx, autograd(x))

# %%
# Step 6: the parameters.
# All rows share ``w`` and ``b``, so their gradients are sums over the rows:
#
# .. math::
#
#    dw = \sum_i dy_i \cdot \hat{x}_i, \qquad db = \sum_i dy_i

assert_close((dy * x_hat).sum(dim=0), autograd(w))
assert_close(dy.sum(dim=0), autograd(b))

# %%
# Two properties need no reference at all.
# A constant added to a row changes nothing in ``y``.
# So a row of ``dx`` has no part along the constant: it sums to zero.
# A row that is stretched about its mean changes ``y`` only through
# :math:`\epsilon`.
# So a row of ``dx`` is orthogonal to :math:`\hat{x}`, up to
# :math:`\epsilon \, r^3 N c_1`, which tends to 0 with :math:`\epsilon`.
# A formula without ``c2`` fails the first test, one without ``c1`` the second.

print("sum of each row of dx:", dx.sum(dim=1).tolist())
print("dot with each row of x_hat:", (dx * x_hat).sum(dim=1).tolist())
assert_close(dx.sum(dim=1), torch.zeros(4, dtype=torch.float64))
assert_close((dx * x_hat).sum(dim=1, keepdim=True), eps * r**3 * 6 * c1)

# %%
# Backward kernels
# ----------------
#
# ``dx`` is easy: one program a row again, two sums, one store.
# ``dw`` and ``db`` need every row, and every program has only one.
# They are summed in two stages.
#
# * Stage 1: the program of row ``i`` adds its ``dy * x_hat`` and ``dy`` to
#   buffer ``i % GROUP_SIZE_M``, one of a few buffers of one row each.
# * Stage 2: a second, small kernel adds up the buffers.
#
# With one buffer all programs would wait for each other.
# With one buffer for each row, stage 2 would read as much as stage 1 wrote.
# In the picture ``M = 4`` and ``GROUP_SIZE_M = 2``: rows of one color share a
# buffer.


def diagram():
    _, ax = plt.subplots(figsize=(7.5, 3.4))
    ax.set(xlim=(0, 10), ylim=(-0.6, 4.4))
    ax.axis("off")

    def box(x, y, text, color):
        ax.add_patch(
            plt.Rectangle((x, y), 2.2, 0.7, fc=color, ec="black", alpha=0.6)
        )
        ax.text(x + 1.1, y + 0.35, text, ha="center", va="center")

    def arrow(start, end):
        ax.annotate(
            "", end, start, arrowprops={"arrowstyle": "->", "color": "black"}
        )

    for row in range(4):
        group = row % 2
        box(0.1, 3 - row, f"row {row}", f"C{group}")
        arrow((2.4, 3.35 - row), (3.8, 2.85 - 2 * group))
    for group in range(2):
        box(3.9, 2.5 - 2 * group, f"buffer {group}", f"C{group}")
        arrow((6.2, 2.85 - 2 * group), (7.6, 1.85))
    box(7.7, 1.5, "dw, db", "C2")
    ax.text(3.1, 4.1, "stage 1: add, one at a time", ha="center")
    ax.text(6.9, 3.1, "stage 2: reduce", ha="center")
    plt.show()


diagram()

# %%
# Two programs must not add to one buffer at the same time: both would read
# the old sum, and one addition would be lost.
# So each buffer has a lock, an integer that is 0 when free.
# ``atomic_cas`` compares it with 0 and sets it to 1 in one step that nobody
# can interrupt; a program repeats that until it was the one that found 0.
# ``atomic_xchg`` puts the 0 back.
#
# The release needs care.
# A program is many threads, and each stores its own columns of the sum.
# One thread alone executes the exchange that frees the lock.
# Without a barrier it may do that while other threads still have stores to
# make; the next program then reads a sum that is half old.
# ``tl.debug_barrier()`` makes all threads of the program arrive first.
# The exchange itself orders memory: who sees the 0 sees the stores as well.
#
# A second integer says whether the buffer was ever written.
# The first program to arrive does not read it, so nothing needs to be zeroed
# except these integers.


@triton.jit
def _layer_norm_bwd_dx(
    dy_ptr,  # (M, N), contiguous
    x_ptr,  # (M, N), contiguous
    w_ptr,  # (N,) or None
    mean_ptr,  # (M,)
    rstd_ptr,  # (M,)
    dx_ptr,  # (M, N), or None: not wanted
    dw_sums_ptr,  # (GROUP_SIZE_M, N), buffers for stage 2
    db_sums_ptr,  # (GROUP_SIZE_M, N)
    locks_ptr,  # (2, GROUP_SIZE_M): taken?, written?; None: no dw, no db
    N: tl.constexpr,
    GROUP_SIZE_M: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < N
    acc = mean_ptr.dtype.element_ty
    x = tl.load(x_ptr + row * N + cols, mask=mask, other=0).to(acc)
    dy = tl.load(dy_ptr + row * N + cols, mask=mask, other=0).to(acc)
    rstd = tl.load(rstd_ptr + row)
    x_hat = (x - tl.load(mean_ptr + row)) * rstd
    if dx_ptr is not None:
        # Here masked lanes need no care: their wdy is 0.
        wdy = dy
        if w_ptr is not None:
            wdy *= tl.load(w_ptr + cols, mask=mask, other=0).to(acc)
        c1 = tl.sum(x_hat * wdy) / N
        c2 = tl.sum(wdy) / N
        dx = (wdy - x_hat * c1 - c2) * rstd
        tl.store(dx_ptr + row * N + cols, dx, mask=mask)
    if locks_ptr is not None:
        buffer = row % GROUP_SIZE_M
        lock_ptr = locks_ptr + buffer
        written_ptr = lock_ptr + GROUP_SIZE_M
        dw_ptr = dw_sums_ptr + buffer * N + cols
        db_ptr = db_sums_ptr + buffer * N + cols
        dw = dy * x_hat
        while tl.atomic_cas(lock_ptr, 0, 1) == 1:
            pass
        old = mask & (tl.load(written_ptr) == 1)
        dw += tl.load(dw_ptr, mask=old, other=0)
        dy += tl.load(db_ptr, mask=old, other=0)
        tl.store(dw_ptr, dw, mask=mask)
        tl.store(db_ptr, dy, mask=mask)
        tl.store(written_ptr, 1)
        tl.debug_barrier()  # every thread has stored its columns
        tl.atomic_xchg(lock_ptr, 0)


# %%
# Stage 2 gives each program a few columns of all buffers.
# If there are fewer rows than buffers, the last buffers were never written,
# so they are masked.


@triton.jit
def _layer_norm_bwd_dwdb(
    dw_sums_ptr,  # (GROUP_SIZE_M, N)
    db_sums_ptr,  # (GROUP_SIZE_M, N)
    dw_ptr,  # (N,), or None: not wanted
    db_ptr,  # (N,), or None: not wanted
    M,
    N: tl.constexpr,
    GROUP_SIZE_M: tl.constexpr,
    BLOCK: tl.constexpr,  # columns of one program
):
    rows = tl.arange(0, GROUP_SIZE_M)[:, None]
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = (rows < M) & (cols < N)
    tile = rows * N + cols
    if dw_ptr is not None:
        dw = tl.sum(tl.load(dw_sums_ptr + tile, mask=mask, other=0), axis=0)
        tl.store(dw_ptr + cols, dw, mask=cols < N)
    if db_ptr is not None:
        db = tl.sum(tl.load(db_sums_ptr + tile, mask=mask, other=0), axis=0)
        tl.store(db_ptr + cols, db, mask=cols < N)


# %%
# More buffers mean less waiting, but more memory to add up in stage 2.
# Wide rows get fewer, for their buffers are large.
# The sums are float32 whatever type ``x`` has (float64 for float64): a sum of
# thousands of terms that is rounded to 16 bits at each addition loses digits.


def group_size(N):
    """Number of buffers: a power of two."""
    return 256 if N <= 2048 else 128 if N <= 8192 else 64


def backward(dy, x, w, mean, rstd, dx, dw, db):
    """Fill dx, dw and db; each of them may be None."""
    M, N = x.shape
    options = launch_options(N, x.dtype)
    G = group_size(N)
    sums, locks = (None, None), None
    if dw is not None or db is not None:
        sums = torch.empty(2, G, N, dtype=mean.dtype, device=x.device)
        locks = torch.zeros(2, G, dtype=torch.int32, device=x.device)
    _layer_norm_bwd_dx[(M,)](
        dy, x, w, mean, rstd, dx, sums[0], sums[1], locks, N, G, **options
    )
    if locks is not None:
        grid = (triton.cdiv(N, 16),)
        _layer_norm_bwd_dwdb[grid](sums[0], sums[1], dw, db, M, N, G, BLOCK=16)


# %%
# A function to train with
# ------------------------
#
# The kernels trust their arguments: contiguous rows, right shapes.
# The function around them must not.
# ``reshape`` and ``contiguous`` make a copy where the layout needs one.
# Any other way would be an access out of bounds for some layout: the gradient
# of a plain ``sum()``, for instance, is a single number with strides of 0.


class LayerNorm(torch.autograd.Function):
    """Autograd calls forward and backward with these arguments."""

    @staticmethod
    def forward(ctx, x, weight, bias, N, eps):
        rows = x.reshape(-1, N).contiguous()
        w = None if weight is None else weight.reshape(N).contiguous()
        b = None if bias is None else bias.reshape(N).contiguous()
        y, mean, rstd = forward(rows, w, b, eps)
        ctx.save_for_backward(rows, w, mean, rstd)
        ctx.like = weight, bias
        return y.reshape(x.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        x, w, mean, rstd = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:3]
        dx = torch.empty_like(x) if wanted[0] else None
        dw, db = (
            torch.empty(like.shape, dtype=like.dtype, device=x.device)
            if want
            else None
            for like, want in zip(ctx.like, wanted[1:], strict=True)
        )
        backward(
            dy.reshape(x.shape).contiguous(), x, w, mean, rstd, dx, dw, db
        )
        return (dx if dx is None else dx.reshape(dy.shape)), dw, db, None, None


def layer_norm(x, normalized_shape, weight, bias, eps=1e-5):
    """Normalize x over its last dimensions; weight and bias may be None."""
    shape = _check(x, normalized_shape, weight, bias, eps)
    return LayerNorm.apply(x, weight, bias, shape.numel(), eps)


# %%
# A mistake in the arguments deserves a message that names the argument.

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _check(x, normalized_shape, weight, bias, eps):
    if isinstance(normalized_shape, int):
        normalized_shape = (normalized_shape,)
    shape = torch.Size(normalized_shape)
    for name, tensor in (("x", x), ("weight", weight), ("bias", bias)):
        if name != "x" and tensor is None:
            continue
        if tensor.dtype not in FLOATS:
            raise TypeError(f"{name} has {tensor.dtype}, which is no float")
        if tensor.device.type != DEVICE.type or tensor.device != x.device:
            raise ValueError(
                f"{name} is on {tensor.device}; x, weight and bias must be "
                f"on one {DEVICE.type} device"
            )
    if shape.numel() == 0 or x.shape[-len(shape) :] != shape:
        raise ValueError(
            f"x has shape {tuple(x.shape)}, which does not end in "
            f"normalized_shape {tuple(shape)}"
        )
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.shape != shape:
            raise ValueError(f"{name} does not have shape {tuple(shape)}")
    if not eps >= 0:
        raise ValueError(f"eps is {eps}, but must not be negative")
    if shape.numel() * x.element_size() > MAX_ROW_BYTES:
        raise ValueError(
            f"normalized_shape {tuple(shape)} is over {MAX_ROW_BYTES} bytes "
            "a row: see page 03 for wide rows"
        )
    return shape
