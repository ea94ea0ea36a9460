r"""
A linear layer, both passes
===========================

How do you multiply matrices as fast as a GPU can, in both passes of a layer?
Take tiles, keep the Tensor Cores fed, and do everything else that the layer
needs while its tiles are on the chip anyway.

.. math:: y = f(x w^\top + b), \qquad
   dx = dz \, w, \qquad dw = dz^\top x, \qquad
   dz = dy \odot f'(x w^\top + b)

Most of the time of a language model goes into this layer. With 8192 tokens,
4096 features before it and 14336 after it, its forward pass takes
0.96 · 10¹² operations, and its backward pass twice as many.
On this page we begin with a kernel that is right and slow, and change one
thing after the other until it multiplies about as fast as NVIDIA's library.
Then one kernel does all three products of the layer, with the bias and the
activation in it.

**What you will learn**

- Why a product of matrices is computed in tiles, and how many bytes that
  saves.
- What Tensor Cores, the order of tiles, loads ahead, descriptors and
  persistent programs bring, each measured by itself.
- How bias and activation fit into the end of a product, the *epilogue*.
- Why both gradients are the same kernel with other layouts, and where the
  gradient of the bias comes from.
- What the forward pass has to save for an activation.
- What to do when there are few tokens.

**What you need:** `Layer normalization, both passes
<../layer-norm/01-layer-norm.html>`_ for programs, tiles and masks, and `Loads
in flight <../layer-norm/04-loads-in-flight.html>`_ for stages. You don't need
a GPU.
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

GPU = torch.cuda.get_device_properties(DEVICE) if ON_GPU else None
NUM_SMS = GPU.multi_processor_count if ON_GPU else 4
# An H100 has a unit that fetches tiles, and so have later GPUs of NVIDIA.
CAPABILITY = torch.cuda.get_device_capability() if ON_GPU else (9, 0)
HAS_TMA = CAPABILITY[0] >= 9 and torch.version.hip is None

# %%
# Two tokens by three features
# ----------------------------
#
# What does a linear layer compute?
#
# Its input ``x`` has a row for each token and a column for each feature. Its
# weight ``w`` has a row for each feature of the result. So the result
# ``z = x @ w.T + b`` has a row for each token, and each of its numbers is the
# dot product of a row of ``x`` and a row of ``w``. An *activation* ``f`` is
# applied to each number: here ``relu``, which replaces what is below 0 by 0.

options = {"dtype": torch.float64, "device": DEVICE}
x = torch.tensor([[1, 2, 3], [0, 1, -1]], **options)
w = torch.tensor([[1, 0, 1], [2, 1, 0], [0, -1, 0], [1, 1, 1]], **options)
b = torch.tensor([0, 1, 1, 0], **options)
for tensor in (x, w, b):
    tensor.requires_grad_()  # autograd will check our gradients

z = x @ w.T + b
y = z.relu()
print("z =", z.tolist())
print("y =", y.tolist())

# %%
# The first number is 1 · 1 + 2 · 0 + 3 · 1 = 4.
#
# And the backward pass? It gets ``dy``, the gradient of ``y``.
#
# - Each ``z`` changes ``y`` by the slope of the activation, so
#   ``dz = dy * slope``. The slope of ``relu`` is 1 where ``z`` is above 0, and
#   0 elsewhere.
# - A number of ``x`` takes part in each ``z`` of its row, each time with a
#   weight. So ``dx = dz @ w``.
# - A weight takes part once for each token, with a number of ``x``. So
#   ``dw = dz.T @ x``.
# - A bias is added to the ``z`` of each token, so ``db`` is the sum of ``dz``
#   over all tokens.

dy = torch.tensor([[1, 1, 1, 1], [1, 2, 3, 4]], **options)
y.backward(dy)
with torch.no_grad():
    dz = dy * (z > 0)
    assert torch.equal(x.grad, dz @ w)
    assert torch.equal(w.grad, dz.T @ x)
    assert torch.equal(b.grad, dz.sum(0))
print("dx, dw and db are those of autograd")

# %%
# So the whole layer is three products of matrices. All three have the same
# number of operations: 2 · tokens · features in · features out, because a
# multiplication and an addition count as two.
#
# Why tiles?
# ----------
#
# How many bytes does a product read?
#
# Let's take a program for each number of the result. It reads a row of ``x``
# and a row of ``w``, that is two numbers of 2 bytes for each multiplication
# and addition. So it does half an operation for each byte.
# By its data sheet an H100 moves 3.35 · 10¹² bytes in a second. So it would do
# 1.7 · 10¹² operations in a second, that is 1.7 TFLOP/s. Its arithmetic can do
# up to 989 TFLOP/s.
#
# A program that computes a *tile* of the result reads as many rows of ``x`` as
# the tile has rows, and as many rows of ``w`` as it has columns, and uses each
# number many times.

for tile_m, tile_n in ((1, 1), (16, 16), (64, 64), (128, 128), (128, 256)):
    # One step in the common dimension.
    operations = 2 * tile_m * tile_n
    bytes_read = 2 * (tile_m + tile_n)
    print(
        f"{tile_m:3} x {tile_n:3}: {operations / bytes_read:5.1f} operations "
        "for each byte"
    )

# %%
# A tile of 128 × 256 does 85 operations for each byte. To keep its arithmetic
# busy from DRAM alone, an H100 needs 989 / 3.35 = 295 operations for each
# byte. But what we counted are the bytes that programs ask for. Several
# programs ask for the same ones, and all but the first may get them from L2.
#
# How large can a tile be? Its sums stay in registers. A tile of 128 × 256
# has 32768 sums of 4 bytes, which is 128 KB: half of the registers of an SM.
# A tile twice as large would need all of them.

# %%

# Drawing: a tile of the result, and what it needs of x and w.

figure = plt.figure(
    "A tile of y needs a strip of rows of x and a strip of rows of w. A "
    "program goes along both strips, one tile of each in a step.",
    figsize=(7.5, 3),
)
axes = figure.gca()


def draw_matrix(left, bottom, width, height, name):
    axes.add_patch(
        plt.Rectangle(
            (left, bottom), width, height, facecolor="none", edgecolor="gray"
        )
    )
    axes.text(left + width / 2, bottom + height + 0.15, name, ha="center")


def draw_tile(left, bottom, width, height, color):
    axes.add_patch(
        plt.Rectangle((left, bottom), width, height, facecolor=color)
    )


draw_matrix(0, 0, 3, 4, "x: tokens × K")
draw_matrix(4.2, 0, 3, 5, "w: N × K")
draw_matrix(8.6, 0, 5, 4, "y: tokens × N")
draw_tile(0, 2, 3, 1, "C2")
draw_tile(1, 2, 0.5, 1, "C1")
draw_tile(4.2, 2, 3, 2, "C2")
draw_tile(5.2, 2, 0.5, 2, "C1")
draw_tile(9.6, 2, 2, 1, "C0")
axes.axis((-0.3, 14, -0.5, 6))
axes.set_aspect("equal")
axes.axis("off")
plt.show()

# %%
# One tile a program
# ------------------
#
# What does the plainest kernel with tiles look like?
#
# Each program has one tile of ``y``. It goes along the common dimension, ``K``
# features, ``TILE_K`` of them in a step. A step loads a tile of ``x`` and a
# tile of ``w``, multiplies them with ``tl.dot``, and adds the product to the
# sums.
# The kernel below has switches, which we will turn on one after the other:
# whether it multiplies with Tensor Cores, how large its tiles are, in which
# order it takes them, and how far its loads run ahead.


@triton.jit
def _tile_of(
    number,  # of a program
    tiles_m,
    tiles_n,
    GROUP: tl.constexpr,  # rows of tiles that are taken together
):
    # A group has GROUP rows of tiles, or what is left of them at the end. In
    # a group we go down a column of tiles, then to the next column. With a
    # GROUP of 1 that is one row after the other.
    in_group = GROUP * tiles_n
    first = number // in_group * GROUP
    rows = min(tiles_m - first, GROUP)
    i = first + number % in_group % rows
    j = number % in_group // rows
    return i, j


@triton.jit
def _linear_fwd_by_address(
    x_ptr,  # (M, K), contiguous
    w_ptr,  # (N, K), contiguous
    y_ptr,  # (M, N), contiguous
    M,  # tokens
    N,  # features of the result
    K,  # features of the input
    TENSOR_CORES: tl.constexpr,  # whether operands stay in 16 bits
    GROUP: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    STAGES: tl.constexpr,  # how far loads run ahead
):
    # Which tile is ours?
    i, j = _tile_of(
        tl.program_id(0), tl.cdiv(M, TILE_M), tl.cdiv(N, TILE_N), GROUP
    )
    rows = i.to(tl.int64) * TILE_M + tl.arange(0, TILE_M)
    cols = j.to(tl.int64) * TILE_N + tl.arange(0, TILE_N)

    sums = tl.zeros((TILE_M, TILE_N), tl.float32)
    for start in tl.range(0, K, TILE_K, num_stages=STAGES):
        # A tile of each operand. What lies beyond an edge is loaded as 0, and
        # adds nothing.
        k = start + tl.arange(0, TILE_K)
        x = tl.load(
            x_ptr + rows[:, None] * K + k[None, :],
            mask=(rows[:, None] < M) & (k[None, :] < K),
            other=0,
        )
        w = tl.load(
            w_ptr + cols[:, None] * K + k[None, :],
            mask=(cols[:, None] < N) & (k[None, :] < K),
            other=0,
        )
        if TENSOR_CORES:
            sums = tl.dot(x, w.T, sums)
        else:
            # In float32, without Tensor Cores: "ieee" forbids them.
            sums = tl.dot(
                x.to(tl.float32),
                w.to(tl.float32).T,
                sums,
                input_precision="ieee",
            )

    tl.store(
        y_ptr + rows[:, None] * N + cols[None, :],
        sums.to(y_ptr.dtype.element_ty),
        mask=(rows[:, None] < M) & (cols[None, :] < N),
    )


# %%
# ``tl.dot(x, w.T, sums)`` multiplies a tile of ``x`` by a tile of ``w``,
# turned around, and adds to ``sums``. *Tensor Cores* are hardware for just
# that, four of them in each streaming multiprocessor (SM). They take operands
# of 16 bits and add in 32. All sides of a tile must be at least 16. On an H100
# they read operands from shared memory, by rows or by columns, so that the
# ``.T`` costs nothing.
#
# We write down the first rungs of our ladder as settings of this kernel.

RUNGS = {
    # Tensor Cores, group, tile of y, features in a step, stages, warps
    "one tile": (False, 1, 64, 64, 32, 1, 4),
    "Tensor Cores": (True, 1, 64, 64, 32, 1, 4),
    "tiles of 128": (True, 1, 128, 128, 64, 1, 8),
    "grouped": (True, 8, 128, 128, 64, 1, 8),
    "stages": (True, 8, 128, 128, 64, 3, 8),
}


def by_address(x, w, rung):
    """x @ w.T for contiguous matrices, by a rung of the ladder."""
    M, K = x.shape
    N = w.shape[0]
    tensor_cores, group, tile_m, tile_n, tile_k, stages, warps = RUNGS[rung]
    y = torch.empty(M, N, dtype=x.dtype, device=x.device)
    tiles = triton.cdiv(M, tile_m) * triton.cdiv(N, tile_n)
    _linear_fwd_by_address[(tiles,)](
        x_ptr=x,
        w_ptr=w,
        y_ptr=y,
        M=M,
        N=N,
        K=K,
        TENSOR_CORES=tensor_cores,
        GROUP=group,
        TILE_M=tile_m,
        TILE_N=tile_n,
        TILE_K=tile_k,
        STAGES=stages,
        num_warps=warps,
    )
    return y


x = torch.randn(70, 50, device=DEVICE).half()
w = torch.randn(150, 50, device=DEVICE).half()
for rung in RUNGS:
    y = by_address(x, w, rung)
    torch.testing.assert_close(y, x @ w.T, rtol=1e-2, atol=1e-2)
print("70 x 50 times 50 x 150, all rungs: right")

# %%
# How much do Tensor Cores bring?
# -------------------------------
#
# We multiply square matrices of bfloat16 and report TFLOP/s: the operations,
# :math:`2 N^3`, divided by the time. Beside our first three rungs stands
# PyTorch, which calls NVIDIA's library *cuBLAS* for a product.
# A card that has just worked hard lowers its clock, so all lines take turns.

# %%

# Scaffold: the clock, in turns, from page 01 of attention.


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

# Scaffold: three rungs, a benchmark.

NAMES = {
    "one tile": "One tile a program",
    "Tensor Cores": "Tensor Cores",
    "tiles of 128": "Tiles of 128 x 128",
    "grouped": "Grouped order",
    "stages": "Three stages",
    "descriptors": "Descriptors",
    "large tiles": "Tiles of 128 x 256",
    "triton": "Persistent",
    "cublas": "cuBLAS, by PyTorch",
}
FIRST = ["one tile", "Tensor Cores", "tiles of 128", "cublas"]
LADDER = list(NAMES)[2:]


def tflops(operations, calls):
    """TFLOP/s of calls in turns: median, low, high."""
    found = {}
    for name, (median, short, long) in in_turns(calls).items():
        found[name] = [operations / us * 1e-6 for us in (median, long, short)]
    return found


def square(N, dtype):
    """Two matrices."""
    x = torch.randn(N, N, device=DEVICE, dtype=dtype)
    w = torch.randn(N, N, device=DEVICE, dtype=dtype)
    return x, w


@functools.cache  # all lines in turns; then each is asked for its own
def first_speeds(N, dtype):
    x, w = square(N, dtype)
    calls = {
        name: functools.partial(by_address, x, w, name) for name in FIRST[:3]
    }
    calls["cublas"] = lambda: x @ w.T
    return tflops(2 * N**3, calls)


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=[1024, 2048, 3072, 4096, 6144],
        xlabel="N (rows and columns of all matrices)",
        line_arg="provider",
        line_vals=FIRST,
        line_names=[NAMES[name] for name in FIRST],
        ylabel="TFLOP/s",
        plot_name="product-tensor-cores",
        args={"dtype": torch.bfloat16, "mode": "forward"},
    )
)
def bench_first(N, dtype, mode, provider):
    """All lines in turns, 15 times, each a CUDA graph that overwrites L2
    first; the time of a graph that only overwrites L2 is subtracted."""
    if not ON_GPU:
        return 3 * [float("nan")]  # the interpreter cannot be timed
    return first_speeds(N, dtype)[provider]


# %%

in_percent(bench_first)

# %%
# **What the figure shows.**
# On the H100, at 4096 rows and columns, the plain kernel reaches NN TFLOP/s.
# With Tensor Cores it reaches NN, and with larger tiles NN. cuBLAS reaches NN.
#
# **Why.**
# Without Tensor Cores the data sheet allows 67 TFLOP/s in float32. With them
# it allows 989, and we are far from that. A tile of 64 × 64 does 32 operations
# for each byte that it asks for, and one of 128 × 128 does 64. So at the same
# number of bytes in a second it can be twice as fast.
#
# **What follows.**
# Tensor Cores wait for something. The next rungs find out what for.
#
# The order of tiles
# ------------------
#
# Does it matter which program has which tile?
#
# An H100 has 132 SMs, so at least 132 programs run at a time, those with
# neighboring numbers. What one of them has read, the next one finds in L2. So
# it is good if the tiles of neighbors lie close to each other.
# Let's look at 8 programs that run at a time, and at 8 × 8 tiles. In rows, 8
# tiles need one strip of ``x`` and eight strips of ``w``. In groups of two
# rows, they need two strips of ``x`` and four of ``w``: six instead of nine.

# %%

# Drawing: the first 8 tiles, in rows and in groups of two rows.

figure = plt.figure(
    "8 x 8 tiles with the numbers of their programs. In rows, the first eight "
    "are a row. In groups of two rows, they are a block of 2 x 4.",
    figsize=(7.5, 3.4),
)
for axes, group in zip(figure.subplots(1, 2), (1, 2), strict=True):
    for number in range(64):
        first = number // (8 * group) * group
        i = first + number % (8 * group) % group
        j = number % (8 * group) // group
        axes.add_patch(
            plt.Rectangle(
                (j, -i),
                0.94,
                0.9,
                facecolor="C0" if number < 8 else "none",
                edgecolor="gray",
            )
        )
        axes.text(
            j + 0.47,
            0.43 - i,
            number,
            color="white" if number < 8 else "black",
            ha="center",
            va="center",
            fontsize=8,
        )
    axes.set_title("in rows" if group == 1 else "in groups of 2 rows")
    axes.axis((-0.2, 8.2, -7.3, 1.1))
    axes.axis("off")
plt.show()

# %%
# ``_tile_of`` above computes this order, with groups of 8 rows.
#
# Does the order of tiles really change what L2 delivers? A clock cannot tell,
# but ``ncu``, NVIDIA's profiler, counts how many of the sectors, of 32 bytes
# each, that were asked for L2 had already.

# %%

# Scaffold: requests that L2 answers, a benchmark that ncu counts.


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=["2048", "4096", "8192"],
        xlabel="N (rows and columns of all matrices)",
        line_arg="provider",
        line_vals=["tiles of 128", "grouped"],
        line_names=["In rows", "In groups of 8 rows"],
        ylabel="% of L2 requests hit",
        plot_name="product-l2",
        args={
            "dtype": torch.bfloat16,
            "mode": "forward",
            "counter": "lts__t_sector_hit_rate.pct",
        },
    )
)
def l2_hits(N, dtype, mode, counter, provider):
    """Sectors that L2 had, of all that were asked for."""
    if not ON_GPU:
        return 3 * [float("nan")]
    x, w = square(int(N), dtype)
    by_address(x, w, provider)  # compiles the kernel
    with torch.cuda.nvtx.range(f"counted {provider} {N}"):
        by_address(x, w, provider)
    return 3 * [float("nan")]  # only ncu knows


# %%

l2_hits.run(show_plots=ON_GPU)

# %%
# On the H100, at 8192 rows and columns, L2 has NN% of what is asked for in
# rows, and NN% in the grouped order.
#
# Loads ahead
# -----------
#
# What do Tensor Cores do while a tile is on its way?
#
# With one stage they wait: a step loads its tiles, and then multiplies them.
# With three stages, the loads of the next two steps are under way while one
# multiplies, as in `Loads in flight
# <../layer-norm/04-loads-in-flight.html>`_. Tiles that have been loaded wait
# in shared memory. A step of 128 + 128 rows of 64 numbers takes 32 KB, and
# three of them 96 KB. An SM has 227 KB for us.
#
# Descriptors, and programs that stay
# -----------------------------------
#
# What is left to do for threads, other than to multiply?
#
# They compute addresses and masks: in each step one for every few numbers. A
# *tensor descriptor* takes that away from them. It knows where a matrix lies,
# and its shape, and the shape of a tile. One thread then asks the *Tensor
# Memory Accelerator* (TMA) of the SM for a tile, and gets zeros for what lies
# beyond an edge.
#
# And then there are the ends. A program stores its tile and is done, and the
# next one begins with nothing loaded. Tensor Cores wait until its first tiles
# have come. A *persistent* program has several tiles, one after the other. As
# many programs run as there are SMs. If both of its loops, over tiles and over
# steps, become a single one, then the loads run ahead across the end of a
# tile. That is what ``flatten=True`` asks for.
#
# A tile of the result is stored by the TMA, too, so it has to pass through
# shared memory. With 128 × 256 numbers of 16 bits that is 64 KB, which we
# would rather use for one stage more. So we split it and store one half after
# the other. Triton has no slices of a tile in registers. But we can
# ``reshape`` 256 columns to 2 × 128, move the 2 to the end, and ``split``
# there.
#
# What a layer does besides
# -------------------------
#
# Where do the bias and the activation go?
#
# At the end of a tile its sums are in registers, complete. This is the place
# for everything that happens to each number by itself. It is called the
# *epilogue*. If PyTorch applied the activation afterwards, it would have to
# read ``z`` and write ``y``. With 8192 tokens and 14336 features that is
# 0.47 GB, and takes at least 0.14 ms where the product takes at least 0.97 ms.
#
# What should the forward pass save for the backward pass? It needs the slope
# of the activation.
#
# - For ``relu`` it is 1 where ``y`` is above 0. So ``y`` is enough, and a
#   model keeps that anyway for its next layer.
# - For ``gelu`` and ``silu``, ``y`` does not tell the slope: both functions
#   fall at first, and then they rise, so that the same ``y`` comes from two
#   different ``z``. We could save ``z``, as PyTorch does. But then the
#   backward pass has to compute an exponential for each number, and in both of
#   its products each number is loaded by several programs. In the epilogue the
#   exponential is there, once for each number. So we save the slope itself. It
#   takes as many bytes as ``z``, and it costs one more rounding to 16 bits.


@triton.jit
def _activate(z, ACTIVATION: tl.constexpr):
    """gelu (by tanh) or silu of z, and its slope."""
    # Both are z p. For silu, p is the sigmoid of z. For gelu it is
    # (1 + tanh u) / 2, and that is the sigmoid of 2u.
    if ACTIVATION == "gelu":
        u = 1.5957691216057308 * z * (1 + 0.044715 * z * z)
        # The slope of u. Where z is large, p is 0 or 1, and the slope of u
        # must not become infinite: infinity times 0 is not a number.
        near = tl.minimum(tl.abs(z), 30)
        du = 1.5957691216057308 * (1 + 0.134145 * near * near)
    else:
        u = z
        du = 1.0
    p = 1 / (1 + tl.exp(-u))
    y = z * p
    return y, p + y * (1 - p) * du


@triton.jit
def _finish(
    z,  # a tile of sums, in registers
    row,  # where it begins
    column,
    y_desc,
    slope_desc,  # where slopes are saved; None: nowhere
    bias_ptr,  # (N,), or None
    N,
    ACTIVATION: tl.constexpr,  # "relu", "gelu", "silu" or None
    COLUMNS: tl.constexpr,  # of the tile
):
    """The epilogue: bias, activation, store."""
    if bias_ptr is not None:
        columns = column + tl.arange(0, COLUMNS)
        bias = tl.load(bias_ptr + columns, mask=columns < N, other=0)
        z = z + bias.to(tl.float32)[None, :]
    if ACTIVATION == "relu":
        z = tl.where(z < 0, 0, z)  # NaN stays NaN
    elif ACTIVATION is not None:
        z, slope = _activate(z, ACTIVATION)
        if slope_desc is not None:
            slope_desc.store([row, column], slope.to(slope_desc.dtype))
    # Nothing is stored beyond the edges of y.
    y_desc.store([row, column], z.to(y_desc.dtype))


# %%
# The kernel
# ----------
#
# One kernel for three products?
#
# They differ in what they add over, and in how their operands lie in memory.
# The kernel below multiplies ``a``, (M, K), by ``b``, (K, N).
#
# - ``y = x @ w.T``: ``a`` is ``x``, ``b`` is ``w.T``, and it adds over
#   features in.
# - ``dx = dz @ w``: ``a`` is ``dy`` times the slope, ``b`` is ``w``, and it
#   adds over features out.
# - ``dw = dz.T @ x``: ``a`` is the transpose of ``dy`` times the slope, ``b``
#   is ``x``, and it adds over tokens.
#
# An operand may lie in memory by rows or by columns. ``w.T`` lies by columns:
# in memory it is ``w``. Then a tile of ``w`` is loaded, and turned around for
# the Tensor Cores. That is all that differs between layouts.
#
# Two things are there for the backward pass. A step multiplies ``dy`` by the
# slope, so ``dz`` is never written to memory. And the gradient of the bias
# needs no pass of its own: ``db`` is the sum of each row of ``dz.T``, and the
# product ``dz.T @ x`` goes along these rows anyway. A row times a column of
# ones is its sum, and so Tensor Cores can do that, too. ``tl.dot`` wants at
# least 16 columns. Beside 256 columns of ``x`` these are 6% more to multiply.
# What ``PARTS`` is for comes later.


@triton.jit
def _linear_product(
    a_desc,  # (M, K) in tiles, or (K, M) if it lies by columns
    slope_desc,  # a is multiplied by it, lies as a_desc does; or None
    b_desc,  # (K, N) in tiles, or (N, K) if it lies by columns
    y_desc,  # (M, N) in tiles, or in halves of them
    save_desc,  # as y_desc: the slopes of the activation; or None
    bias_ptr,  # (N,), or None
    sums_ptr,  # (PARTS, M): sums of the rows of a; or None
    M,
    N,
    K,
    A_BY_COLUMNS: tl.constexpr,
    B_BY_COLUMNS: tl.constexpr,
    POSITIVE: tl.constexpr,  # slope_desc has y of a relu
    ACTIVATION: tl.constexpr,
    PRECISION: tl.constexpr,  # of products of float32
    PARTS: tl.constexpr,  # into which K is divided
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
    HALVES: tl.constexpr,  # whether a tile is stored in halves
):
    tiles_m = tl.cdiv(M, TILE_M)
    tiles_n = tl.cdiv(N, TILE_N)
    tiles = tiles_m * tiles_n
    steps = tl.cdiv(tl.cdiv(K, TILE_K), PARTS)  # for one part of a tile

    # One tile after the other. ``flatten`` makes one loop of both, so that
    # loads run ahead across the end of a tile.
    for number in tl.range(
        tl.program_id(0), tiles * PARTS, tl.num_programs(0), flatten=True
    ):
        i, j = _tile_of(number % tiles, tiles_m, tiles_n, GROUP)
        part = number // tiles
        total = tl.zeros((TILE_M, TILE_N), tl.float32)
        sums = tl.zeros((TILE_M, 16), tl.float32)
        ones = tl.full((TILE_K, 16), 1, a_desc.dtype)

        for step in tl.range(0, steps, num_stages=STAGES):
            # A tile of each operand, zeros beyond its edges.
            k = (part * steps + step) * TILE_K
            if A_BY_COLUMNS:
                a = a_desc.load([k, i * TILE_M])
            else:
                a = a_desc.load([i * TILE_M, k])
            if slope_desc is not None:
                # dz, in registers alone.
                if A_BY_COLUMNS:
                    slope = slope_desc.load([k, i * TILE_M])
                else:
                    slope = slope_desc.load([i * TILE_M, k])
                if POSITIVE:
                    a = tl.where(slope <= 0, 0, a).to(a.dtype)
                else:
                    a = a * slope
            if A_BY_COLUMNS:
                a = a.T
            if B_BY_COLUMNS:
                b = b_desc.load([j * TILE_N, k]).T
            else:
                b = b_desc.load([k, j * TILE_N])
            total = tl.dot(a, b, total, input_precision=PRECISION)
            if sums_ptr is not None:
                # A row times ones is its sum: 16 columns of it, the fewest.
                sums = tl.dot(a, ones, sums, input_precision=PRECISION)

        row = (part * tiles_m + i) * TILE_M
        if HALVES:
            halves = tl.reshape(total, (TILE_M, 2, TILE_N // 2))
            left, right = tl.split(tl.permute(halves, (0, 2, 1)))
            _finish(
                left, row, j * TILE_N, y_desc, save_desc, bias_ptr, N,
                ACTIVATION, TILE_N // 2,
            )  # fmt: skip
            _finish(
                right, row, j * TILE_N + TILE_N // 2, y_desc, save_desc,
                bias_ptr, N, ACTIVATION, TILE_N // 2,
            )  # fmt: skip
        else:
            _finish(
                total, row, j * TILE_N, y_desc, save_desc, bias_ptr, N,
                ACTIVATION, TILE_N,
            )  # fmt: skip
        if sums_ptr is not None:
            # All programs of a row of tiles have the same sums. One stores
            # them.
            first_of_row = j == 0
            if first_of_row:
                rows = i * TILE_M + tl.arange(0, TILE_M)
                tl.store(
                    sums_ptr + part * M + rows,
                    tl.max(sums, axis=1),  # 16 equal columns
                    mask=rows < M,
                )


# %%
# How do Tensor Cores get ``dz``? An operand ``a`` that was loaded and is not
# changed stays in shared memory. ``dz`` was computed, so it is in registers,
# and Tensor Cores of an H100 can take a left operand from there, too.
#
# Few tokens
# ----------
#
# What if there are fewer tiles than SMs?
#
# With 16 tokens and 4096 features there is one row of tiles: 16 tiles of 256
# columns. So 116 of the 132 SMs have nothing to do, while the others read all
# of ``w``. The common dimension can be divided instead: ``PARTS`` programs
# share a tile, and each of them adds over a part of ``K``. This is called
# *split-K*. Each writes its sums in float32 to a place of its own, and a
# second kernel adds them up, always in the same order, and does the epilogue.


@triton.jit
def _linear_add_parts(
    parts_ptr,  # (PARTS, rows, columns), float32
    y_ptr,  # (M, N), rows of a stride
    save_ptr,  # as y_ptr: the slopes of the activation; or None
    bias_ptr,  # (N,), or None
    N,
    y_stride,  # from a row to the next one
    part_stride,  # from a part to the next one
    row_stride,  # from a row of a part to the next one
    PARTS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    # A program has a piece of a row.
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = cols < N
    z = tl.zeros((BLOCK_SIZE,), tl.float32)
    for part in range(PARTS):
        start = part * part_stride + row * row_stride
        z += tl.load(parts_ptr + start + cols, mask=mask, other=0)

    # The epilogue, as in the other kernel.
    if bias_ptr is not None:
        z += tl.load(bias_ptr + cols, mask=mask, other=0).to(tl.float32)
    at = row * y_stride + cols
    if ACTIVATION == "relu":
        z = tl.where(z < 0, 0, z)
    elif ACTIVATION is not None:
        z, slope = _activate(z, ACTIVATION)
        if save_ptr is not None:
            slope = slope.to(save_ptr.dtype.element_ty)
            tl.store(save_ptr + at, slope, mask=mask)
    tl.store(y_ptr + at, z.to(y_ptr.dtype.element_ty), mask=mask)


# %%
# Which tiles, and how many parts?
#
# A tile of 128 × 256 asks for the fewest bytes. Its sums take 128 registers of
# each of 256 threads. We take it unless it would leave half of the SMs without
# work. Then we take smaller tiles, and divide ``K`` so that all SMs have
# something to do. In both cases a stage takes 64 numbers of each row, which
# are 128 bytes.

TILES = {
    # rows, columns, numbers of K in a step, stages, warps
    "large": (128, 256, 64, 4, 8),
    "medium": (128, 128, 64, 3, 8),
    "few rows": (64, 128, 64, 4, 4),
    "TF32": (128, 128, 32, 3, 8),
    "float32": (64, 64, 16, 3, 8),  # without Tensor Cores
    "no TMA": (64, 64, 32, 3, 4),  # GPUs before the H100, and those of AMD
}


def precision_of(dtype):
    """What PyTorch's switch says of products of float32."""
    matmul = torch.backends.cuda.matmul
    choice = getattr(matmul, "fp32_precision", None)
    if choice is None:  # before PyTorch 2.9
        choice = "tf32" if matmul.allow_tf32 else "ieee"
    if dtype == torch.float32 and choice != "tf32":
        return "ieee"
    return "tf32"  # says nothing in 16 bits


