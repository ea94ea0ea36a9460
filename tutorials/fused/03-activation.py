r"""
A function as a constant
========================

How does one kernel fuse any activation with the layer norm behind it?
A function that returns its value and its slope is handed to the kernel as a
constant, and the compiler puts its instructions in place of the call.

Here it is SiLU, :math:`x` times its sigmoid, or GELU, or one of your own.

**What you will learn**

- How to hand a function to a Triton kernel, and what the compiler makes of it.
- What a function costs alone, where one hardly sees it, and beside the sums of
  a row, where one does.
- How to shorten a function to the few instructions that a GPU has for it.
- How to keep a slope from overflowing where inputs are large.
- What it takes to recompute an activation in the backward pass, and what to
  save it.

**What you need:** `Chunks instead of padding
<../layer-norm/05-chunks.html>`_, whose kernels we extend. You don't need a
GPU.
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
# One kernel or two?
# ------------------
#
# In some models an activation stands right before a norm. With a kernel for
# each, one kernel writes the activations, and the next one reads them.
# Let's count the matrices that move, each of ``M`` × ``N`` numbers.
#
# - **Forward, two kernels:** the first reads ``x`` and writes the activation
#   ``a``. The second reads ``a`` and writes ``y``. That is four.
# - **Forward, one kernel:** it reads ``x`` and writes ``y``. That is two.
# - **Backward, two kernels:** the first reads ``dy`` and ``a``, and writes the
#   gradient of ``a``. The second reads that and ``x``, and writes ``dx``. That
#   is six.
# - **Backward, one kernel:** it reads ``dy`` and ``x``, and writes ``dx``.
#   That is three.
#
# So one kernel moves half as much in both passes. But there are many
# activations, and we don't want to write a layer norm for each.
#
# How does a kernel take a function?
# ----------------------------------
#
# First we write the function. For each number it returns two: its value, and
# its *slope*, which is the derivative that the backward pass needs.
#
# .. math::
#    f(x) = x \, \sigma(x), \qquad
#    f'(x) = \sigma(x) \, (1 + x \, (1 - \sigma(x)))
#
# This is SiLU, and :math:`\sigma` is the sigmoid. At 0 the sigmoid is 0.5, so
# the value is 0, and the slope is 0.5.


@triton.jit
def _silu_plain(x):
    sigmoid = tl.sigmoid(x)
    return x * sigmoid, sigmoid * (1 + x * (1 - sigmoid))


# %%
# The kernel has an argument ``ACT`` for it, and calls it like any function.
# ``ACT`` is a ``tl.constexpr``: its value is known when the kernel is
# compiled. So the compiler puts the instructions of the function in place of
# the call, and no call is left when the kernel runs. The price is that it
# compiles another kernel for each function that is handed over.


@triton.jit
def _apply(
    x_ptr,  # (size,)
    y_ptr,  # (size,)
    slope_ptr,  # (size,), or None if nobody wants the slope
    size,
    ACT: tl.constexpr,  # the function
    BLOCK_SIZE: tl.constexpr,
):
    start = tl.program_id(0).to(tl.int64) * BLOCK_SIZE
    index = start + tl.arange(0, BLOCK_SIZE)
    mask = index < size
    x = tl.load(x_ptr + index, mask=mask, other=0)
    # 16-bit numbers are computed in float32.
    acc: tl.constexpr = tl.float64 if x.dtype == tl.float64 else tl.float32
    value, slope = ACT(x.to(acc))
    tl.store(y_ptr + index, value, mask=mask)
    # Without slope_ptr nobody uses the slope, and the compiler drops the
    # instructions that compute it.
    if slope_ptr is not None:
        tl.store(slope_ptr + index, slope, mask=mask)


def apply(x, function, slope=None):
    """function(x) for a contiguous x; its slope is written if wanted."""
    y = torch.empty_like(x)
    block_size = 2048
    _apply[(triton.cdiv(x.numel(), block_size),)](
        x_ptr=x,
        y_ptr=y,
        slope_ptr=slope,
        size=x.numel(),
        ACT=function,
        BLOCK_SIZE=block_size,
    )
    return y


# %%
# Here is the kernel with two functions. The second one is a square, whose
# slope is 2 x.


@triton.jit
def _square(x):
    return x * x, 2 * x


x = torch.tensor([-1.0, 0.0, 1.0, 2.0], device=DEVICE)
for name, function in (("SiLU", _silu_plain), ("square", _square)):
    slope = torch.empty_like(x)
    y = apply(x, function, slope)
    print(f"{name}: {[round(number, 3) for number in y.tolist()]}")
    print(f"its slope: {[round(number, 3) for number in slope.tolist()]}")

x = torch.linspace(-6, 6, 100, device=DEVICE)
y = apply(x, _silu_plain)
print("SiLU is right:", torch.allclose(y, F.silu(x), atol=1e-6))

# %%
# What does a function cost alone?
# --------------------------------
#
# We compare the kernel with one that only copies. The clock and the ceiling
# are those of `Layer normalization, both passes
# <../layer-norm/01-layer-norm.html>`_, which explains them.

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

# Scaffold: the function alone, a benchmark.


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=[1024, 2048, 4096, 8192],
        line_arg="provider",
        line_vals=["triton", "copy"],
        line_names=["x * tl.sigmoid(x)", "Copy"],
        ylabel="GB/s",
        plot_name="activation-alone",
        args={"M": 4096, "dtype": torch.float16, "mode": "forward"},
    )
)
def bench_alone(M, N, dtype, mode, provider):
    """Device time: a CUDA graph of several calls, each with inputs of its own
    and after L2 was overwritten, less the graph without the calls; median, 20%
    and 80% quantiles. Copy: the best of six tiles."""
    if not ON_GPU:
        return 3 * [float("nan")]  # the interpreter cannot be timed
    if provider == "copy":
        return ceiling(reads=1, writes=1, shape=(M, N), dtype=dtype)

    def prepare():
        x = torch.randn(M, N, device=DEVICE).to(dtype)
        return lambda: apply(x, _silu_plain)

    bytes_moved = 2 * M * N * dtype.itemsize  # read x, write y
    return speed(bytes_moved, prepare)


# %%

report(bench_alone)

# %%
# **What the figure shows.**
# Alone, a function costs little. On the H200 the kernel reaches 92% to 100% of
# a copy, and it is lowest at 2048 columns.
#
# **Why.**
# Many programs share an SM. While one computes its sigmoids, others wait for
# memory, which takes longer. (We do not know what is special at 2048 columns:
# this kernel treats a matrix as one long row.)
#
# **What follows.**
# The kernel of an activation cannot be made much faster. But we can do without
# it, and save the matrices that it moves.
#
# Forward, with the norm
# ----------------------
#
# Where does the function go in a layer norm?
# The kernel is that of `chunks <../layer-norm/05-chunks.html>`_. It calls
# ``ACT`` once for each chunk that it has loaded, keeps the values, and
# normalizes them instead of ``x``.

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


# %%
# One thing is new. A lane that holds no column is loaded as 0. In a layer norm
# it added 0 to the sum. Now it would add :math:`f(0)`, which is 0 for SiLU,
# but 0.5 for a sigmoid. So the kernel sets these lanes to 0 after the call.
#
# The values stay in float32, which takes twice the registers of ``x`` in 16
# bits. There are two other ways. We could round the values to 16 bits, as
# PyTorch does between its two functions, and lose some of their accuracy. Or
# we could keep ``x`` and compute the values anew for the mean, for the
# variance and for ``y``, and pay for the function each time.


@triton.jit
def _activation_layer_norm_fwd(
    x_ptr,  # (M, N), contiguous
    w_ptr,  # (N,); None counts as 1
    b_ptr,  # (N,); None counts as 0
    y_ptr,  # (M, N)
    mean_ptr,  # (M,): of the activations, saved for the backward pass
    rstd_ptr,  # (M,): 1 / standard deviation, saved as well
    M,  # rows
    eps: tl.constexpr,  # added to the variance
    N: tl.constexpr,  # columns
    ROWS: tl.constexpr,  # rows that a program takes
    CHUNK: tl.constexpr,  # lanes of a chunk in each row
    ACT: tl.constexpr,  # New: the function
):
    acc: tl.constexpr = mean_ptr.dtype.element_ty  # float32, or float64

    # Load our rows.
    first = tl.program_id(0) * ROWS
    left = M - first
    start = tl.cast(first, tl.int64) * N  # M * N may pass 2**31
    xs = _load_chunks(x_ptr + start, N, left, N, ROWS, CHUNK, "")

    # New: the activations, as a tuple of chunks, and their sum.
    values = ()
    total = tl.zeros((ROWS, CHUNK), acc)
    for c in tl.static_range(len(xs)):
        _, _, mask = _chunk(c, left, N, ROWS, CHUNK)
        value, _ = ACT(xs[c].to(acc))
        values += (tl.where(mask, value, 0),)  # f(0) need not be 0
        total += values[c]
    mean = tl.sum(total, axis=1)[:, None] / N

    # The variance.
    total = tl.zeros((ROWS, CHUNK), acc)
    for c in tl.static_range(len(xs)):
        _, _, mask = _chunk(c, left, N, ROWS, CHUNK)
        d = tl.where(mask, values[c] - mean, 0)  # idle lanes: 0 again
        total += d * d
    rstd = 1 / tl.sqrt(tl.sum(total, axis=1)[:, None] / N + eps)

    # mean and rstd are columns of ROWS numbers.
    row = tl.arange(0, ROWS)[:, None]
    tl.store(mean_ptr + first + row, mean, mask=row < left)
    tl.store(rstd_ptr + first + row, rstd, mask=row < left)

    # w and b are loaded late, so that they take no registers until now.
    for c in tl.static_range(len(xs)):
        i, j, mask = _chunk(c, left, N, ROWS, CHUNK)
        y = (values[c] - mean) * rstd
        if w_ptr is not None:
            w = tl.load(w_ptr + j, mask=j < N, eviction_policy="evict_last")
            y *= w.to(acc)
        if b_ptr is not None:
            b = tl.load(b_ptr + j, mask=j < N, eviction_policy="evict_last")
            y += b.to(acc)
        tl.store(y_ptr + start + (i * N + j), y, mask=mask)


# %%
# While one program computes, the rows of others must be on their way, so
# programs are small: 2 warps for rows of up to 2 KB, 4 up to 10 KB, and 8
# beyond. A thread loads 16 bytes at a time. Where more than a ninth of the
# lanes would be idle, a program has 4 warps and chunks of 1 KB, of which a
# thread loads 8 bytes.
#
# Further below we write a shorter sigmoid. This first one, the *plain* one,
# takes more registers, so it has a plan of its own for wide rows, which tells
# the compiler how many a thread may have. We chose this plan from several that
# we measured, so that the comparison is fair.

CUDA = ON_GPU and torch.version.hip is None
PTX = tl.constexpr(CUDA)


def tile_of(N, itemsize, warps):
    """Rows and lanes of a chunk, of which a thread loads 16 bytes."""
    chunk = min(512 // itemsize * warps, max(triton.next_power_of_2(N), 16))
    rows = 512 // itemsize * warps // chunk
    return {"ROWS": rows, "CHUNK": chunk, "num_warps": warps}


def plan_forward(N, itemsize):
    row = N * itemsize
    warps = 8
    if row <= 10240:
        warps = 4
    if row <= 2048:
        warps = 2
    plan = tile_of(N, itemsize, warps)
    idle = -N % plan["CHUNK"]
    if row > 2048 and 8 * idle > N:
        plan["CHUNK"] = 1024 // itemsize
        plan["num_warps"] = 4
    return plan


def plan_plain(N, itemsize):
    """The same for narrow rows, and what a plain sigmoid wants for wide."""
    row = N * itemsize
    if not CUDA or row <= 12288:
        return plan_forward(N, itemsize)
    if row <= 14336:
        plan = tile_of(N, itemsize, warps=4)
        plan["maxnreg"] = 80
    else:
        plan = tile_of(N, itemsize, warps=8)
        plan["maxnreg"] = 64
    return plan


def forward(x, w, b, eps, function, rule=plan_forward):
    """y, mean and rstd for a contiguous (M, N) x; w and b may be None."""
    M, N = x.shape
    y = torch.empty_like(x)
    # 16-bit rows are summed in float32.
    acc = torch.promote_types(x.dtype, torch.float32)
    mean = torch.empty(M, dtype=acc, device=x.device)
    rstd = torch.empty(M, dtype=acc, device=x.device)
    plan = rule(N, x.itemsize)
    _activation_layer_norm_fwd[(triton.cdiv(M, plan["ROWS"]),)](
        x_ptr=x,
        w_ptr=w,
        b_ptr=b,
        y_ptr=y,
        mean_ptr=mean,
        rstd_ptr=rstd,
        M=M,
        eps=eps,
        N=N,
        ACT=function,
        **plan,
    )
    return y, mean, rstd


# %%
# Does one see the function now, beside the sums of a row?

# %%

# Scaffold: inputs of SiLU and a layer norm.


def inputs(M, N, dtype):
    """x, w, b and dy."""
    torch.manual_seed(0)
    x = torch.randn(M, N, device=DEVICE)
    w = torch.rand(N, device=DEVICE)
    b = torch.rand(N, device=DEVICE)
    dy = torch.randn(M, N, device=DEVICE)
    x = x.to(dtype).requires_grad_()
    w = w.to(dtype).requires_grad_()
    b = b.to(dtype).requires_grad_()
    return x, w, b, dy.to(dtype)


# %%

# Scaffold: the plain sigmoid, a benchmark.


def plain(x, w, b, eps):
    """The forward pass with tl.sigmoid."""
    return forward(x, w, b, eps, _silu_plain, plan_plain)


def speed_forward(M, N, dtype, function):
    """GB/s of function(x, w, b, eps=...), which saves what backward needs."""

    def prepare():
        x, w, b, _ = inputs(M, N, dtype)
        return lambda: function(x, w, b, eps=1e-5)

    bytes_moved = 2 * M * N * dtype.itemsize  # read x, write y
    return speed(bytes_moved, prepare)


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=[1024, 2048, 4096, 5120, 7168, 8192],
        line_arg="provider",
        line_vals=["plain", "copy"],
        line_names=["x * tl.sigmoid(x)", "Copy"],
        ylabel="GB/s",
        plot_name="silu-layer-norm-plain",
        args={"M": 4096, "dtype": torch.float16, "mode": "forward"},
    )
)
def bench_plain(M, N, dtype, mode, provider):
    """Device time: a CUDA graph of several calls, each with inputs of its own
    and after L2 was overwritten, less the graph without the calls; median, 20%
    and 80% quantiles. Copy: the best of six tiles."""
    if not ON_GPU:
        return 3 * [float("nan")]
    if provider == "plain":
        return speed_forward(M, N, dtype, plain)
    return ceiling(reads=1, writes=1, shape=(M, N), dtype=dtype)


# %%

report(bench_plain)

# %%
# **What the figure shows.**
# On the H200 the kernel reaches 70% to 86% of a copy, where the function alone
# reached 92% or more.
#
# **Why.**
# A part of what is missing is due to the norm: `Chunks instead of padding
# <../layer-norm/05-chunks.html>`_ measures it without a function, on another
# card. Another part is due to the function, and a shorter one will show how
# much.
# A program that adds up a row waits for all its elements, and loads nothing
# in the meantime. The function is computed in this gap, between the last load
# and the first store, so its instructions make the gap longer. The other
# programs on the SM fill it only in part.
#
# **What follows.**
# Fewer instructions should help. Where do they come from?
#
# A shorter sigmoid
# -----------------
#
# A sigmoid is :math:`1 / (1 + e^{-x})`. NVIDIA GPUs have an instruction for
# :math:`2^x` and one for :math:`1/x`. ``tl.sigmoid`` adds others around them,
# for numbers at both ends of the range of float32. A sigmoid does not need
# those others:
#
# - Where :math:`e^{-x}` is too small for the plain instruction, that returns
#   0. Adding 1 gives 1, as it would with the exact number.
# - Where :math:`e^{-x}` is too large, the result becomes 0. The right result
#   is less than :math:`10^{-37}`.
#
# Without them, four instructions are enough. Triton has no name for these two
# approximations, so we write them in PTX, the assembly language of NVIDIA's
# GPUs. In float64, and on other GPUs, the function is still ``tl.sigmoid``.


@triton.jit
def _sigmoid(x):
    if PTX and x.dtype == tl.float32:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .f32 a;
            mul.f32 a, $1, 0fBFB8AA3B;  // -log2(e)
            ex2.approx.ftz.f32 a, a;
            add.f32 a, a, 0f3F800000;  // 1
            rcp.approx.ftz.f32 $0, a;
            }
            """,
            "=f,f",  # one result and one argument, both in registers
            [x],
            dtype=tl.float32,
            is_pure=True,  # the compiler may drop or move it
            pack=1,  # an element at a time
        )
    else:
        return tl.sigmoid(x)


