r"""
Programs that stay
==================

How can attention lose less time with short sequences?
A program does not end with its tile of queries but takes another one, whose
keys are fetched while it still writes its results, and each program gets as
much to do as any other.

The forward kernel of `Attention with warps that only load
<05-warp-specialization.html>`_ is faster than cuDNN with long sequences and
slower with short ones, and it is not made for heads of 64 numbers. The one of
this page takes these, too. With 128 numbers in a head it is behind cuDNN only
with 512 keys. The backward pass is that of `Two programs on an SM
<06-two-programs.html>`_.

Do you only want to use it? Take ``fast_attention.py``, which this page offers
under its title: it is a module with the kernels and functions of this page.
Put it beside your model, and write two lines:

.. code-block:: python

   from fast_attention import attention

   y = attention(query, key, value, is_causal=True, enable_gqa=True)

It takes what the function of `Causal, grouped, any length
<03-any-attention.html>`_ takes, and gives the same. On Hopper GPUs, such as
the H100 and the H200, heads of 33 to 128 numbers in 16 bits get the kernels in
Gluon. Everything else gets plain ones.

**What you will learn**

- What a program loses where it begins and ends, and how a *persistent* kernel
  hides it.
- How unequal work is dealt out so that all programs end at the same time.
- Why the tiles that are best for long sequences are not best for short ones.
- That an assembler may move what you have put in order, and that you should
  look.

**What you need:** `Attention with warps that only load
<05-warp-specialization.html>`_ and `Two programs on an SM
<06-two-programs.html>`_, whose barriers and whose loading warp are used here
without explaining them again. You don't need a GPU: plain kernels stand in for
those in Gluon, and the exercise is in plain Triton.
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
# What a short sequence costs
# ---------------------------
#
# Before a program of the forward kernel can multiply, its barriers are set up,
# its warps get their registers, and its first tiles travel from memory. After
# its last product it divides, and writes its results. During all of that its
# Tensor Cores wait. How much of a program is that? It depends on how many
# steps stand in between. We count them for 16 heads and 16384 tokens, in
# sequences of four lengths. A program has 128 queries, and takes 128 keys in a
# step.

TOKENS = 16384

for length in (512, 1024, 4096, 16384):
    tiles = length // 128
    programs = TOKENS // length * 16 * tiles
    # The first tile of queries sees one tile of keys, and the last sees all.
    causal = (tiles + 1) / 2
    print(
        f"{length:5} keys: {programs} programs of {tiles:3} steps each, and "
        f"of {causal:4.1f} steps on average if causal"
    )

# %%
# The number of programs is the same at each length. But with 1024 keys a
# causal program has 4.5 steps on average, where it has 64.5 with 16384. What a
# program loses at its beginning and at its end weighs 14 times as much.
#
# Does one see it? We measure plain Triton, whose programs begin and end, too,
# and two libraries, for causal attention. The plain kernels and their
# launches, the clock and all that a benchmark needs are as they were, and
# folded.

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

FROM_512 = [512, *LENGTHS]

NAMES = {
    "triton": "Triton",
    "ends": "a program for each tile",
    "tiles": "stays, tile by tile",
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


def benchmark_of(plot_name, mode, D, is_causal, dtype, lines, lengths):
    return triton.testing.Benchmark(
        x_names=["N"],
        x_vals=lengths,
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

# Scaffold: what short sequences cost, a benchmark.


@functools.cache  # all lines in turns; then each is asked for its own
def short_speeds(N, D, dtype, is_causal):
    if not ON_GPU:
        return {}  # the interpreter cannot be timed
    q, k, v, _ = (t.detach() for t in inputs(N, D, dtype))
    given = q, k, v, is_causal, D**-0.5
    calls = {"plain": functools.partial(plain_forward, *given)}
    for name, function in libraries(is_causal).items():
        calls[name] = functools.partial(function, q, k, v)
    return speeds(2, calls, N, is_causal)


@triton.testing.perf_report(
    benchmark_of(
        "staying-short",
        "forward",
        128,
        True,
        torch.float16,
        ["plain", "sdpa-cudnn", "torch", "cublas"],
        FROM_512,
    )
)
def bench_short(N, D, is_causal, dtype, mode, provider):
    """All lines in turns, 15 times, each a CUDA graph that overwrites L2
    first; the time of a graph that only overwrites L2 is subtracted."""
    return short_speeds(N, D, dtype, is_causal).get(provider, NOTHING)


# %%

bench_short.run(show_plots=ON_GPU)

# %%
# **What the figure shows.**
# On the H200 all of them are slower with short sequences. At 512 keys plain
# Triton has 51% of the speed that it has at 16384, cuDNN has 58%, and
# FlashAttention-2 has 64%. The product of matrices, which does not know of
# sequences, does 774 to 785 TFLOP/s.
#
# **Why.**
# Two things add up for short causal sequences. One is what programs lose where
# they begin and end. The other is the diagonal: scores are computed there and
# then hidden, and the shorter a sequence is, the more of its tiles are on the
# diagonal. The figure does not tell how much each of them costs.
#
# **What follows.**
# The diagonal costs what it costs, as long as tiles are as large as that. But
# beginnings and ends can be moved to where others work.
#
# A program that stays
# --------------------
#
# On the page of `two programs on an SM <06-two-programs.html>`_, a second
# program multiplies meanwhile. In the forward pass, with 128 numbers in a
# head, that was slower in all cases that we tried but the short causal one:
# programs of 64 queries need twice as many loads of keys. So we leave one
# program on an SM, and let it stay. It is started once, and takes one tile of
# queries after the other. A kernel whose programs do that is called
# *persistent*.
#
# What does that bring? The loading warp goes ahead. As soon as nobody needs
# the queries of a tile any more, it fetches those of the next tile and the
# first keys, while the other warps still compute the last product, divide and
# write. When they come to the next tile, they need not wait as long for it, or
# not at all. The drawing shows both ways. Its lengths are not measured:

# %%

# Drawing: one SM, with programs that end, and with one that stays.

plt.figure(
    "Above, programs end: each one loads, multiplies and writes, and the next "
    "one begins with its loads when the first is gone. Below, a program "
    "stays: the loads of the next tile run while it still multiplies and "
    "writes, and it goes on right after it has written.",
    figsize=(7.5, 2.8),
)
ROWS = (
    # height, what it says, and parts: from when on, for how long, which tile
    (3.6, "loads, programs end", ((0, 4, 0), (5.4, 4, 1), (10.8, 2.2, 2))),
    (
        2.8,
        "multiplies, they end",
        ((1, 3.6, 0), (6.4, 3.6, 1), (11.8, 1.2, 2)),
    ),
    (1.2, "loads, one stays", ((0, 4, 0), (4, 4, 1), (8, 4, 2), (12, 1, 3))),
    (0.4, "multiplies, it stays", ((1, 3.6, 0), (5.2, 3.6, 1), (9.4, 3.6, 2))),
)
for height, what, times in ROWS:
    plt.text(-0.2, height, what, va="center", ha="right")
    for left, length, tile in times:
        plt.barh(height, length - 0.05, 0.6, left, color=f"C{tile}")
        plt.text(
            left + length / 2,
            height,
            f"tile {tile}",
            color="white",
            ha="center",
            va="center",
            fontsize=7,
        )
# After its last product a tile is divided and written.
for height, left in ((2.8, 4.6), (2.8, 10), (0.4, 4.6), (0.4, 8.8)):
    plt.text(
        left + 0.28,
        height,
        "writes",
        ha="center",
        va="center",
        fontsize=6,
        rotation=90,
    )
plt.annotate("", (13.1, -0.4), (0, -0.4), arrowprops={"arrowstyle": "->"})
plt.text(6.5, -0.5, "time", ha="center", va="top")
plt.axis((-5.4, 13.3, -1.2, 4.1))
plt.axis("off")
plt.show()

# %%
# Who gets which tile?
# --------------------
#
# Programs that end are dealt out by the GPU: an SM that has finished one gets
# the next. Programs that stay have to share the tiles themselves. The simplest
# way is to number all tiles and to let each of 132 programs take every 132nd,
# as an H200 has 132 SMs.
#
# That is fair if all tiles have equally many steps. In causal attention they
# do not: the last tile of queries sees all keys, and the first one sees a
# single tile of them. How many steps does a program get then? If the last one
# to finish has much more than the others, all SMs but one wait for it.
#
# The remedy is old. Put the longest tile and the shortest one together, the
# second longest and the second shortest, and so on. All such *pairs* have the
# same number of steps. We deal out both and count.


def steps_of_programs(length, programs, in_pairs):
    """How many steps each program has, with 16 heads and TOKENS tokens."""
    tiles = length // 128
    shares = list(range(tiles, 0, -1))  # steps of each tile, longest first
    if in_pairs:
        pairs = tiles // 2
        shares = [shares[i] + shares[-1 - i] for i in range(pairs)]
    shares = shares * (TOKENS // length * 16)  # of all heads, one by one
    return [sum(shares[program::programs]) for program in range(programs)]


for length in (1024, 4096, 16384):
    for in_pairs in (False, True):
        steps = steps_of_programs(length, 132, in_pairs)
        ratio = max(steps) / (sum(steps) / 132)
        what = "pairs" if in_pairs else "tiles"
        print(
            f"{length:5} keys, {what}: {min(steps):4} to {max(steps):4} "
            f"steps, the most is {ratio:.2f} times the mean"
        )

# %%
# With single tiles the program that has most has up to 1.57 times the mean,
# and the whole kernel takes as long as it does. Why does that differ so much?
# Of 16384 keys a head has 128 tiles. A program takes every 132nd, so each of
# its tiles is 4 steps shorter than the one before: the first program has 128,
# 124, 120 and so on, down to 68, and never a short one. With 4096 keys it has
# 32, 28 and so on down to 4, and then the same again. With pairs a program has
# seven of them or eight at each length, so the most is 1.03 times the mean.
#
# A GPU that deals out programs gives the next one to whoever is done first.
# That does not level out everything, because a long tile may come late: if we
# deal out the same tiles like that, the SM that ends last has 1.06 or 1.07
# times the mean from 512 to 8192 keys, and 1.01 times with 16384. Could
# programs that stay do the same? Yes, with a counter in memory that each of
# them increments to get its next tile. But the loading warp and those that
# multiply would have to agree on it, by one more barrier. Pairs need neither.

# %%
# A share of work
# ---------------
#
# We call what a program takes at a time a *share*: a pair of tiles of queries,
# or one tile. From the number of a share follows all that a program must know.
# Both the loading warp and those that multiply compute it, so they need not
# tell each other anything. The tiles of a share come one after the other, in
# turn 0 and turn 1.
#
# With an odd number of tiles the one in the middle has nobody to be paired
# with, and its share has one turn in place of two.


@gluon.jit
def _turns_of(
    share,  # its number, among those of all heads
    tiles,  # of queries, in each head
    PAIRS: gl.constexpr,  # whether two tiles of queries are a share
):
    """How many tiles of queries a share has."""
    turns = 1
    if PAIRS:
        # Tile i and the i-th from the end. In the middle they are the same.
        turns = 2
        if 2 * (share % gl.cdiv(tiles, 2)) + 1 == tiles:
            turns = 1
    return turns


@gluon.jit
def _place_of(
    share,  # its number, among those of all heads
    turn,  # 0 or 1: which tile of the share
    tiles,  # of queries, in each head
    keys,
    OWN: gl.constexpr,  # queries of a tile
    TILE_K: gl.constexpr,
    CAUSAL: gl.constexpr,
    PAIRS: gl.constexpr,
):
    """The number of the head, the first query, and steps: those whose keys all
    queries of the tile see, and those whose keys some of them see."""
    if PAIRS:
        shares = gl.cdiv(tiles, 2)  # of this head alone
        tile = share % shares
        if turn == 0:
            tile = tiles - 1 - tile  # the one from the end, with more steps
    else:
        shares = tiles
        tile = tiles - 1 - share % shares  # the longest of a head first
    first = tile * OWN
    whole = keys // TILE_K
    steps = gl.cdiv(keys, TILE_K)
    if CAUSAL:
        whole = gl.minimum(first // TILE_K, whole)
        steps = gl.minimum(gl.cdiv(first + OWN, TILE_K), steps)
    return share // shares, first, whole, steps


# %%
# The loading warp
# ----------------
#
# For the ring of buffers nothing is new but that the count of steps goes on
# from tile to tile: after the last keys of one come the first keys of the
# next.
#
# The queries have a buffer and two barriers, like a ring of one. ``q_full``
# says that they are there. ``q_free`` says that nobody multiplies with them
# any more, so those of the next tile may take their place. The loading warp
# waits for that before it fetches the first keys of the next tile. So it is
# ahead by the last product, the division and the writing of a tile.


@gluon.jit
def _load_tile(
    share,
    turn,
    tile,  # how many tiles of queries this program had before
    step,  # how many steps it had before
    q_desc,
    k_desc,
    v_desc,
    own,  # buffers and barriers of queries and results
    ring,  # buffers and barriers of keys and values
    heads,  # of the queries
    tiles,  # of queries, in each head
    keys,
    GROUP: gl.constexpr,  # heads of queries that share a head of keys
    CAUSAL: gl.constexpr,
    PAIRS: gl.constexpr,
    TILE_Q: gl.constexpr,  # queries of a group of warps
    TILE_K: gl.constexpr,
    BUFFERS: gl.constexpr,
    WARPS: gl.constexpr,  # groups of four warps that multiply: 1 or 2
):
    """Fetch the queries of a tile, and all keys and values that they see."""
    q_mem, _, q_full, q_free = own
    k_mem, v_mem, full, free = ring
    lead, first, _, steps = _place_of(
        share, turn, tiles, keys, WARPS * TILE_Q, TILE_K, CAUSAL, PAIRS
    )
    batch = lead // heads
    head = lead % heads
    k_head = head // GROUP

    # The first wait is over at once: nobody has multiplied yet.
    mbarrier.wait(q_free, (tile + 1) & 1)
    mbarrier.expect(q_full, WARPS * q_desc.block_type.nbytes)
    for group in gl.static_range(WARPS):
        row = first + group * TILE_Q
        FETCH(q_desc, [batch, head, row, 0], q_full, q_mem.index(group))

    for i in range(steps):
        at = (step + i) % BUFFERS
        parity = ((step + i) // BUFFERS + 1) & 1
        place = [batch, k_head, i * TILE_K, 0]
        mbarrier.wait(free.index(2 * at), parity)
        mbarrier.expect(full.index(2 * at), k_desc.block_type.nbytes)
        FETCH(k_desc, place, full.index(2 * at), k_mem.index(at))
        mbarrier.wait(free.index(2 * at + 1), parity)
        mbarrier.expect(full.index(2 * at + 1), v_desc.block_type.nbytes)
        FETCH(v_desc, place, full.index(2 * at + 1), v_mem.index(at))
    return step + steps


@gluon.jit
def _load_shares(
    q_desc,
    k_desc,
    v_desc,
    own,
    ring,
    heads,
    tiles,
    keys,
    shares,  # of all heads together
    GROUP: gl.constexpr,
    CAUSAL: gl.constexpr,
    PAIRS: gl.constexpr,
    TILE_Q: gl.constexpr,
    TILE_K: gl.constexpr,
    BUFFERS: gl.constexpr,
    WARPS: gl.constexpr,
):
    """What the loading warp does, from the first share to the last."""
    # The groups that multiply have the same loops, and so the same counts.
    tile = 0
    step = 0
    for share in range(gl.program_id(0), shares, gl.num_programs(0)):
        for turn in range(_turns_of(share, tiles, PAIRS)):
            step = _load_tile(
                share, turn, tile, step, q_desc, k_desc, v_desc, own, ring,
                heads, tiles, keys, GROUP, CAUSAL, PAIRS, TILE_Q, TILE_K,
                BUFFERS, WARPS,
            )  # fmt: skip
            tile += 1


# %%
# A step
# ------
#
# A step is that of the page of warps that only load, with two changes. As on
# the page of two programs on an SM it stands in the kernel once, and asks
# while it runs whether its tile needs a mask. And the powers are rounded and
# become an operand before the step waits for the product of the last one, so
# that this work can be hidden behind the product, too.


@gluon.jit
def _powers(
    maximum,  # of each query, as the next one
    total,
    score,
    i,  # which tile of keys
    whole,  # steps before this one need no mask
    limit,  # how many keys each query sees
    scale,  # that of the scores, times LOG2E
    TILE_K: gl.constexpr,
    MASK: gl.constexpr,  # whether there are steps that need one
):
    """The new maximum and sum, what the sums so far shrink by, and powers."""
    if MASK:
        KEY: gl.constexpr = gl.SliceLayout(0, score.type.layout)
        if i >= whole:
            key = i * TILE_K + gl.arange(0, TILE_K, KEY)
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
    i,  # which tile of keys
    step,  # which step of this program
    q,
    ring,
    whole,
    limit,
    scale,
    DIM: gl.constexpr,
    TILE_K: gl.constexpr,
    BUFFERS: gl.constexpr,
    MASK: gl.constexpr,
):
    """The scores of tile i, and the product of the powers of tile i - 1."""
    k_mem, v_mem, full, free = ring
    at = step % BUFFERS
    last = (step - 1) % BUFFERS
    k = k_mem.index(at).reshape([TILE_K, DIM])
    v = v_mem.index(last).reshape([TILE_K, DIM])
    SCORE: gl.constexpr = maximum.type.layout.parent
    SUM: gl.constexpr = weighted.type.layout
    zeros = gl.zeros([maximum.shape[0], TILE_K], gl.float32, SCORE)

    # Both products begin.
    mbarrier.wait(full.index(2 * at), (step // BUFFERS) & 1)
    score = warpgroup_mma(
        q, k.permute((1, 0)), zeros, use_acc=False, is_async=True
    )
    mbarrier.wait(full.index(2 * last + 1), ((step - 1) // BUFFERS) & 1)
    weighted = warpgroup_mma(power, v, weighted, is_async=True)

    # The scores are there when at most one product is under way.
    score = warpgroup_mma_wait(1, deps=[score])
    mbarrier.arrive(free.index(2 * at), count=1)
    maximum, total, shrink, new = _powers(
        maximum, total, score, i, whole, limit, scale, TILE_K, MASK
    )
    new = gl.convert_layout(new.to(power.dtype), power.type.layout)

    # ``new`` goes through the wait as well, so that it is computed before it.
    # Then the sums of the tiles up to i - 1 shrink to the maximum of tile i.
    weighted, power, new = warpgroup_mma_wait(0, deps=[weighted, power, new])
    mbarrier.arrive(free.index(2 * last + 1), count=1)
    by = gl.convert_layout(shrink, gl.SliceLayout(1, SUM))
    weighted = weighted * by[:, None]
    return maximum, total, weighted, new


# %%
# **Look where it really waits.** By our order the second product is under way
# while the powers are computed, and the step waits for it behind them. In the
# machine code it is not so. The panel under the kernels shows it: there
# ``MUFU.EX2`` computes a power, ``FMNMX`` a maximum, and
# ``WARPGROUP.DEPBAR.LE gsb0, 0x0`` waits for all products. That wait comes
# after some of the maxima and before the first power. ``ptxas``, NVIDIA's
# assembler, moves a wait up when nothing tells it not to.
#
# Does it cost us anything? In a trial we put a wait for the barrier of the
# next keys between the powers and the wait for the product. ``ptxas`` does not
# move a wait up across that, and so the order was ours. On an H200 it took up
# to 2% less time with 128 numbers in a head if causal, and between 1% less and
# 11% more in all other cases. So we leave it to ``ptxas``. Why is our order
# not better? While a group waits, another one on the same SM may compute, so
# there may be little left to hide. Why it is slower in some cases, we have not
# found out.
#
# A tile of queries
# -----------------
#
# A tile is computed as before: the first scores, all steps, the last product.
# What is new is what it does for its successor. It gives the queries back
# right after the last product with them. And its results have a buffer of
# their own, from which the TMA writes them, so nobody waits until they have
# left. Only when the next results are ready must those before be gone.


@gluon.jit
def _tile_fwd(
    share,
    turn,
    tile,  # how many tiles of queries this program had before
    step,  # how many steps it had before
    group,  # which group of warps we are: 0 or 1
    y_desc,
    lse_ptr,
    rows,  # of lse, for each head
    own,  # buffers and barriers of queries and results
    ring,  # buffers and barriers of keys and values
    heads,  # of the queries
    tiles,  # of queries, in each head
    keys,
    scale,
    CAUSAL: gl.constexpr,
    RAGGED: gl.constexpr,
    PAIRS: gl.constexpr,
    DIM: gl.constexpr,
    TILE_Q: gl.constexpr,
    TILE_K: gl.constexpr,
    BUFFERS: gl.constexpr,
    WARPS: gl.constexpr,
):
    """The results of the 64 queries that a group has of a tile."""
    DTYPE: gl.constexpr = y_desc.dtype
    SCORE: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, 1], [16, TILE_K, 16]
    )
    SUM: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, 1], [16, DIM, 16]
    )
    POWER: gl.constexpr = gl.DotOperandLayout(0, SUM, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, SCORE)
    MASK: gl.constexpr = CAUSAL or RAGGED
    q_mem, y_mem, q_full, q_free = own
    k_mem, v_mem, full, free = ring
    lead, first, whole, steps = _place_of(
        share, turn, tiles, keys, WARPS * TILE_Q, TILE_K, CAUSAL, PAIRS
    )
    first += group * TILE_Q
    query = first + gl.arange(0, TILE_Q, ROW)
    limit = gl.full([TILE_Q], 0, gl.int32, ROW) + keys
    if CAUSAL:
        limit = gl.minimum(query + 1, limit)
    maximum = gl.full([TILE_Q], float("-inf"), gl.float32, ROW)
    total = gl.zeros([TILE_Q], gl.float32, ROW)
    weighted = gl.zeros([TILE_Q, DIM], gl.float32, SUM)

    # The powers of the first tile of keys.
    at = step % BUFFERS
    q = q_mem.index(group).reshape([TILE_Q, DIM])
    k = k_mem.index(at).reshape([TILE_K, DIM])
    zeros = gl.zeros([TILE_Q, TILE_K], gl.float32, SCORE)
    mbarrier.wait(q_full, tile & 1)
    mbarrier.wait(full.index(2 * at), (step // BUFFERS) & 1)
    score = warpgroup_mma(
        q, k.permute((1, 0)), zeros, use_acc=False, is_async=True
    )
    score = warpgroup_mma_wait(0, deps=[score])
    mbarrier.arrive(free.index(2 * at), count=1)
    maximum, total, _, power = _powers(
        maximum, total, score, 0, whole, limit, scale, TILE_K, MASK
    )
    power = gl.convert_layout(power.to(DTYPE), POWER)

    for i in range(1, steps):
        maximum, total, weighted, power = _step_fwd(
            maximum, total, weighted, power, i, step + i, q, ring, whole,
            limit, scale, DIM, TILE_K, BUFFERS, MASK,
        )  # fmt: skip
    step += steps
    # New: the queries of the next tile may come.
    mbarrier.arrive(q_free, count=1)

    # The product of the last tile of keys. lse is stored beside it.
    last = (step - 1) % BUFFERS
    v = v_mem.index(last).reshape([TILE_K, DIM])
    mbarrier.wait(full.index(2 * last + 1), ((step - 1) // BUFFERS) & 1)
    weighted = warpgroup_mma(power, v, weighted, is_async=True)
    place = lead.to(gl.int64) * rows  # may pass 2**31
    gl.store(lse_ptr + place + query, maximum + gl.log2(total))
    weighted, power = warpgroup_mma_wait(0, deps=[weighted, power])
    mbarrier.arrive(free.index(2 * last + 1), count=1)
    y = weighted / gl.convert_layout(total, gl.SliceLayout(1, SUM))[:, None]

    # New: the results before these must have left their buffer.
    tma.store_wait(0)
    y_mem.index(group).reshape([TILE_Q, DIM]).store(y.to(DTYPE))
    fence_async_shared()
    place = [lead // heads, lead % heads, first, 0]
    STORE(y_desc, place, y_mem.index(group))
    return step


@gluon.jit
def _group_fwd(
    group,
    y_desc,
    lse_ptr,
    rows,
    own,
    ring,
    heads,
    tiles,
    keys,
    shares,
    scale,
    CAUSAL: gl.constexpr,
    RAGGED: gl.constexpr,
    PAIRS: gl.constexpr,
    DIM: gl.constexpr,
    TILE_Q: gl.constexpr,
    TILE_K: gl.constexpr,
    BUFFERS: gl.constexpr,
    WARPS: gl.constexpr,
):
    """What a group that multiplies does, from the first share to the last."""
    tile = 0
    step = 0
    for share in range(gl.program_id(0), shares, gl.num_programs(0)):
        for turn in range(_turns_of(share, tiles, PAIRS)):
            step = _tile_fwd(
                share, turn, tile, step, group, y_desc, lse_ptr, rows, own,
                ring, heads, tiles, keys, scale, CAUSAL, RAGGED, PAIRS, DIM,
                TILE_Q, TILE_K, BUFFERS, WARPS,
            )  # fmt: skip
            tile += 1
    # Shared memory must last until the TMA has read the last results.
    tma.store_wait(0)


# %%
# The kernel
# ----------
#
# The kernel sets up its shared memory and its barriers, once for all tiles,
# and starts the warps. ``WARPS`` says how many groups multiply: two if a
# program has an SM for itself, and one if it shares it.


@gluon.jit(do_not_specialize=["heads", "queries", "keys", "shares"])
def _staying_fwd(
    q_desc,  # (batch, heads, queries, up to DIM), in tiles of TILE_Q queries
    k_desc,  # (batch, heads / GROUP, keys, up to DIM), in tiles of TILE_K
    v_desc,  # as k_desc
    y_desc,  # as q_desc
    lse_ptr,  # (batch, heads, rows): saved for the backward pass
    rows,  # queries, and those that only fill the last tiles
    heads,  # of the queries
    queries,
    keys,
    shares,  # of all heads together
    scale,  # that of the scores, times LOG2E
    GROUP: gl.constexpr,  # heads of queries that share a head of keys
    CAUSAL: gl.constexpr,
    RAGGED: gl.constexpr,  # not causal, and the last tile of keys is not full
    PAIRS: gl.constexpr,  # whether two tiles of queries are a share
    DIM: gl.constexpr,  # width of a tile: the head dimension, or more
    TILE_Q: gl.constexpr,  # queries of a group of warps
    TILE_K: gl.constexpr,  # keys of a step
    BUFFERS: gl.constexpr,  # tiles of keys, and of values, in shared memory
    WARPS: gl.constexpr,  # groups of four warps that multiply: 1 or 2
    REGISTERS: gl.constexpr,  # of a thread of the second group
    num_warps: gl.constexpr,  # of the first group
):
    # Shared memory. Each group has its queries and its results.
    DTYPE: gl.constexpr = q_desc.dtype
    q_mem = gl.allocate_shared_memory(
        DTYPE, [WARPS, 1, 1, TILE_Q, DIM], q_desc.layout
    )
    y_mem = gl.allocate_shared_memory(
        DTYPE, [WARPS, 1, 1, TILE_Q, DIM], y_desc.layout
    )
    k_mem = gl.allocate_shared_memory(
        DTYPE, [BUFFERS, 1, 1, TILE_K, DIM], k_desc.layout
    )
    v_mem = gl.allocate_shared_memory(
        DTYPE, [BUFFERS, 1, 1, TILE_K, DIM], v_desc.layout
    )

    # Barriers. At full ones the loading warp arrives, at free ones the groups.
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    q_free = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    full = gl.allocate_shared_memory(gl.int64, [2 * BUFFERS, 1], BARRIER)
    free = gl.allocate_shared_memory(gl.int64, [2 * BUFFERS, 1], BARRIER)
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_free, count=WARPS)
    for i in gl.static_range(2 * BUFFERS):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=WARPS)
    fence_async_shared()  # the TMA sees them, too
    own = (q_mem, y_mem, q_full, q_free)
    ring = (k_mem, v_mem, full, free)

    tiles = gl.cdiv(queries, WARPS * TILE_Q)
    if WARPS == 1:
        gl.warp_specialize(
            [
                (_group_fwd, (
                    0, y_desc, lse_ptr, rows, own, ring, heads, tiles, keys,
                    shares, scale, CAUSAL, RAGGED, PAIRS, DIM, TILE_Q, TILE_K,
                    BUFFERS, WARPS,
                )),
                (_load_shares, (
                    q_desc, k_desc, v_desc, own, ring, heads, tiles, keys,
                    shares, GROUP, CAUSAL, PAIRS, TILE_Q, TILE_K, BUFFERS,
                    WARPS,
                )),
            ],
            [1],  # warp of the second
            [24],  # registers of its threads
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_group_fwd, (
                    0, y_desc, lse_ptr, rows, own, ring, heads, tiles, keys,
                    shares, scale, CAUSAL, RAGGED, PAIRS, DIM, TILE_Q, TILE_K,
                    BUFFERS, WARPS,
                )),
                (_group_fwd, (
                    1, y_desc, lse_ptr, rows, own, ring, heads, tiles, keys,
                    shares, scale, CAUSAL, RAGGED, PAIRS, DIM, TILE_Q, TILE_K,
                    BUFFERS, WARPS,
                )),
                (_load_shares, (
                    q_desc, k_desc, v_desc, own, ring, heads, tiles, keys,
                    shares, GROUP, CAUSAL, PAIRS, TILE_Q, TILE_K, BUFFERS,
                    WARPS,
                )),
            ],
            [4, 1],  # warps of the second and of the third
            [REGISTERS, 24],  # registers of their threads
        )  # fmt: skip


# %%
# Which tiles, and how many programs?
# -----------------------------------
#
# With 128 numbers in a head an SM has one program with two groups of warps.
# Results have a buffer of their own now, so it takes 32 KB for queries, 32 KB
# for results, and 128 KB for keys and values. With 64 numbers tiles are half
# as large, and an SM has two programs with one group each. For causal
# sequences of up to 2048 keys it has three. Why three? On the diagonal half of
# the scores are computed and then hidden. With steps of 64 keys in place of
# 128 these are half as many, and if there are few steps, that counts. Such
# small steps have less to overlap, but they need fewer registers, so a third
# program fits. In trials on an H200 that takes 7% less time at 1024 keys if
# causal, about the same at 2048, and 4% more at 4096.
#
# Do pairs help only if causal? With 128 numbers they also help otherwise, by
# 0% to 2% in a trial on an H200, and we don't know why. With 64 numbers they
# cost 3% to 7% there. Of 264 programs, 136 would have 32 tiles then and the
# others 30, where without pairs all but 8 have 31. That explains 3%. So a tile
# is a share of its own in that case.
#
# A group of warps has 128 threads, and so has the loading warp with its three
# idle neighbors. What a program may have of an SM's 65536 registers follows
# from how many programs we want there. ``maxnreg`` wants it for each thread,
# as a multiple of 8. Of that, those that load keep 24, and the others get the
# rest: 240, 232 or 136 registers.

# %%

# Scaffold: the backward pass in Gluon, from page 06.


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


def tiles_for_gluon(t, rows):
    """A descriptor of (batch, heads, length, D), in tiles of so many rows."""
    tile = [1, 1, rows, width_of(t.shape[-1])]
    dtype = gl.float16 if t.dtype == torch.float16 else gl.bfloat16
    layout = gl.NVMMASharedLayout.get_default_for(tile, dtype)
    return GluonDescriptor.from_tensor(t, tile, layout)


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

OWN_QUERIES = 64  # of each group of warps

STAYING = {
    # width: groups of warps, keys of a step, buffers, programs on an SM;
    # then the same for short sequences if causal
    64: ((1, 128, 2, 2), (1, 64, 3, 3)),
    128: ((2, 128, 2, 1), (2, 128, 2, 1)),
}


def in_gluon(query):
    """Whether the kernel in Gluon takes it."""
    if not ON_GPU or torch.version.hip is not None:
        return False
    if torch.cuda.get_device_capability() != (9, 0):
        return False
    return (
        query.dtype != torch.float32 and width_of(query.shape[-1]) in STAYING
    )


def plan_to_stay(query, keys, is_causal):
    """How many programs share an SM, and the constants of the kernel."""
    wide = width_of(query.shape[-1])
    usual, short = STAYING[wide]
    plan = short if is_causal and keys <= 2048 else usual
    groups, tile_k, buffers, on_an_sm = plan
    threads = 128 * (groups + 1)  # with the loading warp and its neighbors
    # Those that load keep 24 registers, and the groups share the rest.
    registers = 65536 // (threads * on_an_sm) // 8 * 8
    for_groups = (registers * threads - 24 * 128) // (128 * groups) // 8 * 8
    return on_an_sm, {
        "PAIRS": is_causal or wide == 128,
        "DIM": wide,
        "TILE_Q": OWN_QUERIES,
        "TILE_K": tile_k,
        "BUFFERS": buffers,
        "WARPS": groups,
        "REGISTERS": for_groups,
        "num_warps": 4,
        "maxnreg": registers,
    }


def room_for_lse(query, is_causal):
    """(batch, heads, rows): room for whole tiles of queries."""
    if not in_gluon(query):
        return empty_lse(query, is_causal)
    batch, heads, queries, _ = query.shape
    rows = triton.cdiv(queries, 2 * OWN_QUERIES) * 2 * OWN_QUERIES
    return query.new_empty(batch, heads, rows, dtype=torch.float32)


def forward(query, key, value, is_causal, scale, stays=True, pairs=None):
    """The results, and a log-sum-exp for each query.

    To measure what each idea brings, stays=False starts a program for each
    share, and pairs=False makes each tile a share of its own.
    """
    batch, heads, queries, _ = query.shape
    _, k_heads, keys, _ = key.shape
    if not in_gluon(query) or query.numel() == 0 or keys == 0:
        y, lse = plain_forward(query, key, value, is_causal, scale)
        return y, lse
    on_an_sm, plan = plan_to_stay(query, keys, is_causal)
    if pairs is not None:
        plan["PAIRS"] = pairs
    shares = triton.cdiv(queries, plan["WARPS"] * OWN_QUERIES)
    if plan["PAIRS"]:
        shares = triton.cdiv(shares, 2)
    shares = shares * batch * heads
    programs = shares
    if stays:
        gpu = torch.cuda.get_device_properties(query.device)
        programs = min(shares, gpu.multi_processor_count * on_an_sm)
    y = rows_like(query)
    lse = room_for_lse(query, is_causal)
    _staying_fwd[(programs,)](
        q_desc=tiles_for_gluon(for_descriptors(query), OWN_QUERIES),
        k_desc=tiles_for_gluon(for_descriptors(key), plan["TILE_K"]),
        v_desc=tiles_for_gluon(for_descriptors(value), plan["TILE_K"]),
        y_desc=tiles_for_gluon(y, OWN_QUERIES),
        lse_ptr=lse,
        rows=lse.shape[-1],
        heads=heads,
        queries=queries,
        keys=keys,
        shares=shares,
        scale=scale * LOG2E,
        GROUP=heads // k_heads,
        CAUSAL=is_causal,
        RAGGED=not is_causal and keys % plan["TILE_K"] > 0,
        **plan,
    )
    return y, lse


# %%
# The backward pass, autograd and the operators for ``torch.compile`` are those
# of the page before this one.

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


@torch.library.custom_op("both_passes::staying_attention", mutates_args=())
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


@torch.library.custom_op("both_passes::staying_attention_bwd", mutates_args=())
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
# tensor, as a share of its largest number. These inputs are small, so that no
# program gets a second share. The tests of this site have larger ones, too.

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
# How fast is the forward pass?
# -----------------------------
#
# We measure 16 heads of 128 numbers, and 16384 tokens in sequences of 512 to
# 16384. Beside our kernel stands the same one with a program for each tile,
# which ends with it. If causal, there is also one whose programs stay but take
# tiles one by one. Plain Triton has the kernel of any attention.

# %%

# Scaffold: attention forward, five benchmarks.


@functools.cache  # all lines in turns; then each is asked for its own
def forward_speeds(N, D, dtype, is_causal):
    if not ON_GPU:
        return {}  # the interpreter cannot be timed
    q, k, v, _ = (t.detach() for t in inputs(N, D, dtype))
    given = q, k, v, is_causal, D**-0.5
    calls = {
        "triton": functools.partial(forward, *given),
        "plain": functools.partial(plain_forward, *given),
    }
    if in_gluon(q):
        calls["ends"] = functools.partial(
            forward, *given, stays=False, pairs=False
        )
        calls["tiles"] = functools.partial(forward, *given, pairs=False)
    for name, function in libraries(is_causal).items():
        calls[name] = functools.partial(function, q, k, v)
    return speeds(2, calls, N, is_causal)


@triton.testing.perf_report(
    benchmark_of(
        "staying-forward",
        "forward",
        128,
        False,
        torch.float16,
        ["triton", "ends", "plain", "sdpa-cudnn", "torch", "cublas"],
        FROM_512,
    )
)
def bench_forward(N, D, is_causal, dtype, mode, provider):
    """All lines in turns, 15 times, each a CUDA graph that overwrites L2
    first; the time of a graph that only overwrites L2 is subtracted."""
    found = forward_speeds(N, D, dtype, is_causal)
    return found.get(provider, NOTHING)


@triton.testing.perf_report(
    benchmark_of(
        "staying-forward-causal",
        "forward",
        128,
        True,
        torch.float16,
        ["triton", "ends", "tiles", "plain", "sdpa-cudnn", "torch", "cublas"],
        FROM_512,
    )
)
def bench_forward_causal(N, D, is_causal, dtype, mode, provider):
    """All lines in turns, 15 times, each a CUDA graph that overwrites L2
    first; the time of a graph that only overwrites L2 is subtracted."""
    found = forward_speeds(N, D, dtype, is_causal)
    return found.get(provider, NOTHING)


@triton.testing.perf_report(
    benchmark_of(
        "staying-forward-causal-bfloat16",
        "forward",
        128,
        True,
        torch.bfloat16,
        ["triton", "sdpa-cudnn", "torch"],
        FROM_512,
    )
)
def bench_forward_bfloat16(N, D, is_causal, dtype, mode, provider):
    """All lines in turns, 15 times, each a CUDA graph that overwrites L2
    first; the time of a graph that only overwrites L2 is subtracted."""
    found = forward_speeds(N, D, dtype, is_causal)
    return found.get(provider, NOTHING)


@triton.testing.perf_report(
    benchmark_of(
        "staying-forward-64",
        "forward",
        64,
        False,
        torch.float16,
        ["triton", "ends", "plain", "sdpa-cudnn", "torch"],
        FROM_512,
    )
)
def bench_forward_64(N, D, is_causal, dtype, mode, provider):
    """All lines in turns, 15 times, each a CUDA graph that overwrites L2
    first; the time of a graph that only overwrites L2 is subtracted."""
    found = forward_speeds(N, D, dtype, is_causal)
    return found.get(provider, NOTHING)


@triton.testing.perf_report(
    benchmark_of(
        "staying-forward-causal-64",
        "forward",
        64,
        True,
        torch.float16,
        ["triton", "ends", "tiles", "plain", "sdpa-cudnn", "torch"],
        FROM_512,
    )
)
def bench_forward_causal_64(N, D, is_causal, dtype, mode, provider):
    """All lines in turns, 15 times, each a CUDA graph that overwrites L2
    first; the time of a graph that only overwrites L2 is subtracted."""
    found = forward_speeds(N, D, dtype, is_causal)
    return found.get(provider, NOTHING)


# %%

in_percent(bench_forward)

# %%

in_percent(bench_forward_causal)

# %%

in_percent(bench_forward_bfloat16)

# %%
# **What the three figures show.**
# On the H200 our kernel reaches 668 TFLOP/s at 16384 keys, and 649 if causal.
# It is at 96% of cuDNN's speed at 512 keys, at 100% at 1024, and at 103% to
# 107% from 2048 keys on. If causal, it is at 88% at 512 keys, and at 101% to
# 117% from 1024 keys on. In bfloat16, causal, these are 86% and 101% to 111%.
# At 4096 keys, causal, single measurements of this run differ by up to 14%,
# those of cuDNN, too. Without that length, causal attention in float16 is at
# 101% to 112%.
#
# With a program for each tile the kernel is at 79% to 106%, and at 74% to 114%
# if causal. Ours is 1.21 times as fast as that at 512 keys, and 1.19 times if
# causal. At 16384 keys it is 1.01 times as fast, and 0.98 times if causal,
# which is slower. Programs that stay and take tile by tile, causal, are at 69%
# to 104% of cuDNN's speed, and at no length are they faster than those that
# end.
#
# Plain Triton is at 76% to 83%, and at 77% to 92% if causal. Ours is 1.6 to
# 2.2 times as fast as FlashAttention-2, and 1.6 to 2.3 times if causal.
#
# **Why.**
# Not causal, all tiles have equally many steps, so what staying saves should
# be the same at each length. It saves 23 to 37 µs. An SM has 15.5 tiles on
# average, so that is 1.5 to 2.4 µs for each of them. At 512 keys a tile takes
# 9 µs, and at 16384 keys 212 µs. So it counts for much with short sequences
# and for little with long ones. Why it is more with long ones, we don't know.
# Our kernel also takes pairs here, which may be a part of it.
#
# If causal, it saves 22 to 38 µs up to 8192 keys, and at 16384 keys it loses
# 32 µs. There the dealing out counts, too. By our count the program that has
# most has 1.03 times the mean with pairs. A GPU that deals out single tiles
# comes to 1.06 or 1.07 times the mean up to 8192 keys, and to 1.01 times at
# 16384. So pairs gain by it up to 8192 keys, and lose at 16384.
#
# And tile by tile? By the count, the slowest program has 1.33 times the steps
# that it has with pairs at 1024 keys, 1.18 times at 2048, and 1.52 times at
# 16384. The kernel takes 1.22, 1.14 and 1.50 times as long. With short
# sequences that is less than the count says, because both have the same number
# of tiles, and each tile costs its beginning and its end.
#
# Half as many numbers in a head
# ------------------------------
#
# These are the figures with 32 heads of 64 numbers.

# %%

in_percent(bench_forward_64)

# %%

in_percent(bench_forward_causal_64)

# %%
# **What both figures show.**
# On the H200 our kernel is at 98% to 107% of cuDNN's speed, and at 100% to
# 108% if causal, where plain Triton is at 89% to 103% and at 85% to 104%. It
# is 1.4 to 1.7 times as fast as FlashAttention-2, and 1.5 to 1.8 times if
# causal.
#
# With a program for each tile it is at 84% to 107%, and at 94% to 103% if
# causal. Ours is 1.16 times as fast as that at 512 keys, and 1.15 times if
# causal. From 1024 keys on it is 1.00 to 1.07 times, and 0.99 to 1.07 times if
# causal. Programs that stay and take tile by tile, causal, are at 87% to 100%.
#
# **Why.**
# An SM has two programs here, or three. While one of them begins or ends,
# another one can multiply, so there is less for staying to save.
#
# **What follows.**
# With 64 numbers in a head, nothing is ahead of us by more than about 2% at
# any length. With 128, cuDNN is ahead at 512 keys, and as fast at 1024 if not
# causal. With more, nothing is faster but our own kernel with a program for
# each tile, and that only at 16384 keys if causal, by 2%. So we do not choose
# between the two. At 512 keys a causal tile of queries has 2.5 steps on
# average, and ten tiles of 128 × 128 are computed for the eight that count. We
# have not looked for what else it loses.
#
# How fast are both passes?
# -------------------------
#
# A model that is trained needs both passes. We measure them one after the
# other, as a step does, for causal attention. Seven products count for each
# head, two forward and five backward, half of them because it is causal.

# %%

# Scaffold: both passes, two benchmarks.


@functools.cache  # all lines in turns; then each is asked for its own
def training_speeds(N, D, dtype, is_causal):
    if not ON_GPU:
        return {}  # the interpreter cannot be timed
    q, k, v, dy = inputs(N, D, dtype)
    dy = dy.detach()

    def both_passes(function):
        y = function(q, k, v)
        return torch.autograd.grad(y, (q, k, v), dy)

    ours = functools.partial(attention, is_causal=is_causal)
    calls = {"triton": functools.partial(both_passes, ours)}
    for name, function in libraries(is_causal).items():
        calls[name] = functools.partial(both_passes, function)
    return speeds(7, calls, N, is_causal)


@triton.testing.perf_report(
    benchmark_of(
        "staying-both-passes",
        "forward and backward",
        128,
        True,
        torch.float16,
        ["triton", "sdpa-cudnn", "torch"],
        LENGTHS,
    )
)
def bench_both_passes(N, D, is_causal, dtype, mode, provider):
    """All lines in turns, 15 times, each a CUDA graph that overwrites L2
    first; the time of a graph that only overwrites L2 is subtracted."""
    found = training_speeds(N, D, dtype, is_causal)
    return found.get(provider, NOTHING)


@triton.testing.perf_report(
    benchmark_of(
        "staying-both-passes-64",
        "forward and backward",
        64,
        True,
        torch.float16,
        ["triton", "sdpa-cudnn", "torch"],
        LENGTHS,
    )
)
def bench_both_passes_64(N, D, is_causal, dtype, mode, provider):
    """All lines in turns, 15 times, each a CUDA graph that overwrites L2
    first; the time of a graph that only overwrites L2 is subtracted."""
    found = training_speeds(N, D, dtype, is_causal)
    return found.get(provider, NOTHING)


# %%

in_percent(bench_both_passes)

# %%

in_percent(bench_both_passes_64)

# %%
# **What both figures show.**
# On the H200 both passes together are at 98% to 112% of cuDNN's speed with 128
# numbers in a head, and at 102% to 115% with 64. With FlashAttention-2 they
# are at 50% to 54% and at 60% to 62%.
#
# **Why.**
# Five of the seven products are in the backward pass, so most of the time is
# spent there. The forward pass adds its own lead.
#
# **What follows.**
# With 128 numbers in a head, the lead of the forward pass does not quite make
# up for the backward pass of long sequences. There cuDNN is 2% ahead at 16384
# keys, and as fast at 8192. Everywhere else that we measured, ours is faster.
#
# Where PyTorch or a library is better
# ------------------------------------
#
# - **cuDNN is faster with 512 keys** if a head has 128 numbers. If it has 64,
#   cuDNN is a little ahead at 512 and 1024 keys if attention is not causal.
# - **Backward, cuDNN is faster** with 128 numbers in a head and long
#   sequences, as `Two programs on an SM <06-two-programs.html>`_ shows.
# - **A GPU that does something else, too.** Programs that stay have shared the
#   work before they begin. If another kernel holds some SMs, the programs that
#   have to wait for these SMs begin late and end late, and no other program
#   takes work from them. If programs end, the other SMs get more of them.
# - **One query at a time.** When a model writes word by word, there is one
#   query for each head, and most SMs have nothing to do. Libraries split the
#   keys among programs then.
# - **FlashAttention-3** has programs that stay, too. We have not measured it.
#   It can also multiply in 8 bits.
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
# **Exercise 1: a triangle, dealt out fairly.**
# The kernel below adds up the rows of a triangle: row ``r`` has ``r + 1``
# numbers, and takes a step for each ``BLOCK`` of them. Its programs stay, and
# with 7 of them each takes every seventh row. The sums are right, but some
# programs have more steps than others. Change which rows a program takes so
# that all have about as many. ``exercise_1`` checks the sums, and that no
# program has more than 1.1 times the mean of all steps. The number of rows may
# be odd.
#
# **Hint 1.** Two rows can be a share: the first and the last, the second and
# the one before the last. Then deal out shares in place of rows.
#
# **Hint 2.** In which share are both rows the same? Its sum would be right if
# you added it up twice, but half of its steps would be for nothing, and
# ``exercise_1`` does not notice. So give this share one turn.


@triton.jit
def _rows_of_triangle(
    x_ptr,  # (N, N): row r has r + 1 numbers
    sums_ptr,  # (N,)
    steps_ptr,  # (programs,): how many steps each program had
    N,
    BLOCK: tl.constexpr,
):
    steps = 0
    for row in range(tl.program_id(0), N, tl.num_programs(0)):  # to do
        total = 0.0
        for start in range(0, row + 1, BLOCK):
            column = start + tl.arange(0, BLOCK)
            place = x_ptr + row * N + column
            total += tl.sum(tl.load(place, mask=column <= row, other=0))
            steps += 1
        tl.store(sums_ptr + row, total)
    tl.store(steps_ptr + tl.program_id(0), steps)


def exercise_1(kernel):
    """Whether the sums are right, and the work is dealt out fairly."""
    right = True
    for N, programs in ((28, 7), (27, 7), (40, 10)):
        x = torch.randn(N, N, device=DEVICE)
        sums = torch.zeros(N, device=DEVICE)
        steps = torch.zeros(programs, dtype=torch.int32, device=DEVICE)
        kernel[(programs,)](
            x_ptr=x, sums_ptr=sums, steps_ptr=steps, N=N, BLOCK=4
        )
        error = (sums - x.double().tril().sum(dim=1)).abs().max().item()
        ratio = (steps.max() / steps.double().mean()).item()
        print(
            f"{N} rows, {programs} programs: largest error {error:.0e}, the "
            f"most steps are {ratio:.2f} times the mean"
        )
        right = right and error < 1e-5 and ratio < 1.1
    return right


print("right:", exercise_1(_rows_of_triangle))

# %%

# Solution 1


@triton.jit
def _rows_of_triangle_in_pairs(
    x_ptr,
    sums_ptr,
    steps_ptr,
    N,
    BLOCK: tl.constexpr,
):
    steps = 0
    # New: a share is row ``share`` and the one as far from the end.
    shares = (N + 1) // 2
    for share in range(tl.program_id(0), shares, tl.num_programs(0)):
        turns = 2
        if 2 * share + 1 == N:  # the row in the middle is its own partner
            turns = 1
        for turn in range(turns):
            row = share
            if turn == 1:
                row = N - 1 - share
            total = 0.0
            for start in range(0, row + 1, BLOCK):
                column = start + tl.arange(0, BLOCK)
                place = x_ptr + row * N + column
                total += tl.sum(tl.load(place, mask=column <= row, other=0))
                steps += 1
            tl.store(sums_ptr + row, total)
    tl.store(steps_ptr + tl.program_id(0), steps)


assert exercise_1(_rows_of_triangle_in_pairs)

# %%
# What we learned
# ---------------
#
# These are the designs of this page, with the speed of their forward pass on
# the H200 for causal attention of 1024 and of 8192 keys, with 128 numbers in a
# head:
#
# - **Plain Triton**: 354 and 487 TFLOP/s.
# - **A program for each tile**, in Gluon: 368 and 614.
# - **Programs that stay**, tile by tile: 354 and 606.
# - **Programs that stay and take pairs**: 432 and 639.
# - **cuDNN**: 428 and 582.
#
# And for kernels in general:
#
# - What a program does before its first step and after its last one counts if
#   it has few steps. Let programs stay, and let the loads of the next tile run
#   ahead.
# - Programs that stay must share their work fairly. If it is unequal, put long
#   and short pieces together.
# - A result on its way out needs a place of its own, or the next one waits.
# - Look into the machine code for the order of things. A compiler may have
#   changed it. Measure before you force your own: here that gained little.
#
# **Next:** a model is more than attention. `A GPT whose every kernel is a page
# of this site <../model/01-gpt.html>`_ puts all of them together.
