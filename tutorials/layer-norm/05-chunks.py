r"""
Chunks instead of padding
=========================

How does a row of 4608 columns fit into registers without a tile of 8192?
Cut it into chunks, of which only the last can have idle lanes, and let narrow
rows share a program.

The number of elements of a tile is always a power of two, and few rows are
that wide.
In the first half of this page we cut a row into chunks, try them at a few
widths with a plan made by hand, and find out when the padding of a tile costs
time and when it does not.
In the second half we write a formula that makes a plan for every width, test
it at widths that it was not made from, and build the function to train with.

**What you will learn**

- What idle lanes cost: which resources they take, and in which pass that
  matters.
- How to keep a row in registers as a tuple of chunks, with
  ``tl.static_range``.
- How to compute the registers that a kernel needs before you compile it.
- How to choose chunks, warps, stages and a limit of registers by a formula,
  without autotuning, and how to test such a formula.
- How to start a second kernel before the first one has ended, and what that
  is worth here.

**What you need:** `Layer normalization, both passes <01-layer-norm.html>`_ for
the formulas, `Who adds up the rows? <02-summing-rows.html>`_ for the buffers
that a second kernel adds up, and `Loads in flight <04-loads-in-flight.html>`_
for stages. You don't need a GPU.
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
# How many lanes are idle?
# ------------------------
#
# A *lane* is a place for one element of a tile.
# A row of 4608 columns needs a tile of 8192 lanes. 3584 of them, or 44%, are
# *idle*: they are masked, and hold no column.
#
# A *chunk* is one of several tiles that hold a row together. All chunks have
# the same width, which is a power of two, but there can be any number of them.
# Five chunks of 1024 lanes have 5120 lanes. The first four are full, and half
# of the last one is idle. That is 512 lanes, or 10%.
# In the picture, idle lanes have no color.

# %%

# Drawing: which lanes of one tile and of chunks are idle.

plt.figure(
    "4608 columns in a tile of 8192 lanes, and in 5 chunks of 1024",
    figsize=(7.5, 1.8),
)
for level, chunk in ((1, 8192), (0, 1024)):
    plt.barh(level, 4608, height=0.6, color="C0", alpha=0.6)
    for start in range(0, 4608, chunk):
        plt.barh(level, chunk, height=0.6, left=start, fc="none", ec="k")
plt.yticks((0, 1), ("5 chunks", "1 tile"))
plt.xlabel("lanes")
plt.show()

# %%
# Forward, in chunks
# ------------------
#
# How does a kernel treat several tiles as one row?
#
# Here is a row of ten columns in chunks of four, as PyTorch tensors.
# The last chunk has two idle lanes, which hold 0.

row = torch.arange(10.0)
chunks = [torch.zeros(4) for _ in range(3)]
for c in range(3):
    columns = row[4 * c : 4 * c + 4]
    chunks[c][: len(columns)] = columns
print("chunks:", [chunk.tolist() for chunk in chunks])

# We add up the chunks lane by lane, and then the four lanes.
total = chunks[0] + chunks[1] + chunks[2]
print("sums of the lanes:", total.tolist())
print("sum of the row:", total.sum().item())

# %%
# Why in this order? A sum over the lanes needs numbers of all threads of a
# program, and they have to wait for each other. An addition lane by lane does
# not: each thread adds up what it has.
# So we first add up the chunks, and then the lanes, once for the whole row.
#
# The first function says which rows and columns the lanes of a chunk stand
# for.
# A program may take several rows: chunk ``c`` of ``ROWS`` rows is a tile of
# ``ROWS`` × ``CHUNK`` lanes.


@triton.jit
def _chunk(c, left, N: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr):
    """Row and column of the lanes of a chunk, and which of them exist."""
    row = tl.arange(0, ROWS)[:, None]
    col = c * CHUNK + tl.arange(0, CHUNK)[None, :]
    # Of the rows of a program, only so many are left in the matrix.
    mask = row < left
    # The compiler knows c, so all chunks but the last compare no columns.
    if (c + 1) * CHUNK > N:
        mask = mask & (col < N)
    return row, col, mask


@triton.jit
def _load_chunks(
    ptr,  # where the first of our rows begins
    stride,  # elements from a row to the next; 0: all rows are the same
    left,  # rows that exist
    N: tl.constexpr,  # columns
    ROWS: tl.constexpr,  # rows of a chunk
    CHUNK: tl.constexpr,  # lanes of a chunk in each row
    HINT: tl.constexpr  # what the caches should do with the rows
):  # fmt: skip
    """Rows of a matrix as a tuple of chunks; 0 in lanes that do not exist."""
    xs = ()
    # Unrolled by the compiler: c is a constant each time, and the tuple grows.
    for c in tl.static_range((N + CHUNK - 1) // CHUNK):
        row, col, mask = _chunk(c, left, N, ROWS, CHUNK)
        at = ptr + (row * stride + col)
        xs += (tl.load(at, mask=mask, other=0, eviction_policy=HINT),)
    return xs


# %%
# A loop with ``range`` could not do that. All its iterations share one piece
# of code, and a register has no index that a loop could count up.
# ``tl.static_range`` writes the iterations one after the other when the kernel
# is compiled, so each chunk has registers of its own, and nothing of the tuple
# is left at run time.
# The loop does not wait for a load, either: all chunks are requested before
# the first of them arrives.
#
# The kernel is the forward kernel of `Layer normalization, both passes
# <01-layer-norm.html>`_, with a loop over chunks in place of each step over
# columns.


@triton.jit
def _layer_norm_fwd_chunks(
    x_ptr,  # (M, N), contiguous
    w_ptr,  # (N,); None counts as 1
    b_ptr,  # (N,); None counts as 0
    y_ptr,  # (M, N)
    mean_ptr,  # (M,): saved for the backward pass
    rstd_ptr,  # (M,): 1 / standard deviation, saved as well
    M,  # rows
    eps: tl.constexpr,  # added to the variance
    N: tl.constexpr,  # columns
    ROWS: tl.constexpr,  # New: rows that a program takes
    CHUNK: tl.constexpr,  # New: lanes of a chunk in each row
    HINT: tl.constexpr,  # New: what the caches should do with x
):
    acc: tl.constexpr = mean_ptr.dtype.element_ty  # float32, or float64

    # Load our rows. They stay in the type of x, which takes half as many
    # registers in 16 bits, and are converted where they are used.
    first = tl.program_id(0) * ROWS
    left = M - first
    start = tl.cast(first, tl.int64) * N  # M * N may pass 2**31
    xs = _load_chunks(x_ptr + start, N, left, N, ROWS, CHUNK, HINT)

    # The mean: add up chunks lane by lane, and then the lanes of each row.
    total = tl.zeros((ROWS, CHUNK), acc)
    for c in tl.static_range(len(xs)):
        total += xs[c].to(acc)
    mean = tl.sum(total, axis=1)[:, None] / N

    # The variance, in the same way.
    total = tl.zeros((ROWS, CHUNK), acc)
    for c in tl.static_range(len(xs)):
        _, col, _ = _chunk(c, left, N, ROWS, CHUNK)
        d = tl.where(col < N, xs[c].to(acc) - mean, 0)  # idle lanes: 0 again
        total += d * d
    rstd = 1 / tl.sqrt(tl.sum(total, axis=1)[:, None] / N + eps)

    # mean and rstd are columns of ROWS numbers.
    row = tl.arange(0, ROWS)[:, None]
    tl.store(mean_ptr + first + row, mean, mask=row < left)
    tl.store(rstd_ptr + first + row, rstd, mask=row < left)

    # w and b are loaded only now: loaded together with x, they would take
    # registers all the time. All programs read them, so caches keep them.
    KEEP: tl.constexpr = "evict_last"
    for c in tl.static_range(len(xs)):
        row, col, mask = _chunk(c, left, N, ROWS, CHUNK)
        at = row * 0 + col  # of a whole tile: loads of 16 bytes
        y = (xs[c].to(acc) - mean) * rstd
        if w_ptr is not None:
            y *= tl.load(w_ptr + at, col < N, eviction_policy=KEEP).to(acc)
        if b_ptr is not None:
            y += tl.load(b_ptr + at, col < N, eviction_policy=KEEP).to(acc)
        tl.store(y_ptr + start + (row * N + col), y, mask=mask)


# %%
# Two lines need an explanation.
#
# ``at = row * 0 + col`` looks as if it did nothing.
# It matters where a program has several rows. Take 4 rows of 256 columns in 2
# warps. Of the tile of ``x``, each of the 64 threads loads pieces of 8
# neighboring columns. A row of ``w`` alone has only 256 lanes, and the
# compiler would give each thread 4 of them. So its loads would be narrower,
# and a thread would get other columns of ``w`` than it has of ``x``. The
# threads would have to exchange them through shared memory, and wait for each
# other.
# ``row * 0`` has as many rows as the tile, so ``at`` has an address for each
# lane of it. Now ``w`` is loaded just like ``x``, 16 bytes at a time, and each
# thread has what it needs. The rows of the tile load the same bytes, which
# come from a cache.
# A program with a single row gets the same code either way.
#
# ``KEEP`` and ``HINT`` are *eviction policies*: they tell the caches what to
# give up first when they need room. ``evict_last`` keeps ``w`` and ``b`` for
# the other programs. ``HINT`` is the policy of ``x``, which no program reads
# again.
#
# Four things are ours to choose: the rows and the lanes of a chunk, the
# policy, and the warps of a program. Together they are a *plan*, and the
# launch takes it as a dictionary.


def forward(x, w, b, eps, plan):
    """y, mean and rstd for a contiguous (M, N) x; w and b may be None."""
    M, N = x.shape
    y = torch.empty_like(x)
    # 16-bit rows are summed in float32.
    acc = torch.promote_types(x.dtype, torch.float32)
    mean = torch.empty(M, dtype=acc, device=x.device)
    rstd = torch.empty(M, dtype=acc, device=x.device)
    _layer_norm_fwd_chunks[(triton.cdiv(M, plan["ROWS"]),)](
        x_ptr=x,
        w_ptr=w,
        b_ptr=b,
        y_ptr=y,
        mean_ptr=mean,
        rstd_ptr=rstd,
        M=M,
        eps=eps,
        N=N,
        **plan,
    )
    return y, mean, rstd


x = torch.randn(3, 10, device=DEVICE)
plan = {"ROWS": 1, "CHUNK": 4, "HINT": "", "num_warps": 4}
y, _, _ = forward(x, None, None, 1e-5, plan)
print("chunks of 4:", torch.allclose(y, F.layer_norm(x, (10,)), atol=1e-5))

# %%
# Do idle lanes cost time?
# ------------------------
#
# We compare chunks of 1024 lanes with one tile. Both have four warps, and
# neither has ``w`` or ``b``, so they differ in nothing but their lanes.
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

# Scaffold: idle lanes forward, a benchmark.


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=[2560, 4096, 4608, 6656, 8192],
        line_arg="provider",
        line_vals=["triton", "tile", "copy"],
        line_names=["Chunks", "One tile", "Copy"],
        ylabel="GB/s",
        plot_name="layer-norm-chunks-lanes",
        args={"M": 4096, "dtype": torch.float16, "mode": "forward"},
    )
)
def bench_lanes(M, N, dtype, mode, provider):
    """Device time: a CUDA graph of several calls, each with inputs of its own
    and after L2 was overwritten, less the graph without the calls; median, 20%
    and 80% quantiles. Copy: the best of six tiles."""
    if not ON_GPU:
        return 3 * [float("nan")]  # the interpreter cannot be timed
    if provider == "copy":
        return ceiling(reads=1, writes=1, shape=(M, N), dtype=dtype)
    plan = {"ROWS": 1, "CHUNK": 1024, "HINT": "", "num_warps": 4}
    if provider == "tile":
        plan["CHUNK"] = triton.next_power_of_2(N)

    def prepare():
        x, _, _, _ = inputs(M, N, dtype)
        x = x.detach()
        return lambda: forward(x, w=None, b=None, eps=1e-5, plan=plan)

    bytes_moved = 2 * M * N * dtype.itemsize  # read x, write y
    return speed(bytes_moved, prepare)


# %%

report(bench_lanes)

# %%
# **What the figure shows.**
# No, idle lanes cost no time here. On the H100 chunks reach 92% to 100% of a
# copy, and one tile reaches 91% to 100%. Over all widths they differ by up to
# 0.5%.
#
# On the H200 chunks reach 94% to 99% of a copy, and one tile reaches 93% to
# 99%. They differ by up to 1.6% there.
#
# Here and below, the speeds and times in the text are those of the H100
# wherever we do not speak of the H200.
#
# **Why.**
# An idle lane moves no bytes, because a masked load asks for nothing. What it
# takes is instructions and registers.
#
# - At 4608 columns each of the 128 threads has 8192 / 128 = 64 lanes of the
#   tile, and loads them with 8 instructions of 8 lanes each. In chunks it has
#   40 lanes, and needs 5. But several programs share an SM, and while one of
#   them executes instructions, the others wait for memory anyway.
# - At 6656 columns a thread of the compiled kernel has 74 registers with a
#   tile, and 72 with chunks. So six programs fit on an SM with a tile, and
#   seven with chunks. But each of them requests its whole row at once, and six
#   rows are 80 KB. `Loads in flight <04-loads-in-flight.html>`_ found that 64
#   KB are enough.
#
# **What follows.**
# Forward, padding is free, and we could have stayed with one tile. Chunks pay
# where registers are short.
#
# Backward: registers
# -------------------
#
# Is it the same in the backward pass?
#
# Let's count what a program keeps in registers for each of its lanes.
# A register has 32 bits, so a number of 16 bits takes half of one.
#
# - ``x``, ``dy`` and ``w`` in 16 bits take half a register each. That is 1.5.
# - The two sums that become ``dw`` and ``db`` are in float32, and take one
#   each. That is 2.
#
# Together that is 3.5 registers a lane, from the first row to the last. The
# forward pass needs much less: half a register for ``x``, and one running sum
# that all chunks share.
#
# A thread can have at most 255 registers. A program of 8 warps has 256
# threads. How many lanes does each of them have, and how many registers do
# they take?

print("         one tile          chunks of 2048")
print("columns  lanes  registers  lanes  registers")
for N in (2560, 4608, 8192, 8704, 10240):
    line = f"{N:7}"
    for chunk in (triton.next_power_of_2(N), 2048):
        lanes = triton.cdiv(N, chunk) * chunk // 256  # of a thread
        line += f"{lanes:7}{3.5 * lanes:11.0f}"
    print(line)

# %%
# At 10240 columns, chunks leave 115 of 255 registers for addresses and for
# what a row needs while it is computed, such as ``x`` and ``dy`` in float32.
# A tile of 16384 lanes leaves 31.
# (The compiler is a little smarter than our count. The sums of a lane that is
# beyond column ``N`` are never stored, so it does not keep them.)
#
# Now the kernel. The formula for ``dx`` was
# :math:`r \, (g - \hat{x} \, c_1 - c_2)`, with :math:`g = w \, dy` and
# :math:`\hat{x} = r \, (x - \mu)`; :math:`c_1` is the mean of
# :math:`g \, \hat{x}` over the row, and :math:`c_2` is the mean of :math:`g`.
# We multiply it out, so that factors that are the same for a whole row are
# multiplied once a row, and not in each lane.
# With :math:`d = x - \mu`, a lane computes
#
# .. math:: dx = r \, g - (d \, r^2 c_1 + r \, c_2)
#
# The first function returns :math:`r^2 c_1` and :math:`r \, c_2`.
# Both means need a sum over the row, and a sum has to go through all threads
# of a program. We send both at once: ``tl.reduce`` takes a tuple, and a
# function that combines two pairs. So the warps of a program have to wait for
# each other once, and not twice.


@triton.jit
def _add_two(a1, a2, b1, b2):
    return a1 + b1, a2 + b2


@triton.jit
def _means_of_chunks(xs, dys, ws, mean, rstd, N: tl.constexpr):
    """c1 * rstd**2 and c2 * rstd for each row of a tile."""
    sum1 = tl.zeros(xs[0].shape, mean.dtype)
    sum2 = tl.zeros(xs[0].shape, mean.dtype)
    for c in tl.static_range(len(xs)):
        # Lanes that hold no column have dy = 0, so they add 0 to both sums.
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


# %%
# With these two numbers of a row, each chunk can be done by itself.
# A lane adds :math:`dy \, \hat{x} = dy \, r \, d` to ``dw``, and
# :math:`dy` to ``db``.


@triton.jit
def _gradients(x, dy, w, mean, rstd, c1, c2):
    """dx of a chunk, and its terms of dw and db; w may be None."""
    d = x.to(mean.dtype) - mean
    dy = dy.to(mean.dtype)
    scaled = dy * rstd
    wdy = scaled  # r * g
    if w is not None:
        wdy = scaled * w.to(mean.dtype)
    return wdy - (d * c1 + c2), scaled * d, dy


@triton.jit
def _store_sums_of_chunks(ptr, dws, dbs, N: tl.constexpr):
    """The sums of a program, in its buffer: dw first, then db."""
    CHUNK: tl.constexpr = dws[0].shape[1]
    ptr += tl.program_id(0) * 2 * N
    for c in tl.static_range(len(dws)):
        col = c * CHUNK + tl.arange(0, CHUNK)
        # Each of the ROWS rows of a tile has sums of its own until now.
        tl.store(ptr + col, tl.sum(dws[c], axis=0), mask=col < N)
        tl.store(ptr + N + col, tl.sum(dbs[c], axis=0), mask=col < N)


# %%
# As on the pages before, a program loops over rows, here over ``ROWS`` of them
# at a time, and keeps its sums in registers until its last row is done.
# ``STAGES`` says `how far ahead <04-loads-in-flight.html>`_ rows are
# requested.


@triton.jit
def _layer_norm_bwd_chunks(
    dy_ptr,  # (M, N), contiguous
    x_ptr,  # (M, N), contiguous
    w_ptr,  # (N,); None counts as 1
    mean_ptr,  # (M,), from the forward pass
    rstd_ptr,  # (M,), from the forward pass
    dx_ptr,  # (M, N), or None if dx is not wanted
    sums_ptr,  # (programs, 2, N), or None if neither dw nor db is wanted
    M,  # rows
    N: tl.constexpr,  # columns
    ROWS: tl.constexpr,  # rows of a tile
    CHUNK: tl.constexpr,  # lanes of a chunk in each row
    STAGES: tl.constexpr,  # how far ahead rows are requested
    EARLY: tl.constexpr,  # whether the second kernel may start early
):
    # w stays in registers for all rows, in its own type.
    ws = ()
    if w_ptr is not None:
        # With a stride of 0, each row of the tile is w.
        ws = _load_chunks(w_ptr, 0, ROWS, N, ROWS, CHUNK, "evict_last")

    # The sums for dw and db, of each lane: tuples of chunks, too.
    zeros = tl.zeros((ROWS, CHUNK), mean_ptr.dtype.element_ty)
    dws = ()
    dbs = ()
    for _ in tl.static_range((N + CHUNK - 1) // CHUNK):
        dws += (zeros,)
        dbs += (zeros,)

    for first in tl.range(
        tl.program_id(0) * ROWS,
        M,
        tl.num_programs(0) * ROWS,
        num_stages=STAGES,
        # The compiler would convert w to float32 before the loop, because the
        # result is always the same. That takes twice the registers.
        disable_licm=True,
    ):
        # Load ROWS rows of x and of dy, and what the forward pass saved. Rows
        # that do not exist are 0.
        row = first + tl.arange(0, ROWS)[:, None]
        left = M - first
        mean = tl.load(mean_ptr + row, mask=row < M, other=0)
        rstd = tl.load(rstd_ptr + row, mask=row < M, other=0)
        start = tl.cast(first, tl.int64) * N
        xs = _load_chunks(x_ptr + start, N, left, N, ROWS, CHUNK, "")
        dys = _load_chunks(dy_ptr + start, N, left, N, ROWS, CHUNK, "")

        # Both means need the whole row, so all chunks come first.
        c1, c2 = _means_of_chunks(xs, dys, ws, mean, rstd, N)

        # Then each chunk is done by itself. An element of a tuple cannot be
        # replaced, so the sums go into new tuples.
        new_dws = ()
        new_dbs = ()
        for c in tl.static_range(len(xs)):
            w = None
            if w_ptr is not None:
                w = ws[c]
            dx, dw, db = _gradients(xs[c], dys[c], w, mean, rstd, c1, c2)
            new_dws += (dws[c] + dw,)
            new_dbs += (dbs[c] + db,)
            if dx_ptr is not None:
                i, j, mask = _chunk(c, left, N, ROWS, CHUNK)
                tl.store(dx_ptr + start + (i * N + j), dx, mask=mask)
        dws = new_dws
        dbs = new_dbs

    # The second kernel may start now; the next section explains it.
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    if sums_ptr is not None:
        _store_sums_of_chunks(sums_ptr, dws, dbs, N)


# %%
# A second kernel that starts early
# ---------------------------------
#
# As on the page `Who adds up the rows? <02-summing-rows.html>`_, a second
# kernel adds up the buffers of all programs.
# Usually a kernel starts when the one before it has ended, and starting takes
# a moment in which the GPU has nothing to do. Can it start earlier?
#
# On the H100 and later GPUs it can. This is called *programmatic dependent
# launch*. When each program of the first kernel has called
# ``gdc_launch_dependents``, or has ended, the programs of the second one can
# start, wherever there is room.
# They do what they can do without the buffers. Then they call ``gdc_wait``,
# which waits until the first kernel has ended and the second one can see all
# that it stored. Without this line they would read buffers that have not been
# filled yet.
# Further down we measure what the early start is worth.


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
# One program runs on each SM. Since it requests rows ahead of time, it needs
# no others beside it that load while it works, and it has all registers to
# itself.

# The interpreter counts as CUDA.
CUDA = torch.version.hip is None
GPU = torch.cuda.get_device_properties(DEVICE) if ON_GPU else None
NUM_SMS = GPU.multi_processor_count if ON_GPU else 4
EARLY = ON_GPU and CUDA and torch.cuda.get_device_capability() >= (9, 0)


def add_up(sums, grads, early=EARLY):
    """Fill grads, dw and db as (2, N), from (programs, 2, N) sums."""
    programs, _, N = sums.shape
    options = {}
    if early:
        options["launch_pdl"] = True
    columns_per_program = 16
    _add_up_chunks[(triton.cdiv(2 * N, columns_per_program),)](
        sums_ptr=sums,
        grads_ptr=grads,
        programs=programs,
        WIDTH=2 * N,
        ROWS=triton.next_power_of_2(max(programs, 1)),
        COLS=columns_per_program,
        EARLY=early,
        **options,
    )


def backward(dy, x, w, mean, rstd, dx, grads, plan, early=EARLY):
    """Fill dx and grads, which are dw and db; either may be None."""
    M, N = x.shape
    programs = min(NUM_SMS, triton.cdiv(M, plan["ROWS"]))
    sums = None
    if grads is not None:
        shape = (programs, 2, N)
        sums = torch.empty(shape, dtype=mean.dtype, device=x.device)
    _layer_norm_bwd_chunks[(programs,)](
        dy_ptr=dy,
        x_ptr=x,
        w_ptr=w,
        mean_ptr=mean,
        rstd_ptr=rstd,
        dx_ptr=dx,
        sums_ptr=sums,
        M=M,
        N=N,
        EARLY=early,
        **plan,
    )
    if grads is not None:
        add_up(sums, grads, early)


# %%
# Do idle lanes cost time now?
# ----------------------------
#
# Again we change nothing but the width of a chunk. Both plans have 8 warps,
# one row at a time, and three stages, which keep up to two rows in flight.
# There is one exception: with a tile of 16384 lanes, loads ahead would make
# the compiler *spill* registers to memory, so this tile gets a single stage.
# To see what that alone costs, a third line shows chunks with a single stage.


def plan_by_hand(N):
    return {"ROWS": 1, "CHUNK": 2048, "STAGES": 3, "num_warps": 8}


def plan_of_one_tile(N):
    plan = plan_by_hand(N)
    plan["CHUNK"] = triton.next_power_of_2(N)
    if plan["CHUNK"] > 8192:
        plan["STAGES"] = 1
    return plan


# %%

# Scaffold: idle lanes backward, a benchmark.


def speed_backward(M, N, dtype, plan, early=EARLY):
    """GB/s of the backward pass alone, with a plan."""

    def prepare():
        x, w, b, dy = inputs(M, N, dtype)
        with torch.no_grad():
            _, mean, rstd = torch.native_layer_norm(x, (N,), w, b, 1e-5)

        def run():
            dx = torch.empty_like(x)
            grads = x.new_empty(2, N)
            backward(dy, x, w, mean, rstd, dx, grads, plan, early)
            return dx, grads

        return run

    bytes_moved = 3 * M * N * dtype.itemsize  # read x and dy, write dx
    return speed(bytes_moved, prepare)


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=[2560, 4608, 5120, 6656, 8192, 8704, 10240],
        line_arg="provider",
        line_vals=["triton", "tile", "one stage", "copy"],
        line_names=["Chunks", "One tile", "Chunks, one stage", "Copy"],
        ylabel="GB/s",
        plot_name="layer-norm-chunks-lanes-backward",
        args={"M": 4096, "dtype": torch.float16, "mode": "backward"},
    )
)
def bench_lanes_backward(M, N, dtype, mode, provider):
    """Device time: a CUDA graph of several calls, each with inputs of its own
    and after L2 was overwritten, less the graph without the calls; median, 20%
    and 80% quantiles. Copy: the best of six tiles."""
    if not ON_GPU:
        return 3 * [float("nan")]
    if provider == "copy":  # x and dy are read, dx is written
        return ceiling(reads=2, writes=1, shape=(M, N), dtype=dtype)
    plan = plan_by_hand(N)
    if provider == "tile":
        plan = plan_of_one_tile(N)
    if provider == "one stage":
        plan["STAGES"] = 1
    return speed_backward(M, N, dtype, plan)


# %%

report(bench_lanes_backward)

# %%
# **What the figure shows.**
# Yes, above 8192 columns. Let's divide the speed with chunks by that with one
# tile, both with three stages where that is possible, and call it the gain. On
# the H100 it is 1.18 at 8704 columns and 1.11 at 10240, where chunks have
# 10240 lanes and the tile has 16384 of them. It is 1.03 at 4608 columns and
# 1.02 at 5120, where it is 6144 lanes against 8192 lanes. And it is 1.03, 1.00
# and 1.00 at 2560, 6656 and 8192 columns, where both have the same number of
# lanes.
# On the H200 chunks gain more above 8192 columns: it is 1.43 at 8704 columns
# and 1.30 at 10240. It is 1.07 at 2560 columns, 1.03 and 1.03 at 4608 and
# 5120, and 1.00 and 1.01 at 6656 and 8192.
#
# So at 4608 and 5120 columns chunks gain no more than at 2560, where they save
# no lane at all. Up to 8192 columns the figure does not show that idle lanes
# cost time.
#
# **Why.**
# Above 8192 columns registers are the reason. With three stages, a thread of
# the tile would spill 360 bytes at 8704 columns, and one of the chunks spills
# 8 bytes. So the tile must do without loads ahead, and while it computes,
# nothing is in flight.
# The third line shows what that alone costs. With a single stage, chunks reach
# 79% of the copy at 8704 columns and 84% at 10240, where the tile reaches 76%
# and 81%. So most of the difference is due to the loads ahead. The rest may be
# the work of idle lanes, which is not hidden where nothing is in flight
# meanwhile.
# On the H200, chunks with a single stage reach 65% and 71% of the copy at
# these two widths, the tile reaches 60% and 67%, and chunks with loads ahead
# reach 86% and 87%.
#
# At 4608 columns registers are no reason: the compiled kernels take 177 of
# them with a tile, and 176 with chunks. (Our count was 112 and 84. It is what
# must stay, and the compiler takes more where it may.)
# Idle lanes do make work there. Rows that are requested ahead come through
# shared memory, and their idle lanes come as zeros, which are stored there,
# read back and multiplied. The slots of two rows take 64 KB with a tile, and
# 48 KB with chunks. But the next rows are on their way in the meantime, so
# such work need not take time.
# The two plans differ in something else, too: a tile compares all its columns
# with ``N``, and chunks only those of the last one. We have not looked into
# the 3% at 2560 columns.
#
# **What follows.**
# In the backward pass, padding is expensive where idle lanes take the
# registers that stages need. That is where we need chunks.
#
# A formula instead of a table
# ----------------------------
#
# We have tried two plans, and made both by hand. The second half of this page
# makes a plan for any width. How do we find one?
#
# One can let the computer try: *autotuning* runs several plans at each new
# width, and keeps a table of the fastest. That takes seconds for each width,
# and the winner may be another one next time.
# We use a formula instead. Its answer costs nothing, and we can say why it is
# what it is. In the forward pass it makes five choices.
#
# - **Lanes of a chunk.** As many as the warps can load with one instruction:
#   16 bytes for each thread, which is 512 bytes for each warp. The compiler
#   would cut a wider chunk into such pieces anyway, and a narrower one would
#   have narrower loads.
# - **Warps.** At most 4096 bytes of a row for each warp. Then a thread makes
#   at most 8 loads of 16 bytes, and they take 32 of its registers. A program
#   has at least 4 warps, or 2 where a row has up to 3 KB: each warp has little
#   to do in a narrow row, and in a sum all of them wait for the last.
# - **Rows.** If a row is narrower than what the warps load with one
#   instruction, a chunk takes as many rows as fit. With rows of up to 2 KB it
#   takes twice as many, so that more bytes are in flight before the program
#   waits for its sums.
# - **Policy.** If rows have up to 6 KB, caches are told to give up ``x``
#   first.
# - **Registers.** We limit them only from 20488 to 24576 columns in 16 bits,
#   so that two programs fit on an SM and not one.
#   An SM has 65536 registers, and a thread gets a multiple of 8. At 8704
#   columns the compiler takes 64 for each thread, so four programs of 256
#   threads fit. At 15872 columns it takes 127, which makes 128, and two fit.
#   Their rows are 62 KB, so a third one would gain little. From 16392 columns
#   on, a program has 16 warps. Up to 20480 columns the compiler takes 64, and
#   two programs fit. At 24576 columns it would take 88, and a single one would
#   fit, so nothing would be in flight while that adds up its row. With
#   ``maxnreg=64`` we allow 64: two fit, and a thread spills 8 bytes. In wider
#   rows a thread would spill 80 bytes or more, so we set no limit.
#
# The lanes follow from the hardware, and to count registers we only have to
# compile. But the limits of 2, 3 and 6 KB had to be measured: there one plan
# became faster than the other when we tried both.


def tile_of(N, itemsize, warps, loads=1):
    """Rows and lanes of a chunk; loads: how often each thread loads."""
    # A thread loads 16 bytes, a warp 512. A narrow row fills only a part.
    chunk = min(512 // itemsize * warps, triton.next_power_of_2(N))
    # The warps that a narrow row leaves idle load other rows.
    rows = 512 // itemsize * warps // chunk * loads
    return {"ROWS": rows, "CHUNK": chunk, "num_warps": warps}


def plan_forward(N, itemsize, times=1):
    """The plan of a row; times: with other warps, to try the formula."""
    row = N * itemsize
    # At most 4096 bytes of a row for each warp: 8 loads of 16 bytes a thread.
    warps = triton.next_power_of_2(triton.cdiv(row, 4096))
    least = 4
    if row <= 3072:
        least = 2
    warps = int(times * max(warps, least))
    # A program takes twice as many narrow rows.
    loads = 1
    if row <= 2048:
        loads = 2
    plan = tile_of(N, itemsize, warps, loads)
    plan["HINT"] = ""
    if row <= 6144:
        plan["HINT"] = "evict_first"
    # A limit of registers, so that two programs of 16 warps fit on an SM.
    if CUDA and 40960 < row <= 49152:
        plan["maxnreg"] = 64
    return plan


# %%
# Here are its plans for rows in 16 bits.

print("columns  rows  chunks  warps  registers")
for N in (256, 512, 1024, 2048, 4608, 8192, 8704, 16384, 20480, 24576):
    plan = plan_forward(N, itemsize=2)
    chunks = triton.cdiv(N, plan["CHUNK"])
    chunks = f"{chunks} × {plan['CHUNK']}"
    limit = plan.get("maxnreg", "any")
    print(f"{N:7}{plan['ROWS']:6}{chunks:>10}{plan['num_warps']:5}{limit:>9}")

# %%
# How fast is the forward pass?
# -----------------------------
#
# We compare with PyTorch's layer norm, with the same function through
# ``torch.compile``, and with a copy.

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

# Scaffold: the forward pass, a benchmark of chunks.


def pytorch_layer_norm(x, w, b, eps):
    """PyTorch's function, with the arguments of our kernels."""
    return F.layer_norm(x, (x.shape[1],), w, b, eps)


