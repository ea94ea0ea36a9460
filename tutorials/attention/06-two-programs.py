r"""
Two programs on an SM
=====================

How can a model train with our attention as fast as with a library's?
Each program of the backward pass takes half of an SM, so two of them share
one, and while one computes powers, begins or ends, the other one can multiply.

The forward kernel of `Attention with warps that only load
<05-warp-specialization.html>`_ is as fast as cuDNN or faster with long
sequences. In the backward pass the same form brought little, and one of its
two kernels stayed in plain Triton. Now both are in Gluon, in another form,
which serves heads of 64 numbers, too.

Do you only want to use it? `Programs that stay <07-programs-that-stay.html>`_
has a better forward kernel beside those of this page, and offers
``fast_attention.py``, a module with all of them.

The function that we end with takes what that of `Causal, grouped, any length
<03-any-attention.html>`_ takes, and gives the same. On Hopper GPUs, such as
the H100 and the H200, heads of 33 to 128 numbers in 16 bits get the kernels in
Gluon, those of 33 to 64 only in the backward pass. Everything else gets plain
ones.

**What you will learn**

- How many programs fit on an SM, and what decides it.
- Why a second program on an SM can be worth more than more buffers.
- How a product takes a subtraction along, and saves registers.
- How a compiler can make a kernel slow while the usual numbers say nothing,
  and where to look.

**What you need:** `Attention with warps that only load
<05-warp-specialization.html>`_, whose barriers and whose loading warp are used
here without explaining them again. You don't need a GPU: plain kernels stand
in for those in Gluon, and the exercise is in plain Triton.
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

# Scaffold: more imports, and those of Gluon.

import functools

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import (
    TensorDescriptor as GluonDescriptor,
)
from triton.tools.tensor_descriptor import TensorDescriptor

# From Triton 3.9 on these two have shorter names.
FETCH = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
STORE = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global

# %%
# What fits on an SM
# ------------------
#
# A program runs on one SM, and keeps its registers and its shared memory until
# it ends. As soon as an SM has enough of both left, it may take one more
# program. Nobody tells it how many to take.
#
# The forward kernel has two groups of four warps that multiply, and a warp
# that loads, which is started with three idle ones. That makes 384 threads.
# They are started with 168 registers each, and pass them on later: those that
# load keep 24, and those that multiply get 240. With 128 numbers in a head its
# tiles take 161 KB. So one program fills an SM. While it waits for its first
# tiles, nobody multiplies there, and while it writes its results, nobody does
# either.
#
# Now we split the program in two. Each has one group that multiplies, a
# loading warp of its own, and half of the queries. Just as many warps multiply
# on an SM as before. But each program begins and ends at its own time, and
# while it does, the other one has the Tensor Cores for itself. The price is
# paid in loads: a tile of keys serves 64 queries, and before it served 128.
#
# Both must fit, so each may have half of what an SM has. The last two lines
# are for the kernel of the queries, with 128 numbers in a head:


def programs_on_an_sm(threads, registers, kilobytes):
    """How many fit: an SM of Hopper has 65536 registers and 228 KB of shared
    memory, and each program takes 1 KB more than it asks for."""
    by_registers = 65536 // (threads * registers)
    by_memory = int(228 // (kilobytes + 1))
    return min(by_registers, by_memory)


for said, *needs in (
    ("two groups, as forward", 384, 168, 161),
    ("one group, two buffers", 256, 128, 113),
    ("one group, four buffers", 256, 128, 177),
):
    print(f"{said}: {programs_on_an_sm(*needs)} programs")

# %%
# The last line shows how easily the second program is lost. More buffers let
# the loading warp run further ahead, which sounds good. But they take its
# room. We will measure that, too.
#
# When one program begins or ends, the other one can multiply, and no barrier
# between them is needed. The lengths are not measured:

# %%

# Drawing: what the Tensor Cores of an SM do while programs begin and end.

plt.figure(
    "Above, one program with two groups of warps begins, multiplies and ends, "
    "and then the next one begins. Below are two programs with a group each: "
    "while one begins or ends, the other one multiplies.",
    figsize=(7.5, 2.4),
)
LINES = (
    # height, and from which time on a program begins
    (2.8, "one program, two groups", (0, 6)),
    (1.4, "first program, one group", (0, 6)),
    (0.4, "second program, one group", (2.5, 8.5)),
)
PARTS = (
    # from which time on, for how long
    ("begins", 0, 1, "0.5"),
    ("multiplies", 1, 4, "C0"),
    ("ends", 5, 1, "0.5"),
)
for height, program, starts in LINES:
    plt.text(-0.2, height, program, va="center", ha="right")
    for start in starts:
        for what, at, length, color in PARTS:
            left = start + at
            if left + length > 12.5:
                continue
            plt.barh(height, length - 0.05, 0.8, left, color=color)
            plt.text(
                left + length / 2,
                height,
                what,
                color="white",
                ha="center",
                va="center",
                fontsize=6,
            )
plt.annotate("", (12.5, -0.4), (0, -0.4), arrowprops={"arrowstyle": "->"})
plt.text(6, -0.5, "time", ha="center", va="top")
plt.axis((-5.4, 12.7, -1.2, 3.3))
plt.axis("off")
plt.show()

# %%
# Who says that a program may have 128 registers a thread and no more? We do,
# when we launch it: ``maxnreg=128``. Of 256 threads, 128 belong to the loading
# warp and its three idle neighbors. They keep 24 each and give back the rest.
# The group that multiplies takes that, and has 232 each: (232 + 24) · 128 is
# 32768, half of the registers of an SM.
#
# What stays as it was is folded here: the plain kernels, their launches, and
# the forward kernel in Gluon.

# %%

# Scaffold: layouts that a descriptor takes, from page 03.

LOG2E = 1.4426950408889634  # the logarithm of e, to the base 2


def width_of(D):
    """Columns of a tile for rows of D numbers: a power of two, at least 16,
    which is the least that a product of tiles takes."""
    return max(triton.next_power_of_2(D), 16)


def rows_like(t):
    """An empty tensor of the same shape and order of dimensions, whose rows
    begin at multiples of 16 bytes."""
    D = t.shape[-1]
    unit = 16 // t.itemsize
    padded = triton.cdiv(D, unit) * unit
    # The dimension with the largest stride comes first in memory.
    order = sorted(range(3), key=lambda dimension: -t.stride(dimension))
    shape = [t.shape[dimension] for dimension in order]
    memory = torch.empty(*shape, padded, dtype=t.dtype, device=t.device)
    places = [order.index(dimension) for dimension in range(3)]
    return memory.permute(*places, 3)[..., :D]


def for_descriptors(t):
    """The tensor, or a copy of it that a descriptor takes."""
    aligned = t.data_ptr() % 16 == 0 and t.stride(-1) == 1
    for stride in t.stride()[:-1]:
        # A stride of 0, as an expanded tensor has it, is copied, too.
        if stride <= 0 or stride * t.itemsize % 16:
            aligned = False
    if aligned:
        return t
    return rows_like(t).copy_(t)


def tiles_of(t, rows):
    """A descriptor of (batch, heads, length, D), in tiles of so many rows."""
    tile = [1, 1, rows, width_of(t.shape[-1])]
    return TensorDescriptor.from_tensor(t, tile)


# %%

# Scaffold: plans, from page 03.

TILES = {
    # width: queries, keys, warps and stages; then the same if causal
    16: ((128, 64, 4, 3), (128, 64, 4, 3)),
    32: ((128, 64, 4, 3), (128, 64, 4, 3)),
    64: ((64, 128, 4, 2), (64, 128, 4, 2)),
    128: ((128, 64, 4, 2), (64, 64, 4, 3)),
    256: ((128, 64, 8, 2), (128, 64, 8, 2)),
}

OWN_AND_STEP = {
    # width: what a program owns, what it takes in a step, warps, stages
    16: (64, 64, 4, 3),
    32: (64, 64, 4, 3),
    64: (64, 64, 4, 3),
    128: (64, 64, 4, 2),
    256: (64, 32, 8, 2),
}


def small_tiles(dtype):
    """Whether operands lie in registers: in float32, and without a TMA."""
    if dtype == torch.float32:
        return True
    if not ON_GPU:
        return False  # the interpreter has no registers
    if torch.version.hip is not None:
        return True
    return torch.cuda.get_device_capability()[0] < 9


def options(tile_q, tile_k, warps, stages, dtype, D):
    """Constants of a kernel that depend on the type and the width of rows."""
    precision = None  # what a GPU does by itself; 16 bits need no choice
    if dtype == torch.float32 and torch.version.hip is None:
        precision = "tf32x3"
    return {
        "DIM": width_of(D),
        "TILE_Q": tile_q,
        "TILE_K": tile_k,
        "PRECISION": precision,
        "STAGES": stages,
        "num_warps": warps,
    }


def plan_forward(dtype, D, is_causal):
    if small_tiles(dtype):
        return options(16, 32, 8, 2, dtype, D)
    usual, causal = TILES[width_of(D)]
    tiles = causal if is_causal else usual
    return options(*tiles, dtype, D)


def plan_backward(dtype, D):
    """For the kernel of the queries, and for that of the keys."""
    own, step, warps, stages = OWN_AND_STEP[width_of(D)]
    if small_tiles(dtype):
        own, step, warps, stages = 16, 16, 8, 2
    return (
        options(own, step, warps, stages, dtype, D),
        options(step, own, warps, stages, dtype, D),
    )


def empty_lse(query, is_causal):
    """(batch, heads, rows): room for whole tiles of queries."""
    batch, heads, queries, D = query.shape
    tile_q = plan_forward(query.dtype, D, is_causal)["TILE_Q"]
    rows = triton.cdiv(queries, tile_q) * tile_q
    return query.new_empty(batch, heads, rows, dtype=torch.float32)


# %%

# Scaffold: plain tiles, forward, from page 03.


@triton.jit
def _attend(
    maximum,  # of each query, as the next two
    total,
    weighted,
    q,
    k_desc,
    v_desc,
    batch,
    head,  # of the keys
    start,  # the first key of the tile
    limit,  # how many keys a query sees: a column, or one number for all
    scale,
    DIM: tl.constexpr,
    TILE_K: tl.constexpr,
    MASK: tl.constexpr,  # whether some query does not see all of the tile
    PRECISION: tl.constexpr,  # of products of float32
):
    """The sums of a tile of queries, with one tile of keys more."""
    k = k_desc.load([batch, head, start, 0]).reshape(TILE_K, DIM)
    score = tl.dot(q, k.T, input_precision=PRECISION)
    if MASK:
        key = start + tl.arange(0, TILE_K)
        score = tl.where(key[None, :] < limit, score, float("-inf"))
    new = tl.maximum(maximum, tl.max(score, axis=1) * scale)
    power = tl.exp2(score * scale - new[:, None])
    shrink = tl.exp2(maximum - new)
    total = total * shrink + tl.sum(power, axis=1)
    weighted = weighted * shrink[:, None]
    v = v_desc.load([batch, head, start, 0]).reshape(TILE_K, DIM)
    power = power.to(v.dtype)
    weighted = tl.dot(power, v, weighted, input_precision=PRECISION)
    return new, total, weighted


@triton.jit(do_not_specialize=["heads", "queries", "keys"])
def _any_attention_fwd(
    q_desc,  # (batch, heads, queries, up to DIM), in tiles of TILE_Q queries
    k_desc,  # (batch, heads / GROUP, keys, up to DIM), in tiles of TILE_K
    v_desc,  # as k_desc
    y_desc,  # as q_desc
    lse_ptr,  # (batch, heads, rows): saved for the backward pass
    rows,  # queries, and those that only fill the last tile
    heads,  # of the queries
    queries,
    keys,
    scale,  # that of the scores, times LOG2E
    GROUP: tl.constexpr,  # heads of queries that share a head of keys
    CAUSAL: tl.constexpr,
    RAGGED: tl.constexpr,  # not causal, and the last tile of keys is not full
    DIM: tl.constexpr,  # width of a tile: the head dimension, or more
    TILE_Q: tl.constexpr,  # queries of a program
    TILE_K: tl.constexpr,  # keys of a step
    PRECISION: tl.constexpr,  # of products of float32
    STAGES: tl.constexpr,
):
    # Which queries are ours? In causal attention we count tiles from the end.
    tiles = tl.cdiv(queries, TILE_Q)
    tile = tl.program_id(0) % tiles
    if CAUSAL:
        tile = tiles - 1 - tile
    first = tile * TILE_Q
    query = first + tl.arange(0, TILE_Q)
    lead = tl.program_id(0) // tiles
    batch = lead // heads
    head = lead % heads
    k_head = head // GROUP

    # How many keys does each of them see? Below ``whole`` all of them see all
    # keys, and from ``end`` on none of them sees any.
    limit = keys
    whole = keys // TILE_K * TILE_K
    end = keys
    if CAUSAL:
        limit = tl.minimum(query + 1, keys)[:, None]
        whole = tl.minimum(first // TILE_K * TILE_K, whole)
        end = tl.minimum(first + TILE_Q, keys)

    q = q_desc.load([batch, head, first, 0]).reshape(TILE_Q, DIM)
    maximum = tl.full((TILE_Q,), float("-inf"), tl.float32)
    total = tl.zeros((TILE_Q,), tl.float32)
    weighted = tl.zeros((TILE_Q, DIM), tl.float32)

    # Tiles that all of our queries see, without a mask. Key 0 is in the first
    # tile of whichever loop comes first, and every query sees it: so no
    # maximum stays infinite.
    for start in tl.range(0, whole, TILE_K, num_stages=STAGES):
        maximum, total, weighted = _attend(
            maximum, total, weighted, q, k_desc, v_desc, batch, k_head, start,
            limit, scale, DIM, TILE_K, False, PRECISION,
        )  # fmt: skip

    # Tiles on the diagonal, or the one that is not full.
    if CAUSAL:
        for start in tl.range(whole, end, TILE_K, num_stages=STAGES):
            maximum, total, weighted = _attend(
                maximum, total, weighted, q, k_desc, v_desc, batch, k_head,
                start, limit, scale, DIM, TILE_K, True, PRECISION,
            )  # fmt: skip
    elif RAGGED:
        maximum, total, weighted = _attend(
            maximum, total, weighted, q, k_desc, v_desc, batch, k_head, whole,
            limit, scale, DIM, TILE_K, True, PRECISION,
        )  # fmt: skip

    y = (weighted / total[:, None]).to(y_desc.dtype)
    y_desc.store([batch, head, first, 0], y.reshape(1, 1, TILE_Q, DIM))
    at = lead.to(tl.int64) * rows + query  # may pass 2**31
    tl.store(lse_ptr + at, maximum + tl.log2(total))


# %%

# Scaffold: the plain forward pass, from page 05.


def plain_forward(
    query, key, value, is_causal, scale, kernel=_any_attention_fwd
):
    """The results, and a log-sum-exp for each query."""
    batch, heads, queries, D = query.shape
    _, k_heads, keys, _ = key.shape
    plan = plan_forward(query.dtype, D, is_causal)
    tile_q = plan["TILE_Q"]
    tile_k = plan["TILE_K"]
    tiles = triton.cdiv(queries, tile_q)
    y = rows_like(query)
    lse = empty_lse(query, is_causal)
    if y.numel() == 0:
        return y, lse
    if keys == 0:  # nothing to attend to
        return y.zero_(), lse.zero_()
    kernel[(tiles * batch * heads,)](
        q_desc=tiles_of(for_descriptors(query), tile_q),
        k_desc=tiles_of(for_descriptors(key), tile_k),
        v_desc=tiles_of(for_descriptors(value), tile_k),
        y_desc=tiles_of(y, tile_q),
        lse_ptr=lse,
        rows=lse.shape[-1],
        heads=heads,
        queries=queries,
        keys=keys,
        scale=scale * LOG2E,
        GROUP=heads // k_heads,
        CAUSAL=is_causal,
        RAGGED=not is_causal and keys % tile_k > 0,
        **plan,
    )
    return y, lse


# %%

# Scaffold: plain tiles, backward, from page 05.


@triton.jit
def _step_of_queries(
    dq,
    q,
    dy,
    lse,
    delta,
    k_desc,
    v_desc,
    batch,
    head,  # of the keys
    start,  # the first key of the tile
    limit,  # how many keys a query sees: a column, or one number for all
    scale,
    DIM: tl.constexpr,
    TILE_K: tl.constexpr,
    MASK: tl.constexpr,  # whether some query does not see all of the tile
    PRECISION: tl.constexpr,  # of products of float32
):
    """dq of a tile of queries, with one tile of keys more."""
    k = k_desc.load([batch, head, start, 0]).reshape(TILE_K, DIM)
    score = tl.dot(q, k.T, input_precision=PRECISION)
    # New: dp before the powers.
    v = v_desc.load([batch, head, start, 0]).reshape(TILE_K, DIM)
    dp = tl.dot(dy, v.T, input_precision=PRECISION)
    if MASK:
        key = start + tl.arange(0, TILE_K)
        score = tl.where(key[None, :] < limit, score, float("-inf"))
    p = tl.exp2(score * scale - lse[:, None])
    ds = (p * (dp - delta[:, None])).to(k.dtype)
    return tl.dot(ds, k, dq, input_precision=PRECISION)


@triton.jit
def _step_of_keys(
    dk,
    dv,
    k,
    v,
    q_desc,
    dy_desc,
    lse_ptr,  # of the first query of this head, as delta_ptr
    delta_ptr,
    batch,
    head,  # of the queries
    start,  # the first query of the tile
    key,  # the indices of our keys
    scale,
    DIM: tl.constexpr,
    TILE_Q: tl.constexpr,
    MASK: tl.constexpr,  # whether some query does not see all of our keys
    PRECISION: tl.constexpr,  # of products of float32
):
    """dk and dv of a tile of keys, with one tile of queries more."""
    q = q_desc.load([batch, head, start, 0]).reshape(TILE_Q, DIM)
    query = start + tl.arange(0, TILE_Q)
    score = tl.dot(k, q.T, input_precision=PRECISION)
    lse = tl.load(lse_ptr + query)
    if MASK:
        seen = key[:, None] <= query[None, :]
        score = tl.where(seen, score, float("-inf"))
    p = tl.exp2(score * scale - lse[None, :])
    # New: dp before dv.
    dy = dy_desc.load([batch, head, start, 0]).reshape(TILE_Q, DIM)
    dp = tl.dot(v, dy.T, input_precision=PRECISION)
    dv = tl.dot(p.to(dy.dtype), dy, dv, input_precision=PRECISION)
    delta = tl.load(delta_ptr + query)
    ds = (p * (dp - delta[None, :])).to(q.dtype)
    dk = tl.dot(ds, q, dk, input_precision=PRECISION)
    return dk, dv


# %%

# Scaffold: plain tiles, backward, from page 03.


@triton.jit(do_not_specialize=["heads", "queries", "keys"])
def _any_attention_bwd_queries(
    q_desc,  # (batch, heads, queries, up to DIM), in tiles of TILE_Q queries
    k_desc,  # (batch, heads / GROUP, keys, up to DIM), in tiles of TILE_K
    v_desc,  # as k_desc
    y_desc,  # as q_desc, and so are the next two
    dy_desc,
    dq_desc,
    lse_ptr,  # (batch, heads, rows)
    delta_ptr,  # (batch, heads, rows): stored for the other kernel
    rows,  # queries, and those that only fill the last tile
    heads,  # of the queries
    queries,
    keys,
    scale,  # that of the scores alone, for dq
    log2e,  # LOG2E, for the powers of 2
    GROUP: tl.constexpr,  # heads of queries that share a head of keys
    CAUSAL: tl.constexpr,
    RAGGED: tl.constexpr,  # not causal, and the last tile of keys is not full
    DIM: tl.constexpr,  # width of a tile: the head dimension, or more
    TILE_Q: tl.constexpr,  # queries of a program
    TILE_K: tl.constexpr,  # keys of a step
    PRECISION: tl.constexpr,  # of products of float32
    STAGES: tl.constexpr,
):
    # Which queries are ours, and which keys do they see? As in the forward
    # kernel.
    tiles = tl.cdiv(queries, TILE_Q)
    tile = tl.program_id(0) % tiles
    if CAUSAL:
        tile = tiles - 1 - tile
    first = tile * TILE_Q
    query = first + tl.arange(0, TILE_Q)
    lead = tl.program_id(0) // tiles
    batch = lead // heads
    head = lead % heads
    k_head = head // GROUP
    limit = keys
    whole = keys // TILE_K * TILE_K
    end = keys
    if CAUSAL:
        limit = tl.minimum(query + 1, keys)[:, None]
        whole = tl.minimum(first // TILE_K * TILE_K, whole)
        end = tl.minimum(first + TILE_Q, keys)

    # delta, for us and for the kernel of the keys.
    y = y_desc.load([batch, head, first, 0]).reshape(TILE_Q, DIM)
    dy = dy_desc.load([batch, head, first, 0]).reshape(TILE_Q, DIM)
    delta = tl.sum(y.to(tl.float32) * dy.to(tl.float32), axis=1)
    at = lead.to(tl.int64) * rows + query
    tl.store(delta_ptr + at, delta)

    q = q_desc.load([batch, head, first, 0]).reshape(TILE_Q, DIM)
    lse = tl.load(lse_ptr + at)
    dq = tl.zeros((TILE_Q, DIM), tl.float32)
    for start in tl.range(0, whole, TILE_K, num_stages=STAGES):
        dq = _step_of_queries(
            dq, q, dy, lse, delta, k_desc, v_desc, batch, k_head, start, limit,
            scale * log2e, DIM, TILE_K, False, PRECISION,
        )  # fmt: skip
    if CAUSAL:
        for start in tl.range(whole, end, TILE_K, num_stages=STAGES):
            dq = _step_of_queries(
                dq, q, dy, lse, delta, k_desc, v_desc, batch, k_head, start,
                limit, scale * log2e, DIM, TILE_K, True, PRECISION,
            )  # fmt: skip
    elif RAGGED:
        dq = _step_of_queries(
            dq, q, dy, lse, delta, k_desc, v_desc, batch, k_head, whole, limit,
            scale * log2e, DIM, TILE_K, True, PRECISION,
        )  # fmt: skip

    dq = (dq * scale).to(dq_desc.dtype)
    dq_desc.store([batch, head, first, 0], dq.reshape(1, 1, TILE_Q, DIM))


@triton.jit(do_not_specialize=["heads", "queries", "keys"])
def _any_attention_bwd_keys(
    q_desc,  # (batch, heads, queries, up to DIM), in tiles of TILE_Q queries
    k_desc,  # (batch, heads / GROUP, keys, up to DIM), in tiles of TILE_K
    v_desc,  # as k_desc
    dy_desc,  # as q_desc
    dk_desc,  # as k_desc
    dv_desc,  # as k_desc
    lse_ptr,  # (batch, heads, rows)
    delta_ptr,  # (batch, heads, rows)
    rows,  # queries, and those that only fill the last tile
    heads,  # of the queries
    queries,
    keys,
    scale,  # that of the scores alone, for dk
    log2e,  # LOG2E, for the powers of 2
    GROUP: tl.constexpr,  # heads of queries that share a head of keys
    CAUSAL: tl.constexpr,
    DIM: tl.constexpr,  # width of a tile: the head dimension, or more
    TILE_Q: tl.constexpr,  # queries of a step
    TILE_K: tl.constexpr,  # keys of a program
    PRECISION: tl.constexpr,  # of products of float32
    STAGES: tl.constexpr,
):
    # Which keys are ours? The first tile has most to do if causal.
    tiles = tl.cdiv(keys, TILE_K)
    first = tl.program_id(0) % tiles * TILE_K
    key = first + tl.arange(0, TILE_K)
    k_lead = tl.program_id(0) // tiles
    batch = k_lead // (heads // GROUP)
    k_head = k_lead % (heads // GROUP)
    k = k_desc.load([batch, k_head, first, 0]).reshape(TILE_K, DIM)
    v = v_desc.load([batch, k_head, first, 0]).reshape(TILE_K, DIM)
    dk = tl.zeros((TILE_K, DIM), tl.float32)
    dv = tl.zeros((TILE_K, DIM), tl.float32)

    # If causal, the queries before ``first`` see none of our keys, and from
    # ``whole`` on they see all. Both are multiples of TILE_Q.
    whole = 0
    if CAUSAL:
        whole = first + TILE_K

    # The queries of all heads of our group, which are neighbors if we count
    # the heads of all sequences. Both sums fill most registers. So we tell the
    # compiler to compute nothing before a loop that would be the same in each
    # step, because it would keep that in registers.
    for lead in tl.range(
        k_lead * GROUP, (k_lead + 1) * GROUP, disable_licm=True
    ):
        batch = lead // heads
        head = lead % heads
        at = tl.cast(lead, tl.int64) * rows
        if CAUSAL:
            for start in tl.range(
                first,
                tl.minimum(whole, queries),
                TILE_Q,
                num_stages=STAGES,
                disable_licm=True,
            ):
                dk, dv = _step_of_keys(
                    dk, dv, k, v, q_desc, dy_desc, lse_ptr + at,
                    delta_ptr + at, batch, head, start, key, scale * log2e,
                    DIM, TILE_Q, True, PRECISION,
                )  # fmt: skip
        for start in tl.range(
            whole, queries, TILE_Q, num_stages=STAGES, disable_licm=True
        ):
            dk, dv = _step_of_keys(
                dk, dv, k, v, q_desc, dy_desc, lse_ptr + at, delta_ptr + at,
                batch, head, start, key, scale * log2e, DIM, TILE_Q, False,
                PRECISION,
            )  # fmt: skip

    dk = (dk * scale).to(dk_desc.dtype)
    dv = dv.to(dv_desc.dtype)
    dk_desc.store([batch, k_head, first, 0], dk.reshape(1, 1, TILE_K, DIM))
    dv_desc.store([batch, k_head, first, 0], dv.reshape(1, 1, TILE_K, DIM))


# %%

# Scaffold: launches of both backward kernels, from page 05.


def launch_queries(
    kernel, describe, own, plan, q, k, v, y, dy, dq, lse, delta, is_causal,
    scale,
):  # fmt: skip
    """dq, and delta for the kernel of the keys. A program owns so many
    queries."""
    batch, heads, queries, _ = q.shape
    _, k_heads, keys, _ = k.shape
    tile_q = plan["TILE_Q"]
    tile_k = plan["TILE_K"]
    kernel[(triton.cdiv(queries, own) * batch * heads,)](
        q_desc=describe(q, tile_q),
        k_desc=describe(k, tile_k),
        v_desc=describe(v, tile_k),
        y_desc=describe(y, tile_q),
        dy_desc=describe(dy, tile_q),
        dq_desc=describe(dq, tile_q),
        lse_ptr=lse,
        delta_ptr=delta,
        rows=lse.shape[-1],
        heads=heads,
        queries=queries,
        keys=keys,
        scale=scale,
        log2e=LOG2E,
        GROUP=heads // k_heads,
        CAUSAL=is_causal,
        RAGGED=not is_causal and keys % tile_k > 0,
        **plan,
    )


def launch_keys(q, k, v, dy, dk, dv, lse, delta, is_causal, scale):
    """dk and dv."""
    _, heads, queries, D = q.shape
    batch, k_heads, keys, _ = k.shape
    _, plan = plan_backward(q.dtype, D)
    tile_q = plan["TILE_Q"]
    tile_k = plan["TILE_K"]
    programs = triton.cdiv(keys, tile_k) * batch * k_heads
    _any_attention_bwd_keys[(programs,)](
        q_desc=tiles_of(q, tile_q),
        k_desc=tiles_of(k, tile_k),
        v_desc=tiles_of(v, tile_k),
        dy_desc=tiles_of(dy, tile_q),
        dk_desc=tiles_of(dk, tile_k),
        dv_desc=tiles_of(dv, tile_k),
        lse_ptr=lse,
        delta_ptr=delta,
        rows=lse.shape[-1],
        heads=heads,
        queries=queries,
        keys=keys,
        scale=scale,
        log2e=LOG2E,
        GROUP=heads // k_heads,
        CAUSAL=is_causal,
        **plan,
    )


def plain_queries(q, k, v, y, dy, dq, lse, delta, is_causal, scale):
    """dq by the plain kernel."""
    plan, _ = plan_backward(q.dtype, q.shape[-1])
    launch_queries(
        _any_attention_bwd_queries, tiles_of, plan["TILE_Q"], plan, q, k, v, y,
        dy, dq, lse, delta, is_causal, scale,
    )  # fmt: skip


# %%

# Scaffold: kernels in Gluon, forward, from page 05.


@gluon.jit
def _fetch_keys(
    k_desc,
    v_desc,
    ring,
    batch,
    head,  # of the keys
    steps,
    TILE_K: gl.constexpr,
    BUFFERS: gl.constexpr,
):
    """All tiles of keys and values that a program needs, in their order."""
    # Of each buffer, the barrier 2 * at is for its keys, and the next one for
    # its values.
    k_mem, v_mem, full, free = ring
    for i in range(steps):
        at = i % BUFFERS
        parity = (i // BUFFERS + 1) & 1
        mbarrier.wait(free.index(2 * at), parity)
        mbarrier.expect(full.index(2 * at), k_desc.block_type.nbytes)
        FETCH(
            k_desc,
            [batch, head, i * TILE_K, 0],
            full.index(2 * at),
            k_mem.index(at),
        )
        mbarrier.wait(free.index(2 * at + 1), parity)
        mbarrier.expect(full.index(2 * at + 1), v_desc.block_type.nbytes)
        FETCH(
            v_desc,
            [batch, head, i * TILE_K, 0],
            full.index(2 * at + 1),
            v_mem.index(at),
        )


@gluon.jit
def _load_fwd(
    q_desc,
    k_desc,
    v_desc,
    q_mem,
    q_full,
    ring,
    batch,
    head,  # of the queries
    k_head,
    first,  # our first query
    steps,
    TILE_Q: gl.constexpr,
    TILE_K: gl.constexpr,
    BUFFERS: gl.constexpr,
):
    """What the loading warp does in the forward kernel."""
    mbarrier.expect(q_full, 2 * q_desc.block_type.nbytes)
    for half in gl.static_range(2):
        row = first + half * TILE_Q
        FETCH(q_desc, [batch, head, row, 0], q_full, q_mem.index(half))
    _fetch_keys(k_desc, v_desc, ring, batch, k_head, steps, TILE_K, BUFFERS)


@gluon.jit
def _powers(
    maximum,  # of each query, as the next one
    total,
    score,
    start,  # the first key of the tile
    limit,  # how many keys each query sees
    scale,
    TILE_K: gl.constexpr,
    MASK: gl.constexpr,  # whether some query does not see all of the tile
):
    if MASK:
        KEYS: gl.constexpr = gl.SliceLayout(0, score.type.layout)
        key = start + gl.arange(0, TILE_K, KEYS)
        seen = key[None, :] < limit[:, None]
        score = gl.where(seen, score, float("-inf"))
    new = gl.maximum(maximum, gl.max(score, axis=1) * scale)
    power = gl.exp2(score * scale - new[:, None])
    shrink = gl.exp2(maximum - new)
    total = total * shrink + gl.sum(power, axis=1)
    return new, total, shrink, power


@gluon.jit
def _step_fwd(
    maximum,  # of each query, as the next one
    total,
    weighted,
    power,  # of the last step
    i,
    q,
    ring,
    turn,
    half,  # 0 or 1: which group we are
    limit,
    scale,
    DIM: gl.constexpr,
    TILE_K: gl.constexpr,
    BUFFERS: gl.constexpr,
    MASK: gl.constexpr,
    LATER: gl.constexpr,
    TURNS: gl.constexpr,
):
    """The scores of tile i, and the product of the powers of tile i - 1."""
    k_mem, v_mem, full, free = ring
    at = i % BUFFERS
    last = (i - 1) % BUFFERS
    k = k_mem.index(at).reshape([TILE_K, DIM])
    v = v_mem.index(last).reshape([TILE_K, DIM])
    # The layout of scores, of which that of the maximum is a slice. The zeros
    # only give it to the product: use_acc=False leaves them out.
    SCORE: gl.constexpr = maximum.type.layout.parent
    zeros = gl.zeros([maximum.shape[0], TILE_K], gl.float32, SCORE)

    # Both products begin.
    mbarrier.wait(full.index(2 * at), (i // BUFFERS) & 1)
    if TURNS:
        mbarrier.wait(turn.index(half), (i - 1) & 1)
    score = warpgroup_mma(
        q, k.permute((1, 0)), zeros, use_acc=False, is_async=True
    )
    if not LATER:
        score = warpgroup_mma_wait(0, deps=[score])
    mbarrier.wait(full.index(2 * last + 1), ((i - 1) // BUFFERS) & 1)
    weighted = warpgroup_mma(power, v, weighted, is_async=True)
    if TURNS:
        mbarrier.arrive(turn.index(1 - half), count=1)

    # The powers, while the second product is under way.
    if LATER:
        score = warpgroup_mma_wait(1, deps=[score])
    else:
        weighted, power = warpgroup_mma_wait(0, deps=[weighted, power])
    mbarrier.arrive(free.index(2 * at), count=1)
    maximum, total, shrink, new = _powers(
        maximum, total, score, i * TILE_K, limit, scale, TILE_K, MASK
    )
    if LATER:
        weighted, power = warpgroup_mma_wait(0, deps=[weighted, power])
    mbarrier.arrive(free.index(2 * last + 1), count=1)

    # The sums of the tiles up to i - 1 shrink to the maximum of tile i.
    SUM: gl.constexpr = weighted.type.layout
    by = gl.convert_layout(shrink, gl.SliceLayout(1, SUM))
    weighted = weighted * by[:, None]
    power = gl.convert_layout(new.to(power.dtype), power.type.layout)
    return maximum, total, weighted, power


@gluon.jit
def _group_fwd(
    half,
    y_desc,
    lse_ptr,  # of the first query of this head
    q_mem,
    q_full,
    ring,
    turn,
    batch,
    head,
    first,  # the first query of both groups
    keys,
    scale,
    whole,  # tiles that all of our queries see
    steps,  # tiles that some of them see
    CAUSAL: gl.constexpr,
    RAGGED: gl.constexpr,
    DIM: gl.constexpr,
    TILE_Q: gl.constexpr,
    TILE_K: gl.constexpr,
    BUFFERS: gl.constexpr,
    LATER: gl.constexpr,
    TURNS: gl.constexpr,
):
    """The results of 64 queries."""
    DTYPE: gl.constexpr = y_desc.dtype
    # Layouts of a tile of scores, of the sums, of an operand of the second
    # product, and of one number for each query. [3, 0] stands for Hopper's
    # Tensor Cores, [4, 1] for four warps one below the other, and the last
    # three numbers are the rows of a warp, the columns, and how many numbers
    # are multiplied at a time. Of an operand we say that it is the left one,
    # 0, and that a register has two of its numbers.
    SCORE: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, 1], [16, TILE_K, 16]
    )
    SUM: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, 1], [16, DIM, 16]
    )
    POWER: gl.constexpr = gl.DotOperandLayout(0, SUM, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, SCORE)
    query = first + half * TILE_Q + gl.arange(0, TILE_Q, ROW)
    limit = gl.full([TILE_Q], 0, gl.int32, ROW) + keys
    if CAUSAL:
        limit = gl.minimum(query + 1, limit)
    maximum = gl.full([TILE_Q], float("-inf"), gl.float32, ROW)
    total = gl.zeros([TILE_Q], gl.float32, ROW)
    weighted = gl.zeros([TILE_Q, DIM], gl.float32, SUM)

    # The powers of the first tile.
    k_mem, v_mem, full, free = ring
    q = q_mem.index(half).reshape([TILE_Q, DIM])
    k = k_mem.index(0).reshape([TILE_K, DIM])
    zeros = gl.zeros([TILE_Q, TILE_K], gl.float32, SCORE)
    mbarrier.wait(q_full, 0)
    mbarrier.wait(full.index(0), 0)
    score = warpgroup_mma(
        q, k.permute((1, 0)), zeros, use_acc=False, is_async=True
    )
    score = warpgroup_mma_wait(0, deps=[score])
    mbarrier.arrive(free.index(0), count=1)
    maximum, total, _, power = _powers(
        maximum, total, score, 0, limit, scale, TILE_K, CAUSAL or RAGGED
    )
    power = gl.convert_layout(power.to(DTYPE), POWER)

    for i in range(1, whole):
        maximum, total, weighted, power = _step_fwd(
            maximum, total, weighted, power, i, q, ring, turn, half, limit,
            scale, DIM, TILE_K, BUFFERS, False, LATER, TURNS,
        )  # fmt: skip
    if CAUSAL or RAGGED:
        for i in range(gl.maximum(whole, 1), steps):
            maximum, total, weighted, power = _step_fwd(
                maximum, total, weighted, power, i, q, ring, turn, half, limit,
                scale, DIM, TILE_K, BUFFERS, True, LATER, TURNS,
            )  # fmt: skip

    # The product of the last tile.
    last = (steps - 1) % BUFFERS
    mbarrier.wait(full.index(2 * last + 1), ((steps - 1) // BUFFERS) & 1)
    v = v_mem.index(last).reshape([TILE_K, DIM])
    weighted = warpgroup_mma(power, v, weighted, is_async=True)
    weighted, power = warpgroup_mma_wait(0, deps=[weighted, power])

    y = weighted / gl.convert_layout(total, gl.SliceLayout(1, SUM))[:, None]
    q.store(y.to(DTYPE))
    fence_async_shared()
    place = [batch, head, first + half * TILE_Q, 0]
    STORE(y_desc, place, q_mem.index(half))
    gl.store(lse_ptr + query, maximum + gl.log2(total))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["heads", "queries", "keys"])
def _warps_fwd(
    q_desc,  # (batch, heads, queries, up to DIM), in tiles of TILE_Q queries
    k_desc,  # (batch, heads / GROUP, keys, up to DIM), in tiles of TILE_K
    v_desc,  # as k_desc
    y_desc,  # as q_desc
    lse_ptr,  # (batch, heads, rows): saved for the backward pass
    rows,  # queries, and those that only fill the last tiles
    heads,  # of the queries
    queries,
    keys,
    scale,  # that of the scores, times LOG2E
    GROUP: gl.constexpr,  # heads of queries that share a head of keys
    CAUSAL: gl.constexpr,
    RAGGED: gl.constexpr,  # not causal, and the last tile of keys is not full
    DIM: gl.constexpr,  # width of a tile: the head dimension, or more
    TILE_Q: gl.constexpr,  # queries of a group of warps
    TILE_K: gl.constexpr,  # keys of a step
    BUFFERS: gl.constexpr,  # tiles of keys, and of values, in shared memory
    LATER: gl.constexpr,
    TURNS: gl.constexpr,
    num_warps: gl.constexpr,  # of the first function
):
    # Which queries are ours, and which keys do they see? As in plain Triton,
    # but counted in tiles, and each program has two tiles of queries.
    OWN: gl.constexpr = 2 * TILE_Q
    tiles = gl.cdiv(queries, OWN)
    tile = gl.program_id(0) % tiles
    if CAUSAL:
        tile = tiles - 1 - tile
    first = tile * OWN
    lead = gl.program_id(0) // tiles
    batch = lead // heads
    head = lead % heads
    whole = keys // TILE_K
    steps = gl.cdiv(keys, TILE_K)
    if CAUSAL:
        whole = gl.minimum(first // TILE_K, whole)
        steps = gl.minimum(gl.cdiv(first + OWN, TILE_K), steps)

    # Shared memory, and a ring of buffers.
    DTYPE: gl.constexpr = q_desc.dtype
    q_mem = gl.allocate_shared_memory(
        DTYPE, [2, 1, 1, TILE_Q, DIM], q_desc.layout
    )
    k_mem = gl.allocate_shared_memory(
        DTYPE, [BUFFERS, 1, 1, TILE_K, DIM], k_desc.layout
    )
    v_mem = gl.allocate_shared_memory(
        DTYPE, [BUFFERS, 1, 1, TILE_K, DIM], v_desc.layout
    )
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    full = gl.allocate_shared_memory(gl.int64, [2 * BUFFERS, 1], BARRIER)
    free = gl.allocate_shared_memory(gl.int64, [2 * BUFFERS, 1], BARRIER)
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    mbarrier.init(q_full, count=1)
    for i in gl.static_range(2 * BUFFERS):
        mbarrier.init(full.index(i), count=1)  # the loading warp
        mbarrier.init(free.index(i), count=2)  # both groups
    for i in gl.static_range(2):
        mbarrier.init(turn.index(i), count=1)
    fence_async_shared()  # the TMA sees them, too
    if TURNS:
        mbarrier.arrive(turn.index(0), count=1)  # the first group begins
    ring = (k_mem, v_mem, full, free)
    lse_ptr += lead.to(gl.int64) * rows  # may pass 2**31

    gl.warp_specialize(
        [
            (_group_fwd, (
                0, y_desc, lse_ptr, q_mem, q_full, ring, turn, batch, head,
                first, keys, scale, whole, steps, CAUSAL, RAGGED, DIM, TILE_Q,
                TILE_K, BUFFERS, LATER, TURNS,
            )),
            (_group_fwd, (
                1, y_desc, lse_ptr, q_mem, q_full, ring, turn, batch, head,
                first, keys, scale, whole, steps, CAUSAL, RAGGED, DIM, TILE_Q,
                TILE_K, BUFFERS, LATER, TURNS,
            )),
            (_load_fwd, (
                q_desc, k_desc, v_desc, q_mem, q_full, ring, batch, head,
                head // GROUP, first, steps, TILE_Q, TILE_K, BUFFERS,
            )),
        ],
        [4, 1],  # warps of the second and of the third
        [240, 24],  # registers of their threads
    )  # fmt: skip


# %%

# Scaffold: the forward pass, from page 05.


def by_warps(query):
    """Whether kernels in Gluon take it."""
    if not ON_GPU or torch.version.hip is not None:
        return False
    if torch.cuda.get_device_capability() != (9, 0):
        return False
    return query.dtype != torch.float32 and width_of(query.shape[-1]) == 128


OWN = 128  # queries of a program forward: 64 for each group of warps


def room_for_lse(query, is_causal):
    """(batch, heads, rows): room for whole tiles of queries."""
    if not by_warps(query):
        return empty_lse(query, is_causal)
    batch, heads, queries, _ = query.shape
    rows = triton.cdiv(queries, OWN) * OWN
    return query.new_empty(batch, heads, rows, dtype=torch.float32)


def tiles_for_gluon(t, rows):
    """A descriptor of (batch, heads, length, D), in tiles of so many rows."""
    tile = [1, 1, rows, width_of(t.shape[-1])]
    dtype = gl.float16 if t.dtype == torch.float16 else gl.bfloat16
    layout = gl.NVMMASharedLayout.get_default_for(tile, dtype)
    return GluonDescriptor.from_tensor(t, tile, layout)


def forward(query, key, value, is_causal, scale, tile_k=128, buffers=2, **how):
    """The results, and a log-sum-exp for each query."""
    batch, heads, queries, D = query.shape
    _, k_heads, keys, _ = key.shape
    if not by_warps(query) or query.numel() == 0 or keys == 0:
        y, lse = plain_forward(query, key, value, is_causal, scale)
        return y, lse
    y = rows_like(query)
    lse = room_for_lse(query, is_causal)
    programs = triton.cdiv(queries, OWN) * batch * heads
    _warps_fwd[(programs,)](
        q_desc=tiles_for_gluon(for_descriptors(query), OWN // 2),
        k_desc=tiles_for_gluon(for_descriptors(key), tile_k),
        v_desc=tiles_for_gluon(for_descriptors(value), tile_k),
        y_desc=tiles_for_gluon(y, OWN // 2),
        lse_ptr=lse,
        rows=lse.shape[-1],
        heads=heads,
        queries=queries,
        keys=keys,
        scale=scale * LOG2E,
        GROUP=heads // k_heads,
        CAUSAL=is_causal,
        RAGGED=not is_causal and keys % tile_k > 0,
        DIM=width_of(D),
        TILE_Q=OWN // 2,
        TILE_K=tile_k,
        BUFFERS=buffers,
        **{"LATER": True, "TURNS": False, "num_warps": 4} | how,
    )
    return y, lse


# %%
# The queries
# -----------
#
# The kernel of the queries gives ``dq``. Its loading warp fetches what belongs
# to 64 queries, and then one tile of keys and values after the other.


@gluon.jit
def _load_bwd_queries(
    q_desc,
    dy_desc,
    y_desc,
    k_desc,
    v_desc,
    q_mem,
    dy_mem,
    y_mem,
    own_full,
    ring,
    batch,
    head,  # of the queries
    k_head,
    first,  # our first query
    steps,
    TILE_K: gl.constexpr,
    BUFFERS: gl.constexpr,
):
    """What the loading warp does for dq."""
    mbarrier.expect(own_full, 3 * q_desc.block_type.nbytes)
    place = [batch, head, first, 0]
    FETCH(q_desc, place, own_full, q_mem)
    FETCH(dy_desc, place, own_full, dy_mem)
    FETCH(y_desc, place, own_full, y_mem)
    _fetch_keys(k_desc, v_desc, ring, batch, k_head, steps, TILE_K, BUFFERS)


# %%
# A step has three products, as on the page before: the scores and ``dp`` begin
# at once, the powers are computed while ``dp`` is under way, and the product
# for ``dq`` is waited for in the next step.
#
# On that page the kernel had the step three times: for the first tile, for
# whole tiles, and for those with a mask. Here it has it once. Whether a tile
# needs a mask, and whether there was a step before, is asked while the kernel
# runs. That costs next to nothing beside a product.


@gluon.jit
def _step_bwd_queries(
    dq,
    ds,  # of the last step: an operand of the product that is under way
    i,
    q,
    dy,
    lse,
    delta,
    ring,
    limit,
    whole,  # tiles that all of our queries see
    scale,
    DIM: gl.constexpr,
    TILE_K: gl.constexpr,
    BUFFERS: gl.constexpr,
    MASK: gl.constexpr,  # whether there are tiles that some query does not see
):
    """dq with tile i of the keys; its product may still be under way."""
    k_mem, v_mem, full, free = ring
    at = i % BUFFERS
    parity = (i // BUFFERS) & 1
    k = k_mem.index(at).reshape([TILE_K, DIM])
    v = v_mem.index(at).reshape([TILE_K, DIM])
    SCORE: gl.constexpr = lse.type.layout.parent
    zeros = gl.zeros([lse.shape[0], TILE_K], gl.float32, SCORE)

    mbarrier.wait(full.index(2 * at), parity)
    score = warpgroup_mma(
        q, k.permute((1, 0)), zeros, use_acc=False, is_async=True
    )
    mbarrier.wait(full.index(2 * at + 1), parity)
    dp = warpgroup_mma(
        dy, v.permute((1, 0)), zeros, use_acc=False, is_async=True
    )

    # When at most one product is under way, the scores are there, and so is
    # the sum of the last step: its tile of keys may be overwritten.
    score, dq, ds = warpgroup_mma_wait(1, deps=[score, dq, ds])
    last = gl.maximum(i - 1, 0) % BUFFERS
    mbarrier.arrive(free.index(2 * last), count=1, pred=i > 0)
    if MASK:
        KEY: gl.constexpr = gl.SliceLayout(0, SCORE)
        if i >= whole:
            key = i * TILE_K + gl.arange(0, TILE_K, KEY)
            seen = key[None, :] < limit[:, None]
            score = gl.where(seen, score, float("-inf"))
    p = gl.exp2(score * scale - lse[:, None])

    dp = warpgroup_mma_wait(0, deps=[dp])
    mbarrier.arrive(free.index(2 * at + 1), count=1)
    ds_of_tile = (p * (dp - delta[:, None])).to(ds.dtype)
    ds = gl.convert_layout(ds_of_tile, ds.type.layout)
    dq = warpgroup_mma(ds, k, dq, is_async=True)
    return dq, ds


# %%
# The loop carries a sum to which a product may still add. For Gluon that is a
# type of its own, which the sum gets from ``warpgroup_mma_init`` before the
# first step.


@gluon.jit
def _group_bwd_queries(
    dq_desc,
    lse_ptr,  # of the first query of this head, as delta_ptr
    delta_ptr,
    q_mem,
    dy_mem,
    y_mem,
    own_full,
    ring,
    batch,
    head,
    first,  # our first query
    keys,
    scale,
    log2e,
    whole,  # tiles that all of our queries see
    steps,  # tiles that some of them see
    CAUSAL: gl.constexpr,
    RAGGED: gl.constexpr,
    DIM: gl.constexpr,
    TILE_Q: gl.constexpr,
    TILE_K: gl.constexpr,
    BUFFERS: gl.constexpr,
):
    """dq of 64 queries."""
    DTYPE: gl.constexpr = dq_desc.dtype
    SCORE: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, 1], [16, TILE_K, 16]
    )
    SUM: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, 1], [16, DIM, 16]
    )
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUM, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, SCORE)
    query = first + gl.arange(0, TILE_Q, ROW)
    limit = gl.full([TILE_Q], 0, gl.int32, ROW) + keys
    if CAUSAL:
        limit = gl.minimum(query + 1, limit)
    lse = gl.load(lse_ptr + query)

    mbarrier.wait(own_full, 0)
    q = q_mem.reshape([TILE_Q, DIM])
    dy = dy_mem.reshape([TILE_Q, DIM])
    y = y_mem.reshape([TILE_Q, DIM])
    product = y.load(SUM).to(gl.float32) * dy.load(SUM).to(gl.float32)
    delta = gl.convert_layout(gl.sum(product, axis=1), ROW)
    gl.store(delta_ptr + query, delta)

    # The loop carries a sum that is under way, so it has to begin as one.
    dq = warpgroup_mma_init(gl.zeros([TILE_Q, DIM], gl.float32, SUM))
    ds = gl.zeros([TILE_Q, TILE_K], DTYPE, LEFT)
    for i in range(steps):
        dq, ds = _step_bwd_queries(
            dq, ds, i, q, dy, lse, delta, ring, limit, whole, scale * log2e,
            DIM, TILE_K, BUFFERS, CAUSAL or RAGGED,
        )  # fmt: skip
    dq, ds = warpgroup_mma_wait(0, deps=[dq, ds])

    # The queries have been read: their place takes the result.
    q.store((dq * scale).to(DTYPE))
    fence_async_shared()
    STORE(dq_desc, [batch, head, first, 0], q_mem)
    tma.store_wait(0)


# %%
# The kernel around it begins the group in its own four warps, and one warp
# that loads.


@gluon.jit(do_not_specialize=["heads", "queries", "keys"])
def _half_sm_bwd_queries(
    q_desc,  # (batch, heads, queries, up to DIM), in tiles of TILE_Q queries
    k_desc,  # (batch, heads / GROUP, keys, up to DIM), in tiles of TILE_K keys
    v_desc,  # as k_desc
    y_desc,  # as q_desc
    dy_desc,  # as q_desc
    dq_desc,  # as q_desc
    lse_ptr,  # (batch, heads, rows)
    delta_ptr,  # as lse_ptr
    rows,  # queries, and those that only fill the last tile
    heads,  # of the queries
    queries,
    keys,
    scale,  # that of the scores alone, for dq
    log2e,  # LOG2E, for the powers of 2
    GROUP: gl.constexpr,  # heads of queries that share a head of keys
    CAUSAL: gl.constexpr,
    RAGGED: gl.constexpr,  # not causal, and the last tile of keys is not full
    DIM: gl.constexpr,  # width of a tile: the head dimension, or more
    TILE_Q: gl.constexpr,  # queries of a program
    TILE_K: gl.constexpr,  # keys of a step
    BUFFERS: gl.constexpr,  # tiles of keys, and of values, in shared memory
    num_warps: gl.constexpr,
):
    # Which queries are ours, and which tiles of keys do they see?
    tiles = gl.cdiv(queries, TILE_Q)
    tile = gl.program_id(0) % tiles
    if CAUSAL:
        tile = tiles - 1 - tile  # those that see most keys begin first
    first = tile * TILE_Q
    lead = gl.program_id(0) // tiles
    batch = lead // heads
    head = lead % heads
    whole = keys // TILE_K
    steps = gl.cdiv(keys, TILE_K)
    if CAUSAL:
        whole = gl.minimum(first // TILE_K, whole)
        steps = gl.minimum(gl.cdiv(first + TILE_Q, TILE_K), steps)

    # Shared memory, and a ring of buffers.
    DTYPE: gl.constexpr = q_desc.dtype
    q_mem = gl.allocate_shared_memory(
        DTYPE, [1, 1, TILE_Q, DIM], q_desc.layout
    )
    dy_mem = gl.allocate_shared_memory(
        DTYPE, [1, 1, TILE_Q, DIM], dy_desc.layout
    )
    y_mem = gl.allocate_shared_memory(
        DTYPE, [1, 1, TILE_Q, DIM], y_desc.layout
    )
    k_mem = gl.allocate_shared_memory(
        DTYPE, [BUFFERS, 1, 1, TILE_K, DIM], k_desc.layout
    )
    v_mem = gl.allocate_shared_memory(
        DTYPE, [BUFFERS, 1, 1, TILE_K, DIM], v_desc.layout
    )
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    own_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    full = gl.allocate_shared_memory(gl.int64, [2 * BUFFERS, 1], BARRIER)
    free = gl.allocate_shared_memory(gl.int64, [2 * BUFFERS, 1], BARRIER)
    mbarrier.init(own_full, count=1)
    for i in gl.static_range(2 * BUFFERS):
        mbarrier.init(full.index(i), count=1)  # the loading warp
        mbarrier.init(free.index(i), count=1)  # the group that multiplies
    fence_async_shared()
    ring = (k_mem, v_mem, full, free)

    place = lead.to(gl.int64) * rows
    lse_ptr += place
    delta_ptr += place
    gl.warp_specialize(
        [
            (_group_bwd_queries, (
                dq_desc, lse_ptr, delta_ptr, q_mem, dy_mem, y_mem, own_full,
                ring, batch, head, first, keys, scale, log2e, whole, steps,
                CAUSAL, RAGGED, DIM, TILE_Q, TILE_K, BUFFERS,
            )),
            (_load_bwd_queries, (
                q_desc, dy_desc, y_desc, k_desc, v_desc, q_mem, dy_mem, y_mem,
                own_full, ring, batch, head, head // GROUP, first, steps,
                TILE_K, BUFFERS,
            )),
        ],
        [1],  # warp of the second
        [24],  # registers of its threads
    )  # fmt: skip


# %%
# How fast is the kernel of the queries?
# --------------------------------------
#
# We measure it alone, with 16 heads of 128 numbers, and 16384 tokens in
# sequences of 1024 to 16384. Beside it are the same kernel with four buffers,
# of which an SM holds one program, that of the page before, which has two
# groups in a program, and plain Triton. Three products count.

# %%

# Scaffold: the kernel of the queries with two groups, from page 05.


@gluon.jit
def _load_bwd(
    q_desc,
    dy_desc,
    y_desc,
    k_desc,
    v_desc,
    q_mem,
    dy_mem,
    y_mem,
    q_full,
    ring,
    batch,
    head,  # of the queries
    k_head,
    first,  # our first query
    steps,
    TILE_Q: gl.constexpr,
    TILE_K: gl.constexpr,
    BUFFERS: gl.constexpr,
):
    """What the loading warp does for dq."""
    mbarrier.expect(q_full, 6 * q_desc.block_type.nbytes)
    for half in gl.static_range(2):
        place = [batch, head, first + half * TILE_Q, 0]
        FETCH(q_desc, place, q_full, q_mem.index(half))
        FETCH(dy_desc, place, q_full, dy_mem.index(half))
        FETCH(y_desc, place, q_full, y_mem.index(half))
    _fetch_keys(k_desc, v_desc, ring, batch, k_head, steps, TILE_K, BUFFERS)


@gluon.jit
def _step_bwd(
    dq,
    ds,  # of the last step: an operand of the product that is under way
    i,
    q,
    dy,
    lse,
    delta,
    ring,
    limit,
    scale,
    DIM: gl.constexpr,
    TILE_K: gl.constexpr,
    BUFFERS: gl.constexpr,
    MASK: gl.constexpr,  # whether some query does not see all of the tile
    FIRST: gl.constexpr,  # whether there is no step before
):
    """dq with tile i of the keys; its product may still be under way."""
    k_mem, v_mem, full, free = ring
    at = i % BUFFERS
    parity = (i // BUFFERS) & 1
    k = k_mem.index(at).reshape([TILE_K, DIM])
    v = v_mem.index(at).reshape([TILE_K, DIM])
    SCORE: gl.constexpr = lse.type.layout.parent
    zeros = gl.zeros([lse.shape[0], TILE_K], gl.float32, SCORE)

    mbarrier.wait(full.index(2 * at), parity)
    score = warpgroup_mma(
        q, k.permute((1, 0)), zeros, use_acc=False, is_async=True
    )
    mbarrier.wait(full.index(2 * at + 1), parity)
    dp = warpgroup_mma(
        dy, v.permute((1, 0)), zeros, use_acc=False, is_async=True
    )

    # Products end in their order: when at most one is under way, the scores
    # are there, and so is the sum of the last step.
    # Its operand ds had to stay in its registers until now.
    score, dq, ds = warpgroup_mma_wait(1, deps=[score, dq, ds])
    if not FIRST:
        mbarrier.arrive(free.index(2 * ((i - 1) % BUFFERS)), count=1)
    if MASK:
        KEYS: gl.constexpr = gl.SliceLayout(0, SCORE)
        key = i * TILE_K + gl.arange(0, TILE_K, KEYS)
        seen = key[None, :] < limit[:, None]
        score = gl.where(seen, score, float("-inf"))
    p = gl.exp2(score * scale - lse[:, None])

    dp = warpgroup_mma_wait(0, deps=[dp])
    mbarrier.arrive(free.index(2 * at + 1), count=1)
    ds_of_tile = (p * (dp - delta[:, None])).to(ds.dtype)
    ds = gl.convert_layout(ds_of_tile, ds.type.layout)
    dq = warpgroup_mma(ds, k, dq, is_async=True)
    return dq, ds


@gluon.jit
def _group_bwd(
    half,
    dq_desc,
    lse_ptr,  # of the first query of this head, as delta_ptr
    delta_ptr,
    q_mem,
    dy_mem,
    y_mem,
    q_full,
    ring,
    batch,
    head,
    first,  # the first query of both groups
    keys,
    scale,
    log2e,
    whole,  # tiles that all of our queries see
    steps,  # tiles that some of them see
    CAUSAL: gl.constexpr,
    RAGGED: gl.constexpr,
    DIM: gl.constexpr,
    TILE_Q: gl.constexpr,
    TILE_K: gl.constexpr,
    BUFFERS: gl.constexpr,
):
    """dq of 64 queries."""
    DTYPE: gl.constexpr = dq_desc.dtype
    SCORE: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, 1], [16, TILE_K, 16]
    )
    SUM: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, 1], [16, DIM, 16]
    )
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUM, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, SCORE)
    query = first + half * TILE_Q + gl.arange(0, TILE_Q, ROW)
    limit = gl.full([TILE_Q], 0, gl.int32, ROW) + keys
    if CAUSAL:
        limit = gl.minimum(query + 1, limit)
    lse = gl.load(lse_ptr + query)

    mbarrier.wait(q_full, 0)
    q = q_mem.index(half).reshape([TILE_Q, DIM])
    dy = dy_mem.index(half).reshape([TILE_Q, DIM])
    y = y_mem.index(half).reshape([TILE_Q, DIM])
    product = y.load(SUM).to(gl.float32) * dy.load(SUM).to(gl.float32)
    delta = gl.convert_layout(gl.sum(product, axis=1), ROW)
    gl.store(delta_ptr + query, delta)

    both = scale * log2e
    dq = gl.zeros([TILE_Q, DIM], gl.float32, SUM)
    ds = gl.zeros([TILE_Q, TILE_K], DTYPE, LEFT)
    dq, ds = _step_bwd(
        dq, ds, 0, q, dy, lse, delta, ring, limit, both, DIM, TILE_K, BUFFERS,
        CAUSAL or RAGGED, True,
    )  # fmt: skip
    for i in range(1, whole):
        dq, ds = _step_bwd(
            dq, ds, i, q, dy, lse, delta, ring, limit, both, DIM, TILE_K,
            BUFFERS, False, False,
        )  # fmt: skip
    if CAUSAL or RAGGED:
        for i in range(gl.maximum(whole, 1), steps):
            dq, ds = _step_bwd(
                dq, ds, i, q, dy, lse, delta, ring, limit, both, DIM, TILE_K,
                BUFFERS, True, False,
            )  # fmt: skip
    dq, ds = warpgroup_mma_wait(0, deps=[dq, ds])

    q.store((dq * scale).to(DTYPE))
    fence_async_shared()
    place = [batch, head, first + half * TILE_Q, 0]
    STORE(dq_desc, place, q_mem.index(half))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["heads", "queries", "keys"])
def _warps_bwd_queries(
    q_desc,  # (batch, heads, queries, up to DIM), in tiles of TILE_Q queries
    k_desc,  # (batch, heads / GROUP, keys, up to DIM), in tiles of TILE_K
    v_desc,  # as k_desc
    y_desc,  # as q_desc, and so are the next two
    dy_desc,
    dq_desc,
    lse_ptr,  # (batch, heads, rows)
    delta_ptr,  # (batch, heads, rows): stored for the kernel of the keys
    rows,  # queries, and those that only fill the last tiles
    heads,  # of the queries
    queries,
    keys,
    scale,  # that of the scores alone, for dq
    log2e,  # LOG2E, for the powers of 2
    GROUP: gl.constexpr,  # heads of queries that share a head of keys
    CAUSAL: gl.constexpr,
    RAGGED: gl.constexpr,  # not causal, and the last tile of keys is not full
    DIM: gl.constexpr,  # width of a tile: the head dimension, or more
    TILE_Q: gl.constexpr,  # queries of a group of warps
    TILE_K: gl.constexpr,  # keys of a step
    BUFFERS: gl.constexpr,  # tiles of keys, and of values, in shared memory
    num_warps: gl.constexpr,
):
    # Which queries are ours, and which keys do they see?
    OWN: gl.constexpr = 2 * TILE_Q
    tiles = gl.cdiv(queries, OWN)
    tile = gl.program_id(0) % tiles
    if CAUSAL:
        tile = tiles - 1 - tile
    first = tile * OWN
    lead = gl.program_id(0) // tiles
    batch = lead // heads
    head = lead % heads
    whole = keys // TILE_K
    steps = gl.cdiv(keys, TILE_K)
    if CAUSAL:
        whole = gl.minimum(first // TILE_K, whole)
        steps = gl.minimum(gl.cdiv(first + OWN, TILE_K), steps)

    # Shared memory, and a ring of buffers.
    DTYPE: gl.constexpr = q_desc.dtype
    q_mem = gl.allocate_shared_memory(
        DTYPE, [2, 1, 1, TILE_Q, DIM], q_desc.layout
    )
    dy_mem = gl.allocate_shared_memory(
        DTYPE, [2, 1, 1, TILE_Q, DIM], q_desc.layout
    )
    y_mem = gl.allocate_shared_memory(
        DTYPE, [2, 1, 1, TILE_Q, DIM], q_desc.layout
    )
    k_mem = gl.allocate_shared_memory(
        DTYPE, [BUFFERS, 1, 1, TILE_K, DIM], k_desc.layout
    )
    v_mem = gl.allocate_shared_memory(
        DTYPE, [BUFFERS, 1, 1, TILE_K, DIM], v_desc.layout
    )
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    full = gl.allocate_shared_memory(gl.int64, [2 * BUFFERS, 1], BARRIER)
    free = gl.allocate_shared_memory(gl.int64, [2 * BUFFERS, 1], BARRIER)
    mbarrier.init(q_full, count=1)
    for i in gl.static_range(2 * BUFFERS):
        mbarrier.init(full.index(i), count=1)  # the loading warp
        mbarrier.init(free.index(i), count=2)  # both groups
    fence_async_shared()
    ring = (k_mem, v_mem, full, free)
    at = lead.to(gl.int64) * rows  # may pass 2**31
    lse_ptr += at
    delta_ptr += at

    gl.warp_specialize(
        [
            (_group_bwd, (
                0, dq_desc, lse_ptr, delta_ptr, q_mem, dy_mem, y_mem, q_full,
                ring, batch, head, first, keys, scale, log2e, whole, steps,
                CAUSAL, RAGGED, DIM, TILE_Q, TILE_K, BUFFERS,
            )),
            (_group_bwd, (
                1, dq_desc, lse_ptr, delta_ptr, q_mem, dy_mem, y_mem, q_full,
                ring, batch, head, first, keys, scale, log2e, whole, steps,
                CAUSAL, RAGGED, DIM, TILE_Q, TILE_K, BUFFERS,
            )),
            (_load_bwd, (
                q_desc, dy_desc, y_desc, k_desc, v_desc, q_mem, dy_mem, y_mem,
                q_full, ring, batch, head, head // GROUP, first, steps, TILE_Q,
                TILE_K, BUFFERS,
            )),
        ],
        [4, 1],  # warps of the second and of the third
        [240, 24],  # registers of their threads
    )  # fmt: skip


def fast_queries(q, k, v, y, dy, dq, lse, delta, is_causal, scale):
    """dq by the kernel in Gluon."""
    plan = {
        "DIM": width_of(q.shape[-1]),
        "TILE_Q": OWN // 2,
        "TILE_K": 64,
        "BUFFERS": 3,
        "num_warps": 4,
    }
    launch_queries(
        _warps_bwd_queries, tiles_for_gluon, OWN, plan, q, k, v, y, dy, dq,
        lse, delta, is_causal, scale,
    )  # fmt: skip


# %%

# Scaffold: the clock, in turns, from page 01.


def in_turns(calls):
    """µs of each call on the GPU: median, 20% and 80% quantiles.

    ``calls`` are functions by their names. Each is recorded as a CUDA graph
    that overwrites L2 and makes the call, and one more only overwrites L2.
    The graphs are replayed in turns; what the last one takes is subtracted.
    """
    larger_than_l2 = torch.empty(2**28, dtype=torch.int8, device=DEVICE)

    def recorded(call):
        call()  # compiles the kernels
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            larger_than_l2.zero_()
            result = call()
        graph.replay()  # the first replay takes longer
        return graph, result  # the memory of the result stays its own

    def elapsed(graph):
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        return 1000 * start.elapsed_time(end)

    graphs = {name: recorded(call) for name, call in calls.items()}
    without, _ = recorded(lambda: None)
    times = {name: [] for name in graphs}
    for _ in range(15):
        for name, (graph, _) in graphs.items():
            times[name].append(elapsed(graph) - elapsed(without))
    found = {}
    for name, each in times.items():
        each.sort()
        found[name] = each[7], each[3], each[11]
    return found


# %%

# Scaffold: inputs, and PyTorch by a library, from page 03.

TOKENS = 16384

LENGTHS = [1024, 2048, 4096, 8192, 16384]

NOTHING = 3 * [float("nan")]  # where a line has no point


def inputs(N, D, dtype):
    """query, key, value and dy: TOKENS tokens as sequences of N."""
    heads = 2048 // D
    return [
        torch.randn(
            TOKENS // N, heads, N, D, device=DEVICE, dtype=dtype
        ).requires_grad_()
        for _ in range(4)
    ]


def with_backend(backend, is_causal):
    """PyTorch's function, by a library of this name."""

    def function(query, key, value):
        with torch.nn.attention.sdpa_kernel(backend):
            return F.scaled_dot_product_attention(
                query, key, value, is_causal=is_causal
            )

    return function


