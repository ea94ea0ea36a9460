r"""
What a second pass costs
========================

What does it cost to pass over ``x`` and ``dy`` twice, in one kernel for ``dx``
and another for ``dw`` and ``db``?
Five matrices move, not three, and up to seven where a row is wider than a
tile; in return rows may have any width, and no program waits for another.

A single kernel reads ``x`` and ``dy`` once and writes ``dx``: three matrices
in all. With two kernels ``x`` and ``dy`` are read twice, which makes five.

Example 53 of AMD's `Composable Kernel
<https://github.com/ROCm/composable_kernel>`_, a library in C++, computes this
backward pass with two kernels.
On this page we take it apart. First we run the formula in its documentation
and find it wrong. Then we build its structure in Triton, kernel by kernel,
change three things about it, and measure what each of them brings and what
the second pass still costs then.
We have not run the example itself, which is made for AMD GPUs: all our numbers
are those of Triton kernels on an NVIDIA GPU.

**What you will learn**

- How to find an error in a gradient without knowing the right formula.
- How to read the structure of somebody else's kernel: which program has which
  tile, how often it is read, and how many programs there are.
- What two sweeps over a row cost, and what you gain if the second one begins
  at the end: of a row, and of a whole matrix.
- How to tell the price of a structure from the price of its tiles.
- When two kernels are the better choice all the same.

**What you need:** `Layer normalization, both passes <01-layer-norm.html>`_ for
the formulas, `Weight gradients: who adds up the rows? <02-summing-rows.html>`_
for sums by columns, and Little's law from `Loads in flight
<04-loads-in-flight.html>`_. You don't need a GPU.
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
# Find the error
# --------------
#
# Is this formula right?
#
# The `documentation of the example
# <https://github.com/ROCm/composable_kernel/tree/develop/example/53_layernorm2d_bwd>`_
# gives a formula for ``dx``. In the notation of our pages, and with :math:`N`
# for the number of columns, it says
#
# .. math::
#
#    dx = w \, r \, \Bigl(dy - \frac{1}{N} \,
#    \bigl(db + \hat{x} \, dw\bigr)\Bigr)
#
# Here :math:`r` is ``rstd``, and ``dw`` and ``db`` are the gradients of the
# weight and the bias.
# It looks much like ours. Before we compare the two, let's ask what any right
# gradient must do.
#
# Add the same number to a whole row of ``x``: the mean grows by that number,
# and ``y`` stays as it is. So the loss does not change when all elements of a
# row move together, and this means that each row of ``dx`` must sum to 0.
# Here are three rows of four columns:

x = torch.tensor([[1, 2, 3, 6], [2, 2, 4, 4], [5, 1, 1, 1]]).double()
w = torch.tensor([1, 2, 1, 2]).double()
dy = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 2, 3]]).double()


def documented(x, w, dy, dim=1):
    """dx by the documentation; mean and variance are taken over dim."""
    mean = x.mean(dim, keepdim=True)
    rstd = (x.var(dim, correction=0, keepdim=True) + 1e-5) ** -0.5
    x_hat = (x - mean) * rstd
    dw = (dy * x_hat).sum(dim=0)
    db = dy.sum(dim=0)
    return w * rstd * (dy - (db + x_hat * dw) / x.shape[dim])


def by_autograd(function, x, dy):
    """dx of function(x), by autograd."""
    x = x.clone().requires_grad_()
    (dx,) = torch.autograd.grad(function(x), x, dy)
    return dx


expected = by_autograd(lambda x: F.layer_norm(x, (4,), w), x, dy)
for name, dx in (("documented", documented(x, w, dy)), ("autograd", expected)):
    sums = dx.sum(dim=1).abs().numpy().round(2)
    print(f"{name}: rows of dx sum to {sums}")

# %%
# The rows of the documented ``dx`` do not sum to 0, so the formula is wrong.
#
# What is wrong about it? ``dw`` and ``db`` are sums over the *rows*: each has
# one number for a column. But a row of ``x`` has its own mean and its own
# variance, so what comes back through them must be sums over the *columns* of
# this row, one number for a row. In the right formula these are :math:`c_1`
# and :math:`c_2`, which contain ``w`` as well:
#
# .. math::
#
#    dx = r \, (w \, dy - \hat{x} \, c_1 - c_2), \qquad
#    c_1 = \frac{1}{N} \sum_j \hat{x}_j \, w_j \, dy_j, \qquad
#    c_2 = \frac{1}{N} \sum_j w_j \, dy_j
#
# There is an operation for which the documented formula would be right. Take
# the mean and the variance of each *column*, and divide by the number of rows:
# then it is the gradient of batch normalization. Let's try that, too, and see
# how far off the formula is for layer normalization at the size of the
# example, 1024 rows of 512 columns.


def relative_error(found, expected):
    return ((found - expected).norm() / expected.norm()).item()


expected_of_columns = by_autograd(
    lambda x: F.batch_norm(x, None, None, w, training=True), x, dy
)
error = relative_error(documented(x, w, dy, dim=0), expected_of_columns)
print(f"as batch normalization: error {error:.0e}")

torch.manual_seed(0)
large_x = torch.randn(1024, 512).double()
large_w = torch.rand(512).double()
large_dy = torch.randn(1024, 512).double()
large_dx = by_autograd(
    lambda x: F.layer_norm(x, (512,), large_w), large_x, large_dy
)
error = relative_error(documented(large_x, large_w, large_dy), large_dx)
print(f"as layer normalization, 1024 x 512: error {100 * error:.0f}%")

# %%
# An error of about a tenth is dangerous: a model may still train with it, only
# not as well as it could, and then nobody looks for a mistake.
#
# The *code* of the example is right. Its kernel for ``dx`` computes two sums
# of each row, and it does not even get ``dw`` and ``db``, which the formula in
# the documentation would need.
# But the test of the example would not have found the error. It fills the mean
# and ``rstd`` with random numbers, which have nothing to do with ``x``, and
# compares with a second implementation. If both had the same wrong formula,
# the test would pass. And with such statistics even the right formula gives
# rows that do not sum to 0, because the rows of ``x_hat`` do not.
#
# How is the example built?
# -------------------------
#
# It has two kernels, and neither needs a result of the other. We read their
# source and noted, for each, what a program has, how often it reads its rows,
# and where its sums go. The right column is what we are going to build. You
# need not understand every line of it now, because the rest of the page goes
# through them; come back to it at the end.

# %%

# Drawing: the structure of example 53 beside ours.

print(f"{'':21}{'example 53':28}here")
for topic, example, here in (
    ("dx: a program has", "256 threads", "8 warps; then 4 to 32"),
    ("  its tile", "8 rows x 128 columns", "the same; then whole rows"),
    ("  row fits the tile", "reads it once", "the same"),
    ("  row does not fit", "twice, there and back", "the same"),
    (
        "  sums of a row",
        "of x * w * dy and w * dy",
        "of x_hat * w * dy, w * dy",
    ),
    ("  then needs", "the cube of rstd", "rstd"),
    ("dw, db: a program", "256 threads", "8 warps; then 4"),
    ("  its tile", "32 rows x 32 columns", "the same; then 64 x 64"),
    ("  its rows", "all", "all; then a part of them"),
    ("  result", "plain stores, no atomics", "the same"),
    ("order", "dx, then dw and db", "the same; then turned around"),
    ("mean and rstd", "random numbers", "those of x"),
    ("runs with", "1024 x 512, float32", "any size, 16 to 64 bits"),
):
    print(f"{topic:21}{example:28}{here}")

# %%
# The words are ours: in the source a program is a *block*, ``w`` and ``b`` are
# gamma and beta, and ``rstd`` is the inverse standard deviation.
#
# Two lines of the table are about accuracy, not about speed. Exercise 1 asks
# how the sums of the example lead to :math:`c_1`, and shows which digits they
# cost. And the cube of ``rstd`` is more than float32 can hold if the numbers
# of a row are tiny and epsilon is 0. Our formula has no cube.
#
# Each kernel divides its work along the direction in which it does *not* sum.
# ``dx`` needs sums over the columns, so each program of the first kernel has
# whole rows. ``dw`` and ``db`` need sums over the rows, so each program of the
# second kernel has whole columns.
# No two programs write to the same place, and none waits for another.

# %%

# Drawing: who reads what in the two kernels.

figure = plt.figure(
    "In the kernel for dx a program has rows, and reads them in tiles, first "
    "from left to right and then back; in the kernel for dw and db a program "
    "has columns, and walks down",
    figsize=(7.5, 2.8),
)
arrow = {"arrowstyle": "->", "lw": 1.5}
for axes, title in zip(
    figure.subplots(1, 2),
    ("dx: rows, there and back", "dw, db: columns, down"),
    strict=True,
):
    rows = title.startswith("dx")
    for program in range(3):
        box = (0, 2 - program, 3, 1) if rows else (program, 0, 1, 3)
        left, bottom, width, height = box
        axes.add_patch(
            plt.Rectangle(
                (left, bottom), width, height, fc=f"C{program}", alpha=0.4
            )
        )
        middle = (left + width / 2, bottom + height / 2)
        if rows:
            for height, ends in ((0.7, (0.2, 2.8)), (0.3, (2.8, 0.2))):
                axes.annotate(
                    "",
                    xy=(ends[1], bottom + height),
                    xytext=(ends[0], bottom + height),
                    arrowprops=arrow,
                )
            axes.text(-0.15, middle[1], program, ha="right", va="center")
        else:
            axes.annotate(
                "", xy=(middle[0], 0.2), xytext=(middle[0], 2.8),
                arrowprops=arrow,
            )  # fmt: skip
            axes.text(middle[0], 3.1, program, ha="center", va="bottom")
    axes.set(title=title, xlim=(-0.5, 3.1), ylim=(-0.1, 3.5))
    axes.axis("off")
plt.show()

# %%
# The first kernel: dx
# --------------------
#
# How does a program get two sums of a row that is wider than its tile?
#
# It walks along the row twice, and each such walk is a *sweep*. The first
# sweep adds up what :math:`c_1` and :math:`c_2` need. Only then are they
# known, and the second sweep computes ``dx``.
#
# Say a row has four tiles. If both sweeps begin on the left, the tiles come in
# the order 0, 1, 2, 3, 0, 1, 2, 3. When the second sweep wants tile 0, three
# others have been read since. If a cache has room for two tiles, tile 0 is
# gone. So are all the others when they are needed again, and the cache is of
# no use at all.
# Now let the second sweep begin on the right: 0, 1, 2, 3, 3, 2, 1, 0. When it
# wants tiles 3 and 2, they have just been read, and the cache still has them.

for name, second_sweep in (("start", (0, 1, 2, 3)), ("end", (3, 2, 1, 0))):
    cache = []
    found = 0
    for tile in (0, 1, 2, 3, *second_sweep):
        if tile in cache:
            found += 1
            cache.remove(tile)
        cache = [*cache[-1:], tile]  # it has room for two
    print(f"second sweep from the {name}: {found} of 4 tiles in the cache")

# %%
# The second sweep of the example begins at the end, and so does that of our
# kernel. With ``FROM_END`` we can turn that off, to see what it brings. We
# will need ``LAST_FIRST`` only later. A program has ``ROWS`` rows, and its
# tile has ``COLS`` columns of them.


@triton.jit
def _layer_norm_bwd_dx(
    dy_ptr,  # (M, N), contiguous
    x_ptr,  # (M, N), contiguous
    w_ptr,  # (N,); None counts as 1
    mean_ptr,  # (M,), from the forward pass
    rstd_ptr,  # (M,), from the forward pass
    dx_ptr,  # (M, N)
    M,  # rows
    N: tl.constexpr,  # columns
    ROWS: tl.constexpr,  # rows of a tile
    COLS: tl.constexpr,  # columns of a tile
    FROM_END: tl.constexpr,  # whether the second sweep begins at the end
    LAST_FIRST: tl.constexpr,  # whether the first program has the last rows
):
    acc: tl.constexpr = mean_ptr.dtype.element_ty  # float32, as a rule

    # Our rows, in 64 bits, because M * N may pass 2**31. The last program may
    # have rows that do not exist. [:, None] turns a list of numbers, one for
    # each row, into a column, which fits beside a tile of rows and columns.
    program = tl.program_id(0)
    if LAST_FIRST:
        program = tl.num_programs(0) - 1 - program
    first = program.to(tl.int64) * ROWS
    rows = first + tl.arange(0, ROWS)
    mean = tl.load(mean_ptr + rows, mask=rows < M, other=0)[:, None]
    rstd = tl.load(rstd_ptr + rows, mask=rows < M, other=0)[:, None]
    exists = rows[:, None] < M
    # Within the tile rows are counted from 0, and 32 bits are enough.
    row = tl.arange(0, ROWS)[:, None]

    # First sweep: each element of the tile has two sums of its own, so no
    # thread needs a number of another one inside the loop.
    sum1 = tl.zeros((ROWS, COLS), acc)
    sum2 = tl.zeros((ROWS, COLS), acc)
    for start in range(0, N, COLS):
        col = start + tl.arange(0, COLS)[None, :]
        mask = exists & (col < N)
        at = first * N + (row * N + col)
        x = tl.load(x_ptr + at, mask=mask, other=0).to(acc)
        # dy is 0 where an element is masked, so it adds nothing.
        wdy = tl.load(dy_ptr + at, mask=mask, other=0).to(acc)
        if w_ptr is not None:
            wdy *= tl.load(w_ptr + col, mask=col < N, other=0).to(acc)
        sum1 += (x - mean) * rstd * wdy
        sum2 += wdy

    # The means of each row. Only here do threads wait for each other.
    c1 = tl.sum(sum1, axis=1, keep_dims=True) / N
    c2 = tl.sum(sum2, axis=1, keep_dims=True) / N

    # Second sweep: the same loads once more, and dx.
    LAST: tl.constexpr = (N - 1) // COLS * COLS  # where the last tile begins
    for done in range(0, N, COLS):
        start = done
        if FROM_END:
            start = LAST - done
        col = start + tl.arange(0, COLS)[None, :]
        mask = exists & (col < N)
        at = first * N + (row * N + col)
        x = tl.load(x_ptr + at, mask=mask, other=0).to(acc)
        wdy = tl.load(dy_ptr + at, mask=mask, other=0).to(acc)
        if w_ptr is not None:
            wdy *= tl.load(w_ptr + col, mask=col < N, other=0).to(acc)
        dx = (wdy - (x - mean) * rstd * c1 - c2) * rstd
        tl.store(dx_ptr + at, dx, mask=mask)


# %%
# What if the tile is as wide as the row? Then each loop runs once, and both
# load from the same addresses. The compiler sees that, loads once, and keeps
# the tile in registers. So the same kernel makes one sweep or two, depending
# on its tile.

# %%

# Scaffold: the launch of the kernel for dx.


def tile_of(rows, cols, warps):
    """A tile and its warps, as a launch wants them."""
    return {"ROWS": rows, "COLS": cols, "num_warps": warps}


def launch_dx(dy, x, w, mean, rstd, tile, from_end=True, last_first=False):
    """dx of contiguous (M, N) matrices; w may be None."""
    M, N = x.shape
    dx = torch.empty_like(x)
    _layer_norm_bwd_dx[(triton.cdiv(M, tile["ROWS"]),)](
        dy_ptr=dy,
        x_ptr=x,
        w_ptr=w,
        mean_ptr=mean,
        rstd_ptr=rstd,
        dx_ptr=dx,
        M=M,
        N=N,
        FROM_END=from_end,
        LAST_FIRST=last_first,
        **tile,
    )
    return dx


# %%
# Is it right? Here it computes ``dx`` of the three rows from above in tiles of
# two rows and two columns. So each row has two tiles, and the second program
# has one row that exists and one that does not.

mean = x.mean(dim=1)
rstd = (x.var(dim=1, correction=0) + 1e-5) ** -0.5
tensors = [t.float().to(DEVICE) for t in (dy, x, w, mean, rstd)]
dx = launch_dx(*tensors, tile=tile_of(2, 2, warps=1))
torch.testing.assert_close(dx.cpu(), expected.float())
print("3 x 4, dx in two sweeps: right")

# %%
# What do two sweeps cost?
# ------------------------
#
# Let's count. In one sweep the kernel moves three matrices: it reads ``x`` and
# ``dy`` and writes ``dx``. In two sweeps it reads both twice, which makes five
# matrices. If no cache helped, it could reach three fifths of a copy, or 60%.
#
# We measure this kernel alone, with three settings: with the tile of the
# example, with the same tile and a second sweep from the start, and with a
# tile that is a whole row.
# We measure time and the copy as in `Layer normalization, both passes
# <01-layer-norm.html>`_, which explains how. Here the copy reads two matrices
# and writes one.

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

# Scaffold: dx alone, a benchmark.

EXAMPLE_TILE = tile_of(8, 128, warps=8)


def whole_rows(N):
    """A tile that is as wide as a row, if it fits into registers."""
    cols = min(triton.next_power_of_2(N), 16384)
    # A program has 1024 lanes at least, so several rows if they are narrow.
    rows = max(1024 // cols, 1)
    # A thread has 32 lanes at most: it keeps x and w * dy of each of them.
    warps = max(cols // 1024, 4)
    if cols < N:
        # Wider rows are swept. The more warps a program has, the fewer rows
        # are in progress at a time, and the more of them L2 can hold.
        warps = 32
    return tile_of(rows, cols, warps)


def given(M, N, dtype):
    """dy, x, w, and the mean and rstd that a forward pass has saved."""
    torch.manual_seed(0)
    dy = torch.randn(M, N, device=DEVICE, dtype=dtype)
    x = torch.randn(M, N, device=DEVICE, dtype=dtype)
    w = torch.rand(N, device=DEVICE, dtype=dtype)
    _, mean, rstd = torch.native_layer_norm(x, (N,), w, w, 1e-5)
    return dy, x, w, mean.view(M), rstd.view(M)


def dx_by(provider, dy, x, w, mean, rstd):
    """dx alone, by one of the lines of the figure."""
    if provider == "torch":
        return torch.ops.aten.native_layer_norm_backward(
            dy, x, w.shape, mean, rstd, w, w, [True, False, False]
        )
    if provider == "triton":
        return launch_dx(dy, x, w, mean, rstd, whole_rows(x.shape[1]))
    from_end = provider == "tile"
    return launch_dx(dy, x, w, mean, rstd, EXAMPLE_TILE, from_end)


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=[1024, 2048, 4096, 8192, 16384],
        line_arg="provider",
        line_vals=["triton", "tile", "tile, from the start", "torch", "copy"],
        line_names=[
            "Whole rows",
            "8 × 128",
            "8 × 128, from the start",
            "PyTorch",
            "Copy",
        ],
        ylabel="GB/s",
        plot_name="layer-norm-two-dx",
        args={"M": 4096, "dtype": torch.float16, "mode": "dx"},
    )
)
def bench_dx(M, N, dtype, mode, provider):
    """Device time: a CUDA graph of several calls, each with inputs of its own
    and after L2 was overwritten, less the graph without the calls; median, 20%
    and 80% quantiles. Copy: the best of six tiles."""
    if not ON_GPU:
        return 3 * [float("nan")]  # the interpreter cannot be timed
    if provider == "copy":
        return ceiling(reads=2, writes=1, shape=(M, N), dtype=dtype)

    def prepare():
        tensors = given(M, N, dtype)
        return lambda: dx_by(provider, *tensors)

    return speed(3 * M * N * dtype.itemsize, prepare)  # read x, dy; write dx


# %%

report(bench_dx)

# %%
# **What the figure shows.**
# On the H100 whole rows reach 94% to 100% of the copy. With the tile of the
# example we fall from 84% at 1024 columns to 54% at 16384, and if the second
# sweep begins at the start, from 84% to 53%. PyTorch reaches 58% to 85%.
#
# On the H200 whole rows reach 87% to 98% of the copy. With the tile of the
# example we fall from 77% to 50%, and if the second sweep begins at the start,
# from 79% to 49%. PyTorch reaches 56% to 76%.
#
# **Why.**
# A program of the example has 8 rows, so 4096 rows make 512 programs. Their
# registers let six of them run on an SM, so on 132 SMs all of them run at
# once. Before the first one begins its second sweep, nearly all of ``x`` and
# ``dy`` has been read.
# The L2 cache of an H100 has 50 MB. If it held nothing else, how much of the
# two matrices could it hold?

print("columns  MB of x and dy  of which fit into 50 MB")
for N in (1024, 2048, 4096, 8192, 16384):
    megabytes = 2 * 4096 * N * 2 / 1e6
    print(f"{N:7}{megabytes:16.0f}{100 * min(50 / megabytes, 1):24.0f}%")

# %%
# At 1024 columns everything fits, ``dx`` included, and it does not matter
# where the second sweep begins. A second read from L2 is not free, though:
# whole rows are faster here, too.
#
# At 2048 columns the two matrices would fit if they were alone. But the second
# sweep also writes ``dx``, and what it writes takes room, too: a third of what
# then passes through L2 is ``dx``, which leaves at most 33 MB for ``x`` and
# ``dy``. So here it begins to matter, and a second sweep from the end is 1.1
# times as fast as one from the start.
#
# From 4096 columns on, a second sweep from the start finds nothing, as in our
# example of a cache for two tiles, and one from the end finds the part that
# still fits. This part has the same size however wide the rows are (we will
# count its bytes further down), so it saves about the same time: 6.0 µs at
# 4096 columns, 6.0 µs at 8192, and 6.5 µs at 16384. But the whole kernel takes
# longer the wider the rows are, 62, 124 and 247 µs from the end, and the gain
# falls from 1.10 times as fast to 1.03 times.
# On the H200 it saves 4.2, 4.2 and 4.4 µs at these three widths.
#
# A second sweep from the start does not even reach the 60% of five matrices.
# One reason is Little's law: 512 programs, each with 2 KB of ``x`` and 2 KB of
# ``dy``, make 15.5 KB in flight on an SM, and `Loads in flight
# <04-loads-in-flight.html>`_ found that it needs 32 KB.
#
# PyTorch's kernel sweeps twice as well, both times from the start. But each
# program has one row and 128 threads, of which an SM holds 2048. So no more
# than 16 rows are in progress on an SM, or 2112 on all of them. At 2048
# columns these rows of ``x`` and ``dy`` have 17 MB, which L2 holds, and
# PyTorch reaches 84% of the copy, where the tile of the example reaches 63%.
# At 4096 columns they have 35 MB, which is too much, at least beside ``dx``,
# and PyTorch reaches 66%. At 8192 columns they have 69 MB, and PyTorch reaches
# 59%, not far from the 60% of five matrices.
# On the H200 the three shares are 76%, 68% and 56%.
#
# **What follows.**
# A row that fits into registers should be read once. If it does not fit, let
# few rows be in progress at a time, and begin the second sweep at the end.
#
# The second kernel: dw and db
# ----------------------------
#
# How does a program add up columns? It walks down some of them, a tile of rows
# at a time. This is the kernel of `Weight gradients: who adds up the rows?
# <02-summing-rows.html>`_, which explains it; here it is folded.
#
# The example has one program for every 32 columns, and this program has all
# the rows. On that page we saw what is wrong with it: there are too few
# programs. Several programs can share the same columns if each has a *part* of
# the rows. Then a third, small kernel adds up the sums of the parts.

# %%

# Scaffold: the kernels for sums over rows, from page 02.


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
    acc: tl.constexpr = mean_ptr.dtype.element_ty  # float32, as a rule
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    part = tl.program_id(1)
    parts = tl.num_programs(1)
    # [:, None] makes a column of the row numbers, for a tile of ROWS x COLS.
    tile_rows = tl.arange(0, ROWS)[:, None]

    # Each element of the tile has a sum of its own.
    dw = tl.zeros([ROWS, COLS], acc)
    db = tl.zeros([ROWS, COLS], acc)
    for start in range(part * ROWS, M, parts * ROWS):
        rows = start + tile_rows
        mask = (rows < M) & (cols < N)
        # The first row is found in 64 bits, once for all elements of the tile;
        # within the tile 32 bits are enough.
        first = tl.cast(start, tl.int64) * N
        offsets = first + (tile_rows * N + cols)
        x = tl.load(x_ptr + offsets, mask=mask, other=0)
        dy = tl.load(dy_ptr + offsets, mask=mask, other=0)
        mean = tl.load(mean_ptr + rows, mask=rows < M, other=0)
        rstd = tl.load(rstd_ptr + rows, mask=rows < M, other=0)
        # dy is 0 where an element is masked, so it adds nothing.
        dw += dy.to(acc) * ((x.to(acc) - mean) * rstd)
        db += dy.to(acc)

    # Add up the rows of the tile, and store the sums of our part.
    sums_ptr += part * 2 * N + cols
    tl.store(sums_ptr, tl.sum(dw, 0), mask=cols < N)
    tl.store(sums_ptr + N, tl.sum(db, 0), mask=cols < N)


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
        total += tl.load(sums_ptr + rows * WIDTH + cols, mask=mask, other=0)

    # Add up the rows of the tile. Only this store rounds to the type of grads.
    tl.store(grads_ptr + cols, tl.sum(total, axis=0), mask=cols < WIDTH)


# %%

# Scaffold: the launches of the sums.


def add_up(sums, dtype):
    """dw and db, as a (2, N) tensor, from (parts, 2, N) sums."""
    parts, _, N = sums.shape
    grads = torch.empty(2, N, dtype=dtype, device=sums.device)
    # A few rows of sums are not worth a large tile.
    rows = 64
    warps = 4
    if parts > 64:
        rows = 256
        warps = 8
    _layer_norm_bwd_add_up[(triton.cdiv(2 * N, 16),)](
        sums_ptr=sums,
        grads_ptr=grads,
        programs=parts,
        WIDTH=2 * N,
        ROWS=rows,
        COLS=16,
        num_warps=warps,
    )
    return grads


def launch_sums(dy, x, mean, rstd, tile, parts, dtype):
    """dw and db, as a (2, N) tensor of this type."""
    M, N = x.shape
    # Only the last kernel rounds: parts have the type of mean.
    sums_dtype = dtype
    if parts > 1:
        sums_dtype = mean.dtype
    sums = torch.empty(parts, 2, N, dtype=sums_dtype, device=x.device)
    _layer_norm_bwd_columns[(triton.cdiv(N, tile["COLS"]), parts)](
        dy_ptr=dy,
        x_ptr=x,
        mean_ptr=mean,
        rstd_ptr=rstd,
        sums_ptr=sums,
        M=M,
        N=N,
        **tile,
    )
    if parts == 1:
        return sums[0]
    return add_up(sums, dtype)


# %%
# The example, and three changes
# ------------------------------
#
# How much of the time is the price of having two kernels, and how much is the
# price of their tiles?
#
# To tell them apart, we keep the two kernels and change their *plan*: the tile
# of each, and the number of parts. There are three plans, and a third change
# follows that needs no new plan.
#
# - **Example 53's tiling** has the tiles of the example, and no parts. These
#   are our kernels in Triton with its numbers, and not the example itself.
# - **Rows split** is the first change. The kernel for the sums gets 4 warps in
#   place of 8, and it gets parts: as many as it takes for the programs of an
#   SM to have 256 columns together, eight programs of 32 columns for instance.
# - **Larger tiles** is the second change. The tile of the sums is 64 × 64, and
#   that of ``dx`` is a whole row.

GPU = torch.cuda.get_device_properties(DEVICE) if ON_GPU else None
NUM_SMS = GPU.multi_processor_count if ON_GPU else 132  # of an H100
SHARED = GPU.shared_memory_per_block_optin if ON_GPU else 232_448


def count_parts(M, N, rows):
    """So many that an SM has 256 columns, but each has a tile of rows."""
    parts = max(256 * NUM_SMS // N, 1)
    return min(parts, triton.cdiv(M, rows))


def example_53(M, N):
    """The tiles of the example; a program of the sums has all rows."""
    return EXAMPLE_TILE, tile_of(32, 32, warps=8), 1


def rows_split(M, N):
    """First change: several programs share the columns of the sums."""
    return EXAMPLE_TILE, tile_of(32, 32, warps=4), count_parts(M, N, 32)


def larger_tiles(M, N):
    """Second change: whole rows for dx, and larger tiles for the sums."""
    return whole_rows(N), tile_of(64, 64, warps=4), count_parts(M, N, 64)


PLANS = {
    "example 53's tiling": example_53,
    "rows split": rows_split,
    "larger tiles": larger_tiles,
}

# %%
# What do these plans mean for the kernel of the sums? An SM must have bytes in
# flight all the time. If all programs run at once, and each has requested a
# tile of ``x`` and one of ``dy``, an SM has this much on average, in 16 bits:

print("columns  plan                 programs  KB in flight on an SM")
for N in (512, 4096, 8192):
    for name, plan in PLANS.items():
        _, tile, parts = plan(4096, N)
        programs = triton.cdiv(N, tile["COLS"]) * parts
        in_flight = programs * 2 * tile["ROWS"] * tile["COLS"] * 2 / NUM_SMS
        print(f"{N:7}  {name:19}{programs:10}{in_flight / 1024:12.1f}")

# %%
# `Loads in flight <04-loads-in-flight.html>`_ found that an SM needs 32 KB.
# The tiling of the example has an eighth of that at 4096 columns, and at its
# own 512 columns only 16 of 132 SMs have a program at all.
# The wider the rows, the more programs this tiling has, so splitting the rows
# should bring less and less. We will see whether it does.
#
# Now the function that runs a plan. As in the example, ``dx`` comes first.


def two_kernels(
    plan, dy, x, w, mean, rstd, dtype, wants_dx=True, wants_sums=True
):
    """dx, and dw and db as a (2, N) tensor; what is not wanted is None."""
    M, N = x.shape
    dx_tile, sums_tile, parts = plan(max(M, 1), N)
    dx = None
    if wants_dx:
        dx = launch_dx(dy, x, w, mean, rstd, dx_tile)
    grads = None
    if wants_sums:
        grads = launch_sums(dy, x, mean, rstd, sums_tile, parts, dtype)
    return dx, grads


# %%
# **The third change** is the idea of the second sweep once more, this time for
# whole kernels.
# So far both kernels begin with the first rows. When the first kernel ends, L2
# holds the last rows, and the second kernel begins with rows that are gone.
# So let the second kernel begin with the last rows. Programs start more or
# less in the order of their numbers, so it is enough to count them from the
# end. That is what ``LAST_FIRST`` does.

# %%

# Drawing: which rows two kernels read over time.

figure = plt.figure(
    "Rows over time. Both kernels from the first row to the last: the second "
    "one begins far from where the first one has ended. There and back: it "
    "begins where the first one has ended",
    figsize=(7.5, 2.4),
)
for axes, title, second in zip(
    figure.subplots(1, 2, sharey=True),
    ("both from the first row", "there and back"),
    ((0, 1), (1, 0)),
    strict=True,
):
    axes.plot((0, 1), (0, 1), color="C0", lw=2)
    axes.plot((1.04, 2.04), second, color="C1", lw=2)
    # What L2 holds when the first kernel ends.
    axes.fill_between((0.6, 1.44), 0.6, 1, color="gray", alpha=0.25, lw=0)
    axes.text(0.3, 0.5, "first", color="C0", ha="right", va="center")
    axes.text(1.72, 0.48, "second", color="C1", ha="left", va="center")
    axes.text(1.02, 0.52, "in L2", color="gray", ha="center", va="top")
    axes.set(title=title, xlabel="time", ylim=(1.05, -0.05))
    axes.set_xticks([])
    axes.set_yticks([0, 1], ["first row", "last row"])
    axes.grid(visible=False)
plt.show()

# %%
# Which kernel should come first? The kernel for ``dx`` writes a whole matrix,
# which takes room in L2, though nobody reads it again here. The kernel for the
# sums writes next to nothing. So the sums come first, and then the kernel for
# ``dx`` goes back from the end. This is our function, and its line is called
# "Triton".


def there_and_back(
    dy, x, w, mean, rstd, dtype, wants_dx=True, wants_sums=True
):
    """The same, but the sums come first, and dx begins with the last rows."""
    M, N = x.shape
    dx_tile, sums_tile, parts = larger_tiles(max(M, 1), N)
    grads = None
    if wants_sums:
        grads = launch_sums(dy, x, mean, rstd, sums_tile, parts, dtype)
    dx = None
    if wants_dx:
        dx = launch_dx(dy, x, w, mean, rstd, dx_tile, last_first=True)
    return dx, grads


# %%
# The rival
# ---------
#
# What do we compare two kernels with? Our rival is one kernel that reads each
# row once, and computes ``dx`` and the terms of ``dw`` and ``db`` from it. It
# is the kernel of `Loads in flight <04-loads-in-flight.html>`_, with the plan
# of that page. It keeps both sums of all columns in registers, so it cannot
# take more than 16384 columns.

# %%

# Scaffold: the rival, one kernel that reads each row once.


@triton.jit
def _layer_norm_bwd_one(
    dy_ptr,  # (M, N), contiguous
    x_ptr,  # (M, N), contiguous
    w_ptr,  # (N,); None counts as 1
    mean_ptr,  # (M,), from the forward pass
    rstd_ptr,  # (M,), from the forward pass
    dx_ptr,  # (M, N)
    sums_ptr,  # (programs, 2, N): the sums of each program, for dw and db
    M,  # rows
    N: tl.constexpr,  # columns
    BLOCK: tl.constexpr,  # tile width: a power of two, at least N
    STAGES: tl.constexpr,  # how far ahead rows are requested
):
    cols = tl.arange(0, BLOCK)
    mask = cols < N
    acc: tl.constexpr = mean_ptr.dtype.element_ty

    # The sums over our rows stay in registers from the first row to the last.
    dw = tl.zeros((BLOCK,), acc)
    db = tl.zeros((BLOCK,), acc)
    first = tl.program_id(0)
    for i in tl.range(first, M, tl.num_programs(0), num_stages=STAGES):
        # Request a row of x and one of dy.
        at = tl.cast(i, tl.int64) * N + cols  # M * N may pass 2**31
        x = tl.load(x_ptr + at, mask=mask, other=0).to(acc)
        dy = tl.load(dy_ptr + at, mask=mask, other=0).to(acc)

        # This row's terms of dw and db.
        rstd = tl.load(rstd_ptr + i)
        x_hat = (x - tl.load(mean_ptr + i)) * rstd
        dw += dy * x_hat
        db += dy

        # The formula for dx.
        if w_ptr is not None:
            dy *= tl.load(w_ptr + cols, mask=mask, other=0).to(acc)
        c1 = tl.sum(x_hat * dy) / N
        c2 = tl.sum(dy) / N
        tl.store(dx_ptr + at, (dy - x_hat * c1 - c2) * rstd, mask=mask)

    # Store both sums in the buffer of this program: dw first, then db.
    sums_ptr += first * 2 * N + cols
    tl.store(sums_ptr, dw, mask=mask)
    tl.store(sums_ptr + N, db, mask=mask)


def plan_one_kernel(N, itemsize):
    """Programs on each SM, warps of a program, and stages."""
    block = triton.next_power_of_2(N)
    per_sm = min(max(4096 // block, 1), 3)
    warps = max(block // 1024, 4)
    if block > 8192:
        return per_sm, warps, 1  # no registers are left for loads ahead
    # A slot of shared memory holds a row of x, one of dy, and w.
    room = SHARED // per_sm - 2048
    slots = min(room // (3 * block * itemsize), 4)
    return per_sm, warps, 1 + slots


def one_kernel(dy, x, w, mean, rstd, dtype, wants_dx=True, wants_sums=True):
    """dx, and dw and db as a (2, N) tensor: both, whatever is wanted."""
    M, N = x.shape
    itemsize = x.itemsize
    if w is not None:
        itemsize = max(itemsize, w.itemsize)
    per_sm, warps, stages = plan_one_kernel(N, itemsize)
    programs = min(M, per_sm * NUM_SMS)
    dx = torch.empty_like(x)
    sums = torch.empty(programs, 2, N, dtype=mean.dtype, device=x.device)
    _layer_norm_bwd_one[(programs,)](
        dy_ptr=dy,
        x_ptr=x,
        w_ptr=w,
        mean_ptr=mean,
        rstd_ptr=rstd,
        dx_ptr=dx,
        sums_ptr=sums,
        M=M,
        N=N,
        BLOCK=triton.next_power_of_2(N),
        STAGES=stages,
        num_warps=warps,
    )
    return dx, add_up(sums, dtype)


# %%
# Here is what each design moves, counted in matrices and in rows of sums. One
# row of sums, ``dw`` and ``db`` in float32, takes 8 bytes a column, and it is
# written once and read once. The last column is the best that a design could
# reach if all of that came from DRAM or went there.

M = 4096
N = 4096
print(f"{M} x {N} in 16 bits      matrices  rows of sums  of a copy")
for name, matrices, rows_of_sums in (
    ("example 53's tiling", 7, 0),
    ("rows split", 7, rows_split(M, N)[2]),
    ("larger tiles", 5, larger_tiles(M, N)[2]),
    ("one kernel", 3, plan_one_kernel(N, 2)[0] * NUM_SMS),
):
    bytes_of_column = 2 * M * matrices + 2 * 8 * rows_of_sums
    best = 3 * 2 * M / bytes_of_column
    print(f"{name:23}{matrices:11}{rows_of_sums:14}{100 * best:10.0f}%")

# %%
# A function to train with
# ------------------------
#
# The forward pass is that of `Layer normalization, both passes
# <01-layer-norm.html>`_, which also measures it. Up to 16384 columns a row
# stays in registers, and wider rows take three sweeps.

# %%

# Scaffold: the forward pass, from page 01.


@triton.jit
def _layer_norm_fwd(
    x_ptr,  # (M, N), contiguous
    w_ptr,  # (N,); None counts as 1
    b_ptr,  # (N,); None counts as 0
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

    # Load the row once.
    # Neighboring threads read neighboring addresses. Such loads are called
    # coalesced: the hardware serves them together, in a few wide requests.
    # We compute in the type of mean: float32, or float64 if x is float64.
    acc_dtype = mean_ptr.dtype.element_ty
    x = tl.load(x_ptr + row * N + cols, mask=mask, other=0).to(acc_dtype)

    # Masked elements are 0 and add nothing to the sum.
    mean = tl.sum(x) / N

    # Subtract the mean before squaring. The shorter formula, the mean of the
    # squares minus the square of the mean, loses digits if the mean is large.
    # A masked element would now be -mean, so set it back to 0.
    x_centered = tl.where(mask, x - mean, 0)
    variance = tl.sum(x_centered * x_centered) / N
    rstd = 1 / tl.sqrt(variance + eps)

    # Save two numbers per row. With them, the backward pass gets x_hat back
    # from x.
    tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)

    # Scale and shift. If w_ptr is None, its lines are not even compiled.
    # Masked elements of w and b may hold anything, for they are never stored.
    y = x_centered * rstd
    if w_ptr is not None:
        w = tl.load(w_ptr + cols, mask=mask).to(acc_dtype)
        y = y * w
    if b_ptr is not None:
        b = tl.load(b_ptr + cols, mask=mask).to(acc_dtype)
        y = y + b

    # Store the row once. This rounds it to the type of y.
    tl.store(y_ptr + row * N + cols, y, mask=mask)


def warps_for(tile_bytes):
    """One warp for every 4 KB of a tile, but at least 4 and at most 16."""
    warps = tile_bytes // 4096
    return min(max(warps, 4), 16)


def forward_in_registers(x, w, b, eps):
    """y, mean and rstd of a contiguous (M, N) x; w and b may be None."""
    M, N = x.shape
    y = torch.empty_like(x)
    # 16-bit rows are summed in float32.
    acc_dtype = torch.promote_types(x.dtype, torch.float32)
    mean = torch.empty(M, dtype=acc_dtype, device=x.device)
    rstd = torch.empty(M, dtype=acc_dtype, device=x.device)
    block_size = triton.next_power_of_2(N)
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
        num_warps=warps_for(block_size * x.element_size()),
    )
    return y, mean, rstd


@triton.jit
def _layer_norm_fwd_streaming(
    x_ptr,  # (M, N), contiguous
    w_ptr,  # (N,); None counts as 1
    b_ptr,  # (N,); None counts as 0
    y_ptr,  # (M, N)
    mean_ptr,  # (M,): saved for the backward pass
    rstd_ptr,  # (M,): 1 / standard deviation, saved as well
    eps: tl.constexpr,
    N: tl.constexpr,  # columns
    BLOCK_SIZE: tl.constexpr,  # tile width: any power of two
):
    # Move the pointers to the start of our row.
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * N
    y_ptr += row * N
    acc_dtype = mean_ptr.dtype.element_ty

    # Sweep 1: the mean.
    total = tl.zeros((BLOCK_SIZE,), acc_dtype)
    for start in range(0, N, BLOCK_SIZE):
        cols = start + tl.arange(0, BLOCK_SIZE)
        x = tl.load(x_ptr + cols, mask=cols < N, other=0).to(acc_dtype)
        total += x
    mean = tl.sum(total) / N

    # Sweep 2: the variance. Only the last tile has masked elements.
    total = tl.zeros((BLOCK_SIZE,), acc_dtype)
    for start in range(0, N, BLOCK_SIZE):
        cols = start + tl.arange(0, BLOCK_SIZE)
        x = tl.load(x_ptr + cols, mask=cols < N, other=0).to(acc_dtype)
        x_centered = tl.where(cols < N, x - mean, 0)
        total += x_centered * x_centered
    rstd = 1 / tl.sqrt(tl.sum(total) / N + eps)

    tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)

    # Sweep 3: the result.
    for start in range(0, N, BLOCK_SIZE):
        cols = start + tl.arange(0, BLOCK_SIZE)
        x = tl.load(x_ptr + cols, mask=cols < N, other=0).to(acc_dtype)
        y = (x - mean) * rstd
        if w_ptr is not None:
            w = tl.load(w_ptr + cols, mask=cols < N).to(acc_dtype)
            y = y * w
        if b_ptr is not None:
            b = tl.load(b_ptr + cols, mask=cols < N).to(acc_dtype)
            y = y + b
        tl.store(y_ptr + cols, y, mask=cols < N)


def forward_in_sweeps(x, w, b, eps):
    """The same as forward_in_registers, for rows of any width."""
    M, N = x.shape
    y = torch.empty_like(x)
    acc_dtype = torch.promote_types(x.dtype, torch.float32)
    mean = torch.empty(M, dtype=acc_dtype, device=x.device)
    rstd = torch.empty(M, dtype=acc_dtype, device=x.device)
    if N <= 4096:
        num_warps = 4
    elif N < 8192:
        num_warps = 8
    else:
        num_warps = 16
    _layer_norm_fwd_streaming[(M,)](
        x_ptr=x,
        w_ptr=w,
        b_ptr=b,
        y_ptr=y,
        mean_ptr=mean,
        rstd_ptr=rstd,
        eps=eps,
        N=N,
        BLOCK_SIZE=min(triton.next_power_of_2(N), 4096),
        num_warps=num_warps,
    )
    return y, mean, rstd


# %%

# Scaffold: layouts and types of a call, as layer norm wants them.

MAX_COLUMNS = 16384  # wider rows do not fit into registers


def contiguous_or_none(tensor):
    """The tensor with its elements side by side; copied only if needed."""
    if tensor is None:
        return None
    return tensor.contiguous()


def dtype_of_weight_gradients(w, b, acc_dtype):
    """The type of w and b, if they agree; acc_dtype, if they do not.

    Autograd then rounds each gradient to the type of its parameter.
    """
    dtypes = {tensor.dtype for tensor in (w, b) if tensor is not None}
    if len(dtypes) == 1:
        return dtypes.pop()
    return acc_dtype


# %%
# A design is a function that gets the tensors of a backward pass. Where only
# ``dx`` is wanted, or only ``dw`` and ``db``, one of our two kernels is left
# out.


def by_plan(plan):
    """The backward pass in two kernels, with this plan."""

    def design(*tensors, **wants):
        return two_kernels(plan, *tensors, **wants)

    return design


DESIGNS = {
    "triton": there_and_back,
    "larger tiles": by_plan(larger_tiles),
    "rows split": by_plan(rows_split),
    "example 53's tiling": by_plan(example_53),
    "one kernel": one_kernel,
}

# %%


class LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, b, eps, design):
        x = contiguous_or_none(x)
        w = contiguous_or_none(w)
        b = contiguous_or_none(b)
        if x.shape[1] <= MAX_COLUMNS:
            y, mean, rstd = forward_in_registers(x, w, b, eps)
        else:
            y, mean, rstd = forward_in_sweeps(x, w, b, eps)
        ctx.save_for_backward(x, w, mean, rstd)
        ctx.grads_dtype = dtype_of_weight_gradients(w, b, mean.dtype)
        ctx.design = design
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable  # no second derivatives
    def backward(ctx, dy):
        wants_dx, wants_dw, wants_db, _, _ = ctx.needs_input_grad
        dx, grads = ctx.design(
            dy.contiguous(),
            *ctx.saved_tensors,
            ctx.grads_dtype,
            wants_dx=wants_dx,
            wants_sums=wants_dw or wants_db,
        )
        dw = None
        if wants_dw:
            dw = grads[0]
        db = None
        if wants_db:
            db = grads[1]
        # One gradient for each argument of forward; eps and design have none.
        return dx, dw, db, None, None


# %%

# Scaffold: which arguments are taken.


def check_arguments(x, shape, weight, bias, eps, most):
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
    if shape.numel() > most:
        raise ValueError(
            f"normalized_shape has {shape.numel()} columns: 1 to {most} are "
            "taken"
        )


# %%


def layer_norm(
    x, normalized_shape, weight=None, bias=None, eps=1e-5, *, design="triton"
):
    """Normalize x over its last dimensions; both passes run in Triton.

    The arguments are those of PyTorch's function. design names the backward
    pass: one of DESIGNS.
    """
    if isinstance(normalized_shape, int):
        normalized_shape = [normalized_shape]
    shape = torch.Size(normalized_shape)
    # Elements of a tile of 64 rows are counted in 32 bits.
    most = 2**25
    if design == "one kernel":
        most = MAX_COLUMNS
    check_arguments(x, shape, weight, bias, eps, most)

    # The kernels only know matrices, so all other dimensions become rows.
    N = shape.numel()
    if weight is not None:
        weight = weight.reshape(N)
    if bias is not None:
        bias = bias.reshape(N)
    rows = x.reshape(-1, N)
    y = LayerNorm.apply(rows, weight, bias, eps, DESIGNS[design])
    return y.reshape(x.shape)


# %%
# Is it right, with each of the designs? We compare each element with PyTorch's
# layer norm in float64.

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
for name in DESIGNS:
    print(name, end=": ")
    check(lambda *t: layer_norm(*t, design=name), *shape, torch.float16)

# %%
# What does the second pass cost?
# -------------------------------
#
# Now we measure whole backward passes, beside PyTorch's, that of
# ``torch.compile``, and the copy.

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

# Scaffold: the speed of a backward pass.

NAMES = {
    "triton": "Triton",
    "larger tiles": "Larger tiles",
    "rows split": "Rows split",
    "example 53's tiling": "Example 53's tiling",
    "one kernel": "One kernel",
    "torch": "PyTorch",
    "torch.compile": "torch.compile",
    "copy": "Copy",
}


def pytorch(x, shape, w, b):
    """PyTorch's function, with the arguments of ours."""
    return F.layer_norm(x, shape, w, b)


