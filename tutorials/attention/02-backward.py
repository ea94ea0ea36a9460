r"""
Five products or seven
======================

A backward pass of attention needs five products of matrices, so why did ours
compute seven?
Because the gradients of queries have no owner in a kernel that goes by keys:
somebody must add them up, and the five designs of this page differ in who
does.

`Attention without its matrix <01-attention.html>`_ has two backward kernels. A
program of the first has keys, and a program of the second has queries. Each
computes the scores and ``dp`` for itself, so two of the five products are
computed twice.
A program that has keys could do all five. Then it holds a part of ``dq`` for
every query, and so does every other program.
On this page we write the kernels that add up these parts, and measure what
each way of adding costs: in time, in memory, and in bits that change from run
to run.

**What you will learn**

- How to count the bytes that a sum costs when many programs add to it.
- How a program adds a tile to memory: with ``tl.atomic_add``, or with a tensor
  descriptor and the unit that also fetches tiles.
- How programs add in an order that is always the same, without waiting for
  each other forever.
- When it is cheaper to compute a number twice than to move it once.
- How to see from registers that a tile is too large, and why one choice of
  tiles that is right for 64 numbers in a head fails for 128.

**What you need:** `Attention without its matrix <01-attention.html>`_, whose
kernels this page takes over, and `A lock, and its race
<../layer-norm/03-lock.html>`_ for programs that wait.
You don't need a GPU.
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

from triton.tools.tensor_descriptor import TensorDescriptor

# %%
# Whose is dq?
# ------------
#
# Which programs have a part of the gradient of a query?
#
# Here is one query with four keys, two numbers each. Two programs share the
# keys: program 0 has keys 0 and 1, and program 1 has keys 2 and 3.
# ``ds`` are the gradients of the four scores, and ``dq`` is the sum of
# :math:`ds_j k_j` over all keys. Each program adds up what its own keys give.

q = torch.tensor([[2.0, 1.0]], requires_grad=True)
k = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [0.0, 0.0]])
v = torch.tensor([[8.0, 0.0], [0.0, 8.0], [4.0, 4.0], [0.0, 0.0]])

p = (q @ k.T).softmax(1)
y = p @ v
dy = torch.ones_like(y)
y.backward(dy)
with torch.no_grad():
    ds = p * (dy @ v.T - (dy * y).sum(1, keepdim=True))
    parts = [ds[:, keys] @ k[keys] for keys in (slice(0, 2), slice(2, 4))]
print("program 0 has", [round(x, 4) for x in parts[0][0].tolist()])
print("program 1 has", [round(x, 4) for x in parts[1][0].tolist()])
print("dq is        ", [round(x, 4) for x in q.grad[0].tolist()])
assert torch.allclose(parts[0] + parts[1], q.grad, atol=1e-6)

# %%
# Neither part is the gradient, but their sum is. With 16384 keys and tiles of
# 128, each query has 128 such parts, in 128 programs.
#
# Does it matter in which order they are added up? Each addition rounds, so it
# does. Let's add three float32 numbers in two orders.

one = torch.tensor(1.0)
small = torch.tensor(2.0**-24)
print(f"(1 + s) + s = {(one + small) + small:.10f}")
print(f"1 + (s + s) = {one + (small + small):.10f}")

# %%
# Both results are as good as a rounded sum can be, but they are not the same.
# So programs that add in the order in which they happen to arrive give other
# bits on each run, as in `Weight gradients: who adds up the rows?
# <../layer-norm/02-summing-rows.html>`_.
#
# What does an owner cost?
# ------------------------
#
# What must be computed and moved in each design? A head has :math:`N` queries,
# as many keys, and :math:`D` numbers in each. A product has :math:`2 N^2 D`
# operations.
#
# - **Seven products.** Every sum has an owner. Nothing is added up in memory,
#   and :math:`4 N^2 D` operations are done twice.
# - **Five products, and everybody adds.** A tile of ``TILE_K`` keys gives a
#   part of ``dq`` for every query, in float32. That makes :math:`4 N D` bytes
#   for each tile of keys, and there are ``N / TILE_K`` tiles.
# - **Five products, and ds in memory.** The first kernel writes ``ds`` in 16
#   bits, and a second one reads it and computes ``dq``, as an owner. So the
#   matrix is back: :math:`2 N^2` bytes are written and read.
#
# For 16 heads of 16384 queries, with 128 numbers in a head:

heads = 16
N = 16384
D = 128
TILE_K = 128
product = 2 * N**2 * D * heads
added = 4 * N * D * (N // TILE_K) * heads
stored = 2 * N**2 * heads
print(f"a product: {product / 1e12:.1f} TFLOP; five: {5 * product / 1e12:.1f}")
print(f"parts of dq with {TILE_K} keys each: {added / 1e9:.1f} GB")
print(f"ds in 16 bits: {stored / 1e9:.1f} GB, written and then read")

# %%
# Five products take at least 5.6 ms on an H100, by the 989 TFLOP/s of its data
# sheet. In this time its memory moves 18.6 GB, at 3.35 TB/s. To add the parts
# of ``dq`` to numbers in memory takes 17.2 GB of loads and 17.2 GB of stores,
# so they must not go there. They don't have to: ``dq`` of a head has 8.4 MB in
# float32, and L2 has 50 MB. L2 can also add: an atomic addition is sent there,
# and the SM does not wait for it.
# And ``ds`` with its 8.6 GB goes to memory and comes back. That takes 5.1 ms,
# which is nearly as long as all the products.

# %%

# Drawing: programs with keys, and the dq that all of them add to.

plt.figure(
    "The matrix of scores in tiles. Each program with keys goes down a column "
    "of tiles and owns dk and dv. At each tile it sends a part of dq to the "
    "right, where the parts of all programs are added up.",
    figsize=(7.5, 3.1),
)
for row in range(4):
    for column in range(5):
        plt.gca().add_patch(
            plt.Rectangle(
                (column, -row),
                0.94,
                0.9,
                facecolor=f"C{column}",
                edgecolor="gray",
                alpha=1 if row == 1 else 0.35,
            )
        )
    plt.gca().add_patch(
        plt.Rectangle(
            (7, -row),
            0.94,
            0.9,
            facecolor="gray" if row == 1 else "none",
            edgecolor="gray",
        )
    )
for column in range(5):
    plt.annotate(
        "",
        xy=(7, -0.55),
        xytext=(column + 0.5, -0.55),
        arrowprops={
            "arrowstyle": "->",
            "color": f"C{column}",
            "connectionstyle": f"arc3,rad={-0.06 - 0.03 * (4 - column)}",
        },
    )
    plt.text(
        column + 0.47,
        -3.2,
        f"dk, dv\nof {column}",
        ha="center",
        va="top",
        fontsize=8,
    )
plt.text(2.5, 1.25, "programs, each with its keys", ha="center", va="bottom")
plt.text(-0.2, -1.05, "queries", ha="right", va="center", rotation=90)
plt.text(7.47, 1.25, "dq", ha="center", va="bottom")
plt.axis((-0.9, 8.4, -4.2, 1.9))
plt.axis("off")
plt.show()

# %%
# In the picture all programs are at the second tile of queries at the same
# time. They come there at different times on a GPU, and nobody knows in which
# order.

# %%

# Scaffold: constants of page 01.

LOG2E = 1.4426950408889634  # the logarithm of e, to the base 2

PLANS = {
    # D: queries, keys, warps, stages
    16: (128, 64, 4, 3),
    32: (128, 64, 4, 3),
    64: (64, 128, 4, 2),
    128: (128, 64, 4, 2),
}

# %%

# Scaffold: the forward pass, from page 01.


@triton.jit
def _attention_fwd(
    q_desc,  # (batch, heads, queries, D), in tiles of TILE_Q queries
    k_desc,  # (batch, heads, keys, D), in tiles of TILE_K keys
    v_desc,  # as k_desc
    y_desc,  # as q_desc
    lse_ptr,  # (batch, heads, queries): saved for the backward pass
    heads,
    queries,
    keys,
    scale,  # c times LOG2E, because our powers are powers of 2
    D: tl.constexpr,  # head dimension
    TILE_Q: tl.constexpr,  # queries of a program
    TILE_K: tl.constexpr,  # keys of a step
    WHOLE: tl.constexpr,  # whether the last tile of keys is full
    STAGES: tl.constexpr,  # num_stages of the loop: how far loads run ahead
):
    # Which queries are ours? Programs with neighboring numbers have the same
    # head, so that they find its keys and values in L2. ``lead`` numbers the
    # heads of all sequences: batch 0 has the first ones, then comes batch 1.
    tiles = tl.cdiv(queries, TILE_Q)
    first = tl.program_id(0) % tiles * TILE_Q
    lead = tl.program_id(0) // tiles
    batch = lead // heads
    head = lead % heads
    q = q_desc.load([batch, head, first, 0]).reshape(TILE_Q, D)

    # For each query: a maximum, a sum of powers, a weighted sum of values.
    maximum = tl.full((TILE_Q,), float("-inf"), tl.float32)
    total = tl.zeros((TILE_Q,), tl.float32)
    weighted = tl.zeros((TILE_Q, D), tl.float32)

    for start in tl.range(0, keys, TILE_K, num_stages=STAGES):
        # A tile of scores, not scaled yet: a row for each query, and a
        # column for each key.
        k = k_desc.load([batch, head, start, 0]).reshape(TILE_K, D)
        score = tl.dot(q, k.T)
        if not WHOLE:
            # The descriptor filled in zeros for keys that do not exist. A
            # zero would be a score like any other; their weight must be 0.
            key = start + tl.arange(0, TILE_K)
            score = tl.where(key[None, :] < keys, score, float("-inf"))

        # Powers, none above 1 because the maximum is subtracted. The
        # multiplication and the subtraction are one instruction.
        new = tl.maximum(maximum, tl.max(score, axis=1) * scale)
        power = tl.exp2(score * scale - new[:, None])

        # What was added up before shrinks to the new maximum.
        shrink = tl.exp2(maximum - new)
        total = total * shrink + tl.sum(power, axis=1)
        weighted = weighted * shrink[:, None]

        # The powers are an operand now, so they are rounded to 16 bits.
        v = v_desc.load([batch, head, start, 0]).reshape(TILE_K, D)
        weighted = tl.dot(power.to(v.dtype), v, weighted)
        maximum = new

    # The only division. The descriptor stores no queries that do not exist.
    y = weighted / total[:, None]
    y = y.to(y_desc.dtype).reshape(1, 1, TILE_Q, D)
    y_desc.store([batch, head, first, 0], y)

    # The logarithm to the base 2 of the sum of all powers, as it would be
    # if no maximum had been subtracted.
    row = lead.to(tl.int64) * queries
    query = first + tl.arange(0, TILE_Q)
    lse = maximum + tl.log2(total)
    tl.store(lse_ptr + row + query, lse, mask=query < queries)


def warps_here(warps):
    """GPUs before the H100 also keep operands in registers, not only sums, so
    they get twice the threads."""
    if ON_GPU and torch.cuda.get_device_capability()[0] < 9:
        return 2 * warps
    return warps


def plan_forward(D):
    """Tiles, warps and stages of the forward kernel for a head dimension."""
    tile_q, tile_k, warps, stages = PLANS[D]
    return {
        "TILE_Q": tile_q,
        "TILE_K": tile_k,
        "STAGES": stages,
        "num_warps": warps_here(warps),
    }


def tiles_of(t, rows):
    """A descriptor of (batch, heads, length, D), in tiles of so many rows."""
    return TensorDescriptor.from_tensor(t, [1, 1, rows, t.shape[-1]])


def forward(q, k, v, scale, plan):
    """The results, and a log-sum-exp for each query."""
    batch, heads, queries, D = q.shape
    keys = k.shape[2]
    y = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, heads, queries, device=q.device)
    if y.numel() == 0:
        return y, lse
    tiles = triton.cdiv(queries, plan["TILE_Q"])
    _attention_fwd[(tiles * batch * heads,)](
        q_desc=tiles_of(q, plan["TILE_Q"]),
        k_desc=tiles_of(k, plan["TILE_K"]),
        v_desc=tiles_of(v, plan["TILE_K"]),
        y_desc=tiles_of(y, plan["TILE_Q"]),
        lse_ptr=lse,
        heads=heads,
        queries=queries,
        keys=keys,
        scale=scale * LOG2E,
        D=D,
        WHOLE=keys % plan["TILE_K"] == 0,
        **plan,
    )
    return y, lse


# %%

# Scaffold: the backward pass with seven products, from page 01.


@triton.jit
def _attention_bwd_delta(
    y_ptr,  # (rows, D), contiguous: all results
    dy_ptr,  # (rows, D), contiguous
    delta_ptr,  # (rows,)
    rows,
    D: tl.constexpr,
    ROWS: tl.constexpr,  # rows of a program
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = row[:, None] * D + tl.arange(0, D)[None, :]
    mask = row[:, None] < rows
    y = tl.load(y_ptr + at, mask=mask, other=0).to(tl.float32)
    dy = tl.load(dy_ptr + at, mask=mask, other=0).to(tl.float32)
    tl.store(delta_ptr + row, tl.sum(y * dy, axis=1), mask=row < rows)


@triton.jit
def _attention_bwd_keys(
    q_desc,  # (batch, heads, queries, D), in tiles of TILE_Q queries
    k_desc,  # (batch, heads, keys, D), in tiles of TILE_K keys
    v_desc,  # as k_desc
    dy_desc,  # as q_desc
    dk_desc,  # as k_desc
    dv_desc,  # as k_desc
    lse_ptr,  # (batch, heads, queries)
    delta_ptr,  # (batch, heads, queries)
    heads,
    queries,
    keys,
    scale,  # c alone: dk is multiplied by it, without LOG2E
    log2e,  # LOG2E, for the powers of 2
    D: tl.constexpr,
    TILE_Q: tl.constexpr,  # queries of a step
    TILE_K: tl.constexpr,  # keys of a program
    STAGES: tl.constexpr,
):
    # Which keys are ours? ``lead`` numbers the heads of all sequences.
    tiles = tl.cdiv(keys, TILE_K)
    first = tl.program_id(0) % tiles * TILE_K
    lead = tl.program_id(0) // tiles
    batch = lead // heads
    head = lead % heads
    row = lead.to(tl.int64) * queries
    k = k_desc.load([batch, head, first, 0]).reshape(TILE_K, D)
    v = v_desc.load([batch, head, first, 0]).reshape(TILE_K, D)
    dk = tl.zeros((TILE_K, D), tl.float32)
    dv = tl.zeros((TILE_K, D), tl.float32)

    for start in tl.range(0, queries, TILE_Q, num_stages=STAGES):
        # The weights again: with lse they need no maximum and no sum.
        # Queries that do not exist are zeros, and so is their dy. They add
        # nothing to dv and dk, so no mask is needed.
        q = q_desc.load([batch, head, start, 0]).reshape(TILE_Q, D)
        query = start + tl.arange(0, TILE_Q)
        mask = query < queries
        lse = tl.load(lse_ptr + row + query, mask=mask, other=0)
        score = tl.dot(k, q.T)
        p = tl.exp2(score * (scale * log2e) - lse[None, :])

        # dv: the sum of p dy, over queries.
        dy = dy_desc.load([batch, head, start, 0]).reshape(TILE_Q, D)
        dv = tl.dot(p.to(dy.dtype), dy, dv)

        # ds = p (dp - delta), and dk: the sum of ds q, multiplied by c
        # after the loop.
        delta = tl.load(delta_ptr + row + query, mask=mask, other=0)
        dp = tl.dot(v, dy.T)
        ds = p * (dp - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk)

    dk = (dk * scale).to(dk_desc.dtype).reshape(1, 1, TILE_K, D)
    dv = dv.to(dv_desc.dtype).reshape(1, 1, TILE_K, D)
    dk_desc.store([batch, head, first, 0], dk)
    dv_desc.store([batch, head, first, 0], dv)


@triton.jit
def _attention_bwd_queries(
    q_desc,  # (batch, heads, queries, D), in tiles of TILE_Q queries
    k_desc,  # (batch, heads, keys, D), in tiles of TILE_K keys
    v_desc,  # as k_desc
    dy_desc,  # as q_desc
    dq_desc,  # as q_desc
    lse_ptr,  # (batch, heads, queries)
    delta_ptr,  # (batch, heads, queries)
    heads,
    queries,
    keys,
    scale,  # c alone, for dq
    log2e,  # LOG2E, for the powers of 2
    D: tl.constexpr,
    TILE_Q: tl.constexpr,  # queries of a program
    TILE_K: tl.constexpr,  # keys of a step
    WHOLE: tl.constexpr,  # whether the last tile of keys is full
    STAGES: tl.constexpr,
):
    # Which queries are ours? All that a query needs is loaded once.
    tiles = tl.cdiv(queries, TILE_Q)
    first = tl.program_id(0) % tiles * TILE_Q
    lead = tl.program_id(0) // tiles
    batch = lead // heads
    head = lead % heads
    row = lead.to(tl.int64) * queries
    q = q_desc.load([batch, head, first, 0]).reshape(TILE_Q, D)
    dy = dy_desc.load([batch, head, first, 0]).reshape(TILE_Q, D)
    query = first + tl.arange(0, TILE_Q)
    mask = query < queries
    lse = tl.load(lse_ptr + row + query, mask=mask, other=0)
    delta = tl.load(delta_ptr + row + query, mask=mask, other=0)
    dq = tl.zeros((TILE_Q, D), tl.float32)

    for start in tl.range(0, keys, TILE_K, num_stages=STAGES):
        # The weights again.
        k = k_desc.load([batch, head, start, 0]).reshape(TILE_K, D)
        score = tl.dot(q, k.T)
        p = tl.exp2(score * (scale * log2e) - lse[:, None])
        if not WHOLE:
            # A key of zeros would add nothing, unless its power is infinite:
            # then infinity times 0 is not a number.
            key = start + tl.arange(0, TILE_K)
            p = tl.where(key[None, :] < keys, p, 0)

        # ds = p (dp - delta), and dq: the sum of ds k, over keys.
        v = v_desc.load([batch, head, start, 0]).reshape(TILE_K, D)
        dp = tl.dot(dy, v.T)
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq)

    dq = (dq * scale).to(dq_desc.dtype).reshape(1, 1, TILE_Q, D)
    dq_desc.store([batch, head, first, 0], dq)


def plan_backward(D):
    """Tiles, warps and stages of both backward kernels."""
    return {
        "TILE_Q": 64,
        "TILE_K": 64,
        "STAGES": 2 if D > 64 else 3,
        "num_warps": warps_here(4),
    }


def backward(dy, q, k, v, y, lse, scale):
    """dq, dk and dv; all tensors have the layout that descriptors want, and
    dy and y are contiguous."""
    batch, heads, queries, D = q.shape
    keys = k.shape[2]
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    dk = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    dv = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    if dq.numel() == 0:
        return dq, dk.zero_(), dv.zero_()
    delta = torch.empty_like(lse)
    rows = batch * heads * queries
    _attention_bwd_delta[(triton.cdiv(rows, 64),)](
        y_ptr=y,
        dy_ptr=dy,
        delta_ptr=delta,
        rows=rows,
        D=D,
        ROWS=64,
        num_warps=4,
    )
    plan = plan_backward(D)
    tiles = triton.cdiv(keys, plan["TILE_K"])
    _attention_bwd_keys[(tiles * batch * heads,)](
        q_desc=tiles_of(q, plan["TILE_Q"]),
        k_desc=tiles_of(k, plan["TILE_K"]),
        v_desc=tiles_of(v, plan["TILE_K"]),
        dy_desc=tiles_of(dy, plan["TILE_Q"]),
        dk_desc=tiles_of(dk, plan["TILE_K"]),
        dv_desc=tiles_of(dv, plan["TILE_K"]),
        lse_ptr=lse,
        delta_ptr=delta,
        heads=heads,
        queries=queries,
        keys=keys,
        scale=scale,
        log2e=LOG2E,
        D=D,
        **plan,
    )
    tiles = triton.cdiv(queries, plan["TILE_Q"])
    _attention_bwd_queries[(tiles * batch * heads,)](
        q_desc=tiles_of(q, plan["TILE_Q"]),
        k_desc=tiles_of(k, plan["TILE_K"]),
        v_desc=tiles_of(v, plan["TILE_K"]),
        dy_desc=tiles_of(dy, plan["TILE_Q"]),
        dq_desc=tiles_of(dq, plan["TILE_Q"]),
        lse_ptr=lse,
        delta_ptr=delta,
        heads=heads,
        queries=queries,
        keys=keys,
        scale=scale,
        log2e=LOG2E,
        D=D,
        WHOLE=keys % plan["TILE_K"] == 0,
        **plan,
    )
    return dq, dk, dv


# %%
# Four products of a tile
# -----------------------
#
# What do all designs with five products share?
#
# Their programs have keys, and go through all queries. At each tile they do
# what ``_attention_bwd_keys`` of `Attention without its matrix
# <01-attention.html>`_ does: they compute the weights again, then ``dp`` and
# ``ds``, and add to ``dk`` and ``dv``. These are four of the five products.
# The designs differ in what they do with ``ds``, so this step becomes a
# function that returns it.
# A function with ``triton.jit`` that a kernel calls is compiled into the
# kernel, as if its lines stood there.
#
# There is one choice in it. ``dp`` needs no weights, so a step can begin with
# two products, and compute the powers after both. Then Tensor Cores have more
# to do at a time, but the tile of ``dp`` is in registers for longer. Which of
# the two is faster we have to try, and ``DP_FIRST`` says which one it is.


@triton.jit
def _step_of_keys(
    k,  # (TILE_K, D): our keys
    v,  # (TILE_K, D): their values
    dk,  # (TILE_K, D), float32: what was added up so far
    dv,  # (TILE_K, D), float32
    q_desc,  # (batch, heads, queries, D), in tiles of TILE_Q queries
    dy_desc,  # as q_desc
    lse_ptr,  # the first query of our head, in (batch, heads, queries)
    delta_ptr,  # as lse_ptr
    batch,
    head,
    start,  # the first query of this step
    first,  # our first key
    queries,
    keys,
    scale,  # c alone
    log2e,  # LOG2E, for the powers of 2
    D: tl.constexpr,  # head dimension
    TILE_Q: tl.constexpr,  # queries of a step
    TILE_K: tl.constexpr,  # keys of a program
    WHOLE: tl.constexpr,  # whether the last tile of keys is full
    DP_FIRST: tl.constexpr,  # whether dp is computed before the weights
):
    """ds of our keys and TILE_Q queries; dk and dv with what these add."""
    # The weights again, a row for each key. Queries that do not exist are
    # zeros, and so is their dy: they add nothing.
    q = q_desc.load([batch, head, start, 0]).reshape(TILE_Q, D)
    query = start + tl.arange(0, TILE_Q)
    mask = query < queries
    lse = tl.load(lse_ptr + query, mask=mask, other=0)
    score = tl.dot(k, q.T)
    if DP_FIRST:
        # New: a second product, which needs no weights.
        dy = dy_desc.load([batch, head, start, 0]).reshape(TILE_Q, D)
        dp = tl.dot(v, dy.T)
        delta = tl.load(delta_ptr + query, mask=mask, other=0)
    p = tl.exp2(score * (scale * log2e) - lse[None, :])
    if not WHOLE:
        # New: keys that do not exist must add nothing to dq. Their power may
        # be infinite, and infinity times 0 is not a number.
        key = first + tl.arange(0, TILE_K)
        p = tl.where(key[:, None] < keys, p, 0)

    # dv: the sum of p dy, over queries.
    if not DP_FIRST:
        dy = dy_desc.load([batch, head, start, 0]).reshape(TILE_Q, D)
    dv = tl.dot(p.to(dy.dtype), dy, dv)

    # ds = p (dp - delta), in 16 bits, and dk: the sum of ds q.
    if not DP_FIRST:
        delta = tl.load(delta_ptr + query, mask=mask, other=0)
        dp = tl.dot(v, dy.T)
    ds = (p * (dp - delta[None, :])).to(q.dtype)
    dk = tl.dot(ds, q, dk)
    return ds, dk, dv


# %%
# Everybody adds
# --------------
#
# How do many programs add to one ``dq``?
#
# The first design is the shortest: the fifth product gives a part of ``dq``,
# and ``tl.atomic_add`` adds each of its numbers to a float32 number in memory.
# The product needs ``ds`` with a row for each query, so it takes ``ds.T``. For
# that the tile goes through shared memory, because the left operand of a
# product can be turned around only there.


@triton.jit
def _attention_bwd_atomics(
    q_desc,  # (batch, heads, queries, D), in tiles of TILE_Q queries
    k_desc,  # (batch, heads, keys, D), in tiles of TILE_K keys
    v_desc,  # as k_desc
    dy_desc,  # as q_desc
    dk_desc,  # as k_desc
    dv_desc,  # as k_desc
    sums_ptr,  # (batch, heads, queries, D), float32, zeros: dq without c
    lse_ptr,  # (batch, heads, queries)
    delta_ptr,  # (batch, heads, queries)
    heads,
    queries,
    keys,
    scale,  # c alone
    log2e,
    D: tl.constexpr,
    TILE_Q: tl.constexpr,
    TILE_K: tl.constexpr,
    WHOLE: tl.constexpr,
    DP_FIRST: tl.constexpr,
    STAGES: tl.constexpr,
):
    # Which keys are ours? ``lead`` numbers the heads of all sequences.
    tiles = tl.cdiv(keys, TILE_K)
    first = tl.program_id(0) % tiles * TILE_K
    lead = tl.program_id(0) // tiles
    batch = lead // heads
    head = lead % heads
    row = lead.to(tl.int64) * queries
    k = k_desc.load([batch, head, first, 0]).reshape(TILE_K, D)
    v = v_desc.load([batch, head, first, 0]).reshape(TILE_K, D)
    dk = tl.zeros((TILE_K, D), tl.float32)
    dv = tl.zeros((TILE_K, D), tl.float32)

    for start in tl.range(0, queries, TILE_Q, num_stages=STAGES):
        ds, dk, dv = _step_of_keys(
            k=k,
            v=v,
            dk=dk,
            dv=dv,
            q_desc=q_desc,
            dy_desc=dy_desc,
            lse_ptr=lse_ptr + row,
            delta_ptr=delta_ptr + row,
            batch=batch,
            head=head,
            start=start,
            first=first,
            queries=queries,
            keys=keys,
            scale=scale,
            log2e=log2e,
            D=D,
            TILE_Q=TILE_Q,
            TILE_K=TILE_K,
            WHOLE=WHOLE,
            DP_FIRST=DP_FIRST,
        )

        # Our part of dq, added to that of all others. We need no order with
        # other accesses to memory, hence "relaxed".
        part = tl.dot(ds.T, k)
        query = start + tl.arange(0, TILE_Q)
        at = (row + query)[:, None] * D + tl.arange(0, D)[None, :]
        mask = query[:, None] < queries
        tl.atomic_add(sums_ptr + at, part, mask=mask, sem="relaxed")

    dk = (dk * scale).to(dk_desc.dtype).reshape(1, 1, TILE_K, D)
    dv = dv.to(dv_desc.dtype).reshape(1, 1, TILE_K, D)
    dk_desc.store([batch, head, first, 0], dk)
    dv_desc.store([batch, head, first, 0], dv)


# %%
# The sums begin with zeros, and they are complete when the kernel has ended.
# Then another kernel multiplies them by :math:`c` and rounds them to 16 bits.


@triton.jit
def _attention_bwd_round(
    sums_ptr,  # (numbers,), float32
    dq_ptr,  # (numbers,), in the type of q
    numbers,
    scale,
    TILE: tl.constexpr,  # numbers of a program
):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = at < numbers
    total = tl.load(sums_ptr + at, mask=mask)
    tl.store(dq_ptr + at, total * scale, mask=mask)


# %%
# How large are its tiles? The more keys a program has, the fewer parts there
# are to add up. But ``dk`` and ``dv`` of all its keys are in registers.
# We come back to this below. On an H100 we tried five tiles for each design,
# with ``dp`` before the weights or after them, at 4096 keys. This table has
# what was fastest, or about as fast as that. Smaller heads and other GPUs were
# not tried, and take the tiles of seven products.

FIVE_PRODUCTS = {
    # design, D: queries, keys, warps, stages, whether dp comes first
    ("atomics", 64): (128, 128, 8, 2, True),
    ("atomics", 128): (64, 128, 8, 2, False),
    ("reductions", 64): (64, 64, 4, 3, True),
    ("reductions", 128): (64, 128, 8, 2, False),
    ("in-order", 64): (128, 128, 8, 2, True),
    ("in-order", 128): (64, 128, 8, 2, False),
    ("in-order-while", 64): (128, 128, 8, 2, False),
    ("in-order-while", 128): (64, 128, 8, 2, False),
    ("stored", 64): (64, 64, 4, 3, False),
    ("stored", 128): (64, 64, 4, 2, True),
}


def tried_here():
    """Whether this is an H100, for which the tiles of the table were tried.
    The interpreter takes them, too."""
    if not ON_GPU:
        return True
    nvidia = torch.version.hip is None
    return nvidia and torch.cuda.get_device_capability()[0] == 9


def plan_five_products(design, D):
    """Tiles, warps and stages of a kernel with four or five products."""
    if not tried_here() or (design, D) not in FIVE_PRODUCTS:
        return plan_backward(D) | {"DP_FIRST": False}
    tile_q, tile_k, warps, stages, dp_first = FIVE_PRODUCTS[design, D]
    return {
        "TILE_Q": tile_q,
        "TILE_K": tile_k,
        "DP_FIRST": dp_first,
        "STAGES": stages,
        "num_warps": warps,
    }


# %%

# Scaffold: what the backward kernels are given.


def delta_of(y, dy, lse):
    """The number that a softmax subtracts, for each query."""
    delta = torch.empty_like(lse)
    _attention_bwd_delta[(triton.cdiv(lse.numel(), 64),)](
        y_ptr=y,
        dy_ptr=dy,
        delta_ptr=delta,
        rows=lse.numel(),
        D=y.shape[-1],
        ROWS=64,
        num_warps=4,
    )
    return delta


def given_to_keys(dy, q, k, v, y, lse, scale, dk, dv, plan):
    """Arguments that all kernels with keys have, and their programs."""
    batch, heads, queries, D = q.shape
    keys = k.shape[2]
    arguments = {
        "q_desc": tiles_of(q, plan["TILE_Q"]),
        "k_desc": tiles_of(k, plan["TILE_K"]),
        "v_desc": tiles_of(v, plan["TILE_K"]),
        "dy_desc": tiles_of(dy, plan["TILE_Q"]),
        "dk_desc": tiles_of(dk, plan["TILE_K"]),
        "dv_desc": tiles_of(dv, plan["TILE_K"]),
        "lse_ptr": lse,
        "delta_ptr": delta_of(y, dy, lse),
        "heads": heads,
        "queries": queries,
        "keys": keys,
        "scale": scale,
        "log2e": LOG2E,
        "D": D,
        "WHOLE": keys % plan["TILE_K"] == 0,
    }
    programs = triton.cdiv(keys, plan["TILE_K"]) * batch * heads
    return arguments | plan, (programs,)


def gradients(q, k, v):
    """Room for dq, dk and dv."""
    return [
        torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v)
    ]


def rounded(sums, dq, scale):
    """dq from its sums in float32."""
    _attention_bwd_round[(triton.cdiv(sums.numel(), 4096),)](
        sums_ptr=sums,
        dq_ptr=dq,
        numbers=sums.numel(),
        scale=scale,
        TILE=4096,
        num_warps=8,
    )


# %%


def backward_by_atomics(dy, q, k, v, y, lse, scale):
    """dq, dk and dv; there is at least one query and one key."""
    dq, dk, dv = gradients(q, k, v)
    sums = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    plan = plan_five_products("atomics", q.shape[-1])
    arguments, programs = given_to_keys(
        dy, q, k, v, y, lse, scale, dk, dv, plan
    )
    _attention_bwd_atomics[programs](sums_ptr=sums, **arguments)
    rounded(sums, dq, scale)
    return dq, dk, dv


# %%

# Scaffold: a check of one design.


def check_design(design, batch, heads, queries, keys, D):
    """The largest error of dq, dk and dv, compared with float64, as a share
    of the largest number."""
    q, dy = (
        torch.randn(batch, heads, queries, D, device=DEVICE).half()
        for _ in range(2)
    )
    k, v = (
        torch.randn(batch, heads, keys, D, device=DEVICE).half()
        for _ in range(2)
    )
    scale = D**-0.5
    y, lse = forward(q, k, v, scale, plan_forward(D))
    ours = design(dy, q, k, v, y, lse, scale)
    exact = [t.double().requires_grad_() for t in (q, k, v)]
    expected = F.scaled_dot_product_attention(*exact)
    errors = []
    for t, e in zip(
        ours, torch.autograd.grad(expected, exact, dy.double()), strict=True
    ):
        errors.append(((t - e).abs().max() / e.abs().max()).item())
    print("errors:", " ".join(f"{error:.2%}" for error in errors))
    assert max(errors) < 0.01


# %%
# Is it right? We print the largest error of ``dq``, ``dk`` and ``dv``, as a
# share of the largest number of each.

check_design(backward_by_atomics, 1, 2, queries=70, keys=150, D=64)

# %%
# Is it faster than seven products?
# ---------------------------------
#
# We measure as in `Attention without its matrix <01-attention.html>`_: 16
# heads of 128 numbers, and 16384 tokens in sequences of 1024 to 16384.
# We count five products for every design, whatever it computes:
# :math:`10 N^2 D` operations for each head. So the higher line is the faster
# backward pass. The product of two matrices by cuBLAS is our ceiling again.

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

# Scaffold: inputs, and who computes gradients.

TOKENS = 16384

NAMES = {
    "triton": "Seven products",
    "atomics": "Atomic additions",
    "reductions": "Reductions by the TMA",
    "in-order": "In order, PTX waits",
    "in-order-while": "In order, Triton waits",
    "stored": "ds in memory",
    "sdpa-cudnn": "cuDNN, by PyTorch",
    "torch": "FlashAttention-2, by PyTorch",
    "cublas": "A product of matrices",
}
DESIGNS = {"triton": backward, "atomics": backward_by_atomics}


def calls_of(N, D, dtype, lines):
    """Name of a line -> a call that computes dq, dk and dv."""
    q, k, v, dy = inputs(N, D, dtype)
    scale = D**-0.5
    backends = torch.nn.attention.SDPBackend
    libraries = {
        "sdpa-cudnn": backends.CUDNN_ATTENTION,
        "torch": backends.FLASH_ATTENTION,
    }
    calls = {}
    with torch.no_grad():
        y, lse = forward(q, k, v, scale, plan_forward(D))
    for name in lines:
        if name in DESIGNS:
            calls[name] = functools.partial(
                DESIGNS[name],
                *(t.detach() for t in (dy, q, k, v, y, lse)),
                scale,
            )
        elif name in libraries:
            theirs = with_backend(libraries[name])(q, k, v)
            calls[name] = functools.partial(
                torch.autograd.grad,
                theirs,
                (q, k, v),
                dy.detach(),
                retain_graph=True,
            )
    return calls


@functools.cache  # all lines in turns; then each is asked for its own
def backward_speeds(N, D, dtype, lines):
    torch.cuda.empty_cache()  # ds of other lengths
    return speeds(5, calls_of(N, D, dtype, lines), N)


# %%

# Scaffold: inputs, a library, TFLOP/s and a report, from page 01.


def inputs(N, D, dtype):
    """query, key, value and dy: TOKENS tokens as sequences of N."""
    heads = 2048 // D
    return [
        torch.randn(
            TOKENS // N, heads, N, D, device=DEVICE, dtype=dtype
        ).requires_grad_()
        for _ in range(4)
    ]


def with_backend(backend):
    """PyTorch's function, by a library of this name."""

    def function(query, key, value):
        with torch.nn.attention.sdpa_kernel(backend):
            return F.scaled_dot_product_attention(query, key, value)

    return function