def kind_of_tile(M, N, dtype):
    """Which of TILES a product gets."""
    if dtype == torch.float32 and precision_of(dtype) == "ieee":
        return "float32"
    if not HAS_TMA:
        return "no TMA"
    if dtype == torch.float32:
        return "TF32"
    if M <= 64:
        return "few rows"
    tiles_of_256 = triton.cdiv(M, 128) * triton.cdiv(N, 256)
    if 2 * tiles_of_256 <= NUM_SMS:
        return "medium"
    return "large"


def plan_product(M, N, K, dtype, with_slope):
    """Tiles, warps, stages and parts of a product."""
    kind = kind_of_tile(M, N, dtype)
    tile_m, tile_n, tile_k, stages, warps = TILES[kind]
    if kind == "large" and with_slope:
        stages = 3  # the tiles of the slope take shared memory as well
    tiles = triton.cdiv(M, tile_m) * triton.cdiv(N, tile_n)
    # A part costs a pass over its sums, so it should have four steps or more.
    parts = min(NUM_SMS // tiles, triton.cdiv(K, tile_k) // 4)
    return {
        "TILE_M": tile_m,
        "TILE_N": tile_n,
        "TILE_K": tile_k,
        "GROUP": 8,
        "STAGES": stages,
        "HALVES": kind == "large",
        "PARTS": max(parts, 1),
        "num_warps": warps,
    }


# %%
# A descriptor wants the numbers of a row side by side in memory, and the
# stride from a row to the next one must be a multiple of 16 bytes. A matrix
# that lies by columns is, in memory, a matrix that lies by rows. What lies
# otherwise is copied.

# %%

# Scaffold: layouts.


def lies_by_rows(t):
    """Whether a descriptor takes a matrix as it is."""
    stride, step = t.stride()
    return (
        step == 1
        and stride > 0
        and stride * t.itemsize % 16 == 0
        and t.data_ptr() % 16 == 0
    )


def empty_rows(rows, columns, dtype, device):
    """A matrix whose rows begin at multiples of 16 bytes."""
    step = 16 // dtype.itemsize
    wide = triton.cdiv(columns, step) * step
    return torch.empty(rows, wide, dtype=dtype, device=device)[:, :columns]


def by_rows(t):
    """The matrix, or a copy that a descriptor takes."""
    if lies_by_rows(t):
        return t
    return empty_rows(*t.shape, t.dtype, t.device).copy_(t)


def readable(t):
    """The matrix or a copy, by rows or by columns."""
    if lies_by_rows(t) or lies_by_rows(t.mT):
        return t
    return by_rows(t)


def tiles_of(t, tile_rows, tile_columns):
    """A descriptor of a matrix in tiles, and whether it lies by columns."""
    if lies_by_rows(t):
        tile = [tile_rows, tile_columns]
        return TensorDescriptor.from_tensor(t, tile), False
    tile = [tile_columns, tile_rows]
    return TensorDescriptor.from_tensor(t.mT, tile), True


# %%
# And here is the host's side of the kernel.


def product(
    a,
    b,
    slope=None,  # a is multiplied by it, and lies as a does
    positive=False,  # slope is the y of a relu
    bias=None,
    activation=None,
    save=False,  # whether slopes of the activation are saved
    sums=False,  # whether the rows of a are added up
    programs=NUM_SMS,  # at most; each takes tiles until none is left
    **changes,  # of the plan
):
    """a @ b with an epilogue; the slopes; the sums."""
    M, K = a.shape
    N = b.shape[1]
    y = empty_rows(M, N, a.dtype, a.device)
    saved = None
    if save:
        saved = empty_rows(M, N, a.dtype, a.device)
    if M == 0 or K == 0:  # no tokens, or a gradient that has none to add
        added = torch.zeros(M, device=a.device) if sums else None
        return y.zero_(), saved, added
    plan = plan_product(M, N, K, a.dtype, slope is not None) | changes
    tile_m = plan["TILE_M"]
    tile_n = plan["TILE_N"]
    tile_k = plan["TILE_K"]
    parts = plan["PARTS"]
    added = None
    if sums:
        added = torch.empty(parts, M, device=a.device)

    # Without parts, the kernel writes y. With them it writes their sums, each
    # part in rows of its own, and the epilogue has to wait.
    rows = triton.cdiv(M, tile_m) * tile_m
    into = y
    if parts > 1:
        into = empty_rows(parts * rows, N, torch.float32, a.device)
    width = tile_n // 2 if plan["HALVES"] else tile_n
    y_desc, _ = tiles_of(into, tile_m, width)
    save_desc = None
    if save and parts == 1:
        save_desc, _ = tiles_of(saved, tile_m, width)
    a_desc, a_by_columns = tiles_of(a, tile_m, tile_k)
    b_desc, b_by_columns = tiles_of(b, tile_k, tile_n)
    slope_desc = None
    if slope is not None:
        slope_desc, _ = tiles_of(slope, tile_m, tile_k)

    tiles = triton.cdiv(M, tile_m) * triton.cdiv(N, tile_n) * parts
    _linear_product[(min(tiles, programs),)](
        a_desc=a_desc,
        slope_desc=slope_desc,
        b_desc=b_desc,
        y_desc=y_desc,
        save_desc=save_desc,
        bias_ptr=bias if parts == 1 else None,
        sums_ptr=added,
        M=M,
        N=N,
        K=K,
        A_BY_COLUMNS=a_by_columns,
        B_BY_COLUMNS=b_by_columns,
        POSITIVE=positive,
        ACTIVATION=activation if parts == 1 else None,
        PRECISION=precision_of(a.dtype),
        **plan,
    )
    if parts > 1:
        block = 1024
        _linear_add_parts[(M, triton.cdiv(N, block))](
            parts_ptr=into,
            y_ptr=y,
            save_ptr=saved,
            bias_ptr=bias,
            N=N,
            y_stride=y.stride(0),
            part_stride=rows * into.stride(0),
            row_stride=into.stride(0),
            PARTS=parts,
            ACTIVATION=activation,
            BLOCK_SIZE=block,
            num_warps=4,
        )
    if sums:
        added = added.sum(0)
    return y, saved, added


x = torch.randn(72, 64, device=DEVICE).half()
w = torch.randn(152, 64, device=DEVICE).half()
y, _, _ = product(x, w.T)
torch.testing.assert_close(y, x @ w.T, rtol=1e-2, atol=1e-2)
y, _, _ = product(x.T.contiguous().T, w.T, PARTS=2)
torch.testing.assert_close(y, x @ w.T, rtol=1e-2, atol=1e-2)
print("72 x 64 times 64 x 152, by rows, by columns and in parts: right")

# %%
# Both passes
# -----------
#
# What does the backward pass do, and what does it move?
#
# It is two calls of the kernel. ``dx`` is ``dy`` times the slope, multiplied
# by ``w``. ``dw`` is the same matrix turned around, multiplied by ``x``, and
# this call has ``db`` as well.
#
# The usual way is a kernel that writes ``dz`` first. Let's count matrices of
# (tokens, features out). That kernel reads ``dy`` and ``z`` and writes ``dz``.
# Then both products read ``dz``, and another kernel reads it for ``db``: six
# in all. Ours reads ``dy`` and the slope twice, which is four, and there is no
# kernel besides the two products. In return the slope is multiplied again for
# each column of tiles, and that takes time of threads, but none of memory.
# To see which of the two is faster, we write the other kernel as well.


@triton.jit
def _linear_bwd_slope(
    dy_ptr,  # (rows, N)
    slope_ptr,  # (rows, N)
    dz_ptr,  # (rows, N)
    N,
    dy_stride,  # from a row to the next one
    slope_stride,
    dz_stride,
    POSITIVE: tl.constexpr,  # slope_ptr has y of a relu
    BLOCK_SIZE: tl.constexpr,
):
    # A program has a piece of a row.
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = cols < N
    dy = tl.load(dy_ptr + row * dy_stride + cols, mask=mask)
    slope = tl.load(slope_ptr + row * slope_stride + cols, mask=mask)
    dz = dy * slope
    if POSITIVE:
        dz = tl.where(slope <= 0, 0, dy)
    tl.store(dz_ptr + row * dz_stride + cols, dz, mask=mask)


def times_slope(dy, slope, positive):
    """dz, by a kernel of its own; both are matrices by rows."""
    M, N = dy.shape
    dz = empty_rows(M, N, dy.dtype, dy.device)
    block = 2048
    _linear_bwd_slope[(M, triton.cdiv(N, block))](
        dy_ptr=dy,
        slope_ptr=slope,
        dz_ptr=dz,
        N=N,
        dy_stride=dy.stride(0),
        slope_stride=slope.stride(0),
        dz_stride=dz.stride(0),
        POSITIVE=positive,
        BLOCK_SIZE=block,
        num_warps=4,
    )
    return dz


# %%
# Here are both passes.


def forward(x, w, b, activation, save):
    """y for (M, K) and (N, K), and what tells the slope: None without one."""
    y, slope, _ = product(
        x,
        w.T,
        bias=b,
        activation=activation,
        save=save and activation in ("gelu", "silu"),
    )
    y = y.contiguous()  # a copy only if rows of y do not fill 16 bytes
    if activation == "relu":
        slope = y
    return y, slope


def backward(dy, x, w, slope, positive, wanted, dz_first=False):
    """dx, dw and db; None where not wanted."""
    wants_dx, wants_dw, wants_db = wanted
    if slope is None:
        dy = readable(dy)
    else:
        # Both are loaded in the same way, so they have to lie alike.
        dy = by_rows(dy)
        slope = by_rows(slope)
    if dz_first and slope is not None and len(dy) > 0:
        dy = times_slope(dy, slope, positive)
        slope = None
    dx = None
    dw = None
    db = None
    if wants_dx:
        dx, _, _ = product(dy, w, slope=slope, positive=positive)
        dx = dx.contiguous()
    if wants_dw:
        dw, _, db = product(
            dy.T,
            x,
            slope=None if slope is None else slope.T,
            positive=positive,
            # Tensor Cores would cut float32.
            sums=wants_db and dy.dtype != torch.float32,
        )
        dw = dw.contiguous()
    if wants_db and db is None:
        # In float32, or if the weight is not trained, PyTorch adds up.
        dz = dy
        if positive:
            dz = dy * (slope > 0)
        elif slope is not None:
            dz = dy * slope
        db = dz.sum(0, dtype=torch.float32)
    if db is not None:
        db = db.to(dy.dtype)
    return dx, dw, db


# %%

# Scaffold: which arguments are taken.


def check_arguments(input, weight, bias, activation):
    named = {"input": input, "weight": weight}
    if bias is not None:
        named["bias"] = bias
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
        if t.is_cuda and t.device.index != torch.cuda.current_device():
            raise ValueError(
                f"{name} is on {t.device}, which is not the current GPU"
            )
    if weight.dim() != 2:
        raise ValueError(
            f"weight has {weight.dim()} dimensions, not 2: features out, "
            "features in"
        )
    if input.dim() == 0:
        raise ValueError("input has no dimension: features in are missing")
    if weight.numel() == 0:
        raise ValueError(
            f"weight has shape {tuple(weight.shape)}: both numbers must be "
            "above 0"
        )
    if input.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"input has {input.shape[-1]} features, and weight takes "
            f"{weight.shape[1]}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"bias has shape {tuple(bias.shape)}, not ({weight.shape[0]},)"
        )
    if activation not in (None, "relu", "gelu", "silu"):
        raise ValueError(
            f'activation is {activation!r}: None, "relu", "gelu" and "silu" '
            "are taken"
        )


