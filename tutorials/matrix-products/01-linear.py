r"""
A linear layer, both passes
===========================

How does a linear layer of your own keep up with NVIDIA's library, forward and
backward?
One kernel computes all three of its products tile by tile and applies bias and
activation before it stores a tile, and a small kernel takes the gradient back
through both.

.. math:: y = f(z), \qquad z_{tn} = b_n + \sum_k x_{tk} w_{nk}

Most of the time of a language model goes into layers of this form. Each token
:math:`t` has a row of features. The layer gives it a new row, and each new
feature :math:`n` is a weighted sum of all the old ones. Then comes a bias
:math:`b`, and often an activation :math:`f`.
On this page we climb from the simplest kernel with ``tl.dot`` to one that
comes close to NVIDIA's library *cuBLAS*, and measure every step. Then we make
a layer of it that you can train with.

**What you will learn**

- Why a product of matrices needs tiles, and what decides how large they are.
- What brings a kernel from a fraction of cuBLAS to nearly all of it: Tensor
  Cores, the order of the tiles, loads that run ahead, tensor descriptors, and
  persistent programs.
- How the backward pass uses the same kernel for both of its products.
- How to fuse a bias and an activation with a product, what to save for the
  backward pass, and when a pass of its own is faster than a fused one.
- What to do where there are too few tokens, or too few tiles, to keep a GPU
  busy.

**What you need:** `Layer normalization, both passes
<../layer-norm/01-layer-norm.html>`_ for kernels in general, and `Loads in
flight <../layer-norm/04-loads-in-flight.html>`_ for stages. You don't need a
GPU.
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
import itertools
import types

from triton.tools.tensor_descriptor import TensorDescriptor

# %%
# Two tokens, three features
# --------------------------
#
# What does a linear layer compute?
#
# Here are two tokens with three features each, and a weight that makes two new
# features of them. Like PyTorch, we give the weight a row for each new
# feature.

x = torch.tensor([[1.0, 2.0, 3.0], [0.0, 1.0, 0.0]])
w = torch.tensor([[1.0, 0.0, 1.0], [2.0, 1.0, 0.0]])
b = torch.tensor([1.0, -5.0])

z = x @ w.T + b
y = F.relu(z)
print("z, a row for each token:")
print(z)
print("y, after the activation ReLU:")
print(y)

# %%
# The first new feature of the first token is 1 · 1 + 2 · 0 + 3 · 1 + 1 = 5.
# The second one is 1 · 2 + 2 · 1 + 3 · 0 - 5 = -1, and ReLU makes 0 of what is
# below 0.
#
# We call the number of tokens ``M``, that of old features ``K``, and that of
# new ones ``N``. PyTorch says ``in_features`` and ``out_features`` for the
# last two. Without the activation, PyTorch's ``F.linear(x, w, b)`` computes
# this.
#
# Why tiles?
# ----------
#
# A sum of ``K`` products counts as 2 ``K`` operations: a multiplication and an
# addition each. There are ``M`` × ``N`` sums, so the layer takes 2 · ``M`` ·
# ``N`` · ``K`` operations. By its data sheet, an H200 does 989 · 10¹² of them
# in a second in 16 bits, and its memory moves 4.8 · 10¹² bytes.
#
# Suppose that each sum is computed on its own. Then each product reads two
# numbers, which are 4 bytes.
# Now suppose that a program computes a *tile* of sums, 128 tokens by 256
# features. It reads a number of ``x`` once and uses it for 256 sums, and a
# number of ``w`` for 128 sums.

M, N, K = 8192, 4096, 4096
products = M * N * K
print(f"arithmetic: {2 * products / 989e12 * 1e3:.2f} ms at least")
# A number has 2 bytes, and a tile loads it once for a whole row or column of
# its sums.
for name, bytes_moved in (
    ("a sum at a time", products * 4),
    ("tiles of 16 x 16", products * (2 / 16 + 2 / 16)),
    ("tiles of 128 x 128", products * (2 / 128 + 2 / 128)),
    ("tiles of 128 x 256", products * (2 / 256 + 2 / 128)),
    ("each matrix once", 2 * (M * K + N * K + M * N)),
):
    print(
        f"{name:18}: {bytes_moved / products:6.4f} bytes a product, "
        f"{bytes_moved / 1e9:6.2f} GB, {bytes_moved / 4.8e12 * 1e3:6.2f} ms"
    )

# %%
# A sum at a time would take more than 400 times as long to read as to compute.
# With tiles of 128 × 256 it is less than three times as long. That is still
# too long, so most reads must not go to memory at all. Many programs read the
# same rows of ``x`` and ``w``, so the L2 cache can serve them.
#
# So we want large tiles. What stops us is room: the sums of a tile stay in
# registers until it is done. A tile of 128 × 256 sums in float32 takes 128 KB
# of the 256 KB of registers that a streaming multiprocessor (SM) has. A tile
# twice as large would take all of them, and nothing would be left to compute
# with.
#
# One tile a program
# ------------------
#
# How does a program compute a tile?
#
# It goes along the old features, ``TILE_K`` of them at a time. In each step it
# loads a tile of ``x`` and one of ``w``, multiplies them, and adds the product
# to its sums.

# %%

# Drawing: a program, the tiles that it reads, and the tile that it writes.

figure = plt.figure(
    "A program goes along a row of tiles of x and along a row of tiles of w. "
    "The product of each pair is added to one tile of y.",
    figsize=(7.5, 2.9),
)
pictures = (
    ("x", "old features", "tokens", 4, 4, {(1, i) for i in range(4)}),
    ("w", "old features", "new features", 3, 4, {(2, i) for i in range(4)}),
    ("y", "new features", "tokens", 4, 3, {(1, 2)}),
)
for axes, (name, along, down, rows, columns, ours) in zip(
    figure.subplots(1, 3), pictures, strict=True
):
    for row in range(rows):
        for column in range(columns):
            color = "C0" if (row, column) in ours else "none"
            if name != "y" and (row, column) in ours and column == 1:
                color = "C1"
            axes.add_patch(
                plt.Rectangle(
                    (column, -row),
                    0.94,
                    0.9,
                    facecolor=color,
                    edgecolor="gray",
                )
            )
    axes.set_title(name)
    axes.text(columns / 2, 1, along, ha="center", va="bottom", fontsize=10)
    axes.text(
        -0.2,
        0.9 - rows / 2,
        down,
        ha="right",
        va="center",
        rotation=90,
        fontsize=10,
    )
    axes.axis((-0.8, 4.2, -3.4, 1.9))
    axes.axis("off")
plt.show()

# %%
# The orange tiles are those of the second step. A row of ``w`` belongs to a
# new feature, but in the product each new feature is a column. So the kernel
# loads the tile of ``w`` *transposed*: in ``w_at``, old features go down and
# new ones across.
#
# ``tl.dot(x, w, sums)`` multiplies two tiles like ``@`` in PyTorch, and adds
# the product to ``sums``. It uses the *Tensor Cores*, of which each SM has
# four. They multiply 16-bit numbers and add them up in float32. With float32
# numbers there is a choice: Tensor Cores can multiply them after their
# fraction was cut from 23 bits to 10, which is called *TF32*, or the ordinary
# units of the SM can multiply them as they are (``"ieee"``).
#
# ``_place`` says which tile is the first, the second, and so on. With
# ``GROUP`` = 1 they go row by row. Larger groups come after the first figure.


@triton.jit
def _place(tile, rows, columns, GROUP: tl.constexpr):
    """Row and column of a tile, by its number: groups of so many rows of
    tiles, and in a group column by column."""
    first = tile // (GROUP * columns) * GROUP
    # The last group may have fewer rows.
    height = tl.minimum(rows - first, GROUP)
    place = tile % (GROUP * columns)
    return first + place % height, place // height


@triton.jit
def _one_tile(
    x_ptr,  # (M, K), contiguous
    w_ptr,  # (N, K), contiguous
    y_ptr,  # (M, N)
    M,  # tokens
    N,  # new features
    K,  # old features
    TILE_M: tl.constexpr,  # tokens of a program
    TILE_N: tl.constexpr,  # new features of a program
    TILE_K: tl.constexpr,  # old features of a step
    GROUP: tl.constexpr,  # rows of tiles in a group
    STAGES: tl.constexpr,  # num_stages of the loop: how far loads run ahead
    PRECISION: tl.constexpr,  # of float32: "tf32" or "ieee"
):
    # Which tile is ours?
    rows = tl.cdiv(M, TILE_M)
    columns = tl.cdiv(N, TILE_N)
    row, column = _place(tl.program_id(0), rows, columns, GROUP)
    token = row * TILE_M + tl.arange(0, TILE_M)
    feature = column * TILE_N + tl.arange(0, TILE_N)
    old = tl.arange(0, TILE_K)

    # Addresses of the first tiles: x as it lies, w transposed. They are 64-bit
    # numbers, because M * K may pass 2**31.
    x_at = x_ptr + token.to(tl.int64)[:, None] * K + old[None, :]
    w_at = w_ptr + feature.to(tl.int64)[None, :] * K + old[:, None]

    sums = tl.zeros((TILE_M, TILE_N), tl.float32)
    for start in tl.range(0, K, TILE_K, num_stages=STAGES):
        # What lies beyond the end counts as 0, and adds nothing to a sum.
        x_mask = (token[:, None] < M) & (old[None, :] < K - start)
        w_mask = (feature[None, :] < N) & (old[:, None] < K - start)
        x = tl.load(x_at + start, mask=x_mask, other=0)
        w = tl.load(w_at + start, mask=w_mask, other=0)
        sums = tl.dot(x, w, sums, input_precision=PRECISION)

    y_at = y_ptr + token.to(tl.int64)[:, None] * N + feature[None, :]
    y_mask = (token[:, None] < M) & (feature[None, :] < N)
    tl.store(y_at, sums, mask=y_mask)  # rounds to the type of y


def one_tile_a_program(x, w, group=1, stages=1, precision="ieee"):
    """x @ w.T with the kernel above."""
    M, K = x.shape
    N = w.shape[0]
    y = torch.empty(M, N, dtype=x.dtype, device=x.device)
    tile_m, tile_n, tile_k, warps = 128, 128, 64, 8
    if x.dtype == torch.float32:
        tile_k = 32  # as many bytes as 64 numbers of 16 bits
        if precision == "ieee":
            # Without Tensor Cores, registers hold the operands, too.
            tile_m, tile_n, warps = 64, 64, 4
    tiles = triton.cdiv(M, tile_m) * triton.cdiv(N, tile_n)
    _one_tile[(tiles,)](
        x_ptr=x,
        w_ptr=w,
        y_ptr=y,
        M=M,
        N=N,
        K=K,
        TILE_M=tile_m,
        TILE_N=tile_n,
        TILE_K=tile_k,
        GROUP=group,
        STAGES=stages,
        PRECISION=precision,
        num_warps=warps,
    )
    return y


x = torch.randn(150, 100, device=DEVICE).half()
w = torch.randn(170, 100, device=DEVICE).half()
error = (one_tile_a_program(x, w, group=2) - x.double() @ w.double().T).abs()
print(f"largest error of a tile a program: {error.max():.1e}")
# float16 has steps of 1/32 between 32 and 64, where the largest results are.
assert error.max() < 0.05

# %%
# How fast is it?
# ---------------
#
# We take 8192 tokens with 4096 features, and make 1024 to 8192 new features of
# them. Our unit is TFLOP/s: the 2 · ``M`` · ``N`` · ``K`` operations of the
# layer, divided by the time.
#
# For kernels that move bytes, the ceiling is a copy. Here it is cuBLAS, which
# PyTorch calls for ``x @ w.T``. A card under this load lowers its clock, so
# even cuBLAS does not reach what the data sheet says, and a card that has just
# worked hard is slower than one that has rested. So all lines take turns, 15
# times.

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

# Scaffold: inputs, speeds and their table.


def normal(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, device=DEVICE).to(dtype)


def inputs(M, N, K, dtype=torch.bfloat16):
    """x, w, b and dy of a layer. Sums over K features have a size of 1."""
    x = normal(M, K, dtype=dtype)
    w = (normal(N, K, dtype=torch.float32) * K**-0.5).to(dtype)
    b = normal(N, dtype=dtype)
    dy = normal(M, N, dtype=dtype)
    return x, w, b, dy


def tflops(operations, calls):
    """Name -> TFLOP/s: median, low, high. All calls take turns."""
    return {
        name: [operations / us * 1e-6 for us in (median, long, short)]
        for name, (median, short, long) in in_turns(calls).items()
    }


def in_percent(benchmark, of):
    """Draw a benchmark, and print speeds in % of those of other lines:
    ``of`` is the name of one line, or a name for each line."""
    table = benchmark.run(show_plots=ON_GPU, return_df=True)
    table = table.astype({"N": int}).set_index("N")
    table.columns = [column.split(" (")[0] for column in table.columns]
    if table.isna().all(axis=None):
        print("Timing needs a GPU; the page shows recorded figures.")
        return
    if isinstance(of, str):
        print(f"speed in % of {of}")
        of = {line: of for line in table.columns if line != of}
    else:
        print("speed in % of cuBLAS")
    percent = {
        line: 100 * table[line] / table[other] for line, other in of.items()
    }
    print(type(table)(percent).to_string(float_format="%.0f"))


# %%

# Scaffold: the first kernel, a benchmark.


@functools.cache  # all lines in turns; then each is asked for its own
def first_speeds(M, N, K, dtype):
    x, w, _, _ = inputs(M, N, K, dtype)
    x32, w32 = x.float(), w.float()
    calls = {
        "ieee": lambda: one_tile_a_program(x32, w32, precision="ieee"),
        "tf32": lambda: one_tile_a_program(x32, w32, precision="tf32"),
        "one tile": lambda: one_tile_a_program(x, w),
        "torch": lambda: x @ w.T,
    }
    return tflops(2 * M * N * K, calls)


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=[1024, 2048, 4096, 8192],
        x_log=True,
        xlabel="N (new features)",
        line_arg="provider",
        line_vals=["ieee", "tf32", "one tile", "torch"],
        line_names=["float32", "TF32", "16 bits", "cuBLAS, by PyTorch"],
        ylabel="TFLOP/s",
        plot_name="linear-first-kernel",
        args={
            "M": 8192,
            "K": 4096,
            "dtype": torch.bfloat16,
            "mode": "forward",
        },
    )
)
def bench_first(M, N, K, dtype, mode, provider):
    """All lines in turns, 15 times, each a CUDA graph that overwrites L2
    first; the time of a graph that only overwrites L2 is subtracted."""
    if not ON_GPU:
        return 3 * [float("nan")]  # the interpreter cannot be timed
    return first_speeds(M, N, K, dtype)[provider]


# %%

in_percent(bench_first, "cuBLAS, by PyTorch")

# %%
# **What the figure shows.**
# On the H200, at 4096 new features, the kernel reaches 14 TFLOP/s in float32,
# 162 with TF32, and 337 in 16 bits. It is the same kernel each time, with
# smaller tiles for longer numbers. cuBLAS reaches 807 TFLOP/s in 16 bits, so
# we are at 42% of it.
#
# **Why.**
# By the data sheet, the units for float32 do 67 TFLOP/s, and the Tensor Cores
# do 495 in TF32 and 989 in 16 bits. Numbers that are half as long also take
# half the bytes, in memory, in the caches and on the way.
#
# **What follows.**
# We stay with 16 bits. cuBLAS shows that Tensor Cores can do more than twice
# as much. They have to wait for our tiles, and the next sections are about
# bringing these in time.
#
# Which tile comes next?
# ----------------------
#
# The order in which the tiles of ``y`` are computed makes a difference,
# because programs that run at the same time share what they read. Suppose that
# one program runs on each of the 132 SMs of an H200, with a tile of 128 × 128.
# With 14336 new features there are 112 columns of tiles. Row by row, the 132
# programs have the tiles of one row and the beginning of the next. They read 2
# rows of tiles of ``x`` and all 112 of ``w``. In *groups* of 8 rows they take
# the first column of 8 tiles, then the second one, and so on. They read 8 rows
# of tiles of ``x``, and 17 of ``w``.

# %%

# Drawing: which tiles of y 22 programs compute, row by row and in groups.

figure = plt.figure(
    "The tiles of y, numbered, for 22 programs. Row by row they read tiles of "
    "2 rows and of all 16 columns; in groups of 4 rows, of 4 rows and 6 "
    "columns.",
    figsize=(7.5, 2.3),
)
for axes, (title, group) in zip(
    figure.subplots(1, 2),
    (("Row by row", 1), ("In groups of 4 rows", 4)),
    strict=True,
):
    for number in range(22):
        first = number // (16 * group) * group
        place = number % (16 * group)
        column, row = place // group, first + place % group
        axes.add_patch(
            plt.Rectangle((column, -row), 0.94, 0.9, facecolor="C0")
        )
        axes.text(
            column + 0.47,
            0.45 - row,
            str(number),
            color="white",
            fontsize=7,
            ha="center",
            va="center",
        )
    for i in range(64):
        axes.add_patch(
            plt.Rectangle(
                (i % 16, -(i // 16)),
                0.94,
                0.9,
                facecolor="none",
                edgecolor="gray",
                linewidth=0.5,
            )
        )
    axes.set_title(title)
    axes.axis((-0.2, 16.2, -3.4, 1.2))
    axes.axis("off")
plt.show()

# %%
# How much is that in bytes? A row of tiles of ``x`` or ``w`` is a *strip* of
# 128 rows. A strip of 4096 features takes 1 MB in 16 bits. We count the strips
# that a first round of 132 programs reads. L2 of an H200 holds 60 MB.

# %%

# Scaffold: the strips of a round, counted.


def strips_of_a_round(N, group, programs=132, tile=128):
    """Rows of tiles of x and of w that the first programs read."""
    columns = N // tile
    places = set()
    for number in range(programs):
        first = number // (group * columns) * group
        place = number % (group * columns)
        places.add((first + place % group, place // group))
    return len({row for row, _ in places}), len({col for _, col in places})


for N in (4096, 14336):
    for group in (1, 8):
        of_x, of_w = strips_of_a_round(N, group)
        print(
            f"{N:5} new features, groups of {group}: {of_x} strips of x and "
            f"{of_w} of w, {of_x + of_w} MB"
        )

# %%
# Now we count what really happens. NVIDIA's profiler ``ncu`` counts the
# requests that reach L2, and how many of them find their bytes there. `Layer
# normalization, both passes <../layer-norm/01-layer-norm.html>`_ shows how it
# counts.

# %%

# Scaffold: hits in L2, counted by ncu.


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=[2048, 4096, 8192, 14336],
        x_log=True,
        xlabel="N (new features)",
        line_arg="provider",
        line_vals=["triton", "rows"],
        line_names=["groups of 8", "row by row"],
        ylabel="% of L2 requests hit",
        plot_name="linear-l2-hits",
        args={
            "M": 8192,
            "K": 4096,
            "dtype": torch.bfloat16,
            "mode": "forward",
            "counter": "lts__t_sector_hit_rate.pct",
        },
    )
)
def bench_hits(M, N, K, dtype, mode, counter, provider):
    """The share of sectors that were found in L2, with tiles of 128 by 128
    and one stage."""
    if not ON_GPU:
        return 3 * [float("nan")]
    x, w, _, _ = inputs(M, N, K, dtype)
    group = 8 if provider == "triton" else 1
    one_tile_a_program(x, w, group)  # compiles
    torch.cuda.synchronize()
    with torch.cuda.nvtx.range(f"counted {provider} {N}"):
        one_tile_a_program(x, w, group)
    return (float("nan"),) * 3


# %%

bench_hits.run(show_plots=ON_GPU)

# %%
# **What the figure shows.**
# On the H200, in groups of 8 rows, 76% of the requests hit at 4096 new
# features and 79% at 14336. Row by row it is 80% and 59%.
#
# **Why.**
# At 4096 new features both orders fit into L2. Row by row a round reads 37
# strips, and even finds a little more of them there. At 14336 features row by
# row needs 114 MB, which do not fit. The programs of a round then share tiles
# of ``x``, but nearly each needs its own tiles of ``w``. When the next row of
# tiles needs these again, L2 has evicted them.
#
# This does not explain why a fifth of the requests miss at best: ``x`` and
# ``w`` have 101 MB at 4096 new features, and the programs ask for 4.3 GB, so
# 2% would have to miss, and no more. The counter doesn't say what the others
# are.
#
# **What follows.**
# We take groups of 8 rows from here on. They cost a few instructions for each
# tile.
#
# Faster loads
# ------------
#
# What else keeps the Tensor Cores waiting? Five things do, and each will be a
# line of the next figure.
#
# - **Loads do not run ahead.** Our loop loads two tiles, waits for them, and
#   multiplies. With ``STAGES`` = 3 there is room for the tiles of two more
#   steps: their loads are on the way while this step multiplies. That is
#   *pipelining*, and nothing but the number changes. (In `Loads in flight
#   <../layer-norm/04-loads-in-flight.html>`_ three stages had two slots,
#   because the row in work was in registers. Tensor Cores read tiles from
#   shared memory, so here the tiles in work need a slot, too.)
# - **Addresses cost instructions.** Each thread computes addresses and masks
#   for its part of each tile. With a *tensor descriptor*, which the host makes
#   of a tensor and the shape of a tile, a program only says at which index its
#   tile begins. A unit of the SM, the *Tensor Memory Accelerator* (TMA),
#   fetches the whole tile, and fills in zeros beyond the end of the tensor.
# - **Tiles could be larger.** With 128 × 256 sums, each byte that arrives is
#   used for a third more products. Tensor Cores take their operands from
#   shared memory, so the registers are left for the sums.
# - **Programs come and go.** A program that has finished its sums still has to
#   store them, and the next one has to wait for its first tiles. A
#   *persistent* program takes one tile after the other. Its loads run ahead
#   across the end of a tile: the first loads of the next one are on the way
#   while it stores the results of this one. There are only as many programs as
#   SMs.
# - **Results need room.** The TMA also stores, from shared memory. A tile of
#   128 × 256 results in 16 bits takes 64 KB there. If we store its two halves
#   one after the other, both can use the same 32 KB, and there is room for a
#   fourth stage: four of 48 KB and these 32 KB are 224 KB, and an SM has 227
#   KB for programs.
#
# What comes after the sums
# -------------------------
#
# Where do the bias and the activation go? They belong in the kernel that we
# write next, so they come first.
#
# When a program has finished its sums, they are in registers. To add a bias
# and apply a function there costs instructions, but nothing of the tile has to
# be written and read again. The part of a kernel that comes after its sums is
# called the *epilogue*.
#
# An activation is a function that the kernel is given as a constant, as in `A
# function as a constant <../fused/03-activation.html>`_, whose short sigmoid
# :math:`\sigma` we take. It returns its value and its slope, the derivative,
# which the backward pass needs. SiLU is :math:`z \, \sigma(z)`. The form of
# GELU that PyTorch calls ``approximate="tanh"`` is :math:`z \, \sigma(u)` with
# :math:`u = \sqrt{8 / \pi} \, (z + 0.044715 \, z^3)`, because :math:`1 +
# \tanh(u/2) = 2 \, \sigma(u)`.

# %%

# Scaffold: a sigmoid of four instructions, from page 03 of fused; and SiLU.

PTX = tl.constexpr(ON_GPU and torch.version.hip is None)


@triton.jit
def _sigmoid(x):
    if PTX and x.dtype == tl.float32:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .f32 a;
            mul.f32 a, $1, 0fBFB8AA3B;  // -log2(e)
            ex2.approx.ftz.f32 a, a;
            add.f32 a, a, 0f3F800000;  // 1
            rcp.approx.ftz.f32 $0, a;
            }
            """,
            "=f,f",  # one result and one argument, both in registers
            [x],
            dtype=tl.float32,
            is_pure=True,  # the compiler may drop or move it
            pack=1,  # an element at a time
        )
    else:
        return tl.sigmoid(x)