# %%

# Scaffold: speeds, and a benchmark of any pass.

NAMES = {
    "triton": "Triton",
    "one": "one program an SM",
    "two": "two groups, one program",
    "plain": "Triton, plain",
    "sdpa-cudnn": "cuDNN, by PyTorch",
    "torch": "FlashAttention-2, by PyTorch",
    "cublas": "A product of matrices",
}


def speeds(products, calls, N, is_causal):
    """TFLOP/s of each call: median, low, high; and of cuBLAS beside them.

    A call has so many products of (N, N) and D for each of 2048 / D heads.
    """
    a = torch.randn(8192, 8192, device=DEVICE, dtype=torch.float16)
    calls = calls | {"cublas": lambda: a @ a}
    found = {}
    for name, times in in_turns(calls).items():
        operations = products * 2 * N * 2048 * TOKENS
        if is_causal:
            operations /= 2
        if name == "cublas":
            operations = 2 * 8192**3
        median, short, long = times
        found[name] = [operations / us * 1e-6 for us in (median, long, short)]
    return found


def libraries(is_causal):
    """PyTorch's function by the libraries that we compare with."""
    backends = torch.nn.attention.SDPBackend
    return {
        "sdpa-cudnn": with_backend(backends.CUDNN_ATTENTION, is_causal),
        "torch": with_backend(backends.FLASH_ATTENTION, is_causal),
    }


