r"""
Loads in flight
===============

Why is a backward pass slow that takes one row at a time?
Memory answers late, so a kernel must request many bytes before the first of
them arrive: with more programs, or by requesting rows ahead of time.

The backward pass of `Layer normalization, both passes <01-layer-norm.html>`_
is further behind a copy than its forward pass, because its programs wait for
rows.
On this page we find out how many bytes a GPU must have requested at any
moment. Then we turn three knobs, one at a time, and look at what each of them
brings and what it costs.

**What you will learn**

- How Little's law tells you how many bytes must be in flight.
- How to measure, with a kernel of five lines, how many of them each
  multiprocessor of a GPU needs.
- What more programs, more warps and more stages do to the bytes in flight.
- How ``num_stages`` makes the compiler request rows ahead of time, which is
  called *pipelining*.
- Why a kernel with a lower occupancy can be the faster one.

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

# Scaffold: one more import.

import functools

# %%
# How many bytes must be in flight?
# ---------------------------------
#
# When a thread loads a number, the number does not come at once.
# The time from the request to the answer is the *latency* of the memory.
# On an H100, a load takes 26 ns if the number is in the small cache inside the
# SM, 153 ns if it is in L2, and 362 ns if it comes from DRAM.
# (We measured this with a chain of loads, each of which says where the next
# one has to read.)
# In 362 ns the clock of an H100 ticks some 700 times, and that is a long time
# to do nothing.
#
# The *bandwidth* of a memory is how many bytes it delivers in a second.
# From the DRAM of the same H100 we could read 3.0 TB/s.
#
# Think of the memory as a pipe. It is as long as the latency: what goes in at
# one end comes out at the other 362 ns later.
# And it is as wide as the bandwidth: in each nanosecond, 3000 bytes can come
# out.
# Bytes that have been requested and have not arrived yet are *in flight*.
# They are what is in the pipe, and a full pipe holds
#
# **bytes in flight = bandwidth × latency**
#
# This is *Little's law*. For our H100 it says:
#
# - 3.0 TB/s × 362 ns = 1.1 MB. So much must be in flight on the whole GPU.
# - The GPU has 132 streaming multiprocessors (SMs), so each of them must have
#   8 KB in flight, and not just now and then, but all the time.
#
# The law also says what happens otherwise. If an SM has only 4 KB in flight,
# its pipe is half full, and it can get at most half of its share of the
# bandwidth, however fast it computes.

# %%

# Drawing: the pipe of an SM with 1 KB, 4 KB and 8 KB in flight.

plt.figure(
    "A pipe from DRAM to an SM, as long as the latency, 362 ns; it holds 8 "
    "KB, so with 1 KB in flight it delivers an eighth of the bandwidth, with "
    "4 KB a half, and with 8 KB all of it",
    figsize=(7.5, 3.4),
)
length = 8  # KB, when the pipe is full
parts = ((1, "an eighth"), (4, "a half"), (8, "all"))
for row, (in_flight, share) in enumerate(parts):
    height = -1.5 * row
    for border in (height - 0.4, height + 0.4):
        plt.plot((0, length), (border, border), color="gray", lw=2)
    spacing = length / in_flight  # the answers come in regular intervals
    for i in range(in_flight):
        middle = (i + 0.5) * spacing
        plt.barh(height, 0.84, left=middle - 0.42, height=0.6, color="C0")
        plt.text(
            middle, height, "1 KB", color="white", ha="center", va="center"
        )
    plt.text(-0.2, height, "DRAM", ha="right", va="center")
    plt.text(length + 0.9, height, "SM", ha="left", va="center")
    plt.annotate(
        "",
        xy=(length + 0.8, height),
        xytext=(length + 0.1, height),
        arrowprops={"arrowstyle": "->"},
    )
    plt.text(length + 1.7, height, f"{share} of\nthe bandwidth", va="center")
plt.annotate(
    "", xy=(length, 0.75), xytext=(0, 0.75), arrowprops={"arrowstyle": "<->"}
)
plt.text(length / 2, 0.85, "latency: 362 ns", ha="center", va="bottom")
plt.axis((-1.4, 12, -3.6, 1.4))
plt.axis("off")
plt.show()

# %%
# How many does an SM really need?
# --------------------------------
#
# The law needs the latency, and 362 ns is that of a memory that has nothing
# else to do. A busy memory may take longer.
# So let's not only compute but measure, with a kernel that has exactly as many
# bytes in flight as we ask for.
#
# A program of this kernel has a tile of ``LANES`` elements, and we call each
# of them a *lane*.
# A lane reads one number of 4 bytes, adds what it has read to its position,
# moves on, and reads again.
# All the numbers are 0, so the addition changes nothing. But the compiler
# cannot know that. A lane knows where to read next only once it has the number
# before, so it can never have more than one load in flight.


@triton.jit
def _read(
    x_ptr,  # steps times as many numbers as there are lanes, all 0
    end_ptr,  # a number for each lane: where it is in the end
    steps,  # how many numbers a lane reads
    LANES: tl.constexpr,  # lanes of a program
):
    # At first, the programs read the first numbers of x side by side.
    lanes = tl.program_id(0) * LANES + tl.arange(0, LANES)
    position = lanes
    for _ in range(steps):
        # All programs together move on by as many numbers as they have lanes.
        # The load is part of the sum, so the next one has to wait for it.
        position += tl.num_programs(0) * LANES + tl.load(x_ptr + position)
    # Something must depend on the loads, or the compiler would drop them.
    tl.store(end_ptr + lanes, position)


# %%
# Let's try it with two programs of four lanes. Together they read eight
# numbers in every step.
# Lane 0 reads the numbers 0, 8, 16, 24 and 32. After five steps it has come to
# number 40, and the other seven are right behind it:

zeros = torch.zeros(40, dtype=torch.int32, device=DEVICE)
end = torch.empty_like(zeros[:8])
_read[(2,)](x_ptr=zeros, end_ptr=end, steps=5, LANES=4)
print("5 steps of 2 × 4 lanes, and at", end.tolist())

# %%
# The clock is that of `Layer normalization, both passes
# <01-layer-norm.html>`_, which explains it.

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
# We start as many programs as there are SMs, and the GPU gives each SM one of
# them. Together they read 256 MB.
# Each thread has eight lanes, and requests the numbers of all eight before it
# needs the first. So a warp has 32 × 8 numbers of 4 bytes in flight, which are
# 1 KB, and the number of warps says how many KB an SM has in flight.
# A program has at most 32 warps. For 64 KB we start two of them on each SM.


def count_sms():
    """SMs of this GPU. The interpreter counts for an H100."""
    if not ON_GPU:
        return 132
    return torch.cuda.get_device_properties(DEVICE).multi_processor_count


NUM_SMS = count_sms()

# %%

# Scaffold: a benchmark of loads that wait for each other.


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["KB"],
        x_vals=[1, 2, 4, 8, 16, 32, 64],
        x_log=True,
        xlabel="KB in flight on a multiprocessor",
        line_arg="provider",
        line_vals=["reading"],
        line_names=["Reading"],
        ylabel="GB/s",
        plot_name="layer-norm-loads-knee",
        args={"MB": 256},
    )
)
def bench_reading(KB, MB, provider):
    """Device time: a CUDA graph of several calls, each with inputs of its own
    and after L2 was overwritten, less the graph without the calls; median, 20%
    and 80% quantiles."""
    if not ON_GPU:
        return 3 * [float("nan")]  # the interpreter cannot be timed
    programs_per_sm = 1
    if KB > 32:  # a program has at most 32 warps
        programs_per_sm = KB // 32
    programs = programs_per_sm * NUM_SMS
    warps = KB // programs_per_sm
    lanes = 256 * warps  # 32 threads, eight lanes for each
    steps = MB * 10**6 // (4 * programs * lanes)

    def prepare():
        shape = (steps, programs, lanes)
        x = torch.zeros(shape, dtype=torch.int32, device=DEVICE)
        end = torch.empty_like(x[0])

        def read():
            _read[(programs,)](
                x_ptr=x,
                end_ptr=end,
                steps=steps,
                LANES=lanes,
                num_warps=warps,
            )

        return read

    return speed(4 * steps * programs * lanes, prepare)


# %%

table = bench_reading.run(show_plots=ON_GPU, return_df=True).set_index("KB")
speeds = table.iloc[:, 0]  # the only line

# From how many KB on is the speed at least 95% of the best?
knee = speeds[speeds >= 0.95 * speeds.max()].first_valid_index()
if knee:  # it was measured
    print(f"1 KB comes after {1024 * NUM_SMS / speeds[1]:.0f} ns")
    print(f"95% of {speeds.max():.0f} GB/s: with {knee:.0f} KB in flight")

# %%
# **What the figure shows.**
# On the H100, 1 KB in flight on each SM gives 309 GB/s, 8 KB give 1828 GB/s,
# 16 KB give 2476 GB/s, 32 KB give 2768 GB/s, and 64 KB give 2784 GB/s.
#
# On the H200, 1 KB in flight on each SM gives 318 GB/s, 8 KB give 1979 GB/s,
# 16 KB give 3089 GB/s, 32 KB give 3727 GB/s, and 64 KB give 3790 GB/s.
#
# Here and below, the speeds and times in the text are those of the H100
# wherever we do not speak of the H200.
#
# **Why.**
# On the left the pipe is almost empty. A step takes one latency, whatever it
# requests, so twice the bytes in flight are nearly twice the speed.
# We can turn Little's law around and compute this latency: 1 KB on each of
# 132 SMs, divided by the speed, is 437 ns.
# A load of the chain took 362 ns. A step takes longer, because a thread
# requests its eight numbers one after the other, and waits for the last.
#
# Then the memory gets busy. The law asked for 8 KB, but with 8 KB we get only
# 66% of the best speed.
# The reason is that requests have to wait for each other when there are many
# of them, so the latency grows. The law, turned around again, tells by how
# much: a step takes 591 ns with 8 KB in flight, and 873 ns with 16 KB.
#
# The pipe of the H200 is about as long, but wider: a step takes 425 ns with 1
# KB in flight, and with 8 KB we get only 52% of the best speed.
#
# On the right the pipe is full. With 64 KB in flight a step takes 3107 ns,
# twice the 1563 ns that it takes with 32 KB. The additional bytes only wait.
# (The best speed is below the 3.0 TB/s from above. Those came from reading 4
# GB. Here the kernel takes only 92 µs, and the time to start and to finish is
# part of it.)
#
# **What follows.**
# The point from which on more brings little is called the *knee*. We take the
# first point whose speed is at least 95% of the best, and that is 32 KB, on
# the H100 and on the H200.
# So the law's 8 KB are a lower bound. In practice, an SM needs 32 KB in
# flight, and all the time.
#
# Backward, one row at a time
# ---------------------------
#
# How many bytes does our backward pass have in flight?
#
# This is the backward kernel of `Layer normalization, both passes
# <01-layer-norm.html>`_, with one new argument, ``STAGES``. That is our third
# knob, and 1 turns it off.
# A program takes row after row: it requests a row of ``x`` and of ``dy``,
# waits for them, computes, stores ``dx``, and only then requests the next
# row.
# At 4096 columns, in 16 bits, a row takes 8 KB. So a program has 16 KB in
# flight while it waits, which is half of the knee if it is alone on its SM.
# And while it computes, it has nothing in flight.


@triton.jit
def _layer_norm_bwd(
    dy_ptr,  # (M, N), contiguous
    x_ptr,  # (M, N), contiguous
    w_ptr,  # (N,)
    mean_ptr,  # (M,), from the forward pass
    rstd_ptr,  # (M,), from the forward pass
    dx_ptr,  # (M, N)
    sums_ptr,  # (programs, 2, N): the sums of each program, for dw and db
    M,  # rows
    N: tl.constexpr,  # columns
    BLOCK_SIZE: tl.constexpr,  # tile width: a power of two, at least N
    STAGES: tl.constexpr,  # New: how far ahead rows are requested
):
    # The columns of the tile, and which of them belong to the row.
    cols = tl.arange(0, BLOCK_SIZE)
    mask = cols < N

    # We compute in the type of mean: float32, or float64 if x is float64.
    acc_dtype = mean_ptr.dtype.element_ty

    # The sums over our rows stay in registers from the first row to the last.
    dw = tl.zeros((BLOCK_SIZE,), acc_dtype)
    db = tl.zeros((BLOCK_SIZE,), acc_dtype)

    # New: tl.range is a range that the compiler may pipeline.
    first = tl.program_id(0)
    step = tl.num_programs(0)
    for row in tl.range(first, M, step, num_stages=STAGES):
        # Request a row of x and one of dy. In 16 bits that is 4 * N bytes.
        # The offsets are in 64 bits, because M * N may be more than 2**31.
        # Masked elements of dy are 0, so they add nothing to the sums below.
        offsets = tl.cast(row, tl.int64) * N + cols
        x = tl.load(x_ptr + offsets, mask=mask, other=0).to(acc_dtype)
        dy = tl.load(dy_ptr + offsets, mask=mask, other=0).to(acc_dtype)

        # From here on the program needs both rows, so it waits for them.
        # Recompute x_hat.
        rstd = tl.load(rstd_ptr + row)
        mean = tl.load(mean_ptr + row)
        x_hat = (x - mean) * rstd

        # This row's terms of dw and db.
        dw += dy * x_hat
        db += dy

        # Load w again for every row. It comes from a cache, and keeping it
        # would take registers.
        w = tl.load(w_ptr + cols, mask=mask, other=0).to(acc_dtype)
        wdy = dy * w

        # The formula for dx. The two sums go over all columns of the row.
        c1 = tl.sum(x_hat * wdy) / N
        c2 = tl.sum(wdy) / N
        dx = (wdy - x_hat * c1 - c2) * rstd

        # This rounds dx to the type of x.
        tl.store(dx_ptr + offsets, dx, mask=mask)

    # Store both sums in the buffer of this program: dw first, then db.
    sums_ptr += tl.program_id(0) * 2 * N + cols
    tl.store(sums_ptr, dw, mask=mask)
    tl.store(sums_ptr + N, db, mask=mask)


# %%
# The second kernel, which adds up the buffers of all programs, is that of the
# same page.


@triton.jit
def _layer_norm_bwd_add_up(
    sums_ptr,  # (programs, WIDTH)
    grads_ptr,  # (WIDTH,): dw, then db
    programs,  # how many buffers there are
    WIDTH: tl.constexpr,  # 2 * N
    ROWS: tl.constexpr,  # buffers loaded at a time
    COLS: tl.constexpr,  # columns per program
):
    # The columns of this program.
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)

    # Each element of the tile has a sum of its own.
    total = tl.zeros((ROWS, COLS), sums_ptr.dtype.element_ty)
    for first in range(0, programs, ROWS):
        # [:, None] makes a column of the row numbers, as in NumPy. With the
        # row of column numbers it gives a tile of ROWS x COLS.
        rows = first + tl.arange(0, ROWS)[:, None]
        mask = (rows < programs) & (cols < WIDTH)
        total += tl.load(sums_ptr + rows * WIDTH + cols, mask=mask, other=0)

    # Add up the rows of the tile. Only this store rounds to the type of grads.
    tl.store(grads_ptr + cols, tl.sum(total, axis=0), mask=cols < WIDTH)


# %%
# Our three knobs are the programs on each SM, the warps of a program, and the
# stages. The three numbers together are a *plan*.


def backward(dy, x, w, mean, rstd, plan, dtype=None):
    """dx, and dw and db as a (2, N) tensor of this type, if there is one."""
    M, N = x.shape
    programs_per_sm, warps, stages = plan
    programs = min(M, programs_per_sm * NUM_SMS)
    dx = torch.empty_like(x)
    sums = torch.empty(programs, 2, N, dtype=mean.dtype, device=x.device)

    # The first kernel: a program takes every row whose number is its own,
    # plus a multiple of the number of programs.
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
        STAGES=stages,
        num_warps=warps,
    )
    if dtype is None:
        return dx, None

    # The second kernel: a program adds up 16 columns of all buffers.
    grads = torch.empty(2, N, dtype=dtype, device=x.device)
    columns_per_program = 16
    grid = (triton.cdiv(2 * N, columns_per_program),)
    _layer_norm_bwd_add_up[grid](
        sums_ptr=sums,
        grads_ptr=grads,
        programs=programs,
        WIDTH=2 * N,
        ROWS=256,
        COLS=columns_per_program,
        num_warps=8,
    )
    return dx, grads


# %%
# First knob: programs
# --------------------
#
# While one program computes and has nothing in flight, another one could load.
# What do more programs on each SM bring?
#
# We change nothing else, and we measure in % of the speed of a copy.
# As in `Layer normalization, both passes <01-layer-norm.html>`_, the copy of a
# backward pass is a plain kernel that reads two matrices and writes one.

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

# Scaffold: the speed of a plan.

WIDTHS = [1024, 4096, 8192]


def given(M, N, dtype):
    """dy, x, w, and the mean and rstd that a forward pass has saved."""
    dy, x = torch.randn(2, M, N, device=DEVICE, dtype=dtype)
    w = torch.rand(N, device=DEVICE, dtype=dtype)
    _, mean, rstd = torch.native_layer_norm(x, (N,), w, w, 1e-5)
    return dy, x, w, mean, rstd


@functools.cache
def speed_of_copy(M, N, dtype):
    """GB/s of the copy, measured once for each shape."""
    median, _, _ = ceiling(reads=2, writes=1, shape=(M, N), dtype=dtype)
    return median


def percent_of_copy(M, N, dtype, plan):
    """Speed of a backward pass in % of the copy's: median, low, high."""
    copy = speed_of_copy(M, N, dtype)

    def prepare():
        tensors = given(M, N, dtype)
        return lambda: backward(*tensors, plan, dtype)

    bytes_moved = 3 * M * N * dtype.itemsize
    return [100 * ours / copy for ours in speed(bytes_moved, prepare)]