@triton.jit
def _silu(x):
    sigmoid = _sigmoid(x)
    return x * sigmoid, sigmoid * (1 + x * (1 - sigmoid))


# %%
# Only the function has changed, and the kernel takes it as it took the plain
# one. We measure both, PyTorch's two functions, and the same two through
# ``torch.compile``, which also fuses them.

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

# Scaffold: SiLU and the norm forward, a benchmark.


def our_forward(x, w, b, eps):
    """The forward pass with the short sigmoid."""
    return forward(x, w, b, eps, _silu)


def pytorch_silu_layer_norm(x, w, b, eps):
    """PyTorch's two functions, with the arguments of our kernels."""
    return F.layer_norm(F.silu(x), (x.shape[1],), w, b, eps)


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=[1024, 2048, 4096, 5120, 7168, 8192],
        line_arg="provider",
        line_vals=["triton", "plain", "torch", "torch.compile", "copy"],
        line_names=["Triton", "plain", "PyTorch", "torch.compile", "Copy"],
        ylabel="GB/s",
        plot_name="silu-layer-norm-forward",
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
        return speed_of(our_forward)
    if provider == "plain":
        return speed_of(plain)
    if provider == "torch":
        return speed_of(pytorch_silu_layer_norm)
    if provider == "torch.compile":
        return best_of_three_compilations(pytorch_silu_layer_norm, speed_of)
    return ceiling(reads=1, writes=1, shape=(M, N), dtype=dtype)


