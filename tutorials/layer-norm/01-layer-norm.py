r"""
Layer normalization, both passes
================================

How do you write both passes of layer norm so that a model can train with them?
Keep each row in registers, save two numbers per row, and give every program of
the backward pass its own buffer for weight gradients.

`Layer normalization <https://arxiv.org/abs/1607.06450>`_ (Ba, Kiros and
Hinton, 2016) keeps the numbers inside a Transformer from growing or shrinking
as they pass through its layers.
On this page we build it as GPU kernels, from a few lines of
`PyTorch <https://pytorch.org>`_ to a function that you can train a model with.
We check every step along the way, and we measure every step.

**What you will learn**

- How to write a GPU kernel in `Triton <https://triton-lang.org>`_: programs,
  tiles, masks and warps.
- Why memory, not arithmetic, limits layer norm, and how close to that limit a
  kernel can get.
- How to derive a backward pass by hand and have autograd check each step.
- How to sum gradients over all rows without a lock and get the same bits on
  every run.
- How to time a kernel and count the bytes that it reads.

**What you need:** Python and PyTorch, including what ``backward()`` does.
You don't need a GPU, and you don't need to have written a kernel before.
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
# Every page of this site begins with this cell.
# It imports PyTorch as ``torch``, ``torch.nn.functional`` as ``F``, and
# Triton's language as ``tl``.
# It also lets you run the page without a GPU: Triton then *interprets* the
# kernels on the CPU, which is slow, but the code and the checks are the same.
# Cells like it, which most readers do not need at first, are folded: a click
# opens them.
#
# Both passes in PyTorch
# ----------------------
#
# What does layer norm compute?
#
# It takes a matrix ``x`` with ``M`` rows and ``N`` columns.
# In a Transformer, each row is a token, and the columns are its features.
# It shifts each row to mean 0 and scales it to variance 1.
# Then it gives each column its own scale ``w``, the weight, and its own shift
# ``b``, the bias.
#
# Let's do that by hand for the row 1, 2, 3, 6:
#
# - The mean is 12 / 4 = 3.
# - The row minus its mean is -2, -1, 0, 3.
# - The mean of the squares 4, 1, 0, 9 is 3.5. That is the variance.
# - Divided by the square root of 3.5, the row is -1.07, -0.53, 0, 1.60.
# - With ``w`` = 1, 2, 1, 2 and ``b`` = 0, 0, 1, 1 it becomes -1.07, -1.07, 1,
#   4.21.
#
# That is the *forward pass*. Here it is in PyTorch, for three rows.

options = {"dtype": torch.float64, "device": DEVICE}
x = torch.tensor([[1, 2, 3, 6], [2, 2, 4, 4], [5, 1, 1, 1]], **options)
w = torch.tensor([1, 2, 1, 2], **options)
b = torch.tensor([0, 0, 1, 1], **options)
for tensor in (x, w, b):
    tensor.requires_grad_()  # autograd will check our gradients later

mean = x.mean(dim=1, keepdim=True)
variance = ((x - mean) ** 2).mean(dim=1, keepdim=True)
rstd = 1 / torch.sqrt(variance + 1e-5)  # 1 / standard deviation
x_hat = (x - mean) * rstd  # mean 0, variance 1
y = x_hat * w + b


def show(name, tensor):
    """Print a tensor, rounded to two decimals."""
    print(f"{name} =\n{tensor.detach().cpu().numpy().round(2)}")


show("y", y)

# %%
# The first row of ``y`` is the one that we found by hand.
# The 1e-5, called *epsilon*, only matters for a row whose variance is almost
# 0: without it, we would divide by 0.
#
# The *backward pass* receives ``dy``, the gradient of the loss with respect to
# ``y``: for each element of ``y``, how much the loss grows when that element
# grows.
# It returns the gradients with respect to the inputs: ``dx``, ``dw`` and
# ``db``.


dy = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 2, 3]], **options)

wdy = w * dy
c1 = (x_hat * wdy).mean(dim=1, keepdim=True)
c2 = wdy.mean(dim=1, keepdim=True)
dx = (wdy - x_hat * c1 - c2) * rstd
dw = (dy * x_hat).sum(dim=0)
db = dy.sum(dim=0)

show("dx", dx)
show("dw", dw)
show("db", db)

# %%
# Don't worry about the formula for ``dx`` yet: we derive it below.
# Look at the direction of the sums instead.
# ``y`` and ``dx`` need sums along a *row*, while ``dw`` and ``db`` need sums
# along a *column*, over all rows.
# A GPU is at its best when it can handle each row on its own, so the sums over
# all rows are the hard part of this page.
#
# A GPU in one minute
# -------------------
#
# What happens when a GPU runs our code?
#
# A *kernel* is a function that the GPU runs many times at once.
# Each of these runs is a *program*; CUDA calls it a *thread block*.
# All programs run the same code, but each asks for its own number and works on
# its own part of the data.
#
# An H100 and an H200, the GPUs in our figures, have 132 *streaming
# multiprocessors* (SMs) each.
# An SM runs several programs at a time. While one waits for memory, another
# can compute.
# A program, in turn, consists of *warps*, groups of 32 threads that execute
# the same instruction together.
# In Triton you write code for whole arrays, and the compiler divides the work
# among the threads.
#
# Data can live in four places:
#
# - **DRAM** holds the tensors. It is large and far away. On these GPUs it is
#   *high-bandwidth memory*, or HBM.
# - **L2** is a cache that all SMs share.
# - **Shared memory** is part of an SM. The threads of a program exchange
#   values there. Triton does that for us, in a sum for instance.
# - **Registers** are part of an SM, too, but each belongs to a single thread.
#   All arithmetic happens here.

# %%

# Drawing: the places where data can live, with their sizes on an H200.

plt.figure(
    "An H200: 141 GB of DRAM, then 60 MB of L2 cache, then 132 SMs, each with "
    "228 KB of shared memory and 256 KB of registers",
    figsize=(7.5, 3),
)


def draw_box(x, y, text, color):
    style = {"fc": "none", "ec": color, "lw": 2, "boxstyle": "square,pad=0.5"}
    plt.text(x, y, text, bbox=style, ha="center", va="center")


def draw_arrow(start, end, style="->"):
    plt.annotate("", xy=end, xytext=start, arrowprops={"arrowstyle": style})


draw_box(0, 2, "DRAM\n141 GB", "C0")
draw_box(3, 2, "L2\n60 MB", "C1")
draw_arrow((0.8, 2), (2.35, 2), "<->")
for height, number in ((4, "SM 0"), (2, "SM 1"), (0, "SM 131")):
    sizes = "shared memory 228 KB\nregisters 256 KB"
    draw_box(7.2, height, f"{number}\n{sizes}", "C2")
    draw_arrow((3.65, 2), (5.35, height), "<->")
plt.text(7.2, 1, "...", ha="center", va="center")
plt.axis((-0.9, 9.2, -1, 5))
plt.axis("off")
plt.show()

# %%
# An H100 differs only in the left half of the picture: it has 80 GB of DRAM,
# which is also slower, and 50 MB of L2.
#
# What limits layer norm?
# -----------------------
#
# In 16 bits, the forward pass moves four bytes per element: it reads two bytes
# of ``x`` and writes two bytes of ``y``.
# It does seven operations per element: one addition for the mean, one
# subtraction of it, a multiplication and an addition for the sum of squares,
# and one operation each for ``rstd``, ``w`` and ``b``.
# That is about two operations per byte.
# In the time that it takes to move one byte to or from DRAM, an H200 can do
# more than ten operations in float32, and an H100 even more.
# So the arithmetic is almost free, and layer norm is *memory-bound*.
#
# This also tells us how fast a kernel can be at best.
# A plain copy reads a matrix and writes a matrix, just as the forward pass
# must, and it computes nothing.
# So the speed of a copy is our *ceiling*, or, in the language of the *roofline
# model*, the roof.
# You will find it in the speed figures of this site as the line "Copy", and
# "% of a copy" is the number to look at.
#
# Forward: a row in registers
# ---------------------------
#
# How does a program normalize a row that it reads only once?
#
# It loads the row, does all the arithmetic in registers, and stores the
# result.
#
# Triton works on *tiles* (its own documentation says *blocks*): arrays whose
# size is a power of two.
# Few rows have such a size, so we take the next power of two and *mask* the
# surplus. A masked element loads 0 and stores nothing.
# Here is the row 1, 2, 6 in a tile of four, with tensors of PyTorch:

mask = torch.tensor([True, True, True, False])
loaded = torch.tensor([1.0, 2.0, 6.0, 0.0])  # the last element is masked
centered = loaded - loaded.sum() / 3
print("minus the mean:", centered.tolist())
print("after where:   ", torch.where(mask, centered, 0).tolist())

# %%
# The sum is 9, and the mean is 9 / 3 = 3: a masked 0 adds nothing.
# But then we subtract the mean from all four elements, and the masked one
# becomes -3.
# Its square would turn the sum of squares from 14 into 23, which is why the
# kernel sets it back to 0 with ``tl.where``.


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


# %%
# How do we *launch* this kernel?
# We allocate its outputs and say how many programs should run.
# That number is the *grid*. Here it is one program per row.
#
# We also choose how many warps each program has.
# A thread can load at most 16 bytes with one instruction.
# With one warp for every 4 KB of the row, each of its 32 threads has 128 bytes
# to load. That takes eight instructions, and the thread issues all eight
# before it needs the first result.
# Bytes that have been requested but have not arrived yet are *in flight*.
# A memory that is far away stays busy only if many bytes are in flight.
#
# We take at least 4 warps, which is Triton's default, and at most 16: the more
# threads share the registers of an SM, the fewer each of them gets.
# In 16 bits that makes 4 warps up to 8192 columns, and 8 for wider rows.


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


y_kernel, _, _ = forward_in_registers(x, w, b, eps=1e-5)
torch.testing.assert_close(y_kernel, y)
print("3 x 4, y in registers: right")

# %%
# ``N``, ``eps`` and ``BLOCK_SIZE`` are ``tl.constexpr``: the compiler knows
# their values. It needs the size of a tile, and it uses the others to simplify
# the code.
# The price is one compilation for each width, at the first call.
#
# How fast is it?
# ---------------
#
# Every page of this site times its kernels with the same clock. Four things
# would spoil its numbers, and it takes care of each.
#
# **Python is left out.**
# Calling a kernel from Python can take longer than running it.
# We record the calls once as a *CUDA graph*, and the GPU replays them without
# Python.
#
# **L2 holds nothing that a call could use.**
# A second call would find its input still in L2, where the first call left it.
# In a model it would not: other layers run in between.
# So the graph fills a tensor of 256 MB with zeros before each call.
#
# That is not enough. L2 does not simply keep what came last. It holds on to
# what has been used twice, and to what a kernel asked it to keep, while the
# zeros pass. So each call also has inputs and outputs of its own, sixteen
# times over.
#
# Why do we write zeros, and not just read something else?
# What a kernel stores stays in L2 at first, in *dirty lines*, and L2 writes
# them back to DRAM only when it needs their place.
# In a model, the layer before leaves L2 full of dirty lines. In our graph the
# zeros do.
# So each call finds L2 as it would find it in a model, full of lines that have
# yet to be written back.
#
# **The time to start is subtracted.**
# Starting a replay takes a few microseconds, about as long as a small kernel
# runs.
# So our graph holds several calls, and a second graph holds the overwriting
# alone. The difference between their times is the time of the calls.
#
# **The spread is shown.**
# We replay both graphs in turns, 25 times each, and report the median of the
# differences. The 20% and 80% quantiles are the edges of the shaded bands in
# the figures: where a band is narrow, all replays took about the same time.

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
# ``speed`` reports bytes per second: the bytes that *must* move, divided by
# the time.
# A kernel that moves more than it must gets no credit for the extra bytes.
#
# And how fast is a copy?
# A copy is a kernel, too, and its speed depends on its tile. PyTorch's own
# ``copy_`` is not the fastest one at every width, and a ceiling that is too
# low would flatter us.
# So we take the plainest kernel that reads as many matrices as the operation
# must read and writes as many as it must write. We try six tiles, and the best
# one is the ceiling.

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
# What we compare with should be at its best, too.
# ``torch.compile`` tries a few kernels and keeps the fastest. Its choice can
# be a matter of luck, so we let it choose three times and show the best of the
# three.

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
# ``report`` draws a benchmark and prints each speed in % of the ceiling.

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
# The inputs are like those of a model: the mean of a row is not 0.

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
# Each line in the figure is a *provider*: our kernel, PyTorch's layer norm,
# the same function through ``torch.compile``, and the copy.
# All but the copy also save what a backward pass needs.

# %%

# Scaffold: the forward pass, a benchmark.

WIDTHS = [512 * i for i in (2, 3, 4, 6, 8, 9, 12, 16, 17, 24, 31)]


def pytorch_layer_norm(x, w, b, eps):
    """PyTorch's function, with the arguments of our kernels."""
    return F.layer_norm(x, (x.shape[1],), w, b, eps)


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=WIDTHS,
        line_arg="provider",
        line_vals=["triton", "torch", "torch.compile", "copy"],
        line_names=["Triton", "PyTorch", "torch.compile", "Copy"],
        ylabel="GB/s",
        plot_name="layer-norm-forward",
        args={"M": 4096, "dtype": torch.float16, "mode": "forward"},
    )
)
def bench_forward(M, N, dtype, mode, provider):
    """Device time: a CUDA graph of several calls, each with inputs of its own
    and after L2 was overwritten, less the graph without the calls; median, 20%
    and 80% quantiles. Copy: the best of six tiles."""
    if not ON_GPU:
        return 3 * [float("nan")]  # the interpreter cannot be timed

    def speed_of(function):
        def prepare():
            x, w, b, _ = inputs(M, N, dtype)
            return lambda: function(x, w, b, eps=1e-5)

        bytes_moved = 2 * M * N * dtype.itemsize  # read x, write y
        return speed(bytes_moved, prepare)

    if provider == "triton":
        return speed_of(forward_in_registers)
    if provider == "torch":
        return speed_of(pytorch_layer_norm)
    if provider == "torch.compile":
        return best_of_three_compilations(pytorch_layer_norm, speed_of)
    return ceiling(1, 1, (M, N), dtype)


