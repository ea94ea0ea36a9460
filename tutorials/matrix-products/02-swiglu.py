r"""
A gate between two products
===========================

How fast can the gate of a Transformer's MLP be, and what must it keep for the
backward pass?
It can be as fast as a copy of its matrices, in both passes, and nothing that
it computes has to be kept.

.. math:: y = \text{silu}(g) \cdot u, \qquad
   \text{silu}(g) = g \, \sigma(g)

Each layer of a Transformer ends in an *MLP*, a multilayer perceptron, which
treats every token by itself. That of a Llama model makes two matrices of its
input: the *gate* :math:`g` and the *up* projection :math:`u`. An activation of
the first one scales the second, element by element, and a third product brings
the result :math:`y` back to the width of the model. With SiLU the gate is
called `SwiGLU <https://arxiv.org/abs/2002.05202>`_, and with GELU it is called
*GEGLU*. On this page we write both passes of the gate, and then we put it into
the product before it.

**What you will learn**

- How to count what a gate must move, and how to reach the speed of a copy with
  two matrices that come in and one that goes out.
- How a kernel reads both halves of one tensor where they lie, and why autograd
  copies them in the backward pass if you let it.
- What an MLP keeps for its backward pass, and what is cheaper to compute
  again.
- How to put the gate into the product before it, and where that loses.

**What you need:** `A function as a constant <../fused/03-activation.html>`_,
whose activations we take, and `A linear layer, both passes <01-linear.html>`_,
whose product we take for the last part of the page. You don't need a GPU.
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

import functools
import types
from importlib.util import find_spec

from triton.tools.tensor_descriptor import TensorDescriptor

# %%
# Two numbers, by hand
# --------------------
#
# Let the gate of one feature be 2, and its up projection 3. The sigmoid of 2
# is 1 / (1 + exp(-2)) = 0.881. So SiLU of the gate is 2 · 0.881 = 1.762, and
# the result is 1.762 · 3 = 5.285. The gate has let the 3 through, and has made
# it larger.
#
# If the gate is -2, its sigmoid is 0.119, and SiLU is -0.238. The result is
# -0.715: hardly anything comes through. In PyTorch it is one line.

gate = torch.tensor([2.0, -2.0, 0.0, -20.0])
up = torch.tensor([3.0, 3.0, 3.0, 3.0])
y = F.silu(gate) * up
print("y:", [round(each, 3) for each in y.tolist()])

# %%
# What must move?
# ---------------
#
# A gate computes about ten operations for each element of ``y``. It reads two
# numbers for that element and writes one, which are six bytes if a number has
# 16 bits. In the time that six bytes take, an H200 could compute several times
# as much. So a gate waits for memory, and we count what must move.
#
# Our example is the MLP of Llama 3 8B, whose gate has ``N`` = 14336 features,
# with ``M`` = 8192 tokens. A matrix of this size takes 235 MB.
#
# - **Forward, one kernel** reads the gate and the up projection and writes
#   ``y``. That is three matrices.
# - **Forward, PyTorch** has two kernels. The first reads the gate and writes
#   its SiLU. The second reads that and the up projection, and writes ``y``.
#   That is five.
# - **Backward, one kernel** reads the gate, the up projection and ``dy``, the
#   gradient of ``y``. It writes the gradients of the first two. That is five.
# - **Backward, PyTorch** has three kernels. Each of them reads two matrices
#   and writes one: ``dy`` times the SiLU, ``dy`` times the up projection, and
#   that product times the slope of SiLU. That is nine.

matrix = 8192 * 14336 * 2 / 1e9  # GB
for what, matrices in (
    ("forward, one kernel", 3),
    ("forward, PyTorch", 5),
    ("backward, one kernel", 5),
    ("backward, PyTorch", 9),
):
    print(
        f"{what:20}: {matrices} x {matrix:.3f} GB, "
        f"{matrices * matrix / 4.8 * 1e3:4.0f} µs at 4.8 TB/s"
    )

# %%
# The 4.8 TB/s are what the data sheet of an H200 promises.
#
# A value and its slope
# ---------------------
#
# The forward pass needs the value of the activation, and the backward pass
# also needs its slope. `A function as a constant
# <../fused/03-activation.html>`_ writes an activation as a function that
# returns both, and hands it to a kernel as a constant. Where nobody uses the
# slope, the compiler drops its instructions. We take SiLU and the exact GELU
# from that page, with its sigmoid of four instructions. That is written in
# PTX, the assembly language of NVIDIA's GPUs. Anywhere else ``tl.sigmoid``
# takes its place.

PTX = tl.constexpr(ON_GPU and torch.version.hip is None)

# %%

# Scaffold: SiLU and the exact GELU, from page 03 of fused.


@triton.jit
def _sigmoid(x):
    if PTX and x.dtype == tl.float32:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .f32 a;
            mul.f32 a, $1, 0fBFB8AA3B;  // -log2(e)
            ex2.approx.ftz.f32 a, a;
            add.f32 a, a, 0f3F800000;  // 1
            rcp.approx.ftz.f32 $0, a;
            }
            """,
            "=f,f",  # one result and one argument, both in registers
            [x],
            dtype=tl.float32,
            is_pure=True,  # the compiler may drop or move it
            pack=1,  # an element at a time
        )
    else:
        return tl.sigmoid(x)


@triton.jit
def _silu(x):
    sigmoid = _sigmoid(x)
    return x * sigmoid, sigmoid * (1 + x * (1 - sigmoid))


@triton.jit
def _gelu(x):
    below = 0.5 + 0.5 * tl.erf(x * 0.7071067811865476)  # 1 / sqrt(2)
    density = tl.exp(-0.5 * x * x) * 0.3989422804014327  # 1 / sqrt(2 pi)
    # Beyond 30 the second term is 0; infinity times 0 would not be.
    return x * below, below + tl.where(tl.abs(x) < 30, x * density, 0.0)


# %%
# The exact GELU is :math:`x \, \Phi(x)`, where :math:`\Phi(x)` is the part of
# a normal distribution that lies below ``x``. ``tl.erf`` computes it. A GPU
# has no instruction for this function, so it takes many. A gate has little
# time for them, so we write a shorter GELU, and measure both below. `A formula
# <https://personal.math.ubc.ca/~cbm/aands/page_932.htm>`_ of 1955 gives the
# part that lies beyond ``x``, and is off by less than 10⁻⁷. It needs the
# density :math:`\varphi(x)`, which the slope needs anyway, one division, and
# five products. The numbers :math:`b_1` to :math:`b_5` stand in the code
# below.
#
# .. math:: 1 - \Phi(x) \approx \varphi(x) \, (b_1 t + \ldots + b_5 t^5),
#    \qquad t = \frac{1}{1 + 0.2316419 \, x}, \quad x \ge 0
#
# For negative ``x`` we take the part beyond :math:`|x|`: the distribution is
# symmetric. Far below 0 the formula is even closer than ``tl.erf``, whose
# result is near -1 there: 1 is added to it, and few digits are left. In
# float64, which nobody trains with, we stay with ``tl.erf``.
#
# As in the sigmoid, the division and the power are single instructions of PTX.
# They are shorter than what Triton makes of ``1 / x`` and ``tl.exp``. Numbers
# below 10⁻³⁸, where float32 ends, count as 0. We do not miss them.


@triton.jit
def _reciprocal(x):
    if PTX:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;",
            "=f,f",  # one result and one argument, both in registers
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        return 1 / x


@triton.jit
def _power_of_two(x):
    if PTX:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;",
            "=f,f",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        return tl.exp2(x)


@triton.jit
def _gelu_short(x):
    if x.dtype == tl.float64:
        return _gelu(x)
    t = _reciprocal(1 + 0.2316419 * tl.abs(x))
    # exp(-x x / 2) is a power of two: log2(e) / 2 is 0.7213... Then
    # 1 / sqrt(2 pi) is 0.3989...
    density = _power_of_two(-0.7213475204444817 * x * x) * 0.3989422804014327
    # b1 t + ... + b5 t^5, from the last to the first: without a power.
    series = 1.330274429 * t - 1.821255978
    series = series * t + 1.781477937
    series = series * t - 0.356563782
    series = series * t + 0.319381530
    beyond = density * (series * t)
    below = tl.where(x < 0, beyond, 1 - beyond)
    # Beyond 30 the second term is 0; infinity times 0 would not be.
    return x * below, below + tl.where(tl.abs(x) < 30, x * density, 0.0)


# %%
# Many models have the other form of GELU, which PyTorch calls
# ``approximate="tanh"``. It is :math:`x \, \sigma(v)` with :math:`v = \sqrt{8
# / \pi} \, (x + 0.044715 \, x^3)`. The cube must not overflow. Where ``x`` is
# below -30 this sigmoid is 0, even in float64, and above 30 it is 1. So we
# limit the ``x`` that goes into ``v`` to these two.


@triton.jit
def _gelu_tanh(x):
    near = tl.minimum(tl.maximum(x, -30.0), 30.0)
    square = near * near
    # v, and its derivative times x. 2 sqrt(2 / pi) is 1.5957..., and times
    # 0.044715 it is 0.0713...; three times that is 0.2140...
    v = near * (1.5957691216057308 + 0.07135481627260025 * square)
    dv = near * (1.5957691216057308 + 0.21406444881780076 * square)
    sigmoid = _sigmoid(v)
    return x * sigmoid, sigmoid * (1 + dv * (1 - sigmoid))


# %%
# The forward kernel
# ------------------
#
# What does a program have to do?
#
# It has a tile: some rows, and some columns of them. It requests this tile of
# the gate and the same tile of the up projection, and only then does it
# compute. So both are on their way at the same time.
#
# Neither has to be a tensor of its own. Often one product makes both, and they
# are the two halves of one tensor of 2 ``N`` columns: ``x[..., :N]`` and
# ``x[..., N:]``. In each half, the numbers of a row lie side by side, and the
# next row begins 2 ``N`` numbers further on. This distance is the *stride* of
# a row. Our kernel is told the stride of each matrix, so it does not care
# whether it reads halves.


