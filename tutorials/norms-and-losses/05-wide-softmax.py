r"""
Softmax over a million columns
==============================

How do you take a softmax of rows that no cache holds, and read them once?
Many programs hold a row together, and tell each other two numbers: the largest
element that each has, and the sum of its exponentials.

**What you need:** `Softmax, both passes <03-softmax.html>`_, and `Programs
that share a row <../layer-norm/08-shared-rows.html>`_, where programs wait for
each other.
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
# Where two sweeps end
# --------------------
#
# `Page 03 <03-softmax.html>`_ reads wide rows twice: for pairs of maximum and
# sum, and for the result. Narrow ones stay in registers. This is its code:

# %%

# Scaffold: two sweeps, forward, from page 03.

LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)


@triton.jit
def _exp(x):
    return tl.exp2(x * LOG2E)  # a GPU has an instruction for powers of 2


@triton.jit
def _softmax_fwd_streaming(
    x_ptr, y_ptr, N: tl.constexpr, PAIRS: tl.constexpr, EACH: tl.constexpr,
    LOG: tl.constexpr,  # whether y is the logarithm of softmax
):  # fmt: skip
    DOUBLE: tl.constexpr = y_ptr.dtype.element_ty == tl.float64
    acc: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    lane = tl.arange(0, PAIRS)[:, None] * EACH + tl.arange(0, EACH)[None, :]
    row, TILE = tl.program_id(0).to(tl.int64), PAIRS * EACH
    x_ptr += row * N  # M * N may pass 2**31
    y_ptr += row * N
    m, s = tl.full((PAIRS,), LOWEST, acc), tl.zeros((PAIRS,), acc)
    for start in range(0, N, TILE):
        col = start + lane
        x = tl.load(x_ptr + col, mask=col < N, other=float("-inf"),
                    eviction_policy="evict_last").to(acc)  # fmt: skip
        new = tl.maximum(m, tl.max(x, 1))
        s = s * tl.exp(m - new) + tl.sum(_exp(x - new[:, None]), 1)
        m = new
    top = tl.max(m, 0)
    s = tl.sum(s * tl.exp(m - top), 0)
    scale, log = 1 / s, tl.log(s)
    for start in range(0, N, TILE):
        col = (N - 1) // TILE * TILE - start + lane
        x = tl.load(x_ptr + col, mask=col < N, other=float("-inf"),
                    eviction_policy="evict_first").to(acc)  # fmt: skip
        y = x - top - log if LOG else _exp(x - top) * scale
        tl.store(y_ptr + col, y, mask=col < N)


# %%

# Scaffold: rows in registers, loads and stores, from page 03.


@triton.jit
def _chunk(ptr, c, row, N: tl.constexpr, CHUNK: tl.constexpr,
           STEP: tl.constexpr):  # fmt: skip
    """Pointers to the lanes of a chunk, and masks: groups with columns of the
    row, groups with nothing else, columns."""
    first = tl.cast(row, tl.int64) * N
    start = first // STEP * STEP
    lane = c * CHUNK + tl.arange(0, CHUNK)[None, :]
    if (STEP == 1 or c > 0) and (c + 1) * CHUNK <= N:
        every = tl.full((row.shape[0], CHUNK), 1, tl.int1)  # none is idle
        return ptr + start + lane, every, every, every
    begin, group = (first - start).to(tl.int32), lane // STEP * STEP
    end = begin + N
    inside = (lane >= begin) & (lane < end)
    whole = (group >= begin) & (group + STEP <= end)
    if STEP == 1:
        whole = lane < end
    return ptr + start + lane, group < end, whole, inside


@triton.jit
def _load_row(ptr, row, N: tl.constexpr, CHUNK: tl.constexpr,
              STEP: tl.constexpr, OTHER: tl.constexpr):  # fmt: skip
    """A row in chunks, and OTHER in idle lanes."""
    xs = ()
    for c in tl.static_range((N + STEP - 2 + CHUNK) // CHUNK):
        at, some, _, inside = _chunk(ptr, c, row, N, CHUNK, STEP)
        none = tl.full((), OTHER, tl.float32).to(ptr.dtype.element_ty)
        xs += (tl.where(inside, tl.load(at, mask=some), none),)
    return xs


@triton.jit
def _store_chunk(ptr, x, c, row, N: tl.constexpr, STEP: tl.constexpr):
    at, _, whole, inside = _chunk(ptr, c, row, N, x.shape[1], STEP)
    tl.store(at, x, mask=whole)
    if STEP > 1:
        tl.store(at, x, mask=inside & (whole == 0))


# %%

# Scaffold: rows in registers, forward, from page 03.


@triton.jit
def _softmax_fwd(
    x_ptr, y_ptr, M, N: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
    STEP: tl.constexpr, LOG: tl.constexpr,
):  # fmt: skip
    DOUBLE: tl.constexpr = y_ptr.dtype.element_ty == tl.float64
    acc: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    row = tl.minimum(row, M - 1)  # the last one, again, beyond the end
    xs = _load_row(x_ptr, row, N, CHUNK, STEP, float("-inf"))
    m = tl.full((ROWS, CHUNK), LOWEST, acc)
    for c in tl.static_range(len(xs)):
        m = tl.maximum(m, xs[c].to(acc))
    m = tl.max(m, 1)[:, None]
    s = tl.zeros((ROWS, CHUNK), acc)
    for c in tl.static_range(len(xs)):
        s += _exp(xs[c].to(acc) - m)
    s = tl.sum(s, 1)[:, None]
    scale, log = 1 / s, tl.log(s)
    for c in tl.static_range(len(xs)):
        d = xs[c].to(acc) - m
        y = d - log if LOG else _exp(d) * scale
        _store_chunk(y_ptr, y, c, row, N, STEP)


# %%

# Scaffold: rows in registers, backward, from page 03.


@triton.jit
def _hidden(x, zero):
    if x.dtype.primitive_bitwidth == 16:
        bits = x.to(tl.int16, bitcast=True) ^ tl.cast(zero, tl.int16)
        x = bits.to(x.dtype, bitcast=True)
    return x


@triton.jit
def _softmax_bwd(
    y_ptr, dy_ptr, dx_ptr, zero, M, N: tl.constexpr, ROWS: tl.constexpr,
    CHUNK: tl.constexpr, STEP: tl.constexpr, LOG: tl.constexpr,
):  # fmt: skip
    DOUBLE: tl.constexpr = y_ptr.dtype.element_ty == tl.float64
    acc: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    row = tl.minimum(row, M - 1)
    ys = _load_row(y_ptr, row, N, CHUNK, STEP, 0.0)
    dys = _load_row(dy_ptr, row, N, CHUNK, STEP, 0.0)
    total = tl.zeros((ROWS, CHUNK), acc)
    for c in tl.static_range(len(ys)):
        dy = dys[c].to(acc)
        total += dy if LOG else ys[c].to(acc) * dy
    total = tl.sum(total, 1)[:, None]
    for c in tl.static_range(len(ys)):
        y = _hidden(ys[c], zero).to(acc)
        dy = _hidden(dys[c], zero).to(acc)
        dx = dy - _exp(y) * total if LOG else y * (dy - total)
        _store_chunk(dx_ptr, dx, c, row, N, STEP)


# %%

# Scaffold: two sweeps, backward, from page 03.


@triton.jit
def _softmax_bwd_streaming(
    y_ptr, dy_ptr, dx_ptr, N: tl.constexpr, BLOCK: tl.constexpr,
    LOG: tl.constexpr,
):  # fmt: skip
    DOUBLE: tl.constexpr = y_ptr.dtype.element_ty == tl.float64
    acc: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    row, lane = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), acc)
    for start in range(0, N, BLOCK):
        at, mask = row * N + start + lane, start + lane < N
        dy = tl.load(dy_ptr + at, mask=mask, other=0).to(acc)
        if not LOG:
            dy *= tl.load(y_ptr + at, mask=mask, other=0).to(acc)
        total += dy
    total = tl.sum(total)
    for start in range(0, N, BLOCK):
        at, mask = row * N + start + lane, start + lane < N
        y = tl.load(y_ptr + at, mask=mask, other=0).to(acc)
        dy = tl.load(dy_ptr + at, mask=mask, other=0).to(acc)
        dx = dy - _exp(y) * total if LOG else y * (dy - total)
        tl.store(dx_ptr + at, dx, mask=mask)


# %%

# Scaffold: plans, from page 03.

CUDA = ON_GPU and torch.version.hip is None


def plan_sweeps(N, itemsize):
    warps = min(max(triton.next_power_of_2(N * itemsize // 2048), 2), 32)
    plan = {"PAIRS": 32 * warps, "EACH": 16 // itemsize, "num_warps": warps}
    return plan | ({"maxnreg": 32} if CUDA and itemsize < 8 else {})


def step_of(N, *matrices):
    """Lanes of a group; 1 where all rows begin with one, or none does."""
    step = 16 // max(t.itemsize for t in matrices)
    one = N % step == 0 or torch.compiler.is_compiling()
    return 1 if one or any(t.data_ptr() % 16 for t in matrices) else step


def tile_of(N, itemsize, step):
    row = N * itemsize
    warps = max(triton.next_power_of_2(triton.cdiv(row, 4096)), 2)
    warps = 4 if row <= 512 else warps
    lanes = 512 // itemsize * warps
    chunk = min(lanes, triton.next_power_of_2(max(N + step - 1, 1)))
    rows = 2 * lanes // chunk if row <= 512 else 1
    return {"ROWS": rows, "CHUNK": chunk, "STEP": step, "num_warps": warps}


def plan_forward(N, itemsize, step=1):
    row = N * itemsize
    if row < 2048 or (step > 1 and row <= 32768):
        return tile_of(N, itemsize, step)
    return plan_sweeps(N, itemsize)


def plan_backward(N, itemsize, step=1):
    if N * itemsize > 65536:
        return {"BLOCK": 32768 // itemsize, "num_warps": 32}
    return tile_of(N, itemsize, step)


# %%

# Scaffold: launches, from page 03.


def in_sweeps(x, plan, log=False, dtype=None):
    y = torch.empty_like(x, dtype=dtype)
    M, N = x[..., :1].numel(), x.shape[-1]
    _softmax_fwd_streaming[(M,)](x, y, N, LOG=log, **plan)
    return y


def forward(x, log=False, dtype=None, plan=None):
    y = torch.empty_like(x, dtype=dtype)
    M, N = x[..., :1].numel(), x.shape[-1]
    plan = plan or plan_forward(N, y.itemsize, step_of(N, x, y))
    if "PAIRS" in plan:
        return in_sweeps(x, plan, log, dtype)
    grid = (triton.cdiv(M, plan["ROWS"]),)
    _softmax_fwd[grid](x, y, M, N, LOG=log, **plan)
    return y


def backward(y, dy, log=False, dtype=None, plan=None):
    dx = torch.empty_like(y, dtype=dtype)
    M, N = y[..., :1].numel(), y.shape[-1]
    plan = plan or plan_backward(N, y.itemsize, step_of(N, y, dy, dx))
    if "BLOCK" in plan:
        _softmax_bwd_streaming[(M,)](y, dy, dx, N, LOG=log, **plan)
    else:
        grid = (triton.cdiv(M, plan["ROWS"]),)
        _softmax_bwd[grid](y, dy, dx, 0, M, N, LOG=log, **plan)
    return dx


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

# Scaffold: inputs, and a pass without arguments.


def inputs(M, N, dtype):
    """x and dy; at most 2 GB of 16 bits each."""
    torch.manual_seed(0)
    x, dy = torch.randn(2, min(M, 2**30 // N), N, device=DEVICE, dtype=dtype)
    return x.requires_grad_(), dy


def call(f, x, dy, mode):
    """A pass of f, or of a copy, without arguments."""
    if f is None:  # in a graph copy_ is slow on large tensors
        out, x = torch.empty_like(dy), x.detach()
        back = lambda: torch.add(x, dy, out=out)
        return back if mode == "backward" else lambda: torch.mul(x, 1, out=out)
    if mode == "forward":
        return lambda: f(x)
    y, grad = f(x), torch.autograd.grad
    return lambda: grad(y, x, dy, retain_graph=True)


# %%

# Scaffold: one benchmark for all figures.


def speeds(figure, mode, functions, widths):
    def measure(M, N, dtype, mode, provider):
        """Device time of a CUDA graph, replayed with an overwritten L2 cache;
        median, 20 % and 80 % quantiles. At most 2 GB a matrix."""
        # quack would end in an error of the device where rows begin anywhere.
        if not ON_GPU or (provider == "quack" and (N % 8 or N > 2**18)):
            return 3 * [float("nan")]  # the interpreter cannot be timed
        x, dy = inputs(M, N, dtype)
        moved = dy.nbytes * (2 if mode == "forward" else 3)
        f = functions.get(provider)
        if provider == "torch.compile":
            torch._dynamo.reset()  # nothing is left of other shapes
            torch._functorch.config.donated_buffer = False  # runs many times
            f = torch.compile(lambda x: F.softmax(x, -1), dynamic=False)
        try:
            return speed(moved, call(f, x, dy, mode))
        except Exception as error:
            if provider not in ("liger", "quack"):
                raise
            print(f"{provider} at {N} columns: {str(error).splitlines()[:1]}")
            return 3 * [float("nan")]

    return triton.testing.perf_report(triton.testing.Benchmark(
        ["N"], widths, "provider", [*functions, "copy"],
        [NAMES.get(key, key) for key in functions] + ["Copy"],
        f"wide-softmax-{figure}{mode}", ylabel="GB/s", x_log=True,
        args={"M": 4096, "dtype": torch.bfloat16, "mode": mode},
    ))(measure)  # fmt: skip


NAMES = {"triton": "Triton", "torch": "PyTorch", "liger": "Liger"}

# %%

WIDE = [32768, 49152, 50257, 65536, 100_003, 2**17, 2**18, 2**20]
report(speeds("sweeps-", "forward", {"page 03": forward}, WIDE))

# %%
# Two things make two sweeps slower than the copy. Rows of 50257 columns begin
# anywhere, so that no load has 16 bytes. And above 65536 columns the
# second-level cache loses rows before they are read again.
#
# Rows that begin anywhere
# ------------------------
#
# Lanes begin at a multiple of 16 bytes, up to ``STEP - 1`` before the row
# (`why, and how <../layer-norm/06-unaligned-rows.html>`_).
# A mask for each lane would cost as many instructions as a power does. So only
# the first chunk of a row and those at its end have masks.
#
# A chunk is what a tile was: ``PAIRS`` times ``EACH`` lanes.
# A row may be cut into *slices* of ``WIDTH`` lanes; at first it is one slice.


@triton.jit
def _place(row, s, N: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr):
    """Where slice s begins, at 16 bytes; from which lane to which it goes."""
    first = tl.cast(row, tl.int64) * N  # M * N may pass 2**31
    start = first // STEP * STEP
    begin = (first - start).to(tl.int32) - s * WIDTH
    return start + s * WIDTH, begin, tl.minimum(begin + N, WIDTH)


@triton.jit
def _lanes(c, place, PAIRS: tl.constexpr, EACH: tl.constexpr,
           STEP: tl.constexpr):  # fmt: skip
    """Chunk c: its lanes; which are of the slice; of a group that is all."""
    lane = tl.arange(0, PAIRS)[:, None] * EACH + tl.arange(0, EACH)[None, :]
    lane += c * (PAIRS * EACH)
    _, begin, end = place
    group = lane // STEP * STEP
    whole = (group >= begin) & (group + STEP <= end)
    return lane, (lane >= begin) & (lane < end), whole


@triton.constexpr_function
def _full(c, chunk, lanes, step):
    """Whether chunk c needs no mask, of at least so many lanes."""
    return (c + 1) * chunk <= lanes and (step == 1 or c > 0)


@triton.jit
def _only(x, c, place, other, FULL: tl.constexpr, STEP: tl.constexpr):
    if not FULL:
        _, inside, _ = _lanes(c, place, x.shape[0], x.shape[1], STEP)
        x = tl.where(inside, x, other)
    return x


@triton.jit
def _store(ptr, x, c, place, FULL: tl.constexpr, STEP: tl.constexpr):
    lane, inside, whole = _lanes(c, place, x.shape[0], x.shape[1], STEP)
    tl.store(ptr + place[0] + lane, x, mask=None if FULL else whole)
    if not FULL and STEP > 1:
        tl.store(ptr + place[0] + lane, x, mask=inside & (whole == 0))


# %%
# Both sweeps load chunks; the first reads pairs from them, the second writes:


@triton.jit
def _load(ptr, c, place, PAIRS: tl.constexpr, EACH: tl.constexpr,
          FULL: tl.constexpr, STEP: tl.constexpr,
          HINT: tl.constexpr):  # fmt: skip
    lane, _, _ = _lanes(c, place, PAIRS, EACH, STEP)
    mask = None if FULL else lane // STEP * STEP < place[2]
    x = tl.load(ptr + place[0] + lane, mask=mask, eviction_policy=HINT)
    acc: tl.constexpr = tl.float64 if x.dtype == tl.float64 else tl.float32
    return _only(x.to(acc), c, place, float("-inf"), FULL, STEP)


@triton.jit
def _read(x_ptr, c, place, m, s, EACH: tl.constexpr, FULL: tl.constexpr,
          STEP: tl.constexpr):  # fmt: skip
    PAIRS: tl.constexpr = m.shape[0]
    x = _load(x_ptr, c, place, PAIRS, EACH, FULL, STEP, "evict_last")
    new = tl.maximum(m, tl.max(x, 1))
    s = s * _exp(m - new) + tl.sum(_exp(x - new[:, None]), 1)
    return new, s


@triton.jit
def _write(x_ptr, y_ptr, c, place, m, s, PAIRS: tl.constexpr,
           EACH: tl.constexpr, FULL: tl.constexpr, STEP: tl.constexpr,
           LOG: tl.constexpr):  # fmt: skip
    x = _load(x_ptr, c, place, PAIRS, EACH, FULL, STEP, "evict_first")
    _store(y_ptr, x - m - s if LOG else _exp(x - m) * s, c, place, FULL, STEP)


# %%


@triton.jit
def _softmax_fwd_shifted(
    x_ptr, y_ptr, N: tl.constexpr, PAIRS: tl.constexpr, EACH: tl.constexpr,
    STEP: tl.constexpr, LOG: tl.constexpr,
):  # fmt: skip
    DOUBLE: tl.constexpr = y_ptr.dtype.element_ty == tl.float64
    acc: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    HEAD: tl.constexpr = 1 if STEP > 1 else 0  # chunks with masks: one,
    FULL: tl.constexpr = N // (PAIRS * EACH)
    LAST: tl.constexpr = FULL if FULL > HEAD else HEAD  # and the last ones
    ALL: tl.constexpr = (N + STEP - 2) // (PAIRS * EACH) + 1
    place = _place(tl.program_id(0), 0, N, N + STEP, STEP)
    m, s = tl.full((PAIRS,), LOWEST, acc), tl.zeros((PAIRS,), acc)
    for c in tl.static_range(LAST, ALL + HEAD):
        m, s = _read(x_ptr, c % ALL, place, m, s, EACH, False, STEP)
    for c in tl.range(HEAD, LAST, num_stages=1):
        m, s = _read(x_ptr, c, place, m, s, EACH, True, STEP)
    top = tl.max(m, 0)
    s = tl.sum(s * _exp(m - top), 0)
    s = tl.log(s) if LOG else 1 / s
    for c in tl.range(HEAD, LAST, num_stages=1):
        back = HEAD + LAST - 1 - c
        _write(x_ptr, y_ptr, back, place, top, s, PAIRS, EACH, True, STEP, LOG)
    for c in tl.static_range(LAST, ALL + HEAD):
        _write(x_ptr, y_ptr, c % ALL, place, top, s, PAIRS, EACH, False, STEP,
               LOG)  # fmt: skip


# %%
# With 32 registers a thread, two programs of 32 warps fit on a multiprocessor:
# one may read while the other writes. The cache of a multiprocessor, 256 KB on
# an H200, should hold both rows. Where it can hold only one, one program runs.

TWO_ROWS = 224 * 1024  # bytes; the rest is for other data


def in_shifted(x, log=False, dtype=None):
    N, y = x.shape[-1], torch.empty_like(x, dtype=dtype)
    tile = 1024 if ON_GPU else 4, 16 // y.itemsize, step_of(N, x, y)
    registers = 32 if 2 * N * x.itemsize <= TWO_ROWS else 64
    options = {"maxnreg": registers} if CUDA and y.itemsize < 8 else {}
    grid, given = (x[..., :1].numel(),), (x, y, N, *tile, log)
    _softmax_fwd_shifted[grid](*given, num_warps=32, **options)
    return y


# %%
# Many programs, one row
# ----------------------
#
# Programs that share a row need the pairs of all its slices. The maximum of
# the row is that of the maxima, and the sum of each slice shrinks:

x = torch.randn(4, 16, generator=torch.Generator().manual_seed(1))
m = x.max(1).values
s = (x - m[:, None]).exp().sum(1)
total = (s * (m - m.max()).exp()).sum()
y = (x - m.max()).exp() / total
assert torch.allclose(y.flatten(), F.softmax(x.flatten(), 0))

# %%

# Drawing: a row in four slices, and the pair of each.

plt.figure("Softmax of a row in four slices, with the pair of each", (7, 2))
for part in range(4):
    cols = range(16 * part, 16 * part + 16)
    plt.bar(cols, y[part], color=f"C{part}", alpha=0.6)
    plt.plot(cols, 16 * [y[part].max()], color=f"C{part}")
    pair = f"m = {m[part]:.1f}, s = {s[part]:.1f}"
    plt.text(16 * part, 1.1 * y.max(), pair)
plt.axis("off")
plt.show()

# %%
# A program *publishes* the pair of its slice as a word of 64 bits. It loads
# its slice of the next row, and only then asks for the pairs of the row
# before, whose slice has *waited in registers*: by then they have come.
#
# Registers have 32 bits. Where a turn of a loop hands a number of 16 bits to
# the next, the compiler gives it a register of its own. So a slice waits as
# integers of 32 bits, with one or two columns in each: a thread loads four.


@triton.jit
def _load_words(ptr, place, PAIRS: tl.constexpr, WIDTH: tl.constexpr,
                LEAST: tl.constexpr):  # fmt: skip
    """A slice in chunks; those below LEAST are full in all programs."""
    EACH: tl.constexpr = 128 // ptr.dtype.element_ty.primitive_bitwidth
    CHUNK: tl.constexpr = PAIRS * EACH
    word = tl.arange(0, PAIRS)[:, None] * 4 + tl.arange(0, 4)[None, :]
    at = tl.multiple_of(ptr + place[0], 16).to(tl.pointer_type(tl.int32))
    words = ()
    for c in tl.static_range((WIDTH + CHUNK - 1) // CHUNK):
        mask = c * CHUNK + word // 4 * EACH < place[2]
        mask = None if _full(c, CHUNK, LEAST, 1) else mask
        words += (tl.load(at + c * PAIRS * 4 + word, mask=mask),)
    return words


@triton.jit
def _numbers(words, dtype: tl.constexpr):
    """The columns in words, in float32."""
    KIND: tl.constexpr = tl.float32 if dtype == tl.bfloat16 else dtype
    low, high = words.to(tl.int16), (words >> 16).to(tl.int16)
    if dtype == tl.bfloat16:  # the upper half of a float32
        low, high = words << 16, words & -65536
    if dtype != tl.float32:
        words = tl.join(low, high).reshape(words.shape[0], 8)
    return words.to(KIND, bitcast=True).to(tl.float32)


# %%
# A word between programs is ``EMPTY`` until it is stored: two NaNs that no
# arithmetic results in. One thread stores it, with an atomic exchange, and
# *relaxed* is enough: the word itself is all that is told.

EMPTY = tl.constexpr(0x7F800001_7F800001)


@triton.jit
def _publish(words_ptr, row, part, a, b, PARTS: tl.constexpr):
    low = a.to(tl.uint32, bitcast=True).to(tl.int64)
    word = low | b.to(tl.uint32, bitcast=True).to(tl.int64) << 32
    at = words_ptr + tl.cast(row, tl.int64) * PARTS + part
    tl.atomic_xchg(at, word, sem="relaxed")


# %%
# A program that waits loads the words of all slices until none is ``EMPTY``:


@triton.jit
def _collect(words_ptr, row, PARTS: tl.constexpr, PADDED: tl.constexpr,
             WAIT: tl.constexpr):  # fmt: skip
    """Both numbers of each slice of a row, as soon as all are there."""
    part = tl.arange(0, PADDED)
    at = words_ptr + tl.cast(row, tl.int64) * PARTS
    at += tl.minimum(part, PARTS - 1)
    word, loads = tl.load(at, volatile=True), 0
    if WAIT:
        while tl.max((word == EMPTY).to(tl.int32)) > 0:
            word = tl.load(at, volatile=True)
            loads += 1
            if loads == 10_000_000:  # it never comes: end with an error
                tl.inline_asm_elementwise(
                    "trap; mov.b32 $0, $1;", "=r,r", [loads], tl.int32,
                    is_pure=False, pack=1,
                )  # fmt: skip
    a = word.to(tl.uint32).to(tl.float32, bitcast=True)
    b = (word >> 32).to(tl.uint32).to(tl.float32, bitcast=True)
    return tl.where(part < PARTS, a, LOWEST), tl.where(part < PARTS, b, 0)


# %%
# Pairs are merged in order of slices, not of arrival: always the same bits.


@triton.jit
def _pair(words, place, dtype: tl.constexpr, LEAST: tl.constexpr,
          STEP: tl.constexpr):  # fmt: skip
    """Maximum and sum of a slice."""
    m, xs = tl.full((words[0].shape[0],), LOWEST, tl.float32), ()
    for c in tl.static_range(len(words)):
        x = _numbers(words[c], dtype)
        full = _full(c, x.numel, LEAST, STEP)
        xs += (_only(x, c, place, float("-inf"), full, STEP),)
        m = tl.maximum(m, tl.max(xs[c], 1))
    s = tl.zeros_like(m)
    for c in tl.static_range(len(words)):
        s += tl.sum(_exp(xs[c] - m[:, None]), 1)
    top = tl.max(m, 0)
    return top, tl.sum(s * _exp(m - top), 0)


@triton.jit
def _finish(words, pairs, y_ptr, place, dtype: tl.constexpr,
            LEAST: tl.constexpr, STEP: tl.constexpr,
            LOG: tl.constexpr):  # fmt: skip
    """Softmax of a slice that has waited for the pairs of its row."""
    ms, sums = pairs
    m = tl.max(ms, 0)
    s = tl.sum(sums * _exp(ms - m), 0)
    scale, log = 1 / s, tl.log(s)
    for c in tl.static_range(len(words)):
        d = _numbers(words[c], dtype) - m
        y = d - log if LOG else _exp(d) * scale
        _store(y_ptr, y, c, place, _full(c, y.numel, LEAST, STEP), STEP)


# %%
# Programs that share rows are a *group*. Groups take rows in turns:


@triton.jit
def _softmax_fwd_shared(
    x_ptr, y_ptr, words_ptr, M, N: tl.constexpr, WIDTH: tl.constexpr,
    PARTS: tl.constexpr, PADDED: tl.constexpr, PAIRS: tl.constexpr,
    STEP: tl.constexpr, LOG: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    LEAST: tl.constexpr = N - (PARTS - 1) * WIDTH
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    part, first = tl.program_id(0) % PARTS, tl.program_id(0) // PARTS
    groups = tl.num_programs(0) // PARTS
    before = _place(first, part, N, WIDTH, STEP)
    waits = _load_words(x_ptr, before, PAIRS, WIDTH, LEAST)
    m, s = _pair(waits, before, dtype, LEAST, STEP)
    _publish(words_ptr, first, part, m, s, PARTS)
    for row in tl.range(first + groups, M, groups, num_stages=1):
        place = _place(row, part, N, WIDTH, STEP)
        words = _load_words(x_ptr, place, PAIRS, WIDTH, LEAST)
        pairs = _collect(words_ptr, row - groups, PARTS, PADDED, WAIT)
        _finish(waits, pairs, y_ptr, before, dtype, LEAST, STEP, LOG)
        m, s = _pair(words, place, dtype, LEAST, STEP)
        _publish(words_ptr, row, part, m, s, PARTS)
        waits, before = words, place
    last = first + (M - 1 - first) // groups * groups
    pairs = _collect(words_ptr, last, PARTS, PADDED, WAIT)
    _finish(waits, pairs, y_ptr, before, dtype, LEAST, STEP, LOG)


# %%
# All programs of a group must run at the same time. A *cooperative launch*
# fails if not all programs fit; ``maxnreg`` limits the registers of a thread
# so that ``per_sm`` fit on a multiprocessor. Words are cleared before every
# launch, by a kernel that a CUDA graph repeats as well.
# The interpreter runs one program after the other, so there a kernel runs
# twice: the second time it finds what the first has published.

GPU = torch.cuda.get_device_properties(DEVICE) if ON_GPU else None
NUM_SMS = GPU.multi_processor_count if ON_GPU else 4
WARP = 32 if ON_GPU else 1  # threads; without a GPU small rows have slices


def cut(N, each, warps, chunks):
    """Slices of a row, and their width: up to so many chunks."""
    lanes = N + each - 1 if N % each else N
    most = chunks * WARP * warps * each
    width = triton.cdiv(triton.cdiv(lanes, triton.cdiv(lanes, most)), 8) * 8
    return triton.cdiv(lanes, width), width


def shared(kernel, *matrices, log, plan):
    *read, out = matrices  # a view may begin anywhere; its copy does not
    read = [t.clone() if t.data_ptr() % 16 else t for t in read]
    N, (warps, per_sm, chunks) = out.shape[-1], plan
    M, each = out.numel() // N, 16 // read[0].itemsize
    step = each if N % each else 1
    parts, width = cut(N, each, warps, chunks)
    programs = min(max(NUM_SMS * per_sm // parts, 1), M) * parts
    empty = EMPTY.value if CUDA else 0x3F800000 << 32  # a sum of 1
    words = torch.full((M, parts), empty, device=out.device)
    options = {"num_warps": warps}
    if CUDA:
        registers = 65536 // (32 * warps * per_sm) // 8 * 8
        options |= {"maxnreg": registers, "launch_cooperative_grid": True}
    given = *read, out, words, M, N, width, parts
    tile = triton.next_power_of_2(parts), WARP * warps, step, log, CUDA
    for _ in range(1 if ON_GPU else 2):
        kernel[(programs,)](*given, *tile, **options)


# %%
# With many small programs, some load while others wait. But the smaller the
# slices, the more words a program waits for. The fastest plans, as measured:


def plan_shared(backward, row):
    """Warps of a program, programs on a multiprocessor, chunks of a slice."""
    if backward:  # two matrices wait in registers
        return (2, 12, 4) if 2**17 < row <= 2**18 else (4, 6, 4)
    return (4, 8, 4) if row <= 2**19 else (4, 4, 8)


def in_slices(x, log=False, dtype=None):
    y = torch.empty_like(x, dtype=dtype)
    plan = plan_shared(False, x.shape[-1] * x.itemsize)
    shared(_softmax_fwd_shared, x, y, log=log, plan=plan)
    return y


FORMS = {"slices": in_slices, "shifted": in_shifted, "page 03": forward}
report(speeds("forms-", "forward", FORMS, WIDE))

# %%
# The shift mends rows of 50257 and 100003 columns, and one program on a
# multiprocessor those of 65536. From 100003 columns on slices are ahead: they
# read a row once, whatever its width.
#
# ``ncu``, a profiler, counts what memory delivers; 1 is the bytes of ``x``:


@triton.testing.perf_report(triton.testing.Benchmark(
    ["N"], [2**i for i in range(15, 21)], "provider", [*FORMS], [*FORMS],
    "wide-softmax-dram", x_log=True, ylabel="bytes of DRAM per byte counted",
    args={"M": 1024, "dtype": torch.bfloat16, "mode": "forward",
          "counter": "dram__bytes_read.sum"},
))  # fmt: skip
def traffic(M, N, dtype, mode, counter, provider):
    """Bytes that DRAM delivers, over those of x."""
    if ON_GPU:
        x, _ = inputs(M, N, dtype)
        FORMS[provider](x)  # compiles
        with torch.cuda.nvtx.range(f"counted {provider} {N} per {x.nbytes}"):
            FORMS[provider](x)
    return 3 * [float("nan")]


traffic.run(show_plots=ON_GPU)

# %%
# Two sweeps come close to twice as much, where the rows under way are more
# than the cache holds. Of shifted rows a multiprocessor has only one.
#
# Backward
# --------
#
# A slice of both ``y`` and ``dy`` waits for one number, the sum over the row
# of ``y * dy``, or of ``dy`` for the gradient of the logarithm.


@triton.jit
def _dot(ys, dys, place, dtype: tl.constexpr, LEAST: tl.constexpr,
         STEP: tl.constexpr, LOG: tl.constexpr):  # fmt: skip
    total = tl.zeros((ys[0].shape[0],), tl.float32)
    for c in tl.static_range(len(ys)):
        term = _numbers(dys[c], dtype)
        term = term if LOG else term * _numbers(ys[c], dtype)
        full = _full(c, term.numel, LEAST, STEP)
        total += tl.sum(_only(term, c, place, 0.0, full, STEP), 1)
    return tl.sum(total)


@triton.jit
def _finish_gradient(ys, dys, total, dx_ptr, place, dtype: tl.constexpr,
                     LEAST: tl.constexpr, STEP: tl.constexpr,
                     LOG: tl.constexpr):  # fmt: skip
    for c in tl.static_range(len(ys)):
        y, dy = _numbers(ys[c], dtype), _numbers(dys[c], dtype)
        dx = dy - _exp(y) * total if LOG else y * (dy - total)
        _store(dx_ptr, dx, c, place, _full(c, dx.numel, LEAST, STEP), STEP)


# %%


@triton.jit
def _softmax_bwd_shared(
    y_ptr, dy_ptr, dx_ptr, words_ptr, M, N: tl.constexpr, WIDTH: tl.constexpr,
    PARTS: tl.constexpr, PADDED: tl.constexpr, PAIRS: tl.constexpr,
    STEP: tl.constexpr, LOG: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    LEAST: tl.constexpr = N - (PARTS - 1) * WIDTH
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    part, first = tl.program_id(0) % PARTS, tl.program_id(0) // PARTS
    groups = tl.num_programs(0) // PARTS
    before = _place(first, part, N, WIDTH, STEP)
    y1 = _load_words(y_ptr, before, PAIRS, WIDTH, LEAST)
    dy1 = _load_words(dy_ptr, before, PAIRS, WIDTH, LEAST)
    total = _dot(y1, dy1, before, dtype, LEAST, STEP, LOG)
    _publish(words_ptr, first, part, total, total, PARTS)
    for row in tl.range(first + groups, M, groups, num_stages=1):
        place = _place(row, part, N, WIDTH, STEP)
        ys = _load_words(y_ptr, place, PAIRS, WIDTH, LEAST)
        dys = _load_words(dy_ptr, place, PAIRS, WIDTH, LEAST)
        _, sums = _collect(words_ptr, row - groups, PARTS, PADDED, WAIT)
        _finish_gradient(y1, dy1, tl.sum(sums), dx_ptr, before, dtype, LEAST,
                         STEP, LOG)  # fmt: skip
        total = _dot(ys, dys, place, dtype, LEAST, STEP, LOG)
        _publish(words_ptr, row, part, total, total, PARTS)
        y1, dy1, before = ys, dys, place
    last = first + (M - 1 - first) // groups * groups
    _, sums = _collect(words_ptr, last, PARTS, PADDED, WAIT)
    _finish_gradient(y1, dy1, tl.sum(sums), dx_ptr, before, dtype, LEAST,
                     STEP, LOG)  # fmt: skip


# %%
# Softmax of every width
# ----------------------
#
# Forward, two sweeps are enough while a cache holds the row. They are shifted
# where rows begin anywhere, and where the cache holds one row and not two.
# Backward, registers hold 32768 columns of 16 bits. Wider rows are shared, but
# read twice where programs cannot wait for each other, and in float64, which
# no word holds. ``torch.compile`` knows no addresses, and not always the
# width. So both passes are operators for it: they choose as they run.


def pick(backward, dtype, x):
    N, itemsize = x.shape[-1], x.itemsize
    row = N * itemsize
    warps, per_sm, chunks = plan_shared(backward, row)
    able = dtype != torch.float64 and ON_GPU == CUDA
    able &= row > (65536 if backward else 131072)
    if able and cut(N, 16 // itemsize, warps, chunks)[0] <= NUM_SMS * per_sm:
        return "slices"
    anywhere = N % (16 // itemsize) > 0 and row > 32768
    one = TWO_ROWS < 2 * row <= 2**18
    return "shifted" if not backward and (anywhere or one) else "page 03"


# %%

# Scaffold: both passes, in a form that is picked.


def run_forward(x, log, dtype, kind=None):
    if not x.numel():
        return torch.empty_like(x, dtype=dtype)
    return FORMS[kind or pick(False, dtype, x)](x, log, dtype)


def run_backward(y, dy, log, dtype, kind=None):
    dx = torch.empty_like(y, dtype=dtype)
    if (kind or pick(True, y.dtype, y)) == "slices":
        plan = plan_shared(True, y.shape[-1] * y.itemsize)
        shared(_softmax_bwd_shared, y, dy, dx, log=log, plan=plan)
    elif y.numel():
        dx = backward(y, dy, log, dtype)
    return dx


# %%

# Scaffold: both passes as operators for torch.compile.


@torch.library.custom_op("both_passes::wide_softmax", mutates_args=())
def operator(x: torch.Tensor, log: bool, dtype: torch.dtype) -> torch.Tensor:
    return run_forward(x, log, dtype)


@torch.library.custom_op("both_passes::wide_softmax_bwd", mutates_args=())
def operator_bwd(
    y: torch.Tensor, dy: torch.Tensor, log: bool, dtype: torch.dtype
) -> torch.Tensor:
    return run_backward(y, dy, log, dtype)


@operator.register_fake
def _(x, log, dtype):
    return torch.empty_like(x, dtype=dtype)


@operator_bwd.register_fake
def _(y, dy, log, dtype):
    return torch.empty_like(y, dtype=dtype)


# %%

# Scaffold: both passes for autograd.


class Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, log, dtype, kinds=(None, None)):
        if torch.compiler.is_compiling():
            y = operator(x, log, dtype)
        else:
            y = run_forward(x, log, dtype, kinds[0])
        ctx.save_for_backward(y)
        ctx.log, ctx.dtype, ctx.kind = log, x.dtype, kinds[1]
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        given = *ctx.saved_tensors, dy.contiguous(), ctx.log, ctx.dtype
        if torch.compiler.is_compiling():
            dx = operator_bwd(*given)
        else:
            dx = run_backward(*given, ctx.kind)
        return dx, None, None, None


# %%

# Scaffold: the functions, from page 03.


def softmax(input, dim=-1, dtype=None):
    """Powers of e, over their sum along a dimension."""
    return along(input, dim, dtype, log=False)


def log_softmax(input, dim=-1, dtype=None):
    """The logarithm of softmax."""
    return along(input, dim, dtype, log=True)


def along(input, dim, dtype, log):
    dtype = dtype or input.dtype
    if not dtype.is_floating_point or dtype.itemsize == 1:
        raise TypeError(f"{dtype}: input or dtype is a float of 16 to 64 bits")
    if input.device.type != DEVICE.type:
        raise ValueError(f"input is on {input.device}: it goes on {DEVICE}")
    x = torch.atleast_1d(input)
    if not x.is_floating_point() or not 2 <= x.itemsize < dtype.itemsize:
        x = x.to(dtype)
    x = x.movedim(dim, -1).contiguous()
    return Softmax.apply(x, log, dtype).movedim(-1, dim).reshape(input.shape)


# %%

# Scaffold: a check against float64.


def check(M, N, dtype, log, kinds=(None, None)):
    x, dy = inputs(M, N, dtype)
    y = Softmax.apply(x, log, dtype, kinds)
    found = y, *torch.autograd.grad(y, x, dy)
    exact = x.detach().double().requires_grad_()
    y = (F.log_softmax if log else F.softmax)(exact, -1)
    wanted = y, *torch.autograd.grad(y, exact, dy.double())
    limit = torch.finfo(dtype).eps * (8 if dtype == torch.float32 else 1)
    for got, want in zip(found, wanted, strict=True):
        error = ((got - want).norm() / want.norm()).item()
        assert error <= limit, f"{error:.1e} is above {limit:.1e}"
    print(f"{M} x {N}, {dtype}: errors below {limit:.1e}")


# %%
# Both passes against PyTorch's in float64, in all forms:

for kind in FORMS:
    kinds = kind, "page 03" if kind == "shifted" else kind
    check(3, 100_003 if ON_GPU else 201, torch.bfloat16, False, kinds)
    check(3, 2**17 if ON_GPU else 200, torch.float32, True, kinds)

# %%
# Measured at every width
# -----------------------
#
# `Liger <https://github.com/linkedin/Liger-Kernel>`_ and `quack
# <https://github.com/Dao-AILab/quack>`_ are measured where they can be
# imported: Liger to 65536 columns, quack at multiples of 8 to 262144.

from importlib.util import find_spec


def liger(x):
    from liger_kernel.ops.softmax import LigerSoftmaxFunction

    return LigerSoftmaxFunction.apply(x)


def quack(x):
    from quack.softmax import softmax

    return softmax(x)


CALLS = {"triton": softmax, "torch": lambda x: F.softmax(x, -1)}
OLD = "page 03", "page 03"
CALLS["page 03"] = lambda x: Softmax.apply(x, False, x.dtype, OLD)
CALLS["torch.compile"] = CALLS["torch"]
CALLS |= {"liger": liger} if find_spec("liger_kernel") else {}
CALLS |= {"quack": quack} if find_spec("quack") else {}
WIDTHS = [2**i for i in range(7, 21)]
WIDTHS += [1000, 4097, 12288, 24576, 49152, 50257, 100_003]
report(speeds("", "forward", CALLS, sorted(WIDTHS)))

# %%
# To 49152 columns two sweeps are as fast. At 4097, 50257 and 100003 columns,
# where rows begin anywhere, all libraries are far behind. Elsewhere quack is
# close, and from 49152 columns on ahead: it keeps a row in a *cluster*, whose
# multiprocessors read each other's shared memory. Our slices wait for words
# that go through the cache.

report(speeds("", "backward", CALLS, sorted(WIDTHS)))

# %%
# To 32768 columns several are level if rows begin at 16 bytes, and
# torch.compile is a few percent ahead at some: it keeps a row in registers,
# too. quack is ahead at 49152. From 65536 columns on, and where rows begin
# anywhere, ours is ahead of all libraries.
#
# Exercise 1: one number for a slice
# ----------------------------------
#
# A logarithm of a softmax needs one number of a row, the logarithm ``L`` of
# the sum of its powers. Slices could publish theirs, in half as many bits.
# Merge two of them; elements of 100 and of :math:`-\infty` are allowed.
#
# **Hint.** Of which numbers is ``exp`` neither infinite nor NaN?


def merge_logs(a, b):
    return (a.exp() + b.exp()).log()  # to do


def exercise_1(merge_logs):
    x = torch.randn(4, 8)
    x[1] += 100
    x[2, :4] = x[3] = float("-inf")
    found = merge_logs(x[:, :4].logsumexp(1), x[:, 4:].logsumexp(1))
    print("found:", found.tolist(), "exact:", x.logsumexp(1).tolist())
    return torch.allclose(found, x.logsumexp(1))


exercise_1(merge_logs)

# %%

# Solution 1: no difference to a finite maximum is above 0, or NaN.


def merge_logs_1(a, b):
    m = torch.maximum(a, b).clamp(min=torch.finfo(a.dtype).min)
    return m + ((a - m).exp() + (b - m).exp()).log()


assert exercise_1(merge_logs_1)
