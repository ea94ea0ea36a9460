r"""
Layer normalization, both passes
================================

How do you write both passes of layer norm so that a model can train with them?
Keep each row in registers, save two numbers of it, and let every program of
the backward pass add up weight gradients in a buffer of its own.

`Layer normalization <https://arxiv.org/abs/1607.06450>`_ (Ba, Kiros and
Hinton, 2016) takes a matrix ``x`` of ``M`` rows and ``N`` columns.
It moves each row to mean 0, scales it to variance 1, and then gives each
column its own scale ``w`` and shift ``b``.
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
# That cell stands on every page, and lets it run without a GPU, too.
# Next come both passes at 3 × 4, five lines each. *Forward* computes ``y``;
# *backward*, derived below, gets ``dy``, the gradient of the loss with respect
# to ``y``, and returns those of ``x``, ``w`` and ``b``.

rows = [[1, 2, 3, 6], [2, 2, 4, 4], [5, 1, 1, 1]]
x = torch.tensor(rows, dtype=torch.double, device=DEVICE, requires_grad=True)
w, b = torch.tensor([[1, 2, 1, 2], [0, 0, 1, 1]]).to(x).requires_grad_()
dy = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 2, 3]]).to(x)

mean = x.mean(dim=1, keepdim=True)
variance = ((x - mean) ** 2).mean(dim=1, keepdim=True)
rstd = (variance + 1e-5) ** -0.5  # 1 / standard deviation
x_hat = (x - mean) * rstd
y = x_hat * w + b
wdy = w * dy
c1 = (x_hat * wdy).mean(dim=1, keepdim=True)
c2 = wdy.mean(dim=1, keepdim=True)
dx = (wdy - x_hat * c1 - c2) * rstd
dw, db = (dy * x_hat).sum(dim=0), dy.sum(dim=0)
for name, value in {"y": y, "dx": dx, "dw": dw, "db": db}.items():
    print(f"{name}:\n{value.detach().cpu().numpy().round(2)}")

# %%
# Forward: a row in registers
# ---------------------------
#
# A kernel is one function that many *programs* run at the same time.
# Here a program takes one row, loads it once, and keeps it in registers, the
# memory inside a processor.
# Its *tile* has a power of two of *lanes*, one for each element.
# Lanes beyond the end of the row are *masked*: they load 0 and store nothing.


@triton.jit
def _layer_norm_fwd(
    x_ptr, w_ptr, b_ptr, y_ptr, mean_ptr, rstd_ptr,
    eps: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr,  # lanes
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)  # M * N may pass 2**31
    cols = tl.arange(0, BLOCK)
    acc = mean_ptr.dtype.element_ty  # float32; float64 for float64
    x = tl.load(x_ptr + row * N + cols, mask=cols < N, other=0).to(acc)
    mean = tl.sum(x) / N
    x = tl.where(cols < N, x - mean, 0)  # masked: 0, not -mean
    rstd = 1 / tl.sqrt(tl.sum(x * x) / N + eps)
    tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)
    y = x * rstd
    if w_ptr is not None:  # if it is None, this line is not compiled
        y *= tl.load(w_ptr + cols, mask=cols < N).to(acc)
    if b_ptr is not None:
        y += tl.load(b_ptr + cols, mask=cols < N).to(acc)
    tl.store(y_ptr + row * N + cols, y, mask=cols < N)


# %%
# ``N`` and ``eps`` are constants: the kernel is compiled anew for each.
# A program has few *warps*, groups of 32 threads that run together, so that
# each thread has several loads *in flight*, asked for and not there yet.


def in_registers(x, w, b, eps):
    """y, mean and rstd for a contiguous (M, N) x."""
    (M, N), y = x.shape, torch.empty_like(x)
    acc = torch.promote_types(x.dtype, torch.float32)
    mean, rstd = torch.empty(2, M, dtype=acc, device=x.device)
    block = triton.next_power_of_2(N)
    warps = min(max(block * x.element_size() // 4096, 4), 16)
    args = x, w, b, y, mean, rstd, eps, N, block
    _layer_norm_fwd[(M,)](*args, num_warps=warps)
    return y, mean, rstd


torch.testing.assert_close(in_registers(x, w, b, 1e-5)[0], y)

# %%

# Scaffold: the clock.


def device_time(call):
    """µs on the GPU: median, 20% and 80% quantiles.

    Two CUDA graphs are replayed in turns. One overwrites L2 and makes the
    call, several times over; the other only overwrites L2. The difference is
    the time of the calls.
    """
    if not ON_GPU:
        return 3 * [float("nan")]  # the interpreter cannot be timed

    def elapsed(action):
        """ms from the start of an action on the GPU to its end."""
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        action()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end)

    call()  # compiles the kernels
    calls = 8
    if elapsed(call) > 1:
        calls = 1  # a long call needs no company
    larger_than_l2 = torch.empty(2**28, dtype=torch.int8, device=DEVICE)

    def recorded(call):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            for _ in range(calls):
                larger_than_l2.zero_()
                call()
        graph.replay()  # the first replay takes longer
        return graph

    with_calls = recorded(call)
    without = recorded(lambda: None)
    times = []
    for _ in range(25):
        difference = elapsed(with_calls.replay) - elapsed(without.replay)
        times.append(1000 * difference / calls)
    times.sort()
    return times[12], times[5], times[19]


def speed(bytes_moved, call):
    """GB/s of a call that must move so many bytes: median, low, high."""
    median, short, long = device_time(call)
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
    source = torch.randn(reads, *shape, device=DEVICE).to(dtype)
    target = torch.empty(writes, *shape, dtype=dtype, device=DEVICE)
    count = target[0].numel()
    speeds = []
    for block_size, warps in (
        (1024, 1), (2048, 1), (4096, 2), (4096, 4), (8192, 4), (8192, 8)
    ):  # fmt: skip

        def move(block_size=block_size, warps=warps):
            _move[(triton.cdiv(count, block_size),)](
                source_ptr=source,
                target_ptr=target,
                count=count,
                READS=reads,
                WRITES=writes,
                BLOCK_SIZE=block_size,
                num_warps=warps,
            )

        speeds.append(speed(source.nbytes + target.nbytes, move))
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
# The clock replays a CUDA graph, a recording of a call's kernels, without
# Python, after overwriting the L2 cache, which all programs share.
# A forward pass must move two matrices, ``x`` and ``y``, as a copy does; a
# backward pass three, ``x``, ``dy`` and ``dx``, as an addition of two does.

PEERS = {"torch": "PyTorch", "torch.compile": "torch.compile", "copy": "Copy"}


def benchmark(name, mode, peers=tuple(PEERS), **ours):
    def measure(M, N, dtype, mode, provider):
        """Device time of a CUDA graph, replayed with an overwritten L2 cache;
        median, 20 % and 80 % quantiles."""
        if not ON_GPU:
            return 3 * [float("nan")]  # the interpreter cannot be timed
        x, dy, out = torch.randn(3, M, N, dtype=dtype, device=DEVICE)
        w, b = torch.rand(2, N, dtype=dtype, device=DEVICE)
        leaves = [t.requires_grad_() for t in (x, w, b)]
        f, matrices = ours.get(provider, F.layer_norm), 2
        if provider == "torch.compile":
            torch._dynamo.reset()  # nothing is left of other shapes
            torch._functorch.config.donated_buffer = False  # runs many times
            f = torch.compile(lambda *t: F.layer_norm(*t), dynamic=False)
        fn, copy = lambda: f(x, (N,), w, b), lambda: out.copy_(dy)
        if mode == "backward":
            y, grad, matrices = fn(), torch.autograd.grad, 3
            fn = lambda: grad(y, leaves, dy, retain_graph=True)
            copy = lambda: torch.add(x.detach(), dy, out=out)
        return speed(matrices * dy.nbytes, copy if provider == "copy" else fn)

    mark = triton.testing.Benchmark(
        x_vals=[512 * i for i in (2, 3, 4, 6, 8, 9, 12, 16, 17, 24, 31)],
        x_names=["N"], line_arg="provider", line_vals=[*ours, *peers],
        line_names=[PEERS.get(p, p.capitalize()) for p in (*ours, *peers)],
        ylabel="GB/s", plot_name=f"layer-norm-{name}",
        args={"M": 4096, "dtype": torch.float16, "mode": mode},
    )  # fmt: skip
    return triton.testing.perf_report(mark)(measure)


keep = lambda x, _, w, b: in_registers(x, w, b, 1e-5)
report(benchmark("forward", "forward", triton=keep))

# %%
# Near the copy: others load while one computes. At 1024 torch.compile leads.
#
# A row of any width
# ------------------
#
# Registers are few, so a wide row is taken a tile at a time.
# One read of the row is a *sweep*, and this kernel makes three: for the mean,
# for the variance, and to write ``y``.
# Each lane adds up its elements of all tiles; ``tl.sum`` adds up the lanes.
# A masked lane has loaded 0, and 0 minus the mean is not 0: ``tl.where`` keeps
# it out of the variance.


@triton.jit
def _layer_norm_fwd_streaming(
    x_ptr, w_ptr, b_ptr, y_ptr, mean_ptr, rstd_ptr,
    eps: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * N
    acc = mean_ptr.dtype.element_ty
    total = tl.zeros((BLOCK,), acc)
    for start in range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        total += tl.load(x_ptr + cols, mask=cols < N, other=0).to(acc)
    mean = tl.sum(total) / N
    total = tl.zeros((BLOCK,), acc)
    for start in range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + cols, mask=cols < N, other=0).to(acc)
        x = tl.where(cols < N, x - mean, 0)
        total += x * x
    rstd = 1 / tl.sqrt(tl.sum(total) / N + eps)
    tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)
    for start in range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + cols, mask=cols < N, other=0).to(acc)
        y = (x - mean) * rstd
        if w_ptr is not None:
            y *= tl.load(w_ptr + cols, mask=cols < N).to(acc)
        if b_ptr is not None:
            y += tl.load(b_ptr + cols, mask=cols < N).to(acc)
        tl.store(y_ptr + row * N + cols, y, mask=cols < N)


# %%
# Where a row is more than one tile, it asks for ``x`` three times and writes
# ``y``: four matrices, not two. What does that cost?


def in_sweeps(x, w, b, eps):
    (M, N), y = x.shape, torch.empty_like(x)
    acc = torch.promote_types(x.dtype, torch.float32)
    mean, rstd = torch.empty(2, M, dtype=acc, device=x.device)
    block = min(triton.next_power_of_2(N), 4096)
    warps = 4 if N <= 4096 else 8 if N < 8192 else 16
    args = x, w, b, y, mean, rstd, eps, N, block
    _layer_norm_fwd_streaming[(M,)](*args, num_warps=warps)
    return y, mean, rstd


torch.testing.assert_close(in_sweeps(x, w, b, 1e-5)[0], y)
sweeps = lambda x, _, w, b: in_sweeps(x, w, b, 1e-5)
report(benchmark("sweeps", "forward", ["copy"], triton=keep, sweeps=sweeps))

# %%
# Little: its line nearly meets that of the kernel above, here named Triton.
# Caches keep what was read last until the next sweep asks for it.
# No clock shows that, but NVIDIA's profiler ``ncu`` counts the bytes that come
# from memory (DRAM), here in units of ``x``:


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_vals=["8192", "16384", "32768", "65536", "131072"],
        x_names=["N"], line_arg="provider", line_vals=["registers", "sweeps"],
        line_names=["In registers", "Three sweeps"],
        ylabel="bytes of DRAM per byte counted", plot_name="layer-norm-dram",
        args={"M": 4096, "dtype": torch.float16, "mode": "forward",
              "counter": "dram__bytes_read.sum"},
    )
)  # fmt: skip
def traffic(M, N, dtype, mode, counter, provider):
    """Bytes that a forward pass reads from DRAM, over the bytes of x. The
    caches are empty before."""
    fn = in_sweeps if provider == "sweeps" else in_registers
    if int(N) > 16384 and fn is in_registers:
        return None
    if ON_GPU:
        x = torch.randn(M, int(N), dtype=dtype, device=DEVICE)
        fn(x, x[0], x[1], 1e-5)  # compiles
        with torch.cuda.nvtx.range(f"counted {provider} {N} per {x.nbytes}"):
            fn(x, x[0], x[1], 1e-5)
    return 3 * [float("nan")]  # only ncu knows


traffic.run(show_plots=ON_GPU)

# %%
# Up to 65536 columns three sweeps read little more than one; at 131072 the
# running programs' rows no longer fit in L2, and each sweep goes to memory.
#
# Backward: the formulas
# ----------------------
#
# A row with mean :math:`\mu` and variance :math:`\sigma^2` became
# :math:`\hat{x} = r \, (x - \mu)` with
# :math:`r = (\sigma^2 + \epsilon)^{-1/2}`, and then
# :math:`y = \hat{x} \, w + b`.
# The chain rule goes from the last step to the first:
#
# 1. Each column multiplies its gradient by :math:`w`.
# 2. :math:`r` multiplied the whole row: its gradient is a sum over the row.
# 3. The mean was subtracted from all: its gradient is a sum with a minus sign.
#    Inside the variance it adds nothing, as :math:`\sum_j (x_j - \mu) = 0`.
# 4. ``x`` is used directly, in the variance and in the mean: add three terms.
#
# All rows :math:`i` share :math:`w` and :math:`b`: their gradients are sums.
# Autograd checks all of it, in float64.
#
# .. math::
#
#    dx = r \, \Bigl( w \, dy
#    - \hat{x} \, \underbrace{\frac{1}{N} \sum_j \hat{x}_j w_j \, dy_j}_{c_1}
#    - \underbrace{\frac{1}{N} \sum_j w_j \, dy_j}_{c_2} \Bigr), \qquad
#    dw = \sum_i dy_i \, \hat{x}_i, \qquad db = \sum_i dy_i

dvariance = -0.5 * rstd**3 * ((x - mean) * wdy).sum(dim=1, keepdim=True)
dmean = -(rstd * wdy).sum(dim=1, keepdim=True)
in_steps = rstd * wdy + dvariance * 2 * (x - mean) / 4 + dmean / 4
steps = [(wdy, x_hat), (dvariance, variance), (dmean, mean), (in_steps, x)]
for found, of in [*steps, (dx, x), (dw, w), (db, b)]:
    (gradient,) = torch.autograd.grad(y, of, dy, retain_graph=True)
    torch.testing.assert_close(found, gradient)

# %%
# The forward pass saves the mean and :math:`r`, here ``rstd``, 8 bytes a row;
# from them and ``x``, saved without a copy, comes :math:`\hat{x}`.
# To save :math:`\hat{x}` itself would write a third matrix, and the backward
# pass would read as much as before.
#
# Backward: a buffer for each program
# -----------------------------------
#
# ``dw`` and ``db`` are sums over all rows, and no program has all rows.
# A program takes several, adds up ``dy * x_hat`` and ``dy`` in registers, and
# stores the two sums in a *buffer* of its own; a second kernel adds up those.
# No two programs write to one place, so nobody waits, and the same input gives
# the same bits each time.

# %%

# Drawing: who takes which row, and where the sums go.

plt.figure("Each of three programs takes every third row and fills a buffer; "
           "a second kernel adds up the buffers", (7.5, 3))  # fmt: skip
arrow = {"arrowstyle": "<-"}
for i in range(3):
    level, box = 5.5 - 2 * i, {"fc": "none", "ec": f"C{i}", "lw": 2}
    for row in range(i, 8, 3):
        plt.text(0, 7 - row, f"row {row}", bbox=box, ha="center")
    plt.text(3, level, f"program {i}", bbox=box, ha="center")
    plt.text(6, level, f"buffer {i}", bbox=box, ha="center")
    plt.annotate("", (4, level), (5, level), arrowprops=arrow)
    plt.annotate("dw, db", (7, level), (8, 3.5), arrowprops=arrow)
plt.axis((-0.6, 9.4, -0.6, 7.7))
plt.axis("off")
plt.show()

# %%
# A masked lane has ``dy = 0``, so it adds nothing to any sum.
# ``w`` is loaded again for every row: that saves registers.


@triton.jit
def _layer_norm_bwd(
    dy_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr,  # w may be None
    dx_ptr,  # (M, N), or None: not wanted
    sums_ptr,  # (programs, 2, N), or None: neither dw nor db is wanted
    M, N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    cols = tl.arange(0, BLOCK)
    mask = cols < N
    acc = mean_ptr.dtype.element_ty
    dw = tl.zeros((BLOCK,), acc)
    db = tl.zeros((BLOCK,), acc)
    for i in range(tl.program_id(0), M, tl.num_programs(0)):
        at = tl.cast(i, tl.int64) * N + cols
        x = tl.load(x_ptr + at, mask=mask, other=0).to(acc)
        dy = tl.load(dy_ptr + at, mask=mask, other=0).to(acc)
        rstd = tl.load(rstd_ptr + i)
        x_hat = (x - tl.load(mean_ptr + i)) * rstd
        dw += dy * x_hat
        db += dy
        if dx_ptr is not None:
            wdy = dy
            if w_ptr is not None:
                wdy *= tl.load(w_ptr + cols, mask=mask, other=0).to(acc)
            c1 = tl.sum(x_hat * wdy) / N
            c2 = tl.sum(wdy) / N
            dx = (wdy - x_hat * c1 - c2) * rstd
            tl.store(dx_ptr + at, dx, mask=mask)
    if sums_ptr is not None:
        sums_ptr += tl.program_id(0) * 2 * N + cols
        tl.store(sums_ptr, dw, mask=mask)
        tl.store(sums_ptr + N, db, mask=mask)


# %%
# The sums are float32 because each addition rounds: in float16, 0.1 added 4096
# times gives 256.
# For the second kernel the buffers are a matrix of ``2 N`` columns; a program
# adds up 16 of them and rounds at the very end.


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
# Many programs load much at a time, so each *multiprocessor*, one of the
# processors of a GPU, gets several, as far as its registers go: a lane keeps
# two sums, ``x`` and ``dy``.
# More than six hardly pay, for each program is one more buffer to add up.

GPU = torch.cuda.get_device_properties(DEVICE) if ON_GPU else None
NUM_SMS = GPU.multi_processor_count if ON_GPU else 4
MAX_COLUMNS = 16384


def plan(N):
    """Programs on a multiprocessor, and warps of a program."""
    if N >= 8192:
        return 1, 16  # registers for no other
    return 6 if N <= 1024 else 4 if N <= 2048 else 3 if N <= 4096 else 2, 4


# %%
# A function to train with
# ------------------------
#
# Kernels trust their arguments, so layouts are made right here.
# ``y.sum().backward()``, for instance, hands over a ``dy`` that is one number
# with strides of 0: a kernel would read far beyond it.


class LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, b, eps):
        x, w, b = (None if t is None else t.contiguous() for t in (x, w, b))
        kernel = in_registers if x.shape[1] <= MAX_COLUMNS else in_sweeps
        y, mean, rstd = kernel(x, w, b, eps)
        ctx.save_for_backward(x, w, mean, rstd)
        types = {t.dtype for t in (w, b) if t is not None}
        ctx.grads_dtype = types.pop() if len(types) == 1 else mean.dtype
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        x, w, mean, rstd = ctx.saved_tensors
        (M, N), new = x.shape, {"device": x.device}
        for_x, for_w, for_b, _ = ctx.needs_input_grad
        dx = torch.empty_like(x) if for_x else None
        sums = dw = db = None
        per_sm, warps = plan(N)
        programs = min(M, per_sm * NUM_SMS)
        if for_w or for_b:
            sums = torch.empty(programs, 2, N, dtype=mean.dtype, **new)
        args = dy.contiguous(), x, w, mean, rstd, dx, sums, M, N
        block = triton.next_power_of_2(N)
        _layer_norm_bwd[(programs,)](*args, block, num_warps=warps)
        if for_w or for_b:
            dw, db = grads = torch.empty(2, N, dtype=ctx.grads_dtype, **new)
            grid, args = triton.cdiv(2 * N, 16), (programs, 2 * N, 256, 16)
            _layer_norm_bwd_add_up[(grid,)](sums, grads, *args, num_warps=8)
        return dx, dw if for_w else None, db if for_b else None, None


# %%
# With gradients, registers limit the width; without gradients, any is taken.


def layer_norm(x, normalized_shape, weight=None, bias=None, eps=1e-5):
    """Normalize x over its last dimensions; weight and bias may be None."""
    one = isinstance(normalized_shape, int)
    shape = torch.Size([normalized_shape] if one else normalized_shape)
    N, trains = shape.numel(), False
    for name, t in {"x": x, "weight": weight, "bias": bias}.items():
        if t is None and name != "x":
            continue
        if not t.is_floating_point() or t.itemsize == 1:
            raise TypeError(f"{name} is {t.dtype}: floats of 16 bits or more")
        if t.device != x.device or t.device.type != DEVICE.type:
            raise ValueError(f"{name} is on {t.device}: all go on {DEVICE}")
        end = t.shape[-len(shape) :] if t is x else t.shape
        if end != shape or N == 0:
            shapes = f"{(*t.shape,)}, normalized_shape is {(*shape,)}"
            raise ValueError(f"the shape of {name} is {shapes}")
        trains |= t.requires_grad and torch.is_grad_enabled()
    if N > MAX_COLUMNS and trains:
        most = f"with gradients {MAX_COLUMNS}; the page Every width takes all"
        raise ValueError(f"normalized_shape has {N} columns, {most}")
    w, b = (None if t is None else t.reshape(N) for t in (weight, bias))
    return LayerNorm.apply(x.reshape(-1, N), w, b, eps).reshape(x.shape)


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
for dtype in torch.float16, torch.float32:
    check(layer_norm, M, N, dtype)

layer_norm(x, 4).sum().backward()  # the sum of a row is always 0
assert x.grad.abs().max() < 1e-9

# %%
# Beside three matrices, buffers are written and read, 8 bytes a column each.

report(benchmark("backward", "backward", triton=layer_norm))

# %%
# `PyTorch's kernels <https://github.com/pytorch/pytorch/blob/v2.11.0/aten/src/ATen/native/cuda/layer_norm_kernel.cu>`_
# for ``dw`` and ``db`` read ``x`` and ``dy`` a second time
# (`Who adds up the rows? <02-summing-rows.html>`_). Ours reads them once and
# is far from the copy: a program waits for its row with nothing in flight
# (`Loads in flight <04-loads-in-flight.html>`_). The line falls where fewer
# programs run on a multiprocessor, above 4096 columns and at 8192, and at
# 15872, where even one has too few registers (`Chunks <05-chunks.html>`_).
#
# Exercise 1: find the error
# --------------------------
#
# This formula for ``dx`` is wrong; write the right one.
# A constant added to a row of ``x`` changes nothing in ``y``, so a row of
# ``dx`` must sum to 0: the printed sums show the error without any reference.
#
# **Hint.** Along which dimension do its sums run, and where is ``w`` in them?


def formula(w, dy, x_hat, rstd):
    dw, db = (dy * x_hat).sum(dim=0), dy.sum(dim=0)
    return w * rstd * (dy - (db + x_hat * dw) / dy.shape[1])


def exercise_1(formula):
    got = formula(w, dy, x_hat, rstd)
    print("sums of the rows:", *(f"{v:.1e}" for v in got.sum(dim=1).tolist()))
    return torch.allclose(got, dx)


print("right:", exercise_1(formula))

# %%

# Solution 1


def formula_1(w, dy, x_hat, rstd):
    # Sums over rows are those of batch normalization; w belongs inside.
    c1 = (x_hat * w * dy).mean(dim=1, keepdim=True)
    c2 = (w * dy).mean(dim=1, keepdim=True)
    return (w * dy - x_hat * c1 - c2) * rstd


assert exercise_1(formula_1)