# %%


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, b, activation):
        x = readable(x)
        w = readable(w)
        if b is not None:
            b = b.contiguous()
        save = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        save = save or ctx.needs_input_grad[2]
        y, slope = forward(x, w, b, activation, save)
        ctx.save_for_backward(x, w, slope)
        ctx.positive = activation == "relu"
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        x, w, slope = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:3]
        return *backward(dy, x, w, slope, ctx.positive, wanted), None


def linear(input, weight, bias=None, activation=None):
    """F.linear(input, weight, bias), then an activation.

    input is (..., features in), weight is (features out, features in), bias is
    (features out,) or None, all in float16, bfloat16 or float32. activation is
    None, "relu", "gelu" (by tanh) or "silu".
    """
    check_arguments(input, weight, bias, activation)
    shape = *input.shape[:-1], weight.shape[0]
    x = input.reshape(-1, input.shape[-1])
    if not ON_GPU and x.dtype == torch.bfloat16:
        # The interpreter multiplies the bits of bfloat16 as whole numbers.
        b = None if bias is None else bias.float()
        y = _Linear.apply(x.float(), weight.float(), b, activation)
        return y.to(input.dtype).reshape(shape)
    return _Linear.apply(x, weight, bias, activation).reshape(shape)


# %%
# Is it right? We compare with the formula in float64, and print the largest
# error of each tensor, as a share of its largest number. The numbers of ``dz``
# and of the slope are rounded to 16 bits, and so are the results.


