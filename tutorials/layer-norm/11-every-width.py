r"""
Every width: one layer norm for a model
=======================================

Which kernel is right for a row of ``N`` columns, on any device?
One function picks it by a rule of a few lines, which does not find the fastest
kernel at every width: a figure shows where it errs.

Do you only want to use it? Take ``every_width.py``, which this page offers
under its title: it is a module with the kernels and functions of this page.
Put it beside your model, and write two lines:

.. code-block:: python

   import every_width

   model = every_width.swap(model)

Each ``torch.nn.LayerNorm`` of the model is ours now, and its parameters keep
their names and values.

You gain faster kernels: on the H200, at 4096 columns in float16, ours are 1.6
times as fast as PyTorch's forward and 2.1 times backward.
You lose time on the host, which decides where matrices are small: at 1024
columns and 4096 rows a call of both passes takes 1.4 times as long as
PyTorch's. And the first call of a new shape compiles its kernels.

**What you will learn**

- Which of four kinds of kernels is right for a width, and why.
- How one function with one rule takes any width, type and layout.
- How far that function is from a copy, and where others are faster.
- When a call waits for Python, and not for the GPU.
- How a module of PyTorch takes other kernels without being made anew.

**What you need:** nothing, to use the function. To follow its rule:
`Chunks instead of padding <05-chunks.html>`_, `Rows that begin anywhere
<06-unaligned-rows.html>`_, `Two sweeps, and a variance that stays right
<07-two-sweeps.html>`_, and `Programs that share a row
<08-shared-rows.html>`_. You don't need a GPU.
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

import ctypes
import functools
import gc
import inspect
import time

# %%
# The rule
# --------
#
# Which kernel is right for my ``N``?
#
# Two things decide: how many bytes a row has, and whether rows begin at a
# multiple of 16 bytes. They all do if the size of a row is such a multiple.
# There are four kinds of kernels, each with a forward and a backward pass:
#
# - ``chunks``: a program holds a row in registers, cut into chunks (`Chunks
#   instead of padding <05-chunks.html>`_).
# - ``shifted``: the same for rows that begin anywhere (`Rows that begin
#   anywhere <06-unaligned-rows.html>`_).
# - ``sweeps``: a program reads a row twice. That takes any width, type and
#   GPU (`Two sweeps <07-two-sweeps.html>`_).
# - ``shared``: many programs hold a row together (`Programs that share a row
#   <08-shared-rows.html>`_).
#
# A row of 4096 columns in 16 bits has 8192 bytes, a multiple of 16: chunks.
# One of 4097 columns has 8194 bytes, so the next row begins 2 bytes beyond a
# multiple of 16: shifted.
# A row of 16384 columns has 32 KB: chunks forward. Backward a program also
# holds ``dy``, ``w``, and two sums in float32 for each column. That makes 14
# bytes a column, or 224 KB, and the registers of an SM have 256 KB. The rest
# is too little for everything else that the kernel computes: shared.
#
# The limits come from trials of both kinds on each side, on an H100 and an
# H200. One rule serves both, and a figure below shows where another limit
# would be better:
#
# - **Forward**, rows stay in registers up to 48 KB, or 32 KB if they begin
#   anywhere. Then come two sweeps: up to 128 KB a cache still holds most of
#   the row when it is read again. Wider rows are shared.
# - **Backward**, rows stay in registers up to 20 KB. Two sweeps do not help in
#   between here: the second sweep is a kernel of its own, which reads both
#   matrices from memory again. So all wider rows are shared.
# - **Sharing ends** where the programs that the GPU has room for cannot hold a
#   row: at 2 MB on 132 SMs. It needs an NVIDIA GPU, and sums in float32, so
#   rows in float64 are never shared. What cannot be shared takes two sweeps.


def pick(row, most):
    """Kernels of the forward and of the backward pass for rows of so many
    bytes; programs may share ``most`` bytes of a row."""
    wide = "sweeps"
    if row <= most:
        wide = "shared"

    # Rows begin at a multiple of 16 bytes.
    if row % 16 == 0:
        forward = wide
        if row <= 49152:
            forward = "chunks"
        elif row <= 131072:
            forward = "sweeps"
        backward = wide
        if row <= 20480:
            backward = "chunks"
        return forward, backward

    # Rows begin anywhere.
    forward = wide
    if row <= 32768:
        forward = "shifted"
    backward = wide
    if row <= 20464:
        backward = "shifted"
    return forward, backward


# %%
# The chart shows what the rule picks for rows in 16 bits, on a GPU with 132
# SMs. Where ``N`` is a multiple of 8, each row begins at a multiple of 16
# bytes; ``8 n + 1`` stands for all other widths. The number below each kind is
# that of its page.

# %%

# Drawing: my N, which kernel, which page.

PAGES = {"chunks": "05", "shifted": "06", "sweeps": "07", "shared": "08"}
# Of each row of the chart: its name, columns beyond a multiple of 8, the pass.
CHART = (
    ("backward,\nN = 8 n + 1", 1, 1),
    ("backward,\nN = 8 n", 0, 1),
    ("forward,\nN = 8 n + 1", 1, 0),
    ("forward,\nN = 8 n", 0, 0),
)


def stretches(offset, which):
    """(kind, first width, last width) from left to right."""
    found = []
    for i in range(64 * 20):
        N = 8 * 2 ** (i / 64)
        row_bytes = 2 * (int(N) // 8 * 8 + offset)
        kind = pick(row_bytes, most=2 * 132 * 8192)[which]
        if not found or found[-1][0] != kind:
            found.append([kind, N, N])
        found[-1][2] = 8 * 2 ** ((i + 1) / 64)
    return found


plt.figure(
    "Kernel and page for each width in 16 bits, on 132 multiprocessors",
    figsize=(7.5, 3.4),
    layout="tight",
)
for level, (name, offset, which) in enumerate(CHART):
    plt.text(6, level, name, ha="right", va="center")
    for kind, left, right in stretches(offset, which):
        color = f"C{list(PAGES).index(kind)}"
        plt.barh(level, right - left, 0.8, left, color=color, alpha=0.6)
        middle = (left * right) ** 0.5
        words = f"{kind}\n{PAGES[kind]}"
        plt.text(middle, level, words, ha="center", va="center")
plt.xscale("log", base=2)
plt.xlabel("N")
plt.xticks(
    [2**i for i in range(3, 23, 2)],
    ["8", "32", "128", "512", "2K", "8K", "32K", "128K", "512K", "2M"],
)
plt.yticks([])
plt.show()

# %%

# Scaffold: what the device can do.

CUDA = ON_GPU and torch.version.hip is None
# Bytes. Without a GPU slices are narrow, so that small matrices have some.
SLICE = 8192 if ON_GPU else 64
WARP = 64 if torch.version.hip else 32  # threads
GPU = None
NUM_SMS = 4  # without a GPU
EARLY = False  # whether a kernel can start before another one has ended


@functools.cache
def ask_the_gpu():
    """Called when the first plan is made: to import this asks no GPU."""
    global GPU, NUM_SMS, EARLY
    if ON_GPU:
        GPU = torch.cuda.get_device_properties()
        NUM_SMS = GPU.multi_processor_count
        EARLY = CUDA and torch.cuda.get_device_capability() >= (9, 0)


def can_share(dtype):
    """The most bytes of a row that programs can share."""
    if not CUDA or dtype == torch.float64:
        return 0
    return 2 * NUM_SMS * SLICE


# %%
# The kernels
# -----------
#
# They are the kernels of the pages above, word for word. You have seen them
# there, so they are folded here.

# %%

# Scaffold: rows in chunks, forward, from page 05.


@triton.jit
def _chunk(c, left, N: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr):
    """Row and column of the lanes of a chunk, and which of them exist."""
    row = tl.arange(0, ROWS)[:, None]
    col = c * CHUNK + tl.arange(0, CHUNK)[None, :]
    # Of the rows of a program, only so many are left in the matrix.
    mask = row < left
    # The compiler knows c, so all chunks but the last compare no columns.
    if (c + 1) * CHUNK > N:
        mask = mask & (col < N)
    return row, col, mask


@triton.jit
def _load_chunks(
    ptr,  # where the first of our rows begins
    stride,  # elements from a row to the next; 0: all rows are the same
    left,  # rows that exist
    N: tl.constexpr,  # columns
    ROWS: tl.constexpr,  # rows of a chunk
    CHUNK: tl.constexpr,  # lanes of a chunk in each row
    HINT: tl.constexpr  # what the caches should do with the rows
):  # fmt: skip
    """Rows of a matrix as a tuple of chunks; 0 in lanes that do not exist."""
    xs = ()
    # Unrolled by the compiler: c is a constant each time, and the tuple grows.
    for c in tl.static_range((N + CHUNK - 1) // CHUNK):
        row, col, mask = _chunk(c, left, N, ROWS, CHUNK)
        at = ptr + (row * stride + col)
        xs += (tl.load(at, mask=mask, other=0, eviction_policy=HINT),)
    return xs


# %%

# Scaffold: rows in chunks, forward, the kernel, from page 05.


@triton.jit
def _layer_norm_fwd_chunks(
    x_ptr,  # (M, N), contiguous
    w_ptr,  # (N,); None counts as 1
    b_ptr,  # (N,); None counts as 0
    y_ptr,  # (M, N)
    mean_ptr,  # (M,): saved for the backward pass
    rstd_ptr,  # (M,): 1 / standard deviation, saved as well
    M,  # rows
    eps: tl.constexpr,  # added to the variance
    N: tl.constexpr,  # columns
    ROWS: tl.constexpr,  # New: rows that a program takes
    CHUNK: tl.constexpr,  # New: lanes of a chunk in each row
    HINT: tl.constexpr,  # New: what the caches should do with x
):
    acc: tl.constexpr = mean_ptr.dtype.element_ty  # float32, or float64

    # Load our rows. They stay in the type of x, which takes half as many
    # registers in 16 bits, and are converted where they are used.
    first = tl.program_id(0) * ROWS
    left = M - first
    start = tl.cast(first, tl.int64) * N  # M * N may pass 2**31
    xs = _load_chunks(x_ptr + start, N, left, N, ROWS, CHUNK, HINT)

    # The mean: add up chunks lane by lane, and then the lanes of each row.
    total = tl.zeros((ROWS, CHUNK), acc)
    for c in tl.static_range(len(xs)):
        total += xs[c].to(acc)
    mean = tl.sum(total, axis=1)[:, None] / N

    # The variance, in the same way.
    total = tl.zeros((ROWS, CHUNK), acc)
    for c in tl.static_range(len(xs)):
        _, col, _ = _chunk(c, left, N, ROWS, CHUNK)
        d = tl.where(col < N, xs[c].to(acc) - mean, 0)  # idle lanes: 0 again
        total += d * d
    rstd = 1 / tl.sqrt(tl.sum(total, axis=1)[:, None] / N + eps)

    # mean and rstd are columns of ROWS numbers.
    row = tl.arange(0, ROWS)[:, None]
    tl.store(mean_ptr + first + row, mean, mask=row < left)
    tl.store(rstd_ptr + first + row, rstd, mask=row < left)

    # w and b are loaded only now: loaded together with x, they would take
    # registers all the time. All programs read them, so caches keep them.
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

# Scaffold: rows in chunks, backward, from pages 05 and 06.


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
        if len(ws) > 0:
            wdy = wdy * ws[c].to(mean.dtype)
        sum1 += wdy * (xs[c].to(mean.dtype) - mean)
        sum2 += wdy
    # Both sums over a row at once, so that its warps meet only once.
    sum1, sum2 = tl.reduce((sum1, sum2), 1, _add_two)
    # From the left: rstd**3 alone may be too large for float32.
    c1 = sum1[:, None] * rstd * rstd * rstd / N
    c2 = sum2[:, None] * rstd / N
    return c1, c2


@triton.jit
def _gradients(x, dy, w, mean, rstd, c1, c2):
    """dx of a chunk, and its terms of dw and db; w may be None."""
    d = x.to(mean.dtype) - mean
    dy = dy.to(mean.dtype)
    scaled = dy * rstd
    wdy = scaled
    if w is not None:
        wdy = scaled * w.to(mean.dtype)
    return wdy - (d * c1 + c2), scaled * d, dy


# %%

# Scaffold: rows in chunks, backward, the kernel, from page 05.


@triton.jit
def _layer_norm_bwd_chunks(
    dy_ptr,  # (M, N), contiguous
    x_ptr,  # (M, N), contiguous
    w_ptr,  # (N,); None counts as 1
    mean_ptr,  # (M,), from the forward pass
    rstd_ptr,  # (M,), from the forward pass
    dx_ptr,  # (M, N), or None if dx is not wanted
    sums_ptr,  # (programs, 2, N), or None if neither dw nor db is wanted
    M,  # rows
    N: tl.constexpr,  # columns
    ROWS: tl.constexpr,  # rows of a tile
    CHUNK: tl.constexpr,  # lanes of a chunk in each row
    STAGES: tl.constexpr,  # how far ahead rows are requested
    EARLY: tl.constexpr,  # whether the second kernel may start early
):
    # w stays in registers for all rows, in its own type.
    ws = ()
    if w_ptr is not None:
        # With a stride of 0, each row of the tile is w.
        ws = _load_chunks(w_ptr, 0, ROWS, N, ROWS, CHUNK, "evict_last")

    # The sums for dw and db, of each lane: tuples of chunks, too.
    zeros = tl.zeros((ROWS, CHUNK), mean_ptr.dtype.element_ty)
    dws = ()
    dbs = ()
    for _ in tl.static_range((N + CHUNK - 1) // CHUNK):
        dws += (zeros,)
        dbs += (zeros,)

    for first in tl.range(
        tl.program_id(0) * ROWS,
        M,
        tl.num_programs(0) * ROWS,
        num_stages=STAGES,
        # The compiler would convert w to float32 before the loop, because the
        # result is always the same. That takes twice the registers.
        disable_licm=True,
    ):
        # Load ROWS rows of x and of dy, and what the forward pass saved. Rows
        # that do not exist are 0.
        row = first + tl.arange(0, ROWS)[:, None]
        left = M - first
        mean = tl.load(mean_ptr + row, mask=row < M, other=0)
        rstd = tl.load(rstd_ptr + row, mask=row < M, other=0)
        start = tl.cast(first, tl.int64) * N
        xs = _load_chunks(x_ptr + start, N, left, N, ROWS, CHUNK, "")
        dys = _load_chunks(dy_ptr + start, N, left, N, ROWS, CHUNK, "")

        # Both means need the whole row, so all chunks come first.
        c1, c2 = _means_of_chunks(xs, dys, ws, mean, rstd, N)

        # Then each chunk is done by itself. An element of a tuple cannot be
        # replaced, so the sums go into new tuples.
        new_dws = ()
        new_dbs = ()
        for c in tl.static_range(len(xs)):
            w = None
            if w_ptr is not None:
                w = ws[c]
            dx, dw, db = _gradients(xs[c], dys[c], w, mean, rstd, c1, c2)
            new_dws += (dws[c] + dw,)
            new_dbs += (dbs[c] + db,)
            if dx_ptr is not None:
                i, j, mask = _chunk(c, left, N, ROWS, CHUNK)
                tl.store(dx_ptr + start + (i * N + j), dx, mask=mask)
        dws = new_dws
        dbs = new_dbs

    # The second kernel may start now; the next section explains it.
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    if sums_ptr is not None:
        _store_sums_of_chunks(sums_ptr, dws, dbs, N)


# %%

# Scaffold: the sums of all programs, from page 05.


@triton.jit
def _store_sums_of_chunks(ptr, dws, dbs, N: tl.constexpr):
    """The sums of a program, in its buffer: dw first, then db."""
    CHUNK: tl.constexpr = dws[0].shape[1]
    ptr += tl.program_id(0) * 2 * N
    for c in tl.static_range(len(dws)):
        col = c * CHUNK + tl.arange(0, CHUNK)
        # Each of the ROWS rows of a tile has sums of its own until now.
        tl.store(ptr + col, tl.sum(dws[c], axis=0), mask=col < N)
        tl.store(ptr + N + col, tl.sum(dbs[c], axis=0), mask=col < N)


@triton.jit
def _add_up_chunks(
    sums_ptr,  # (programs, WIDTH)
    grads_ptr,  # (WIDTH,): dw, then db
    programs,  # how many rows of sums there are
    WIDTH: tl.constexpr,  # 2 * N
    ROWS: tl.constexpr,  # a power of two, at least programs
    COLS: tl.constexpr,  # columns per program
    EARLY: tl.constexpr,  # whether this kernel has been started early
):
    if EARLY:
        tl.extra.cuda.gdc_wait()  # until all sums are stored
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    rows = tl.arange(0, ROWS)[:, None]
    mask = (rows < programs) & (cols < WIDTH)
    sums = tl.load(sums_ptr + rows * WIDTH + cols, mask=mask, other=0)
    tl.store(grads_ptr + cols, tl.sum(sums, axis=0), mask=cols < WIDTH)


# %%

# Scaffold: plans for rows in chunks, from page 05.


def tile_of(N, itemsize, warps, loads=1):
    """Rows and lanes of a chunk; loads: how often each thread loads."""
    # A thread loads 16 bytes, a warp 512. A narrow row fills only a part.
    chunk = min(512 // itemsize * warps, triton.next_power_of_2(N))
    # The warps that a narrow row leaves idle load other rows.
    rows = 512 // itemsize * warps // chunk * loads
    return {"ROWS": rows, "CHUNK": chunk, "num_warps": warps}


def plan_fwd_chunks(N, itemsize, times=1):
    """The plan of a row; times: with other warps, to try the formula."""
    row = N * itemsize
    # At most 4096 bytes of a row for each warp: 8 loads of 16 bytes a thread.
    warps = triton.next_power_of_2(triton.cdiv(row, 4096))
    least = 4
    if row <= 3072:
        least = 2
    warps = int(times * max(warps, least))
    # A program takes twice as many narrow rows.
    loads = 1
    if row <= 2048:
        loads = 2
    plan = tile_of(N, itemsize, warps, loads)
    plan["HINT"] = ""
    if row <= 6144:
        plan["HINT"] = "evict_first"
    # A limit of registers, so that two programs of 16 warps fit on an SM.
    if CUDA and 40960 < row <= 49152:
        plan["maxnreg"] = 64
    return plan


def plan_bwd_chunks(N, itemsize, times=1):
    """The plan of a row; times: with other warps, to try the formula."""
    warps = 8
    if N * itemsize <= 2048:
        warps = 4
    warps = int(times * warps)
    plan = tile_of(N, itemsize, warps)
    chunks = triton.cdiv(N, plan["CHUNK"])
    # At most four tiles of 16 bytes a thread, unless one row alone has more,
    # and at most 8 rows.
    plan["ROWS"] = min(plan["ROWS"] * max(4 // chunks, 1), 8)
    # As many tiles ahead as fit into 96 KB of shared memory, but at most 3.
    tile = 2 * plan["ROWS"] * chunks * plan["CHUNK"] * itemsize
    plan["STAGES"] = 1 + min(98304 // tile, 3)
    return plan


# %%

# Scaffold: rows that begin anywhere, lanes, from page 06.


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
    """A chunk, with 0 in each lane that holds no column of ours."""
    CHUNK: tl.constexpr = x.shape[1]
    # Only the first chunk and the last can have such lanes. The compiler
    # knows c, so all other chunks cost nothing here.
    if (STEP > 1 and c == 0) or (c + 1) * CHUNK > N:
        _, inside, _ = _lanes(c, shift, N, CHUNK, STEP)
        x = tl.where(inside, x, 0)
    return x


# %%

# Scaffold: rows that begin anywhere, loads and stores, from page 06.


@triton.jit
def _load_lanes(ptr, stride, first, M, shift, N, ROWS, CHUNK, STEP):
    """Rows first, first + STEP, ... of a matrix, as a tuple of chunks."""
    # M * stride may pass 2**31, so the first row has an offset of 64 bits.
    ptr += tl.cast(first, tl.int64) * stride // STEP * STEP
    row = tl.arange(0, ROWS)[:, None] * STEP
    xs = ()
    for c in tl.static_range((N + STEP + CHUNK - 2) // CHUNK):
        lane, _, _ = _lanes(c, shift, N, CHUNK, STEP)
        mask = row < M - first
        if (c + 1) * CHUNK > N:
            # The row may end in this chunk, or just before it.
            mask = mask & (lane // STEP * STEP < N + shift)
        x = tl.load(ptr + (row * stride + lane), mask=mask, other=0)
        xs += (_only_inside(x, c, shift, N, STEP),)
    return xs


@triton.jit
def _store_shifted(ptr, x, c, first, M, shift, N, STEP):
    """Chunk c of rows first, first + STEP, ..., and nothing beside them."""
    CHUNK: tl.constexpr = x.shape[1]
    lane, inside, whole = _lanes(c, shift, N, CHUNK, STEP)
    row = tl.arange(0, x.shape[0])[:, None] * STEP
    ptr += tl.cast(first, tl.int64) * N // STEP * STEP
    at = ptr + (row * N + lane)
    mask = row < M - first
    if (STEP == 1 or c > 0) and (c + 1) * CHUNK <= N:
        # No end of a row can be in this chunk.
        tl.store(at, x, mask=mask)
    else:
        tl.store(at, x, mask=mask & whole)
        if STEP > 1:
            # The columns at both ends, one by one.
            tl.store(at, x, mask=mask & inside & (whole == 0))


# %%

# Scaffold: rows that begin anywhere, vectors and sums, from page 06.


@triton.jit
def _load_vector(ptr, shift, N, ROWS, CHUNK, STEP):
    """w or b, with column j in lane j + shift; an empty tuple for None."""
    ws = ()
    if ptr is not None:
        for c in tl.static_range((N + STEP + CHUNK - 2) // CHUNK):
            lane, inside, _ = _lanes(c, shift, N, CHUNK, STEP)
            # Zeros for each row: the tile has the shape and the layout of x.
            at = ptr + (lane - shift + tl.zeros((ROWS, 1), tl.int32))
            ws += (tl.load(at, mask=inside, other=0),)
    return ws


@triton.jit
def _store_sums_shifted(ptr, dws, dbs, shift, N, STEP):
    """The sums of a program: dw first, then db."""
    ptr += tl.program_id(0) * 2 * N - shift
    for c in tl.static_range(len(dws)):
        lane, inside, _ = _lanes(c, shift, N, dws[0].shape[1], STEP)
        tl.store(ptr + lane, tl.sum(dws[c], axis=0)[None, :], mask=inside)
        tl.store(ptr + N + lane, tl.sum(dbs[c], axis=0)[None, :], mask=inside)


# %%

# Scaffold: rows that begin anywhere, forward, from page 06.


@triton.jit
def _layer_norm_fwd_shifted(
    x_ptr,  # (M, N); a row is contiguous
    w_ptr,  # (N,); None counts as 1
    b_ptr,  # (N,); None counts as 0
    y_ptr,  # (M, N), contiguous
    mean_ptr,  # (M,): saved for the backward pass
    rstd_ptr,  # (M,): 1 / standard deviation, saved as well
    M,  # rows
    stride: tl.constexpr,  # elements from a row of x to the next
    eps: tl.constexpr,  # added to the variance
    N: tl.constexpr,  # columns
    ROWS: tl.constexpr,  # rows of a tile, each STEP after the one before
    CHUNK: tl.constexpr,  # lanes of a chunk: a power of two
    STEP: tl.constexpr,  # lanes in a group; 1: lanes begin at column 0
    STAGES: tl.constexpr,  # how far ahead rows are requested
):
    acc: tl.constexpr = mean_ptr.dtype.element_ty  # float32; or float64
    i = tl.program_id(0)

    # The number of programs is a multiple of STEP, so all rows of program i
    # have the shift of row i.
    shift = i % STEP * N % STEP
    ws = _load_vector(w_ptr, shift, N, ROWS, CHUNK, STEP)
    bs = _load_vector(b_ptr, shift, N, ROWS, CHUNK, STEP)

    # With ROWS = 2 and STEP = 8, tile 0 has rows 0 and 8, tile 1 has rows 1
    # and 9, and tile 8 has rows 16 and 24.
    tiles = tl.cdiv(M, ROWS * STEP) * STEP
    for tile in tl.range(
        i,
        tiles,
        tl.num_programs(0),
        num_stages=STAGES,
        disable_licm=True,  # w in float32 would take more registers
    ):
        first = tile // STEP * ROWS * STEP + tile % STEP
        row = first + tl.arange(0, ROWS)[:, None] * STEP
        xs = _load_lanes(x_ptr, stride, first, M, shift, N, ROWS, CHUNK, STEP)

        # The mean. Lanes that hold no column are 0.
        total = tl.zeros((ROWS, CHUNK), acc)
        for c in tl.static_range(len(xs)):
            total += xs[c].to(acc)
        mean = tl.sum(total, axis=1)[:, None] / N

        # The variance. Lanes that hold no column would be -mean.
        total = tl.zeros((ROWS, CHUNK), acc)
        for c in tl.static_range(len(xs)):
            d = _only_inside(xs[c].to(acc) - mean, c, shift, N, STEP)
            total += d * d
        rstd = 1 / tl.sqrt(tl.sum(total, axis=1)[:, None] / N + eps)
        tl.store(mean_ptr + row, mean, mask=row < M)
        tl.store(rstd_ptr + row, rstd, mask=row < M)

        # Scale, shift and store.
        for c in tl.static_range(len(xs)):
            y = (xs[c].to(acc) - mean) * rstd
            if w_ptr is not None:
                y = y * ws[c].to(acc)
            if b_ptr is not None:
                y = y + bs[c].to(acc)
            _store_shifted(y_ptr, y, c, first, M, shift, N, STEP)


# %%

# Scaffold: rows that begin anywhere, backward, from page 06.


@triton.jit
def _layer_norm_bwd_shifted(
    dy_ptr,  # (M, N), contiguous
    x_ptr,  # (M, N); a row is contiguous
    w_ptr,  # (N,); None counts as 1
    mean_ptr,  # (M,), from the forward pass
    rstd_ptr,  # (M,), from the forward pass
    dx_ptr,  # (M, N), or None if dx is not wanted
    sums_ptr,  # (programs, 2, N), or None if neither dw nor db is wanted
    M,  # rows
    stride: tl.constexpr,  # elements from a row of x to the next
    N: tl.constexpr,  # columns
    ROWS: tl.constexpr,  # rows of a tile, each STEP after the one before
    CHUNK: tl.constexpr,  # lanes of a chunk: a power of two
    STAGES: tl.constexpr,  # how far ahead rows are requested
    STEP: tl.constexpr,  # lanes in a group; 1: lanes begin at column 0
    EARLY: tl.constexpr,  # whether the second kernel may start early
):
    zeros = tl.zeros((ROWS, CHUNK), mean_ptr.dtype.element_ty)
    i = tl.program_id(0)

    # All rows of this program have the same shift, so w stays where it is,
    # and so do the sums.
    shift = i % STEP * N % STEP
    ws = _load_vector(w_ptr, shift, N, ROWS, CHUNK, STEP)
    dws = ()
    dbs = ()
    for _ in tl.static_range((N + STEP + CHUNK - 2) // CHUNK):
        dws += (zeros,)
        dbs += (zeros,)

    tiles = tl.cdiv(M, ROWS * STEP) * STEP
    for tile in tl.range(
        i,
        tiles,
        tl.num_programs(0),
        num_stages=STAGES,
        disable_licm=True,  # w in float32 would take more registers
    ):
        # Load the rows of a tile. Rows that do not exist are 0.
        first = tile // STEP * ROWS * STEP + tile % STEP
        row = first + tl.arange(0, ROWS)[:, None] * STEP
        mean = tl.load(mean_ptr + row, mask=row < M, other=0)
        rstd = tl.load(rstd_ptr + row, mask=row < M, other=0)
        xs = _load_lanes(x_ptr, stride, first, M, shift, N, ROWS, CHUNK, STEP)
        dys = _load_lanes(dy_ptr, N, first, M, shift, N, ROWS, CHUNK, STEP)

        # The two means of a row, then dx and the terms of dw and db.
        c1, c2 = _means_of_chunks(xs, dys, ws, mean, rstd, N)
        new_dws = ()
        new_dbs = ()
        for c in tl.static_range(len(xs)):
            w = None
            if w_ptr is not None:
                w = ws[c]
            dx, dw, db = _gradients(xs[c], dys[c], w, mean, rstd, c1, c2)
            # A lane without a column has dy = 0 and adds 0 to both sums.
            new_dws += (dws[c] + dw,)
            new_dbs += (dbs[c] + db,)
            if dx_ptr is not None:
                _store_shifted(dx_ptr, dx, c, first, M, shift, N, STEP)
        dws = new_dws
        dbs = new_dbs

    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    if sums_ptr is not None:
        _store_sums_shifted(sums_ptr, dws, dbs, shift, N, STEP)


# %%

# Scaffold: plans for rows that begin anywhere, from page 06.


def plan_fwd_shifted(N, itemsize, step):
    """The shape of a tile, the stages and the warps of a program."""
    row_bytes = N * itemsize
    # A warp holds some 4 KB of a row.
    warps = triton.next_power_of_2(triton.cdiv(row_bytes, 4200))
    # What a warp loads at once: 8 or 16 bytes for each of its threads.
    piece = 512
    if step > 1 and warps < 8:
        piece = 256
    # A row that fits into one chunk takes one, and several rows make a tile.
    lanes = triton.next_power_of_2(N + step - 1)
    chunk = min(piece // itemsize * warps, lanes)
    rows = max(1024 // itemsize // lanes, 1)

    # Rows that are requested ahead: up to 110 KB on an SM, which has 8 warps.
    stages = 1
    if step > 1:
        most = 90_000
        if warps < 4:
            most = 100_000
        stages += min(3, most // (row_bytes * 8 // warps))
    return {
        "CHUNK": chunk,
        "ROWS": rows,
        "STAGES": stages,
        "STEP": step,
        "num_warps": warps,
    }


def plan_bwd_shifted(N, itemsize, step):
    """The shape of a tile, the stages and the warps of a program."""
    row_bytes = N * itemsize
    warps = 4
    if row_bytes > 10_200:
        warps = 8
    # What a warp loads at once: 8 or 16 bytes for each of its threads.
    piece = 512
    if step > 1 and row_bytes <= 9216:
        piece = 256
    lanes = triton.next_power_of_2(N + step - 1)
    chunk = min(piece // itemsize * warps, lanes)
    rows = max(1024 // itemsize // chunk, 1)
    # Rows of x and of dy that are requested ahead, by the 8 warps of an SM.
    stages = 1 + min(3, 90_000 // (2 * row_bytes * 8 // warps))
    return {
        "CHUNK": chunk,
        "ROWS": rows,
        "STAGES": stages,
        "STEP": step,
        "num_warps": warps,
    }


def programs_for(M, N, itemsize, plan):
    """How many programs: a multiple of STEP, so that each keeps its shift."""
    step = plan["STEP"]
    tiles = triton.cdiv(M, plan["ROWS"] * step)  # of each shift
    if plan["STAGES"] == 1:
        return step * tiles  # one tile each
    warps_of_an_sm = 8
    if N * itemsize <= 3072:
        warps_of_an_sm = 12
    at_a_time = NUM_SMS * warps_of_an_sm // plan["num_warps"]
    return step * min(max(at_a_time // step, 1), tiles)


# %%

# Scaffold: two sweeps, mean and variance, from page 07.


@triton.jit
def _welford(
    x_ptr,  # where the row begins
    eps: tl.constexpr,  # added to the variance
    N: tl.constexpr,  # columns
    BLOCK: tl.constexpr,  # lanes of a tile: a power of two
    KEEP: tl.constexpr,  # what the caches should do with x
    acc: tl.constexpr,  # the type of the sums: float32, or float64
):
    """Mean of a row, and 1 / its standard deviation."""
    LAST: tl.constexpr = (N - 1) // BLOCK  # the number of the last tile
    lanes = tl.arange(0, BLOCK)

    # The first element of each lane is the mean of the lane so far.
    x = tl.load(x_ptr + lanes, mask=lanes < N, eviction_policy=KEEP)
    mean = tl.where(lanes < N, x.to(acc), 0)
    m2 = tl.zeros((BLOCK,), acc)
    for i in range(1, LAST + 1):
        cols = i * BLOCK + lanes
        x = tl.load(x_ptr + cols, mask=cols < N, eviction_policy=KEEP)
        # A masked lane may hold anything: with a distance of 0 it changes
        # neither of its two numbers.
        d = tl.where(cols < N, x.to(acc) - mean, 0)
        # One division for all lanes, and a multiplication in each.
        share = 1 / tl.cast(i + 1, acc)
        mean += d * share
        m2 += d * d * (1 - share)

    # Put the lanes together. A lane that was masked in the last tile has one
    # element less.
    count = tl.where(LAST * BLOCK + lanes < N, LAST + 1, LAST).to(acc)
    common = tl.sum(mean * count) / N
    d = mean - common
    variance = tl.sum(m2 + count * d * d) / N
    return common, 1 / tl.sqrt(variance + eps)


# %%

# Scaffold: two sweeps, forward, from page 07.


@triton.jit
def _layer_norm_fwd_sweeps(
    x_ptr,  # (M, N), contiguous
    w_ptr,  # (N,); None counts as 1
    b_ptr,  # (N,); None counts as 0
    y_ptr,  # (M, N)
    mean_ptr,  # (M,): saved for the backward pass
    rstd_ptr,  # (M,): 1 / standard deviation, saved as well
    eps: tl.constexpr,  # added to the variance
    N: tl.constexpr,  # columns
    BLOCK: tl.constexpr,  # lanes of a tile: a power of two
    CACHES: tl.constexpr,  # whether to help the caches
):
    KEEP: tl.constexpr = "evict_last" if CACHES else ""
    DROP: tl.constexpr = "evict_first" if CACHES else ""
    STREAM: tl.constexpr = ".cs" if CACHES else ""
    LAST: tl.constexpr = (N - 1) // BLOCK  # the number of the last tile
    acc: tl.constexpr = mean_ptr.dtype.element_ty  # float32, or float64

    # A program for each row. M * N may pass 2**31.
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * N

    # First sweep.
    mean, rstd = _welford(x_ptr, eps, N, BLOCK, KEEP, acc)
    tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)

    # Second sweep, from the last tile to the first.
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


def plan_sweeps(N, itemsize):
    """Lanes of a tile, and warps of a program."""
    row_bytes = N * itemsize
    threads = 1024
    tile_bytes = 32768
    if row_bytes <= 65536:
        tile_bytes = 16384
    if row_bytes <= 32768:
        threads = 512
        tile_bytes = 8192
    if row_bytes % 16 > 0:
        threads = 256
        tile_bytes = 8192
    block = min(tile_bytes // itemsize, triton.next_power_of_2(N))
    # A narrow row does not need so many threads.
    threads = min(threads, block * itemsize // 16)
    return block, max(threads // WARP, 1)


# %%

# Scaffold: two sweeps, backward, the first, from page 07.


@triton.jit
def _layer_norm_bwd_means(
    dy_ptr,  # (M, N), contiguous
    x_ptr,  # (M, N), contiguous
    w_ptr,  # (N,); None counts as 1
    mean_ptr,  # (M,), from the forward pass
    rstd_ptr,  # (M,), from the forward pass
    c_ptr,  # (2, M): c1 of all rows, then c2
    M,  # rows
    N: tl.constexpr,  # columns
    BLOCK: tl.constexpr,  # lanes of a tile: a power of two
):
    # A program for each row. M * N may pass 2**31.
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * N
    dy_ptr += row * N
    mean = tl.load(mean_ptr + row)
    rstd = tl.load(rstd_ptr + row)

    # Both sums, for each lane.
    acc: tl.constexpr = mean_ptr.dtype.element_ty  # float32, or float64
    c1 = tl.zeros((BLOCK,), acc)
    c2 = tl.zeros((BLOCK,), acc)
    for start in range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + cols, mask=cols < N, other=0).to(acc)
        dy = tl.load(dy_ptr + cols, mask=cols < N, other=0).to(acc)
        wdy = dy  # 0 in a masked lane, which then adds nothing
        if w_ptr is not None:
            wdy *= tl.load(w_ptr + cols, mask=cols < N, other=0).to(acc)
        # x_hat is (x - mean) * rstd. All of a row have the same factor rstd,
        # so one multiplication at the end is enough.
        c1 += (x - mean) * wdy
        c2 += wdy

    tl.store(c_ptr + row, tl.sum(c1) * rstd / N)
    tl.store(c_ptr + M + row, tl.sum(c2) / N)


# %%

# Scaffold: two sweeps, backward, the plan of the first, from page 07.


def plan_means(N, itemsize):
    """Lanes of a tile of the first kernel, and warps of a program."""
    block = min(8192 // itemsize, triton.next_power_of_2(N))
    tiles = triton.cdiv(N, block)
    if tiles == 3 or 5 <= tiles <= 8:
        return block, 8
    return block, 16


# %%

# Scaffold: two sweeps, backward, the second, from page 07.


@triton.jit
def _layer_norm_bwd_slices(
    dy_ptr,  # (M, N), contiguous
    x_ptr,  # (M, N), contiguous
    w_ptr,  # (N,); None counts as 1
    mean_ptr,  # (M,), from the forward pass
    rstd_ptr,  # (M,), from the forward pass
    c_ptr,  # (2, M): c1 and c2 of all rows; None if dx is not wanted
    dx_ptr,  # (M, N), or None if dx is not wanted
    sums_ptr,  # (groups, 2, N), or None if neither dw nor db is wanted
    M,  # rows
    N: tl.constexpr,  # columns
    ROWS: tl.constexpr,  # rows of a tile
    COLS: tl.constexpr,  # columns of a slice: a power of two
):
    # Which slice is ours, and which group of rows? Neighboring programs have
    # neighboring slices of the same rows.
    SLICES: tl.constexpr = (N + COLS - 1) // COLS
    group = tl.program_id(0) // SLICES
    groups = tl.num_programs(0) // SLICES
    cols = tl.program_id(0) % SLICES * COLS + tl.arange(0, COLS)[None, :]

    # Our part of w stays in registers, and so do our sums.
    acc: tl.constexpr = mean_ptr.dtype.element_ty  # float32, or float64
    if w_ptr is not None:
        w = tl.load(w_ptr + cols, mask=cols < N, other=0)
    dw = tl.zeros((1, COLS), acc)
    db = tl.zeros((1, COLS), acc)

    # Where the elements of a tile are, from the beginning of its first row.
    # For two rows of up to 2**30 columns, 32 bits are enough.
    row = tl.arange(0, ROWS)[:, None]
    at = row * N + cols

    for first in tl.range(group * ROWS, M, groups * ROWS, num_stages=3):
        # Load a tile, and what is known of its rows.
        exists = row < M - first
        mask = exists & (cols < N)
        start = tl.cast(first, tl.int64) * N  # M * N may pass 2**31
        x = tl.load(x_ptr + start + at, mask=mask, other=0)
        dy = tl.load(dy_ptr + start + at, mask=mask, other=0)
        mean = tl.load(mean_ptr + first + row, mask=exists, other=0)
        rstd = tl.load(rstd_ptr + first + row, mask=exists, other=0)

        # The terms of dw and db, summed over the rows of the tile.
        x_hat = (x.to(acc) - mean) * rstd
        dy = dy.to(acc)
        dw += tl.sum(dy * x_hat, axis=0, keep_dims=True)
        db += tl.sum(dy, axis=0, keep_dims=True)

        if dx_ptr is not None:
            # The formula for dx, with the means of the first kernel.
            c1 = tl.load(c_ptr + first + row, mask=exists, other=0)
            c2 = tl.load(c_ptr + M + first + row, mask=exists, other=0)
            wdy = dy
            if w_ptr is not None:
                wdy = dy * w.to(acc)
            dx = (wdy - x_hat * c1 - c2) * rstd
            tl.store(dx_ptr + start + at, dx, mask=mask)

    if sums_ptr is not None:
        # Each group has a buffer of its own.
        sums_ptr += group * 2 * N + cols
        tl.store(sums_ptr, dw, mask=cols < N)
        tl.store(sums_ptr + N, db, mask=cols < N)


# %%

# Scaffold: words between programs, publish, from page 08.

EMPTY = 0x7F800001_7F800001


@triton.jit
def _publish(
    words_ptr,  # (rows, SLICES)
    first,  # the first row of a tile
    s,  # our slice
    a,  # (ROWS,) float32: the lower halves of the words of a tile
    b,  # (ROWS,) float32: their upper halves
    SLICES: tl.constexpr,  # slices of a row
    PTX: tl.constexpr,  # False: in the interpreter
):
    """Store the word of slice s for each row of a tile."""
    row = first + tl.arange(0, a.shape[0])
    at = words_ptr + row * SLICES + s

    # The bits of both numbers, and then one beside the other. A number of 32
    # bits becomes one of 64 with zeros before it, because it is unsigned.
    low = a.to(tl.uint32, bitcast=True).to(tl.int64)
    high = b.to(tl.uint32, bitcast=True).to(tl.int64)
    word = low | (high << 32)

    if PTX:
        tl.inline_asm_elementwise(
            "st.relaxed.gpu.global.b64 [$1], $2; mov.b32 $0, 0;",
            constraints="=r,l,l",
            args=[at.to(tl.int64), word],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.store(at, word)


# %%

# Scaffold: words between programs, collect, from page 08.


@triton.jit
def _collect(
    words_ptr,  # (rows, SLICES)
    first,  # the first row of a tile
    ROWS: tl.constexpr,  # rows of a tile
    SLICES: tl.constexpr,  # slices of a row
    PADDED: tl.constexpr,  # a power of two, at least SLICES
    PTX: tl.constexpr,  # False: in the interpreter
):
    """For each row of a tile the numbers of all slices, then zeros."""
    row = first + tl.arange(0, ROWS)[:, None]
    s = tl.arange(0, PADDED)[None, :]
    # Lanes beyond the last slice load its word once more.
    at = words_ptr + row * SLICES + tl.minimum(s, SLICES - 1)

    if PTX:
        word = tl.inline_asm_elementwise(
            """{
            .reg .pred empty, again;
            .reg .b32 loads;
            mov.b32 loads, 0;
            LOAD:
            ld.relaxed.gpu.global.b64 $0, [$1];
            setp.eq.b64 empty, $0, 0x7F8000017F800001;
            add.u32 loads, loads, 1;
            setp.lt.and.u32 again, loads, 10000000, empty;
            @again bra LOAD;
            @empty trap;
            }""",
            constraints="=&l,l",
            args=[at.to(tl.int64)],
            dtype=tl.int64,
            is_pure=False,
            pack=1,
        )
    else:
        word = tl.load(at)

    # Both halves as float32 again.
    a = word.to(tl.uint32).to(tl.float32, bitcast=True)
    b = (word >> 32).to(tl.uint32).to(tl.float32, bitcast=True)
    return tl.where(s < SLICES, a, 0), tl.where(s < SLICES, b, 0)


# %%

# Scaffold: slices of shared rows, from page 08.


@triton.jit
def _my_slice(
    N: tl.constexpr,  # columns
    ROWS: tl.constexpr,  # rows of a tile
    LANES: tl.constexpr,  # lanes of a slice: a power of two, at least WIDTH
    WIDTH: tl.constexpr,  # columns of a slice
):
    """Our slice, our first row, rows from one tile to the next, the columns of
    our lanes, and which of them exist."""
    SLICES: tl.constexpr = (N + WIDTH - 1) // WIDTH
    s = tl.program_id(0) % SLICES
    group = tl.program_id(0) // SLICES
    lane = tl.arange(0, LANES)[None, :]
    inside = (lane < WIDTH) & (s * WIDTH + lane < N)
    groups = tl.num_programs(0) // SLICES
    return s, group * ROWS, groups * ROWS, s * WIDTH + lane, inside


@triton.jit
def _tile(
    first,  # the first row of the tile
    cols,  # the columns of its lanes
    inside,  # which of the columns exist
    M,  # rows that exist
    N: tl.constexpr,  # columns
    ROWS: tl.constexpr,  # rows of a tile
):
    """Where a tile is in a matrix, and which of its elements exist."""
    row = tl.arange(0, ROWS)[:, None]
    # Only this is in 64 bits, once a tile: M * N may pass 2**31.
    start = tl.cast(first, tl.int64) * N
    return start, row * N + cols, inside & (row < M - first)


@triton.jit
def _column(t):
    return tl.sum(t) if t.shape[0] == 1 else t[:, None]


@triton.jit
def _statistics(
    means,  # (rows, PADDED): the mean of each slice
    m2s,  # (rows, PADDED): its squared distances from it, summed
    eps: tl.constexpr,  # added to the variance
    N: tl.constexpr,  # columns
    WIDTH: tl.constexpr,  # columns of a slice
):
    """Mean and 1 / standard deviation of each row."""
    # The columns of each slice: the last one may have fewer, and what is
    # beyond it has none.
    s = tl.arange(0, means.shape[1])[None, :]
    n = tl.maximum(tl.minimum(N - s * WIDTH, WIDTH), 0).to(tl.float32)
    mean = tl.sum(means * n, axis=1) / N
    d = means - _column(mean)
    variance = tl.sum(m2s + n * d * d, axis=1) / N
    return mean, 1 / tl.sqrt(variance + eps)


# %%

# Scaffold: shared rows, forward, from page 08.


@triton.jit
def _layer_norm_fwd_shared(
    x_ptr,  # (M, N), contiguous
    w_ptr,  # (N,)
    b_ptr,  # (N,)
    y_ptr,  # (M, N)
    mean_ptr,  # (M,) float32: saved for the backward pass
    rstd_ptr,  # (M,) float32: 1 / standard deviation, saved as well
    words_ptr,  # (more than M, SLICES), empty
    M,  # rows
    eps: tl.constexpr,  # added to the variance
    N: tl.constexpr,  # columns
    ROWS: tl.constexpr,  # rows of a tile
    LANES: tl.constexpr,  # lanes of a slice: a power of two, at least WIDTH
    WIDTH: tl.constexpr,  # columns of a slice
    PADDED: tl.constexpr,  # a power of two, at least the number of slices
    PTX: tl.constexpr,  # False: in the interpreter
):
    SLICES: tl.constexpr = (N + WIDTH - 1) // WIDTH
    s, start, step, cols, inside = _my_slice(N, ROWS, LANES, WIDTH)

    # A program always has the same columns, so it loads w and b once.
    w = tl.load(w_ptr + cols, mask=inside, other=0)
    b = tl.load(b_ptr + cols, mask=inside, other=0)

    before = tl.zeros((ROWS, LANES), x_ptr.dtype.element_ty)
    # Until M + step: one turn more than there are tiles.
    for first in tl.range(start, M + step, step, num_stages=3):
        # Load a tile.
        at, cell, mask = _tile(first, cols, inside, M, N, ROWS)
        x = tl.load(x_ptr + at + cell, mask=mask, other=0)

        # Mean and m2 of our slice of each row, and tell the others.
        count = tl.minimum(N - s * WIDTH, WIDTH)  # columns of our slice
        mean = tl.sum(x.to(tl.float32), axis=1) / count
        d = tl.where(inside, x.to(tl.float32) - mean[:, None], 0)
        m2 = tl.sum(d * d, axis=1)
        _publish(words_ptr, first, s, mean, m2, SLICES, PTX)

        # The tile before: its first row, and the row where storing ends. In
        # the first turn nothing is stored.
        done = tl.maximum(first - step, start)
        end = tl.where(first > start, M, 0)

        # What all slices of its rows have published, and the statistics. All
        # programs of the group compute the same.
        means, m2s = _collect(words_ptr, done, ROWS, SLICES, PADDED, PTX)
        mean, rstd = _statistics(means, m2s, eps, N, WIDTH)
        rows = done + tl.arange(0, ROWS)
        once = rows < tl.where(s == 0, end, 0)  # slice 0 stores them
        tl.store(mean_ptr + rows, mean, mask=once)
        tl.store(rstd_ptr + rows, rstd, mask=once)

        # Scale, shift and store.
        y = (before.to(tl.float32) - _column(mean)) * _column(rstd)
        y = y * w.to(tl.float32) + b.to(tl.float32)
        at, cell, mask = _tile(done, cols, inside, end, N, ROWS)
        tl.store(y_ptr + at + cell, y, mask=mask)
        before = x


# %%

# Scaffold: plans for shared rows, from page 08.


def plan_shared(N, itemsize, forward):
    """Rows and lanes of a tile; programs on an SM, and warps of each."""
    row = N * itemsize
    if forward:
        if row <= 32 * SLICE:
            return (2, 2 * SLICE // itemsize), {"per_sm": 1, "warps": 8}
        if row <= 96 * SLICE:
            return (2, SLICE // itemsize), {"per_sm": 2, "warps": 8}
        return (1, 2 * SLICE // itemsize), {"per_sm": 2, "warps": 4}

    # The backward pass comes further down.
    # A quarter of SLICE each, in three programs on an SM, if that is enough.
    if row <= min(16, 3 * NUM_SMS // 4) * SLICE:
        return (4, SLICE // 4 // itemsize), {"per_sm": 3, "warps": 4}
    if row <= 128 * SLICE:
        return (1, SLICE // itemsize), {"per_sm": 2, "warps": 4}
    return (1, SLICE // itemsize), {"per_sm": 2, "warps": 8}


# %%

# Scaffold: shared rows, sums and gradients, from page 08.


@triton.jit
def _add_pairs(a1, a2, b1, b2):
    return a1 + b1, a2 + b2


@triton.jit
def _slice_sums(x, dy, w, mean):
    """The two sums over our slice of each row of a tile."""
    wdy = w.to(tl.float32) * dy.to(tl.float32)
    d = x.to(tl.float32) - _column(mean)
    return tl.reduce((wdy * d, wdy), 1, _add_pairs)


@triton.jit
def _slice_gradients(
    x,  # a tile
    dy,  # a tile
    w,  # (1, LANES)
    mean,  # (rows,)
    rstd,  # (rows,)
    sum1,  # (rows, PADDED): the first sum of each slice
    sum2,  # (rows, PADDED): the second
    dw,  # (1, LANES): the sums so far
    db,  # (1, LANES)
    N: tl.constexpr,  # columns
):
    """dx of a tile, and dw and db with its terms."""
    # The sums over whole rows.
    sum1, sum2 = tl.reduce((sum1, sum2), 1, _add_pairs)
    # From the left: rstd**3 alone may be too large for float32.
    c1 = _column(sum1 * rstd * rstd * rstd / N)
    c2 = _column(sum2 * rstd / N)

    d = x.to(tl.float32) - _column(mean)
    dy = dy.to(tl.float32)
    scaled = dy * _column(rstd)
    dx = scaled * w.to(tl.float32) - (d * c1 + c2)
    dw += tl.sum(scaled * d, axis=0)[None, :]
    db += tl.sum(dy, axis=0)[None, :]
    return dx, dw, db


# %%

# Scaffold: shared rows, backward, from page 08.


@triton.jit
def _layer_norm_bwd_shared(
    dy_ptr,  # (M, N), contiguous
    x_ptr,  # (M, N), contiguous
    w_ptr,  # (N,)
    mean_ptr,  # (M,), from the forward pass
    rstd_ptr,  # (M,), from the forward pass
    dx_ptr,  # (M, N)
    words_ptr,  # (more than M, SLICES), empty
    sums_ptr,  # (groups, 2, N): dw and db of each group
    M,  # rows
    N: tl.constexpr,  # columns
    ROWS: tl.constexpr,  # rows of a tile
    LANES: tl.constexpr,  # lanes of a slice: a power of two, at least WIDTH
    WIDTH: tl.constexpr,  # columns of a slice
    PADDED: tl.constexpr,  # a power of two, at least the number of slices
    PTX: tl.constexpr,  # False: in the interpreter
):
    SLICES: tl.constexpr = (N + WIDTH - 1) // WIDTH
    s, start, step, cols, inside = _my_slice(N, ROWS, LANES, WIDTH)
    w = tl.load(w_ptr + cols, mask=inside, other=0)

    # The sums of our columns, over all rows of our group.
    dw = tl.zeros((1, LANES), tl.float32)
    db = tl.zeros((1, LANES), tl.float32)

    # The tile before.
    x_before = tl.zeros((ROWS, LANES), x_ptr.dtype.element_ty)
    dy_before = x_before

    for first in tl.range(
        start,
        M + step,  # one turn more than there are tiles
        step,
        num_stages=3,
        # The compiler would convert w to float32 before the loop, because the
        # result is always the same. That takes registers, and they are full.
        disable_licm=True,
    ):
        # Load a tile of both matrices, and the means of its rows.
        at, cell, mask = _tile(first, cols, inside, M, N, ROWS)
        x = tl.load(x_ptr + at + cell, mask=mask, other=0)
        dy = tl.load(dy_ptr + at + cell, mask=mask, other=0)
        rows = first + tl.arange(0, ROWS)
        mean = tl.load(mean_ptr + rows, mask=rows < M, other=0)

        # The sums of our slice, and tell the others.
        sum1, sum2 = _slice_sums(x, dy, w, mean)
        _publish(words_ptr, first, s, sum1, sum2, SLICES, PTX)

        # The tile before; in the first turn none of its rows is stored.
        done = tl.maximum(first - step, start)
        end = tl.where(first > start, M, 0)
        sum1, sum2 = _collect(words_ptr, done, ROWS, SLICES, PADDED, PTX)

        # Its statistics once more: registers are too few to keep them.
        rows = done + tl.arange(0, ROWS)
        mean = tl.load(mean_ptr + rows, mask=rows < end, other=0)
        rstd = tl.load(rstd_ptr + rows, mask=rows < end, other=0)

        dx, dw, db = _slice_gradients(
            x_before, dy_before, w, mean, rstd, sum1, sum2, dw, db, N
        )
        at, cell, mask = _tile(done, cols, inside, end, N, ROWS)
        tl.store(dx_ptr + at + cell, dx, mask=mask)
        x_before = x
        dy_before = dy

    # Each group has a row of sums, and each program its own columns of it.
    sums_ptr += start // ROWS * 2 * N + cols
    tl.store(sums_ptr, dw, mask=inside)
    tl.store(sums_ptr + N, db, mask=inside)


# %%
# Launches and plans
# ------------------
#
# How does one function call four kinds of kernels without losing time?
#
# Most of what a launch needs is the same each time that shapes, types, devices
# and ``eps`` are the same. So the first such call finds it and remembers it as
# a *plan*: which kernels, how many programs, what to allocate, and what Triton
# has compiled. `What the user waits for <10-host-time.html>`_ explains each of
# these steps, so they are folded, too. Here is what this page adds:
#
# - Mean and rstd of all rows are one tensor, because each tensor that a call
#   makes takes time on the host.
# - We call the autograd function one level below PyTorch's ``apply``. What
#   ``apply`` adds in Python is only needed for the transforms of
#   ``torch.func``, which our function refuses anyway.
# - Programs that share a row are only launched if the GPU has room for all of
#   them at a time. Before the first launch we ask CUDA how many fit. If they
#   are too few, two sweeps take over.

# %%

# Scaffold: a launch that remembers itself.


def launcher(kernel, grid, unaligned=None, fits=None, **more):
    """A launch as a function of the tensors of a kernel, in its order.

    Mean and rstd, which are two arguments of a kernel, are one tensor here.
    What Triton compiled is kept, and only addresses are handed over from then
    on. If one of them is no multiple of 16, Triton looks at all arguments
    again, or ``unaligned`` takes over. If ``fits(compiled)`` is not true,
    nothing is launched, and the result is False.
    """
    names = [*inspect.signature(kernel.fn).parameters]
    constants = [more.pop(name) for name in names if name in more]
    by_triton = functools.partial(kernel[(grid,)], **more)
    both = None
    if "mean_ptr" in names:
        both = names.index("mean_ptr")
    to_rstd = 0  # bytes from the first mean to the first rstd
    again = None

    def launch(*tensors):
        nonlocal again, to_rstd
        addresses = [0 if t is None else t.data_ptr() for t in tensors]
        any_bit = 0
        for address in addresses:
            any_bit |= address
        aligned = any_bit % 16 == 0
        if again is not None and aligned:
            if both is not None:
                addresses.insert(both + 1, addresses[both] + to_rstd)
            again(addresses, constants)
            return True
        if unaligned is not None and not aligned:
            return unaligned(*tensors)
        if both is not None:
            mean, rstd = tensors[both].unbind()
            to_rstd = rstd.data_ptr() - mean.data_ptr()
            tensors = *tensors[:both], mean, rstd, *tensors[both + 1 :]
        if fits is not None:
            compiled = kernel.warmup(
                *tensors, *constants, grid=(grid,), **more
            )
            if not fits(compiled):
                return False
        compiled = by_triton(*tensors, *constants)
        # The interpreter compiles nothing.
        if compiled is not None and aligned:
            again = bare(compiled, grid)
        return True

    return launch


def bare(compiled, grid):
    """A launch of what is compiled, on the stream that is current then."""
    driver = triton.runtime.driver.active
    device = driver.get_current_device()  # a plan is for one
    current_stream = driver.get_current_stream
    run = compiled.run
    function = compiled.function
    metadata = compiled.packed_metadata

    def launch(addresses, constants):
        stream = current_stream(device)
        # Three times None: no metadata for hooks, and no hooks.
        run(
            grid, 1, 1, stream, function, metadata, None, None, None,
            *addresses, *constants,
        )  # fmt: skip

    return launch


# %%

# Scaffold: launches of programs that wait for each other.


def places(compiled):
    """How many programs of a compiled kernel the GPU can run at a time."""
    try:
        compiled._init_handles()  # load it onto the GPU, as a launch does
    except triton.OutOfResources:
        return 0  # not even one: it needs more than an SM has
    per_sm = ctypes.c_int(0)
    ctypes.CDLL("libcuda.so.1").cuOccupancyMaxActiveBlocksPerMultiprocessor(
        ctypes.byref(per_sm),
        ctypes.c_void_p(compiled.function),
        ctypes.c_int(32 * compiled.metadata.num_warps),  # threads
        ctypes.c_size_t(compiled.metadata.shared),  # bytes of shared memory
    )
    return per_sm.value * NUM_SMS


def together(kernel, grid, per_sm, warps, **more):
    """A launch of programs that wait for each other, if the GPU has room for
    all of them at a time; it says whether it has."""
    more["num_warps"] = warps
    more["PTX"] = CUDA
    if not CUDA:
        launch = launcher(kernel, grid, **more)

        def twice(*tensors):
            """The interpreter's programs run one by one: after the first time
            all words are there."""
            launch(*tensors)
            return launch(*tensors)

        return twice

    def fits(compiled):
        return grid <= places(compiled)

    registers = 65536 // (32 * warps * per_sm)
    more["maxnreg"] = min(registers // 8 * 8, 255)  # a multiple of 8
    more["launch_cooperative_grid"] = True
    return launcher(kernel, grid, fits=fits, **more)


def cut(M, N, rows, lanes, per_sm):
    """Groups and programs, the shape of words, and tiles for a kernel."""
    programs = NUM_SMS * per_sm
    least = triton.cdiv(N, lanes)
    groups = max(min(programs // least, triton.cdiv(M, rows)), 1)
    padded = triton.next_power_of_2(least)
    unit = min(lanes, 64)  # slices begin at a multiple of 128 bytes
    width = triton.cdiv(N, min(programs // groups, padded) * unit) * unit
    slices = triton.cdiv(N, width)
    tiles = {"ROWS": rows, "LANES": lanes, "WIDTH": width, "PADDED": padded}
    return groups, groups * slices, (M + (groups + 1) * rows, slices), tiles


def empty_words(shape, device):
    words = torch.empty(shape, dtype=torch.int64, device=device)
    return words.fill_(EMPTY if CUDA else 0)


# %%

# Scaffold: forward launches, one for each kind.


def forward_chunks(M, N, itemsize, eps):
    plan = plan_fwd_chunks(N, itemsize)
    return launcher(
        _layer_norm_fwd_chunks,
        triton.cdiv(M, plan["ROWS"]),
        M=M,
        eps=eps,
        N=N,
        **plan,
    )


def forward_shifted(M, N, itemsize, eps):
    launch = None
    # The first is for what the second cannot take: a matrix that does not
    # begin at a multiple of 16 bytes.
    for step in (1, 16 // itemsize):
        plan = plan_fwd_shifted(N, itemsize, step)
        launch = launcher(
            _layer_norm_fwd_shifted,
            programs_for(M, N, itemsize, plan),
            unaligned=launch,
            M=M,
            stride=N,
            eps=eps,
            N=N,
            **plan,
        )
    return launch


def forward_sweeps(M, N, itemsize, eps):
    block, warps = plan_sweeps(N, itemsize)
    return launcher(
        _layer_norm_fwd_sweeps,
        M,
        eps=eps,
        N=N,
        BLOCK=block,
        CACHES=True,
        num_warps=warps,
    )


def forward_shared(M, N, itemsize, eps):
    tile, how = plan_shared(N, itemsize, True)
    _, programs, shape, tiles = cut(M, N, *tile, how["per_sm"])
    launch = together(
        _layer_norm_fwd_shared, programs, M=M, eps=eps, N=N, **tiles, **how
    )
    otherwise = forward_sweeps(M, N, itemsize, eps)

    def run(x, w, b, y, stats):
        ones = x.new_ones(N) if w is None else w
        zeros = x.new_zeros(N) if b is None else b
        words = empty_words(shape, x.device)
        if not launch(x, ones, zeros, y, stats, words):
            otherwise(x, w, b, y, stats)

    return run


# %%

# Scaffold: backward launches, and how many rows of sums there are.


def backward_chunks(M, N, itemsize):
    # In these rows half the warps, and two programs on a multiprocessor: where
    # one waits for a sum over its rows, the other one works.
    per_sm = 1
    if 2048 < N * itemsize <= 6144:
        per_sm = 2
    plan = plan_bwd_chunks(N, itemsize, 1 / per_sm)
    P = min(NUM_SMS * per_sm, triton.cdiv(M, plan["ROWS"]))
    return P, launcher(
        _layer_norm_bwd_chunks, P, M=M, N=N, EARLY=EARLY, **plan
    )


def backward_shifted(M, N, itemsize):
    plan = plan_bwd_shifted(N, itemsize, 16 // itemsize)
    P = programs_for(M, N, itemsize, plan)
    launch = None
    for step in (1, 16 // itemsize):
        launch = launcher(
            _layer_norm_bwd_shifted,
            P,
            unaligned=launch,
            M=M,
            stride=N,
            N=N,
            EARLY=EARLY,
            **plan_bwd_shifted(N, itemsize, step),
        )
    return P, launch


def backward_sweeps(M, N, itemsize, groups=None):
    block, warps = plan_means(N, itemsize)
    cols = min(4096 // itemsize, triton.next_power_of_2(N))
    slices = triton.cdiv(N, cols)
    rows = 2
    P = groups or max(min(2 * NUM_SMS // slices, triton.cdiv(M, rows)), 1)
    means = launcher(
        _layer_norm_bwd_means, M, M=M, N=N, BLOCK=block, num_warps=warps
    )
    finish = launcher(
        _layer_norm_bwd_slices,
        slices * P,
        M=M,
        N=N,
        ROWS=rows,
        COLS=cols,
        num_warps=8,
    )

    def run(dy, x, w, stats, dx, sums):
        c = None
        if dx is not None:
            c = stats.new_empty(2, M)
            means(dy, x, w, stats, c)
        finish(dy, x, w, stats, c, dx, sums)

    return P, run


# %%

# Scaffold: backward launches of shared rows, and the last sums.


def backward_shared(M, N, itemsize):
    tile, how = plan_shared(N, itemsize, False)
    P, programs, shape, tiles = cut(M, N, *tile, how["per_sm"])
    launch = together(
        _layer_norm_bwd_shared, programs, M=M, N=N, **tiles, **how
    )
    _, otherwise = backward_sweeps(M, N, itemsize, groups=P)

    def run(dy, x, w, stats, dx, sums):
        ones = x.new_ones(N) if w is None else w
        # What nobody wants is computed all the same.
        all_dx = torch.empty_like(x) if dx is None else dx
        all_sums = stats.new_empty(P, 2, N) if sums is None else sums
        words = empty_words(shape, x.device)
        if not launch(dy, x, ones, stats, all_dx, words, all_sums):
            otherwise(dy, x, w, stats, dx, sums)

    return P, run


def add_up(P, N):
    """Tiles of 4096 sums, but as many programs as a GPU has places."""
    rows = triton.next_power_of_2(max(P, 1))
    few = triton.next_power_of_2(2 * N // 512)
    cols = max(min(4096 // rows, few), 16)
    more = {}
    if EARLY:
        more["launch_pdl"] = True
    return launcher(
        _add_up_chunks,
        triton.cdiv(2 * N, cols),
        programs=P,
        WIDTH=2 * N,
        ROWS=rows,
        COLS=cols,
        EARLY=EARLY,
        **more,
    )


FORWARD = {
    "chunks": forward_chunks,
    "shifted": forward_shifted,
    "sweeps": forward_sweeps,
    "shared": forward_shared,
}
BACKWARD = {
    "chunks": backward_chunks,
    "shifted": backward_shifted,
    "sweeps": backward_sweeps,
    "shared": backward_shared,
}

# %%

# Scaffold: plans.


def dtype_of_gradients(w, b, acc_dtype):
    """The type of w and b, if they agree; acc_dtype, if they do not.

    Autograd then rounds each gradient to the type of its parameter.
    """
    dtypes = {tensor.dtype for tensor in (w, b) if tensor is not None}
    if len(dtypes) == 1:
        return dtypes.pop()
    return acc_dtype


def statistics(M):
    """The shape of mean and rstd; both begin at a multiple of 16 bytes."""
    return 2, triton.cdiv(M, 8) * 8


class Plan:
    """What calls of one kind have in common: launches, and results to make."""

    def __init__(self, shape, x, weight, bias, eps, kernels=None):
        ask_the_gpu()
        N = shape.numel()
        M = x.numel() // N
        first, second = kernels or pick(N * x.itemsize, can_share(x.dtype))
        self.kernels = first, second
        self.forward = FORWARD[first](M, N, x.itemsize, eps)

        # Patterns of what a call makes anew, of one number each: to make a
        # tensor like another one takes the host least.
        acc_dtype = torch.promote_types(x.dtype, torch.float32)
        dtype = dtype_of_gradients(weight, bias, acc_dtype)
        one = torch.empty((), dtype=acc_dtype, device=x.device)
        self.stats = one.expand(statistics(M))
        self.grads = one.to(dtype).expand(2, *shape)

        # Which gradients are wanted is a part of a compiled kernel.
        @functools.cache
        def backward(for_x, for_parameters):
            P, launch = BACKWARD[second](M, N, x_itemsize)
            return launch, one.expand(P, 2, N), add_up(P, N)

        x_itemsize = x.itemsize  # and not x, which need not be kept
        self.backward = backward


# %%

# Scaffold: both passes of a plan.


def normalize(plan, x, w, b):
    """y, and mean and rstd of its rows, of contiguous tensors."""
    y = torch.empty_like(x)
    stats = torch.empty_like(plan.stats)
    plan.forward(x, w, b, y, stats)
    return y, stats


def gradients(plan, for_x, for_parameters, dy, x, w, stats):
    """dx, and dw and db in one tensor; None for what is not wanted."""
    launch, like_sums, add_up = plan.backward(for_x, for_parameters)
    dx = None
    if for_x:
        dx = torch.empty_like(x)
    if not for_parameters:
        launch(dy.contiguous(), x, w, stats, dx, None)
        return dx, None
    sums = torch.empty_like(like_sums)
    launch(dy.contiguous(), x, w, stats, dx, sums)
    grads = torch.empty_like(plan.grads)
    add_up(sums, grads)
    return dx, grads


def contiguous_or_none(tensor):
    """The tensor with its elements side by side; copied only if needed."""
    if tensor is None:
        return None
    return tensor.contiguous()


# %%

# Scaffold: the autograd function.


class BothPasses(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, b, plan):
        x = x.contiguous()
        if w is not None:
            w = w.contiguous()
        if b is not None:
            b = b.contiguous()
        y, stats = normalize(plan, x, w, b)
        ctx.save_for_backward(x, w, stats)
        ctx.plan = plan
        return y

    @staticmethod
    def backward(ctx, dy):
        if torch.is_grad_enabled():  # create_graph=True: no second pass
            once = torch.autograd.function.once_differentiable
            return once(gradients_of)(ctx, dy)
        return gradients_of(ctx, dy)


# What apply of an autograd function does before it calls this serves
# torch.func, whose transforms our launches refuse anyway, and takes time.
APPLY = super(torch.autograd.Function, BothPasses).apply


def gradients_of(ctx, dy):
    """One gradient for each argument of forward; a plan has none."""
    for_x, for_w, for_b, _ = ctx.needs_input_grad
    dx, grads = gradients(
        ctx.plan, for_x, for_w or for_b, dy, *ctx.saved_tensors
    )
    dw = None
    db = None
    if grads is not None:
        dw, db = grads.unbind()
    return dx, dw if for_w else None, db if for_b else None, None


# %%
# The function
# ------------
#
# It has the arguments of PyTorch's, and one more: ``kernels`` forces the
# kernels of both passes, which we need for measuring.
# The first call with new shapes or types checks its arguments and makes a
# plan, and all later ones find it in a dictionary. To ``torch.compile`` both
# passes are operators: it sees which shapes go in and come out, and not what
# is inside.


def layer_norm(
    x, normalized_shape, weight=None, bias=None, eps=1e-5, *, kernels=None
):
    """Normalize x over its last dimensions; both passes run in Triton.

    x has floats of 16 bits or more, and any dimensions and strides.
    normalized_shape, a number or a shape, gives the last dimensions of x.
    weight and bias have that shape, or are None.
    """
    if isinstance(normalized_shape, int):
        shape = (normalized_shape,)
    else:
        shape = tuple(normalized_shape)
    if torch.compiler.is_compiling():
        return operator_forward(x, weight, bias, shape, eps)[0]
    plan = plan_of(shape, x, weight, bias, eps, kernels)
    return APPLY(x, weight, bias, plan)


# %%
# The layer is PyTorch's with another ``forward``, so it loads what a
# ``torch.nn.LayerNorm`` has saved. And in Python an object may change its
# class: a layer of your model becomes ours and keeps all that it holds.


class LayerNorm(torch.nn.LayerNorm):
    """torch.nn.LayerNorm, whose both passes run in Triton."""

    def forward(self, x):
        return layer_norm(
            x, self.normalized_shape, self.weight, self.bias, self.eps
        )


def swap(model):
    """Let each torch.nn.LayerNorm in a model be ours; parameters stay."""
    for module in model.modules():
        if type(module) is torch.nn.LayerNorm:
            module.__class__ = LayerNorm
    return model


# %%

# Scaffold: the plan of a call.

PLANS = {}


def current_device():
    """Its number; -1 without a GPU, as of tensors in memory of the host."""
    if not ON_GPU:
        return -1
    return torch.cuda.current_device()


def plan_of(shape, x, weight, bias, eps, kernels=None):
    """The plan of a call; a kind has all that a plan depends on."""
    kind = (
        shape,
        eps,
        kernels,
        current_device(),
        x.shape,
        x.dtype,
        x.device,
        weight is not None and (weight.shape, weight.dtype, weight.device),
        bias is not None and (bias.shape, bias.dtype, bias.device),
    )
    plan = PLANS.get(kind)
    if plan is None:
        check_arguments(x, torch.Size(shape), weight, bias, eps)
        if len(PLANS) >= 4096:
            PLANS.clear()
        plan = Plan(torch.Size(shape), x, weight, bias, eps, kernels)
        PLANS[kind] = plan
    return plan


# %%

# Scaffold: which arguments are taken.


def check_arguments(x, shape, weight, bias, eps):
    """Raise an error that names the wrong argument, and says why."""
    tensors = {"x": x, "weight": weight, "bias": bias}
    tensors = {name: t for name, t in tensors.items() if t is not None}

    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or tensor.itemsize == 1:
            raise TypeError(
                f"{name} is {tensor.dtype}: it must have floats of 16 bits or "
                "more"
            )
        # Triton starts a kernel on the current GPU, wherever its tensors are.
        if tensor.get_device() != current_device():
            raise ValueError(
                f"{name} is on {tensor.device}: not the current one"
            )
        if tensor.device != x.device:
            raise ValueError(
                f"{name} is on {tensor.device}, and x is on {x.device}"
            )
    if shape.numel() == 0 or len(shape) == 0:
        raise ValueError(f"normalized_shape is {tuple(shape)}: it is empty")
    for name, tensor in tensors.items():
        last_dimensions = tensor.shape
        if name == "x":
            last_dimensions = tensor.shape[-len(shape) :]
        if last_dimensions != shape:
            raise ValueError(
                f"the shape of {name} is {tuple(tensor.shape)}, and "
                f"normalized_shape is {tuple(shape)}"
            )
    if shape.numel() > 2**30:  # places in two rows are numbers of 32 bits
        raise ValueError(
            f"normalized_shape is {tuple(shape)}: at most 2**30 columns"
        )
    if not eps >= 0:  # negative, or NaN
        raise ValueError(f"eps is {eps}: it must be 0 or more")


# %%

# Scaffold: both passes as operators for torch.compile.

MAYBE = torch.Tensor | None


@torch.library.custom_op("both_passes::every_width", mutates_args=())
def operator_forward(
    x: torch.Tensor, w: MAYBE, b: MAYBE, shape: list[int], eps: float
) -> list[torch.Tensor]:
    plan = plan_of(tuple(shape), x, w, b, eps)
    w = contiguous_or_none(w)
    b = contiguous_or_none(b)
    return list(normalize(plan, x.contiguous(), w, b))


@operator_forward.register_fake
def _(x, w, b, shape, eps):
    acc_dtype = torch.promote_types(x.dtype, torch.float32)
    M = x.numel() // torch.Size(shape).numel()
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    return [y, x.new_empty(statistics(M), dtype=acc_dtype)]


@torch.library.custom_op("both_passes::every_width_bwd", mutates_args=())
def operator_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    w: MAYBE,
    b: MAYBE,
    stats: torch.Tensor,
    shape: list[int],
    eps: float,
) -> list[torch.Tensor]:
    plan = plan_of(tuple(shape), x, w, b, eps)
    w = contiguous_or_none(w)
    return list(gradients(plan, True, True, dy, x.contiguous(), w, stats))


@operator_backward.register_fake
def _(dy, x, w, b, stats, shape, eps):
    dtype = dtype_of_gradients(w, b, stats.dtype)
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    return [dx, x.new_empty((2, *shape), dtype=dtype)]


# %%

# Scaffold: their gradients.


def keep(ctx, inputs, output):
    x, w, b, shape, eps = inputs
    _, stats = output
    ctx.save_for_backward(x, w, b, stats)
    ctx.shape = shape
    ctx.eps = eps


def operator_gradients(ctx, results):
    x, w, b, stats = ctx.saved_tensors
    dx, grads = operator_backward(
        results[0], x, w, b, stats, ctx.shape, ctx.eps
    )
    dw = None
    if w is not None:
        dw = grads[0].to(w.dtype)
    db = None
    if b is not None:
        db = grads[1].to(b.dtype)
    return dx, dw, db, None, None


BOUND = operator_forward.register_autograd(
    operator_gradients, setup_context=keep
)

# %%
# How fast is it?
# ---------------
#
# We compare with PyTorch, torch.compile and libraries that have a layer norm:
# `Liger <https://github.com/linkedin/Liger-Kernel>`_, `quack
# <https://github.com/Dao-AILab/quack>`_, `flash-attn
# <https://github.com/Dao-AILab/flash-attention>`_ with its kernel in Triton,
# `fla <https://github.com/fla-org/flash-linear-attention>`_, and `cuDNN
# <https://github.com/NVIDIA/cudnn-frontend>`_.
# FastLayerNorm of `Apex <https://github.com/NVIDIA/apex>`_ has no line: it
# must be built from source, and could not be had where the figures were
# recorded.
#
# We show each of them at its best. Where one refuses a width, its line has no
# point. torch.compile compiles each width three times, and the fastest result
# of each pass counts.
# quack and cuDNN have weights in float32, because quack takes no others, and
# cuDNN would convert them in each call. cuDNN takes seconds to build a graph,
# so we ask it for three widths only.

# %%

# Scaffold: Liger, Apex and cuDNN.


def liger():
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction

    return lambda x, _, w, b: LigerLayerNormFunction.apply(x, w, b, 1e-5)


def apex():
    from apex.contrib.layer_norm.layer_norm import FastLayerNormFN

    return lambda x, _, w, b: FastLayerNormFN.apply(x, w, b, 1e-5)


def cudnn():
    from cudnn.experimental.ops import layer_norm as cudnn_layer_norm

    return lambda x, shape, w, b: cudnn_layer_norm(x, shape, w, b, 1e-5)


# %%

# Scaffold: flash-attn and fla, which try several numbers of warps.


def tries_take_less_time(kernel):
    """A library's own clock runs each try for longer than it needs."""
    while not hasattr(kernel, "configs"):  # something wraps what tries
        kernel = kernel.fn
    kernel.do_bench = functools.partial(
        triton.testing.do_bench, warmup=5, rep=20
    )
    return kernel