@triton.jit
def _place_of_tile(
    M,
    N,
    ONE_ROW: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Rows and columns of our tile, and which of its elements exist."""
    # In 64 bits, for M * N may pass 2**31.
    row = tl.arange(0, ROWS)[:, None].to(tl.int64)
    tile = tl.program_id(0)
    if not ONE_ROW:
        across = tl.cdiv(N, COLUMNS)  # tiles side by side
        row += (tile // across).to(tl.int64) * ROWS
        tile = tile % across
    column = tile.to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    return row, column, (row < M) & (column < N)


@triton.jit
def _gate_fwd(
    gate_ptr,  # (M, N): the numbers of a row lie side by side
    up_ptr,  # the same
    y_ptr,  # the same
    gate_stride,  # from a row of the gate to the next
    up_stride,
    y_stride,
    M,  # rows
    N,  # columns
    ACT: tl.constexpr,  # the activation: its value and its slope
    ONE_ROW: tl.constexpr,  # whether M is 1
    ROWS: tl.constexpr,  # rows of a program
    COLUMNS: tl.constexpr,  # columns of a program
):
    row, column, mask = _place_of_tile(M, N, ONE_ROW, ROWS, COLUMNS)

    # Both loads stand before the first use of either.
    gate = tl.load(gate_ptr + row * gate_stride + column, mask=mask, other=0)
    up = tl.load(up_ptr + row * up_stride + column, mask=mask, other=0)

    # 16-bit numbers are computed in float32, and rounded once, at the end.
    wide: tl.constexpr = gate.dtype == tl.float64
    acc: tl.constexpr = tl.float64 if wide else tl.float32
    value, _ = ACT(gate.to(acc))
    y = value * up.to(acc)
    tl.store(y_ptr + row * y_stride + column, y, mask=mask)


# %%
# How large is a tile?
#
# A thread can load at most 16 bytes with one instruction, and a warp has 32
# threads. We give a program 2 warps and tiles of 1 KB. So a thread loads 16
# bytes of the gate and 16 bytes of the up projection, and both loads are in
# flight together. An SM has room for 2048 threads, which are 32 such programs.
# If all of them wait, 64 KB are in flight on this SM. That is plenty: with 132
# SMs, each needs about 33 KB to keep the memory of an H200 busy for the
# microsecond that a load may take.
#
# Why not more? A million elements are 2 MB of a matrix. That makes only 512
# tiles of 4 KB, which are fewer than four for each SM, and some SMs have one
# more to do than others. With tiles of 1 KB there are 2048, and they spread
# more evenly.
#
# In which shape? If every matrix is *contiguous*, which means that its rows
# follow each other without a gap, all of them together are one long row. Then
# a tile is a piece of this row, however many columns the matrix has, and no
# thread is idle but at the very end. Nor does a program have to divide its
# number, to find out in which row it is: that takes some twenty instructions,
# before anything can be loaded. Otherwise a tile is a part of one row, or
# several whole rows where they are narrow.

TILE_BYTES = 1024  # of each matrix
WARPS = 2


def tile_for(N, itemsize):
    """Rows, columns and warps of a program."""
    numbers = TILE_BYTES // itemsize
    columns = min(triton.next_power_of_2(N), numbers)
    return {
        "ROWS": numbers // columns,
        "COLUMNS": columns,
        "num_warps": WARPS,
    }


def rows_and_columns(matrices):
    """M and N of matrices of one shape; one row if all are contiguous."""
    M, N = matrices[0].shape
    if all(t.is_contiguous() for t in matrices):
        return 1, M * N
    return M, N


def forward(gate, up, y, function):
    """Fill y. All three are matrices with the numbers of a row side by
    side."""
    if y.numel() == 0:
        return
    M, N = rows_and_columns((gate, up, y))
    tile = tile_for(N, y.itemsize)
    across = triton.cdiv(N, tile["COLUMNS"])
    _gate_fwd[(triton.cdiv(M, tile["ROWS"]) * across,)](
        gate_ptr=gate,
        up_ptr=up,
        y_ptr=y,
        gate_stride=gate.stride(0),
        up_stride=up.stride(0),
        y_stride=y.stride(0),
        M=M,
        N=N,
        ACT=function,
        ONE_ROW=M == 1,
        **tile,
    )


# %%
# Here it is with two tensors, and with two halves of one.

x = torch.randn(5, 48, device=DEVICE)
gate, up = x[:, :24], x[:, 24:]
exact = F.silu(gate) * up
for name, given in (
    ("two tensors", (gate.contiguous(), up.contiguous())),
    ("two halves", (gate, up)),
):
    y = torch.empty(5, 24, device=DEVICE)
    forward(*given, y, _silu)
    print(f"{name}, right: {torch.allclose(y, exact, atol=1e-6)}")

# %%
# How fast is the forward pass?
# -----------------------------
#
# The clock is that of `Layer normalization, both passes
# <../layer-norm/01-layer-norm.html>`_, which explains it. The ceiling is a
# kernel that moves as much as we must, and computes hardly anything: it reads
# two matrices, adds them up, and writes one. We call it a copy, as on the
# other pages. Beside PyTorch and torch.compile we measure `Liger
# <https://github.com/linkedin/Liger-Kernel>`_, a library of kernels in Triton,
# where it is installed.

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

# Scaffold: inputs, and who is measured.


def inputs(M, N, dtype):
    """gate, up, and dy, which arrives in the backward pass."""
    found = []
    for _ in range(3):
        found.append(torch.randn(M, N, device=DEVICE).to(dtype))
    gate, up, dy = found
    return gate.requires_grad_(), up.requires_grad_(), dy


def ours_forward(gate, up):
    """The forward pass alone: it keeps nothing that it computes."""
    y = torch.empty_like(gate)
    forward(gate, up, y, _silu)
    return y


def pytorch(gate, up):
    return F.silu(gate) * up


def liger(gate, up):
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    return LigerSiLUMulFunction.apply(gate, up)


NAMES = {
    "triton": "Triton",
    "torch": "PyTorch",
    "torch.compile": "torch.compile",
}
if find_spec("liger_kernel"):
    NAMES["liger"] = "Liger"


# %%

# Scaffold: the speed of either pass.


def speed_of(function, M, N, dtype, mode):
    """GB/s of a forward or a backward pass: median, low, high."""
    matrices = {"forward": 3, "backward": 5}[mode]

    def prepare():
        gate, up, dy = inputs(M, N, dtype)
        if mode == "forward":
            return lambda: function(gate, up)
        y = function(gate, up)

        def run():
            return torch.autograd.grad(y, (gate, up), dy, retain_graph=True)

        return run

    return speed(matrices * M * N * dtype.itemsize, prepare)


@functools.cache
def compiled_speeds(M, N, dtype):
    """The speeds of torch.compile in both passes.

    To compile takes longer than to measure, so each of the three compilations
    is measured in both passes, and the best of each pass counts.
    """
    speeds = {"forward": [], "backward": []}

    def measure(function):
        for mode in speeds:
            speeds[mode].append(speed_of(function, M, N, dtype, mode))
        return speeds["forward"][-1]

    best_of_three_compilations(pytorch, measure)
    return {mode: max(speeds[mode]) for mode in speeds}


@functools.cache
def copy_speed(M, N, dtype, mode):
    """Measured once for all figures."""
    reads, writes = {"forward": (2, 1), "backward": (3, 2)}[mode]
    return ceiling(reads, writes, shape=(M, N), dtype=dtype)


# %%

# Scaffold: SwiGLU forward, a benchmark.

SIZES = [128, 512, 2048, 14336]


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=SIZES,
        x_log=True,
        xlabel="N (columns)",
        line_arg="provider",
        line_vals=[*NAMES, "copy"],
        line_names=[*NAMES.values(), "Copy"],
        ylabel="GB/s",
        plot_name="swiglu-forward",
        args={"M": 8192, "dtype": torch.bfloat16, "mode": "forward"},
    )
)
def bench_forward(M, N, dtype, mode, provider):
    """Device time: a CUDA graph of several calls, each with inputs of its own
    and after L2 was overwritten, less the graph without the calls; median, 20%
    and 80% quantiles. Copy: the best of six tiles."""
    if not ON_GPU:
        return 3 * [float("nan")]  # the interpreter cannot be timed
    if provider == "copy":
        return copy_speed(M, N, dtype, mode)
    if provider == "torch.compile":
        return compiled_speeds(M, N, dtype)[mode]
    calls = {"triton": ours_forward, "torch": pytorch, "liger": liger}
    return speed_of(calls[provider], M, N, dtype, mode)


# %%

report(bench_forward)

# %%
# **What the figure shows.**
# With 8192 rows, 128 columns are a million elements, and 14336 columns are 117
# million. On the H200 our forward pass reaches 103% of a copy at a million
# elements, and 96% to 103% over all sizes. PyTorch reaches 54% to 64%,
# torch.compile 94% to 100%, and Liger 57% to 99%.
#
# So torch.compile is as fast as we are at 2048 columns and at 14336. At 128
# and 512 our medians are 3% and 2% ahead, and the quantiles overlap. Nor is
# our kernel faster than a copy: at 128 columns the quantiles of the copy alone
# span 8%.
#
# The copy itself grows from 1864 GB/s at 128 columns to 4330 at 14336. A
# million elements take our kernel 3.3 µs, and a good part of that goes by
# before the first bytes have come and after the last ones have left.
#
# **Why.**
# PyTorch moves five matrices in place of three. Where its SiLU does not stay
# in L2 until the second kernel reads it, it cannot reach more than 60% of a
# copy. At 512 columns, where the SiLU has 8 MB, it may stay. torch.compile
# fuses both kernels into one, as we do. So does Liger. Each of its programs
# has a row, and that is little to do for a program if the row has 128 columns.
#
# **What follows.**
# A kernel that only reads, computes a little and writes needs no trick. It
# needs 16 bytes for each load, and enough loads before the first use. What is
# left to win lies around it: in copies that nobody needs, in what is kept, and
# in the products before and after.
#
# Backward, by hand
# -----------------
#
# The result is a product of two factors. So the gradient of each factor is
# ``dy`` times the other one, and the gate has the slope of its activation
# besides:
#
# .. math:: du = dy \, f(g), \qquad dg = dy \, u \, f'(g)
#
# For SiLU the slope is :math:`\sigma(g) \, (1 + g \, (1 - \sigma(g)))`. With
# our gate of 2 it is 0.881 · (1 + 2 · 0.119) = 1.091. If ``dy`` is 1, the
# gradient of the gate is 3 · 1.091 = 3.272, and that of the up projection is
# 1.762. Autograd agrees, in float64:

gate = torch.tensor([2.0, -2.0, 0.0, -20.0], dtype=torch.float64)
up = torch.full_like(gate, 3.0).requires_grad_()
gate.requires_grad_()
dgate, dup = torch.autograd.grad((F.silu(gate) * up).sum(), (gate, up))
with torch.no_grad():
    sigmoid = torch.sigmoid(gate)
    slope = sigmoid * (1 + gate * (1 - sigmoid))
    assert torch.allclose(dgate, up * slope)
    assert torch.allclose(dup, gate * sigmoid)
print("gradient of the gate:", [round(each, 3) for each in dgate.tolist()])
print("gradient of up:", [round(each, 3) for each in dup.tolist()])

# %%
# Both formulas need the gate, the up projection and ``dy``, and nothing else.
# The sigmoid is in none of the three, but it follows from the gate with four
# instructions. So the backward kernel computes it again. To have saved it
# would cost a matrix that is written, kept, and read.
#
# The kernel below can also compute ``y`` again, which will be of use later.
# What nobody wants is ``None``, and then its code is not even compiled.


@triton.jit
def _gate_bwd(
    dy_ptr,  # (M, N): the numbers of a row lie side by side, here and below
    gate_ptr,  # (M, N), from the forward pass
    up_ptr,  # (M, N), from the forward pass
    dgate_ptr,  # (M, N), or None if nobody wants it
    dup_ptr,  # the same
    y_ptr,  # (M, N), or None: y is computed again
    dy_stride,  # from a row to the next
    gate_stride,
    up_stride,
    grad_stride,  # of dgate and of dup
    y_stride,
    M,
    N,
    ACT: tl.constexpr,
    ONE_ROW: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row, column, mask = _place_of_tile(M, N, ONE_ROW, ROWS, COLUMNS)

    # Three loads before the first use.
    dy = tl.load(dy_ptr + row * dy_stride + column, mask=mask, other=0)
    gate = tl.load(gate_ptr + row * gate_stride + column, mask=mask, other=0)
    up = tl.load(up_ptr + row * up_stride + column, mask=mask, other=0)

    wide: tl.constexpr = gate.dtype == tl.float64
    acc: tl.constexpr = tl.float64 if wide else tl.float32
    dy = dy.to(acc)
    up = up.to(acc)
    value, slope = ACT(gate.to(acc))

    at = row * grad_stride + column
    if dgate_ptr is not None:
        tl.store(dgate_ptr + at, dy * up * slope, mask=mask)
    if dup_ptr is not None:
        tl.store(dup_ptr + at, dy * value, mask=mask)
    if y_ptr is not None:
        tl.store(y_ptr + row * y_stride + column, value * up, mask=mask)


def backward(dy, gate, up, dgate, dup, function, y=None):
    """Fill dgate, dup and y, matrices as in the forward pass, or None."""
    written = [t for t in (dgate, dup, y) if t is not None]
    if dy.numel() == 0 or not written:
        return
    M, N = rows_and_columns((dy, gate, up, *written))
    grad = dup if dgate is None else dgate
    tile = tile_for(N, dy.itemsize)
    across = triton.cdiv(N, tile["COLUMNS"])
    _gate_bwd[(triton.cdiv(M, tile["ROWS"]) * across,)](
        dy_ptr=dy,
        gate_ptr=gate,
        up_ptr=up,
        dgate_ptr=dgate,
        dup_ptr=dup,
        y_ptr=y,
        dy_stride=dy.stride(0),
        gate_stride=gate.stride(0),
        up_stride=up.stride(0),
        grad_stride=0 if grad is None else grad.stride(0),
        y_stride=0 if y is None else y.stride(0),
        M=M,
        N=N,
        ACT=function,
        ONE_ROW=M == 1,
        **tile,
    )


# %%
# A function to train with
# ------------------------
#
# What do we do with two halves in the backward pass?
#
# A user can split a tensor and call ``swiglu(*x.chunk(2, dim=-1))``. Nothing
# is copied forward. But autograd then has two gradients of two halves, and it
# must make one of them, that of ``x``. It allocates a tensor of 2 ``N``
# columns and copies both into it. That reads two matrices and writes two,
# nearly as much as our whole kernel moves.
#
# So our function also takes both halves as one tensor. Without ``up``, the
# first argument holds the gate and then the up projection. The backward pass
# allocates the gradient of the whole tensor, and hands its two halves to the
# kernel, which writes into them: it is told their stride.

# %%

# Drawing: who writes the gradient of a tensor of two halves.

figure = plt.figure(
    "Two ways to the gradient of a tensor of two halves. With two halves as "
    "two arguments, the kernel writes two tensors, and autograd copies both "
    "into one. With both halves as one argument, the kernel writes into the "
    "halves of one tensor.",
    figsize=(7.5, 2.6),
)
axes = figure.subplots(1, 2)
for side, title in zip(axes, ("two arguments", "one argument"), strict=True):
    side.set_title(title)
    side.axis((-0.2, 7.2, -2.2, 1.2))
    side.axis("off")
    for half in range(2):
        side.add_patch(
            plt.Rectangle((2 + 1.5 * half, -2), 1.4, 0.9, color=f"C{half}")
        )
    side.text(5.2, -1.55, "dx", va="center")
for half, name in enumerate(("dgate", "dup")):
    start = 0.6 + 4.4 * half
    axes[0].add_patch(plt.Rectangle((start, 0), 1.4, 0.9, color=f"C{half}"))
    axes[0].text(
        start + 0.7, 0.45, name, color="white", ha="center", va="center"
    )
    axes[0].annotate(
        "",
        (2.7 + 1.5 * half, -1.05),
        (start + 0.7, -0.05),
        arrowprops={"arrowstyle": "->"},
    )
axes[0].text(3.5, -0.5, "copies", ha="center", va="center")
axes[1].text(3.5, 0.45, "the kernel", ha="center", va="center")
for half in range(2):
    axes[1].annotate(
        "",
        (2.7 + 1.5 * half, -1.05),
        (3.1 + 0.8 * half, 0.2),
        arrowprops={"arrowstyle": "->"},
    )
plt.show()

# %%
# The autograd function saves what it was given, and nothing that it computed.
# Its two methods are called like our two functions above, and call them.


def halves(t):
    """The left and the right half of a matrix, as views."""
    N = t.shape[1] // 2
    return t[:, :N], t[:, N:]


def in_rows(t):
    """The matrix, or a copy, with the numbers of each row side by side."""
    if t.stride(1) == 1 or t.shape[1] == 1:
        return t
    return t.contiguous()


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up, function):
        """Matrices; without up, gate has both halves."""
        ctx.save_for_backward(gate, up)
        ctx.function = function
        if up is None:
            gate, up = halves(gate)
        y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
        forward(gate, up, y, function)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable  # no second derivatives
    def backward(ctx, dy):
        gate, up = ctx.saved_tensors
        wants_dgate, wants_dup, _ = ctx.needs_input_grad
        dy = in_rows(dy)
        like = {"dtype": dy.dtype, "device": dy.device}
        if up is None:
            # One gradient, and the kernel writes into its halves.
            dx = torch.empty(gate.shape, **like)
            backward(dy, *halves(gate), *halves(dx), ctx.function)
            return dx, None, None
        dgate = None
        dup = None
        if wants_dgate:
            dgate = torch.empty(gate.shape, **like)
        if wants_dup:
            dup = torch.empty(up.shape, **like)
        backward(dy, gate, up, dgate, dup, ctx.function)
        return dgate, dup, None


# %%

# Scaffold: which arguments are taken.


def check_arguments(gate, up):
    """Raise an error that names the wrong argument, and says why."""
    named = {"gate": gate}
    if up is not None:
        named["up"] = up
    for name, t in named.items():
        if not t.is_floating_point() or t.itemsize == 1:
            raise TypeError(
                f"{name} has {t.dtype}: floats of 16 bits or more are taken"
            )
        if t.dtype != gate.dtype:
            raise TypeError(
                f"{name} has {t.dtype}, and gate has {gate.dtype}: they must "
                "be the same"
            )
        if t.device.type != DEVICE.type:
            raise ValueError(f"{name} is on {t.device}, not on {DEVICE}")
        # Triton starts a kernel on the current GPU, wherever its tensors are.
        if t.is_cuda and t.device.index != torch.cuda.current_device():
            raise ValueError(
                f"{name} is on {t.device}, which is not the current GPU"
            )
    if up is not None and up.shape != gate.shape:
        raise ValueError(
            f"up is {tuple(up.shape)}, and gate is {tuple(gate.shape)}: they "
            "must be the same"
        )
    if up is None and (gate.dim() == 0 or gate.shape[-1] % 2):
        raise ValueError(
            f"gate is {tuple(gate.shape)}: without up it has both halves, so "
            "its last dimension must be even"
        )


def as_matrix(t):
    """Rows of the last dimension, each with its numbers side by side: a view
    where that is possible."""
    columns = t.shape[-1] if t.dim() else 1
    rows = t.shape[:-1].numel()
    return in_rows(t.reshape(rows, columns))


# %%


def gated(gate, up, function):
    """An activation of gate, times up; both passes run in Triton."""
    check_arguments(gate, up)
    shape = gate.shape
    if up is None:
        shape = (*shape[:-1], shape[-1] // 2)
    else:
        up = as_matrix(up)
    return _Gated.apply(as_matrix(gate), up, function).reshape(shape)


def swiglu(gate, up=None):
    """What F.silu(gate) * up gives.

    Both have the same shape and the same type, of 16 bits or more. Without
    up, the last dimension of gate holds both, first the gate.
    """
    return gated(gate, up, _silu)


def geglu(gate, up=None, approximate="none"):
    """What F.gelu(gate, approximate=approximate) * up gives; see swiglu."""
    functions = {"none": _gelu_short, "tanh": _gelu_tanh}
    if approximate not in functions:
        raise ValueError(
            f"approximate is {approximate!r}: 'none' and 'tanh' are taken"
        )
    return gated(gate, up, functions[approximate])


# %%
# Which inputs are copied? A matrix with the numbers of each row side by side
# is not, whatever the distance between two rows is. A transposed one is, and
# so is one that has every second column of another.
#
# Is it right? We compare each element with PyTorch's functions in float64. An
# activation adds a few roundings in float32, and the result is rounded once.

# %%

# Scaffold: a check of a gate against float64.


def gelu_tanh(x):
    return F.gelu(x, approximate="tanh")


def geglu_tanh(gate, up=None):
    return geglu(gate, up, approximate="tanh")


GATES = {
    "swiglu": (swiglu, F.silu),
    "geglu": (geglu, F.gelu),
    "geglu, tanh": (geglu_tanh, gelu_tanh),
}


def check(name, M, N, dtype):
    """Each element of y and of both gradients, in one tensor of halves."""
    function, activation = GATES[name]
    x = 3 * torch.randn(M, 2 * N, device=DEVICE)
    x = x.to(dtype).requires_grad_()
    dy = torch.randn(M, N, device=DEVICE).to(dtype)
    y = function(x)
    (dx,) = torch.autograd.grad(y, x, dy)

    x64 = x.detach().double().requires_grad_()
    gate, up = x64.chunk(2, dim=-1)
    exact = activation(gate) * up
    (exact_dx,) = torch.autograd.grad(exact, x64, dy.double())

    # In float32 an activation is off by a few units, and those of GELU are
    # units of its input, because it subtracts numbers near 1.
    few = 16 * torch.finfo(torch.float32).eps
    size = few * (1 + gate.detach().abs())
    scale = torch.cat((up.detach().abs(), torch.ones_like(up)), dim=1)
    for got, want, noise in (
        (y, exact, size * up.detach().abs()),
        (dx, exact_dx, dy.abs().repeat(1, 2) * size.repeat(1, 2) * scale),
    ):
        error = (got - want).abs()
        unit = torch.finfo(dtype).eps / 2
        if dtype == torch.bfloat16 and not ON_GPU:
            unit *= 2  # the interpreter cuts, and does not round
        allowed = unit * want.abs() + noise + 1e-30
        worst = (error / allowed).max().item()
        assert worst <= 1, f"{name}: {worst:.1f} times the allowed error"
    print(f"{name}, {dtype}: each element of both passes is right")


# %%

rows = 5  # few, because the interpreter is slow
if ON_GPU:
    rows = 1151
for name in GATES:
    for dtype in (torch.bfloat16, torch.float32):
        check(name, rows, 200, dtype)

# %%
# What about infinities and NaN? A NaN in the gate or in the up projection
# becomes a NaN in ``y``. And a gate of minus infinity gives NaN with all three
# activations, as it does in PyTorch: minus infinity times a sigmoid of 0 is
# not a number. Large finite numbers are no problem: at -1e30 the sigmoid is 0,
# and so are the value and the slope.

gate = torch.tensor(
    [-float("inf"), float("nan"), -1e30, -100.0, 1e30], device=DEVICE
)
for name, (function, activation) in GATES.items():
    y = function(gate, torch.ones_like(gate))
    print(f"{name}: {y.tolist()}")
    assert torch.allclose(y, activation(gate), equal_nan=True)

# %%
# How fast is the backward pass?
# ------------------------------
#
# The ceiling reads three matrices and writes two. Liger needs a word of
# warning: its backward pass writes both gradients over the gate and the up
# projection. That saves the memory of two matrices, and it moves as many bytes
# as we do.

# %%

# Scaffold: SwiGLU backward, a benchmark.


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=SIZES,
        x_log=True,
        xlabel="N (columns)",
        line_arg="provider",
        line_vals=[*NAMES, "copy"],
        line_names=[*NAMES.values(), "Copy"],
        ylabel="GB/s",
        plot_name="swiglu-backward",
        args={"M": 8192, "dtype": torch.bfloat16, "mode": "backward"},
    )
)
def bench_backward(M, N, dtype, mode, provider):
    """Device time: a CUDA graph of several calls, each with inputs of its own
    and after L2 was overwritten, less the graph without the calls; median, 20%
    and 80% quantiles. Copy: the best of six tiles."""
    if not ON_GPU:
        return 3 * [float("nan")]
    if provider == "copy":
        return copy_speed(M, N, dtype, mode)
    if provider == "torch.compile":
        return compiled_speeds(M, N, dtype)[mode]
    calls = {"triton": swiglu, "torch": pytorch, "liger": liger}
    return speed_of(calls[provider], M, N, dtype, mode)


# %%

report(bench_backward)

# %%
# **What the figure shows.**
# On the H200 our backward pass reaches 94% of a copy at a million elements,
# and 94% to 100% over all sizes. PyTorch reaches 47% to 56%, torch.compile 92%
# to 100%, and Liger 69% to 102%. At 512 columns Liger is ahead: it reaches
# 99%, and we reach 95%. torch.compile falls behind at 14336 columns.
#
# **Why.**
# PyTorch moves nine matrices in place of five. From DRAM, that leaves it 56%
# of a copy at most. The others move what we move.
#
# Liger writes where it has just read. So three matrices have to find room in
# L2, and not five. That may be why it is ahead at 512 columns, but we have not
# counted it. Nor do we know what torch.compile has chosen at 14336 columns.
#
# **What follows.**
# The backward pass is as fast as its bytes, too, although it computes the
# sigmoid once more. So there was no reason to save one.
#
# Do we really move no more than we have counted? NVIDIA's profiler ``ncu``
# counts the bytes that go to and from DRAM.

# %%

# Scaffold: bytes of the backward pass, counted by ncu.


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=[2048, 8192, 14336],
        x_log=True,
        xlabel="N (columns)",
        line_arg="provider",
        line_vals=["triton", "by hand", "torch", "torch by hand"],
        line_names=["Triton", "by hand", "PyTorch", "PyTorch, by hand"],
        ylabel="MB of DRAM",
        plot_name="swiglu-backward-traffic",
        args={
            "M": 8192,
            "dtype": torch.bfloat16,
            "mode": "backward",
            "counter": "dram__bytes.sum",
        },
    )
)
def bench_traffic(M, N, dtype, mode, counter, provider):
    """What moves to and from DRAM in a backward pass, all kernels together;
    by hand, five matrices or nine."""
    if not ON_GPU:
        return 3 * [float("nan")]
    if provider.endswith("by hand"):
        matrices = 9 if provider.startswith("torch") else 5
        return matrices * M * N * dtype.itemsize / 1e6
    function = {"triton": swiglu, "torch": pytorch}[provider]
    gate, up, dy = inputs(M, N, dtype)
    y = function(gate, up)

    def run():
        return torch.autograd.grad(y, (gate, up), dy, retain_graph=True)

    run()  # compiles
    torch.cuda.synchronize()
    with torch.cuda.nvtx.range(f"counted {provider} {N} per 1e6"):
        run()
    return (float("nan"),) * 3


# %%

bench_traffic.run(show_plots=ON_GPU)

# %%
# **What the figure shows.**
# On the H200, at 14336 columns, our backward pass moves 1152 MB, and we have
# counted 1174. PyTorch moves 2059 MB, and by hand it is 2114.
#
# **Why.**
# A kernel may move a little less than counted: what it writes last is still in
# L2 when it ends, and an L2 of 60 MB can keep a good part of a small matrix.
# Of PyTorch's three kernels, the last one may find in L2 what the one before
# has just written.
#
# **What follows.**
# To count matrices is enough. Nothing is read twice, and a faster kernel would
# have to move less.
#
# Two halves of one tensor, both passes
# -------------------------------------
#
# What does it cost to read halves where they lie, and what does the copy of
# autograd cost? We measure with the halves as they come from one product.
# Forward, ``chunk`` copies nothing, so there is one line of ours; backward
# there are both forms.

# %%

# Scaffold: halves in both passes, two benchmarks.


def in_halves(x):
    return swiglu(*x.chunk(2, dim=-1))


def pytorch_in_halves(x):
    return pytorch(*x.chunk(2, dim=-1))


HALVES = {
    "triton": (swiglu, "Triton"),
    "chunk": (in_halves, "Triton, with chunk"),
    "torch": (pytorch_in_halves, "PyTorch"),
}


def speed_of_halves(M, N, dtype, mode, provider):
    """GB/s of a pass, by the bytes of three matrices or of five."""
    if provider == "copy":
        return copy_speed(M, N, dtype, mode)
    function, _ = HALVES[provider]

    def prepare():
        x = torch.randn(M, 2 * N, device=DEVICE).to(dtype)
        if mode == "forward":
            return lambda: function(x)
        x.requires_grad_()
        dy = torch.randn(M, N, device=DEVICE).to(dtype)
        y = function(x)
        return lambda: torch.autograd.grad(y, x, dy, retain_graph=True)

    matrices = {"forward": 3, "backward": 5}[mode]
    return speed(matrices * M * N * dtype.itemsize, prepare)


def benchmark_of_halves(mode, names):
    return triton.testing.Benchmark(
        x_names=["N"],
        x_vals=SIZES,
        x_log=True,
        xlabel="N (columns of a half)",
        line_arg="provider",
        line_vals=[*names, "copy"],
        line_names=[*(HALVES[name][1] for name in names), "Copy"],
        ylabel="GB/s",
        plot_name=f"swiglu-halves-{mode}",
        args={"M": 8192, "dtype": torch.bfloat16, "mode": mode},
    )


@triton.testing.perf_report(
    benchmark_of_halves("forward", ["triton", "torch"])
)
def bench_halves_forward(M, N, dtype, mode, provider):
    """Device time: a CUDA graph of several calls, each with inputs of its own
    and after L2 was overwritten, less the graph without the calls; median, 20%
    and 80% quantiles. Copy: the best of six tiles."""
    if not ON_GPU:
        return 3 * [float("nan")]
    return speed_of_halves(M, N, dtype, mode, provider)


@triton.testing.perf_report(benchmark_of_halves("backward", list(HALVES)))
def bench_halves(M, N, dtype, mode, provider):
    """Device time: a CUDA graph of several calls, each with inputs of its own
    and after L2 was overwritten, less the graph without the calls; median, 20%
    and 80% quantiles. Copy: the best of six tiles."""
    if not ON_GPU:
        return 3 * [float("nan")]
    return speed_of_halves(M, N, dtype, mode, provider)


# %%

report(bench_halves_forward)

# %%

report(bench_halves)

# %%
# **What both figures show.**
# On the H200, with both halves as one tensor, our forward pass reaches 95% of
# a copy at 128 columns and 100% at 14336, and PyTorch 37% and 26%. Our
# backward pass reaches 95% of a copy at 128 columns and 101% at 14336. With
# ``chunk`` it reaches 58% and 54%, and PyTorch, which needs ``chunk``, reaches
# 27% and 26%.
#
# **Why.**
# Forward, our kernel moves three matrices, wherever they lie. Only at 2048
# columns is there a difference beyond the quantiles: it reaches 97% of a copy,
# and with two tensors 99%. PyTorch moves five matrices, as with two tensors,
# which leaves 60%. But its kernels handle a number at a time where the rows of
# a matrix have gaps, so that at 14336 columns they take 2.1 times as long as
# with two tensors.
#
# Backward, with ``chunk`` nine matrices move and not five, which leaves 56% of
# a copy, or a little more where they are small enough to stay in L2. In
# PyTorch thirteen move, which leaves 38%, and its kernels meet the same gaps.
#
# With one tensor our kernel moves five, as it does with two tensors. Its rows
# have gaps now. A tile is a part of a row, or at 128 columns it is four rows,
# and each part of a row still begins at a multiple of 16 bytes.
#
# **What follows.**
# An operation that is memory-bound should take its inputs where they lie, and
# write its gradients where they are wanted.
#
# What does the activation cost?
# ------------------------------
#
# GELU takes more instructions than SiLU. Does one see that? We also measure
# the GELU with ``tl.erf``, which we did not take.

# %%

# Scaffold: four activations, two benchmarks.


def geglu_erf(gate, up):
    return gated(gate, up, _gelu)


WITH_ACTIVATIONS = {
    "swiglu": swiglu,
    "geglu": geglu,
    "geglu, erf": geglu_erf,
    "geglu, tanh": geglu_tanh,
}


def functions_benchmark(mode):
    return triton.testing.Benchmark(
        x_names=["N"],
        x_vals=[128, 2048, 14336],
        x_log=True,
        xlabel="N (columns)",
        line_arg="provider",
        line_vals=["swiglu", "geglu", "geglu, erf", "geglu, tanh", "copy"],
        line_names=["SwiGLU", "GEGLU", "GEGLU, erf", "GEGLU, tanh", "Copy"],
        ylabel="GB/s",
        plot_name=f"gates-{mode}",
        args={"M": 8192, "dtype": torch.bfloat16, "mode": mode},
    )


@triton.testing.perf_report(functions_benchmark("forward"))
def bench_gates_forward(M, N, dtype, mode, provider):
    """Device time: a CUDA graph of several calls, each with inputs of its own
    and after L2 was overwritten, less the graph without the calls; median, 20%
    and 80% quantiles. Copy: the best of six tiles."""
    if not ON_GPU:
        return 3 * [float("nan")]
    if provider == "copy":
        return copy_speed(M, N, dtype, mode)
    return speed_of(WITH_ACTIVATIONS[provider], M, N, dtype, mode)


@triton.testing.perf_report(functions_benchmark("backward"))
def bench_gates_backward(M, N, dtype, mode, provider):
    """Device time: a CUDA graph of several calls, each with inputs of its own
    and after L2 was overwritten, less the graph without the calls; median, 20%
    and 80% quantiles. Copy: the best of six tiles."""
    if not ON_GPU:
        return 3 * [float("nan")]
    if provider == "copy":
        return copy_speed(M, N, dtype, mode)
    return speed_of(WITH_ACTIVATIONS[provider], M, N, dtype, mode)


# %%

report(bench_gates_forward)

# %%

report(bench_gates_backward)

# %%
# **What both figures show.**
# On the H200, at 14336 columns, SwiGLU reaches 100% of a copy forward and 100%
# backward, GEGLU 100% and 101%, and its form with tanh 100% and 101%. With
# ``tl.erf`` GEGLU reaches 87% and 98%.
#
# At a million elements the three that we took are at 100% to 102% forward and
# 94% to 95% backward. SwiGLU is one of them, and in the figures above the same
# kernels were at 103% and 94% there. So up to three percent mean nothing
# there, not even where a kernel beats the copy by as much.
#
# **Why.**
# A kernel that waits for memory has time for instructions, up to a point. In
# each clock an SM can begin four of them, each for the 32 threads of a warp.
# The highest clock of an H200 is 1.98 GHz, so its 132 SMs begin at most 33.5 ·
# 10¹² instructions of single threads in a second. In the forward pass an
# element has six bytes, and 4.3 TB/s, the speed of a copy, bring 0.717 · 10¹²
# elements in a second. So there is time for at most 47 instructions for each
# element. In the backward pass it has ten bytes, and there is time for 78.
#
# Compiled for this GPU, the forward kernel has about 40 instructions for each
# element with ``tl.erf``, which leaves little time to wait for anything. With
# our formula there are about 23, with tanh 18, and with SiLU 13. In the
# backward pass there are about 57 with ``tl.erf``, and 32 with our formula.
#
# **What follows.**
# At the speed of a copy, instructions are cheap, but they are not free. Once
# the bytes are as few as they can be, count instructions.
#
# What must an MLP keep?
# ----------------------
#
# So far we have looked at the gate alone. Its neighbors are products, and they
# keep matrices as well. Let ``x`` have ``K`` columns. The MLP is
#
# .. math:: h = x \, W^T, \qquad y = f(g) \, u, \qquad z = y \, D^T
#
# where :math:`h` is the gate :math:`g` and the up projection :math:`u` side by
# side, and :math:`W` has 2 ``N`` rows. What does each step need for its
# gradients?
#
# - The first product needs ``x`` and the weight.
# - The gate needs ``g`` and ``u``. PyTorch's two functions also keep the SiLU
#   of ``g``.
# - The last product needs ``y`` and the weight ``D``. The gradient of ``D`` is
#   :math:`dz^T y`.
#
# So ``y`` is kept because of the last product. But it follows from ``g`` and
# ``u``, which the backward kernel of the gate reads anyway. It can write ``y``
# again while it is at it. That is one matrix more to write in the backward
# pass, and one less to keep between the passes. We could go on and keep ``x``
# alone. Then ``h`` would have to be computed again as well, and that is a
# product: two ninths of the arithmetic of a whole step once more, as we shall
# count.

# %%

# Drawing: what an MLP keeps between its passes.

plt.figure(
    "What an MLP keeps. PyTorch: x, gate, up, SiLU of the gate, and y. With "
    "one kernel for the gate: x, gate, up and y. If y is computed again: x, "
    "gate and up. If the first product is computed again: x alone.",
    figsize=(7.5, 2.6),
)
kept = (
    ("PyTorch", ("x", "gate", "up", "silu", "y")),
    ("one kernel", ("x", "gate", "up", "y")),
    ("y again", ("x", "gate", "up")),
    ("the product again", ("x",)),
)
widths = {"x": 4096, "gate": 14336, "up": 14336, "silu": 14336, "y": 14336}
colors = {"x": "C0", "gate": "C1", "up": "C2", "silu": "C3", "y": "C4"}
for i, (_, matrices) in enumerate(kept):
    start = 0
    for name in matrices:
        megabytes = 8192 * widths[name] * 2 / 1e6
        plt.barh(-i, megabytes, 0.8, start, color=colors[name], ec="white")
        plt.text(
            start + megabytes / 2,
            -i,
            name,
            color="white",
            ha="center",
            va="center",
        )
        start += megabytes
plt.yticks(range(0, -4, -1), [name for name, _ in kept])
plt.xlabel("MB for 8192 tokens, in 16 bits")
plt.show()

# %%
# Here is the MLP as one autograd function. Its products are PyTorch's.


def product_then_gate(x, weight):
    """h and y, by a product of PyTorch and the kernel of the gate."""
    h = x @ weight.T
    N = weight.shape[0] // 2
    y = torch.empty(x.shape[0], N, dtype=x.dtype, device=x.device)
    forward(*halves(h), y, _silu)
    return h, y


class _SwigluMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, down, first):
        """first gives h and y, of x and weight."""
        h, y = first(x, weight)
        ctx.save_for_backward(x, weight, down, h)  # and not y
        return y @ down.T

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dz):
        x, weight, down, h = ctx.saved_tensors
        wants_dx, wants_dweight, wants_ddown, _ = ctx.needs_input_grad
        dy = dz @ down
        dh = torch.empty_like(h)
        y = None
        if wants_ddown:
            y = torch.empty_like(dy)
        backward(dy, *halves(h), *halves(dh), _silu, y)
        ddown = None
        if wants_ddown:
            ddown = dz.T @ y
        del y, dy  # their memory may serve what comes now
        dx = None
        if wants_dx:
            dx = dh @ weight
        dweight = None
        if wants_dweight:
            dweight = dh.T @ x
        return dx, dweight, ddown, None


def swiglu_mlp(x, weight, down, first=product_then_gate):
    """swiglu(x @ weight.T) @ down.T, of matrices of the same type."""
    return _SwigluMLP.apply(x, weight, down, first)


def plain_mlp(x, weight, down):
    """The same as it is written in a model."""
    gate, up = (x @ weight.T).chunk(2, dim=-1)
    return pytorch(gate, up) @ down.T


def mlp_that_keeps_y(x, weight, down):
    return swiglu(x @ weight.T) @ down.T


def liger_mlp(x, weight, down):
    """Liger has the gate and the up projection apart, as Llama has."""
    gate_weight, up_weight = weight.chunk(2)
    return liger(x @ gate_weight.T, x @ up_weight.T) @ down.T


def mlp_inputs(M, N, K, dtype):
    """x, both weights, and dz. Sums have a size near 1."""
    x = torch.randn(M, K, device=DEVICE)
    weight = torch.randn(2 * N, K, device=DEVICE) * K**-0.5
    down = torch.randn(K, N, device=DEVICE) * N**-0.5
    dz = torch.randn(M, K, device=DEVICE)
    found = [t.to(dtype) for t in (x, weight, down, dz)]
    for t in found[:3]:
        t.requires_grad_()
    return found


def check_mlp(function, M, N, K, dtype):
    """Compare z and all gradients with PyTorch's in float64."""
    x, weight, down, dz = mlp_inputs(M, N, K, dtype)
    z = function(x, weight, down)
    ours = (z, *torch.autograd.grad(z, (x, weight, down), dz))
    wide = [t.detach().double().requires_grad_() for t in (x, weight, down)]
    z = plain_mlp(*wide)
    exact = (z, *torch.autograd.grad(z, wide, dz.double()))
    for name, got, want in zip(
        ("z", "dx", "dweight", "ddown"), ours, exact, strict=True
    ):
        error = ((got - want).norm() / want.norm()).item()
        # Some results in between were rounded to 16 bits.
        assert error < 4 * torch.finfo(dtype).eps, f"{name}: {error:.1e}"
    print(f"{M} x {K} and {N} features, {dtype}: both passes are right")


check_mlp(swiglu_mlp, 20, 24, 40, torch.float16)
check_mlp(mlp_that_keeps_y, 20, 24, 40, torch.float16)

# %%
# How much memory does a forward pass leave behind? That is what counts in a
# model of many layers, for all of them leave it there until the backward pass
# comes. We count the output of the MLP, too. ``x`` and the weights were there
# before, so nobody pays for them here.

# %%

# Scaffold: what a forward pass keeps, a benchmark.

MLPS = {
    "triton": swiglu_mlp,
    "keeps y": mlp_that_keeps_y,
    "torch": plain_mlp,
    "liger": liger_mlp,
}
MLP_NAMES = {
    "triton": "Triton, y again",
    "keeps y": "Triton, keeps y",
    **{name: label for name, label in NAMES.items() if name != "triton"},
}


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=[4096, 14336],
        xlabel="N (columns of the gate)",
        line_arg="provider",
        line_vals=list(MLP_NAMES),
        line_names=list(MLP_NAMES.values()),
        ylabel="GB of memory",
        plot_name="swiglu-mlp-memory",
        args={
            "M": 8192,
            "K": 4096,
            "dtype": torch.bfloat16,
            "mode": "forward",
        },
    )
)
def bench_memory(M, N, K, dtype, mode, provider):
    """What a forward pass of an MLP leaves allocated, its output included, by
    torch.cuda.memory_allocated."""
    if not ON_GPU:
        return 3 * [float("nan")]
    x, weight, down, _ = mlp_inputs(M, N, K, dtype)
    if provider == "torch.compile":
        torch._dynamo.reset()  # nothing is left of other shapes
        function = torch.compile(plain_mlp, dynamic=False)
    else:
        function = MLPS[provider]
    function(x, weight, down)  # compiles
    before = torch.cuda.memory_allocated()
    z = function(x, weight, down)
    kept_bytes = torch.cuda.memory_allocated() - before
    del z
    return 3 * [kept_bytes / 1e9]