def speed_forward(M, N, dtype, function):
    """GB/s of function(x, w, b, eps=...), which saves what backward needs."""

    def prepare():
        x, w, b, _ = inputs(M, N, dtype)
        return lambda: function(x, w, b, eps=1e-5)

    bytes_moved = 2 * M * N * dtype.itemsize  # read x, write y
    return speed(bytes_moved, prepare)


def forward_by(plan):
    """Our forward pass with this plan, with the arguments of PyTorch's."""

    def function(x, w, b, eps):
        return forward(x, w, b, eps, plan)

    return function


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=[512, 1024, 4096, 4608, 8192, 15872],
        line_arg="provider",
        line_vals=["triton", "torch", "torch.compile", "copy"],
        line_names=["Triton", "PyTorch", "torch.compile", "Copy"],
        ylabel="GB/s",
        plot_name="layer-norm-chunks-forward",
        args={"M": 4096, "dtype": torch.float16, "mode": "forward"},
    )
)
def bench_forward(M, N, dtype, mode, provider):
    """Device time: a CUDA graph of several calls, each with inputs of its own
    and after L2 was overwritten, less the graph without the calls; median, 20%
    and 80% quantiles. Copy: the best of six tiles."""
    if not ON_GPU:
        return 3 * [float("nan")]

    def speed_of(function):
        return speed_forward(M, N, dtype, function)

    if provider == "triton":
        return speed_of(forward_by(plan_forward(N, dtype.itemsize)))
    if provider == "torch":
        return speed_of(pytorch_layer_norm)
    if provider == "torch.compile":
        return best_of_three_compilations(pytorch_layer_norm, speed_of)
    return ceiling(reads=1, writes=1, shape=(M, N), dtype=dtype)