@triton.jit
def _silu(x):
    sigmoid = _sigmoid(x)
    return x * sigmoid, sigmoid * (1 + x * (1 - sigmoid))


# %%


@triton.jit
def _relu(z):
    # Without propagate_nan, the maximum of NaN and 0 is 0 on a GPU, so a NaN
    # would vanish, and nobody would notice it.
    y = tl.maximum(z, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return y, tl.where(z > 0, 1.0, 0.0)


@triton.jit
def _gelu(z):
    # From 30 on the sigmoid is 1, and below -30 it is less than the smallest
    # number of float32, so 0. Without these limits the cube could overflow.
    near = tl.minimum(tl.maximum(z, -30.0), 30.0)
    square = near * near
    # u, and its derivative times z. 2 sqrt(2 / pi) is 1.5957..., and times
    # 0.044715 it is 0.0713...; three times that is 0.2140...
    u = near * (1.5957691216057308 + 0.07135481627260025 * square)
    du = near * (1.5957691216057308 + 0.21406444881780076 * square)
    sigmoid = _sigmoid(u)
    return z * sigmoid, sigmoid * (1 + du * (1 - sigmoid))


# %%
# The epilogue below takes a tile of sums and stores the results, usually by a
# descriptor. But where ``N`` is odd, for instance, the rows of ``y`` begin at
# addresses that a descriptor does not take. Then the epilogue gets a pointer,
# ``c_ptr``, and stores with addresses and masks.


@triton.jit
def _epilogue(
    sums,  # a tile of sums, in float32
    row,  # where the tile begins
    column,
    c_desc,  # (M, N) in tiles of this shape, or None
    c_ptr,  # (M, N), contiguous, if there is no descriptor
    bias_ptr,  # (N,), or None
    slope_desc,  # as c_desc: where the slope goes; or None
    M,
    N,
    ACT: tl.constexpr,  # the activation, or None
):
    col = column + tl.arange(0, sums.shape[1])
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + col, mask=col < N, other=0)
        sums += bias.to(tl.float32)[None, :]
    if ACT is not None:
        sums, slope = ACT(sums)
        # If nobody wants the slope, the compiler drops its instructions.
        if slope_desc is not None:
            slope_desc.store([row, column], slope.to(slope_desc.dtype))
    if c_desc is not None:
        c_desc.store([row, column], sums.to(c_desc.dtype))
    else:
        line = (row + tl.arange(0, sums.shape[0])).to(tl.int64)
        mask = (line[:, None] < M) & (col[None, :] < N)
        tl.store(c_ptr + line[:, None] * N + col[None, :], sums, mask=mask)