# %%

bench_memory.run(show_plots=ON_GPU)

# %%
# **What the figure shows.**
# On the H200, at 14336 columns, our MLP that computes ``y`` again keeps 0.54
# GB, and the one that keeps ``y`` 0.77 GB. PyTorch keeps 1.01 GB,
# torch.compile 0.77 GB, and Liger 0.77 GB.
#
# **Why.**
# Each matrix of ``M`` × ``N`` numbers has 0.23 GB here. PyTorch keeps four of
# them: the gate, the up projection, the SiLU and ``y``. Who computes the SiLU
# again keeps three, and we keep two. (The output has 0.07 GB.)
#
# **What follows.**
# Keep what is expensive to compute again, and what must be there anyway. What
# a few instructions make of it is cheaper to compute than to keep.
#
# In the product before
# ---------------------
#
# The gate reads what a product has just written. Could the product do its work
# before it writes?
#
# `A linear layer, both passes <01-linear.html>`_ puts an activation behind the
# sums of a product, into what is called its *epilogue*: the sums are in
# registers there. A gate needs two of them for each element of ``y``, that of
# the gate and that of the up projection, for the same token and the same
# feature. So a program has to compute two tiles, and the rows of the weight
# that belong to them lie ``N`` rows apart.
#
# Two products with two tiles of sums would do. But the Tensor Cores read their
# operands from shared memory, so they would read the tile of ``x`` twice. An
# instruction multiplies 64 rows of it by up to 256 rows of the weight. With
# 128 rows of the gate's part and then 128 of up's, two instructions read 64 +
# 128 rows each, which are 384. A single one with all 256 reads 64 + 256 =
# 320, a sixth less, and computes the same. So we want both tiles of the weight
# side by side.
#
# A tensor descriptor brings them together. It may have three dimensions: we
# take the weight as a tensor of 2 × ``N`` × ``K`` and ask for tiles of 2 ×
# ``TILE_N`` × ``TILE_K``. Then the TMA, which fetches them, writes the rows of
# the gate's part into shared memory and those of up's right behind them. The
# weight stays as it is in the model.
#
# Let's count the matrices of ``M`` × ``N`` numbers that move.
#
# - **Product, then gate:** the product writes two, and the gate reads two and
#   writes one. That is five.
# - **Fused, for inference:** only ``y`` is written. That is one.
# - **Fused, to train with:** the backward pass needs ``g`` and ``u``, so they
#   are written as well. That is three.
#
# How much time is in that? The product has 2 ``N`` columns, so it takes 4
# ``M`` ``N`` ``K`` operations. With 8192 tokens, 14336 features and ``K`` =
# 4096 these are 1.92 · 10¹². At 700 TFLOP/s, which cuBLAS may reach on an
# H200, they take 2.7 ms. To write a matrix of 235 MB takes 0.05 ms, and so
# does it to read one. So training can gain 0.1 ms, or 4% of the product, and
# inference 0.2 ms. A kernel that is slower than cuBLAS by more than that
# loses.
#
# The rest is as in the linear layer. Its programs are *persistent*: there are
# as many as SMs, each takes one tile after the other, and the loads of the
# next tile begin while this one is stored. Tiles are computed in groups of
# some rows of tiles, so that programs that run at the same time share what
# they fetch.