# %%

report(bench_forward)

# %%
# **What the figure shows.**
# On the H100 our kernel reaches 90% to 98% of a copy, PyTorch reaches 45% to
# 70%, and torch.compile reaches 72% to 97%.
# Forward, ours is 1.3 to 2.0 times as fast as PyTorch. At 8192 columns
# torch.compile is faster than ours: it reaches 97%, and ours 94%. At 512 and
# 15872 columns the two are equally fast, and at the other three ours is 1.1 to
# 1.3 times as fast.
#
# On the H200 our kernel reaches 85% to 92% of a copy, PyTorch reaches 38% to
# 58%, and torch.compile reaches 56% to 90%. Ours is 1.6 to 2.2 times as fast
# as PyTorch. At 8192 columns torch.compile reaches 90% there, and ours 89%. At
# 512 columns ours is 1% faster, and at the other four it is 1.1 to 1.6 times
# as fast.
#
# **Why.**
# Our kernel moves a row once, as the copy does, and at each width several
# programs share an SM, so that some load while others add up or store.
# PyTorch's kernel reads each row twice, and it updates the mean and the
# variance after each element. `Layer normalization, both passes
# <01-layer-norm.html>`_ says more about it; we have not measured which of the
# two costs more.
#
# What do we lose to the copy? From 4096 to 8192 columns the formula makes the
# plan of the first figure. There, without ``w`` and ``b``, it reached 98% at
# 4096 columns, 98% at 4608 and 100% at 8192. With them, it reaches 94%, 93%
# and 94%. So most of what we lose at these widths is due to ``w`` and ``b``.
# On the H200, it reached 97%, 99% and 97% without them, and reaches 92%, 90%
# and 89% with them.
#
# **What follows.**
# There is little left to gain forward, though torch.compile shows that there
# is something. We go on to the backward pass.
#
# The formula of the backward pass
# --------------------------------
#
# The backward pass has one program on each SM, which has all its registers and
# all its shared memory. How should it use them?
#
# - **Warps.** 8 of them are 256 threads. The 65536 registers of an SM are 256
#   for each, and a thread can have 255 at most. With 16 warps it could have
#   only 128. Rows of up to 2 KB get 4 warps, so that a sum has fewer to wait
#   for.
# - **Rows.** As many as give a thread up to 32 columns, but at most 8 rows. 32
#   columns of 16 bits take 32 × 3.5 = 112 registers.
# - **The widest row.** It has 5 chunks of 2048, or 40 columns for each thread.
#   That is 10240 columns in 16 bits. With a sixth chunk, 48 × 3.5 = 168
#   registers and what a row needs beside them are too many: a thread spills 48
#   bytes.
# - **Stages.** A slot of shared memory holds ``x`` and ``dy`` of a tile. We
#   take as many slots as fit into 96 KB, but at most three, and there is one
#   stage more than slots. While a program works on a tile, its slot is not
#   free. So at 8192 columns, where a slot has 32 KB, two others are in flight,
#   and those are the 64 KB that `Loads in flight <04-loads-in-flight.html>`_
#   found to be enough.


