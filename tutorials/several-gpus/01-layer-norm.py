r"""
Layer norm over several GPUs
============================

What must GPUs tell each other when they share a layer norm?
Two numbers for each row if the columns are spread over the GPUs, two numbers
for each column if the rows are, and nothing else.

Large models do not fit on one GPU. They are trained with the columns of a
layer spread over GPUs (*tensor parallel*), with its rows spread over them
(*data parallel* or *sequence parallel*), or with both.
On this page we build a layer norm for either case, with both passes, and
measure how much time the exchange takes.

**If you have one GPU, or none,** you can run all of this page: two processes
on the CPU stand for two GPUs, and they exchange what GPUs would. What you take
away is of use on one GPU, too. Merging the mean and the variance of two parts
works in the same way for two chunks of a row. Two of the figures are of a
single GPU: what it costs to cut a kernel in two, and how many warps a wide
row should have. And you will know what becomes of a model's
layer norm as soon as somebody says "tensor parallel".

**What you will learn**

- How to merge mean and variance of parts of a row without losing digits.
- How to cut a kernel in two where it needs a number from another GPU, and what
  this costs even if the other GPU answers at once.
- How to send as little as possible: what stays, what is exchanged, and when
  one exchange is better than two.
- How to start processes that talk to each other, from a script or from a
  notebook, and how to time what they do together.
- What it costs to find out that two processes were called with different
  arguments, and what happens if nobody does.

**What you need:** the formulas of `Layer normalization, both passes
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
# Each GPU has a process of its own, which is called a *rank*. Without GPUs we
# start two ranks, which share the CPU.
#
# PyTorch sends tensors from rank to rank with `torch.distributed
# <https://docs.pytorch.org/docs/stable/distributed.html>`_. On GPUs the
# library *NCCL* does the work, and on CPUs the library *gloo*. The calls are
# the same.

# %%

# Scaffold: to become a rank, here or under torchrun.

import contextlib
import datetime
import sys

import torch.distributed as dist

TORCHRUN = dist.is_torchelastic_launched()
WORLD = int(os.environ.get("WORLD_SIZE") or torch.cuda.device_count() or 2)
PATIENCE = datetime.timedelta(seconds=60)


def keep_to_own_cores(rank):
    """Give each rank its part of the CPU's cores, as launchers do."""
    if not hasattr(os, "sched_setaffinity"):
        return  # only Linux can
    cores = sorted(os.sched_getaffinity(0))
    share = len(cores) // WORLD
    if share >= 2:
        with contextlib.suppress(OSError):  # of a container that forbids it
            os.sched_setaffinity(0, cores[rank * share : (rank + 1) * share])


def join(rank, place="env://"):
    """Make this process a rank; who waits for a lost one stops, too."""
    keep_to_own_cores(rank)
    device = None
    backend = "gloo"
    if ON_GPU:
        device = torch.device("cuda", rank)
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(device)
        torch.cuda.set_stream(torch.cuda.Stream())
    dist.init_process_group(
        backend=backend,
        init_method=place,
        timeout=PATIENCE,
        world_size=WORLD,
        rank=rank,
        device_id=device,
    )


if TORCHRUN:
    join(int(os.environ["RANK"]))
    if dist.get_rank() > 0:  # rank 0 speaks for all
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115

# %%
# Who holds what?
# ---------------
#
# Take a row of 8 columns, and spread it over two ranks: 1, 3, 1, 3 are on rank
# 0, and 5, 7, 5, 7 are on rank 1. For the layer norm of this row both ranks
# need the mean of all 8 numbers, which is 4, and their variance, which is 5.
# Neither of them has it. But each can tell the other two numbers about its own
# four: their mean, and *M2*, the sum of their squared distances from it.

# %%

# Drawing: who holds what of a matrix, by columns and by rows.

plt.figure(
    "Above, a row of 8 columns on two ranks: 1, 3, 1, 3 with mean 2 and M2 4, "
    "and 5, 7, 5, 7 with mean 6 and M2 4; they exchange these two numbers. "
    "Below, four rows on two ranks, which exchange two sums for each column",
    figsize=(7.5, 4.6),
)


def draw_cells(values, left, top, color):
    for column, value in enumerate(values):
        plt.barh(
            top, 1, height=0.8, left=left + column, color=color, alpha=0.4,
            edgecolor="k",
        )  # fmt: skip
        plt.text(left + column + 0.5, top, value, ha="center", va="center")


def draw_exchange(start, end):
    arrow = {"arrowstyle": "<->", "lw": 2}
    plt.annotate("", end, start, arrowprops=arrow)


draw_cells([1, 3, 1, 3], left=0, top=5, color="C0")
draw_cells([5, 7, 5, 7], left=6, top=5, color="C1")
plt.text(2, 5.7, "rank 0: columns 0 to 3", ha="center")
plt.text(8, 5.7, "rank 1: columns 4 to 7", ha="center")
plt.text(2, 4.2, "mean 2, M2 4", ha="center", va="center")
plt.text(8, 4.2, "mean 6, M2 4", ha="center", va="center")
draw_exchange((3.5, 4.2), (6.5, 4.2))
plt.text(5, 3.75, "2 numbers a row", ha="center", va="center")

for top in (2.2, 1.4):
    draw_cells(4 * [""], left=0, top=top, color="C0")
    draw_cells(4 * [""], left=6, top=top, color="C1")
plt.text(2, 2.9, "rank 0: rows 0 and 1", ha="center")
plt.text(8, 2.9, "rank 1: rows 2 and 3", ha="center")
plt.text(2, 0.6, "dw, db of 2 rows", ha="center", va="center")
plt.text(8, 0.6, "dw, db of 2 rows", ha="center", va="center")
draw_exchange((3.7, 0.6), (6.3, 0.6))
plt.text(5, 0.15, "2 numbers a column", ha="center", va="center")
plt.ylim(-0.2, 6.2)
plt.axis("off")
plt.show()

# %%
# With the **columns** spread, a rank holds its columns of ``x``, ``w`` and
# ``b``, and it makes its columns of ``y``, ``dx``, ``dw`` and ``db``. Only
# what is summed over a row needs the others: in both passes that is two
# numbers a row.
#
# With the **rows** spread, a rank holds whole rows of ``x``, and all of ``w``
# and ``b``. The forward pass and ``dx`` need nobody. Only what is summed over
# all rows does: ``dw`` and ``db``, which are two numbers a column.
#
# How much does that save? Here is what a rank receives from the other one in
# the forward pass of 4096 rows in 16 bits, if whole rows are gathered and if
# two numbers a row are sent:

