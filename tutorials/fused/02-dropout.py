r"""
Dropout without a mask
======================

How does the backward pass know what dropout has dropped, if nobody wrote it
down?
It draws the same random bits again, from a generator that has no state.

A transformer may drop a share :math:`p` of what it adds to its residual
stream: :math:`s = \mathrm{dropout}(x) + residual`.
We draw the bits in the kernel that adds and normalizes, and draw them a second
time in its backward pass.

**What you will learn**

- What Philox is, and why its numbers need no memory.
- How to write a dropout whose mask never leaves the registers, in both passes.
- What random numbers cost in a kernel that waits for memory.
- What a seed promises, and what it does not: for several calls, several GPUs,
  checkpointing and CUDA graphs.

**What you need:** `Add, then normalize <01-add-layer-norm.html>`_ for the
residual stream and its two gradients, and `Chunks instead of padding
<../layer-norm/05-chunks.html>`_ for the backward kernel. You don't need a GPU.
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
# What does a mask cost?
# ----------------------
#
# PyTorch's dropout keeps a matrix of booleans, its *mask*. The forward pass
# writes it, and the backward pass reads it.
# We count in *units*: one unit is the bytes of a matrix of 16 bits. A boolean
# takes one byte, so the mask is half a unit.
#
# - Forward, dropout reads one unit and writes one and a half. The addition
#   moves 3, and the layer norm 2. That is 7.5 units in three kernels. A single
#   kernel reads ``x`` and the residual, and writes ``s`` and ``y``: 4 units.
# - Backward, the layer norm moves 3 units, the sum of two gradients 3, and
#   dropout reads one and a half and writes one: 8.5 units. A single kernel
#   reads ``dy``, ``ds`` and ``s``, and writes ``dresidual`` and ``dx``: 5.
#
# So most of the gain is that of fusion. But fusion alone would leave the mask:
# 4.5 units forward, and 5.5 backward. To get rid of it, the backward pass must
# find out by itself what was dropped.
#
# Random bits from a position
# ---------------------------
#
# How can one draw the same random number twice, and keep nothing?
#
# A usual generator has a state: each number changes it, and the next number
# follows from that. To get the thousandth number one must have drawn 999.
# `Philox <https://doi.org/10.1145/2063384.2063405>`_ has none. It is a
# function of a *key* and a *counter*, and mixes their bits so well that the
# result looks random. Our key is the seed, and our counter is the position in
# the matrix: whoever knows both gets the same numbers, in any order and on any
# thread.
#
# One call returns four words of 32 bits, so we let four neighboring columns, a
# *group*, share it. In the picture, each box is a group, and needs one call.
# Its counter is the row and the number of the group in that row.

# %%

# Drawing: the calls of a matrix, and the columns of each of them.

plt.figure("A call for four neighbors: its counter is row and group", (7.5, 2))
for row in range(2):
    for group in range(3):
        left = 4 * group
        box = plt.Rectangle((left, -row), 3.9, 0.8, fc=f"C{group}", alpha=0.3)
        plt.gca().add_patch(box)
        plt.text(
            left + 1.95, 0.4 - row, f"Philox(seed, {row}, {group})",
            ha="center", va="center",
        )  # fmt: skip
for column in range(12):
    plt.text(column + 0.5, 0.95, f"{column}", ha="center")
plt.xlim(-0.2, 12.2)
plt.ylim(-1.2, 1.4)
plt.axis("off")
plt.show()

# %%
# Here is one call in plain Python. The key is two words of 32 bits, the halves
# of a seed of 64 bits. The counter is four words: we use two of them, for the
# group and the row, and leave the other two at 0.
# Each of the ten rounds multiplies two words of the counter by constants. Each
# product has 64 bits: its upper half is mixed with another word and the key,
# and its lower half becomes a word as it is. The four constants are those of
# Philox's inventors.


def philox(seed, row, group):
    """Four words of 32 bits."""
    ones = 2**32 - 1
    key1 = seed & ones
    key2 = seed >> 32
    a = group
    b = row
    c = 0
    d = 0
    for _ in range(10):
        product1 = 0xD2511F53 * a
        product2 = 0xCD9E8D57 * c
        a = (product2 >> 32) ^ b ^ key1
        b = product2 & ones
        c = (product1 >> 32) ^ d ^ key2
        d = product1 & ones
        key1 = (key1 + 0x9E3779B9) & ones
        key2 = (key2 + 0xBB67AE85) & ones
    return a, b, c, d


words = philox(seed=7, row=0, group=0)
print("words:", *words)
print("words / 2**32:", *(f"{word / 2**32:.3f}" for word in words))

# %%
# Divided by :math:`2^{32}`, the four words of seed 7 at the first four columns
# of row 0 are 0.955, 0.750, 0.114 and 0.086. With :math:`p = 0.25` we drop
# what is below 0.25: the third and the fourth column. The other two are kept,
# and divided by :math:`1 - p`, so that the mean stays what it was, on average.
#
# In the kernel we do not divide: the word itself is compared with ``DROP``,
# which is ``round(p * 2**32)``. So ``p`` is rounded to a multiple of
# :math:`2^{-32}`. The ends, 0 and 1, are cases of their own: with 0 there is
# nothing to draw, and with 1 every element becomes 0, even if it was infinite.
# Triton has the ten rounds as ``tl.philox``.


@triton.jit
def _dropout(
    x,  # (rows, columns): chunk c of some rows
    seed,
    row,  # (rows, 1): which rows these are in the matrix
    c,  # which chunk of a row this is
    DROP: tl.constexpr,  # p * 2**32
    FOUR: tl.constexpr = True,  # whether four neighbors share a call
):
    """x, dropped or scaled. A gradient takes the same way back."""
    if DROP == 0:
        return x
    elif DROP == 2**32:
        return tl.zeros_like(x)
    else:
        SHARE: tl.constexpr = 4 if FOUR else 1
        GROUPS: tl.constexpr = x.shape[1] // SHARE
        # The counter: which group of the row, and which row. Both are made
        # tiles of (rows, groups).
        group = c * GROUPS + tl.arange(0, GROUPS)[None, :] + row * 0
        a, b, c, d = tl.philox(seed, group, row + group * 0, 0, 0)
        word = a
        if FOUR:
            # join makes pairs in a new last dimension. Twice makes (rows,
            # groups, 2, 2), and the last dimension comes from the outer join:
            # a and b first, then c and d. Then all columns are in order.
            word = tl.join(tl.join(a, c), tl.join(b, d))
            word = tl.reshape(word, x.shape)
        scale: tl.constexpr = 2**32 / (2**32 - DROP)  # 1 / (1 - p)
        return tl.where(word >= DROP, x * scale, 0)


# %%
# Note what is missing from this function: it has no pointer. The mask is made
# in registers and used there.
# It makes no difference which program or which thread asks, or how wide its
# tile is. Only the position counts. We need that later, since the backward
# pass cuts its rows in another way than the forward pass.
#
# Why is ``a`` joined with ``c`` first, and not with ``b``? A reshape goes
# through the last dimension first, and that is the one which the outer join
# made. So the outer join decides which words are neighbors in the row: it puts
# ``a``, from the first pair, beside ``b``, from the second, and then ``c``
# beside ``d``. A thread has all four words of a call, so nothing moves between
# threads.
#
# The first kernel does nothing but dropout. Its seed is marked
# ``do_not_specialize``: without that, Triton would compile another kernel for
# a seed of 1, and one more for seeds that are multiples of 16.


@triton.jit(do_not_specialize=["seed"])
def _dropout_only(
    x_ptr,  # (M, N), contiguous
    y_ptr,  # (M, N)
    seed,
    N: tl.constexpr,  # columns
    BLOCK: tl.constexpr,  # columns of a program
    DROP: tl.constexpr,  # p * 2**32
    FOUR: tl.constexpr,  # whether four neighbors share a call
):
    # A tile with one row, since _dropout takes rows and columns.
    row = tl.program_id(0) + tl.zeros((1, 1), tl.int32)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    at = row.to(tl.int64) * N + cols  # M * N may pass 2**31
    x = tl.load(x_ptr + at, mask=cols < N)
    y = _dropout(x.to(tl.float32), seed, row, tl.program_id(1), DROP, FOUR)
    tl.store(y_ptr + at, y, mask=cols < N)


def drop(x, p, seed, four=True):
    """Dropout of a contiguous matrix."""
    M, N = x.shape
    y = torch.empty_like(x)
    block = min(max(triton.next_power_of_2(N), 512), 4096)
    _dropout_only[(M, triton.cdiv(N, block))](
        x_ptr=x,
        y_ptr=y,
        seed=seed,
        N=N,
        BLOCK=block,
        DROP=round(p * 2**32),
        FOUR=four,
        num_warps=block // 512,  # 16 columns a thread
    )
    return y


ones = torch.ones(1, 4, device=DEVICE)
print("p = 0.25:", *(f"{y:.3f}" for y in drop(ones, 0.25, seed=7)[0].tolist()))

# %%
# What do random numbers cost?
# ----------------------------
#
# A call is ten rounds of two wide multiplications, which give 64 bits each. On
# a GPU each half of such a product takes a multiplication of its own. Does one
# see them beside the loads and stores? We compare dropout with a copy, once
# with a call for four columns and once with a call for each. PyTorch's dropout
# is the third, and also writes its mask. The clock and the ceiling are those
# of `Layer normalization, both passes <../layer-norm/01-layer-norm.html>`_,
# which explains them.

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

# Scaffold: dropout alone, a benchmark.


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=[1024, 2048, 4096, 8192, 16384],
        line_arg="provider",
        line_vals=["triton", "each", "torch", "copy"],
        line_names=["Four share", "Each", "PyTorch", "Copy"],
        ylabel="GB/s",
        plot_name="dropout-only",
        args={"M": 4096, "dtype": torch.float16, "mode": "forward"},
    )
)
def bench_dropout(M, N, dtype, mode, provider):
    """Device time: a CUDA graph of several calls, each with inputs of its own
    and after L2 was overwritten, less the graph without the calls; median, 20%
    and 80% quantiles. Copy: the best of six tiles. p is 0.1."""
    if not ON_GPU:
        return 3 * [float("nan")]  # the interpreter cannot be timed
    if provider == "copy":
        return ceiling(reads=1, writes=1, shape=(M, N), dtype=dtype)

    def prepare():
        x = torch.randn(M, N, device=DEVICE).to(dtype)
        if provider == "torch":
            return lambda: torch.native_dropout(x, 0.1, True)
        return lambda: drop(x, 0.1, seed=1, four=provider == "triton")

    bytes_moved = 2 * M * N * dtype.itemsize  # read x, write y
    return speed(bytes_moved, prepare)


# %%

report(bench_dropout)

# %%
# **What the figure shows.**
# On the H200, dropout reaches 87% to 97% of a copy if four columns share a
# call. With a call for each column it reaches 33% to 37%. PyTorch reaches 47%
# to 58%.
#
# **Why.**
# A call has 20 wide multiplications. With a call for each column, a column
# costs all 20. There the arithmetic is the limit, and the line hardly rises
# with the width, from 1166 to 1367 GB/s, while the copy rises from 3151 to
# 4130 GB/s.
# Shared by four, a column costs 5. At 16384 columns a call for each takes
# 196.3 µs, and a quarter of that is 49.1 µs. The copy takes 65.0 µs there, and
# our dropout 69.1 µs, so most of the arithmetic is hidden: programs that
# compute and programs that wait for memory share an SM. The lowest share, 87%,
# is that of 1024 columns, where dropout takes 0.8 µs more than the copy, which
# takes 5.3 µs.
# PyTorch moves 2.5 units where we move 2. That alone would leave it 80% of the
# copy. We have not looked into where the rest goes.
#
# **What follows.**
# Four neighbors share a call on the rest of this page.
#
# Forward, with the addition and the norm
# ---------------------------------------
#
# How does dropout get into the kernel that adds and normalizes?
#
# It takes one line. A program has a row in one tile, as in `Add, then
# normalize <01-add-layer-norm.html>`_, and what it has loaded of ``x`` goes
# through ``_dropout`` before the residual is added.


@triton.jit(do_not_specialize=["seed"])
def _dropout_add_layer_norm_fwd(
    x_ptr,  # (M, N), contiguous
    r_ptr,  # (M, N): the residual
    w_ptr,  # (N,); None counts as 1
    b_ptr,  # (N,); None counts as 0
    y_ptr,  # (M, N)
    s_ptr,  # (M, N): the sum, which goes on as the stream
    mean_ptr,  # (M,): saved for the backward pass
    rstd_ptr,  # (M,): 1 / standard deviation, saved as well
    seed,  # New
    eps: tl.constexpr,  # added to the variance
    N: tl.constexpr,  # columns
    BLOCK: tl.constexpr,  # lanes of the tile: a power of two
    DROP: tl.constexpr,  # New: p * 2**32
):
    acc: tl.constexpr = mean_ptr.dtype.element_ty  # float32, or float64
    row = tl.program_id(0) + tl.zeros((1, 1), tl.int32)
    cols = tl.arange(0, BLOCK)[None, :]
    mask = cols < N
    at = row.to(tl.int64) * N + cols  # M * N may pass 2**31
    x = tl.load(x_ptr + at, mask=mask, other=0)
    r = tl.load(r_ptr + at, mask=mask, other=0)

    # New: x is dropped. The whole row is chunk 0.
    s = _dropout(x.to(acc), seed, row, 0, DROP) + r.to(acc)
    # Rounded to the type of the stream first, so that y belongs to the s that
    # others read.
    s = s.to(r.dtype)
    tl.store(s_ptr + at, s, mask=mask)

    # The layer norm of s, as before.
    mean = tl.sum(s.to(acc), axis=1)[:, None] / N
    d = tl.where(mask, s.to(acc) - mean, 0)  # idle lanes: 0
    rstd = 1 / tl.sqrt(tl.sum(d * d, axis=1)[:, None] / N + eps)
    tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)
    y = (s.to(acc) - mean) * rstd
    # All programs read w and b, so caches keep them.
    if w_ptr is not None:
        w = tl.load(w_ptr + cols, mask=mask, eviction_policy="evict_last")
        y *= w.to(acc)
    if b_ptr is not None:
        b = tl.load(b_ptr + cols, mask=mask, eviction_policy="evict_last")
        y += b.to(acc)
    tl.store(y_ptr + at, y, mask=mask)


# %%
# The plan is that of `Add, then normalize <01-add-layer-norm.html>`_. A warp
# holds 2 KB of the tile, which is 32 columns of 16 bits a thread. Rows have up
# to 16 KB on this page, so a program has 1 to 8 warps. (The plan also has a
# limit of registers for programs of 16 warps. They belong to wider rows, which
# this page does not take.)

# The interpreter has no limit of registers.
CUDA = ON_GPU and torch.version.hip is None


def plan_forward(N, itemsize):
    """Lanes and warps of a program."""
    block = max(triton.next_power_of_2(N), 16)
    warps = min(max(block * itemsize // 2048, 1), 16)
    plan = {"BLOCK": block, "num_warps": warps}
    if CUDA and warps == 16:
        plan["maxnreg"] = 64
    return plan


def forward(x, r, w, b, eps, p, seed):
    """y, s, mean and rstd of contiguous matrices; w and b may be None."""
    M, N = x.shape
    y = torch.empty_like(x)
    s = torch.empty_like(r)
    # 16-bit rows are summed in float32.
    acc = torch.promote_types(r.dtype, torch.float32)
    mean = torch.empty(M, dtype=acc, device=x.device)
    rstd = torch.empty(M, dtype=acc, device=x.device)
    _dropout_add_layer_norm_fwd[(M,)](
        x_ptr=x,
        r_ptr=r,
        w_ptr=w,
        b_ptr=b,
        y_ptr=y,
        s_ptr=s,
        mean_ptr=mean,
        rstd_ptr=rstd,
        seed=seed,
        eps=eps,
        N=N,
        DROP=round(p * 2**32),
        **plan_forward(N, r.itemsize),
    )
    return y, s, mean, rstd


# %%
# Backward: the same bits again
# -----------------------------
#
# Where does the mask belong on the way back?
#
# Two gradients of ``s`` are added: the one that comes through the norm, and
# ``ds``, which comes back along the stream. Their sum is ``dresidual``. ``dx``
# is the same sum, times the mask, since ``x`` went through dropout and the
# residual did not:
#
# .. math:: dx = \mathrm{dropout}(dresidual)
#
# Dropout multiplies each element by 0 or by :math:`1 / (1 - p)`, so its
# gradient does the same. That is why one function serves both passes.

# %%

# Drawing: the way of the gradients.

plt.figure("The mask is on the way to dx, and not to dresidual", (7.5, 1))
way = "dy → norm → + → dresidual → × mask → dx\n            ↑\n            ds"
plt.text(0, 0, way, family="monospace", size=17)
plt.axis("off")
plt.show()

# %%
# The kernel is that of `Chunks instead of padding
# <../layer-norm/05-chunks.html>`_: a program goes over many rows, keeps the
# sums that become ``dw`` and ``db``, and holds its rows as tuples of chunks.
# The functions that it calls are folded here.

# %%

# Scaffold: rows in chunks, from page 05 of layer normalization.


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
# What is new stands in the second half of the loop, where each chunk gets its
# gradients. A chunk asks for the bits of its own rows and columns. It gets
# those that the forward pass had, although that pass held the whole row in one
# tile.
#
# ``ds`` is loaded there as well. It is not needed before both means of a row
# are known, and with ``num_stages`` it waits in shared memory until then.


@triton.jit(do_not_specialize=["seed"])
def _dropout_add_layer_norm_bwd(
    dy_ptr,  # (M, N), contiguous
    ds_ptr,  # (M, N): the gradient that comes along the stream, or None
    s_ptr,  # (M, N), from the forward pass
    w_ptr,  # (N,); None counts as 1
    mean_ptr,  # (M,), from the forward pass
    rstd_ptr,  # (M,), from the forward pass
    dr_ptr,  # (M, N): the gradient of the residual
    dx_ptr,  # (M, N), or None: without dropout it is that of the residual
    sums_ptr,  # (programs, 2, N): sums for dw, and for db
    seed,  # New: that of the forward pass
    M,  # rows
    N: tl.constexpr,  # columns
    ROWS: tl.constexpr,  # rows of a tile
    CHUNK: tl.constexpr,  # lanes of a chunk in each row
    STAGES: tl.constexpr,  # how far ahead rows are requested
    DROP: tl.constexpr,  # New: p * 2**32
):
    acc: tl.constexpr = mean_ptr.dtype.element_ty

    # w stays in registers for all rows, in its own type.
    ws = ()
    if w_ptr is not None:
        ws = _load_chunks(w_ptr, 0, ROWS, N, ROWS, CHUNK, "evict_last")

    # The sums for dw and db, of each lane.
    zeros = tl.zeros((ROWS, CHUNK), acc)
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
        # Keep w in its own type: in float32 it takes twice the registers.
        disable_licm=True,
    ):
        # Load ROWS rows of s and of dy, and what the forward pass saved.
        row = first + tl.arange(0, ROWS)[:, None]
        left = M - first
        mean = tl.load(mean_ptr + row, mask=row < M, other=0)
        rstd = tl.load(rstd_ptr + row, mask=row < M, other=0)
        start = tl.cast(first, tl.int64) * N  # M * N may pass 2**31
        xs = _load_chunks(s_ptr + start, N, left, N, ROWS, CHUNK, "")
        dys = _load_chunks(dy_ptr + start, N, left, N, ROWS, CHUNK, "")

        # Both means need the whole row, so all chunks come first.
        c1, c2 = _means_of_chunks(xs, dys, ws, mean, rstd, N)

        new_dws = ()
        new_dbs = ()
        for c in tl.static_range(len(xs)):
            w = None
            if w_ptr is not None:
                w = ws[c]
            g, dw, db = _gradients(xs[c], dys[c], w, mean, rstd, c1, c2)
            new_dws += (dws[c] + dw,)
            new_dbs += (dbs[c] + db,)
            # The gradient of the stream is added to that of the norm.
            i, j, mask = _chunk(c, left, N, ROWS, CHUNK)
            at = start + (i * N + j)
            if ds_ptr is not None:
                g += tl.load(ds_ptr + at, mask=mask, other=0).to(acc)
            tl.store(dr_ptr + at, g, mask=mask)
            # New: x gets what the forward pass did not drop.
            if dx_ptr is not None:
                dx = _dropout(g, seed, row, c, DROP)
                tl.store(dx_ptr + at, dx, mask=mask)
        dws = new_dws
        dbs = new_dbs

    _store_sums_of_chunks(sums_ptr, dws, dbs, N)


# %%
# A second kernel adds up the sums of all programs, as on the page `Who adds up
# the rows? <../layer-norm/02-summing-rows.html>`_.


@triton.jit
def _add_up(
    sums_ptr,  # (programs, WIDTH)
    grads_ptr,  # (WIDTH,): dw, then db
    programs,  # how many rows of sums there are
    WIDTH: tl.constexpr,  # 2 * N
    ROWS: tl.constexpr,  # a power of two, more than programs
    COLS: tl.constexpr,  # columns per program
):
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    rows = tl.arange(0, ROWS)[:, None]
    mask = (rows < programs) & (cols < WIDTH)
    sums = tl.load(sums_ptr + rows * WIDTH + cols, mask=mask, other=0)
    tl.store(grads_ptr + cols, tl.sum(sums, axis=0), mask=cols < WIDTH)


# %%
# How wide are chunks, and how many rows are requested ahead?
#
# - **Warps.** 4 for rows of up to 4 KB, and 8 for wider ones. At 8 KB the sums
#   for ``dw`` and ``db`` no longer fit into the registers of 4 warps.
# - **Programs of an SM.** Two for rows of up to 4 KB, and one for wider ones.
# - **Lanes of a chunk.** As many as the warps load with 16 bytes a thread.
# - **Rows.** Of rows of up to 2 KB a tile takes several, at most 8, so that
#   each thread has two loads of each matrix in flight.
# - **Stages.** As many tiles ahead as fit into shared memory. A tile needs
#   room for its part of three matrices here, ``dy``, ``s`` and ``ds``, and
#   each program keeps 8 KB free for its sums over rows. More than three tiles
#   ahead do not help, and for rows of more than 4 KB no more than two do.

GPU = torch.cuda.get_device_properties(DEVICE) if ON_GPU else None
NUM_SMS = GPU.multi_processor_count if ON_GPU else 4
SHARED = getattr(GPU, "shared_memory_per_block_optin", 65536)


def programs_of_an_sm(N, itemsize):
    if N * itemsize <= 4096:
        return 2
    return 1


def plan_backward(N, itemsize):
    """The plan of a row."""
    row = N * itemsize
    warps = 4
    most_ahead = 3
    if row > 4096:
        warps = 8
        most_ahead = 2
    chunk = min(512 // itemsize * warps, max(triton.next_power_of_2(N), 16))
    rows = 1
    if row <= 2048:
        rows = min(1024 // itemsize * warps // chunk, 8)
    # Three matrices of a tile, of which as many are ahead as fit.
    tile = 3 * rows * triton.cdiv(N, chunk) * chunk * itemsize
    room = SHARED // programs_of_an_sm(N, itemsize) - 8192
    return {
        "ROWS": rows,
        "CHUNK": chunk,
        "STAGES": 1 + min(room // tile, most_ahead),
        "num_warps": warps,
    }


def backward(dy, ds, s, w, mean, rstd, dr, dx, grads, p, seed):
    """Fill dr, grads, which are dw and db, and dx unless it is None."""
    M, N = s.shape
    itemsize = max(s.itemsize, dy.itemsize)
    plan = plan_backward(N, itemsize)
    programs = min(
        NUM_SMS * programs_of_an_sm(N, itemsize),
        triton.cdiv(M, plan["ROWS"]),
    )
    sums = torch.empty(programs, 2, N, dtype=mean.dtype, device=s.device)
    _dropout_add_layer_norm_bwd[(programs,)](
        dy_ptr=dy,
        ds_ptr=ds,
        s_ptr=s,
        w_ptr=w,
        mean_ptr=mean,
        rstd_ptr=rstd,
        dr_ptr=dr,
        dx_ptr=dx,
        sums_ptr=sums,
        seed=seed,
        M=M,
        N=N,
        DROP=round(p * 2**32),
        **plan,
    )
    columns_per_program = 16
    _add_up[(triton.cdiv(2 * N, columns_per_program),)](
        sums_ptr=sums,
        grads_ptr=grads,
        programs=programs,
        WIDTH=2 * N,
        ROWS=triton.next_power_of_2(programs + 1),
        COLS=columns_per_program,
    )


# %%
# A function to train with
# ------------------------
#
# What must autograd keep from one pass to the other?
#
# It keeps ``s``, ``w``, ``mean`` and ``rstd``, as it would without dropout,
# and two numbers: ``p`` and the seed. That is all that is left of the mask.

# %%

# Scaffold: layouts and types of a call, from page 05 of layer normalization.


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


class DropoutAddLayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, r, w, b, eps, p, seed):
        # A result that nobody used has None as its gradient, and not zeros.
        ctx.set_materialize_grads(False)
        x = contiguous_or_none(x)
        r = contiguous_or_none(r)
        w = contiguous_or_none(w)
        b = contiguous_or_none(b)
        y, s, mean, rstd = forward(x, r, w, b, eps, p, seed)
        ctx.save_for_backward(s, w, mean, rstd)
        ctx.p = p
        ctx.seed = seed  # this is the whole mask
        ctx.x_dtype = x.dtype
        ctx.grads_dtype = dtype_of_gradients(w, b, mean.dtype)
        return y, s

    @staticmethod
    @torch.autograd.function.once_differentiable  # no second derivatives
    def backward(ctx, dy, ds):
        s, w, mean, rstd = ctx.saved_tensors
        wants_dx, wants_dr, wants_dw, wants_db = ctx.needs_input_grad[:4]
        if dy is None:
            dy = torch.zeros_like(s)
        dr = torch.empty_like(s)
        dx = None
        if wants_dx and ctx.p > 0:
            dx = torch.empty_like(s, dtype=ctx.x_dtype)
        grads = s.new_empty(2, s.shape[1], dtype=ctx.grads_dtype)
        backward(
            contiguous_or_none(dy), contiguous_or_none(ds),
            s, w, mean, rstd, dr, dx, grads, ctx.p, ctx.seed,
        )  # fmt: skip

        if wants_dx and ctx.p == 0:
            dx = dr
        if not wants_dr:
            dr = None
        dw = None
        if wants_dw:
            dw = grads[0]
        db = None
        if wants_db:
            db = grads[1]
        # One gradient for each argument of forward; eps, p and seed have none.
        return dx, dr, dw, db, None, None, None


# %%

# Scaffold: which arguments are taken.


def check_arguments(x, residual, shape, weight, bias, p, eps):
    """Raise an error that names the wrong argument, and says why."""
    tensors = {"x": x, "residual": residual, "weight": weight, "bias": bias}
    for name in ("weight", "bias"):
        if tensors[name] is None:
            del tensors[name]

    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or tensor.itemsize == 1:
            raise TypeError(
                f"{name} is {tensor.dtype}: it must have floats of 16 bits or "
                "more"
            )
        if tensor.device != x.device or tensor.device.type != DEVICE.type:
            raise ValueError(
                f"{name} is on {tensor.device}: x, residual, weight and bias "
                f"must all be on {DEVICE}"
            )
    # Triton starts a kernel on the current GPU, wherever its tensors are.
    if x.is_cuda and x.device.index != torch.cuda.current_device():
        raise ValueError(f"x is on {x.device}: not the current one")

    if shape.numel() == 0 or len(shape) == 0:
        raise ValueError(
            f"x has the shape {tuple(x.shape)}, and normalized_shape is "
            f"{tuple(shape)}: it is empty"
        )
    for name, tensor in tensors.items():
        if name == "residual":
            continue
        last_dimensions = tensor.shape
        if name == "x":
            last_dimensions = tensor.shape[-len(shape) :]
        if last_dimensions != shape:
            raise ValueError(
                f"the shape of {name} is {tuple(tensor.shape)}, and "
                f"normalized_shape is {tuple(shape)}"
            )
    if residual.shape != x.shape:
        raise ValueError(
            f"the shape of residual is {tuple(residual.shape)}, and that of x "
            f"is {tuple(x.shape)}"
        )
    if torch.promote_types(x.dtype, residual.dtype) != residual.dtype:
        raise TypeError(
            f"residual is {residual.dtype}, and x is {x.dtype}: the stream "
            "must hold what is added to it"
        )
    if not 0 <= p <= 1:  # or NaN
        raise ValueError(f"p is {p}: it must be from 0 to 1")
    if not eps >= 0:  # negative, or NaN
        raise ValueError(f"eps is {eps}: it must be 0 or more")
    N = shape.numel()
    if N * residual.itemsize > 16384:
        raise ValueError(
            f"normalized_shape has {N} columns: this page takes up to 16 KB a "
            "row"
        )


# %%


def dropout_add_layer_norm(
    x, residual, normalized_shape, weight=None, bias=None, p=0.5,
    training=True, seed=None, eps=1e-5,
):  # fmt: skip
    """(y, s): s = dropout(x) + residual, and y is the layer norm of s.

    Without a seed, a call draws one from PyTorch's generator of the CPU.
    """
    if isinstance(normalized_shape, int):
        normalized_shape = [normalized_shape]
    shape = torch.Size(normalized_shape)
    check_arguments(x, residual, shape, weight, bias, p, eps)
    if not training:
        p = 0.0
    if seed is None:
        seed = 0
        if 0 < p < 1:  # else there is nothing to draw
            seed = int(torch.randint(2**62, ()))

    # The kernels only know matrices, so all other dimensions become rows.
    N = shape.numel()
    if weight is not None:
        weight = weight.reshape(N)
    if bias is not None:
        bias = bias.reshape(N)
    y, s = DropoutAddLayerNorm.apply(
        x.reshape(-1, N), residual.reshape(-1, N), weight, bias, eps, float(p),
        seed,
    )  # fmt: skip
    return y.reshape(x.shape), s.reshape(x.shape)


# %%
# Is it random?
# -------------
#
# We cannot prove it, but we can look for what would be wrong. Of many
# elements, a share of :math:`1 - p` must survive. Of all pairs of neighbors in
# a row, both must survive in a share of :math:`(1 - p)^2` of the pairs, and so
# must pairs in a column. If neighbors depended on each other, that share would
# be another.


def kept(M, N, p, seed):
    """1 where an element survives."""
    x = torch.ones(M, N, dtype=torch.float16, device=DEVICE)
    _, s = dropout_add_layer_norm(x, 0 * x, N, p=p, seed=seed)
    return (s != 0).double()


mask = kept(64, 1024, 0.25, seed=7)
for name, other, expected in (
    ("elements", 1, 0.75),
    ("neighbors in a row", mask.roll(1, 1), 0.75**2),
    ("neighbors in a column", mask.roll(1, 0), 0.75**2),
):
    share = (mask * other).mean().item()
    print(f"{name}: kept {share:.3f}, expected {expected:.3f}")
    # Five times what a mean of so many may be off by chance, or more.
    assert abs(share - expected) < 5 * mask.numel() ** -0.5

# %%
# Is it right?
# ------------
#
# We compare each element with PyTorch in float64. Its dropout would draw
# another mask, so we ask our function for ours: where ``x`` is 1 and the
# residual is 0, ``s`` shows what was kept. This is the forward pass's mask, so
# the check of ``dx`` also says that the backward pass has drawn the same one.

# %%

# Scaffold: inputs, with a residual.


def inputs(M, N, dtype):
    """x, residual, w and b, then dy and ds."""
    torch.manual_seed(0)
    x = 0.5 * torch.randn(M, N, device=DEVICE)
    residual = -2.3 + 0.5 * torch.randn(M, N, device=DEVICE)
    w = torch.rand(N, device=DEVICE)
    b = torch.rand(N, device=DEVICE)
    dy = 0.1 * torch.randn(M, N, device=DEVICE)
    ds = 0.1 * torch.randn(M, N, device=DEVICE)
    x = x.to(dtype).requires_grad_()
    residual = residual.to(dtype).requires_grad_()
    w = w.to(dtype).requires_grad_()
    b = b.to(dtype).requires_grad_()
    return x, residual, w, b, dy.to(dtype), ds.to(dtype)


# %%

# Scaffold: a check of each element, with our mask.


def in_float64(tensor):
    """The same numbers in float64, as a new input for autograd."""
    return tensor.detach().double().requires_grad_()


def check(M, N, dtype, p=0.25):
    """Compare each element of all results with PyTorch's in float64."""
    x, residual, w, b, dy, ds = inputs(M, N, dtype)
    y, s = dropout_add_layer_norm(x, residual, N, w, b, p, seed=7)
    dx, dresidual, dw, db = torch.autograd.grad(
        (y, s), (x, residual, w, b), (dy, ds)
    )
    ours = {"s": s, "y": y, "dx": dx, "dresidual": dresidual}
    ours |= {"dw": dw, "db": db}

    share = kept(M, N, p, seed=7) / (1 - p)
    # The rest must belong to the s that was returned, which is rounded.
    wide_s = in_float64(s)
    wide_w = in_float64(w)
    wide_b = in_float64(b)
    exact_y = F.layer_norm(wide_s, (N,), wide_w, wide_b)
    of_s, of_w, of_b = torch.autograd.grad(
        exact_y, (wide_s, wide_w, wide_b), dy.double()
    )
    exact = {"s": x.double() * share + residual.double(), "y": exact_y}
    exact["dresidual"] = of_s + ds.double()
    exact["dx"] = exact["dresidual"] * share
    exact |= {"dw": of_w, "db": of_b}

    for name in ours:
        error = (ours[name] - exact[name]).abs()
        rounding = exact[name].abs() * torch.finfo(dtype).eps / 2
        typical_size = exact[name].square().mean().sqrt()
        sums = 64 * torch.finfo(torch.float32).eps * typical_size
        worst = (error / (rounding + sums)).max().item()
        assert worst <= 1, f"{name}: {worst:.1f} times the allowed error"
    print(f"{M} x {N}, {dtype}: each element is right")