def in_pytorch(input, weight, bias=None, activation=None):
    """The same by PyTorch."""
    z = F.linear(input, weight, bias)
    if activation == "relu":
        return F.relu(z)
    if activation == "gelu":
        return F.gelu(z, approximate="tanh")
    if activation == "silu":
        return F.silu(z)
    return z


def check(tokens, features_in, features_out, activation, dtype):
    """The largest error of y, dx, dw and db, compared with float64."""
    ours, exact = [], []
    for shape in (
        (tokens, features_in),
        (features_out, features_in),
        (features_out,),
    ):
        t = torch.randn(shape, device=DEVICE).to(dtype)
        ours.append(t.clone().requires_grad_())
        exact.append(t.double().requires_grad_())
    y = linear(*ours, activation)
    expected = in_pytorch(*exact, activation)
    dy = torch.randn_like(y)
    y.backward(dy)
    expected.backward(dy.double())
    pairs = [(y, expected)]
    pairs += [(t.grad, e.grad) for t, e in zip(ours, exact, strict=True)]
    errors = [((t - e).abs().max() / e.abs().max()).item() for t, e in pairs]
    for name, error in zip(("y", "dx", "dw", "db"), errors, strict=True):
        assert error < 0.01, f"{name} is off by {error:.1%}"
    print("errors below 1%:", " ".join(f"{error:.2%}" for error in errors))