# %%
# These are the plans of `Layer normalization, both passes
# <01-layer-norm.html>`_. They have one stage: rows of up to 1024 columns get 6
# programs of 4 warps on each SM, and rows of 8192 columns or more get a single
# one of 16 warps.


def one_stage(N, itemsize=2):
    """Programs on each SM, warps of a program, and stages."""
    if N <= 1024:
        return 6, 4, 1
    if N <= 2048:
        return 4, 4, 1
    if N <= 4096:
        return 3, 4, 1
    if N < 8192:
        return 2, 4, 1
    return 1, 16, 1


# %%

# Scaffold: a benchmark of programs.


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["programs"],
        x_vals=[1, 2, 3, 4, 6, 8],
        xlabel="programs",
        line_arg="provider",
        line_vals=[str(N) for N in WIDTHS],
        line_names=[f"N = {N}" for N in WIDTHS],
        ylabel="% of copy",
        plot_name="layer-norm-loads-programs",
        args={"M": 4096, "dtype": torch.float16, "mode": "backward"},
    )
)
def bench_programs(programs, M, dtype, mode, provider):
    """Device time: a CUDA graph of several calls, each with inputs of its own
    and after L2 was overwritten, less the graph without the calls; median, 20%
    and 80% quantiles. Copy: the best of six tiles."""
    if not ON_GPU:
        return 3 * [float("nan")]
    N = int(provider)
    _, warps, stages = one_stage(N)
    return percent_of_copy(M, N, dtype, (programs, warps, stages))