def plan_backward(N, itemsize, times=1):
    """The plan of a row; times: with other warps, to try the formula."""
    warps = 8
    if N * itemsize <= 2048:
        warps = 4
    warps = int(times * warps)
    plan = tile_of(N, itemsize, warps)
    chunks = triton.cdiv(N, plan["CHUNK"])
    # At most four tiles of 16 bytes a thread, unless one row alone has more,
    # and at most 8 rows.
    plan["ROWS"] = min(plan["ROWS"] * max(4 // chunks, 1), 8)
    # As many tiles ahead as fit into 96 KB of shared memory, but at most 3.
    tile = 2 * plan["ROWS"] * chunks * plan["CHUNK"] * itemsize
    plan["STAGES"] = 1 + min(98304 // tile, 3)
    return plan


# %%
# A function to train with
# ------------------------
#
# The autograd function is that of `Layer normalization, both passes
# <01-layer-norm.html>`_, and so are its checks: you have seen them, so they
# are folded.
#
# Each thread loads 16 bytes at a time, so a row must begin at a multiple of 16
# bytes. This page takes widths that are multiples of 8, and `Rows that begin
# anywhere <06-unaligned-rows.html>`_ takes the others.

# %%

# Scaffold: layouts and types of a call.


def contiguous_or_none(tensor):
    """The tensor with its elements side by side; copied only if needed."""
    if tensor is None:
        return None
    return tensor.contiguous()


def dtype_of_gradients(w, b, acc_dtype):
    """The type of w and b, if they agree; acc_dtype, if they do not.

    Autograd then rounds each gradient to the type of its parameter.
    """
    dtypes = {tensor.dtype for tensor in (w, b) if tensor is not None}
    if len(dtypes) == 1:
        return dtypes.pop()
    return acc_dtype


# %%

# Scaffold: the autograd function.


class LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, b, eps):
        x = contiguous_or_none(x)
        w = contiguous_or_none(w)
        b = contiguous_or_none(b)
        N = x.shape[1]
        plan = plan_forward(N, x.itemsize)
        y, mean, rstd = forward(x, w, b, eps, plan)
        ctx.save_for_backward(x, w, mean, rstd)
        ctx.grads_dtype = dtype_of_gradients(w, b, mean.dtype)
        ctx.plan = plan_backward(N, x.itemsize)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable  # no second derivatives
    def backward(ctx, dy):
        x, w, mean, rstd = ctx.saved_tensors
        wants_dx, wants_dw, wants_db, _ = ctx.needs_input_grad

        # A gradient that nobody wants is None, and its code is not compiled.
        dx = None
        if wants_dx:
            dx = torch.empty_like(x)
        grads = None
        if wants_dw or wants_db:
            grads = x.new_empty(2, x.shape[1], dtype=ctx.grads_dtype)
        backward(dy.contiguous(), x, w, mean, rstd, dx, grads, ctx.plan)

        dw = None
        if wants_dw:
            dw = grads[0]
        db = None
        if wants_db:
            db = grads[1]
        # One gradient for each argument of forward; eps has none.
        return dx, dw, db, None


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

    most = 65536 // x.itemsize
    trains = any(tensor.requires_grad for tensor in tensors.values())
    if trains and torch.is_grad_enabled():
        most = 20480 // x.itemsize  # two sums beside the row
    N = shape.numel()
    if N % 8 > 0 or most < N:
        raise ValueError(
            f"normalized_shape has {N} columns: this page takes multiples of "
            f"8 up to {most} (the page Every width has no limit)"
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

shape = (9, 200)  # small, because the interpreter is slow
if ON_GPU:
    shape = (1151, 4608)
for dtype in (torch.float16, torch.float32):
    check(layer_norm, *shape, dtype)

# %%
# How fast is the backward pass?
# ------------------------------

# %%

# Scaffold: the backward pass, a benchmark of chunks.


def our_layer_norm(x, w, b, eps):
    """Our function, with the arguments of PyTorch's."""
    return layer_norm(x, (x.shape[1],), w, b, eps)


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=[1024, 2560, 4608, 8192, 8704, 10240],
        line_arg="provider",
        line_vals=["triton", "torch", "torch.compile", "copy"],
        line_names=["Triton", "PyTorch", "torch.compile", "Copy"],
        ylabel="GB/s",
        plot_name="layer-norm-chunks-backward",
        args={"M": 4096, "dtype": torch.float16, "mode": "backward"},
    )
)
def bench_backward(M, N, dtype, mode, provider):
    """Device time: a CUDA graph of several calls, each with inputs of its own
    and after L2 was overwritten, less the graph without the calls; median, 20%
    and 80% quantiles. Copy: the best of six tiles."""
    if not ON_GPU:
        return 3 * [float("nan")]

    def speed_of(function):
        """Of the backward pass alone: the forward pass runs once, before."""

        def prepare():
            x, w, b, dy = inputs(M, N, dtype)
            y = function(x, w, b, eps=1e-5)

            def run():
                return torch.autograd.grad(y, (x, w, b), dy, retain_graph=True)

            return run

        bytes_moved = 3 * M * N * dtype.itemsize  # read x and dy, write dx
        return speed(bytes_moved, prepare)

    if provider == "triton":
        return speed_of(our_layer_norm)
    if provider == "torch":
        return speed_of(pytorch_layer_norm)
    if provider == "torch.compile":
        return best_of_three_compilations(pytorch_layer_norm, speed_of)
    return ceiling(reads=2, writes=1, shape=(M, N), dtype=dtype)


# %%

report(bench_backward)

# %%
# **What the figure shows.**
# On the H100 our backward pass reaches 75% to 90% of the copy, PyTorch reaches
# 35% to 40%, and torch.compile reaches 34% to 54%. Backward, ours is 2.1 to
# 2.5 times as fast as PyTorch. It is 1.7 to 2.2 times as fast as
# torch.compile.
#
# On the H200 our backward pass reaches 68% to 87% of the copy, PyTorch reaches
# 30% to 36%, and torch.compile reaches 30% to 49%. Ours is 2.2 to 2.6 times as
# fast as PyTorch, and 1.8 to 2.5 times as fast as torch.compile.
#
# **Why.**
# PyTorch reads ``x`` and ``dy`` a second time for ``dw`` and ``db``, so five
# matrices have to move instead of three, unless L2 still holds them. That
# would leave it 60% of the copy. PyTorch reaches 40% at most, also where L2
# can hold all of them, so it must lose time to something else too, which we
# have not looked for.
#
# What do we lose to the copy? Let's subtract its time from ours, first on the
# H100. At 1024 columns we take 3.3 µs longer, at 4608 columns 5.7 µs, and at
# 10240 columns 9.2 µs. All six widths lie within half a microsecond of a
# straight line: 2.7 µs, and 0.66 µs more for each 1024 columns.
# On the H200 we take 3.8, 6.4 and 8.9 µs longer than the copy at these three
# widths, and the widths between lie above the straight line from the first to
# the last, by up to 0.8 µs.
#
# - The part that grows is about what the buffers take. For each 1024 columns,
#   132 programs write two sums of 4 bytes for each column, and the second
#   kernel reads them. That is 1.1 MB, twice, which take 0.73 µs at the speed
#   of the copy.
# - The other part is the same at each width. The second kernel starts and
#   ends, and at the end of the first one some SMs are done while others still
#   have a row. We have not measured how long each of these takes.
#
# So our share of the copy is smaller where rows are narrow. At 1024 columns we
# reach 75%, because the whole pass takes only 13.3 µs there.
#
# **What follows.**
# To come closer to the copy, a kernel would have to write fewer sums, or lose
# less time at the start and at the end of both kernels. The early start was
# made for the second of these two aims.
#
# What is the early start worth?
# ------------------------------
#
# We measure the backward pass once more, with the same plans, and let the
# second kernel wait until the first one has ended.

# %%

# Scaffold: the early start, a benchmark.


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=[1024, 4608, 10240],
        line_arg="provider",
        line_vals=["triton", "one by one", "copy"],
        line_names=["Early start", "One by one", "Copy"],
        ylabel="GB/s",
        plot_name="layer-norm-chunks-early",
        args={"M": 4096, "dtype": torch.float16, "mode": "backward"},
    )
)
def bench_early(M, N, dtype, mode, provider):
    """Device time: a CUDA graph of several calls, each with inputs of its own
    and after L2 was overwritten, less the graph without the calls; median, 20%
    and 80% quantiles. Copy: the best of six tiles."""
    if not ON_GPU:
        return 3 * [float("nan")]
    if provider == "copy":
        return ceiling(reads=2, writes=1, shape=(M, N), dtype=dtype)
    plan = plan_backward(N, dtype.itemsize)
    early = EARLY and provider == "triton"
    return speed_backward(M, N, dtype, plan, early)


