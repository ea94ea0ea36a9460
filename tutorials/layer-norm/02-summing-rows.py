r"""
Weight gradients: who adds up the rows?
=======================================

The weight gradients of layer normalization are sums over all rows, and no
program has all rows: who adds them up?
Each program adds up its own rows in a buffer, and a small kernel adds up the
buffers: the matrices are read once, and all runs give the same bits.

There are other ways to do it. Programs can take columns instead of rows, or
all of them can add to one place in memory.
On this page we count the bytes that four designs move, build all four, and
measure them side by side.

**What you will learn**

- How to count the bytes that a design must move, before you write a kernel.
- Why a kernel that works by columns has too few programs, and how to split its
  work.
- What a buffer for each program costs, and what ``tl.atomic_add`` costs.
- Why the same input can give other bits on the next run, and how to count the
  runs that differ.

**What you need:** `Layer normalization, both passes <01-layer-norm.html>`_,
above all its backward kernel. You don't need a GPU.
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
# Which sums are we talking about?
# --------------------------------
#
# Each row adds ``dy * x_hat`` to ``dw``, and ``dy`` to ``db``.
# Let's take three rows of two columns, with ``dy`` = (1, 2), (3, 0), (1, 1).
# Then ``db`` is (1 + 3 + 1, 2 + 0 + 1) = (5, 3): each column is added up from
# top to bottom, over all rows. With ``dw`` it is the same.
# But ``dx`` needs sums from left to right, so a program that computes it wants
# whole rows.
# A program that has a few whole rows has all that ``dx`` needs, but only a
# part of each sum for ``dw``. A program that has a few whole columns has all
# that ``dw`` needs, but only a part of each sum for ``dx``.
# There are four ways out:
#
# - **Columns.** One kernel computes ``dx`` by rows, and a second one computes
#   ``dw`` and ``db`` by columns. No two programs share a sum.
# - **Split columns.** The second kernel gets more programs: several of them
#   share the same columns, and each takes a part of the rows. Their sums still
#   have to be added up.
# - **Buffers.** The kernel for ``dx`` computes ``dw`` and ``db`` as well. Each
#   program adds up its rows in a buffer of its own, and a small kernel adds up
#   the buffers.
# - **Atomics.** There is only one buffer, and all programs add to it.
#
# In the picture, a number is a program. Above are the elements of ``x`` and
# ``dy`` that it reads, and below are the sums that it writes ("all" means that
# all programs add to them).
# The first two designs also need a kernel for ``dx``, which is not shown.

# %%

# Drawing: which program reads which elements, and which sums it writes.

figure = plt.figure(
    "Columns: a program reads two whole columns and writes their sums. Split "
    "columns: two programs share the columns, and each writes a row of sums. "
    "Buffers: a program reads whole rows and writes a buffer. Atomics: all "
    "programs add to one row of sums.",
    figsize=(7.5, 4),
)
designs = {
    "Columns": ([[0, 0, 1, 1]] * 6, [[0, 0, 1, 1]]),
    "Split columns": (
        [[0, 0, 1, 1]] * 3 + [[2, 2, 3, 3]] * 3,
        [[0, 0, 1, 1], [2, 2, 3, 3]],
    ),
    "Buffers": (
        [[0] * 4, [1] * 4, [2] * 4] * 2,
        [[0] * 4, [1] * 4, [2] * 4],
    ),
    "Atomics": ([[0] * 4, [1] * 4, [2] * 4] * 2, [["all"] * 4]),
}
for axes, (title, (reads, writes)) in zip(
    figure.subplots(1, 4), designs.items(), strict=True
):
    for top, rows in ((0, reads), (7, writes)):
        for i, row in enumerate(rows):
            for j, program in enumerate(row):
                color = "gray" if program == "all" else f"C{program}"
                box = plt.Rectangle((j, top + i), 1, 1, fc=color, alpha=0.4)
                axes.add_patch(box)
                axes.text(
                    j + 0.5, top + i + 0.5, program, ha="center", va="center"
                )
    axes.set(title=title, xlim=(0, 4), ylim=(10.2, -0.2), aspect="equal")
    axes.axis("off")
plt.show()

# %%
# How many bytes does each design move?
# -------------------------------------
#
# ``x``, ``dy`` and ``dx`` are matrices of one size, so let's count in
# matrices. With 4096 rows in 16 bits, a matrix has 8192 bytes for each column.
# A row of sums holds ``dw`` and ``db`` in float32, which is 8 bytes for each
# column. So 1024 rows of sums are as much as one matrix, at any width.
#
# Three matrices are the least: ``x`` and ``dy`` are read, and ``dx`` is
# written. A second kernel that works by columns reads ``x`` and ``dy`` again,
# which makes five.
# A buffer is written once and read once, so it counts as two rows of sums. If
# all programs add to a single buffer, each of them sends one row of sums, and
# one is read at the end.
# Here is the count for a GPU of 132 streaming multiprocessors (SMs), with
# three programs on each. That makes 396 programs.

designs = [
    # name, matrices, rows of sums
    ("columns", 3 + 2, 0),
    ("split, 8 parts", 3 + 2, 8 + 8),
    ("396 buffers", 3, 396 + 396),
    ("396 programs, atomics", 3, 396 + 1),
    ("atomics for each row", 3, 4096 + 1),
]


def in_all(matrices, sums):
    """What a design moves, in matrices of 4096 rows in 16 bits."""
    return matrices + sums * 8 / (2 * 4096)


print("M = N = 4096         matrices  sums  in all")
for name, matrices, sums in designs:
    moved = in_all(matrices, sums)
    print(f"{name:21}{matrices:9}{sums:6}{moved:8.2f}")

# %%
# By this count, buffers should beat columns, with 3.77 matrices to 5.00.
# Atomics should be the fastest, with 3.39, if a program adds only once, after
# all its rows. If it adds after each row, they should be the slowest, with
# 7.00.
# But the count does not know how long programs wait for each other, nor what
# L2 keeps. So let's build all of them.
#
# Columns
# -------
#
# What if each column has a single program, which reads all of its rows?
#
# A program walks down ``COLS`` columns, ``ROWS`` rows at a time: that is its
# tile. Each element of the tile has a sum of its own, and the program adds up
# the rows of the tile only at the end.
# The grid has two numbers this time. The second one is the number of parts
# that the rows are divided into. For now there is one part, with all the rows.


@triton.jit
def _layer_norm_bwd_columns(
    dy_ptr,  # (M, N), contiguous
    x_ptr,  # (M, N), contiguous
    mean_ptr,  # (M,), from the forward pass
    rstd_ptr,  # (M,), from the forward pass
    sums_ptr,  # (parts, 2, N): dw and db of each part of the rows
    M,  # rows
    N: tl.constexpr,  # columns
    ROWS: tl.constexpr,  # rows of a tile
    COLS: tl.constexpr,  # columns of a tile
):
    # The first number of the program says which columns are ours, and the
    # second one which part of the rows.
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    part = tl.program_id(1)
    parts = tl.num_programs(1)
    # [:, None] makes a column of the row numbers, for a tile of ROWS x COLS.
    tile_rows = tl.arange(0, ROWS)[:, None]
    # We compute in the type of mean: float32, or float64 if x is float64.
    acc_dtype: tl.constexpr = mean_ptr.dtype.element_ty

    # Each element of the tile has a sum of its own.
    dw = tl.zeros((ROWS, COLS), acc_dtype)
    db = tl.zeros((ROWS, COLS), acc_dtype)
    # Part 0 takes tiles 0, parts, 2 * parts and so on, part 1 the next ones.
    for start in range(part * ROWS, M, parts * ROWS):
        rows = start + tile_rows
        mask = (rows < M) & (cols < N)
        # The first row is found in 64 bits, because M * N may be more than
        # 2**31. Within the tile 32 bits are enough.
        first = tl.cast(start, tl.int64) * N
        offsets = first + (tile_rows * N + cols)
        # Load the tile. Masked elements of dy are 0, so they add nothing.
        x = tl.load(x_ptr + offsets, mask=mask, other=0).to(acc_dtype)
        dy = tl.load(dy_ptr + offsets, mask=mask, other=0).to(acc_dtype)
        # Two numbers for each of its rows.
        mean = tl.load(mean_ptr + rows, mask=rows < M, other=0)
        rstd = tl.load(rstd_ptr + rows, mask=rows < M, other=0)
        # Recompute x_hat, and add the terms of this tile.
        x_hat = (x - mean) * rstd
        dw += dy * x_hat
        db += dy

    # Add up the rows of the tile, and store the sums of our part: dw first,
    # then db.
    sums_ptr += part * 2 * N + cols
    tl.store(sums_ptr, tl.sum(dw, axis=0), mask=cols < N)
    tl.store(sums_ptr + N, tl.sum(db, axis=0), mask=cols < N)


# %%
# How wide should a tile be?
# DRAM hands out *sectors* of 32 bytes, never less. In 16 bits these are 16
# columns of a row, and a narrower tile would use only a part of each sector.
# So tiles of 16 columns give us the most programs that waste nothing: 256 of
# them at 4096 columns. (We tried 8 and 32 columns as well, on an H100, and
# they were hardly ever faster.)
# A tile has 2048 elements, and 8 warps are 256 threads. So each thread loads
# eight elements of ``x`` and eight of ``dy`` at a time.


def sums_by_columns(dy, x, w, mean, rstd, dtype):
    """dw and db, as a (2, N) tensor of this type.

    They do not need w. It is an argument because all designs take the same.
    """
    M, N = x.shape
    sums = torch.empty(2, N, dtype=dtype, device=x.device)
    grid = (triton.cdiv(N, 16), 1)
    _layer_norm_bwd_columns[grid](
        dy_ptr=dy,
        x_ptr=x,
        mean_ptr=mean,
        rstd_ptr=rstd,
        sums_ptr=sums,
        M=M,
        N=N,
        ROWS=128,
        COLS=16,
        num_warps=8,
    )
    return sums


def given(M, N, dtype):
    """dy, x, w, and the mean and rstd that a forward pass has saved."""
    torch.manual_seed(0)
    dy = torch.randn(M, N, device=DEVICE, dtype=dtype)
    x = torch.randn(M, N, device=DEVICE, dtype=dtype)
    w = torch.rand(N, device=DEVICE, dtype=dtype)
    _, mean, rstd = torch.native_layer_norm(x, (N,), w, w, 1e-5)
    return dy, x, w, mean, rstd


toy = given(4, 3, torch.float32)
dy, x, *_ = toy
dw, db = sums_by_columns(*toy, dtype=torch.float32)
torch.testing.assert_close(dw, (dy * F.layer_norm(x, (3,))).sum(dim=0))
torch.testing.assert_close(db, dy.sum(dim=0))
print("4 x 3, dw and db by columns: right")

# %%
# Is there enough to do for the whole GPU?
# 1024 columns make 64 programs of 16 columns, and an H100 has 132 SMs. More
# than half of them have nothing to do.
#
# Columns, split over rows
# ------------------------
#
# So let's have several programs share the columns, and give each of them a
# part of the rows.
# The kernel stays the same. Only the second number of the grid changes, and
# the parts take turns with the tiles.
# Now each part has sums of its own, and somebody has to add them up. The small
# kernel for that is the one of `Layer normalization, both passes
# <01-layer-norm.html>`_ that adds up buffers. The order of its additions is
# fixed.

# %%

# Scaffold: the kernel that adds up rows of sums, and its launch.


@triton.jit
def _layer_norm_bwd_add_up(
    sums_ptr,  # (programs, WIDTH)
    grads_ptr,  # (WIDTH,): dw, then db
    programs,  # how many rows of sums there are
    WIDTH: tl.constexpr,  # 2 * N
    ROWS: tl.constexpr,  # rows of sums loaded at a time
    COLS: tl.constexpr,  # columns per program
):
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)

    # Each element of the tile has a sum of its own.
    total = tl.zeros((ROWS, COLS), sums_ptr.dtype.element_ty)
    for first in range(0, programs, ROWS):
        rows = first + tl.arange(0, ROWS)[:, None]
        mask = (rows < programs) & (cols < WIDTH)
        offsets = rows * WIDTH + cols
        total += tl.load(sums_ptr + offsets, mask=mask, other=0)

    # Add up the rows of the tile. Only this store rounds to the type of grads.
    tl.store(grads_ptr + cols, tl.sum(total, axis=0), mask=cols < WIDTH)


def add_up(sums, dtype):
    """dw and db, as a (2, N) tensor, from (programs, 2, N) sums."""
    programs, _, N = sums.shape
    grads = torch.empty(2, N, dtype=dtype, device=sums.device)
    # A few rows of sums are not worth a large tile.
    rows = 256
    warps = 8
    if programs <= 16:
        rows = 16
        warps = 4
    grid = (triton.cdiv(2 * N, 16),)
    _layer_norm_bwd_add_up[grid](
        sums_ptr=sums,
        grads_ptr=grads,
        programs=programs,
        WIDTH=2 * N,
        ROWS=rows,
        COLS=16,
        num_warps=warps,
    )
    return grads


# %%
# Parts give us as many programs as we like, so the tile need not be narrow any
# more. We take 32 rows of 32 columns, and 4 warps. Again, each thread loads
# eight elements of ``x`` at a time.
# We aim at 1024 programs, which are about eight for each SM. But we take at
# most 16 parts, because each part is one more row of sums to add up. So at
# 1024 columns there are 512 programs: 32 of them side by side, times 16 parts.
# And we take at least four parts, which was faster than two at 12288 columns.


def count_parts(N):
    """Parts for 1024 programs of 32 columns, but at least 4 and at most 16."""
    parts = 1024 * 32 // N
    return min(max(parts, 4), 16)


def sums_by_parts(dy, x, w, mean, rstd, dtype, parts=None):
    """dw and db, as a (2, N) tensor of this type, from parts of the rows."""
    M, N = x.shape
    if parts is None:
        parts = count_parts(N)
    sums = torch.empty(parts, 2, N, dtype=mean.dtype, device=x.device)
    grid = (triton.cdiv(N, 32), parts)
    _layer_norm_bwd_columns[grid](
        dy_ptr=dy,
        x_ptr=x,
        mean_ptr=mean,
        rstd_ptr=rstd,
        sums_ptr=sums,
        M=M,
        N=N,
        ROWS=32,
        COLS=32,
        num_warps=4,
    )
    return add_up(sums, dtype)


# %%
# How much do parts help?
# We measure the sums alone, without ``dx``. They must read two matrices, and
# the line "Copy" moves as many bytes: it reads one matrix and writes one.
# The clock and the copy are those of `Layer normalization, both passes
# <01-layer-norm.html>`_, which explains them.

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

# Scaffold: the sums alone, a benchmark.

WIDTHS = [512 * i for i in (2, 4, 8, 12, 16, 24)]


def pytorch(dy, x, w, mean, rstd, dtype, wanted=(True, True, True)):
    """PyTorch's dx, dw and db; what is not wanted is None."""
    dy = dy.to(dtype)
    x = x.to(dtype)
    w = w.to(dtype)
    backward = torch.ops.aten.native_layer_norm_backward
    return backward(dy, x, w.shape, mean, rstd, w, w, wanted)


