r"""
A kernel that PyTorch knows
===========================

What must PyTorch be told about a kernel, so that a model can use it?
Its gradient, a name, the shapes that come out, and its code: there are four
ways to tell some of that, and what is left untold comes back as an error, as a
slow call or as a wrong number.

The other pages of this site end with a function that one can call. On this
page that is where we begin. We take one small operation, RMS norm, with a
kernel for each pass, and hand it to PyTorch in four ways. Then we do to each
of them what models do: train, compile, checkpoint, export, spread over
processes. Where that fails, the page prints what PyTorch says.

You can read the page in two sittings. The second one begins at *Gradients with
any strides*.

**What you will learn**

- Four ways to hand a kernel to PyTorch: a bare launch, an autograd function,
  a custom operator, and an operator that ``torch.compile`` can look into.
- What each of them costs on the host, which is the CPU that calls and launches
  kernels, and what it costs under ``torch.compile``.
- What the compiler can fuse with a kernel, what it has to leave, and when a
  kernel of your own does not pay.
- Why a gradient may arrive with any strides, and why PyTorch's ``gradcheck``
  does not find a kernel that forgets it.
- How to ask whether an operator keeps its promises: under autocast,
  checkpoints, vmap, second derivatives, two processes, export, streams and
  CUDA graphs.

**What you need:** `Layer normalization, both passes
<../layer-norm/01-layer-norm.html>`_, and how to measure host time, from `What
the user waits for <../layer-norm/10-host-time.html>`_. You don't need a GPU.
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

import contextlib
import functools
import subprocess
import sys
import tempfile
import textwrap
import time
import types
from unittest import mock

# %%
# What does PyTorch know of a kernel?
# -----------------------------------
#
# Nothing. A launch hands addresses to the GPU, the kernel reads and writes
# there, and PyTorch is not asked. Here is a kernel that doubles a row of four
# numbers:


@triton.jit
def _double(x_ptr, y_ptr):
    cols = tl.arange(0, 4)
    tl.store(y_ptr + cols, 2 * tl.load(x_ptr + cols))


x = torch.tensor([1.0, 2, 3, 4], device=DEVICE, requires_grad=True)
y = torch.empty_like(x)
_double[(1,)](x_ptr=x, y_ptr=y)
print("y:", y.tolist())
print("y has a gradient:", y.requires_grad)

# %%
# The numbers are right, and the gradient is gone. There is no error. Autograd
# complains only if no path at all leads from the loss back to a parameter. As
# long as there is another one, a model trains, with a part of its gradient
# missing.
#
# What is there to tell? Four things, and four ways to tell some of them:
#
# - **The gradient**: what to call in the backward pass. Autograd asks for it.
# - **A name.** Some parts of PyTorch look at a model from outside: a
#   checkpoint that keeps some results and computes others again, or an export,
#   which writes the model to a file. They can only speak of what has a name.
# - **The shapes** that come out, without running anything. A compiler follows
#   a model with *fake tensors*. These have shapes, types and strides, and no
#   numbers.
# - **The code.** If the compiler sees the launch, it can plan the memory
#   around it, and launch the kernel from code of its own.

# %%

# Drawing: four ways, and what each of them tells PyTorch.

TOLD = {
    "bare launch": (False, False, True, True),
    "autograd.Function": (True, False, True, True),
    "custom_op": (True, True, True, False),
    "triton_op": (True, True, True, True),
}
plt.figure(
    "What PyTorch is told. A bare launch tells neither gradient nor name. An "
    "autograd function tells the gradient. A custom operator tells gradient, "
    "name and shapes, and hides its code. A triton_op tells all four",
    figsize=(7.5, 2.6),
)
for row, way in enumerate(TOLD):
    for column, told in enumerate(TOLD[way]):
        color = "C0" if told else "none"
        plt.barh(-row, 0.9, 0.7, column, color=color, ec="k", alpha=0.6)
plt.yticks([0, -1, -2, -3], list(TOLD))
questions = ["gradient", "name", "shapes", "code"]
plt.xticks([0.45, 1.45, 2.45, 3.45], questions)
plt.grid(visible=False)
plt.show()

# %%
# A custom operator hides its code, so it has to *say* its shapes. The other
# three do not say them: ``torch.compile`` reads their code and finds out. But
# only an operator can also be asked for its shapes outside of torch.compile,
# as we shall see.
#
# Forward: the kernel
# -------------------
#
# RMS norm divides each row by its root mean square and scales the columns:
#
# .. math:: y = \hat{x} \cdot w, \qquad \hat{x} = x \, r, \qquad
#    r = \bigl( \frac{1}{N} \sum_j x_j^2 + \epsilon \bigr)^{-1/2}
#
# The row 1, -2, 3, -4 has the mean square (1 + 4 + 9 + 16) / 4 = 7.5, so
# :math:`r` is 0.365, and with weights of 1 it becomes 0.365, -0.730, 1.095,
# -1.461. A program has one row, which fits into its registers. It is the
# simplest kernel that is fast, because this page is about what stands around
# it.


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


# %%
# Bare: a function that launches
# ------------------------------
#
# The function allocates what the kernel writes, and launches it. Three things
# about it matter for PyTorch, and we come back to each of them:
#
# - ``x.contiguous()``: the *strides* of a tensor say how far apart in memory
#   two neighbors of a column are, and two of a row. The kernel does not ask
#   for them. It expects the numbers of a row side by side, and each row where
#   the one before it ends. Such a tensor is *contiguous*, and this line makes
#   a copy of any other.
# - ``torch.empty_like(x)`` comes *after* that line. It copies the strides of
#   its argument. For an ``x`` that was transposed it would make a ``y`` that
#   is transposed, too, and our kernel writes its rows one after the other.
# - Both results are new tensors. An operator must not return one of its
#   arguments.
#
# The kernel is an argument, because one of the four ways will hand over
# another form of it.

MAX_COLUMNS = 8192  # one tile holds a row


def forward(x, w, eps, kernel=_rms_norm_fwd):
    """y, and r of each row; x may have any strides."""
    x = x.contiguous()
    w = w.contiguous()
    N = w.numel()
    M = x.numel() // N
    y = torch.empty_like(x)
    acc_dtype = torch.promote_types(x.dtype, torch.float32)
    rstd = torch.empty(M, dtype=acc_dtype, device=x.device)

    # A warp for each 4096 bytes of a row, but at least 4 and at most 16.
    num_warps = 4
    if N * x.element_size() > 16384:
        num_warps = 8
    if N * x.element_size() > 32768:
        num_warps = 16
    kernel[(M,)](
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


def bare(x, w, eps):
    """RMS norm that nobody can train with."""
    return forward(x, w, eps)[0]


x = torch.tensor([[1.0, -2, 3, -4], [2, 2, 2, 2]], device=DEVICE)
w = torch.ones(4, device=DEVICE)
print("y:", bare(x, w, 1e-6).cpu().numpy().round(3), sep="\n")
torch.testing.assert_close(bare(x, w, 1e-6), F.rms_norm(x, (4,), w, 1e-6))

# %%
# A custom operator: a name, and the shapes
# -----------------------------------------
#
# ``torch.library.custom_op`` makes an operator of a function. From the types
# that its arguments and its results are annotated with, PyTorch makes a
# *schema*, which is what it knows of a call. ``mutates_args=()`` promises that
# no argument is written. From then on, the operator is called as PyTorch's own
# are: by the *dispatcher*, which asks one after the other whether autocast,
# autograd or a compiler have something to do before the code runs.
#
# An operator's name is known in the whole process. Ours can be called from
# anywhere as ``torch.ops.both_passes.rms_norm``. So a name begins with a
# namespace that is yours: if two packages give an operator the same name, the
# second one replaces that of the first, without an error.

NAMESPACE = "both_passes"


@torch.library.custom_op(f"{NAMESPACE}::rms_norm", mutates_args=())
def rms_norm_op(
    x: torch.Tensor, w: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return forward(x, w, eps)


# %%
# A compiler that follows the model with fake tensors cannot run this. So we
# register a second function, which allocates the same results and computes
# nothing. It must say the truth, also about types and strides: ``y`` is
# contiguous, whatever ``x`` is.


@rms_norm_op.register_fake
def fake_forward(x, w, eps):
    acc_dtype = torch.promote_types(x.dtype, torch.float32)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    return y, x.new_empty(x.numel() // w.numel(), dtype=acc_dtype)


print(rms_norm_op._opoverload._schema)
y, rstd = rms_norm_op(x, w, 1e-6)
print("equal to the bare launch:", torch.equal(y, bare(x, w, 1e-6)))

# %%
# An operator that can be opened
# ------------------------------
#
# ``torch.library.triton_op`` makes the same kind of operator, and its code may
# be read. It needs no second function for the shapes, because a compiler that
# sees ``empty_like`` and a launch knows what comes out. In return there are
# two rules. Tensors meet nothing but launches and operations of PyTorch in
# this function. And each kernel is wrapped by ``torch.library.wrap_triton``,
# which turns the launch into something that a compiler can write into its
# graph.
#
# In the interpreter a kernel is a Python function, and no graph can hold that.
# So without a GPU a ``triton_op`` runs, and cannot be opened.


def wrap_triton(kernel):
    """A kernel that compilers see; in the interpreter, the kernel itself."""
    if not ON_GPU:
        return kernel
    return torch.library.wrap_triton(kernel)


@torch.library.triton_op(f"{NAMESPACE}::rms_norm_open", mutates_args=())
def rms_norm_open(
    x: torch.Tensor, w: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return forward(x, w, eps, kernel=wrap_triton(_rms_norm_fwd))


y, rstd = rms_norm_open(x, w, 1e-6)
print("equal to the bare launch:", torch.equal(y, bare(x, w, 1e-6)))

# %%
# What does a name cost?
# ----------------------
#
# The three ways so far launch the same kernel. What differs is what happens
# before it, on the host. We measure calls of 16 rows of 1024 columns. That is
# so little work that the device, the GPU, has always finished before the next
# call comes, and the clock shows the host alone.
#
# The fourth way, an autograd function, is missing here. It is there for the
# gradient, so we write it further below, and what it costs stands in the
# figure of both passes.
#
# The clock is that of `What the user waits for
# <../layer-norm/10-host-time.html>`_: all calls take turns with batches of 20,
# the fastest of 16 batches counts, and in each of 9 rounds the time is divided
# by that of PyTorch's RMS norm in the same round. A bar is the median of these
# ratios, times the median of PyTorch's own times.

# %%

# Scaffold: a clock of the host.


def in_rounds(batches):
    """Median, 20% and 80% quantiles of what some functions return.

    Each makes a batch of calls and returns a list with the µs of one. The
    first one makes calls of PyTorch's.
    """
    rounds = []
    for _ in range(9):
        turns = []
        for _ in range(16):
            turn = []
            for batch in batches:
                turn += batch()
            turns.append(turn)
        fastest = torch.tensor(turns, dtype=torch.double).min(dim=0).values
        rounds.append(fastest)
    rounds = torch.stack(rounds)
    pytorch = rounds[:, :1].clone()
    rounds[:, 1:] *= pytorch.median() / pytorch
    quantiles = rounds.quantile(rounds.new_tensor([0.5, 0.2, 0.8]), dim=0)
    return [tuple(times) for times in quantiles.T.tolist()]


def batch_of(call, repeats):
    """A function that makes a batch of calls and returns µs of one."""

    def batch():
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        torch.cuda.synchronize()
        return [1e6 * (time.perf_counter() - start) / repeats]

    return batch


def in_turns(calls, repeats=20):
    """µs of each call on the host: median, 20% and 80% quantiles.

    The first call is PyTorch's.
    """
    for call in calls.values():
        for _ in range(3):  # compiles
            call()
    batches = [batch_of(call, repeats) for call in calls.values()]
    return dict(zip(calls, in_rounds(batches), strict=True))


# %%

# Scaffold: inputs of RMS norm.


def inputs(M, N, dtype):
    """x, w and dy."""
    torch.manual_seed(0)
    x = 0.5 + torch.randn(M, N, device=DEVICE)
    w = torch.rand(N, device=DEVICE)
    dy = 0.5 + torch.randn(M, N, device=DEVICE)
    x = x.to(dtype).requires_grad_()
    w = w.to(dtype).requires_grad_()
    return x, w, dy.to(dtype)


# %%

# Scaffold: calls without a gradient, a benchmark.


def pytorch(x, w, eps):
    return F.rms_norm(x, w.shape, w, eps)


def by_custom_op(x, w, eps):
    return rms_norm_op(x, w, eps)[0]


def by_triton_op(x, w, eps):
    return rms_norm_open(x, w, eps)[0]


@functools.cache  # all calls in turns; then each line asks for its own
def times_without_gradients(M, N, dtype):
    x, w, _ = inputs(M, N, dtype)
    x = x.detach()
    w = w.detach()
    return in_turns(
        {
            "torch": lambda: pytorch(x, w, 1e-6),
            "bare": lambda: bare(x, w, 1e-6),
            "custom_op": lambda: by_custom_op(x, w, 1e-6),
            "triton_op": lambda: by_triton_op(x, w, 1e-6),
        }
    )


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=[1024],
        line_arg="provider",
        line_vals=["torch", "bare", "custom_op", "triton_op"],
        line_names=["PyTorch", "Bare launch", "custom_op", "triton_op"],
        ylabel="µs",
        plot_name="operators-host-forward",
        args={"M": 16, "dtype": torch.bfloat16, "mode": "forward"},
    )
)
def bench_names(M, N, dtype, mode, provider):
    """Calls on the host, all in turns: in each of 9 rounds the fastest of
    16 batches of 20, with L2 as they leave it. Median of PyTorch; another
    line's is that times its ratio to PyTorch in the same round, median, 20%
    and 80% quantiles."""
    if not ON_GPU:
        return 3 * [float("nan")]  # the interpreter cannot be timed
    return times_without_gradients(M, N, dtype)[provider]


# %%

names = bench_names.run(return_df=True)
plt.close()  # one size makes no lines: we draw bars instead

# %%

# Drawing: what a call without a gradient takes on the host.

plt.figure("What a call without a gradient takes on the host", (7.5, 2.4))
labels = [name.split(" (")[0] for name in names.columns[1:]]
plt.barh(labels[::-1], names.iloc[0, 1:].astype(float)[::-1])
plt.xlabel("µs")
plt.show()

# %%
# **What the figure shows.**
# On the H200 PyTorch's RMS norm takes 10.8 µs, and our bare launch takes 22.8
# µs. As a custom operator the same launch takes 40.7 µs, and as a
# ``triton_op`` it takes 45.6 µs. So a name costs 17.8 µs and 22.8 µs a call.
#
# **Why.**
# PyTorch's norm is C++ from the call to the launch. Our bare launch allocates
# two tensors and calls Triton's launcher, both from Python. An operator goes
# through the dispatcher as well, and from there back into Python to run our
# function: the arguments are packed and unpacked on the way, and PyTorch
# makes sure that what we return is no argument of ours. A ``triton_op`` does a
# little more in Python at each call: it notes that no compiler is looking, and
# ``wrap_triton`` asks for that note. We have not measured these steps one by
# one.
#
# **What follows.**
# A name is paid for at each call, whatever the call has to do. With a matrix
# as small as this one, that is what you wait for. It is hidden only where the
# device needs longer than the host, and the figure of both passes below shows
# how much work that takes.
#
# How fast is the kernel?
# -----------------------
#
# The device takes the same time whichever way we call it, so there is one line
# for all four. The ceiling is a copy, which reads one matrix and writes one.

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

# Scaffold: speeds of a pass, and a benchmark of the forward pass.

WIDTHS = [1024, 4096, 8192]


@functools.cache
def compiled_pytorch():
    # We run a backward pass many times, so torch.compile must not reuse the
    # memory of what the forward pass saved for it.
    torch._functorch.config.donated_buffer = False
    torch._dynamo.reset()
    return torch.compile(pytorch, dynamic=False)


def speed_of(norm, M, N, dtype, mode):
    """GB/s of a forward or a backward pass: median, low, high."""

    def prepare():
        x, w, dy = inputs(M, N, dtype)
        if mode == "forward":
            return lambda: norm(x, w, 1e-6)
        y = norm(x, w, 1e-6)

        def run():
            return torch.autograd.grad(y, (x, w), dy, retain_graph=True)

        return run

    # Forward x is read and y is written; backward dy is read as well.
    matrices = 2 if mode == "forward" else 3
    return speed(matrices * M * N * dtype.itemsize, prepare)


def benchmark_of(mode, name):
    return triton.testing.Benchmark(
        x_names=["N"],
        x_vals=WIDTHS,
        line_arg="provider",
        line_vals=["triton", "torch", "torch.compile", "copy"],
        line_names=["Triton", "PyTorch", "torch.compile", "Copy"],
        ylabel="GB/s",
        plot_name=name,
        args={"M": 4096, "dtype": torch.bfloat16, "mode": mode},
    )


@triton.testing.perf_report(benchmark_of("forward", "rms-norm-forward"))
def bench_forward(M, N, dtype, mode, provider):
    """Device time: a CUDA graph of several calls, each with inputs of its own
    and after L2 was overwritten, less the graph without the calls; median, 20%
    and 80% quantiles. Copy: the best of six tiles. torch.compile: compiled
    once."""
    if not ON_GPU:
        return 3 * [float("nan")]
    if provider == "copy":
        return ceiling(reads=1, writes=1, shape=(M, N), dtype=dtype)
    norms = {"triton": bare, "torch": pytorch}
    if provider == "torch.compile":
        norms[provider] = compiled_pytorch()
    return speed_of(norms[provider], M, N, dtype, mode)


# %%

report(bench_forward)

# %%
# **What the figure shows.**
# On the H200, at 1024, 4096 and 8192 columns, our kernel reaches 82%, 94% and
# 94% of the copy. PyTorch reaches 67%, 76% and 62%. ``torch.compile``, which
# writes a Triton kernel of its own from PyTorch's norm, reaches 86%, 87% and
# 99%.
#
# **Why.**
# Each byte of ``x`` is read once and each byte of ``y`` is written once, which
# is all that has to move, so a kernel can come close to the copy. Ours falls
# back at 1024 columns. A row has 2048 bytes there, and each of the 128 threads
# of a program loads 16 of them, once. Then the program waits, stores and ends,
# and another one has to be started for the next row. At 4096 columns a thread
# loads 64 bytes before it waits. What the compiler does better at 1024 and at
# 8192 columns we have not looked into.
#
# **What follows.**
# For RMS norm alone, forward, a kernel of your own does not pay on the H200:
# torch.compile is ahead at 1024 and at 8192 columns, and only at 4096 columns
# are we. Keep that in mind for the rest of this page. It asks what a kernel
# needs, so that PyTorch can use it, and not whether a norm needs a kernel.
#
# Backward: the formulas
# ----------------------
#
# .. math:: dx = (w \, dy - \hat{x} \, c) \, r, \qquad
#    c = \frac{1}{N} \sum_j \hat{x}_j \, w_j \, dy_j, \qquad
#    dw_j = \sum_\text{rows} \hat{x}_j \, dy_j
#
# The page about `RMS norm <../norms-and-losses/01-rms-norm.html>`_ says where
# the part with :math:`c` comes from. Autograd agrees, at toy size:

x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
w = torch.rand(4, dtype=torch.float64, requires_grad=True)
dy = torch.randn(3, 4, dtype=torch.float64)

r = (x.square().mean(1, keepdim=True) + 1e-6) ** -0.5
x_hat = x * r
dx, dw = torch.autograd.grad(x_hat * w, (x, w), dy)

c = (x_hat * w * dy).mean(1, keepdim=True)
assert torch.allclose(dx, (w * dy - x_hat * c) * r)
assert torch.allclose(dw, (x_hat * dy).sum(0))

# %%
# Backward: the kernel
# --------------------
#
# A program takes row after row and keeps its sum for ``dw`` in registers. At
# the end it stores the sum in a row of a buffer of its own. A second kernel
# could add up the buffers, as on other pages. Here ``torch.sum`` does, and
# that is on purpose: most functions have some operations of PyTorch beside
# their kernels, and we want to see what becomes of those.


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
# How many programs share a streaming multiprocessor (SM), and how many warps
# has each of them? A program keeps its row of ``x`` and ``dy``, the weights
# and its sums in registers, and it waits: for the row from memory, and in the
# one sum, where its warps wait for each other. Other programs of the same SM
# work in the meantime.
#
# So narrow rows get many small programs: an SM has eight rows of 1024 columns
# at a time, or six of 2048. Of wide rows fewer fit, two of 4096 columns or one
# of 8192. These get 16 warps, so that a thread has 8 or 16 columns of the row
# and its registers suffice.
#
# The numbers come from an H100, where we tried 14 to 20 pairs at each width in
# turns. These were the fastest ones that spill nothing: all that a thread
# needs is in its registers. At 4096 columns, three programs of 2 warps were a
# little faster still, but a thread of theirs needs more registers than it can
# have, so they spill. We have not tried the pairs again on an H200.

GPU = torch.cuda.get_device_properties(DEVICE) if ON_GPU else None
NUM_SMS = GPU.multi_processor_count if ON_GPU else 132


def plan_backward(N):
    """How many programs share an SM, and how many warps each of them has."""
    if N <= 1024:
        return 8, 4
    if N <= 2048:
        return 6, 2
    if N <= 4096:
        return 2, 16
    return 1, 16


def backward(dy, x, w, rstd, kernel=_rms_norm_bwd):
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
    kernel[(programs,)](
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


# %%
# An autograd function: the gradient
# ----------------------------------
#
# ``torch.autograd.Function`` is the oldest way, and the one that most kernels
# are published with. It says which function the backward pass calls, and
# nothing else. What the backward pass needs is kept by ``save_for_backward``.
# ``once_differentiable`` says that our ``backward`` must not be differentiated
# again: autograd cannot see into a kernel, and would take the gradient for a
# constant. (Inside the class, ``forward`` and ``backward`` call our functions
# of these names, from above.)


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


def by_function(x, w, eps):
    return RmsNorm.apply(x, w, eps)


# %%
# Gradients of operators
# ----------------------
#
# An operator gets its gradient by ``register_autograd``, which is given the
# function that computes it. ``torch.compile`` follows that function with fake
# tensors, as it follows a model, so what it calls must be known to the
# compiler as well: the backward pass becomes an operator, too.


@torch.library.custom_op(f"{NAMESPACE}::rms_norm_bwd", mutates_args=())
def rms_norm_bwd_op(
    dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor, rstd: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return backward(dy, x, w, rstd)


@rms_norm_bwd_op.register_fake
def fake_backward(dy, x, w, rstd):
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    dw = torch.empty_like(w, memory_format=torch.contiguous_format)
    return dx, dw


@torch.library.triton_op(f"{NAMESPACE}::rms_norm_bwd_open", mutates_args=())
def rms_norm_bwd_open(
    dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor, rstd: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return backward(dy, x, w, rstd, kernel=wrap_triton(_rms_norm_bwd))


# %%
# ``keep`` is called after the forward pass and saves what the backward pass
# needs. Our operators have two results, so two gradients arrive. Nobody
# differentiates ``rstd``: ``mark_non_differentiable`` says so, and we ignore
# the second gradient. The last function, ``told_once``, is the gradient of the
# backward pass, which we do not have: it raises an error.


def keep(ctx, inputs, output):
    x, w, _ = inputs
    _, rstd = output
    ctx.save_for_backward(x, w, rstd)
    ctx.mark_non_differentiable(rstd)


def gradients_of_op(ctx, dy, _):
    dx, dw = rms_norm_bwd_op(dy, *ctx.saved_tensors)
    return dx, dw, None


def gradients_of_open(ctx, dy, _):
    dx, dw = rms_norm_bwd_open(dy, *ctx.saved_tensors)
    return dx, dw, None


def told_once(*arguments):
    """Registered as the gradient of a backward pass."""
    raise RuntimeError("rms_norm has no second derivative")


# Each line registers a gradient; what it returns is of no use. In a file of
# your own these are four plain lines. Here they are in a constant, because the
# processes that we start below import definitions and constants of this page,
# and no other lines.
FORMULAS = (
    rms_norm_op.register_autograd(gradients_of_op, setup_context=keep),
    rms_norm_open.register_autograd(gradients_of_open, setup_context=keep),
    rms_norm_bwd_op.register_autograd(told_once),
    rms_norm_bwd_open.register_autograd(told_once),
)

# The ways that can train. Each is a function of x, w and eps, and returns y
# alone.
WAYS = {
    "function": by_function,
    "custom_op": by_custom_op,
    "triton_op": by_triton_op,
}

# %%
# Is it right?
# ------------
#
# The function that users call takes the arguments of PyTorch's function, and
# checks them before any kernel sees them. The last argument, ``way``, is our
# own addition.

# %%

# Scaffold: which arguments are taken.


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


# %%


def rms_norm(x, normalized_shape, weight=None, eps=None, way="custom_op"):
    """x over its root mean square over the last dimensions, times weight.

    The arguments are those of PyTorch's function, and way: one of WAYS.
    """
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
    norm = WAYS[way]
    return norm(x, weight, eps)


# %%

# Scaffold: a check of y, dx and dw against float64.


def in_float64(tensor):
    """The same numbers in float64, as a new input for autograd."""
    return tensor.detach().double().requires_grad_()


def compare(found, exact, dtype):
    """Compare each element of some results with those in float64."""
    for name in found:
        error = (found[name] - exact[name]).abs()
        rounding = exact[name].abs() * torch.finfo(dtype).eps / 2
        typical_size = exact[name].square().mean().sqrt()
        sums = 64 * torch.finfo(torch.float32).eps * typical_size
        worst = (error / (rounding + sums)).max().item()
        assert worst <= 1, f"{name}: {worst:.1f} times the allowed error"


def both_passes(norm, x, w, dy):
    """y, dx and dw by name."""
    y = norm(x, w, 1e-6)
    dx, dw = torch.autograd.grad(y, (x, w), dy)
    return {"y": y, "dx": dx, "dw": dw}


def check(norm, M, N, dtype):
    """Compare each element of y, dx and dw with PyTorch's in float64."""
    x, w, dy = inputs(M, N, dtype)
    found = both_passes(norm, x, w, dy)
    exact = both_passes(pytorch, in_float64(x), in_float64(w), dy.double())
    compare(found, exact, dtype)