# %%

report(bench_early)

# %%
# **What the figure shows.**
# It is worth hardly anything here. On the H100 the pass takes 13.3 µs at 1024
# columns, with the early start and without it. At 4608 columns the early start
# saves 0.3 µs of 45.5 µs, and at 10240 columns 0.4 µs of 94.3 µs.
# On the H200 it saves 0.3 µs of 35.6 µs at 4608 columns, and 0.2 µs of 69.7 µs
# at 10240.
#
# **Why.**
# We know only a part of it. At 10240 columns there is no room for the second
# kernel: a program of the first one has 256 threads with 254 registers each,
# and they take all registers of an SM. So nothing can start before a program
# of the first kernel has ended.
# At 1024 and 4608 columns there is room, and yet the early start gains no
# more. Our clock replays a CUDA graph, so the GPU knows beforehand which
# kernel comes next. Where the host launches one kernel after the other, it may
# be worth more; we have not measured that.
#
# **What follows.**
# The early start takes two lines in the kernels and an option of the launch.
# It costs no time, so we keep it. But measure such a trick in your own program
# before you count on it.
#
# Is the formula any good?
# ------------------------
#
# The widths of the figures were known when we made the formula. What is it
# worth at others?
# We try it at four widths that it was not made from, and compare it with half
# and with twice the warps. All else follows from the warps, by the same
# formula.
# Before we measure, let's compute what a backward plan means for a thread: how
# many registers its lanes take, and how many it can have.