def speeds(products, calls, N):
    """TFLOP/s of each call: median, low, high; and of cuBLAS beside them.

    A call has so many products of (N, N) and D for each of 2048 / D heads.
    """
    a = torch.randn(8192, 8192, device=DEVICE, dtype=torch.float16)
    calls = calls | {"cublas": lambda: a @ a}
    found = {}
    for name, times in in_turns(calls).items():
        operations = products * 2 * N * 2048 * TOKENS
        if name == "cublas":
            operations = 2 * 8192**3
        median, short, long = times
        found[name] = [operations / us * 1e-6 for us in (median, long, short)]
    return found


def in_percent(benchmark):
    """Draw a benchmark, and print each speed in % of that of cuBLAS."""
    table = benchmark.run(show_plots=ON_GPU, return_df=True)
    table = table.astype({"N": int}).set_index("N")
    table.columns = [column.split(" (")[0] for column in table.columns]
    if table.isna().all(axis=None):
        print("Timing needs a GPU; the page shows recorded figures.")
        return
    ceiling = table[NAMES["cublas"]]
    percent = 100 * table.div(ceiling, axis="index")
    print("speed in % of that of a product of matrices")
    print(percent.to_string(float_format="%.0f"))


# %%

# Scaffold: atomic additions, a benchmark.

