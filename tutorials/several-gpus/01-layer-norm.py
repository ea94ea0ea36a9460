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
    block = max(triton.next_power_of_2(N), 16)
    return {"BLOCK": block, "num_warps": min(max(block // 1024, 4), 16)}


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


def work():
    """Be a rank that makes the calls it is sent."""
    results = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what is printed goes with the errors
    join(int(os.environ["RANK"]), "file://" + os.path.abspath("ranks"))
    while call := sys.stdin.readline():
        module, name, args = pickle.loads(bytes.fromhex(call))
        function = getattr(importlib.import_module(module), name)
        pickle.dump(function(*args), results)
        results.flush()
    dist.destroy_process_group()


def written(folder):
    """Write a module of imports, CONSTANTS and definitions; its name."""
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
    with open(f"{folder}/{name}.py", "w") as file:
        file.write(text)
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
# The clock lets all ranks of a group begin together; a figure shows the
# slowest.

# %%

# Scaffold: the clock of a rank, and a benchmark of the first ranks.

import functools


@functools.cache
def group_of(ranks):
    """The group of the first ranks; None on the others."""
    group = dist.new_group(range(ranks), PATIENCE)
    return group if dist.get_rank() < ranks else None


def clock(fn, group):
    """µs of this rank: median, 20 % and 80 % quantiles."""
    fn()  # compiles
    graph = torch.cuda.CUDAGraph()  # replayed without Python
    given = None, torch.cuda.current_stream(), "thread_local"
    with torch.cuda.graph(graph, *given):
        fn()
    cache, event = torch.empty(2**28, device=DEVICE), torch.cuda.Event
    pairs = [[event(enable_timing=True) for _ in "ab"] for _ in range(60)]
    for start, end in pairs:
        cache.zero_()  # nothing is left in L2
        dist.all_reduce(cache[:1], group=group)  # all are here
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    times = torch.tensor([1e3 * a.elapsed_time(b) for a, b in pairs[10:]])
    return times.quantile(torch.tensor([0.5, 0.2, 0.8])).tolist()


# %%

# Scaffold: a benchmark of ranks.


def timed(name, mode, time, lines, sizes, x="N", **more):
    """Draw a benchmark; its table, or None where there is no clock."""

    def measure(M, N, dtype, mode, ranks, provider):
        """Device time of a CUDA graph on the slowest rank. All begin together,
        with an overwritten L2 cache; median, 20 % and 80 % quantiles."""
        if not ON_GPU or ranks > WORLD:
            return 3 * [float("nan")]
        found = everywhere(time, M, N, dtype, mode, ranks, provider)
        return max(filter(None, found), default=None)

    mark = triton.testing.perf_report(triton.testing.Benchmark(
        [x], sizes, "provider", list(lines), list(lines.values()), name,
        args={"M": 4096, "dtype": torch.bfloat16, "mode": mode} | more,
        x_log=x == "N", y_log=True, ylabel="µs",
    ))  # fmt: skip
    table = mark(measure).run(show_plots=ON_GPU, return_df=True)
    table.columns = [x, *lines]
    table = table.astype({x: int}).set_index(x).dropna(how="all")
    if len(table):
        return table
    return print("Timing needs two GPUs; the page has recorded figures.")


# %%
# Others gather whole rows and keep their columns of ``y``; so does DTensor,
# PyTorch's tensor that knows its layout over ranks. Forward, one line hides
# the other.


def as_rows(t, group):
    return torch.cat(gathered(t, group).unbind(), dim=-1)


def as_dtensor(t, group):
    from torch.distributed.tensor import DeviceMesh, DTensor, Replicate, Shard

    mesh = DeviceMesh.from_group(group, DEVICE.type)
    if t.dim() == 2:
        return DTensor.from_local(t, mesh, [Shard(1)])
    return DTensor.from_local(as_rows(t, group), mesh, [Replicate()])


def time_columns(M, N, dtype, mode, ranks, way):
    if not (group := group_of(ranks)):
        return None
    n, grad = N // ranks, torch.autograd.grad
    x, dy = torch.randn(2, M, n, device=DEVICE, dtype=dtype)
    w, b = torch.rand(2, n, device=DEVICE, dtype=dtype)
    given = ((n,) * ranks, group) if way == "triton" else ()
    stats = forward(x, w, b, 1e-5, *given)[1]
    there = lambda: forward(x, w, b, 1e-5, *given)
    back = lambda: backward(dy, x, w, stats, *given)
    if place := {"rows": as_rows, "dtensor": as_dtensor}.get(way):
        X, W, B = (place(t, group).requires_grad_() for t in (x, w, b))
        y = F.layer_norm(X, (N,), W, B)
        there = lambda: F.layer_norm(place(x, group), (N,), W, B)
        back = lambda: grad(y, (X, W, B), place(dy, group), retain_graph=True)
    with contextlib.suppress(RuntimeError if way == "dtensor" else ()):
        return clock(there if mode == "forward" else back, group)  # if it runs


def columns(mode, bar):
    lines = {"triton": "Two numbers a row", "rows": "Rows gathered",
             "dtensor": "DTensor", "alone": "No other rank"}  # fmt: skip
    given = time_columns, lines, [2**i for i in range(11, 17)]
    t = timed(f"layer-norm-columns-{mode}", mode, *given, ranks=2)
    if t is not None:
        print("Time over that of two numbers a row:")
        print(t.div(t["triton"], axis=0).round(2).to_string())
        at = t.index[t["rows"] >= bar * t["triton"]].tolist()
        print(f"To gather takes {bar} times as long, or more, at N = {at}")
        left = (t["rows"] / bar - t["alone"]).round(1).to_dict()
        print("For that, other ranks may cost (µs):", left)
        print("They cost:", (t["triton"] - t["alone"]).round(1).to_dict())


columns("forward", 6)

# %%
# 8 bytes a row and rank replace the row. Who gathers does the work of all, so
# that the gain grows with the width. What other ranks cost is the distance to
# the line without them: where rows are narrow mostly the start of an exchange
# and of a second kernel, where they are wide to read ``x`` again. A gain of
# six would leave the narrowest rows less time than an exchange takes to start.
# At 32768 columns the kernel without other ranks is slow by itself.
#
# Backward, ``dy`` is gathered; DTensor gathers ``x`` again as well. From 32768
# columns on, a rank without others needs both kernels, too: what others cost
# is the exchange alone.

columns("backward", 3.5)

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
    x, dy = torch.randn(2, M, N, device=DEVICE, dtype=dtype)
    w, b = torch.rand(2, N, device=DEVICE, dtype=dtype)
    a = torch.randn(4096, 2048, device=DEVICE, dtype=dtype)
    _, stats = forward(x, w, b, 1e-5)

    def step():
        _, sums = backward(dy, x, w, stats)
        buffers = {"alone": [], "then": [], "two": sums}.get(way, [sums])
        given = dist.ReduceOp.SUM, group, way == "beside"
        tasks = [dist.all_reduce(t, *given) for t in buffers]
        if way in ("then", "beside"):
            a @ a[:2048]  # of the layer before, whose turn it is
        if way == "beside":
            tasks[0].wait()

    return clock(step, group)


lines = {"alone": "No other rank", "one": "One all-reduce",
         "two": "Two", "then": "None, then a matrix product",
         "beside": "One beside this product"}  # fmt: skip
given = time_rows, lines, [2**i for i in range(10, 16)]
t = timed("layer-norm-rows", "backward", *given, ranks=2)
if t is not None:
    for line, base in ("one", "alone"), ("two", "alone"), ("beside", "then"):
        print(line, "adds (µs):", (t[line] - t[base]).round(1).to_dict())

# %%
# One all-reduce adds its start, whatever the width; a second one adds less.
# Beside the product most of it is hidden.
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
    "and weights of the shape in which x ends, all where the kernels run"
)


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
            has[name] += " with a gradient" * t.requires_grad
            has[name] += f" of {(*t.shape,)}" * (end != shape)
            bits = t.is_floating_point() and 8 * t.itemsize
            fits &= t.device.type == DEVICE.type and bits in (16, 32)
            fits &= end == shape
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
# On parts that are not of one size, against PyTorch's in float64:


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
