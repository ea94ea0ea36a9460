"""Functions of the pages of Both Passes, with their kernels.

    layer_norm
    add_layer_norm
    dropout_add_layer_norm
    activation_layer_norm
    softmax, log_softmax
    tables, rotary_embedding, rotary_embedding_, rotate_query_and_key
    rms_norm, add_rms_norm
    attention
    linear
    swiglu, geglu, gated
    cross_entropy
    linear_cross_entropy

Both passes run in Triton. A name that several pages have begins with the word
of its page.

One kind of GPU a process. To try it without a GPU, set TRITON_INTERPRET=1.
"""

import ctypes
import dataclasses
import functools
import inspect

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import (
    TensorDescriptor as GluonDescriptor,
)
from triton.tools.tensor_descriptor import TensorDescriptor


# layer-norm/11-every-width ----------------------------------------------------
# Gives layer_norm.


ON_GPU = torch.cuda.is_available()


def every_width_pick(row, most):
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


EVERY_WIDTH_CUDA = ON_GPU and torch.version.hip is None
# Bytes. Without a GPU slices are narrow, so that small matrices have some.
EVERY_WIDTH_SLICE = 8192 if ON_GPU else 64
EVERY_WIDTH_WARP = 64 if torch.version.hip else 32  # threads
EVERY_WIDTH_GPU = None
EVERY_WIDTH_NUM_SMS = 4  # without a GPU
EVERY_WIDTH_EARLY = False  # whether a kernel can start before another one has ended


@functools.cache
def ask_the_gpu():
    """Called when the first plan is made: to import this asks no GPU."""
    global EVERY_WIDTH_GPU, EVERY_WIDTH_NUM_SMS, EVERY_WIDTH_EARLY
    if ON_GPU:
        EVERY_WIDTH_GPU = torch.cuda.get_device_properties()
        EVERY_WIDTH_NUM_SMS = EVERY_WIDTH_GPU.multi_processor_count
        EVERY_WIDTH_EARLY = EVERY_WIDTH_CUDA and torch.cuda.get_device_capability() >= (9, 0)


def every_width_can_share(dtype):
    """The most bytes of a row that programs can share."""
    if not EVERY_WIDTH_CUDA or dtype == torch.float64:
        return 0
    return 2 * EVERY_WIDTH_NUM_SMS * EVERY_WIDTH_SLICE


@triton.jit
def _every_width_chunk(c, left, N: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr):
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
def _every_width_load_chunks(
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
        row, col, mask = _every_width_chunk(c, left, N, ROWS, CHUNK)
        at = ptr + (row * stride + col)
        xs += (tl.load(at, mask=mask, other=0, eviction_policy=HINT),)
    return xs


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
    xs = _every_width_load_chunks(x_ptr + start, N, left, N, ROWS, CHUNK, HINT)

    # The mean: add up chunks lane by lane, and then the lanes of each row.
    total = tl.zeros((ROWS, CHUNK), acc)
    for c in tl.static_range(len(xs)):
        total += xs[c].to(acc)
    mean = tl.sum(total, axis=1)[:, None] / N

    # The variance, in the same way.
    total = tl.zeros((ROWS, CHUNK), acc)
    for c in tl.static_range(len(xs)):
        _, col, _ = _every_width_chunk(c, left, N, ROWS, CHUNK)
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
        row, col, mask = _every_width_chunk(c, left, N, ROWS, CHUNK)
        at = row * 0 + col  # of a whole tile: loads of 16 bytes
        y = (xs[c].to(acc) - mean) * rstd
        if w_ptr is not None:
            y *= tl.load(w_ptr + at, col < N, eviction_policy=KEEP).to(acc)
        if b_ptr is not None:
            y += tl.load(b_ptr + at, col < N, eviction_policy=KEEP).to(acc)
        tl.store(y_ptr + start + (row * N + col), y, mask=mask)


@triton.jit
def _add_two(a1, a2, b1, b2):
    return a1 + b1, a2 + b2


@triton.jit
def _every_width_means_of_chunks(xs, dys, ws, mean, rstd, N: tl.constexpr):
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
def _every_width_gradients(x, dy, w, mean, rstd, c1, c2):
    """dx of a chunk, and its terms of dw and db; w may be None."""
    d = x.to(mean.dtype) - mean
    dy = dy.to(mean.dtype)
    scaled = dy * rstd
    wdy = scaled
    if w is not None:
        wdy = scaled * w.to(mean.dtype)
    return wdy - (d * c1 + c2), scaled * d, dy


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
        ws = _every_width_load_chunks(w_ptr, 0, ROWS, N, ROWS, CHUNK, "evict_last")

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
        xs = _every_width_load_chunks(x_ptr + start, N, left, N, ROWS, CHUNK, "")
        dys = _every_width_load_chunks(dy_ptr + start, N, left, N, ROWS, CHUNK, "")

        # Both means need the whole row, so all chunks come first.
        c1, c2 = _every_width_means_of_chunks(xs, dys, ws, mean, rstd, N)

        # Then each chunk is done by itself. An element of a tuple cannot be
        # replaced, so the sums go into new tuples.
        new_dws = ()
        new_dbs = ()
        for c in tl.static_range(len(xs)):
            w = None
            if w_ptr is not None:
                w = ws[c]
            dx, dw, db = _every_width_gradients(xs[c], dys[c], w, mean, rstd, c1, c2)
            new_dws += (dws[c] + dw,)
            new_dbs += (dbs[c] + db,)
            if dx_ptr is not None:
                i, j, mask = _every_width_chunk(c, left, N, ROWS, CHUNK)
                tl.store(dx_ptr + start + (i * N + j), dx, mask=mask)
        dws = new_dws
        dbs = new_dbs

    # The second kernel may start now; the next section explains it.
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    if sums_ptr is not None:
        _store_sums_of_chunks(sums_ptr, dws, dbs, N)


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


def every_width_tile_of(N, itemsize, warps, loads=1):
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
    plan = every_width_tile_of(N, itemsize, warps, loads)
    plan["HINT"] = ""
    if row <= 6144:
        plan["HINT"] = "evict_first"
    # A limit of registers, so that two programs of 16 warps fit on an SM.
    if EVERY_WIDTH_CUDA and 40960 < row <= 49152:
        plan["maxnreg"] = 64
    return plan


def plan_bwd_chunks(N, itemsize, times=1):
    """The plan of a row; times: with other warps, to try the formula."""
    warps = 8
    if N * itemsize <= 2048:
        warps = 4
    warps = int(times * warps)
    plan = every_width_tile_of(N, itemsize, warps)
    chunks = triton.cdiv(N, plan["CHUNK"])
    # At most four tiles of 16 bytes a thread, unless one row alone has more,
    # and at most 8 rows.
    plan["ROWS"] = min(plan["ROWS"] * max(4 // chunks, 1), 8)
    # As many tiles ahead as fit into 96 KB of shared memory, but at most 3.
    tile = 2 * plan["ROWS"] * chunks * plan["CHUNK"] * itemsize
    plan["STAGES"] = 1 + min(98304 // tile, 3)
    return plan


@triton.jit
def _every_width_lanes(c, shift, N, CHUNK, STEP):
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
        _, inside, _ = _every_width_lanes(c, shift, N, CHUNK, STEP)
        x = tl.where(inside, x, 0)
    return x


@triton.jit
def _load_lanes(ptr, stride, first, M, shift, N, ROWS, CHUNK, STEP):
    """Rows first, first + STEP, ... of a matrix, as a tuple of chunks."""
    # M * stride may pass 2**31, so the first row has an offset of 64 bits.
    ptr += tl.cast(first, tl.int64) * stride // STEP * STEP
    row = tl.arange(0, ROWS)[:, None] * STEP
    xs = ()
    for c in tl.static_range((N + STEP + CHUNK - 2) // CHUNK):
        lane, _, _ = _every_width_lanes(c, shift, N, CHUNK, STEP)
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
    lane, inside, whole = _every_width_lanes(c, shift, N, CHUNK, STEP)
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


@triton.jit
def _load_vector(ptr, shift, N, ROWS, CHUNK, STEP):
    """w or b, with column j in lane j + shift; an empty tuple for None."""
    ws = ()
    if ptr is not None:
        for c in tl.static_range((N + STEP + CHUNK - 2) // CHUNK):
            lane, inside, _ = _every_width_lanes(c, shift, N, CHUNK, STEP)
            # Zeros for each row: the tile has the shape and the layout of x.
            at = ptr + (lane - shift + tl.zeros((ROWS, 1), tl.int32))
            ws += (tl.load(at, mask=inside, other=0),)
    return ws


@triton.jit
def _store_sums_shifted(ptr, dws, dbs, shift, N, STEP):
    """The sums of a program: dw first, then db."""
    ptr += tl.program_id(0) * 2 * N - shift
    for c in tl.static_range(len(dws)):
        lane, inside, _ = _every_width_lanes(c, shift, N, dws[0].shape[1], STEP)
        tl.store(ptr + lane, tl.sum(dws[c], axis=0)[None, :], mask=inside)
        tl.store(ptr + N + lane, tl.sum(dbs[c], axis=0)[None, :], mask=inside)


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
        c1, c2 = _every_width_means_of_chunks(xs, dys, ws, mean, rstd, N)
        new_dws = ()
        new_dbs = ()
        for c in tl.static_range(len(xs)):
            w = None
            if w_ptr is not None:
                w = ws[c]
            dx, dw, db = _every_width_gradients(xs[c], dys[c], w, mean, rstd, c1, c2)
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
    at_a_time = EVERY_WIDTH_NUM_SMS * warps_of_an_sm // plan["num_warps"]
    return step * min(max(at_a_time // step, 1), tiles)


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


def every_width_plan_sweeps(N, itemsize):
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
    return block, max(threads // EVERY_WIDTH_WARP, 1)


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


def plan_means(N, itemsize):
    """Lanes of a tile of the first kernel, and warps of a program."""
    block = min(8192 // itemsize, triton.next_power_of_2(N))
    tiles = triton.cdiv(N, block)
    if tiles == 3 or 5 <= tiles <= 8:
        return block, 8
    return block, 16


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


EVERY_WIDTH_EMPTY = 0x7F800001_7F800001


@triton.jit
def _every_width_publish(
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


@triton.jit
def _every_width_collect(
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
        _every_width_publish(words_ptr, first, s, mean, m2, SLICES, PTX)

        # The tile before: its first row, and the row where storing ends. In
        # the first turn nothing is stored.
        done = tl.maximum(first - step, start)
        end = tl.where(first > start, M, 0)

        # What all slices of its rows have published, and the statistics. All
        # programs of the group compute the same.
        means, m2s = _every_width_collect(words_ptr, done, ROWS, SLICES, PADDED, PTX)
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


def every_width_plan_shared(N, itemsize, forward):
    """Rows and lanes of a tile; programs on an SM, and warps of each."""
    row = N * itemsize
    if forward:
        if row <= 32 * EVERY_WIDTH_SLICE:
            return (2, 2 * EVERY_WIDTH_SLICE // itemsize), {"per_sm": 1, "warps": 8}
        if row <= 96 * EVERY_WIDTH_SLICE:
            return (2, EVERY_WIDTH_SLICE // itemsize), {"per_sm": 2, "warps": 8}
        return (1, 2 * EVERY_WIDTH_SLICE // itemsize), {"per_sm": 2, "warps": 4}

    # The backward pass comes further down.
    # A quarter of SLICE each, in three programs on an SM, if that is enough.
    if row <= min(16, 3 * EVERY_WIDTH_NUM_SMS // 4) * EVERY_WIDTH_SLICE:
        return (4, EVERY_WIDTH_SLICE // 4 // itemsize), {"per_sm": 3, "warps": 4}
    if row <= 128 * EVERY_WIDTH_SLICE:
        return (1, EVERY_WIDTH_SLICE // itemsize), {"per_sm": 2, "warps": 4}
    return (1, EVERY_WIDTH_SLICE // itemsize), {"per_sm": 2, "warps": 8}


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
        _every_width_publish(words_ptr, first, s, sum1, sum2, SLICES, PTX)

        # The tile before; in the first turn none of its rows is stored.
        done = tl.maximum(first - step, start)
        end = tl.where(first > start, M, 0)
        sum1, sum2 = _every_width_collect(words_ptr, done, ROWS, SLICES, PADDED, PTX)

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


def every_width_places(compiled):
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
    return per_sm.value * EVERY_WIDTH_NUM_SMS


def every_width_together(kernel, grid, per_sm, warps, **more):
    """A launch of programs that wait for each other, if the GPU has room for
    all of them at a time; it says whether it has."""
    more["num_warps"] = warps
    more["PTX"] = EVERY_WIDTH_CUDA
    if not EVERY_WIDTH_CUDA:
        launch = launcher(kernel, grid, **more)

        def twice(*tensors):
            """The interpreter's programs run one by one: after the first time
            all words are there."""
            launch(*tensors)
            return launch(*tensors)

        return twice

    def fits(compiled):
        return grid <= every_width_places(compiled)

    registers = 65536 // (32 * warps * per_sm)
    more["maxnreg"] = min(registers // 8 * 8, 255)  # a multiple of 8
    more["launch_cooperative_grid"] = True
    return launcher(kernel, grid, fits=fits, **more)


def every_width_cut(M, N, rows, lanes, per_sm):
    """Groups and programs, the shape of words, and tiles for a kernel."""
    programs = EVERY_WIDTH_NUM_SMS * per_sm
    least = triton.cdiv(N, lanes)
    groups = max(min(programs // least, triton.cdiv(M, rows)), 1)
    padded = triton.next_power_of_2(least)
    unit = min(lanes, 64)  # slices begin at a multiple of 128 bytes
    width = triton.cdiv(N, min(programs // groups, padded) * unit) * unit
    slices = triton.cdiv(N, width)
    tiles = {"ROWS": rows, "LANES": lanes, "WIDTH": width, "PADDED": padded}
    return groups, groups * slices, (M + (groups + 1) * rows, slices), tiles


def every_width_empty_words(shape, device):
    words = torch.empty(shape, dtype=torch.int64, device=device)
    return words.fill_(EVERY_WIDTH_EMPTY if EVERY_WIDTH_CUDA else 0)


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
    block, warps = every_width_plan_sweeps(N, itemsize)
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
    tile, how = every_width_plan_shared(N, itemsize, True)
    _, programs, shape, tiles = every_width_cut(M, N, *tile, how["per_sm"])
    launch = every_width_together(
        _layer_norm_fwd_shared, programs, M=M, eps=eps, N=N, **tiles, **how
    )
    otherwise = forward_sweeps(M, N, itemsize, eps)

    def run(x, w, b, y, stats):
        ones = x.new_ones(N) if w is None else w
        zeros = x.new_zeros(N) if b is None else b
        words = every_width_empty_words(shape, x.device)
        if not launch(x, ones, zeros, y, stats, words):
            otherwise(x, w, b, y, stats)

    return run


def backward_chunks(M, N, itemsize):
    # In these rows half the warps, and two programs on a multiprocessor: where
    # one waits for a sum over its rows, the other one works.
    per_sm = 1
    if 2048 < N * itemsize <= 6144:
        per_sm = 2
    plan = plan_bwd_chunks(N, itemsize, 1 / per_sm)
    P = min(EVERY_WIDTH_NUM_SMS * per_sm, triton.cdiv(M, plan["ROWS"]))
    return P, launcher(
        _layer_norm_bwd_chunks, P, M=M, N=N, EARLY=EVERY_WIDTH_EARLY, **plan
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
            EARLY=EVERY_WIDTH_EARLY,
            **plan_bwd_shifted(N, itemsize, step),
        )
    return P, launch


def backward_sweeps(M, N, itemsize, groups=None):
    block, warps = plan_means(N, itemsize)
    cols = min(4096 // itemsize, triton.next_power_of_2(N))
    slices = triton.cdiv(N, cols)
    rows = 2
    P = groups or max(min(2 * EVERY_WIDTH_NUM_SMS // slices, triton.cdiv(M, rows)), 1)
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


def backward_shared(M, N, itemsize):
    tile, how = every_width_plan_shared(N, itemsize, False)
    P, programs, shape, tiles = every_width_cut(M, N, *tile, how["per_sm"])
    launch = every_width_together(
        _layer_norm_bwd_shared, programs, M=M, N=N, **tiles, **how
    )
    _, otherwise = backward_sweeps(M, N, itemsize, groups=P)

    def run(dy, x, w, stats, dx, sums):
        ones = x.new_ones(N) if w is None else w
        # What nobody wants is computed all the same.
        all_dx = torch.empty_like(x) if dx is None else dx
        all_sums = stats.new_empty(P, 2, N) if sums is None else sums
        words = every_width_empty_words(shape, x.device)
        if not launch(dy, x, ones, stats, all_dx, words, all_sums):
            otherwise(dy, x, w, stats, dx, sums)

    return P, run


def every_width_add_up(P, N):
    """Tiles of 4096 sums, but as many programs as a GPU has places."""
    rows = triton.next_power_of_2(max(P, 1))
    few = triton.next_power_of_2(2 * N // 512)
    cols = max(min(4096 // rows, few), 16)
    more = {}
    if EVERY_WIDTH_EARLY:
        more["launch_pdl"] = True
    return launcher(
        _add_up_chunks,
        triton.cdiv(2 * N, cols),
        programs=P,
        WIDTH=2 * N,
        ROWS=rows,
        COLS=cols,
        EARLY=EVERY_WIDTH_EARLY,
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
        first, second = kernels or every_width_pick(N * x.itemsize, every_width_can_share(x.dtype))
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
            return launch, one.expand(P, 2, N), every_width_add_up(P, N)

        x_itemsize = x.itemsize  # and not x, which need not be kept
        self.backward = backward


def normalize(plan, x, w, b):
    """y, and mean and rstd of its rows, of contiguous tensors."""
    y = torch.empty_like(x)
    stats = torch.empty_like(plan.stats)
    plan.forward(x, w, b, y, stats)
    return y, stats


def every_width_gradients(plan, for_x, for_parameters, dy, x, w, stats):
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
    dx, grads = every_width_gradients(
        ctx.plan, for_x, for_w or for_b, dy, *ctx.saved_tensors
    )
    dw = None
    db = None
    if grads is not None:
        dw, db = grads.unbind()
    return dx, dw if for_w else None, db if for_b else None, None


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
        return every_width_operator_forward(x, weight, bias, shape, eps)[0]
    plan = plan_of(shape, x, weight, bias, eps, kernels)
    return APPLY(x, weight, bias, plan)


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
        every_width_check_arguments(x, torch.Size(shape), weight, bias, eps)
        if len(PLANS) >= 4096:
            PLANS.clear()
        plan = Plan(torch.Size(shape), x, weight, bias, eps, kernels)
        PLANS[kind] = plan
    return plan


def every_width_check_arguments(x, shape, weight, bias, eps):
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


MAYBE = torch.Tensor | None


@torch.library.custom_op("both_passes::every_width", mutates_args=())
def every_width_operator_forward(
    x: torch.Tensor, w: MAYBE, b: MAYBE, shape: list[int], eps: float
) -> list[torch.Tensor]:
    plan = plan_of(tuple(shape), x, w, b, eps)
    w = contiguous_or_none(w)
    b = contiguous_or_none(b)
    return list(normalize(plan, x.contiguous(), w, b))


@every_width_operator_forward.register_fake
def _(x, w, b, shape, eps):
    acc_dtype = torch.promote_types(x.dtype, torch.float32)
    M = x.numel() // torch.Size(shape).numel()
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    return [y, x.new_empty(statistics(M), dtype=acc_dtype)]


@torch.library.custom_op("both_passes::every_width_bwd", mutates_args=())
def every_width_operator_backward(
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
    return list(every_width_gradients(plan, True, True, dy, x.contiguous(), w, stats))


@every_width_operator_backward.register_fake
def _(dy, x, w, b, stats, shape, eps):
    dtype = dtype_of_gradients(w, b, stats.dtype)
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    return [dx, x.new_empty((2, *shape), dtype=dtype)]


def every_width_keep(ctx, inputs, output):
    x, w, b, shape, eps = inputs
    _, stats = output
    ctx.save_for_backward(x, w, b, stats)
    ctx.shape = shape
    ctx.eps = eps


def every_width_operator_gradients(ctx, results):
    x, w, b, stats = ctx.saved_tensors
    dx, grads = every_width_operator_backward(
        results[0], x, w, b, stats, ctx.shape, ctx.eps
    )
    dw = None
    if w is not None:
        dw = grads[0].to(w.dtype)
    db = None
    if b is not None:
        db = grads[1].to(b.dtype)
    return dx, dw, db, None, None


EVERY_WIDTH_BOUND = every_width_operator_forward.register_autograd(
    every_width_operator_gradients, setup_context=every_width_keep
)


# fused/01-add-layer-norm ------------------------------------------------------
# Gives add_layer_norm.


DEVICE = torch.device("cuda" if ON_GPU else "cpu")


@triton.jit
def _add_layer_norm_fwd(
    x_ptr,  # (M, N), contiguous
    r_ptr,  # New: (M, N), the residual; None if there is none
    w_ptr,  # (N,); None counts as 1
    b_ptr,  # (N,); None counts as 0
    y_ptr,  # (M, N)
    s_ptr,  # New: (M, N), the sum; None if there is no residual
    mean_ptr,  # (M,): saved for the backward pass
    rstd_ptr,  # (M,): 1 / standard deviation, saved as well
    eps: tl.constexpr,  # added to the variance
    N: tl.constexpr,  # columns
    BLOCK: tl.constexpr,  # lanes of a tile: a power of two, at least N
):
    acc: tl.constexpr = mean_ptr.dtype.element_ty  # float32, or float64

    # A program for each row. M * N may pass 2**31.
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    mask = cols < N
    at = row.to(tl.int64) * N + cols
    s = tl.load(x_ptr + at, mask=mask, other=0)

    # New: add, round to the type of the stream, and write the sum. It stays in
    # registers, too.
    if r_ptr is not None:
        r = tl.load(r_ptr + at, mask=mask, other=0)
        s = (s.to(acc) + r.to(acc)).to(r.dtype)
        tl.store(s_ptr + at, s, mask=mask)

    # The mean. Idle lanes hold 0, which changes no sum.
    mean = tl.sum(s.to(acc)) / N

    # The variance. Here an idle lane would add the square of the mean.
    d = tl.where(mask, s.to(acc) - mean, 0)
    rstd = 1 / tl.sqrt(tl.sum(d * d) / N + eps)
    tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)

    # Normalize. All programs read w and b, so caches should keep them.
    y = (s.to(acc) - mean) * rstd
    if w_ptr is not None:
        w = tl.load(w_ptr + cols, mask=mask, eviction_policy="evict_last")
        y *= w.to(acc)
    if b_ptr is not None:
        b = tl.load(b_ptr + cols, mask=mask, eviction_policy="evict_last")
        y += b.to(acc)
    tl.store(y_ptr + at, y, mask=mask)


STREAM_CUDA = ON_GPU and torch.version.hip is None


def stream_plan_forward(N, itemsize):
    """Lanes of the tile of a row, and warps of a program."""
    block = triton.next_power_of_2(N)
    warps = min(max(block * itemsize // 2048, 1), 16)
    plan = {"BLOCK": block, "num_warps": warps}
    if STREAM_CUDA and warps == 16:
        plan["maxnreg"] = 64
    return plan


def stream_forward(x, r, w, b, eps):
    """y, s, mean and rstd of contiguous matrices.

    r, w and b may be None. Without r there is no s, which is None.
    """
    M, N = x.shape
    y = torch.empty_like(x)
    s = None
    widest = x
    if r is not None:
        s = torch.empty_like(r)
        widest = r  # the residual has the type of x, or a wider one
    # 16-bit rows are summed in float32.
    acc_dtype = torch.promote_types(widest.dtype, torch.float32)
    mean = torch.empty(M, dtype=acc_dtype, device=x.device)
    rstd = torch.empty(M, dtype=acc_dtype, device=x.device)
    _add_layer_norm_fwd[(M,)](
        x_ptr=x,
        r_ptr=r,
        w_ptr=w,
        b_ptr=b,
        y_ptr=y,
        s_ptr=s,
        mean_ptr=mean,
        rstd_ptr=rstd,
        eps=eps,
        N=N,
        **stream_plan_forward(N, widest.itemsize),
    )
    return y, s, mean, rstd


@triton.jit
def _stream_chunk(c, left, N: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr):
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
def _stream_load_chunks(
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
        row, col, mask = _stream_chunk(c, left, N, ROWS, CHUNK)
        at = ptr + (row * stride + col)
        xs += (tl.load(at, mask=mask, other=0, eviction_policy=HINT),)
    return xs


@triton.jit
def _stream_means_of_chunks(xs, dys, ws, mean, rstd, N: tl.constexpr):
    """c1 * rstd**2 and c2 * rstd for each row of a tile."""
    sum1 = tl.zeros(xs[0].shape, mean.dtype)
    sum2 = tl.zeros(xs[0].shape, mean.dtype)
    for c in tl.static_range(len(xs)):
        # Lanes that hold no column have dy = 0, so they add 0 to both sums.
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
def _stream_gradients(x, dy, w, mean, rstd, c1, c2):
    """dx of a chunk, and its terms of dw and db; w may be None."""
    d = x.to(mean.dtype) - mean
    dy = dy.to(mean.dtype)
    scaled = dy * rstd
    wdy = scaled  # r * g
    if w is not None:
        wdy = scaled * w.to(mean.dtype)
    return wdy - (d * c1 + c2), scaled * d, dy


STREAM_PTX = tl.constexpr(STREAM_CUDA)


@triton.jit
def _forget(
    x,  # what will be converted once more
    zero,  # a number that is 0, but the compiler cannot assume that
):
    """x, but the compiler does not know that it is x."""
    if STREAM_PTX and x.dtype.primitive_bitwidth == 16:
        x = tl.inline_asm_elementwise(
            "xor.b32 $0, $1, $2;",
            "=r,r,r",
            [x, zero.to(tl.int16)],
            dtype=x.dtype,
            is_pure=True,
            pack=2,
        )
    return x


@triton.jit
def _add_layer_norm_bwd(
    dy_ptr,  # (M, N), contiguous
    ds_ptr,  # New: (M, N), contiguous; None if nothing arrives from the stream
    s_ptr,  # (M, N), contiguous
    w_ptr,  # (N,); None counts as 1
    mean_ptr,  # (M,), from the forward pass
    rstd_ptr,  # (M,), from the forward pass
    dx_ptr,  # (M, N), for both inputs; None if not wanted
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
        ws = _stream_load_chunks(w_ptr, 0, ROWS, N, ROWS, CHUNK, "evict_last")

    # The sums for dw and db, of each lane.
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
        disable_licm=True,  # w is not converted before the loop
    ):
        # Load ROWS rows of s and of dy, and what the forward pass saved.
        row = first + tl.arange(0, ROWS)[:, None]
        left = M - first
        mean = tl.load(mean_ptr + row, mask=row < M, other=0)
        rstd = tl.load(rstd_ptr + row, mask=row < M, other=0)
        start = tl.cast(first, tl.int64) * N  # M * N may pass 2**31
        ss = _stream_load_chunks(s_ptr + start, N, left, N, ROWS, CHUNK, "")
        dys = _stream_load_chunks(dy_ptr + start, N, left, N, ROWS, CHUNK, "")

        # Both means need the whole row, so all chunks come first.
        c1, c2 = _stream_means_of_chunks(ss, dys, ws, mean, rstd, N)

        # Then each chunk is done by itself.
        zero = c1 != c1
        new_dws = ()
        new_dbs = ()
        for c in tl.static_range(len(ss)):
            s = ss[c]
            dy = dys[c]
            w = None
            if w_ptr is not None:
                w = ws[c]
            # New: convert again, where a row takes most of the registers.
            if len(ss) > 4:
                s = _forget(s, zero)
                dy = _forget(dy, zero)
                if w_ptr is not None:
                    w = _forget(w, zero)
            dx, dw, db = _stream_gradients(s, dy, w, mean, rstd, c1, c2)
            new_dws += (dws[c] + dw,)
            new_dbs += (dbs[c] + db,)
            if dx_ptr is not None:
                i, j, mask = _stream_chunk(c, left, N, ROWS, CHUNK)
                at = start + (i * N + j)
                # New: add what arrives from the stream.
                if ds_ptr is not None:
                    ds = tl.load(ds_ptr + at, mask=mask, other=0)
                    dx += ds.to(dx.dtype)
                tl.store(dx_ptr + at, dx, mask=mask)
        dws = new_dws
        dbs = new_dbs

    # The kernel that adds up the sums of all programs may start now.
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    if sums_ptr is not None:
        _store_sums_of_chunks(sums_ptr, dws, dbs, N)


STREAM_GPU = torch.cuda.get_device_properties(DEVICE) if ON_GPU else None
STREAM_NUM_SMS = STREAM_GPU.multi_processor_count if ON_GPU else 4
STREAM_EARLY = STREAM_CUDA and torch.cuda.get_device_capability() >= (9, 0)


def stream_add_up(sums, grads, early=STREAM_EARLY):
    """Fill grads, dw and db as (2, N), from (programs, 2, N) sums."""
    programs, _, N = sums.shape
    options = {}
    if early:
        options["launch_pdl"] = True
    columns_per_program = 16
    _add_up_chunks[(triton.cdiv(2 * N, columns_per_program),)](
        sums_ptr=sums,
        grads_ptr=grads,
        programs=programs,
        WIDTH=2 * N,
        ROWS=triton.next_power_of_2(max(programs, 1)),
        COLS=columns_per_program,
        EARLY=early,
        **options,
    )


# Bytes of shared memory that a program may have.
STREAM_SHARED = getattr(STREAM_GPU, "shared_memory_per_block_optin", 65536)


def stream_plan_backward(N, itemsize):
    """Tile, warps and stages; per_sm: programs that share an SM."""
    row = N * itemsize
    warps = 8
    most_ahead = 2
    if row <= 8192:
        warps = 4
        most_ahead = 3
    per_sm = 1
    if row <= 4096:
        per_sm = 2

    # A thread loads 16 bytes, a warp 512. Narrow rows share a tile, for which
    # each thread makes two loads.
    lanes = 512 // itemsize * warps
    chunk = min(lanes, triton.next_power_of_2(N))
    rows = 1
    if row <= 2048:
        rows = min(2 * lanes // chunk, 8)

    tile = 3 * rows * triton.cdiv(N, chunk) * chunk * itemsize  # bytes
    ahead = min((STREAM_SHARED // per_sm - 8192) // tile, most_ahead)
    return {
        "ROWS": rows,
        "CHUNK": chunk,
        "STAGES": 1 + ahead,
        "num_warps": warps,
        "per_sm": per_sm,
    }


def stream_backward(dy, ds, s, w, mean, rstd, dx, grads):
    """Fill dx and grads, which are dw and db; either may be None."""
    M, N = s.shape
    plan = stream_plan_backward(N, max(s.itemsize, dy.itemsize))
    per_sm = plan.pop("per_sm")
    programs = min(STREAM_NUM_SMS * per_sm, triton.cdiv(M, plan["ROWS"]))
    sums = None
    if grads is not None:
        shape = (programs, 2, N)
        sums = torch.empty(shape, dtype=mean.dtype, device=s.device)
    _add_layer_norm_bwd[(programs,)](
        dy_ptr=dy,
        ds_ptr=ds,
        s_ptr=s,
        w_ptr=w,
        mean_ptr=mean,
        rstd_ptr=rstd,
        dx_ptr=dx,
        sums_ptr=sums,
        M=M,
        N=N,
        EARLY=STREAM_EARLY,
        **plan,
    )
    if grads is not None:
        stream_add_up(sums, grads)


def rows_or_none(tensor, N):
    """The tensor as a matrix of rows of N columns; copied only if needed."""
    if tensor is None:
        return None
    return tensor.reshape(-1, N).contiguous()


class AddLayerNorm(torch.autograd.Function):
    """y and s over rows of N columns; without a residual s is None."""

    @staticmethod
    def forward(ctx, x, residual, w, b, N, eps):
        ctx.set_materialize_grads(False)
        ctx.shape = x.shape
        x = rows_or_none(x, N)
        residual = rows_or_none(residual, N)
        w = contiguous_or_none(w)
        b = contiguous_or_none(b)
        y, s, mean, rstd = stream_forward(x, residual, w, b, eps)
        if s is None:
            ctx.save_for_backward(x, w, mean, rstd)
        else:
            ctx.save_for_backward(s, w, mean, rstd)
            s = s.reshape(ctx.shape)
        # dw and db have the type of w and b, if these agree. If not, PyTorch
        # rounds each to its type.
        dtypes = {tensor.dtype for tensor in (w, b) if tensor is not None}
        ctx.grads_dtype = mean.dtype
        if len(dtypes) == 1:
            ctx.grads_dtype = dtypes.pop()
        return y.reshape(ctx.shape), s

    @staticmethod
    @torch.autograd.function.once_differentiable  # no second derivatives
    def backward(ctx, dy, ds):
        s, w, mean, rstd = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:4]
        wants_dx, wants_dresidual, wants_dw, wants_db = wanted
        N = s.shape[1]
        if dy is None:
            dy = torch.zeros_like(s)
        dx = None
        if wants_dx or wants_dresidual:
            dx = torch.empty(ctx.shape, dtype=s.dtype, device=s.device)
        grads = None
        if wants_dw or wants_db:
            grads = torch.empty(2, N, dtype=ctx.grads_dtype, device=s.device)
        dy = rows_or_none(dy, N)
        ds = rows_or_none(ds, N)
        stream_backward(dy, ds, s, w, mean, rstd, dx, grads)
        dw = None
        db = None
        if wants_dw:
            dw = grads[0]
        if wants_db:
            db = grads[1]
        dresidual = None
        if wants_dresidual:
            dresidual = dx
        if not wants_dx:
            dx = None
        return dx, dresidual, dw, db, None, None


STREAM_WARP = 64 if torch.version.hip else 32  # threads


def stream_plan_sweeps(N, itemsize):
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
    return block, max(threads // STREAM_WARP, 1)


def means_of_rows(dy, x, w, mean, rstd, warps=None):
    """c1 and c2 of each row, as a (2, M) tensor; warps: not by the rule."""
    M, N = x.shape
    c = torch.empty(2, M, dtype=mean.dtype, device=x.device)
    block, warps_by_rule = plan_means(N, x.itemsize)
    if warps is None:
        warps = warps_by_rule
    _layer_norm_bwd_means[(M,)](
        dy_ptr=dy,
        x_ptr=x,
        w_ptr=w,
        mean_ptr=mean,
        rstd_ptr=rstd,
        c_ptr=c,
        M=M,
        N=N,
        BLOCK=block,
        num_warps=warps,
    )
    return c


def backward_in_sweeps(dy, x, w, mean, rstd, wanted):
    """dx, dw and db for (M, N) matrices; None where not wanted."""
    wants_dx, wants_dw, wants_db = wanted
    M, N = x.shape
    dx = None
    c = None
    if wants_dx:
        dx = torch.empty_like(x)
        c = means_of_rows(dy, x, w, mean, rstd)

    # As many groups as fill two programs on each SM; at least one.
    rows = 2
    cols = min(4096 // x.itemsize, triton.next_power_of_2(N))
    slices = triton.cdiv(N, cols)
    groups = min(2 * STREAM_NUM_SMS // slices, triton.cdiv(M, rows))
    groups = max(groups, 1)
    sums = None
    if wants_dw or wants_db:
        shape = (groups, 2, N)
        sums = torch.empty(shape, dtype=mean.dtype, device=x.device)
    _layer_norm_bwd_slices[(slices * groups,)](
        dy_ptr=dy,
        x_ptr=x,
        w_ptr=w,
        mean_ptr=mean,
        rstd_ptr=rstd,
        c_ptr=c,
        dx_ptr=dx,
        sums_ptr=sums,
        M=M,
        N=N,
        ROWS=rows,
        COLS=cols,
        num_warps=8,
    )

    dw = None
    db = None
    if sums is not None:
        both = sums.sum(dim=0)
        if wants_dw:
            dw = both[0]
        if wants_db:
            db = both[1]
    return dx, dw, db


class Streamed(torch.autograd.Function):
    """The layer norm of s in the type of dtype; dx has that of s."""

    @staticmethod
    def forward(ctx, s, w, b, eps, dtype):
        s = contiguous_or_none(s)
        w = contiguous_or_none(w)
        b = contiguous_or_none(b)
        M, N = s.shape
        y = torch.empty_like(s, dtype=dtype)
        acc_dtype = torch.promote_types(s.dtype, torch.float32)
        mean = torch.empty(M, dtype=acc_dtype, device=s.device)
        rstd = torch.empty(M, dtype=acc_dtype, device=s.device)
        block, warps = stream_plan_sweeps(N, s.itemsize)
        _layer_norm_fwd_sweeps[(M,)](
            x_ptr=s,
            w_ptr=w,
            b_ptr=b,
            y_ptr=y,
            mean_ptr=mean,
            rstd_ptr=rstd,
            eps=eps,
            N=N,
            BLOCK=block,
            CACHES=True,
            num_warps=warps,
        )
        ctx.save_for_backward(s, w, mean, rstd)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable  # no second derivatives
    def backward(ctx, dy):
        s, w, mean, rstd = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:3]
        dy = dy.contiguous()
        dx, dw, db = backward_in_sweeps(dy, s, w, mean, rstd, wanted)
        return dx, dw, db, None, None


WIDEST_ROW = 28672  # bytes that one kernel takes: 14336 columns of 16 bits


def stream_check_arguments(x, residual, shape, weight, bias, eps):
    """Raise an error that names the wrong argument, and says why."""
    tensors = {"x": x, "residual": residual, "weight": weight, "bias": bias}
    tensors = {name: t for name, t in tensors.items() if t is not None}

    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or tensor.itemsize == 1:
            raise TypeError(
                f"{name} is {tensor.dtype}: it must have floats of 16 bits or "
                "more"
            )
        if tensor.device != x.device or tensor.device.type != DEVICE.type:
            raise ValueError(
                f"{name} is on {tensor.device}: x, residual, weight and bias "
                f"must all be on {DEVICE}"
            )
    # Triton starts a kernel on the current GPU, wherever its tensors are.
    if x.is_cuda and x.device.index != torch.cuda.current_device():
        raise ValueError(f"x is on {x.device}: not the current one")

    if shape.numel() == 0 or len(shape) == 0:
        raise ValueError(
            f"x has nothing to normalize: normalized_shape is {tuple(shape)}"
        )
    for name, tensor in tensors.items():
        last_dimensions = tensor.shape
        if name in ("x", "residual"):
            last_dimensions = tensor.shape[-len(shape) :]
        if last_dimensions != shape:
            raise ValueError(
                f"the shape of {name} is {tuple(tensor.shape)}, and "
                f"normalized_shape is {tuple(shape)}"
            )
    if residual is not None and residual.shape != x.shape:
        raise ValueError(
            f"the shape of residual is {tuple(residual.shape)}, and that of x "
            f"is {tuple(x.shape)}"
        )
    if residual is not None:
        widest = torch.promote_types(x.dtype, residual.dtype)
        if residual.dtype != widest:
            raise TypeError(
                f"residual is {residual.dtype}, which does not hold every "
                f"number of x, which is {x.dtype}"
            )
    if not eps >= 0:  # negative, or NaN
        raise ValueError(f"eps is {eps}: it must be 0 or more")
    if shape.numel() > 2**30:
        raise ValueError(
            f"normalized_shape has {shape.numel()} columns: at most {2**30} "
            "are possible"
        )


def add_layer_norm(
    x, residual, normalized_shape, weight=None, bias=None, eps=1e-5
):
    """(y, s): s = x + residual, and y is the layer norm of s.

    normalized_shape, a number or a shape, gives the last dimensions of x.
    Without a residual, which may be None, s is x. weight and bias have
    normalized_shape, or are None.
    """
    if isinstance(normalized_shape, int):
        normalized_shape = [normalized_shape]
    shape = torch.Size(normalized_shape)
    stream_check_arguments(x, residual, shape, weight, bias, eps)

    N = shape.numel()
    if weight is not None:
        weight = weight.reshape(N)
    if bias is not None:
        bias = bias.reshape(N)

    widest = x
    if residual is not None:
        widest = residual
    if N * widest.itemsize > WIDEST_ROW:  # two steps
        s = x
        if residual is not None:
            s = x + residual
        y = Streamed.apply(s.reshape(-1, N), weight, bias, eps, x.dtype)
        return y.reshape(x.shape), s

    y, s = AddLayerNorm.apply(x, residual, weight, bias, N, eps)
    if s is None:
        s = x
    return y, s


# fused/02-dropout -------------------------------------------------------------
# Gives dropout_add_layer_norm.


@triton.jit
def _dropout(
    x,  # (rows, columns): chunk c of some rows
    seed,
    row,  # (rows, 1): which rows these are in the matrix
    c,  # which chunk of a row this is
    DROP: tl.constexpr,  # p * 2**32
    FOUR: tl.constexpr = True,  # whether four neighbors share a call
):
    """x, dropped or scaled. A gradient takes the same way back."""
    if DROP == 0:
        return x
    elif DROP == 2**32:
        return tl.zeros_like(x)
    else:
        SHARE: tl.constexpr = 4 if FOUR else 1
        GROUPS: tl.constexpr = x.shape[1] // SHARE
        # The counter: which group of the row, and which row. Both are made
        # tiles of (rows, groups).
        group = c * GROUPS + tl.arange(0, GROUPS)[None, :] + row * 0
        a, b, c, d = tl.philox(seed, group, row + group * 0, 0, 0)
        word = a
        if FOUR:
            # join makes pairs in a new last dimension. Twice makes (rows,
            # groups, 2, 2), and the last dimension comes from the outer join:
            # a and b first, then c and d. Then all columns are in order.
            word = tl.join(tl.join(a, c), tl.join(b, d))
            word = tl.reshape(word, x.shape)
        scale: tl.constexpr = 2**32 / (2**32 - DROP)  # 1 / (1 - p)
        return tl.where(word >= DROP, x * scale, 0)


@triton.jit(do_not_specialize=["seed"])
def _dropout_add_layer_norm_fwd(
    x_ptr,  # (M, N), contiguous
    r_ptr,  # (M, N): the residual
    w_ptr,  # (N,); None counts as 1
    b_ptr,  # (N,); None counts as 0
    y_ptr,  # (M, N)
    s_ptr,  # (M, N): the sum, which goes on as the stream
    mean_ptr,  # (M,): saved for the backward pass
    rstd_ptr,  # (M,): 1 / standard deviation, saved as well
    seed,  # New
    eps: tl.constexpr,  # added to the variance
    N: tl.constexpr,  # columns
    BLOCK: tl.constexpr,  # lanes of the tile: a power of two
    DROP: tl.constexpr,  # New: p * 2**32
):
    acc: tl.constexpr = mean_ptr.dtype.element_ty  # float32, or float64
    row = tl.program_id(0) + tl.zeros((1, 1), tl.int32)
    cols = tl.arange(0, BLOCK)[None, :]
    mask = cols < N
    at = row.to(tl.int64) * N + cols  # M * N may pass 2**31
    x = tl.load(x_ptr + at, mask=mask, other=0)
    r = tl.load(r_ptr + at, mask=mask, other=0)

    # New: x is dropped. The whole row is chunk 0.
    s = _dropout(x.to(acc), seed, row, 0, DROP) + r.to(acc)
    # Rounded to the type of the stream first, so that y belongs to the s that
    # others read.
    s = s.to(r.dtype)
    tl.store(s_ptr + at, s, mask=mask)

    # The layer norm of s, as before.
    mean = tl.sum(s.to(acc), axis=1)[:, None] / N
    d = tl.where(mask, s.to(acc) - mean, 0)  # idle lanes: 0
    rstd = 1 / tl.sqrt(tl.sum(d * d, axis=1)[:, None] / N + eps)
    tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)
    y = (s.to(acc) - mean) * rstd
    # All programs read w and b, so caches keep them.
    if w_ptr is not None:
        w = tl.load(w_ptr + cols, mask=mask, eviction_policy="evict_last")
        y *= w.to(acc)
    if b_ptr is not None:
        b = tl.load(b_ptr + cols, mask=mask, eviction_policy="evict_last")
        y += b.to(acc)
    tl.store(y_ptr + at, y, mask=mask)


# The interpreter has no limit of registers.
DROPOUT_CUDA = ON_GPU and torch.version.hip is None


def dropout_plan_forward(N, itemsize):
    """Lanes and warps of a program."""
    block = max(triton.next_power_of_2(N), 16)
    warps = min(max(block * itemsize // 2048, 1), 16)
    plan = {"BLOCK": block, "num_warps": warps}
    if DROPOUT_CUDA and warps == 16:
        plan["maxnreg"] = 64
    return plan


def dropout_forward(x, r, w, b, eps, p, seed):
    """y, s, mean and rstd of contiguous matrices; w and b may be None."""
    M, N = x.shape
    y = torch.empty_like(x)
    s = torch.empty_like(r)
    # 16-bit rows are summed in float32.
    acc = torch.promote_types(r.dtype, torch.float32)
    mean = torch.empty(M, dtype=acc, device=x.device)
    rstd = torch.empty(M, dtype=acc, device=x.device)
    _dropout_add_layer_norm_fwd[(M,)](
        x_ptr=x,
        r_ptr=r,
        w_ptr=w,
        b_ptr=b,
        y_ptr=y,
        s_ptr=s,
        mean_ptr=mean,
        rstd_ptr=rstd,
        seed=seed,
        eps=eps,
        N=N,
        DROP=round(p * 2**32),
        **dropout_plan_forward(N, r.itemsize),
    )
    return y, s, mean, rstd


@triton.jit
def _dropout_chunk(c, left, N: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr):
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
def _dropout_load_chunks(
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
        row, col, mask = _dropout_chunk(c, left, N, ROWS, CHUNK)
        at = ptr + (row * stride + col)
        xs += (tl.load(at, mask=mask, other=0, eviction_policy=HINT),)
    return xs


@triton.jit
def _dropout_means_of_chunks(xs, dys, ws, mean, rstd, N: tl.constexpr):
    """c1 * rstd**2 and c2 * rstd for each row of a tile."""
    sum1 = tl.zeros(xs[0].shape, mean.dtype)
    sum2 = tl.zeros(xs[0].shape, mean.dtype)
    for c in tl.static_range(len(xs)):
        # Lanes that hold no column have dy = 0, so they add 0 to both sums.
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
def _dropout_gradients(x, dy, w, mean, rstd, c1, c2):
    """dx of a chunk, and its terms of dw and db; w may be None."""
    d = x.to(mean.dtype) - mean
    dy = dy.to(mean.dtype)
    scaled = dy * rstd
    wdy = scaled  # r * g
    if w is not None:
        wdy = scaled * w.to(mean.dtype)
    return wdy - (d * c1 + c2), scaled * d, dy


@triton.jit(do_not_specialize=["seed"])
def _dropout_add_layer_norm_bwd(
    dy_ptr,  # (M, N), contiguous
    ds_ptr,  # (M, N): the gradient that comes along the stream, or None
    s_ptr,  # (M, N), from the forward pass
    w_ptr,  # (N,); None counts as 1
    mean_ptr,  # (M,), from the forward pass
    rstd_ptr,  # (M,), from the forward pass
    dr_ptr,  # (M, N): the gradient of the residual
    dx_ptr,  # (M, N), or None: without dropout it is that of the residual
    sums_ptr,  # (programs, 2, N): sums for dw, and for db
    seed,  # New: that of the forward pass
    M,  # rows
    N: tl.constexpr,  # columns
    ROWS: tl.constexpr,  # rows of a tile
    CHUNK: tl.constexpr,  # lanes of a chunk in each row
    STAGES: tl.constexpr,  # how far ahead rows are requested
    DROP: tl.constexpr,  # New: p * 2**32
):
    acc: tl.constexpr = mean_ptr.dtype.element_ty

    # w stays in registers for all rows, in its own type.
    ws = ()
    if w_ptr is not None:
        ws = _dropout_load_chunks(w_ptr, 0, ROWS, N, ROWS, CHUNK, "evict_last")

    # The sums for dw and db, of each lane.
    zeros = tl.zeros((ROWS, CHUNK), acc)
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
        # Keep w in its own type: in float32 it takes twice the registers.
        disable_licm=True,
    ):
        # Load ROWS rows of s and of dy, and what the forward pass saved.
        row = first + tl.arange(0, ROWS)[:, None]
        left = M - first
        mean = tl.load(mean_ptr + row, mask=row < M, other=0)
        rstd = tl.load(rstd_ptr + row, mask=row < M, other=0)
        start = tl.cast(first, tl.int64) * N  # M * N may pass 2**31
        xs = _dropout_load_chunks(s_ptr + start, N, left, N, ROWS, CHUNK, "")
        dys = _dropout_load_chunks(dy_ptr + start, N, left, N, ROWS, CHUNK, "")

        # Both means need the whole row, so all chunks come first.
        c1, c2 = _dropout_means_of_chunks(xs, dys, ws, mean, rstd, N)

        new_dws = ()
        new_dbs = ()
        for c in tl.static_range(len(xs)):
            w = None
            if w_ptr is not None:
                w = ws[c]
            g, dw, db = _dropout_gradients(xs[c], dys[c], w, mean, rstd, c1, c2)
            new_dws += (dws[c] + dw,)
            new_dbs += (dbs[c] + db,)
            # The gradient of the stream is added to that of the norm.
            i, j, mask = _dropout_chunk(c, left, N, ROWS, CHUNK)
            at = start + (i * N + j)
            if ds_ptr is not None:
                g += tl.load(ds_ptr + at, mask=mask, other=0).to(acc)
            tl.store(dr_ptr + at, g, mask=mask)
            # New: x gets what the forward pass did not drop.
            if dx_ptr is not None:
                dx = _dropout(g, seed, row, c, DROP)
                tl.store(dx_ptr + at, dx, mask=mask)
        dws = new_dws
        dbs = new_dbs

    _store_sums_of_chunks(sums_ptr, dws, dbs, N)


@triton.jit
def _dropout_add_up(
    sums_ptr,  # (programs, WIDTH)
    grads_ptr,  # (WIDTH,): dw, then db
    programs,  # how many rows of sums there are
    WIDTH: tl.constexpr,  # 2 * N
    ROWS: tl.constexpr,  # a power of two, more than programs
    COLS: tl.constexpr,  # columns per program
):
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    rows = tl.arange(0, ROWS)[:, None]
    mask = (rows < programs) & (cols < WIDTH)
    sums = tl.load(sums_ptr + rows * WIDTH + cols, mask=mask, other=0)
    tl.store(grads_ptr + cols, tl.sum(sums, axis=0), mask=cols < WIDTH)


DROPOUT_GPU = torch.cuda.get_device_properties(DEVICE) if ON_GPU else None
DROPOUT_NUM_SMS = DROPOUT_GPU.multi_processor_count if ON_GPU else 4
DROPOUT_SHARED = getattr(DROPOUT_GPU, "shared_memory_per_block_optin", 65536)


def programs_of_an_sm(N, itemsize):
    if N * itemsize <= 4096:
        return 2
    return 1


def dropout_plan_backward(N, itemsize):
    """The plan of a row."""
    row = N * itemsize
    warps = 4
    most_ahead = 3
    if row > 4096:
        warps = 8
        most_ahead = 2
    chunk = min(512 // itemsize * warps, max(triton.next_power_of_2(N), 16))
    rows = 1
    if row <= 2048:
        rows = min(1024 // itemsize * warps // chunk, 8)
    # Three matrices of a tile, of which as many are ahead as fit.
    tile = 3 * rows * triton.cdiv(N, chunk) * chunk * itemsize
    room = DROPOUT_SHARED // programs_of_an_sm(N, itemsize) - 8192
    return {
        "ROWS": rows,
        "CHUNK": chunk,
        "STAGES": 1 + min(room // tile, most_ahead),
        "num_warps": warps,
    }


def dropout_backward(dy, ds, s, w, mean, rstd, dr, dx, grads, p, seed):
    """Fill dr, grads, which are dw and db, and dx unless it is None."""
    M, N = s.shape
    itemsize = max(s.itemsize, dy.itemsize)
    plan = dropout_plan_backward(N, itemsize)
    programs = min(
        DROPOUT_NUM_SMS * programs_of_an_sm(N, itemsize),
        triton.cdiv(M, plan["ROWS"]),
    )
    sums = torch.empty(programs, 2, N, dtype=mean.dtype, device=s.device)
    _dropout_add_layer_norm_bwd[(programs,)](
        dy_ptr=dy,
        ds_ptr=ds,
        s_ptr=s,
        w_ptr=w,
        mean_ptr=mean,
        rstd_ptr=rstd,
        dr_ptr=dr,
        dx_ptr=dx,
        sums_ptr=sums,
        seed=seed,
        M=M,
        N=N,
        DROP=round(p * 2**32),
        **plan,
    )
    columns_per_program = 16
    _dropout_add_up[(triton.cdiv(2 * N, columns_per_program),)](
        sums_ptr=sums,
        grads_ptr=grads,
        programs=programs,
        WIDTH=2 * N,
        ROWS=triton.next_power_of_2(programs + 1),
        COLS=columns_per_program,
    )


class DropoutAddLayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, r, w, b, eps, p, seed):
        # A result that nobody used has None as its gradient, and not zeros.
        ctx.set_materialize_grads(False)
        x = contiguous_or_none(x)
        r = contiguous_or_none(r)
        w = contiguous_or_none(w)
        b = contiguous_or_none(b)
        y, s, mean, rstd = dropout_forward(x, r, w, b, eps, p, seed)
        ctx.save_for_backward(s, w, mean, rstd)
        ctx.p = p
        ctx.seed = seed  # this is the whole mask
        ctx.x_dtype = x.dtype
        ctx.grads_dtype = dtype_of_gradients(w, b, mean.dtype)
        return y, s

    @staticmethod
    @torch.autograd.function.once_differentiable  # no second derivatives
    def backward(ctx, dy, ds):
        s, w, mean, rstd = ctx.saved_tensors
        wants_dx, wants_dr, wants_dw, wants_db = ctx.needs_input_grad[:4]
        if dy is None:
            dy = torch.zeros_like(s)
        dr = torch.empty_like(s)
        dx = None
        if wants_dx and ctx.p > 0:
            dx = torch.empty_like(s, dtype=ctx.x_dtype)
        grads = s.new_empty(2, s.shape[1], dtype=ctx.grads_dtype)
        dropout_backward(
            contiguous_or_none(dy), contiguous_or_none(ds),
            s, w, mean, rstd, dr, dx, grads, ctx.p, ctx.seed,
        )  # fmt: skip

        if wants_dx and ctx.p == 0:
            dx = dr
        if not wants_dr:
            dr = None
        dw = None
        if wants_dw:
            dw = grads[0]
        db = None
        if wants_db:
            db = grads[1]
        # One gradient for each argument of forward; eps, p and seed have none.
        return dx, dr, dw, db, None, None, None


def dropout_check_arguments(x, residual, shape, weight, bias, p, eps):
    """Raise an error that names the wrong argument, and says why."""
    tensors = {"x": x, "residual": residual, "weight": weight, "bias": bias}
    for name in ("weight", "bias"):
        if tensors[name] is None:
            del tensors[name]

    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or tensor.itemsize == 1:
            raise TypeError(
                f"{name} is {tensor.dtype}: it must have floats of 16 bits or "
                "more"
            )
        if tensor.device != x.device or tensor.device.type != DEVICE.type:
            raise ValueError(
                f"{name} is on {tensor.device}: x, residual, weight and bias "
                f"must all be on {DEVICE}"
            )
    # Triton starts a kernel on the current GPU, wherever its tensors are.
    if x.is_cuda and x.device.index != torch.cuda.current_device():
        raise ValueError(f"x is on {x.device}: not the current one")

    if shape.numel() == 0 or len(shape) == 0:
        raise ValueError(
            f"x has the shape {tuple(x.shape)}, and normalized_shape is "
            f"{tuple(shape)}: it is empty"
        )
    for name, tensor in tensors.items():
        if name == "residual":
            continue
        last_dimensions = tensor.shape
        if name == "x":
            last_dimensions = tensor.shape[-len(shape) :]
        if last_dimensions != shape:
            raise ValueError(
                f"the shape of {name} is {tuple(tensor.shape)}, and "
                f"normalized_shape is {tuple(shape)}"
            )
    if residual.shape != x.shape:
        raise ValueError(
            f"the shape of residual is {tuple(residual.shape)}, and that of x "
            f"is {tuple(x.shape)}"
        )
    if torch.promote_types(x.dtype, residual.dtype) != residual.dtype:
        raise TypeError(
            f"residual is {residual.dtype}, and x is {x.dtype}: the stream "
            "must hold what is added to it"
        )
    if not 0 <= p <= 1:  # or NaN
        raise ValueError(f"p is {p}: it must be from 0 to 1")
    if not eps >= 0:  # negative, or NaN
        raise ValueError(f"eps is {eps}: it must be 0 or more")
    N = shape.numel()
    if N * residual.itemsize > 16384:
        raise ValueError(
            f"normalized_shape has {N} columns: this page takes up to 16 KB a "
            "row"
        )


def dropout_add_layer_norm(
    x, residual, normalized_shape, weight=None, bias=None, p=0.5,
    training=True, seed=None, eps=1e-5,
):  # fmt: skip
    """(y, s): s = dropout(x) + residual, and y is the layer norm of s.

    Without a seed, a call draws one from PyTorch's generator of the CPU.
    """
    if isinstance(normalized_shape, int):
        normalized_shape = [normalized_shape]
    shape = torch.Size(normalized_shape)
    dropout_check_arguments(x, residual, shape, weight, bias, p, eps)
    if not training:
        p = 0.0
    if seed is None:
        seed = 0
        if 0 < p < 1:  # else there is nothing to draw
            seed = int(torch.randint(2**62, ()))

    # The kernels only know matrices, so all other dimensions become rows.
    N = shape.numel()
    if weight is not None:
        weight = weight.reshape(N)
    if bias is not None:
        bias = bias.reshape(N)
    y, s = DropoutAddLayerNorm.apply(
        x.reshape(-1, N), residual.reshape(-1, N), weight, bias, eps, float(p),
        seed,
    )  # fmt: skip
    return y.reshape(x.shape), s.reshape(x.shape)


# fused/03-activation ----------------------------------------------------------
# Gives activation_layer_norm.


@triton.jit
def _activation_chunk(c, left, N: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr):
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
def _activation_load_chunks(
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
        row, col, mask = _activation_chunk(c, left, N, ROWS, CHUNK)
        at = ptr + (row * stride + col)
        xs += (tl.load(at, mask=mask, other=0, eviction_policy=HINT),)
    return xs


@triton.jit
def _activation_layer_norm_fwd(
    x_ptr,  # (M, N), contiguous
    w_ptr,  # (N,); None counts as 1
    b_ptr,  # (N,); None counts as 0
    y_ptr,  # (M, N)
    mean_ptr,  # (M,): of the activations, saved for the backward pass
    rstd_ptr,  # (M,): 1 / standard deviation, saved as well
    M,  # rows
    eps: tl.constexpr,  # added to the variance
    N: tl.constexpr,  # columns
    ROWS: tl.constexpr,  # rows that a program takes
    CHUNK: tl.constexpr,  # lanes of a chunk in each row
    ACT: tl.constexpr,  # New: the function
):
    acc: tl.constexpr = mean_ptr.dtype.element_ty  # float32, or float64

    # Load our rows.
    first = tl.program_id(0) * ROWS
    left = M - first
    start = tl.cast(first, tl.int64) * N  # M * N may pass 2**31
    xs = _activation_load_chunks(x_ptr + start, N, left, N, ROWS, CHUNK, "")

    # New: the activations, as a tuple of chunks, and their sum.
    values = ()
    total = tl.zeros((ROWS, CHUNK), acc)
    for c in tl.static_range(len(xs)):
        _, _, mask = _activation_chunk(c, left, N, ROWS, CHUNK)
        value, _ = ACT(xs[c].to(acc))
        values += (tl.where(mask, value, 0),)  # f(0) need not be 0
        total += values[c]
    mean = tl.sum(total, axis=1)[:, None] / N

    # The variance.
    total = tl.zeros((ROWS, CHUNK), acc)
    for c in tl.static_range(len(xs)):
        _, _, mask = _activation_chunk(c, left, N, ROWS, CHUNK)
        d = tl.where(mask, values[c] - mean, 0)  # idle lanes: 0 again
        total += d * d
    rstd = 1 / tl.sqrt(tl.sum(total, axis=1)[:, None] / N + eps)

    # mean and rstd are columns of ROWS numbers.
    row = tl.arange(0, ROWS)[:, None]
    tl.store(mean_ptr + first + row, mean, mask=row < left)
    tl.store(rstd_ptr + first + row, rstd, mask=row < left)

    # w and b are loaded late, so that they take no registers until now.
    for c in tl.static_range(len(xs)):
        i, j, mask = _activation_chunk(c, left, N, ROWS, CHUNK)
        y = (values[c] - mean) * rstd
        if w_ptr is not None:
            w = tl.load(w_ptr + j, mask=j < N, eviction_policy="evict_last")
            y *= w.to(acc)
        if b_ptr is not None:
            b = tl.load(b_ptr + j, mask=j < N, eviction_policy="evict_last")
            y += b.to(acc)
        tl.store(y_ptr + start + (i * N + j), y, mask=mask)


ACTIVATION_CUDA = ON_GPU and torch.version.hip is None
ACTIVATION_PTX = tl.constexpr(ACTIVATION_CUDA)


def activation_tile_of(N, itemsize, warps):
    """Rows and lanes of a chunk, of which a thread loads 16 bytes."""
    chunk = min(512 // itemsize * warps, max(triton.next_power_of_2(N), 16))
    rows = 512 // itemsize * warps // chunk
    return {"ROWS": rows, "CHUNK": chunk, "num_warps": warps}


def activation_plan_forward(N, itemsize):
    row = N * itemsize
    warps = 8
    if row <= 10240:
        warps = 4
    if row <= 2048:
        warps = 2
    plan = activation_tile_of(N, itemsize, warps)
    idle = -N % plan["CHUNK"]
    if row > 2048 and 8 * idle > N:
        plan["CHUNK"] = 1024 // itemsize
        plan["num_warps"] = 4
    return plan


def activation_forward(x, w, b, eps, function, rule=activation_plan_forward):
    """y, mean and rstd for a contiguous (M, N) x; w and b may be None."""
    M, N = x.shape
    y = torch.empty_like(x)
    # 16-bit rows are summed in float32.
    acc = torch.promote_types(x.dtype, torch.float32)
    mean = torch.empty(M, dtype=acc, device=x.device)
    rstd = torch.empty(M, dtype=acc, device=x.device)
    plan = rule(N, x.itemsize)
    _activation_layer_norm_fwd[(triton.cdiv(M, plan["ROWS"]),)](
        x_ptr=x,
        w_ptr=w,
        b_ptr=b,
        y_ptr=y,
        mean_ptr=mean,
        rstd_ptr=rstd,
        M=M,
        eps=eps,
        N=N,
        ACT=function,
        **plan,
    )
    return y, mean, rstd


@triton.jit
def _activation_sigmoid(x):
    if ACTIVATION_PTX and x.dtype == tl.float32:
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
def _activation_silu(x):
    sigmoid = _activation_sigmoid(x)
    return x * sigmoid, sigmoid * (1 + x * (1 - sigmoid))


@triton.jit
def _activation_gelu(x):
    below = 0.5 + 0.5 * tl.erf(x * 0.7071067811865476)  # 1 / sqrt(2)
    density = tl.exp(-0.5 * x * x) * 0.3989422804014327  # 1 / sqrt(2 pi)
    # Beyond 30 the second term is 0; infinity times 0 would not be.
    return x * below, below + tl.where(tl.abs(x) < 30, x * density, 0.0)


@triton.jit
def _activation_gelu_tanh(x):
    # Beyond 7.5 the sigmoid is 1, or as good as 0; the cube would overflow.
    near = tl.minimum(tl.maximum(x, -7.5), 7.5)
    # u, divided by x, and the derivative of u.
    # 2 sqrt(2 / pi) is 1.5957..., and times 0.044715 it is 0.0713...
    u = 1.5957691216057308 + 0.07135481627260025 * near * near
    du = 1.5957691216057308 + 0.21406444881780076 * near * near
    sigmoid = _activation_sigmoid(near * u)
    value = tl.where(x < -7.5, 0.0, x * sigmoid)
    return value, sigmoid * (1 + near * du * (1 - sigmoid))


ACTIVATION_ACTIVATIONS = {"silu": _activation_silu, "gelu": _activation_gelu, "gelu_tanh": _activation_gelu_tanh}


@triton.jit
def _sums_of_activations(
    xs, dys, ws, mean, rstd, N: tl.constexpr, ACT: tl.constexpr
):
    """Two numbers for each row of a tile, by which dx is corrected."""
    sum1 = tl.zeros(xs[0].shape, mean.dtype)
    sum2 = tl.zeros(xs[0].shape, mean.dtype)
    for c in tl.static_range(len(xs)):
        value, _ = ACT(xs[c].to(mean.dtype))
        # Lanes that hold no column have dy = 0, so they add 0 to both sums.
        wdy = dys[c].to(mean.dtype)
        if len(ws) > 0:
            wdy = wdy * ws[c].to(mean.dtype)
        sum1 += wdy * (value - mean)
        sum2 += wdy
    # Both sums over a row at once, so that its warps meet only once.
    sum1, sum2 = tl.reduce((sum1, sum2), 1, _add_two)
    # From the left: rstd**3 alone may be too large for float32.
    c1 = sum1[:, None] * rstd * rstd * rstd / N
    c2 = sum2[:, None] * rstd / N
    return c1, c2


@triton.jit
def _activation_layer_norm_bwd(
    dy_ptr,  # (M, N), contiguous
    x_ptr,  # (M, N), contiguous: the input of the function
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
    ACT: tl.constexpr,  # New: the function
):
    acc: tl.constexpr = mean_ptr.dtype.element_ty

    # w stays in registers for all rows, in its own type.
    ws = ()
    if w_ptr is not None:
        # With a stride of 0, each row of the tile is w.
        ws = _activation_load_chunks(w_ptr, 0, ROWS, N, ROWS, CHUNK, "evict_last")

    # The sums for dw and db, of each lane: tuples of chunks, too.
    zeros = tl.zeros((ROWS, CHUNK), acc)
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
        xs = _activation_load_chunks(x_ptr + start, N, left, N, ROWS, CHUNK, "")
        dys = _activation_load_chunks(dy_ptr + start, N, left, N, ROWS, CHUNK, "")

        # Both sums need the whole row, so all chunks come first.
        c1, c2 = _sums_of_activations(xs, dys, ws, mean, rstd, N, ACT)

        # Then each chunk is done by itself. An element of a tuple cannot be
        # replaced, so the sums go into new tuples.
        new_dws = ()
        new_dbs = ()
        for c in tl.static_range(len(xs)):
            # New: the function again, and now its slope as well.
            value, slope = ACT(xs[c].to(acc))
            d = value - mean
            dy = dys[c].to(acc)
            scaled = dy * rstd
            new_dws += (dws[c] + scaled * d,)
            new_dbs += (dbs[c] + dy,)
            if dx_ptr is not None:
                wdy = scaled
                if w_ptr is not None:
                    wdy = scaled * ws[c].to(acc)
                # New: what comes through the norm, times the slope.
                dx = (wdy - (d * c1 + c2)) * slope
                i, j, mask = _activation_chunk(c, left, N, ROWS, CHUNK)
                tl.store(dx_ptr + start + (i * N + j), dx, mask=mask)
        dws = new_dws
        dbs = new_dbs

    # The sums of this program, in its buffer: dw first, then db.
    if sums_ptr is not None:
        sums_ptr += tl.program_id(0) * 2 * N
        for c in tl.static_range(len(dws)):
            col = c * CHUNK + tl.arange(0, CHUNK)
            # Each of the ROWS rows of a tile has sums of its own until now.
            tl.store(sums_ptr + col, tl.sum(dws[c], axis=0), mask=col < N)
            tl.store(sums_ptr + N + col, tl.sum(dbs[c], axis=0), mask=col < N)


@triton.jit
def _activation_add_up(
    sums_ptr,  # (programs, WIDTH)
    grads_ptr,  # (WIDTH,): dw, then db
    programs,  # how many rows of sums there are
    WIDTH: tl.constexpr,  # 2 * N
    ROWS: tl.constexpr,  # a power of two, at least programs
    COLS: tl.constexpr,  # columns per program
):
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    rows = tl.arange(0, ROWS)[:, None]
    mask = (rows < programs) & (cols < WIDTH)
    sums = tl.load(sums_ptr + rows * WIDTH + cols, mask=mask, other=0)
    tl.store(grads_ptr + cols, tl.sum(sums, axis=0), mask=cols < WIDTH)


ACTIVATION_GPU = torch.cuda.get_device_properties(DEVICE) if ON_GPU else None
ACTIVATION_NUM_SMS = ACTIVATION_GPU.multi_processor_count if ON_GPU else 4
ACTIVATION_SHARED = getattr(ACTIVATION_GPU, "shared_memory_per_block_optin", 65536)


def activation_plan_backward(N, itemsize):
    row = N * itemsize
    per_sm = 1
    if row <= 8192:
        per_sm = 2
    plan = activation_tile_of(N, itemsize, 8 // per_sm)
    if row <= 2048:
        plan["ROWS"] = min(2 * plan["ROWS"], 8)
    else:
        plan["ROWS"] = 1
    # A slot of shared memory holds x and dy of a tile; 8 KB are for the sums.
    columns = triton.cdiv(N, plan["CHUNK"]) * plan["CHUNK"]
    tile = 2 * plan["ROWS"] * columns * itemsize
    plan["STAGES"] = 1 + min((ACTIVATION_SHARED // per_sm - 8192) // tile, 3)
    plan["per_sm"] = per_sm
    return plan


def activation_add_up(sums, grads):
    """Fill grads, dw and db as (2, N), from (programs, 2, N) sums."""
    programs, _, N = sums.shape
    columns_per_program = 16
    _activation_add_up[(triton.cdiv(2 * N, columns_per_program),)](
        sums_ptr=sums,
        grads_ptr=grads,
        programs=programs,
        WIDTH=2 * N,
        ROWS=triton.next_power_of_2(max(programs, 1)),
        COLS=columns_per_program,
    )


def activation_backward(dy, x, w, mean, rstd, dx, grads, function, rule=activation_plan_backward):
    """Fill dx and grads, which are dw and db; either may be None."""
    M, N = x.shape
    plan = rule(N, x.itemsize)
    programs = ACTIVATION_NUM_SMS * plan.pop("per_sm")
    programs = min(programs, triton.cdiv(M, plan["ROWS"]))
    sums = None
    if grads is not None:
        shape = (programs, 2, N)
        sums = torch.empty(shape, dtype=mean.dtype, device=x.device)
    _activation_layer_norm_bwd[(programs,)](
        dy_ptr=dy,
        x_ptr=x,
        w_ptr=w,
        mean_ptr=mean,
        rstd_ptr=rstd,
        dx_ptr=dx,
        sums_ptr=sums,
        M=M,
        N=N,
        ACT=function,
        **plan,
    )
    if grads is not None:
        activation_add_up(sums, grads)


class ActivationLayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, b, eps, function):
        x = contiguous_or_none(x)
        w = contiguous_or_none(w)
        b = contiguous_or_none(b)
        y, mean, rstd = activation_forward(x, w, b, eps, function)
        ctx.save_for_backward(x, w, mean, rstd)
        ctx.grads_dtype = dtype_of_gradients(w, b, mean.dtype)
        ctx.function = function
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable  # no second derivatives
    def backward(ctx, dy):
        x, w, mean, rstd = ctx.saved_tensors
        wants_dx, wants_dw, wants_db, _, _ = ctx.needs_input_grad

        # A gradient that nobody wants is None, and its code is not compiled.
        dx = None
        if wants_dx:
            dx = torch.empty_like(x)
        grads = None
        if wants_dw or wants_db:
            grads = x.new_empty(2, x.shape[1], dtype=ctx.grads_dtype)
        dy = dy.contiguous()
        activation_backward(dy, x, w, mean, rstd, dx, grads, ctx.function)

        dw = None
        if wants_dw:
            dw = grads[0]
        db = None
        if wants_db:
            db = grads[1]
        # One gradient for each argument of forward; the last two have none.
        return dx, dw, db, None, None


def activation_check_arguments(x, shape, weight, bias, activation, eps):
    """Raise an error that names the wrong argument, and says why."""
    tensors = {"x": x, "weight": weight, "bias": bias}
    tensors = {name: t for name, t in tensors.items() if t is not None}

    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or tensor.itemsize == 1:
            raise TypeError(
                f"{name} is {tensor.dtype}: it must have floats of 16 bits or "
                "more"
            )
        if tensor.device != x.device or tensor.device.type != DEVICE.type:
            raise ValueError(
                f"{name} is on {tensor.device}: x, weight and bias must all "
                f"be on {DEVICE}"
            )
    # Triton starts a kernel on the current GPU, wherever its tensors are.
    if x.is_cuda and x.device.index != torch.cuda.current_device():
        raise ValueError(f"x is on {x.device}: not the current one")

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
    if isinstance(activation, str) and activation not in ACTIVATION_ACTIVATIONS:
        names = ", ".join(ACTIVATION_ACTIVATIONS)
        raise ValueError(f"activation: {activation} is none of {names}")
    if not eps >= 0:  # negative, or NaN
        raise ValueError(f"eps is {eps}: it must be 0 or more")

    N = shape.numel()
    if N * x.itemsize > 16384:
        raise ValueError(
            f"normalized_shape has {N} columns: this page takes up to 16 KB a "
            "row"
        )


def activation_layer_norm(
    x, normalized_shape, weight=None, bias=None, activation="silu", eps=1e-5
):
    """Layer norm of an activation of x; both passes run in Triton.

    x has floats of 16 bits or more, and any dimensions and strides.
    normalized_shape, a number or a shape, gives the last dimensions of x.
    weight and bias have that shape, or are None.
    activation is a name in ACTIVATIONS, or a function like _silu.
    """
    if isinstance(normalized_shape, int):
        normalized_shape = [normalized_shape]
    shape = torch.Size(normalized_shape)
    activation_check_arguments(x, shape, weight, bias, activation, eps)
    function = activation
    if isinstance(activation, str):
        function = ACTIVATION_ACTIVATIONS[activation]

    # The kernels only know matrices, so all other dimensions become rows.
    N = shape.numel()
    if weight is not None:
        weight = weight.reshape(N)
    if bias is not None:
        bias = bias.reshape(N)
    y = ActivationLayerNorm.apply(
        x.reshape(-1, N), weight, bias, eps, function
    )
    return y.reshape(x.shape)


# norms-and-losses/05-wide-softmax ---------------------------------------------
# Gives softmax, log_softmax.


SOFTMAX_LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)


@triton.jit
def _exp(x):
    # A GPU has an instruction for powers of 2, and e is 2 to the LOG2E.
    return tl.exp2(x * SOFTMAX_LOG2E)


@triton.jit
def _softmax_fwd_streaming(
    x_ptr,  # (M, N), contiguous
    y_ptr,  # (M, N)
    N: tl.constexpr,  # columns
    PAIRS: tl.constexpr,  # pairs of a program: a power of two
    EACH: tl.constexpr,  # lanes that share a pair: a power of two
    LOG: tl.constexpr,  # whether y is the logarithm of softmax
):
    # 16-bit rows are summed in float32.
    DOUBLE: tl.constexpr = y_ptr.dtype.element_ty == tl.float64
    acc: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    TILE: tl.constexpr = PAIRS * EACH
    LAST: tl.constexpr = (N - 1) // TILE * TILE  # where the last tile begins

    # A program for each row. M * N may pass 2**31.
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * N
    y_ptr += row * N
    lane = tl.arange(0, PAIRS)[:, None] * EACH + tl.arange(0, EACH)[None, :]

    # First sweep: each pair sees all tiles, EACH of their elements at a time.
    m = tl.full((PAIRS,), LOWEST, acc)
    s = tl.zeros((PAIRS,), acc)
    for start in range(0, N, TILE):
        col = start + lane
        x = tl.load(
            x_ptr + col,
            mask=col < N,
            other=float("-inf"),
            eviction_policy="evict_last",  # the second sweep needs it again
        ).to(acc)
        new = tl.maximum(m, tl.max(x, axis=1))
        # What was summed so far shrinks, if the maximum is a new one. tl.exp:
        # m may be the lowest number, and LOG2E times it is not finite.
        s = s * tl.exp(m - new) + tl.sum(_exp(x - new[:, None]), axis=1)
        m = new

    # Put the pairs of the threads together. Here they wait for each other.
    top = tl.max(m, axis=0)
    s = tl.sum(s * tl.exp(m - top), axis=0)
    scale = 1 / s
    log = tl.log(s)

    # Second sweep, from the last tile to the first.
    for start in range(0, N, TILE):
        col = LAST - start + lane
        x = tl.load(
            x_ptr + col,
            mask=col < N,
            other=float("-inf"),
            eviction_policy="evict_first",  # nobody needs it any more
        ).to(acc)
        y = x - top - log if LOG else _exp(x - top) * scale
        tl.store(y_ptr + col, y, mask=col < N)


@triton.jit
def _softmax_chunk(
    ptr,  # (M, N), contiguous
    c,  # the number of the chunk in its row
    row,  # (ROWS, 1): the rows of the program
    N: tl.constexpr,  # columns
    CHUNK: tl.constexpr,  # lanes of a chunk: a power of two
    STEP: tl.constexpr,  # lanes of a group
):
    """Pointers to the lanes of a chunk, and which lanes are in a group that
    has a column of the row, in a group that has nothing else, in the row."""
    first = tl.cast(row, tl.int64) * N  # M * N may pass 2**31
    start = first // STEP * STEP  # where the first group begins
    lane = c * CHUNK + tl.arange(0, CHUNK)[None, :]
    if (STEP == 1 or c > 0) and (c + 1) * CHUNK <= N:
        # All lanes have a column of the row and of no other one. The compiler
        # knows these masks, and leaves them out.
        every = tl.full((row.shape[0], CHUNK), 1, tl.int1)
        return ptr + start + lane, every, every, every
    begin = (first - start).to(tl.int32)  # the lane of column 0
    end = begin + N
    group = lane // STEP * STEP  # the first lane of the same group
    inside = (lane >= begin) & (lane < end)
    whole = (group >= begin) & (group + STEP <= end)
    if STEP == 1:
        whole = lane < end
    return ptr + start + lane, group < end, whole, inside


@triton.jit
def _load_row(
    ptr,  # (M, N), contiguous
    row,  # (ROWS, 1): the rows of the program
    N: tl.constexpr,  # columns
    CHUNK: tl.constexpr,  # lanes of a chunk: a power of two
    STEP: tl.constexpr,  # lanes of a group
    OTHER: tl.constexpr,  # what idle lanes get
):
    """The rows in chunks, in the type in which they are stored."""
    xs = ()
    # A row that begins in the middle of a group takes STEP - 1 lanes more.
    for c in tl.static_range((N + STEP - 2 + CHUNK) // CHUNK):
        at, some, _, inside = _softmax_chunk(ptr, c, row, N, CHUNK, STEP)
        x = tl.load(at, mask=some)
        other = tl.full((), OTHER, tl.float32).to(ptr.dtype.element_ty)
        xs += (tl.where(inside, x, other),)
    return xs


@triton.jit
def _store_chunk(
    ptr,  # (M, N), contiguous
    x,  # (ROWS, CHUNK)
    c,  # the number of the chunk in its row
    row,  # (ROWS, 1): the rows of the program
    N: tl.constexpr,  # columns
    STEP: tl.constexpr,  # lanes of a group
):
    at, _, whole, inside = _softmax_chunk(ptr, c, row, N, x.shape[1], STEP)
    # Groups that belong to the row alone: 16 bytes at once.
    tl.store(at, x, mask=whole)
    if STEP > 1:
        # The others, at both ends of the row: element by element.
        tl.store(at, x, mask=inside & (whole == 0))


@triton.jit
def _softmax_fwd(
    x_ptr,  # (M, N), contiguous
    y_ptr,  # (M, N)
    M,  # rows
    N: tl.constexpr,  # columns
    ROWS: tl.constexpr,  # rows of a program: a power of two
    CHUNK: tl.constexpr,  # lanes of a chunk: a power of two
    STEP: tl.constexpr,  # lanes of a group; 1 if all rows begin with one
    LOG: tl.constexpr,  # whether y is the logarithm of softmax
):
    DOUBLE: tl.constexpr = y_ptr.dtype.element_ty == tl.float64
    acc: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    row = tl.minimum(row, M - 1)

    xs = _load_row(x_ptr, row, N, CHUNK, STEP, float("-inf"))

    # The maximum: of the chunks, lane by lane, and then of the lanes.
    m = tl.full((ROWS, CHUNK), LOWEST, acc)
    for c in tl.static_range(len(xs)):
        m = tl.maximum(m, xs[c].to(acc))
    m = tl.max(m, axis=1)[:, None]

    # The sum of the powers, in the same way.
    s = tl.zeros((ROWS, CHUNK), acc)
    for c in tl.static_range(len(xs)):
        s += _exp(xs[c].to(acc) - m)
    s = tl.sum(s, axis=1)[:, None]
    scale = 1 / s
    log = tl.log(s)

    for c in tl.static_range(len(xs)):
        d = xs[c].to(acc) - m
        y = d - log if LOG else _exp(d) * scale
        _store_chunk(y_ptr, y, c, row, N, STEP)


@triton.jit
def _hidden(x, zero):
    """x, which the compiler takes for something new; zero is 0."""
    if x.dtype.primitive_bitwidth == 16:
        bits = x.to(tl.int16, bitcast=True) ^ tl.cast(zero, tl.int16)
        x = bits.to(x.dtype, bitcast=True)
    return x


@triton.jit
def _softmax_bwd(
    y_ptr,  # (M, N), contiguous: the result of the forward pass
    dy_ptr,  # (M, N), contiguous
    dx_ptr,  # (M, N)
    zero,  # 0, but the compiler cannot assume that
    M,  # rows
    N: tl.constexpr,  # columns
    ROWS: tl.constexpr,  # rows of a program: a power of two
    CHUNK: tl.constexpr,  # lanes of a chunk: a power of two
    STEP: tl.constexpr,  # lanes of a group; 1 if all rows begin with one
    LOG: tl.constexpr,  # whether y is the logarithm of softmax
):
    DOUBLE: tl.constexpr = y_ptr.dtype.element_ty == tl.float64
    acc: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    row = tl.minimum(row, M - 1)

    # Idle lanes get 0, which adds nothing to the sum.
    ys = _load_row(y_ptr, row, N, CHUNK, STEP, 0.0)
    dys = _load_row(dy_ptr, row, N, CHUNK, STEP, 0.0)

    # The sum c of the formula.
    c = tl.zeros((ROWS, CHUNK), acc)
    for i in tl.static_range(len(ys)):
        dy = dys[i].to(acc)
        if LOG:
            c += dy
        else:
            c += ys[i].to(acc) * dy
    c = tl.sum(c, axis=1)[:, None]

    for i in tl.static_range(len(ys)):
        y = _hidden(ys[i], zero).to(acc)
        dy = _hidden(dys[i], zero).to(acc)
        dx = dy - _exp(y) * c if LOG else y * (dy - c)
        _store_chunk(dx_ptr, dx, i, row, N, STEP)


@triton.jit
def _softmax_bwd_streaming(
    y_ptr,  # (M, N), contiguous: the result of the forward pass
    dy_ptr,  # (M, N), contiguous
    dx_ptr,  # (M, N)
    N: tl.constexpr,  # columns
    BLOCK: tl.constexpr,  # lanes of a tile: a power of two
    LOG: tl.constexpr,  # whether y is the logarithm of softmax
):
    DOUBLE: tl.constexpr = y_ptr.dtype.element_ty == tl.float64
    acc: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    LAST: tl.constexpr = (N - 1) // BLOCK * BLOCK  # where the last tile begins
    row = tl.program_id(0).to(tl.int64)
    y_ptr += row * N
    dy_ptr += row * N
    dx_ptr += row * N
    lane = tl.arange(0, BLOCK)

    # First sweep: the sum c, in each lane and then over all lanes.
    c = tl.zeros((BLOCK,), acc)
    for start in range(0, N, BLOCK):
        col = start + lane
        mask = col < N
        dy = tl.load(
            dy_ptr + col, mask=mask, other=0, eviction_policy="evict_last"
        ).to(acc)
        if LOG:
            c += dy
        else:
            y = tl.load(
                y_ptr + col, mask=mask, other=0, eviction_policy="evict_last"
            ).to(acc)
            c += y * dy
    c = tl.sum(c, axis=0)

    # Second sweep: dx, from the last tile to the first.
    for start in range(0, N, BLOCK):
        col = LAST - start + lane
        mask = col < N
        y = tl.load(y_ptr + col, mask=mask, eviction_policy="evict_first")
        dy = tl.load(dy_ptr + col, mask=mask, eviction_policy="evict_first")
        y = y.to(acc)
        dy = dy.to(acc)
        dx = dy - _exp(y) * c if LOG else y * (dy - c)
        tl.store(dx_ptr + col, dx, mask=mask)


SOFTMAX_CUDA = ON_GPU and torch.version.hip is None


def softmax_plan_sweeps(N, itemsize):
    """Pairs, and warps of a program, for rows of N elements."""
    warps = triton.next_power_of_2(N * itemsize // 2048)
    warps = min(max(warps, 2), 32)
    plan = {"PAIRS": 32 * warps, "EACH": 16 // itemsize, "num_warps": warps}
    if SOFTMAX_CUDA and itemsize < 8:
        plan["maxnreg"] = 32
    return plan


def step_of(N, *matrices):
    """Lanes of a group; 1 where all rows begin with one, or none does."""
    step = 16 // max(matrix.itemsize for matrix in matrices)
    if N % step == 0 or torch.compiler.is_compiling():
        return 1
    # A view may begin in the middle of a group. Then groups would not help.
    if any(matrix.data_ptr() % 16 for matrix in matrices):
        return 1
    return step


def softmax_tile_of(N, itemsize, step):
    """How a row in registers is divided among the warps of a program."""
    row_bytes = N * itemsize
    warps = max(triton.next_power_of_2(triton.cdiv(row_bytes, 4096)), 2)
    if row_bytes <= 512:
        warps = 4
    lanes = 512 // itemsize * warps  # that a program loads at once
    chunk = min(lanes, triton.next_power_of_2(max(N + step - 1, 1)))
    rows = 1
    if row_bytes <= 512:
        rows = 2 * lanes // chunk
    return {"ROWS": rows, "CHUNK": chunk, "STEP": step, "num_warps": warps}


def softmax_plan_forward(N, itemsize, step=1):
    """A plan for one sweep, or for two."""
    row_bytes = N * itemsize
    in_one_sweep = 16384
    if step > 1:
        in_one_sweep = 32768
    if row_bytes <= in_one_sweep:
        return softmax_tile_of(N, itemsize, step)
    return softmax_plan_sweeps(N, itemsize)


def softmax_plan_backward(N, itemsize, step=1):
    """A plan for one sweep, or for two."""
    if N * itemsize > 65536:
        return {"BLOCK": 32768 // itemsize, "num_warps": 32}
    return softmax_tile_of(N, itemsize, step)


def in_sweeps(x, plan, log=False, dtype=None):
    """Softmax over the last dimension, in two sweeps; x is contiguous."""
    y = torch.empty_like(x, dtype=dtype)
    M = x[..., :1].numel()  # the rows, even if they have no columns
    N = x.shape[-1]
    _softmax_fwd_streaming[(M,)](x_ptr=x, y_ptr=y, N=N, LOG=log, **plan)
    return y


def softmax_forward(x, log=False, dtype=None, plan=None):
    """Softmax over the last dimension; x is contiguous."""
    y = torch.empty_like(x, dtype=dtype)
    M = x[..., :1].numel()
    N = x.shape[-1]
    if plan is None:
        plan = softmax_plan_forward(N, y.itemsize, step_of(N, x, y))
    if "PAIRS" in plan:
        return in_sweeps(x, plan, log, dtype)
    grid = (triton.cdiv(M, plan["ROWS"]),)
    _softmax_fwd[grid](x_ptr=x, y_ptr=y, M=M, N=N, LOG=log, **plan)
    return y


def softmax_backward(y, dy, log=False, dtype=None, plan=None):
    """dx from the result of the forward pass; both are contiguous."""
    dx = torch.empty_like(y, dtype=dtype)
    M = y[..., :1].numel()
    N = y.shape[-1]
    if plan is None:
        plan = softmax_plan_backward(N, y.itemsize, step_of(N, y, dy, dx))
    if "BLOCK" in plan:
        _softmax_bwd_streaming[(M,)](
            y_ptr=y, dy_ptr=dy, dx_ptr=dx, N=N, LOG=log, **plan
        )
        return dx
    grid = (triton.cdiv(M, plan["ROWS"]),)
    _softmax_bwd[grid](
        y_ptr=y, dy_ptr=dy, dx_ptr=dx, zero=0, M=M, N=N, LOG=log, **plan
    )
    return dx


@triton.jit
def _softmax_place(
    row,
    s,  # our slice
    N: tl.constexpr,  # columns
    WIDTH: tl.constexpr,  # lanes of a slice, a multiple of STEP
    STEP: tl.constexpr,  # elements of 16 bytes, or 1 if all rows begin there
):
    """Where slice s begins in the matrix, at a multiple of 16 bytes; its
    first lane of the row; and the first lane behind the slice."""
    first = tl.cast(row, tl.int64) * N  # M * N may pass 2**31
    start = first // STEP * STEP
    # Slice 0 begins with up to STEP - 1 lanes of the row above. In the other
    # slices this is negative: all of their lanes are behind the beginning.
    begin = (first - start).to(tl.int32) - s * WIDTH
    return start + s * WIDTH, begin, tl.minimum(begin + N, WIDTH)


@triton.jit
def _softmax_lanes(
    c,  # a chunk
    place,  # of our slice, from _place
    PAIRS: tl.constexpr,  # rows of a chunk: one for each thread
    EACH: tl.constexpr,  # lanes of a thread, 16 bytes
    STEP: tl.constexpr,
):
    """The lanes of chunk c; which of them are of the slice; and which are in a
    group of STEP lanes that are all of the slice."""
    lane = tl.arange(0, PAIRS)[:, None] * EACH + tl.arange(0, EACH)[None, :]
    lane += c * (PAIRS * EACH)
    _, begin, end = place
    group = lane // STEP * STEP
    whole = (group >= begin) & (group + STEP <= end)
    return lane, (lane >= begin) & (lane < end), whole


@triton.constexpr_function
def _full(c, chunk, lanes, step):
    """Whether chunk c needs no mask; lanes: how many a slice has at least."""
    return (c + 1) * chunk <= lanes and (step == 1 or c > 0)


@triton.jit
def _only(x, c, place, other, FULL: tl.constexpr, STEP: tl.constexpr):
    """x in the lanes of the slice, and other elsewhere."""
    if not FULL:
        _, inside, _ = _softmax_lanes(c, place, x.shape[0], x.shape[1], STEP)
        x = tl.where(inside, x, other)
    return x


@triton.jit
def _softmax_store(ptr, x, c, place, FULL: tl.constexpr, STEP: tl.constexpr):
    """Store chunk c of a slice, and nothing beside the slice."""
    lane, inside, whole = _softmax_lanes(c, place, x.shape[0], x.shape[1], STEP)
    # Groups that are all ours, 16 bytes at a time. If STEP is 1, a group is a
    # single lane.
    tl.store(ptr + place[0] + lane, x, mask=None if FULL else whole)
    if not FULL and STEP > 1:
        # A group at either end that we share with a neighbor: lane by lane.
        tl.store(ptr + place[0] + lane, x, mask=inside & (whole == 0))


@triton.jit
def _softmax_load(
    ptr,
    c,  # a chunk
    place,  # of our slice
    PAIRS: tl.constexpr,  # threads
    EACH: tl.constexpr,  # lanes of a thread
    FULL: tl.constexpr,  # whether the chunk needs no mask
    STEP: tl.constexpr,
    HINT: tl.constexpr,  # what the caches should do
):
    """A chunk, and minus infinity in lanes that are not of the slice."""
    lane, _, _ = _softmax_lanes(c, place, PAIRS, EACH, STEP)
    # Groups behind the end are not loaded. What a group holds of other rows is
    # loaded and then replaced.
    mask = None if FULL else lane // STEP * STEP < place[2]
    x = tl.load(ptr + place[0] + lane, mask=mask, eviction_policy=HINT)
    acc: tl.constexpr = tl.float64 if x.dtype == tl.float64 else tl.float32
    return _only(x.to(acc), c, place, float("-inf"), FULL, STEP)


@triton.jit
def _read(
    x_ptr,
    c,
    place,
    m,  # (PAIRS,): the maxima so far
    s,  # (PAIRS,): the sums so far
    EACH: tl.constexpr,
    FULL: tl.constexpr,
    STEP: tl.constexpr,
):
    """First sweep: the pairs with chunk c."""
    PAIRS: tl.constexpr = m.shape[0]
    x = _softmax_load(x_ptr, c, place, PAIRS, EACH, FULL, STEP, "evict_last")
    new = tl.maximum(m, tl.max(x, 1))
    # The sum so far was about the old maximum, so it shrinks.
    s = s * tl.exp(m - new) + tl.sum(_exp(x - new[:, None]), 1)
    return new, s


@triton.jit
def _softmax_write(
    x_ptr,
    y_ptr,
    c,
    place,
    m,  # the maximum of the row
    s,  # 1 / the sum of the row; its logarithm if LOG
    PAIRS: tl.constexpr,
    EACH: tl.constexpr,
    FULL: tl.constexpr,
    STEP: tl.constexpr,
    LOG: tl.constexpr,
):
    """Second sweep: store the results of chunk c."""
    x = _softmax_load(x_ptr, c, place, PAIRS, EACH, FULL, STEP, "evict_first")
    y = x - m - s if LOG else _exp(x - m) * s
    _softmax_store(y_ptr, y, c, place, FULL, STEP)


@triton.jit
def _softmax_fwd_shifted(
    x_ptr,  # (M, N), contiguous
    y_ptr,  # (M, N)
    N: tl.constexpr,  # columns
    PAIRS: tl.constexpr,  # threads: each has a pair
    EACH: tl.constexpr,  # lanes of a thread, 16 bytes
    STEP: tl.constexpr,  # elements of 16 bytes, or 1 if all rows begin there
    LOG: tl.constexpr,  # whether y is the logarithm of softmax
):
    DOUBLE: tl.constexpr = y_ptr.dtype.element_ty == tl.float64
    acc: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    # Chunks HEAD to LAST - 1 have no masks. Before them is the first one, if
    # rows begin anywhere, and behind them are one or two at the end.
    HEAD: tl.constexpr = 1 if STEP > 1 else 0
    FULL: tl.constexpr = N // (PAIRS * EACH)
    LAST: tl.constexpr = FULL if FULL > HEAD else HEAD
    ALL: tl.constexpr = (N + STEP - 2) // (PAIRS * EACH) + 1

    # A program has a row, which is a single slice.
    place = _softmax_place(tl.program_id(0), 0, N, N + STEP, STEP)
    m = tl.full((PAIRS,), LOWEST, acc)
    s = tl.zeros((PAIRS,), acc)

    # First sweep. ``c % ALL`` comes back to chunk 0 behind the last one.
    for c in tl.static_range(LAST, ALL + HEAD):
        m, s = _read(x_ptr, c % ALL, place, m, s, EACH, False, STEP)
    for c in tl.range(HEAD, LAST, num_stages=1):
        m, s = _read(x_ptr, c, place, m, s, EACH, True, STEP)

    # The pair of the row.
    top = tl.max(m, 0)
    s = tl.sum(s * tl.exp(m - top), 0)
    s = tl.log(s) if LOG else 1 / s

    # Second sweep. It begins with what was read last, and may still be in L1.
    for c in tl.range(HEAD, LAST, num_stages=1):
        back = HEAD + LAST - 1 - c
        _softmax_write(x_ptr, y_ptr, back, place, top, s, PAIRS, EACH, True, STEP, LOG)
    for c in tl.static_range(LAST, ALL + HEAD):
        _softmax_write(
            x_ptr,
            y_ptr,
            c % ALL,
            place,
            top,
            s,
            PAIRS,
            EACH,
            False,
            STEP,
            LOG,
        )


SOFTMAX_GPU = torch.cuda.get_device_properties(DEVICE) if ON_GPU else None
SOFTMAX_NUM_SMS = SOFTMAX_GPU.multi_processor_count if ON_GPU else 4

# Bytes of L1 for two rows; the rest of its 256 KB is for other data.
TWO_ROWS = 224 * 1024


def in_shifted(x, log=False, dtype=None):
    """Softmax of the last dimension in two sweeps, wherever rows begin."""
    y = torch.empty_like(x, dtype=dtype)
    N = x.shape[-1]
    options = {"num_warps": 32}
    if SOFTMAX_CUDA and y.itemsize < 8:
        options["maxnreg"] = 64
        if 2 * N * x.itemsize <= TWO_ROWS:
            options["maxnreg"] = 32
    _softmax_fwd_shifted[(x.numel() // N,)](
        x_ptr=x,
        y_ptr=y,
        N=N,
        PAIRS=1024 if ON_GPU else 4,
        EACH=16 // y.itemsize,
        STEP=step_of(N, x, y),
        LOG=log,
        **options,
    )
    return y


SOFTMAX_EMPTY = 0x7F800001_7F800001


def softmax_places(compiled):
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
    return per_sm.value * SOFTMAX_GPU.multi_processor_count


def softmax_together(kernel, programs, per_sm, warps, **arguments):
    """Launch programs that wait for each other, if the GPU has room for all of
    them at a time; say whether it has."""
    options = {"num_warps": warps, "PTX": SOFTMAX_CUDA}
    if not SOFTMAX_CUDA:
        for _ in range(2):
            kernel[(programs,)](**arguments, **options)
        return True

    registers = 65536 // (32 * warps * per_sm)
    options["maxnreg"] = min(registers // 8 * 8, 255)  # a multiple of 8
    options["launch_cooperative_grid"] = True
    compiled = kernel.warmup(grid=(programs,), **arguments, **options)
    if programs > softmax_places(compiled):
        return False
    kernel[(programs,)](**arguments, **options)
    return True


def softmax_empty_words(rows, slices):
    """Words for one launch: nobody has published any of them."""
    empty = SOFTMAX_EMPTY if SOFTMAX_CUDA else 0
    return torch.full((rows, slices), empty, device=DEVICE)


@triton.jit
def _softmax_publish(
    words_ptr,  # (M, SLICES)
    row,
    s,  # our slice
    a,  # float32: the lower half of the word
    b,  # float32: the upper half
    SLICES: tl.constexpr,  # slices of a row
):
    """Store the word of slice s."""
    # A number of 32 bits becomes one of 64 with zeros before it, because it is
    # unsigned.
    low = a.to(tl.uint32, bitcast=True).to(tl.int64)
    high = b.to(tl.uint32, bitcast=True).to(tl.int64)
    at = words_ptr + tl.cast(row, tl.int64) * SLICES + s
    tl.atomic_xchg(at, low | (high << 32), sem="relaxed")


@triton.jit
def _softmax_collect(
    words_ptr,  # (M, SLICES)
    row,
    SLICES: tl.constexpr,  # slices of a row
    PADDED: tl.constexpr,  # a power of two, at least SLICES
    PTX: tl.constexpr,  # False: in the interpreter
):
    """Both numbers of each slice of a row, as soon as all are there."""
    s = tl.arange(0, PADDED)
    at = words_ptr + tl.cast(row, tl.int64) * SLICES
    at += tl.minimum(s, SLICES - 1)
    word = tl.load(at, volatile=True)
    if PTX:
        loads = 0
        # The same number as EMPTY: as long as any word is empty, load again.
        while tl.max((word == 0x7F800001_7F800001).to(tl.int32)) > 0:
            word = tl.load(at, volatile=True)
            loads += 1
            if loads == 10_000_000:  # it never comes: end with an error
                tl.inline_asm_elementwise(
                    "trap; mov.b32 $0, $1;",
                    constraints="=r,r",
                    args=[loads],
                    dtype=tl.int32,
                    is_pure=False,
                    pack=1,
                )

    # Both halves as float32 again. Behind the last slice there is a maximum
    # that is below all others, and a sum of 0.
    a = word.to(tl.uint32).to(tl.float32, bitcast=True)
    b = (word >> 32).to(tl.uint32).to(tl.float32, bitcast=True)
    return tl.where(s < SLICES, a, LOWEST), tl.where(s < SLICES, b, 0)


@triton.jit
def _row_pair(
    ms,  # (PADDED,): the maximum of each slice
    sums,  # (PADDED,): its sum
):
    """Maximum and sum of the row."""
    m = tl.max(ms, 0)
    return m, tl.sum(sums * tl.exp(ms - m), 0)


@triton.jit
def _load_words(
    ptr,
    place,  # of our slice
    PAIRS: tl.constexpr,  # threads
    WIDTH: tl.constexpr,  # lanes of a slice
    LEAST: tl.constexpr,  # lanes that the slices of all programs have
):
    """A slice as a tuple of chunks: integers of 32 bits."""
    EACH: tl.constexpr = 128 // ptr.dtype.element_ty.primitive_bitwidth
    CHUNK: tl.constexpr = PAIRS * EACH
    word = tl.arange(0, PAIRS)[:, None] * 4 + tl.arange(0, 4)[None, :]
    # The compiler cannot know that a slice begins at 16 bytes: we say so.
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
    low = words.to(tl.int16)
    high = (words >> 16).to(tl.int16)
    if dtype == tl.bfloat16:
        # A bfloat16 number is the upper half of a float32 number.
        low = words << 16
        high = words & -65536
    if dtype != tl.float32:
        # Column by column: a low half, then its high half.
        words = tl.join(low, high).reshape(words.shape[0], 8)
    return words.to(KIND, bitcast=True).to(tl.float32)


@triton.jit
def _pair(
    words,  # a slice, from _load_words
    place,  # where it is
    dtype: tl.constexpr,  # of its columns
    LEAST: tl.constexpr,
    STEP: tl.constexpr,
):
    """Maximum and sum of a slice."""
    m = tl.full((words[0].shape[0],), LOWEST, tl.float32)
    xs = ()
    for c in tl.static_range(len(words)):
        x = _numbers(words[c], dtype)
        x = _only(
            x, c, place, float("-inf"), _full(c, x.numel, LEAST, STEP), STEP
        )
        xs += (x,)
        m = tl.maximum(m, tl.max(x, 1))
    s = tl.zeros_like(m)
    for c in tl.static_range(len(words)):
        s += tl.sum(_exp(xs[c] - m[:, None]), 1)
    # A pair for each thread became one for the program.
    top = tl.max(m, 0)
    return top, tl.sum(s * tl.exp(m - top), 0)


@triton.jit
def _softmax_finish(
    words,  # a slice that has waited
    m,  # the maximum of its row
    s,  # the sum of its row
    y_ptr,
    place,
    dtype: tl.constexpr,
    LEAST: tl.constexpr,
    STEP: tl.constexpr,
    LOG: tl.constexpr,
):
    """Store the softmax of a slice."""
    scale = 1 / s
    log = tl.log(s)
    for c in tl.static_range(len(words)):
        d = _numbers(words[c], dtype) - m
        y = d - log if LOG else _exp(d) * scale
        _softmax_store(y_ptr, y, c, place, _full(c, y.numel, LEAST, STEP), STEP)


@triton.jit
def _softmax_fwd_shared(
    x_ptr,  # (M, N), contiguous
    y_ptr,  # (M, N)
    words_ptr,  # (M, SLICES), empty
    M,  # rows
    N: tl.constexpr,  # columns
    WIDTH: tl.constexpr,  # lanes of a slice
    SLICES: tl.constexpr,  # slices of a row
    PADDED: tl.constexpr,  # a power of two, at least SLICES
    PAIRS: tl.constexpr,  # threads
    STEP: tl.constexpr,  # elements of 16 bytes, or 1 if all rows begin there
    LOG: tl.constexpr,  # whether y is the logarithm of softmax
    PTX: tl.constexpr,  # False: in the interpreter
):
    LEAST: tl.constexpr = N - (SLICES - 1) * WIDTH  # of the last slice
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    part = tl.program_id(0) % SLICES
    first = tl.program_id(0) // SLICES
    groups = tl.num_programs(0) // SLICES

    # The first row: only publish.
    before = _softmax_place(first, part, N, WIDTH, STEP)
    waits = _load_words(x_ptr, before, PAIRS, WIDTH, LEAST)
    m, s = _pair(waits, before, dtype, LEAST, STEP)
    _softmax_publish(words_ptr, first, part, m, s, SLICES)

    for row in tl.range(first + groups, M, groups, num_stages=1):
        # Load the next row.
        place = _softmax_place(row, part, N, WIDTH, STEP)
        words = _load_words(x_ptr, place, PAIRS, WIDTH, LEAST)

        # Finish the row before.
        ms, sums = _softmax_collect(words_ptr, row - groups, SLICES, PADDED, PTX)
        top, total = _row_pair(ms, sums)
        _softmax_finish(waits, top, total, y_ptr, before, dtype, LEAST, STEP, LOG)

        # Tell the others about the next row.
        m, s = _pair(words, place, dtype, LEAST, STEP)
        _softmax_publish(words_ptr, row, part, m, s, SLICES)
        waits = words
        before = place

    # Finish the last row of the group.
    last = first + (M - 1 - first) // groups * groups
    ms, sums = _softmax_collect(words_ptr, last, SLICES, PADDED, PTX)
    top, total = _row_pair(ms, sums)
    _softmax_finish(waits, top, total, y_ptr, before, dtype, LEAST, STEP, LOG)


SOFTMAX_WARP = 32 if ON_GPU else 1  # threads; without a GPU small rows have slices


def softmax_plan_shared(backward, row_bytes):
    """Warps of a program, programs on an SM, chunks of a slice."""
    if backward:
        if 2**17 < row_bytes <= 2**18:
            return 2, 12, 4
        return 4, 6, 4
    if row_bytes <= 2**19:
        return 4, 8, 4
    return 4, 4, 8


def softmax_cut(N, each, warps, chunks):
    """How many slices a row has, and how many lanes each of them."""
    lanes = N
    if N % each > 0:
        lanes += each - 1  # before a row that begins anywhere
    most = chunks * SOFTMAX_WARP * warps * each
    slices = triton.cdiv(lanes, most)
    # All slices as wide as each other, in steps of 8 lanes.
    width = triton.cdiv(triton.cdiv(lanes, slices), 8) * 8
    return triton.cdiv(lanes, width), width


def aligned(matrix):
    """The matrix, or a copy of it if it does not begin at 16 bytes."""
    if matrix.data_ptr() % 16 > 0:
        return matrix.clone()
    return matrix


def launch_shared(kernel, plan, matrix, log, **pointers):
    """Launch programs that share rows; say whether the GPU has room for them.

    matrix is one of those that are read.
    """
    warps, per_sm, chunks = plan
    N = matrix.shape[-1]
    M = matrix.numel() // N
    each = 16 // matrix.itemsize
    slices, width = softmax_cut(N, each, warps, chunks)
    # At least one group, and not more groups than rows.
    groups = min(max(SOFTMAX_NUM_SMS * per_sm // slices, 1), M)
    return softmax_together(
        kernel,
        programs=groups * slices,
        per_sm=per_sm,
        warps=warps,
        words_ptr=softmax_empty_words(M, slices),
        M=M,
        N=N,
        WIDTH=width,
        SLICES=slices,
        PADDED=triton.next_power_of_2(slices),
        PAIRS=SOFTMAX_WARP * warps,
        STEP=each if N % each > 0 else 1,
        LOG=log,
        **pointers,
    )


def in_slices(x, log=False, dtype=None):
    """Softmax of the last dimension in shared rows; None if programs do not
    fit."""
    x = aligned(x)
    y = torch.empty_like(x, dtype=dtype)
    plan = softmax_plan_shared(False, x.shape[-1] * x.itemsize)
    launched = launch_shared(
        _softmax_fwd_shared, plan, x, log, x_ptr=x, y_ptr=y
    )
    if not launched:
        return None
    return y


@triton.jit
def _dot(
    ys,  # a slice of y
    dys,  # a slice of dy
    place,
    dtype: tl.constexpr,
    LEAST: tl.constexpr,
    STEP: tl.constexpr,
    LOG: tl.constexpr,
):
    """The sum of y * dy over a slice, or that of dy."""
    total = tl.zeros((ys[0].shape[0],), tl.float32)
    for c in tl.static_range(len(ys)):
        term = _numbers(dys[c], dtype)
        term = term if LOG else term * _numbers(ys[c], dtype)
        term = _only(
            term, c, place, 0.0, _full(c, term.numel, LEAST, STEP), STEP
        )
        total += tl.sum(term, 1)
    return tl.sum(total, 0)


@triton.jit
def _finish_gradient(
    ys,  # a slice of y that has waited
    dys,  # a slice of dy that has waited
    total,  # c of its row
    dx_ptr,
    place,
    dtype: tl.constexpr,
    LEAST: tl.constexpr,
    STEP: tl.constexpr,
    LOG: tl.constexpr,
):
    """Store dx of a slice."""
    for c in tl.static_range(len(ys)):
        y = _numbers(ys[c], dtype)
        dy = _numbers(dys[c], dtype)
        dx = dy - _exp(y) * total if LOG else y * (dy - total)
        _softmax_store(dx_ptr, dx, c, place, _full(c, dx.numel, LEAST, STEP), STEP)


@triton.jit
def _softmax_bwd_shared(
    y_ptr,  # (M, N), contiguous: from the forward pass
    dy_ptr,  # (M, N), contiguous
    dx_ptr,  # (M, N)
    words_ptr,  # (M, SLICES), empty
    M,  # rows
    N: tl.constexpr,  # columns
    WIDTH: tl.constexpr,  # lanes of a slice
    SLICES: tl.constexpr,  # slices of a row
    PADDED: tl.constexpr,  # a power of two, at least SLICES
    PAIRS: tl.constexpr,  # threads
    STEP: tl.constexpr,  # elements of 16 bytes, or 1 if all rows begin there
    LOG: tl.constexpr,  # whether y is the logarithm of softmax
    PTX: tl.constexpr,  # False: in the interpreter
):
    LEAST: tl.constexpr = N - (SLICES - 1) * WIDTH  # of the last slice
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    part = tl.program_id(0) % SLICES
    first = tl.program_id(0) // SLICES
    groups = tl.num_programs(0) // SLICES

    # The first row: only publish.
    before = _softmax_place(first, part, N, WIDTH, STEP)
    y_waits = _load_words(y_ptr, before, PAIRS, WIDTH, LEAST)
    dy_waits = _load_words(dy_ptr, before, PAIRS, WIDTH, LEAST)
    total = _dot(y_waits, dy_waits, before, dtype, LEAST, STEP, LOG)
    _softmax_publish(words_ptr, first, part, total, total, SLICES)

    for row in tl.range(first + groups, M, groups, num_stages=1):
        # Load the next row.
        place = _softmax_place(row, part, N, WIDTH, STEP)
        ys = _load_words(y_ptr, place, PAIRS, WIDTH, LEAST)
        dys = _load_words(dy_ptr, place, PAIRS, WIDTH, LEAST)

        # Finish the row before.
        _, sums = _softmax_collect(words_ptr, row - groups, SLICES, PADDED, PTX)
        c = tl.sum(sums, 0)
        _finish_gradient(
            y_waits, dy_waits, c, dx_ptr, before, dtype, LEAST, STEP, LOG
        )

        # Tell the others about the next row.
        total = _dot(ys, dys, place, dtype, LEAST, STEP, LOG)
        _softmax_publish(words_ptr, row, part, total, total, SLICES)
        y_waits = ys
        dy_waits = dys
        before = place

    # Finish the last row of the group.
    last = first + (M - 1 - first) // groups * groups
    _, sums = _softmax_collect(words_ptr, last, SLICES, PADDED, PTX)
    c = tl.sum(sums, 0)
    _finish_gradient(
        y_waits, dy_waits, c, dx_ptr, before, dtype, LEAST, STEP, LOG
    )


def backward_in_slices(y, dy, log=False, dtype=None):
    """dx in shared rows; None if programs do not fit."""
    y = aligned(y)
    dy = aligned(dy)
    dx = torch.empty_like(y, dtype=dtype)
    plan = softmax_plan_shared(True, y.shape[-1] * y.itemsize)
    launched = launch_shared(
        _softmax_bwd_shared, plan, y, log, y_ptr=y, dy_ptr=dy, dx_ptr=dx
    )
    if not launched:
        return None
    return dx


def softmax_can_share(backward, dtype, x):
    """Whether shared rows take it; dtype is that of the result."""
    N = x.shape[-1]
    warps, per_sm, chunks = softmax_plan_shared(backward, N * x.itemsize)
    slices, _ = softmax_cut(N, 16 // x.itemsize, warps, chunks)
    return (
        ON_GPU == SOFTMAX_CUDA
        and dtype != torch.float64
        and slices <= SOFTMAX_NUM_SMS * per_sm
    )


def softmax_pick(backward, dtype, x):
    """The form that the rule takes."""
    N = x.shape[-1]
    row_bytes = N * x.itemsize
    most_swept = 65536 if backward else 131072
    if row_bytes > most_swept and softmax_can_share(backward, dtype, x):
        return "slices"
    if backward:
        return "page 03"
    if N % (16 // x.itemsize) > 0 and row_bytes > 32768:
        return "shifted"
    if TWO_ROWS < 2 * row_bytes <= 2 * 131072:
        return "shifted"
    return "page 03"


def run_forward(x, log, dtype, kind=None):
    # Triton starts a kernel on the current GPU, wherever its tensors are.
    if x.is_cuda and x.get_device() != torch.cuda.current_device():
        raise ValueError(f"input is on {x.device}: not the current one")
    if x.numel() == 0:
        return torch.empty_like(x, dtype=dtype)
    if kind is None:
        kind = softmax_pick(False, dtype, x)
    if kind == "page 03":
        return softmax_forward(x, log, dtype)
    y = None
    if kind == "slices":
        y = in_slices(x, log, dtype)
    if y is None:  # also if programs do not fit
        y = in_shifted(x, log, dtype)
    return y


def run_backward(y, dy, log, dtype, kind=None):
    if y.numel() == 0:
        return torch.empty_like(y, dtype=dtype)
    if kind is None:
        kind = softmax_pick(True, y.dtype, y)
    dx = None
    if kind == "slices":
        dx = backward_in_slices(y, dy, log, dtype)
    if dx is None:
        dx = softmax_backward(y, dy, log, dtype)
    return dx


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


class Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, log, dtype, kinds=(None, None)):
        forward_kind, backward_kind = kinds
        if torch.compiler.is_compiling():
            y = operator(x, log, dtype)
        else:
            y = run_forward(x, log, dtype, forward_kind)
        ctx.save_for_backward(y)
        ctx.log = log
        ctx.dtype = x.dtype
        ctx.kind = backward_kind
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable  # no second derivatives
    def backward(ctx, dy):
        (y,) = ctx.saved_tensors
        dy = dy.contiguous()
        if torch.compiler.is_compiling():
            dx = operator_bwd(y, dy, ctx.log, ctx.dtype)
        else:
            dx = run_backward(y, dy, ctx.log, ctx.dtype, ctx.kind)
        return dx, None, None, None


def softmax(input, dim=-1, dtype=None):
    """Powers of e, over their sum along a dimension."""
    return along(input, dim, dtype, log=False)


def log_softmax(input, dim=-1, dtype=None):
    """The logarithm of softmax."""
    return along(input, dim, dtype, log=True)


def along(input, dim, dtype, log):
    """Either function: check the arguments, and make the dimension the last
    one of a contiguous tensor."""
    if dtype is None:
        dtype = input.dtype
    if not dtype.is_floating_point or dtype.itemsize == 1:
        raise TypeError(f"{dtype}: input or dtype is a float of 16 to 64 bits")
    if input.device.type != DEVICE.type:
        raise ValueError(f"input is on {input.device}: it goes on {DEVICE}")
    x = torch.atleast_1d(input)
    # The kernels widen a float, and PyTorch does all other conversions.
    if not x.is_floating_point() or not 2 <= x.itemsize < dtype.itemsize:
        x = x.to(dtype)
    x = x.movedim(dim, -1).contiguous()
    y = Softmax.apply(x, log, dtype)
    return y.movedim(-1, dim).reshape(input.shape)


# attention/04-rotary ----------------------------------------------------------
# Gives tables, rotary_embedding, rotary_embedding_, rotate_query_and_key.


def tables(length, dimension, base=10000.0):
    """cos and sin of all angles, as (length, dimension / 2) in float32."""
    pair = torch.arange(dimension // 2, dtype=torch.float64, device=DEVICE)
    position = torch.arange(length, dtype=torch.float64, device=DEVICE)
    angle = position[:, None] * base ** (-2 * pair / dimension)
    return angle.cos().float(), angle.sin().float()


@triton.jit
def _turn(a, b, cos, sin):
    return a * cos - b * sin, b * cos + a * sin


@triton.jit
def _rotate_heads(
    x,  # a tensor, its result, its heads, and the strides of both
    group,  # which HEADS heads are ours, counted through all sequences
    row,  # our positions, (ROWS, 1), in 64 bits
    length,  # positions that exist
    cos,  # their angles, (ROWS, PAIRS)
    sin,
    HALF: tl.constexpr,  # pairs of a row; PAIRS is the next power of two
    HEADS: tl.constexpr,  # heads of a program
    INTERLEAVED: tl.constexpr,
    BACK: tl.constexpr,  # turn back
):
    x_ptr, y_ptr, heads = x[0], x[1], x[2]
    x_batch, x_head, x_row, x_column = x[3], x[4], x[5], x[6]
    y_batch, y_head, y_row, y_column = x[7], x[8], x[9], x[10]
    ROWS: tl.constexpr = cos.shape[0]
    PAIRS: tl.constexpr = cos.shape[1]

    # Our first head. Batch 0 has the first ones, then comes batch 1.
    lead = group.to(tl.int64) * HEADS
    x_ptr += lead // heads * x_batch + lead % heads * x_head
    y_ptr += lead // heads * y_batch + lead % heads * y_head

    # What we load at once: whole rows, or their first halves. The second
    # halves lie HALF columns further on. All in 64 bits, for strides are long.
    COLUMNS: tl.constexpr = 2 * PAIRS if INTERLEAVED else PAIRS
    EXIST: tl.constexpr = 2 * HALF if INTERLEAVED else HALF
    column = tl.arange(0, COLUMNS)[None, :].to(tl.int64)
    further = tl.full((), HALF, tl.int64)
    mask = (row < length) & (column < EXIST)
    x_at = x_ptr + row * x_row + column * x_column
    y_at = y_ptr + row * y_row + column * y_column

    # Request the pairs of all our heads. The loop is unrolled: tuples grow.
    firsts = ()
    seconds = ()
    for _ in tl.static_range(HEADS):
        a = tl.load(x_at, mask=mask, other=0)
        if INTERLEAVED:
            a, b = tl.split(a.reshape(ROWS, PAIRS, 2))
        else:
            b = tl.load(x_at + further * x_column, mask=mask, other=0)
        firsts += (a,)
        seconds += (b,)
        x_at += x_head

    # Only now touch an angle: whoever computes with a number waits for it. We
    # turn in float32, or in float64 if x has that, and round.
    wide: tl.constexpr = x_ptr.dtype.element_ty == tl.float64
    acc: tl.constexpr = tl.float64 if wide else tl.float32
    cos = cos.to(acc)
    sin = sin.to(acc)
    for i in tl.static_range(HEADS):
        a = firsts[i].to(acc)
        b = seconds[i].to(acc)
        if BACK:  # the same turn with a and b swapped goes back
            b, a = _turn(b, a, cos, sin)
        else:
            a, b = _turn(a, b, cos, sin)
        a = a.to(y_ptr.dtype.element_ty)
        b = b.to(y_ptr.dtype.element_ty)
        if INTERLEAVED:
            tl.store(y_at, tl.join(a, b).reshape(ROWS, COLUMNS), mask=mask)
        else:
            tl.store(y_at, a, mask=mask)
            tl.store(y_at + further * y_column, b, mask=mask)
        y_at += y_head


@triton.jit
def _rotary(
    q,  # a tuple: see x of _rotate_heads
    k,  # the same for another tensor; None: there is only q
    q_groups,  # groups of HEADS heads that q has, in all sequences
    groups,  # those of q and k together
    cos_ptr,  # (length, HALF), contiguous
    sin_ptr,  # the same
    length,
    HALF: tl.constexpr,  # pairs of a row
    PAIRS: tl.constexpr,  # HALF, or the next power of two
    ROWS: tl.constexpr,  # positions of a program
    HEADS: tl.constexpr,  # heads of a program
    INTERLEAVED: tl.constexpr,
    BACK: tl.constexpr,  # turn back
):
    # Programs with neighboring numbers have the same positions, and other
    # heads: the angles that one of them has loaded, the next finds in L2.
    tile = tl.program_id(0) // groups
    group = tl.program_id(0) % groups
    row = tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]

    # Request the angles, once for all our heads.
    pair = tl.arange(0, PAIRS)[None, :]
    mask = (row < length) & (pair < HALF)
    at = row * HALF + pair
    cos = tl.load(cos_ptr + at, mask=mask, other=0)
    sin = tl.load(sin_ptr + at, mask=mask, other=0)

    # Are our heads those of q or of k? Without k, only the first call is
    # compiled.
    if k is None or group < q_groups:
        _rotate_heads(
            q, group, row, length, cos, sin, HALF, HEADS, INTERLEAVED, BACK
        )
    else:
        group -= q_groups
        _rotate_heads(
            k, group, row, length, cos, sin, HALF, HEADS, INTERLEAVED, BACK
        )


ROTARY_NUM_SMS = 4
if ON_GPU:
    ROTARY_NUM_SMS = torch.cuda.get_device_properties(DEVICE).multi_processor_count


def rotary_plan(tensors):
    """The tile of a program for tensors of (batch, heads, length, D)."""
    _, _, length, dimension = tensors[0].shape
    pairs = triton.next_power_of_2(dimension // 2)
    half_row = pairs * tensors[0].itemsize  # bytes
    rows = max(1024 // half_row, 1)
    warps = min(max(half_row // 1024, 1), 8)  # one, if rows are not very wide
    tiles = triton.cdiv(length, rows)
    all_heads = sum(t.shape[0] * t.shape[1] for t in tensors)
    for heads in (8, 4, 2, 1):
        divides = all(t.shape[1] % heads == 0 for t in tensors)
        enough = heads < 8 or tiles * all_heads // heads >= 4 * ROTARY_NUM_SMS
        if divides and enough:
            break
    if heads == 8:
        warps *= 2
    return {"PAIRS": pairs, "ROWS": rows, "HEADS": heads, "num_warps": warps}


def rotate(tensors, outputs, cos, sin, interleaved=False, back=False):
    """Rotate one or two tensors of (batch, heads, length, D) into outputs.

    The outputs may be the tensors themselves. cos and sin are contiguous.
    """
    pairs = zip(tensors, outputs, strict=True)
    pairs = [(t, y) for t, y in pairs if t.numel() > 0]
    if not pairs:
        return
    sizes = rotary_plan([t for t, _ in pairs])
    # What the kernel must know of each tensor.
    known = [(t, y, t.shape[1], *t.stride(), *y.stride()) for t, y in pairs]
    groups = [t.shape[0] * t.shape[1] // sizes["HEADS"] for t, _ in pairs]
    length, half = cos.shape
    tiles = triton.cdiv(length, sizes["ROWS"])
    _rotary[(tiles * sum(groups),)](
        q=known[0],
        k=known[1] if len(known) == 2 else None,
        q_groups=groups[0],
        groups=sum(groups),
        cos_ptr=cos,
        sin_ptr=sin,
        length=length,
        HALF=half,
        INTERLEAVED=interleaved,
        BACK=back,
        **sizes,
    )


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx, cos, sin, interleaved, back, *tensors):
        """tensors are one or two of (batch, heads, length, D)."""
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        ctx.back = back
        outputs = tuple(torch.empty_like(t) for t in tensors)
        rotate(tensors, outputs, cos, sin, interleaved, back)
        return outputs

    @staticmethod
    def backward(ctx, *dys):
        cos, sin = ctx.saved_tensors
        dxs = _Rotary.apply(cos, sin, ctx.interleaved, not ctx.back, *dys)
        # The tables and the two switches have no gradient.
        return None, None, None, None, *dxs


def rotary_check_arguments(tensors, cos, sin):
    """Raise an error that names the wrong argument, and says why."""
    given = {**tensors, "cos": cos, "sin": sin}
    for name, t in given.items():
        if not t.is_floating_point() or t.itemsize == 1:
            raise TypeError(
                f"{name} has {t.dtype}: floats of 16 bits or more are taken"
            )
        if t.device.type != DEVICE.type:
            raise ValueError(f"{name} is on {t.device}, not on {DEVICE}")
        if t.is_cuda and t.device.index != torch.cuda.current_device():
            raise ValueError(
                f"{name} is on {t.device}, which is not the current GPU"
            )
    first_name, first = next(iter(tensors.items()))
    for name, t in tensors.items():
        if t.dim() < 2:
            raise ValueError(
                f"{name} has {t.dim()} dimensions: two or more are taken, and "
                "the last ones are length and dimension"
            )
        dimension = t.shape[-1]
        if dimension % 2 or not 2 <= dimension <= 1024:
            raise ValueError(
                f"the dimension of {name} is {dimension}: even numbers from 2 "
                "to 1024 are taken"
            )
        if t.dtype != first.dtype:
            raise TypeError(
                f"{name} has {t.dtype}, and {first_name} has {first.dtype}: "
                "they must be the same"
            )
        if t.shape[-2:] != first.shape[-2:]:
            raise ValueError(
                f"{name} ends in {tuple(t.shape[-2:])}, and {first_name} in "
                f"{tuple(first.shape[-2:])}: length and dimension must be the "
                "same"
            )
    length, dimension = first.shape[-2:]
    for name, t in (("cos", cos), ("sin", sin)):
        if t.shape != (length, dimension // 2):
            raise ValueError(
                f"{name} is {tuple(t.shape)}, and {first_name} needs "
                f"{(length, dimension // 2)}: length and half the dimension"
            )
        if t.requires_grad:
            raise ValueError(
                f"{name} requires a gradient: the tables are constants here"
            )


def as_four(x):
    """x as (batch, heads, length, D): a view, up to four dimensions."""
    if x.dim() > 4:
        return x.reshape(-1, *x.shape[-3:])
    return x[(None,) * (4 - x.dim())]


def rotary_embedding(x, cos, sin, interleaved=False):
    """x with its pairs rotated; both passes run in Triton.

    x is (..., length, dimension), with floats of 16 bits or more and any
    strides. cos and sin are (length, dimension / 2).
    """
    rotary_check_arguments({"x": x}, cos, sin)
    cos, sin = cos.contiguous(), sin.contiguous()
    (y,) = _Rotary.apply(cos, sin, interleaved, False, as_four(x))
    return y.reshape(x.shape)


def rotate_query_and_key(query, key, cos, sin, interleaved=False):
    """The same for a query and a key, in one launch.

    They may differ in all dimensions but the last two.
    """
    rotary_check_arguments({"query": query, "key": key}, cos, sin)
    cos, sin = cos.contiguous(), sin.contiguous()
    q, k = _Rotary.apply(
        cos, sin, interleaved, False, as_four(query), as_four(key)
    )
    return q.reshape(query.shape), k.reshape(key.shape)


class _RotaryInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin, interleaved):
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        rotate([as_four(x)], [as_four(x)], cos, sin, interleaved)
        ctx.mark_dirty(x)  # x is not what it was: autograd must know
        return x

    @staticmethod
    def backward(ctx, dy):
        # Not in place: dy belongs to somebody else.
        cos, sin = ctx.saved_tensors
        (dx,) = _Rotary.apply(cos, sin, ctx.interleaved, True, as_four(dy))
        return dx.reshape(dy.shape), None, None, None


def check_in_place(x):
    if x.dim() > 4:
        raise ValueError(
            f"x has {x.dim()} dimensions: up to four are taken in place"
        )
    sizes_and_strides = zip(x.shape, x.stride(), strict=True)
    if any(size > 1 and stride == 0 for size, stride in sizes_and_strides):
        raise ValueError("x has a stride of 0: its numbers share memory")
    if x.requires_grad and x.is_leaf and torch.is_grad_enabled():
        raise ValueError("x is a leaf that requires a gradient")


def rotary_embedding_(x, cos, sin, interleaved=False):
    """Like rotary_embedding, but x itself is rotated and returned."""
    rotary_check_arguments({"x": x}, cos, sin)
    check_in_place(x)
    cos, sin = cos.contiguous(), sin.contiguous()
    return _RotaryInPlace.apply(x, cos, sin, interleaved)


# norms-and-losses/02-rms-norm-16-bits -----------------------------------------
# Gives rms_norm, add_rms_norm.


CASTINGS = ("gemma", "llama", "none")


@triton.jit
def _norm_load(ptr, c, N: tl.constexpr, CHUNK: tl.constexpr, HINT: tl.constexpr):
    """Chunk c of the row that begins at ptr; 0 in idle lanes."""
    col = c * CHUNK + tl.arange(0, CHUNK)
    return tl.load(ptr + col, mask=col < N, other=0, eviction_policy=HINT)


@triton.jit
def _norm_store(ptr, value, c, N: tl.constexpr, CHUNK: tl.constexpr):
    """The same for a store."""
    col = c * CHUNK + tl.arange(0, CHUNK)
    tl.store(ptr + col, value, mask=col < N)


@triton.jit
def _rounded(value, dtype: tl.constexpr, YES: tl.constexpr):
    """The nearest number of another type, in the type of the value."""
    if YES:
        value = value.to(dtype).to(value.dtype)
    return value


@triton.jit
def _factor(w, offset: tl.constexpr, CASTING: tl.constexpr, acc: tl.constexpr):
    """What x_hat is multiplied by; only gemma leaves the sum unrounded."""
    return _rounded(w.to(acc) + offset, w.dtype, CASTING != "gemma")


@triton.jit
def _rms_norm_fwd(
    x_ptr,  # (M, N), contiguous
    residual_ptr,  # (M, N), or None: only normalize
    w_ptr,  # (N,)
    y_ptr,  # (M, N)
    s_ptr,  # (M, N): the sum; not written without a residual
    rstd_ptr,  # (M,): 1 / root mean square, saved for the backward pass
    eps: tl.constexpr,  # added to the mean of the squares
    offset: tl.constexpr,  # New: added to w
    CASTING: tl.constexpr,  # New: where to round
    N: tl.constexpr,  # columns
    CHUNK: tl.constexpr,  # lanes of a chunk: a power of two
):
    acc: tl.constexpr = rstd_ptr.dtype.element_ty  # float32, or float64
    half: tl.constexpr = y_ptr.dtype.element_ty  # what is rounded to
    NONE: tl.constexpr = CASTING == "none"
    row = tl.program_id(0).to(tl.int64)  # M * N may pass 2**31

    # Request the whole row before anything is stored: the compiler never
    # moves a load up over a store.
    xs = ()
    residuals = ()
    for c in tl.static_range((N + CHUNK - 1) // CHUNK):
        xs += (_norm_load(x_ptr + row * N, c, N, CHUNK, "evict_first"),)
        if residual_ptr is not None:
            residuals += (_norm_load(residual_ptr + row * N, c, N, CHUNK, ""),)

    # Add, and round to the type of the stream. The squares are those of the
    # rounded sum.
    sums = ()
    squares = tl.zeros((CHUNK,), acc)
    for c in tl.static_range(len(xs)):
        s = xs[c]
        if residual_ptr is not None:
            s = (s.to(acc) + residuals[c].to(acc)).to(residuals[c].dtype)
            _norm_store(s_ptr + row * N, s, c, N, CHUNK)
        sums += (s,)
        squares += _rounded(s.to(acc) * s.to(acc), half, NONE)

    # Idle lanes hold 0, which changes no sum.
    mean = _rounded(tl.sum(squares) / N, half, NONE)
    rstd = _rounded(tl.rsqrt(mean + eps), half, NONE)
    tl.store(rstd_ptr + row, rstd)

    # New: x_hat may be rounded before its product with w. A store rounds to
    # the type of its pointer.
    for c in tl.static_range(len(xs)):
        w = _norm_load(w_ptr, c, N, CHUNK, "evict_last")
        x_hat = _rounded(sums[c].to(acc) * rstd, half, CASTING != "gemma")
        y = x_hat * _factor(w, offset, CASTING, acc)
        _norm_store(y_ptr + row * N, y, c, N, CHUNK)


def norm_plan_forward(N, sizes):
    """sizes: bytes of an element of x and, if there is one, the residual."""
    warps = triton.next_power_of_2(triton.cdiv(N * sum(sizes), 4096))
    warps = max(warps, 4)
    chunk = min(512 // sizes[0] * warps, triton.next_power_of_2(N))
    return {"CHUNK": chunk, "num_warps": warps}


def norm_forward(x, residual, w, eps, casting, offset):
    """y, s (x without a residual) and 1 / root mean square; all contiguous."""
    N = w.numel()
    M = x.numel() // N
    y = torch.empty_like(x)
    s = x
    sizes = [x.itemsize]
    if residual is not None:
        s = torch.empty_like(residual)
        sizes.append(residual.itemsize)
    # 16-bit rows are summed in float32.
    acc = torch.promote_types(s.dtype, torch.float32)
    rstd = torch.empty(M, dtype=acc, device=x.device)
    _rms_norm_fwd[(M,)](
        x_ptr=x,
        residual_ptr=residual,
        w_ptr=w,
        y_ptr=y,
        s_ptr=s,
        rstd_ptr=rstd,
        eps=eps,
        offset=offset,
        CASTING=casting,
        N=N,
        **norm_plan_forward(N, sizes),
    )
    return y, s, rstd


@triton.jit
def _rms_norm_bwd(
    dy_ptr,  # (M, N), contiguous
    ds_ptr,  # (M, N), or None: nothing arrives from the stream
    s_ptr,  # (M, N), from the forward pass
    w_ptr,  # (N,)
    rstd_ptr,  # (M,), from the forward pass
    dx_ptr,  # (M, N), in the type of x
    dr_ptr,  # New: the same in the type of the stream, or None
    sums_ptr,  # (programs, N): what each program adds to dw
    M,  # rows
    offset: tl.constexpr,  # New: added to w
    CASTING: tl.constexpr,  # New: where the forward pass rounded
    N: tl.constexpr,  # columns
    CHUNK: tl.constexpr,  # lanes of a chunk: a power of two
    STAGES: tl.constexpr,  # how far ahead rows are requested
):
    acc: tl.constexpr = rstd_ptr.dtype.element_ty  # float32, or float64

    # w stays in registers for all rows, in its own type, beside the sums.
    ws = ()
    dws = ()
    for c in tl.static_range((N + CHUNK - 1) // CHUNK):
        ws += (_norm_load(w_ptr, c, N, CHUNK, ""),)
        dws += (tl.zeros((CHUNK,), acc),)

    for row in tl.range(
        tl.program_id(0),
        M,
        tl.num_programs(0),
        num_stages=STAGES,
        # The compiler would convert w to float32 before the loop, which takes
        # twice the registers.
        disable_licm=True,
    ):
        at = tl.cast(row, tl.int64) * N
        rstd = tl.load(rstd_ptr + row)

        # Load the row, and add up s * f * dy for c.
        ss = ()
        dys = ()
        total = tl.zeros((CHUNK,), acc)
        for c in tl.static_range(len(ws)):
            ss += (_norm_load(s_ptr + at, c, N, CHUNK, ""),)
            dys += (_norm_load(dy_ptr + at, c, N, CHUNK, ""),)
            f_dy = dys[c].to(acc) * _factor(ws[c], offset, CASTING, acc)
            total += ss[c].to(acc) * f_dy

        # c * rstd**2, computed from the left: rstd**3 alone may be more than
        # float32 holds.
        a = tl.sum(total) / N * rstd * rstd * rstd

        # An element of a tuple cannot be replaced, so sums go into a new one.
        sums = ()
        for c in tl.static_range(len(ws)):
            s = ss[c].to(acc)
            scaled = dys[c].to(acc) * rstd
            sums += (dws[c] + scaled * s,)
            dx = scaled * _factor(ws[c], offset, CASTING, acc)
            if ds_ptr is not None:
                dx += _norm_load(ds_ptr + at, c, N, CHUNK, "").to(acc)
            # A store rounds to the type of its pointer.
            _norm_store(dx_ptr + at, dx - s * a, c, N, CHUNK)
            if dr_ptr is not None:
                _norm_store(dr_ptr + at, dx - s * a, c, N, CHUNK)
        dws = sums

    for c in tl.static_range(len(dws)):
        _norm_store(sums_ptr + tl.program_id(0) * N, dws[c], c, N, CHUNK)


NORM_GPU = torch.cuda.get_device_properties(DEVICE) if ON_GPU else None
NORM_NUM_SMS = NORM_GPU.multi_processor_count if ON_GPU else 4
NORM_SHARED = getattr(NORM_GPU, "shared_memory_per_block_optin", 65536)


def norm_plan_backward(N, sizes):
    """sizes: bytes of an element of s, dy and, if there is one, ds."""
    warps = 8
    if N * sizes[0] <= 8192:
        warps = 4
    programs_on_an_sm = 8 // warps
    chunk = min(512 // sizes[1] * warps, triton.next_power_of_2(N))
    row_bytes = triton.cdiv(N, chunk) * chunk * sum(sizes)
    ahead = min((NORM_SHARED - 4096) // (row_bytes * programs_on_an_sm), 3)
    plan = {"CHUNK": chunk, "STAGES": 1 + ahead, "num_warps": warps}
    return programs_on_an_sm, plan


def norm_backward(dy, ds, s, w, rstd, casting, offset):
    """dx, the gradient of the residual, and dw; ds may be None."""
    M = rstd.numel()
    N = w.numel()
    dx = torch.empty_like(dy)
    dr = None
    if s.dtype != dy.dtype:
        dr = torch.empty_like(s)
    sizes = [t.itemsize for t in (s, dy, ds) if t is not None]
    programs_on_an_sm, plan = norm_plan_backward(N, sizes)
    rounds = triton.cdiv(M, NORM_NUM_SMS * programs_on_an_sm)
    programs = triton.cdiv(M, max(rounds, 1))
    sums = torch.empty(programs, N, dtype=rstd.dtype, device=s.device)
    _rms_norm_bwd[(programs,)](
        dy_ptr=dy,
        ds_ptr=ds,
        s_ptr=s,
        w_ptr=w,
        rstd_ptr=rstd,
        dx_ptr=dx,
        dr_ptr=dr,
        sums_ptr=sums,
        M=M,
        offset=offset,
        CASTING=casting,
        N=N,
        **plan,
    )
    dw = sums.sum(dim=0).reshape(w.shape)
    if dr is None:
        dr = dx
    return dx, dr, dw


class Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, residual, w, eps, casting, offset):
        y, s, rstd = norm_forward(x, residual, w, eps, casting, offset)
        ctx.save_for_backward(s, w, rstd)
        ctx.casting = casting
        ctx.offset = offset
        # A result that nobody used has the gradient None, not zeros.
        ctx.set_materialize_grads(False)
        if residual is None:
            return y
        return y, s

    @staticmethod
    @torch.autograd.function.once_differentiable  # no second derivatives
    def backward(ctx, dy, ds=None):
        if dy is None:  # only s was used, and it is a sum
            return ds, ds, None, None, None, None
        s, w, rstd = ctx.saved_tensors
        dy = dy.contiguous()
        if ds is not None:
            ds = ds.contiguous()
        dx, dr, dw = norm_backward(dy, ds, s, w, rstd, ctx.casting, ctx.offset)
        if not ctx.needs_input_grad[1]:
            dr = None
        # One gradient for each argument; the last three have none.
        return dx, dr, dw, None, None, None


def norm_check_arguments(x, residual, shape, weight, eps, casting):
    """Raise an error that names the wrong argument, and says why."""
    last_dimensions = x.shape[: x.dim() - len(shape)] + shape
    wanted = {"x": last_dimensions, "residual": x.shape, "weight": shape}
    tensors = {"x": x, "residual": residual, "weight": weight}
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        wrong = not tensor.is_floating_point() or tensor.itemsize < 2
        if name == "residual" and not wrong:  # of the type of x, or wider
            both = torch.promote_types(x.dtype, tensor.dtype)
            wrong = both != tensor.dtype
        if wrong:
            raise TypeError(f"{name} is {tensor.dtype}, and x is {x.dtype}")
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
    if x.is_cuda and x.device.index != torch.cuda.current_device():
        raise ValueError(f"x is on {x.device}: not the current one")
    if not eps >= 0:  # negative, or NaN
        raise ValueError(f"eps is {eps}: it must be 0 or more")
    if casting not in CASTINGS:
        raise ValueError(f"casting is {casting}: it must be one of {CASTINGS}")
    N = 0
    if len(shape) > 0:
        N = shape.numel()
    most = 16384 // x.itemsize
    if not 0 < N <= most:
        raise ValueError(
            f"normalized_shape has {N} columns: this page takes 1 to {most}"
        )


def rms_norm(
    x,
    normalized_shape,
    weight=None,
    eps=None,
    casting="gemma",
    offset=0.0,
    residual=None,
):
    """x over its root mean square, times offset + weight.

    casting says where to round, and is one of CASTINGS. With a residual, the
    sum of both is normalized and returned, too: y, s.
    """
    if isinstance(normalized_shape, int):
        normalized_shape = [normalized_shape]
    shape = torch.Size(normalized_shape)
    if eps is None:  # as PyTorch does
        acc = torch.promote_types(x.dtype, torch.float32)
        eps = torch.finfo(acc).eps
    eps = float(eps)
    norm_check_arguments(x, residual, shape, weight, eps, casting)
    if weight is None:
        weight = x.new_ones(shape)
        offset = 0.0
    if residual is not None:
        residual = residual.contiguous()
    x = x.contiguous()
    weight = weight.contiguous()
    return Norm.apply(x, residual, weight, eps, casting, float(offset))


def add_rms_norm(x, residual, *args, **options):
    """The pair y, s: s = x + residual, and y = rms_norm(s)."""
    if residual is None:
        raise TypeError("residual is None: rms_norm takes none")
    return rms_norm(x, *args, residual=residual, **options)


# attention/07-programs-that-stay ----------------------------------------------
# Gives attention.


# From Triton 3.9 on these two have shorter names.
FETCH = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
STORE = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


ATTENTION_LOG2E = 1.4426950408889634  # the logarithm of e, to the base 2


def width_of(D):
    """Columns of a tile for rows of D numbers: a power of two, at least 16,
    which is the least that a product of tiles takes."""
    return max(triton.next_power_of_2(D), 16)


def rows_like(t):
    """An empty tensor of the same shape and order of dimensions, whose rows
    begin at multiples of 16 bytes."""
    D = t.shape[-1]
    unit = 16 // t.itemsize
    padded = triton.cdiv(D, unit) * unit
    # The dimension with the largest stride comes first in memory.
    order = sorted(range(3), key=lambda dimension: -t.stride(dimension))
    shape = [t.shape[dimension] for dimension in order]
    memory = torch.empty(*shape, padded, dtype=t.dtype, device=t.device)
    places = [order.index(dimension) for dimension in range(3)]
    return memory.permute(*places, 3)[..., :D]


def attention_for_descriptors(t):
    """The tensor, or a copy of it that a descriptor takes."""
    aligned = t.data_ptr() % 16 == 0 and t.stride(-1) == 1
    for stride in t.stride()[:-1]:
        # A stride of 0, as an expanded tensor has it, is copied, too.
        if stride <= 0 or stride * t.itemsize % 16:
            aligned = False
    if aligned:
        return t
    return rows_like(t).copy_(t)


def tiles_of(t, rows):
    """A descriptor of (batch, heads, length, D), in tiles of so many rows."""
    tile = [1, 1, rows, width_of(t.shape[-1])]
    return TensorDescriptor.from_tensor(t, tile)


ATTENTION_TILES = {
    # width: queries, keys, warps and stages; then the same if causal
    16: ((128, 64, 4, 3), (128, 64, 4, 3)),
    32: ((128, 64, 4, 3), (128, 64, 4, 3)),
    64: ((64, 128, 4, 2), (64, 128, 4, 2)),
    128: ((128, 64, 4, 2), (64, 64, 4, 3)),
    256: ((128, 64, 8, 2), (128, 64, 8, 2)),
}

OWN_AND_STEP = {
    # width: what a program owns, what it takes in a step, warps, stages
    16: (64, 64, 4, 3),
    32: (64, 64, 4, 3),
    64: (64, 64, 4, 3),
    128: (64, 64, 4, 2),
    256: (64, 32, 8, 2),
}


def small_tiles(dtype):
    """Whether operands lie in registers: in float32, and without a TMA."""
    if dtype == torch.float32:
        return True
    if not ON_GPU:
        return False  # the interpreter has no registers
    if torch.version.hip is not None:
        return True
    return torch.cuda.get_device_capability()[0] < 9


def options(tile_q, tile_k, warps, stages, dtype, D):
    """Constants of a kernel that depend on the type and the width of rows."""
    precision = None  # what a GPU does by itself; 16 bits need no choice
    if dtype == torch.float32 and torch.version.hip is None:
        precision = "tf32x3"
    return {
        "DIM": width_of(D),
        "TILE_Q": tile_q,
        "TILE_K": tile_k,
        "PRECISION": precision,
        "STAGES": stages,
        "num_warps": warps,
    }


def attention_plan_forward(dtype, D, is_causal):
    if small_tiles(dtype):
        return options(16, 32, 8, 2, dtype, D)
    usual, causal = ATTENTION_TILES[width_of(D)]
    tiles = causal if is_causal else usual
    return options(*tiles, dtype, D)


def attention_plan_backward(dtype, D):
    """For the kernel of the queries, and for that of the keys."""
    own, step, warps, stages = OWN_AND_STEP[width_of(D)]
    if small_tiles(dtype):
        own, step, warps, stages = 16, 16, 8, 2
    return (
        options(own, step, warps, stages, dtype, D),
        options(step, own, warps, stages, dtype, D),
    )


def empty_lse(query, is_causal):
    """(batch, heads, rows): room for whole tiles of queries."""
    batch, heads, queries, D = query.shape
    tile_q = attention_plan_forward(query.dtype, D, is_causal)["TILE_Q"]
    rows = triton.cdiv(queries, tile_q) * tile_q
    return query.new_empty(batch, heads, rows, dtype=torch.float32)


@triton.jit
def _attend(
    maximum,  # of each query, as the next two
    total,
    weighted,
    q,
    k_desc,
    v_desc,
    batch,
    head,  # of the keys
    start,  # the first key of the tile
    limit,  # how many keys a query sees: a column, or one number for all
    scale,
    DIM: tl.constexpr,
    TILE_K: tl.constexpr,
    MASK: tl.constexpr,  # whether some query does not see all of the tile
    PRECISION: tl.constexpr,  # of products of float32
):
    """The sums of a tile of queries, with one tile of keys more."""
    k = k_desc.load([batch, head, start, 0]).reshape(TILE_K, DIM)
    score = tl.dot(q, k.T, input_precision=PRECISION)
    if MASK:
        key = start + tl.arange(0, TILE_K)
        score = tl.where(key[None, :] < limit, score, float("-inf"))
    new = tl.maximum(maximum, tl.max(score, axis=1) * scale)
    power = tl.exp2(score * scale - new[:, None])
    shrink = tl.exp2(maximum - new)
    total = total * shrink + tl.sum(power, axis=1)
    weighted = weighted * shrink[:, None]
    v = v_desc.load([batch, head, start, 0]).reshape(TILE_K, DIM)
    power = power.to(v.dtype)
    weighted = tl.dot(power, v, weighted, input_precision=PRECISION)
    return new, total, weighted


@triton.jit(do_not_specialize=["heads", "queries", "keys"])
def _any_attention_fwd(
    q_desc,  # (batch, heads, queries, up to DIM), in tiles of TILE_Q queries
    k_desc,  # (batch, heads / GROUP, keys, up to DIM), in tiles of TILE_K
    v_desc,  # as k_desc
    y_desc,  # as q_desc
    lse_ptr,  # (batch, heads, rows): saved for the backward pass
    rows,  # queries, and those that only fill the last tile
    heads,  # of the queries
    queries,
    keys,
    scale,  # that of the scores, times LOG2E
    GROUP: tl.constexpr,  # heads of queries that share a head of keys
    CAUSAL: tl.constexpr,
    RAGGED: tl.constexpr,  # not causal, and the last tile of keys is not full
    DIM: tl.constexpr,  # width of a tile: the head dimension, or more
    TILE_Q: tl.constexpr,  # queries of a program
    TILE_K: tl.constexpr,  # keys of a step
    PRECISION: tl.constexpr,  # of products of float32
    STAGES: tl.constexpr,
):
    # Which queries are ours? In causal attention we count tiles from the end.
    tiles = tl.cdiv(queries, TILE_Q)
    tile = tl.program_id(0) % tiles
    if CAUSAL:
        tile = tiles - 1 - tile
    first = tile * TILE_Q
    query = first + tl.arange(0, TILE_Q)
    lead = tl.program_id(0) // tiles
    batch = lead // heads
    head = lead % heads
    k_head = head // GROUP

    # How many keys does each of them see? Below ``whole`` all of them see all
    # keys, and from ``end`` on none of them sees any.
    limit = keys
    whole = keys // TILE_K * TILE_K
    end = keys
    if CAUSAL:
        limit = tl.minimum(query + 1, keys)[:, None]
        whole = tl.minimum(first // TILE_K * TILE_K, whole)
        end = tl.minimum(first + TILE_Q, keys)

    q = q_desc.load([batch, head, first, 0]).reshape(TILE_Q, DIM)
    maximum = tl.full((TILE_Q,), float("-inf"), tl.float32)
    total = tl.zeros((TILE_Q,), tl.float32)
    weighted = tl.zeros((TILE_Q, DIM), tl.float32)

    # Tiles that all of our queries see, without a mask. Key 0 is in the first
    # tile of whichever loop comes first, and every query sees it: so no
    # maximum stays infinite.
    for start in tl.range(0, whole, TILE_K, num_stages=STAGES):
        maximum, total, weighted = _attend(
            maximum, total, weighted, q, k_desc, v_desc, batch, k_head, start,
            limit, scale, DIM, TILE_K, False, PRECISION,
        )  # fmt: skip

    # Tiles on the diagonal, or the one that is not full.
    if CAUSAL:
        for start in tl.range(whole, end, TILE_K, num_stages=STAGES):
            maximum, total, weighted = _attend(
                maximum, total, weighted, q, k_desc, v_desc, batch, k_head,
                start, limit, scale, DIM, TILE_K, True, PRECISION,
            )  # fmt: skip
    elif RAGGED:
        maximum, total, weighted = _attend(
            maximum, total, weighted, q, k_desc, v_desc, batch, k_head, whole,
            limit, scale, DIM, TILE_K, True, PRECISION,
        )  # fmt: skip

    y = (weighted / total[:, None]).to(y_desc.dtype)
    y_desc.store([batch, head, first, 0], y.reshape(1, 1, TILE_Q, DIM))
    at = lead.to(tl.int64) * rows + query  # may pass 2**31
    tl.store(lse_ptr + at, maximum + tl.log2(total))


def plain_forward(
    query, key, value, is_causal, scale, kernel=_any_attention_fwd
):
    """The results, and a log-sum-exp for each query."""
    batch, heads, queries, D = query.shape
    _, k_heads, keys, _ = key.shape
    plan = attention_plan_forward(query.dtype, D, is_causal)
    tile_q = plan["TILE_Q"]
    tile_k = plan["TILE_K"]
    tiles = triton.cdiv(queries, tile_q)
    y = rows_like(query)
    lse = empty_lse(query, is_causal)
    if y.numel() == 0:
        return y, lse
    if keys == 0:  # nothing to attend to
        return y.zero_(), lse.zero_()
    kernel[(tiles * batch * heads,)](
        q_desc=tiles_of(attention_for_descriptors(query), tile_q),
        k_desc=tiles_of(attention_for_descriptors(key), tile_k),
        v_desc=tiles_of(attention_for_descriptors(value), tile_k),
        y_desc=tiles_of(y, tile_q),
        lse_ptr=lse,
        rows=lse.shape[-1],
        heads=heads,
        queries=queries,
        keys=keys,
        scale=scale * ATTENTION_LOG2E,
        GROUP=heads // k_heads,
        CAUSAL=is_causal,
        RAGGED=not is_causal and keys % tile_k > 0,
        **plan,
    )
    return y, lse


@triton.jit
def _step_of_queries(
    dq,
    q,
    dy,
    lse,
    delta,
    k_desc,
    v_desc,
    batch,
    head,  # of the keys
    start,  # the first key of the tile
    limit,  # how many keys a query sees: a column, or one number for all
    scale,
    DIM: tl.constexpr,
    TILE_K: tl.constexpr,
    MASK: tl.constexpr,  # whether some query does not see all of the tile
    PRECISION: tl.constexpr,  # of products of float32
):
    """dq of a tile of queries, with one tile of keys more."""
    k = k_desc.load([batch, head, start, 0]).reshape(TILE_K, DIM)
    score = tl.dot(q, k.T, input_precision=PRECISION)
    # New: dp before the powers.
    v = v_desc.load([batch, head, start, 0]).reshape(TILE_K, DIM)
    dp = tl.dot(dy, v.T, input_precision=PRECISION)
    if MASK:
        key = start + tl.arange(0, TILE_K)
        score = tl.where(key[None, :] < limit, score, float("-inf"))
    p = tl.exp2(score * scale - lse[:, None])
    ds = (p * (dp - delta[:, None])).to(k.dtype)
    return tl.dot(ds, k, dq, input_precision=PRECISION)


@triton.jit
def _step_of_keys(
    dk,
    dv,
    k,
    v,
    q_desc,
    dy_desc,
    lse_ptr,  # of the first query of this head, as delta_ptr
    delta_ptr,
    batch,
    head,  # of the queries
    start,  # the first query of the tile
    key,  # the indices of our keys
    scale,
    DIM: tl.constexpr,
    TILE_Q: tl.constexpr,
    MASK: tl.constexpr,  # whether some query does not see all of our keys
    PRECISION: tl.constexpr,  # of products of float32
):
    """dk and dv of a tile of keys, with one tile of queries more."""
    q = q_desc.load([batch, head, start, 0]).reshape(TILE_Q, DIM)
    query = start + tl.arange(0, TILE_Q)
    score = tl.dot(k, q.T, input_precision=PRECISION)
    lse = tl.load(lse_ptr + query)
    if MASK:
        seen = key[:, None] <= query[None, :]
        score = tl.where(seen, score, float("-inf"))
    p = tl.exp2(score * scale - lse[None, :])
    # New: dp before dv.
    dy = dy_desc.load([batch, head, start, 0]).reshape(TILE_Q, DIM)
    dp = tl.dot(v, dy.T, input_precision=PRECISION)
    dv = tl.dot(p.to(dy.dtype), dy, dv, input_precision=PRECISION)
    delta = tl.load(delta_ptr + query)
    ds = (p * (dp - delta[None, :])).to(q.dtype)
    dk = tl.dot(ds, q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=["heads", "queries", "keys"])
def _any_attention_bwd_queries(
    q_desc,  # (batch, heads, queries, up to DIM), in tiles of TILE_Q queries
    k_desc,  # (batch, heads / GROUP, keys, up to DIM), in tiles of TILE_K
    v_desc,  # as k_desc
    y_desc,  # as q_desc, and so are the next two
    dy_desc,
    dq_desc,
    lse_ptr,  # (batch, heads, rows)
    delta_ptr,  # (batch, heads, rows): stored for the other kernel
    rows,  # queries, and those that only fill the last tile
    heads,  # of the queries
    queries,
    keys,
    scale,  # that of the scores alone, for dq
    log2e,  # LOG2E, for the powers of 2
    GROUP: tl.constexpr,  # heads of queries that share a head of keys
    CAUSAL: tl.constexpr,
    RAGGED: tl.constexpr,  # not causal, and the last tile of keys is not full
    DIM: tl.constexpr,  # width of a tile: the head dimension, or more
    TILE_Q: tl.constexpr,  # queries of a program
    TILE_K: tl.constexpr,  # keys of a step
    PRECISION: tl.constexpr,  # of products of float32
    STAGES: tl.constexpr,
):
    # Which queries are ours, and which keys do they see? As in the forward
    # kernel.
    tiles = tl.cdiv(queries, TILE_Q)
    tile = tl.program_id(0) % tiles
    if CAUSAL:
        tile = tiles - 1 - tile
    first = tile * TILE_Q
    query = first + tl.arange(0, TILE_Q)
    lead = tl.program_id(0) // tiles
    batch = lead // heads
    head = lead % heads
    k_head = head // GROUP
    limit = keys
    whole = keys // TILE_K * TILE_K
    end = keys
    if CAUSAL:
        limit = tl.minimum(query + 1, keys)[:, None]
        whole = tl.minimum(first // TILE_K * TILE_K, whole)
        end = tl.minimum(first + TILE_Q, keys)

    # delta, for us and for the kernel of the keys.
    y = y_desc.load([batch, head, first, 0]).reshape(TILE_Q, DIM)
    dy = dy_desc.load([batch, head, first, 0]).reshape(TILE_Q, DIM)
    delta = tl.sum(y.to(tl.float32) * dy.to(tl.float32), axis=1)
    at = lead.to(tl.int64) * rows + query
    tl.store(delta_ptr + at, delta)

    q = q_desc.load([batch, head, first, 0]).reshape(TILE_Q, DIM)
    lse = tl.load(lse_ptr + at)
    dq = tl.zeros((TILE_Q, DIM), tl.float32)
    for start in tl.range(0, whole, TILE_K, num_stages=STAGES):
        dq = _step_of_queries(
            dq, q, dy, lse, delta, k_desc, v_desc, batch, k_head, start, limit,
            scale * log2e, DIM, TILE_K, False, PRECISION,
        )  # fmt: skip
    if CAUSAL:
        for start in tl.range(whole, end, TILE_K, num_stages=STAGES):
            dq = _step_of_queries(
                dq, q, dy, lse, delta, k_desc, v_desc, batch, k_head, start,
                limit, scale * log2e, DIM, TILE_K, True, PRECISION,
            )  # fmt: skip
    elif RAGGED:
        dq = _step_of_queries(
            dq, q, dy, lse, delta, k_desc, v_desc, batch, k_head, whole, limit,
            scale * log2e, DIM, TILE_K, True, PRECISION,
        )  # fmt: skip

    dq = (dq * scale).to(dq_desc.dtype)
    dq_desc.store([batch, head, first, 0], dq.reshape(1, 1, TILE_Q, DIM))


@triton.jit(do_not_specialize=["heads", "queries", "keys"])
def _any_attention_bwd_keys(
    q_desc,  # (batch, heads, queries, up to DIM), in tiles of TILE_Q queries
    k_desc,  # (batch, heads / GROUP, keys, up to DIM), in tiles of TILE_K
    v_desc,  # as k_desc
    dy_desc,  # as q_desc
    dk_desc,  # as k_desc
    dv_desc,  # as k_desc
    lse_ptr,  # (batch, heads, rows)
    delta_ptr,  # (batch, heads, rows)
    rows,  # queries, and those that only fill the last tile
    heads,  # of the queries
    queries,
    keys,
    scale,  # that of the scores alone, for dk
    log2e,  # LOG2E, for the powers of 2
    GROUP: tl.constexpr,  # heads of queries that share a head of keys
    CAUSAL: tl.constexpr,
    DIM: tl.constexpr,  # width of a tile: the head dimension, or more
    TILE_Q: tl.constexpr,  # queries of a step
    TILE_K: tl.constexpr,  # keys of a program
    PRECISION: tl.constexpr,  # of products of float32
    STAGES: tl.constexpr,
):
    # Which keys are ours? The first tile has most to do if causal.
    tiles = tl.cdiv(keys, TILE_K)
    first = tl.program_id(0) % tiles * TILE_K
    key = first + tl.arange(0, TILE_K)
    k_lead = tl.program_id(0) // tiles
    batch = k_lead // (heads // GROUP)
    k_head = k_lead % (heads // GROUP)
    k = k_desc.load([batch, k_head, first, 0]).reshape(TILE_K, DIM)
    v = v_desc.load([batch, k_head, first, 0]).reshape(TILE_K, DIM)
    dk = tl.zeros((TILE_K, DIM), tl.float32)
    dv = tl.zeros((TILE_K, DIM), tl.float32)

    # If causal, the queries before ``first`` see none of our keys, and from
    # ``whole`` on they see all. Both are multiples of TILE_Q.
    whole = 0
    if CAUSAL:
        whole = first + TILE_K

    # The queries of all heads of our group, which are neighbors if we count
    # the heads of all sequences. Both sums fill most registers. So we tell the
    # compiler to compute nothing before a loop that would be the same in each
    # step, because it would keep that in registers.
    for lead in tl.range(
        k_lead * GROUP, (k_lead + 1) * GROUP, disable_licm=True
    ):
        batch = lead // heads
        head = lead % heads
        at = tl.cast(lead, tl.int64) * rows
        if CAUSAL:
            for start in tl.range(
                first,
                tl.minimum(whole, queries),
                TILE_Q,
                num_stages=STAGES,
                disable_licm=True,
            ):
                dk, dv = _step_of_keys(
                    dk, dv, k, v, q_desc, dy_desc, lse_ptr + at,
                    delta_ptr + at, batch, head, start, key, scale * log2e,
                    DIM, TILE_Q, True, PRECISION,
                )  # fmt: skip
        for start in tl.range(
            whole, queries, TILE_Q, num_stages=STAGES, disable_licm=True
        ):
            dk, dv = _step_of_keys(
                dk, dv, k, v, q_desc, dy_desc, lse_ptr + at, delta_ptr + at,
                batch, head, start, key, scale * log2e, DIM, TILE_Q, False,
                PRECISION,
            )  # fmt: skip

    dk = (dk * scale).to(dk_desc.dtype)
    dv = dv.to(dv_desc.dtype)
    dk_desc.store([batch, k_head, first, 0], dk.reshape(1, 1, TILE_K, DIM))
    dv_desc.store([batch, k_head, first, 0], dv.reshape(1, 1, TILE_K, DIM))


def launch_queries(
    kernel, describe, own, plan, q, k, v, y, dy, dq, lse, delta, is_causal,
    scale,
):  # fmt: skip
    """dq, and delta for the kernel of the keys. A program owns so many
    queries."""
    batch, heads, queries, _ = q.shape
    _, k_heads, keys, _ = k.shape
    tile_q = plan["TILE_Q"]
    tile_k = plan["TILE_K"]
    kernel[(triton.cdiv(queries, own) * batch * heads,)](
        q_desc=describe(q, tile_q),
        k_desc=describe(k, tile_k),
        v_desc=describe(v, tile_k),
        y_desc=describe(y, tile_q),
        dy_desc=describe(dy, tile_q),
        dq_desc=describe(dq, tile_q),
        lse_ptr=lse,
        delta_ptr=delta,
        rows=lse.shape[-1],
        heads=heads,
        queries=queries,
        keys=keys,
        scale=scale,
        log2e=ATTENTION_LOG2E,
        GROUP=heads // k_heads,
        CAUSAL=is_causal,
        RAGGED=not is_causal and keys % tile_k > 0,
        **plan,
    )


def launch_keys(q, k, v, dy, dk, dv, lse, delta, is_causal, scale):
    """dk and dv."""
    _, heads, queries, D = q.shape
    batch, k_heads, keys, _ = k.shape
    _, plan = attention_plan_backward(q.dtype, D)
    tile_q = plan["TILE_Q"]
    tile_k = plan["TILE_K"]
    programs = triton.cdiv(keys, tile_k) * batch * k_heads
    _any_attention_bwd_keys[(programs,)](
        q_desc=tiles_of(q, tile_q),
        k_desc=tiles_of(k, tile_k),
        v_desc=tiles_of(v, tile_k),
        dy_desc=tiles_of(dy, tile_q),
        dk_desc=tiles_of(dk, tile_k),
        dv_desc=tiles_of(dv, tile_k),
        lse_ptr=lse,
        delta_ptr=delta,
        rows=lse.shape[-1],
        heads=heads,
        queries=queries,
        keys=keys,
        scale=scale,
        log2e=ATTENTION_LOG2E,
        GROUP=heads // k_heads,
        CAUSAL=is_causal,
        **plan,
    )


def plain_queries(q, k, v, y, dy, dq, lse, delta, is_causal, scale):
    """dq by the plain kernel."""
    plan, _ = attention_plan_backward(q.dtype, q.shape[-1])
    launch_queries(
        _any_attention_bwd_queries, tiles_of, plan["TILE_Q"], plan, q, k, v, y,
        dy, dq, lse, delta, is_causal, scale,
    )  # fmt: skip


@gluon.jit
def _turns_of(
    share,  # its number, among those of all heads
    tiles,  # of queries, in each head
    PAIRS: gl.constexpr,  # whether two tiles of queries are a share
):
    """How many tiles of queries a share has."""
    turns = 1
    if PAIRS:
        # Tile i and the i-th from the end. In the middle they are the same.
        turns = 2
        if 2 * (share % gl.cdiv(tiles, 2)) + 1 == tiles:
            turns = 1
    return turns


@gluon.jit
def _place_of(
    share,  # its number, among those of all heads
    turn,  # 0 or 1: which tile of the share
    tiles,  # of queries, in each head
    keys,
    OWN: gl.constexpr,  # queries of a tile
    TILE_K: gl.constexpr,
    CAUSAL: gl.constexpr,
    PAIRS: gl.constexpr,
):
    """The number of the head, the first query, and steps: those whose keys all
    queries of the tile see, and those whose keys some of them see."""
    if PAIRS:
        shares = gl.cdiv(tiles, 2)  # of this head alone
        tile = share % shares
        if turn == 0:
            tile = tiles - 1 - tile  # the one from the end, with more steps
    else:
        shares = tiles
        tile = tiles - 1 - share % shares  # the longest of a head first
    first = tile * OWN
    whole = keys // TILE_K
    steps = gl.cdiv(keys, TILE_K)
    if CAUSAL:
        whole = gl.minimum(first // TILE_K, whole)
        steps = gl.minimum(gl.cdiv(first + OWN, TILE_K), steps)
    return share // shares, first, whole, steps


@gluon.jit
def _load_tile(
    share,
    turn,
    tile,  # how many tiles of queries this program had before
    step,  # how many steps it had before
    q_desc,
    k_desc,
    v_desc,
    own,  # buffers and barriers of queries and results
    ring,  # buffers and barriers of keys and values
    heads,  # of the queries
    tiles,  # of queries, in each head
    keys,
    GROUP: gl.constexpr,  # heads of queries that share a head of keys
    CAUSAL: gl.constexpr,
    PAIRS: gl.constexpr,
    TILE_Q: gl.constexpr,  # queries of a group of warps
    TILE_K: gl.constexpr,
    BUFFERS: gl.constexpr,
    WARPS: gl.constexpr,  # groups of four warps that multiply: 1 or 2
):
    """Fetch the queries of a tile, and all keys and values that they see."""
    q_mem, _, q_full, q_free = own
    k_mem, v_mem, full, free = ring
    lead, first, _, steps = _place_of(
        share, turn, tiles, keys, WARPS * TILE_Q, TILE_K, CAUSAL, PAIRS
    )
    batch = lead // heads
    head = lead % heads
    k_head = head // GROUP

    # The first wait is over at once: nobody has multiplied yet.
    mbarrier.wait(q_free, (tile + 1) & 1)
    mbarrier.expect(q_full, WARPS * q_desc.block_type.nbytes)
    for group in gl.static_range(WARPS):
        row = first + group * TILE_Q
        FETCH(q_desc, [batch, head, row, 0], q_full, q_mem.index(group))

    for i in range(steps):
        at = (step + i) % BUFFERS
        parity = ((step + i) // BUFFERS + 1) & 1
        place = [batch, k_head, i * TILE_K, 0]
        mbarrier.wait(free.index(2 * at), parity)
        mbarrier.expect(full.index(2 * at), k_desc.block_type.nbytes)
        FETCH(k_desc, place, full.index(2 * at), k_mem.index(at))
        mbarrier.wait(free.index(2 * at + 1), parity)
        mbarrier.expect(full.index(2 * at + 1), v_desc.block_type.nbytes)
        FETCH(v_desc, place, full.index(2 * at + 1), v_mem.index(at))
    return step + steps


@gluon.jit
def _load_shares(
    q_desc,
    k_desc,
    v_desc,
    own,
    ring,
    heads,
    tiles,
    keys,
    shares,  # of all heads together
    GROUP: gl.constexpr,
    CAUSAL: gl.constexpr,
    PAIRS: gl.constexpr,
    TILE_Q: gl.constexpr,
    TILE_K: gl.constexpr,
    BUFFERS: gl.constexpr,
    WARPS: gl.constexpr,
):
    """What the loading warp does, from the first share to the last."""
    # The groups that multiply have the same loops, and so the same counts.
    tile = 0
    step = 0
    for share in range(gl.program_id(0), shares, gl.num_programs(0)):
        for turn in range(_turns_of(share, tiles, PAIRS)):
            step = _load_tile(
                share, turn, tile, step, q_desc, k_desc, v_desc, own, ring,
                heads, tiles, keys, GROUP, CAUSAL, PAIRS, TILE_Q, TILE_K,
                BUFFERS, WARPS,
            )  # fmt: skip
            tile += 1


@gluon.jit
def _powers(
    maximum,  # of each query, as the next one
    total,
    score,
    i,  # which tile of keys
    whole,  # steps before this one need no mask
    limit,  # how many keys each query sees
    scale,  # that of the scores, times LOG2E
    TILE_K: gl.constexpr,
    MASK: gl.constexpr,  # whether there are steps that need one
):
    """The new maximum and sum, what the sums so far shrink by, and powers."""
    if MASK:
        KEY: gl.constexpr = gl.SliceLayout(0, score.type.layout)
        if i >= whole:
            key = i * TILE_K + gl.arange(0, TILE_K, KEY)
            seen = key[None, :] < limit[:, None]
            score = gl.where(seen, score, float("-inf"))
    new = gl.maximum(maximum, gl.max(score, axis=1) * scale)
    power = gl.exp2(score * scale - new[:, None])
    shrink = gl.exp2(maximum - new)
    total = total * shrink + gl.sum(power, axis=1)
    return new, total, shrink, power


@gluon.jit
def _step_fwd(
    maximum,  # of each query, as the next one
    total,
    weighted,
    power,  # of the last step
    i,  # which tile of keys
    step,  # which step of this program
    q,
    ring,
    whole,
    limit,
    scale,
    DIM: gl.constexpr,
    TILE_K: gl.constexpr,
    BUFFERS: gl.constexpr,
    MASK: gl.constexpr,
):
    """The scores of tile i, and the product of the powers of tile i - 1."""
    k_mem, v_mem, full, free = ring
    at = step % BUFFERS
    last = (step - 1) % BUFFERS
    k = k_mem.index(at).reshape([TILE_K, DIM])
    v = v_mem.index(last).reshape([TILE_K, DIM])
    SCORE: gl.constexpr = maximum.type.layout.parent
    SUM: gl.constexpr = weighted.type.layout
    zeros = gl.zeros([maximum.shape[0], TILE_K], gl.float32, SCORE)

    # Both products begin.
    mbarrier.wait(full.index(2 * at), (step // BUFFERS) & 1)
    score = warpgroup_mma(
        q, k.permute((1, 0)), zeros, use_acc=False, is_async=True
    )
    mbarrier.wait(full.index(2 * last + 1), ((step - 1) // BUFFERS) & 1)
    weighted = warpgroup_mma(power, v, weighted, is_async=True)

    # The scores are there when at most one product is under way.
    score = warpgroup_mma_wait(1, deps=[score])
    mbarrier.arrive(free.index(2 * at), count=1)
    maximum, total, shrink, new = _powers(
        maximum, total, score, i, whole, limit, scale, TILE_K, MASK
    )
    new = gl.convert_layout(new.to(power.dtype), power.type.layout)

    # ``new`` goes through the wait as well, so that it is computed before it.
    # Then the sums of the tiles up to i - 1 shrink to the maximum of tile i.
    weighted, power, new = warpgroup_mma_wait(0, deps=[weighted, power, new])
    mbarrier.arrive(free.index(2 * last + 1), count=1)
    by = gl.convert_layout(shrink, gl.SliceLayout(1, SUM))
    weighted = weighted * by[:, None]
    return maximum, total, weighted, new


@gluon.jit
def _tile_fwd(
    share,
    turn,
    tile,  # how many tiles of queries this program had before
    step,  # how many steps it had before
    group,  # which group of warps we are: 0 or 1
    y_desc,
    lse_ptr,
    rows,  # of lse, for each head
    own,  # buffers and barriers of queries and results
    ring,  # buffers and barriers of keys and values
    heads,  # of the queries
    tiles,  # of queries, in each head
    keys,
    scale,
    CAUSAL: gl.constexpr,
    RAGGED: gl.constexpr,
    PAIRS: gl.constexpr,
    DIM: gl.constexpr,
    TILE_Q: gl.constexpr,
    TILE_K: gl.constexpr,
    BUFFERS: gl.constexpr,
    WARPS: gl.constexpr,
):
    """The results of the 64 queries that a group has of a tile."""
    DTYPE: gl.constexpr = y_desc.dtype
    SCORE: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, 1], [16, TILE_K, 16]
    )
    SUM: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, 1], [16, DIM, 16]
    )
    POWER: gl.constexpr = gl.DotOperandLayout(0, SUM, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, SCORE)
    MASK: gl.constexpr = CAUSAL or RAGGED
    q_mem, y_mem, q_full, q_free = own
    k_mem, v_mem, full, free = ring
    lead, first, whole, steps = _place_of(
        share, turn, tiles, keys, WARPS * TILE_Q, TILE_K, CAUSAL, PAIRS
    )
    first += group * TILE_Q
    query = first + gl.arange(0, TILE_Q, ROW)
    limit = gl.full([TILE_Q], 0, gl.int32, ROW) + keys
    if CAUSAL:
        limit = gl.minimum(query + 1, limit)
    maximum = gl.full([TILE_Q], float("-inf"), gl.float32, ROW)
    total = gl.zeros([TILE_Q], gl.float32, ROW)
    weighted = gl.zeros([TILE_Q, DIM], gl.float32, SUM)

    # The powers of the first tile of keys.
    at = step % BUFFERS
    q = q_mem.index(group).reshape([TILE_Q, DIM])
    k = k_mem.index(at).reshape([TILE_K, DIM])
    zeros = gl.zeros([TILE_Q, TILE_K], gl.float32, SCORE)
    mbarrier.wait(q_full, tile & 1)
    mbarrier.wait(full.index(2 * at), (step // BUFFERS) & 1)
    score = warpgroup_mma(
        q, k.permute((1, 0)), zeros, use_acc=False, is_async=True
    )
    score = warpgroup_mma_wait(0, deps=[score])
    mbarrier.arrive(free.index(2 * at), count=1)
    maximum, total, _, power = _powers(
        maximum, total, score, 0, whole, limit, scale, TILE_K, MASK
    )
    power = gl.convert_layout(power.to(DTYPE), POWER)

    for i in range(1, steps):
        maximum, total, weighted, power = _step_fwd(
            maximum, total, weighted, power, i, step + i, q, ring, whole,
            limit, scale, DIM, TILE_K, BUFFERS, MASK,
        )  # fmt: skip
    step += steps
    # New: the queries of the next tile may come.
    mbarrier.arrive(q_free, count=1)

    # The product of the last tile of keys. lse is stored beside it.
    last = (step - 1) % BUFFERS
    v = v_mem.index(last).reshape([TILE_K, DIM])
    mbarrier.wait(full.index(2 * last + 1), ((step - 1) // BUFFERS) & 1)
    weighted = warpgroup_mma(power, v, weighted, is_async=True)
    place = lead.to(gl.int64) * rows  # may pass 2**31
    gl.store(lse_ptr + place + query, maximum + gl.log2(total))
    weighted, power = warpgroup_mma_wait(0, deps=[weighted, power])
    mbarrier.arrive(free.index(2 * last + 1), count=1)
    y = weighted / gl.convert_layout(total, gl.SliceLayout(1, SUM))[:, None]

    # New: the results before these must have left their buffer.
    tma.store_wait(0)
    y_mem.index(group).reshape([TILE_Q, DIM]).store(y.to(DTYPE))
    fence_async_shared()
    place = [lead // heads, lead % heads, first, 0]
    STORE(y_desc, place, y_mem.index(group))
    return step


@gluon.jit
def _group_fwd(
    group,
    y_desc,
    lse_ptr,
    rows,
    own,
    ring,
    heads,
    tiles,
    keys,
    shares,
    scale,
    CAUSAL: gl.constexpr,
    RAGGED: gl.constexpr,
    PAIRS: gl.constexpr,
    DIM: gl.constexpr,
    TILE_Q: gl.constexpr,
    TILE_K: gl.constexpr,
    BUFFERS: gl.constexpr,
    WARPS: gl.constexpr,
):
    """What a group that multiplies does, from the first share to the last."""
    tile = 0
    step = 0
    for share in range(gl.program_id(0), shares, gl.num_programs(0)):
        for turn in range(_turns_of(share, tiles, PAIRS)):
            step = _tile_fwd(
                share, turn, tile, step, group, y_desc, lse_ptr, rows, own,
                ring, heads, tiles, keys, scale, CAUSAL, RAGGED, PAIRS, DIM,
                TILE_Q, TILE_K, BUFFERS, WARPS,
            )  # fmt: skip
            tile += 1
    # Shared memory must last until the TMA has read the last results.
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["heads", "queries", "keys", "shares"])
def _staying_fwd(
    q_desc,  # (batch, heads, queries, up to DIM), in tiles of TILE_Q queries
    k_desc,  # (batch, heads / GROUP, keys, up to DIM), in tiles of TILE_K
    v_desc,  # as k_desc
    y_desc,  # as q_desc
    lse_ptr,  # (batch, heads, rows): saved for the backward pass
    rows,  # queries, and those that only fill the last tiles
    heads,  # of the queries
    queries,
    keys,
    shares,  # of all heads together
    scale,  # that of the scores, times LOG2E
    GROUP: gl.constexpr,  # heads of queries that share a head of keys
    CAUSAL: gl.constexpr,
    RAGGED: gl.constexpr,  # not causal, and the last tile of keys is not full
    PAIRS: gl.constexpr,  # whether two tiles of queries are a share
    DIM: gl.constexpr,  # width of a tile: the head dimension, or more
    TILE_Q: gl.constexpr,  # queries of a group of warps
    TILE_K: gl.constexpr,  # keys of a step
    BUFFERS: gl.constexpr,  # tiles of keys, and of values, in shared memory
    WARPS: gl.constexpr,  # groups of four warps that multiply: 1 or 2
    REGISTERS: gl.constexpr,  # of a thread of the second group
    num_warps: gl.constexpr,  # of the first group
):
    # Shared memory. Each group has its queries and its results.
    DTYPE: gl.constexpr = q_desc.dtype
    q_mem = gl.allocate_shared_memory(
        DTYPE, [WARPS, 1, 1, TILE_Q, DIM], q_desc.layout
    )
    y_mem = gl.allocate_shared_memory(
        DTYPE, [WARPS, 1, 1, TILE_Q, DIM], y_desc.layout
    )
    k_mem = gl.allocate_shared_memory(
        DTYPE, [BUFFERS, 1, 1, TILE_K, DIM], k_desc.layout
    )
    v_mem = gl.allocate_shared_memory(
        DTYPE, [BUFFERS, 1, 1, TILE_K, DIM], v_desc.layout
    )

    # Barriers. At full ones the loading warp arrives, at free ones the groups.
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    q_free = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    full = gl.allocate_shared_memory(gl.int64, [2 * BUFFERS, 1], BARRIER)
    free = gl.allocate_shared_memory(gl.int64, [2 * BUFFERS, 1], BARRIER)
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_free, count=WARPS)
    for i in gl.static_range(2 * BUFFERS):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=WARPS)
    fence_async_shared()  # the TMA sees them, too
    own = (q_mem, y_mem, q_full, q_free)
    ring = (k_mem, v_mem, full, free)

    tiles = gl.cdiv(queries, WARPS * TILE_Q)
    if WARPS == 1:
        gl.warp_specialize(
            [
                (_group_fwd, (
                    0, y_desc, lse_ptr, rows, own, ring, heads, tiles, keys,
                    shares, scale, CAUSAL, RAGGED, PAIRS, DIM, TILE_Q, TILE_K,
                    BUFFERS, WARPS,
                )),
                (_load_shares, (
                    q_desc, k_desc, v_desc, own, ring, heads, tiles, keys,
                    shares, GROUP, CAUSAL, PAIRS, TILE_Q, TILE_K, BUFFERS,
                    WARPS,
                )),
            ],
            [1],  # warp of the second
            [24],  # registers of its threads
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_group_fwd, (
                    0, y_desc, lse_ptr, rows, own, ring, heads, tiles, keys,
                    shares, scale, CAUSAL, RAGGED, PAIRS, DIM, TILE_Q, TILE_K,
                    BUFFERS, WARPS,
                )),
                (_group_fwd, (
                    1, y_desc, lse_ptr, rows, own, ring, heads, tiles, keys,
                    shares, scale, CAUSAL, RAGGED, PAIRS, DIM, TILE_Q, TILE_K,
                    BUFFERS, WARPS,
                )),
                (_load_shares, (
                    q_desc, k_desc, v_desc, own, ring, heads, tiles, keys,
                    shares, GROUP, CAUSAL, PAIRS, TILE_Q, TILE_K, BUFFERS,
                    WARPS,
                )),
            ],
            [4, 1],  # warps of the second and of the third
            [REGISTERS, 24],  # registers of their threads
        )  # fmt: skip


@gluon.jit
def _fetch_keys(
    k_desc,
    v_desc,
    ring,
    batch,
    head,  # of the keys
    steps,
    TILE_K: gl.constexpr,
    BUFFERS: gl.constexpr,
):
    """All tiles of keys and values that a program needs, in their order."""
    # Of each buffer, the barrier 2 * at is for its keys, and the next one for
    # its values.
    k_mem, v_mem, full, free = ring
    for i in range(steps):
        at = i % BUFFERS
        parity = (i // BUFFERS + 1) & 1
        mbarrier.wait(free.index(2 * at), parity)
        mbarrier.expect(full.index(2 * at), k_desc.block_type.nbytes)
        FETCH(
            k_desc,
            [batch, head, i * TILE_K, 0],
            full.index(2 * at),
            k_mem.index(at),
        )
        mbarrier.wait(free.index(2 * at + 1), parity)
        mbarrier.expect(full.index(2 * at + 1), v_desc.block_type.nbytes)
        FETCH(
            v_desc,
            [batch, head, i * TILE_K, 0],
            full.index(2 * at + 1),
            v_mem.index(at),
        )


@gluon.jit
def _load_bwd_queries(
    q_desc,
    dy_desc,
    y_desc,
    k_desc,
    v_desc,
    q_mem,
    dy_mem,
    y_mem,
    own_full,
    ring,
    batch,
    head,  # of the queries
    k_head,
    first,  # our first query
    steps,
    TILE_K: gl.constexpr,
    BUFFERS: gl.constexpr,
):
    """What the loading warp does for dq."""
    mbarrier.expect(own_full, 3 * q_desc.block_type.nbytes)
    place = [batch, head, first, 0]
    FETCH(q_desc, place, own_full, q_mem)
    FETCH(dy_desc, place, own_full, dy_mem)
    FETCH(y_desc, place, own_full, y_mem)
    _fetch_keys(k_desc, v_desc, ring, batch, k_head, steps, TILE_K, BUFFERS)


@gluon.jit
def _step_bwd_queries(
    dq,
    ds,  # of the last step: an operand of the product that is under way
    i,
    q,
    dy,
    lse,
    delta,
    ring,
    limit,
    whole,  # tiles that all of our queries see
    scale,
    DIM: gl.constexpr,
    TILE_K: gl.constexpr,
    BUFFERS: gl.constexpr,
    MASK: gl.constexpr,  # whether there are tiles that some query does not see
):
    """dq with tile i of the keys; its product may still be under way."""
    k_mem, v_mem, full, free = ring
    at = i % BUFFERS
    parity = (i // BUFFERS) & 1
    k = k_mem.index(at).reshape([TILE_K, DIM])
    v = v_mem.index(at).reshape([TILE_K, DIM])
    SCORE: gl.constexpr = lse.type.layout.parent
    zeros = gl.zeros([lse.shape[0], TILE_K], gl.float32, SCORE)

    mbarrier.wait(full.index(2 * at), parity)
    score = warpgroup_mma(
        q, k.permute((1, 0)), zeros, use_acc=False, is_async=True
    )
    mbarrier.wait(full.index(2 * at + 1), parity)
    dp = warpgroup_mma(
        dy, v.permute((1, 0)), zeros, use_acc=False, is_async=True
    )

    # When at most one product is under way, the scores are there, and so is
    # the sum of the last step: its tile of keys may be overwritten.
    score, dq, ds = warpgroup_mma_wait(1, deps=[score, dq, ds])
    last = gl.maximum(i - 1, 0) % BUFFERS
    mbarrier.arrive(free.index(2 * last), count=1, pred=i > 0)
    if MASK:
        KEY: gl.constexpr = gl.SliceLayout(0, SCORE)
        if i >= whole:
            key = i * TILE_K + gl.arange(0, TILE_K, KEY)
            seen = key[None, :] < limit[:, None]
            score = gl.where(seen, score, float("-inf"))
    p = gl.exp2(score * scale - lse[:, None])

    dp = warpgroup_mma_wait(0, deps=[dp])
    mbarrier.arrive(free.index(2 * at + 1), count=1)
    ds_of_tile = (p * (dp - delta[:, None])).to(ds.dtype)
    ds = gl.convert_layout(ds_of_tile, ds.type.layout)
    dq = warpgroup_mma(ds, k, dq, is_async=True)
    return dq, ds


@gluon.jit
def _group_bwd_queries(
    dq_desc,
    lse_ptr,  # of the first query of this head, as delta_ptr
    delta_ptr,
    q_mem,
    dy_mem,
    y_mem,
    own_full,
    ring,
    batch,
    head,
    first,  # our first query
    keys,
    scale,
    log2e,
    whole,  # tiles that all of our queries see
    steps,  # tiles that some of them see
    CAUSAL: gl.constexpr,
    RAGGED: gl.constexpr,
    DIM: gl.constexpr,
    TILE_Q: gl.constexpr,
    TILE_K: gl.constexpr,
    BUFFERS: gl.constexpr,
):
    """dq of 64 queries."""
    DTYPE: gl.constexpr = dq_desc.dtype
    SCORE: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, 1], [16, TILE_K, 16]
    )
    SUM: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, 1], [16, DIM, 16]
    )
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUM, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, SCORE)
    query = first + gl.arange(0, TILE_Q, ROW)
    limit = gl.full([TILE_Q], 0, gl.int32, ROW) + keys
    if CAUSAL:
        limit = gl.minimum(query + 1, limit)
    lse = gl.load(lse_ptr + query)

    mbarrier.wait(own_full, 0)
    q = q_mem.reshape([TILE_Q, DIM])
    dy = dy_mem.reshape([TILE_Q, DIM])
    y = y_mem.reshape([TILE_Q, DIM])
    product = y.load(SUM).to(gl.float32) * dy.load(SUM).to(gl.float32)
    delta = gl.convert_layout(gl.sum(product, axis=1), ROW)
    gl.store(delta_ptr + query, delta)

    # The loop carries a sum that is under way, so it has to begin as one.
    dq = warpgroup_mma_init(gl.zeros([TILE_Q, DIM], gl.float32, SUM))
    ds = gl.zeros([TILE_Q, TILE_K], DTYPE, LEFT)
    for i in range(steps):
        dq, ds = _step_bwd_queries(
            dq, ds, i, q, dy, lse, delta, ring, limit, whole, scale * log2e,
            DIM, TILE_K, BUFFERS, CAUSAL or RAGGED,
        )  # fmt: skip
    dq, ds = warpgroup_mma_wait(0, deps=[dq, ds])

    # The queries have been read: their place takes the result.
    q.store((dq * scale).to(DTYPE))
    fence_async_shared()
    STORE(dq_desc, [batch, head, first, 0], q_mem)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["heads", "queries", "keys"])
def _half_sm_bwd_queries(
    q_desc,  # (batch, heads, queries, up to DIM), in tiles of TILE_Q queries
    k_desc,  # (batch, heads / GROUP, keys, up to DIM), in tiles of TILE_K keys
    v_desc,  # as k_desc
    y_desc,  # as q_desc
    dy_desc,  # as q_desc
    dq_desc,  # as q_desc
    lse_ptr,  # (batch, heads, rows)
    delta_ptr,  # as lse_ptr
    rows,  # queries, and those that only fill the last tile
    heads,  # of the queries
    queries,
    keys,
    scale,  # that of the scores alone, for dq
    log2e,  # LOG2E, for the powers of 2
    GROUP: gl.constexpr,  # heads of queries that share a head of keys
    CAUSAL: gl.constexpr,
    RAGGED: gl.constexpr,  # not causal, and the last tile of keys is not full
    DIM: gl.constexpr,  # width of a tile: the head dimension, or more
    TILE_Q: gl.constexpr,  # queries of a program
    TILE_K: gl.constexpr,  # keys of a step
    BUFFERS: gl.constexpr,  # tiles of keys, and of values, in shared memory
    num_warps: gl.constexpr,
):
    # Which queries are ours, and which tiles of keys do they see?
    tiles = gl.cdiv(queries, TILE_Q)
    tile = gl.program_id(0) % tiles
    if CAUSAL:
        tile = tiles - 1 - tile  # those that see most keys begin first
    first = tile * TILE_Q
    lead = gl.program_id(0) // tiles
    batch = lead // heads
    head = lead % heads
    whole = keys // TILE_K
    steps = gl.cdiv(keys, TILE_K)
    if CAUSAL:
        whole = gl.minimum(first // TILE_K, whole)
        steps = gl.minimum(gl.cdiv(first + TILE_Q, TILE_K), steps)

    # Shared memory, and a ring of buffers.
    DTYPE: gl.constexpr = q_desc.dtype
    q_mem = gl.allocate_shared_memory(
        DTYPE, [1, 1, TILE_Q, DIM], q_desc.layout
    )
    dy_mem = gl.allocate_shared_memory(
        DTYPE, [1, 1, TILE_Q, DIM], dy_desc.layout
    )
    y_mem = gl.allocate_shared_memory(
        DTYPE, [1, 1, TILE_Q, DIM], y_desc.layout
    )
    k_mem = gl.allocate_shared_memory(
        DTYPE, [BUFFERS, 1, 1, TILE_K, DIM], k_desc.layout
    )
    v_mem = gl.allocate_shared_memory(
        DTYPE, [BUFFERS, 1, 1, TILE_K, DIM], v_desc.layout
    )
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    own_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    full = gl.allocate_shared_memory(gl.int64, [2 * BUFFERS, 1], BARRIER)
    free = gl.allocate_shared_memory(gl.int64, [2 * BUFFERS, 1], BARRIER)
    mbarrier.init(own_full, count=1)
    for i in gl.static_range(2 * BUFFERS):
        mbarrier.init(full.index(i), count=1)  # the loading warp
        mbarrier.init(free.index(i), count=1)  # the group that multiplies
    fence_async_shared()
    ring = (k_mem, v_mem, full, free)

    place = lead.to(gl.int64) * rows
    lse_ptr += place
    delta_ptr += place
    gl.warp_specialize(
        [
            (_group_bwd_queries, (
                dq_desc, lse_ptr, delta_ptr, q_mem, dy_mem, y_mem, own_full,
                ring, batch, head, first, keys, scale, log2e, whole, steps,
                CAUSAL, RAGGED, DIM, TILE_Q, TILE_K, BUFFERS,
            )),
            (_load_bwd_queries, (
                q_desc, dy_desc, y_desc, k_desc, v_desc, q_mem, dy_mem, y_mem,
                own_full, ring, batch, head, head // GROUP, first, steps,
                TILE_K, BUFFERS,
            )),
        ],
        [1],  # warp of the second
        [24],  # registers of its threads
    )  # fmt: skip


@gluon.jit
def _load_bwd_keys(
    k_desc,
    v_desc,
    q_desc,
    dy_desc,
    lse_desc,
    delta_desc,
    k_mem,
    v_mem,
    own_full,
    ring,
    batch,
    k_head,
    row,  # the first of our heads of queries, if all sequences' are counted
    rows,  # of lse and delta, for each head
    first,  # our first key
    begin,  # the first query that sees it
    steps,  # of each head
    GROUP: gl.constexpr,
    TILE_Q: gl.constexpr,
    BUFFERS: gl.constexpr,
):
    """What the loading warp does for dk and dv."""
    q_mem, dy_mem, lse_mem, delta_mem, full, free = ring
    mbarrier.expect(own_full, 2 * k_desc.block_type.nbytes)
    FETCH(k_desc, [batch, k_head, first, 0], own_full, k_mem)
    FETCH(v_desc, [batch, k_head, first, 0], own_full, v_mem)
    for i in range(steps * GROUP):
        at = i % BUFFERS
        member = i // steps  # of the heads that share our keys
        start = begin + i % steps * TILE_Q
        place = [batch, k_head * GROUP + member, start, 0]
        # 32 bits are enough, or queries would not fit into memory.
        flat = [(row + member) * rows + start]
        mbarrier.wait(free.index(at), (i // BUFFERS + 1) & 1)
        mbarrier.expect(
            full.index(at),
            2 * q_desc.block_type.nbytes + 2 * lse_desc.block_type.nbytes,
        )
        FETCH(q_desc, place, full.index(at), q_mem.index(at))
        FETCH(lse_desc, flat, full.index(at), lse_mem.index(at))
        FETCH(dy_desc, place, full.index(at), dy_mem.index(at))
        FETCH(delta_desc, flat, full.index(at), delta_mem.index(at))


@gluon.jit
def _step_bwd_keys(
    dk,
    dv,
    p,  # of the last step: operands of products that may be under way
    ds,
    i,
    start,  # the first query of the step
    first,  # our first key
    k,
    v,
    ring,
    scale,
    CAUSAL: gl.constexpr,
    DIM: gl.constexpr,
    TILE_K: gl.constexpr,
    TILE_Q: gl.constexpr,
    BUFFERS: gl.constexpr,
    WAITS: gl.constexpr,  # for dv, before ds takes registers
):
    """dk and dv with a tile of queries; products may still be under way."""
    q_mem, dy_mem, lse_mem, delta_mem, full, free = ring
    at = i % BUFFERS
    q = q_mem.index(at).reshape([TILE_Q, DIM])
    dy = dy_mem.index(at).reshape([TILE_Q, DIM])
    SCORE: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, 1], [16, TILE_Q, 16]
    )
    QUERY: gl.constexpr = gl.SliceLayout(0, SCORE)
    zeros = gl.zeros([TILE_K, TILE_Q], gl.float32, SCORE)

    # A product adds to what it is given. We give it what must be subtracted,
    # so that lse and delta need no registers of their own.
    mbarrier.wait(full.index(at), (i // BUFFERS) & 1)
    lse = lse_mem.index(at).load(QUERY)
    score = warpgroup_mma(
        k,
        q.permute((1, 0)),
        zeros - (lse / scale)[None, :],
        is_async=True,
    )
    delta = delta_mem.index(at).load(QUERY)
    dp = warpgroup_mma(
        v, dy.permute((1, 0)), zeros - delta[None, :], is_async=True
    )

    # When at most one product is under way, the scores are there, and so are
    # the sums of the last step: its buffer may be filled again.
    score, dk, dv, p, ds = warpgroup_mma_wait(1, deps=[score, dk, dv, p, ds])
    mbarrier.arrive(
        free.index(gl.maximum(i - 1, 0) % BUFFERS), count=1, pred=i > 0
    )
    if CAUSAL:
        KEY: gl.constexpr = gl.SliceLayout(1, SCORE)
        if start < first + TILE_K:
            key = first + gl.arange(0, TILE_K, KEY)
            query = start + gl.arange(0, TILE_Q, QUERY)
            hidden = key[:, None] > query[None, :]
            score = gl.where(hidden, float("-inf"), score)
    power = gl.exp2(score * scale)
    p = gl.convert_layout(power.to(p.dtype), p.type.layout)
    dv = warpgroup_mma(p, dy, dv, is_async=True)
    if WAITS:
        dp, dv, p = warpgroup_mma_wait(0, deps=[dp, dv, p])
    else:
        dp = warpgroup_mma_wait(1, deps=[dp])
    ds = gl.convert_layout((power * dp).to(ds.dtype), ds.type.layout)
    dk = warpgroup_mma(ds, q, dk, is_async=True)
    if WAITS:
        # It is not under way, but the loop carries a sum that may be.
        dv = warpgroup_mma_init(dv)
    return dk, dv, p, ds


@gluon.jit
def _group_bwd_keys(
    dk_desc,
    dv_desc,
    k_mem,
    v_mem,
    own_full,
    ring,
    batch,
    k_head,
    first,
    begin,
    steps,
    scale,
    log2e,
    GROUP: gl.constexpr,
    CAUSAL: gl.constexpr,
    DIM: gl.constexpr,
    TILE_K: gl.constexpr,
    TILE_Q: gl.constexpr,
    BUFFERS: gl.constexpr,
    WAITS: gl.constexpr,
):
    """dk and dv of 64 keys."""
    DTYPE: gl.constexpr = dk_desc.dtype
    SUM: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, 1], [16, DIM, 16]
    )
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUM, 2)
    k = k_mem.reshape([TILE_K, DIM])
    v = v_mem.reshape([TILE_K, DIM])
    dk = warpgroup_mma_init(gl.zeros([TILE_K, DIM], gl.float32, SUM))
    dv = warpgroup_mma_init(gl.zeros([TILE_K, DIM], gl.float32, SUM))
    p = gl.zeros([TILE_K, TILE_Q], DTYPE, LEFT)
    ds = gl.zeros([TILE_K, TILE_Q], DTYPE, LEFT)
    mbarrier.wait(own_full, 0)
    for i in range(GROUP * steps):
        start = begin + i % steps * TILE_Q
        dk, dv, p, ds = _step_bwd_keys(
            dk, dv, p, ds, i, start, first, k, v, ring, scale * log2e, CAUSAL,
            DIM, TILE_K, TILE_Q, BUFFERS, WAITS,
        )  # fmt: skip
    dk, dv, p, ds = warpgroup_mma_wait(0, deps=[dk, dv, p, ds])

    # The keys and values have been read: their place takes the results.
    k.store((dk * scale).to(DTYPE))
    v.store(dv.to(DTYPE))
    fence_async_shared()
    STORE(dk_desc, [batch, k_head, first, 0], k_mem)
    STORE(dv_desc, [batch, k_head, first, 0], v_mem)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["heads", "queries", "keys"])
def _half_sm_bwd_keys(
    q_desc,  # (batch, heads, queries, up to DIM), in tiles of TILE_Q queries
    k_desc,  # (batch, heads / GROUP, keys, up to DIM), in tiles of TILE_K
    v_desc,  # as k_desc
    dy_desc,  # as q_desc
    dk_desc,  # as k_desc
    dv_desc,  # as k_desc
    lse_desc,  # (batch * heads * rows,), in tiles of TILE_Q
    delta_desc,  # as lse_desc
    rows,  # queries, and those that only fill the last tile
    heads,  # of the queries
    queries,
    keys,
    scale,  # that of the scores alone, for dk
    log2e,  # LOG2E, for the powers of 2
    GROUP: gl.constexpr,  # heads of queries that share a head of keys
    CAUSAL: gl.constexpr,
    DIM: gl.constexpr,  # width of a tile: the head dimension, or more
    TILE_Q: gl.constexpr,  # queries of a step
    TILE_K: gl.constexpr,  # keys of a program
    BUFFERS: gl.constexpr,  # tiles of queries in shared memory
    WAITS: gl.constexpr,
    num_warps: gl.constexpr,
):
    # Which keys are ours, and which queries see them?
    tiles = gl.cdiv(keys, TILE_K)
    first = gl.program_id(0) % tiles * TILE_K
    lead = gl.program_id(0) // tiles
    batch = lead // (heads // GROUP)
    k_head = lead % (heads // GROUP)
    row = batch * heads + k_head * GROUP
    begin = 0
    if CAUSAL:
        begin = first  # a multiple of TILE_Q
    steps = gl.maximum(gl.cdiv(queries - begin, TILE_Q), 0)

    # Shared memory, and a ring of buffers.
    DTYPE: gl.constexpr = q_desc.dtype
    k_mem = gl.allocate_shared_memory(
        DTYPE, [1, 1, TILE_K, DIM], k_desc.layout
    )
    v_mem = gl.allocate_shared_memory(
        DTYPE, [1, 1, TILE_K, DIM], v_desc.layout
    )
    q_mem = gl.allocate_shared_memory(
        DTYPE, [BUFFERS, 1, 1, TILE_Q, DIM], q_desc.layout
    )
    dy_mem = gl.allocate_shared_memory(
        DTYPE, [BUFFERS, 1, 1, TILE_Q, DIM], dy_desc.layout
    )
    lse_mem = gl.allocate_shared_memory(
        gl.float32, [BUFFERS, TILE_Q], lse_desc.layout
    )
    delta_mem = gl.allocate_shared_memory(
        gl.float32, [BUFFERS, TILE_Q], delta_desc.layout
    )
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    own_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    full = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], BARRIER)
    free = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], BARRIER)
    mbarrier.init(own_full, count=1)
    for i in gl.static_range(BUFFERS):
        mbarrier.init(full.index(i), count=1)  # the loading warp
        mbarrier.init(free.index(i), count=1)  # those that multiply
    fence_async_shared()
    ring = (q_mem, dy_mem, lse_mem, delta_mem, full, free)

    gl.warp_specialize(
        [
            (_group_bwd_keys, (
                dk_desc, dv_desc, k_mem, v_mem, own_full, ring, batch, k_head,
                first, begin, steps, scale, log2e, GROUP, CAUSAL, DIM, TILE_K,
                TILE_Q, BUFFERS, WAITS,
            )),
            (_load_bwd_keys, (
                k_desc, v_desc, q_desc, dy_desc, lse_desc, delta_desc, k_mem,
                v_mem, own_full, ring, batch, k_head, row, rows, first, begin,
                steps, GROUP, TILE_Q, BUFFERS,
            )),
        ],
        [1],  # warp of the second
        [24],  # registers of its threads
    )  # fmt: skip


def tiles_for_gluon(t, rows):
    """A descriptor of (batch, heads, length, D), in tiles of so many rows."""
    tile = [1, 1, rows, width_of(t.shape[-1])]
    dtype = gl.float16 if t.dtype == torch.float16 else gl.bfloat16
    layout = gl.NVMMASharedLayout.get_default_for(tile, dtype)
    return GluonDescriptor.from_tensor(t, tile, layout)


def row_tiles(t, length):
    """A descriptor of all numbers, in tiles of so many."""
    layout = gl.NVMMASharedLayout(0, 32, rank=1)
    return GluonDescriptor.from_tensor(t.view(-1), [length], layout)


def launch_keys_in_halves(
    plan, q, k, v, dy, dk, dv, lse, delta, is_causal, scale
):
    """dk and dv by the kernel in Gluon."""
    _, heads, queries, _ = q.shape
    batch, k_heads, keys, _ = k.shape
    tile_q = plan["TILE_Q"]
    tile_k = plan["TILE_K"]
    programs = triton.cdiv(keys, tile_k) * batch * k_heads
    _half_sm_bwd_keys[(programs,)](
        q_desc=tiles_for_gluon(q, tile_q),
        k_desc=tiles_for_gluon(k, tile_k),
        v_desc=tiles_for_gluon(v, tile_k),
        dy_desc=tiles_for_gluon(dy, tile_q),
        dk_desc=tiles_for_gluon(dk, tile_k),
        dv_desc=tiles_for_gluon(dv, tile_k),
        lse_desc=row_tiles(lse, tile_q),
        delta_desc=row_tiles(delta, tile_q),
        rows=lse.shape[-1],
        heads=heads,
        queries=queries,
        keys=keys,
        scale=scale,
        log2e=ATTENTION_LOG2E,
        GROUP=heads // k_heads,
        CAUSAL=is_causal,
        **plan,
    )


def in_half_an_sm(query, scale):
    """Whether kernels in Gluon give the gradients."""
    if not ON_GPU or torch.version.hip is not None:
        return False
    if torch.cuda.get_device_capability() != (9, 0):
        return False
    if abs(scale) < 1e-30:  # lse is divided by it
        return False
    wide = width_of(query.shape[-1])
    return query.dtype != torch.float32 and wide in (64, 128)


HALF_AN_SM = {
    # width: keys of a step and buffers for dq, then buffers for dk and dv
    64: (128, 2, 4),
    128: (64, 2, 2),
}


def plan_of_halves(query, buffers=None):
    """For the kernel of the queries, and for that of the keys."""
    wide = width_of(query.shape[-1])
    tile_k, of_keys, of_queries = HALF_AN_SM[wide]
    common = {
        "DIM": wide,
        "TILE_Q": 64,
        "num_warps": 4,
        # Registers of a thread, on average: two programs share 65536.
        "maxnreg": 128,
    }
    return (
        common | {"TILE_K": tile_k, "BUFFERS": buffers or of_keys},
        common
        | {
            "TILE_K": 64,
            "BUFFERS": buffers or of_queries,
            "WAITS": wide == 128,
        },
    )


def attention_gradients(
    dy, query, key, value, y, lse, is_causal, scale, plain=False, buffers=None
):
    """dq, dk and dv."""
    dq = rows_like(query)
    dk = rows_like(key)
    dv = rows_like(value)
    if dq.numel() == 0 or dk.numel() == 0:  # nobody attends to anything
        return dq.zero_(), dk.zero_(), dv.zero_()
    q = attention_for_descriptors(query)
    k = attention_for_descriptors(key)
    v = attention_for_descriptors(value)
    dy = attention_for_descriptors(dy)
    delta = torch.empty_like(lse)
    # First the queries, because the keys need their delta.
    if plain or not in_half_an_sm(query, scale):
        plain_queries(q, k, v, y, dy, dq, lse, delta, is_causal, scale)
        launch_keys(q, k, v, dy, dk, dv, lse, delta, is_causal, scale)
        return dq, dk, dv
    for_queries, for_keys = plan_of_halves(query, buffers)
    launch_queries(
        _half_sm_bwd_queries, tiles_for_gluon, 64, for_queries, q, k, v, y,
        dy, dq, lse, delta, is_causal, scale,
    )  # fmt: skip
    launch_keys_in_halves(
        for_keys, q, k, v, dy, dk, dv, lse, delta, is_causal, scale
    )
    return dq, dk, dv


OWN_QUERIES = 64  # of each group of warps

STAYING = {
    # width: groups of warps, keys of a step, buffers, programs on an SM;
    # then the same for short sequences if causal
    64: ((1, 128, 2, 2), (1, 64, 3, 3)),
    128: ((2, 128, 2, 1), (2, 128, 2, 1)),
}


def in_gluon(query):
    """Whether the kernel in Gluon takes it."""
    if not ON_GPU or torch.version.hip is not None:
        return False
    if torch.cuda.get_device_capability() != (9, 0):
        return False
    return (
        query.dtype != torch.float32 and width_of(query.shape[-1]) in STAYING
    )


def plan_to_stay(query, keys, is_causal):
    """How many programs share an SM, and the constants of the kernel."""
    wide = width_of(query.shape[-1])
    usual, short = STAYING[wide]
    plan = short if is_causal and keys <= 2048 else usual
    groups, tile_k, buffers, on_an_sm = plan
    threads = 128 * (groups + 1)  # with the loading warp and its neighbors
    # Those that load keep 24 registers, and the groups share the rest.
    registers = 65536 // (threads * on_an_sm) // 8 * 8
    for_groups = (registers * threads - 24 * 128) // (128 * groups) // 8 * 8
    return on_an_sm, {
        "PAIRS": is_causal or wide == 128,
        "DIM": wide,
        "TILE_Q": OWN_QUERIES,
        "TILE_K": tile_k,
        "BUFFERS": buffers,
        "WARPS": groups,
        "REGISTERS": for_groups,
        "num_warps": 4,
        "maxnreg": registers,
    }


def room_for_lse(query, is_causal):
    """(batch, heads, rows): room for whole tiles of queries."""
    if not in_gluon(query):
        return empty_lse(query, is_causal)
    batch, heads, queries, _ = query.shape
    rows = triton.cdiv(queries, 2 * OWN_QUERIES) * 2 * OWN_QUERIES
    return query.new_empty(batch, heads, rows, dtype=torch.float32)


def attention_forward(query, key, value, is_causal, scale, stays=True, pairs=None):
    """The results, and a log-sum-exp for each query.

    To measure what each idea brings, stays=False starts a program for each
    share, and pairs=False makes each tile a share of its own.
    """
    batch, heads, queries, _ = query.shape
    _, k_heads, keys, _ = key.shape
    if not in_gluon(query) or query.numel() == 0 or keys == 0:
        y, lse = plain_forward(query, key, value, is_causal, scale)
        return y, lse
    on_an_sm, plan = plan_to_stay(query, keys, is_causal)
    if pairs is not None:
        plan["PAIRS"] = pairs
    shares = triton.cdiv(queries, plan["WARPS"] * OWN_QUERIES)
    if plan["PAIRS"]:
        shares = triton.cdiv(shares, 2)
    shares = shares * batch * heads
    programs = shares
    if stays:
        gpu = torch.cuda.get_device_properties(query.device)
        programs = min(shares, gpu.multi_processor_count * on_an_sm)
    y = rows_like(query)
    lse = room_for_lse(query, is_causal)
    _staying_fwd[(programs,)](
        q_desc=tiles_for_gluon(attention_for_descriptors(query), OWN_QUERIES),
        k_desc=tiles_for_gluon(attention_for_descriptors(key), plan["TILE_K"]),
        v_desc=tiles_for_gluon(attention_for_descriptors(value), plan["TILE_K"]),
        y_desc=tiles_for_gluon(y, OWN_QUERIES),
        lse_ptr=lse,
        rows=lse.shape[-1],
        heads=heads,
        queries=queries,
        keys=keys,
        shares=shares,
        scale=scale * ATTENTION_LOG2E,
        GROUP=heads // k_heads,
        CAUSAL=is_causal,
        RAGGED=not is_causal and keys % plan["TILE_K"] > 0,
        **plan,
    )
    return y, lse


class _AnyAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, is_causal, scale):
        y, lse = attention_forward(query, key, value, is_causal, scale)
        ctx.save_for_backward(query, key, value, y, lse)
        ctx.is_causal = is_causal
        ctx.scale = scale
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        grads = attention_gradients(dy, *ctx.saved_tensors, ctx.is_causal, ctx.scale)
        return *grads, None, None


@torch.library.custom_op("both_passes::staying_attention", mutates_args=())
def attention_operator_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    return attention_forward(query, key, value, is_causal, scale)


@attention_operator_forward.register_fake
def _(query, key, value, is_causal, scale):
    if query.numel() == 0 or key.numel() == 0:
        return rows_like(query), empty_lse(query, is_causal)
    return rows_like(query), room_for_lse(query, is_causal)


@torch.library.custom_op("both_passes::staying_attention_bwd", mutates_args=())
def attention_operator_backward(
    dy: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    y: torch.Tensor,
    lse: torch.Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return attention_gradients(dy, query, key, value, y, lse, is_causal, scale)


@attention_operator_backward.register_fake
def _(dy, query, key, value, y, lse, is_causal, scale):
    return rows_like(query), rows_like(key), rows_like(value)


def attention_keep(ctx, inputs, output):
    query, key, value, is_causal, scale = inputs
    y, lse = output
    ctx.save_for_backward(query, key, value, y, lse)
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)
    ctx.is_causal = is_causal
    ctx.scale = scale


def attention_operator_gradients(ctx, dy, _):
    grads = attention_operator_backward(dy, *ctx.saved_tensors, ctx.is_causal, ctx.scale)
    return *grads, None, None


ATTENTION_BOUND = attention_operator_forward.register_autograd(
    attention_operator_gradients, setup_context=attention_keep
)


DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def check_tensor(name, t, query):
    if t.dtype not in DTYPES:
        raise TypeError(
            f"{name} has {t.dtype}: float16, bfloat16 and float32 are taken"
        )
    if t.dtype != query.dtype:
        raise TypeError(
            f"{name} has {t.dtype}, and query has {query.dtype}: they must be "
            "the same"
        )
    if t.device.type != DEVICE.type:
        raise ValueError(f"{name} is on {t.device}, not on {DEVICE}")
    # Triton starts a kernel on the current GPU, wherever its tensors are.
    if t.is_cuda and t.device.index != torch.cuda.current_device():
        raise ValueError(
            f"{name} is on {t.device}, which is not the current GPU"
        )
    if t.dim() != 4:
        raise ValueError(
            f"{name} has {t.dim()} dimensions, not 4: batch, heads, length, "
            "head dimension"
        )


def check_heads(heads, k_heads, enable_gqa):
    if heads == k_heads:
        return
    if not enable_gqa:
        raise ValueError(
            f"key has {k_heads} heads, and query has {heads}: they must be "
            "the same without enable_gqa"
        )
    if k_heads == 0 or heads % k_heads:
        raise ValueError(
            f"key has {k_heads} heads, and query has {heads}, which must be a "
            "multiple"
        )


def attention_check_arguments(query, key, value, scale, enable_gqa):
    for name, t in (("query", query), ("key", key), ("value", value)):
        check_tensor(name, t, query)
    batch, heads, _, D = query.shape
    if not 1 <= D <= max(ATTENTION_TILES):
        raise ValueError(
            f"the head dimension is {D}: 1 to {max(ATTENTION_TILES)} are taken"
        )
    for name, t in (("key", key), ("value", value)):
        if t.shape[-1] != D:
            raise ValueError(
                f"the head dimension of {name} is {t.shape[-1]}, and that of "
                f"query is {D}"
            )
        if t.shape[0] != batch:
            raise ValueError(
                f"{name} has {t.shape[0]} sequences, and query has {batch}"
            )
    check_heads(heads, key.shape[1], enable_gqa)
    if value.shape[1] != key.shape[1]:
        raise ValueError(
            f"value has {value.shape[1]} heads, and key has {key.shape[1]}"
        )
    if value.shape[2] != key.shape[2]:
        raise ValueError(
            f"value has {value.shape[2]} rows, and key has {key.shape[2]}"
        )
    if scale is not None and not 0 < scale < float("inf"):
        raise ValueError(f"scale is {scale}: a finite number above 0 is taken")


def as_autocast(*tensors):
    """The tensors, in the type of torch.autocast if that is on."""
    kind = "cuda" if ON_GPU else "cpu"
    if not torch.is_autocast_enabled(kind):
        return tensors
    return [t.to(torch.get_autocast_dtype(kind)) for t in tensors]


def attention(
    query, key, value, is_causal=False, scale=None, enable_gqa=False
):
    """F.scaled_dot_product_attention without a mask and without dropout.

    query is (batch, heads, queries, D), key and value are (batch, heads, keys,
    D), all in float16, bfloat16 or float32, with D from 1 to 256 and any
    strides. If is_causal, query i sees the keys up to i. Without a scale it is
    one over the root of D. If enable_gqa, query may have a multiple of the
    heads of key.
    """
    query, key, value = as_autocast(query, key, value)
    attention_check_arguments(query, key, value, scale, enable_gqa)
    if scale is None:
        scale = query.shape[-1] ** -0.5
    dtype = query.dtype
    if not ON_GPU and dtype == torch.bfloat16:
        # The interpreter multiplies the bits of bfloat16 as whole numbers.
        query, key, value = query.float(), key.float(), value.float()
    if torch.compiler.is_compiling():
        y, _ = attention_operator_forward(query, key, value, is_causal, scale)
    else:
        y = _AnyAttention.apply(query, key, value, is_causal, scale)
    return y.to(dtype)


# matrix-products/01-linear ----------------------------------------------------
# Gives linear.


@triton.jit
def _linear_place(tile, rows, columns, GROUP: tl.constexpr):
    """Row and column of a tile, by its number: groups of so many rows of
    tiles, and in a group column by column."""
    first = tile // (GROUP * columns) * GROUP
    # The last group may have fewer rows.
    height = tl.minimum(rows - first, GROUP)
    place = tile % (GROUP * columns)
    return first + place % height, place // height


LINEAR_PTX = tl.constexpr(ON_GPU and torch.version.hip is None)


@triton.jit
def _linear_sigmoid(x):
    if LINEAR_PTX and x.dtype == tl.float32:
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
def _linear_silu(x):
    sigmoid = _linear_sigmoid(x)
    return x * sigmoid, sigmoid * (1 + x * (1 - sigmoid))


@triton.jit
def _relu(z):
    # Without propagate_nan, the maximum of NaN and 0 is 0 on a GPU, so a NaN
    # would vanish, and nobody would notice it.
    y = tl.maximum(z, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return y, tl.where(z > 0, 1.0, 0.0)


@triton.jit
def _linear_gelu(z):
    # From 30 on the sigmoid is 1, and below -30 it is less than the smallest
    # number of float32, so 0. Without these limits the cube could overflow.
    near = tl.minimum(tl.maximum(z, -30.0), 30.0)
    square = near * near
    # u, and its derivative times z. 2 sqrt(2 / pi) is 1.5957..., and times
    # 0.044715 it is 0.0713...; three times that is 0.2140...
    u = near * (1.5957691216057308 + 0.07135481627260025 * square)
    du = near * (1.5957691216057308 + 0.21406444881780076 * square)
    sigmoid = _linear_sigmoid(u)
    return z * sigmoid, sigmoid * (1 + du * (1 - sigmoid))


@triton.jit
def _epilogue(
    sums,  # a tile of sums, in float32
    row,  # where the tile begins
    column,
    c_desc,  # (M, N) in tiles of this shape, or None
    c_ptr,  # (M, N), contiguous, if there is no descriptor
    bias_ptr,  # (N,), or None
    slope_desc,  # as c_desc: where the slope goes; or None
    M,
    N,
    ACT: tl.constexpr,  # the activation, or None
):
    col = column + tl.arange(0, sums.shape[1])
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + col, mask=col < N, other=0)
        sums += bias.to(tl.float32)[None, :]
    if ACT is not None:
        sums, slope = ACT(sums)
        # If nobody wants the slope, the compiler drops its instructions.
        if slope_desc is not None:
            slope_desc.store([row, column], slope.to(slope_desc.dtype))
    if c_desc is not None:
        c_desc.store([row, column], sums.to(c_desc.dtype))
    else:
        line = (row + tl.arange(0, sums.shape[0])).to(tl.int64)
        mask = (line[:, None] < M) & (col[None, :] < N)
        tl.store(c_ptr + line[:, None] * N + col[None, :], sums, mask=mask)


@triton.jit
def _linear_load(desc, row, column, TRANSPOSED: tl.constexpr):
    """The tile of a matrix that begins there, however the matrix lies."""
    if TRANSPOSED:
        return desc.load([column, row]).T
    else:
        return desc.load([row, column])


@triton.jit
def _product(
    a_desc,  # (M, K) in tiles of TILE_M and TILE_K; transposed, (K, M)
    b_desc,  # (K, N) in tiles of TILE_K and TILE_N; transposed, (N, K)
    c_desc,  # (M, N) in what is stored at a time; or None
    c_ptr,  # (PARTS, M, N), contiguous, if there is no descriptor
    bias_ptr,  # (N,), or None
    slope_desc,  # as c_desc, or None
    M,
    N,
    K,
    ACT: tl.constexpr,  # the activation, or None
    A_TRANSPOSED: tl.constexpr,
    B_TRANSPOSED: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    GROUP: tl.constexpr,  # rows of tiles in a group
    STAGES: tl.constexpr,  # num_stages of the inner loop
    STAY: tl.constexpr,  # persistent: whether programs take several tiles
    HALVES: tl.constexpr,  # whether results are stored in two halves
    DIVIDED: tl.constexpr,  # whether K is divided into parts
    PARTS,  # how many there are, each added up on its own
    K_PART,  # the length of such a part
    PRECISION: tl.constexpr,  # of float32: "tf32" or "ieee"
):
    # Without this promise the compiler would also write code for K = 0.
    tl.assume(K > 0)
    rows = tl.cdiv(M, TILE_M)
    columns = tl.cdiv(N, TILE_N)
    tiles = rows * columns

    # One tile after the other: ours have numbers that lie as far apart as
    # there are programs. (With a program for each tile, it is one turn.)
    # ``flatten`` makes one loop of both loops, so that loads of the next tile
    # begin before this one is stored.
    for work in tl.range(
        tl.program_id(0), tiles * PARTS, tl.num_programs(0), flatten=STAY
    ):
        row, column = _linear_place(work % tiles, rows, columns, GROUP)
        row *= TILE_M
        column *= TILE_N
        part = work // tiles
        begin = 0
        end = K
        if DIVIDED:
            begin = part * K_PART
            end = tl.minimum(begin + K_PART, K)

        sums = tl.zeros((TILE_M, TILE_N), tl.float32)
        for k in tl.range(begin, end, TILE_K, num_stages=STAGES):
            a = _linear_load(a_desc, row, k, A_TRANSPOSED)
            b = _linear_load(b_desc, k, column, B_TRANSPOSED)
            sums = tl.dot(a, b, sums, input_precision=PRECISION)

        # Each part has its own matrix of results.
        part_ptr = c_ptr
        if DIVIDED:
            part_ptr += part.to(tl.int64) * M * N
        # The whole tile, or its left and its right half.
        pieces = (sums,)
        if HALVES:
            # split() needs a last dimension of 2, and gives both parts.
            halves = sums.reshape(TILE_M, 2, TILE_N // 2)
            pieces = halves.permute(0, 2, 1).split()
        for i in tl.static_range(len(pieces)):
            _epilogue(
                sums=pieces[i],
                row=row,
                column=column + i * pieces[i].shape[1],
                c_desc=c_desc,
                c_ptr=part_ptr,
                bias_ptr=bias_ptr,
                slope_desc=slope_desc,
                M=M,
                N=N,
                ACT=ACT,
            )


LINEAR_GPU = torch.cuda.get_device_properties(DEVICE) if ON_GPU else None
LINEAR_NUM_SMS = LINEAR_GPU.multi_processor_count if ON_GPU else 4


def linear_shared_memory():
    """Bytes that a program can have; without a GPU, those of an H200."""
    if not ON_GPU:
        return 232448
    return getattr(LINEAR_GPU, "shared_memory_per_block_optin", 65536)


LINEAR_SHARED = linear_shared_memory()


def lies_in_rows(t):
    """Whether a descriptor takes it: numbers of a row side by side, and each
    row at a multiple of 16 bytes."""
    step = t.stride(0) * t.itemsize
    aligned = t.data_ptr() % 16 == 0 and step % 16 == 0
    return aligned and t.stride(1) == 1 and step > 0


def padded(rows, columns, dtype, device):
    """A new matrix whose rows lie as a descriptor wants."""
    step = 16 // dtype.itemsize
    width = triton.cdiv(columns, step) * step
    return torch.empty(rows, width, dtype=dtype, device=device)[:, :columns]


def linear_descriptor(t, rows, columns):
    """A descriptor in tiles of such a shape, and whether it is transposed."""
    if t.stride(1) == 1:
        return TensorDescriptor.from_tensor(t, [rows, columns]), False
    return TensorDescriptor.from_tensor(t.T, [columns, rows]), True


def launch(a, b, c, plan, bias=None, act=None, slope=None):
    """Launch the kernel: c = act(a @ b + bias), and the slope of act."""
    plan = dict(plan)
    programs_per_sm = plan.pop("PROGRAMS_PER_SM")
    M, K = a.shape
    N = b.shape[1]
    width = plan["TILE_N"]
    if plan["HALVES"]:
        width //= 2
    a_desc, a_transposed = linear_descriptor(a, plan["TILE_M"], plan["TILE_K"])
    b_desc, b_transposed = linear_descriptor(b, plan["TILE_K"], plan["TILE_N"])
    c_desc = None
    if plan["PARTS"] == 1 and lies_in_rows(c):
        c_desc, _ = linear_descriptor(c, plan["TILE_M"], width)
    slope_desc = None
    if slope is not None:
        slope_desc, _ = linear_descriptor(slope, plan["TILE_M"], width)
    tiles = triton.cdiv(M, plan["TILE_M"]) * triton.cdiv(N, plan["TILE_N"])
    programs = tiles * plan["PARTS"]
    if plan["STAY"]:
        programs = min(programs, LINEAR_NUM_SMS * programs_per_sm)
    _product[(programs,)](
        a_desc=a_desc,
        b_desc=b_desc,
        c_desc=c_desc,
        c_ptr=c if c_desc is None else None,
        bias_ptr=bias,
        slope_desc=slope_desc,
        M=M,
        N=N,
        K=K,
        ACT=act,
        A_TRANSPOSED=a_transposed,
        B_TRANSPOSED=b_transposed,
        DIVIDED=plan["PARTS"] > 1,
        **plan,
    )


LINEAR_ACTIVATIONS = {None: None, "relu": _relu, "gelu": _linear_gelu, "silu": _linear_silu}


LINEAR_TILES = {
    # precision: rows, columns, features of a step, warps, stages
    "16 bits": (
        (128, 256, 64, 8, 4),
        (128, 128, 64, 4, 6),
        (64, 128, 128, 4, 4),
        (64, 64, 128, 4, 6),
    ),
    "tf32": ((128, 128, 32, 8, 4), (64, 64, 32, 4, 4)),
    "ieee": ((64, 64, 16, 4, 4),),
}
# Rows of a result that are not aligned take more registers to store.
TILE_OF_ODD_ROWS = 128, 128, 64, 8, 4
# Without a TMA, threads compute an address for each number.
TILE_BEFORE_H100 = 64, 64, 32, 4, 4
# Operations of an SM in a µs.
OPERATIONS = {"16 bits": 6.0e6, "tf32": 3.0e6, "ieee": 0.4e6}


def precision_of(dtype):
    if dtype != torch.float32:
        return "16 bits"
    # PyTorch's switch: whether Tensor Cores may cut float32.
    if torch.backends.cuda.matmul.fp32_precision == "tf32":
        return "tf32"
    return "ieee"


def tiles_for(precision, aligned):
    """Tiles that a product may take."""
    if precision != "ieee" and LINEAR_SHARED < 200_000:
        return (TILE_BEFORE_H100,)
    if precision == "16 bits" and not aligned:
        return (TILE_OF_ODD_ROWS, *LINEAR_TILES[precision][2:])
    return LINEAR_TILES[precision]


def estimate(M, N, K, precision, tile, parts):
    """How many µs a product takes, roughly."""
    rows, columns, features, _, _ = tile
    itemsize = 2 if precision == "16 bits" else 4
    # How many programs have work, and how many rounds that takes.
    programs = triton.cdiv(M, rows) * triton.cdiv(N, columns) * parts
    rounds = triton.cdiv(programs, LINEAR_NUM_SMS)
    # A step: its products, and its loads from L2, which gives 12 000 GB/s to
    # all SMs together, and 120 GB/s to one of them.
    steps = triton.cdiv(triton.cdiv(K, features), parts)
    products = 2 * rows * columns * features / OPERATIONS[precision]
    from_l2 = min(12e6 / min(programs, LINEAR_NUM_SMS), 120e3)
    loads = itemsize * (rows + columns) * features / from_l2
    # Then the tile is stored, 30 000 numbers in a µs.
    store = rows * columns / 30e3
    on_sms = rounds * (steps * max(products, loads) + store)
    # With few tokens DRAM takes longer. It gives 4200 GB/s to all SMs
    # together, and 40 GB/s to one of them.
    read = itemsize * K * (M + N)
    from_dram = read / min(40e3 * programs, 4.2e6)
    # Most of the shorter time is hidden by the longer one.
    time = max(on_sms, from_dram) + 0.3 * min(on_sms, from_dram)
    if parts > 1:
        # A second kernel starts and adds them up. They are written and read
        # once, as float32, and a µs has room for 2.3 MB of that.
        time += 5 + 8 * parts * M * N / 2.3e6
    return time


@functools.cache
def tile_and_parts(M, N, K, precision, aligned, most_parts):
    """The choice with the shortest time; each part has four steps at least."""
    choices = [
        (tile, parts)
        for tile in tiles_for(precision, aligned)
        for parts in range(1, 33)
        if parts == 1 or parts <= min(most_parts, K // tile[2] // 4)
    ]
    return min(
        choices, key=lambda choice: estimate(M, N, K, precision, *choice)
    )


def plan_product(M, N, K, dtype, aligned=True, act=None, most_parts=32):
    """Tiles of a product, and into how many parts K is divided."""
    precision = precision_of(dtype)
    tile, parts = tile_and_parts(M, N, K, precision, aligned, most_parts)
    programs_per_sm = 1
    # On an H200 two programs are faster for sums of up to 1024 features, and
    # for longer ones where there are three times as many new features.
    short = max(1024, N // 3) >= K
    if act is not None and short and tile == LINEAR_TILES["16 bits"][0]:
        tile = LINEAR_TILES["16 bits"][1]
        programs_per_sm = 2
    tile_m, tile_n, tile_k, warps, stages = tile
    steps = triton.cdiv(K, tile_k)
    steps_of_a_part = triton.cdiv(steps, parts)
    # As many stages as there is room for, beside half a tile of results.
    stage = (tile_m + tile_n) * tile_k * dtype.itemsize
    room = LINEAR_SHARED // programs_per_sm - 1024
    room -= tile_m * tile_n // 2 * dtype.itemsize
    return {
        "TILE_M": tile_m,
        "TILE_N": tile_n,
        "TILE_K": tile_k,
        "GROUP": 8,
        "STAGES": max(1, min(stages, room // stage)),
        "STAY": True,
        "HALVES": True,
        "PARTS": triton.cdiv(steps, steps_of_a_part),
        "K_PART": steps_of_a_part * tile_k,
        "PRECISION": "tf32" if precision == "tf32" else "ieee",
        "PROGRAMS_PER_SM": programs_per_sm,
        "num_warps": warps,
    }


@triton.jit
def _add_parts(
    parts_ptr,  # (parts, size), float32
    c_ptr,  # (size,): rows of N numbers
    bias_ptr,  # (N,), or None
    slope_ptr,  # rows of N numbers, or None
    parts,
    size,
    N,
    slope_stride,  # from a row of slopes to the next
    ACT: tl.constexpr,
    ROWS: tl.constexpr,  # parts of a step
    COLUMNS: tl.constexpr,  # numbers of a program
):
    at = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside = at < size
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, parts, ROWS):  # so many parts at a time
        part = start + tl.arange(0, ROWS)
        mask = (part[:, None] < parts) & inside[None, :]
        place = part.to(tl.int64)[:, None] * size + at[None, :]
        sums += tl.load(parts_ptr + place, mask=mask, other=0)
    total = tl.sum(sums, axis=0)

    if bias_ptr is not None:  # at % N is the new feature
        bias = tl.load(bias_ptr + at % N, mask=inside, other=0)
        total += bias.to(tl.float32)
    if ACT is not None:
        total, slope = ACT(total)
        if slope_ptr is not None:
            place = at // N * slope_stride + at % N
            tl.store(slope_ptr + place, slope, mask=inside)
    tl.store(c_ptr + at, total, mask=inside)


def add_parts(parts, c, bias=None, act=None, slope=None):
    """c = act(the sum of its parts + bias), and the slope of act."""
    slope_stride = 0
    if slope is not None:
        slope_stride = slope.stride(0)
    rows = min(32, triton.next_power_of_2(parts.shape[0]))
    columns = 1024 // rows
    _add_parts[(triton.cdiv(c.numel(), columns),)](
        parts_ptr=parts,
        c_ptr=c,
        bias_ptr=bias,
        slope_ptr=slope,
        parts=parts.shape[0],
        size=c.numel(),
        N=c.shape[-1],
        slope_stride=slope_stride,
        ACT=act,
        ROWS=rows,
        COLUMNS=columns,
        num_warps=4,
    )


def product(a, b, c, bias=None, act=None, slope=None, most_parts=32):
    """c = act(a @ b + bias), in as many parts as the plan says."""
    M, K = a.shape
    N = b.shape[1]
    plan = plan_product(M, N, K, a.dtype, lies_in_rows(c), act, most_parts)
    if plan["PARTS"] == 1:
        launch(a, b, c, plan, bias, act, slope)
        return
    parts = torch.empty(
        plan["PARTS"], *c.shape, dtype=torch.float32, device=c.device
    )
    launch(a, b, parts, plan)
    add_parts(parts, c, bias, act, slope)


def linear_forward(x, w, bias=None, act=None, keeps_slope=False, most_parts=32):
    """y, and the slope of the activation if it is kept."""
    y = torch.empty(
        x.shape[0], w.shape[0], dtype=x.dtype, device=x.device
    )  # fmt: skip
    slope = None
    if keeps_slope:
        slope = padded(*y.shape, dtype=x.dtype, device=x.device)
    product(x, w.T, y, bias, act, slope, most_parts)
    return y, slope


@triton.jit
def _times_slope(dy, slope):
    return dy * slope


@triton.jit
def _where_positive(dy, y):
    # y > 0 would stop the gradient where y is NaN. PyTorch lets it pass.
    return tl.where(y <= 0, 0.0, dy)


CHAINS = {
    None: None,
    "relu": _where_positive,
    "gelu": _times_slope,
    "silu": _times_slope,
}


@triton.jit
def _own_pass(
    dy_desc,  # (M, N) in tiles of TILE_M and TILE_N
    saved_desc,  # as dy_desc; or None: then dz is dy
    dz_desc,  # as dy_desc; or None, if dz is dy
    sums_ptr,  # (strips, N), float32: parts of db; or None
    N,
    CHAIN: tl.constexpr,  # what makes dz of dy and of what was saved
    TILE_M: tl.constexpr,  # tokens of a step
    TILE_N: tl.constexpr,  # new features of a program
    STEPS: tl.constexpr,  # how many tiles a program has, one below the other
    STAGES: tl.constexpr,
):
    columns = tl.cdiv(N, TILE_N)
    strip = tl.program_id(0) // columns  # of STEPS * TILE_M tokens
    start = tl.program_id(0) % columns * TILE_N
    sums = tl.zeros((TILE_M, TILE_N), tl.float32)
    for step in tl.range(STEPS, num_stages=STAGES):  # down the strip
        row = (strip * STEPS + step) * TILE_M
        dz = dy_desc.load([row, start])
        if saved_desc is not None:
            saved = saved_desc.load([row, start])
            dz = CHAIN(dz, saved).to(dy_desc.dtype)
            dz_desc.store([row, start], dz)
        # Tokens that do not exist have a dy of 0.
        sums += dz.to(tl.float32)
    if sums_ptr is not None:
        feature = start + tl.arange(0, TILE_N)
        place = strip.to(tl.int64) * N + feature
        tl.store(sums_ptr + place, tl.sum(sums, axis=0), mask=feature < N)


def new_dz(dy):
    return padded(*dy.shape, dtype=dy.dtype, device=dy.device)


def new_sums(rows, dy):
    """Room for the parts of db."""
    shape = (rows, dy.shape[1])
    return torch.empty(shape, dtype=torch.float32, device=dy.device)


def dz_in_a_pass(dy, saved, chain, wants_db):
    """dz, and the parts of db if it is wanted, by a kernel of their own."""
    if saved is None and not wants_db:
        return dy, None
    tile = 64, 64
    steps = 2
    M, N = dy.shape
    strips = triton.cdiv(M, tile[0] * steps)
    dz = dy
    saved_desc = None
    dz_desc = None
    if saved is not None:
        dz = new_dz(dy)
        saved_desc, _ = linear_descriptor(saved, *tile)
        dz_desc, _ = linear_descriptor(dz, *tile)
    sums = None
    if wants_db:
        sums = new_sums(strips, dy)
    dy_desc, _ = linear_descriptor(dy, *tile)
    _own_pass[(strips * triton.cdiv(N, tile[1]),)](
        dy_desc=dy_desc,
        saved_desc=saved_desc,
        dz_desc=dz_desc,
        sums_ptr=sums,
        N=N,
        CHAIN=chain,
        TILE_M=tile[0],
        TILE_N=tile[1],
        STEPS=steps,
        # Two stages have one slot: the second tile is requested when the
        # first one has left it, while its dz is on the way out.
        STAGES=2,
        num_warps=4,
    )
    return dz, sums


def linear_backward(dy, x, w, saved, chain, wants):
    """dx, dw and db, those that are wanted."""
    wants_dx, wants_dw, wants_db = wants
    M, N = dy.shape
    K = w.shape[1]
    dz, sums = dz_in_a_pass(dy, saved, chain, wants_db)
    dx = None
    if wants_dx:
        dx = torch.empty(M, K, dtype=dy.dtype, device=dy.device)
        product(dz, w, dx)
    dw = None
    if wants_dw:
        dw = torch.empty(N, K, dtype=dy.dtype, device=dy.device)
        product(dz.T, x, dw)
    db = None
    if wants_db:
        db = torch.empty(N, dtype=dy.dtype, device=dy.device)
        add_parts(sums, db)
    return dx, dw, db


def linear_for_descriptors(t, transposed_too=True):
    """The matrix, or a copy of it in a layout that a descriptor takes."""
    if lies_in_rows(t) or (transposed_too and lies_in_rows(t.T)):
        return t
    return padded(*t.shape, dtype=t.dtype, device=t.device).copy_(t)


def linear_check_arguments(input, weight, bias, activation):
    """Raise an error that names the wrong argument, and says why."""
    named = {"input": input, "weight": weight, "bias": bias}
    named = {name: t for name, t in named.items() if t is not None}
    for name, t in named.items():
        if t.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            raise TypeError(
                f"{name} has {t.dtype}: float16, bfloat16 and float32 are "
                "taken"
            )
        if t.dtype != input.dtype:
            raise TypeError(
                f"{name} has {t.dtype}, and input has {input.dtype}: they "
                "must be the same"
            )
        if t.device.type != DEVICE.type:
            raise ValueError(f"{name} is on {t.device}, not on {DEVICE}")
        # Triton starts a kernel on the current GPU, wherever its tensors are.
        if t.is_cuda and t.device.index != torch.cuda.current_device():
            raise ValueError(
                f"{name} is on {t.device}, which is not the current GPU"
            )
    if input.dim() == 0:
        raise ValueError("input has no dimension: the last one has features")
    if weight.dim() != 2:
        raise ValueError(
            f"weight has {weight.dim()} dimensions, not 2: new features and "
            "old ones"
        )
    if weight.numel() == 0:
        raise ValueError(
            f"weight is {tuple(weight.shape)}: a feature is needed on each "
            "side"
        )
    if input.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"input has {input.shape[-1]} features, and weight takes "
            f"{weight.shape[1]}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"bias is {tuple(bias.shape)}, and weight makes "
            f"{weight.shape[0]} features"
        )
    if activation not in LINEAR_ACTIVATIONS:
        names = ", ".join(str(name) for name in LINEAR_ACTIVATIONS)
        raise ValueError(f"activation is {activation!r}: {names} are taken")


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, activation, trains):
        ctx.activation = activation
        ctx.shapes = x.shape, weight.shape
        if x.shape[0] == 0:
            return x.new_empty(0, weight.shape[0])
        x = linear_for_descriptors(x)
        w = linear_for_descriptors(weight)
        if bias is not None:
            bias = bias.contiguous()
        keeps_slope = trains and activation in ("gelu", "silu")
        act = LINEAR_ACTIVATIONS[activation]
        y, saved = linear_forward(x, w, bias, act, keeps_slope)
        if activation == "relu":
            saved = y
        ctx.save_for_backward(
            x if ctx.needs_input_grad[1] else None,
            w if ctx.needs_input_grad[0] else None,
            saved,
        )
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable  # no second derivatives
    def backward(ctx, dy):
        wants = ctx.needs_input_grad[:3]
        (M, K), (N, _) = ctx.shapes
        if M == 0:
            shapes = (0, K), (N, K), (N,)
            grads = [
                dy.new_zeros(shape) if want else None
                for shape, want in zip(shapes, wants, strict=True)
            ]
            return *grads, None, None
        x, w, saved = ctx.saved_tensors
        if w is None:
            w = dy.new_empty(N, K)  # for its shape alone
        dy = linear_for_descriptors(dy, transposed_too=False)
        if saved is not None:
            saved = linear_for_descriptors(saved, transposed_too=False)
        chain = CHAINS[ctx.activation]
        return *linear_backward(dy, x, w, saved, chain, wants), None, None


def linear(input, weight, bias=None, activation=None):
    """What F.linear(input, weight, bias) gives, and then an activation.

    input is (..., K), weight is (N, K), bias is (N,) or None. All have
    float16, all bfloat16, or all float32. activation is None, "relu", "gelu"
    (the form with tanh), or "silu".
    """
    linear_check_arguments(input, weight, bias, activation)
    given = [t for t in (input, weight, bias) if t is not None]
    trains = torch.is_grad_enabled() and any(t.requires_grad for t in given)
    dtype = input.dtype
    if not ON_GPU and dtype == torch.bfloat16:
        # The interpreter multiplies the bits of bfloat16 as whole numbers.
        input, weight = input.float(), weight.float()
        bias = None if bias is None else bias.float()
    x = input.reshape(-1, input.shape[-1])
    y = _Linear.apply(x, weight, bias, activation, trains)
    return y.reshape(*input.shape[:-1], weight.shape[0]).to(dtype)


# matrix-products/02-swiglu ----------------------------------------------------
# Gives swiglu, geglu, gated.


GATE_PTX = tl.constexpr(ON_GPU and torch.version.hip is None)


@triton.jit
def _gate_sigmoid(x):
    if GATE_PTX and x.dtype == tl.float32:
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
def _gate_silu(x):
    sigmoid = _gate_sigmoid(x)
    return x * sigmoid, sigmoid * (1 + x * (1 - sigmoid))


@triton.jit
def _gate_gelu(x):
    below = 0.5 + 0.5 * tl.erf(x * 0.7071067811865476)  # 1 / sqrt(2)
    density = tl.exp(-0.5 * x * x) * 0.3989422804014327  # 1 / sqrt(2 pi)
    # Beyond 30 the second term is 0; infinity times 0 would not be.
    return x * below, below + tl.where(tl.abs(x) < 30, x * density, 0.0)


@triton.jit
def _reciprocal(x):
    if GATE_PTX:
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
    if GATE_PTX:
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
        return _gate_gelu(x)
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


@triton.jit
def _gate_gelu_tanh(x):
    near = tl.minimum(tl.maximum(x, -30.0), 30.0)
    square = near * near
    # v, and its derivative times x. 2 sqrt(2 / pi) is 1.5957..., and times
    # 0.044715 it is 0.0713...; three times that is 0.2140...
    v = near * (1.5957691216057308 + 0.07135481627260025 * square)
    dv = near * (1.5957691216057308 + 0.21406444881780076 * square)
    sigmoid = _gate_sigmoid(v)
    return x * sigmoid, sigmoid * (1 + dv * (1 - sigmoid))


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


def gate_forward(gate, up, y, function):
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


def gate_backward(dy, gate, up, dgate, dup, function, y=None):
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
        gate_forward(gate, up, y, function)
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
            gate_backward(dy, *halves(gate), *halves(dx), ctx.function)
            return dx, None, None
        dgate = None
        dup = None
        if wants_dgate:
            dgate = torch.empty(gate.shape, **like)
        if wants_dup:
            dup = torch.empty(up.shape, **like)
        gate_backward(dy, gate, up, dgate, dup, ctx.function)
        return dgate, dup, None


def gate_check_arguments(gate, up):
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


def gated(gate, up, function):
    """An activation of gate, times up; both passes run in Triton."""
    gate_check_arguments(gate, up)
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
    return gated(gate, up, _gate_silu)


def geglu(gate, up=None, approximate="none"):
    """What F.gelu(gate, approximate=approximate) * up gives; see swiglu."""
    functions = {"none": _gelu_short, "tanh": _gate_gelu_tanh}
    if approximate not in functions:
        raise ValueError(
            f"approximate is {approximate!r}: 'none' and 'tanh' are taken"
        )
    return gated(gate, up, functions[approximate])


# norms-and-losses/04-cross-entropy --------------------------------------------
# Gives cross_entropy.


LOSS_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _merge(m1, s1, m2, s2):
    """The pair of two parts of a row."""
    m = tl.maximum(m1, m2)
    s1 *= tl.exp2((m1 - m) * LOSS_LOG2E)
    s2 *= tl.exp2((m2 - m) * LOSS_LOG2E)
    return m, s1 + s2


@triton.jit
def _groups_of(
    row,
    N: tl.constexpr,  # columns
    GROUP: tl.constexpr,  # columns of 16 bytes
):
    """Where the first group of a row is in memory; how many columns stand
    before it; and how many groups there are."""
    first = tl.cast(row, tl.int64) * N  # M * N may pass 2**31
    start = (first + GROUP - 1) // GROUP * GROUP
    head = (start - first).to(tl.int32)
    # A row may be so narrow that it has no group.
    return start, head, tl.maximum(N - head, 0) // GROUP


@triton.jit
def _block(
    first,  # the first group of the block
    groups,  # how many groups there are; None: all of the block exist
    THREADS: tl.constexpr,
    GROUP: tl.constexpr,
    LOADS: tl.constexpr,  # groups of a thread
):
    """A block: its columns, one tile for each load; which of them exist; and
    where it begins and ends."""
    cols = ()
    masks = ()
    for i in tl.static_range(LOADS):
        group = first + i * THREADS + tl.arange(0, THREADS)[:, None]
        cols += (group * GROUP + tl.arange(0, GROUP)[None, :],)
        if groups is None:
            masks += (tl.full((THREADS, 1), True, tl.int1),)
        else:
            masks += (group < groups,)
    begin = first * GROUP
    return cols, masks, begin, begin + LOADS * THREADS * GROUP


@triton.jit
def _edges(
    head,  # columns before the first group
    groups,  # of the row
    N: tl.constexpr,
    THREADS: tl.constexpr,  # at least twice as many as GROUP
    GROUP: tl.constexpr,
):
    """Both edges of a row as one block, with a column for each thread."""
    i = tl.arange(0, THREADS)[:, None]
    # The first threads have the columns -GROUP to -1, and as many threads
    # after them have those behind the last group.
    col = i - GROUP + tl.where(i < GROUP, 0, groups * GROUP)
    exists = (i < 2 * GROUP) & (col >= -head) & (col < N - head)
    return (col,), (exists,), -head, N - head


@triton.jit
def _loss_load(
    x_ptr,  # where the first group is
    block,
    HINT: tl.constexpr,  # what the caches should do
):
    """The logits of a block, one tile for each load."""
    cols, masks, _, _ = block
    xs = ()
    for i in tl.static_range(len(cols)):
        x = tl.load(
            x_ptr + cols[i],
            mask=masks[i],
            other=float("-inf"),
            eviction_policy=HINT,
        )
        xs += (x,)
    return xs


@triton.jit
def _add(
    xs,  # the logits of a block, from _load
    block,
    w_ptr,  # weights, from the first group on; None: all are 1
    m,  # (THREADS,): the largest so far
    s,  # (THREADS,): the sum of exp(x - m) so far
    sum_x,  # (THREADS,): the sum of the weighted logits so far
    SMOOTH: tl.constexpr,  # label smoothing
):
    """Add a block to the three numbers of each thread."""
    cols, masks, _, _ = block
    new = m
    for i in tl.static_range(len(xs)):
        new = tl.maximum(new, tl.max(xs[i].to(tl.float32), axis=1))

    # The sum so far was about the old maximum.
    s *= tl.exp2((m - new) * LOSS_LOG2E)
    for i in tl.static_range(len(xs)):
        x = xs[i].to(tl.float32)
        s += tl.sum(tl.exp2((x - new[:, None]) * LOSS_LOG2E), axis=1)
        if SMOOTH > 0:
            if w_ptr is not None:
                x *= tl.load(w_ptr + cols[i], mask=masks[i])
            sum_x += tl.sum(tl.where(masks[i], x, 0), axis=1)
    return new, s, sum_x


@triton.jit
def _sums(
    x_ptr,  # where the first group is
    w_ptr,
    place,  # columns before the first group of the row; groups to sweep over;
    # whether to read both edges, too; all groups of the row
    N: tl.constexpr,
    SMOOTH: tl.constexpr,
    THREADS: tl.constexpr,
    GROUP: tl.constexpr,
    LOADS: tl.constexpr,
    FULL: tl.constexpr,  # so many groups, in whole blocks, need no mask
    HINT: tl.constexpr,
):
    """Maximum, sum of exponentials, and sum of the weighted logits."""
    STEP: tl.constexpr = THREADS * LOADS
    head, groups, edges, groups_of_row = place
    m = tl.full((THREADS,), LOWEST, tl.float32)
    s = tl.zeros((THREADS,), tl.float32)
    sum_x = tl.zeros((THREADS,), tl.float32)

    # Groups that need a mask.
    for first in tl.range(FULL, groups, STEP, num_stages=1):
        block = _block(first, groups, THREADS, GROUP, LOADS)
        xs = _loss_load(x_ptr, block, HINT)
        m, s, sum_x = _add(xs, block, w_ptr, m, s, sum_x, SMOOTH)

    # All others. There are none if the row is left out.
    for i in tl.range(0, tl.minimum(groups, FULL), STEP, num_stages=1):
        block = _block(FULL - STEP - i, None, THREADS, GROUP, LOADS)
        xs = _loss_load(x_ptr, block, HINT)
        m, s, sum_x = _add(xs, block, w_ptr, m, s, sum_x, SMOOTH)

    if edges:
        outer = _edges(head, groups_of_row, N, THREADS, GROUP)
        xs_outer = _loss_load(x_ptr, outer, HINT)
        m, s, sum_x = _add(xs_outer, outer, w_ptr, m, s, sum_x, SMOOTH)

    # The three numbers of each thread become those of the program.
    m, s = tl.reduce((m, s), 0, _merge)
    return m, s, tl.sum(sum_x)


@triton.jit
def _target(
    target_ptr,  # (M,)
    w_ptr,  # (N + 1,): weights and their sum; None: all are 1
    row,
    ignore,  # the target that does not count
    N: tl.constexpr,
):
    """The target of a row; whether it counts; whether it is a class; its
    weight; and the sum of all weights."""
    t = tl.load(target_ptr + row)
    live = t != ignore
    exists = (t >= 0) & (t < N)
    w_t = 1.0
    sum_w = N
    if w_ptr is not None:
        w_t = tl.load(w_ptr + t, mask=exists, other=0)
        sum_w = tl.load(w_ptr + N)
    w_t = tl.where(live, tl.where(exists, w_t, float("nan")), 0.0)
    return t, live, exists, w_t, sum_w


@triton.jit
def _keep(
    rows_ptr,  # (4, M), at this row
    M,
    mine,  # whether to store anything
    live,
    x_t,  # the logit of the target
    w_t,
    sum_w,
    sums,  # maximum, sum of exponentials, sum of the weighted logits
    N: tl.constexpr,
    SMOOTH: tl.constexpr,
    Z: tl.constexpr,  # the factor of the z-loss
):
    """Store loss, weight, maximum and sum of a row; return the last two."""
    m, s, sum_x = sums
    log = tl.log(s)
    lse = m + log
    # First the difference of two logits, which may be large, and then the
    # logarithm, which is small.
    loss = (1 - SMOOTH) * w_t * (m - x_t + log)
    if SMOOTH > 0:
        loss += SMOOTH / N * (sum_w * lse - sum_x)
    loss += Z * lse * lse
    # Of a row that is ignored, all exponentials are to be 0.
    m = tl.where(live, m, float("inf"))
    s = tl.where(live, s, 1)
    tl.store(rows_ptr, tl.where(live, loss, 0), mask=mine)
    tl.store(rows_ptr + M, w_t, mask=mine)
    tl.store(rows_ptr + 2 * M, m, mask=mine)
    tl.store(rows_ptr + 3 * M, s, mask=mine)
    return m, s


@triton.jit
def _cross_entropy_fwd(
    x_ptr,  # (M, N): logits, contiguous
    target_ptr,  # (M,): classes
    w_ptr,  # (N + 1,): weights in float32 and their sum; None: all are 1
    rows_ptr,  # (4, M): loss, weight, maximum and sum of each row
    M,  # rows
    ignore,  # the target that does not count
    SMOOTH: tl.constexpr,  # label smoothing
    Z: tl.constexpr,  # the factor of the z-loss
    N: tl.constexpr,  # classes
    GROUP: tl.constexpr,  # columns of 16 bytes
    THREADS: tl.constexpr,  # of a program
    LOADS: tl.constexpr,  # groups that a thread loads at a time
    FULL: tl.constexpr,  # so many groups, in whole blocks, need no mask
):
    row = tl.program_id(0)
    start, head, groups = _groups_of(row, N, GROUP)
    t, live, exists, w_t, sum_w = _target(target_ptr, w_ptr, row, ignore, N)

    # From here on, columns are counted from the first group.
    x_ptr += start
    w_ptr = None if w_ptr is None else w_ptr + head
    x_t = tl.load(x_ptr + (t - head), mask=exists, other=0).to(tl.float32)

    # A row that is ignored need not be read.
    place = (head, tl.where(live, groups, 0), N % GROUP > 0, groups)
    sums = _sums(
        x_ptr, w_ptr, place, N, SMOOTH, THREADS, GROUP, LOADS, FULL, ""
    )
    _keep(rows_ptr + row, M, None, live, x_t, w_t, sum_w, sums, N, SMOOTH, Z)


LOSS_CUDA = ON_GPU and torch.version.hip is None
LOSS_WARP = 32 if ON_GPU else 1  # threads; without a GPU small rows have blocks


def threads_of(warps):
    """Threads of a program: enough for both edges."""
    return max(LOSS_WARP * warps, 16)


def loss_cut(N, group, slices, block):
    """How many slices a row really has; how many groups a slice has; and how
    many of them, in whole blocks, exist in each slice of each row."""
    most = max(N // group, 1)
    width = triton.cdiv(most, slices)
    slices = triton.cdiv(most, width)
    least = N // group  # groups of a row
    if N % group > 0:
        least = (N - group + 1) // group  # the first one may begin late
    least -= (slices - 1) * width  # groups of the last slice
    full = max(min(least, width), 0) // block * block
    return slices, width, full


def loss_plan_forward(smooth, weighted):
    """Warps of a program, and groups that a thread loads at a time."""
    if smooth > 0 and not weighted:
        return 4, 4
    return 4, 2


def loss_forward(x, target, w=None, ignore=-100, smooth=0.0, z=0.0):
    """Loss, weight, maximum and sum of each row, as a (4, M) tensor.

    x is a contiguous matrix, and w has the weights in float32 and their sum.
    """
    M, N = x.shape
    group = 16 // x.itemsize
    warps, loads = loss_plan_forward(smooth, w is not None)
    threads = threads_of(warps)
    _, _, full = loss_cut(N, group, slices=1, block=threads * loads)
    rows = torch.empty(4, M, device=x.device)
    _cross_entropy_fwd[(M,)](
        x_ptr=x,
        target_ptr=target,
        w_ptr=w,
        rows_ptr=rows,
        M=M,
        ignore=ignore,
        SMOOTH=smooth,
        Z=z,
        N=N,
        GROUP=group,
        THREADS=threads,
        LOADS=loads,
        FULL=full,
        num_warps=warps,
    )
    return rows


@triton.jit
def _loss_write(
    xs,  # the logits of a block
    block,
    dx_ptr,  # gradients, from the first group on
    w_ptr,
    hot,  # the column of the target, counted from the first group
    m,
    p,  # the factor of the exponentials
    a,  # what is subtracted at the target
    e,  # what is subtracted everywhere, times the weight
    SMOOTH: tl.constexpr,
):
    """Store the gradients of a block."""
    cols, masks, begin, end = block
    for i in tl.static_range(len(xs)):
        dx = tl.exp2((xs[i].to(tl.float32) - m) * LOSS_LOG2E) * p
        if SMOOTH > 0:
            if w_ptr is None:
                dx -= e
            else:
                dx -= e * tl.load(w_ptr + cols[i], mask=masks[i])
        if (hot >= begin) & (hot < end):
            dx -= tl.where(cols[i] == hot, a, 0)
        tl.store(dx_ptr + cols[i], dx, mask=masks[i])


@triton.jit
def _factors(
    g_ptr,  # the gradient of the loss of this row
    live,
    w_t,
    sum_w,
    m,
    s,
    N: tl.constexpr,
    SMOOTH: tl.constexpr,
    Z: tl.constexpr,
):
    """p, a and e of a row, see the formula; p is divided by s already."""
    g = tl.where(live, tl.load(g_ptr).to(tl.float32), 0)
    lse = tl.where(live, m + tl.log(s), 0)
    a = g * (1 - SMOOTH) * w_t
    e = g * (SMOOTH / N)
    p = (a + e * sum_w + g * (2 * Z) * lse) / s
    return p, a, e


@triton.jit
def _cross_entropy_bwd(
    x_ptr,  # (M, N): logits, contiguous
    target_ptr,  # (M,): classes
    w_ptr,  # (N + 1,): weights in float32 and their sum; None: all are 1
    rows_ptr,  # (4, M): from the forward pass
    g_ptr,  # the gradients of the losses
    g_stride,  # from one to the next; 0 if all rows have the same
    dx_ptr,  # (M, N); may be x
    M,  # rows
    ignore,  # the target that does not count
    SMOOTH: tl.constexpr,  # label smoothing
    Z: tl.constexpr,  # the factor of the z-loss
    N: tl.constexpr,  # classes
    GROUP: tl.constexpr,  # columns of 16 bytes
    THREADS: tl.constexpr,  # of a program
    LOADS: tl.constexpr,  # groups of a thread
    BLOCKS: tl.constexpr,  # blocks of a row
):
    # Which row, and which block of it?
    row = tl.program_id(0) // BLOCKS
    number = tl.program_id(0) % BLOCKS
    start, head, groups = _groups_of(row, N, GROUP)

    # Load the block.
    x_ptr += start
    dx_ptr += start
    w_here = None if w_ptr is None else w_ptr + head
    first = number * (THREADS * LOADS)
    block = _block(first, groups, THREADS, GROUP, LOADS)
    xs = _loss_load(x_ptr, block, "")

    # What is known of the row.
    t, live, _, w_t, sum_w = _target(target_ptr, w_ptr, row, ignore, N)
    m = tl.load(rows_ptr + 2 * M + row)
    s = tl.load(rows_ptr + 3 * M + row)
    g_ptr += row.to(tl.int64) * g_stride
    p, a, e = _factors(g_ptr, live, w_t, sum_w, m, s, N, SMOOTH, Z)

    hot = (t - head).to(tl.int32)
    _loss_write(xs, block, dx_ptr, w_here, hot, m, p, a, e, SMOOTH)
    edges = number == 0 if N % GROUP > 0 else False
    if edges:
        outer = _edges(head, groups, N, THREADS, GROUP)
        xs_outer = _loss_load(x_ptr, outer, "")
        _loss_write(xs_outer, outer, dx_ptr, w_here, hot, m, p, a, e, SMOOTH)


def stride_of(g):
    """From one gradient to the next; 0 if there is a single one."""
    if g.dim() == 0:
        return 0
    return g.stride(0)


def loss_backward(x, target, w, rows, g, dx=None, ignore=-100, smooth=0.0, z=0.0):
    """The gradient of the logits, in dx or in a new matrix.

    rows comes from forward, and g has the gradients of the losses.
    """
    if dx is None:
        dx = torch.empty_like(x)
    M, N = x.shape
    group = 16 // x.itemsize
    warps = 4
    loads = 2
    threads = threads_of(warps)
    blocks = triton.cdiv(max(N // group, 1), threads * loads)
    _cross_entropy_bwd[(M * blocks,)](
        x_ptr=x,
        target_ptr=target,
        w_ptr=w,
        rows_ptr=rows,
        g_ptr=g,
        g_stride=stride_of(g),
        dx_ptr=dx,
        M=M,
        ignore=ignore,
        SMOOTH=smooth,
        Z=z,
        N=N,
        GROUP=group,
        THREADS=threads,
        LOADS=loads,
        BLOCKS=blocks,
        num_warps=warps,
    )
    return dx


class Later(torch.autograd.Function):
    """The gradient is computed in the backward pass."""

    @staticmethod
    def forward(ctx, x, target, w, reduction, options):
        rows = loss_forward(x, target, w, **options)
        ctx.save_for_backward(x, target, w, rows)
        ctx.options = options
        ctx.mean = reduction == "mean"
        if reduction == "none":
            return rows[0].to(x.dtype)
        loss, ctx.count = rows[:2].sum(dim=1)
        if ctx.mean:
            loss = loss / ctx.count
        return loss.to(x.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable  # no second derivatives
    def backward(ctx, g):
        x, target, w, rows = ctx.saved_tensors
        if ctx.mean:
            g = g / ctx.count
        dx = loss_backward(x, target, w, rows, g, **ctx.options)
        # One gradient for each argument of forward.
        return dx, None, None, None, None


LOSS_EMPTY = tl.constexpr(0x7F800001_7F800001)  # two NaN that no sum gives


@triton.jit
def _share(
    words_ptr,  # (SLICES,): of this row
    part,  # our slice
    a,  # float32: the lower half of our word
    b,  # float32: the upper half
    SLICES: tl.constexpr,
    PADDED: tl.constexpr,  # a power of two, at least SLICES
    WAIT: tl.constexpr,  # False: in the interpreter
):
    """Store our word; return both numbers of each slice as soon as all are
    there."""
    # A number of 32 bits becomes one of 64 with zeros before it, because it is
    # unsigned.
    low = a.to(tl.uint32, bitcast=True).to(tl.int64)
    high = b.to(tl.uint32, bitcast=True).to(tl.int64)
    tl.atomic_xchg(words_ptr + part, low | (high << 32), sem="relaxed")

    slices = tl.arange(0, PADDED)
    at = words_ptr + tl.minimum(slices, SLICES - 1)
    word = tl.load(at, volatile=True)
    loads = 0
    while WAIT and tl.max((word == LOSS_EMPTY).to(tl.int32)) > 0:
        word = tl.load(at, volatile=True)
        loads += 1
        if loads == 10_000_000:  # it never comes: end with an error
            tl.inline_asm_elementwise(
                "trap; mov.b32 $0, $1;",
                constraints="=r,r",
                args=[loads],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )

    a = word.to(tl.uint32).to(tl.float32, bitcast=True)
    b = (word >> 32).to(tl.uint32).to(tl.float32, bitcast=True)
    # Behind the last slice there is a pair of nothing.
    return tl.where(slices < SLICES, a, LOWEST), tl.where(
        slices < SLICES, b, 0
    )


@triton.jit
def _cross_entropy_ahead(
    x_ptr,  # (M, N): logits, contiguous
    target_ptr,  # (M,): classes
    w_ptr,  # (N + 1,): weights in float32 and their sum; None: all are 1
    rows_ptr,  # (4, M): loss, weight, maximum and sum of each row
    g_ptr,  # the gradients of the losses
    g_stride,  # from one to the next; 0 if all rows have the same
    dx_ptr,  # (M, N); may be x. None: no second sweep
    words_ptr,  # a counter and (M, 2, SLICES) words; None: a single slice
    M,  # rows
    ignore,  # the target that does not count
    SMOOTH: tl.constexpr,  # label smoothing
    Z: tl.constexpr,  # the factor of the z-loss
    N: tl.constexpr,  # classes
    GROUP: tl.constexpr,  # columns of 16 bytes
    THREADS: tl.constexpr,  # of a program
    LOADS: tl.constexpr,  # groups that a thread loads at a time
    FULL: tl.constexpr,  # so many groups of each slice need no mask
    SLICES: tl.constexpr,  # of a row
    WIDTH: tl.constexpr,  # groups of a slice; the last one may have fewer
    PADDED: tl.constexpr,  # a power of two, at least SLICES
    WAIT: tl.constexpr,  # False: in the interpreter
):
    STEP: tl.constexpr = THREADS * LOADS

    # Which row, and which slice of it?
    ticket = tl.program_id(0)
    if WAIT and words_ptr is not None:
        drawn = tl.atomic_add(words_ptr, 1, sem="relaxed") - LOSS_EMPTY
        ticket = drawn.to(tl.int32)
    row = ticket // SLICES
    part = ticket % SLICES

    # Our groups. Slice 0 has the edges, too.
    start, head, groups_of_row = _groups_of(row, N, GROUP)
    skipped = part * WIDTH
    groups = tl.minimum(groups_of_row - skipped, WIDTH)
    edges = part == 0 if N % GROUP > 0 else False

    t, live, exists, w_t, sum_w = _target(target_ptr, w_ptr, row, ignore, N)

    # From here on, columns are counted from the first group of the slice.
    x_ptr += start + skipped * GROUP
    w_ptr = None if w_ptr is None else w_ptr + head + skipped * GROUP
    hot = (t - head - skipped * GROUP).to(tl.int32)

    # The program with the target stores what is kept of the row. It loads the
    # logit now. As soon as all programs have met, dx may be written over x.
    column = t - head
    at_edge = (column < 0) | (column >= groups_of_row * GROUP) | (exists == 0)
    inside = (hot >= 0) & (hot < groups * GROUP)
    mine = tl.where(at_edge, part == 0, inside)
    x_t = tl.load(x_ptr + hot, mask=exists & mine, other=0).to(tl.float32)

    # The first sweep, over our slice. It will be read again.
    place = (head, groups, edges, groups_of_row)
    m, s, sum_x = _sums(
        x_ptr,
        w_ptr,
        place,
        N,
        SMOOTH,
        THREADS,
        GROUP,
        LOADS,
        FULL,
        "evict_last",
    )

    # What all slices of the row have found.
    if words_ptr is not None:
        words = words_ptr + 1 + row.to(tl.int64) * (2 * SLICES)
        ms, exps = _share(words, part, m, s, SLICES, PADDED, WAIT)
        if SMOOTH > 0:
            words += SLICES
            _, parts = _share(words, part, m, sum_x, SLICES, PADDED, WAIT)
            sum_x = tl.sum(parts)
        m, s = tl.reduce((ms, exps), 0, _merge)
    sums = (m, s, sum_x)
    m, s = _keep(
        rows_ptr + row, M, mine, live, x_t, w_t, sum_w, sums, N, SMOOTH, Z
    )

    # The second sweep, the other way.
    if dx_ptr is not None:
        dx_ptr += start + skipped * GROUP
        g_ptr += row.to(tl.int64) * g_stride
        p, a, e = _factors(g_ptr, live, w_t, sum_w, m, s, N, SMOOTH, Z)
        for first in tl.range(0, tl.minimum(groups, FULL), STEP, num_stages=1):
            block = _block(first, None, THREADS, GROUP, LOADS)
            xs = _loss_load(x_ptr, block, "evict_first")  # for the last time
            _loss_write(xs, block, dx_ptr, w_ptr, hot, m, p, a, e, SMOOTH)
        for first in tl.range(FULL, groups, STEP, num_stages=1):
            block = _block(first, groups, THREADS, GROUP, LOADS)
            xs = _loss_load(x_ptr, block, "evict_first")
            _loss_write(xs, block, dx_ptr, w_ptr, hot, m, p, a, e, SMOOTH)
        if edges:
            outer = _edges(head, groups_of_row, N, THREADS, GROUP)
            xs_outer = _loss_load(x_ptr, outer, "evict_first")
            _loss_write(xs_outer, outer, dx_ptr, w_ptr, hot, m, p, a, e, SMOOTH)


LOSS_GPU = torch.cuda.get_device_properties(DEVICE) if ON_GPU else None
LOSS_NUM_SMS = LOSS_GPU.multi_processor_count if ON_GPU else 4

# Bytes of a row that a single program has, and of a slice. The interpreter
# gets small ones. On AMD's GPUs programs do not wait for each other.
WHOLE_ROW = 128 * 1024
LOSS_SLICE = 48 * 1024
if not ON_GPU:
    WHOLE_ROW = 768
    LOSS_SLICE = 288
elif not LOSS_CUDA:
    WHOLE_ROW = 2**31


def plan_ahead(row_bytes):
    """Warps of a program, groups that a thread loads at a time, slices of a
    row, and registers of a thread."""
    if row_bytes > WHOLE_ROW:
        return 8, 2, triton.cdiv(row_bytes, LOSS_SLICE), 64
    if row_bytes > 65536:
        return 16, 4, 1, 64
    return 16, 2, 1, 64


def resident(warps, registers):
    """How many such programs the GPU runs at a time, at least."""
    return 65536 // (32 * warps * registers) * LOSS_NUM_SMS


def ahead(x, target, w, g, dx=None, ignore=-100, smooth=0.0, z=0.0):
    """What forward and backward return, from one kernel.

    g has the gradients of the losses. dx may be x, which is then overwritten.
    """
    if dx is None:
        dx = torch.empty_like(x)
    M, N = x.shape
    warps, loads, slices, registers = plan_ahead(N * x.itemsize)
    if slices > resident(warps, registers):
        options = {"ignore": ignore, "smooth": smooth, "z": z}
        rows = loss_forward(x, target, w, **options)
        return rows, loss_backward(x, target, w, rows, g, dx, **options)

    group = 16 // x.itemsize
    threads = threads_of(warps)
    slices, width, full = loss_cut(N, group, slices, threads * loads)
    rows = torch.empty(4, M, device=x.device)
    words = None
    if slices > 1:
        empty = LOSS_EMPTY.value if LOSS_CUDA else 0x3F800000 << 32  # a sum of 1
        words = torch.full((1 + 2 * M * slices,), empty, device=x.device)
    options = {"num_warps": warps}
    if LOSS_CUDA:
        options["maxnreg"] = registers

    # The interpreter runs one program after the other, and nobody can wait
    # there. So a launch without the second sweep stores all words first.
    gradients = [dx]
    if slices > 1 and not ON_GPU:
        gradients = [None, dx]
    for gradient in gradients:
        _cross_entropy_ahead[(M * slices,)](
            x_ptr=x,
            target_ptr=target,
            w_ptr=w,
            rows_ptr=rows,
            g_ptr=g,
            g_stride=stride_of(g),
            dx_ptr=gradient,
            words_ptr=words,
            M=M,
            ignore=ignore,
            SMOOTH=smooth,
            Z=z,
            N=N,
            GROUP=group,
            THREADS=threads,
            LOADS=loads,
            FULL=full,
            SLICES=slices,
            WIDTH=width,
            PADDED=triton.next_power_of_2(slices),
            WAIT=LOSS_CUDA,
            **options,
        )
    return rows, dx


@triton.jit
def _scale(
    dx_ptr,  # (size,)
    factor_ptr,  # a single number
    size,
    BLOCK_SIZE: tl.constexpr,
):
    factor = tl.load(factor_ptr).to(tl.float32)
    if factor != 1:
        blocks = tl.cdiv(size, BLOCK_SIZE)
        for i in range(tl.program_id(0), blocks, tl.num_programs(0)):
            at = tl.cast(i, tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
            dx = tl.load(dx_ptr + at, mask=at < size)
            tl.store(dx_ptr + at, dx * factor, mask=at < size)


class Ahead(torch.autograd.Function):
    """The gradient is computed together with the loss."""

    @staticmethod
    def forward(ctx, x, target, w, reduction, options):
        # The loss divides by the weights of all targets that count.
        g = torch.ones((), device=x.device)
        if reduction == "mean":
            known = (target >= 0) & (target < x.shape[1])
            weights = known.float()
            if w is not None:
                weights = w[target.where(known, 0)]
            g = 1 / ((target != options["ignore"]) * weights).sum()
        rows, ctx.dx = ahead(x, target, w, g, **options)
        loss, count = rows[:2].sum(dim=1)
        if reduction == "mean":
            loss = loss / count
        return loss.to(x.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, factor):
        dx = ctx.dx
        ctx.dx = None
        if dx is None:
            raise RuntimeError("ahead=True: one backward pass, no second")
        _scale[(1024,)](
            dx_ptr=dx, factor_ptr=factor, size=dx.numel(), BLOCK_SIZE=2048
        )
        return dx, None, None, None, None


def loss_check_arguments(
    x, target, weight, ignore_index, reduction, label_smoothing
):
    """Raise an error that names the wrong argument, and says why."""
    kinds = (torch.float16, torch.bfloat16, torch.float32)
    if x.dtype not in kinds:
        raise TypeError(f"input is {x.dtype}: it must be one of {kinds}")
    if target.dtype != torch.int64:
        raise TypeError(f"target is {target.dtype}: it must be torch.int64")

    tensors = {"input": x, "target": target}
    if weight is not None:
        tensors["weight"] = weight
        if not weight.is_floating_point():
            raise TypeError(f"weight is {weight.dtype}: it must have floats")
    for name, tensor in tensors.items():
        if tensor.device != x.device or tensor.device.type != DEVICE.type:
            raise ValueError(
                f"{name} is on {tensor.device}: input, target and weight must "
                f"all be on {DEVICE}"
            )
    # Triton starts a kernel on the current GPU, wherever its tensors are.
    if x.is_cuda and x.device.index != torch.cuda.current_device():
        raise ValueError(f"input is on {x.device}: not the current one")

    N = x.shape[-1] if x.dim() > 0 else 0
    if N == 0 or target.shape != x.shape[:-1]:
        raise ValueError(
            f"input has the rows and classes {tuple(x.shape)}, and the shape "
            f"of target is {tuple(target.shape)}"
        )
    constant = weight is None or not weight.requires_grad
    if weight is not None and (weight.shape != (N,) or not constant):
        raise ValueError(
            f"weight has the shape {tuple(weight.shape)}: it must be a "
            f"constant weight for each of {N} classes"
        )
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"{reduction=}: it must be mean, sum or none")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"{label_smoothing=}: it must be 0 to 1")
    if not ON_GPU:
        wrong = (target != ignore_index) & ((target < 0) | (target >= N))
        for at in wrong.nonzero()[:1].tolist():
            raise IndexError(f"target{at} is {target[*at]}, not 0 to {N - 1}")


def cross_entropy(
    input,
    target,
    weight=None,
    ignore_index=-100,
    reduction="mean",
    label_smoothing=0.0,
    z_loss=0.0,
    ahead=False,
):
    """PyTorch's cross-entropy of classes, with a z-loss.

    ahead=True computes the gradient together with the loss, for one backward
    pass. It changes nothing for reduction="none".
    """
    x = input
    if x.dim() > 1:
        x = x.movedim(1, -1)  # PyTorch has the classes in dimension 1
    loss_check_arguments(
        x, target, weight, ignore_index, reduction, label_smoothing
    )
    w = None
    if weight is not None:
        w = weight.float()
        w = torch.cat((w, w.sum()[None]))
    options = {
        "ignore": ignore_index,
        "smooth": float(label_smoothing),
        "z": float(z_loss),
    }
    function = Later
    if ahead and reduction != "none" and x.requires_grad:
        function = Ahead
    loss = function.apply(
        x.reshape(-1, x.shape[-1]).contiguous(),
        target.flatten().contiguous(),
        w,
        reduction,
        options,
    )
    if reduction == "none":
        loss = loss.reshape(target.shape)
    return loss


# matrix-products/03-linear-cross-entropy --------------------------------------
# Gives linear_cross_entropy.


@triton.jit
def _head_place(tile, rows, columns, GROUP: tl.constexpr):
    """Row and column of a tile, by its number: groups of so many rows of
    tiles, and in a group column by column."""
    first = tile // (GROUP * columns) * GROUP
    # The last group may have fewer rows.
    height = tl.minimum(rows - first, GROUP)
    place = tile % (GROUP * columns)
    return first + place % height, place // height


HEAD_GPU = torch.cuda.get_device_properties(DEVICE) if ON_GPU else None
HEAD_NUM_SMS = HEAD_GPU.multi_processor_count if ON_GPU else 4


def head_shared_memory():
    """Bytes that a program can have; without a GPU, those of an H200."""
    if not ON_GPU:
        return 232448
    return getattr(HEAD_GPU, "shared_memory_per_block_optin", 65536)


HEAD_SHARED = head_shared_memory()


HEAD_LOG2E = tl.constexpr(1.4426950408889634)  # the logarithm of e, to the base 2


@triton.jit
def _logits(
    sums,  # a tile of products, in float32
    bias_ptr,  # (classes,), or None
    name,  # the classes of its columns
    classes,
):
    """The logits of a tile. What is no class gets minus infinity, whose power
    is 0."""
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + name, mask=name < classes, other=0)
        sums += bias.to(tl.float32)[None, :]
    return tl.where(name[None, :] < classes, sums, float("-inf"))


@triton.jit
def _weights(
    weight_ptr,  # (classes,), or None: all weights are 1
    name,
    classes,
):
    """The weights of the columns; what is no class has 0."""
    exists = name < classes
    if weight_ptr is None:
        return tl.where(exists, 1.0, 0.0)
    else:
        weight = tl.load(weight_ptr + name, mask=exists, other=0)
        return weight.to(tl.float32)


@triton.jit
def _halves(sums):
    """The left and the right half of a tile."""
    both = sums.reshape(sums.shape[0], 2, sums.shape[1] // 2)
    return both.permute(0, 2, 1).split()


@triton.jit
def _scores(
    x_desc,  # (tokens, features) in tiles of TILE_M and TILE_K
    w_desc,  # (classes, features) in tiles of TILE_N and TILE_K
    powers_desc,  # (tokens, classes) in halves of a tile; or None
    parts_ptr,  # (2 or 3, columns of tiles, tokens)
    bias_ptr,  # (classes,), or None
    weight_ptr,  # (classes,), or None: all weights are 1
    tokens,
    classes,
    features,
    SMOOTH: tl.constexpr,  # whether there is label smoothing
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    GROUP: tl.constexpr,  # rows of tiles in a group
    STAGES: tl.constexpr,  # num_stages of the inner loop
    STAY: tl.constexpr,  # whether programs take several tiles
    PRECISION: tl.constexpr,  # of float32: "tf32" or "ieee"
):
    # Without this promise the compiler would also write code for no features.
    tl.assume(features > 0)
    rows = tl.cdiv(tokens, TILE_M)
    columns = tl.cdiv(classes, TILE_N)
    width: tl.constexpr = TILE_N // 2
    for work in tl.range(
        tl.program_id(0), rows * columns, tl.num_programs(0), flatten=STAY
    ):
        row, column = _head_place(work, rows, columns, GROUP)
        row *= TILE_M
        column *= TILE_N

        # The product, as for a linear layer. The weight has a row for each
        # class, so its tile is turned.
        sums = tl.zeros((TILE_M, TILE_N), tl.float32)
        for k in tl.range(0, features, TILE_K, num_stages=STAGES):
            x = x_desc.load([row, k])
            w = w_desc.load([column, k])
            sums = tl.dot(x, w.T, sums, input_precision=PRECISION)

        # New: what is kept of the tile. We take half of it at a time, so that
        # half the shared memory is enough to store powers.
        halves = _halves(sums)

        # The largest logit of each token.
        maximum = tl.full((TILE_M,), LOWEST, tl.float32)
        for i in tl.static_range(2):
            name = column + i * width + tl.arange(0, width)
            logit = _logits(halves[i], bias_ptr, name, classes)
            maximum = tl.maximum(maximum, tl.max(logit, axis=1))

        # The sum of all powers, none of which is above 1.
        total = tl.zeros((TILE_M,), tl.float32)
        weighted = tl.zeros((TILE_M,), tl.float32)
        for i in tl.static_range(2):
            name = column + i * width + tl.arange(0, width)
            logit = _logits(halves[i], bias_ptr, name, classes)
            power = tl.exp2((logit - maximum[:, None]) * HEAD_LOG2E)
            total += tl.sum(power, axis=1)
            if powers_desc is not None:
                power = power.to(powers_desc.dtype)
                powers_desc.store([row, column + i * width], power)
            if SMOOTH:
                # Minus infinity times a weight of 0 would not be a number.
                weight = _weights(weight_ptr, name, classes)
                logit = tl.where(name[None, :] < classes, logit, 0)
                weighted += tl.sum(logit * weight[None, :], axis=1)

        # Tokens lie side by side, so that neighboring threads store neighbors.
        token = row + tl.arange(0, TILE_M)
        mask = token < tokens
        at = parts_ptr + (column // TILE_N).to(tl.int64) * tokens + token
        step = tl.cast(columns, tl.int64) * tokens
        tl.store(at, maximum, mask=mask)
        tl.store(at + step, total, mask=mask)
        if SMOOTH:
            tl.store(at + 2 * step, weighted, mask=mask)


@triton.jit
def _head_finish(
    parts_ptr,  # (2 or 3, columns, tokens), of _scores
    x_ptr,  # (tokens, features)
    w_ptr,  # (classes, features)
    bias_ptr,  # (classes,), or None
    weight_ptr,  # (classes,), or None: all weights are 1
    all_weights_ptr,  # their sum, if there are weights
    target_ptr,  # (tokens,)
    rows_ptr,  # (6, batch): loss, weight, lse, p, a, e of our tokens
    tokens,
    classes,
    features,
    columns,  # of tiles
    x_step,  # from a row of x to the next
    w_step,
    batch,
    ignore,  # the target that does not count
    smooth,  # label smoothing
    SMOOTH: tl.constexpr,  # whether there is any
    ROWS: tl.constexpr,  # tokens of a program
    PARTS: tl.constexpr,  # parts of a step
    FEATURES: tl.constexpr,  # features of a step
):
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = token < tokens
    wide = tl.cast(tokens, tl.int64)  # parts may be more than 2**31

    # Put the parts together: logsumexp of each token.
    m = tl.full((ROWS,), LOWEST, tl.float32)
    s = tl.zeros((ROWS,), tl.float32)
    weighted = tl.zeros((ROWS,), tl.float32)
    for start in range(0, columns, PARTS):
        part = start + tl.arange(0, PARTS)
        mask = (part < columns)[:, None] & inside[None, :]
        at = parts_ptr + part[:, None] * wide + token[None, :]
        part_m = tl.load(at, mask=mask, other=LOWEST)
        at += columns * wide
        part_s = tl.load(at, mask=mask, other=0)
        new = tl.maximum(m, tl.max(part_m, axis=0))
        power = tl.exp2((part_m - new[None, :]) * HEAD_LOG2E)
        # What was summed so far is relative to an older maximum.
        s = s * tl.exp2((m - new) * HEAD_LOG2E) + tl.sum(part_s * power, axis=0)
        m = new
        if SMOOTH:
            at += columns * wide
            weighted += tl.sum(tl.load(at, mask=mask, other=0), axis=0)
    # A token that does not exist has no parts.
    m = tl.where(inside, m, 0)
    log = tl.log(tl.where(inside, s, 1))

    # The logit of the target: one row of x times one row of w.
    target = tl.load(target_ptr + token, mask=inside, other=ignore)
    # Does the token count at all, and is its target a class?
    live = target != ignore
    exists = live & (target >= 0) & (target < classes)
    row = tl.where(exists, target, 0)
    dot = tl.zeros((ROWS,), tl.float32)
    x_at = x_ptr + token.to(tl.int64)[:, None] * x_step
    w_at = w_ptr + row[:, None] * w_step
    for start in range(0, features, FEATURES):
        k = start + tl.arange(0, FEATURES)
        mask = (k < features)[None, :] & exists[:, None]
        x = tl.load(x_at + k[None, :], mask=mask, other=0).to(tl.float32)
        w = tl.load(w_at + k[None, :], mask=mask, other=0).to(tl.float32)
        dot += tl.sum(x * w, axis=1)
    if bias_ptr is not None:
        dot += tl.load(bias_ptr + row, mask=exists, other=0).to(tl.float32)

    # The weight of the token. A target that is no class makes it NaN.
    w_t = tl.full((ROWS,), 1.0, tl.float32)
    all_weights = tl.cast(classes, tl.float32)
    if weight_ptr is not None:
        w_t = tl.load(weight_ptr + row, mask=exists, other=0).to(tl.float32)
        all_weights = tl.load(all_weights_ptr)
    w_t = tl.where(live, tl.where(exists, w_t, float("nan")), 0)

    # The three factors, and the loss.
    a = (1 - smooth) * w_t
    e = tl.where(live, smooth / classes, 0)
    p = a + e * all_weights
    loss = a * (m - dot + log)
    if SMOOTH:
        loss += e * (all_weights * (m + log) - weighted)
    loss = tl.where(live, loss, 0)
    # Of a token that is ignored, all powers are to be 0.
    lse = tl.where(live, m + log, float("inf"))

    rows_ptr += token
    step = tl.cast(batch, tl.int64)
    tl.store(rows_ptr, loss, mask=inside)
    tl.store(rows_ptr + step, w_t, mask=inside)
    tl.store(rows_ptr + 2 * step, lse, mask=inside)
    tl.store(rows_ptr + 3 * step, p, mask=inside)
    tl.store(rows_ptr + 4 * step, a, mask=inside)
    tl.store(rows_ptr + 5 * step, e, mask=inside)


@dataclasses.dataclass(frozen=True)
class Options:
    ignore: int = -100  # the target that does not count
    reduction: str = "mean"
    smooth: float = 0.0  # label smoothing
    recompute: bool = False  # whether dw computes the logits again
    skip_below: float = 0.0  # gradients that are left out, in whole blocks
    chunk: int = 0  # tokens of a chunk; 0: as many as the rule says


HEAD_TILES = {
    # precision: rows, columns, numbers of a step, warps
    "16 bits": (128, 256, 64, 8),
    "tf32": (128, 128, 32, 8),
    "ieee": (64, 64, 16, 4),
    "before H100": (64, 64, 32, 4),
}


def head_plan(dtype, room, blocks=False):
    """Tiles of a product: ``room`` is how many bytes of shared memory each
    number of half a tile needs behind the loop."""
    precision = "16 bits"
    if dtype == torch.float32:
        precision = "ieee"
        # PyTorch's switch: whether Tensor Cores may cut float32.
        if torch.backends.cuda.matmul.fp32_precision == "tf32":
            precision = "tf32"
    tiles = precision
    if precision != "ieee" and HEAD_SHARED < 200_000:
        tiles = "before H100"
    tile_m, tile_n, tile_k, warps = HEAD_TILES[tiles]
    stage = (tile_m + tile_n) * tile_k * dtype.itemsize
    left = HEAD_SHARED - 1024 - tile_m * tile_n // 2 * room
    return {
        "TILE_M": tile_m,
        "TILE_N": tile_n,
        "TILE_K": tile_k,
        "GROUP": 16,
        "STAGES": max(1, min(4, left // stage)),
        "STAY": not blocks,
        "PRECISION": "tf32" if precision == "tf32" else "ieee",
        "num_warps": warps,
    }


def head_descriptor(t, rows, columns):
    return TensorDescriptor.from_tensor(t, [rows, columns])


def programs_of(M, N, tiles):
    count = triton.cdiv(M, tiles["TILE_M"]) * triton.cdiv(N, tiles["TILE_N"])
    if tiles["STAY"]:
        count = min(count, HEAD_NUM_SMS)
    return (count,)


def plan_scores(x):
    return head_plan(x.dtype, x.itemsize)


def scores(x, w, bias, weight, options, powers, parts):
    """Parts of logsumexp, and the powers, if there is a matrix for them."""
    tokens, features = x.shape
    classes = w.shape[0]
    tiles = plan_scores(x)
    half = tiles["TILE_M"], tiles["TILE_N"] // 2
    _scores[programs_of(tokens, classes, tiles)](
        x_desc=head_descriptor(x, tiles["TILE_M"], tiles["TILE_K"]),
        w_desc=head_descriptor(w, tiles["TILE_N"], tiles["TILE_K"]),
        powers_desc=None if powers is None else head_descriptor(powers, *half),
        parts_ptr=parts,
        bias_ptr=bias,
        weight_ptr=weight,
        tokens=tokens,
        classes=classes,
        features=features,
        SMOOTH=options.smooth > 0,
        **tiles,
    )


def finish(parts, x, w, bias, weight, all_weights, target, rows, options):
    """Put the parts together: six numbers of each token."""
    tokens, features = x.shape
    tile_n = plan_scores(x)["TILE_N"]
    _head_finish[(triton.cdiv(tokens, 16),)](
        parts_ptr=parts,
        x_ptr=x,
        w_ptr=w,
        bias_ptr=bias,
        weight_ptr=weight,
        all_weights_ptr=all_weights,
        target_ptr=target,
        rows_ptr=rows,
        tokens=tokens,
        classes=w.shape[0],
        features=features,
        columns=triton.cdiv(w.shape[0], tile_n),
        x_step=x.stride(0),
        w_step=w.stride(0),
        batch=rows.stride(0),
        ignore=options.ignore,
        smooth=options.smooth,
        SMOOTH=options.smooth > 0,
        ROWS=16,
        PARTS=64,
        FEATURES=256,
        num_warps=4,
    )


@triton.jit
def _gradient(
    power,  # a tile of powers
    p,  # of each token: the factor of its powers
    a,  # what is subtracted at the target
    e,  # what is subtracted everywhere, times the weight of a class
    target,
    name,  # the classes of the columns
    weight,  # the weights of the columns
    SMOOTH: tl.constexpr,
):
    """The gradient of a tile of logits."""
    grad = power * p[:, None]
    if SMOOTH:
        grad -= e[:, None] * weight[None, :]
    return grad - tl.where(name[None, :] == target[:, None], a[:, None], 0)


@triton.jit
def _in_place(
    grads_desc,  # (tokens, classes) in tiles of ROWS and WIDTH: powers
    parts_ptr,  # (2 or 3, columns, tokens), of _scores
    rows_ptr,  # (6, batch) from our first token on
    target_ptr,  # (tokens,)
    weight_ptr,  # (classes,), or None
    flags_ptr,  # (blocks of tokens, blocks of classes), or None
    tokens,
    classes,
    batch,
    flags_step,  # from a row of flags to the next
    skip_below,  # a block whose gradients are all below is not wanted
    SMOOTH: tl.constexpr,
    TILE_N: tl.constexpr,  # classes of a part
    BLOCK: tl.constexpr,  # tokens and classes of a flag
    ROWS: tl.constexpr,  # tokens of a program, those of a block
    WIDTH: tl.constexpr,  # classes of a program
):
    # Which tokens and which classes are ours, and what is known of them?
    across = tl.cdiv(classes, WIDTH)
    row = tl.program_id(0) // across * ROWS
    column = tl.program_id(0) % across * WIDTH
    token = row + tl.arange(0, ROWS)
    mask = token < tokens
    rows_ptr += token
    step = tl.cast(batch, tl.int64)
    lse = tl.load(rows_ptr + 2 * step, mask=mask, other=0)
    p = tl.load(rows_ptr + 3 * step, mask=mask, other=0)
    a = tl.load(rows_ptr + 4 * step, mask=mask, other=0)
    e = tl.load(rows_ptr + 5 * step, mask=mask, other=0)
    target = tl.load(target_ptr + token, mask=mask, other=-1)

    # The powers are relative to the largest logit of their tile. With lse in
    # its place they become the softmax.
    part = (column // TILE_N).to(tl.int64) * tokens
    m = tl.load(parts_ptr + part + token, mask=mask, other=0)
    power = grads_desc.load([row, column]).to(tl.float32)
    power *= tl.exp2((m - lse) * HEAD_LOG2E)[:, None]

    name = column + tl.arange(0, WIDTH)
    weight = _weights(weight_ptr, name, classes)
    grad = _gradient(power, p, a, e, target, name, weight, SMOOTH)
    grads_desc.store([row, column], grad.to(grads_desc.dtype))

    if flags_ptr is not None:
        # What is not below is wanted, and so is NaN, which is not below
        # anything. The factor of a token that is ignored is 0.
        small = tl.abs(grad) < (skip_below * p)[:, None]
        large = tl.where(small | (p == 0)[:, None], 0, 1)
        blocks: tl.constexpr = WIDTH // BLOCK
        large = tl.max(large, axis=0).reshape(blocks, BLOCK)
        number = column // BLOCK + tl.arange(0, blocks)
        at = flags_ptr + (row // BLOCK).to(tl.int64) * flags_step + number
        exists = number < tl.cdiv(classes, BLOCK)
        tl.store(at, tl.max(large, axis=1).to(tl.int8), mask=exists)


@triton.jit
def _quarters(sums):
    """The four quarters of a tile, from left to right."""
    left, right = _halves(sums)
    first, second = _halves(left)
    third, fourth = _halves(right)
    return first, second, third, fourth


@triton.jit
def _multiply(
    grads_desc,  # gradients of logits, (tokens, classes)
    b_desc,  # (K, N) in tiles of TILE_K and TILE_N
    out_desc,  # (M, N) in quarters of a tile: the result, or float32 sums
    scale_ptr,  # a number by which the result is multiplied; or None
    list_ptr,  # (rows of tiles, blocks of K): which blocks; or None: all
    count_ptr,  # (rows of tiles,): how many of them
    M,
    N,
    K,
    list_step,  # from a row of the list to the next
    TRANSPOSED: tl.constexpr,  # for dw: M are classes, and K tokens
    ADD: tl.constexpr,  # whether the product is added to what is there
    BLOCK: tl.constexpr,  # of the list; a multiple of TILE_K
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
    STAY: tl.constexpr,
    PRECISION: tl.constexpr,
):
    tl.assume(K > 0)
    rows = tl.cdiv(M, TILE_M)
    columns = tl.cdiv(N, TILE_N)
    width: tl.constexpr = TILE_N // 4
    for work in tl.range(
        tl.program_id(0), rows * columns, tl.num_programs(0), flatten=STAY
    ):
        tile, column = _head_place(work, rows, columns, GROUP)
        row = tile * TILE_M
        column *= TILE_N
        end = K
        ours = list_ptr
        if list_ptr is not None:
            # Only the blocks of our list.
            end = tl.load(count_ptr + tile) * BLOCK
            ours += tl.cast(tile, tl.int64) * list_step

        sums = tl.zeros((TILE_M, TILE_N), tl.float32)
        for step in tl.range(0, end, TILE_K, num_stages=STAGES):
            k = step
            if list_ptr is not None:
                block = tl.load(ours + step // BLOCK)
                k = block * BLOCK + step % BLOCK
            if TRANSPOSED:
                a = grads_desc.load([k, row]).T
            else:
                a = grads_desc.load([row, k])
            b = b_desc.load([k, column])
            sums = tl.dot(a, b, sums, input_precision=PRECISION)

        # Add what earlier chunks have left. Old and new sums both pass through
        # shared memory, so there is only room for a quarter of the tile.
        quarters = _quarters(sums)
        for i in tl.static_range(4):
            quarter = quarters[i]
            if ADD:
                quarter += out_desc.load([row, column + i * width])
            if scale_ptr is not None:
                quarter *= tl.load(scale_ptr)
            quarter = quarter.to(out_desc.dtype)
            out_desc.store([row, column + i * width], quarter)


@triton.jit
def _sum_columns(
    grads_desc,  # gradients of logits, (tokens, classes), in ROWS and WIDTH
    sums_ptr,  # (classes,), float32
    tokens,
    classes,
    FIRST: tl.constexpr,  # whether nothing has been summed before
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    column = tl.program_id(0) * WIDTH
    sums = tl.zeros((ROWS, WIDTH), tl.float32)
    for row in range(0, tokens, ROWS):
        sums += grads_desc.load([row, column]).to(tl.float32)
    total = tl.sum(sums, axis=0)
    name = column + tl.arange(0, WIDTH)
    mask = name < classes
    if not FIRST:
        total += tl.load(sums_ptr + name, mask=mask, other=0)
    tl.store(sums_ptr + name, total, mask=mask)


BLOCK = 64  # tokens and classes that are left out together


def in_place(grads, parts, x, rows, target, weight, flags, options):
    """Make gradients of the powers."""
    tokens, classes = grads.shape
    tile_n = plan_scores(x)["TILE_N"]
    width = min(2 * BLOCK, tile_n)  # of one part
    _in_place[(triton.cdiv(tokens, BLOCK) * triton.cdiv(classes, width),)](
        grads_desc=head_descriptor(grads, BLOCK, width),
        parts_ptr=parts,
        rows_ptr=rows,
        target_ptr=target,
        weight_ptr=weight,
        flags_ptr=flags,
        tokens=tokens,
        classes=classes,
        batch=rows.stride(0),
        flags_step=0 if flags is None else flags.stride(0),
        skip_below=options.skip_below,
        SMOOTH=options.smooth > 0,
        TILE_N=tile_n,
        BLOCK=BLOCK,
        ROWS=BLOCK,
        WIDTH=width,
        num_warps=8,
    )


def blocks_wanted(flags, dtype, transposed):
    """For each row of tiles the numbers of the blocks that its product needs,
    those first, and how many they are."""
    if flags is None:
        return None
    if transposed:
        flags = flags.T
    blocks = head_plan(dtype, 4, blocks=True)["TILE_M"] // BLOCK
    rows = triton.cdiv(flags.shape[0], blocks)
    flags = F.pad(flags, (0, 0, 0, rows * blocks - flags.shape[0]))
    wanted = flags.view(rows, blocks, -1).amax(dim=1)
    order = wanted.argsort(dim=1, descending=True, stable=True)
    return order.int(), wanted.sum(dim=1, dtype=torch.int32)


def multiply(grads, b, out, transposed, add=False, scale=None, lists=None):
    """out = grads @ b, or grads.T @ b; or that and what is in out, if ``add``
    says so. ``lists`` say which blocks are wanted."""
    K, M = grads.shape if transposed else grads.shape[::-1]
    N = b.shape[1]
    tiles = head_plan(grads.dtype, out.itemsize, blocks=lists is not None)
    tile_m, tile_n, tile_k = tiles["TILE_M"], tiles["TILE_N"], tiles["TILE_K"]
    grads_tile = (tile_k, tile_m) if transposed else (tile_m, tile_k)
    order, count = lists or (None, None)
    if lists is not None:
        # The number of a block is loaded two steps before its tiles are.
        tiles["STAGES"] += 2
    _multiply[programs_of(M, N, tiles)](
        grads_desc=head_descriptor(grads, *grads_tile),
        b_desc=head_descriptor(b, tile_k, tile_n),
        out_desc=head_descriptor(out, tile_m, tile_n // 4),
        scale_ptr=scale,
        list_ptr=order,
        count_ptr=count,
        M=M,
        N=N,
        K=K,
        list_step=0 if order is None else order.stride(0),
        TRANSPOSED=transposed,
        ADD=add,
        BLOCK=BLOCK,
        **tiles,
    )


def sum_columns(grads, sums, first):
    """Add the columns of the gradients to the sums."""
    tokens, classes = grads.shape
    _sum_columns[(triton.cdiv(classes, 64),)](
        grads_desc=head_descriptor(grads, 64, 64),
        sums_ptr=sums,
        tokens=tokens,
        classes=classes,
        FIRST=first,
        ROWS=64,
        WIDTH=64,
        num_warps=4,
    )


def one_round(features, dtype):
    """So many rows, in whole tiles, give work to all SMs in a product with so
    many columns."""
    tiles = head_plan(dtype, dtype.itemsize)
    columns = triton.cdiv(features, tiles["TILE_N"])
    return tiles["TILE_M"] * max(1, HEAD_NUM_SMS // columns)


LOGITS = 2**29  # at most so many in a chunk: 1.07 GB in 16 bits
FEW_LOGITS = 2**24  # the same with recompute=True: 34 MB


def length_of(count, across, features, dtype, logits):
    """How many of ``count`` tokens are a chunk, if each has ``across`` logits;
    or how many classes are a strip. All are about as long."""
    most = max(logits // across, one_round(features, dtype))
    length = triton.cdiv(count, triton.cdiv(count, most))
    step = 2 * BLOCK
    return triton.cdiv(length, step) * step


class Step:
    """What a forward pass has computed for the backward pass."""

    rows = None  # (6, tokens): see _finish
    dx = None  # (tokens, features), for g = 1
    db = None  # (classes,), float32, for g = 1
    sums = None  # (classes, features), float32: dw for g = 1
    grads = None  # if there is one chunk: the gradients of its logits
    lists = None  # which blocks of them dw needs; None: all


def head_forward(x, w, bias, weight, target, options, wants):
    """The numbers of each token, and what ``wants`` says of dx, dw, db."""
    wants_dx, wants_dw, wants_db = wants
    if options.recompute:
        # Both are left to the backward pass.
        wants_dw = False
        wants_db = False
    tokens, features = x.shape
    classes = w.shape[0]
    step = Step()
    step.rows = torch.empty(6, tokens, device=x.device)
    if tokens == 0:
        return step
    all_weights = None
    if weight is not None:
        all_weights = weight.sum(dtype=torch.float32)

    chunk = options.chunk
    if chunk == 0:
        logits = FEW_LOGITS if options.recompute else LOGITS
        chunk = length_of(tokens, classes, features, x.dtype, logits)
    chunk = min(chunk, tokens)
    one_chunk = chunk == tokens

    # What is computed, and what each chunk uses again.
    columns = triton.cdiv(classes, plan_scores(x)["TILE_N"])
    kinds = 3 if options.smooth > 0 else 2
    parts = torch.empty(kinds * columns * chunk, device=x.device)
    grads = None
    flags = None
    if wants_dx or wants_dw or wants_db:
        grads = padded(chunk, classes, x.dtype, x.device)
        if options.skip_below > 0:
            shape = triton.cdiv(chunk, BLOCK), triton.cdiv(classes, BLOCK)
            flags = torch.empty(shape, dtype=torch.int8, device=x.device)
    if wants_dx:
        step.dx = padded(tokens, features, x.dtype, x.device)
    if wants_dw and not one_chunk:
        step.sums = padded(classes, features, torch.float32, x.device)
    if wants_db:
        step.db = torch.empty(classes, device=x.device)

    for start in range(0, tokens, chunk):
        some = slice(start, min(start + chunk, tokens))
        x_some = x[some]
        target_some = target[some]
        rows_some = step.rows[:, some]
        if grads is not None:
            grads = grads[: len(x_some)]  # the last chunk may be shorter
        if flags is not None:
            flags = flags[: triton.cdiv(len(x_some), BLOCK)]
        scores(x_some, w, bias, weight, options, grads, parts)
        finish(
            parts, x_some, w, bias, weight, all_weights, target_some,
            rows_some, options,
        )  # fmt: skip
        if grads is None:
            continue
        in_place(
            grads, parts, x_some, rows_some, target_some, weight, flags,
            options,
        )  # fmt: skip
        if wants_dx:
            lists = blocks_wanted(flags, x.dtype, transposed=False)
            multiply(grads, w, step.dx[some], transposed=False, lists=lists)
        if wants_dw:
            lists = blocks_wanted(flags, x.dtype, transposed=True)
            if one_chunk:
                step.grads = grads
                step.lists = lists
            else:
                multiply(
                    grads,
                    x_some,
                    step.sums,
                    transposed=True,
                    add=start > 0,
                    lists=lists,
                )
        if wants_db:
            sum_columns(grads, step.db, first=start == 0)
    return step


@triton.jit
def _round(
    sums_desc,  # (classes, features), float32, in tiles of ROWS and WIDTH
    dw_desc,  # the result, in the same tiles
    scale_ptr,  # a number by which all sums are multiplied
    features,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    across = tl.cdiv(features, WIDTH)
    row = tl.program_id(0) // across * ROWS
    column = tl.program_id(0) % across * WIDTH
    sums = sums_desc.load([row, column])
    sums *= tl.load(scale_ptr)
    dw_desc.store([row, column], sums.to(dw_desc.dtype))


def finish_dw(step, x, w, scale):
    """dw in the type of x, from what the forward pass has left."""
    classes, features = w.shape
    dw = padded(classes, features, x.dtype, x.device)
    if step.sums is None:
        multiply(
            step.grads, x, dw, transposed=True, scale=scale, lists=step.lists
        )
        return dw
    _round[(triton.cdiv(classes, 64) * triton.cdiv(features, 64),)](
        sums_desc=head_descriptor(step.sums, 64, 64),
        dw_desc=head_descriptor(dw, 64, 64),
        scale_ptr=scale,
        features=features,
        ROWS=64,
        WIDTH=64,
        num_warps=4,
    )
    return dw


@triton.jit
def _scores_again(
    x_desc,  # (tokens, features) in tiles of TILE_M and TILE_K
    w_desc,  # (classes, features) in tiles of TILE_N and TILE_K
    grads_desc,  # New: (tokens, classes) in halves of a tile
    rows_ptr,  # New: (6, tokens), of _finish
    target_ptr,  # New: (tokens,)
    bias_ptr,
    weight_ptr,
    tokens,
    classes,  # of the strip
    features,
    first_class,  # New: the number of our first class
    SMOOTH: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
    STAY: tl.constexpr,
    PRECISION: tl.constexpr,
):
    tl.assume(features > 0)
    rows = tl.cdiv(tokens, TILE_M)
    columns = tl.cdiv(classes, TILE_N)
    width: tl.constexpr = TILE_N // 2
    step = tl.cast(tokens, tl.int64)
    for work in tl.range(
        tl.program_id(0), rows * columns, tl.num_programs(0), flatten=STAY
    ):
        row, column = _head_place(work, rows, columns, GROUP)
        row *= TILE_M
        column *= TILE_N

        sums = tl.zeros((TILE_M, TILE_N), tl.float32)
        for k in tl.range(0, features, TILE_K, num_stages=STAGES):
            x = x_desc.load([row, k])
            w = w_desc.load([column, k])
            sums = tl.dot(x, w.T, sums, input_precision=PRECISION)

        # New: what is known of each token by now.
        token = row + tl.arange(0, TILE_M)
        mask = token < tokens
        at = rows_ptr + token
        lse = tl.load(at + 2 * step, mask=mask, other=0)
        p = tl.load(at + 3 * step, mask=mask, other=0)
        a = tl.load(at + 4 * step, mask=mask, other=0)
        e = tl.load(at + 5 * step, mask=mask, other=0)
        target = tl.load(target_ptr + token, mask=mask, other=-1) - first_class

        # New: a power is the softmax itself, for lse is about all classes.
        halves = _halves(sums)
        for i in tl.static_range(2):
            name = column + i * width + tl.arange(0, width)
            logit = _logits(halves[i], bias_ptr, name, classes)
            power = tl.exp2((logit - lse[:, None]) * HEAD_LOG2E)
            weight = _weights(weight_ptr, name, classes)
            grad = _gradient(power, p, a, e, target, name, weight, SMOOTH)
            grad = grad.to(grads_desc.dtype)
            grads_desc.store([row, column + i * width], grad)


def scores_again(x, w, bias, weight, options, grads, rows, target, first):
    """The gradients of the logits of some classes, now that lse is known."""
    tokens, features = x.shape
    classes = w.shape[0]
    tiles = plan_scores(x)
    _scores_again[programs_of(tokens, classes, tiles)](
        x_desc=head_descriptor(x, tiles["TILE_M"], tiles["TILE_K"]),
        w_desc=head_descriptor(w, tiles["TILE_N"], tiles["TILE_K"]),
        grads_desc=head_descriptor(grads, tiles["TILE_M"], tiles["TILE_N"] // 2),
        rows_ptr=rows,
        target_ptr=target,
        bias_ptr=bias,
        weight_ptr=weight,
        tokens=tokens,
        classes=classes,
        features=features,
        first_class=first,
        SMOOTH=options.smooth > 0,
        **tiles,
    )


def in_strips(x, w, bias, weight, target, rows, options, scale, wants):
    """dw and db, some classes after the other: their logits are computed
    again, and nothing has to be summed up over chunks."""
    tokens, features = x.shape
    classes = w.shape[0]
    dw = None
    db = None
    if wants[1]:
        dw = padded(classes, features, x.dtype, x.device)
    if wants[2]:
        db = torch.empty(classes, device=x.device)
    strip = length_of(classes, tokens, features, x.dtype, FEW_LOGITS)
    grads = padded(tokens, min(strip, classes), x.dtype, x.device)

    for start in range(0, classes, strip):
        some = slice(start, min(start + strip, classes))
        grads = grads[:, : some.stop - start]  # the last may be narrower
        scores_again(
            x,
            w[some],
            None if bias is None else bias[some],
            None if weight is None else weight[some],
            options,
            grads,
            rows,
            target,
            start,
        )
        if wants[1]:
            multiply(grads, x, dw[some], transposed=True, scale=scale)
        if wants[2]:
            sum_columns(grads, db[some], first=True)
    return dw, db


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, bias, target, weight, options):
        wants = ctx.needs_input_grad[:3]
        if options.reduction == "none":
            # The factor of each token, which dw needs, is not known yet.
            options = dataclasses.replace(options, recompute=True)
        step = head_forward(x, w, bias, weight, target, options, wants)
        ctx.step = step
        ctx.options = options
        ctx.save_for_backward(x, w, bias, target, weight, step.rows)
        loss = step.rows[0]  # of each token
        weights = step.rows[1]
        if options.reduction == "none":
            # A copy, so that whoever changes it does not change our numbers.
            return loss.to(x.dtype, copy=True)
        loss = loss.sum()
        if options.reduction == "mean":
            loss = loss / weights.sum()
        return loss.to(x.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable  # no second derivatives
    def backward(ctx, g):
        x, w, bias, target, weight, rows = ctx.saved_tensors
        wants = ctx.needs_input_grad[:3]
        if len(x) == 0:
            given = zip((x, w, bias), wants, strict=True)
            grads = [
                torch.zeros_like(t) if want else None for t, want in given
            ]
            return *grads, None, None, None
        options = ctx.options
        step = ctx.step
        ctx.step = None
        if step is None:
            # This is not the first backward pass, and the first has taken
            # what the forward pass had computed.
            step = head_forward(x, w, bias, weight, target, options, wants)

        # By what is everything multiplied? Where all tokens are ignored, the
        # mean is 0 / 0, and PyTorch has gradients of 0.
        live = target != options.ignore
        scale = g.float()
        if options.reduction == "mean":
            scale = scale / rows[1].sum()
        factor = torch.where(live, scale, 0)  # of each token

        dx = None
        if wants[0]:
            dx = step.dx.mul_(factor[:, None])
            dx = dx.contiguous()
        if options.reduction == "none":
            # From here on each token has its factor in its gradients.
            rows = rows.clone()
            rows[3:] *= factor
            scale = None
        else:
            scale = torch.where(live.any(), scale, 0)
        dw = None
        db = None
        if options.recompute:
            if wants[1] or wants[2]:
                dw, db = in_strips(
                    x, w, bias, weight, target, rows, options, scale, wants
                )
        else:
            if wants[1]:
                dw = finish_dw(step, x, w, scale)
            db = step.db
        if wants[1]:
            dw = dw.contiguous()
        if wants[2]:
            if scale is not None:
                db = db * scale
            db = db.to(bias.dtype)
        return dx, dw, db, None, None, None


def head_for_descriptors(t):
    """The matrix, or a copy of it in a layout that a descriptor takes."""
    if lies_in_rows(t):
        return t
    return padded(*t.shape, dtype=t.dtype, device=t.device).copy_(t)


def head_check_arguments(
    input,
    linear_weight,
    target,
    linear_bias,
    weight,
    reduction,
    ignore_index,
    label_smoothing,
    recompute,
    skip_below,
):
    """Raise an error that names the wrong argument, and says why."""
    floats = {
        "input": input,
        "linear_weight": linear_weight,
        "linear_bias": linear_bias,
    }
    floats = {name: t for name, t in floats.items() if t is not None}
    for name, t in floats.items():
        if t.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            raise TypeError(
                f"{name} has {t.dtype}: float16, bfloat16 and float32 are "
                "taken"
            )
        if t.dtype != input.dtype:
            raise TypeError(
                f"{name} has {t.dtype}, and input has {input.dtype}: they "
                "must be the same"
            )
    if target.dtype != torch.int64:
        raise TypeError(
            f"target has {target.dtype}: classes are torch.int64, and "
            "probabilities are not taken"
        )
    if weight is not None and not weight.is_floating_point():
        raise TypeError(f"weight has {weight.dtype}: it must have floats")

    if input.dim() == 0:
        raise ValueError("input has no dimension: the last one has features")
    if linear_weight.dim() != 2:
        raise ValueError(
            f"linear_weight has {linear_weight.dim()} dimensions, not 2: "
            "classes and features"
        )
    if linear_weight.numel() == 0:
        raise ValueError(
            f"linear_weight is {tuple(linear_weight.shape)}: a class and a "
            "feature are needed"
        )
    classes, features = linear_weight.shape
    if input.shape[-1] != features:
        raise ValueError(
            f"input has {input.shape[-1]} features, and linear_weight takes "
            f"{features}"
        )
    if target.shape != input.shape[:-1]:
        raise ValueError(
            f"target is {tuple(target.shape)}, and input has the tokens "
            f"{tuple(input.shape[:-1])}"
        )
    for name, t in {"linear_bias": linear_bias, "weight": weight}.items():
        if t is not None and t.shape != (classes,):
            raise ValueError(
                f"{name} is {tuple(t.shape)}, and linear_weight has {classes} "
                "classes"
            )
    if weight is not None and weight.requires_grad:
        raise ValueError("weight wants a gradient: it must be a constant")

    for name, t in (floats | {"target": target, "weight": weight}).items():
        if t is None:
            continue
        if t.device.type != DEVICE.type:
            raise ValueError(f"{name} is on {t.device}, not on {DEVICE}")
        # Triton starts a kernel on the current GPU, wherever its tensors are.
        if t.is_cuda and t.device.index != torch.cuda.current_device():
            raise ValueError(
                f"{name} is on {t.device}, which is not the current GPU"
            )
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(
            f"reduction is {reduction!r}: mean, sum and none are taken"
        )
    if not 0 <= label_smoothing <= 1:
        raise ValueError(
            f"label_smoothing is {label_smoothing}: it must be 0 to 1"
        )
    if not 0 <= skip_below < 1:
        raise ValueError(
            f"skip_below is {skip_below}: it must be 0 or more, and below 1"
        )
    if skip_below > 0 and (recompute or reduction == "none"):
        raise ValueError(
            f"skip_below is {skip_below}: it is not taken with recompute=True "
            "or reduction='none'"
        )
    if not ON_GPU:
        wrong = (target != ignore_index) & ((target < 0) | (target >= classes))
        for at in wrong.nonzero()[:1].tolist():
            raise IndexError(
                f"target{at} is {target[*at]}, not 0 to {classes - 1}"
            )


def linear_cross_entropy(
    input,
    linear_weight,
    target,
    *,
    linear_bias=None,
    weight=None,
    reduction="mean",
    ignore_index=-100,
    label_smoothing=0.0,
    recompute=False,
    skip_below=0.0,
):
    """What F.linear_cross_entropy gives, for targets that are classes.

    input is (..., features), linear_weight is (classes, features), and target
    is (...). recompute=True computes the logits a second time for the gradient
    of linear_weight, which takes longer and needs less memory, and so does
    reduction="none". Otherwise, blocks of logits whose gradients are all below
    skip_below, as a share of the weight of their token, add nothing to the
    gradients.
    """
    if ignore_index is None:
        ignore_index = -100  # what it stands for where targets are classes
    head_check_arguments(
        input, linear_weight, target, linear_bias, weight, reduction,
        ignore_index, label_smoothing, recompute, skip_below,
    )  # fmt: skip
    dtype = input.dtype
    x = input.reshape(-1, input.shape[-1])
    w = linear_weight
    bias = linear_bias
    if not torch.is_grad_enabled():
        # needs_input_grad does not say that we run under torch.no_grad().
        x = x.detach()
        w = w.detach()
        bias = None if bias is None else bias.detach()
    if not ON_GPU and dtype == torch.bfloat16:
        # The interpreter multiplies the bits of bfloat16 as whole numbers.
        x, w = x.float(), w.float()
        bias = None if bias is None else bias.float()
    options = Options(
        ignore=ignore_index,
        reduction=reduction,
        smooth=float(label_smoothing),
        recompute=recompute,
        skip_below=float(skip_below),
    )
    loss = _LinearCrossEntropy.apply(
        head_for_descriptors(x),
        head_for_descriptors(w),
        None if bias is None else bias.contiguous(),
        target.reshape(-1).contiguous(),
        None if weight is None else weight.contiguous(),
        options,
    ).to(dtype)
    if reduction == "none":
        loss = loss.reshape(target.shape)
    return loss
