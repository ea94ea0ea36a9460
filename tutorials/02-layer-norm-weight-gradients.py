r"""
Five ways to sum a gradient
===========================

Sum the weight gradients of layer normalization in five ways, measure each,
and end with one that is fast and gives the same bits in every run.

You will be able to:

* count the bytes that a design must move, before any of it is written;
* see a race condition happen, and say which tool would have found it;
* keep sums in registers while the next rows are on their way;
* tell a deterministic kernel from one that only looks like it.

Read the page on layer normalization first: it derives the formulas and
explains the forward kernel and the lock that are used here.

The problem
-----------

The gradients of weight and bias are sums over all rows:

.. math::

   dw_j = \sum_i dy_{ij} \, \hat{x}_{ij}, \qquad db_j = \sum_i dy_{ij}

But ``dx`` needs sums over columns, so a program wants to hold a whole row.
One direction of the matrix is always the wrong one.
This page shows five ways out.

The unit of cost is one pass over a matrix of ``M`` rows and ``N`` columns.
Reading ``x`` and ``dy`` and writing ``dx`` takes three units.
A design that needs more is slow however well it is written.
"""

# %%
# Every page of this site starts with the same lines.

import importlib.util
import inspect
import os
import subprocess
import sys
import tempfile

import matplotlib.pyplot as plt
import torch

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    # Triton's interpreter runs the same kernels on the CPU, slowly.
    os.environ["TRITON_INTERPRET"] = "1"

import triton
import triton.language as tl

DEVICE = torch.device("cuda" if ON_GPU else "cpu")

# %%
# A row and its gradients
# -----------------------
#
# The first four designs share this function: one row of ``dx``, as on the
# page before.
# It returns what the row adds to ``dw`` and ``db``.
# Where these go is all that the designs differ in.


@triton.jit
def _row(
    dy_ptr,  # (M, N), contiguous, as are x and dx
    x_ptr,
    w_ptr,  # (N,)
    mean_ptr,  # (M,), from the forward pass
    rstd_ptr,  # (M,)
    dx_ptr,
    row,
    N: tl.constexpr,
    BLOCK: tl.constexpr,  # power of two, at least N
):
    """Store a row of dx, return the terms of dw and db."""
    cols = tl.arange(0, BLOCK)
    mask = cols < N
    at = tl.cast(row, tl.int64) * N + cols  # M * N may pass 2**31
    acc = mean_ptr.dtype.element_ty  # float32, or float64 for float64
    x = tl.load(x_ptr + at, mask=mask, other=0).to(acc)
    dy = tl.load(dy_ptr + at, mask=mask, other=0).to(acc)
    w = tl.load(w_ptr + cols, mask=mask, other=0).to(acc)
    rstd = tl.load(rstd_ptr + row)
    x_hat = (x - tl.load(mean_ptr + row)) * rstd
    wdy = w * dy  # 0 in masked lanes, so they add nothing below
    c1 = tl.sum(x_hat * wdy) / N
    c2 = tl.sum(wdy) / N
    tl.store(dx_ptr + at, (wdy - (x_hat * c1 + c2)) * rstd, mask=mask)
    return dy * x_hat, dy


