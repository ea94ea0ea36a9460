r"""
Softmax, both passes
====================

How often must softmax read a row?
Once if the row fits into registers, and twice if not: one sweep finds the
maximum and the sum together; the backward pass needs only the result.

.. math:: y_j = \frac{e^{x_j - m}}{s}, \qquad m = \max_j x_j, \qquad
   s = \sum_j e^{x_j - m}

Each exponent is 0 or less, so that no power overflows.
Read as written this takes three *sweeps*, reads of the row: for the maximum,
for the sum and for the result.
"""

# %%

# Scaffold: imports, and the interpreter where there is no GPU.

import os

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F

ON_GPU = torch.cuda.is_available()
if ON_GPU:
    # A stream of its own: CUDA graphs cannot record the default one.
    torch.cuda.set_stream(torch.cuda.Stream())
else:
    # The same kernels on the CPU, one program after the other, slowly.
    os.environ["TRITON_INTERPRET"] = "1"

import triton
import triton.language as tl

DEVICE = torch.device("cuda" if ON_GPU else "cpu")

# %%
# Two sweeps
# ----------
#
# The pair of maximum and sum of two parts of a row gives that of both: the
# sum of the part with the smaller maximum shrinks.


def pair(x):
    m = x.max(1, keepdim=True).values
    return m, (x - m).exp().sum(1, keepdim=True)


def merge(m1, s1, m2, s2):
    m = torch.maximum(m1, m2)
    return m, s1 * (m1 - m).exp() + s2 * (m2 - m).exp()


x = torch.randn(3, 8, dtype=torch.float64)
m, s = merge(*pair(x[:, :5]), *pair(x[:, 5:]))
assert torch.allclose((x - m).exp() / s, F.softmax(x, 1))

# %%
# So one sweep is enough for both, tile by tile, in any order.
# A tile has ``PAIRS`` rows of ``EACH`` *lanes*; each row has its own pair, and
# ``tl.reduce`` merges them at the end. The second sweep goes back from the
# end of the row, of which caches still have most.
#
# In lanes beyond the row ``x`` is :math:`-\infty`, and its power 0, as for
# what is masked by hand: but :math:`-\infty - (-\infty)` is NaN, so a maximum
# begins at the lowest finite number.

LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)


@triton.jit
def _exp(x):
    return tl.exp2(x * LOG2E)  # GPUs compute powers of 2


@triton.jit
def _merge(m1, s1, m2, s2):
    m = tl.maximum(m1, m2)
    return m, s1 * _exp(m1 - m) + s2 * _exp(m2 - m)


@triton.jit
def _softmax_fwd_streaming(
    x_ptr, y_ptr, N: tl.constexpr, PAIRS: tl.constexpr, EACH: tl.constexpr,
    LOG: tl.constexpr,  # of softmax
):  # fmt: skip
    DOUBLE: tl.constexpr = y_ptr.dtype.element_ty == tl.float64
    acc: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    lane = tl.arange(0, PAIRS)[:, None] * EACH + tl.arange(0, EACH)[None, :]
    row, TILE = tl.program_id(0).to(tl.int64), PAIRS * EACH
    x_ptr += row * N  # M * N may pass 2**31
    y_ptr += row * N
    m, s = tl.full((PAIRS,), LOWEST, acc), tl.zeros((PAIRS,), acc)
    for start in range(0, N, TILE):
        col = start + lane
        x = tl.load(x_ptr + col, mask=col < N, other=float("-inf"),
                    eviction_policy="evict_last").to(acc)  # fmt: skip
        new = tl.maximum(m, tl.max(x, 1))
        s = s * _exp(m - new) + tl.sum(_exp(x - new[:, None]), 1)
        m = new
    m, s = tl.reduce((m, s), 0, _merge)
    scale, log = 1 / s, tl.log(s)
    for start in range(0, N, TILE):
        col = (N - 1) // TILE * TILE - start + lane
        x = tl.load(x_ptr + col, mask=col < N, other=float("-inf"),
                    eviction_policy="evict_first").to(acc)  # fmt: skip
        y = x - m - log if LOG else _exp(x - m) * scale
        tl.store(y_ptr + col, y, mask=col < N)


# %%