# %%

by_programs = bench_programs.run(show_plots=ON_GPU, return_df=True)
by_programs = by_programs.set_index("programs")

# %%
# **What the figure shows.**
# On the H100, one program on each SM reaches 29% of the copy at 1024 columns,
# 55% at 4096 columns, and 76% at 8192 columns.
# At 1024 columns more programs help up to six, which reach 60%, and eight are
# no faster. At 4096 columns three are best and reach 80%. At 8192 columns
# nothing beats one.
#
# On the H200, one program on each SM reaches 24%, 44% and 60% of the copy. At
# 1024 columns eight programs are a little faster than six, with 55% and 54%.
# At 4096 columns three are best there, too, with 73%, and at 8192 columns
# nothing beats one.
#
# **Why more programs help.**
# A row of ``x`` and one of ``dy`` are 4 KB at 1024 columns, 16 KB at 4096, and
# 32 KB at 8192. So this is what a single program requests at a time, and the
# wider the row, the nearer it gets to the copy.
# Three programs at 4096 columns request 48 KB together. And while one of them
# computes, the other two still have loads in flight.
#
# **Why they do not always help.**
# There are two reasons.
#
# *Registers.* An SM has 65536 registers for all programs that run on it.
# A program keeps four numbers for each lane of its tile: ``x``, ``dy``, ``dw``
# and ``db``. And each of its threads needs about 32 more registers, for
# addresses and intermediate results.
#
# - At 4096 columns, with 4 warps, which are 128 threads, that makes 4 × 4096 +
#   32 × 128 = 20480 registers. Three programs fit.
# - At 8192 columns, with 16 warps, which are 512 threads, it makes 4 × 8192 +
#   32 × 512 = 49152 registers. A second program does not fit: it waits until
#   the first has ended. So it can only cost something, and two reach 70%.
#
# So what if we start four at 4096 columns? Three of them work on three
# quarters of the rows, at 80% of the copy, and when they are done, the fourth
# works on the rest alone, at 55%. Together that would be 72%, and we measured
# 67%.
#
# *Buffers.* Each program stores its sums in a buffer, and the second kernel
# reads them back. With 8 programs on each SM, the buffers of 1024 columns take
# 8.7 MB, and they move twice, beside matrices of 25 MB.
# This is why the same 32 KB in flight are worth less in a narrow row: 8
# programs at 1024 columns reach 60%, and 2 programs at 4096 columns reach 74%.
#
# **What follows.**
# Programs are a way to have more bytes in flight, but each of them costs
# registers and a buffer.
#
# Second knob: warps
# ------------------
#
# Do more warps help?
# We start 6, 3 and 1 programs on each SM, as in our plans, and change only the
# warps of each program.

