r"""
Attention without its matrix
============================

Why does attention need a matrix of all queries and all keys?
It does not: tile by tile, a program keeps a maximum, a sum and a weighted sum
of values, and the backward pass computes the same tiles again.

.. math:: y_i = \sum_j p_{ij} v_j, \qquad
   p_{ij} = \frac{e^{s_{ij} - m_i}}{\sum_k e^{s_{ik} - m_i}}, \qquad
   s_{ij} = c \, q_i \cdot k_j, \qquad m_i = \max_j s_{ij}

The matrix of :math:`s` and :math:`p` has a row for each query and a column
for each key. With 16384 of both and 16 heads it takes 8.6 GB in 16 bits, and
the queries, keys, values and results together 0.27 GB.
On this page we write attention so that this matrix never leaves the chip, in
both passes, and find out how near that comes to what a GPU can multiply.

**What you will learn**

- How to add up a softmax and what it weighs, without knowing its sum.
- What ``tl.dot`` asks of its operands, and why they have 16 bits.
- Why one number a row, the logarithm of its sum, is all that the backward
  pass needs of the matrix.
- How the gradients of queries, keys and values follow from two formulas, and
  why two kernels compute them.
- How to read a speed in TFLOP/s, and what the roofline of a GPU is.

**What you need:** `Softmax, both passes
<../norms-and-losses/03-softmax.html>`_ for the pair of a maximum and a sum,
and `Loads in flight <../layer-norm/04-loads-in-flight.html>`_ for stages.
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
# Three queries and four keys
# ---------------------------
#
# What does attention compute?
#
# Each *query* asks all *keys* how well they fit. The answer is a *score*, the
# scalar product of both. Softmax makes weights of the scores, and the result
# is the sum of the *values*, weighted.
# Here are three queries, and four keys with their values. Each has two
# numbers, so its *head dimension* is 2.

q = torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 1.0]])
k = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [0.0, 0.0]])
v = torch.tensor([[8.0, 0.0], [0.0, 8.0], [4.0, 4.0], [0.0, 0.0]])

scores = q @ k.T
print("scores, a row for each query:")
print(scores)
weights = scores.softmax(1)
print("weights:")
print(weights.round(decimals=2))
print("results:")
print((weights @ v).round(decimals=2))

# %%
# The third query fits the third key best, with a score of 3. So 64% of its
# result is the third value.
#
# Models multiply the scores by a number :math:`c`, one over the root of the
# head dimension, lest they grow with it.
# They do all this for each *head* of each sequence of a batch, so their
# tensors have four dimensions: (batch, heads, length, head dimension).
#
# What does the matrix cost?
# --------------------------
#
# PyTorch's formula makes the matrix of scores, reads it for softmax, writes
# the weights, and reads them for the second product.
# The tokens below are 16384 in all: one sequence of that length, or 16 of
# 1024.

batch_and_length = [(16, 1024), (4, 4096), (1, 16384)]
for batch, length in batch_and_length:
    heads, dimension, bytes_each = 16, 128, 2
    operands = 4 * batch * heads * length * dimension * bytes_each
    matrix = batch * heads * length**2 * bytes_each
    print(
        f"{length:5} keys: q, k, v and y {operands / 1e9:.2f} GB; "
        f"the matrix moves {4 * matrix / 1e9:5.2f} GB"
    )

# %%
# The matrix is written and read twice: scores, then weights. At 16384 keys
# that is 34 GB, against 0.27 GB of everything else.
#
# And what does the arithmetic cost? Each product takes 2 · 16384² · 128
# operations for each head, where a multiplication and an addition count as
# two. Both products of 16 heads take 2.2 · 10¹² operations. An H100 does up to
# 989 · 10¹² of them in a second by its data sheet, and moves 3.35 TB. So the
# arithmetic takes at least 2.2 ms, and the matrix at least 10.3 ms.
#
# A sum that shrinks
# ------------------
#
# How can a program weigh values, if it does not know the sum of the row yet?
#
# In `Softmax, both passes <../norms-and-losses/03-softmax.html>`_ two parts of
# a row have a pair each, of their maximum and of the sum of their powers, and
# both sums shrink to the common maximum. The weighted sum of the values
# shrinks by the same factor.
# Here are the four scores of the third query, in two tiles of two keys.

maximum = torch.tensor(float("-inf"))
total = torch.tensor(0.0)
weighted = torch.zeros(2)
for start in (0, 2):
    tile = slice(start, start + 2)
    score = q[2] @ k[tile].T
    new = torch.maximum(maximum, score.max())
    power = (score - new).exp()
    shrink = (maximum - new).exp()  # 0 at first: nothing was added yet
    total = total * shrink + power.sum()
    weighted = weighted * shrink + power @ v[tile]
    maximum = new
    print(
        f"keys {start} and {start + 1}: scores {score.tolist()}, "
        f"maximum {maximum:.0f}, sum {total:.3f}, earlier sums times "
        f"{shrink:.3f}"
    )
assert torch.allclose(weighted / total, (weights @ v)[2])

# %%
# Only the maximum, the sum and one weighted sum of values are kept, whatever
# the number of keys. The division comes last, once a row.
#
# A product of two tiles
# ----------------------
#
# Who multiplies?
#
# Scores are a product of matrices. A GPU has hardware for these, the *Tensor
# Cores*: four of them in each streaming multiprocessor (SM). ``tl.dot(a, b)``
# multiplies two tiles with them.
#
# They are fast because they use each number many times. A program of ours has
# a tile of 128 queries, and takes 64 keys at a time. The product of both tiles
# uses each number of a query 64 times, and each number of a key 128 times,
# while both stay on the chip.
# And they are fast because the numbers are short. By the data sheet an H100
# multiplies 989 TFLOP/s in 16 bits, 495 in TF32, a float32 whose fraction was
# cut to 10 bits, and 67 in float32, without Tensor Cores.
# So the operands of all products here have 16 bits. What the products add up
# is float32.
#
# The forward kernel
# ------------------
#
# How does a tile come to the chip? Three lines of the kernel below say
# ``load`` without an address and without a mask.
# A *tensor descriptor* knows where a tensor lies, its shape, and the shape of
# a tile. A program asks for the tile that begins at an index. On an H100 a
# unit of the SM, the *Tensor Memory Accelerator* (TMA), then fetches all of
# it, and gives zeros where the tensor has ended.
#
# A program takes ``TILE_Q`` queries of one head, and loops over its keys.


LOG2E = 1.4426950408889634  # a GPU has an instruction for powers of 2


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
    scale,  # c, times LOG2E: our powers are powers of 2
    D: tl.constexpr,  # head dimension
    TILE_Q: tl.constexpr,  # queries of a program
    TILE_K: tl.constexpr,  # keys of a step
    WHOLE: tl.constexpr,  # whether the last tile of keys is full
    STAGES: tl.constexpr,  # tiles of keys and values on their way
):
    # Which queries are ours? The programs of a head stand together, so that
    # its keys and values stay in L2 for all of them.
    tiles = tl.cdiv(queries, TILE_Q)
    first = tl.program_id(0) % tiles * TILE_Q
    lead = tl.program_id(0) // tiles
    batch = lead // heads
    head = lead % heads
    q = q_desc.load([batch, head, first, 0]).reshape(TILE_Q, D)

    # Of each query a maximum, a sum, and a sum of weighted values.
    maximum = tl.full((TILE_Q,), float("-inf"), tl.float32)
    total = tl.zeros((TILE_Q,), tl.float32)
    weighted = tl.zeros((TILE_Q, D), tl.float32)

    for start in tl.range(0, keys, TILE_K, num_stages=STAGES):
        # A tile of scores: TILE_Q rows, and a column for each key.
        k = k_desc.load([batch, head, start, 0]).reshape(TILE_K, D)
        score = tl.dot(q, k.T)
        if not WHOLE:
            # Keys that do not exist are zeros. Their weight must be 0.
            key = start + tl.arange(0, TILE_K)
            score = tl.where(key[None, :] < keys, score, float("-inf"))

        # Powers, none above 1. The multiplication and the subtraction are
        # one instruction.
        new = tl.maximum(maximum, tl.max(score, axis=1) * scale)
        power = tl.exp2(score * scale - new[:, None])

        # What was added up before shrinks to the new maximum.
        shrink = tl.exp2(maximum - new)
        total = total * shrink + tl.sum(power, axis=1)
        weighted = weighted * shrink[:, None]

        # The powers become an operand, so they are rounded to 16 bits.
        v = v_desc.load([batch, head, start, 0]).reshape(TILE_K, D)
        weighted = tl.dot(power.to(v.dtype), v, weighted)
        maximum = new

    # The only division. The descriptor stores no queries that do not exist.
    y = weighted / total[:, None]
    y = y.to(y_desc.dtype).reshape(1, 1, TILE_Q, D)
    y_desc.store([batch, head, first, 0], y)

    # The logarithm of the sum of all powers, as they would be without a
    # maximum.
    row = lead.to(tl.int64) * queries
    query = first + tl.arange(0, TILE_Q)
    lse = maximum + tl.log2(total)
    tl.store(lse_ptr + row + query, lse, mask=query < queries)


# %%
# ``tl.dot(power, v, weighted)`` adds to ``weighted`` while it multiplies.
#
# Each row keeps one number for the backward pass, the *log-sum-exp*: with it
# :math:`p_{ij} = 2^{c s_{ij} - \mathrm{lse}_i}`, without a maximum and without
# a sum.
#
# How large is a tile? The weighted sums of a program stay in registers. With
# ``TILE_Q`` = 128 and ``D`` = 128 the sums are 16384 numbers of 4 bytes. That
# is 128 of the 255 registers that each thread of 4 warps may have, and a tile
# of scores takes 64 more. Queries, keys and values are in shared memory, where
# Tensor Cores read them.

PLANS = {
    # D: queries, keys, warps, stages
    16: (128, 64, 4, 3),
    32: (128, 64, 4, 3),
    64: (64, 128, 4, 2),
    128: (128, 64, 4, 2),
}


def warps_here(warps):
    """Before the H100 operands took registers, too, not just results."""
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


q = torch.randn(2, 2, 150, 32, device=DEVICE, dtype=torch.float16)
k = torch.randn(2, 2, 200, 32, device=DEVICE, dtype=torch.float16)
v = torch.randn(2, 2, 200, 32, device=DEVICE, dtype=torch.float16)
y, lse = forward(q, k, v, 32**-0.5, plan_forward(32))
exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double())
print(f"largest error, forward: {(y - exact).abs().max():.1e}")
assert (y - exact).abs().max() < 2e-3

# %%
# How fast is it?
# ---------------
#
# We measure 16384 tokens and 16 heads of 128 numbers, as sequences of 512 to
# 16384 tokens: the shorter they are, the more of them. What counts are the
# operations of both products, :math:`4 N^2 D` for each head, over the time.
#
# What can we hope for? Not for the data sheet: a card under this load lowers
# its clock. So the ceiling is a product of two matrices of 8192 × 8192 by
# PyTorch, which calls NVIDIA's library *cuBLAS*, timed beside the rest.
#
# A card that has just worked hard is slower than one that has rested. So all
# lines take turns, 15 times.

# %%

# Scaffold: the clock, in turns.


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

# Scaffold: inputs, and who attends.

TOKENS = 16384


def inputs(N, D, dtype):
    """query, key, value and dy: TOKENS tokens as sequences of N."""
    heads = 2048 // D
    return [
        torch.randn(
            TOKENS // N, heads, N, D, device=DEVICE, dtype=dtype
        ).requires_grad_()
        for _ in range(4)
    ]


def formula(query, key, value):
    """Attention as it is written in a book."""
    scores = query @ key.mT * query.shape[-1] ** -0.5
    return torch.softmax(scores, -1) @ value


def with_backend(backend):
    """PyTorch's function, by a library of this name."""

    def function(query, key, value):
        with torch.nn.attention.sdpa_kernel(backend):
            return F.scaled_dot_product_attention(query, key, value)

    return function


