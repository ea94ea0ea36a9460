r"""
Layer norm over several GPUs
============================

What must GPUs tell each other when they share a layer norm?
Two numbers for each row where its columns are spread, and two numbers for
each column where its rows are: everything else stays where it is.

Models are trained with the columns of a layer spread over GPUs (*tensor
parallel*), with its rows (*data* or *sequence parallel*), or with both.

**What you need:** the formulas of `Layer normalization, both passes
<../layer-norm/01-layer-norm.html>`_.
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
# Each GPU has a process of its own, a *rank*; without GPUs, two share the CPU.
# NCCL moves what lies on GPUs and gloo the rest, behind `torch.distributed
# <https://docs.pytorch.org/docs/stable/distributed.html>`_.

# %%

# Scaffold: to become a rank, here or under torchrun.

import datetime
import sys

import torch.distributed as dist

TORCHRUN = dist.is_torchelastic_launched()
WORLD = int(os.environ.get("WORLD_SIZE") or torch.cuda.device_count() or 2)
PATIENCE = datetime.timedelta(seconds=60)


def join(rank, place="env://"):
    """Make this process a rank; who waits for a lost one stops, too."""
    device, backend = None, "gloo"
    if ON_GPU:
        device, backend = torch.device("cuda", rank), "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(device)
        torch.cuda.set_stream(torch.cuda.Stream())
    given = backend, place, PATIENCE, WORLD, rank
    dist.init_process_group(*given, device_id=device)


if TORCHRUN:
    join(int(os.environ["RANK"]))
    if dist.get_rank():  # rank 0 speaks for all
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115

# %%

# Drawing: what two ranks tell each other.

plt.figure("Ranks with the columns of a matrix exchange two numbers a row, "
           "ranks with its rows two numbers a column", (6, 2.2))  # fmt: skip
box = plt.bar([1, 3.2, 8, 8], [2, 2, 0.9, 0.9], [2, 2, 4, 4], [0, 0, 1.1, 0],
              color=["C0", "C1"] * 2, alpha=0.5)  # fmt: skip
plt.bar_label(box, ["rank 0", "rank 1"] * 2, label_type="center")
for end, start in ((1.6, 0.5), (2.6, 0.5)), ((9, 0.45), (9, 1.55)):
    plt.annotate("", end, start, arrowprops={"arrowstyle": "<->", "lw": 2})
plt.text(2.1, 2.15, "columns: two numbers a row", ha="center")
plt.text(8, 2.15, "rows: two numbers a column", ha="center")
plt.ylim(0, 2.5)
plt.axis("off")

# %%
# Columns: a part of each row
# ---------------------------
#
# Mean and variance are sums over a row, and a rank has a part of it. The mean
# of squares minus the square of the mean loses all digits where the mean is
# large. Count, mean and *M2*, the sum of squared distances from it, merge so:
#
# .. math:: d = \mu_b - \mu_a, \qquad \mu = \mu_a + d \, \frac{n_b}{n}, \qquad
#    M_2 = M_{2,a} + M_{2,b} + d^2 \, \frac{n_a n_b}{n}


@triton.jit
def _load(ptr, row, N: tl.constexpr, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    at = tl.cast(row, tl.int64) * N + cols  # M * N may pass 2**31
    return tl.load(ptr + at, mask=cols < N, other=0).to(tl.float32)


@triton.jit
def _mean_m2(x, N: tl.constexpr, BLOCK: tl.constexpr):
    mean = tl.sum(x) / max(N, 1)  # a rank may have no columns
    d = tl.where(tl.arange(0, BLOCK) < N, x - mean, 0)
    mean += tl.sum(d) / max(N, 1)  # what sum and division rounded away
    return mean, tl.sum(d * d)


@triton.jit
def _part(x_ptr, part_ptr, M, N: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    mean, m2 = _mean_m2(_load(x_ptr, row, N, BLOCK), N, BLOCK)
    tl.store(part_ptr + row, mean)
    tl.store(part_ptr + M + row, m2)


# %%


@triton.jit
def _forward(
    x_ptr, w_ptr, b_ptr, y_ptr, stats_ptr,  # (2, M): mean and rstd
    parts_ptr,  # (ranks, 2, M), of all ranks; None: here are whole rows
    M, eps: tl.constexpr, N: tl.constexpr,
    COUNTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    x = _load(x_ptr, row, N, BLOCK)
    n, mean, m2 = 0, 0.0, 0.0
    if parts_ptr is None:
        n = N
        mean, m2 = _mean_m2(x, N, BLOCK)
    else:
        for rank in tl.static_range(len(COUNTS)):
            share = COUNTS[rank] / max(n + COUNTS[rank], 1)
            at = parts_ptr + 2 * rank * M + row
            d = tl.load(at) - mean
            mean += d * share
            m2 += tl.load(at + M) + d * d * n * share
            n += COUNTS[rank]
    rstd = 1 / tl.sqrt(m2 / n + eps)
    tl.store(stats_ptr + row, mean)
    tl.store(stats_ptr + M + row, rstd)
    y = (x - mean) * rstd * _load(w_ptr, 0, N, BLOCK)
    y += _load(b_ptr, 0, N, BLOCK)
    at = tl.cast(row, tl.int64) * N + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, y, mask=tl.arange(0, BLOCK) < N)


# %%
# With ``counts``, the columns of each rank, a row is a part of one. A rank
# sends 8 bytes a row. All merge in one order, and so have the same bits.

GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


def gathered(t, group):
    found = t.new_empty(group.size(), *t.shape)
    GATHER(found.view(-1), t.view(-1), group)
    return found


def lanes(N):
    """The lanes of a row and the warps that share them."""
    block = max(triton.next_power_of_2(N), 16)
    if block <= 4096:
        warps = 4
    elif block <= 16384:
        # Sixteen warps of 16384 lanes leave no registers for a second row on
        # the same multiprocessor, and half as much would be in flight.
        warps = 8
    else:
        warps = 16
    return {"BLOCK": block, "num_warps": warps}


def forward(x, w, b, eps, counts=None, group=None):
    """y, and mean and rstd."""
    (M, N), y, parts = x.shape, torch.empty_like(x), None
    part, stats = torch.empty(2, 2, M, device=x.device)
    if counts:
        _part[(M,)](x, part, M, N, **lanes(N))
        parts = gathered(part, group) if group else part
    given = x, w, b, y, stats, parts, M, eps, N, counts
    _forward[(M,)](*given, **lanes(N))
    return y, stats


x, w, b = torch.randn(5, 8, device=DEVICE).split([3, 1, 1])
y, _ = forward(x, w, b, 1e-5, counts=(8,))  # two kernels, one rank
torch.testing.assert_close(y, forward(x, w, b, 1e-5)[0])

# %%
# What do two kernels cost, before any rank talks? ``ncu``, a profiler, counts
# what comes from memory, here in units of ``x``:


@triton.testing.perf_report(triton.testing.Benchmark(
    ["N"], [2**i for i in range(9, 15)], "provider", ["triton", "two"],
    ["One kernel", "Two kernels"], "layer-norm-parts-dram", x_log=True,
    ylabel="bytes of DRAM per byte counted",
    args={"M": 4096, "dtype": torch.bfloat16, "mode": "forward",
          "counter": "dram__bytes_read.sum"},
))  # fmt: skip
def traffic(M, N, dtype, mode, counter, provider):
    """Bytes that DRAM delivers on one GPU, over the bytes of x."""
    if ON_GPU:
        x = torch.randn(M, N, device=DEVICE, dtype=dtype)
        run = lambda: forward(x, x, x, 1, (N,) if provider == "two" else None)
        run()  # compiles
        with torch.cuda.nvtx.range(f"counted {provider} {N} per {x.nbytes}"):
            run()
    return 3 * [float("nan")]  # only ncu knows


traffic.run(show_plots=ON_GPU)

# %%
# ``ncu`` empties all caches before each kernel, and so it counts ``x`` twice.
# In use an ``x`` that fits in a cache, L2, may still be there; a larger one is
# read twice, whatever ranks then say to each other.
#
# Ranks, also for a notebook
# --------------------------
#
# ``torchrun`` starts the ranks of a script, and each runs this page. Otherwise
# the page starts them, with a file of all that it has defined so far, which in
# a notebook grows. ``everywhere`` lets all of them call a function.

# %%

# Scaffold: what a rank does, and the file of what the page defines.

import ast
import builtins
import contextlib
import importlib
import inspect
import pickle
import subprocess
import tempfile
import time


def work():
    """Be a rank that makes the calls it is sent."""
    results = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what is printed goes with the errors
    join(int(os.environ["RANK"]), "file://" + os.path.abspath("ranks"))
    while call := sys.stdin.readline():
        module, name, args = pickle.loads(bytes.fromhex(call))
        importlib.invalidate_caches()  # the module may be new
        function = getattr(importlib.import_module(module), name)
        pickle.dump(function(*args), results)
        results.flush()
    dist.destroy_process_group()


def written(folder):
    """Write a module of imports, CONSTANTS and definitions; its name.

    A rank may be reading it: it appears as a whole, and is written once.
    """
    shell = getattr(builtins, "get_ipython", None)  # of a notebook
    cells, text = ["".join(inspect.findsource(join)[0])], ""
    kinds = "Import", "ImportFrom", "FunctionDef", "ClassDef"
    for cell in shell().user_ns["In"] if shell else cells:
        with contextlib.suppress(SyntaxError):  # of a cell that failed
            for node in ast.parse(cell).body:
                targets = ast.unparse(getattr(node, "targets", []))
                if type(node).__name__ in kinds or targets.isupper():
                    text += ast.unparse(node) + "\n\n"
    name = f"page_{hash(text) % 2**32}"
    if not os.path.exists(f"{folder}/{name}.py"):
        with open(f"{folder}/draft", "w") as file:
            file.write(text)
        os.replace(f"{folder}/draft", f"{folder}/{name}.py")
    return name


# %%

# Scaffold: processes that are ranks.


class Ranks:
    """Processes that all call what they are told to."""

    def __init__(self):
        self.folder = tempfile.TemporaryDirectory()
        run = f"from {written(self.folder.name)} import work; work()"
        self.all = [
            subprocess.Popen([sys.executable, "-c", run], stdin=-1, stdout=-1,
                             cwd=self.folder.name,
                             env=os.environ | {"RANK": str(rank)})
            for rank in range(WORLD)
        ]  # fmt: skip

    def __call__(self, function, *args):
        """What function(*args) gives on each rank; all call it at once."""
        call = written(self.folder.name), function.__name__, args
        try:
            for process in self.all:
                line = pickle.dumps(call).hex() + "\n"
                os.write(process.stdin.fileno(), line.encode())
            return [pickle.load(process.stdout) for process in self.all]
        except (EOFError, BrokenPipeError):
            for process in self.all:
                process.kill()
            raise RuntimeError("a rank has ended; above it says why") from None


def under_torchrun(function, *args):
    found = [None] * WORLD
    dist.all_gather_object(found, function(*args))
    return found


everywhere = under_torchrun if TORCHRUN else Ranks()

# %%
# Backward: two sums over a row again
# -----------------------------------
#
# For ``dx`` a row needs :math:`c_1 = \sum \hat{x} \, w \, dy` and
# :math:`c_2 = \sum w \, dy`, which a rank has of its columns.


@triton.jit
def _row_sums(dy_ptr, x_ptr, w_ptr, stats_ptr, c_ptr,  # (2, M)
              M, N: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0)
    wdy = _load(dy_ptr, row, N, BLOCK) * _load(w_ptr, 0, N, BLOCK)
    d = _load(x_ptr, row, N, BLOCK) - tl.load(stats_ptr + row)
    tl.store(c_ptr + row, tl.sum(d * wdy) * tl.load(stats_ptr + M + row))
    tl.store(c_ptr + M + row, tl.sum(wdy))


# %%
# With them a tile needs no whole row. If a rank has whole rows, and registers
# hold one, a tile adds up itself, and ``c_ptr`` is None. ``dw`` and ``db`` are
# sums over rows, and all rows of a column are here.


@triton.jit
def _backward(
    dy_ptr, x_ptr, w_ptr, stats_ptr, c_ptr, dx_ptr,
    sums_ptr,  # (programs that share columns, 2, N), for dw and db
    M, TOTAL, N: tl.constexpr,  # TOTAL: of all ranks
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)[None, :]
    dw = tl.zeros((ROWS, COLS), tl.float32)
    db = dw
    step = tl.num_programs(1) * ROWS
    for first in tl.range(tl.program_id(1) * ROWS, M, step, num_stages=3):
        row = first + tl.arange(0, ROWS)[:, None]
        at, mask = tl.cast(row, tl.int64) * N + col, (row < M) & (col < N)
        x = tl.load(x_ptr + at, mask=mask, other=0).to(tl.float32)
        dy = tl.load(dy_ptr + at, mask=mask, other=0).to(tl.float32)
        wdy = tl.load(w_ptr + col, mask=col < N, other=0).to(tl.float32) * dy
        mean = tl.load(stats_ptr + row, mask=row < M, other=0)
        rstd = tl.load(stats_ptr + M + row, mask=row < M, other=0)
        x_hat = (x - mean) * rstd
        if c_ptr is None:
            c1 = tl.sum(x_hat * wdy, axis=1, keep_dims=True)
            c2 = tl.sum(wdy, axis=1, keep_dims=True)
        else:
            c1 = tl.load(c_ptr + row, mask=row < M, other=0)
            c2 = tl.load(c_ptr + M + row, mask=row < M, other=0)
        dx = (wdy - (x_hat * c1 + c2) / TOTAL) * rstd
        tl.store(dx_ptr + at, dx, mask=mask)
        dw, db = dw + dy * x_hat, db + dy
    at = sums_ptr + tl.program_id(1) * 2 * N + col
    tl.store(at, tl.sum(dw, axis=0, keep_dims=True), mask=col < N)
    tl.store(at + N, tl.sum(db, axis=0, keep_dims=True), mask=col < N)


# %%

GPU = torch.cuda.get_device_properties(DEVICE) if ON_GPU else None
NUM_SMS = GPU.multi_processor_count if ON_GPU else 4


def backward(dy, x, w, stats, counts=None, group=None):
    """dx, and (2, N) in float32: dw and db of these rows."""
    (M, N), dx, c = x.shape, torch.empty_like(x), None
    if counts or N > 8192:  # too many for the registers of a program
        c = torch.empty_like(stats)
        _row_sums[(M,)](dy, x, w, stats, c, M, N, **lanes(N))
    if group:
        dist.all_reduce(c, group=group)
    block, total = lanes(N)["BLOCK"], sum(counts or [N])
    tile, warps, per_sm = (1, block), 4, 2
    if c is not None:
        tile = 8, min(block, 512)
    elif block > 4096:
        warps, per_sm = 8, 1
    across = max(triton.cdiv(N, tile[1]), 1)
    programs = min(per_sm * NUM_SMS // across, triton.cdiv(M, tile[0]))
    sums = stats.new_empty(max(programs, 1), 2, N)
    given = dy, x, w, stats, c, dx, sums, M, total, N, *tile
    _backward[(across, len(sums))](*given, num_warps=warps)
    return dx, sums.sum(0)


# %%
# Columns, measured
# -----------------
#
# The clock of one GPU replays a graph of eight calls, before each of which L2
# is overwritten, and subtracts the time of the same graph without the calls.
# The clock of a rank does the same, and in both of its graphs all ranks meet
# in an all-reduce after each overwriting. So they begin each call together,
# and the next call waits for the slowest of them.

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

# Scaffold: the clock of a rank, and of several.

import functools


@functools.cache
def group_of(ranks):
    """The group of the first ranks; None on the others."""
    group = dist.new_group(range(ranks), PATIENCE)
    return group if dist.get_rank() < ranks else None


def time_together(prepare, group):
    """µs of a call on this rank: median, 20% and 80% quantiles.

    All ranks of the group make the call at the same time, each on its GPU.
    ``prepare()`` makes inputs and returns the call, as for device_time.
    """
    larger_than_l2 = torch.empty(2**28, dtype=torch.int8, device=DEVICE)
    meeting = torch.zeros(1, device=DEVICE)

    def meet():
        """Nobody is past it before everybody is here."""
        dist.all_reduce(meeting, group=group)

    def prepared():
        call = prepare()
        call()  # compiles the kernels
        return call

    def recorded(calls):
        graph = torch.cuda.CUDAGraph()
        results = []  # kept, so that no call writes where another one wrote
        with torch.cuda.graph(
            graph,
            stream=torch.cuda.current_stream(),
            # A thread of NCCL may ask for its events meanwhile.
            capture_error_mode="thread_local",
        ):
            for call in calls:
                larger_than_l2.zero_()
                meet()
                results.append(call())
        graph.replay()  # the first replay takes longer
        return graph

    def replayed(graph):
        """Events at its start, which is the same for all ranks, and end."""
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        meet()
        start.record()
        graph.replay()
        end.record()
        return start, end

    calls = [prepared() for _ in range(8)]
    meet()  # connects the ranks, which a graph cannot record
    with_calls = recorded(calls)
    without = recorded([lambda: None for _ in calls])
    pairs = []
    for _ in range(25):
        pairs.append((replayed(with_calls), replayed(without)))
    torch.cuda.synchronize()
    times = []
    for (start, end), (start_without, end_without) in pairs:
        difference = start.elapsed_time(end)
        difference -= start_without.elapsed_time(end_without)
        times.append(1000 * difference / len(calls))
    times.sort()
    return times[12], times[5], times[19]


# %%

# Scaffold: what a figure of several ranks shows.


def slowest(measure, *arguments):
    """What measure(*arguments) gives on the rank with the largest median."""
    times = [t for t in everywhere(measure, *arguments) if t is not None]
    return max(times, default=3 * [float("nan")])


def copy_time(mode, shape, dtype):
    """µs of the ceiling: a forward pass moves two matrices, a backward pass
    three."""
    reads = 1 if mode == "forward" else 2
    median, low, high = ceiling(reads, 1, shape, dtype)
    bytes_moved = (reads + 1) * shape[0] * shape[1] * dtype.itemsize
    return tuple(bytes_moved / each * 1e-3 for each in (median, high, low))


def figure_of_ranks(name, mode, lines, sizes, measure):
    """Draw a benchmark of two ranks; its table, or None without a clock."""
    mark = triton.testing.Benchmark(
        x_names=["N"],
        x_vals=sizes,
        x_log=True,
        y_log=True,
        line_arg="provider",
        line_vals=list(lines),
        line_names=list(lines.values()),
        ylabel="µs",
        plot_name=name,
        args={"M": 4096, "dtype": torch.bfloat16, "mode": mode, "ranks": 2},
    )
    benchmark = triton.testing.perf_report(mark)(measure)
    table = benchmark.run(show_plots=ON_GPU, return_df=True)
    table.columns = ["N", *lines]
    table = table.astype({"N": int}).set_index("N").dropna(how="all")
    if len(table):
        return table
    return print("Timing needs two GPUs; the page has recorded figures.")


# %%
# Others gather whole rows and keep their columns of ``y``; so does DTensor,
# PyTorch's tensor that knows its layout over ranks. With PyTorch's kernels,
# one line hides the other forward.


def as_rows(t, group):
    return torch.cat(gathered(t, group).unbind(), dim=-1)


def as_dtensor(t, group):
    from torch.distributed.tensor import DeviceMesh, DTensor, Replicate, Shard

    mesh = DeviceMesh.from_group(group, DEVICE.type)
    if t.dim() == 2:
        return DTensor.from_local(t, mesh, [Shard(1)])
    return DTensor.from_local(as_rows(t, group), mesh, [Replicate()])


# %%
# What do two numbers a row save, and what do the kernels? Two more lines tell
# them apart: rows that are gathered for our kernels, here and of `Two sweeps
# <../layer-norm/07-two-sweeps.html>`_ for more columns than a program holds;
# and an *all-to-all*, in which each rank gets some rows as a whole and sends
# their results back.

# %%

# Scaffold: rows of any width, from page 07 of layer norm.


@triton.jit
def _welford(
    x_ptr, eps: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr,
    KEEP: tl.constexpr, acc: tl.constexpr,  # float32; float64 for float64
):  # fmt: skip
    """Mean of the row at x_ptr, and 1 / its standard deviation."""
    LAST: tl.constexpr = (N - 1) // BLOCK
    lanes = tl.arange(0, BLOCK)
    mean, m2 = tl.zeros((BLOCK,), acc), tl.zeros((BLOCK,), acc)
    for i in range(LAST + 1):
        cols = i * BLOCK + lanes
        x = tl.load(x_ptr + cols, mask=cols < N, eviction_policy=KEEP)
        d = tl.where(cols < N, x.to(acc) - mean, 0)
        share = 1 / tl.cast(i + 1, acc)
        mean += d * share
        m2 += d * d * (1 - share)  # d times the distance from the new mean
    count = tl.where(LAST * BLOCK + lanes < N, LAST + 1, LAST).to(acc)
    common = tl.sum(mean * count) / N
    d = mean - common
    variance = tl.sum(m2 + count * d * d) / N
    return common, 1 / tl.sqrt(variance + eps)


@triton.jit
def _layer_norm_fwd_sweeps(
    x_ptr, w_ptr, b_ptr, y_ptr, mean_ptr, rstd_ptr,
    eps: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr,
    CACHES: tl.constexpr,
):  # fmt: skip
    KEEP: tl.constexpr = "evict_last" if CACHES else ""
    DROP: tl.constexpr = "evict_first" if CACHES else ""
    STREAM: tl.constexpr = ".cs" if CACHES else ""
    LAST: tl.constexpr = (N - 1) // BLOCK
    acc: tl.constexpr = mean_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * N
    mean, rstd = _welford(x_ptr, eps, N, BLOCK, KEEP, acc)
    tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)
    for i in range(LAST + 1):
        tile = LAST - i if CACHES else i
        cols = tile * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + cols, mask=cols < N, eviction_policy=DROP)
        y = (x.to(acc) - mean) * rstd
        if w_ptr is not None:
            y *= tl.load(w_ptr + cols, mask=cols < N).to(acc)
        if b_ptr is not None:
            y += tl.load(b_ptr + cols, mask=cols < N).to(acc)
        at = y_ptr + row * N + cols
        tl.store(at, y, mask=cols < N, cache_modifier=STREAM)


@triton.jit
def _layer_norm_bwd_means(
    dy_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, c_ptr,  # w may be None
    M, N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * N
    dy_ptr += row * N
    acc = mean_ptr.dtype.element_ty
    mean, rstd = tl.load(mean_ptr + row), tl.load(rstd_ptr + row)
    c1, c2 = tl.zeros((BLOCK,), acc), tl.zeros((BLOCK,), acc)
    for start in range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + cols, mask=cols < N, other=0).to(acc)
        dy = tl.load(dy_ptr + cols, mask=cols < N, other=0).to(acc)
        wdy = dy  # 0 in a masked lane
        if w_ptr is not None:
            wdy *= tl.load(w_ptr + cols, mask=cols < N, other=0).to(acc)
        c1 += (x - mean) * wdy
        c2 += wdy
    tl.store(c_ptr + row, tl.sum(c1) * rstd / N)
    tl.store(c_ptr + M + row, tl.sum(c2) / N)


@triton.jit
def _layer_norm_bwd_slices(
    dy_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, c_ptr,
    dx_ptr,  # None: not wanted
    sums_ptr,  # (groups, 2, N), or None: neither dw nor db is wanted
    M, N: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,  # of a tile
):  # fmt: skip
    SLICES: tl.constexpr = (N + COLS - 1) // COLS
    acc = mean_ptr.dtype.element_ty
    group, groups = tl.program_id(0) // SLICES, tl.num_programs(0) // SLICES
    cols = tl.program_id(0) % SLICES * COLS + tl.arange(0, COLS)[None, :]
    if w_ptr is not None:
        w = tl.load(w_ptr + cols, mask=cols < N, other=0)
    dw, db = tl.zeros((1, COLS), acc), tl.zeros((1, COLS), acc)
    row = tl.arange(0, ROWS)[:, None]
    at = row * N + cols
    for first in tl.range(group * ROWS, M, groups * ROWS, num_stages=3):
        exists = row < M - first
        mask = exists & (cols < N)
        start = tl.cast(first, tl.int64) * N  # 64 bits only here
        x = tl.load(x_ptr + start + at, mask=mask, other=0)
        dy = tl.load(dy_ptr + start + at, mask=mask, other=0)
        mean = tl.load(mean_ptr + first + row, mask=exists, other=0)
        rstd = tl.load(rstd_ptr + first + row, mask=exists, other=0)
        x_hat, dy = (x.to(acc) - mean) * rstd, dy.to(acc)
        dw += tl.sum(dy * x_hat, 0, keep_dims=True)
        db += tl.sum(dy, 0, keep_dims=True)
        if dx_ptr is not None:
            c1 = tl.load(c_ptr + first + row, mask=exists, other=0)
            c2 = tl.load(c_ptr + M + first + row, mask=exists, other=0)
            wdy = dy if w_ptr is None else dy * w.to(acc)
            dx = (wdy - x_hat * c1 - c2) * rstd
            tl.store(dx_ptr + start + at, dx, mask=mask)
    if sums_ptr is not None:
        sums_ptr += group * 2 * N + cols
        tl.store(sums_ptr, dw, mask=cols < N)
        tl.store(sums_ptr + N, db, mask=cols < N)


def plan(N, itemsize):
    """Lanes of a tile and warps of a program."""
    row, warp = N * itemsize, 64 if torch.version.hip else 32  # threads
    size = 8192 if row <= 32768 else 16384 if row <= 65536 else 32768
    size, most = (8192, 256) if row % 16 else (size, 1024)
    block = min(size // itemsize, triton.next_power_of_2(N))
    return block, max(min(block * itemsize // 16, most) // warp, 1)


def forward_in_sweeps(x, w, b, eps, caches=True):
    """y, mean and rstd for a contiguous (M, N) x."""
    M, N = x.shape
    acc = torch.promote_types(x.dtype, torch.float32)
    y = torch.empty_like(x)
    mean, rstd = torch.empty(2, M, dtype=acc, device=x.device)
    block, warps = plan(N, x.itemsize)
    args = x, w, b, y, mean, rstd, eps, N, block, caches
    _layer_norm_fwd_sweeps[(M,)](*args, num_warps=warps)
    return y, mean, rstd


def backward_in_sweeps(dy, x, w, mean, rstd, wanted):
    """dx, dw and db for (M, N) matrices; None where not wanted."""
    M, N = x.shape
    new = {"dtype": mean.dtype, "device": x.device}
    dx = c = sums = None
    if wanted[0]:
        dx, c = torch.empty_like(x), torch.empty(2, M, **new)
        block = min(8192 // x.itemsize, triton.next_power_of_2(N))
        args = dy, x, w, mean, rstd, c, M, N, block
        _layer_norm_bwd_means[(M,)](*args, num_warps=16)
    cols = min(4096 // x.itemsize, triton.next_power_of_2(N))
    slices, rows = triton.cdiv(N, cols), 2
    groups = max(min(2 * NUM_SMS // slices, triton.cdiv(M, rows)), 1)
    if wanted[1] or wanted[2]:
        sums = torch.empty(groups, 2, N, **new)
    args = dy, x, w, mean, rstd, c, dx, sums, M, N, rows, cols
    _layer_norm_bwd_slices[(slices * groups,)](*args, num_warps=8)
    dw, db = (None, None) if sums is None else sums.sum(0)
    return dx, dw if wanted[1] else None, db if wanted[2] else None


# %%


AT_ONCE = 16384  # columns of which a program takes a row at once


def forward_of_rows(x, w, b, eps):
    """y, and mean and rstd, of whole rows."""
    if x.shape[1] <= AT_ONCE:
        return forward(x, w, b, eps)
    y, *stats = forward_in_sweeps(x, w, b, eps)
    return y, stats


def backward_of_rows(dy, x, w, stats):
    """dx, and dw and db of these rows."""
    if x.shape[1] <= AT_ONCE:
        return backward(dy, x, w, stats)
    mean, rstd = stats
    dx, *sums = backward_in_sweeps(dy, x, w, mean, rstd, 3 * [True])
    return dx, sums


def to_rows(t, group):
    """Some whole rows, for the columns of all rows that are here."""
    ranks = group.size()
    received = torch.empty_like(t)
    dist.all_to_all_single(received, t, group=group)
    parts = received.view(ranks, -1, t.shape[1])
    return torch.cat(parts.unbind(), dim=-1)


def to_columns(t, group):
    """Columns of all rows, for some whole rows: the way back."""
    ranks = group.size()
    parts = torch.stack(t.chunk(ranks, dim=-1))
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return received.view(-1, parts.shape[-1])


# %%


def columns_calls(x, w, b, dy, group, way):
    """Both passes over columns, each a function without arguments, in one of
    the ways of the figure."""
    if way in ("triton", "alone"):
        counts = None
        if way == "triton":
            counts = (x.shape[1],) * group.size()
        else:
            group = None
        stats = forward(x, w, b, 1e-5, counts, group)[1]

        def forth():
            return forward(x, w, b, 1e-5, counts, group)[0]

        def back():
            return backward(dy, x, w, stats, counts, group)

    elif way in ("gathered", "exchanged"):
        place = as_rows if way == "gathered" else to_rows
        W, B = as_rows(w, group), as_rows(b, group)
        X = place(x, group)
        stats = forward_of_rows(X, W, B, 1e-5)[1]

        def forth():
            y = forward_of_rows(place(x, group), W, B, 1e-5)[0]
            return to_columns(y, group) if way == "exchanged" else y

        def back():
            dx, sums = backward_of_rows(place(dy, group), X, W, stats)
            if way == "exchanged":
                dx = to_columns(dx, group)
                sums = torch.stack([*sums])
                dist.all_reduce(sums, group=group)
            return dx, sums

    else:
        place = as_rows if way == "rows" else as_dtensor
        X, W, B = (place(t, group).requires_grad_() for t in (x, w, b))
        shape = X.shape[1:]
        y = F.layer_norm(X, shape, W, B)

        def forth():
            return F.layer_norm(place(x, group), shape, W, B)

        def back():
            given = place(dy, group)
            return torch.autograd.grad(y, (X, W, B), given, retain_graph=True)

    return forth, back


def time_columns(M, N, dtype, mode, ranks, way):
    if not (group := group_of(ranks)):
        return None
    n = N // ranks

    def prepare():
        x = torch.randn(M, n, device=DEVICE, dtype=dtype)
        dy = torch.randn(M, n, device=DEVICE, dtype=dtype)
        w = torch.rand(n, device=DEVICE, dtype=dtype)
        b = torch.rand(n, device=DEVICE, dtype=dtype)
        forth, back = columns_calls(x, w, b, dy, group, way)
        return forth if mode == "forward" else back

    try:
        return time_together(prepare, group)
    except RuntimeError:
        if way == "dtensor":  # not every torch can
            return None
        raise


# %%


def measure_columns(M, N, dtype, mode, ranks, provider):
    """Device time of a CUDA graph of eight calls, less that of the same graph
    without them. Each call has inputs of its own; before it L2 is overwritten
    and all ranks meet in an all-reduce. Median, 20% and 80% quantiles of 25
    pairs, on the rank with the largest median. Copy: on one GPU, the same
    without the all-reduce, best of six tiles."""
    if not ON_GPU or ranks > WORLD:
        return 3 * [float("nan")]
    if provider == "copy":
        return copy_time(mode, (M, N // ranks), dtype)
    return slowest(time_columns, M, N, dtype, mode, ranks, provider)


def columns(mode):
    lines = {
        "triton": "Two numbers a row",
        "rows": "Rows gathered",
        "gathered": "Rows gathered, our kernels",
        "exchanged": "All-to-all, our kernels",
        "dtensor": "DTensor",
        "alone": "No other rank",
        "copy": "Copy",
    }
    name = f"layer-norm-columns-{mode}"
    sizes = [2**i for i in range(11, 17)]
    table = figure_of_ranks(name, mode, lines, sizes, measure_columns)
    if table is not None:
        print("time divided by that of two numbers a row")
        print(table.div(table["triton"], axis=0).round(2).to_string())
        print("speed in % of the speed of the copy")
        percent = 100 * table.rdiv(table["copy"], axis=0)
        print(percent.to_string(float_format="%.0f"))
        cost = table["triton"] - table["alone"]
        print("µs that other ranks cost:", cost.round(1).to_dict())


columns("forward")

# %%
# 8 bytes a row and rank replace the row. On two H100s two numbers a row take
# NN µs at 65536 columns, of which each rank has half. Gathered rows take NN
# times as long with PyTorch's kernels and NN times with ours: each rank does
# the work of all. An all-to-all divides this work, but its rows travel there
# and back; it takes NN times as long.
#
# What other ranks cost is the distance to the line without them: the start of
# an exchange and of a second kernel, and a second reading of ``x``. That is
# NN µs at 2048 columns and NN µs at 65536. The line without them is at NN% of
# the copy at 65536 columns.
#
# Backward, ``dy`` is gathered; DTensor gathers ``x`` again as well. An
# all-to-all sends ``dy`` there and ``dx`` back, and adds up the weights'
# gradients of all columns. With more than 8192 columns a rank without others
# needs both kernels, too, and then others cost the exchange alone.

columns("backward")

# %%
# Rows: one sum for both gradients
# --------------------------------
#
# With whole rows a rank is alone until ``dw`` and ``db``, which sum over the
# rows of all: in one all-reduce, as its start costs more than its bytes.
# *Asynchronous*, it goes on beside the kernels that follow.


def time_rows(M, N, dtype, mode, ranks, way):
    if not (group := group_of(ranks)):
        return None

    def prepare():
        x, dy = torch.randn(2, M, N, device=DEVICE, dtype=dtype)
        w, b = torch.rand(2, N, device=DEVICE, dtype=dtype)
        a = torch.randn(4096, 2048, device=DEVICE, dtype=dtype)
        _, stats = forward(x, w, b, 1e-5)

        def step():
            dx, sums = backward(dy, x, w, stats)
            buffers = {"alone": [], "then": [], "two": sums}.get(way, [sums])
            given = dist.ReduceOp.SUM, group, way == "beside"
            tasks = [dist.all_reduce(t, *given) for t in buffers]
            product = None
            if way in ("then", "beside"):
                product = a @ a[:2048]  # of the layer before: its turn now
            if way == "beside":
                tasks[0].wait()
            return dx, sums, product

        return step

    return time_together(prepare, group)


def measure_rows(M, N, dtype, mode, ranks, provider):
    """Device time of a CUDA graph of eight calls, less that of the same graph
    without them. Each call has inputs of its own; before it L2 is overwritten
    and all ranks meet in an all-reduce. Median, 20% and 80% quantiles of 25
    pairs, on the rank with the largest median. Copy: on one GPU, the same
    without the all-reduce, best of six tiles."""
    if not ON_GPU or ranks > WORLD:
        return 3 * [float("nan")]
    if provider == "copy":
        return copy_time(mode, (M, N), dtype)
    return slowest(time_rows, M, N, dtype, mode, ranks, provider)


lines = {
    "alone": "No other rank",
    "one": "One all-reduce",
    "two": "Two",
    "then": "None, then a matrix product",
    "beside": "One beside this product",
    "copy": "Copy",
}
sizes = [2**i for i in range(10, 16)]
table = figure_of_ranks(
    "layer-norm-rows", "backward", lines, sizes, measure_rows
)
if table is not None:
    for line, base in ("one", "alone"), ("two", "alone"), ("beside", "then"):
        added = (table[line] - table[base]).round(1).to_dict()
        print(f"µs that {lines[line]} adds to {lines[base]}:", added)

# %%
# On two H100s one all-reduce adds NN µs at 1024 columns and NN µs at 32768,
# where it sends 32 times as much; two of them add NN µs and NN µs. Beside the
# product, one adds NN µs and NN µs.
#
# A function to train with
# ------------------------
#
# ``functional.all_reduce`` gives a promise: what uses it first waits for it. A
# weight in 16 bits is converted at once, and so waits.

import torch.distributed._functional_collectives as functional


class LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, b, eps, counts, group):
        y, stats = forward(x, w, b, eps, counts, group if counts else None)
        ctx.save_for_backward(x, w, b, stats)
        ctx.ranks = counts, group
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        (x, w, b, stats), (counts, group) = ctx.saved_tensors, ctx.ranks
        given = dy.contiguous(), x, w, stats, counts
        dx, sums = backward(*given, group if counts else None)
        if not counts and any(ctx.needs_input_grad[1:3]):
            sums = functional.all_reduce(sums, "sum", group)
        return dx, sums[0].to(w.dtype), sums[1].to(b.dtype), None, None, None


# %%
# Ranks that disagree would wait for each other, or add what is not alike. So
# each says what it has before any kernel, and an error is one on all ranks.
# A rank without rows calls as well, for the others wait for it. Sums have 32
# bits, so float64 is refused rather than rounded in silence.


TAKEN = (
    'taken are "rows" or "columns" in 16 or 32 bits, at most 32768 columns, '
    "and weights of the shape in which x ends, all on the rank's own device"
)


def elsewhere(t):
    """Whether a tensor is on another GPU than the one kernels start on."""
    return t.is_cuda and t.device.index != torch.cuda.current_device()


def described(x, shape, weight, bias, eps, shard):
    """Whether a rank's arguments are taken, and what it has."""
    shape = torch.Size([shape] if isinstance(shape, int) else shape)
    M, N = x.shape[: x.dim() - len(shape)].numel(), shape.numel()
    has = {"rows": M, "columns": N, "shard": shard, "eps": eps}
    fits = shard in ("rows", "columns") and len(shape) > 0 and N <= 32768
    for name, t in {"x": x, "weight": weight, "bias": bias}.items():
        if t is not None:
            end = t.shape[-len(shape) :] if t is x else t.shape
            has[name] = f"{t.dtype} on {t.device.type}"
            has[name] += ", which is not its GPU" * elsewhere(t)
            has[name] += " with a gradient" * t.requires_grad
            has[name] += f" of {(*t.shape,)}" * (end != shape)
            bits = t.is_floating_point() and 8 * t.itemsize
            fits &= t.device.type == DEVICE.type and bits in (16, 32)
            fits &= end == shape and not elsewhere(t)
    return fits, has


