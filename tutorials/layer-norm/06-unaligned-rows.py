r"""
Rows that begin anywhere
========================

Why does layer norm become slow when a row gets one column more?
A thread loads 16 bytes at once only from a multiple of 16 bytes: so the lanes
begin at such a place, up to 7 columns before the row.

**What you need:** the formulas of `Layer normalization, both passes
<01-layer-norm.html>`_, and the backward kernel of `Chunks instead of padding
<05-chunks.html>`_.
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
# A *lane* is a place for one element; 8 of 16 bits are a group of 16 bytes.
# Rows of 13 columns begin anywhere in a group, *shift* lanes after its start:

# %%

# Drawing: rows of 13 columns in groups of 8 lanes.

plt.figure("Rows of 13 columns in groups of 8 lanes", (7.5, 2.2))
for level, row in enumerate((8, 2, 1, 0)):
    shift = row * 13 % 8
    plt.text(-3.5, level, f"row {row}", va="center")
    plt.barh(level, 13, 0.7, shift, color="C0", alpha=0.6)
    plt.barh([level] * 24, 1, 0.7, range(24), fc="none", ec="0.7")
    plt.barh([level] * 3, 8, 0.7, [0, 8, 16], fc="none", ec="k", lw=1.5)
plt.axis("off")
plt.show()

# %%
# A sum of a row loads whole groups of ``STEP`` lanes and skips the columns of
# other rows; with ``STEP`` = 1 lanes begin at column 0:


@triton.jit
def _sum_of_row(x_ptr, sums_ptr, N: tl.constexpr, BLOCK: tl.constexpr,
                STEP: tl.constexpr):  # fmt: skip
    shift = tl.program_id(0) * N % STEP
    lane = tl.arange(0, BLOCK)
    at = x_ptr + tl.program_id(0) * N // STEP * STEP + lane
    x = tl.load(at, mask=lane // STEP * STEP < N + shift, other=0)
    inside = (lane >= shift) & (lane < N + shift)
    tl.store(sums_ptr + tl.program_id(0), tl.sum(tl.where(inside, x, 0)))


x, sums = torch.ones(8, 13, device=DEVICE), torch.zeros(8, device=DEVICE)
_sum_of_row[(8,)](x, sums, N=13, BLOCK=32, STEP=8)
print("sums of rows of 13 ones:", sums.tolist())

# %%
# The 32 threads of a warp load with one *request*, each up to 16 bytes.
# From column 0 they take what divides the start of every row, 2 to 16 bytes.
# NVIDIA's profiler ``ncu`` counts the requests for a row:


@triton.testing.perf_report(triton.testing.Benchmark(
    ["N"], [4040, 4041, 4042, 4044], "provider", ["triton", "zero", "by hand"],
    ["Groups", "From column 0", "by hand: 512 bytes each"],
    "layer-norm-unaligned-requests", {"M": 4096, "dtype": torch.float16,
    "counter": "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum"},
    ylabel="load requests per row",
))  # fmt: skip
def requests(M, N, dtype, counter, provider):
    """Requests of loads that the L1 cache gets; caches are empty before."""
    if provider == "by hand":
        return triton.cdiv(2 * N, 512)
    if ON_GPU:
        x = torch.ones(M, N, dtype=dtype, device=DEVICE)
        step = 8 if provider == "triton" else 1
        for name in "compiles", f"counted {provider} {N} per {M}":
            with torch.cuda.nvtx.range(name):
                _sum_of_row[(M,)](x, x.new_empty(M), N, 4096, step)
    return 3 * [float("nan")]


requests.run(show_plots=ON_GPU)

# %%
# An odd width asks eight times as often; with groups all widths ask the same.
#
# Layer norm in such lanes
# ------------------------
#
# Column ``j`` is in lane ``j + shift``. Sums take what is ``inside``. Stores
# must not touch other rows: they write ``whole`` groups, then single columns.
# Rows ``STEP`` = 8 apart have one shift: a program takes such rows, and a
# column keeps its lane.


@triton.jit
def _lanes(c, shift, N, CHUNK, STEP):
    """Lanes of a chunk; which hold columns; which groups hold nothing else."""
    lane = c * CHUNK + tl.arange(0, CHUNK)[None, :]
    inside = (lane >= shift) & (lane < N + shift)
    group = lane // STEP * STEP
    whole = (group >= shift) & (group + STEP <= N + shift)
    return lane, inside, whole


@triton.jit
def _only_inside(x, c, shift, N, STEP):
    CHUNK: tl.constexpr = x.shape[1]
    if (STEP > 1 and c == 0) or (c + 1) * CHUNK > N:
        _, inside, _ = _lanes(c, shift, N, CHUNK, STEP)
        x = tl.where(inside, x, 0)
    return x


# %%
# A row is a tuple of chunks; the first and the last need masks. The last group
# may pass the end, but never a page of memory; ``memcheck`` may report it.


@triton.jit
def _load_lanes(ptr, stride, first, M, shift, N, ROWS, CHUNK, STEP):
    ptr += tl.cast(first, tl.int64) * stride // STEP * STEP
    row = tl.arange(0, ROWS)[:, None] * STEP
    xs = ()
    for c in tl.static_range((N + STEP + CHUNK - 2) // CHUNK):
        lane, _, _ = _lanes(c, shift, N, CHUNK, STEP)
        mask = row < M - first
        if (c + 1) * CHUNK > N:
            mask = mask & (lane // STEP * STEP < N + shift)
        x = tl.load(ptr + (row * stride + lane), mask=mask, other=0)
        xs += (_only_inside(x, c, shift, N, STEP),)
    return xs


@triton.jit
def _store_shifted(ptr, x, c, first, M, shift, N, STEP):
    CHUNK: tl.constexpr = x.shape[1]
    lane, inside, whole = _lanes(c, shift, N, CHUNK, STEP)
    row = tl.arange(0, x.shape[0])[:, None] * STEP
    ptr += tl.cast(first, tl.int64) * N // STEP * STEP
    at, mask = ptr + (row * N + lane), row < M - first
    if (STEP == 1 or c > 0) and (c + 1) * CHUNK <= N:
        tl.store(at, x, mask=mask)
    else:
        tl.store(at, x, mask=mask & whole)
        if STEP > 1:
            tl.store(at, x, mask=mask & inside & (whole == 0))


@triton.jit
def _load_vector(ptr, shift, N, ROWS, CHUNK, STEP):
    ws = ()
    if ptr is not None:
        for c in tl.static_range((N + STEP + CHUNK - 2) // CHUNK):
            lane, inside, _ = _lanes(c, shift, N, CHUNK, STEP)
            at = ptr + (lane - shift + tl.zeros((ROWS, 1), tl.int32))
            ws += (tl.load(at, mask=inside, other=0),)
    return ws


# %%


@triton.jit
def _layer_norm_fwd_shifted(
    x_ptr, w_ptr, b_ptr, y_ptr, mean_ptr, rstd_ptr,  # w and b may be None
    M, stride: tl.constexpr, eps: tl.constexpr, N: tl.constexpr,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, STEP: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    acc: tl.constexpr = mean_ptr.dtype.element_ty
    i = tl.program_id(0)
    shift = i % STEP * N % STEP
    ws = _load_vector(w_ptr, shift, N, ROWS, CHUNK, STEP)
    bs = _load_vector(b_ptr, shift, N, ROWS, CHUNK, STEP)
    tiles = tl.cdiv(M, ROWS * STEP) * STEP
    for tile in tl.range(i, tiles, tl.num_programs(0), num_stages=STAGES,
                         disable_licm=True):  # fmt: skip
        first = tile // STEP * ROWS * STEP + tile % STEP
        row = first + tl.arange(0, ROWS)[:, None] * STEP
        xs = _load_lanes(x_ptr, stride, first, M, shift, N, ROWS, CHUNK, STEP)
        total = tl.zeros((ROWS, CHUNK), acc)
        for c in tl.static_range(len(xs)):
            total += xs[c].to(acc)
        mean = tl.sum(total, axis=1)[:, None] / N
        total = tl.zeros((ROWS, CHUNK), acc)
        for c in tl.static_range(len(xs)):
            d = _only_inside(xs[c].to(acc) - mean, c, shift, N, STEP)
            total += d * d
        rstd = 1 / tl.sqrt(tl.sum(total, axis=1)[:, None] / N + eps)
        tl.store(mean_ptr + row, mean, mask=row < M)
        tl.store(rstd_ptr + row, rstd, mask=row < M)
        for c in tl.static_range(len(xs)):
            y = (xs[c].to(acc) - mean) * rstd
            y = y * ws[c].to(acc) if w_ptr is not None else y
            y = y + bs[c].to(acc) if b_ptr is not None else y
            _store_shifted(y_ptr, y, c, first, M, shift, N, STEP)


# %%
# A warp holds some 4 KB of a row, as on `page 05 <05-chunks.html>`_. A thread
# loads 8 bytes at once, for few idle lanes; in 8 warps 16, for few chunks.
# With loads ahead a multiprocessor has 8 or 12 warps and up to 110 KB coming.

GPU = torch.cuda.get_device_properties(DEVICE) if ON_GPU else None
NUM_SMS = GPU.multi_processor_count if ON_GPU else 4


def plan_forward(N, itemsize, step):
    warps = triton.next_power_of_2(triton.cdiv(N * itemsize, 4200))
    tile = triton.next_power_of_2(N + step - 1)
    piece = 256 if step > 1 and warps < 8 else 512
    chunk = min(piece // itemsize * warps, tile)
    plan = {"CHUNK": chunk, "ROWS": max(1024 // itemsize // tile, 1)}
    most = 0 if step == 1 else 100000 if warps < 4 else 90000
    stages = 1 + min(3, most // (N * itemsize * 8 // warps))
    return plan | {"STAGES": stages, "STEP": step, "num_warps": warps}


def programs_for(M, N, itemsize, plan):
    step, tiles = plan["STEP"], triton.cdiv(M, plan["ROWS"] * plan["STEP"])
    warps = 12 if N * itemsize <= 3072 else 8  # on a multiprocessor
    fit = max(NUM_SMS * warps // plan["num_warps"] // step, 1)
    return step * (tiles if plan["STAGES"] == 1 else min(fit, tiles))


def lane_step(N, *matrices):
    step = 16 // matrices[0].itemsize
    far = [t.data_ptr() % 16 + (t.stride(0) - N) % step for t in matrices]
    return step if N % step > 0 and not any(far) else 1


def forward(x, w, b, eps, step):
    """y, mean and rstd for an (M, N) x, whose rows may be far apart."""
    (M, N), acc = x.shape, torch.promote_types(x.dtype, torch.float32)
    y = torch.empty(M, N, dtype=x.dtype, device=x.device)
    mean, rstd = torch.empty(2, M, dtype=acc, device=x.device)
    plan = plan_forward(N, x.itemsize, step)
    args = x, w, b, y, mean, rstd, M, x.stride(0), eps, N
    programs = programs_for(M, N, x.itemsize, plan)
    _layer_norm_fwd_shifted[(programs,)](*args, **plan)
    return y, mean, rstd


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


def benchmark(mode, widths, **ours):
    names = {"triton": "Triton", "torch": "PyTorch", "copy": "Copy"}
    lines = [*ours, "torch", "torch.compile", "copy"]

    def measure(M, N, dtype, mode, provider):
        """Device time of a CUDA graph, L2 overwritten: median, 20 %, 80 %."""
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
        f"layer-norm-unaligned-{mode}",
        {"M": 4096, "dtype": torch.float16, "mode": mode}, ylabel="GB/s",
    ))(measure)  # fmt: skip


zero = lambda x, _, w, b: forward(x, w, b, 1e-5, 1)
shift = lambda x, _, w, b: forward(x, w, b, 1e-5, lane_step(x.shape[1], x))
WIDTHS = [1151, 2047, 4095, 4096, 4097, 4098, 4100, 7777, 10231, 12345, 16381]
report(benchmark("forward", WIDTHS, triton=shift, unshifted=zero))

# %%
# One more column than 4096 makes ``unshifted`` much slower, ``Triton`` not.
# At 4096 both are one kernel, slower than `that of page 05 <05-chunks.html>`_:
# unshifted, our plan has no loads ahead (at odd widths there can be none).
#
# Backward
# --------
#
# Here, too, a program keeps its shift: the sums stay in registers.


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
def _store_sums_shifted(ptr, dws, dbs, shift, N, STEP):
    ptr += tl.program_id(0) * 2 * N - shift
    for c in tl.static_range(len(dws)):
        lane, inside, _ = _lanes(c, shift, N, dws[0].shape[1], STEP)
        tl.store(ptr + lane, tl.sum(dws[c], axis=0)[None, :], mask=inside)
        tl.store(ptr + N + lane, tl.sum(dbs[c], axis=0)[None, :], mask=inside)


# %%


@triton.jit
def _layer_norm_bwd_shifted(
    dy_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, dx_ptr, sums_ptr,
    M, stride: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr,
    CHUNK: tl.constexpr, STAGES: tl.constexpr, STEP: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    zeros = tl.zeros((ROWS, CHUNK), mean_ptr.dtype.element_ty)
    i = tl.program_id(0)
    shift = i % STEP * N % STEP
    ws = _load_vector(w_ptr, shift, N, ROWS, CHUNK, STEP)
    dws, dbs = (), ()
    for _ in tl.static_range((N + STEP + CHUNK - 2) // CHUNK):
        dws += (zeros,)
        dbs += (zeros,)
    tiles = tl.cdiv(M, ROWS * STEP) * STEP
    for tile in tl.range(i, tiles, tl.num_programs(0), num_stages=STAGES,
                         disable_licm=True):  # fmt: skip
        first = tile // STEP * ROWS * STEP + tile % STEP
        row = first + tl.arange(0, ROWS)[:, None] * STEP
        mean = tl.load(mean_ptr + row, mask=row < M, other=0)
        rstd = tl.load(rstd_ptr + row, mask=row < M, other=0)
        xs = _load_lanes(x_ptr, stride, first, M, shift, N, ROWS, CHUNK, STEP)
        dys = _load_lanes(dy_ptr, N, first, M, shift, N, ROWS, CHUNK, STEP)
        c1, c2 = _means_of_chunks(xs, dys, ws, mean, rstd, N)
        new_dws, new_dbs = (), ()
        for c in tl.static_range(len(xs)):
            w = None if w_ptr is None else ws[c]
            dx, dw, db = _gradients(xs[c], dys[c], w, mean, rstd, c1, c2)
            new_dws += (dws[c] + dw,)
            new_dbs += (dbs[c] + db,)
            if dx_ptr is not None:
                _store_shifted(dx_ptr, dx, c, first, M, shift, N, STEP)
        dws, dbs = new_dws, new_dbs
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    if sums_ptr is not None:
        _store_sums_shifted(sums_ptr, dws, dbs, shift, N, STEP)


# %%
# The second kernel and its early start are on `page 05 <05-chunks.html>`_.

EARLY = ON_GPU and torch.cuda.get_device_capability() >= (9, 0)
EARLY = EARLY and torch.version.hip is None


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


def plan_backward(N, itemsize, step):
    warps = 4 if N * itemsize <= 10200 else 8
    tile = triton.next_power_of_2(N + step - 1)
    piece = 256 if step > 1 and N * itemsize <= 9216 else 512
    chunk = min(piece // itemsize * warps, tile)
    plan = {"CHUNK": chunk, "ROWS": max(1024 // itemsize // chunk, 1)}
    stages = 1 + min(3, 90000 // (2 * N * itemsize * 8 // warps))
    return plan | {"STAGES": stages, "STEP": step, "num_warps": warps}


def backward(dy, x, w, mean, rstd, dx, grads, step):
    (M, N), sums = x.shape, None
    plan = plan_backward(N, x.itemsize, step) | {"EARLY": EARLY}
    programs = programs_for(M, N, x.itemsize, plan)
    if grads is not None:
        sums = torch.empty(programs, 2, N, dtype=mean.dtype, device=x.device)
    args = dy, x, w, mean, rstd, dx, sums, M, x.stride(0), N
    _layer_norm_bwd_shifted[(programs,)](*args, **plan)
    if grads is not None:
        option = {"launch_pdl": True} if EARLY else {}
        rows = triton.next_power_of_2(max(programs, 1))
        _add_up_chunks[(triton.cdiv(2 * N, 16),)](
            sums, grads, programs, 2 * N, rows, 16, EARLY, **option
        )


# %%


class LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, b, eps):
        w, b = (None if t is None else t.contiguous() for t in (w, b))
        x = x if x.stride(1) == 1 and x.stride(0) < 2**20 else x.contiguous()
        y, mean, rstd = forward(x, w, b, eps, lane_step(x.shape[1], x))
        ctx.save_for_backward(x, w, mean, rstd)
        types = {t.dtype for t in (w, b) if t is not None}
        ctx.grads_dtype = types.pop() if len(types) == 1 else mean.dtype
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        x, w, mean, rstd = ctx.saved_tensors
        N, dy = x.shape[1], dy.contiguous()
        for_x, for_w, for_b, *_ = ctx.needs_input_grad
        dx = torch.empty_like(dy) if for_x else None
        grads = dw = db = None
        if for_w or for_b:
            dw, db = grads = x.new_empty(2, N, dtype=ctx.grads_dtype)
        backward(dy, x, w, mean, rstd, dx, grads, lane_step(N, x, dy))
        return dx, dw if for_w else None, db if for_b else None, None


# %%


def layer_norm(x, normalized_shape, weight=None, bias=None, eps=1e-5):
    """Normalize x over its last dimensions; weight and bias may be None."""
    one = isinstance(normalized_shape, int)
    shape = torch.Size([normalized_shape] if one else normalized_shape)
    N, most = shape.numel(), 32768 // x.itemsize
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
            most = 20464 // x.itemsize  # two sums beside the row
    if not eps >= 0:
        raise ValueError(f"eps is {eps}: it must be 0 or more")
    if most < N:
        raise ValueError(f"{N} columns, over {most}: 11-every-width takes all")
    w, b = (None if t is None else t.reshape(N) for t in (weight, bias))
    return LayerNorm.apply(x.reshape(-1, N), w, b, eps).reshape(x.shape)


M, N = (1151, 4097) if ON_GPU else (9, 61)
for dtype in torch.float16, torch.float32:
    check(layer_norm, M, N, dtype)

report(benchmark("backward", WIDTHS[:-2], triton=layer_norm))

# %%
# In the backward pass, too, one more column costs little.
#
# Exercise 1: how far apart?
# --------------------------
#
# Rows 8 apart have one shift; with an even width, nearer rows. How far apart?
#
# **Hint.** So many rows together hold a multiple of 8 columns.


def distance(N):
    return 8  # to do


def exercise_1(distance):
    found = {N: distance(N) for N in (13, 14, 20, 24)}
    print("rows with one shift are so far apart:", found)
    return found == {13: 8, 14: 4, 20: 2, 24: 1}


exercise_1(distance)

# %%

# Solution 1


def distance_1(N):
    return max(8 // (N & -N), 1)  # N & -N: the power of two in N


assert exercise_1(distance_1)