def compiled_formula():
    torch._dynamo.reset()
    # We run a backward pass many times, so torch.compile must not reuse the
    # memory of what the forward pass saved for it.
    torch._functorch.config.donated_buffer = False
    return torch.compile(formula, dynamic=False)


NAMES = {
    "triton": "Triton",
    "sdpa-cudnn": "cuDNN, by PyTorch",
    "torch": "FlashAttention-2, by PyTorch",
    "torch.compile": "The formula, torch.compile",
    "formula": "The formula",
    "cublas": "A product of matrices",
}
FEW = ["triton", "sdpa-cudnn", "torch", "cublas"]


def functions(ours, lines):
    """Name of a line -> a function of query, key and value."""
    backends = torch.nn.attention.SDPBackend
    found = {
        "triton": ours,
        "sdpa-cudnn": with_backend(backends.CUDNN_ATTENTION),
        "torch": with_backend(backends.FLASH_ATTENTION),
    }
    if "formula" in lines:
        found["formula"] = formula
        found["torch.compile"] = compiled_formula()
    return found


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

# Scaffold: attention forward, a benchmark.


def our_forward(query, key, value):
    D = query.shape[-1]
    y, _ = forward(query, key, value, D**-0.5, plan_forward(D))
    return y


@functools.cache  # all lines in turns; then each is asked for its own
def forward_speeds(N, D, dtype, lines):
    q, k, v, _ = (t.detach() for t in inputs(N, D, dtype))
    calls = {
        name: functools.partial(function, q, k, v)
        for name, function in functions(our_forward, lines).items()
    }
    return speeds(2, calls, N)


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=[512, 1024, 2048, 4096, 8192, 16384],
        x_log=True,
        xlabel="N (queries, and keys)",
        line_arg="provider",
        line_vals=list(NAMES),
        line_names=list(NAMES.values()),
        ylabel="TFLOP/s",
        plot_name="attention-forward",
        args={"D": 128, "dtype": torch.float16, "mode": "forward"},
    )
)
def bench_forward(N, D, dtype, mode, provider):
    """All lines in turns, 15 times, each a CUDA graph that overwrites L2
    first; the time of a graph that only overwrites L2 is subtracted."""
    if not ON_GPU:
        return 3 * [float("nan")]  # the interpreter cannot be timed
    return forward_speeds(N, D, dtype, tuple(NAMES))[provider]