# %%
# And this is the kernel that we keep. It multiplies any two matrices, ``a`` of
# (M, K) and ``b`` of (K, N), because the backward pass will need other
# products than ``x @ w.T``. Each of them may lie in memory transposed, as
# ``w.T`` does, whose columns are the rows of ``w``. Then the descriptor is
# that of the matrix as it lies, and ``.T`` turns a tile after it was loaded.
# That costs nothing in 16 bits. The tile stays where it is in shared memory,
# and Tensor Cores of an H200 can read it either way.


@triton.jit
def _load(desc, row, column, TRANSPOSED: tl.constexpr):
    """The tile of a matrix that begins there, however the matrix lies."""
    if TRANSPOSED:
        return desc.load([column, row]).T
    else:
        return desc.load([row, column])


@triton.jit
def _product(
    a_desc,  # (M, K) in tiles of TILE_M and TILE_K; transposed, (K, M)
    b_desc,  # (K, N) in tiles of TILE_K and TILE_N; transposed, (N, K)
    c_desc,  # (M, N) in what is stored at a time; or None
    c_ptr,  # (PARTS, M, N), contiguous, if there is no descriptor
    bias_ptr,  # (N,), or None
    slope_desc,  # as c_desc, or None
    M,
    N,
    K,
    ACT: tl.constexpr,  # the activation, or None
    A_TRANSPOSED: tl.constexpr,
    B_TRANSPOSED: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    GROUP: tl.constexpr,  # rows of tiles in a group
    STAGES: tl.constexpr,  # num_stages of the inner loop
    STAY: tl.constexpr,  # persistent: whether programs take several tiles
    HALVES: tl.constexpr,  # whether results are stored in two halves
    DIVIDED: tl.constexpr,  # whether K is divided into parts
    PARTS,  # how many there are, each added up on its own
    K_PART,  # the length of such a part
    PRECISION: tl.constexpr,  # of float32: "tf32" or "ieee"
):
    # Without this promise the compiler would also write code for K = 0.
    tl.assume(K > 0)
    rows = tl.cdiv(M, TILE_M)
    columns = tl.cdiv(N, TILE_N)
    tiles = rows * columns

    # One tile after the other: ours have numbers that lie as far apart as
    # there are programs. (With a program for each tile, it is one turn.)
    # ``flatten`` makes one loop of both loops, so that loads of the next tile
    # begin before this one is stored.
    for work in tl.range(
        tl.program_id(0), tiles * PARTS, tl.num_programs(0), flatten=STAY
    ):
        row, column = _place(work % tiles, rows, columns, GROUP)
        row *= TILE_M
        column *= TILE_N
        part = work // tiles
        begin = 0
        end = K
        if DIVIDED:
            begin = part * K_PART
            end = tl.minimum(begin + K_PART, K)

        sums = tl.zeros((TILE_M, TILE_N), tl.float32)
        for k in tl.range(begin, end, TILE_K, num_stages=STAGES):
            a = _load(a_desc, row, k, A_TRANSPOSED)
            b = _load(b_desc, k, column, B_TRANSPOSED)
            sums = tl.dot(a, b, sums, input_precision=PRECISION)

        # Each part has its own matrix of results.
        part_ptr = c_ptr
        if DIVIDED:
            part_ptr += part.to(tl.int64) * M * N
        # The whole tile, or its left and its right half.
        pieces = (sums,)
        if HALVES:
            # split() needs a last dimension of 2, and gives both parts.
            halves = sums.reshape(TILE_M, 2, TILE_N // 2)
            pieces = halves.permute(0, 2, 1).split()
        for i in tl.static_range(len(pieces)):
            _epilogue(
                sums=pieces[i],
                row=row,
                column=column + i * pieces[i].shape[1],
                c_desc=c_desc,
                c_ptr=part_ptr,
                bias_ptr=bias_ptr,
                slope_desc=slope_desc,
                M=M,
                N=N,
                ACT=ACT,
            )


# %%
# ``PARTS`` is 1 until the section about few tokens.
#
# On the host, ``launch(a, b, c, plan)`` fills ``c`` with ``a @ b``. A *plan*
# has the constants of the kernel, such as its tiles and stages. ``launch``
# makes the descriptors, and sees by the strides whether a matrix lies
# transposed.

# %%

# Scaffold: what the GPU has, and which matrices a descriptor takes.

GPU = torch.cuda.get_device_properties(DEVICE) if ON_GPU else None
NUM_SMS = GPU.multi_processor_count if ON_GPU else 4


def shared_memory():
    """Bytes that a program can have; without a GPU, those of an H200."""
    if not ON_GPU:
        return 232448
    return getattr(GPU, "shared_memory_per_block_optin", 65536)


SHARED = shared_memory()


def lies_in_rows(t):
    """Whether a descriptor takes it: numbers of a row side by side, and each
    row at a multiple of 16 bytes."""
    step = t.stride(0) * t.itemsize
    aligned = t.data_ptr() % 16 == 0 and step % 16 == 0
    return aligned and t.stride(1) == 1 and step > 0


def padded(rows, columns, dtype, device):
    """A new matrix whose rows lie as a descriptor wants."""
    step = 16 // dtype.itemsize
    width = triton.cdiv(columns, step) * step
    return torch.empty(rows, width, dtype=dtype, device=device)[:, :columns]


# %%


def descriptor(t, rows, columns):
    """A descriptor in tiles of such a shape, and whether it is transposed."""
    if t.stride(1) == 1:
        return TensorDescriptor.from_tensor(t, [rows, columns]), False
    return TensorDescriptor.from_tensor(t.T, [columns, rows]), True


def launch(a, b, c, plan, bias=None, act=None, slope=None):
    """Launch the kernel: c = act(a @ b + bias), and the slope of act."""
    plan = dict(plan)
    programs_per_sm = plan.pop("PROGRAMS_PER_SM")
    M, K = a.shape
    N = b.shape[1]
    width = plan["TILE_N"]
    if plan["HALVES"]:
        width //= 2
    a_desc, a_transposed = descriptor(a, plan["TILE_M"], plan["TILE_K"])
    b_desc, b_transposed = descriptor(b, plan["TILE_K"], plan["TILE_N"])
    c_desc = None
    if plan["PARTS"] == 1 and lies_in_rows(c):
        c_desc, _ = descriptor(c, plan["TILE_M"], width)
    slope_desc = None
    if slope is not None:
        slope_desc, _ = descriptor(slope, plan["TILE_M"], width)
    tiles = triton.cdiv(M, plan["TILE_M"]) * triton.cdiv(N, plan["TILE_N"])
    programs = tiles * plan["PARTS"]
    if plan["STAY"]:
        programs = min(programs, NUM_SMS * programs_per_sm)
    _product[(programs,)](
        a_desc=a_desc,
        b_desc=b_desc,
        c_desc=c_desc,
        c_ptr=c if c_desc is None else None,
        bias_ptr=bias,
        slope_desc=slope_desc,
        M=M,
        N=N,
        K=K,
        ACT=act,
        A_TRANSPOSED=a_transposed,
        B_TRANSPOSED=b_transposed,
        DIVIDED=plan["PARTS"] > 1,
        **plan,
    )


# %%

# Scaffold: the rungs of the ladder, as plans.


def rung(tile_n, warps, stages, stay=False, halves=False, group=8):
    """A plan for 16 bits, with 128 tokens in a tile."""
    return {
        "TILE_M": 128,
        "TILE_N": tile_n,
        "TILE_K": 64,
        "GROUP": group,
        "STAGES": stages,
        "STAY": stay,
        "HALVES": halves,
        "PARTS": 1,
        "K_PART": 0,
        "PRECISION": "ieee",
        "PROGRAMS_PER_SM": 1,
        "num_warps": warps,
    }


RUNGS = {
    "descriptors": rung(128, 8, 4),
    "wide": rung(256, 8, 3),
    "persistent": rung(256, 8, 3, stay=True),
    "triton": rung(256, 8, 4, stay=True, halves=True),
    "rows": rung(256, 8, 4, stay=True, halves=True, group=1),
}


def climb(x, w, name):
    """x @ w.T with a rung of the ladder."""
    if name == "one tile":
        return one_tile_a_program(x, w)
    if name == "groups":
        return one_tile_a_program(x, w, group=8)
    if name == "stages":
        return one_tile_a_program(x, w, group=8, stages=3)
    y = torch.empty(
        x.shape[0], w.shape[0], dtype=x.dtype, device=x.device
    )  # fmt: skip
    launch(x, w.T, y, RUNGS[name])
    return y


# %%

x = torch.randn(300, 104, device=DEVICE).half()
w = torch.randn(520, 104, device=DEVICE).half()
for name in RUNGS:
    error = (climb(x, w, name) - x.double() @ w.double().T).abs().max()
    print(f"largest error of {name}: {error:.1e}")
    assert error < 0.05

# %%
# The ladder
# ----------
#
# What is each step worth? We start with the 16-bit kernel from above and add
# one idea at a time. The number of stages changes as well: there are 4 with
# descriptors, 3 with tiles of 128 × 256, and 4 again with results in halves.
# Two programs of each of the first three kernels share an SM; from descriptors
# on, stages leave room for only one. One more line is the last kernel with its
# tiles row by row.

# %%

# Scaffold: the ladder, a benchmark.


LADDER = {
    "one tile": "one tile a program",
    "groups": "groups of 8",
    "stages": "three stages",
    "descriptors": "descriptors",
    "wide": "128 x 256",
    "persistent": "persistent",
    "triton": "in halves",
    "rows": "in halves, row by row",
    "torch": "cuBLAS, by PyTorch",
}


@functools.cache
def ladder_speeds(M, N, K, dtype):
    x, w, _, _ = inputs(M, N, K, dtype)
    calls = {
        name: functools.partial(climb, x, w, name)
        for name in LADDER
        if name != "torch"
    }
    calls["torch"] = lambda: x @ w.T
    return tflops(2 * M * N * K, calls)


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=[1024, 2048, 4096, 8192, 14336],
        x_log=True,
        xlabel="N (new features)",
        line_arg="provider",
        line_vals=list(LADDER),
        line_names=list(LADDER.values()),
        ylabel="TFLOP/s",
        plot_name="linear-ladder",
        args={
            "M": 8192,
            "K": 4096,
            "dtype": torch.bfloat16,
            "pass": "the product of the forward pass",
        },
    )
)
def bench_ladder(M, N, K, dtype, provider, **_):
    """All lines in turns, 15 times, each a CUDA graph that overwrites L2
    first; the time of a graph that only overwrites L2 is subtracted."""
    if not ON_GPU:
        return 3 * [float("nan")]
    return ladder_speeds(M, N, K, dtype)[provider]


# %%

in_percent(bench_ladder, "cuBLAS, by PyTorch")

