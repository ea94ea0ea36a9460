r"""
Layer norm, fused with what comes before it
===========================================

Fuse a residual addition, dropout or an activation with the layer norm that
follows, forward and backward, so that nothing is written in between.

You will be able to:

* count what a fusion saves before any of it is written, and measure it after;
* return two results from one kernel, and join their two gradients in one;
* drop elements at random without ever storing which;
* hand a function to a kernel, with its derivative, as a constant;
* compute a variance in one pass and say what that costs in accuracy.

This page assumes the first page, which derives the gradients, the second,
which explains the persistent backward kernel and its sums, and the third,
which cuts rows into chunks.
Their kernels come back here and are not explained again.
Without a GPU everything here runs in Triton's interpreter, except the timing.

What is computed
----------------

A transformer is a chain of blocks around a *residual stream*.
Each block adds its result to the stream, and the next block reads the stream
through a layer norm.
So the end of one block and the start of the next are

.. math::

   s = \mathrm{dropout}(x) + residual, \qquad y = \mathrm{norm}(s) \cdot w + b

and both results are needed: ``y`` by the next block, ``s`` by the stream.
Another chain has an activation, such as SiLU, before the norm:

.. math::

   y = \mathrm{norm}(f(x)) \cdot w + b

An addition, a mask or an activation is a few instructions for each element.
What is slow is the road between two kernels: one writes a matrix, the other
reads it again.
"""

# %%
# Every page of this site starts with the same lines.

import os

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    # Triton's interpreter runs the same kernels on the CPU, slowly.
    os.environ["TRITON_INTERPRET"] = "1"

import triton
import triton.language as tl

DEVICE = torch.device("cuda" if ON_GPU else "cpu")
CUDA = ON_GPU and torch.version.hip is None

# %%
# The picture shows the forward pass of the first chain.
# Every arrow is a matrix that goes through memory.


def draw_chain():
    _, ax = plt.subplots(
        num="Three kernels with two matrices between them, and one kernel",
        figsize=(7.5, 3.2),
    )
    ax.set(xlim=(0, 15), ylim=(-0.2, 5.6))
    ax.axis("off")

    def kernel(x, y, width, text, color):
        ax.add_patch(
            plt.Rectangle((x, y), width, 1, fc=color, ec="black", alpha=0.6)
        )
        ax.text(x + width / 2, y + 0.5, text, ha="center", va="center")

    def arrow(start, end, text=""):
        style = {"arrowstyle": "->", "color": "black"}
        ax.annotate("", end, start, arrowprops=style)
        x, y = ((a + b) / 2 for a, b in zip(start, end, strict=True))
        ax.text(x, y + 0.15, text, ha="center")

    kernel(1.5, 3.5, 2.5, "dropout", "C0")
    kernel(5.5, 3.5, 2.5, "add", "C1")
    kernel(9.5, 3.5, 2.5, "layer norm", "C2")
    kernel(3.5, 0.5, 6.5, "dropout, add, layer norm", "C3")
    arrow((0.2, 4), (1.5, 4), "x")
    arrow((4, 4), (5.5, 4))
    arrow((5.2, 5.2), (6.2, 4.5), "residual")
    arrow((2.75, 3.5), (2.75, 2.6))
    ax.text(2.95, 2.75, "mask")
    arrow((8, 4), (9.5, 4), "s")
    arrow((12, 4), (13.3, 4), "y")
    arrow((2.2, 1.3), (3.5, 1.3), "x")
    arrow((2.2, 0.7), (3.5, 0.7), "residual")
    arrow((10, 1.3), (11.3, 1.3), "s")
    arrow((10, 0.7), (11.3, 0.7), "y")
    plt.show()


draw_chain()

# %%
# Count first
# -----------
#
# A *dispatch mode* sees every operator that PyTorch runs, forward and
# backward.
# We add up what each of them must read and write, in units of one matrix of
# the size and type of ``x``.
# The device ``meta`` has shapes and no numbers, so counting takes no time.


class Traffic(TorchDispatchMode):
    """Adds up the sizes of what operators read and write."""

    def __init__(self, unit):
        super().__init__()
        self.unit, self.lines = unit.numel() * unit.itemsize, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        read, written = memory(args), memory(out)
        # A view writes nothing: its result lies where its input lies.
        if written and not set(written) & set(read):
            size = sum(written.values()) + sum(read.values())
            self.lines.append((func.name(), size / self.unit))
        return out

    def total(self):
        return sum(units for _, units in self.lines)


def memory(value):
    """The memory of all tensors in tuples and lists, and its sizes."""
    if isinstance(value, torch.Tensor):
        storage = value.untyped_storage()
        return {storage._cdata: storage.nbytes()}
    found = {}
    if isinstance(value, (tuple, list)):
        for part in value:
            found |= memory(part)
    return found


# %%
# The chain as everybody writes it, and what it moves:


def add_chain(x, residual, shape, w, b, eps=1e-5, dropout_p=0.0, seed=None):
    if dropout_p > 0:  # what F.dropout calls on a GPU
        x = torch.native_dropout(x, dropout_p, True)[0]
    s = x + residual
    return F.layer_norm(s, shape, w, b, eps), s


def inputs(M, N, dtype, device=None):
    """x, residual, w, b that want gradients, then dy and ds."""
    torch.manual_seed(0)
    device = device or DEVICE
    x, dy, ds = torch.randn(3, M, N, device=device)
    residual = -2.3 + 0.5 * torch.randn(M, N, device=device)
    w, b = torch.rand(2, N, device=device)
    leaves = [t.to(dtype).requires_grad_() for t in (0.5 * x, residual, w, b)]
    return *leaves, (0.1 * dy).to(dtype), (0.1 * ds).to(dtype)


x, residual, w, b, dy, ds = inputs(4096, 8192, torch.float16, "meta")
for dropout_p in 0.0, 0.1:
    with Traffic(x) as traffic:
        y, s = add_chain(x, residual, (8192,), w, b, dropout_p=dropout_p)
        torch.autograd.grad((y, s), (x, residual, w, b), (dy, ds))
    print(f"dropout_p = {dropout_p}: {traffic.total():.1f} units")
    for name, units in traffic.lines:
        print(f"  {name:35} {units:.1f}")

# %%
# The second addition belongs to the backward pass: ``s`` is used twice, so it
# gets two gradients.
# A mask of booleans counts half a unit beside float16.
# An operator that reads its input twice moves more than this count.
#
# What must be moved, if nothing is written in between?
#
# * Forward reads ``x`` and ``residual`` and writes ``s`` and ``y``: 4 units.
# * Backward reads ``s``, ``dy`` and the gradient ``ds`` of the sum, and writes
#   one gradient for ``x`` and ``residual``: 4 units.
# * With dropout these two gradients differ: 5 units.

# %%
# Dropout without a mask
# ----------------------
#
# Dropout sets each element to 0 with probability :math:`p` and divides the
# others by :math:`1 - p`.
# The backward pass needs the same choice again.
# PyTorch stores it as a matrix of booleans; we compute it a second time.
#
# That works with a *counter-based* generator, here Philox: a function without
# state that turns a key and a counter into random bits.
# The key is the seed, and the counter says for which element the bits are.
#
# * One call of ``tl.philox`` gives four words of 32 bits, so four neighbors
#   share a call.
# * The counter is a pair: the group of four columns, and the row.
#   The position ``row * N + column`` would need 64 bits in a large matrix.
# * Nothing in it depends on how a kernel cuts a row, so all kernels make the
#   same mask.
#
# ``DROP`` is an integer: of ``2**32`` words, so many mean 0.
# It is a constant, so with ``DROP = 0`` nothing of this is compiled.


@triton.jit
def _dropout(
    x,  # (ROWS, CHUNK), chunk c of some rows
    seed,
    row,  # (ROWS, 1), 32-bit row numbers
    c,
    DROP: tl.constexpr,
):
    """x, dropped or scaled. Its own derivative, too: it is linear."""
    if DROP == 0:
        return x
    elif DROP == 2**32:
        return tl.zeros_like(x)
    else:
        QUADS: tl.constexpr = x.shape[1] // 4
        quad = tl.arange(0, QUADS)[None, :] + c * QUADS + row * 0
        r0, r1, r2, r3 = tl.philox(seed, quad, row + quad * 0, 0, 0)
        words = tl.join(tl.join(r0, r1), tl.join(r2, r3))
        words = tl.reshape(words, x.shape)
        scale: tl.constexpr = 2**32 / (2**32 - DROP)
        return tl.where(words >= DROP, x * scale, 0)


# %%
# A function as a constant
# ------------------------
#
# A ``@triton.jit`` function can be an argument of a kernel, if it is a
# ``tl.constexpr``: the compiler puts its instructions in place of the call.
# So one kernel serves every activation.
# Each function returns its value and its slope; what a pass does not use is
# not compiled.
#
# Memory is so fast that an activation must be short.
# ``tl.exp`` and ``/`` spend instructions on numbers that overflow or nearly
# vanish, where the result is 0 either way here.
# NVIDIA GPUs have one instruction for :math:`2^x` and one for :math:`1/x`.
# ``PTX`` says whether the code is compiled for one; it is a constant too.
#
# These two instructions are slow: a multiprocessor finishes 16 of them in a
# cycle, and 128 multiplications.
# So two numbers share one reciprocal:
# :math:`\frac{1}{a} = b \cdot \frac{1}{ab}` and
# :math:`\frac{1}{b} = a \cdot \frac{1}{ab}`.
# Numbers above :math:`2^{62}` count as :math:`2^{62}`, so that the product
# stays finite.
# NaN does too, so that it does not reach its neighbor.

PTX = tl.constexpr(CUDA)  # their assembly language


@triton.jit
def _exp(x):
    if PTX and x.dtype == tl.float32:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x * 1.4426950408889634],
            dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return tl.exp(x)