# %%

report(bench_forward)

# %%
# **What the figure shows.**
# On the H200, our kernel reaches 89% of a copy at 4096 columns, and between
# 76% and 94% over all widths.
# PyTorch reaches 58% of a copy at 4096 columns. Ours is 1.5 to 1.8 times as
# fast as PyTorch at every width.
# With torch.compile, the speed changes from width to width: on the H200 it is
# between 39% and 90% of a copy.
# On the H100, our kernel reaches between 81% and 98% of a copy over all
# widths, and PyTorch reaches between 56% and 71%.
#
# **Why.**
# In our kernel each byte moves once, just as in a copy.
# Several programs share an SM, so while one adds up its row, others load
# theirs.
# Part of the gap to the copy comes from the sums: a program cannot store
# anything until it has seen its whole row, while a copy does not have to wait.
# PyTorch's kernel reads each row twice, once for the sums and once more to
# normalize it. That need not cost much, as we are about to see. But it also
# updates the mean and the variance after each element, which is called
# *Welford's algorithm*, so each of these steps has to wait for the one before.
# We have not measured which of the two costs more.
#
# **What follows.**
# The lines tend to rise to the right, and so does that of the copy, because
# even a kernel that does nothing takes a moment to start and to finish.
# So compare a kernel with a copy of the same size, and not with the bandwidth
# on a data sheet.
#
# A row of any width
# ------------------
#
# What if a row does not fit into registers?
#
# A row of 65536 columns takes 256 KB in float32, which is all the registers of
# an SM.
# So we walk along a wide row with a narrow tile and keep only sums.
# Each walk is a *sweep*, and we need three of them.
# Here they are for the row 1, 2, 3, 6 and a tile of two:
#
# - **Sweep 1, the mean.** The two elements of the tile add up 1 + 3 = 4 and
#   2 + 6 = 8. Together that is 12, so the mean is 3.
# - **Sweep 2, the variance.** They add up the squares 4 + 0 = 4 and 1 + 9 =
#   10. Together that is 14, so the variance is 3.5.
# - **Sweep 3, the result.** Now we know both and can write ``y``.
#
# Each element of the tile has a sum of its own, and ``tl.sum`` adds up these
# sums at the end of a sweep. Only then do threads have to wait for each other.


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