check(100, 72, 200, "gelu", torch.float16)
check(50, 33, 65, "relu", torch.bfloat16)
check(300, 128, 96, None, torch.float32)

# %%
# Are these numbers the same each time? They are, to the last bit: each number
# belongs to one program or to one line of parts, and is added up in the same
# order each time, part by part. Nothing is added with atomic additions.
#
# The ladder, measured
# --------------------
#
# How much does each rung bring?
#
# Here are all of them, with the same square matrices as before.

# %%

# Scaffold: the rungs, as functions.


def by_rung(name):
    """x @ w.T by a rung of the ladder, a function of x and w."""
    if name == "cublas":
        return lambda x, w: x @ w.T
    if name in RUNGS:
        return functools.partial(by_address, rung=name)
    if name == "triton":
        return lambda x, w: product(x, w.T)[0]
    # The kernel of all products, with a program for each tile.
    changes = {"STAGES": 3, "HALVES": False, "PARTS": 1, "TILE_N": 256}
    if name == "descriptors":
        changes["TILE_N"] = 128

    def function(x, w):
        return product(x, w.T, programs=2**31 - 1, **changes)[0]

    return function


# %%

# Scaffold: the ladder, a benchmark.


@functools.cache  # all lines in turns; then each is asked for its own
def ladder_speeds(N, dtype):
    x, w = square(N, dtype)
    calls = {name: functools.partial(by_rung(name), x, w) for name in LADDER}
    return tflops(2 * N**3, calls)


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=[1024, 2048, 3072, 4096, 6144, 8192],
        xlabel="N (rows and columns of all matrices)",
        line_arg="provider",
        line_vals=LADDER,
        line_names=[NAMES[name] for name in LADDER],
        ylabel="TFLOP/s",
        plot_name="product-ladder",
        args={"dtype": torch.bfloat16, "mode": "forward"},
    )
)
def bench_ladder(N, dtype, mode, provider):
    """All lines in turns, 15 times, each a CUDA graph that overwrites L2
    first; the time of a graph that only overwrites L2 is subtracted."""
    if not ON_GPU:
        return 3 * [float("nan")]  # the interpreter cannot be timed
    return ladder_speeds(N, dtype)[provider]