def pytorch_sums(dy, x, w, mean, rstd, dtype):
    """PyTorch's dw and db alone."""
    return pytorch(dy, x, w, mean, rstd, dtype, wanted=[False, True, True])


SUMS = {
    "columns": sums_by_columns,
    "split": sums_by_parts,
    "torch": pytorch_sums,
}


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=WIDTHS,
        line_arg="provider",
        line_vals=[*SUMS, "copy"],
        line_names=["Columns", "Split columns", "PyTorch", "Copy"],
        ylabel="GB/s",
        plot_name="layer-norm-rows-sums",
        args={"M": 4096, "dtype": torch.float16, "mode": "backward"},
    )
)
def bench_sums(M, N, dtype, mode, provider):
    """Device time: a CUDA graph of several calls, each with inputs of its own
    and after L2 was overwritten, less the graph without the calls; median, 20%
    and 80% quantiles. Copy: the best of six tiles."""
    if not ON_GPU:
        return 3 * [float("nan")]
    if provider == "copy":
        return ceiling(reads=1, writes=1, shape=(M, N), dtype=dtype)

    sums = SUMS[provider]

    def prepare():
        tensors = given(M, N, dtype)
        return lambda: sums(*tensors, dtype=dtype)

    return speed(2 * M * N * dtype.itemsize, prepare)  # read x and dy