# %%
# We launch it with a tile of at most 4096 columns. A wide row gets more warps:
# 16 of them from 8192 columns on. An SM can hold 64 warps, so it then works on
# at most four rows at a time. We will see below how that helps L2.

# %%

# Scaffold: the launch of three sweeps.


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


y_kernel, _, _ = forward_in_sweeps(x, w, b, eps=1e-5)
torch.testing.assert_close(y_kernel, y)
print("3 x 4, y in three sweeps: right")

# %%
# Three sweeps ask for ``x`` three times and write ``y`` once.
# That makes four matrices, where the first kernel moves two.
# Are three sweeps half as fast?

# %%

# Scaffold: three sweeps, a benchmark.


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=WIDTHS,
        line_arg="provider",
        line_vals=["triton", "sweeps", "copy"],
        line_names=["In registers", "Three sweeps", "Copy"],
        ylabel="GB/s",
        plot_name="layer-norm-sweeps",
        args={"M": 4096, "dtype": torch.float16, "mode": "forward"},
    )
)
def bench_sweeps(M, N, dtype, mode, provider):
    """Device time: a CUDA graph of several calls, each with inputs of its own
    and after L2 was overwritten, less the graph without the calls; median, 20%
    and 80% quantiles. Copy: the best of six tiles."""
    if not ON_GPU:
        return 3 * [float("nan")]

    def speed_of(function):
        def prepare():
            x, w, b, _ = inputs(M, N, dtype)
            return lambda: function(x, w, b, eps=1e-5)

        # What must move: read x, write y.
        bytes_moved = 2 * M * N * dtype.itemsize
        return speed(bytes_moved, prepare)

    if provider == "triton":
        return speed_of(forward_in_registers)
    if provider == "sweeps":
        return speed_of(forward_in_sweeps)
    return ceiling(1, 1, (M, N), dtype)


# %%

report(bench_sweeps)

