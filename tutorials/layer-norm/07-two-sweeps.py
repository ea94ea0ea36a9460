r"""
Two sweeps, and a variance that stays right
===========================================

How do you normalize rows that are too wide for registers, on any device?
Read each row twice, and find its mean and its variance in the first sweep, by
a method that stays right where the mean is large.

A *sweep* is one read of a row from its first column to its last.
`Layer normalization, both passes <01-layer-norm.html>`_ makes three sweeps
over a wide row, because it looks for the mean first, and needs it for the
variance.
On this page we find both at once, so that two sweeps are enough. Then we build
a backward pass of two sweeps, too, and get a function for rows of any width.

**What you will learn**

- Why the short formula for the variance loses digits, and how many.
- How Welford's method works, and how to put together what many threads have
  found.
- How to help the caches, so that the second sweep need not go to DRAM.
- How to compute the roof of a kernel that reads its inputs twice.
- How to add up ``dw`` and ``db`` in registers, however wide a row is.
- Why a loop that the compiler unrolls can leave an SM half empty.

**What you need:** `Layer normalization, both passes <01-layer-norm.html>`_ for
the formulas, and `Loads in flight <04-loads-in-flight.html>`_ for stages. You
don't need a GPU.
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
# What does a sweep cost?
# -----------------------
#
# Memory limits layer norm, so let's count matrices.
# The forward pass must read ``x`` and write ``y``, and the backward pass must
# read ``x`` and ``dy`` and write ``dx``. A copy of as many matrices is our
# ceiling.
# A kernel with two sweeps reads what it reads twice. If no cache helps, the
# second sweep comes from DRAM, like the first.

for design, must_move, moves in (
    ("forward, three sweeps", 2, 4),  # x three times, and y
    ("forward, two sweeps", 2, 3),
    ("backward, two sweeps", 3, 5),  # x and dy twice, and dx
):
    share = 100 * must_move / moves
    print(f"{design}: {moves} matrices move, {must_move} must: {share:.0f}%")

# %%
# These are *roofs*: without the caches, no kernel with so many sweeps can be
# faster. With their help it can.
#
# Both sums in one sweep
# ----------------------
#
# Can one sweep find the mean and the variance?
#
# There is a short formula for it: the variance is the mean of the squares
# minus the square of the mean. So a program could add up ``x`` and its square
# at the same time.
# Let's try it on the row 1, 2, 3, 6. Its mean is 3, and its variance is 3.5.
# If we add the same number to all four, the mean grows and the variance stays
# the same.

for added in (0, 100, 10_000):
    row = torch.tensor([1.0, 2.0, 3.0, 6.0]) + added
    squares = row * row
    variance = squares.mean() - row.mean() ** 2
    print(f"mean {row.mean():.0f}: the variance is {variance:.1f}")
    print("  squares:", squares.tolist())

# %%
# With a mean of 10003, the formula finds 0 in place of 3.5.
#
# Look at the last line. The square of 10001 is 100020001, and float32 has made
# 100020000 of it. A number in float32 has 24 binary digits, so near
# :math:`10^8` one number is 8 away from the next.
# The mean of the squares and the square of the mean are both near
# :math:`10^8`. Their difference can be 0 or 8 or -8, but never 3.5.
#
# How large does the mean have to be? Each square is rounded by up to
# :math:`2^{-24}` of itself, about :math:`6 \cdot 10^{-8}`. If the mean is
# :math:`q` standard deviations, a square is about :math:`q^2` variances, and
# so the error is about :math:`2^{-24} \, q^2` of the variance.
#
# First change: Welford's method
# ------------------------------
#
# Can we do without large squares?
#
# `Welford's method <https://doi.org/10.1080/00401706.1962.10490022>`_ keeps
# the mean of the elements so far, and ``m2``, the sum of their squared
# distances from that mean. Then the next element comes.
# Here is the row 1, 2, 3, 6 again. ``d`` is the distance of the new element
# from the mean before it.
#
# - 1 is the first element. A single element is its own mean, so the mean is 1
#   and ``m2`` is 0.
# - 2 is number 2, and ``d`` is 1. The mean moves by 1/2, to 1.5, and ``m2``
#   grows by 1 × 1 × 1/2 to 0.5.
# - 3 is number 3, and ``d`` is 1.5. The mean moves by 1.5/3, to 2, and ``m2``
#   grows by 1.5 × 1.5 × 2/3 to 2.
# - 6 is number 4, and ``d`` is 4. The mean moves by 4/4, to 3, and ``m2``
#   grows by 4 × 4 × 3/4 to 14.
#
# The variance is 14/4 = 3.5, as it should be.
#
# In general, element number :math:`k` at the distance :math:`d` moves the mean
# by :math:`d/k`, and ``m2`` grows by :math:`d^2 \, (1 - 1/k)`. Why so much?
# Two things happen:
#
# - The :math:`k - 1` elements before had distances that were 0 on average. Now
#   their mean is off by :math:`d/k`, which adds :math:`(k - 1) \, (d/k)^2` to
#   their squares.
# - The new element is :math:`d - d/k` away from the new mean. Its square is
#   :math:`d^2 \, (1 - 1/k)^2`.
#
# Since :math:`(k - 1)/k^2` is :math:`(1 - 1/k)/k`, both together are
# :math:`d^2 \, (1 - 1/k) \, (1/k + 1 - 1/k)`, which is
# :math:`d^2 \, (1 - 1/k)`.
# No number here is much larger than the distances are, apart from the mean
# itself.
#
# In a kernel, one tile after the other comes, and each lane of the tile
# applies the method to its own elements. Every lane ends with a mean and an
# ``m2``. How do we put the lanes together?

# %%

# Drawing: the lanes of a tile, what each keeps, and what becomes of it.

plt.figure(
    "Twelve columns in three tiles of four lanes. Lane 0 gets columns 0, 4 "
    "and 8, lane 1 gets 1, 5 and 9, and so on. Each lane keeps a mean and m2, "
    "and in the end all lanes are put together",
    figsize=(7.5, 3),
)
for tile in range(3):
    plt.text(-1.2, 4 - tile, f"tile {tile}", ha="right", va="center")
    for lane in range(4):
        box = {"boxstyle": "square,pad=0.5", "fc": f"C{lane}", "alpha": 0.5}
        column = str(4 * tile + lane).rjust(2)
        plt.text(
            2 * lane, 4 - tile, column, ha="center", va="center", bbox=box
        )
for lane in range(4):
    plt.annotate(
        "", (2 * lane, 0.9), (2 * lane, 1.55), arrowprops={"arrowstyle": "->"}
    )
    plt.text(2 * lane, 0.5, "mean, m2", ha="center", va="center")
plt.text(-1.2, 0.5, "each lane", ha="right", va="center")
plt.annotate("", (8.6, 0.5), (7, 0.5), arrowprops={"arrowstyle": "->"})
plt.text(8.7, 0.5, "mean and variance\nof the row", va="center")
plt.axis((-2.9, 11.4, 0, 4.6))
plt.axis("off")
plt.show()

# %%
# Take two lanes and the row 1, 2, 3, 6. Lane 0 gets 1 and 3. Its mean is 2,
# and its ``m2`` is 1 + 1 = 2. Lane 1 gets 2 and 6. Its mean is 4, and its
# ``m2`` is 4 + 4 = 8.
# The mean of the row, 3, is 1 away from the mean of either lane. That adds
# 1 × 1 to the square of each element, so 2 for each lane with its two
# elements. The sum of the row is (2 + 2) + (8 + 2) = 14 once more.
#
# In general a lane with :math:`n` elements, a mean :math:`\mu_l` and
# :math:`m_2` adds :math:`m_2 + n \, (\mu_l - \mu)^2` to the sum of the row.
#
# Here is the method in Triton.
# The last tile may be wider than what is left of the row, and its surplus
# lanes are masked. So some lanes have one element less than the others.


@triton.jit
def _welford(
    x_ptr,  # where the row begins
    eps: tl.constexpr,  # added to the variance
    N: tl.constexpr,  # columns
    BLOCK: tl.constexpr,  # lanes of a tile: a power of two
    KEEP: tl.constexpr,  # what the caches should do with x
    acc: tl.constexpr,  # the type of the sums: float32, or float64
):
    """Mean of a row, and 1 / its standard deviation."""
    LAST: tl.constexpr = (N - 1) // BLOCK  # the number of the last tile
    lanes = tl.arange(0, BLOCK)

    # The first element of each lane is the mean of the lane so far.
    x = tl.load(x_ptr + lanes, mask=lanes < N, eviction_policy=KEEP)
    mean = tl.where(lanes < N, x.to(acc), 0)
    m2 = tl.zeros((BLOCK,), acc)
    for i in range(1, LAST + 1):
        cols = i * BLOCK + lanes
        x = tl.load(x_ptr + cols, mask=cols < N, eviction_policy=KEEP)
        # A masked lane may hold anything: with a distance of 0 it changes
        # neither of its two numbers.
        d = tl.where(cols < N, x.to(acc) - mean, 0)
        # One division for all lanes, and a multiplication in each.
        share = 1 / tl.cast(i + 1, acc)
        mean += d * share
        m2 += d * d * (1 - share)

    # Put the lanes together. A lane that was masked in the last tile has one
    # element less.
    count = tl.where(LAST * BLOCK + lanes < N, LAST + 1, LAST).to(acc)
    common = tl.sum(mean * count) / N
    d = mean - common
    variance = tl.sum(m2 + count * d * d) / N
    return common, 1 / tl.sqrt(variance + eps)


# %%
# The lanes exchange numbers only at the end. During the sweep no thread waits
# for another.
#
# `Layer normalization, both passes <01-layer-norm.html>`_ suspects that this
# method slows PyTorch's kernel down, because each step has to wait for the one
# before. Ours waits, too, but in a wide row of 16 bits a thread has at least
# eight lanes of a tile. Their steps do not wait for each other, and all of
# them share one division.
#
# Second change: help the caches
# ------------------------------
#
# The second sweep computes ``y``. It reads the row again. Where from?
#
# That depends on what the caches still hold. If a row is larger than a cache,
# its beginning has made room for its end by the time that the first sweep is
# over. A second sweep from the beginning would then find nothing that it
# needs, and would throw out the end just before it gets there.
# So the second sweep goes the other way: it begins at the end of the row.

# %%

# Drawing: the way of both sweeps.

plt.figure(
    "Five tiles of a row: the first sweep goes to the right, the second goes "
    "back to the left",
    figsize=(7.5, 2.2),
)
arrow = {"arrowstyle": "->"}
box = {"boxstyle": "square", "fc": "none"}
for tile in range(5):
    plt.text(2 * tile, 2, f"tile {tile}", ha="center", bbox=box)
plt.annotate("", (9, 2.8), (-1, 2.8), arrowprops=arrow)
plt.annotate("", (-1, 1.4), (9, 1.4), arrowprops=arrow)
plt.text(-1, 3, "first sweep: each lane keeps a mean and m2")
plt.text(9, 0.9, "second sweep: y, while the end is in a cache", ha="right")
plt.axis((-1.5, 9.5, 0.7, 3.4))
plt.axis("off")
plt.show()

# %%
# We also tell the caches what we know. An *eviction policy* says what a cache
# should give up when it needs room:
#
# - The first sweep reads ``x`` with ``evict_last``: it will be needed again.
# - The second sweep reads ``x`` with ``evict_first``: now it won't be.
# - ``y`` is stored with ``.cs``, for *cache streaming*: nobody on this page
#   reads it soon.
#
# All three are hints. They change no result, and a cache may ignore them.
# ``CACHES`` switches all three off, and the direction as well, so that we can
# measure what they are worth.


@triton.jit
def _layer_norm_fwd_sweeps(
    x_ptr,  # (M, N), contiguous
    w_ptr,  # (N,); None counts as 1
    b_ptr,  # (N,); None counts as 0
    y_ptr,  # (M, N)
    mean_ptr,  # (M,): saved for the backward pass
    rstd_ptr,  # (M,): 1 / standard deviation, saved as well
    eps: tl.constexpr,  # added to the variance
    N: tl.constexpr,  # columns
    BLOCK: tl.constexpr,  # lanes of a tile: a power of two
    CACHES: tl.constexpr,  # whether to help the caches
):
    KEEP: tl.constexpr = "evict_last" if CACHES else ""
    DROP: tl.constexpr = "evict_first" if CACHES else ""
    STREAM: tl.constexpr = ".cs" if CACHES else ""
    LAST: tl.constexpr = (N - 1) // BLOCK  # the number of the last tile
    acc: tl.constexpr = mean_ptr.dtype.element_ty  # float32, or float64

    # A program for each row. M * N may pass 2**31.
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * N

    # First sweep.
    mean, rstd = _welford(x_ptr, eps, N, BLOCK, KEEP, acc)
    tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)

    # Second sweep, from the last tile to the first.
    for i in range(LAST + 1):
        tile = LAST - i if CACHES else i
        cols = tile * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + cols, mask=cols < N, eviction_policy=DROP)
        y = (x.to(acc) - mean) * rstd
        if w_ptr is not None:
            y *= tl.load(w_ptr + cols, mask=cols < N).to(acc)
        if b_ptr is not None:
            y += tl.load(b_ptr + cols, mask=cols < N).to(acc)
        at = y_ptr + row * N + cols
        tl.store(at, y, mask=cols < N, cache_modifier=STREAM)


# %%
# How many rows should an SM work on?
# -----------------------------------
#
# Before we launch the kernel, we have to choose the width of a tile and the
# warps of a program. What should we go by?
#
# The nearest cache is L1. It belongs to an SM, and on an H100 it shares 256 KB
# with shared memory. All programs that run on the SM use it together, and
# besides their rows it should hold ``w`` and ``b``, which all of them read.
# So there should be many programs, to keep the memory busy, but not so many
# that their rows take more than half of L1.
# The number of warps decides that, for an SM has room for 64 of them.
#
# - Rows of up to 32 KB: 16 warps, so that four programs run, with at most
#   128 KB.
# - Rows of up to 64 KB: 32 warps, so that two programs run, again with at most
#   128 KB.
# - Wider rows: 32 warps, and only one program. That is why each thread loads
#   32 bytes of a tile here. With them a thread needs more than 32 registers,
#   and an SM has 65536, so a second program of 1024 threads does not fit.
#   Beyond 128 KB, even a single row takes more than half of L1.
#
# In the first two cases a thread loads 16 bytes of a tile, which makes the
# tile 8 KB with 16 warps, and 16 KB with 32. In the third it has 32 KB. So in
# each case the programs on an SM request 32 KB together when each of them
# loads a tile.
# If a row is no multiple of 16 bytes long, its loads are narrower, as `Rows
# that begin anywhere <06-unaligned-rows.html>`_ explains. Then we have only 8
# warps for a tile of 8 KB, so that each thread has more loads in flight.

WARP = 64 if torch.version.hip else 32  # threads


def plan_forward(N, itemsize):
    """Lanes of a tile, and warps of a program."""
    row_bytes = N * itemsize
    threads = 1024
    tile_bytes = 32768
    if row_bytes <= 65536:
        tile_bytes = 16384
    if row_bytes <= 32768:
        threads = 512
        tile_bytes = 8192
    if row_bytes % 16 > 0:
        threads = 256
        tile_bytes = 8192
    block = min(tile_bytes // itemsize, triton.next_power_of_2(N))
    # A narrow row does not need so many threads.
    threads = min(threads, block * itemsize // 16)
    return block, max(threads // WARP, 1)


# %%
# The launch:


def forward(x, w, b, eps, caches=True):
    """y, mean and rstd for a contiguous (M, N) x; w and b may be None."""
    M, N = x.shape
    y = torch.empty_like(x)
    # 16-bit rows are summed in float32.
    acc_dtype = torch.promote_types(x.dtype, torch.float32)
    mean = torch.empty(M, dtype=acc_dtype, device=x.device)
    rstd = torch.empty(M, dtype=acc_dtype, device=x.device)
    block, warps = plan_forward(N, x.itemsize)
    _layer_norm_fwd_sweeps[(M,)](
        x_ptr=x,
        w_ptr=w,
        b_ptr=b,
        y_ptr=y,
        mean_ptr=mean,
        rstd_ptr=rstd,
        eps=eps,
        N=N,
        BLOCK=block,
        CACHES=caches,
        num_warps=warps,
    )
    return y, mean, rstd


x = 1000 + torch.randn(2, 5000, device=DEVICE)
_, _, rstd = forward(x, None, None, eps=0)
exact = x.double().var(dim=1, correction=0) ** -0.5
torch.testing.assert_close(rstd.double(), exact, rtol=1e-5, atol=0)
print("1 / standard deviation, with a mean of 1000: right")

# %%
# How fast is the forward pass?
# -----------------------------
#
# "No help" is our kernel with ``CACHES`` off. The other lines are PyTorch's
# layer norm, the same function through ``torch.compile``, and the copy.
# The clock and the ceiling are those of `Layer normalization, both passes
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

# Scaffold: the speed of either pass.

WIDTHS = [8192, 12288, 16384, 24576, 32768, 49152, 65536, 131072]


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

# Scaffold: the forward pass in two sweeps, a benchmark.


def with_help(x, shape, w, b):
    return forward(x, w, b, eps=1e-5)


def without_help(x, shape, w, b):
    return forward(x, w, b, eps=1e-5, caches=False)


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=WIDTHS,
        line_arg="provider",
        line_vals=["triton", "plain", "torch", "torch.compile", "copy"],
        line_names=["Triton", "No help", "PyTorch", "torch.compile", "Copy"],
        ylabel="GB/s",
        plot_name="layer-norm-two-sweeps-forward",
        args={"M": 4096, "dtype": torch.float16, "mode": "forward"},
    )
)
def bench_forward(M, N, dtype, mode, provider):
    """Device time: a CUDA graph of several calls, each with inputs of its own
    and after L2 was overwritten, less the graph without the calls; median, 20%
    and 80% quantiles. Copy: the best of six tiles."""
    if not ON_GPU:
        return 3 * [float("nan")]  # the interpreter cannot be timed
    if provider == "copy":
        return ceiling(reads=1, writes=1, shape=(M, N), dtype=dtype)
    if provider == "torch.compile":
        return compiled_speeds(M, N, dtype)[mode]
    if provider == "torch":
        return speed_of(pytorch, M, N, dtype, mode)
    if provider == "plain":
        return speed_of(without_help, M, N, dtype, mode)
    return speed_of(with_help, M, N, dtype, mode)


# %%

report(bench_forward)

# %%
# **What the figure shows.**
# On the H100 our kernel reaches 97% to 100% of a copy up to 65536 columns, if
# we leave out 32768 for a moment, and 83% at 131072. Without help for the
# caches it reaches 90% to 98% at the same widths, and 69% at 131072. PyTorch
# reaches 59% to 62% over all widths, and torch.compile reaches 63% to 99%.
# Forward, ours is 1.4 to 1.7 times as fast as PyTorch, and 1.0 to 1.6 times as
# fast as torch.compile. At 8192 and 16384 columns torch.compile is as fast as
# ours.
#
# At 32768 columns our line has a dip, to 86%. Do not believe it. Further down
# on this page, one kernel is measured twice at this width, and takes 183 µs
# and 217 µs. So here our clock is unsure by more than the lines differ, and we
# say nothing about them at this width.
#
# On the H200 our kernel reaches 94% to 98% of a copy up to 32768 columns, and
# 84%, 85% and 73% at 49152, 65536 and 131072. Without help for the caches it
# reaches 70% to 94% over all widths, PyTorch reaches 50% to 55%, and
# torch.compile reaches 57% to 94%. At every width ours is faster than both
# there, 1.5 to 2.0 times as fast as PyTorch, and up to 1.5 times as fast as
# torch.compile.
#
# **Why.**
# Without the caches the roof would be 67%. Our kernel is above it at every
# width, so a good part of the second sweep comes from a cache. Below we count
# how much, and from which.
# PyTorch reads each row twice as well. `Layer normalization, both passes
# <01-layer-norm.html>`_ says what else it does. PyTorch is below this roof at
# every width, and torch.compile is below it from 49152 columns on. We have not
# looked into the kernels of torch.compile.
#
# **What follows.**
# As long as a cache holds the rows in progress, a second sweep costs little.
# So it is worth a look at how many rows are in progress at a time, before you
# make a kernel more complicated.
#
# How many digits are lost?
# -------------------------
#
# Our kernel is fast, and is it right where the mean is large? We compare two
# ways to find the variance: the short formula, and Welford's method with
# lanes, as in our kernel. Both are in PyTorch and in float32 here, so that you
# can try them anywhere.


def variance_by_squares(x):
    mean = x.mean(dim=1)
    return (x * x).mean(dim=1) - mean * mean


def variance_by_welford(x, lanes=256):
    """The number of columns must be a multiple of that of the lanes."""
    rows, columns = x.shape
    mean = torch.zeros(rows, lanes)
    m2 = torch.zeros(rows, lanes)
    for k, tile in enumerate(x.split(lanes, dim=1), start=1):
        d = tile - mean
        mean += d / k
        m2 += d * d * (1 - 1 / k)
    count = columns / lanes  # elements of a lane
    distance = mean - mean.mean(dim=1, keepdim=True)
    return (m2 + count * distance * distance).sum(dim=1) / columns


# %%
# We take rows whose mean is 1 to 10000 times their standard deviation, and
# print the error of the variance, divided by the variance. The third column is
# the error that we expect of squares, :math:`2^{-24} \, (1 + q^2)`.

torch.manual_seed(0)
RATIOS = (1, 10, 100, 1000, 10_000)
errors_of_squares = []
errors_of_welford = []
print("mean / std  by squares  expected  by Welford")
for ratio in RATIOS:
    x = ratio + torch.randn(64, 4096)
    exact = x.double().var(dim=1, correction=0)
    for function, errors in (
        (variance_by_squares, errors_of_squares),
        (variance_by_welford, errors_of_welford),
    ):
        error = (function(x) - exact).norm() / exact.norm()
        errors.append(error.item())
    print(
        f"{ratio:10}{errors_of_squares[-1]:12.0e}"
        f"{2**-24 * (1 + ratio**2):10.0e}{errors_of_welford[-1]:12.0e}"
    )

# %%

# Drawing: the error of the variance, against the mean in standard deviations.

plt.figure(
    "The relative error of the variance in float32. By squares it grows with "
    "the square of the mean, and passes 1 before the mean is 10000 standard "
    "deviations. By Welford's method it stays small",
    figsize=(6.6, 3.6),
)
plt.loglog(RATIOS, errors_of_squares, marker="o", label="by squares")
plt.loglog(RATIOS, errors_of_welford, marker="o", label="by Welford's method")
plt.axhline(1, color="gray", linestyle=":")
plt.xlabel("mean / standard deviation")
plt.ylabel("relative error of the variance")
plt.legend()
plt.show()

# %%
# **What the figure shows.**
# The error of squares grows with the square of the ratio, as we expected: ten
# times the mean costs two decimal digits. Above the dotted line the error is
# larger than the variance itself, so nothing of that is left, and the result
# can even be negative.
# With Welford's method, more than six digits are right at a ratio of 100, and
# more than four at 10000.
#
# **Why.**
# What is left of the error comes from the mean of each lane. In float32 it is
# rounded by up to :math:`2^{-24}` of itself. At a ratio of 10000 that is
# 0.0006 standard deviations. So the distances are a little wrong, by as much
# as that, and not by several standard deviations.
#
# **What follows.**
# A test with random numbers whose mean is 0 would never find the difference.
# Rows with a large mean do occur, and a sum of squares for them is not a
# little worse but wrong. So we take Welford's method.
#
# What do the caches deliver?
# ---------------------------
#
# Let's compute what our plan means for L1. The programs on an SM are 64 warps
# divided by those of a program, or one for wide rows.

print("columns  lanes of a tile  warps  programs on an SM  KB of rows on it")
for N in (8192, 16384, 24576, 32768, 49152, 65536, 131072):
    block, warps = plan_forward(N, itemsize=2)
    programs = 64 // warps if N <= 32768 else 1
    kilobytes = programs * N * 2 // 1024
    print(f"{N:7}{block:17}{warps:7}{programs:19}{kilobytes:18}")

# %%
# Compare the last column with the line without help in the figure above. At
# 16384 and at 65536 columns, where the rows on an SM take 128 KB, that line is
# lower than at 8192, 24576 and 49152, where they take 64 or 96 KB. (At 12288
# columns, which the table leaves out, they take 96 KB as well.) It is lowest
# at 131072 columns, with 256 KB. With help our line falls only there, if we
# leave out the dip at 32768 once more.
# On the H200 the line without help is lower at 8192 than at 16384 columns, 91%
# and 92%, and both lines fall from 49152 columns on, where a single program
# runs on an SM.
#
# A clock cannot say where the second sweep reads from, but the hardware counts
# it, and ``ncu``, NVIDIA's profiler, shows the count.
# We count two things in the forward pass: the bytes that DRAM delivers, and
# the bytes that L2 delivers to the SMs. Both are divided by the bytes of
# ``x``.
# Without any help from L1, L2 would deliver 4 times the bytes of ``x``: each
# program reads its row twice, and as many elements of ``w`` and of ``b``.

# %%

# Scaffold: bytes of the forward pass, benchmarks that ncu counts.


def count_forward(M, N, dtype, provider, unit):
    """Run a forward pass where ncu counts it, in units of so many bytes."""
    if not ON_GPU:
        return 3 * [float("nan")]
    x, w, b, _ = (t.detach() for t in inputs(M, N, dtype))
    function = without_help if provider == "plain" else with_help
    function(x, (N,), w, b)  # compiles the kernel
    by_hand = x.nbytes // unit
    with torch.cuda.nvtx.range(f"counted {provider} {N} per {by_hand}"):
        function(x, (N,), w, b)
    return 3 * [float("nan")]  # only ncu knows


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=[8192, 16384, 32768, 65536, 131072],
        x_log=True,
        line_arg="provider",
        line_vals=["triton", "plain"],
        line_names=["Triton", "No help"],
        ylabel="bytes of DRAM per byte counted",
        plot_name="layer-norm-two-sweeps-dram",
        args={
            "M": 4096,
            "dtype": torch.float16,
            "mode": "forward",
            "counter": "dram__bytes_read.sum",
        },
    )
)
def dram_reads(M, N, dtype, mode, counter, provider):
    """Bytes that DRAM delivers in a forward pass, over the bytes of x."""
    return count_forward(M, int(N), dtype, provider, unit=1)


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=[8192, 16384, 32768, 65536, 131072],
        x_log=True,
        line_arg="provider",
        line_vals=["triton", "plain"],
        line_names=["Triton", "No help"],
        ylabel="bytes of L2 per byte counted",
        plot_name="layer-norm-two-sweeps-l2",
        args={
            "M": 4096,
            "dtype": torch.float16,
            "mode": "forward",
            "counter": "lts__t_sectors_srcunit_tex_op_read.sum",
        },
    )
)
def l2_reads(M, N, dtype, mode, counter, provider):
    """Bytes that SMs read from L2 in a forward pass, in sectors of 32, over
    the bytes of x."""
    return count_forward(M, int(N), dtype, provider, unit=32)


# %%

dram_reads.run(show_plots=ON_GPU)

# %%

l2_reads.run(show_plots=ON_GPU)

# %%
# **What the figures show.**
# On the H100 our kernel reads 1.00 times the bytes of ``x`` from DRAM at
# 65536 columns, and 1.36 times at 131072. Without help it reads 1.10 and
# 1.83 times the bytes.
# From L2 it reads 1.03 times the bytes of ``x`` at 8192 columns, 1.40 at
# 32768, 2.34 at 65536 and 3.22 at 131072. Without help it reads 1.40,
# 2.23, 3.39 and 3.75 times the bytes.
# On the H200 our kernel reads 1.00 and 1.36 times the bytes of ``x`` from DRAM
# at 65536 and 131072 columns, and without help 1.04 and 1.74 times. From L2 it
# reads 1.04, 1.31, 2.24 and 2.82 times the bytes at these four widths, and
# 1.45, 2.34, 3.35 and 3.67 times without help.
#
# **Why.**
# Up to 32768 columns, the rows in progress on an SM take 128 KB at most, and
# ``w`` and ``b`` take up to 128 KB. That is about what L1 has, and it delivers
# most of what is read again. At 65536 columns ``w`` and ``b`` alone would fill
# L1, and at 131072 columns it delivers little. Then L2 has to help.
#
# The rows in progress on all 132 SMs are 17 MB at 65536 columns and 35 MB
# at 131072. An H100 has 50 MB of L2, but ``y`` goes through it, too, and so
# some of the rows leave before the second sweep comes. At 16384 and 32768
# columns the rows in progress are as large as at 65536, since there are four
# or two of them on an SM. There, too, DRAM delivers more than ``x`` once if
# the kernel gets no help. At 8192 columns they are half as large, and DRAM
# delivers no more than that.
#
# Do the bytes from DRAM explain the speed? At 131072 columns our kernel moves
# 2.36 matrices: those that it reads, and ``y``. A copy moves 2, so we expect
# 2/2.36, or 85% of its speed, and we have measured 83%. Without help it is
# 2.83 matrices, 71% expected and 69% measured. So they explain nearly all of
# it.
# On the H200 they do not: at 131072 columns we expect 85% and measure 73%, and
# without help 73% and 70%. We have not looked into what takes the rest there.
#
# **What follows.**
# The order of the second sweep and the three hints cost nothing, and where a
# cache is just too small they save much.
# For rows of more than 65536 columns, two sweeps are not the best that a GPU
# can do.
#
# Backward: the means first
# -------------------------
#
# Why is the backward pass harder for wide rows?
#
# Because of ``dw`` and ``db``. On the pages before, a program takes whole
# rows, one after the other, and keeps a sum for each column of ``dw`` and of
# ``db`` in registers. At 65536 columns these are 131072 sums, or 512 KB in
# float32. All registers of an SM have 256 KB.
#
# So we divide the columns. A *slice* is a group of neighboring columns, and a
# program takes the same slice of many rows. Its sums have the width of the
# slice, however wide a row is.
#
# But then no program sees a whole row, and ``dx`` needs two means over the
# row. The formula is
#
# .. math:: dx = r \, (g - \hat{x} \, c_1 - c_2)
#
# with :math:`g = w \, dy`. Here :math:`c_1` is the mean of
# :math:`\hat{x} \, g` over the row, :math:`c_2` is the mean of :math:`g`, and
# :math:`r` is ``rstd``.
# So again there are two sweeps, and this time each is a kernel of its own.
# The first computes both means of each row, and the second does the rest.

# %%

# Drawing: which part of the matrices a program of either kernel reads.

figure, (left, right) = plt.subplots(
    1,
    2,
    num="Two kernels read the same matrix of four rows and six columns. In "
    "the first, each program has a row. In the second, each program has a "
    "slice of two columns in all rows",
    figsize=(7.5, 2.6),
)
for row in range(4):
    for column in range(6):
        for axes, program in ((left, row), (right, column // 2)):
            axes.add_patch(
                plt.Rectangle(
                    (column, 3 - row),
                    1,
                    1,
                    fc=f"C{program}",
                    ec="k",
                    alpha=0.5,
                )
            )
for axes, title in (
    (left, "first kernel: c1 and c2 of a row"),
    (right, "second kernel: dx, and sums of a slice"),
):
    axes.set_title(title, fontsize=10)
    axes.set_aspect("equal")
    axes.axis((0, 6, 0, 4))
    axes.axis("off")
plt.show()

# %%
# The first kernel has a program for each row. Each lane adds up its part of
# both sums, and the lanes are added up once, at the end.


@triton.jit
def _layer_norm_bwd_means(
    dy_ptr,  # (M, N), contiguous
    x_ptr,  # (M, N), contiguous
    w_ptr,  # (N,); None counts as 1
    mean_ptr,  # (M,), from the forward pass
    rstd_ptr,  # (M,), from the forward pass
    c_ptr,  # (2, M): c1 of all rows, then c2
    M,  # rows
    N: tl.constexpr,  # columns
    BLOCK: tl.constexpr,  # lanes of a tile: a power of two
):
    # A program for each row. M * N may pass 2**31.
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * N
    dy_ptr += row * N
    mean = tl.load(mean_ptr + row)
    rstd = tl.load(rstd_ptr + row)

    # Both sums, for each lane.
    acc: tl.constexpr = mean_ptr.dtype.element_ty  # float32, or float64
    c1 = tl.zeros((BLOCK,), acc)
    c2 = tl.zeros((BLOCK,), acc)
    for start in range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + cols, mask=cols < N, other=0).to(acc)
        dy = tl.load(dy_ptr + cols, mask=cols < N, other=0).to(acc)
        wdy = dy  # 0 in a masked lane, which then adds nothing
        if w_ptr is not None:
            wdy *= tl.load(w_ptr + cols, mask=cols < N, other=0).to(acc)
        # x_hat is (x - mean) * rstd. All of a row have the same factor rstd,
        # so one multiplication at the end is enough.
        c1 += (x - mean) * wdy
        c2 += wdy

    tl.store(c_ptr + row, tl.sum(c1) * rstd / N)
    tl.store(c_ptr + M + row, tl.sum(c2) / N)


# %%
# How many warps does an unrolled loop want?
# ------------------------------------------
#
# The compiler knows ``N``, so it knows how often the loop over tiles runs.
# If that is not often, it *unrolls* the loop: it writes the iterations one
# after the other. Then it can move loads of later tiles to the front, so that
# more bytes are in flight. The price is registers, because each load needs a
# place to put its result. A load of 16 bytes takes four registers.
#
# A tile has 8 KB, or 4096 columns in 16 bits. With 16 warps a thread has 16
# bytes of it. Together with ``dy`` and ``w``, that is 12 registers for each
# tile whose loads are moved to the front. With 8 warps it is twice as many.
# The table has the registers of a thread, with 8 warps and with 16, as they
# are compiled for an H100. (A thread gets a multiple of eight.) An SM has room
# for 64 warps and 65536 registers.

REGISTERS = {
    # columns: 8 warps, 16 warps
    8192: (72, 40),
    12288: (64, 56),
    16384: (72, 64),
    20480: (80, 72),
    24576: (80, 88),
    28672: (80, 96),
    32768: (80, 112),
    49152: (80, 64),
    65536: (80, 64),
}

print(
    "columns  tiles  warps of a program: registers, programs on an SM, warps"
)
for N, registers_of_a_thread in REGISTERS.items():
    line = f"{N:7}{triton.cdiv(N, 4096):7}"
    for warps, registers in zip((8, 16), registers_of_a_thread, strict=True):
        programs = min(64 // warps, 65536 // (32 * warps * registers))
        line += f"  {warps:6}: {registers:3}, {programs}, {programs * warps}"
    print(line)

# %%
# Up to 8 tiles, which is 32768 columns, a program of 16 warps takes more
# registers with each tile. From 20480 columns on, only one program fits on an
# SM. While its warps add up their lanes at the end of a row, they load
# nothing, and nobody else is there to do it.
# Above 8 tiles the compiler moves fewer loads to the front, and settles for 64
# registers, so that two programs fit again.
#
# With 8 warps a thread never has more than 80 registers. That is too few for
# all loads of a wide row, so the compiler does not move all of them. A program
# is half as large, and three or four fit on an SM at every width of the table.
# So our rule takes the number with which more warps are on an SM, and
# 8 if it is equal, because more programs overlap better.


def plan_means(N, itemsize):
    """Lanes of a tile of the first kernel, and warps of a program."""
    block = min(8192 // itemsize, triton.next_power_of_2(N))
    tiles = triton.cdiv(N, block)
    if tiles == 3 or 5 <= tiles <= 8:
        return block, 8
    return block, 16


def means_of_rows(dy, x, w, mean, rstd, warps=None):
    """c1 and c2 of each row, as a (2, M) tensor; warps: not by the rule."""
    M, N = x.shape
    c = torch.empty(2, M, dtype=mean.dtype, device=x.device)
    block, warps_by_rule = plan_means(N, x.itemsize)
    if warps is None:
        warps = warps_by_rule
    _layer_norm_bwd_means[(M,)](
        dy_ptr=dy,
        x_ptr=x,
        w_ptr=w,
        mean_ptr=mean,
        rstd_ptr=rstd,
        c_ptr=c,
        M=M,
        N=N,
        BLOCK=block,
        num_warps=warps,
    )
    return c


# %%

# Scaffold: the first backward kernel with 8 and 16 warps, a benchmark.


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=[8192, 12288, 16384, 20480, 24576, 32768, 49152, 65536],
        line_arg="provider",
        line_vals=["triton", "8 warps", "16 warps"],
        line_names=["The rule", "8 warps", "16 warps"],
        ylabel="µs",
        plot_name="layer-norm-two-sweeps-means",
        args={"M": 4096, "dtype": torch.float16, "mode": "backward"},
    )
)
def bench_means(M, N, dtype, mode, provider):
    """Device time: a CUDA graph of several calls, each with inputs of its own
    and after L2 was overwritten, less the graph without the calls; median, 20%
    and 80% quantiles. The first kernel of the backward pass alone."""
    if not ON_GPU:
        return 3 * [float("nan")]
    warps = {"triton": None, "8 warps": 8, "16 warps": 16}[provider]

    def prepare():
        x, w, b, dy = (t.detach() for t in inputs(M, N, dtype))
        _, mean, rstd = torch.native_layer_norm(x, (N,), w, b, 1e-5)
        return lambda: means_of_rows(dy, x, w, mean, rstd, warps)

    return device_time(prepare)


# %%

times = bench_means.run(show_plots=ON_GPU, return_df=True)
times = times.astype({"N": int}).set_index("N")
if times.notna().all(axis=None):  # it was measured
    print("µs of 8 warps, and of 16")
    print(times.iloc[:, 1:].to_string(float_format="%.0f"))

# %%
# **What the figure shows.**
# Where the rule takes 16 warps, they are 3% to 10% faster than 8 on the H100.
# Where it takes 8 warps, at 12288, 20480 and 24576 columns, they are 2%, 3%
# and 1% faster than 16.
# On the H200, 16 warps are 6% to 23% faster where the rule takes them.
#
# At 32768 columns the rule takes 8 warps, so two of the lines show the same
# kernel with the same plan. One of them shows 217 µs, and the other 183 µs,
# while 16 warps take 182 µs. The difference is not in the kernel. Our clock
# measures sixteen calls at a time if a call and the overwriting of L2 take
# less than 0.3 ms together, and otherwise a single one. Overwriting 256 MB
# takes some 90 µs, so this kernel is close to the limit here. We suspect that
# the two ways differ, and have not looked into it yet. At this width we cannot
# say which number of warps is better.
# On the H200 the two lines agree at 32768 columns. But where the rule takes 16
# warps, one kernel shows two times once more: 216 and 193 µs at 49152 columns,
# and 281 and 252 µs at 65536. So do not read much into the H200's lines at
# these widths, in the other figures either.
#
# **Why.**
# Where the rule takes 16 warps, more warps are on an SM to load. At 8192
# columns there are 48 instead of 24, and there the gain is largest. At 16384,
# 49152 and 65536 columns there are 32 instead of 24.
#
# The gain from 8 warps is small, because even one program can have enough
# bytes in flight. An unrolled loop of 5 tiles requests ``x`` and ``dy`` of all
# of them before it needs the first: 512 threads × 5 × 32 bytes are 80 KB, and
# `Loads in flight <04-loads-in-flight.html>`_ has found that 64 KB are enough.
# What is lost is only the time at the end of each row.
#
# **What follows.**
# Look at the registers before you choose the warps of a kernel.
# Here the answer is worth little on an H100. On a GPU with faster memory, the
# end of a row would be a larger part of the time.
# The H200 is such a GPU: where the rule takes 8 warps, at 12288, 20480, 24576
# and 32768 columns, they are 9%, 17%, 17% and 8% faster than 16 there.
#
# Backward: slices
# ----------------
#
# The second kernel has the means, and computes the rest.
#
# A slice has 4 KB of a row. With 131072 columns in 16 bits there are 64
# slices. If there are fewer slices than programs that can run, the rows are
# divided among *groups* of programs: with 16 slices and 264 programs there are
# 16 groups, and each has a sixteenth of the rows.
# A program stores its sums once, after its last row. In the end the sums of
# all groups are added up.
#
# A tile has two rows, and the next tiles are requested ahead, with
# ``num_stages=3``, as in `Loads in flight <04-loads-in-flight.html>`_: the
# compiler makes asynchronous copies of ``x`` and ``dy`` into shared memory.


@triton.jit
def _layer_norm_bwd_slices(
    dy_ptr,  # (M, N), contiguous
    x_ptr,  # (M, N), contiguous
    w_ptr,  # (N,); None counts as 1
    mean_ptr,  # (M,), from the forward pass
    rstd_ptr,  # (M,), from the forward pass
    c_ptr,  # (2, M): c1 and c2 of all rows; None if dx is not wanted
    dx_ptr,  # (M, N), or None if dx is not wanted
    sums_ptr,  # (groups, 2, N), or None if neither dw nor db is wanted
    M,  # rows
    N: tl.constexpr,  # columns
    ROWS: tl.constexpr,  # rows of a tile
    COLS: tl.constexpr,  # columns of a slice: a power of two
):
    # Which slice is ours, and which group of rows? Neighboring programs have
    # neighboring slices of the same rows.
    SLICES: tl.constexpr = (N + COLS - 1) // COLS
    group = tl.program_id(0) // SLICES
    groups = tl.num_programs(0) // SLICES
    cols = tl.program_id(0) % SLICES * COLS + tl.arange(0, COLS)[None, :]

    # Our part of w stays in registers, and so do our sums.
    acc: tl.constexpr = mean_ptr.dtype.element_ty  # float32, or float64
    if w_ptr is not None:
        w = tl.load(w_ptr + cols, mask=cols < N, other=0)
    dw = tl.zeros((1, COLS), acc)
    db = tl.zeros((1, COLS), acc)

    # Where the elements of a tile are, from the beginning of its first row.
    # For two rows of up to 2**30 columns, 32 bits are enough.
    row = tl.arange(0, ROWS)[:, None]
    at = row * N + cols

    for first in tl.range(group * ROWS, M, groups * ROWS, num_stages=3):
        # Load a tile, and what is known of its rows.
        exists = row < M - first
        mask = exists & (cols < N)
        start = tl.cast(first, tl.int64) * N  # M * N may pass 2**31
        x = tl.load(x_ptr + start + at, mask=mask, other=0)
        dy = tl.load(dy_ptr + start + at, mask=mask, other=0)
        mean = tl.load(mean_ptr + first + row, mask=exists, other=0)
        rstd = tl.load(rstd_ptr + first + row, mask=exists, other=0)

        # The terms of dw and db, summed over the rows of the tile.
        x_hat = (x.to(acc) - mean) * rstd
        dy = dy.to(acc)
        dw += tl.sum(dy * x_hat, axis=0, keep_dims=True)
        db += tl.sum(dy, axis=0, keep_dims=True)

        if dx_ptr is not None:
            # The formula for dx, with the means of the first kernel.
            c1 = tl.load(c_ptr + first + row, mask=exists, other=0)
            c2 = tl.load(c_ptr + M + first + row, mask=exists, other=0)
            wdy = dy
            if w_ptr is not None:
                wdy = dy * w.to(acc)
            dx = (wdy - x_hat * c1 - c2) * rstd
            tl.store(dx_ptr + start + at, dx, mask=mask)

    if sums_ptr is not None:
        # Each group has a buffer of its own.
        sums_ptr += group * 2 * N + cols
        tl.store(sums_ptr, dw, mask=cols < N)
        tl.store(sums_ptr + N, db, mask=cols < N)


# %%
# How many programs should run? We take two on each SM. Each of them has two
# tiles requested ahead, of 8 KB of ``x`` and 8 KB of ``dy``. That is 64 KB in
# flight on an SM, which `Loads in flight <04-loads-in-flight.html>`_ has found
# to be enough.

GPU = torch.cuda.get_device_properties(DEVICE) if ON_GPU else None
NUM_SMS = GPU.multi_processor_count if ON_GPU else 4


def backward(dy, x, w, mean, rstd, wanted):
    """dx, dw and db for (M, N) matrices; None where not wanted."""
    wants_dx, wants_dw, wants_db = wanted
    M, N = x.shape
    dx = None
    c = None
    if wants_dx:
        dx = torch.empty_like(x)
        c = means_of_rows(dy, x, w, mean, rstd)

    # As many groups as fill two programs on each SM; at least one.
    rows = 2
    cols = min(4096 // x.itemsize, triton.next_power_of_2(N))
    slices = triton.cdiv(N, cols)
    groups = min(2 * NUM_SMS // slices, triton.cdiv(M, rows))
    groups = max(groups, 1)
    sums = None
    if wants_dw or wants_db:
        shape = (groups, 2, N)
        sums = torch.empty(shape, dtype=mean.dtype, device=x.device)
    _layer_norm_bwd_slices[(slices * groups,)](
        dy_ptr=dy,
        x_ptr=x,
        w_ptr=w,
        mean_ptr=mean,
        rstd_ptr=rstd,
        c_ptr=c,
        dx_ptr=dx,
        sums_ptr=sums,
        M=M,
        N=N,
        ROWS=rows,
        COLS=cols,
        num_warps=8,
    )

    dw = None
    db = None
    if sums is not None:
        both = sums.sum(dim=0)
        if wants_dw:
            dw = both[0]
        if wants_db:
            db = both[1]
    return dx, dw, db


# %%
# A function to train with
# ------------------------
#
# The autograd function is that of `Layer normalization, both passes
# <01-layer-norm.html>`_. Tensors that are not contiguous are copied first.
# ``dw`` and ``db`` stay in the type of the sums here, and PyTorch rounds them
# to the types of ``w`` and ``b``.


def contiguous_or_none(tensor):
    """The tensor with its elements side by side; copied only if needed."""
    if tensor is None:
        return None
    return tensor.contiguous()


class LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, b, eps):
        x = contiguous_or_none(x)
        w = contiguous_or_none(w)
        b = contiguous_or_none(b)
        y, mean, rstd = forward(x, w, b, eps)
        ctx.save_for_backward(x, w, mean, rstd)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable  # no second derivatives
    def backward(ctx, dy):
        x, w, mean, rstd = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:3]
        dx, dw, db = backward(dy.contiguous(), x, w, mean, rstd, wanted)
        # One gradient for each argument of forward; eps has none.
        return dx, dw, db, None


# %%
# The function that a user calls checks its arguments first.
# Within a tile our kernels count elements in 32 bits, and a tile of the second
# backward kernel has two rows. So a row can have up to :math:`2^{30}` columns.

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
    if shape.numel() > 2**30:
        raise ValueError(
            f"normalized_shape has {shape.numel()} columns: at most {2**30} "
            "are possible"
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
# Is it right? We compare each element with PyTorch's layer norm in float64.

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

shape = (5, 3001)  # small, because the interpreter is slow
if ON_GPU:
    shape = (37, 100_003)
for dtype in (torch.float16, torch.float32):
    check(layer_norm, *shape, dtype)

x = torch.randn(3, shape[1], device=DEVICE, dtype=torch.float64)
expected = F.layer_norm(x, x.shape[1:])
torch.testing.assert_close(layer_norm(x, x.shape[1:]), expected)
print("in float64: right")

# %%
# How fast is the backward pass?
# ------------------------------
#
# Both sweeps read ``x`` and ``dy``, and the second one starts when the first
# has read all rows. Matrices of this size have left L2 by then: at 8192
# columns ``x`` and ``dy`` have 134 MB together. So we expect what we have
# computed above: 60% of a copy at most.

# %%

# Scaffold: the backward pass in two sweeps, a benchmark.


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=WIDTHS,
        line_arg="provider",
        line_vals=["triton", "torch", "torch.compile", "copy"],
        line_names=["Triton", "PyTorch", "torch.compile", "Copy"],
        ylabel="GB/s",
        plot_name="layer-norm-two-sweeps-backward",
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
    if provider == "torch.compile":
        return compiled_speeds(M, N, dtype)[mode]
    if provider == "torch":
        return speed_of(pytorch, M, N, dtype, mode)
    return speed_of(layer_norm, M, N, dtype, mode)


# %%

report(bench_backward)

# %%
# **What the figure shows.**
# On the H100 our backward pass reaches 56% to 59% of the copy, PyTorch reaches
# 37% to 39%, and torch.compile reaches 40% to 55%.
# Backward, ours is 1.5 to 1.6 times as fast as PyTorch, and 1.0 to 1.5
# times as fast as torch.compile.
#
# On the H200 our backward pass reaches 52% to 59% of the copy, PyTorch reaches
# 33% to 36%, and torch.compile reaches 37% to 52%. Ours is 1.5 to 1.7 times as
# fast as PyTorch, and 1.0 to 1.5 times as fast as torch.compile.
#
# **Why.**
# The roof is 60%, and the line comes close to it where rows are wide. At 8192
# columns we reach 56%. There the whole pass takes only 122 µs, and it has
# three kernels that start one after the other: two of ours, and one of PyTorch
# that adds up the sums of all groups. To start them takes about as long at
# each width, so it matters less where the pass takes longer.
# On the H200 the line comes close to the roof at 65536 columns, with 58%, but
# from 24576 to 49152 columns it is at 52% to 53%. We do not know why.
#
# PyTorch's kernel for ``dx`` reads ``x`` and ``dy`` twice as well, and its
# kernels for ``dw`` and ``db`` read them again, as `Layer normalization, both
# passes <01-layer-norm.html>`_ has found. Where no cache helps, these are
# seven matrices, so its roof is 43%. torch.compile is much faster at 12288
# columns than at the widths around it, and we have not looked for the reason.
#
# Does L2 really keep nothing from the first kernel to the second? We count the
# bytes that DRAM delivers, and divide them by those of ``x`` and ``dy``.

# %%

# Scaffold: bytes of the backward pass, a benchmark that ncu counts.


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=[8192, 32768, 131072],
        x_log=True,
        line_arg="provider",
        line_vals=["triton"],
        line_names=["Triton"],
        ylabel="bytes of DRAM per byte counted",
        plot_name="layer-norm-two-sweeps-dram-backward",
        args={
            "M": 4096,
            "dtype": torch.float16,
            "mode": "backward",
            "counter": "dram__bytes_read.sum",
        },
    )
)
def dram_reads_backward(M, N, dtype, mode, counter, provider):
    """Bytes that DRAM delivers in a backward pass, over those of x and dy."""
    if not ON_GPU:
        return 3 * [float("nan")]
    N = int(N)
    x, w, b, dy = (t.detach() for t in inputs(M, N, dtype))
    _, mean, rstd = forward(x, w, b, eps=1e-5)
    wanted = (True, True, True)
    backward(dy, x, w, mean, rstd, wanted)  # compiles the kernels
    by_hand = x.nbytes + dy.nbytes
    with torch.cuda.nvtx.range(f"counted {provider} {N} per {by_hand}"):
        backward(dy, x, w, mean, rstd, wanted)
    return 3 * [float("nan")]  # only ncu knows


# %%

dram_reads_backward.run(show_plots=ON_GPU)

# %%
# **What the figure shows.**
# On the H100, at 8192, 32768 and 131072 columns, a backward pass reads 2.03,
# 2.01 and 2.00 times the bytes of ``x`` and ``dy`` from DRAM. So the second
# sweep comes from DRAM, and so does the first.
# The H200 reads as much.
#
# **What follows.**
# No plan for these two kernels can do much better. To pass the roof, a kernel
# has to read ``x`` and ``dy`` once, and `Programs that share a row
# <08-shared-rows.html>`_ do that.
#
# Where PyTorch or a library is better
# ------------------------------------
#
# - **torch.compile comes close at some widths.** On the H100 it reaches 99% of
#   a copy forward at 16384 columns, and ours 98%. Backward, at 12288 columns,
#   it reaches 55% of the copy, and ours 56%.
#   On the H200 ours is ahead at both, with 97% and 94% forward, and 54% and
#   52% backward.
# - **Narrow rows need a single sweep backward.** Up to 20 KB, `Chunks instead
#   of padding <05-chunks.html>`_ keeps a row in registers, and the sums beside
#   it. At 8192 columns it reaches 89% of the copy on the H100, and we reach
#   56%.
# - **Wide rows can be read once, too**, if several programs share one.
#   `Programs that share a row <08-shared-rows.html>`_ shows how. All programs
#   of a row have to run at the same time there.
# - **PyTorch can do more.** It has second derivatives, and it does not compile
#   a kernel for each new width.
# - **torch.compile can fuse** a layer norm with what comes before and after.
# - **Libraries have kernels of their own.** `Every width
#   <11-every-width.html>`_ measures them.
#
# Exercise 1: a shift instead
# ---------------------------
#
# There is a simpler cure for the lost digits: subtract from each element the
# first one of its row, and then use the short formula. That changes the mean
# but not the variance, and the squares are small, unless the first element is
# far from all others.
# The kernel below adds up elements and squares without a shift. Change it so
# that it finds the right standard deviation for both rows, one of which has a
# mean of 10000.
#
# **Hint 1.** Load the first element of the row before the loop, and subtract
# it from each tile.
#
# **Hint 2.** A masked lane loads 0. What does it add to both sums after the
# shift?
#
# **Hint 3.** ``other=`` may be a number that was computed. Which number adds
# nothing after the shift?


@triton.jit
def _rstd_by_squares(
    x_ptr,  # (rows, N), contiguous
    rstd_ptr,  # (rows,)
    N: tl.constexpr,  # columns
    BLOCK: tl.constexpr,  # lanes of a tile: a power of two
):
    x_ptr += tl.program_id(0) * N
    total = tl.zeros((BLOCK,), tl.float32)
    squares = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + cols, mask=cols < N, other=0)  # to do
        total += x
        squares += x * x
    mean = tl.sum(total) / N
    # What should be a variance may be 0 or less.
    variance = tl.maximum(tl.sum(squares) / N - mean * mean, 1e-12)
    tl.store(rstd_ptr + tl.program_id(0), 1 / tl.sqrt(variance))


def exercise_1(kernel):
    """Print the errors for two rows, and say whether both are small."""
    x = torch.randn(2, 1000, device=DEVICE)
    x[1] += 10_000
    rstd = torch.empty(2, device=DEVICE)
    kernel[(2,)](x_ptr=x, rstd_ptr=rstd, N=1000, BLOCK=256)
    exact = x.double().var(dim=1, correction=0) ** -0.5
    errors = (rstd / exact - 1).abs().tolist()
    print("relative errors:", *(f"{error:.0e}" for error in errors))
    return max(errors) < 1e-4


print("right:", exercise_1(_rstd_by_squares))

# %%

# Solution 1


@triton.jit
def _rstd_shifted(x_ptr, rstd_ptr, N: tl.constexpr, BLOCK: tl.constexpr):
    x_ptr += tl.program_id(0) * N
    first = tl.load(x_ptr)
    total = tl.zeros((BLOCK,), tl.float32)
    squares = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        # A masked lane loads the first element itself, so that d is 0.
        d = tl.load(x_ptr + cols, mask=cols < N, other=first) - first
        total += d
        squares += d * d
    mean = tl.sum(total) / N
    variance = tl.maximum(tl.sum(squares) / N - mean * mean, 1e-12)
    tl.store(rstd_ptr + tl.program_id(0), 1 / tl.sqrt(variance))


assert exercise_1(_rstd_shifted)

# %%
# What we learned
# ---------------
#
# These are the designs of this page: which matrices each moves, how fast it
# is on the H100, and why.
#
# Forward, at 65536 and 131072 columns. Two matrices must move:
#
# - **Two sweeps** move three of them where no cache helps. From the beginning
#   to the end both times, and without hints, they reach 91% and 69% of a copy.
# - **Two sweeps with help for the caches** reach 99% and 83%, because the
#   second sweep begins with what is still in a cache.
# - **PyTorch's forward pass** reaches 60% and 59%, and that of
#   **torch.compile** reaches 63% and 65%.
#
# Backward, at the same widths. Three matrices must move:
#
# - **Means first, then slices** move five matrices, and reach 59% and 59% of
#   the copy. The roof is 60%.
# - **PyTorch's backward pass** reaches 38% and 37%, and that of
#   **torch.compile** reaches 41% and 40%.
#
# And for kernels in general:
#
# - Never subtract two large numbers to get a small one. Keep the small one up
#   to date instead.
# - Test sums with numbers whose mean is far from 0.
# - If you read something twice, begin at its end the second time, because that
#   is what a cache still has.
# - Sums for which a program has no room in registers can be divided among
#   programs by columns, at the price of another sweep.
# - A loop whose length the compiler knows may be unrolled. Look at the
#   registers before you choose the warps.
#
# **Next:** two sweeps read every byte twice. `Programs that share a row
# <08-shared-rows.html>`_ keeps a wide row in the registers of several SMs and
# reads it once.
