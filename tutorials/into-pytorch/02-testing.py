r"""
How to trust a gradient
=======================

How do you know that a backward pass is right, when a wrong one trains too?
You compare each element with float64, allow what rounding explains and no
more, and plant faults of your own to see which test finds them.

A wrong forward pass is soon noticed: the numbers look strange. A wrong
backward pass goes unnoticed. The model trains, a little worse than it could,
and nobody knows what the loss should have been. On this page we write a small
kernel, break it in ten ways, and watch which of the usual tests notice.

**What you will learn**

- Why a falling loss says little about a gradient.
- What finite differences can find, and what float32 does to them.
- Where the tolerance of a test comes from, so that you need not guess one.
- Why shapes, strides and the memory around a tensor belong to a test.
- How to test the tests: with mutants.
- What neither a test nor the interpreter can see, and which tools can.

You leave with forty lines, and two small functions that they call, which you
can put beside your own kernels.

**What you need:** `Layer normalization, both passes
<../layer-norm/01-layer-norm.html>`_. You don't need a GPU.
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

# Scaffold: more imports.

import contextlib
import functools
import inspect
import math
import pathlib
import tempfile
import time
from unittest import mock

# %%
# A kernel to be tested
# ---------------------
#
# RMS norm divides each row by the root of the mean of its squares, and scales
# the columns:
#
# .. math:: y = \hat{x} \cdot w, \qquad \hat{x} = x \, r, \qquad
#    r = \bigl( \frac{1}{N} \sum_j x_j^2 + \epsilon \bigr)^{-1/2}
#
# The row 1, -2, 3, -4 has the mean square (1 + 4 + 9 + 16) / 4 = 7.5, so
# :math:`r` is 0.365, and with weights of 1 it becomes 0.365, -0.730, 1.095,
# -1.461. Each program of our kernel normalizes one row.


@triton.jit
def _rms_norm_fwd(
    x_ptr,  # (M, N), contiguous
    w_ptr,  # (N,), contiguous
    y_ptr,  # (M, N)
    rstd_ptr,  # (M,): r of each row, saved for the backward pass
    eps: tl.constexpr,  # added to the mean of the squares
    N: tl.constexpr,  # columns
    BLOCK: tl.constexpr,  # tile width: a power of two, at least N
):
    row = tl.program_id(0).to(tl.int64)  # M * N may pass 2**31
    cols = tl.arange(0, BLOCK)
    mask = cols < N
    acc = rstd_ptr.dtype.element_ty  # float32; float64 for float64

    # Load the row and the weights. Lanes without a column hold 0.
    x = tl.load(x_ptr + row * N + cols, mask=mask, other=0).to(acc)
    w = tl.load(w_ptr + cols, mask=mask, other=0).to(acc)

    # One sum over the row, and the result.
    rstd = tl.rsqrt(tl.sum(x * x) / N + eps)
    tl.store(rstd_ptr + row, rstd)
    tl.store(y_ptr + row * N + cols, x * rstd * w, mask=mask)


MAX_COLUMNS = 8192  # one tile holds a row


def forward(x, w, eps):
    """y, and r of each row; x may have any strides."""
    x = x.contiguous()
    w = w.contiguous()
    N = w.numel()
    M = x.numel() // N
    y = torch.empty_like(x)
    acc_dtype = torch.promote_types(x.dtype, torch.float32)
    rstd = torch.empty(M, dtype=acc_dtype, device=x.device)

    # The wider a row, the more threads share it, so that each of them holds a
    # part that fits in its registers.
    num_warps = 4
    if N * x.element_size() > 16384:
        num_warps = 8
    if N * x.element_size() > 32768:
        num_warps = 16
    _rms_norm_fwd[(M,)](
        x_ptr=x,
        w_ptr=w,
        y_ptr=y,
        rstd_ptr=rstd,
        eps=eps,
        N=N,
        BLOCK=triton.next_power_of_2(N),
        num_warps=num_warps,
    )
    return y, rstd


EPS = 1e-6


def pytorch(x, w):
    return F.rms_norm(x, w.shape, w, EPS)


x = torch.tensor([[1.0, -2, 3, -4], [2, 2, 2, 2]], device=DEVICE)
w = torch.ones(4, device=DEVICE)
y, rstd = forward(x, w, EPS)
print("y:", y.cpu().numpy().round(3), sep="\n")
torch.testing.assert_close(y, pytorch(x, w))

# %%
# We write kernels because they are fast, so let's first see how fast this one
# is. The ceiling is a copy, which also reads one matrix and writes one.

# %%

# Scaffold: the clock.


def device_time(prepare):
    """µs of a call on the GPU: median, 20% and 80% quantiles.

    ``prepare()`` makes inputs and returns the call. Two CUDA graphs are
    replayed in turns. One makes several calls, and overwrites L2 before each;
    the other only overwrites L2. The difference is the time of the calls.
    """
    if not ON_GPU:
        return 3 * [float("nan")]  # the interpreter cannot be timed
    larger_than_l2 = torch.empty(2**28, dtype=torch.int8, device=DEVICE)

    def prepared():
        call = prepare()
        call()  # compiles the kernels
        return call

    def recorded(calls):
        graph = torch.cuda.CUDAGraph()
        results = []  # kept, so that no call writes where another one wrote
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            for call in calls:
                larger_than_l2.zero_()
                results.append(call())
        graph.replay()  # the first replay takes longer
        return graph

    def elapsed(graph):
        """ms from the start of a replay on the GPU to its end."""
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end)

    calls = [prepared()]
    if elapsed(recorded(calls)) < 0.3:
        # L2 may keep the inputs of a short call until the next replay: with
        # those of fifteen other calls in between, it cannot.
        calls += [prepared() for _ in range(15)]
    with_calls = recorded(calls)
    without = recorded([lambda: None for _ in calls])
    times = []
    for _ in range(25):
        difference = elapsed(with_calls) - elapsed(without)
        times.append(1000 * difference / len(calls))
    times.sort()
    return times[12], times[5], times[19]


def speed(bytes_moved, prepare):
    """GB/s of a call that must move so many bytes: median, low, high."""
    median, short, long = device_time(prepare)
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
    M, N = shape
    speeds = []
    for block_size, warps in (
        (1024, 1), (2048, 1), (4096, 2), (4096, 4), (8192, 4), (8192, 8)
    ):  # fmt: skip

        def prepare(block_size=block_size, warps=warps):
            source = torch.randn(reads, M, N, device=DEVICE).to(dtype)
            target = torch.empty(writes, M, N, dtype=dtype, device=DEVICE)

            def move():
                _move[(triton.cdiv(M * N, block_size),)](
                    source_ptr=source,
                    target_ptr=target,
                    count=M * N,
                    READS=reads,
                    WRITES=writes,
                    BLOCK_SIZE=block_size,
                    num_warps=warps,
                )

            return move

        bytes_moved = (reads + writes) * M * N * dtype.itemsize
        speeds.append(speed(bytes_moved, prepare))
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

# Scaffold: inputs, and the speed of a pass.

WIDTHS = [1024, 4096, 8192]


def inputs(M, N, dtype):
    """x, w and dy."""
    torch.manual_seed(0)
    x = 0.5 + torch.randn(M, N, device=DEVICE)
    w = torch.rand(N, device=DEVICE)
    dy = 0.5 + torch.randn(M, N, device=DEVICE)
    x = x.to(dtype).requires_grad_()
    w = w.to(dtype).requires_grad_()
    return x, w, dy.to(dtype)


def speed_of(norm, M, N, dtype, mode):
    """GB/s of a forward or a backward pass: median, low, high."""

    def prepare():
        x, w, dy = inputs(M, N, dtype)
        if mode == "forward":
            return lambda: norm(x, w)
        y = norm(x, w)
        return lambda: torch.autograd.grad(y, (x, w), dy, retain_graph=True)

    # Forward x is read and y is written; backward dy is read as well.
    matrices = 2 if mode == "forward" else 3
    return speed(matrices * M * N * dtype.itemsize, prepare)


@functools.cache
def of_compiled(M, N, dtype):
    """The speeds of torch.compile in either pass: the best of each."""
    found = {"forward": [], "backward": []}

    def measure(norm):
        for mode, speeds in found.items():
            speeds.append(speed_of(norm, M, N, dtype, mode))
        return found["forward"][-1]

    best_of_three_compilations(pytorch, measure)
    return {mode: max(speeds) for mode, speeds in found.items()}


def benchmark_of(mode):
    return triton.testing.Benchmark(
        x_names=["N"],
        x_vals=WIDTHS,
        line_arg="provider",
        line_vals=["triton", "torch", "torch.compile", "copy"],
        line_names=["Triton", "PyTorch", "torch.compile", "Copy"],
        ylabel="GB/s",
        plot_name=f"testing-{mode}",
        args={"M": 4096, "dtype": torch.bfloat16, "mode": mode},
    )


# %%

# Scaffold: a benchmark of the forward pass.


@triton.testing.perf_report(benchmark_of("forward"))
def bench_forward(M, N, dtype, mode, provider):
    """Device time: a CUDA graph of several calls, each with inputs of its own
    and after L2 was overwritten, less the graph without the calls; median, 20%
    and 80% quantiles. Copy: the best of six tiles."""
    if not ON_GPU:
        return 3 * [float("nan")]  # the interpreter cannot be timed
    if provider == "copy":
        return ceiling(reads=1, writes=1, shape=(M, N), dtype=dtype)
    if provider == "torch.compile":
        return of_compiled(M, N, dtype)[mode]
    norms = {"triton": lambda x, w: forward(x, w, EPS), "torch": pytorch}
    return speed_of(norms[provider], M, N, dtype, mode)


# %%

report(bench_forward)

# %%
# **What the figure shows.**
# On the H200 our kernel reaches 83% to 96% of the copy. PyTorch reaches 63% to
# 77%, and torch.compile 88% to 99%.
#
# **Why.**
# Each byte of ``x`` is read once and each byte of ``y`` is written once, which
# is all that has to move. Still torch.compile is ahead of us at 1024 columns,
# with 88% against 83%, and at 8192 columns, with 99% against 95%. We have not
# looked for the reason here. The page about `RMS norm in 16 bits
# <../norms-and-losses/02-rms-norm-16-bits.html>`_ finds the same at these
# widths.
#
# **What follows.**
# The speed is worth something only if the numbers are right, and a fast kernel
# gives more chances to be wrong than a slow one: tiles and their masks, rows
# that programs share, types that are narrower than the sums.
#
# The backward pass
# -----------------
#
# .. math:: dx = (w \, dy - \hat{x} \, c) \, r, \qquad
#    c = \frac{1}{N} \sum_j \hat{x}_j \, w_j \, dy_j, \qquad
#    dw_j = \sum_\text{rows} \hat{x}_j \, dy_j
#
# The page about `RMS norm <../norms-and-losses/01-rms-norm.html>`_ derives
# these formulas. The term with :math:`c` is there because each ``x`` of a row
# also changes :math:`r`, and with it all ``y`` of the row.
#
# A program takes one row after the other and keeps its sum for ``dw`` in
# registers. At the end it stores this sum in a row of a buffer. Each program
# has a row of its own there, and ``torch.sum`` adds up the rows.


@triton.jit
def _rms_norm_bwd(
    dy_ptr,  # (M, N), contiguous
    x_ptr,  # (M, N), contiguous
    w_ptr,  # (N,), contiguous
    rstd_ptr,  # (M,), from the forward pass
    dx_ptr,  # (M, N)
    sums_ptr,  # (programs, N): what each program adds to dw
    M,  # rows
    N: tl.constexpr,  # columns
    BLOCK: tl.constexpr,  # tile width: a power of two, at least N
):
    cols = tl.arange(0, BLOCK)
    mask = cols < N
    acc = rstd_ptr.dtype.element_ty
    w = tl.load(w_ptr + cols, mask=mask, other=0).to(acc)
    dw = tl.zeros((BLOCK,), acc)

    for row in range(tl.program_id(0), M, tl.num_programs(0)):
        # Load a row of x and of dy, and compute x_hat once more.
        at = tl.cast(row, tl.int64) * N + cols  # M * N may pass 2**31
        x = tl.load(x_ptr + at, mask=mask, other=0).to(acc)
        dy = tl.load(dy_ptr + at, mask=mask, other=0).to(acc)
        rstd = tl.load(rstd_ptr + row)
        x_hat = x * rstd

        # This row's terms of dw, and its dx.
        dw += dy * x_hat
        wdy = w * dy
        c = tl.sum(x_hat * wdy) / N
        tl.store(dx_ptr + at, (wdy - x_hat * c) * rstd, mask=mask)

    tl.store(sums_ptr + tl.program_id(0) * N + cols, dw, mask=mask)


# %%
# A streaming multiprocessor (SM) runs several programs at a time. Where rows
# are wide it runs fewer, because each program keeps a row of sums and a row of
# weights in registers. Without a GPU there are four programs in all, so that
# each of them has several rows even if a test is small.

GPU = torch.cuda.get_device_properties(DEVICE) if ON_GPU else None
NUM_SMS = GPU.multi_processor_count if ON_GPU else 4


def plan_backward(N):
    """How many programs share an SM, and how many warps each of them has."""
    if not ON_GPU:
        return 1, 4
    if N <= 1024:
        return 8, 4
    if N <= 2048:
        return 6, 2
    if N <= 4096:
        return 2, 16
    return 1, 16


def backward(dy, x, w, rstd):
    """dx and dw; dy and x may have any strides."""
    dy = dy.contiguous()
    x = x.contiguous()
    w = w.contiguous()
    M = rstd.numel()
    N = w.numel()
    per_sm, num_warps = plan_backward(N)
    programs = min(M, NUM_SMS * per_sm)
    dx = torch.empty_like(x)
    sums = torch.empty(programs, N, dtype=rstd.dtype, device=x.device)
    _rms_norm_bwd[(programs,)](
        dy_ptr=dy,
        x_ptr=x,
        w_ptr=w,
        rstd_ptr=rstd,
        dx_ptr=dx,
        sums_ptr=sums,
        M=M,
        N=N,
        BLOCK=triton.next_power_of_2(N),
        num_warps=num_warps,
    )
    dw = sums.sum(dim=0).to(w.dtype).view(w.shape)
    return dx, dw


def norm_of(forward, backward):
    """A function that autograd knows, made of both passes."""

    class RmsNorm(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w, eps):
            y, rstd = forward(x, w, eps)
            ctx.save_for_backward(x, w, rstd)
            return y

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, dy):
            x, w, rstd = ctx.saved_tensors
            dx, dw = backward(dy, x, w, rstd)
            return dx, dw, None  # eps has no gradient

    def norm(x, w, eps=EPS):
        return RmsNorm.apply(x, w, eps)

    return norm


OURS = norm_of(forward, backward)


def ours(x, w):
    return OURS(x, w)


# %%
# The function that users call has the arguments of PyTorch's and checks them
# first.

# %%

# Scaffold: the function that users call, and which arguments it takes.


def check_arguments(x, shape, weight, eps):
    """Raise an error that names the wrong argument, and says why."""
    tensors = {"x": x, "weight": weight}
    wanted = {"x": x.shape[: x.dim() - len(shape)] + shape, "weight": shape}
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if not tensor.is_floating_point() or tensor.itemsize < 2:
            raise TypeError(
                f"{name} is {tensor.dtype}: it must have floats of 16 bits or "
                "more"
            )
        if tensor.device != x.device or tensor.device.type != DEVICE.type:
            raise ValueError(
                f"{name} is on {tensor.device}: all go on {DEVICE}"
            )
        if tensor.shape != wanted[name]:
            raise ValueError(
                f"the shape of {name} is {tuple(tensor.shape)}, "
                f"normalized_shape {tuple(shape)}"
            )
    # Triton starts a kernel on the current GPU, wherever its tensors are.
    if x.is_cuda and x.get_device() != torch.cuda.current_device():
        raise ValueError(f"x is on {x.device}: not the current one")
    if not eps >= 0:  # negative, or NaN
        raise ValueError(f"eps is {eps}: it must be 0 or more")
    N = 0
    if len(shape) > 0:
        N = shape.numel()
    if not 0 < N <= MAX_COLUMNS:
        raise ValueError(
            f"normalized_shape has {N} columns: this page takes 1 to "
            f"{MAX_COLUMNS}"
        )


def rms_norm(x, normalized_shape, weight=None, eps=None):
    """x over its root mean square over the last dimensions, times weight."""
    if isinstance(normalized_shape, int):
        normalized_shape = [normalized_shape]
    shape = torch.Size(normalized_shape)
    if eps is None:
        acc_dtype = torch.promote_types(x.dtype, torch.float32)
        eps = torch.finfo(acc_dtype).eps
    eps = float(eps)
    check_arguments(x, shape, weight, eps)
    if weight is None:
        weight = x.new_ones(shape)
    return OURS(x, weight, eps)


# %%
# A wrong gradient that trains
# ----------------------------
#
# Let's break it. The function below copies the code of both passes, replaces
# some text in the copy, and runs it. The copy goes through a file, because
# Triton reads the source of a kernel. What comes back is another norm, and
# ours stays as it is.

FOLDER = tempfile.TemporaryDirectory()


@functools.cache
def source():
    """The code of both passes, as it stands above."""
    parts = (_rms_norm_fwd.fn, forward, _rms_norm_bwd.fn, backward)
    return "\n\n".join(inspect.getsource(part) for part in parts)


@functools.cache
def with_fault(*edits):
    """Our norm after some edits, each a pair of old and new text."""
    text = source()
    for old, new in edits:
        assert text.count(old) == 1, f"not once in the code: {old}"
        text = text.replace(old, new)
    file = pathlib.Path(FOLDER.name, f"fault_{abs(hash(edits))}.py")
    file.write_text(text)
    code = dict(globals())
    exec(compile(text, file, "exec"), code)
    return norm_of(code["forward"], code["backward"])


# %%
# The fault is one that happens to people: the term with :math:`c` is
# forgotten, so ``dx`` is computed as if :math:`r` were a constant.

without_c = with_fault(("(wdy - x_hat * c) * rstd", "wdy * rstd"))

# %%
# Now we train two models. They have the same data, the same weights to begin
# with, and the same learning rate. A model is one linear layer with a norm
# after it, and the data come from another model of this kind, so a loss of 0
# is possible.


def train(norm, steps):
    """The loss of each step."""
    torch.manual_seed(0)
    x = torch.randn(16, 4)
    matrix = torch.randn(4, 4)
    scale = torch.linspace(0.5, 1.5, 4)
    target = pytorch(x @ matrix, scale).to(DEVICE)
    x = x.to(DEVICE)
    linear = (torch.randn(4, 4) / 2).to(DEVICE).requires_grad_()
    weight = torch.ones(4, device=DEVICE, requires_grad=True)
    losses = []
    for _ in range(steps):
        loss = (norm(x @ linear, weight) - target).square().mean()
        gradients = torch.autograd.grad(loss, (linear, weight))
        with torch.no_grad():
            for tensor, gradient in zip(
                (linear, weight), gradients, strict=True
            ):
                tensor -= 0.3 * gradient
        losses.append(loss.item())
    return losses


losses = {"right": train(ours, 120), "wrong": train(without_c, 120)}
for step in (0, 10, 40, 119):
    print(
        f"step {step:3}: right {losses['right'][step]:.4f}, "
        f"wrong {losses['wrong'][step]:.4f}"
    )

# %%

# Drawing: the loss of both models.

plt.figure(
    "The loss of two models on a logarithmic axis. The one with the wrong "
    "gradient falls faster at first, then stops, while the other goes on",
    figsize=(6.6, 3.4),
)
for name, values in losses.items():
    plt.plot(values, label=f"{name} gradient")
plt.yscale("log")
plt.xlabel("step")
plt.ylabel("loss")
plt.legend()
plt.show()

# %%
# **What the figure shows.**
# The wrong gradient does not only train. In the first steps it even trains
# *better*: at step 10 its loss is 0.22, and that of the right one 0.43. Then
# it stops, and the right one goes on: at step 119 the losses are 0.033 and
# 0.0018.
#
# **Why.**
# The wrong ``dx`` points roughly where the right one points, so the loss
# falls. But it is the gradient of no function, and the place where it becomes
# small is not where the loss is smallest.
#
# **What follows.**
# If you see only the line of the wrong gradient, you take it for a success.
# And in a real model you do see only one line: nobody has trained the right
# one, and the loss is noisy besides. So "it trains" is no test of a gradient.
#
# Do the shapes fit?
# ------------------
#
# This is the first test that one reaches for, because it costs nothing:


def shapes_fit(norm):
    x, w, dy = inputs(8, 64, torch.float32)
    y = norm(x, w)
    dx, dw = torch.autograd.grad(y, (x, w), dy)
    for result, like in ((y, x), (dx, x), (dw, w)):
        assert result.shape == like.shape
        assert result.dtype == like.dtype
        assert result.isfinite().all()


shapes_fit(ours)
shapes_fit(without_c)
print("the shapes of both fit")

# %%
# This test finds a transposed result and a forgotten ``return``. It does not
# look at the numbers, as long as they are finite.
#
# Finite differences
# ------------------
#
# What is a gradient? How much the result changes when an input changes a
# little. So let's change an input a little:
#
# .. math:: f'(x) \approx \frac{f(x + h) - f(x - h)}{2 h}
#
# This needs no formula and no reference, only the forward pass. How small
# should :math:`h` be? Two errors work against each other:
#
# - **The curve is not straight.** The error is about
#   :math:`\frac{h^2}{6} f'''(x)`, so a smaller step is better.
# - **Numbers are rounded.** Both values of :math:`f` are off by about
#   :math:`u f`, where :math:`u` is the rounding of the type, and the
#   difference is divided by :math:`2 h`. So a larger step is better.
#
# Let :math:`f` and :math:`f'''` both be near 1. Then the sum of both errors is
# smallest near :math:`h = u^{1/3}`, and there it is about :math:`u^{2/3}`. Two
# thirds of the digits are left. Here it is for one element of ``x``, in
# float64 and in float32:


def error_of_differences(dtype, step):
    """Relative error of a finite difference of our forward pass."""
    torch.manual_seed(0)
    x = torch.randn(1, 16, dtype=torch.float64)
    w = torch.rand(16, dtype=torch.float64)
    dy = torch.randn(1, 16, dtype=torch.float64)
    wide = x.clone().requires_grad_()
    (exact,) = torch.autograd.grad(pytorch(wide, w), wide, dy)

    def f(change):
        moved = x.clone()
        moved[0, 3] += change
        y, _ = forward(moved.to(DEVICE, dtype), w.to(DEVICE, dtype), EPS)
        return (y * dy.to(DEVICE, dtype)).sum()

    found = (f(step) - f(-step)).item() / (2 * step)
    return abs(found / exact[0, 3].item() - 1)


EXPONENTS = range(-24, 1)
errors = {
    dtype: [error_of_differences(dtype, 2.0**e) for e in EXPONENTS]
    for dtype in (torch.float64, torch.float32)
}
for dtype, found in errors.items():
    best = found.index(min(found))
    print(
        f"{dtype}: the best step is 2**{EXPONENTS[best]}, and its error is "
        f"{found[best]:.0e}; with 1e-6 it is {found[4]:.0e}"
    )

# %%

# Drawing: the error of a finite difference against its step.

plt.figure(
    "The relative error of a finite difference against its step. In float64 "
    "it falls with the square of the step and rises again below a step of "
    "about 2**-18; in float32 it rises again below about 2**-8",
    figsize=(6.6, 3.4),
)
steps = [2.0**e for e in EXPONENTS]
for dtype, found in errors.items():
    plt.plot(steps, found, marker="o", markersize=3, label=str(dtype)[6:])
for dtype, style in ((torch.float64, "C0:"), (torch.float32, "C1:")):
    rounding = torch.finfo(dtype).eps
    plt.plot(steps, [rounding / h for h in steps], style, label="u / h")
plt.xscale("log", base=2)
plt.yscale("log")
plt.ylim(1e-17, 1e5)
plt.xlabel("step h")
plt.ylabel("relative error")
plt.legend(loc="upper center", ncols=4)
plt.show()

# %%
# **What the figure shows.**
# With large steps, on the right, both types have the same error: that of the
# curve. With small steps the rounding grows along the dotted lines, and it
# begins much sooner in float32. The step that is usual for float64, 1e-6,
# gives noise there.
#
# **Why.**
# The rounding :math:`u` is 2**-52 in float64 and 2**-23 in float32. Their cube
# roots are near 2**-17 and 2**-8, and near these are the best steps: 2**-18
# and 2**-8. With the step 1e-6, :math:`u / h` is 0.12 in float32, so about one
# digit is left.
#
# **What follows.**
# ``torch.autograd.gradcheck`` does this for every element, and its defaults
# are meant for float64. So a kernel should take float64, if only for this
# test. That is why ours computes in the type of ``rstd``, which is float64 if
# ``x`` is. Let's ask gradcheck about both norms.


def gradcheck(norm, dtype=torch.float64, **options):
    """Whether autograd and finite differences agree, at 3 x 4."""
    x, w, _ = inputs(3, 4, dtype)
    return torch.autograd.gradcheck(
        norm, (x, w), raise_exception=False, **options
    )


LOOSE = {"eps": 1e-2, "atol": 1e-2, "rtol": 1e-2}
print("float64, right:", gradcheck(ours))
print("float64, without c:", gradcheck(without_c))
print("float32, right:", gradcheck(ours, torch.float32))
print("float32, right, loose:", gradcheck(ours, torch.float32, **LOOSE))

# %%
# In float64 it is right about both. In float32, with the defaults, it warns
# that it needs float64, and then rejects a right gradient. People choose
# larger tolerances until it passes, as we do in the last line.
#
# Finite differences have three more limits, and no tolerance removes them:
#
# - They compare the backward pass with *our own* forward pass. If the forward
#   pass computes the wrong function, and the backward pass the gradient of
#   that function, they find nothing.
# - They are slow: two forward passes for each element of each input. So the
#   shapes are tiny, and what goes wrong only in a program with many rows, or
#   in a wide tile, does not happen.
# - They run in float64, and models run in 16 bits. What is wrong in 16 bits
#   alone is not found.
#
# A reference in float64
# ----------------------
#
# So we compare with a function that computes the same and rounds far less. We
# cast the inputs to float64, and PyTorch's function and autograd give us all
# results. Two mistakes are common here:
#
# - **Other inputs.** The reference must have the numbers that the kernel had,
#   after they were rounded to 16 bits. If you make inputs in float32, give a
#   rounded copy to the kernel, and give the original to the reference, then
#   you measure the rounding of the inputs.
# - **A reference that is no better.** PyTorch in 16 bits rounds its results,
#   too.
#
# Here is ``dw`` of our kernel against the right reference and against both
# mistakes.


def both_passes(norm, arguments, dy):
    """y and the gradients of all arguments."""
    arguments = [tensor.detach().requires_grad_() for tensor in arguments]
    y = norm(*arguments)
    return [y.detach(), *torch.autograd.grad(y, arguments, dy)]


x, w, dy = inputs(8, 64, torch.float16)
found = both_passes(ours, (x, w), dy)
x32, w32, dy32 = inputs(8, 64, torch.float32)
references = {
    "the same inputs, in float64": (x.double(), w.double(), dy.double()),
    "inputs before they were rounded": (
        x32.double(), w32.double(), dy32.double()
    ),
    "PyTorch in float16": (x, w, dy),
}  # fmt: skip
for name, (x_of_it, w_of_it, dy_of_it) in references.items():
    y, dx, dw = both_passes(pytorch, (x_of_it, w_of_it), dy_of_it)
    error = ((found[2] - dw).norm() / dw.norm()).item()
    print(f"dw against {name}: a relative error of {error:.1e}")

# %%
# The first number is the error of our kernel. Nearly all of it is the rounding
# of the result to 16 bits. The second number adds the rounding of the inputs.
# The third one depends on how PyTorch rounds on this machine. If it is 0, then
# both round alike, and an error that they share does not show.
#
# How far may a number be off?
# ----------------------------
#
# No kernel gives the exact result. How much must a test allow? If you take
# ``rtol=1e-2`` from somebody else's test, you have a number without a reason.
# There are three reasons for a result to be off.
#
# **A result is rounded to its type.** Between 1 and 2, neighboring numbers of
# float16 are 2**-10 apart. This distance is called *eps*, and below we call
# eps times a value a *unit* of the value. An example: 1.0006 lies between 1
# and 1.00098. It is stored as 1.00098, and is off by 0.0004. The nearest
# number is up to half a unit away, here 0.0005, so no test can ask for less.
# For a result in 16 bits that is nearly the whole error, because the sums are
# in float32.

# %%

# Drawing: a number between two neighbors.

plt.figure(
    "A line with three neighboring numbers of float16: 1, 1.00098 and "
    "1.00195. An arrow leads from 1.0006 to 1.00098, its nearest neighbor",
    figsize=(7.5, 1.6),
)
plt.axhline(0, color="k", linewidth=1)
for number, name in ((0, "1"), (1, "1.00098"), (2, "1.00195")):
    plt.plot(number, 0, "C0o")
    plt.text(number, -0.5, name, ha="center", va="center")
plt.plot(0.0006 * 2**10, 0, "C1o")
plt.text(0.0006 * 2**10, -0.5, "1.0006", color="C1", ha="center", va="center")
plt.annotate(
    "",
    (1, 0.1),
    (0.0006 * 2**10, 0.1),
    arrowprops={"arrowstyle": "->", "color": "C1"},
)
for middle in (0.5, 1.5):
    plt.plot((middle, middle), (-0.2, 0.6), "k:")
plt.text(1, 0.8, "all of these are stored as 1.00098", ha="center")
plt.xlim(-0.2, 2.2)
plt.ylim(-0.8, 1.2)
plt.axis("off")
plt.show()

# %%
# **A sum rounds after each addition.** How much that is in the end depends on
# the order. Let all terms be positive and about equally large. In one long
# chain, the partial sum of k terms is then k/N of the whole, and it rounds by
# up to half a unit of its own size. Such an error lies anywhere between both
# bounds, so the mean of its square is a third of the square of the bound. The
# errors have both signs. Their squares add up, as in a random walk, and not
# the errors themselves:
#
# .. math:: \sqrt{\sum_{k=1}^N \frac{1}{3} \Bigl(\frac{k}{N}\Bigr)^2}
#    \approx \frac{\sqrt{N}}{3} \quad \text{half units of the sum}
#
# In a tree, which adds up pairs, then pairs of these sums, and so on, a term
# goes through :math:`\log_2 N` additions only, and the error hardly grows.
# ``tl.sum`` adds in this way.

# %%

# Scaffold: errors of a sum in a chain and in a tree.


def error_of_a_sum(count, order):
    """In half units of the sum, root of the mean square of 64 sums."""
    torch.manual_seed(0)
    terms = torch.rand(64, count)
    exact = terms.double().sum(dim=1)
    found = terms
    if order == "chain":
        found = torch.zeros(64)
        for term in terms.unbind(dim=1):
            found = found + term
    else:
        while found.shape[1] > 1:
            found = found[:, 0::2] + found[:, 1::2]
        found = found[:, 0]
    half_units = torch.finfo(torch.float32).eps / 2 * exact
    return ((found - exact) / half_units).square().mean().sqrt().item()


COUNTS = [2**e for e in range(2, 15, 2)]
errors_of_sums = {
    order: [error_of_a_sum(count, order) for count in COUNTS]
    for order in ("chain", "tree")
}

# %%

# Drawing: the error of a sum against the number of its terms.

plt.figure(
    "The error of a sum in half units against the number of its terms. In a "
    "chain it grows like the square root of the number divided by three, in "
    "a tree it stays below one",
    figsize=(6.6, 3.4),
)
for order, found in errors_of_sums.items():
    plt.plot(COUNTS, found, marker="o", label=f"a {order}")
    print(f"{order}: {found[-1]:.2f} half units at {COUNTS[-1]} terms")
plt.plot(COUNTS, [n**0.5 / 3 for n in COUNTS], "C2:", label="√N / 3")
plt.xscale("log", base=2)
plt.yscale("log")
plt.xlabel("terms N")
plt.ylabel("error in half units")
plt.legend()
plt.show()

# %%
# **What the figure shows.**
# The chain follows the line that we derived, and stays somewhat below it. At
# 16384 terms it is off by 24 half units, where the line has 43. The tree is
# off by 0.7.
#
# **Why.**
# Numbers of a type are a whole unit apart only at powers of two. At 1.9 they
# are still eps apart, which is about half a unit of 1.9. So a sum rounds by
# less than we assumed. In the tree a term goes through 14 additions, in the
# chain through up to 16384.
#
# **What follows.**
# Our sums over a row are trees, so wide rows hardly need more tolerance. Those
# of ``dw`` are a chain in each program, and then what ``torch.sum`` does with
# the programs' sums. So the more rows a program has, the more tolerance ``dw``
# needs.
#
# **Terms cancel.** The terms of ``dw`` have both signs. Their sum may be small
# by chance, while each addition rounds by the size of the *terms*. So an
# element near 0 may be off by more than its own value, and no relative
# tolerance fits it. What does fit is the sum of the sizes of its terms. Here
# are 4096 columns of ``dw``, each the sum of 256 rows, computed in float32:

# %%

# Scaffold: elements of dw with much and little cancellation.

torch.manual_seed(0)
terms = torch.randn(256, 4096)
exact = terms.double().sum(dim=0)
in_float32 = torch.zeros(4096)
for row in terms:
    in_float32 = in_float32 + row
error = (in_float32 - exact).abs()
sizes = terms.double().abs().sum(dim=0)
half_unit = torch.finfo(torch.float32).eps / 2
of_value = error / exact.abs() / half_unit
of_sizes = error / sizes / half_unit
print(f"the worst error: {of_value.max():.0f} half units of its value,")
print(f"{of_sizes.max():.1f} half units of the sizes of its terms")

# %%

# Drawing: the error of sums whose terms cancel.

plt.figure(
    "Errors of sums against how much of the sizes of their terms is left. "
    "Relative to the value the error grows without end as less is left; "
    "relative to the sizes of the terms it stays below three half units",
    figsize=(6.6, 3.4),
)
left = exact.abs() / sizes
plt.scatter(left, of_value, s=4, label="of the value")
plt.scatter(left, of_sizes, s=4, label="of the sizes of the terms")
plt.xscale("log")
plt.yscale("log")
plt.ylim(1e-4, None)
plt.xlabel("the value over the sizes of its terms")
plt.ylabel("error in half units")
plt.legend()
plt.show()

# %%
# **What the figure shows.**
# Relative to its value, an element is off by up to 6596 half units, and the
# more, the less is left of its terms. Relative to the sizes of its terms, no
# element is off by more than 2.8 half units.
#
# **Why.**
# The partial sums are as large as the terms make them, and so is what the
# additions round. What is left at the end changes nothing of that.
#
# **What follows.**
# A test should allow each element
#
# - half a unit of its value, in the type of the result,
# - and a few half units of the sizes of its terms, in the type of the sums.
#
# One absolute tolerance for the whole matrix would have to be as large as the
# largest of these, and a fault in the small elements would hide below it.
#
# Sizes without formulas
# ----------------------
#
# The terms of ``dw`` are easy to see. Those of ``dx`` are not, and for the
# next kernel you would have to derive them again. There is a way that needs
# only the reference: let the reference compute in the type of our sums, and
# see how far it is off. Where terms cancel, they cancel there, too.
#
# Once is not enough, because an element may be right by luck. So we *shake the
# inputs*: we change each number of them at random by up to a unit, compute the
# reference in float32, and compare with the float64 result of the inputs that
# were not changed. We do this eight times. The root of the mean square of the
# eight errors says how exact an element can be expected to be. We call it the
# *spread* of the element.


def shaken(reference, arguments, dy):
    """Results in float64, and the spread of each element."""
    sums = torch.promote_types(dy.dtype, torch.float32)
    wide = [tensor.double() for tensor in (*arguments, dy)]
    exact = both_passes(reference, wide[:-1], wide[-1])
    spread = [torch.zeros_like(tensor) for tensor in exact]
    for _ in range(8):
        changes = [2 * torch.rand_like(tensor) - 1 for tensor in wide]
        moved = [
            (tensor * (1 + torch.finfo(sums).eps * change)).to(sums)
            for tensor, change in zip(wide, changes, strict=True)
        ]
        again = both_passes(reference, moved[:-1], moved[-1])
        for total, before, after in zip(spread, exact, again, strict=True):
            total += (after - before).square() / 8
    return exact, [total.sqrt() for total in spread]


x, w, dy = inputs(40, 129, torch.float32)
exact, spread = shaken(pytorch, (x, w), dy)
found = both_passes(ours, (x, w), dy)
unit = torch.finfo(torch.float32).eps
for name, f, e, s in zip(("y", "dx", "dw"), found, exact, spread, strict=True):
    relative = ((f - e).abs() / e.abs() / unit).max()
    print(
        f"{name}: off by up to {relative:.0f} units of its value, and by "
        f"{((f - e).abs() / s).max():.1f} times its spread"
    )

# %%
# Relative to its value, one element of ``dx`` looks terrible. Relative to the
# spread, no element is far off.
#
# How many times the spread do we allow? Say that a kernel adds n products in
# one chain, and that each product is about 1 in size. We count in eps, which
# is a unit of 1.
#
# - **How far is the sum off?** Let the products have both signs. After k of
#   them the partial sum is about :math:`\sqrt{k}`, and the addition is off by
#   about a fifth of that. The squares of :math:`\sqrt{k} / 5` add up to
#   :math:`n^2 / 50`, so the whole sum is off by about n / 7, and three
#   standard deviations are 3 n / 7.
# - **How large is the spread?** It is what shaking does to the sum. Shaking
#   changes each factor by a random number between -1 and 1, whose mean square
#   is a third. A product has two factors and moves by :math:`\sqrt{2 / 3}`, or
#   0.8. The sum of all products moves by :math:`0.8 \sqrt{n}`.
# - **How many times is that?** Divide 3 n / 7 by :math:`0.8 \sqrt{n}`: three
#   standard deviations are about :math:`\sqrt{n} / 2` times the spread. For
#   256 products that is 8 times. We allow twice as much, 16 times, because
#   eight shakes give the spread itself only roughly.
# - **And if all products have one sign?** Then the sum is off by
#   :math:`\sqrt{n} / 3` half units of its value, as derived above. Three
#   standard deviations are :math:`\sqrt{n}` half units. For 256 products that
#   is 16 half units, and these we allow, too.
#
# Where your chains are longer, allow more, and say why.
#
# Which shapes?
# -------------
#
# A test at 8 x 64 sees little. Its width is a power of two, so that no lane of
# a tile is masked. Faults live at the edges, and which edges there are depends
# on *your* launch. So take sizes on both sides of each edge:
#
# - widths of 1, a power of two, one less and one more;
# - one row, fewer rows than programs, more rows than programs, and a number of
#   rows that programs cannot divide evenly.
#
# To these add a few sizes drawn at random, for the edges that you have not
# thought of. The seed is fixed, so that a failure can be repeated. In a test
# that runs every night, take the date as the seed, and print it.
#
# Strides belong to the shape, too. A gradient that comes from
# ``sum()`` is one number with strides of 0, and one that comes from a
# transposed product has its columns one after the other in memory. And if the
# kernel takes 16 bits, test it in 16 bits, with the tolerance of these bits.


def layouts_of(dy):
    """The same shape with other strides."""
    yield "contiguous", dy
    yield "one number", dy[:1, :1].expand(dy.shape)
    yield "transposed", dy.t().contiguous().t()


def edges(programs):
    """Shapes on both sides of the edges of a launch, and two at random."""
    random = torch.Generator().manual_seed(0)
    shapes = [(1, 1), (programs - 1, 31), (programs + 1, 33)]
    shapes.append((2 * programs + 1, 129))
    for _ in range(2):
        M = torch.randint(1, 3 * programs, (), generator=random).item()
        N = torch.randint(1, 200, (), generator=random).item()
        shapes.append((M, N))
    return shapes


PROGRAMS = NUM_SMS * plan_backward(1)[0]
print("shapes:", *edges(PROGRAMS))

# %%
# What lies beside a tensor?
# --------------------------
#
# A kernel that reads beyond the end of a row finds the next row there, and
# beyond the last row whatever the memory holds. Often these are zeros, and the
# test passes. A kernel that writes there damages a tensor that no test looks
# at.
#
# So we put a band, or *guard band*, before and behind each tensor that the
# kernel may touch. All bytes of a band are 255, which is NaN in every type of
# floats. If the kernel reads a band, the NaN appears in the result. If it
# writes into a band, some bytes are no longer 255 afterwards. And as long as
# the test runs, ``torch.empty`` gives memory full of NaN, so that an element
# that nobody has written shows.

# %%

# Drawing: a tensor between two bands.

plt.figure(
    "Memory as a row of boxes: a band of 4096 bytes of 255, the tensor, also "
    "of 255 before the kernel has written it, and another band",
    figsize=(7.5, 1.4),
)
for left, width, name, color in (
    (0, 3, "band: 4096 x 255", "C1"),
    (3, 5, "the tensor: NaN until it is written", "C0"),
    (8, 3, "band: 4096 x 255", "C1"),
):
    plt.barh(0, width, 0.8, left, color=color, alpha=0.5, ec="k")
    plt.text(left + width / 2, 0, name, ha="center", va="center")
plt.axis("off")
plt.show()

# %%
# Rows that are special
# ---------------------
#
# What should a kernel do with these three inputs? If no test says so, nobody
# has decided it.
#
# - **A row of zeros**, such as padding. :math:`r` is then
#   :math:`\epsilon^{-1/2}`, which is finite, and the gradient is large and
#   right. Without :math:`\epsilon` it is NaN.
# - **A row with NaN or infinity.** In ``y`` and ``dx`` it must not leave its
#   row. In ``dw`` it must arrive, because a kernel that hides a NaN hides why
#   a model has failed. Our rows have a NaN and no infinity. An infinity makes
#   :math:`r` zero, so its own element of ``y`` is NaN, and so is ``dx`` in its
#   whole row. Put one into your rows.
# - **No rows at all.** A batch can be empty after a filter. ``dw`` must be 0
#   then, and not whatever was in memory.
#
# Forty lines to take along
# -------------------------
#
# All of this together is one function, ``trust``. It knows nothing of norms:
# it takes a function, a reference, inputs and a gradient. Each result must
# have the type of another tensor: ``y`` that of ``dy``, and a gradient that of
# its input.

GUARD = 4096  # bytes before and behind each tensor


def guarded(allocate, memories, *args, **options):
    """What allocate gives, but full of NaN, and between two bands of NaN.

    All three are one piece of memory, which is added to memories.
    """
    like = allocate(*args, **options)
    size = like.untyped_storage().nbytes() + 2 * GUARD
    memory = torch.full((size,), 255, dtype=torch.uint8, device=like.device)
    memories.append(memory)
    inside = memory[GUARD:-GUARD].view(like.dtype)
    return inside.as_strided(like.shape, like.stride())


@contextlib.contextmanager
def bands(memories):
    """Whatever is allocated inside stands between bands."""
    empty = functools.partial(guarded, torch.empty, memories)
    empty_like = functools.partial(guarded, torch.empty_like, memories)
    with mock.patch.multiple(torch, empty=empty, empty_like=empty_like):
        yield


def placed(tensor):
    """A contiguous tensor between bands; another one as it is."""
    if not tensor.is_contiguous():
        return tensor
    return torch.empty_like(tensor).copy_(tensor.detach())


def compare(found, exact, spread, like, slack=16):
    """Compare each element of a result with what was found in float64."""
    assert found.shape == exact.shape and found.dtype == like.dtype
    limits = torch.finfo(found.dtype)
    sums = torch.promote_types(found.dtype, torch.float32)
    # Half a unit of the value in the type of the result, slack / 2 units of it
    # in the type of the sums, the spread times slack, and the smallest number.
    relative = (limits.eps + slack * torch.finfo(sums).eps) / 2
    allowed = relative * exact.abs() + slack * spread
    allowed += limits.smallest_normal * limits.eps
    close = (found - exact).abs() <= allowed
    close &= allowed.isfinite()
    # NaN is right where the reference has NaN, and infinity likewise.
    rounded = exact.to(found.dtype)
    close |= torch.isclose(found, rounded, rtol=0, atol=0, equal_nan=True)
    assert close.all(), f"{(~close).sum()} of {close.numel()} are wrong"


def trust(function, reference, arguments, dy):
    """Compare a result and all gradients; then look at the bands."""
    # The function has its inputs between bands, and what it allocates, too.
    memories = []
    with bands(memories):
        inside = [placed(tensor) for tensor in (*arguments, dy)]
        found = both_passes(function, inside[:-1], inside[-1])
    # The reference has the same numbers, without bands.
    exact, spread = shaken(reference, arguments, dy)
    for results in zip(found, exact, spread, (dy, *arguments), strict=True):
        compare(*results)
    # Nobody may have written into a band.
    for memory in memories:
        outside = torch.cat((memory[:GUARD], memory[-GUARD:]))
        assert (outside == 255).all(), "written beside a tensor"


# %%
# Take these functions together with ``both_passes`` and ``shaken``, which they
# call, and with the constant ``GUARD``. They need four imports:
#
# .. code-block:: python
#
#    import contextlib
#    import functools
#    from unittest import mock
#
#    import torch
#
# All arguments must have gradients. What has none, such as the labels of
# a loss, goes into the function and into the reference beforehand, with
# ``functools.partial``. And only what ``torch.empty`` and ``torch.empty_like``
# allocate gets bands. If your function allocates in another way, add that way
# to ``bands``.


def lines_of(*functions):
    """Lines of code, without docstrings, comments and empty lines."""
    count = 0
    for function in functions:
        text = inspect.getsource(function)
        text = text.replace(f'"""{function.__doc__}"""', "")
        for line in text.splitlines():
            line = line.strip()
            if line and not line.startswith("#"):
                count += 1
    return count


lines = lines_of(guarded, bands, placed, compare, trust)
print(f"{lines} lines, and {lines_of(both_passes, shaken)} that they call")

# %%
# The next function calls ``trust`` with the shapes, types, strides and special
# rows of the sections before.


def special_rows():
    """Four rows, of which one is 0 and one has a NaN; and no rows."""
    x, w, dy = inputs(4, 20, torch.float32)
    x = x.detach().clone()
    x[1] = 0
    x[2, 5] = float("nan")
    yield (x, w), dy
    yield (x[:0], w), dy[:0]


def trust_all(norm):
    for M, N in edges(PROGRAMS):
        for dtype in (torch.float32, torch.float16):
            x, w, dy = inputs(M, N, dtype)
            trust(norm, pytorch, (x, w), dy)
    x, w, dy = inputs(5, 33, torch.float32)
    for _, dy_of_layout in layouts_of(dy):
        trust(norm, pytorch, (x, w), dy_of_layout)
    for arguments, dy_of_rows in special_rows():
        trust(norm, pytorch, arguments, dy_of_rows)


trust_all(ours)
if ON_GPU:  # too large for the interpreter
    for dtype in (torch.bfloat16, torch.float32):
        x, w, dy = inputs(1151, 8192, dtype)
        trust(ours, pytorch, (x, w), dy)
print("ours: each element of y, dx and dw is right")

# %%
# Who tests the tests?
# --------------------
#
# A test that has never failed may be one that cannot. So let's plant faults
# and see which test finds which. A copy of a program with one fault is called
# a *mutant*. Ours are faults that we have made, or seen in kernels of others:

STORE_SUMS = "tl.store(sums_ptr + tl.program_id(0) * N + cols, dw, mask=mask)"
FAULTS = {
    "dx without c": [("(wdy - x_hat * c) * rstd", "wdy * rstd")],
    "c divided by the tile": [
        ("c = tl.sum(x_hat * wdy) / N", "c = tl.sum(x_hat * wdy) / BLOCK")
    ],
    "dw of the last row": [("dw += dy * x_hat", "dw = dy * x_hat")],
    "rows left over": [
        ("(0), M, tl", "(0), M // tl.num_programs(0) * tl.num_programs(0), tl")
    ],
    "squares in 16 bits": [
        ("tl.sum(x * x)", "tl.sum((x * x).to(x_ptr.dtype.element_ty)).to(acc)")
    ],
    "strides of dy": [("    dy = dy.contiguous()\n", "")],
    "no eps": [("/ N + eps)", "/ N)")],
    "y without a mask": [("x * rstd * w, mask=mask)", "x * rstd * w)")],
    "a row nobody writes": [
        ("torch.empty(programs, N", "torch.empty(programs + 1, N")
    ],
    "sums in one place": [
        ("torch.empty(programs, N", "torch.zeros(1, N"),
        (
            STORE_SUMS,
            "old = tl.load(sums_ptr + cols, mask=mask)\n"
            "    tl.store(sums_ptr + cols, old + dw, mask=mask)",
        ),
    ],
}

# %%
# The tests are those of this page, one by one:
#
# - "allclose" is the test that most kernels have: 16 bits, one shape with
#   powers of two, PyTorch in 16 bits as the reference, and a tolerance of
#   1e-2.
# - "float64 at 8 x 64" compares with float64 at the same shape, in float32,
#   and allows what we have derived. "the same in 16 bits" does so in float16.
# - "edges", "strides" and "special rows" do so in float32 with the shapes, the
#   layouts of ``dy`` and the rows from above.
# - "bands" is ``trust`` at 8 x 33, and "trust_all" is everything together.
#
# All but the last two run in memory that is 0 when it is allocated, as fresh
# memory often is.

# %%

# Scaffold: the tests, one by one.


def loss_falls(norm):
    losses = train(norm, 10)
    assert losses[-1] < losses[0] / 2


def gradcheck_agrees(norm):
    assert gradcheck(norm)


def all_close(norm):
    x, w, dy = inputs(8, 64, torch.float16)
    found = both_passes(norm, (x, w), dy)
    expected = both_passes(pytorch, (x, w), dy)
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)


def right(norm, arguments, dy):
    """Each element, without bands."""
    found = both_passes(norm, arguments, dy)
    exact, spread = shaken(pytorch, arguments, dy)
    for results in zip(found, exact, spread, (dy, *arguments), strict=True):
        compare(*results)


def float64_agrees(norm):
    x, w, dy = inputs(8, 64, torch.float32)
    right(norm, (x, w), dy)


def float64_agrees_in_16_bits(norm):
    x, w, dy = inputs(8, 64, torch.float16)
    right(norm, (x, w), dy)


def shapes_agree(norm):
    for M, N in edges(PROGRAMS):
        x, w, dy = inputs(M, N, torch.float32)
        right(norm, (x, w), dy)


def strides_agree(norm):
    x, w, dy = inputs(8, 64, torch.float32)
    for _, dy_of_layout in layouts_of(dy):
        right(norm, (x, w), dy_of_layout)


def rows_agree(norm):
    for arguments, dy in special_rows():
        right(norm, arguments, dy)


def bands_hold(norm):
    x, w, dy = inputs(8, 33, torch.float32)
    trust(norm, pytorch, (x, w), dy)


TESTS = {
    "shapes fit": shapes_fit,
    "loss falls": loss_falls,
    "gradcheck": gradcheck_agrees,
    "allclose": all_close,
    "float64 at 8 x 64": float64_agrees,
    "the same in 16 bits": float64_agrees_in_16_bits,
    "edges": shapes_agree,
    "strides": strides_agree,
    "special rows": rows_agree,
    "bands": bands_hold,
    "trust_all": trust_all,
}


@contextlib.contextmanager
def lucky_memory():
    """What is allocated inside is 0, with room for what a fault writes beside
    it."""

    def zeros(allocate, *args, **options):
        return guarded(allocate, [], *args, **options).zero_()

    empty = functools.partial(zeros, torch.empty)
    empty_like = functools.partial(zeros, torch.empty_like)
    with mock.patch.multiple(torch, empty=empty, empty_like=empty_like):
        yield


def finds(test, norm):
    """Whether a test fails."""
    memory = lucky_memory()
    if test in (bands_hold, trust_all):
        memory = contextlib.nullcontext()
    try:
        with memory:
            test(norm)
    except (AssertionError, RuntimeError):
        return True
    return False


# %%

for name, test in TESTS.items():
    assert not finds(test, ours), name  # a test that fails for all finds none
table = {
    fault: [finds(test, with_fault(*edits)) for test in TESTS.values()]
    for fault, edits in FAULTS.items()
}
for place, name in enumerate(TESTS):
    count = sum(found[place] for found in table.values())
    print(f"{name}: finds {count} of {len(FAULTS)}")
print()
for fault, found in table.items():
    names = [name for name, one in zip(TESTS, found, strict=True) if one]
    print(f"{fault}: found by {', '.join(names) or 'no test'}")

# %%

# Drawing: which test finds which fault.

plt.figure(
    "Which test finds which fault: a row for each of ten faults, a column for "
    "each test, and a filled square where the test fails",
    figsize=(7.5, 4.6),
)
for row, found in enumerate(table.values()):
    for column, one in enumerate(found):
        color = "C0" if one else "none"
        plt.barh(-row, 0.9, 0.8, column - 0.45, color=color, ec="k", alpha=0.7)
plt.yticks([-row for row in range(len(table))], list(table))
plt.xticks(range(len(TESTS)), list(TESTS), rotation=40, ha="right")
plt.grid(visible=False)
plt.show()

# %%
# **What the figure shows.**
# "Shapes fit" and "loss falls" find nothing at all. gradcheck finds a single
# fault, and "allclose" two. The last column, which is all tests of this page
# together, finds all but the race.
#
# **Why.**
#
# - "c divided by the tile" is right wherever the width is a power of two, as
#   in gradcheck's 3 x 4.
# - "dw of the last row" and "rows left over" need programs with several rows,
#   and "rows left over" a number of rows that programs cannot divide evenly.
# - "squares in 16 bits" is right in float64 and float32. In float16 the error
#   is smaller than any usual tolerance, and larger than rounding explains.
# - "no eps" changes an ordinary row by three or four units of its values,
#   which rounding could explain. The change is large only in a row of zeros,
#   or of tiny numbers. gradcheck finds nothing, because both passes leave it
#   out.
# - "y without a mask" writes over the next row, whose program then writes the
#   right numbers over it. Only the last row damages what stands behind ``y``.
# - "a row nobody writes" is right as long as fresh memory is 0.
# - "sums in one place" is found by no test here. Two programs load the same
#   sum, each adds its own part, and one of the two parts is lost. But the
#   interpreter never runs two programs at a time.
#
# **What follows.**
# Each of the five tests from "the same in 16 bits" to "bands" finds a fault
# that no other single test finds, so none of them can be left out. Plant your
# own faults: take the lines of your kernel that you thought about longest, and
# undo them one by one.
#
# **What changes on a GPU.**
# The table above comes from the interpreter. We have run the same tests on the
# H200, where the last column finds all ten faults. Four rows differ:
#
# - "sums in one place" is found by gradcheck, and by all tests that come after
#   it. Even the three programs of its 3 x 4 overwrite each other's sums.
# - "y without a mask" is found by edges and special rows as well. Programs run
#   at the same time, so what one of them writes into the next row may come
#   last and stay.
# - "dw of the last row" is found by edges, and by no other single test. At 8 x
#   64 the GPU has a program for each row, and the fault needs one with two.
# - "no eps" is found by edges and bands as well. Three or four units are near
#   what we allow. On the GPU the shapes of "edges" have thousands of rows, and
#   in some of their elements the spread is small enough. At 8 x 33, the shape
#   of "bands", it is luck: with most other random numbers the test passes.
#
# So the same tests belong on both machines. The interpreter gives programs
# several rows at a small size, and the GPU runs many programs at once.
#
# Does it give the same bits?
# ---------------------------
#
# Adding in another order rounds differently:

a, b, c = torch.tensor([1e8, 1.0, -1e8]).unbind()
print("(a + b) + c =", ((a + b) + c).item())
print("(a + c) + b =", ((a + c) + b).item())

# %%
# If programs add to the same place with ``tl.atomic_add``, no part is lost,
# but their order is an accident, and two runs differ in the last bits. That is
# not wrong, but it has a price. A loss curve cannot be repeated, and a test
# with a tight tolerance fails once in a while. Worse, a real race can hide
# behind it: if two runs always differ, nobody wonders why. If a kernel is
# meant to give the same bits each time, then any difference is a fault, and
# the test for it is short: run the kernel a hundred times, and compare with
# ``torch.equal``.
#
# We do that with our kernel, in whose buffer each program has a row of its
# own, and with two mutants. One adds to a single row with atomic additions.
# The other is "sums in one place" from above. Up to 64 rows there is a program
# for each row; at 4096 rows there are fewer programs than rows.

WITH_ATOMICS = [
    ("torch.empty(programs, N", "torch.zeros(1, N"),
    (STORE_SUMS, "tl.atomic_add(sums_ptr + cols, dw, mask=mask)"),
]

# %%

# Scaffold: a hundred runs, two benchmarks.


@functools.cache
def hundred_runs(M, N, dtype, provider):
    """How many of 100 runs give other bits than the first run, and in how many
    some element of dw is wrong."""
    norm = ours
    if provider == "atomics":
        norm = with_fault(*WITH_ATOMICS)
    if provider == "race":
        norm = with_fault(*FAULTS["sums in one place"])
    x, w, dy = inputs(M, N, dtype)
    exact, spread = shaken(pytorch, (x, w), dy)
    _, _, first = both_passes(norm, (x, w), dy)
    different = 0
    wrong = 0
    for _ in range(100):
        _, _, dw = both_passes(norm, (x, w), dy)
        if not torch.equal(dw, first):
            different += 1
        try:
            # Chains are as long as there are programs: allow for a thousand.
            compare(dw, exact[2], spread[2], w, slack=32)
        except AssertionError:
            wrong += 1
    return different, wrong


def benchmark_of_runs(ylabel, plot_name):
    return triton.testing.Benchmark(
        x_names=["rows"],
        x_vals=["2", "3", "8", "64", "4096"],  # as points
        line_arg="provider",
        line_vals=["triton", "atomics", "race"],
        line_names=["Triton", "Atomic additions", "Sums in one place"],
        ylabel=ylabel,
        plot_name=plot_name,
        args={"N": 4096, "dtype": torch.float32, "mode": "backward"},
    )


@triton.testing.perf_report(
    benchmark_of_runs("different results of 100", "testing-different")
)
def bench_bits(rows, N, dtype, mode, provider):
    """Runs of 100 in which dw has other bits than in the first run, which is
    not one of them."""
    if not ON_GPU:
        return 3 * [float("nan")]  # here one program follows the other
    different, _ = hundred_runs(int(rows), N, dtype, provider)
    return 3 * [different]


@triton.testing.perf_report(
    benchmark_of_runs("wrong runs of 100", "testing-wrong")
)
def bench_wrong(rows, N, dtype, mode, provider):
    """Runs of 100 in which some element of dw is further from float64 than
    rounding explains: 32 times its spread and 16 units of its value."""
    if not ON_GPU:
        return 3 * [float("nan")]
    _, wrong = hundred_runs(int(rows), N, dtype, provider)
    return 3 * [wrong]


# %%

bits = bench_bits.run(show_plots=ON_GPU, return_df=True)

# %%

wrong_runs = bench_wrong.run(show_plots=ON_GPU, return_df=True)
if wrong_runs.notna().all(axis=None):  # they were counted
    ours_and_atomics = wrong_runs.iloc[:, 1:3]
    assert (ours_and_atomics == 0).all(axis=None)

# %%
# **What the figures show.**
# On the H200 none of 100 runs gives other bits with the buffer, whatever the
# number of rows. With atomic additions 0 of 100 do at two rows, and 100 at
# three rows and at each larger number. With the race 100 of 100 runs are wrong
# at each number of rows.
#
# **Why.**
# Two parts give the same sum in either order, so atomic additions of two rows
# always agree. From three rows on, the order matters, and ``dw`` has 4096
# elements, of which one is enough. The race needs only two programs that run
# at the same time, and two rows make two programs.
#
# **What follows.**
# Ask for the same bits, with three programs or more. The race that no test
# finds without a GPU is found at once with one. A kernel is not tested until
# it has run where it will run.
#
# Races, and tools for what tests cannot see
# ------------------------------------------
#
# A race need not be as frequent as this one. If a hundred runs miss it, tools
# may help:
#
# - **The interpreter** runs one program after the other, each as if it were
#   alone. Whatever depends on several programs at a time it cannot see: races,
#   programs that wait for each other, a store that is not visible yet. It also
#   rounds correctly what a GPU only approximates, such as ``rsqrt``.
# - `compute-sanitizer
#   <https://docs.nvidia.com/compute-sanitizer/ComputeSanitizer/index.html>`_
#   comes with CUDA and watches a program on the GPU. Its tool ``memcheck``
#   looks for reads and writes outside of what was allocated. Its tool
#   ``initcheck`` looks for reads of memory that nobody has written. Its tool
#   ``racecheck`` looks for races, but only in *shared* memory, where the
#   threads of one program meet.
# - `triton-viz <https://github.com/Deep-Learning-Profiling-Tools/triton-viz>`_
#   runs kernels on the CPU. Its sanitizer does not try addresses but solves
#   for them: is there a program and a lane that leaves its tensor?
#
# compute-sanitizer needs a GPU, so this page cannot run it for you. PyTorch
# allocates large blocks and cuts tensors out of them, and a write beside a
# tensor is still inside a block. So tell it to allocate each tensor by itself:
#
# .. code-block:: bash
#
#    export PYTORCH_NO_CUDA_MEMORY_CACHING=1
#    compute-sanitizer --tool memcheck python test.py
#
# We have run it on the H200, with both passes of our kernel and of three
# mutants. At 301 x 129 all three tools report nothing of ours. At this size
# ``memcheck`` reports writes outside of memory in "y without a mask", and
# ``initcheck`` reads of unwritten memory in "a row nobody writes".
# ``racecheck`` is slow, so we let it watch "sums in one place" at 40 x 33. It
# reports no hazard, although the sums were wrong in the very run that it
# watched.
#
# triton-viz we have run on our forward kernel, in version 3.0. It has nothing
# to say of ours. Of "y without a mask" it names the line, the tensor, the
# range of its addresses, and an address outside of this range. It computes no
# results, so it can take the place of the bands, and not of the reference.
# This page does not run it, because it is a package of its own, and the page
# needs none but PyTorch and Triton.
#
# Version 3.0 has no tool for races. One is being written: on the branch
# ``feature/race_detector``, which is not released, it looks for two programs
# that touch the same address, one of which writes. We have run it, as it was
# in March 2026, with four programs at 40 x 33. Of our backward kernel and of
# the one with atomic additions it reports nothing. Of "sums in one place" it
# reports that programs read what others write, and write what others write.
# So this race can be found without a GPU, from addresses.
#
# Until such a tool is released, what is left is to read the code. For each
# store, ask which programs may write this address. For each load, ask who has
# written what it loads, and why that has happened by now. In our kernel the
# answers are short. A row of ``dx`` and a row of the buffer belong to one
# program, and ``torch.sum`` begins when the kernel is over. That the answers
# are so short is a good reason for the buffer.
#
# How fast is the backward pass?
# ------------------------------
#
# Now that we trust the backward pass, we may ask for its speed. ``x`` and
# ``dy`` are read and ``dx`` is written, so the ceiling is a kernel that reads
# two matrices and writes one.

# %%

# Scaffold: a benchmark of the backward pass.


@triton.testing.perf_report(benchmark_of("backward"))
def bench_backward(M, N, dtype, mode, provider):
    """Device time: a CUDA graph of several calls, each with inputs of its own
    and after L2 was overwritten, less the graph without the calls; median, 20%
    and 80% quantiles. Copy: the best of six tiles."""
    if not ON_GPU:
        return 3 * [float("nan")]
    if provider == "copy":
        return ceiling(reads=2, writes=1, shape=(M, N), dtype=dtype)
    if provider == "torch.compile":
        return of_compiled(M, N, dtype)[mode]
    norms = {"triton": ours, "torch": pytorch}
    return speed_of(norms[provider], M, N, dtype, mode)


# %%

report(bench_backward)

# %%
# **What the figure shows.**
# On the H200 our backward pass reaches 40% to 66% of the copy. PyTorch reaches
# 34% to 41%, and torch.compile 42% to 49%.
#
# **Why.**
# A program requests a row of ``x`` and a row of ``dy``, waits for them, and
# requests the next two only when it is done with these. So what counts is how
# many bytes the programs of an SM request at a time. At all three widths that
# is 32 KB: eight programs with 4 KB each, two with 16 KB, and one with 32 KB.
# `Layer normalization, both passes <../layer-norm/01-layer-norm.html>`_ has
# measured on the H200 that 32 to 36 KB reach between 59% and 66% of the copy.
# Our 63% at 4096 columns and 66% at 8192 are no surprise then.
#
# At 1024 columns a pass takes 19.7 µs, and the copy 7.9 µs. With the share of
# 4096 columns it would take 12.6 µs. But at this width there are 1056 programs
# for 4096 rows, and each of them writes a row of sums, which ``torch.sum``
# reads again. In float32 that moves a third as many bytes as the three
# matrices in 16 bits. And two short kernels come after ours: ``torch.sum``,
# and the one that rounds ``dw`` to 16 bits. We have not timed them apart. At
# this width torch.compile is ahead of us, with 42% against 40%.
#
# **What follows.**
# The pages about `rows in flight <../layer-norm/04-loads-in-flight.html>`_ and
# after it go on from here, and the forty lines go with you: an optimization is
# where faults are made.
#
# What does a test cost?
# ----------------------
#
# Nobody runs a test that takes long. So let's measure on the GPU what each
# part costs: a call of both passes, the reference in float64, and ``trust``
# with its eight shaken references. Then we compare ``trust`` with gradcheck,
# at sizes that gradcheck can do.

# %%

# Scaffold: the time of a whole call, two benchmarks.


def whole_call(call):
    """µs of a call, from Python until the device is done: median, 20% and 80%
    quantiles of five rounds.

    Batches of calls are made for 1500 ms or longer, and dealt out to five
    rounds in turns, at least two to each. Of a round the fastest batch counts.
    What else runs on the machine disturbs some batches, and hardly all. If it
    disturbs many in a row, each round has some of them.
    """

    def batch(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        torch.cuda.synchronize()
        return 1e6 * (time.perf_counter() - start) / repeats

    batch(1)  # compiles
    repeats = math.ceil(2000 / batch(1))  # a batch takes 2 ms or more
    rounds = [[] for _ in range(5)]
    end = time.perf_counter() + 1.5
    while time.perf_counter() < end or len(rounds[0]) < 2:
        for times in rounds:
            times.append(batch(repeats))
    fastest = sorted(min(times) for times in rounds)
    return fastest[2], fastest[1], fastest[3]


def reference_of(arguments, dy):
    """The reference alone, casts included."""
    return both_passes(pytorch, [t.double() for t in arguments], dy.double())


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=WIDTHS,
        y_log=True,
        line_arg="provider",
        line_vals=["both passes", "reference", "trust"],
        line_names=["Both passes", "Float64 reference", "The forty lines"],
        ylabel="µs",
        plot_name="testing-costs",
        args={
            "M": 4096,
            "dtype": torch.bfloat16,
            "mode": "forward and backward",
        },
    )
)
def bench_costs(M, N, dtype, mode, provider):
    """Whole calls, from Python until the device is done, in batches of 2 ms or
    more, for 1500 ms or longer, dealt out to five rounds in turns: the fastest
    batch of a round; median, 20% and 80% quantiles of the rounds."""
    if not ON_GPU:
        return 3 * [float("nan")]
    x, w, dy = inputs(M, N, dtype)
    calls = {
        "both passes": lambda: both_passes(ours, (x, w), dy),
        "reference": lambda: reference_of((x, w), dy),
        "trust": lambda: trust(ours, pytorch, (x, w), dy),
    }
    return whole_call(calls[provider])


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=[16, 64, 256],
        x_log=True,
        y_log=True,
        line_arg="provider",
        line_vals=["gradcheck", "fast", "trust"],
        line_names=["gradcheck", "gradcheck, fast", "The forty lines"],
        ylabel="µs",
        plot_name="testing-gradcheck",
        args={
            "M": 3,
            "dtype": torch.float64,
            "mode": "forward and backward",
        },
    )
)
def bench_gradcheck(M, N, dtype, mode, provider):
    """Whole calls, from Python until the device is done, in batches of 2 ms or
    more, for 1500 ms or longer, dealt out to five rounds in turns: the fastest
    batch of a round; median, 20% and 80% quantiles of the rounds. Fast:
    fast_mode=True."""
    if not ON_GPU:
        return 3 * [float("nan")]
    x, w, dy = inputs(M, N, dtype)
    if provider == "trust":
        return whole_call(lambda: trust(ours, pytorch, (x, w), dy))
    options = {"fast_mode": provider == "fast"}
    return whole_call(
        lambda: torch.autograd.gradcheck(ours, (x, w), **options)
    )


# %%

costs = bench_costs.run(show_plots=ON_GPU, return_df=True)

# %%

costs_of_differences = bench_gradcheck.run(show_plots=ON_GPU, return_df=True)

# %%
# **What the figures show.**
# On the H200, at 4096 rows of 8192 columns, both passes take 0.24 ms, the
# reference in float64 takes 1.0 ms, and the forty lines take 36 ms. At three
# rows of 256 columns gradcheck takes 666 ms, its fast mode 3.3 ms, and the
# forty lines 5.4 ms.
#
# **Why.**
# Most of the time of the forty lines is that of the eight shaken references.
# Each draws random numbers for all inputs, changes the inputs in float64, and
# adds up the squares of the errors. These are a dozen operations of PyTorch,
# and each of them reads or writes whole matrices, of 268 MB at 8192 columns.
#
# gradcheck makes two forward passes for each element of each input. For each
# element of the result it makes two backward passes, to see whether both give
# the same. At these small sizes a pass takes as long as its launches do, so
# the time grows with the number of elements. From 16 to 64 columns there are
# four times as many elements, and gradcheck takes 4.1 times as long. From 64
# to 256 columns it takes only 2.9 times as long. But the host was not equally
# fast in both measurements: the forty lines, which hardly depend on these
# widths, took 6.0 ms at 64 columns, and 5.4 ms at 256. That explains a part of
# it, and we do not know the rest. At larger sizes each single pass takes
# longer, too, and at 4096 x 8192 gradcheck would need 67 million forward
# passes.
#
# The fast mode takes one random direction in place of all elements, so it
# needs a few passes, whatever the size. It is the fastest of the three, and it
# compares a single number for each input. In this number one wrong element
# among many does not show. When we make one element of ``dw`` 1.5 times as
# large as it should be, at 3 x 256, the fast mode passes, and the forty lines
# fail.
#
# **What follows.**
# At full size, only a reference checks each element. Use gradcheck while you
# derive the formulas, and where there is no reference: for an operation that
# PyTorch does not have.
#
# When should you test in another way?
# ------------------------------------
#
# - **PyTorch has a test for operators.** ``torch.library.opcheck`` asks
#   whether what an operator promises is true: shapes, types, and which
#   arguments it changes. It does not look at the numbers, and ``trust`` does
#   not look at promises. `A kernel that PyTorch knows <01-operators.html>`_
#   uses it.
# - **gradcheck also checks second derivatives** (``gradgradcheck``), complex
#   numbers and functions with several results. The forty lines take one
#   result, and first derivatives only.
# - **Speed is another question.** Our kernel is right, and at some widths
#   torch.compile still makes a faster one of PyTorch's function, as the
#   figures of both passes show.
# - **A program can search for shapes.** `Hypothesis
#   <https://hypothesis.readthedocs.io>`_ draws inputs until a test fails, and
#   then looks for the smallest input with which it fails.
# - **The spread is only as good as the reference.** If the terms of the
#   reference cancel where those of your kernel do not, the spread is large and
#   the test forgives too much. Where you know the terms, compute their sizes
#   instead.
# - **You may be able to allow less.** 16 times the spread is meant for chains
#   of 256 terms. If your kernel adds in a tree, 4 times would do.
#
# Exercise 1: a shape that finds them
# -----------------------------------
#
# For three of our faults the right shape is enough: "c divided by the tile",
# "dw of the last row" and "rows left over". At 4 x 64 no test finds them.
# Choose one shape, M and N, that finds all three. ``PROGRAMS`` is the largest
# number of programs, which differs between a GPU and the interpreter.
#
# **Hint 1.** For which widths is the tile wider than the row?
#
# **Hint 2.** How many rows must there be, so that a program has more than one?
#
# **Hint 3.** And when do programs not have the same number of rows?

YOUR_SHAPE = (4, 64)


def exercise_1(shape):
    """Print which faults this shape finds, and whether it finds all."""
    x, w, dy = inputs(*shape, torch.float32)
    found = []
    for name in (
        "c divided by the tile",
        "dw of the last row",
        "rows left over",
    ):
        norm = with_fault(*FAULTS[name])
        if finds(lambda norm: right(norm, (x, w), dy), norm):
            found.append(name)
    print(f"{shape} finds:", ", ".join(found) or "nothing")
    return len(found) == 3


print("right:", exercise_1(YOUR_SHAPE))

# %%

# Solution 1

# A width that is no power of two; two rows for each program, and one more.
SHAPE_1 = (2 * PROGRAMS + 1, 33)
assert exercise_1(SHAPE_1)

# %%
# What we learned
# ---------------
#
# In the order in which one reaches for them:
#
# - **Shapes and a falling loss** find slips of the keyboard. They cost
#   nothing, and they say little about a gradient.
# - **Finite differences** find wrong formulas, in float64 and at tiny shapes.
#   They cannot find a wrong forward pass.
# - **A reference in float64** finds wrong numbers, if it has the same inputs
#   and a tolerance with a reason: half a unit of the result, and a few times
#   what rounding does to the terms of its sums.
# - **Shapes at the edges of your launch, strides and special rows** find what
#   goes wrong elsewhere than at 8 x 64.
# - **Bands** find what is read or written beside a tensor, or not written.
# - **Mutants** find tests that find nothing.
# - **A hundred runs on a GPU** find races, if the kernel is meant to give the
#   same bits each time.
# - **Tools** find some of what is left, and reading the code the rest.
#
# **Next:** with such a test you can change a kernel without fear. `From a slow
# kernel to a fast one <03-tuning.html>`_ does so step by step, with a slow RMS
# norm.