# %%
# **What the figure shows.**
# No, they are hardly slower.
# On the H200, three sweeps reach between 86% and 93% of a copy from 4608
# columns on, and a row in registers reaches between 89% and 94%.
# Up to 4096 columns, where the row is a single tile, they reach between 73%
# and 87%, and a row in registers reaches between 77% and 88%. There the
# compiler merges the first two sweeps, because they load the same tile.
#
# **How precise is this?**
# The kernel in registers was measured for both figures, so we can compare it
# with itself. On the H200, its shares of the copy differ by up to 2 points
# between the two, at 4096 columns.
# A difference between two kernels has to be larger than that to mean anything.
#
# **Why.**
# We counted what a program *asks for*, not where it comes from.
# When the second sweep asks for a tile, the tile may still be in a cache.
# This is a guess, and a clock cannot prove it. So let's count.
#
# What comes from DRAM?
# ---------------------
#
# NVIDIA's profiler ``ncu`` reads the counters of the hardware, and one of them
# counts the bytes that are read from DRAM.
# We divide it by the bytes of ``x``: 1 means that each byte was read once.
# A script cannot read these counters itself, so it only marks the call that
# ``ncu`` should count.

# %%

# Scaffold: three sweeps, bytes that ncu counts.


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        # As strings, these widths are evenly spaced in the figure.
        x_vals=["8192", "16384", "32768", "65536", "131072"],
        line_arg="provider",
        line_vals=["registers", "sweeps"],
        line_names=["In registers", "Three sweeps"],
        ylabel="bytes of DRAM per byte counted",
        plot_name="layer-norm-dram",
        args={
            "M": 4096,
            "dtype": torch.float16,
            "mode": "forward",
            "counter": "dram__bytes_read.sum",
        },
    )
)
def dram_reads(M, N, dtype, mode, counter, provider):
    """Bytes that a forward pass reads from DRAM, over the bytes of x. The
    caches are empty before."""
    N = int(N)
    if provider == "registers":
        if N > 16384:
            return None  # too wide for registers
        forward = forward_in_registers
    else:
        forward = forward_in_sweeps
    if ON_GPU:
        x = torch.randn(M, N, dtype=dtype, device=DEVICE)
        w = torch.ones(N, dtype=dtype, device=DEVICE)
        b = torch.zeros(N, dtype=dtype, device=DEVICE)
        forward(x, w, b, eps=1e-5)  # compiles the kernel
        with torch.cuda.nvtx.range(f"counted {provider} {N} per {x.nbytes}"):
            forward(x, w, b, eps=1e-5)
    return 3 * [float("nan")]  # only ncu knows


# %%

dram_reads.run(show_plots=ON_GPU)

# %%
# **What the figure shows.**
# On the H200, three sweeps read 1.01 times the bytes of ``x`` from DRAM at
# 65536 columns, and 3.00 times at 131072 columns.
# The kernel in registers appears only at 8192 and 16384 columns, because this
# page does not use it for wider rows.
#
# **Why.**
# What matters is how much space the rows of all running programs take
# *together*.
# The warps and registers of an SM limit how many programs it runs at a time:
# four at 16384 columns, and only one at 65536, because the compiler needs more
# registers there. Either way, the rows in progress on all 132 SMs take 17 MB.
# L2 holds that, so only the first sweep goes to DRAM.
# At 131072 columns the compiler happens to need fewer registers again, and
# three programs fit on an SM. Their rows of 256 KB each make 104 MB in all,
# more than L2 can hold.
# By the time a sweep returns to the start of its row, other rows have taken
# its place.
#
# **What follows.**
# Up to 65536 columns, three sweeps read no more from DRAM than one would.
# For wider rows every sweep counts, and `Two sweeps <07-two-sweeps.html>`_
# saves one.
#
# Backward: the formulas
# ----------------------
#
# Where does the formula for ``dx`` come from?
#
# In the backward pass of layer norm only ``dx`` takes some thought. The
# derivation of its formula is the chain rule, applied step by step from the
# last line of the forward pass to the first.
# For one row with mean :math:`\mu` and variance :math:`\sigma^2`, the forward
# pass was
#
# .. math::
#
#    r = (\sigma^2 + \epsilon)^{-1/2}, \qquad
#    \hat{x}_j = r \, (x_j - \mu), \qquad
#    y_j = w_j \, \hat{x}_j + b_j
#
# In the code, :math:`r` is called ``rstd`` and :math:`\hat{x}` is ``x_hat``.
# Just as :math:`dx` is the gradient with respect to :math:`x`,
# :math:`d\sigma^2` and :math:`d\mu` are the gradients with respect to the
# variance and the mean.
#
# **Step 1: back to** :math:`\hat{x}`.
# Column :math:`j` was multiplied by :math:`w_j`, so its gradient is multiplied
# by :math:`w_j` as well.
# We call the product :math:`g`; in the code it is ``wdy``.
#
# .. math:: g_j = w_j \, dy_j
#
# **Step 2: back to the variance.**
# The factor :math:`r` multiplies every element of the row, so its gradient is
# a sum over the row.
# The derivative of :math:`r` with respect to :math:`\sigma^2` is
# :math:`-\frac{1}{2} r^3`.
#
# .. math:: d\sigma^2 = -\frac{1}{2} \, r^3 \sum_j g_j \, (x_j - \mu)
#
# **Step 3: back to the mean.**
# The mean is subtracted from every element, so its gradient is a sum over the
# row as well, with a minus sign.
# The mean is also used inside the variance, but that adds nothing, because
# :math:`\sum_j (x_j - \mu) = 0`.
#
# .. math:: d\mu = -r \sum_j g_j
#
# **Step 4: back to x.**
# An element :math:`x_j` is used in three places: by itself, in the variance
# and in the mean.
# So its gradient is the sum of three terms.
# In the second one the mean is held fixed, because step 3 has already counted
# what comes through the mean.
#
# .. math::
#
#    dx_j = r \, g_j + d\sigma^2 \, \frac{2 \, (x_j - \mu)}{N}
#    + d\mu \, \frac{1}{N}
#
# Put steps 2 and 3 into step 4, write :math:`\hat{x}_j` for
# :math:`r \, (x_j - \mu)`, and you get the formula in our code:
#
# .. math::
#
#    dx = r \, (g - \hat{x} \, c_1 - c_2), \qquad
#    c_1 = \frac{1}{N} \sum_j \hat{x}_j \, g_j, \qquad
#    c_2 = \frac{1}{N} \sum_j g_j
#
# All rows :math:`i` use the same :math:`w` and :math:`b`, so their gradients
# are sums over the rows:
#
# .. math::
#
#    dw = \sum_i dy_i \, \hat{x}_i, \qquad db = \sum_i dy_i
#
# Is all of that right? Autograd can check each step separately.