# %%

report(bench_forward)

# %%
# **What the figure shows.**
# On the H200 the short sigmoid reaches 71% to 90% of a copy, and the plain one
# 70% to 85%. It is up to 1.2 times as fast as the plain one.
# Forward, ours is 2.3 to 2.6 times as fast as PyTorch, and 1.0 to 2.2 times as
# fast as torch.compile.
# On the H100 the short sigmoid reaches 80% to 96% of a copy, the plain one 79%
# to 95%, PyTorch 37% to 42%, and torch.compile 50% to 78%. The short one is at
# most 6% faster there: the memory of that card is slower and its SMs are the
# same, so the gap in which a program computes is a smaller part of its time.
#
# The plain kernel was measured in the figure before as well. Its speeds in the
# two figures lie up to 0.2% apart, so do not read much into differences as
# small as that.
#
# **Why.**
# Our two kernels differ in the instructions of the sigmoid, and from 7168
# columns on also in their plans. On the H200 the gain is largest at 5120
# columns, where the plan is the same for both, and the short one is 16%
# faster. At 1024 columns it is 1% faster, and both are far from a copy. So
# something else holds them back there. We have not looked into what that is.
#
# PyTorch's two kernels move four matrices in place of two. Where L2 does not
# hold the one in between, that leaves them 50% of a copy at most. Its layer
# norm is slower than a copy, too, as all pages on layer norm measure, and so
# on the H200 both together reach 31% to 37%.
#
# torch.compile fuses the two functions as we do. On the H200 it is as fast as
# ours at 1024 columns, and from 2048 on it reaches 38% to 48% of a copy. We
# have not looked at its kernels.
#
# **What follows.**
# In a kernel that waits for sums, count the instructions of a function.
#
# GELU, and its limits at 7.5 and 30
# ----------------------------------
#
# GELU multiplies ``x`` by :math:`\Phi(x)`, the share of a normal distribution
# that is below ``x``. With its density :math:`\varphi(x)`, the slope is
# :math:`\Phi(x) + x \, \varphi(x)`.
# Many models approximate it with ``tanh``. Since
# :math:`1 + \tanh(u/2) = 2 \, \sigma(u)`, that is another sigmoid:
#
# .. math::
#    f(x) = x \, \sigma(u), \qquad
#    u = 2 \sqrt{2/\pi} \, (x + 0.044715 \, x^3)
#
# A function has to be right for each number that may come, and some numbers
# are too large for a formula with a cube. What does float32 make of the slope
# :math:`\sigma(u) \, (1 + x \, u' \, (1 - \sigma(u)))` when ``x`` is far below
# 0?

