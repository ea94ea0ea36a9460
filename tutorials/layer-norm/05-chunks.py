r"""
Chunks instead of padding
=========================

How does a row of 4608 columns fit into registers without a tile of 8192?
Cut it into chunks, of which only the last can have idle lanes, and let narrow
rows share a program.

**What you need:** the formulas of `Layer normalization, both passes
<01-layer-norm.html>`_.
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
# A *lane* is a place for one element, and a *tile* has a power of two of them.
# A *chunk* is one of several tiles that hold a row together.
# A row of 4608 columns leaves almost half of the 8192 lanes of one tile idle,
# but only half of the last of five chunks of 1024; idle lanes have no color:

# %%

# Drawing: which lanes of one tile and of chunks are idle.

plt.figure("4608 columns in a tile of 8192 lanes or 5 chunks", (7.5, 1.8))
for level, chunk in (1, 8192), (0, 1024):
    plt.barh(level, 4608, 0.6, color="C0", alpha=0.6)
    for start in range(0, 4608, chunk):
        plt.barh(level, chunk, 0.6, start, fc="none", ec="k")
plt.yticks((0, 1), ("5 chunks", "1 tile"))
plt.show()

# %%
# Forward, in chunks
# ------------------
#
# A chunk has ``ROWS`` rows, of which ``left`` exist; the last masks columns.


@triton.jit
def _chunk(c, left, N: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr):
    """Row and column of the lanes of a chunk, and which of them exist."""
    row = tl.arange(0, ROWS)[:, None]
    col = c * CHUNK + tl.arange(0, CHUNK)[None, :]
    mask = row < left
    if (c + 1) * CHUNK > N:
        mask = mask & (col < N)
    return row, col, mask


@triton.jit
def _load_chunks(ptr, stride, left, N: tl.constexpr, ROWS: tl.constexpr,
                 CHUNK: tl.constexpr, HINT: tl.constexpr):  # fmt: skip
    """Rows of a matrix as a tuple of chunks; 0 in lanes that do not exist."""
    xs = ()
    for c in tl.static_range((N + CHUNK - 1) // CHUNK):
        row, col, mask = _chunk(c, left, N, ROWS, CHUNK)
        at = ptr + (row * stride + col)
        xs += (tl.load(at, mask=mask, other=0, eviction_policy=HINT),)
    return xs


# %%
# ``tl.static_range`` unrolls a loop: the tuple grows, and stays in registers.
# ``w`` and ``b`` are loaded last, for fewer registers. *Eviction policies*
# tell the caches to keep them (``evict_last``); ``HINT`` is that of ``x``.


@triton.jit
def _layer_norm_fwd_chunks(
    x_ptr, w_ptr, b_ptr, y_ptr, mean_ptr, rstd_ptr,  # w and b may be None
    M, eps: tl.constexpr, N: tl.constexpr,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, HINT: tl.constexpr,
):  # fmt: skip
    acc: tl.constexpr = mean_ptr.dtype.element_ty  # float32, or float64
    first = tl.program_id(0) * ROWS
    left = M - first
    start = tl.cast(first, tl.int64) * N  # M * N may pass 2**31
    xs = _load_chunks(x_ptr + start, N, left, N, ROWS, CHUNK, HINT)
    total = tl.zeros((ROWS, CHUNK), acc)
    for c in tl.static_range(len(xs)):
        total += xs[c].to(acc)
    mean = tl.sum(total, axis=1)[:, None] / N
    total = tl.zeros((ROWS, CHUNK), acc)
    for c in tl.static_range(len(xs)):
        _, col, _ = _chunk(c, left, N, ROWS, CHUNK)
        d = tl.where(col < N, xs[c].to(acc) - mean, 0)  # idle lanes: 0 again
        total += d * d
    rstd = 1 / tl.sqrt(tl.sum(total, axis=1)[:, None] / N + eps)
    row = tl.arange(0, ROWS)[:, None]
    tl.store(mean_ptr + first + row, mean, mask=row < left)
    tl.store(rstd_ptr + first + row, rstd, mask=row < left)
    KEEP: tl.constexpr = "evict_last"
    for c in tl.static_range(len(xs)):
        row, col, mask = _chunk(c, left, N, ROWS, CHUNK)
        at = row * 0 + col  # of a whole tile: loads of 16 bytes
        y = (xs[c].to(acc) - mean) * rstd
        if w_ptr is not None:
            y *= tl.load(w_ptr + at, col < N, eviction_policy=KEEP).to(acc)
        if b_ptr is not None:
            y += tl.load(b_ptr + at, col < N, eviction_policy=KEEP).to(acc)
        tl.store(y_ptr + start + (row * N + col), y, mask=mask)


# %%
# A *plan*: rows and columns of a chunk, and warps (32 threads) of a program.


def forward(x, w, b, eps, plan):
    """y, mean and rstd for a contiguous (M, N) x."""
    M, N = x.shape
    acc = torch.promote_types(x.dtype, torch.float32)
    y = torch.empty_like(x)
    mean, rstd = torch.empty(2, M, dtype=acc, device=x.device)
    grid = (triton.cdiv(M, plan["ROWS"]),)
    _layer_norm_fwd_chunks[grid](x, w, b, y, mean, rstd, M, eps, N, **plan)
    return y, mean, rstd


x = torch.randn(3, 10, device=DEVICE)
plan = {"ROWS": 1, "CHUNK": 4, "HINT": "", "num_warps": 4}
y, _, _ = forward(x, None, None, 1e-5, plan)
print("chunks of 4:", torch.allclose(y, F.layer_norm(x, (10,)), atol=1e-5))

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
# What do idle lanes cost? Four warps for each kind, no ``w`` and ``b``:


@triton.testing.perf_report(triton.testing.Benchmark(
    ["N"], [512 * i for i in (5, 7, 8, 9, 11, 13, 16)], "provider",
    ["triton", "tile"], ["Chunks", "One tile"], "layer-norm-chunks-lanes",
    {"M": 4096, "dtype": torch.float16, "mode": "forward"}, ylabel="GB/s",
))  # fmt: skip
def lanes(M, N, dtype, mode, provider):
    """Device time of a CUDA graph, replayed with an overwritten L2 cache;
    median, 20 % and 80 % quantiles."""
    x = torch.randn(M if ON_GPU else 1, N, device=DEVICE).to(dtype)
    chunk = triton.next_power_of_2(N) if provider == "tile" else 1024
    plan = {"ROWS": 1, "CHUNK": chunk, "HINT": "", "num_warps": 4}
    return speed(2 * x.nbytes, lambda: forward(x, None, None, 1e-5, plan))


report(lanes)

# %%
# No difference: they move no bytes, but take registers and instructions.
# The forward pass has some to spare; the backward pass will not.
#
# A formula instead of a table
# ----------------------------
#
# A thread loads 16 bytes of a row of a chunk at once, a warp 512 bytes.
# Our rule: a warp holds at most 4096 bytes of a row, which are 64 columns of
# 16 bits a thread; programs have at least four warps, narrow rows two.
# Up to 2 KB two rows share a program, up to 512 bytes four or more.
# A multiprocessor has 65536 registers. With at most 64 a thread, two programs
# of 16 warps fit, or four of 8; with 80, three of 8 warps (``maxnreg``).

CUDA = ON_GPU and torch.version.hip is None


def tile_of(N, itemsize, warps, times=1):
    chunk = min(512 // itemsize * warps, triton.next_power_of_2(N))
    rows = 512 // itemsize * warps // chunk * times
    return {"ROWS": rows, "CHUNK": chunk, "num_warps": warps}


def plan_forward(N, itemsize, times=1):
    row = N * itemsize
    warps = triton.next_power_of_2(triton.cdiv(row, 4096))
    warps = int(times * max(warps, 2 if row <= 3072 else 4))
    plan = tile_of(N, itemsize, warps, 2 if row <= 2048 else 1)
    if CUDA and 16384 < row <= 49152:
        plan["maxnreg"] = 80 if 20480 < row <= 32768 else 64
    return plan | {"HINT": "evict_first" if row <= 6144 else ""}


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


def benchmark(name, mode, widths, peers=("torch", "torch.compile"), **ours):
    names = {"triton": "Triton", "torch": "PyTorch", "copy": "Copy"}
    lines = [*ours, *peers, "copy"]

    def measure(M, N, dtype, mode, provider):
        """Device time of a CUDA graph, replayed with an overwritten L2 cache;
        median, 20 % and 80 % quantiles."""
        if not ON_GPU:
            return 3 * [float("nan")]  # the interpreter cannot be timed
        x, w, b, dy = inputs(M, N, dtype)
        f, out = ours.get(provider, F.layer_norm), torch.empty_like(dy)
        if provider == "torch.compile":
            torch._dynamo.reset()  # nothing is left of other shapes
            torch._functorch.config.donated_buffer = False  # runs many times
            f = torch.compile(lambda *args: F.layer_norm(*args), dynamic=False)
        forward = lambda: f(x, (N,), w, b)
        y, grad = forward(), torch.autograd.grad
        backward = lambda: grad(y, (x, w, b), dy, retain_graph=True)
        if provider == "copy":  # of two matrices; an addition moves three
            forward = lambda: out.copy_(dy)
            backward = lambda: torch.add(x.detach(), dy, out=out)
        moved, fn = (2, forward) if mode == "forward" else (3, backward)
        return speed(moved * dy.nbytes, fn)

    return triton.testing.perf_report(triton.testing.Benchmark(
        ["N"], widths, "provider", lines, [names.get(n, n) for n in lines],
        f"layer-norm-chunks-{name}",
        {"M": 4096, "dtype": torch.float16, "mode": mode}, ylabel="GB/s",
    ))(measure)  # fmt: skip


def by(rule):
    return lambda x, _, w, b: forward(x, w, b, 1e-5, rule(x.shape[1], 2))


WIDTHS = [512 * i for i in (1, 2, 3, 4, 5, 7, 8, 9, 10, 13, 16, 17, 20, 31)]
report(benchmark("forward", "forward", WIDTHS, triton=by(plan_forward)))

# %%
# All widths are near the copy; torch.compile is faster at 512 only.
#
# Backward: registers
# -------------------
#
# The backward kernel keeps two sums in float32 for each lane, ``dw`` and
# ``db``, beside ``x``, ``dy`` and ``w``: 3.5 registers in 16 bits.
# A multiprocessor has 65536: 6.4 a lane for five chunks of 2048, but 4 for a
# tile of 16384: with loads ahead some are *spilled* to memory.
#
# One reduction adds up both sums of a row, so warps meet half as often.


@triton.jit
def _add_two(a1, a2, b1, b2):
    return a1 + b1, a2 + b2


@triton.jit
def _means_of_chunks(xs, dys, ws, mean, rstd, N: tl.constexpr):
    """c1 * rstd**2 and c2 * rstd for each row of a tile."""
    sum1 = tl.zeros(xs[0].shape, mean.dtype)
    sum2 = tl.zeros(xs[0].shape, mean.dtype)
    for c in tl.static_range(len(xs)):
        wdy = dys[c].to(mean.dtype)
        wdy = wdy * ws[c].to(mean.dtype) if len(ws) > 0 else wdy
        sum1 += wdy * (xs[c].to(mean.dtype) - mean)
        sum2 += wdy
    sum1, sum2 = tl.reduce((sum1, sum2), 1, _add_two)
    return sum1[:, None] * (rstd * rstd * rstd / N), sum2[:, None] * (rstd / N)


@triton.jit
def _gradients(x, dy, w, mean, rstd, c1, c2):
    """dx of a chunk, and its terms of dw and db; w may be None."""
    d = x.to(mean.dtype) - mean
    dy = dy.to(mean.dtype)
    scaled = dy * rstd
    wdy = scaled if w is None else scaled * w.to(mean.dtype)
    return wdy - (d * c1 + c2), scaled * d, dy


@triton.jit
def _store_sums_of_chunks(ptr, dws, dbs, N: tl.constexpr):
    CHUNK: tl.constexpr = dws[0].shape[1]
    ptr += tl.program_id(0) * 2 * N
    for c in tl.static_range(len(dws)):
        col = c * CHUNK + tl.arange(0, CHUNK)
        tl.store(ptr + col, tl.sum(dws[c], axis=0), mask=col < N)
        tl.store(ptr + N + col, tl.sum(dbs[c], axis=0), mask=col < N)


# %%
# A program loops over tiles, some `in flight <04-loads-in-flight.html>`_.
# ``disable_licm`` keeps the compiler from converting ``w`` to float32 before
# the loop, for twice the registers.


@triton.jit
def _layer_norm_bwd_chunks(
    dy_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr,  # w may be None
    dx_ptr, sums_ptr,  # (M, N); (programs, 2, N); or None: not wanted
    M, N: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
    STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    zeros = tl.zeros((ROWS, CHUNK), mean_ptr.dtype.element_ty)
    ws, dws, dbs = (), (), ()
    if w_ptr is not None:
        ws = _load_chunks(w_ptr, 0, ROWS, N, ROWS, CHUNK, "evict_last")
    for _ in tl.static_range((N + CHUNK - 1) // CHUNK):
        dws += (zeros,)
        dbs += (zeros,)
    for first in tl.range(
        tl.program_id(0) * ROWS, M, tl.num_programs(0) * ROWS,
        num_stages=STAGES, disable_licm=True,
    ):  # fmt: skip
        row, left = first + tl.arange(0, ROWS)[:, None], M - first
        mean = tl.load(mean_ptr + row, mask=row < M, other=0)
        rstd = tl.load(rstd_ptr + row, mask=row < M, other=0)
        start = tl.cast(first, tl.int64) * N
        xs = _load_chunks(x_ptr + start, N, left, N, ROWS, CHUNK, "")
        dys = _load_chunks(dy_ptr + start, N, left, N, ROWS, CHUNK, "")
        c1, c2 = _means_of_chunks(xs, dys, ws, mean, rstd, N)
        new_dws, new_dbs = (), ()
        for c in tl.static_range(len(xs)):
            w = None if w_ptr is None else ws[c]
            dx, dw, db = _gradients(xs[c], dys[c], w, mean, rstd, c1, c2)
            new_dws += (dws[c] + dw,)
            new_dbs += (dbs[c] + db,)
            if dx_ptr is not None:
                i, j, mask = _chunk(c, left, N, ROWS, CHUNK)
                tl.store(dx_ptr + start + (i * N + j), dx, mask=mask)
        dws, dbs = new_dws, new_dbs
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    if sums_ptr is not None:
        _store_sums_of_chunks(sums_ptr, dws, dbs, N)


# %%
# A second kernel adds up the buffers, a matrix of ``2 N`` columns.
# From Hopper on it starts ``EARLY`` (*programmatic dependent launch*), while
# programs still run; ``gdc_wait`` waits until all buffers are written.


@triton.jit
def _add_up_chunks(
    sums_ptr, grads_ptr,  # (programs, WIDTH) and (WIDTH,)
    programs, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        tl.extra.cuda.gdc_wait()
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    rows = tl.arange(0, ROWS)[:, None]
    mask = (rows < programs) & (cols < WIDTH)
    sums = tl.load(sums_ptr + rows * WIDTH + cols, mask=mask, other=0)
    tl.store(grads_ptr + cols, tl.sum(sums, axis=0), mask=cols < WIDTH)


# %%
# The rule: one program a multiprocessor, of 8 warps, or of 4 in narrow rows.
# A thread holds up to 32 columns of 16 bits, in 1 to 8 rows, or 40 of a wide
# row; tiles in flight fit into 96 KiB of shared memory.

GPU = torch.cuda.get_device_properties(DEVICE) if ON_GPU else None
NUM_SMS = GPU.multi_processor_count if ON_GPU else 4
EARLY = CUDA and torch.cuda.get_device_capability() >= (9, 0)


def plan_backward(N, itemsize, times=1):
    warps = int(times * (4 if N * itemsize <= 2048 else 8))
    plan = tile_of(N, itemsize, warps)
    chunks = triton.cdiv(N, plan["CHUNK"])
    plan["ROWS"] = min(plan["ROWS"] * max(4 // chunks, 1), 8)
    tile = 2 * plan["ROWS"] * chunks * plan["CHUNK"] * itemsize
    return plan | {"STAGES": 1 + min(98304 // tile, 3)}


def backward(dy, x, w, mean, rstd, dx, grads, plan):
    """Fill dx and grads, which are dw and db; either may be None."""
    (M, N), sums = x.shape, None
    programs = min(NUM_SMS, triton.cdiv(M, plan["ROWS"]))
    if grads is not None:
        sums = torch.empty(programs, 2, N, dtype=mean.dtype, device=x.device)
    _layer_norm_bwd_chunks[(programs,)](
        dy, x, w, mean, rstd, dx, sums, M, N, EARLY=EARLY, **plan
    )
    if grads is not None:
        option = {"launch_pdl": True} if EARLY else {}
        rows = triton.next_power_of_2(max(programs, 1))
        _add_up_chunks[(triton.cdiv(2 * N, 16),)](
            sums, grads, programs, 2 * N, rows, 16, EARLY, **option
        )


# %%


class LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, b, eps, rule):
        x, w, b = (None if t is None else t.contiguous() for t in (x, w, b))
        plan = plan_forward(x.shape[1], x.itemsize)
        y, mean, rstd = forward(x, w, b, eps, plan)
        ctx.save_for_backward(x, w, mean, rstd)
        types = {t.dtype for t in (w, b) if t is not None}
        ctx.grads_dtype = types.pop() if len(types) == 1 else mean.dtype
        ctx.plan = rule(x.shape[1], x.itemsize)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        x, w, mean, rstd = ctx.saved_tensors
        for_x, for_w, for_b, *_ = ctx.needs_input_grad
        dx = torch.empty_like(x) if for_x else None
        grads = dw = db = None
        if for_w or for_b:
            dw, db = grads = x.new_empty(2, x.shape[1], dtype=ctx.grads_dtype)
        backward(dy.contiguous(), x, w, mean, rstd, dx, grads, ctx.plan)
        return dx, dw if for_w else None, db if for_b else None, None, None


# %%


def layer_norm(x, normalized_shape, weight=None, bias=None, eps=1e-5):
    """Normalize x over its last dimensions; weight and bias may be None."""
    one = isinstance(normalized_shape, int)
    shape = torch.Size([normalized_shape] if one else normalized_shape)
    N, most = shape.numel(), 65536 // x.itemsize
    for name, t in {"x": x, "weight": weight, "bias": bias}.items():
        if t is None and name != "x":
            continue
        if not t.is_floating_point() or t.itemsize == 1:
            raise TypeError(f"{name} is {t.dtype}: floats of 16 bits or more")
        if t.device != x.device or t.device.type != DEVICE.type:
            raise ValueError(f"{name} is on {t.device}: all go on {DEVICE}")
        if (t.shape[-len(shape) :] if t is x else t.shape) != shape or N == 0:
            shapes = f"{(*t.shape,)}, normalized_shape is {(*shape,)}"
            raise ValueError(f"the shape of {name} is {shapes}")
        if t.requires_grad and torch.is_grad_enabled():
            most = 20480 // x.itemsize  # two sums beside the row
    if not eps >= 0:
        raise ValueError(f"eps is {eps}: it must be 0 or more")
    if N % 8 > 0 or most < N:
        taken = f"this page takes multiples of 8 up to {most}"
        raise ValueError(f"{N} columns: {taken}; 11-every-width takes all")
    w, b = (None if t is None else t.reshape(N) for t in (weight, bias))
    given = x.reshape(-1, N), w, b, eps, plan_backward
    return LayerNorm.apply(*given).reshape(x.shape)


M, N = (1151, 4608) if ON_GPU else (9, 200)
for dtype in torch.float16, torch.float32:
    check(layer_norm, M, N, dtype)


def padded(rule):
    """One tile; above 8192 columns loads ahead would spill it."""
    wide = triton.next_power_of_2
    ahead = lambda n: {"STAGES": 1} if n > 8192 else {}
    whole = lambda n, size: rule(n, size) | {"CHUNK": n} | ahead(n)
    return lambda N, size: whole(wide(N), size)


def trained_by(rule):
    return lambda x, _, w, b: LayerNorm.apply(x, w, b, 1e-5, rule)


ours, tile = map(trained_by, (plan_backward, padded(plan_backward)))
report(benchmark("backward", "backward", WIDTHS[:-1], triton=ours, tile=tile))

# %%
# Up to 2048 columns both are one kernel; then chunks are as fast or faster,
# most just above a power of two.
# Above 8192 the tile has no registers for loads ahead; chunks have them.
#
# What do the formulas lose to other warps, at widths not used to choose them?

OTHERS = [1280, 2816, 3328, 5888, 9984]
TIMES = {"triton": 1, "half the warps": 0.5, "twice the warps": 2}
forward_of = lambda n: by(lambda *size: plan_forward(*size, n))
backward_of = lambda n: trained_by(lambda *size: plan_backward(*size, n))
for mode, of in ("forward", forward_of), ("backward", backward_of):
    rungs = {name: of(times) for name, times in TIMES.items()}
    report(benchmark(f"warps-{mode}", mode, OTHERS, (), **rungs))

# %%
# None is clearly faster, many are far slower. At 9984 backward half the warps
# would need 80 × 3.5 registers a thread, and there are 255.
#
# Exercise 1: no idle lanes
# -------------------------
#
# If the last chunk moves left until it ends with the row, no lane is idle, but
# two chunks share columns; in a sum each column counts once.
#
# **Hint.** Chunk ``c`` would begin at ``c * CHUNK`` if it were not moved.


@triton.jit
def _row_sums(x_ptr, sums_ptr, N: tl.constexpr, CHUNK: tl.constexpr):
    total = tl.zeros((CHUNK,), tl.float32)
    for c in tl.static_range((N + CHUNK - 1) // CHUNK):
        col = min(c * CHUNK, N - CHUNK) + tl.arange(0, CHUNK)
        total += tl.load(x_ptr + tl.program_id(0) * N + col)  # to do
    tl.store(sums_ptr + tl.program_id(0), tl.sum(total))


def exercise_1(kernel):
    x, sums = torch.ones(3, 13, device=DEVICE), torch.zeros(3, device=DEVICE)
    kernel[(3,)](x, sums, N=13, CHUNK=8)
    print("sums of rows of 13 ones:", sums.tolist())
    return (sums == 13).all().item()


exercise_1(_row_sums)

# %%

# Solution 1


@triton.jit
def _row_sums_1(x_ptr, sums_ptr, N: tl.constexpr, CHUNK: tl.constexpr):
    total = tl.zeros((CHUNK,), tl.float32)
    for c in tl.static_range((N + CHUNK - 1) // CHUNK):
        col = min(c * CHUNK, N - CHUNK) + tl.arange(0, CHUNK)
        x = tl.load(x_ptr + tl.program_id(0) * N + col)
        total += tl.where(col >= c * CHUNK, x, 0)
    tl.store(sums_ptr + tl.program_id(0), tl.sum(total))


assert exercise_1(_row_sums_1)