# %%

report(bench_sums)

# %%
# Let's count what the programs request at a time.
# In 16 bits, a tile of 2048 elements of ``x`` and as many of ``dy`` takes 8
# KB, and tiles of 1024 elements take 4 KB. The 132 SMs of an H100 or an H200
# hold all the programs at once.

print("           columns               split columns")
print("    N   programs  KB on an SM    programs  KB on an SM")
for N in WIDTHS:
    programs = N // 16
    split_programs = N // 32 * count_parts(N)
    requested = 8 * programs / 132  # KB on each SM, on average
    split_requested = 4 * split_programs / 132
    print(f"{N:5}{programs:11}{requested:13.0f}", end="")
    print(f"{split_programs:12}{split_requested:13.0f}")

# %%
# **What the figure shows.**
# On the H100, columns reach 28% of a copy at 1024 columns and 77% at 12288
# columns. Split columns reach 53% and 81%, and PyTorch's sums 30% and 76%.
# Split columns are faster than PyTorch at every width. Without the split we
# are slower than PyTorch up to 8192 columns.
#
# On the H200, columns reach 21% of a copy at 1024 columns and 70% at 12288
# columns. Split columns reach 45% and 74%, and PyTorch's sums 23% and 65%.
# There, too, split columns are faster than PyTorch at every width. Without the
# split we are slower than PyTorch up to 6144 columns.
#
# Here and below, the speeds and times in the text are those of the H100
# wherever we do not speak of the H200.
#
# **Why.**
# The table of programs tells us: the more bytes they request at a time, the
# faster the sums are. Let's go through it with the speeds of the H100. Columns
# request 4, 8, 16, 23, 31 and 47 KB on an SM, and reach 28%, 38%, 60%, 61%,
# 73% and 77% of a copy.
# At 1024 columns only 64 programs run, and more than half of the SMs request
# nothing. With the split, 512 programs request 16 KB on each SM, and the sums
# are 1.9 times as fast.
#
# The H200 has just as many SMs, so our programs request the same bytes on each
# of them. At 1024 columns, our sums by columns run at 690 GB/s on the H200 and
# at 678 GB/s on the H100. But the copy is 1.3 times as fast on the H200, so
# our share of it is smaller.
#
# One thing the table does not explain. On the H100, split columns request
# about 30 KB on an SM from 2048 to 8192 columns, and yet their share rises
# from 55% to 77%.
# What counts here is the time that does not grow with the matrix: two kernels
# have to start and to finish. At 2048 columns everything takes 21.5 µs, and at
# 8192 columns 59.7 µs. The matrices have quadrupled, and the time has not even
# tripled.
# Another step remains unexplained. Between 4096 and 6144 columns the shares
# hardly change: columns go from 60% to 61%, split columns from 66% to 65%, and
# PyTorch's sums from 63% to 64%. We do not know why.
# On the H200, columns go from 51% to 50% there, and split columns fall from
# 60% to 56%.
#
# **What follows.**
# A kernel needs enough programs. They can come from any dimension whose sums
# can be added up later.
# But even the fastest sums read ``x`` and ``dy`` once more than necessary,
# because another kernel has to read them as well, for ``dx``.
#
# A buffer for each program
# -------------------------
#
# Can one kernel do both? If a program reads whole rows, it can compute ``dx``
# and add up ``dw`` and ``db`` on the way.
#
# This is the backward kernel of `Layer normalization, both passes
# <01-layer-norm.html>`_, and one thing is new. When a program has seen all its
# rows, it hands its sums to a function, ``KEEP``. The next two designs differ
# in this function alone.
# Without a function, the kernel computes only ``dx``. That is what the designs
# by columns need.