# %%

# Scaffold: the order of tiles, and descriptors.


@triton.jit
def _place(tile, rows, columns, GROUP: tl.constexpr):
    """Row and column of a tile, by its number: groups of so many rows of
    tiles, and in a group column by column."""
    first = tile // (GROUP * columns) * GROUP
    # The last group may have fewer rows.
    height = tl.minimum(rows - first, GROUP)
    place = tile % (GROUP * columns)
    return first + place % height, place // height


GPU = torch.cuda.get_device_properties(DEVICE) if ON_GPU else None
NUM_SMS = GPU.multi_processor_count if ON_GPU else 4


def shared_memory():
    """Bytes that a program can have; without a GPU, those of an H200."""
    if not ON_GPU:
        return 232448
    return getattr(GPU, "shared_memory_per_block_optin", 65536)


SHARED = shared_memory()


def lies_in_rows(t):
    """Whether a descriptor takes it: numbers of a row side by side, and each
    row at a multiple of 16 bytes."""
    step = t.stride(0) * t.itemsize
    aligned = t.data_ptr() % 16 == 0 and step % 16 == 0
    return aligned and t.stride(1) == 1 and step > 0


# %%


@triton.jit
def _gated_product(
    x_desc,  # (M, K) in tiles of TILE_M and TILE_K
    weight_desc,  # (2, N, K) in tiles of 2, TILE_N and TILE_K
    y_desc,  # (M, N) in tiles of TILE_M and TILE_N
    gate_desc,  # the same: the gate, for the backward pass; or None
    up_desc,  # the same
    M,
    N,
    K,
    ACT: tl.constexpr,
    TILE_M: tl.constexpr,  # tokens of a tile
    TILE_N: tl.constexpr,  # features of a tile
    TILE_K: tl.constexpr,  # columns of x in a step
    GROUP: tl.constexpr,  # rows of tiles in a group
    STAGES: tl.constexpr,  # num_stages of the inner loop
):
    # Without this promise the compiler would also write code for K = 0.
    tl.assume(K > 0)
    rows = tl.cdiv(M, TILE_M)
    columns = tl.cdiv(N, TILE_N)

    # ``flatten`` makes one loop of both loops, so that loads of the next tile
    # begin before this one is done.
    for work in tl.range(
        tl.program_id(0), rows * columns, tl.num_programs(0), flatten=True
    ):
        row, column = _place(work, rows, columns, GROUP)
        row *= TILE_M
        column *= TILE_N

        # Sums of both tiles, side by side: first the gate's, then up's.
        sums = tl.zeros((TILE_M, 2 * TILE_N), tl.float32)
        for k in tl.range(0, K, TILE_K, num_stages=STAGES):
            x = x_desc.load([row, k])
            # The same features of both parts of the weight, as one tile.
            weight = weight_desc.load([0, column, k])
            weight = weight.reshape(2 * TILE_N, TILE_K)
            # The weight has a row for each feature, so its tile is turned.
            sums = tl.dot(x, weight.T, sums)

        # tl.split takes apart the two numbers of a last dimension of two.
        both = sums.reshape(TILE_M, 2, TILE_N).permute(0, 2, 1)
        gate, up = both.split()

        # The epilogue: the gate, on sums that were never rounded.
        value, _ = ACT(gate)
        y_desc.store([row, column], (value * up).to(y_desc.dtype))
        if gate_desc is not None:
            gate_desc.store([row, column], gate.to(gate_desc.dtype))
            up_desc.store([row, column], up.to(up_desc.dtype))