# %%

shape = (9, 200)  # small, because the interpreter is slow
if ON_GPU:
    shape = (1151, 4000)  # float32 takes up to 4096 columns
for dtype in (torch.float16, torch.float32):
    check(*shape, dtype)

# %%
# What does a seed promise?
# -------------------------
#
# One seed is one mask: what is dropped depends on the seed, the row and the
# column, and on nothing else. So the first rows of a larger batch have the
# mask of a smaller one, and another GPU draws the same bits, since all is
# computed with whole numbers.
# It also means that two layers with one seed drop the same elements.

x = torch.ones(4, 16, device=DEVICE)


def survivors(seed=None, rows=4):
    """1 where an element of some rows survives."""
    part = x[:rows]
    _, s = dropout_add_layer_norm(part, 0 * part, 16, seed=seed)
    return s != 0


print("one seed, the same:", torch.equal(survivors(1), survivors(1)))
print("another seed, the same:", torch.equal(survivors(1), survivors(2)))
fewer_rows = torch.equal(survivors(1, rows=2), survivors(1)[:2])
print("fewer rows, the same:", fewer_rows)

# Without a seed, each call draws one.
torch.manual_seed(3)
first = survivors()
second = survivors()
print("two calls, the same:", torch.equal(first, second))
torch.manual_seed(3)
print("a second run, the same:", torch.equal(first, survivors()))