# %%

in_percent(bench_ladder)

# %%
# **What the figure shows.**
# On the H100, at 8192 rows and columns, tiles of 128 × 128 reach NN TFLOP/s,
# the grouped order NN, three stages NN, descriptors NN, tiles of 128 × 256 NN
# and persistent programs NN. cuBLAS reaches NN. From 2048 rows on our last
# rung is at NN% to NN% of cuBLAS.
#
# **Why.**
# Each rung takes away something that Tensor Cores waited for: bytes from DRAM,
# a tile that is on its way, threads that compute addresses, the same number
# read again, a program that begins. At 1024 rows there are only 32 tiles of
# 128 × 256, so most of the 132 SMs would have nothing to do. There the plan
# takes 128 × 128, in parts.
#
# The three products
# ------------------
#
# Is the kernel as fast in the backward pass, where its operands lie otherwise?
#
# Here are three layers of models: 8192 tokens of 4096 features to 4096 and to
# 14336, and 4096 tokens of 1024 features to 4096. There is no bias and no
# activation yet, so that cuBLAS does the same.

# %%

# Scaffold: three layers, their tensors.

LAYERS = {
    # tokens, features in, features out
    "8192 x 4096 to 4096": (8192, 4096, 4096),
    "8192 x 4096 to 14336": (8192, 4096, 14336),
    "4096 x 1024 to 4096": (4096, 1024, 4096),
}