FIRST = ["triton", "atomics", "cublas"]


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=[1024, 2048, 4096, 8192, 16384],
        x_log=True,
        xlabel="N (queries, and keys)",
        line_arg="provider",
        line_vals=FIRST,
        line_names=[NAMES[name] for name in FIRST],
        ylabel="TFLOP/s",
        plot_name="attention-backward-atomics",
        args={"D": 128, "dtype": torch.float16, "mode": "backward"},
    )
)
def bench_atomics(N, D, dtype, mode, provider):
    """All lines in turns, 15 times, each a CUDA graph that overwrites L2
    first; the time of a graph that only overwrites L2 is subtracted."""
    if not ON_GPU:
        return 3 * [float("nan")]  # the interpreter cannot be timed
    return backward_speeds(N, D, dtype, tuple(FIRST))[provider]


# %%

in_percent(bench_atomics)

# %%
# **What the figure shows.**
# On the H100 atomic additions reach NN TFLOP/s at 1024 keys, NN at 4096 and NN
# at 16384. Seven products reach NN, NN and NN. So the design that computes two
# products twice is NN to NN times as fast.
#
# **Why?**
# Five products are fewer, but a part of ``dq`` leaves the SM in each step.
# With 128 keys to a program that is one byte for each 320 operations, so at
# 4096 keys NN TB of numbers to add go to L2 in each second. For comparison,
# memory moves at most 3.35 TB/s.
# And the parts are not all. A kernel has to write zeros to the sums first, and
# another one has to round them at the end. Together they move 336 MB, which
# takes at least 0.1 ms, and 1024 keys take NN ms in all.
# The kernel has one more product in each step, too, and its result is in
# registers like all other sums. A program needs all registers of an SM, and
# one that computes four products needs half of them, so that two programs
# share an SM. We come back to that below. We have not measured how much of the
# difference each of these makes.
#
# One instruction for a tile
# --------------------------
#
# Can a program add a whole tile at once?
#
# A tensor descriptor can. So far its tiles were loaded and stored by the
# Tensor Memory Accelerator. With ``desc.atomic_add(index, tile)`` the program
# leaves the tile in shared memory, and this unit adds it to the tensor. NVIDIA
# calls it a *reduction*. No thread computes an address or sends a number, and
# what lies beyond the end of the tensor is not added.
#
# Triton's interpreter has no such operation. It runs one program after the
# other, so there a program can load the sums, add its part and store them. On
# a GPU that would go wrong, as in `A lock, and its race
# <../layer-norm/03-lock.html>`_.
# All else is as it was.


