r"""
Two Passes: AMD's Backward in Triton
====================================

Rebuild the two-pass backward of AMD's Composable Kernel in Triton, find the
error in its documentation, and measure what the second pass costs.

You will be able to:

* reject a wrong gradient formula without any reference;
* choose, of two equal formulas, the one that keeps its digits;
* count the bytes of a design before it is written, and then check the count;
* let a second pass find in the cache what the first one has read;
* say for which shapes two passes are right.

This page assumes the first page, which derives the formulas, and uses the
kernels of the second and third without explaining them again.
Without a GPU everything here runs in Triton's interpreter, except the timing.

A library to read
-----------------

`Composable Kernel <https://github.com/ROCm/composable_kernel>`_ is AMD's
library of GPU kernels, written as C++ templates.
Its example 53 is the backward pass of layer normalization.
It has two operations that do not depend on each other:

* one is parallel over the columns of ``x``: it sums the gradients of weight
  and bias, each over all rows;
* one is parallel over the rows of ``x``: it computes ``dx``.

Each operation is cut along the direction in which it does not sum, which is
the plainest design.
But both read the whole of ``x`` and ``dy``.
"""

# %%
# The first cell is that of every page.

import importlib.util
import itertools
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
# Each color is a program: of columns in the first pass, of rows in the second.


def passes():
    _, (one, two) = plt.subplots(
        1, 2, figsize=(7.5, 2.6),
        num="The first pass is cut by columns, the second pass by rows",
    )  # fmt: skip
    colors, style = ["C0", "C1", "C2", "C3"], {"ec": "black", "alpha": 0.6}
    one.bar(range(4), 3, width=1, color=colors, **style)
    two.barh(range(3), 4, height=1, color=colors[:3], **style)
    for ax, title in (one, "pass one: dw and db"), (two, "pass two: dx"):
        ax.set_title(title)
        ax.axis("off")
    plt.show()


passes()

# %%
# Spot the error
# --------------
#
# The README of the example gives this formula for ``dx``:
#
# .. math::
#
#    dx_{ij} = \frac{\gamma_j}{\sqrt{\sigma_i^2 + \epsilon}} \left[ dy_{ij}
#    - \frac{1}{N} \left( d\beta_j + \hat{x}_{ij} \, d\gamma_j \right) \right]
#
# Here :math:`\gamma` and :math:`\beta` are weight and bias.
# Read it once more before you go on: what is wrong?
#
# The first page has a test that needs no reference: each row of ``dx`` sums to
# zero.
# We run the formula in float64, in the example's own shape.


def example(M, N, dtype, ratio=4.6):
    """x, w, b and dy; the mean of x is ratio standard deviations."""
    torch.manual_seed(0)
    x = 0.5 * (torch.randn(M, N, device=DEVICE) - ratio)
    w, b = torch.rand(2, N, device=DEVICE)
    dy = 0.1 * torch.randn(M, N, device=DEVICE)
    return [t.to(dtype) for t in (x, w, b, dy)]


def error(got, expected):
    """Relative error: norm of the difference over norm of the result."""
    return float((got.double() - expected).norm() / expected.norm())


def autograd(function, *leaves, dy):
    leaves = [t.detach().requires_grad_() for t in leaves]
    return torch.autograd.grad(function(*leaves), leaves, dy)


x, w, b, dy = (t.cpu() for t in example(1024, 512, torch.float64))
expected, dw, db = autograd(
    lambda x, w, b: F.layer_norm(x, (512,), w, b, 1e-5), x, w, b, dy=dy
)
mu = x.mean(dim=1, keepdim=True)
r = (x.var(dim=1, correction=0, keepdim=True) + 1e-5) ** -0.5
x_hat = (x - mu) * r
dx = w * r * (dy - (db + x_hat * dw) / 512)
print(f"largest sum of a row: {dx.sum(dim=1).abs().max():.1e}")
print(f"relative error: {error(dx, expected):.1%}")
assert error(dx, expected) > 0.01

# %%
# The sums in the bracket run over the wrong direction: ``dw`` and ``db`` are
# sums over the rows.
# Such sums belong to a normalization whose statistics are taken over the
# rows, which is batch normalization.
# With those statistics, and ``M`` in the place of ``N``, the formula is right:

r_column = (x.var(dim=0, correction=0) + 1e-5) ** -0.5
z = (x - x.mean(dim=0)) * r_column
dx = w * r_column * (dy - (dy.sum(dim=0) + z * (dy * z).sum(dim=0)) / 1024)
of_batch_norm = autograd(
    lambda x: F.batch_norm(x, None, None, w, b, training=True), x, dy=dy
)[0]
print(f"error for batch normalization: {error(dx, of_batch_norm):.1e}")
assert error(dx, of_batch_norm) < 1e-12

# %%
# The README also says that the second pass reads the sums of the first.
# The kernel has no such argument.
# The code is right, and the rest of this page follows the code.
#
# The right formula, as a projection
# ----------------------------------
#
# The first page derives ``dx`` step by step; here is a shorter way.
# Normalization ignores two directions of a row: the constant, and (up to
# :math:`\epsilon`) the row's own deviation from its mean.
# So its matrix of derivatives removes both:
#
# .. math::
#
#    J = r \left( I - \frac{1}{N} 1 \, 1^T
#    - \frac{1}{N} \hat{x} \, \hat{x}^T \right)
#
# We check it for one row of 6.

row = torch.randn(6, dtype=torch.float64)
jacobian = torch.autograd.functional.jacobian(
    lambda row: F.layer_norm(row, (6,), eps=1e-5), row
)
rstd = (row.var(correction=0) + 1e-5) ** -0.5
hat = (row - row.mean()) * rstd
one = torch.ones(6, dtype=torch.float64)
projection = torch.eye(6) - one.outer(one) / 6 - hat.outer(hat) / 6
torch.testing.assert_close(rstd * projection, jacobian)

# %%
# ``J`` equals its transpose, so with :math:`g = w \cdot dy` the backward pass
# is the formula of the first page:
#
# .. math::
#
#    dx = (g - \hat{x} \, c_1 - c_2) \; r, \qquad
#    c_1 = \frac{1}{N} \sum_j \hat{x}_j \, g_j, \qquad
#    c_2 = \frac{1}{N} \sum_j g_j

g = w * dy
c1 = (x_hat * g).mean(dim=1, keepdim=True)
c2 = g.mean(dim=1, keepdim=True)
dx = (g - x_hat * c1 - c2) * r
print(f"relative error: {error(dx, expected):.1e}")
print(f"largest sum of a row: {dx.sum(dim=1).abs().max():.1e}")
assert error(dx, expected) < 1e-12

# %%
# The code of Composable Kernel, and that of PyTorch for CPUs, sums
# :math:`g \, x` instead of :math:`g \, \hat{x}`, and puts everything that
# multiplies :math:`x` into one factor:
#
# .. math::
#
#    b = \frac{(S_1 \mu - S_2) \, r^3}{N}, \qquad
#    c = -b \mu - \frac{S_1 r}{N}, \qquad
#    dx = r \, g + b \, x + c
#
# with :math:`S_1 = \sum_j g_j` and :math:`S_2 = \sum_j g_j x_j`.
# Put :math:`x = \mu + \hat{x} / r` into it, and the first form comes out.


def form_of_ck(x, g, mu, r):
    """dx = r * g + b * x + c."""
    N = x.shape[1]
    s1 = g.sum(dim=1, keepdim=True)
    s2 = (g * x).sum(dim=1, keepdim=True)
    b = (s1 * mu - s2) * r**3 / N
    c = -b * mu - s1 * r / N
    return r * g + b * x + c


def form_of_page_1(x, g, mu, r):
    """dx = (g - x_hat * c1 - c2) * r."""
    x_hat = (x - mu) * r
    c1 = (x_hat * g).mean(dim=1, keepdim=True)
    c2 = g.mean(dim=1, keepdim=True)
    return (g - x_hat * c1 - c2) * r