# %%
# A tile of 128 × 256 sums in float32 takes 128 KB of the 256 KB of registers
# that an SM has. A stage of the loop has 128 rows of ``x`` and 256 rows of the
# weight, 64 columns each. These are 48 KB, and four stages fit beside a tile
# of results.
#
# With few tokens most rows of such a tile would be empty, so then it has 64
# rows. And where there are so few tiles that half of the SMs would have none,
# tiles of 64 features make twice as many.


def plan_product(M, N, dtype):
    """Tiles of the product, and as many stages, at most five, as the shared
    memory has room for."""
    if SHARED < 200_000:
        # Without a TMA, threads compute an address for each number.
        tile_m, tile_n, tile_k, warps = 64, 64, 32, 8
    else:
        tile_m, tile_n, tile_k, warps = 128, 128, 64, 8
        if M <= 64:
            tile_m, warps = 64, 4
        tiles = triton.cdiv(M, tile_m) * triton.cdiv(N, tile_n)
        if tiles <= NUM_SMS // 2:
            tile_n, warps = 64, 4
    stage = (tile_m + 2 * tile_n) * tile_k * dtype.itemsize
    room = SHARED - 1024 - tile_m * tile_n * dtype.itemsize
    return {
        "TILE_M": tile_m,
        "TILE_N": tile_n,
        "TILE_K": tile_k,
        "GROUP": 16,
        "STAGES": max(1, min(5, room // stage)),
        "num_warps": warps,
    }


def fused(x, weight, keeps_h=True):
    """h and y, by one kernel; h is None if it is not kept."""
    M, K = x.shape
    N = weight.shape[0] // 2
    y = torch.empty(M, N, dtype=x.dtype, device=x.device)
    plan = plan_product(M, N, x.dtype)
    tile_m, tile_n, tile_k = plan["TILE_M"], plan["TILE_N"], plan["TILE_K"]

    def descriptor(t, *tile):
        return TensorDescriptor.from_tensor(t, list(tile))

    h = None
    gate_desc = None
    up_desc = None
    if keeps_h:
        h = torch.empty(M, 2 * N, dtype=x.dtype, device=x.device)
        gate_desc = descriptor(h[:, :N], tile_m, tile_n)
        up_desc = descriptor(h[:, N:], tile_m, tile_n)
    tiles = triton.cdiv(M, tile_m) * triton.cdiv(N, tile_n)
    _gated_product[(min(tiles, NUM_SMS),)](
        x_desc=descriptor(x, tile_m, tile_k),
        weight_desc=descriptor(weight.view(2, N, K), 2, tile_n, tile_k),
        y_desc=descriptor(y, tile_m, tile_n),
        gate_desc=gate_desc,
        up_desc=up_desc,
        M=M,
        N=N,
        K=K,
        ACT=_silu,
        **plan,
    )
    return h, y


def fused_or_apart(x, weight):
    """fused, where descriptors take all matrices, which must have 16 bits and
    rows of a multiple of 16 bytes; otherwise product_then_gate."""
    N = weight.shape[0] // 2
    takes_descriptors = (
        x.numel() > 0
        and x.itemsize == 2
        and N % 8 == 0
        and lies_in_rows(x)
        and lies_in_rows(weight)
    )
    if takes_descriptors:
        return fused(x, weight)
    return product_then_gate(x, weight)


def swiglu_mlp_fused(x, weight, down):
    """swiglu_mlp, with the gate in the product before it."""
    return swiglu_mlp(x, weight, down, first=fused_or_apart)


check_mlp(swiglu_mlp_fused, 150, 136, 72, torch.float16)
check_mlp(swiglu_mlp_fused, 20, 136, 72, torch.float16)

# %%
# How fast is the fused product?
# ------------------------------
#
# We count the 4 ``M`` ``N`` ``K`` operations of the product, and give nobody
# credit for the gate. The dashed line is cuBLAS, which PyTorch calls for the
# product, without any gate. A card that has just worked hard lowers its clock,
# so all lines take turns.

# %%

# Scaffold: the clock in turns, from page 01 of attention.


def in_turns(calls):
    """µs of each call on the GPU: median, 20% and 80% quantiles.

    ``calls`` are functions by their names. Each is recorded as a CUDA graph
    that overwrites L2 and makes the call, and one more only overwrites L2.
    The graphs are replayed in turns; what the last one takes is subtracted.
    """
    larger_than_l2 = torch.empty(2**28, dtype=torch.int8, device=DEVICE)

    def recorded(call):
        call()  # compiles the kernels
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            larger_than_l2.zero_()
            result = call()
        graph.replay()  # the first replay takes longer
        return graph, result  # the memory of the result stays its own

    def elapsed(graph):
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        return 1000 * start.elapsed_time(end)

    graphs = {name: recorded(call) for name, call in calls.items()}
    without, _ = recorded(lambda: None)
    times = {name: [] for name in graphs}
    for _ in range(15):
        for name, (graph, _) in graphs.items():
            times[name].append(elapsed(graph) - elapsed(without))
    found = {}
    for name, each in times.items():
        each.sort()
        found[name] = each[7], each[3], each[11]
    return found


# %%

# Scaffold: the fused product, three benchmarks.


def compiled_anew(function):
    """A function of PyTorch, compiled once more.

    torch.compile tries several forms of a kernel and keeps the fastest. Which
    one that is can depend on luck, so it chooses three times.
    """
    # A choice is not kept on disk, nor in memory.
    torch._inductor.config.autotune_local_cache = False
    torch._inductor.utils.clear_caches()
    # We run a backward pass many times, so torch.compile must not reuse the
    # memory of what the forward pass saved for it.
    torch._functorch.config.donated_buffer = False
    # It knows a function by its code, so each time that is a copy.
    code = function.__code__.replace()
    copy = types.FunctionType(code, function.__globals__)
    return torch.compile(copy, dynamic=False)


def tflops_in_turns(operations, calls, compiled):
    """TFLOP/s of all calls, and of the best of those that were compiled."""
    compiled = {f"compiled {i}": call for i, call in enumerate(compiled)}
    found = {
        name: [operations / us * 1e-6 for us in (median, long, short)]
        for name, (median, short, long) in in_turns(calls | compiled).items()
    }
    if compiled:
        found["torch.compile"] = max(found[name] for name in compiled)
    return found


def plain_first_half(x, weight):
    gate, up = (x @ weight.T).chunk(2, dim=-1)
    return pytorch(gate, up)


@functools.cache  # all lines in turns; then each is asked for its own
def first_half_speeds(M, N, K, dtype, compilations):
    """The first product and the gate; all keep what they need to train."""
    x, weight, _, _ = mlp_inputs(M, N, K, dtype)
    given = x.detach(), weight.detach()
    calls = {
        "triton": lambda: fused(*given),
        "inference": lambda: fused(*given, keeps_h=False),
        "apart": lambda: product_then_gate(*given),
        "torch": lambda: plain_first_half(x, weight),
        "cublas": lambda: given[0] @ given[1].T,
    }
    compiled = []
    for _ in range(compilations):
        function = compiled_anew(plain_first_half)
        function(x, weight)  # chooses
        compiled.append(functools.partial(function, x, weight))
    return tflops_in_turns(4 * M * N * K, calls, compiled)


FIRST_HALF = {
    "triton": "fused",
    "inference": "fused, for inference",
    "apart": "product, then gate",
    "torch": "PyTorch",
    "torch.compile": "torch.compile",
    "cublas": "cuBLAS, product alone",
}


FEW_TOKENS = {
    name: label
    for name, label in FIRST_HALF.items()
    if name != "torch.compile"
}


def first_half_benchmark(plot_name, sizes, lines=FIRST_HALF, **args):
    return triton.testing.Benchmark(
        x_names=["N"],
        x_vals=sizes,
        x_log=True,
        line_arg="provider",
        line_vals=list(lines),
        line_names=list(lines.values()),
        ylabel="TFLOP/s",
        plot_name=plot_name,
        args={**args, "dtype": torch.bfloat16},
        xlabel="N (tokens)" if "features" in args else "N (columns of a half)",
    )


def in_percent(benchmark, of):
    """Draw a benchmark, and print each speed in % of that of another line."""
    table = benchmark.run(show_plots=ON_GPU, return_df=True)
    table = table.astype({"N": int}).set_index("N")
    table.columns = [column.split(" (")[0] for column in table.columns]
    if table.isna().all(axis=None):
        print("Timing needs a GPU; the page shows recorded figures.")
        return
    percent = 100 * table.div(table[of], axis="index")
    print(f"speed in % of {of}")
    print(percent.drop(columns=of).to_string(float_format="%.0f"))


@triton.testing.perf_report(
    first_half_benchmark(
        "swiglu-fused", [2048, 8192, 14336], M=8192, K=4096, mode="forward"
    )
)
def bench_fused(M, N, K, dtype, mode, provider):
    """All lines in turns, 15 times, each a CUDA graph that overwrites L2
    first; the time of a graph that only overwrites L2 is subtracted.
    torch.compile: the best of three compilations."""
    if not ON_GPU:
        return 3 * [float("nan")]
    return first_half_speeds(M, N, K, dtype, compilations=3)[provider]


@triton.testing.perf_report(
    first_half_benchmark(
        "swiglu-fused-narrow", [1024, 4096], M=8192, K=1024, mode="forward"
    )
)
def bench_fused_narrow(M, N, K, dtype, mode, provider):
    """All lines in turns, 15 times, each a CUDA graph that overwrites L2
    first; the time of a graph that only overwrites L2 is subtracted.
    torch.compile: the best of three compilations."""
    if not ON_GPU:
        return 3 * [float("nan")]
    return first_half_speeds(M, N, K, dtype, compilations=3)[provider]


@triton.testing.perf_report(
    first_half_benchmark(
        "swiglu-fused-few-tokens",
        [16, 128, 512, 1024],
        FEW_TOKENS,
        features=14336,
        K=4096,
        mode="forward",
    )
)
def bench_few_tokens(N, features, K, dtype, mode, provider):
    """All lines in turns, 15 times, each a CUDA graph that overwrites L2
    first; the time of a graph that only overwrites L2 is subtracted."""
    if not ON_GPU:
        return 3 * [float("nan")]
    speeds = first_half_speeds(N, features, K, dtype, compilations=0)
    return speeds[provider]


# %%

in_percent(bench_fused, "cuBLAS, product alone")

# %%
# That was with ``K`` = 4096. With a quarter of it the sums are shorter, and
# what stands behind them is as much as before:

# %%

in_percent(bench_fused_narrow, "cuBLAS, product alone")

# %%
# And with few tokens, as in a model that answers a single user, there are few
# tiles. This figure has 14336 features, and tokens from left to right. It does
# without torch.compile, which would compile anew for each number of tokens:

# %%

in_percent(bench_few_tokens, "cuBLAS, product alone")

# %%
# **What the figures show.**
# On the H200, with 8192 tokens and ``K`` = 4096, the fused product reaches 789
# TFLOP/s at 2048 columns, 768 at 8192 and 708 at 14336. For inference, where
# only ``y`` is written, it reaches 819, 800 and 740. A product of cuBLAS and
# then our gate reach 770, 739 and 699. The product of cuBLAS alone reaches
# 818, 788 and 742. torch.compile, which also calls cuBLAS, reaches 779, 740
# and 698, and PyTorch 643, 620 and 585.
#
# With ``K`` = 1024 and 4096 columns the fused product reaches 635 TFLOP/s, 734
# for inference, and product and gate 580. So the fused product gains 10%.
#
# With 16 tokens of 4096 columns it reaches 55, and product and gate 53. With
# 512 tokens it loses: it reaches 673, and product and gate 733, so it is 8%
# slower. With 1024 tokens it wins again, with 788 against 756.
#
# **Why.**
# The fused product saves the read of two matrices, and for inference the write
# of both as well. With ``K`` = 4096 we have counted 4% for training. We find
# 3%, 4% and 1% at the three sizes, and the quantiles of a line span up to 7%.
# With a quarter of ``K``, the product takes a quarter of the time, and the
# matrices take as long as before: there is four times as much to gain.
#
# What it can lose is in its loop, which has to keep up with cuBLAS, and in its
# epilogue: while a program computes sigmoids and stores three tiles, the
# Tensor Cores of its SM have nothing to do.
#
# And its tiles are large. 512 tokens are four rows of 112 tiles, so there are
# 448, and 132 programs compute them in four rounds. These have room for 528,
# so 15% of the time of the SMs is lost in the last one. 1024 tokens are 896
# tiles in seven rounds, and only 3% is lost. cuBLAS has many tiles to choose
# from, and hardly sees the difference: alone it reaches 785 TFLOP/s with 512
# tokens, and 806 with 1024.
#
# With 16 tokens, three quarters of each tile are empty. But there the weight
# is nearly all that has to be read, and both ways read it once. At the speed
# of a copy its 235 MB would take 54 µs. Fused it takes 68 µs, and product and
# gate take 71 µs.
#
# **What follows.**
# A gate in an epilogue is worth it if the product behind it is as fast as
# cuBLAS. For inference nearly all the time of the gate is gone. For training a
# part of it is. With ``K`` = 4096 that is a few percent, and the shorter the
# sums are, the more it is worth. With few tiles, look at how many there are in
# the last round.
#
# The whole MLP
# -------------
#
# What is left of that in a step of training? The first product has 4 ``M``
# ``N`` ``K`` operations, and the last one has half as many. The backward pass
# has twice those of the forward pass. So a step has 18 ``M`` ``N`` ``K``
# operations, and the fused product has two ninths of them.

# %%

# Scaffold: both passes of an MLP, a benchmark.


@functools.cache
def step_speeds(M, N, K, dtype):
    """Both passes of an MLP, one after the other."""
    x, weight, down, dz = mlp_inputs(M, N, K, dtype)
    given = x, weight, down

    def step_of(function):
        return lambda: torch.autograd.grad(function(*given), given, dz)

    functions = MLPS | {"fused": swiglu_mlp_fused}
    calls = {
        name: step_of(function)
        for name, function in functions.items()
        if name in STEPS
    }
    compiled = []
    for _ in range(3):
        compiled.append(step_of(compiled_anew(plain_mlp)))
        compiled[-1]()  # chooses, in both passes
    return tflops_in_turns(18 * M * N * K, calls, compiled)


STEPS = {
    "triton": "Triton, y again",
    "fused": "the same, fused",
    "keeps y": "Triton, keeps y",
    **{name: label for name, label in NAMES.items() if name != "triton"},
}


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=[4096, 14336],
        x_log=True,
        xlabel="N (columns of the gate)",
        line_arg="provider",
        line_vals=list(STEPS),
        line_names=list(STEPS.values()),
        ylabel="TFLOP/s",
        plot_name="swiglu-mlp-step",
        args={
            "M": 8192,
            "K": 4096,
            "dtype": torch.bfloat16,
            "mode": "forward and backward",
        },
    )
)
def bench_step(M, N, K, dtype, mode, provider):
    """All lines in turns, 15 times, each a CUDA graph that overwrites L2
    first; the time of a graph that only overwrites L2 is subtracted.
    torch.compile: the best of three compilations."""
    if not ON_GPU:
        return 3 * [float("nan")]
    return step_speeds(M, N, K, dtype)[provider]


