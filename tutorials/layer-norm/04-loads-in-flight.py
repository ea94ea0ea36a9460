r"""
Loads in flight
===============

Why is a backward pass slow that takes one row at a time?
Memory answers late, so much must be asked for before the first answer comes:
with more programs, or by asking ahead.

Read `Layer normalization, both passes <01-layer-norm.html>`_ first.
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
# The *latency* of memory is the time from a load to its value, its *bandwidth*
# the bytes that it hands out in a second.
# What is *in flight* was asked for and is not there yet; it comes within one
# latency: **bytes in flight = bandwidth × latency** (Little's law).
#
# This kernel has as many bytes in flight as we like.
# Each *lane*, a place of a program's tile, reads 4 bytes, all of them 0.
# The compiler cannot know that, so where a lane reads next depends on what it
# has read: no load can start before the last one has ended.


@triton.jit
def _read(x_ptr, end_ptr, steps, LANES: tl.constexpr):
    lanes = tl.program_id(0) * LANES + tl.arange(0, LANES)
    at = lanes
    for _ in range(steps):
        at += tl.num_programs(0) * LANES + tl.load(x_ptr + at)
    tl.store(end_ptr + lanes, at)


zeros = torch.zeros(40, dtype=torch.int32, device=DEVICE)
_read[(2,)](zeros, end := torch.empty_like(zeros[:8]), 5, LANES=4)
print("5 steps of 2 × 4 lanes, and at", end.tolist())

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
# A GPU is many *multiprocessors*, each with registers and loads of its own.
# One program on each, and all of them read 256 MB:

GPU = torch.cuda.get_device_properties(DEVICE) if ON_GPU else None
NUM_SMS = GPU.multi_processor_count if ON_GPU else 132  # of an H200
SHARED = GPU.shared_memory_per_block_optin if ON_GPU else 232_448

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
    lanes = 256 * KB  # each reads 4 bytes
    steps = MB * 10**6 // (4 * NUM_SMS * lanes)
    shape = steps, NUM_SMS, lanes
    warps = min(lanes // 32, 16)

    def prepare():
        x = torch.zeros(shape, dtype=torch.int32, device=DEVICE)
        end = torch.empty_like(x[0])
        return lambda: _read[(NUM_SMS,)](
            x, end, steps, LANES=lanes, num_warps=warps
        )

    return speed(4 * steps * NUM_SMS * lanes, prepare)


# %%

table = bench_reading.run(show_plots=ON_GPU, return_df=True).set_index("KB")
speeds = table.iloc[:, 0]  # the only line
knee = speeds[speeds >= 0.9 * speeds.max()].first_valid_index()
if knee:  # it was measured
    print(f"1 KB comes after {1024 * NUM_SMS / speeds[1]:.0f} ns")
    print(f"90% of {speeds.max():.0f} GB/s: with {knee:.0f} KB in flight")

# %%
# On the left a step takes little more than one latency, whatever it asks for:
# more bytes in flight, more bytes a second.
# From the *knee* on, which the last line above names, more brings little, and
# the most that we tried costs speed.
# On the H200, 16 KB in flight give 3091 GB/s, 32 KB give 3105 GB/s, and 64 KB
# only 2262 GB/s. On the H100, they give 2473 GB/s, 2485 GB/s and 2013 GB/s. We
# have not found out why so many bytes of one program are worse.
# Each multiprocessor needs at least the knee in flight, all the time.
#
# One row at a time
# -----------------
#
# This is the backward kernel of `Layer normalization, both passes
# <01-layer-norm.html>`_ with one more knob, ``STAGES``; 1 is off.
# A program takes row after row: it asks for ``x`` and ``dy``, waits, works,
# stores ``dx``, and only then asks for the next row.
# While it works, it has nothing in flight.


@triton.jit
def _layer_norm_bwd(
    dy_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, dx_ptr,
    sums_ptr,  # (programs, 2, N): the sums of each program, for dw and db
    M, N: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    cols = tl.arange(0, BLOCK)
    mask = cols < N
    acc = mean_ptr.dtype.element_ty  # float32; float64 for float64
    dw = tl.zeros((BLOCK,), acc)
    db = tl.zeros((BLOCK,), acc)
    first, step = tl.program_id(0), tl.num_programs(0)
    for i in tl.range(first, M, step, num_stages=STAGES):
        at = tl.cast(i, tl.int64) * N + cols  # M * N may pass 2**31
        x = tl.load(x_ptr + at, mask=mask, other=0).to(acc)
        dy = tl.load(dy_ptr + at, mask=mask, other=0).to(acc)
        rstd = tl.load(rstd_ptr + i)
        x_hat = (x - tl.load(mean_ptr + i)) * rstd
        dw += dy * x_hat
        db += dy
        wdy = dy * tl.load(w_ptr + cols, mask=mask, other=0).to(acc)
        c1 = tl.sum(x_hat * wdy) / N
        c2 = tl.sum(wdy) / N
        tl.store(dx_ptr + at, (wdy - x_hat * c1 - c2) * rstd, mask=mask)
    sums_ptr += tl.program_id(0) * 2 * N + cols
    tl.store(sums_ptr, dw, mask=mask)
    tl.store(sums_ptr + N, db, mask=mask)


@triton.jit
def _layer_norm_bwd_add_up(
    sums_ptr, grads_ptr,  # (programs, WIDTH) and (WIDTH,)
    programs, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    total = tl.zeros((ROWS, COLS), sums_ptr.dtype.element_ty)
    for first in range(0, programs, ROWS):
        rows = first + tl.arange(0, ROWS)[:, None]
        mask = (rows < programs) & (cols < WIDTH)
        total += tl.load(sums_ptr + rows * WIDTH + cols, mask=mask, other=0)
    tl.store(grads_ptr + cols, tl.sum(total, axis=0), mask=cols < WIDTH)


# %%
# Programs a multiprocessor, warps (of 32 threads) and stages are a *plan*.


def backward(dy, x, w, mean, rstd, plan, dtype=None):
    """dx, and dw and db as a (2, N) tensor of this type, if there is one."""
    (M, N), (per_sm, warps, stages) = x.shape, plan
    programs, dx = min(M, per_sm * NUM_SMS), torch.empty_like(x)
    sums = torch.empty(programs, 2, N, dtype=mean.dtype, device=x.device)
    block, grads = triton.next_power_of_2(N), None
    args = dy, x, w, mean, rstd, dx, sums, M, N, block, stages
    _layer_norm_bwd[(programs,)](*args, num_warps=warps)
    if dtype:
        grads = torch.empty(2, N, dtype=dtype, device=x.device)
        grid, args = triton.cdiv(2 * N, 16), (programs, 2 * N, 256, 16)
        _layer_norm_bwd_add_up[(grid,)](sums, grads, *args, num_warps=8)
    return dx, grads


# %%
# First knob: programs
# --------------------
#
# One change: more programs on each multiprocessor.
# The measure is a plain kernel, "copy" for short: like a backward pass, it
# must read two matrices and write one. Six tiles are tried; the best counts.

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


def percent_of_copy(M, N, dtype, plan):
    """Speed of a backward pass in % of the copy's: median, low, high."""
    copy, _, _ = ceiling(reads=2, writes=1, shape=(M, N), dtype=dtype)

    def prepare():
        tensors = given(M, N, dtype)
        return lambda: backward(*tensors, plan, dtype)

    bytes_moved = 3 * M * N * dtype.itemsize
    return [100 * ours / copy for ours in speed(bytes_moved, prepare)]