print("columns  KB of a gathered matrix  KB of two numbers a row")
for N in (2048, 4096, 8192, 16384, 32768):
    gathered_bytes = 4096 * (N // 2) * 2
    exchanged_bytes = 4096 * 2 * 4  # two numbers of 32 bits
    print(f"{N:7}{gathered_bytes // 1024:25}{exchanged_bytes // 1024:25}")

# %%
# Columns: a part of each row
# ---------------------------
#
# What do two ranks tell each other, so that both know mean and variance?
#
# On paper a sum and a sum of squares would do: the variance is the mean of the
# squares minus the square of the mean. In 32 bits they do not. If the mean is
# 10000 and the variance is 1, both terms are about 100000000. Neighboring
# numbers of 32 bits are 8 apart there, and nothing is left of the 1:

large = torch.tensor([9999.0, 10001, 9999, 10001])
by_squares = large.square().mean() - large.mean().square()
print("variance:", large.var(correction=0).item())
print("from sums of squares:", by_squares.item())

# %%
# So a rank tells its mean, and *M2*, the sum of the squared distances from
# *its own* mean. Such distances are small numbers, which keep their digits.
# How are two such pairs merged? In our example rank 0 has the mean 2 and M2 =
# 1 + 1 + 1 + 1 = 4, and rank 1 has the mean 6 and M2 = 4.
#
# - The means are 4 apart, and both ranks have the same number of columns, so
#   the mean of all is half way: 2 + 4 · 4/8 = 4.
# - Both ranks measured distances from a mean that is 2 away from 4. For each
#   of the 8 columns that leaves out 2² = 4, so 32 in all, or, by the formula
#   below, 4² · 4 · 4 / 8. So M2 of all is 4 + 4 + 32 = 40.
# - The variance is 40 / 8 = 5.
#
# In general, for ranks :math:`a` and :math:`b` with :math:`n_a` and
# :math:`n_b` columns of :math:`n`:
#
# .. math:: d = \mu_b - \mu_a, \qquad \mu = \mu_a + d \, \frac{n_b}{n}, \qquad
#    M_2 = M_{2,a} + M_{2,b} + d^2 \, \frac{n_a n_b}{n}
#
# The result is again a mean and an M2, so a third rank is merged with it in
# the same way.

row = torch.tensor([1.0, 3, 1, 3, 5, 7, 5, 7])
a = row[:4]
b = row[4:]
m2_a = (a - a.mean()).square().sum()
m2_b = (b - b.mean()).square().sum()
d = b.mean() - a.mean()
merged_mean = a.mean() + d * 4 / 8
merged_m2 = m2_a + m2_b + d * d * 4 * 4 / 8
print("merged:", merged_mean.item(), merged_m2.item() / 8)
print("of the whole row:", row.mean().item(), row.var(correction=0).item())

# %%
# Two kernels in place of one
# ---------------------------
#
# With NCCL the exchange happens between kernels, and not inside one. So the
# first kernel finds mean and M2 of our part of each row. Then the
# ranks exchange these. The second kernel merges them and computes ``y``.


@triton.jit
def _load(
    ptr,  # a matrix with N columns, contiguous; or w or b, as row 0
    row,
    N: tl.constexpr,  # columns that are here
    BLOCK: tl.constexpr,  # tile width: a power of two, at least N
):
    """A row in float32; 0 in lanes that hold no column."""
    cols = tl.arange(0, BLOCK)
    offsets = tl.cast(row, tl.int64) * N + cols  # M * N may pass 2**31
    x = tl.load(ptr + offsets, mask=cols < N, other=0)
    return x.to(tl.float32)


@triton.jit
def _mean_m2(x, N: tl.constexpr, BLOCK: tl.constexpr):
    """Mean of a row, and the sum of squared distances from it."""
    # A rank may have no columns at all. It must not divide by 0.
    mean = tl.sum(x) / max(N, 1)
    d = tl.where(tl.arange(0, BLOCK) < N, x - mean, 0)
    # The distances from a mean add up to 0. Ours do not quite, because the sum
    # and the division were rounded, and that tells us by how much.
    mean += tl.sum(d) / max(N, 1)
    return mean, tl.sum(d * d)


@triton.jit
def _part(
    x_ptr,  # (M, N), contiguous: our columns
    part_ptr,  # (2, M): mean and M2 of our part of each row
    M,  # rows
    N: tl.constexpr,  # columns that are here
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    x = _load(x_ptr, row, N, BLOCK)
    mean, m2 = _mean_m2(x, N, BLOCK)
    # First all means, then all M2: one piece of memory that can be sent.
    tl.store(part_ptr + row, mean)
    tl.store(part_ptr + M + row, m2)


# %%
# The second kernel loads ``x`` again. It can also do the whole work where a
# rank has whole rows, and there is nothing to merge. Then ``parts_ptr`` is
# None, which the compiler knows, so the other branch is not even compiled.


@triton.jit
def _forward(
    x_ptr,  # (M, N), contiguous
    w_ptr,  # (N,)
    b_ptr,  # (N,)
    y_ptr,  # (M, N)
    stats_ptr,  # (2, M): mean and rstd, saved for the backward pass
    parts_ptr,  # (ranks, 2, M): what _part found; None if rows are whole
    M,  # rows
    eps: tl.constexpr,  # added to the variance
    N: tl.constexpr,  # columns that are here
    COUNTS: tl.constexpr,  # columns of each rank, as a tuple
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    x = _load(x_ptr, row, N, BLOCK)

    n = 0  # columns that we have merged so far
    mean = 0.0
    m2 = 0.0
    if parts_ptr is None:
        n = N
        mean, m2 = _mean_m2(x, N, BLOCK)
    else:
        # Merge rank after rank. All ranks do it in the same order, so all have
        # the same bits. COUNTS is known when we compile: these are constants.
        for rank in tl.static_range(len(COUNTS)):
            # The share of this rank in the columns so far, of which there may
            # be none.
            share = COUNTS[rank] / max(n + COUNTS[rank], 1)
            part_ptr = parts_ptr + 2 * rank * M + row
            d = tl.load(part_ptr) - mean
            mean += d * share
            m2 += tl.load(part_ptr + M) + d * d * n * share
            n += COUNTS[rank]

    rstd = 1 / tl.sqrt(m2 / n + eps)
    tl.store(stats_ptr + row, mean)
    tl.store(stats_ptr + M + row, rstd)

    w = _load(w_ptr, 0, N, BLOCK)
    b = _load(b_ptr, 0, N, BLOCK)
    y = (x - mean) * rstd * w + b
    cols = tl.arange(0, BLOCK)
    offsets = tl.cast(row, tl.int64) * N + cols
    tl.store(y_ptr + offsets, y, mask=cols < N)


# %%
# Now the function that launches both kernels. Each rank needs the parts of all
# ranks. The exchange that does this is called *all-gather*: afterwards each
# rank has what all ranks had. Here that is 8 bytes a row from each rank.

# PyTorch 2.13 has given this function a new name.
GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


def gathered(tensor, group):
    """The tensors of all ranks of a group, as one with a dimension more."""
    tensors = tensor.new_empty(group.size(), *tensor.shape)
    GATHER(tensors.view(-1), tensor.view(-1), group)
    return tensors


def lanes(N):
    """The lanes of a row, and the warps that share them."""
    block = max(triton.next_power_of_2(N), 16)
    if block <= 4096:
        warps = 4
    elif block <= 16384:
        # Sixteen warps of 16384 lanes leave no registers for a second row on
        # the same SM, and half as much would be in flight.
        warps = 8
    else:
        warps = 16
    return {"BLOCK": block, "num_warps": warps}


def forward(x, w, b, eps, counts=None, group=None, plan=None):
    """y, and stats: mean and rstd of each row, as (2, M).

    counts, the columns of each rank, says that a row is spread over the ranks
    of the group. Without it, rows are whole. With counts and without a group,
    there is one rank, which runs both kernels and sends nothing.
    """
    M, N = x.shape
    if plan is None:
        plan = lanes(N)
    parts = None
    if counts is not None:
        parts = torch.empty(2, M, device=x.device)
        _part[(M,)](x_ptr=x, part_ptr=parts, M=M, N=N, **plan)
        if group is not None:
            parts = gathered(parts, group)
    y = torch.empty_like(x)
    stats = torch.empty(2, M, device=x.device)
    _forward[(M,)](
        x_ptr=x,
        w_ptr=w,
        b_ptr=b,
        y_ptr=y,
        stats_ptr=stats,
        parts_ptr=parts,
        M=M,
        eps=eps,
        N=N,
        COUNTS=counts,
        **plan,
    )
    return y, stats


# Two kernels on one rank, and one kernel.
x = torch.tensor([[1.0, 3, 1, 3, 5, 7, 5, 7]], device=DEVICE)
w = torch.ones(8, device=DEVICE)
b = torch.zeros(8, device=DEVICE)
y_two, stats = forward(x, w, b, 1e-5, counts=(8,))
y_one, _ = forward(x, w, b, 1e-5)
print("mean, 1 / standard deviation:", stats.flatten().tolist())
print("the same y:", torch.allclose(y_two, y_one))

# %%
# What do two kernels cost?
# -------------------------
#
# Even if no rank had to wait for another one, we would pay for the cut: ``x``
# is loaded twice. ``ncu``, a profiler, counts the bytes that come from
# memory, on one GPU. We divide them by the bytes of ``x``.

# %%

# Scaffold: bytes from memory, a benchmark.


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=[512, 1024, 2048, 4096, 8192, 16384],
        x_log=True,
        line_arg="provider",
        line_vals=["triton", "two"],
        line_names=["One kernel", "Two kernels"],
        ylabel="bytes of DRAM per byte counted",
        plot_name="layer-norm-parts-dram",
        args={
            "M": 4096,
            "dtype": torch.bfloat16,
            "mode": "forward",
            "counter": "dram__bytes_read.sum",
        },
    )
)
def bench_traffic(M, N, dtype, mode, counter, provider):
    """Bytes that DRAM delivers on one GPU, over the bytes of x."""
    if ON_GPU:
        x = torch.randn(M, N, device=DEVICE, dtype=dtype)
        counts = None
        if provider == "two":
            counts = (N,)
        forward(x, x, x, 1e-5, counts)  # compiles
        with torch.cuda.nvtx.range(f"counted {provider} {N} per {x.nbytes}"):
            forward(x, x, x, 1e-5, counts)
    return 3 * [float("nan")]  # only ncu knows


# %%

bench_traffic.run(show_plots=ON_GPU)

# %%
# **What the figure shows.**
# With two kernels, DRAM delivers ``x`` 2.0 times on the H200, at every width.
# With one it delivers it 1.0 times.
#
# **Why.**
# ``ncu`` empties all caches before each kernel. So the second kernel finds
# nothing of what the first one has loaded, and ``x`` counts twice. In a model
# the L2 cache is not emptied in between. An H200 has 60 MB of it, and 4096
# rows of 4096 columns in 16 bits are 32 MB, which may still be there. 8192
# columns are 64 MB, of which a part must come from memory again.
#
# **What follows.**
# In the forward pass ``x`` is read and ``y`` is written: two matrices. With a
# second reading they are three. So in wide rows the cut alone may make the
# forward pass half as long again, however fast the exchange is.
#
# How many warps for a wide row?
# ------------------------------
#
# Before we add other ranks, a rank's own kernel should be nearly as fast as a
# copy. If it is slow by itself, an exchange seems to cost little beside it.
#
# It is easy to make it slow: give 16 warps to a row of 16384 columns, and 32
# columns to each thread. In the compiled kernel a thread takes 95 registers
# then. A thread's registers come in steps of 8, so the 512 threads of 16 warps
# take 512 · 96 = 49152 of the 65536 registers of an SM, and a second program
# has no room. So only one row, of 32 KB, is in flight on each SM, which means
# that it has been requested and is on its way. While its program adds it up,
# nothing is requested at all.
# With 8 warps a thread has twice as many columns, and takes 128 registers. Now
# two programs fit, and one of them loads while the other one computes.
#
# In the same way we find how much is in flight at other widths, from the
# registers that the compiler needs there, and from the 64 warps that an SM can
# have at most:

print("columns  as planned: programs of an SM, KB  16 warps: programs, KB")
for N, planned, sixteen in (
    (4096, 8, 4),
    (8192, 4, 3),
    (16384, 2, 1),
    (32768, 1, 1),
):
    row_kb = N * 2 // 1024
    in_flight = f"{planned:26}{planned * row_kb:12}"
    in_flight += f"{sixteen:20}{sixteen * row_kb:6}"
    print(f"{N:7}{in_flight}")

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

# Scaffold: sixteen warps in wide rows, a benchmark.


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=[4096, 8192, 16384, 32768],
        x_log=True,
        line_arg="provider",
        line_vals=["triton", "sixteen", "copy"],
        line_names=["As planned", "Sixteen warps", "Copy"],
        ylabel="GB/s",
        plot_name="layer-norm-parts-warps",
        args={"M": 4096, "dtype": torch.bfloat16, "mode": "forward"},
    )
)
def bench_warps(M, N, dtype, mode, provider):
    """Device time on one GPU, of whole rows: a CUDA graph of several calls,
    each with inputs of its own and after L2 was overwritten, less the graph
    without the calls; median, 20% and 80% quantiles. Copy: the best of six
    tiles."""
    if not ON_GPU:
        return 3 * [float("nan")]  # the interpreter cannot be timed
    if provider == "copy":
        return ceiling(reads=1, writes=1, shape=(M, N), dtype=dtype)
    plan = lanes(N)
    if provider == "sixteen":
        plan["num_warps"] = 16

    def prepare():
        x = torch.randn(M, N, device=DEVICE, dtype=dtype)
        w = torch.rand(N, device=DEVICE, dtype=dtype)
        b = torch.rand(N, device=DEVICE, dtype=dtype)
        return lambda: forward(x, w, b, 1e-5, plan=plan)

    bytes_moved = 2 * M * N * dtype.itemsize  # read x, write y
    return speed(bytes_moved, prepare)