def flash():
    from flash_attn.ops.triton import layer_norm as module

    for name in "_layer_norm_fwd_1pass_kernel", "_layer_norm_bwd_kernel":
        kernel = tries_take_less_time(getattr(module, name))
        # Its own list has 1 and 32 warps, too, which are never the fastest.
        kernel.configs = [
            triton.Config({}, num_warps=warps) for warps in (2, 4, 8, 16)
        ]
    return lambda x, _, w, b: module.layer_norm_fn(x, w, b, eps=1e-5)


def fla():
    from fla.modules.norm import layernorm as module

    for name in "layer_norm_fwd_kernel_row", "layer_norm_bwd_kernel_row":
        tries_take_less_time(getattr(module, name))
    return lambda x, _, w, b: module.layer_norm(x, w, b, eps=1e-5)


# %%

# Scaffold: quack, and the list of libraries.


def quack():
    # It has no autograd function for layer norm; weights are float32.
    from quack.rmsnorm import layernorm_bwd, layernorm_fwd

    class Quack(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w, b):
            y, rstd, mean = layernorm_fwd(x, w, b, 1e-5, True, True)
            ctx.save_for_backward(x, w, rstd, mean)
            return y

        @staticmethod
        def backward(ctx, dy):
            x, w, rstd, mean = ctx.saved_tensors
            return layernorm_bwd(x, w, dy, rstd, mean)

    return lambda x, _, w, b: Quack.apply(x, w, b)