x = torch.tensor([-3.0, -7.5, -1e4, -1e20])
u = 1.5957691216057308 * (x + 0.044715 * x**3)
du = 1.5957691216057308 * (1 + 3 * 0.044715 * x**2)
sigmoid = torch.sigmoid(u)
print("x:", x.tolist())
print("sigmoid of u:", sigmoid.tolist())
print("slope:", (sigmoid * (1 + x * du * (1 - sigmoid))).tolist())

# %%
# At -1e20 the square is infinite, the sigmoid is 0, and their product is not a
# number (NaN). The right slope is 0, and a NaN in ``dx`` would spread to all
# layers before.
#
# **The limit of 7.5.** If ``x`` is 7.5, ``u`` is 42, and the sigmoid differs
# from 1 by :math:`5 \cdot 10^{-19}`. The largest number below 1 is
# :math:`6 \cdot 10^{-8}` away in float32 and :math:`10^{-16}` in float64, so
# the sigmoid is rounded to 1, and farther out it stays 1. Nothing changes if
# we compute it at 7.5 for all numbers above.
# Below -7.5 the value is within :math:`5 \cdot 10^{-18}` of 0, and the slope
# within :math:`10^{-16}`. We set the value to 0 there, and leave the slope at
# what it is at -7.5. So the square and the cube only see numbers from -7.5 to
# 7.5.
# The sigmoid is then multiplied by the ``x`` that was given, not by the
# limited one. So above 7.5 the value is ``x``, and a NaN stays a NaN.
#
# **The limit of 30.** In the other form of GELU, :math:`\varphi(x)` contains
# :math:`e^{-x^2/2}`. It is 0 in float32 above 15, and at 30 it is
# :math:`10^{-196}` in float64. So :math:`x \, \varphi(x)` counts as 0 from
# there on. We write this 0 instead of multiplying: if ``x`` is infinite, the
# product of infinity and 0 is NaN, and the slope, which is 1, would be lost.