@triton.jit
def _layer_norm_bwd(
    dy_ptr,  # (M, N), contiguous
    x_ptr,  # (M, N), contiguous
    w_ptr,  # (N,)
    mean_ptr,  # (M,), from the forward pass
    rstd_ptr,  # (M,), from the forward pass
    dx_ptr,  # (M, N)
    sums_ptr,  # (buffers, 2, N), or None
    M,  # rows
    N: tl.constexpr,  # columns
    BLOCK_SIZE: tl.constexpr,  # tile width: a power of two, at least N
    KEEP: tl.constexpr,  # New: the function that gets the sums, or None
):
    cols = tl.arange(0, BLOCK_SIZE)
    mask = cols < N
    acc_dtype: tl.constexpr = mean_ptr.dtype.element_ty

    # The sums over our rows stay in registers from the first row to the last.
    dw = tl.zeros((BLOCK_SIZE,), acc_dtype)
    db = tl.zeros((BLOCK_SIZE,), acc_dtype)
    for row in range(tl.program_id(0), M, tl.num_programs(0)):
        # Load a row of x and of dy. Masked elements of dy are 0, so they add
        # nothing to any of the sums below.
        offsets = tl.cast(row, tl.int64) * N + cols  # M * N may pass 2**31
        x = tl.load(x_ptr + offsets, mask=mask, other=0).to(acc_dtype)
        dy = tl.load(dy_ptr + offsets, mask=mask, other=0).to(acc_dtype)

        # Recompute x_hat.
        mean = tl.load(mean_ptr + row)
        rstd = tl.load(rstd_ptr + row)
        x_hat = (x - mean) * rstd

        # This row's terms of dw and db.
        dw += dy * x_hat
        db += dy

        # The formula for dx.
        w = tl.load(w_ptr + cols, mask=mask, other=0).to(acc_dtype)
        wdy = dy * w
        c1 = tl.sum(x_hat * wdy) / N
        c2 = tl.sum(wdy) / N
        dx = (wdy - x_hat * c1 - c2) * rstd
        tl.store(dx_ptr + offsets, dx, mask=mask)

    # New: the compiler puts the code of KEEP here. Without one nobody needs
    # dw and db, and it drops them from the loop as well.
    if KEEP is not None:
        KEEP(sums_ptr + cols, dw, db, mask, N)


# %%
# With a buffer for each program, ``KEEP`` stores both sums in the buffer of
# the program. Nobody else writes there.


@triton.jit
def _store(
    sums_ptr,  # where the columns of dw are in the first buffer
    dw,  # the sums of this program
    db,
    mask,  # which columns belong to the row
    N: tl.constexpr,
):
    # A buffer has 2 * N numbers: dw first, then db.
    sums_ptr += tl.program_id(0) * 2 * N
    tl.store(sums_ptr, dw, mask=mask)
    tl.store(sums_ptr + N, db, mask=mask)


# %%
# Programs and warps are those of `Layer normalization, both passes
# <01-layer-norm.html>`_. We start as many programs as fit into the registers
# of an SM. Where rows are narrow we start fewer, because there one more
# program would cost more for its buffer than it brings.
# A program that computes only ``dx`` has no sums to carry from row to row, so
# there each row gets a program.


def count_sms():
    """SMs of this GPU; a few for the interpreter, which is slow."""
    if not ON_GPU:
        return 4
    return torch.cuda.get_device_properties(DEVICE).multi_processor_count


NUM_SMS = count_sms()


def plan_backward(N):
    """Programs on each SM, and warps of each program."""
    if N <= 1024:
        return 6, 4
    if N <= 2048:
        return 4, 4
    if N <= 4096:
        return 3, 4
    if N < 8192:
        return 2, 4
    return 1, 16


def count_programs(M, programs_per_sm):
    return min(M, programs_per_sm * NUM_SMS)


def by_rows(dy, x, w, mean, rstd, programs, warps, sums=None, keep=None):
    """dx; a function keep gets the sums of each program."""
    M, N = x.shape
    dx = torch.empty_like(x)
    _layer_norm_bwd[(programs,)](
        dy_ptr=dy,
        x_ptr=x,
        w_ptr=w,
        mean_ptr=mean,
        rstd_ptr=rstd,
        dx_ptr=dx,
        sums_ptr=sums,
        M=M,
        N=N,
        BLOCK_SIZE=triton.next_power_of_2(N),
        KEEP=keep,
        num_warps=warps,
    )
    return dx


def dx_alone(dy, x, w, mean, rstd):
    """dx, with a program for each row."""
    M, N = x.shape
    warps = 4
    if N > 2048:
        warps = 8
    return by_rows(dy, x, w, mean, rstd, programs=M, warps=warps)


def columns(dy, x, w, mean, rstd, dtype):
    """dx, dw and db, in two kernels."""
    dx = dx_alone(dy, x, w, mean, rstd)
    dw, db = sums_by_columns(dy, x, w, mean, rstd, dtype)
    return dx, dw, db


def split(dy, x, w, mean, rstd, dtype, parts=None):
    """dx, dw and db, in three kernels."""
    dx = dx_alone(dy, x, w, mean, rstd)
    dw, db = sums_by_parts(dy, x, w, mean, rstd, dtype, parts)
    return dx, dw, db


def buffers(dy, x, w, mean, rstd, dtype, programs_per_sm=None):
    """dx, dw and db, with a buffer for each program."""
    M, N = x.shape
    planned, warps = plan_backward(N)
    if programs_per_sm is None:
        programs_per_sm = planned
    programs = count_programs(M, programs_per_sm)
    sums = torch.empty(programs, 2, N, dtype=mean.dtype, device=x.device)
    dx = by_rows(dy, x, w, mean, rstd, programs, warps, sums, keep=_store)
    dw, db = add_up(sums, dtype)
    return dx, dw, db


# %%
# Atomic additions
# ----------------
#
# Now there is a single buffer. It must be zero at the start, and all programs
# add to it.
# What if two programs do so at the same time? Both could read 5, one adds 1
# and the other adds 2, and they write 6 and 7. Whoever writes last wins, and
# the other addition is lost.
# An *atomic* addition reads, adds and writes in one go, and nobody can come in
# between. So we get 8, whoever comes first.
# L2 does it, in the place where it keeps the number. Additions to the same
# place queue up there.
# ``sem="relaxed"`` says that an addition need not wait for any other loads or
# stores. We can afford that: the next kernel starts when this one has ended,
# and by then all additions are done.


@triton.jit
def _atomic_add(sums_ptr, dw, db, mask, N: tl.constexpr):
    # There is one buffer, and it is the first.
    tl.atomic_add(sums_ptr, dw, mask=mask, sem="relaxed")
    tl.atomic_add(sums_ptr + N, db, mask=mask, sem="relaxed")


