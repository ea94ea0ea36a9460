r"""
What a second pass costs
========================

What does it cost to pass over ``x`` and ``dy`` twice, in one kernel for ``dx``
and another for ``dw`` and ``db``?
Five matrices move, not three, and up to seven where a row is wider than a
tile; in return no program waits for another.

Example 53 of AMD's `Composable Kernel
<https://github.com/ROCm/composable_kernel>`_, a library in C++, is built like
that. This page builds it in Triton; it has not been run on a GPU of AMD.

**What you need:** `Layer normalization, both passes <01-layer-norm.html>`_,
and `Loads in flight <04-loads-in-flight.html>`_.
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
# The documentation of the example gives this formula, here at 3 × 4.
# A constant added to a row of ``x`` changes nothing in ``y``, so each row of
# ``dx`` must sum to 0.

x = torch.tensor([[1, 2, 3, 6], [2, 2, 4, 4], [5, 1, 1, 1]]).double()
w = torch.tensor([1, 2, 1, 2]).to(x)
dy = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 2, 3]]).to(x)
leaf = x.clone().requires_grad_()
(expected,) = torch.autograd.grad(F.layer_norm(leaf, (4,), w), leaf, dy)
mean = x.mean(1, keepdim=True)
rstd = (x.var(1, correction=0, keepdim=True) + 1e-5) ** -0.5
x_hat = (x - mean) * rstd
dw, db = (dy * x_hat).sum(0), dy.sum(0)
dx = w * rstd * (dy - (db + x_hat * dw) / 4)
for name, found in ("documented", dx), ("autograd", expected):
    print(f"{name}: rows of dx sum to {found.sum(1).abs().numpy().round(2)}")

# %%
# ``dw`` and ``db`` are sums over rows, and stand where means *of* a row
# belong: with mean, variance and length of columns it is batch normalization.
# The code of the example is right: its kernel for ``dx`` gets no such sums.
#
# Two kernels
# -----------
#
# A *tile* is what a program loads at once; its places are *lanes*, and those
# outside the matrix are masked; one read of a row is a *sweep*.
# The first kernel sweeps once for the means and once for ``dx``, that one from
# the end: what was read last is what a cache still has.
# If a tile is as wide as the row, the compiler loads once for both sweeps.


@triton.jit
def _layer_norm_bwd_dx(
    dy_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, dx_ptr,
    M, N: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,  # of a tile
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * ROWS  # M * N may pass 2**31
    rows = first + tl.arange(0, ROWS)
    mean = tl.load(mean_ptr + rows, mask=rows < M, other=0)[:, None]
    rstd = tl.load(rstd_ptr + rows, mask=rows < M, other=0)[:, None]
    row, there = tl.arange(0, ROWS)[:, None], rows[:, None] < M
    acc: tl.constexpr = mean_ptr.dtype.element_ty  # float32, as a rule
    c1, c2 = tl.zeros((ROWS, COLS), acc), tl.zeros((ROWS, COLS), acc)
    for sweep in tl.static_range(2):
        for done in range(0, N, COLS):
            start = (N - 1) // COLS * COLS - done if sweep else done
            col = start + tl.arange(0, COLS)[None, :]
            mask, at = there & (col < N), first * N + (row * N + col)
            x = tl.load(x_ptr + at, mask=mask, other=0).to(acc)
            wdy = tl.load(dy_ptr + at, mask=mask, other=0).to(acc)
            wdy *= tl.load(w_ptr + col, mask=col < N, other=0).to(acc)
            x_hat = (x - mean) * rstd
            if sweep:
                dx = (wdy - x_hat * c1 - c2) * rstd
                tl.store(dx_ptr + at, dx, mask=mask)
            else:
                c1 += x_hat * wdy
                c2 += wdy
        if sweep == 0:
            c1 = tl.sum(c1, 1, keep_dims=True) / N
            c2 = tl.sum(c2, 1, keep_dims=True) / N


dx = torch.empty(3, 4, device=DEVICE)
given = [t.float().to(DEVICE) for t in (dy, x, w, mean, rstd)]
_layer_norm_bwd_dx[(2,)](*given, dx, 3, N=4, ROWS=2, COLS=2)
torch.testing.assert_close(dx.cpu(), expected.float())

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
# Two tiles of one kernel: the example's, of 8 rows and 128 columns, or a row.
# "Copy" is an addition, which reads two matrices and writes one as well.

DX = triton.testing.Benchmark(
    ["N"], [1024, 2048, 4096, 8192], "provider", ["triton", "tile", "copy"],
    ["Triton", "8 × 128", "Copy"], "layer-norm-two-dx", ylabel="GB/s",
    args={"M": 4096, "dtype": torch.float16, "mode": "dx"},
)  # fmt: skip


@triton.testing.perf_report(DX)
def dx_speed(M, N, dtype, mode, provider):
    """Device time of a CUDA graph, replayed with an overwritten L2 cache;
    median, 20 % and 80 % quantiles."""
    if not ON_GPU:
        return 3 * [float("nan")]
    dy, x, dx = torch.randn(3, M, N, dtype=dtype, device=DEVICE)
    row = 1, N, max(N // 1024, 4)
    rows, cols, warps = (8, 128, 8) if provider == "tile" else row
    args = dy, x, dy[0], *torch.rand(2, M, device=DEVICE), dx, M, N, rows, cols
    fn = lambda: _layer_norm_bwd_dx[(M // rows,)](*args, num_warps=warps)
    if provider == "copy":
        fn = lambda: torch.add(x, dy, out=dx)
    return speed(3 * x.nbytes, fn)


report(dx_speed)

# %%
# With a whole row, loaded once, it is nearly as fast as the addition.
# The kernel for ``dw`` and ``db`` is cut in the other direction:

# %%

# Drawing: who computes what.

plt.figure("dx: programs have rows; dw and db: they have columns", (7.5, 2))
for place, draw, title in (121, plt.barh, "dx"), (122, plt.bar, "dw, db"):
    plt.subplot(place, title=title, xticks=[], yticks=[])
    draw(range(3), 3, 1, color=["C0", "C1", "C2"], alpha=0.6)
plt.show()

# %%
# A program walks down some columns, a tile of rows at a time.
# Several may share the columns, each with a *part* of the rows; then a third
# kernel adds up the parts.


@triton.jit
def _layer_norm_bwd_columns(
    dy_ptr, x_ptr, mean_ptr, rstd_ptr,
    sums_ptr,  # (parts, 2, N): dw and db of each part
    M, N: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    acc: tl.constexpr = mean_ptr.dtype.element_ty
    row = tl.arange(0, ROWS)[:, None]
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)
    part, parts = tl.program_id(1), tl.num_programs(1)
    dw, db = tl.zeros((ROWS, COLS), acc), tl.zeros((ROWS, COLS), acc)
    for start in range(part * ROWS, M, parts * ROWS):
        there = start + row < M
        mask = there & (col < N)
        first = tl.cast(start, tl.int64) * N
        x = tl.load(x_ptr + first + (row * N + col), mask=mask, other=0)
        dy = tl.load(dy_ptr + first + (row * N + col), mask=mask, other=0)
        mean = tl.load(mean_ptr + start + row, mask=there, other=0)
        rstd = tl.load(rstd_ptr + start + row, mask=there, other=0)
        dw += dy.to(acc) * ((x.to(acc) - mean) * rstd)
        db += dy.to(acc)
    sums_ptr += part * 2 * N + col
    tl.store(sums_ptr, tl.sum(dw, 0), mask=col < N)
    tl.store(sums_ptr + N, tl.sum(db, 0), mask=col < N)


@triton.jit
def _layer_norm_bwd_add_up(
    sums_ptr, grads_ptr,  # (parts, WIDTH) and (WIDTH,)
    parts, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    total = tl.zeros((ROWS, COLS), sums_ptr.dtype.element_ty)
    for first in range(0, parts, ROWS):
        rows = first + tl.arange(0, ROWS)[:, None]
        mask = (rows < parts) & (cols < WIDTH)
        total += tl.load(sums_ptr + rows * WIDTH + cols, mask=mask, other=0)
    tl.store(grads_ptr + cols, tl.sum(total, axis=0), mask=cols < WIDTH)


# %%
# The example, and two changes
# ----------------------------
#
# A *plan* has the rows, columns and warps of both tiles, and the parts.
# ``EXAMPLE`` has the tiling of example 53, in Triton, not Composable Kernel.
# The first change: 4 warps, and parts, so that a multiprocessor has about 256
# columns; the second: larger tiles, 64 × 64, and whole rows for ``dx``.

GPU = torch.cuda.get_device_properties(DEVICE) if ON_GPU else None
NUM_SMS = GPU.multi_processor_count if ON_GPU else 132
SHARED = GPU.shared_memory_per_block_optin if ON_GPU else 232_448
EXAMPLE = lambda *_: ((8, 128, 8), (32, 32, 8), 1)


def split(M, N, tile=(32, 32, 4)):
    parts = min(max(256 * NUM_SMS // N, 1), triton.cdiv(M, tile[0]))
    return EXAMPLE()[0], tile, parts


def wide_tiles(M, N):
    block = min(triton.next_power_of_2(N), 16384)
    warps = max(block // 1024, 4) if block <= 8192 else 32
    return (max(1024 // block, 1), block, warps), *split(M, N, (64, 64, 4))[1:]


def two_kernels(plan, dy, x, w, mean, rstd, dtype, for_x=True, for_wb=True):
    """dx, and dw and db as a (2, N) tensor."""
    (M, N), dx, grads = x.shape, None, None
    (rows, cols, warps), (tall, few, many), parts = plan(max(M, 1), N)
    if for_x:
        dx, grid = torch.empty_like(x), (triton.cdiv(M, rows),)
        args = dy, x, w, mean, rstd, dx, M, N, rows, cols
        _layer_norm_bwd_dx[grid](*args, num_warps=warps)
    if for_wb:
        kind = mean.dtype if parts > 1 else dtype
        sums = torch.empty(parts, 2, N, dtype=kind, device=x.device)
        grid = triton.cdiv(N, few), parts
        args = dy, x, mean, rstd, sums, M, N, tall, few
        _layer_norm_bwd_columns[grid](*args, num_warps=many)
        grads = add_up(sums, dtype) if parts > 1 else sums[0]
    return dx, grads


def add_up(sums, dtype):
    parts, _, N = sums.shape
    grads = torch.empty(2, N, dtype=dtype, device=sums.device)
    rows, warps = (256, 8) if parts > 64 else (64, 4)
    _layer_norm_bwd_add_up[(triton.cdiv(2 * N, 16),)](
        sums, grads, parts, 2 * N, rows, 16, num_warps=warps
    )
    return grads


# %%

# Drawing: the structure of example 53 beside ours.

for topic, example_53, here in (
    ("", "example 53", "here"),
    ("statistics", "random numbers", "those of x"),
    ("dx: a block has", "256 threads", "8 warps; then 4 to 32"),
    ("  tile", "8 rows × 128 columns", "the same; then whole rows"),
    ("  row ≤ tile", "one sweep", "one load"),
    ("  row > tile", "two, second from end", "the same"),
    ("  sums of a row", "with x, float32", "with x_hat, float32"),
    ("dw, db: a block", "256 threads", "8 warps; then 4"),
    ("  tile", "32 rows × 32 columns", "the same; then 64 × 64"),
    ("  its rows", "all", "all; then a part"),
    ("  result", "plain stores, no atomics", "the same"),
):
    print(f"{topic:20}{example_53:26}{here}".rstrip())

# %%
# A *block* is a program; with random statistics only ``db`` is a gradient, and
# the example's test would pass if both its sides had the same wrong formula.
#
# The rival, "one kernel", is `that of page 04 <04-loads-in-flight.html>`_;
# it takes 16384 columns at most.


@triton.jit
def _layer_norm_bwd_one(
    dy_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, dx_ptr, sums_ptr,
    M, N: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    cols = tl.arange(0, BLOCK)
    mask = cols < N
    acc = mean_ptr.dtype.element_ty
    dw, db = tl.zeros((BLOCK,), acc), tl.zeros((BLOCK,), acc)
    first = tl.program_id(0)
    for i in tl.range(first, M, tl.num_programs(0), num_stages=STAGES):
        at = tl.cast(i, tl.int64) * N + cols
        x = tl.load(x_ptr + at, mask=mask, other=0).to(acc)
        dy = tl.load(dy_ptr + at, mask=mask, other=0).to(acc)
        rstd = tl.load(rstd_ptr + i)
        x_hat = (x - tl.load(mean_ptr + i)) * rstd
        dw += dy * x_hat
        db += dy
        dy *= tl.load(w_ptr + cols, mask=mask, other=0).to(acc)
        c1 = tl.sum(x_hat * dy) / N
        c2 = tl.sum(dy) / N
        tl.store(dx_ptr + at, (dy - x_hat * c1 - c2) * rstd, mask=mask)
    sums_ptr += first * 2 * N + cols
    tl.store(sums_ptr, dw, mask=mask)
    tl.store(sums_ptr + N, db, mask=mask)


def one_kernel(dy, x, w, mean, rstd, dtype, *_):
    (M, N), dx = x.shape, torch.empty_like(x)
    block = triton.next_power_of_2(N)
    per_sm, warps = min(max(4096 // block, 1), 3), max(block // 1024, 4)
    room = SHARED // per_sm - 2048 if block <= 8192 else 0
    stages = 1 + min(room // (3 * block * max(x.itemsize, w.itemsize)), 4)
    shape = min(M, per_sm * NUM_SMS), 2, N
    sums = torch.empty(shape, dtype=mean.dtype, device=x.device)
    args = dy, x, w, mean, rstd, dx, sums, M, N, block, stages
    _layer_norm_bwd_one[(len(sums),)](*args, num_warps=warps)
    return dx, add_up(sums, dtype)


# %%
# Forward, too, the compiler loads a row once if it fits into a tile.


@triton.jit
def _layer_norm_fwd(
    x_ptr, w_ptr, b_ptr, y_ptr, mean_ptr, rstd_ptr,
    eps: tl.constexpr, N: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    acc = mean_ptr.dtype.element_ty
    mean, rstd = tl.zeros((COLS,), acc), tl.zeros((COLS,), acc)
    for sweep in tl.static_range(3):
        for start in range(0, N, COLS):
            cols = start + tl.arange(0, COLS)
            x = tl.load(x_ptr + row * N + cols, mask=cols < N, other=0).to(acc)
            if sweep == 0:
                mean += x
            elif sweep == 1:
                x = tl.where(cols < N, x - mean, 0)
                rstd += x * x
            else:
                w = tl.load(w_ptr + cols, mask=cols < N).to(acc)
                b = tl.load(b_ptr + cols, mask=cols < N).to(acc)
                y = (x - mean) * rstd * w + b
                tl.store(y_ptr + row * N + cols, y, mask=cols < N)
        if sweep == 0:
            mean = tl.sum(mean) / N
        elif sweep == 1:
            rstd = 1 / tl.sqrt(tl.sum(rstd) / N + eps)
    tl.store(mean_ptr + row, mean)  # last: no load is saved across a store
    tl.store(rstd_ptr + row, rstd)


# %%

DESIGNS = {
    "triton": lambda *given: two_kernels(wide_tiles, *given),
    "rows split": lambda *given: two_kernels(split, *given),
    "example 53's tiling": lambda *given: two_kernels(EXAMPLE, *given),
    "one kernel": one_kernel,
}


class LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, b, eps, design):
        (M, N), y = x.shape, torch.empty_like(x)
        acc = torch.promote_types(x.dtype, torch.float32)
        mean, rstd = torch.empty(2, M, dtype=acc, device=x.device)
        block = triton.next_power_of_2(N) if N <= 16384 else 4096
        args = x, w, b, y, mean, rstd, eps, N, block
        _layer_norm_fwd[(M,)](*args, num_warps=min(max(block // 1024, 4), 16))
        ctx.save_for_backward(x, w, mean, rstd)
        ctx.dtypes, ctx.design = (w.dtype, b.dtype), DESIGNS[design]
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        for_x, for_w, for_b, *_ = ctx.needs_input_grad
        wide = torch.promote_types(*ctx.dtypes)
        given = dy.contiguous(), *ctx.saved_tensors, wide
        dx, grads = ctx.design(*given, for_x, for_w or for_b)
        dw = grads[:1].to(ctx.dtypes[0]) if for_w else None
        db = grads[1:].to(ctx.dtypes[1]) if for_b else None
        return dx, dw, db, None, None


# %%
# A missing weight is ones, a missing bias zeros.


def layer_norm(
    x, normalized_shape, weight=None, bias=None, eps=1e-5, *, design="triton"
):
    """Normalize x over its last dimensions; weight and bias may be None."""
    shape = torch.Size(normalized_shape)
    w = x.new_ones(shape) if weight is None else weight
    b = x.new_zeros(shape) if bias is None else bias
    most = 2**14 if design == "one kernel" else 2**25  # 64 rows: 2**31
    for name, t in {"x": x, "weight": w, "bias": b}.items():
        if not t.is_floating_point() or t.itemsize == 1:
            raise TypeError(f"{name} is {t.dtype}: floats of 16 bits or more")
        if t.device != x.device or t.device.type != DEVICE.type:
            raise ValueError(f"{name} is on {t.device}: all go on {DEVICE}")
        end = t.shape[-len(shape) :] if t is x else t.shape
        if end != shape or not 0 < shape.numel() <= most:
            shapes = f"{(*t.shape,)}, normalized_shape is {(*shape,)}"
            raise ValueError(f"shape of {name} is {shapes}, of 1 to {most}")
    rows, w, b = (t.reshape(-1, shape.numel()).contiguous() for t in (x, w, b))
    return LayerNorm.apply(rows, w, b, eps, design).reshape(x.shape)


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
for name in DESIGNS:
    print(end=f"{name}: ")
    check(lambda *t: layer_norm(*t, design=name), M, N, torch.float16)

# %%


def benchmark(name, M, dtype, widths, ours):
    names = {"triton": "Triton", "torch": "PyTorch", "copy": "Copy"}
    lines = [*ours, "torch", "torch.compile", "copy"]

    def measure(M, N, dtype, mode, provider):
        """Device time of a CUDA graph, replayed with an overwritten L2 cache;
        median, 20 % and 80 % quantiles."""
        if not ON_GPU:
            return 3 * [float("nan")]  # the interpreter cannot be timed
        x, w, b, dy = inputs(M, N, dtype)
        f, out = F.layer_norm, torch.empty_like(dy)
        if provider in ours:
            f = lambda *args: layer_norm(*args, design=provider)
        if provider == "torch.compile":
            torch._dynamo.reset()  # nothing is left of other shapes
            torch._functorch.config.donated_buffer = False  # runs many times
            f = torch.compile(lambda *args: F.layer_norm(*args), dynamic=False)
        y, grad = f(x, (N,), w, b), torch.autograd.grad
        fn = lambda: grad(y, (x, w, b), dy, retain_graph=True)
        if provider == "copy":
            fn = lambda: torch.add(x.detach(), dy, out=out)
        return speed(3 * dy.nbytes, fn)

    mark = triton.testing.Benchmark(
        ["N"], widths, "provider", lines, [names.get(p, p) for p in lines],
        f"layer-norm-two-{name}", ylabel="GB/s", x_log=M == 1024,
        args={"M": M, "dtype": dtype, "mode": "backward"},
    )  # fmt: skip
    return triton.testing.perf_report(mark)(measure)


HALF, WIDTHS = torch.float16, [512 * i for i in (2, 3, 4, 8, 9, 16, 17, 31)]
POWERS = [2**i for i in range(7, 21)]
report(benchmark("backward", 4096, HALF, WIDTHS, DESIGNS))

# %%
# The ratio to "one kernel" is the price of the second; above 8192 columns the
# rival has no registers for loads ahead. `Chunks <05-chunks.html>`_ have them:
# beside these the price stays high.
# At 8704, with idle lanes and 32 warps, torch.compile is ahead of ours.
# By hand, two kernels read four matrices, one kernel two; ``ncu``, a profiler,
# counts what comes from DRAM, with empty caches before each kernel:


@triton.testing.perf_report(triton.testing.Benchmark(
    ["N"], [1024, 4096, 8192], "provider", ["triton", "one kernel"],
    ["Triton", "one kernel"], "layer-norm-two-traffic", {"M": 4096, "dtype":
    HALF, "mode": "backward", "counter": "dram__bytes_read.sum"},
    ylabel="bytes of DRAM per byte counted",
))  # fmt: skip
def traffic(M, N, dtype, mode, counter, provider):
    """Bytes read from DRAM, over those of the matrices read by hand."""
    if not ON_GPU:
        return 3 * [float("nan")]
    x, w, _, dy = inputs(M, N, dtype)
    args = dy, x.detach(), w.detach(), *torch.rand(2, M, device=DEVICE), dtype
    DESIGNS[provider](*args)  # compiles
    by_hand = (4 if provider == "triton" else 2) * x.nbytes
    with torch.cuda.nvtx.range(f"counted {provider} {N} per {by_hand}"):
        DESIGNS[provider](*args)
    return 3 * [float("nan")]  # only ncu knows


traffic.run(show_plots=ON_GPU)

# %%
# What is above 1 are the sums of programs that a last kernel adds up.
# The example's own size, 1024 × 512 in float32, fits into the L2 cache:

report(benchmark("own", 1024, torch.float32, POWERS[:5], DESIGNS))

# %%
# There the second read costs less, and our two kernels keep up with PyTorch.
# At 128 columns small tiles with rows split are faster than large ones.
# Two kernels take 2**25 columns, and unlike `programs that share a row
# <08-shared-rows.html>`_ none waits for another.
# Where only ``dx``, or only ``dw`` and ``db``, are wanted, one is enough.
#
# Exercise 1: the sums of the example
# -----------------------------------
#
# The example has ``ds``, a row's sum of ``w * dy * x``, and ``db``, here that
# of ``w * dy``; find ``c1`` and ``c2`` of our kernel from them.
#
# **Hint.** Put ``x = mean + x_hat / rstd`` into ``ds``.


def means(ds, db, mean, rstd, N):
    return ds / N, db / N  # to do: c1


def exercise_1(means):
    x, wdy = 1 + torch.randn(2, 64, 512, dtype=torch.double)
    mean, rstd = x.mean(1), x.var(1, correction=0) ** -0.5
    c1 = (wdy * (x - mean[:, None])).mean(1) * rstd
    found, _ = means((wdy * x).sum(1), wdy.sum(1), mean, rstd, 512)
    print(f"error of c1: {(found - c1).norm() / c1.norm():.0e}")
    return torch.allclose(found, c1)


exercise_1(means)

# %%

# Solution 1


def means_1(ds, db, mean, rstd, N):
    return (ds - mean * db) * rstd / N, db / N


assert exercise_1(means_1)