# %%

in_percent(bench_forward)

# %%
# **What the figure shows.**
# On the H100, with 128 numbers in a head, our kernel reaches 379 TFLOP/s at
# 512 keys, 541 at 4096 and 551 at 16384. From 4096 keys on that is 71% to 73%
# of what the product of matrices reaches, 760 TFLOP/s. It is 1.3 to 1.6 times
# as fast as FlashAttention-2. The formula reaches 76 to 109 TFLOP/s, so ours
# is 3.8 to 7.3 times as fast. cuDNN is faster than ours at every length: we
# reach 76% to 84% of its speed. torch.compile recognizes the formula and calls
# PyTorch's function in its place, which takes cuDNN here. So both lines are
# one.
#
# **Why do we not reach the product of matrices?**
# Because attention is more than two products. Each score also needs a power.
# An SM starts 16 powers in a clock cycle, by `NVIDIA's table
# <https://docs.nvidia.com/cuda/cuda-c-programming-guide/#arithmetic-instructions>`_,
# and does 4096 operations of products in 16 bits. A score takes 4 · 128 = 512
# operations, so its products need 1/8 of a cycle, and its power 1/16. If
# nothing else went on at the same time, the Tensor Cores would work for two
# thirds of the time, and be idle for one third.
# Two programs share an SM, so one of them may multiply while the other one
# computes powers. Nobody makes them do it in turns, however.
# `FlashAttention-3 <https://arxiv.org/abs/2407.08608>`_ does: two groups of
# warps pass each other the Tensor Cores.
#
# **Why is it slower for short sequences?**
# Each program loads its queries and stores its results, and multiplies nothing
# while it waits for the first tile of keys. There are as many programs for
# short sequences as for long ones, because the number of tokens is the same.
# So this part is a constant. 62 µs and 0.24 µs for each key fit all six times
# within 3%. To move 0.27 GB alone takes about 80 µs at 3.35 TB/s.
#
# Which limit is it?
# ------------------
#
# How do we know that this kernel should be measured in operations, and layer
# norm in bytes? The *roofline* is a picture of both limits.
# What a kernel can reach
# depends on its *intensity*, the operations for each byte that it moves.
# Left of the ridge the memory is the limit, and right of it the arithmetic.
#
# Layer norm does some 2 operations a byte. Attention with its matrix does
# :math:`4 N^2 D` operations and moves :math:`8 N^2` bytes, which is
# :math:`D / 2` operations a byte, however long it is. Without its matrix it
# moves :math:`8 N D` bytes, which is :math:`N / 2` operations a byte.