@triton.jit
def _gelu(x):
    below = 0.5 + 0.5 * tl.erf(x * 0.7071067811865476)  # 1 / sqrt(2)
    density = tl.exp(-0.5 * x * x) * 0.3989422804014327  # 1 / sqrt(2 pi)
    # Beyond 30 the second term is 0; infinity times 0 would not be.
    return x * below, below + tl.where(tl.abs(x) < 30, x * density, 0.0)


@triton.jit
def _gelu_tanh(x):
    # Beyond 7.5 the sigmoid is 1, or as good as 0; the cube would overflow.
    near = tl.minimum(tl.maximum(x, -7.5), 7.5)
    # u, divided by x, and the derivative of u.
    # 2 sqrt(2 / pi) is 1.5957..., and times 0.044715 it is 0.0713...
    u = 1.5957691216057308 + 0.07135481627260025 * near * near
    du = 1.5957691216057308 + 0.21406444881780076 * near * near
    sigmoid = _sigmoid(near * u)
    value = tl.where(x < -7.5, 0.0, x * sigmoid)
    return value, sigmoid * (1 + near * du * (1 - sigmoid))


ACTIVATIONS = {"silu": _silu, "gelu": _gelu, "gelu_tanh": _gelu_tanh}

x = torch.tensor([-1e20, -7.5, 7.5, 1e20], device=DEVICE)
for name, function in ACTIVATIONS.items():
    slope = torch.empty_like(x)
    apply(x, function, slope)
    print(f"slope of {name}: {[round(each, 6) for each in slope.tolist()]}")

# %%
# Recompute or save?
# ------------------
#
# The backward pass needs the activation ``a`` and its slope. Neither of them
# is in memory, because the forward pass kept ``a`` in registers and never
# computed the slope. It could have written one or both. What would that cost?
#
# - **Recompute both:** the forward pass moves ``x`` and ``y``, and the
#   backward pass ``dy``, ``x`` and ``dx``. That is five matrices.
# - **Save the activation:** one more is written, and one more is read. That is
#   seven, and the slope still has to be computed from ``x``.
# - **Save both:** the backward pass reads ``a`` and the slope in place of
#   ``x``. That is eight.
#
# To move 4096 × 4096 numbers of 16 bits takes an H100 about 11 µs at 3.0 TB/s,
# and keeping them takes 32 MiB until the backward pass. Computing them again
# takes two sigmoids an element, as we will see, and no memory. So we
# recompute. (We have not measured kernels that save.)
#
# Backward
# --------
#
# What does the slope change in the backward pass?
#
# .. math::
#    \frac{\partial L}{\partial x} = f'(x) \, \frac{\partial L}{\partial a}
#
# The gradient of ``a`` is that of a layer norm whose input is ``a``. It has
# the terms that we know from `chunks <../layer-norm/05-chunks.html>`_, with
# :math:`d = a - \mu`, :math:`g = w \, dy`, and :math:`r` for ``rstd``:
#
# .. math::
#    \frac{\partial L}{\partial a} = r \, g - (d \, c_1 + c_2), \qquad
#    c_1 = \frac{r^3}{N} \sum g \, d, \qquad
#    c_2 = \frac{r}{N} \sum g
#
# Then each element is multiplied by the slope at its ``x``.
#
# The picture shows the slope of SiLU. It is a little above 1 around 2.4. To
# the left of -1.3, where SiLU falls, it is below 0.

# %%

# Drawing: SiLU and its slope.

x = torch.linspace(-6, 6, 100, device=DEVICE)
slope = torch.empty_like(x)
y = apply(x, _silu, slope)
plt.figure("SiLU and, dashed, its slope", figsize=(7.5, 2))
plt.plot(x.cpu(), y.cpu())
plt.plot(x.cpu(), slope.cpu(), "--")
plt.legend(("SiLU", "its slope"))
plt.show()

# %%
# A row takes two steps, as before. The first one computes the two numbers of
# the row, :math:`c_1` and :math:`c_2`. It needs the activation and not the
# slope, so the compiler drops the slope there.


@triton.jit
def _add_two(a1, a2, b1, b2):
    return a1 + b1, a2 + b2