# %%
# - **Several calls.** Leave out ``seed`` in a model. Then each call, and so
#   each layer and each step, draws a seed from PyTorch's CPU generator.
#   ``torch.manual_seed`` repeats a whole run. The masks are not those of
#   PyTorch's own dropout, which counts positions in another way.
# - **Several GPUs.** A *rank* is one of the processes that train together, and
#   each has a generator of its own. Where ranks have different batches, give
#   each another ``torch.manual_seed``, or all of them drop the same elements.
#   Where ranks hold copies of one row and must agree, give all the same seed.
#   Where they hold parts of a row, beware: each of them counts its columns
#   from 0, so with one seed all parts get the same mask.
# - **Checkpointing.** ``torch.utils.checkpoint`` computes the forward pass a
#   second time, and sets PyTorch's generators back before it does. So a call
#   without ``seed`` draws the same seed again, and the mask is the same. With
#   ``preserve_rng_state=False`` the mask would be another, and the gradients
#   would be wrong, without an error.
# - **CUDA graphs.** The seed is a number that the host passes to a kernel. A
#   graph records this number, so each replay drops the same elements: that is
#   fine for our clock, and wrong for training. PyTorch's dropout draws new
#   numbers in each replay. Ours would have to load its seed from memory, and
#   something would have to change it there before each replay.
#
# How fast is the forward pass?
# -----------------------------
#
# We compare with three functions of PyTorch, with the same three through
# ``torch.compile``, with our kernel without dropout (:math:`p = 0`), and with
# a kernel that only reads two matrices and writes two.

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