def add_atomically(dy, x, w, mean, rstd, dtype, programs, warps):
    """dx, dw and db; each program adds its sums to the same buffer."""
    N = x.shape[1]
    sums = torch.zeros(1, 2, N, dtype=mean.dtype, device=x.device)
    dx = by_rows(dy, x, w, mean, rstd, programs, warps, sums, keep=_atomic_add)
    dw, db = add_up(sums, dtype)  # of one buffer: it only converts
    return dx, dw, db


def atomics(dy, x, w, mean, rstd, dtype, programs_per_sm=None):
    """dx, dw and db; a program adds once, after all its rows."""
    M, N = x.shape
    planned, warps = plan_backward(N)
    if programs_per_sm is None:
        # Each program more is one more in the queue: four are enough.
        programs_per_sm = min(planned, 4)
    programs = count_programs(M, programs_per_sm)
    return add_atomically(dy, x, w, mean, rstd, dtype, programs, warps)


def atomics_of_rows(dy, x, w, mean, rstd, dtype):
    """dx, dw and db; each row is a program, which adds its terms."""
    M, N = x.shape
    _, warps = plan_backward(N)
    return add_atomically(dy, x, w, mean, rstd, dtype, M, warps)


# %%
# How many programs does each design want?
# ----------------------------------------
#
# Before we compare the designs, each should have the number of programs that
# suits it. We try the same six numbers with all of them, at 1024 and at 4096
# columns.
# For split columns, we count the programs that compute the sums. At 4096
# columns, one program on each SM makes a single part, so nothing is split.

# %%

# Scaffold: the number of programs, a benchmark.

LINES = [
    f"{design}, {N}"
    for N in (1024, 4096)
    for design in ("buffers", "atomics", "split")
]


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["programs"],
        x_vals=[1, 2, 3, 4, 6, 8],
        xlabel="programs on a multiprocessor",
        line_arg="provider",
        line_vals=LINES,
        line_names=[line.capitalize() for line in LINES],
        ylabel="GB/s",
        plot_name="layer-norm-rows-programs",
        args={"M": 4096, "dtype": torch.float16, "mode": "backward"},
    )
)
def bench_programs(programs, M, dtype, mode, provider):
    """Device time: a CUDA graph of several calls, each with inputs of its own
    and after L2 was overwritten, less the graph without the calls; median, 20%
    and 80% quantiles."""
    if not ON_GPU:
        return 3 * [float("nan")]
    design, width = provider.split(", ")
    N = int(width)

    def prepare():
        tensors = given(M, N, dtype)
        if design == "buffers":
            return lambda: buffers(*tensors, dtype, programs_per_sm=programs)
        if design == "atomics":
            return lambda: atomics(*tensors, dtype, programs_per_sm=programs)
        groups_of_columns = N // 32
        parts = max(1, programs * NUM_SMS // groups_of_columns)
        return lambda: split(*tensors, dtype, parts=parts)

    return speed(3 * M * N * dtype.itemsize, prepare)


# %%

bench_programs.run(show_plots=ON_GPU)

# %%
# **What the figure shows.**
# Our functions above choose a number by a rule. These rules are close to the
# best: on the H100, none of the other numbers is more than 0.1% faster.
# At 4096 columns, our rules start three programs on each SM for buffers and
# for atomics, which reach 2285 and 2371 GB/s, and eight for split columns,
# which reach 1416 GB/s. At 1024 columns, they start six for buffers, which
# reach 1532 GB/s, and four for atomics and for split columns, which reach 1283
# and 1286 GB/s.
#
# On the H200, a single other number is faster, by 2.5%: at 1024 columns, eight
# programs for buffers reach 1752 GB/s, and six reach 1710 GB/s.
#
# **Why.**
# Up to the numbers of our rules, more programs help. While one computes, the
# others load.
#
# At 4096 columns, the registers of an SM hold three programs that work on
# whole rows. If we start four, the fourth begins when another one has ended,
# and then it is nearly alone: on the H100, buffers fall to 1910 GB/s, and
# atomics to 2123 GB/s.
# If we start six, they run in two full rounds of three. Atomics are back at
# 2248 GB/s. Buffers are not, with 1816 GB/s, because there are now twice as
# many of them to write and to read.
# On the H200, atomics are not back either: they reach 2610 GB/s with three
# programs, 2301 with four and 2277 with six.
#
# At 1024 columns, the registers hold more programs than we start. But on the
# H100 more of them do not help atomics: with eight, atomics fall to 1085 GB/s,
# because more additions queue up.
#
# **What follows.**
# Each design is measured near its best. From 8192 columns on, the registers of
# an SM hold only one program that works on whole rows, and there is nothing to
# choose.
#
# Which design is the fastest?
# ----------------------------
#
# Now we measure whole backward passes, beside PyTorch's, that of
# ``torch.compile``, and a copy that reads two matrices and writes one.
# In the line "Atomics, rows", each row has a program, which adds its terms of
# ``dw`` and ``db`` atomically.

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

# Scaffold: inputs.


def inputs(M, N, dtype):
    """x, w, b and dy. The mean of x is far from 0, as it may be in a model."""
    torch.manual_seed(0)
    x = -2.3 + 0.5 * torch.randn(M, N, device=DEVICE)
    w = torch.rand(N, device=DEVICE)
    b = torch.rand(N, device=DEVICE)
    dy = 0.1 * torch.randn(M, N, device=DEVICE)
    x = x.to(dtype).requires_grad_()
    w = w.to(dtype).requires_grad_()
    b = b.to(dtype).requires_grad_()
    return x, w, b, dy.to(dtype)


# %%

# Scaffold: the designs, a benchmark.

DESIGNS = {
    "triton": buffers,
    "columns": columns,
    "split": split,
    "atomics": atomics,
    "rows": atomics_of_rows,
    "torch": pytorch,
}
NAMES = [
    "Buffers",
    "Columns",
    "Split columns",
    "Atomics",
    "Atomics, rows",
    "PyTorch",
]


def pytorch_layer_norm(x, w, b, eps):
    return F.layer_norm(x, (x.shape[1],), w, b, eps)


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=WIDTHS,
        line_arg="provider",
        line_vals=[*DESIGNS, "torch.compile", "copy"],
        line_names=[*NAMES, "torch.compile", "Copy"],
        ylabel="GB/s",
        plot_name="layer-norm-rows-designs",
        args={"M": 4096, "dtype": torch.float16, "mode": "backward"},
    )
)
def bench_designs(M, N, dtype, mode, provider):
    """Device time: a CUDA graph of several calls, each with inputs of its own
    and after L2 was overwritten, less the graph without the calls; median, 20%
    and 80% quantiles. Copy: the best of six tiles."""
    if not ON_GPU:
        return 3 * [float("nan")]
    if provider == "copy":
        return ceiling(reads=2, writes=1, shape=(M, N), dtype=dtype)
    bytes_moved = 3 * M * N * dtype.itemsize  # read x and dy, write dx

    def speed_of_autograd(function):
        def prepare():
            x, w, b, dy = inputs(M, N, dtype)
            y = function(x, w, b, eps=1e-5)
            return lambda: torch.autograd.grad(
                y, (x, w, b), dy, retain_graph=True
            )

        return speed(bytes_moved, prepare)

    if provider == "torch.compile":
        return best_of_three_compilations(
            pytorch_layer_norm, speed_of_autograd
        )
    design = DESIGNS[provider]

    def prepare():
        tensors = given(M, N, dtype)
        return lambda: design(*tensors, dtype=dtype)

    return speed(bytes_moved, prepare)