@triton.jit
def _attention_bwd_reductions(
    q_desc,
    k_desc,
    v_desc,
    dy_desc,
    dk_desc,
    dv_desc,
    sums_desc,  # New: (batch, heads, queries, D), in tiles of TILE_Q queries
    lse_ptr,
    delta_ptr,
    heads,
    queries,
    keys,
    scale,
    log2e,
    D: tl.constexpr,
    TILE_Q: tl.constexpr,
    TILE_K: tl.constexpr,
    WHOLE: tl.constexpr,
    DP_FIRST: tl.constexpr,
    STAGES: tl.constexpr,
    INTERPRETED: tl.constexpr,  # New: whether programs run one by one
):
    tiles = tl.cdiv(keys, TILE_K)
    first = tl.program_id(0) % tiles * TILE_K
    lead = tl.program_id(0) // tiles
    batch = lead // heads
    head = lead % heads
    row = lead.to(tl.int64) * queries
    k = k_desc.load([batch, head, first, 0]).reshape(TILE_K, D)
    v = v_desc.load([batch, head, first, 0]).reshape(TILE_K, D)
    dk = tl.zeros((TILE_K, D), tl.float32)
    dv = tl.zeros((TILE_K, D), tl.float32)

    for start in tl.range(0, queries, TILE_Q, num_stages=STAGES):
        ds, dk, dv = _step_of_keys(
            k=k,
            v=v,
            dk=dk,
            dv=dv,
            q_desc=q_desc,
            dy_desc=dy_desc,
            lse_ptr=lse_ptr + row,
            delta_ptr=delta_ptr + row,
            batch=batch,
            head=head,
            start=start,
            first=first,
            queries=queries,
            keys=keys,
            scale=scale,
            log2e=log2e,
            D=D,
            TILE_Q=TILE_Q,
            TILE_K=TILE_K,
            WHOLE=WHOLE,
            DP_FIRST=DP_FIRST,
        )
        part = tl.dot(ds.T, k).reshape(1, 1, TILE_Q, D)

        # New: one addition of a whole tile.
        if INTERPRETED:
            before = sums_desc.load([batch, head, start, 0])
            sums_desc.store([batch, head, start, 0], before + part)
        else:
            sums_desc.atomic_add([batch, head, start, 0], part)

    dk = (dk * scale).to(dk_desc.dtype).reshape(1, 1, TILE_K, D)
    dv = dv.to(dv_desc.dtype).reshape(1, 1, TILE_K, D)
    dk_desc.store([batch, head, first, 0], dk)
    dv_desc.store([batch, head, first, 0], dv)