# %%

shape = (9, 200)  # small, because the interpreter is slow
if ON_GPU:
    shape = (1151, 8192)
for way, norm in WAYS.items():
    check(norm, *shape, torch.float16)
    check(norm, *shape, torch.float32)
    print(f"{way}: each element of y, dx and dw is right")

# %%
# How fast is the backward pass?
# ------------------------------
#
# ``x`` and ``dy`` are read and ``dx`` is written, so the ceiling reads two
# matrices and writes one.

# %%

# Scaffold: a benchmark of the backward pass.


@triton.testing.perf_report(benchmark_of("backward", "rms-norm-backward"))
def bench_backward(M, N, dtype, mode, provider):
    """Device time: a CUDA graph of several calls, each with inputs of its own
    and after L2 was overwritten, less the graph without the calls; median, 20%
    and 80% quantiles. Copy: the best of six tiles. torch.compile: compiled
    once."""
    if not ON_GPU:
        return 3 * [float("nan")]
    if provider == "copy":
        return ceiling(reads=2, writes=1, shape=(M, N), dtype=dtype)
    norms = {"triton": by_function, "torch": pytorch}
    if provider == "torch.compile":
        norms[provider] = compiled_pytorch()
    return speed_of(norms[provider], M, N, dtype, mode)


# %%

