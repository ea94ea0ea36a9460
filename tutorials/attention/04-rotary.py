r"""
Rotary embedding
================

How does attention learn where a token stands?
Pairs of numbers in each query and key are rotated by an angle that grows with
the position, and one kernel, which does little more than copy, serves both
passes.

.. math:: y_a = x_a \cos t - x_b \sin t, \qquad
   y_b = x_b \cos t + x_a \sin t, \qquad
   t = \mathrm{position} \cdot \mathrm{frequency}

`Rotary embedding <https://arxiv.org/abs/2104.09864>`_ (Su and others, 2021)
stands before the attention of Llama, Qwen, Mistral and Gemma.
It computes so little that only bytes matter, and it is full of decisions: how
pairs lie in memory, who loads the angles, whether to write in place, and
whether it should be a kernel at all or a part of attention.
On this page we count the bytes of each, and measure.

**What you will learn**

- Why a score depends on the distance of two tokens alone when both are
  rotated.
- How a table that is small in memory can be most of what an SM loads, and how
  to load it once for several heads.
- How to take pairs apart in registers when they lie side by side.
- Why the backward pass is the same kernel, and saves nothing of the forward
  pass.
- What must be true before a kernel may write in place.
- How to find out, by counting and by measuring, whether a rotation belongs
  into the loads of attention.

**What you need:** `Layer normalization, both passes
<../layer-norm/01-layer-norm.html>`_ for programs, tiles and the clock, and
`Attention without its matrix <01-attention.html>`_ for the last part.
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
import math
from importlib.util import find_spec

from triton.tools.tensor_descriptor import TensorDescriptor

# %%
# A pair turns
# ------------
#
# What does attention know of positions? It knows nothing. A score is the dot
# product of a query and a key, and it is the same wherever the two stand.
#
# Rotary embedding takes two numbers of a query as a point in a plane, and
# turns this point around the origin. The later a token comes, the further it
# turns. Here is the point (2, 0), turned by 90 degrees for each position: it
# is at (2, 0) at position 0, at (0, 2) at position 1, at (-2, 0) at position
# 2, and at (0, -2) at position 3.
#
# Keys are turned in the same way. What happens to a score then?


def turn(pair, degrees):
    """The pair, turned around the origin."""
    t = math.radians(degrees)
    a, b = pair
    return a * math.cos(t) - b * math.sin(t), b * math.cos(t) + a * math.sin(t)


def score(query_position, key_position):
    """Of the query (2, 0) and the key (1, 1), which turn by 30 degrees."""
    query = turn((2, 0), 30 * query_position)
    key = turn((1, 1), 30 * key_position)
    return query[0] * key[0] + query[1] * key[1]


for query_position, key_position in ((5, 3), (105, 103), (6, 3)):
    found = score(query_position, key_position)
    print(f"query at {query_position}, key at {key_position}: {found:.3f}")

# %%
# The first two scores are equal. Both points were turned, and the angle
# between them has changed by 30 degrees times the distance of the two tokens,
# and by nothing else. So a score depends on this distance, and not on where
# the two stand. Nothing has to be learned for it.
#
# A row of ``D`` numbers has ``D / 2`` pairs, and each of them turns at its own
# speed, its *frequency*. In most models pair :math:`i` turns by
# :math:`10000^{-2 i / D}` radians for each position. The first pair turns by 1
# radian and tells neighbors apart. With 128 numbers the last one needs 54410
# positions for a full turn, and tells the beginning of a book from its end.

# %%

# Drawing: a fast pair and a slow pair at five positions.

figure = plt.figure(
    "A pair that turns by 1 radian for each position has gone nearly half of "
    "the circle after three positions; a pair that turns by 0.2 radian has "
    "gone an eighth of it after four",
    figsize=(7, 3),
)
for axes, frequency in zip(figure.subplots(1, 2), (1.0, 0.2), strict=True):
    axes.add_patch(plt.Circle((0, 0), 1, fill=False, color="gray"))
    for position in range(5):
        end = turn((1, 0), math.degrees(frequency * position))
        axes.annotate("", end, (0, 0), arrowprops={"arrowstyle": "->"})
        text = (1.2 * end[0], 1.2 * end[1])
        axes.text(*text, str(position), ha="center", va="center")
    axes.set_title(f"frequency {frequency}")
    axes.set(xlim=(-1.5, 1.5), ylim=(-1.5, 1.5), aspect="equal")
    axes.axis("off")
plt.show()

# %%
# All heads and all layers of a model turn by the same angles. So the cosine
# and the sine of each angle are computed once, as two tables with a row for
# each position and a column for each pair.


def tables(length, dimension, base=10000.0):
    """cos and sin of all angles, as (length, dimension / 2) in float32."""
    pair = torch.arange(dimension // 2, dtype=torch.float64, device=DEVICE)
    position = torch.arange(length, dtype=torch.float64, device=DEVICE)
    angle = position[:, None] * base ** (-2 * pair / dimension)
    return angle.cos().float(), angle.sin().float()


# %%
# Why float64? An angle may be large, and only what is left of it after whole
# turns counts. Near 100000, two neighboring numbers of float32 are 0.0078
# apart, so an angle at that position has only two digits behind the point.
# What does that make of its cosine?

exact = 100000 * 10000.0 ** (-2 * torch.arange(64.0).double() / 128)
angle = 100000 * 10000.0 ** (-2 * torch.arange(64.0) / 128)
error = (angle.double().cos() - exact.cos()).abs().max()
print(f"largest error of a cosine, from angles in float32: {error:.0e}")
error = (exact.cos().float().double() - exact.cos()).abs().max()
print(f"from angles in float64, kept in float32: {error:.0e}")
error = (exact.cos().bfloat16().double() - exact.cos()).abs().max()
print(f"from angles in float64, kept in bfloat16: {error:.0e}")

# %%
# So the angles have to be computed in float64. Their cosines and sines are
# small numbers, and lose little when they are kept in float32. Kept in
# bfloat16 they would lose about as much as by angles in float32.
#
# Which two numbers are a pair?
# -----------------------------
#
# There are two conventions, and a model that was trained with one of them is
# useless with the other:
#
# - **Halves:** pair :math:`i` is number :math:`i` of the first half of a row,
#   and number :math:`i` of its second half. Llama's weights on the Hugging
#   Face Hub are stored for this one.
# - **Interleaved:** pair :math:`i` is numbers :math:`2 i` and :math:`2 i + 1`,
#   side by side. The paper has this one, and GPT-J.

# %%

# Drawing: the pairs of a row of eight numbers, in both conventions.

plt.figure(
    "Eight numbers in a row: as halves, numbers 0 and 4, 1 and 5, 2 and 6, 3 "
    "and 7 are pairs; interleaved, 0 and 1, 2 and 3, 4 and 5, 6 and 7",
    figsize=(7.5, 2),
)
for height, name, pair_of in (
    (1.4, "halves", lambda i: i % 4),
    (0, "interleaved", lambda i: i // 2),
):
    plt.text(-0.2, height + 0.45, name, ha="right", va="center")
    for i in range(8):
        plt.gca().add_patch(
            plt.Rectangle((i, height), 0.92, 0.9, color=f"C{pair_of(i)}")
        )
        plt.text(
            i + 0.46,
            height + 0.45,
            str(i),
            color="white",
            ha="center",
            va="center",
        )
plt.axis((-2.2, 8.2, -0.2, 2.5))
plt.axis("off")
plt.show()

# %%
# Here is the operation in PyTorch. ``x`` may have any dimensions in front, for
# instance (batch, heads, length, dimension).


def formula(x, cos, sin, interleaved=False):
    """Rotary embedding, as it is written in a model."""
    if interleaved:
        a, b = x[..., 0::2], x[..., 1::2]
    else:
        a, b = x.chunk(2, dim=-1)
    a, b = a * cos - b * sin, b * cos + a * sin
    if interleaved:
        y = torch.stack((a, b), dim=-1).flatten(-2)
    else:
        y = torch.cat((a, b), dim=-1)
    return y.to(x.dtype)


cos, sin = tables(length=3, dimension=4)
x = torch.tensor([[1.0, 0.0, 0.0, 0.0]] * 3, device=DEVICE)
for name, interleaved in (("halves", False), ("interleaved", True)):
    print(f"1, 0, 0, 0 at positions 0, 1 and 2, {name}:")
    for row in formula(x, cos, sin, interleaved).tolist():
        print("  ", [round(number, 2) for number in row])

# %%
# What has to move?
# -----------------
#
# Our example is an attention with 32 heads of queries and 8 heads of keys, of
# 128 numbers each, in bfloat16. (Four heads of queries share a head of keys
# here, which is called *grouped-query attention*.)
# At each position the 40 heads have 10240 bytes to be read and 10240 to be
# written. Each of the two tables has 64 numbers of 4 bytes, which makes 512
# bytes in all.

for length in (256, 1024, 4096, 16384):
    heads_bytes = 2 * length * 40 * 128 * 2
    table_bytes = 2 * length * 64 * 4
    total = heads_bytes + table_bytes
    print(
        f"{length:5} positions: {total / 1e6:5.1f} MB, of which the tables "
        f"have {100 * table_bytes / total:.1f}%"
    )

# %%
# There are four multiplications and two additions for a pair, which moves 8
# bytes. So rotary embedding is memory-bound, and its ceiling is a copy.
#
# A first kernel
# --------------
#
# What is the simplest kernel? It takes ``x`` as one long list of rows. A
# program has a tile of rows, loads both numbers of each pair, the angles that
# belong to them, and stores both results.
#
# The first number of pair ``i`` is at ``i * STEP`` of its row, and the second
# one is ``GAP`` further on. With two such constants the kernel knows both
# conventions: halves have a step of 1 and a gap of ``D / 2``, and interleaved
# pairs have a step of 2 and a gap of 1.


@triton.jit
def _turn(a, b, cos, sin):
    return a * cos - b * sin, b * cos + a * sin


@triton.jit
def _rotate_rows(
    x_ptr,  # (rows, 2 * HALF), contiguous
    y_ptr,  # the same
    cos_ptr,  # (length, HALF), contiguous
    sin_ptr,  # the same
    rows,  # of all heads
    length,  # positions: a head has so many rows
    HALF: tl.constexpr,  # pairs of a row, a power of two
    STEP: tl.constexpr,  # from a pair to the next
    GAP: tl.constexpr,  # from the first number of a pair to the second
    ROWS: tl.constexpr,  # rows of a program
):
    # Our rows, as a column, and the pairs, as a row: together they are a
    # tile. The index is in 64 bits, for x may have more than 2**31 numbers.
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    pair = tl.arange(0, HALF)[None, :]
    mask = row < rows

    # Both numbers of each pair, converted to float32.
    at = row * (2 * HALF) + pair * STEP
    a = tl.load(x_ptr + at, mask=mask, other=0).to(tl.float32)
    b = tl.load(x_ptr + at + GAP, mask=mask, other=0).to(tl.float32)

    # The angles. Rows are counted through all heads, so the position of a row
    # begins at 0 again with each head.
    angle = row % length * HALF + pair
    cos = tl.load(cos_ptr + angle, mask=mask, other=0)
    sin = tl.load(sin_ptr + angle, mask=mask, other=0)

    # Turn, and round to the type of y.
    a, b = _turn(a, b, cos, sin)
    tl.store(y_ptr + at, a, mask=mask)
    tl.store(y_ptr + at + GAP, b, mask=mask)


def rotate_rows(x, cos, sin, interleaved=False):
    """Rotary embedding of a contiguous x, by the first kernel."""
    length, half = cos.shape
    rows = x.numel() // (2 * half)
    y = torch.empty_like(x)
    rows_of_program = 32
    _rotate_rows[(triton.cdiv(rows, rows_of_program),)](
        x_ptr=x,
        y_ptr=y,
        cos_ptr=cos,
        sin_ptr=sin,
        rows=rows,
        length=length,
        HALF=half,
        STEP=2 if interleaved else 1,
        GAP=1 if interleaved else half,
        ROWS=rows_of_program,
        num_warps=4,
    )
    return y


cos, sin = tables(length=50, dimension=32)
x = torch.randn(3, 50, 32, device=DEVICE)
for interleaved in (False, True):
    y = rotate_rows(x, cos, sin, interleaved)
    expected = formula(x, cos, sin, interleaved)
    print("right:", torch.allclose(y, expected, atol=1e-5))

# %%
# How fast is the first kernel?
# -----------------------------
#
# The clock and the ceiling are those of `Layer normalization, both passes
# <../layer-norm/01-layer-norm.html>`_, which explains them. We count the bytes
# that must move, those of the tables included. The copy reads and writes the
# 40 heads and no table.

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

# Scaffold: the ceiling.


@triton.jit
def _move(
    source_ptr,  # (READS, count)
    target_ptr,  # (WRITES, count)
    count,
    READS: tl.constexpr,
    WRITES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    count = tl.cast(count, tl.int64)
    start = tl.program_id(0).to(tl.int64) * BLOCK_SIZE
    index = start + tl.arange(0, BLOCK_SIZE)
    mask = index < count
    total = tl.load(source_ptr + index, mask=mask)
    for i in tl.static_range(1, READS):
        total += tl.load(source_ptr + i * count + index, mask=mask)
    for i in tl.static_range(WRITES):
        tl.store(target_ptr + i * count + index, total, mask=mask)


def ceiling(reads, writes, shape, dtype):
    """GB/s of a kernel that reads and writes so many matrices and does nothing
    else. Several tiles are tried; the best one counts."""
    M, N = shape
    speeds = []
    for block_size, warps in (
        (1024, 1), (2048, 1), (4096, 2), (4096, 4), (8192, 4), (8192, 8)
    ):  # fmt: skip

        def prepare(block_size=block_size, warps=warps):
            source = torch.randn(reads, M, N, device=DEVICE).to(dtype)
            target = torch.empty(writes, M, N, dtype=dtype, device=DEVICE)

            def move():
                _move[(triton.cdiv(M * N, block_size),)](
                    source_ptr=source,
                    target_ptr=target,
                    count=M * N,
                    READS=reads,
                    WRITES=writes,
                    BLOCK_SIZE=block_size,
                    num_warps=warps,
                )

            return move

        bytes_moved = (reads + writes) * M * N * dtype.itemsize
        speeds.append(speed(bytes_moved, prepare))
    return max(speeds)


# %%

# Scaffold: a report.


def report(benchmark):
    """Draw a benchmark, and print each speed in % of the ceiling."""
    table = benchmark.run(show_plots=ON_GPU, return_df=True)
    # perf_report writes 1024.0 and "Copy (GB/s)": we want 1024 and "Copy".
    table = table.astype({"N": int}).set_index("N")
    table.columns = [column.split(" (")[0] for column in table.columns]
    if table.isna().all(axis=None):
        print("Timing needs a GPU; the page shows recorded figures.")
        return
    percent = 100 * table.div(table["Copy"], axis="index")
    percent = percent.drop(columns="Copy")
    print("speed in % of the speed of the copy")
    print(percent.to_string(float_format="%.0f"))


# %%

# Scaffold: inputs, and the copy.

QUERY_HEADS, KEY_HEADS, D = 32, 8, 128


def inputs(N, dtype):
    """query, key, and what arrives for both in the backward pass.

    They lie in memory as a linear layer leaves them, (1, N, heads, D), and
    have their two middle dimensions swapped.
    """
    torch.manual_seed(0)
    found = []
    for heads in 2 * (QUERY_HEADS, KEY_HEADS):
        t = torch.randn(1, N, heads, D, device=DEVICE).to(dtype)
        found.append(t.transpose(1, 2))
    query, key, d_query, d_key = found
    return query.requires_grad_(), key.requires_grad_(), d_query, d_key


def bytes_moved(N, dtype):
    """Of all heads, which are read and written, and of both tables."""
    heads = N * (QUERY_HEADS + KEY_HEADS) * D
    return 2 * heads * dtype.itemsize + 2 * N * (D // 2) * 4


@functools.cache
def copy_speed(N, dtype):
    """Measured once for all figures."""
    shape = (N, (QUERY_HEADS + KEY_HEADS) * D)
    return ceiling(reads=1, writes=1, shape=shape, dtype=dtype)


# %%

# Scaffold: the first kernel, a benchmark.


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=[256, 1024, 4096, 16384],
        x_log=True,
        xlabel="N (positions)",
        line_arg="provider",
        line_vals=["halves", "interleaved", "copy"],
        line_names=["Halves", "Interleaved", "Copy"],
        ylabel="GB/s",
        plot_name="rotary-first",
        args={"heads": 40, "dtype": torch.bfloat16, "mode": "forward"},
    )
)
def bench_first(N, heads, dtype, mode, provider):
    """Device time: a CUDA graph of several calls, each with inputs of its own
    and after L2 was overwritten, less the graph without the calls; median, 20%
    and 80% quantiles. Copy: the best of six tiles."""
    if not ON_GPU:
        return 3 * [float("nan")]  # the interpreter cannot be timed
    if provider == "copy":
        return copy_speed(N, dtype)

    def prepare():
        x = torch.randn(heads, N, D, device=DEVICE).to(dtype)
        cos, sin = tables(N, D)
        return lambda: rotate_rows(x, cos, sin, provider == "interleaved")

    return speed(bytes_moved(N, dtype), prepare)


# %%

report(bench_first)

# %%
# **What the figure shows.**
# On the H200 the first kernel reaches 79% of a copy with halves at 256
# positions, and 89% at 16384. With interleaved pairs it reaches 9% and 6%.
#
# **What do interleaved pairs cost?**
# A thread of the first kernel has 16 pairs, eight of each of two rows. With
# halves it loads the first numbers of eight pairs with one instruction of 16
# bytes, because they lie side by side. Interleaved, they are every second
# number, and each takes an instruction of its own. That makes 32 loads in
# place of 4, and 32 stores in place of 4. At 16384 positions interleaved pairs
# are 15 times as slow, and not 8 times. We have not measured what costs the
# rest.
#
# **What does a program load?**
# Tables are 2.4% of the bytes that must move. But a program loads the angles
# of each of its rows: 64 cosines and 64 sines of 4 bytes are 512 bytes, and
# the row itself has 256. So two thirds of what an SM loads are tables. They
# come from L2, which has given the same rows to the heads before. L2 is faster
# than DRAM, but it is not free.
#
# **What follows.**
# A program should load its angles once and use them for several heads, and it
# should load interleaved pairs side by side and take them apart later.
#
# Angles for several heads
# ------------------------
#
# In the next kernel a program has a tile of positions, of several heads. It
# loads the angles of these positions once and keeps them in registers.

# %%

# Drawing: who loads which angles.

figure = plt.figure(
    "Four heads of eight positions, and which program has each. In the first "
    "kernel a program has some positions of one head, so there are eight; in "
    "the second one it has the same positions of all four heads, so there are "
    "two, and each loads its angles once.",
    figsize=(7.5, 2.6),
)
for axes, title, together in zip(
    figure.subplots(1, 2),
    ("A program has one head", "A program has four heads"),
    (False, True),
    strict=True,
):
    for head in range(4):
        for position in range(8):
            program = position // 4
            if not together:
                program += 2 * head
            axes.add_patch(
                plt.Rectangle(
                    (position, -head), 0.92, 0.9, color=f"C{program % 7}"
                )
            )
            axes.text(
                position + 0.46,
                -head + 0.45,
                str(program),
                color="white",
                ha="center",
                va="center",
            )
    axes.set_title(title)
    axes.text(4, -3.2, "positions", ha="center", va="top")
    axes.text(-0.2, -1, "heads", ha="right", va="center", rotation=90)
    axes.axis((-0.8, 8.2, -4, 1.2))
    axes.axis("off")
plt.show()

# %%
# With four heads a program loads 1024 bytes of each position, and 512 bytes of
# angles. So tables are a third of what an SM loads, and no longer two thirds.
# With eight heads they are a fifth.
#
# Three more things are new:
#
# - **Strides.** ``x`` may lie in memory in any way. A tensor says with its
#   *strides* how far apart two neighbors lie in each dimension. Ours has four:
#   batch, heads, length, dimension. A stride of 1 becomes a constant when the
#   kernel is compiled, so rows whose numbers lie side by side are loaded as
#   fast as before.
# - **Interleaved pairs stay together.** A program loads whole rows, 16 bytes
#   at a time. ``reshape`` then gives the tile a third dimension, of two: the
#   numbers of a pair. ``tl.split`` makes two tiles of it, and ``tl.join`` puts
#   them together again before they are stored. A thread has both numbers of
#   each of its pairs anyway, so neither costs an exchange between threads.
# - **Queries and keys in one launch.** Of the programs that share a tile of
#   positions, the first ones have heads of ``q``, the others have heads of
#   ``k``. All that a program must know of a tensor is one argument, a tuple.
#
# We begin with what a program does when it has its angles. All its loads stand
# before its first store. For all that the compiler knows, a store might change
# what a later load would read, so it never moves a load up over a store, and
# the program would wait for each head in turn.


@triton.jit
def _rotate_heads(
    x,  # a tensor, its result, its heads, and the strides of both
    group,  # which HEADS heads are ours, counted through all sequences
    row,  # our positions, (ROWS, 1), in 64 bits
    length,  # positions that exist
    cos,  # their angles, (ROWS, PAIRS)
    sin,
    HALF: tl.constexpr,  # pairs of a row; PAIRS is the next power of two
    HEADS: tl.constexpr,  # heads of a program
    INTERLEAVED: tl.constexpr,
    BACK: tl.constexpr,  # turn back
):
    x_ptr, y_ptr, heads = x[0], x[1], x[2]
    x_batch, x_head, x_row, x_column = x[3], x[4], x[5], x[6]
    y_batch, y_head, y_row, y_column = x[7], x[8], x[9], x[10]
    ROWS: tl.constexpr = cos.shape[0]
    PAIRS: tl.constexpr = cos.shape[1]

    # Our first head. Batch 0 has the first ones, then comes batch 1.
    lead = group.to(tl.int64) * HEADS
    x_ptr += lead // heads * x_batch + lead % heads * x_head
    y_ptr += lead // heads * y_batch + lead % heads * y_head

    # What we load at once: whole rows, or their first halves. The second
    # halves lie HALF columns further on. All in 64 bits, for strides are long.
    COLUMNS: tl.constexpr = 2 * PAIRS if INTERLEAVED else PAIRS
    EXIST: tl.constexpr = 2 * HALF if INTERLEAVED else HALF
    column = tl.arange(0, COLUMNS)[None, :].to(tl.int64)
    further = tl.full((), HALF, tl.int64)
    mask = (row < length) & (column < EXIST)
    x_at = x_ptr + row * x_row + column * x_column
    y_at = y_ptr + row * y_row + column * y_column

    # Request the pairs of all our heads. The loop is unrolled: tuples grow.
    firsts = ()
    seconds = ()
    for _ in tl.static_range(HEADS):
        a = tl.load(x_at, mask=mask, other=0)
        if INTERLEAVED:
            a, b = tl.split(a.reshape(ROWS, PAIRS, 2))
        else:
            b = tl.load(x_at + further * x_column, mask=mask, other=0)
        firsts += (a,)
        seconds += (b,)
        x_at += x_head

    # Only now touch an angle: whoever computes with a number waits for it. We
    # turn in float32, or in float64 if x has that, and round.
    wide: tl.constexpr = x_ptr.dtype.element_ty == tl.float64
    acc: tl.constexpr = tl.float64 if wide else tl.float32
    cos = cos.to(acc)
    sin = sin.to(acc)
    for i in tl.static_range(HEADS):
        a = firsts[i].to(acc)
        b = seconds[i].to(acc)
        if BACK:  # the same turn with a and b swapped goes back
            b, a = _turn(b, a, cos, sin)
        else:
            a, b = _turn(a, b, cos, sin)
        a = a.to(y_ptr.dtype.element_ty)
        b = b.to(y_ptr.dtype.element_ty)
        if INTERLEAVED:
            tl.store(y_at, tl.join(a, b).reshape(ROWS, COLUMNS), mask=mask)
        else:
            tl.store(y_at, a, mask=mask)
            tl.store(y_at + further * y_column, b, mask=mask)
        y_at += y_head


# %%
# And here is the kernel. Its last argument, ``BACK``, will be the backward
# pass.


@triton.jit
def _rotary(
    q,  # a tuple: see x of _rotate_heads
    k,  # the same for another tensor; None: there is only q
    q_groups,  # groups of HEADS heads that q has, in all sequences
    groups,  # those of q and k together
    cos_ptr,  # (length, HALF), contiguous
    sin_ptr,  # the same
    length,
    HALF: tl.constexpr,  # pairs of a row
    PAIRS: tl.constexpr,  # HALF, or the next power of two
    ROWS: tl.constexpr,  # positions of a program
    HEADS: tl.constexpr,  # heads of a program
    INTERLEAVED: tl.constexpr,
    BACK: tl.constexpr,  # turn back
):
    # Programs with neighboring numbers have the same positions, and other
    # heads: the angles that one of them has loaded, the next finds in L2.
    tile = tl.program_id(0) // groups
    group = tl.program_id(0) % groups
    row = tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]

    # Request the angles, once for all our heads.
    pair = tl.arange(0, PAIRS)[None, :]
    mask = (row < length) & (pair < HALF)
    at = row * HALF + pair
    cos = tl.load(cos_ptr + at, mask=mask, other=0)
    sin = tl.load(sin_ptr + at, mask=mask, other=0)

    # Are our heads those of q or of k? Without k, only the first call is
    # compiled.
    if k is None or group < q_groups:
        _rotate_heads(
            q, group, row, length, cos, sin, HALF, HEADS, INTERLEAVED, BACK
        )
    else:
        group -= q_groups
        _rotate_heads(
            k, group, row, length, cos, sin, HALF, HEADS, INTERLEAVED, BACK
        )


# %%
# How many positions and heads should a program have?
#
# - It has as many positions that the first halves of their rows, in one head,
#   are 1024 bytes. With 128 numbers in 16 bits that makes 8 positions.
# - It has 8 heads and two warps where that leaves at least 4 programs for each
#   SM. At 256 positions, 8 heads each would make 160 programs for 132 SMs. So
#   28 of the SMs would have two programs, and do twice as much as the others.
# - Otherwise it has 4 heads and one warp. These are half as many threads for
#   half as many heads: in both cases each thread has 16 loads of 16 bytes in
#   flight before its first store.
# - The number of heads of a program must divide those of ``q`` and of ``k``.
#   Where 4 does not, it has 2 heads or one.
#
# Where do these numbers come from? On an H100 we tried 31 tiles at each of
# three lengths. At 16384 positions nearly all of them were as fast as a copy,
# and there was nothing to choose. At 1024, programs with eight heads were
# among the fastest, whatever their number of warps. At 256, one warp with four
# heads was the fastest. But there a tile that was measured twice differed from
# itself by more than half of what lies between the fastest and the slowest.

NUM_SMS = 4
if ON_GPU:
    NUM_SMS = torch.cuda.get_device_properties(DEVICE).multi_processor_count


def plan(tensors):
    """The tile of a program for tensors of (batch, heads, length, D)."""
    _, _, length, dimension = tensors[0].shape
    pairs = triton.next_power_of_2(dimension // 2)
    half_row = pairs * tensors[0].itemsize  # bytes
    rows = max(1024 // half_row, 1)
    warps = min(max(half_row // 1024, 1), 8)  # one, if rows are not very wide
    tiles = triton.cdiv(length, rows)
    all_heads = sum(t.shape[0] * t.shape[1] for t in tensors)
    for heads in (8, 4, 2, 1):
        divides = all(t.shape[1] % heads == 0 for t in tensors)
        enough = heads < 8 or tiles * all_heads // heads >= 4 * NUM_SMS
        if divides and enough:
            break
    if heads == 8:
        warps *= 2
    return {"PAIRS": pairs, "ROWS": rows, "HEADS": heads, "num_warps": warps}


def rotate(tensors, outputs, cos, sin, interleaved=False, back=False):
    """Rotate one or two tensors of (batch, heads, length, D) into outputs.

    The outputs may be the tensors themselves. cos and sin are contiguous.
    """
    pairs = zip(tensors, outputs, strict=True)
    pairs = [(t, y) for t, y in pairs if t.numel() > 0]
    if not pairs:
        return
    sizes = plan([t for t, _ in pairs])
    # What the kernel must know of each tensor.
    known = [(t, y, t.shape[1], *t.stride(), *y.stride()) for t, y in pairs]
    groups = [t.shape[0] * t.shape[1] // sizes["HEADS"] for t, _ in pairs]
    length, half = cos.shape
    tiles = triton.cdiv(length, sizes["ROWS"])
    _rotary[(tiles * sum(groups),)](
        q=known[0],
        k=known[1] if len(known) == 2 else None,
        q_groups=groups[0],
        groups=sum(groups),
        cos_ptr=cos,
        sin_ptr=sin,
        length=length,
        HALF=half,
        INTERLEAVED=interleaved,
        BACK=back,
        **sizes,
    )


cos, sin = tables(length=50, dimension=24)
q = torch.randn(2, 50, 8, 24, device=DEVICE).transpose(1, 2)
k = torch.randn(2, 50, 2, 24, device=DEVICE).transpose(1, 2)
for interleaved in (False, True):
    outputs = [torch.empty_like(q), torch.empty_like(k)]
    rotate([q, k], outputs, cos, sin, interleaved)
    for t, y in zip((q, k), outputs, strict=True):
        expected = formula(t, cos, sin, interleaved)
        print("right:", torch.allclose(y, expected, atol=1e-5))

# %%
# What is each decision worth?
# ----------------------------
#
# We measure the kernel in four ways: with queries and keys in one launch, with
# a launch for each, with interleaved pairs, and *in place*, where the outputs
# are the inputs.

# %%

# Scaffold: four ways to call the kernel, a benchmark.


def one_launch(q, k, cos, sin):
    rotate([q, k], [torch.empty_like(q), torch.empty_like(k)], cos, sin)


def two_launches(q, k, cos, sin):
    rotate([q], [torch.empty_like(q)], cos, sin)
    rotate([k], [torch.empty_like(k)], cos, sin)


def in_place(q, k, cos, sin):
    rotate([q, k], [q, k], cos, sin)


def interleaved_pairs(q, k, cos, sin):
    outputs = [torch.empty_like(q), torch.empty_like(k)]
    rotate([q, k], outputs, cos, sin, interleaved=True)


WAYS = {
    "one launch": one_launch,
    "two launches": two_launches,
    "in place": in_place,
    "interleaved": interleaved_pairs,
}
SIZES = [256, 512, 1024, 4096, 16384]


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=SIZES,
        x_log=True,
        xlabel="N (positions)",
        line_arg="provider",
        line_vals=[*WAYS, "copy"],
        line_names=[
            "One launch",
            "Two launches",
            "In place",
            "Interleaved",
            "Copy",
        ],
        ylabel="GB/s",
        plot_name="rotary-ways",
        args={"heads": 40, "dtype": torch.bfloat16, "mode": "forward"},
    )
)
def bench_ways(N, heads, dtype, mode, provider):
    """Device time: a CUDA graph of several calls, each with inputs of its own
    and after L2 was overwritten, less the graph without the calls; median, 20%
    and 80% quantiles. Copy: the best of six tiles."""
    if not ON_GPU:
        return 3 * [float("nan")]
    if provider == "copy":
        return copy_speed(N, dtype)

    def prepare():
        q, k, _, _ = (t.detach() for t in inputs(N, dtype))
        cos, sin = tables(N, D)
        return functools.partial(WAYS[provider], q, k, cos, sin)

    return speed(bytes_moved(N, dtype), prepare)


# %%

report(bench_ways)

# %%
# **What the figure shows.**
# On the H200 one launch reaches 85% of a copy at 256 positions, 91% at 1024
# and 97% at 16384. Two launches reach 52%, 70% and 93%, interleaved pairs 81%,
# 91% and 98%, and in place it is 88%, 93% and 96%.
#
# **Why.**
# A launch is not free, even on the GPU: by our clock, a kernel that does
# nothing took 0.98 µs on an H100. And the second launch begins when the first
# one has ended. Until its data arrive, memory has little to do, and it has
# little to do again when only the last programs are left. At 256 positions one
# launch takes 3.4 µs, and two take 5.5 µs. At 16384 positions they take 84.7
# µs and 88.6 µs, which is 4% less speed, and no longer 39%.
#
# Interleaved pairs cost a few instructions more, and no bytes. From 1024
# positions on they cost nothing, because a kernel that waits for memory has
# time for instructions. At 256 positions they take 0.2 µs longer. There an SM
# has two or three programs of one warp, which is not much to do while one of
# them computes.
#
# In place, the same bytes are read and written. What it does save is memory:
# 168 MB at 16384 positions.
#
# All four are faster than the first kernel at 16384 positions. But they differ
# from it in more than the angles: their tiles are others, and they request all
# their heads before they store one. We have not measured what each of these is
# worth.
#
# **What follows.**
# One launch for both is worth an argument more, above all where sequences are
# short. And no model has to change its convention for speed. We return to the
# question of writing in place when we know the backward pass.
#
# Backward: turn back
# -------------------
#
# What is the gradient of a rotation? Each pair of ``y`` is a matrix times a
# pair of ``x``:
#
# .. math:: \begin{pmatrix} y_a \\ y_b \end{pmatrix} =
#    \begin{pmatrix} \cos t & -\sin t \\ \sin t & \cos t \end{pmatrix}
#    \begin{pmatrix} x_a \\ x_b \end{pmatrix}
#
# The gradient of a product with a matrix is the product with its transpose.
# Transposed, this matrix has the other sign before both sines, and that is the
# rotation by :math:`-t`. So the gradient is turned back:
#
# .. math:: dx_a = dy_a \cos t + dy_b \sin t, \qquad
#    dx_b = dy_b \cos t - dy_a \sin t
#
# Neither ``x`` nor ``y`` occurs in it. So nothing of the forward pass has to
# be kept, and the backward pass reads ``dy`` and writes ``dx``: its ceiling is
# a copy, too. Autograd agrees, at toy size and in float64:

cos, sin = (t.double() for t in tables(length=5, dimension=8))
x = torch.randn(5, 8, dtype=torch.float64, device=DEVICE, requires_grad=True)
dy = torch.randn(5, 8, dtype=torch.float64, device=DEVICE)
for interleaved in (False, True):
    (dx,) = torch.autograd.grad(formula(x, cos, sin, interleaved), x, dy)
    print(
        "turned back:", torch.allclose(dx, formula(dy, cos, -sin, interleaved))
    )

# %%
# Compare the two formulas once more: the lower one for :math:`dx` is the upper
# one for :math:`y` with :math:`dy_b` in place of :math:`x_a` and :math:`dy_a`
# in place of :math:`x_b`. So who swaps the two numbers of a pair, turns them
# forward, and swaps the results again, has turned them back. The kernel does
# that with ``BACK``, and needs no instruction more than in the forward pass.
#
# And what is the derivative of the backward pass? It is a rotation as well,
# forward this time. So our autograd function calls itself in its backward
# pass, and PyTorch can differentiate it as often as it likes.


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx, cos, sin, interleaved, back, *tensors):
        """tensors are one or two of (batch, heads, length, D)."""
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        ctx.back = back
        outputs = tuple(torch.empty_like(t) for t in tensors)
        rotate(tensors, outputs, cos, sin, interleaved, back)
        return outputs

    @staticmethod
    def backward(ctx, *dys):
        cos, sin = ctx.saved_tensors
        dxs = _Rotary.apply(cos, sin, ctx.interleaved, not ctx.back, *dys)
        # The tables and the two switches have no gradient.
        return None, None, None, None, *dxs


# %%
# A function to train with
# ------------------------
#
# What does it take? ``x`` may have any dimensions and strides. Its last
# dimension is even and has up to 1024 numbers, and it needs no power of two.
# The tables get no gradient; whoever wants one is told.

# %%

# Scaffold: which arguments are taken, and four dimensions of any.


def check_arguments(tensors, cos, sin):
    """Raise an error that names the wrong argument, and says why."""
    given = {**tensors, "cos": cos, "sin": sin}
    for name, t in given.items():
        if not t.is_floating_point() or t.itemsize == 1:
            raise TypeError(
                f"{name} has {t.dtype}: floats of 16 bits or more are taken"
            )
        if t.device.type != DEVICE.type:
            raise ValueError(f"{name} is on {t.device}, not on {DEVICE}")
        if t.is_cuda and t.device.index != torch.cuda.current_device():
            raise ValueError(
                f"{name} is on {t.device}, which is not the current GPU"
            )
    first_name, first = next(iter(tensors.items()))
    for name, t in tensors.items():
        if t.dim() < 2:
            raise ValueError(
                f"{name} has {t.dim()} dimensions: two or more are taken, and "
                "the last ones are length and dimension"
            )
        dimension = t.shape[-1]
        if dimension % 2 or not 2 <= dimension <= 1024:
            raise ValueError(
                f"the dimension of {name} is {dimension}: even numbers from 2 "
                "to 1024 are taken"
            )
        if t.dtype != first.dtype:
            raise TypeError(
                f"{name} has {t.dtype}, and {first_name} has {first.dtype}: "
                "they must be the same"
            )
        if t.shape[-2:] != first.shape[-2:]:
            raise ValueError(
                f"{name} ends in {tuple(t.shape[-2:])}, and {first_name} in "
                f"{tuple(first.shape[-2:])}: length and dimension must be the "
                "same"
            )
    length, dimension = first.shape[-2:]
    for name, t in (("cos", cos), ("sin", sin)):
        if t.shape != (length, dimension // 2):
            raise ValueError(
                f"{name} is {tuple(t.shape)}, and {first_name} needs "
                f"{(length, dimension // 2)}: length and half the dimension"
            )
        if t.requires_grad:
            raise ValueError(
                f"{name} requires a gradient: the tables are constants here"
            )


def as_four(x):
    """x as (batch, heads, length, D): a view, up to four dimensions."""
    if x.dim() > 4:
        return x.reshape(-1, *x.shape[-3:])
    return x[(None,) * (4 - x.dim())]


# %%


def rotary_embedding(x, cos, sin, interleaved=False):
    """x with its pairs rotated; both passes run in Triton.

    x is (..., length, dimension), with floats of 16 bits or more and any
    strides. cos and sin are (length, dimension / 2).
    """
    check_arguments({"x": x}, cos, sin)
    cos, sin = cos.contiguous(), sin.contiguous()
    (y,) = _Rotary.apply(cos, sin, interleaved, False, as_four(x))
    return y.reshape(x.shape)


def rotate_query_and_key(query, key, cos, sin, interleaved=False):
    """The same for a query and a key, in one launch.

    They may differ in all dimensions but the last two.
    """
    check_arguments({"query": query, "key": key}, cos, sin)
    cos, sin = cos.contiguous(), sin.contiguous()
    q, k = _Rotary.apply(
        cos, sin, interleaved, False, as_four(query), as_four(key)
    )
    return q.reshape(query.shape), k.reshape(key.shape)


# %%
# Is it right? We compare each number of both passes with the formula in
# float64. A pair turns by two products and a sum, so only two things may
# differ: the rounding to 16 bits, and a little of float32.

# %%

# Scaffold: a check against float64.


def check(shape, key_heads, dtype, interleaved):
    """Compare each number of both results and both gradients."""
    *lead, heads, length, dimension = shape
    cos, sin = tables(length, dimension)
    tensors, arriving = [], []
    for count in (heads, key_heads):
        t = torch.randn(*lead, count, length, dimension, device=DEVICE)
        tensors.append(t.to(dtype).requires_grad_())
        arriving.append(torch.randn_like(t).to(dtype))
    ys = rotate_query_and_key(*tensors, cos, sin, interleaved)
    ours = (*ys, *torch.autograd.grad(ys, tensors, arriving))

    wide = [t.detach().double().requires_grad_() for t in tensors]
    ys = [formula(t, cos.double(), sin.double(), interleaved) for t in wide]
    arriving = [t.double() for t in arriving]
    exact = (*ys, *torch.autograd.grad(ys, wide, arriving))

    for i, name in enumerate(("query", "key", "dquery", "dkey")):
        error = (ours[i] - exact[i]).abs()
        rounding = exact[i].abs() * torch.finfo(dtype).eps / 2
        if not ON_GPU and dtype == torch.bfloat16:
            rounding *= 2  # the interpreter cuts, where a GPU rounds
        sums = 8 * torch.finfo(torch.float32).eps
        worst = (error / (rounding + sums)).max().item()
        assert worst <= 1, f"{name}: {worst:.1f} times the allowed error"
    print(f"{dtype}, D = {dimension}: each number of both passes is right")


# %%

length = 17  # few, because the interpreter is slow
if ON_GPU:
    length = 1151
check((2, 8, length, 128), 2, torch.bfloat16, interleaved=False)
check((3, 4, length, 80), 1, torch.float16, interleaved=True)
check((5, length, 6), 7, torch.float32, interleaved=False)

# %%
# How fast is the forward pass?
# -----------------------------
#
# We compare with the formula in PyTorch, the same through ``torch.compile``,
# and `Liger <https://github.com/linkedin/Liger-Kernel>`_, where it can be
# imported. All of them rotate queries and keys, and have tables in float32.

# %%

# Scaffold: torch.compile at its best.


def best_of_three_compilations(function, measure):
    """The best of what measure(compiled function) returns.

    torch.compile tries several forms of a kernel and keeps the fastest. Which
    one that is can depend on luck, so it chooses three times.
    """
    # A choice is not kept on disk, nor in memory.
    torch._inductor.config.autotune_local_cache = False
    # We run a backward pass many times, so torch.compile must not reuse the
    # memory of what the forward pass saved for it.
    torch._functorch.config.donated_buffer = False
    results = []
    for _ in range(3):
        torch._dynamo.reset()
        torch._inductor.utils.clear_caches()
        results.append(measure(torch.compile(function, dynamic=False)))
    return max(results)


# %%

# Scaffold: PyTorch and Liger.


def pytorch(query, key, cos, sin):
    return formula(query, cos, sin), formula(key, cos, sin)


def liger(query, key, cos, sin):
    from liger_kernel.ops.rope import LigerRopeFunction

    return LigerRopeFunction.apply(query, key, cos, sin)


CALLS = {"triton": rotate_query_and_key, "torch": pytorch}
NAMES = {
    "triton": "Triton",
    "torch": "PyTorch",
    "torch.compile": "torch.compile",
}
if find_spec("liger_kernel"):
    CALLS["liger"] = liger
    NAMES["liger"] = "Liger"


# %%

# Scaffold: the speed of either pass.


def speed_of(function, N, dtype, mode):
    """GB/s of a forward or a backward pass: median, low, high."""

    def prepare():
        query, key, *arriving = inputs(N, dtype)
        cos, sin = tables(N, D)
        if function is liger:
            # Its tables have each angle twice, of which it reads the first.
            cos, sin = (torch.cat((t, t), -1)[None] for t in (cos, sin))
        if mode == "forward":
            return lambda: function(query, key, cos, sin)
        outputs = function(query, key, cos, sin)

        def run():
            return torch.autograd.grad(
                outputs, (query, key), arriving, retain_graph=True
            )

        return run

    return speed(bytes_moved(N, dtype), prepare)


@functools.cache
def compiled_speeds(N, dtype):
    """The speeds of torch.compile in both passes.

    To compile takes longer than to measure, so each of the three compilations
    is measured in both passes, and the best of each pass counts.
    """
    speeds = {"forward": [], "backward": []}

    def measure(function):
        for mode in speeds:
            speeds[mode].append(speed_of(function, N, dtype, mode))
        return speeds["forward"][-1]

    best_of_three_compilations(pytorch, measure)
    return {mode: max(speeds[mode]) for mode in speeds}


def speed_of_provider(provider, N, dtype, mode):
    if provider == "copy":
        return copy_speed(N, dtype)
    if provider == "torch.compile":
        return compiled_speeds(N, dtype)[mode]
    return speed_of(CALLS[provider], N, dtype, mode)


# %%

# Scaffold: a benchmark of the forward pass.


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=SIZES,
        x_log=True,
        xlabel="N (positions)",
        line_arg="provider",
        line_vals=[*NAMES, "copy"],
        line_names=[*NAMES.values(), "Copy"],
        ylabel="GB/s",
        plot_name="rotary-forward",
        args={"heads": 40, "dtype": torch.bfloat16, "mode": "forward"},
    )
)
def bench_forward(N, heads, dtype, mode, provider):
    """Device time: a CUDA graph of several calls, each with inputs of its own
    and after L2 was overwritten, less the graph without the calls; median, 20%
    and 80% quantiles. Copy: the best of six tiles."""
    if not ON_GPU:
        return 3 * [float("nan")]
    return speed_of_provider(provider, N, dtype, mode)


# %%

report(bench_forward)

# %%
# **What the figure shows.**
# On the H200 our forward pass reaches 85% of a copy at 256 positions, 90% at
# 1024 and 97% at 16384. PyTorch reaches 5% to 6% over all sizes,
# torch.compile 59% to 81%, and Liger 86% to 98%.
#
# **What is missing where sequences are short?**
# Our aim was 90% of a copy from a million numbers on, which is where the
# figure begins: 256 positions of 40 heads have 1.3 million. We reach it at
# 4096 positions, are level with it at 1024, and miss it with 85% at 256
# positions and 88% at 512.
#
# At 256 positions a copy of so many bytes would take 2.9 µs, and ours takes
# 3.4 µs. Its 320 programs do not divide by 132 SMs: 56 of them have three
# programs, and 76 have two. Also, a program of ours computes between its loads
# and its stores, and with so few programs nobody else fills that time. We have
# not measured how much of the 0.5 µs each of the two explains. Of all tiles
# that we tried on the H100, the fastest reached 88% there. Liger, whose
# programs are quite different, reaches 86% on the H200.
#
# **Why is PyTorch that slow?**
# Each operation of the formula is a kernel that reads and writes. Let's count
# in units of ``x``, where half of ``x`` is 0.5, and half of ``x`` in float32,
# which is what a product with the tables gives, is 1:
#
# - Four products read half of ``x`` and write float32: 4 · 1.5 = 6.
# - The difference and the sum read two such halves and write one: 2 · 3 = 6.
# - Putting both together reads 2 and writes 2, which makes 4.
# - Rounding reads 2 and writes 1, which makes 3.
#
# That is 19 in place of 2. If all of it came from DRAM, PyTorch could not
# reach more than 11% of a copy. Where L2 still holds what the operation before
# has written, it could. It reaches half of that, so its kernels are not as
# fast as a copy either. We have not measured which of them is slow. Tables in
# bfloat16, which many models have, would halve most of these numbers, and
# round each product to 8 bits.
#
# **What do the others do?**
# A program of Liger has all heads of one position, of queries and of keys, and
# it writes in place. Forward it is level with ours, or a little ahead: it has
# 100% to 102% of our speed. torch.compile makes kernels of its own from the
# formula. We have not looked into these, nor measured what each decision of
# Liger costs.
#
# How fast is the backward pass?
# ------------------------------
#
# It is the same kernel, so there should be nothing new to see.

# %%

# Scaffold: a benchmark of the backward pass.


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=SIZES,
        x_log=True,
        xlabel="N (positions)",
        line_arg="provider",
        line_vals=[*NAMES, "copy"],
        line_names=[*NAMES.values(), "Copy"],
        ylabel="GB/s",
        plot_name="rotary-backward",
        args={"heads": 40, "dtype": torch.bfloat16, "mode": "backward"},
    )
)
def bench_backward(N, heads, dtype, mode, provider):
    """Device time: a CUDA graph of several calls, each with inputs of its own
    and after L2 was overwritten, less the graph without the calls; median, 20%
    and 80% quantiles. Copy: the best of six tiles."""
    if not ON_GPU:
        return 3 * [float("nan")]
    return speed_of_provider(provider, N, dtype, mode)


# %%

report(bench_backward)

# %%
# **What the figure shows.**
# On the H200 our backward pass reaches 86% of a copy at 256 positions, 88% at
# 1024 and 97% at 16384. PyTorch reaches 5% to 6%, torch.compile 25% to 27%,
# and Liger 86% to 99%.
#
# So both passes are equally fast: the backward pass takes 3.3 µs at 256
# positions, where the forward pass takes 3.4 µs, and 84.5 µs at 16384, where
# that takes 84.7 µs. It misses 90% of a copy below 4096 positions, for the
# reasons of the forward pass. Liger is ahead by at most 5%, at 1024 positions.
#
# **What can one minus cost?**
# At first the kernel of this page turned back in another way: it changed the
# sign of each sine, and did so right after the sines were loaded. That is one
# instruction for each, but it stood before the question whether the heads are
# those of ``q`` or of ``k``. And the compiler left it there: in the code for
# an H200 the sines were loaded, their signs were changed, and only then came
# the branch behind which the heads were loaded. An instruction cannot begin
# before its numbers have arrived, and in the same warp no later one can begin
# before it. So in the backward pass a program waited for its sines before it
# requested a single gradient, and was slower than the forward pass at every
# length.
#
# Now nothing is done with an angle before all heads are requested, and no sign
# is changed at all. In the code for an H200 at least 16 of the 20 loads of a
# thread stand before its first sum or product, in both passes. The place of
# the minus alone would not have been enough: of ``-x`` Triton makes 0 minus x,
# which is an instruction for each sine wherever it stands, and the compiler
# moved some of these up between the loads.
#
# **What follows.**
# An operation that is its own backward pass needs one kernel, and one search
# for the best tile. But measure both passes, even if they differ in one minus:
# it matters where that stands. If it can be done, request all loads before
# anything needs a number that was loaded.
#
# In place or not?
# ----------------
#
# After the rotation nobody needs the queries as they were. So may we write
# over them? A model with long sequences is glad about each tensor that it does
# not have to keep. But there are two traps.
#
# **The first trap: somebody has kept x.** The operation that computed ``x``
# may need it in its own backward pass. The exponential function does, for
# instance, because its slope is its result. Autograd has a counter in each
# tensor for this: every operation that writes in place increments it, and who
# kept the tensor compares. A kernel of Triton writes to memory and knows
# nothing of counters. With ``ctx.mark_dirty`` the autograd function says that
# it wrote.


class _RotaryInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin, interleaved):
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        rotate([as_four(x)], [as_four(x)], cos, sin, interleaved)
        ctx.mark_dirty(x)  # x is not what it was: autograd must know
        return x

    @staticmethod
    def backward(ctx, dy):
        # Not in place: dy belongs to somebody else.
        cos, sin = ctx.saved_tensors
        (dx,) = _Rotary.apply(cos, sin, ctx.interleaved, True, as_four(dy))
        return dx.reshape(dy.shape), None, None, None


# %%
# Three calls are refused before anything is written: of a tensor with more
# than four dimensions, which might have to be copied, of one that was
# expanded, whose numbers share memory, and of a leaf that requires a gradient,
# as PyTorch's own operations do. Numbers can also share memory with other
# strides, as those of overlapping windows do. We do not look for that.

# %%

# Scaffold: what is not taken in place.


def check_in_place(x):
    if x.dim() > 4:
        raise ValueError(
            f"x has {x.dim()} dimensions: up to four are taken in place"
        )
    sizes_and_strides = zip(x.shape, x.stride(), strict=True)
    if any(size > 1 and stride == 0 for size, stride in sizes_and_strides):
        raise ValueError("x has a stride of 0: its numbers share memory")
    if x.requires_grad and x.is_leaf and torch.is_grad_enabled():
        raise ValueError("x is a leaf that requires a gradient")


# %%


def rotary_embedding_(x, cos, sin, interleaved=False):
    """Like rotary_embedding, but x itself is rotated and returned."""
    check_arguments({"x": x}, cos, sin)
    check_in_place(x)
    cos, sin = cos.contiguous(), sin.contiguous()
    return _RotaryInPlace.apply(x, cos, sin, interleaved)


cos, sin = tables(length=2, dimension=4)
t = torch.randn(2, 4, device=DEVICE, requires_grad=True)
x = t.exp()
y = rotary_embedding_(x, cos, sin)
try:
    y.sum().backward()
except RuntimeError as error:
    print("refused:", str(error).partition(":")[0])

# %%
# Autograd has noticed that ``exp`` has lost its result. A linear layer, which
# is what computes queries in most models, keeps only its input, and behind it
# the function is allowed:

linear = torch.nn.Linear(4, 4, device=DEVICE)
expected = formula(linear(t), cos, sin)
y = rotary_embedding_(linear(t), cos, sin)
ours = torch.autograd.grad(y.square().sum(), t)
exact = torch.autograd.grad(expected.square().sum(), t)
print("behind a linear layer:", torch.allclose(ours[0], exact[0], atol=1e-5))

# %%
# **The second trap: the gradient is not ours.** The backward pass could write
# over ``dy`` in the same way. But autograd may give one and the same tensor to
# several operations. An addition does that, because the gradient of a sum is
# the gradient of both its parts. Here is a careless function, whose result is
# added to ``2 * w``. The gradient of ``w`` should be twice ``dy``.


class _Careless(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        y = torch.empty_like(x)
        rotate([as_four(x)], [as_four(y)], cos, sin)
        return y

    @staticmethod
    def backward(ctx, dy):
        cos, sin = ctx.saved_tensors
        rotate([as_four(dy)], [as_four(dy)], cos, sin, back=True)
        return dy, None, None


def gradient_of_w(function):
    """Whether the gradient of w is right."""
    x = torch.randn(2, 4, device=DEVICE, requires_grad=True)
    w = torch.randn(2, 4, device=DEVICE, requires_grad=True)
    dy = torch.randn(2, 4, device=DEVICE)
    doubled = 2 * w
    z = function(x, cos, sin) + doubled
    z.backward(dy.clone())
    return torch.allclose(w.grad, 2 * dy)


print("gradient of w, ours:", gradient_of_w(rotary_embedding))
print("gradient of w, careless:", gradient_of_w(_Careless.apply))

# %%
# There was no error, only a wrong number. So our backward pass never writes
# over a gradient.
#
# Liger 0.8.5 writes over queries and keys, and over both gradients, and does
# not tell autograd. With a linear layer before it and an attention behind it,
# nobody else needs any of these tensors. Elsewhere one has to know.
#
# In the loads of attention?
# --------------------------
#
# Must there be a kernel for it at all? Attention loads each query and each
# key. It could turn them right there, and the rotated tensors would never be
# written.
#
# What would that save? It saves reading and writing all queries and keys once.
# And what does it cost? In `Attention without its matrix <01-attention.html>`_
# a program has a tile of 128 queries and goes through all keys. So each query
# is loaded by one program, but each key is loaded by one program for each tile
# of queries, and it would be turned anew by each of them.

tile_q = 128
for length in (512, 1024, 4096, 16384):
    print(
        f"{length:5} positions: a query is rotated once, and a key "
        f"{length // tile_q:3} times"
    )

# %%
# There is a way in between, then: turn the queries in the loads of attention,
# which repeats nothing, and the keys in a kernel of their own.
#
# How does a tile get rotated on its way? A descriptor can also fetch half a
# tile, so the kernel loads both halves of its rows. It turns them, and does
# not even put them together again: the dot product of two rows is the sum of
# the dot products of their halves, and ``tl.dot`` adds to what is there.
#
# The kernel is that of `Attention without its matrix <01-attention.html>`_. We
# have it here twice: as it is, and with the rotation.

# %%

# Scaffold: the forward pass of attention, from page 01.

LOG2E = 1.4426950408889634  # the logarithm of e, to the base 2
PLANS = {
    # D: queries, keys, warps, stages
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


@triton.jit
def _turn_tile(a, b, cos_ptr, sin_ptr, first, length):
    """Both halves of a tile of rows, turned; its first position is first."""
    TILE: tl.constexpr = a.shape[0]
    HALF: tl.constexpr = a.shape[1]
    row = first + tl.arange(0, TILE)[:, None]
    at = row * HALF + tl.arange(0, HALF)[None, :]
    cos = tl.load(cos_ptr + at, mask=row < length, other=0)
    sin = tl.load(sin_ptr + at, mask=row < length, other=0)
    turned_a, turned_b = _turn(a.to(tl.float32), b.to(tl.float32), cos, sin)
    # Tensor Cores want 16 bits, so both are rounded, as they would be if a
    # kernel of its own had stored them.
    return turned_a.to(a.dtype), turned_b.to(b.dtype)


@triton.jit
def _attention_rotary_fwd(
    q_desc,  # New: in tiles of TILE_Q queries and D / 2 numbers
    k_desc,  # New: in tiles of TILE_K keys and D / 2 numbers
    v_desc,  # (batch, heads, length, D), in tiles of TILE_K keys
    y_desc,  # the same, in tiles of TILE_Q queries
    cos_ptr,  # New: (length, D / 2)
    sin_ptr,  # New: the same
    lse_ptr,  # (batch, heads, length): saved for the backward pass
    heads,
    length,  # of queries and of keys
    scale,  # of the scores, times LOG2E
    D: tl.constexpr,
    TILE_Q: tl.constexpr,
    TILE_K: tl.constexpr,
    WHOLE: tl.constexpr,  # whether the last tile of keys is full
    STAGES: tl.constexpr,
    ROTATE_KEYS: tl.constexpr,  # New: or they are rotated already
):
    HALF: tl.constexpr = D // 2
    tiles = tl.cdiv(length, TILE_Q)
    first = tl.program_id(0) % tiles * TILE_Q
    lead = tl.program_id(0) // tiles
    batch = lead // heads
    head = lead % heads

    # New: the halves of our queries, turned once.
    q_a = q_desc.load([batch, head, first, 0]).reshape(TILE_Q, HALF)
    q_b = q_desc.load([batch, head, first, HALF]).reshape(TILE_Q, HALF)
    q_a, q_b = _turn_tile(q_a, q_b, cos_ptr, sin_ptr, first, length)

    maximum = tl.full((TILE_Q,), float("-inf"), tl.float32)
    total = tl.zeros((TILE_Q,), tl.float32)
    weighted = tl.zeros((TILE_Q, D), tl.float32)

    for start in tl.range(0, length, TILE_K, num_stages=STAGES):
        # New: the halves of a tile of keys, turned by each program, or by
        # another kernel before this one.
        k_a = k_desc.load([batch, head, start, 0]).reshape(TILE_K, HALF)
        k_b = k_desc.load([batch, head, start, HALF]).reshape(TILE_K, HALF)
        if ROTATE_KEYS:
            k_a, k_b = _turn_tile(k_a, k_b, cos_ptr, sin_ptr, start, length)

        # New: two products with half as many terms.
        score = tl.dot(q_a, k_a.T)
        score = tl.dot(q_b, k_b.T, score)

        # All of the rest is as it was.
        if not WHOLE:
            key = start + tl.arange(0, TILE_K)
            score = tl.where(key[None, :] < length, score, float("-inf"))
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
    row = lead.to(tl.int64) * length
    query = first + tl.arange(0, TILE_Q)
    lse = maximum + tl.log2(total)
    tl.store(lse_ptr + row + query, lse, mask=query < length)


# %%
# A program that rotates needs more registers, so it gets 8 warps. The rest is
# what was fastest of 16 plans that we tried on an H100. With queries alone it
# is the tile of the kernel without a rotation. If keys are rotated, too, 256
# queries were faster than 128, because half as many programs turn each key.
# Such a program keeps more in shared memory, among it the angles of the next
# tile of keys, 32 KB. So an SM has room for one, where it had room for two.
# GPUs before the H100 keep operands in registers as well, and on later ones we
# have not tried 256 queries. Both get 128.


def plan_rotary(rotate_keys):
    """Tiles, warps and stages of the kernel with the rotation."""
    tile_q = 128
    as_h100 = not ON_GPU or torch.cuda.get_device_capability()[0] == 9
    if rotate_keys and as_h100:
        tile_q = 256
    return {
        "TILE_Q": tile_q,
        "TILE_K": 64,
        "STAGES": 2,
        "ROTATE_KEYS": rotate_keys,
        "num_warps": 8,
    }


# %%

# Scaffold: a launch, and four ways to attend.


def forward_rotary(q, k, v, cos, sin, scale, rotate_keys):
    """Attention of q and k, which it rotates, or of q alone."""
    batch, heads, length, dimension = q.shape
    y = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, heads, length, device=q.device)
    sizes = plan_rotary(rotate_keys)
    half_q = [1, 1, sizes["TILE_Q"], dimension // 2]
    half_k = [1, 1, sizes["TILE_K"], dimension // 2]
    tiles = triton.cdiv(length, sizes["TILE_Q"])
    _attention_rotary_fwd[(tiles * batch * heads,)](
        q_desc=TensorDescriptor.from_tensor(q, half_q),
        k_desc=TensorDescriptor.from_tensor(k, half_k),
        v_desc=tiles_of(v, sizes["TILE_K"]),
        y_desc=tiles_of(y, sizes["TILE_Q"]),
        cos_ptr=cos,
        sin_ptr=sin,
        lse_ptr=lse,
        heads=heads,
        length=length,
        scale=scale * LOG2E,
        D=dimension,
        WHOLE=length % sizes["TILE_K"] == 0,
        **sizes,
    )
    return y, lse


def rotated(*tensors, cos, sin):
    """The tensors, rotated by our kernel in one launch."""
    outputs = [torch.empty_like(t) for t in tensors]
    rotate(tensors, outputs, cos, sin)
    return outputs


def attention_alone(q, k, v, cos, sin):
    """No rotation: what attention takes by itself."""
    scale = q.shape[-1] ** -0.5
    return forward(q, k, v, scale, plan_forward(q.shape[-1]))


def attention_apart(q, k, v, cos, sin):
    """Both rotated by a kernel, then attention."""
    return attention_alone(*rotated(q, k, cos=cos, sin=sin), v, cos, sin)


def attention_queries(q, k, v, cos, sin):
    """The keys rotated by a kernel, the queries in the loads of attention."""
    (k,) = rotated(k, cos=cos, sin=sin)
    scale = q.shape[-1] ** -0.5
    return forward_rotary(q, k, v, cos, sin, scale, rotate_keys=False)


def attention_fused(q, k, v, cos, sin):
    """Both in the loads of attention."""
    scale = q.shape[-1] ** -0.5
    return forward_rotary(q, k, v, cos, sin, scale, rotate_keys=True)


# %%
# All three ways must give the same: here they are beside PyTorch's attention
# of the formula, in float64.

length = 150
cos, sin = tables(length, 32)
q, k, v = torch.randn(3, 1, 2, length, 32, device=DEVICE).half().unbind()
exact = F.scaled_dot_product_attention(
    formula(q.double(), cos.double(), sin.double()),
    formula(k.double(), cos.double(), sin.double()),
    v.double(),
)
for function in (attention_apart, attention_queries, attention_fused):
    y, _ = function(q, k, v, cos, sin)
    error = (y - exact).abs().max().item()
    print(f"{function.__name__}: largest error {error:.1e}")
    assert error < 2e-3

# %%
# We measure 16384 tokens as sequences of 512 to 16384, with 16 heads of 128
# numbers for queries and for keys, and without a mask. We count the operations
# of both products, :math:`4 N^2 D` for each head, and none for the rotation.

# %%

# Scaffold: four ways to rotate for attention, a benchmark.

TOKENS = 16384
PLACES = {
    "alone": attention_alone,
    "apart": attention_apart,
    "queries": attention_queries,
    "fused": attention_fused,
}


@functools.cache  # all lines in turns; then each is asked for its own
def attention_speeds(N, dtype):
    """TFLOP/s of each line: median, low, high."""
    shape = (TOKENS // N, 16, N, D)
    q, k, v = (
        torch.randn(shape, device=DEVICE, dtype=dtype) for _ in range(3)
    )
    cos, sin = tables(N, D)
    calls = {
        name: functools.partial(function, q, k, v, cos, sin)
        for name, function in PLACES.items()
    }
    operations = 4 * TOKENS * 16 * N * D
    found = {}
    for name, (median, short, long) in in_turns(calls).items():
        found[name] = [operations / us * 1e-6 for us in (median, long, short)]
    return found


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=[512, 1024, 2048, 4096, 16384],
        x_log=True,
        xlabel="N (queries, and keys)",
        line_arg="provider",
        line_vals=list(PLACES),
        line_names=[
            "No rotation",
            "Rotated apart",
            "Queries in the loads",
            "Both in the loads",
        ],
        ylabel="TFLOP/s",
        plot_name="rotary-attention",
        args={"heads": 16, "dtype": torch.float16, "mode": "forward"},
    )
)
def bench_attention(N, heads, dtype, mode, provider):
    """All lines in turns, 15 times, each a CUDA graph that overwrites L2
    first; the time of a graph that only overwrites L2 is subtracted."""
    if not ON_GPU:
        return 3 * [float("nan")]
    return attention_speeds(N, dtype)[provider]


# %%

bench_attention.run(show_plots=ON_GPU)

# %%
# **What the figure shows.**
# On the H200 attention without a rotation reaches 396 TFLOP/s at 512 keys,
# 549 at 4096 and 568 at 16384. With the rotation apart it reaches 284, 513
# and 558. With the queries in the loads it reaches 283, 461 and 485, and with
# both in the loads 238, 311 and 308.
#
# **What does a rotation apart cost?**
# It reads and writes all queries and keys, 268 MB, at any length. At 512 keys
# it adds 39% to the time of attention, at 4096 keys 7%, and at 16384 keys
# 2%, because attention itself grows with the length.
#
# **Why is it slow to rotate keys in the loads?**
# Is it what a program loads? A tile of 64 keys and a tile of 64 values have 16
# KB each, and the angles of 64 positions have 32 KB. So for each step of its
# loop a program now loads 64 KB, and not 32. At 4096 keys and 549 TFLOP/s, the
# programs without a rotation load 4.3 TB/s together, and the L2 cache of an
# H100 delivered 7.3 TB/s when we measured it. With 128 queries for a program,
# twice as many bytes would be more than that: at 7.3 TB/s they allow 467
# TFLOP/s at most. That is one more reason for the 256 queries of our plan,
# with which a program does twice as much with what it loads. It loads no more
# for each operation than the kernel without a rotation, and it is still slow.
#
# So there must be another reason. Keys that are loaded as they are go to
# shared memory without passing through registers, and Tensor Cores read them
# there. Keys that have to be turned come into registers, are turned and
# rounded, and go back to shared memory before their product can begin. An SM
# has no other program that would use the Tensor Cores in the meantime. And all
# of that is repeated for each tile of 256 queries, 16 times at 4096 keys. We
# have not measured what each of these steps takes.
#
# **And queries, which are turned only once?**
# At 512 keys attention with the queries in its loads reaches 100% of the speed
# that it has with the rotation apart, at 4096 keys 90%, and at 16384 keys 87%.
# So fusing even these gains nothing at 512 keys, and loses where there are
# more. What it saves is the same at any length: the queries are not
# read and written once more. What it costs is paid in each step of the loop,
# and the number of steps grows with the length.
#
# What is it that costs there? Without a rotation, Tensor Cores read the
# queries from shared memory, where the TMA has put them. Turned queries come
# out of registers, and the compiler keeps them there as operands, as long as
# the loop runs. Each product with them is two products of half the length. And
# the program has 8 warps, where the one without a rotation has 4. We have not
# measured which of the three costs how much.
#
# **What follows.**
# We rotate apart. A kernel of its own goes once over the queries and keys,
# nearly as fast as a copy, and its time grows with the length, while that of
# attention grows with the square of it. What is put into the loop of attention
# is paid for in each step, where Tensor Cores wait for it.
#
# Fusing saves bytes, so it helps where bytes are what one waits for, as with
# the norms of other pages. Here one waits for arithmetic. What is repeated can
# be counted before any code is written. What a loop loses in registers has to
# be measured.
#
# In a backward pass, rotated queries are needed again and again as well, by
# each program that has a tile of keys. So where a model trains, we expect that
# both are better rotated apart, and kept. We have not written that backward
# pass.
#
# Where PyTorch or a library is better
# ------------------------------------
#
# - **torch.compile needs no kernel.** It makes its own from the formula, and
#   can fuse them with what stands around, such as a norm of the queries. On
#   the H200 it reaches 84% of our speed forward at 16384 positions, and 28%
#   backward.
# - **Liger's backward pass is faster**, by at most 5%, at 1024 positions. It
#   writes over the gradients, which saves memory as well, and is right only
#   where nobody else needs them. Its forward pass is level with ours.
# - **A part of each row.** Some models rotate only the first numbers of each
#   row. In place, ``rotary_embedding_(x[..., :64], cos, sin)`` does that.
#   Otherwise the rest has to be copied, and ours has no argument for it. Liger
#   has one.
# - **Positions.** Ours takes one table for all sequences of a batch. Liger
#   also takes one for each.
# - **Learned frequencies.** PyTorch has gradients for ``cos`` and ``sin``, and
#   ours has not.
# - **Compilation.** Ours compiles a kernel for each dimension and convention,
#   and for one tensor or two.
#
# Exercise 1: no tables
# ---------------------
#
# A kernel that waits for memory has time for arithmetic. Write the first
# kernel without tables: it computes the frequency of each pair, and the cosine
# and the sine of each angle. The stub does not turn anything. (We have not
# measured whether that is faster than to load them.)
#
# **Hint 1.** The frequency is :math:`10000^{-2 i / D}`, and ``D`` is ``2 *
# HALF``, so the exponent is ``-i / HALF``. A GPU has powers of 2, ``tl.exp2``.
# The logarithm of 10000 to the base 2 is 13.287712379549449.
#
# **Hint 2.** ``tl.cos`` and ``tl.sin`` take float32. What is the position of a
# row?


@triton.jit
def _without_tables(
    x_ptr,
    y_ptr,
    rows,
    length,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    pair = tl.arange(0, HALF)[None, :]
    mask = row < rows
    at = row * (2 * HALF) + pair
    a = tl.load(x_ptr + at, mask=mask, other=0).to(tl.float32)
    b = tl.load(x_ptr + at + HALF, mask=mask, other=0).to(tl.float32)
    angle = tl.zeros((ROWS, HALF), tl.float32)  # to do
    a, b = _turn(a, b, tl.cos(angle), tl.sin(angle))
    tl.store(y_ptr + at, a, mask=mask)
    tl.store(y_ptr + at + HALF, b, mask=mask)


def exercise_1(kernel):
    """Whether a kernel without tables turns by the right angles."""
    x = torch.randn(3, 50, 32, device=DEVICE)
    y = torch.empty_like(x)
    kernel[(triton.cdiv(150, 32),)](
        x_ptr=x, y_ptr=y, rows=150, length=50, HALF=16, ROWS=32
    )
    expected = formula(x, *tables(length=50, dimension=32))
    error = (y - expected).abs().max().item()
    print(f"exercise 1: largest error {error:.0e}")
    return error < 1e-4


exercise_1(_without_tables)

# %%

# Solution 1


@triton.jit
def _without_tables_1(
    x_ptr,
    y_ptr,
    rows,
    length,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    pair = tl.arange(0, HALF)[None, :]
    mask = row < rows
    at = row * (2 * HALF) + pair
    a = tl.load(x_ptr + at, mask=mask, other=0).to(tl.float32)
    b = tl.load(x_ptr + at + HALF, mask=mask, other=0).to(tl.float32)
    # -13.28... is minus the logarithm of 10000 to the base 2.
    frequency = tl.exp2(pair.to(tl.float32) * (-13.287712379549449 / HALF))
    # The error of an angle grows with the position: at 100000 it is that of
    # the example above. That is what the tables are better at.
    angle = (row % length).to(tl.float32) * frequency
    a, b = _turn(a, b, tl.cos(angle), tl.sin(angle))
    tl.store(y_ptr + at, a, mask=mask)
    tl.store(y_ptr + at + HALF, b, mask=mask)


assert exercise_1(_without_tables_1)

# %%
# What we learned
# ---------------
#
# These are the designs of this page, with what they reach on the H200 at 16384
# positions, in % of a copy:
#
# - **The formula in PyTorch** moves 19 times ``x`` in place of 2, and reaches
#   5%. torch.compile reaches 81%.
# - **Liger** reaches 97%.
# - **A program with one head** loads twice as many bytes of angles as of
#   ``x``. It reaches 89%, and 6% with interleaved pairs that it loads one by
#   one.
# - **A program with eight heads** loads a quarter as many bytes of angles as
#   of ``x``. It reaches 97%, and 98% with interleaved pairs that it takes
#   apart in registers.
# - **In place** it moves the same bytes and reaches 96%.
# - **In the loads of attention** queries are rotated once, and keys once for
#   each tile of queries. At 4096 keys attention reaches 461 TFLOP/s with the
#   queries in its loads, 311 with both, and 513 with neither. In the last case
#   a kernel of its own has rotated both.
#
# And for kernels in general:
#
# - What is small in memory may be large in what programs load. Count both.
# - Load what lies side by side with wide instructions, and sort it in
#   registers.
# - A linear operation needs nothing of its forward pass. If it is a rotation,
#   it is also its own backward pass, with the other sign.
# - Request all loads before anything needs a number that was loaded. Even a
#   change of sign in front of a branch makes a program wait.
# - Who writes in place must tell autograd, and must own what it writes to.
# - Before you fuse, count how often the fused work is repeated, and ask what
#   the loop waits for that you put it into.
#
# **Next:** a program of this page has many short rows.
# `Softmax over a million columns <../norms-and-losses/05-wide-softmax.html>`_
# has rows for which one program is not enough.