def benchmark_of(plot_name, mode, D, is_causal, dtype, lines):
    return triton.testing.Benchmark(
        x_names=["N"],
        x_vals=LENGTHS,
        x_log=True,
        xlabel="N (queries, and keys)",
        line_arg="provider",
        line_vals=lines,
        line_names=[NAMES[line] for line in lines],
        ylabel="TFLOP/s",
        plot_name=plot_name,
        args={
            "D": D,
            "is_causal": is_causal,
            "dtype": dtype,
            "mode": mode,
        },
    )


def in_percent(benchmark):
    """Draw a benchmark, and print each speed in % of that of cuDNN."""
    table = benchmark.run(show_plots=ON_GPU, return_df=True)
    table = table.astype({"N": int}).set_index("N")
    table.columns = [column.split(" (")[0] for column in table.columns]
    if table.isna().all(axis=None):
        print("Timing needs a GPU; the page shows recorded figures.")
        return
    cudnn = table[NAMES["sdpa-cudnn"]]
    percent = 100 * table.div(cudnn, axis="index")
    print("speed in % of that of cuDNN")
    print(percent.to_string(float_format="%.0f"))


# %%

# Scaffold: the kernels of the queries, a benchmark.


@functools.cache  # all lines in turns; then each is asked for its own
def queries_speeds(N, D, dtype, is_causal):
    if not ON_GPU:
        return {}  # the interpreter cannot be timed
    q, k, v, dy = (t.detach() for t in inputs(N, D, dtype))
    scale = D**-0.5
    y, lse = forward(q, k, v, is_causal, scale)
    dq = torch.empty_like(q)
    delta = torch.empty_like(lse)
    given = q, k, v, y, dy, dq, lse, delta, is_causal, scale
    calls = {"plain": functools.partial(plain_queries, *given)}
    if by_warps(q):
        calls["two"] = functools.partial(fast_queries, *given)
        for name, buffers in (("triton", 2), ("one", 4)):
            plan = {"DIM": D, "TILE_Q": 64, "TILE_K": 64, "BUFFERS": buffers}
            plan |= {"num_warps": 4, "maxnreg": 128}
            calls[name] = functools.partial(
                launch_queries, _half_sm_bwd_queries, tiles_for_gluon, 64,
                plan, *given,
            )  # fmt: skip
    return speeds(3, calls, N, is_causal)


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=LENGTHS,
        x_log=True,
        xlabel="N (queries, and keys)",
        line_arg="provider",
        line_vals=["triton", "two", "one", "plain", "cublas"],
        line_names=[
            NAMES[line] for line in ("triton", "two", "one", "plain", "cublas")
        ],
        ylabel="TFLOP/s",
        plot_name="halves-queries",
        args={
            "D": 128,
            "is_causal": False,
            "dtype": torch.float16,
            "pass": "the kernel of the queries alone",
        },
    )
)
def bench_queries(N, D, is_causal, dtype, provider, **_):
    """All lines in turns, 15 times, each a CUDA graph that overwrites L2
    first; the time of a graph that only overwrites L2 is subtracted."""
    return queries_speeds(N, D, dtype, is_causal).get(provider, NOTHING)


