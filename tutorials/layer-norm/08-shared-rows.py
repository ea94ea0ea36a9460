r"""
Programs that share a row
=========================

How do you normalize a row of a million columns (2 MB) by reading it once?
Let many programs hold it together, each one a slice in registers, and tell
each other their sums while they work.

`Two sweeps <07-two-sweeps.html>`_ fetch a row twice if no cache holds it.
Programs that *wait for each other* fetch it once; the wait must cost no time.

**What you need:** `Two sweeps, and a variance that stays right
<07-two-sweeps.html>`_.
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
# A word that says whether it has arrived
# ---------------------------------------
#
# Two float32 numbers make one *word* of 64 bits.
# At first it is ``EMPTY``: two signaling NaNs, which no arithmetic gives.
# A program *publishes* by storing its word; others load it until it has come.
# ``inline_asm_elementwise`` runs PTX, NVIDIA's language below Triton's: others
# on the ``gpu`` see a ``relaxed`` access of 64 bits as a whole or not at all.
# `A lock <03-lock.html>`_ needs *acquire* and *release* for the memory that it
# guards; a word guards nothing, it is the message itself.

EMPTY = 0x7F800001_7F800001


@triton.jit
def _publish(words_ptr, first, s, a, b, SLICES: tl.constexpr,
             PTX: tl.constexpr):  # fmt: skip
    """Store the word of slice s for each row of a tile."""
    row = first + tl.arange(0, a.shape[0])
    at = words_ptr + row * SLICES + s
    low = a.to(tl.uint32, bitcast=True).to(tl.int64)
    word = low | b.to(tl.uint32, bitcast=True).to(tl.int64) << 32
    if PTX:
        tl.inline_asm_elementwise(
            "st.relaxed.gpu.global.b64 [$1], $2; mov.b32 $0, 0;", "=r,l,l",
            [at.to(tl.int64), word], tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        tl.store(at, word)


# %%
# If a word never comes, ``trap`` ends the kernel; the process loses its GPU.


@triton.jit
def _collect(words_ptr, first, ROWS: tl.constexpr, SLICES: tl.constexpr,
             PADDED: tl.constexpr, PTX: tl.constexpr):  # fmt: skip
    """For each row of a tile the numbers of all slices, then zeros."""
    row = first + tl.arange(0, ROWS)[:, None]
    s = tl.arange(0, PADDED)[None, :]
    at = words_ptr + row * SLICES + tl.minimum(s, SLICES - 1)
    if PTX:
        word = tl.inline_asm_elementwise(
            """{
            .reg .pred empty, again; .reg .b32 loads; mov.b32 loads, 0;
            LOAD:
            ld.relaxed.gpu.global.b64 $0, [$1];
            setp.eq.b64 empty, $0, 0x7F8000017F800001;
            add.u32 loads, loads, 1;
            setp.lt.and.u32 again, loads, 10000000, empty;
            @again bra LOAD; @empty trap;
            }""",
            "=&l,l", [at.to(tl.int64)], tl.int64, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        word = tl.load(at)
    a = word.to(tl.uint32).to(tl.float32, bitcast=True)
    b = (word >> 32).to(tl.uint32).to(tl.float32, bitcast=True)
    return tl.where(s < SLICES, a, 0), tl.where(s < SLICES, b, 0)


# %%
# The smallest example: each program has a slice of a row and wants two sums
# over all of it; to be timed, it asks for them many times.


@triton.jit
def _shared_sums(x_ptr, out_ptr, words_ptr, turns, later, LANES: tl.constexpr,
                 SLICES: tl.constexpr, PTX: tl.constexpr):  # fmt: skip
    s = tl.program_id(0)
    x = tl.load(x_ptr + s * LANES + tl.arange(0, LANES))[None, :]
    for turn in range(turns):
        a, b = tl.sum(x, 1), tl.sum(x * x, 1)
        _publish(words_ptr, turn, s, a, b, SLICES, PTX)
        due = tl.maximum(turn - later, 0)
        a, b = _collect(words_ptr, due, 1, SLICES, SLICES, PTX)
        tl.store(out_ptr + 2 * s, tl.sum(a))
        tl.store(out_ptr + 2 * s + 1, tl.sum(b))


# %%
# A program that waits for one that cannot start ends in the ``trap``.
# A *cooperative launch* fails if not all fit at the same time; ``maxnreg``
# limits the registers of a thread so that ``per_sm`` fit on a multiprocessor.
# The interpreter runs one program after the other, so there a kernel runs
# twice: the second time it finds what the first has published.

CUDA = ON_GPU and torch.version.hip is None
GPU = torch.cuda.get_device_properties(DEVICE) if ON_GPU else None
NUM_SMS = GPU.multi_processor_count if ON_GPU else 4


def together(kernel, programs, *args, per_sm, warps):
    """Launch programs that wait for each other."""
    options = {"num_warps": warps}
    if CUDA:
        registers = min(65536 // (32 * warps * per_sm) // 8 * 8, 255)
        options |= {"maxnreg": registers, "launch_cooperative_grid": True}
    for _ in range(1 if CUDA else 2):
        kernel[(programs,)](*args, PTX=CUDA, **options)


def empty_words(rows, slices):
    return torch.full((rows, slices), EMPTY if CUDA else 0, device=DEVICE)


def shared_sums(kernel, x, turns=1, later=0):
    slices, out = len(x), x.new_empty(len(x), 2)
    args = out, empty_words(turns, slices), turns, later, x.shape[1], slices
    together(kernel, slices, x, *args, per_sm=1, warps=4)
    return out


x = torch.arange(64.0, device=DEVICE).reshape(4, 16)
print("four programs know:", shared_sums(_shared_sums, x).tolist())

# %%
# A turn that waits at once for its words, and one that takes those before:


@triton.testing.perf_report(
    triton.testing.Benchmark(
        ["programs"], [2, 4, 8, 16, 32, 64, 128], x_log=True, ylabel="µs",
        line_arg="provider", line_vals=["triton", "later"],
        line_names=["At once", "A turn later"], args={"turns": 1000},
        plot_name="layer-norm-shared-rows-exchange",
    )
)  # fmt: skip
def exchange(turns, programs, provider):
    """CUDA events around a launch, over the number of its turns; median,
    20 % and 80 % quantiles."""
    if not ON_GPU:
        return 3 * [float("nan")]  # the interpreter cannot be timed
    x = torch.ones(programs, 16, device=DEVICE)
    later = int(provider == "later")
    fn = lambda: shared_sums(_shared_sums, x, turns, later)
    times = triton.testing.do_bench(fn, quantiles=[0.5, 0.2, 0.8])
    return [1000 * ms / turns for ms in times]


exchange.run(show_plots=ON_GPU)

# %%
# At once, words go to the second-level cache and back, and all wait for the
# last: in about that time a multiprocessor could copy its slice of a row.
# A turn later they are there already; what is left is to load them.
#
# Rows in slices
# --------------
#
# A *tile* is a few rows of a slice; a *group* of programs, one for each
# slice, takes tile after tile:

# %%

# Drawing: which tile is published and which is finished in each turn.

plt.figure("Turn t publishes tile t and finishes tile t - 1", (7.5, 1.2))
for t, (what, tile) in enumerate(["p0", "p1", "f0", "p2", "f1", "p3", "f2"]):
    what = "publish" if what == "p" else "finish"
    plt.barh(0, 1, 1, t, color=f"C{tile}", ec="black", alpha=0.6)
    plt.text(t + 0.5, 0, f"{what}\ntile {tile}", ha="center", va="center")
plt.axis("off")
plt.show()

# %%
# A slice has ``WIDTH`` columns in ``LANES`` lanes, a power of two; lanes
# outside are *masked*: they load 0 and store nothing.


@triton.jit
def _my_slice(N: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
              WIDTH: tl.constexpr):  # fmt: skip
    """Slice; first row, and rows to the next tile; columns; which exist."""
    SLICES: tl.constexpr = (N + WIDTH - 1) // WIDTH
    s, group = tl.program_id(0) % SLICES, tl.program_id(0) // SLICES
    lane = tl.arange(0, LANES)[None, :]
    inside = (lane < WIDTH) & (s * WIDTH + lane < N)
    step = tl.num_programs(0) // SLICES * ROWS
    return s, group * ROWS, step, s * WIDTH + lane, inside


@triton.jit
def _tile(first, cols, inside, M, N: tl.constexpr, ROWS: tl.constexpr):
    """Where a tile is in a matrix, and what of it exists."""
    row = tl.arange(0, ROWS)[:, None]
    start = tl.cast(first, tl.int64) * N  # 64 bits: M * N may pass 2**31
    return start, row * N + cols, inside & (row < M - first)


# %%
# A slice publishes its mean and ``m2``, the sum of squared distances from it;
# all are put together as lanes are in `Two sweeps <07-two-sweeps.html>`_.
# A single row needs a number, not a column, which would pass shared memory.


@triton.jit
def _column(t):
    return tl.sum(t) if t.shape[0] == 1 else t[:, None]


@triton.jit
def _statistics(means, m2s, eps: tl.constexpr, N: tl.constexpr,
                WIDTH: tl.constexpr):  # fmt: skip
    """Mean and 1 / standard deviation of each row."""
    s = tl.arange(0, means.shape[1])[None, :]
    n = tl.maximum(tl.minimum(N - s * WIDTH, WIDTH), 0).to(tl.float32)
    mean = tl.sum(means * n, 1) / N
    d = means - _column(mean)
    return mean, 1 / tl.sqrt(tl.sum(m2s + n * d * d, 1) / N + eps)


# %%
# The tile before waits; `stages <04-loads-in-flight.html>`_ load the next.


@triton.jit
def _layer_norm_fwd_shared(
    x_ptr, w_ptr, b_ptr, y_ptr, mean_ptr, rstd_ptr, words_ptr,
    M, eps: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr,
    LANES: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    SLICES: tl.constexpr = (N + WIDTH - 1) // WIDTH
    s, start, step, cols, inside = _my_slice(N, ROWS, LANES, WIDTH)
    w = tl.load(w_ptr + cols, mask=inside, other=0)
    b = tl.load(b_ptr + cols, mask=inside, other=0)
    before = tl.zeros((ROWS, LANES), x_ptr.dtype.element_ty)
    for first in tl.range(start, M + step, step, num_stages=3):
        at, cell, mask = _tile(first, cols, inside, M, N, ROWS)
        x = tl.load(x_ptr + at + cell, mask=mask, other=0)
        mean = tl.sum(x.to(tl.float32), 1) / tl.minimum(N - s * WIDTH, WIDTH)
        d = tl.where(inside, x.to(tl.float32) - mean[:, None], 0)
        _publish(words_ptr, first, s, mean, tl.sum(d * d, 1), SLICES, PTX)
        done = tl.maximum(first - step, start)
        end = tl.where(first > start, M, 0)  # in the first turn no row
        means, m2s = _collect(words_ptr, done, ROWS, SLICES, PADDED, PTX)
        mean, rstd = _statistics(means, m2s, eps, N, WIDTH)
        rows = done + tl.arange(0, ROWS)
        once = rows < tl.where(s == 0, end, 0)  # one slice stores them
        tl.store(mean_ptr + rows, mean, mask=once)
        tl.store(rstd_ptr + rows, rstd, mask=once)
        y = (before.to(tl.float32) - _column(mean)) * _column(rstd)
        y = y * w.to(tl.float32) + b.to(tl.float32)
        at, cell, mask = _tile(done, cols, inside, end, N, ROWS)
        tl.store(y_ptr + at + cell, y, mask=mask)
        before = x


# %%
# A group has as many programs as a row has slices of ``lanes`` columns; if
# programs would be left over, it has more programs, and slices are narrower.


def cut(M, N, rows, lanes, per_sm):
    """Groups, programs, words, and tiles as a kernel takes them."""
    programs, least = NUM_SMS * per_sm, triton.cdiv(N, lanes)
    groups = max(min(programs // least, triton.cdiv(M, rows)), 1)
    padded = triton.next_power_of_2(least)
    unit = min(lanes, 64)  # slices begin at a multiple of 128 bytes
    width = triton.cdiv(N, min(programs // groups, padded) * unit) * unit
    slices = triton.cdiv(N, width)
    words = empty_words(M + (groups + 1) * rows, slices)
    return groups, groups * slices, words, (rows, lanes, width, padded)


# Bytes. Without a GPU slices are narrow, so that small matrices have some.
SLICE = 8192 if ON_GPU else 256

# %%
# Backward: two more sums
# -----------------------
#
# ``dx`` needs the sums of :math:`w \, dy \, (x - \mu)` and :math:`w \, dy`
# over a row: one word again.
# A program adds up ``dw`` and ``db`` of its columns by itself.


@triton.jit
def _add_pairs(a1, a2, b1, b2):
    return a1 + b1, a2 + b2


@triton.jit
def _slice_sums(x, dy, w, mean):
    wdy = w.to(tl.float32) * dy.to(tl.float32)
    d = x.to(tl.float32) - _column(mean)
    return tl.reduce((wdy * d, wdy), 1, _add_pairs)


@triton.jit
def _slice_gradients(x, dy, w, mean, rstd, sum1, sum2, dw, db,
                     N: tl.constexpr):  # fmt: skip
    sum1, sum2 = tl.reduce((sum1, sum2), 1, _add_pairs)
    c1 = _column(sum1 * rstd * rstd * rstd / N)
    c2 = _column(sum2 * rstd / N)
    d, dy = x.to(tl.float32) - _column(mean), dy.to(tl.float32)
    scaled = dy * _column(rstd)
    dx = scaled * w.to(tl.float32) - (d * c1 + c2)
    return dx, dw + tl.sum(scaled * d, 0)[None, :], db + tl.sum(dy, 0)[None, :]


# %%
# ``disable_licm`` keeps the compiler from converting ``w`` to float32 ahead of
# the loop: registers are full, of two tiles and two sums.


@triton.jit
def _layer_norm_bwd_shared(
    dy_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, dx_ptr, words_ptr, sums_ptr,
    M, N: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    SLICES: tl.constexpr = (N + WIDTH - 1) // WIDTH
    s, start, step, cols, inside = _my_slice(N, ROWS, LANES, WIDTH)
    w = tl.load(w_ptr + cols, mask=inside, other=0)
    dw, db = tl.zeros((1, LANES), tl.float32), tl.zeros((1, LANES), tl.float32)
    x1 = tl.zeros((ROWS, LANES), x_ptr.dtype.element_ty)
    dy1 = x1
    for first in tl.range(start, M + step, step, num_stages=3,
                          disable_licm=True):  # fmt: skip
        at, cell, mask = _tile(first, cols, inside, M, N, ROWS)
        x = tl.load(x_ptr + at + cell, mask=mask, other=0)
        dy = tl.load(dy_ptr + at + cell, mask=mask, other=0)
        rows = first + tl.arange(0, ROWS)
        mean = tl.load(mean_ptr + rows, mask=rows < M, other=0)
        sum1, sum2 = _slice_sums(x, dy, w, mean)
        _publish(words_ptr, first, s, sum1, sum2, SLICES, PTX)
        done = tl.maximum(first - step, start)
        end = tl.where(first > start, M, 0)
        sum1, sum2 = _collect(words_ptr, done, ROWS, SLICES, PADDED, PTX)
        rows = done + tl.arange(0, ROWS)
        mean = tl.load(mean_ptr + rows, mask=rows < end, other=0)
        rstd = tl.load(rstd_ptr + rows, mask=rows < end, other=0)
        dx, dw, db = _slice_gradients(x1, dy1, w, mean, rstd, sum1, sum2,
                                      dw, db, N)  # fmt: skip
        at, cell, mask = _tile(done, cols, inside, end, N, ROWS)
        tl.store(dx_ptr + at + cell, dx, mask=mask)
        x1, dy1 = x, dy
    sums_ptr += start // ROWS * 2 * N + cols
    tl.store(sums_ptr, dw, mask=inside)
    tl.store(sums_ptr + N, db, mask=inside)


# %%
# Forward a slice has 16 KB of two rows: fewer slices, fewer words to await.
# Above 256 KB a multiprocessor has two programs, of which one works while the
# other waits: a slice has 8 KB of two rows, above 768 KB 16 KB of
# one. Backward, ``dw`` and ``db`` take registers: a slice has 8 KB of one row,
# or 2 KB of four rows of up to 128 KB.


def plan_shared(N, itemsize, forward):
    """Rows and lanes of a tile; programs on a multiprocessor, and warps."""
    row, warps = N * itemsize, 8
    if forward:
        per_sm = 1 if row <= 32 * SLICE else 2
        rows, size = 2, 2 * SLICE // per_sm
        if row > 96 * SLICE:
            rows, size, warps = 1, 2 * SLICE, 4
    else:
        per_sm, rows, size = 2, 1, SLICE
        if row <= min(16, 3 * NUM_SMS // 4) * SLICE:  # so many slices fit
            per_sm, rows, size = 3, 4, SLICE // 4
        warps = 4 if row <= 128 * SLICE else 8
    return (rows, size // itemsize), {"per_sm": per_sm, "warps": warps}


class LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, b, eps):
        M, N = x.shape
        x, w, b = x.contiguous(), w.contiguous(), b.contiguous()
        y = torch.empty_like(x)
        mean, rstd = x.new_empty(2, M, dtype=torch.float32)
        tile, how = plan_shared(N, x.itemsize, True)
        _, programs, words, tiles = cut(M, N, *tile, how["per_sm"])
        args = x, w, b, y, mean, rstd, words, M, eps, N, *tiles
        together(_layer_norm_fwd_shared, programs, *args, **how)
        ctx.save_for_backward(x, w, mean, rstd)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        dy, (x, w, mean, rstd) = dy.contiguous(), ctx.saved_tensors
        M, N = x.shape
        tile, how = plan_shared(N, x.itemsize, False)
        groups, programs, words, tiles = cut(M, N, *tile, how["per_sm"])
        dx, sums = torch.empty_like(x), mean.new_empty(groups, 2, N)
        args = dy, x, w, mean, rstd, dx, words, sums, M, N, *tiles
        together(_layer_norm_bwd_shared, programs, *args, **how)
        return dx, *sums.sum(0), None


# %%
# PyTorch rounds ``dw`` and ``db``. A row begins at a multiple of 16 bytes.


def layer_norm(x, normalized_shape, weight=None, bias=None, eps=1e-5):
    """Normalize x over its last dimensions; weight and bias may be None."""
    one = isinstance(normalized_shape, int)
    shape = torch.Size([normalized_shape] if one else normalized_shape)
    N = shape.numel()
    for name, t in {"x": x, "weight": weight, "bias": bias}.items():
        if t is None and name != "x":
            continue
        if t.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            raise TypeError(f"{name} is {t.dtype}: words hold float32")
        if t.device != x.device or t.device.type != DEVICE.type:
            raise ValueError(f"{name} is on {t.device}: all go on {DEVICE}")
        if N == 0 or shape != (t.shape[-len(shape) :] if t is x else t.shape):
            shapes = f"{(*t.shape,)}, normalized_shape is {(*shape,)}"
            raise ValueError(f"the shape of {name} is {shapes}")
    most = 2 * NUM_SMS * SLICE // x.itemsize
    if N % 8 or most < N or ON_GPU != CUDA:
        here = f"multiples of 8 up to {most}, on NVIDIA GPUs; Two sweeps: all"
        raise ValueError(f"normalized_shape has {N} columns; {here}")
    w = x.new_ones(N) if weight is None else weight.reshape(N)
    b = x.new_zeros(N) if bias is None else bias.reshape(N)
    return LayerNorm.apply(x.reshape(-1, N), w, b, eps).reshape(x.shape)


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


def benchmark(mode):
    def measure(M, N, dtype, mode, provider):
        """Device time of a CUDA graph, replayed with an overwritten L2 cache;
        median, 20 % and 80 % quantiles. At most 512 MB a matrix."""
        if not ON_GPU:
            return 3 * [float("nan")]
        x, w, b, dy = inputs(min(M, 2**29 // (N * dtype.itemsize)), N, dtype)
        f = F.layer_norm if provider == "torch" else layer_norm
        forward = lambda: f(x, (N,), w, b)
        y, grad = forward(), torch.autograd.grad
        backward = lambda: grad(y, (x, w, b), dy, retain_graph=True)
        if provider == "copy":  # in a graph copy_ is slow on large tensors
            forward = lambda: torch.mul(dy, 1, out=y.data)
            backward = lambda: torch.add(x.data, dy, out=y.data)
        run, moved = (forward, 2) if mode == "forward" else (backward, 3)
        return speed(moved * dy.nbytes, run)

    return triton.testing.perf_report(triton.testing.Benchmark(
        ["N"], [2**15 * i for i in (1, 2, 3, 4, 8, 12, 16, 24, 32)],
        "provider", ["triton", "torch", "copy"], ["Triton", "PyTorch", "Copy"],
        f"layer-norm-shared-rows-{mode}",
        {"M": 4096, "dtype": torch.float16, "mode": mode},
        x_log=True, ylabel="GB/s",
    ))(measure)  # fmt: skip


for dtype in torch.float16, torch.float32:
    check(layer_norm, *((37, 2**18) if ON_GPU else (3, 72)), dtype)
report(benchmark("forward"))

# %%
report(benchmark("backward"))

# %%
# Each matrix is read once, by PyTorch at least twice. Forward at 32768 columns
# `Two sweeps <07-two-sweeps.html>`_ are faster: a cache still holds the row.
# At the dips, 393216 and 786432, whole slices leave programs idle, narrow ones
# a quarter of lanes. Words are added in one order: each run, the same bits.
#
# Exercise 1: a softmax
# ---------------------
#
# A softmax needs the largest element of a row, and the sum of the exponentials
# of all distances from it. Slices publish both: put them together.
#
# **Hint.** How are exponentials of distances from two numbers related?


def add(largest, sums):
    return sums.sum()


def exercise_1(add):
    x = 100 + torch.randn(4, 16)
    largest = x.amax(1)
    found = add(largest, (x - largest[:, None]).exp().sum(1))
    print(f"{found=:.4f}; exact: {(exact := (x - x.max()).exp().sum()):.4f}")
    return torch.isclose(found, exact)


exercise_1(add)

# %%

# Solution 1: exp(x - all) = exp(x - own) * exp(own - all).


def weighted(largest, sums):
    return (sums * (largest - largest.max()).exp()).sum()


assert exercise_1(weighted)
