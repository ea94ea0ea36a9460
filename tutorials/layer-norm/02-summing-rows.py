r"""
Who adds up the rows?
=====================

The weight gradients of layer normalization are sums over all rows, and no
program has all rows: who adds them up?
Every program its own rows, in a buffer each, and a small kernel the buffers:
that reads the matrices once, and all runs give the same bits.

Read `Layer normalization, both passes <01-layer-norm.html>`_ first.
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
# * **Split**: several programs share the columns, each takes some rows.
# * **Buffers**: the kernel for ``dx`` sums as well, in a buffer a program.
# * **Atomics**: the same, but all programs add to one buffer.
#
# The unit is a matrix of ``M`` rows in 16 bits, ``2 * M`` bytes a column.
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
# This is what programs ask for; what is asked for twice may come from a cache.
#
# Columns
# -------
#
# A program walks down ``COLS`` columns, ``ROWS`` rows at a time.
# Each *lane*, an element of this *tile*, has a sum; at the end those of a
# column are added up.
# The second number of the grid counts parts of the rows: one, for now.


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
# Narrow matrices are cut into narrower tiles, for more programs.


def sums_by_columns(dy, x, w, mean, rstd, dtype):
    M, N = x.shape
    sums = torch.empty(2, N, dtype=dtype, device=x.device)
    cols = 16 if N <= 4096 else 32 if N <= 8192 else 64
    args = dy, x, mean, rstd, sums, M, N, 128, cols
    _layer_norm_bwd_columns[(triton.cdiv(N, cols), 1)](*args, num_warps=8)
    return sums


def given(M, N, dtype):
    """dy, x, w, and the mean and rstd that a forward pass has saved."""
    torch.manual_seed(0)
    dy, x = torch.randn(2, M, N, device=DEVICE, dtype=dtype)
    w = torch.rand(N, device=DEVICE, dtype=dtype)
    return dy, x, w, *torch.native_layer_norm(x, (N,), w, w, 1e-5)[1:]


dy, x, *_ = toy = given(4, 3, torch.float32)
print("PyTorch:", (dy * F.layer_norm(x, (3,))).sum(0).tolist())
print("columns:", sums_by_columns(*toy, torch.float32)[0].tolist())

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
# Each design has the tiles, warps and programs that were the fastest for it.

NAMES = {"triton": "Buffers", "rows": "Atomics, rows", "torch": "PyTorch"}


def speeds(name, matrices, **lines):
    def measure(M, N, dtype, mode, provider):
        """Device time of a CUDA graph, replayed with an overwritten L2 cache;
        median, 20 % and 80 % quantiles."""
        if not ON_GPU:
            return 3 * [float("nan")]
        tensors = given(M, N, dtype)
        fn = lambda: lines[provider](*tensors, dtype)
        return speed(matrices * tensors[0].nbytes, fn)

    return triton.testing.perf_report(
        triton.testing.Benchmark(
            x_names=["N"],
            x_vals=[512 * i for i in (2, 3, 4, 6, 8, 9, 12, 16, 17, 24)],
            line_arg="provider",
            line_vals=list(lines),
            line_names=[NAMES.get(line, line.capitalize()) for line in lines],
            ylabel="GB/s",
            plot_name=f"layer-norm-rows-{name}",
            args={"M": 4096, "dtype": torch.float16, "mode": "backward"},
        )
    )(measure)


copy = lambda dy, x, *_: x.copy_(dy)
report(speeds("columns", 2, columns=sums_by_columns, copy=copy))

# %%
# 1024 columns make 64 programs, fewer than a large GPU has multiprocessors,
# and each has all 4096 rows to walk down.
#
# Columns, split over rows
# ------------------------
#
# One change: several programs share the columns.
# Their sums are a matrix of ``2 * N`` columns, which a second kernel adds up,
# always in the same order.


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
    (P, _, N), rows = sums.shape, 16 if len(sums) <= 16 else 256
    grads = torch.empty(2, N, dtype=dtype, device=sums.device)
    grid = (triton.cdiv(2 * N, 16),)
    _layer_norm_bwd_add_up[grid](sums, grads, P, 2 * N, rows, 16)
    return grads


def sums_by_parts(dy, x, w, mean, rstd, dtype, parts=16):
    M, N = x.shape
    sums = torch.empty(parts, 2, N, dtype=mean.dtype, device=x.device)
    args = dy, x, mean, rstd, sums, M, N, 32, 64
    _layer_norm_bwd_columns[(triton.cdiv(N, 64), parts)](*args)
    return add_up(sums, dtype)


def pytorch(dy, x, w, mean, rstd, dtype, wanted=(True, True, True)):
    dy, x, w = (t.to(dtype) for t in (dy, x, w))
    backward = torch.ops.aten.native_layer_norm_backward
    return backward(dy, x, w.shape, mean, rstd, w, w, wanted)


columns = {"split": sums_by_parts, "columns": sums_by_columns}
known = lambda *tensors: pytorch(*tensors, [False, True, True])
report(speeds("split", 2, **columns, torch=known, copy=copy))

# %%
# What is left: another kernel reads ``x`` and ``dy`` as well, for ``dx``.
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
# A buffer for each program
# -------------------------
#
# One change: the program that computes ``dx`` has ``x`` and ``dy`` at hand, so
# it keeps the sums too.
# The kernel is that of the page before; what becomes of the sums is left to
# ``KEEP``, a function that is known when the kernel is compiled.
# Without one the compiler leaves the sums out.


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
        wdy = dy * tl.load(w_ptr + cols, mask=mask, other=0).to(acc)
        c1 = tl.sum(x_hat * wdy) / N
        c2 = tl.sum(wdy) / N
        tl.store(dx_ptr + at, (wdy - x_hat * c1 - c2) * rstd, mask=mask)
        dw += dy * x_hat
        db += dy
    if KEEP is not None:
        KEEP(sums_ptr + cols, dw, db, mask, N)


# %%
# With a buffer each, ``KEEP`` stores the sums at the place of the program:


@triton.jit
def _store(sums_ptr, dw, db, mask, N: tl.constexpr):
    sums_ptr += tl.program_id(0) * 2 * N
    tl.store(sums_ptr, dw, mask=mask)
    tl.store(sums_ptr + N, db, mask=mask)


def by_rows(dy, x, w, mean, rstd, programs, sums=None, keep=None):
    block, dx = triton.next_power_of_2(len(w)), torch.empty_like(x)
    warps = min(max(block * x.element_size() // 2048, 4), 8)
    args = dy, x, w, mean, rstd, dx, sums, *x.shape, block, keep
    _layer_norm_bwd[(programs,)](*args, num_warps=warps)
    return dx


def buffers(dy, x, w, mean, rstd, dtype):
    M, N = x.shape
    # Each costs a row of sums, but few programs have few loads in flight.
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
    # Zeros, for an addition adds to what is there: one more launch.
    sums = torch.zeros(1, 2, N, dtype=mean.dtype, device=x.device)
    dx = by_rows(dy, x, w, mean, rstd, P, sums, _atomic_add)
    return dx, *add_up(sums, dtype)  # of one buffer: it only converts


# %%
# Each whole backward pass, against an addition of two matrices, which moves
# three:

DESIGNS = {
    "triton": buffers,
    "columns": lambda *t: (by_rows(*t[:-1], len(t[0])), *sums_by_columns(*t)),
    "split": lambda *t: (by_rows(*t[:-1], len(t[0])), *sums_by_parts(*t)),
    "atomics": atomics,
    "rows": lambda *t: atomics(*t, programs=len(t[0])),
    "torch": pytorch,
}
add = lambda dy, x, *_: torch.add(x, dy)
report(speeds("designs", 3, **DESIGNS, copy=add))

# %%
# Buffers and split columns differ in what is read twice, buffers and atomics
# in where the sums go.
# An atomic addition for each row moves as much as four matrices, to the same
# ``2 * N`` numbers.
#
# The same bits?
# --------------
#
# Each addition rounds, so a sum depends on its order: ``(0.1 + 0.2) + 0.3`` is
# not ``0.1 + (0.2 + 0.3)``.
# Each design runs 100 times on the same input, and we count the runs whose
# ``dw`` or ``db`` differs from the first in any bit, both in float32: rounding
# to 16 bits would hide most differences.


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=["1024", "4096", "8192"],  # drawn as points
        line_arg="provider",
        line_vals=list(DESIGNS),
        line_names=[NAMES.get(line, line.capitalize()) for line in DESIGNS],
        ylabel="different results of 100",
        plot_name="layer-norm-rows-bits",
        args={"M": 4096, "dtype": torch.float16, "mode": "backward"},
    )
)
def different_bits(M, N, dtype, mode, provider):
    """Runs of 100 whose dw or db, in float32, differs in any bit from that
    of the first run. PyTorch gets the same numbers in float32."""
    if not ON_GPU:
        return 3 * [float("nan")]
    tensors = given(M, int(N), dtype)
    run = lambda: torch.stack(DESIGNS[provider](*tensors, torch.float32)[1:])
    first = run()
    return 3 * [sum(not torch.equal(run(), first) for _ in range(100))]


table = different_bits.run(show_plots=ON_GPU, return_df=True).set_index("N")
if table.notna().all(axis=None):
    print(table.astype(int).T.to_string())

# %%
# Buffers and parts are added up in a fixed order: the same bits each time.
# Atomic additions are done in the order in which programs come.
#
# A function to train with
# ------------------------
#
# The forward pass is that of the page before, with a row in registers.


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
        ctx.b_dtype, ctx.backward = b.dtype, backward
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        x, w, mean, rstd = ctx.saved_tensors
        wide = torch.promote_types(w.dtype, ctx.b_dtype)
        dx, dw, db = ctx.backward(dy.contiguous(), x, w, mean, rstd, wide)
        return dx, dw.to(w.dtype), db.to(ctx.b_dtype), None, None


# %%
# Any layout becomes a contiguous matrix; a missing weight is ones, a missing
# bias zeros.


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
        taken = "this page takes 1 to 16384 elements"
        raise ValueError(f"normalized_shape is {(*shape,)}: {taken}")
    rows, w, b = (t.reshape(-1, N).contiguous() for t in (x, w, b))
    y = LayerNorm.apply(rows, w[0], b[0], eps, backward)
    return y.reshape(x.shape)


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

M, N = (1151, 8192) if ON_GPU else (9, 200)
for name in "triton", "columns", "split", "atomics", "rows":
    print(name, end=": ")
    function = lambda *t: layer_norm(*t, backward=DESIGNS[name])
    check(function, M, N, torch.float32)
check(layer_norm, M, N, torch.float16)

# %%
# Each design keeps the limit of float32: an order of additions that changes is
# not less exact, it cannot be repeated.
# Another number of programs is another order too, and so other bits.
#
# Exercise 1: a few buffers
# -------------------------
#
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
    dy, x, *_ = tensors = given(10, 24, torch.float32)
    sums = torch.zeros(3, 2, 24, device=DEVICE)
    by_rows(*tensors, 6, sums, keep)
    terms = torch.stack([dy * F.layer_norm(x, (24,)), dy], dim=1)
    want = torch.stack([terms[g::3].sum(0) for g in range(3)])
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
