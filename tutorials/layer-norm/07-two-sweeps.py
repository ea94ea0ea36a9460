r"""
Two sweeps, and a variance that stays right
===========================================

How do you normalize rows that are too wide for registers, on any device?
Read each row twice, and find its mean and its variance in the first sweep, by
a method that stays right where the mean is large.

A *sweep* is one read of a row; the streaming kernel of `the first page
<01-layer-norm.html>`_ makes three, because the variance needs the mean.
With two, both passes take every width, float64, and any device.

**What you need:** `Layer normalization, both passes <01-layer-norm.html>`_.
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
# Both sums in one sweep
# ----------------------
#
# The variance is the mean of the squares minus the square of the mean, and
# one sweep can add up ``x`` and its square.
# Here is a row of mean 10000 and standard deviation 1:

torch.manual_seed(0)
x = 10_000 + torch.randn(4096)
by_squares = (x**2).mean() - x.mean() ** 2
print(f"float64:         {x.double().var(correction=0):.5f}")
print(f"sums of squares: {by_squares:.5f}")

# %%
# The squares are near :math:`10^8`, where one float32 number is 8 away from
# the next: the difference of two such numbers can be 0 or 8, but not 1.
#
# As a kernel: a *tile* has a power of two of *lanes*. Each adds up one element
# of every tile; those beyond the row are *masked* and load 0.


@triton.jit
def _rstd_by_squares(x_ptr, rstd_ptr, N: tl.constexpr, BLOCK: tl.constexpr):
    x_ptr += tl.program_id(0) * N
    total = tl.zeros((BLOCK,), tl.float32)
    squares = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + cols, mask=cols < N, other=0)
        total += x
        squares += x * x
    mean = tl.sum(total) / N
    variance = tl.maximum(tl.sum(squares) / N - mean * mean, 1e-12)
    tl.store(rstd_ptr + tl.program_id(0), 1 / tl.sqrt(variance))


x, rstd = x.to(DEVICE), torch.empty(1, device=DEVICE)
_rstd_by_squares[(1,)](x, rstd, 4096, 256)
print("standard deviation of the kernel:", (1 / rstd).item())

# %%
# One change: Welford's method
# ----------------------------
#
# It should be 1. The kernel's variance is wrong by several units; where it is
# 0 or less, ``tl.maximum`` makes it 1e-12.
# Now each lane keeps the mean of its elements so far, and ``m2``, the sum of
# their squared distances from it. The k-th element, at distance ``d``, moves
# the mean by ``d / k``; no large squares are subtracted.
# This is `Welford's method <https://doi.org/10.1080/00401706.1962.10490022>`_.
#
# From the mean :math:`\mu` of the row, the :math:`n` elements of a lane with
# mean :math:`\mu_l` have squared distances of :math:`m_2 + n (\mu_l - \mu)^2`
# in all; the lanes' sum is the row's. Masked elements do not count.


@triton.jit
def _welford(
    x_ptr, eps: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr,
    KEEP: tl.constexpr, acc: tl.constexpr,  # float32; float64 for float64
):  # fmt: skip
    """Mean of the row at x_ptr, and 1 / its standard deviation."""
    LAST: tl.constexpr = (N - 1) // BLOCK
    lanes = tl.arange(0, BLOCK)
    mean, m2 = tl.zeros((BLOCK,), acc), tl.zeros((BLOCK,), acc)
    for i in range(LAST + 1):
        cols = i * BLOCK + lanes
        x = tl.load(x_ptr + cols, mask=cols < N, eviction_policy=KEEP)
        d = tl.where(cols < N, x.to(acc) - mean, 0)
        share = 1 / tl.cast(i + 1, acc)
        mean += d * share
        m2 += d * d * (1 - share)  # d times the distance from the new mean
    count = tl.where(LAST * BLOCK + lanes < N, LAST + 1, LAST).to(acc)
    common = tl.sum(mean * count) / N
    d = mean - common
    variance = tl.sum(m2 + count * d * d) / N
    return common, 1 / tl.sqrt(variance + eps)


@triton.jit
def _rstd_by_welford(x_ptr, rstd_ptr, N: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    _, rstd = _welford(x_ptr + row * N, 1e-12, N, BLOCK, "", tl.float32)
    tl.store(rstd_ptr + row, rstd)


# %%
# The error of both methods, and PyTorch's, for larger and larger means:


@triton.testing.perf_report(
    triton.testing.Benchmark(
        ["ratio"], [1, 10, 100, 1000, 10000], x_log=True, y_log=True,
        line_arg="provider", line_vals=["triton", "torch", "squares"],
        line_names=["Welford", "PyTorch", "Sums of squares"],
        ylabel="relative error", plot_name="layer-norm-two-sweeps-variance",
        args=dict(M=64, N=65536, dtype=torch.float32, mode="forward"),
    )
)  # fmt: skip
def variance(M, N, dtype, mode, ratio, provider):
    """Norm of the error of 1 / standard deviation over the norm, for rows
    whose mean is ratio times their standard deviation."""
    M, N = (M, N) if ON_GPU else (2, 9000)  # the interpreter is slow
    torch.manual_seed(0)
    x = ratio + torch.randn(M, N, device=DEVICE, dtype=dtype)
    rstd = torch.empty(M, device=DEVICE)
    if provider == "torch":
        rstd = torch.native_layer_norm(x, (N,), None, None, 1e-12)[2].flatten()
    else:
        ours = {"squares": _rstd_by_squares, "triton": _rstd_by_welford}
        ours[provider][(M,)](x, rstd, N, 4096)
    exact = x.double().var(dim=1, correction=0) ** -0.5
    return 3 * [((rstd - exact).norm() / exact.norm()).item()]


table = variance.run(show_plots=ON_GPU, return_df=True)
table.columns = [name.split(" (")[0] for name in table.columns]
print(table.to_string(index=False, float_format="{:.0e}".format))

# %%
# The error of the sums of squares grows with the square of the ratio, until
# ``tl.maximum`` decides; a check with a mean of 0 never sees this.
# What is left of Welford's is the rounding of a large mean.
#
# Second change: help the caches
# ------------------------------

# %%

# Drawing: what a lane keeps, and the way of both sweeps.

plt.figure("Five tiles of a row: the first sweep goes to the right, the "
           "second goes back to the left", (7.5, 2.2))  # fmt: skip
arrow, box = {"arrowstyle": "->"}, {"boxstyle": "square", "fc": "none"}
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
# The second sweep writes ``y``.
# It begins at the end of the row: if the row is larger than a cache, its end
# is what is still there.
# And the first sweep asks to keep what it reads (``evict_last``), the second
# to drop it (``evict_first``); ``.cs`` says that nobody reads ``y`` soon.


@triton.jit
def _layer_norm_fwd_sweeps(
    x_ptr, w_ptr, b_ptr, y_ptr, mean_ptr, rstd_ptr,
    eps: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr,
    CACHES: tl.constexpr,
):  # fmt: skip
    KEEP: tl.constexpr = "evict_last" if CACHES else ""
    DROP: tl.constexpr = "evict_first" if CACHES else ""
    STREAM: tl.constexpr = ".cs" if CACHES else ""
    LAST: tl.constexpr = (N - 1) // BLOCK
    acc: tl.constexpr = mean_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * N
    mean, rstd = _welford(x_ptr, eps, N, BLOCK, KEEP, acc)
    tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)
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
# In wider rows a tile is larger, for up to 1024 threads: fewer rows compete
# for the first-level cache then.
# `Rows that begin anywhere <06-unaligned-rows.html>`_ load fewer bytes.


def plan(N, itemsize):
    """Lanes of a tile and warps of a program."""
    row, warp = N * itemsize, 64 if torch.version.hip else 32  # threads
    size = 8192 if row <= 32768 else 16384 if row <= 65536 else 32768
    size, most = (8192, 256) if row % 16 else (size, 1024)
    block = min(size // itemsize, triton.next_power_of_2(N))
    return block, max(min(block * itemsize // 16, most) // warp, 1)


def forward(x, w, b, eps, caches=True):
    """y, mean and rstd for a contiguous (M, N) x."""
    M, N = x.shape
    acc = torch.promote_types(x.dtype, torch.float32)
    y = torch.empty_like(x)
    mean, rstd = torch.empty(2, M, dtype=acc, device=x.device)
    block, warps = plan(N, x.itemsize)
    args = x, w, b, y, mean, rstd, eps, N, block, caches
    _layer_norm_fwd_sweeps[(M,)](*args, num_warps=warps)
    return y, mean, rstd


# %%
# Measured: the forward pass
# --------------------------
#
# A copy moves two matrices, a kernel that reads ``x`` twice moves three.
# Without caches its *roof* is at two thirds of the copy.

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

# Scaffold: the clock, and what its figures say.


def device_time(fn):
    """ms on the device: median, 20 % and 80 % quantiles; NaN without one."""
    if not ON_GPU:
        return 3 * [float("nan")]
    fn()  # compiles
    graph = torch.cuda.CUDAGraph()  # replayed without Python
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        fn()
    # do_bench overwrites the L2 cache before each replay.
    return triton.testing.do_bench(
        graph.replay, warmup=10, rep=40, quantiles=[0.5, 0.2, 0.8]
    )


def speed(moved, fn):
    """GB/s of a function that must move so many bytes."""
    ms, low, high = device_time(fn)
    return [moved / t * 1e-6 for t in (ms, high, low)]


def report(benchmark):
    """Draw a benchmark; print our speed over that of the others."""
    table = benchmark.run(show_plots=ON_GPU, return_df=True).set_index("N")
    table.columns = [name.split(" (")[0] for name in table.columns]
    if table.isna().all(axis=None):
        return print("Timing needs a GPU; the page shows recorded figures.")
    ratio = table.rdiv(table.iloc[:, 0], axis=0).iloc[:, 1:]
    print(f"speed of {table.columns[0]} divided by that of")
    print(ratio.agg(["min", "median", "max"]).round(2).to_string())


# %%
# The copy is ``x * 1``: in a graph ``copy_`` is slow on large tensors.


def benchmark(mode, **ours):
    names = {"triton": "Triton", "plain": "No help", "torch": "PyTorch"}
    names = {n: names[n] for n in (*ours, "torch")} | {"copy": "Copy"}

    def measure(M, N, dtype, mode, provider):
        """Device time of a CUDA graph, replayed with an overwritten L2 cache;
        median, 20 % and 80 % quantiles. At most 512 MB a matrix."""
        if not ON_GPU:
            return 3 * [float("nan")]  # the interpreter cannot be timed
        x, w, b, dy = inputs(min(M, 2**29 // (N * dtype.itemsize)), N, dtype)
        forward = lambda: ours.get(provider, F.layer_norm)(x, (N,), w, b)
        y, grad = forward(), torch.autograd.grad
        backward = lambda: grad(y, (x, w, b), dy, retain_graph=True)
        if provider == "copy":
            forward = lambda: torch.mul(dy, 1, out=y.data)
            backward = lambda: torch.add(x.data, dy, out=y.data)
        run, moved = (forward, 2) if mode == "forward" else (backward, 3)
        return speed(moved * dy.nbytes, run)

    return triton.testing.perf_report(
        triton.testing.Benchmark(
            ["N"], [4096 * i for i in (2, 3, 4, 6, 8, 12, 16, 24, 32)],
            line_arg="provider", line_vals=list(names),
            line_names=list(names.values()), ylabel="GB/s",
            plot_name=f"layer-norm-two-sweeps-{mode}",
            args={"M": 4096, "dtype": torch.float16, "mode": mode},
        )
    )(measure)  # fmt: skip


keep = lambda x, _, w, b: forward(x, w, b, 1e-5)
plain = lambda x, _, w, b: forward(x, w, b, 1e-5, caches=False)
report(benchmark("forward", triton=keep, plain=plain))

# %%
# "No help" is the kernel with ``CACHES`` off. Above 24576 columns both lines
# fall towards the roof: rows, ``w`` and ``b`` outgrow the first-level cache.
# The way out is `Programs that share a row <08-shared-rows.html>`_.
#
# Backward: the means first
# -------------------------
#
# Each element of :math:`dx = r \, (w \, dy - \hat{x} \, c_1 - c_2)`, where
# :math:`r` is ``rstd``, needs two means over its row: :math:`c_1`, of
# :math:`\hat{x} \, w \, dy`, and :math:`c_2`, of :math:`w \, dy`.
# So there are two sweeps again, the first with a program for each row:


@triton.jit
def _layer_norm_bwd_means(
    dy_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, c_ptr,  # w may be None
    M, N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * N
    dy_ptr += row * N
    acc = mean_ptr.dtype.element_ty
    mean, rstd = tl.load(mean_ptr + row), tl.load(rstd_ptr + row)
    c1, c2 = tl.zeros((BLOCK,), acc), tl.zeros((BLOCK,), acc)
    for start in range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + cols, mask=cols < N, other=0).to(acc)
        dy = tl.load(dy_ptr + cols, mask=cols < N, other=0).to(acc)
        wdy = dy  # 0 in a masked lane
        if w_ptr is not None:
            wdy *= tl.load(w_ptr + cols, mask=cols < N, other=0).to(acc)
        c1 += (x - mean) * wdy
        c2 += wdy
    tl.store(c_ptr + row, tl.sum(c1) * rstd / N)
    tl.store(c_ptr + M + row, tl.sum(c2) / N)


# %%
# With these means a program can have a *slice*, the same columns of many rows.
# Its sums for ``dw`` and ``db`` stay in registers however wide the rows are.
# `Loads in flight <04-loads-in-flight.html>`_ explains ``num_stages``.


@triton.jit
def _layer_norm_bwd_slices(
    dy_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, c_ptr,
    dx_ptr,  # None: not wanted
    sums_ptr,  # (groups, 2, N), or None: neither dw nor db is wanted
    M, N: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,  # of a tile
):  # fmt: skip
    SLICES: tl.constexpr = (N + COLS - 1) // COLS
    acc = mean_ptr.dtype.element_ty
    group, groups = tl.program_id(0) // SLICES, tl.num_programs(0) // SLICES
    cols = tl.program_id(0) % SLICES * COLS + tl.arange(0, COLS)[None, :]
    if w_ptr is not None:
        w = tl.load(w_ptr + cols, mask=cols < N, other=0)
    dw, db = tl.zeros((1, COLS), acc), tl.zeros((1, COLS), acc)
    row = tl.arange(0, ROWS)[:, None]
    at = row * N + cols
    for first in tl.range(group * ROWS, M, groups * ROWS, num_stages=3):
        exists = row < M - first
        mask = exists & (cols < N)
        start = tl.cast(first, tl.int64) * N  # 64 bits only here
        x = tl.load(x_ptr + start + at, mask=mask, other=0)
        dy = tl.load(dy_ptr + start + at, mask=mask, other=0)
        mean = tl.load(mean_ptr + first + row, mask=exists, other=0)
        rstd = tl.load(rstd_ptr + first + row, mask=exists, other=0)
        x_hat, dy = (x.to(acc) - mean) * rstd, dy.to(acc)
        dw += tl.sum(dy * x_hat, 0, keep_dims=True)
        db += tl.sum(dy, 0, keep_dims=True)
        if dx_ptr is not None:
            c1 = tl.load(c_ptr + first + row, mask=exists, other=0)
            c2 = tl.load(c_ptr + M + first + row, mask=exists, other=0)
            wdy = dy if w_ptr is None else dy * w.to(acc)
            dx = (wdy - x_hat * c1 - c2) * rstd
            tl.store(dx_ptr + start + at, dx, mask=mask)
    if sums_ptr is not None:
        sums_ptr += group * 2 * N + cols
        tl.store(sums_ptr, dw, mask=cols < N)
        tl.store(sums_ptr + N, db, mask=cols < N)


# %%
# A slice has 4 KB of a row; a multiprocessor has about two programs.

GPU = torch.cuda.get_device_properties(DEVICE) if ON_GPU else None
NUM_SMS = GPU.multi_processor_count if ON_GPU else 4


def backward(dy, x, w, mean, rstd, wanted):
    """dx, dw and db for (M, N) matrices; None where not wanted."""
    M, N = x.shape
    new = {"dtype": mean.dtype, "device": x.device}
    dx = c = sums = None
    if wanted[0]:
        dx, c = torch.empty_like(x), torch.empty(2, M, **new)
        block = min(8192 // x.itemsize, triton.next_power_of_2(N))
        args = dy, x, w, mean, rstd, c, M, N, block
        _layer_norm_bwd_means[(M,)](*args, num_warps=16)
    cols = min(4096 // x.itemsize, triton.next_power_of_2(N))
    slices, rows = triton.cdiv(N, cols), 2
    groups = max(min(2 * NUM_SMS // slices, triton.cdiv(M, rows)), 1)
    if wanted[1] or wanted[2]:
        sums = torch.empty(groups, 2, N, **new)
    args = dy, x, w, mean, rstd, c, dx, sums, M, N, rows, cols
    _layer_norm_bwd_slices[(slices * groups,)](*args, num_warps=8)
    dw, db = (None, None) if sums is None else sums.sum(0)
    return dx, dw if wanted[1] else None, db if wanted[2] else None


# %%
# Strided tensors are copied; PyTorch rounds ``dw`` and ``db`` to their types.


class LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, b, eps):
        x, w, b = (None if t is None else t.contiguous() for t in (x, w, b))
        y, mean, rstd = forward(x, w, b, eps)
        ctx.save_for_backward(x, w, mean, rstd)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        given = dy.contiguous(), *ctx.saved_tensors
        return *backward(*given, ctx.needs_input_grad), None


def layer_norm(x, normalized_shape, weight=None, bias=None, eps=1e-5):
    """Normalize x over its last dimensions; weight and bias may be None."""
    one = isinstance(normalized_shape, int)
    shape = torch.Size([normalized_shape] if one else normalized_shape)
    N = shape.numel()
    for name, t in {"x": x, "weight": weight, "bias": bias}.items():
        if t is None and name != "x":
            continue
        if not t.is_floating_point() or t.itemsize == 1:
            raise TypeError(f"{name} is {t.dtype}: floats of 16 bits or more")
        if t.device != x.device or t.device.type != DEVICE.type:
            raise ValueError(f"{name} is on {t.device}: all go on {DEVICE}")
        if N == 0 or shape != (t.shape[-len(shape) :] if t is x else t.shape):
            shapes = f"{(*t.shape,)}, normalized_shape is {(*shape,)}"
            raise ValueError(f"the shape of {name} is {shapes}")
    w, b = (None if t is None else t.reshape(N) for t in (weight, bias))
    return LayerNorm.apply(x.reshape(-1, N), w, b, eps).reshape(x.shape)


M, N = (37, 100_003) if ON_GPU else (5, 3001)
for dtype in torch.float16, torch.float32:
    check(layer_norm, M, N, dtype)
x = torch.randn(3, N, device=DEVICE, dtype=torch.float64)
torch.testing.assert_close(layer_norm(x, N), F.layer_norm(x, (N,)))

# %%
# These kernels read ``x`` and ``dy`` twice, and the second time from memory,
# because matrices of this size pass the caches in between.
# Five matrices for three: the roof is 0.6 of the speed of a copy.

report(benchmark("backward", triton=layer_norm))

# %%
# Wide rows come near this roof. `PyTorch <01-layer-norm.html>`_ reads both at
# least twice, too. ``ncu``, the profiler, counts what comes from memory for
# each byte of a matrix: 1 if a cache has all that is read again, 2 if nothing.


@triton.testing.perf_report(
    triton.testing.Benchmark(
        ["N"], [2**13, 2**15, 2**16, 2**17], x_log=True, line_arg="provider",
        line_vals=["triton", "plain", "backward"],
        line_names=["Forward", "No help", "Backward"],
        ylabel="bytes of DRAM per byte counted",
        plot_name="layer-norm-two-sweeps-traffic",
        args={"M": 4096, "dtype": torch.float16, "mode":
              "forward and backward", "counter": "dram__bytes_read.sum"},
    )
)  # fmt: skip
def traffic(M, N, dtype, mode, counter, provider):
    """Bytes that DRAM delivers, over those of x, backward of x and dy."""
    if not ON_GPU:
        return 3 * [float("nan")]
    x, w, b, dy = (t.detach() for t in inputs(min(M, 2**28 // N), N, dtype))
    run, size = lambda: forward(x, w, b, 1e-5, provider != "plain"), x.nbytes
    if provider == "backward":
        saved, size = run()[1:], 2 * x.nbytes
        run = lambda: backward(dy, x, w, *saved, 3 * [True])
    run()  # compiles
    with torch.cuda.nvtx.range(f"counted {provider} {N} per {size}"):
        run()
    return 3 * [float("nan")]


traffic.run(show_plots=ON_GPU)

# %%
# Forward, nearly all of the second sweep comes from a cache up to 65536
# columns; at 131072 three quarters, without help a third. Backward, nothing.
#
# Exercise 1: a shift instead
# ---------------------------
#
# A simpler cure: subtract from each element the first one of its row.
# The variance does not change, and the squares are small, unless that element
# is far from the others. Change ``_rstd_by_squares`` in this way.
#
# **Hint.** A masked lane loads 0: what does it add after the shift?


def exercise_1(kernel):
    x = torch.randn(2, 1000, device=DEVICE)
    x[1] += 10_000
    rstd = torch.empty(2, device=DEVICE)
    kernel[(2,)](x, rstd, 1000, 256)
    exact = x.double().var(dim=1, correction=0) ** -0.5
    errors = (rstd / exact - 1).abs().tolist()
    print("relative errors:", *(f"{error:.0e}" for error in errors))
    return max(errors) < 1e-4


exercise_1(_rstd_by_squares)

# %%

# Solution 1: a masked lane loads the number itself, and adds 0.


@triton.jit
def _rstd_shifted(x_ptr, rstd_ptr, N: tl.constexpr, BLOCK: tl.constexpr):
    x_ptr += tl.program_id(0) * N
    near = tl.load(x_ptr)
    total = tl.zeros((BLOCK,), tl.float32)
    squares = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        d = tl.load(x_ptr + cols, mask=cols < N, other=near) - near
        total += d
        squares += d * d
    mean = tl.sum(total) / N
    variance = tl.maximum(tl.sum(squares) / N - mean * mean, 1e-12)
    tl.store(rstd_ptr + tl.program_id(0), 1 / tl.sqrt(variance))


assert exercise_1(_rstd_shifted)