LIBRARIES = {
    "liger": ("Liger", liger), "apex": ("Apex", apex),
    "quack": ("quack", quack), "flash": ("flash-attn", flash),
    "cudnn": ("cuDNN", cudnn), "fla": ("fla", fla),
}  # fmt: skip


@functools.cache
def library(key):
    """Its function, or None where it cannot be imported."""
    name, load = LIBRARIES[key]
    try:
        return load()
    except Exception as error:  # whatever stops an import
        print(f"{name} has no line here: {type(error).__name__}: {error}")
        return None


# %%

# Scaffold: what is asked of whom.

# The widths that Apex's FastLayerNorm is compiled for.
APEX = {
    768, 1024, 1536, 2048, 2304, 3072, 3840, 4096, 5120, 6144, 8192, 10240,
    12288, 12800, 14336, 15360, 16384, 18432, 20480, 24576, 25600, 30720,
    32768, 40960, 49152, 65536,
}  # fmt: skip


# Without this list a run could end in an error of the device.
def refuses(key, N, itemsize):
    if key == "quack":
        return N > 2**18 or N % 8 > 0
    if key == "cudnn":
        return N > 16384 or N % 4096 > 0  # it builds for seconds
    if key == "apex":
        return N not in APEX
    if key == "liger":
        return N > 65536
    if key in ("flash", "fla"):
        return 65536 // itemsize < N
    if key == "chunks":
        return 131072 // itemsize < N  # a program has at most 32 warps
    return False


