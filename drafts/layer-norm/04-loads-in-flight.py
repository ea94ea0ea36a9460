r"""
Loads in flight
===============

Why is a backward pass slow that takes one row at a time, and what keeps
memory busy?
Memory answers late, so a processor must have asked for much before the first
answer comes: with more programs, with more warps, or by asking ahead.

We compute how many bytes must be on their way, then turn one knob at a time
and count.
The kernel is the backward kernel of
`Layer normalization, both passes <01-layer-norm.html>`_.
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

import functools

# %%
# How late is late?
# -----------------
#
# The *latency* of memory is the time from a load to its value.
# Its *bandwidth* is how many bytes it hands out in a second.
# A toy memory with a latency of 100 steps and a bandwidth of one row a step
# shows what they have to do with each other.
# A program asks for a new row whenever one arrives, and has always so many
# *in flight*:


def rows_per_step(in_flight, latency=100, rows=10_000):
    arrivals = [0] * in_flight  # of the last rows asked for
    for _ in range(rows):
        asked = arrivals.pop(0)
        last = arrivals[-1] if arrivals else 0
        arrivals.append(max(asked + latency, last + 1))
    return rows / arrivals[-1]


for in_flight in 1, 10, 50, 100, 200:
    print(
        f"{in_flight:3} in flight: {rows_per_step(in_flight):.2f} rows a step"
    )

# %%
# One row in flight uses a hundredth of the bandwidth.
# All of it takes as many rows as the latency has steps.
# That is Little's law: **in flight = bandwidth × latency**.
#
# For a real memory we measure both, by the time on the device.

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
# For the latency, one thread follows a chain: each value that it loads is
# the place of the next, so no load can start before the last one has ended.


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
assert end.item() == 0  # 10 lines, and back at the start


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["MB"],
        x_vals=[64, 128, 256, 512, 1024],
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
        return 3 * [float("nan")]  # the interpreter cannot be timed
    places = chain(MB * 10**6 // 128 * 32)
    end = torch.empty_like(places)
    fn = {
        "chain": lambda: _follow[(1,)](places, end, 1000, num_warps=1),
        "copy": lambda: end.copy_(places),
    }
    return [1000 * ms for ms in device_time(fn[provider])]


table = latency.run(show_plots=ON_GPU, return_df=True).set_index("MB")

# %%
# While one thread loads four bytes a thousand times, each time waiting for
# the answer, all threads together copy hundreds of megabytes.
#
# A GPU is many *multiprocessors*, each with its own registers and its own
# loads.
# So each of them must have this in flight:

GPU = torch.cuda.get_device_properties(DEVICE) if ON_GPU else None
# Without a GPU: those of an H200, for what is counted on this page.
NUM_SMS = GPU.multi_processor_count if ON_GPU else 132
SHARED = GPU.shared_memory_per_block_optin if ON_GPU else 232_448

chained, copied = table.iloc[-1, :2] * 1e-6  # seconds, of the largest size
bandwidth = 2 * table.index[-1] * 1e6 / copied
needed = bandwidth * chained / 1000 / NUM_SMS
if needed == needed:  # it was measured
    print(f"{bandwidth * 1e-9:.0f} GB/s × {chained * 1e6:.0f} ns")
    print(f"/ {NUM_SMS} multiprocessors = {needed / 1e3:.0f} KB in flight")
else:
    print("Timing needs a GPU; the page shows recorded figures.")

# %%
# One row at a time
# -----------------
#
# This is the backward kernel of page 01 with a knob, ``STAGES``, that is
# explained below; 1 is off.
# A program takes row after row.
# It asks for ``x`` and ``dy``, waits, works, stores ``dx``, and only then
# asks for the next row.
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
        at = tl.cast(i, tl.int64) * N + cols
        x = tl.load(x_ptr + at, mask=mask, other=0).to(acc)
        dy = tl.load(dy_ptr + at, mask=mask, other=0).to(acc)
        rstd = tl.load(rstd_ptr + i)
        x_hat = (x - tl.load(mean_ptr + i)) * rstd
        dw += dy * x_hat
        db += dy
        wdy = dy
        if w_ptr is not None:
            wdy *= tl.load(w_ptr + cols, mask=mask, other=0).to(acc)
        c1 = tl.sum(x_hat * wdy) / N
        c2 = tl.sum(wdy) / N
        tl.store(dx_ptr + at, (wdy - x_hat * c1 - c2) * rstd, mask=mask)
    sums_ptr += tl.program_id(0) * 2 * N + cols
    tl.store(sums_ptr, dw, mask=mask)
    tl.store(sums_ptr + N, db, mask=mask)


# %%
# A second, small kernel adds up the sums of all programs.


@triton.jit
def _layer_norm_bwd_add_up(
    sums_ptr, out_ptr, programs,
    N: tl.constexpr,  # columns of dw and of db together
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    total = tl.zeros((ROWS, COLS), sums_ptr.dtype.element_ty)
    for first in range(0, programs, ROWS):
        rows = first + tl.arange(0, ROWS)[:, None]
        mask = (rows < programs) & (cols < N)
        total += tl.load(sums_ptr + rows * N + cols, mask=mask, other=0)
    tl.store(out_ptr + cols, tl.sum(total, 0), mask=cols < N)


# %%
# The three knobs are a *plan*: programs on a multiprocessor, warps of a
# program (groups of 32 threads), and stages.


def backward(dy, x, w, mean, rstd, plan, dtype):
    """dx, and dw and db as a (2, N) tensor; what was compiled is kept."""
    M, N = x.shape
    per_sm, warps, stages = plan
    programs, dx = min(M, per_sm * NUM_SMS), torch.empty_like(x)
    sums = torch.empty(programs, 2, N, dtype=mean.dtype, device=x.device)
    backward.compiled = _layer_norm_bwd[(programs,)](
        dy, x, w, mean, rstd, dx, sums, M, N, triton.next_power_of_2(N),
        stages, num_warps=warps,
    )  # fmt: skip
    out = torch.empty(2, N, dtype=dtype, device=x.device)
    _layer_norm_bwd_add_up[(triton.cdiv(2 * N, 16),)](
        sums, out, programs, 2 * N, ROWS=128, COLS=16
    )
    return dx, out


def given(M, N, dtype):
    """What backward takes before its plan."""
    x, w, _, dy = (t.detach() for t in inputs(M, N, dtype))
    acc = torch.promote_types(dtype, torch.float32)
    rstd = (x.to(acc).var(1, correction=0) + 1e-5) ** -0.5
    return dy, x, w, x.to(acc).mean(1), rstd


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
# Any plan gives the right ``dx``, whose rows sum to 0:

tensors = given(5, 24, torch.float32)
for plan in (1, 4, 1), (4, 2, 3):
    dx, _ = backward(*tensors, plan, torch.float32)
    print(f"plan {plan}: rows of dx sum to {dx.sum(1).abs().max():.0e}")

# %%
# How many programs fit?
# ----------------------
#
# A multiprocessor has 65536 registers of 4 bytes, for all programs that it
# runs at a time; others wait until one has ended.
# A thread keeps four numbers of each of its elements: ``x``, ``dy``, ``dw``
# and ``db``.
# With about 32 registers for addresses and the like:


def registers(block, warps):
    """Of a thread, counted by hand; 255 is the most it can have."""
    most = min(255, 65536 // (32 * warps))
    return min(32 + 4 * block // (32 * warps), most)


def in_flight(N, plan, itemsize=2):
    """Programs at a time, and bytes in flight, on one multiprocessor."""
    per_sm, warps, stages = plan
    block = triton.next_power_of_2(N)
    programs = min(
        per_sm, 65536 // (32 * warps * registers(block, warps)), 64 // warps
    )
    return programs, programs * max(stages - 1, 1) * 2 * N * itemsize


for N, plan in (1024, (8, 4, 1)), (4096, (8, 8, 1)), (8192, (8, 16, 1)):
    programs, flying = in_flight(N, plan)
    print(
        f"N = {N}, {plan[1]} warps: {registers(N, plan[1])} registers, ",
        end="",
    )
    print(f"{programs} programs at a time, {flying / 1e3:.0f} KB in flight")

# %%
# That is the most, when all programs wait at the same time.
# The compiler's own numbers of registers stand in the panels at the end of the
# page.
#
# First knob: programs
# --------------------
#
# One change: more programs on each multiprocessor.
# All else is equal: 4, 8 and 16 warps for the three widths, and one stage.
# The measure is an addition of two matrices, "copy" for short, which moves as
# much as a backward pass must: it reads two matrices and writes one.


def share(M, dtype, N, plan):
    """Speed as a percentage of that of adding two matrices."""
    if not ON_GPU or plan is None:
        return 3 * [float("nan")]
    tensors = given(M, N, dtype)
    dy, x, out = *tensors[:2], torch.empty_like(tensors[0])
    best, _, _ = device_time(lambda: torch.add(x, dy, out=out))
    ms, low, high = device_time(lambda: backward(*tensors, plan, dtype))
    return [100 * best / t for t in (ms, high, low)]


def knob(name, values, plan):
    """The benchmark of one knob; plan(N, value) has the other two."""

    def measure(M, dtype, mode, N, **value):
        """Device time of an addition over that of a backward pass, from CUDA
        graphs replayed with an overwritten L2 cache; median, 20 % and 80 %
        quantiles."""
        return share(M, dtype, int(N), plan(int(N), value[name]))

    return triton.testing.perf_report(
        triton.testing.Benchmark(
            x_names=[name],
            x_vals=values,
            xlabel=name,
            line_arg="N",
            line_vals=["1024", "4096", "8192"],
            line_names=["N = 1024", "N = 4096", "N = 8192"],
            ylabel="% of copy",
            plot_name=f"layer-norm-loads-{name}",
            args={"M": 4096, "dtype": torch.float16, "mode": "backward"},
        )
    )(measure)


WARPS = {1024: 4, 4096: 8, 8192: 16}
PROGRAMS = {1024: 4, 4096: 2, 8192: 1}

programs_knob = knob(
    "programs", [1, 2, 3, 4, 6, 8], lambda N, value: (value, WARPS[N], 1)
)
by_programs = programs_knob.run(show_plots=ON_GPU, return_df=True)

# %%
# Narrow rows gain most: one of them is only a few KB in flight.
# At 8192 columns one program fills the registers, so the second has to wait
# for the first to end, and nothing is gained.
# Each program also costs: it writes a row of sums for ``dw`` and one for
# ``db``, which are read again.
#
# Second knob: warps
# ------------------
#
# One change: the warps of a program, with 4, 2 and 1 programs.
# With more warps a thread has fewer elements and needs fewer registers; with
# fewer warps its loads are longer.
# From 4 to 64 elements a thread are tried.


def with_warps(N, warps):
    fits = 4 <= N // (32 * warps) <= 64
    return (PROGRAMS[N], warps, 1) if fits else None


warps_knob = knob("warps", [1, 2, 4, 8, 16, 32], with_warps)
table = warps_knob.run(show_plots=ON_GPU, return_df=True)

# %%
# Warps do not add bytes: a row is a row.
# They change how fast it is asked for, and how many programs fit: too few
# warps spill registers into memory, too many make each load short and the two
# sums slow, for which all warps have to meet.
#
# Third knob: stages
# ------------------
#
# The loop can ask ahead.
# With ``num_stages=4`` the compiler turns the loads of the loop into
# asynchronous copies (``cp.async``) from memory to *shared memory*, which
# belongs to a multiprocessor: three rows are on their way while the program
# works on the present one, and they need no registers.

# %%

# Drawing: one stage and three stages in time.

_, ax = plt.subplots(
    num="With one stage a load starts when the work before it has ended; "
    "with three stages two loads are always on their way",
    figsize=(7.5, 2.8),
)
ax.set(xlim=(-2.2, 13.5), ylim=(-0.2, 5.6))
ax.axis("off")


def bar(x, y, width, text, color):
    ax.add_patch(
        plt.Rectangle((x, y), width, 0.55, fc=color, ec="black", alpha=0.6)
    )
    ax.text(x + width / 2, y + 0.27, text, ha="center", va="center")


for i in range(3):
    bar(4.2 * i, 4.2, 3, f"load {i}", f"C{i}")
    bar(4.2 * i + 3, 3.6, 1.2, f"{i}", f"C{i}")
for i in range(7):
    start = 0 if i < 2 else 3 + 1.5 * (i - 2)
    bar(start, 1.8 - 0.6 * (i % 2), 3, f"load {i}", f"C{i}")
    bar(3 + 1.5 * i if i else 3, 0.2, 1.2, f"{i}", f"C{i}")
ax.text(0, 5.0, "one stage")
ax.text(0, 2.7, "three stages")
for y in 4.2, 1.5:
    ax.text(-0.2, y + 0.25, "load", ha="right", va="center")
for y in 3.6, 0.2:
    ax.text(-0.2, y + 0.25, "work", ha="right", va="center")
plt.show()

# %%
# One change: the stages, with the programs and warps from above.


stages_knob = knob(
    "stages", [1, 2, 3, 4, 5], lambda N, value: (PROGRAMS[N], WARPS[N], value)
)
by_stages = stages_knob.run(show_plots=ON_GPU, return_df=True)

# %%
# Are the loads really asynchronous?
# The PTX tells, the text that Triton hands to NVIDIA's assembler:

for stages in 1, 4:
    backward(*tensors, (1, 1, stages), torch.float32)
    if backward.compiled is None:
        print("The PTX needs a GPU; see the panels at the end of the page.")
        break
    ptx = backward.compiled.asm["ptx"]
    copies, loads = ptx.count("cp.async.c"), ptx.count("ld.global")
    print(f"{stages} stages: {copies} asynchronous copies, {loads} loads")

# %%
# The copies include ``w``, for the compiler copies every load of the loop; it
# comes from a cache, and takes a third of the shared memory.
# That memory is the limit of the stages: each holds three rows.
#
# Counted and measured
# --------------------
#
# What each change puts in flight, beside what is needed, and what it brings:

by_programs, by_stages = (
    table.set_index(table.columns[0]) for table in (by_programs, by_stages)
)
for column, N in enumerate(WARPS):
    most = PROGRAMS[N]
    for what, plan, speeds, row in (
        ("one program", (1, WARPS[N], 1), by_programs, 1),
        ("more programs", (most, WARPS[N], 1), by_programs, most),
        ("four stages", (most, WARPS[N], 4), by_stages, 4),
    ):
        _, flying = in_flight(N, plan)
        said = f"N = {N}, {what:13}: {flying / 1e3:4.0f} KB in flight"
        if needed == needed:
            said += f", {flying / needed:4.0%} of the need"
            said += f", {speeds.loc[row].iloc[column]:3.0f} % of the copy"
        print(said)

# %%
# Well below the need the bytes in flight decide.
# Near and above it they no longer do: what is left is the second launch, the
# sums that are written and read again, and the last round of rows, in which
# some programs have none.
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


def more_programs(N, itemsize):
    return *best_plan(N, itemsize)[:2], 1


def one_program(N, itemsize):
    return 1, best_plan(N, itemsize)[1], 1


# %%
# The forward pass has no loop over rows: each row has a program of its own,
# and many of them fit on a multiprocessor, so enough is in flight.


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
    y = x * rstd
    if w_ptr is not None:
        y *= tl.load(w_ptr + cols, mask=cols < N).to(acc)
    if b_ptr is not None:
        y += tl.load(b_ptr + cols, mask=cols < N).to(acc)
    tl.store(y_ptr + row * N + cols, y, mask=cols < N)


# %%
# An autograd function ties both passes together.


class LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, b, eps, plan):
        x, w, b = (None if t is None else t.contiguous() for t in (x, w, b))
        M, N = x.shape
        acc = torch.promote_types(x.dtype, torch.float32)
        mean, rstd = torch.empty(2, M, dtype=acc, device=x.device)
        y, block = torch.empty_like(x), triton.next_power_of_2(N)
        warps = min(max(block * x.element_size() // 4096, 4), 16)
        _layer_norm_fwd[(M,)](
            x, w, b, y, mean, rstd, eps, N, BLOCK=block, num_warps=warps
        )
        ctx.save_for_backward(x, w, mean, rstd)
        ctx.plan = plan(N, x.element_size())
        ctx.dtype = x.dtype if w is None else w.dtype
        if b is not None:
            ctx.dtype = torch.promote_types(ctx.dtype, b.dtype)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        x, w, mean, rstd = ctx.saved_tensors
        dy = dy.contiguous()  # its strides may be 0
        dx, out = backward(dy, x, w, mean, rstd, ctx.plan, ctx.dtype)
        found = zip((dx, *out), ctx.needs_input_grad, strict=False)
        return *(t if wanted else None for t, wanted in found), None, None


# %%
# ``plan`` is ours; the other arguments are those of PyTorch's function.


def layer_norm(
    x, normalized_shape, weight=None, bias=None, eps=1e-5, *, plan=best_plan
):
    """Normalize rows of up to 16384 columns; weight and bias may be None."""
    if isinstance(normalized_shape, int):
        normalized_shape = (normalized_shape,)
    shape = torch.Size(normalized_shape)
    for name, t in {"x": x, "weight": weight, "bias": bias}.items():
        if t is None:
            continue
        if not t.is_floating_point():
            raise TypeError(f"{name} has {t.dtype}, which is no float")
        if t.device.type != DEVICE.type or t.device != x.device:
            raise ValueError(f"{name} is on {t.device}, not on {DEVICE}")
        if (t.shape[-len(shape) :] if t is x else t.shape) != shape:
            raise ValueError(f"{name}: {t.shape} does not fit {shape}")
    if not 0 < shape.numel() <= 16384:
        raise ValueError(
            f"normalized_shape has {shape.numel()} columns: this page takes "
            "1 to 16384; page 11, every width, takes all"
        )
    w, b = (None if t is None else t.reshape(-1) for t in (weight, bias))
    rows = x.reshape(-1, shape.numel())
    return LayerNorm.apply(rows, w, b, eps, plan).reshape(x.shape)


M, N = (1151, 8192) if ON_GPU else (9, 200)
for dtype in torch.float32, torch.float16:
    check(layer_norm, M, N, dtype)

# %%
# All widths
# ----------

PLANS = {
    "triton": best_plan,
    "programs": more_programs,
    "one": one_program,
}
OURS = {
    "triton": "Triton",
    "programs": "more programs",
    "one": "one program",
}
PEERS = {"torch": "PyTorch", "torch.compile": "torch.compile", "copy": "Copy"}


def compiled_by_torch():
    """PyTorch's layer norm, compiled for one shape."""
    from torch._functorch import config

    config.donated_buffer = False  # the backward pass runs many times
    torch._dynamo.reset()  # nothing is left of other shapes
    return torch.compile(lambda *args: F.layer_norm(*args), dynamic=False)