# %%

report(bench_designs)

# %%
# **What the figure shows.**
# On the H100, buffers reach 61% to 85% of the copy, atomics 52% to 87%,
# split columns 45% to 55%, and columns 36% to 52%. An atomic addition for
# each row reaches 18% to 46%, and PyTorch 35% to 40%.
# Buffers are 1.2 times as fast as atomics at 1024 columns, where atomics are
# no faster than split columns. From 4096 columns on, atomics are slightly
# ahead of buffers.
# On the H100, buffers are 1.7 to 2.2 times as fast as PyTorch, and 1.5 to
# 2.0 times as fast as torch.compile.
# But torch.compile beats columns at two widths: it is 6% faster than columns
# at 2048 columns and 5% at 12288, where it is also as fast as split columns.
#
# On the H200, buffers reach 53% to 73% of the copy, atomics 41% to 73%, split
# columns 45% to 52%, and columns 33% to 50%. An atomic addition for each row
# reaches 13% to 32%, and PyTorch 30% to 39%. Buffers are 1.7 to 2.1 times as
# fast as PyTorch, and 1.4 to 2.2 times as fast as torch.compile. Atomics are
# slower than split columns at 1024 columns, and ahead of buffers only from
# 6144 columns on, by at most 2.2%. On that card, torch.compile beats columns
# at 12288 columns alone, where it is also 3% faster than split columns.
#
# **Why.**
# Does our count explain the figure?
# At the start we counted for 4096 columns. Here is the count for all widths:
# the share of the copy that each design would reach if it moved its bytes as
# fast as the copy moves three matrices, and if nothing else took time.

print("if only bytes took time, in % of the copy")
print("    N  columns  buffers  atomics  atomics, rows")
for N in WIDTHS:
    programs_per_sm, _ = plan_backward(N)
    programs = 132 * programs_per_sm  # on an H100
    programs_that_add = 132 * min(programs_per_sm, 4)
    counted = [
        in_all(5, 0),
        in_all(3, 2 * programs),  # each buffer is written and read
        in_all(3, programs_that_add + 1),
        in_all(3, 4096 + 1),
    ]
    shares = [f"{100 * 3 / moved:9.0f}" for moved in counted]
    print(f"{N:5}", *shares, sep="")

# %%
# Let's compare that with what the designs reach on the H100.
#
# - **Columns** could reach 60%. They reach 36% to 52%, and split columns 45%
#   to 55%, because their sums are slower than a copy, as we have seen.
# - **Buffers** could reach 66%, 74%, 80% and 85% up to 6144 columns. They
#   reach 61%, 72%, 80% and 82%, so there the count explains nearly everything.
#   At 8192 and 12288 columns they could reach 92%, and they reach 75% and 85%.
#   The registers of an SM then hold a single program, and nobody loads while
#   it computes. It requests 32 KB at a time at the first of the two widths,
#   and 48 KB at the second.
# - **Atomics, rows** could reach 43%. From 4096 columns on they reach 38% to
#   46%. (A little more than 43% is possible, because an addition ends in L2
#   and need not go to DRAM. We have not looked into the 38%, at 6144 columns.)
#   At 1024 columns they take 54.8 µs and at 2048 columns 63.1 µs, so half the
#   bytes take nearly as long. What both widths have in common is the queue:
#   4096 additions arrive at each sum. At 1024 columns, that is one every 13
#   ns.
# - **Atomics** could reach 85% to 96%. At 1024 columns they reach 52%. 528
#   programs queue up there, and if an addition takes 13 ns, the queue takes
#   7 µs. That is a lot next to the 9.9 µs of the whole copy. At 12288
#   columns 132 programs queue up, and the copy takes 101.1 µs. There the queue
#   hardly matters, and atomics reach 87%. At 8192 columns they only reach 77%,
#   because a single program runs on an SM, as with buffers.
#
# On the H200, buffers reach 53%, 65%, 73% and 71% up to 6144 columns, and 60%
# and 71% at 8192 and 12288. That is less of what the count allows than on the
# H100: the memory of the H200 is faster and its SMs are the same, so what is
# not memory traffic is a larger part of the time. An addition for each row
# takes about as long on both cards, 58 µs on the H200 and 55 µs on the H100 at
# 1024 columns, and 223 µs and 230 µs at 12288: L2 does these additions, not
# DRAM. At 4096 columns it even takes 111 µs on the H200 and 76 µs on the H100,
# and we do not know why.
#
# PyTorch reads ``x`` and ``dy`` twice as well, so it could not reach more than
# 60% either, unless L2 still holds them the second time. It may hold narrow
# matrices, but not wide ones. We have not looked at the kernels of
# torch.compile.
#
# **What follows.**
# Count the bytes first. The count tells columns from buffers, and an addition
# for each row from an addition for each program. It does not tell buffers from
# atomics. For that you have to measure.
#
# Is the count right?
# -------------------
#
# NVIDIA's profiler ``ncu`` counts the bytes that kernels read from DRAM. It
# empties the caches before each kernel, so a matrix that two kernels read
# counts twice.
# We divide these bytes by those of the matrices and buffers that are read
# according to our table. If the table is right, we get 1.

# %%

# Scaffold: the designs, bytes that ncu counts.


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=["1024", "4096", "12288"],
        line_arg="provider",
        line_vals=list(DESIGNS)[:5],
        line_names=NAMES[:5],
        ylabel="bytes of DRAM per byte counted",
        plot_name="layer-norm-rows-dram",
        args={
            "M": 4096,
            "dtype": torch.float16,
            "mode": "backward",
            "counter": "dram__bytes_read.sum",
        },
    )
)
def dram_reads(M, N, dtype, mode, counter, provider):
    """Bytes that all kernels of a backward pass read from DRAM, over those in
    the table of this page."""
    if ON_GPU:
        N = int(N)
        tensors = given(M, N, dtype)
        matrices = 2
        if provider in ("columns", "split"):
            matrices = 4
        sums = 0
        if provider == "triton":
            programs_per_sm, _ = plan_backward(N)
            sums = count_programs(M, programs_per_sm)
        by_hand = (matrices * 2 * M + sums * 8) * N
        design = DESIGNS[provider]
        design(*tensors, dtype=dtype)  # compiles
        with torch.cuda.nvtx.range(f"counted {provider} {N} per {by_hand}"):
            design(*tensors, dtype=dtype)
    return 3 * [float("nan")]  # only ncu knows