def pytorch(x, shape, w, b):
    return F.layer_norm(x, shape, w, b)


# %%

# Scaffold: inputs.


def inputs(M, N, dtype):
    """x, w, b and dy. The mean of x is far from 0, as it may be in a model."""
    torch.manual_seed(0)
    x = -2.3 + 0.5 * torch.randn(M, N, device=DEVICE)
    w = torch.rand(N, device=DEVICE)
    b = torch.rand(N, device=DEVICE)
    dy = 0.1 * torch.randn(M, N, device=DEVICE)
    x = x.to(dtype).requires_grad_()
    w = w.to(dtype).requires_grad_()
    b = b.to(dtype).requires_grad_()
    return x, w, b, dy.to(dtype)


# %%

# Scaffold: calls to time.


def call_of(function, M, N, dtype, mode, weights=None):
    """A call without arguments, of one pass or of both, with inputs of its
    own; weights is the type of w and b, if it is not that of x."""
    x, w, b, dy = inputs(M, N, dtype)
    if weights is not None:
        w = w.detach().to(weights).requires_grad_()
        b = b.detach().to(weights).requires_grad_()

    def forward():
        return function(x, (N,), w, b)

    def both():
        return torch.autograd.grad(forward(), (x, w, b), dy)

    if mode == "forward":
        return forward
    if mode == "forward and backward":
        return both
    y = forward()

    def backward():
        return torch.autograd.grad(y, (x, w, b), dy, retain_graph=True)

    return backward