# %%

# Scaffold: a benchmark of warps.


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["warps"],
        x_vals=[4, 8, 16, 32],
        xlabel="warps",
        line_arg="provider",
        line_vals=[str(N) for N in WIDTHS],
        line_names=[f"N = {N}" for N in WIDTHS],
        ylabel="% of copy",
        plot_name="layer-norm-loads-warps",
        args={"M": 4096, "dtype": torch.float16, "mode": "backward"},
    )
)
def bench_warps(warps, M, dtype, mode, provider):
    """Device time: a CUDA graph of several calls, each with inputs of its own
    and after L2 was overwritten, less the graph without the calls; median, 20%
    and 80% quantiles. Copy: the best of six tiles."""
    if not ON_GPU:
        return 3 * [float("nan")]
    N = int(provider)
    programs, _, stages = one_stage(N)
    return percent_of_copy(M, N, dtype, (programs, warps, stages))


# %%

bench_warps.run(show_plots=ON_GPU)

# %%
# **What the figure shows.**
# No, more warps mostly make the pass slower.
# On the H100, at 4096 columns, 4 warps reach 80% of the copy, 8 reach 64%, and
# 32 reach 49%. At 1024 columns 4 and 8 warps are alike with 61% each, and
# 16 reach 47%. Only at 8192 columns are 4 warps too few: they reach 53%, and
# 16 reach 76%.
#
# On the H200, at 4096 columns, 4 warps reach 74% of the copy, 8 reach 55%, and
# 32 reach 39%. At 1024 columns 4 and 8 warps reach 54% each. At 8192 columns 4
# reach 43%, 8 reach 59%, and 16 reach 61%.
#
# **Why.**
# More warps do not add bytes: a row has as many bytes, however many warps load
# it. But they cost something.
#
# - **Room.** Each thread needs its 32 registers for addresses, so with more
#   threads fewer programs fit. At 4096 columns there is room for three
#   programs of 4 warps, for two of 8 or 16 warps, and for one of 32. An SM
#   also has at most 64 warps: at 1024 columns four programs of 16 warps run at
#   a time, and two of 32. The others wait. (By our rule three and one would
#   fit, but with so few lanes a thread needs fewer than 32 more registers.)
# - **Narrow loads.** At 1024 columns, a thread of 4 warps loads eight numbers,
#   16 bytes, with one instruction. A thread of 32 warps loads one number of 2
#   bytes.
# - **Waiting.** In each of the two sums of a row all warps of the program have
#   to wait for the last of them.
#
# And why are 4 warps too few at 8192 columns? A thread can have at most 255
# registers. Each of 128 threads has 64 lanes and four numbers for each of
# them, and this is more. So the compiler *spills*: it keeps some of them in
# memory.
#
# **What follows.**
# We take as few warps as the registers of a thread allow. At 8192 columns our
# plan has 16, and 8 warps reach 75%, nearly as much.
#
# Third knob: stages
# ------------------
#
# Can a program have loads in flight while it computes?
#
# At 8192 columns there is room for just one program on an SM.
# 4096 rows on 132 programs are 31 or 32 rows for each, one after the other.
# On the H100 the whole pass takes 90 µs (the last figure of this page shows
# its speed), so each row takes 2.8 µs. A row of ``x`` and one of ``dy`` are 32
# KB, and an SM needs 1.6 µs for them if it reads as fast as our reading kernel
# at its knee. On the H200, each row takes 2.5 µs, and an SM needs 1.2 µs to
# read its part. In the rest of the time the program computes, stores, and has
# nothing in flight.
#
# So the program should request the next rows before it works on this one. This
# is called *pipelining*, and the compiler does it for us.
# With ``num_stages=3`` it turns the loads of the loop into *asynchronous
# copies* (``cp.async``). They bring the bytes to shared memory, while the
# threads do something else. So rows in flight take no registers.
#
# Shared memory then has *slots* for two rows. There is always one slot less
# than there are stages, because the row that the program works on is in
# registers. In each iteration of the loop, the program
#
# 1. waits for the oldest row that it has requested,
# 2. moves it from shared memory to registers and works on it,
# 3. requests one more row, into the slot of the row that it has worked on.
#
# (The slot is free as soon as its row is in registers, but this is where the
# compiler puts the request.)