# %%

report(bench_warps)

# %%
# **What the figure shows.**
# On the H200 our plan reaches 88%, 90%, 87% and 73% of a copy at the four
# widths, and sixteen warps reach 73%, 82%, 55% and 73%. On the H100 our plan
# reaches 91%, 95%, 96% and 93%, and sixteen warps 87%, 95%, 71% and 94%.
#
# **Why.**
# As planned, up to 64 KB are in flight on each SM at all four widths. Sixteen
# warps have half of that at 4096 and at 16384 columns, three quarters at 8192,
# and as much at 32768, where the two plans are the same. On the H200, wherever
# they differ, the plan with more bytes in flight is the faster one. On the
# H100 sixteen warps are as fast at 8192 columns. `Loads in flight
# <../layer-norm/04-loads-in-flight.html>`_ explains why a kernel that waits
# for memory depends on them. On the H200 the bytes alone do not explain
# everything: the same 64 KB give 90% at 8192 columns and 73% at 32768, and the
# same 32 KB give 73% at 4096 and 55% at 16384. The printed table has a likely
# second reason. Where an SM has one program, nothing is in flight while it
# computes; where it has several, others are loading meanwhile.
#
# **What follows.**
# Before you blame an exchange, look at what a rank does without it. That is
# why the figures below have a line for it.
#
# Ranks, also for a notebook
# --------------------------
#
# How do two processes come to run the same function at the same time?
#
# Usually a launcher starts them: ``torchrun --nproc-per-node 2 page.py`` runs
# this page twice, as rank 0 and as rank 1, and each of them runs all of it.
# A notebook is one process. So without ``torchrun`` the page starts ranks
# itself. It writes all functions that have been defined so far into a file,
# which each rank imports. In a notebook each cell may define more, so the file
# is written again when it is needed. Then ``everywhere(function, ...)`` lets
# all ranks call a function, and returns a list of what each of them returned.

# %%

# Scaffold: what a rank does, and the file of what the page defines.

import ast
import builtins
import importlib
import inspect
import pickle
import subprocess
import tempfile
import time


def work():
    """Be a rank that makes the calls it is sent."""
    results = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what is printed goes with the errors
    join(int(os.environ["RANK"]), "file://" + os.path.abspath("ranks"))
    for line in iter(sys.stdin.readline, ""):
        module, name, arguments = pickle.loads(bytes.fromhex(line))
        importlib.invalidate_caches()  # the module may be new
        function = getattr(importlib.import_module(module), name)
        pickle.dump(function(*arguments), results)
        results.flush()
    dist.destroy_process_group()


def source_of_the_page():
    """What the page says: a script, or the cells of a notebook so far."""
    shell = getattr(builtins, "get_ipython", None)
    if shell is not None:
        return shell().user_ns["In"]
    lines, _ = inspect.findsource(join)
    return ["".join(lines)]


def is_definition(node):
    """Whether a statement imports, defines, or names a CONSTANT."""
    if isinstance(node, ast.Assign):
        return all(ast.unparse(target).isupper() for target in node.targets)
    kinds = ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef
    return isinstance(node, kinds)


def written(folder):
    """Write a module of all definitions of the page; its name.

    A rank may be reading it: it appears as a whole, and is written once.
    """
    text = ""
    for cell in source_of_the_page():
        with contextlib.suppress(SyntaxError):  # of a cell that failed
            for node in ast.parse(cell).body:
                if is_definition(node):
                    text += ast.unparse(node) + "\n\n"
    name = f"page_{hash(text) % 2**32}"
    if not os.path.exists(f"{folder}/{name}.py"):
        with open(f"{folder}/draft", "w") as file:
            file.write(text)
        os.replace(f"{folder}/draft", f"{folder}/{name}.py")
    return name


# %%

# Scaffold: processes that are ranks.


class Ranks:
    """Processes that all call what they are told to."""

    def __init__(self):
        self.folder = tempfile.TemporaryDirectory()
        run = f"from {written(self.folder.name)} import work; work()"
        self.all = []
        for rank in range(WORLD):
            process = subprocess.Popen(
                [sys.executable, "-c", run],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                cwd=self.folder.name,
                env=os.environ | {"RANK": str(rank)},
            )
            self.all.append(process)

    def __call__(self, function, *arguments):
        """What function(*arguments) gives on each rank, all at once."""
        call = written(self.folder.name), function.__name__, arguments
        line = pickle.dumps(call).hex() + "\n"
        try:
            for process in self.all:
                os.write(process.stdin.fileno(), line.encode())
            return [pickle.load(process.stdout) for process in self.all]
        except (EOFError, BrokenPipeError):
            for process in self.all:
                process.kill()
            raise RuntimeError("a rank has ended; above it says why") from None


def under_torchrun(function, *arguments):
    """The same where torchrun has started the ranks: we are one of them."""
    results = [None] * WORLD
    dist.all_gather_object(results, function(*arguments))
    return results


everywhere = under_torchrun if TORCHRUN else Ranks()

# %%
# Here are our 8 columns on the ranks. Each of them returns what it holds, what
# it sends to the others, and the mean and the variance that it finds.


def our_example():
    """What this rank holds, sends and finds of a row of 8 columns."""
    whole = torch.tensor([[1.0, 3, 1, 3, 5, 7, 5, 7]], device=DEVICE)
    parts = whole.tensor_split(WORLD, dim=1)
    counts = tuple(part.shape[1] for part in parts)
    x = parts[dist.get_rank()].contiguous()
    w = torch.ones_like(x[0])
    b = torch.zeros_like(x[0])

    sent = torch.empty(2, 1, device=DEVICE)
    _part[(1,)](x_ptr=x, part_ptr=sent, M=1, N=x.shape[1], **lanes(x.shape[1]))
    _, stats = forward(x, w, b, 0.0, counts, dist.group.WORLD)
    mean, rstd = stats.flatten().tolist()
    return x.flatten().tolist(), sent.flatten().tolist(), mean, 1 / rstd**2


for rank, (holds, sends, mean, variance) in enumerate(everywhere(our_example)):
    print(f"rank {rank} holds {holds} and sends {sends}")
    print(f"  it finds mean {mean:.1f} and variance {variance:.2f}")

# %%
# Backward: two sums over a row again
# -----------------------------------
#
# What does the backward pass have to exchange?
#
# With :math:`g = w \, dy`, the normalized row :math:`\hat{x}`, and :math:`r`
# for rstd, the gradient of ``x`` is
#
# .. math:: dx = r \, \left(g - \frac{\hat{x} \, c_1 + c_2}{n}\right), \qquad
#    c_1 = \sum \hat{x} \, g, \qquad c_2 = \sum g
#
# Both sums run over all columns of a row, and a rank has those of its own. So
# again there are two numbers a row. But these are plain sums, which just add
# up: the exchange is an *all-reduce*, after which each rank has the sum of
# what all ranks had.