@triton.jit
def _sums_of_activations(
    xs, dys, ws, mean, rstd, N: tl.constexpr, ACT: tl.constexpr
):
    """Two numbers for each row of a tile, by which dx is corrected."""
    sum1 = tl.zeros(xs[0].shape, mean.dtype)
    sum2 = tl.zeros(xs[0].shape, mean.dtype)
    for c in tl.static_range(len(xs)):
        value, _ = ACT(xs[c].to(mean.dtype))
        # Lanes that hold no column have dy = 0, so they add 0 to both sums.
        wdy = dys[c].to(mean.dtype)
        if len(ws) > 0:
            wdy = wdy * ws[c].to(mean.dtype)
        sum1 += wdy * (value - mean)
        sum2 += wdy
    # Both sums over a row at once, so that its warps meet only once.
    sum1, sum2 = tl.reduce((sum1, sum2), 1, _add_two)
    # From the left: rstd**3 alone may be too large for float32.
    c1 = sum1[:, None] * rstd * rstd * rstd / N
    c2 = sum2[:, None] * rstd / N
    return c1, c2


# %%
# The second step takes each chunk by itself, and calls the function once more.
# Why not keep its values from the first step? They would take a register for
# each lane until then, and registers are scarce in this kernel: ``x``, ``dy``,
# ``w``, and two sums for ``dw`` and ``db`` are there already.


@triton.jit
def _activation_layer_norm_bwd(
    dy_ptr,  # (M, N), contiguous
    x_ptr,  # (M, N), contiguous: the input of the function
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
    ACT: tl.constexpr,  # New: the function
):
    acc: tl.constexpr = mean_ptr.dtype.element_ty

    # w stays in registers for all rows, in its own type.
    ws = ()
    if w_ptr is not None:
        # With a stride of 0, each row of the tile is w.
        ws = _load_chunks(w_ptr, 0, ROWS, N, ROWS, CHUNK, "evict_last")

    # The sums for dw and db, of each lane: tuples of chunks, too.
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

        # Both sums need the whole row, so all chunks come first.
        c1, c2 = _sums_of_activations(xs, dys, ws, mean, rstd, N, ACT)

        # Then each chunk is done by itself. An element of a tuple cannot be
        # replaced, so the sums go into new tuples.
        new_dws = ()
        new_dbs = ()
        for c in tl.static_range(len(xs)):
            # New: the function again, and now its slope as well.
            value, slope = ACT(xs[c].to(acc))
            d = value - mean
            dy = dys[c].to(acc)
            scaled = dy * rstd
            new_dws += (dws[c] + scaled * d,)
            new_dbs += (dbs[c] + dy,)
            if dx_ptr is not None:
                wdy = scaled
                if w_ptr is not None:
                    wdy = scaled * ws[c].to(acc)
                # New: what comes through the norm, times the slope.
                dx = (wdy - (d * c1 + c2)) * slope
                i, j, mask = _chunk(c, left, N, ROWS, CHUNK)
                tl.store(dx_ptr + start + (i * N + j), dx, mask=mask)
        dws = new_dws
        dbs = new_dbs

    # The sums of this program, in its buffer: dw first, then db.
    if sums_ptr is not None:
        sums_ptr += tl.program_id(0) * 2 * N
        for c in tl.static_range(len(dws)):
            col = c * CHUNK + tl.arange(0, CHUNK)
            # Each of the ROWS rows of a tile has sums of its own until now.
            tl.store(sums_ptr + col, tl.sum(dws[c], axis=0), mask=col < N)
            tl.store(sums_ptr + N + col, tl.sum(dbs[c], axis=0), mask=col < N)


# %%
# A second kernel adds up the buffers of all programs, as on `Who adds up the
# rows? <../layer-norm/02-summing-rows.html>`_.


@triton.jit
def _add_up(
    sums_ptr,  # (programs, WIDTH)
    grads_ptr,  # (WIDTH,): dw, then db
    programs,  # how many rows of sums there are
    WIDTH: tl.constexpr,  # 2 * N
    ROWS: tl.constexpr,  # a power of two, at least programs
    COLS: tl.constexpr,  # columns per program
):
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    rows = tl.arange(0, ROWS)[:, None]
    mask = (rows < programs) & (cols < WIDTH)
    sums = tl.load(sums_ptr + rows * WIDTH + cols, mask=mask, other=0)
    tl.store(grads_ptr + cols, tl.sum(sums, axis=0), mask=cols < WIDTH)


# %%
# The plan: for rows of up to 8 KB, each SM has two programs of 4 warps, so
# that one computes sigmoids while the other stores. For wider rows it has one
# program of 8 warps, which needs all registers. Three tiles are requested
# ahead, or as many as fit into shared memory.

GPU = torch.cuda.get_device_properties(DEVICE) if ON_GPU else None
NUM_SMS = GPU.multi_processor_count if ON_GPU else 4
SHARED = getattr(GPU, "shared_memory_per_block_optin", 65536)


