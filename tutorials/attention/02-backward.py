r"""
Five products or seven
======================

Who adds up the gradient of the queries when each program has only a part?
There are five ways, and here we build them all and measure their price: two
more products, atomic additions one by one or a tile at a time, a queue, or a
matrix in memory.

.. math:: dq_i = c \sum_j ds_{ij} \, k_j, \qquad
   ds_{ij} = p_{ij} (dp_{ij} - \delta_i)

The backward pass of attention has five products of matrices. On
`Attention without its matrix <01-attention.html>`_ we computed seven, because
a program that adds up ``dk`` and ``dv`` has only a part of each ``dq``. A
second kernel computed two of the products again, so that its programs could
add up ``dq``.
On this page a single kernel computes everything once, and we ask what it takes
to bring the parts of ``dq`` together. In the end we stay with seven products,
and know why.

**What you will learn**

- How to tell from the size of a tile whether its sums fit into registers, and
  what it costs if they don't.
- What atomic additions cost, one by one and a tile at a time.
- How programs take turns, so that a sum has the same bits each time, and what
  a compiler may do to such a queue.
- What it costs to write a matrix to memory after all, and why the fastest of
  our designs computes two products again.

**What you need:** `Attention without its matrix <01-attention.html>`_ for both
passes, and `A lock, and its race <../layer-norm/03-lock.html>`_ for acquire,
release and the barrier. You don't need a GPU.
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
# Who has which part?
# -------------------
#
# Let's take two queries and four keys, and tiles of two keys. So there are two
# programs. Program 0 has keys 0 and 1, and program 1 has keys 2 and 3.
# Both have gone through all queries, and know ``ds`` for their own keys: a
# column of ``ds`` for each key. With a head dimension of 1, a key is a single
# number.

ds = torch.tensor([[0.5, -0.5, 0.25, -0.25], [1.0, 0.0, -2.0, 1.0]])
k = torch.tensor([[2.0], [4.0], [8.0], [16.0]])
for program in range(2):
    mine = slice(2 * program, 2 * program + 2)
    part = ds[:, mine] @ k[mine]
    print(f"program {program} has these parts of dq:", part.flatten().tolist())
print("dq of both queries:", (ds @ k).flatten().tolist())

# %%
# Each program has a part of *every* ``dq``: -1 and 2 in program 0, -2 and 0 in
# program 1. Somebody must add -1 and -2 for the first query, and 2 and 0 for
# the second one.
# With ``dk`` and ``dv`` it is different. They are sums over queries, and a
# program goes through all queries, so it adds them up by itself.

# %%

# Drawing: three programs with keys, and who adds up their parts of dq.

plt.figure(
    "The matrix of scores in tiles. Each of three programs has a column of "
    "tiles and adds up dk and dv by itself. From each tile a part goes to the "
    "right, to the dq of its queries, where three programs add",
    figsize=(7, 3.3),
)
for row in range(3):
    for column in range(3):
        plt.gca().add_patch(
            plt.Rectangle(
                (2 * column, -1.2 * row),
                1.9,
                1.1,
                facecolor=f"C{column}",
                edgecolor="gray",
                alpha=0.45,
            )
        )
        plt.text(
            2 * column + 0.95,
            -1.2 * row + 0.55,
            f"part {column}",
            ha="center",
            va="center",
        )
    plt.annotate(
        "",
        xy=(6.9, -1.2 * row + 0.55),
        xytext=(6.05, -1.2 * row + 0.55),
        arrowprops={"arrowstyle": "->"},
    )
    plt.text(
        7,
        -1.2 * row + 0.55,
        "part 0 + part 1 + part 2 = dq",
        ha="left",
        va="center",
    )
for column in range(3):
    plt.text(
        2 * column + 0.95, 1.25, f"program {column}", ha="center", va="bottom"
    )
    plt.annotate(
        "",
        xy=(2 * column + 0.95, -3.1),
        xytext=(2 * column + 0.95, -2.45),
        arrowprops={"arrowstyle": "->"},
    )
    plt.text(2 * column + 0.95, -3.2, "dk, dv", ha="center", va="top")
plt.text(-0.2, -0.65, "queries", ha="right", va="center", rotation=90)
plt.axis((-0.6, 11, -3.8, 1.8))
plt.axis("off")
plt.show()

# %%
# The order of the additions matters, too. Every addition rounds, so a sum of
# three parts can have other bits in another order.

parts = torch.tensor([1.0, 3e-8, 3e-8])
forward_order = (parts[0] + parts[1]) + parts[2]
other_order = parts[0] + (parts[1] + parts[2])
print(f"1 + 3e-8 + 3e-8: {forward_order:.9f} or {other_order:.9f}")

# %%
# So there are two questions. Who adds, and in which order?
# If programs add whenever they happen to be ready, the results of two runs
# can differ in their last bits.
#
# What may an addition cost?
# --------------------------
#
# The additions may take as long as two more products would. If they take
# longer, we had better compute those two products again.
#
# Let's count for the 16384 tokens of `Attention without its matrix
# <01-attention.html>`_: four sequences of 4096, with 16 heads of 128 numbers.

N, D, HEADS = 4096, 128, 64  # 4 sequences of 16 heads
product = 2 * N**2 * D * HEADS  # operations of a product
RATE = 609e12  # operations a second, of the two kernels of page 01
print(f"a product: {1000 * product / RATE:.2f} ms")
print(f"seven products: {1000 * 7 * product / RATE:.2f} ms")
print(f"five products: {1000 * 5 * product / RATE:.2f} ms")
for tile_k in (64, 128):
    added = HEADS * (N // tile_k) * N * D * 4  # float32
    print(f"parts of dq, tiles of {tile_k} keys: {added / 1e9:.1f} GB to add")
stored = HEADS * N**2 * 2
print(f"the matrix ds: {stored / 1e9:.1f} GB to write, as much to read")

# %%
# On the H200 the two kernels of `Attention without its matrix
# <01-attention.html>`_ do 609 TFLOP/s at 16384 keys when we count all seven
# products. At this rate the two additional products take 0.90 ms. So that is
# our budget: whoever brings the parts of ``dq`` together in less than 0.90 ms
# wins, and whoever takes longer should have computed two products again.
#
# Every program has parts for all queries, in float32. With tiles of 64 keys
# they make 8.6 GB, and with tiles of 128 keys half of that.
# The matrix ``ds`` has 2.1 GB in 16 bits. An H200 moves 4.8 TB in a second, so
# to write it and to read it once takes 0.9 ms. That is about the whole budget,
# but memory and Tensor Cores can work at the same time. An H100 has the same
# Tensor Cores and moves 3.35 TB in a second. There it takes 1.3 ms.
#
# Parts that are added go to L2. To add those of tiles of 128 keys within the
# budget, L2 would have to take about as many bytes in a second as an H200
# moves to and from its memory. We know of no data sheet that says whether it
# can, so we have to measure.
#
# In each head both the operations and the bytes grow with the square of the
# number of keys, so the comparison is the same for sequences of any length.
#
# Sums that fit, and sums that don't
# ----------------------------------
#
# Before we let anybody add, the starting point has to be as good as we can
# make it. These are the kernels of `Attention without its matrix
# <01-attention.html>`_. A program of the first one stays with its keys and
# computes four products, and a program of the second one stays with its
# queries and computes three.

# %%

# Scaffold: the forward pass and seven products, from page 01.

LOG2E = 1.4426950408889634  # the logarithm of e, to the base 2
PLANS = {
    # D: queries, keys, warps, stages
    16: (128, 64, 4, 3),
    32: (128, 64, 4, 3),
    64: (64, 128, 4, 2),
    128: (128, 64, 4, 2),
}


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


def plan_backward(D):
    """Tiles, warps and stages of both backward kernels."""
    return {
        "TILE_Q": 64,
        "TILE_K": 64,
        "STAGES": 2 if D > 64 else 3,
        "num_warps": warps_here(4),
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

# Scaffold: inputs, and who attends, from page 01.

TOKENS = 16384
NAMES = {
    "triton": "Seven products",
    "stored": "Stored ds",
    "turns": "In turns",
    "bulk": "Bulk additions",
    "atomics": "Atomic additions",
    "sdpa-cudnn": "cuDNN, by PyTorch",
    "torch": "FlashAttention-2, by PyTorch",
    "cublas": "A product of matrices",
}


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
# A thread can have 255 registers of 32 bits. Which tiles fit?
#
# The kernel with keys keeps two sums, ``dk`` and ``dv``, from the first step
# to the last. Each of them has a row of ``D`` numbers for each of its own
# keys. In a step there are two more tiles, the scores and ``dp``. All of them
# are float32, and the threads of a program share them.
# The kernel with queries has one sum.
#
# Here is what that makes for a few tiles: "128 × 32, 4" stands for 128 rows of
# its own, 32 rows in a step, and 4 warps. The last line is what `Triton's
# tutorial on attention
# <https://triton-lang.org/main/getting-started/tutorials/06-fused-attention.html>`_
# has in its backward pass, for every head dimension.

TILINGS = {
    # own rows, rows of a step, warps, stages
    "64 × 64, 4": (64, 64, 4, 2),
    "128 × 64, 8": (128, 64, 8, 2),
    "128 × 128, 8": (128, 128, 8, 2),
    "128 × 64, 4": (128, 64, 4, 2),
    "128 × 32, 4": (128, 32, 4, 5),
}


def registers(tiling, sums, D):
    """Registers of a thread: for the sums, and for two tiles of a step."""
    own, other, warps, _ = TILINGS[tiling]
    threads = 32 * warps
    return sums * own * D // threads, 2 * own * other // threads


for tiling in TILINGS:
    for_sums, for_tiles = registers(tiling, sums=2, D=128)
    of_64, _ = registers(tiling, sums=2, D=64)
    print(
        f"{tiling:13} dk and dv {for_sums:3}, two tiles {for_tiles:3}: "
        f"{for_sums + for_tiles:3}; with D = 64: {of_64 + for_tiles:3}"
    )

# %%

# Drawing: the registers of a thread in the kernel with keys.

plt.figure(
    "Registers of a thread for the sums dk and dv and for two tiles of a "
    "step, in the kernel with keys at a head dimension of 128. A line at 255 "
    "shows what a thread can have: 64 × 64 with 4 warps and 128 × 64 with 8 "
    "warps stay below, the other three are above",
    figsize=(7, 2.8),
)
for place, (own, other, warps, _) in enumerate(reversed(TILINGS.values())):
    sums = 2 * own * 128 // (32 * warps)
    tiles = 2 * own * other // (32 * warps)
    plt.barh(place, sums, color="C0")
    plt.barh(place, tiles, left=sums, color="C1")
    if place == 4:
        for left, text in ((0, "dk and dv"), (sums, "two tiles")):
            plt.text(left + 4, place, text, color="white", va="center")
plt.axvline(255, color="k", linestyle="--")
plt.text(258, 4, "255", va="center")
plt.yticks(range(5), reversed(TILINGS))
plt.xlabel("registers of a thread, D = 128")
plt.show()

# %%
# Two of the five stay below 255. What happens to the others? The compiler
# *spills*: it puts some of the numbers into memory, and in each step it
# fetches them and puts them back. These bytes belong to each thread, so they
# are called *local memory*, but they go through L1 and L2 like all others.
#
# We let Triton compile both kernels for each of the tiles, and ask how many
# bytes a thread spills. A compiler needs some more registers than we have
# counted, for addresses, for instance. The two sums alone take 256 registers
# in the last two lines, which is one more than a thread can have.

# %%

# Scaffold: spilled bytes, and the speed of both kernels, two benchmarks.


def tiled(kernel, tiling, tensors, lse, delta):
    """Launch a kernel of the backward pass with these tiles."""
    own, other, warps, stages = TILINGS[tiling]
    q, k, v, dy, dq, dk, dv = tensors
    batch, heads, N, D = q.shape
    shared = {
        "lse_ptr": lse,
        "delta_ptr": delta,
        "heads": heads,
        "queries": N,
        "keys": N,
        "scale": D**-0.5,
        "log2e": LOG2E,
        "D": D,
        "STAGES": stages,
        "num_warps": warps,
    }
    grid = (triton.cdiv(N, own) * batch * heads,)
    if kernel == "keys":
        return _attention_bwd_keys[grid](
            q_desc=tiles_of(q, other),
            k_desc=tiles_of(k, own),
            v_desc=tiles_of(v, own),
            dy_desc=tiles_of(dy, other),
            dk_desc=tiles_of(dk, own),
            dv_desc=tiles_of(dv, own),
            TILE_Q=other,
            TILE_K=own,
            **shared,
        )
    return _attention_bwd_queries[grid](
        q_desc=tiles_of(q, own),
        k_desc=tiles_of(k, other),
        v_desc=tiles_of(v, other),
        dy_desc=tiles_of(dy, own),
        dq_desc=tiles_of(dq, own),
        TILE_Q=own,
        TILE_K=other,
        WHOLE=N % other == 0,
        **shared,
    )


def tensors_of(batch, N, D, dtype):
    """q, k, v, dy, dq, dk and dv; and lse and delta."""
    shape = batch, 2048 // D, N, D
    tensors = [
        torch.randn(shape, device=DEVICE, dtype=dtype) for _ in range(7)
    ]
    numbers = [torch.zeros(shape[:3], device=DEVICE) for _ in range(2)]
    return tensors, *numbers


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["tiles"],
        x_vals=list(TILINGS),
        xlabel="own rows × rows of a step, warps",
        line_arg="provider",
        line_vals=["keys 128", "queries 128", "keys 64", "queries 64"],
        line_names=[
            "dk and dv, D = 128",
            "dq, D = 128",
            "dk and dv, D = 64",
            "dq, D = 64",
        ],
        ylabel="bytes spilled per thread",
        plot_name="attention-tiles-spills",
        args={"dtype": torch.float16, "mode": "backward"},
    )
)
def spills(tiles, dtype, mode, provider):
    """Bytes of local memory of a thread, as the driver says of the compiled
    kernel."""
    if not ON_GPU:
        return 3 * [float("nan")]
    kernel, D = provider.split()
    compiled = tiled(kernel, tiles, *tensors_of(1, 256, int(D), dtype))
    return 3 * [4 * compiled.n_spills]  # it counts words of 4 bytes


@functools.cache  # all lines in turns; then each is asked for its own
def tile_speeds(N, D, dtype, kernel):
    tensors = tensors_of(TOKENS // N, N, D, dtype)
    calls = {
        tiling: functools.partial(tiled, kernel, tiling, *tensors)
        for tiling in TILINGS
    }
    return speeds({"keys": 4, "queries": 3}[kernel], calls, N)


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["tiles"],
        x_vals=list(TILINGS),
        xlabel="own rows × rows of a step, warps",
        line_arg="provider",
        line_vals=["keys", "queries", "cublas"],
        line_names=[
            "dk and dv: four products",
            "dq: three products",
            "A product of matrices",
        ],
        ylabel="TFLOP/s",
        plot_name="attention-tiles",
        args={
            "N": 4096, "D": 128, "dtype": torch.float16, "mode": "backward"
        },
    )
)  # fmt: skip
def bench_tiles(tiles, N, D, dtype, mode, provider):
    """Both kernels alone, with all products that they compute. All tiles in
    turns, 15 times, each a CUDA graph that overwrites L2 first; the time of a
    graph that only overwrites L2 is subtracted."""
    if not ON_GPU:
        return 3 * [float("nan")]  # the interpreter cannot be timed
    if provider == "cublas":
        return tile_speeds(N, D, dtype, "keys")["cublas"]
    return tile_speeds(N, D, dtype, provider)[tiles]


# %%

spills.run(show_plots=ON_GPU)

# %%

bench_tiles.run(show_plots=ON_GPU)

# %%
# **What the figures show.**
# On the H200, at a head dimension of 128, the kernel with keys spills nothing
# with tiles of 64 × 64 and 4 warps, and 656 bytes a thread with those of
# 128 × 32 and 4 warps. With 64 numbers in a head it spills nothing with either
# of them. The kernel with queries has one sum, and spills 144 bytes at most.
# With 64 × 64 the kernel with keys does 632 TFLOP/s, and with 128 × 32 it does
# 123. The kernel with queries does 605 and 407.
#
# **Why.**
# With 128 keys and 4 warps the sums do not fit, so each of 128 threads fetches
# and stores hundreds of bytes in each step. Tensor Cores wait for that: they
# add to ``dk`` and ``dv``, so the sums have to be back in registers before
# each product. Twice as many warps share the same sums, and with 64 rows in a
# step nothing spills. The price is a single program on each SM. With 64 × 64
# and 4 warps there are two, and one of them computes powers while the other
# multiplies.
#
# The kernel with queries spills nothing with 128 × 32, and is slower all the
# same. Its queries and their ``dy`` take 64 KB of shared memory, and five
# stages of keys and values take 80 KB. An SM of an H200 has 227 KB for them,
# so there is no room for a second program.
#
# **What follows.**
# Triton's tutorial takes 128 × 32 and 4 warps for any head dimension. With 64
# numbers in a head nothing spills. With 128 numbers the same choice asks each
# thread for 320 registers. So neither the algorithm nor Triton makes it that
# slow: the tiles have to depend on the head dimension.
# What we measured is not the speed of that tutorial: these are our kernels,
# with its tiles.
#
# We stay with 64 × 64 and 4 warps for the seven products.
#
# One kernel for all three
# ------------------------
#
# Now to five products. What more does a program with keys have to do?
#
# It has ``ds`` in registers and its keys in shared memory. One more product,
# :math:`ds^T k`, makes its part of ``dq``, a tile with a row for each query of
# this step. Then the tile has to go somewhere.
# That is the only difference between our designs, so we make it an argument:
# ``FOR_DQ`` is a function that gets ``ds``, the keys, and where we are. The
# rest of the kernel is that of the kernel with keys.
#
# One line is needed now that was not needed before. A key that does not exist
# is a row of zeros. Its ``dk`` and ``dv`` are not stored, and so it did not
# matter what its weights were. Now they go into ``dq``, and an infinite weight
# times a key of zeros is not a number. So its weights have to be 0.


# One compiled kernel for any number of heads, and not another one for 1.
@triton.jit(do_not_specialize=["before", "leads"])
def _attention_bwd_all(
    q_desc,  # (batch, heads, queries, D), in tiles of TILE_Q queries
    k_desc,  # (batch, heads, keys, D), in tiles of TILE_K keys
    v_desc,  # as k_desc
    dy_desc,  # as q_desc
    dk_desc,  # as k_desc
    dv_desc,  # as k_desc
    lse_ptr,  # (batch, heads, queries)
    delta_ptr,  # (batch, heads, queries)
    place,  # New: what FOR_DQ writes to
    turns_ptr,  # New: tickets and turns, or None: see "In turns" below
    heads,  # of a sequence
    before,  # New: heads of earlier launches
    leads,  # New: heads of this launch, of all sequences
    queries,
    keys,
    scale,  # c alone: dk is multiplied by it, without LOG2E
    log2e,  # LOG2E, for the powers of 2
    D: tl.constexpr,  # head dimension
    TILE_Q: tl.constexpr,  # queries of a step
    TILE_K: tl.constexpr,  # keys of a program
    GROUP: tl.constexpr,  # New: heads whose programs are neighbors
    WHOLE: tl.constexpr,  # New: whether the last tile of keys is full
    STAGES: tl.constexpr,
    FOR_DQ: tl.constexpr,  # New: a function, what becomes of ds
    ALONE: tl.constexpr,  # New: True in the interpreter
):
    number = tl.program_id(0)
    if turns_ptr is not None:
        number = tl.atomic_add(turns_ptr, 1, sem="relaxed")  # a ticket

    # Which keys are ours, and which head? The programs of a GROUP of heads
    # are numbered tile by tile: those with the first keys of each head come
    # first. With a GROUP of 1 we go head by head.
    tiles = tl.cdiv(keys, TILE_K)
    group = number // (tiles * GROUP) * GROUP  # the first head of ours
    members = tl.minimum(leads - group, GROUP)
    number -= group * tiles
    tile = number // members
    slot = group + number % members  # our head, of those of this launch
    first = tile * TILE_K
    lead = before + slot
    batch = lead // heads
    head = lead % heads
    row = lead.to(tl.int64) * queries
    k = k_desc.load([batch, head, first, 0]).reshape(TILE_K, D)
    v = v_desc.load([batch, head, first, 0]).reshape(TILE_K, D)
    dk = tl.zeros((TILE_K, D), tl.float32)
    dv = tl.zeros((TILE_K, D), tl.float32)

    for start in tl.range(0, queries, TILE_Q, num_stages=STAGES):
        # The weights again.
        q = q_desc.load([batch, head, start, 0]).reshape(TILE_Q, D)
        query = start + tl.arange(0, TILE_Q)
        mask = query < queries
        lse = tl.load(lse_ptr + row + query, mask=mask, other=0)
        score = tl.dot(k, q.T)
        p = tl.exp2(score * (scale * log2e) - lse[None, :])
        if not WHOLE:
            # New: no weight for keys that do not exist.
            key = first + tl.arange(0, TILE_K)
            p = tl.where(key[:, None] < keys, p, 0)

        # dv: the sum of p dy, over queries.
        dy = dy_desc.load([batch, head, start, 0]).reshape(TILE_Q, D)
        dv = tl.dot(p.to(dy.dtype), dy, dv)

        # ds = p (dp - delta), and dk: the sum of ds q.
        delta = tl.load(delta_ptr + row + query, mask=mask, other=0)
        dp = tl.dot(v, dy.T)
        ds = (p * (dp - delta[None, :])).to(q.dtype)
        dk = tl.dot(ds, q, dk)

        # New: what becomes of ds, for dq.
        FOR_DQ(
            ds,
            k,
            place,
            turns_ptr,
            batch,
            head,
            slot,
            row,
            start,
            tile,
            queries,
            D,
            TILE_Q,
            TILE_K,
            ALONE,
        )

    dk = (dk * scale).to(dk_desc.dtype).reshape(1, 1, TILE_K, D)
    dv = dv.to(dv_desc.dtype).reshape(1, 1, TILE_K, D)
    dk_desc.store([batch, head, first, 0], dk)
    dv_desc.store([batch, head, first, 0], dv)


# %%
# Atomic additions
# ----------------
#
# What is the shortest way to add the parts?
#
# All programs add to one tensor in float32, with ``tl.atomic_add``. We know it
# from `Weight gradients <../layer-norm/02-summing-rows.html>`_: the addition
# happens in L2, and no other program can come in between.
# ``sem="relaxed"`` says that an addition does not have to wait for other
# loads and stores.


@triton.jit
def _add_atomically(
    ds,  # (TILE_K, TILE_Q), in 16 bits: a row for each key
    k,  # (TILE_K, D)
    place,  # (batch, heads, queries, D), float32, contiguous; 0 at first
    turns_ptr,  # not used
    batch,
    head,
    slot,  # our head, of those of this launch
    row,  # all queries of the heads before ours
    start,  # our first query in this step
    tile,  # the number of our tile of keys
    queries,
    D: tl.constexpr,
    TILE_Q: tl.constexpr,
    TILE_K: tl.constexpr,
    ALONE: tl.constexpr,
):
    part = tl.dot(ds.T, k)
    query = start + tl.arange(0, TILE_Q)
    at = (row + query)[:, None] * D + tl.arange(0, D)[None, :]
    mask = query[:, None] < queries
    tl.atomic_add(place + at, part, mask=mask, sem="relaxed")


# %%
# For an H100 or an H200 Triton turns this into instructions that add four
# neighboring numbers at a time.
#
# The sums are float32. They still have to be multiplied by :math:`c` and
# rounded to 16 bits, which is the work of a small kernel of its own.


@triton.jit
def _attention_bwd_round(
    sums_ptr,  # float32, contiguous
    dq_ptr,  # contiguous
    scale,
    size,  # numbers of both
    BLOCK: tl.constexpr,  # numbers of a program
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(sums_ptr + at, mask=at < size, other=0)
    dq = (total * scale).to(dq_ptr.dtype.element_ty)
    tl.store(dq_ptr + at, dq, mask=at < size)


# %%
# Which tiles does a design have? A larger tile of keys has fewer parts of
# ``dq`` to add. With 128 keys the two sums need 8 warps, as we have seen, and
# they leave 127 registers for everything else. Two tiles of 64 × 128 take 64
# of them, and later in the step the part of ``dq`` takes 32.
#
# That is for heads of 128 numbers, where ``_attention_bwd_all`` has these
# tiles in all four designs. Up to 64 numbers, tiles of 64 × 64 and 4 warps are
# faster. Only the design that takes turns, which we come to below, has
# 128 × 128 and 8 warps there.
#
# It is tight, and not all of these kernels do without spills. With 128 numbers
# in a head, atomic and bulk additions spill fewer than 100 bytes a thread, and
# the design that takes turns spills fewer than 300 at any head dimension.
# Still, the tiles of this table were the fastest of those that we tried on an
# H200. Those that spill less were slower. On GPUs before the H100, and on
# those of AMD, the tiles for 128 numbers spill far more, and smaller ones may
# be faster.

TILES = {
    # For D up to 64, and 128: queries, keys, warps, stages.
    "atomics": ((64, 64, 4, 3), (64, 128, 8, 3)),
    "bulk": ((64, 64, 4, 3), (64, 128, 8, 3)),
    "turns": ((128, 128, 8, 1), (64, 128, 8, 1)),
    "stored": ((64, 64, 4, 3), (64, 128, 8, 3)),
    "product": ((64, 128, 4, 3), (64, 64, 4, 4)),
}


def plan_of(design, D):
    """Tiles, warps and stages of a kernel of a design."""
    up_to_64, of_128 = TILES[design]
    plan = of_128 if D > 64 else up_to_64
    tile_q, tile_k, warps, stages = plan
    return {
        "TILE_Q": tile_q,
        "TILE_K": tile_k,
        "STAGES": stages,
        "num_warps": warps_here(warps),
    }


# %%

# Scaffold: the launches that all designs with one kernel have.


def deltas(y, dy):
    """The sum of y dy, for each query."""
    delta = torch.empty(y.shape[:3], device=y.device)
    rows = delta.numel()
    _attention_bwd_delta[(triton.cdiv(rows, 64),)](
        y_ptr=y,
        dy_ptr=dy,
        delta_ptr=delta,
        rows=rows,
        D=y.shape[-1],
        ROWS=64,
        num_warps=4,
    )
    return delta


def all_at_once(
    given, delta, scale, plan, for_dq, place, turns=None, group=1, some=None
):
    """dk and dv; for_dq gets place. ``some`` are the heads of this launch:
    how many come before it, and how many it has; and dk and dv."""
    dy, q, k, v, lse = given
    batch, heads, queries, D = q.shape
    keys = k.shape[2]
    if some is None:
        dk = torch.empty(k.shape, dtype=k.dtype, device=k.device)
        dv = torch.empty(v.shape, dtype=v.dtype, device=v.device)
        some = 0, batch * heads, dk, dv
    before, leads, dk, dv = some
    tiles = triton.cdiv(keys, plan["TILE_K"])
    _attention_bwd_all[(tiles * leads,)](
        q_desc=tiles_of(q, plan["TILE_Q"]),
        k_desc=tiles_of(k, plan["TILE_K"]),
        v_desc=tiles_of(v, plan["TILE_K"]),
        dy_desc=tiles_of(dy, plan["TILE_Q"]),
        dk_desc=tiles_of(dk, plan["TILE_K"]),
        dv_desc=tiles_of(dv, plan["TILE_K"]),
        lse_ptr=lse,
        delta_ptr=delta,
        place=place,
        turns_ptr=turns,
        heads=heads,
        before=before,
        leads=leads,
        queries=queries,
        keys=keys,
        scale=scale,
        log2e=LOG2E,
        D=D,
        GROUP=group,
        WHOLE=keys % plan["TILE_K"] == 0,
        FOR_DQ=for_dq,
        ALONE=not ON_GPU,
        **plan,
    )
    return dk, dv


def rounded(sums, q, scale):
    """dq, from its sums in float32."""
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    block = 2048
    _attention_bwd_round[(triton.cdiv(dq.numel(), block),)](
        sums_ptr=sums,
        dq_ptr=dq,
        scale=scale,
        size=dq.numel(),
        BLOCK=block,
        num_warps=4,
    )
    return dq


# %%
# With these launches a design takes a few lines.


def with_atomics(dy, q, k, v, y, lse, scale):
    """dq, dk and dv; all programs add to dq."""
    sums = torch.zeros(q.shape, device=q.device)
    dk, dv = all_at_once(
        (dy, q, k, v, lse),
        deltas(y, dy),
        scale,
        plan=plan_of("atomics", q.shape[-1]),
        for_dq=_add_atomically,
        place=sums,
    )
    return rounded(sums, q, scale), dk, dv


# %%
# Bulk additions
# --------------
#
# Can a program add a whole tile at once?
#
# The threads of a program need many instructions for a tile of 64 × 128
# numbers, and each of them needs addresses, which take registers.
# A tensor descriptor can add, too. Its method ``atomic_add`` takes a tile. The
# threads put the tile into shared memory, and then a single instruction hands
# it to the Tensor Memory Accelerator (TMA), which sends it to L2. There it is
# added, as before. Nobody has to compute addresses, and the descriptor leaves
# out queries that do not exist.
#
# Triton's interpreter does not know this method. There is only one program at
# a time in it, so a load, an addition and a store do the same.


@triton.jit
def _add_in_bulk(
    ds,
    k,
    place,  # New: a descriptor of what it was above, in tiles of TILE_Q
    turns_ptr,
    batch,
    head,
    slot,
    row,
    start,
    tile,
    queries,
    D: tl.constexpr,
    TILE_Q: tl.constexpr,
    TILE_K: tl.constexpr,
    ALONE: tl.constexpr,
):
    part = tl.dot(ds.T, k).reshape(1, 1, TILE_Q, D)
    at = [batch, head, start, 0]
    if ALONE:
        place.store(at, place.load(at) + part)
    else:
        place.atomic_add(at, part)


def in_bulk(dy, q, k, v, y, lse, scale):
    """dq, dk and dv; all programs add to dq, a tile at a time."""
    plan = plan_of("bulk", q.shape[-1])
    sums = torch.zeros(q.shape, device=q.device)
    dk, dv = all_at_once(
        (dy, q, k, v, lse),
        deltas(y, dy),
        scale,
        plan=plan,
        for_dq=_add_in_bulk,
        place=tiles_of(sums, plan["TILE_Q"]),
    )
    return rounded(sums, q, scale), dk, dv


# %%
# In turns
# --------
#
# Both designs add in the order in which programs arrive, which is another one
# in each run. How do we get the same bits each time, with five products?
#
# The programs have to add in a fixed order. For each tile of queries there is
# a number that says whose *turn* it is. The program with the first keys adds
# when it is 0, and then makes it 1. That is the turn of the program with the
# next keys, and so on.
#
# Will they all wait for each other? All programs begin with the first tile of
# queries, so the second program waits there until the first one has added. But
# then it is one step behind, and stays so: when it comes to the next tile, the
# first program has just left it.

# %%

# Drawing: programs that take turns, one step behind each other.

plt.figure(
    "Four programs of a head over time. Program 0 adds to the tiles 0, 1, 2, "
    "3 and so on of queries. Program 1 does the same one step later, program "
    "2 two steps later. In each step they add to different tiles",
    figsize=(7.5, 2.7),
)
for program in range(4):
    for step in range(8):
        tile = step - program
        if tile < 0:
            plt.text(
                step + 0.47, -program + 0.4, "waits", ha="center", va="center"
            )
            continue
        plt.gca().add_patch(
            plt.Rectangle(
                (step, -program),
                0.94,
                0.85,
                facecolor=f"C{tile % 6}",
                edgecolor="gray",
                alpha=0.45,
            )
        )
        plt.text(
            step + 0.47, -program + 0.4, f"tile {tile}", ha="center",
            va="center",
        )  # fmt: skip
    plt.text(
        -0.15, -program + 0.4, f"program {program}", ha="right", va="center"
    )
plt.annotate(
    "", xy=(8, -3.35), xytext=(0, -3.35), arrowprops={"arrowstyle": "->"}
)
plt.text(4, -3.45, "time, in steps", ha="center", va="top")
plt.axis((-1.7, 8.3, -4.1, 1))
plt.axis("off")
plt.show()

# %%
# Three things have to be right.
#
# **Nobody waits for a program that has not started.**
# With 8 warps each SM runs one program of this kernel at a time, and a GPU
# need not start them in the order of their numbers. If all running programs
# waited for one that has no place to start, nobody would ever go on. So a
# program draws a *ticket* when it starts, the next number of a counter, and
# the ticket says which keys it gets. Then those for whom it waits have smaller
# tickets, and so they have started before.
#
# **They should not have to wait for each other's first steps.**
# If neighbors in a head start at the same time, the last of them waits for as
# many steps as there are programs before it. So the tickets go through a group
# of 8 heads: first come the first tiles of keys of all 8, and then their
# second tiles. With long sequences only one in 8 of those who start together
# is of the same head then, so the queue is shorter. That is what ``GROUP`` is
# for.
#
# **What was added is there before the turn goes on.**
# This is what we know from `A lock, and its race
# <../layer-norm/03-lock.html>`_. All threads of a program add their numbers,
# and one of them passes on the turn. So there has to be a barrier in between,
# ``tl.debug_barrier()``. The turn is passed on with ``sem="release"`` and
# looked at with ``sem="acquire"``. Together they promise that whoever sees the
# new number adds after those that came before.
#
# A program that looks at a number again and again could do that with a load,
# but Triton's loads have no acquire. A ``tl.atomic_add`` of 0 has one, and for
# an H100 Triton turns it into a load with acquire.


@triton.jit
def _add_in_turns(
    ds,
    k,
    place,  # (batch, heads, queries, D), float32, contiguous; 0 at first
    turns_ptr,  # New: a counter of tickets, then a turn for each tile; all 0
    batch,
    head,
    slot,
    row,
    start,
    tile,
    queries,
    D: tl.constexpr,
    TILE_Q: tl.constexpr,
    TILE_K: tl.constexpr,
    ALONE: tl.constexpr,
):
    part = tl.dot(ds.T, k)
    query = start + tl.arange(0, TILE_Q)
    at = (row + query)[:, None] * D + tl.arange(0, D)[None, :]
    mask = query[:, None] < queries

    # New: wait until all programs with earlier keys have added.
    tiles_of_queries = tl.cdiv(queries, TILE_Q)
    turn_ptr = turns_ptr + 1 + slot * tiles_of_queries + start // TILE_Q
    turn = tl.atomic_add(turn_ptr, 0, sem="acquire")
    while turn != tile:
        turn = tl.atomic_add(turn_ptr, 0, sem="acquire")

    tl.atomic_add(place + at, part, mask=mask, sem="relaxed")

    # New: all threads have added, and then one of them passes on the turn.
    tl.debug_barrier()
    tl.atomic_xchg(turn_ptr, tile + 1, sem="release")


def in_turns_of_keys(dy, q, k, v, y, lse, scale):
    """dq, dk and dv; programs add to dq in the order of their keys."""
    batch, heads, queries, D = q.shape
    plan = plan_of("turns", D)
    tiles = triton.cdiv(queries, plan["TILE_Q"]) * batch * heads
    sums = torch.zeros(q.shape, device=q.device)
    turns = torch.zeros(1 + tiles, dtype=torch.int32, device=q.device)
    dk, dv = all_at_once(
        (dy, q, k, v, lse),
        deltas(y, dy),
        scale,
        plan=plan,
        for_dq=_add_in_turns,
        place=sums,
        turns=turns,
        group=8,
    )
    return rounded(sums, q, scale), dk, dv


# %%
# Why are the additions still atomic, when there is only one program at a time?
# A load would have to travel to L2 and back before the sum can be stored, and
# all that time it would be nobody else's turn. An atomic addition is sent off,
# and L2 does the rest.
#
# And why not in bulk? What the TMA does is not ordered with what threads do.
# Triton's ``atomic_add`` of a descriptor waits until the TMA has *read* the
# tile from shared memory, and not until L2 has added it. A turn that is passed
# on then would be passed on too early.
#
# **What a compiler may do to a queue.**
# In the other designs Triton lets the loads of the next step run ahead, and
# for that it moves instructions to other places in the loop. Here it gives up:
# in a loop that has a loop or a barrier inside, no load runs ahead. So each
# step begins with loads that it has to wait for, and this is a part of what
# the order costs. And programs of 8 warps have an SM for themselves, so nobody
# multiplies there while they wait.
#
# Can we not have both? We tried two ways, with triton 3.6.0 and 3.7.1, and
# read what they are compiled to:
#
# - We hid the waiting behind an ``if``, and left out the barrier. Then the
#   loads ran ahead, but the additions stood *before* the loop that waits for
#   our turn. No check of the results would have found it, for they are right,
#   and only their order is not.
# - We put the waiting into a function that is not inlined. Then the order was
#   right. But such a function takes its shared memory from where that of the
#   kernel begins. There a tile may arrive just when one thread tells the
#   others whose turn it is. Then they no longer agree on whether to wait.
#
# So we stay with what is slow and right. A test of this site looks at the
# compiled loop, and must find its four parts in their order: wait, add, meet
# at the barrier, pass on.
#
# Store ds
# --------
#
# Why do we have to add the parts of ``dq`` at all? If somebody had all of
# ``ds``, ``dq`` would be a plain product of matrices.
#
# It is a matrix of all queries and keys, which is what we did not want to
# write. But it is only one, in 16 bits, written once and read once. The
# formula does that with two of them in the forward pass alone. So the first
# kernel stores its tiles of ``ds`` and has four products, and a second kernel
# has the fifth.


@triton.jit
def _store_ds(
    ds,
    k,
    place,  # New: descriptor of (heads, keys, queries), 16 bits
    turns_ptr,
    batch,
    head,
    slot,
    row,
    start,
    tile,
    queries,
    D: tl.constexpr,
    TILE_Q: tl.constexpr,
    TILE_K: tl.constexpr,
    ALONE: tl.constexpr,
):
    place.store([slot, tile * TILE_K, start], ds.reshape(1, TILE_K, TILE_Q))


# %%
# The matrix lies in memory as the first kernel has it, with a row for each
# key. The second kernel needs a row for each query. Its ``.T`` costs nothing,
# as in ``tl.dot(q, k.T)``.


@triton.jit(do_not_specialize=["before"])
def _attention_bwd_product(
    ds_desc,  # (heads, keys, queries) of this launch, TILE_K and TILE_Q
    k_desc,  # (batch, heads, keys, D), in tiles of TILE_K keys
    dq_desc,  # (batch, heads, queries, D), in tiles of TILE_Q queries
    heads,
    before,  # heads of earlier launches
    queries,
    keys,
    scale,
    D: tl.constexpr,
    TILE_Q: tl.constexpr,  # queries of a program
    TILE_K: tl.constexpr,  # keys of a step
    STAGES: tl.constexpr,
):
    tiles = tl.cdiv(queries, TILE_Q)
    first = tl.program_id(0) % tiles * TILE_Q
    slot = tl.program_id(0) // tiles
    batch = (before + slot) // heads
    head = (before + slot) % heads
    dq = tl.zeros((TILE_Q, D), tl.float32)
    for start in tl.range(0, keys, TILE_K, num_stages=STAGES):
        ds = ds_desc.load([slot, start, first]).reshape(TILE_K, TILE_Q)
        k = k_desc.load([batch, head, start, 0]).reshape(TILE_K, D)
        dq = tl.dot(ds.T, k, dq)
    dq = (dq * scale).to(dq_desc.dtype).reshape(1, 1, TILE_Q, D)
    dq_desc.store([batch, head, first, 0], dq)


# %%
# How much memory is that? At 16384 keys, the matrices of 16 heads have 8.6 GB.
# But nobody needs all heads at a time. We set a limit of half a gigabyte,
# ``ROOM``, take as many heads as fit, run both kernels, and go on with the
# next heads in the same memory. One head is the least that we can take, and at
# 16384 keys its matrix has exactly this size.

ROOM = 2**29  # bytes of ds at a time


def with_stored_ds(dy, q, k, v, y, lse, scale, room=ROOM):
    """dq, dk and dv; ds of some heads at a time is stored in between."""
    batch, heads, queries, D = q.shape
    keys = k.shape[2]
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    dk = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    dv = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    delta = deltas(y, dy)
    plan = plan_of("stored", D)
    second = plan_of("product", D)

    # Whole tiles, so that a row of ds begins at a multiple of 16 bytes.
    rows = triton.cdiv(keys, plan["TILE_K"]) * plan["TILE_K"]
    columns = triton.cdiv(queries, plan["TILE_Q"]) * plan["TILE_Q"]
    at_a_time = room // (rows * columns * q.itemsize)
    at_a_time = max(1, min(at_a_time, batch * heads))
    ds = torch.empty(at_a_time, rows, columns, dtype=q.dtype, device=q.device)
    to_store = [1, plan["TILE_K"], plan["TILE_Q"]]
    to_load = [1, second["TILE_K"], second["TILE_Q"]]
    tiles = triton.cdiv(queries, second["TILE_Q"])
    for before in range(0, batch * heads, at_a_time):
        leads = min(at_a_time, batch * heads - before)
        all_at_once(
            (dy, q, k, v, lse),
            delta,
            scale,
            plan=plan,
            for_dq=_store_ds,
            place=TensorDescriptor.from_tensor(ds, to_store),
            some=(before, leads, dk, dv),
        )
        _attention_bwd_product[(tiles * leads,)](
            ds_desc=TensorDescriptor.from_tensor(ds, to_load),
            k_desc=tiles_of(k, second["TILE_K"]),
            dq_desc=tiles_of(dq, second["TILE_Q"]),
            heads=heads,
            before=before,
            queries=queries,
            keys=keys,
            scale=scale,
            D=D,
            **second,
        )
    return dq, dk, dv


# %%
# Into autograd
# -------------
#
# All five have the same arguments and results, so one function takes any of
# them by its name. Stored ``ds`` without a limit is a sixth. Whoever gives no
# name gets seven products, and the figures below will say why.

DESIGNS = {
    "seven": backward,  # of page 01
    "atomics": with_atomics,
    "bulk": in_bulk,
    "turns": in_turns_of_keys,
    "stored": with_stored_ds,
    "whole": functools.partial(with_stored_ds, room=2**62),
}

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
        if q.numel() == 0:
            # No query, or no head: nothing to add up.
            dq = torch.empty_like(q)
            return dq, torch.zeros_like(k), torch.zeros_like(v), None, None
        dy = for_descriptors(dy.contiguous())
        backward_pass = DESIGNS[ctx.design]
        dq, dk, dv = backward_pass(dy, q, k, v, y, lse, ctx.scale)
        return dq, dk, dv, None, None


def attention(query, key, value, scale=None, design="seven"):
    """What F.scaled_dot_product_attention gives without a mask.

    query is (batch, heads, queries, D), key and value are (batch, heads,
    keys, D), all in float16 or all in bfloat16. Without a scale it is one over
    the root of D. The design of the backward pass is a name in DESIGNS.
    """
    if scale is None:
        scale = query.shape[-1] ** -0.5
    check_arguments(query, key, value, scale)
    if design not in DESIGNS:
        raise ValueError(f"design is {design}: {', '.join(DESIGNS)} are taken")
    if not ON_GPU and query.dtype == torch.bfloat16:
        # The interpreter multiplies the bits of bfloat16 as whole numbers.
        given = (t.float() for t in (query, key, value))
        return _Attention.apply(*given, scale, design).to(query.dtype)
    return _Attention.apply(query, key, value, scale, design)


# %%
# Are they right? We compare each of them with the formula in float64, and
# print the largest error of each gradient, as a share of its largest number.


def check(design, queries, keys, D, dtype=torch.float16):
    """The largest errors of dq, dk and dv, compared with float64."""
    torch.manual_seed(0)
    ours, exact = [], []
    for length in (queries, keys, keys):
        t = torch.randn(1, 3, length, D, device=DEVICE).to(dtype)
        ours.append(t.clone().requires_grad_())
        exact.append(t.double().requires_grad_())
    dy = torch.randn(1, 3, queries, D, device=DEVICE).to(dtype)
    attention(*ours, design=design).backward(dy)
    y = F.scaled_dot_product_attention(*exact)
    y.backward(dy.double())
    errors = []
    for t, e in zip(ours, exact, strict=True):
        difference = (t.grad - e.grad).abs().max()
        errors.append((difference / e.grad.abs().max()).item())
    for name, error in zip(("dq", "dk", "dv"), errors, strict=True):
        assert error < 0.01, f"{design}: {name} is off by {error:.1%}"
    said = " ".join(f"{error:.2%}" for error in errors)
    print(f"{design:8} errors below 1%: {said}")


for design in DESIGNS:
    check(design, queries=70, keys=200, D=128)

# %%
# How fast are they?
# ------------------
#
# We count five products for everybody, :math:`10 N^2 D` operations for each
# head, and time a whole backward pass: ``delta``, clearing the sums of ``dq``
# and rounding them are part of it where a design needs them.

# %%

# Scaffold: attention backward in all designs, a benchmark.


@functools.cache  # all lines in turns; then each is asked for its own
def backward_speeds(N, D, dtype):
    backends = torch.nn.attention.SDPBackend
    who = {
        "sdpa-cudnn": with_backend(backends.CUDNN_ATTENTION),
        "torch": with_backend(backends.FLASH_ATTENTION),
    }
    for name in ("stored", "turns", "bulk", "atomics"):
        who[name] = functools.partial(attention, design=name)
    who["triton"] = attention
    q, k, v, dy = inputs(N, D, dtype)
    calls = {}
    for name, function in who.items():
        y = function(q, k, v)
        calls[name] = functools.partial(
            torch.autograd.grad, y, (q, k, v), dy.detach(), retain_graph=True
        )
    return speeds(5, calls, N)


def of_designs(plot_name, D):
    return triton.testing.Benchmark(
        x_names=["N"],
        x_vals=[512, 1024, 2048, 4096, 8192, 16384],
        x_log=True,
        xlabel="N (queries, and keys)",
        line_arg="provider",
        line_vals=list(NAMES),
        line_names=list(NAMES.values()),
        ylabel="TFLOP/s",
        plot_name=plot_name,
        args={"D": D, "dtype": torch.float16, "mode": "backward"},
    )


@triton.testing.perf_report(of_designs("attention-designs", 128))
def bench_designs(N, D, dtype, mode, provider):
    """All lines in turns, 15 times, each a CUDA graph that overwrites L2
    first; the time of a graph that only overwrites L2 is subtracted."""
    if not ON_GPU:
        return 3 * [float("nan")]  # the interpreter cannot be timed
    return backward_speeds(N, D, dtype)[provider]


@triton.testing.perf_report(of_designs("attention-designs-64", 64))
def bench_designs_64(N, D, dtype, mode, provider):
    """All lines in turns, 15 times, each a CUDA graph that overwrites L2
    first; the time of a graph that only overwrites L2 is subtracted."""
    if not ON_GPU:
        return 3 * [float("nan")]  # the interpreter cannot be timed
    return backward_speeds(N, D, dtype)[provider]


# %%

in_percent(bench_designs)

# %%
# **What the figure shows.**
# On the H200, at 4096 keys and 128 numbers in a head, seven products reach 436
# TFLOP/s, atomic additions 354, bulk additions 374, turns 222, and stored
# ``ds`` 410. At 16384 keys the five numbers are 466, 375, 391, 223 and 402,
# and at 512 keys they are 298, 257, 266, 179 and 297. Up to 1024 keys stored
# ``ds`` is level with seven products. From 2048 keys on seven products are
# faster than all others of ours. Turns are the only design of ours that is
# slower than FlashAttention-2.
#
# From 1024 keys on, seven products are at 78% to 82% of cuDNN's speed, and
# stored ``ds`` is at 68% to 81%. Seven products are 1.5 to 1.6 times as fast
# as FlashAttention-2.
#
# **Why.**
# Let's see what became of the budget at 4096 keys. A speed is the number of
# operations in five products, divided by the time. So the speeds above are
# times: 3.15 ms with seven products, 3.88 ms with atomic additions, 3.68 ms in
# bulk, 6.19 ms in turns, and 3.36 ms with stored ``ds``. At the rate that we
# began with, five products alone take 2.26 ms. What is above was spent on the
# parts of ``dq``: 1.63 ms with atomic additions, 1.42 ms in bulk, 3.93 ms in
# turns, and 1.10 ms with stored ``ds``. Only 0.90 ms were in the budget.
# Not all of that time goes into moving. These programs have an SM for
# themselves, so their products may be slower, too, and we have not measured
# the two apart.
#
# - **Seven products** move nothing. In both kernels two programs share an SM.
# - **Atomic additions** bring 4.3 GB to L2. In the time of this design that is
#   1.1 TB in a second. A program has an SM for itself, so nobody else
#   multiplies there while its threads add.
# - **Bulk additions** bring the same bytes, at 1.2 TB in a second. What they
#   save are instructions and registers of the threads.
# - **Turns** add as atomic additions do, with the same tiles. The rest is the
#   price of the order: each step waits for its loads, for its turn, and at a
#   barrier.
# - **Stored** ``ds`` writes 2.1 GB and reads them again. The first kernel has
#   as many products as the one with keys, and writes while it multiplies. The
#   second kernel has a fifth of the operations, and loads as many bytes as the
#   first one has stored.
#
# **What follows.**
# Two more products are the best deal that we found: they move nothing, need no
# memory, and give the same bits each time. So the function above takes them
# unless it is told otherwise. It is not a law. Five products are less work,
# and a design that brings the parts of ``dq`` together while its Tensor Cores
# stay busy should win. None of our four keeps them busy enough.
#
# If you compare this figure with that of `Attention without its matrix
# <01-attention.html>`_, its seven products are faster here: 466 TFLOP/s and
# not 435 at 16384 keys. They are the same kernels. cuDNN has 590 and not 520
# here, and the product of matrices 763 and not 748. The figures come from two
# runs, and we do not know why the GPU was faster in one of them. So only
# compare the lines of a figure with each other.
#
# With half as many numbers in a head, a product has half as many operations,
# and ``ds`` has as many numbers as before.

# %%

in_percent(bench_designs_64)

# %%
# **What the figure shows.**
# On the H200, with 64 numbers in a head and 4096 keys, seven products reach
# 370 TFLOP/s, atomic additions 310, bulk additions 357, turns 217, and stored
# ``ds`` 336. cuDNN reaches 455. At 16384 keys stored ``ds`` reaches 298, and
# bulk additions reach 370. At 8192 keys stored ``ds`` falls to 273.
#
# **Why.**
# There are twice as many heads, each with a matrix of the same size. So there
# are twice as many powers to compute for the same operations, for everybody.
#
# Stored ``ds`` has twice the bytes, 4.3 GB to write and 4.3 GB to read at 4096
# keys, and now it falls behind bulk additions. Why is it slower at 8192 keys
# than at 16384? Three programs of its first kernel fit on an SM here, so 396
# run at a time. At 8192 keys a launch has four heads with 512 programs, and
# 116 of them run in a second round, when most of the GPU has nothing to do. At
# 16384 keys a launch has one head with 256 programs, and all of them run at
# the same time. This fits the figure, but we have not measured whether it is
# the whole reason.
#
# Atomic and bulk additions have tiles of 64 keys here. Twice as many heads,
# each with twice as many tiles of keys, make four times as many parts of half
# the size: 8.6 GB. Bulk additions bring them to L2 at 2.2 TB in a second. With
# 128 numbers it was 1.2 TB, so L2 could have taken more there.
#
# Seven products have nothing to move here, either, and they are ahead of all
# others of ours from 1024 keys on.
#
# The same bits?
# --------------
#
# Which of the designs give the same gradients, to the last bit, in each run?
#
# We run each backward pass once, and then a hundred times more on the same
# input, and count the runs whose gradients differ from the first in any bit.

# %%

# Scaffold: runs that differ, counted.


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=["512", "2048", "8192"],
        xlabel="N (queries, and keys)",
        line_arg="provider",
        line_vals=list(NAMES)[:-1],
        line_names=list(NAMES.values())[:-1],
        ylabel="different results of 100",
        plot_name="attention-designs-bits",
        args={"D": 128, "dtype": torch.float16, "mode": "backward"},
    )
)
def different_bits(N, D, dtype, mode, provider):
    """Runs of 100 whose dq, dk or dv differs in any bit from that of the
    first."""
    if not ON_GPU:
        return 3 * [float("nan")]
    backends = torch.nn.attention.SDPBackend
    names = {
        "sdpa-cudnn": backends.CUDNN_ATTENTION,
        "torch": backends.FLASH_ATTENTION,
    }
    design = "seven" if provider == "triton" else provider
    function = functools.partial(attention, design=design)
    if provider in names:
        function = with_backend(names[provider])
    q, k, v, dy = inputs(int(N), D, dtype)
    y = function(q, k, v)

    def gradients():
        return torch.autograd.grad(
            y, (q, k, v), dy.detach(), retain_graph=True
        )

    first = gradients()
    different = 0
    for _ in range(100):
        pairs = zip(gradients(), first, strict=True)
        if not all(torch.equal(a, b) for a, b in pairs):
            different += 1
    return 3 * [different]


# %%

different_bits.run(show_plots=ON_GPU)

# %%
# **What the figure shows.**
# Seven products, turns and stored ``ds`` repeat the first result each time. On
# the H200, at 512, 2048 and 8192 keys, all 100 runs differ from the first with
# atomic additions, with bulk additions, with cuDNN and with FlashAttention-2.
#
# **Why.**
# Where programs add in the order of their arrival, this order is another one
# in each run. FlashAttention-2 adds its parts of ``dq`` atomically, too:
# ``flash_bwd_kernel.h`` in `its repository
# <https://github.com/Dao-AILab/flash-attention>`_ calls ``atomicAdd`` for each
# number of a part. We have not looked into cuDNN's kernels.
#
# How can all 100 runs differ? ``dq`` is rounded to 16 bits at the end, and
# most sums in another order round to the same number. But there are 33 million
# numbers, and a single one that differs is enough.
#
# What a step needs of memory
# ---------------------------
#
# Stored ``ds`` needs room. How much is it, beside the other designs?
#
# Here is the most memory that a backward pass takes at a time, beside the
# inputs and the result of the forward pass.

# %%

# Scaffold: memory, and room for ds, two benchmarks.


def saved(N, D, dtype):
    """What a backward pass gets: dy, q, k, v, y, lse and the scale."""
    q, k, v, dy = (t.detach() for t in inputs(N, D, dtype))
    scale = D**-0.5
    y, lse = forward(q, k, v, scale, plan_forward(D))
    return dy, q, k, v, y, lse, scale


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=[1024, 2048, 4096, 8192, 16384],
        x_log=True,
        y_log=True,
        xlabel="N (queries, and keys)",
        line_arg="provider",
        line_vals=["triton", "stored", "whole", "atomics"],
        line_names=[
            "Seven products",
            "Stored ds",
            "Stored ds, all heads",
            "Atomic additions",
        ],
        ylabel="GB of memory",
        plot_name="attention-designs-memory",
        args={"D": 128, "dtype": torch.float16, "mode": "backward"},
    )
)
def bench_memory(N, D, dtype, mode, provider):
    """The most memory that PyTorch allocated while a backward pass ran,
    beside that of its inputs; the gradients are part of it."""
    if not ON_GPU:
        return 3 * [float("nan")]
    backward_pass = DESIGNS["seven" if provider == "triton" else provider]
    given = saved(N, D, dtype)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    backward_pass(*given)
    torch.cuda.synchronize()
    most = (torch.cuda.max_memory_allocated() - before) / 1e9
    return most, most, most


ROOMS = [34, 68, 135, 270, 540, 2200]  # MB: 1, 2, 4 ... heads of 4096 keys


@functools.cache  # all sizes in turns; then each is asked for its own
def room_speeds(N, D, dtype):
    given = saved(N, D, dtype)
    calls = {
        room: functools.partial(with_stored_ds, *given, room=10**6 * room)
        for room in ROOMS
    }
    return speeds(5, calls, N)


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["MB"],
        x_vals=ROOMS,
        x_log=True,
        xlabel="MB of room for ds",
        line_arg="provider",
        line_vals=["1024", "4096", "16384"],
        line_names=["N = 1024", "N = 4096", "N = 16384"],
        ylabel="TFLOP/s",
        plot_name="attention-designs-room",
        args={"D": 128, "dtype": torch.float16, "mode": "backward"},
    )
)
def bench_room(MB, D, dtype, mode, provider):
    """All sizes in turns, 15 times, each a CUDA graph that overwrites L2
    first; the time of a graph that only overwrites L2 is subtracted."""
    if not ON_GPU:
        return 3 * [float("nan")]  # the interpreter cannot be timed
    return room_speeds(int(provider), D, dtype)[MB]


# %%

bench_memory.run(show_plots=ON_GPU)

# %%

bench_room.run(show_plots=ON_GPU)

# %%
# **What the figures show.**
# On the H200 seven products take 0.20 GB at any length, which are the three
# gradients. Sums in float32 make it 0.34 GB. With stored ``ds`` it is 0.74 GB
# from 1024 to 16384 keys, and without a limit it grows to 8.79 GB. The limit
# costs little speed: with 540 MB of room it is 355, 419 and 406 TFLOP/s at
# 1024, 4096 and 16384 keys, and with 2200 MB it is 355, 426 and 411. With 34
# MB it is 343, 117 and 406.
#
# In the figure of all designs, stored ``ds`` with its limit of half a gigabyte
# has 402 TFLOP/s at 16384 keys, and with 540 MB of room here it has 406. So a
# few TFLOP/s more or less say nothing.
#
# **Why.**
# A launch needs enough programs for all SMs, and the first kernel has a
# program for each 128 keys of a head. The H200 has 132 SMs. Let's count the
# programs of a launch with 34 MB of room:
#
# - At 1024 keys the 34 MB hold 16 heads. Each of them has 8 programs, so
#   there are 128.
# - At 4096 keys they hold one head, which has 32 programs. A hundred SMs have
#   nothing to do. Room for four heads makes 128 programs again, and from there
#   on more room hardly helps.
# - At 16384 keys not even one head fits. But one is the least that we take, so
#   its matrix gets 537 MB in spite of the limit, and its 128 programs keep
#   nearly all SMs busy. All limits up to 540 MB are the same for this length,
#   and 2200 MB hold four heads.
#
# Where PyTorch is better
# -----------------------
#
# PyTorch can call cuDNN. On the H200, with 128 numbers in a head, seven
# products reach 87% of cuDNN's speed at 512 keys, 79% at 4096 and 79% at
# 16384, and with 64 numbers 96%, 81% and 82%.
# We have not looked into cuDNN's kernels. `FlashAttention-3
# <https://arxiv.org/abs/2407.08608>`_ has described how to go on from here.
# One warp does nothing but load, another one does nothing but hand parts of
# ``dq`` to the TMA, and two or three groups of warps multiply. So the
# additions happen beside the products. In Triton the compiler decides which
# warps do what. We know of no way to ask it for one that only adds.
#
# Both libraries also take what this page leaves out: causal attention, groups
# of heads, and any head dimension.
#
# Exercise
# --------
#
# **Exercise 1: an order that does not matter.**
# Atomic additions give other bits in another order because each of them
# rounds. Whole numbers do not round. Write a function for ``FOR_DQ`` that adds
# whole numbers of 64 bits, atomically, so that the sum has the same bits in
# any order. ``place`` is int64, and its numbers count in units of
# :math:`2^{-24}`.
#
# The checker runs the kernel twice. The second time the tiles of keys come in
# the opposite order.
#
# **Hint 1.** ``part`` has to be multiplied before it becomes a whole number.
# ``.to(tl.int64)`` cuts off what stands behind the point.
#
# **Hint 2.** Nothing else changes in ``_add_atomically``.


def exercise_1(for_dq, dtype, unit):
    """Whether dq is right, and has the same bits in the opposite order."""
    torch.manual_seed(0)
    plan = plan_of("atomics", 64)
    tile_k = plan["TILE_K"]
    q, dy = torch.randn(2, 1, 2, 70, 64, device=DEVICE).half()
    k, v = torch.randn(2, 1, 2, 4 * tile_k, 64, device=DEVICE).half()
    scale = 0.125
    y, lse = forward(q, k, v, scale, plan_forward(64))
    results = []
    for order in ([0, 1, 2, 3], [3, 2, 1, 0]):
        k_then, v_then = (
            t.view(1, 2, 4, tile_k, 64)[:, :, order].reshape(k.shape)
            for t in (k, v)
        )
        sums = torch.zeros(q.shape, dtype=dtype, device=DEVICE)
        all_at_once(
            (dy, q, k_then, v_then, lse),
            deltas(y, dy),
            scale,
            plan=plan,
            for_dq=for_dq,
            place=sums,
        )
        results.append(sums)
    exact = [t.double().requires_grad_() for t in (q, k, v)]
    F.scaled_dot_product_attention(*exact).backward(dy.double())
    error = (results[0].double() * unit * scale - exact[0].grad).abs().max()
    right = bool(error < 5e-3)
    same = torch.equal(*results)
    print(f"exercise 1: right: {right}, the same bits: {same}")
    return right and same


exercise_1(_add_atomically, torch.float32, unit=1)

# %%

# Solution 1


@triton.jit
def _add_whole_numbers(
    ds,
    k,
    place,
    turns_ptr,
    batch,
    head,
    slot,
    row,
    start,
    tile,
    queries,
    D: tl.constexpr,
    TILE_Q: tl.constexpr,
    TILE_K: tl.constexpr,
    ALONE: tl.constexpr,
):
    part = tl.dot(ds.T, k)
    query = start + tl.arange(0, TILE_Q)
    at = (row + query)[:, None] * D + tl.arange(0, D)[None, :]
    mask = query[:, None] < queries
    # New: in units of 2**-24, and whole.
    whole = (part * 16777216.0).to(tl.int64)
    tl.atomic_add(place + at, whole, mask=mask, sem="relaxed")


assert exercise_1(_add_whole_numbers, torch.int64, unit=2.0**-24)

# %%
# It is right as long as no sum passes :math:`2^{63}` units, which is
# :math:`2^{39}`, and as long as the parts are much larger than a unit. What is
# smaller is cut off, and the gradients of a model may be that small. So the
# unit would have to fit them. The other price is twice the bytes: 8 for each
# number.
#
# What we learned
# ---------------
#
# These are the designs of this page, with their speeds on the H200 at 4096
# keys and 128 numbers in a head, what they move for ``dq``, and whether they
# give the same bits each time:
#
# - **Seven products**: 436 TFLOP/s. Nothing moves; the same bits. This is the
#   one to take.
# - **Atomic additions**: 354 TFLOP/s. They bring 4.3 GB to L2; other bits in
#   each run.
# - **Bulk additions**: 374 TFLOP/s. The same bytes, by the TMA; other bits in
#   each run.
# - **In turns**: 222 TFLOP/s. 4.3 GB to L2, in a fixed order; the same bits.
# - **Stored** ``ds``: 410 TFLOP/s. 2.1 GB written and read, in 0.54 GB of
#   memory; the same bits.
# - **cuDNN** reaches 554 TFLOP/s, and **FlashAttention-2** 285.
#
# And for kernels in general:
#
# - Count what a thread has to keep before you choose a tile. A sum that does
#   not fit is fetched and stored in each step.
# - Two ways to the same sum compete in one unit, which is time: operations at
#   the rate of the Tensor Cores, bytes at the rate of L2 or of memory. To
#   compute again can be the cheaper one.
# - A fixed order is a queue, and a queue needs acquire, release, a barrier,
#   and a look at what the compiler made of it.
# - Memory that is used again for the next part of the work stays small.
#
# **Next:** `Causal, grouped, any length <03-any-attention.html>`_ lets these
# kernels take what models need: tokens that must not look ahead, heads that
# share their keys, and sequences of any length.