@triton.jit
def _row_sums(
    dy_ptr,  # (M, N), contiguous: our columns
    x_ptr,  # (M, N), contiguous
    w_ptr,  # (N,)
    stats_ptr,  # (2, M): mean and rstd of the whole rows
    c_ptr,  # (2, M): c1 and c2 of our columns
    M,  # rows
    N: tl.constexpr,  # columns that are here
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    wdy = _load(dy_ptr, row, N, BLOCK) * _load(w_ptr, 0, N, BLOCK)
    # Lanes without a column have wdy = 0, and add nothing to either sum.
    d = _load(x_ptr, row, N, BLOCK) - tl.load(stats_ptr + row)
    # rstd is the same in all columns, so it is multiplied once a row.
    c1 = tl.sum(d * wdy) * tl.load(stats_ptr + M + row)
    tl.store(c_ptr + row, c1)
    tl.store(c_ptr + M + row, tl.sum(wdy))


# %%
# Once a row's sums are known, ``dx`` is computed element by element. So a
# program of the second kernel need not hold whole rows. It takes a tile of
# some rows and some columns, goes down the matrix, and keeps its sums for
# ``dw`` and ``db`` in registers. These are sums over rows, and this rank has
# all rows of its columns, so they need no exchange.
#
# Where a rank has whole rows and they fit into registers, a tile is a whole
# row. Then the kernel computes the sums of the row itself, and ``c_ptr`` is
# None.


@triton.jit
def _backward(
    dy_ptr,  # (M, N), contiguous
    x_ptr,  # (M, N), contiguous
    w_ptr,  # (N,)
    stats_ptr,  # (2, M): mean and rstd
    c_ptr,  # (2, M): the sums of whole rows; None: a tile finds them itself
    dx_ptr,  # (M, N)
    sums_ptr,  # (programs that share columns, 2, N), for dw and db
    M,  # rows
    TOTAL,  # columns of a whole row, on all ranks
    N: tl.constexpr,  # columns that are here
    ROWS: tl.constexpr,  # rows of a tile
    COLS: tl.constexpr,  # columns of a tile
):
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)[None, :]
    dw = tl.zeros((ROWS, COLS), tl.float32)
    db = tl.zeros((ROWS, COLS), tl.float32)

    # Programs with the same columns take turns with the rows. With three
    # stages, the next two tiles are requested ahead.
    step = tl.num_programs(1) * ROWS
    for first in tl.range(tl.program_id(1) * ROWS, M, step, num_stages=3):
        row = first + tl.arange(0, ROWS)[:, None]
        offsets = tl.cast(row, tl.int64) * N + col
        mask = (row < M) & (col < N)
        x = tl.load(x_ptr + offsets, mask=mask, other=0).to(tl.float32)
        dy = tl.load(dy_ptr + offsets, mask=mask, other=0).to(tl.float32)
        w = tl.load(w_ptr + col, mask=col < N, other=0).to(tl.float32)
        mean = tl.load(stats_ptr + row, mask=row < M, other=0)
        rstd = tl.load(stats_ptr + M + row, mask=row < M, other=0)

        wdy = w * dy
        x_hat = (x - mean) * rstd
        if c_ptr is None:
            c1 = tl.sum(x_hat * wdy, axis=1, keep_dims=True)
            c2 = tl.sum(wdy, axis=1, keep_dims=True)
        else:
            c1 = tl.load(c_ptr + row, mask=row < M, other=0)
            c2 = tl.load(c_ptr + M + row, mask=row < M, other=0)
        dx = (wdy - (x_hat * c1 + c2) / TOTAL) * rstd
        tl.store(dx_ptr + offsets, dx, mask=mask)

        # Masked lanes have dy = 0.
        dw += dy * x_hat
        db += dy

    sums_ptr += tl.program_id(1) * 2 * N + col
    dw = tl.sum(dw, axis=0, keep_dims=True)
    db = tl.sum(db, axis=0, keep_dims=True)
    tl.store(sums_ptr, dw, mask=col < N)
    tl.store(sums_ptr + N, db, mask=col < N)


# %%

GPU = torch.cuda.get_device_properties(DEVICE) if ON_GPU else None
NUM_SMS = GPU.multi_processor_count if ON_GPU else 4


def plan_backward(N, sums_are_known):
    """The tile and the warps of a program, and how many an SM should have."""
    block = lanes(N)["BLOCK"]
    if sums_are_known:
        # 512 columns of 8 rows: a tile is narrow enough for four warps.
        return {"ROWS": 8, "COLS": min(block, 512), "num_warps": 4}, 2
    if block <= 4096:
        return {"ROWS": 1, "COLS": block, "num_warps": 4}, 2
    # A whole row of 8192 columns takes the registers of 8 warps.
    return {"ROWS": 1, "COLS": block, "num_warps": 8}, 1


def backward(dy, x, w, stats, counts=None, group=None):
    """dx, and (2, N) in float32: dw and db of the rows that are here."""
    M, N = x.shape
    total = N
    if counts is not None:
        total = sum(counts)

    # The sums of whole rows, if a tile will not have whole rows.
    c = None
    if counts is not None or N > 8192:
        c = torch.empty_like(stats)
        _row_sums[(M,)](
            dy_ptr=dy,
            x_ptr=x,
            w_ptr=w,
            stats_ptr=stats,
            c_ptr=c,
            M=M,
            N=N,
            **lanes(N),
        )
    if group is not None:
        dist.all_reduce(c, group=group)

    plan, programs_per_sm = plan_backward(N, sums_are_known=c is not None)
    across = max(triton.cdiv(N, plan["COLS"]), 1)
    down = programs_per_sm * NUM_SMS // across
    down = max(min(down, triton.cdiv(M, plan["ROWS"])), 1)
    dx = torch.empty_like(x)
    sums = stats.new_empty(down, 2, N)
    _backward[(across, down)](
        dy_ptr=dy,
        x_ptr=x,
        w_ptr=w,
        stats_ptr=stats,
        c_ptr=c,
        dx_ptr=dx,
        sums_ptr=sums,
        M=M,
        TOTAL=total,
        N=N,
        **plan,
    )
    return dx, sums.sum(dim=0)


# %%
# Columns, measured
# -----------------
#
# What do other ranks cost, and what would it cost to gather whole rows? We
# time six ways to a layer norm of rows that are spread over two GPUs:
#
# - **Two numbers a row**: what we have built.
# - **No other rank**: our kernels on the columns that are here, as if they
#   were whole rows. They compute something else then, but the distance between
#   this line and the first shows what the other ranks cost.
# - **Rows gathered**: each rank gathers whole rows, runs PyTorch's
#   ``F.layer_norm`` on them and keeps its columns of the result. *DTensor*,
#   PyTorch's tensor that knows how it is spread over ranks, does this, too.
# - **Rows gathered, our kernels**: the same with the kernels of this page. It
#   differs from *Rows gathered* only in its kernels. Its distance to the first
#   line is due to the exchange, and to what gathered rows make necessary. So
#   the two gains can be told apart.
# - **All-to-all, our kernels**: each rank gets *some* rows as a whole, and
#   sends their results back. Then no work is done twice.
# - **DTensor** itself.

# %%

# Scaffold: the clock of a rank, and of several.

import functools


@functools.cache
def group_of(ranks):
    """The group of the first ranks; None on the others."""
    group = dist.new_group(range(ranks), PATIENCE)
    if dist.get_rank() < ranks:
        return group
    return None


def time_together(prepare, group):
    """µs of a call on this rank: median, 20% and 80% quantiles.

    All ranks of the group make the call at the same time, each on its GPU.
    ``prepare()`` makes inputs and returns the call, as for device_time.
    """
    larger_than_l2 = torch.empty(2**28, dtype=torch.int8, device=DEVICE)
    meeting = torch.zeros(1, device=DEVICE)

    def meet():
        """Nobody is past it before everybody is here."""
        dist.all_reduce(meeting, group=group)

    def prepared():
        call = prepare()
        call()  # compiles the kernels
        return call

    def recorded(calls):
        graph = torch.cuda.CUDAGraph()
        results = []  # kept, so that no call writes where another one wrote
        with torch.cuda.graph(
            graph,
            stream=torch.cuda.current_stream(),
            # A thread of NCCL may ask for its events meanwhile.
            capture_error_mode="thread_local",
        ):
            for call in calls:
                larger_than_l2.zero_()
                meet()
                results.append(call())
        graph.replay()  # the first replay takes longer
        return graph

    def replayed(graph):
        """Events at its start, which is the same for all ranks, and end."""
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        meet()
        start.record()
        graph.replay()
        end.record()
        return start, end

    calls = [prepared() for _ in range(8)]
    meet()  # connects the ranks, which a graph cannot record
    with_calls = recorded(calls)
    without = recorded([lambda: None for _ in calls])
    pairs = []
    for _ in range(25):
        pairs.append((replayed(with_calls), replayed(without)))
    torch.cuda.synchronize()
    times = []
    for (start, end), (start_without, end_without) in pairs:
        difference = start.elapsed_time(end)
        difference -= start_without.elapsed_time(end_without)
        times.append(1000 * difference / len(calls))
    times.sort()
    return times[12], times[5], times[19]


# %%
# To time one GPU, we replay a CUDA graph of several calls, overwrite the L2
# cache before each of them, and subtract the time of the same graph without
# the calls. With several ranks we do the same on all of them at once. Before
# each call the ranks meet in an all-reduce, so that all of them begin
# together. These meetings are in both graphs, so they are subtracted, too. We
# show the time of the slowest rank.

# %%

# Scaffold: what a figure of several ranks shows.


def slowest(measure, *arguments):
    """What measure(*arguments) gives on the rank with the largest median."""
    times = [t for t in everywhere(measure, *arguments) if t is not None]
    return max(times, default=3 * [float("nan")])


def copy_time(mode, shape, dtype):
    """µs of the ceiling: a forward pass moves two matrices, a backward pass
    three."""
    reads = 2
    if mode == "forward":
        reads = 1
    median, low, high = ceiling(reads, 1, shape, dtype)
    bytes_moved = (reads + 1) * shape[0] * shape[1] * dtype.itemsize
    return tuple(bytes_moved / each * 1e-3 for each in (median, high, low))