# Scaffold: both passes, benchmarks of dropout.


def our_chain(x, residual, w, b):
    """Our function, with the arguments of PyTorch's chain."""
    shape = (x.shape[1],)
    return dropout_add_layer_norm(x, residual, shape, w, b, p=0.1, seed=1)


def without_dropout(x, residual, w, b):
    """The same kernels, which draw nothing."""
    shape = (x.shape[1],)
    return dropout_add_layer_norm(x, residual, shape, w, b, p=0.0)


def pytorch_chain(x, residual, w, b):
    """Dropout, addition and layer norm of PyTorch."""
    s = residual + F.dropout(x, 0.1)
    return F.layer_norm(s, (x.shape[1],), w, b), s


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=[1024, 2048, 4096, 5120, 8192],
        line_arg="provider",
        line_vals=["triton", "no dropout", "torch", "torch.compile", "copy"],
        line_names=[
            "Triton", "No dropout", "PyTorch", "torch.compile", "Copy"
        ],
        ylabel="GB/s",
        plot_name="dropout-add-layer-norm-forward",
        args={"M": 4096, "dtype": torch.float16, "mode": "forward"},
    )
)  # fmt: skip
def bench_forward(M, N, dtype, mode, provider):
    """Device time: a CUDA graph of several calls, each with inputs of its own
    and after L2 was overwritten, less the graph without the calls; median, 20%
    and 80% quantiles. Copy: the best of six tiles. p is 0.1."""
    if not ON_GPU:
        return 3 * [float("nan")]

    def speed_of(function):
        def prepare():
            x, residual, w, b, _, _ = inputs(M, N, dtype)
            return lambda: function(x, residual, w, b)

        # Read x and the residual, write y and s.
        bytes_moved = 4 * M * N * dtype.itemsize
        return speed(bytes_moved, prepare)

    if provider == "triton":
        return speed_of(our_chain)
    if provider == "no dropout":
        return speed_of(without_dropout)
    if provider == "torch":
        return speed_of(pytorch_chain)
    if provider == "torch.compile":
        return best_of_three_compilations(pytorch_chain, speed_of)
    return ceiling(reads=2, writes=2, shape=(M, N), dtype=dtype)


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=[1024, 2048, 4096, 5120, 8192],
        line_arg="provider",
        line_vals=["triton", "torch", "torch.compile", "copy"],
        line_names=["Triton", "PyTorch", "torch.compile", "Copy"],
        ylabel="GB/s",
        plot_name="dropout-add-layer-norm-backward",
        args={"M": 4096, "dtype": torch.float16, "mode": "backward"},
    )
)
def bench_backward(M, N, dtype, mode, provider):
    """Device time: a CUDA graph of several calls, each with inputs of its own
    and after L2 was overwritten, less the graph without the calls; median, 20%
    and 80% quantiles. Copy: the best of six tiles. p is 0.1."""
    if not ON_GPU:
        return 3 * [float("nan")]

    def speed_of(function):
        """Of the backward pass alone: the forward pass runs once, before."""

        def prepare():
            x, residual, w, b, dy, ds = inputs(M, N, dtype)
            results = function(x, residual, w, b)

            def run():
                return torch.autograd.grad(
                    results, (x, residual, w, b), (dy, ds), retain_graph=True
                )

            return run

        # Read dy, ds and s, write dresidual and dx.
        bytes_moved = 5 * M * N * dtype.itemsize
        return speed(bytes_moved, prepare)

    if provider == "triton":
        return speed_of(our_chain)
    if provider == "torch":
        return speed_of(pytorch_chain)
    if provider == "torch.compile":
        return best_of_three_compilations(pytorch_chain, speed_of)
    return ceiling(reads=3, writes=2, shape=(M, N), dtype=dtype)