# %%

bench_queries.run(show_plots=ON_GPU)

# %%
# **What the figure shows.**
# On the H200 our kernel reaches 685 TFLOP/s at 16384 keys. That
# is 1.16 to 1.25 times the speed of plain Triton over all
# lengths, and 1.05 to 1.10 times that of two groups in a program.
# With one program on an SM it reaches 557 TFLOP/s.
#
# **Why.**
# With four buffers an SM has one group that multiplies, and with two buffers
# it has two. So what a loading warp can do ahead of time counts for less than
# a second group. It multiplies when the first one begins, ends, computes
# powers, or waits for a product that it needs right away. Two groups in one
# program can do the same but for the beginning and the end, when both have
# nothing to multiply.
#
# **What follows.**
# The kernel of the keys gets the same form.

# %%
# The keys
# --------
#
# A program of the keys has 64 keys and their values, and takes one tile of
# queries after the other, from all heads of queries that share these keys. Of
# each tile it needs the queries, ``dy``, and two numbers for each query: the
# log-sum-exp and :math:`\delta`. All four come by the TMA, and one barrier
# tells that they are there.


@gluon.jit
def _load_bwd_keys(
    k_desc,
    v_desc,
    q_desc,
    dy_desc,
    lse_desc,
    delta_desc,
    k_mem,
    v_mem,
    own_full,
    ring,
    batch,
    k_head,
    row,  # the first of our heads of queries, if all sequences' are counted
    rows,  # of lse and delta, for each head
    first,  # our first key
    begin,  # the first query that sees it
    steps,  # of each head
    GROUP: gl.constexpr,
    TILE_Q: gl.constexpr,
    BUFFERS: gl.constexpr,
):
    """What the loading warp does for dk and dv."""
    q_mem, dy_mem, lse_mem, delta_mem, full, free = ring
    mbarrier.expect(own_full, 2 * k_desc.block_type.nbytes)
    FETCH(k_desc, [batch, k_head, first, 0], own_full, k_mem)
    FETCH(v_desc, [batch, k_head, first, 0], own_full, v_mem)
    for i in range(steps * GROUP):
        at = i % BUFFERS
        member = i // steps  # of the heads that share our keys
        start = begin + i % steps * TILE_Q
        place = [batch, k_head * GROUP + member, start, 0]
        # 32 bits are enough, or queries would not fit into memory.
        flat = [(row + member) * rows + start]
        mbarrier.wait(free.index(at), (i // BUFFERS + 1) & 1)
        mbarrier.expect(
            full.index(at),
            2 * q_desc.block_type.nbytes + 2 * lse_desc.block_type.nbytes,
        )
        FETCH(q_desc, place, full.index(at), q_mem.index(at))
        FETCH(lse_desc, flat, full.index(at), lse_mem.index(at))
        FETCH(dy_desc, place, full.index(at), dy_mem.index(at))
        FETCH(delta_desc, flat, full.index(at), delta_mem.index(at))


# %%
# A step has four products: the scores, ``dp``, and what is added to ``dv`` and
# to ``dk``. How many registers does that need? Each of the two sums has 64 ×
# 128 numbers, which are 64 registers for each of 128 threads. The scores and
# ``dp`` take 32 each. Powers and ``ds`` are operands in 16 bits, and take 16
# each. That makes 224, and a thread has 232.
#
# But two numbers for each query have to be subtracted, lse from the scores and
# :math:`\delta` from ``dp``. Queries are the columns of these tiles, and a
# thread has 16 columns. Their numbers would take 32 registers more, and there
# is no room for them. In the kernel of the queries it is another matter: there
# they belong to rows, and a thread has two rows.
#
# **Let a product subtract.** A product adds to what its sum begins with. For
# the scores and ``dp`` that was zero until now. We let ``dp`` begin with
# ``-delta``. Then ``dp - delta`` is there when the product is, in the
# registers where it has to be anyway. The numbers that are subtracted are
# needed only until the product begins, and keep no registers after that. For
# the scores it is ``-lse / scale``, because they are multiplied by the scale
# after the product. Here :math:`s` is the scale times :math:`\log_2 e`, as lse
# is to the base 2:
#
# .. math:: 2^{s\,(q \cdot k) - \mathrm{lse}}
#    = 2^{s\,(q \cdot k - \mathrm{lse} / s)}.
#
# With 128 numbers in a head even that is not enough if ``dv`` is under way
# while ``ds`` is computed, because its operand ``p`` keeps its registers until
# ``dv`` is done. So ``WAITS`` lets the step wait for ``dv`` first. With 64
# numbers the sums take half as many registers, and nobody has to wait.


@gluon.jit
def _step_bwd_keys(
    dk,
    dv,
    p,  # of the last step: operands of products that may be under way
    ds,
    i,
    start,  # the first query of the step
    first,  # our first key
    k,
    v,
    ring,
    scale,
    CAUSAL: gl.constexpr,
    DIM: gl.constexpr,
    TILE_K: gl.constexpr,
    TILE_Q: gl.constexpr,
    BUFFERS: gl.constexpr,
    WAITS: gl.constexpr,  # for dv, before ds takes registers
):
    """dk and dv with a tile of queries; products may still be under way."""
    q_mem, dy_mem, lse_mem, delta_mem, full, free = ring
    at = i % BUFFERS
    q = q_mem.index(at).reshape([TILE_Q, DIM])
    dy = dy_mem.index(at).reshape([TILE_Q, DIM])
    SCORE: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, 1], [16, TILE_Q, 16]
    )
    QUERY: gl.constexpr = gl.SliceLayout(0, SCORE)
    zeros = gl.zeros([TILE_K, TILE_Q], gl.float32, SCORE)

    # A product adds to what it is given. We give it what must be subtracted,
    # so that lse and delta need no registers of their own.
    mbarrier.wait(full.index(at), (i // BUFFERS) & 1)
    lse = lse_mem.index(at).load(QUERY)
    score = warpgroup_mma(
        k,
        q.permute((1, 0)),
        zeros - (lse / scale)[None, :],
        is_async=True,
    )
    delta = delta_mem.index(at).load(QUERY)
    dp = warpgroup_mma(
        v, dy.permute((1, 0)), zeros - delta[None, :], is_async=True
    )

    # When at most one product is under way, the scores are there, and so are
    # the sums of the last step: its buffer may be filled again.
    score, dk, dv, p, ds = warpgroup_mma_wait(1, deps=[score, dk, dv, p, ds])
    mbarrier.arrive(
        free.index(gl.maximum(i - 1, 0) % BUFFERS), count=1, pred=i > 0
    )
    if CAUSAL:
        KEY: gl.constexpr = gl.SliceLayout(1, SCORE)
        if start < first + TILE_K:
            key = first + gl.arange(0, TILE_K, KEY)
            query = start + gl.arange(0, TILE_Q, QUERY)
            hidden = key[:, None] > query[None, :]
            score = gl.where(hidden, float("-inf"), score)
    power = gl.exp2(score * scale)
    p = gl.convert_layout(power.to(p.dtype), p.type.layout)
    dv = warpgroup_mma(p, dy, dv, is_async=True)
    if WAITS:
        dp, dv, p = warpgroup_mma_wait(0, deps=[dp, dv, p])
    else:
        dp = warpgroup_mma_wait(1, deps=[dp])
    ds = gl.convert_layout((power * dp).to(ds.dtype), ds.type.layout)
    dk = warpgroup_mma(ds, q, dk, is_async=True)
    if WAITS:
        # It is not under way, but the loop carries a sum that may be.
        dv = warpgroup_mma_init(dv)
    return dk, dv, p, ds


# %%
# When the last step is done, nobody reads the keys and values any more, and
# their place in shared memory takes the results on their way out.


@gluon.jit
def _group_bwd_keys(
    dk_desc,
    dv_desc,
    k_mem,
    v_mem,
    own_full,
    ring,
    batch,
    k_head,
    first,
    begin,
    steps,
    scale,
    log2e,
    GROUP: gl.constexpr,
    CAUSAL: gl.constexpr,
    DIM: gl.constexpr,
    TILE_K: gl.constexpr,
    TILE_Q: gl.constexpr,
    BUFFERS: gl.constexpr,
    WAITS: gl.constexpr,
):
    """dk and dv of 64 keys."""
    DTYPE: gl.constexpr = dk_desc.dtype
    SUM: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, 1], [16, DIM, 16]
    )
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUM, 2)
    k = k_mem.reshape([TILE_K, DIM])
    v = v_mem.reshape([TILE_K, DIM])
    dk = warpgroup_mma_init(gl.zeros([TILE_K, DIM], gl.float32, SUM))
    dv = warpgroup_mma_init(gl.zeros([TILE_K, DIM], gl.float32, SUM))
    p = gl.zeros([TILE_K, TILE_Q], DTYPE, LEFT)
    ds = gl.zeros([TILE_K, TILE_Q], DTYPE, LEFT)
    mbarrier.wait(own_full, 0)
    for i in range(GROUP * steps):
        start = begin + i % steps * TILE_Q
        dk, dv, p, ds = _step_bwd_keys(
            dk, dv, p, ds, i, start, first, k, v, ring, scale * log2e, CAUSAL,
            DIM, TILE_K, TILE_Q, BUFFERS, WAITS,
        )  # fmt: skip
    dk, dv, p, ds = warpgroup_mma_wait(0, deps=[dk, dv, p, ds])

    # The keys and values have been read: their place takes the results.
    k.store((dk * scale).to(DTYPE))
    v.store(dv.to(DTYPE))
    fence_async_shared()
    STORE(dk_desc, [batch, k_head, first, 0], k_mem)
    STORE(dv_desc, [batch, k_head, first, 0], v_mem)
    tma.store_wait(0)


