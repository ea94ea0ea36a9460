r"""
Softmax over a million columns
==============================

How do you take a softmax of rows that no cache holds, and read them once?
Many programs hold a row together, and each of them tells the others two
numbers: its largest element, and the sum of its exponentials.

`Softmax, both passes <03-softmax.html>`_ takes any width, too. But it cannot
keep a wide row while it adds it up. There a row belongs to one program, and a
program runs on one SM, whose registers hold 256 KB. A row of a million columns
in 16 bits has 2 MB. So `page 03 <03-softmax.html>`_ reads a wide row
twice, and where the row is too wide for the caches, the second read is as
expensive as the first. On this page we first measure where that begins, and
mend what can be mended with two sweeps. Then programs share a row.

**What you will learn**

- How to tell by arithmetic, before you measure, where a second sweep stops
  being cheap.
- How to load rows that do not begin at a multiple of 16 bytes, with masks only
  where a row begins and ends.
- How the largest elements and the sums of many slices become those of the row.
- How to keep 16-bit numbers in registers from one turn of a loop to the next.
- What a cluster is, where a library with clusters is ahead of us, and what it
  would take to write such a kernel in Triton or in Gluon.

**What you need:** `Softmax, both passes <03-softmax.html>`_ for the pair of
maximum and sum, and `Programs that share a row
<../layer-norm/08-shared-rows.html>`_ for the messages between programs and the
launch. You don't need a GPU.
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

import ctypes

# %%
# Where do two sweeps end?
# ------------------------
#
# A *sweep* is one read of a row from one end to the other. The forward pass of
# page 03 makes two. The first one finds the maximum and the sum, and the
# second one computes the result. Only the first has to go to DRAM, as long as
# a cache still holds the row when the second one comes.
#
# When does it not? On an H100 each SM has an L1 cache of up to 256 KB, and all
# SMs share an L2 cache of 50 MB. A program of page 03 has a row of its own.
# For wide rows it has 1024 threads, and two such programs fit on an SM, so 264
# rows are under way at a time on 132 SMs. How many bytes is that?

print("columns  KB a row  KB on an SM  MB on all SMs")
for N in (16384, 32768, 65536, 131072, 262144, 1048576):
    row_bytes = 2 * N  # 16 bits a column
    on_an_sm = 2 * row_bytes // 2**10
    on_all = 264 * row_bytes / 2**20
    print(f"{N:7}{row_bytes // 2**10:10}{on_an_sm:13}{on_all:15.1f}")

# %%
# Up to 32768 columns both rows of an SM fit into its L1 cache, where nobody
# else can push them out. At 65536 columns they do not, but all rows together
# fit into L2. There is not much room left: the results have to pass through
# L2, too. At 131072 columns the rows alone are more than L2 holds.
#
# So we expect that two sweeps reach nearly the speed of a copy up to 32768
# columns, and less and less from there on. If the whole second sweep comes
# from DRAM, three matrices move instead of two, and two sweeps can reach at
# most 67% of a copy.
#
# There is a second case. In a matrix with 50257 columns, rows of 16-bit
# numbers *begin anywhere*: the second row begins at byte 100514, which is not
# a multiple of 16. Threads load 16 bytes at a time only from multiples of 16.
# A kernel that does not care about this loads 2 bytes at a time instead.
#
# Here are the kernels of page 03, the clock and the report, all folded.

# %%

# Scaffold: two sweeps, forward, from page 03.

LOG2E = tl.constexpr(1.4426950408889634)
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

# Scaffold: rows in registers, loads and stores, from page 03.


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

# Scaffold: rows in registers, forward, from page 03.


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

# Scaffold: rows in registers, backward, from page 03.


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

# Scaffold: two sweeps, backward, from page 03.


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


# %%

# Scaffold: plans, from page 03.

CUDA = ON_GPU and torch.version.hip is None


def plan_sweeps(N, itemsize):
    """Pairs, and warps of a program, for rows of N elements."""
    warps = triton.next_power_of_2(N * itemsize // 2048)
    warps = min(max(warps, 2), 32)
    plan = {"PAIRS": 32 * warps, "EACH": 16 // itemsize, "num_warps": warps}
    if CUDA and itemsize < 8:
        plan["maxnreg"] = 32
    return plan


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


def plan_forward(N, itemsize, step=1):
    """A plan for one sweep, or for two."""
    row_bytes = N * itemsize
    in_one_sweep = 16384
    if step > 1:
        in_one_sweep = 32768
    if row_bytes <= in_one_sweep:
        return tile_of(N, itemsize, step)
    return plan_sweeps(N, itemsize)


def plan_backward(N, itemsize, step=1):
    """A plan for one sweep, or for two."""
    if N * itemsize > 65536:
        return {"BLOCK": 32768 // itemsize, "num_warps": 32}
    return tile_of(N, itemsize, step)


# %%

# Scaffold: launches, from page 03.


def in_sweeps(x, plan, log=False, dtype=None):
    """Softmax over the last dimension, in two sweeps; x is contiguous."""
    y = torch.empty_like(x, dtype=dtype)
    M = x[..., :1].numel()  # the rows, even if they have no columns
    N = x.shape[-1]
    _softmax_fwd_streaming[(M,)](x_ptr=x, y_ptr=y, N=N, LOG=log, **plan)
    return y


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

# Scaffold: inputs of a softmax.


def rows_of(M, N, dtype):
    """At most 512 MB a matrix."""
    return min(M, 2**29 // (N * dtype.itemsize))


def inputs(M, N, dtype):
    """x and dy."""
    torch.manual_seed(0)
    x = torch.randn(M, N, device=DEVICE).to(dtype)
    dy = torch.randn(M, N, device=DEVICE).to(dtype)
    return x.requires_grad_(), dy


# %%
# Now the measurement. A matrix has 4096 rows, or as many as 512 MB have room
# for.

# %%

# Scaffold: two sweeps of wide rows, a benchmark.


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=[16384, 32768, 50257, 65536, 131072, 262144, 1048576],
        x_log=True,
        line_arg="provider",
        line_vals=["sweeps", "copy"],
        line_names=["Two sweeps", "Copy"],
        ylabel="GB/s",
        plot_name="wide-softmax-sweeps",
        args={"M": 4096, "dtype": torch.bfloat16, "mode": "forward"},
    )
)
def bench_sweeps(M, N, dtype, mode, provider):
    """Device time: a CUDA graph of several calls, each with inputs of its own
    and after L2 was overwritten, less the graph without the calls; median, 20%
    and 80% quantiles. At most 512 MB a matrix. Copy: the best of six tiles."""
    if not ON_GPU:
        return 3 * [float("nan")]  # the interpreter cannot be timed
    M = rows_of(M, N, dtype)
    if provider == "copy":  # x is read, y is written
        return ceiling(reads=1, writes=1, shape=(M, N), dtype=dtype)

    def prepare():
        x, _ = inputs(M, N, dtype)
        return lambda: forward(x.detach())

    return speed(2 * M * N * dtype.itemsize, prepare)


# %%

report(bench_sweeps)

# %%
# **What the figure shows.**
# On the H100 two sweeps reach 100% of the copy at 32768 columns, 89% at 65536,
# 75% at 131072, and 64% at 1048576. At 50257 columns they reach 52%.
# On the H200 two sweeps reach 101% at 32768 columns, 88% at 65536, 71% at
# 131072, 64% at 1048576, and 38% at 50257.
#
# **Why.**
# Where rows begin at 16 bytes, the speed falls where the table lets us expect
# it. (At 65536 columns it varied by several percent while it was measured. The
# figure of the three forms, further down, has the same speed there without the
# variation.) The widest rows end a little below the 67% that three matrices
# leave, so not all of the loss is the second read. Further down we count the
# bytes, which tells how much of it is. At 50257 columns the caches are not the
# reason: its rows are narrower than those of 65536 columns, which reach more.
# There the loads of 2 bytes are.
#
# **What follows.**
# We have two things to mend. We begin with the rows that begin anywhere,
# because all kernels of this page need the answer.
#
# How do you load rows that begin anywhere?
# -----------------------------------------
#
# We load from the multiple of 16 bytes before a row, and leave out what
# belongs to the row above. `Rows that begin anywhere
# <../layer-norm/06-unaligned-rows.html>`_ explains it for layer norm. With
# numbers of 16 bits, eight of them are 16 bytes, so ``STEP`` is 8. These are
# the first four rows of 50257 columns:

print("row  begins at  loaded from  lanes before the row")
for row in range(4):
    first = row * 50257
    start = first // 8 * 8
    print(f"{row:3}{first:11}{start:13}{first - start:22}")

# %%
# A *lane* is a place for one element. The lanes before the row have to be
# masked, and so do those behind its end. But to compute a mask for each lane
# takes instructions, too. So a row is cut into *chunks*, as many lanes as the
# threads of a program load at once, and only the first chunk and those at the
# end have masks.
#
# A row may also be cut into *slices* of ``WIDTH`` lanes, one for each program
# that shares it. At first it is a single slice. These functions say where a
# slice is, and which of its lanes exist:


@triton.jit
def _place(
    row,
    s,  # our slice
    N: tl.constexpr,  # columns
    WIDTH: tl.constexpr,  # lanes of a slice, a multiple of STEP
    STEP: tl.constexpr,  # elements of 16 bytes, or 1 if all rows begin there
):
    """Where slice s begins in the matrix, at a multiple of 16 bytes; its
    first lane of the row; and the first lane behind the slice."""
    first = tl.cast(row, tl.int64) * N  # M * N may pass 2**31
    start = first // STEP * STEP
    # Slice 0 begins with up to STEP - 1 lanes of the row above. In the other
    # slices this is negative: all of their lanes are behind the beginning.
    begin = (first - start).to(tl.int32) - s * WIDTH
    return start + s * WIDTH, begin, tl.minimum(begin + N, WIDTH)


@triton.jit
def _lanes(
    c,  # a chunk
    place,  # of our slice, from _place
    PAIRS: tl.constexpr,  # rows of a chunk: one for each thread
    EACH: tl.constexpr,  # lanes of a thread, 16 bytes
    STEP: tl.constexpr,
):
    """The lanes of chunk c; which of them are of the slice; and which are in a
    group of STEP lanes that are all of the slice."""
    lane = tl.arange(0, PAIRS)[:, None] * EACH + tl.arange(0, EACH)[None, :]
    lane += c * (PAIRS * EACH)
    _, begin, end = place
    group = lane // STEP * STEP
    whole = (group >= begin) & (group + STEP <= end)
    return lane, (lane >= begin) & (lane < end), whole


@triton.constexpr_function
def _full(c, chunk, lanes, step):
    """Whether chunk c needs no mask; lanes: how many a slice has at least."""
    return (c + 1) * chunk <= lanes and (step == 1 or c > 0)


@triton.jit
def _only(x, c, place, other, FULL: tl.constexpr, STEP: tl.constexpr):
    """x in the lanes of the slice, and other elsewhere."""
    if not FULL:
        _, inside, _ = _lanes(c, place, x.shape[0], x.shape[1], STEP)
        x = tl.where(inside, x, other)
    return x


@triton.jit
def _store(ptr, x, c, place, FULL: tl.constexpr, STEP: tl.constexpr):
    """Store chunk c of a slice, and nothing beside the slice."""
    lane, inside, whole = _lanes(c, place, x.shape[0], x.shape[1], STEP)
    # Groups that are all ours, 16 bytes at a time. If STEP is 1, a group is a
    # single lane.
    tl.store(ptr + place[0] + lane, x, mask=None if FULL else whole)
    if not FULL and STEP > 1:
        # A group at either end that we share with a neighbor: lane by lane.
        tl.store(ptr + place[0] + lane, x, mask=inside & (whole == 0))


# %%
# With these, the two sweeps of page 03 become the following functions. As
# there, the 16 bytes that a thread loads at once have one pair: their maximum
# ``m``, and ``s``, the sum of ``exp(x - m)``. We say that ``s`` is a sum
# *about* ``m``.


@triton.jit
def _load(
    ptr,
    c,  # a chunk
    place,  # of our slice
    PAIRS: tl.constexpr,  # threads
    EACH: tl.constexpr,  # lanes of a thread
    FULL: tl.constexpr,  # whether the chunk needs no mask
    STEP: tl.constexpr,
    HINT: tl.constexpr,  # what the caches should do
):
    """A chunk, and minus infinity in lanes that are not of the slice."""
    lane, _, _ = _lanes(c, place, PAIRS, EACH, STEP)
    # Groups behind the end are not loaded. What a group holds of other rows is
    # loaded and then replaced.
    mask = None if FULL else lane // STEP * STEP < place[2]
    x = tl.load(ptr + place[0] + lane, mask=mask, eviction_policy=HINT)
    acc: tl.constexpr = tl.float64 if x.dtype == tl.float64 else tl.float32
    return _only(x.to(acc), c, place, float("-inf"), FULL, STEP)


@triton.jit
def _read(
    x_ptr,
    c,
    place,
    m,  # (PAIRS,): the maxima so far
    s,  # (PAIRS,): the sums so far
    EACH: tl.constexpr,
    FULL: tl.constexpr,
    STEP: tl.constexpr,
):
    """First sweep: the pairs with chunk c."""
    PAIRS: tl.constexpr = m.shape[0]
    x = _load(x_ptr, c, place, PAIRS, EACH, FULL, STEP, "evict_last")
    new = tl.maximum(m, tl.max(x, 1))
    # The sum so far was about the old maximum, so it shrinks.
    s = s * tl.exp(m - new) + tl.sum(_exp(x - new[:, None]), 1)
    return new, s


@triton.jit
def _write(
    x_ptr,
    y_ptr,
    c,
    place,
    m,  # the maximum of the row
    s,  # 1 / the sum of the row; its logarithm if LOG
    PAIRS: tl.constexpr,
    EACH: tl.constexpr,
    FULL: tl.constexpr,
    STEP: tl.constexpr,
    LOG: tl.constexpr,
):
    """Second sweep: store the results of chunk c."""
    x = _load(x_ptr, c, place, PAIRS, EACH, FULL, STEP, "evict_first")
    y = x - m - s if LOG else _exp(x - m) * s
    _store(y_ptr, y, c, place, FULL, STEP)


# %%
# The kernel visits the chunks with masks in loops of their own, which the
# compiler unrolls, and all others in plain loops. Each maximum starts at
# ``LOWEST``, the lowest finite number of float32, as on page 03.


@triton.jit
def _softmax_fwd_shifted(
    x_ptr,  # (M, N), contiguous
    y_ptr,  # (M, N)
    N: tl.constexpr,  # columns
    PAIRS: tl.constexpr,  # threads: each has a pair
    EACH: tl.constexpr,  # lanes of a thread, 16 bytes
    STEP: tl.constexpr,  # elements of 16 bytes, or 1 if all rows begin there
    LOG: tl.constexpr,  # whether y is the logarithm of softmax
):
    DOUBLE: tl.constexpr = y_ptr.dtype.element_ty == tl.float64
    acc: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    # Chunks HEAD to LAST - 1 have no masks. Before them is the first one, if
    # rows begin anywhere, and behind them are one or two at the end.
    HEAD: tl.constexpr = 1 if STEP > 1 else 0
    FULL: tl.constexpr = N // (PAIRS * EACH)
    LAST: tl.constexpr = FULL if FULL > HEAD else HEAD
    ALL: tl.constexpr = (N + STEP - 2) // (PAIRS * EACH) + 1

    # A program has a row, which is a single slice.
    place = _place(tl.program_id(0), 0, N, N + STEP, STEP)
    m = tl.full((PAIRS,), LOWEST, acc)
    s = tl.zeros((PAIRS,), acc)

    # First sweep. ``c % ALL`` comes back to chunk 0 behind the last one.
    for c in tl.static_range(LAST, ALL + HEAD):
        m, s = _read(x_ptr, c % ALL, place, m, s, EACH, False, STEP)
    for c in tl.range(HEAD, LAST, num_stages=1):
        m, s = _read(x_ptr, c, place, m, s, EACH, True, STEP)

    # The pair of the row.
    top = tl.max(m, 0)
    s = tl.sum(s * tl.exp(m - top), 0)
    s = tl.log(s) if LOG else 1 / s

    # Second sweep. It begins with what was read last, and may still be in L1.
    for c in tl.range(HEAD, LAST, num_stages=1):
        back = HEAD + LAST - 1 - c
        _write(x_ptr, y_ptr, back, place, top, s, PAIRS, EACH, True, STEP, LOG)
    for c in tl.static_range(LAST, ALL + HEAD):
        _write(
            x_ptr,
            y_ptr,
            c % ALL,
            place,
            top,
            s,
            PAIRS,
            EACH,
            False,
            STEP,
            LOG,
        )


# %%
# How many programs should an SM have? With 32 registers a thread it has two of
# 1024 threads. Then one can read while the other one writes. But where L1 has
# no room for both of their rows, a single program may be better: it has L1 for
# itself, and only 132 rows are under way. So wider rows get 64 registers a
# thread, and one program.

GPU = torch.cuda.get_device_properties(DEVICE) if ON_GPU else None
NUM_SMS = GPU.multi_processor_count if ON_GPU else 4

# Bytes of L1 for two rows; the rest of its 256 KB is for other data.
TWO_ROWS = 224 * 1024


def in_shifted(x, log=False, dtype=None):
    """Softmax of the last dimension in two sweeps, wherever rows begin."""
    y = torch.empty_like(x, dtype=dtype)
    N = x.shape[-1]
    options = {"num_warps": 32}
    if CUDA and y.itemsize < 8:
        options["maxnreg"] = 64
        if 2 * N * x.itemsize <= TWO_ROWS:
            options["maxnreg"] = 32
    _softmax_fwd_shifted[(x.numel() // N,)](
        x_ptr=x,
        y_ptr=y,
        N=N,
        PAIRS=1024 if ON_GPU else 4,
        EACH=16 // y.itemsize,
        STEP=step_of(N, x, y),
        LOG=log,
        **options,
    )
    return y


x = torch.randn(3, 77, device=DEVICE)
print("rows of 77 columns:", torch.allclose(in_shifted(x), F.softmax(x, 1)))

# %%
# What do the programs of a row tell each other?
# ----------------------------------------------
#
# To read a row once, programs have to hold it together. Each one knows the
# pair of its own slice. The largest element of the row is the largest of the
# maxima. Each sum is about the maximum of its own slice, so before we add up
# the sums, we multiply each by ``exp(m - top)``, where ``top`` is the maximum
# of the row. That makes it smaller, or leaves it as it is.
#
# Here is a row of eight numbers in two slices:

row = torch.tensor([1.0, 3.0, 2.0, 3.0, 5.0, 4.0, 2.0, 5.0])
slices = row.reshape(2, 4)
m = slices.amax(dim=1)
s = (slices - m[:, None]).exp().sum(dim=1)
shrunk = s * (m - m.max()).exp()
print("maxima:", m.tolist())
print("sums:", [round(each, 3) for each in s.tolist()])
print("sums about 5:", [round(each, 3) for each in shrunk.tolist()])
print(f"of the row: {shrunk.sum():.3f}, and {(row - 5).exp().sum():.3f}")

# %%

# Drawing: a row in four slices, and the pair of each.

x = torch.randn(4, 16, generator=torch.Generator().manual_seed(1))
m = x.amax(dim=1)
s = (x - m[:, None]).exp().sum(dim=1)
y = F.softmax(x.flatten(), dim=0).reshape(4, 16)
plt.figure("Softmax of a row in four slices, with the pair of each", (7, 2))
for part in range(4):
    cols = range(16 * part, 16 * part + 16)
    plt.bar(cols, y[part], color=f"C{part}", alpha=0.6)
    plt.plot(cols, 16 * [y[part].max()], color=f"C{part}")
    label = f"m = {m[part]:.1f}, s = {s[part]:.1f}"
    plt.text(16 * part, 1.1 * y.max(), label)
plt.axis("off")
plt.show()

# %%
# So a program has to tell the others two float32 numbers. `Programs that share
# a row <../layer-norm/08-shared-rows.html>`_ shows how: it puts them into a
# word of 64 bits and *publishes* it in memory, and the others *collect* the
# words of all slices, by loading them until none is empty. (An empty word
# holds ``EMPTY``, a value that no pair of numbers can have.) A program that
# collects the words one turn of its loop later finds that they have arrived,
# and hardly waits.
#
# All of them must run at the same time. So ``together`` asks CUDA first
# whether it has room for all programs of the launch. If it has not, nothing is
# launched, and we take two sweeps instead. If it has, a cooperative launch
# starts all of them at once.
#
# These functions are the same as on that page, which explains each line.

# %%

# Scaffold: room for all programs, from page 08 of layer norm.

EMPTY = 0x7F800001_7F800001


def places(compiled):
    """How many programs of a compiled kernel the GPU can run at a time."""
    try:
        compiled._init_handles()  # load it onto the GPU, as a launch does
    except triton.OutOfResources:
        return 0  # not even one: it needs more than an SM has
    per_sm = ctypes.c_int(0)
    ctypes.CDLL("libcuda.so.1").cuOccupancyMaxActiveBlocksPerMultiprocessor(
        ctypes.byref(per_sm),
        ctypes.c_void_p(compiled.function),
        ctypes.c_int(32 * compiled.metadata.num_warps),  # threads
        ctypes.c_size_t(compiled.metadata.shared),  # bytes of shared memory
    )
    return per_sm.value * GPU.multi_processor_count


def together(kernel, programs, per_sm, warps, **arguments):
    """Launch programs that wait for each other, if the GPU has room for all of
    them at a time; say whether it has."""
    options = {"num_warps": warps, "PTX": CUDA}
    if not CUDA:
        for _ in range(2):
            kernel[(programs,)](**arguments, **options)
        return True

    registers = 65536 // (32 * warps * per_sm)
    options["maxnreg"] = min(registers // 8 * 8, 255)  # a multiple of 8
    options["launch_cooperative_grid"] = True
    compiled = kernel.warmup(grid=(programs,), **arguments, **options)
    if programs > places(compiled):
        return False
    kernel[(programs,)](**arguments, **options)
    return True


def empty_words(rows, slices):
    """Words for one launch: nobody has published any of them."""
    empty = EMPTY if CUDA else 0
    return torch.full((rows, slices), empty, device=DEVICE)


# %%
# ``_publish`` and ``_collect`` do the same as there, but in Triton and not in
# PTX. The reason is that registers are full here, because two slices are in
# them. With both functions in PTX, the backward kernel *spills* 232 to 256
# bytes a thread to memory, and in Triton at most 8. (We compiled both for an
# H200 with Triton 3.7, at 65536, 131072 and 1048576 columns.) The compiler
# sees a loop that is written in Triton, and probably moves less work to before
# it.
#
# One thread stores the word, by an atomic exchange. *Relaxed* is enough: the
# word itself is the whole message, so the order of other stores does not
# matter. ``volatile`` says that a load goes to memory each time.
#
# Words are collected in the order of slices and not in that in which they
# arrive, so each program of a row finds the same sum, and each run gives the
# same bits.


@triton.jit
def _publish(
    words_ptr,  # (M, SLICES)
    row,
    s,  # our slice
    a,  # float32: the lower half of the word
    b,  # float32: the upper half
    SLICES: tl.constexpr,  # slices of a row
):
    """Store the word of slice s."""
    # A number of 32 bits becomes one of 64 with zeros before it, because it is
    # unsigned.
    low = a.to(tl.uint32, bitcast=True).to(tl.int64)
    high = b.to(tl.uint32, bitcast=True).to(tl.int64)
    at = words_ptr + tl.cast(row, tl.int64) * SLICES + s
    tl.atomic_xchg(at, low | (high << 32), sem="relaxed")


@triton.jit
def _collect(
    words_ptr,  # (M, SLICES)
    row,
    SLICES: tl.constexpr,  # slices of a row
    PADDED: tl.constexpr,  # a power of two, at least SLICES
    PTX: tl.constexpr,  # False: in the interpreter
):
    """Both numbers of each slice of a row, as soon as all are there."""
    s = tl.arange(0, PADDED)
    at = words_ptr + tl.cast(row, tl.int64) * SLICES
    at += tl.minimum(s, SLICES - 1)
    word = tl.load(at, volatile=True)
    if PTX:
        loads = 0
        # The same number as EMPTY: as long as any word is empty, load again.
        while tl.max((word == 0x7F800001_7F800001).to(tl.int32)) > 0:
            word = tl.load(at, volatile=True)
            loads += 1
            if loads == 10_000_000:  # it never comes: end with an error
                tl.inline_asm_elementwise(
                    "trap; mov.b32 $0, $1;",
                    constraints="=r,r",
                    args=[loads],
                    dtype=tl.int32,
                    is_pure=False,
                    pack=1,
                )

    # Both halves as float32 again. Behind the last slice there is a maximum
    # that is below all others, and a sum of 0.
    a = word.to(tl.uint32).to(tl.float32, bitcast=True)
    b = (word >> 32).to(tl.uint32).to(tl.float32, bitcast=True)
    return tl.where(s < SLICES, a, LOWEST), tl.where(s < SLICES, b, 0)


@triton.jit
def _row_pair(
    ms,  # (PADDED,): the maximum of each slice
    sums,  # (PADDED,): its sum
):
    """Maximum and sum of the row."""
    m = tl.max(ms, 0)
    return m, tl.sum(sums * tl.exp(ms - m), 0)


# %%
# How does a slice wait in registers?
# -----------------------------------
#
# A program publishes the pair of its slice and then loads its slice of the
# next row, before it finishes the first one. So two slices are in registers at
# a time, one that is being added up and one that *waits*.
#
# A register has 32 bits. If a turn of a loop hands a number of 16 bits to the
# next one, the compiler gives it a register of its own. A slice would take
# twice as many registers as it has to. So it waits as integers of 32 bits,
# with one column in each, or two columns of 16 bits. A thread loads four of
# them at once, 16 bytes.


@triton.jit
def _load_words(
    ptr,
    place,  # of our slice
    PAIRS: tl.constexpr,  # threads
    WIDTH: tl.constexpr,  # lanes of a slice
    LEAST: tl.constexpr,  # lanes that the slices of all programs have
):
    """A slice as a tuple of chunks: integers of 32 bits."""
    EACH: tl.constexpr = 128 // ptr.dtype.element_ty.primitive_bitwidth
    CHUNK: tl.constexpr = PAIRS * EACH
    word = tl.arange(0, PAIRS)[:, None] * 4 + tl.arange(0, 4)[None, :]
    # The compiler cannot know that a slice begins at 16 bytes: we say so.
    at = tl.multiple_of(ptr + place[0], 16).to(tl.pointer_type(tl.int32))
    words = ()
    for c in tl.static_range((WIDTH + CHUNK - 1) // CHUNK):
        mask = c * CHUNK + word // 4 * EACH < place[2]
        mask = None if _full(c, CHUNK, LEAST, 1) else mask
        words += (tl.load(at + c * PAIRS * 4 + word, mask=mask),)
    return words


@triton.jit
def _numbers(words, dtype: tl.constexpr):
    """The columns in words, in float32."""
    KIND: tl.constexpr = tl.float32 if dtype == tl.bfloat16 else dtype
    low = words.to(tl.int16)
    high = (words >> 16).to(tl.int16)
    if dtype == tl.bfloat16:
        # A bfloat16 number is the upper half of a float32 number.
        low = words << 16
        high = words & -65536
    if dtype != tl.float32:
        # Column by column: a low half, then its high half.
        words = tl.join(low, high).reshape(words.shape[0], 8)
    return words.to(KIND, bitcast=True).to(tl.float32)


# %%
# Two more functions do what the sweeps did: the first one finds the pair of a
# slice, and the second one computes its results. In registers the maximum
# comes first, so no sum has to shrink before the end.


@triton.jit
def _pair(
    words,  # a slice, from _load_words
    place,  # where it is
    dtype: tl.constexpr,  # of its columns
    LEAST: tl.constexpr,
    STEP: tl.constexpr,
):
    """Maximum and sum of a slice."""
    m = tl.full((words[0].shape[0],), LOWEST, tl.float32)
    xs = ()
    for c in tl.static_range(len(words)):
        x = _numbers(words[c], dtype)
        x = _only(
            x, c, place, float("-inf"), _full(c, x.numel, LEAST, STEP), STEP
        )
        xs += (x,)
        m = tl.maximum(m, tl.max(x, 1))
    s = tl.zeros_like(m)
    for c in tl.static_range(len(words)):
        s += tl.sum(_exp(xs[c] - m[:, None]), 1)
    # A pair for each thread became one for the program.
    top = tl.max(m, 0)
    return top, tl.sum(s * tl.exp(m - top), 0)


@triton.jit
def _finish(
    words,  # a slice that has waited
    m,  # the maximum of its row
    s,  # the sum of its row
    y_ptr,
    place,
    dtype: tl.constexpr,
    LEAST: tl.constexpr,
    STEP: tl.constexpr,
    LOG: tl.constexpr,
):
    """Store the softmax of a slice."""
    scale = 1 / s
    log = tl.log(s)
    for c in tl.static_range(len(words)):
        d = _numbers(words[c], dtype) - m
        y = d - log if LOG else _exp(d) * scale
        _store(y_ptr, y, c, place, _full(c, y.numel, LEAST, STEP), STEP)


# %%
# The forward kernel
# ------------------
#
# Programs that share rows are a *group*. Groups take rows in turns: with 4
# groups, group 1 has rows 1, 5, 9 and so on. A turn of the loop has these
# steps:
#
# 1. Load our slice of the next row.
# 2. Collect the words of the row before, which were published a turn ago, and
#    finish our slice of it.
# 3. Compute the pair of the next row, and publish it.
#
# The load stands first, so that the bytes are on their way while the program
# finishes the row before. The first row has nothing before it, and the last
# one has nothing behind it, so both have a few lines outside of the loop.


@triton.jit
def _softmax_fwd_shared(
    x_ptr,  # (M, N), contiguous
    y_ptr,  # (M, N)
    words_ptr,  # (M, SLICES), empty
    M,  # rows
    N: tl.constexpr,  # columns
    WIDTH: tl.constexpr,  # lanes of a slice
    SLICES: tl.constexpr,  # slices of a row
    PADDED: tl.constexpr,  # a power of two, at least SLICES
    PAIRS: tl.constexpr,  # threads
    STEP: tl.constexpr,  # elements of 16 bytes, or 1 if all rows begin there
    LOG: tl.constexpr,  # whether y is the logarithm of softmax
    PTX: tl.constexpr,  # False: in the interpreter
):
    LEAST: tl.constexpr = N - (SLICES - 1) * WIDTH  # of the last slice
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    part = tl.program_id(0) % SLICES
    first = tl.program_id(0) // SLICES
    groups = tl.num_programs(0) // SLICES

    # The first row: only publish.
    before = _place(first, part, N, WIDTH, STEP)
    waits = _load_words(x_ptr, before, PAIRS, WIDTH, LEAST)
    m, s = _pair(waits, before, dtype, LEAST, STEP)
    _publish(words_ptr, first, part, m, s, SLICES)

    for row in tl.range(first + groups, M, groups, num_stages=1):
        # Load the next row.
        place = _place(row, part, N, WIDTH, STEP)
        words = _load_words(x_ptr, place, PAIRS, WIDTH, LEAST)

        # Finish the row before.
        ms, sums = _collect(words_ptr, row - groups, SLICES, PADDED, PTX)
        top, total = _row_pair(ms, sums)
        _finish(waits, top, total, y_ptr, before, dtype, LEAST, STEP, LOG)

        # Tell the others about the next row.
        m, s = _pair(words, place, dtype, LEAST, STEP)
        _publish(words_ptr, row, part, m, s, SLICES)
        waits = words
        before = place

    # Finish the last row of the group.
    last = first + (M - 1 - first) // groups * groups
    ms, sums = _collect(words_ptr, last, SLICES, PADDED, PTX)
    top, total = _row_pair(ms, sums)
    _finish(waits, top, total, y_ptr, before, dtype, LEAST, STEP, LOG)


# %%
# How many slices?
# ----------------
#
# A plan says how many warps a program has, how many programs an SM has, and
# how many chunks a slice has at most. With many small programs, some of them
# load while others wait. But the smaller the slices are, the more words a
# program has to collect. Backward, two matrices wait in registers, so an SM
# has room for fewer threads, or for fewer columns of each thread. These plans
# were the fastest in trials on an H200, and your GPU may want others.

WARP = 32 if ON_GPU else 1  # threads; without a GPU small rows have slices


def plan_shared(backward, row_bytes):
    """Warps of a program, programs on an SM, chunks of a slice."""
    if backward:
        if 2**17 < row_bytes <= 2**18:
            return 2, 12, 4
        return 4, 6, 4
    if row_bytes <= 2**19:
        return 4, 8, 4
    return 4, 4, 8


def cut(N, each, warps, chunks):
    """How many slices a row has, and how many lanes each of them."""
    lanes = N
    if N % each > 0:
        lanes += each - 1  # before a row that begins anywhere
    most = chunks * WARP * warps * each
    slices = triton.cdiv(lanes, most)
    # All slices as wide as each other, in steps of 8 lanes.
    width = triton.cdiv(triton.cdiv(lanes, slices), 8) * 8
    return triton.cdiv(lanes, width), width


# %%
# This is what the forward pass gets in 16 bits on a GPU with 132 SMs: groups
# that work at the same time, and how much of a row each program holds.

print("columns  programs that fit  groups  slices  KB a slice")
for N, warps, per_sm, chunks in (
    (65536, 4, 8, 4),
    (262144, 4, 8, 4),
    (1048576, 4, 4, 8),
):
    width = triton.cdiv(N, triton.cdiv(N, chunks * 32 * warps * 8))
    slices = triton.cdiv(N, width)
    programs = 132 * per_sm
    print(
        f"{N:7}{programs:19}{programs // slices:8}{slices:8}"
        f"{2 * width / 2**10:12.0f}"
    )

# %%
# The launch puts this together. Rows that begin anywhere are loaded from
# multiples of 16 bytes, so the matrix itself must begin at one. A view may
# not, and then we take a copy of it.


def aligned(matrix):
    """The matrix, or a copy of it if it does not begin at 16 bytes."""
    if matrix.data_ptr() % 16 > 0:
        return matrix.clone()
    return matrix


def launch_shared(kernel, plan, matrix, log, **pointers):
    """Launch programs that share rows; say whether the GPU has room for them.

    matrix is one of those that are read.
    """
    warps, per_sm, chunks = plan
    N = matrix.shape[-1]
    M = matrix.numel() // N
    each = 16 // matrix.itemsize
    slices, width = cut(N, each, warps, chunks)
    # At least one group, and not more groups than rows.
    groups = min(max(NUM_SMS * per_sm // slices, 1), M)
    return together(
        kernel,
        programs=groups * slices,
        per_sm=per_sm,
        warps=warps,
        words_ptr=empty_words(M, slices),
        M=M,
        N=N,
        WIDTH=width,
        SLICES=slices,
        PADDED=triton.next_power_of_2(slices),
        PAIRS=WARP * warps,
        STEP=each if N % each > 0 else 1,
        LOG=log,
        **pointers,
    )


def in_slices(x, log=False, dtype=None):
    """Softmax of the last dimension in shared rows; None if programs do not
    fit."""
    x = aligned(x)
    y = torch.empty_like(x, dtype=dtype)
    plan = plan_shared(False, x.shape[-1] * x.itemsize)
    launched = launch_shared(
        _softmax_fwd_shared, plan, x, log, x_ptr=x, y_ptr=y
    )
    if not launched:
        return None
    return y


x = torch.randn(5, 77, device=DEVICE)
print("shared rows:", torch.allclose(in_slices(x), F.softmax(x, dim=1)))

# %%
# Which of the three is the fastest?
# ----------------------------------
#
# We time the two sweeps of page 03, the shifted sweeps, and the shared rows.

# %%

# Scaffold: three forms of the forward pass, a benchmark.

FORMS = {"slices": in_slices, "shifted": in_shifted, "page 03": forward}


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=[
            32768,
            49152,
            50257,
            65536,
            100003,
            131072,
            262144,
            524288,
            1048576,
        ],
        x_log=True,
        line_arg="provider",
        line_vals=[*FORMS, "copy"],
        line_names=["Shared rows", "Two sweeps, shifted", "Page 03", "Copy"],
        ylabel="GB/s",
        plot_name="wide-softmax-forms",
        args={"M": 4096, "dtype": torch.bfloat16, "mode": "forward"},
    )
)
def bench_forms(M, N, dtype, mode, provider):
    """Device time: a CUDA graph of several calls, each with inputs of its own
    and after L2 was overwritten, less the graph without the calls; median, 20%
    and 80% quantiles. At most 512 MB a matrix. Copy: the best of six tiles."""
    if not ON_GPU:
        return 3 * [float("nan")]
    M = rows_of(M, N, dtype)
    if provider == "copy":
        return ceiling(reads=1, writes=1, shape=(M, N), dtype=dtype)

    function = FORMS[provider]

    def prepare():
        x, _ = inputs(M, N, dtype)
        return lambda: function(x.detach())

    return speed(2 * M * N * dtype.itemsize, prepare)


# %%

report(bench_forms)

# %%
# **What the figure shows.**
# On the H100, at 50257 columns, the shift brings two sweeps from 51% to 91% of
# the copy, and shared rows reach 91%, too. At 131072 columns shared rows reach
# 94%, and shifted sweeps 88%. At 1048576 columns they reach 92% and 64%. At
# 65536 columns the shifted sweeps are ahead with 100%, shared rows reach 95%,
# and page 03 89%. At 32768 columns page 03 is ahead with 102%, shared rows
# reach 97%, and shifted sweeps 88%. (Page 03 is as fast here as in the first
# figure, but the copy was 1% slower at 32768 columns, and 1% faster at 50257.
# So page 03 reaches 102% and 51% here, and 100% and 52% there.)
#
# On the H200, at 50257 columns, the shift brings two sweeps from 39% to 83%,
# and shared rows reach 80%. At 65536 columns the three reach 89%, 89% and 88%
# in the order of the legend. From 131072 columns on shared rows are ahead,
# with 87% to 80%, and at 32768 and 49152 columns they are behind, with 89% and
# 82%, where page 03 reaches 101% and 97%.
#
# At 100003 columns the copy is no ceiling. The number of elements of those
# 2684 rows is not a multiple of 16, so Triton does not know that the mask of
# the copy ends between two groups of 16 bytes, and the copy moves 2 bytes at a
# time, too. It reaches 2116 GB/s there, and 2996 GB/s at 131072 columns.
# Shared rows reach 2754 GB/s at 100003 columns, shifted sweeps 2331 GB/s, and
# page 03 1454 GB/s. We leave this width out of all percentages on this page.
#
# **Why.**
# A clock cannot say where the second sweep reads from. But the hardware counts
# the bytes that DRAM delivers, and ``ncu``, NVIDIA's profiler, shows the
# count. We divide it by the bytes of ``x``: 1 means that each row came from
# DRAM once, and 2 that it came twice.

# %%

# Scaffold: bytes of the forward pass, a benchmark that ncu counts.


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=[32768, 65536, 131072, 262144, 1048576],
        x_log=True,
        line_arg="provider",
        line_vals=[*FORMS],
        line_names=["Shared rows", "Two sweeps, shifted", "Page 03"],
        ylabel="bytes of DRAM per byte counted",
        plot_name="wide-softmax-dram",
        args={
            "M": 4096,
            "dtype": torch.bfloat16,
            "mode": "forward",
            "counter": "dram__bytes_read.sum",
        },
    )
)
def dram_reads(M, N, dtype, mode, counter, provider):
    """Bytes that DRAM delivers in a forward pass, over the bytes of x. At most
    512 MB a matrix."""
    if not ON_GPU:
        return 3 * [float("nan")]
    x, _ = inputs(rows_of(M, N, dtype), N, dtype)
    x = x.detach()
    function = FORMS[provider]
    function(x)  # compiles the kernel
    with torch.cuda.nvtx.range(f"counted {provider} {N} per {x.nbytes}"):
        function(x)
    return 3 * [float("nan")]  # only ncu knows


# %%

dram_reads.run(show_plots=ON_GPU)

# %%
# Shared rows read ``x`` from DRAM once, however wide a row is. Two sweeps read
# a part of it twice as soon as the rows that are under way, with their
# results, are more than L2 holds. In the widest rows that part is nearly all.
# On the H100 page 03 reads 24% of ``x`` twice at 65536 columns, 61% at 131072,
# 78% at 262144, and 95% at 1048576.
#
# *Do the bytes explain page 03?* Mostly. If nothing but bytes of DRAM counted,
# it would reach 89%, 77%, 72% and 68% of the copy at these widths. It reaches
# 89%, 75%, 68% and 64%.
#
# *Do they explain shifted sweeps?* From 65536 columns on, mostly, too. There
# these have only one program on an SM, so half as many bytes are under way as
# on page 03. They read 0% of ``x`` twice at 65536 columns, 22% at 131072, 60%
# at 262144, and 90% at 1048576. So they can take rows that are twice as wide:
# at 131072 and 262144 columns they read about as much twice as page 03 does at
# 65536 and 131072. The bytes would leave 100%, 90%, 77% and 69% of the copy,
# and they reach 100%, 88%, 72% and 64%. From 131072 columns on they fall
# further behind that than page 03 does, and at 1048576 columns they are no
# longer ahead of it. A single program on an SM cannot read one row while it
# writes another. But that is so at 65536 columns, too, where nothing is
# missing, so we do not know the reason.
#
# *What about narrower rows?* At 32768 columns the bytes do not explain shifted
# sweeps: they read ``x`` from DRAM once, two programs share an SM as on page
# 03, and still they reach 88% where page 03 reaches 102%. We do not know why.
# From 49152 columns to 50257, where rows begin anywhere, shifted sweeps fall
# from 97% to 91%, and shared rows from 95% to 91%. Both have masks at the ends
# of their rows there, and store some columns one by one. That may be the
# reason.
#
# *What do shared rows lose?* From 65536 columns on they fall from 95% to 92%,
# although they read each byte once. A program collects a word of each slice,
# 16 of them at 65536 columns and 128 at 1048576, and above 262144 columns half
# as many programs run. Both may cost time. But with 8 words, at 32768 columns,
# they reach no more than 97%, and with 12, at 49152, 95%. So something else
# costs time, too, and we have not found it.
#
# On the H200 the counts differ from these by 0.03 at most, and the speeds are
# further from what the bytes leave: page 03 reaches 88%, 72%, 66% and 63%, and
# shifted sweeps 89%, 70%, 63% and 61%. On the H200 shared rows fall further,
# from 89% to 80%. Its DRAM is faster, and its SMs are those of the H100, so
# the other costs weigh more.
#
# **What follows.**
# Two sweeps are good where a cache holds the row, and shared rows where no
# cache does. Our function will use each of them where it is faster.

# %%
# Backward: one number
# --------------------
#
# With :math:`c = \sum_k y_k \, dy_k` the gradient is
#
# .. math:: dx_j = y_j \, (dy_j - c)
#
# and for the logarithm of softmax, whose result is :math:`l`, it is
#
# .. math:: dx_j = dl_j - e^{l_j} \, c, \qquad c = \sum_k dl_k
#
# Page 03 derives both. A row needs a single number, so we write it into both
# halves of the word. But now slices of two matrices have to wait in registers,
# ``y`` and ``dy``.


@triton.jit
def _dot(
    ys,  # a slice of y
    dys,  # a slice of dy
    place,
    dtype: tl.constexpr,
    LEAST: tl.constexpr,
    STEP: tl.constexpr,
    LOG: tl.constexpr,
):
    """The sum of y * dy over a slice, or that of dy."""
    total = tl.zeros((ys[0].shape[0],), tl.float32)
    for c in tl.static_range(len(ys)):
        term = _numbers(dys[c], dtype)
        term = term if LOG else term * _numbers(ys[c], dtype)
        term = _only(
            term, c, place, 0.0, _full(c, term.numel, LEAST, STEP), STEP
        )
        total += tl.sum(term, 1)
    return tl.sum(total, 0)


@triton.jit
def _finish_gradient(
    ys,  # a slice of y that has waited
    dys,  # a slice of dy that has waited
    total,  # c of its row
    dx_ptr,
    place,
    dtype: tl.constexpr,
    LEAST: tl.constexpr,
    STEP: tl.constexpr,
    LOG: tl.constexpr,
):
    """Store dx of a slice."""
    for c in tl.static_range(len(ys)):
        y = _numbers(ys[c], dtype)
        dy = _numbers(dys[c], dtype)
        dx = dy - _exp(y) * total if LOG else y * (dy - total)
        _store(dx_ptr, dx, c, place, _full(c, dx.numel, LEAST, STEP), STEP)


# %%
# The kernel has the loop of the forward kernel, with two matrices.


@triton.jit
def _softmax_bwd_shared(
    y_ptr,  # (M, N), contiguous: from the forward pass
    dy_ptr,  # (M, N), contiguous
    dx_ptr,  # (M, N)
    words_ptr,  # (M, SLICES), empty
    M,  # rows
    N: tl.constexpr,  # columns
    WIDTH: tl.constexpr,  # lanes of a slice
    SLICES: tl.constexpr,  # slices of a row
    PADDED: tl.constexpr,  # a power of two, at least SLICES
    PAIRS: tl.constexpr,  # threads
    STEP: tl.constexpr,  # elements of 16 bytes, or 1 if all rows begin there
    LOG: tl.constexpr,  # whether y is the logarithm of softmax
    PTX: tl.constexpr,  # False: in the interpreter
):
    LEAST: tl.constexpr = N - (SLICES - 1) * WIDTH  # of the last slice
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    part = tl.program_id(0) % SLICES
    first = tl.program_id(0) // SLICES
    groups = tl.num_programs(0) // SLICES

    # The first row: only publish.
    before = _place(first, part, N, WIDTH, STEP)
    y_waits = _load_words(y_ptr, before, PAIRS, WIDTH, LEAST)
    dy_waits = _load_words(dy_ptr, before, PAIRS, WIDTH, LEAST)
    total = _dot(y_waits, dy_waits, before, dtype, LEAST, STEP, LOG)
    _publish(words_ptr, first, part, total, total, SLICES)

    for row in tl.range(first + groups, M, groups, num_stages=1):
        # Load the next row.
        place = _place(row, part, N, WIDTH, STEP)
        ys = _load_words(y_ptr, place, PAIRS, WIDTH, LEAST)
        dys = _load_words(dy_ptr, place, PAIRS, WIDTH, LEAST)

        # Finish the row before.
        _, sums = _collect(words_ptr, row - groups, SLICES, PADDED, PTX)
        c = tl.sum(sums, 0)
        _finish_gradient(
            y_waits, dy_waits, c, dx_ptr, before, dtype, LEAST, STEP, LOG
        )

        # Tell the others about the next row.
        total = _dot(ys, dys, place, dtype, LEAST, STEP, LOG)
        _publish(words_ptr, row, part, total, total, SLICES)
        y_waits = ys
        dy_waits = dys
        before = place

    # Finish the last row of the group.
    last = first + (M - 1 - first) // groups * groups
    _, sums = _collect(words_ptr, last, SLICES, PADDED, PTX)
    c = tl.sum(sums, 0)
    _finish_gradient(
        y_waits, dy_waits, c, dx_ptr, before, dtype, LEAST, STEP, LOG
    )


def backward_in_slices(y, dy, log=False, dtype=None):
    """dx in shared rows; None if programs do not fit."""
    y = aligned(y)
    dy = aligned(dy)
    dx = torch.empty_like(y, dtype=dtype)
    plan = plan_shared(True, y.shape[-1] * y.itemsize)
    launched = launch_shared(
        _softmax_bwd_shared, plan, y, log, y_ptr=y, dy_ptr=dy, dx_ptr=dx
    )
    if not launched:
        return None
    return dx


# %%
# Softmax of every width
# ----------------------
#
# Which form is the fastest where? The figure of the three forms gives the rule
# for the forward pass:
#
# - **Shared rows** where a row has more than 128 KB, or 65536 columns of 16
#   bits. Backward, a program of page 03 can hold rows of up to 64 KB of each
#   matrix in registers, and wider rows are shared.
# - **Shifted sweeps** where rows of more than 32 KB begin anywhere, and where
#   L1 holds one row but not two. In the second case they read less from DRAM:
#   on the H100 they reach 100% of the copy at 65536 columns, and page 03
#   reaches 89%.
# - **Page 03** for all others.
#
# Shared rows cannot take everything: a word has no room for two float64
# numbers, GPUs of AMD have no PTX, and a row must not have more slices than
# the GPU has room for programs. Whether the programs fit is asked again at
# each launch, and if they do not, we take two sweeps.


def can_share(backward, dtype, x):
    """Whether shared rows take it; dtype is that of the result."""
    N = x.shape[-1]
    warps, per_sm, chunks = plan_shared(backward, N * x.itemsize)
    slices, _ = cut(N, 16 // x.itemsize, warps, chunks)
    return (
        ON_GPU == CUDA
        and dtype != torch.float64
        and slices <= NUM_SMS * per_sm
    )


def pick(backward, dtype, x):
    """The form that the rule takes."""
    N = x.shape[-1]
    row_bytes = N * x.itemsize
    most_swept = 65536 if backward else 131072
    if row_bytes > most_swept and can_share(backward, dtype, x):
        return "slices"
    if backward:
        return "page 03"
    if N % (16 // x.itemsize) > 0 and row_bytes > 32768:
        return "shifted"
    if TWO_ROWS < 2 * row_bytes <= 2 * 131072:
        return "shifted"
    return "page 03"


# %%
# The functions that use the rule are folded, and so are those for autograd and
# for ``torch.compile``. While ``torch.compile`` compiles, it knows no
# addresses and not always the width. So both passes are *operators* to it,
# which pick a form when they run.

# %%

# Scaffold: both passes, in a form that is picked.


def run_forward(x, log, dtype, kind=None):
    # Triton starts a kernel on the current GPU, wherever its tensors are.
    if x.is_cuda and x.get_device() != torch.cuda.current_device():
        raise ValueError(f"input is on {x.device}: not the current one")
    if x.numel() == 0:
        return torch.empty_like(x, dtype=dtype)
    if kind is None:
        kind = pick(False, dtype, x)
    if kind == "page 03":
        return forward(x, log, dtype)
    y = None
    if kind == "slices":
        y = in_slices(x, log, dtype)
    if y is None:  # also if programs do not fit
        y = in_shifted(x, log, dtype)
    return y


def run_backward(y, dy, log, dtype, kind=None):
    if y.numel() == 0:
        return torch.empty_like(y, dtype=dtype)
    if kind is None:
        kind = pick(True, y.dtype, y)
    dx = None
    if kind == "slices":
        dx = backward_in_slices(y, dy, log, dtype)
    if dx is None:
        dx = backward(y, dy, log, dtype)
    return dx


# %%

# Scaffold: both passes as operators for torch.compile.


@torch.library.custom_op("both_passes::wide_softmax", mutates_args=())
def operator(x: torch.Tensor, log: bool, dtype: torch.dtype) -> torch.Tensor:
    return run_forward(x, log, dtype)


@torch.library.custom_op("both_passes::wide_softmax_bwd", mutates_args=())
def operator_bwd(
    y: torch.Tensor, dy: torch.Tensor, log: bool, dtype: torch.dtype
) -> torch.Tensor:
    return run_backward(y, dy, log, dtype)


@operator.register_fake
def _(x, log, dtype):
    return torch.empty_like(x, dtype=dtype)


@operator_bwd.register_fake
def _(y, dy, log, dtype):
    return torch.empty_like(y, dtype=dtype)


# %%

# Scaffold: both passes for autograd.


class Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, log, dtype, kinds=(None, None)):
        forward_kind, backward_kind = kinds
        if torch.compiler.is_compiling():
            y = operator(x, log, dtype)
        else:
            y = run_forward(x, log, dtype, forward_kind)
        ctx.save_for_backward(y)
        ctx.log = log
        ctx.dtype = x.dtype
        ctx.kind = backward_kind
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable  # no second derivatives
    def backward(ctx, dy):
        (y,) = ctx.saved_tensors
        dy = dy.contiguous()
        if torch.compiler.is_compiling():
            dx = operator_bwd(y, dy, ctx.log, ctx.dtype)
        else:
            dx = run_backward(y, dy, ctx.log, ctx.dtype, ctx.kind)
        return dx, None, None, None


# %%

# Scaffold: the functions, from page 03.


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
# Is it right? We compare each element of ``y`` with PyTorch's in float64. The
# backward pass starts from the rounded ``y``. So we compare each element of
# ``dx`` with what the formula gives in float64 for the same rounded ``y``.

# %%

# Scaffold: a check of each element of a softmax.


def worst_error(found, exact, sizes, dtype):
    """The largest error, in units of what is allowed.

    Allowed is a rounding to dtype, and 64 roundings of float32 of the numbers
    that were added up, whose sizes are given.
    """
    limits = torch.finfo(dtype)
    # Numbers below the smallest normal one lie as far apart as those above it.
    size = exact.abs().clamp(min=limits.smallest_normal)
    rounding = size * limits.eps / 2
    sums = 64 * torch.finfo(torch.float32).eps * sizes
    return ((found - exact).abs() / (rounding + sums)).max().item()


def check(M, N, dtype, log, kinds=(None, None)):
    """Compare each element of y and dx with those of float64."""
    x, dy = inputs(M, N, dtype)
    y = Softmax.apply(x, log, dtype, kinds)
    (dx,) = torch.autograd.grad(y, x, dy)
    x = x.detach().double()
    y = y.detach().double()
    dy = dy.double()
    if log:
        exact = F.log_softmax(x, dim=1)
        sizes = exact.abs() + x.abs() + 1
        exact_dx = dy - y.exp() * dy.sum(dim=1, keepdim=True)
        total = dy.abs().sum(dim=1, keepdim=True)
        sizes_dx = dy.abs() + y.exp() * (1 + y.abs()) * total
    else:
        exact = F.softmax(x, dim=1)
        sizes = exact
        exact_dx = y * (dy - (y * dy).sum(dim=1, keepdim=True))
        total = (y * dy).abs().sum(dim=1, keepdim=True)
        sizes_dx = y * (dy.abs() + total)
    for name, error in (
        ("y", worst_error(y, exact, sizes, dtype)),
        ("dx", worst_error(dx, exact_dx, sizes_dx, dtype)),
    ):
        assert error <= 1, f"{name}: {error:.1f} times the allowed error"
    print(f"{M} x {N}, {dtype}: each element of y and dx is right")


# %%

N = 201  # small, because the interpreter is slow
half = torch.float16  # and it does not round to bfloat16, but cuts off
if ON_GPU:
    N = 100_003
    half = torch.bfloat16
for kinds in (
    ("slices", "slices"),
    ("shifted", "page 03"),
    ("page 03", "page 03"),
):
    check(3, N, half, log=False, kinds=kinds)
    check(3, N - 1, torch.float32, log=True, kinds=kinds)

# %%
# How fast is it beside libraries?
# --------------------------------
#
# `quack <https://github.com/Dao-AILab/quack>`_, a library of kernels that are
# written in CuTe, is measured where it can be imported. It takes widths that
# are multiples of 8 columns, up to 262144.

# %%

# Scaffold: PyTorch and quack.

from importlib.util import find_spec


def pytorch(x):
    return F.softmax(x, dim=-1)


def quack(x):
    from quack.softmax import softmax

    return softmax(x)


PEERS = {"torch": pytorch}
NAMES = {"torch": "PyTorch", "torch.compile": "torch.compile"}
if find_spec("quack"):
    PEERS["quack"] = quack
    NAMES["quack"] = "quack"


def refuses(provider, N):
    """quack would end in an error of the device where rows begin anywhere."""
    return provider == "quack" and (N % 8 > 0 or N > 2**18)


# %%

# Scaffold: a benchmark of the forward pass.


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=[32768, 49152, 65536, 100003, 262144, 1048576],
        x_log=True,
        line_arg="provider",
        line_vals=["triton", *NAMES, "copy"],
        line_names=["Triton", *NAMES.values(), "Copy"],
        ylabel="GB/s",
        plot_name="wide-softmax-forward",
        args={"M": 4096, "dtype": torch.bfloat16, "mode": "forward"},
    )
)
def bench_forward(M, N, dtype, mode, provider):
    """Device time: a CUDA graph of several calls, each with inputs of its own
    and after L2 was overwritten, less the graph without the calls; median, 20%
    and 80% quantiles. At most 512 MB a matrix. Copy: the best of six tiles."""
    if not ON_GPU or refuses(provider, N):
        return 3 * [float("nan")]
    M = rows_of(M, N, dtype)
    if provider == "copy":
        return ceiling(reads=1, writes=1, shape=(M, N), dtype=dtype)

    def measure(function):
        def prepare():
            x, _ = inputs(M, N, dtype)
            return lambda: function(x)

        return speed(2 * M * N * dtype.itemsize, prepare)

    if provider == "triton":
        return measure(softmax)
    if provider == "torch.compile":
        return best_of_three_compilations(pytorch, measure)
    return measure(PEERS[provider])


# %%

report(bench_forward)

# %%
# **What the figure shows.**
# On the H100 ours reaches 92% to 100% of the copy, PyTorch reaches 48% to 70%,
# and torch.compile reaches 48% to 65%. quack reaches 99% at 32768 columns,
# 100% at 49152, 99% at 65536, and 100% at 262144, where ours reaches 100%,
# 98%, 100% and 93%. At 100003 columns, which these percentages leave out, ours
# reaches 2756 GB/s, PyTorch 1496 GB/s, and torch.compile 1305 GB/s.
#
# On the H200 ours reaches 80% to 101% of the copy, PyTorch reaches 46% to 55%,
# and torch.compile reaches 45% to 47%. quack reaches 98%, 98%, 98% and 93% at
# these four widths, where ours reaches 101%, 87%, 89% and 84%. At 49152
# columns it is the kernel of page 03, which reached 97% in the figure of the
# three forms. So it seems to have two speeds there. In that figure the
# quantiles of shifted sweeps lie far apart at this width, too. We do not know
# the reason.
#
# **Why.**
# PyTorch and torch.compile read wide rows more than once. That does not
# explain all of their distance: our two sweeps read a row twice as well, and
# reach 100% at 32768 columns, where torch.compile reaches 65%. We have not
# looked for the rest. quack reads each row once, as our shared rows do; how it
# does so is the question of a section below.
#
# **What follows.**
# For wide rows, take a kernel that shares them, ours or quack's. Which of the
# two is ahead depends on the width and on the card.

# %%

# Scaffold: a benchmark of the backward pass.


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=[32768, 65536, 262144, 1048576],
        x_log=True,
        line_arg="provider",
        line_vals=["triton", "page 03", *NAMES, "copy"],
        line_names=["Triton", "Page 03", *NAMES.values(), "Copy"],
        ylabel="GB/s",
        plot_name="wide-softmax-backward",
        args={"M": 4096, "dtype": torch.bfloat16, "mode": "backward"},
    )
)
def bench_backward(M, N, dtype, mode, provider):
    """Device time: a CUDA graph of several calls, each with inputs of its own
    and after L2 was overwritten, less the graph without the calls; median, 20%
    and 80% quantiles. At most 512 MB a matrix. Copy: the best of six tiles."""
    if not ON_GPU or refuses(provider, N):
        return 3 * [float("nan")]
    M = rows_of(M, N, dtype)
    if provider == "copy":
        return ceiling(reads=2, writes=1, shape=(M, N), dtype=dtype)

    def measure(function):
        """Of the backward pass alone: the forward pass runs once, before."""

        def prepare():
            x, dy = inputs(M, N, dtype)
            y = function(x)
            return lambda: torch.autograd.grad(y, x, dy, retain_graph=True)

        return speed(3 * M * N * dtype.itemsize, prepare)

    def page_03(x):
        return Softmax.apply(x, False, x.dtype, ("page 03", "page 03"))

    if provider == "triton":
        return measure(softmax)
    if provider == "page 03":
        return measure(page_03)
    if provider == "torch.compile":
        return best_of_three_compilations(pytorch, measure)
    return measure(PEERS[provider])


# %%

report(bench_backward)

# %%
# **What the figure shows.**
# On the H100 our backward pass reaches 90% to 99% of the copy, page 03 reaches
# 59% to 99%, PyTorch reaches 42% to 44%, and torch.compile reaches 58% to
# 101%. quack reaches 100% at 32768 columns, 98% at 65536 and 89% at 262144,
# where ours reaches 99%, 97% and 97%. At 32768 columns torch.compile is the
# fastest, and ahead of us by 2%. Between 32768 and 65536 columns this figure
# has no width. There the figure of page 03, which is of an H200, shows quack
# ahead of the kernels of that page, and we have not measured shared rows.
#
# On the H200 our backward pass reaches 77% to 98% of the copy, page 03 reaches
# 58% to 98%, PyTorch reaches 40% to 42%, and torch.compile reaches 57% to 97%.
# quack reaches 83%, 83% and 72% at these three widths, where ours reaches 98%,
# 87% and 92%. So nothing is faster than ours on this card at these widths.
#
# **Why.**
# Two sweeps backward read ``y`` and ``dy`` twice. If nothing of them stays in
# a cache, five matrices move instead of three, which leaves 60% of the copy.
# At 1048576 columns page 03 and torch.compile both reach 59%. At 262144
# columns torch.compile reaches 58%, and page 03 65%, so there a cache must
# still hold a part of what page 03 reads again. At 65536 columns most of it
# must come from a cache, because page 03 reaches 95%. We have counted the
# bytes of the forward pass only.
#
# Ours reaches its lowest share at 1048576 columns. There a program collects
# 256 words, which are 2 KB, for each 16 KB of ``y`` and ``dy`` that it holds.
# That may be the reason, although from 16 words at 65536 columns to 64 at
# 262144 nothing is lost: both reach 97%. We have not measured it.
#
# **What follows.**
# Shared rows are read once in this pass, too. Beside the two sweeps of page 03
# that is worth little at 65536 columns, and much at 262144 and above.
#
# What do clusters do, and could we have them?
# --------------------------------------------
#
# On the H100, forward, quack is ahead of us by 2% at 49152 columns and by 7%
# at 262144, and we are ahead of it by 2% at 32768 and by 1% at 65536.
# Backward, quack is ahead of us by 1% at 32768 columns and by 2% at 65536, and
# we are ahead of it by 9% at 262144.
# On the H200 quack is further ahead of us forward: by 12%, 10% and 10% at
# 49152, 65536 and 262144 columns, and we are ahead of it by 3% at 32768.
# Backward we are ahead of it by 18%, 5% and 28% at 32768, 65536 and 262144
# columns.
#
# quack keeps a row in a *cluster*, in both passes. Since the H100, a launch
# can ask that a few thread blocks run at the same time on SMs that are near
# each other: up to 8 of them, or 16 if a kernel asks for it. A thread block of
# a cluster can read and write the shared memory of the others. So each one
# keeps its part of the row, adds it up, and writes its pair into the shared
# memory of all others. Then it waits at a barrier in its own shared memory
# until the pairs of the others have arrived. In version 0.6.5, which we
# measured, a row of 65536 columns has a cluster of 4, and one of 262144 has
# 16.
#
# This is what we do, too, with three differences:
#
# - **Where the message goes.** Ours goes to L2 and back. Theirs goes directly
#   from SM to SM.
# - **Who promises that all run.** The hardware starts each cluster as a whole,
#   as soon as there is room for this one. We need a cooperative launch of all
#   programs, which waits until there is room for all of them.
# - **How wide a row can be.** A cluster of 16 SMs has at most 16 × 227 KB of
#   shared memory, 3.5 MB. All SMs of an H100 have eight times as much. We use
#   registers, and take a million columns.
#
# There is a fourth: their kernel has no loop. A cluster has one row, loads it,
# waits for all of it, finishes it, and makes room for the next cluster. While
# it waits, other thread blocks on the same SM load theirs. Ours stays, and
# loads its next slice before it finishes the last one. We have not measured
# which of these differences costs how much. Clusters alone do not decide: at
# 262144 columns quack is ahead of us forward, and behind us backward, and has
# clusters in both passes.
#
# What would it take in Triton? A launch with ``num_ctas=4`` makes each program
# a cluster of four thread blocks, and spreads its tensors over them. The
# kernel would need no words: ``tl.max`` and ``tl.sum`` over a row would go
# through the cluster. But up to version 3.7 the compiler fails if a
# one-dimensional tensor is summed over a cluster. Since 3.9 such a sum
# compiles, and the thread blocks exchange what they have found through shared
# memory. We have not measured it.
#
# In Gluon, the lower-level language that comes with Triton, you say which
# thread has which part of a tensor, and there are barriers for clusters. But
# then you write what Triton's compiler does for us here: layouts, loads into
# shared memory ahead of time, and the exchange.
#
# Where PyTorch or a library is better
# ------------------------------------
#
# - **quack at some widths,** if rows begin at 16 bytes and have at most 262144
#   columns. On the H100 it is ahead forward, by 2% at 49152 columns and by 7%
#   at 262144, and backward, by 1% at 32768 columns and by 2% at 65536. Between
#   these two widths we have not measured the backward pass.
#   On the H200 it is ahead forward by 12%, 10% and 10% at 49152, 65536 and
#   262144.
# - `Liger <https://github.com/linkedin/Liger-Kernel>`_ has a softmax that is
#   not measured on this page. The figures of page 03 have it.
# - **torch.compile at 32768 columns, backward,** by 2% on the H100.
# - **Beside other kernels.** A cooperative launch waits until all its programs
#   have a place. `Programs that share a row
#   <../layer-norm/08-shared-rows.html>`_ measures how long that can take.
# - **On other GPUs.** On GPUs of AMD there are no shared rows, and what you
#   see here was measured on an H100 and an H200 only.
# - **PyTorch can do more.** It has second derivatives, and it does not compile
#   a kernel for each new width.
#
# Exercise 1: one number for a slice
# ----------------------------------
#
# The logarithm of a softmax needs only one number for each row: the logarithm
# of the sum of its exponentials. Slices could publish theirs, in half as many
# bits. Complete ``merge_logs``, which gets the logarithms ``a`` and ``b`` of
# two slices and returns that of both together. Elements of 100 and of
# :math:`-\infty` are allowed.
#
# **Hint 1.** In float32, ``exp(100)`` is infinite. For which numbers is
# ``exp`` never too large?
#
# **Hint 2.** Subtract the larger one from both, and add it to the result. What
# is :math:`-\infty - (-\infty)`?


def merge_logs(a, b):
    return (a.exp() + b.exp()).log()  # to do


def exercise_1(merge_logs):
    """Print what is found, and say whether it is right."""
    torch.manual_seed(0)
    x = torch.randn(4, 8)
    x[1] += 100
    x[2, :4] = float("-inf")
    x[3] = float("-inf")
    found = merge_logs(x[:, :4].logsumexp(1), x[:, 4:].logsumexp(1))
    exact = x.logsumexp(1)
    print("found:", found.tolist(), "exact:", exact.tolist())
    return torch.allclose(found, exact)


print("right:", exercise_1(merge_logs))

# %%

# Solution 1


def merge_logs_1(a, b):
    # No difference to a finite number is above 0, or NaN.
    m = torch.maximum(a, b).clamp(min=torch.finfo(a.dtype).min)
    return m + ((a - m).exp() + (b - m).exp()).log()


assert exercise_1(merge_logs_1)

# %%
# What we learned
# ---------------
#
# These are the designs of this page: what they have to move, and what they
# reach at 1048576 columns on the H100.
#
# - **Two sweeps** read ``x`` twice: three matrices. They reach 64% of the
#   copy.
# - **Shared rows** read it once, and reach 92%. Backward they read ``y`` and
#   ``dy`` once, and reach 90% where two sweeps reach 59%.
# - **PyTorch** reaches 48% forward and 42% backward.
#
# For kernels in general:
#
# - Count the bytes that are under way on an SM and on all of them. They tell
#   you which cache can serve a second read.
# - Where rows begin anywhere, load from the multiple of 16 bytes before them,
#   and pay for masks only where a row begins and ends.
# - A pair of maximum and sum can be cut anywhere: between tiles, threads,
#   programs or GPUs.
# - A loop that keeps numbers of 16 bits in registers from one turn to the next
#   needs half as many registers if it keeps them in pairs, as integers of 32
#   bits.
#
# **Next:** back to layer norm. What does it cost if ``dx`` has a kernel of its
# own, and ``dw`` and ``db`` have another one? `What a second pass costs
# <../layer-norm/09-two-passes.html>`_ measures it.