def plan_backward(N, itemsize):
    row = N * itemsize
    per_sm = 1
    if row <= 8192:
        per_sm = 2
    plan = tile_of(N, itemsize, 8 // per_sm)
    if row <= 2048:
        plan["ROWS"] = min(2 * plan["ROWS"], 8)
    else:
        plan["ROWS"] = 1
    # A slot of shared memory holds x and dy of a tile; 8 KB are for the sums.
    columns = triton.cdiv(N, plan["CHUNK"]) * plan["CHUNK"]
    tile = 2 * plan["ROWS"] * columns * itemsize
    plan["STAGES"] = 1 + min((SHARED // per_sm - 8192) // tile, 3)
    plan["per_sm"] = per_sm
    return plan


def add_up(sums, grads):
    """Fill grads, dw and db as (2, N), from (programs, 2, N) sums."""
    programs, _, N = sums.shape
    columns_per_program = 16
    _add_up[(triton.cdiv(2 * N, columns_per_program),)](
        sums_ptr=sums,
        grads_ptr=grads,
        programs=programs,
        WIDTH=2 * N,
        ROWS=triton.next_power_of_2(max(programs, 1)),
        COLS=columns_per_program,
    )


def backward(dy, x, w, mean, rstd, dx, grads, function, rule=plan_backward):
    """Fill dx and grads, which are dw and db; either may be None."""
    M, N = x.shape
    plan = rule(N, x.itemsize)
    programs = NUM_SMS * plan.pop("per_sm")
    programs = min(programs, triton.cdiv(M, plan["ROWS"]))
    sums = None
    if grads is not None:
        shape = (programs, 2, N)
        sums = torch.empty(shape, dtype=mean.dtype, device=x.device)
    _activation_layer_norm_bwd[(programs,)](
        dy_ptr=dy,
        x_ptr=x,
        w_ptr=w,
        mean_ptr=mean,
        rstd_ptr=rstd,
        dx_ptr=dx,
        sums_ptr=sums,
        M=M,
        N=N,
        ACT=function,
        **plan,
    )
    if grads is not None:
        add_up(sums, grads)


# %%
# A function to train with
# ------------------------
#
# The autograd function is that of the pages before, and so are its checks: you
# have seen them, so they are folded. New is that our function takes the name
# of an activation, or a function that you have written.

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

# Scaffold: the autograd function of an activation.


class ActivationLayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, b, eps, function):
        x = contiguous_or_none(x)
        w = contiguous_or_none(w)
        b = contiguous_or_none(b)
        y, mean, rstd = forward(x, w, b, eps, function)
        ctx.save_for_backward(x, w, mean, rstd)
        ctx.grads_dtype = dtype_of_gradients(w, b, mean.dtype)
        ctx.function = function
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable  # no second derivatives
    def backward(ctx, dy):
        x, w, mean, rstd = ctx.saved_tensors
        wants_dx, wants_dw, wants_db, _, _ = ctx.needs_input_grad

        # A gradient that nobody wants is None, and its code is not compiled.
        dx = None
        if wants_dx:
            dx = torch.empty_like(x)
        grads = None
        if wants_dw or wants_db:
            grads = x.new_empty(2, x.shape[1], dtype=ctx.grads_dtype)
        dy = dy.contiguous()
        backward(dy, x, w, mean, rstd, dx, grads, ctx.function)

        dw = None
        if wants_dw:
            dw = grads[0]
        db = None
        if wants_db:
            db = grads[1]
        # One gradient for each argument of forward; the last two have none.
        return dx, dw, db, None, None


# %%

# Scaffold: which arguments are taken.


def check_arguments(x, shape, weight, bias, activation, eps):
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
    if isinstance(activation, str) and activation not in ACTIVATIONS:
        names = ", ".join(ACTIVATIONS)
        raise ValueError(f"activation: {activation} is none of {names}")
    if not eps >= 0:  # negative, or NaN
        raise ValueError(f"eps is {eps}: it must be 0 or more")

    N = shape.numel()
    if N * x.itemsize > 16384:
        raise ValueError(
            f"normalized_shape has {N} columns: this page takes up to 16 KB a "
            "row"
        )


# %%


def activation_layer_norm(
    x, normalized_shape, weight=None, bias=None, activation="silu", eps=1e-5
):
    """Layer norm of an activation of x; both passes run in Triton.

    x has floats of 16 bits or more, and any dimensions and strides.
    normalized_shape, a number or a shape, gives the last dimensions of x.
    weight and bias have that shape, or are None.
    activation is a name in ACTIVATIONS, or a function like _silu.
    """
    if isinstance(normalized_shape, int):
        normalized_shape = [normalized_shape]
    shape = torch.Size(normalized_shape)
    check_arguments(x, shape, weight, bias, activation, eps)
    function = activation
    if isinstance(activation, str):
        function = ACTIVATIONS[activation]

    # The kernels only know matrices, so all other dimensions become rows.
    N = shape.numel()
    if weight is not None:
        weight = weight.reshape(N)
    if bias is not None:
        bias = bias.reshape(N)
    y = ActivationLayerNorm.apply(
        x.reshape(-1, N), weight, bias, eps, function
    )
    return y.reshape(x.shape)


# %%
# Is it right? We compare each element with PyTorch's functions in float64.

# %%

# Scaffold: a check of an activation against float64.


def gelu_tanh(x):
    return F.gelu(x, approximate="tanh")


TORCH = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": gelu_tanh}


def in_float64(tensor):
    """The same numbers in float64, as a new input for autograd."""
    return tensor.detach().double().requires_grad_()


def check(M, N, dtype, activation):
    """Compare each element of y, dx, dw and db with PyTorch's in float64."""
    x, w, b, dy = inputs(M, N, dtype)
    y = activation_layer_norm(x, N, w, b, activation)
    ours = (y, *torch.autograd.grad(y, (x, w, b), dy))

    x, w, b = in_float64(x), in_float64(w), in_float64(b)
    y = F.layer_norm(TORCH[activation](x), (N,), w, b)
    exact = (y, *torch.autograd.grad(y, (x, w, b), dy.double()))

    for i, name in enumerate(("y", "dx", "dw", "db")):
        error = (ours[i] - exact[i]).abs()
        rounding = exact[i].abs() * torch.finfo(dtype).eps / 2
        typical_size = exact[i].square().mean().sqrt()
        sums = 64 * torch.finfo(torch.float32).eps * typical_size
        worst = (error / (rounding + sums)).max().item()
        assert worst <= 1, f"{name}: {worst:.1f} times the allowed error"
    print(f"{activation}, {dtype}: each element of y, dx, dw and db is right")


# %%

rows = 5  # few, because the interpreter is slow
if ON_GPU:
    rows = 1151
for name in ACTIVATIONS:
    check(rows, 200, torch.float16, name)

# %%
# How fast is the backward pass?
# ------------------------------

# %%

# Scaffold: SiLU and the norm backward, a benchmark.


def our_silu_layer_norm(x, w, b, eps):
    """Our function, with the arguments of PyTorch's."""
    return activation_layer_norm(x, (x.shape[1],), w, b, "silu", eps)


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=[1024, 2048, 4096, 5120, 7168, 8192],
        line_arg="provider",
        line_vals=["triton", "torch", "torch.compile", "copy"],
        line_names=["Triton", "PyTorch", "torch.compile", "Copy"],
        ylabel="GB/s",
        plot_name="silu-layer-norm-backward",
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
        return speed_of(our_silu_layer_norm)
    if provider == "torch":
        return speed_of(pytorch_silu_layer_norm)
    if provider == "torch.compile":
        return best_of_three_compilations(pytorch_silu_layer_norm, speed_of)
    return ceiling(reads=2, writes=1, shape=(M, N), dtype=dtype)


# %%

report(bench_backward)

# %%
# **What the figure shows.**
# On the H200 our backward pass reaches 66% to 85% of a copy. Backward, ours is
# 2.7 to 3.2 times as fast as PyTorch, and 2.3 to 2.9 times as fast as
# torch.compile, although it computes the function twice.
# On the H100 ours reaches 73% to 88% of a copy, PyTorch reaches 27% to 30%,
# and torch.compile reaches 32% to 40%.
#
# **Why.**
# PyTorch moves six matrices for ``dx`` in place of three, and reads two more
# for ``dw`` and ``db``. Where L2 does not hold any of them, three of eight are
# 38% of a copy at most, and on the H200 we have measured 27% at 8192 columns.
# We have not looked at the kernels of torch.compile. Our kernel still has a
# row on the SM when it needs the activations again, so recomputing them costs
# instructions and no bytes.
#
# On the H200 our lowest share is 66%, at 1024 columns. There our pass takes
# 4.0 µs longer than a copy, and at 8192 columns 9.6 µs. Some of that is the
# second kernel, which starts when the first one has ended. We have not timed
# it alone.
#
# **What follows.**
# What a program has on its SM can be used twice. So a kernel that recomputes
# can be far ahead of kernels that read and write what is in between.
#
# Where PyTorch or a library is better
# ------------------------------------
#
# - **Any activation, without a slope.** PyTorch differentiates what you write,
#   and torch.compile fuses it. Ours needs a slope that you derive.
# - **Narrow rows.** At 1024 columns, torch.compile is as fast as our forward
#   pass on the H200.
# - **Parameters.** An activation that learns, as PReLU does, has parameters,
#   which need gradients of their own. Our functions cannot have any.
# - **Rows of more than 16 KB.** Ours refuses them, and PyTorch takes all.
# - **Second derivatives.** PyTorch has them.
# - **Compilation.** Ours compiles a kernel for each function and each width.
#   PyTorch's own kernels are compiled already.
#
# Exercise 1: your own function
# -----------------------------
#
# The squared ReLU is :math:`f(x) = \max(x, 0)^2`. Some language models use it.
# The stub has the right value and the wrong slope. Correct the slope.
#
# **Hint 1.** What is the slope of :math:`x^2` where ``x`` is above 0, and what
# is it where the function is 0?
#
# **Hint 2.** ``positive`` is already 0 where ``x`` is below 0.


@triton.jit
def _squared_relu(x):
    positive = tl.maximum(x, 0.0)
    return positive * positive, positive  # to do


def exercise_1(function):
    """Say if dx of a layer norm of the function is right."""
    x, w, b, dy = inputs(5, 24, torch.float32)
    y = activation_layer_norm(x, 24, w, b, function)
    (ours,) = torch.autograd.grad(y, x, dy)
    y = F.layer_norm(F.relu(x) ** 2, (24,), w, b)
    (exact,) = torch.autograd.grad(y, x, dy)
    return torch.allclose(ours, exact, atol=1e-5)


print("dx is right:", exercise_1(_squared_relu))

# %%

# Solution 1


@triton.jit
def _squared_relu_1(x):
    positive = tl.maximum(x, 0.0)
    return positive * positive, 2 * positive


print("dx is right:", exercise_1(_squared_relu_1))
assert exercise_1(_squared_relu_1)

# %%
# What we learned
# ---------------
#
# These are the designs of this page, with the matrices that they move and what
# they reach on the H200, at 4096 columns.
#
# Forward:
#
# - **PyTorch's two functions** move four, and reach 37% of a copy.
# - **One kernel with a plain sigmoid** moves two, and reaches 85%.
# - **One kernel with four instructions** moves two, and reaches 87%.
# - **torch.compile** reaches 42%.
#
# Backward:
#
# - **PyTorch's functions** move six for ``dx``, and reach 29%.
# - **One kernel that recomputes** moves three, and reaches 77%.
# - **torch.compile** reaches 28%.
#
# And for kernels in general:
#
# - A function can be an argument of a kernel: a constant, compiled in place of
#   its call.
# - One sees its cost where a program waits for a sum, and hardly in a kernel
#   that only loads, computes and stores.
# - Test a function far out, where its powers overflow.
# - Recompute what is cheap. Save what would need another sweep over a row, as
#   the mean does.
#
# **Next:** `RMS normalization and the residual stream
# <../norms-and-losses/01-rms-norm.html>`_ is about a norm that has no mean to
# subtract.