# %%

in_percent(bench_step, "PyTorch")

# %%
# **What the figure shows.**
# On the H200, at 14336 columns, a step of our MLP reaches 692 TFLOP/s, 694
# fused and 696 if it keeps ``y``. PyTorch reaches 623, torch.compile 679, and
# Liger 684. The quantiles of all but PyTorch overlap there.
#
# **Why.**
# The six products of a step, two forward and four backward, are the same for
# all. For the gate, PyTorch moves five matrices forward and nine backward, and
# four more where autograd copies two halves into one. That makes eighteen. We
# move three forward and six backward, for ``y`` is written again. That makes
# nine, and fused it is two less.
#
# PyTorch's step takes 13.9 ms, which is 1.4 ms longer than ours. We have
# seen nearly all of that already: 0.8 ms in the backward pass of two halves,
# and 0.5 ms in the first product and its gate.
#
# **What follows.**
# Most of a step is products. What a good gate brings is the time between them
# and, above all, memory: to compute ``y`` again costs no more than the noise.
# The fused product hardly gains anything here, either. Its few percent are of
# two ninths of the operations.
#
# Where PyTorch or a library is better
# ------------------------------------
#
# - **torch.compile fuses the gate as we do**, and is as fast in nearly all
#   sizes. It takes any activation, and needs no slope from you.
# - **Liger needs less memory in the backward pass**, because it writes both
#   gradients over the gate and the up projection. At 512 columns it is also
#   faster. What such a write can do to somebody else who needs the old numbers
#   is shown on `Cross-entropy over a vocabulary
#   <../norms-and-losses/04-cross-entropy.html>`_.
# - **The fused product loses** where its last round of tiles has many places
#   left, as with 512 tokens above, and wherever cuBLAS is faster by more than
#   two matrices take. Its tiles were chosen on one card.
# - **Rows that begin anywhere.** If ``N`` is odd and the halves are one
#   tensor, rows begin at addresses that are no multiple of 16 bytes, and our
#   loads are narrow. `Rows that begin anywhere
#   <../layer-norm/06-unaligned-rows.html>`_ says what one can do.
# - **PyTorch takes more.** It has second derivatives, and it broadcasts: a
#   gate of one number may scale a whole row. Ours refuses different shapes.
#
# Exercise 1: a gate that has limits
# ----------------------------------
#
# The gates of gpt-oss are limited. Its activation is :math:`m \,
# \sigma(1.702 \, m)`, where :math:`m` is the smaller one of the gate and 7.
# (It limits the up projection, too, and adds 1 to it, which anybody can do
# before the call.) The stub has the right value and the slope of SiLU. Correct
# the slope.
#
# **Hint 1.** Let ``a`` be 1.702. The slope of :math:`m \, \sigma(a m)` is
# :math:`\sigma(a m) + a m \, \sigma(a m) \, (1 - \sigma(a m))`.
#
# **Hint 2.** What does the value do where the gate is above 7?