def report_of_ranks(benchmark, names):
    """Draw a benchmark of two ranks; its µs by size and provider, or None."""
    table = benchmark.run(show_plots=ON_GPU, return_df=True)
    table.columns = ["N", *names]
    table = table.astype({"N": int}).set_index("N").dropna(how="all")
    if len(table) == 0:
        print("Timing needs two GPUs; the page has recorded figures.")
        return None
    return table


# %%
# Here is what the other ways need. Whoever gathers receives a matrix from each
# rank, and has to put these side by side to make rows of them. The functions
# for both passes of each way are folded below.


def as_rows(tensor, group):
    """Whole rows, gathered from all ranks."""
    parts = gathered(tensor, group)
    return torch.cat(parts.unbind(), dim=-1)


def to_rows(tensor, group):
    """Some whole rows, for the columns of all rows that are here."""
    received = torch.empty_like(tensor)
    dist.all_to_all_single(received, tensor, group=group)
    parts = received.view(group.size(), -1, tensor.shape[1])
    return torch.cat(parts.unbind(), dim=-1)


def to_columns(tensor, group):
    """Columns of all rows, for some whole rows: the way back."""
    parts = torch.stack(tensor.chunk(group.size(), dim=-1))
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return received.view(-1, parts.shape[-1])


def as_dtensor(tensor, group):
    """A matrix with its columns spread over ranks; w and b on all of them."""
    from torch.distributed.tensor import DeviceMesh, DTensor, Replicate, Shard

    mesh = DeviceMesh.from_group(group, DEVICE.type)
    if tensor.dim() == 2:
        return DTensor.from_local(tensor, mesh, [Shard(1)])
    return DTensor.from_local(as_rows(tensor, group), mesh, [Replicate()])


# %%

# Scaffold: both passes in each of the ways.


def two_numbers_a_row(x, w, b, dy, group):
    counts = group.size() * (x.shape[1],)
    _, stats = forward(x, w, b, 1e-5, counts, group)

    def forth():
        return forward(x, w, b, 1e-5, counts, group)[0]

    def back():
        return backward(dy, x, w, stats, counts, group)

    return forth, back


def no_other_rank(x, w, b, dy, group):
    _, stats = forward(x, w, b, 1e-5)

    def forth():
        return forward(x, w, b, 1e-5)[0]

    def back():
        return backward(dy, x, w, stats)

    return forth, back


def gathered_for_our_kernels(x, w, b, dy, group):
    all_w = as_rows(w, group)
    all_b = as_rows(b, group)
    all_x = as_rows(x, group)
    _, stats = forward(all_x, all_w, all_b, 1e-5)

    def forth():
        return forward(as_rows(x, group), all_w, all_b, 1e-5)[0]

    def back():
        return backward(as_rows(dy, group), all_x, all_w, stats)

    return forth, back


def all_to_all_for_our_kernels(x, w, b, dy, group):
    all_w = as_rows(w, group)
    all_b = as_rows(b, group)
    some_x = to_rows(x, group)
    _, stats = forward(some_x, all_w, all_b, 1e-5)

    def forth():
        y, _ = forward(to_rows(x, group), all_w, all_b, 1e-5)
        return to_columns(y, group)

    def back():
        some_dx, sums = backward(to_rows(dy, group), some_x, all_w, stats)
        dx = to_columns(some_dx, group)
        # Each rank has summed some rows of all columns.
        dist.all_reduce(sums, group=group)
        return dx, sums

    return forth, back


def gathered_for_pytorch(x, w, b, dy, group, place=as_rows):
    all_x = place(x, group).requires_grad_()
    all_w = place(w, group).requires_grad_()
    all_b = place(b, group).requires_grad_()
    inputs = all_x, all_w, all_b
    y = F.layer_norm(all_x, all_w.shape, all_w, all_b)

    def forth():
        return F.layer_norm(place(x, group), all_w.shape, all_w, all_b)

    def back():
        all_dy = place(dy, group)
        return torch.autograd.grad(y, inputs, all_dy, retain_graph=True)

    return forth, back


def by_dtensor(x, w, b, dy, group):
    return gathered_for_pytorch(x, w, b, dy, group, place=as_dtensor)


CALLS_OF = {
    "triton": two_numbers_a_row,
    "rows": gathered_for_pytorch,
    "gathered": gathered_for_our_kernels,
    "exchanged": all_to_all_for_our_kernels,
    "dtensor": by_dtensor,
    "alone": no_other_rank,
}


def time_columns(M, N, dtype, mode, ranks, way):
    """µs on this rank, which has its part of N columns; None if none."""
    group = group_of(ranks)
    if group is None:
        return None

    def prepare():
        columns = N // ranks
        x = torch.randn(M, columns, device=DEVICE, dtype=dtype)
        dy = torch.randn(M, columns, device=DEVICE, dtype=dtype)
        w = torch.rand(columns, device=DEVICE, dtype=dtype)
        b = torch.rand(columns, device=DEVICE, dtype=dtype)
        make_calls = CALLS_OF[way]
        forth, back = make_calls(x, w, b, dy, group)
        if mode == "forward":
            return forth
        return back

    try:
        return time_together(prepare, group)
    except RuntimeError:
        if way == "dtensor":  # not every torch can
            return None
        raise


def measure_columns(M, N, dtype, mode, ranks, way):
    if not ON_GPU or ranks > WORLD:
        return 3 * [float("nan")]
    if way == "copy":
        return copy_time(mode, (M, N // ranks), dtype)
    return slowest(time_columns, M, N, dtype, mode, ranks, way)


# %%

# Scaffold: columns, two benchmarks.

COLUMNS = [2048, 4096, 8192, 16384, 32768]
WAYS = {
    "triton": "Two numbers a row",
    "rows": "Rows gathered",
    "gathered": "Rows gathered, our kernels",
    "exchanged": "All-to-all, our kernels",
    "dtensor": "DTensor",
    "alone": "No other rank",
    "copy": "Copy",
}


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=COLUMNS,
        x_log=True,
        y_log=True,
        line_arg="provider",
        line_vals=[*WAYS],
        line_names=[*WAYS.values()],
        ylabel="µs",
        plot_name="layer-norm-columns-forward",
        args={
            "M": 4096,
            "dtype": torch.bfloat16,
            "mode": "forward",
            "ranks": 2,
        },
    )
)
def bench_columns_forward(M, N, dtype, mode, ranks, provider):
    """Device time of a CUDA graph of eight calls, less that of the same graph
    without them. Each call has inputs of its own; before it L2 is overwritten
    and all ranks meet in an all-reduce. Median, 20% and 80% quantiles of 25
    pairs, on the rank with the largest median. Copy: on one GPU, the same
    without the all-reduce, best of six tiles."""
    return measure_columns(M, N, dtype, mode, ranks, provider)


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=COLUMNS,
        x_log=True,
        y_log=True,
        line_arg="provider",
        line_vals=[*WAYS],
        line_names=[*WAYS.values()],
        ylabel="µs",
        plot_name="layer-norm-columns-backward",
        args={
            "M": 4096,
            "dtype": torch.bfloat16,
            "mode": "backward",
            "ranks": 2,
        },
    )
)
def bench_columns_backward(M, N, dtype, mode, ranks, provider):
    """Device time of a CUDA graph of eight calls, less that of the same graph
    without them. Each call has inputs of its own; before it L2 is overwritten
    and all ranks meet in an all-reduce. Median, 20% and 80% quantiles of 25
    pairs, on the rank with the largest median. Copy: on one GPU, the same
    without the all-reduce, best of six tiles."""
    return measure_columns(M, N, dtype, mode, ranks, provider)


def report_columns(benchmark):
    """Draw one of them, and print what the text below cites."""
    table = report_of_ranks(benchmark, WAYS)
    if table is None:
        return
    print("time divided by that of two numbers a row")
    print(table.div(table["triton"], axis=0).round(2).to_string())
    print("speed in % of the speed of the copy")
    percent = 100 * table.rdiv(table["copy"], axis=0)
    print(percent.to_string(float_format="%.0f"))
    cost = table["triton"] - table["alone"]
    print("µs that other ranks cost:", cost.round(1).to_dict())


# %%

report_columns(bench_columns_forward)