# %%
# **What the figure shows.**
# On the H200 the kernel that we started with reaches 42% of cuBLAS at 4096 new
# features and 41% at 14336. At these sizes groups make it 42% and 41%, three
# stages 76% and 76%, descriptors 83% and 85%, and tiles of 128 × 256 96% and
# 95%. Persistent programs reach 98% and 98%, and with results in halves and a
# fourth stage we are at 100% and 99%. With its tiles row by row this kernel
# would be at 97% and 86%.
#
# **Why.**
# The first kernel asks for its next tiles only when it is done with the last
# ones. It is so slow that DRAM can deliver what is not in L2, so groups bring
# little. Stages take the wait out of each step.
#
# Descriptors leave the warps with hardly anything to do but to start products:
# one instruction, ``wgmma``, multiplies 64 rows by up to 256 columns and 16
# features. Tiles of 128 × 256 ask a quarter less of L2 than those of 128 ×
# 128.
#
# Persistent programs shorten the pause between two tiles. A sum of 4096
# features has 64 steps, so the pause was a small part of the time. With the
# fourth stage, loads run ahead by one step more.
#
# The faster a kernel is, the more bytes it needs in a second. Row by row, the
# first round of the last kernel reads at most 41 strips up to 4096 new
# features, 69 at 8192 and 115 at 14336; in groups it is never more than 44.
# And row by row the kernel is as fast as in groups up to 4096 new features,
# within 3%, but it is 6% slower at 8192 and 12% at 14336. A round that finds
# nothing of the one before in L2 reads all its strips from DRAM: at 14336 that
# is 2.3 TB in a second, and in groups 1.0. DRAM can move twice as much, so its
# speed alone does not explain the loss. But what comes from there arrives
# later, and takes more power, of which a card under this load has none to
# spare. What each of these costs, our figures don't say.
#
# **What follows.**
# No single step brings us to cuBLAS. Each takes away one thing that the Tensor
# Cores wait for, and then they wait for the next.
#
# Two numbers that lie two or three percent apart mean the same: a card that is
# this hot changes its clock all the time.
#
# What to save for the backward pass
# ----------------------------------
#
# Which of the tile's numbers will the backward pass need?
#
# Let ``dy`` be the gradient of ``y``, and :math:`f'` the slope of the
# activation. Then :math:`dz = dy \, f'(z)`, and everything else follows from
# ``dz``. The value ``z`` before the activation only exists in registers. There
# are three choices.
#
# - **Save nothing but y.** That is enough for ReLU, whose slope is 1 where
#   ``y`` is above 0. And ``y`` is the input of the next layer, which saves it
#   anyway. But two different ``z`` can have the same GELU, so ``y`` does not
#   tell its slope. The same is true of SiLU.
# - **Save z.** The backward pass computes the slope, with a dozen instructions
#   for each number.
# - **Save the slope.** It has just been computed for next to nothing, with the
#   sigmoid that the value needs anyway. The backward pass multiplies once.
#
# A saved matrix of ``M`` × ``N`` numbers costs room until the backward pass,
# and has to be written. At 8192 tokens and 4096 new features it takes 67 MB.
# We save ``y`` for ReLU and the slope for the others, whose backward pass is
# then the same. The slope is rounded to 16 bits, as ``z`` would be. Below we
# measure both.

ACTIVATIONS = {None: None, "relu": _relu, "gelu": _gelu, "silu": _silu}

# %%
# Which tile?
# -----------
#
# A tile of 128 × 256 is the fastest where there are enough of them for all
# SMs. Smaller products take smaller tiles. And a sum over ``K`` can be divided
# into parts, as the next section shows. So we need a rule.
#
# Ours estimates how long each choice would take, and takes the shortest. It
# counts *rounds*: with 150 tiles on 132 SMs there are two, and the second one
# leaves most SMs without work. In a round, a program makes all steps of a
# tile. A step lasts as long as its products or as its loads from L2, whichever
# takes longer, and then the tile is stored. We have chosen the numbers below
# so that they come close to what an H200 took. All that counts is which choice
# is the fastest.

TILES = {
    # precision: rows, columns, features of a step, warps, stages
    "16 bits": (
        (128, 256, 64, 8, 4),
        (128, 128, 64, 4, 6),
        (64, 128, 128, 4, 4),
        (64, 64, 128, 4, 6),
    ),
    "tf32": ((128, 128, 32, 8, 4), (64, 64, 32, 4, 4)),
    "ieee": ((64, 64, 16, 4, 4),),
}
# Rows of a result that are not aligned take more registers to store.
TILE_OF_ODD_ROWS = 128, 128, 64, 8, 4
# Without a TMA, threads compute an address for each number.
TILE_BEFORE_H100 = 64, 64, 32, 4, 4
# Operations of an SM in a µs.
OPERATIONS = {"16 bits": 6.0e6, "tf32": 3.0e6, "ieee": 0.4e6}

# %%

# Scaffold: the type of a product, and which tiles it may take.


def precision_of(dtype):
    if dtype != torch.float32:
        return "16 bits"
    # PyTorch's switch: whether Tensor Cores may cut float32.
    if torch.backends.cuda.matmul.fp32_precision == "tf32":
        return "tf32"
    return "ieee"


def tiles_for(precision, aligned):
    """Tiles that a product may take."""
    if precision != "ieee" and SHARED < 200_000:
        return (TILE_BEFORE_H100,)
    if precision == "16 bits" and not aligned:
        return (TILE_OF_ODD_ROWS, *TILES[precision][2:])
    return TILES[precision]


# %%


def estimate(M, N, K, precision, tile, parts):
    """How many µs a product takes, roughly."""
    rows, columns, features, _, _ = tile
    itemsize = 2 if precision == "16 bits" else 4
    # How many programs have work, and how many rounds that takes.
    programs = triton.cdiv(M, rows) * triton.cdiv(N, columns) * parts
    rounds = triton.cdiv(programs, NUM_SMS)
    # A step: its products, and its loads from L2, which gives 12 000 GB/s to
    # all SMs together, and 120 GB/s to one of them.
    steps = triton.cdiv(triton.cdiv(K, features), parts)
    products = 2 * rows * columns * features / OPERATIONS[precision]
    from_l2 = min(12e6 / min(programs, NUM_SMS), 120e3)
    loads = itemsize * (rows + columns) * features / from_l2
    # Then the tile is stored, 30 000 numbers in a µs.
    store = rows * columns / 30e3
    on_sms = rounds * (steps * max(products, loads) + store)
    # With few tokens DRAM takes longer. It gives 4200 GB/s to all SMs
    # together, and 40 GB/s to one of them.
    read = itemsize * K * (M + N)
    from_dram = read / min(40e3 * programs, 4.2e6)
    # Most of the shorter time is hidden by the longer one.
    time = max(on_sms, from_dram) + 0.3 * min(on_sms, from_dram)
    if parts > 1:
        # A second kernel starts and adds them up. They are written and read
        # once, as float32, and a µs has room for 2.3 MB of that.
        time += 5 + 8 * parts * M * N / 2.3e6
    return time


# %%

# Scaffold: the choice.


@functools.cache
def tile_and_parts(M, N, K, precision, aligned, most_parts):
    """The choice with the shortest time; each part has four steps at least."""
    choices = [
        (tile, parts)
        for tile in tiles_for(precision, aligned)
        for parts in range(1, 33)
        if parts == 1 or parts <= min(most_parts, K // tile[2] // 4)
    ]
    return min(
        choices, key=lambda choice: estimate(M, N, K, precision, *choice)
    )


# %%
# An activation takes time as well, and where sums are short, that is a good
# part of the whole. Then we take tiles of 128 × 128, and let *two* programs
# share an SM: while one of them computes powers of e for its sigmoids, the
# other one multiplies.

# %%

# Scaffold: the plan of a product.


def plan_product(M, N, K, dtype, aligned=True, act=None, most_parts=32):
    """Tiles of a product, and into how many parts K is divided."""
    precision = precision_of(dtype)
    tile, parts = tile_and_parts(M, N, K, precision, aligned, most_parts)
    programs_per_sm = 1
    # On an H200 two programs are faster for sums of up to 1024 features, and
    # for longer ones where there are three times as many new features.
    short = max(1024, N // 3) >= K
    if act is not None and short and tile == TILES["16 bits"][0]:
        tile = TILES["16 bits"][1]
        programs_per_sm = 2
    tile_m, tile_n, tile_k, warps, stages = tile
    steps = triton.cdiv(K, tile_k)
    steps_of_a_part = triton.cdiv(steps, parts)
    # As many stages as there is room for, beside half a tile of results.
    stage = (tile_m + tile_n) * tile_k * dtype.itemsize
    room = SHARED // programs_per_sm - 1024
    room -= tile_m * tile_n // 2 * dtype.itemsize
    return {
        "TILE_M": tile_m,
        "TILE_N": tile_n,
        "TILE_K": tile_k,
        "GROUP": 8,
        "STAGES": max(1, min(stages, room // stage)),
        "STAY": True,
        "HALVES": True,
        "PARTS": triton.cdiv(steps, steps_of_a_part),
        "K_PART": steps_of_a_part * tile_k,
        "PRECISION": "tf32" if precision == "tf32" else "ieee",
        "PROGRAMS_PER_SM": programs_per_sm,
        "num_warps": warps,
    }


# %%
# Few tokens
# ----------
#
# What if there are fewer tiles than SMs?
#
# A model that generates text, one word after the other, has a few tokens at a
# time. With 16 tokens and 4096 new features there are 32 tiles of 64 × 128, so
# three quarters of the SMs would have nothing to do. And the limit is not
# arithmetic any more: the weight has to be read, and few SMs can't read it at
# full speed.
#
# So we divide the sums. With ``PARTS`` = 4, one program adds up the first
# quarter of the old features, another one the second, and so on. This is
# called *split-K*. Each part writes its sums in float32 to a matrix of its
# own, and a second kernel adds the matrices up, always in the same order. It
# also adds the bias and applies the activation, because only there the sums
# are complete.


@triton.jit
def _add_parts(
    parts_ptr,  # (parts, size), float32
    c_ptr,  # (size,): rows of N numbers
    bias_ptr,  # (N,), or None
    slope_ptr,  # rows of N numbers, or None
    parts,
    size,
    N,
    slope_stride,  # from a row of slopes to the next
    ACT: tl.constexpr,
    ROWS: tl.constexpr,  # parts of a step
    COLUMNS: tl.constexpr,  # numbers of a program
):
    at = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside = at < size
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, parts, ROWS):  # so many parts at a time
        part = start + tl.arange(0, ROWS)
        mask = (part[:, None] < parts) & inside[None, :]
        place = part.to(tl.int64)[:, None] * size + at[None, :]
        sums += tl.load(parts_ptr + place, mask=mask, other=0)
    total = tl.sum(sums, axis=0)

    if bias_ptr is not None:  # at % N is the new feature
        bias = tl.load(bias_ptr + at % N, mask=inside, other=0)
        total += bias.to(tl.float32)
    if ACT is not None:
        total, slope = ACT(total)
        if slope_ptr is not None:
            place = at // N * slope_stride + at % N
            tl.store(slope_ptr + place, slope, mask=inside)
    tl.store(c_ptr + at, total, mask=inside)


# %%

# Scaffold: the second kernel, launched.


def add_parts(parts, c, bias=None, act=None, slope=None):
    """c = act(the sum of its parts + bias), and the slope of act."""
    slope_stride = 0
    if slope is not None:
        slope_stride = slope.stride(0)
    rows = min(32, triton.next_power_of_2(parts.shape[0]))
    columns = 1024 // rows
    _add_parts[(triton.cdiv(c.numel(), columns),)](
        parts_ptr=parts,
        c_ptr=c,
        bias_ptr=bias,
        slope_ptr=slope,
        parts=parts.shape[0],
        size=c.numel(),
        N=c.shape[-1],
        slope_stride=slope_stride,
        ACT=act,
        ROWS=rows,
        COLUMNS=columns,
        num_warps=4,
    )


# %%

# Scaffold: a product in as many parts as its plan says, and the layer.


def product(a, b, c, bias=None, act=None, slope=None, most_parts=32):
    """c = act(a @ b + bias), in as many parts as the plan says."""
    M, K = a.shape
    N = b.shape[1]
    plan = plan_product(M, N, K, a.dtype, lies_in_rows(c), act, most_parts)
    if plan["PARTS"] == 1:
        launch(a, b, c, plan, bias, act, slope)
        return
    parts = torch.empty(
        plan["PARTS"], *c.shape, dtype=torch.float32, device=c.device
    )
    launch(a, b, parts, plan)
    add_parts(parts, c, bias, act, slope)


def forward(x, w, bias=None, act=None, keeps_slope=False, most_parts=32):
    """y, and the slope of the activation if it is kept."""
    y = torch.empty(
        x.shape[0], w.shape[0], dtype=x.dtype, device=x.device
    )  # fmt: skip
    slope = None
    if keeps_slope:
        slope = padded(*y.shape, dtype=x.dtype, device=x.device)
    product(x, w.T, y, bias, act, slope, most_parts)
    return y, slope


# %%
# What does it bring? We measure the time of a call, and compare with one part,
# and with PyTorch. A call is so short here that the clock makes sixteen of
# them in a row.

# %%

# Scaffold: the clock.


def device_time(prepare):
    """µs of a call on the GPU: median, 20% and 80% quantiles.

    ``prepare()`` makes inputs and returns the call. Two CUDA graphs are
    replayed in turns. One makes several calls, and overwrites L2 before each;
    the other only overwrites L2. The difference is the time of the calls.
    """
    if not ON_GPU:
        return 3 * [float("nan")]  # the interpreter cannot be timed
    larger_than_l2 = torch.empty(2**28, dtype=torch.int8, device=DEVICE)

    def prepared():
        call = prepare()
        call()  # compiles the kernels
        return call

    def recorded(calls):
        graph = torch.cuda.CUDAGraph()
        results = []  # kept, so that no call writes where another one wrote
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            for call in calls:
                larger_than_l2.zero_()
                results.append(call())
        graph.replay()  # the first replay takes longer
        return graph

    def elapsed(graph):
        """ms from the start of a replay on the GPU to its end."""
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end)

    calls = [prepared()]
    if elapsed(recorded(calls)) < 0.3:
        # L2 may keep the inputs of a short call until the next replay: with
        # those of fifteen other calls in between, it cannot.
        calls += [prepared() for _ in range(15)]
    with_calls = recorded(calls)
    without = recorded([lambda: None for _ in calls])
    times = []
    for _ in range(25):
        difference = elapsed(with_calls) - elapsed(without)
        times.append(1000 * difference / len(calls))
    times.sort()
    return times[12], times[5], times[19]


def speed(bytes_moved, prepare):
    """GB/s of a call that must move so many bytes: median, low, high."""
    median, short, long = device_time(prepare)
    return tuple(bytes_moved / us * 1e-3 for us in (median, long, short))


# %%

# Scaffold: few tokens, a benchmark.


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=[1, 16, 64, 128, 256, 512],
        x_log=True,
        xlabel="N (tokens)",
        line_arg="provider",
        line_vals=["triton", "one part", "torch"],
        line_names=["Triton", "one part", "PyTorch"],
        ylabel="µs",
        plot_name="linear-few-tokens",
        args={
            "features": 4096,
            "dtype": torch.bfloat16,
            "pass": "4096 new features of few tokens",
        },
    )
)
def bench_few(N, features, dtype, provider, **_):
    """Device time: a CUDA graph of several calls, each with inputs of its own
    and after L2 was overwritten, less the graph without the calls; median, 20%
    and 80% quantiles."""
    if not ON_GPU:
        return 3 * [float("nan")]

    def prepare():
        x, w, _, _ = inputs(N, features, features, dtype)
        if provider == "torch":
            return lambda: x @ w.T
        most = 1 if provider == "one part" else 32
        return lambda: forward(x, w, most_parts=most)

    return device_time(prepare)