report(bench_backward)

# %%
# **What the figure shows.**
# On the H200, at 1024, 4096 and 8192 columns, our backward pass reaches 40%,
# 62% and 66% of the copy. PyTorch reaches 33%, 40% and 36%, and torch.compile
# 42%, 49% and 49%. So torch.compile is ahead at 1024 columns, and from 4096
# columns on we are 1.28 and 1.36 times as fast.
#
# **Why.**
# A program requests a row, waits for it, computes, and only then requests the
# next one. `Loads in flight <../layer-norm/04-loads-in-flight.html>`_ and the
# pages after it mend that. On top of it come the sums for ``dw``. Our kernel
# writes 4.3 MB of them at each of the three widths, and another kernel reads
# them. Beside the 25 MB of ``x``, ``dy`` and ``dx`` at 1024 columns, writing
# and reading them is a third more, and beside the 201 MB at 8192 columns less
# than a twentieth.
#
# **What follows.**
# The backward pass of wide rows is where this kernel is worth having. It could
# be faster still, but here that does not matter: a faster kernel would be
# handed over in the same four ways.
#
# What does a gradient cost on the host?
# --------------------------------------
#
# Now both passes, called from Python, for 4096 rows. The dotted line is the
# same work as a CUDA graph: a graph is launched as a whole and without Python,
# so that is the time of the kernels alone.

# %%

# Scaffold: both passes on the host, a benchmark.


def both_passes_of(norm, M, N, dtype):
    """Both passes as a call without arguments."""
    x, w, dy = inputs(M, N, dtype)

    def call():
        return torch.autograd.grad(norm(x, w, 1e-6), (x, w), dy)

    return call


def as_graph(call):
    """A call that replays what this one launches."""
    for _ in range(3):
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        results = call()

    def replay():
        graph.replay()
        # A graph knows addresses, and keeps nothing alive: neither what the
        # call reads nor what it returns.
        return call, results

    return replay


@functools.cache
def times_of_both_passes(M, N, dtype):
    calls = {"torch": both_passes_of(pytorch, M, N, dtype)}
    for way, norm in WAYS.items():
        calls[way] = both_passes_of(norm, M, N, dtype)
    calls["CUDA graph"] = as_graph(both_passes_of(by_function, M, N, dtype))
    return in_turns(calls, repeats=10)


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=WIDTHS,
        line_arg="provider",
        line_vals=["torch", *WAYS, "CUDA graph"],
        line_names=[
            "PyTorch",
            "autograd.Function",
            "custom_op",
            "triton_op",
            "CUDA graph",
        ],
        ylabel="µs",
        plot_name="operators-host",
        args={
            "M": 4096,
            "dtype": torch.bfloat16,
            "mode": "forward and backward",
        },
    )
)
def bench_gradients(M, N, dtype, mode, provider):
    """Calls on the host until the device is done, all in turns: in each of 9
    rounds the fastest of 16 batches of 10, with L2 as they leave it. Median of
    PyTorch; another line's is that times its ratio to PyTorch in the same
    round, median, 20% and 80% quantiles."""
    if not ON_GPU:
        return 3 * [float("nan")]
    return times_of_both_passes(M, N, dtype)[provider]


def report_host_times(benchmark):
    """Draw a benchmark, and print each time divided by PyTorch's."""
    table = benchmark.run(show_plots=ON_GPU, return_df=True)
    table = table.set_index(table.columns[0])
    table.index = table.index.astype(int)
    table.columns = [column.split(" (")[0] for column in table.columns]
    if table.isna().all(axis=None):
        print("Timing needs a GPU; the page shows recorded figures.")
        return
    print("time divided by that of PyTorch")
    print(table.div(table["PyTorch"], axis="index").T.round(2).to_string())


# %%

report_host_times(bench_gradients)