# %%
# The kernel around the step is like that of the queries. If causal, its first
# tile of queries is the one with the same indices as its keys.


@gluon.jit(do_not_specialize=["heads", "queries", "keys"])
def _half_sm_bwd_keys(
    q_desc,  # (batch, heads, queries, up to DIM), in tiles of TILE_Q queries
    k_desc,  # (batch, heads / GROUP, keys, up to DIM), in tiles of TILE_K
    v_desc,  # as k_desc
    dy_desc,  # as q_desc
    dk_desc,  # as k_desc
    dv_desc,  # as k_desc
    lse_desc,  # (batch * heads * rows,), in tiles of TILE_Q
    delta_desc,  # as lse_desc
    rows,  # queries, and those that only fill the last tile
    heads,  # of the queries
    queries,
    keys,
    scale,  # that of the scores alone, for dk
    log2e,  # LOG2E, for the powers of 2
    GROUP: gl.constexpr,  # heads of queries that share a head of keys
    CAUSAL: gl.constexpr,
    DIM: gl.constexpr,  # width of a tile: the head dimension, or more
    TILE_Q: gl.constexpr,  # queries of a step
    TILE_K: gl.constexpr,  # keys of a program
    BUFFERS: gl.constexpr,  # tiles of queries in shared memory
    WAITS: gl.constexpr,
    num_warps: gl.constexpr,
):
    # Which keys are ours, and which queries see them?
    tiles = gl.cdiv(keys, TILE_K)
    first = gl.program_id(0) % tiles * TILE_K
    lead = gl.program_id(0) // tiles
    batch = lead // (heads // GROUP)
    k_head = lead % (heads // GROUP)
    row = batch * heads + k_head * GROUP
    begin = 0
    if CAUSAL:
        begin = first  # a multiple of TILE_Q
    steps = gl.maximum(gl.cdiv(queries - begin, TILE_Q), 0)

    # Shared memory, and a ring of buffers.
    DTYPE: gl.constexpr = q_desc.dtype
    k_mem = gl.allocate_shared_memory(
        DTYPE, [1, 1, TILE_K, DIM], k_desc.layout
    )
    v_mem = gl.allocate_shared_memory(
        DTYPE, [1, 1, TILE_K, DIM], v_desc.layout
    )
    q_mem = gl.allocate_shared_memory(
        DTYPE, [BUFFERS, 1, 1, TILE_Q, DIM], q_desc.layout
    )
    dy_mem = gl.allocate_shared_memory(
        DTYPE, [BUFFERS, 1, 1, TILE_Q, DIM], dy_desc.layout
    )
    lse_mem = gl.allocate_shared_memory(
        gl.float32, [BUFFERS, TILE_Q], lse_desc.layout
    )
    delta_mem = gl.allocate_shared_memory(
        gl.float32, [BUFFERS, TILE_Q], delta_desc.layout
    )
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    own_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    full = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], BARRIER)
    free = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], BARRIER)
    mbarrier.init(own_full, count=1)
    for i in gl.static_range(BUFFERS):
        mbarrier.init(full.index(i), count=1)  # the loading warp
        mbarrier.init(free.index(i), count=1)  # those that multiply
    fence_async_shared()
    ring = (q_mem, dy_mem, lse_mem, delta_mem, full, free)

    gl.warp_specialize(
        [
            (_group_bwd_keys, (
                dk_desc, dv_desc, k_mem, v_mem, own_full, ring, batch, k_head,
                first, begin, steps, scale, log2e, GROUP, CAUSAL, DIM, TILE_K,
                TILE_Q, BUFFERS, WAITS,
            )),
            (_load_bwd_keys, (
                k_desc, v_desc, q_desc, dy_desc, lse_desc, delta_desc, k_mem,
                v_mem, own_full, ring, batch, k_head, row, rows, first, begin,
                steps, GROUP, TILE_Q, BUFFERS,
            )),
        ],
        [1],  # warp of the second
        [24],  # registers of its threads
    )  # fmt: skip