def speed_backward(M, N, dtype, provider):
    """GB/s of the backward pass alone: the forward pass runs once, before."""
    if provider == "copy":
        return ceiling(reads=2, writes=1, shape=(M, N), dtype=dtype)

    def measure(function):
        def prepare():
            x, w, b, dy = inputs(M, N, dtype)
            y = function(x, (N,), w, b)
            return lambda: torch.autograd.grad(
                y, (x, w, b), dy, retain_graph=True
            )

        # Whatever a design moves, it must read x and dy and write dx.
        return speed(3 * M * N * dtype.itemsize, prepare)

    if provider == "torch":
        return measure(pytorch)
    if provider == "torch.compile":
        return best_of_three_compilations(pytorch, measure)
    return measure(lambda *tensors: layer_norm(*tensors, design=provider))


# %%

# Scaffold: the designs, a benchmark.


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=[1024, 2048, 4096, 4608, 8192, 8704, 12288, 15872],
        line_arg="provider",
        line_vals=list(NAMES),
        line_names=list(NAMES.values()),
        ylabel="GB/s",
        plot_name="layer-norm-two-backward",
        args={"M": 4096, "dtype": torch.float16, "mode": "backward"},
    )
)
def bench_backward(M, N, dtype, mode, provider):
    """Device time: a CUDA graph of several calls, each with inputs of its own
    and after L2 was overwritten, less the graph without the calls; median, 20%
    and 80% quantiles. Copy: the best of six tiles."""
    if not ON_GPU:
        return 3 * [float("nan")]
    return speed_backward(M, N, dtype, provider)


