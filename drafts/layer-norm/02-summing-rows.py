r"""
Who adds up the rows?
=====================

The weight gradients of layer normalization are sums over all rows, and no
program has all rows: who adds them up?
Each program adds up several rows in a buffer of its own, and a small kernel
adds up the buffers: that reads the matrices once, and every run gives the
same bits.

Four designs are counted, built and measured here.
Read `layer normalization, both passes <01-layer-norm.html>`_ first.
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
# Four rows, three columns
# ------------------------
#
# Each row adds ``dy * x_hat`` to ``dw``, and ``dy`` to ``db``.
# Here are the terms of ``dw`` for a matrix of 4 × 3, added up in three ways.
# Each addition is rounded, so the order may show in the last bits.

torch.manual_seed(0)
x, dy = torch.randn(2, 4, 3)
w = torch.ones(3, requires_grad=True)
(dw,) = torch.autograd.grad(F.layer_norm(x, (3,), w), w, dy)

terms = dy * F.layer_norm(x, (3,))
first, second = terms[::2].sum(0), terms[1::2].sum(0)  # two rows each
print("PyTorch    ", dw)
print("by columns ", torch.stack([terms[:, j].sum() for j in range(3)]))
print("two buffers", first + second)
print("any order  ", terms[2] + terms[0] + terms[3] + terms[1])
print("same bits? ", (0.1 + 0.2) + 0.3 == 0.1 + (0.2 + 0.3))

# %%
# Four designs, counted in bytes
# ------------------------------
#
# ``dx`` needs sums over rows, so the program that computes it wants whole
# rows; ``dw`` and ``db`` want whole columns.
# In the picture, a number and its color are a program.

# %%

# Drawing: which program reads which elements, and where its sums go.


def draw(ax, title, x, sums, dw):
    ax.set(title=title, ylim=(16, 0), aspect="equal")
    ax.axis("off")
    for y, row in enumerate(["x, dy", *x, *sums, "dw", dw]):
        if row[0] in "xsd":
            ax.text(3, y + 0.8, row, ha="center")
            continue
        for j, who in enumerate(row):
            color = f"C{who}" if who.isdigit() else "none"
            ax.bar(j + 0.5, 1, 1, y, color=color, ec="k", alpha=0.5)
            ax.text(j + 0.5, y + 0.8, who, ha="center", fontsize=8)


name = "Columns, split columns, buffers and atomics: who reads and adds what"
_, axes = plt.subplots(1, 4, figsize=(8.4, 4.6), num=name)
halves, rows = ["001122", "334455"], [6 * str(i) for i in range(4)]
parts, end = [halves[i // 2 % 2] for i in range(8)], 6 * " "
draw(axes[0], "Columns", 8 * halves[:1], [], halves[0])
draw(axes[1], "Split", parts, ["sums", *halves], end)
draw(axes[2], "Buffers", 2 * rows, ["sums", *rows], end)
draw(axes[3], "Atomics", 2 * rows, ["sums", 6 * "+"], end)
plt.show()

# %%
# * **Columns**: one kernel computes ``dx`` by rows, another one ``dw`` and
#   ``db`` by columns.
# * **Split**: several programs share the columns, each with some of the rows.
# * **Buffers**: the kernel for ``dx`` sums as well, in a buffer a program.
# * **Atomics**: the same, but all programs add to one buffer.
#
# A fifth design has a page of its own: `a lock, and its race <03-lock.html>`_.
#
# The unit of what they move is a matrix of ``M`` rows in 16 bits, ``2 * M``
# bytes a column.
# A row of sums holds ``dw`` and ``db`` in float32, 8 bytes a column.

print("M = 4096              matrices  rows of sums  units")
for name, matrices, sums in (
    ("columns", 3 + 2, 0),
    ("split, 16 parts", 3 + 2, 16 + 16),
    ("256 buffers", 3, 256 + 256),
    ("256 programs, atomics", 3, 256 + 1),
    ("atomics for each row", 3, 4096 + 1),
):
    units = matrices + sums * 8 / (2 * 4096)
    print(f"{name:22}{matrices:8}{sums:14}{units:7.2f}")

# %%
# Three matrices are the least: ``x`` and ``dy`` are read, ``dx`` is written.
# By columns, ``x`` and ``dy`` are read twice.
# By rows, each program costs a row of sums instead; a buffer is written and
# read, an atomic addition is sent once and done where the sum is kept.
# These are the bytes that programs ask for, not yet a time: what is read
# twice may come from a cache the second time.
#
# Columns
# -------
#
# First ``dx``, by the kernel of the page before, which all designs share.
# A program takes every so many rows; what becomes of its sums is left to a
# function, ``KEEP``.
# Without one the compiler leaves out the sums.


@triton.jit
def _layer_norm_bwd(
    dy_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, dx_ptr,
    sums_ptr,  # buffers of (2, N), or None
    M, N: tl.constexpr, BLOCK: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    acc: tl.constexpr = mean_ptr.dtype.element_ty  # float32, as a rule
    cols = tl.arange(0, BLOCK)
    mask = cols < N
    dw = tl.zeros([BLOCK], acc)
    db = tl.zeros([BLOCK], acc)
    for row in range(tl.program_id(0), M, tl.num_programs(0)):
        at = tl.cast(row, tl.int64) * N + cols  # M * N may pass 2**31
        x = tl.load(x_ptr + at, mask=mask, other=0).to(acc)
        dy = tl.load(dy_ptr + at, mask=mask, other=0).to(acc)
        rstd = tl.load(rstd_ptr + row)
        x_hat = (x - tl.load(mean_ptr + row)) * rstd
        wdy = dy * tl.load(w_ptr + cols, mask=mask, other=0).to(acc)
        c1 = tl.sum(x_hat * wdy) / N
        c2 = tl.sum(wdy) / N
        tl.store(dx_ptr + at, (wdy - x_hat * c1 - c2) * rstd, mask=mask)
        dw += dy * x_hat
        db += dy
    if KEEP is not None:
        KEEP(sums_ptr + cols, dw, db, mask, N)


# %%
# Warps and programs are, here and below, the fastest for a design on an H200.


def by_rows(dy, x, w, mean, rstd, programs, sums=None, keep=None):
    block, dx = triton.next_power_of_2(len(w)), torch.empty_like(x)
    warps = min(max(block * x.element_size() // 2048, 4), 8)
    args = dy, x, w, mean, rstd, dx, sums, *x.shape, block, keep
    _layer_norm_bwd[(programs,)](*args, num_warps=warps)
    return dx


# %%
# The second kernel walks down some columns, a *tile* of ``ROWS`` by ``COLS``
# elements at a time; the rows of the tile are added up at the end.
# The grid has a second number, which is 1 for now.


@triton.jit
def _layer_norm_bwd_columns(
    dy_ptr, x_ptr, mean_ptr, rstd_ptr,
    sums_ptr,  # (parts, 2, N): dw and db
    M, N: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    acc: tl.constexpr = mean_ptr.dtype.element_ty
    tile = tl.arange(0, ROWS)[:, None]
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    part, parts = tl.program_id(1), tl.num_programs(1)
    dw = tl.zeros([ROWS, COLS], acc)
    db = tl.zeros([ROWS, COLS], acc)
    for start in range(part * ROWS, M, parts * ROWS):
        rows = start + tile
        mask = (rows < M) & (cols < N)
        first = tl.cast(start, tl.int64) * N  # 64 bits, once for all lanes
        x = tl.load(x_ptr + first + (tile * N + cols), mask=mask, other=0)
        dy = tl.load(dy_ptr + first + (tile * N + cols), mask=mask, other=0)
        mean = tl.load(mean_ptr + rows, mask=rows < M, other=0)
        rstd = tl.load(rstd_ptr + rows, mask=rows < M, other=0)
        dw += dy.to(acc) * ((x.to(acc) - mean) * rstd)
        db += dy.to(acc)
    sums_ptr += part * 2 * N + cols
    tl.store(sums_ptr, tl.sum(dw, 0), mask=cols < N)
    tl.store(sums_ptr + N, tl.sum(db, 0), mask=cols < N)


# %%
# Narrow rows are cut into fewer columns, for more programs.
# ``dtype`` is that of ``dw`` and ``db``.


def columns(dy, x, w, mean, rstd, dtype):
    (M, N), dx = x.shape, by_rows(dy, x, w, mean, rstd, len(x))
    sums = torch.empty(2, N, dtype=dtype, device=x.device)
    cols = 16 if N <= 4096 else 32 if N <= 8192 else 64
    args = dy, x, mean, rstd, sums, M, N, 128, cols
    _layer_norm_bwd_columns[(triton.cdiv(N, cols), 1)](*args, num_warps=8)
    return dx, *sums


given = [t.to(DEVICE) for t in (dy, x, w.detach())]
_, mean, rstd = torch.native_layer_norm(given[1], (3,), None, None, 1e-5)
print("columns", columns(*given, mean, rstd, torch.float32)[1].cpu())

# %%
# That was the toy matrix; now inputs of full size, and a clock:

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
    print(f"{M} x {N}, {dtype}: errors below {limit:.1e}")


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
    """Draw a benchmark; print how many times as fast as others we are."""
    table = benchmark.run(show_plots=ON_GPU, return_df=True).set_index("N")
    table.columns = [name.split(" (")[0] for name in table.columns]
    if table.isna().all(axis=None):
        return print("Timing needs a GPU; the page shows recorded figures.")
    ratio = table.rdiv(table.iloc[:, 0], axis=0).iloc[:, 1:]
    print(f"speed of {table.columns[0]} divided by that of")
    print(ratio.agg(["min", "median", "max"]).round(2).to_string())


# %%
# The known line is PyTorch's own backward pass, which takes the same
# arguments.
# The ceiling is an addition of two matrices, which moves three units and does
# nothing else.


def pytorch(dy, x, w, mean, rstd, dtype):
    dy, x, w = (t.to(dtype) for t in (dy, x, w))
    return torch.ops.aten.native_layer_norm_backward(
        dy, x, w.shape, mean, rstd, w, w, [True] * 3
    )


def copy(dy, x, *_):
    return torch.add(x, dy)


def example(M, N, dtype):  # the arguments of a design
    x, w, b, dy = (t.detach() for t in inputs(M, N, dtype))
    _, mean, rstd = torch.native_layer_norm(x, (N,), w, b, 1e-5)
    return dy, x, w, mean, rstd, dtype


def backward_speed(design, M, N, dtype):
    if not ON_GPU:
        return 3 * [float("nan")]
    given = example(M, N, dtype)
    return speed(3 * given[0].nbytes, lambda: design(*given))


def benchmark(name, ylabel, x_vals, **lines):
    args = {"M": 4096, "dtype": torch.float16, "mode": "backward"}
    mark = triton.testing.Benchmark(
        ["N"], x_vals, "provider", list(lines), list(lines.values()),
        f"layer-norm-rows-{name}", args, ylabel=ylabel,
    )  # fmt: skip
    return triton.testing.perf_report(mark)


WIDTHS = [512 * i for i in (2, 3, 4, 6, 8, 9, 12, 16, 17, 24)]
FIRST = {"columns": "Columns", "torch": "PyTorch", "copy": "Copy"}


@benchmark("columns", "GB/s", WIDTHS, **FIRST)
def columns_speed(M, N, dtype, mode, provider):
    """Device time of one backward pass, from a CUDA graph that is replayed
    with an overwritten L2 cache; median, 20 % and 80 % quantiles."""
    designs = {"columns": columns, "torch": pytorch, "copy": copy}
    return backward_speed(designs[provider], M, N, dtype)


report(columns_speed)

# %%
# Two things keep it from the copy: it reads ``x`` and ``dy`` twice, and each
# program of the second kernel walks down all rows.
#
# Columns, split over rows
# ------------------------
#
# One change, for the second: several programs share the columns.
# A small kernel adds up their buffers, a matrix of ``2 * N`` columns, always
# in the same order.


@triton.jit
def _layer_norm_bwd_add_up(
    sums_ptr, grads_ptr,  # (programs, WIDTH) and (WIDTH,)
    programs, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    total = tl.zeros([ROWS, COLS], sums_ptr.dtype.element_ty)
    for first in range(0, programs, ROWS):
        rows = first + tl.arange(0, ROWS)[:, None]
        mask = (rows < programs) & (cols < WIDTH)
        total += tl.load(sums_ptr + rows * WIDTH + cols, mask=mask, other=0)
    tl.store(grads_ptr + cols, tl.sum(total, 0), mask=cols < WIDTH)


def add_up(sums, dtype):
    (P, _, N), rows = sums.shape, 16 if len(sums) <= 16 else 256
    grads = torch.empty(2, N, dtype=dtype, device=sums.device)
    grid = (triton.cdiv(2 * N, 16),)
    _layer_norm_bwd_add_up[grid](sums, grads, P, 2 * N, rows, 16)
    return grads


def split(dy, x, w, mean, rstd, dtype, parts=16):
    (M, N), dx = x.shape, by_rows(dy, x, w, mean, rstd, len(x))
    sums = torch.empty(parts, 2, N, dtype=mean.dtype, device=x.device)
    args = dy, x, mean, rstd, sums, M, N, 32, 64
    _layer_norm_bwd_columns[(triton.cdiv(N, 64), parts)](*args)
    return dx, *add_up(sums, dtype)


# %%
# What is left is that ``x`` and ``dy`` are read twice.
#
# A buffer for each program
# -------------------------
#
# One change: the program that computes ``dx`` has ``x`` and ``dy`` at hand, so
# it keeps the sums too, and writes them after its last row.


@triton.jit
def _store(sums_ptr, dw, db, mask, N: tl.constexpr):
    sums_ptr += tl.program_id(0) * 2 * N
    tl.store(sums_ptr, dw, mask=mask)
    tl.store(sums_ptr + N, db, mask=mask)


# %%
# Each program costs a row of sums, but few of them have few
# `loads in flight <04-loads-in-flight.html>`_.


def buffers(dy, x, w, mean, rstd, dtype):
    M, N = x.shape
    P = min(M, 512 if N <= 2048 else 256)
    sums = torch.empty(P, 2, N, dtype=mean.dtype, device=x.device)
    dx = by_rows(dy, x, w, mean, rstd, P, sums, _store)
    return dx, *add_up(sums, dtype)


# %%
# Atomic additions
# ----------------
#
# One change: a single buffer, to which all programs add.
# ``tl.atomic_add`` loses no addition, whoever comes first.
# ``relaxed`` says that it waits for nothing else: all that counts is that it
# is done when the kernel ends.


@triton.jit
def _atomic_add(sums_ptr, dw, db, mask, N: tl.constexpr):
    tl.atomic_add(sums_ptr, dw, mask=mask, sem="relaxed")
    tl.atomic_add(sums_ptr + N, db, mask=mask, sem="relaxed")


def atomics(dy, x, w, mean, rstd, dtype, programs=None):
    M, N = x.shape
    P = programs or min(M, 512 if N <= 2048 else 256)
    # Zeros, for an addition adds to what is there.
    sums = torch.zeros(1, 2, N, dtype=mean.dtype, device=x.device)
    dx = by_rows(dy, x, w, mean, rstd, P, sums, _atomic_add)
    return dx, *add_up(sums, dtype)  # of one buffer: it only converts


def atomics_each_row(*given):
    """As many programs as rows."""
    return atomics(*given, programs=len(given[0]))


# %%
# A function to train with
# ------------------------
#
# The forward pass is that of the page before, with a row in registers.


@triton.jit
def _layer_norm_fwd(
    x_ptr, w_ptr, b_ptr, y_ptr, mean_ptr, rstd_ptr,
    eps: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    acc: tl.constexpr = mean_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < N
    x = tl.load(x_ptr + row * N + cols, mask=mask, other=0).to(acc)
    mean = tl.sum(x) / N
    x = tl.where(mask, x - mean, 0)
    rstd = 1 / tl.sqrt(tl.sum(x * x) / N + eps)
    tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)
    w = tl.load(w_ptr + cols, mask=mask).to(acc)
    b = tl.load(b_ptr + cols, mask=mask).to(acc)
    tl.store(y_ptr + row * N + cols, x * rstd * w + b, mask=mask)


class LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, b, eps, design):
        M, N = x.shape
        acc = torch.promote_types(x.dtype, torch.float32)
        mean, rstd = torch.empty(2, M, dtype=acc, device=x.device)
        y = torch.empty_like(x)
        block = triton.next_power_of_2(N)
        args = x, w, b, y, mean, rstd, eps, N, block
        _layer_norm_fwd[(M,)](*args, num_warps=min(max(block // 2048, 4), 16))
        ctx.save_for_backward(x, w, mean, rstd)
        ctx.bias_dtype, ctx.design = b.dtype, design
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        x, w, mean, rstd = ctx.saved_tensors
        wide = torch.promote_types(w.dtype, ctx.bias_dtype)
        dx, dw, db = ctx.design(dy.contiguous(), x, w, mean, rstd, wide)
        return dx, dw.to(w.dtype), db.to(ctx.bias_dtype), None, None


# %%
# Any layout becomes a contiguous matrix; a missing weight is ones, a missing
# bias zeros.
# A row must fit into the registers of a program, hence the limit.


def layer_norm(
    x, normalized_shape, weight=None, bias=None, eps=1e-5, design=buffers
):
    """Normalize x over its last dimensions; weight and bias may be None."""
    shape = torch.Size(normalized_shape)
    if not shape or not 0 < (N := shape.numel()) <= 16384:
        taken = "this page takes 1 to 16384 elements"
        raise ValueError(f"normalized_shape is {(*shape,)}: {taken}")
    for name, t in {"x": x, "weight": weight, "bias": bias}.items():
        if t is None:
            continue
        if not t.is_floating_point():
            raise TypeError(f"{name} is {t.dtype}: floats are taken")
        if shape != (t.shape[-len(shape) :] if name == "x" else t.shape):
            shapes = f"{(*t.shape,)}, normalized_shape is {(*shape,)}"
            raise ValueError(f"the shape of {name} is {shapes}")
    w = x.new_ones(N) if weight is None else weight.reshape(N).contiguous()
    b = x.new_zeros(N) if bias is None else bias.reshape(N).contiguous()
    rows = x.reshape(-1, N).contiguous()
    return LayerNorm.apply(rows, w, b, eps, design).reshape(x.shape)


M, N = (1151, 8192) if ON_GPU else (9, 200)
for design in buffers, columns, split, atomics, atomics_each_row:
    print(design.__name__, end=": ")
    check(lambda *t: layer_norm(*t, design=design), M, N, torch.float32)
check(layer_norm, M, N, torch.float16)

# %%
# All of them
# -----------
#
# The figure for which everything was counted:

DESIGNS = dict(
    triton=buffers, columns=columns, split=split, atomics=atomics,
    rows=atomics_each_row, torch=pytorch, copy=copy,
)  # fmt: skip
NAMES = dict(
    triton="Buffers", columns="Columns", split="Split", atomics="Atomics",
    torch="PyTorch",
)  # fmt: skip
MORE = {"rows": "Atomics, each row", "copy": "Copy"}


@benchmark("designs", "GB/s", WIDTHS, **NAMES, **MORE)
def designs_speed(M, N, dtype, mode, provider):
    """Device time of one backward pass, from a CUDA graph that is replayed
    with an overwritten L2 cache; median, 20 % and 80 % quantiles."""
    return backward_speed(DESIGNS[provider], M, N, dtype)


report(designs_speed)

# %%
# Programs that read the matrices once are ahead of those that read them
# twice, split or not.
# Atomic additions for each row are behind: they move the most, and all rows
# add to the same ``2 * N`` numbers.
#
# The same bits?
# --------------
#
# The order of additions is fixed in all designs but the atomic one.
# Each runs 100 times on the same input, and we count the runs whose ``dw`` or
# ``db`` differs from the first in any bit, both in float32: rounding to 16
# bits would hide most differences.


def in_float32(provider, M, N, dtype):
    *given, _ = example(M, N, dtype)
    run = lambda: torch.stack(DESIGNS[provider](*given, torch.float32)[1:])
    return given, run


SIZES = [1024, 4096, 8192]


@benchmark("bits", "different results of 100", SIZES, **NAMES)
def different_bits(M, N, dtype, mode, provider):
    """Runs of 100 whose dw or db, in float32, differs in any bit from that
    of the first run. PyTorch gets the same numbers in float32."""
    if not ON_GPU:
        return 3 * [float("nan")]
    _, run = in_float32(provider, M, N, dtype)
    first = run()
    return 3 * [sum(not torch.equal(run(), first) for _ in range(100))]


different_bits.run(show_plots=ON_GPU)

# %%
# Only atomic additions differ from run to run.
# Is one order better? The distance from the sums in float64 tells:


@benchmark("error", "relative error", SIZES, **NAMES)
def sum_error(M, N, dtype, mode, provider):
    """Norm of the difference from dw and db in float64, divided by their
    norm; dw and db in float32. PyTorch gets the same numbers in float32."""
    if not ON_GPU:
        return 3 * [float("nan")]
    (dy, x, *_), run = in_float32(provider, M, N, dtype)
    dy = dy.double()
    exact = torch.stack([dy * F.layer_norm(x.double(), (N,)), dy]).sum(1)
    return 3 * [((run() - exact).norm() / exact.norm()).item()]


sum_error.run(show_plots=ON_GPU)

# %%
# All errors are those of float32, far below the rounding of a result to 16
# bits: atomic additions are not less exact, but cannot be repeated.
# Another number of programs is another order too, and so other bits.
#
# Exercise
# --------
#
# **Exercise 1: a few buffers.**
# Between one buffer for all programs and one for each: program ``p`` adds to
# buffer ``p % 3``, so that fewer additions meet at one address.
# Below all programs add to the first buffer.
#
# **Hint.** Only an address has to change.


@triton.jit
def _add_to_few(sums_ptr, dw, db, mask, N: tl.constexpr):
    tl.atomic_add(sums_ptr, dw, mask=mask)  # to do: another buffer
    tl.atomic_add(sums_ptr + N, db, mask=mask)


def exercise_1(keep):
    dy, x, w, mean, rstd, _ = example(10, 24, torch.float32)
    sums = torch.zeros(3, 2, 24, device=DEVICE)
    by_rows(dy, x, w, mean, rstd, 6, sums, keep)
    owner = torch.arange(10) % 6 % 3
    terms = torch.stack([dy * F.layer_norm(x, (24,)), dy], dim=1)
    want = torch.stack([terms[owner == g].sum(0) for g in range(3)])
    right = torch.isclose(sums, want, atol=1e-5).flatten(1).all(1)
    print("right buffers:", right.nonzero().flatten().tolist())
    return right.all()


exercise_1(_add_to_few)

# %%

# Solution 1


@triton.jit
def _add_to_few_1(sums_ptr, dw, db, mask, N: tl.constexpr):
    sums_ptr += tl.program_id(0) % 3 * 2 * N
    tl.atomic_add(sums_ptr, dw, mask=mask)
    tl.atomic_add(sums_ptr + N, db, mask=mask)


assert exercise_1(_add_to_few_1)