# %%
# **What the figure shows.**
# On the H200, at 1024 columns, PyTorch takes 101 µs for both passes. The
# autograd function takes 218 µs, the custom operator 302 µs, and ``triton_op``
# 309 µs. The kernels alone, in the graph, take 23.4 µs. At 8192 columns
# PyTorch takes 200 µs, our three ways take 238, 307 and 312 µs, and the graph
# takes 112 µs.
#
# **Why.**
# In each pass an operator goes through the dispatcher, and through Python
# functions that PyTorch has written around ours: one of them saves what the
# backward pass needs, and another one calls it. An autograd function has the
# same two steps, and less around them.
#
# At 8192 columns PyTorch waits for the device: by the two figures of speed
# above, its kernels take 189 of the 200 µs. Ours are done after little more
# than half of that time. But the calls are not: we still wait for the host.
#
# **What follows.**
# Called from Python our norm is slower than PyTorch's at all three widths,
# although its kernels are faster. A faster kernel makes a call shorter only
# where the device needs longer than the host. With an autograd function and
# 8192 columns that begins between 8000 and 9000 rows, where the kernels would
# take about twice the 112 µs of 4096 rows. PyTorch's kernels are slower, and
# its calls wait for them with 4096 rows already. So if both times grow with
# the rows, its call takes longer than the 238 µs of ours from about 5000 rows
# on. With less work to do, record a CUDA graph, which takes Python out of the
# call.
#
# An autograd function is the cheapest of the three ways. Whoever pays more for
# an operator gets something in return, and the rest of this page is about what
# that is.
#
# What does torch.compile see?
# ----------------------------
#
# ``torch.compile`` reads a function once, with fake tensors, and writes down a
# *graph* of what it does. Where it meets something that it cannot write down,
# there is a *graph break*: the graph ends, Python runs what could not be read,
# and a second graph begins behind it. Nothing is fused across a break.
#
# What can be fused with a norm? Let us put an addition before it and an
# activation after it, as they may stand in a model:


def block(norm, x, residual, w):
    """Add, normalize, and apply SiLU, which is y * sigmoid(y)."""
    return F.silu(norm(x + residual, w, 1e-6))


# %%
# What is in the graph of this block? A *backend* of torch.compile is a
# function that is given the graph, and usually writes faster code for it. Ours
# notes which operations are in the graph, and lets them run as they are.

# %%

# Scaffold: what stands in the graph of the forward pass.

from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters

# What computes nothing is not printed.
QUIET = "getitem", "detach", "alias"


def graph_of(norm):
    """The operations in the graph of a block, forward."""
    graphs = []

    def look(graph, inputs):
        names = []
        for node in graph.graph.nodes:
            name = getattr(node.target, "__name__", str(node.target))
            name = name.partition(".")[0]
            if node.op == "call_function" and name not in QUIET:
                names.append(name)
        graphs.append(names)
        return make_boxed_func(graph.forward)

    def function(x, residual, w):
        return block(norm, x, residual, w)

    torch._dynamo.reset()
    x, w, dy = inputs(4, 16, torch.float32)
    backend = aot_autograd(fw_compiler=look, bw_compiler=look)
    y = torch.compile(function, backend=backend, fullgraph=True)(x, x, w)
    if y.requires_grad:
        torch.autograd.grad(y, (x, w), dy)
    return graphs[0]


def in_small_steps(x, w, eps):
    """The formula, as PyTorch's operations."""
    mean_square = x.square().mean(dim=-1, keepdim=True)
    return x * torch.rsqrt(mean_square + eps) * w


# The interpreter's kernels are Python functions that no compiler can read.
SEEN = {"small steps": in_small_steps, "custom_op": by_custom_op}
if ON_GPU:
    SEEN |= {"bare launch": bare, **WAYS}

for way, norm in SEEN.items():
    print(f"{way}:", ", ".join(graph_of(norm)))

# %%
# Of a norm that is written in small steps the graph has these steps: a square,
# a mean, a root and products. The compiler can put all of them, with the
# addition and SiLU, into one kernel. It takes PyTorch's own RMS norm apart in
# the same way.
#
# Of the custom operator it has one word, its name. What comes before the
# operator has to be written to memory before it starts, and what comes after
# has to be read again.
#
# On a GPU there are three more lines. In all three, what stands in the place
# of our operation is ``empty_like``, ``empty`` and
# ``triton_kernel_wrapper_functional``. That last one is our launch: PyTorch
# has read what Triton makes of the kernel, to find out which of its arguments
# it writes. So the compiler sees the same for a bare launch, for an autograd
# function and for ``triton_op``.
#
# Does it fuse then? Not with what is inside a kernel. A kernel is called as it
# is written, so the addition before it and SiLU after it stay kernels of their
# own. (PyTorch 2.13 can put what comes after into the kernel's store, but only
# if it is asked to: ``epilogue_fusion_user_defined_triton_kernel`` is off.)
# What it can change is what happens *around* a launch: it allocates the
# results together with others, calls the kernel by a launcher of its own in
# place of Triton's, and fuses what PyTorch does between our kernels, such as
# the sum over the buffers and its rounding.
#
# Where does the graph break?
# ---------------------------
#
# ``fullgraph=True`` above turns each graph break into an error, and there was
# none. What would break the graph? An ``if`` that looks at numbers, such as a
# test for infinity: a fake tensor has no numbers. And what becomes of a look
# at an address? `What the user waits for <../layer-norm/10-host-time.html>`_
# has a function that saves time by looking at addresses.


def look_at_numbers(x, w, eps):
    """Like by_custom_op, with a test of its argument before."""
    if not x.isfinite().all():
        raise ValueError("x is not finite")
    return by_custom_op(x, w, eps)


def look_at_an_address(x, w, eps):
    """Like by_custom_op, with a look at the address before."""
    if x.data_ptr() % 16:
        x = x.clone()
    return by_custom_op(x, w, eps)


# %%

# Scaffold: the graph breaks of a block.


def run_compiled(norm, fullgraph):
    """Both passes of a compiled block."""

    def function(x, residual, w):
        return block(norm, x, residual, w)

    torch._dynamo.reset()
    x, w, dy = inputs(4, 16, torch.float32)
    compiled = torch.compile(
        function, backend="aot_eager", fullgraph=fullgraph
    )
    y = compiled(x, x, w)
    if y.requires_grad:
        torch.autograd.grad(y, (x, w), dy)


def graph_breaks(norm):
    """How many graph breaks a block has."""
    counters.clear()
    run_compiled(norm, fullgraph=False)
    return sum(counters["graph_break"].values())


def is_one_graph(norm):
    """Whether torch.compile takes the block whole."""
    try:
        run_compiled(norm, fullgraph=True)
    except torch._dynamo.exc.TorchDynamoException:
        return False
    return True


# %%

looking = {"numbers": look_at_numbers, "an address": look_at_an_address}
for way, norm in (SEEN | looking).items():
    breaks = graph_breaks(norm)
    print(f"{way}: graph breaks: {breaks}, whole: {is_one_graph(norm)}")

# %%
# Each of our ways is one graph without a break. On a GPU the bare launch and
# the two other ways have lines of their own, and on the H200 these say the
# same. The look at numbers breaks the graph: the addition before the norm is
# in one graph, and SiLU after it is in another one. That is a single place in
# the code, and the count is two, because two functions are cut in their
# middle: ``block``, and the function that calls it. (``look_at_numbers`` is
# cut as well, at its ``if``, and that does not count.)
#
# What the look at an address costs depends on the version of PyTorch. On the
# H200, with 2.11, it breaks the graph in the same way. 2.13 gives up the whole
# function that looks, runs it line by line, and counts no break. So do not
# trust the count alone: write ``fullgraph=True``, and both versions will tell
# you.
#
# How many kernels are left?
# --------------------------
#
# PyTorch's profiler lists what runs on the device. So we count the kernels in
# both passes of the block, once compiled, and once *as it is*: called from
# Python, line by line.

# %%

# Scaffold: kernels in both passes of a block, a benchmark.

BLOCKS = {
    "torch": "PyTorch",
    "function": "autograd.Function",
    "custom_op": "custom_op",
    "triton_op": "triton_op",
}


def block_of(norm, compiled):
    """The block with a norm, as a function of x, residual and w."""

    def function(x, residual, w):
        return block(norm, x, residual, w)

    if not compiled:
        return function
    # torch.compile keeps eight forms of a code. Of the ninth it warns, and
    # runs it as it is: so each block is compiled from a copy of its own.
    copy = types.FunctionType(
        function.__code__.replace(),
        function.__globals__,
        closure=function.__closure__,
    )
    return torch.compile(copy, dynamic=False)


@functools.cache
def call_of_block(way, compiled, M, N, dtype):
    """Both passes of a block as a call without arguments."""
    norm = (WAYS | {"torch": pytorch})[way]
    function = block_of(norm, compiled)
    x, w, dy = inputs(M, N, dtype)
    residual = torch.randn_like(x).requires_grad_()

    def call():
        y = function(x, residual, w)
        return torch.autograd.grad(y, (x, residual, w), dy)

    for _ in range(3):
        call()  # compiles
    return call


def count_kernels(call):
    """How many kernels a call runs on the device."""
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        call()
        torch.cuda.synchronize()
    on_device = torch.autograd.DeviceType.CUDA
    kernels = [e.name for e in profile.events() if e.device_type == on_device]
    return sum(not name.startswith("Mem") for name in kernels)


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["way"],
        x_vals=list(BLOCKS),
        line_arg="provider",
        line_vals=["as it is", "compiled"],
        line_names=["As it is", "Compiled"],
        ylabel="kernels",
        plot_name="operators-kernels",
        args={
            "M": 16,
            "N": 1024,
            "dtype": torch.bfloat16,
            "mode": "forward and backward",
        },
    )
)
def bench_kernels(way, M, N, dtype, mode, provider):
    """Kernels that the profiler of PyTorch sees on the device in one call of
    both passes, copies and fills not counted."""
    if not ON_GPU:
        return 3 * [float("nan")]
    call = call_of_block(way, provider == "compiled", M, N, dtype)
    return 3 * [float(count_kernels(call))]


def report_kernels(benchmark):
    """Draw a benchmark, and print its numbers."""
    table = benchmark.run(show_plots=ON_GPU, return_df=True)
    if table.isna().any(axis=None):
        print("Kernels can be counted on a GPU; the page shows those of one.")
        return
    print(table.to_string(index=False))


# %%

report_kernels(bench_kernels)

# %%
# **What the figure shows.**
# On the H200 both passes of the block take 6 kernels with PyTorch's norm and
# 3 when they are compiled. With the autograd function they take 7 and 6,
# with the custom operator 8 and 7, and with ``triton_op`` 8 and 6.
#
# **Why.**
# PyTorch's norm dissolves into what stands around it: one kernel is left in
# the forward pass and two in the backward pass. Ours stays what it is. With
# the autograd function the seven kernels are the addition, our norm and SiLU
# forward, and backward those of SiLU, of our norm, of the sum over the buffers
# and of the rounding of that sum. The compiler puts the last two into one.
#
# As it is, an operator runs an eighth. It has two results, so two gradients
# have to arrive, and for that of ``rstd``, which nobody uses, autograd makes a
# tensor of zeros, by a kernel that counts like any other.
# (``ctx.set_materialize_grads(False)`` in ``keep`` would send ``None`` in its
# place.) The compiler sees that nobody reads the zeros, and leaves them out.
# The sum and its rounding stay two kernels in a custom operator, because the
# compiler cannot see them.
#
# **What follows.**
# A kernel of your own ends the fusion at its two sides. It has to be worth
# that. If it is to include what stands beside it, you write that into the
# kernel, as on `RMS normalization and the residual stream
# <../norms-and-losses/01-rms-norm.html>`_.
#
# What does a compiled call cost?
# -------------------------------
#
# First on the host, with 16 rows of 1024 columns, and without a gradient, so
# that the bare launch can take part. All blocks are compiled, and the first
# bar is PyTorch's block as it is.