# %%

report(bench_backward)

# %%
# **What the figure shows.**
# On the H100 our two kernels reach 55% to 59% of the copy, and one kernel
# reaches 65% to 86%. With the tiling of the example they reach 14% to 36%, and
# with rows split 35% to 47%. PyTorch reaches 35% to 40%, and torch.compile 34%
# to 55%.
#
# On the H200 our two kernels reach 47% to 56% of the copy, and one kernel
# reaches 53% to 81%. With the tiling of the example they reach 13% to 33%, and
# with rows split 28% to 41%. PyTorch reaches 30% to 39%, and torch.compile 29%
# to 52%.
#
# **What did the three changes bring?**
# At 4096 columns the example's tiling reaches 25%, rows split 38%, larger
# tiles 50%, and the same tiles turned around 59%.
# On the H200 the four reach 21%, 35%, 48% and 54%.
#
# - **Splitting the rows** makes the tiling 3.3 times as fast at 1024 columns,
#   2.2 at 2048, 1.5 at 4096, and 1.1 at 8192. From 12288 columns on the two
#   are equally fast. By our count the tiling still has only 11.6 KB in flight
#   at 12288 columns, so one tile for each program is too simple a count. We
#   have not found out what else is in flight.
#   On the H200, rows split are even slower than the tiling there, by 10% at
#   12288 and 10% at 15872 columns.
# - **Larger tiles** are 1.1 to 1.6 times as fast as rows split. The kernel for
#   ``dx`` then reads a row once, which saves two matrices of seven. This
#   change brings least at 1024 columns, where the second read comes from L2
#   anyway.
# - **The order** alone makes our two kernels 1.04 times as fast at 1024
#   columns, 1.24 at 2048, 1.16 at 4096, 1.09 at 8192, and 1.03 at 15872. At
#   1024 columns ``x`` and ``dy`` have 17 MB, so the second kernel finds nearly
#   all of them in L2 in either order. At 2048 they have 34 MB, too much beside
#   ``dx``. And the wider the rows, the smaller is the part that L2 can hold:
#   at 15872 columns they have 260 MB, and the gain is hardly more than the
#   noise.
#   On the H200 the five numbers are 0.98, 1.15, 1.12, 1.07 and 1.00: it gains
#   less, and loses a little at 1024 columns.
#
# **What is the price of the structure?**
# One kernel is 1.3 to 1.4 times as fast as our two up to 8192 columns. By our
# count it could be up to 5 / 3 = 1.7 times. It is less, above all because one
# kernel does not reach the copy either.
#
# Above 8192 columns the rival has no registers left for loads ahead. Then a
# single row of ``x`` and ``dy`` is all that an SM requests at a time: 34 KB at
# 8704 columns, where one kernel is 1.3 times as fast as our two, and 48 KB at
# 12288 columns, where it is 1.5 times as fast. At 15872 columns a row has 62
# KB, but the compiler spills, and one kernel is 1.1 times as fast.
# A better rival exists: with `chunks <05-chunks.html>`_ one kernel reaches 90%
# of the copy at 8704 columns, 1.6 times the share of our two kernels.
# On the H200, one kernel is 1.2 to 1.5 times as fast as our two up to 8192
# columns, and 1.16, 1.31 and 1.04 times at 8704, 12288 and 15872.
#
# **What follows.**
# At 4096 columns the copy takes 35 µs, and the example's tiling takes 104 µs
# more. Our three changes take away 79 µs of these, without touching the
# structure. That leaves 25 µs, and one kernel also takes 6 µs longer than the
# copy.
# On the H200 the copy takes 26 µs, the example's tiling 100 µs more, and our
# three changes take away 78 µs of these.
# So most of what separated the tiling from the copy was not the price of two
# kernels, but that of their tiles and their order. Those can be changed in a
# minute, and the structure cannot. Before you give up a structure, find out
# which of the two you are paying for.
#
# How many bytes come from DRAM?
# ------------------------------
#
# We have counted bytes by hand. NVIDIA's profiler ``ncu`` counts those that
# are read from DRAM, and we divide them by the bytes of ``x`` and ``dy``. A
# kernel that reads each once is at 1.
# The first three lines are the kernel for ``dx`` alone, with its three
# settings; the last two are whole backward passes.