# %%
# **When the compiler waits behind our back.** How do we know that a kernel has
# enough registers? With too few, ``ptxas``, NVIDIA's assembler, usually spills
# some to memory, and the figure for that is easy to find. Here it can do
# something else: it makes the warps wait for each product as soon as it has
# begun. Nothing is spilled, and the numbers of registers and bytes look as
# they should. Only the kernel is slow, because nothing runs beside anything.
#
# It happened to us in several drafts. ``ptxas`` writes a line about it, but
# Triton does not show what it writes if all went well. What gives it away is
# the machine code. There a product is made of instructions called ``HGMMA``,
# and a wait is called ``WARPGROUP.DEPBAR``. About as many waits as ``HGMMA``
# are a bad sign. With 128 numbers in a head, the kernel of the keys has 24
# ``HGMMA`` and 5 waits, and that of the queries has 20 and 3. The panels under
# the kernels show both.
#
# Nor does a wait always stay where we have put it. In the kernel of the
# queries ``ptxas`` has moved the one for ``dp`` up, to before most of the
# powers. `Programs that stay <07-programs-that-stay.html>`_ tries whether such
# a thing costs anything.
#
# Two more descriptors are needed, for lse and :math:`\delta`, whose tiles are
# pieces of one long row:


def row_tiles(t, length):
    """A descriptor of all numbers, in tiles of so many."""
    layout = gl.NVMMASharedLayout(0, 32, rank=1)
    return GluonDescriptor.from_tensor(t.view(-1), [length], layout)