# %%
# **What the figure shows.**
# N is the number of columns on both GPUs together; each has half of them. On
# two H200s two numbers a row take 17 µs at 2048 columns and 116.5 µs at 32768.
# At 32768 columns gathered rows take 7.9 times as long with PyTorch's kernels
# and 7.4 times as long with ours. An all-to-all takes 6.9 times as long.
# DTensor's line nearly hides behind that of gathered rows: over all widths
# they differ by at most 6.2%.
#
# On two H100s two numbers a row take 18 µs at 2048 columns and 150 µs at
# 32768, where gathered rows take 6.9 times as long with PyTorch's kernels and
# 6.2 times as long with ours, and an all-to-all takes 5.8 times as long.
#
# **Why.**
# Both ways to gather send the same bytes and differ in their kernels, so on
# two H200s, at 32768 columns, our kernels save 65 µs. Both lines with our
# kernels differ in what is exchanged, and there two numbers a row save 740 µs.
# So the gain comes nearly all from the exchange, and from the work that it
# spares each rank.
#
# What does a gathered row cost? At 32768 columns a rank receives 134 MB. The
# links between two H200s of one machine (*NVLink*) carry 450 GB/s in each
# direction by the data sheet, so this takes 298 µs at least. What has arrived
# is a matrix from each rank, and to make rows of it all 268 MB are read and
# written once more. Only then does the layer norm begin, and it computes
# whole rows on each rank: twice the work of a rank that has only its columns.
# An all-to-all divides this work again. It sends half as much, 67 MB, but
# twice, there and back, and it must rearrange both what it sends and what it
# receives.
#
# And what do other ranks cost us? On two H200s the printed difference to the
# line without them is 10 µs at 2048 columns and 41 µs at 32768. It is the
# start of an exchange and of a second kernel, which is the same at each width,
# and a second reading of ``x``, which grows with the width: 134 MB at 32768
# columns.
#
# **What follows.**
# Let each rank add up what it has, and send only the sums. Even the best of
# the other ways takes several times as long at every width.
#
# On the H200 *No other rank* is at 86% of the copy at 32768 columns. So our
# kernels are not slow by themselves, and the distance to that line is what the
# other ranks cost.
#
# Columns, the backward pass
# --------------------------
#
# In the backward pass, the ways that gather still have the ``x`` that they
# have gathered before, and gather only ``dy``. DTensor gathers ``x`` again as
# well.
# The all-to-all sends ``dy`` there and ``dx`` back. In that way a rank has
# some rows of all columns, so it also adds up ``dw`` and ``db`` over ranks.

# %%

report_columns(bench_columns_backward)

# %%
# **What the figure shows.**
# On two H200s two numbers a row take 31 µs at 2048 columns and 180.4 µs
# at 32768. At 32768 columns gathered rows take 6.7 times as long with
# PyTorch's kernels, 5.6 times as long with ours, and 5.0 times as long in an
# all-to-all. DTensor takes 10.5 times as long.
#
# On two H100s they take 33 µs at 2048 columns and 248 µs at 32768, where
# gathered rows take 5.8 times as long with PyTorch's kernels and 4.8 times as
# long with ours, an all-to-all 4.1 times, and DTensor 8.8 times.
#
# **Why.**
# The reasons are those of the forward pass, and here the kernels matter, too:
# on two H200s, at 32768 columns, ours save 200 µs of gathered rows, and the
# exchange saves 830 µs more. The other ranks cost 10 µs at 2048 columns, 40 µs
# at 16384 and 8 µs at 32768. Up to 16384 columns a rank that is alone has
# whole rows of at most 8192 columns, which fit into registers, and needs one
# kernel where we need two. At 32768 columns its rows have 16384, and it needs
# both kernels itself. Then the other ranks cost only the exchange.
#
# **What follows.**
# Here, too, exchanging sums is the fastest way at every width. And what a rank
# has gathered it should keep: DTensor, which gathers ``x`` again, takes the
# longest.
#
# Rows: one sum for both gradients
# --------------------------------
#
# What if ranks have whole rows, as in data parallel training?
#
# Then a rank is alone in the forward pass and for ``dx``. It needs the others
# for ``dw`` and ``db``, which are sums over the rows of all ranks. Our
# ``backward`` returns both in one tensor, so one all-reduce adds them up. Is
# one better than two? And nobody needs these sums soon: only the optimizer
# does, when the backward pass of the whole model is over. An *asynchronous*
# all-reduce runs beside the kernels that follow, and whoever needs its result
# waits for it. Does its time disappear behind them?
#
# We measure our backward pass without an exchange, with one all-reduce, and
# with two. Then we let a matrix product follow, as a linear layer would that
# comes before the norm: without an exchange, and with one all-reduce beside
# it.

# %%

# Scaffold: rows, a benchmark.


def time_rows(M, N, dtype, mode, ranks, way):
    """µs on this rank, which has M whole rows; None if it has none."""
    group = group_of(ranks)
    if group is None:
        return None

    def prepare():
        x = torch.randn(M, N, device=DEVICE, dtype=dtype)
        dy = torch.randn(M, N, device=DEVICE, dtype=dtype)
        w = torch.rand(N, device=DEVICE, dtype=dtype)
        b = torch.rand(N, device=DEVICE, dtype=dtype)
        a = torch.randn(4096, 2048, device=DEVICE, dtype=dtype)
        _, stats = forward(x, w, b, 1e-5)

        def step():
            dx, sums = backward(dy, x, w, stats)
            product = None
            if way == "one":
                dist.all_reduce(sums, group=group)
            elif way == "two":
                dist.all_reduce(sums[0], group=group)
                dist.all_reduce(sums[1], group=group)
            elif way == "then":
                product = a @ a[:2048]
            elif way == "beside":
                task = dist.all_reduce(sums, group=group, async_op=True)
                product = a @ a[:2048]
                task.wait()
            return dx, sums, product

        return step

    return time_together(prepare, group)


ROW_WAYS = {
    "alone": "No other rank",
    "one": "One all-reduce",
    "two": "Two",
    "then": "None, then a matrix product",
    "beside": "One beside this product",
    "copy": "Copy",
}


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=[1024, 2048, 4096, 8192, 16384, 32768],
        x_log=True,
        y_log=True,
        line_arg="provider",
        line_vals=[*ROW_WAYS],
        line_names=[*ROW_WAYS.values()],
        ylabel="µs",
        plot_name="layer-norm-rows",
        args={
            "M": 4096,
            "dtype": torch.bfloat16,
            "mode": "backward",
            "ranks": 2,
        },
    )
)
def bench_rows(M, N, dtype, mode, ranks, provider):
    """Device time of a CUDA graph of eight calls, less that of the same graph
    without them. Each call has inputs of its own; before it L2 is overwritten
    and all ranks meet in an all-reduce. Median, 20% and 80% quantiles of 25
    pairs, on the rank with the largest median. Copy: on one GPU, the same
    without the all-reduce, best of six tiles."""
    if not ON_GPU or ranks > WORLD:
        return 3 * [float("nan")]
    if provider == "copy":
        return copy_time(mode, (M, N), dtype)
    return slowest(time_rows, M, N, dtype, mode, ranks, provider)


def report_rows(benchmark):
    """Draw it, and print what the text below cites."""
    table = report_of_ranks(benchmark, ROW_WAYS)
    if table is None:
        return
    for way, base in (("one", "alone"), ("two", "alone"), ("beside", "then")):
        added = (table[way] - table[base]).round(1).to_dict()
        print(f"µs that {ROW_WAYS[way]} adds to {ROW_WAYS[base]}:", added)


# %%

report_rows(bench_rows)

# %%
# **What the figure shows.**
# On two H200s one all-reduce adds 7.2 µs at 1024 columns and 9.0 µs at 32768,
# where it sends 32 times as much. Two of them add 13.2 µs and 16.2 µs. Beside
# the matrix product, one adds 1.5 µs and 4.0 µs.
#
# On two H100s, at 1024 columns, one all-reduce adds 7.6 µs, two add 14.6 µs,
# and one beside the matrix product adds 2.0 µs.
#
# **Why.**
# Most of an all-reduce is its start: a kernel of NCCL is launched on both
# GPUs, and they find each other. The sums of 1024 columns are 8 KB, and those
# of 32768 columns are 256 KB, which at 450 GB/s takes 0.6 µs. So it is better
# to send all at once than to start twice.
# Beside the product, the start is hidden. We have not taken apart what is left
# then: the kernel of the exchange takes some SMs from the product, and in the
# end the stream has to wait for it.
#
# **What follows.**
# Send together what can go together, and start the exchange while the GPU
# still has other work to do.
#
# A function to train with
# ------------------------
#
# The autograd function saves what the backward pass needs, as on one GPU. What
# is new is the sum over ranks at its end, where rows are spread.
#
# ``functional.all_reduce`` starts an all-reduce and returns at once. Its
# result is a tensor whose first use waits until the numbers are there. So
# ``w.grad`` may still be on its way when the backward pass is over, and nobody
# has to remember to wait. In 16 bits the gradient is converted right away,
# which is a use, so there the wait comes at once.

import torch.distributed._functional_collectives as functional


class LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, b, eps, counts, group):
        """counts: the columns of each rank; None if rows are spread."""
        if counts is None:
            y, stats = forward(x, w, b, eps)
        else:
            y, stats = forward(x, w, b, eps, counts, group)
        ctx.save_for_backward(x, w, b, stats)
        ctx.counts = counts
        ctx.group = group
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable  # no second derivatives
    def backward(ctx, dy):
        x, w, b, stats = ctx.saved_tensors
        dy = dy.contiguous()
        if ctx.counts is not None:
            dx, sums = backward(dy, x, w, stats, ctx.counts, ctx.group)
        else:
            dx, sums = backward(dy, x, w, stats)
            # Also on a rank without rows: the others wait for it.
            if any(ctx.needs_input_grad[1:3]):
                sums = functional.all_reduce(sums, "sum", ctx.group)
        dw = sums[0].to(w.dtype)
        db = sums[1].to(b.dtype)
        return dx, dw, db, None, None, None


# %%
# What if ranks are called with different arguments?
#
# If one of them has float16 and the other one float32, or one wants a gradient
# of ``w`` and the other does not, there are two ways to go wrong. A rank may
# wait for an exchange that never comes, until it times out. Or the ranks add
# numbers that do not belong together, and no error says so.
# So ``layer_norm`` lets each rank tell the others what its arguments are,
# before any kernel starts. Then either all ranks raise the same error or none
# does.