# %%

# Scaffold: compiled blocks without a gradient, a benchmark.

WITHOUT_GRADIENT = {
    "as it is": "PyTorch, not compiled",
    "torch": "PyTorch, compiled",
    "bare": "Bare launch, compiled",
    "custom_op": "custom_op, compiled",
    "triton_op": "triton_op, compiled",
}


@functools.cache
def times_of_forward_blocks(M, N, dtype):
    norms = {"torch": pytorch, "bare": bare}
    norms |= {"custom_op": by_custom_op, "triton_op": by_triton_op}
    x, w, _ = inputs(M, N, dtype)
    given = x.detach(), torch.randn_like(x), w.detach()
    calls = {"as it is": functools.partial(block, pytorch, *given)}
    for line, norm in norms.items():
        compiled = block_of(norm, compiled=True)
        calls[line] = functools.partial(compiled, *given)
    return in_turns(calls)


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=[1024],
        line_arg="provider",
        line_vals=list(WITHOUT_GRADIENT),
        line_names=list(WITHOUT_GRADIENT.values()),
        ylabel="µs",
        plot_name="operators-compiled-forward",
        args={"M": 16, "dtype": torch.bfloat16, "mode": "forward"},
    )
)
def bench_compiled_forward(M, N, dtype, mode, provider):
    """Calls on the host, all in turns: in each of 9 rounds the fastest of
    16 batches of 20, with L2 as they leave it. Median of PyTorch, not
    compiled; another line's is that times its ratio to PyTorch in the same
    round, median, 20% and 80% quantiles."""
    if not ON_GPU:
        return 3 * [float("nan")]
    return times_of_forward_blocks(M, N, dtype)[provider]


def bars_of(benchmark):
    """The names and the times of a benchmark with one size."""
    table = benchmark.run(return_df=True)
    plt.close()
    names = [name.split(" (")[0] for name in table.columns[1:]]
    return names[::-1], table.iloc[0, 1:].astype(float)[::-1]


# %%

without_gradient = bars_of(bench_compiled_forward)

# %%

# Drawing: a compiled block without a gradient, on the host.

plt.figure("A compiled block without a gradient on the host", (7.5, 2.6))
plt.barh(*without_gradient)
plt.xlabel("µs")
plt.show()

# %%
# **What the figure shows.**
# On the H200 the block takes 36.5 µs with PyTorch as it is, and 44.9 µs when
# it is compiled. Compiled with our bare launch it takes 78.0 µs, with the
# custom operator 137 µs, and with ``triton_op`` 75.7 µs.
#
# What would the block take with our ways as it is? We have not measured that,
# but we can estimate it. We take the time of PyTorch's block, and put the time
# of a norm of ours, from the first figure of this page, in the place of that
# of PyTorch's. Then it would take 48.5 µs with the bare launch, 66.4 µs with
# the custom operator, and 71.3 µs with ``triton_op``.
#
# **Why.**
# A compiled function is still called from Python. At each call it first tests
# whether it still fits, which is called its *guards*: types, shapes and
# strides of the arguments, and which functions it was compiled from. Then
# Python code that the compiler has written allocates tensors and launches
# kernels. For a block as small as this one, that takes longer than three calls
# of PyTorch. With our kernels there are three launches in place of one, and
# results to allocate for each of them.
#
# A custom operator is called from the compiled code as it is called from
# Python: through the dispatcher and back. Of the other two the compiler has
# seen the launch, and its own code launches the kernel, which is why
# ``triton_op`` is now as cheap as the bare launch. But that does not explain
# all of it: the custom operator takes 59 µs more than the bare launch here,
# and called from Python its name cost 17.8 µs. We come back to that with the
# next figure.
#
# **What follows.**
# If the estimates hold, each of the blocks takes longer on the host when it is
# compiled, PyTorch's too. The one with ``triton_op`` loses least, because the
# compiler saves it the way through the dispatcher. The one with the custom
# operator keeps that way, and takes about twice as long as before.
#
# And mind the bare launch: it has no gradient here, either. What comes out of
# its compiled block does not require one, and there is no error.
#
# Now both passes, with the three ways that can train:

# %%

# Scaffold: compiled blocks on the host and on the device, two benchmarks.

COMPILED = ["as it is", *BLOCKS]
COMPILED_NAMES = [
    "PyTorch, not compiled",
    *(f"{name}, compiled" for name in BLOCKS.values()),
]


def call_of_line(line, M, N, dtype):
    """Both passes of a block that a bar stands for."""
    if line == "as it is":
        return call_of_block("torch", False, M, N, dtype)
    return call_of_block(line, True, M, N, dtype)


@functools.cache
def times_of_blocks(M, N, dtype):
    return in_turns(
        {line: call_of_line(line, M, N, dtype) for line in COMPILED}
    )


def benchmark_of_blocks(name, M, N):
    return triton.testing.Benchmark(
        x_names=["N"],
        x_vals=[N],
        line_arg="provider",
        line_vals=COMPILED,
        line_names=COMPILED_NAMES,
        ylabel="µs",
        plot_name=name,
        args={
            "M": M,
            "dtype": torch.bfloat16,
            "mode": "forward and backward",
        },
    )


@triton.testing.perf_report(
    benchmark_of_blocks("operators-compiled-host", M=16, N=1024)
)
def bench_compiled_host(M, N, dtype, mode, provider):
    """Calls on the host, all in turns: in each of 9 rounds the fastest of
    16 batches of 20, with L2 as they leave it. Median of PyTorch, not
    compiled; another line's is that times its ratio to PyTorch in the same
    round, median, 20% and 80% quantiles."""
    if not ON_GPU:
        return 3 * [float("nan")]
    return times_of_blocks(M, N, dtype)[provider]


@triton.testing.perf_report(
    benchmark_of_blocks("operators-compiled-device", M=4096, N=4096)
)
def bench_compiled_device(M, N, dtype, mode, provider):
    """Device time: a CUDA graph of several calls of both passes, each after
    L2 was overwritten, less the graph without the calls; median, 20% and 80%
    quantiles. torch.compile: compiled once."""
    if not ON_GPU:
        return 3 * [float("nan")]
    return device_time(lambda: call_of_line(provider, M, N, dtype))


# %%

on_the_host = bars_of(bench_compiled_host)
on_the_device = bars_of(bench_compiled_device)

# %%

# Drawing: both passes of a compiled block, on the host.

plt.figure("Both passes of a compiled block on the host", (7.5, 2.6))
plt.barh(*on_the_host)
plt.xlabel("µs")
plt.show()

# %%
# **What the figure shows.**
# On the H200 the block takes 152 µs with PyTorch as it is, and 269 µs when it
# is compiled. Compiled with the autograd function it takes 331 µs, with the
# custom operator 774 µs, and with ``triton_op`` 366 µs.
#
# **Why.**
# The backward pass has the same costs as the forward pass, and one more:
# autograd calls the compiled backward pass, and hands it what the forward pass
# has saved. Even PyTorch's block takes 117 µs more than as it is. The autograd
# function and ``triton_op`` are compiled to the same launches. With the custom
# operator, the backward pass calls one more operator by its name.
#
# That does not explain all of the 774 µs. They are 0.41 ms more than with
# ``triton_op``, for two calls of an operator. Called from Python, in the
# figure of both passes above, the same two calls cost 83.9 µs more than the
# autograd function. Python's profiler shows no place where the rest is spent.
# In a second run, apart from this recording, the custom operator was the
# slowest again. But there it also cost more in a block that was not compiled.
# So what an operator costs is not the same in each process, and we have no
# cause to offer.
#
# **What follows.**
# Do not compile to save time on the host: PyTorch's block and the one with the
# custom operator get slower. What the compiler saves is on the device, and
# comes below.
#
# If you compile, the order of the ways changes. A custom operator, which costs
# as much as ``triton_op`` when Python calls it, takes about twice as long in
# compiled code. So let the compiler open your operator if it can.
#
# Where shapes and addresses stay the same, a CUDA graph of a whole step leaves
# nothing but the time of the device. ``mode="reduce-overhead"`` makes
# torch.compile record graphs by itself. We have not measured it here. On `What
# the user waits for <../layer-norm/10-host-time.html>`_ it saved nothing for a
# single layer norm, because at each call Python looks for the right graph, and
# copies inputs to where it was recorded.
#
# So now the device alone, with 4096 rows of 4096 columns, by a CUDA graph that
# we record ourselves:

# %%

# Drawing: both passes of a compiled block, on the device.

plt.figure("Both passes of a compiled block on the device", (7.5, 2.6))
plt.barh(*on_the_device)
plt.xlabel("µs")
plt.show()

# %%
# **What the figure shows.**
# On the H200 the block takes 155 µs with PyTorch as it is, and 113 µs when it
# is compiled. With the autograd function it takes 124 µs, with the custom
# operator 127 µs, and with ``triton_op`` 122 µs.
#
# **Why.**
# At this width both of our kernels are faster than those that torch.compile
# writes for a norm alone. Still its block is faster than ours. Count the
# matrices of 4096 × 4096 numbers that move. With our norm the addition reads
# two and writes one, the norm reads one and writes one, and so does SiLU: 7
# forward. Backward SiLU reads two and writes one, and so does the norm: 13 in
# all, 436 MB. The compiled block of PyTorch needs no more than 3 forward and 4
# backward: it reads ``x`` and the residual and writes ``y``, and later reads
# both again with the gradient and writes another one.
#
# So ours move nearly twice as much, and almost at the speed of a copy: 436 MB
# in 122.5 µs are 3.56 TB/s. The kernels of the compiled block are further from
# that speed, but have less to move. Our three ways run the same two kernels,
# so they hardly differ.
#
# **What follows.**
# Measure the block, and not the kernel alone. A kernel that wins by itself can
# lose beside neighbors that it keeps apart, and here it does: with this norm
# the compiled block takes 1.08 times as long at best. All that it beats is
# PyTorch's block as it is.
#
# So inside torch.compile a kernel of your own pays if it contains its
# neighbors, as that of `RMS normalization and the residual stream
# <../norms-and-losses/01-rms-norm.html>`_ contains the addition. Or it pays if
# it does what torch.compile does not find in a formula, such as `attention
# <../attention/01-attention.html>`_ that never writes its matrix of scores.
#
# Gradients with any strides
# --------------------------
#
# Which strides has the gradient that arrives at our backward pass? Those that
# the operation behind ours has made, whatever they are. One line of
# ``backward`` is there for that: ``dy = dy.contiguous()``. What happens
# without it? Here is the same autograd function with a kernel that gets ``dy``
# as it is. (While its backward pass runs, ``contiguous`` is replaced by a
# function that returns the tensor that it is given.)