# %%
# The plan that is best with one stage, as `Layer normalization, both passes
# <01-layer-norm.html>`_ has it:


def one_stage(N, itemsize=2):
    if N >= 8192:
        return 1, 16, 1
    for limit, programs in ((1024, 6), (2048, 4), (4096, 3)):
        if limit >= N:
            return programs, 4, 1
    return 2, 4, 1


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
# ``x`` and ``dy`` of a row of 1024 columns are 4 KB, of 8192 columns 32 KB, so
# narrow rows need more programs.
# On the H200 the best number of programs is 8 at 1024 columns, where 8 reach
# 55% of the copy and 6 reach 53%, and 3 at 4096 columns and 1 at 8192.
# On the H100 the best numbers are the same; at 1024 columns 8 reach 61% there
# and 6 reach 60%.
# And while one program works, another has loads in flight.
#
# But a multiprocessor has 65536 registers for the programs that it runs.
# A program keeps four numbers of each lane: ``x``, ``dy``, ``dw`` and ``db``;
# a thread has some 32 more, for addresses.
# With 8192 columns in 16 warps that is 49152: a second program waits until the
# first has ended.
# And each program has a cost: its sums are written, and read again.
#
# Second knob: warps
# ------------------
#
# One change: the warps of a program, with 6, 3 and 1 programs.

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
# Warps do not add bytes: a row is a row.
# They cost registers: with 4096 columns there is room for three programs of 4
# warps, not for three of 8.
# And a thread can have 255: with 8192 columns in 4 warps, four numbers of each
# of its 64 lanes are more, and some go to memory.
#
# Third knob: stages
# ------------------
#
# The loop can ask ahead: loads become asynchronous copies (``cp.async``) to
# the *shared memory* of a multiprocessor, and wait there, not in registers.
# With ``num_stages`` = 3 there is room for two rows, always one less.
# A program waits for a row, works on it, and loads the next in its place.