# %%

report(bench_forward)

# %%
# **What the figure shows.**
# On the H200 our kernel reaches 88% to 95% of the copy, and 94% to 97% of it
# without dropout. PyTorch reaches 33% to 40%, and torch.compile reaches 32% to
# 42%. Forward, ours is 2.3 to 2.7 times as fast as PyTorch.
# On the H100 our kernel reaches 93% to 99% of the copy, and 97% to 100% of it
# without dropout. PyTorch reaches 40% to 46%, and torch.compile reaches 44% to
# 56%.
#
# **Why.**
# PyTorch moves 7.5 units in three kernels, and we move 4, so 1.9 times as fast
# is what we have counted. The rest is that its dropout and its layer norm
# fall further behind a copy than ours: on the H200 the dropout alone reached
# 47% to 58% in the figure before, and `Layer normalization, both passes
# <../layer-norm/01-layer-norm.html>`_ has the layer norm. torch.compile fuses
# all of it, too, and writes a mask of booleans for the backward pass. Its
# ``tl.rand`` calls Philox for each element and uses one of the four words. The
# figure before shows what that costs: dropout alone, with a call for each
# column, took 53% to 65% of the time that torch.compile takes here at the same
# width. We have not looked into the rest, nor into why torch.compile reaches
# least at 5120 columns.
#
# **What follows.**
# What dropout costs in our kernel is the difference between its two lines. On
# the H200 it is 2% at 8192 columns, and 8% at 1024. On the H100 it is 1% and
# 5%.
#
# How fast is the backward pass?
# ------------------------------