# %%


def layer_norm(x, normalized_shape, weight=None, bias=None, eps=1e-5,
               group=None, shard="rows"):  # fmt: skip
    """Normalize x, some "rows" or "columns" of a tensor on the group's ranks;
    normalized_shape, weight and bias are of the columns that are here."""
    group = group or dist.group.WORLD
    found = [None] * group.size()
    try:
        mine = described(x, normalized_shape, weight, bias, eps, shard)
    except Exception as error:  # nobody waits for who stops here
        mine = False, {"an error": repr(error)}
    dist.all_gather_object(found, mine, group)
    for rank, (fits, has) in enumerate(found):
        if not fits:
            raise ValueError(f"rank {rank} has {has}; {TAKEN}")
        if has | {shard: 0} != found[0][1] | {shard: 0}:
            raise ValueError(f"rank {rank} has {has}, rank 0 {found[0][1]}")
    M, N = mine[1]["rows"], mine[1]["columns"]
    w = x.new_ones(N) if weight is None else weight.contiguous().view(N)
    b = x.new_zeros(N) if bias is None else bias.contiguous().view(N)
    counts = tuple(has["columns"] for _, has in found)
    given = x.reshape(M, N).contiguous(), w, b, eps
    y = LayerNorm.apply(*given, counts if shard == "columns" else None, group)
    return y.view(x.shape)