# %%


def backward_by_reductions(dy, q, k, v, y, lse, scale):
    """As backward_by_atomics."""
    dq, dk, dv = gradients(q, k, v)
    sums = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    plan = plan_five_products("reductions", q.shape[-1])
    arguments, programs = given_to_keys(
        dy, q, k, v, y, lse, scale, dk, dv, plan
    )
    _attention_bwd_reductions[programs](
        sums_desc=tiles_of(sums, plan["TILE_Q"]),
        INTERPRETED=not ON_GPU,
        **arguments,
    )
    rounded(sums, dq, scale)
    return dq, dk, dv


check_design(backward_by_reductions, 1, 2, queries=70, keys=150, D=64)

# %%
# One after the other
# -------------------
#
# Can many programs add to one ``dq`` and still give the same bits each time?
#
# They can, if they take turns in a fixed order: for each tile of queries,
# program 0 adds first, then program 1, and so on. So each tile of queries gets
# a number in memory that says whose turn it is. It begins with 0. A program
# waits until the number is its own, adds its part, and then writes the number
# of the next program. As with `a lock <../layer-norm/03-lock.html>`_, it takes
# ``acquire`` to see what the programs before have added, and a barrier and
# ``release`` to pass the turn on.
#
# Does that let only one program run at a time? No. While program 1 adds at the
# first tile, program 0 is already at the second one. They move like a queue of
# people who sign several lists, one behind the other.

# %%

# Drawing: programs that add in order, each one step behind the one before.

plt.figure(
    "Four programs over time. Each visits the tiles of queries from first to "
    "last. Program 1 adds to a tile after program 0 has, program 2 after "
    "program 1, and program 3 after program 2, so each is one step behind.",
    figsize=(7.5, 2.5),
)
for program in range(4):
    plt.text(-0.2, -program, f"program {program}", ha="right", va="center")
    plt.barh(
        -program,
        program - 0.08 if program else 0,
        height=0.75,
        color="none",
        edgecolor="gray",
        linestyle=":",
    )
    for step in range(5):
        plt.barh(
            -program,
            0.92,
            left=program + step,
            height=0.75,
            align="center",
            color=f"C{step}",
        )
        plt.text(
            program + step + 0.46,
            -program,
            f"tile {step}",
            color="white",
            ha="center",
            va="center",
            fontsize=8,
        )
plt.text(1.45, -3, "waits", ha="center", va="center", color="gray")
plt.annotate(
    "", xy=(8, -3.8), xytext=(0, -3.8), arrowprops={"arrowstyle": "->"}
)
plt.text(4, -3.9, "time", ha="center", va="top")
plt.axis((-2, 8.2, -4.5, 0.6))
plt.axis("off")
plt.show()

# %%
# Could they wait forever? If program 5 waits for program 4, and program 4 has
# not begun because 5 and others occupy all SMs, nobody ever moves. And the GPU
# does not promise to start programs by their numbers.
# So a program takes its number itself, when it starts: ``tl.atomic_add``
# returns what was there before it added 1, like a machine that gives out
# tickets. Then all smaller numbers belong to programs that have started. The
# smallest of them waits for nobody, so there is always one that moves.
#
# How does a program wait? In Triton it is a ``while`` that asks for the number
# again and again, by adding 0. But this has a price: Triton lets loads run
# ahead only in a loop that has no other loop and no barrier in it. So each
# step would wait for its queries, too.
#
# A few lines of PTX help. PTX is the language to which Triton translates a
# kernel before it becomes machine code. ``tl.inline_asm_elementwise`` puts
# lines of it into our kernel as they are, for each thread: ``$0`` is a result,
# and the other names with a dollar are the arguments in their order. Triton
# does not look into them, so it sees no loop and no barrier.
# We write both forms and measure them. The interpreter does not know PTX, and
# neither does a GPU by AMD, so they take the ``while``.

HAS_PTX = ON_GPU and torch.version.hip is None