# %%

report(bench_backward)

# %%
# **What the figure shows.**
# On the H200 our backward pass reaches 73% to 87% of the copy, PyTorch reaches
# 32% to 38%, and torch.compile reaches 38% to 46%.
# Backward, ours is 2.1 to 2.4 times as fast as PyTorch.
# On the H100 ours reaches 75% to 91% of the copy, PyTorch reaches 37% to 40%,
# and torch.compile reaches 42% to 54%.
#
# **Why.**
# PyTorch moves 8.5 units where we move 5, and its layer norm reads ``s`` and
# ``dy`` a second time for ``dw`` and ``db``, unless L2 still holds them. At
# the speed of a copy, 8.5 units would leave it 59%, so its kernels also fall
# behind a copy. torch.compile would have 91% if it moved the 5.5 units of a
# fused kernel with a mask that fast. We have not looked into what it does
# instead.
#
# On the H200 our own lowest share is 73%, at 1024 columns. In microseconds it
# is the other way round: there our pass takes 4.5 µs longer than a copy, and
# at 8192 columns 12.0 µs. Some of that is the second kernel, which starts when
# the first one has ended. We have not timed it alone. On the way from 1024 to
# 8192 columns our share falls once, from 83% at 2048 columns to 79% at 4096.
# There the plan goes from two programs of 4 warps on an SM to one of 8. We
# have not measured the other plan there.
#
# **What follows.**
# Neither of our passes keeps a mask, and both are faster than those of PyTorch
# and torch.compile, which keep one. This is an example of *recomputation*: a
# kernel that waits for memory may compute something twice instead of loading
# it. (We have not measured our own kernels with a mask.)
#
# Where PyTorch or a library is better
# ------------------------------------
#
# - **CUDA graphs.** PyTorch's dropout draws new masks at each replay, and ours
#   repeats its mask.
# - **Any width, and second derivatives.** Ours takes rows of up to 16 KB, and
#   has no second derivatives.
# - **The seed is drawn on the host.** That takes a little time of each call,
#   which PyTorch's dropout does not need.
# - **flash-attn has such a function.** The ``layer_norm_fn`` of `flash-attn
#   <https://github.com/Dao-AILab/flash-attention>`_, which `Add, then
#   normalize <01-add-layer-norm.html>`_ measures, also takes a probability of
#   dropout. We have not measured it with one.
#
# Exercise 1: a module
# --------------------
#
# Write a module that takes the place of dropout, addition and layer norm. In
# training it draws a new mask in each call, and in evaluation it drops
# nothing. The stub is wrong in two ways.
#
# **Hint 1.** What does ``model.eval()`` change in a module?
#
# **Hint 2.** It sets ``self.training`` to ``False``. There is also an argument
# of ``torch.nn.LayerNorm`` that the stub does not pass on. Which one is it?