# %%

# Scaffold: bytes of DRAM that ncu counts.


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=["1024", "4096", "8192", "16384"],  # as points
        line_arg="provider",
        line_vals=[
            "dx, triton",
            "dx, tile",
            "dx, tile, from the start",
            "triton",
            "one kernel",
        ],
        line_names=[
            "dx, whole rows",
            "dx, 8 × 128",
            "dx, 8 × 128, from the start",
            "Two kernels",
            "One kernel",
        ],
        ylabel="bytes of DRAM per byte counted",
        plot_name="layer-norm-two-traffic",
        args={
            "M": 4096,
            "dtype": torch.float16,
            "mode": "backward",
            "counter": "dram__bytes_read.sum",
        },
    )
)
def traffic(M, N, dtype, mode, counter, provider):
    """Bytes read from DRAM, over those of x and dy."""
    if not ON_GPU:
        return 3 * [float("nan")]
    N = int(N)
    dy, x, w, mean, rstd = given(M, N, dtype)

    def call():
        if provider.startswith("dx, "):
            setting = provider.removeprefix("dx, ")
            return dx_by(setting, dy, x, w, mean, rstd)
        backward = DESIGNS[provider]
        return backward(dy, x, w, mean, rstd, dtype)

    call()  # compiles the kernels
    by_hand = 2 * x.nbytes
    with torch.cuda.nvtx.range(f"counted {provider} {N} per {by_hand}"):
        call()
    return 3 * [float("nan")]  # only ncu knows