# %%
# No figure above has this comparison: it takes time on the host before the
# first kernel of each call, and all ranks wait for the last one. Where ranks
# cannot disagree, ``LayerNorm.apply`` does without it. How much is it?


CALLS = "triton", "kernels", "rows"


def time_calls(M, N, dtype, ranks):
    """µs of a call on the host in each way of the figure, on this rank."""
    if not (group := group_of(ranks)):
        return None
    n = N // ranks
    x = torch.randn(M, n, device=DEVICE, dtype=dtype)
    w = torch.rand(n, device=DEVICE, dtype=dtype)
    b = torch.rand(n, device=DEVICE, dtype=dtype)

    def checked():
        return layer_norm(x, n, w, b, group=group, shard="columns")

    calls = {"triton": checked}
    for name, way in ("kernels", "triton"), ("rows", "rows"):
        calls[name], _ = columns_calls(x, w, b, x, group, way)
    return time_in_turns(calls, group)


def time_in_turns(calls, group):
    """µs of each call on the host: median, 20% and 80% quantiles.

    In each of 15 rounds all calls take turns, each with the fastest of five
    batches of 20 calls, until the GPU is done with the last: what disturbs the
    host makes a batch longer, never shorter. A call's time is the median of
    the first one times its ratio to the first in the same round.
    """
    meeting = torch.zeros(1, device=DEVICE)

    def fastest_batch(call):
        lengths = []
        for _ in range(5):
            dist.all_reduce(meeting, group=group)
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(20):
                call()
            torch.cuda.synchronize()
            lengths.append(time.perf_counter() - start)
        return 1e6 * min(lengths) / 20

    for call in calls.values():
        call()  # compiles the kernels
    rounds = torch.empty(15, len(calls), dtype=torch.double)
    for round_ in rounds:
        for i, call in enumerate(calls.values()):
            round_[i] = fastest_batch(call)
    first = rounds[:, 0].clone()
    rounds[:, 1:] *= first.median() / first[:, None]
    quantiles = rounds.quantile(rounds.new_tensor([0.5, 0.2, 0.8]), dim=0)
    times = map(tuple, quantiles.T.tolist())
    return dict(zip(calls, times, strict=True))