# %%

# Drawing: one stage and three stages in time.

plt.figure(
    "With one stage, memory has nothing to do while the program works; with "
    "three stages, another row is being loaded meanwhile",
    figsize=(7.5, 3),
)
# How long they take, in no particular unit.
LOAD = 3
WORK = 1.8


def draw_bar(left, width, height, row):
    plt.barh(height, width, left=left, color=f"C{row}", alpha=0.6)
    plt.text(left + width / 2, height, row, ha="center", va="center")


# One stage: a row is requested when the row before is done.
for row in range(3):
    start = row * (LOAD + WORK)
    draw_bar(start, LOAD, 5, row)
    draw_bar(start + LOAD, WORK, 4, row)

# Three stages: a row takes the slot of the row before the last, when that one
# is done.
done = [0, 0]
for row in range(5):
    start = done[row]
    draw_bar(start, LOAD, 2 - row % 2, row)
    work = max(start + LOAD, done[-1])
    draw_bar(work, WORK, 0, row)
    done.append(work + WORK)

labels = ["work", "load", "three stages: load", "work", "one stage: load"]
plt.yticks([0, 1, 2, 4, 5], labels)
plt.xticks([])
plt.xlabel("time (the numbers are rows)")
plt.show()

# %%
# With one stage, nothing is loaded while the program works. With three stages
# there is always a row on its way.
# Two stages would not help: there is a single slot, and the next row is
# requested into it only when the program has worked on the row before.
#
# Which plan should we try?
#
# - **Programs.** Rows in flight need no programs of their own now, so one
#   program on an SM will do. Narrow rows get more, so that enough bytes are in
#   flight: two programs at 2048 columns, and three at 1024.
# - **Stages.** A slot holds a row of ``x``, one of ``dy``, and also ``w``,
#   because the compiler copies whatever the loop loads. At 8192 columns, in 16
#   bits, this is 48 KB. The programs on an SM share 227 KB, and we take as
#   many slots as fit, but at most four, for five stages.
# - **Warps.** We take at least four, and so many that a thread has 32 lanes at
#   most. Their four numbers make 128 registers, and 32 more are well below the
#   255 that a thread can have.
#
# A row of more than 8192 columns stays with one stage: its tile has 16384
# lanes, and their four numbers take all 65536 registers of an SM. A loop with
# copies needs a few more.


def count_shared_memory():
    """Bytes that a program can have. The interpreter counts for an H100."""
    if not ON_GPU:
        return 232_448
    gpu = torch.cuda.get_device_properties(DEVICE)
    return gpu.shared_memory_per_block_optin


SHARED = count_shared_memory()