# %%

# Drawing: one stage and three stages in time.

plt.figure("One stage: load, work; three: loads during work", (7.5, 2.4))
lines, ends = {}, [0, 0]
lines["one stage: load"] = [(4.2 * i, 3, i) for i in range(3)]
lines["work"] = [(4.2 * i + 3, 1.2, i) for i in range(3)]
for i in range(6):  # a place is free when the row before the last is done
    load = lines.setdefault(["three stages: load", "load "][i % 2], [])
    load.append((ends[i], 3, i))
    ends.append(max(ends[i] + 3, ends[-1]) + 1.2)
lines["work "] = [(end - 1.2, 1.2, i) for i, end in enumerate(ends[2:])]
for level, bars in enumerate(lines.values()):
    for left, width, row in bars:
        plt.barh(-level, width, left=left, color=f"C{row}", alpha=0.6)
        plt.text(left + width / 2, -level, row, ha="center", va="center")
plt.yticks(range(0, -len(lines), -1), lines)
plt.xticks([])
plt.show()

# %%
# One change: the stages, ``num_stages``.
# A row in flight needs no program of its own now: one on a multiprocessor
# will do, or up to three of narrow rows.
# A row of more than 8192 columns and its sums take all registers, and a loop
# with copies takes more: there we stay with one stage.