@functools.cache  # all calls in turns; then each line asks for its own
def calls_of_all_ranks(M, N, dtype, ranks):
    """Of each call the times on the rank with the largest median."""
    of_ranks = [t for t in everywhere(time_calls, M, N, dtype, ranks) if t]
    return {way: max(times[way] for times in of_ranks) for way in CALLS}


def measure_calls(M, N, dtype, mode, ranks, provider):
    """Time on the host of calls that follow each other, until the GPU is done
    with the last, with L2 as they leave it: in each of 15 rounds all lines
    take turns, each with the fastest of five batches of 20 calls that all
    ranks begin together. Median of layer_norm; another line's is that times
    its ratio to layer_norm in the same round, median, 20% and 80% quantiles;
    on the rank with the largest median."""
    if not ON_GPU or ranks > WORLD:
        return 3 * [float("nan")]
    return calls_of_all_ranks(M, N, dtype, ranks)[provider]


lines = {
    "triton": "layer_norm",
    "kernels": "forward, unchecked",
    "rows": "Rows gathered",
}
sizes = [2**i for i in (11, 13, 15)]
table = figure_of_ranks(
    "layer-norm-columns-call", "forward", lines, sizes, measure_calls
)
if table is not None:
    checks = (table["triton"] - table["kernels"]).round().to_dict()
    print("µs that the comparison of arguments takes:", checks)