# %%

traffic.run(show_plots=ON_GPU)

# %%
# **What the figure shows.**
# On the H100 the kernel for ``dx`` with whole rows is at 1.00 at all four
# widths. With the tile of the example it is at 1.00 at 1024 columns, at 1.65
# at 4096 columns, and at 1.92 at 16384 columns. If the second sweep begins at
# the start, the three numbers are 1.00, 2.00 and 2.00. Our two kernels are at
# 2.00 to 2.02, and one kernel is at 1.07 to 1.20.
#
# The H200 shows the same, but for the tile of the example, which is at 1.59 at
# 4096 columns and at 1.90 at 16384.
#
# **Why.**
# This is the count that we made by hand: once the matrices do not fit into L2,
# a second sweep from the start reads everything twice, and one from the end
# saves a part. How large is this part? At 4096 columns it has 23 MB, at 8192
# columns 23 MB, and at 16384 columns 22 MB, so it has indeed about the same
# size at each width. It is less than the 33 MB for which there could be room.
# We have not found out where the rest goes.
# On the H200, which has a larger L2, it has 27, 27 and 26 MB at these widths.
#
# ``ncu`` empties the caches before each kernel, so our two kernels read
# everything twice here. In the figure before, where one kernel follows the
# other, the second may find in L2 what the first has read last.
# What one kernel reads beyond 1 is the sums of its programs: at 1024 columns
# 396 programs have 3.2 MB of them, 19% of ``x`` and ``dy``.
#
# At the size of the example
# --------------------------
#
# Are the designs as far apart at the example's own size? It has 1024 rows of
# 512 columns in float32: a matrix has 2 MB, and L2 holds all three.
# So a second read comes from L2, and costs less. But a kernel takes so little
# time that starting it matters.

