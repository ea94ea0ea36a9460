r"""
RMS normalization
=================

Write the normalization of modern language models in Triton, with the residual
addition before it in the same kernel, forward and backward.

You will be able to:

* say what root mean square normalization keeps of layer normalization, and
  what it gives up;
* derive its gradient and check every step of the algebra;
* fuse an addition into a kernel, and count what that saves;
* keep a row of 16384 columns and its sums in the registers of one program;
* choose where to round, and how to store a weight, for training in 16 bits.

This page assumes the first page, and reads best after the second and third:
their tiles, persistent programs and early launches are used here and not
explained again.
Without a GPU everything here runs in Triton's interpreter, except the timing.

What is computed
----------------

Layer normalization subtracts the mean of a row and divides by its standard
deviation.
RMS normalization (Zhang and Sennrich, 2019) leaves the mean where it is.
It divides by the root of the mean square, and has no bias:

.. math::

   y = \hat{x} \cdot w, \qquad \hat{x} = x \, r, \qquad
   r = \Bigl( \frac{1}{N} \sum_j x_j^2 + \epsilon \Bigr)^{-1/2}

Llama, Qwen, Mistral and Gemma use it, in front of each attention and each
feed-forward block.
"""

# %%
# The first cell is that of every page.

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
# A row of two numbers is a point in a plane, so both normalizations can be
# drawn.
# RMS normalization moves the point along the line to the origin until it lies
# on a circle: it keeps the direction and forgets the length.
# Layer normalization forgets one number more, the mean.
# Of two numbers only their order is left, and every row becomes one of two
# points.


def planes():
    _, axes = plt.subplots(
        1, 2, figsize=(7.5, 3.7),
        num="RMS norm moves rows of two numbers onto a circle, "
        "layer norm onto two points",
    )  # fmt: skip
    rows = [[2.2, 0.5], [0.4, 0.8], [-0.6, 2.1], [-0.9, -0.2], [0.6, -2.0]]
    rows = torch.tensor([*rows, [-2.2, -1.4]])
    rms = rows / rows.square().mean(1, keepdim=True).sqrt()
    layer = rows - rows.mean(1, keepdim=True)
    layer = layer / layer.square().mean(1, keepdim=True).sqrt()
    titles = "RMS normalization", "layer normalization"
    for ax, title, ends in zip(axes, titles, (rms, layer), strict=True):
        ax.set(xlim=(-2.6, 2.6), ylim=(-2.6, 2.6), aspect="equal", title=title)
        ax.axhline(0, color="gray", lw=0.5)
        ax.axvline(0, color="gray", lw=0.5)
        if ends is rms:
            ax.add_patch(plt.Circle((0, 0), 2**0.5, fill=False, color="gray"))
        for i, (x, y) in enumerate(zip(rows, ends, strict=True)):
            ax.plot(*x, "o", mfc="white", mec=f"C{i}")
            arrow = {"arrowstyle": "->", "color": f"C{i}"}
            ax.annotate("", y.tolist(), x.tolist(), arrowprops=arrow)
            ax.plot(*y, "o", color=f"C{i}")
    plt.show()


planes()

# %%
# Forward
# -------
#
# The tiles are those of the third page.
# A tile has ``ROWS`` rows, and its columns are cut into chunks, so that a row
# of any length has few idle lanes.
# Two helpers load and store one chunk, with a mask only where a lane can be
# outside.


@triton.jit
def _load(
    ptr,  # first element of the first row
    row,  # (ROWS, 1), counted from that row; or 0
    c,  # number of the chunk
    M,  # rows that exist
    N: tl.constexpr,  # columns, also the distance of the rows
    CHUNK: tl.constexpr,
    EVEN: tl.constexpr,  # all rows of all tiles exist
    HINT: tl.constexpr,  # how long the cache should keep it
):
    col = c * CHUNK + tl.arange(0, CHUNK)[None, :]
    at = ptr + row * N + col
    if EVEN and (c + 1) * CHUNK <= N:
        return tl.load(at, eviction_policy=HINT)
    else:
        mask = col < N if EVEN else (row < M) & (col < N)
        return tl.load(at, mask=mask, other=0, eviction_policy=HINT)


@triton.jit
def _store(
    ptr,
    value,
    row,
    c,
    M,
    N: tl.constexpr,
    CHUNK: tl.constexpr,
    EVEN: tl.constexpr,
):
    col = c * CHUNK + tl.arange(0, CHUNK)[None, :]
    at = ptr + row * N + col
    if EVEN and (c + 1) * CHUNK <= N:
        tl.store(at, value)
    else:
        mask = col < N if EVEN else (row < M) & (col < N)
        tl.store(at, value, mask=mask)


# %%
# A block of a transformer adds its result to the *residual stream* and
# normalizes the sum for the next block.
# Both are needed later: ``y`` by the next block, the sum ``s`` by the next
# addition.
# Done in two steps, the sum is written and read again:
#
# * the addition reads two matrices and writes one;
# * the normalization reads one and writes one.
#
# That is five matrices.
# One kernel reads ``x`` and the residual and writes ``s`` and ``y``: four.
#
# The sum is rounded to the type of ``x`` before it is squared.
# So ``y`` is the normalization of exactly the ``s`` that is returned, and the
# backward pass, which reads ``s``, differentiates what was computed.


@triton.jit
def _rounded_sum(x, residual, acc: tl.constexpr):
    return (x.to(acc) + residual.to(acc)).to(x.dtype)


@triton.jit
def _weight(w, offset: tl.constexpr, acc: tl.constexpr):
    """What x_hat is multiplied by: w, or offset + w in full precision."""
    w = w.to(acc)
    if offset != 0:
        w += offset
    return w


# %%
# ``offset`` is 0 or 1; a later section says what it is good for.
#
# Layer normalization needs a second sum over the row, because the variance
# starts from the mean.
# Here the squares start at 0, so one sum is enough, and it runs while the row
# arrives.
# Masked lanes hold 0, and a square of 0 adds nothing: the trap of the first
# page does not exist here.
#
# All loads come before the first store.
# The compiler cannot know that ``s`` and ``x`` do not overlap, so it would
# not move a load up over a store, and the chunks would arrive one by one.


@triton.jit
def _rms_norm_fwd_rows(
    x_ptr,  # (M, N), contiguous
    residual_ptr,  # (M, N), or None: only normalize
    w_ptr,  # (N,), or None
    y_ptr,  # (M, N)
    s_ptr,  # (M, N), x + residual, or None
    rstd_ptr,  # (M,), r of the formula, kept for the backward pass
    M, eps: tl.constexpr, offset: tl.constexpr, N: tl.constexpr,
    ROWS: tl.constexpr, CHUNK: tl.constexpr,  # of a tile
    EVEN: tl.constexpr, HINT: tl.constexpr,
):  # fmt: skip
    acc: tl.constexpr = rstd_ptr.dtype.element_ty
    CHUNKS: tl.constexpr = (N + CHUNK - 1) // CHUNK
    first = tl.cast(tl.program_id(0), tl.int64) * ROWS  # M * N may pass 2**31
    start = first * N
    left = M - tl.program_id(0) * ROWS
    row = tl.arange(0, ROWS)[:, None]
    xs, more, rows = (), (), ()
    for c in tl.static_range(CHUNKS):
        xs += (_load(x_ptr + start, row, c, left, N, CHUNK, EVEN, HINT),)
        if residual_ptr is not None:
            at = residual_ptr + start
            more += (_load(at, row, c, left, N, CHUNK, EVEN, HINT),)
    squares = tl.zeros([ROWS, CHUNK], acc)
    for c in tl.static_range(CHUNKS):
        x = xs[c]
        if residual_ptr is not None:
            x = _rounded_sum(x, more[c], acc)
            _store(s_ptr + start, x, row, c, left, N, CHUNK, EVEN)
        rows += (x,)
        squares += x.to(acc) * x.to(acc)
    rstd = tl.rsqrt(tl.sum(squares, 1)[:, None] / N + eps)
    tl.store(rstd_ptr + first + row, rstd, mask=row < left)
    for c in tl.static_range(CHUNKS):
        y = rows[c].to(acc) * rstd
        if w_ptr is not None:
            w = _load(w_ptr, 0, c, 1, N, CHUNK, True, "evict_last")
            y *= _weight(w, offset, acc)
        _store(y_ptr + start, y, row, c, left, N, CHUNK, EVEN)


