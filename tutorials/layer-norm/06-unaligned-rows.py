r"""
Rows that begin anywhere
========================

Why does layer norm become slow when a row gets one column more?
A thread can load 16 bytes at once only from an address that is a multiple of
16, so our loads begin at such an address, up to 7 columns before the row.

So far our rows had 1024, 4096 or 8192 columns. Other widths are less
convenient: a vocabulary may have 50257 words, and a slice of a matrix any
number of columns.
On this page we add one column to a row, and count how often its loads have to
ask memory. Then we write both passes of layer norm so that this column costs
little.

**What you will learn**

- What a warp asks of memory when it loads: requests and sectors.
- Why the compiler loads a row of 4096 columns 16 bytes at a time, and a row of
  4097 columns 2 bytes at a time.
- How to load whole groups of 16 bytes from rows that begin anywhere, and how
  to store them without touching the rows next to them.
- How to choose the rows of each program so that the sums of the backward pass
  can stay in registers.

**What you need:** the formulas of `Layer normalization, both passes
<01-layer-norm.html>`_, and the kernels of `Chunks instead of padding
<05-chunks.html>`_, which cut a row into pieces. You don't need a GPU.
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

# Scaffold: one more import.

import functools

# %%
# Where does a row begin?
# -----------------------
#
# The rows of a contiguous matrix follow one another without a gap.
# Let's take rows of 13 columns in 16 bits. Eight numbers then have 16 bytes.
# If they begin at a multiple of 16 bytes, we call them a *group*.
#
# - Row 0 begins at element 0, which is the start of a group.
# - Row 1 begins at element 13. That is 5 elements after the start of a group.
# - Row 2 begins at element 26. That is 2 elements after the start of a group.
# - Row 8 begins at element 104 = 13 × 8, at the start of a group again.
#
# We call this distance the *shift* of a row. The picture shows in which groups
# each row lies:

# %%

# Drawing: rows of 13 columns in groups of 8 elements.

plt.figure(
    "Rows of 13 columns in groups of 8 elements: rows 0 and 8 begin at the "
    "start of a group, row 1 five elements after one, and row 2 two",
    figsize=(7.5, 2.2),
)
for level, row in enumerate((8, 2, 1, 0)):
    shift = row * 13 % 8
    plt.text(-3.5, level, f"row {row}", va="center")
    plt.barh(level, 13, 0.7, shift, color="C0", alpha=0.6)
    plt.barh([level] * 24, 1, 0.7, range(24), fc="none", ec="0.7")
    plt.barh([level] * 3, 8, 0.7, [0, 8, 16], fc="none", ec="k", lw=1.5)
plt.axis("off")
plt.show()

# %%
# If the number of columns is a multiple of 8, all shifts are 0. If it is odd,
# all shifts from 0 to 7 occur.
#
# What does a warp ask for?
# -------------------------
#
# The 32 threads of a warp run a load together, and together they send one
# *request* to the L1 cache.
# A thread may take 2, 4, 8 or 16 bytes with one load, but only from an address
# that is a multiple of this size.
# With 16 bytes for each thread, a request brings 512 bytes. With 2 bytes
# for each thread, it brings 64.
#
# The compiler decides how many bytes a thread takes, and it decides once for
# all rows. At 4096 columns every row begins at a multiple of 16 bytes. At 4097
# columns, row 1 begins 8194 bytes after row 0, and the largest power of two
# that divides 8194 is 2. So a thread takes 2 bytes at a time, in all rows.
#
# The memory itself moves *sectors* of 32 bytes, never less.
# The picture compares a row that begins at a multiple of 512 bytes with one
# that begins 26 bytes after such a multiple:

# %%

# Drawing: the requests of two rows, and the sectors that they touch.

plt.figure(
    "A row that is loaded by 16 bytes takes one request for 16 sectors; a row "
    "that begins at byte 26 takes requests of 64 bytes, each of which touches "
    "3 sectors, and neighboring requests share a sector",
    figsize=(7.5, 2.9),
)
for sector in range(10):
    for level in (0, 1.6):
        plt.barh(
            level, 32, 0.5, 32 * sector, align="edge", fc="none", ec="0.5"
        )
    plt.text(32 * sector + 16, 2.2, f"{32 * sector}", ha="center", color="0.4")
plt.text(160, 2.55, "sectors of 32 bytes, by their first byte", ha="center")
plt.barh(1.65, 320, 0.4, 0, align="edge", color="C0", alpha=0.6)
plt.text(4, 1.3, "16 bytes a thread: one request goes on to byte 511")
for request in range(4):
    first = 26 + 64 * request
    color = f"C{1 + request % 2}"
    plt.barh(0.05, 64, 0.4, first, align="edge", color=color, alpha=0.6)
    plt.text(first + 32, -0.35, "64 bytes,\n3 sectors", ha="center", va="top")
plt.text(26, 0.7, "2 bytes a thread: a request for every 64 bytes")
plt.axis((-4, 324, -1.1, 2.9))
plt.axis("off")
plt.show()

# %%
# Eight requests take the place of one, and each asks once more for the last
# sector of the request before it, unless it begins with a sector of its own.
# How many requests and sectors does a whole row need? Let's count them for
# rows of about 4040 columns. They depend on the shift, so we take the mean of
# 16 rows, which have all shifts that a width can have.


def asked_for(first, end, width):
    """Requests of warps for the bytes from first to end, and their sectors.

    A thread takes width bytes at a time.
    """
    requests = 0
    sectors = 0
    while first < end:
        next_first = min(first + 32 * width, end)
        requests += 1
        sectors += (next_first - 1) // 32 - first // 32 + 1
        first = next_first
    return requests, sectors


def bytes_of_a_thread(N, itemsize=2):
    """What a load may take from every row: a power of two, at most 16."""
    width = 16
    while N * itemsize % width > 0:
        width //= 2
    return width


def mean_of_rows(N, in_groups):
    """Requests and sectors for a row of N numbers of 2 bytes."""
    requests = 0
    sectors = 0
    for row in range(16):
        first = 2 * N * row
        end = first + 2 * N
        width = bytes_of_a_thread(N)
        if in_groups:
            # From the start of a group to the end of a group.
            first = first // 16 * 16
            end = triton.cdiv(end, 16) * 16
            width = 16
        of_row = asked_for(first, end, width)
        requests += of_row[0] / 16
        sectors += of_row[1] / 16
    return requests, sectors


print("columns  bytes a thread  requests  sectors   in groups: the same")
for N in (4040, 4041, 4042, 4044):
    usual = "{:9.0f}{:9.0f}".format(*mean_of_rows(N, in_groups=False))
    groups = "{:11.0f}{:9.0f}".format(*mean_of_rows(N, in_groups=True))
    print(f"{N:7}{bytes_of_a_thread(N):16} {usual}{groups}")

# %%
# A row of 4040 columns has 8080 bytes, which lie in 253 sectors. It takes 16
# requests for 260 sectors: every other row begins in the middle of a sector,
# and there nearly every request shares a sector with the next. At 4041 columns
# it takes 127 requests, eight times as many. They ask for 372 sectors, because
# nearly every request begins in the middle of a sector and touches three where
# two would do. The second time a sector comes from L1, so DRAM moves no more
# than before.
#
# The last two columns of the table show the way out: we begin each row at the
# start of a group, a few elements early, and end it at the end of a group.
# Then each thread can take 16 bytes at any width, and only the first and the
# last group bring numbers that we do not need.
#
# A sum in whole groups
# ---------------------
#
# Does Triton really load like this?
#
# This kernel adds up each row of a matrix. We call a place for one element a
# *lane*. Lane 0 is the start of the group that holds column 0, so column ``j``
# is in lane ``j + shift``.


@triton.jit
def _sum_of_row(
    x_ptr,  # (rows, N), contiguous
    sums_ptr,  # (rows,)
    N: tl.constexpr,  # columns
    BLOCK: tl.constexpr,  # lanes: a power of two, at least N + STEP - 1
    STEP: tl.constexpr,  # lanes in a group; 1: lanes begin at column 0
):
    row = tl.program_id(0)
    # How far after the start of a group this row begins.
    shift = row * N % STEP
    # Divided and multiplied by STEP: the compiler now knows that the lanes
    # begin at a multiple of it.
    first = row * N // STEP * STEP
    lane = tl.arange(0, BLOCK)

    # A mask that changes within a group would make its load narrow again. So
    # a group is loaded as a whole, if any column of our row is in it.
    group = lane // STEP * STEP
    x = tl.load(x_ptr + first + lane, mask=group < N + shift, other=0)

    # What belongs to the rows before and after us does not count.
    inside = (lane >= shift) & (lane < N + shift)
    tl.store(sums_ptr + row, tl.sum(tl.where(inside, x, 0)))


x = torch.ones(8, 13, device=DEVICE)
sums = torch.zeros(8, device=DEVICE)
# These numbers have 4 bytes each. A group of 8 works for them as well.
_sum_of_row[(8,)](x_ptr=x, sums_ptr=sums, N=13, BLOCK=32, STEP=8)
print("sums of rows of 13 ones:", sums.tolist())

# %%
# Now NVIDIA's profiler ``ncu`` counts the requests of this kernel: with
# ``STEP`` = 8, in groups, and with ``STEP`` = 1, from column 0. The third line
# is what we expect for groups, counted by hand. The vertical axis has the
# requests of loads for each row.

# %%

# Scaffold: requests that ncu counts.


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=[4040, 4041, 4042, 4044],
        line_arg="provider",
        line_vals=["triton", "zero", "by hand"],
        line_names=["Groups", "From column 0", "by hand: 512 bytes each"],
        ylabel="load requests per row",
        plot_name="layer-norm-unaligned-requests",
        args={
            "M": 4096,
            "dtype": torch.float16,
            "counter": "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum",
        },
    )
)
def requests(M, N, dtype, counter, provider):
    """Requests of loads that the L1 cache gets; caches are empty before."""
    if provider == "by hand":
        return triton.cdiv(2 * N, 512)
    if ON_GPU:
        x = torch.ones(M, N, dtype=dtype, device=DEVICE)
        sums = torch.empty(M, dtype=dtype, device=DEVICE)
        step = 1
        if provider == "triton":
            step = 8
        for name in "compiles", f"counted {provider} {N} per {M}":
            with torch.cuda.nvtx.range(name):
                _sum_of_row[(M,)](
                    x_ptr=x, sums_ptr=sums, N=N, BLOCK=4096, STEP=step
                )
    return 3 * [float("nan")]  # only ncu knows


# %%

requests.run(show_plots=ON_GPU)

# %%
# **What the figure shows.**
# On the H100, a row that is loaded from column 0 takes 16 requests at 4040
# columns, 32 at 4044, 64 at 4042, and 127 at 4041. In groups, it takes 16 at
# each of the four widths.
# The H200 counts the same.
#
# **Why.**
# These are the numbers of our table. A row of 4044 columns has 8088 bytes, a
# multiple of 8 but not of 16, so a thread takes 8 bytes at a time. At 4042
# columns it takes 4, and at 4041 it takes 2.
#
# **What follows.**
# One column more can mean eight times the requests. In groups, the width
# makes no difference.
#
# What does a request cost?
# -------------------------
#
# Our kernel does hardly anything but load, so let's time it. At all four
# widths DRAM moves nearly the same number of bytes.
# The clock is that of `page 01 <01-layer-norm.html>`_, which explains it.

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

# Scaffold: a benchmark of the sum.


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        # As strings, these widths are evenly spaced in the figure.
        x_vals=["4040", "4044", "4042", "4041"],
        line_arg="provider",
        line_vals=["triton", "zero"],
        line_names=["Groups", "From column 0"],
        ylabel="GB/s",
        plot_name="layer-norm-unaligned-reading",
        args={"M": 4096, "dtype": torch.float16},
    )
)
def bench_reading(M, N, dtype, provider):
    """Device time: a CUDA graph of several calls, each with inputs of its own
    and after L2 was overwritten, less the graph without the calls; median, 20%
    and 80% quantiles."""
    if not ON_GPU:
        return 3 * [float("nan")]  # the interpreter cannot be timed
    N = int(N)
    step = 1
    if provider == "triton":
        step = 8

    def prepare():
        x = torch.ones(M, N, dtype=dtype, device=DEVICE)
        sums = torch.empty(M, dtype=dtype, device=DEVICE)
        return lambda: _sum_of_row[(M,)](
            x_ptr=x, sums_ptr=sums, N=N, BLOCK=4096, STEP=step
        )

    return speed(M * N * dtype.itemsize, prepare)


# %%

bench_reading.run(show_plots=ON_GPU)

# %%
# **What the figure shows.**
# On the H100, the sum in groups reads 2138 to 2160 GB/s at the four widths.
# From column 0 it reads 2139 GB/s with 16 requests a row, 2132 GB/s with 32,
# 2088 GB/s with 64, and 1784 GB/s with 127.
#
# On the H200, the sum in groups reads 2718 to 2744 GB/s, and from column 0 it
# reads 2731 GB/s, 2716 GB/s, 2666 GB/s, and 2119 GB/s.
#
# Here and below, the speeds and times in the text are those of the H100
# wherever we do not speak of the H200.
#
# **Why.**
# At each width a thread adds up 32 numbers, and 16 programs fit on an SM at a
# time. But a thread makes 4 loads of 16 bytes, or 32 loads of 2 bytes.
# For each request of a warp, however little it brings, the L1 cache must find
# out which sectors are asked for, ask L2 for those that it does not have, and
# hand out the numbers to the threads.
#
# How much does a single one cost? Let's take the H100. The sum takes 15.5 µs
# with 16 requests a row, 15.9 µs with 64, and 18.6 µs with 127. An SM has 31
# of the 4096 rows, so the step from 64 to 127 is 63 × 31 = 1953 more requests
# for each SM, and each of them adds 1.4 ns on average.
# On the H200 the three take 12.1 µs, 12.4 µs and 15.6 µs, and each of the last
# requests adds 1.6 ns.
# The step before, from 16 to 64 requests a row, adds far less. While L1 works
# on one request, DRAM delivers what others have asked for, and L1's work is
# hidden as long as DRAM takes longer. We have not found out which part of that
# work takes the time.
#
# **What follows.**
# It is the requests that make an odd width slow, and not the bytes. As long as
# DRAM takes longer than L1, more requests cost little. Beyond that, each one
# counts.
#
# Layer norm in groups
# --------------------
#
# What changes when we also write?
#
# Take row 1 of the picture again, with 13 columns and a shift of 5. Its
# columns are in lanes 5 to 17, and lanes 0 to 23 are three groups:
#
# - Lanes 0 to 7: the last five columns of row 0, then three of ours.
# - Lanes 8 to 15: eight columns of ours, and nothing else.
# - Lanes 16 to 23: two of ours, then six of row 2.
#
# A *load* may take all three groups. We then set to 0 what is not ours.
# A *store* may not. If we wrote all three groups, we would overwrite columns
# of row 0 and of row 2, which other programs have written. So we store the
# second group with one store of 16 bytes, and the five columns at the two ends
# one by one.
#
# In the kernels, ``inside`` says which lanes hold a column of our row, and
# ``whole`` says which lanes are in a group that holds nothing else.


@triton.jit
def _lanes(c, shift, N, CHUNK, STEP):
    """Lanes of a chunk; which hold columns; which groups hold nothing else."""
    lane = c * CHUNK + tl.arange(0, CHUNK)[None, :]
    inside = (lane >= shift) & (lane < N + shift)
    group = lane // STEP * STEP
    whole = (group >= shift) & (group + STEP <= N + shift)
    return lane, inside, whole


@triton.jit
def _only_inside(x, c, shift, N, STEP):
    """A chunk, with 0 in each lane that holds no column of ours."""
    CHUNK: tl.constexpr = x.shape[1]
    # Only the first chunk and the last can have such lanes. The compiler
    # knows c, so all other chunks cost nothing here.
    if (STEP > 1 and c == 0) or (c + 1) * CHUNK > N:
        _, inside, _ = _lanes(c, shift, N, CHUNK, STEP)
        x = tl.where(inside, x, 0)
    return x


# %%
# As on `page 05 <05-chunks.html>`_, a row is a tuple of chunks, and a program
# may hold several rows at a time, which form a tile.
#
# A program loads ``w`` once and keeps it in registers for all its rows, with
# column ``j`` in lane ``j + shift``. That only works if all its rows have the
# same shift.
# Rows that are 8 apart do, at any width, because 8 rows together have a
# multiple of 8 elements. So a tile takes rows ``first``, ``first + 8``,
# ``first + 16`` and so on. ``STEP`` is both the number of lanes in a group and
# the distance of these rows.


@triton.jit
def _load_lanes(ptr, stride, first, M, shift, N, ROWS, CHUNK, STEP):
    """Rows first, first + STEP, ... of a matrix, as a tuple of chunks."""
    # M * stride may pass 2**31, so the first row has an offset of 64 bits.
    ptr += tl.cast(first, tl.int64) * stride // STEP * STEP
    row = tl.arange(0, ROWS)[:, None] * STEP
    xs = ()
    for c in tl.static_range((N + STEP + CHUNK - 2) // CHUNK):
        lane, _, _ = _lanes(c, shift, N, CHUNK, STEP)
        mask = row < M - first
        if (c + 1) * CHUNK > N:
            # The row may end in this chunk, or just before it.
            mask = mask & (lane // STEP * STEP < N + shift)
        x = tl.load(ptr + (row * stride + lane), mask=mask, other=0)
        xs += (_only_inside(x, c, shift, N, STEP),)
    return xs


# %%
# The last group of the last row may pass the end of the matrix by up to 14
# bytes. Memory comes in pages of many KB, and a group lies in a single one, so
# this load never fails, but a tool such as ``memcheck`` may report it.
#
# The store treats the ends of a row as in the example of the three groups.
# Chunks in the middle of a row have only whole groups and need no such mask.


@triton.jit
def _store_shifted(ptr, x, c, first, M, shift, N, STEP):
    """Chunk c of rows first, first + STEP, ..., and nothing beside them."""
    CHUNK: tl.constexpr = x.shape[1]
    lane, inside, whole = _lanes(c, shift, N, CHUNK, STEP)
    row = tl.arange(0, x.shape[0])[:, None] * STEP
    ptr += tl.cast(first, tl.int64) * N // STEP * STEP
    at = ptr + (row * N + lane)
    mask = row < M - first
    if (STEP == 1 or c > 0) and (c + 1) * CHUNK <= N:
        # No end of a row can be in this chunk.
        tl.store(at, x, mask=mask)
    else:
        tl.store(at, x, mask=mask & whole)
        if STEP > 1:
            # The columns at both ends, one by one.
            tl.store(at, x, mask=mask & inside & (whole == 0))


@triton.jit
def _load_vector(ptr, shift, N, ROWS, CHUNK, STEP):
    """w or b, with column j in lane j + shift; an empty tuple for None."""
    ws = ()
    if ptr is not None:
        for c in tl.static_range((N + STEP + CHUNK - 2) // CHUNK):
            lane, inside, _ = _lanes(c, shift, N, CHUNK, STEP)
            # Zeros for each row: the tile has the shape and the layout of x.
            at = ptr + (lane - shift + tl.zeros((ROWS, 1), tl.int32))
            ws += (tl.load(at, mask=inside, other=0),)
    return ws


# %%
# With these functions, the forward pass looks much like the one in chunks.
# What is new is the loop: a program takes several tiles, one after the other.


@triton.jit
def _layer_norm_fwd_shifted(
    x_ptr,  # (M, N); a row is contiguous
    w_ptr,  # (N,); None counts as 1
    b_ptr,  # (N,); None counts as 0
    y_ptr,  # (M, N), contiguous
    mean_ptr,  # (M,): saved for the backward pass
    rstd_ptr,  # (M,): 1 / standard deviation, saved as well
    M,  # rows
    stride: tl.constexpr,  # elements from a row of x to the next
    eps: tl.constexpr,  # added to the variance
    N: tl.constexpr,  # columns
    ROWS: tl.constexpr,  # rows of a tile, each STEP after the one before
    CHUNK: tl.constexpr,  # lanes of a chunk: a power of two
    STEP: tl.constexpr,  # lanes in a group; 1: lanes begin at column 0
    STAGES: tl.constexpr,  # how far ahead rows are requested
):
    acc: tl.constexpr = mean_ptr.dtype.element_ty  # float32; or float64
    i = tl.program_id(0)

    # The number of programs is a multiple of STEP, so all rows of program i
    # have the shift of row i.
    shift = i % STEP * N % STEP
    ws = _load_vector(w_ptr, shift, N, ROWS, CHUNK, STEP)
    bs = _load_vector(b_ptr, shift, N, ROWS, CHUNK, STEP)

    # With ROWS = 2 and STEP = 8, tile 0 has rows 0 and 8, tile 1 has rows 1
    # and 9, and tile 8 has rows 16 and 24.
    tiles = tl.cdiv(M, ROWS * STEP) * STEP
    for tile in tl.range(
        i,
        tiles,
        tl.num_programs(0),
        num_stages=STAGES,
        disable_licm=True,  # w in float32 would take more registers
    ):
        first = tile // STEP * ROWS * STEP + tile % STEP
        row = first + tl.arange(0, ROWS)[:, None] * STEP
        xs = _load_lanes(x_ptr, stride, first, M, shift, N, ROWS, CHUNK, STEP)

        # The mean. Lanes that hold no column are 0.
        total = tl.zeros((ROWS, CHUNK), acc)
        for c in tl.static_range(len(xs)):
            total += xs[c].to(acc)
        mean = tl.sum(total, axis=1)[:, None] / N

        # The variance. Lanes that hold no column would be -mean.
        total = tl.zeros((ROWS, CHUNK), acc)
        for c in tl.static_range(len(xs)):
            d = _only_inside(xs[c].to(acc) - mean, c, shift, N, STEP)
            total += d * d
        rstd = 1 / tl.sqrt(tl.sum(total, axis=1)[:, None] / N + eps)
        tl.store(mean_ptr + row, mean, mask=row < M)
        tl.store(rstd_ptr + row, rstd, mask=row < M)

        # Scale, shift and store.
        for c in tl.static_range(len(xs)):
            y = (xs[c].to(acc) - mean) * rstd
            if w_ptr is not None:
                y = y * ws[c].to(acc)
            if b_ptr is not None:
                y = y + bs[c].to(acc)
            _store_shifted(y_ptr, y, c, first, M, shift, N, STEP)


# %%
# How many warps, and how wide a chunk?
#
# A warp holds some 4 KB of a row, which is 64 columns for each thread in 16
# bits. A chunk is what all warps of a program load at once. If each thread
# takes 16 bytes, a chunk of one warp has 256 columns, and up to 255 lanes of
# the last chunk are idle. So with up to 4 warps we let a thread take 8 bytes:
# this makes twice the requests, and half the idle lanes. With 8 warps a row is
# so wide that idle lanes matter less, and a thread takes 16 bytes.
#
# While the programs of an SM work on their rows, up to 110 KB of further rows
# are `in flight <04-loads-in-flight.html>`_. Where lanes begin at column 0,
# our plan requests nothing ahead.

# %%

# Scaffold: the plan of the forward pass.


def count_sms():
    """SMs of this GPU; a few for the interpreter, which is slow."""
    if not ON_GPU:
        return 4
    return torch.cuda.get_device_properties(DEVICE).multi_processor_count


NUM_SMS = count_sms()


def plan_forward(N, itemsize, step):
    """The shape of a tile, the stages and the warps of a program."""
    row_bytes = N * itemsize
    # A warp holds some 4 KB of a row.
    warps = triton.next_power_of_2(triton.cdiv(row_bytes, 4200))
    # What a warp loads at once: 8 or 16 bytes for each of its threads.
    piece = 512
    if step > 1 and warps < 8:
        piece = 256
    # A row that fits into one chunk takes one, and several rows make a tile.
    lanes = triton.next_power_of_2(N + step - 1)
    chunk = min(piece // itemsize * warps, lanes)
    rows = max(1024 // itemsize // lanes, 1)

    # Rows that are requested ahead: up to 110 KB on an SM, which has 8 warps.
    stages = 1
    if step > 1:
        most = 90_000
        if warps < 4:
            most = 100_000
        stages += min(3, most // (row_bytes * 8 // warps))
    return {
        "CHUNK": chunk,
        "ROWS": rows,
        "STAGES": stages,
        "STEP": step,
        "num_warps": warps,
    }


def programs_for(M, N, itemsize, plan):
    """How many programs: a multiple of STEP, so that each keeps its shift."""
    step = plan["STEP"]
    tiles = triton.cdiv(M, plan["ROWS"] * step)  # of each shift
    if plan["STAGES"] == 1:
        return step * tiles  # one tile each
    warps_of_an_sm = 8
    if N * itemsize <= 3072:
        warps_of_an_sm = 12
    at_a_time = NUM_SMS * warps_of_an_sm // plan["num_warps"]
    return step * min(max(at_a_time // step, 1), tiles)


# %%
# When can the lanes begin early? A row of ``x`` and the same row of ``y`` must
# have the same shift, so that a group of one is a group of the other. ``y`` is
# ours and begins at a multiple of 16 bytes. A view such as ``x[:, 3:]`` may
# begin elsewhere. Then the lanes begin at column 0, which is right, but
# slower.


def lane_step(N, *matrices):
    """Lanes in a group of 16 bytes; 1 where lanes begin at column 0."""
    step = 16 // matrices[0].itemsize
    if N % step == 0:
        return 1  # every row begins with a group
    for matrix in matrices:
        if matrix.data_ptr() % 16 > 0:
            return 1  # row 0 has a shift
        if (matrix.stride(0) - N) % step > 0:
            return 1  # its rows have other shifts than those of y
    return step


def forward(x, w, b, eps, step, plan=None):
    """y, mean and rstd for an (M, N) x, whose rows may be far apart."""
    M, N = x.shape
    y = torch.empty(M, N, dtype=x.dtype, device=x.device)
    # 16-bit rows are summed in float32.
    acc_dtype = torch.promote_types(x.dtype, torch.float32)
    mean = torch.empty(M, dtype=acc_dtype, device=x.device)
    rstd = torch.empty_like(mean)
    if plan is None:
        plan = plan_forward(N, x.itemsize, step)
    programs = programs_for(M, N, x.itemsize, plan)
    _layer_norm_fwd_shifted[(programs,)](
        x_ptr=x,
        w_ptr=w,
        b_ptr=b,
        y_ptr=y,
        mean_ptr=mean,
        rstd_ptr=rstd,
        M=M,
        stride=x.stride(0),
        eps=eps,
        N=N,
        **plan,
    )
    return y, mean, rstd


# %%
# How fast is the forward pass?
# -----------------------------
#
# "Triton" is our kernel in groups, as a user gets it.
# "From column 0" is the same kernel with ``STEP`` = 1. We measure it with the
# plan above and with twice the warps, and if the number of columns is even, we
# also measure both with rows requested ahead. The fastest of these counts.
# (At an odd width no row can be requested ahead from column 0: asynchronous
# copies move at least 4 bytes, and a row may begin 2 bytes after a multiple of
# 4.)
#
# The other lines are PyTorch's layer norm, the same function through
# ``torch.compile``, and the copy.

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

# Scaffold: the speed of either pass.

WIDTHS = [1151, 4096, 4097, 4098, 4100, 10231]


def pytorch(x, shape, w, b):
    return F.layer_norm(x, shape, w, b)


def speed_of(function, M, N, dtype, mode):
    """GB/s of a forward or a backward pass: median, low, high."""

    def prepare():
        x, w, b, dy = inputs(M, N, dtype)
        if mode == "forward":
            return lambda: function(x, (N,), w, b)
        y = function(x, (N,), w, b)
        return lambda: torch.autograd.grad(y, (x, w, b), dy, retain_graph=True)

    matrices = 2  # read x, write y
    if mode == "backward":
        matrices = 3  # read x and dy, write dx
    return speed(matrices * M * N * dtype.itemsize, prepare)


@functools.cache
def compiled_speeds(M, N, dtype):
    """The speeds of torch.compile in both passes.

    To compile takes longer than to measure, so each of the three compilations
    is measured in both passes, and the best of each pass counts.
    """
    speeds = {"forward": [], "backward": []}

    def measure(function):
        for mode in speeds:
            speeds[mode].append(speed_of(function, M, N, dtype, mode))
        return speeds["forward"][-1]

    best_of_three_compilations(pytorch, measure)
    return {mode: max(speeds[mode]) for mode in speeds}


# %%

# Scaffold: lanes from column 0, at their best.


def plans_from_column_0(N, itemsize):
    """What is tried: two numbers of warps, and rows requested ahead."""
    plan = plan_forward(N, itemsize, step=1)
    plans = []
    for more in (1, 2):
        wider = plan | {
            "num_warps": more * plan["num_warps"],
            "CHUNK": min(more * plan["CHUNK"], triton.next_power_of_2(N)),
        }
        plans.append(wider)
        # What is requested ahead moves by 4 bytes at least.
        if N * itemsize % 4 == 0:
            plans.append(wider | {"STAGES": 3})
    return plans


def from_column_0(plan):
    def function(x, shape, w, b):
        return forward(x, w, b, eps=1e-5, step=1, plan=plan)

    return function


def in_groups(x, shape, w, b):
    return forward(x, w, b, eps=1e-5, step=lane_step(x.shape[1], x))


# %%

# Scaffold: the forward pass in groups, a benchmark.


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=WIDTHS,
        line_arg="provider",
        line_vals=["triton", "unshifted", "torch", "torch.compile", "copy"],
        line_names=[
            "Triton",
            "From column 0",
            "PyTorch",
            "torch.compile",
            "Copy",
        ],
        ylabel="GB/s",
        plot_name="layer-norm-unaligned-forward",
        args={"M": 4096, "dtype": torch.float16, "mode": "forward"},
    )
)
def bench_forward(M, N, dtype, mode, provider):
    """Device time: a CUDA graph of several calls, each with inputs of its own
    and after L2 was overwritten, less the graph without the calls; median, 20%
    and 80% quantiles. Copy: the best of six tiles."""
    if not ON_GPU:
        return 3 * [float("nan")]
    if provider == "copy":
        return ceiling(reads=1, writes=1, shape=(M, N), dtype=dtype)
    if provider == "torch":
        return speed_of(pytorch, M, N, dtype, mode)
    if provider == "torch.compile":
        return compiled_speeds(M, N, dtype)[mode]
    if provider == "triton":
        return speed_of(in_groups, M, N, dtype, mode)
    speeds = []
    for plan in plans_from_column_0(N, dtype.itemsize):
        speeds.append(speed_of(from_column_0(plan), M, N, dtype, mode))
    return max(speeds)


# %%

report(bench_forward)

# %%
# **What the figure shows.**
# In groups, one more column costs little. On the H100 our kernel reaches 89%
# of a copy at 4096 columns, 88% at 4097, and 81% to 88% at the five widths
# that are no multiple of 8. The lowest is that at 10231 columns; we have not
# found out why.
#
# From column 0, narrower loads cost more. The kernel reaches 89% of a copy at
# 4100 columns, where a thread takes 8 bytes, 81% at 4098, where it takes 4,
# and 60% at 4097, where it takes 2.
# So at 4100 columns groups gain nothing: they reach 88% there. At the four
# other widths they are 1.1 to 1.9 times as fast.
#
# PyTorch falls from 69% at 4096 columns to 25% at 4097, and torch.compile from
# 83% to 39%.
# At the five widths our kernel is 1.3 to 4.6 times as fast as PyTorch, and 1.3
# to 2.4 times as fast as torch.compile.
#
# On the H200 our kernel reaches 74% of a copy at 4096 columns, 84% at 4097,
# and 75% to 84% at the five widths that are no multiple of 8. There, one
# more column even helps, because our plan for 4096 columns is not the best one
# on this card. It requests nothing ahead, and the best of the four plans from
# column 0, with other warps or with rows requested ahead, reaches 88%. From
# column 0, the kernel reaches 82% at 4100 columns, 70% at 4098, and 45% at
# 4097. At 4100 columns groups reach 83%, and at the four other widths they are
# 1.2 to 2.6 times as fast. At the five widths ours is 1.5 to 5.3 times as fast
# as PyTorch, and 1.7 to 2.9 times as fast as torch.compile.
#
# **Why.**
# As many bytes are in flight with narrow loads as with wide ones: with the
# plan above, four programs fit on an SM at 4096, 4100, 4098 and 4097 columns
# alike, and each of them requests a whole row before it can add it up.
# The difference is the number of requests. At 4097 columns, from column 0,
# ``x``, ``w``, ``b`` and ``y`` take 129 requests each, so a program has 516
# requests for its row. In groups, our plan lets a thread take 8 bytes, half a
# group, and a program has 33 requests for ``x``, 33 for ``y`` and a few for
# the ends of the row. ``w`` and ``b`` are in registers already.
# At 4100 columns a thread takes 8 bytes in either case, so groups make the
# loads of ``x`` no wider there.
#
# `PyTorch's kernel <https://github.com/pytorch/pytorch/blob/v2.11.0/aten/src/ATen/native/cuda/layer_norm_kernel.cu>`_
# loads four numbers at a time, but only if the number of columns is a multiple
# of four. Otherwise another kernel runs, which loads them one by one. This is
# why PyTorch is fast at 4100 columns, and as slow at 4098 as at 4097.
#
# At 4096 columns our two lines run the same kernel, but "From column 0" takes
# the best of four plans. `Chunks instead of padding <05-chunks.html>`_ has a
# better plan for such widths than we have here.
#
# **What follows.**
# Groups pay where a thread could otherwise take only 2 or 4 bytes.
#
# Backward: each column keeps its lane
# ------------------------------------
#
# What is new in the backward pass?
#
# Loads and stores are those of the forward pass. But a program also adds up
# ``dw`` and ``db`` over its rows, in registers.
# If the shifts of two rows differed, column ``j`` would be in another lane,
# and often in another thread, for each row. So it helps once more that a
# program takes rows 8 apart: each column keeps its lane from the first row to
# the last.
#
# The formulas are those of `page 01 <01-layer-norm.html>`_, and the functions
# for ``dx`` and the terms of ``dw`` and ``db`` are those of `page 05
# <05-chunks.html>`_.

# %%

# Scaffold: the formulas for chunks, as on page 05.


@triton.jit
def _add_two(a1, a2, b1, b2):
    return a1 + b1, a2 + b2


@triton.jit
def _means_of_chunks(xs, dys, ws, mean, rstd, N: tl.constexpr):
    """c1 * rstd**2 and c2 * rstd for each row of a tile."""
    sum1 = tl.zeros(xs[0].shape, mean.dtype)
    sum2 = tl.zeros(xs[0].shape, mean.dtype)
    for c in tl.static_range(len(xs)):
        wdy = dys[c].to(mean.dtype)
        if len(ws) > 0:
            wdy = wdy * ws[c].to(mean.dtype)
        sum1 += wdy * (xs[c].to(mean.dtype) - mean)
        sum2 += wdy
    # Both sums over a row at once, so that its warps meet only once.
    sum1, sum2 = tl.reduce((sum1, sum2), 1, _add_two)
    # From the left: rstd**3 alone may be too large for float32.
    c1 = sum1[:, None] * rstd * rstd * rstd / N
    c2 = sum2[:, None] * rstd / N
    return c1, c2


@triton.jit
def _gradients(x, dy, w, mean, rstd, c1, c2):
    """dx of a chunk, and its terms of dw and db; w may be None."""
    d = x.to(mean.dtype) - mean
    dy = dy.to(mean.dtype)
    scaled = dy * rstd
    wdy = scaled
    if w is not None:
        wdy = scaled * w.to(mean.dtype)
    return wdy - (d * c1 + c2), scaled * d, dy


# %%
# When the sums are stored, column ``j`` is in lane ``j + shift`` and belongs
# at place ``j``. So the pointer goes back by the shift.


@triton.jit
def _store_sums_shifted(ptr, dws, dbs, shift, N, STEP):
    """The sums of a program: dw first, then db."""
    ptr += tl.program_id(0) * 2 * N - shift
    for c in tl.static_range(len(dws)):
        lane, inside, _ = _lanes(c, shift, N, dws[0].shape[1], STEP)
        tl.store(ptr + lane, tl.sum(dws[c], axis=0)[None, :], mask=inside)
        tl.store(ptr + N + lane, tl.sum(dbs[c], axis=0)[None, :], mask=inside)


@triton.jit
def _layer_norm_bwd_shifted(
    dy_ptr,  # (M, N), contiguous
    x_ptr,  # (M, N); a row is contiguous
    w_ptr,  # (N,); None counts as 1
    mean_ptr,  # (M,), from the forward pass
    rstd_ptr,  # (M,), from the forward pass
    dx_ptr,  # (M, N), or None if dx is not wanted
    sums_ptr,  # (programs, 2, N), or None if neither dw nor db is wanted
    M,  # rows
    stride: tl.constexpr,  # elements from a row of x to the next
    N: tl.constexpr,  # columns
    ROWS: tl.constexpr,  # rows of a tile, each STEP after the one before
    CHUNK: tl.constexpr,  # lanes of a chunk: a power of two
    STAGES: tl.constexpr,  # how far ahead rows are requested
    STEP: tl.constexpr,  # lanes in a group; 1: lanes begin at column 0
    EARLY: tl.constexpr,  # whether the second kernel may start early
):
    zeros = tl.zeros((ROWS, CHUNK), mean_ptr.dtype.element_ty)
    i = tl.program_id(0)

    # All rows of this program have the same shift, so w stays where it is,
    # and so do the sums.
    shift = i % STEP * N % STEP
    ws = _load_vector(w_ptr, shift, N, ROWS, CHUNK, STEP)
    dws = ()
    dbs = ()
    for _ in tl.static_range((N + STEP + CHUNK - 2) // CHUNK):
        dws += (zeros,)
        dbs += (zeros,)

    tiles = tl.cdiv(M, ROWS * STEP) * STEP
    for tile in tl.range(
        i,
        tiles,
        tl.num_programs(0),
        num_stages=STAGES,
        disable_licm=True,  # w in float32 would take more registers
    ):
        # Load the rows of a tile. Rows that do not exist are 0.
        first = tile // STEP * ROWS * STEP + tile % STEP
        row = first + tl.arange(0, ROWS)[:, None] * STEP
        mean = tl.load(mean_ptr + row, mask=row < M, other=0)
        rstd = tl.load(rstd_ptr + row, mask=row < M, other=0)
        xs = _load_lanes(x_ptr, stride, first, M, shift, N, ROWS, CHUNK, STEP)
        dys = _load_lanes(dy_ptr, N, first, M, shift, N, ROWS, CHUNK, STEP)

        # The two means of a row, then dx and the terms of dw and db.
        c1, c2 = _means_of_chunks(xs, dys, ws, mean, rstd, N)
        new_dws = ()
        new_dbs = ()
        for c in tl.static_range(len(xs)):
            w = None
            if w_ptr is not None:
                w = ws[c]
            dx, dw, db = _gradients(xs[c], dys[c], w, mean, rstd, c1, c2)
            # A lane without a column has dy = 0 and adds 0 to both sums.
            new_dws += (dws[c] + dw,)
            new_dbs += (dbs[c] + db,)
            if dx_ptr is not None:
                _store_shifted(dx_ptr, dx, c, first, M, shift, N, STEP)
        dws = new_dws
        dbs = new_dbs

    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    if sums_ptr is not None:
        _store_sums_shifted(sums_ptr, dws, dbs, shift, N, STEP)


# %%
# The second kernel, which adds up the sums of all programs, and its early
# start are those of `page 05 <05-chunks.html>`_.

# %%

# Scaffold: the second kernel, as on page 05.

EARLY = (
    ON_GPU
    and torch.version.hip is None
    and torch.cuda.get_device_capability() >= (9, 0)
)


@triton.jit
def _add_up_chunks(
    sums_ptr,  # (programs, WIDTH)
    grads_ptr,  # (WIDTH,): dw, then db
    programs,  # how many rows of sums there are
    WIDTH: tl.constexpr,  # 2 * N
    ROWS: tl.constexpr,  # a power of two, at least programs
    COLS: tl.constexpr,  # columns per program
    EARLY: tl.constexpr,  # whether this kernel has been started early
):
    if EARLY:
        tl.extra.cuda.gdc_wait()  # until all sums are stored
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    rows = tl.arange(0, ROWS)[:, None]
    mask = (rows < programs) & (cols < WIDTH)
    sums = tl.load(sums_ptr + rows * WIDTH + cols, mask=mask, other=0)
    tl.store(grads_ptr + cols, tl.sum(sums, axis=0), mask=cols < WIDTH)


# %%
# The plan has the same form as that of the forward pass. A program now holds
# ``x``, ``dy`` and two sums, so each warp gets a smaller part of a row. A row
# of ``x`` and one of ``dy`` are requested together.

# %%

# Scaffold: the plan of the backward pass, and its launches.


def plan_backward(N, itemsize, step):
    """The shape of a tile, the stages and the warps of a program."""
    row_bytes = N * itemsize
    warps = 4
    if row_bytes > 10_200:
        warps = 8
    # What a warp loads at once: 8 or 16 bytes for each of its threads.
    piece = 512
    if step > 1 and row_bytes <= 9216:
        piece = 256
    lanes = triton.next_power_of_2(N + step - 1)
    chunk = min(piece // itemsize * warps, lanes)
    rows = max(1024 // itemsize // chunk, 1)
    # Rows of x and of dy that are requested ahead, by the 8 warps of an SM.
    stages = 1 + min(3, 90_000 // (2 * row_bytes * 8 // warps))
    return {
        "CHUNK": chunk,
        "ROWS": rows,
        "STAGES": stages,
        "STEP": step,
        "num_warps": warps,
    }


def add_up(sums, grads):
    """Store dw and db in a (2, N) tensor, from (programs, 2, N) sums."""
    programs, _, N = sums.shape
    options = {}
    if EARLY:
        options["launch_pdl"] = True
    columns_per_program = 16
    _add_up_chunks[(triton.cdiv(2 * N, columns_per_program),)](
        sums_ptr=sums,
        grads_ptr=grads,
        programs=programs,
        WIDTH=2 * N,
        ROWS=triton.next_power_of_2(max(programs, 1)),
        COLS=columns_per_program,
        EARLY=EARLY,
        **options,
    )


def backward(dy, x, w, mean, rstd, dx, grads, step):
    """Store dx, and dw and db in grads; either may be None: not wanted."""
    M, N = x.shape
    plan = plan_backward(N, x.itemsize, step)
    programs = programs_for(M, N, x.itemsize, plan)
    sums = None
    if grads is not None:
        shape = (programs, 2, N)
        sums = torch.empty(shape, dtype=mean.dtype, device=x.device)
    _layer_norm_bwd_shifted[(programs,)](
        dy_ptr=dy,
        x_ptr=x,
        w_ptr=w,
        mean_ptr=mean,
        rstd_ptr=rstd,
        dx_ptr=dx,
        sums_ptr=sums,
        M=M,
        stride=x.stride(0),
        N=N,
        EARLY=EARLY,
        **plan,
    )
    if grads is not None:
        add_up(sums, grads)


# %%
# A function to train with
# ------------------------
#
# The autograd function takes ``x`` as it lies in memory, if each row is
# contiguous. ``lane_step`` decides for each pass where the lanes begin.

# %%

# Scaffold: layouts and types of a call.


def contiguous_or_none(tensor):
    """The tensor with its elements side by side; copied only if needed."""
    if tensor is None:
        return None
    return tensor.contiguous()


def with_contiguous_rows(x):
    """x, copied only if a row has gaps, or the next is far away."""
    # A tile has fewer than 2**11 rows; offsets within it must fit into 32
    # bits.
    if x.stride(1) == 1 and x.stride(0) < 2**20:
        return x
    return x.contiguous()


def dtype_of_gradients(w, b, acc_dtype):
    """The type of w and b, if they agree; acc_dtype, if they do not.

    Autograd then rounds each gradient to the type of its parameter.
    """
    dtypes = {tensor.dtype for tensor in (w, b) if tensor is not None}
    if len(dtypes) == 1:
        return dtypes.pop()
    return acc_dtype


# %%


class LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, b, eps):
        x = with_contiguous_rows(x)
        w = contiguous_or_none(w)
        b = contiguous_or_none(b)
        step = lane_step(x.shape[1], x)
        y, mean, rstd = forward(x, w, b, eps, step)
        ctx.save_for_backward(x, w, mean, rstd)
        ctx.grads_dtype = dtype_of_gradients(w, b, mean.dtype)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable  # no second derivatives
    def backward(ctx, dy):
        x, w, mean, rstd = ctx.saved_tensors
        wants_dx, wants_dw, wants_db, _ = ctx.needs_input_grad
        N = x.shape[1]
        dy = dy.contiguous()

        dx = None
        if wants_dx:
            dx = torch.empty_like(dy)
        grads = None
        if wants_dw or wants_db:
            grads = x.new_empty(2, N, dtype=ctx.grads_dtype)
        step = lane_step(N, x, dy)
        backward(dy, x, w, mean, rstd, dx, grads, step)

        dw = None
        if wants_dw:
            dw = grads[0]
        db = None
        if wants_db:
            db = grads[1]
        # One gradient for each argument of forward; eps has none.
        return dx, dw, db, None


# %%
# The function that a user calls checks its arguments first. A row must fit
# into the registers of a program: 32 KB, or 20 KB if the backward pass needs
# room for two sums beside it.

# %%

# Scaffold: which arguments are taken.


def check_arguments(x, shape, weight, bias, eps):
    """Raise an error that names the wrong argument, and says why."""
    tensors = {"x": x, "weight": weight, "bias": bias}
    tensors = {name: t for name, t in tensors.items() if t is not None}

    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or tensor.itemsize == 1:
            raise TypeError(
                f"{name} is {tensor.dtype}: it must have floats of 16 bits or "
                "more"
            )
        if tensor.device != x.device or tensor.device.type != DEVICE.type:
            raise ValueError(
                f"{name} is on {tensor.device}: x, weight and bias must all "
                f"be on {DEVICE}"
            )
    # Triton starts a kernel on the current GPU, wherever its tensors are.
    if x.is_cuda and x.device.index != torch.cuda.current_device():
        raise ValueError(f"x is on {x.device}: not the current one")

    if shape.numel() == 0 or len(shape) == 0:
        raise ValueError(f"normalized_shape is {tuple(shape)}: it is empty")
    for name, tensor in tensors.items():
        last_dimensions = tensor.shape
        if name == "x":
            last_dimensions = tensor.shape[-len(shape) :]
        if last_dimensions != shape:
            raise ValueError(
                f"the shape of {name} is {tuple(tensor.shape)}, and "
                f"normalized_shape is {tuple(shape)}"
            )
    if not eps >= 0:  # negative, or NaN
        raise ValueError(f"eps is {eps}: it must be 0 or more")

    most = 32768 // x.itemsize
    trains = any(tensor.requires_grad for tensor in tensors.values())
    if trains and torch.is_grad_enabled():
        most = 20464 // x.itemsize  # two sums beside the row
    if shape.numel() > most:
        raise ValueError(
            f"normalized_shape has {shape.numel()} columns: at most {most} "
            "are possible here (the page Every width has no limit)"
        )


# %%


def layer_norm(x, normalized_shape, weight=None, bias=None, eps=1e-5):
    """Normalize x over its last dimensions; both passes run in Triton.

    x has floats of 16 bits or more, and any dimensions and strides.
    normalized_shape, a number or a shape, gives the last dimensions of x.
    weight and bias have that shape, or are None.
    """
    if isinstance(normalized_shape, int):
        normalized_shape = [normalized_shape]
    shape = torch.Size(normalized_shape)
    check_arguments(x, shape, weight, bias, eps)

    # The kernels only know matrices, so all other dimensions become rows.
    N = shape.numel()
    if weight is not None:
        weight = weight.reshape(N)
    if bias is not None:
        bias = bias.reshape(N)
    y = LayerNorm.apply(x.reshape(-1, N), weight, bias, eps)
    return y.reshape(x.shape)


# %%
# Is it right?
# ------------
#
# With an odd number of columns, all shifts from 0 to 7 occur. As on `page 01
# <01-layer-norm.html>`_, we compare each element with that of PyTorch in
# float64. An element of a neighboring row that was overwritten would show.

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

shape = (9, 61)  # small, because the interpreter is slow
if ON_GPU:
    shape = (1151, 4097)
for dtype in (torch.float16, torch.float32):
    check(layer_norm, *shape, dtype)

# %%
# How fast is the backward pass?
# ------------------------------
#
# The backward pass reads ``x`` and ``dy`` and writes ``dx``. So its copy reads
# two matrices and writes one.

# %%

# Scaffold: the backward pass in groups, a benchmark.


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=WIDTHS,
        line_arg="provider",
        line_vals=["triton", "torch", "torch.compile", "copy"],
        line_names=["Triton", "PyTorch", "torch.compile", "Copy"],
        ylabel="GB/s",
        plot_name="layer-norm-unaligned-backward",
        args={"M": 4096, "dtype": torch.float16, "mode": "backward"},
    )
)
def bench_backward(M, N, dtype, mode, provider):
    """Device time: a CUDA graph of several calls, each with inputs of its own
    and after L2 was overwritten, less the graph without the calls; median, 20%
    and 80% quantiles. Copy: the best of six tiles."""
    if not ON_GPU:
        return 3 * [float("nan")]
    if provider == "copy":
        return ceiling(reads=2, writes=1, shape=(M, N), dtype=dtype)
    if provider == "torch":
        return speed_of(pytorch, M, N, dtype, mode)
    if provider == "torch.compile":
        return compiled_speeds(M, N, dtype)[mode]
    return speed_of(layer_norm, M, N, dtype, mode)


# %%

report(bench_backward)

# %%
# **What the figure shows.**
# On the H100 our backward pass reaches 85% of the copy at 4096 columns, 82% at
# 4097, and 69% to 82% at the five widths that are no multiple of 8.
# At these five widths it is 2.0 to 2.5 times as fast as PyTorch, and 2.2 to
# 3.7 times as fast as torch.compile.
#
# On the H200 our backward pass reaches 81% of the copy at 4096 columns, 77% at
# 4097, and 59% to 77% at the five widths. There it is 2.0 to 2.9 times as fast
# as PyTorch, and 2.6 to 3.9 times as fast as torch.compile.
#
# **Why.**
# ``x`` and ``dy`` are requested ahead at every width, and never by less than 8
# bytes for each thread. An odd width adds little: at 4097 columns a thread
# takes 8 bytes at a time and not 16, and at most 7 columns at each end of a
# row of ``dx`` are stored one by one. We have not measured what each of these
# costs.
#
# We are farthest from the copy at 1151 columns, with 69%. There the whole pass
# takes only 16.2 µs, and we have measured no multiple of 8 beside it. So we
# don't know how much of this distance comes from the odd width.
# On the H200 we reach 59% at 1151 columns, where the pass takes 14.7 µs.
#
# PyTorch is faster at 4096 and 4100 columns than at 4097 and 4098 here, too:
# its kernel for ``dx`` also has a form for multiples of four.
#
# **What follows.**
# A model may have 4097 columns if it needs them, and both passes keep nearly
# all of the speed that they have at 4096.
#
# Where PyTorch or a library is better
# ------------------------------------
#
# When should you not use this function?
#
# - **If you may choose the width, choose a multiple of 8.** Then no kernel
#   needs groups, and PyTorch is faster as well. A vocabulary of 50257 words
#   is often padded to 50304, which is 64 × 786.
# - **At multiples of 8, use** `Chunks instead of padding <05-chunks.html>`_,
#   which has better plans for them.
# - **Some views keep narrow loads.** If the rows of ``x`` have other shifts
#   than those of ``y``, as in ``x[:, 3:]``, our lanes begin at column 0.
# - **PyTorch has no limit.** Our rows hold at most 32 KB, and 20 KB with
#   gradients, and there are no second derivatives. `Every width
#   <11-every-width.html>`_ takes all widths.
# - **torch.compile can fuse** a layer norm with what comes before and after.
# - **Libraries have kernels of their own.** `Every width
#   <11-every-width.html>`_ measures them, also at odd widths.
#
# Exercise 1: how far apart?
# --------------------------
#
# Rows 8 apart have the same shift at every width. At some widths nearer rows
# have it, too: at 20 columns, row 2 begins at element 40, which is a multiple
# of 8.
#
# How far apart are the nearest rows with the same shift? Write it as a formula
# of ``N``; the stub below always answers 8. Change it in the script or the
# notebook, and run that until it prints the same line twice: the second one is
# that of our solution.
#
# **Hint 1.** Row ``d`` has the shift of row 0 if ``d * N`` is a multiple of 8.
# Which ``d`` is the smallest, for N = 13, 14, 20 and 24?
#
# **Hint 2.** 8 is 2 × 2 × 2. Some of these factors of 2 may be in ``N``. The
# others must be in ``d``.
#
# **Hint 3.** The largest power of two that divides ``N`` is ``N & -N``.


def distance(N):
    return 8  # to do


def exercise_1(distance):
    """Print the distances, and say whether they are right."""
    found = {N: distance(N) for N in (13, 14, 20, 24)}
    print("rows with one shift are so far apart:", found)
    return found == {13: 8, 14: 4, 20: 2, 24: 1}


exercise_1(distance)

# %%

# Solution 1


def distance_1(N):
    # N has some factors of 2, and d must have the rest of the three in 8. If
    # N has three or more, every row will do.
    power_of_two = N & -N
    return max(8 // power_of_two, 1)


assert exercise_1(distance_1)

# %%
# What we learned
# ---------------
#
# These are the designs that we compared, at 4097 columns:
#
# - **From column 0**, a load takes 2 bytes for each thread. The forward pass
#   makes 516 requests for a row. On the H100 it reaches 60% of a copy,
#   because the L1 cache has work with each request.
# - **In groups**, a load takes 8 bytes for each thread, and ``w`` and ``b``
#   are loaded once. A row takes 66 requests, and a few for its ends. The
#   forward pass reaches 88% of a copy, and the backward pass 82%.
# - **PyTorch** loads one number at a time, as 4097 is no multiple of four. It
#   reaches 25% of a copy forward and 36% backward.
# - **torch.compile** reaches 39% and 28%. We have not looked at its kernels.
#
# And for kernels in general:
#
# - A thread can load 16 bytes at once only from a multiple of 16 bytes, and
#   the compiler must *know* that it is one. Multiply by a constant to tell it.
# - Reading a little too much is harmless, if you set it to 0. Writing too much
#   is not.
# - When a kernel is slow, count its requests as well as its bytes.
# - Choose the rows of a program so that what it keeps for all of them can stay
#   in the same registers.
#
# **Next:** what if a row does not fit into registers at all? `Two sweeps, and
# a variance that stays right <07-two-sweeps.html>`_ reads it twice.