def function_of(provider, N, dtype, mode):
    """A function like PyTorch's."""
    if provider in ("triton", "CUDA graph"):
        return layer_norm
    if provider in FORWARD:  # one kind of kernels, for the pass in question
        first, _ = pick(N * dtype.itemsize, can_share(dtype))
        if mode == "forward":
            first = provider
        return functools.partial(layer_norm, kernels=(first, provider))
    if provider in LIBRARIES:
        return library(provider)
    if provider == "torch.compile":
        return torch.compile(pytorch, dynamic=False)
    if provider == "reduce-overhead":
        return torch.compile(pytorch, dynamic=False, mode="reduce-overhead")
    return pytorch


def prepared(provider, M, N, dtype, mode):
    """A call of a provider."""
    weights = None
    if provider in ("quack", "cudnn"):
        weights = torch.float32
    function = function_of(provider, N, dtype, mode)
    return call_of(function, M, N, dtype, mode, weights)


def attempt(measure, provider, N):
    """What measure() returns; None for a library that fails."""
    try:
        return measure()
    except Exception as error:
        if provider not in (*LIBRARIES, "reduce-overhead"):
            raise
        reason = str(error).strip().partition("\n")[0]
        print(f"{provider} has no point at N = {N}: {reason}")
        return None


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

# Scaffold: what is measured once, and asked for by several benchmarks.


