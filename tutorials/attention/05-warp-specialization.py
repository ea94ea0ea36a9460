r"""
Attention with warps that only load
===================================

How can attention be as fast as a library's?
In our kernel some warps do nothing but fetch tiles, while the others begin a
product before they need it, and do something else meanwhile.

Triton decides by itself when a program waits for a product, and what each of
its warps does. We begin with what can be done there, and that is to put the
products in another order. Then we write two of the three kernels in Gluon, a
language one level below Triton, in which all of this is for us to say.

Do you only want to use it? `Programs that stay <07-programs-that-stay.html>`_,
two pages further, offers ``fast_attention.py``, a module with the fastest
kernels of all three pages.

The function that we end with takes what that of `Causal, grouped, any length
<03-any-attention.html>`_ takes, and gives the same. On Hopper GPUs, such as
the H100 and the H200, heads of 65 to 128 numbers in 16 bits get the kernels in
Gluon. Everything else gets plain ones.

**What you will learn**

- What a program waits for when Triton multiplies tiles, and why the order of
  products in a loop matters.
- What Gluon is, and which decisions it leaves to you.
- How warps of a program hand tiles to each other, by barriers with phases.
- How a step has a product under way while it computes something else.

**What you need:** `Attention without its matrix <01-attention.html>`_ and
`Causal, grouped, any length <03-any-attention.html>`_, whose kernels we
change. You don't need a GPU: barriers are tried in Python here, and the plain
kernels run in the interpreter. Only the kernels in Gluon need a Hopper GPU.
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

# Scaffold: more imports.

import functools
import random

from triton.tools.tensor_descriptor import TensorDescriptor

# %%
# What does a program wait for?
# -----------------------------
#
# In each step of the forward kernel two products and some powers depend on
# each other: the scores are a product of queries and keys, the powers need the
# scores, and the second product multiplies the powers with the values.
# Tensor Cores compute products, and other units of the SM compute powers. A
# warp can tell the Tensor Cores to begin a product, and do something else
# until it needs the result.
#
# Who decides where it waits? In plain Triton the compiler does. In the code
# that Triton 3.6 makes of our kernels a warp waits for scores as soon as it
# has begun them, and it waits for *all* products that are under way, also for
# the one that the step before adds to its sum. So while a program computes
# powers, it has no product under way.
#
# `Attention without its matrix <01-attention.html>`_ has counted what that
# costs: with 128 numbers in a head the Tensor Cores would wait for one third
# of the time. Two programs share an SM there, and one of them may multiply
# while the other one computes powers. But nothing makes them do so.
#
# The order of products in plain Triton
# -------------------------------------
#
# We can't say in Triton where a program waits, but we can say what follows
# what. The backward kernels have more products in a step, so there is more to
# choose.
#
# In the kernels of `any attention <03-any-attention.html>`_ a step of the
# queries computes, in this order, scores, powers, ``dp``, ``ds`` and ``dq``.
# The product ``dp`` comes after the powers, although it does not need them. So
# the Tensor Cores have nothing to do while the powers are computed, and again
# while ``ds`` is. We let ``dp`` come before the powers. Then there is one gap
# between products and not two. It is as long as both were, so we must measure
# whether that is worth anything.
#
# In the step of the keys there is one product more, ``dv``, which needs the
# powers alone. In those kernels it stands before ``dp``, and the wait for
# ``dp`` is a wait for both. We let ``dv`` follow ``dp``. Then ``dp`` is waited
# for alone, and ``dv`` runs while ``ds`` is computed.
#
# Only lines change places. The same products are added up in the same order,
# so not even a bit of the results changes.


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
# The kernels around these steps are those of `any attention
# <03-any-attention.html>`_, and so are the forward kernel, the descriptors and
# the tiles. All of that is folded here.

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

# Scaffold: the plain forward pass, from page 03, whose forward it is.


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

# Scaffold: launches of both backward kernels.


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


# %%


def plain_queries(q, k, v, y, dy, dq, lse, delta, is_causal, scale):
    """dq by the plain kernel."""
    plan, _ = plan_backward(q.dtype, q.shape[-1])
    launch_queries(
        _any_attention_bwd_queries, tiles_of, plan["TILE_Q"], plan, q, k, v, y,
        dy, dq, lse, delta, is_causal, scale,
    )  # fmt: skip


def backward(
    dy, query, key, value, y, lse, is_causal, scale, by=plain_queries
):
    """dq, dk and dv. ``by`` gives dq."""
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
    by(q, k, v, y, dy, dq, lse, delta, is_causal, scale)
    launch_keys(q, k, v, dy, dk, dv, lse, delta, is_causal, scale)
    return dq, dk, dv


# %%
# How much is the order worth?
# ----------------------------
#
# We measure with 32 heads of 64 numbers, and 16384 tokens in sequences of 1024
# to 16384. All lines take turns. Five products count for each head, half of
# them if causal, although our kernels have seven.

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
    "waits": "waits at once",
    "turns": "groups in turns",
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

# Scaffold: plain attention backward, two benchmarks.


@functools.cache  # all lines in turns; then each is asked for its own
def backward_speeds(N, D, dtype, is_causal, forward, by):
    """``by`` are the functions for dq, by the names of their lines."""
    if not ON_GPU:
        return {}  # the interpreter cannot be timed
    q, k, v, dy = (t.detach() for t in inputs(N, D, dtype))
    scale = D**-0.5
    saved = forward(q, k, v, is_causal, scale)
    given = dy, q, k, v, *saved, is_causal, scale
    calls = {}
    for name, for_dq in by:
        calls[name] = functools.partial(backward, *given, for_dq)
    for name, function in libraries(is_causal).items():
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        y = function(*leaves)
        calls[name] = functools.partial(
            torch.autograd.grad, y, leaves, dy, retain_graph=True
        )
    return speeds(5, calls, N, is_causal)


@triton.testing.perf_report(
    benchmark_of(
        "warps-backward-64",
        "backward",
        64,
        False,
        torch.float16,
        ["triton", "sdpa-cudnn", "torch"],
    )
)
def bench_backward_64(N, D, is_causal, dtype, mode, provider):
    """All lines in turns, 15 times, each a CUDA graph that overwrites L2
    first; the time of a graph that only overwrites L2 is subtracted."""
    by = (("triton", plain_queries),)
    found = backward_speeds(N, D, dtype, is_causal, plain_forward, by)
    return found.get(provider, NOTHING)


@triton.testing.perf_report(
    benchmark_of(
        "warps-backward-causal-64",
        "backward",
        64,
        True,
        torch.float16,
        ["triton", "sdpa-cudnn", "torch"],
    )
)
def bench_backward_causal_64(N, D, is_causal, dtype, mode, provider):
    """All lines in turns, 15 times, each a CUDA graph that overwrites L2
    first; the time of a graph that only overwrites L2 is subtracted."""
    by = (("triton", plain_queries),)
    found = backward_speeds(N, D, dtype, is_causal, plain_forward, by)
    return found.get(provider, NOTHING)


# %%

in_percent(bench_backward_64)

# %%

in_percent(bench_backward_causal_64)

# %%
# **What both figures show.**
# On the H200 the backward pass is at 94% to 103% of cuDNN's speed, and at 87%
# to 103% if causal. With the old order, on the page of `any attention
# <03-any-attention.html>`_, it is at 82% to 92%, and 85% to 101%. That was
# another run, with the same rival. Ours is 1.6 to 1.8 times as fast as
# FlashAttention-2, and 1.5 to 1.7 times if causal.
#
# **Why.**
# With 64 numbers in a head a power serves half as many operations as with 128,
# so more of a step is spent between products, and it matters more how they
# follow each other. We have not measured the two changes apart.
#
# **What follows.**
# Only lines have changed places. Try that first, before you leave Triton.
#
# A product beside the powers
# ---------------------------
#
# With 128 numbers in a head the order brings less, as we will see. In the
# forward kernel another order alone does not help, because Triton waits for
# all products that are under way.
#
# What could a program do while it computes powers? The second product of the
# step *before*. Its powers are there already, and nothing needs its result
# before the next step. So a step could begin the product of its own scores,
# begin the product of the last powers with their values, and wait for the
# first of both alone. The second one would run while the powers are computed.

# %%

# Drawing: a step that waits for each product, and one that waits later.

plt.figure(
    "Above, scores, powers, and the product with the values follow each other "
    "in each step. Below, the product of the last powers with the values runs "
    "beside the powers of this step, so a step is shorter.",
    figsize=(7.5, 3.2),
)
LINES = (
    (4.1, "waits at once:", "products", ("scores", 0), ("values", 2)),
    (3.2, "", "powers", ("powers", 1)),
    (1.4, "waits later:", "products", ("scores", 0), ("last values", 1)),
    (0.5, "", "powers", ("powers", 1)),
)
for height, name, unit, *parts in LINES:
    period = 3 if height > 2 else 2
    plt.text(-2.9, height, name, va="center")
    plt.text(-0.1, height, unit, va="center", ha="right")
    for i in range(12 // period // 2):
        for what, start in parts:
            left = period * i + start
            color = "C1" if what == "powers" else "C0"
            plt.barh(height, 0.95, left=left, height=0.75, color=color)
            plt.text(
                left + 0.47,
                height,
                what,
                color="white",
                ha="center",
                va="center",
                fontsize=7,
            )
plt.annotate("", (6.2, -0.2), (0, -0.2), arrowprops={"arrowstyle": "->"})
plt.text(3, -0.3, "time", ha="center", va="top")
plt.axis((-3, 6.4, -0.9, 4.7))
plt.axis("off")
plt.show()

# %%
# That is the first idea. The second one is about loads. In plain Triton all
# warps of a program do the same, so each of them also asks for the next tiles
# and keeps count of those that are there. We leave that to a single warp,
# which *only loads*. Two groups of four warps do all the rest, each for 64
# queries. This is called *warp specialization*: the warps of a program have
# different work, and so they must tell each other what is ready.
#
# Triton can split the warps of a loop by itself, with
# ``tl.range(warp_specialize=True)``. But it does not let us say how, nor when
# to wait, and with that our kernels were slower.
#
# Gluon
# -----
#
# `Gluon <https://triton-lang.org/main/gluon/index.html>`_ comes with Triton.
# Its kernels are functions in Python as well, they have programs, tiles and
# most of the functions that you know. What Triton decides, you decide here:
#
# - **Where a tile lies**: in shared memory, or in registers. A tile in
#   registers has a *layout*, which says which thread has which of its numbers.
#   Tensor Cores leave their results in one layout and want their operands in
#   another one.
# - **When something begins, and who waits for it.** Loads and products are
#   *asynchronous*: you begin them, and later you wait.
# - **What each warp does**, by ``warp_specialize``.
#
# In return you write for one kind of GPU, there is no interpreter, and a
# mistake can make a kernel wait forever. Gluon is experimental: names may
# change with each version, as two of those that we import did.

# %%

# Scaffold: imports of Gluon.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import (
    TensorDescriptor as GluonDescriptor,
)

# From Triton 3.9 on these two have shorter names.
FETCH = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
STORE = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global

# %%
# Barriers with phases
# --------------------
#
# How does a warp know that a tile is there? NVIDIA's GPUs have barriers for
# this, which are 8 bytes of shared memory and are called *mbarrier*. A barrier
# counts arrivals. When as many have arrived as it was made for, its *phase* is
# complete: it begins to count anew, in the next phase. Who waits says which
# phase it waits for, and only whether that is an even or an odd one.
# A wait that comes too late, when the barrier is two phases further, would go
# on waiting. One that comes a phase too early would end at once. Neither can
# happen here, because each side waits for the other before it goes on.
#
# A barrier begins in phase 0. So a wait for an even phase blocks, and a wait
# for an odd one does not, as if a phase -1 had been complete before.
# Here is a barrier in Python:


class Barrier:
    def __init__(self, count):
        self.count = count  # arrivals that complete a phase
        self.missing = count
        self.phase = 0  # the one that is not complete

    def arrive(self):
        self.missing -= 1
        if self.missing == 0:
            self.missing = self.count
            self.phase += 1

    def passes(self, parity):
        """Whether a wait for an even (0) or odd (1) phase ends."""
        return self.phase % 2 != parity


# %%
# Tiles of keys go through a *ring* of buffers: the tile ``i`` of each
# sequence of tiles lies in the buffer ``i % BUFFERS``. Each buffer has two
# barriers. ``full`` completes a phase when a tile has come, and ``free`` when
# both groups have used it.
#
# Let's run that. A warp is a generator in Python. Whenever it has to wait it
# yields a barrier and a parity, and it yields nothing to let others go first.
# The loop below runs one of the warps that need not wait, chosen at random,
# until all have ended.

BUFFERS = 2


def loading_warp(tiles, ring, full, free):
    for i in range(tiles):
        at = i % BUFFERS
        turn = i // BUFFERS  # how often the buffer was used before
        # In the first turn nobody has to wait: that is phase -1.
        yield free[at], (turn - 1) % 2
        ring[at] = i
        full[at].arrive()


def computing_warps(tiles, ring, full, free, used):
    for i in range(tiles):
        at = i % BUFFERS
        turn = i // BUFFERS
        yield full[at], turn % 2
        used.append(ring[at])
        free[at].arrive()


def run_warps(warps, seed):
    """Whether all warps end; otherwise some wait forever."""
    generator = random.Random(seed)
    waits = {warp: None for warp in warps}
    while waits:
        ready = []
        for warp, wait in waits.items():
            if wait is None or wait[0].passes(wait[1]):
                ready.append(warp)
        if not ready:
            return False
        warp = generator.choice(ready)
        try:
            waits[warp] = next(warp)
        except StopIteration:
            del waits[warp]
    return True


for seed in range(100):
    ring = [None] * BUFFERS
    full = [Barrier(1) for _ in range(BUFFERS)]
    free = [Barrier(2) for _ in range(BUFFERS)]
    used = [], []
    warps = [loading_warp(9, ring, full, free)]
    warps += [computing_warps(9, ring, full, free, each) for each in used]
    assert run_warps(warps, seed)
    assert used == ([*range(9)], [*range(9)])
print("both groups have used the tiles", used[0])

# %%
# Whatever the order, nobody waits forever, and nobody uses a wrong tile.
# Try what happens if the first wait is for the phase ``turn % 2``: then the
# loading warp waits for buffers that nobody has used yet, ``run_warps`` finds
# that nobody can go on, and the assertion fails.
#
# Where operands lie
# ------------------
#
# Each product that we begin has a result of 64 rows, and a group of four warps
# begins it. NVIDIA calls such a group a *warpgroup*, and the instruction
# ``wgmma``. What it multiplies may lie here:
#
# - **The right operand is in shared memory**, where the loads have put it. If
#   we need its transpose, ``permute`` only describes the same bytes in
#   another way.
# - **The left operand is in shared memory**, like the queries, or in
#   registers, like the powers that a warp has just computed. Its layout in
#   registers is that of an operand, so we convert the powers.
# - **The sum is in registers**, in a layout of its own. A row of 128 columns
#   is spread over four threads, and a thread has parts of two rows.
#
# For numbers of a row, such as its maximum, there is the layout of a *slice*:
# it says that a row has one number, wherever the tile has its columns.
#
# The loading warp
# ----------------
#
# It is the generator from above, with two pairs of barriers for each buffer,
# because a tile of keys and its tile of values come one after the other and
# are given back at different times. ``expect`` is new. It is the one arrival
# that ``full`` was made for, and it says how many bytes must come besides. The
# phase is complete when the TMA has brought them.


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


# %%
# A step
# ------
#
# First the part that both kinds of steps share: the powers of a tile of
# scores. It is what we had in Triton. Only the indices of the keys must say in
# which layout they are.


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


# %%
# A step begins two products and waits for the first one:
# ``warpgroup_mma_wait(1)`` waits until at most one product is under way. What
# stands in ``deps`` goes through the wait, so that nobody uses it before. An
# operand in registers stands there, too, because nobody may reuse its
# registers while the product reads them.
#
# When may a tile be given back? The keys when the scores are there, and the
# values of the last step when the second wait is over. Then the group arrives
# at the barrier, once for all of its warps: Gluon lets them wait for each
# other first.
#
# Two constants are there to measure what each idea brings. Without ``LATER``
# each product is waited for at once. With ``TURNS`` both groups take turns: a
# group may begin its products when the other one has begun its own. So the
# products of both alternate, and one group can compute powers while those of
# the other one run. FlashAttention-3 does that.


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


# %%
# A group of warps
# ----------------
#
# What does a group do with its 64 queries? The first tile has no step before
# it, so its scores stand before the loop, and the last product stands after
# it. In between are the two loops of `Causal, grouped, any length
# <03-any-attention.html>`_: tiles that all queries see, without a mask, and
# then those that need one.
#
# At the end the results go where the queries were, and the TMA stores them.
# It reads shared memory on its own, so it must be told that our stores to it
# are done: that is the *fence*.


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


# %%
# The forward kernel
# ------------------
#
# It reserves shared memory and barriers, and then it splits: two groups of
# warps attend, and one warp loads. How many registers does each of them need?
# A group has 64 × 128 sums, as many scores, and half as many registers of
# powers, because two numbers of 16 bits share one. For a thread that is 64 +
# 64 + 32, which is 160. Masks, addresses and the new powers need more.
#
# An SM has 65536 registers. Warps are started in fours, so three more stand
# idle beside the loading one. With 24 registers for each of their threads,
# both groups can have 240: (240 + 240 + 24) · 128 is 64512. The list at the
# end names what the second function gets and what the third. The first one
# gets what is left.


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
# Around the kernel
# -----------------
#
# Who gets the kernel in Gluon? Inputs of 16 bits on a Hopper GPU, whose heads
# need tiles of 128 columns. And heads of 64 numbers? In a trial on an H200 the
# plain kernel was faster there, at every length.


def by_warps(query):
    """Whether kernels in Gluon take it."""
    if not ON_GPU or torch.version.hip is not None:
        return False
    if torch.cuda.get_device_capability() != (9, 0):
        return False
    return query.dtype != torch.float32 and width_of(query.shape[-1]) == 128


OWN = 128  # queries of a program: 64 for each group of warps


def room_for_lse(query, is_causal):
    """(batch, heads, rows): room for whole tiles of queries."""
    if not by_warps(query):
        return empty_lse(query, is_causal)
    batch, heads, queries, _ = query.shape
    rows = triton.cdiv(queries, OWN) * OWN
    return query.new_empty(batch, heads, rows, dtype=torch.float32)


# %%
# A descriptor of Gluon also says how a tile lies in shared memory. The pieces
# of a row are in another order in each row, which is called *swizzled*, so
# that Tensor Cores read a column without waiting.


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
# The steps have 128 keys. Both groups need 32 KB for their queries, and two
# buffers for keys and values need 128 KB. So an SM has room for one program,
# and while that begins or ends, nobody else multiplies there. In a trial,
# steps of 64 keys were slower, even with four buffers: there are twice as
# many, and each has its waits.
#
# Is the forward pass right?
# --------------------------
#
# One case of each kind: causal with more keys than queries, groups of three
# heads, and rows of 80 numbers, for which the TMA fills in zeros.


def try_forward(queries, keys, D, group=1, is_causal=False, **how):
    dtype = torch.float16
    q = torch.randn(2, 2 * group, queries, D, device=DEVICE, dtype=dtype)
    k, v = torch.randn(2, 2, 2, keys, D, device=DEVICE, dtype=dtype)
    y, _ = forward(q, k, v, is_causal, D**-0.5, **how)
    wide = q.double(), k.double(), v.double()
    exact = F.scaled_dot_product_attention(
        *wide, is_causal=is_causal, enable_gqa=True
    )
    error = (y - exact).abs().max().item()
    kind = "in Gluon" if by_warps(q) else "plain"
    print(f"largest error, forward, {kind}: {error:.1e}")
    assert error < 4e-3


try_forward(queries=70, keys=150, D=128, is_causal=True)
try_forward(queries=70, keys=150, D=128, group=3)
try_forward(queries=20, keys=33, D=80)

# %%
# How fast is the forward pass?
# -----------------------------
#
# We measure with 16 heads of 128 numbers. Besides the kernel that we take,
# which is the line ``Triton``, there are two other forms of it: one that waits
# for each product at once, and one whose groups take turns. ``Triton, plain``
# is the kernel of `any attention <03-any-attention.html>`_.

# %%

# Scaffold: attention forward, three benchmarks.


@functools.cache  # all lines in turns; then each is asked for its own
def forward_speeds(N, D, dtype, is_causal):
    if not ON_GPU:
        return {}  # the interpreter cannot be timed
    q, k, v, _ = inputs(N, D, dtype)

    def ours(function, **how):
        def call():
            y, _ = function(q, k, v, is_causal, D**-0.5, **how)
            return y

        return call

    calls = {"triton": ours(forward), "plain": ours(plain_forward)}
    if by_warps(q):
        calls["waits"] = ours(forward, LATER=False)
        calls["turns"] = ours(forward, TURNS=True)
    for name, function in libraries(is_causal).items():
        calls[name] = functools.partial(function, q, k, v)
    return speeds(2, calls, N, is_causal)


FORWARD = ["triton", "waits", "turns", "plain", "sdpa-cudnn", "cublas"]


@triton.testing.perf_report(
    benchmark_of(
        "warps-forward", "forward", 128, False, torch.float16, FORWARD
    )
)
def bench_forward(N, D, is_causal, dtype, mode, provider):
    """All lines in turns, 15 times, each a CUDA graph that overwrites L2
    first; the time of a graph that only overwrites L2 is subtracted."""
    return forward_speeds(N, D, dtype, is_causal).get(provider, NOTHING)


@triton.testing.perf_report(
    benchmark_of(
        "warps-forward-causal", "forward", 128, True, torch.float16, FORWARD
    )
)
def bench_forward_causal(N, D, is_causal, dtype, mode, provider):
    """All lines in turns, 15 times, each a CUDA graph that overwrites L2
    first; the time of a graph that only overwrites L2 is subtracted."""
    return forward_speeds(N, D, dtype, is_causal).get(provider, NOTHING)


@triton.testing.perf_report(
    benchmark_of(
        "warps-forward-causal-bfloat16",
        "forward",
        128,
        True,
        torch.bfloat16,
        ["triton", "sdpa-cudnn"],
    )
)
def bench_forward_bfloat16(N, D, is_causal, dtype, mode, provider):
    """All lines in turns, 15 times, each a CUDA graph that overwrites L2
    first; the time of a graph that only overwrites L2 is subtracted."""
    return forward_speeds(N, D, dtype, is_causal).get(provider, NOTHING)


# %%

in_percent(bench_forward)

# %%

in_percent(bench_forward_causal)

# %%

in_percent(bench_forward_bfloat16)

# %%
# **What the figures show.**
# On the H200 our kernel reaches 672 TFLOP/s at 16384 keys, and 649 if
# attention is causal. From 2048 keys on that is 99% to 109% of cuDNN's speed,
# and 93% to 111% of it if causal. At 1024 keys it is 93%, and 82% if causal.
# In bfloat16, causal, we reach 92% to 111% of cuDNN's speed from 2048 keys on.
#
# The plain kernel is at 79% to 83% of cuDNN's speed over all lengths, and at
# 82% to 85% if causal. At 4096 keys it does 494 TFLOP/s. With a warp that
# loads and two groups that multiply, but wait at once, these are 616. Waiting
# later makes that 643. If the groups take turns besides, they do 629.
#
# **Why.**
# From 2048 keys on, to split the work of the warps brings the most. It changes
# more than one thing. Loads are gone from the warps that multiply. A step has
# 128 keys in place of 64. Four warps have 64 queries, where those of the plain
# kernel have 128 if attention is not causal. And two groups share the keys
# that are loaded. How much each of these brings we have not measured.
#
# Waiting later helps, but less than our drawing promises. With two groups on
# an SM, one of them may multiply while the other one computes powers, even if
# both wait at once, so fewer gaps are left to fill. And what runs is not quite
# what is drawn. NVIDIA's assembler has moved the wait for the second product
# up: in the machine code it stands behind the maxima, but before the powers.
# `Programs that stay <07-programs-that-stay.html>`_ looks into that. Taking
# turns does not help here, although the authors of FlashAttention-3 gain by
# it. We have not looked into it.
#
# **Why are short causal sequences slower?**
# Tiles of 128 × 128 on the diagonal are large for them. At 1024 keys 36 tiles
# are computed for the 32 that count, so 12.5% of the work is added, where the
# plain kernel with its 64 × 64 has 6%. The average program has 4.5 steps, and
# while it begins and ends its SM has nothing else to do. There we are as fast
# as the plain kernel.
#
# **What follows.**
# With long sequences our kernel is faster than cuDNN's. Compared with the
# product of matrices it reaches 89% at 16384 keys. The rest may be the
# beginning and the end of each program, and powers that are still not hidden.
# For short sequences, `Programs that stay <07-programs-that-stay.html>`_ does
# something about beginnings and ends.
#
# The gradient of the queries
# ---------------------------
#
# The kernel that gives ``dq`` has three products in a step: the scores, ``dp =
# dy vᵀ``, and the sum ``dq``. The first two depend on nothing but tiles, so
# both begin at once. The powers are computed while ``dp`` is under way. Then
# the third one begins, and nobody waits for it before the scores of the next
# step are wanted.
#
# Hence a tile of keys is in use for longer than its step: it is an operand of
# the third product, and is given back in the step after.


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


# %%
# A group computes :math:`\delta` of its queries first, as the plain kernel
# does, and stores it for the kernel of the keys.


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


# %%
# The kernel around both groups differs little from the forward one, and is
# folded: a group has three tiles in place of one, and there are no turns.
# These tiles take 96 KB for both groups. So a step has 64 keys here, and three
# buffers for keys and values take another 96 KB.

# %%

# Scaffold: the kernel around both groups, for dq.


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


# %%


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
# The function
# ------------
#
# It is that of `any attention <03-any-attention.html>`_, which explains how it
# serves autograd, ``torch.compile`` and ``torch.autocast``. Only its backward
# pass has a choice more.


def gradients(dy, query, key, value, y, lse, is_causal, scale):
    """dq, dk and dv, by the kernels that take them."""
    by = fast_queries if by_warps(query) else plain_queries
    return backward(dy, query, key, value, y, lse, is_causal, scale, by)


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


@torch.library.custom_op("both_passes::fast_attention", mutates_args=())
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


@torch.library.custom_op("both_passes::fast_attention_bwd", mutates_args=())
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
# These are again 16 heads of 128 numbers. ``Triton, plain`` has no kernel in
# Gluon, but its products are in the order of this page.

# %%

# Scaffold: attention backward, three benchmarks.

BOTH = (("triton", fast_queries), ("plain", plain_queries))
BACKWARD = ["triton", "plain", "sdpa-cudnn", "torch", "cublas"]


@triton.testing.perf_report(
    benchmark_of(
        "warps-backward", "backward", 128, False, torch.float16, BACKWARD
    )
)
def bench_backward(N, D, is_causal, dtype, mode, provider):
    """All lines in turns, 15 times, each a CUDA graph that overwrites L2
    first; the time of a graph that only overwrites L2 is subtracted."""
    found = backward_speeds(N, D, dtype, is_causal, forward, BOTH)
    return found.get(provider, NOTHING)


@triton.testing.perf_report(
    benchmark_of(
        "warps-backward-causal", "backward", 128, True, torch.float16, BACKWARD
    )
)
def bench_backward_causal(N, D, is_causal, dtype, mode, provider):
    """All lines in turns, 15 times, each a CUDA graph that overwrites L2
    first; the time of a graph that only overwrites L2 is subtracted."""
    found = backward_speeds(N, D, dtype, is_causal, forward, BOTH)
    return found.get(provider, NOTHING)


@triton.testing.perf_report(
    benchmark_of(
        "warps-backward-causal-bfloat16",
        "backward",
        128,
        True,
        torch.bfloat16,
        ["triton", "sdpa-cudnn"],
    )
)
def bench_backward_bfloat16(N, D, is_causal, dtype, mode, provider):
    """All lines in turns, 15 times, each a CUDA graph that overwrites L2
    first; the time of a graph that only overwrites L2 is subtracted."""
    found = backward_speeds(N, D, dtype, is_causal, forward, BOTH)
    return found.get(provider, NOTHING)


# %%

in_percent(bench_backward)

# %%

in_percent(bench_backward_causal)

# %%

in_percent(bench_backward_bfloat16)

# %%
# **What the three figures show.**
# On the H200 our backward pass reaches 462 TFLOP/s at 16384 keys, and 456 if
# causal. From 2048 keys on that is 84% to 87% of cuDNN's speed, and 86% to 96%
# of it if causal. At 1024 keys it is 92%, and 104% if causal. In bfloat16,
# causal, it is 85% to 105% over all lengths. Ours is 1.7 to 1.8 times as fast
# as FlashAttention-2, and 1.7 to 1.9 times if causal.
#
# Plain kernels alone are at 82% to 83% of cuDNN's speed from 2048 keys on, and
# at 81% to 90% if causal. On the page of `any attention
# <03-any-attention.html>`_, with the old order, these are 78% to 82%, and 80%
# to 90%. That was another run.
#
# **Why.**
# The kernel in Gluon gives ``dq`` alone, with three of the seven products. So
# less than half of the backward pass can gain by it. The other four products
# are plain. Why the gain is smaller for long sequences, we have not found out.
#
# With seven products our kernels do 7/5 of 462, which is 646 TFLOP/s at 16384
# keys. That is 85% of what the product of matrices reaches beside them. If
# cuDNN has five, its 549 TFLOP/s are 72% of it. `Five products or seven
# <02-backward.html>`_ explains why we stay with seven. At the speed of the
# product of matrices, seven products would have 99% of cuDNN's speed.
#
# **What follows.**
# `Two programs on an SM <06-two-programs.html>`_ has kernels in Gluon for the
# queries and for the keys, in another form that brings more. To pass cuDNN
# with long sequences we would have to save products.
#
# Where PyTorch or a library is better
# ------------------------------------
#
# - **cuDNN is faster in the backward pass.** With 128 numbers in a head it is
#   ahead at every length but 1024 keys if causal, and with 64 from 2048 keys
#   on. Forward, with 128, it is ahead up to 2048 keys, and up to 4096 if
#   causal.
# - **FlashAttention-3** has the ideas of this page, and more. By its `paper
#   <https://arxiv.org/abs/2407.08608>`_ it reaches up to 740 TFLOP/s forward
#   on an H100. It can also multiply in 8 bits.
# - **Other GPUs.** Our kernels in Gluon need the instructions of Hopper.
#   Blackwell has others, and gets the plain kernels from us, which we have not
#   measured there. Libraries have kernels for both.
# - **Heads of 64 numbers** have no kernel in Gluon here. Forward cuDNN is
#   ahead up to 2048 keys, as on the page of `any attention
#   <03-any-attention.html>`_. `Two programs on an SM <06-two-programs.html>`_
#   has kernels for their backward pass, and `Programs that stay
#   <07-programs-that-stay.html>`_ one for their forward pass.
# - **PyTorch takes more**: masks, dropout, and the other things that the page
#   of any attention lists.
# - **Gluon is experimental.** A new version of Triton may ask for changes.
#   These kernels compile with Triton 3.6 to 3.9.
#
# Exercise
# --------
#
# **Exercise 1: a tile that is needed for longer.**
# In the kernel of ``dq`` a step begins a product with its keys, and nobody
# waits for it before the next step. When may the group give its keys back?
#
# Here is such a group as a generator. Its product reads the keys when it runs,
# in the step after, which is why they go into ``used`` there. The stub gives
# them back too early. ``exercise_1`` lets it run in many orders and says
# whether each product has read the right tile, and whether all warps end.
#
# **Hint 1.** By when has the product of the last step surely read its keys?
#
# **Hint 2.** The keys of the last tile of all need not be given back, because
# no tile comes after them.
#
# Is it right? Then set ``BUFFERS`` to 1, and find out why a warp waits forever
# now.


def loading_keys_and_values(tiles, k_ring, v_ring, full, free):
    for i in range(tiles):
        at = i % BUFFERS
        turn = i // BUFFERS
        for ring, barrier in ((k_ring, 2 * at), (v_ring, 2 * at + 1)):
            yield free[barrier], (turn - 1) % 2
            ring[at] = i
            full[barrier].arrive()


def group_of_dq(tiles, k_ring, full, free, used):
    for i in range(tiles):
        at = i % BUFFERS
        parity = i // BUFFERS % 2
        yield full[2 * at], parity
        yield full[2 * at + 1], parity
        if i > 0:  # the product of the last step ends
            used.append(k_ring[(i - 1) % BUFFERS])
        yield None  # powers; others may go on
        free[2 * at + 1].arrive()
        free[2 * at].arrive()  # to do
    used.append(k_ring[(tiles - 1) % BUFFERS])


def exercise_1(group):
    """Whether two such groups read the right keys, in 200 orders."""
    for seed in range(200):
        k_ring = [None] * BUFFERS
        v_ring = [None] * BUFFERS
        full = [Barrier(1) for _ in range(2 * BUFFERS)]
        free = [Barrier(2) for _ in range(2 * BUFFERS)]
        used = [], []
        warps = [loading_keys_and_values(9, k_ring, v_ring, full, free)]
        warps += [group(9, k_ring, full, free, each) for each in used]
        if not run_warps(warps, seed):
            print(f"order {seed}: a warp waits forever")
            return False
        for each in used:
            if each != [*range(9)]:
                print(f"order {seed}: the products read the tiles {each}")
                return False
    return True


print("right:", exercise_1(group_of_dq))

# %%

# Solution 1


def group_of_dq_later(tiles, k_ring, full, free, used):
    for i in range(tiles):
        at = i % BUFFERS
        parity = i // BUFFERS % 2
        yield full[2 * at], parity
        yield full[2 * at + 1], parity
        if i > 0:
            last = (i - 1) % BUFFERS
            used.append(k_ring[last])
            free[2 * last].arrive()  # new: after the product has ended
        yield None
        free[2 * at + 1].arrive()
    used.append(k_ring[(tiles - 1) % BUFFERS])


assert exercise_1(group_of_dq_later)

# %%
# What we learned
# ---------------
#
# These are the designs of this page, with their speeds on the H200 for causal
# attention, 4096 keys and 128 numbers in a head:
#
# - **Plain Triton** reaches 474 TFLOP/s forward. Backward, with its products
#   in a better order, it reaches 404.
# - **A warp that loads and two groups that multiply** reach 548 forward if
#   they wait for each product at once.
# - **Waiting later** makes that 566, and 424 backward, where only ``dq`` is
#   done that way.
# - **Taking turns** makes 551 forward, less than without.
# - **cuDNN** reaches 569 and 465.
#
# And for kernels in general:
#
# - Begin a product as soon as its operands are there, and wait for it where
#   its result is needed. What stands in between is hidden behind it, as long
#   as it takes no longer than the product.
# - Give each buffer a barrier that says it is full and one that says it is
#   free. Draw who waits for which phase, or run it in Python first.
# - A warp that only loads needs few registers, and leaves them to the others.
# - Before you leave plain Triton, try the order of what is there already.
#
# **Next:** `Two programs on an SM <06-two-programs.html>`_ finds another form
# for the backward pass.
