r"""
A lock, and its race
====================

How can many programs add to one row of sums without losing an addition?
With a lock that one atomic exchange takes and another one frees, and a
barrier in between, where all threads of a program meet.

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
# On `page 01 <01-layer-norm.html>`_ each program has a buffer of its own.
# `Triton's tutorial on layer normalization
# <https://triton-lang.org/main/getting-started/tutorials/05-layer-norm.html>`_
# lets many programs add to few buffers.
# To add is to read, and then to write; if two programs read before either has
# written, one addition is lost:

buffer = read_by_0 = read_by_1 = 0.0
buffer = read_by_0 + 3.0
buffer = read_by_1 + 4.0
print("sum:", 3.0 + 4.0, "buffer:", buffer)

# %%
# The lock
# --------
#
# Each buffer has a lock, an integer: 0 is free and never written, 1 is taken,
# 2 is free and written.
# ``atomic_xchg`` writes a new value and returns the old one, in one step.
# A program writes 1 until the old value is not 1: now the lock is its own.
#
# A program is many threads, and each stores its own columns.
# *One* of them executes the exchange that frees the lock.
#
# * ``tl.debug_barrier()`` lets all threads meet first.
#   Without it the lock may be free while a thread has still to store.
# * ``release`` orders memory: who sees the 2 also sees the stores before it.
# * ``acquire`` is the other half: no load behind it reads older values.
#
# No program waits forever: one that has a lock runs, and waits for no other.


@triton.jit
def _add_behind_lock(
    dw, db, sums_ptr,  # two rows to add, to one of (buffers, 2, N)
    locks_ptr,  # (buffers,), 0 at the start
    buffer, cols, N: tl.constexpr, FLAW: tl.constexpr,  # a part to leave out
):  # fmt: skip
    ACQUIRE: tl.constexpr = "relaxed" if FLAW == "no acquire" else "acquire"
    RELEASE: tl.constexpr = "relaxed" if FLAW == "no release" else "release"
    dw_ptr = sums_ptr + buffer * 2 * N + cols
    db_ptr = dw_ptr + N
    state = tl.atomic_xchg(locks_ptr + buffer, 1, sem=ACQUIRE)
    while state == 1:
        state = tl.atomic_xchg(locks_ptr + buffer, 1, sem=ACQUIRE)
    old = cols < tl.where(state == 2, N, 0)  # all columns, or none
    dw += tl.load(dw_ptr, mask=old, other=0)
    db += tl.load(db_ptr, mask=old, other=0)
    tl.store(dw_ptr, dw, mask=cols < N)
    tl.store(db_ptr, db, mask=cols < N)
    if FLAW != "no barrier":
        tl.debug_barrier()  # every thread has stored its columns
    tl.atomic_xchg(locks_ptr + buffer, 2, sem=RELEASE)


# %%
# As on `page 01 <01-layer-norm.html>`_ a program sums rows in registers.
# Then it goes through the lock, or, without locks, to a buffer of its own.


@triton.jit
def _layer_norm_bwd(
    dy_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, dx_ptr, sums_ptr, locks_ptr,
    M, buffers, N: tl.constexpr, BLOCK: tl.constexpr, FLAW: tl.constexpr = "",
):  # fmt: skip
    program, cols = tl.program_id(0), tl.arange(0, BLOCK)
    mask = cols < N
    acc = mean_ptr.dtype.element_ty  # float32; float64 for float64
    dw = tl.zeros((BLOCK,), acc)
    db = tl.zeros((BLOCK,), acc)
    for i in range(program, M, tl.num_programs(0)):
        at = tl.cast(i, tl.int64) * N + cols  # M * N may pass 2**31
        x = tl.load(x_ptr + at, mask=mask, other=0).to(acc)
        dy = tl.load(dy_ptr + at, mask=mask, other=0).to(acc)
        rstd = tl.load(rstd_ptr + i)
        x_hat = (x - tl.load(mean_ptr + i)) * rstd
        dw += dy * x_hat
        db += dy
        wdy = dy * tl.load(w_ptr + cols, mask=mask, other=0).to(acc)
        c1 = tl.sum(x_hat * wdy) / N
        c2 = tl.sum(wdy) / N
        tl.store(dx_ptr + at, (wdy - x_hat * c1 - c2) * rstd, mask=mask)
    if locks_ptr is not None:
        buffer = program % buffers
        _add_behind_lock(dw, db, sums_ptr, locks_ptr, buffer, cols, N, FLAW)
    else:
        sums_ptr += program * 2 * N + cols
        tl.store(sums_ptr, dw, mask=mask)
        tl.store(sums_ptr + N, db, mask=mask)


# %%
# A *plan*: programs, buffers, and warps (groups of 32 threads) of a program.


def stage_1(dy, x, w, mean, rstd, plan, flaw=""):
    """dx, and the buffers."""
    (M, N), dx, locks = x.shape, torch.empty_like(x), None
    programs, buffers, warps = plan
    sums = torch.empty(buffers, 2, N, dtype=mean.dtype, device=x.device)
    if buffers < programs:
        locks = torch.zeros(buffers, dtype=torch.int32, device=x.device)
    block = triton.next_power_of_2(N)
    args = dy, x, w, mean, rstd, dx, sums, locks, M, buffers, N, block, flaw
    _layer_norm_bwd[(programs,)](*args, num_warps=warps)
    return dx, sums


def given(M, N):
    """dy, x, w, mean and rstd; and dw and db in float64."""
    torch.manual_seed(0)
    x, dy = torch.randn(2, M, N, device=DEVICE).half()
    w, X = torch.rand(N, device=DEVICE).half(), x.double()
    mean, rstd = X.mean(1), (X.var(1, correction=0) + 1e-5) ** -0.5
    exact = torch.stack([dy * F.layer_norm(X, (N,)), dy.double()]).sum(1)
    return (dy, x, w, mean.float(), rstd.float()), exact


def error(sums, exact):
    """Of the sum of all buffers: norm over norm."""
    return ((sums.double().sum(0) - exact).norm() / exact.norm()).item()


tensors, exact = given(70, 24)
sums = stage_1(*tensors, (70, 8, 4))[1]
print(f"relative error, 70 rows in 8 buffers: {error(sums, exact):.0e}")

# %%
# The race
# --------
#
# In a *race* the result depends on who comes first.
# Here are a hundred runs with and without each part, with 128 columns a warp:

FLAWS = ["right", "no barrier", "no acquire", "no release"]


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"], x_vals=["512", "1024", "2048", "4096"],  # as points
        line_arg="provider", line_vals=FLAWS, line_names=FLAWS,
        ylabel="wrong runs of 100", plot_name="layer-norm-lock-race",
        args={"M": 32768, "dtype": torch.float16, "mode": "backward"},
    )
)  # fmt: skip
def race(M, N, dtype, mode, provider):
    """Runs of 100 in which dw or db differs from float64 by a relative error
    above 1e-5; the order of additions explains less."""
    if not ON_GPU:  # here one program follows the other
        return 3 * [float("nan")]
    tensors, exact = given(M, N := int(N))
    run = lambda: stage_1(*tensors, (M, 256, N // 128), provider)[1]
    return 3 * [sum(error(run(), exact) > 1e-5 for _ in range(100))]


table = race.run(show_plots=ON_GPU, return_df=True).set_index("N")
if table.notna().all(axis=None):
    assert not table.iloc[:, 0].any()  # with all its parts it is right

# %%
# Without acquire all runs are wrong: nothing empties L1, the cache of one
# multiprocessor, before loads. A missing barrier or release shows at narrow
# rows and may hide at wide ones: a test that passes proves nothing.
# Nor do the usual tools see the missing barrier: ``racecheck`` of
# compute-sanitizer watches shared memory, but the sums are in global memory,
# and Triton's interpreter runs one program after the other.
#
# What always shows it is the PTX, which Triton hands to NVIDIA's assembler.
# These are the last instructions of the kernel, from triton 3.7.1:
#
# * ``st.global.v4.b32``, ``bar.sync``, ``atom.global.gpu.release.exch.b32``;
# * without ``tl.debug_barrier()``: ``st.global.v4.b32``,
#   ``atom.global.gpu.release.exch.b32``.
#
# So only the call puts a barrier between the stores and the exchange that
# frees the lock; triton 3.9.0 adds one by itself.
# `Triton's own page <https://github.com/triton-lang/triton/pull/6307>`_ had
# none until 2025.
#
# What a lock saves
# -----------------
#
# The buffers are added up by a second kernel, the second of two stages.

# %%

# Drawing: four rows add to two buffers; a second stage sums the buffers.

ax = plt.figure("Four rows add to two buffers; a second stage sums the "
                "buffers", (7.5, 3.2)).subplots()  # fmt: skip
ax.set(xlim=(0, 10), ylim=(-0.2, 4.4))
ax.axis("off")
places = [(1, 3 - i, f"row {i}", f"C{i % 2}") for i in range(4)]
places += [(5, 2.5 - 2 * i, f"buffer {i}", f"C{i}") for i in range(2)]
for x, y, text, color in [*places, (9, 1.5, "dw, db", "gray")]:
    box = {"fc": color, "alpha": 0.5, "boxstyle": "square,pad=0.6"}
    ax.text(x, y, text, bbox=box, ha="center", va="center")
arrows = [((1.8, 3 - i), (4, 2.5 - i % 2 * 2)) for i in range(4)]
for start, end in [*arrows, *(((6, y), (8.2, 1.5)) for y in (2.5, 0.5))]:
    ax.annotate("", end, start, arrowprops={"arrowstyle": "->"})
ax.text(3, 3.9, "stage 1: add, one at a time", ha="center")
ax.text(7.2, 3, "stage 2", ha="center")
plt.show()

# %%
# Every program stores its sums, 8 bytes a column.
# Unless it is the first at its buffer, it loads as much before.
# Stage 2 loads each buffer once.
# For :math:`P` programs and :math:`B` buffers that is
# :math:`8 \, (P + (P - B) + B) = 16 \, P` bytes a column.
# :math:`B` is gone: **a lock saves no traffic**, only memory, if few buffers.
#
# Three plans: a buffer each, as on `page 01 <01-layer-norm.html>`_; a lock for
# two; a program for each row at 256 or 128 locks, much as on Triton's page.

GPU = torch.cuda.get_device_properties(DEVICE) if ON_GPU else None
NUM_SMS = GPU.multi_processor_count if ON_GPU else 132  # of an H200


def own_buffers(M, N):
    """One for each program, and no lock."""
    per_sm = 6 if N <= 1024 else 4 if N <= 2048 else 3 if N <= 4096 else 2
    programs = min(M, NUM_SMS * (per_sm if N < 8192 else 1))
    return programs, programs, 4 if N < 8192 else 16


def lock_once(M, N):
    programs, _, warps = own_buffers(M, N)
    return programs, triton.cdiv(programs, 2), warps


def lock_each_row(M, N):
    return (M, min(M, 256), 4) if N <= 8192 else (M, min(M, 128), 8)


PLANS = {"triton": lock_once, "own buffers": own_buffers}
PLANS = {**PLANS, "lock each row": lock_each_row}
for N in 1024, 8192:
    print(f"{N} columns, {4096 * N * 2 / 1e6:.0f} MB a matrix of 4096 rows")
    for plan in PLANS.values():
        programs, buffers, _ = plan(4096, N)
        print(f"  {plan.__name__:14}{8 * buffers * N / 1e6:5.1f} MB", end="")
        print(f" of buffers,{16 * programs * N / 1e6:6.1f} MB moved for them")

# %%
# A function to train with
# ------------------------
#
# Stage 2, and a forward kernel with rows in registers:


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


# %%
# Both stages, and an autograd function that ties both passes together:


def backward(dy, x, w, mean, rstd, plan, dtype):
    dx, sums = stage_1(dy, x, w, mean, rstd, plan)
    grads = torch.empty(2, len(w), dtype=dtype, device=x.device)
    args = sums, grads, len(sums), 2 * len(w), 256, 16
    _layer_norm_bwd_add_up[(triton.cdiv(2 * len(w), 16),)](*args, num_warps=8)
    return dx, *grads


class LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, b, eps, plan):
        (M, N), y = x.shape, torch.empty_like(x)
        acc = torch.promote_types(x.dtype, torch.float32)
        mean, rstd = torch.empty(2, M, dtype=acc, device=x.device)
        block = triton.next_power_of_2(N)
        warps = min(max(block * x.element_size() // 4096, 4), 16)
        args = x, w, b, y, mean, rstd, eps, N, block
        _layer_norm_fwd[(M,)](*args, num_warps=warps)
        ctx.save_for_backward(x, w, mean, rstd)
        ctx.dtypes, ctx.plan = (w.dtype, b.dtype), plan(M, N)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        args = dy.contiguous(), *ctx.saved_tensors, ctx.plan
        dx, *grads = backward(*args, torch.promote_types(*ctx.dtypes))
        return dx, *map(torch.Tensor.to, grads, ctx.dtypes), None, None


# %%
# A missing weight is ones, a missing bias zeros.


def layer_norm(
    x, normalized_shape, weight=None, bias=None, eps=1e-5, plan=lock_once
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
    return LayerNorm.apply(*tensors, eps, plan).reshape(x.shape)


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
# All plans give the right gradients:

M, N = (1151, 8192) if ON_GPU else (9, 200)
for plan in PLANS.values():
    print(plan.__name__, end=": ")
    check(lambda *t: layer_norm(*t, plan=plan), M, N, torch.float16)

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
# What the lock is worth
# ----------------------
#
# The backward pass with each plan, beside an addition of two matrices, which
# moves three:

NAMES = {"triton": "Two at a lock", "torch": "PyTorch", "copy": "Copy"}
LINES = [*PLANS, "torch", "torch.compile", "copy"]


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_vals=[512 * i for i in (2, 3, 4, 6, 8, 9, 12, 16, 17, 20, 31)],
        x_names=["N"], line_arg="provider", line_vals=LINES,
        line_names=[NAMES.get(line, line.capitalize()) for line in LINES],
        ylabel="GB/s", plot_name="layer-norm-lock-backward",
        args={"M": 4096, "dtype": torch.float16, "mode": "backward"},
    )
)  # fmt: skip
def backward_speed(M, N, dtype, mode, provider):
    """Device time of a CUDA graph, replayed with an overwritten L2 cache;
    median, 20 % and 80 % quantiles."""
    if not ON_GPU:
        return 3 * [float("nan")]
    x, w, b, dy = inputs(M, N, dtype)
    f, out = F.layer_norm, torch.empty_like(dy)
    if provider in PLANS:
        f = lambda *t: layer_norm(*t, plan=PLANS[provider])
    if provider == "torch.compile":
        torch._dynamo.reset()  # nothing is left of other shapes
        torch._functorch.config.donated_buffer = False  # runs many times
        f = torch.compile(lambda *t: F.layer_norm(*t), dynamic=False)
    y, grad = f(x, (N,), w, b), torch.autograd.grad
    fn = lambda: grad(y, (x, w, b), dy, retain_graph=True)
    if provider == "copy":
        fn = lambda: torch.add(x.detach(), dy, out=out)
    return speed(3 * dy.nbytes, fn)


report(backward_speed)

# %%
# At 15872 columns two at a lock are faster than a buffer each; at all other
# widths of the figure a buffer each is faster, though hardly at 6144.
# A program for each row is far behind both.
# NVIDIA's profiler ``ncu`` counts what passes through L2, the cache that all
# programs share, here over the bytes of three matrices:


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_vals=["1024", "4096", "8192", "15872"],  # as points
        x_names=["N"], line_arg="provider", line_vals=[*PLANS, "copy"],
        line_names=[NAMES.get(p, p.capitalize()) for p in [*PLANS, "copy"]],
        ylabel="bytes of L2 per byte counted", plot_name="layer-norm-lock-l2",
        args={"M": 4096, "dtype": torch.float16, "mode": "backward",
              "counter": "lts__t_bytes.sum"},
    )
)  # fmt: skip
def traffic(M, N, dtype, mode, counter, provider):
    """Bytes that pass through L2 in a backward pass, over those of three
    matrices."""
    if ON_GPU:
        (dy, x, *others), _ = given(M, N := int(N))
        fn = lambda: torch.add(x, dy)
        if provider in PLANS:
            plan = PLANS[provider](M, N)
            fn = lambda: backward(dy, x, *others, plan, dtype)
        fn()  # compiles
        by_hand = 3 * x.nbytes
        with torch.cuda.nvtx.range(f"counted {provider} {N} per {by_hand}"):
            fn()
    return 3 * [float("nan")]  # only ncu knows


traffic.run(show_plots=ON_GPU)

# %%
# The addition is at 1.5: L2 moves half as much again as kernels ask for. Above
# it are the sums, which count so, too; ``w`` comes from a nearer cache. Up to
# 8192 columns two at a lock move about what a buffer each does, and one may
# wait; at 15872 registers are *spilled* into memory: both move more.
# So use a lock where memory has no room for a buffer each; for layer
# normalization it has, and only one width of the figure is faster with a lock.
# Three or more at a lock come in any order: the last bits of ``dw`` and ``db``
# may differ from run to run, a price that no clock shows.
#
# Exercise 1: one launch, no lock
# -------------------------------
#
# The last program to finish could do stage 2 itself; but which one is last?
# Here ``out`` shall be the sum of ``dy * dy`` over the rows.
# The stub stops when each program has stored its row to its buffer.
# Let the programs count themselves with ``tl.atomic_add``, and let the last
# one sum the buffers: in one order, so with the same bits in every run.
#
# **Hint.** The count is a release and an acquire in one: ``sem="acq_rel"``.
# And what must stand before it?


@triton.jit
def _one_launch(
    dy_ptr, buffers_ptr, count_ptr, out_ptr,
    N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program, cols = tl.program_id(0), tl.arange(0, BLOCK)
    row = tl.load(dy_ptr + program * N + cols, mask=cols < N, other=0)
    tl.store(buffers_ptr + program * N + cols, row * row, mask=cols < N)
    # to do: count; the last program sums the buffers


def exercise_1(kernel):
    dy = inputs(10, 24, torch.float32)[3]
    buffers, out = torch.empty_like(dy), torch.empty_like(dy[0])
    count = torch.zeros(1, dtype=torch.int32, device=DEVICE)  # each time
    kernel[(10,)](dy, buffers, count, out.fill_(-1), N=24, BLOCK=32)
    wrong = ~torch.isclose(out, (dy * dy).sum(0))
    print("wrong columns:", wrong.nonzero().flatten().tolist())
    return not wrong.any()


exercise_1(_one_launch)

# %%

# Solution 1


@triton.jit
def _one_launch_1(
    dy_ptr, buffers_ptr, count_ptr, out_ptr,
    N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program, cols = tl.program_id(0), tl.arange(0, BLOCK)
    row = tl.load(dy_ptr + program * N + cols, mask=cols < N, other=0)
    tl.store(buffers_ptr + program * N + cols, row * row, mask=cols < N)
    tl.debug_barrier()  # all threads have stored, then one of them counts
    before = tl.atomic_add(count_ptr, 1, sem="acq_rel")
    if before == tl.num_programs(0) - 1:
        total = tl.zeros((BLOCK,), tl.float32)
        for buffer in range(tl.num_programs(0)):
            at = buffers_ptr + buffer * N + cols
            total += tl.load(at, mask=cols < N, other=0)
        tl.store(out_ptr + cols, total, mask=cols < N)


assert exercise_1(_one_launch_1)