centered = x - mean
dvariance = -0.5 * rstd**3 * (wdy * centered).sum(dim=1, keepdim=True)
dmean = -rstd * wdy.sum(dim=1, keepdim=True)
columns = x.shape[1]
dx_by_steps = rstd * wdy + dvariance * 2 * centered / columns + dmean / columns

claims = [
    ("step 1, x_hat", x_hat, wdy),
    ("step 2, variance", variance, dvariance),
    ("step 3, mean", mean, dmean),
    ("step 4, x", x, dx_by_steps),
    ("the formula for dx", x, dx),
    ("the formula for dw", w, dw),
    ("the formula for db", b, db),
]
for name, tensor, our_gradient in claims:
    (gradient,) = torch.autograd.grad(y, tensor, dy, retain_graph=True)
    torch.testing.assert_close(our_gradient, gradient)
    print(f"{name}: right")

# %%
# You can also *see* the formula without any algebra.
# Add a constant to a row of ``x``, or stretch the row around its mean: apart
# from epsilon, ``y`` stays the same.
# The loss stays the same, too, so ``dx`` has no component in these two
# directions.
# The term :math:`c_2` removes the part of :math:`g` that is constant, and
# :math:`\hat{x} \, c_1` removes the part that stretches the row.
#
# The formula needs ``x_hat``, and this is why the forward pass saves the mean
# and ``rstd``, 8 bytes per row: from these and ``x``, one subtraction and one
# multiplication give us ``x_hat`` back.
# Saving ``x_hat`` itself would be slower: the forward pass would write a third
# matrix, and the backward pass would read as much as before, ``x_hat`` in
# place of ``x``.
#
# Backward: a buffer for each program
# -----------------------------------
#
# Who adds up ``dw`` and ``db`` if no program has all the rows?
#
# For ``dx``, the backward pass works just like the forward pass: a program
# that has a row in registers has everything it needs.
# For ``dw`` and ``db``, though, each row contributes only one term.
#
# All programs could add to one ``db`` in memory.
# But if two of them do so at the same time, one of the additions can get lost.
# *Atomic* additions or a lock prevent that, but they make programs wait for
# each other.
# The order of the additions also differs each time, so the last bits of the
# sum can change from run to run.
#
# Instead, we give each program several rows and a *buffer* of its own.
# The program adds up its rows in registers and stores the two sums in its
# buffer when it is done.
# A second, small kernel then adds up the buffers.
# Here is ``db`` in our example, with two programs:

buffer_0 = dy[0::2].sum(dim=0)  # program 0 takes rows 0 and 2
buffer_1 = dy[1::2].sum(dim=0)  # program 1 takes row 1
show("buffer 0", buffer_0)
show("buffer 1", buffer_1)
show("db", buffer_0 + buffer_1)
torch.testing.assert_close(buffer_0 + buffer_1, db)

# %%
# No two programs write to the same place, so no program waits.
# And because the order of the additions is fixed, the same input gives the
# same bits every time. A GPU with another number of SMs may give other bits,
# because it divides the rows among more or fewer programs.

# %%

# Drawing: who takes which row, and where the sums go.

plt.figure(
    "Each of three programs takes every third row and fills a buffer; a "
    "second kernel adds up the buffers",
    figsize=(7.5, 3),
)
for program in range(3):
    color = f"C{program}"
    height = 4 - 2 * program
    rows = [str(row) for row in range(program, 9, 3)]
    draw_box(0, height, f"rows {', '.join(rows)}", color)
    draw_arrow((1.3, height), (2, height))
    draw_box(3.1, height, f"program {program}", color)
    draw_arrow((4.2, height), (5, height))
    draw_box(6, height, f"buffer {program}", color)
    draw_arrow((7, height), (8.1, 2))
draw_box(9, 2, "second\nkernel", "C3")
draw_arrow((9.8, 2), (10.7, 2))
plt.text(11.4, 2, "dw, db", ha="center", va="center")
plt.axis((-1.4, 12.2, -0.8, 4.8))
plt.axis("off")
plt.show()

# %%
# Why must the sums be in float32, even if ``dy`` is in float16?
# Because every addition rounds. Let's add 0.1 to a sum 4096 times:

for dtype in (torch.float16, torch.float32):
    total = torch.zeros((), dtype=dtype)
    for _ in range(4096):
        total += 0.1
    print(f"0.1 added 4096 times in {dtype}: {total.item():.1f}")

# %%
# In float16, the sum gets stuck at 256.
# Above 256, the next float16 number is 256.25, so 256.1 is rounded back to
# 256.
#
# Now for the kernel.
# With ``P`` programs, program 0 takes rows 0, ``P``, ``2 * P`` and so on.
# CUDA programmers call this a *grid-stride loop*.
# If we start only as many programs as the GPU can run at once, and they stay
# until all rows are done, the kernel is called *persistent*.


@triton.jit
def _layer_norm_bwd(
    dy_ptr,  # (M, N), contiguous
    x_ptr,  # (M, N), contiguous
    w_ptr,  # (N,); None counts as 1
    mean_ptr,  # (M,), from the forward pass
    rstd_ptr,  # (M,), from the forward pass
    dx_ptr,  # (M, N), or None if dx is not wanted
    buffers_ptr,  # (programs, 2, N), or None if neither dw nor db is wanted
    M,  # rows
    N: tl.constexpr,  # columns
    BLOCK_SIZE: tl.constexpr,  # tile width: a power of two, at least N
):
    cols = tl.arange(0, BLOCK_SIZE)
    mask = cols < N
    acc_dtype = mean_ptr.dtype.element_ty

    # The sums over our rows stay in registers from the first row to the last.
    dw = tl.zeros((BLOCK_SIZE,), acc_dtype)
    db = tl.zeros((BLOCK_SIZE,), acc_dtype)

    for row in range(tl.program_id(0), M, tl.num_programs(0)):
        # Load a row of x and of dy. Masked elements of dy are 0, so they add
        # nothing to any of the sums below.
        # tl.cast rather than .to(): the interpreter's row is a Python int.
        offsets = tl.cast(row, tl.int64) * N + cols
        x = tl.load(x_ptr + offsets, mask=mask, other=0).to(acc_dtype)
        dy = tl.load(dy_ptr + offsets, mask=mask, other=0).to(acc_dtype)

        # Recompute x_hat.
        mean = tl.load(mean_ptr + row)
        rstd = tl.load(rstd_ptr + row)
        x_hat = (x - mean) * rstd

        # This row's terms of dw and db.
        dw += dy * x_hat
        db += dy

        if dx_ptr is not None:
            # Load w again for every row. It comes from a cache, and keeping
            # it would take registers away from other programs.
            wdy = dy
            if w_ptr is not None:
                w = tl.load(w_ptr + cols, mask=mask, other=0).to(acc_dtype)
                wdy = w * dy
            # The formula that autograd has checked.
            c1 = tl.sum(x_hat * wdy) / N
            c2 = tl.sum(wdy) / N
            dx = (wdy - x_hat * c1 - c2) * rstd
            tl.store(dx_ptr + offsets, dx, mask=mask)

    # Store both sums in the buffer of this program: dw first, then db.
    if buffers_ptr is not None:
        buffer_ptr = buffers_ptr + tl.program_id(0) * 2 * N
        tl.store(buffer_ptr + cols, dw, mask=mask)
        tl.store(buffer_ptr + N + cols, db, mask=mask)