class Norm(torch.nn.LayerNorm):
    def forward(self, x, residual):
        return dropout_add_layer_norm(
            x, residual, self.normalized_shape, self.weight, self.bias
        )  # to do


def exercise_1(module):
    """Print what a module does in training and in evaluation; is it right?"""
    x = torch.randn(4, 8, device=DEVICE)
    norm = module(8, eps=0.1, device=DEVICE)
    _, first = norm(x, x)
    _, second = norm(x, x)
    fresh = not torch.equal(first, second)
    y, s = norm.eval()(x, x)
    still = torch.equal(s, x + x)
    print("a new mask each time:", fresh, "- none in evaluation:", still)
    expected = F.layer_norm(x + x, (8,), eps=0.1)
    return fresh and still and torch.allclose(y, expected, atol=1e-5)


print("right:", exercise_1(Norm))

# %%

# Solution 1


class Norm1(torch.nn.LayerNorm):
    def forward(self, x, residual):
        return dropout_add_layer_norm(
            x,
            residual,
            self.normalized_shape,
            self.weight,
            self.bias,
            training=self.training,
            eps=self.eps,
        )


assert exercise_1(Norm1)

# %%
# What we learned
# ---------------
#
# These are the designs of this page, and the units that each moves:
#
# - **Three functions of PyTorch** move 7.5 units forward and 8.5 backward,
#   with a mask of half a unit among them.
# - **One kernel with a mask** would move 4.5 and 5.5.
# - **One kernel that draws twice** moves 4 and 5. A call of Philox for four
#   neighbors keeps the price of its numbers low.
#
# And for kernels in general:
#
# - A generator without a state turns a position into random bits. Two kernels
#   that cut a matrix in different ways still draw the same ones.
# - What is cheap to compute need not be stored.
# - A seed is part of what a function promises. Say where it comes from, and
#   what repeats it.
#
# **Next:** on this page a function, dropout, was applied inside a kernel.
# `A function as a constant <03-activation.html>`_ lets the user choose it.