# %%
# Gradients are asked for with ``torch.autograd.grad``, so that nothing is
# accumulated.


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=[512 * i for i in (2, 3, 4, 6, 8, 9, 12, 16, 17, 20, 31)],
        line_arg="provider",
        line_vals=list(OURS | PEERS),
        line_names=list((OURS | PEERS).values()),
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
    if provider == "copy":
        dx = torch.empty_like(dy)
        fn = lambda: torch.add(x.detach(), dy, out=dx)
    else:
        f = F.layer_norm
        if provider == "torch.compile":
            f = compiled_by_torch()
        if provider in PLANS:
            f = functools.partial(layer_norm, plan=PLANS[provider])
        y = f(x, (N,), w, b, 1e-5)
        fn = lambda: torch.autograd.grad(y, (x, w, b), dy, retain_graph=True)
    return speed(3 * x.nbytes, fn)


report(backward_speed)

# %%
# Each of our three lines has one change more than the one below it in the
# legend.
# Above 8192 columns a block has 16384 lanes, and a thread more numbers than
# registers: some are kept in memory.
# Just above a power of two nearly half of the lanes have nothing to do, which
# the next page mends: `Chunks instead of padding <05-chunks.html>`_.
#
# Exercise
# --------
#
# **Exercise 1: two rows at a time.**
# There is a fourth knob.
# A bias needs only the sums of the columns of ``dy``, so a row of it is half
# as much in flight.
# Let a program load ``ROWS`` rows at a time, in a tile of two dimensions.
# The stub leaves out rows.
#
# **Hint.** Keep a sum for each lane of the tile, and ``tl.sum(..., 0)`` at the
# end.
# The last tile may reach beyond row ``M``.