def best_plan(N, itemsize=2):
    """Programs on each SM, warps of a program, and stages."""
    lanes = triton.next_power_of_2(N)
    programs_per_sm = min(max(4096 // lanes, 1), 3)
    warps = max(lanes // 1024, 4)  # at most 32 lanes for each thread
    if lanes > 8192:
        return programs_per_sm, warps, 1
    # Of the shared memory of a program, 2 KB are left for tl.sum.
    room = SHARED // programs_per_sm - 2048
    slot = 3 * lanes * itemsize  # a row of x, one of dy, and w
    slots = min(room // slot, 4)
    return programs_per_sm, warps, 1 + slots


# %%

# Scaffold: a benchmark of stages.


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["stages"],
        x_vals=[1, 2, 3, 4, 5],
        xlabel="stages",
        line_arg="provider",
        line_vals=[str(N) for N in WIDTHS],
        line_names=[f"N = {N}" for N in WIDTHS],
        ylabel="% of copy",
        plot_name="layer-norm-loads-stages",
        args={"M": 4096, "dtype": torch.float16, "mode": "backward"},
    )
)
def bench_stages(stages, M, dtype, mode, provider):
    """Device time: a CUDA graph of several calls, each with inputs of its own
    and after L2 was overwritten, less the graph without the calls; median, 20%
    and 80% quantiles. Copy: the best of six tiles."""
    if not ON_GPU:
        return 3 * [float("nan")]
    N = int(provider)
    programs, warps, most = best_plan(N)
    if stages > most:  # shared memory has no room for them
        return 3 * [float("nan")]
    return percent_of_copy(M, N, dtype, (programs, warps, stages))


# %%

by_stages = bench_stages.run(show_plots=ON_GPU, return_df=True)
by_stages = by_stages.set_index("stages")

# %%
# **What the figure shows.**
# On the H100, at 4096 columns, one stage reaches 55% of the copy, two reach
# 52%, three 76% and five 84%; at 8192 columns one reaches 75%, two 71%, three
# 88% and five 86%.
#
# On the H200, at 4096 columns, one stage reaches 44% of the copy, two reach
# 41%, three 68% and five 81%; at 8192 columns one reaches 59%, two 54%, three
# 82% and five 80%.
#
# **Why.**
# Two stages are no faster than one, at any of the three widths: nothing is in
# flight while the program works, and each row now goes through shared memory.
# From three stages on, there is always a row in flight, and the speed jumps.
# At 4096 columns, three stages have two rows in flight while the program waits
# and one while it works, which is 32 KB and then 16 KB. With five stages it is
# 64 KB and then 48 KB.
# At 8192 columns a row has twice the bytes, so three stages already have 64 KB
# in flight, and more stages bring nothing.
#
# **What follows.**
# 64 KB in flight on each SM are enough. This is twice the knee, and we will
# soon ask why it takes so many.
# Our plan is not the best one everywhere. At 8192 columns three stages are a
# little faster than five, on both cards. On the H100, four are as good as five
# or a little better at all three widths.
# On the H200, five stages are better than four at 1024 and 4096 columns, by
# 1.6 and 2.8 points.
#
# There is one more condition. An asynchronous copy moves 4, 8 or 16 bytes, and
# their address must be a multiple of that. If ``N`` is odd, every other row of
# 16-bit numbers begins at an address that is not even a multiple of 4. So the
# compiler makes no copies, and stages change nothing.
#
# Isn't that just occupancy?
# --------------------------
#
# *Occupancy* is the share of the 64 warps of an SM that are in use.
# You will often read that a kernel needs a high occupancy to hide latency. So
# let's see how high ours is.
# NVIDIA's profiler ``ncu`` counts it, and we compute it by hand as well: the
# programs on an SM times their warps. We compare two plans, and a third one
# will be in the last figure.


def one_program(N, itemsize=2):
    """The plan of one_stage, but with a single program on each SM."""
    _, warps, stages = one_stage(N, itemsize)
    return 1, warps, stages


PLANS = {
    "triton": best_plan,
    "more programs": one_stage,
    "one program": one_program,
}

# %%

# Scaffold: a benchmark that ncu counts.


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=WIDTHS,
        line_arg="provider",
        line_vals=[
            "triton",
            "triton, by hand",
            "more programs",
            "more programs, by hand",
        ],
        line_names=[
            "Triton",
            "Triton, by hand",
            "More programs",
            "More programs, by hand",
        ],
        ylabel="% of warps",
        plot_name="layer-norm-loads-occupancy",
        args={
            "M": 4096,
            "dtype": torch.float16,
            "mode": "backward",
            "counter": "sm__warps_active.avg.pct_of_peak_sustained_active",
        },
    )
)
def occupancy(M, N, dtype, mode, counter, provider):
    """Warps that run on a multiprocessor, on average, of all that can."""
    if not ON_GPU:
        return 3 * [float("nan")]
    name = provider.removesuffix(", by hand")
    plan_of = PLANS[name]
    plan = plan_of(N)
    if name != provider:
        programs, warps, _ = plan
        return 100 * programs * warps / 64  # an SM has at most 64 warps
    tensors = given(M, N, dtype)
    backward(*tensors, plan)  # compiles
    with torch.cuda.nvtx.range(f"counted {provider} {N}"):
        backward(*tensors, plan)
    return 3 * [float("nan")]  # only ncu knows


# %%

occupancy.run(show_plots=ON_GPU)

# %%
# **What the figure shows.**
# With stages (Triton) fewer warps are in use than with more programs: on the
# H100, 18% and 34% at 1024 columns, 6% and 18% at 4096 columns, and 12% and
# 25% at 8192 columns.
# And yet stages are faster at all three widths: at 4096 columns they reach 84%
# of the copy, and three programs reach 80%.
# On the H200 the same shares of the warps are in use, and stages reach 81% of
# the copy at 4096 columns, where three programs reach 73%.
# What ncu counts is a little less than what we computed, because a program
# that has ended uses no warps.
#
# **Why.**
# It is not warps that keep a memory busy, but bytes in flight. Warps that wait
# for loads are one way to have them, and requesting rows ahead is another.
#
# How far do bytes in flight explain it?
# --------------------------------------
#
# Here is what each plan has in flight while it waits, beside the knee, and the
# speed that we measured.

for column, N in enumerate(WIDTHS):
    plans = {plan(N) for plan in PLANS.values()}  # each of them once
    for programs, _, stages in sorted(plans):
        # A row for each program, or one less than there are stages.
        rows = programs * max(stages - 1, 1)
        flying = rows * 2 * N * 2 / 1024  # x and dy, of 2 bytes
        line = (
            f"N = {N}, programs {programs}, stages {stages}: {flying:3.0f} KB"
        )
        if knee:  # it was measured
            if stages == 1:
                percent = by_programs.loc[programs].iloc[column]
            else:
                percent = by_stages.loc[stages].iloc[column]
            line += f", {100 * flying / knee:3.0f}% of the knee"
            line += f", {percent:3.0f}% of the copy"
        print(line)

# %%
# At each width, a plan with more in flight is faster, but not in proportion:
# even four times the knee is not enough to reach the copy. What is missing?
#
# - **The program works, too.** These bytes are in flight while it waits. While
#   it works, there is a row less, and with one stage there is nothing.
# - **A copy keeps the memory busier.** The knee is that of our reading kernel,
#   which reads at most 2784 GB/s on the H100. The copy moves 2951 GB/s at 8192
#   columns, and a third of that is stores. The busier a memory is, the later
#   it answers, and the more must be in flight.
#   On the H200, the two speeds are 3790 and 4104 GB/s.
# - **The last round.** With 6 programs on each SM, 792 programs share 4096
#   rows. That is 5.2 rows for each, so some take six rows and the others five,
#   and in the last round most of the programs are gone. With 8 programs it is
#   3.9 rows for each, so nearly all take four.
# - **Buffers, and the second kernel.** Here, stages gain once more, because
#   they need fewer programs: at 4096 columns the buffers of one program on
#   each SM take 4.3 MB, and those of three take 13 MB. They may also be why 8
#   programs are no faster than 6 at 1024 columns, although they have more in
#   flight and a full last round.
#
# A function to train with
# ------------------------
#
# The forward pass stays as it was. Each row has a program of its own, and an
# SM runs many of them at a time, so there is always one that loads.


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
    # Program i takes row i. The index is in 64 bits, because M * N may be more
    # than 2**31.
    row = tl.program_id(0).to(tl.int64)

    # The columns of the tile, and which of them belong to the row.
    cols = tl.arange(0, BLOCK_SIZE)
    mask = cols < N

    # Load the row once. Masked elements are 0 and add nothing to the sum.
    acc_dtype = mean_ptr.dtype.element_ty
    x = tl.load(x_ptr + row * N + cols, mask=mask, other=0).to(acc_dtype)
    mean = tl.sum(x) / N

    # A masked element would now be -mean, so set it back to 0.
    x_centered = tl.where(mask, x - mean, 0)
    rstd = 1 / tl.sqrt(tl.sum(x_centered * x_centered) / N + eps)

    # Save two numbers for the backward pass.
    tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)

    # Scale and shift. Masked elements of w and b may hold anything, for they
    # are never stored.
    w = tl.load(w_ptr + cols, mask=mask).to(acc_dtype)
    b = tl.load(b_ptr + cols, mask=mask).to(acc_dtype)
    y = x_centered * rstd * w + b

    # Store the row once. This rounds it to the type of y.
    tl.store(y_ptr + row * N + cols, y, mask=mask)