# %%
# On two H100s a call takes NN µs at 2048 columns and NN µs at 32768. Without
# the comparison ``forward`` takes NN µs and NN µs, and to gather rows for
# PyTorch's kernels NN µs and NN µs.
#
# Now to the check, on parts that are not of one size, against PyTorch's
# function in float64:


def errors(shard, M, N, mean):
    """Relative errors of y, dx, dw and db on this rank."""
    torch.manual_seed(0)
    x, w, b, dy = torch.randn(2 * M + 2, N, device=DEVICE).split([M, 1, 1, M])

    def mine(t):
        if shard == "columns":
            return t.tensor_split(WORLD, dim=-1)[dist.get_rank()]
        return t.tensor_split(WORLD)[dist.get_rank()] if t.dim() == 2 else t

    def results(f, cut, **more):
        x_, *given, dy_ = map(cut, (x + mean, w[0], b[0], dy))
        leaves = [t.requires_grad_() for t in (x_, *given)]
        y = f(x_, given[0].shape, *given, **more)
        return y, *torch.autograd.grad(y, leaves, dy_)

    exact = results(F.layer_norm, torch.Tensor.double)
    pairs = zip(results(layer_norm, mine, shard=shard), exact, strict=True)
    return [((a - mine(b)).norm() / mine(b).norm()).item() for a, b in pairs]