@triton.jit
def _bias_sums(
    dy_ptr, sums_ptr, M,
    N: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    cols = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    first, step = tl.program_id(0) * ROWS, tl.num_programs(0) * ROWS
    for row in tl.range(first, M, step, num_stages=2):
        at = row * N + cols  # to do: also the rows after it
        total += tl.load(dy_ptr + at, mask=cols < N, other=0)
    tl.store(sums_ptr + tl.program_id(0) * N + cols, total, mask=cols < N)


def exercise_1(kernel):
    dy = given(11, 24, torch.float32)[0]
    sums = torch.full((2, 24), float("nan"), device=DEVICE)
    kernel[(2,)](dy, sums, 11, N=24, ROWS=2, BLOCK=32)
    wrong = ~torch.isclose(sums.sum(0), dy.sum(0), rtol=1e-4, atol=1e-5)
    print("wrong columns:", wrong.nonzero().flatten().tolist())
    return not wrong.any()


exercise_1(_bias_sums)

# %%

# Solution 1


@triton.jit
def _bias_sums_1(
    dy_ptr, sums_ptr, M,
    N: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    cols = tl.arange(0, BLOCK)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    first, step = tl.program_id(0) * ROWS, tl.num_programs(0) * ROWS
    for row in tl.range(first, M, step, num_stages=2):
        rows = row + tl.arange(0, ROWS)[:, None]
        mask = (rows < M) & (cols < N)
        total += tl.load(dy_ptr + rows * N + cols, mask=mask, other=0)
    sums_ptr += tl.program_id(0) * N + cols
    tl.store(sums_ptr, tl.sum(total, 0), mask=cols < N)


assert exercise_1(_bias_sums_1)

# %%
# References
# ----------
#
# `Little's law <https://en.wikipedia.org/wiki/Little%27s_law>`_;
# `the CUDA programming guide on asynchronous copies
# <https://docs.nvidia.com/cuda/cuda-c-programming-guide/>`_.