def bytes_moved(M, N, dtype, mode):
    matrices = 3  # read x and dy, write dx
    if mode == "forward":
        matrices = 2  # read x, write y
    return matrices * M * N * dtype.itemsize


@functools.cache
def copied(M, N, dtype, mode):
    """The speed of a copy: forward of one matrix, backward a sum of two."""
    reads = 2
    if mode == "forward":
        reads = 1
    return ceiling(reads=reads, writes=1, shape=(M, N), dtype=dtype)


@functools.cache
def best_compilations(M, N, dtype):
    """The speeds of torch.compile in both passes: {pass: speed}.

    To compile takes longer than to measure, so each compilation is measured
    in both passes, and the best of each counts.
    """
    backward = []

    def measure(function):
        speeds = []
        for mode in ("forward", "backward"):

            def prepare(mode=mode):
                return call_of(function, M, N, dtype, mode)

            speeds.append(speed(bytes_moved(M, N, dtype, mode), prepare))
        backward.append(speeds[1])
        return speeds[0]

    forward = best_of_three_compilations(pytorch, measure)
    return {"forward": forward, "backward": max(backward)}


def speed_of(provider, M, N, dtype, mode):
    """GB/s of a provider: median, low, high; NaN where it has no point."""
    no_point = 3 * [float("nan")]
    # The interpreter cannot be timed.
    if not ON_GPU or refuses(provider, N, dtype.itemsize):
        return no_point
    M = min(M, 2**29 // (N * dtype.itemsize))  # a matrix of at most 512 MB
    if provider == "copy":
        return copied(M, N, dtype, mode)
    if provider == "torch.compile":
        return best_compilations(M, N, dtype)[mode]

    def prepare():
        return prepared(provider, M, N, dtype, mode)

    def measure():
        return speed(bytes_moved(M, N, dtype, mode), prepare)

    return attempt(measure, provider, N) or no_point


def lines(widths, dtype):
    """Providers and their names, without libraries that have no point."""
    names = {
        "triton": "Triton",
        "torch": "PyTorch",
        "torch.compile": "torch.compile",
    }
    for key, (name, _) in LIBRARIES.items():
        taken = [N for N in widths if not refuses(key, N, dtype.itemsize)]
        if ON_GPU and taken and library(key):
            names[key] = name
    return names


# %%

# Scaffold: usual widths, two benchmarks.

WIDTHS = [1024, 1536, 2048, 4096, 8192, 12288, 65536, 2**18, 2**20]
USUAL = lines(WIDTHS, torch.float16) | {"copy": "Copy"}


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=WIDTHS,
        x_log=True,
        line_arg="provider",
        line_vals=[*USUAL],
        line_names=[*USUAL.values()],
        ylabel="GB/s",
        plot_name="layer-norm-every-forward",
        args={"M": 4096, "dtype": torch.float16, "mode": "forward"},
    )
)
def bench_forward(M, N, dtype, mode, provider):
    """Device time: a CUDA graph of several calls, each with inputs of its own
    and after L2 was overwritten, less the graph without the calls; median, 20%
    and 80% quantiles. Copy: the best of six tiles. At most 512 MB a matrix."""
    return speed_of(provider, M, N, dtype, mode)


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=WIDTHS,
        x_log=True,
        line_arg="provider",
        line_vals=[*USUAL],
        line_names=[*USUAL.values()],
        ylabel="GB/s",
        plot_name="layer-norm-every-backward",
        args={"M": 4096, "dtype": torch.float16, "mode": "backward"},
    )
)
def bench_backward(M, N, dtype, mode, provider):
    """Device time: a CUDA graph of several calls, each with inputs of its own
    and after L2 was overwritten, less the graph without the calls; median, 20%
    and 80% quantiles. Copy: the best of six tiles. At most 512 MB a matrix."""
    return speed_of(provider, M, N, dtype, mode)