@triton.jit
def _wait_for_turn(
    turn_ptr,  # whose turn it is
    tile,  # our number
    PTX: tl.constexpr,  # whether lines of PTX wait, or Triton does
):
    if PTX:
        # Each thread loads the number with acquire until it is ours.
        tl.inline_asm_elementwise(
            """{
            .reg .pred others;
            .reg .b32 seen;
            again:
            ld.acquire.gpu.global.b32 seen, [$1];
            setp.ne.s32 others, seen, $2;
            @others bra again;
            mov.b32 $0, seen;
            }""",
            constraints="=r,l,r",
            args=[turn_ptr, tile],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        while tl.atomic_add(turn_ptr, 0, sem="acquire") != tile:
            pass


@triton.jit
def _pass_turn_on(
    turn_ptr,
    turn,  # whose turn it is now
    PTX: tl.constexpr,
):
    if PTX:
        # All threads meet; then thread 0 stores the number with release.
        tl.inline_asm_elementwise(
            """{
            .reg .pred one;
            .reg .b32 thread, before;
            mov.u32 thread, %tid.x;
            setp.eq.u32 one, thread, 0;
            bar.sync 0;
            @one atom.release.gpu.global.exch.b32 before, [$1], $2;
            mov.b32 $0, thread;
            }""",
            constraints="=r,l,r",
            args=[turn_ptr, turn],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.debug_barrier()
        tl.atomic_xchg(turn_ptr, turn, sem="release")


# %%
# The kernel is that of atomic additions, with its own number and the two
# functions.


@triton.jit
def _attention_bwd_in_order(
    q_desc,
    k_desc,
    v_desc,
    dy_desc,
    dk_desc,
    dv_desc,
    sums_ptr,
    lse_ptr,
    delta_ptr,
    ticket_ptr,  # New: one number, 0 at first
    turns_ptr,  # New: (batch, heads, tiles of queries): whose turn it is
    heads,
    queries,
    keys,
    scale,
    log2e,
    D: tl.constexpr,
    TILE_Q: tl.constexpr,
    TILE_K: tl.constexpr,
    WHOLE: tl.constexpr,
    DP_FIRST: tl.constexpr,
    STAGES: tl.constexpr,
    PTX: tl.constexpr,  # New: whether lines of PTX wait, or Triton does
):
    # New: our number is how many programs have started before us.
    ticket = tl.atomic_add(ticket_ptr, 1, sem="relaxed")
    tiles = tl.cdiv(keys, TILE_K)
    tile = ticket % tiles
    first = tile * TILE_K
    lead = ticket // tiles
    batch = lead // heads
    head = lead % heads
    row = lead.to(tl.int64) * queries
    turns_ptr += lead * tl.cdiv(queries, TILE_Q)
    k = k_desc.load([batch, head, first, 0]).reshape(TILE_K, D)
    v = v_desc.load([batch, head, first, 0]).reshape(TILE_K, D)
    dk = tl.zeros((TILE_K, D), tl.float32)
    dv = tl.zeros((TILE_K, D), tl.float32)

    for start in tl.range(0, queries, TILE_Q, num_stages=STAGES):
        ds, dk, dv = _step_of_keys(
            k=k,
            v=v,
            dk=dk,
            dv=dv,
            q_desc=q_desc,
            dy_desc=dy_desc,
            lse_ptr=lse_ptr + row,
            delta_ptr=delta_ptr + row,
            batch=batch,
            head=head,
            start=start,
            first=first,
            queries=queries,
            keys=keys,
            scale=scale,
            log2e=log2e,
            D=D,
            TILE_Q=TILE_Q,
            TILE_K=TILE_K,
            WHOLE=WHOLE,
            DP_FIRST=DP_FIRST,
        )
        part = tl.dot(ds.T, k)
        query = start + tl.arange(0, TILE_Q)
        at = (row + query)[:, None] * D + tl.arange(0, D)[None, :]
        mask = query[:, None] < queries

        # New: wait until all programs with earlier keys have added.
        turn_ptr = turns_ptr + start // TILE_Q
        _wait_for_turn(turn_ptr, tile, PTX)
        tl.atomic_add(sums_ptr + at, part, mask=mask, sem="relaxed")

        # New: once all our threads have added, it is the next one's turn.
        _pass_turn_on(turn_ptr, tile + 1, PTX)

    dk = (dk * scale).to(dk_desc.dtype).reshape(1, 1, TILE_K, D)
    dv = dv.to(dv_desc.dtype).reshape(1, 1, TILE_K, D)
    dk_desc.store([batch, head, first, 0], dk)
    dv_desc.store([batch, head, first, 0], dv)


# %%
# Why do we still add with ``tl.atomic_add``, when nobody else adds at the same
# time? A load would make the program wait for the sum, and an atomic addition
# is only sent.


def backward_in_order(
    dy, q, k, v, y, lse, scale, design="in-order", ptx=HAS_PTX
):
    """As backward_by_atomics, with the same bits each time."""
    dq, dk, dv = gradients(q, k, v)
    batch, heads, queries, D = q.shape
    sums = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    plan = plan_five_products(design, D)
    arguments, programs = given_to_keys(
        dy, q, k, v, y, lse, scale, dk, dv, plan
    )
    tiles = triton.cdiv(queries, plan["TILE_Q"])
    # Its own two tensors: turns begin at an address that is a multiple of 16.
    ticket = torch.zeros(1, dtype=torch.int32, device=q.device)
    turns = torch.zeros(
        batch * heads * tiles, dtype=torch.int32, device=q.device
    )
    _attention_bwd_in_order[programs](
        sums_ptr=sums,
        ticket_ptr=ticket,
        turns_ptr=turns,
        PTX=ptx,
        **arguments,
    )
    rounded(sums, dq, scale)
    return dq, dk, dv


def backward_in_order_while(dy, q, k, v, y, lse, scale):
    """As backward_in_order, and Triton waits."""
    return backward_in_order(
        dy, q, k, v, y, lse, scale, design="in-order-while", ptx=False
    )


check_design(backward_in_order, 1, 2, queries=70, keys=150, D=64)
check_design(backward_in_order_while, 1, 2, queries=70, keys=150, D=64)

# %%
# Do loads run ahead now? The compiled kernels for an H100 tell. With 128
# numbers in a head, the program where Triton waits has 98 KB of shared memory.
# Where PTX waits it has 164 KB, because the queries and ``dy`` of the next
# step arrive there while this one is computed.
#
# Write ds down
# -------------
#
# What if ``ds`` is kept, so that an owner can read it?
#
# The fifth design has two kernels again. The first has keys, and stores each
# tile of ``ds`` in 16 bits instead of multiplying it with ``k``. It has four
# products. The second one has queries, and multiplies tiles of ``ds`` with
# tiles of keys: one product, like any other of two matrices.
# Each sum has an owner, no product is computed twice, and the bits are the
# same each time. What we pay with is the matrix.


@triton.jit
def _attention_bwd_stored(
    q_desc,
    k_desc,
    v_desc,
    dy_desc,
    dk_desc,
    dv_desc,
    ds_desc,  # New: (batch, heads, keys, queries), by TILE_K and TILE_Q
    lse_ptr,
    delta_ptr,
    heads,
    queries,
    keys,
    scale,
    log2e,
    D: tl.constexpr,
    TILE_Q: tl.constexpr,
    TILE_K: tl.constexpr,
    WHOLE: tl.constexpr,
    DP_FIRST: tl.constexpr,
    STAGES: tl.constexpr,
):
    tiles = tl.cdiv(keys, TILE_K)
    first = tl.program_id(0) % tiles * TILE_K
    lead = tl.program_id(0) // tiles
    batch = lead // heads
    head = lead % heads
    row = lead.to(tl.int64) * queries
    k = k_desc.load([batch, head, first, 0]).reshape(TILE_K, D)
    v = v_desc.load([batch, head, first, 0]).reshape(TILE_K, D)
    dk = tl.zeros((TILE_K, D), tl.float32)
    dv = tl.zeros((TILE_K, D), tl.float32)

    for start in tl.range(0, queries, TILE_Q, num_stages=STAGES):
        ds, dk, dv = _step_of_keys(
            k=k,
            v=v,
            dk=dk,
            dv=dv,
            q_desc=q_desc,
            dy_desc=dy_desc,
            lse_ptr=lse_ptr + row,
            delta_ptr=delta_ptr + row,
            batch=batch,
            head=head,
            start=start,
            first=first,
            queries=queries,
            keys=keys,
            scale=scale,
            log2e=log2e,
            D=D,
            TILE_Q=TILE_Q,
            TILE_K=TILE_K,
            WHOLE=WHOLE,
            DP_FIRST=DP_FIRST,
        )
        # New: this tile of the matrix, as it lies, a row for each key.
        ds = ds.reshape(1, 1, TILE_K, TILE_Q)
        ds_desc.store([batch, head, first, start], ds)

    dk = (dk * scale).to(dk_desc.dtype).reshape(1, 1, TILE_K, D)
    dv = dv.to(dv_desc.dtype).reshape(1, 1, TILE_K, D)
    dk_desc.store([batch, head, first, 0], dk)
    dv_desc.store([batch, head, first, 0], dv)


@triton.jit
def _attention_bwd_product(
    ds_desc,  # (batch, heads, keys, queries), by TILE_K and TILE_Q
    k_desc,  # (batch, heads, keys, D), in tiles of TILE_K keys
    dq_desc,  # (batch, heads, queries, D), in tiles of TILE_Q queries
    heads,
    queries,
    keys,
    scale,  # c alone
    D: tl.constexpr,
    TILE_Q: tl.constexpr,  # queries of a program
    TILE_K: tl.constexpr,  # keys of a step
    STAGES: tl.constexpr,
):
    tiles = tl.cdiv(queries, TILE_Q)
    first = tl.program_id(0) % tiles * TILE_Q
    lead = tl.program_id(0) // tiles
    batch = lead // heads
    head = lead % heads
    dq = tl.zeros((TILE_Q, D), tl.float32)

    # Keys that do not exist come as zeros, in both tensors.
    for start in tl.range(0, keys, TILE_K, num_stages=STAGES):
        ds = ds_desc.load([batch, head, start, first]).reshape(TILE_K, TILE_Q)
        k = k_desc.load([batch, head, start, 0]).reshape(TILE_K, D)
        dq = tl.dot(ds.T, k, dq)

    dq = (dq * scale).to(dq_desc.dtype).reshape(1, 1, TILE_Q, D)
    dq_desc.store([batch, head, first, 0], dq)


# %%


def backward_over_ds(dy, q, k, v, y, lse, scale):
    """As backward_in_order, with a matrix in memory."""
    dq, dk, dv = gradients(q, k, v)
    batch, heads, queries, D = q.shape
    keys = k.shape[2]
    # A descriptor wants rows that begin at multiples of 16 bytes.
    ds = torch.empty(
        (batch, heads, keys, triton.cdiv(queries, 8) * 8),
        dtype=q.dtype,
        device=q.device,
    )[..., :queries]

    plan = plan_five_products("stored", D)
    arguments, programs = given_to_keys(
        dy, q, k, v, y, lse, scale, dk, dv, plan
    )
    shape = [1, 1, plan["TILE_K"], plan["TILE_Q"]]
    _attention_bwd_stored[programs](
        ds_desc=TensorDescriptor.from_tensor(ds, shape),
        **arguments,
    )

    tile_q = 128
    tile_k = 64
    _attention_bwd_product[(triton.cdiv(queries, tile_q) * batch * heads,)](
        ds_desc=TensorDescriptor.from_tensor(ds, [1, 1, tile_k, tile_q]),
        k_desc=tiles_of(k, tile_k),
        dq_desc=tiles_of(dq, tile_q),
        heads=heads,
        queries=queries,
        keys=keys,
        scale=scale,
        D=D,
        TILE_Q=tile_q,
        TILE_K=tile_k,
        STAGES=3,
        num_warps=warps_here(4),
    )
    return dq, dk, dv


check_design(backward_over_ds, 1, 2, queries=70, keys=150, D=64)

# %%
# A function to train with
# ------------------------
#
# How does a model choose? The function below is that of `Attention without its
# matrix <01-attention.html>`_, and takes one more argument, which says how to
# add up ``dq``.

# %%

# Scaffold: layouts, and which arguments are taken, from page 01.


def for_descriptors(t):
    """The tensor, or a copy of it in a layout that a descriptor takes."""
    aligned = t.data_ptr() % 16 == 0 and t.stride(-1) == 1
    for stride in t.stride()[:-1]:
        if stride <= 0 or stride * t.itemsize % 16:
            aligned = False
    if aligned:
        return t
    copy = torch.empty(t.shape, dtype=t.dtype, device=t.device)
    return copy.copy_(t)


def check_arguments(query, key, value, scale):
    named = {"query": query, "key": key, "value": value}
    for name, t in named.items():
        if t.dtype not in (torch.float16, torch.bfloat16):
            raise TypeError(
                f"{name} has {t.dtype}: float16 and bfloat16 are taken"
            )
        if t.dtype != query.dtype:
            raise TypeError(
                f"{name} has {t.dtype}, and query has {query.dtype}: they "
                "must be the same"
            )
        if t.device.type != DEVICE.type:
            raise ValueError(f"{name} is on {t.device}, not on {DEVICE}")
        if t.is_cuda and t.device.index != torch.cuda.current_device():
            raise ValueError(
                f"{name} is on {t.device}, which is not the current GPU"
            )
        if t.dim() != 4:
            raise ValueError(
                f"{name} has {t.dim()} dimensions, not 4: batch, heads, "
                "length, head dimension"
            )
    batch, heads, _, D = query.shape
    if D not in PLANS:
        raise ValueError(
            f"the head dimension is {D}: {', '.join(map(str, PLANS))} are "
            "taken"
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
        if t.shape[1] != heads:
            raise ValueError(
                f"{name} has {t.shape[1]} heads, and query has {heads}"
            )
    if value.shape[2] != key.shape[2]:
        raise ValueError(
            f"value has {value.shape[2]} rows, and key has {key.shape[2]}"
        )
    if key.shape[2] == 0:
        raise ValueError("there is no key: softmax needs one at least")
    if not 0 < scale < float("inf"):
        raise ValueError(f"scale is {scale}: a finite number above 0 is taken")


# %%

DESIGNS = {
    "triton": backward,
    "atomics": backward_by_atomics,
    "reductions": backward_by_reductions,
    "in-order": backward_in_order,
    "in-order-while": backward_in_order_while,
    "stored": backward_over_ds,
}


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, scale, design):
        q = for_descriptors(query)
        k = for_descriptors(key)
        v = for_descriptors(value)
        y, lse = forward(q, k, v, scale, plan_forward(q.shape[-1]))
        ctx.save_for_backward(q, k, v, y, lse)
        ctx.scale = scale
        ctx.design = design
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        q, k, v, y, lse = ctx.saved_tensors
        if y.numel() == 0:
            grads = torch.empty_like(q), torch.zeros_like(k)
            return *grads, torch.zeros_like(v), None, None
        dy = for_descriptors(dy.contiguous())
        grads = DESIGNS[ctx.design](dy, q, k, v, y, lse, ctx.scale)
        return *grads, None, None


def attention(query, key, value, scale=None, design="triton"):
    """What F.scaled_dot_product_attention gives without a mask.

    query is (batch, heads, queries, D), key and value are (batch, heads,
    keys, D), all in float16 or all in bfloat16. Without a scale it is one over
    the root of D. The design says how dq is added up: "triton" has seven
    products, and NAMES has the others.
    """
    if scale is None:
        scale = query.shape[-1] ** -0.5
    check_arguments(query, key, value, scale)
    if design not in DESIGNS:
        raise ValueError(
            f"design is {design!r}: {', '.join(DESIGNS)} are taken"
        )
    if not ON_GPU and query.dtype == torch.bfloat16:
        # The interpreter multiplies the bits of bfloat16 as whole numbers.
        given = (t.float() for t in (query, key, value))
        return _Attention.apply(*given, scale, design).to(query.dtype)
    return _Attention.apply(query, key, value, scale, design)


t = [
    torch.randn(1, 2, 40, 32, device=DEVICE, dtype=torch.float16)
    for _ in range(3)
]
t = [each.requires_grad_() for each in t]
for design in DESIGNS:
    attention(*t, design=design).sum().backward()
    print(f"{design:14} dq adds up to {t[0].grad.float().abs().sum():.3f}")
    t[0].grad = None

# %%
# How fast are the five?
# ----------------------
#
# And how fast are the libraries? We ask PyTorch for cuDNN, and for
# FlashAttention-2, beside our five designs. The one in order is there twice.

# %%

# Scaffold: all designs and two libraries, two benchmarks.

LINES = list(NAMES)


def of_all_designs(plot_name, D):
    return triton.testing.Benchmark(
        x_names=["N"],
        x_vals=[1024, 2048, 4096, 8192, 16384],
        x_log=True,
        xlabel="N (queries, and keys)",
        line_arg="provider",
        line_vals=LINES,
        line_names=list(NAMES.values()),
        ylabel="TFLOP/s",
        plot_name=plot_name,
        args={"D": D, "dtype": torch.float16, "mode": "backward"},
    )


@triton.testing.perf_report(of_all_designs("attention-backward-designs", 128))
def bench_designs(N, D, dtype, mode, provider):
    """All lines in turns, 15 times, each a CUDA graph that overwrites L2
    first; the time of a graph that only overwrites L2 is subtracted."""
    if not ON_GPU:
        return 3 * [float("nan")]  # the interpreter cannot be timed
    return backward_speeds(N, D, dtype, tuple(LINES))[provider]


@triton.testing.perf_report(
    of_all_designs("attention-backward-designs-64", 64)
)
def bench_designs_64(N, D, dtype, mode, provider):
    """All lines in turns, 15 times, each a CUDA graph that overwrites L2
    first; the time of a graph that only overwrites L2 is subtracted."""
    if not ON_GPU:
        return 3 * [float("nan")]  # the interpreter cannot be timed
    return backward_speeds(N, D, dtype, tuple(LINES))[provider]


# %%

in_percent(bench_designs)

# %%

in_percent(bench_designs_64)

# %%
# **What both figures show.**
# On the H100, with 128 numbers in a head and 4096 keys, seven products reach
# NN TFLOP/s, atomic additions NN, reductions NN, the design in order NN where
# PTX waits and NN where Triton waits, and the one with ``ds`` in memory NN. At
# 16384 keys it is NN, NN, NN, NN, NN and NN. At every length seven products
# are the fastest of ours.
#
# With 64 numbers in a head it is not so. At 4096 keys we measure NN, NN, NN,
# NN, NN and NN TFLOP/s in the same order, and at 16384 keys NN, NN, NN, NN, NN
# and NN. There reductions are NN times as fast as seven products.
#
# **Why does it depend on the head?**
# We know two causes. The first one is registers, of which an SM has 65536.
# With 64 numbers in a head, a program of reductions has 128 threads with 190
# registers each, so two programs share an SM. While one of them computes
# powers, the other one can multiply. With 128 numbers it has 256 threads with
# 255 registers each, and no second program fits beside it. Of seven products,
# two programs share an SM for either head.
#
# The second one is what else is computed twice: the weights. For a query and a
# key, Tensor Cores need 1/16 of a cycle of an SM for a product with 128
# numbers, and a power takes as long. So five products and a power take 6/16 of
# a cycle, and seven products and two powers 9/16, which is 1.5 times as much.
# With 64 numbers a product takes half as long and a power does not, so it is
# 3.5/16 and 5.5/16, which is 1.57 times as much.
# We have not measured what each of the two brings.
#
# **Why is order so slow?**
# Where Triton waits, no load runs ahead. Where PTX waits they do, and with 128
# numbers and 4096 keys that makes it NN times as fast. But it is still behind
# atomic additions, whose kernel is the same but for the order. There an
# addition is only sent, and nobody waits for it. ``release`` has to wait until
# all additions of the program have reached L2, and it does so in each step.
#
# **Why is it not faster to read ds?**
# Four products and one are five, and every sum has an owner. But ``ds`` is
# written and read, and 16384 keys take 5.1 ms for it at 3.35 TB/s, when
# nothing else moves. Seven products take NN ms there in all. With 64 numbers
# there are 32 heads, and so it takes 10.3 ms.
#
# **What follows.**
# With 128 numbers in a head, compute two products again. It needs neither
# memory nor an order, and it is faster than all ways of handing ``ds`` over.
# With 64 numbers and long sequences, reductions are faster, and they have
# another price, which we look at now. It is worth measuring for your heads and
# lengths.
#
# Does it repeat?
# ---------------
#
# Which designs repeat their results? We run each one, and then a hundred times
# more on the same input. We count the runs in which any bit of ``dq`` differs
# from the first run. Here ``dq`` has 16 bits, so most differences of its
# float32 sums are rounded away.

# %%

# Scaffold: runs that differ, counted.


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=["1024", "4096"],
        line_arg="provider",
        line_vals=LINES[:-1],
        line_names=list(NAMES.values())[:-1],
        ylabel="different results of 100",
        plot_name="attention-backward-bits",
        args={"D": 128, "dtype": torch.float16, "mode": "backward"},
    )
)
def different_bits(N, D, dtype, mode, provider):
    """Runs of 100 whose dq differs in any bit from that of the first."""
    if not ON_GPU:
        return 3 * [float("nan")]
    call = calls_of(int(N), D, dtype, (provider,))[provider]
    first, *_ = call()
    different = 0
    for _ in range(100):
        dq, *_ = call()
        if not torch.equal(dq, first):
            different += 1
    return 3 * [different]