# %%

# Scaffold: which arguments are taken.

TAKEN = (
    'taken are "rows" or "columns" in 16 or 32 bits, at most 32768 columns, '
    "eps of 0 or more, and weights of the shape in which x ends, all on the "
    "rank's own device"
)


def elsewhere(tensor):
    """Whether a tensor is on another GPU than the one kernels start on."""
    if not tensor.is_cuda:
        return False
    return tensor.device.index != torch.cuda.current_device()


def described(x, shape, weight, bias, eps, shard):
    """Whether a rank's arguments are taken, and what it has."""
    if isinstance(shape, int):
        shape = [shape]
    shape = torch.Size(shape)
    rows = x.shape[: x.dim() - len(shape)].numel()
    columns = shape.numel()
    has = {"rows": rows, "columns": columns, "shard": shard, "eps": eps}
    fits = shard in ("rows", "columns")
    fits = fits and len(shape) > 0 and columns <= 32768
    fits = fits and eps >= 0  # neither negative nor NaN

    for name, tensor in {"x": x, "weight": weight, "bias": bias}.items():
        if tensor is None:
            continue
        has[name] = f"{tensor.dtype} on {tensor.device.type}"
        if elsewhere(tensor):
            has[name] += ", which is not its GPU"
            fits = False
        if tensor.requires_grad:
            has[name] += " with a gradient"
        last_dimensions = tensor.shape
        if name == "x":
            last_dimensions = tensor.shape[-len(shape) :]
        if last_dimensions != shape:
            has[name] += f" of {tuple(tensor.shape)}"
            fits = False
        # Sums over ranks have 32 bits: float64 would be rounded in silence.
        if not tensor.is_floating_point() or tensor.itemsize not in (2, 4):
            fits = False
        if tensor.device.type != DEVICE.type:
            fits = False
    return fits, has


def agreed(mine, shard, group):
    """What each rank has; an error on all of them if it does not fit.

    ``mine`` is what described returns on this rank.
    """
    of_ranks = [None] * group.size()
    dist.all_gather_object(of_ranks, mine, group)
    _, of_rank_0 = of_ranks[0]
    for rank, (fits, has) in enumerate(of_ranks):
        if not fits:
            raise ValueError(f"rank {rank} has {has}; {TAKEN}")
        # They may differ in how many rows, or columns, they have.
        if has | {shard: 0} != of_rank_0 | {shard: 0}:
            raise ValueError(f"rank {rank} has {has}, rank 0 {of_rank_0}")
    return [has for _, has in of_ranks]


# %%


def layer_norm(
    x, normalized_shape, weight=None, bias=None, eps=1e-5, group=None,
    shard="rows",
):  # fmt: skip
    """Normalize x, some "rows" or "columns" of a tensor on the group's ranks.

    normalized_shape, weight and bias are those of the columns that are here.
    All ranks of the group must call it, also those without rows or columns.
    """
    if group is None:
        group = dist.group.WORLD
    try:
        mine = described(x, normalized_shape, weight, bias, eps, shard)
    except Exception as error:  # nobody waits for who stops here
        mine = False, {"an error": repr(error)}
    of_ranks = agreed(mine, shard, group)

    _, has = mine
    M = has["rows"]
    N = has["columns"]
    w = x.new_ones(N) if weight is None else weight.contiguous().view(N)
    b = x.new_zeros(N) if bias is None else bias.contiguous().view(N)
    counts = None
    if shard == "columns":
        counts = tuple(each["columns"] for each in of_ranks)
    matrix = x.reshape(M, N).contiguous()
    y = LayerNorm.apply(matrix, w, b, eps, counts, group)
    return y.view(x.shape)


# %%
# What does it cost to ask?
# -------------------------
#
# In the figures above, ranks do not compare their arguments. But
# ``layer_norm`` does so in each call: it describes the arguments of a rank in
# bytes, and all ranks wait for the bytes of all others, on the host and not on
# the GPU. How long does this take?
#
# Time on the host is harder to measure than time on the device, because other
# work goes on there. So all lines take turns: two calls of the first, two of
# the second, and so on, 150 times. All of this is repeated 15 times, after one
# round that warms up. Other work can only make a batch longer, and never
# shorter, so the fastest batch of all counts. The band above it ends at the
# time that 3 of the 15 rounds have reached.
# The ranks begin each batch together, each of them keeps to its own cores, and
# Python collects no garbage meanwhile.

# %%

# Scaffold: whole calls, a benchmark.

import gc


def time_in_turns(calls, group):
    """µs of each call on the host: least, least, and what 3 rounds reach.

    In a round all calls take turns, 150 times, with a batch of two calls each,
    and the fastest batch counts. What disturbs a host only makes it slower.
    """
    meeting = torch.zeros(1, device=DEVICE)

    def batch(call):
        """µs of one of two calls, until the GPU is done with the last."""
        dist.all_reduce(meeting, group=group)
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(2):
            call()
        torch.cuda.synchronize()
        return 1e6 * (time.perf_counter() - start) / 2

    def one_round():
        turns = [[batch(call) for call in calls.values()] for _ in range(150)]
        return torch.tensor(turns, dtype=torch.double).amin(dim=0)

    gc.collect()
    gc.disable()
    try:
        one_round()  # compiles the kernels, and warms all caches
        rounds = torch.stack([one_round() for _ in range(15)])
    finally:
        gc.enable()
    fastest = rounds.sort(dim=0).values[[0, 0, 2]]
    return dict(zip(calls, map(tuple, fastest.T.tolist()), strict=True))


CALLS = {
    "triton": "layer_norm",
    "unchecked": "LayerNorm.apply",
    "rows": "Rows gathered",
}


def time_calls(M, N, dtype, ranks):
    """µs of a call on the host in each way of the figure, on this rank."""
    group = group_of(ranks)
    if group is None:
        return None
    columns = N // ranks
    x = torch.randn(M, columns, device=DEVICE, dtype=dtype)
    w = torch.rand(columns, device=DEVICE, dtype=dtype)
    b = torch.rand(columns, device=DEVICE, dtype=dtype)

    def checked():
        return layer_norm(x, columns, w, b, group=group, shard="columns")

    def unchecked():
        return LayerNorm.apply(x, w, b, 1e-5, ranks * (columns,), group)

    rows, _ = gathered_for_pytorch(x, w, b, x, group)
    calls = {"triton": checked, "unchecked": unchecked, "rows": rows}
    return time_in_turns(calls, group)


@functools.cache  # all calls in turns; then each line asks for its own
def calls_of_all_ranks(M, N, dtype, ranks):
    """Of each call the times on the slower rank."""
    of_ranks = [t for t in everywhere(time_calls, M, N, dtype, ranks) if t]
    return {way: max(times[way] for times in of_ranks) for way in CALLS}


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=[2048, 8192, 32768],
        x_log=True,
        y_log=True,
        line_arg="provider",
        line_vals=[*CALLS],
        line_names=[*CALLS.values()],
        ylabel="µs",
        plot_name="layer-norm-columns-call",
        args={
            "M": 4096,
            "dtype": torch.bfloat16,
            "mode": "forward",
            "ranks": 2,
        },
    )
)
def bench_calls(M, N, dtype, mode, ranks, provider):
    """Whole calls that follow each other, on the host, until the GPU is done
    with the last, with L2 as they leave it: in each of 15 rounds all lines
    take turns, 150 times, with a batch of two calls each, which all ranks
    begin together. The fastest batch of all, and what 3 rounds have reached,
    on the slower rank."""
    if not ON_GPU or ranks > WORLD:
        return 3 * [float("nan")]
    return calls_of_all_ranks(M, N, dtype, ranks)[provider]


# %%

table = report_of_ranks(bench_calls, CALLS)
if table is not None:
    checks = (table["triton"] - table["unchecked"]).round().to_dict()
    print("µs that the comparison of arguments takes:", checks)

# %%
# **What the figure shows.**
# On two H200s a call of ``layer_norm`` takes 768 µs at 2048 columns and 768 µs
# at 32768. ``LayerNorm.apply``, which compares nothing, takes 136 µs and 165
# µs. So the comparison takes 633 µs of the narrow call. Gathering rows for
# PyTorch's kernels takes 112 µs and 938 µs.
#
# On two H100s a call takes 1004 µs at 2048 columns, 173 µs without the
# comparison, and 131 µs with gathered rows.
#
# **Why.**
# A call of the forward pass is two kernels and an exchange, and on the device
# that is 17 µs at 2048 columns. The host needs longer to start all this, so
# in narrow rows we see the time of the host. The comparison turns Python
# objects into bytes, and sends first how many there are and then the bytes
# themselves. Both go through gloo, and the call cannot go on before the last
# rank has answered.
#
# **What follows.**
# Use ``layer_norm`` while you build a model, and wherever ranks may disagree.
# Where they cannot, ``LayerNorm.apply`` saves the comparison. And a CUDA graph
# replays only what the GPUs do, so its replays pay for neither the comparison
# nor the host's launches.
#
# Is it right?
# ------------
#
# We compare with PyTorch's layer norm of the whole matrix in float64, on parts
# of different sizes. Each rank looks at each element of what it has.
# With a mean of 10000 in ``x``, 32 bits cannot be as exact: numbers near 10000
# are about 0.001 apart there, so a mean, too, can only be right to 0.0005.