# %%

# Drawing: the roofline of an H100, and three kernels under it.

BANDWIDTH, ARITHMETIC = 3.35, 989  # TB/s and TFLOP/s, of the data sheet
plt.figure("The roofline of an H100, with three kernels", figsize=(7, 3.4))
intensity = [2.0**i for i in range(15)]
plt.loglog(
    intensity,
    [min(BANDWIDTH * i, ARITHMETIC) for i in intensity],
    color="k",
)
for name, at in (
    ("layer norm", 2),
    ("attention with\nits matrix, D = 128", 64),
    ("attention without it,\n4096 keys", 2048),
):
    height = min(BANDWIDTH * at, ARITHMETIC)
    plt.plot(at, height, "o")
    plt.annotate(
        name, (at, height), (0, -12), textcoords="offset points", va="top"
    )
plt.xlabel("operations per byte of memory")
plt.ylabel("TFLOP/s")
plt.ylim(1, 2000)
plt.show()

# %%
# So with its matrix attention is left of the ridge: it reaches at most a fifth
# of what an H100 can compute. Without its matrix it is right of the ridge.
#
# What the backward pass needs
# ----------------------------
#
# How do gradients come back through a softmax that was never written?
#
# Four steps, for one query. Let ``dy`` be the gradient of its result.
#
# - The result is :math:`y = \sum_j p_j v_j`, so each value gets
#   :math:`dv_j = p_j \, dy`, added up over all queries, and each weight gets
#   :math:`dp_j = dy \cdot v_j`.
# - Softmax gives each score :math:`ds_j = p_j (dp_j - \delta)`, where
#   :math:`\delta = \sum_k p_k \, dp_k` is what the row has in common.
# - A score is :math:`s_j = c \, q \cdot k_j`, so the query gets
#   :math:`dq = c \sum_j ds_j k_j`,
# - and each key gets :math:`dk_j = c \, ds_j q`, added up over all queries.
#
# The number :math:`\delta` looks as if it needed the whole row. It does not:
# :math:`\sum_k p_k (dy \cdot v_k) = dy \cdot \sum_k p_k v_k = dy \cdot y`. It
# is a scalar product of two rows that are in memory.
#
# Let us hold these formulas against autograd, in float64.

c = 0.5
q, k, v = (
    torch.randn(length, 8, dtype=torch.float64, requires_grad=True)
    for length in (3, 4, 4)
)
p = (c * q @ k.T).softmax(1)
y = p @ v
dy = torch.randn_like(y)
y.backward(dy)
with torch.no_grad():
    delta = (dy * y).sum(1, keepdim=True)
    ds = p * (dy @ v.T - delta)
    assert torch.allclose(v.grad, p.T @ dy)
    assert torch.allclose(q.grad, c * ds @ k)
    assert torch.allclose(k.grad, c * ds.T @ q)
print("dq, dk and dv are those of autograd")