print("columns  warps  registers of lanes  of at most  stages")
for N in (1280, 3328, 5888, 9984):
    for times in (0.5, 1, 2):
        plan = plan_backward(N, itemsize=2, times=times)
        threads = 32 * plan["num_warps"]
        lanes = plan["ROWS"] * triton.cdiv(N, plan["CHUNK"]) * plan["CHUNK"]
        registers = 3.5 * lanes / threads
        most = min(65536 // threads, 255)
        print(
            f"{N:7}{plan['num_warps']:7}{registers:20.0f}{most:12}"
            f"{plan['STAGES']:8}"
        )

# %%

# Scaffold: the formulas with other warps, benchmarks.

OTHER_WIDTHS = [1280, 3328, 5888, 9984]
TIMES = {"triton": 1, "half the warps": 0.5, "twice the warps": 2}


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=OTHER_WIDTHS,
        line_arg="provider",
        line_vals=[*TIMES, "copy"],
        line_names=["Triton", "Half the warps", "Twice the warps", "Copy"],
        ylabel="GB/s",
        plot_name="layer-norm-chunks-warps-forward",
        args={"M": 4096, "dtype": torch.float16, "mode": "forward"},
    )
)
def bench_warps_forward(M, N, dtype, mode, provider):
    """Device time: a CUDA graph of several calls, each with inputs of its own
    and after L2 was overwritten, less the graph without the calls; median, 20%
    and 80% quantiles. Copy: the best of six tiles."""
    if not ON_GPU:
        return 3 * [float("nan")]
    if provider == "copy":
        return ceiling(reads=1, writes=1, shape=(M, N), dtype=dtype)
    plan = plan_forward(N, dtype.itemsize, TIMES[provider])
    return speed_forward(M, N, dtype, forward_by(plan))


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=OTHER_WIDTHS,
        line_arg="provider",
        line_vals=[*TIMES, "copy"],
        line_names=["Triton", "Half the warps", "Twice the warps", "Copy"],
        ylabel="GB/s",
        plot_name="layer-norm-chunks-warps-backward",
        args={"M": 4096, "dtype": torch.float16, "mode": "backward"},
    )
)
def bench_warps_backward(M, N, dtype, mode, provider):
    """Device time: a CUDA graph of several calls, each with inputs of its own
    and after L2 was overwritten, less the graph without the calls; median, 20%
    and 80% quantiles. Copy: the best of six tiles."""
    if not ON_GPU:
        return 3 * [float("nan")]
    if provider == "copy":
        return ceiling(reads=2, writes=1, shape=(M, N), dtype=dtype)
    plan = plan_backward(N, dtype.itemsize, TIMES[provider])
    return speed_backward(M, N, dtype, plan)