# %%
# First come widths of models, and wide rows, all in float16. There are 4096
# rows, and fewer where a matrix would pass 512 MB.

# %%

report(bench_forward)

# %%
# **What the figure shows.**
# On the H200 ours reaches 79% to 94% of a copy up to 65536 columns, PyTorch
# reaches 45% to 57%, and torch.compile 39% to 94%. Ours is 1.6 to 2.0 times as
# fast as PyTorch there.
# Wider rows are shared: at 262144 columns ours reaches 74%, and at 1048576
# 73%, where PyTorch reaches 39% and 12%.
#
# Of the libraries, quack takes rows of up to 262144 columns. In the geometric
# mean over these widths ours is 1.9 times as fast, and 1.4 times without 12288
# columns. There quack 0.6.5 reaches 7%, while it reaches 67% at 8192 columns.
# We measured that ourselves, found no public report of it, and do not know the
# cause. Another version may not have it.
# Over the widths that each takes, ours is 1.5 times as fast as Liger in the
# geometric mean, 1.1 times as fast as flash-attn, 1.1 times as fast as fla and
# 4.4 times as fast as cuDNN.
#
# **Why.**
# Up to 12288 columns each row is read and written once, as in the copy.
# From 1536 to 4096 columns ours takes 1.8 to 2.0 µs longer than the copy,
# though the matrices grow with each width. So that time does not depend on the
# bytes, and the narrower the rows, the larger is its share. What it is spent
# on, why it is less than one microsecond at 1024 columns, and why it is 4.0 µs
# at 8192, we have not measured.
# At 65536 columns a row is read a second time, from a cache as far as it is
# still there.
# Wider rows are shared, and there ours reaches its lowest shares. Many
# programs share a row, and all wait for the last; from 524288 columns on, the
# compiler also keeps some numbers in memory, as `Programs that share a row
# <08-shared-rows.html>`_ says. That is likely what stands in the way, but no
# page measures how much each costs.
#
# PyTorch reads each row twice, too, as `Layer normalization, both passes
# <01-layer-norm.html>`_ explains. What holds the libraries back we have not
# looked for.
#
# **What follows.**
# Forward, up to 65536 columns, memory sets the pace at most widths, and little
# is left to gain, most of it in narrow rows. In the widest rows there is more.

# %%

report(bench_backward)

# %%
# **What the figure shows.**
# On the H200 ours reaches 67% to 85% of a copy up to 65536 columns, PyTorch
# reaches 30% to 39%, and torch.compile 29% to 52%. Ours is 2.1 to 5.0 times as
# fast as PyTorch.
# At 262144 columns ours reaches 81%, and at 1048576 75%.
# In the geometric mean, over the widths that each takes, ours is 1.9 times as
# fast as quack, 3.0 times as fast as Liger, 2.5 times as fast as flash-attn,
# 7.7 times as fast as fla, and 1.2 times as fast as cuDNN.
#
# **Why.**
# The first reason is how many bytes move. Ours reads ``x`` and ``dy`` once and
# writes ``dx``, whether one program holds the row or many do. PyTorch reads
# both matrices a second time for ``dw`` and ``db``, which makes five matrices
# instead of three. That alone would leave it 60% of the copy. It reaches less:
# it also sweeps rows twice for ``dx``, which counts where no cache holds them,
# and there may be other reasons.
# Ours falls short of the copy most where rows are narrow: its programs write
# sums for ``dw`` and ``db``, and a second kernel reads them. `Chunks instead
# of padding <05-chunks.html>`_ measures that on an H100.
# In the widest rows more programs share a row and wait for each other, which
# is a likely reason there, as forward.
#
# **What follows.**
# Writing your own kernel pays most backward: at every width even the best
# rival is further behind ours here than forward, and in training this pass
# moves more bytes.
#
# Widths that nobody tunes for
# ----------------------------
#
# What if a width is no multiple of 512, or odd? We try 1000, 1151, 4097 and
# 12345 columns, in bfloat16.

# %%

# Scaffold: unusual widths, two benchmarks.

ODD_WIDTHS = [1000, 1151, 4097, 12345]
UNUSUAL = lines(ODD_WIDTHS, torch.bfloat16) | {"copy": "Copy"}


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=ODD_WIDTHS,
        line_arg="provider",
        line_vals=[*UNUSUAL],
        line_names=[*UNUSUAL.values()],
        ylabel="GB/s",
        plot_name="layer-norm-every-unusual-forward",
        args={"M": 4096, "dtype": torch.bfloat16, "mode": "forward"},
    )
)
def bench_unusual_forward(M, N, dtype, mode, provider):
    """Device time: a CUDA graph of several calls, each with inputs of its own
    and after L2 was overwritten, less the graph without the calls; median, 20%
    and 80% quantiles. Copy: the best of six tiles."""
    return speed_of(provider, M, N, dtype, mode)


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=ODD_WIDTHS,
        line_arg="provider",
        line_vals=[*UNUSUAL],
        line_names=[*UNUSUAL.values()],
        ylabel="GB/s",
        plot_name="layer-norm-every-unusual-backward",
        args={"M": 4096, "dtype": torch.bfloat16, "mode": "backward"},
    )
)
def bench_unusual_backward(M, N, dtype, mode, provider):
    """Device time: a CUDA graph of several calls, each with inputs of its own
    and after L2 was overwritten, less the graph without the calls; median, 20%
    and 80% quantiles. Copy: the best of six tiles."""
    return speed_of(provider, M, N, dtype, mode)


# %%

report(bench_unusual_forward)

# %%

report(bench_unusual_backward)

# %%
# **What the figures show.**
# On the H200 ours reaches 85%, 75%, 84% and 77% of a copy forward at these
# widths, from left to right, and PyTorch 42%, 14%, 20% and 23%. Backward ours
# reaches 66%, 58%, 77% and 52%, and PyTorch 29%, 27%, 33% and 27%.
#
# **Why.**
# 1000 columns are 2000 bytes, a multiple of 16, and rows begin where loads of
# 16 bytes can begin. The other three widths are odd. `Rows that begin anywhere
# <06-unaligned-rows.html>`_ explains why that costs PyTorch so much forward,
# and why ours loses less. Backward PyTorch reaches about as little at even
# widths.
# Backward, 12345 columns are beyond the limit of shifted rows. Programs share
# such a row, but with loads of 2 bytes each, which is why ours falls to 52%
# there.
#
# **What follows.**
# If you can choose a width, take a multiple of 8 in 16 bits. If you cannot,
# up to 10232 columns you lose something, but not much: 4097 columns have 84%
# and 77% here, where 4096 had 90% and 81% above, and 1151 columns have 75% and
# 58%, where 1000 have 85% and 66%.
#
# Is the rule right?
# ------------------
#
# We measure all kinds on both sides of its limits, where rows begin at a
# multiple of 16 bytes. "Triton" is what the rule picks.

# %%

# Scaffold: at the limits of the rule, two benchmarks.

KINDS = {
    "triton": "Triton",
    "chunks": "chunks",
    "sweeps": "sweeps",
    "shared": "shared",
    "copy": "Copy",
}


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=[8704, 12288, 24576, 32768, 49152, 65536, 98304],
        line_arg="provider",
        line_vals=[*KINDS],
        line_names=[*KINDS.values()],
        ylabel="GB/s",
        plot_name="layer-norm-every-limits-forward",
        args={"M": 4096, "dtype": torch.float16, "mode": "forward"},
    )
)
def bench_limits_forward(M, N, dtype, mode, provider):
    """Device time: a CUDA graph of several calls, each with inputs of its own
    and after L2 was overwritten, less the graph without the calls; median, 20%
    and 80% quantiles. Copy: the best of six tiles. At most 512 MB a matrix."""
    return speed_of(provider, M, N, dtype, mode)


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=[8192, 10240, 10752, 12288, 16384],
        line_arg="provider",
        line_vals=[*KINDS],
        line_names=[*KINDS.values()],
        ylabel="GB/s",
        plot_name="layer-norm-every-limits-backward",
        args={"M": 4096, "dtype": torch.float16, "mode": "backward"},
    )
)
def bench_limits_backward(M, N, dtype, mode, provider):
    """Device time: a CUDA graph of several calls, each with inputs of its own
    and after L2 was overwritten, less the graph without the calls; median, 20%
    and 80% quantiles. Copy: the best of six tiles."""
    return speed_of(provider, M, N, dtype, mode)


# %%

report(bench_limits_forward)

# %%

report(bench_limits_backward)

# %%
# **What the figures show.**
# Forward, on the H200, another kind is faster than what the rule picks by at
# most 5%, at 12288 columns, and backward none is.
#
# "Triton" and the kind that the rule picks are the same kernels, measured
# twice. They differ by at most 0.5% but for one width: at 49152 columns they
# reach 85% as "Triton" and 89% as "sweeps", and we do not know why.
#
# Chunks and two sweeps are close to each other forward: at 8704 columns chunks
# reach 93% and two sweeps 92%, at 12288 it is 93% and 98%, and at 24576 94%
# and 96%. At 32768 chunks fall to 83%, and two sweeps reach 98%.
# At 65536 columns two sweeps reach 87% and shared rows 85%, and at 98304 it is
# 73% and 85%. Shared rows reach no more than 15% at 8704 and 20% at 12288. The
# rule does not pick them there, and we have not looked for the reason.
#
# Backward, at 10240 columns, chunks reach 87% and shared rows 78%; at 10752 it
# is 70% and 77%, and at 16384 chunks fall to 4%. Shared rows reach 81% at
# 12288 and 80% at 16384.
#
# **Why.**
# At 8704 columns two sweeps go in tiles of 4096 lanes, and the third tile is
# mostly empty, but takes its time. 12288 and 24576 columns fill their tiles.
# Why two sweeps are then even faster than chunks, which read each row only
# once, and why chunks do worse at 32768 columns than at 49152, we have not
# looked into.
#
# Backward, the rule lets chunks go up to 10240 columns. A program has 256
# threads, so each of them holds 40 columns, and a column takes 3.5 registers,
# as `Chunks instead of padding <05-chunks.html>`_ counts. At 16384 columns a
# thread holds 64 columns, which take 64 × 3.5 = 224 of the 255 registers that
# it can have. What has no room beside them is written to memory and read again
# (it *spills*).
# Just beyond that limit shared rows are weak, and weakest at 10752 columns.
# Their slices have at most 1024 columns, so 10752 columns need 11 slices,
# which could hold 11264: a part of the lanes is idle. 12288 columns fill 12
# slices. 16384 fill 16, but groups of 16 programs leave 12 of the 396 places
# of the GPU free. Both fit what we see. Even full slices reach less than
# chunks, whose programs wait for no other.
#
# **What follows.**
# A rule of two thresholds in each pass is close to the best kind, and takes
# next to no time. Autotuning would try all kinds at each new width.
# On the H200 a lower limit would be better forward: at 12288 and 24576
# columns, where the rule picks chunks, two sweeps are faster.
#
# Is it right?
# ------------
#
# We compare each element with PyTorch's layer norm in float64.
# For a matrix as small as this one the rule picks only chunks or shifted rows,
# so ``kernels`` forces each kind.

# %%

# Scaffold: a check of each element against float64.


def both_passes(function, x, w, b, dy):
    """y, dx, dw and db by name."""
    y = function(x, (x.shape[1],), w, b)
    dx, dw, db = torch.autograd.grad(y, (x, w, b), dy)
    return {"y": y, "dx": dx, "dw": dw, "db": db}


def in_float64(tensor):
    """The same numbers in float64, as a new input for autograd."""
    return tensor.detach().double().requires_grad_()


def check(function, M, N, dtype):
    """Compare each element of y, dx, dw and db with PyTorch's in float64."""
    arguments = inputs(M, N, dtype)
    ours = both_passes(function, *arguments)
    wide = [in_float64(tensor) for tensor in arguments]
    exact = both_passes(F.layer_norm, *wide)
    for name in ours:
        error = (ours[name] - exact[name]).abs()
        rounding = exact[name].abs() * torch.finfo(dtype).eps / 2
        typical_size = exact[name].square().mean().sqrt()
        sums = 64 * torch.finfo(torch.float32).eps * typical_size
        worst = (error / (rounding + sums)).max().item()
        assert worst <= 1, f"{name}: {worst:.1f} times the allowed error"
    print(f"{M} x {N}, {dtype}: each element of y, dx, dw and db is right")


# %%

M = 3  # small, because the interpreter is slow
N = 41
if ON_GPU:
    M = 1151
    N = 521
