r"""
Softmax, both passes
====================

How often must softmax read a row?
Once from memory: one sweep over the row finds its maximum and its sum
together, and the backward pass needs nothing but the result.

.. math:: y_j = \frac{e^{x_j - m}}{s}, \qquad m = \max_j x_j, \qquad
   s = \sum_j e^{x_j - m}

Softmax turns a row of numbers into shares that add up to 1: the probabilities
of the next word, or the weights of attention. A *sweep* is one read of a row
from one end to the other. The formula seems to ask for three of them: one for
the maximum, one for the sum, and one for the result.
On this page two are enough, and one where a row fits into registers. We find
out which is faster when, and then write the backward pass.

**What you will learn**

- How to find a maximum and a sum of powers in one sweep, although the sum
  needs the maximum.
- Who should keep them: a program, a thread, or each element of a tile.
- How an upper limit of registers lets more threads run on an SM.
- How to keep a row in registers, even if it begins anywhere in memory.
- Why softmax's backward pass needs neither ``x`` nor the maximum.
- How to choose between two kernels by measuring, and what the choice is worth.

**What you need:** `Layer normalization, both passes
<../layer-norm/01-layer-norm.html>`_. You don't need a GPU.
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
# One sweep for maximum and sum
# -----------------------------
#
# Why does softmax need the maximum at all?
#
# With exact arithmetic the result would be the same without it: subtracting
# the same number from all :math:`x_j` divides all powers by the same factor,
# and their sum, too. But the largest number of float32 is about
# :math:`3 \cdot 10^{38}`, and :math:`e^{89}` is more than that. With the
# maximum subtracted, the largest power is :math:`e^0 = 1`.
#
# So it seems that the sum has to wait for the maximum. But it does not. Let's
# take the row 1, 3, 2, 4 in two halves, and find for each half a *pair*: its
# maximum :math:`m`, and the sum :math:`s` of its powers :math:`e^{x - m}`.


def pair(x):
    maximum = x.max()
    return maximum, (x - maximum).exp().sum()


x = torch.tensor([1.0, 3.0, 2.0, 4.0])
m1, s1 = pair(x[:2])
m2, s2 = pair(x[2:])
m = torch.maximum(m1, m2)
s = s1 * (m1 - m).exp() + s2 * (m2 - m).exp()
print(f"halves: maximum {m1:.0f} and {m2:.0f}, sum {s1:.3f} and {s2:.3f}")
print(f"both together: maximum {m:.0f}, sum {s:.3f}")
assert torch.allclose(s, pair(x)[1])

# %%
# The powers of the first half were computed with a maximum of 3, and the row
# has a maximum of 4. So each of them is :math:`e^{4 - 3}` times too large, and
# their sum *shrinks*: it is multiplied by :math:`e^{3 - 4}`, which is 0.368.
# The sum of the second half stays as it is, and 1.135 · 0.368 + 1.135 = 1.553.
#
# That works for any two parts of a row, in any order. So a program can go
# through a row part by part, and keep a pair for all that it has seen. When
# the row ends, it has the pair of the row. This is called *online softmax*.
# A second sweep computes the results.
#
# Who keeps a pair?
# -----------------
#
# A program of ours has a row, and takes it *tile* by tile. The places of a
# tile are called *lanes*. If a tile has 16384 of them, for example, and the
# program has 512 threads, then 32 lanes belong to each thread. Does each lane
# keep a pair of its own, or do several share one?

# %%

# Drawing: the lanes of a tile, and which of them share a pair.

plt.figure(
    "A small tile of 16 lanes and four threads, three times. A box has the "
    "lanes that share a pair: all 16, the 4 of a thread, or a single one",
    figsize=(7.5, 2.3),
)
for level, (name, each) in enumerate(
    (("a pair a lane", 1), ("a pair a thread", 4), ("a pair a program", 16))
):
    pairs = 16 // each
    for pair_number in range(pairs):
        plt.barh(
            level,
            width=each - 0.1,
            height=0.6,
            left=each * pair_number + 0.05,
            color=f"C{pair_number % 7}",
            alpha=0.5,
        )
    for lane in range(16):
        plt.text(lane + 0.5, level, str(lane), ha="center", va="center")
    plt.text(-0.4, level, name, ha="right", va="center")
    plt.text(16.4, level, f"pairs: {pairs}", ha="left", va="center")
for thread in range(4):
    plt.text(4 * thread + 2, 2.5, f"thread {thread}", ha="center")
plt.axis((-5, 19.5, -0.5, 2.9))
plt.axis("off")
plt.show()

# %%
# - **A pair for the program.** Before any thread can compute a power, all
#   threads have to know the maximum of the tile. They exchange it through
#   shared memory, and wait for each other, at every tile.
# - **A pair for each lane.** No thread waits until the row is over. But each
#   element may be a new maximum of its lane, so a second power is computed for
#   it, by which the sum shrinks. And a pair takes two registers in each lane.
# - **A pair for each thread.** A thread loads 16 bytes at once, which are 8
#   elements of 16 bits. It finds the maximum of these 8 by itself and shrinks
#   its sum once for all of them. No thread waits here, either.
#
# Let's count what the first sweep costs in each case. The first two have tiles
# of 16384 and 4096 lanes and 512 threads, and the third has 8192 lanes and
# 1024 threads: these are the best that we found for each.

print("a pair for    powers per element  registers of a thread for pairs")
for owner, lanes_of_a_pair, pairs, threads in (
    ("the program", 16384, 1, 512),
    ("each lane", 1, 4096, 512),
    ("each thread", 8, 1024, 1024),
):
    powers = 1 + 1 / lanes_of_a_pair
    registers = 2 * max(pairs // threads, 1)
    print(f"{owner:12}{powers:20.3f}{registers:33}")

# %%
# Are powers expensive? An SM of an H100 computes 16 of them in a cycle. By its
# data sheet the GPU moves 3.35 TB in a second and has 132 SMs, which run up to
# 1.98 billion cycles in that time. So an SM moves 13 bytes in a cycle. The
# forward pass of softmax reads 2 bytes and writes 2 bytes for each element. So
# an SM gets 3.2 elements in a cycle, and has time for 5 powers of each.
# With a pair for each lane, the two sweeps need 3. An H200 has the same SMs
# and moves 4.8 TB in a second. There it has time for 3.5 powers of each
# element, so 3 of them nearly fill the time.
#
# What do idle lanes load?
# ------------------------
#
# A row is seldom as wide as a whole number of tiles. So some lanes of the last
# tile are *idle*: they have no element. What should they hold, so that they
# change nothing?
#
# The answer is :math:`-\infty`. It is never larger than another element, and
# its power :math:`e^{-\infty}` is 0. Models use it in the same way: what a
# token must not see gets :math:`-\infty` before the softmax.
#
# There is a trap in it. If a thread has seen nothing but :math:`-\infty`, its
# maximum is :math:`-\infty`, too, and :math:`-\infty - (-\infty)` is NaN, *not
# a number*. It would spoil the sum of the whole row.
# So our maximum begins at the lowest finite number instead of at
# :math:`-\infty`. Then a pair that has seen no finite number adds 0.

lowest = torch.finfo(torch.float32).min
for name, start in (("-inf", -torch.inf), ("the lowest number", lowest)):
    idle = torch.tensor([-torch.inf, -torch.inf])
    maximum = torch.clamp(idle.max(), min=start)
    total = (idle - maximum).exp().sum()
    print(f"maximum from {name}: sum {total:.0f}")

# %%
# Only a row in which every element is :math:`-\infty` still gives NaN, because
# its result is 0 / 0. PyTorch does the same. If you need zeros there,
# ``torch.nan_to_num`` makes them.
#
# The kernel
# ----------
#
# Here is the kernel with two sweeps. Its tile has ``PAIRS`` times ``EACH``
# lanes. We lay them out as a matrix whose rows have ``EACH`` lanes, and the
# lanes of such a row share a pair. All of them belong to one row of ``x``.
# The second sweep begins at the end of that row of ``x``. That is what the
# program has read last, and so a cache still has it: `Two sweeps
# <../layer-norm/07-two-sweeps.html>`_ explains this, and the eviction
# policies.
#
# With ``LOG`` the kernel computes :math:`\log y_j = x_j - m - \log s` instead,
# which is PyTorch's ``log_softmax``.

LOG2E = tl.constexpr(1.4426950408889634)  # the logarithm of e to base 2
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)


@triton.jit
def _exp(x):
    # A GPU has an instruction for powers of 2, and e is 2 to the LOG2E.
    return tl.exp2(x * LOG2E)


@triton.jit
def _softmax_fwd_streaming(
    x_ptr,  # (M, N), contiguous
    y_ptr,  # (M, N)
    N: tl.constexpr,  # columns
    PAIRS: tl.constexpr,  # pairs of a program: a power of two
    EACH: tl.constexpr,  # lanes that share a pair: a power of two
    LOG: tl.constexpr,  # whether y is the logarithm of softmax
):
    # 16-bit rows are summed in float32.
    DOUBLE: tl.constexpr = y_ptr.dtype.element_ty == tl.float64
    acc: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    TILE: tl.constexpr = PAIRS * EACH
    LAST: tl.constexpr = (N - 1) // TILE * TILE  # where the last tile begins

    # A program for each row. M * N may pass 2**31.
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * N
    y_ptr += row * N
    lane = tl.arange(0, PAIRS)[:, None] * EACH + tl.arange(0, EACH)[None, :]

    # First sweep: each pair sees all tiles, EACH of their elements at a time.
    m = tl.full((PAIRS,), LOWEST, acc)
    s = tl.zeros((PAIRS,), acc)
    for start in range(0, N, TILE):
        col = start + lane
        x = tl.load(
            x_ptr + col,
            mask=col < N,
            other=float("-inf"),
            eviction_policy="evict_last",  # the second sweep needs it again
        ).to(acc)
        new = tl.maximum(m, tl.max(x, axis=1))
        # What was summed so far shrinks, if the maximum is a new one. tl.exp:
        # m may be the lowest number, and LOG2E times it is not finite.
        s = s * tl.exp(m - new) + tl.sum(_exp(x - new[:, None]), axis=1)
        m = new

    # Put the pairs of the threads together. Here they wait for each other.
    top = tl.max(m, axis=0)
    s = tl.sum(s * tl.exp(m - top), axis=0)
    scale = 1 / s
    log = tl.log(s)

    # Second sweep, from the last tile to the first.
    for start in range(0, N, TILE):
        col = LAST - start + lane
        x = tl.load(
            x_ptr + col,
            mask=col < N,
            other=float("-inf"),
            eviction_policy="evict_first",  # nobody needs it any more
        ).to(acc)
        y = x - top - log if LOG else _exp(x - top) * scale
        tl.store(y_ptr + col, y, mask=col < N)


# %%
# How many threads does a program have?
# -------------------------------------
#
# We want many loads in flight, and programs that do not all wait at the same
# time. So we choose like this:
#
# - A thread has a pair for its 16 bytes. With ``EACH`` elements in 16 bytes,
#   and 32 threads in a warp, ``PAIRS`` is 32 times the number of warps.
# - A thread gets 64 bytes of the row, which are four loads in each sweep. That
#   makes 2048 bytes for a warp. A program has two warps at least, and 32 at
#   most, because it cannot have more. So in rows of more than 64 KB each
#   thread gets more.
# - An SM has room for 2048 threads, and it has 65536 registers. If a thread
#   has 32 of them, all 2048 can run: 32 programs with two warps, or two
#   programs with 32 warps, so that one can load while the other one waits.
#   ``maxnreg`` asks the compiler to use no more than 32. Sums in float64 need
#   twice the registers, so we do not ask for it there.

CUDA = ON_GPU and torch.version.hip is None  # AMD's compiler has no maxnreg


def plan_sweeps(N, itemsize):
    """Pairs, and warps of a program, for rows of N elements."""
    warps = triton.next_power_of_2(N * itemsize // 2048)
    warps = min(max(warps, 2), 32)
    plan = {"PAIRS": 32 * warps, "EACH": 16 // itemsize, "num_warps": warps}
    if CUDA and itemsize < 8:
        plan["maxnreg"] = 32
    return plan


def in_sweeps(x, plan, log=False, dtype=None):
    """Softmax over the last dimension, in two sweeps; x is contiguous."""
    y = torch.empty_like(x, dtype=dtype)
    M = x[..., :1].numel()  # the rows, even if they have no columns
    N = x.shape[-1]
    _softmax_fwd_streaming[(M,)](x_ptr=x, y_ptr=y, N=N, LOG=log, **plan)
    return y


# %%
# To compare the three owners of a pair, we launch the kernel with three tiles.

TILES = {
    "triton": plan_sweeps(65536, 2),
    "program": {"PAIRS": 1, "EACH": 16384, "num_warps": 16},
    "lane": {"PAIRS": 4096, "EACH": 1, "num_warps": 16},
}
x = torch.randn(2, 1000, device=DEVICE)
for plan in TILES.values():
    torch.testing.assert_close(in_sweeps(x, plan), F.softmax(x, dim=1))
    print(f"tiles of {plan['PAIRS']} × {plan['EACH']}: right")

# %%
# Which of them is the fastest?
# -----------------------------
#
# The clock and the ceiling are those of `Layer normalization, both passes
# <../layer-norm/01-layer-norm.html>`_. The ceiling is a copy: it reads as many
# bytes as our kernel, writes as many, and computes nothing.

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

# Scaffold: inputs, x and dy.


def inputs(M, N, dtype):
    torch.manual_seed(0)
    x = torch.randn(M, N, device=DEVICE)
    dy = torch.randn(M, N, device=DEVICE)
    return x.to(dtype).requires_grad_(), dy.to(dtype)


# %%

# Scaffold: a benchmark of pairs.


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=[16384, 24576, 40960, 49152, 65536],
        line_arg="provider",
        line_vals=["triton", "program", "lane", "copy"],
        line_names=[
            "A pair a thread",
            "A pair a program",
            "A pair a lane",
            "Copy",
        ],
        ylabel="GB/s",
        plot_name="softmax-pairs",
        args={"M": 4096, "dtype": torch.bfloat16, "mode": "forward"},
    )
)
def bench_pairs(M, N, dtype, mode, provider):
    """Device time: a CUDA graph of several calls, each with inputs of its own
    and after L2 was overwritten, less the graph without the calls; median, 20%
    and 80% quantiles. Copy: the best of six tiles."""
    if not ON_GPU:
        return 3 * [float("nan")]  # the interpreter cannot be timed
    if provider == "copy":  # x is read, y is written
        return ceiling(reads=1, writes=1, shape=(M, N), dtype=dtype)

    def prepare():
        x, _ = inputs(M, N, dtype)
        return lambda: in_sweeps(x, TILES[provider])

    return speed(2 * M * N * dtype.itemsize, prepare)


# %%

report(bench_pairs)

# %%
# **What the figure shows.**
# On the H200 a pair for each thread reaches 81% to 100% of the copy, a pair
# for the program reaches 70% to 90%, and a pair for each lane reaches 73% to
# 84%. At 40960 columns a pair for each thread reaches 99% and a pair for the
# program 76%, and at 65536 columns they reach 81% and 84%.
#
# Don't read much into the order at 65536 columns on this card. The kernel with
# a pair for each thread is measured once more further down, and reaches 88%
# there: where the caches hold only a part of the rows, its speed varies.
#
# On the H100 a pair for each thread reaches 89% to 100% of the copy, a pair
# for the program 89% to 99%, and a pair for each lane 74% to 96%. There the
# program's pair is ahead at 40960 columns, with 95% to 92%, and at 65536, with
# 93% to 89%.
#
# **Why.**
# Three things tell the lines apart. The first one is how many rows are under
# way at a time, because all of them should be in a cache until their second
# sweep is over. An SM has 65536 registers and runs as many programs as have
# room in them. Compiled for an H100, the kernel has 32 registers in a thread,
# and 64 with a pair for the program. So an SM has four programs of 512 threads
# with a pair for each lane, and two programs in the other cases. Its L1 cache
# has up to 256 KB, and the L2 cache has 50 MB for all 132 SMs.

print("         KB on an SM         MB on 132 SMs")
print("columns  2 rows  4 rows      2 rows  4 rows")
for N in (16384, 24576, 40960, 49152, 65536):
    row_bytes = 2 * N
    print(
        f"{N:7}{2 * row_bytes / 2**10:8.0f}{4 * row_bytes / 2**10:8.0f}"
        f"{132 * 2 * row_bytes / 1e6:12.1f}{132 * 4 * row_bytes / 1e6:8.1f}"
    )

# %%
# With two programs, L1 has room for the rows up to 49152 columns, where they
# take 192 KB. With four it has room for them up to 24576 columns, and at 65536
# columns not even L2 has, on either card: that of an H200 has 60 MB. This
# count does not explain everything: on the H200, at 49152 columns, a pair for
# each thread has fallen to 87% already. L1 is used for other things, too, and
# we have not measured what it keeps of the rows.
#
# The second thing is idle lanes. Where all threads wait at each tile, tiles
# should be large, so the tile with one pair for the program has 16384 lanes.
# At 24576 and 40960 columns the last tile of a row is half empty, but its
# powers take as long as those of a full one: a quarter and a sixth of all
# lanes are idle. At 16384 and 49152 columns all its tiles are full. On the
# H200 it reaches 90% and 86% there, and a pair for each thread 92% and 87%. So
# with tiles as large as that, waiting costs little. On the H100 it is ahead at
# 40960 columns, although a sixth of its lanes is idle, and we cannot explain
# that.
#
# The third thing is the time for powers. With a pair for each lane there are
# three of each element, which nearly fill the time, as we have computed.
#
# On the H200 a pair for each thread reaches only 92% at 16384 columns, because
# this figure has one tile for all widths, which is made for the widest ones.
# With half the warps, as ``plan_sweeps`` takes them there, it reaches 100% in
# the next figure.
#
# **What follows.**
# From here on, our kernel of two sweeps has a pair for each thread. On the
# H100 a pair for the program would do as well from 40960 columns on. `Softmax
# over a million columns <05-wide-softmax.html>`_ begins where this page ends:
# it counts what second sweeps read from DRAM, and does without them.
#
# One sweep: rows in registers
# ----------------------------
#
# Can we do without a second sweep?
#
# If a row fits into the registers of a program, it can stay there. The program
# loads all of it, finds the maximum, then the sum, and then the results. It
# needs no pair and shrinks no sum, because the maximum is there before the
# first power is computed.
#
# The number of lanes of a tile in Triton is a power of two, and a row may have
# any number of columns. So we keep a row as several *chunks*, tiles that
# follow each other, as in `Chunks instead of padding
# <../layer-norm/05-chunks.html>`_.
#
# Such a row can also *begin anywhere*. A thread loads 16 bytes at once only if
# they begin at a multiple of 16 bytes, which is a *group* of 8 elements of 16
# bits. If a matrix has 4097 columns, its second row begins with the second
# element of a group. We load such a row from the beginning of the group in
# which it starts to the end of the group in which it ends, and mask what
# belongs to other rows. `Rows that begin anywhere
# <../layer-norm/06-unaligned-rows.html>`_ explains it in detail.
#
# Here is a small example: three rows of 5 columns, in groups of 4.

# %%

# Drawing: three rows of five columns in memory, and groups of four.

plt.figure(
    "Three rows of 5 columns in memory, one after the other, and groups of 4. "
    "Row 1 begins with the second element of a group and ends with the second "
    "of another, so it is loaded from element 4 to element 11",
    figsize=(7.5, 1.9),
)
for place in range(16):
    color = "none"
    if place < 15:
        color = f"C{place // 5}"
    plt.barh(
        0,
        width=1,
        height=0.6,
        left=place,
        color=color,
        alpha=0.5,
        edgecolor="gray",
    )
    plt.text(place + 0.5, 0, str(place), ha="center", va="center")
for group in range(4):
    plt.plot(
        [4 * group + 0.1, 4 * group + 3.9], [-0.5, -0.5], "k", linewidth=2
    )
    plt.text(4 * group + 2, -0.95, f"group {group}", ha="center")
for row in range(3):
    plt.text(5 * row + 2.5, 0.45, f"row {row}", ha="center")
plt.annotate("", (12, 1.1), (4, 1.1), arrowprops={"arrowstyle": "<->"})
plt.text(8, 1.2, "what is loaded of row 1", ha="center")
plt.axis((-0.2, 16.2, -1.1, 1.6))
plt.axis("off")
plt.show()

# %%
# So the lanes of a row are of three kinds: some have no column of the row at
# all, some have one in a group that belongs to the row alone, and some have
# one in a group that is shared with a neighboring row. A load may read a
# shared group as a whole. A store must not write it as a whole, because that
# would change another row.
# ``_chunk`` says where the lanes of a chunk point, and of which kind they are.
# ``STEP`` is the number of lanes in a group, and 1 if all rows of the matrix
# begin with a group, so that nothing is shared.


@triton.jit
def _chunk(
    ptr,  # (M, N), contiguous
    c,  # the number of the chunk in its row
    row,  # (ROWS, 1): the rows of the program
    N: tl.constexpr,  # columns
    CHUNK: tl.constexpr,  # lanes of a chunk: a power of two
    STEP: tl.constexpr,  # lanes of a group
):
    """Pointers to the lanes of a chunk, and which lanes are in a group that
    has a column of the row, in a group that has nothing else, in the row."""
    first = tl.cast(row, tl.int64) * N  # M * N may pass 2**31
    start = first // STEP * STEP  # where the first group begins
    lane = c * CHUNK + tl.arange(0, CHUNK)[None, :]
    if (STEP == 1 or c > 0) and (c + 1) * CHUNK <= N:
        # All lanes have a column of the row and of no other one. The compiler
        # knows these masks, and leaves them out.
        every = tl.full((row.shape[0], CHUNK), 1, tl.int1)
        return ptr + start + lane, every, every, every
    begin = (first - start).to(tl.int32)  # the lane of column 0
    end = begin + N
    group = lane // STEP * STEP  # the first lane of the same group
    inside = (lane >= begin) & (lane < end)
    whole = (group >= begin) & (group + STEP <= end)
    if STEP == 1:
        whole = lane < end
    return ptr + start + lane, group < end, whole, inside


@triton.jit
def _load_row(
    ptr,  # (M, N), contiguous
    row,  # (ROWS, 1): the rows of the program
    N: tl.constexpr,  # columns
    CHUNK: tl.constexpr,  # lanes of a chunk: a power of two
    STEP: tl.constexpr,  # lanes of a group
    OTHER: tl.constexpr,  # what idle lanes get
):
    """The rows in chunks, in the type in which they are stored."""
    xs = ()
    # A row that begins in the middle of a group takes STEP - 1 lanes more.
    for c in tl.static_range((N + STEP - 2 + CHUNK) // CHUNK):
        at, some, _, inside = _chunk(ptr, c, row, N, CHUNK, STEP)
        x = tl.load(at, mask=some)
        other = tl.full((), OTHER, tl.float32).to(ptr.dtype.element_ty)
        xs += (tl.where(inside, x, other),)
    return xs


@triton.jit
def _store_chunk(
    ptr,  # (M, N), contiguous
    x,  # (ROWS, CHUNK)
    c,  # the number of the chunk in its row
    row,  # (ROWS, 1): the rows of the program
    N: tl.constexpr,  # columns
    STEP: tl.constexpr,  # lanes of a group
):
    at, _, whole, inside = _chunk(ptr, c, row, N, x.shape[1], STEP)
    # Groups that belong to the row alone: 16 bytes at once.
    tl.store(at, x, mask=whole)
    if STEP > 1:
        # The others, at both ends of the row: element by element.
        tl.store(at, x, mask=inside & (whole == 0))


# %%
# With these three functions the kernel is short. ``xs`` is a tuple of tiles,
# and the compiler unrolls each loop over it, so that all chunks can stay in
# registers. They stay there as they were loaded: two numbers of 16 bits take
# one register.
# Several narrow rows share a program, which has ``ROWS`` of them. If ``ROWS``
# does not divide the number of rows, the last program takes the last row
# several times, and stores the same numbers several times. That does no harm,
# and needs no mask.


@triton.jit
def _softmax_fwd(
    x_ptr,  # (M, N), contiguous
    y_ptr,  # (M, N)
    M,  # rows
    N: tl.constexpr,  # columns
    ROWS: tl.constexpr,  # rows of a program: a power of two
    CHUNK: tl.constexpr,  # lanes of a chunk: a power of two
    STEP: tl.constexpr,  # lanes of a group; 1 if all rows begin with one
    LOG: tl.constexpr,  # whether y is the logarithm of softmax
):
    DOUBLE: tl.constexpr = y_ptr.dtype.element_ty == tl.float64
    acc: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    row = tl.minimum(row, M - 1)

    xs = _load_row(x_ptr, row, N, CHUNK, STEP, float("-inf"))

    # The maximum: of the chunks, lane by lane, and then of the lanes.
    m = tl.full((ROWS, CHUNK), LOWEST, acc)
    for c in tl.static_range(len(xs)):
        m = tl.maximum(m, xs[c].to(acc))
    m = tl.max(m, axis=1)[:, None]

    # The sum of the powers, in the same way.
    s = tl.zeros((ROWS, CHUNK), acc)
    for c in tl.static_range(len(xs)):
        s += _exp(xs[c].to(acc) - m)
    s = tl.sum(s, axis=1)[:, None]
    scale = 1 / s
    log = tl.log(s)

    for c in tl.static_range(len(xs)):
        d = xs[c].to(acc) - m
        y = d - log if LOG else _exp(d) * scale
        _store_chunk(y_ptr, y, c, row, N, STEP)


# %%
# How is a row divided?
# ---------------------
#
# - ``step_of`` returns how many lanes a group has. If the number of columns is
#   a multiple of that, and the matrix begins with a group, then every row
#   does. In this case it returns 1.
# - A warp loads 512 bytes of a row at once, 16 for each thread, so a chunk has
#   512 bytes for each warp.
# - A warp holds up to 4096 bytes of a row, so a thread holds up to 128. In 16
#   bits that is 64 columns in 32 registers. A program has two warps at least.
# - Rows of up to 512 bytes would leave at least half of two warps idle. There
#   a program has 4 warps, and twice as many rows as they load at once.


def step_of(N, *matrices):
    """Lanes of a group; 1 where all rows begin with one, or none does."""
    step = 16 // max(matrix.itemsize for matrix in matrices)
    if N % step == 0 or torch.compiler.is_compiling():
        return 1
    # A view may begin in the middle of a group. Then groups would not help.
    if any(matrix.data_ptr() % 16 for matrix in matrices):
        return 1
    return step


def tile_of(N, itemsize, step):
    """How a row in registers is divided among the warps of a program."""
    row_bytes = N * itemsize
    warps = max(triton.next_power_of_2(triton.cdiv(row_bytes, 4096)), 2)
    if row_bytes <= 512:
        warps = 4
    lanes = 512 // itemsize * warps  # that a program loads at once
    chunk = min(lanes, triton.next_power_of_2(max(N + step - 1, 1)))
    rows = 1
    if row_bytes <= 512:
        rows = 2 * lanes // chunk
    return {"ROWS": rows, "CHUNK": chunk, "STEP": step, "num_warps": warps}


print("columns  rows  chunks      warps")
for N in (100, 256, 1000, 4096, 4097, 16384):
    step = 8
    if N % 8 == 0:
        step = 1
    tile = tile_of(N, 2, step)
    chunks = triton.cdiv(N + step - 1, tile["CHUNK"])
    print(
        f"{N:7}{tile['ROWS']:6}  {chunks} × {tile['CHUNK']:<8}"
        f"{tile['num_warps']:5}"
    )

# %%
# One sweep or two?
# -----------------
#
# Now we have two kernels, and each could do the other's work. To choose, we
# measure both at the same widths.
#
# What do we expect? Both read a row from memory once, if a cache helps the
# second sweep. One sweep has fewer instructions. Two sweeps need 32 registers
# in a thread, however wide a row is, so an SM always has its 2048 threads. One
# sweep needs more, because it holds the row: at 16384 columns a thread has 86
# registers, and an SM has room for two programs of 8 warps, which are 512
# threads. So narrow rows should go in one sweep, and wide ones in two.
# Rows that begin anywhere are another case: the kernel of two sweeps loads
# them element by element, 2 bytes at a time.
#
# ``plan_forward`` is the rule that came out of our measurements, and
# ``forward`` follows this rule, or a plan that it is given.


def plan_forward(N, itemsize, step=1):
    """A plan for one sweep, or for two."""
    row_bytes = N * itemsize
    in_one_sweep = 16384
    if step > 1:
        in_one_sweep = 32768
    if row_bytes <= in_one_sweep:
        return tile_of(N, itemsize, step)
    return plan_sweeps(N, itemsize)


def forward(x, log=False, dtype=None, plan=None):
    """Softmax over the last dimension; x is contiguous."""
    y = torch.empty_like(x, dtype=dtype)
    M = x[..., :1].numel()
    N = x.shape[-1]
    if plan is None:
        plan = plan_forward(N, y.itemsize, step_of(N, x, y))
    if "PAIRS" in plan:
        return in_sweeps(x, plan, log, dtype)
    grid = (triton.cdiv(M, plan["ROWS"]),)
    _softmax_fwd[grid](x_ptr=x, y_ptr=y, M=M, N=N, LOG=log, **plan)
    return y


# %%

# Scaffold: a benchmark of one sweep and two.


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=[256, 1024, 2048, 4096, 4097, 8192, 16384],
        x_log=True,
        line_arg="provider",
        line_vals=["one sweep", "two sweeps", "copy"],
        line_names=["One sweep", "Two sweeps", "Copy"],
        ylabel="GB/s",
        plot_name="softmax-sweeps",
        args={"M": 4096, "dtype": torch.bfloat16, "mode": "forward"},
    )
)
def bench_sweeps(M, N, dtype, mode, provider):
    """Device time: a CUDA graph of several calls, each with inputs of its own
    and after L2 was overwritten, less the graph without the calls; median, 20%
    and 80% quantiles. Copy: the best of six tiles."""
    if not ON_GPU:
        return 3 * [float("nan")]
    if provider == "copy":
        return ceiling(reads=1, writes=1, shape=(M, N), dtype=dtype)

    def prepare():
        x, _ = inputs(M, N, dtype)
        if provider == "one sweep":
            plan = tile_of(N, x.itemsize, step_of(N, x))
        else:
            plan = plan_sweeps(N, x.itemsize)
        return lambda: forward(x, plan=plan)

    return speed(2 * M * N * dtype.itemsize, prepare)


# %%

report(bench_sweeps)

# %%
# **What the figure shows.**
# On the H200, at 256, 1024, 2048, 4096, 8192 and 16384 columns, one sweep
# reaches 90%, 97%, 94%, 98%, 98% and 92% of the copy, and two sweeps reach
# 62%, 94%, 96%, 97%, 100% and 100%.
# At 4097 columns, where rows begin anywhere, one sweep reaches 95% and two
# reach 33%.
#
# **Why.**
# Rows of 256 columns have 512 bytes. In two sweeps a program has 64 threads,
# and half of them have nothing to load; in one sweep 8 rows share a program.
# At 16384 columns it is as we expected: two sweeps have four times as many
# threads on an SM. In between, both are close to the copy, and little is left
# to gain. At 4097 columns two sweeps load 2 bytes at a time.
#
# **What follows.**
# The rule takes one sweep up to 16 KB a row, which is 8192 columns of 16 bits,
# and two sweeps above. If rows begin anywhere, it takes one sweep up to 32 KB.
#
# Is that the best rule? We measured both kernels on an H100 and on an H200
# before we wrote it. On the H100 one sweep was ahead up to 8192 columns. On
# the H200, whose memory is faster, the lines crossed several times between
# 1024 and 8192 columns. With this rule we lose 3% at most at any of these
# widths, on either card. A rule for each card would be better, and a
# measurement better still: ``triton.autotune`` runs both kernels at the first
# call of each width and keeps the faster one. But that call takes longer, and
# which kernel is kept depends on what else the GPU was doing. For 3% we prefer
# a rule that everybody can read.
#
# How fast is the forward pass?
# -----------------------------
#
# Our kernel follows the rule now. We measure it beside PyTorch's softmax, the
# same function through ``torch.compile``, and two libraries, `Liger
# <https://github.com/linkedin/Liger-Kernel>`_ and `quack
# <https://github.com/Dao-AILab/quack>`_, where they can be imported. quack
# takes only rows that begin with a group.

# %%

# Scaffold: PyTorch, Liger and quack.

import functools
from importlib.util import find_spec


def pytorch(x):
    return F.softmax(x, dim=-1)


def liger(x):
    from liger_kernel.ops.softmax import LigerSoftmaxFunction

    return LigerSoftmaxFunction.apply(x)


def quack(x):
    from quack.softmax import softmax

    return softmax(x)


PEERS = {"torch": pytorch}
NAMES = {"torch": "PyTorch", "torch.compile": "torch.compile"}
if find_spec("liger_kernel"):
    PEERS["liger"] = liger
    NAMES["liger"] = "Liger"
if find_spec("quack"):
    PEERS["quack"] = quack
    NAMES["quack"] = "quack"


def refuses(provider, N):
    """quack would end in an error of the device where rows begin anywhere."""
    return provider == "quack" and N % 8 > 0


# %%

# Scaffold: the speed of either pass.

WIDTHS = [256, 1024, 2048, 4096, 4097, 8192, 16384, 24576, 49152, 65536]


def speed_of(function, M, N, dtype, mode):
    """GB/s of a forward or a backward pass: median, low, high."""

    def prepare():
        x, dy = inputs(M, N, dtype)
        if mode == "forward":
            return lambda: function(x)
        y = function(x)
        return lambda: torch.autograd.grad(y, x, dy, retain_graph=True)

    matrices = 2  # read x, write y
    if mode == "backward":
        matrices = 3  # read y and dy, write dx
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

# Scaffold: a benchmark of the forward pass.


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=WIDTHS,
        x_log=True,
        line_arg="provider",
        line_vals=["triton", *NAMES, "copy"],
        line_names=["Triton", *NAMES.values(), "Copy"],
        ylabel="GB/s",
        plot_name="softmax-forward",
        args={"M": 4096, "dtype": torch.bfloat16, "mode": "forward"},
    )
)
def bench_forward(M, N, dtype, mode, provider):
    """Device time: a CUDA graph of several calls, each with inputs of its own
    and after L2 was overwritten, less the graph without the calls; median, 20%
    and 80% quantiles. Copy: the best of six tiles."""
    if not ON_GPU or refuses(provider, N):
        return 3 * [float("nan")]
    if provider == "copy":
        return ceiling(reads=1, writes=1, shape=(M, N), dtype=dtype)
    if provider == "torch.compile":
        return compiled_speeds(M, N, dtype)[mode]
    if provider == "triton":
        return speed_of(forward, M, N, dtype, mode)
    return speed_of(PEERS[provider], M, N, dtype, mode)


# %%

report(bench_forward)

# %%
# **What the figure shows.**
# On the H200 our kernel reaches 90% of the copy at 256 columns, and 93% to
# 100% from 1024 to 24576. At 49152 columns it reaches 87%, and at 65536 88%.
# PyTorch reaches 26% to 64% over all widths. torch.compile reaches 86% at 1024
# columns, and 28% to 47% from 2048 on. At 4097 columns we reach 96%, PyTorch
# 31% and torch.compile 28%.
#
# Among the libraries, quack reaches 89% to 98% over the widths that it takes.
# Liger reaches 42% to 98% over all widths, and 42% at 4097 columns.
#
# On the H100 our kernel reaches 90% to 100% of the copy from 1024 to 24576
# columns, 96% at 49152 and 89% at 65536. PyTorch reaches 35% to 71%,
# torch.compile 36% to 93%, and quack 90% to 100%.
#
# **Why.**
# Up to 1024 columns torch.compile keeps a row in registers, as we do. From
# 2048 on the kernel that it writes makes two sweeps, with a pair for each
# lane. That takes two powers for each element in the first sweep, and it also
# checks for each element whether its maximum is finite. A pair for each lane
# alone does not explain its speed: with one, our kernel reached 73% to 84% on
# the H200 in the first figure. We have not looked into the rest, nor at the
# kernels of PyTorch and of the libraries. Rows of 4097 columns torch.compile
# loads 2 bytes at a time.
#
# At 49152 columns and above we see what the first figure showed: the rows
# under way barely fit into L1, or not at all.
#
# **What follows.**
# Wide rows have most to gain. `Softmax over a million columns
# <05-wide-softmax.html>`_ lets several programs share a wide row, so that each
# of them keeps its part and reads it once.
#
# Backward: from y alone
# ----------------------
#
# What changes in the loss, if one element of ``x`` changes a little?
#
# Training has already computed ``dy``: how much the loss grows for each
# :math:`y_j` that grows. We look for ``dx``, the same for :math:`x_j`.
# If :math:`x_j` grows by a small :math:`\delta`, then its power grows by the
# share :math:`\delta`, and so does its :math:`y_j`. But the sum of all powers
# grows, too, by the share :math:`y_j \, \delta`. So every :math:`y_k` loses
# this share of itself, :math:`y_j` among them. Together, the loss grows by
#
# .. math:: y_j \, \delta \, dy_j - \sum_k y_j \, \delta \, y_k \, dy_k
#
# and we divide it by :math:`\delta`:
#
# .. math:: dx_j = y_j \, (dy_j - c), \qquad c = \sum_k y_k \, dy_k
#
# Neither ``x`` nor its maximum stands in it. Only ``y`` has to be kept for the
# backward pass, and that is a result anyway.
# Let's try it on three numbers.

y = torch.tensor([0.1, 0.2, 0.7], dtype=torch.float64)
dy = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)
c = (y * dy).sum()
dx = y * (dy - c)
print(f"c {c:.2f}, dx", [round(number, 2) for number in dx.tolist()])

x = y.log().requires_grad_()  # whose softmax is y
expected = torch.autograd.grad(x.softmax(dim=0), x, dy)[0]
assert torch.allclose(dx, expected)

# %%
# In this example the loss grows with the first :math:`y_j` alone. So it also
# grows with the first :math:`x_j`, and ``dx`` is positive there. It falls when
# one of the others grows, because that takes away from the first share, and
# the larger one takes away more.
#
# What about ``log_softmax``, whose result is :math:`l_j = \log y_j`? If
# :math:`x_j` grows by :math:`\delta`, then :math:`l_j` grows by
# :math:`\delta`, and every :math:`l_k` loses :math:`y_j \, \delta`:
#
# .. math:: dx_j = dl_j - y_j \, c, \qquad y_j = e^{l_j}, \qquad
#    c = \sum_k dl_k
#
# Here, too, the result is all we need.

log_y = x.log_softmax(dim=0)
dx = dy - log_y.exp() * dy.sum()
expected = torch.autograd.grad(log_y, x, dy)[0]
assert torch.allclose(dx, expected)

# %%
# The backward kernel
# -------------------
#
# The backward pass is a sum over a row and then a formula for each element,
# like the forward pass. So its kernel looks like that of the forward pass. It
# has a row of ``y`` and a row of ``dy`` in registers, in chunks.
#
# There is one trap. Both rows are needed twice, as float32: for the sum, and
# for ``dx``. A good compiler converts them once and keeps the results. But a
# float32 takes a register, and two numbers of 16 bits share one. So the rows
# would take twice the registers, and fewer programs would fit on an SM.
# So the second use goes through ``_hidden``, which computes an exclusive or
# with 0. That changes no bit. But the 0 is an argument of the kernel, which
# the compiler does not know, so it has to convert again. `RMS norm
# <01-rms-norm.html>`_ does the same.


@triton.jit
def _hidden(x, zero):
    """x, which the compiler takes for something new; zero is 0."""
    if x.dtype.primitive_bitwidth == 16:
        bits = x.to(tl.int16, bitcast=True) ^ tl.cast(zero, tl.int16)
        x = bits.to(x.dtype, bitcast=True)
    return x


@triton.jit
def _softmax_bwd(
    y_ptr,  # (M, N), contiguous: the result of the forward pass
    dy_ptr,  # (M, N), contiguous
    dx_ptr,  # (M, N)
    zero,  # 0, but the compiler cannot assume that
    M,  # rows
    N: tl.constexpr,  # columns
    ROWS: tl.constexpr,  # rows of a program: a power of two
    CHUNK: tl.constexpr,  # lanes of a chunk: a power of two
    STEP: tl.constexpr,  # lanes of a group; 1 if all rows begin with one
    LOG: tl.constexpr,  # whether y is the logarithm of softmax
):
    DOUBLE: tl.constexpr = y_ptr.dtype.element_ty == tl.float64
    acc: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    row = tl.minimum(row, M - 1)

    # Idle lanes get 0, which adds nothing to the sum.
    ys = _load_row(y_ptr, row, N, CHUNK, STEP, 0.0)
    dys = _load_row(dy_ptr, row, N, CHUNK, STEP, 0.0)

    # The sum c of the formula.
    c = tl.zeros((ROWS, CHUNK), acc)
    for i in tl.static_range(len(ys)):
        dy = dys[i].to(acc)
        if LOG:
            c += dy
        else:
            c += ys[i].to(acc) * dy
    c = tl.sum(c, axis=1)[:, None]

    for i in tl.static_range(len(ys)):
        y = _hidden(ys[i], zero).to(acc)
        dy = _hidden(dys[i], zero).to(acc)
        dx = dy - _exp(y) * c if LOG else y * (dy - c)
        _store_chunk(dx_ptr, dx, i, row, N, STEP)


# %%
# A thread holds up to 64 columns of ``y`` and of ``dy``, in 64 registers. Rows
# of more than 64 KB would need more than 16 warps, or more registers. They
# take two sweeps, each of which reads both matrices.


@triton.jit
def _softmax_bwd_streaming(
    y_ptr,  # (M, N), contiguous: the result of the forward pass
    dy_ptr,  # (M, N), contiguous
    dx_ptr,  # (M, N)
    N: tl.constexpr,  # columns
    BLOCK: tl.constexpr,  # lanes of a tile: a power of two
    LOG: tl.constexpr,  # whether y is the logarithm of softmax
):
    DOUBLE: tl.constexpr = y_ptr.dtype.element_ty == tl.float64
    acc: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    LAST: tl.constexpr = (N - 1) // BLOCK * BLOCK  # where the last tile begins
    row = tl.program_id(0).to(tl.int64)
    y_ptr += row * N
    dy_ptr += row * N
    dx_ptr += row * N
    lane = tl.arange(0, BLOCK)

    # First sweep: the sum c, in each lane and then over all lanes.
    c = tl.zeros((BLOCK,), acc)
    for start in range(0, N, BLOCK):
        col = start + lane
        mask = col < N
        dy = tl.load(
            dy_ptr + col, mask=mask, other=0, eviction_policy="evict_last"
        ).to(acc)
        if LOG:
            c += dy
        else:
            y = tl.load(
                y_ptr + col, mask=mask, other=0, eviction_policy="evict_last"
            ).to(acc)
            c += y * dy
    c = tl.sum(c, axis=0)

    # Second sweep: dx, from the last tile to the first.
    for start in range(0, N, BLOCK):
        col = LAST - start + lane
        mask = col < N
        y = tl.load(y_ptr + col, mask=mask, eviction_policy="evict_first")
        dy = tl.load(dy_ptr + col, mask=mask, eviction_policy="evict_first")
        y = y.to(acc)
        dy = dy.to(acc)
        dx = dy - _exp(y) * c if LOG else y * (dy - c)
        tl.store(dx_ptr + col, dx, mask=mask)


def plan_backward(N, itemsize, step=1):
    """A plan for one sweep, or for two."""
    row_bytes = N * itemsize
    if row_bytes <= 65536:
        return tile_of(N, itemsize, step)
    lanes = 32768 // itemsize
    if row_bytes <= 98304:
        lanes = 16384 // itemsize
    return {"BLOCK": lanes, "num_warps": 32}


def backward(y, dy, log=False, dtype=None, plan=None):
    """dx from the result of the forward pass; both are contiguous."""
    dx = torch.empty_like(y, dtype=dtype)
    M = y[..., :1].numel()
    N = y.shape[-1]
    if plan is None:
        plan = plan_backward(N, y.itemsize, step_of(N, y, dy, dx))
    if "BLOCK" in plan:
        _softmax_bwd_streaming[(M,)](
            y_ptr=y, dy_ptr=dy, dx_ptr=dx, N=N, LOG=log, **plan
        )
        return dx
    grid = (triton.cdiv(M, plan["ROWS"]),)
    _softmax_bwd[grid](
        y_ptr=y, dy_ptr=dy, dx_ptr=dx, zero=0, M=M, N=N, LOG=log, **plan
    )
    return dx


# %%
# Two functions to train with
# ---------------------------
#
# ``softmax`` and ``log_softmax`` take what PyTorch's functions of these names
# take: ``dim``, the dimension along which the shares add up to 1, and
# ``dtype``, the type of the result.
#
# - If the dimension is not the last one, ``x`` is copied first.
# - With ``dtype=torch.float32``, the kernel reads 16 bits and writes float32,
#   so that ``x`` is not converted in a kernel of its own.
# - ``dx`` has the type of ``x`` again.


class Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, log, dtype):
        # Triton starts a kernel on the current GPU, wherever its tensors are.
        if x.is_cuda and x.get_device() != torch.cuda.current_device():
            raise ValueError(f"input is on {x.device}: not the current one")
        y = forward(x, log, dtype)
        ctx.save_for_backward(y)
        ctx.log = log
        ctx.dtype = x.dtype
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable  # no second derivatives
    def backward(ctx, dy):
        (y,) = ctx.saved_tensors
        dx = backward(y, dy.contiguous(), ctx.log, ctx.dtype)
        # One gradient for each argument of forward; log and dtype have none.
        return dx, None, None


def softmax(input, dim=-1, dtype=None):
    """Powers of e, over their sum along a dimension."""
    return along(input, dim, dtype, log=False)


def log_softmax(input, dim=-1, dtype=None):
    """The logarithm of softmax."""
    return along(input, dim, dtype, log=True)


def along(input, dim, dtype, log):
    """Either function: check the arguments, and make the dimension the last
    one of a contiguous tensor."""
    if dtype is None:
        dtype = input.dtype
    if not dtype.is_floating_point or dtype.itemsize == 1:
        raise TypeError(f"{dtype}: input or dtype is a float of 16 to 64 bits")
    if input.device.type != DEVICE.type:
        raise ValueError(f"input is on {input.device}: it goes on {DEVICE}")
    x = torch.atleast_1d(input)
    # The kernels widen a float, and PyTorch does all other conversions.
    if not x.is_floating_point() or not 2 <= x.itemsize < dtype.itemsize:
        x = x.to(dtype)
    x = x.movedim(dim, -1).contiguous()
    y = Softmax.apply(x, log, dtype)
    return y.movedim(-1, dim).reshape(input.shape)


# %%
# Is it right? We compare each element of ``y`` with PyTorch's softmax in
# float64, and each element of ``dx`` with the formula in float64. The formula
# gets the ``y`` that our forward pass has returned, because that is what our
# backward pass gets. An element may be off by the rounding of its type, and by
# a few roundings of float32 for the power and the sum.

# %%

# Scaffold: a check of both functions against float64.


def times_allowed(result, exact, size, dtype):
    """The largest error, in errors that are allowed; size is that of the
    numbers which an element is computed from."""
    error = (result.double() - exact).abs()
    # Triton's interpreter cuts off what a GPU rounds.
    rounding = exact.abs() * torch.finfo(dtype).eps
    arithmetic = size * torch.finfo(torch.float32).eps * 32
    return (error / (rounding + arithmetic)).max().item()


def check(M, N, dtype):
    """Compare each element of y and dx with float64, for both functions."""
    x, dy = inputs(M, N, dtype)
    exact_x = x.detach().double()
    exact_dy = dy.double()
    for function, theirs in (
        (softmax, F.softmax),
        (log_softmax, F.log_softmax),
    ):
        y = function(x, dim=1)
        (dx,) = torch.autograd.grad(y, x, dy)
        exact_y = theirs(exact_x, dim=1)
        returned = y.detach().double()
        if function is softmax:
            c = (returned * exact_dy).sum(dim=1, keepdim=True)
            exact_dx = returned * (exact_dy - c)
            size_of_y = exact_y
            size_of_dx = returned * (exact_dy.abs() + 1)
        else:
            c = exact_dy.sum(dim=1, keepdim=True)
            exact_dx = exact_dy - returned.exp() * c
            size_of_y = exact_y.abs() + exact_x.abs()
            # c is a sum whose terms may cancel; their sizes do not.
            terms = exact_dy.abs().sum(dim=1, keepdim=True)
            size_of_dx = exact_dy.abs() + returned.exp() * terms
        for name, worst in (
            ("y", times_allowed(y, exact_y, size_of_y, dtype)),
            ("dx", times_allowed(dx, exact_dx, size_of_dx, dtype)),
        ):
            assert worst <= 1, f"{name}: {worst:.1f} times the allowed error"
    print(f"{M} x {N}, {dtype}: each element of y and dx is right")


# %%

M = 2  # small, because the interpreter is slow
widths = (100, 257, 33001)
if ON_GPU:
    M = 37
    widths = (100, 8191, 100_003)
for N in widths:
    for dtype in (torch.bfloat16, torch.float32):
        check(M, N, dtype)

# %%
# How fast is the backward pass?
# ------------------------------
#
# It must read ``y`` and ``dy`` and write ``dx``. So here the copy reads two
# matrices and writes one.
#
# Up to 64 KB a row our rule takes one sweep. The line "Two sweeps" is our
# other kernel at those of the widths where its tiles are full. They have 2048
# lanes and 8 warps here, so that each thread loads 16 bytes at once.

# %%

# Scaffold: the backward pass in two sweeps.


def speed_in_two_sweeps(M, N, dtype):
    plan = {"BLOCK": 2048, "num_warps": 8}
    if N % plan["BLOCK"] > 0 or N * dtype.itemsize > 65536:
        return 3 * [float("nan")]

    def prepare():
        x, dy = inputs(M, N, dtype)
        y = forward(x)
        return lambda: backward(y, dy, plan=plan)

    return speed(3 * M * N * dtype.itemsize, prepare)


# %%

# Scaffold: a benchmark of the backward pass.


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=WIDTHS,
        x_log=True,
        line_arg="provider",
        line_vals=["triton", "two sweeps", *NAMES, "copy"],
        line_names=["Triton", "Two sweeps", *NAMES.values(), "Copy"],
        ylabel="GB/s",
        plot_name="softmax-backward",
        args={"M": 4096, "dtype": torch.bfloat16, "mode": "backward"},
    )
)
def bench_backward(M, N, dtype, mode, provider):
    """Device time: a CUDA graph of several calls, each with inputs of its own
    and after L2 was overwritten, less the graph without the calls; median, 20%
    and 80% quantiles. Copy: the best of six tiles."""
    if not ON_GPU or refuses(provider, N):
        return 3 * [float("nan")]
    if provider == "copy":
        return ceiling(reads=2, writes=1, shape=(M, N), dtype=dtype)
    if provider == "torch.compile":
        return compiled_speeds(M, N, dtype)[mode]
    if provider == "triton":
        return speed_of(softmax, M, N, dtype, mode)
    if provider == "two sweeps":
        return speed_in_two_sweeps(M, N, dtype)
    return speed_of(PEERS[provider], M, N, dtype, mode)


# %%

report(bench_backward)

# %%
# **What the figure shows.**
# On the H200 our kernel reaches 96% to 101% of the copy from 256 to 24576
# columns, 90% at 49152 and 94% at 65536. PyTorch reaches 33% to 60% over all
# widths. At 4097 columns we reach 96% and torch.compile reaches 52%.
#
# At 1024, 2048, 4096, 8192 and 16384 columns we reach 97%, 101%, 99%, 98% and
# 99%, and torch.compile reaches 98%, 106%, 105%, 102% and 101%.
# In two sweeps our own kernel reaches 108%, 103%, 95% and 97% at 2048, 4096,
# 8192 and 16384 columns.
#
# Backward, quack reaches 82% to 100% over the widths that it takes.
# Backward, Liger reaches 53% to 99% over all widths.
#
# On the H100 our kernel reaches 96% to 100% of the copy from 256 to 24576
# columns, 101% at 49152 and 97% at 65536. PyTorch reaches 37% to 64%,
# torch.compile 62% to 101%, and quack 86% to 101%.
#
# **Why.**
# Up to 32768 columns our kernel reads each number once, as the copy does, and
# writes each result once. A line near 100% has little left to gain. We have
# not looked at PyTorch's kernels.
#
# Can a kernel be faster than the copy? The copy is the best of six tiles, and
# not the fastest kernel that there can be. torch.compile writes two sweeps
# from 2048 columns on, whose first sweep asks the caches to keep what it
# loads. The line "Two sweeps" shows what our kernel makes of the same idea: it
# is ahead of the copy at 2048 and 4096 columns, and behind it at 8192 and
# 16384. In our trials one sweep became as fast as torch.compile at all of
# these widths as soon as its loads had the same hint, and so did the copy. So
# it is the hint that makes the difference, and not the number of sweeps.
#
# Above 32768 columns we have two sweeps of two matrices. At 49152 columns a
# row of both takes 192 KB, which still fits into the L1 cache of an SM, if
# only one program runs there. At 65536 columns it takes 256 KB, and L2 has to
# help. By this count the wider rows should be slower. They are faster, and we
# do not know why.
#
# **What follows.**
# Our kernel of one sweep is near the copy already. Before we use the hint, we
# ask what it gains where another kernel follows.
#
# Does the hint help a model?
# ---------------------------
#
# Our clock stops when ``dx`` is written. A model goes on: its next kernel
# reads ``dx``. What L2 still has of it need not come from memory then. But a
# kernel that asks L2 to keep ``y`` and ``dy``, which nobody reads again,
# leaves less room for ``dx``.
#
# So we let a copy of ``dx`` follow each backward pass, and time both together.
# They read three matrices and write two.

# %%

# Scaffold: a benchmark of the backward pass and what follows it.


def speed_with_next(M, N, dtype, plan):
    """GB/s of a backward pass and a copy of dx: median, low, high."""

    def prepare():
        x, dy = inputs(M, N, dtype)
        y = forward(x)
        target = torch.empty_like(y)

        def both():
            dx = backward(y, dy, plan=plan)
            _move[(triton.cdiv(M * N, 4096),)](
                source_ptr=dx,
                target_ptr=target,
                count=M * N,
                READS=1,
                WRITES=1,
                BLOCK_SIZE=4096,
                num_warps=4,
            )
            return dx

        return both

    return speed(5 * M * N * dtype.itemsize, prepare)


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=[2048, 4096, 8192, 16384],
        x_log=True,
        line_arg="provider",
        line_vals=["triton", "two sweeps", "copy"],
        line_names=["Triton", "Two sweeps", "Copy"],
        ylabel="GB/s",
        plot_name="softmax-backward-next",
        args={"M": 4096, "dtype": torch.bfloat16, "mode": "backward"},
    )
)
def bench_next(M, N, dtype, mode, provider):
    """A backward pass and a copy of dx. Device time: a CUDA graph of several
    calls, each with inputs of its own and after L2 was overwritten, less the
    graph without the calls; median, 20% and 80% quantiles. Copy: the best of
    six tiles."""
    if not ON_GPU:
        return 3 * [float("nan")]
    if provider == "copy":
        return ceiling(reads=2, writes=1, shape=(M, N), dtype=dtype)
    plan = None
    if provider == "two sweeps":
        plan = {"BLOCK": 2048, "num_warps": 8}
    return speed_with_next(M, N, dtype, plan)


# %%

report(bench_next)

# %%
# **What the figure shows.**
# On the H200, at 2048, 4096, 8192 and 16384 columns, one sweep and its copy
# reach 116%, 104%, 98% and 97% of the speed of a copy alone, and two sweeps
# and their copy reach 117%, 106%, 96% and 97%. In time, two sweeps alone take
# 0.9 µs less than one sweep at 2048 columns, and 1.2 µs less at 4096. Together
# with the copy they take 0.2 and 1.0 µs less.
#
# **Why.**
# At 2048 columns ``dx`` has 16.8 MB, and at 4096 it has 33.6 MB. L2 has 60 MB,
# so the copy finds most of ``dx`` there, and both lines lie above 100%. The
# hint was ahead because it left more of ``dx`` to be written after the clock
# had stopped, or because it kept ``y`` and ``dy`` out of the way of ``dx``. We
# cannot tell which. But a part of what it gains is gone when another kernel
# reads ``dx``: most of it at 2048 columns, and less at 4096.
#
# **What follows.**
# We stay with one sweep up to 64 KB, although that costs about a microsecond
# at 4096 columns. One sweep asks nothing of the caches, so we expect it to be
# as fast in a model, where other tensors need L2, too. We have not measured
# that.
#
# Where PyTorch or a library is better
# ------------------------------------
#
# - **torch.compile is ahead in the backward pass** from 1024 to 16384 columns:
#   its speed is up to 1.07 times ours from 1024 to 24576 columns on the H200.
# - **quack is ahead where rows are wide.** At 49152 and 65536 columns it
#   reaches 98% and 98% of the copy forward on the H200, and we reach 87% and
#   88%. Backward it is ahead at 24576 and 49152 columns: it reaches 100% and
#   100%, and we reach 97% and 90%. At 65536 columns it reaches 82%, and we
#   94%. On the H100 quack reaches 100% and 99% forward, and we reach 96% and
#   89%. Backward it is at most 1% ahead there. Several SMs hold a row together
#   in its kernel, as a *cluster*, and read it once. `Softmax over a million
#   columns <05-wide-softmax.html>`_ has more about it.
# - **Liger, backward at 24576 columns,** reaches 99% of the copy on the H200,
#   and we 97%. On the H100, torch.compile and Liger are ahead of us by 2%
#   there.
# - **PyTorch can do more.** It has second derivatives, takes any dimension
#   without a copy, and does not compile a kernel for each new width.
# - **torch.compile can fuse** a softmax with a mask before it, or with dropout
#   after it.
#
# Exercises
# ---------
#
# **Exercise 1: the logarithm of a sum.**
# ``torch.logsumexp`` is :math:`m + \log s`, one number for each row. It needs
# a single sweep and no second one. The kernel below goes through a row tile by
# tile, with one pair for the program. It is wrong for most rows. Correct it.
#
# **Hint 1.** For which rows is it right? Try one whose largest element is
# among the first 64.
#
# **Hint 2.** When a tile has a new maximum, what were the powers before it
# computed with?
#
# **Hint 3.** The sum shrinks by :math:`e^{m_{\mathrm{old}} -
# m_{\mathrm{new}}}`, before the powers of the tile are added.


@triton.jit
def _logsumexp(
    x_ptr,  # (rows, N), contiguous
    y_ptr,  # (rows,)
    N: tl.constexpr,  # columns
    BLOCK: tl.constexpr,  # lanes of a tile: a power of two
):
    x_ptr += tl.program_id(0) * N
    m = tl.full((), LOWEST, tl.float32)
    s = tl.zeros((), tl.float32)
    for start in range(0, N, BLOCK):
        col = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + col, mask=col < N, other=float("-inf"))
        m = tl.maximum(m, tl.max(x, axis=0))
        s += tl.sum(_exp(x - m), axis=0)  # to do
    tl.store(y_ptr + tl.program_id(0), m + tl.log(s))


def exercise_1(kernel):
    """Print the largest error over three rows, and whether it is small."""
    x = torch.randn(3, 1000, device=DEVICE)
    x[1] = torch.linspace(-50, 50, 1000)  # each tile has a new maximum
    x[2] += 1000
    y = torch.empty(3, device=DEVICE)
    kernel[(3,)](x_ptr=x, y_ptr=y, N=1000, BLOCK=64)
    expected = torch.logsumexp(x.double(), dim=1)
    error = (y - expected).abs().max().item()
    print(f"exercise 1: largest error {error:.0e}")
    return error < 1e-3


exercise_1(_logsumexp)

# %%

# Solution 1


@triton.jit
def _logsumexp_1(x_ptr, y_ptr, N: tl.constexpr, BLOCK: tl.constexpr):
    x_ptr += tl.program_id(0) * N
    m = tl.full((), LOWEST, tl.float32)
    s = tl.zeros((), tl.float32)
    for start in range(0, N, BLOCK):
        col = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + col, mask=col < N, other=float("-inf"))
        new = tl.maximum(m, tl.max(x, axis=0))
        s = s * tl.exp(m - new) + tl.sum(_exp(x - new), axis=0)
        m = new
    tl.store(y_ptr + tl.program_id(0), m + tl.log(s))


assert exercise_1(_logsumexp_1)

# %%
# **Exercise 2: a constant in dy.**
# If the same constant is added to all of ``dy``, ``dx`` should not change: the
# shares add up to 1 whatever ``x`` is, so a loss that grows equally with all
# of them does not depend on ``x``. In 16 bits ``dx`` does change, because the
# rounded shares do not add up to 1. Make the formula right for shares with any
# sum.
#
# **Hint 1.** Let all ``dy`` be 100. What is ``c``, if the shares add up to
# 1.01? What should it be?
#
# **Hint 2.** ``c`` should be the mean of ``dy``, weighted by the shares. What
# does one divide by in a weighted mean?


def gradient(y, dy):
    c = (y * dy).sum(dim=1, keepdim=True)  # to do
    return y * (dy - c)


def exercise_2(function):
    """Print how much of dx a constant changes, and whether it is little."""
    torch.manual_seed(0)
    x = torch.randn(3, 50)
    dy = torch.randn(3, 50).double()
    y = F.softmax(x, dim=1).bfloat16().double()
    dx = function(y, dy)
    change = function(y, dy + 100) - dx
    share = (change.norm() / dx.norm()).item()
    print(f"exercise 2: change of dx {share:.0e}")
    return share < 1e-4


exercise_2(gradient)

# %%

# Solution 2


def gradient_2(y, dy):
    c = (y * dy).sum(dim=1, keepdim=True) / y.sum(dim=1, keepdim=True)
    return y * (dy - c)


assert exercise_2(gradient_2)

# %%
# What we learned
# ---------------
#
# These are the designs of this page, what each reaches of a copy on the H200,
# and why.
#
# Forward, in two sweeps, at 40960 columns:
#
# - **A pair for the program** reaches 76%. All threads wait at each tile, so
#   tiles are large, and a sixth of the lanes is idle here.
# - **A pair for each lane** reaches 79%. It computes three powers of each
#   element.
# - **A pair for each thread** reaches 99%. Threads wait once in a row.
#
# Forward, at 4096, 4097 and 16384 columns:
#
# - **One sweep, a row in registers**, reaches 98%, 95% and 92%.
# - **Two sweeps** reach 97%, 33% and 100%. They need few registers, and a
#   cache.
#
# Backward, at 4096, 16384 and 65536 columns:
#
# - **Ours** reaches 99%, 99% and 94%: one sweep up to 32768 columns, and two
#   above.
# - **PyTorch** reaches 50%, 50% and 42%, and **torch.compile** 105%, 101% and
#   61%.
#
# And for kernels in general:
#
# - What depends on a number that is not known yet can often be computed with a
#   guess, and be corrected by a factor when the number changes.
# - Give a thread what it can do alone. If all threads wait for each other at
#   every tile, tiles have to be large, and large tiles have idle lanes.
# - Count registers: with half of them, twice as many threads can run.
# - Look for the formula of the backward pass that needs the least. Here it
#   needs a result that is kept anyway.
# - Measure both kernels before you write the rule, on each card that matters.
#
# **Next:** `Cross-entropy <04-cross-entropy.html>`_ takes the logarithm of a
# softmax, and keeps two numbers for each row.