for shard in "rows", "columns":
    for mean, limit in (0, 1e-6), (1e4, 1e-3):
        error = max(map(max, everywhere(errors, shard, 7, 75, mean)))
        print(f"{shard}, mean {mean:g}: errors below {error:.0e}")
        assert error < limit

# %%
# Sum or mean?
# ------------
#
# All rows use a weight, so its gradient is a sum over the rows of all ranks.
# `DistributedDataParallel
# <https://docs.pytorch.org/docs/stable/notes/ddp.html>`_ and FSDP take the
# *mean* over ranks: they expect that a loss is a mean over a rank's own rows.

from torch.nn.parallel import DistributedDataParallel


def ratios(way, rows):
    """Some numbers of dw, over those of the loss divided by all rows."""
    torch.manual_seed(0)
    (x, dy), rank = torch.randn(2, WORLD, 6, 8, device=DEVICE), dist.get_rank()
    norm = torch.nn.LayerNorm(8, device=DEVICE)
    ((norm(x) * dy).sum() / (6 * WORLD)).backward()
    expected, norm.weight.grad = norm.weight.grad, None
    model = DistributedDataParallel(norm) if "DDP" in way else norm
    if "ours" in way:
        norm.forward = lambda x: layer_norm(x, 8, norm.weight, norm.bias)
    ((model(x[rank]) * dy[rank]).sum() / rows).backward()
    return [round(r, 2) for r in (norm.weight.grad / expected)[:3].tolist()]


for way in "nobody adds", "DDP", "ours", "ours in DDP":
    print(f"{way}: dw over what it should be:", everywhere(ratios, way, 6)[0])

# %%
# Where nobody adds, a rank has its own gradient, and the weights drift apart.
# Ours are too large by the number of ranks, in DDP as well: the mean of equal
# sums is the sum. No error tells. Let one of them add, and divide the loss so.
#
# Exercise 1: what is the loss divided by?
# ----------------------------------------
#
# Ours adds, without DDP. A rank has ``rows`` rows: by what does it divide the
# sum of their losses?
#
# **Hint.** Whose rows are in a sum over all ranks?


def divisor(rows, ranks):
    return rows  # to do


def exercise_1(divisor):
    found = everywhere(ratios, "ours", divisor(6, WORLD))
    print("dw over what it should be:", found[0])
    return found == [[1, 1, 1]] * WORLD


exercise_1(divisor)

# %%

# Solution 1


def divisor_1(rows, ranks):
    return rows * ranks


assert exercise_1(divisor_1)