def backward_of_contiguous(dy, x, w, rstd):
    """Wrong: it takes dy for contiguous."""
    with mock.patch.object(torch.Tensor, "contiguous", lambda t: t):
        return backward(dy, x, w, rstd)


class TakesItForContiguous(RmsNorm):
    """Wrong: it takes dy for contiguous."""

    @staticmethod
    def backward(ctx, dy):
        return *backward_of_contiguous(dy, *ctx.saved_tensors), None


def forgetful(x, w, eps):
    return TakesItForContiguous.apply(x, w, eps)


# %%
# PyTorch has a tool that compares gradients with finite differences,
# ``torch.autograd.gradcheck``. It says that all is well:

x = torch.randn(2, 3, dtype=torch.float64, device=DEVICE, requires_grad=True)
w = torch.rand(3, dtype=torch.float64, device=DEVICE, requires_grad=True)
for name, norm in (("right", by_function), ("forgetful", forgetful)):
    found = torch.autograd.gradcheck(lambda x, w: norm(x, w, 1e-6), (x, w))
    print(f"gradcheck of the {name} one:", found)

# %%
# A model that trains with it is wrong all the same. It takes one
# ``torch.cat``, as in a skip connection:


def gradient_after_a_cat(norm, x, w):
    """dx of a norm beside which something else stands."""
    both = torch.cat([norm(x, w, 1e-6), x.detach()], dim=1)
    weights = torch.arange(12.0, dtype=x.dtype, device=x.device).view(2, 6)
    (dx,) = torch.autograd.grad((weights * both).sum(), x)
    return dx


exact = gradient_after_a_cat(pytorch, x, w)
for name, norm in (("right", by_function), ("forgetful", forgetful)):
    found = gradient_after_a_cat(norm, x, w)
    print(f"{name}: off by {(found - exact).abs().max().item():.0e}")
    assert torch.allclose(found, exact) == (name == "right")

# %%
# ``cat`` hands back a piece of its own gradient: three columns of a matrix
# with six. So a row of ``dy`` begins every six numbers, and the kernel looks
# for one every three:

dy = torch.arange(12.0).view(2, 6)[:, :3]
print("dy has the strides", dy.stride())
print("its second row:", dy[1].tolist())
print("three numbers later:", dy.as_strided((3,), (1,), 3).tolist())

# %%
# This is not made up: it was reported to PyTorch, as an `issue about torch.cat
# <https://github.com/pytorch/pytorch/issues/194719>`_. The answer was that the
# kernel was wrong, for autograd may pass on gradients with any strides. Why
# does ``gradcheck`` not see it? Because it makes the gradients that it sends
# in, and makes them contiguous. The operations of a model do not:
#
# - after ``torch.cat`` a gradient is a piece of a larger one,
# - after a transposition it is transposed,
# - after ``sum()`` it is a single number with strides of 0. A kernel that
#   takes it for contiguous even reads memory that belongs to somebody else.
#
# So ``.contiguous()`` stands in ``backward``. It costs nothing if ``dy`` is
# contiguous, and a copy if it is not. Or the kernel takes strides. And the
# test of a kernel sends in gradients of all three kinds.
#
# Does an operator keep its promises?
# -----------------------------------
#
# ``torch.library.opcheck`` runs an operator on inputs that we choose, and
# tests what it has promised: that no argument is written, that the gradient is
# registered where autograd looks for it, that the fake results are like the
# real ones, and that all of it also works when it is compiled. We give it an
# ``x`` that is contiguous and one that is transposed.


def faults_of(op, *arguments):
    """The promises that an operator does not keep."""
    found = torch.library.opcheck(op, arguments, raise_exception=False)
    return [test for test, result in found.items() if result != "SUCCESS"]


x = torch.randn(4, 6, device=DEVICE)
w = torch.rand(6, device=DEVICE, requires_grad=True)
rows = x.detach().clone().requires_grad_()
columns = x.T.contiguous().T.requires_grad_()

OPERATORS = {"custom_op": rms_norm_op}
if ON_GPU:  # in the interpreter a triton_op has no fake results
    OPERATORS["triton_op"] = rms_norm_open

for way, op in OPERATORS.items():
    print(f"{way}, contiguous: faults:", faults_of(op, rows, w, 1e-6))
    print(f"{way}, transposed: faults:", faults_of(op, columns, w, 1e-6))

# %%
# An empty list is good news. On a GPU there are two more lists, those of
# ``triton_op``, and on the H200 they are empty, too. Here is an operator that
# breaks a promise. It says that ``rstd`` has the type of ``x``, which is true
# for float32, and wrong for 16 bits:


@torch.library.custom_op(f"{NAMESPACE}::liar", mutates_args=())
def liar(
    x: torch.Tensor, w: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return forward(x, w, eps)


@liar.register_fake
def fake_of_liar(x, w, eps):
    y, _ = fake_forward(x, w, eps)
    return y, x.new_empty(x.numel() // w.numel())


x = torch.randn(4, 6, device=DEVICE)
w = torch.rand(6, device=DEVICE)
print("float32:", faults_of(liar, x, w, 1e-6))
print("float16:", faults_of(liar, x.half(), w, 1e-6))

# %%
# In compiled code such a lie ends in an error at best, and in wrong numbers at
# worst: what comes after the operator is written for a result that does not
# come.
#
# But ``opcheck`` knows only the inputs that you give it: with float32 alone it
# finds no fault in this operator. It has no reference, and takes any gradient
# for right. And what it compares depends on the version of PyTorch: a lie
# about strides is found by 2.13, and not by 2.11.
#
# Fake tensors
# ------------
#
# Which shape has the norm of a matrix that does not exist? An operator that
# knows its shapes can be asked without any memory. Here it is applied to 69 GB
# that nobody has allocated:

from torch._subclasses.fake_tensor import FakeTensorMode

# %%

# Scaffold: the words of an error.


def words_of(call):
    """The error that a call ends in: its type, and how its words begin."""
    try:
        call()
    except Exception as error:
        words = textwrap.shorten(str(error), width=120, placeholder=" ...")
        return f"{type(error).__name__}: {words}"
    return "no error"


# %%


def shape_of_a_fake(norm):
    with FakeTensorMode():
        x = torch.empty(2**22, 8192, dtype=torch.bfloat16, device=DEVICE)
        y = norm(x, x[0], 1e-6)
    return f"{tuple(y.shape)}, {y.dtype}"


for way in OPERATORS:
    print(f"{way}:", shape_of_a_fake(WAYS[way]))

# %%
# On a GPU a ``triton_op`` can be asked as well. An autograd function cannot:
# it launches its kernel, whatever the tensor is. We try that with a tensor on
# the device "meta", the older kind of fake tensor. In the interpreter the
# launch ends in an error. On a GPU it would be worse: a tensor on "meta" has
# the address 0, and the kernel would read there.

# %%

# Scaffold: a launch on a tensor without memory.


def words_of_a_launch(x):
    """What an autograd function says to a tensor without memory."""
    if ON_GPU:
        return "not tried: an error of the GPU ends the process"
    return words_of(lambda: by_function(x, x[0], 1e-6))


# %%

x = torch.empty(2, 8, device="meta")
print("custom_op:", tuple(by_custom_op(x, x[0], 1e-6).shape))
print("function:", words_of_a_launch(x))

# %%
# Autocast
# --------
#
# Under ``torch.autocast`` matrix products run in 16 bits, while parameters
# stay in float32. So a norm behind a linear layer gets an ``x`` in bfloat16
# and a weight in float32. What should it do? Ours takes any pair of types,
# computes in float32, and returns the type of ``x``. The gradient of the
# weight has the type of the weight.


def types_under_autocast(norm):
    """Types of y, and of the gradients behind a linear layer."""
    x = torch.randn(5, 4, device=DEVICE)
    linear = torch.nn.Linear(4, 6, bias=False, device=DEVICE)
    w = torch.ones(6, device=DEVICE, requires_grad=True)
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        y = norm(linear(x), w, 1e-6)
    y.float().square().sum().backward()
    return [str(t.dtype)[6:] for t in (y, linear.weight.grad, w.grad)]


for way, norm in WAYS.items():
    print(f"{way}:", ", ".join(types_under_autocast(norm)))
    assert types_under_autocast(norm) == ["bfloat16", "float32", "float32"]

# %%
# Nothing had to be registered for that. If your kernel takes one type only,
# say so: an operator by ``register_autocast``, which casts its arguments, and
# an autograd function by ``torch.amp.custom_fwd``. Its companion
# ``custom_bwd`` lets ``backward`` run under the autocast of the forward pass.
#
# Activation checkpointing
# ------------------------
#
# A checkpoint forgets what a part of the model has saved, and runs its forward
# pass a second time when the backward pass needs it. That saves memory and
# costs time. A *selective* checkpoint asks a function of yours, for each
# operation, whether its result is to be kept.

from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)


def keep_norms(ctx, op, *arguments, **options):
    """Keep what norms return; compute all else again."""
    names = {f"{NAMESPACE}::rms_norm", f"{NAMESPACE}::rms_norm_open"}
    if op.name() in names:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


# %%

# Scaffold: how often the forward kernel is launched.


@contextlib.contextmanager
def counted_launches():
    """A list that grows with each forward pass of our kernel."""
    launches = []
    original = forward

    def counted(*arguments, **options):
        launches.append("forward")
        return original(*arguments, **options)

    with mock.patch.dict(globals(), forward=counted):
        yield launches


def launches_in_a_checkpoint(norm, **options):
    """How often the forward kernel runs in both passes."""
    x, w, dy = inputs(4, 16, torch.float32)
    with counted_launches() as launches:
        y = checkpoint(norm, x, w, 1e-6, use_reentrant=False, **options)
        torch.autograd.grad(y, (x, w), dy)
    return len(launches)


# %%

KEEP_NORMS = functools.partial(
    create_selective_checkpoint_contexts, keep_norms
)
for way, norm in WAYS.items():
    usual = launches_in_a_checkpoint(norm)
    kept = launches_in_a_checkpoint(norm, context_fn=KEEP_NORMS)
    print(f"{way}: {usual} launches, {kept} where norms are kept")

# %%
# All three can be checkpointed. But only an operator can be chosen: a policy
# is asked about operations that have a name, and an autograd function has
# none.
#
# vmap
# ----
#
# ``torch.vmap`` turns a function of one input into a function of many. It asks
# each operation for a rule: what to do with one dimension more. For a norm of
# rows the rule is short, because a batch of matrices is a matrix with more
# rows. If the weight is batched, too, there is no such rule, and we say so.


@rms_norm_op.register_vmap
def with_more_rows(info, in_dims, x, w, eps):
    x_dim, w_dim, _ = in_dims
    if w_dim is not None:
        raise NotImplementedError("rms_norm takes one w for a whole batch")
    y, rstd = rms_norm_op(x.movedim(x_dim, 0), w, eps)
    return (y, rstd.view(info.batch_size, -1)), (0, 0)


# %%

# Scaffold: how many launches a batch of matrices takes.


def launches_in_a_vmap(norm, xs, w):
    """Launches for a batch of matrices; and check the results."""
    with counted_launches() as launches:
        y = torch.vmap(lambda x: norm(x, w, 1e-6), in_dims=1)(xs)
    torch.testing.assert_close(y, pytorch(xs.movedim(1, 0), w, 1e-6))
    return len(launches)


# %%

xs = torch.randn(3, 5, 16, device=DEVICE)
w = torch.rand(16, device=DEVICE)
batched = torch.rand(5, 16, device=DEVICE)
print("custom_op:", launches_in_a_vmap(by_custom_op, xs, w), "launch")
print("triton_op:", launches_in_a_vmap(by_triton_op, xs, w), "launches")
print("function:", words_of(lambda: launches_in_a_vmap(by_function, xs, w)))
vmapped = torch.vmap(lambda w: by_custom_op(xs, w, 1e-6))
print("custom_op, batched w:", words_of(lambda: vmapped(batched)))

# %%
# With the rule there is a single launch. Our ``triton_op`` has no rule, so
# PyTorch calls it once for each of the 5 matrices, and warns. It could have
# the same one. An autograd function refuses; with ``setup_context`` and a
# static method ``vmap`` it could have a rule, too.
#
# Gradients go through ``vmap``, too: with both operators, ``backward`` can be
# called on what it returns. But a gradient for each sample takes
# ``torch.func.grad`` inside ``vmap``, and that refuses all three of our ways.
#
# Second derivatives
# ------------------
#
# Our backward pass is a kernel, and nobody has told PyTorch how to
# differentiate it. So a second derivative must be refused, and the words
# should name the operation. A penalty on the size of a gradient asks for one:


def second_derivative(norm):
    x, w, _ = inputs(4, 16, torch.float32)
    loss = norm(x, w, 1e-6).square().sum()
    (dx,) = torch.autograd.grad(loss, x, create_graph=True)
    dx.square().sum().backward()


for way, norm in WAYS.items():
    print(f"{way}:", words_of(lambda norm=norm: second_derivative(norm)))

# %%
# The words about the autograd function are PyTorch's. They say that *a*
# function was differentiated twice, and not which one. Those of the operators
# are ours: ``told_once`` is registered as the gradient of the backward pass.
# Without it, PyTorch says that "no autograd formula was registered" for an
# operator that the user has never heard of.
#
# Two processes: DDP and FSDP
# ---------------------------
#
# Models that train on several GPUs are wrapped. ``DistributedDataParallel``,
# or DDP, adds up the gradients of all processes while the backward pass is
# still running, so it must learn when each of them is there. ``fully_shard``,
# or FSDP, keeps only a part of each parameter on each GPU. It gathers the
# whole parameter before a layer runs, and frees it after that.
#
# Does that go well with our ways? We start two processes, *ranks*, on the CPU.
# They talk to each other by *gloo*, a library that needs no GPU, and each gets
# one half of a batch. The gradients must be those of the whole batch in a
# single process.
#
# On the CPU our kernels run in Triton's interpreter, whatever GPU there is. In
# Triton 3.6 and earlier, the interpreter cannot run the loop of our backward
# pass with NumPy 2.4 or later. Where the two meet we start no ranks, and the
# line below says so.

# %%

# Scaffold: what a rank does.

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel


class Norm(torch.nn.Module):
    """A layer with one of the ways."""

    def __init__(self, norm, N):
        super().__init__()
        self.norm = norm
        self.weight = torch.nn.Parameter(torch.linspace(0.5, 1.5, N))

    def forward(self, x):
        return self.norm(x, self.weight, 1e-6)


def small_model(norm):
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 16), Norm(norm, 16), torch.nn.Linear(16, 3)
    )