def inputs(tokens, features_in, features_out, dtype):
    """input, weight, bias and dy of a layer."""
    options = {"device": DEVICE, "dtype": dtype}
    x = torch.randn(tokens, features_in, **options)
    w = torch.randn(features_out, features_in, **options)
    w *= features_in**-0.5
    b = torch.randn(features_out, **options)
    dy = torch.randn(tokens, features_out, **options)
    for t in (x, w, b):
        t.requires_grad_()
    return x, w, b, dy


def table_of(benchmark):
    """Draw a benchmark with layers, and print its numbers."""
    table = benchmark.run(show_plots=ON_GPU, return_df=True)
    table = table.set_index("layer")
    table.columns = [column.split(" (")[0] for column in table.columns]
    if table.isna().all(axis=None):
        print("Timing needs a GPU; the page shows recorded figures.")
        return
    print(table.to_string(float_format="%.0f"))


# %%

# Scaffold: three products, a benchmark.

PRODUCTS = {
    "y": "y",
    "dx": "dx",
    "dw": "dw",
    "cublas y": "y, cuBLAS",
    "cublas dx": "dx, cuBLAS",
    "cublas dw": "dw, cuBLAS",
}


@functools.cache
def product_speeds(layer, dtype):
    x, w, _, dy = (t.detach() for t in inputs(*LAYERS[layer], dtype))
    tokens, features_in, features_out = LAYERS[layer]
    calls = {
        "y": lambda: product(x, w.T),
        "dx": lambda: product(dy, w),
        "dw": lambda: product(dy.T, x),
        "cublas y": lambda: x @ w.T,
        "cublas dx": lambda: dy @ w,
        "cublas dw": lambda: dy.T @ x,
    }
    return tflops(2 * tokens * features_in * features_out, calls)


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["layer"],
        x_vals=list(LAYERS),
        line_arg="provider",
        line_vals=list(PRODUCTS),
        line_names=list(PRODUCTS.values()),
        ylabel="TFLOP/s",
        plot_name="linear-products",
        args={"dtype": torch.bfloat16, "mode": "all three products"},
    )
)
def bench_products(layer, dtype, mode, provider):
    """All lines in turns, 15 times, each a CUDA graph that overwrites L2
    first; the time of a graph that only overwrites L2 is subtracted."""
    if not ON_GPU:
        return 3 * [float("nan")]
    return product_speeds(layer, dtype)[provider]


# %%

table_of(bench_products)

# %%
# **What the figure shows.**
# On the H100 ``y`` reaches NN% to NN% of cuBLAS's speed in these three layers,
# ``dx`` NN% to NN% and ``dw`` NN% to NN%.
#
# **What follows.**
# The layout of an operand matters little, because the TMA fetches a tile
# either way and Tensor Cores read it either way. So one kernel is enough.
#
# The layer with its activation
# -----------------------------
#
# What does it bring to have everything in one kernel?
#
# Here is the whole layer with a bias and ``gelu``. PyTorch has a kernel for
# ``gelu`` after the product. torch.compile has one, too: it writes the kernels
# around a product and leaves the product to cuBLAS. The last line is cuBLAS
# with the products alone, without bias and activation. That is not the same
# work, but it is what we would like to reach.

# %%

# Scaffold: the layer with gelu, two benchmarks.

WHO = {
    "triton": "Triton",
    "dz first": "Triton, dz first",
    "torch": "PyTorch",
    "torch.compile": "torch.compile",
    "cublas": "The products alone, cuBLAS",
}


def layers(dtype):
    """Name of a line -> the layer, a function of input, weight and bias."""
    torch._dynamo.reset()
    # We run a backward pass many times, so torch.compile must not reuse the
    # memory of what the forward pass saved for it.
    torch._functorch.config.donated_buffer = False
    return {
        "triton": linear,
        "torch": in_pytorch,
        "torch.compile": torch.compile(in_pytorch, dynamic=False),
    }


@functools.cache
def forward_speeds(layer, dtype):
    x, w, b, _ = inputs(*LAYERS[layer], dtype)
    tokens, features_in, features_out = LAYERS[layer]
    calls = {
        name: functools.partial(function, x, w, b, "gelu")
        for name, function in layers(dtype).items()
    }
    calls["cublas"] = lambda: x.detach() @ w.detach().T
    return tflops(2 * tokens * features_in * features_out, calls)


@functools.cache
def backward_speeds(layer, dtype):
    x, w, b, dy = inputs(*LAYERS[layer], dtype)
    tokens, features_in, features_out = LAYERS[layer]
    calls = {}
    for name, function in layers(dtype).items():
        y = function(x, w, b, "gelu")
        calls[name] = functools.partial(
            torch.autograd.grad, y, (x, w, b), dy, retain_graph=True
        )
    with torch.no_grad():
        _, slope = forward(x, w, b, "gelu", save=True)
    calls["dz first"] = lambda: backward(
        dy, x.detach(), w.detach(), slope, False, 3 * (True,), dz_first=True
    )
    calls["cublas"] = lambda: (dy @ w.detach(), dy.T @ x.detach())
    return tflops(4 * tokens * features_in * features_out, calls)


def of_layers(plot_name, mode, lines):
    return triton.testing.Benchmark(
        x_names=["layer"],
        x_vals=list(LAYERS),
        line_arg="provider",
        line_vals=lines,
        line_names=[WHO[line] for line in lines],
        ylabel="TFLOP/s",
        plot_name=plot_name,
        args={"dtype": torch.bfloat16, "mode": mode},
    )


@triton.testing.perf_report(
    of_layers(
        "linear-forward",
        "forward",
        ["triton", "torch", "torch.compile", "cublas"],
    )
)
def bench_forward(layer, dtype, mode, provider):
    """All lines in turns, 15 times, each a CUDA graph that overwrites L2
    first; the time of a graph that only overwrites L2 is subtracted."""
    if not ON_GPU:
        return 3 * [float("nan")]
    return forward_speeds(layer, dtype)[provider]


@triton.testing.perf_report(
    of_layers("linear-backward", "backward", list(WHO))
)
def bench_backward(layer, dtype, mode, provider):
    """All lines in turns, 15 times, each a CUDA graph that overwrites L2
    first; the time of a graph that only overwrites L2 is subtracted."""
    if not ON_GPU:
        return 3 * [float("nan")]
    return backward_speeds(layer, dtype)[provider]


# %%

table_of(bench_forward)

# %%

table_of(bench_backward)

# %%
# **What both figures show.**
# On the H100 our forward pass reaches NN to NN TFLOP/s. It is NN to NN times
# as fast as PyTorch's, and NN to NN times as fast as torch.compile's. Our
# backward pass reaches NN to NN TFLOP/s. It is NN to NN times as fast as
# PyTorch's, and NN to NN times as fast as torch.compile's.
#
# **Why.**
# Let's count the matrices of (tokens, features out) that move besides what the
# products need.
#
# - Forward, we write ``y`` and the slope. PyTorch writes ``z``, reads it, and
#   writes ``y``.
# - Backward, we read ``dy`` and the slope in both products. PyTorch reads
#   ``dy`` and ``z`` and writes ``dz``, reads it for ``db``, and reads it in
#   both products.
#
# What does that cost us? A product with a slope has the tiles of two matrices
# in shared memory where it had those of one, so a stage fewer fits, and
# threads have to load ``dy`` and the slope, multiply them, and only then can
# Tensor Cores go on. If a kernel writes ``dz`` first, our backward pass
# reaches NN to NN TFLOP/s.
#
# The bytes of the backward pass can be counted, too.

# %%