@triton.jit
def _chunk(c, row, M, N: tl.constexpr, CHUNK: tl.constexpr,
           STEP: tl.constexpr):  # fmt: skip
    """Where the groups of rows start; lanes of a chunk; masks: groups with
    columns of the row, groups with nothing else, and all its columns."""
    first = tl.cast(row, tl.int64) * N  # M * N may pass 2**31
    start = first // STEP * STEP
    begin = (first - start).to(tl.int32)
    end = tl.where(row < M, begin + N, 0)
    lane = c * CHUNK + tl.arange(0, CHUNK)[None, :]
    group = lane // STEP * STEP
    inside = (lane >= begin) & (lane < end)
    whole = (group >= begin) & (group + STEP <= end)
    if STEP == 1:
        whole = lane < end
    return start, lane, group < end, whole, inside


@triton.jit
def _load_row(ptr, row, M, N: tl.constexpr, CHUNK: tl.constexpr,
              STEP: tl.constexpr, OTHER: tl.constexpr):  # fmt: skip
    """Chunks of a row; OTHER in lanes that hold no column of it."""
    xs = ()
    for c in tl.static_range((N + STEP - 2 + CHUNK) // CHUNK):
        start, lane, some, _, inside = _chunk(c, row, M, N, CHUNK, STEP)
        if row.shape[0] == 1 and (STEP == 1 or c > 0) and (c + 1) * CHUNK <= N:
            x = tl.load(ptr + start + lane)  # all lanes hold columns
        else:
            x = tl.load(ptr + start + lane, mask=some, other=OTHER)
            if STEP > 1:
                none = tl.full((), OTHER, tl.float32).to(x.dtype)
                x = tl.where(inside, x, none)
        xs += (x,)
    return xs


@triton.jit
def _store_chunk(ptr, x, c, row, M, N: tl.constexpr, STEP: tl.constexpr):
    CHUNK: tl.constexpr = x.shape[1]
    start, lane, _, whole, inside = _chunk(c, row, M, N, CHUNK, STEP)
    if row.shape[0] == 1 and (STEP == 1 or c > 0) and (c + 1) * CHUNK <= N:
        tl.store(ptr + start + lane, x)
    else:
        tl.store(ptr + start + lane, x, mask=whole)
        if STEP > 1:
            tl.store(ptr + start + lane, x, mask=inside & (whole == 0))


@triton.jit
def _softmax_fwd(
    x_ptr, y_ptr, M, N: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
    STEP: tl.constexpr, LOG: tl.constexpr,
):  # fmt: skip
    DOUBLE: tl.constexpr = y_ptr.dtype.element_ty == tl.float64
    acc: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    xs = _load_row(x_ptr, row, M, N, CHUNK, STEP, float("-inf"))
    m = tl.full((ROWS, CHUNK), LOWEST, acc)
    for c in tl.static_range(len(xs)):
        m = tl.maximum(m, xs[c].to(acc))
    m = tl.max(m, 1)[:, None]
    s = tl.zeros((ROWS, CHUNK), acc)
    for c in tl.static_range(len(xs)):
        s += _exp(xs[c].to(acc) - m)
    s = tl.sum(s, 1)[:, None]
    scale, log = 1 / s, tl.log(s)
    for c in tl.static_range(len(xs)):
        d = xs[c].to(acc) - m
        y = d - log if LOG else _exp(d) * scale
        _store_chunk(y_ptr, y, c, row, M, N, STEP)


@triton.jit
def _softmax_bwd(
    y_ptr, dy_ptr, dx_ptr, M, N: tl.constexpr, ROWS: tl.constexpr,
    CHUNK: tl.constexpr, STEP: tl.constexpr, LOG: tl.constexpr,
):  # fmt: skip
    DOUBLE: tl.constexpr = y_ptr.dtype.element_ty == tl.float64
    acc: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    ys = _load_row(y_ptr, row, M, N, CHUNK, STEP, 0.0)
    dys = _load_row(dy_ptr, row, M, N, CHUNK, STEP, 0.0)
    total = tl.zeros((ROWS, CHUNK), acc)
    for c in tl.static_range(len(ys)):
        dy = dys[c].to(acc)
        total += dy if LOG else ys[c].to(acc) * dy
    total = tl.sum(total, 1)[:, None]
    for c in tl.static_range(len(ys)):
        y, dy = ys[c].to(acc), dys[c].to(acc)
        dx = dy - _exp(y) * total if LOG else y * (dy - total)
        _store_chunk(dx_ptr, dx, c, row, M, N, STEP)


@triton.jit
def _softmax_bwd_streaming(
    y_ptr, dy_ptr, dx_ptr, N: tl.constexpr, BLOCK: tl.constexpr,
    LOG: tl.constexpr,
):  # fmt: skip
    DOUBLE: tl.constexpr = y_ptr.dtype.element_ty == tl.float64
    acc: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    row = tl.program_id(0).to(tl.int64)
    y_ptr += row * N
    dy_ptr += row * N
    total = tl.zeros((BLOCK,), acc)
    for start in range(0, N, BLOCK):
        col = start + tl.arange(0, BLOCK)
        dy = tl.load(dy_ptr + col, mask=col < N, other=0,
                     eviction_policy="evict_last").to(acc)  # fmt: skip
        if not LOG:
            dy *= tl.load(y_ptr + col, mask=col < N, other=0,
                          eviction_policy="evict_last").to(acc)  # fmt: skip
        total += dy
    total = tl.sum(total)
    for start in range(0, N, BLOCK):
        col = (N - 1) // BLOCK * BLOCK - start + tl.arange(0, BLOCK)
        y = tl.load(y_ptr + col, mask=col < N, other=0,
                    eviction_policy="evict_first").to(acc)  # fmt: skip
        dy = tl.load(dy_ptr + col, mask=col < N, other=0,
                     eviction_policy="evict_first").to(acc)  # fmt: skip
        dx = dy - _exp(y) * total if LOG else y * (dy - total)
        tl.store(dx_ptr + row * N + col, dx, mask=col < N)


# %%

CUDA = ON_GPU and torch.version.hip is None


def step_of(N, *matrices):
    """Lanes of a group of 16 bytes; 1 where rows begin with a group."""
    step = 16 // matrices[-1].itemsize
    if N % step == 0 or torch.compiler.is_compiling():
        return 1
    return 1 if any(t.data_ptr() % 16 for t in matrices) else step


def tile_of(N, itemsize, step):
    row = N * itemsize
    warps = max(triton.next_power_of_2(triton.cdiv(row, 4096)), 2)
    warps = 4 if row <= 512 else warps
    lanes = 512 // itemsize * warps
    chunk = min(lanes, triton.next_power_of_2(N + step - 1))
    rows = 2 * lanes // chunk if row <= 512 else 1
    return {"ROWS": rows, "CHUNK": chunk, "STEP": step, "num_warps": warps}


def plan_forward(N, itemsize, step):
    if N * itemsize > 32768:
        plan = {"PAIRS": 1024, "EACH": 16 // itemsize, "num_warps": 32}
        return plan | ({"maxnreg": 32} if CUDA and itemsize < 8 else {})
    plan = tile_of(N, itemsize, step)
    return plan | ({"maxnreg": 80} if CUDA and plan["num_warps"] == 8 else {})


def plan_backward(N, itemsize, step):
    if N * itemsize > 65536:
        return {"BLOCK": 8192 // itemsize, "num_warps": 16}
    plan = tile_of(N, itemsize, step)
    return plan | ({"maxnreg": 128} if CUDA and plan["num_warps"] == 8 else {})


def forward(x, log=False, dtype=None, plan=None):
    """Softmax, or its log, over the last dimension of a contiguous x."""
    N, y = x.shape[-1], torch.empty_like(x, dtype=dtype)
    M = x.numel() // max(N, 1)
    plan = plan or plan_forward(N, y.itemsize, step_of(N, x, y))
    if "PAIRS" in plan:
        _softmax_fwd_streaming[(M,)](x, y, N, LOG=log, **plan)
    else:
        grid = (triton.cdiv(M, plan["ROWS"]),)
        _softmax_fwd[grid](x, y, M, N, LOG=log, **plan)
    return y


def backward(y, dy, log=False, dtype=None, plan=None):
    N, dx = y.shape[-1], torch.empty_like(y, dtype=dtype)
    M = y.numel() // max(N, 1)
    plan = plan or plan_backward(N, y.itemsize, step_of(N, dx, dy, y))
    if "BLOCK" in plan:
        _softmax_bwd_streaming[(M,)](y, dy, dx, N, LOG=log, **plan)
    else:
        grid = (triton.cdiv(M, plan["ROWS"]),)
        _softmax_bwd[grid](y, dy, dx, M, N, LOG=log, **plan)
    return dx