# %%

# Scaffold: few rows in float32, a benchmark.


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=[128, 512, 1024, 2048],
        line_arg="provider",
        line_vals=list(NAMES),
        line_names=list(NAMES.values()),
        ylabel="GB/s",
        plot_name="layer-norm-two-own",
        args={"M": 1024, "dtype": torch.float32, "mode": "backward"},
    )
)
def bench_own(M, N, dtype, mode, provider):
    """Device time: a CUDA graph of several calls, each with inputs of its own
    and after L2 was overwritten, less the graph without the calls; median, 20%
    and 80% quantiles. Copy: the best of six tiles."""
    if not ON_GPU:
        return 3 * [float("nan")]
    return speed_backward(M, N, dtype, provider)


# %%

report(bench_own)

# %%
# **What the figure shows.**
# On the H100, at 512 columns, our two kernels reach 42% of the copy, rows
# split 45%, the example's tiling 26%, and one kernel 55%. PyTorch reaches 44%
# and torch.compile 28%.
#
# On the H200, at 512 columns, our two kernels reach 40% of the copy, rows
# split 44%, the example's tiling 25%, and one kernel 52%. PyTorch reaches 41%
# and torch.compile 26%.
#
# **Why.**
# The copy takes 3.9 µs at 512 columns, one kernel 7.1 µs, and our two kernels
# 9.2 µs. At this size not only bytes take time. Each kernel has to start and
# to end: our two kernels are three, because the parts are added up, and one
# kernel is two.
#
# Programs are scarce, too. The example's tiling has 16 of them for the sums on
# 132 SMs. Each walks down 1024 rows, 32 at a time, and 116 SMs wait.
# At 128 columns our larger tiles leave 32 programs for the sums, and rows
# split have 128. There rows split reach 47%, one kernel 45%, and our two
# kernels 33%.
#
# And the third change does not help where L2 holds everything. At 128, 512 and
# 1024 columns our two kernels take 0.8 to 1.0 µs longer than the same tiles in
# the order of the example. At 2048 columns, where the three matrices have 25
# MB, they are 1.04 times as fast. We did not expect them to lose time at all.
# It may be because the first kernel reads from DRAM: this is now the
# one for the sums, which has a quarter of the programs of the other. We have
# not measured whether that is the reason.
# On the H200, whose L2 holds more, they take 0.4 to 1.1 µs longer at all four
# widths.
#
# **What follows.**
# No plan is good for all sizes. Small matrices want small tiles and many
# programs, and our function has the same plan for all of them.
#
# Why have two kernels at all?
# ----------------------------
#
# In both figures of whole backward passes one kernel is faster than our two at
# every width, 1.1 to 1.5 times as fast on the H100 and 1.0 to 1.5 times on the
# H200. What do two kernels have that one does not?
#
# - **Any width.** Neither of the two keeps a whole row of sums in registers.
#   They take up to 33 million columns, and one kernel takes 16384.
# - **Nobody waits.** `Programs that share a row <08-shared-rows.html>`_ also
#   take wide rows, and read each of them once. But they wait for each other,
#   so all of them must run at the same time, and that ends at about 2 MB a
#   row.
# - **What is not wanted is not computed.** If only ``dx`` is wanted, as with
#   frozen weights, the kernel for the sums is left out, and nothing is read
#   for it. If only ``dw`` and ``db`` are wanted, the kernel for ``dx`` is.
# - **The same bits every time**, because no atomics are involved.
#
# Where PyTorch or a library is better
# ------------------------------------
#
# On 4096 rows in 16 bits neither PyTorch nor torch.compile is faster than our
# two kernels at any width. But:
#
# - **PyTorch on small matrices.** With 1024 rows in float32 it reaches 34%,
#   44% and 52% of the copy at 128, 512 and 1024 columns, and our two kernels
#   33%, 42% and 51%. That is a small lead, but PyTorch has it at all three
#   widths. At 128 columns torch.compile reaches 34% as well.
#   On the H200 PyTorch reaches 32%, 41% and 47%, and our two kernels 31%, 40%
#   and 47%.
# - **One kernel**, which other pages of this site have, is faster than our two
#   at every width that we measured.
# - **PyTorch can do more.** It has second derivatives, and it does not compile
#   a kernel for each new width.
# - **torch.compile can fuse** a layer norm with what comes before and after.
# - **Composable Kernel runs on AMD GPUs**, and we have not measured it there.
#   What we say about its tiling holds for our kernels on an H100 and an H200.
#
# Exercise 1: the sums of the example
# -----------------------------------
#
# The kernel of the example does not compute ``x_hat`` in its first sweep. It
# adds up two sums of each row: ``ds``, the sum of ``w * dy * x``, and ``db``,
# which there is the sum of ``w * dy``. (It is not our ``db``, which is a sum
# over rows.)
# How do you get :math:`c_1` and :math:`c_2` of our kernel from these two, with
# the mean and ``rstd`` of the row? The function below has :math:`c_2` right;
# mend its :math:`c_1`. The checker prints the error of :math:`c_1` in float64:
# if yours is right, only rounding is left, an error below 1e-14.
#
# **Hint 1.** Write :math:`c_1` as a sum over ``x_hat * w * dy``, and solve
# ``x_hat = (x - mean) * rstd`` for ``x``.
#
# **Hint 2.** That is ``x = mean + x_hat / rstd``. Put it into ``ds``, and take
# out of the sum what is the same for the whole row.
#
# **Hint 3.** You get ``ds = mean * db + (the sum in c1) / rstd``.