# %%

bench_few.run(show_plots=ON_GPU)

# %%
# **What the figure shows.**
# On the H200 our kernel takes 15.4 µs with one token, 15.4 with 64 and 25.7
# with 512. In one part it takes 20.1, 15.4 and 25.7. PyTorch takes 15.5, 14.7
# and 25.2.
#
# **Why.**
# The weight has 34 MB, and all of it is read however few tokens there are. So
# our kernel takes nearly the same time up to 128 tokens. By the data sheet,
# memory could deliver the weight in less than half that time, but PyTorch
# takes no less than ours.
#
# With one token, one part has 64 programs for 132 SMs. In four parts of larger
# tiles there are 128. The price is a second kernel, and 8 bytes, written and
# read, for each number of ``y`` and each part. That is little as long as there
# are few tokens. With 64 tokens and two parts it would be 4.2 MB.
#
# **What follows.**
# The more tokens there are, the more tiles, and the fewer parts. From 64
# tokens on, our rule takes a single part. There both lines are the same
# kernel, and what is between them is noise.

# %%
# Does the activation cost anything?
# ----------------------------------
#
# We compare our kernel, which saves the slope, with the same kernel when it
# saves ``z``, and when it saves nothing because nobody trains. PyTorch calls
# cuBLAS, and then a kernel that reads what cuBLAS has written and writes the
# activation. ``torch.compile`` does nearly the same, but it adds the bias
# together with the activation. We compile it three times, as its choices
# differ, and the best counts.
#
# The dashed line is cuBLAS without bias and activation.

# %%

# Scaffold: the layer with GELU forward, two benchmarks.


def pytorch_layer(x, w, b):
    return F.gelu(F.linear(x, w, b), approximate="tanh")


def compiled_anew():
    """The layer, compiled once more.

    torch.compile tries several forms of a kernel and keeps the fastest. Which
    one that is can depend on luck, so it chooses three times.
    """
    # A choice is not kept on disk, nor in memory.
    torch._inductor.config.autotune_local_cache = False
    torch._inductor.utils.clear_caches()
    # We run a backward pass many times, so torch.compile must not reuse the
    # memory of what the forward pass saved for it.
    torch._functorch.config.donated_buffer = False
    # It knows a function by its code, so each time that is a copy.
    code = pytorch_layer.__code__.replace()
    copy = types.FunctionType(code, pytorch_layer.__globals__)
    return torch.compile(copy, dynamic=False)


@functools.cache
def compiled_layers(M, N, K, dtype):
    """Three compilations for a size."""
    given = inputs(M, N, K, dtype)[:3]
    for t in given:
        t.requires_grad_()
    layers = []
    for _ in range(3):
        layer = compiled_anew()
        layer(*given)  # chooses
        layers.append(layer)
    return layers


@triton.jit
def _gelu_and_z(z):
    """For comparison: saves z in place of the slope."""
    value, _ = _gelu(z)
    return value, z


def in_turns_with_compiled(operations, calls, compiled):
    """TFLOP/s of all calls, and of the best of those that were compiled."""
    compiled = {f"compiled {i}": call for i, call in enumerate(compiled)}
    found = tflops(operations, calls | compiled)
    return found | {"torch.compile": max(found[name] for name in compiled)}


@functools.cache
def gelu_speeds(M, N, K, dtype):
    x, w, b, _ = inputs(M, N, K, dtype)
    for t in (x, w, b):
        t.requires_grad_()  # the others save what they need, too
    calls = {
        "triton": lambda: forward(x, w, b, _gelu, keeps_slope=True),
        "z saved": lambda: forward(x, w, b, _gelu_and_z, keeps_slope=True),
        "inference": lambda: forward(x, w, b, _gelu),
        "torch": lambda: pytorch_layer(x, w, b),
        "cublas": lambda: x.detach() @ w.detach().T,
    }
    compiled = [
        functools.partial(layer, x, w, b)
        for layer in compiled_layers(M, N, K, dtype)
    ]
    return in_turns_with_compiled(2 * M * N * K, calls, compiled)


LAYERS = {
    "triton": "Triton",
    "z saved": "z saved",
    "inference": "nothing saved",
    "torch": "PyTorch",
    "torch.compile": "torch.compile",
    "cublas": "cuBLAS, the product alone",
}


def layer_benchmark(plot_name, mode, M, K, sizes, names):
    return triton.testing.Benchmark(
        x_names=["N"],
        x_vals=sizes,
        x_log=True,
        xlabel="N (new features)",
        line_arg="provider",
        line_vals=list(names),
        line_names=list(names.values()),
        ylabel="TFLOP/s",
        plot_name=plot_name,
        args={"M": M, "K": K, "dtype": torch.bfloat16, "mode": mode},
    )


WIDE = 8192, 4096, [1024, 4096, 14336]  # M, K and each N
NARROW = 4096, 1024, [1024, 4096, 8192]


@triton.testing.perf_report(
    layer_benchmark("linear-gelu-forward", "forward", *WIDE, LAYERS)
)
def bench_gelu(M, N, K, dtype, mode, provider):
    """All lines in turns, 15 times, each a CUDA graph that overwrites L2
    first; the time of a graph that only overwrites L2 is subtracted.
    torch.compile: the best of three compilations."""
    if not ON_GPU:
        return 3 * [float("nan")]
    return gelu_speeds(M, N, K, dtype)[provider]


@triton.testing.perf_report(
    layer_benchmark("linear-gelu-forward-narrow", "forward", *NARROW, LAYERS)
)
def bench_gelu_narrow(M, N, K, dtype, mode, provider):
    """All lines in turns, 15 times, each a CUDA graph that overwrites L2
    first; the time of a graph that only overwrites L2 is subtracted.
    torch.compile: the best of three compilations."""
    if not ON_GPU:
        return 3 * [float("nan")]
    return gelu_speeds(M, N, K, dtype)[provider]


# %%

in_percent(bench_gelu, "cuBLAS, the product alone")

# %%
# This was with 4096 old features. With 1024 of them, and 4096 tokens, a sum is
# a quarter as long, and each still has its bias and its activation:

# %%

in_percent(bench_gelu_narrow, "cuBLAS, the product alone")

# %%
# **What both figures show.**
# On the H200 the layer with 4096 old features reaches 733 TFLOP/s at 4096 new
# ones, and 701 at 14336. That is 1.02 and 1.02 times the speed of
# torch.compile, and 1.02 and 1.01 times that of PyTorch. So little could be
# noise, but our line is above both of theirs at all three sizes. With 1024 old
# features it reaches 507 TFLOP/s at 4096 new ones, which is 1.10 times the
# speed of torch.compile.
#
# If we saved nothing, we would be 15% faster there, and 4% at 4096 old and new
# features. If we saved ``z`` in place of the slope, we would be 6% and 0%
# faster.
#
# **Why.**
# In a kernel of its own the activation of 8192 × 4096 numbers reads 67 MB and
# writes 67 MB, which takes 28 µs at 4.8 TB/s. The product alone needs 278 µs
# at 989 TFLOP/s. In our epilogue nothing has to be read for it. But its
# instructions take time: while a program computes powers, it starts no
# products. And what is saved has to be written, as much as ``y``. The slope
# takes a few instructions more than ``z``, which is there already.
#
# **What follows.**
# The shorter the sums are, the larger is the share of the activation in the
# time of a layer. So there is more to gain by fusing it, and a fused one costs
# more, too.
#
# What the backward pass needs
# ----------------------------
#
# We follow one feature of one token. The result :math:`z_{tn} = b_n + \sum_k
# x_{tk} w_{nk}` gets a gradient :math:`dz_{tn} = dy_{tn} f'(z_{tn})`.
#
# - Each old feature went into all new ones, so its gradient is a sum over
#   them: :math:`dx_{tk} = \sum_n dz_{tn} w_{nk}`. That is the product ``dz @
#   w``.
# - Each weight was used by all tokens, so its gradient is a sum over them:
#   :math:`dw_{nk} = \sum_t dz_{tn} x_{tk}`. That is the product ``dz.T @ x``.
# - A bias was used by all tokens as well: :math:`db_n = \sum_t dz_{tn}`. That
#   is a sum of each column of ``dz``.
#
# Here are the two tokens from the beginning, with autograd beside our
# formulas.

x = torch.tensor([[1.0, 2.0, 3.0], [0.0, 1.0, 0.0]], requires_grad=True)
w = torch.tensor([[1.0, 0.0, 1.0], [2.0, 1.0, 0.0]], requires_grad=True)
b = torch.tensor([1.0, -5.0], requires_grad=True)
dy = torch.tensor([[1.0, 1.0], [2.0, 0.0]])

z = x @ w.T + b
F.relu(z).backward(dy)
with torch.no_grad():
    dz = dy * (z > 0)
    print("dz:", dz.tolist())
    print("dx:", (dz @ w).tolist())
    print("dw:", (dz.T @ x).tolist())
    print("db:", dz.sum(0).tolist())
    assert torch.equal(x.grad, dz @ w)
    assert torch.equal(w.grad, dz.T @ x)
    assert torch.equal(b.grad, dz.sum(0))

# %%
# One kernel, three products
# --------------------------
#
# Do we need new kernels for ``dx`` and ``dw``?
#
# We don't. The three products differ in what they add up over, and in which
# matrix lies transposed:
#
# - **y = x @ w.T** adds up over old features. The right matrix is transposed.
# - **dx = dz @ w** adds up over new features. No matrix is transposed.
# - **dw = dz.T @ x** adds up over tokens. The left matrix is transposed.
#
# ``product(a, b, c)`` launches our kernel as the rule says. So ``product(dz,
# w, dx)`` and ``product(dz.T, x, dw)`` are all that it takes. We measure all
# three, each beside cuBLAS.

# %%

# Scaffold: three products, two benchmarks.


def by_kernel(a, b, most_parts=32):
    c = torch.empty(a.shape[0], b.shape[1], dtype=a.dtype, device=a.device)
    product(a, b, c, most_parts=most_parts)
    return c


@functools.cache
def product_speeds(M, N, K, dtype):
    x, w, _, dz = inputs(M, N, K, dtype)
    calls = {}
    for name, a, b in (("y", x, w.T), ("dx", dz, w), ("dw", dz.T, x)):
        calls[name] = functools.partial(by_kernel, a, b)
        calls[f"{name} cublas"] = functools.partial(torch.mm, a, b)
    return tflops(2 * M * N * K, calls)


PRODUCTS = {
    "y": "y",
    "y cublas": "y, cuBLAS",
    "dx": "dx",
    "dx cublas": "dx, cuBLAS",
    "dw": "dw",
    "dw cublas": "dw, cuBLAS",
}
BOTH = "forward and backward"


@triton.testing.perf_report(
    layer_benchmark("linear-products", BOTH, *WIDE, PRODUCTS)
)
def bench_products(M, N, K, dtype, mode, provider):
    """All lines in turns, 15 times, each a CUDA graph that overwrites L2
    first; the time of a graph that only overwrites L2 is subtracted."""
    if not ON_GPU:
        return 3 * [float("nan")]
    return product_speeds(M, N, K, dtype)[provider]


@triton.testing.perf_report(
    layer_benchmark("linear-products-narrow", BOTH, *NARROW, PRODUCTS)
)
def bench_products_narrow(M, N, K, dtype, mode, provider):
    """All lines in turns, 15 times, each a CUDA graph that overwrites L2
    first; the time of a graph that only overwrites L2 is subtracted."""
    if not ON_GPU:
        return 3 * [float("nan")]
    return product_speeds(M, N, K, dtype)[provider]