# %%

different_bits.run(show_plots=ON_GPU)

# %%
# **What the figure shows.**
# On the H100, NN of 100 runs with atomic additions differ from the first one
# at 1024 keys, and NN at 4096 keys. With reductions it is NN and NN. Seven
# products, the design in order in both forms, and the one with ``ds`` in
# memory repeat every run. Of cuDNN NN and NN runs differ, and of
# FlashAttention-2 NN and NN.
#
# **What follows.**
# If you have to repeat a result, to find an error for instance, the design
# must fix the order of each sum. Three of our five do. With 128 numbers in a
# head the fastest of all is one of them, so it costs nothing. With 64 numbers
# and 16384 keys it costs some speed: seven products reach NN% of that of
# reductions.
#
# Why not more keys?
# ------------------
#
# Seven or five, a program with more keys reads the queries less often. So why
# don't we give it 128 keys, or 256?
#
# Its sums are the reason. ``dk`` and ``dv`` of 128 keys with 128 numbers are
# 2 · 128 · 128 float32 numbers. Four warps have 128 threads, so that is 256
# for each, and a thread has at most 255 registers. The compiler has to
# *spill*: it keeps some of the sums in *local memory*, which belongs to a
# thread and lies where all memory lies. Each step then loads them, adds, and
# stores them.
# With 64 numbers in a head the same sums take half as many registers.
#
# Scores and ``dp`` are in registers, too: two numbers for each pair of a query
# and a key in the tile. Let's count both for some tiles.

# %%

# Drawing: numbers that a thread must hold, for some tiles

plt.figure(
    "Numbers of a thread for three tiles, with 64 and with 128 numbers in a "
    "head. A thread has 255 registers. With 32 queries, 128 keys and 4 warps "
    "the sums dk and dv, the scores and dp are 192 and 320 numbers. In all "
    "other tiles they are 192 or fewer.",
    figsize=(7.5, 2.9),
)
labels = []
for place, (D, queries, keys, warps) in enumerate(
    [
        (128, 32, 128, 8),
        (128, 32, 128, 4),
        (128, 64, 64, 4),
        (64, 32, 128, 8),
        (64, 32, 128, 4),
        (64, 64, 64, 4),
    ]
):
    threads = 32 * warps
    of_sums = 2 * keys * D // threads
    of_scores = 2 * queries * keys // threads
    plt.barh(place, of_sums, color="C0", label="dk and dv")
    plt.barh(place, of_scores, left=of_sums, color="C1", label="scores, dp")
    plt.text(of_sums + of_scores + 4, place, of_sums + of_scores, va="center")
    labels.append(f"D = {D}: {queries} × {keys}, {warps} warps")
plt.yticks(range(6), labels)
plt.axvline(255, color="gray", linestyle=":")
plt.text(260, 5, "255 registers", color="gray", va="center")
plt.xlabel("numbers of a thread")
plt.xlim(0, 360)
handles, names = plt.gca().get_legend_handles_labels()
plt.legend(handles[:2], names[:2], loc="center right")
plt.show()

# %%
# A tile of 32 queries and 128 keys with 4 warps fits for 64 numbers in a head.
# For 128 numbers it doesn't, even before a single address is computed.
#
# How do we see that before we measure? A compiled kernel knows it. A launch in
# Triton returns the kernel, and its ``n_regs`` are the registers of a thread.
# Its ``n_spills`` are how many registers of 4 bytes are spilled.
# We ask the kernel with keys of the seven products, which has only ``dk`` and
# ``dv`` to add up, and measure it alone.

TILES = {
    # queries, keys, warps, stages
    "32 × 64, 4 warps": (32, 64, 4, 2),
    "64 × 64, 4 warps": (64, 64, 4, 2),
    "32 × 128, 4 warps": (32, 128, 4, 2),
    "32 × 128, 8 warps": (32, 128, 8, 2),
    "64 × 128, 8 warps": (64, 128, 8, 2),
}


def keys_alone(N, D, tile):
    """A call of the kernel with keys, with a tile of ours."""
    tile_q, tile_k, warps, stages = tile
    q, k, v, dy = (t.detach() for t in inputs(N, D, torch.float16))
    _, dk, dv = gradients(q, k, v)
    y, lse = forward(q, k, v, D**-0.5, plan_forward(D))
    plan = {
        "TILE_Q": tile_q,
        "TILE_K": tile_k,
        "STAGES": stages,
        "num_warps": warps,
    }
    arguments, programs = given_to_keys(
        dy, q, k, v, y, lse, D**-0.5, dk, dv, plan
    )
    del arguments["WHOLE"]
    return functools.partial(_attention_bwd_keys[programs], **arguments)


