r"""
Loads in flight
===============

Why is a backward pass slow that takes one row at a time, and what keeps
memory busy?
Memory answers late, so much must be asked for before the first answer comes:
with more programs, with more warps, or by asking ahead.

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
# Who asks for a new row whenever one arrives gets as many rows in the time of
# one latency as are *in flight*, asked for and not there yet:
# **bytes in flight = bandwidth × latency** (Little's law).
#
# For the latency, one thread follows a chain: each value that it loads is the
# place of the next, so no load can start before the last one has ended.


@triton.jit
def _follow(chain_ptr, end_ptr, steps):
    at = tl.load(chain_ptr)
    for _ in range(1, steps):
        at = tl.load(chain_ptr + at)
    tl.store(end_ptr, at)


def chain(size):
    """A chain in random order through all lines of 128 bytes."""
    lines = 32 * torch.randperm(size // 32, device=DEVICE, dtype=torch.int32)
    places = torch.zeros(size, dtype=torch.int32, device=DEVICE)
    places[lines.long()] = lines.roll(-1)
    return places


places, end = chain(320), torch.empty(1, dtype=torch.int32, device=DEVICE)
_follow[(1,)](places, end, 10, num_warps=1)
print("10 lines, and back at place", end.item())

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
# Its time, beside that of a copy, in which all threads load at once:


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["MB"],
        x_vals=[64, 256, 1024],
        line_arg="provider",
        line_vals=["chain", "copy"],
        line_names=["1000 loads of a chain", "Copy"],
        ylabel="µs",
        plot_name="layer-norm-loads-latency",
        args={},
    )
)
def latency(MB, provider):
    """Device time of a CUDA graph, replayed with an overwritten L2 cache;
    median, 20 % and 80 % quantiles."""
    if not ON_GPU:
        return 3 * [float("nan")]
    places = chain(MB * 10**6 // 128 * 32)
    end = torch.empty_like(places)
    fn = lambda: _follow[(1,)](places, end, 1000, num_warps=1)
    if provider == "copy":
        fn = lambda: end.copy_(places)
    return [1000 * ms for ms in device_time(fn)]


table = latency.run(show_plots=ON_GPU, return_df=True).set_index("MB")

# %%
# More memory has more addresses to look up as well, rows in order have fewer:
# we take 256 MB.
# A GPU is many *multiprocessors*, each with registers and loads of its own.
# Two thirds of what a backward pass moves are loads; so each must have this in
# flight:

GPU = torch.cuda.get_device_properties(DEVICE) if ON_GPU else None
# Without a GPU: those of an H200, for what is counted on this page.
NUM_SMS = GPU.multi_processor_count if ON_GPU else 132
SHARED = GPU.shared_memory_per_block_optin if ON_GPU else 232_448

chained, copied = table.loc[256] * 1e-6  # seconds
reading = 2 / 3 * 2 * 256e6 / copied  # bytes in a second
needed = reading * chained / 1000 / NUM_SMS
if needed == needed:  # it was measured
    print(f"{reading / 1e9:.0f} GB/s × {chained * 1e6:.0f} ns", end=" ")
    print(f"/ {NUM_SMS} = {needed / 1e3:.0f} KB")

# %%
# One row at a time
# -----------------
#
# This is the backward kernel of page 01 with a knob, ``STAGES``; 1 is off.
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
# Programs on a multiprocessor, warps of a program (groups of 32 threads) and
# stages are a *plan*.


def backward(dy, x, w, mean, rstd, plan, dtype):
    """dx, and dw and db as a (2, N) tensor."""
    (M, N), (per_sm, warps, stages) = x.shape, plan
    programs, dx = min(M, per_sm * NUM_SMS), torch.empty_like(x)
    sums = torch.empty(programs, 2, N, dtype=mean.dtype, device=x.device)
    block = triton.next_power_of_2(N)
    args = dy, x, w, mean, rstd, dx, sums, M, N, block, stages
    _layer_norm_bwd[(programs,)](*args, num_warps=warps)
    grads = torch.empty(2, N, dtype=dtype, device=x.device)
    args = sums, grads, programs, 2 * N, 128, 16
    _layer_norm_bwd_add_up[(triton.cdiv(2 * N, 16),)](*args)
    return dx, grads


# %%
# First knob: programs
# --------------------
#
# One change: more programs on each multiprocessor.
# The measure is an addition of two matrices, "copy" for short, which moves as
# much as a backward pass must: it reads two matrices and writes one.


def given(M, N, dtype):
    """dy, x, w, and the mean and rstd that a forward pass has saved."""
    torch.manual_seed(0)
    dy, x = torch.randn(2, M, N, device=DEVICE, dtype=dtype)
    w = torch.rand(N, device=DEVICE, dtype=dtype)
    return dy, x, w, *torch.native_layer_norm(x, (N,), w, w, 1e-5)[1:]


def turn(knob, values, plan):
    """Draw the figure of a knob; plan(N, value) has the other two."""

    def measure(M, dtype, mode, provider, **value):
        """Device time of an addition over that of a backward pass, from CUDA
        graphs replayed with an overwritten L2 cache; median, 20 % and 80 %
        quantiles."""
        if not ON_GPU:
            return 3 * [float("nan")]
        N = int(provider)
        dy, x, *_ = tensors = given(M, N, dtype)
        chosen, out = plan(N, value[knob]), torch.empty_like(x)
        best, _, _ = device_time(lambda: torch.add(x, dy, out=out))
        ms, low, high = device_time(lambda: backward(*tensors, chosen, dtype))
        return [100 * best / t for t in (ms, high, low)]

    mark = triton.testing.Benchmark(
        x_names=[knob],
        x_vals=values,
        xlabel=knob,
        line_arg="provider",
        line_vals=["1024", "4096", "8192"],
        line_names=["N = 1024", "N = 4096", "N = 8192"],
        ylabel="% of copy",
        plot_name=f"layer-norm-loads-{knob}",
        args={"M": 4096, "dtype": torch.float16, "mode": "backward"},
    )
    drawn = triton.testing.perf_report(mark)(measure)
    return drawn.run(show_plots=ON_GPU, return_df=True).set_index(knob)


PLAN = {1024: (4, 4), 4096: (2, 8), 8192: (1, 16)}  # programs, warps
by_programs = turn("programs", [1, 2, 4, 8], lambda N, p: (p, PLAN[N][1], 1))

# %%
# ``x`` and ``dy`` of a row of 1024 columns are 4 KB in flight, those of 8192
# columns 33 KB: narrow rows take more programs.
#
# But a multiprocessor has 65536 registers for the programs that it runs at a
# time; others wait until one has ended.
# A program keeps four numbers of each lane (a lane is one element of its row):
# ``x``, ``dy``, ``dw`` and ``db``; a thread has some 32 more, for addresses.
# Of 8192 columns in 16 warps that is 49152 registers: a second program waits.
# And each costs: its sums are written, and read again.
#
# Second knob: warps
# ------------------
#
# One change: the warps of a program, with 4, 2 and 1 programs.

by_warps = turn("warps", [4, 8, 16, 32], lambda N, w: (PLAN[N][0], w, 1))

# %%
# Warps do not add bytes: a row is a row.
# A thread can have 255 registers: with 8192 columns in 4 warps, four numbers
# of each of its 64 lanes are more, and some go to memory.
# Many warps have short loads, and all must meet for the two sums of a row.
#
# Third knob: stages
# ------------------
#
# The loop can ask ahead.
# With ``num_stages=3`` two rows are on their way while a program works on one:
# its loads become asynchronous copies (``cp.async``) to *shared memory*, which
# belongs to a multiprocessor, and take no registers.

# %%

# Drawing: one stage and three stages in time.

_, ax = plt.subplots(
    num="One stage: load, then work; three stages: two loads in flight",
    figsize=(7.5, 2.8),
)
ax.set(xlim=(-2.2, 13.5), ylim=(-0.2, 5.6))
ax.axis("off")
bars = [(4.2 * i, 4.2, 3, i) for i in range(3)]
bars += [(4.2 * i + 3, 3.6, 1.2, i) for i in range(3)]
for i in range(7):
    start = 0 if i < 2 else 1.5 * i
    bars += [(start, 1.8 - 0.6 * (i % 2), 3, i), (3 + 1.5 * i, 0.2, 1.2, i)]
for left, low, width, row in bars:
    box = {"fc": f"C{row}", "ec": "black", "alpha": 0.6}
    ax.add_patch(plt.Rectangle((left, low), width, 0.55, **box))
    text = f"load {row}" if width == 3 else row
    ax.text(left + width / 2, low + 0.27, text, ha="center", va="center")
ax.text(0, 5.0, "one stage")
ax.text(0, 2.7, "three stages")
for low, text in (4.2, "load"), (3.6, "work"), (1.5, "load"), (0.2, "work"):
    ax.text(-0.2, low + 0.25, text, ha="right", va="center")
plt.show()

# %%
# One change: the stages, with the programs and warps from above.

by_stages = turn("stages", [1, 2, 3, 4, 5], lambda N, s: (*PLAN[N], s))

# %%
# ``w`` is copied as well, a third of what a stage holds, for the compiler
# copies every load of the loop.
# The shared memory limits the stages, as the registers limit the programs.
#
# Counted and measured
# --------------------
#
# What each change puts in flight, beside what is needed, and what it brings:

for column, (N, (programs, _)) in enumerate(PLAN.items()):
    for per_sm, stages in sorted({(1, 1), (programs, 1), (programs, 4)}):
        flying = per_sm * max(stages - 1, 1) * 2 * N * 2  # x and dy, 16 bits
        found = by_stages.loc[4] if stages == 4 else by_programs.loc[per_sm]
        said = f"N = {N}, programs {per_sm}, stages {stages}: "
        said += f"{flying / 1e3:3.0f} KB in flight"
        if needed == needed:
            said += f", {flying / needed:4.0%} of the need"
            said += f", {found.iloc[column]:3.0f} % of the copy"
        print(said)

# %%
# These are the bytes while a program waits; with one stage none are in flight
# while it works, so their mean is less.
# And they are not all: there is a second launch, sums are written and read
# again, and in the last round of rows some programs have none.
#
# A function to train with
# ------------------------
#
# The plan for every width: about 16 elements a thread, programs as the
# registers allow, and stages as the shared memory allows, four at most.


def best_plan(N, itemsize):
    block = triton.next_power_of_2(N)
    per_sm = min(max(8192 // block, 1), 4)
    room = SHARED // per_sm - 2048
    stages = 1 + min(room // (3 * block * itemsize), 3)
    return per_sm, min(max(block // 512, 4), 16), stages


# %%
# Forward there is no loop over rows: each row has a program of its own, and
# many of them fit on a multiprocessor.


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
# An autograd function ties both passes together.


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
        ctx.b_dtype, ctx.plan = b.dtype, plan(N, x.element_size())
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        x, w, mean, rstd = ctx.saved_tensors
        wide = torch.promote_types(w.dtype, ctx.b_dtype)
        given = dy.contiguous(), x, w, mean, rstd
        dx, (dw, db) = backward(*given, ctx.plan, wide)
        return dx, dw.to(w.dtype), db.to(ctx.b_dtype), None, None


# %%
# Any layout becomes a contiguous matrix; a missing weight is ones, a missing
# bias zeros.


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
        taken = "this page takes 1 to 16384 elements"
        raise ValueError(f"normalized_shape is {(*shape,)}: {taken}")
    rows, w, b = (t.reshape(-1, N).contiguous() for t in (x, w, b))
    y = LayerNorm.apply(rows, w[0], b[0], eps, plan)
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
for dtype in torch.float32, torch.float16:
    check(layer_norm, M, N, dtype)

# %%
# At all widths; each line of ours has one change more than the next one:

PLANS = {
    "triton": best_plan,
    "more programs": lambda *sizes: (*best_plan(*sizes)[:2], 1),
    "one program": lambda *sizes: (1, best_plan(*sizes)[1], 1),
}
NAMES = {"triton": "Triton", "torch": "PyTorch", "copy": "Copy"}
LINES = [*PLANS, "torch", "torch.compile", "copy"]


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=[512 * i for i in (2, 3, 4, 6, 8, 9, 12, 16, 17, 20, 31)],
        line_arg="provider",
        line_vals=LINES,
        line_names=[NAMES.get(line, line) for line in LINES],
        ylabel="GB/s",
        plot_name="layer-norm-loads-backward",
        args={"M": 4096, "dtype": torch.float16, "mode": "backward"},
    )
)
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
# Above 8192 columns a block has 16384 lanes: four numbers of each are all the
# registers of a multiprocessor, so some are kept in memory.
# Just above a power of two nearly half of the lanes have nothing to do, which
# the next page mends: `Chunks instead of padding <05-chunks.html>`_.
#
# Exercise 1: two rows at a time
# ------------------------------
#
# A fourth knob: a program loads ``ROWS`` rows at a time, in a tile of two
# dimensions; here it sums the columns of ``dy``, as for a bias.
# The stub leaves out rows.
#
# **Hint.** Keep a sum for each lane of the tile, and ``tl.sum(..., 0)`` at the
# end; the last tile may reach beyond row ``M``.


@triton.jit
def _bias_sums(dy_ptr, sums_ptr, M, N: tl.constexpr, ROWS: tl.constexpr):
    cols = tl.arange(0, 32)  # N is no more than that
    total = tl.zeros((32,), tl.float32)
    first, step = tl.program_id(0) * ROWS, tl.num_programs(0) * ROWS
    for row in tl.range(first, M, step, num_stages=2):
        at = row * N + cols  # to do: also the rows after it
        total += tl.load(dy_ptr + at, mask=cols < N, other=0)
    tl.store(sums_ptr + tl.program_id(0) * N + cols, total, mask=cols < N)


def exercise_1(kernel):
    dy = given(11, 24, torch.float32)[0]
    sums = torch.full((2, 24), float("nan"), device=DEVICE)
    kernel[(2,)](dy, sums, 11, N=24, ROWS=2)
    wrong = ~torch.isclose(sums.sum(0), dy.sum(0), rtol=1e-4, atol=1e-5)
    print("wrong columns:", wrong.nonzero().flatten().tolist())
    return not wrong.any()


exercise_1(_bias_sums)

# %%

# Solution 1


@triton.jit
def _bias_sums_1(dy_ptr, sums_ptr, M, N: tl.constexpr, ROWS: tl.constexpr):
    cols = tl.arange(0, 32)  # N is no more than that
    total = tl.zeros((ROWS, 32), tl.float32)
    first, step = tl.program_id(0) * ROWS, tl.num_programs(0) * ROWS
    for row in tl.range(first, M, step, num_stages=2):
        rows = row + tl.arange(0, ROWS)[:, None]
        mask = (rows < M) & (cols < N)
        total += tl.load(dy_ptr + rows * N + cols, mask=mask, other=0)
    sums_ptr += tl.program_id(0) * N + cols
    tl.store(sums_ptr, tl.sum(total, 0), mask=cols < N)


assert exercise_1(_bias_sums_1)