# %%

in_percent(
    bench_products, {"y": "y, cuBLAS", "dx": "dx, cuBLAS", "dw": "dw, cuBLAS"}
)

# %%

in_percent(
    bench_products_narrow,
    {"y": "y, cuBLAS", "dx": "dx, cuBLAS", "dw": "dw, cuBLAS"},
)

# %%
# **What both figures show.**
# On the H200, with 8192 tokens of 4096 features and 4096 new features, ``y``
# reaches 99% of cuBLAS, ``dx`` 99% and ``dw`` 100%. With 14336 new features
# it is 99%, 99% and 100%. With 4096 tokens of 1024 features, and 4096 new
# ones, it is 101%, 99% and 100%.
#
# **Why.**
# It is the same kernel with the same tiles, and only the layouts differ. At
# these three sizes there are enough tiles for all SMs. (With 1024 old and 1024
# new features there are not: ``dw`` has 32 of them and reaches 92% of cuBLAS.)
# cuBLAS may also use *clusters*: programs on neighboring SMs that need the
# same tile let the TMA fetch it once for all of them, so L2 has less to
# deliver. With tiles of 128 × 256 we come close without them.
#
# **What follows.**
# A layer spends most of its time in these products, and there we lose little.
# What a kernel of our own can gain is what stands around them.
#
# Few tiles, long sums
# --------------------
#
# If the weight is small and there are many tokens, ``dw`` is small as well,
# and its sums are long: they have a term for each token. With 768 old and 768
# new features there are 18 tiles of 128 × 256, and no more than 18 SMs would
# have work. The answer is the same as with few tokens: the rule divides the
# sums into parts.

# %%

# Scaffold: the gradient of a small weight, a benchmark.


@functools.cache
def small_weight_speeds(N, features, dtype):
    x = normal(N, features, dtype=dtype)
    dz = normal(N, features, dtype=dtype)
    calls = {
        "triton": functools.partial(by_kernel, dz.T, x),
        "one part": functools.partial(by_kernel, dz.T, x, most_parts=1),
        "torch": functools.partial(torch.mm, dz.T, x),
    }
    return tflops(2 * N * features**2, calls)


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=[2048, 4096, 8192, 16384, 32768],
        x_log=True,
        xlabel="N (tokens)",
        line_arg="provider",
        line_vals=["triton", "one part", "torch"],
        line_names=["Triton", "one part", "cuBLAS, by PyTorch"],
        ylabel="TFLOP/s",
        plot_name="linear-small-weight",
        args={
            "features": 768,
            "dtype": torch.bfloat16,
            "pass": "the gradient of a weight of 768 × 768",
        },
    )
)
def bench_small_weight(N, features, dtype, provider, **_):
    """All lines in turns, 15 times, each a CUDA graph that overwrites L2
    first; the time of a graph that only overwrites L2 is subtracted."""
    if not ON_GPU:
        return 3 * [float("nan")]
    return small_weight_speeds(N, features, dtype)[provider]


# %%

in_percent(bench_small_weight, "cuBLAS, by PyTorch")

# %%
# **What the figure shows.**
# On the H200 our kernel reaches 319 TFLOP/s with 4096 tokens, 388 with 8192,
# 508 with 16384 and 600 with 32768. In one part it reaches 319, 358, 383 and
# 423, and cuBLAS reaches 363, 379, 530 and 653.
#
# **Why.**
# Up to 4096 tokens the rule takes one part, with 72 tiles of 64 × 128, so 60
# of the 132 SMs have nothing to do. With more tokens it takes three parts of
# 128 × 128, which are 108 programs.
#
# One part is not as slow as that suggests. From 16384 to 32768 tokens it takes
# 41 µs more, for 128 more steps of 128 tokens. That is 0.32 µs a step, in
# which an SM loads 49 KB, or 154 GB/s. If all SMs loaded at the same time, by
# our rule each would get about 90 GB/s, but here only 72 of them share L2. So
# the rule needs two numbers: what L2 gives to all SMs together, and what it
# gives at most to one. It expects 58 µs of one part with 16384 tokens and 45
# of three, where we measure 50 and 38: too much, but in the right order.
#
# cuBLAS is faster, by 4% to 20%, but not with 8192 tokens. There our median is
# 2% higher, and the quantiles overlap. Our tiles leave SMs without work, or
# much to add up: 7 parts of 128 × 256 give work to 126 SMs, but their sums are
# 17 MB in float32.
#
# **What follows.**
# A small model spends a good part of its backward pass here. So the rule has
# to look at the length of the sums, not only at the size of the result. In a
# trial of all choices at 38 sizes, the one of the rule took at most 5% longer
# than the best.
#
# Who computes dz?
# ----------------
#
# Both products need ``dz``, and ``db`` is the sum of each of its columns. The
# simplest way is a kernel of its own, before the products. It reads ``dy`` and
# what the forward pass has saved, writes ``dz``, and adds up columns. The sums
# need no reads of their own, because the numbers are on the chip.
#
# Let's count the matrices of ``M`` × ``N`` numbers that move. The kernel reads
# two and writes one, and then each of the products reads ``dz``. That makes
# five.
#
# A program has two tiles of 64 × 64, one below the other, which go into the
# same sums. Several of these programs share an SM, so while one of them
# computes, others wait for their tiles.
#
# How ``dz`` follows from ``dy`` and what was saved is again a function that
# the kernel is given. For ReLU the forward pass has saved ``y``, and for the
# others the slope. The third function is for comparison: it takes ``z``, and
# computes the slope of GELU.


@triton.jit
def _times_slope(dy, slope):
    return dy * slope


@triton.jit
def _where_positive(dy, y):
    # y > 0 would stop the gradient where y is NaN. PyTorch lets it pass.
    return tl.where(y <= 0, 0.0, dy)


@triton.jit
def _through_gelu(dy, z):
    _, slope = _gelu(z.to(tl.float32))
    return dy.to(tl.float32) * slope


CHAINS = {
    None: None,
    "relu": _where_positive,
    "gelu": _times_slope,
    "silu": _times_slope,
}


@triton.jit
def _own_pass(
    dy_desc,  # (M, N) in tiles of TILE_M and TILE_N
    saved_desc,  # as dy_desc; or None: then dz is dy
    dz_desc,  # as dy_desc; or None, if dz is dy
    sums_ptr,  # (strips, N), float32: parts of db; or None
    N,
    CHAIN: tl.constexpr,  # what makes dz of dy and of what was saved
    TILE_M: tl.constexpr,  # tokens of a step
    TILE_N: tl.constexpr,  # new features of a program
    STEPS: tl.constexpr,  # how many tiles a program has, one below the other
    STAGES: tl.constexpr,
):
    columns = tl.cdiv(N, TILE_N)
    strip = tl.program_id(0) // columns  # of STEPS * TILE_M tokens
    start = tl.program_id(0) % columns * TILE_N
    sums = tl.zeros((TILE_M, TILE_N), tl.float32)
    for step in tl.range(STEPS, num_stages=STAGES):  # down the strip
        row = (strip * STEPS + step) * TILE_M
        dz = dy_desc.load([row, start])
        if saved_desc is not None:
            saved = saved_desc.load([row, start])
            dz = CHAIN(dz, saved).to(dy_desc.dtype)
            dz_desc.store([row, start], dz)
        # Tokens that do not exist have a dy of 0.
        sums += dz.to(tl.float32)
    if sums_ptr is not None:
        feature = start + tl.arange(0, TILE_N)
        place = strip.to(tl.int64) * N + feature
        tl.store(sums_ptr + place, tl.sum(sums, axis=0), mask=feature < N)


# %%
# Each program leaves a row of sums, so ``db`` comes in parts, like a product
# with few tokens. ``_add_parts`` adds them up.

# %%

# Scaffold: the kernel, launched.


def new_dz(dy):
    return padded(*dy.shape, dtype=dy.dtype, device=dy.device)


def new_sums(rows, dy):
    """Room for the parts of db."""
    shape = (rows, dy.shape[1])
    return torch.empty(shape, dtype=torch.float32, device=dy.device)


def dz_in_a_pass(dy, saved, chain, wants_db):
    """dz, and the parts of db if it is wanted, by a kernel of their own."""
    if saved is None and not wants_db:
        return dy, None
    tile = 64, 64
    steps = 2
    M, N = dy.shape
    strips = triton.cdiv(M, tile[0] * steps)
    dz = dy
    saved_desc = None
    dz_desc = None
    if saved is not None:
        dz = new_dz(dy)
        saved_desc, _ = descriptor(saved, *tile)
        dz_desc, _ = descriptor(dz, *tile)
    sums = None
    if wants_db:
        sums = new_sums(strips, dy)
    dy_desc, _ = descriptor(dy, *tile)
    _own_pass[(strips * triton.cdiv(N, tile[1]),)](
        dy_desc=dy_desc,
        saved_desc=saved_desc,
        dz_desc=dz_desc,
        sums_ptr=sums,
        N=N,
        CHAIN=chain,
        TILE_M=tile[0],
        TILE_N=tile[1],
        STEPS=steps,
        # Two stages have one slot: the second tile is requested when the
        # first one has left it, while its dz is on the way out.
        STAGES=2,
        num_warps=4,
    )
    return dz, sums


# %%
# The backward pass puts it together. All matrices lie as a descriptor wants
# them, and ``dy`` and ``saved`` not transposed.


def backward(dy, x, w, saved, chain, wants):
    """dx, dw and db, those that are wanted."""
    wants_dx, wants_dw, wants_db = wants
    M, N = dy.shape
    K = w.shape[1]
    dz, sums = dz_in_a_pass(dy, saved, chain, wants_db)
    dx = None
    if wants_dx:
        dx = torch.empty(M, K, dtype=dy.dtype, device=dy.device)
        product(dz, w, dx)
    dw = None
    if wants_dw:
        dw = torch.empty(N, K, dtype=dy.dtype, device=dy.device)
        product(dz.T, x, dw)
    db = None
    if wants_db:
        db = torch.empty(N, dtype=dy.dtype, device=dy.device)
        add_parts(sums, db)
    return dx, dw, db


# %%
# The slope in the reads of dx
# ----------------------------
#
# Can we do without the extra pass?
#
# The product for ``dx`` loads tiles of ``dz`` anyway. It could load tiles of
# ``dy`` and of the slope in their place, and multiply them on the way to the
# Tensor Cores. Then no kernel reads ``dy`` only to make ``dz``. Two things
# have to be settled.
#
# - **Each tile of dz is needed many times.** All programs that have the same
#   tokens, one for each column of tiles of ``dx``, load the same tiles of
#   ``dy``. If only the first columns of ``dx`` are computed this way, the
#   others can read ``dz``, and so can the product for ``dw``. For that, one
#   of the programs has to store it.
# - **Each column of dz must be added up once.** The program that stores a tile
#   of ``dz`` also adds up its columns, and writes the sums to a row for its
#   row of tiles.
#
# With ``COLUMNS`` programs in each row of tiles, the program in column
# :math:`c` takes care of the steps :math:`c`, :math:`c` + ``COLUMNS``, and so
# on.

# %%

# Drawing: who stores which tile of dz.

figure = plt.figure(
    "Four programs have the same tokens and go over all tiles of dy and of "
    "the slope. Each stores every fourth tile of dz, and the sums of its "
    "columns.",
    figsize=(7.5, 2.4),
)
for column in range(12):
    for row in range(3):
        plt.gca().add_patch(
            plt.Rectangle(
                (column, -row),
                0.94,
                0.9,
                facecolor=f"C{column % 4}" if row == 1 else "none",
                edgecolor="gray",
            )
        )
    plt.text(
        column + 0.47,
        -0.55,
        str(column % 4),
        color="white",
        ha="center",
        va="center",
    )
for column in range(4):
    for row in range(3):
        plt.gca().add_patch(
            plt.Rectangle(
                (14 + column, -row),
                0.94,
                0.9,
                facecolor=f"C{column}" if row == 1 else "none",
                edgecolor="gray",
            )
        )
    plt.text(
        14 + column + 0.47,
        -0.55,
        str(column),
        color="white",
        ha="center",
        va="center",
    )
plt.text(6, 1.1, "dz: new features", ha="center", va="bottom")
plt.text(16, 1.1, "dx: first columns", ha="center", va="bottom")
plt.text(-0.2, -0.55, "tokens", ha="right", va="center", rotation=90)
plt.axis((-1, 18.2, -2.3, 1.9))
plt.axis("off")
plt.show()

# %%