def means(ds, db, mean, rstd, N):
    """c1 and c2 of each row."""
    return ds / N, db / N  # to do: c1


def rows_with(mean_over_std, dtype):
    """64 rows of x and of w * dy in a type, and their c1 in float64."""
    torch.manual_seed(0)
    x = (mean_over_std + torch.randn(64, 512).double()).to(dtype)
    wdy = torch.randn(64, 512).to(dtype)
    wide = x.double()
    mean = wide.mean(dim=1, keepdim=True)
    rstd = wide.var(dim=1, correction=0, keepdim=True) ** -0.5
    c1 = (wdy * ((wide - mean) * rstd)).mean(dim=1)
    return x, wdy, mean.to(dtype), rstd.to(dtype), c1


def exercise_1(means):
    x, wdy, mean, rstd, exact = rows_with(1, torch.float64)
    ds = (wdy * x).sum(dim=1)
    db = wdy.sum(dim=1)
    c1, _ = means(ds, db, mean[:, 0], rstd[:, 0], 512)
    print(f"error of c1: {relative_error(c1, exact):.0e}")
    return torch.allclose(c1, exact)


exercise_1(means)

# %%

# Solution 1


def means_1(ds, db, mean, rstd, N):
    # ds = mean * db + (the sum of x_hat * w * dy) / rstd
    return (ds - mean * db) * rstd / N, db / N