# %%
# The autograd function keeps the plan of the backward pass.


class LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, b, eps, plan):
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
        ctx.b_dtype = b.dtype
        # A slot holds w as well, whose numbers may be wider than those of x.
        ctx.plan = plan(N, max(x.itemsize, w.itemsize))
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable  # no second derivatives
    def backward(ctx, dy):
        x, w, mean, rstd = ctx.saved_tensors
        # Kernels expect rows that follow one another in memory.
        dy = dy.contiguous()
        # dw and db come in one tensor, of a type that is wide enough for both.
        dtype = torch.promote_types(w.dtype, ctx.b_dtype)
        dx, grads = backward(dy, x, w, mean, rstd, ctx.plan, dtype)
        dw = grads[0].to(w.dtype)
        db = grads[1].to(ctx.b_dtype)
        # One gradient for each argument of forward; eps and plan have none.
        return dx, dw, db, None, None


# %%
# The function checks its arguments. A missing weight counts as ones, and a
# missing bias as zeros.


def check_arguments(x, shape, w, b, eps):
    """Raise an error that names the wrong argument, and says why."""
    for name, tensor in {"x": x, "weight": w, "bias": b}.items():
        if not tensor.is_floating_point():
            raise TypeError(f"{name} is {tensor.dtype}: floats are taken")
        device = tensor.device
        if device != x.device or device.type != DEVICE.type:
            raise ValueError(f"{name} is on {device}: all go on {DEVICE}")
        # Triton starts a kernel on the current GPU, wherever its tensors are.
        if tensor.is_cuda and device.index != torch.cuda.current_device():
            raise ValueError(f"{name} is on {device}: not the current one")
        last_dimensions = tensor.shape
        if name == "x":
            last_dimensions = tensor.shape[-len(shape) :]
        if last_dimensions != shape:
            raise ValueError(
                f"the shape of {name} is {tuple(tensor.shape)}, "
                f"normalized_shape is {tuple(shape)}"
            )
    if not eps >= 0:  # negative, or NaN
        raise ValueError(f"eps is {eps}: 0 or more is taken")
    if not 0 < shape.numel() <= 16384:
        raise ValueError(f"normalized_shape is {tuple(shape)}: not 1 to 16384")


def layer_norm(
    x, normalized_shape, weight=None, bias=None, eps=1e-5, plan=best_plan
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
    check_arguments(x, shape, w, b, eps)

    # The kernels only know contiguous matrices, so all other dimensions
    # become rows.
    N = shape.numel()
    rows = x.reshape(-1, N).contiguous()
    w = w.reshape(N).contiguous()
    b = b.reshape(N).contiguous()
    y = LayerNorm.apply(rows, w, b, eps, plan)
    return y.reshape(x.shape)


# %%
# Is it right?
# ------------
#
# We compare each element of both passes with PyTorch's in float64.

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
for dtype in (torch.float32, torch.float16):
    check(layer_norm, *shape, dtype)

# %%
# How fast is it?
# ---------------
#
# Here are three plans at many widths: stages (Triton), more programs, and one
# program on each SM. The other three lines are PyTorch's layer norm, the same
# function through ``torch.compile``, and the copy.

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

# Scaffold: a benchmark of the backward pass.


def pytorch(x, shape, w, b):
    return F.layer_norm(x, shape, w, b)


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=[512 * i for i in (2, 3, 4, 6, 8, 9, 12, 16, 17, 20, 31)],
        line_arg="provider",
        line_vals=[*PLANS, "torch", "torch.compile", "copy"],
        line_names=[
            "Triton",
            "More programs",
            "One program",
            "PyTorch",
            "torch.compile",
            "Copy",
        ],
        ylabel="GB/s",
        plot_name="layer-norm-loads-backward",
        args={"M": 4096, "dtype": torch.float16, "mode": "backward"},
    )
)
def bench_backward(M, N, dtype, mode, provider):
    """Device time: a CUDA graph of several calls, each with inputs of its own
    and after L2 was overwritten, less the graph without the calls; median, 20%
    and 80% quantiles. Copy: the best of six tiles."""
    if not ON_GPU:
        return 3 * [float("nan")]
    if provider == "copy":  # x and dy are read, dx is written
        return ceiling(reads=2, writes=1, shape=(M, N), dtype=dtype)

    def measure(function):
        def prepare():
            x, w, b, dy = inputs(M, N, dtype)
            y = function(x, (N,), w, b)
            return lambda: torch.autograd.grad(
                y, (x, w, b), dy, retain_graph=True
            )

        return speed(3 * M * N * dtype.itemsize, prepare)

    if provider == "torch":
        return measure(pytorch)
    if provider == "torch.compile":
        return best_of_three_compilations(pytorch, measure)
    plan = PLANS[provider]
    return measure(lambda *tensors: layer_norm(*tensors, plan=plan))


# %%

report(bench_backward)