@triton.jit
def _first_columns(
    dy_desc,  # (M, N) in tiles of TILE_M and TILE_N
    saved_desc,  # as dy_desc
    w_desc,  # (N, K) in tiles of TILE_N and TILE_K; transposed, (K, N)
    dz_desc,  # as dy_desc
    dx_desc,  # (M, K) in tiles of TILE_M and TILE_K / 2
    sums_ptr,  # (rows of tiles, N), float32: parts of db
    N,  # new features
    CHAIN: tl.constexpr,  # what makes dz of dy and of what was saved
    W_TRANSPOSED: tl.constexpr,
    COLUMNS: tl.constexpr,  # columns of tiles of dx
    TILE_M: tl.constexpr,  # tokens of a program
    TILE_N: tl.constexpr,  # new features of a step
    TILE_K: tl.constexpr,  # old features of a program
    STAGES: tl.constexpr,
):
    # Programs with the same tokens are neighbors, so that all but one of them
    # find dy and the slope in L2.
    row = tl.program_id(0) // COLUMNS
    column = tl.program_id(0) % COLUMNS
    dx = tl.zeros((TILE_M, TILE_K), tl.float32)

    for n in tl.range(0, N, TILE_N, num_stages=STAGES):
        # dz goes from registers to the Tensor Cores, which take a left
        # operand from there, too.
        dy = dy_desc.load([row * TILE_M, n])
        saved = saved_desc.load([row * TILE_M, n])
        dz = CHAIN(dy, saved).to(dy_desc.dtype)
        w = _load(w_desc, n, column * TILE_K, W_TRANSPOSED)
        dx = tl.dot(dz, w, dx)

        # Is this tile ours to store and to add up?
        if n // TILE_N % COLUMNS == column:
            dz_desc.store([row * TILE_M, n], dz)
            # Tokens that do not exist have a dy of 0.
            sums = tl.sum(dz.to(tl.float32), axis=0)
            feature = n + tl.arange(0, TILE_N)
            place = row.to(tl.int64) * N + feature
            tl.store(sums_ptr + place, sums, mask=feature < N)

    halves = dx.reshape(TILE_M, 2, TILE_K // 2).permute(0, 2, 1)
    left, right = halves.split()
    left_at = column * TILE_K
    right_at = left_at + TILE_K // 2
    dx_desc.store([row * TILE_M, left_at], left.to(dx_desc.dtype))
    dx_desc.store([row * TILE_M, right_at], right.to(dx_desc.dtype))


# %%
# With one column, 64 programs would have work for 8192 tokens, and half of the
# SMs would have nothing to do. So below we measure two columns, and all of
# them.

FIRST_COLUMNS = 2

# %%

# Scaffold: a backward pass whose dx makes dz.


def dz_with_dx(dy, saved, chain, w, dx, columns):
    """dz and the parts of db, while the first columns of dx are computed;
    and how many old features these columns have."""
    M, N = dy.shape
    K = w.shape[1]
    tile_m, tile_k, tile_n, warps, _ = tiles_for("16 bits", aligned=True)[0]
    rows = triton.cdiv(M, tile_m)
    columns = min(columns, triton.cdiv(K, tile_k))
    dz = new_dz(dy)
    sums = new_sums(rows, dy)
    dy_desc, _ = descriptor(dy, tile_m, tile_n)
    saved_desc, _ = descriptor(saved, tile_m, tile_n)
    dz_desc, _ = descriptor(dz, tile_m, tile_n)
    w_desc, w_transposed = descriptor(w, tile_n, tile_k)
    dx_desc, _ = descriptor(dx, tile_m, tile_k // 2)
    # Two left operands in a stage, and room for a half of dx or a tile of dz.
    stage = (2 * tile_m + tile_k) * tile_n * dy.itemsize
    room = SHARED - tile_m * tile_k // 2 * dy.itemsize
    _first_columns[(rows * columns,)](
        dy_desc=dy_desc,
        saved_desc=saved_desc,
        w_desc=w_desc,
        dz_desc=dz_desc,
        dx_desc=dx_desc,
        sums_ptr=sums,
        N=N,
        CHAIN=chain,
        W_TRANSPOSED=w_transposed,
        COLUMNS=columns,
        TILE_M=tile_m,
        TILE_N=tile_n,
        TILE_K=tile_k,
        STAGES=max(1, min(3, room // stage)),
        num_warps=warps,
    )
    return dz, sums, min(K, columns * tile_k)


def backward_without_a_pass(dy, x, w, saved, chain, columns):
    """dx, dw and db; so many columns of tiles of dx also make dz."""
    N, K = w.shape
    dx = torch.empty_like(x)
    dz, sums, done = dz_with_dx(dy, saved, chain, w, dx, columns)
    if done < K:
        product(dz, w[:, done:], dx[:, done:])
    dw = torch.empty_like(w)
    product(dz.T, x, dw)
    db = torch.empty(N, dtype=dy.dtype, device=dy.device)
    add_parts(sums, db)
    return dx, dw, db


# %%
# Into autograd
# -------------
#
# To train with this, PyTorch needs a function that saves the right matrices
# and checks its arguments. It also has to look at layouts. A descriptor wants
# the numbers of a row side by side, and each row at a multiple of 16 bytes. A
# matrix that lies transposed is fine as well. Whatever else comes is copied
# first: a matrix of every second number, say, or one whose rows have 37
# numbers of 2 bytes. The copy has longer rows, whose ends are never read.

# %%

# Scaffold: layouts, and which arguments are taken.


def for_descriptors(t, transposed_too=True):
    """The matrix, or a copy of it in a layout that a descriptor takes."""
    if lies_in_rows(t) or (transposed_too and lies_in_rows(t.T)):
        return t
    return padded(*t.shape, dtype=t.dtype, device=t.device).copy_(t)


def check_arguments(input, weight, bias, activation):
    """Raise an error that names the wrong argument, and says why."""
    named = {"input": input, "weight": weight, "bias": bias}
    named = {name: t for name, t in named.items() if t is not None}
    for name, t in named.items():
        if t.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            raise TypeError(
                f"{name} has {t.dtype}: float16, bfloat16 and float32 are "
                "taken"
            )
        if t.dtype != input.dtype:
            raise TypeError(
                f"{name} has {t.dtype}, and input has {input.dtype}: they "
                "must be the same"
            )
        if t.device.type != DEVICE.type:
            raise ValueError(f"{name} is on {t.device}, not on {DEVICE}")
        # Triton starts a kernel on the current GPU, wherever its tensors are.
        if t.is_cuda and t.device.index != torch.cuda.current_device():
            raise ValueError(
                f"{name} is on {t.device}, which is not the current GPU"
            )
    if input.dim() == 0:
        raise ValueError("input has no dimension: the last one has features")
    if weight.dim() != 2:
        raise ValueError(
            f"weight has {weight.dim()} dimensions, not 2: new features and "
            "old ones"
        )
    if weight.numel() == 0:
        raise ValueError(
            f"weight is {tuple(weight.shape)}: a feature is needed on each "
            "side"
        )
    if input.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"input has {input.shape[-1]} features, and weight takes "
            f"{weight.shape[1]}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"bias is {tuple(bias.shape)}, and weight makes "
            f"{weight.shape[0]} features"
        )
    if activation not in ACTIVATIONS:
        names = ", ".join(str(name) for name in ACTIVATIONS)
        raise ValueError(f"activation is {activation!r}: {names} are taken")


# %%


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, activation, trains):
        ctx.activation = activation
        ctx.shapes = x.shape, weight.shape
        if x.shape[0] == 0:
            return x.new_empty(0, weight.shape[0])
        x = for_descriptors(x)
        w = for_descriptors(weight)
        if bias is not None:
            bias = bias.contiguous()
        keeps_slope = trains and activation in ("gelu", "silu")
        act = ACTIVATIONS[activation]
        y, saved = forward(x, w, bias, act, keeps_slope)
        if activation == "relu":
            saved = y
        ctx.save_for_backward(
            x if ctx.needs_input_grad[1] else None,
            w if ctx.needs_input_grad[0] else None,
            saved,
        )
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable  # no second derivatives
    def backward(ctx, dy):
        wants = ctx.needs_input_grad[:3]
        (M, K), (N, _) = ctx.shapes
        if M == 0:
            shapes = (0, K), (N, K), (N,)
            grads = [
                dy.new_zeros(shape) if want else None
                for shape, want in zip(shapes, wants, strict=True)
            ]
            return *grads, None, None
        x, w, saved = ctx.saved_tensors
        if w is None:
            w = dy.new_empty(N, K)  # for its shape alone
        dy = for_descriptors(dy, transposed_too=False)
        if saved is not None:
            saved = for_descriptors(saved, transposed_too=False)
        chain = CHAINS[ctx.activation]
        return *backward(dy, x, w, saved, chain, wants), None, None


def linear(input, weight, bias=None, activation=None):
    """What F.linear(input, weight, bias) gives, and then an activation.

    input is (..., K), weight is (N, K), bias is (N,) or None. All have
    float16, all bfloat16, or all float32. activation is None, "relu", "gelu"
    (the form with tanh), or "silu".
    """
    check_arguments(input, weight, bias, activation)
    given = [t for t in (input, weight, bias) if t is not None]
    trains = torch.is_grad_enabled() and any(t.requires_grad for t in given)
    dtype = input.dtype
    if not ON_GPU and dtype == torch.bfloat16:
        # The interpreter multiplies the bits of bfloat16 as whole numbers.
        input, weight = input.float(), weight.float()
        bias = None if bias is None else bias.float()
    x = input.reshape(-1, input.shape[-1])
    y = _Linear.apply(x, weight, bias, activation, trains)
    return y.reshape(*input.shape[:-1], weight.shape[0]).to(dtype)


# %%
# Is it right? We compare each number with PyTorch in float64. What we allow is
# a share of the largest number of each result: ``dz`` and the slope were
# rounded to the type of the input before they were multiplied.

# %%

# Scaffold: each result of a layer, compared.

TORCH = {
    None: lambda z: z,
    "relu": F.relu,
    "gelu": lambda z: F.gelu(z, approximate="tanh"),
    "silu": F.silu,
}


def check(M, N, K, activation, dtype=torch.float16):
    """The largest error of y, dx, dw and db, compared with float64."""
    x, w, b, dy = inputs(M, N, K, dtype)
    ours = [t.clone().requires_grad_() for t in (x, w, b)]
    exact = [t.double().requires_grad_() for t in (x, w, b)]
    y = linear(*ours, activation)
    y.backward(dy)
    expected = TORCH[activation](F.linear(*exact))
    expected.backward(dy.double())
    pairs = {"y": (y, expected)}
    for name, t, e in zip(("dx", "dw", "db"), ours, exact, strict=True):
        pairs[name] = t.grad, e.grad
    errors = []
    for name, (found, true) in pairs.items():
        error = ((found - true).abs().max() / true.abs().max()).item()
        assert error < 0.01, f"{name} is off by {error:.1%}"
        errors.append(f"{error:.2%}")
    print("errors below 1%:", " ".join(errors))


# %%

check(M=70, N=150, K=104, activation="gelu")
check(M=300, N=260, K=77, activation="relu")
check(M=130, N=35, K=64, activation="silu", dtype=torch.float32)
check(M=5, N=64, K=600, activation=None, dtype=torch.bfloat16)

# %%
# These sizes are odd on purpose: hardly any of them is a multiple of a tile.
# What a tile has beyond the end of its matrix counts as 0, in sums over old
# features, new features and tokens alike. Rows of 77 numbers of 2 bytes are
# copied first.
#
# All results are the same on each run, to the last bit. Each number of ``y``,
# ``dx`` and ``dw`` is the sum of one program, or of a few parts that are added
# up in a fixed order, and so is each number of ``db``. No kernel adds with
# atomics.
#
# float32 works as well. Whether Tensor Cores may cut its numbers to TF32 is
# for PyTorch's switch to say: ``torch.backends.cuda.matmul.fp32_precision``,
# which older programs set as ``allow_tf32``.
#
# How fast is the backward pass?
# ------------------------------
#
# The backward pass has two products, so we count twice the operations of the
# forward pass. What ``dz`` and ``db`` take is not counted. So the dashed line,
# cuBLAS with the two products alone, is the speed of a backward pass in which
# they take no time.

# %%

# Scaffold: the layer with GELU backward, two benchmarks.


@functools.cache
def gelu_backward_speeds(M, N, K, dtype, lines):
    x, w, b, dy = inputs(M, N, K, dtype)
    saved = normal(M, N, dtype=dtype)
    every = True, True, True
    calls = {
        "z saved": functools.partial(
            backward, dy, x, w, saved, _through_gelu, every
        )
    }
    for name, columns in (
        ("two columns", FIRST_COLUMNS),
        ("all columns", 2**20),
    ):
        calls[name] = functools.partial(
            backward_without_a_pass, dy, x, w, saved, _times_slope, columns
        )
    calls = {name: call for name, call in calls.items() if name in lines}
    calls["cublas"] = lambda: (dy @ w, dy.T @ x)
    given = [t.clone().requires_grad_() for t in (x, w, b)]

    def backward_of(y):
        return functools.partial(
            torch.autograd.grad, y, given, dy, retain_graph=True
        )

    calls["triton"] = backward_of(linear(*given, "gelu"))
    calls["torch"] = backward_of(pytorch_layer(*given))
    compiled = []
    for layer in compiled_layers(M, N, K, dtype):
        compiled.append(backward_of(layer(*given)))
        compiled[-1]()  # compiles the backward pass, and chooses
    return in_turns_with_compiled(4 * M * N * K, calls, compiled)


BACKWARD = {
    "triton": "Triton",
    "z saved": "z saved",
    "two columns": "in two columns of dx",
    "all columns": "in all columns",
    "torch": "PyTorch",
    "torch.compile": "torch.compile",
    "cublas": "cuBLAS, products alone",
}
FEW = {
    name: BACKWARD[name]
    for name in ("triton", "all columns", "torch", "torch.compile", "cublas")
}


@triton.testing.perf_report(
    layer_benchmark("linear-gelu-backward", "backward", *WIDE, BACKWARD)
)
def bench_gelu_backward(M, N, K, dtype, mode, provider):
    """All lines in turns, 15 times, each a CUDA graph that overwrites L2
    first; the time of a graph that only overwrites L2 is subtracted.
    torch.compile: the best of three compilations."""
    if not ON_GPU:
        return 3 * [float("nan")]
    return gelu_backward_speeds(M, N, K, dtype, tuple(BACKWARD))[provider]


@triton.testing.perf_report(
    layer_benchmark("linear-gelu-backward-narrow", "backward", *NARROW, FEW)
)
def bench_gelu_backward_narrow(M, N, K, dtype, mode, provider):
    """All lines in turns, 15 times, each a CUDA graph that overwrites L2
    first; the time of a graph that only overwrites L2 is subtracted.
    torch.compile: the best of three compilations."""
    if not ON_GPU:
        return 3 * [float("nan")]
    return gelu_backward_speeds(M, N, K, dtype, tuple(FEW))[provider]


# %%

in_percent(bench_gelu_backward, "cuBLAS, products alone")

# %%

in_percent(bench_gelu_backward_narrow, "cuBLAS, products alone")

# %%
# **What both figures show.**
# On the H200, with 4096 old features, our backward pass reaches 743 TFLOP/s at
# 4096 new ones and 711 at 14336: 1.03 and 1.05 times the speed of
# torch.compile, and 1.04 and 1.03 times that of PyTorch. With 1024 old
# features it reaches 556 at 4096 new ones, which is 1.06 times the speed of
# torch.compile.
#
# If two columns of ``dx`` make ``dz``, the first two of these numbers are 728
# and 679. If all columns do, they are 571 and 507, and with 1024 old features
# 484. If the forward pass had saved ``z``, the first two numbers would be 738
# and 708.
#
# **Why.**
# The pass of its own only moves bytes, and the Tensor Cores have nothing to
# do: at 8192 × 4096 it moves 201 MB, which takes 42 µs at 4.8 TB/s. The fused
# design cannot save more than that, and it pays more for it. The left operand
# of its products comes from registers, so each step has to wait until ``dy``
# and the slope have arrived there and are multiplied. A step fetches 64 KB in
# place of 48, so there is room for three stages, not four.
#
# The pass of its own waits for memory, so it has time for the dozen
# instructions that make a slope of ``z``. Whether we save the slope or ``z``
# makes no difference here that is larger than the noise.
#
# **What follows.**
# Fewer bytes are not always faster. Tensor Cores are the most expensive thing
# to keep waiting, so we keep the pass of its own. It could vanish in another
# way: if the kernel of the next layer, whose ``dx`` is our ``dy``, multiplied
# it by the slope in its epilogue. Then both layers would have to be one
# function.
#
# Saving ``z`` would have been as good, and with short sums the forward pass
# would be a few percent faster. What speaks for the slope is that GELU and
# SiLU then have the same backward pass.
#
# How many bytes come from DRAM?
# ------------------------------
#
# We let ``ncu`` count what all kernels of the backward pass move, to and from
# DRAM, with 4096 tokens of 1024 features. By hand, our backward pass needs
# five matrices of ``M`` × ``N`` numbers. If all columns of ``dx`` make ``dz``,
# it takes four: ``dy`` and the slope are read, ``dz`` is written, and ``dw``
# reads it. In both cases ``x`` and ``w`` are read, and ``dx`` and ``dw`` are
# written. Without an activation ``dz`` is ``dy``, and three matrices move:
# both products read it, and so does a pass for ``db``. ``ncu`` empties the
# caches before each kernel, so none of them finds in L2 what the one before
# has written.

# %%

# Scaffold: bytes of the backward pass, counted by ncu.


def by_hand(M, N, K, matrices):
    """Bytes that have to move, in 16 bits: so many matrices of M x N
    numbers, and x, w, dx and dw, once each."""
    return 2 * (matrices * M * N + 2 * M * K + 2 * N * K)


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=[1024, 2048, 4096, 8192],
        x_log=True,
        xlabel="N (new features)",
        line_arg="provider",
        line_vals=[
            "triton",
            "five",
            "all columns",
            "four",
            "no activation",
            "three",
        ],
        line_names=[
            "Triton",
            "Triton, by hand",
            "in all columns",
            "in all columns, by hand",
            "no activation",
            "no activation, by hand",
        ],
        ylabel="MB of DRAM",
        plot_name="linear-backward-traffic",
        args={
            "M": 4096,
            "K": 1024,
            "dtype": torch.bfloat16,
            "mode": "backward",
            "counter": "dram__bytes.sum",
        },
    )
)
def bench_traffic(M, N, K, dtype, mode, counter, provider):
    """What moves to and from DRAM in a backward pass with GELU, or without an
    activation, all kernels together; by hand, what has to."""
    if not ON_GPU:
        return 3 * [float("nan")]
    matrices = {"five": 5, "four": 4, "three": 3}
    if provider in matrices:
        return by_hand(M, N, K, matrices[provider]) / 1e6
    x, w, _, dy = inputs(M, N, K, dtype)
    saved = normal(M, N, dtype=dtype)
    given = dy, x, w, saved, _times_slope

    def run():
        if provider == "all columns":
            return backward_without_a_pass(*given, columns=2**20)
        every = True, True, True
        if provider == "no activation":
            return backward(dy, x, w, None, None, every)
        return backward(*given, wants=every)

    run()  # compiles
    torch.cuda.synchronize()
    with torch.cuda.nvtx.range(f"counted {provider} {N} per 1e6"):
        run()
    return (float("nan"),) * 3