# %%
# So there are five products: the scores again, dp, and the three gradients.
# All but the scores need a matrix of queries and keys. Each tile of it can be
# computed from ``q``, ``k`` and ``lse`` when it is needed, as in the forward
# pass. That is called *recomputation*.
#
# ``dv`` and ``dk`` add up over queries, ``dq`` over keys. A program that holds
# keys in registers and loops over queries adds up ``dk`` and ``dv`` without
# anybody's help, but has only a part of each ``dq``. So we take two kernels:
# one whose programs have keys, and one whose programs have queries. Both
# compute scores and ``dp``, so together they have seven products in place of
# five. `The next page <02-backward.html>`_ asks whether that is worth it.
#
# A first kernel computes :math:`\delta`.


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


# %%
# The next kernel has keys. Its tiles of scores stand on their side: a row is a
# key, and a column a query. So powers are the left operand of the product for
# ``dv`` as they come, and no tile has to be transposed on its way.


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
    scale,  # c
    log2e,  # of powers of 2 it is the unit
    D: tl.constexpr,
    TILE_Q: tl.constexpr,  # queries of a step
    TILE_K: tl.constexpr,  # keys of a program
    STAGES: tl.constexpr,
):
    # Which keys are ours?
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
        # Powers again: no maximum and no sum is needed. Queries that do not
        # exist are zeros, and so is their dy: they add nothing.
        q = q_desc.load([batch, head, start, 0]).reshape(TILE_Q, D)
        query = start + tl.arange(0, TILE_Q)
        mask = query < queries
        lse = tl.load(lse_ptr + row + query, mask=mask, other=0)
        score = tl.dot(k, q.T)
        p = tl.exp2(score * (scale * log2e) - lse[None, :])

        # dv = sum of p dy
        dy = dy_desc.load([batch, head, start, 0]).reshape(TILE_Q, D)
        dv = tl.dot(p.to(dy.dtype), dy, dv)

        # ds = p (dp - delta), and dk = sum of ds q
        delta = tl.load(delta_ptr + row + query, mask=mask, other=0)
        dp = tl.dot(v, dy.T)
        ds = p * (dp - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk)

    dk = (dk * scale).to(dk_desc.dtype).reshape(1, 1, TILE_K, D)
    dv = dv.to(dv_desc.dtype).reshape(1, 1, TILE_K, D)
    dk_desc.store([batch, head, first, 0], dk)
    dv_desc.store([batch, head, first, 0], dv)


# %%
# The last kernel has queries, as the forward kernel.


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
    scale,  # c
    log2e,
    D: tl.constexpr,
    TILE_Q: tl.constexpr,  # queries of a program
    TILE_K: tl.constexpr,  # keys of a step
    WHOLE: tl.constexpr,  # whether the last tile of keys is full
    STAGES: tl.constexpr,
):
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
        k = k_desc.load([batch, head, start, 0]).reshape(TILE_K, D)
        score = tl.dot(q, k.T)
        p = tl.exp2(score * (scale * log2e) - lse[:, None])
        if not WHOLE:
            # A key of zeros adds nothing, unless its power is infinite.
            key = start + tl.arange(0, TILE_K)
            p = tl.where(key[None, :] < keys, p, 0)
        v = v_desc.load([batch, head, start, 0]).reshape(TILE_K, D)
        dp = tl.dot(dy, v.T)
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq)

    dq = (dq * scale).to(dq_desc.dtype).reshape(1, 1, TILE_Q, D)
    dq_desc.store([batch, head, first, 0], dq)


# %%
# Both kernels take tiles of 64 queries and 64 keys, and 4 warps. Where a head
# has 64 numbers or fewer, a tile has half the bytes, and there is room in
# shared memory for a third one on its way.


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
# Into autograd
# -------------
#
# What is left is to save the right tensors, and to say which calls these
# kernels take.
#
# A descriptor wants neighbors in the last dimension, and strides of a multiple
# of 16 bytes. Most layouts of models are so: also that of a tensor (batch,
# length, heads, head dimension) whose dimensions were swapped. Others are
# copied.

# %%

# Scaffold: layouts, and which arguments are taken.


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
    def forward(ctx, query, key, value, scale):
        q = for_descriptors(query)
        k = for_descriptors(key)
        v = for_descriptors(value)
        y, lse = forward(q, k, v, scale, plan_forward(q.shape[-1]))
        ctx.save_for_backward(q, k, v, y, lse)
        ctx.scale = scale
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        q, k, v, y, lse = ctx.saved_tensors
        dy = for_descriptors(dy.contiguous())
        dq, dk, dv = backward(dy, q, k, v, y, lse, ctx.scale)
        return dq, dk, dv, None


def attention(query, key, value, scale=None):
    """What F.scaled_dot_product_attention gives without a mask.

    query is (batch, heads, queries, D), key and value are (batch, heads,
    keys, D), all in float16 or all in bfloat16. Without a scale it is one over
    the root of D.
    """
    if scale is None:
        scale = query.shape[-1] ** -0.5
    check_arguments(query, key, value, scale)
    if not ON_GPU and query.dtype == torch.bfloat16:
        # The interpreter multiplies the bits of bfloat16 as whole numbers.
        given = (t.float() for t in (query, key, value))
        return _Attention.apply(*given, scale).to(query.dtype)
    return _Attention.apply(query, key, value, scale)