# %%

report(bench_warps_forward)

# %%

report(bench_warps_backward)

# %%
# **What the figures show.**
# In the tables, the column "Triton" is the formula.
# Forward, on the H100, it reaches 83% to 97% of a copy at these widths, half
# the warps reach 79% to 93%, and twice the warps reach 81% to 97%. Here the
# formula loses: twice the warps are 1% faster at 3328 columns, and 3% at 5888.
# At the other two widths they are slower, and half the warps are slower at all
# four.
# Backward, it reaches 74% to 89%, half the warps reach 71%, 85%, 66% and 4%
# at the four widths, and twice the warps reach 25%, 38%, 44% and 75%. At 3328
# columns half the warps are as fast as the formula. All others are slower.
#
# Forward, on the H200, the formula reaches 76% to 94% of a copy, half the
# warps reach 70% to 89%, and twice the warps reach 71% to 93%. Twice the warps
# are 2% faster at 5888 columns, and slower at the other three, at 9984 columns
# by 19%. Backward, it reaches 66% to 87% of the copy there, half the warps
# reach 63%, 74%, 53% and 4%, and twice the warps reach 23%, 34%, 39% and 60%,
# so there the formula wins at all four.
#
# **Why half the warps can be a disaster.**
# Let's look at the H100, backward. At 9984 columns half the warps are slower
# by a factor of 23. The table that we computed had warned us: the lanes of a
# thread would take 280 registers, and it can have at most 255.
# Then the compiler does worse than spill the rest. In the compiled kernel a
# thread has only 32 registers, and keeps 2336 bytes in memory. For 128 threads
# that is 299 KB, and they come and go with each row, whose ``x``, ``dy`` and
# ``dx`` are 60 KB.
# At 5888 columns, 168 registers of lanes leave too few for the rest: a thread
# spills 88 bytes. At 1280 and 3328 columns nothing is spilled, and half the
# warps lose 4% at the first of the two, and nothing at the second.
# On the H200 half the warps lose 5% and 8% at these two widths.
#
# **Why twice the warps are no help backward.**
# A thread can have 128 registers then. At the first three widths its lanes
# take 112 of them, and it spills 184 to 216 bytes. A tile has also become
# twice as large, so there is room for two stages only, and `Loads in flight
# <04-loads-in-flight.html>`_ has shown that two are no better than one.
# At 9984 columns the lanes take 84 registers, a thread spills 40 bytes, and
# there are three stages. There, twice the warps lose least.
#
# **And forward?**
# There, a thread keeps only ``x``, so with half the warps nothing is spilled.
# At 9984 columns a thread has 127 registers with half the warps, and 64 with
# the formula. But in both cases four programs fit on an SM, and their rows are
# 80 KB. So half the warps are no disaster: at this width they reach 93% on the
# H100, and the formula 97%.
# With twice the warps, two programs of 16 warps fit on an SM. Their rows are
# only 40 KB, and more warps wait for each other in each sum. They are 5%
# slower at this width. We do not know why twice the warps are faster at 3328
# and 5888 columns, nor why half the warps are slower at every width.
#
# **What follows.**
# Count registers before you choose warps: the count shows where a plan becomes
# many times slower. It does not show the last few percent. Where a program
# needs few registers, as in the forward pass, another plan may be a little
# faster, and you only learn that when you try it.
#
# Where PyTorch or a library is better
# ------------------------------------
#
# - **torch.compile can be faster forward.** On the H100 it reaches 97% of a
#   copy at 8192 columns, and ours 94%. We have not looked at its kernels.
#   On the H200, it is faster at this width as well, by 1%.
# - **Not every width.** Ours takes multiples of 8, up to 32768 columns in 16
#   bits, and 10240 with gradients. PyTorch takes all.
# - **The formula is made for two cards.** Its limits come from trials on an
#   H100 and an H200, with 16 bits and 4096 rows. Another GPU has other caches.
# - **PyTorch can do more.** It has second derivatives, and it does not compile
#   a kernel for each new width.
# - **torch.compile can fuse** a layer norm with what comes before and after.
# - **Libraries have kernels of their own.** `Every width
#   <11-every-width.html>`_ measures them.
#
# Exercise 1: no idle lanes
# -------------------------
#
# There is a way to have no idle lanes at all. If the last chunk does not fit,
# move it to the left until it ends with the row.
# A row of 13 columns in chunks of 8 then has the columns 0 to 7 and 5 to 12.
# But columns 5, 6 and 7 are in both chunks, and in a sum each column must
# count once. The stub below adds them up twice, and finds 16 ones in a row
# of 13. Mend it in the script or the notebook, and run that until it prints
# ``right: True``. (The line of sums that comes after it is that of our
# solution.)
#
# **Hint 1.** Chunk ``c`` would begin at ``c * CHUNK`` if it were not moved.
# Which of its columns were already in the chunk before it?
#
# **Hint 2.** They are those to the left of ``c * CHUNK``. Set what they hold
# to 0 with ``tl.where`` before you add it.


