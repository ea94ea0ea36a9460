r"""
Layer Normalization
===================

Write layer normalization forward and backward in Triton, prove each gradient
formula by running it, and sum weight gradients safely behind a lock.

You will be able to:

* normalize each row of a matrix and read it from memory only once;
* derive the gradient of a normalization and check every step of the algebra;
* add up a gradient over many programs without losing a term;
* wrap the kernels so that a model can train with them;
* say how exact and how fast the result is, and compared with what.

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

import importlib.util
import os

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F

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
# It holds the whole row in registers, the memory inside a processor, so it
# reads ``x`` only once.
# The mean comes first and the variance second, both from those registers.
#
# A block in Triton has a power of two of lanes; a row may have any length.
# The lanes beyond the row are masked: they load 0 and store nothing.
# A 0 does no harm to the sum of the row.
# It does harm the variance, because 0 minus the mean is not 0.
# So those lanes are set to 0 again after the mean is subtracted.
#
# Sums are computed in the type of the saved statistics.
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
    # 64 bits, because M * N may pass 2**31.
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
# A warp is a group of 32 threads that work together.
# Each of them loads 16 bytes at a time.
# We give a row few warps: one for each 4096 bytes of the block, at least 4.
# Then each thread has several loads on their way at once, and more rows fit
# on one multiprocessor, the part of a GPU that runs programs.
# The backward pass holds more numbers for each column, so there it is one
# warp for each 2048 bytes.
#
# A row must fit into the registers of one program.
# Page 03 has kernels for rows that do not.

MAX_COLUMNS = 16384


def launch_options(N, dtype, warp_bytes):
    """Block size and number of warps for rows of N elements."""
    block = triton.next_power_of_2(N)
    warps = min(max(block * dtype.itemsize // warp_bytes, 4), 16)
    return {"BLOCK": block, "num_warps": warps}


def forward(x, w, b, eps):
    """y, mean and rstd for a contiguous (M, N) x."""
    M, N = x.shape
    acc = torch.promote_types(x.dtype, torch.float32)
    y = torch.empty_like(x)
    mean = torch.empty(M, dtype=acc, device=x.device)
    rstd = torch.empty_like(mean)
    _layer_norm_fwd[(M,)](
        x, w, b, y, mean, rstd, eps, N, **launch_options(N, x.dtype, 4096)
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
expected = F.layer_norm(x, (N,), w, b, 1e-5)
print(f"largest difference: {(y - expected).abs().max():.1e}")
torch.testing.assert_close(y, expected)

# %%
# Backward: the formulas
# ----------------------
#
# The backward pass gets ``dy``, the gradient of the loss with respect to
# ``y``, and must return the gradients ``dx``, ``dw`` and ``db``.
# We derive them one step at a time, and each step is checked.
# The forward pass is written once more in plain PyTorch, in float64.
# Autograd can then give the gradient of every value on the way.
# A step that disagreed with it would stop this page with an error.

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
# **Step 1: through scale and shift.**
# Each column multiplies its gradient by ``w``.
# We call the product ``wdy``; it is the gradient of :math:`\hat{x}`.

wdy = w * dy
assert_close(wdy, autograd(x_hat))

# %%
# **Step 2: through** :math:`r = (\sigma^2 + \epsilon)^{-1/2}`.
# The whole row was multiplied by :math:`r`, so its gradient is a sum over the
# row; then comes the derivative of the power.

dr = ((x - mu) * wdy).sum(dim=1, keepdim=True)
assert_close(dr, autograd(r))
dvar = dr * -0.5 * r**3
assert_close(dvar, autograd(var))

# %%
# **Step 3: through the mean.**
# :math:`\mu` was subtracted from each element of the row, which gives a sum
# with a minus sign.
# It also stands inside the variance, but adds nothing there: the derivative
# is a multiple of :math:`\sum_j (x_j - \mu)`, which is 0.

dmu = -(r * wdy).sum(dim=1, keepdim=True)
assert_close(dmu, autograd(mu))

# %%
# **Step 4: all three ways together.**
# ``x`` is used directly, in the variance and in the mean.

dx = r * wdy + dvar * 2 * (x - mu) / 6 + dmu / 6
assert_close(dx, autograd(x))

# %%
# **Step 5: simplify.**
# We put the results of steps 2 and 3 into step 4.
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
# **Step 6: the parameters.**
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
# So a row of ``dx`` is orthogonal to :math:`\hat{x}`, up to a rest of exactly
# :math:`\epsilon \, r^3 N c_1`.
# A formula without ``c2`` fails the first test, one without ``c1`` the second.

total = dx.sum(dim=1, keepdim=True)
product = (dx * x_hat).sum(dim=1, keepdim=True)
print(f"sums of the rows: at most {total.abs().max():.1e}")
print(f"products with x_hat: at most {product.abs().max():.1e}")
assert_close(total, torch.zeros_like(total))
assert_close(product, eps * r**3 * 6 * c1)

# %%
# Backward kernels
# ----------------
#
# ``dx`` needs two sums over each row, which one program can compute alone.
# ``dw`` and ``db`` are sums over all rows, and no program has all rows.
# They are computed in two stages.
#
# * Stage 1: each program takes several rows and adds up their ``dy * x_hat``
#   and ``dy`` in registers.
#   Then program ``i`` adds its two sums to buffer ``i % GROUP_SIZE_M``.
#   There are ``GROUP_SIZE_M`` buffers, each as long as a row.
# * Stage 2: a second, small kernel adds up the buffers.
#
# With one buffer all programs would wait for each other.
# With very many, stage 2 would have much to read.
# In the picture there are ``M = 4`` rows, a program for each, and
# ``GROUP_SIZE_M = 2``: rows of one color share a buffer.


def diagram():
    _, ax = plt.subplots(
        num="Four rows add to two buffers; a second stage sums the buffers",
        figsize=(7.5, 3.4),
    )
    ax.set(xlim=(0, 10), ylim=(-0.3, 4.4))
    ax.axis("off")

    def box(x, y, text, color):
        ax.add_patch(
            plt.Rectangle((x, y), 2.2, 0.7, fc=color, ec="black", alpha=0.6)
        )
        ax.text(x + 1.1, y + 0.35, text, ha="center", va="center")

    def arrow(start, end):
        style = {"arrowstyle": "->", "color": "black"}
        ax.annotate("", end, start, arrowprops=style)

    for row in range(4):
        group = row % 2
        box(0.1, 3 - row, f"row {row}", f"C{group}")
        arrow((2.4, 3.35 - row), (3.8, 2.85 - 2 * group))
    for group in range(2):
        box(3.9, 2.5 - 2 * group, f"buffer {group}", f"C{group}")
        arrow((6.2, 2.85 - 2 * group), (7.6, 1.85))
    box(7.7, 1.5, "dw, db", "C2")
    ax.text(3.1, 4.1, "stage 1: add, one at a time", ha="center")
    ax.text(7.4, 3.3, "stage 2: reduce", ha="center")
    plt.show()


diagram()

# %%
# Two programs must not add to one buffer at the same time: both would read
# the old sum, and one addition would be lost.
# So each buffer has a lock, an integer with three states:
#
# * 0: free, and the buffer was never written;
# * 1: taken;
# * 2: free, and the buffer holds a sum.
#
# ``atomic_xchg`` writes a new value and returns the old one in a single step
# that nobody can interrupt.
# A program writes 1 until the old value is not 1: then the lock is its own.
# The old value also says whether there is a sum to read.
# So the buffers need no zeros, and memory that was never written is never
# read.
#
# The release needs care.
# A program is many threads, and each stores its own columns of the sum.
# One thread alone executes the exchange that frees the lock.
# Without a barrier it may do so while other threads still have stores to
# make; the next program then reads a sum that is half old.
# ``tl.debug_barrier()`` makes all threads of the program arrive first.
# The compiler of triton 3.9.0 puts such a barrier there by itself; those of
# 3.6.0 and 3.7.1 do not.
# ``release`` then says: who sees the 2 also sees the stores before it.
# ``acquire`` is the other half: no load after it may come too early.
#
# Nobody waits forever: a lock belongs to a program that is already running,
# and nothing between taking and freeing it waits for another program.


@triton.jit
def _add_behind_lock(
    dw,  # one row of sums, in registers
    db,
    sums_ptr,  # (2, GROUP_SIZE_M, N): the buffers of dw, then those of db
    locks_ptr,  # (GROUP_SIZE_M,), 0 at the start
    cols,
    N: tl.constexpr,
    GROUP_SIZE_M: tl.constexpr,
):
    buffer = tl.program_id(0) % GROUP_SIZE_M
    lock_ptr = locks_ptr + buffer
    dw_ptr = sums_ptr + buffer * N + cols
    db_ptr = dw_ptr + GROUP_SIZE_M * N
    state = tl.atomic_xchg(lock_ptr, 1, sem="acquire")
    while state == 1:
        state = tl.atomic_xchg(lock_ptr, 1, sem="acquire")
    old = cols < tl.where(state == 2, N, 0)  # all columns, or none
    dw += tl.load(dw_ptr, mask=old, other=0)
    db += tl.load(db_ptr, mask=old, other=0)
    tl.store(dw_ptr, dw, mask=cols < N)
    tl.store(db_ptr, db, mask=cols < N)
    tl.debug_barrier()  # every thread has stored its columns
    tl.atomic_xchg(lock_ptr, 2, sem="release")


# %%
# This is the kernel of stage 1.
# Of 100 programs, program 3 takes the rows 3, 103, 203 and so on.
# It takes the lock once, at the end, when its rows are summed.


@triton.jit
def _layer_norm_bwd_dx(
    dy_ptr,  # (M, N), contiguous
    x_ptr,  # (M, N), contiguous
    w_ptr,  # (N,) or None
    mean_ptr,  # (M,)
    rstd_ptr,  # (M,)
    dx_ptr,  # (M, N), or None: not wanted
    sums_ptr,  # (2, GROUP_SIZE_M, N), or None: no dw, no db
    locks_ptr,  # (GROUP_SIZE_M,), or None
    M,
    N: tl.constexpr,
    GROUP_SIZE_M: tl.constexpr,
    BLOCK: tl.constexpr,
):
    cols = tl.arange(0, BLOCK)
    mask = cols < N
    acc = mean_ptr.dtype.element_ty
    dw = tl.zeros((BLOCK,), acc)
    db = tl.zeros((BLOCK,), acc)
    for i in range(tl.program_id(0), M, tl.num_programs(0)):
        row = tl.cast(i, tl.int64)
        x = tl.load(x_ptr + row * N + cols, mask=mask, other=0).to(acc)
        dy = tl.load(dy_ptr + row * N + cols, mask=mask, other=0).to(acc)
        rstd = tl.load(rstd_ptr + row)
        x_hat = (x - tl.load(mean_ptr + row)) * rstd
        dw += dy * x_hat
        db += dy
        if dx_ptr is not None:
            # Masked lanes need no care here: their dy is 0.
            wdy = dy
            if w_ptr is not None:
                wdy *= tl.load(w_ptr + cols, mask=mask, other=0).to(acc)
            c1 = tl.sum(x_hat * wdy) / N
            c2 = tl.sum(wdy) / N
            dx = (wdy - x_hat * c1 - c2) * rstd
            tl.store(dx_ptr + row * N + cols, dx, mask=mask)
    if sums_ptr is not None:
        _add_behind_lock(dw, db, sums_ptr, locks_ptr, cols, N, GROUP_SIZE_M)


# %%
# Stage 2 gives each program a few columns of all buffers.
# With fewer programs than buffers the last buffers were never written, so
# they are masked.


@triton.jit
def _layer_norm_bwd_dwdb(
    sums_ptr,  # (2, GROUP_SIZE_M, N)
    dw_ptr,  # (N,), or None: not wanted
    db_ptr,  # (N,), or None: not wanted
    programs,  # of stage 1
    N: tl.constexpr,
    GROUP_SIZE_M: tl.constexpr,
    BLOCK: tl.constexpr,  # columns of one program
):
    rows = tl.arange(0, GROUP_SIZE_M)[:, None]
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = (rows < programs) & (cols < N)
    tile_ptr = sums_ptr + rows * N + cols
    if dw_ptr is not None:
        dw = tl.sum(tl.load(tile_ptr, mask=mask, other=0), axis=0)
        tl.store(dw_ptr + cols, dw, mask=cols < N)
    if db_ptr is not None:
        tile_ptr += GROUP_SIZE_M * N
        db = tl.sum(tl.load(tile_ptr, mask=mask, other=0), axis=0)
        tl.store(db_ptr + cols, db, mask=cols < N)


# %%
# More rows in a program mean less work behind the lock, but fewer programs to
# keep the device busy.
# The rule: 16 rows (8 if they are narrow), but no fewer than 256 programs.
# The sums are float32 whatever type ``x`` has (float64 for float64): a sum
# that is rounded to 16 bits at each addition loses digits.

GROUP_SIZE_M = 128


def backward(dy, x, w, mean, rstd, dx, dw, db):
    """Fill dx, dw and db; each of them may be None."""
    M, N = x.shape
    G = GROUP_SIZE_M
    programs = min(M, max(256, triton.cdiv(M, 8 if N <= 2048 else 16)))
    sums = locks = None
    if dw is not None or db is not None:
        sums = torch.empty(2, G, N, dtype=mean.dtype, device=x.device)
        locks = torch.zeros(G, dtype=torch.int32, device=x.device)
    options = launch_options(N, x.dtype, 2048)
    _layer_norm_bwd_dx[(programs,)](
        dy, x, w, mean, rstd, dx, sums, locks, M, N, G, **options
    )
    if sums is not None:
        _layer_norm_bwd_dwdb[(triton.cdiv(N, 16),)](
            sums, dw, db, programs, N, G, BLOCK=16
        )


# %%
# A function to train with
# ------------------------
#
# The kernels trust their arguments: contiguous rows, right shapes.
# The function around them must not.
# ``reshape`` and ``contiguous`` make a copy where the layout needs one.
# The gradient of a plain ``sum()``, for instance, is a single number with
# strides of 0, and a kernel would read far behind it.


class LayerNorm(torch.autograd.Function):
    """The kernels, for contiguous copies of any tensors."""

    @staticmethod
    def forward(ctx, x, weight, bias, shape, eps):
        N = shape.numel()
        rows = x.reshape(-1, N).contiguous()
        w = None if weight is None else weight.reshape(N).contiguous()
        b = None if bias is None else bias.reshape(N).contiguous()
        y, mean, rstd = forward(rows, w, b, eps)
        ctx.save_for_backward(rows, w, b, mean, rstd)
        ctx.shape = shape
        return y.reshape(x.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        x, w, b, mean, rstd = ctx.saved_tensors
        dx, dw, db = (
            torch.empty_like(tensor) if wanted else None
            for tensor, wanted in zip(
                (x, w, b), ctx.needs_input_grad[:3], strict=True
            )
        )
        rows = dy.reshape(x.shape).contiguous()
        backward(rows, x, w, mean, rstd, dx, dw, db)
        dx = None if dx is None else dx.reshape(dy.shape)
        dw = None if dw is None else dw.reshape(ctx.shape)
        db = None if db is None else db.reshape(ctx.shape)
        return dx, dw, db, None, None


def layer_norm(x, normalized_shape, weight, bias, eps=1e-5):
    """Normalize x over its last dimensions; weight and bias may be None."""
    shape = _check(x, normalized_shape, weight, bias, eps)
    return LayerNorm.apply(x, weight, bias, shape, eps)


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
    if x.is_cuda and x.get_device() != torch.cuda.current_device():
        raise ValueError(f"x is on {x.device}: make it the current device")
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
    if shape.numel() > MAX_COLUMNS:
        raise ValueError(
            f"normalized_shape {tuple(shape)} has more than {MAX_COLUMNS} "
            "elements: page 03 (wide rows) has kernels for it"
        )
    return shape


# %%
# How wrong is it?
# ----------------
#
# Every result has a rounding error, also that of PyTorch.
# So we compare both with a result in float64.
# The relative error of a tensor is the norm of the difference divided by the
# norm of the exact result.


def inputs(M, N, dtype):
    """x, w, b and dy; the mean of x is far from 0."""
    torch.manual_seed(0)
    x = -2.3 + 0.5 * torch.randn(M, N, device=DEVICE)
    w, b = torch.rand(2, N, device=DEVICE)
    dy = 0.1 * torch.randn(M, N, device=DEVICE)
    return [t.to(dtype).requires_grad_() for t in (x, w, b)] + [dy.to(dtype)]


def results(function, x, w, b, dy):
    """y, dx, dw and db of a function called like layer_norm."""
    y = function(x, x.shape[-1:], w, b, 1e-5)
    return y, *torch.autograd.grad(y, (x, w, b), dy)


def errors(function, M, N, dtype):
    """Relative errors of y, dx, dw and db against float64."""
    given = inputs(M, N, dtype)
    wide = [t.detach().double().requires_grad_() for t in given]
    pairs = zip(
        results(function, *given), results(F.layer_norm, *wide), strict=True
    )
    return [((a - b).norm() / b.norm()).item() for a, b in pairs]


for dtype in torch.float16, torch.bfloat16, torch.float32:
    print(f"{dtype}, half a unit: {torch.finfo(dtype).eps / 2:.1e}")
    for name, f in ("ours", layer_norm), ("PyTorch", F.layer_norm):
        print(f"  {name:8}", *(f"{e:.1e}" for e in errors(f, M, N, dtype)))

# %%
# The columns are ``y``, ``dx``, ``dw`` and ``db``.
# The tolerance follows from the arithmetic.
# A 16-bit result is computed in float32 and rounded once, to the nearest
# number that the type has.
# That is wrong by at most half a unit in the last place, so half a unit is the
# tolerance.
# A float32 result also has the errors of its sums.
# Here the mean is 4.6 standard deviations from 0, and subtracting it costs
# some more: we allow 16 times half a unit.


def tolerance(dtype):
    half_unit = torch.finfo(dtype).eps / 2
    if dtype in (torch.float32, torch.float64):
        return 16 * half_unit
    if dtype == torch.bfloat16 and not ON_GPU:
        return 2 * half_unit  # the interpreter cuts bfloat16, not rounds it
    return half_unit


def test_layer_norm(M, N, dtype):
    names = "y", "dx", "dw", "db"
    found = errors(layer_norm, M, N, dtype)
    for name, error in zip(names, found, strict=True):
        assert error <= tolerance(dtype), f"{name}: {error:.1e}"


test_layer_norm(M, N, torch.float16)
print(f"passed at {M} x {N}")

# %%
# Benchmark
# ---------
#
# There are two clocks, and they answer two questions.
#
# * Device time: the call is captured in a CUDA graph, a recording of its
#   kernels, and replayed without Python.
# * The whole call, as a user makes it, with the work of Python.
#
# The ceiling is a copy: a kernel that moves the same bytes and does nothing
# else, by the same clock.
# Forward moves ``x`` and ``y``, backward moves ``x``, ``dy`` and ``dx``.
# The L2 cache, which all programs share, is emptied before each run.


class NoGPU(Exception):
    """Raised by a benchmark where there is no GPU to measure."""


# One stream for all: a backward pass runs on the stream of its forward pass.
STREAM = torch.cuda.Stream() if ON_GPU else None


def device_time(prepare):
    """Time on the device, in ms, of the function that prepare() returns.

    The call is captured in a CUDA graph, so the host costs nothing.
    do_bench empties the L2 cache before each replay.
    Returns the median and the 20 % and 80 % quantiles.
    """
    if not ON_GPU:
        raise NoGPU
    with torch.cuda.stream(STREAM):
        fn = prepare()
        fn()  # compiles
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=STREAM):
            fn()
        return triton.testing.do_bench(
            graph.replay, warmup=50, rep=100, quantiles=[0.5, 0.2, 0.8]
        )


def run(benchmark):
    """Table and plot of a benchmark, or one line that says what it needs."""
    try:
        return benchmark.run(print_data=True, show_plots=True, return_df=True)
    except NoGPU:
        if not hasattr(run, "said"):
            print("Timing needs a GPU; recorded figures are on the page.")
            run.said = True


# %%
# What a table shows is said by code, which counts losses like wins.


def claims(table):
    """Print what a table says about us: won, lost, share of the copy."""
    if table is None:
        return
    ours = table["Triton (GB/s)"]
    for column in table.columns:
        peer = column.removesuffix(" (GB/s)")
        if peer in ("N", "Triton", "Copy"):
            continue
        ratio = (ours / table[column]).dropna()
        worst = ratio.idxmin()
        print(
            f"{peer}: faster at {(ratio > 1).sum()} sizes, "
            f"slower at {(ratio < 1).sum()}\n"
            f"  speed ratio {ratio.prod() ** (1 / len(ratio)):.2f} "
            f"(geometric mean), at worst {ratio[worst]:.2f} "
            f"at N = {table['N'][worst]:.0f}"
        )
    share = (100 * ours / table["Copy (GB/s)"]).dropna()
    print(
        f"share of the copy: median {share.median():.0f} %, lowest "
        f"{share.min():.0f} % at N = {table['N'][share.idxmin()]:.0f}"
    )


# %%
# Other implementations are timed too, Liger and Apex where they are installed.


def lines():
    """Provider keys and their names in the figures."""
    names = {"triton": "Triton", "torch": "PyTorch"}
    names["torch.compile"] = "torch.compile"
    if importlib.util.find_spec("liger_kernel"):
        names["liger"] = "Liger"
    find = importlib.util.find_spec
    if find("apex") and find("apex.normalization"):
        names["apex"] = "Apex"
    return names


def implementation(provider):
    """A function called like layer_norm."""
    if provider == "triton":
        return layer_norm
    if provider == "torch.compile":
        import torch._functorch.config as config

        config.donated_buffer = False  # the backward pass runs many times
        torch._dynamo.reset()  # nothing is left of other sizes
        return torch.compile(lambda *a: F.layer_norm(*a), dynamic=False)
    if provider == "liger":
        from liger_kernel.ops.layer_norm import LigerLayerNormFunction

        return lambda x, _, *a: LigerLayerNormFunction.apply(x, *a)
    if provider == "apex":
        from apex.normalization.fused_layer_norm import fused_layer_norm_affine

        return lambda x, n, w, b, e: fused_layer_norm_affine(x, w, b, n, e)
    return F.layer_norm


# %%
# Gradients are asked for with ``torch.autograd.grad``, so nothing is
# accumulated, and everything is built before the clock starts.


def measure(M, N, dtype, mode, provider):
    """Device time of one pass, from a CUDA graph replayed with an empty L2
    cache; median, 20 % and 80 % quantiles."""

    def prepare():
        x, w, b, dy = inputs(M, N, dtype)
        if provider == "copy":
            x, out = x.detach(), torch.empty_like(dy)
            if mode == "forward":
                return lambda: out.copy_(x)
            return lambda: torch.add(x, dy, out=out)
        f = implementation(provider)
        if mode == "forward":
            return lambda: f(x, (N,), w, b, 1e-5)
        y = f(x, (N,), w, b, 1e-5)
        return lambda: torch.autograd.grad(y, (x, w, b), dy, retain_graph=True)

    ms, fast, slow = device_time(prepare)
    moved = (2 if mode == "forward" else 3) * M * N * dtype.itemsize
    return [moved / t * 1e-6 for t in (ms, slow, fast)]


def speed(mode):
    """The benchmark of one pass."""
    names = lines() | {"copy": "Copy"}
    benchmark = triton.testing.Benchmark(
        x_names=["N"],
        x_vals=[512 * i for i in range(2, 32)],
        line_arg="provider",
        line_vals=list(names),
        line_names=list(names.values()),
        ylabel="GB/s",
        plot_name=f"layer-norm-{mode}",
        args={"M": 4096, "dtype": torch.float16, "mode": mode},
    )
    return triton.testing.perf_report(benchmark)(measure)


# %%
# The forward pass, against the copy of the same bytes:

table = run(speed("forward"))

# %%
claims(table)

# %%
# The backward pass:

table = run(speed("backward"))

# %%
claims(table)

# %%
# What the figures say
# --------------------
#
# Forward has little left to win: it reads ``x`` once and writes ``y`` once,
# as the copy does.
# Just above a power of two the block is nearly twice as wide as the row, and
# many lanes of each program have nothing to do.
#
# Backward has more to do than to carry its three matrices.
#
# * The step above a power of two is there too.
# * Each program reads and writes two float32 buffers once: 16 bytes a column,
#   against 6 for each of its rows of ``x``, ``dy`` and ``dx`` in float16.
# * While a program waits for a row, it has no other load on its way.
# * The two sums of the widest rows do not fit into the registers beside the
#   row; the compiler puts a part of them into memory and fetches it again.
# * The order in which programs take a lock is not fixed, so the last bits of
#   ``dw`` and ``db`` may differ from run to run.
#
# Page 02 works on these points one by one.
#
# The whole call has one more part: someone has to start the kernels.
# Our function does that in Python, while PyTorch's own does it in C++.
# With narrow rows the device is done first and waits:


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=[1024, 2048, 4096, 8192, 15872],
        line_arg="provider",
        line_vals=list(lines()),
        line_names=list(lines().values()),
        ylabel="µs",
        plot_name="layer-norm-whole-call",
        args={"M": 4096, "dtype": torch.float16},
    )
)
def measure_whole_call(M, N, dtype, provider):
    """Forward and backward through autograd, host included: CUDA events
    around the call, empty L2 cache; median, 20 % and 80 % quantiles."""
    if not ON_GPU:
        raise NoGPU
    given = inputs(M, N, dtype)
    f = implementation(provider)
    ms = triton.testing.do_bench(
        lambda: results(f, *given), quantiles=[0.5, 0.2, 0.8]
    )
    return [1000 * t for t in ms]


table = run(measure_whole_call)

# %%
# The errors at full size, against float64, for ours and for PyTorch:

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
OUTPUTS = ("y", "dx", "dw", "db")


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["case"],
        x_vals=[f"{out} {dtype}" for dtype in DTYPES for out in OUTPUTS],
        line_arg="provider",
        line_vals=["triton", "torch"],
        line_names=["Triton", "PyTorch"],
        ylabel="relative error",
        y_log=True,
        plot_name="layer-norm-error",
        args={"M": 4096, "N": 15872},
    )
)
def measure_error(M, N, case, provider):
    """Norm of the difference from a float64 result, divided by the norm of
    that result."""
    if not ON_GPU:
        raise NoGPU
    out, dtype = case.split()
    found = errors(implementation(provider), M, N, DTYPES[dtype])
    error = found[OUTPUTS.index(out)]
    return error, error, error


table = run(measure_error)

# %%
# What can go wrong
# -----------------
#
# Each of these mistakes is made here once, next to the right way.
#
# **Masked lanes in the variance.**
# A row of 5 in a block of 8: three lanes hold 0, and 0 minus the mean is not
# 0.

row = torch.tensor([3.0, 4.0, 5.0, 6.0, 7.0])
lanes = torch.cat([row, torch.zeros(3)])
centered = lanes - row.mean()
print("wrong:", (centered**2).sum().item() / 5)
centered = torch.where(torch.arange(8) < 5, centered, 0)
print("right:", (centered**2).sum().item() / 5)

# %%
# **Variance in one pass.**
# The mean of the squares minus the square of the mean needs no second pass,
# but it is the difference of two large numbers.
# In float32 nothing may be left of it.

row = 10000 + torch.randn(4096, generator=torch.Generator().manual_seed(0))
print("wrong:", ((row**2).mean() - row.mean() ** 2).item())
print("right:", ((row - row.mean()) ** 2).mean().item())

# %%
# **Sums in 16 bits.**
# Each addition rounds, and beside a large sum small terms are lost.
# Here 4096 rows are added one by one:

terms = torch.rand(4096, 64, generator=torch.Generator().manual_seed(0))
terms = terms.half()
exact = terms.double().sum(dim=0)
for name, dtype in ("wrong", torch.float16), ("right", torch.float32):
    total = torch.zeros(64, dtype=dtype)
    for term in terms:
        total += term
    error = (total.half() - exact).norm() / exact.norm()
    print(f"{name}: sums in {dtype}, relative error {error.item():.1e}")

# %%
# **A gradient with strides of 0.**
# ``y.sum().backward()`` hands over a ``dy`` that has one number in memory.
# A kernel that reads ``dy`` with the strides of ``x`` reads memory that is
# not its own.

x, w, b, _ = inputs(4, 8, torch.float32)
y = layer_norm(x, (8,), w, b)
y.register_hook(lambda g: print("strides of dy:", g.stride()))
y.sum().backward()
dy = torch.ones(()).expand(4, 8)
held = dy.untyped_storage().nbytes() // dy.itemsize
print(f"wrong: the last read is element {4 * 8 - 1} of {held}")
print("right: strides", dy.contiguous().stride())
torch.testing.assert_close(b.grad, torch.full_like(b, 4))

# %%
# **Buffers that nobody wrote.**
# 3 programs write 3 of the 128 buffers.
# ``torch.empty`` leaves the others as they are; here they hold NaN.
# A second stage that is told of more programs adds them.

G = GROUP_SIZE_M
sums = torch.full((2, G, 16), float("nan"), device=DEVICE)
sums[:, :3] = 1.0
dw, db = torch.empty(2, 16, device=DEVICE)
for name, programs in ("wrong", G), ("right", 3):
    _layer_norm_bwd_dwdb[(1,)](sums, dw, db, programs, 16, G, BLOCK=16)
    print(f"{name}: {dw[0].item()}")

# %%
# **No barrier before the release.**
# Two threads, ``a`` and ``b``, store one column each; thread ``a`` also frees
# the lock.
# The first list below is an order that the hardware may choose when nothing
# forbids it.
# The second program adds to an old value, and then the late store of the
# first program replaces what the second one stored.


def replay(order):
    """Both programs add 1 to both columns; order lists their steps."""
    memory, register = {"a": 0, "b": 0}, {}
    for program, step, *column in order:
        for c in column:
            if step == "load":
                register[program, c] = memory[c]
            if step == "store":
                memory[c] = register[program, c] + 1
    return memory


first = [(1, "load", "a", "b"), (1, "store", "a")]
late, free = (1, "store", "b"), (1, "free")
second = [(2, "load", "a", "b"), (2, "store", "a", "b")]
print("wrong:", replay([*first, free, *second, late]))
print("right:", replay([*first, late, free, *second]))

# %%
# The interpreter runs one program after the other and never shows this error.
# On a GPU it is there in some runs and not in others.
# The code that the compiler makes can be searched for the barrier, and the
# tests of this page do that.

# %%
# Exercises
# ---------
#
# Each stub runs as it is, and ``check`` tells which rows or columns are wrong.


def check(got, expected):
    """Say which rows (or columns, of a vector) are wrong."""
    wrong = ~torch.isclose(got, expected, rtol=1e-3, atol=1e-4)
    what = "columns"
    if wrong.dim() == 2:
        what, wrong = "rows", wrong.any(dim=1)
    bad = wrong.nonzero().flatten().tolist()
    print("all right" if not bad else f"wrong {what}: {bad}")
    return not bad


x, w, b, dy = inputs(5, 24, torch.float32)
y, dx, dw, db = (t.detach() for t in results(F.layer_norm, x, w, b, dy))
x, w, b = (t.detach() for t in (x, w, b))

# %%
# **Exercise 1: several rows in one program.**
# For narrow rows a program has too little to do.
# Let each program normalize ``ROWS`` rows at once, without ``w`` and ``b``.
# The tile has two dimensions, and the last one may reach beyond row ``M``.


@triton.jit
def _tile(x_ptr, y_ptr, eps, M, N, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    cols = tl.arange(0, BLOCK)[None, :]
    mask = (rows < M) & (cols < N)
    x = tl.load(x_ptr + rows * N + cols, mask=mask, other=0)
    y = x  # to do: normalize each row of the tile
    tl.store(y_ptr + rows * N + cols, y, mask=mask)


def exercise_1(kernel):
    out = torch.full_like(x, float("nan"))
    kernel[(3,)](x, out, 1e-5, M=5, N=24, ROWS=2, BLOCK=32)
    return check(out, F.layer_norm(x, (24,)))


exercise_1(_tile)

# %%

# Solution 1


@triton.jit
def _tile_1(x_ptr, y_ptr, eps, M, N, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    cols = tl.arange(0, BLOCK)[None, :]
    mask = (rows < M) & (cols < N)
    x = tl.load(x_ptr + rows * N + cols, mask=mask, other=0)
    mean = tl.sum(x, axis=1)[:, None] / N
    x = tl.where(mask, x - mean, 0)
    variance = tl.sum(x * x, axis=1)[:, None] / N
    y = x / tl.sqrt(variance + eps)
    tl.store(y_ptr + rows * N + cols, y, mask=mask)


assert exercise_1(_tile_1)

# %%
# **Exercise 2: find the error.**
# A formula like this one for ``dx`` is in circulation.
# Its sums ``dw`` and ``db`` run over the rows of the batch.
# For which normalization would such sums be right, and over what must they
# run here?
# The printed sums reject the formula without any reference.

rstd = (x.var(dim=1, keepdim=True, correction=0) + 1e-5) ** -0.5
x_hat = (x - x.mean(dim=1, keepdim=True)) * rstd


def formula(dy, x_hat, w, rstd):
    dw, db = (dy * x_hat).sum(dim=0), dy.sum(dim=0)
    return w * rstd * (dy - (db + x_hat * dw) / dy.shape[1])


def exercise_2(formula):
    got = formula(dy, x_hat, w, rstd)
    print("sums of the rows:", *(f"{v:.1e}" for v in got.sum(dim=1).tolist()))
    return check(got, dx)


exercise_2(formula)

# %%

# Solution 2


def formula_2(dy, x_hat, w, rstd):
    # Sums over the batch belong to batch normalization. Here they run over
    # the row, and w stands inside them: it differs from column to column.
    wdy = w * dy
    c1 = (x_hat * wdy).mean(dim=1, keepdim=True)
    c2 = wdy.mean(dim=1, keepdim=True)
    return (wdy - x_hat * c1 - c2) * rstd


assert exercise_2(formula_2)

# %%
# **Exercise 3: no lock at all.**
# With a buffer for each program nobody has to wait.
# In the stub all programs store to the first buffer, and only the last of
# them is still there at the end.


@triton.jit
def _own_buffer(dy_ptr, sums_ptr, M, N, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    db = tl.zeros((BLOCK,), tl.float32)
    for row in range(tl.program_id(0), M, tl.num_programs(0)):
        db += tl.load(dy_ptr + row * N + cols, mask=cols < N, other=0)
    buffer = 0  # to do
    tl.store(sums_ptr + buffer * N + cols, db, mask=cols < N)


def exercise_3(kernel):
    sums = torch.zeros(2, 24, device=DEVICE)
    kernel[(2,)](dy, sums, M=5, N=24, BLOCK=32)
    return check(sums.sum(dim=0), db)


exercise_3(_own_buffer)

# %%

# Solution 3


@triton.jit
def _own_buffer_3(dy_ptr, sums_ptr, M, N, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    db = tl.zeros((BLOCK,), tl.float32)
    for row in range(tl.program_id(0), M, tl.num_programs(0)):
        db += tl.load(dy_ptr + row * N + cols, mask=cols < N, other=0)
    # Plain stores, a fixed order of additions, no lock. Page 02 starts here.
    buffer = tl.program_id(0)
    tl.store(sums_ptr + buffer * N + cols, db, mask=cols < N)


assert exercise_3(_own_buffer_3)

# %%
# References
# ----------
#
# * Jimmy Lei Ba, Jamie Ryan Kiros and Geoffrey E. Hinton, `Layer Normalization
#   <https://arxiv.org/abs/1607.06450>`_, 2016.
# * Tony F. Chan, Gene H. Golub and Randall J. LeVeque, `Algorithms for
#   computing the sample variance
#   <https://doi.org/10.1080/00031305.1983.10483115>`_, 1983: why the variance
#   takes two passes.
# * NVIDIA, `Parallel Thread Execution
#   <https://docs.nvidia.com/cuda/parallel-thread-execution/>`_, chapter on the
#   memory consistency model:
#   what a release does and does not order.