# Scaffold: bytes of the backward pass, a benchmark that ncu counts.


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["layer"],
        x_vals=list(LAYERS),
        line_arg="provider",
        line_vals=["triton", "torch"],
        line_names=["Triton", "PyTorch"],
        ylabel="bytes of DRAM per byte counted",
        plot_name="linear-backward-dram",
        args={
            "dtype": torch.bfloat16,
            "mode": "backward",
            "counter": "dram__bytes_read.sum",
        },
    )
)
def dram_reads(layer, dtype, mode, counter, provider):
    """Bytes that DRAM delivers in a backward pass, over those of dy, the
    slope, x and w."""
    if not ON_GPU:
        return 3 * [float("nan")]
    x, w, b, dy = inputs(*LAYERS[layer], dtype)
    function = linear if provider == "triton" else in_pytorch
    y = function(x, w, b, "gelu")

    def run():
        torch.autograd.grad(y, (x, w, b), dy, retain_graph=True)

    run()  # compiles the kernels
    counted = 2 * dy.nbytes + x.nbytes + w.nbytes
    with torch.cuda.nvtx.range(f"counted {provider} {layer} per {counted}"):
        run()
    return 3 * [float("nan")]  # only ncu knows


# %%

dram_reads.run(show_plots=ON_GPU)

# %%
# On the H100 our backward pass reads each byte NN to NN times, and PyTorch's
# NN to NN times. Twice would be no surprise: two products read ``dy``
# and the slope one after the other.
#
# Few tokens, measured
# --------------------
#
# What does it bring to divide ``K``?
#
# A model that writes text has a few tokens at a time. Here is the forward pass
# from 16 tokens to 4096, with 4096 features before and after, in parts and
# without.

# %%

# Scaffold: few tokens, a benchmark.


@functools.cache
def speeds_of_few(N, dtype):
    x, w, _, _ = (t.detach() for t in inputs(N, 4096, 4096, dtype))
    calls = {
        "triton": lambda: product(x, w.T),
        "one part": lambda: product(x, w.T, PARTS=1),
        "torch": lambda: x @ w.T,
    }
    return tflops(2 * N * 4096 * 4096, calls)


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=[16, 64, 128, 256, 512, 1024, 4096],
        x_log=True,
        y_log=True,
        xlabel="N (tokens)",
        line_arg="provider",
        line_vals=["triton", "one part", "torch"],
        line_names=["Triton", "Without parts", "PyTorch"],
        ylabel="TFLOP/s",
        plot_name="linear-few-tokens",
        args={"dtype": torch.bfloat16, "mode": "forward"},
    )
)
def bench_few(N, dtype, mode, provider):
    """All lines in turns, 15 times, each a CUDA graph that overwrites L2
    first; the time of a graph that only overwrites L2 is subtracted."""
    if not ON_GPU:
        return 3 * [float("nan")]
    return speeds_of_few(N, dtype)[provider]


# %%

bench_few.run(show_plots=ON_GPU)

# %%
# **What the figure shows.**
# On the H100, with 16 tokens, parts make the product NN times as fast: NN
# TFLOP/s instead of NN. PyTorch reaches NN. With 4096 tokens there are enough
# tiles, and both lines are the same.
#
# **Why.**
# With 16 tokens the weights are nearly all that moves: 34 MB, which take at
# least 10 µs at 3.35 TB/s. So this is a matter of memory, not of Tensor Cores,
# and memory is busy only if many programs ask for something at a time.
#
# float32
# -------
#
# What about operands of 32 bits?
#
# Tensor Cores take float32 only as *TF32*: they cut the fraction to 10 bits.
# That is about as exact as float16, and PyTorch leaves it off unless you set
# ``torch.backends.cuda.matmul.fp32_precision = "tf32"`` or call
# ``torch.set_float32_matmul_precision("high")``. ``linear`` follows
# this switch, in each pass as it is at the time. With it, Tensor Cores do half
# as many operations as in 16 bits. Without it there are no Tensor Cores in the
# product, as on the first rung.
#
# Where PyTorch is better
# -----------------------
#
# When should you not use this function?
#
# - **Products alone.** cuBLAS chooses among many kernels, and it knows many
#   cards. Our plan knows three tiles for 16 bits, and nobody has tuned those
#   for GPUs before the H100.
# - **float32 without TF32.** It multiplies without Tensor Cores, as our first
#   rung does, and nobody has tuned its tiles either.
# - **Any number of features.** A descriptor wants rows that begin at multiples
#   of 16 bytes. If a number of features is no multiple of 8, in 16 bits, we
#   copy a matrix before or after the product.
# - **Host time.** Python makes a descriptor anew for each call. With small
#   layers you wait for that, as in `Host time
#   <../layer-norm/10-host-time.html>`_.
# - **More types.** PyTorch has float64, products in 8 bits, and second
#   derivatives.
#
# Exercise 1: how many rows in a group?
# -------------------------------------
#
# 132 programs run at a time, and each has a tile of 128 × 256. There are
# 64 × 32 tiles. With a group of ``g`` rows of tiles, which strips do the first
# 132 programs need, and how many bytes are these in each step?
# Write ``bytes_of_a_step(group)``: a strip of ``x`` has 128 rows of 64 numbers
# of 2 bytes in a step, and a strip of ``w`` has 256 of them. The checker asks
# for the best group among 1, 2, 4, 8, 16, 32 and 64.
#
# **Hint 1.** Program ``n`` has tile ``(i, j)``. In a group of ``g`` rows, and
# with 64 a multiple of ``g``, what are ``i`` and ``j``? ``_tile_of`` has the
# formulas.
#
# **Hint 2.** Collect all ``i`` in a set, and all ``j`` in another one.


def bytes_of_a_step(group):
    # Without groups: 132 tiles in rows of 32 are 5 rows and all columns.
    return 5 * 128 * 64 * 2 + 32 * 256 * 64 * 2


def exercise_1(bytes_of_a_step):
    """The group for which the first 132 programs need the fewest bytes."""
    groups = [1, 2, 4, 8, 16, 32, 64]
    for group in groups:
        print(f"group of {group:2}: {bytes_of_a_step(group) / 1e6:.2f} MB")
    best = min(groups, key=bytes_of_a_step)
    right = bytes_of_a_step(8) == 688128 and best == 16
    print("exercise 1:", "right" if right else "not yet")
    return right


exercise_1(bytes_of_a_step)

# %%

# Solution 1


def bytes_of_a_step_1(group):
    strips_of_x = set()
    strips_of_w = set()
    for number in range(132):
        in_group = group * 32
        strips_of_x.add(number // in_group * group + number % group)
        strips_of_w.add(number % in_group // group)
    rows = 128 * len(strips_of_x) + 256 * len(strips_of_w)
    return rows * 64 * 2


assert exercise_1(bytes_of_a_step_1)

# %%
# Groups of 16 need the fewest bytes here, and those of 8 need a little more.
# In practice programs do not stay in step, so the difference is smaller than
# it looks.
#
# What we learned
# ---------------
#
# These are the rungs of our ladder, with their speeds on the H100 at 8192 rows
# and columns:
#
# - **Tiles of 128 × 128** with Tensor Cores, in rows: NN TFLOP/s. At 4096 rows
#   and columns it was NN without Tensor Cores.
# - **A grouped order** of tiles, so that L2 has what the neighbors need: NN.
# - **Three stages**: loads run ahead while Tensor Cores work: NN.
# - **Descriptors**: the TMA fetches tiles, threads compute no addresses: NN.
# - **Tiles of 128 × 256** use each number more often: NN.
# - **Persistent programs** load the next tile while they finish one: NN.
# - **cuBLAS**: NN.
#
# And for kernels in general:
#
# - A number that was loaded should be used many times: count operations for
#   each byte.
# - What happens to each number by itself belongs into the epilogue of the
#   product before it.
# - Both gradients of a product are products. If a kernel takes its operands by
#   rows and by columns, it does all three.
# - Save what the backward pass needs, not what the forward pass had: the slope
#   instead of ``z``.
# - If there is too little to do for all SMs, divide the sum.
#
# **Next:** `Attention without its matrix <../attention/01-attention.html>`_
# puts two products into one kernel, with a softmax between them.