# %%
# **What the figure shows.**
# On the H100 stages reach 69% to 85% of the copy up to 8192 columns, and more
# programs reach 61% to 82%. Above 8192 columns the three plans are the same
# and reach 66% to 79%.
# Stages are 1.7 to 2.3 times as fast as PyTorch, and 1.5 to 2.4 times as fast
# as torch.compile.
#
# On the H200 stages reach 63% to 81% of the copy up to 8192 columns, and more
# programs reach 53% to 74%. Above 8192 columns the three plans reach 53% to
# 65%. Stages are 1.6 to 2.3 times as fast as PyTorch, and 1.3 to 2.5 times as
# fast as torch.compile.
#
# **How precise is this?**
# Some plans stand in two figures of this page. Their shares of the copy differ
# by up to 0.9 points between the two.
# And above 8192 columns all three lines show the same kernel. They differ by
# at most 0.6%.
#
# **Why.**
# Up to 8192 columns, stages are 1.0 to 1.1 times as fast as more programs.
# They gain where more programs cannot have enough in flight, or pay for it:
#
# - At 8192 columns there is room for a single program with one stage, and
#   nothing else can load while it works. It reaches 76%, and stages reach 85%.
# - At 1024 columns six programs on each SM request 24 KB at a time. Three
#   programs with five stages have up to 48 KB in flight, with half as many
#   buffers. They reach 69%, and six programs reach 61%.
# - At 6144 columns stages gain least. Two programs fit there, and request 48
#   KB at a time. They reach 82%, and stages reach 84%.
#
# On the H200, stages gain more, up to 1.3 times the speed of more programs at
# 8192 columns, where they reach 80% and a single program reaches 61%. They
# gain least at 4608 columns, where they reach 67% and more programs reach 65%.
#
# Above 8192 columns the share falls. A row of 8704 columns is hardly wider
# than one of 8192, but its tile has 16384 lanes, and nearly half of them have
# nothing to do. They take registers like all others, so there is no room for
# stages any more: 8704 columns reach 75%.
# At 15872 columns, where nearly all lanes are in use, even one stage needs
# more registers than there are. The compiler spills, and we reach 66%.
# On the H200, 8704 columns reach 60%, and 15872 columns reach 53%.
#
# **What follows.**
# A tile should fit its row, and `Chunks instead of padding <05-chunks.html>`_
# makes it fit.
#
# Where PyTorch or a library is better
# ------------------------------------
#
# In this figure, neither PyTorch nor torch.compile is faster than ours at any
# width. But:
#
# - **Our wide rows are slow.** Above 8192 columns we have neither room for a
#   second program nor for stages. At 15872 columns we are at 66% of the copy,
#   and torch.compile is at 44%.
#   On the H200 the two are at 53% and 42%.
# - **The plan is made for one kind of GPU.** A GPU with less shared memory
#   gets fewer stages, and we have not tried one.
# - **PyTorch can do more.** It has second derivatives and rows of any width.
#   It also leaves out gradients that nobody wants, and ours does not.
# - **torch.compile can fuse** a layer norm with what comes before and after.
# - **Libraries have kernels of their own.** `Every width
#   <11-every-width.html>`_ measures them.
#
# Exercise 1: two loads of a lane
# -------------------------------
#
# There is another way to have more bytes in flight: each lane of the reading
# kernel has two loads in flight instead of one.
# The second load is ``LANES`` places after the first, so a program moves on by
# ``2 * LANES`` in each step.
# The stub below only has the first of the two. It is for a single program, and
# the numbers that it reads are not 0 here, so a wrong position shows.
# (A tile of twice as many lanes would be right as well. But that is the way
# that we know already.)
#
# **Hint 1.** You need two positions, and each depends on its own loads. Where
# does the second one begin?
#
# **Hint 2.** A load is in flight until its value is used. So both loads of a
# step must come before either of the two values is used.
#
# **Hint 3.** The ends of the second positions go ``LANES`` places after the
# ends of the first.


@triton.jit
def _read_two(x_ptr, end_ptr, steps, LANES: tl.constexpr):
    lanes = tl.arange(0, LANES)
    position = lanes
    for _ in range(steps):
        position += 2 * LANES + tl.load(x_ptr + position)
    tl.store(end_ptr + lanes, position)  # to do: the second positions


def exercise_1(kernel):
    """Whether each of eight positions is where it should be in the end."""
    x = 8 * (torch.arange(64, dtype=torch.int32, device=DEVICE) % 3)
    expected = torch.arange(8, device=DEVICE)
    for _ in range(3):
        expected += 8 + x[expected]
    end = torch.zeros_like(x[:8])
    kernel[(1,)](x_ptr=x, end_ptr=end, steps=3, LANES=4)
    print("right lanes:", (end == expected).tolist())
    return torch.equal(end, expected.int())


exercise_1(_read_two)

# %%

# Solution 1


@triton.jit
def _read_two_1(x_ptr, end_ptr, steps, LANES: tl.constexpr):
    lanes = tl.arange(0, LANES)
    first_position = lanes
    second_position = lanes + LANES
    for _ in range(steps):
        # Both loads are requested before the first value is needed.
        first = tl.load(x_ptr + first_position)
        second = tl.load(x_ptr + second_position)
        first_position += 2 * LANES + first
        second_position += 2 * LANES + second
    tl.store(end_ptr + lanes, first_position)
    tl.store(end_ptr + LANES + lanes, second_position)


assert exercise_1(_read_two_1)

# %%
# What we learned
# ---------------
#
# These are the plans of this page: what each has in flight on an SM at 1024,
# 4096 and 8192 columns, how fast it is on the H100, and why.
#
# - **One program** has 4, 16 and 32 KB in flight while it waits, and nothing
#   while it works. It reaches 29%, 55% and 76% of the copy.
# - **More programs** have 24, 48 and 32 KB in flight. They reach 60%, 80% and
#   76% of the copy. Registers and buffers limit them.
# - **More warps** have no more bytes in flight, and fewer programs fit.
# - **Stages** have 48, 64 and 128 KB in flight while they wait, and 36, 48 and
#   96 KB while they work. They reach 70%, 84% and 86% of the copy. Shared
#   memory limits them, and the work on each row.
#
# And for kernels in general:
#
# - Bytes in flight = bandwidth × latency. Compute it before you tune: it tells
#   you how much each SM has to request ahead.
# - A busy memory answers later than an idle one, so the law gives the least
#   that you need.
# - Occupancy is one way to have bytes in flight, not an aim in itself.
# - Requesting ahead costs shared memory. More programs cost registers.
#
# **Next:** why should a row of 4608 columns take the registers of 8192?
# `Chunks instead of padding <05-chunks.html>`_ cuts rows into pieces that fit.