# %%
# Is it right? We compare with the formula in float64, and ask how far each
# number is off, as a share of the largest number of its tensor.
# Powers and ``ds`` were rounded to 16 bits before they were multiplied, which
# is half of 0.1% for each of them.


def check(batch, heads, queries, keys, D, dtype=torch.float16):
    """The largest error of y, dq, dk and dv, compared with float64."""
    ours, exact = [], []
    for length in (queries, keys, keys):
        t = torch.randn(batch, heads, length, D, device=DEVICE).to(dtype)
        ours.append(t.clone().requires_grad_())
        exact.append(t.double().requires_grad_())
    dy = torch.randn(batch, heads, queries, D, device=DEVICE).to(dtype)
    y = attention(*ours)
    y.backward(dy)
    expected = formula(*exact)
    expected.backward(dy.double())
    pairs = [(y, expected)]
    pairs += [(t.grad, e.grad) for t, e in zip(ours, exact, strict=True)]
    errors = [((t - e).abs().max() / e.abs().max()).item() for t, e in pairs]
    for name, error in zip(("y", "dq", "dk", "dv"), errors, strict=True):
        assert error < 0.01, f"{name} is off by {error:.1%}"
    print("errors below 1%:", " ".join(f"{error:.2%}" for error in errors))


check(batch=1, heads=2, queries=70, keys=150, D=64)
check(batch=2, heads=1, queries=128, keys=128, D=128, dtype=torch.bfloat16)

# %%
# Are these numbers the same each time? Yes, to the last bit, and our checks
# run both passes a hundred times to see it. Each number of each result belongs
# to one program, which adds up its terms in an order that is always the same:
# the tiles from first to last.
# That is what the two extra products buy. FlashAttention-2 has one kernel for
# all gradients, in which many programs add to the same ``dq`` with atomic
# additions, in the order in which they happen to arrive. Sums of the same
# numbers in another order round differently. It has a switch for an order that
# is always the same, which costs time.
#
# How fast is the backward pass?
# ------------------------------
#
# Five products are what a backward pass needs at least, so we count
# :math:`10 N^2 D` operations for each head, though ours has seven products.
# A kernel that computes more than it must gets no credit for it.

# %%

# Scaffold: attention backward, a benchmark.


@functools.cache  # all lines in turns; then each is asked for its own
def backward_speeds(N, D, dtype, lines):
    q, k, v, dy = inputs(N, D, dtype)
    calls = {}
    for name, function in functions(attention, lines).items():
        y = function(q, k, v)
        calls[name] = functools.partial(
            torch.autograd.grad, y, (q, k, v), dy.detach(), retain_graph=True
        )
    return speeds(5, calls, N)


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=[512, 1024, 2048, 4096, 8192, 16384],
        x_log=True,
        xlabel="N (queries, and keys)",
        line_arg="provider",
        line_vals=list(NAMES),
        line_names=list(NAMES.values()),
        ylabel="TFLOP/s",
        plot_name="attention-backward",
        args={"D": 128, "dtype": torch.float16, "mode": "backward"},
    )
)
def bench_backward(N, D, dtype, mode, provider):
    """All lines in turns, 15 times, each a CUDA graph that overwrites L2
    first; the time of a graph that only overwrites L2 is subtracted."""
    if not ON_GPU:
        return 3 * [float("nan")]  # the interpreter cannot be timed
    return backward_speeds(N, D, dtype, tuple(NAMES))[provider]


# %%

in_percent(bench_backward)

# %%
# **What the figure shows.**
# On the H100 our backward pass reaches 275 TFLOP/s at 512 keys, 432 at 4096
# and 452 at 16384. It is 1.6 to 1.7 times as fast as FlashAttention-2, and 2.1
# to 2.9 times as fast as the formula. We reach 78% to 92% of cuDNN's speed,
# and most for the shortest sequences.
#
# **Why.**
# Our kernels multiply more than they are credited for: they have seven
# products where five count. At 16384 keys they do 7/5 of 452, which is 632
# TFLOP/s, or 84% of what the product of matrices reaches. So there is little
# left to gain in these kernels by themselves. cuDNN does 565 TFLOP/s. If it
# has five products, that is 75% of the product of matrices: its kernel is
# slower than ours, and has less to do.
#
# **What follows.**
# A faster backward pass needs five products. Then the program that has keys
# must give each part of ``dq`` to somebody who adds it up.
#
# Half as many numbers in a head
# ------------------------------
#
# What changes with 32 heads of 64 numbers in place of 16 of 128?
#
# A product with 64 numbers has half the operations for each score, and a score
# still needs its power. So a larger share of the time goes into what Tensor
# Cores do not do.

# %%

# Scaffold: heads of 64 numbers, two benchmarks.


