r"""
Loads in flight
===============

Why is a backward pass slow that takes one row at a time?
Memory answers late, so much must be asked for before the first answer comes:
with more programs, or by asking ahead.

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
# The *latency* of memory is the time from a load to its value, its *bandwidth*
# the bytes that it hands out in a second.
# What is *in flight* was asked for and is not there yet; it comes within one
# latency: **bytes in flight = bandwidth × latency** (Little's law).
#
# This kernel has as many bytes in flight as we like.
# Each *lane*, a place of a program's tile, reads 4 bytes, all of them 0.
# The compiler cannot know that, so where a lane reads next depends on what it
# has read: no load can start before the last one has ended.


@triton.jit
def _read(x_ptr, end_ptr, steps, LANES: tl.constexpr):
    lanes = tl.program_id(0) * LANES + tl.arange(0, LANES)
    at = lanes
    for _ in range(steps):
        at += tl.num_programs(0) * LANES + tl.load(x_ptr + at)
    tl.store(end_ptr + lanes, at)


zeros = torch.zeros(40, dtype=torch.int32, device=DEVICE)
_read[(2,)](zeros, end := torch.empty_like(zeros[:8]), 5, LANES=4)
print("5 steps of 2 × 4 lanes, and at", end.tolist())

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
# A GPU is many *multiprocessors*, each with registers and loads of its own.
# One program on each, and all of them read 256 MB:

GPU = torch.cuda.get_device_properties(DEVICE) if ON_GPU else None
NUM_SMS = GPU.multi_processor_count if ON_GPU else 132  # of an H200
SHARED = GPU.shared_memory_per_block_optin if ON_GPU else 232_448

KNEE = triton.testing.Benchmark(
    ["KB"], [1, 2, 4, 8, 16, 32, 64], "provider", ["reading"], ["Reading"],
    "layer-norm-loads-knee", {"MB": 256}, x_log=True,
    xlabel="KB in flight on a multiprocessor", ylabel="GB/s",
)  # fmt: skip


@triton.testing.perf_report(KNEE)
def reading(KB, MB, provider):
    """Device time of a CUDA graph, replayed with an overwritten L2 cache;
    median, 20 % and 80 % quantiles."""
    if not ON_GPU:
        return 3 * [float("nan")]
    lanes = 256 * KB  # of 4 bytes
    steps = MB * 10**6 // (4 * NUM_SMS * lanes)
    x = torch.zeros(steps, NUM_SMS, lanes, dtype=torch.int32, device=DEVICE)
    args, warps = (x, torch.empty_like(x[0]), steps), min(lanes // 32, 16)
    fn = lambda: _read[(NUM_SMS,)](*args, LANES=lanes, num_warps=warps)
    return speed(x.nbytes, fn)


speeds = reading.run(show_plots=ON_GPU, return_df=True)
speeds = speeds.set_index("KB").iloc[:, 0]
knee = speeds[speeds >= 0.9 * speeds.max()].first_valid_index()
if knee:  # it was measured
    print(f"1 KB comes after {1024 * NUM_SMS / speeds[1]:.0f} ns")
    print(f"90 % of {speeds.max():.0f} GB/s: with {knee} KB in flight")

# %%
# On the left a step takes little more than one latency, whatever it asks for:
# more bytes in flight, more bytes a second.
# From the *knee* on, said above, more brings little; 64 KB are even slower.
# Each multiprocessor needs at least the knee in flight, all the time.
#
# One row at a time
# -----------------
#
# This is the backward kernel of `Layer normalization, both passes
# <01-layer-norm.html>`_ with one more knob, ``STAGES``; 1 is off.
# A program takes row after row: it asks for ``x`` and ``dy``, waits, works,
# stores ``dx``, and only then asks for the next row.
# While it works, it has nothing in flight.


@triton.jit
def _layer_norm_bwd(
    dy_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, dx_ptr,
    sums_ptr,  # (programs, 2, N): the sums of each program, for dw and db
    M, N: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    cols = tl.arange(0, BLOCK)
    mask = cols < N
    acc = mean_ptr.dtype.element_ty  # float32; float64 for float64
    dw = tl.zeros((BLOCK,), acc)
    db = tl.zeros((BLOCK,), acc)
    first, step = tl.program_id(0), tl.num_programs(0)
    for i in tl.range(first, M, step, num_stages=STAGES):
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
    sums_ptr += tl.program_id(0) * 2 * N + cols
    tl.store(sums_ptr, dw, mask=mask)
    tl.store(sums_ptr + N, db, mask=mask)


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
# Programs a multiprocessor, warps (of 32 threads) and stages are a *plan*.


def backward(dy, x, w, mean, rstd, plan, dtype=None):
    """dx, and dw and db as a (2, N) tensor of this type, if there is one."""
    (M, N), (per_sm, warps, stages) = x.shape, plan
    programs, dx = min(M, per_sm * NUM_SMS), torch.empty_like(x)
    sums = torch.empty(programs, 2, N, dtype=mean.dtype, device=x.device)
    block, grads = triton.next_power_of_2(N), None
    args = dy, x, w, mean, rstd, dx, sums, M, N, block, stages
    _layer_norm_bwd[(programs,)](*args, num_warps=warps)
    if dtype:
        grads = torch.empty(2, N, dtype=dtype, device=x.device)
        grid, args = triton.cdiv(2 * N, 16), (programs, 2 * N, 256, 16)
        _layer_norm_bwd_add_up[(grid,)](sums, grads, *args, num_warps=8)
    return dx, grads


# %%
# First knob: programs
# --------------------
#
# One change: more programs on each multiprocessor.
# The measure is an addition, "copy" for short: like a backward pass, it must
# read two matrices and write one.


WIDTHS, KNOBS = [1024, 4096, 8192], ["programs", "warps", "stages"]


def given(M, N, dtype):
    """dy, x, w, and the mean and rstd that a forward pass has saved."""
    dy, x = torch.randn(2, M, N, device=DEVICE, dtype=dtype)
    w = torch.rand(N, device=DEVICE, dtype=dtype)
    return dy, x, w, *torch.native_layer_norm(x, (N,), w, w, 1e-5)[1:]


def turn(knob, values, plan_of):
    """Draw the figure of a knob: one change to the plan of a width."""

    def measure(M, dtype, mode, provider, **value):
        """Time of an addition over that of a backward pass, CUDA graphs with
        an overwritten L2 cache; median, 20 % and 80 % quantiles."""
        plan = [*plan_of(N := int(provider))]
        room, plan[KNOBS.index(knob)] = plan[2], value[knob]
        if not ON_GPU or plan[2] > room:  # not enough shared memory
            return 3 * [float("nan")]
        dy, x, *_ = tensors = given(M, N, dtype)
        best, _, _ = device_time(lambda: torch.add(x, dy))
        ms, low, high = device_time(lambda: backward(*tensors, plan, dtype))
        return [100 * best / t for t in (ms, high, low)]

    mark = triton.testing.Benchmark(
        [knob], values, "provider", [str(N) for N in WIDTHS],
        [f"N = {N}" for N in WIDTHS], f"layer-norm-loads-{knob}",
        {"M": 4096, "dtype": torch.float16, "mode": "backward"},
        xlabel=knob, ylabel="% of copy",
    )  # fmt: skip
    figure = triton.testing.perf_report(mark)(measure)
    return figure.run(show_plots=ON_GPU, return_df=True).set_index(knob)


def one_stage(N, _=2):
    """What is best with one stage; page 01 has it, too."""
    many = 6 if N <= 1024 else 4 if N <= 2048 else 3 if N <= 4096 else 2
    return (many, 4, 1) if N < 8192 else (1, 16, 1)


by_programs = turn("programs", [1, 2, 3, 4, 6, 8], one_stage)

# %%
# ``x`` and ``dy`` of a row of 1024 columns are 4 KB, of 8192 columns 32 KB:
# narrow rows take more programs: at the three widths 8 (or 6), 3 and 1.
# And while one program works, another has loads in flight.
#
# But a multiprocessor has 65536 registers for the programs that it runs.
# A program keeps four numbers of each lane: ``x``, ``dy``, ``dw`` and ``db``;
# a thread has some 32 more, for addresses.
# With 8192 columns in 16 warps that is 49152: a second program waits until the
# first has ended.
# And each program has a cost: its sums are written, and read again.
#
# Second knob: warps
# ------------------
#
# One change: the warps of a program, with 6, 3 and 1 programs.

by_warps = turn("warps", [4, 8, 16, 32], one_stage)

# %%
# Warps do not add bytes: a row is a row.
# They cost registers: with 4096 columns there is room for three programs of 4
# warps, not for three of 8.
# And a thread can have 255: with 8192 columns in 4 warps, four numbers of each
# of its 64 lanes are more, and some go to memory.
#
# Third knob: stages
# ------------------
#
# The loop can ask ahead: loads become asynchronous copies (``cp.async``) to
# the *shared memory* of a multiprocessor, and wait there, not in registers.
# With ``num_stages`` = 3 there is room for two rows, always one less.
# A program waits for a row, works on it, and loads the next in its place.

# %%

# Drawing: one stage and three stages in time.

plt.figure("One stage: load, work; three: loads during work", (7.5, 2.4))
lines, ends = {}, [0, 0]
lines["one stage: load"] = [(4.2 * i, 3, i) for i in range(3)]
lines["work"] = [(4.2 * i + 3, 1.2, i) for i in range(3)]
for i in range(6):  # a place is free when the row before the last is done
    load = lines.setdefault(["three stages: load", "load "][i % 2], [])
    load.append((ends[i], 3, i))
    ends.append(max(ends[i] + 3, ends[-1]) + 1.2)
lines["work "] = [(end - 1.2, 1.2, i) for i, end in enumerate(ends[2:])]
for level, bars in enumerate(lines.values()):
    for left, width, row in bars:
        plt.barh(-level, width, left=left, color=f"C{row}", alpha=0.6)
        plt.text(left + width / 2, -level, row, ha="center", va="center")
plt.yticks(range(0, -len(lines), -1), lines)
plt.xticks([])
plt.show()

# %%
# One change: the stages, ``num_stages``.
# A row in flight needs no program of its own now: one on a multiprocessor
# will do, or up to three of narrow rows.
# A row of more than 8192 columns and its sums take all registers, and a loop
# with copies takes more: there we stay with one stage.


def best_plan(N, itemsize=2):
    block = triton.next_power_of_2(N)
    per_sm, warps = min(max(4096 // block, 1), 3), max(block // 1024, 4)
    room = SHARED // per_sm - 2048
    stages = 1 + min(room // (3 * block * itemsize), 4)
    return per_sm, warps, stages if block <= 8192 else 1


by_stages = turn("stages", [1, 2, 3, 4, 5], best_plan)

# %%
# With two there is room for one row, asked for when the one before is done:
# that is slower than one stage. From three on there is always a row in
# flight; at 8192 columns three do, though the plan takes five.
# The compiler copies all loads of the loop, so a third of a stage holds ``w``.
# A copy has 4 bytes or more: with odd ``N`` in 16 bits rows are not copied.
#
# *Occupancy* is the share of warps in use; ``ncu``, a profiler, counts it:

PLANS = {
    "triton": best_plan, "more programs": one_stage,
    "one program": lambda *sizes: (1, *one_stage(*sizes)[1:]),
}  # fmt: skip
METRIC = "sm__warps_active.avg.pct_of_peak_sustained_active"
LINES = [f"{p}{by}" for p in list(PLANS)[:2] for by in ("", ", by hand")]
OCCUPANCY = triton.testing.Benchmark(
    ["N"], WIDTHS, "provider", LINES, [line.capitalize() for line in LINES],
    "layer-norm-loads-occupancy", ylabel="% of warps",
    args={"M": 4096, "dtype": torch.float16, "mode": "backward",
          "counter": METRIC},
)  # fmt: skip


@triton.testing.perf_report(OCCUPANCY)
def occupancy(M, N, dtype, mode, counter, provider):
    """Warps that run on a multiprocessor, on average, of all that can."""
    if not ON_GPU:
        return 3 * [float("nan")]
    name, *by_hand = provider.split(", ")
    per_sm, warps, _ = plan = PLANS[name](N)
    if by_hand:
        threads = per_sm * warps * 32
        return 100 * threads / GPU.max_threads_per_multi_processor
    tensors = given(M, N, dtype)
    backward(*tensors, plan)  # compiles
    with torch.cuda.nvtx.range(f"counted {provider} {N}"):
        backward(*tensors, plan)
    return 3 * [float("nan")]  # only ncu knows


occupancy.run(show_plots=ON_GPU)

# %%
# With stages (Triton) fewer warps run, and the speed is higher, as the list
# below shows: bytes in flight count, and warps are one way to have them.
#
# Counted and measured
# --------------------
#
# What each plan has in flight, beside the knee, and what it brings:

for column, N in enumerate(WIDTHS):
    for per_sm, _, stages in {plan(N): 0 for plan in PLANS.values()}:
        flying = per_sm * max(stages - 1, 1) * 2 * N * 2 / 1024  # x, dy
        said = f"N = {N}, programs {per_sm}, stages {stages}: {flying:3.0f} KB"
        if knee:
            alone = stages == 1
            row = by_programs.loc[per_sm] if alone else by_stages.loc[stages]
            said += f", {100 * flying / knee:3.0f} % of the knee"
            said += f", {row.iloc[column]:3.0f} % of the copy"
        print(said)

# %%
# The knee is too low for a copy, and a program at work has one row less ahead.
# And loads are not all: in the last round some programs have no row, and then
# a second launch reads the sums, more of them where programs are many.
#
# A function to train with
# ------------------------
#
# In the forward pass each row has a program; a multiprocessor runs many.


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
    def forward(ctx, x, w, b, eps, plan):
        (M, N), y = x.shape, torch.empty_like(x)
        acc = torch.promote_types(x.dtype, torch.float32)
        mean, rstd = torch.empty(2, M, dtype=acc, device=x.device)
        block = triton.next_power_of_2(N)
        warps = min(max(block * x.element_size() // 4096, 4), 16)
        args = x, w, b, y, mean, rstd, eps, N, block
        _layer_norm_fwd[(M,)](*args, num_warps=warps)
        ctx.save_for_backward(x, w, mean, rstd)
        ctx.b_dtype, ctx.plan = b.dtype, plan(N, max(x.itemsize, w.itemsize))
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        x, w, mean, rstd = ctx.saved_tensors
        wide = torch.promote_types(w.dtype, ctx.b_dtype)
        given = dy.contiguous(), x, w, mean, rstd, ctx.plan, wide
        dx, (dw, db) = backward(*given)
        return dx, dw.to(w.dtype), db.to(ctx.b_dtype), None, None


# %%
# A missing weight is ones, a missing bias zeros.


def layer_norm(
    x, normalized_shape, weight=None, bias=None, eps=1e-5, plan=best_plan
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
        raise ValueError(f"normalized_shape is {(*shape,)}: not 1 to 16384")
    rows, w, b = x.reshape(-1, N), w.reshape(N), b.reshape(N)
    given = (t.contiguous() for t in (rows, w, b))
    return LayerNorm.apply(*given, eps, plan).reshape(x.shape)


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
for dtype in torch.float32, torch.float16:
    check(layer_norm, M, N, dtype)

# %%
# At all widths:

PEERS = {"torch": "PyTorch", "torch.compile": "torch.compile", "copy": "Copy"}
SPEED = triton.testing.Benchmark(
    ["N"], [512 * i for i in (2, 3, 4, 6, 8, 9, 12, 16, 17, 20, 31)],
    "provider", [*PLANS, *PEERS],
    [*(p.capitalize() for p in PLANS), *PEERS.values()],
    "layer-norm-loads-backward",
    {"M": 4096, "dtype": torch.float16, "mode": "backward"}, ylabel="GB/s",
)  # fmt: skip


@triton.testing.perf_report(SPEED)
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
# Up to 8192 columns stages are fastest; above, the three plans are the same.
# Just above a power of two nearly half of the lanes have nothing to do, which
# `Chunks instead of padding <05-chunks.html>`_ mends.
#
# Exercise 1: two loads of a lane
# -------------------------------
#
# Twice the bytes with as many lanes: each lane of the reading kernel has two
# loads in flight, the second ``LANES`` places after the first.
#
# **Hint.** Both loads of a step must come before one is used.


@triton.jit
def _read_two(x_ptr, end_ptr, steps, LANES: tl.constexpr):
    lanes = tl.arange(0, LANES)
    at = lanes
    for _ in range(steps):
        at += 2 * LANES + tl.load(x_ptr + at)
    tl.store(end_ptr + lanes, at)  # to do: the others


def exercise_1(kernel):
    x = 8 * (torch.arange(64, dtype=torch.int32, device=DEVICE) % 3)
    expected = torch.arange(8, device=DEVICE)
    for _ in range(3):
        expected += 8 + x[expected]
    kernel[(1,)](x, end := torch.zeros_like(x[:8]), 3, LANES=4)
    print("right lanes:", (end == expected).tolist())
    return torch.equal(end, expected.int())


exercise_1(_read_two)

# %%

# Solution 1


@triton.jit
def _read_two_1(x_ptr, end_ptr, steps, LANES: tl.constexpr):
    lanes = tl.arange(0, LANES)
    at, to = lanes, lanes + LANES
    for _ in range(steps):
        first, second = tl.load(x_ptr + at), tl.load(x_ptr + to)
        at += 2 * LANES + first
        to += 2 * LANES + second
    tl.store(end_ptr + lanes, at)
    tl.store(end_ptr + LANES + lanes, to)


assert exercise_1(_read_two_1)