# %%

bench_traffic.run(show_plots=ON_GPU)

# %%
# **What the figure shows.**
# On the H200, with 4096 tokens of 1024 features and 4096 new ones, our
# backward pass moves 173 MB, and 201 by hand. If all columns of ``dx`` make
# ``dz``, it moves 146 MB, and 168 by hand. Without an activation our backward
# pass moves 123 MB, and 134 by hand.
#
# **Why.**
# It is less than by hand, because what a kernel writes last is still in L2
# when it ends, and is not counted. At 1024 new features that is everything:
# our backward pass moves 44 MB, 19 less than by hand, and ``dz``, ``dx`` and
# ``dw`` together have 19 MB. With more features a smaller part of what is
# written stays in L2, and the products read some tiles twice.
#
# Without an activation, ``db`` costs a read of ``dy`` by itself: 34 MB.
#
# **What follows.**
# The fused design moves fewer bytes, and it is slower all the same. DRAM is
# not what a backward pass waits for at these sizes.
#
# Where PyTorch or a library is better
# ------------------------------------
#
# - **Without an activation there is nothing to gain.** On the H200, at the
#   three sizes above, our three products reach between 99% and 101% of cuBLAS.
# - **With long sums there is little to gain.** With 4096 old features both
#   passes of the layer with GELU are 1% to 5% faster than torch.compile, which
#   needs no kernel of ours.
# - **Few tokens, few tiles.** With 64 tokens cuBLAS is 1.05 times as fast as
#   we are. For the gradient of a weight of 768 × 768 it is up to 1.20 times as
#   fast. It has many more shapes of tiles than our four, so it can divide the
#   work more evenly.
# - **On other cards.** The tiles were chosen on an H200. cuBLAS has tiles for
#   each card, and chooses among them at each size.
# - **Odd sizes.** Rows that are no multiple of 16 bytes are copied first.
#   PyTorch has slower kernels for them, too, but no copy.
# - **Small layers.** Each launch makes its descriptors anew on the host. With
#   few tokens the GPU may wait for that.
# - **PyTorch takes more**: float64, autocast, second derivatives, and 8-bit
#   numbers with scales.
#
# Exercise
# --------
#
# **Exercise 1: a snake.**
# In a group of rows, our order goes down one column of tiles, and then begins
# at the top of the next. So a tile and the one after it usually need the same
# rows of ``w``, but at the end of a column they share nothing. Write a
# function like ``_place`` with this order: a column down, the next one up, and
# so on, and every other group from the last column to the first. Then a tile
# and the one after it always share a row or a column.
#
# Give your function to the checker, ``exercise_1``. It prints whether each
# tile comes once, and how many times two tiles that follow each other share
# nothing. Here it checks our order, for 10 rows and 7 columns of tiles.
#
# **Hint 1.** The column of a tile says whether the group is going down or up.
#
# **Hint 2.** For a column that goes up, row ``r`` of a group of ``height``
# rows becomes ``height - 1 - r``.
#
# **Hint 3.** Whether a group goes back is said by ``first // GROUP``. Does the
# direction in a column depend on the number of the column, or on how many
# columns came before it in this group?


@triton.jit
def _visit(
    order_ptr,  # (tiles, 2)
    rows,
    columns,
    GROUP: tl.constexpr,
    PLACE: tl.constexpr,  # the order: a function like _place
):
    tile = tl.program_id(0)
    row, column = PLACE(tile, rows, columns, GROUP)
    tl.store(order_ptr + 2 * tile, row)
    tl.store(order_ptr + 2 * tile + 1, column)


def exercise_1(place):
    """Whether an order has each tile once, and each tile shares a row or a
    column with the next one."""
    rows = 10
    columns = 7
    tiles = rows * columns
    order = torch.zeros(tiles, 2, dtype=torch.int32, device=DEVICE)
    _visit[(tiles,)](
        order_ptr=order, rows=rows, columns=columns, GROUP=4, PLACE=place
    )
    visited = [tuple(pair) for pair in order.tolist()]
    every = set(itertools.product(range(rows), range(columns)))
    once = set(visited) == every
    apart = 0
    for (row, column), (next_row, next_column) in itertools.pairwise(visited):
        if row != next_row and column != next_column:
            apart += 1
    print(
        f"each tile once: {once}; tiles in a row that share nothing: {apart}"
    )
    return once and apart == 0


exercise_1(_place)

# %%

# Solution 1


@triton.jit
def _snake(tile, rows, columns, GROUP: tl.constexpr):
    first = tile // (GROUP * columns) * GROUP
    height = tl.minimum(rows - first, GROUP)
    place = tile % (GROUP * columns)
    row = place % height
    column = place // height
    # New: every other column of a group goes up.
    row = tl.where(column % 2 == 1, height - 1 - row, row)
    # New: every other group goes from the last column to the first. How many
    # columns came before in this group decides about down and up, so this
    # comes last.
    back = first // GROUP % 2 == 1
    column = tl.where(back, columns - 1 - column, column)
    return first + row, column


assert exercise_1(_snake)

# %%
# What we learned
# ---------------
#
# These are the designs of this page, with their speed on the H200 at 8192
# tokens, 4096 old and 4096 new features.
#
# The product ``y``:
#
# - **Float32, without Tensor Cores:** 14 TFLOP/s.
# - **16 bits, one tile a program:** 335.
# - **Groups of 8 rows of tiles:** 335.
# - **Three stages:** 607.
# - **Descriptors:** 665.
# - **Tiles of 128 × 256:** 769.
# - **Persistent programs:** 789.
# - **Results in halves, and a fourth stage:** 802.
# - **cuBLAS:** 803.
#
# The backward pass with GELU and bias:
#
# - **PyTorch:** 713 TFLOP/s.
# - **torch.compile:** 723.
# - **Ours, dz in the reads of dx, all columns:** 571.
# - **Ours, dz in the reads of dx, two columns:** 728.
# - **Ours, dz in a pass of its own:** 743.
#
# And for kernels in general:
#
# - A tile uses each number that it loads many times. The larger it is, the
#   less has to move, until its sums do not fit into registers.
# - Programs that run at the same time should need the same tiles. The order
#   decides that, and it costs nothing. The faster a kernel is and the larger
#   its matrices are, the more it matters.
# - Tensor Cores are so fast that the work is to feed them: loads that run
#   ahead, no addresses, no pause between two tiles.
# - A backward pass is often the same kernel with other layouts.
# - What is on the chip anyway is the cheapest place to compute something, as
#   long as Tensor Cores do not wait for it. Fewer bytes alone make nothing
#   faster.
# - A rule that estimates the time of each choice needs only a few numbers of
#   the card. One of them says how much more an SM gets from L2 when few others
#   load.
#
# **Next:** `A gate between two products <02-swiglu.html>`_ fuses more than an
# activation with a product.