def both_passes(function, x, w, b, dy, **more):
    """y, dx, dw and db by name."""
    for tensor in (x, w, b):
        tensor.requires_grad_()
    y = function(x, w.shape, w, b, **more)
    dx, dw, db = torch.autograd.grad(y, (x, w, b), dy)
    return {"y": y, "dx": dx, "dw": dw, "db": db}


def errors(shard, M, N, mean):
    """The worst element of y, dx, dw and db on this rank: how wrong it is,
    over the typical size of an element."""
    torch.manual_seed(0)
    x = torch.randn(M, N, device=DEVICE) + mean
    w = torch.randn(N, device=DEVICE)
    b = torch.randn(N, device=DEVICE)
    dy = torch.randn(M, N, device=DEVICE)

    def mine(tensor):
        """What this rank has of a matrix, or of a row."""
        if shard == "columns":
            return tensor.tensor_split(WORLD, dim=-1)[dist.get_rank()]
        if tensor.dim() == 1:
            return tensor
        return tensor.tensor_split(WORLD)[dist.get_rank()]

    part = [mine(tensor).detach() for tensor in (x, w, b, dy)]
    wide = [tensor.double() for tensor in (x, w, b, dy)]
    ours = both_passes(layer_norm, *part, shard=shard)
    exact = both_passes(F.layer_norm, *wide)
    worst = []
    for name in ours:
        typical_size = exact[name].square().mean().sqrt()
        error = (ours[name] - mine(exact[name])).abs() / typical_size
        if error.numel() > 0:  # a rank may have no rows
            worst.append(error.max().item())
    return worst


for shard in ("rows", "columns"):
    for mean, limit in ((0, 1e-5), (1e4, 4e-3)):
        error = max(map(max, everywhere(errors, shard, 7, 75, mean)))
        print(f"{shard}, mean {mean:g}: errors below {error:.0e}")
        assert error < limit

# %%
# Sum or mean?
# ------------
#
# All rows use a weight, so its gradient is a *sum* over the rows of all ranks,
# and that is what ``layer_norm`` returns on each rank.
#
# `DistributedDataParallel
# <https://docs.pytorch.org/docs/stable/notes/ddp.html>`_ and FSDP, which train
# models with rows on several ranks, take the *mean* over ranks. They expect
# that each rank's loss is a mean over its own rows; then the mean of these
# gradients is that of the mean over all rows.
#
# What happens if you mix the two? In the example each rank's loss is a mean
# over its own 6 rows. The right gradient is that of the mean over all rows. We
# print what each way gives for ``w``, divided by that right gradient, so it
# should be 1.

from torch.nn.parallel import DistributedDataParallel


def ratios(way, rows):
    """Some numbers of dw, over those of the loss divided by all rows."""
    torch.manual_seed(0)
    rank = dist.get_rank()
    x = torch.randn(WORLD, 6, 8, device=DEVICE)  # 6 rows of each rank
    dy = torch.randn(WORLD, 6, 8, device=DEVICE)
    norm = torch.nn.LayerNorm(8, device=DEVICE)

    # The right one: all rows here.
    loss = (norm(x) * dy).sum() / (6 * WORLD)
    loss.backward()
    expected = norm.weight.grad
    norm.weight.grad = None

    def our_layer_norm(x):
        return layer_norm(x, 8, norm.weight, norm.bias)

    model = norm
    if way in ("DDP", "ours in DDP"):
        model = DistributedDataParallel(norm)
    if way in ("ours", "ours in DDP"):
        norm.forward = our_layer_norm
    loss = (model(x[rank]) * dy[rank]).sum() / rows
    loss.backward()
    some = norm.weight.grad[:3] / expected[:3]
    return [round(ratio, 2) for ratio in some.tolist()]


for way in ("nobody adds", "DDP", "ours", "ours in DDP"):
    print(f"{way}: dw over what it should be:", everywhere(ratios, way, 6)[0])

# %%
# - **Nobody adds:** each rank has the gradient of its own rows, and after a
#   step of the optimizer the weights of the ranks differ.
# - **DDP** is right.
# - **Ours** is too large by the number of ranks, because it adds up means.
# - **Ours in DDP** is too large in the same way: the mean of equal sums is the
#   sum.
#
# No error tells you. Let one of the two add, and divide the loss accordingly;
# the second exercise asks how.
#
# Where PyTorch or a library is better
# ------------------------------------
#
# - **Everything around a norm.** DTensor spreads whole models over ranks, in
#   any mixture of rows and columns, and changes from one to the other where it
#   must. Our function does one operation.
# - **Narrow calls.** Where the host limits you, PyTorch's function on gathered
#   rows takes 112 µs on two H200s at 2048 columns, and ours takes 768 µs with
#   its comparison of arguments.
# - **Where rows are whole anyway.** *Sequence parallel* training changes from
#   columns to rows before a norm. Then PyTorch's own layer norm needs no
#   exchange in the forward pass either.
# - **More than we take.** PyTorch takes float64, any number of columns, and
#   second derivatives. We take 16 and 32 bits, up to 32768 columns a rank, and
#   have no second derivatives.
# - **Faster exchanges.** With NCCL most of a small exchange is its start.
#   PyTorch's *symmetric memory* lets a kernel write to the memory of another
#   GPU directly, so that no exchange has to be started between two kernels.
#   This page does not use it.
# - **torch.compile** is not on this page. On one GPU, `Layer normalization,
#   both passes <../layer-norm/01-layer-norm.html>`_ compares with it.
#
# Exercise 1: RMS norm in parts
# -----------------------------
#
# *RMS norm* subtracts no mean. It divides a row by the root of the mean of its
# squares. What must a rank tell the others about its part of a row, so that
# all can *add up* what they are told, and divide by the number of all columns?
#
# Complete ``told``. As it is, it tells the mean of the squares. With parts of
# 3 and 5 columns, that is wrong.
#
# **Hint 1.** What is missing if you have the means of 3 and of 5 squares, and
# want the mean of all 8?
#
# **Hint 2.** A sum needs no count, and sums of parts add up to the sum of all.


def told(part):
    """What a rank tells about its part of each row: a number a row."""
    return part.square().mean(dim=1)  # to do


def exercise_1(told):
    """Whether the sum of what is told gives the right RMS norm."""
    torch.manual_seed(0)
    x = torch.randn(4, 8)
    parts = x.split([3, 5], dim=1)
    total = sum(told(part) for part in parts)
    y = x / (total / 8).sqrt()[:, None]
    error = (y - F.rms_norm(x, (8,), eps=0.0)).abs().max().item()
    print(f"the worst element of RMS norm is wrong by {error:.1g}")
    return error < 1e-5


exercise_1(told)

# %%

# Solution 1


def told_1(part):
    return part.square().sum(dim=1)


assert exercise_1(told_1)

# %%
# So RMS norm sends one number a row where layer norm sends two, and these are
# just added up: an all-reduce does it.
#
# Exercise 2: what is the loss divided by?
# ----------------------------------------
#
# ``layer_norm`` adds up the gradients of ``w``, and there is no DDP. A rank
# has ``rows`` rows, and all ranks have the same number. By what must a rank
# divide the sum of the losses of its rows, so that the gradient is that of the
# mean over all rows?
#
# **Hint 1.** Whose rows are in a sum over all ranks?
#
# **Hint 2.** The loss is a mean over all these rows. How many are they?


def divisor(rows, ranks):
    return rows  # to do


def exercise_2(divisor):
    """Whether dw is right if each rank divides its loss so."""
    found = everywhere(ratios, "ours", divisor(6, WORLD))
    print("dw over what it should be:", found[0])
    return found == [[1, 1, 1]] * WORLD


exercise_2(divisor)

# %%

# Solution 2


def divisor_2(rows, ranks):
    return rows * ranks


assert exercise_2(divisor_2)

# %%
# What we learned
# ---------------
#
# These are the designs of this page: how long each takes on two H200s, and
# what each rank sends.
#
# Columns spread, forward and backward at 32768 columns:
#
# - **Two numbers a row** takes 116.5 µs and 180.4 µs. It sends 8 bytes a row.
# - **All-to-all, our kernels** takes 805 µs and 897 µs. It sends 67 MB there
#   and 67 MB back.
# - **Rows gathered, our kernels** takes 857 µs and 1010 µs. It sends 134 MB,
#   and each rank does all the work.
# - **Rows gathered** takes 922 µs and 1210 µs. It sends as much, and its
#   kernels are PyTorch's.
# - **DTensor** takes 926 µs and 1903 µs. Backward it gathers twice.
#
# Rows spread, what is added to a backward pass at 1024 columns:
#
# - **Two all-reduces** add 13.2 µs.
# - **One all-reduce** adds 7.2 µs. Most of it is its start.
# - **One beside a matrix product** adds 1.5 µs. Its start is hidden.
#
# And in general:
#
# - Mean and M2 of parts merge into those of the whole, whoever has the parts:
#   ranks, programs, or chunks of a row.
# - A kernel that is cut in two reads its input twice. Measure what a rank does
#   by itself before you measure the exchange.
# - A small exchange takes hardly more time than it takes to start one.
# - Ranks that disagree either wait for each other or compute something wrong.
#   To find that out takes time in each call.
#
# **Next:** `A GPT whose every kernel is a page of this site
# <../model/01-gpt.html>`_ trains with the kernels of all sections, on one GPU
# and on two.