@triton.jit
def _inverse(x):
    """1 / x for x >= 1; in pairs, if each thread has two numbers or more."""
    if (
        PTX
        and x.dtype == tl.float32
        and x.numel >= 64 * tl.extra.cuda.num_warps()
    ):
        return tl.inline_asm_elementwise(
            """
            {
            .reg .f32 a, b, r;
            min.f32 a, $2, 0f5E800000;  // 2**62
            min.f32 b, $3, 0f5E800000;
            mul.f32 r, a, b;
            rcp.approx.ftz.f32 r, r;
            mul.f32 $0, b, r;
            mul.f32 $1, a, r;
            }
            """,
            "=f,=f,f,f", [x], dtype=tl.float32, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return 1 / x


# %%
# The reciprocal is never 0 then, and rarely exactly 1.
# Times a huge ``x`` that would show, so ``x`` stays between two bounds.
#
# * At -43, where :math:`e^{-x}` is :math:`2^{62}`, the functions below are
#   smaller than 1e-16, and they stay so.
# * Beyond ``highest`` their slopes are 1.
#   What is multiplied by a difference of nearly 0 must not grow any more.


@triton.jit
def _bounded(x, highest: tl.constexpr):
    """x, not below -43, where NaN stays NaN; and that, not above highest."""
    if PTX and x.dtype == tl.float32:
        x = tl.maximum(x, -43.0, propagate_nan=tl.PropagateNan.ALL)
        return x, tl.minimum(x, highest)
    else:
        return x, x


# %%
# GELU has two forms: ``gelu`` is exact, ``gelu_tanh`` is the approximation
# that many models were trained with.
# It is written with a sigmoid, because
# :math:`\frac{1}{2}(1 + \tanh u) = \mathrm{sigmoid}(2 u)`.
#
# The exact one needs the error function, which is long.
# Formula 7.1.26 of Abramowitz and Stegun replaces it: a polynomial times
# ``bell``, which the slope needs anyway.
# It is off by 1.5e-7 at most, which is as fine as float32 can be near 1.


@triton.jit
def _silu(x):
    x, near = _bounded(x, 20.0)
    sigmoid = _inverse(1 + _exp(-x))
    return x * sigmoid, sigmoid * (1 + near * (1 - sigmoid))


@triton.jit
def _gelu(x):
    bell = _exp(-0.5 * x * x)
    if x.dtype == tl.float64:
        below = 0.5 * (1 + tl.erf(x * 0.7071067811865476))  # 1 / sqrt(2)
    else:
        t = _inverse(1 + 0.23164189 * tl.abs(x))  # 0.3275911 / sqrt(2)
        tail = 0.5307027145 * t - 0.7265760135
        tail = (tail * t + 0.7107068705) * t - 0.142248368
        tail = (tail * t + 0.127414796) * t * bell
        below = tl.where(x < 0, tail, 1 - tail)
    return x * below, below + x * bell * 0.3989422804014327  # 1 / sqrt(2 pi)


@triton.jit
def _gelu_tanh(x):
    x, near = _bounded(x, 6.0)
    # 2 sqrt(2 / pi) (x + 0.044715 x**3), divided by x; and its derivative
    u = 1.5957691216057308 + 0.07135481627260025 * near * near
    du = 1.5957691216057308 + 0.21406444881780076 * near * near
    sigmoid = _inverse(1 + _exp(-near * u))
    return x * sigmoid, sigmoid * (1 + near * du * (1 - sigmoid))


ACTIVATIONS = {"silu": _silu, "gelu": _gelu, "gelu_tanh": _gelu_tanh}

# %%
# Forward
# -------
#
# The helpers are those of the third page: a row is a tuple of chunks in
# registers, and masks stand only where a lane can be outside.


@triton.jit
def _load(
    ptr,  # first element of the first row
    row,  # (ROWS, 1), counted from that row; or 0
    c,  # number of the chunk
    M,  # rows that exist
    N: tl.constexpr,
    CHUNK: tl.constexpr,
    EVEN: tl.constexpr,  # all rows of all tiles exist
):
    col = c * CHUNK + tl.arange(0, CHUNK)[None, :]
    if EVEN and (c + 1) * CHUNK <= N:
        return tl.load(ptr + row * N + col)
    else:
        mask = col < N if EVEN else (row < M) & (col < N)
        return tl.load(ptr + row * N + col, mask=mask, other=0)


@triton.jit
def _store(
    ptr, value, row, c, M,
    N: tl.constexpr, CHUNK: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    col = c * CHUNK + tl.arange(0, CHUNK)[None, :]
    if EVEN and (c + 1) * CHUNK <= N:
        tl.store(ptr + row * N + col, value)
    else:
        mask = col < N if EVEN else (row < M) & (col < N)
        tl.store(ptr + row * N + col, value, mask=mask)


# %%
# The elementwise stage leaves in registers what the chain would have written
# to memory.
#
# * The sum is rounded to the type of ``s`` before the statistics are
#   computed, so ``y`` is the layer norm of the ``s`` that is returned.
# * An activation is never returned, so it is never rounded either.
# * Lanes beyond the row hold 0, but :math:`f(0)` need not be 0.


@triton.jit
def _stage(
    x,  # chunk c of some rows
    r,  # that of the residual, or None
    seed, row, c, N: tl.constexpr, CHUNK: tl.constexpr,
    kind: tl.constexpr,  # type of s
    acc: tl.constexpr,  # type of all arithmetic
    ACT: tl.constexpr,  # a function that returns value and slope, or None
    DROP: tl.constexpr,
    TAIL: tl.constexpr,  # the chunk may end beyond the row
):  # fmt: skip
    """What is normalized."""
    if ACT is not None:
        x, _ = ACT(x.to(acc))
        if TAIL:
            x = tl.where(_column(c, CHUNK) < N, x, 0)
    if r is not None:
        x = _dropout(x.to(acc), seed, row, c, DROP) + r.to(acc)
        x = x.to(kind)
    return x


@triton.jit
def _column(c, CHUNK: tl.constexpr):
    return tl.arange(0, CHUNK)[None, :] + c * CHUNK


@triton.jit
def _value_of(seed, DROP: tl.constexpr):
    if DROP > 0 and seed.dtype.is_ptr():
        seed = tl.load(seed)
    return seed


# %%
# What stays from one turn of a loop to the next is packed, as on the third
# page: a number of 16 bits alone would take a whole register.


@triton.jit
def _pack(tile):
    if PTX and tile.dtype.primitive_bitwidth == 16:
        bits = tile.to(tl.uint16, bitcast=True)
        low, high = tl.split(
            tl.reshape(bits, [tile.shape[0], tile.shape[1] // 2, 2])
        )
        return low.to(tl.uint32) | (high.to(tl.uint32) << 16)
    else:
        return tile


@triton.jit
def _unpack(words, dtype: tl.constexpr):
    if PTX and dtype.primitive_bitwidth == 16:
        low = words.to(tl.uint16).to(dtype, bitcast=True)
        high = (words >> 16).to(tl.uint16).to(dtype, bitcast=True)
        pairs = tl.join(low, high)
        return tl.reshape(pairs, [words.shape[0], words.shape[1] * 2])
    else:
        return words


# %%
# All loads of a tile come before the first store: the compiler cannot know
# that ``s`` and ``x`` do not overlap, so it would not move a load up over a
# store.


@triton.jit
def _forward_tile(
    x_ptr, r_ptr, w_ptr, b_ptr, y_ptr, s_ptr, mean_ptr, rstd_ptr, seed,
    ws, bs,  # chunks of w and b, or empty: they are loaded last
    tile, M, eps: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr,
    CHUNK: tl.constexpr, EVEN: tl.constexpr, ACT: tl.constexpr,
    DROP: tl.constexpr,
):  # fmt: skip
    acc: tl.constexpr = mean_ptr.dtype.element_ty
    kind: tl.constexpr = y_ptr.dtype.element_ty
    CHUNKS: tl.constexpr = (N + CHUNK - 1) // CHUNK
    first = tl.cast(tile, tl.int64) * ROWS  # M * N may pass 2**31
    left, row = M - tile * ROWS, tl.arange(0, ROWS)[:, None]
    xs, rs, held = (), (), ()
    for c in tl.static_range(CHUNKS):
        xs += (_load(x_ptr + first * N, row, c, left, N, CHUNK, EVEN),)
        if r_ptr is not None:
            rs += (_load(r_ptr + first * N, row, c, left, N, CHUNK, EVEN),)
    for c in tl.static_range(CHUNKS):
        r = None if r_ptr is None else rs[c]
        a = _stage(
            xs[c], r, seed, row + tile * ROWS, c, N, CHUNK, kind, acc, ACT,
            DROP, (c + 1) * CHUNK > N,
        )  # fmt: skip
        if s_ptr is not None:
            _store(s_ptr + first * N, a, row, c, left, N, CHUNK, EVEN)
        held += (a,)
    mean, rstd = _statistics(held, eps, N, acc)
    tl.store(mean_ptr + first + row, mean, mask=row < left)
    tl.store(rstd_ptr + first + row, rstd, mask=row < left)
    for c in tl.static_range(CHUNKS):
        y = (held[c].to(acc) - mean) * rstd
        if len(ws) > 0:
            y = y * _unpack(ws[c], w_ptr.dtype.element_ty).to(acc)
            y = y + _unpack(bs[c], b_ptr.dtype.element_ty).to(acc)
        else:
            y = _affine(y, w_ptr, b_ptr, c, N)
        _store(y_ptr + first * N, y, row, c, left, N, CHUNK, EVEN)


# %%
# ``do_not_specialize``: for an integer that is 1, or a multiple of 16, Triton
# would compile another kernel, and a seed is another number in each call.


@triton.jit(do_not_specialize=["seed"])
def _fused_layer_norm_fwd(
    x_ptr,  # (M, N), contiguous, as all matrices here
    r_ptr,  # the residual, or None
    w_ptr, b_ptr,  # (N,) or None
    y_ptr,
    s_ptr,  # dropout(x) + residual, or None
    mean_ptr, rstd_ptr,  # (M,)
    seed,  # an integer, or a pointer to one
    M, eps: tl.constexpr, N: tl.constexpr,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, EVEN: tl.constexpr,  # the tile
    STAGES: tl.constexpr,  # tiles in flight; 1: a program for each tile
    ACT: tl.constexpr, DROP: tl.constexpr,
):  # fmt: skip
    CHUNKS: tl.constexpr = (N + CHUNK - 1) // CHUNK
    seed = _value_of(seed, DROP)
    ws, bs = (), ()
    if STAGES == 1:
        _forward_tile(
            x_ptr, r_ptr, w_ptr, b_ptr, y_ptr, s_ptr, mean_ptr, rstd_ptr,
            seed, ws, bs, tl.program_id(0), M, eps, N, ROWS, CHUNK, EVEN,
            ACT, DROP,
        )  # fmt: skip
    else:
        if w_ptr is not None and b_ptr is not None:
            for c in tl.static_range(CHUNKS):
                ws += (_pack(_load(w_ptr, 0, c, 1, N, CHUNK, True)),)
                bs += (_pack(_load(b_ptr, 0, c, 1, N, CHUNK, True)),)
        for tile in tl.range(
            tl.program_id(0), tl.cdiv(M, ROWS), tl.num_programs(0),
            num_stages=STAGES, disable_licm=True,
        ):  # fmt: skip
            _forward_tile(
                x_ptr, r_ptr, w_ptr, b_ptr, y_ptr, s_ptr, mean_ptr, rstd_ptr,
                seed, ws, bs, tile, M, eps, N, ROWS, CHUNK, EVEN, ACT, DROP,
            )  # fmt: skip


# %%
# The rest is as on the earlier pages: mean first, variance second.


@triton.jit
def _statistics(held, eps: tl.constexpr, N: tl.constexpr, acc: tl.constexpr):
    """mean and rstd of rows that are tuples of chunks, in two passes."""
    CHUNK: tl.constexpr = held[0].shape[1]
    total = tl.zeros(held[0].shape, acc)
    for c in tl.static_range((N + CHUNK - 1) // CHUNK):
        total += held[c].to(acc)
    mean = tl.sum(total, 1)[:, None] / N
    total = tl.zeros(held[0].shape, acc)
    for c in tl.static_range((N + CHUNK - 1) // CHUNK):
        d = held[c].to(acc) - mean
        if (c + 1) * CHUNK > N:
            d = tl.where(_column(c, CHUNK) < N, d, 0)  # idle lanes: 0 again
        total += d * d
    return mean, 1 / tl.sqrt(tl.sum(total, 1)[:, None] / N + eps)


@triton.jit
def _affine(x_hat, w_ptr, b_ptr, c, N: tl.constexpr):
    """x_hat * w + b; w and b are read by every program, so kept in cache."""
    col = _column(c, x_hat.shape[1])
    mask = col < N
    if w_ptr is not None:
        w = tl.load(w_ptr + col, mask=mask, eviction_policy="evict_last")
        x_hat *= w.to(x_hat.dtype)
    if b_ptr is not None:
        b = tl.load(b_ptr + col, mask=mask, eviction_policy="evict_last")
        x_hat += b.to(x_hat.dtype)
    return x_hat


# %%
# Rows that do not fit: Welford
# -----------------------------
#
# A program goes twice over a row that does not fit into registers, the second
# time from its end, as on the third page.
# The first sweep sees each element once, so it cannot subtract a mean that it
# does not know yet.
# Welford's method updates the mean with every element, and keeps the sum
# ``m2`` of squares about it.
# Every lane does so for its own columns; in the end two lanes at a time are
# merged by the formula of Chan, Golub and LeVeque.


@triton.jit
def _merge(mean_a, m2_a, n_a, mean_b, m2_b, n_b):
    """Mean, squares about it and count of two sets together."""
    n = n_a + n_b
    share = n_b / tl.maximum(n, 1)
    d = mean_b - mean_a
    return mean_a + d * share, m2_a + m2_b + d * d * n_a * share, n


@triton.jit
def _welford_step(a, mask, c, mean, m2):
    """Element c + 1 of each lane; a lane without one keeps what it has."""
    n = tl.cast(c + 1, mean.dtype)
    d = tl.where(mask, a - mean, 0)
    return mean + d * (1 / n), m2 + d * d * ((n - 1) / n)


# %%


@triton.jit
def _first_sweep(
    x_ptr, r_ptr, s_ptr, seed, first, eps: tl.constexpr, N: tl.constexpr,
    CHUNK: tl.constexpr, kind: tl.constexpr, acc: tl.constexpr,
    ACT: tl.constexpr, DROP: tl.constexpr,
):  # fmt: skip
    """mean and rstd of a row; the sum is stored on the way."""
    number = tl.program_id(0) + tl.zeros([1, 1], tl.int32)
    mean = tl.zeros([1, CHUNK], acc)
    m2 = tl.zeros([1, CHUNK], acc)
    for c in tl.range(0, (N + CHUNK - 1) // CHUNK, num_stages=1):
        col = _column(c, CHUNK)
        x = tl.load(x_ptr + first + col, mask=col < N, other=0)
        r = None
        if r_ptr is not None:
            r = tl.load(r_ptr + first + col, mask=col < N, other=0)
        a = _stage(x, r, seed, number, c, N, CHUNK, kind, acc, ACT, DROP, True)
        if s_ptr is not None:
            tl.store(s_ptr + first + col, a, mask=col < N)
        mean, m2 = _welford_step(a.to(acc), col < N, c, mean, m2)
    n = (N - 1 - tl.arange(0, CHUNK)[None, :] + CHUNK) // CHUNK  # of a lane
    mean, m2, _ = tl.reduce((mean, m2, n.to(acc)), 1, _merge)
    return mean, 1 / tl.sqrt(m2 / N + eps)


# %%
# The second sweep reads what other threads of the program may have written,
# so a barrier stands between the two.


@triton.jit(do_not_specialize=["seed"])
def _fused_layer_norm_fwd_sweeps(
    x_ptr, r_ptr, w_ptr, b_ptr, y_ptr, s_ptr, mean_ptr, rstd_ptr, seed,
    eps: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr,
    ACT: tl.constexpr, DROP: tl.constexpr,
):  # fmt: skip
    acc: tl.constexpr = mean_ptr.dtype.element_ty
    kind: tl.constexpr = y_ptr.dtype.element_ty
    CHUNKS: tl.constexpr = (N + CHUNK - 1) // CHUNK
    first = tl.cast(tl.program_id(0), tl.int64) * N
    mean, rstd = _first_sweep(
        x_ptr, r_ptr, s_ptr, _value_of(seed, DROP), first, eps, N, CHUNK, kind,
        acc, ACT, DROP,
    )  # fmt: skip
    row = tl.program_id(0) + tl.arange(0, 1)
    tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)
    tl.debug_barrier()
    for i in tl.range(0, CHUNKS, num_stages=1):
        c = CHUNKS - 1 - i
        col = _column(c, CHUNK)
        again = x_ptr if s_ptr is None else s_ptr
        x = tl.load(again + first + col, mask=col < N, other=0).to(acc)
        a = _stage(x, None, 0, 0, c, N, CHUNK, kind, acc, ACT, DROP, True)
        x_hat = (a - mean[:, None]) * rstd[:, None]
        y = _affine(x_hat, w_ptr, b_ptr, c, N)
        tl.store(y_ptr + first + col, y, mask=col < N)


# %%
# Which of the two, and with how many warps, depends on the width.
# ``n`` is the width in units of 16 bits.
#
# An addition is done as soon as its numbers are there: a program for each
# tile, with few registers, keeps the memory busy.
# An activation takes its time, and the next rows have to arrive meanwhile.
# Two ways lead there.
# ``per_sm`` programs share the registers of a multiprocessor, so that one
# computes while another one loads.
# Or a program loads ahead, with ``STAGES`` tiles in flight.
# As many tiles are on their way as fit into shared memory.
# Which way is better changes with the width.
# So the rule for activations is a table of what was measured, with SiLU on an
# H200.

GPU = torch.cuda.get_device_properties(0) if ON_GPU else None
# In the interpreter any numbers will do.
NUM_SMS = getattr(GPU, "multi_processor_count", 4)
SHARED = getattr(GPU, "shared_memory_per_block_optin", 65536)

ACTIVATION_PLANS = (
    # up to n, columns of 16 bits in a chunk, warps, per_sm, STAGES
    (2048, 1024, 4, 12, 1),
    (3584, 512, 2, 4, 4),
    (4096, 2048, 8, 6, 1),
    (7680, 512, 4, 2, 4),
    (8192, 4096, 16, 3, 1),
    (9216, 1024, 8, 3, 1),
    (10240, 2048, 8, 1, 4),
    (12288, 4096, 16, 2, 1),
    (14336, 2048, 16, 2, 1),
    (14848, 2048, 8, 1, 4),
    (15360, 1024, 8, 2, 1),
    (16384, 2048, 8, 1, 4),
)


def plan_forward(N, itemsize, activation=False):
    """Options of the kernel for rows of N elements; sweeps have no ROWS."""
    n = N * itemsize // 2
    if n > 24576:
        return {"CHUNK": 16384 // itemsize, "num_warps": 16}
    if activation and 1024 < n <= 16384:
        plan = next(plan for plan in ACTIVATION_PLANS if n <= plan[0])
        _, chunk, warps, per_sm, stages = plan
        row = triton.cdiv(n, chunk) * chunk * 2  # bytes
        return {
            "ROWS": 1, "CHUNK": 2 * chunk // itemsize, "num_warps": warps,
            "per_sm": per_sm,
            "STAGES": 1 + min((SHARED // per_sm - 4096) // row, stages - 1),
        }  # fmt: skip
    warps = 2 if n <= 1024 else 4 if n <= 5120 else 8 if n <= 11264 else 16
    chunk = min(max(triton.next_power_of_2(N), 16), 512 * warps // itemsize)
    rows = min(max(2048 // itemsize // chunk, 1), 16) if n <= 1024 else 1
    return {"ROWS": rows, "CHUNK": chunk, "num_warps": warps}


# %%


def programs(tiles, room):
    """The fewest programs that need no more rounds."""
    return triton.cdiv(tiles, max(triton.cdiv(tiles, room), 1))


def registers(warps, per_sm):
    """What a thread may have, if so many programs share 65536 registers."""
    return {"maxnreg": min(65536 // (32 * warps * per_sm) // 8 * 8, 255)}


def forward(x, r, w, b, eps, activation=None, p=0.0, seed=None, plan=None):
    """y, s, mean and rstd for contiguous matrices; there is no s without r."""
    M, N = x.shape
    s = None
    if r is not None:
        s = torch.empty_like(x, dtype=torch.promote_types(x.dtype, r.dtype))
    y = torch.empty_like(x if s is None else s)
    acc = torch.promote_types(y.dtype, torch.float32)
    mean = torch.empty(M, dtype=acc, device=x.device)
    rstd = torch.empty_like(mean)
    given = x, r, w, b, y, s, mean, rstd, seed if p > 0 else 0
    stage = {
        "ACT": activation and ACTIVATIONS[activation],
        "DROP": round(p * 2**32),
    }
    plan = dict(plan or default_forward_plan(x, y, w, b, activation))
    if "ROWS" in plan:
        launch_rows(given, eps, stage | plan)
    else:
        _fused_layer_norm_fwd_sweeps[(M,)](*given, eps, N, **stage, **plan)
    return [t for t in (y, s, mean, rstd) if t is not None]


# %%


def default_forward_plan(x, y, w, b, activation):
    """The plan for these tensors."""
    # What loads ahead keeps w and b in registers, where wide ones do not fit.
    fits = all(t is None or t.itemsize <= x.itemsize for t in (w, b))
    return plan_forward(
        x.shape[1], y.itemsize, fits and activation in ("silu", "gelu_tanh")
    )


def launch_rows(given, eps, options):
    """Launch the kernel that holds rows in registers."""
    M, N = given[0].shape
    tiles = grid = triton.cdiv(M, options["ROWS"])
    options = {"STAGES": 1, "EVEN": M % options["ROWS"] == 0} | options
    per_sm = options.pop("per_sm", None)
    if options["STAGES"] > 1:
        grid = programs(tiles, NUM_SMS * per_sm)
    if per_sm and CUDA:
        options |= registers(options["num_warps"], per_sm)
    _fused_layer_norm_fwd[(grid,)](*given, M, eps, N, **options)


# %%
# A first check, against PyTorch:

M, N = (1151, 8192) if ON_GPU else (5, 88)
x, residual, w, b, dy, ds = (t.detach() for t in inputs(M, N, torch.float32))
y, s, mean, rstd = forward(x, residual, w, b, 1e-5)
expected = add_chain(x, residual, (N,), w, b)
print(f"largest difference: {(y - expected[0]).abs().max():.1e}")
torch.testing.assert_close((y, s), expected)
for name, f in ("silu", F.silu), ("gelu", F.gelu):
    y = forward(x, None, w, b, 1e-5, name)[0]
    torch.testing.assert_close(y, F.layer_norm(f(x), (N,), w, b))

# %%
# And the mask.
# A residual of 0 and an ``x`` of 1 show it: 0 where an element was dropped,
# :math:`1 / (1 - p)` elsewhere.
# The share that is kept differs from :math:`1 - p` only by chance; 4 standard
# deviations are allowed.


def kept(M, N, p, seed, plan=None):
    """Which elements survive."""
    ones = torch.ones(M, N, device=DEVICE)
    zeros = torch.zeros_like(ones)
    s = forward(ones, zeros, None, None, 1e-5, None, p, seed, plan)[1]
    assert ((s == 0) | ((s * (1 - p) - 1).abs() < 1e-6)).all()
    return s != 0


for p in 0.1, 0.5:
    mask = kept(M, N, p, seed=7)
    sigma = (p * (1 - p) / mask.numel()) ** 0.5
    share = mask.double().mean().item()
    print(f"p = {p}: kept {share:.4f}")
    assert abs(share - (1 - p)) < 4 * sigma
    assert torch.equal(mask, kept(M, N, p, seed=7))
    assert torch.equal(mask, kept(M, N, p, 7, {"CHUNK": 64, "num_warps": 4}))
    assert not torch.equal(mask, kept(M, N, p, seed=8))

# %%
# Backward: the formulas
# ----------------------
#
# The first page derives the gradient of the norm.
# What is new stands around it: ``s`` has two readers, and something happens
# before the norm.
# We derive it once more in float64, and autograd checks each step.

eps, p = 1e-5, 0.25
x, residual, dy, ds = torch.randn(4, 4, 6, dtype=torch.float64)
x.requires_grad_(), residual.requires_grad_()
w = torch.rand(6, dtype=torch.float64)
mask = torch.rand(4, 6) >= p
s = x * mask / (1 - p) + residual
mu = s.mean(dim=1, keepdim=True)
r = (((s - mu) ** 2).mean(dim=1, keepdim=True) + eps) ** -0.5
x_hat = (s - mu) * r
y = x_hat * w
assert_close = torch.testing.assert_close


def autograd(value):
    """Its gradient, where y receives dy and s receives ds."""
    return torch.autograd.grad((y, s), value, (dy, ds), retain_graph=True)[0]


# %%
# **Step 1: through the norm.**
# This is the result of the first page, for ``s`` in place of ``x``.

wdy = w * dy
c1 = (x_hat * wdy).mean(dim=1, keepdim=True)
c2 = wdy.mean(dim=1, keepdim=True)
through_norm = (wdy - x_hat * c1 - c2) * r

# %%
# **Step 2: the two readers of s.**
# What is used twice receives the sum of two gradients.
# In a residual stream ``ds`` is what comes back along the stream.

total = through_norm + ds
assert_close(total, autograd(s))

# %%
# **Step 3: the residual, and x.**
# An addition hands its gradient to both sides.
# Dropout multiplied each element by a number, and so does its backward pass,
# by the same one: without dropout both gradients are one and the same tensor.

assert_close(total, autograd(residual))
assert_close(total * mask / (1 - p), autograd(x))

# %%
# **Step 4: an activation.**
# For :math:`y = \mathrm{norm}(f(x)) \cdot w` the gradient is multiplied by the
# slope :math:`f'(x)`.
# Here is the slope of each function, against autograd:

x = torch.linspace(-6, 6, 200, dtype=torch.float64, requires_grad=True)


def gelu_tanh(x):
    return F.gelu(x, approximate="tanh")


TORCH = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": gelu_tanh}


@triton.jit
def _apply(x_ptr, out_ptr, N, ACT: tl.constexpr, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + cols, mask=cols < N, other=0)
    value, slope = ACT(x)
    tl.store(out_ptr + cols, value, mask=cols < N)
    tl.store(out_ptr + N + cols, slope, mask=cols < N)


for name, f in TORCH.items():
    expected = f(x)
    slope = torch.autograd.grad(expected.sum(), x)[0]
    expected = torch.stack([expected, slope]).detach()
    for dtype in torch.float64, torch.float32:
        given = x.detach().to(DEVICE, dtype)
        found = torch.empty(2, 200, dtype=dtype, device=DEVICE)
        _apply[(1,)](given, found, 200, ACT=ACTIVATIONS[name], BLOCK=256)
        assert_close(found.cpu(), expected.to(dtype))
        error = (found.cpu() - expected).abs().max().item()
    print(f"{name}: at most {error:.0e} off in float32")

# %%
# Backward: one pass over memory
# ------------------------------
#
# The kernel is the last rung of the second page: persistent programs, loads
# that run ahead, sums in registers, one row of partial sums for each program.
# It has one more matrix to read, ``ds``, and two things are new.
#
# * ``mean`` and ``rstd`` are known, so ``dw`` and ``db`` are updated in the
#   first half, before the sums of the row are there.
# * ``ds`` is needed in the second half only, and is taken from shared memory
#   only there.
#
# From the first half to the second a program keeps ``x``, ``dy`` and ``w``.
# In 16 bits two numbers share a register, but the compiler sees that both
# halves need them in float32, converts them once, and keeps twice the
# registers.
# For wide rows there are none left.
#
# So we make it forget.
# ``_forget`` returns ``x`` combined by exclusive or with a 0 of which the
# compiler does not know that it is 0: one instruction for two numbers.
# That is written in assembly language, where we can say that one register
# holds two numbers; other devices do without.
# Where even that does not help, in rows of more than 14336 numbers, programs
# share a row.


@triton.jit
def _forget(x, zero):
    """x; but whoever converted x before must convert it again."""
    if PTX and x.dtype.primitive_bitwidth == 16:
        x = tl.inline_asm_elementwise(
            "xor.b32 $0, $1, $2;", "=r,r,r", [x, zero.to(tl.int16)],
            dtype=x.dtype, is_pure=True, pack=2,
        )  # fmt: skip
    return x


# %%
# The two halves of a row.
# The factors :math:`r` leave the sums, as on the third page.


@triton.jit
def _add_pairs(a1, a2, b1, b2):
    return a1 + b1, a2 + b2


@triton.jit
def _first_half(x, dy, w, mean, rstd, ACT: tl.constexpr):
    """Terms of the two sums of a row, and of dw and db."""
    x, dy = x.to(mean.dtype), dy.to(mean.dtype)
    if ACT is not None:
        x, _ = ACT(x)
    wdy = w.to(mean.dtype) * dy
    d = x - mean
    return wdy * d, wdy, dy * rstd * d, dy


@triton.jit
def _second_half(
    x, dy, w, mean, rstd, sum1, sum2, N: tl.constexpr, ACT: tl.constexpr
):
    """The gradient of what is normalized, or of x before the activation."""
    x, dy = x.to(mean.dtype), dy.to(mean.dtype)
    slope = 1.0
    if ACT is not None:
        x, slope = ACT(x)
    a = sum1 * rstd * rstd * rstd / N
    b = sum2 * rstd / N
    return (dy * rstd * w.to(mean.dtype) - ((x - mean) * a + b)) * slope


# %%
# The gradient of ``s`` and that of ``x`` differ by the mask.


@triton.jit
def _store_gradients(
    g, dr_ptr, dx_ptr, seed, tile, row, c, M,
    N: tl.constexpr, CHUNK: tl.constexpr, EVEN: tl.constexpr,
    DROP: tl.constexpr,
):  # fmt: skip
    ROWS: tl.constexpr = row.shape[0]
    at = tl.cast(tile, tl.int64) * ROWS * N
    left = M - tile * ROWS
    if dr_ptr is not None:
        _store(dr_ptr + at, g, row, c, left, N, CHUNK, EVEN)
    if dx_ptr is not None:
        g = _dropout(g, seed, row + tile * ROWS, c, DROP)
        _store(dx_ptr + at, g, row, c, left, N, CHUNK, EVEN)


# %%
# The kernel:


@triton.jit(do_not_specialize=["seed"])
def _fused_layer_norm_bwd(
    dy_ptr, ds_ptr,  # ds may be None: nobody used s
    x_ptr,  # s, or the x of an activation
    w_ptr, mean_ptr, rstd_ptr,
    dr_ptr,  # gradient of s, or None
    dx_ptr,  # gradient of x, where it is another one; or None
    partial_ptr,  # (programs, 2, N), or None
    seed, M, N: tl.constexpr,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, EVEN: tl.constexpr,
    STAGES: tl.constexpr, ACT: tl.constexpr, DROP: tl.constexpr,
    PDL: tl.constexpr, HIDE: tl.constexpr,
):  # fmt: skip
    acc: tl.constexpr = mean_ptr.dtype.element_ty
    kind: tl.constexpr = w_ptr.dtype.element_ty
    CHUNKS: tl.constexpr = (N + CHUNK - 1) // CHUNK
    row = tl.arange(0, ROWS)[:, None]
    seed = _value_of(seed, DROP)
    ws, dws, dbs = (), (), ()
    for c in tl.static_range(CHUNKS):
        ws += (_pack(_load(w_ptr, row * 0, c, 1, N, CHUNK, True)),)
        dws += (tl.zeros([ROWS, CHUNK], acc),)
        dbs += (tl.zeros([ROWS, CHUNK], acc),)
    for tile in tl.range(
        tl.program_id(0), tl.cdiv(M, ROWS), tl.num_programs(0),
        num_stages=STAGES, disable_licm=True,
    ):  # fmt: skip
        dws, dbs = _one_tile(
            dy_ptr, ds_ptr, x_ptr, mean_ptr, rstd_ptr, dr_ptr, dx_ptr, seed,
            tile, row, ws, dws, dbs, kind, M, N, CHUNK, EVEN, ACT, DROP, HIDE,
        )  # fmt: skip
    if PDL:  # the last kernel may start; it waits for what follows
        tl.extra.cuda.gdc_launch_dependents()
    if partial_ptr is not None:
        at = partial_ptr + tl.cast(tl.program_id(0), tl.int64) * 2 * N
        for c in tl.static_range(CHUNKS):
            dw = tl.sum(dws[c], 0, keep_dims=True)
            db = tl.sum(dbs[c], 0, keep_dims=True)
            _store(at, dw, 0, c, 1, N, CHUNK, True)
            _store(at + N, db, 0, c, 1, N, CHUNK, True)


# %%
# ``zero`` is a comparison of the sum with itself: 0, unless the sum is not a
# number, and then the gradients are not either.
# It is also why no conversion can move ahead of the sums.


@triton.jit
def _one_tile(
    dy_ptr, ds_ptr, x_ptr, mean_ptr, rstd_ptr, dr_ptr, dx_ptr, seed,
    tile, row, ws, dws, dbs, kind: tl.constexpr,
    M, N: tl.constexpr, CHUNK: tl.constexpr, EVEN: tl.constexpr,
    ACT: tl.constexpr, DROP: tl.constexpr, HIDE: tl.constexpr,
):  # fmt: skip
    acc: tl.constexpr = mean_ptr.dtype.element_ty
    ROWS: tl.constexpr = row.shape[0]
    first, left = tl.cast(tile, tl.int64) * ROWS, M - tile * ROWS
    mean = _load(mean_ptr + first, row, 0, left, 1, 1, EVEN)
    rstd = _load(rstd_ptr + first, row, 0, left, 1, 1, EVEN)
    held, new_dws, new_dbs = (), (), ()
    sum1 = tl.zeros([ROWS, CHUNK], acc)
    sum2 = tl.zeros([ROWS, CHUNK], acc)
    for c in tl.static_range((N + CHUNK - 1) // CHUNK):
        x = _load(x_ptr + first * N, row, c, left, N, CHUNK, EVEN)
        dy = _load(dy_ptr + first * N, row, c, left, N, CHUNK, EVEN)
        w = _unpack(ws[c], kind)
        one, two, dw, db = _first_half(x, dy, w, mean, rstd, ACT)
        sum1 += one
        sum2 += two
        held += (x, dy)
        new_dws += (dws[c] + dw,)
        new_dbs += (dbs[c] + db,)
    sum1, sum2 = tl.reduce((sum1, sum2), 1, _add_pairs)
    sum1, sum2 = sum1[:, None], sum2[:, None]
    zero = sum1 != sum1
    for c in tl.static_range((N + CHUNK - 1) // CHUNK):
        x, dy, w = held[2 * c], held[2 * c + 1], _unpack(ws[c], kind)
        if HIDE:
            x, dy, w = _forget(x, zero), _forget(dy, zero), _forget(w, zero)
        g = _second_half(x, dy, w, mean, rstd, sum1, sum2, N, ACT)
        if ds_ptr is not None:
            ds = _load(ds_ptr + first * N, row, c, left, N, CHUNK, EVEN)
            g += ds.to(acc)
        _store_gradients(
            g, dr_ptr, dx_ptr, seed, tile, row, c, M, N, CHUNK, EVEN, DROP
        )
    return new_dws, new_dbs


# %%
# Wide rows are shared by programs that each have a slice of the columns.
# This is the exchange of the third page: a program publishes what its slice
# adds to the two sums of a row, in one word of 64 bits, and finishes the tile
# before, whose words have arrived by then.
# A word that has not arrived is ``EMPTY``.
#
# Where programs cannot wait for each other, the kernel runs twice: ``RUN`` 1
# only publishes, ``RUN`` 2 only finishes, and ``x`` and ``dy`` are read twice.
# ``RUN`` 0 does both.

EMPTY = 0x7FEDCBA9  # in both halves of a word


@triton.jit
def _publish(ptr, at, a, b, DIRECT: tl.constexpr):
    if DIRECT:
        low = a.to(tl.uint32, bitcast=True).to(tl.int64)
        high = b.to(tl.uint32, bitcast=True).to(tl.int64)
        tl.inline_asm_elementwise(
            "st.relaxed.gpu.global.b64 [$1], $2; mov.b32 $0, 0;", "=r,l,l",
            [(ptr + at).to(tl.int64), (high << 32) | low],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        tl.store(ptr + 2 * at, a)
        tl.store(ptr + 2 * at + 1, b)


# %%


@triton.jit
def _wait(ptr, at, DIRECT: tl.constexpr):
    if DIRECT:
        low, high = tl.inline_asm_elementwise(
            """
            {
            .reg .pred p, q;
            .reg .b32 n;
            mov.b32 n, 0;
            AGAIN:
            ld.relaxed.gpu.global.v2.b32 {$0, $1}, [$2];
            setp.eq.b32 p, $0, 0x7FEDCBA9;
            setp.eq.or.b32 p, $1, 0x7FEDCBA9, p;
            add.u32 n, n, 1;
            setp.lt.and.u32 q, n, 100000, p;
            @q bra AGAIN;
            }
            """,
            "=r,=r,l", [(ptr + at).to(tl.int64)],
            dtype=(tl.uint32, tl.uint32), is_pure=False, pack=1,
        )  # fmt: skip
        low = low.to(tl.float32, bitcast=True)
        return low, high.to(tl.float32, bitcast=True)
    else:
        return tl.load(ptr + 2 * at), tl.load(ptr + 2 * at + 1)


# %%
# What is done with a tile when all words of its rows are there:


@triton.jit
def _finish(
    x, dy, w,  # x and dy: packed
    dy_ptr, ds_ptr, x_ptr, mean_ptr, rstd_ptr, dr_ptr, dx_ptr, words_ptr,
    seed, tile, c, M, N: tl.constexpr, PADDED: tl.constexpr,
    ACT: tl.constexpr, DROP: tl.constexpr, DIRECT: tl.constexpr,
):  # fmt: skip
    x = _unpack(x, x_ptr.dtype.element_ty)
    dy = _unpack(dy, dy_ptr.dtype.element_ty)
    CHUNK: tl.constexpr = x.shape[1]
    SLICES: tl.constexpr = (N + CHUNK - 1) // CHUNK
    row = tl.arange(0, x.shape[0])[:, None]
    first, left = tl.cast(tile, tl.int64) * x.shape[0], M - tile * x.shape[0]
    mean = tl.load(mean_ptr + first + row, mask=row < left, other=0)
    rstd = tl.load(rstd_ptr + first + row, mask=row < left, other=0)
    s = tl.arange(0, PADDED)[None, :]
    at = (first + row) * SLICES + tl.minimum(s, SLICES - 1)
    one, two = _wait(words_ptr, at, DIRECT)
    one, two = tl.where(s < SLICES, one, 0), tl.where(s < SLICES, two, 0)
    sum1, sum2 = tl.reduce((one, two), 1, _add_pairs)
    g = _second_half(
        x, dy, w, mean, rstd, sum1[:, None], sum2[:, None], N, ACT
    )
    at = first * N + row * N + _column(c, CHUNK)
    mask = (row < left) & (_column(c, CHUNK) < N)
    if ds_ptr is not None:
        g += tl.load(ds_ptr + at, mask=mask, other=0).to(g.dtype)
    if dr_ptr is not None:
        tl.store(dr_ptr + at, g, mask=mask)
    if dx_ptr is not None:
        g = _dropout(g, seed, row + tile * x.shape[0], c, DROP)
        tl.store(dx_ptr + at, g, mask=mask)


# %%
# The rows of ``words`` are padded to whole tiles.


@triton.jit
def _share(
    dy_ptr, x_ptr, w, mean_ptr, rstd_ptr, words_ptr, dw, db, tile, c, M,
    N: tl.constexpr, ROWS: tl.constexpr, ACT: tl.constexpr, RUN: tl.constexpr,
    DIRECT: tl.constexpr,
):  # fmt: skip
    """Load a slice of a tile and publish its sums; x, dy and new dw, db."""
    CHUNK: tl.constexpr = w.shape[1]
    SLICES: tl.constexpr = (N + CHUNK - 1) // CHUNK
    row = tl.arange(0, ROWS)[:, None]
    first, left = tl.cast(tile, tl.int64) * ROWS, M - tile * ROWS
    mean = tl.load(mean_ptr + first + row, mask=row < left, other=0)
    rstd = tl.load(rstd_ptr + first + row, mask=row < left, other=0)
    at = first * N + row * N + _column(c, CHUNK)
    mask = (row < left) & (_column(c, CHUNK) < N)
    x = tl.load(x_ptr + at, mask=mask, other=0)
    dy = tl.load(dy_ptr + at, mask=mask, other=0)
    one, two, more_dw, more_db = _first_half(x, dy, w, mean, rstd, ACT)
    dw += tl.sum(more_dw, 0, keep_dims=True)
    db += tl.sum(more_db, 0, keep_dims=True)
    if RUN != 2:
        one, two = tl.reduce((one, two), 1, _add_pairs)
        at = (first + row) * SLICES + c
        _publish(words_ptr, at, one[:, None], two[:, None], DIRECT)
    return x, dy, dw, db


# %%
# The kernel keeps ``x1`` and ``dy1`` of the tile before.
# Which tile that was is computed, not kept: otherwise the compiler would not
# load ahead.


@triton.jit(do_not_specialize=["seed"])
def _fused_layer_norm_bwd_slices(
    dy_ptr, ds_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, dr_ptr, dx_ptr,
    partial_ptr, words_ptr, seed, M, N: tl.constexpr, ROWS: tl.constexpr,
    CHUNK: tl.constexpr, STAGES: tl.constexpr, PADDED: tl.constexpr,
    ACT: tl.constexpr, DROP: tl.constexpr, PDL: tl.constexpr,
    RUN: tl.constexpr, DIRECT: tl.constexpr,
):  # fmt: skip
    acc: tl.constexpr = mean_ptr.dtype.element_ty
    SLICES: tl.constexpr = (N + CHUNK - 1) // CHUNK
    seed = _value_of(seed, DROP)
    c, group = tl.program_id(0) % SLICES, tl.program_id(0) // SLICES
    groups = tl.num_programs(0) // SLICES
    tiles = tl.cdiv(M, ROWS)
    col = _column(c, CHUNK)
    w = tl.load(w_ptr + col, mask=col < N, other=0)
    dw, db = tl.zeros([1, CHUNK], acc), tl.zeros([1, CHUNK], acc)
    x1 = _pack(tl.zeros([ROWS, CHUNK], x_ptr.dtype.element_ty))
    dy1 = _pack(tl.zeros([ROWS, CHUNK], dy_ptr.dtype.element_ty))
    for tile in tl.range(group, tiles, groups, num_stages=STAGES):
        x, dy, dw, db = _share(
            dy_ptr, x_ptr, w, mean_ptr, rstd_ptr, words_ptr, dw, db, tile, c,
            M, N, ROWS, ACT, RUN, DIRECT,
        )  # fmt: skip
        if RUN != 1:
            before = tl.where(tile > group, tile - groups, tile)
            _finish(
                x1, dy1, w, dy_ptr, ds_ptr, x_ptr, mean_ptr, rstd_ptr, dr_ptr,
                dx_ptr, words_ptr, seed, before, c, M, N, PADDED, ACT, DROP,
                DIRECT,
            )  # fmt: skip
            x1, dy1 = _pack(x), _pack(dy)
    if RUN != 1:
        last = group + (tiles - 1 - group) // groups * groups
        _finish(
            x1, dy1, w, dy_ptr, ds_ptr, x_ptr, mean_ptr, rstd_ptr, dr_ptr,
            dx_ptr, words_ptr, seed, last, c, M, N, PADDED, ACT, DROP, DIRECT,
        )  # fmt: skip
        _store_slice(partial_ptr, dw, db, col, group, N, PDL)


# %%


@triton.jit
def _store_slice(ptr, dw, db, col, group, N: tl.constexpr, PDL: tl.constexpr):
    if PDL:  # the last kernel may start; it waits for what follows
        tl.extra.cuda.gdc_launch_dependents()
    if ptr is not None:
        at = ptr + tl.cast(group, tl.int64) * 2 * N + col
        tl.store(at, dw, mask=col < N)
        tl.store(at + N, db, mask=col < N)


# %%
# The last kernel adds up the partial rows, as on the second page.


@triton.jit
def _sum_rows(
    partial_ptr,  # (P, 2, N)
    dw_ptr, db_ptr,  # (N,), or None: not wanted
    P, N: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)[None, :]
    dw = tl.zeros([ROWS, COLS], partial_ptr.dtype.element_ty)
    db = tl.zeros([ROWS, COLS], partial_ptr.dtype.element_ty)
    for start in range(0, P, ROWS):
        row = start + tl.arange(0, ROWS)[:, None]
        mask = (row < P) & (col < N)
        at = partial_ptr + tl.cast(row, tl.int64) * (2 * N) + col
        dw += tl.load(at, mask=mask, other=0)
        db += tl.load(at + N, mask=mask, other=0)
    dw = tl.sum(dw, 0, keep_dims=True)
    db = tl.sum(db, 0, keep_dims=True)
    if dw_ptr is not None:
        tl.store(dw_ptr + col, dw, mask=col < N)
    if db_ptr is not None:
        tl.store(db_ptr + col, db, mask=col < N)


# %%
# The plan of the backward pass: up to ``widest`` columns of 16 bits a program
# holds a whole row, beyond that programs share rows.
# ``matrices`` is the number of matrices that are read: two or three.
# As many tiles are on their way as fit into shared memory, but three at most,
# and two where rows are shared.
#
# Up to 8192 columns nothing has to be forgotten.
# With an activation that is the end: what the first half has computed is too
# dear to compute it again, so wider rows are shared.

PDL = CUDA and torch.cuda.get_device_capability() >= (9, 0)


def plan_backward(N, itemsize, matrices=3, widest=14336, activation=False):
    """Options of the kernel for rows of N elements; wide ones have SLICES."""
    n = N * itemsize // 2
    if n > widest:
        columns, warps, per_sm = (1024, 2, 4) if activation else (2048, 4, 2)
        chunk, rows, most = 2 * columns // itemsize, 2, 2
        lanes, kind = chunk, {"SLICES": True}
    else:
        warps = 4 if n <= min(4096, widest // 2) else 8
        per_sm = 2 if n <= 4096 and warps == 4 else 1
        chunk = 512 * warps // itemsize
        if n <= 1024:
            chunk = max(triton.next_power_of_2(N), 16)
        lanes, most = triton.cdiv(N, chunk) * chunk, 3
        size = (8192 if activation else 4096) // itemsize
        rows = max(min(size // lanes, 8), 1)
        kind = {"HIDE": n > 8192}
    room = matrices * rows * lanes * itemsize  # bytes of a tile
    return kind | {
        "ROWS": rows, "CHUNK": chunk, "num_warps": warps, "per_sm": per_sm,
        "STAGES": 1 + min((SHARED // per_sm - 4096) // room, most),
    }  # fmt: skip


# %%


def launch_backward(
    dy, ds, x, w, mean, rstd, dr, dx, dw, db, activation, p, seed, plan
):  # fmt: skip
    M, N = x.shape
    w = x.new_ones(N) if w is None else w
    plan = dict(plan or default_plan(N, x, w, ds, activation, p))
    wide, per_sm = plan.pop("SLICES", False), plan.pop("per_sm")
    slices = triton.cdiv(N, plan["CHUNK"]) if wide else 1
    tiles = triton.cdiv(M, plan["ROWS"])
    groups = programs(tiles, max(NUM_SMS * per_sm // slices, 1))
    partial = None
    if dw is not None or db is not None:
        partial = torch.empty(groups, 2, N, dtype=mean.dtype, device=x.device)
    stage = {"ACT": activation and ACTIVATIONS[activation]}
    stage |= {"DROP": round(p * 2**32), "PDL": PDL and partial is not None}
    given = dy, ds, x, w, mean, rstd, dr, dx, partial
    rest = seed if p > 0 else 0, M, N
    if wide:
        launch_slices(given, rest, groups, slices, per_sm, stage | plan)
    else:
        even = M % plan["ROWS"] == 0
        plan = {"HIDE": True} | plan
        _fused_layer_norm_bwd[(groups,)](
            *given, *rest, EVEN=even, **stage, **plan
        )
    if partial is not None:
        sum_rows(partial, dw, db)


# %%
# Programs that wait for each other must all be running: a cooperative launch
# makes sure, and ``maxnreg`` leaves room for ``per_sm`` of them, as on the
# third page.


def launch_slices(given, rest, groups, slices, per_sm, options):
    """One run where programs can wait for each other, else two."""
    x, mean = given[2], given[4]
    rows = triton.cdiv(len(x), options["ROWS"]) * options["ROWS"]
    together = CUDA and mean.dtype == torch.float32
    together = together and groups * slices <= NUM_SMS * per_sm
    if together:
        word = EMPTY << 32 | EMPTY
        words = torch.full(
            (rows, slices), word, dtype=torch.int64, device=x.device
        )
        options |= registers(options["num_warps"], per_sm)
        options["launch_cooperative_grid"] = True
    else:
        words = mean.new_empty(rows, slices, 2)
        options["STAGES"] = 1  # the words would fill shared memory
    for run in (0,) if together else (1, 2):
        _fused_layer_norm_bwd_slices[(groups * slices,)](
            *given, words, *rest, PADDED=triton.next_power_of_2(slices),
            RUN=run, DIRECT=together, **options,
        )  # fmt: skip


# %%


def backward(
    dy, ds, x, w, mean, rstd, wanted, types, activation=None, p=0.0,
    seed=None, plan=None,
):  # fmt: skip
    """Those gradients of s, x, w and b that are wanted; types has names.

    x is what was normalized, or the input of the activation. Where s and x
    have the same gradient, ask for one of them only.
    """
    shapes = x.shape, x.shape, x.shape[1:], x.shape[1:]
    found = [
        x.new_empty(n, dtype=getattr(torch, name)) if want else None
        for n, name, want in zip(shapes, types, wanted, strict=True)
    ]
    if len(x):
        given = dy, ds, x, w, mean, rstd, *found
        launch_backward(*given, activation, p, seed, plan)
    else:  # the sum of no rows
        for sums in found[2:]:
            if sums is not None:
                sums.zero_()
    return [t for t in found if t is not None]


# %%


def default_plan(N, x, w, ds, activation, p):
    """The plan for these tensors."""
    widest = 14336
    if p > 0 or w.itemsize > x.itemsize or not CUDA:
        widest = 12288  # more registers are needed
    if activation:
        widest = 8192 if activation in ("silu", "gelu_tanh") else 6144
    matrices = 2 if ds is None else 3
    return plan_backward(
        N, x.itemsize, matrices, widest, activation is not None
    )


def sum_rows(partial, dw, db):
    """Launch the last kernel, early where the GPU can."""
    P, _, N = partial.shape
    early = {"launch_pdl": True} if PDL else {}
    _sum_rows[(triton.cdiv(N, 16),)](
        partial, dw, db, P, N,
        ROWS=min(triton.next_power_of_2(P), 256), COLS=16, PDL=PDL,
        num_warps=8 if N <= 2048 else 4, **early,
    )  # fmt: skip


# %%
# Two functions to train with
# ---------------------------
#
# ``torch.compile`` cannot look into a kernel that gets a function as an
# argument.
# So both passes are also registered as operators, as on the third page.

FORWARD = torch.library.custom_op(
    "both_passes::fused_layer_norm",
    forward,
    mutates_args=(),
    schema="(Tensor x, Tensor? r, Tensor? w, Tensor? b, float eps, "
    "str? activation, float p, Tensor? seed) -> Tensor[]",
)
BACKWARD = torch.library.custom_op(
    "both_passes::fused_layer_norm_bwd",
    backward,
    mutates_args=(),
    schema="(Tensor dy, Tensor? ds, Tensor x, Tensor? w, Tensor mean, "
    "Tensor rstd, bool[] wanted, str[] types, str? activation, "
    "float p, Tensor? seed) -> Tensor[]",
)


@FORWARD.register_fake
def _(x, r, w, b, eps, activation, p, seed):
    """Shapes and types of the results, without numbers."""
    other = x if r is None else r
    y = torch.empty_like(x, dtype=torch.promote_types(x.dtype, other.dtype))
    acc = torch.promote_types(y.dtype, torch.float32)
    mean = x.new_empty(len(x), dtype=acc)
    s = [] if r is None else [torch.empty_like(y)]
    return [y, *s, mean, torch.empty_like(mean)]


@BACKWARD.register_fake
def _(dy, ds, x, w, mean, rstd, wanted, types, activation, p, seed):
    shapes = x.shape, x.shape, x.shape[1:], x.shape[1:]
    given = zip(shapes, wanted, types, strict=True)
    return [
        x.new_empty(n, dtype=getattr(torch, name))
        for n, want, name in given
        if want
    ]


# %%
# In a compiled model the seed is a tensor, so that a new one needs no new
# compilation.


def call(operator, function, *given):
    """The results of function, by way of its operator if compiling."""
    *rest, seed = given
    if not torch.compiler.is_compiling():
        return function(*rest, seed)
    if isinstance(seed, int):
        seed = torch.full((), seed, dtype=torch.int64, device=rest[0].device)
    return operator(*rest, seed)


# %%
# The wrapper is that of the first page, but a caller may use both results or
# only one.
# ``set_materialize_grads(False)`` makes autograd say None for the gradient of
# a result that nobody used, instead of making a matrix of zeros.


class FusedLayerNorm(torch.autograd.Function):
    """Two results with a residual, one without."""

    @staticmethod
    def forward(ctx, x, residual, w, b, shape, eps, activation, p, seed):
        if not torch.compiler.is_compiling():
            ctx.set_materialize_grads(False)
        sizes = (-1, shape.numel()), (-1, shape.numel()), (-1,), (-1,)
        given = x, residual, w, b
        types = [x.dtype if t is None else t.dtype for t in given]
        ctx.types = [str(dtype).removeprefix("torch.") for dtype in types]
        rows, r, w, b = (
            None if t is None else t.reshape(size).contiguous()
            for t, size in zip(given, sizes, strict=True)
        )
        y, *s, mean, rstd = call(
            FORWARD, forward, rows, r, w, b, eps, activation, p, seed
        )
        tensor = seed if isinstance(seed, torch.Tensor) else None
        kept = rows if residual is None else s[0]
        ctx.save_for_backward(kept, w, mean, rstd, tensor)
        ctx.rest = shape, activation, p, None if tensor is not None else seed
        ctx.two = residual is not None
        if ctx.two:
            return y.reshape(x.shape), s[0].reshape(x.shape)
        return y.reshape(x.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy, ds=None):
        return *_gradients(ctx, dy, ds), None, None, None, None, None


# %%
# Without dropout ``x`` and ``residual`` share one gradient, and one tensor.


def _gradients(ctx, dy, ds):
    """dx, dresidual, dw, db; dy or ds is None where nobody used y or s."""
    x, w, mean, rstd, tensor = ctx.saved_tensors
    shape, activation, p, seed = ctx.rest
    full = ds.shape if dy is None else dy.shape
    dy, ds = (
        None if t is None else t.reshape(x.shape).contiguous()
        for t in (dy, ds)
    )
    dy = torch.zeros_like(x) if dy is None else dy
    for_x, for_r, *for_wb = ctx.needs_input_grad[:4]
    type_x, type_r, *types = ctx.types
    one = ctx.two and p == 0 and type_x == type_r
    wanted = [for_r or (one and for_x), for_x and not one, *for_wb]
    found = call(
        BACKWARD, backward, dy, ds, x, w, mean, rstd, wanted,
        [type_r, type_x, *types], activation, p,
        seed if tensor is None else tensor,
    )  # fmt: skip
    found = iter(found)
    dr, dx, dw, db = (next(found) if want else None for want in wanted)
    dr, dx = (None if t is None else t.reshape(full) for t in (dr, dx))
    dw, db = (None if t is None else t.reshape(shape) for t in (dw, db))
    if one and for_x:
        dx = dr
    return dx, dr if for_r else None, dw, db


# %%
# And the two functions.
# A seed may also be a tensor of one integer on the device: then a CUDA graph
# can be replayed with another seed.


def add_layer_norm(
    x, residual, normalized_shape, weight, bias, eps=1e-5, dropout_p=0.0,
    seed=0,
):  # fmt: skip
    """(y, s): s = dropout(x) + residual, and y = layer norm of s.

    The same seed drops the same elements: give each call its own seed.
    """
    shape = _check(x, normalized_shape, weight, bias, eps, residual=residual)
    if not 0 <= dropout_p <= 1:
        raise ValueError(f"dropout_p is {dropout_p}, but must be in [0, 1]")
    _check_seed(seed, x)
    p = float(dropout_p)
    seed = seed if p > 0 else None
    return FusedLayerNorm.apply(
        x, residual, weight, bias, shape, eps, None, p, seed
    )


def activation_layer_norm(
    x, normalized_shape, weight, bias, eps=1e-5, activation="silu"
):
    """Layer norm of activation(x); ACTIVATIONS has the names."""
    shape = _check(x, normalized_shape, weight, bias, eps)
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"activation is {activation!r}, but must be one of "
            f"{', '.join(ACTIVATIONS)}"
        )
    return FusedLayerNorm.apply(
        x, None, weight, bias, shape, eps, activation, 0.0, None
    )


# %%
# A mistake in the arguments deserves a message that names the argument.

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _check(x, normalized_shape, weight, bias, eps, **more):
    if isinstance(normalized_shape, int):
        normalized_shape = (normalized_shape,)
    shape = torch.Size(normalized_shape)
    given = {"x": x, "weight": weight, "bias": bias} | more
    for name, tensor in given.items():
        if name in ("weight", "bias") and tensor is None:
            continue
        if not isinstance(tensor, torch.Tensor) or tensor.dtype not in FLOATS:
            what = getattr(tensor, "dtype", type(tensor).__name__)
            raise TypeError(f"{name} has {what}, which is no float")
        if tensor.device.type != DEVICE.type or tensor.device != x.device:
            raise ValueError(
                f"{name} is on {tensor.device}; all tensors must be on one "
                f"{DEVICE.type} device"
            )
        if name == "residual" and tensor.shape != x.shape:
            raise ValueError(f"residual does not have shape {tuple(x.shape)}")
        if name in ("weight", "bias") and tensor.shape != shape:
            raise ValueError(f"{name} does not have shape {tuple(shape)}")
    if x.is_cuda and x.get_device() != torch.cuda.current_device():
        raise ValueError(f"x is on {x.device}: make it the current device")
    if not eps >= 0:
        raise ValueError(f"eps is {eps}, but must not be negative")
    if shape.numel() == 0 or x.shape[-len(shape) :] != shape:
        raise ValueError(
            f"x has shape {tuple(x.shape)}, which does not end in "
            f"normalized_shape {tuple(shape)}"
        )
    return shape


# %%


def _check_seed(seed, x):
    if isinstance(seed, torch.Tensor):
        if seed.dtype != torch.int64 or seed.numel() != 1:
            raise TypeError("seed must be an int, or a tensor of one int64")
        if seed.device != x.device:
            raise ValueError(f"seed is on {seed.device}, but x on {x.device}")
    elif isinstance(seed, bool) or not isinstance(seed, (int, torch.SymInt)):
        raise TypeError(f"seed is {seed!r}, but must be an integer")
    elif not -(2**63) <= seed < 2**63:
        raise ValueError(f"seed is {seed}, which does not fit into 64 bits")


# %%
# How wrong is it?
# ----------------
#
# The relative error of each result against float64, for ours and for PyTorch.


def add_results(function, x, residual, w, b, dy, ds):
    """y, s, dx, dresidual, dw, db."""
    given = x, residual, w, b
    y, s = function(x, residual, x.shape[-1:], w, b, 1e-5)
    return y, s, *torch.autograd.grad((y, s), given, (dy, ds))


def activation_results(function, x, residual, w, b, dy, ds):
    """y, dx, dw, db."""
    y = function(x, x.shape[-1:], w, b, 1e-5)
    return y, *torch.autograd.grad(y, (x, w, b), dy)


def activation_chain(x, shape, w, b, eps=1e-5, activation="silu"):
    return F.layer_norm(TORCH[activation](x), shape, w, b, eps)


def errors(results, function, reference, M, N, dtype):
    """Relative errors against the reference in float64."""
    given = inputs(M, N, dtype)
    wide = [t.detach().double() for t in given]
    wide = [t.requires_grad_() for t in wide[:4]] + wide[4:]
    pairs = zip(
        results(function, *given), results(reference, *wide), strict=True
    )
    return [((a - b).norm() / b.norm()).item() for a, b in pairs]


# %%
# The columns are ``y``, ``s``, ``dx``, ``dresidual``, ``dw``, ``db``, and for
# SiLU ``y``, ``dx``, ``dw``, ``db``.

CASES = (
    (add_results, add_layer_norm, add_chain),
    (activation_results, activation_layer_norm, activation_chain),
)


def tolerance(dtype):
    half_unit = torch.finfo(dtype).eps / 2
    if dtype in (torch.float32, torch.float64):
        return 16 * half_unit
    if dtype == torch.bfloat16 and not ON_GPU:
        return 4 * half_unit  # the interpreter cuts bfloat16, not rounds it
    return 2 * half_unit


for dtype in torch.float16, torch.bfloat16, torch.float32:
    print(f"{dtype}, half a unit: {torch.finfo(dtype).eps / 2:.1e}")
    for results, ours, theirs in CASES:
        for name, f in ("ours", ours), ("PyTorch", theirs):
            found = errors(results, f, theirs, M, N, dtype)
            print(f"  {name:8}", *(f"{e:.1e}" for e in found))
            assert f is theirs or max(found) <= tolerance(dtype)

# %%
# The tolerance is twice that of the first page: ``y`` is the norm of a sum
# that was rounded itself.
#
# Three more checks: both passes have the same mask, what the norm sends back
# sums to 0 in each row, and the same seed gives the same bits.

x, residual, w, b, dy, ds = inputs(M, N, torch.float32)
runs = []
for seed in 5, 5, torch.tensor(5, device=DEVICE), 6:
    y, s = add_layer_norm(x, residual, (N,), w, b, 1e-5, 0.5, seed)
    leaves = x, residual, w, b
    dx, dr, dw, db = torch.autograd.grad((y, s), leaves, (dy, ds))
    mask = kept(M, N, 0.5, seed)
    assert_close(s, torch.where(mask, 2 * x, 0) + residual)
    assert_close(dx, torch.where(mask, 2 * dr, 0))
    assert (dr - ds).sum(dim=1).abs().max() < 1e-3
    runs.append((y.detach(), s.detach(), dx, dr, dw, db))
assert all(map(torch.equal, runs[0], runs[1]))
assert all(map(torch.equal, runs[0], runs[2]))
assert not torch.equal(runs[0][1], runs[3][1])
print("masks agree, same seed, same bits")

# %%
# Benchmark
# ---------
#
# The clock is that of the first page: device time from a CUDA graph, with an
# empty L2 cache.
# The ceiling has to read and write as many matrices as we do, and PyTorch has
# no operation that reads two and writes two.
# So the "Copy" of the figures is a small kernel that adds up what it reads,
# and writes the sum to each of its results.


@triton.jit
def _move(
    a_ptr, b_ptr, c_ptr,  # read; b and c may be None
    out1_ptr, out2_ptr,  # written; out2 may be None
    size, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.cast(tl.program_id(0), tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(a_ptr + at, mask=at < size)
    if b_ptr is not None:
        total += tl.load(b_ptr + at, mask=at < size)
    if c_ptr is not None:
        total += tl.load(c_ptr + at, mask=at < size)
    tl.store(out1_ptr + at, total, mask=at < size)
    if out2_ptr is not None:
        tl.store(out2_ptr + at, total, mask=at < size)


def move(read, written, block=2048, warps=4):
    """Read and write these matrices, and nothing else."""
    given = (*read, None, None)[:3] + (*written, None)[:2]
    size = read[0].numel()
    _move[(triton.cdiv(size, block),)](
        *given, size, BLOCK=block, num_warps=warps
    )


# %%


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
# The others are PyTorch, which runs the chain, and ``torch.compile``, which
# fuses what it can.
# Liger 0.8.5 fuses the addition with RMS norm only, so it is missing here; it
# is measured on the page about that norm.

NAMES = {"triton": "Triton", "torch": "PyTorch"}
NAMES |= {"torch.compile": "torch.compile", "copy": "Copy"}


def implementation(provider, what):
    """A function called like add_layer_norm or activation_layer_norm."""
    ours, chain = add_layer_norm, add_chain
    if what == "silu":
        ours, chain = activation_layer_norm, activation_chain
    if provider == "triton":
        return ours
    if provider == "torch.compile":
        import torch._functorch.config as config

        config.donated_buffer = False  # the backward pass runs many times
        torch._dynamo.reset()  # nothing is left of other sizes
        return torch.compile(lambda *a: chain(*a), dynamic=False)
    return chain


# %%


def work(M, N, dtype, mode, what, provider):
    """A function that builds the call to be timed."""

    def prepare():
        x, residual, w, b, dy, ds = inputs(M, N, dtype)
        given, grads = (x, residual), (dy, ds)
        if what == "silu":
            given, grads = (x,), (dy,)
        if provider == "copy":
            read = [t.detach() for t in given]
            written = [torch.empty_like(dy) for _ in grads]
            if mode == "backward":
                read, written = [read[0], *grads], written[:1]
            return lambda: move(read, written)
        f = implementation(provider, what)
        if mode == "forward":
            return lambda: f(*given, (N,), w, b, 1e-5)
        out = f(*given, (N,), w, b, 1e-5)
        return lambda: torch.autograd.grad(
            out, (*given, w, b), grads, retain_graph=True
        )

    return prepare


# %%

UNITS = {"add": {"forward": 4, "backward": 4}}
UNITS["silu"] = {"forward": 2, "backward": 3}


def measure(M, N, dtype, mode, what, provider):
    """Device time of one pass, from a CUDA graph replayed with an empty L2
    cache; median, 20 % and 80 % quantiles."""
    times = device_time(work(M, N, dtype, mode, what, provider))
    moved = UNITS[what][mode] * M * N * dtype.itemsize
    ms, fast, slow = times
    return [moved / t * 1e-6 for t in (ms, slow, fast)]


SWEEP = [512 * i for i in range(2, 32)]


def speed(name, mode, what="add", M=4096, widths=SWEEP):
    """The benchmark of one pass over some widths."""
    benchmark = triton.testing.Benchmark(
        x_names=["N"],
        x_vals=widths,
        line_arg="provider",
        line_vals=list(NAMES),
        line_names=list(NAMES.values()),
        ylabel="GB/s",
        plot_name=f"{name}-{mode}",
        args={"M": M, "dtype": torch.float16, "mode": mode, "what": what},
    )
    return triton.testing.perf_report(benchmark)(measure)


# %%
# Addition and layer norm, forward and then backward:

table = run(speed("add-layer-norm", "forward"))

# %%
claims(table)

# %%
table = run(speed("add-layer-norm", "backward"))

# %%
claims(table)

# %%
# SiLU and layer norm:

table = run(speed("silu-layer-norm", "forward", "silu", 4096, SWEEP[::2]))

# %%
claims(table)

# %%
table = run(speed("silu-layer-norm", "backward", "silu", 4096, SWEEP[::2]))

# %%
claims(table)

# %%
# The share of the copy is lower here: arithmetic takes about as long as
# memory, and the two do not overlap completely.
# SiLU moves fewer bytes for each element than the addition, and needs more
# instructions.
#
# * Forward a row waits in registers, as float32.
#   The wider the row, the fewer rows fit on a multiprocessor, and while one
#   waits for its sums, little else is there to compute.
#   That is why the curve is a saw: a tooth for each row that fits no more.
# * Backward a program remembers the sigmoids of its row up to 8192 columns.
#   In wider rows there is no room, and both halves compute them.
#
# In float32 the same instructions go with twice the bytes.
#
# Composable Kernel, AMD's library, has an example of such a kernel: number 45,
# forward only.
# Its matrix has 12288 rows of 1024 columns, and it refuses rows of 4096
# columns or more.
# The same number of rows here, with that width and others around it:

AROUND = [256, 512, 1024, 2048, 4096, 8192]
table = run(speed("example-45", "forward", "add", 12288, AROUND))

# %%
claims(table)

# %%
table = run(speed("example-45", "backward", "add", 12288, AROUND))

# %%
claims(table)

# %%
# What the fusion saved
# ---------------------
#
# A comparison with PyTorch mixes two things: better kernels, and fewer of
# them.
# To see the second alone, we take the chain apart and use our own layer norm
# in it, the same kernel without an elementwise stage.


def plain(x, shape, w, b, eps=1e-5):
    """Layer norm alone, by the kernels of this page."""
    shape = torch.Size(shape)
    return FusedLayerNorm.apply(x, None, w, b, shape, eps, None, 0.0, None)


def chain(norm, what, x, residual, shape, w, b):
    """Results of the unfused chain, around the given layer norm."""
    if what == "silu":
        return (norm(F.silu(x), shape, w, b),)
    if what == "dropout":
        x = torch.native_dropout(x, 0.1, True)[0]
    s = x + residual
    return norm(s, shape, w, b), s


def fused(what, x, residual, shape, w, b):
    if what == "silu":
        return (activation_layer_norm(x, shape, w, b),)
    p = 0.1 if what == "dropout" else 0.0
    return add_layer_norm(x, residual, shape, w, b, dropout_p=p, seed=1)


# %%
# First the count, for both.
# Our two operators can be counted like those of PyTorch.


def counted(what, mode):
    """Units that the fused pass must move, and those of the chain."""
    given = inputs(4096, 8192, torch.float16, "meta")
    x, residual, w, b, dy, ds = (t.detach() for t in given)
    act = "silu" if what == "silu" else None
    r, ds = (None, None) if act else (residual, ds)
    p = 0.1 if what == "dropout" else 0.0
    seed, row = torch.empty(1, device="meta"), torch.empty(4096, device="meta")
    wanted = [act is None, what != "add", True, True]
    with Traffic(x) as ours:
        if mode == "forward":
            FORWARD(x, r, w, b, 1e-5, act, p, seed)
        else:
            types = ["float16"] * 4
            BACKWARD(dy, ds, x, w, row, row, wanted, types, act, p, seed)
    with Traffic(x) as theirs:
        out = chain(F.layer_norm, what, *given[:2], (8192,), w, b)
        before = theirs.total()
        leaves = given[:1] if act else given[:2]
        torch.autograd.grad(out, leaves, (dy, ds)[: len(out)])
    after = theirs.total() - before
    return ours.total(), before if mode == "forward" else after


CHAINS, MODES = ("add", "dropout", "silu"), ("forward", "backward")
COUNTED = [(what, mode) for what in CHAINS for mode in MODES]


def saved():
    for what, mode in COUNTED:
        mine, theirs = counted(what, mode)
        print(
            f"{what:8} {mode:9} {mine:.1f} units, the chain {theirs:.1f}: "
            f"ratio {theirs / mine:.2f}"
        )


saved()

# %%
# And the clock.


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["case"],
        x_vals=[f"{what} {mode}" for what, mode in COUNTED],
        line_arg="provider",
        line_vals=["triton", "chain"],
        line_names=["Fused", "Chain"],
        ylabel="µs",
        plot_name="fused-and-chain",
        args={"M": 4096, "N": 15872},
    )
)
def measure_saved(M, N, case, provider):
    """Device time of one pass, from a CUDA graph replayed with an empty L2
    cache; median, 20 % and 80 % quantiles. The chain has the same layer norm
    kernels, without an elementwise stage."""
    what, mode = case.split()

    def prepare():
        x, residual, w, b, dy, ds = inputs(M, N, torch.float16)
        f = fused
        if provider == "chain":
            f = lambda *given: chain(plain, *given)
        given = what, x, residual, (N,), w, b
        if mode == "forward":
            return lambda: f(*given)
        out = f(*given)
        leaves = (x, w, b) if what == "silu" else (x, residual, w, b)
        grads = (dy, ds)[: len(out)]
        return lambda: torch.autograd.grad(
            out, leaves, grads, retain_graph=True
        )

    return [1000 * t for t in device_time(prepare)]


table = run(measure_saved)

# %%


def compare(table):
    """Print the counted and the measured ratio of each case."""
    if table is None:
        return
    for (what, mode), (_, row) in zip(COUNTED, table.iterrows(), strict=True):
        mine, theirs = counted(what, mode)
        measured = row["Chain (µs)"] / row["Fused (µs)"]
        print(
            f"{what:8} {mode:9} counted {theirs / mine:.2f}, "
            f"measured {measured:.2f}"
        )


compare(table)

# %%
# A saving counts in full where memory sets the pace.
# Where the measured ratio is below the count, something else does: the
# arithmetic of SiLU and of the generator, for which the chain has time while
# it waits for its many bytes.

# %%
# One pass or two
# ---------------
#
# The kernel for rows in registers computes the mean first and the variance
# second; the kernel for wide rows has Welford's method, as the example has.
# How much does the single pass cost in accuracy?
# The hard case is a row whose mean is large next to its standard deviation.
# The figure shows the error of 1 / standard deviation.
# For comparison: the mean of the squares minus the square of the mean, which
# is also one pass, and PyTorch.


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["ratio"],
        x_vals=[1, 10, 100, 1000, 10000, 100000],
        x_log=True,
        line_arg="provider",
        line_vals=["triton", "welford", "torch", "squares"],
        line_names=["Two passes", "Welford", "PyTorch", "Sums of squares"],
        ylabel="relative error",
        y_log=True,
        plot_name="one-pass-or-two",
        args={"M": 256, "N": 4096},
    )
)
def measure_statistics(M, N, ratio, provider):
    """Norm of the difference of rstd from float64, divided by its norm, for
    float32 rows whose mean is ratio standard deviations."""
    if not ON_GPU:
        raise NoGPU
    return [statistics_error(M, N, ratio, provider)] * 3


def statistics_error(M, N, ratio, provider):
    torch.manual_seed(0)
    x = ratio + torch.randn(M, N, device=DEVICE)
    exact = x.double().var(dim=1, correction=0) ** -0.5
    if provider == "torch":
        rstd = torch.native_layer_norm(x, (N,), None, None, 0.0)[2].flatten()
    elif provider == "squares":
        variance = (x * x).mean(dim=1) - x.mean(dim=1) ** 2
        rstd = variance.clamp_min(1e-12) ** -0.5
    else:
        plan = {"CHUNK": min(2048, N // 4), "num_warps": 8}
        plan = plan if provider == "welford" else None
        rstd = forward(x, None, None, None, 0.0, plan=plan)[2]
    return ((rstd - exact).norm() / exact.norm()).item()


table = run(measure_statistics)

# %%
# The same on a small matrix, here and now:

for ratio in 1, 1000, 100000:
    print(f"mean / std = {ratio}:", end="")
    for provider in "triton", "welford", "torch", "squares":
        error = statistics_error(2, 256, ratio, provider)
        print(f"  {provider} {error:.0e}", end="")
    print()

# %%
# With two passes an error of the mean enters the variance only as its square.
# Welford's method subtracts a mean that is still on its way, rounded anew at
# each step, and such errors enter as they are.
# So it loses digits in proportion to the ratio, but far fewer than the sums of
# squares, which lose them with its square.
# A row of a float16 matrix cannot have a ratio much beyond 1000: its numbers
# would all be the same.

# %%
# What can go wrong
# -----------------
#
# Each of these mistakes is made here once, next to the right way.
#
# **The gradient of the sum forgotten.**
# ``s`` is not only a step on the way to ``y``: the stream goes on with it.

torch.manual_seed(0)
s = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
w = torch.rand(8, dtype=torch.float64)
dy, ds = torch.randn(2, 3, 8, dtype=torch.float64)
y = F.layer_norm(s, (8,), w)
right = torch.autograd.grad((y, s), s, (dy, ds), retain_graph=True)[0]
wrong = torch.autograd.grad(y, s, dy)[0]
error = ((wrong - right).norm() / right.norm()).item()
print(f"wrong: only through y, relative error {error:.1f}")
print("right: through y, plus ds")

# %%
# **A new mask in the backward pass.**
# The gradient of a dropped element must be 0, and that of a kept one must not.

first, second = (torch.rand(1000) >= 0.5 for _ in range(2))
print("wrong:", (first != second).sum().item(), "of 1000 gradients")
print("right:", (first != first).sum().item(), "of 1000 gradients")

# %%
# **One seed for two layers.**
# Two layers with one seed drop the same elements, and so does one layer in
# every step of the training.
# The share of elements that both keep should be the product of the two shares.

masks = [kept(32, 128, 0.5, seed) for seed in (3, 3, 4)]
for name, other in ("wrong", masks[1]), ("right", masks[2]):
    share = (masks[0] & other).double().mean().item()
    print(f"{name}: both keep {share:.2f} of the elements, not 0.25")

# %%
# **A counter of 32 bits.**
# Element ``2**32`` has the number 0 again, and the same random bits.
# Beyond that many elements the mask repeats itself.

row = torch.tensor(2**32 // 8192 + 1)
print("wrong: counter", (row * 8192 % 2**32).item(), "for row", row.item())
print("right: counter", (0, row.item()), "for row", row.item())

# %%
# **An activation of 0 that is not 0.**
# The lanes beyond the row hold 0.
# A sigmoid makes one half of it, which enters the mean.

lanes = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 0.0, 0.0, 0.0]).sigmoid()
print("wrong:", lanes.sum().item() / 5)
print("right:", lanes[:5].sum().item() / 5)

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


# %%
# **Exercise 1: another activation.**
# The squared ReLU is :math:`f(x) = \max(x, 0)^2`.
# The stub has the value; what is the slope?
# The check runs the backward pass of this page with it.


@triton.jit
def _squared_relu(x):
    positive = tl.where(x > 0, x, 0)
    return positive * positive, positive * 0 + 1  # to do


def exercise_1(function):
    x, _, w, b, dy, _ = inputs(5, 24, torch.float32)
    ACTIVATIONS["squared relu"] = function
    y = activation_layer_norm(x, (24,), w, b, 1e-5, "squared relu")
    expected = F.layer_norm(F.relu(x) ** 2, (24,), w, b)
    return check(*(torch.autograd.grad(f, x, dy)[0] for f in (y, expected)))


exercise_1(_squared_relu)

# %%

# Solution 1


@triton.jit
def _squared_relu_solved(x):
    positive = tl.where(x > 0, x, 0)
    return positive * positive, 2 * positive


assert exercise_1(_squared_relu_solved)

# %%
# **Exercise 2: a mask from nothing.**
# This kernel shall turn ``dy`` into the gradient before a dropout with
# :math:`p = 1/2`, by the mask of this page.
# The stub scales all elements.


@triton.jit
def _dropout_bwd(dy_ptr, dx_ptr, seed, N, BLOCK: tl.constexpr):
    row = tl.program_id(0) + tl.zeros([1, 1], tl.int32)
    cols = tl.arange(0, BLOCK)[None, :]
    dy = tl.load(dy_ptr + row * N + cols, mask=cols < N, other=0)
    dx = dy * 2  # to do: only where the forward pass kept the element
    tl.store(dx_ptr + row * N + cols, dx, mask=cols < N)


def exercise_2(kernel):
    dy = inputs(5, 24, torch.float32)[4]
    dx = torch.empty_like(dy)
    kernel[(5,)](dy, dx, 11, 24, BLOCK=32)
    return check(dx, dy * kept(5, 24, 0.5, 11) * 2)


exercise_2(_dropout_bwd)

# %%

# Solution 2


@triton.jit
def _dropout_bwd_solved(dy_ptr, dx_ptr, seed, N, BLOCK: tl.constexpr):
    row = tl.program_id(0) + tl.zeros([1, 1], tl.int32)
    cols = tl.arange(0, BLOCK)[None, :]
    dy = tl.load(dy_ptr + row * N + cols, mask=cols < N, other=0)
    # Seed, row and chunk are those of the forward pass, so the bits are too.
    dx = _dropout(dy, seed, row, 0, 2**31)
    tl.store(dx_ptr + row * N + cols, dx, mask=cols < N)


assert exercise_2(_dropout_bwd_solved)

# %%
# **Exercise 3: count a fusion.**
# In a *post-norm* block the norm comes last: ``y = norm(dropout(x) +
# residual)``, and nobody uses the sum.
# The backward pass still needs it, so the forward pass has to keep it.
# How many units does the fused kernel move, forward and backward, for
# ``dropout_p = 0`` and for more?


def units():
    return {"forward": 4, "backward": 4, "dropout backward": 5}  # to do


def exercise_3(units):
    got = torch.tensor(list(units().values()), dtype=torch.float32)
    return check(got, torch.tensor([4.0, 3.0, 4.0]))


exercise_3(units)

# %%

# Solution 3


def units_solved():
    # Forward is the same. Backward has no ds to read: s and dy are read, the
    # gradient is written, with dropout a second one.
    return {"forward": 4, "backward": 3, "dropout backward": 4}


assert exercise_3(units_solved)

# %%
# References
# ----------
#
# * Jimmy Lei Ba, Jamie Ryan Kiros and Geoffrey E. Hinton, `Layer Normalization
#   <https://arxiv.org/abs/1607.06450>`_, 2016.
# * John K. Salmon and others, `Parallel random numbers: as easy as 1, 2, 3
#   <https://doi.org/10.1145/2063384.2063405>`_, 2011: counter-based
#   generators, among them Philox.
# * Milton Abramowitz and Irene A. Stegun, *Handbook of Mathematical
#   Functions*, 1964: formula 7.1.26.
# * Dan Hendrycks and Kevin Gimpel, `Gaussian Error Linear Units
#   <https://arxiv.org/abs/1606.08415>`_, 2016.
# * B. P. Welford, `Note on a method for calculating corrected sums of squares
#   and products <https://doi.org/10.1080/00401706.1962.10490022>`_, 1962.
# * AMD, `Composable Kernel
#   <https://github.com/ROCm/composable_kernel>`_: example 45.