def gradients_of(model, x):
    """The gradient of each parameter, whole."""
    model(x).square().mean().backward()
    found = []
    for parameter in model.parameters():
        gradient = parameter.grad
        if hasattr(gradient, "full_tensor"):  # FSDP has a part of it here
            gradient = gradient.full_tensor()
        found.append(gradient)
    return found


def all_close(found, exact):
    pairs = zip(found, exact, strict=True)
    return all(torch.allclose(a, b, atol=1e-5) for a, b in pairs)


def join(rank, place):
    """Be a rank; rank 0 prints what came of each way."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{place}", rank=rank, world_size=2
    )
    mesh = init_device_mesh("cpu", (2,))
    x = torch.linspace(-1, 1, 24).view(4, 6).square()
    exact = gradients_of(small_model(pytorch), x)
    half = x[2 * rank : 2 * rank + 2]
    for way, norm in WAYS.items():
        wrapped = DistributedDataParallel(small_model(norm))
        by_ddp = all_close(gradients_of(wrapped, half), exact)
        sharded = small_model(norm)
        fully_shard(sharded[1], mesh=mesh)
        fully_shard(sharded, mesh=mesh)
        by_fsdp = all_close(gradients_of(sharded, half), exact)
        if rank == 0:
            print(f"{way}: right with DDP: {by_ddp}, with FSDP: {by_fsdp}")
    dist.destroy_process_group()


# %%

# Scaffold: a module of all definitions, from page 01 of several-gpus.

import ast
import builtins
import inspect


def source_of_the_page():
    """What the page says: a script, or the cells of a notebook so far."""
    shell = getattr(builtins, "get_ipython", None)
    if shell is not None:
        return shell().user_ns["In"]
    lines, _ = inspect.findsource(join)
    return ["".join(lines)]


def is_definition(node):
    """Whether a statement imports, defines, or names a CONSTANT."""
    if isinstance(node, ast.Assign):
        return all(ast.unparse(target).isupper() for target in node.targets)
    kinds = ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef
    return isinstance(node, kinds)


def written(folder):
    """Write a module of all definitions of the page; its name.

    A rank may be reading it: it appears as a whole, and is written once.
    """
    text = ""
    for cell in source_of_the_page():
        with contextlib.suppress(SyntaxError):  # of a cell that failed
            for node in ast.parse(cell).body:
                if is_definition(node):
                    text += ast.unparse(node) + "\n\n"
    name = f"page_{hash(text) % 2**32}"
    if not os.path.exists(f"{folder}/{name}.py"):
        with open(f"{folder}/draft", "w") as file:
            file.write(text)
        os.replace(f"{folder}/draft", f"{folder}/{name}.py")
    return name


# %%

# Scaffold: two processes, which import what the page defines.

import numpy


def major_minor(package):
    """Of 3.6.0 it is (3, 6)."""
    return tuple(map(int, package.__version__.split(".")[:2]))


def interpreter_runs_loops():
    """Whether Triton's interpreter can count the turns of a loop.

    Before Triton 3.7 it takes an array with one number for that number, and
    from 2.4 on NumPy refuses to.
    """
    return major_minor(triton) >= (3, 7) or major_minor(numpy) < (2, 4)


def said_by_ranks():
    """What rank 0 prints."""
    if not interpreter_runs_loops():
        return (
            f"not tried: the interpreter of Triton {triton.__version__} "
            f"cannot run our loop with NumPy {numpy.__version__}, only with "
            "an earlier one than 2.4"
        )
    with tempfile.TemporaryDirectory() as folder:
        place = os.path.join(folder, "ranks")
        ranks = []
        for rank in range(2):
            run = (
                f"from {written(folder)} import join; join({rank}, {place!r})"
            )
            process = subprocess.Popen(
                [sys.executable, "-c", run],
                stdout=subprocess.PIPE,
                cwd=folder,
                text=True,
                # Also where there are GPUs: one is not enough for two ranks.
                env=os.environ
                | {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"},
            )
            ranks.append(process)
        said = [process.communicate(timeout=300)[0] for process in ranks]
        if any(process.returncode for process in ranks):
            raise RuntimeError("a rank has ended; above it says why")
    return said[0]


# %%

print(said_by_ranks().strip())

# %%
# All three are right with both. For DDP and FSDP a norm is a layer with a
# parameter, and they never look inside.
#
# It is another matter if *tensors* are spread over GPUs, as in tensor
# parallelism. There a ``DTensor``, which stands for a tensor of which each GPU
# has a part, asks each operation how its result is spread. For our custom
# operator it knows no rule, and says so in an error. ``register_sharding``, in
# ``torch.distributed.tensor.experimental``, can give an operator one. `Layer
# norm over several GPUs <../several-gpus/01-layer-norm.html>`_ spreads columns
# and rows by hand.
#
# Export, and a model without Python
# ----------------------------------
#
# ``torch.export`` writes a model down as one graph. It follows the model with
# fake tensors, as torch.compile does, but it sees only operations that go
# through the dispatcher. So an operator stands in the graph by its name, and a
# launch without a name would have to run on fake tensors, and cannot:


def exported(norm):
    """A model as a graph of operations, for any number of rows."""
    model = Norm(norm, 16).to(DEVICE)
    rows = torch.export.Dim("rows", min=2)
    x = torch.randn(4, 16, device=DEVICE)
    return torch.export.export(model, (x,), dynamic_shapes=({0: rows},))


program = exported(by_custom_op)
for node in program.graph.nodes:
    if node.op == "call_function":
        print("custom_op:", node.target)
x = torch.randn(7, 16, device=DEVICE)
model = Norm(by_custom_op, 16).to(DEVICE)
print("equal:", torch.equal(program.module()(x), model(x)))
print("function:", words_of(lambda: exported(by_function)))

# %%
# With ``strict=True``, export reads the code of the model as torch.compile
# does, and takes a launch without a name, too. But in its graph the kernel is
# only a number, its place in a table of this process. So a file of the graph
# is of no use to another process, and if the number of rows is left open, as
# here, PyTorch 2.13 does not even write one.
#
# *AOTInductor* goes one step further: from what was exported it makes a
# library of compiled code. Where that meets a custom operator, it calls the
# operator by its name, so whoever loads the library must have registered the
# operator: with ours that means Python. To make a library takes a C++
# compiler. Where there is one, and no GPU, we try it:

# %%

# Scaffold: a library of compiled code.

import shutil

COMPILER = shutil.which(os.environ.get("CXX", "g++"))


def by_a_library(program, x):
    """What an exported model returns as compiled code."""
    with tempfile.TemporaryDirectory() as folder:
        package = torch._inductor.aoti_compile_and_package(
            program, package_path=os.path.join(folder, "model.pt2")
        )
        return torch._inductor.aoti_load_package(package)(x)


# %%

if not ON_GPU and COMPILER:
    y = by_a_library(program, x)
    print("equal by AOTInductor:", torch.equal(y, model(x)))

# %%
# A ``triton_op`` stays an operator when a model is exported, so that the file
# does not depend on Triton. AOTInductor opens it later, and compiles the
# kernels into the library. That is the way to a model without Python, and it
# needs a GPU. We have not tried it on this page.
#
# Streams and CUDA graphs
# -----------------------
#
# Two more things need a GPU. A *stream* is a queue of the GPU: kernels of one
# stream run one after the other, and those of two streams do not wait for each
# other. So a kernel must go to the stream that is current where it is called,
# and not to the one that it was first launched on. We test that with a forward
# pass on a second stream. And what is recorded in a CUDA graph must be right
# when it is replayed with other numbers. We test that with both passes.


def right_on_another_stream(norm):
    """The work of a call on another stream is done on that stream."""
    x, w, _ = inputs(4096, 4096, torch.float32)
    expected = pytorch(x, w, 1e-6)
    norm(x, w, 1e-6)
    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        late = torch.zeros_like(x)
        for _ in range(20):
            late += x / 20  # x, but only when this stream gets there
        y = norm(late, w, 1e-6)
    torch.cuda.current_stream().wait_stream(other)
    return torch.allclose(y, expected, atol=1e-3, rtol=1e-3)


def right_in_a_graph(norm):
    """Both passes are recorded, and replayed with other numbers."""
    x, w, dy = inputs(64, 1024, torch.float32)

    def call():
        return torch.autograd.grad(norm(x, w, 1e-6), (x, w), dy)

    replay = as_graph(call)
    with torch.no_grad():
        x.normal_()
    _, found = replay()
    exact = torch.autograd.grad(pytorch(x, w, 1e-6), (x, w), dy)
    pairs = zip(found, exact, strict=True)
    return all(torch.allclose(a, b, atol=1e-3, rtol=1e-3) for a, b in pairs)


# %%

# Scaffold: both tests, where there is a GPU.


def tried_on_a_gpu(norm):
    """What came of both."""
    if not ON_GPU:
        return "another stream and a CUDA graph need a GPU"
    on_stream = right_on_another_stream(norm)
    in_graph = right_in_a_graph(norm)
    return f"right on another stream: {on_stream}, in a graph: {in_graph}"


# %%

for way, norm in WAYS.items():
    print(f"{way}:", tried_on_a_gpu(norm))

# %%
# On the H200 all three pass both tests. Triton asks for the current stream at
# each launch, and our functions keep nothing between calls: no buffer that two
# streams could share, and no address that a replay could miss.
#
# We have not tested a backward pass on a second stream. Autograd runs the
# backward pass of an operation on the stream of its forward pass, and the
# launch goes there, too. With memory you have to help. A tensor that is made
# on one stream and used on another needs ``record_stream``. Otherwise PyTorch
# may hand out its memory again before the other stream is done with it. (Our
# test can do without, because it waits for both streams before it lets go of a
# tensor.) All of this is the same whichever way launches the kernel.
#
# Where PyTorch or a library is better
# ------------------------------------
#
# - **PyTorch's own norm is C++**, and takes less time on the host than any of
#   ours: 101 µs for both passes on the H200 at 1024 columns, against 218 µs.
# - **torch.compile needs no kernel** for a norm, and the one that it writes is
#   ahead of ours at 1024 columns, with 86% against 82% of the copy forward and
#   42% against 40% backward, and forward at 8192 columns, with 99% against
#   94%.
# - **torch.compile fuses** its norm with both neighbors. Compiled, PyTorch's
#   block takes 113 µs on the device with 4096 columns, and ours 122 µs. On the
#   host, with 16 rows, it takes 269 µs, and ours 331 µs.
# - **Other libraries** have an RMS norm, too: `quack
#   <https://github.com/Dao-AILab/quack>`_ and cuDNN. `RMS normalization and
#   the residual stream <../norms-and-losses/01-rms-norm.html>`_ measures both,
#   with an addition before the norm, beside a kernel of ours.
# - **An operator in C++** does not come back into Python at each call, and it
#   runs where there is no Python. But somebody has to build it.
# - **PyTorch does what we have refused.** Its norm has second derivatives, it
#   takes any width, and ``vmap`` takes it with a batch of weights.
#
# Exercise 1: say the truth
# -------------------------
#
# This fake function is wrong for three of the five inputs that the checker
# tries. Which lie does it tell for which of the three? Answer that first, and
# without a look back at ``fake_forward``. Then write a function whose results
# have the shapes, types and strides of those of ``forward``, for all five.
#
# **Hint 1.** What does ``torch.empty_like`` copy from its argument, beside the
# shape?
#
# **Hint 2.** ``rstd`` has one number for each row of the *matrix*. How many
# rows has an ``x`` with three dimensions? And which type do its numbers have,
# if ``x`` has 16 bits?


def fake(x, w, eps):
    return torch.empty_like(x), x.new_empty(x.shape[0])  # to do


def exercise_1(fake):
    """Print for which inputs the fake results are not like the real ones."""
    x = torch.randn(4, 8, device=DEVICE)
    w = torch.rand(8, device=DEVICE)
    given = {
        "contiguous": (x, w),
        "transposed": (x.T.contiguous().T, w),
        "16 bits": (x.half(), w),
        "three dimensions": (x.view(2, 2, 8), w),
        "float64": (x.double(), w),
    }
    wrong = []
    for name, (x, w) in given.items():
        real = forward(x, w, 1e-6)
        for said, true in zip(fake(x, w, 1e-6), real, strict=True):
            same = (said.shape, said.dtype) == (true.shape, true.dtype)
            if not same or said.stride() != true.stride():
                wrong.append(name)
                break
    print("wrong:", ", ".join(wrong) or "nothing")
    return not wrong


print("right:", exercise_1(fake))

# %%

# Solution 1


def fake_1(x, w, eps):
    acc_dtype = torch.promote_types(x.dtype, torch.float32)
    # The kernel writes y row after row, whatever the strides of x are. On the
    # page, fake_forward gets such a y by memory_format.
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return y, x.new_empty(x.numel() // w.numel(), dtype=acc_dtype)


assert exercise_1(fake_1)

# %%
# What we learned
# ---------------
#
# Which way for whom? A filled field means that a way can do it as this page
# writes it. With a rule for ``vmap``, an autograd function and a ``triton_op``
# would have that field filled, too.

# %%

# Drawing: which way can do what.

ABLE = {
    "bare launch": ("compile",),
    "autograd.Function": ("train", "compile"),
    "custom_op": ("train", "compile", "export", "choose", "fake", "vmap"),
    "triton_op": ("train", "compile", "export", "choose", "fake"),
}
ASKED = {
    "train": "train",
    "compile": "compiled,\none graph",
    "export": "export",
    "choose": "chosen by\ncheckpoint",
    "fake": "asked for\nshapes",
    "vmap": "vmap in\none launch",
}
plt.figure(
    "Which way can do what. A bare launch can be compiled. An autograd "
    "function can train and be compiled. A triton_op can also be exported, "
    "be chosen by a checkpoint and be asked for its shapes. A custom operator "
    "can do all that, and here vmap in one launch",
    figsize=(7.5, 2.8),
)
for row, way in enumerate(ABLE):
    for column, task in enumerate(ASKED):
        color = "C0" if task in ABLE[way] else "none"
        plt.barh(-row, 0.9, 0.7, column, color=color, ec="k", alpha=0.6)
plt.yticks([0, -1, -2, -3], list(ABLE))
plt.xticks([0.45 + column for column in range(6)], list(ASKED.values()))
plt.grid(visible=False)
plt.show()

# %%
# What has no column is the same for the three ways that train. Autocast,
# checkpoints, DDP, FSDP, streams and CUDA graphs work. Second derivatives, and
# ``torch.func.grad`` inside ``vmap``, are refused, and ``DTensor`` has a rule
# for none of the three.
#
# Of the two times below, both on the H200, the first one is for both passes of
# 4096 rows of 1024 columns, called from Python. The second one is for both
# passes of the compiled block of 16 rows, on the host:
#
# - **PyTorch's own norm**, 101 µs and 269 µs, is for everybody whose kernel
#   would compute no more than a norm. On large inputs compile it, together
#   with what stands around it.
# - **A bare launch** is for inference, and for a function that is only ever
#   called by others of yours. Nobody can train with it, and it does not even
#   say so.
# - **An autograd function**, 218 µs and 331 µs, is for training from Python,
#   and for a kernel that is published as a few lines. torch.compile reads it,
#   launches its kernels and breaks no graph. It cannot be exported for another
#   process, chosen by a checkpoint, or asked for its shapes.
# - **A custom operator**, 302 µs and 774 µs, is for code that no compiler can
#   or should read: code that remembers plans or looks at addresses, as on
#   `What the user waits for <../layer-norm/10-host-time.html>`_, or that calls
#   a library. Its row of the picture is full. You pay for its name at each
#   call, and most of all in compiled code.
# - **A triton_op**, 309 µs and 366 µs, is for kernels in models that are
#   compiled. It has a name for whoever asks, and the compiler opens it. If you
#   call it from Python, you pay for this name, too, and all that it does must
#   be readable for the compiler.
#
# And for each of them:
#
# - What PyTorch is not told, it does not ask for. Where a gradient is missing
#   or a stride is wrong, there is often no error.
# - A gradient arrives with any strides. Test with ``torch.cat``, ``.T`` and
#   ``sum()``, because ``gradcheck`` does not.
# - A kernel of your own ends the fusion at its two sides. Count the kernels
#   before and after, and measure the block: ours has the faster norm, and
#   still loses to the block that torch.compile fuses.
# - On small inputs you wait for the host. There a faster kernel changes
#   nothing, and a CUDA graph changes much.
# - What your operation cannot do, such as a second derivative, it should
#   refuse, in words that name it.
#
# **Next:** whichever way you take, PyTorch believes what your backward pass
# tells it. `How to trust a gradient <02-testing.html>`_ shows how to find out
# whether it is right.