def of_64_numbers(plot_name, mode):
    return triton.testing.Benchmark(
        x_names=["N"],
        x_vals=[512, 1024, 2048, 4096, 8192, 16384],
        x_log=True,
        xlabel="N (queries, and keys)",
        line_arg="provider",
        line_vals=FEW,
        line_names=[NAMES[name] for name in FEW],
        ylabel="TFLOP/s",
        plot_name=plot_name,
        args={"D": 64, "dtype": torch.float16, "mode": mode},
    )


@triton.testing.perf_report(of_64_numbers("attention-forward-64", "forward"))
def bench_forward_64(N, D, dtype, mode, provider):
    """All lines in turns, 15 times, each a CUDA graph that overwrites L2
    first; the time of a graph that only overwrites L2 is subtracted."""
    if not ON_GPU:
        return 3 * [float("nan")]  # the interpreter cannot be timed
    return forward_speeds(N, D, dtype, tuple(FEW))[provider]


@triton.testing.perf_report(of_64_numbers("attention-backward-64", "backward"))
def bench_backward_64(N, D, dtype, mode, provider):
    """All lines in turns, 15 times, each a CUDA graph that overwrites L2
    first; the time of a graph that only overwrites L2 is subtracted."""
    if not ON_GPU:
        return 3 * [float("nan")]  # the interpreter cannot be timed
    return backward_speeds(N, D, dtype, tuple(FEW))[provider]


# %%

in_percent(bench_forward_64)

# %%

in_percent(bench_backward_64)

# %%
# **What both figures show.**
# On the H100 our forward pass reaches 462 TFLOP/s at 16384 keys, where heads
# of 128 numbers had 551. From 2048 keys on it is at 97% to 103% of cuDNN's
# speed. The backward pass reaches 368 TFLOP/s there, and is at 106% of cuDNN's
# speed at 512 keys and at 80% at 16384.
#
# **Why.**
# A score takes 4 · 64 = 256 operations of products now, 1/16 of a cycle, and
# its power takes 1/16 of a cycle as before. Whoever does one after the other
# leaves the Tensor Cores idle for half of the time. That holds for cuDNN as
# well, whose forward pass loses more than ours.
#
# What a step needs of memory
# ---------------------------
#
# Time was one reason not to write the matrix. The other one is room: what the
# backward pass needs of it has to be kept until then, in each layer of a
# model.
# Here is the most memory that a forward and a backward pass take at a time,
# beside their inputs.

# %%

# Scaffold: memory, a benchmark.


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=[1024, 2048, 4096, 8192],
        x_log=True,
        y_log=True,
        xlabel="N (queries, and keys)",
        line_arg="provider",
        line_vals=["triton", "formula"],
        line_names=["Triton", "The formula"],
        ylabel="GB of memory",
        plot_name="attention-memory",
        args={
            "D": 128, "dtype": torch.float16, "mode": "forward and backward"
        },
    )
)  # fmt: skip
def bench_memory(N, D, dtype, mode, provider):
    """The most memory that PyTorch allocated while a forward and a backward
    pass ran, beside that of their inputs."""
    if not ON_GPU:
        return 3 * [float("nan")]
    function = {"triton": attention, "formula": formula}[provider]
    q, k, v, dy = inputs(N, D, dtype)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = function(q, k, v)
    torch.autograd.grad(y, (q, k, v), dy.detach())
    torch.cuda.synchronize()
    most = (torch.cuda.max_memory_allocated() - before) / 1e9
    return most, most, most


# %%

bench_memory.run(show_plots=ON_GPU)

# %%
# **What the figure shows.**
# On the H100 our function takes 0.27 GB at every length: the results, and the
# three gradients. The formula takes 2.3 GB at 1024 keys and 17.3 GB at 8192.
# It doubles with the length, because the matrix is as long as it is wide and
# there are half as many of them.
#
# Where PyTorch is better
# -----------------------
#
# On the H100, where PyTorch calls cuDNN, it is ahead of this page nearly
# everywhere:
#
# - Forward, with 128 numbers in a head, our speed is 79% of cuDNN's at 1024
#   keys and 83% at 16384.
# - Backward it is 84% and 80%.
# - With 64 numbers in a head we are level with it forward at 4096 keys and
#   more, and behind it backward, where we reach 80% at 16384.
#
# It also does what this page leaves out: causal attention, fewer heads of keys
# than of queries, head dimensions that are no power of two, and dropout.
#
# What does this page have, then? Some 200 lines that you can read, change and
# train with. An attention of your own, with a bias that depends on the
# distance, say, or with another function in place of the power, is a change
# of two lines in three kernels.
#
# Exercise
# --------
#
# **Exercise 1: nobody looks ahead.**
# A language model must not see the words that it has to predict: query ``i``
# attends to the keys up to ``i`` alone. This is called *causal* attention.
# Write the forward kernel for it. Keys of the future get a weight of 0, and
# tiles that have only such keys are not computed.
#
# **Hint 1.** A score of :math:`-\infty` has a weight of 0. Which queries and
# keys does a tile have?
#
# **Hint 2.** The loop over keys may end earlier. At which key? There is a
# minimum of two numbers.
#
# **Hint 3.** Does every query see a key in the first tile? If not, the
# maximum would stay :math:`-\infty`, and
# :math:`-\infty - (-\infty)` is not a number.