def row_options(N):
    """Block size and number of warps for one row of N elements."""
    block = triton.next_power_of_2(N)
    return {"BLOCK": block, "num_warps": min(max(block // 512, 1), 16)}


# %%
# The pictures show ``x`` or ``dy`` as a grid.
# Cells of one color are read by one program.


def picture(name, label, program, buffers=()):
    """Draw who reads what, and where the sums are kept."""
    _, ax = plt.subplots(figsize=(7.5, 2.4), num=name)
    ax.set(xlim=(0, 14.5), ylim=(0.3, 5.8))
    ax.axis("off")

    def cell(x, y, color):
        ax.add_patch(
            plt.Rectangle((x, y), 0.6, 0.5, fc=color, ec="black", alpha=0.6)
        )

    def arrow(start, end):
        style = {"arrowstyle": "->", "color": "black"}
        ax.annotate("", (end, 2.5), (start, 2.5), arrowprops=style)

    for j in range(6):
        for i in range(8):
            cell(0.2 + 0.6 * j, 4 - 0.5 * i, f"C{program(i, j)}")
        for k, color in enumerate(buffers):
            y = 2.25 + 0.7 * ((len(buffers) - 1) / 2 - k)
            cell(5.4 + 0.6 * j, y, color)
        cell(10.6 + 0.6 * j, 2.25, "none" if buffers else f"C{j // 2}")
    arrow(4.1, 5.1 if buffers else 10.3)
    if buffers:
        arrow(9.3, 10.3)
    ax.text(2, 4.8, "x, dy", ha="center")
    ax.text(7.2, 4.4 if buffers else 2.8, label, ha="center")
    ax.text(12.4, 3.1, "dw", ha="center")
    plt.show()


# %%
# Rung 1: a second kernel by columns
# ----------------------------------
#
# One kernel computes ``dx`` by rows, another ``dw`` and ``db`` by columns.
# A program of the second kernel owns some columns and walks down all rows.
# Nobody shares anything, so the result is deterministic: the same bits in
# every run.
# The second kernel reads ``x`` and ``dy`` again: five units, not three.

picture("Sum by columns", "a program owns columns", lambda i, j: j // 2)


@triton.jit
def _layer_norm_bwd_dx(
    dy_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, dx_ptr,
    N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    _row(dy_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, dx_ptr, row, N, BLOCK)


@triton.jit
def _layer_norm_bwd_dwdb(
    dy_ptr, x_ptr, mean_ptr, rstd_ptr, dw_ptr, db_ptr,
    M, N: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    acc: tl.constexpr = mean_ptr.dtype.element_ty
    dw = tl.zeros([ROWS, COLS], acc)
    db = tl.zeros([ROWS, COLS], acc)
    for start in range(0, M, ROWS):
        rows = start + tl.arange(0, ROWS)
        mask = (rows < M)[:, None] & (cols < N)
        at = tl.cast(rows, tl.int64)[:, None] * N + cols
        x = tl.load(x_ptr + at, mask=mask, other=0).to(acc)
        dy = tl.load(dy_ptr + at, mask=mask, other=0).to(acc)
        mean = tl.load(mean_ptr + rows, mask=rows < M, other=0)[:, None]
        rstd = tl.load(rstd_ptr + rows, mask=rows < M, other=0)[:, None]
        dw += dy * ((x - mean) * rstd)
        db += dy
    tl.store(dw_ptr + cols, tl.sum(dw, 0), mask=cols < N)
    tl.store(db_ptr + cols, tl.sum(db, 0), mask=cols < N)


def columns(dy, x, w, mean, rstd):
    """Rung 1."""
    M, N = x.shape
    dx, dw, db = torch.empty_like(x), torch.empty_like(w), torch.empty_like(w)
    _layer_norm_bwd_dx[(M,)](dy, x, w, mean, rstd, dx, N, **row_options(N))
    _layer_norm_bwd_dwdb[(triton.cdiv(N, 128),)](
        dy, x, mean, rstd, dw, db, M, N, ROWS=32, COLS=128, num_warps=8
    )
    return dx, dw, db


# %%
# Rung 2: buffers behind locks
# ----------------------------
#
# The design of the page before, in its plain form with one row a program: it
# adds its terms to one of a few rows of sums while it holds the lock of that
# row.
# Then a small kernel adds up those rows.
# ``x`` and ``dy`` are read once, but each program reads and writes a row of
# float32 sums, and programs wait for each other.
# Who comes first differs from run to run, so the order of the additions
# differs too, and with it the last bits.
#
# ``BARRIER`` is there so that we can leave it out later, and look.

label = "rows of sums,\neach has a lock"
picture("Sum behind locks", label, lambda i, j: i, ["none"] * 2)


@triton.jit
def _layer_norm_bwd_lock(
    dy_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, dx_ptr,
    sums_ptr,  # (GROUP_SIZE_M, 2, N): dw and db
    locks_ptr,  # (GROUP_SIZE_M,): 0 free, 1 taken, 2 free and written
    N: tl.constexpr, GROUP_SIZE_M: tl.constexpr, BARRIER: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    dw, db = _row(
        dy_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, dx_ptr, row, N, BLOCK
    )
    cols = tl.arange(0, BLOCK)
    lock_ptr = locks_ptr + row % GROUP_SIZE_M
    dw_ptr = sums_ptr + (row % GROUP_SIZE_M) * 2 * N + cols
    db_ptr = dw_ptr + N
    state = tl.atomic_xchg(lock_ptr, 1, sem="acquire")
    while state == 1:
        state = tl.atomic_xchg(lock_ptr, 1, sem="acquire")
    old = cols < tl.where(state == 2, N, 0)  # all columns, or none
    dw += tl.load(dw_ptr, mask=old, other=0)
    db += tl.load(db_ptr, mask=old, other=0)
    tl.store(dw_ptr, dw, mask=cols < N)
    tl.store(db_ptr, db, mask=cols < N)
    if BARRIER:
        tl.debug_barrier()  # every thread has stored its columns
    tl.atomic_xchg(lock_ptr, 2, sem="release")


# %%
# The small kernel is general: it adds up the rows of any matrix.
# Each program takes a few columns and always the same order of additions.


@triton.jit
def _sum_rows(
    sums_ptr,  # (M, N)
    out_ptr,  # (N,)
    M,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    PDL: tl.constexpr,  # explained at rung 5
):
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    total = tl.zeros([ROWS, COLS], sums_ptr.dtype.element_ty)
    if PDL:
        tl.extra.cuda.gdc_wait()
    for start in range(0, M, ROWS):
        rows = start + tl.arange(0, ROWS)[:, None]
        mask = (rows < M) & (cols < N)
        total += tl.load(sums_ptr + rows * N + cols, mask=mask, other=0)
    tl.store(out_ptr + cols, tl.sum(total, 0), mask=cols < N)


def sum_rows(sums, dtype, pdl=False):
    """Sum over the first dimension of a (rows, 2, N) tensor, in one launch."""
    out = torch.empty(sums.shape[1:], dtype=dtype, device=sums.device)
    options = {"num_warps": 8 if out.numel() <= 4096 else 4}
    if pdl:
        options["launch_pdl"] = True
    _sum_rows[(triton.cdiv(out.numel(), 16),)](
        sums, out, len(sums), out.numel(), 256, 16, pdl, **options
    )
    return out


# %%
# More buffers mean less waiting but more to add up at the end.


def lock(dy, x, w, mean, rstd, barrier=True, dtype=None, warps=None):
    """Rung 2; dtype is that of the sums, float32 as a rule."""
    M, N = x.shape
    G = 256 if N <= 2048 else 128 if N <= 8192 else 64
    options = row_options(N)
    options["num_warps"] = warps or options["num_warps"]
    dx = torch.empty_like(x)
    sums = torch.empty(G, 2, N, dtype=dtype or mean.dtype, device=x.device)
    locks = torch.zeros(G, dtype=torch.int32, device=x.device)
    _layer_norm_bwd_lock[(M,)](
        dy, x, w, mean, rstd, dx, sums, locks, N, G, barrier, **options
    )
    dw, db = sum_rows(sums[:M], w.dtype)  # M < G: the others are not written
    return dx, dw, db


# %%
# Rung 3: atomic additions
# ------------------------
#
# The hardware can add to memory by itself, one element at a time, without
# a lock.
# The code is short.
# Every program adds to the same two rows, so the additions to one element
# queue up, ``M`` of them.
# Their order is again left to chance.

label = "one row of sums,\natomic additions"
picture("Atomic additions", label, lambda i, j: i, ["none"])


@triton.jit
def _layer_norm_bwd_atomic(
    dy_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, dx_ptr,
    sums_ptr,  # (2, N), zeros
    N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    dw, db = _row(
        dy_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, dx_ptr, row, N, BLOCK
    )
    cols = tl.arange(0, BLOCK)
    # relaxed: the additions need no order, only to be complete at the end.
    tl.atomic_add(sums_ptr + cols, dw, mask=cols < N, sem="relaxed")
    tl.atomic_add(sums_ptr + N + cols, db, mask=cols < N, sem="relaxed")


def atomic(dy, x, w, mean, rstd):
    """Rung 3."""
    M, N = x.shape
    dx = torch.empty_like(x)
    sums = torch.zeros(2, N, dtype=mean.dtype, device=x.device)
    _layer_norm_bwd_atomic[(M,)](
        dy, x, w, mean, rstd, dx, sums, N, **row_options(N)
    )
    dw, db = sums.to(w.dtype)
    return dx, dw, db


# %%
# Rung 4: few programs that stay
# ------------------------------
#
# A GPU is a set of multiprocessors, each with its own registers.
# We start only one program for each of them, and a program takes row after
# row until none is left: it is *persistent*.
# Its sums stay in registers the whole time and reach memory once.
# There is one row of sums for each program, so nobody waits.
# Which rows a program takes is fixed, and so is the order of all additions:
# the result is deterministic.

# In the interpreter any small number will do.
NUM_SMS = (
    torch.cuda.get_device_properties(DEVICE).multi_processor_count
    if ON_GPU
    else 4
)

label = "one row of sums\nfor each program"
colors = ["C0", "C1", "C2", "C3"]
picture("Persistent programs", label, lambda i, j: i % 4, colors)


@triton.jit
def _layer_norm_bwd_persistent(
    dy_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, dx_ptr,
    sums_ptr,  # (programs, 2, N)
    M, N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    cols = tl.arange(0, BLOCK)
    dw = tl.zeros([BLOCK], sums_ptr.dtype.element_ty)
    db = tl.zeros([BLOCK], sums_ptr.dtype.element_ty)
    for row in range(tl.program_id(0), M, tl.num_programs(0)):
        row_dw, row_db = _row(
            dy_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, dx_ptr, row, N, BLOCK
        )
        dw += row_dw
        db += row_db
    sums_ptr += tl.program_id(0) * 2 * N + cols
    tl.store(sums_ptr, dw, mask=cols < N)
    tl.store(sums_ptr + N, db, mask=cols < N)


def persistent(dy, x, w, mean, rstd):
    """Rung 4."""
    M, N = x.shape
    programs = min(NUM_SMS, M)
    dx = torch.empty_like(x)
    sums = torch.empty(programs, 2, N, dtype=mean.dtype, device=x.device)
    _layer_norm_bwd_persistent[(programs,)](
        dy, x, w, mean, rstd, dx, sums, M, N, **row_options(N)
    )
    dw, db = sums.sum(0).to(w.dtype)
    return dx, dw, db


# %%
# Rung 5: load ahead
# ------------------
#
# A program of rung 4 asks for a row, waits for it, works, and asks for the
# next one.
# While it works, its multiprocessor asks memory for nothing.
# With ``tl.range(..., num_stages=4)`` the compiler keeps three more rows on
# their way into shared memory, by asynchronous copies (``cp.async``), while
# the program works on the present one.


def timeline():
    _, ax = plt.subplots(figsize=(7.5, 2.6), num="Pipelined loads")
    ax.set(xlim=(-3, 14), ylim=(-0.3, 5.2))
    ax.axis("off")

    def bar(x, y, width, text, color):
        ax.add_patch(
            plt.Rectangle((x, y), width, 0.7, fc=color, ec="black", alpha=0.6)
        )
        ax.text(x + width / 2, y + 0.35, text, ha="center", va="center")

    for y, name in (
        (3.9, "load"),
        (3.1, "work"),
        (1.3, "load"),
        (0.5, "work"),
    ):
        ax.text(-0.3, y + 0.35, name, ha="right", va="center")
    for i in range(3):
        bar(4.2 * i, 3.9, 3, f"row {i}", f"C{i}")
        bar(4.2 * i + 3, 3.1, 1.2, f"{i}", f"C{i}")
    for i in range(4):
        bar(3 * i, 1.3, 3, f"row {i}", f"C{i}")
        bar(3 * i + 3, 0.5, 1.2, f"{i}", f"C{i}")
    ax.text(0, 4.8, "rung 4: one after the other")
    ax.text(0, 2.2, "rung 5: the next loads run during the work")
    plt.show()


timeline()

# %%
# Three more ideas make the loop lean.
#
# * A block has a power of two of lanes, and 4608 columns in a block of 8192
#   waste almost half of it.
#   So a row is a tuple of smaller chunks, and only its last one has idle
#   lanes.
#   ``tl.static_range`` unrolls the loop over the chunks.
#   For narrow rows it is the other way round: a tile has several rows.
# * ``tl.sum`` twice makes all threads of a program wait for each other twice.
#   ``tl.reduce`` on a pair computes both sums in one go.
# * ``x`` and ``dy`` wait in 16 bits and are converted where they are used,
#   which halves their registers.


@triton.jit
def _tile(
    tile, c, M, N: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr
):
    """First element of a tile; offsets and mask of its chunk c."""
    row = tl.arange(0, ROWS)[:, None]
    col = c * CHUNK + tl.arange(0, CHUNK)[None, :]
    mask = (tile * ROWS + row < M) & (col < N)
    # Only the first element needs 64 bits, which saves registers.
    return tl.cast(tile, tl.int64) * (ROWS * N), row * N + col, mask


@triton.jit
def _load_tile(
    ptr, tile, M, N: tl.constexpr,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """A tile as a tuple of chunks."""
    chunks = ()
    for c in tl.static_range(CHUNKS):
        start, at, mask = _tile(tile, c, M, N, ROWS, CHUNK)
        chunks += (tl.load(ptr + start + at, mask=mask, other=0),)
    return chunks


# %%
# The kernel goes over the chunks of a tile twice: once for the two sums, once
# for ``dx`` and the terms of ``dw`` and ``db``.


@triton.jit
def _add_pairs(a1, a2, b1, b2):
    return a1 + b1, a2 + b2


@triton.jit
def _means(ws, xs, dys, mean, rstd, N: tl.constexpr, CHUNKS: tl.constexpr):
    """c1 and c2 of each row, in one reduction."""
    sum1 = tl.zeros(xs[0].shape, mean.dtype)
    sum2 = tl.zeros(xs[0].shape, mean.dtype)
    for c in tl.static_range(CHUNKS):
        wdy = ws[c].to(mean.dtype) * dys[c].to(mean.dtype)
        sum1 += (xs[c].to(mean.dtype) - mean) * rstd * wdy
        sum2 += wdy
    sum1, sum2 = tl.reduce((sum1, sum2), 1, _add_pairs)
    return sum1[:, None] / N, sum2[:, None] / N


@triton.jit
def _store_sums(
    ptr, dws, dbs, N: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr
):
    ptr += tl.program_id(0) * 2 * N
    for c in tl.static_range(CHUNKS):
        cols = c * CHUNK + tl.arange(0, CHUNK)
        tl.store(ptr + cols, tl.sum(dws[c], 0), mask=cols < N)
        tl.store(ptr + N + cols, tl.sum(dbs[c], 0), mask=cols < N)


# %%
# ``disable_licm`` keeps the conversion of ``w`` in the loop.
# The compiler would rather convert it once, ahead of the loop, and fill
# registers with the result.


@triton.jit
def _layer_norm_bwd_pipelined(
    dy_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, dx_ptr,
    sums_ptr,  # (programs, 2, N)
    M, N: tl.constexpr,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    acc: tl.constexpr = mean_ptr.dtype.element_ty
    if PDL and N <= 1024:
        tl.extra.cuda.gdc_launch_dependents()
    # w is repeated for each row of the tile, to be laid out like x and dy.
    ws, dws, dbs = (), (), ()
    for c in tl.static_range(CHUNKS):
        cols = c * CHUNK + tl.arange(0, CHUNK) + tl.zeros([ROWS, 1], tl.int32)
        ws += (tl.load(w_ptr + cols, mask=cols < N, other=0),)
        dws += (tl.zeros([ROWS, CHUNK], acc),)
        dbs += (tl.zeros([ROWS, CHUNK], acc),)
    for tile in tl.range(
        tl.program_id(0), tl.cdiv(M, ROWS), tl.num_programs(0),
        num_stages=STAGES, disable_licm=True,
    ):  # fmt: skip
        rows = tile * ROWS + tl.arange(0, ROWS)[:, None]
        mean = tl.load(mean_ptr + rows, mask=rows < M, other=0)
        rstd = tl.load(rstd_ptr + rows, mask=rows < M, other=0)
        xs = _load_tile(x_ptr, tile, M, N, ROWS, CHUNK, CHUNKS)
        dys = _load_tile(dy_ptr, tile, M, N, ROWS, CHUNK, CHUNKS)
        c1, c2 = _means(ws, xs, dys, mean, rstd, N, CHUNKS)
        new_dws, new_dbs = (), ()
        for c in tl.static_range(CHUNKS):
            start, at, mask = _tile(tile, c, M, N, ROWS, CHUNK)
            x_hat = (xs[c].to(acc) - mean) * rstd
            dx = (ws[c].to(acc) * dys[c].to(acc) - (x_hat * c1 + c2)) * rstd
            tl.store(dx_ptr + start + at, dx, mask=mask)
            new_dws += (dws[c] + dys[c].to(acc) * x_hat,)
            new_dbs += (dbs[c] + dys[c].to(acc),)
        dws, dbs = new_dws, new_dbs
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    _store_sums(sums_ptr, dws, dbs, N, CHUNK, CHUNKS)


# %%
# The end is one launch: ``_sum_rows`` adds up and rounds ``dw`` and ``db``.
# From the Hopper GPUs on it is launched early, which is called programmatic
# dependent launch (PDL).
# It starts while the last programs of the first kernel still run (for narrow
# rows even at once), and ``gdc_wait`` holds it until they have written
# everything.
#
# How large a tile is, and how many warps share it, was found by measuring.
# A multiprocessor gets 8 warps with up to 255 registers a thread.
# That is also the limit of the design: much beyond 10240 columns the sums of
# a row and the row itself no longer fit.

MAX_COLUMNS = 10240
PDL = (
    ON_GPU
    and torch.version.hip is None
    and torch.cuda.get_device_capability() >= (9, 0)
)
# Up to the first width a tile has several rows; above the second it has 8
# warps and larger chunks.
FORWARD, BACKWARD = (1024, 5120), (1536, 4096)


def tile_options(columns, itemsize, limits):
    """A tile has ROWS rows and CHUNKS chunks of CHUNK columns."""
    rows, chunk, warps = 1, 2048, 8
    if columns <= limits[1]:
        chunk, warps = 1024, 4
    if columns <= limits[0]:
        chunk = min(max(triton.next_power_of_2(columns), 16), 1024)
        rows = 2048 // chunk
    warps = min(warps * itemsize // 2, 16)
    chunks = triton.cdiv(columns, chunk)
    sizes = {"ROWS": rows, "CHUNK": chunk, "CHUNKS": chunks}
    return sizes | {"num_warps": warps}


# %%
# The number of stages is what shared memory has room for.
# 96 KB is what every GPU with asynchronous copies offers.


def pipelined(dy, x, w, mean, rstd, dtype=None, programs=None):
    """Rung 5; dtype is that of dw and db, by default that of w."""
    M, N = x.shape
    options = tile_options(N, x.itemsize, BACKWARD)
    rows, chunk, chunks, warps = options.values()
    per_sm = max(8 // warps, 1)
    programs = min(programs or NUM_SMS * per_sm, triton.cdiv(M, rows))
    # One tile in work, and up to 3 on their way.
    size = 2 * rows * chunk * chunks * x.itemsize
    stages = 1 + min(98304 // (per_sm * size), 3)
    # torch.compile does not know the option of an early launch.
    pdl = PDL and not torch.compiler.is_compiling()
    dx = torch.empty_like(x)
    sums = torch.empty(programs, 2, N, dtype=mean.dtype, device=x.device)
    _layer_norm_bwd_pipelined[(programs,)](
        dy, x, w, mean, rstd, dx, sums, M, N,
        STAGES=stages, PDL=pdl, **options,
    )  # fmt: skip
    dw, db = sum_rows(sums, dtype or w.dtype, pdl)
    return dx, dw, db


# %%
# The forward pass in the same style
# ----------------------------------
#
# The page before explains this kernel; here its row is a tuple of chunks too.


@triton.jit
def _layer_norm_fwd(
    x_ptr, w_ptr, b_ptr, y_ptr, mean_ptr, rstd_ptr, M,
    eps: tl.constexpr, N: tl.constexpr,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    acc: tl.constexpr = mean_ptr.dtype.element_ty
    tile = tl.program_id(0)
    xs = _load_tile(x_ptr, tile, M, N, ROWS, CHUNK, CHUNKS)
    total = tl.zeros([ROWS, CHUNK], acc)
    for c in tl.static_range(CHUNKS):
        total += xs[c].to(acc)
    mean = tl.sum(total, 1)[:, None] / N
    total = tl.zeros([ROWS, CHUNK], acc)
    for c in tl.static_range(CHUNKS):
        start, at, mask = _tile(tile, c, M, N, ROWS, CHUNK)
        centered = tl.where(mask, xs[c].to(acc) - mean, 0)
        total += centered * centered
    rstd = 1 / tl.sqrt(tl.sum(total, 1)[:, None] / N + eps)
    rows = tile * ROWS + tl.arange(0, ROWS)[:, None]
    tl.store(mean_ptr + rows, mean, mask=rows < M)
    tl.store(rstd_ptr + rows, rstd, mask=rows < M)
    for c in tl.static_range(CHUNKS):
        start, at, mask = _tile(tile, c, M, N, ROWS, CHUNK)
        cols = c * CHUNK + tl.arange(0, CHUNK)[None, :]
        # Every program reads w and b: they are the last to leave the cache.
        w = tl.load(w_ptr + cols, mask=cols < N, eviction_policy="evict_last")
        b = tl.load(b_ptr + cols, mask=cols < N, eviction_policy="evict_last")
        x_hat = (xs[c].to(acc) - mean) * rstd
        y = x_hat * w.to(acc) + b.to(acc)
        tl.store(y_ptr + start + at, y, mask=mask)


# %%
# ``eps`` and ``N`` are compiled in, so each width has its own kernel.


def forward(x, w, b, eps):
    """y, mean and rstd for a contiguous (M, N) x."""
    M, N = x.shape
    acc = torch.promote_types(x.dtype, torch.float32)
    y = torch.empty_like(x)
    mean = torch.empty(M, dtype=acc, device=x.device)
    rstd = torch.empty_like(mean)
    options = tile_options(N, x.itemsize, FORWARD)
    _layer_norm_fwd[(triton.cdiv(M, options["ROWS"]),)](
        x, w, b, y, mean, rstd, M, eps, N, **options
    )
    return y, mean, rstd


# %%
# Every rung against float64
# --------------------------
#
# All rungs get the same saved row statistics.
# The reference is autograd in float64, on the same 16-bit inputs.

RUNGS = {
    "columns": columns,
    "lock": lock,
    "atomic": atomic,
    "persistent": persistent,
    "triton": pipelined,
}


def example(M, N, dtype):
    """Inputs like those of a model: x is not centered."""
    torch.manual_seed(0)
    x = -2.3 + 0.5 * torch.randn(M, N, device=DEVICE)
    w, b = torch.rand(2, N, device=DEVICE)
    dy = 0.1 * torch.randn(M, N, device=DEVICE)
    return [tensor.to(dtype) for tensor in (dy, x, w, b)]


def exact(dy, x, w):
    """dx, dw and db in float64."""
    x, w, b = (
        tensor.double().requires_grad_()
        for tensor in (x, w, torch.zeros_like(w))
    )
    y = torch.nn.functional.layer_norm(x, w.shape, w, b, 1e-5)
    return torch.autograd.grad(y, (x, w, b), dy.double())


def error(got, expected):
    """Relative error: norm of the difference over norm of the result."""
    return float((got.double() - expected).norm() / expected.norm())


M, N = (1151, 8192) if ON_GPU else (9, 200)
dy, x, w, b = example(M, N, torch.float16)
y, mean, rstd = forward(x, w, b, 1e-5)
expected = exact(dy, x, w)
for name, rung in RUNGS.items():
    errors = [
        error(*pair)
        for pair in zip(rung(dy, x, w, mean, rstd), expected, strict=True)
    ]
    print(f"{name:10} dx, dw, db:", *(f"{e:.1e}" for e in errors))
    # Rounding to 11 bits costs up to 2**-11 an element, less on average.
    assert max(errors) < 2**-11

# %%
# The race
# --------
#
# A race is a program whose result depends on who comes first.
# We make one: the lock without its barrier.
# A program is many threads, and one of them opens the lock.
# The others may not have stored their columns yet: the next program reads old
# sums, and what was to be added is lost.
# The order of the two instructions in the program text does not help, for
# they are executed by different threads.
#
# One tool always sees it: reading the machine code.
# The compiler needs no GPU for that, but it needs a process in which Triton
# is not interpreted.

SCRIPT = """
import re
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

types = dict(mean_ptr="*fp32", rstd_ptr="*fp32", sums_ptr="*fp32")
types["locks_ptr"] = "*i32"
for barrier in (True, False):
    known = dict(N=2048, GROUP_SIZE_M=256, BARRIER=barrier, BLOCK=2048)
    signature = {
        name: "constexpr" if name in known else types.get(name, "*fp16")
        for name in _layer_norm_bwd_lock.arg_names
    }
    source = ASTSource(_layer_norm_bwd_lock, signature, known)
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    steps = re.findall(r"st[.]global|bar[.]sync|atom.*exch", built.asm["ptx"])
    print(f"BARRIER={barrier}:", ", ".join(steps[-3:]))
"""


def machine_code():
    """Compile the lock for a Hopper GPU; print how its release looks."""
    parts = ["import triton", "import triton.language as tl"]
    parts += [inspect.getsource(f.fn) for f in (_row, _layer_norm_bwd_lock)]
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "release.py")
        with open(path, "w") as file:
            file.write("\n".join([*parts, SCRIPT]))
        done = subprocess.run(
            [sys.executable, path], env=env, capture_output=True, text=True
        )
    print(done.stdout or done.stderr)


machine_code()

# %%
# ``st.global`` stores the sums, ``exch`` opens the lock.
# With the barrier, ``bar.sync`` stands between them.
# Without it nothing does, with triton 3.6.0 and 3.7.1.
# The compiler of triton 3.9.0 puts one there by itself.
#
# Who else sees it?
# All of this was run, on an H200:
#
# * a stress test (below): it depends on the shape and the number of warps
#   whether nearly every run is wrong or none at all, so a test that passes
#   proves nothing;
# * ``racecheck`` of compute-sanitizer: no hazard reported, because it watches
#   shared memory, and the sums are in global memory;
# * ``memcheck`` and ``synccheck``: no error, for every address is valid and
#   every barrier that is there is used correctly;
# * the interpreter: right results, always, because it runs one program after
#   the other.
#
# Benchmark
# ---------
#
# The clock and the ceiling are those of the page before: device time from a
# CUDA graph, next to a kernel that moves the same bytes and does nothing else.


class NoGPU(Exception):
    """Raised by a benchmark where there is no GPU to measure."""


# One stream for all: a backward pass runs on the stream of its forward pass.
STREAM = torch.cuda.Stream() if ON_GPU else None


def device_time(prepare):
    """Time on the device, in ms, of the function that prepare() returns.

    The call is captured in a CUDA graph, so the host costs nothing.
    do_bench empties the L2 cache before each replay.
    Returns the median and the 20 % and 80 % quantiles.
    """
    if not ON_GPU:
        raise NoGPU
    with torch.cuda.stream(STREAM):
        fn = prepare()
        fn()  # compiles
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=STREAM):
            fn()
        return triton.testing.do_bench(
            graph.replay, warmup=50, rep=100, quantiles=[0.5, 0.2, 0.8]
        )


def run(benchmark):
    """Table and plot of a benchmark, or one line that says what it needs."""
    try:
        return benchmark.run(print_data=True, show_plots=True, return_df=True)
    except NoGPU:
        if not hasattr(run, "said"):
            print("Timing needs a GPU; recorded figures are on the page.")
            run.said = True


# %%
# The table is then judged by code, which counts losses like wins.


def claims(table):
    """Print what a table says about us: won, lost, share of the copy."""
    if table is None:
        return
    ours = table["Triton (GB/s)"]
    for column in table.columns:
        peer = column.removesuffix(" (GB/s)")
        if peer in ("N", "Triton", "Copy"):
            continue
        ratio = (ours / table[column]).dropna()
        worst = ratio.idxmin()
        print(
            f"{peer}: faster at {(ratio > 1).sum()} sizes, "
            f"slower at {(ratio < 1).sum()}\n"
            f"  speed ratio {ratio.prod() ** (1 / len(ratio)):.2f} "
            f"(geometric mean), at worst {ratio[worst]:.2f} "
            f"at N = {table['N'][worst]:.0f}"
        )
    share = (100 * ours / table["Copy (GB/s)"]).dropna()
    print(
        f"share of the copy: median {share.median():.0f} %, lowest "
        f"{share.min():.0f} % at N = {table['N'][share.idxmin()]:.0f}"
    )


# %%
# The race first: 100 runs with and without the barrier.
# It shows best where each thread has just one store of 16 bytes to make, that
# is, with ``N / 128`` warps.
# The third line is without the barrier too, with the number of warps that
# rung 2 uses otherwise.
# A run is wrong if ``dw`` is off by much more than the order of additions can
# explain.


def race(M, N, provider, unit):
    """Runs of 100 in which dw differs from float64 by a relative error above
    1e-5, or the largest relative error of the 100."""
    if not ON_GPU:
        raise NoGPU
    dy, x, w, b = example(M, N, torch.float16)
    _, mean, rstd = forward(x, w, b, 1e-5)
    dw = exact(dy, x, w)[1]
    w = w.float()  # so that dw is not rounded to 16 bits
    warps = None if provider == "few" else N // 128
    barrier = provider == "with"
    errors = [
        error(lock(dy, x, w, mean, rstd, barrier, warps=warps)[1], dw)
        for _ in range(100)
    ]
    wrong = sum(e > 1e-5 for e in errors)
    return [wrong if unit == "runs" else max(errors)] * 3


def race_benchmark(unit, ylabel):
    return triton.testing.Benchmark(
        x_names=["N"],
        x_vals=[512, 1024, 2048, 4096],
        line_arg="provider",
        line_vals=["with", "without", "few"],
        line_names=["With barrier", "Without", "Without, few warps"],
        ylabel=ylabel,
        y_log=unit == "error",
        plot_name=f"layer-norm-weight-gradients-race-{unit}",
        args={"M": 32768, "unit": unit},
    )


benchmark = race_benchmark("runs", "wrong runs of 100")
run(triton.testing.perf_report(benchmark)(race))

# %%
# And by how much: the largest error of the 100 runs.

benchmark = race_benchmark("error", "relative error")
run(triton.testing.perf_report(benchmark)(race))

# %%
# The ladder
# ----------
#
# Which rungs are deterministic?
# Each runs 100 times on the same input, and we count the runs whose bits
# differ from those of the first.
# Rungs 2 and 3 leave the order of additions to chance, the others do not.

NAMES = {
    "columns": "1 columns",
    "lock": "2 lock",
    "atomic": "3 atomic",
    "persistent": "4 persistent",
    "triton": "Triton",
}


def rung_benchmark(name, ylabel, sizes, dtype, more=None, **options):
    names = NAMES | (more or {})
    return triton.testing.perf_report(
        triton.testing.Benchmark(
            x_names=["N"],
            x_vals=sizes,
            line_arg="provider",
            line_vals=list(names),
            line_names=list(names.values()),
            ylabel=ylabel,
            plot_name=f"layer-norm-weight-gradients-{name}",
            args={"M": 4096, "dtype": dtype},
            **options,
        )
    )


# %%
# ``dw`` and ``db`` are kept in float32 here: rounding to 16 bits would hide
# most differences.


@rung_benchmark(
    "bits",
    "different results of 100",
    [1024, 2560, 4096, 10240],
    torch.float16,
)
def bits(M, N, dtype, provider):
    """Runs of 100 whose dw or db differs in any bit from the first run, with
    dw and db in float32."""
    if not ON_GPU:
        raise NoGPU
    dy, x, w, b = example(M, N, dtype)
    _, mean, rstd = forward(x, w, b, 1e-5)
    w = w.float()
    results = [
        torch.stack(RUNGS[provider](dy, x, w, mean, rstd)[1:])
        for _ in range(101)
    ]
    different = sum(not torch.equal(r, results[0]) for r in results[1:])
    return [different] * 3


run(bits)

# %%
# All are equally exact, and so is PyTorch: the sums are float32, and what is
# left is the rounding of the result.


@rung_benchmark(
    "error", "relative error", [1024, 2560, 4096, 10240], torch.float16,
    more={"torch": "PyTorch"},
)  # fmt: skip
def largest_error(M, N, dtype, provider):
    """Relative error of dw or db against float64, the larger of the two."""
    if not ON_GPU:
        raise NoGPU
    dy, x, w, b = example(M, N, dtype)
    if provider == "torch":
        w, b = w.requires_grad_(), b.requires_grad_()
        y = torch.nn.functional.layer_norm(x, (N,), w, b, 1e-5)
        got = torch.autograd.grad(y, (w, b), dy)
        w = w.detach()
    else:
        _, mean, rstd = forward(x, w, b, 1e-5)
        got = RUNGS[provider](dy, x, w, mean, rstd)[1:]
    expected = exact(dy, x, w)[1:]
    return [max(map(error, got, expected))] * 3


run(largest_error)

# %%
# And the speed: one backward pass, as one call of each rung's function.

SIZES = [512 * i for i in range(2, 21)]


@rung_benchmark("ladder", "GB/s", SIZES, torch.float16, more={"copy": "Copy"})
def ladder(M, N, dtype, provider):
    """Device time of one backward pass, from a CUDA graph replayed with an
    empty L2 cache; median, 20 % and 80 % quantiles."""

    def prepare():
        dy, x, w, b = example(M, N, dtype)
        if provider == "copy":
            out = torch.empty_like(x)
            return lambda: torch.add(x, dy, out=out)
        _, mean, rstd = forward(x, w, b, 1e-5)
        return lambda: RUNGS[provider](dy, x, w, mean, rstd)

    moved = 3 * M * N * dtype.itemsize
    ms, fast, slow = device_time(prepare)
    return [moved / t * 1e-6 for t in (ms, slow, fast)]


table = run(ladder)

# %%
# The same as numbers: microseconds, and the share of the copy.


def rungs(table, M=4096, sizes=(1024, 4096, 10240)):
    if table is None:
        return
    for N in sizes:
        row = table[table["N"] == N].iloc[0]
        print(f"N = {N}")
        for column in table.columns[1:]:
            us = 3 * M * N * 2 / row[column] * 1e-3
            share = 100 * row[column] / row["Copy (GB/s)"]
            name = column.removesuffix(" (GB/s)")
            print(f"  {name:14} {us:7.1f} µs {share:4.0f} % of copy")


rungs(table)
claims(table)

# %%
# Deterministic means the same bits at the same shape on the same device.
# Another number of programs is another order of additions, so a GPU with
# another number of multiprocessors may round differently.

# %%
# A function to train with
# ------------------------
#
# The wrapper is that of the page before: it makes every layout contiguous and
# gives each gradient the shape and type of its parameter.
# A missing weight is a weight of ones, whose gradient nobody asks for.


class LayerNorm(torch.autograd.Function):
    """Autograd calls forward and backward with these arguments."""

    @staticmethod
    def forward(ctx, x, weight, bias, N, eps):
        rows = x.reshape(-1, N).contiguous()
        w = x.new_ones(N) if weight is None else weight
        b = x.new_zeros(N) if bias is None else bias
        w, b = w.reshape(N).contiguous(), b.reshape(N).contiguous()
        y, mean, rstd = forward(rows, w, b, eps)
        ctx.save_for_backward(rows, w, mean, rstd)
        ctx.like = weight, bias
        ctx.dtype = torch.promote_types(w.dtype, b.dtype)
        return y.reshape(x.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        x, w, mean, rstd = ctx.saved_tensors
        rows = dy.reshape(x.shape).contiguous()
        dx, *dwb = pipelined(rows, x, w, mean, rstd, ctx.dtype)
        dw, db = (
            grad.reshape(like.shape).to(like.dtype) if wanted else None
            for grad, like, wanted in zip(
                dwb, ctx.like, ctx.needs_input_grad[1:3], strict=True
            )
        )
        return dx.reshape(dy.shape), dw, db, None, None


def layer_norm(x, normalized_shape, weight, bias, eps=1e-5):
    """Normalize x over its last dimensions; weight and bias may be None."""
    shape = _check(x, normalized_shape, weight, bias, eps)
    return LayerNorm.apply(x, weight, bias, shape.numel(), eps)


# %%
# A mistake in the arguments deserves a message that names the argument.

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _check(x, normalized_shape, weight, bias, eps):
    if isinstance(normalized_shape, int):
        normalized_shape = (normalized_shape,)
    shape = torch.Size(normalized_shape)
    for name, tensor in (("x", x), ("weight", weight), ("bias", bias)):
        if name != "x" and tensor is None:
            continue
        if tensor.dtype not in FLOATS:
            raise TypeError(f"{name} has {tensor.dtype}, which is no float")
        if tensor.device.type != DEVICE.type or tensor.device != x.device:
            raise ValueError(
                f"{name} is on {tensor.device}; x, weight and bias must be "
                f"on one {DEVICE.type} device"
            )
    if x.is_cuda and x.get_device() != torch.cuda.current_device():
        raise ValueError(f"x is on {x.device}: make it the current device")
    if shape.numel() == 0 or x.shape[-len(shape) :] != shape:
        raise ValueError(
            f"x has shape {tuple(x.shape)}, which does not end in "
            f"normalized_shape {tuple(shape)}"
        )
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.shape != shape:
            raise ValueError(f"{name} does not have shape {tuple(shape)}")
    if not eps >= 0:
        raise ValueError(f"eps is {eps}, but must not be negative")
    if shape.numel() > MAX_COLUMNS:
        raise ValueError(
            f"normalized_shape {tuple(shape)} has more than {MAX_COLUMNS} "
            "elements: page 03 (wide rows) has kernels for it"
        )
    return shape


# %%
# A test with the layouts that break careless kernels: three dimensions, a
# slice of columns, and the gradient of ``sum()``, whose strides are 0.

wide = example(12, 2 * N, torch.float32)[1].reshape(3, 4, 2 * N)
for weight, bias in ((w, b), (w.float(), None), (None, None)):
    leaves = [
        None if t is None else t.detach().float().requires_grad_()
        for t in (wide[..., ::2], weight, bias)
    ]
    given = [t for t in leaves if t is not None]
    results = []
    for f in (layer_norm, torch.nn.functional.layer_norm):
        out = f(leaves[0], (N,), *leaves[1:], 1e-5)
        results.append((out, *torch.autograd.grad(out.sum(), given)))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
print("all layouts right")

# %%
# Against others
# --------------
#
# Now the whole function through autograd, against the layer norms that you
# can install.


def lines():
    """Provider keys and their names in the figures."""
    names = {"triton": "Triton", "torch": "PyTorch"}
    names["torch.compile"] = "torch.compile"
    if importlib.util.find_spec("liger_kernel"):
        names["liger"] = "Liger"
    names["copy"] = "Copy"
    return names


def implementation(provider):
    """A function called like layer_norm."""
    if provider == "triton":
        return layer_norm
    if provider == "torch.compile":
        import torch._functorch.config as config

        config.donated_buffer = False  # the backward pass runs many times
        torch._dynamo.config.recompile_limit = 64
        return torch.compile(
            lambda *a: torch.nn.functional.layer_norm(*a), dynamic=False
        )
    if provider == "liger":
        from liger_kernel.ops.layer_norm import LigerLayerNormFunction

        return lambda x, _, *a: LigerLayerNormFunction.apply(x, *a)
    return torch.nn.functional.layer_norm


# %%
# The backward pass is asked for with ``torch.autograd.grad``, so nothing is
# accumulated, and everything is built before the clock starts.


def measure(M, N, dtype, mode, provider):
    """Device time of one pass, from a CUDA graph replayed with an empty L2
    cache; median, 20 % and 80 % quantiles."""

    def prepare():
        dy, x, w, b = example(M, N, dtype)
        if provider == "copy":
            out = torch.empty_like(x)
            if mode == "forward":
                return lambda: out.copy_(x)
            return lambda: torch.add(x, dy, out=out)
        x, w, b = (tensor.requires_grad_() for tensor in (x, w, b))
        f = implementation(provider)
        if mode == "forward":
            return lambda: f(x, (N,), w, b, 1e-5)
        y = f(x, (N,), w, b, 1e-5)
        return lambda: torch.autograd.grad(y, (x, w, b), dy, retain_graph=True)

    moved = (2 if mode == "forward" else 3) * M * N * dtype.itemsize
    ms, fast, slow = device_time(prepare)
    return [moved / t * 1e-6 for t in (ms, slow, fast)]


def speed(mode):
    """The benchmark of one pass."""
    benchmark = triton.testing.Benchmark(
        x_names=["N"],
        x_vals=SIZES,
        line_arg="provider",
        line_vals=list(lines()),
        line_names=list(lines().values()),
        ylabel="GB/s",
        plot_name=f"layer-norm-{mode}",
        args={"M": 4096, "dtype": torch.float16, "mode": mode},
    )
    return triton.testing.perf_report(benchmark)(measure)


# %%
# The forward pass:

table = run(speed("forward"))

# %%
claims(table)

# %%
# The backward pass:

table = run(speed("backward"))

# %%
claims(table)

# %%
# What the figures say
# --------------------
#
# The copy moves three units and nothing else, so what is missing has to be
# somewhere else.
# Some of it can be counted: the rows of sums are written and read, and in the
# last round of rows some programs have nothing to do.


def counted(N, M=4096, num_sms=132, itemsize=2):
    """Print what rung 5 moves and waits beyond three units."""
    options = tile_options(N, itemsize, BACKWARD)
    programs = num_sms * max(8 // options["num_warps"], 1)
    tiles = triton.cdiv(M, options["ROWS"])
    rounds = triton.cdiv(tiles, programs)
    sums = 2 * programs * 2 * N * 4 / (3 * M * N * itemsize)
    idle = 1 - tiles / programs / rounds
    print(
        f"N = {N}: sums add {sums:.1%} to the traffic, programs are idle "
        f"for {idle:.1%} of the rounds"
    )


for N in (1024, 4096, 10240):
    counted(N)

# %%
# The rest is the second launch, which weighs most where the whole pass takes
# only microseconds, and the start and the end of the first kernel, when the
# pipeline fills and drains.
# In between little is left to win.
# The hardware counters of Nsight Compute at ``N = 8192`` show no spilled
# register and issue slots that are empty most of the time.
# The busiest unit is the level 2 cache, through which all of it has to pass.
#
# The other rungs are limited elsewhere.
# The second kernel of rung 1 has ``N / 128`` programs, too few for the device
# where rows are narrow.
# Rungs 2 and 3 touch their sums for every row, and wait for each other.
# Rung 4 waits for memory, and beyond 8192 columns its block has 16384 lanes:
# then registers do not suffice, and some are kept in memory.
#
# What can go wrong
# -----------------
#
# **An addition to what is there.**
# Rung 3 adds to memory, and ``torch.empty`` leaves in memory what was there.

M, N = (1151, 8192) if ON_GPU else (9, 200)
dy, x, w, b = example(M, N, torch.float32)
y, mean, rstd = forward(x, w, b, 1e-5)
dw = exact(dy, x, w)[1]
for name, before in ("wrong", 7.0), ("right", 0.0):
    sums = torch.full((2, N), before, device=DEVICE)
    _layer_norm_bwd_atomic[(M,)](
        dy, x, w, mean, rstd, torch.empty_like(x), sums, N, **row_options(N)
    )
    print(f"{name}: relative error {error(sums[0], dw):.1e}")

# %%
# **Offsets in 32 bits.**
# The row number is a 32-bit integer, and so is its product with ``N``.
# In a matrix of more than 2**31 elements it wraps around.

row = torch.tensor(2**31 // 8192, dtype=torch.int32)
print("wrong: row", row.item(), "starts at", (row * 8192).item())
print("right: row", row.item(), "starts at", (row.long() * 8192).item())

# %%
# **The order of additions.**
# Floating point addition is not associative.
# The same rows, summed by 3 programs and by 4:

dy, x, w, b = example(5 * M, N, torch.float32)
_, mean, rstd = forward(x, w, b, 1e-5)
first = pipelined(dy, x, w, mean, rstd, programs=4)[1]
for name, programs in ("wrong", 3), ("right", 4):
    again = pipelined(dy, x, w, mean, rstd, programs=programs)[1]
    print(f"{name}: {(first != again).sum().item()} of {N} columns differ")
assert torch.equal(first, again)

# %%
# Exercises
# ---------
#
# Each stub runs as it stands, and ``check`` tells which part is wrong.


def check(got, expected):
    """Say which rows (or columns, of a vector) are wrong."""
    wrong = ~torch.isclose(got, expected, rtol=1e-3, atol=1e-4)
    what = "columns"
    if wrong.dim() == 2:
        what, wrong = "rows", wrong.any(dim=1)
    bad = wrong.nonzero().flatten().tolist()
    print("all right" if not bad else f"wrong {what}: {bad}")
    return not bad


dy, x, w, b = example(10, 24, torch.float32)

# %%
# **Exercise 1: the gradient of a bias.**
# A linear layer with a bias owes the column sums of ``dy``, and nothing else.
# Let 4 persistent programs compute one row of sums each.
# The stub adds up the first row of each program only.


@triton.jit
def _bias_sums(dy_ptr, sums_ptr, M, N: tl.constexpr, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    row = tl.program_id(0)
    # to do: also the rows after it, tl.num_programs(0) apart
    db = tl.load(dy_ptr + row * N + cols, mask=cols < N, other=0)
    sums_ptr += tl.program_id(0) * N + cols
    tl.store(sums_ptr, db, mask=cols < N)


def exercise_1(kernel):
    sums = torch.full((4, 24), float("nan"), device=DEVICE)
    kernel[(4,)](dy, sums, 10, 24, BLOCK=32)
    return check(sums.sum(0), dy.sum(0))


exercise_1(_bias_sums)

# %%

# Solution 1


@triton.jit
def _bias_sums_solved(
    dy_ptr, sums_ptr, M, N: tl.constexpr, BLOCK: tl.constexpr
):
    cols = tl.arange(0, BLOCK)
    db = tl.zeros([BLOCK], tl.float32)
    for row in range(tl.program_id(0), M, tl.num_programs(0)):
        db += tl.load(dy_ptr + row * N + cols, mask=cols < N, other=0)
    sums_ptr += tl.program_id(0) * N + cols
    tl.store(sums_ptr, db, mask=cols < N)


assert exercise_1(_bias_sums_solved)

# %%
# **Exercise 2: one sum is enough.**
# RMS normalization has no mean and no bias: ``x_hat = x * rstd`` with
# ``rstd = (mean(x**2) + eps) ** -0.5``.
# Turn a row of layer norm into a row of RMS norm: which of ``c1`` and ``c2``
# is left?


@triton.jit
def _rms_row(
    dy_ptr, x_ptr, w_ptr, dx_ptr, eps,
    N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    cols = tl.arange(0, BLOCK)
    at = tl.program_id(0) * N + cols
    x = tl.load(x_ptr + at, mask=cols < N, other=0)
    dy = tl.load(dy_ptr + at, mask=cols < N, other=0)
    wdy = dy * tl.load(w_ptr + cols, mask=cols < N, other=0)
    rstd = 1 / tl.sqrt(tl.sum(x * x) / N + eps)
    dx = wdy * rstd  # to do: the row sum is missing
    tl.store(dx_ptr + at, dx, mask=cols < N)


def exercise_2(kernel):
    dx = torch.full_like(x, float("nan"))
    kernel[(10,)](dy, x, w, dx, 1e-5, 24, BLOCK=32)
    leaf = x.clone().requires_grad_()
    y = leaf * (leaf.square().mean(1, keepdim=True) + 1e-5) ** -0.5 * w
    return check(dx, torch.autograd.grad(y, leaf, dy)[0])


exercise_2(_rms_row)

# %%

# Solution 2


@triton.jit
def _rms_row_solved(
    dy_ptr, x_ptr, w_ptr, dx_ptr, eps,
    N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    cols = tl.arange(0, BLOCK)
    at = tl.program_id(0) * N + cols
    x = tl.load(x_ptr + at, mask=cols < N, other=0)
    dy = tl.load(dy_ptr + at, mask=cols < N, other=0)
    wdy = dy * tl.load(w_ptr + cols, mask=cols < N, other=0)
    rstd = 1 / tl.sqrt(tl.sum(x * x) / N + eps)
    # Nothing is subtracted from x, so c2, the part of the mean, is gone.
    x_hat = x * rstd
    c1 = tl.sum(x_hat * wdy) / N
    tl.store(dx_ptr + at, (wdy - x_hat * c1) * rstd, mask=cols < N)


assert exercise_2(_rms_row_solved)

# %%
# **Exercise 3: count before you write.**
# How many units does each of the rungs 1 to 4 move, for float16 ``x`` and
# ``P`` programs on rung 4?
# Count also what a cache may serve: a row of sums is 8 bytes a column.
# An atomic addition is a read and a write, and of the buffers of rung 2 the
# first to come reads nothing.
# Leave out locks, statistics, weights and results.


def units(M, P):
    return [3, 3, 3, 3]  # to do: one number for each rung


def exercise_3(units):
    got = torch.tensor(units(4096, 132), dtype=torch.float32)
    return check(got, torch.tensor([5, 11, 11, 3.2578125]))


exercise_3(units)

# %%

# Solution 3


def units_solved(M, P):
    # A row of sums, written once and read once, is 16 bytes a column; a unit
    # is 2 M bytes a column. Each of M rows goes into the sums on rungs 2 and
    # 3: what stage 2 reads there, the first additions did not read.
    return [
        5,
        3 + M * 16 / (2 * M),
        3 + M * 16 / (2 * M),
        3 + P * 16 / (2 * M),
    ]


assert exercise_3(units_solved)

# %%
# References
# ----------
#
# * J. Ba, J. Kiros, G. Hinton: Layer Normalization, 2016,
#   `arXiv 1607.06450 <https://arxiv.org/abs/1607.06450>`_.
# * `The CUDA programming guide on programmatic dependent launch
#   <https://docs.nvidia.com/cuda/cuda-c-programming-guide/>`_.
# * `A report of the missing barrier in the wild
#   <https://github.com/meta-pytorch/tritonbench/issues/1266>`_.
