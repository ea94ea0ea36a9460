r"""
Nothing Between Two Kernels
===========================

Fuse a residual addition, dropout or an activation with the layer norm that
follows, forward and backward, so that nothing is written in between.

You will be able to:

* count what a fusion saves before any of it is written, and measure it after;
* return two results from one kernel, and join their two gradients in one;
* drop elements at random without ever storing which;
* hand a function to a kernel, with its derivative, as a constant;
* compute a variance in one pass and say what that costs in accuracy.

This page assumes the first page, which derives the gradients, and the second,
which explains the persistent backward kernel and its sums.
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

import importlib.util
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
# PyTorch can tell us what a chain moves.
# A *dispatch mode* sees every operator that PyTorch runs, forward and
# backward.
# We add up what each of them must read and write.
# The unit is one matrix of the size and type of ``x``.


class Traffic(TorchDispatchMode):
    """Adds up the sizes of what operators read and write."""

    def __init__(self, unit):
        super().__init__()
        self.unit, self.lines = unit.numel() * unit.itemsize, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        read = {t.data_ptr(): t for t in tensors_in(args)}
        written = {t.data_ptr(): t for t in tensors_in(out)}
        # A view writes nothing: its result lies where its input lies.
        if written and not set(written) & set(read):
            size = sum(
                t.untyped_storage().nbytes()
                for t in (*read.values(), *written.values())
            )
            self.lines.append((func.name(), size / self.unit))
        return out

    def total(self):
        return sum(units for _, units in self.lines)


def tensors_in(value):
    """All tensors in nested tuples and lists."""
    if isinstance(value, torch.Tensor):
        return [value] if value.numel() else []
    if isinstance(value, (tuple, list)):
        return [t for part in value for t in tensors_in(part)]
    return []


# %%
# The chain as everybody writes it, and what it moves:


def add_chain(x, residual, shape, w, b, eps=1e-5, dropout_p=0.0, seed=None):
    if dropout_p > 0:  # what F.dropout calls on a GPU
        x = torch.native_dropout(x, dropout_p, True)[0]
    s = x + residual
    return F.layer_norm(s, shape, w, b, eps), s


def inputs(M, N, dtype):
    """x, residual, w, b that want gradients, then dy and ds."""
    torch.manual_seed(0)
    x, dy, ds = torch.randn(3, M, N, device=DEVICE)
    residual = -2.3 + 0.5 * torch.randn(M, N, device=DEVICE)
    w, b = torch.rand(2, N, device=DEVICE)
    leaves = [t.to(dtype).requires_grad_() for t in (0.5 * x, residual, w, b)]
    return *leaves, (0.1 * dy).to(dtype), (0.1 * ds).to(dtype)


M, N = (1024, 1024) if ON_GPU else (64, 256)
x, residual, w, b, dy, ds = inputs(M, N, torch.float16)
for dropout_p in 0.0, 0.1:
    with Traffic(x) as traffic:
        y, s = add_chain(x, residual, (N,), w, b, dropout_p=dropout_p)
        torch.autograd.grad((y, s), (x, residual, w, b), (dy, ds))
    print(f"dropout_p = {dropout_p}: {traffic.total():.1f} units")
    for name, units in traffic.lines:
        print(f"  {name:35} {units:.1f}")

# %%
# The rest that is not a whole or a half is ``w``, ``b`` and the row statistics.
# A mask of booleans counts half a unit beside float16.
# The true traffic is larger: the layer norm of PyTorch reads its input more
# than once.
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
# PyTorch stores it as a matrix of booleans.
# We compute it a second time.
#
# That works with a *counter-based* generator, here Philox.
# It has no state: it is a function that turns a key and a counter into random
# bits.
# The key is the seed, and the counter says for which element the bits are.
# So every element of every program gets its bits at any time, in any order.
#
# * One call of ``tl.philox`` gives four words of 32 bits, so four neighbors
#   share a call.
#   ``tl.rand`` would throw away three of them.
# * The counter is a pair: the group of four columns, and the row.
#   The position ``row * N + column`` needs 64 bits in a large matrix, and with
#   64-bit counters Triton runs a slower generator, or drops the upper half.
# * Nothing in it depends on how a kernel cuts a row, so a kernel that cuts it
#   in another way makes the same mask.
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
# A kernel that is written for SiLU is of no use for GELU.
# But a ``@triton.jit`` function can be an argument of a kernel, if it is a
# ``tl.constexpr``: the compiler then puts its instructions in place of the
# call, as if they had been written there.
#
# Each function returns its value and its slope.
# The forward pass uses the value only, and the compiler removes the rest.
#
# GELU has two forms, and PyTorch has both.
# ``gelu`` is exact, with the error function; ``gelu_tanh`` is the
# approximation that many models were trained with.
# It is written with a sigmoid, because
# :math:`\frac{1}{2}(1 + \tanh u) = \mathrm{sigmoid}(2 u)`.


@triton.jit
def _silu(x):
    sigmoid = tl.sigmoid(x)
    return x * sigmoid, sigmoid * (1 + x * (1 - sigmoid))


@triton.jit
def _gelu(x):
    below = 0.5 * (1 + tl.erf(x * 0.7071067811865476))  # 1 / sqrt(2)
    density = tl.exp(-0.5 * x * x) * 0.3989422804014327  # 1 / sqrt(2 pi)
    return x * below, below + x * density


@triton.jit
def _gelu_tanh(x):
    # 2 sqrt(2 / pi) (x + 0.044715 x**3), divided by x; and its derivative
    u = 1.5957691216057308 * (1 + 0.044715 * x * x)
    du = 1.5957691216057308 * (1 + 3 * 0.044715 * x * x)
    sigmoid = tl.sigmoid(x * u)
    return x * sigmoid, sigmoid * (1 + x * du * (1 - sigmoid))


ACTIVATIONS = {"silu": _silu, "gelu": _gelu, "gelu_tanh": _gelu_tanh}

# %%
# Forward
# -------
#
# A row is held in registers as a tuple of chunks, as on the second page.
# Two helpers load and store a chunk.
# They use a mask only where a lane can be outside.


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
# The first loop is the elementwise stage.
# What it leaves in registers is what the chain would have written to memory.
#
# * The sum is rounded to the type of ``s`` before the statistics are
#   computed, so ``y`` is the layer norm of the ``s`` that is returned.
# * An activation is never returned, so it is never rounded either.
# * Lanes beyond the row hold 0, but :math:`f(0)` need not be 0.
#   They are set to 0 after the activation.


@triton.jit
def _fused_layer_norm_fwd(
    x_ptr,  # (M, N), contiguous, as all matrices here
    r_ptr,  # the residual, or None
    w_ptr, b_ptr,  # (N,) or None
    y_ptr,
    s_ptr,  # dropout(x) + residual, or None
    mean_ptr, rstd_ptr,  # (M,)
    seed,  # an integer, or a pointer to one; None without dropout
    M, eps: tl.constexpr, N: tl.constexpr,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, EVEN: tl.constexpr,  # the tile
    ACT: tl.constexpr,  # a function that returns value and slope, or None
    DROP: tl.constexpr,
):  # fmt: skip
    acc: tl.constexpr = mean_ptr.dtype.element_ty
    CHUNKS: tl.constexpr = (N + CHUNK - 1) // CHUNK
    first = tl.cast(tl.program_id(0), tl.int64) * ROWS  # may pass 2**31 / N
    left = M - tl.program_id(0) * ROWS
    row = tl.arange(0, ROWS)[:, None]
    seed = _value_of(seed, DROP)
    held = ()
    for c in tl.static_range(CHUNKS):
        a = _load(x_ptr + first * N, row, c, left, N, CHUNK, EVEN)
        if ACT is not None:
            a, _ = ACT(a.to(acc))
            if (c + 1) * CHUNK > N:
                a = tl.where(_column(c, CHUNK) < N, a, 0)
        if r_ptr is not None:
            r = _load(r_ptr + first * N, row, c, left, N, CHUNK, EVEN)
            number = tl.program_id(0) * ROWS + row
            a = _dropout(a.to(acc), seed, number, c, DROP) + r.to(acc)
            a = a.to(s_ptr.dtype.element_ty)
            _store(s_ptr + first * N, a, row, c, left, N, CHUNK, EVEN)
        held += (a,)
    mean, rstd = _statistics(held, eps, N, acc)
    tl.store(mean_ptr + first + row, mean, mask=row < left)
    tl.store(rstd_ptr + first + row, rstd, mask=row < left)
    for c in tl.static_range(CHUNKS):
        y = _affine((held[c].to(acc) - mean) * rstd, w_ptr, b_ptr, c, N)
        _store(y_ptr + first * N, y, row, c, left, N, CHUNK, EVEN)


# %%
# The rest is as on the earlier pages: mean first, variance second, ``w`` and
# ``b`` loaded last.


@triton.jit
def _column(c, CHUNK: tl.constexpr):
    return tl.arange(0, CHUNK)[None, :] + c * CHUNK


@triton.jit
def _value_of(seed, DROP: tl.constexpr):
    if DROP > 0 and seed.dtype.is_ptr():
        seed = tl.load(seed)
    return seed


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
# A wide row does not fit into registers.
# Then a program goes over it twice: once to compute and store ``s`` and its
# statistics, once more, from the end to the start, to write ``y``.
# What was written last is still in a cache.
#
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
def _welford_step(a, mask, c, mean, m2, count):
    """One more element for each lane."""
    n = tl.cast(c + 1, mean.dtype)
    d = tl.where(mask, a - mean, 0)
    mean += d / n
    m2 += d * d * ((n - 1) / n)
    return mean, m2, count + tl.where(mask, 1.0, 0.0).to(mean.dtype)


# %%
# The second sweep reads what other threads of the program may have written,
# so a barrier stands between the two.


@triton.jit
def _fused_layer_norm_fwd_sweeps(
    x_ptr, r_ptr, w_ptr, b_ptr, y_ptr, s_ptr, mean_ptr, rstd_ptr, seed,
    eps: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr,
    ACT: tl.constexpr, DROP: tl.constexpr,
):  # fmt: skip
    acc: tl.constexpr = mean_ptr.dtype.element_ty
    CHUNKS: tl.constexpr = (N + CHUNK - 1) // CHUNK
    number = tl.program_id(0) + tl.zeros([1, 1], tl.int32)
    first = tl.cast(tl.program_id(0), tl.int64) * N
    seed = _value_of(seed, DROP)
    mean = tl.zeros([1, CHUNK], acc)
    m2 = tl.zeros([1, CHUNK], acc)
    count = tl.zeros([1, CHUNK], acc)
    for c in tl.range(0, CHUNKS, num_stages=1):
        col = _column(c, CHUNK)
        mask = col < N
        a = tl.load(x_ptr + first + col, mask=mask, other=0).to(acc)
        if ACT is not None:
            a, _ = ACT(a)
        if r_ptr is not None:
            r = tl.load(r_ptr + first + col, mask=mask, other=0)
            a = _dropout(a, seed, number, c, DROP) + r.to(acc)
            s = a.to(s_ptr.dtype.element_ty)
            tl.store(s_ptr + first + col, s, mask=mask)
            a = s.to(acc)
        mean, m2, count = _welford_step(a, mask, c, mean, m2, count)
    mean, m2, _ = tl.reduce((mean, m2, count), 1, _merge)
    rstd = 1 / tl.sqrt(m2 / N + eps)
    row = tl.program_id(0) + tl.arange(0, 1)
    tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)
    tl.debug_barrier()
    for i in tl.range(0, CHUNKS, num_stages=1):
        c = CHUNKS - 1 - i
        col = _column(c, CHUNK)
        if r_ptr is not None:
            a = tl.load(s_ptr + first + col, mask=col < N, other=0).to(acc)
        else:
            a = tl.load(x_ptr + first + col, mask=col < N, other=0).to(acc)
        if ACT is not None:
            a, _ = ACT(a)
        x_hat = (a - mean[:, None]) * rstd[:, None]
        y = _affine(x_hat, w_ptr, b_ptr, c, N)
        tl.store(y_ptr + first + col, y, mask=col < N)


# %%
# Which of the two, and with how many warps, depends on the width alone.
# ``n`` is the width in units of 16 bits.


def plan_forward(N, itemsize):
    """Options of the kernel for rows of N elements; sweeps have no ROWS."""
    n = N * itemsize // 2
    if n > 24576:
        return {"CHUNK": 16384 // itemsize, "num_warps": 16}
    warps = 2 if n <= 1024 else 4 if n <= 5120 else 8 if n <= 15872 else 16
    chunk = min(max(triton.next_power_of_2(N), 16), 512 * warps // itemsize)
    rows = min(max(2048 // itemsize // chunk, 1), 16) if n <= 1024 else 1
    return {"ROWS": rows, "CHUNK": chunk, "num_warps": warps}


def forward(x, r, w, b, eps, activation=None, p=0.0, seed=None, plan=None):
    """y, s, mean and rstd for contiguous matrices; s is None without r."""
    M, N = x.shape
    s = None
    if r is not None:
        s = torch.empty_like(x, dtype=torch.promote_types(x.dtype, r.dtype))
    y = torch.empty_like(x if s is None else s)
    acc = torch.promote_types(y.dtype, torch.float32)
    mean = torch.empty(M, dtype=acc, device=x.device)
    rstd = torch.empty_like(mean)
    given = x, r, w, b, y, s, mean, rstd, seed if p > 0 else None
    stage = {"ACT": ACTIVATIONS.get(activation), "DROP": round(p * 2**32)}
    plan = plan or plan_forward(N, y.itemsize)
    if "ROWS" in plan:
        grid = (triton.cdiv(M, plan["ROWS"]),)
        even = M % plan["ROWS"] == 0
        _fused_layer_norm_fwd[grid](
            *given, M, eps, N, EVEN=even, **stage, **plan
        )
    else:
        _fused_layer_norm_fwd_sweeps[(M,)](*given, eps, N, **stage, **plan)
    return y, s, mean, rstd


# %%
# A first check, against PyTorch:

M, N = (1151, 8192) if ON_GPU else (9, 200)
x, residual, w, b, dy, ds = (
    t.detach() for t in inputs(M, N, torch.float32)
)
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
# What is new stands around it: ``s`` has two readers, and three things happened
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
    found = torch.empty(2, 200, dtype=torch.float64, device=DEVICE)
    _apply[(1,)](
        x.detach().to(DEVICE), found, 200, ACT=ACTIVATIONS[name], BLOCK=256
    )
    assert_close(found.cpu(), torch.stack([expected, slope]).detach())

# %%
# Backward: one pass over memory
# ------------------------------
#
# The kernel is the last rung of the second page: persistent programs, loads
# that run ahead, sums in registers, one row of partial sums for each program.
# It has one more matrix to read, and that changes two things.
#
# * ``mean`` and ``rstd`` are known, so ``dw`` and ``db`` are updated in the
#   first half, before the sums of the row are there.
# * ``ds`` is needed in the second half only, and is taken from shared memory
#   only there.
#
# In between a row has to be kept: ``x``, ``dy`` and ``w``.
# Here registers decide how wide a row may be.
# In 16 bits two numbers share a register, but the compiler does not leave it
# at that: it sees that both halves need them in float32, converts them once,
# and keeps the float32 numbers.
# That needs twice the registers, and beyond 12288 columns there are none left.
#
# So we make it forget.
# ``_forget`` returns ``x`` combined by exclusive or with a 0 of which the
# compiler does not know that it is 0.
# It costs one instruction for two numbers, and a row of 16384 columns fits.
# The instruction is written in the assembly language of NVIDIA GPUs, because
# only there we can say that one register holds two numbers.
# Other devices, and the interpreter, do without.


@triton.jit
def _forget(x, zero, PTX: tl.constexpr):
    """x; but whoever converted x before must convert it again."""
    if PTX and x.dtype.primitive_bitwidth == 16:
        x = tl.inline_asm_elementwise(
            "xor.b32 $0, $1, $2;", "=r,r,r", [x, zero.to(tl.int16)],
            dtype=x.dtype, is_pure=True, pack=2,
        )  # fmt: skip
    return x


# %%
# ``w`` stays for all rows.
# From one turn of a loop to the next, a number of 16 bits takes a register of
# its own.
# So two of them are packed into a word, and unpacked in every turn.


@triton.jit
def _pack(tile, PTX: tl.constexpr):
    if PTX and tile.dtype.primitive_bitwidth == 16:
        bits = tile.to(tl.uint16, bitcast=True)
        low, high = tl.split(
            tl.reshape(bits, [tile.shape[0], tile.shape[1] // 2, 2])
        )
        return low.to(tl.uint32) | (high.to(tl.uint32) << 16)
    else:
        return tile


@triton.jit
def _unpack(words, dtype: tl.constexpr, PTX: tl.constexpr):
    if PTX and dtype.primitive_bitwidth == 16:
        low = words.to(tl.uint16).to(dtype, bitcast=True)
        high = (words >> 16).to(tl.uint16).to(dtype, bitcast=True)
        pairs = tl.join(low, high)
        return tl.reshape(pairs, [words.shape[0], words.shape[1] * 2])
    else:
        return words


# %%
# The two halves of a row.
# With :math:`\hat{x} = (s - \mu) \, r` the factors :math:`r` leave the sums,
# and are applied once for a row.


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
# And the kernel.


@triton.jit
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
    PDL: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    acc: tl.constexpr = mean_ptr.dtype.element_ty
    kind: tl.constexpr = w_ptr.dtype.element_ty
    CHUNKS: tl.constexpr = (N + CHUNK - 1) // CHUNK
    row = tl.arange(0, ROWS)[:, None]
    seed = _value_of(seed, DROP)
    ws, dws, dbs = (), (), ()
    for c in tl.static_range(CHUNKS):
        ws += (_pack(_load(w_ptr, row * 0, c, 1, N, CHUNK, True), PTX),)
        dws += (tl.zeros([ROWS, CHUNK], acc),)
        dbs += (tl.zeros([ROWS, CHUNK], acc),)
    for tile in tl.range(
        tl.program_id(0), tl.cdiv(M, ROWS), tl.num_programs(0),
        num_stages=STAGES, disable_licm=True,
    ):  # fmt: skip
        dws, dbs = _one_tile(
            dy_ptr, ds_ptr, x_ptr, mean_ptr, rstd_ptr, dr_ptr, dx_ptr, seed,
            tile, row, ws, dws, dbs, kind, M, N, CHUNK, EVEN, ACT, DROP, PTX,
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
    ACT: tl.constexpr, DROP: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    acc: tl.constexpr = mean_ptr.dtype.element_ty
    ROWS: tl.constexpr = row.shape[0]
    first = tl.cast(tile, tl.int64) * ROWS
    left = M - tile * ROWS
    mean = _load(mean_ptr + first, row, 0, left, 1, 1, EVEN)
    rstd = _load(rstd_ptr + first, row, 0, left, 1, 1, EVEN)
    xs, dys, new_dws, new_dbs = (), (), (), ()
    sum1 = tl.zeros([ROWS, CHUNK], acc)
    sum2 = tl.zeros([ROWS, CHUNK], acc)
    for c in tl.static_range((N + CHUNK - 1) // CHUNK):
        x = _load(x_ptr + first * N, row, c, left, N, CHUNK, EVEN)
        dy = _load(dy_ptr + first * N, row, c, left, N, CHUNK, EVEN)
        w = _unpack(ws[c], kind, PTX)
        one, two, dw, db = _first_half(x, dy, w, mean, rstd, ACT)
        sum1 += one
        sum2 += two
        xs += (x,)
        dys += (dy,)
        new_dws += (dws[c] + dw,)
        new_dbs += (dbs[c] + db,)
    sum1, sum2 = tl.reduce((sum1, sum2), 1, _add_pairs)
    sum1, sum2 = sum1[:, None], sum2[:, None]
    zero = (sum1 != sum1).to(tl.int32)
    for c in tl.static_range((N + CHUNK - 1) // CHUNK):
        x, dy = _forget(xs[c], zero, PTX), _forget(dys[c], zero, PTX)
        w = _forget(_unpack(ws[c], kind, PTX), zero, PTX)
        g = _second_half(x, dy, w, mean, rstd, sum1, sum2, N, ACT)
        if ds_ptr is not None:
            ds = _load(ds_ptr + first * N, row, c, left, N, CHUNK, EVEN)
            g += ds.to(acc)
        if dr_ptr is not None:
            _store(dr_ptr + first * N, g, row, c, left, N, CHUNK, EVEN)
        if dx_ptr is not None:
            g = _dropout(g, seed, tile * ROWS + row, c, DROP)
            _store(dx_ptr + first * N, g, row, c, left, N, CHUNK, EVEN)
    return new_dws, new_dbs