def exercise_1(kernel):
    """Whether a forward kernel is causal and right."""
    q, k, v = (
        torch.randn(1, 2, 150, 32, device=DEVICE, dtype=torch.float16)
        for _ in range(3)
    )
    plan = plan_forward(32)
    y = torch.zeros_like(q)
    lse = torch.empty(1, 2, 150, device=DEVICE)
    kernel[(triton.cdiv(150, plan["TILE_Q"]) * 2,)](
        q_desc=tiles_of(q, plan["TILE_Q"]),
        k_desc=tiles_of(k, plan["TILE_K"]),
        v_desc=tiles_of(v, plan["TILE_K"]),
        y_desc=tiles_of(y, plan["TILE_Q"]),
        lse_ptr=lse,
        heads=2,
        queries=150,
        keys=150,
        scale=32**-0.5 * LOG2E,
        D=32,
        WHOLE=False,
        **plan,
    )
    expected = F.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), is_causal=True
    )
    error = (y - expected).abs().max().item()
    print(f"exercise 1: largest error {error:.1e}")
    return error < 2e-3


exercise_1(_attention_fwd)  # attends to all keys

# %%

# Solution 1


@triton.jit
def _attention_fwd_causal(
    q_desc,
    k_desc,
    v_desc,
    y_desc,
    lse_ptr,
    heads,
    queries,
    keys,
    scale,
    D: tl.constexpr,
    TILE_Q: tl.constexpr,
    TILE_K: tl.constexpr,
    WHOLE: tl.constexpr,
    STAGES: tl.constexpr,
):
    tiles = tl.cdiv(queries, TILE_Q)
    first = tl.program_id(0) % tiles * TILE_Q
    lead = tl.program_id(0) // tiles
    batch = lead // heads
    head = lead % heads
    query = first + tl.arange(0, TILE_Q)
    q = q_desc.load([batch, head, first, 0]).reshape(TILE_Q, D)
    maximum = tl.full((TILE_Q,), float("-inf"), tl.float32)
    total = tl.zeros((TILE_Q,), tl.float32)
    weighted = tl.zeros((TILE_Q, D), tl.float32)

    # New: our last query sees no key after itself. Key 0 is in the first
    # tile, and every query sees it.
    end = tl.minimum(keys, first + TILE_Q)
    for start in tl.range(0, end, TILE_K, num_stages=STAGES):
        k = k_desc.load([batch, head, start, 0]).reshape(TILE_K, D)
        score = tl.dot(q, k.T)
        # New: keys after the query. Those that do not exist are among them
        # for every query that exists.
        key = start + tl.arange(0, TILE_K)
        seen = key[None, :] <= query[:, None]
        score = tl.where(seen, score, float("-inf"))
        new = tl.maximum(maximum, tl.max(score, axis=1) * scale)
        power = tl.exp2(score * scale - new[:, None])
        shrink = tl.exp2(maximum - new)
        total = total * shrink + tl.sum(power, axis=1)
        weighted = weighted * shrink[:, None]
        v = v_desc.load([batch, head, start, 0]).reshape(TILE_K, D)
        weighted = tl.dot(power.to(v.dtype), v, weighted)
        maximum = new

    y = weighted / total[:, None]
    y = y.to(y_desc.dtype).reshape(1, 1, TILE_Q, D)
    y_desc.store([batch, head, first, 0], y)
    row = lead.to(tl.int64) * queries
    lse = maximum + tl.log2(total)
    tl.store(lse_ptr + row + query, lse, mask=query < queries)


assert exercise_1(_attention_fwd_causal)

# %%
# What we learned
# ---------------
#
# These are the ways to compute attention on this page, with their speeds on
# the H100 at 4096 keys and 128 numbers in a head, forward and backward:
#
# - **The formula** writes a matrix of all queries and keys, twice. It reaches
#   85 and 156 TFLOP/s, and takes 8.7 GB of memory at this length.
# - **FlashAttention-2** keeps the matrix on the chip, as we do. It was written
#   for the A100, whose Tensor Cores take their operands from registers. It
#   reaches 353 and 277 TFLOP/s.
# - **Ours** multiplies from shared memory, with tiles that the TMA fetches. It
#   has seven products backward, and reaches 541 and 432 TFLOP/s.
# - **cuDNN** reaches 651 and 539 TFLOP/s.
# - **A product of matrices** without anything around it reaches 760 TFLOP/s.
#
# And for kernels in general:
#
# - What divides by a sum can be added up before the sum is known.
# - One number a row, its log-sum-exp, stands for a whole row of weights.
# - A number that was not kept can be computed again. Where memory is the limit
#   that is faster than to read it.
# - Before you write a kernel, count its operations and its bytes. They say
#   which limit is near, and in which unit to measure.
# - Tensor Cores wait for everything that is not a product.
#
# **Next:** `Softmax of any width <../norms-and-losses/05-wide-softmax.html>`_
# has rows for which one program is not enough.