kinds = [("shifted", N), ("sweeps", N), ("chunks", N - 1)]
if CUDA == ON_GPU:  # without CUDA no programs can wait for each other
    kinds.append(("shared", N - 1))
for kind, columns in kinds:
    print(end=f"{kind:8}")
    function = functools.partial(layer_norm, kernels=(kind, kind))
    check(function, M, columns, torch.float16)

# %%
# How long does a call take?
# --------------------------
#
# So far we have timed the GPU. How long does a call take?
#
# We make one call right after the other, and stop the clock when the device
# has finished the last one. A call then takes as long as the slower of the
# two: the host that prepares it, or the device. Other work on the machine can
# only make calls longer, and never shorter. So all lines take turns, 225
# times, with a batch of 10 calls each, and the fastest batch of each line
# counts.
#
# PyTorch has a remedy of its own for host time:
# ``torch.compile(mode="reduce-overhead")`` replays CUDA graphs, after it has
# copied the inputs to where the graphs read them. And "CUDA graph" is a graph
# of our call that we recorded ourselves: it takes only the time of the device.

# %%

# Scaffold: whole calls in turns.


def time_of_batch(call, times=10):
    """µs of a call: many in a row, until the device has finished."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(times):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / times * 1e6


def ready(provider, M, N, dtype, mode):
    """A call that has run, and of which a graph is kept if asked for."""
    call = prepared(provider, M, N, dtype, mode)
    if provider == "reduce-overhead":
        call = next_step(call)
    for _ in range(3):  # reduce-overhead records a graph in the second call
        call()
    if provider != "CUDA graph":
        return call
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        graph.kept = call, call()  # a graph keeps nothing alive
    return graph.replay


def next_step(call):
    """A call that lets the results of earlier ones be overwritten."""

    def step():
        torch.compiler.cudagraph_mark_step_begin()
        return call()

    return step


ROUNDS = 15
TURNS = 15  # of a round


@functools.cache
def times_of_all(M, N, dtype, mode):
    """For each line the µs of a call: least, least, and what three rounds
    have reached.

    In a round all lines take turns, and the fastest turn of each counts.
    """
    torch._dynamo.reset()  # nothing is left of other shapes
    calls = {}
    for provider in CALLS:
        # The interpreter cannot be timed.
        if not ON_GPU or refuses(provider, N, dtype.itemsize):
            continue
        start = functools.partial(ready, provider, M, N, dtype, mode)
        call = attempt(start, provider, N)
        if call is not None:
            calls[provider] = call
    rounds = {provider: [] for provider in calls}
    gc.disable()  # Python collects no garbage meanwhile
    for _ in range(ROUNDS):
        fastest = dict.fromkeys(calls, float("inf"))
        for _ in range(TURNS):
            for provider, call in calls.items():
                taken = time_of_batch(call)
                fastest[provider] = min(fastest[provider], taken)
        for provider, taken in fastest.items():
            rounds[provider].append(taken)
    gc.enable()
    times = {}
    for provider, each in rounds.items():
        each.sort()
        times[provider] = each[0], each[0], each[2]
    return times


def time_of(provider, M, N, dtype, mode):
    """µs of a call of one line: least, least, and what three rounds reach."""
    times = times_of_all(M, N, dtype, mode)
    return times.get(provider, 3 * [float("nan")])


# %%

# Scaffold: whole calls, two benchmarks.

CALLED = [1024, 2048, 4096, 12288]
CALLS = lines(CALLED, torch.float16)
CALLS |= {"reduce-overhead": "reduce-overhead", "CUDA graph": "CUDA graph"}


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=CALLED,
        line_arg="provider",
        line_vals=[*CALLS],
        line_names=[*CALLS.values()],
        ylabel="µs",
        plot_name="layer-norm-every-call-forward",
        args={"M": 4096, "dtype": torch.float16, "mode": "forward"},
    )
)
def bench_call_forward(M, N, dtype, mode, provider):
    """Whole calls, until the device has finished, with L2 as they leave it: in
    each of 15 rounds all lines take turns, 15 times, with a batch of 10 calls
    each. The fastest batch of all, and what three rounds have reached."""
    return time_of(provider, M, N, dtype, mode)


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=CALLED,
        line_arg="provider",
        line_vals=[*CALLS],
        line_names=[*CALLS.values()],
        ylabel="µs",
        plot_name="layer-norm-every-call-forward-and-backward",
        args={
            "M": 4096,
            "dtype": torch.float16,
            "mode": "forward and backward",
        },
    )
)
def bench_call_both(M, N, dtype, mode, provider):
    """Whole calls, until the device has finished, with L2 as they leave it: in
    each of 15 rounds all lines take turns, 15 times, with a batch of 10 calls
    each. The fastest batch of all, and what three rounds have reached."""
    return time_of(provider, M, N, dtype, mode)


def report_calls(benchmark):
    """Draw a benchmark, and print each time in multiples of PyTorch's."""
    table = benchmark.run(show_plots=ON_GPU, return_df=True)
    table = table.astype({"N": int}).set_index("N")
    table.columns = [column.split(" (")[0] for column in table.columns]
    if table.isna().all(axis=None):
        print("Timing needs a GPU; the page shows recorded figures.")
        return
    multiples = table.div(table["PyTorch"], axis="index")
    print("time divided by that of PyTorch")
    print(multiples.to_string(float_format="%.2f"))


# %%

report_calls(bench_call_forward)

# %%

report_calls(bench_call_both)

# %%
# **What the figures show.**
# On the H200 a forward pass takes 1.5 times as long as PyTorch's at 1024
# columns, 1.1 times at 2048 and 0.7 times at 4096. Both passes take 1.4, 1.5
# and 1.3 times as long.
# At 12288 columns our call is the faster one: ours takes 57 µs forward and 191
# µs for both passes, and PyTorch 98 µs and 300 µs.
# At 1024 columns the graph of our two passes takes 17 µs, and our call 138 µs.
# There torch.compile takes 75 µs forward and 271 µs for both passes, and
# reduce-overhead 108 µs and 319 µs.
# At each of these widths a call of a library, of torch.compile or of
# reduce-overhead takes longer than ours.
#
# **Why.**
# Our forward call takes 23 to 25 µs at 1024 to 4096 columns, and PyTorch's 16,
# 21 and 35 µs. Ours is the time of the host, which hardly depends on the
# width. PyTorch's host needs less, but its kernels take longer, and at 4096
# columns its call waits for the device.
# At 1024 columns the device is done long before the host, and our host code is
# Python, where PyTorch's is C++. `What the user waits for
# <10-host-time.html>`_ measures the parts of a call one by one. The autograd
# function is the largest, since even one that does nothing takes most of
# PyTorch's time. Then come two tensors and a launch forward, and three tensors
# and two launches backward. Finding the plan is the smallest part.
# With reduce-overhead a call also looks for the right graph and copies its
# inputs, as that page explains, and one layer norm has too few launches for
# the graph to make up for it.
#
# **What follows.**
# Where matrices are small, faster kernels gain nothing, and our call loses. In
# a model the host is often ahead, because the GPU is still busy with large
# matrix products. Then only the time of the kernels counts.
# Where the host has no time, take a CUDA graph of the whole training step: it
# runs without Python, in the time of the device, and our function can be
# captured like PyTorch's.
#
# Any layout
# ----------
#
# What does the function do with tensors that are not a plain matrix?
#
# * **Dimensions.** ``normalized_shape`` is a number or a shape, and ``x`` ends
#   in it. Dimensions before it, of any number, are rows: a view of ``M * N``
#   numbers, without a copy.
# * **Strides.** Kernels take rows that follow each other in memory. A
#   transposed ``x``, every second element, columns of a wider matrix:
#   ``contiguous`` copies these first, and returns everything else as it is.
#   ``dy`` is often such a tensor: that of ``y.sum()`` is one number with
#   strides of 0.
# * **Addresses.** A view may begin anywhere, and ``contiguous`` does not move
#   it. That costs speed. Each launch looks at the addresses, because calls
#   that use the same plan may have different ones.
# * **None.** Without ``weight`` it counts as 1, without ``bias`` as 0, and the
#   kernel is compiled without them. Shared rows have ones and zeros instead.
# * **Empty.** No rows give an empty ``y`` and ``dx``, and ``dw`` and ``db`` of
#   zeros: the sum of nothing. A row of no columns is an error, for its mean
#   would be 0 / 0.
# * **Types.** ``weight`` and ``bias`` may have types of their own. ``y`` has
#   that of ``x``, gradients those of their inputs; sums are in float32, or
#   float64 for a float64 ``x``. Under ``torch.autocast`` PyTorch's ``y`` is in
#   float32, ours in the type of ``x``.

for x in (
    torch.randn(2, 3, 10, device=DEVICE),
    torch.randn(10, 3, device=DEVICE).T,
    torch.randn(3, 20, device=DEVICE)[:, ::2],
    torch.randn(31, device=DEVICE)[1:].view(3, 10),
    torch.randn(10, device=DEVICE).expand(3, 10),
    torch.randn(0, 10, device=DEVICE),
    torch.randn(3, 10, device=DEVICE, dtype=torch.float64),
):
    torch.testing.assert_close(layer_norm(x, 10), F.layer_norm(x, (10,)))
print("seven layouts are right")

# %%
# Into a model
# ------------
#
# ``swap`` changes the layers of a model that exists. Some have no bias, or no
# parameters at all, and ``eps`` may be any.

model = torch.nn.Sequential(
    torch.nn.Linear(8, 16),
    torch.nn.LayerNorm(16, eps=0.1),
    torch.nn.LayerNorm(16, elementwise_affine=False),
    torch.nn.LayerNorm((16,), bias=False),
).to(DEVICE)
torch.nn.init.uniform_(model[1].weight)
x = torch.randn(3, 8, device=DEVICE)
before = model(x)
names = [*model.state_dict()]
torch.testing.assert_close(swap(model)(x), before)
assert [*model.state_dict()] == names
print(model)

# %%
# Where PyTorch or a library is better
# ------------------------------------
#
# - **Small matrices.** A call of ours takes longer on the host than one of
#   PyTorch, as the last figures show. We aimed at no more than 1.5 times, from
#   1024 to 4096 columns, and the rest is Python.
# - **Some widths.** On the H200 flash-attn is 4% faster forward at 8192
#   columns, and no rival is faster backward.
# - **Wide odd rows.** Where programs share a row that begins anywhere, they
#   load 2 bytes at a time. At 12345 columns backward ours is still ahead of
#   all others, but far from a copy.
# - **Beside other kernels.** Programs that share a row start only when the GPU
#   has room for all of them, as `Programs that share a row
#   <08-shared-rows.html>`_ shows. A kernel that keeps a few SMs busy, as one
#   that sends gradients to other GPUs, makes them wait.
# - **New shapes.** A kernel is compiled for each width and type, and a plan is
#   made for each number of rows.
# - **Other GPUs.** The limits of the rule come from trials on an H100 and an
#   H200.
# - **More than two passes.** PyTorch has second derivatives, forward mode and
#   the transforms of ``torch.func``. Ours refuses them.
# - **Autocast.** Under ``torch.autocast`` PyTorch's result is in float32, and
#   ours has the type of ``x``.
# - **torch.compile can fuse** a layer norm with what comes before and after,
#   and ours is an operator to it.
#
# Exercise 1: from how much on is it faster?
# ------------------------------------------
#
# The host prepares a call while the device still works on the one before. So,
# in a series of calls, each takes as long as the slower of the two: the host,
# whose time is always the same, or the device, whose time grows with the
# matrix. Our host code takes longer than PyTorch's, and our kernels take less
# time. From how many MB on is our call the faster one?
#
# Complete ``break_even``, and the line at the end must print ``right: True``.
# As it is, the function adds up host and device, as if one waited for the
# other.
#
# **Hint 1.** Draw the time of both calls over the MB: each is a flat line, and
# from some point on a line that rises.
#
# **Hint 2.** Our flat line is the higher one. Which part of PyTorch's does it
# meet?
#
# **Hint 3.** What if our host is the faster one?


def time_of_call(host, mb_per_us, megabytes):
    """µs of a call in a row."""
    return max(host, megabytes / mb_per_us)


def break_even(our_host, their_host, ours, theirs):
    """MB from which our call takes less time than theirs; ours and theirs are
    the MB that kernels move in a µs."""
    more_host = our_host - their_host
    return max(more_host / (1 / theirs - 1 / ours), 0)  # to do


def exercise_1(break_even):
    """Print what it says of three pairs, and say whether it is right."""
    right = True
    for our_host, their_host, ours, theirs in (
        (24, 16, 2.4, 1.2),
        (60, 16, 2.0, 1.5),
        (12, 16, 2.4, 1.2),
    ):
        found = break_even(our_host, their_host, ours, theirs)
        print(f"ours is faster from {found:.0f} MB on")
        for megabytes in (found - 1, found + 1):
            our_time = time_of_call(our_host, ours, megabytes)
            their_time = time_of_call(their_host, theirs, megabytes)
            ours_is_faster = our_time < their_time
            if megabytes > 0 and ours_is_faster != (megabytes > found):
                right = False
    return right


print("right:", exercise_1(break_even))

# %%

# Solution 1


def break_even_1(our_host, their_host, ours, theirs):
    if our_host <= their_host:
        return 0
    # Their kernels take as long as our host.
    return our_host * theirs


assert exercise_1(break_even_1)

# %%
# What we learned
# ---------------
#
# For each kind of kernels on this page: how often it moves a matrix, and how
# fast it is on the H200.
#
# - **Chunks** move each matrix once: at 4096 columns they reach 90% of a copy
#   forward and 81% backward.
# - **Shifted** rows do, too: at 4097 columns they reach 84% and 77%.
# - **Two sweeps** read a row twice, forward from a cache while it lasts: at
#   65536 columns they reach 87%.
# - **Shared** rows move each matrix once, and numbers between programs: at
#   65536 columns they reach 84% backward, and at 262144 74% forward.
#
# And for a function that takes any input:
#
# - A rule of a few lines can pick among kernels, if each limit was measured on
#   both sides.
# - Find out once what is the same in all calls with the same shapes and types,
#   and keep it.
# - In a series of calls, each takes as long as the slower of host and device.
#   Measure both before you make either faster.
#
# **Next:** in a model an addition stands before each layer norm. `Add, then
# normalize <../fused/01-add-layer-norm.html>`_ does both in one kernel.