def registers(D):
    """Print what a thread of each tile has."""
    for name, tile in TILES.items():
        kernel = keys_alone(1024, D, tile)()
        print(
            f"{D:3} numbers, {name}: {kernel.n_regs} registers, "
            f"{4 * kernel.n_spills} bytes spilled"
        )


if ON_GPU:
    registers(64)
    registers(128)
else:
    print("Registers are those of a GPU: the interpreter has none.")

# %%

# Scaffold: tiles of keys, a benchmark.


@functools.cache
def tile_speeds(D):
    calls = {name: keys_alone(4096, D, tile) for name, tile in TILES.items()}
    return speeds(4, calls, 4096)


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["D"],
        x_vals=["64", "128"],
        xlabel="D (numbers in a head)",
        line_arg="provider",
        line_vals=list(TILES),
        line_names=list(TILES),
        ylabel="TFLOP/s",
        plot_name="attention-backward-tiles",
        args={"N": 4096, "dtype": torch.float16, "mode": "backward"},
    )
)
def bench_tiles(D, N, dtype, mode, provider):
    """All lines in turns, 15 times, each a CUDA graph that overwrites L2
    first; the time of a graph that only overwrites L2 is subtracted."""
    if not ON_GPU:
        return 3 * [float("nan")]  # the interpreter cannot be timed
    return tile_speeds(int(D))[provider]


# %%

bench_tiles.run(show_plots=ON_GPU)

# %%
# **What the compiler says.**
# With 64 numbers in a head, the tile of 32 × 128 with 4 warps takes about 240
# registers of a thread, and nothing is spilled. With 128 numbers a thread has
# all 255, and it spills more than 600 bytes. With 8 warps each thread has
# half of the sums: it takes about 200 registers, and nothing is spilled.
#
# **What the figure shows.**
# On the H100, with 64 numbers in a head, this tile with 4 warps reaches NN
# TFLOP/s, and the one that we took for seven products, 64 × 64, reaches NN.
# With 128 numbers it reaches NN TFLOP/s, and 64 × 64 reaches NN. With 8 warps
# it is NN TFLOP/s.
#
# **Who takes it?**
# `Triton's tutorial on attention
# <https://triton-lang.org/main/getting-started/tutorials/06-fused-attention.html>`_
# does. Its kernel computes ``dk`` and ``dv`` in tiles of 32 queries and 128
# keys with 4 warps, whatever the head dimension. It tries several tiles in its
# forward pass, but not in the backward pass. As we have just seen, that is a
# tile that fits for heads of 64 numbers. The tutorial teaches an idea and not
# tables of tiles.
# If you start from it and have heads of 128 numbers, take half the keys or
# twice the warps.
#
# **What follows.**
# Count the registers of all sums before you choose a tile, for each head
# dimension: the keys, times the head dimension, times two, divided by the
# threads. All other tiles of this page have 128 or fewer, and so about half of
# the 255 are left for scores, ``dp`` and addresses.
# A few spilled registers need not hurt. With 128 numbers in a head, the kernel
# of atomic additions spills up to 64 bytes of a thread, and when we tried
# tiles that spill nothing, none was faster.
#
# Where PyTorch is better
# -----------------------
#
# On the H100 cuDNN reaches NN TFLOP/s with 128 numbers in a head and 4096
# keys, and seven products reach NN% of that. With 64 numbers it is NN%, and
# NN% at 16384 keys, where reductions reach NN%.
# FlashAttention-2 has five products and atomic additions, and reaches NN
# TFLOP/s at 128 numbers.
# It was written for the A100, so this does not say that its design is the
# worse one on an H100.
# `FlashAttention-3 <https://arxiv.org/abs/2407.08608>`_ was written for the
# H100. It has five products, and adds up ``dq`` in float32 with the same unit
# as our reductions, while other warps go on multiplying. A kernel in Triton
# can't give its warps such different work by hand.
# So our conclusion holds for kernels that one writes in this way. Whoever can
# hide the additions behind products may well be faster with five, as our own
# reductions are with 64 numbers.
#
# Exercise
# --------
#
# **Exercise 1: nobody writes zeros.**
# The design in order begins with a tensor of zeros, which another kernel
# writes. But in order there is a first program for each tile of queries.
# Change ``_attention_bwd_in_order`` so that ``sums`` may hold anything at
# first.
#
# **Hint 1.** What is in ``sums`` when it is the turn of program 0? What must
# this program do instead of adding?
#
# **Hint 2.** A program knows ``tile``, the same number for all its threads. So
# an ``if`` with it is allowed in a kernel.
#
# **Hint 3.** Does it still need the barrier and ``release``? The next program
# must see what was stored.


def exercise_1(kernel):
    """Whether a kernel in order is right when sums begin with NaN."""
    q, k, v, dy = (
        torch.randn(1, 2, 100, 32, device=DEVICE, dtype=torch.float16)
        for _ in range(4)
    )
    scale = 32**-0.5
    y, lse = forward(q, k, v, scale, plan_forward(32))
    _, dk, dv = gradients(q, k, v)
    plan = {
        "TILE_Q": 16,
        "TILE_K": 32,
        "DP_FIRST": False,
        "STAGES": 1,
        "num_warps": 4,
    }
    arguments, programs = given_to_keys(
        dy, q, k, v, y, lse, scale, dk, dv, plan
    )
    sums = torch.full(q.shape, float("nan"), device=DEVICE)
    kernel[programs](
        sums_ptr=sums,
        ticket_ptr=torch.zeros(1, dtype=torch.int32, device=DEVICE),
        turns_ptr=torch.zeros(2 * 7, dtype=torch.int32, device=DEVICE),
        PTX=HAS_PTX,
        **arguments,
    )
    exact = q.double().requires_grad_()
    expected = F.scaled_dot_product_attention(exact, k.double(), v.double())
    (dq,) = torch.autograd.grad(expected, exact, dy.double())
    error = (sums * scale - dq).abs().max().item()
    print(f"exercise 1: largest error {error:.1e}")
    return error < 1e-2


exercise_1(_attention_bwd_in_order)  # adds to what is not a number

# %%

# Solution 1


@triton.jit
def _attention_bwd_first_stores(
    q_desc,
    k_desc,
    v_desc,
    dy_desc,
    dk_desc,
    dv_desc,
    sums_ptr,
    lse_ptr,
    delta_ptr,
    ticket_ptr,
    turns_ptr,
    heads,
    queries,
    keys,
    scale,
    log2e,
    D: tl.constexpr,
    TILE_Q: tl.constexpr,
    TILE_K: tl.constexpr,
    WHOLE: tl.constexpr,
    DP_FIRST: tl.constexpr,
    STAGES: tl.constexpr,
    PTX: tl.constexpr,
):
    ticket = tl.atomic_add(ticket_ptr, 1, sem="relaxed")
    tiles = tl.cdiv(keys, TILE_K)
    tile = ticket % tiles
    first = tile * TILE_K
    lead = ticket // tiles
    batch = lead // heads
    head = lead % heads
    row = lead.to(tl.int64) * queries
    turns_ptr += lead * tl.cdiv(queries, TILE_Q)
    k = k_desc.load([batch, head, first, 0]).reshape(TILE_K, D)
    v = v_desc.load([batch, head, first, 0]).reshape(TILE_K, D)
    dk = tl.zeros((TILE_K, D), tl.float32)
    dv = tl.zeros((TILE_K, D), tl.float32)

    for start in tl.range(0, queries, TILE_Q, num_stages=STAGES):
        ds, dk, dv = _step_of_keys(
            k=k,
            v=v,
            dk=dk,
            dv=dv,
            q_desc=q_desc,
            dy_desc=dy_desc,
            lse_ptr=lse_ptr + row,
            delta_ptr=delta_ptr + row,
            batch=batch,
            head=head,
            start=start,
            first=first,
            queries=queries,
            keys=keys,
            scale=scale,
            log2e=log2e,
            D=D,
            TILE_Q=TILE_Q,
            TILE_K=TILE_K,
            WHOLE=WHOLE,
            DP_FIRST=DP_FIRST,
        )
        part = tl.dot(ds.T, k)
        query = start + tl.arange(0, TILE_Q)
        at = (row + query)[:, None] * D + tl.arange(0, D)[None, :]
        mask = query[:, None] < queries
        turn_ptr = turns_ptr + start // TILE_Q
        if tile == 0:
            # New: nobody comes before us, so there is nothing to add to.
            tl.store(sums_ptr + at, part, mask=mask)
        else:
            _wait_for_turn(turn_ptr, tile, PTX)
            tl.atomic_add(sums_ptr + at, part, mask=mask, sem="relaxed")
        _pass_turn_on(turn_ptr, tile + 1, PTX)

    dk = (dk * scale).to(dk_desc.dtype).reshape(1, 1, TILE_K, D)
    dv = dv.to(dv_desc.dtype).reshape(1, 1, TILE_K, D)
    dk_desc.store([batch, head, first, 0], dk)
    dv_desc.store([batch, head, first, 0], dv)


assert exercise_1(_attention_bwd_first_stores)

# %%
# What we learned
# ---------------
#
# These are the ways to add up ``dq`` on this page. Each has two speeds on the
# H100: with 128 numbers in a head and 4096 keys, and with 64 numbers and 16384
# keys.
#
# - **Atomic additions** need five products and a sum in float32. Other runs
#   give other bits. NN and NN TFLOP/s.
# - **Reductions by the TMA** are the same, without addresses: one instruction
#   adds a tile. NN and NN TFLOP/s.
# - **In order** gives the same bits each time. Programs wait for each other.
#   NN and NN TFLOP/s where PTX waits, and NN and NN where Triton waits.
# - **ds in memory** gives the same bits each time, with five products and a
#   matrix: 8.6 GB for 16 heads of 16384 tokens. NN and NN TFLOP/s.
# - **Seven products** give the same bits each time, and need nothing else. NN
#   and NN TFLOP/s.
# - **cuDNN** reaches NN and NN TFLOP/s, and **FlashAttention-2** NN and NN.
#
# And for kernels in general:
#
# - A sum needs an owner, or an order, or it changes from run to run.
# - Count what a sum moves as well as what a product computes.
# - To compute something twice can be cheaper than to hand it over.
# - Programs that wait for each other take their numbers when they start.
# - Look at ``n_regs`` and ``n_spills`` before you look at a clock.
#
# **Next:** `What a second pass costs <../layer-norm/09-two-passes.html>`_ asks
# the same of layer norm, where memory is the limit and not arithmetic.
