r"""
Weight gradients: who adds up the rows?
=======================================

The weight gradients of layer normalization are sums over all rows, and no
program has all rows: who adds them up?
Each program adds up its own rows in a buffer, and a small kernel adds up the
buffers: the matrices are read once, and all runs give the same bits.

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
# Four designs, counted in bytes
# ------------------------------
#
# Each row adds ``dy * x_hat`` to ``dw``, and ``dy`` to ``db``.
# These sums want whole columns; ``dx`` needs sums over a row: whole rows.
#
# * **Columns**: one kernel computes ``dx`` by rows, another one ``dw`` and
#   ``db`` by columns.
# * **Split**: several programs share the columns, and each takes some rows.
# * **Buffers**: the kernel for ``dx`` sums as well; each program has a buffer.
# * **Atomics**: the same, but all programs add to one buffer.
#
# The unit is a matrix of ``M`` rows in 16 bits, ``2 * M`` bytes a column.
# A row of sums holds ``dw`` and ``db`` in float32, 8 bytes a column.

print("M = N = 4096         matrices  sums  units")
for name, matrices, sums in (
    ("columns", 3 + 2, 0),
    ("split, 8 parts", 3 + 2, 8 + 8),
    ("396 buffers", 3, 396 + 396),
    ("396 programs, atomics", 3, 396 + 1),
    ("atomics for each row", 3, 4096 + 1),
):
    units = matrices + sums * 8 / (2 * 4096)
    print(f"{name:21}{matrices:9}{sums:6}{units:7.2f}")

# %%
# Three matrices are the least: ``x`` and ``dy`` are read, ``dx`` is written.
# By columns, ``x`` and ``dy`` are read twice.
# By rows, each program has sums to move: a buffer is written and read, an
# atomic addition is sent, and done where the sum is kept.
#
# Columns
# -------
#
# A program walks down ``COLS`` columns, ``ROWS`` rows at a time. Each *lane*,
# an element of this *tile*, has a sum; at the end those of a column are added
# up. The second number of the grid counts parts of the rows: one, for now.


@triton.jit
def _layer_norm_bwd_columns(
    dy_ptr, x_ptr, mean_ptr, rstd_ptr,
    sums_ptr,  # (parts, 2, N): dw and db
    M, N: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    acc: tl.constexpr = mean_ptr.dtype.element_ty  # float32, as a rule
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
# Narrow tiles make many programs; from 10240 columns on wider ones do, too.


def sums_by_columns(dy, x, w, mean, rstd, dtype):
    M, N = x.shape
    sums = torch.empty(2, N, dtype=dtype, device=x.device)
    cols = 16 if N < 10240 else 32
    args = dy, x, mean, rstd, sums, M, N, 2048 // cols, cols
    _layer_norm_bwd_columns[(triton.cdiv(N, cols), 1)](*args, num_warps=8)
    return sums


def given(M, N, dtype):
    """dy, x, w, and the mean and rstd that a forward pass has saved."""
    torch.manual_seed(0)
    dy, x = torch.randn(2, M, N, device=DEVICE, dtype=dtype)
    w = torch.rand(N, device=DEVICE, dtype=dtype)
    return dy, x, w, *torch.native_layer_norm(x, (N,), w, w, 1e-5)[1:]


dy, x, *_ = toy = given(4, 3, torch.float32)
error = (dy * F.layer_norm(x, (3,))).sum(0) - sums_by_columns(*toy, x.dtype)[0]
print(f"4 x 3, dw by columns: error {error.norm():.1e}")

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
# A copy moves as many bytes as are read here: two matrices.

NAMES = {"triton": "Buffers", "rows": "Atomics, rows", "torch": "PyTorch"}


def drawn(name, lines, ylabel="GB/s", **args):
    few, many = ["1024", "4096", "12288"], (2, 3, 4, 6, 8, 9, 12, 16, 17, 24)
    widths = [512 * i for i in many] if ylabel == "GB/s" else few
    mark = triton.testing.Benchmark(
        x_names=["N"], x_vals=widths, line_arg="provider", line_vals=lines,
        line_names=[NAMES.get(line, line.capitalize()) for line in lines],
        ylabel=ylabel, plot_name=f"layer-norm-rows-{name}",
        args={"M": 4096, "dtype": torch.float16, "mode": "backward", **args},
    )  # fmt: skip
    return triton.testing.perf_report(mark)


def speeds(name, count, **lines):
    @drawn(name, list(lines))
    def measure(M, N, dtype, mode, provider):
        """Device time of a CUDA graph, replayed with an overwritten L2 cache;
        median, 20 % and 80 % quantiles."""
        if not ON_GPU:
            return 3 * [float("nan")]
        t = given(M, N, dtype)
        return speed(count * t[0].nbytes, lambda: lines[provider](*t, dtype))

    return measure


copy = lambda dy, x, *_: x.copy_(dy)
report(speeds("columns", 2, columns=sums_by_columns, copy=copy))

# %%
# 1024 columns make 64 programs; of an H200's 132 multiprocessors 68 get none.
#
# Columns, split over rows
# ------------------------
#
# Several programs share the columns, up to about 1024 in all; a tile is now 32
# by 32, in 4 warps. Their sums are a matrix of ``2 * N`` columns, which a
# second kernel adds up, always in the same order.


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


def add_up(sums, dtype):
    P, _, N = sums.shape
    grads = torch.empty(2, N, dtype=dtype, device=sums.device)
    rows, warps = (256, 8) if P > 16 else (16, 4)
    args, grid = (sums, grads, P, 2 * N, rows, 16), triton.cdiv(2 * N, 16)
    _layer_norm_bwd_add_up[(grid,)](*args, num_warps=warps)
    return grads


def sums_by_parts(dy, x, w, mean, rstd, dtype):
    (M, N), parts = x.shape, max(1, min(16, 32768 // x.shape[1]))
    sums = torch.empty(parts, 2, N, dtype=mean.dtype, device=x.device)
    args = dy, x, mean, rstd, sums, M, N, 32, 32
    _layer_norm_bwd_columns[(triton.cdiv(N, 32), parts)](*args)
    return add_up(sums, dtype)


def pytorch(dy, x, w, mean, rstd, dtype, wanted=(True, True, True)):
    dy, x, w = (t.to(dtype) for t in (dy, x, w))
    backward = torch.ops.aten.native_layer_norm_backward
    return backward(dy, x, w.shape, mean, rstd, w, w, wanted)


columns = {"split": sums_by_parts, "columns": sums_by_columns}
known = lambda *tensors: pytorch(*tensors, [False, True, True])
report(speeds("split", 2, **columns, torch=known, copy=copy))

# %%
# Narrow matrices gain much; the widest one, which had enough programs before,
# loses a little.
# What is left: another kernel reads ``x`` and ``dy`` as well, for ``dx``.
# In the picture a number is a program; one that reads whole rows can do both.

# %%

# Drawing: which program reads which elements.

row, col = torch.arange(8)[:, None], torch.arange(6)
axes = plt.figure("Columns, split columns and rows: which program reads "
                  "which elements", (7.5, 3.4)).subplots(1, 3)  # fmt: skip
for ax, title, program in (
    (axes[0], "Columns", col // 2 + 0 * row),
    (axes[1], "Split", col // 2 + row // 2 % 2 * 3),
    (axes[2], "Buffers, atomics", row % 4 + 0 * col),
):
    ax.imshow(program, cmap="tab10", vmin=0, vmax=9, alpha=0.5)
    ax.set(title=title, xticks=[], yticks=[])
    for y, x in torch.cartesian_prod(row.flatten(), col).tolist():
        ax.text(x, y, program[y, x].item(), ha="center", va="center")
plt.show()

# %%
# A buffer for each program
# -------------------------
#
# Now the program that computes ``dx`` keeps the sums too.
# The kernel is that of `page 01 <01-layer-norm.html>`_. A function, ``KEEP``,
# is a constant of it and gets the sums; without one none are computed.


@triton.jit
def _layer_norm_bwd(
    dy_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, dx_ptr,
    sums_ptr,  # buffers of (2, N), or None
    M, N: tl.constexpr, BLOCK: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    acc: tl.constexpr = mean_ptr.dtype.element_ty
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
        dw += dy * x_hat
        db += dy
        wdy = dy * tl.load(w_ptr + cols, mask=mask, other=0).to(acc)
        c1 = tl.sum(x_hat * wdy) / N
        c2 = tl.sum(wdy) / N
        tl.store(dx_ptr + at, (wdy - x_hat * c1 - c2) * rstd, mask=mask)
    if KEEP is not None:
        KEEP(sums_ptr + cols, dw, db, mask, N)


# %%
# With a buffer each, ``KEEP`` stores the sums at the place of the program.
# Registers limit the programs, as on `page 01 <01-layer-norm.html>`_.

GPU = torch.cuda.get_device_properties(DEVICE) if ON_GPU else None
NUM_SMS = GPU.multi_processor_count if ON_GPU else 4


def plan(M, N, most=6):
    """Programs, at most so many a multiprocessor, and warps of each."""
    if N >= 8192:
        return min(M, NUM_SMS), 16
    per_sm = 6 if N <= 1024 else 4 if N <= 2048 else 3 if N <= 4096 else 2
    return min(M, min(per_sm, most) * NUM_SMS), 4


@triton.jit
def _store(sums_ptr, dw, db, mask, N: tl.constexpr):
    sums_ptr += tl.program_id(0) * 2 * N
    tl.store(sums_ptr, dw, mask=mask)
    tl.store(sums_ptr + N, db, mask=mask)


def by_rows(dy, x, w, mean, rstd, P=None, warps=None, sums=None, keep=None):
    if P is None:  # without sums: a program for each row
        P, warps = len(x), 4 if len(w) <= 2048 else 8
    block, dx = triton.next_power_of_2(len(w)), torch.empty_like(x)
    args = dy, x, w, mean, rstd, dx, sums, *x.shape, block, keep
    _layer_norm_bwd[(P,)](*args, num_warps=warps)
    return dx


def buffers(dy, x, w, mean, rstd, dtype):
    P, warps = plan(*x.shape)
    sums = torch.empty(P, 2, len(w), dtype=mean.dtype, device=x.device)
    dx = by_rows(dy, x, w, mean, rstd, P, warps, sums, _store)
    return dx, *add_up(sums, dtype)


# %%
# Atomic additions
# ----------------
#
# Now a single buffer, zeros at the start, to which all programs add,
# at most four on a multiprocessor.
# ``tl.atomic_add`` loses no addition, whoever comes first.
# ``relaxed``: it waits for nothing else, but is done when the kernel ends.


@triton.jit
def _atomic_add(sums_ptr, dw, db, mask, N: tl.constexpr):
    tl.atomic_add(sums_ptr, dw, mask=mask, sem="relaxed")
    tl.atomic_add(sums_ptr + N, db, mask=mask, sem="relaxed")


def atomics(dy, x, w, mean, rstd, dtype, programs=None):
    P, warps = plan(*x.shape, most=4)
    sums = torch.zeros(1, 2, len(w), dtype=mean.dtype, device=x.device)
    dx = by_rows(dy, x, w, mean, rstd, programs or P, warps, sums, _atomic_add)
    return dx, *add_up(sums, dtype)  # of one buffer: it only converts


# %%
# Each whole backward pass, against an addition of two matrices, which moves
# three:

DESIGNS = {
    "triton": buffers,
    "columns": lambda *t: (by_rows(*t[:-1]), *sums_by_columns(*t)),
    "split": lambda *t: (by_rows(*t[:-1]), *sums_by_parts(*t)),
    "atomics": atomics,
    "rows": lambda *t: atomics(*t, programs=len(t[0])),
    "torch": pytorch,
}
add = lambda dy, x, *_: torch.add(x, dy)
report(speeds("designs", 3, **DESIGNS, copy=add))

# %%
# Buffers are faster than columns, split or not, at every width. What a second
# read of ``x`` and ``dy`` costs depends on L2, the cache of all programs:
# small matrices may still be in it, large ones are not. Atomics once a program
# move less than buffers, but need zeros first, and additions to one place
# queue up: they are slower at narrow rows, and about as fast from 6144 columns
# on. An atomic addition for each row is the slowest.
#
# NVIDIA's profiler ``ncu`` counts the bytes that kernels read from memory
# (DRAM), here with empty caches for each kernel, so that second reads count.
# Here they are divided by the bytes of the matrices and buffers that are read:


DRAM = "bytes of DRAM per byte counted"


@drawn("dram", list(DESIGNS)[:-1], DRAM, counter="dram__bytes_read.sum")
def dram(M, N, dtype, mode, counter, provider):
    """Bytes that all kernels of a backward pass read from DRAM, over those in
    the table of this page."""
    if ON_GPU:
        tensors = given(M, N := int(N), dtype)
        matrices = 4 if provider in ("columns", "split") else 2
        sums = plan(M, N)[0] if provider == "triton" else 0
        by_hand = (matrices * 2 * M + sums * 8) * N
        DESIGNS[provider](*tensors, dtype)  # compiles
        with torch.cuda.nvtx.range(f"counted {provider} {N} per {by_hand}"):
            DESIGNS[provider](*tensors, dtype)
    return 3 * [float("nan")]  # only ncu knows


dram.run(show_plots=ON_GPU)

# %%
# All points are near 1: the table is right about what is read.
# Memory does not see atomic additions, for they are done in L2.
#
# The same bits?
# --------------
#
# Each addition rounds, so a sum depends on its order: ``(0.1 + 0.2) + 0.3`` is
# not ``0.1 + (0.2 + 0.3)``.
# Of 100 runs on the same input we count those whose ``dw`` or ``db`` differs
# from the first in any bit of float32; in 16 bits fewer elements differ.


@drawn("bits", list(DESIGNS), "different results of 100")
def different_bits(M, N, dtype, mode, provider):
    """Runs of 100 whose dw or db, in float32, differs in any bit from that of
    the first."""
    if not ON_GPU:
        return 3 * [float("nan")]
    tensors = given(M, int(N), dtype)
    run = lambda: torch.stack(DESIGNS[provider](*tensors, torch.float32)[1:])
    first = run()
    return 3 * [sum(not torch.equal(run(), first) for _ in range(100))]


different_bits.run(show_plots=ON_GPU)

# %%
# Buffers and parts are added up in a fixed order, atomic additions as programs
# come: no run with atomics repeats the first.
#
# A function to train with
# ------------------------
#
# The forward pass is that of `page 01 <01-layer-norm.html>`_, in registers.


@triton.jit
def _layer_norm_fwd(
    x_ptr, w_ptr, b_ptr, y_ptr, mean_ptr, rstd_ptr,
    eps: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    acc = mean_ptr.dtype.element_ty
    x = tl.load(x_ptr + row * N + cols, mask=cols < N, other=0).to(acc)
    mean = tl.sum(x) / N
    x = tl.where(cols < N, x - mean, 0)
    rstd = 1 / tl.sqrt(tl.sum(x * x) / N + eps)
    tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)
    w = tl.load(w_ptr + cols, mask=cols < N).to(acc)
    b = tl.load(b_ptr + cols, mask=cols < N).to(acc)
    tl.store(y_ptr + row * N + cols, x * rstd * w + b, mask=cols < N)


class LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, b, eps, backward):
        (M, N), y = x.shape, torch.empty_like(x)
        acc = torch.promote_types(x.dtype, torch.float32)
        mean, rstd = torch.empty(2, M, dtype=acc, device=x.device)
        block = triton.next_power_of_2(N)
        warps = min(max(block * x.element_size() // 4096, 4), 16)
        args = x, w, b, y, mean, rstd, eps, N, block
        _layer_norm_fwd[(M,)](*args, num_warps=warps)
        ctx.save_for_backward(x, w, mean, rstd)
        ctx.dtypes, ctx.backward = (w.dtype, b.dtype), backward
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        args = *ctx.saved_tensors, torch.promote_types(*ctx.dtypes)
        dx, *grads = ctx.backward(dy.contiguous(), *args)
        return dx, *map(torch.Tensor.to, grads, ctx.dtypes), None, None


# %%
# A missing weight is ones, a missing bias zeros.


def layer_norm(
    x, normalized_shape, weight=None, bias=None, eps=1e-5, backward=buffers
):
    """Normalize rows of up to 16384 columns; weight and bias may be None."""
    shape = torch.Size(normalized_shape)
    w = x.new_ones(shape) if weight is None else weight
    b = x.new_zeros(shape) if bias is None else bias
    for name, t in {"x": x, "weight": w, "bias": b}.items():
        if not t.is_floating_point():
            raise TypeError(f"{name} is {t.dtype}: floats are taken")
        if t.device != x.device or t.device.type != DEVICE.type:
            raise ValueError(f"{name} is on {t.device}: all go on {DEVICE}")
        if shape != (t.shape[-len(shape) :] if name == "x" else t.shape):
            shapes = f"{(*t.shape,)}, normalized_shape is {(*shape,)}"
            raise ValueError(f"the shape of {name} is {shapes}")
    if not 0 < (N := shape.numel()) <= 16384:
        raise ValueError(f"normalized_shape has {N} elements, not 1 to 16384")
    tensors = x.reshape(-1, N), w.reshape(N), b.reshape(N)
    tensors = (t.contiguous() for t in tensors)
    return LayerNorm.apply(*tensors, eps, backward).reshape(x.shape)


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
for name in list(DESIGNS)[:-1]:
    print(name, end=": ")
    function = lambda *t: layer_norm(*t, backward=DESIGNS[name])
    check(function, M, N, torch.float32)
check(layer_norm, M, N, torch.float16)

# %%
# An order that changes is not less exact, but its result cannot be repeated.
# Another number of programs is another order, too.
#
# Exercise 1: a few buffers
# -------------------------
#
# Let program ``p`` add to buffer ``p % 3``, so that fewer additions meet at an
# address; ``_atomic_add`` fills only the first.
#
# **Hint.** Only an address has to change.


def exercise_1(keep):
    dy, x, *_ = tensors = given(10, 24, torch.float32)
    sums = torch.zeros(3, 2, 24, device=DEVICE)
    by_rows(*tensors, 6, 4, sums, keep)
    terms = torch.stack([dy * F.layer_norm(x, (24,)), dy], dim=1)
    want = torch.stack([terms[g::3].sum(0) for g in range(3)])
    right = torch.isclose(sums, want, atol=1e-5).flatten(1).all(1)
    print("right buffers:", right.nonzero().flatten().tolist())
    return right.all()


exercise_1(_atomic_add)

# %%

# Solution 1


@triton.jit
def _add_to_few(sums_ptr, dw, db, mask, N: tl.constexpr):
    sums_ptr += tl.program_id(0) % 3 * 2 * N
    _atomic_add(sums_ptr, dw, db, mask, N)


assert exercise_1(_add_to_few)