def best_plan(N, itemsize=2):
    block = triton.next_power_of_2(N)
    per_sm, warps = min(max(4096 // block, 1), 3), max(block // 1024, 4)
    room = SHARED // per_sm - 2048
    stages = 1 + min(room // (3 * block * itemsize), 4)
    return per_sm, warps, stages if block <= 8192 else 1


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
# With two stages there is room for one row, which is asked for when the one
# before is done. From three on there is always a row in flight.
# On the H200, at 4096 columns, one stage reaches 44% of the copy, two reach
# 41%, three 67% and five 80%; at 8192 columns one reaches 59%, two 54%, three
# 82% and five 80%.
# On the H100, at 4096 columns, one stage reaches 55% of the copy, two reach
# 52%, three 76% and five 84%; at 8192 columns one reaches 75%, two 71%, three
# 87% and five 85%.
# So two stages are slower than one, on both cards and at all three widths.
# Five are faster than three at 1024 and 4096 columns, but not at 8192: our
# plan has five there, and on the H100 three would be better.
# The compiler copies all loads of the loop, so a third of a stage holds ``w``.
# A copy has 4 bytes or more: with odd ``N`` in 16 bits rows are not copied.
#
# *Occupancy* is the share of warps in use; ``ncu``, a profiler, counts it:

PLANS = {
    "triton": best_plan,
    "more programs": one_stage,
    "one program": lambda *sizes: (1, *one_stage(*sizes)[1:]),
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
    plan = PLANS[name](N)
    if name != provider:
        programs, warps, _ = plan
        threads = programs * warps * 32
        return 100 * threads / GPU.max_threads_per_multi_processor
    tensors = given(M, N, dtype)
    backward(*tensors, plan)  # compiles
    with torch.cuda.nvtx.range(f"counted {provider} {N}"):
        backward(*tensors, plan)
    return 3 * [float("nan")]  # only ncu knows


# %%

occupancy.run(show_plots=ON_GPU)

# %%
# With stages (Triton) fewer warps run: on the H200 6% at 4096 columns, where
# more programs have 18%. The speed is higher all the same, as the list below
# shows: bytes in flight count, and warps are one way to have them.
#
# Counted and measured
# --------------------
#
# What each plan has in flight, beside the knee, and what it brings:

for column, N in enumerate(WIDTHS):
    plans = {plan(N) for plan in PLANS.values()}  # each of them once
    for programs, _, stages in sorted(plans):
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
# Why is twice the knee not enough, and even eight times the knee not?
# The knee is that of the kernel above, which on the H200 reads 3105 GB/s; the
# copy moves 4100 GB/s at 8192 columns, and must have more in flight. On the
# H100 the kernel reads 2485 GB/s, and the copy moves 2946 GB/s.
# A program at work has one row less ahead than the list counts.
# And loads are not all: in the last round some programs have no row, and then
# a second launch reads the sums, more of them where programs are many.
#
# A function to train with
# ------------------------
#
# In the forward pass each row has a program; a multiprocessor runs many.


@triton.jit
def _layer_norm_fwd(
    x_ptr, w_ptr, b_ptr, y_ptr, mean_ptr, rstd_ptr,
    eps: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    acc = mean_ptr.dtype.element_ty
    x = tl.load(x_ptr + row * N + cols, mask=cols < N, other=0).to(acc)
    mean = tl.sum(x) / N
    x = tl.where(cols < N, x - mean, 0)
    rstd = 1 / tl.sqrt(tl.sum(x * x) / N + eps)
    tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)
    w = tl.load(w_ptr + cols, mask=cols < N).to(acc)
    b = tl.load(b_ptr + cols, mask=cols < N).to(acc)
    tl.store(y_ptr + row * N + cols, x * rstd * w + b, mask=cols < N)


class LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, b, eps, plan):
        (M, N), y = x.shape, torch.empty_like(x)
        acc = torch.promote_types(x.dtype, torch.float32)
        mean, rstd = torch.empty(2, M, dtype=acc, device=x.device)
        block = triton.next_power_of_2(N)
        warps = min(max(block * x.element_size() // 4096, 4), 16)
        args = x, w, b, y, mean, rstd, eps, N, block
        _layer_norm_fwd[(M,)](*args, num_warps=warps)
        ctx.save_for_backward(x, w, mean, rstd)
        ctx.b_dtype, ctx.plan = b.dtype, plan(N, max(x.itemsize, w.itemsize))
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        x, w, mean, rstd = ctx.saved_tensors
        wide = torch.promote_types(w.dtype, ctx.b_dtype)
        given = dy.contiguous(), x, w, mean, rstd, ctx.plan, wide
        dx, (dw, db) = backward(*given)
        return dx, dw.to(w.dtype), db.to(ctx.b_dtype), None, None


# %%
# A missing weight is ones, a missing bias zeros.


def layer_norm(
    x, normalized_shape, weight=None, bias=None, eps=1e-5, plan=best_plan
):
    """Normalize rows of up to 16384 columns; weight and bias may be None."""
    shape = torch.Size(normalized_shape)
    w = x.new_ones(shape) if weight is None else weight
    b = x.new_zeros(shape) if bias is None else bias
    for name, t in {"x": x, "weight": w, "bias": b}.items():
        if not t.is_floating_point():
            raise TypeError(f"{name} is {t.dtype}: floats are taken")
        if t.device != x.device or t.device.type != DEVICE.type:
            raise ValueError(f"{name} is on {t.device}: all go on {DEVICE}")
        if t.is_cuda and t.get_device() != torch.cuda.current_device():
            raise ValueError(f"{name} is on {t.device}: not the current one")
        if shape != (t.shape[-len(shape) :] if name == "x" else t.shape):
            shapes = f"{(*t.shape,)}, normalized_shape is {(*shape,)}"
            raise ValueError(f"the shape of {name} is {shapes}")
    if not eps >= 0:
        raise ValueError(f"eps is {eps}: 0 or more is taken")
    if not 0 < (N := shape.numel()) <= 16384:
        raise ValueError(f"normalized_shape is {(*shape,)}: not 1 to 16384")
    rows, w, b = x.reshape(-1, N), w.reshape(N), b.reshape(N)
    given = (t.contiguous() for t in (rows, w, b))
    return LayerNorm.apply(*given, eps, plan).reshape(x.shape)


# %%

# Scaffold: inputs, and a check against float64.


def inputs(M, N, dtype):
    """x, w, b and dy; the mean of x is far from 0."""
    torch.manual_seed(0)
    x = -2.3 + 0.5 * torch.randn(M, N, device=DEVICE)
    w, b = torch.rand(2, N, device=DEVICE)
    dy = 0.1 * torch.randn(M, N, device=DEVICE)
    return *(t.to(dtype).requires_grad_() for t in (x, w, b)), dy.to(dtype)


def check(function, M, N, dtype):
    """Compare y, dx, dw and db with those of PyTorch in float64."""
    given, results = inputs(M, N, dtype), []
    exact = [t.detach().double().requires_grad_() for t in given]
    for f, (x, w, b, dy) in (function, given), (F.layer_norm, exact):
        y = f(x, (N,), w, b)
        results.append((y, *torch.autograd.grad(y, (x, w, b), dy)))
    # 16 bits: one rounding of a result. float32: the sums round as well.
    limit = torch.finfo(dtype).eps * (8 if dtype == torch.float32 else 0.5)
    for name, got, want in zip(("y", "dx", "dw", "db"), *results, strict=True):
        error = ((got - want).norm() / want.norm()).item()
        assert error <= limit, f"{name}: {error:.1e} is above {limit:.1e}"
    print(f"{M} x {N}, {dtype}: errors below {limit:.1e} in y, dx, dw, db")


# %%

M, N = (1151, 8192) if ON_GPU else (9, 200)
for dtype in torch.float32, torch.float16:
    check(layer_norm, M, N, dtype)

# %%
# At all widths:

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
# On the H200 stages reach 64% to 81% of the copy up to 8192 columns, and more
# programs 54% to 73%; above, the three plans are the same and reach 53% to
# 65%. torch.compile, the best of three compilations, reaches 28% to 49% at all
# widths, PyTorch 30% to 39%.
# At 4608 columns stages gain least: 66%, and more programs reach 65%.
# On the H100, whose memory is slower, stages reach 70% to 85% of its copy up
# to 8192 columns, and more programs 61% to 82%; above, the three plans reach
# 65% to 78%. torch.compile reaches 34% to 53%, PyTorch 35% to 40%.
# Libraries are measured in `Every width <11-every-width.html>`_.
#
# Just above a power of two nearly half of the lanes have nothing to do, which
# `Chunks instead of padding <05-chunks.html>`_ mends.
#
# Exercise 1: two loads of a lane
# -------------------------------
#
# Twice the bytes with as many lanes: each lane of the reading kernel has two
# loads in flight, the second ``LANES`` places after the first.
#
# **Hint.** Both loads of a step must come before one is used.


@triton.jit
def _read_two(x_ptr, end_ptr, steps, LANES: tl.constexpr):
    lanes = tl.arange(0, LANES)
    at = lanes
    for _ in range(steps):
        at += 2 * LANES + tl.load(x_ptr + at)
    tl.store(end_ptr + lanes, at)  # to do: the others


def exercise_1(kernel):
    x = 8 * (torch.arange(64, dtype=torch.int32, device=DEVICE) % 3)
    expected = torch.arange(8, device=DEVICE)
    for _ in range(3):
        expected += 8 + x[expected]
    kernel[(1,)](x, end := torch.zeros_like(x[:8]), 3, LANES=4)
    print("right lanes:", (end == expected).tolist())
    return torch.equal(end, expected.int())


exercise_1(_read_two)

# %%

# Solution 1


@triton.jit
def _read_two_1(x_ptr, end_ptr, steps, LANES: tl.constexpr):
    lanes = tl.arange(0, LANES)
    at, to = lanes, lanes + LANES
    for _ in range(steps):
        first, second = tl.load(x_ptr + at), tl.load(x_ptr + to)
        at += 2 * LANES + first
        to += 2 * LANES + second
    tl.store(end_ptr + lanes, at)
    tl.store(end_ptr + LANES + lanes, to)


assert exercise_1(_read_two_1)