# %%
# The second kernel sees the buffers as one matrix with a row per program and
# ``2 * N`` columns. The first half of the columns is ``dw``, and the second
# half is ``db``.
# Each program adds up 16 columns.
# Its tile has two dimensions and takes 256 buffers at a time, which keeps many
# bytes in flight.


@triton.jit
def _layer_norm_bwd_add_up(
    buffers_ptr,  # (programs, WIDTH)
    grads_ptr,  # (WIDTH,): dw, then db
    programs,  # how many buffers there are
    WIDTH: tl.constexpr,  # 2 * N
    ROWS: tl.constexpr,  # buffers loaded at a time
    COLS: tl.constexpr,  # columns per program
):
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)

    # Each element of the tile has a sum of its own.
    total = tl.zeros((ROWS, COLS), buffers_ptr.dtype.element_ty)
    for first in range(0, programs, ROWS):
        # [:, None] makes a column of the row numbers, as in NumPy. With the
        # row of column numbers it gives a tile of ROWS x COLS.
        rows = first + tl.arange(0, ROWS)[:, None]
        mask = (rows < programs) & (cols < WIDTH)
        offsets = rows * WIDTH + cols
        total += tl.load(buffers_ptr + offsets, mask=mask, other=0)

    # Add up the rows of the tile. Only this store rounds to the type of grads.
    tl.store(grads_ptr + cols, tl.sum(total, axis=0), mask=cols < WIDTH)


# %%

# Scaffold: the launch of the second kernel.


def add_up_buffers(buffers, dtype):
    """dw and db, as a (2, N) tensor, from (programs, 2, N) buffers."""
    programs, _, N = buffers.shape
    grads = torch.empty(2, N, dtype=dtype, device=buffers.device)
    columns_per_program = 16
    grid = (triton.cdiv(2 * N, columns_per_program),)
    _layer_norm_bwd_add_up[grid](
        buffers_ptr=buffers,
        grads_ptr=grads,
        programs=programs,
        WIDTH=2 * N,
        ROWS=256,
        COLS=columns_per_program,
        num_warps=8,
    )
    return grads


# %%
# How many programs should share an SM?
#
# Many, because while one computes, the others keep the memory busy.
# But there are two reasons not to start too many:
#
# - **Registers.** For each column of its tile, a program holds ``dw``, ``db``,
#   ``x`` and ``dy`` in float32, which takes 16 bytes. A tile of 4096 columns
#   takes 64 KB of the 256 KB of an SM, and addresses and intermediate results
#   need registers, too. So three programs fit. With a tile of 8192 columns two
#   fit, but only while a part of the tile is masked: for a row of 8192 columns
#   or more there is room for just one.
# - **Buffers.** Each program means one more buffer to write and read back. In
#   narrow rows more programs would fit than we start. When we tried it on an
#   H100, one more on each SM made little difference, and several more were
#   slower.
#
# A program that has an SM to itself gets 16 warps, because it has to keep the
# whole SM busy.


def count_sms():
    """SMs of this GPU; a few for the interpreter, which is slow."""
    if not ON_GPU:
        return 4
    return torch.cuda.get_device_properties(DEVICE).multi_processor_count


NUM_SMS = count_sms()


def plan_backward(N):
    """Programs on each SM, and warps of each program."""
    if N <= 1024:
        return 6, 4
    if N <= 2048:
        return 4, 4
    if N <= 4096:
        return 3, 4
    if N < 8192:
        return 2, 4
    return 1, 16


print("columns  programs on an SM  KB that they request at a time")
for N in WIDTHS:
    programs_per_sm, num_warps = plan_backward(N)
    row_bytes = 2 * N  # in float16
    requested = programs_per_sm * 2 * row_bytes  # a row of x and one of dy
    print(f"{N:7}{programs_per_sm:18}{requested / 1024:28.0f}")

# %%
# We will come back to this table at the last figure.
#
# A function to train with
# ------------------------
#
# How does autograd call our kernels?
#
# A ``torch.autograd.Function`` holds both passes and hands tensors from the
# first to the second.
# Rows of up to 16384 columns, which is ``MAX_COLUMNS``, stay in registers.
# Wider rows take three sweeps, and on this page they have no backward pass.
#
# It also takes care of layouts. Our kernels expect rows that follow one
# another in memory, but ``y.sum().backward()``, for instance, hands over a
# ``dy`` that is a single number with strides of 0. A kernel would read far
# beyond it.

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


class LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, b, eps):
        x = contiguous_or_none(x)
        w = contiguous_or_none(w)
        b = contiguous_or_none(b)
        if x.shape[1] <= MAX_COLUMNS:
            y, mean, rstd = forward_in_registers(x, w, b, eps)
        else:
            y, mean, rstd = forward_in_sweeps(x, w, b, eps)
        ctx.save_for_backward(x, w, mean, rstd)
        ctx.grads_dtype = dtype_of_weight_gradients(w, b, mean.dtype)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable  # no second derivatives
    def backward(ctx, dy):
        x, w, mean, rstd = ctx.saved_tensors
        wants_dx, wants_dw, wants_db, _ = ctx.needs_input_grad
        M, N = x.shape
        programs_per_sm, num_warps = plan_backward(N)
        programs = min(M, programs_per_sm * NUM_SMS)

        # A gradient that nobody wants is None, and its code is not compiled.
        dx = None
        if wants_dx:
            dx = torch.empty_like(x)
        buffers = None
        if wants_dw or wants_db:
            shape = (programs, 2, N)
            buffers = torch.empty(shape, dtype=mean.dtype, device=x.device)

        _layer_norm_bwd[(programs,)](
            dy_ptr=dy.contiguous(),
            x_ptr=x,
            w_ptr=w,
            mean_ptr=mean,
            rstd_ptr=rstd,
            dx_ptr=dx,
            buffers_ptr=buffers,
            M=M,
            N=N,
            BLOCK_SIZE=triton.next_power_of_2(N),
            num_warps=num_warps,
        )

        dw = None
        db = None
        if buffers is not None:
            grads = add_up_buffers(buffers, ctx.grads_dtype)
            if wants_dw:
                dw = grads[0]
            if wants_db:
                db = grads[1]
        # One gradient for each argument of forward; eps has none.
        return dx, dw, db, None


# %%
# What does a user see?
#
# One function, with the arguments of ``torch.nn.functional.layer_norm``.
# It checks them first, because a kernel that is given the wrong shape does not
# complain: it reads memory that belongs to another tensor. A tensor on the
# wrong device is refused too: Triton starts a kernel on the current GPU, and
# the tensor may be on another one.

# %%