print(f"relative error: {error(form_of_ck(x, g, mu, r), expected):.1e}")
assert error(form_of_ck(x, g, mu, r), expected) < 1e-12

# %%
# Which form keeps its digits
# ---------------------------
#
# The two forms are equal, but not in float32.
# :math:`S_1 \mu` and :math:`S_2` grow with the mean, and so do :math:`b \, x`
# and :math:`c`; what is left when they cancel does not.
# Subtracting the mean from :math:`x` first avoids that.
# Here both forms get the same statistics, exact up to their rounding.


def digits(M, N, ratio, provider):
    """Error of dx in float32, for a mean of ratio standard deviations."""
    x, w, b, dy = example(M, N, torch.float32, ratio)
    wide = x.double()
    mu = wide.mean(dim=1, keepdim=True)
    r = (wide.var(dim=1, correction=0, keepdim=True) + 1e-5) ** -0.5
    expected = form_of_page_1(wide, w.double() * dy, mu, r)
    if provider == "torch":
        dx = autograd(lambda x: F.layer_norm(x, (N,), w, b), x, dy=dy)[0]
    else:
        forms = {"triton": form_of_page_1, "ck": form_of_ck}
        dx = forms[provider](x, w * dy, mu.float(), r.float())
    return error(dx, expected)


for ratio in 1, 100, 10000:
    print(f"mean / std = {ratio}:", end="")
    for provider in "triton", "ck", "torch":
        print(f"  {provider} {digits(64, 512, ratio, provider):.0e}", end="")
    print()
assert digits(64, 512, 1e4, "ck") > 2 * digits(64, 512, 1e4, "triton")

# %%
# ``triton`` is the form that the kernels below have; a figure follows.
#
# Three vocabularies
# ------------------
#
# The same things have three names: in Composable Kernel, in Triton's
# tutorials and in PyTorch.
#
# * ``dgamma``, ``dbeta``; ``dw``, ``db``; ``grad_weight``, ``grad_bias``.
# * ``dy``, ``dx``; the same; ``grad_output``, ``grad_input``.
# * ``x_mean``, ``inv_std``; ``mean``, ``rstd``; the same.
# * The two sums over a row: ``ds`` (of :math:`g \, x`) and ``db`` (of
#   :math:`g`); ``c1`` and ``c2``, as means; in PyTorch's code for CPUs ``ds``
#   and ``db`` again.
#   So ``db`` is a sum over a row in one code, and over a column in another.
# * ``M`` is what is kept and ``K`` what is summed, so ``M`` counts columns in
#   the kernel for ``dgamma``; ``M`` rows and ``N`` columns in the other two.
#
# Some words of Composable Kernel have no counterpart, because Triton's
# compiler decides about them:
#
# * A *block* of threads, in waves of 64 on most AMD GPUs, is a program.
# * A ``StaticBuffer`` in ``Vgpr`` is a value, and ``ThreadCluster`` and
#   ``ThreadSlice`` say which thread holds which element of it.
# * ``LDS`` is the shared memory of a block.
# * ``SweepOnce`` is a row that is read only once: here a tuple of chunks.

# %%
# Forward
# -------
#
# The forward kernels are two of the third page, in their shortest form: a row
# is a tuple of chunks in registers, or it is read in two sweeps.
# Without ``y`` they compute only the statistics.


@triton.jit
def _load(
    ptr,  # first element of the first row
    row,  # (ROWS, 1), counted from that row; or 0
    c,  # number of the chunk
    left,  # rows that exist
    N: tl.constexpr,  # columns, also the distance of the rows
    CHUNK: tl.constexpr,
    EVEN: tl.constexpr,  # all rows of all tiles exist
):
    col = c * CHUNK + tl.arange(0, CHUNK)[None, :]
    at = ptr + row * N + col
    if EVEN and (c + 1) * CHUNK <= N:
        return tl.load(at)
    else:
        mask = col < N if EVEN else (row < left) & (col < N)
        return tl.load(at, mask=mask, other=0)


@triton.jit
def _store(ptr, value, row, c, left, N: tl.constexpr, CHUNK: tl.constexpr,
           EVEN: tl.constexpr):  # fmt: skip
    col = c * CHUNK + tl.arange(0, CHUNK)[None, :]
    at = ptr + row * N + col
    if EVEN and (c + 1) * CHUNK <= N:
        tl.store(at, value)
    else:
        mask = col < N if EVEN else (row < left) & (col < N)
        tl.store(at, value, mask=mask)


# %%


@triton.jit
def _layer_norm_fwd(
    x_ptr, w_ptr, b_ptr,
    y_ptr,  # (M, N), or None: only mean and rstd
    mean_ptr, rstd_ptr, M, eps: tl.constexpr, N: tl.constexpr,
    ROWS: tl.constexpr, CHUNK: tl.constexpr,  # of a tile
    EVEN: tl.constexpr,  # M is a multiple of ROWS
):  # fmt: skip
    acc: tl.constexpr = mean_ptr.dtype.element_ty
    CHUNKS: tl.constexpr = (N + CHUNK - 1) // CHUNK
    # 64 bits only here: M * N may pass 2**31, a tile does not.
    first = tl.cast(tl.program_id(0), tl.int64) * ROWS
    left = M - tl.program_id(0) * ROWS
    row = tl.arange(0, ROWS)[:, None]
    xs, total = (), tl.zeros([ROWS, CHUNK], acc)
    for c in tl.static_range(CHUNKS):
        xs += (_load(x_ptr + first * N, row, c, left, N, CHUNK, EVEN),)
    for c in tl.static_range(CHUNKS):
        total += xs[c].to(acc)
    mean = tl.sum(total, 1)[:, None] / N
    total = tl.zeros([ROWS, CHUNK], acc)
    for c in tl.static_range(CHUNKS):
        d = xs[c].to(acc) - mean
        if (c + 1) * CHUNK > N:  # idle lanes: 0 again
            d = tl.where(tl.arange(0, CHUNK)[None, :] < N - c * CHUNK, d, 0)
        total += d * d
    rstd = 1 / tl.sqrt(tl.sum(total, 1)[:, None] / N + eps)
    tl.store(mean_ptr + first + row, mean, mask=row < left)
    tl.store(rstd_ptr + first + row, rstd, mask=row < left)
    if y_ptr is not None:
        for c in tl.static_range(CHUNKS):
            y = (xs[c].to(acc) - mean) * rstd
            if w_ptr is not None:
                y *= _load(w_ptr, 0, c, 1, N, CHUNK, True).to(acc)
            if b_ptr is not None:
                y += _load(b_ptr, 0, c, 1, N, CHUNK, True).to(acc)
            _store(y_ptr + first * N, y, row, c, left, N, CHUNK, EVEN)


# %%


@triton.jit
def _merge(mean_a, m2_a, n_a, mean_b, m2_b, n_b):
    """Mean, squares about it and count of two sets together."""
    n = n_a + n_b
    share = n_b / tl.maximum(n, 1)
    d = mean_b - mean_a
    return mean_a + d * share, m2_a + m2_b + d * d * n_a * share, n


# %%


