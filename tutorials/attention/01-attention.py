r"""
Attention without its matrix
============================

Does attention need a matrix of all queries and all keys?
It does not: a program takes the keys tile by tile and keeps a maximum, a sum
and a weighted sum of values, and the backward pass computes the tiles again.

.. math:: y_i = \sum_j p_{ij} v_j, \qquad
   p_{ij} = \frac{e^{s_{ij} - m_i}}{\sum_k e^{s_{ik} - m_i}}, \qquad
   s_{ij} = c \, q_i \cdot k_j, \qquad m_i = \max_j s_{ij}

The numbers :math:`s` form a matrix with a row for each query and a column for
each key, and so do the numbers :math:`p`.
With 16384 queries, as many keys, and 16 heads, one such matrix takes 8.6 GB in
16 bits. The queries, keys, values and results together take 0.27 GB.
On this page we write attention so that the matrix never leaves the chip, in
both passes, and we find out how close our kernels come to what a GPU can
multiply.

**What you will learn**

- How to add up values weighted by a softmax before you know its sum.
- What ``tl.dot`` asks of its operands, and why they have 16 bits.
- Why the backward pass needs only one number of each row of the matrix, the
  logarithm of its sum.
- How the gradients of queries, keys and values follow from the formulas, and
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
# In a language model each token has a *query*, a *key* and a *value*, which
# are short rows of numbers. A query asks all keys how well they fit. The
# answer is a *score*, the dot product of the query and a key. Softmax turns
# the scores of a query into weights, and its result is the weighted sum of the
# values.
# Here are three queries, and four keys with their values. Each of them has two
# numbers: we say that their *head dimension* is 2.

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
# Models also multiply the scores by a number, the :math:`c` of the formula. It
# is one over the square root of the head dimension, so that longer rows don't
# get larger scores. In our small example it is 1.
# And models do all this several times side by side, in *heads*, for each
# sequence of a batch. So their tensors have four dimensions: (batch, heads,
# length, head dimension).
#
# What does the matrix cost?
# --------------------------
#
# How many bytes does it take to do this with three calls of PyTorch? The first
# product writes the matrix of scores. Softmax reads it and writes the weights,
# and the second product reads those.
# Below we count the bytes for 16384 tokens: 16 sequences of 1024, 4 of 4096,
# or a single one.

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
# A matrix of this size is written and read twice: first the scores, then the
# weights. At 16384 keys that is 34 GB, against 0.27 GB of everything else.
#
# And what does the arithmetic cost? A score is a sum of 128 products, and a
# multiplication and an addition count as two operations. So one head needs
# 2 · 128 · 16384² operations for its scores, and as many for the weighted sums
# of values. For 16 heads both products together take 2.2 · 10¹² operations.
# By its data sheet an H100 does up to 989 · 10¹² operations in a second, and
# moves 3.35 TB. So the arithmetic takes at least 2.2 ms, and the matrix alone
# takes at least 10.3 ms to move.
#
# A sum that shrinks
# ------------------
#
# How can a program weigh values if it does not know the sum of the row yet?
#
# It can use a maximum and a sum that are right for the keys it has seen so
# far. In `Softmax, both passes <../norms-and-losses/03-softmax.html>`_ each
# part of a row has such a pair: its maximum :math:`m`, and the sum of the
# *powers* :math:`e^{s - m}` of its scores. When a later part has a larger
# maximum, the earlier sum shrinks: it is multiplied by
# :math:`e^{m_{\mathrm{old}} - m_{\mathrm{new}}}`.
# Attention has one thing more, the sum of the values, each times its power.
# It shrinks by the same factor.
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
# The second tile has a larger maximum, 3 instead of 2, so what was added up
# before is multiplied by :math:`e^{2 - 3}`, which is 0.368.
# However many keys there are, we keep only the maximum, the sum and one
# weighted sum of values. We divide by the sum once, at the end of the row.
#
# A product of two tiles
# ----------------------
#
# How does a GPU multiply so fast?
#
# The scores of many queries and many keys are a product of two matrices. A GPU
# has hardware for these products, the *Tensor Cores*: there are four of them
# in each streaming multiprocessor (SM). Triton's ``tl.dot(a, b)`` multiplies
# two tiles with them. As with ``@`` in PyTorch, ``a`` has as many columns as
# ``b`` has rows; all sides must be at least 16, and ``tl.dot(a, b, c)`` adds
# the product to ``c``.
#
# Our tiles of queries and keys both have rows of ``D`` numbers, the head
# dimension. So scores are ``tl.dot(q, k.T)``. The ``.T`` costs nothing: the
# tile stays where it is in shared memory, and Tensor Cores of an H100 can read
# it by rows or by columns.
#
# Tensor Cores are fast because they use each number many times. A program of
# ours has a tile of 128 queries, and takes 64 keys at a time. The product of
# both tiles uses each number of a query 64 times, and each number of a key 128
# times, while both stay on the chip.
# They are also fast because the numbers are short. By the data sheet an H100
# does 989 TFLOP/s in 16 bits. It does 495 in TF32, which is float32 with the
# fraction cut to 10 bits, and 67 in float32, without Tensor Cores.
# So the operands of all our products have 16 bits, and the sums of products
# are float32.
#
# The forward kernel
# ------------------
#
# Which part of the matrix does a program compute? A program takes ``TILE_Q``
# queries of one head, and goes through all keys of this head, ``TILE_K`` at a
# time. So it computes a row of tiles, and has one of them at any moment.

# %%

# Drawing: the tiles of scores that a program of the forward kernel visits.

plt.figure(
    "The matrix of scores in tiles of queries and keys: a program has a row "
    "of tiles, computes one after the other, and keeps a maximum, a sum and a "
    "weighted sum of values for each query",
    figsize=(7.5, 2.9),
)
for row in range(4):
    for column in range(6):
        color = "none"
        if row == 1:
            color = "C1" if column == 2 else "C0"
        plt.gca().add_patch(
            plt.Rectangle(
                (column, -row),
                0.94,
                0.9,
                facecolor=color,
                edgecolor="gray",
                alpha=0.3 if row == 1 and column > 2 else 1,
            )
        )
for column, text in enumerate(["done"] * 2 + ["now"] + ["later"] * 3):
    plt.text(
        column + 0.47,
        -0.55,
        text,
        color="black" if text == "later" else "white",
        ha="center",
        va="center",
    )
plt.text(3, 1.1, "keys, in tiles of TILE_K", ha="center", va="bottom")
plt.text(-0.2, -1.05, "queries,\nin tiles\nof TILE_Q", ha="right", va="center")
plt.annotate(
    "",
    xy=(6.9, -0.55),
    xytext=(6.05, -0.55),
    arrowprops={"arrowstyle": "->"},
)
plt.text(
    7,
    -0.55,
    "for each query:\nmaximum\nsum\nweighted sum",
    ha="left",
    va="center",
)
plt.axis((-1.6, 9.2, -3.1, 1.6))
plt.axis("off")
plt.show()

# %%
# How does a tile get to the chip? The three loads of the kernel below have
# neither addresses nor masks.
# They use a *tensor descriptor*, which the host makes. It knows where a tensor
# lies, its shape, and the shape of a tile. A program only says at which index
# its tile begins. On an H100 a unit of the SM, the *Tensor Memory Accelerator*
# (TMA), then fetches the whole tile, and fills in zeros beyond the end of the
# tensor.
# Our tensors have four dimensions, so an index has four numbers, and a tile
# comes as (1, 1, ``TILE_Q``, ``D``). We want a matrix of it, and
# ``.reshape(TILE_Q, D)`` drops the two ones.
#
# What we call a power is a power of :math:`e`, and a GPU has an instruction
# for powers of 2. Both are the same once the score is multiplied by
# :math:`\log_2 e`, because :math:`e^s = 2^{s \log_2 e}`. The scores have to be
# multiplied by :math:`c` anyway. So the host multiplies both numbers and
# passes the product as ``scale``, and a kernel multiplies only once.


LOG2E = 1.4426950408889634  # the logarithm of e, to the base 2


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


# %%
# ``tl.dot(power, v, weighted)`` needs no instruction for its addition: Tensor
# Cores add to ``weighted`` while they multiply.
#
# Each query saves one number for the backward pass, its *log-sum-exp*
# :math:`\mathrm{lse}_i = \log_2 \sum_j e^{s_{ij}}`. With it a weight is
# :math:`p_{ij} = 2^{s_{ij} \log_2 e - \mathrm{lse}_i}`: subtracting the
# logarithm of the sum is the same as dividing by the sum. So the backward pass
# needs neither the maximum nor the sum.
#
# How large should a tile be? The weighted sums of a program stay in registers.
# With ``TILE_Q`` = 128 and ``D`` = 128 they are 16384 numbers of 4 bytes. That
# is 128 of the 255 registers that each thread of 4 warps may have, and a tile
# of scores takes 64 more. Queries, keys and values wait in shared memory,
# where Tensor Cores read them. A larger tile would use each key more often,
# but its sums would not fit.
# The tiles for heads of 64 and 128 numbers were the fastest of those that we
# tried on an H100.

PLANS = {
    # D: queries, keys, warps, stages
    16: (128, 64, 4, 3),
    32: (128, 64, 4, 3),
    64: (64, 128, 4, 2),
    128: (128, 64, 4, 2),
}

# %%

# Scaffold: the tiles of a head dimension, and warps for GPUs before the H100.


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


# %%


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
# We measure 16 heads of 128 numbers and 16384 tokens, as sequences of 512 to
# 16384 tokens: the shorter they are, the more of them there are. Our unit is
# TFLOP/s: we count the operations of both products, :math:`4 N^2 D` for each
# head of a sequence, and divide by the time.
#
# What can we hope for? We can't hope for the number of the data sheet, because
# a card under this load lowers its clock. So our ceiling is a product of two
# matrices of 8192 × 8192 by PyTorch, which calls NVIDIA's library *cuBLAS* for
# it. We time it together with the other lines.
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
# PyTorch's own attention function in its place. That function chooses a
# library, and by its speed it chose cuDNN here, so two lines lie on top of
# each other.
#
# On the H200 our kernel reaches 396 TFLOP/s at 512 keys, 523 at 4096 and 519
# at 16384. From 4096 keys on that is 70% to 72% of what the product of
# matrices reaches, 750 TFLOP/s. It is 1.3 to 1.6 times as fast as
# FlashAttention-2, and 3.1 to 6.2 times as fast as the formula. We reach 77%
# to 82% of cuDNN's speed. The H200 has the same SMs, so our kernel is 0.94 to
# 1.05 times as fast as on the H100. Its memory is faster, so the formula is
# 1.13 to 1.30 times as fast.
#
# **Why don't we reach the product of matrices?**
# We don't, because attention is more than two products: each score also needs
# a power. By `NVIDIA's table
# <https://docs.nvidia.com/cuda/cuda-c-best-practices-guide/index.html#arithmetic-instructions-throughput-native-arithmetic-instructions>`_
# an SM computes 16 powers in a clock cycle. Its Tensor Cores do 4096
# operations in a cycle: with 132 SMs at 1.83 GHz that is the data sheet's 989
# TFLOP/s. A score takes 4 · 128 = 512 operations, so its products need 1/8 of
# a cycle, and its power needs 1/16. If an SM did only one of the two at a
# time, its Tensor Cores would work for two thirds of the time, and wait for
# one third.

# %%

# Drawing: who works when, in one program, and in two that take turns.

plt.figure(
    "One program multiplies for 2 of 3 units of time and computes powers for "
    "1, while the Tensor Cores wait. Two programs that take turns keep the "
    "Tensor Cores busy.",
    figsize=(7.5, 2.4),
)
lines = (
    (2.4, "one program", [("C0", 0, 2), ("C1", 2, 1)], 3, 4),
    (1, "two programs,", [("C0", 0, 2), ("C1", 2, 1)], 4, 3),
    (0.2, "in turns", [("C1", 1, 1), ("C0", 2, 2)], 4, 3),
)
for height, name, parts, period, count in lines:
    plt.text(-0.2, height, name, ha="right", va="center")
    for i in range(count):
        for color, start, length in parts:
            plt.barh(
                height,
                length - 0.06,
                left=i * period + start,
                height=0.7,
                align="center",
                color=color,
            )
            plt.text(
                i * period + start + length / 2,
                height,
                "products" if color == "C0" else "powers",
                color="white",
                ha="center",
                va="center",
                fontsize=8,
            )
plt.annotate(
    "", xy=(12, -0.6), xytext=(0, -0.6), arrowprops={"arrowstyle": "->"}
)
plt.text(6, -0.7, "time", ha="center", va="top")
plt.axis((-2.6, 12.2, -1.1, 2.9))
plt.axis("off")
plt.show()

# %%
# For long sequences our kernel does somewhat better than two thirds. Two
# programs share an SM, so one of them can multiply while the other one
# computes powers. But nothing makes them take turns as in the drawing.
# `FlashAttention-3 <https://arxiv.org/abs/2407.08608>`_ does: two groups of
# warps pass the Tensor Cores back and forth. `Attention with warps that only
# load <05-warp-specialization.html>`_ tries that, and something better.
#
# **Why is it slower for short sequences?**
# Each program loads its queries, waits for the first tile of keys, and at the
# end stores its results. There are as many programs for short sequences as for
# long ones, because the number of tokens is the same. So this part of the time
# is the same, too, and what is left grows with the number of keys. Indeed, 62
# µs and 0.24 µs for each key fit all six times within 3%.
# At 512 keys those 62 µs are a third of the time. To move the 0.27 GB of
# queries, keys, values and results takes about 80 µs at 3.35 TB/s, so a part
# of it is hidden behind products even there.
#
# **Why is the formula that slow?**
# It moves matrices. As we wrote it, it moves them even more than we counted:
# the multiplication by :math:`c` is a kernel of its own, which reads all
# scores and writes them again. That makes six times 8.6 GB at 16384 keys,
# which takes at least 15.4 ms. So the formula can't do more than 143 TFLOP/s
# there. At other lengths it is about the same, because half as many keys have
# half as many operations and half as many bytes.
# This does not say why the formula is slowest at 8192 keys and fastest
# at 16384. PyTorch chooses its kernels by the length of a row, and we have not
# looked into them.
# On the H200 it is slowest at 8192 keys, too, and fastest at 1024.
#
# **What follows.**
# Not to write the matrix is what brings the most. After that the powers are
# what stands between us and the product of matrices, and we can only hide them
# behind products.
#
# Which limit is it?
# ------------------
#
# We measure this kernel in operations, and we measured layer norm in bytes.
# How do we know which of the two limits a kernel? The *roofline* is a picture
# of both limits. What a kernel can reach depends on its *intensity*, which is
# the number of operations that it does for each byte that it moves.
# An H100 can do 989 · 10¹² operations in the second in which it moves 3.35 ·
# 10¹² bytes, which is 295 operations for each byte. There the roof has its
# *ridge*. A kernel with a lower intensity is limited by memory, and one with a
# higher intensity by arithmetic.
#
# Layer norm does about 2 operations for each byte. Attention with its matrix
# does :math:`4 N^2 D` operations for a head. Each of the :math:`N^2` numbers
# has 2 bytes and moves four times, which makes :math:`8 N^2` bytes. So it does
# :math:`D / 2` operations for each byte, however long the sequence is. Without
# the matrix four tensors of :math:`N D` numbers move once, which makes
# :math:`8 N D` bytes and :math:`N / 2` operations for each byte.

# %%

# Drawing: the roofline of an H100, and three kernels under it.

BANDWIDTH, ARITHMETIC = 3.35, 989  # TB/s and TFLOP/s, of the data sheet
plt.figure("The roofline of an H100, with three kernels", figsize=(7, 3.4))
intensity = [1, ARITHMETIC / BANDWIDTH, 2**14]  # the ridge in the middle
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
# With its matrix, attention is left of the ridge: memory allows it about a
# fifth of what an H100 can compute. Without the matrix it is right of the
# ridge.
#
# What the backward pass needs
# ----------------------------
#
# How do gradients get back through a softmax that was never written down?
#
# We follow one query. Let ``dy`` be the gradient of its result.
#
# - The result is :math:`y = \sum_j p_j v_j`. So value :math:`j` gets
#   :math:`dv_j = p_j \, dy` from this query, and adds up what it gets from all
#   queries. The weight gets :math:`dp_j = dy \cdot v_j`.
# - Softmax gives each score :math:`ds_j = p_j (dp_j - \delta)`, as in
#   `Softmax, both passes <../norms-and-losses/03-softmax.html>`_. The number
#   :math:`\delta = \sum_k p_k \, dp_k` is the same for all scores of the row.
# - A score is :math:`s_j = c \, q \cdot k_j`, so the query gets
#   :math:`dq = c \sum_j ds_j k_j`.
# - Key :math:`j` gets :math:`dk_j = c \, ds_j q` from this query, and it, too,
#   adds up what it gets from all queries.
#
# The number :math:`\delta` looks as if we needed the whole row for it. We
# don't: :math:`\sum_k p_k (dy \cdot v_k) = dy \cdot \sum_k p_k v_k = dy \cdot
# y`. It is the dot product of two rows that we have in memory.
#
# Let's check these formulas against autograd, in float64.

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
# So the backward pass has five products of matrices. Two of them give matrices
# of all queries and keys: the scores once more, and ``dp``. The other three
# turn these into ``dq``, ``dk`` and ``dv``.
# We don't want to keep a matrix of all queries and keys, so we compute it
# again when we need it, tile by tile, from ``q``, ``k`` and ``lse``. That is
# called *recomputation*.
#
# Who adds up the gradients? ``dv`` and ``dk`` are sums over queries, and
# ``dq`` is a sum over keys. A program that stays with a tile of keys and goes
# through all queries adds up ``dk`` and ``dv`` by itself, but it has only a
# part of each ``dq``. A program that stays with a tile of queries is in the
# opposite position. So we write two kernels, one of each kind.

# %%

# Drawing: the tiles that a program of each backward kernel visits.

figure = plt.figure(
    "The matrix of scores, twice. A program with keys goes down a column of "
    "tiles, over all queries, and adds up dk and dv. A program with queries "
    "goes along a row of tiles, over all keys, and adds up dq.",
    figsize=(7.5, 3.3),
)
kernels = (
    ("A program with keys", (None, 2), "dk and dv", (2.47, -4.2)),
    ("A program with queries", (1, None), "dq", (6.6, -0.55)),
)
for axes, (title, (row_of_ours, column_of_ours), sums, end) in zip(
    figure.subplots(1, 2), kernels, strict=True
):
    for row in range(4):
        for column in range(6):
            ours = row == row_of_ours or column == column_of_ours
            axes.add_patch(
                plt.Rectangle(
                    (column, -row),
                    0.94,
                    0.9,
                    facecolor="C0" if ours else "none",
                    edgecolor="gray",
                )
            )
    axes.set_title(title)
    axes.text(3, 1, "keys", ha="center", va="bottom")
    axes.text(-0.2, -1.05, "queries", ha="right", va="center", rotation=90)
    begin = (6.0, -0.55) if column_of_ours is None else (2.47, -3.1)
    axes.annotate("", xy=end, xytext=begin, arrowprops={"arrowstyle": "->"})
    axes.text(
        *end,
        f" {sums}" if column_of_ours is None else sums,
        ha="left" if column_of_ours is None else "center",
        va="center" if column_of_ours is None else "top",
    )
    axes.axis((-0.9, 8, -5, 1.7))
    axes.axis("off")
plt.show()

# %%
# Both kernels compute the scores and ``dp``, so together they have seven
# products and not five. We will see what that costs.
#
# Before them, a small kernel computes :math:`\delta` for each query.


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
# A program of the next kernel has keys. It turns its tiles of scores around: a
# row belongs to a key, and a column to a query. The reason is the product for
# ``dv``, which adds up over queries. Its left operand has to be a tile of
# weights with a row for each key. The weights have just been computed, so they
# are in registers, and Tensor Cores of an H100 can take a left operand from
# there. The other way around, each tile of weights would have to be transposed
# first, and so would ``ds`` for ``dk``.


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


# %%
# A program of the last kernel has queries, like one of the forward kernel, and
# its tiles of scores lie as they do there.


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


# %%
# Both kernels take tiles of 64 queries and 64 keys, and 4 warps. Why are they
# smaller than those of the forward kernel? A program with keys has two sums,
# ``dk`` and ``dv``. With 64 keys and 128 numbers in a head they take 128
# registers of each thread, as the one sum of 128 queries did before, and the
# tiles of scores and ``dp`` take 64 more.
# Where a head has 64 numbers or fewer, a tile has half the bytes or less, and
# shared memory has room for one more that is on its way.


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
# What does PyTorch need to train with these kernels? It needs a function that
# saves the right tensors and checks its arguments.
#
# The kernels take most layouts as they are. A descriptor wants the numbers of
# a row side by side in memory, and all other strides must be a multiple of 16
# bytes. That holds for most tensors in models. For instance, it holds for one
# of (batch, length, heads, head dimension) whose two middle dimensions were
# swapped. We copy tensors with other layouts.

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
# Is it right? We compare with the formula in float64, and print the largest
# error of each tensor, as a share of its largest number.
# We must expect some error: powers and ``ds`` were rounded to 16 bits before
# they were multiplied. In float16 that changes each of them by up to 0.05%,
# and in bfloat16, which has three bits fewer, by up to 0.4%.


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
# Are these numbers the same each time? They are, to the last bit, and our
# checks run both passes a hundred times to see it. Each number of each result
# belongs to one program, and this program always adds up its terms in the same
# order, from the first tile to the last.
# That is what the two extra products buy. FlashAttention-2 has one kernel for
# all three gradients. In it many programs add to the same ``dq`` with atomic
# additions, in the order in which they happen to arrive, and the same numbers
# added up in another order round differently. It has a switch for an order
# that is always the same, which costs time and memory.
#
# How fast is the backward pass?
# ------------------------------
#
# A backward pass needs five products at least. So we count :math:`10 N^2 D`
# operations for each head, although ours has seven products: a kernel that
# computes more than it must gets no credit for it.

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
# On the H200 our backward pass reaches 296 TFLOP/s at 512 keys, 413 at 4096
# and 435 at 16384. It is 1.6 to 1.7 times as fast as FlashAttention-2, and 1.6
# to 2.0 times as fast as the formula. We reach 77% to 87% of cuDNN's speed.
#
# **Why.**
# Our kernels multiply more than they are credited for: they have seven
# products where five count. At 16384 keys they do 7/5 of 452, which is 632
# TFLOP/s, or 84% of what the product of matrices reaches. So there is little
# left to gain in these kernels by themselves. cuDNN does 565 TFLOP/s. If it
# has five products, that is 75% of the product of matrices: its kernel is
# slower than ours, and has less to do.
# On the H200 our products do 609 TFLOP/s at 16384 keys, 81% of what the
# product of matrices reaches, and cuDNN does 520, 69% of it.
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
# On the H200 our forward pass reaches 467 TFLOP/s at 16384 keys, and from 2048
# keys on it is at 99% to 103% of cuDNN's speed. The backward pass reaches 369
# TFLOP/s there, and is behind cuDNN at every length, at 96% of its speed at
# 512 keys and at 81% at 16384.
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
# The H200 shows the same numbers.
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
# On the H200 our speed is 80% of cuDNN's at 1024 keys and 80% at 16384, with
# 128 numbers in a head, and backward 82% and 84%.
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
# **Next:** `Five products or seven <02-backward.html>`_ asks who can add up
# ``dq`` so that a backward pass has no more products than it needs.