# Scaffold: the arguments of layer norm are checked.


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

    trains = any(tensor.requires_grad for tensor in tensors.values())
    if trains and torch.is_grad_enabled() and shape.numel() > MAX_COLUMNS:
        raise ValueError(
            f"normalized_shape has {shape.numel()} columns; with gradients, "
            f"at most {MAX_COLUMNS} are possible (the page Every width has no "
            "limit)"
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


try:
    layer_norm(torch.ones(2, 8, device=DEVICE), normalized_shape=7)
except ValueError as error:
    print(f"ValueError: {error}")

# %%
# Is it right?
# ------------
#
# Every computation rounds, so we compare with one that rounds far less: we
# take the same inputs in float64 and let PyTorch compute both passes.
# We look at each element, because one wrong element in nine million would not
# show in an average. An element may be off by the sum of two amounts:
#
# - Half the distance to the next number of its type, because it is rounded
#   when it is stored.
# - What the sums before that lose in float32. For this we allow 64 rounding
#   steps of float32, at the typical size of the whole result.

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
for dtype in (torch.float16, torch.float32):
    check(layer_norm, *shape, dtype)

# %%
# One more check needs no reference at all.
# Without ``w`` and ``b``, each row of ``y`` adds up to 0, whatever ``x`` is.
# So the gradient of this sum must be 0.
# This check also hands our function a ``dy`` with strides of 0.

# x is the matrix of three rows from the beginning, in float64.
layer_norm(x, normalized_shape=4).sum().backward()
largest = x.grad.abs().max().item()
assert largest < 1e-9
print(f"gradient of the sum of y: {largest:.0e}")

# %%
# How fast is the backward pass?
# ------------------------------
#
# The backward pass must read ``x`` and ``dy`` and write ``dx``.
# So its ceiling reads two matrices and writes one: the line "Copy" is now an
# addition of two matrices.
# Our kernels also write the buffers and read them back, and each time that is
# 8 bytes per column and program. We give ourselves no credit for these bytes:
# they make us slower, as they should.

# %%

# Scaffold: the backward pass, a benchmark.


def our_layer_norm(x, w, b, eps):
    """Our function, with the arguments of pytorch_layer_norm."""
    return layer_norm(x, (x.shape[1],), w, b, eps)


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=WIDTHS,
        line_arg="provider",
        line_vals=["triton", "torch", "torch.compile", "copy"],
        line_names=["Triton", "PyTorch", "torch.compile", "Copy"],
        ylabel="GB/s",
        plot_name="layer-norm-backward",
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

            def backward():
                return torch.autograd.grad(y, (x, w, b), dy, retain_graph=True)

            return backward

        bytes_moved = 3 * M * N * dtype.itemsize  # read x and dy, write dx
        return speed(bytes_moved, prepare)

    if provider == "triton":
        return speed_of(our_layer_norm)
    if provider == "torch":
        return speed_of(pytorch_layer_norm)
    if provider == "torch.compile":
        return best_of_three_compilations(pytorch_layer_norm, speed_of)
    return ceiling(2, 1, (M, N), dtype)


# %%

report(bench_backward)

# %%
# **What the figure shows.**
# On the H200, our backward pass reaches 72% of the copy at 4096 columns, and
# between 52% and 72% over all widths.
# PyTorch reaches 39% of the copy at 4096 columns. Ours is 1.6 to 2.1 times as
# fast as PyTorch at every width, and 1.3 to 2.3 times as fast as
# torch.compile.
# On the H100, our backward pass reaches between 60% and 85% of the copy over
# all widths.
#
# **Why we are ahead of PyTorch.**
# `PyTorch's kernels <https://github.com/pytorch/pytorch/blob/v2.11.0/aten/src/ATen/native/cuda/layer_norm_kernel.cu>`_
# for ``dw`` and ``db`` read ``x`` and ``dy`` again, after the kernel for
# ``dx`` has read them.
# (That kernel reads each row twice, too, but in rows of these widths a cache
# can help the second time.)
# Unless L2 still holds them, five matrices have to move instead of three. Then
# PyTorch can reach at most three fifths of the copy, even with kernels that
# move bytes as fast as the copy does.
#
# **Why we are behind the copy.**
# A program requests a row, waits for it, computes, and only then requests the
# next one. So what counts is how much the programs of an SM request at a time,
# the last column of our table. Compare it with the figure of the H200:
#
# - With 24 KB, at 1024 and 1536 columns, we reach 52% and 57% of the copy.
# - With 32 to 36 KB, at 2048, 3072, 4608, 8192 and 8704 columns, we reach
#   between 59% and 66%.
# - With 48 KB, at 4096, 6144 and 12288 columns, we reach 71% to 72%.
#
# The H100 shows the same three groups: 60% and 64%, then between 71% and 76%,
# then between 78% and 85%.
# On the H200 it makes little difference whether the bytes are requested by one
# program, as at 12288 columns, or by three, as at 4096.
# At 1024 columns there is more to move, too: the programs write 6.5 MB of
# buffers and read them back, beside matrices of 25 MB.
#
# One width does not fit this pattern.
# At 15872 columns the program requests 62 KB, more than at any other width,
# and reaches 53% of the copy on the H200.
# A tile of 16384 columns takes 16 bytes for each column. That is 256 KB, all
# the registers of an SM, and nothing is left for intermediate results.
# So the compiler has to *spill* some values, which means that it keeps them in
# memory.
# Rows of 8704 and of 12288 columns have the same tile and spill nothing,
# because the compiler drops what is always masked, a quarter of the tile at
# 12288 columns.
#
# **What follows.**
# A program should request its next row before it is done with this one, and
# `Loads in flight <04-loads-in-flight.html>`_ does that.
# And 4608 columns should not take the registers of 8192, which is the subject
# of `Chunks instead of padding <05-chunks.html>`_.
#
# Where PyTorch or a library is better
# ------------------------------------
#
# When should you not use this function?
#
# - **torch.compile can be faster forward.** On the H200 it is faster than ours
#   at 1024 columns, and on the H100 at 1024, 6144 and 8192 columns.
# - **torch.compile fuses.** It can compute a layer norm together with what
#   comes before and after it, and that can save whole matrices. We have to do
#   it by hand, as in `Add, then normalize <../fused/01-add-layer-norm.html>`_.
# - **PyTorch can do more.** It has second derivatives, and we have none. With
#   gradients, our rows may have at most 16384 columns; `Every width
#   <11-every-width.html>`_ removes this limit.
# - **PyTorch starts sooner.** It does not have to compile a kernel for each
#   new width, and its host code is in C++. Ours is in Python, and with small
#   matrices you wait for it: see `Host time <10-host-time.html>`_.
# - **Libraries have kernels of their own.** `Every width
#   <11-every-width.html>`_ measures those of `Liger
#   <https://github.com/linkedin/Liger-Kernel>`_, `quack
#   <https://github.com/Dao-AILab/quack>`_, `Apex
#   <https://github.com/NVIDIA/apex>`_ and `flash-attn
#   <https://github.com/Dao-AILab/flash-attention>`_, and says where they are
#   faster.
#
# Exercise 1: the backward pass of RMS norm
# -----------------------------------------
#
# *RMS norm* is layer norm without the mean and without ``b``. It divides a row
# by the root of its mean square, and many language models use it:
#
# .. math::
#
#    r = \Bigl(\frac{1}{N} \sum_j x_j^2\Bigr)^{-1/2}, \qquad
#    \hat{x}_j = r \, x_j, \qquad
#    y_j = w_j \, \hat{x}_j
#
# Write its ``dx``. The stub below forgets that every element of the row is
# also used in ``r``.
# Change it in the script or the notebook, and run that until it prints
# ``right: True``. (Below that line it prints the sums of our solution.)
#
# You don't need a reference to see whether you are right.
# Stretching a row of ``x`` changes nothing in ``y``, so the products of a row
# of ``dx`` and the same row of ``x`` must add up to 0. The checker prints
# these sums.
#
# **Hint 1.** Go through the four steps above. The first stays as it is. In the
# second, the mean square takes the place of the variance. There is no third
# step: which of the three terms of step 4 is gone?
#
# **Hint 2.** Look at the formula for ``dx`` of layer norm. Which of ``c1`` and
# ``c2`` came from the mean, and which one removes the part of ``g`` that
# stretches the row?


def rms_norm_dx(wdy, x_hat, r):
    """dx of RMS norm; wdy is w * dy, and r is one number per row."""
    return r * wdy


def exercise_1(rms_norm_dx):
    """Print the sums of the rows, and say whether dx is that of autograd."""
    # The tensors are those of the first example.
    r = 1 / (x * x).mean(dim=1, keepdim=True).sqrt()
    x_hat = x * r
    (exact,) = torch.autograd.grad(x_hat * w, x, dy)
    your_dx = rms_norm_dx(w * dy, x_hat, r)
    sums = (your_dx * x).sum(dim=1)
    print("sums of the rows:", *[f"{value:.1e}" for value in sums.tolist()])
    return torch.allclose(your_dx, exact)


print("right:", exercise_1(rms_norm_dx))

# %%

# Solution 1


def rms_norm_dx_1(wdy, x_hat, r):
    # The mean is not subtracted, so c2, which came from it, is gone. c1 came
    # from the factor r, and stays.
    c1 = (x_hat * wdy).mean(dim=1, keepdim=True)
    return r * (wdy - x_hat * c1)


assert exercise_1(rms_norm_dx_1)

# %%
# What we learned
# ---------------
#
# These are the designs of this page: what each moves, how fast it is, and why.
#
# Forward:
#
# - **A row in registers** moves two matrices. On the H200 it reaches 76% to
#   94% of a copy, because each byte moves once.
# - **Three sweeps** ask for four matrices. One of them comes from DRAM, and
#   one goes there. On the H200 they reach 86% to 93% of a copy from 4608
#   columns on, because L2 still has the row.
# - **PyTorch** reads each row twice, so it asks for three matrices. On the
#   H200 it reaches 44% to 58% of a copy.
# - **torch.compile** reaches 39% to 90% of a copy on the H200. We have not
#   looked at its kernels.
#
# Backward:
#
# - **A buffer for each program** moves three matrices and the buffers. On the
#   H200 it reaches 52% to 72% of the copy, because programs wait for rows.
# - **PyTorch** asks for five matrices or more, because it reads ``x`` and
#   ``dy`` again. On the H200 it reaches 30% to 39% of the copy.
# - **torch.compile** reaches 28% to 52% of the copy on the H200. We have not
#   looked at its kernels.
#
# And for kernels in general:
#
# - A kernel that computes little is only as fast as its memory traffic, so
#   count bytes first.
# - What programs ask for is not what DRAM delivers: there are caches in
#   between.
# - A memory stays busy only while enough bytes are in flight.
# - A sum over all rows needs no lock. Give each program a buffer, and the
#   result has the same bits every time.
#
# **Next:** are buffers really the best way to sum over rows?
# `Who adds up the rows? <02-summing-rows.html>`_ counts and measures four
# designs.