@triton.jit
def _limited(x):
    m = tl.minimum(x, 7.0)
    sigmoid = _sigmoid(1.702 * m)
    return m * sigmoid, sigmoid * (1 + m * (1 - sigmoid))  # to do


def exercise_1(function):
    """Print the largest error of the gradient of the gate, and judge it."""
    gate = torch.linspace(-12, 12, 97, device=DEVICE).requires_grad_()
    up = torch.linspace(1, 2, 97, device=DEVICE)
    (ours,) = torch.autograd.grad(gated(gate, up, function).sum(), gate)
    m = gate.clamp(max=7.0)
    y = m * torch.sigmoid(1.702 * m) * up
    (exact,) = torch.autograd.grad(y.sum(), gate)
    # At 7 there is a corner.
    error = (ours - exact)[gate != 7].abs().max().item()
    print(f"largest error of a limited gate: {error:.0e}")
    return error < 1e-5


print("right:", exercise_1(_limited))

# %%

# Solution 1


@triton.jit
def _limited_1(x):
    m = tl.minimum(x, 7.0)
    sigmoid = _sigmoid(1.702 * m)
    slope = sigmoid * (1 + 1.702 * m * (1 - sigmoid))
    # Above 7 the value no longer grows.
    return m * sigmoid, tl.where(x < 7.0, slope, 0.0)