def launch_keys_in_halves(
    plan, q, k, v, dy, dk, dv, lse, delta, is_causal, scale
):
    """dk and dv by the kernel in Gluon."""
    _, heads, queries, _ = q.shape
    batch, k_heads, keys, _ = k.shape
    tile_q = plan["TILE_Q"]
    tile_k = plan["TILE_K"]
    programs = triton.cdiv(keys, tile_k) * batch * k_heads
    _half_sm_bwd_keys[(programs,)](
        q_desc=tiles_for_gluon(q, tile_q),
        k_desc=tiles_for_gluon(k, tile_k),
        v_desc=tiles_for_gluon(v, tile_k),
        dy_desc=tiles_for_gluon(dy, tile_q),
        dk_desc=tiles_for_gluon(dk, tile_k),
        dv_desc=tiles_for_gluon(dv, tile_k),
        lse_desc=row_tiles(lse, tile_q),
        delta_desc=row_tiles(delta, tile_q),
        rows=lse.shape[-1],
        heads=heads,
        queries=queries,
        keys=keys,
        scale=scale,
        log2e=LOG2E,
        GROUP=heads // k_heads,
        CAUSAL=is_causal,
        **plan,
    )


# %%
# Around the kernels
# ------------------
#
# Who gets the kernels in Gluon? Inputs of 16 bits on a Hopper GPU, whose tiles
# have 64 or 128 columns. With 64, tiles are half as large, so steps of 128
# keys or four buffers fit, and two programs still share an SM. As lse is
# divided by the scale, a scale that is next to zero gets plain kernels.


def in_half_an_sm(query, scale):
    """Whether kernels in Gluon give the gradients."""
    if not ON_GPU or torch.version.hip is not None:
        return False
    if torch.cuda.get_device_capability() != (9, 0):
        return False
    if abs(scale) < 1e-30:  # lse is divided by it
        return False
    wide = width_of(query.shape[-1])
    return query.dtype != torch.float32 and wide in (64, 128)


HALF_AN_SM = {
    # width: keys of a step and buffers for dq, then buffers for dk and dv
    64: (128, 2, 4),
    128: (64, 2, 2),
}


def plan_of_halves(query, buffers=None):
    """For the kernel of the queries, and for that of the keys."""
    wide = width_of(query.shape[-1])
    tile_k, of_keys, of_queries = HALF_AN_SM[wide]
    common = {
        "DIM": wide,
        "TILE_Q": 64,
        "num_warps": 4,
        # Registers of a thread, on average: two programs share 65536.
        "maxnreg": 128,
    }
    return (
        common | {"TILE_K": tile_k, "BUFFERS": buffers or of_keys},
        common
        | {
            "TILE_K": 64,
            "BUFFERS": buffers or of_queries,
            "WAITS": wide == 128,
        },
    )


def gradients(
    dy, query, key, value, y, lse, is_causal, scale, plain=False, buffers=None
):
    """dq, dk and dv."""
    dq = rows_like(query)
    dk = rows_like(key)
    dv = rows_like(value)
    if dq.numel() == 0 or dk.numel() == 0:  # nobody attends to anything
        return dq.zero_(), dk.zero_(), dv.zero_()
    q = for_descriptors(query)
    k = for_descriptors(key)
    v = for_descriptors(value)
    dy = for_descriptors(dy)
    delta = torch.empty_like(lse)
    # First the queries, because the keys need their delta.
    if plain or not in_half_an_sm(query, scale):
        plain_queries(q, k, v, y, dy, dq, lse, delta, is_causal, scale)
        launch_keys(q, k, v, dy, dk, dv, lse, delta, is_causal, scale)
        return dq, dk, dv
    for_queries, for_keys = plan_of_halves(query, buffers)
    launch_queries(
        _half_sm_bwd_queries, tiles_for_gluon, 64, for_queries, q, k, v, y,
        dy, dq, lse, delta, is_causal, scale,
    )  # fmt: skip
    launch_keys_in_halves(
        for_keys, q, k, v, dy, dk, dv, lse, delta, is_causal, scale
    )
    return dq, dk, dv


# %%

# Scaffold: autograd, and both passes as operators for torch.compile.


class _AnyAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, is_causal, scale):
        y, lse = forward(query, key, value, is_causal, scale)
        ctx.save_for_backward(query, key, value, y, lse)
        ctx.is_causal = is_causal
        ctx.scale = scale
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        grads = gradients(dy, *ctx.saved_tensors, ctx.is_causal, ctx.scale)
        return *grads, None, None


@torch.library.custom_op("both_passes::half_sm_attention", mutates_args=())
def operator_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    return forward(query, key, value, is_causal, scale)


@operator_forward.register_fake
def _(query, key, value, is_causal, scale):
    if query.numel() == 0 or key.numel() == 0:
        return rows_like(query), empty_lse(query, is_causal)
    return rows_like(query), room_for_lse(query, is_causal)


@torch.library.custom_op("both_passes::half_sm_attention_bwd", mutates_args=())
def operator_backward(
    dy: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    y: torch.Tensor,
    lse: torch.Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return gradients(dy, query, key, value, y, lse, is_causal, scale)


@operator_backward.register_fake
def _(dy, query, key, value, y, lse, is_causal, scale):
    return rows_like(query), rows_like(key), rows_like(value)


def keep(ctx, inputs, output):
    query, key, value, is_causal, scale = inputs
    y, lse = output
    ctx.save_for_backward(query, key, value, y, lse)
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)
    ctx.is_causal = is_causal
    ctx.scale = scale


def operator_gradients(ctx, dy, _):
    grads = operator_backward(dy, *ctx.saved_tensors, ctx.is_causal, ctx.scale)
    return *grads, None, None


BOUND = operator_forward.register_autograd(
    operator_gradients, setup_context=keep
)

# %%

# Scaffold: which arguments are taken, from page 03.

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def check_tensor(name, t, query):
    if t.dtype not in DTYPES:
        raise TypeError(
            f"{name} has {t.dtype}: float16, bfloat16 and float32 are taken"
        )
    if t.dtype != query.dtype:
        raise TypeError(
            f"{name} has {t.dtype}, and query has {query.dtype}: they must be "
            "the same"
        )
    if t.device.type != DEVICE.type:
        raise ValueError(f"{name} is on {t.device}, not on {DEVICE}")
    # Triton starts a kernel on the current GPU, wherever its tensors are.
    if t.is_cuda and t.device.index != torch.cuda.current_device():
        raise ValueError(
            f"{name} is on {t.device}, which is not the current GPU"
        )
    if t.dim() != 4:
        raise ValueError(
            f"{name} has {t.dim()} dimensions, not 4: batch, heads, length, "
            "head dimension"
        )


def check_heads(heads, k_heads, enable_gqa):
    if heads == k_heads:
        return
    if not enable_gqa:
        raise ValueError(
            f"key has {k_heads} heads, and query has {heads}: they must be "
            "the same without enable_gqa"
        )
    if k_heads == 0 or heads % k_heads:
        raise ValueError(
            f"key has {k_heads} heads, and query has {heads}, which must be a "
            "multiple"
        )


def check_arguments(query, key, value, scale, enable_gqa):
    for name, t in (("query", query), ("key", key), ("value", value)):
        check_tensor(name, t, query)
    batch, heads, _, D = query.shape
    if not 1 <= D <= max(TILES):
        raise ValueError(
            f"the head dimension is {D}: 1 to {max(TILES)} are taken"
        )
    for name, t in (("key", key), ("value", value)):
        if t.shape[-1] != D:
            raise ValueError(
                f"the head dimension of {name} is {t.shape[-1]}, and that of "
                f"query is {D}"
            )
        if t.shape[0] != batch:
            raise ValueError(
                f"{name} has {t.shape[0]} sequences, and query has {batch}"
            )
    check_heads(heads, key.shape[1], enable_gqa)
    if value.shape[1] != key.shape[1]:
        raise ValueError(
            f"value has {value.shape[1]} heads, and key has {key.shape[1]}"
        )
    if value.shape[2] != key.shape[2]:
        raise ValueError(
            f"value has {value.shape[2]} rows, and key has {key.shape[2]}"
        )
    if scale is not None and not 0 < scale < float("inf"):
        raise ValueError(f"scale is {scale}: a finite number above 0 is taken")


def as_autocast(*tensors):
    """The tensors, in the type of torch.autocast if that is on."""
    kind = "cuda" if ON_GPU else "cpu"
    if not torch.is_autocast_enabled(kind):
        return tensors
    return [t.to(torch.get_autocast_dtype(kind)) for t in tensors]


# %%


def attention(
    query, key, value, is_causal=False, scale=None, enable_gqa=False
):
    """F.scaled_dot_product_attention without a mask and without dropout.

    query is (batch, heads, queries, D), key and value are (batch, heads, keys,
    D), all in float16, bfloat16 or float32, with D from 1 to 256 and any
    strides. If is_causal, query i sees the keys up to i. Without a scale it is
    one over the root of D. If enable_gqa, query may have a multiple of the
    heads of key.
    """
    query, key, value = as_autocast(query, key, value)
    check_arguments(query, key, value, scale, enable_gqa)
    if scale is None:
        scale = query.shape[-1] ** -0.5
    dtype = query.dtype
    if not ON_GPU and dtype == torch.bfloat16:
        # The interpreter multiplies the bits of bfloat16 as whole numbers.
        query, key, value = query.float(), key.float(), value.float()
    if torch.compiler.is_compiling():
        y, _ = operator_forward(query, key, value, is_causal, scale)
    else:
        y = _AnyAttention.apply(query, key, value, is_causal, scale)
    return y.to(dtype)


# %%
# Is it right?
# ------------
#
# We compare with PyTorch's function in float64, as on the page of `any
# attention <03-any-attention.html>`_, and print the largest error of each
# tensor, as a share of its largest number.

# %%

# Scaffold: a comparison with float64, from page 03.


def check(
    queries, keys, D, dtype, *, heads=2, k_heads=2, is_causal=False, scale=None
):
    """The largest error of y, dq, dk and dv, compared with float64."""
    shapes = {
        "q": (2, heads, queries, D),
        "k": (2, k_heads, keys, D),
        "v": (2, k_heads, keys, D),
    }
    ours = []
    exact = []
    for shape in shapes.values():
        t = torch.randn(shape, device=DEVICE).to(dtype)
        ours.append(t.clone().requires_grad_())
        exact.append(t.double().requires_grad_())
    dy = torch.randn(shapes["q"], device=DEVICE).to(dtype)
    how = {"is_causal": is_causal, "scale": scale, "enable_gqa": True}
    y = attention(*ours, **how)
    y.backward(dy)
    expected = F.scaled_dot_product_attention(*exact, **how)
    expected.backward(dy.double())
    pairs = [(y, expected)]
    pairs += [(t.grad, e.grad) for t, e in zip(ours, exact, strict=True)]
    errors = [((t - e).abs().max() / e.abs().max()).item() for t, e in pairs]
    limit = max(4 * torch.finfo(dtype).eps, 1e-5)
    for name, error in zip(("y", "dq", "dk", "dv"), errors, strict=True):
        assert error < limit, f"{name} is off by {error:.1e}"
    said = " ".join(f"{error:.0e}" for error in errors)
    print(f"{str(dtype)[6:]:8} errors below {limit:.0e}: {said}")