# %%
# A row that does not fit into registers is read twice, the second time
# backward and from a cache, as on the third page.
# With a residual the second sweep reads ``s``, which the first one wrote.
# A thread may read there what another thread has stored, so a barrier stands
# between the sweeps.


@triton.jit
def _rms_norm_fwd_sweeps(
    x_ptr, residual_ptr, w_ptr, y_ptr, s_ptr, rstd_ptr,
    eps: tl.constexpr, offset: tl.constexpr, N: tl.constexpr,
    CHUNK: tl.constexpr,  # columns of one step
):  # fmt: skip
    acc: tl.constexpr = rstd_ptr.dtype.element_ty
    CHUNKS: tl.constexpr = (N + CHUNK - 1) // CHUNK
    start = tl.cast(tl.program_id(0), tl.int64) * N
    squares = tl.zeros([CHUNK], acc)
    for c in tl.range(0, CHUNKS, num_stages=1):
        col = c * CHUNK + tl.arange(0, CHUNK)
        at = start + col
        x = tl.load(
            x_ptr + at, mask=col < N, other=0, eviction_policy="evict_last"
        )
        if residual_ptr is not None:
            more = tl.load(residual_ptr + at, mask=col < N, other=0)
            x = _rounded_sum(x, more, acc)
            tl.store(s_ptr + at, x, mask=col < N)
        squares += x.to(acc) * x.to(acc)
    rstd = tl.rsqrt(tl.sum(squares, 0) / N + eps)
    tl.store(rstd_ptr + tl.program_id(0), rstd)
    if residual_ptr is not None:
        x_ptr = s_ptr
        tl.debug_barrier()
    for i in tl.range(0, CHUNKS, num_stages=1):
        col = (CHUNKS - 1 - i) * CHUNK + tl.arange(0, CHUNK)
        at = start + col
        x = tl.load(
            x_ptr + at, mask=col < N, other=0, eviction_policy="evict_first"
        )
        y = x.to(acc) * rstd
        if w_ptr is not None:
            w = tl.load(w_ptr + col, mask=col < N, other=0)
            y *= _weight(w, offset, acc)
        tl.store(y_ptr + at, y, mask=col < N, cache_modifier=".cs")


# %%
# The rule is that of the third page, with widths in units of 16 bits.
# Statistics are float32, or float64 for float64.
# A contiguous tensor of any shape is ``M`` rows in memory, so nothing has to
# be reshaped.