assert exercise_1(means_1)

# What does it cost in digits? The larger the mean, the nearer are ds and
# mean * db to each other, and their first digits cancel.
print("mean / std  error of c1 in float32: by x_hat, by ds")
for mean_over_std in (1, 100, 10000):
    x, wdy, mean, rstd, exact = rows_with(mean_over_std, torch.float32)
    by_x_hat = (wdy * ((x - mean) * rstd)).mean(dim=1)
    ds = (wdy * x).sum(dim=1)
    by_ds, _ = means_1(ds, wdy.sum(dim=1), mean[:, 0], rstd[:, 0], 512)
    errors = [relative_error(c1.double(), exact) for c1 in (by_x_hat, by_ds)]
    print(f"{mean_over_std:10}{errors[0]:33.0e}{errors[1]:9.0e}")

# %%
# Exercise 2: an error that the rows do not show
# ----------------------------------------------
#
# At the beginning we found an error without knowing the right formula: rows of
# ``dx`` must sum to 0. This does not find every error. Leave :math:`c_1` out
# of the formula, and the rows still sum to 0.
# The function below gets ``dx`` and ``x_hat``, and says whether something must
# be wrong. Which other sum of a row must be 0? Let the function look at that,
# too. The checker tries your function with the right ``dx`` and with three
# wrong ones, and prints which of them it has found. Keep the tolerance of
# 1e-3, because epsilon leaves the other sum a little off 0.
#
# **Hint 1.** We added a number to a whole row, and ``y`` did not change. What
# else can you do to a row of ``x`` without changing ``y``, apart from epsilon?
#
# **Hint 2.** Stretch the row around its mean: add to each element a small
# multiple of ``x - mean``. Then the deviations and the standard deviation grow
# by the same factor.
#
# **Hint 3.** If the loss does not change when ``x`` moves in a direction, the
# sum of ``dx`` times this direction is 0. ``x_hat`` has the direction of
# ``x - mean``.


def is_wrong(dx, x_hat):
    """Whether dx cannot be right, whatever dy and w are."""
    largest_sum = dx.sum(dim=1).abs().max()  # to do: another sum
    return (largest_sum > 1e-3).item()


def exercise_2(is_wrong):
    mean = large_x.mean(dim=1, keepdim=True)
    rstd = (large_x.var(dim=1, correction=0, keepdim=True) + 1e-5) ** -0.5
    x_hat = (large_x - mean) * rstd
    wdy = large_w * large_dy
    c1 = (x_hat * wdy).mean(dim=1, keepdim=True)
    c2 = wdy.mean(dim=1, keepdim=True)
    wrong = {
        "the documented one": documented(large_x, large_w, large_dy),
        "without c1": rstd * (wdy - c2),
        "without c2": rstd * (wdy - x_hat * c1),
    }
    found = [name for name in wrong if is_wrong(wrong[name], x_hat)]
    accepts_the_right_one = not is_wrong(large_dx, x_hat)
    print(f"found: {found}; accepts the right one: {accepts_the_right_one}")
    return accepts_the_right_one and len(found) == 3


exercise_2(is_wrong)

# %%

# Solution 2


def is_wrong_2(dx, x_hat):
    largest_sum = dx.sum(dim=1).abs().max()
    # Epsilon lets this sum be a little off 0, and so does rounding.
    along_the_row = (dx * x_hat).sum(dim=1).abs().max()
    return (max(largest_sum, along_the_row) > 1e-3).item()


assert exercise_2(is_wrong_2)

# %%
# What we learned
# ---------------
#
# These are the designs of this page: how many matrices each of them moves, how
# fast it is on the H100 at 4096 columns, and why.
#
# - **Example 53's tiling** moves up to seven matrices: rows are swept twice
#   for ``dx`` and read again for the sums. It reaches 25% of the copy. Few
#   programs compute the sums, so an SM has few bytes in flight.
# - **Rows split** moves as many, and reaches 38%. Enough programs compute the
#   sums, and one more kernel adds up their parts.
# - **Larger tiles** move five matrices, and reach 50%. A row is loaded once
#   for ``dx``.
# - **Turned around**, our function, they reach 59%: the kernel for ``dx``
#   begins with the rows that the sums have read last.
# - **One kernel** moves three matrices and the sums of its programs. It
#   reaches 85%.
# - **PyTorch** computes ``dx`` and the sums in separate kernels, too, and
#   sweeps each row twice for ``dx``. It reaches 40%.
#
# And for kernels in general:
#
# - Some properties of a gradient can be checked without a reference: rows that
#   sum to 0, for instance. A test whose inputs could never occur cannot check
#   them.
# - A second sweep from the end finds in the cache what the first one has read
#   last. It saves as many bytes as the cache holds, so it helps most where the
#   data is only a little larger than the cache.
# - The same holds for whole kernels: let the second begin where the first has
#   ended.
# - Find out separately what the structure costs and what the tiles cost. Here
#   the structure, five matrices in place of three, was the smaller part of the
#   gap at every width.
# - Sums that cancel cost digits: subtract the mean before you add up.
#
# **Next:** how much of the time of a call is not spent on the GPU at all?
# `Host time <10-host-time.html>`_ looks at what Python does before a kernel
# starts.