# %%

dram_reads.run(show_plots=ON_GPU)

# %%
# On both cards, all points lie between 1.00 and 1.01, so the table is right
# about what is read. The atomic additions do not show here, because L2 does
# them.
#
# The same bits?
# --------------
#
# Every addition rounds, so a sum depends on its order: ``(0.1 + 0.2) + 0.3``
# is not ``0.1 + (0.2 + 0.3)``, as you can try in Python.
# Buffers and parts are added up in a fixed order. Atomic additions come in the
# order in which programs happen to end.
# Does that show? We run each design once, and then a hundred times more on the
# same input. We count the runs whose ``dw`` or ``db`` differs from the first
# one in any bit of float32.

# %%

# Scaffold: runs that differ, counted.


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=["1024", "4096", "12288"],
        line_arg="provider",
        line_vals=list(DESIGNS),
        line_names=NAMES,
        ylabel="different results of 100",
        plot_name="layer-norm-rows-bits",
        args={"M": 4096, "dtype": torch.float16, "mode": "backward"},
    )
)
def different_bits(M, N, dtype, mode, provider):
    """Runs of 100 whose dw or db, in float32, differs in any bit from that of
    the first."""
    if not ON_GPU:
        return 3 * [float("nan")]
    tensors = given(M, int(N), dtype)
    design = DESIGNS[provider]

    def gradients():
        _, dw, db = design(*tensors, dtype=torch.float32)
        return torch.stack([dw, db])

    first = gradients()
    different = 0
    for _ in range(100):
        if not torch.equal(gradients(), first):
            different += 1
    return 3 * [different]


# %%

different_bits.run(show_plots=ON_GPU)

# %%
# On both cards, no run with atomics repeats the first one, at any of the three
# widths.
# Buffers, columns, split columns and PyTorch repeat it every time.
# An order that changes does not make a sum less exact. But if you cannot
# repeat a result, it is hard to tell a bug from a rounding error.
# Buffers promise the same bits only for the same number of programs. A GPU
# with another number of SMs starts another number of programs. That changes
# the order of the additions, and with it the last bits.
#
# A function to train with
# ------------------------
#
# The forward pass is that of `Layer normalization, both passes
# <01-layer-norm.html>`_: each program keeps one row in registers.


@triton.jit
def _layer_norm_fwd(
    x_ptr,  # (M, N), contiguous
    w_ptr,  # (N,)
    b_ptr,  # (N,)
    y_ptr,  # (M, N)
    mean_ptr,  # (M,): saved for the backward pass
    rstd_ptr,  # (M,): 1 / standard deviation, saved as well
    eps: tl.constexpr,  # added to the variance
    N: tl.constexpr,  # columns
    BLOCK_SIZE: tl.constexpr,  # tile width: a power of two, at least N
):
    # Program i takes row i.
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK_SIZE)
    mask = cols < N
    acc_dtype = mean_ptr.dtype.element_ty

    # Load the row once. Masked elements are 0 and add nothing to the sum.
    x = tl.load(x_ptr + row * N + cols, mask=mask, other=0).to(acc_dtype)
    mean = tl.sum(x) / N

    # A masked element would now be -mean, so set it back to 0.
    x_centered = tl.where(mask, x - mean, 0)
    variance = tl.sum(x_centered * x_centered) / N
    rstd = 1 / tl.sqrt(variance + eps)

    # Save two numbers for the backward pass.
    tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)

    # Scale, shift and store.
    w = tl.load(w_ptr + cols, mask=mask).to(acc_dtype)
    b = tl.load(b_ptr + cols, mask=mask).to(acc_dtype)
    y = x_centered * rstd * w + b
    tl.store(y_ptr + row * N + cols, y, mask=mask)


# %%


class LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, b, eps, backward):
        M, N = x.shape
        y = torch.empty_like(x)
        # 16-bit rows are summed in float32.
        acc_dtype = torch.promote_types(x.dtype, torch.float32)
        mean = torch.empty(M, dtype=acc_dtype, device=x.device)
        rstd = torch.empty(M, dtype=acc_dtype, device=x.device)
        block_size = triton.next_power_of_2(N)
        # One warp for every 4 KB of the row, but at least 4 and at most 16.
        warps = min(max(block_size * x.element_size() // 4096, 4), 16)
        _layer_norm_fwd[(M,)](
            x_ptr=x,
            w_ptr=w,
            b_ptr=b,
            y_ptr=y,
            mean_ptr=mean,
            rstd_ptr=rstd,
            eps=eps,
            N=N,
            BLOCK_SIZE=block_size,
            num_warps=warps,
        )
        ctx.save_for_backward(x, w, mean, rstd)
        ctx.w_dtype = w.dtype
        ctx.b_dtype = b.dtype
        ctx.backward = backward
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        x, w, mean, rstd = ctx.saved_tensors
        # dw and db come in one tensor, of a type that is wide enough for both.
        wide = torch.promote_types(ctx.w_dtype, ctx.b_dtype)
        dx, dw, db = ctx.backward(dy.contiguous(), x, w, mean, rstd, wide)
        # One gradient for each argument of forward; the last two have none.
        return dx, dw.to(ctx.w_dtype), db.to(ctx.b_dtype), None, None


# %%
# The function checks its arguments. A missing weight counts as ones, and a
# missing bias as zeros. ``backward`` is one of our designs.


def layer_norm(
    x, normalized_shape, weight=None, bias=None, eps=1e-5, backward=buffers
):
    """Normalize rows of up to 16384 columns; weight and bias may be None."""
    if isinstance(normalized_shape, int):
        normalized_shape = [normalized_shape]
    shape = torch.Size(normalized_shape)
    w = weight
    if w is None:
        w = x.new_ones(shape)
    b = bias
    if b is None:
        b = x.new_zeros(shape)
    for name, t in {"x": x, "weight": w, "bias": b}.items():
        if not t.is_floating_point():
            raise TypeError(f"{name} is {t.dtype}: floats are taken")
        if t.device != x.device or t.device.type != DEVICE.type:
            raise ValueError(f"{name} is on {t.device}: all go on {DEVICE}")
        if t.is_cuda and t.get_device() != torch.cuda.current_device():
            raise ValueError(f"{name} is on {t.device}: not the current one")
        last_dimensions = t.shape
        if name == "x":
            last_dimensions = t.shape[-len(shape) :]
        if last_dimensions != shape:
            raise ValueError(
                f"the shape of {name} is {tuple(t.shape)}, normalized_shape "
                f"is {tuple(shape)}"
            )
    if not eps >= 0:  # negative, or NaN
        raise ValueError(f"eps is {eps}: 0 or more is taken")
    N = shape.numel()
    if not 0 < N <= 16384:
        raise ValueError(f"normalized_shape has {N} elements, not 1 to 16384")
    rows = x.reshape(-1, N).contiguous()
    w = w.reshape(N).contiguous()
    b = b.reshape(N).contiguous()
    return LayerNorm.apply(rows, w, b, eps, backward).reshape(x.shape)


# %%
# Are all of them right?
# ----------------------
#
# We compare each element of both passes with PyTorch's in float64.

# %%

# Scaffold: a check of each element against float64.


def both_passes(function, x, w, b, dy):
    """y, dx, dw and db by name."""
    y = function(x, (x.shape[1],), w, b)
    dx, dw, db = torch.autograd.grad(y, (x, w, b), dy)
    return {"y": y, "dx": dx, "dw": dw, "db": db}


def in_float64(tensor):
    """The same numbers in float64, as a new input for autograd."""
    return tensor.detach().double().requires_grad_()


def check(function, M, N, dtype):
    """Compare each element of y, dx, dw and db with PyTorch's in float64."""
    arguments = inputs(M, N, dtype)
    ours = both_passes(function, *arguments)
    wide = [in_float64(tensor) for tensor in arguments]
    exact = both_passes(F.layer_norm, *wide)
    for name in ours:
        error = (ours[name] - exact[name]).abs()
        rounding = exact[name].abs() * torch.finfo(dtype).eps / 2
        typical_size = exact[name].square().mean().sqrt()
        sums = 64 * torch.finfo(torch.float32).eps * typical_size
        worst = (error / (rounding + sums)).max().item()
        assert worst <= 1, f"{name}: {worst:.1f} times the allowed error"
    print(f"{M} x {N}, {dtype}: each element of y, dx, dw and db is right")


# %%

shape = (9, 200)  # small, because the interpreter is slow
if ON_GPU:
    shape = (1151, 8192)
for name in ("triton", "columns", "split", "atomics", "rows"):
    print(name, end=": ")

    def function(x, normalized_shape, w, b, backward=DESIGNS[name]):
        return layer_norm(x, normalized_shape, w, b, backward=backward)

    check(function, *shape, torch.float32)
check(layer_norm, *shape, torch.float16)

# %%
# Where PyTorch or a library is better
# ------------------------------------
#
# - **PyTorch's sums beat columns that are not split**, up to 8192 columns on
#   the H100, and up to 6144 on the H200.
# - **torch.compile beats some of our backward passes.** On the H100, it is
#   faster than columns at 2048 and 12288 columns, and at 12288 split columns
#   are no faster than it is. An addition for each row is slower than
#   torch.compile at four of the six widths, and slower than PyTorch at the two
#   narrowest. On the H200, it is faster than columns and split columns at
#   12288, and an addition for each row is slower than torch.compile, and than
#   PyTorch, at all six widths.
# - **PyTorch can do more.** It has second derivatives and rows of any width,
#   and it leaves out gradients that nobody wants.
# - **torch.compile can fuse** a layer norm with what comes before and after.
# - **Our programs wait for their rows.** None of the four designs requests a
#   row ahead of time, as `Loads in flight <04-loads-in-flight.html>`_ does.
# - **Libraries have kernels of their own.** `Every width
#   <11-every-width.html>`_ measures them.
#
# Exercise 1: a few buffers
# -------------------------
#
# There is something between one buffer and a buffer for each program. Let's
# have three buffers: program ``p`` adds its sums to buffer ``p % 3``, so fewer
# additions queue up in one place.
# The stub below is ``_atomic_add``, which adds everything to buffer 0. Change
# it in the script or the notebook, and run that until it prints ``right:
# True``. (The list of right buffers that comes after this line is that of our
# solution.)
#
# **Hint 1.** Only an address has to change. How does ``_store`` find the
# buffer of its program?
#
# **Hint 2.** A buffer has ``2 * N`` numbers, and ``sums_ptr`` points to the
# first one. How many numbers must you skip to get to buffer 2?


@triton.jit
def _add_to_few(sums_ptr, dw, db, mask, N: tl.constexpr):
    # To do: sums_ptr still points to the first buffer.
    tl.atomic_add(sums_ptr, dw, mask=mask, sem="relaxed")
    tl.atomic_add(sums_ptr + N, db, mask=mask, sem="relaxed")


def exercise_1(keep):
    """Print which of three buffers are right, and say whether all are."""
    tensors = given(10, 24, torch.float32)
    dy, x, *_ = tensors
    sums = torch.zeros(3, 2, 24, device=DEVICE)
    by_rows(*tensors, programs=6, warps=4, sums=sums, keep=keep)
    # Program p takes rows p and p + 6, and row i goes to buffer i % 3.
    terms = torch.stack([dy * F.layer_norm(x, (24,)), dy], dim=1)
    expected = torch.stack([terms[i::3].sum(dim=0) for i in range(3)])
    right = torch.isclose(sums, expected, atol=1e-5).flatten(1).all(dim=1)
    print("right buffers:", right.nonzero().flatten().tolist())
    return right.all().item()


print("right:", exercise_1(_add_to_few))

# %%

# Solution 1


@triton.jit
def _add_to_few_1(sums_ptr, dw, db, mask, N: tl.constexpr):
    # A buffer has 2 * N numbers, as in _store. Now programs share it, so the
    # additions stay atomic.
    buffer = tl.program_id(0) % 3
    sums_ptr += buffer * 2 * N
    tl.atomic_add(sums_ptr, dw, mask=mask, sem="relaxed")
    tl.atomic_add(sums_ptr + N, db, mask=mask, sem="relaxed")


assert exercise_1(_add_to_few_1)

# %%
# What we learned
# ---------------
#
# These are the designs of this page at 4096 columns: what each moves, in
# matrices, what share of the copy it reaches on the H100, and why.
#
# - **Columns** move 5.00 matrices. They reach 48%: ``x`` and ``dy`` are read
#   twice, and there are few programs.
# - **Split columns** move 5.02 matrices. They reach 50%: there are enough
#   programs, but ``x`` and ``dy`` are still read twice.
# - **Buffers** move 3.77 matrices. They reach 80%, with the same bits every
#   time.
# - **Atomics** move 3.39 matrices. They reach 83%, with other bits every time.
# - **An atomic addition for each row** moves 7.00 matrices. It reaches 46%,
#   because all these bytes have to get to L2.
#
# And for sums over rows in general:
#
# - Reading a matrix twice costs more than a buffer for each program.
# - Atomic additions save buffers, and they cost you the order of the sum.
# - Give each design the number of programs that suits it before you compare.
#
# **Next:** can programs share a buffer without atomic additions, and still be
# sure that no addition gets lost? `A lock <03-lock.html>`_ lets them in one at
# a time.