@triton.jit
def _row_sums(
    x_ptr,  # (rows, N), contiguous
    sums_ptr,  # (rows,)
    N: tl.constexpr,  # columns: at least CHUNK
    CHUNK: tl.constexpr,
):
    total = tl.zeros((CHUNK,), tl.float32)
    for c in tl.static_range((N + CHUNK - 1) // CHUNK):
        # The last chunk ends with the row.
        col = min(c * CHUNK, N - CHUNK) + tl.arange(0, CHUNK)
        total += tl.load(x_ptr + tl.program_id(0) * N + col)  # to do
    tl.store(sums_ptr + tl.program_id(0), tl.sum(total))


def exercise_1(kernel):
    """Print the sums of rows of ones; say if they and others are right."""

    def sums_of(x):
        sums = torch.zeros(3, device=DEVICE)
        kernel[(3,)](x_ptr=x, sums_ptr=sums, N=13, CHUNK=8)
        return sums

    ones = torch.ones(3, 13, device=DEVICE)
    print("sums of rows of 13 ones:", sums_of(ones).tolist())
    different = torch.arange(39.0, device=DEVICE).reshape(3, 13)
    return all(torch.equal(sums_of(x), x.sum(1)) for x in (ones, different))


print("right:", exercise_1(_row_sums))

# %%

# Solution 1


@triton.jit
def _row_sums_1(x_ptr, sums_ptr, N: tl.constexpr, CHUNK: tl.constexpr):
    total = tl.zeros((CHUNK,), tl.float32)
    for c in tl.static_range((N + CHUNK - 1) // CHUNK):
        col = min(c * CHUNK, N - CHUNK) + tl.arange(0, CHUNK)
        x = tl.load(x_ptr + tl.program_id(0) * N + col)
        # Columns to the left of c * CHUNK were in the chunk before.
        total += tl.where(col >= c * CHUNK, x, 0)
    tl.store(sums_ptr + tl.program_id(0), tl.sum(total))


assert exercise_1(_row_sums_1)

# %%
# What we learned
# ---------------
#
# These are the designs of this page: what each does with idle lanes, how fast
# it is on the H100, and why.
#
# Forward, at 4608 columns:
#
# - **One tile** has 44% of its lanes idle. It reaches 98% of a copy, because
#   masked lanes move no bytes, and other programs load while one executes
#   their instructions.
# - **Chunks of 1024** have 10% idle, and reach 98%. They are equally fast.
#
# Backward, at 4608 and 8704 columns:
#
# - **One tile** has no registers for stages above 8192 columns. It reaches
#   80% and 76% of the copy.
# - **Chunks of 2048** have them at both widths. They reach 83% and 90%.
# - **The formula**, which also chooses rows and stages, reaches 87% and 90%.
# - **PyTorch** moves five matrices, and reaches 36% at both.
#
# And for kernels in general:
#
# - A loop over a tuple with ``tl.static_range`` gives you a row of any number
#   of tiles in registers.
# - Idle lanes are free while a kernel waits for memory, and cost time where
#   they take registers that it needs.
# - You can count registers: multiply the numbers that stay by the lanes of a
#   thread. A plan that needs more than 255 is not a little slower, but many
#   times slower.
# - A formula may fit only the widths that it was made from, so test it at
#   others.
#
# **Next:** what if a row does not begin at a multiple of 16 bytes?
# `Rows that begin anywhere <06-unaligned-rows.html>`_ finds out.