@triton.jit
def _layer_norm_fwd_sweeps(
    x_ptr, w_ptr, b_ptr, y_ptr, mean_ptr, rstd_ptr,
    eps: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    acc: tl.constexpr = mean_ptr.dtype.element_ty
    CHUNKS: tl.constexpr = (N + CHUNK - 1) // CHUNK
    x_ptr += tl.cast(tl.program_id(0), tl.int64) * N
    pivot = tl.load(x_ptr).to(acc)
    mean = tl.zeros([CHUNK], acc)  # of x - pivot, in each lane
    m2 = tl.zeros([CHUNK], acc)
    count = tl.zeros([CHUNK], acc)
    for c in tl.range(0, CHUNKS, num_stages=1):
        col = c * CHUNK + tl.arange(0, CHUNK)
        x = tl.load(x_ptr + col, mask=col < N).to(acc)
        d = tl.where(col < N, (x - pivot) - mean, 0)
        share = 1 / tl.cast(c + 1, acc)
        mean += d * share
        m2 += d * d * (1 - share)
        count += tl.where(col < N, 1, 0)
    mean, m2, _ = tl.reduce((mean, m2, count), 0, _merge)
    mean, rstd = pivot + mean, 1 / tl.sqrt(m2 / N + eps)
    tl.store(mean_ptr + tl.program_id(0), mean)
    tl.store(rstd_ptr + tl.program_id(0), rstd)
    if y_ptr is not None:
        y_ptr += tl.cast(tl.program_id(0), tl.int64) * N
        for i in tl.range(0, CHUNKS, num_stages=1):
            col = (CHUNKS - 1 - i) * CHUNK + tl.arange(0, CHUNK)
            y = tl.load(x_ptr + col, mask=col < N, other=0).to(acc)
            y = (y - mean) * rstd
            if w_ptr is not None:
                y *= tl.load(w_ptr + col, mask=col < N, other=0).to(acc)
            if b_ptr is not None:
                y += tl.load(b_ptr + col, mask=col < N, other=0).to(acc)
            tl.store(y_ptr + col, y, mask=col < N)


# %%
# ``n`` is the width in units of 16 bits, so that wider types move the limits.
# A chunk has 16 bytes for each thread, the widest load.


def plan_forward(N, itemsize):
    """Options of the forward kernel; sweeps have no ROWS."""
    n = N * itemsize // 2
    if n > 24576:
        return {"CHUNK": 8192 // itemsize, "num_warps": 16}
    warps = 2 if n <= 1024 else 4 if n <= 5120 else 8
    warps = 16 if n > 14336 else warps
    chunk = min(512 * warps // itemsize, triton.next_power_of_2(N))
    rows = max(min(2048 // itemsize // chunk, 64), 1)
    return {"ROWS": rows, "CHUNK": chunk, "num_warps": warps}


def forward(x, w, b, eps, wanted=True):
    """y (None if not wanted), mean and rstd for a contiguous (M, N) x."""
    M, N = x.shape
    acc = torch.promote_types(x.dtype, torch.float32)
    y = torch.empty_like(x) if wanted else None
    mean = torch.empty(M, dtype=acc, device=x.device)
    rstd = torch.empty_like(mean)
    given = x, w, b, y, mean, rstd
    options = plan_forward(N, x.itemsize)
    if M and "ROWS" in options:
        rows = options["ROWS"]
        _layer_norm_fwd[(triton.cdiv(M, rows),)](
            *given, M, eps, N, EVEN=M % rows == 0, **options
        )
    elif M:
        _layer_norm_fwd_sweeps[(M,)](*given, eps, N, **options)
    return y, mean, rstd


# %%
# Pass two as the example has it
# ------------------------------
#
# A program of the example takes 8 rows, and 128 columns of them at a time.
# A row of 512 columns is more than that, so it is swept twice: once for the
# two sums, once for ``dx``.
# The second sweep runs backward, as on the third page: what was read last is
# what a cache still has.
# ``HOW`` also allows to sweep forward, to see what the reversal is worth.


@triton.jit
def _add_pairs(a1, a2, b1, b2):
    return a1 + b1, a2 + b2


@triton.jit
def _row_means(sum1, sum2, rstd, N: tl.constexpr):
    """c1 * rstd and c2, from the sums of g * (x - mean) and of g."""
    sum1, sum2 = tl.reduce((sum1, sum2), 1, _add_pairs)
    return sum1[:, None] * rstd * rstd / N, sum2[:, None] / N


@triton.jit
def _dx_sweeps(
    dy_ptr, x_ptr, w_ptr, mean, rstd, dx_ptr,  # of the first row of a tile
    left, N: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
    HOW: tl.constexpr,
):  # fmt: skip
    acc: tl.constexpr = mean.dtype
    CHUNKS: tl.constexpr = (N + CHUNK - 1) // CHUNK
    row = tl.arange(0, ROWS)[:, None]
    sum1 = tl.zeros([ROWS, CHUNK], acc)
    sum2 = tl.zeros([ROWS, CHUNK], acc)
    for c in tl.range(0, CHUNKS, num_stages=1):
        col = c * CHUNK + tl.arange(0, CHUNK)[None, :]
        mask = (row < left) & (col < N)
        x = tl.load(x_ptr + row * N + col, mask=mask, other=0).to(acc)
        dy = tl.load(dy_ptr + row * N + col, mask=mask, other=0).to(acc)
        g = tl.load(w_ptr + col, mask=col < N, other=0).to(acc) * dy
        sum1 += g * (x - mean)  # idle lanes have g = 0
        sum2 += g
    k1, c2 = _row_means(sum1, sum2, rstd, N)
    for i in tl.range(0, CHUNKS, num_stages=1):
        c = CHUNKS - 1 - i if HOW == "reversed" else i
        col = c * CHUNK + tl.arange(0, CHUNK)[None, :]
        mask = (row < left) & (col < N)
        x = tl.load(x_ptr + row * N + col, mask=mask, other=0).to(acc)
        dy = tl.load(dy_ptr + row * N + col, mask=mask, other=0).to(acc)
        g = tl.load(w_ptr + col, mask=col < N, other=0).to(acc) * dy
        dx = (g - ((x - mean) * k1 + c2)) * rstd
        tl.store(dx_ptr + row * N + col, dx, mask=mask)


# %%
# Pass two with one read
# ----------------------
#
# The example sweeps twice as soon as a row is wider than 128 columns.
# But the registers of a multiprocessor hold 65536 numbers of 32 bits.
# So a row of ``x`` and ``dy`` of some 16000 columns of 16 bits can stay there,
# and there is no second sweep.
# ``w`` is loaded once for each row of a tile, which gives it the layout of
# ``x``.


@triton.jit
def _load_weight(w_ptr, N: tl.constexpr, ROWS: tl.constexpr,
                 CHUNK: tl.constexpr):  # fmt: skip
    ws = ()
    for c in tl.static_range((N + CHUNK - 1) // CHUNK):
        row = tl.zeros([ROWS, 1], tl.int32)
        ws += (_load(w_ptr, row, c, 1, N, CHUNK, True),)
    return ws


@triton.jit
def _read_rows(
    dy_ptr, x_ptr, ws, mean, rstd, left,
    N: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """The chunks of x and dy, and two numbers of each row."""
    acc: tl.constexpr = mean.dtype
    row = tl.arange(0, ROWS)[:, None]
    xs, dys = (), ()
    for c in tl.static_range((N + CHUNK - 1) // CHUNK):
        xs += (_load(x_ptr, row, c, left, N, CHUNK, EVEN),)
        dys += (_load(dy_ptr, row, c, left, N, CHUNK, EVEN),)
    sum1 = tl.zeros(xs[0].shape, acc)
    sum2 = tl.zeros(xs[0].shape, acc)
    for c in tl.static_range((N + CHUNK - 1) // CHUNK):
        g = ws[c].to(acc) * dys[c].to(acc)
        sum1 += g * (xs[c].to(acc) - mean)
        sum2 += g
    k1, c2 = _row_means(sum1, sum2, rstd, N)
    return xs, dys, k1, c2


# %%


@triton.jit
def _dx_tile(
    dy_ptr, x_ptr, w_ptr, ws, mean_ptr, rstd_ptr, dx_ptr, tile, M,
    N: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
    EVEN: tl.constexpr, HOW: tl.constexpr,
):  # fmt: skip
    acc: tl.constexpr = mean_ptr.dtype.element_ty
    row = tl.arange(0, ROWS)[:, None]
    first = tl.cast(tile, tl.int64) * ROWS  # M * N may pass 2**31
    left = M - tile * ROWS
    at = first * N
    mean = _load(mean_ptr + first, row, 0, left, 1, 1, EVEN)
    rstd = _load(rstd_ptr + first, row, 0, left, 1, 1, EVEN)
    if HOW == "registers":
        xs, dys, k1, c2 = _read_rows(
            dy_ptr + at, x_ptr + at, ws, mean, rstd, left, N, ROWS, CHUNK, EVEN
        )
        for c in tl.static_range((N + CHUNK - 1) // CHUNK):
            g = ws[c].to(acc) * dys[c].to(acc)
            dx = (g - ((xs[c].to(acc) - mean) * k1 + c2)) * rstd
            _store(dx_ptr + at, dx, row, c, left, N, CHUNK, EVEN)
    else:
        _dx_sweeps(
            dy_ptr + at, x_ptr + at, w_ptr, mean, rstd, dx_ptr + at, left,
            N, ROWS, CHUNK, HOW,
        )  # fmt: skip


# %%
# Pass one, and what it lacks
# ---------------------------
#
# A program of the example owns 32 columns and walks down all rows.
# With 512 columns that makes 16 programs, for a GPU that runs hundreds.
# With 32 columns and two million rows it makes one.
#
# So we also cut the rows: a program sums ``SPLIT`` rows of its columns and
# stores one row of partial sums.
# A small last kernel adds them up, as on the second page.
# With ``SPLIT = M`` it is the example again.


@triton.jit
def _sum_columns(
    dy_ptr, x_ptr, mean_ptr, rstd_ptr,
    sums_ptr,  # (splits, 2, N)
    split, block, M, SPLIT,
    N: tl.constexpr, TALL: tl.constexpr, COLS: tl.constexpr,  # of a step
    STAGES: tl.constexpr,  # steps on their way
):  # fmt: skip
    acc: tl.constexpr = mean_ptr.dtype.element_ty
    row = tl.arange(0, TALL)[:, None]
    col = block * COLS + tl.arange(0, COLS)[None, :]
    first = tl.cast(split, tl.int64) * SPLIT
    left = tl.minimum(M - split * SPLIT, SPLIT)
    dw = tl.zeros([TALL, COLS], acc)
    db = tl.zeros([TALL, COLS], acc)
    for i in tl.range(0, left, TALL, num_stages=STAGES):
        there = i + row < left
        mask = there if N % COLS == 0 else there & (col < N)
        at = (first + i) * N
        x = tl.load(x_ptr + at + (row * N + col), mask=mask, other=0)
        dy = tl.load(dy_ptr + at + (row * N + col), mask=mask, other=0)
        mean = tl.load(mean_ptr + first + i + row, mask=there, other=0)
        rstd = tl.load(rstd_ptr + first + i + row, mask=there, other=0)
        dw += dy.to(acc) * ((x.to(acc) - mean) * rstd)
        db += dy.to(acc)
    at = sums_ptr + tl.cast(split, tl.int64) * 2 * N + col
    tl.store(at, tl.sum(dw, 0, keep_dims=True), mask=col < N)
    tl.store(at + N, tl.sum(db, 0, keep_dims=True), mask=col < N)


# %%
# The last kernel is that of the second page, early launch included.


@triton.jit
def _sum_rows(
    sums_ptr,  # (P, 2, N)
    dw_ptr, db_ptr,  # (N,), or None: not wanted
    P, N: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,  # of a step
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)[None, :]
    dw = tl.zeros([ROWS, COLS], sums_ptr.dtype.element_ty)
    db = tl.zeros([ROWS, COLS], sums_ptr.dtype.element_ty)
    for start in range(0, P, ROWS):
        row = start + tl.arange(0, ROWS)[:, None]
        mask = (row < P) & (col < N)
        at = sums_ptr + tl.cast(row, tl.int64) * (2 * N) + col
        dw += tl.load(at, mask=mask, other=0)
        db += tl.load(at + N, mask=mask, other=0)
    dw = tl.sum(dw, 0, keep_dims=True)
    db = tl.sum(db, 0, keep_dims=True)
    if dw_ptr is not None:
        tl.store(dw_ptr + col, dw, mask=col < N)
    if db_ptr is not None:
        tl.store(db_ptr + col, db, mask=col < N)


# %%
# Two passes that meet in the cache
# ---------------------------------
#
# If ``x`` and ``dy`` together are larger than the L2 cache, pass two finds
# nothing of what pass one has read, and five matrices move instead of three.
#
# But pass two needs nothing from pass one, so nobody has to wait for the end
# of pass one.
# We cut the matrix into bands of rows that fit into the cache, and put the
# programs of one launch into this order: pass one of band 0, pass two of band
# 0, pass one of band 1, and so on.
# A GPU starts programs in the order of their numbers (in practice; nothing
# promises it), so pass two of a band comes when its rows are still there.
# In another order the result would be the same, only later.
#
# A program of pass two takes ``RUN`` tiles, and loads the next one while it
# works, as on the second page.
# Without ``sums`` there is no pass one, without ``dx`` no pass two.


@triton.jit
def _layer_norm_bwd_two_pass(
    dy_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr,
    dx_ptr,  # (M, N), or None: no pass two
    sums_ptr,  # (splits, 2, N), or None: no pass one
    M, SPLIT,
    ONE, TWO,  # programs of each pass in a band
    N: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
    EVEN: tl.constexpr,
    HOW: tl.constexpr,  # "registers", or sweeps: "reversed", "forward"
    RUN: tl.constexpr,  # tiles of a program
    TALL: tl.constexpr, COLS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = (N + COLS - 1) // COLS
    band = tl.program_id(0) // (ONE + TWO)
    i = tl.program_id(0) % (ONE + TWO)
    if i < ONE:
        split = band * (ONE // BLOCKS) + i // BLOCKS
        # Two conditions: without sums the second is not even compiled.
        if sums_ptr is not None:  # noqa: SIM102
            if split < tl.cdiv(M, SPLIT):
                _sum_columns(
                    dy_ptr, x_ptr, mean_ptr, rstd_ptr, sums_ptr, split,
                    i % BLOCKS, M, SPLIT, N, TALL, COLS, STAGES,
                )  # fmt: skip
    elif dx_ptr is not None:
        first = (band * TWO + i - ONE) * RUN
        last = tl.minimum(first + RUN, tl.cdiv(M, ROWS))
        ws = ()
        if HOW == "registers":
            ws = _load_weight(w_ptr, N, ROWS, CHUNK)
        for tile in tl.range(
            first, last, num_stages=STAGES if RUN > 1 else 1,
            disable_licm=True,
        ):  # fmt: skip
            _dx_tile(
                dy_ptr, x_ptr, w_ptr, ws, mean_ptr, rstd_ptr, dx_ptr,
                tile, M, N, ROWS, CHUNK, EVEN, HOW,
            )  # fmt: skip


# %%
# The rule
# --------
#
# The limits were found by measuring on one GPU; ``n`` is the width in units of
# 16 bits.
#
# * A tile of pass one has 512 bytes of each row, which one warp loads at once.
# * In pass two, rows wider than 8192 would take so many registers that few
#   programs fit on a multiprocessor.
#   That holds back pass one too, which is in the same kernel.
#   So they are swept twice, the second time from a cache.
# * A band of ``x`` and ``dy`` has 16 MB, a part of the L2 cache: the next
#   bands start before it is done.
#   Beyond 32768 it would have too few rows for a split.
# * Pass one has 128 programs in each band, about as many as a large GPU has
#   multiprocessors.
#   Where other bands run beside it, fewer programs may be longer: 16 steps at
#   least, because each program stores a row of sums.

BAND_BYTES = 2**24
PROGRAMS = 128  # of pass one, in a band


def floor_power(n):
    """The largest power of two that is not above n; at least 1."""
    return triton.next_power_of_2(n // 2 + 1)


def plan_backward(M, N, itemsize):
    """Options of the kernel, and the rows of a band and of a split."""
    n = N * itemsize // 2
    warps = 4 if n <= 4096 else 8
    how = "registers" if n <= 8192 else "reversed"
    chunk = min(512 * warps // itemsize, triton.next_power_of_2(N))
    rows = 4096 // itemsize // triton.next_power_of_2(N)
    rows = max(min(rows, 128, triton.next_power_of_2(max(M, 1))), 1)
    run = 4 if how == "registers" else 1
    band = triton.next_power_of_2(max(M, rows * run, 16))  # all rows
    if n <= 32768:
        part = floor_power(BAND_BYTES // (2 * N * itemsize))
        band = min(band, max(part, rows * run))
    cols = min(512 // itemsize, max(triton.next_power_of_2(N), 16))
    tall = 1024 * warps // itemsize // cols
    split = floor_power(min(band, M) * triton.cdiv(N, cols) // PROGRAMS)
    split = min(max(split, 16 * tall if band < M else 16), band)
    return {
        "ROWS": rows, "CHUNK": chunk, "HOW": how, "RUN": run, "TALL": tall,
        "COLS": cols, "STAGES": 3, "num_warps": warps, "band": band,
        "split": split,
    }  # fmt: skip


# %%
# ``dx``, ``dw`` and ``db`` may each be None: then that work is left out.

PDL = (
    ON_GPU
    and torch.version.hip is None
    and torch.cuda.get_device_capability() >= (9, 0)
)


def launch(dy, x, w, mean, rstd, dx, sums, plan):
    """Both passes or one."""
    (M, N), options = x.shape, dict(plan)
    band, split = options.pop("band"), options.pop("split")
    rows = options["ROWS"]
    one = triton.cdiv(N, options["COLS"]) * (band // split)
    two = band // (rows * options["RUN"])
    one, two = 0 if sums is None else one, 0 if dx is None else two
    _layer_norm_bwd_two_pass[(triton.cdiv(M, band) * (one + two),)](
        dy, x, w, mean, rstd, dx, sums, M, split, one, two, N,
        EVEN=M % rows == 0, **options,
    )  # fmt: skip


def sum_rows(sums, dw, db):
    """Launch the last kernel, early where the GPU can."""
    P, _, N = sums.shape
    # torch.compile does not know the option of an early launch.
    pdl = PDL and not torch.compiler.is_compiling()
    early = {"launch_pdl": True} if pdl else {}
    _sum_rows[(triton.cdiv(N, 16),)](
        sums, dw, db, P, N,
        ROWS=min(triton.next_power_of_2(P), 256), COLS=16, PDL=pdl, **early,
    )  # fmt: skip


# %%


def backward(dy, x, w, mean, rstd, dx, dw, db, plan=None):
    """Fill dx, dw and db; each may be None."""
    M, N = x.shape
    if M == 0:  # the sum of no rows
        return [t.zero_() for t in (dw, db) if t is not None]
    w = x.new_ones(N) if w is None else w
    plan = plan or plan_backward(M, N, x.itemsize)
    sums = None
    if dw is not None or db is not None:
        splits = triton.cdiv(M, plan["split"])
        sums = torch.empty(splits, 2, N, dtype=mean.dtype, device=x.device)
    if dx is not None or sums is not None:
        launch(dy, x, w, mean, rstd, dx, sums, plan)
    if sums is not None:
        sum_rows(sums, dw, db)


# %%
# Two functions for users
# -----------------------
#
# ``layer_norm_backward`` is for those who keep the statistics themselves.
# PyTorch's forward operator, for instance, returns them.
# Without them the forward kernel computes them again, which reads ``x`` once
# more.


def layer_norm_backward(dy, x, weight, mean, rstd, eps=1e-5):
    """dx, dweight and dbias.

    mean and rstd have one element for each row; if both are None, they are
    computed again, with eps. Without a weight, rows are the last dimension.
    """
    shape = x.shape[-1:] if weight is None else weight.shape
    shape = _check(x, shape, weight, None, eps)
    N, acc = shape.numel(), torch.promote_types(x.dtype, torch.float32)
    rows = x.reshape(-1, N).contiguous()
    saved = mean is not None and rstd is not None
    if dy.shape != x.shape:
        raise ValueError(f"dy does not have shape {tuple(x.shape)}")
    for name, t in (("mean", mean), ("rstd", rstd)):
        if (t is not None) != saved or (saved and t.numel() != len(rows)):
            raise ValueError(
                f"{name} must have one element for each of the {len(rows)} "
                "rows, or mean and rstd must both be None"
            )
    if saved:
        mean, rstd = (t.reshape(-1).to(acc).contiguous() for t in (mean, rstd))
    else:
        _, mean, rstd = forward(rows, None, None, eps, False)
    w = rows.new_ones(N) if weight is None else weight.reshape(N).contiguous()
    dy = dy.reshape(rows.shape).to(x.dtype).contiguous()
    dx, dw, db = (torch.empty_like(t) for t in (rows, w, w))
    backward(dy, rows, w, mean, rstd, dx, dw, db)
    return dx.reshape(x.shape), dw.reshape(shape), db.reshape(shape)


# %%
# The autograd function is that of the first page.


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
    return shape


# %%
# The steps, and one pass
# -----------------------
#
# The page has taken these steps:
#
# * ``ck``: the example's own order, tiles and sweeps;
# * ``split``: pass one is cut into splits of rows;
# * ``tiles``: pass two has the tiles of the rule;
# * ``one launch``: pass one, then pass two in the same launch;
# * ``triton``: the same in bands.
#
# Against them stands one pass, the last rung of the second page: a program
# keeps the sums of ``dw`` and ``db`` in registers while it computes ``dx``.


@triton.jit
def _layer_norm_bwd_one_pass(
    dy_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, dx_ptr,
    sums_ptr,  # (programs, 2, N)
    M, N: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
    STAGES: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    acc: tl.constexpr = mean_ptr.dtype.element_ty
    CHUNKS: tl.constexpr = (N + CHUNK - 1) // CHUNK
    row = tl.arange(0, ROWS)[:, None]
    ws, dws, dbs = _load_weight(w_ptr, N, ROWS, CHUNK), (), ()
    for _ in tl.static_range(CHUNKS):
        dws += (tl.zeros([ROWS, CHUNK], acc),)
        dbs += (tl.zeros([ROWS, CHUNK], acc),)
    for tile in tl.range(
        tl.program_id(0), tl.cdiv(M, ROWS), tl.num_programs(0),
        num_stages=STAGES, disable_licm=True,
    ):  # fmt: skip
        first = tl.cast(tile, tl.int64) * ROWS
        at, left = first * N, M - tile * ROWS
        mean = _load(mean_ptr + first, row, 0, left, 1, 1, EVEN)
        rstd = _load(rstd_ptr + first, row, 0, left, 1, 1, EVEN)
        xs, dys, k1, c2 = _read_rows(
            dy_ptr + at, x_ptr + at, ws, mean, rstd, left, N, ROWS, CHUNK, EVEN
        )
        new_dws, new_dbs = (), ()
        for c in tl.static_range(CHUNKS):
            d, dy = xs[c].to(acc) - mean, dys[c].to(acc)
            dx = (ws[c].to(acc) * dy - (d * k1 + c2)) * rstd
            _store(dx_ptr + at, dx, row, c, left, N, CHUNK, EVEN)
            new_dws += (dws[c] + dy * rstd * d,)
            new_dbs += (dbs[c] + dy,)
        dws, dbs = new_dws, new_dbs
    at = sums_ptr + tl.program_id(0) * 2 * N
    for c in tl.static_range(CHUNKS):
        dw = tl.sum(dws[c], 0, keep_dims=True)
        db = tl.sum(dbs[c], 0, keep_dims=True)
        _store(at, dw, 0, c, 1, N, CHUNK, True)
        _store(at + N, db, 0, c, 1, N, CHUNK, True)


# %%
# Its rule is that of the third page, up to the width at which the
# accumulators no longer fit.

NUM_SMS = (
    torch.cuda.get_device_properties(DEVICE).multi_processor_count
    if ON_GPU
    else 4
)


def plan_one_pass(N, itemsize):
    n = N * itemsize // 2
    warps = 4 if n <= 4096 else 8 if n <= 10240 else 16
    chunk = min(512 * warps // itemsize, triton.next_power_of_2(N))
    rows = max(min(8192 // itemsize // chunk, 128), 1) if n <= 1024 else 1
    room = 2 * rows * triton.cdiv(N, chunk) * chunk * itemsize
    return {
        "ROWS": rows, "CHUNK": chunk, "num_warps": warps,
        "STAGES": 1 + min(98304 // room, 3),
        "per_sm": 2 if n <= 4096 else 1,
    }  # fmt: skip


def one_pass(dy, x, w, mean, rstd):
    """dx, dw and db by one pass."""
    M, N = x.shape
    options = plan_one_pass(N, x.itemsize)
    rows, per_sm = options["ROWS"], options.pop("per_sm")
    programs = min(NUM_SMS * per_sm, triton.cdiv(M, rows))
    dx, dw, db = (torch.empty_like(t) for t in (x, w, w))
    sums = torch.empty(programs, 2, N, dtype=mean.dtype, device=x.device)
    _layer_norm_bwd_one_pass[(programs,)](
        dy, x, w, mean, rstd, dx, sums, M, N, EVEN=M % rows == 0, **options
    )
    sum_rows(sums, dw, db)
    return dx, dw, db


# %%
# The steps as functions that are called alike.

CK = {
    "ROWS": 8, "CHUNK": 128, "HOW": "reversed", "RUN": 1,
    "TALL": 32, "COLS": 32, "STAGES": 1, "num_warps": 8,
}  # fmt: skip


def step(dy, x, w, mean, rstd, name):
    """dx, dw and db by one of the steps."""
    if name == "one pass":
        return one_pass(dy, x, w, mean, rstd)
    M, N = x.shape
    dx, dw, db = (torch.empty_like(t) for t in (x, w, w))
    plan = plan_backward(M, N, x.itemsize)
    whole = {"band": triton.next_power_of_2(max(M, plan["band"]))}
    ck = CK | whole | {"split": M}
    if name == "one launch":
        plan |= whole
    if name in ("one launch", "triton"):
        backward(dy, x, w, mean, rstd, dx, dw, db, plan)
        return dx, dw, db
    second = plan if name == "tiles" else ck
    launch(dy, x, w, mean, rstd, dx, None, second | whole)
    if name == "ck":
        sums = torch.empty(1, 2, N, dtype=w.dtype, device=x.device)
        launch(dy, x, w, mean, rstd, None, sums, ck)
        return dx, *sums[0]
    backward(dy, x, w, mean, rstd, None, dw, db, plan)
    return dx, dw, db


# %%
# Every step against float64: the errors of ``dx``, ``dw`` and ``db``.
# As on the first page, a 16-bit result may be wrong by half a unit of its last
# digit, and a float32 result by 16 times that.

STEPS = "ck", "split", "tiles", "one launch", "triton", "one pass"
M, N = (1151, 8192) if ON_GPU else (7, 72)


def exact(x, w, dy):
    """dx, dw and db in float64."""
    wide = x.double(), w.double(), torch.zeros_like(w).double()
    return autograd(
        lambda x, w, b: F.layer_norm(x, w.shape, w, b), *wide, dy=dy.double()
    )


x, w, b, dy = example(M, N, torch.float16)
_, mean, rstd = forward(x, w, b, 1e-5)
expected = exact(x, w, dy)
for name in STEPS:
    pairs = zip(step(dy, x, w, mean, rstd, name), expected, strict=True)
    found = [error(*pair) for pair in pairs]
    print(f"{name:10}", *(f"{e:.1e}" for e in found))
    assert max(found) < 2**-11

# %%
# ``layer_norm`` in three types, next to PyTorch.


def results(function, x, w, b, dy):
    """y, dx, dw and db of a function called like layer_norm."""
    x, w, b = (t.detach().requires_grad_() for t in (x, w, b))
    y = function(x, x.shape[-1:], w, b, 1e-5)
    return y.detach(), *torch.autograd.grad(y, (x, w, b), dy)


def errors(function, M, N, dtype):
    """Relative errors of y, dx, dw and db against float64."""
    given = example(M, N, dtype)
    wide = [t.double() for t in given]
    pairs = zip(
        results(function, *given), results(F.layer_norm, *wide), strict=True
    )
    return [error(*pair) for pair in pairs]


def tolerance(dtype):
    half_unit = torch.finfo(dtype).eps / 2
    if dtype in (torch.float32, torch.float64):
        return 16 * half_unit
    if dtype == torch.bfloat16 and not ON_GPU:
        return 2 * half_unit  # the interpreter cuts bfloat16, not rounds it
    return half_unit


for dtype in torch.float16, torch.bfloat16, torch.float32:
    for name, f in ("ours", layer_norm), ("PyTorch", F.layer_norm):
        found = errors(f, M, N, dtype)
        print(f"{dtype} {name:8}", *(f"{e:.1e}" for e in found))
        assert name == "PyTorch" or max(found) <= tolerance(dtype)

# %%
# The statistics may be those of PyTorch, or none:

x, w, b, dy = example(M, N, torch.float32)
_, mean, rstd = torch.native_layer_norm(x, (N,), w, b, 1e-5)
for saved in (mean, rstd), (None, None):
    got = layer_norm_backward(dy, x, w, *saved)
    found = [error(*pair) for pair in zip(got, exact(x, w, dy), strict=True)]
    print(*(f"{e:.1e}" for e in found))
    assert max(found) <= tolerance(torch.float32)

# %%
# And the two properties that need no reference: each row of ``dx`` sums to
# zero, and is orthogonal to :math:`\hat{x}` up to a rest of
# :math:`\epsilon \, r^3 N c_1`.

x, w, b, dy = example(8, 96, torch.float64)
_, mean, rstd = forward(x, w, b, 1e-5)
dx, _, _ = layer_norm_backward(dy, x, w, mean, rstd)
x_hat = (x - mean[:, None]) * rstd[:, None]
rest = 1e-5 * rstd**3 * (x_hat * w * dy).sum(dim=1)
print(f"largest sum of a row: {dx.sum(dim=1).abs().max():.1e}")
torch.testing.assert_close(dx.sum(dim=1), torch.zeros_like(mean))
torch.testing.assert_close((dx * x_hat).sum(dim=1), rest)

# %%
# Count first
# -----------
#
# The unit is one matrix of ``M`` rows and ``N`` columns that moves between
# memory and multiprocessors.
# The least is three: read ``x`` and ``dy``, write ``dx``.
# A row of partial sums is 8 bytes a column, written once and read once.


def units(name, M, N, itemsize):
    """Least and largest number of matrices moved."""
    if name == "one pass":
        options = plan_one_pass(N, itemsize)
        rows_of_sums = min(132 * options["per_sm"], M)  # on an H200
        return 2 * [3 + 16 * rows_of_sums / (M * itemsize)]
    plan = plan_backward(M, N, itemsize)
    rows_of_sums = M / plan["split"]
    sums = 0 if name == "ck" else 16 * rows_of_sums / (M * itemsize)
    least = 3 if name in ("one launch", "triton") else 5
    sweeps = name in ("ck", "split") or plan["HOW"] != "registers"
    most = 7 if sweeps else 5  # the second sweep misses
    return [least + sums, most + sums]


for name in STEPS:
    least, most = units(name, 4096, 8192, 2)
    print(
        f"{name:10} {least:.2f} to {most:.2f} units, "
        f"at most {3 / least:.0%} of the copy's speed"
    )

# %%
# Two whole passes read ``x`` and ``dy`` twice: they move five units where the
# copy moves three.
# Where the second read finds its rows in a cache the limit is higher.
#
# Benchmark
# ---------
#
# Clock, ceiling and code are those of the first page.


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
# The first figure is the one promised above: the error of the two forms.


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["ratio"],
        x_vals=[1, 10, 100, 1000, 10000],
        x_log=True,
        line_arg="provider",
        line_vals=["triton", "ck", "torch"],
        line_names=["c1, c2 (Triton)", "b, c (CK)", "PyTorch"],
        ylabel="relative error",
        y_log=True,
        plot_name="layer-norm-two-pass-digits",
        args={"M": 1024, "N": 4096},
    )
)
def measure_digits(M, N, ratio, provider):
    """Norm of the difference of dx from float64, divided by its norm, for
    float32 rows with a mean of ratio standard deviations."""
    if not ON_GPU:
        raise NoGPU
    return [digits(M, N, ratio, provider)] * 3


table = run(measure_digits)

# %%
# The other implementations, Liger and Apex where they are installed:


def lines():
    """Provider keys and their names in the figures."""
    names = {"triton": "Triton", "torch": "PyTorch"}
    names["torch.compile"] = "torch.compile"
    find = importlib.util.find_spec
    if find("liger_kernel"):
        names["liger"] = "Liger"
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
# One function measures all that moves whole matrices.
# Beside the passes and the steps these are: pass two alone, in three ways, and
# the backward pass without saved statistics.

WAYS = {"registers": "One read", "reversed": "Reversed", "forward": "Forward"}


def work(M, N, dtype, mode, provider):
    """A function that builds the call to be timed."""

    def prepare():
        x, w, b, dy = example(M, N, dtype)
        if provider == "copy":
            out = torch.empty_like(x)
            if mode == "forward":
                return lambda: torch.mul(x, 1, out=out)
            return lambda: torch.add(x, dy, out=out)
        if provider == "recomputed":
            return lambda: layer_norm_backward(dy, x, w, None, None)
        if provider in WAYS:
            saved, dx = forward(x, w, b, 1e-5)[1:], torch.empty_like(x)
            plan = plan_backward(M, N, x.itemsize)
            plan |= {"HOW": provider, "ROWS": 1, "RUN": 1}
            return lambda: launch(dy, x, w, *saved, dx, None, plan)
        if provider in STEPS and provider != "triton":
            saved = forward(x, w, b, 1e-5)[1:]
            return lambda: step(dy, x, w, *saved, provider)
        leaves = [t.requires_grad_() for t in (x, w, b)]
        f = implementation(provider)
        if mode == "forward":
            return lambda: f(x, (N,), w, b, 1e-5)
        y = f(x, (N,), w, b, 1e-5)
        return lambda: torch.autograd.grad(y, leaves, dy, retain_graph=True)

    return prepare


# %%


def height(M, N):
    """M rows, or as many as make 2**26 elements."""
    return min(M, 2**26 // N)


# Rows beyond what these can do, in units of 16 bits:
WIDEST = {"one pass": 32768, "registers": 16384, "liger": 65536}


def measure(M, N, dtype, mode, provider):
    """Device time from a CUDA graph replayed with an empty L2 cache; median,
    20 % and 80 % quantiles."""
    n, M = N * dtype.itemsize // 2, height(M, N)
    if ON_GPU and n > WIDEST.get(provider, n):
        return [float("nan")] * 3
    ms, fast, slow = device_time(work(M, N, dtype, mode, provider))
    moved = (2 if mode == "forward" else 3) * M * N * dtype.itemsize
    return [moved / t * 1e-6 for t in (ms, slow, fast)]


def speed(name, widths, names, mode="backward", **args):
    """A benchmark of that function."""
    names = names | {"copy": "Copy"}
    args = {"M": 4096, "dtype": torch.float16, "mode": mode} | args
    return triton.testing.perf_report(
        triton.testing.Benchmark(
            x_names=["N"],
            x_vals=widths,
            x_log=widths[1] == 2 * widths[0],
            line_arg="provider",
            line_vals=list(names),
            line_names=list(names.values()),
            ylabel="GB/s",
            plot_name=f"layer-norm-two-pass-{name}",
            args=args,
        )
    )(measure)


# %%
# The sweep of the earlier pages, backward.
# The line "One pass" is the design of the second page.

ONE = {"one pass": "One pass"}
SWEEP = [512 * i for i in range(2, 32)]

table = run(speed("backward", SWEEP, lines() | ONE))

# %%


def limit(table):
    """Two passes next to three fifths of the copy, and next to one pass."""
    if table is None:
        return
    ours, one, copy = (
        table[f"{name} (GB/s)"] for name in ("Triton", "One pass", "Copy")
    )
    above = (ours > 0.6 * copy).sum()
    print(f"above three fifths of the copy at {above} of {len(ours)} sizes")
    for name, won in (
        ("two passes faster", ours > one),
        ("one pass faster", ours < one),
        ("one pass too wide for registers", one.isna()),
    ):
        widths = table["N"][won].astype(int).tolist()
        print(f"{name} at N =", *(widths or ["none"]))


claims(table)
limit(table)

# %%
# Forward:

table = run(speed("forward", SWEEP, lines(), "forward"))

# %%
claims(table)

# %%
# What each step of the page is worth:

NAMES = {
    "ck": "CK's design",
    "split": "Split",
    "tiles": "Tiles",
    "one launch": "One launch",
    "triton": "Triton",
}
LADDER = [1024, 2048, 4096, 6144, 8192, 12288, 15872]
table = run(speed("steps", LADDER, NAMES | ONE))

# %%


def gains(table, names):
    """Speed of each column relative to the one before it."""
    if table is None:
        return
    for before, after in itertools.pairwise(names):
        ratio = table[f"{after} (GB/s)"] / table[f"{before} (GB/s)"]
        best = table["N"][ratio.idxmax()]
        print(
            f"{after} over {before}: times {ratio.min():.2f} to "
            f"{ratio.max():.2f}, most at N = {best:.0f}"
        )


gains(table, NAMES.values())

# %%
# The example's own size, 1024 × 512 in float32, and its neighbors.
# ``x`` and ``dy`` are 2 MB each: everything stays in the L2 cache, and the
# number of programs and of launches decides.

OWN = [128, 256, 512, 1024, 2048]
PAIR = {"triton": "Triton", "torch": "PyTorch", "ck": "CK's design"} | ONE
table = run(speed("example", OWN, PAIR, M=1024, dtype=torch.float32))

# %%
claims(table)
limit(table)

# %%
# Tall and narrow: 2**26 elements in few columns.

TALL = [32, 64, 128, 256, 512, 1024]
CK_TOO = {"ck": "CK's design"} | ONE
table = tall = run(speed("tall", TALL, lines() | CK_TOO, M=2**21))

# %%
claims(table)
limit(table)

# %%
# Short and wide: 2**26 elements in up to 131072 columns.
# The accumulators of one pass need 8 bytes of register for each column, so
# its line ends at 32768.

WIDE = [2**i for i in range(14, 18)]
table = wide = run(speed("wide", WIDE, lines() | ONE))

# %%
claims(table)
limit(table)

# %%
# The reversed sweep
# ------------------
#
# Pass two alone: one read, two sweeps with the second backward, two sweeps
# with both forward.
# The reversal can only help where the rows in work are larger than a cache.

table = run(speed("sweeps", [2**i for i in range(10, 18)], WAYS))

# %%
gains(table, ["Forward", "Reversed", "One read"])

# %%
# Saved or recomputed
# -------------------
#
# Saved statistics are 8 bytes a row.
# To compute them again takes a launch and another read of ``x``.

SAVED = {"triton": "Saved", "recomputed": "Recomputed"}
table = run(speed("saved", [2**i for i in range(10, 17)], SAVED))

# %%
gains(table, ["Saved", "Recomputed"])

# %%
# When are two passes right?
# --------------------------
#
# One pass moves three units and two passes up to five.
# But one pass keeps two float32 sums for each column in registers, and it
# lives from few programs that stay.
# So one would choose two passes for two kinds of shapes: few columns and very
# many rows, and rows too wide for those sums.
# This is what was measured; the numbers are the speed of two passes divided by
# that of one.


def judge(what, table):
    """Say which design was faster, and where."""
    if table is None:
        return
    one = table["One pass (GB/s)"]
    ratio = (table["Triton (GB/s)"] / one).dropna()
    won, count = (ratio > 1).sum(), len(ratio)
    verdict = (
        "two passes were right"
        if won == count
        else "one pass was right"
        if won == 0
        else f"two passes were right at {won} of {count} widths"
    )
    print(
        f"{what}: {verdict}, with {ratio.min():.2f} to {ratio.max():.2f} "
        f"times the speed of one; only two passes ran at {one.isna().sum()} "
        "widths"
    )


judge("few columns, many rows", tall)
judge("many columns", wide)

# %%
# Few columns speak for one pass as well: their sums take few registers, and
# its programs share the rows, which is what splits do.
#
# Many columns are its limit, and wider types halve it.
# Beyond it stand two passes, or the programs of the third page that share a
# row and exchange their sums.
#
# Two passes have two advantages that no clock shows.
# Where only ``dx`` or only the parameters are asked for, the other pass is not
# run.
# And no program waits for another.

# %%
# What can go wrong
# -----------------
#
# **Statistics of other data.**
# The example fills ``mean`` and ``inv_std`` with random numbers, and so does
# its reference.
# What it computes is no gradient, and a wrong formula may pass.

x, w, b, dy = example(4, 48, torch.float32)
_, *saved = forward(x, w, b, 1e-5)
noise = [torch.rand(4, device=DEVICE) for _ in range(2)]
for name, statistics in ("wrong", noise), ("right", saved):
    dx = layer_norm_backward(dy, x, w, *statistics)[0]
    print(f"{name}: largest sum of a row {dx.sum(dim=1).abs().max():.0e}")

# %%
# **A split that loses rows.**
# 10 rows in 4 splits: division that rounds down gives 2 rows to each.

x, w, b, dy = example(10, 16, torch.float32)
_, mean, rstd = forward(x, w, b, 1e-5)
for name, rows in ("wrong", 10 // 4), ("right", triton.cdiv(10, 4)):
    sums = torch.empty(triton.cdiv(10, rows), 2, 16, device=DEVICE)
    plan = CK | {"COLS": 16, "band": 4 * rows, "split": rows}
    launch(dy, x, w, mean, rstd, None, sums, plan)
    lost = error(sums[:4].sum(dim=0)[1], dy.sum(dim=0))
    print(f"{name}: {4 * rows} places for 10 rows, error of db {lost:.0e}")

# %%
# Exercises
# ---------
#
# Each stub runs as it stands, and ``check`` tells which part is wrong.


def check(got, expected):
    """Say which rows (or columns, of a vector) are wrong."""
    wrong = ~torch.isclose(got, expected, rtol=1e-3, atol=1e-4)
    what = "columns"
    if wrong.dim() == 2:
        what, wrong = "rows", wrong.any(dim=1)
    bad = wrong.nonzero().flatten().tolist()
    print("all right" if not bad else f"wrong {what}: {bad}")
    return not bad


x, w, b, dy = example(10, 24, torch.float32)
_, mean, rstd = forward(x, w, b, 1e-5)

# %%
# **Exercise 1: from one vocabulary to the other.**
# The kernel of Composable Kernel knows, of each row, ``ds`` (the sum of
# ``dy * gamma * x``) and ``db`` (the sum of ``dy * gamma``).
# Compute ``c1`` and ``c2`` from them, without reading ``x`` or ``dy`` again.


def translate(ds, db, mean, rstd, N):
    return ds / N, db / N  # to do


def exercise_1(translate):
    g, d = w * dy, x - mean[:, None]
    ds, db = (g * x).sum(dim=1), g.sum(dim=1)
    found = torch.stack(translate(ds, db, mean, rstd, 24), dim=1)
    c1 = (d * rstd[:, None] * g).mean(dim=1)
    return check(found, torch.stack([c1, g.mean(dim=1)], dim=1))


exercise_1(translate)

# %%

# Solution 1


def translate_solved(ds, db, mean, rstd, N):
    # g * x_hat = (g * x - g * mean) * rstd, summed over the row.
    return (ds - mean * db) * rstd / N, db / N


assert exercise_1(translate_solved)

# %%
# **Exercise 2: what a cache still has.**
# A cache holds 5 chunks and drops the one that was not used for the longest
# time.
# A row has 8 chunks.
# In which order must the second sweep read them to find as many as possible?
# The stub finds none.


def hits(order, room=5):
    """Chunks of the second sweep that are found, after a forward sweep."""
    cache, found = [], 0
    for number, c in enumerate([*range(8), *order]):
        found += number >= 8 and c in cache
        cache = [*(k for k in cache if k != c), c][-room:]
    return found


def second_sweep():
    return list(range(8))  # to do


def exercise_2(second_sweep):
    order = second_sweep()
    assert sorted(order) == list(range(8)), "each chunk once"
    print(f"{hits(order)} of 8 found")
    return check(torch.tensor([hits(order)]), torch.tensor([5]))


exercise_2(second_sweep)

# %%

# Solution 2


def second_sweep_solved():
    # Backward: what was read last comes first.
    return list(range(7, -1, -1))


assert exercise_2(second_sweep_solved)

# %%
# **Exercise 3: split the rows.**
# Three programs sum ``dy`` over the rows, for all 24 columns.
# In the stub each of them sums all 10 rows, so the total is three times too
# large.
# Give each program its own rows.


@triton.jit
def _split(dy_ptr, sums_ptr, M, SPLIT, N: tl.constexpr, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    db = tl.zeros([BLOCK], tl.float32)
    first, last = 0, M  # to do
    for row in range(first, last):
        db += tl.load(dy_ptr + row * N + cols, mask=cols < N, other=0)
    tl.store(sums_ptr + tl.program_id(0) * N + cols, db, mask=cols < N)


def exercise_3(kernel):
    sums = torch.full((3, 24), float("nan"), device=DEVICE)
    kernel[(3,)](dy, sums, 10, 4, 24, BLOCK=32)
    return check(sums.sum(dim=0), dy.sum(dim=0))


exercise_3(_split)

# %%

# Solution 3


@triton.jit
def _split_solved(
    dy_ptr, sums_ptr, M, SPLIT, N: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    cols = tl.arange(0, BLOCK)
    db = tl.zeros([BLOCK], tl.float32)
    first = tl.program_id(0) * SPLIT
    last = tl.minimum(first + SPLIT, M)  # the last split has 2 rows
    for row in range(first, last):
        db += tl.load(dy_ptr + row * N + cols, mask=cols < N, other=0)
    tl.store(sums_ptr + tl.program_id(0) * N + cols, db, mask=cols < N)


assert exercise_3(_split_solved)

# %%
# References
# ----------
#
# * AMD, `Composable Kernel <https://github.com/ROCm/composable_kernel>`_,
#   ``example/53_layernorm2d_bwd``: the code that this page rebuilds.
# * Jimmy Lei Ba, Jamie Ryan Kiros and Geoffrey E. Hinton, `Layer Normalization
#   <https://arxiv.org/abs/1607.06450>`_, 2016.
# * Sergey Ioffe and Christian Szegedy, `Batch Normalization
#   <https://arxiv.org/abs/1502.03167>`_, 2015: where the README's sums belong.
# * B. P. Welford, `Note on a method for calculating corrected sums of squares
#   and products <https://doi.org/10.1080/00401706.1962.10490022>`_, 1962.