# %%

HALF = torch.float16
check(150, 300, 128, HALF, is_causal=True)
check(300, 150, 128, HALF, is_causal=True)
check(70, 90, 128, HALF, heads=6, k_heads=2, is_causal=True)
check(1, 130, 80, HALF, heads=4, k_heads=1)
check(37, 150, 64, HALF, is_causal=True)
check(150, 260, 128, torch.bfloat16)
check(40, 50, 65, torch.float32, is_causal=True)

# %%
# How fast is the backward pass?
# ------------------------------
#
# We measure with 16 heads of 128 numbers and with 32 heads of 64, and 16384
# tokens in sequences of 1024 to 16384. With 128 numbers, the same kernels with
# four buffers stand beside ours, of which an SM holds one program. Plain
# Triton is what the page before this one has for heads of 64 numbers. Five
# products count for each head, half of them if causal, although our kernels
# have seven.

# %%

# Scaffold: attention backward, five benchmarks.


@functools.cache  # all lines in turns; then each is asked for its own
def backward_speeds(N, D, dtype, is_causal):
    if not ON_GPU:
        return {}  # the interpreter cannot be timed
    q, k, v, dy = (t.detach() for t in inputs(N, D, dtype))
    scale = D**-0.5
    saved = forward(q, k, v, is_causal, scale)
    given = dy, q, k, v, *saved, is_causal, scale
    calls = {
        "triton": functools.partial(gradients, *given),
        "plain": functools.partial(gradients, *given, plain=True),
    }
    if D == 128:
        calls["one"] = functools.partial(gradients, *given, buffers=4)
    for name, function in libraries(is_causal).items():
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        y = function(*leaves)
        calls[name] = functools.partial(
            torch.autograd.grad, y, leaves, dy, retain_graph=True
        )
    return speeds(5, calls, N, is_causal)


@triton.testing.perf_report(
    benchmark_of(
        "halves-backward",
        "backward",
        128,
        False,
        torch.float16,
        ["triton", "one", "plain", "sdpa-cudnn", "torch", "cublas"],
    )
)
def bench_backward(N, D, is_causal, dtype, mode, provider):
    """All lines in turns, 15 times, each a CUDA graph that overwrites L2
    first; the time of a graph that only overwrites L2 is subtracted."""
    found = backward_speeds(N, D, dtype, is_causal)
    return found.get(provider, NOTHING)


@triton.testing.perf_report(
    benchmark_of(
        "halves-backward-causal",
        "backward",
        128,
        True,
        torch.float16,
        ["triton", "one", "plain", "sdpa-cudnn", "torch", "cublas"],
    )
)
def bench_backward_causal(N, D, is_causal, dtype, mode, provider):
    """All lines in turns, 15 times, each a CUDA graph that overwrites L2
    first; the time of a graph that only overwrites L2 is subtracted."""
    found = backward_speeds(N, D, dtype, is_causal)
    return found.get(provider, NOTHING)


@triton.testing.perf_report(
    benchmark_of(
        "halves-backward-causal-bfloat16",
        "backward",
        128,
        True,
        torch.bfloat16,
        ["triton", "sdpa-cudnn", "torch"],
    )
)
def bench_backward_bfloat16(N, D, is_causal, dtype, mode, provider):
    """All lines in turns, 15 times, each a CUDA graph that overwrites L2
    first; the time of a graph that only overwrites L2 is subtracted."""
    found = backward_speeds(N, D, dtype, is_causal)
    return found.get(provider, NOTHING)


@triton.testing.perf_report(
    benchmark_of(
        "halves-backward-64",
        "backward",
        64,
        False,
        torch.float16,
        ["triton", "plain", "sdpa-cudnn", "torch"],
    )
)
def bench_backward_64(N, D, is_causal, dtype, mode, provider):
    """All lines in turns, 15 times, each a CUDA graph that overwrites L2
    first; the time of a graph that only overwrites L2 is subtracted."""
    found = backward_speeds(N, D, dtype, is_causal)
    return found.get(provider, NOTHING)


@triton.testing.perf_report(
    benchmark_of(
        "halves-backward-causal-64",
        "backward",
        64,
        True,
        torch.float16,
        ["triton", "plain", "sdpa-cudnn", "torch"],
    )
)
def bench_backward_causal_64(N, D, is_causal, dtype, mode, provider):
    """All lines in turns, 15 times, each a CUDA graph that overwrites L2
    first; the time of a graph that only overwrites L2 is subtracted."""
    found = backward_speeds(N, D, dtype, is_causal)
    return found.get(provider, NOTHING)


# %%

in_percent(bench_backward)

# %%

in_percent(bench_backward_causal)

# %%

in_percent(bench_backward_bfloat16)

# %%

in_percent(bench_backward_64)

# %%

in_percent(bench_backward_causal_64)

# %%
# **What the five figures show.**
# On the H200, with 128 numbers in a head, our backward pass reaches 514
# TFLOP/s at 16384 keys, and 522 if causal. Over all lengths it is at 91% to
# 100% of cuDNN's speed, and at 95% to 115% if causal. In bfloat16, causal, it
# is at 95% to 117%. With one program on an SM it is at 70% to 76% and at 69%
# to 82%, and plain Triton is at 81% to 86% and at 81% to 97%.
#
# With 64 numbers in a head we are at 100% to 107% of cuDNN's speed, and at
# 102% to 116% if causal, where plain Triton is at 94% to 104% and at 88% to
# 103%.
#
# Ours is 1.9 to 2.0 times as fast as FlashAttention-2 with 128 numbers in a
# head, and 1.9 to 2.1 times if causal. With 64 it is 1.7 to 1.8 times, and 1.7
# to 1.9 times if causal. On the page before this one, with 128 numbers, our
# backward pass was at 84% to 92%, and at 86% to 104% if causal. That was
# another run.
#
# **Why.**
# The whole backward pass gains more than the kernel of the queries. With two
# programs on an SM it is 1.30 to 1.40 times as fast as with one.
#
# With seven products our kernels do 7/5 of 514, which is 720 TFLOP/s at 16384
# keys. That is 94% of what the product of matrices reaches beside them. So
# with long sequences the Tensor Cores hardly have a pause any more. If cuDNN
# has five products, its 536 TFLOP/s are 70% of it. Then it is ahead because it
# computes less, and not because its Tensor Cores wait less.
#
# **What follows.**
# With 128 numbers in a head and long sequences, cuDNN is ahead by up to 10%.
# To pass it we would have to save products, and `Five products or seven
# <02-backward.html>`_ explains what that costs. With 64 numbers nothing that
# we measured is faster, at any length, but at 4096 keys, not causal, cuDNN is
# as fast.
#
# Would the forward kernel gain as much? In a trial on an H200, in this form
# and with 128 numbers in a head, it took 9% less time at 1024 keys if causal,
# and 2% to 6% more in all other cases that we tried. So forward we keep two
# groups in a program, and `Programs that stay <07-programs-that-stay.html>`_
# finds another way for short sequences.
#
# Where PyTorch or a library is better
# ------------------------------------
#
# - **cuDNN is faster in the backward pass** with 128 numbers in a head, from
#   2048 keys on, and from 8192 on if causal.
# - **Forward**, all holds that the page of `warps that only load
#   <05-warp-specialization.html>`_ says: cuDNN is ahead with shorter
#   sequences. `Programs that stay <07-programs-that-stay.html>`_ is about
#   that.
# - **FlashAttention-3** has warps that only load in its backward pass, too. We
#   have not measured it. It can also multiply in 8 bits.
# - **Other GPUs.** Our kernels in Gluon need the instructions of Hopper, and
#   the registers and the shared memory that its SMs have.
# - **PyTorch takes more**: masks, dropout, and the other things that the page
#   of any attention lists.
# - **Gluon is experimental.** A new version of Triton may ask for changes.
#   These kernels compile with Triton 3.6 to 3.9.
#
# Exercise
# --------
#
# **Exercise 1: a bias for each key.**
# Some models add a number to all scores of a key, a *bias*, which is trained
# like any other parameter. With :math:`b_j` for key :math:`j`, its score with
# query :math:`i` becomes :math:`s \, q_i \cdot k_j + b_j`, where :math:`s` is
# the scale alone.
#
# The kernel below computes ``dq`` of one tile in plain Triton, with its
# subtractions in the products. It does not know the bias yet. Add it where it
# costs nothing, and store its gradient in place of the zeros. ``exercise_1``
# compares both with autograd.
#
# **Hint 1.** What stands in the sum of the product is multiplied by the scale
# after it, and by :math:`\log_2 e`. The bias needs the second factor and not
# the first. And lse? So what must the product begin with?
#
# **Hint 2.** The gradient of the scores is ``ds``. In which scores does the
# bias of a key stand, and by what is it multiplied there?


@triton.jit
def _one_tile(
    q_ptr,  # (N, D), like the next three
    k_ptr,
    v_ptr,
    dy_ptr,
    bias_ptr,  # (N,): for each key
    lse_ptr,  # (N,): for each query, to the base 2, with the bias
    delta_ptr,  # (N,): for each query
    dq_ptr,
    dbias_ptr,
    scale,  # of the scores
    log2e,
    N: tl.constexpr,
    D: tl.constexpr,
):
    row = tl.arange(0, N)
    places = row[:, None] * D + tl.arange(0, D)[None, :]
    q = tl.load(q_ptr + places)
    k = tl.load(k_ptr + places)
    v = tl.load(v_ptr + places)
    dy = tl.load(dy_ptr + places)
    lse = tl.load(lse_ptr + row)
    delta = tl.load(delta_ptr + row)
    bias = tl.load(bias_ptr + row)
    both = scale * log2e  # by which a score is multiplied
    start = tl.zeros((N, N), tl.float32) - lse[:, None] / both  # to do
    score = tl.dot(q, k.T, start, input_precision="ieee")
    start = tl.zeros((N, N), tl.float32) - delta[:, None]
    dp = tl.dot(dy, v.T, start, input_precision="ieee")
    ds = tl.exp2(score * both) * dp
    dq = tl.dot(ds, k, input_precision="ieee") * scale
    tl.store(dq_ptr + places, dq)
    tl.store(dbias_ptr + row, 0 * bias)  # to do


def exercise_1(kernel, N=32, D=16):
    """Whether dq and the gradient of the bias are those of autograd."""
    q, k, v, dy = torch.randn(4, N, D, device=DEVICE).unbind()
    bias = torch.randn(N, device=DEVICE)
    scale = D**-0.5
    leaves = q.double().requires_grad_(), bias.double().requires_grad_()
    score = leaves[0] @ k.double().T * scale + leaves[1]
    y = score.softmax(dim=1) @ v.double()
    exact = torch.autograd.grad(y, leaves, dy.double())
    lse = (score.logsumexp(dim=1) * LOG2E).float()
    delta = (y * dy).sum(dim=1).float()
    dq = torch.empty_like(q)
    dbias = torch.empty_like(bias)
    kernel[(1,)](q, k, v, dy, bias, lse, delta, dq, dbias, scale, LOG2E, N, D)
    errors = [
        (ours - theirs).abs().max().item()
        for ours, theirs in zip((dq, dbias), exact, strict=True)
    ]
    print(
        f"largest error: dq {errors[0]:.0e}, gradient of bias {errors[1]:.0e}"
    )
    return max(errors) < 1e-4


print("right:", exercise_1(_one_tile))

# %%

# Solution 1


@triton.jit
def _one_tile_with_bias(
    q_ptr,
    k_ptr,
    v_ptr,
    dy_ptr,
    bias_ptr,
    lse_ptr,
    delta_ptr,
    dq_ptr,
    dbias_ptr,
    scale,
    log2e,
    N: tl.constexpr,
    D: tl.constexpr,
):
    row = tl.arange(0, N)
    places = row[:, None] * D + tl.arange(0, D)[None, :]
    q = tl.load(q_ptr + places)
    k = tl.load(k_ptr + places)
    v = tl.load(v_ptr + places)
    dy = tl.load(dy_ptr + places)
    lse = tl.load(lse_ptr + row)
    delta = tl.load(delta_ptr + row)
    bias = tl.load(bias_ptr + row)
    both = scale * log2e
    # New: what is added to a score is divided by its scale first.
    start = bias[None, :] / scale - lse[:, None] / both
    score = tl.dot(q, k.T, start, input_precision="ieee")
    start = tl.zeros((N, N), tl.float32) - delta[:, None]
    dp = tl.dot(dy, v.T, start, input_precision="ieee")
    ds = tl.exp2(score * both) * dp
    dq = tl.dot(ds, k, input_precision="ieee") * scale
    tl.store(dq_ptr + places, dq)
    tl.store(dbias_ptr + row, tl.sum(ds, axis=0))  # new


assert exercise_1(_one_tile_with_bias)

# %%
# What we learned
# ---------------
#
# These are the designs of this page, with the speed of their backward pass on
# the H200 for causal attention of 4096 keys, with 128 and with 64 numbers in a
# head:
#
# - **Plain Triton**, which decides by itself where a program waits: 408 and
#   344 TFLOP/s.
# - **One program on an SM**, with one group that multiplies and four buffers:
#   349 with 128 numbers.
# - **Two programs on an SM**, with fewer buffers: 469 and 389.
# - **cuDNN**: 468 and 368.
#
# And for kernels in general:
#
# - An SM takes as many programs as fit. Count registers of all threads, also
#   of those that stand idle, and shared memory.
# - A second program works whenever the first one waits, and nobody has to plan
#   it. Room for it can be worth more than more buffers.
# - A product adds to what its sum begins with. What must be added or
#   subtracted anyway can stand there, and needs no registers of its own.
# - If a kernel is slower than it should be and nothing is spilled, look into
#   the machine code, and count waits.
#
# **Next:** `Programs that stay <07-programs-that-stay.html>`_ finds another
# form for the forward pass.