assert exercise_1(_limited_1)

# %%
# What we learned
# ---------------
#
# These are the designs of this page. The speeds of the gate are those of the
# H200 at 8192 × 14336 elements.
#
# Forward:
#
# - **PyTorch** moves five matrices, and reaches 54% of a copy.
# - **torch.compile** moves three, and reaches 100%.
# - **One kernel** moves three, and reaches 100%.
#
# Backward:
#
# - **PyTorch** moves nine, and reaches 56% of a copy.
# - **torch.compile** reaches 92%.
# - **One kernel** moves five, and reaches 100%.
# - **Two halves with chunk** move nine, and reach 54%.
# - **Two halves as one tensor** move five, and reach 101%.
#
# The product before it and the gate, with ``K`` = 4096:
#
# - **Product, then gate** move five, and reach 699 TFLOP/s.
# - **Fused, to train with** moves three, and reaches 708, which is 1% more.
# - **Fused, for inference** moves one, and reaches 740.
#
# And for kernels in general:
#
# - Count matrices first. What is left is 16 bytes for each load, and enough of
#   them in flight.
# - Give a kernel the strides of its matrices, and it takes parts of a tensor
#   where they lie, and writes gradients where they belong.
# - An operation that is cheap need not keep anything that it computes. Look at
#   what its neighbors keep, too.
# - Two products that share a matrix can be one. A descriptor of three
#   dimensions fetches what lies far apart as one tile.
# - An epilogue saves bytes, and costs time on the Tensor Cores. Whether that
#   is a gain depends on how long the sums are, so measure it.
#
# **Next:** `A loss without its logits <03-linear-cross-entropy.html>`_ puts a
# whole loss into the epilogue of a product. After that, `Attention without its
# matrix <../attention/01-attention.html>`_ is the other half of a
# Transformer's layer.