def plan_forward(N, itemsize, fused):
    """Name of the kernel and its options, for rows of N elements."""
    n = N * itemsize // 2
    if n > 24576:
        warps = 16 if n <= 49152 else 32
        return "sweeps", {"CHUNK": 16384 // itemsize, "num_warps": warps}
    # The fused kernel holds two rows, so it takes more warps sooner.
    warps = 2 if n <= 1024 else 4 if n <= (4096 if fused else 5120) else 8
    warps = 16 if 14336 < n <= 20480 else warps
    chunk = min(256 * warps, triton.next_power_of_2(N))
    return "rows", {
        "ROWS": max(min(1024 // chunk, 64), 1) if n <= 1024 else 1,
        "CHUNK": chunk,
        "HINT": "evict_first" if n <= 3072 else "",
        "num_warps": warps,
    }


def forward(x, residual, w, N, eps, offset=0.0, plan=None):
    """y, s and rstd for a contiguous x; s is x if there is no residual."""
    M = x.numel() // N
    acc = torch.promote_types(x.dtype, torch.float32)
    y = torch.empty_like(x)
    s = None if residual is None else torch.empty_like(x)
    rstd = torch.empty(M, dtype=acc, device=x.device)
    given = x, residual, w, y, s, rstd
    kind, options = plan or plan_forward(N, x.itemsize, s is not None)
    if M > 0 and kind == "sweeps":
        _rms_norm_fwd_sweeps[(M,)](*given, eps, offset, N, **options)
    elif M > 0:
        tiles = triton.cdiv(M, options["ROWS"])
        even = M % options["ROWS"] == 0
        _rms_norm_fwd_rows[(tiles,)](
            *given, M, eps, offset, N, EVEN=even, **options
        )
    return y, x if s is None else s, rstd


# %%
# A first check, with both kernels:

M, N = (1151, 8192) if ON_GPU else (5, 200)

torch.manual_seed(0)
x, residual = 0.5 + torch.randn(2, M, N, device=DEVICE)
w = torch.rand(N, device=DEVICE)
s_expected = x + residual
y_expected = F.rms_norm(s_expected, (N,), w, 1e-6)
for plan in None, ("sweeps", {"CHUNK": 64, "num_warps": 4}):
    y, s, rstd = forward(x, residual, w, N, 1e-6, plan=plan)
    print(f"largest difference: {(y - y_expected).abs().max():.1e}")
    torch.testing.assert_close(s, s_expected)
    torch.testing.assert_close(y, y_expected)

# %%
# Backward: the formulas
# ----------------------
#
# As on the first page, the forward pass is written in plain PyTorch, in
# float64, and autograd checks each step.
# ``s`` is the row that is normalized, and it is also a result.
# So two gradients arrive: ``dy`` from ``y``, and ``ds`` from the residual
# stream.

eps = 1e-6
x, residual = torch.randn(2, 4, 6, dtype=torch.float64).requires_grad_()
w = torch.rand(6, dtype=torch.float64, requires_grad=True)
dy, ds = torch.randn(2, 4, 6, dtype=torch.float64)

s = x + residual
mean_square = (s**2).mean(dim=1, keepdim=True)
r = (mean_square + eps) ** -0.5
x_hat = s * r
y = x_hat * w


def autograd(value, more=0):
    """What autograd says about the gradient of value; dy arrives from y."""
    loss = (y * dy).sum() + more
    return torch.autograd.grad(loss, value, retain_graph=True)[0]


assert_close = torch.testing.assert_close

# %%
# **Step 1: through the weight.**
# Each column multiplies its gradient by ``w``.

wdy = w * dy
assert_close(wdy, autograd(x_hat))

# %%
# **Step 2: through** :math:`r`.
# The whole row was multiplied by :math:`r`, so its gradient is a sum over the
# row; then comes the derivative of the power.

dr = (s * wdy).sum(dim=1, keepdim=True)
assert_close(dr, autograd(r))
dms = dr * -0.5 * r**3
assert_close(dms, autograd(mean_square))

# %%
# **Step 3: both ways together.**
# There is no mean, so two ways lead to ``s``, not three: the direct one, and
# the one through the squares.

dx = r * wdy + dms * 2 * s / 6
assert_close(dx, autograd(s))

# %%
# **Step 4: simplify.**
# One row mean is left, the ``c1`` of layer normalization; ``c2`` is gone:
#
# .. math::
#
#    c = \frac{1}{N} \sum_j \hat{x}_j \, w_j \, dy_j, \qquad
#    dx = (w \cdot dy - \hat{x} \, c) \; r

c = (x_hat * wdy).mean(dim=1, keepdim=True)
dx = (wdy - x_hat * c) * r
assert_close(dx, autograd(s))

# %%
# **Step 5: the addition.**
# ``s`` is used twice, so its gradients add up.
# An addition hands its gradient to both sides unchanged.
# So there is one gradient for ``x`` and for the residual, and one matrix to
# write.

stream = (s * ds).sum()  # ds arrives from s
assert_close(dx + ds, autograd(x, stream))
assert_close(dx + ds, autograd(residual, stream))

# %%
# **Step 6: the weight.**
# All rows share ``w``, so its gradient is a sum over the rows.
# With ``offset + w`` in place of ``w`` it is the same sum, because the
# derivative of a constant is 0.

assert_close((dy * x_hat).sum(dim=0), autograd(w))

# %%
# What survives of the properties
# -------------------------------
#
# The first page checked ``dx`` without a reference: its rows sum to zero, and
# they are orthogonal to :math:`\hat{x}`.
# Each of these came from something that ``y`` does not notice.
#
# A constant added to a row does change ``y`` here, so the rows of ``dx`` do
# not sum to zero.
# A test for that, copied from layer normalization, would reject the right
# formula.
#
# A factor before a row changes ``y`` only through :math:`\epsilon`.
# So ``dx`` is orthogonal to the row, up to a rest of exactly
# :math:`\epsilon \, r^2 N c`.
# In the picture above: ``dx`` is tangent to the circle.

total = dx.sum(dim=1, keepdim=True)
product = (dx * s).sum(dim=1, keepdim=True)
print(f"sums of the rows: up to {total.abs().max():.1e}")
print(f"products with the row: at most {product.abs().max():.1e}")
assert total.abs().max() > 0.01
assert_close(product, eps * r**2 * 6 * c)

# %%
# The kernel itself can be tested in the same way.
# With the row times 4 and :math:`\epsilon` times 16, every number on the way
# is multiplied by a power of two.
# That changes exponents and no digits: ``y`` must keep its bits.

x = torch.randn(3, 100, device=DEVICE)
y, _, _ = forward(x, None, None, 100, eps)
scaled, _, _ = forward(4 * x, None, None, 100, 16 * eps)
shifted, _, _ = forward(x + 4, None, None, 100, eps)
print("row times 4, same bits:", torch.equal(y, scaled))
print(f"row plus 4, largest change: {(y - shifted).abs().max():.1f}")
assert torch.equal(y, scaled)

# %%
# Backward: a whole row, up to 16384 columns
# ------------------------------------------
#
# The kernel is the persistent one of the second and third page.
# A program takes tile after tile, loads of the next tiles are on their way,
# ``dw`` is summed in registers, and each program stores one row of partial
# sums at the end.
#
# Layer normalization stopped at some 10000 columns, because its sums no
# longer fitted into registers.
# Here is less to hold: no ``db``.
# This is the account of one thread for rows of 16384 columns in 16 bits, with
# 8 warps, so 64 columns a thread:

columns = 16384 // (8 * 32)
account = {"x": columns // 2, "dy": columns // 2, "w": columns // 2}
account["dw, float32"] = columns
for name, registers in account.items():
    print(f"{name:12} {registers:4} registers")
print(f"{'together':12} {sum(account.values()):4} of 255")

# %%
# That leaves enough for addresses, for the chunk in work and for ``ds``,
# which is needed only at the end.
#
# But the compiler undoes it.
# ``x`` and ``dy`` are converted to float32 before the sum and again after it.
# The compiler notices that both are the same numbers, converts only once, and
# keeps the results: two registers for what fitted into one.
# Then registers run out, and it keeps some of them in memory.
#
# So the second use goes through an exclusive or with 0.
# It changes no bit.
# But the 0 is an argument, which the compiler does not know, so it cannot see
# that the numbers are the same.


@triton.jit
def _hidden(x, zero):
    """x itself, but the compiler does not know that."""
    if x.dtype.primitive_bitwidth == 16:
        bits = x.to(tl.int16, bitcast=True) ^ tl.cast(zero, tl.int16)
        return bits.to(x.dtype, bitcast=True)
    else:
        return x


# %%
# In the formula, :math:`\hat{x} = x \, r`.
# So the row sum is taken over ``x * dy * w``, and all factors :math:`r` are
# applied once for a row: ``a`` is :math:`c \, r^2`.
# ``ds`` is added in registers.


@triton.jit
def _row_sum(xs, dys, ws, offset: tl.constexpr, acc: tl.constexpr):
    """Sum of x * dy * w over each row of a tile that has been read."""
    total = tl.zeros(xs[0].shape, acc)
    for c in tl.static_range(len(xs)):
        wdy = dys[c].to(acc) * _weight(ws[c], offset, acc)
        total += xs[c].to(acc) * wdy
    return tl.sum(total, 1)[:, None]


@triton.jit
def _whole_weight(
    w_ptr,
    ROWS: tl.constexpr,
    N: tl.constexpr,
    CHUNK: tl.constexpr,
    acc: tl.constexpr,
):
    """All chunks of w, repeated for each row of a tile: laid out like x."""
    row = tl.zeros([ROWS, 1], tl.int32)
    ws = ()
    for c in tl.static_range((N + CHUNK - 1) // CHUNK):
        if w_ptr is not None:
            ws += (_load(w_ptr, row, c, 1, N, CHUNK, True, ""),)
        else:
            ws += (tl.full([ROWS, CHUNK], 1, acc),)
    return ws


# %%


@triton.jit
def _rms_norm_bwd_rows(
    dy_ptr,  # (M, N), contiguous
    ds_ptr,  # (M, N), or None: nothing to add
    x_ptr,  # (M, N), what was normalized: x, or s
    w_ptr,  # (N,), or None
    rstd_ptr,  # (M,)
    dx_ptr,  # (M, N), or None: not wanted
    partial_ptr,  # (programs, N), or None: no dw
    zero,  # 0, which the compiler does not know
    M, offset: tl.constexpr, N: tl.constexpr,
    ROWS: tl.constexpr, CHUNK: tl.constexpr,
    STAGES: tl.constexpr,  # tiles in flight, and the one in work
    HIDE: tl.constexpr,  # save registers with _hidden
    EVEN: tl.constexpr,
    EARLY: tl.constexpr, PDL: tl.constexpr,  # when the last kernel may start
):  # fmt: skip
    acc: tl.constexpr = rstd_ptr.dtype.element_ty
    CHUNKS: tl.constexpr = (N + CHUNK - 1) // CHUNK
    if PDL and EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    ws, dws = _whole_weight(w_ptr, ROWS, N, CHUNK, acc), ()
    for _ in tl.static_range(CHUNKS):
        dws += (tl.zeros([ROWS, CHUNK], acc),)
    for tile in tl.range(
        tl.program_id(0), tl.cdiv(M, ROWS), tl.num_programs(0),
        num_stages=STAGES, disable_licm=True,
    ):  # fmt: skip
        dws = _rms_norm_bwd_tile(
            dy_ptr, ds_ptr, x_ptr, ws, rstd_ptr, dx_ptr, dws, zero, tile, M,
            offset, N, ROWS, CHUNK, HIDE, EVEN,
        )  # fmt: skip
    if PDL and not EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    if partial_ptr is not None:
        at = partial_ptr + tl.cast(tl.program_id(0), tl.int64) * N
        for c in tl.static_range(CHUNKS):
            dw = tl.sum(dws[c], 0, keep_dims=True)
            _store(at, dw, 0, c, 1, N, CHUNK, True)


# %%
# This is what a program does with one tile:


@triton.jit
def _rms_norm_bwd_tile(
    dy_ptr, ds_ptr, x_ptr, ws, rstd_ptr, dx_ptr, dws, zero, tile, M,
    offset: tl.constexpr, N: tl.constexpr,
    ROWS: tl.constexpr, CHUNK: tl.constexpr,
    HIDE: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Store dx of a tile; return the sums of dw with its terms."""
    acc: tl.constexpr = rstd_ptr.dtype.element_ty
    row = tl.arange(0, ROWS)[:, None]
    first = tl.cast(tile, tl.int64) * ROWS
    start = first * N
    left = M - tile * ROWS
    rstd = _load(rstd_ptr + first, row, 0, left, 1, 1, EVEN, "")
    xs, dys = (), ()
    for c in tl.static_range(len(ws)):
        xs += (_load(x_ptr + start, row, c, left, N, CHUNK, EVEN, ""),)
        dys += (_load(dy_ptr + start, row, c, left, N, CHUNK, EVEN, ""),)
    a = _row_sum(xs, dys, ws, offset, acc) / N * rstd * rstd * rstd
    sums = ()
    for c in tl.static_range(len(ws)):
        x, dy = xs[c], dys[c]
        if HIDE:
            x, dy = _hidden(x, zero), _hidden(dy, zero)
        x = x.to(acc)
        scaled = dy.to(acc) * rstd
        sums += (dws[c] + scaled * x,)
        if dx_ptr is not None:
            dx = scaled * _weight(ws[c], offset, acc)
            if ds_ptr is not None:
                at = ds_ptr + start
                dx += _load(at, row, c, left, N, CHUNK, EVEN, "").to(acc)
            dx -= x * a
            _store(dx_ptr + start, dx, row, c, left, N, CHUNK, EVEN)
    return sums


# %%
# Wider rows take two kernels, as in the portable way of the third page.
# The first one computes the row sums.
# In the second one a program owns some columns and walks down the rows; it
# reads ``x`` and ``dy`` once more.


@triton.jit
def _rms_norm_bwd_sums(
    dy_ptr, x_ptr, w_ptr, rstd_ptr,
    sums_ptr,  # (M,), the factor a of each row
    offset: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    acc: tl.constexpr = rstd_ptr.dtype.element_ty
    row = tl.cast(tl.program_id(0), tl.int64)
    total = tl.zeros([CHUNK], acc)
    for start in range(0, N, CHUNK):
        col = start + tl.arange(0, CHUNK)
        at = row * N + col
        x = tl.load(x_ptr + at, mask=col < N, other=0)
        wdy = tl.load(dy_ptr + at, mask=col < N, other=0).to(acc)
        if w_ptr is not None:
            w = tl.load(w_ptr + col, mask=col < N, other=0)
            wdy *= _weight(w, offset, acc)
        total += x.to(acc) * wdy
    rstd = tl.load(rstd_ptr + row)
    tl.store(sums_ptr + row, tl.sum(total, 0) / N * rstd * rstd * rstd)


# %%


@triton.jit
def _rms_norm_bwd_slices(
    dy_ptr, ds_ptr, x_ptr, w_ptr, rstd_ptr, dx_ptr, sums_ptr,
    partial_ptr,  # (groups, N), or None
    M, offset: tl.constexpr, N: tl.constexpr,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    acc: tl.constexpr = rstd_ptr.dtype.element_ty
    SLICES: tl.constexpr = (N + CHUNK - 1) // CHUNK
    group = tl.program_id(0) // SLICES  # programs that share rows
    col = tl.program_id(0) % SLICES * CHUNK + tl.arange(0, CHUNK)[None, :]
    w = tl.full([1, CHUNK], 1, acc)
    if w_ptr is not None:
        w = tl.load(w_ptr + col, mask=col < N, other=0)
        w = _weight(w, offset, acc)
    dw = tl.zeros([1, CHUNK], acc)
    groups = tl.num_programs(0) // SLICES
    for tile in tl.range(group, tl.cdiv(M, ROWS), groups, num_stages=3):
        row = tile * ROWS + tl.arange(0, ROWS)[:, None]
        mask = (row < M) & (col < N)
        at = tl.cast(row, tl.int64) * N + col
        x = tl.load(x_ptr + at, mask=mask, other=0).to(acc)
        dy = tl.load(dy_ptr + at, mask=mask, other=0).to(acc)
        scaled = dy * tl.load(rstd_ptr + row, mask=row < M, other=0)
        dw += tl.sum(scaled * x, 0, keep_dims=True)
        if dx_ptr is not None:
            a = tl.load(sums_ptr + row, mask=row < M, other=0)
            dx = scaled * w - x * a
            if ds_ptr is not None:
                dx += tl.load(ds_ptr + at, mask=mask, other=0).to(acc)
            tl.store(dx_ptr + at, dx, mask=mask)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if partial_ptr is not None:
        at = partial_ptr + tl.cast(group, tl.int64) * N
        tl.store(at + col, dw, mask=col < N)


# %%
# Both ways end with the kernel that adds up the partial rows.


@triton.jit
def _sum_rows(
    partial_ptr,  # (P, N)
    dw_ptr,  # (N,)
    P, N: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,  # of a step
    PDL: tl.constexpr,
):  # fmt: skip
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)[None, :]
    dw = tl.zeros([ROWS, COLS], partial_ptr.dtype.element_ty)
    if PDL:
        tl.extra.cuda.gdc_wait()
    for start in range(0, P, ROWS):
        row = start + tl.arange(0, ROWS)[:, None]
        mask = (row < P) & (col < N)
        at = partial_ptr + tl.cast(row, tl.int64) * N + col
        dw += tl.load(at, mask=mask, other=0)
    tl.store(dw_ptr + col, tl.sum(dw, 0, keep_dims=True), mask=col < N)


# %%
# Which plan for which width
# --------------------------
#
# Every tile in flight is a buffer in shared memory.
# A Hopper multiprocessor has 227 KB of it: two rows of 16384 columns of
# ``x``, ``dy`` and ``ds``.
# Without a GPU the rule assumes the 64 KB that every GPU has.

GPU = torch.cuda.get_device_properties(0) if ON_GPU else None
NUM_SMS = getattr(GPU, "multi_processor_count", 4)
SHARED = getattr(GPU, "shared_memory_per_block_optin", 65536)


def plan_backward(N, itemsize, matrices):
    """Name of the kernel and its options, for rows of N elements.

    matrices is 3 if ds is read beside x and dy, else 2.
    """
    n = N * itemsize // 2
    if n > 16384:
        chunk = 4096 // itemsize
        return "slices", {
            "ROWS": 2, "CHUNK": chunk, "num_warps": 8, "per_sm": 2
        }  # fmt: skip
    rows, warps = 1, 4 if n <= 4096 else 8
    chunk = 512 * warps // itemsize
    if n <= 1024:
        chunk = triton.next_power_of_2(N)
        rows = max(min(8192 // itemsize // chunk, 8), 1)
    elif n <= 1536:
        rows = 2
    per_sm = 2 if 1024 < n <= 4096 else 1
    size = matrices * rows * triton.cdiv(N, chunk) * chunk * itemsize
    buffers = (SHARED - 2048) // per_sm // size
    return "rows", {
        "ROWS": rows, "CHUNK": chunk, "num_warps": warps, "per_sm": per_sm,
        "STAGES": 1 + min(buffers, 3), "HIDE": n > 12288, "EARLY": n <= 2048,
    }  # fmt: skip


# %%
# How many programs?
# 4096 rows on 132 multiprocessors are 32 rounds, and the last of them has
# work for 4 programs only.
# 128 programs need 32 rounds as well, and leave fewer partial rows to add up.
# So the rule is: the fewest programs that need no more rounds.


def programs(tiles, room):
    rounds = triton.cdiv(tiles, room)
    return triton.cdiv(tiles, rounds)


print(programs(4096, 132), programs(4096, 264), programs(3, 132))

# %%
# From the Hopper GPUs on the last kernel is launched early.
# ``torch.compile`` does not know that option.

PDL = (
    ON_GPU
    and torch.version.hip is None
    and torch.cuda.get_device_capability() >= (9, 0)
)


def backward(dy, ds, x, w, rstd, dx, dw, offset=0.0, plan=None):
    """Fill dx and dw; each may be None. x is what was normalized."""
    M = rstd.numel()
    if M == 0:  # the sum of no rows
        return dw if dw is None else dw.zero_()
    N = x.numel() // M
    kind, options = plan or plan_backward(N, x.itemsize, 2 + (ds is not None))
    options = dict(options)
    tiles = triton.cdiv(M, options["ROWS"])
    slices = 1 if kind == "rows" else triton.cdiv(N, options["CHUNK"])
    groups = programs(tiles, max(NUM_SMS * options.pop("per_sm") // slices, 1))
    partial = None
    if dw is not None:
        partial = torch.empty(groups, N, dtype=rstd.dtype, device=x.device)
    pdl = PDL and dw is not None and not torch.compiler.is_compiling()
    given = dy, ds, x, w, rstd, dx
    if kind == "rows":
        _rms_norm_bwd_rows[(groups,)](
            *given, partial, 0, M, offset, N,
            EVEN=M % options["ROWS"] == 0, PDL=pdl, **options,
        )  # fmt: skip
    else:
        sums = torch.empty_like(rstd)
        if dx is not None:
            _rms_norm_bwd_sums[(M,)](
                dy, x, w, rstd, sums, offset, N, CHUNK=4096, num_warps=8
            )
        _rms_norm_bwd_slices[(groups * slices,)](
            *given, sums, partial, M, offset, N, PDL=pdl, **options
        )
    if dw is not None:
        sum_rows(partial, dw, pdl)


# %%


def sum_rows(partial, dw, pdl):
    """Launch the last kernel, early where the GPU can."""
    P, N = partial.shape
    rows = min(triton.next_power_of_2(P), 256)
    early = {"launch_pdl": True} if pdl else {}
    _sum_rows[(triton.cdiv(N, 16),)](
        partial, dw, P, N, ROWS=rows, COLS=16, PDL=pdl, **early
    )


# %%
# A function to train with
# ------------------------
#
# One ``Function`` serves both uses.
#
# * Where a tensor is contiguous nothing is copied, and nothing is reshaped.
# * What is kept for the backward pass is ``s``, not ``x`` and the residual:
#   it is a result anyway, so it costs no memory of its own.
# * If nobody used ``s``, or nobody used ``y``, its gradient is ``None``, and
#   the kernel does not read a matrix of zeros.


class RMSNorm(torch.autograd.Function):
    """The kernels, for contiguous copies of any tensors."""

    @staticmethod
    def forward(ctx, x, residual, weight, N, eps, offset):
        x = x.contiguous()
        residual = None if residual is None else residual.contiguous()
        w = None if weight is None else weight.contiguous()
        y, s, rstd = forward(x, residual, w, N, eps, offset)
        ctx.save_for_backward(s, w, rstd)
        ctx.offset = offset
        ctx.set_materialize_grads(False)
        return y if residual is None else (y, s)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy, ds=None):
        x, w, rstd = ctx.saved_tensors
        for_x, for_residual, for_w = ctx.needs_input_grad[:3]
        if dy is None:  # only s was used: a plain addition
            dx, dw = ds, None
        else:
            dy = dy.contiguous()
            ds = None if ds is None else ds.contiguous()
            dx = torch.empty_like(x) if for_x or for_residual else None
            dw = torch.empty_like(w) if for_w else None
            backward(dy, ds, x, w, rstd, dx, dw, ctx.offset)
        return (
            dx if for_x else None, dx if for_residual else None,
            dw, None, None, None,
        )  # fmt: skip


# %%
# These are the two functions of this page.
# Without a weight the factor is 1, whatever the offset.


def rms_norm(x, normalized_shape, weight, eps=1e-6, offset=0.0):
    """Divide x by its root mean square over its last dimensions, and multiply
    by offset + weight; weight may be None."""
    N = _check(x, None, normalized_shape, weight, eps, offset)
    offset = 0.0 if weight is None else float(offset)
    return RMSNorm.apply(x, None, weight, N, float(eps), offset)


def add_rms_norm(x, residual, normalized_shape, weight, eps=1e-6, offset=0.0):
    """The pair y, s: s = x + residual, and y = rms_norm(s)."""
    if residual is None:
        raise TypeError("residual is None: rms_norm needs none")
    N = _check(x, residual, normalized_shape, weight, eps, offset)
    offset = 0.0 if weight is None else float(offset)
    return RMSNorm.apply(x, residual, weight, N, float(eps), offset)


# %%
# A mistake in the arguments deserves a message that names the argument.

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _check(x, residual, normalized_shape, weight, eps, offset):
    if isinstance(normalized_shape, int):
        normalized_shape = (normalized_shape,)
    shape = torch.Size(normalized_shape)
    names = ("x", x), ("residual", residual), ("weight", weight)
    for name, tensor in names:
        if name != "x" and tensor is None:
            continue
        if tensor.dtype not in FLOATS:
            raise TypeError(f"{name} has {tensor.dtype}, which is no float")
        if tensor.device.type != DEVICE.type or tensor.device != x.device:
            raise ValueError(
                f"{name} is on {tensor.device}; x, residual and weight must "
                f"be on one {DEVICE.type} device"
            )
    if x.is_cuda and x.get_device() != torch.cuda.current_device():
        raise ValueError(f"x is on {x.device}: make it the current device")
    if shape.numel() == 0 or x.shape[-len(shape) :] != shape:
        raise ValueError(
            f"x has shape {tuple(x.shape)}, which does not end in "
            f"normalized_shape {tuple(shape)}"
        )
    if residual is not None and residual.shape != x.shape:
        raise ValueError(f"residual does not have shape {tuple(x.shape)}")
    if residual is not None and residual.dtype != x.dtype:
        raise TypeError(f"residual has {residual.dtype}, but x has {x.dtype}")
    if weight is not None and weight.shape != shape:
        raise ValueError(f"weight does not have shape {tuple(shape)}")
    if not eps >= 0:
        raise ValueError(f"eps is {eps}, but must not be negative")
    if not abs(offset) < float("inf"):
        raise ValueError(f"offset is {offset}, but must be finite")
    return shape.numel()


# %%
# How wrong is it?
# ----------------
#
# Both functions, and PyTorch's, are compared with float64, as on the first
# page.
# The tolerance is again half a unit in the last place for 16 bits.
# The result ``y`` of the fused function is rounded twice, once in ``s``; half
# a unit still holds for the norm of a whole tensor.


def torch_add_rms_norm(x, residual, shape, weight, eps=1e-6):
    """The same in two steps."""
    s = x + residual
    return F.rms_norm(s, shape, weight, eps), s


def inputs(M, N, dtype):
    """x, residual, w, dy and ds."""
    torch.manual_seed(0)
    x, residual = 0.5 + torch.randn(2, M, N, device=DEVICE)
    w = torch.rand(N, device=DEVICE)
    dy, ds = 0.1 * torch.randn(2, M, N, device=DEVICE)
    leaves = [t.to(dtype).requires_grad_() for t in (x, residual, w)]
    return *leaves, dy.to(dtype), ds.to(dtype)


def results(function, x, w, dy):
    """y, dx and dw of a function called like rms_norm."""
    y = function(x, x.shape[-1:], w, 1e-6)
    return y, *torch.autograd.grad(y, (x, w), dy)


def add_results(function, x, residual, w, dy, ds):
    """y, s, dx and dw of a function called like add_rms_norm."""
    y, s = function(x, residual, x.shape[-1:], w, 1e-6)
    return y, s, *torch.autograd.grad((y, s), (x, w), (dy, ds))


# %%


def errors(norm, add_norm, M, N, dtype):
    """Relative errors against float64: y, dx, dw, then y, s, dx, dw."""
    given = inputs(M, N, dtype)
    wide = [t.detach().double().requires_grad_() for t in given]
    x, _, w, dy, _ = range(5)
    pairs = [
        *zip(
            results(norm, given[x], given[w], given[dy]),
            results(F.rms_norm, wide[x], wide[w], wide[dy]),
            strict=True,
        ),
        *zip(
            add_results(add_norm, *given),
            add_results(torch_add_rms_norm, *wide),
            strict=True,
        ),
    ]
    return [((a - b).norm() / b.norm()).item() for a, b in pairs]


OURS, THEIRS = (rms_norm, add_rms_norm), (F.rms_norm, torch_add_rms_norm)
NAMES = ("y", "dx", "dw", "fused y", "s", "fused dx", "fused dw")
print(*NAMES, sep=", ")
for dtype in torch.float16, torch.bfloat16, torch.float32:
    print(f"{dtype}, half a unit: {torch.finfo(dtype).eps / 2:.1e}")
    for name, pair in ("ours", OURS), ("PyTorch", THEIRS):
        found = errors(*pair, M, N, dtype)
        print(f"  {name:8}", *(f"{e:.1e}" for e in found))

# %%


def tolerance(dtype):
    half_unit = torch.finfo(dtype).eps / 2
    if dtype in (torch.float32, torch.float64):
        return 16 * half_unit
    if dtype == torch.bfloat16 and not ON_GPU:
        return 2 * half_unit  # the interpreter cuts bfloat16, not rounds it
    return half_unit


def test_rms_norm(M, N, dtype):
    found = errors(rms_norm, add_rms_norm, M, N, dtype)
    for name, error in zip(NAMES, found, strict=True):
        assert error <= tolerance(dtype), f"{name}: {error:.1e}"


for dtype in torch.float16, torch.bfloat16, torch.float32:
    test_rms_norm(M, N, dtype)
print(f"passed at {M} x {N}")

# %%
# Such a small matrix uses two of the four kernels.
# So the plans for wide rows are forced here, with chunks so small that a row
# has several of them, the last one not full.

WIDE = (
    ("sweeps", {"CHUNK": 64, "num_warps": 4}),
    ("slices", {"ROWS": 2, "CHUNK": 64, "num_warps": 4, "per_sm": 4}),
)


def planned(plans, x, residual, w, dy, ds):
    """y, s, dx and dw by a pair of plans; None: those of the rule."""
    first, second = plans
    y, s, rstd = forward(x, residual, w, w.numel(), 1e-6, 0.0, first)
    dx, dw = torch.empty_like(x), torch.empty_like(w)
    backward(dy, ds, s, w, rstd, dx, dw, 0.0, second)
    return y, s, dx, dw


given = inputs(M, N, torch.float16)
wide = [t.detach().double().requires_grad_() for t in given]
expected = add_results(torch_add_rms_norm, *wide)
for plans in (None, None), WIDE:
    got = planned(plans, *(t.detach() for t in given))
    found = [
        ((a - b).norm() / b.norm()).item()
        for a, b in zip(got, expected, strict=True)
    ]
    print(*(f"{e:.1e}" for e in found))
    assert max(found) <= tolerance(torch.float16)

# %%
# Where to round
# --------------
#
# There are two orders of the last two steps, and both are in use.
#
# * Llama rounds :math:`\hat{x}` to 16 bits and then multiplies by ``w``, which
#   rounds again.
# * Gemma multiplies in float32 and rounds once.
#
# Which one does PyTorch follow, and what does the second rounding cost?

x = torch.randn(64, 4096, generator=torch.Generator().manual_seed(0))
w = torch.rand(4096, generator=torch.Generator().manual_seed(1))
x, w = x.bfloat16().to(DEVICE), w.bfloat16().to(DEVICE)
exact = F.rms_norm(x.double(), (4096,), w.double(), 1e-6)
x_hat = F.rms_norm(x.float(), (4096,), None, 1e-6)
orders = {
    "multiply after rounding": x_hat.bfloat16() * w,
    "multiply before rounding": (x_hat * w.float()).bfloat16(),
    "PyTorch": F.rms_norm(x, (4096,), w, 1e-6),
}
for name, y in orders.items():
    error = ((y - exact).norm() / exact.norm()).item()
    same = (y == orders["PyTorch"]).double().mean().item()
    print(f"{name:25} error {error:.1e}, {same:4.0%} as PyTorch")

# %%
# This page rounds once.
# The kernels compute everything between load and store in float32, so the
# better order costs nothing.
#
# A weight near zero
# ------------------
#
# A weight of 1 changes nothing, so 1 is where training starts.
# Gemma stores not the factor but its distance from 1: ``offset = 1`` in these
# kernels, and a weight that starts at 0.
# On paper that is the same model.
# Two things change in training.
#
# **Steps in 16 bits.**
# Just below 1 the numbers of bfloat16 are 1/256 apart, and a smaller step
# may round to nothing.
# Near 0 they lie as close as anybody needs.
# Here are 100 steps of 0.001:

factor = torch.ones((), dtype=torch.bfloat16)
distance = torch.zeros((), dtype=torch.bfloat16)
for _ in range(100):
    factor -= 0.001
    distance -= 0.001
print("stored as factor:  ", factor.item())
print("stored as distance:", 1 + distance.item())

# %%
# **Weight decay.**
# It multiplies every weight by a number just below 1 in each step.
# That pulls a stored factor to 0, and the layer with it.
# It pulls a stored distance to 0 as well, but then the factor goes to 1.

decay = (1 - 0.01) ** 500
print(f"a factor of 1.5 after 500 steps of decay: {1.5 * decay:.2f}")
print(f"stored as distance from 1: {1 + 0.5 * decay:.2f}")

# %%
# The sum ``1 + w`` must not be rounded to 16 bits, or the close numbers near
# 0 were in vain.
# The kernels add in float32, forward and backward:


def offset_errors(function, w):
    """Relative errors of y, dx and dw with the factor 1 + w."""
    x, _, _, dy, _ = inputs(M, N, torch.float16)
    w = w.clone().requires_grad_()
    y = function(x, w)
    found = y, *torch.autograd.grad(y, (x, w), dy)
    x, w = (t.detach().double().requires_grad_() for t in (x, w))
    y = F.rms_norm(x, (N,), 1 + w, 1e-6)
    exact = y, *torch.autograd.grad(y, (x, w), dy.double())
    pairs = zip(found, exact, strict=True)
    return [((a - b).norm() / b.norm()).item() for a, b in pairs]


w = (0.01 * torch.randn(N, device=DEVICE)).half()
ways = {
    "1 + w in float16": lambda x, w: F.rms_norm(x, (N,), 1 + w, 1e-6),
    "offset in the kernel": lambda x, w: rms_norm(x, (N,), w, offset=1.0),
}
for name, function in ways.items():
    found = offset_errors(function, w)
    print(f"{name:20}", *(f"{e:.1e}" for e in found))
assert max(found) <= tolerance(torch.float16)

# %%
# The columns are ``y``, ``dx`` and ``dw``.
#
# Benchmark
# ---------
#
# The clock is that of the first page: device time from a CUDA graph, with an
# empty L2 cache.


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
            graph.replay, warmup=10, rep=40, quantiles=[0.5, 0.2, 0.8]
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
# The table is judged by code, as on the first page.


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
# The widths are the hidden sizes of published models:

HIDDEN = {
    2048: "Llama 3.2 1B",
    2560: "Qwen3 4B",
    3072: "Llama 3.2 3B",
    3584: "Qwen2.5 7B",
    4096: "Llama 3 8B",
    5120: "Qwen2.5 32B",
    7168: "DeepSeek V3",
    8192: "Llama 3 70B",
    12288: "Mistral Large 2",
    16384: "Llama 3.1 405B",
}

# %%
# The ceiling does nothing but move the same bytes.
# For the normalization alone PyTorch has such operations: a copy forward, and
# backward an addition, which reads two matrices and writes one.
# For the fused passes this kernel is the ceiling.
# Forward it reads two matrices and writes two, backward it reads three and
# writes one.


@triton.jit
def _move_four(
    a_ptr, b_ptr, c_ptr, d_ptr, size,
    WRITES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    start = tl.cast(tl.program_id(0), tl.int64) * BLOCK
    at = start + tl.arange(0, BLOCK)
    total = tl.load(a_ptr + at, mask=at < size)
    total += tl.load(b_ptr + at, mask=at < size)
    if WRITES == 2:
        tl.store(c_ptr + at, total, mask=at < size)
    else:
        total += tl.load(c_ptr + at, mask=at < size)
    tl.store(d_ptr + at, total, mask=at < size)


def ceiling(mode, fused, x, residual, dy, out):
    """A call that moves the bytes of a pass."""
    x, residual = x.detach(), residual.detach()
    grid = (triton.cdiv(x.numel(), 4096),)
    if fused:
        writes = 2 if mode == "forward" else 1
        return lambda: _move_four[grid](
            x, residual, dy, out, x.numel(), writes, 4096, num_warps=8
        )
    if mode == "forward":
        return lambda: out.copy_(x)
    return lambda: torch.add(x, dy, out=out)


# %%
# The other implementations, Liger and quack where they are installed.
# In the figures of the fused function, "Two steps" is an addition and then
# ``rms_norm`` of this page.


def lines(fused):
    """Provider keys and their names in the figures."""
    names = {"triton": "Triton"}
    if fused:
        names["steps"] = "Two steps"
    names |= {"torch": "PyTorch", "torch.compile": "torch.compile"}
    for package, name in ("liger_kernel", "Liger"), ("quack", "quack"):
        if importlib.util.find_spec(package):
            names[name.lower()] = name
    return names | {"copy": "Copy"}


def compiled(function):
    """The function after torch.compile, for one size."""
    import torch._functorch.config as config

    config.donated_buffer = False  # the backward pass runs many times
    torch._dynamo.reset()  # nothing is left of other sizes
    return torch.compile(function, dynamic=False)


def norm_of(provider):
    """A function called like rms_norm."""
    if provider == "torch.compile":
        return compiled(lambda *a: F.rms_norm(*a))
    if provider == "liger":
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction

        # The last argument: dx shall not overwrite dy, which is used again.
        return lambda x, _, w, eps: LigerRMSNormFunction.apply(
            x, w, eps, 0.0, "llama", False
        )
    if provider == "quack":
        from quack.rmsnorm import rmsnorm

        return lambda x, _, w, eps: rmsnorm(x, w, eps=eps)
    return rms_norm if provider == "triton" else F.rms_norm


# %%


def two_steps(x, residual, shape, weight, eps=1e-6):
    s = x + residual
    return rms_norm(s, shape, weight, eps), s


def add_norm_of(provider):
    """A function called like add_rms_norm."""
    if provider == "torch.compile":
        return compiled(lambda *a: torch_add_rms_norm(*a))
    if provider == "liger":
        from liger_kernel.ops import fused_add_rms_norm as liger

        function = liger.LigerFusedAddRMSNormFunction
        return lambda x, r, _, w, eps: function.apply(
            x, r, w, eps, 0.0, "llama", False
        )
    if provider == "quack":
        from quack.rmsnorm import rmsnorm

        return lambda x, r, _, w, eps: rmsnorm(
            x, w, residual=r, eps=eps, prenorm=True
        )
    ours = {"triton": add_rms_norm, "steps": two_steps}
    return ours.get(provider, torch_add_rms_norm)


# %%


def measure(M, N, dtype, mode, fused, provider):
    """Device time of one pass, from a CUDA graph replayed with an empty L2
    cache; median, 20 % and 80 % quantiles."""

    def prepare():
        x, residual, w, dy, ds = inputs(M, N, dtype)
        if provider == "copy":
            return ceiling(mode, fused, x, residual, dy, ds)
        if fused:
            f, given, more = add_norm_of(provider), (x, residual), (dy, ds)
        else:
            f, given, more = norm_of(provider), (x,), dy
        if mode == "forward":
            return lambda: f(*given, (N,), w, 1e-6)
        y = f(*given, (N,), w, 1e-6)
        return lambda: torch.autograd.grad(
            y, (*given, w), more, retain_graph=True
        )

    ms, fast, slow = device_time(prepare)
    matrices = 4 if fused else 2 if mode == "forward" else 3
    moved = matrices * M * N * dtype.itemsize
    return [moved / t * 1e-6 for t in (ms, slow, fast)]


def speed(mode, fused=False):
    """The benchmark of one pass."""
    names = lines(fused)
    benchmark = triton.testing.Benchmark(
        x_names=["N"],
        x_vals=list(HIDDEN),
        line_arg="provider",
        line_vals=list(names),
        line_names=list(names.values()),
        ylabel="GB/s",
        plot_name=f"{'add-' * fused}rms-norm-{mode}",
        args={"M": 4096, "dtype": torch.bfloat16}
        | {"mode": mode, "fused": fused},
    )
    return triton.testing.perf_report(benchmark)(measure)


# %%
# Forward:

table = run(speed("forward"))

# %%
claims(table)

# %%
# Backward:

table = run(speed("backward"))

# %%
claims(table)

# %%
# With the addition, forward.
# Two steps move five matrices, the fused kernel four.
# Does the time follow the count?


def saved(table, count):
    """Print time in two steps over time fused, and the same of the bytes."""
    if table is not None:
        ratio = table["Triton (GB/s)"] / table["Two steps (GB/s)"]
        print(
            f"two steps: {count:.2f} times the bytes, {ratio.median():.2f} "
            f"times the time (median of {len(ratio)} widths)"
        )


table = run(speed("forward", fused=True))

# %%
claims(table)
saved(table, 5 / 4)

# %%
# With the addition, backward.
# In two steps autograd adds ``ds`` to the gradient that the normalization has
# just written: three matrices for each, six together, against four.

table = run(speed("backward", fused=True))

# %%
claims(table)
saved(table, 6 / 4)

# %%
# What the figures say
# --------------------
#
# * Forward moves the same bytes as layer normalization, so it takes the same
#   time: what RMS normalization saves is arithmetic, and memory sets the
#   pace.
# * Backward saves registers: no ``db``, and no second sum.
#   That is why rows of up to 16384 columns stay in one program here.
# * The distance to the ceiling in backward is the last kernel, the writing of
#   the partial rows, and the start and the end of the programs.
#   It is the larger, the narrower the rows.
#
# All this is device time.
# For narrow rows the host needs longer to start the kernels than the kernels
# run, as the first page shows; a CUDA graph of the whole training step takes
# that away.
#
# The errors at full size, against float64, for ours and for PyTorch:

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["case"],
        x_vals=[f"{dtype} {out}" for dtype in DTYPES for out in NAMES],
        line_arg="provider",
        line_vals=["triton", "torch"],
        line_names=["Triton", "PyTorch"],
        ylabel="relative error",
        y_log=True,
        plot_name="rms-norm-error",
        args={"M": 4096, "N": 8192},
    )
)
def measure_error(M, N, case, provider):
    """Norm of the difference from a float64 result, divided by the norm of
    that result."""
    if not ON_GPU:
        raise NoGPU
    dtype, out = case.split(maxsplit=1)
    pair = OURS if provider == "triton" else THEIRS
    error = errors(*pair, M, N, DTYPES[dtype])[NAMES.index(out)]
    return error, error, error


table = run(measure_error)

# %%
# What can go wrong
# -----------------
#
# Each of these mistakes is made here once, next to the right way.
#
# **Squares in 16 bits.**
# The largest number of float16 is 65504, so the square of 256 is infinite.
# Divided by the root of infinity, the whole row becomes 0.

x = torch.tensor([300.0, 1.0, -2.0, 3.0], dtype=torch.float16)
for name, row in ("wrong", x), ("right", x.float()):
    y = row * torch.rsqrt((row * row).mean() + 1e-6)
    print(f"{name}: {y.tolist()}")

# %%
# **Epsilon outside of the root.**
# Inside, the factor of a row can be 1000 at most for :math:`\epsilon` =
# 1e-6.
# Outside it can be a million, and a row of noise fills the next layer.

row = 1e-6 * torch.tensor([1.0, -2.0, 3.0, -1.0])
rms = row.square().mean().sqrt()
print("wrong:", (row / (rms + 1e-6)).abs().max().item())
print("right:", (row * torch.rsqrt(rms**2 + 1e-6)).abs().max().item())

# %%
# **The gradient of the residual stream forgotten.**
# ``s`` is a result too.
# Without ``ds`` the layers before this one learn from this block alone, and
# the loss still goes down, only slower.

given = inputs(4, 64, torch.float32)
_, _, exact, _ = add_results(torch_add_rms_norm, *given)
_, exact_alone, _ = results(
    F.rms_norm, (given[0] + given[1]).detach().requires_grad_(), *given[2:4]
)
_, _, ours, _ = add_results(add_rms_norm, *given)
for name, dx in ("wrong", exact_alone), ("right", ours):
    error = ((dx - exact).norm() / exact.norm()).item()
    print(f"{name}: relative error of dx {error:.1e}")

# %%
# **Normalize the sum before it is rounded.**
# The kernel has ``x + residual`` in float32 and could go on with that.
# Then ``y`` belongs to another ``s`` than the one that is returned, and the
# same layer gives other bits when it is not fused.

torch.manual_seed(0)
x, residual = torch.randn(2, 64, 256).bfloat16()
s = x + residual
y = F.rms_norm(s, (256,), eps=1e-6)
for name, row in ("wrong", x.float() + residual.float()), ("right", s.float()):
    other = F.rms_norm(row, (256,), eps=1e-6).bfloat16()
    print(f"{name}: {(other != y).double().mean():.0%} of y differs")

# %%
# **Write dx over dy.**
# It saves memory, and some libraries do it.
# But autograd may hand the same ``dy`` to two functions, as the derivative of
# an addition does.
# The second one then reads what the first one has written.

seen = []
first, second = (torch.randn(2, 8, device=DEVICE) for _ in range(2))
pair = [rms_norm(t.requires_grad_(), (8,), None) for t in (first, second)]
for y in pair:
    y.register_hook(lambda dy: seen.append(dy.data_ptr()))
sum(pair).backward(torch.randn(2, 8, device=DEVICE))
print("wrong: one dy for both:", seen[0] == seen[1])
print("right: dx of its own:", first.grad.data_ptr() not in seen)

# %%
# Exercises
# ---------
#
# Each stub runs as it is, and ``check`` tells which rows are wrong.


def check(got, expected):
    """Say which rows are wrong."""
    wrong = ~torch.isclose(got, expected, rtol=1e-3, atol=1e-4)
    bad = wrong.flatten(0, -2).any(dim=1).nonzero().flatten().tolist()
    print("all right" if not bad else f"wrong rows: {bad}")
    return not bad


x, _, w, dy, _ = inputs(5, 24, torch.float32)
_, dx, _ = results(F.rms_norm, x, w, dy)
x, w = x.detach(), w.detach()

# %%
# **Exercise 1: find the error.**
# This ``dx`` is wrong in one place.
# The printed products of ``dx`` with its row say so without a reference.
# Which factor is missing?

rstd = (x.square().mean(dim=1, keepdim=True) + 1e-6) ** -0.5


def formula(x, wdy, rstd):
    c = (x * rstd * wdy).mean(dim=1, keepdim=True)
    return (wdy - x * c) * rstd


def exercise_1(formula):
    got = formula(x, w * dy, rstd)
    products = (got * x).sum(dim=1).tolist()
    print("products with the row:", *(f"{v:.1e}" for v in products))
    return check(got, dx)


exercise_1(formula)

# %%

# Solution 1


def formula_1(x, wdy, rstd):
    # What is subtracted is the part of wdy along x_hat, not along x.
    x_hat = x * rstd
    c = (x_hat * wdy).mean(dim=1, keepdim=True)
    return (wdy - x_hat * c) * rstd


assert exercise_1(formula_1)

# %%
# **Exercise 2: one norm for each head.**
# Some models also normalize the queries and keys of their attention, each
# head alone: a tensor of shape (tokens, heads, 24) and one weight of 24.
# After a projection the heads lie side by side, but queries, keys and values
# are parts of one wider row, so the rows of ``q`` are ``STRIDE`` apart.
# Let one program normalize all heads of a token, in a tile.
# The stub normalizes over all heads together.


@triton.jit
def _heads(
    q_ptr, w_ptr, y_ptr, eps, STRIDE: tl.constexpr,
    HEADS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    head = tl.arange(0, HEADS)[:, None]
    col = tl.arange(0, BLOCK)[None, :]
    at = head * D + col
    mask = (col < D) & (head >= 0)
    q = tl.load(q_ptr + token * STRIDE + at, mask=mask, other=0)
    rstd = tl.rsqrt(tl.sum(q * q) / (HEADS * D) + eps)  # to do
    y = q * rstd * tl.load(w_ptr + col, mask=col < D, other=0)
    tl.store(y_ptr + token * HEADS * D + at, y, mask=mask)


def exercise_2(kernel):
    torch.manual_seed(0)
    qkv = torch.randn(3, 3 * 4 * 24, device=DEVICE)
    q = qkv[:, : 4 * 24].view(3, 4, 24)
    y = torch.zeros(3, 4, 24, device=DEVICE)
    kernel[(3,)](q, w, y, 1e-6, 3 * 4 * 24, HEADS=4, D=24, BLOCK=32)
    return check(y, F.rms_norm(q, (24,), w, 1e-6))


exercise_2(_heads)

# %%

# Solution 2


@triton.jit
def _heads_2(
    q_ptr, w_ptr, y_ptr, eps, STRIDE: tl.constexpr,
    HEADS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    head = tl.arange(0, HEADS)[:, None]
    col = tl.arange(0, BLOCK)[None, :]
    at = head * D + col
    mask = (col < D) & (head >= 0)
    q = tl.load(q_ptr + token * STRIDE + at, mask=mask, other=0)
    # A sum along the columns of the tile: one number for each head.
    rstd = tl.rsqrt(tl.sum(q * q, 1)[:, None] / D + eps)
    y = q * rstd * tl.load(w_ptr + col, mask=col < D, other=0)
    tl.store(y_ptr + token * HEADS * D + at, y, mask=mask)


assert exercise_2(_heads_2)

# %%
# **Exercise 3: a residual stream in float32.**
# Many layers add small numbers to one stream.
# In 16 bits a small addition may round to nothing, so some models keep the
# stream in float32, and only ``x`` and ``y`` in 16 bits.
# The stub rounds the sum to the type of ``x``.
# Where must the type come from, and how many bytes does a number of each
# matrix now move?


@triton.jit
def _stream(x_ptr, s_ptr, y_ptr, eps, N: tl.constexpr, BLOCK: tl.constexpr):
    col = tl.arange(0, BLOCK)
    at = tl.program_id(0) * N + col
    x = tl.load(x_ptr + at, mask=col < N, other=0)
    s = tl.load(s_ptr + at, mask=col < N, other=0)  # the residual
    s = (x.to(tl.float32) + s.to(tl.float32)).to(x.dtype)  # to do
    tl.store(s_ptr + at, s, mask=col < N)  # is replaced by the sum
    s = s.to(tl.float32)
    y = s * tl.rsqrt(tl.sum(s * s) / N + eps)
    tl.store(y_ptr + at, y, mask=col < N)


def exercise_3(kernel):
    s = torch.full((2, 24), 100.0, device=DEVICE)
    x = torch.full((2, 24), 0.01, device=DEVICE).half()
    y = torch.empty_like(x)
    for _ in range(20):
        kernel[(2,)](x, s, y, 1e-6, N=24, BLOCK=32)
    return check(s, 100 + 20 * x.float())


exercise_3(_stream)

# %%

# Solution 3


@triton.jit
def _stream_3(x_ptr, s_ptr, y_ptr, eps, N: tl.constexpr, BLOCK: tl.constexpr):
    col = tl.arange(0, BLOCK)
    at = tl.program_id(0) * N + col
    x = tl.load(x_ptr + at, mask=col < N, other=0)
    s = tl.load(s_ptr + at, mask=col < N, other=0)
    # The type of the stream. In 16 bits four matrices were 8 bytes for each
    # number; now x and y are 2 each, and the stream is 4 twice: 12 bytes.
    s = (x.to(tl.float32) + s.to(tl.float32)).to(s_ptr.dtype.element_ty)
    tl.store(s_ptr + at, s, mask=col < N)
    s = s.to(tl.float32)
    y = s * tl.rsqrt(tl.sum(s * s) / N + eps)
    tl.store(y_ptr + at, y, mask=col < N)


assert exercise_3(_stream_3)

# %%
# References
# ----------
#
# * Biao Zhang and Rico Sennrich, `Root Mean Square Layer Normalization
#   <https://arxiv.org/abs/1910.07467>`_, 2019.
# * Hugo Touvron and others, `LLaMA: Open and Efficient Foundation Language
#   Models <https://arxiv.org/abs/2302.13971>`_, 2023.
# * Gemma Team, `Gemma: Open Models Based on Gemini Research and Technology
#   <https://arxiv.org/abs/2403.08295>`_, 2024; the `code
#   <https://github.com/google/gemma_pytorch>`_ has the offset and the order of
#   rounding.
# * PyTorch, `torch.nn.functional.rms_norm
#   <https://docs.pytorch.org/docs/stable/nn.functional.html>`_.
