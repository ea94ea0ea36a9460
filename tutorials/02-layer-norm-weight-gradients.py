r"""
Five ways to sum a gradient
===========================

Climb from a correct layer norm backward pass to a fast one, one measured
idea at a time, and keep its weight gradients exact to the last bit.

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


def picture(program, buffers, label):
    """Draw who reads what, and the rows of sums that it is kept in."""
    _, ax = plt.subplots(figsize=(7.5, 2.6))
    ax.set(xlim=(0, 15), ylim=(-0.9, 5.2))
    ax.axis("off")

    def cell(x, y, color):
        ax.add_patch(
            plt.Rectangle((x, y), 0.6, 0.5, fc=color, ec="black", alpha=0.6)
        )

    def arrow(x):
        ax.annotate(
            "",
            (x + 0.9, 2.25),
            (x, 2.25),
            arrowprops={"arrowstyle": "->", "color": "black"},
        )

    for j in range(6):
        for i in range(8):
            cell(0.2 + 0.6 * j, 4 - 0.5 * i, f"C{program(i, j)}")
        for k, color in enumerate(buffers):
            y = 2 + 0.7 * ((len(buffers) - 1) / 2 - k)
            cell(5.4 + 0.6 * j, y, f"C{color}")
        cell(10.6 + 0.6 * j, 2, f"C{program(0, j)}" if not buffers else "C7")
    arrow(4.2)
    if buffers:
        arrow(9.4)
    ax.text(2, 4.8, "x, dy", ha="center")
    ax.text(7.2, 4.8, label, ha="center")
    ax.text(12.4, 2.8, "dw", ha="center")
    plt.show()


# %%
# Rung 1: a second kernel by columns
# ----------------------------------
#
# One kernel computes ``dx`` by rows, another ``dw`` and ``db`` by columns.
# A program of the second kernel owns some columns and walks down all rows.
# Nobody shares anything, so the result is deterministic.
# The second kernel reads ``x`` and ``dy`` again: five units, not three.

picture(lambda i, j: j // 2, [], "a program\nowns columns")


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
    _layer_norm_bwd_dx[(M,)](
        dy, x, w, mean, rstd, dx, N, **row_options(N)
    )
    _layer_norm_bwd_dwdb[(triton.cdiv(N, 128),)](
        dy, x, mean, rstd, dw, db, M, N, ROWS=32, COLS=128
    )
    return dx, dw, db


# %%
# Rung 2: buffers behind locks
# ----------------------------
#
# The design of the page before: a program adds its terms to one of a few
# rows of sums while it holds the lock of that row.
# Then a small kernel adds up those rows.
# ``x`` and ``dy`` are read once, but each program reads and writes a row of
# float32 sums, and programs wait for each other.
# Who comes first differs from run to run, so the order of the additions
# differs too, and with it the last bits.
#
# ``BARRIER`` is there so that we can leave it out later, and look.

picture(lambda i, j: i % 8, [7, 7], "rows of sums,\neach has a lock")


@triton.jit
def _layer_norm_bwd_lock(
    dy_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, dx_ptr,
    sums_ptr,  # (GROUP_SIZE_M, 2, N): dw and db
    locks_ptr,  # (2, GROUP_SIZE_M): taken?, written?
    N: tl.constexpr, GROUP_SIZE_M: tl.constexpr, BARRIER: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    dw, db = _row(
        dy_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, dx_ptr, row, N, BLOCK
    )
    cols = tl.arange(0, BLOCK)
    lock_ptr = locks_ptr + row % GROUP_SIZE_M
    written_ptr = lock_ptr + GROUP_SIZE_M
    dw_ptr = sums_ptr + (row % GROUP_SIZE_M) * 2 * N + cols
    db_ptr = dw_ptr + N
    while tl.atomic_cas(lock_ptr, 0, 1) == 1:
        pass
    old = (cols < N) & (tl.load(written_ptr) == 1)
    dw += tl.load(dw_ptr, mask=old, other=0)
    db += tl.load(db_ptr, mask=old, other=0)
    tl.store(dw_ptr, dw, mask=cols < N)
    tl.store(db_ptr, db, mask=cols < N)
    tl.store(written_ptr, 1)
    if BARRIER:
        tl.debug_barrier()  # every thread has stored its columns
    tl.atomic_xchg(lock_ptr, 0)


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
    options = {"launch_pdl": True} if pdl else {}
    _sum_rows[(triton.cdiv(out.numel(), 16),)](
        sums, out, len(sums), out.numel(), 256, 16, pdl, **options
    )
    return out


def lock(dy, x, w, mean, rstd, barrier=True, dtype=None):
    """Rung 2; dtype is that of the sums, float32 as a rule."""
    M, N = x.shape
    G = 256 if N <= 2048 else 128 if N <= 8192 else 64
    dx = torch.empty_like(x)
    sums = torch.empty(G, 2, N, dtype=dtype or mean.dtype, device=x.device)
    locks = torch.zeros(2, G, dtype=torch.int32, device=x.device)
    _layer_norm_bwd_lock[(M,)](
        dy, x, w, mean, rstd, dx, sums, locks, N, G, barrier, **row_options(N)
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

picture(lambda i, j: i % 8, [7], "one row of sums,\natomic additions")


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

NUM_SMS = 4  # in the interpreter, any small number will do
if ON_GPU:
    NUM_SMS = torch.cuda.get_device_properties(0).multi_processor_count

picture(lambda i, j: i % 4, range(4), "one row of sums\nfor each program")


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
    _, ax = plt.subplots(figsize=(7.5, 2.6))
    ax.set(xlim=(-3, 14), ylim=(-0.3, 5.2))
    ax.axis("off")

    def bar(x, y, width, text, color):
        ax.add_patch(
            plt.Rectangle((x, y), width, 0.7, fc=color, ec="black", alpha=0.6)
        )
        ax.text(x + width / 2, y + 0.35, text, ha="center", va="center")

    for y, name in ((3.9, "load"), (3.1, "work"), (1.3, "load"), (0.5, "work")):
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
def _add_pairs(a1, a2, b1, b2):
    return a1 + b1, a2 + b2


@triton.jit
def _layer_norm_bwd_pipelined(
    dy_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, dx_ptr,
    sums_ptr,  # (programs, 2, N)
    M, N: tl.constexpr,
    ROWS: tl.constexpr, CHUNK: tl.constexpr,  # of a tile
    STAGES: tl.constexpr,  # tiles in flight, the present one included
    PDL: tl.constexpr,
):  # fmt: skip
    acc: tl.constexpr = mean_ptr.dtype.element_ty
    CHUNKS: tl.constexpr = (N + CHUNK - 1) // CHUNK
    ws, dws, dbs = (), (), ()
    for c in tl.static_range(CHUNKS):
        # One w for each row of the tile: the layout of x and dy.
        cols = c * CHUNK + tl.arange(0, CHUNK) + tl.zeros([ROWS, 1], tl.int32)
        ws += (tl.load(w_ptr + cols, mask=cols < N, other=0),)
        dws += (tl.zeros([ROWS, CHUNK], acc),)
        dbs += (tl.zeros([ROWS, CHUNK], acc),)
    # disable_licm: w is not converted ahead of the loop, where its float32
    # copy would fill registers all the time.
    for tile in tl.range(
        tl.program_id(0), tl.cdiv(M, ROWS), tl.num_programs(0),
        num_stages=STAGES, disable_licm=True,
    ):  # fmt: skip
        rows = tile * ROWS + tl.arange(0, ROWS)
        mean = tl.load(mean_ptr + rows, mask=rows < M, other=0)[:, None]
        rstd = tl.load(rstd_ptr + rows, mask=rows < M, other=0)[:, None]
        xs, dys = (), ()
        sum1 = tl.zeros([ROWS, CHUNK], acc)
        sum2 = tl.zeros([ROWS, CHUNK], acc)
        for c in tl.static_range(CHUNKS):
            start, at, mask = _tile(tile, c, M, N, ROWS, CHUNK)
            xs += (tl.load(x_ptr + start + at, mask=mask, other=0),)
            dys += (tl.load(dy_ptr + start + at, mask=mask, other=0),)
            x_hat = (xs[c].to(acc) - mean) * rstd
            wdy = ws[c].to(acc) * dys[c].to(acc)
            sum1 += x_hat * wdy
            sum2 += wdy
        c1, c2 = tl.reduce((sum1, sum2), 1, _add_pairs)
        c1 = c1[:, None] / N
        c2 = c2[:, None] / N
        new_dws, new_dbs = (), ()
        for c in tl.static_range(CHUNKS):
            start, at, mask = _tile(tile, c, M, N, ROWS, CHUNK)
            dy = dys[c].to(acc)
            x_hat = (xs[c].to(acc) - mean) * rstd
            dx = (ws[c].to(acc) * dy - (x_hat * c1 + c2)) * rstd
            tl.store(dx_ptr + start + at, dx, mask=mask)
            new_dws += (dws[c] + dy * x_hat,)
            new_dbs += (dbs[c] + dy,)
        dws, dbs = new_dws, new_dbs
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    sums_ptr += tl.program_id(0) * 2 * N
    for c in tl.static_range(CHUNKS):
        cols = c * CHUNK + tl.arange(0, CHUNK)
        tl.store(sums_ptr + cols, tl.sum(dws[c], 0), mask=cols < N)
        tl.store(sums_ptr + N + cols, tl.sum(dbs[c], 0), mask=cols < N)


# %%
# The end is one launch: ``_sum_rows`` adds up and rounds ``dw`` and ``db``.
# From the Hopper GPUs on it is launched early, which is called programmatic
# dependent launch (PDL).
# It starts while the last programs of the first kernel still run, and
# ``gdc_wait`` holds it until they have written everything.
#
# How large a tile is, and how many warps share it, was found by measuring.
# A multiprocessor gets 8 warps with up to 255 registers a thread.
# That is also the limit of the design: beyond 10240 columns the sums of a
# row and the row itself no longer fit.

MAX_N = 10240
PDL = (
    ON_GPU
    and torch.version.hip is None
    and torch.cuda.get_device_capability() >= (9, 0)
)


def tile_options(N, itemsize):
    """Rows and columns of a tile, and its warps."""
    rows, chunk, warps = 1, 2048, 8
    if N <= 4096:
        chunk, warps = 1024, 4
    if N <= 1024:
        chunk = max(triton.next_power_of_2(N), 128)
        rows = 2048 // chunk
    warps = min(warps * max(itemsize // 2, 1), 16)
    return {"ROWS": rows, "CHUNK": chunk, "num_warps": warps}


def pipelined(dy, x, w, mean, rstd, dtype=None, programs=None):
    """Rung 5; dtype is that of dw and db, by default that of w."""
    M, N = x.shape
    options = tile_options(N, x.itemsize)
    rows, chunk = options["ROWS"], options["CHUNK"]
    programs = programs or NUM_SMS * max(8 // options["num_warps"], 1)
    programs = min(programs, triton.cdiv(M, rows))
    # As many stages as find room, but at most 4.
    room = 2 * rows * chunk * triton.cdiv(N, chunk) * x.itemsize
    stages = 1 + min(81920 // room, 3)
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
    ROWS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    acc: tl.constexpr = mean_ptr.dtype.element_ty
    CHUNKS: tl.constexpr = (N + CHUNK - 1) // CHUNK
    tile = tl.program_id(0)
    xs = ()
    total = tl.zeros([ROWS, CHUNK], acc)
    for c in tl.static_range(CHUNKS):
        start, at, mask = _tile(tile, c, M, N, ROWS, CHUNK)
        xs += (tl.load(x_ptr + start + at, mask=mask, other=0),)
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
        w = tl.load(w_ptr + cols, mask=cols < N).to(acc)
        b = tl.load(b_ptr + cols, mask=cols < N).to(acc)
        y = (xs[c].to(acc) - mean) * rstd * w + b
        tl.store(y_ptr + start + at, y, mask=mask)


def forward(x, w, b, eps):
    """y, mean and rstd for a contiguous (M, N) x."""
    M, N = x.shape
    acc = torch.promote_types(x.dtype, torch.float32)
    y = torch.empty_like(x)
    mean = torch.empty(M, dtype=acc, device=x.device)
    rstd = torch.empty_like(mean)
    options = tile_options(N, x.itemsize)
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
        tensor.double().requires_grad_() for tensor in (x, w, torch.zeros_like(w))
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
    print(f"{name:10}  dx {errors[0]:.1e}  dw {errors[1]:.1e}  db {errors[2]:.1e}")
    # Rounding to 11 bits costs up to 2**-11 an element, less on average.
    assert max(errors) < 2**-11
