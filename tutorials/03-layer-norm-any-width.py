r"""
Any Width at the Speed of Memory
================================

Write layer normalization for rows of one to one million columns, forward and
backward, close to the speed of a copy.

You will be able to:

* say where a kernel loses speed when its rows become narrower or wider;
* keep a row in registers without padding it to a power of two;
* load 8 or 16 bytes at once, even from rows that begin anywhere;
* split a row among programs that exchange their sums while they work;
* sum weight gradients in registers, in the same order every time;
* choose a configuration by a short rule, and measure what the rule costs.

This page assumes the first page, which derives the formulas, and reads best
after the second, which explains the persistent backward kernel.
Without a GPU everything here runs in Triton's interpreter, except the timing.

One width, one plan
-------------------

Memory sets the pace of layer normalization.
Forward has to read ``x`` and write ``y``.
Backward has to read ``x`` and ``dy`` and write ``dx``.
A kernel that moves more than this, or that does not always have enough loads
on their way, is slower than memory allows.
What a program does with a row depends on how wide the row is:

* short rows: one program takes several rows at once;
* middle rows: one program holds one row in its registers;
* long rows: one program reads the row twice, or many programs share it.
"""

# %%
# The first cell is that of every page.

import importlib.util
import inspect
import os
import subprocess
import sys
import tempfile

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    # Triton's interpreter runs the same kernels on the CPU, slowly.
    os.environ["TRITON_INTERPRET"] = "1"

import triton
import triton.language as tl

DEVICE = torch.device("cuda" if ON_GPU else "cpu")

# %%
# Rows that fit into registers
# ----------------------------
#
# A block of Triton has a power of two of lanes.
# A row of 4608 columns in one block of 8192 leaves almost half of the lanes
# idle, and a row of 5 columns leaves most threads of a program idle.
# The cure for both is a tile of ``ROWS`` rows whose columns are cut into
# chunks: a short row shares its tile with other rows, and a wide row has
# several chunks, of which only the last has idle lanes.


def tiles():
    _, ax = plt.subplots(
        num="A tile of four short rows, and one row of four chunks and a half",
        figsize=(7.5, 2.8),
    )
    ax.set(xlim=(-0.2, 10.2), ylim=(-0.3, 4.2))
    ax.axis("off")

    def box(x, y, width, color, text=""):
        ax.add_patch(
            plt.Rectangle((x, y), width, 0.5, fc=color, ec="black", alpha=0.6)
        )
        ax.text(x + width / 2, y + 0.25, text, ha="center", va="center")

    ax.text(0, 3.85, "short rows: one program, a tile of 4 rows")
    for i in range(4):
        box(0, 3.2 - 0.5 * i, 1.7, f"C{i}", f"row {i}")
        box(1.7, 3.2 - 0.5 * i, 0.3, "white")
    ax.text(0, 1.0, "middle rows: one program, one row in 5 chunks")
    for c in range(5):
        box(2 * c, 0.3, 1 if c == 4 else 2, "C0", f"chunk {c}")
    box(9, 0.3, 1, "white", "idle")
    plt.show()


tiles()

# %%
# A thread loads 16 bytes at once, which are 8 columns in float16, if it can be
# sure that they start at a multiple of 16 bytes.
# Every row starts there if ``N`` is a multiple of 8.
# If not, a kernel that begins each row with its first lane has to load single
# columns; a section below measures what that costs.
#
# So the lanes begin at the multiple of 8 before the row.
# ``shift`` says how many lanes lie before it, and column ``j`` is in lane
# ``j + shift``.
# Rows have different shifts, but rows that are ``STEP`` = 8 apart have the
# same.
# If the rows of a program are ``STEP`` apart, each column has one lane, and
# the program can keep weights and sums in registers.
# Where all rows are aligned, ``STEP`` is 1 and ``shift`` is 0.


def shifts():
    _, ax = plt.subplots(
        num="Rows of 13 columns in lanes that are aligned to 8: rows 0 and 8 "
        "have the same shift",
        figsize=(7.5, 2.6),
    )
    ax.set(xlim=(-3.2, 24.2), ylim=(-0.2, 4.4))
    ax.axis("off")
    for i, row in enumerate((0, 1, 2, 8)):
        y = 3.2 - i
        shift = row * 13 % 8
        ax.text(-3, y + 0.3, f"row {row}", va="center")
        for lane in range(24):
            inside = shift <= lane < shift + 13
            color = "C0" if inside else "white"
            ax.add_patch(
                plt.Rectangle((lane, y), 1, 0.6, fc=color, ec="0.6", alpha=0.6)
            )
        for group in range(0, 24, 8):
            ax.add_patch(plt.Rectangle((group, y), 8, 0.6, fill=False, lw=1.5))
    ax.text(4, 4.05, "16 bytes", ha="center")
    plt.show()


shifts()

# %%
# Two helpers load and store one chunk.
# A mask costs registers and instructions, so a chunk has one only where a
# lane can be outside.
# ``EVEN`` and the comparisons with ``N`` are known to the compiler: it keeps
# one of the branches.
#
# A load takes whole groups of 16 bytes.
# The first and the last group also hold columns of other rows, which
# ``_only_inside`` keeps out of sums.
# The last group may reach past the end of the matrix, but memory comes in
# pieces that are larger than 16 bytes.
# A store must not touch other rows: it writes the whole groups, and then the
# single columns of the first and the last group.


@triton.jit
def _lanes(c, shift, N: tl.constexpr, CHUNK: tl.constexpr,
           STEP: tl.constexpr):  # fmt: skip
    """Lanes of chunk c; those that hold columns of the row; those in groups
    of STEP that belong to the row as a whole."""
    lane = c * CHUNK + tl.arange(0, CHUNK)[None, :]
    if STEP == 1:
        inside = lane < N + shift
        return lane, inside, inside
    else:
        inside = (lane >= shift) & (lane < N + shift)
        group = lane // STEP * STEP
        whole = (group >= shift) & (group + STEP <= N + shift)
        return lane, inside, whole


# %%


@triton.jit
def _load(
    ptr,  # first lane of the first row
    row,  # (ROWS, 1), counted from that row; or 0
    c,  # number of the chunk
    M,  # rows that exist
    shift,  # lanes before the row
    N: tl.constexpr,  # columns, also the distance of the rows
    CHUNK: tl.constexpr,
    STEP: tl.constexpr,  # 1: all rows are aligned, shift is 0
    EVEN: tl.constexpr,  # all rows of all tiles exist
    HINT: tl.constexpr,  # how long the cache should keep it
):
    lane, inside, _ = _lanes(c, shift, N, CHUNK, STEP)
    at = ptr + row * N + lane
    if EVEN and (c + 1) * CHUNK <= N:
        return tl.load(at, eviction_policy=HINT)
    else:
        mask = inside if STEP == 1 else lane // STEP * STEP < N + shift
        mask = mask if EVEN else mask & (row < M)
        return tl.load(at, mask=mask, other=0, eviction_policy=HINT)


@triton.jit
def _only_inside(value, c, shift, N: tl.constexpr, CHUNK: tl.constexpr,
                 STEP: tl.constexpr):  # fmt: skip
    """The value, 0 in lanes that hold columns of other rows."""
    if STEP > 1 and (c == 0 or (c + 1) * CHUNK > N):
        _, inside, _ = _lanes(c, shift, N, CHUNK, STEP)
        return tl.where(inside, value, 0)
    else:
        return value


# %%


@triton.jit
def _store(
    ptr,
    value,
    row,
    c,
    M,
    shift,
    N: tl.constexpr,
    CHUNK: tl.constexpr,
    STEP: tl.constexpr,
    EVEN: tl.constexpr,
    SLICED: tl.constexpr = False,  # the chunk is all that a program has
):
    lane, inside, whole = _lanes(c, shift, N, CHUNK, STEP)
    at = ptr + row * N + lane
    if EVEN and (c + 1) * CHUNK <= N and (STEP == 1 or c > 0):
        tl.store(at, value)
    else:
        mask = whole if EVEN else whole & (row < M)
        tl.store(at, value, mask=mask)
        if STEP > 1:
            edge = inside & (whole == 0)
            edge = edge if EVEN else edge & (row < M)
            if not SLICED:
                tl.store(at, value, mask=edge)
            elif (shift > 0) | (N + shift < CHUNK):
                # Most slices have no edge, so this asks at run time.
                tl.store(at, value, mask=edge)


@triton.jit
def _load_vector(ptr, row, c, shift, N: tl.constexpr, CHUNK: tl.constexpr,
                 STEP: tl.constexpr, HINT: tl.constexpr):  # fmt: skip
    """Chunk c of w or b, in the lanes of a row; 0 outside."""
    if STEP == 1:
        return _load(ptr - shift, row * 0, c, 1, 0, N, CHUNK, 1, True, HINT)
    else:
        lane, inside, _ = _lanes(c, shift, N, CHUNK, STEP)
        mask = inside & (row >= 0)
        return tl.load(ptr + lane - shift + row * 0, mask=mask, other=0)


# %%
# The forward kernel is that of the first page with these tiles.
#
# * ``tl.static_range`` unrolls the loop over the chunks, so ``xs`` can be a
#   tuple: it lives in registers, and the row is read once.
# * ``xs`` keeps the type of ``x``.
#   Two numbers of 16 bits share a register; float32 would need two.
# * ``w`` and ``b`` are the same for all rows.
#   ``evict_last`` asks the cache to keep them.


@triton.jit
def _statistics(xs, shift, eps: tl.constexpr, N: tl.constexpr,
                STEP: tl.constexpr, acc: tl.constexpr):  # fmt: skip
    """Mean and rstd of the rows of a tile."""
    ROWS: tl.constexpr = xs[0].shape[0]
    CHUNK: tl.constexpr = xs[0].shape[1]
    total = tl.zeros([ROWS, CHUNK], acc)
    for c in tl.static_range(len(xs)):
        total += xs[c].to(acc)
    mean = tl.sum(total, 1)[:, None] / N
    total = tl.zeros([ROWS, CHUNK], acc)
    for c in tl.static_range(len(xs)):
        d = xs[c].to(acc) - mean
        # Lanes outside are 0 again.
        if (c + 1) * CHUNK > N or (STEP > 1 and c == 0):
            _, inside, _ = _lanes(c, shift, N, CHUNK, STEP)
            d = tl.where(inside, d, 0)
        total += d * d
    return mean, tl.rsqrt(tl.sum(total, 1)[:, None] / N + eps)


# %%


@triton.jit
def _layer_norm_fwd_rows(
    x_ptr, w_ptr, b_ptr, y_ptr, mean_ptr, rstd_ptr,  # as on the first page
    M, eps: tl.constexpr, N: tl.constexpr,
    ROWS: tl.constexpr, CHUNK: tl.constexpr,  # of a tile
    EVEN: tl.constexpr,  # M is a multiple of ROWS
    HINT: tl.constexpr,  # for x
):  # fmt: skip
    acc: tl.constexpr = mean_ptr.dtype.element_ty
    CHUNKS: tl.constexpr = (N + CHUNK - 1) // CHUNK
    # 64 bits only here: M * N may pass 2**31, a tile does not.
    first = tl.cast(tl.program_id(0), tl.int64) * ROWS
    left = M - tl.program_id(0) * ROWS
    row = tl.arange(0, ROWS)[:, None]
    at = x_ptr + first * N
    xs = ()
    for c in tl.static_range(CHUNKS):
        xs += (_load(at, row, c, left, 0, N, CHUNK, 1, EVEN, HINT),)
    mean, rstd = _statistics(xs, 0, eps, N, 1, acc)
    tl.store(mean_ptr + first + row, mean, mask=row < left)
    tl.store(rstd_ptr + first + row, rstd, mask=row < left)
    at = y_ptr + first * N
    for c in tl.static_range(CHUNKS):
        y = (xs[c].to(acc) - mean) * rstd
        if w_ptr is not None:
            w = _load_vector(w_ptr, 0, c, 0, N, CHUNK, 1, "evict_last")
            y *= w.to(acc)
        if b_ptr is not None:
            b = _load_vector(b_ptr, 0, c, 0, N, CHUNK, 1, "evict_last")
            y += b.to(acc)
        _store(at, y, row, c, left, 0, N, CHUNK, 1, EVEN)


# %%
# Rows that are not aligned have a kernel of their own, because ``w`` and ``b``
# are then expensive to load: each column by itself.
# A program loads them once, keeps them in registers, and takes one row after
# the other.
# ``num_stages`` has the next rows on their way meanwhile.


@triton.jit
def _first(tile, N: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr):
    """First row of a tile, and the offset of its first lane."""
    row = tile // STEP * (STEP * ROWS) + tile % STEP
    return row, tl.cast(row, tl.int64) * N // STEP * STEP


@triton.jit
def _layer_norm_fwd_shifted(
    x_ptr, w_ptr, b_ptr, y_ptr, mean_ptr, rstd_ptr,
    M, eps: tl.constexpr, N: tl.constexpr,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, STEP: tl.constexpr,
    STAGES: tl.constexpr,  # tiles on their way
    EVEN: tl.constexpr,
):  # fmt: skip
    acc: tl.constexpr = mean_ptr.dtype.element_ty
    CHUNKS: tl.constexpr = (N + STEP + CHUNK - 2) // CHUNK
    i = tl.program_id(0)
    shift = i % STEP * N % STEP  # of all rows of this program
    row = tl.arange(0, ROWS)[:, None] * STEP
    ws, bs = (), ()
    for c in tl.static_range(CHUNKS):
        ws += (_load_vector(w_ptr, row, c, shift, N, CHUNK, STEP, ""),)
        bs += (_load_vector(b_ptr, row, c, shift, N, CHUNK, STEP, ""),)
    for tile in tl.range(
        i, tl.cdiv(M, ROWS * STEP) * STEP, tl.num_programs(0),
        num_stages=STAGES, disable_licm=True,
    ):  # fmt: skip
        first, at = _first(tile, N, ROWS, STEP)
        left = M - first
        xs = ()
        for c in tl.static_range(CHUNKS):
            x = _load(
                x_ptr + at, row, c, left, shift, N, CHUNK, STEP, EVEN, ""
            )
            xs += (_only_inside(x, c, shift, N, CHUNK, STEP),)
        mean, rstd = _statistics(xs, shift, eps, N, STEP, acc)
        tl.store(mean_ptr + first + row, mean, mask=row < left)
        tl.store(rstd_ptr + first + row, rstd, mask=row < left)
        for c in tl.static_range(CHUNKS):
            y = (xs[c].to(acc) - mean) * rstd * ws[c].to(acc) + bs[c].to(acc)
            _store(y_ptr + at, y, row, c, left, shift, N, CHUNK, STEP, EVEN)


# %%
# Rows that do not fit: two sweeps
# --------------------------------
#
# A row of 32768 columns does not fit into the registers of one program.
# The oldest page of this series, of 2022, streamed such rows, and its idea is
# right: what was read a moment ago is still in a cache.
# So the program reads the row twice.
# The first sweep computes mean and variance, the second writes ``y``.
#
# * The first sweep asks the cache to keep what it reads (``evict_last``), the
#   second to let go of it (``evict_first``).
# * The second sweep runs backward.
#   If the row is larger than the cache, its end is what is still there.
# * ``.cs`` marks the stores as streaming: ``y`` shall not push ``x`` out.
#
# The variance needs care.
# Two sums, of ``x`` and of its square, lose all digits when the mean is large
# next to the standard deviation.
# Welford's method does not: every lane keeps the mean of what it has seen and
# the sum ``m2`` of squares about that mean.
# At the end the lanes are merged with the formula of Chan, Golub and LeVeque,
# which holds for any two sets of numbers.
# All of it is done for ``x`` minus the first element of the row: then a large
# mean does not round the small differences away.


@triton.jit
def _merge(mean_a, m2_a, n_a, mean_b, m2_b, n_b):
    """Mean, squares about it and count of two sets together."""
    n = n_a + n_b
    share = n_b / tl.maximum(n, 1)
    d = mean_b - mean_a
    return mean_a + d * share, m2_a + m2_b + d * d * n_a * share, n


# %%


@triton.jit
def _welford(x_ptr, eps: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr,
             HINT: tl.constexpr, acc: tl.constexpr):  # fmt: skip
    """First sweep over the row at x_ptr: its mean and rstd."""
    pivot = tl.load(x_ptr).to(acc)
    mean = tl.zeros([CHUNK], acc)  # of x - pivot, in each lane
    m2 = tl.zeros([CHUNK], acc)
    count = tl.zeros([CHUNK], acc)
    for c in tl.range(0, (N + CHUNK - 1) // CHUNK, num_stages=1):
        col = c * CHUNK + tl.arange(0, CHUNK)
        mask = None if N % CHUNK == 0 else col < N
        x = tl.load(x_ptr + col, mask=mask, eviction_policy=HINT)
        d = (x.to(acc) - pivot) - mean
        if N % CHUNK != 0:
            d = tl.where(mask, d, 0)
        share = 1 / tl.cast(c + 1, acc)
        mean += d * share
        m2 += d * d * (1 - share)
        count += 1 if N % CHUNK == 0 else tl.where(mask, 1, 0)
    mean, m2, _ = tl.reduce((mean, m2, count), 0, _merge)
    return pivot + mean, tl.rsqrt(m2 / N + eps)


# %%


@triton.jit
def _layer_norm_fwd_sweeps(
    x_ptr, w_ptr, b_ptr, y_ptr, mean_ptr, rstd_ptr,
    eps: tl.constexpr, N: tl.constexpr,
    CHUNK: tl.constexpr,  # columns of one step
    HINTS: tl.constexpr,  # tell the caches what to keep
):  # fmt: skip
    acc: tl.constexpr = mean_ptr.dtype.element_ty
    CHUNKS: tl.constexpr = (N + CHUNK - 1) // CHUNK
    KEEP: tl.constexpr = "evict_last" if HINTS else ""
    DROP: tl.constexpr = "evict_first" if HINTS else ""
    STREAM: tl.constexpr = ".cs" if HINTS else ""
    row = tl.program_id(0)
    start = tl.cast(row, tl.int64) * N
    mean, rstd = _welford(x_ptr + start, eps, N, CHUNK, KEEP, acc)
    tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)
    for i in tl.range(0, CHUNKS, num_stages=1):
        col = (CHUNKS - 1 - i) * CHUNK + tl.arange(0, CHUNK)  # backward
        mask = None if N % CHUNK == 0 else col < N
        x = tl.load(x_ptr + start + col, mask=mask, eviction_policy=DROP)
        y = (x.to(acc) - mean) * rstd
        if w_ptr is not None:
            y *= tl.load(w_ptr + col, mask=mask).to(acc)
        if b_ptr is not None:
            y += tl.load(b_ptr + col, mask=mask).to(acc)
        tl.store(y_ptr + start + col, y, mask=mask, cache_modifier=STREAM)


# %%
# Rows shared by programs
# -----------------------
#
# A row of 65536 columns is larger than the first-level cache, and a million
# columns are more than the second-level cache gives to one program.
# Then the second sweep reads memory again.
# The way out is not to read twice: as many programs as it takes hold the row
# together, each one a slice of it in registers.
# Mean and variance need the whole row, so the programs exchange them.
#
# An exchange takes longer than the work on a slice.
# So no program waits for it.
# It publishes the sums of tile ``t``, and then finishes tile ``t - 1``, whose
# sums have arrived in the meantime.
# The loads of tile ``t + 1`` are on their way by then: ``num_stages`` keeps
# asynchronous copies going, as on the second page.


def exchange():
    _, ax = plt.subplots(
        num="Each program publishes its sums of tile t, then finishes tile "
        "t - 1, while tile t + 1 is loaded",
        figsize=(7.5, 2.9),
    )
    ax.set(xlim=(-0.1, 10), ylim=(-0.1, 4.3))
    ax.axis("off")

    def bar(x, y, width, text, color):
        ax.add_patch(
            plt.Rectangle((x, y), width, 0.6, fc=color, ec="black", alpha=0.6)
        )
        ax.text(x + width / 2, y + 0.3, text, ha="center", va="center")

    for program, y in (0, 2.3), (1, 0.0):
        ax.text(0, y + 1.6, f"program {program}: its slice of each row")
        for t in range(3):
            x = 3.3 * t + 0.1 + 0.2 * program
            bar(x, y + 0.8, 2.9, f"load tile {t + 1}", f"C{(t + 1) % 4}")
            bar(x, y, 1.3, f"sums {t}", f"C{t % 4}")
            if t > 0:
                bar(x + 1.4, y, 1.5, f"finish {t - 1}", f"C{(t - 1) % 4}")
    ax.annotate("", (4.9, 0.65), (1.5, 2.3), arrowprops={"arrowstyle": "->"})
    plt.show()


exchange()

# %%
# Four small helpers do the exchange.
#
# Two float32 sums make one word of 64 bits, and a store of 64 bits is seen as
# a whole or not at all.
# Before the kernel starts, every word holds ``EMPTY``, a NaN that no
# arithmetic produces.
# So the word itself says whether it has arrived, and no lock or barrier is
# needed.
# ``_wait`` repeats its load until the word is there.
# That loop is the only machine code on this page, and it gives up after some
# time: if something is broken, the result is NaN, and the GPU does not hang.

EMPTY = 0x7FEDCBA9  # in both halves of a word


@triton.jit
def _publish(ptr, a, b, DIRECT: tl.constexpr):
    low = a.to(tl.uint32, bitcast=True).to(tl.int64)
    high = b.to(tl.uint32, bitcast=True).to(tl.int64)
    word = (high << 32) | low
    if DIRECT:
        tl.inline_asm_elementwise(
            "st.relaxed.gpu.global.b64 [$1], $2; mov.b32 $0, 0;",
            "=r,l,l",
            [ptr.to(tl.int64), word],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.store(ptr, word)


# %%


@triton.jit
def _wait(ptr, DIRECT: tl.constexpr):
    if DIRECT:
        low, high = tl.inline_asm_elementwise(
            """
            {
            .reg .pred p, q;
            .reg .b32 n;
            mov.b32 n, 0;
            AGAIN:
            ld.relaxed.gpu.global.v2.b32 {$0, $1}, [$2];
            setp.eq.b32 p, $0, 0x7FEDCBA9;
            setp.eq.or.b32 p, $1, 0x7FEDCBA9, p;
            add.u32 n, n, 1;
            setp.lt.and.u32 q, n, 100000, p;
            @q bra AGAIN;
            }
            """,
            "=r,=r,l",
            [ptr.to(tl.int64)],
            dtype=(tl.uint32, tl.uint32),
            is_pure=False,
            pack=1,
        )
    else:
        word = tl.load(ptr)
        low, high = word.to(tl.uint32), (word >> 32).to(tl.uint32)
    return low.to(tl.float32, bitcast=True), high.to(tl.float32, bitcast=True)


# %%
# A tile waits in registers for one turn of the loop.
# A loop hands a 16-bit number to its next turn in a register of its own, which
# wastes half of it.
# So two numbers are packed into a word of 32 bits.


@triton.jit
def _pack(tile):
    if tile.dtype.primitive_bitwidth == 16:
        bits = tile.to(tl.uint16, bitcast=True)
        pairs = tl.reshape(bits, [tile.shape[0], tile.shape[1] // 2, 2])
        low, high = tl.split(pairs)
        return low.to(tl.uint32) | (high.to(tl.uint32) << 16)
    else:
        return tile


@triton.jit
def _unpack(words, dtype: tl.constexpr):
    """The numbers of _pack, as float32."""
    if dtype.primitive_bitwidth == 16:
        if dtype == tl.bfloat16:
            # A bfloat16 is the upper half of a float32.
            low = (words << 16).to(tl.float32, bitcast=True)
            high = (words & 0xFFFF0000).to(tl.float32, bitcast=True)
        else:
            low = words.to(tl.uint16).to(dtype, bitcast=True).to(tl.float32)
            high = (words >> 16).to(tl.uint16).to(dtype, bitcast=True)
            high = high.to(tl.float32)
        pairs = tl.join(low, high)
        return tl.reshape(pairs, [words.shape[0], 2 * words.shape[1]])
    else:
        return words


# %%
# Every slice has ``CHUNK`` columns.
# If ``N`` is no multiple of that, the last slice is moved to the left until
# it ends with the row.
# It overlaps the slice before it, and in the overlap both write the same
# bits; only in sums the columns must count once.
# This way no slice needs a mask for its columns.


@triton.jit
def _slice(N: tl.constexpr, CHUNK: tl.constexpr, STEP: tl.constexpr):
    """Slice of this program, its first lane, the lanes from there to the
    first column, which lanes count in sums; group of programs that share
    rows, and the number of groups."""
    SLICES: tl.constexpr = (N + STEP + CHUNK - 2) // CHUNK
    # All starts are multiples of V, so that loads are aligned.
    V: tl.constexpr = 8 if N % 8 == 0 else STEP
    s = tl.program_id(0) % SLICES
    group = tl.program_id(0) // SLICES
    shift = group % STEP * N % STEP
    end = (N + shift + V - 1) // V  # of the last slice
    start = tl.minimum(s * (CHUNK // V), end - CHUNK // V) * V
    lane = start + tl.arange(0, CHUNK)[None, :]
    counts = (lane >= tl.maximum(s * CHUNK, shift)) & (lane < N + shift)
    return s, start, shift - start, counts, group, tl.num_programs(0) // SLICES


@triton.jit
def _columns(s, shift, N: tl.constexpr, CHUNK: tl.constexpr):
    """How many columns of a row count in slice s."""
    end = tl.minimum((s + 1) * CHUNK, N + shift)
    n = end - tl.maximum(s * CHUNK, shift)
    return tl.maximum(n, 0).to(tl.float32)


@triton.jit
def _words(ptr, tile, N: tl.constexpr, ROWS: tl.constexpr,
           CHUNK: tl.constexpr, STEP: tl.constexpr,
           PADDED: tl.constexpr):  # fmt: skip
    """Where the words of the rows of a tile are, and which slices exist."""
    SLICES: tl.constexpr = (N + STEP + CHUNK - 2) // CHUNK
    rows = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    s = tl.arange(0, PADDED)[None, :]
    return ptr + rows * SLICES + tl.minimum(s, SLICES - 1), s < SLICES


# %%
# The kernel has two parts.
# ``_publish_fwd`` tells the others what this program knows about its slice of
# the rows of a tile.


@triton.jit
def _publish_fwd(
    x,
    counts,  # lanes that count in sums
    n,  # how many they are, at least 1
    words_ptr, tile, s,  # the word of slice s of each row of the tile
    N: tl.constexpr, CHUNK: tl.constexpr, STEP: tl.constexpr,
    DIRECT: tl.constexpr,
):  # fmt: skip
    d = x.to(tl.float32)
    if N % CHUNK != 0:
        d = tl.where(counts, d, 0)
    mean = tl.sum(d, 1)[:, None] / n
    d -= mean
    if N % CHUNK != 0:
        d = tl.where(counts, d, 0)
    at, _ = _words(words_ptr, tile, N, x.shape[0], CHUNK, STEP, 1)
    _publish(at + s, mean, tl.sum(d * d, 1)[:, None], DIRECT)


# %%
# ``_finish_fwd`` merges what all slices say about the rows of a tile, and
# writes this program's slice of ``y``.


@triton.jit
def _finish_fwd(
    x,  # (ROWS, CHUNK), float32
    w, b, y_ptr, start, shift,  # as from _slice
    mean_ptr, rstd_ptr, words_ptr, tile, s, M,
    eps: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr,
    STEP: tl.constexpr, PADDED: tl.constexpr, EVEN: tl.constexpr,
    DIRECT: tl.constexpr,
):  # fmt: skip
    ROWS: tl.constexpr = x.shape[0]
    at, _ = _words(words_ptr, tile, N, ROWS, CHUNK, STEP, PADDED)
    means, m2s = _wait(at, DIRECT)
    n = _columns(tl.arange(0, PADDED)[None, :], start + shift, N, CHUNK)
    mean = tl.sum(tl.where(n > 0, means * n, 0), 1) / N
    d = means - mean[:, None]
    m2 = tl.sum(tl.where(n > 0, m2s + n * d * d, 0), 1)
    rstd = tl.rsqrt(m2 / N + eps)
    first, at = _first(tile, N, ROWS, STEP)
    rows = first + tl.arange(0, ROWS) * STEP
    once = rows < tl.where(s == 0, M, 0)  # one slice stores them for all
    tl.store(mean_ptr + rows, mean, mask=once)
    tl.store(rstd_ptr + rows, rstd, mask=once)
    y = (x - mean[:, None]) * rstd[:, None]
    y = y * w.to(tl.float32) + b.to(tl.float32)
    y = y.to(y_ptr.dtype.element_ty)
    row = tl.arange(0, ROWS)[:, None] * STEP
    _store(
        y_ptr + at + start, y, row, 0, M - first, shift, N, CHUNK, STEP,
        EVEN, True,
    )  # fmt: skip


# %%
# The loop loads a tile, publishes its mean and ``m2``, and finishes the tile
# before.
# In the first turn there is none before it: zeros are finished in its place,
# into the rows of the same tile, where the next turn writes the right values.
# Without a branch the compiler can mix the instructions of both halves.


@triton.jit
def _layer_norm_fwd_slices(
    x_ptr, w_ptr, b_ptr, y_ptr, mean_ptr, rstd_ptr,
    words_ptr,  # (rows of all tiles, number of slices), EMPTY
    M, eps: tl.constexpr, N: tl.constexpr,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, STEP: tl.constexpr,
    PADDED: tl.constexpr,  # power of two, at least the number of slices
    EVEN: tl.constexpr, DIRECT: tl.constexpr,  # machine code of NVIDIA
):  # fmt: skip
    kind: tl.constexpr = x_ptr.dtype.element_ty
    s, start, shift, counts, group, groups = _slice(N, CHUNK, STEP)
    w = _load_vector(w_ptr, 0, 0, shift, N, CHUNK, STEP, "")
    b = _load_vector(b_ptr, 0, 0, shift, N, CHUNK, STEP, "")
    n = tl.maximum(_columns(s, start + shift, N, CHUNK), 1)
    row = tl.arange(0, ROWS)[:, None] * STEP
    before = _pack(tl.zeros([ROWS, CHUNK], kind))
    tiles = tl.cdiv(M, ROWS * STEP) * STEP
    for tile in tl.range(group, tiles, groups, num_stages=3):
        first, at = _first(tile, N, ROWS, STEP)
        x = _load(
            x_ptr + at + start, row, 0, M - first, shift, N, CHUNK, STEP,
            EVEN, "",
        )  # fmt: skip
        _publish_fwd(x, counts, n, words_ptr, tile, s, N, CHUNK, STEP, DIRECT)
        last = tl.where(tile > group, tile - groups, tile)
        _finish_fwd(
            _unpack(before, kind), w, b, y_ptr, start, shift, mean_ptr,
            rstd_ptr, words_ptr, last, s, M, eps, N, CHUNK, STEP, PADDED,
            EVEN, DIRECT,
        )  # fmt: skip
        before = _pack(x)
    last = group + (tiles - 1 - group) // groups * groups
    _finish_fwd(
        _unpack(before, kind), w, b, y_ptr, start, shift, mean_ptr, rstd_ptr,
        words_ptr, last, s, M, eps, N, CHUNK, STEP, PADDED, EVEN, DIRECT,
    )  # fmt: skip


# %%
# Backward, rows in registers
# ---------------------------
#
# The first page derives
#
# .. math::
#
#    dx = (w \cdot dy - \hat{x} \, c_1 - c_2) \; r, \qquad
#    dw = \sum_i dy_i \cdot \hat{x}_i, \qquad db = \sum_i dy_i
#
# with :math:`c_1` and :math:`c_2` the means over a row of
# :math:`\hat{x} \, w \, dy` and :math:`w \, dy`.
# Since :math:`\hat{x} = (x - \mu) \, r`, the factors :math:`r` can leave the
# sums: they are then applied once for a row, not once for an element.


@triton.jit
def _terms(x, dy, w, mean, acc: tl.constexpr):
    """What a tile adds to the two sums of each row."""
    wdy = w.to(acc) * dy.to(acc)
    return wdy * (x.to(acc) - mean), wdy


@triton.jit
def _gradients(x, dy, w, mean, rstd, sum1, sum2, N: tl.constexpr):
    """dx of a tile, and its terms of dw and db."""
    acc: tl.constexpr = mean.dtype
    a = sum1 * (rstd * rstd * rstd / N)
    b = sum2 * (rstd / N)
    d = x.to(acc) - mean
    dy = dy.to(acc)
    scaled = dy * rstd
    return scaled * w.to(acc) - (d * a + b), scaled * d, dy


@triton.jit
def _add_pairs(a1, a2, b1, b2):
    return a1 + b1, a2 + b2


@triton.jit
def _store_sums(ptr, i, dw, db, c, shift, N: tl.constexpr,
                CHUNK: tl.constexpr, STEP: tl.constexpr,
                PDL: tl.constexpr):  # fmt: skip
    """Row i of the partial sums: chunk c."""
    if PDL:  # the last kernel may start, and will wait for the rest
        tl.extra.cuda.gdc_launch_dependents()
    if ptr is not None:
        lane, inside, _ = _lanes(c, shift, N, CHUNK, STEP)
        at = ptr + tl.cast(i, tl.int64) * 2 * N + (lane - shift)
        tl.store(at, tl.sum(dw, 0, keep_dims=True), mask=inside)
        tl.store(at + N, tl.sum(db, 0, keep_dims=True), mask=inside)


# %%


@triton.jit
def _read_tile(x_ptr, dy_ptr, ws, mean, row, left, shift, N: tl.constexpr,
               CHUNK: tl.constexpr, STEP: tl.constexpr,
               EVEN: tl.constexpr):  # fmt: skip
    """The chunks of a tile of x and dy, and the two sums of each row."""
    acc: tl.constexpr = mean.dtype
    xs, dys = (), ()
    sum1 = tl.zeros([row.shape[0], CHUNK], acc)
    sum2 = tl.zeros([row.shape[0], CHUNK], acc)
    for c in tl.static_range(len(ws)):
        x = _load(x_ptr, row, c, left, shift, N, CHUNK, STEP, EVEN, "")
        dy = _load(dy_ptr, row, c, left, shift, N, CHUNK, STEP, EVEN, "")
        xs += (x,)
        dys += (dy,)
        one, two = _terms(x, dy, ws[c], mean, acc)
        sum1 += _only_inside(one, c, shift, N, CHUNK, STEP)
        sum2 += _only_inside(two, c, shift, N, CHUNK, STEP)
    sum1, sum2 = tl.reduce((sum1, sum2), 1, _add_pairs)
    return xs, dys, sum1[:, None], sum2[:, None]


# %%


@triton.jit
def _write_tile(dx_ptr, at, xs, dys, ws, dws, dbs, mean, rstd, sum1, sum2,
                row, left, shift, N: tl.constexpr, CHUNK: tl.constexpr,
                STEP: tl.constexpr, EVEN: tl.constexpr):  # fmt: skip
    """Store dx of a tile, and return the new sums for dw and db."""
    new_dws, new_dbs = (), ()
    for c in tl.static_range(len(ws)):
        dx, dw, db = _gradients(
            xs[c], dys[c], ws[c], mean, rstd, sum1, sum2, N
        )
        if dx_ptr is not None:
            _store(dx_ptr + at, dx, row, c, left, shift, N, CHUNK, STEP, EVEN)
        new_dws += (dws[c] + dw,)
        new_dbs += (dbs[c] + db,)
    return new_dws, new_dbs


@triton.jit
def _load_scalars(ptr, row, left, EVEN: tl.constexpr):
    """One number for each row of a tile."""
    if EVEN:
        return tl.load(ptr + row)
    else:
        return tl.load(ptr + row, mask=row < left, other=0)


# %%
# The kernel is the last rung of the second page.
# A program takes tile after tile, and adds its terms of ``dw`` and ``db`` in
# registers, always in the same order.
# It reads and writes each matrix once, and at the end it stores one row of
# partial sums.
# A last kernel adds up these few rows.
#
# ``disable_licm`` keeps the compiler from converting ``w`` to float32 ahead of
# the loop, where the copy would fill registers all the time.
# ``w`` is loaded once for each row of a tile, which gives it the layout of
# ``x``.
# ``STAGES`` is the number of tiles in flight, ``PDL`` lets the last kernel
# start early.


@triton.jit
def _layer_norm_bwd_rows(
    dy_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr,
    dx_ptr, partial_ptr,  # (M, N) and (programs, 2, N); None: not wanted
    M, N: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
    STEP: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    acc: tl.constexpr = mean_ptr.dtype.element_ty
    CHUNKS: tl.constexpr = (N + STEP + CHUNK - 2) // CHUNK
    i = tl.program_id(0)
    shift = i % STEP * N % STEP if STEP > 1 else 0
    row = tl.arange(0, ROWS)[:, None] * STEP
    ws, dws, dbs = (), (), ()
    for c in tl.static_range(CHUNKS):
        ws += (_load_vector(w_ptr, row, c, shift, N, CHUNK, STEP, ""),)
        dws += (tl.zeros([ROWS, CHUNK], acc),)
        dbs += (tl.zeros([ROWS, CHUNK], acc),)
    for tile in tl.range(
        i, tl.cdiv(M, ROWS * STEP) * STEP, tl.num_programs(0),
        num_stages=STAGES, disable_licm=True,
    ):  # fmt: skip
        first, at = _first(tile, N, ROWS, STEP)
        left = M - first
        mean = _load_scalars(mean_ptr + first, row, left, EVEN)
        rstd = _load_scalars(rstd_ptr + first, row, left, EVEN)
        xs, dys, sum1, sum2 = _read_tile(
            x_ptr + at, dy_ptr + at, ws, mean, row, left, shift,
            N, CHUNK, STEP, EVEN,
        )  # fmt: skip
        dws, dbs = _write_tile(
            dx_ptr, at, xs, dys, ws, dws, dbs, mean, rstd, sum1, sum2, row,
            left, shift, N, CHUNK, STEP, EVEN,
        )  # fmt: skip
    for c in tl.static_range(CHUNKS):
        _store_sums(
            partial_ptr, i, dws[c], dbs[c], c, shift, N, CHUNK, STEP, PDL
        )


# %%
# Backward, wide rows
# -------------------
#
# Beyond some 10000 columns the sums of ``dw`` and ``db``, ``w``, and a row of
# ``x`` and ``dy`` no longer fit into the registers of one multiprocessor, and
# the compiler spills: it keeps registers in memory.
# Slices help here too, because a program then holds the sums of its own
# columns only.
# ``_finish_bwd`` turns the two sums of a row into gradients, for a tile of
# one slice.


@triton.jit
def _finish_bwd(
    x, dy, w, mean, rstd, sum1, sum2,
    dw, db,  # (1, CHUNK), sums so far
    dx_ptr, at,  # offset of the first lane
    left, shift,
    N: tl.constexpr, CHUNK: tl.constexpr, STEP: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, x.shape[0])[:, None] * STEP
    dx, more_dw, more_db = _gradients(x, dy, w, mean, rstd, sum1, sum2, N)
    if dx_ptr is not None:
        dx = dx.to(dx_ptr.dtype.element_ty)
        _store(
            dx_ptr + at, dx, row, 0, left, shift, N, CHUNK, STEP, EVEN, True
        )
    dw += tl.sum(more_dw, 0, keep_dims=True)
    db += tl.sum(more_db, 0, keep_dims=True)
    return dw, db


# %%
# The two sums of each row come from all slices.
# On every device they can be computed by a kernel of their own, before.
# ``x`` and ``dy`` are then read twice: five matrices are moved, not three.


@triton.jit
def _layer_norm_bwd_sums(
    dy_ptr, x_ptr, w_ptr, mean_ptr,
    sums_ptr,  # (2, M)
    M, N: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    acc: tl.constexpr = mean_ptr.dtype.element_ty
    row = tl.cast(tl.program_id(0), tl.int64)
    mean = tl.load(mean_ptr + row)
    sum1 = tl.zeros([CHUNK], acc)
    sum2 = tl.zeros([CHUNK], acc)
    for start in range(0, N, CHUNK):
        col = start + tl.arange(0, CHUNK)
        x = tl.load(x_ptr + row * N + col, mask=col < N, other=0)
        dy = tl.load(dy_ptr + row * N + col, mask=col < N, other=0)
        w = tl.load(w_ptr + col, mask=col < N, other=0)
        one, two = _terms(x, dy, w, mean, acc)
        sum1 += one
        sum2 += two
    sum1, sum2 = tl.reduce((sum1, sum2), 0, _add_pairs)
    tl.store(sums_ptr + row, sum1)
    tl.store(sums_ptr + M + row, sum2)


# %%
# The second kernel knows the sums.


@triton.jit
def _layer_norm_bwd_slices(
    dy_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, dx_ptr,
    sums_ptr,  # (2, M)
    partial_ptr,  # (groups, 2, N), or None
    M, N: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
    STEP: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    acc: tl.constexpr = mean_ptr.dtype.element_ty
    _, start, shift, _, group, groups = _slice(N, CHUNK, STEP)
    w = _load_vector(w_ptr, 0, 0, shift, N, CHUNK, STEP, "")
    row = tl.arange(0, ROWS)[:, None] * STEP
    dw = tl.zeros([1, CHUNK], acc)
    db = tl.zeros([1, CHUNK], acc)
    tiles = tl.cdiv(M, ROWS * STEP) * STEP
    for tile in tl.range(group, tiles, groups, num_stages=3):
        first, at = _first(tile, N, ROWS, STEP)
        left = M - first
        mean = _load_scalars(mean_ptr + first, row, left, EVEN)
        rstd = _load_scalars(rstd_ptr + first, row, left, EVEN)
        sum1 = _load_scalars(sums_ptr + first, row, left, EVEN)
        sum2 = _load_scalars(sums_ptr + M + first, row, left, EVEN)
        at += start
        x = _load(x_ptr + at, row, 0, left, shift, N, CHUNK, STEP, EVEN, "")
        dy = _load(dy_ptr + at, row, 0, left, shift, N, CHUNK, STEP, EVEN, "")
        dw, db = _finish_bwd(
            x, dy, w, mean, rstd, sum1, sum2, dw, db, dx_ptr, at, left, shift,
            N, CHUNK, STEP, EVEN,
        )  # fmt: skip
    _store_sums(partial_ptr, group, dw, db, 0, shift, N, CHUNK, STEP, PDL)


# %%
# The other way is the exchange of the forward pass, with the same delay of
# one tile: publish the sums of this tile, finish the tile before.
# Nothing is read twice.
# Columns that two slices hold must count once in the sums of a row, so one of
# the two has ``w = 0`` there.


@triton.jit
def _publish_bwd(
    x, dy,
    w_once,  # 0 in columns that another slice counts, if rows are aligned
    mean, counts, words_ptr, tile, s,
    N: tl.constexpr, CHUNK: tl.constexpr, STEP: tl.constexpr,
    DIRECT: tl.constexpr,
):  # fmt: skip
    one, two = _terms(x, dy, w_once, mean, tl.float32)
    if STEP > 1:  # 0 * w will not do: other rows may hold NaN
        one, two = tl.where(counts, one, 0), tl.where(counts, two, 0)
    one, two = tl.reduce((one, two), 1, _add_pairs)
    at, _ = _words(words_ptr, tile, N, x.shape[0], CHUNK, STEP, 1)
    _publish(at + s, one[:, None], two[:, None], DIRECT)


# %%


@triton.jit
def _shared_sums(
    words_ptr, tile,
    N: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
    STEP: tl.constexpr, PADDED: tl.constexpr, DIRECT: tl.constexpr,
):  # fmt: skip
    """The two sums of each row of a tile, from the words of all slices."""
    at, exists = _words(words_ptr, tile, N, ROWS, CHUNK, STEP, PADDED)
    sum1, sum2 = _wait(at, DIRECT)
    sum1 = tl.where(exists, sum1, 0)
    sum2 = tl.where(exists, sum2, 0)
    sum1, sum2 = tl.reduce((sum1, sum2), 1, _add_pairs)
    return sum1[:, None], sum2[:, None]


@triton.jit
def _finish_shared(
    x, dy,  # packed
    w, mean_ptr, rstd_ptr, dw, db, dx_ptr, words_ptr, start, shift, tile, M,
    kind: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr,
    STEP: tl.constexpr, PADDED: tl.constexpr, EVEN: tl.constexpr,
    DIRECT: tl.constexpr,
):  # fmt: skip
    ROWS: tl.constexpr = x.shape[0]
    row = tl.arange(0, ROWS)[:, None] * STEP
    first, at = _first(tile, N, ROWS, STEP)
    left = M - first
    mean = _load_scalars(mean_ptr + first, row, left, EVEN)
    rstd = _load_scalars(rstd_ptr + first, row, left, EVEN)
    sum1, sum2 = _shared_sums(
        words_ptr, tile, N, ROWS, CHUNK, STEP, PADDED, DIRECT
    )
    return _finish_bwd(
        _unpack(x, kind), _unpack(dy, kind), w, mean, rstd, sum1, sum2, dw,
        db, dx_ptr, at + start, left, shift, N, CHUNK, STEP, EVEN,
    )  # fmt: skip


# %%
# A tile of ``x`` and ``dy`` is carried from one turn of the loop to the next.


@triton.jit
def _layer_norm_bwd_shared(
    dy_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, dx_ptr,
    words_ptr, partial_ptr, M, N: tl.constexpr, ROWS: tl.constexpr,
    CHUNK: tl.constexpr, STEP: tl.constexpr, PADDED: tl.constexpr,
    EVEN: tl.constexpr, PDL: tl.constexpr, DIRECT: tl.constexpr,
):  # fmt: skip
    kind: tl.constexpr = x_ptr.dtype.element_ty
    s, start, shift, counts, group, groups = _slice(N, CHUNK, STEP)
    w = _load_vector(w_ptr, 0, 0, shift, N, CHUNK, STEP, "")
    w_once = tl.where(counts, w, 0) if STEP == 1 else w
    row = tl.arange(0, ROWS)[:, None] * STEP
    dw, db = tl.zeros([1, CHUNK], tl.float32), tl.zeros([1, CHUNK], tl.float32)
    x1 = _pack(tl.zeros([ROWS, CHUNK], kind))
    dy1 = _pack(tl.zeros([ROWS, CHUNK], kind))
    tiles = tl.cdiv(M, ROWS * STEP) * STEP
    for tile in tl.range(
        group, tiles, groups, num_stages=3, disable_licm=True
    ):  # fmt: skip
        first, at = _first(tile, N, ROWS, STEP)
        left = M - first
        mean = _load_scalars(mean_ptr + first, row, left, EVEN)
        at += start
        x = _load(x_ptr + at, row, 0, left, shift, N, CHUNK, STEP, EVEN, "")
        dy = _load(dy_ptr + at, row, 0, left, shift, N, CHUNK, STEP, EVEN, "")
        _publish_bwd(
            x, dy, w_once, mean, counts, words_ptr, tile, s, N, CHUNK, STEP,
            DIRECT,
        )  # fmt: skip
        dw, db = _finish_shared(
            x1, dy1, w, mean_ptr, rstd_ptr, dw, db, dx_ptr, words_ptr, start,
            shift, tl.where(tile > group, tile - groups, tile), M,
            kind, N, CHUNK, STEP, PADDED, EVEN, DIRECT,
        )  # fmt: skip
        x1, dy1 = _pack(x), _pack(dy)
    dw, db = _finish_shared(
        x1, dy1, w, mean_ptr, rstd_ptr, dw, db, dx_ptr, words_ptr, start,
        shift, group + (tiles - 1 - group) // groups * groups, M,
        kind, N, CHUNK, STEP, PADDED, EVEN, DIRECT,
    )  # fmt: skip
    _store_sums(partial_ptr, group, dw, db, 0, shift, N, CHUNK, STEP, PDL)


# %%
# Every backward pass ends with the same kernel.
# It adds up the rows of partial sums, a few columns in each program, and
# rounds once.
# From the Hopper GPUs on it is launched early (programmatic dependent launch):
# ``gdc_wait`` holds it until the sums have been written.


@triton.jit
def _sum_rows(
    partial_ptr,  # (P, 2, N)
    dw_ptr, db_ptr,  # (N,), or None: not wanted
    P, N: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,  # of a step
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)[None, :]
    dw = tl.zeros([ROWS, COLS], partial_ptr.dtype.element_ty)
    db = tl.zeros([ROWS, COLS], partial_ptr.dtype.element_ty)
    for start in range(0, P, ROWS):
        row = start + tl.arange(0, ROWS)[:, None]
        mask = (row < P) & (col < N)
        at = partial_ptr + tl.cast(row, tl.int64) * (2 * N) + col
        dw += tl.load(at, mask=mask, other=0)
        db += tl.load(at + N, mask=mask, other=0)
    dw = tl.sum(dw, 0, keep_dims=True)
    db = tl.sum(db, 0, keep_dims=True)
    if dw_ptr is not None:
        tl.store(dw_ptr + col, dw, mask=col < N)
    if db_ptr is not None:
        tl.store(db_ptr + col, db, mask=col < N)


# %%
# Which plan for which width
# --------------------------
#
# ``n`` is the width in units of 16 bits, so wider types move the limits.
# The limits come from the registers, and from measurements on an H200 which
# the benchmarks below repeat.
#
# Forward:
#
# * a chunk has 8 columns for each thread, which are 16 bytes in float16, the
#   widest load; few warps for few columns leave room for many rows at once;
# * rows that are not aligned keep ``w`` and ``b`` in registers as well, which
#   leaves room for fewer columns; with chunks of 4 columns for each thread
#   fewer lanes are idle, and the program needs fewer registers;
# * beyond 24576 the row does not fit: two sweeps;
# * beyond 49152 the second sweep misses the cache: shared rows.

# Multiprocessors; in the interpreter any number will do.
NUM_SMS = (
    torch.cuda.get_device_properties(0).multi_processor_count if ON_GPU else 4
)

# Rows that are not aligned: up to n, columns of a chunk, warps, programs a
# multiprocessor, stages.
SHIFTED = (
    (512, 512, 2, 8, 4), (1280, 256, 1, 8, 4), (2304, 256, 2, 6, 4),
    (3064, 512, 4, 4, 4), (4096, 512, 4, 3, 4), (6144, 512, 4, 2, 4),
    (8184, 512, 4, 2, 3), (12800, 2048, 8, 1, 4), (16376, 2048, 8, 1, 3),
)  # fmt: skip

# %%


def plan_forward(N, itemsize, share, step=1):
    """Name of the kernel and its options, for rows of N elements."""
    n = N * itemsize // 2
    for limit, chunk, warps, per_sm, stages in SHIFTED if step > 1 else ():
        if n <= limit:
            chunk = min(
                2 * chunk // itemsize, triton.next_power_of_2(N + step)
            )
            return "shifted", {
                "ROWS": max(512 // chunk, 1) if n <= 512 else 1,
                "CHUNK": chunk, "num_warps": warps, "STAGES": stages,
                "per_sm": per_sm,
            }  # fmt: skip
    if n <= 24576 and step == 1:
        warps = 2 if n <= 1024 else 4 if n <= 5120 else 8
        warps = 16 if 14336 < n <= 20480 else warps
        chunk = min(256 * warps, triton.next_power_of_2(N))
        rows = max(min(1024 // chunk, 64), 1) if n <= 1024 else 1
        hint = "evict_first" if n <= 3072 else ""
        return "rows", {
            "ROWS": rows, "CHUNK": chunk, "HINT": hint, "num_warps": warps
        }  # fmt: skip
    rows, chunk, warps, per_sm = 2, 8192 // itemsize, 8, 2
    if step > 1:
        rows, chunk, warps, per_sm = 4, 2048 // itemsize, 4, 4
    elif 65536 < n <= 131072:
        chunk, per_sm = 16384 // itemsize, 1
    slices = triton.cdiv(N + step - 1, chunk)
    least = 49152 if step == 1 else 16376
    if n > least and share and NUM_SMS * per_sm >= step * slices:
        return "slices", {
            "ROWS": rows, "CHUNK": chunk, "num_warps": warps,
            "per_sm": per_sm,
        }  # fmt: skip
    warps = 16 if n <= 49152 else 32
    return "sweeps", {"CHUNK": 16384 // itemsize, "num_warps": warps}


# %%
# Backward:
#
# * up to 10240 whole rows, or 8184 if they are not aligned; a multiprocessor
#   holds 8 warps with 255 registers a thread, in one program or in two;
#   rows that are not aligned have narrow chunks here as well;
# * beyond, rows shared by slices, in which more columns mean fewer partners;
# * where programs cannot wait for each other, or a row has more slices than
#   the device runs at the same time, the two kernels that read twice.


def plan_backward(N, itemsize, share, step=1):
    """Name of the kernel and its options, for rows of N elements."""
    n = N * itemsize // 2
    if n <= (10240 if step == 1 else 8184):
        rows, warps = 1, 4 if n <= (4096 if step == 1 else 4601) else 8
        chunk = 512 * warps // itemsize
        if n <= 1024:
            chunk = triton.next_power_of_2(N + step - 1)
            room = 8192 if step == 1 else 4096
            rows = max(min(room // itemsize // chunk, 8), 1)
        elif n <= (1536 if step == 1 else 1152):
            rows = 2
        elif step > 1 and warps == 4:
            chunk //= 2
        per_sm = 8 // warps if n > 1024 or step > 1 else 1
        memory = 98304 if step == 1 else 98304 // 4 * (4 - per_sm)
        width = triton.cdiv(N + step - 1, chunk) * chunk
        return "rows", {
            "ROWS": rows, "CHUNK": chunk, "num_warps": warps,
            "STAGES": 1 + min(memory // (2 * rows * width * itemsize), 3),
            "per_sm": per_sm,
        }  # fmt: skip
    for limit, rows, chunk, warps, per_sm in (
        (65536, 4, 1024, 4, 3),
        (262144, 2, 2048, 4, 2),
        (524288, 2, 4096, 8, 1),
    ):
        chunk = 2 * chunk // itemsize
        slices = triton.cdiv(N + step - 1, chunk)
        if n <= limit and share and NUM_SMS * per_sm >= step * slices:
            return "shared", {
                "ROWS": rows, "CHUNK": chunk, "num_warps": warps,
                "per_sm": per_sm,
            }  # fmt: skip
    chunk = 4096 // itemsize
    return "slices", {"ROWS": 2, "CHUNK": chunk, "num_warps": 8, "per_sm": 2}


# %%
# Programs that wait for each other must all be running.
# A cooperative launch makes sure: it fails if they do not fit.
# ``maxnreg`` limits the registers of a thread so that ``per_sm`` programs fit
# on a multiprocessor.
# Without it the compiler may take a few registers more, and a program less
# fits: the others then wait for a second round.
# ``torch.compile`` knows neither option; a later section takes care of it.
# The interpreter runs one program after the other.
# There a kernel runs twice: what the first run published, the second one
# finds.

CUDA = ON_GPU and torch.version.hip is None
PDL = CUDA and torch.cuda.get_device_capability() >= (9, 0)


def can_share(dtype):
    """Whether programs may wait for each other here."""
    wide = dtype == torch.float64
    return CUDA and not wide


def fitting(num_warps, per_sm):
    """So many registers a thread that per_sm programs fit."""
    registers = 65536 // (32 * num_warps * per_sm) // 8 * 8
    return {"maxnreg": min(registers, 255)} if CUDA else {}


def together(kernel, programs, *arguments, per_sm, num_warps, **options):
    """Launch programs that exchange words."""
    options |= fitting(num_warps, per_sm)
    if CUDA:
        options["launch_cooperative_grid"] = True
    for _ in range(1 if ON_GPU else 2):
        kernel[(programs,)](
            *arguments, DIRECT=CUDA, num_warps=num_warps, **options
        )


def empty_words(rows, slices, device):
    """A word for each row of each tile and each slice, all EMPTY."""
    word = EMPTY << 32 | EMPTY
    return torch.full((rows, slices), word, dtype=torch.int64, device=device)


# %%
# Two functions follow a plan.
# They first cut the matrix into tiles, slices and groups of programs.


def lane_step(N, *matrices):
    """1 if all rows begin at a multiple of 16 bytes; else how many rows lie
    from one such row to the next.  Also 1 if no row begins there."""
    step = 16 // matrices[0].itemsize
    placed = all(t.data_ptr() % 16 == 0 for t in matrices)
    return step if N % step and placed else 1


def cut(M, N, options, step, slices=False):
    """Programs, slices of a row, and what kernels want to know about them."""
    options = {"STEP": step} | options
    step, per_sm = options["STEP"], options.pop("per_sm")
    slices = triton.cdiv(N + step - 1, options["CHUNK"]) if slices else 1
    block = options["ROWS"] * step
    tiles = triton.cdiv(M, block) * step
    groups = NUM_SMS * per_sm // slices // step * step
    groups = min(max(groups, step), tiles)
    options |= {"EVEN": M % block == 0}
    return groups, slices, tiles * options["ROWS"], per_sm, options


# %%


def forward(x, w, b, eps, plan=None):
    """y, mean and rstd for a contiguous (M, N) x."""
    M, N = x.shape
    acc = torch.promote_types(x.dtype, torch.float32)
    y = torch.empty_like(x)
    mean = torch.empty(M, dtype=acc, device=x.device)
    rstd = torch.empty_like(mean)
    if M == 0:
        return y, mean, rstd
    step = lane_step(N, x)
    share = can_share(x.dtype)
    kind, options = plan or plan_forward(N, x.itemsize, share, step)
    given = x, w, b, y, mean, rstd
    if kind == "sweeps":
        _layer_norm_fwd_sweeps[(M,)](
            *given, eps, N, **{"HINTS": True} | options
        )
        return y, mean, rstd
    if kind == "rows":
        rows = options["ROWS"]
        _layer_norm_fwd_rows[(triton.cdiv(M, rows),)](
            *given, M, eps, N, EVEN=M % rows == 0, **options
        )
        return y, mean, rstd
    w = x.new_ones(N) if w is None else w
    b = x.new_zeros(N) if b is None else b
    given = x, w, b, y, mean, rstd
    groups, slices, rows, per_sm, options = cut(
        M, N, options, step, kind == "slices"
    )
    if kind == "shifted":
        options |= fitting(options["num_warps"], per_sm)
        _layer_norm_fwd_shifted[(groups,)](*given, M, eps, N, **options)
    else:
        words = empty_words(rows, slices, x.device)
        together(
            _layer_norm_fwd_slices, groups * slices, *given, words, M, eps, N,
            PADDED=triton.next_power_of_2(slices), per_sm=per_sm, **options,
        )  # fmt: skip
    return y, mean, rstd


# %%
# ``partial`` holds one row of sums for each program, or for each group of
# programs that share rows.


def backward(dy, x, w, mean, rstd, dx, dw, db, plan=None):
    """Fill dx, dw and db; each may be None."""
    M, N = x.shape
    if M == 0:  # the sum of no rows
        return [t.zero_() for t in (dw, db) if t is not None]
    w = x.new_ones(N) if w is None else w
    step = lane_step(N, x, dy)
    kind, options = plan or plan_backward(
        N, x.itemsize, can_share(x.dtype), step
    )
    groups, slices, rows, per_sm, options = cut(
        M, N, options, step, kind != "rows"
    )
    new = {"dtype": mean.dtype, "device": x.device}
    partial = None
    if dw is not None or db is not None:
        partial = torch.empty(groups, 2, N, **new)
    options |= {"PDL": PDL and partial is not None}
    given = dy, x, w, mean, rstd, dx
    grid = (groups * slices,)
    if kind == "rows":
        _layer_norm_bwd_rows[grid](*given, partial, M, N, **options)
    elif kind == "slices":
        sums = torch.empty(2, M, **new)
        _layer_norm_bwd_sums[(M,)](
            dy, x, w, mean, sums, M, N, CHUNK=4096, num_warps=8
        )
        _layer_norm_bwd_slices[grid](*given, sums, partial, M, N, **options)
    else:
        words = empty_words(rows, slices, x.device)
        together(
            _layer_norm_bwd_shared, *grid, *given, words, partial, M, N,
            PADDED=triton.next_power_of_2(slices), per_sm=per_sm, **options,
        )  # fmt: skip
    if partial is not None:
        sum_rows(partial, dw, db)


# %%


def sum_rows(partial, dw, db):
    """Launch the last kernel, early where the GPU can."""
    P, _, N = partial.shape
    early = {"launch_pdl": True} if PDL else {}
    _sum_rows[(triton.cdiv(N, 16),)](
        partial, dw, db, P, N,
        ROWS=min(triton.next_power_of_2(P), 256), COLS=16, PDL=PDL, **early,
    )  # fmt: skip


# %%
# A function to train with
# ------------------------
#
# The wrapper is that of the first page; only the limit on the width is gone.


class LayerNorm(torch.autograd.Function):
    """The kernels, for contiguous copies of any tensors."""

    @staticmethod
    def forward(ctx, x, weight, bias, shape, eps):
        N = shape.numel()
        rows = x.reshape(-1, N).contiguous()
        w = None if weight is None else weight.reshape(N).contiguous()
        b = None if bias is None else bias.reshape(N).contiguous()
        y, mean, rstd = forward(rows, w, b, eps)
        ctx.save_for_backward(rows, w, b, mean, rstd)
        ctx.shape = shape
        return y.reshape(x.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        x, w, b, mean, rstd = ctx.saved_tensors
        dx, dw, db = (
            torch.empty_like(tensor) if wanted else None
            for tensor, wanted in zip(
                (x, w, b), ctx.needs_input_grad[:3], strict=True
            )
        )
        rows = dy.reshape(x.shape).contiguous()
        backward(rows, x, w, mean, rstd, dx, dw, db)
        dx = None if dx is None else dx.reshape(dy.shape)
        dw = None if dw is None else dw.reshape(ctx.shape)
        db = None if db is None else db.reshape(ctx.shape)
        return dx, dw, db, None, None


def layer_norm(x, normalized_shape, weight, bias, eps=1e-5):
    """Normalize x over its last dimensions; weight and bias may be None."""
    shape = _check(x, normalized_shape, weight, bias, eps)
    if torch.compiler.is_compiling():  # see "What the user waits for"
        weight = x.new_ones(shape) if weight is None else weight
        bias = x.new_zeros(shape) if bias is None else bias
        return registered(x, weight, bias, eps)[0]
    return LayerNorm.apply(x, weight, bias, shape, eps)


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
    return shape


# %%
# A check of every plan
# ---------------------
#
# The rule would use two of the kernels for a small matrix.
# So each plan is forced here, with chunks so small that a row has several of
# them, one of them not full.
# The error against float64 may be half a unit of the result, as the first
# page argues; here it is asked of all four results at once.

FORCED = {"num_warps": 4, "per_sm": 4}
PLANS = (
    [
        ("rows", {"ROWS": 2, "CHUNK": 64, "HINT": "", "num_warps": 4}),
        ("sweeps", {"CHUNK": 64, "num_warps": 4}),
        ("slices", {"ROWS": 2, "CHUNK": 64} | FORCED),
        ("shifted", {"ROWS": 2, "CHUNK": 64, "STAGES": 2} | FORCED),
    ],
    [
        ("rows", {"ROWS": 2, "CHUNK": 64, "STAGES": 2} | FORCED),
        ("slices", {"ROWS": 2, "CHUNK": 64} | FORCED),
        ("shared", {"ROWS": 2, "CHUNK": 64} | FORCED),
        ("rows", {"ROWS": 1, "CHUNK": 64, "STAGES": 2} | FORCED),
    ],
)


# %%


def planned(x, w, b, dy, forward_plan=None, backward_plan=None):
    """y, dx, dw and db by two plans."""
    y, mean, rstd = forward(x, w, b, 1e-5, forward_plan)
    dx, dw, db = (torch.empty_like(t) for t in (x, w, b))
    backward(dy, x, w, mean, rstd, dx, dw, db, backward_plan)
    return y, dx, dw, db


def inputs(M, N, dtype):
    """x, w, b and dy; the mean of x is far from 0."""
    torch.manual_seed(0)
    x = -2.3 + 0.5 * torch.randn(M, N, device=DEVICE)
    w, b = torch.rand(2, N, device=DEVICE)
    dy = 0.1 * torch.randn(M, N, device=DEVICE)
    return [t.to(dtype).requires_grad_() for t in (x, w, b)] + [dy.to(dtype)]


def results(function, x, w, b, dy):
    """y, dx, dw and db of a function called like layer_norm."""
    y = function(x, x.shape[-1:], w, b, 1e-5)
    return y, *torch.autograd.grad(y, (x, w, b), dy)


def errors(function, M, N, dtype):
    """Relative errors of y, dx, dw and db against float64."""
    given = inputs(M, N, dtype)
    wide = [t.detach().double().requires_grad_() for t in given]
    pairs = zip(
        results(function, *given), results(F.layer_norm, *wide), strict=True
    )
    return [((a - b).norm() / b.norm()).item() for a, b in pairs]


def tolerance(dtype):
    half_unit = torch.finfo(dtype).eps / 2
    if dtype in (torch.float32, torch.float64):
        return 16 * half_unit
    if dtype == torch.bfloat16 and not ON_GPU:
        return 2 * half_unit  # the interpreter cuts bfloat16, not rounds it
    return half_unit


# %%

M, N = (1151, 521) if ON_GPU else (3, 137)

given = inputs(M, N, torch.float16)
wide = [t.detach().double().requires_grad_() for t in given]
expected = results(F.layer_norm, *wide)
given = [t.detach() for t in given]
for plans in zip(*PLANS, strict=True):
    got = planned(*given, *plans)
    found = [
        ((a - b).norm() / b.norm()).item()
        for a, b in zip(got, expected, strict=True)
    ]
    names = " and ".join(name for name, _ in plans)
    print(f"{names:18}", *(f"{e:.1e}" for e in found))
    assert max(found) <= tolerance(torch.float16), plans

# %%
# The columns are ``y``, ``dx``, ``dw`` and ``db``.
#
# Benchmark
# ---------
#
# The primary clock, the ceiling and the code are those of the first page:
# device time from a CUDA graph with an empty L2 cache, next to a copy of the
# same bytes.
# On this clock the copy forward is the faster of two: for large tensors in a
# graph ``copy_`` becomes a slower copy operation, a multiplication by 1 does
# not.


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
# The table is judged by code, as on the first page.


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
# The other implementations, Liger, quack and Apex where they are installed.
# quack has no autograd function for this, so it gets one here; it takes
# weights in float32 only.


def lines():
    """Provider keys and their names in the figures."""
    names = {"triton": "Triton", "torch": "PyTorch"}
    names["torch.compile"] = "torch.compile"
    find = importlib.util.find_spec
    for package, name in ("liger_kernel", "Liger"), ("quack", "quack"):
        if find(package):
            names[name.lower()] = name
    if find("apex") and find("apex.normalization"):
        names["apex"] = "Apex"
    return names


def implementation(provider):
    """A function called like layer_norm."""
    if provider == "triton":
        return layer_norm
    if provider == "torch.compile":
        import torch._functorch.config as config

        config.donated_buffer = False  # the backward pass runs many times
        torch._dynamo.reset()  # nothing is left of other sizes
        return torch.compile(lambda *a: F.layer_norm(*a), dynamic=False)
    if provider == "liger":
        from liger_kernel.ops.layer_norm import LigerLayerNormFunction

        return lambda x, _, *a: LigerLayerNormFunction.apply(x, *a)
    if provider == "apex":
        from apex.normalization.fused_layer_norm import fused_layer_norm_affine

        return lambda x, n, w, b, e: fused_layer_norm_affine(x, w, b, n, e)
    if provider == "quack":
        return lambda x, _, *a: Quack.apply(x, *a)
    return F.layer_norm


# %%


class Quack(torch.autograd.Function):
    """Layer norm of quack."""

    @staticmethod
    def forward(ctx, x, w, b, eps):
        from quack.rmsnorm import layernorm_fwd

        y, rstd, mean = layernorm_fwd(x, w, b, eps, True, True)
        ctx.save_for_backward(x, w, rstd, mean)
        return y

    @staticmethod
    def backward(ctx, dy):
        from quack.rmsnorm import layernorm_bwd

        x, w, rstd, mean = ctx.saved_tensors
        return *layernorm_bwd(x, w, dy, rstd, mean), None


# %%
# One measuring function serves all figures of speed.


def work(M, N, dtype, mode, provider):
    """A function that builds the call to be timed."""

    def prepare():
        x, w, b, dy = inputs(M, N, dtype)
        if provider == "copy":
            x, out = x.detach(), torch.empty_like(dy)
            if mode == "backward":
                return lambda: torch.add(x, dy, out=out)
            if M * N * dtype.itemsize > 2**27:
                return lambda: torch.mul(x, 1, out=out)
            return lambda: out.copy_(x)
        if provider == "quack":
            w, b = (t.detach().float().requires_grad_() for t in (w, b))
        f = implementation(provider)
        if mode == "forward":
            return lambda: f(x, (N,), w, b, 1e-5)
        y = f(x, (N,), w, b, 1e-5)
        return lambda: torch.autograd.grad(y, (x, w, b), dy, retain_graph=True)

    return prepare


# %%


def height(M, N, dtype):
    """M rows, or as many as fit into 512 MB."""
    return min(M, 2**29 // (N * dtype.itemsize))


def refuses(provider, N):
    """Whether an implementation cannot do rows of N columns, both ways."""
    if provider == "quack":
        return N > 2**18 or N % 8 > 0
    return provider == "liger" and N > 2**16


def measure(M, N, dtype, mode, provider):
    """Device time of one pass, from a CUDA graph replayed with an empty L2
    cache; median, 20 % and 80 % quantiles."""
    if refuses(provider, N):
        return [float("nan")] * 3
    M = height(M, N, dtype)
    times = device_time(work(M, N, dtype, mode, provider))
    moved = (2 if mode == "forward" else 3) * M * N * dtype.itemsize
    ms, fast, slow = times
    return [moved / t * 1e-6 for t in (ms, slow, fast)]


def speed(name, mode, widths, dtype):
    """The benchmark of one pass over some widths."""
    names = lines() | {"copy": "Copy"}
    benchmark = triton.testing.Benchmark(
        x_names=["N"],
        x_vals=widths,
        x_log=widths[-1] > 100000,
        line_arg="provider",
        line_vals=list(names),
        line_names=list(names.values()),
        ylabel="GB/s",
        plot_name=f"layer-norm-{name}{mode}",
        args={"M": 4096, "dtype": dtype, "mode": mode},
    )
    return triton.testing.perf_report(benchmark)(measure)


SWEEP = [512 * i for i in range(2, 32)]
UNUSUAL = [1000, 1151, 2047, 4097, 4608, 5000, 7777, 8704, 12345]
WIDE = [2**i for i in range(14, 21)]

# %%
# The sizes of the earlier pages, forward and then backward:

table = run(speed("", "forward", SWEEP, torch.float16))

# %%
claims(table)

# %%
table = run(speed("", "backward", SWEEP, torch.float16))

# %%
claims(table)

# %%
# Widths that nobody tunes for:

table = run(speed("unusual-", "forward", UNUSUAL, torch.bfloat16))

# %%
claims(table)

# %%
table = run(speed("unusual-", "backward", UNUSUAL, torch.bfloat16))

# %%
claims(table)

# %%
# Wide rows, with fewer of them where the tensor would pass 512 MB:

table = run(speed("wide-", "forward", WIDE, torch.float16))

# %%
claims(table)

# %%
table = run(speed("wide-", "backward", WIDE, torch.float16))

# %%
claims(table)

# %%
# Few rows
# --------
#
# All figures above have 4096 rows.
# With fewer rows there is less to do for each program, and the start of the
# kernels counts; the copy has this trouble as well.
# The maps show the share of the copy's speed.

ROWS = [16, 128, 1024, 8192]
COLUMNS = [256, 1024, 4096, 16384, 65536]


def measure_share(rows, N, dtype, mode):
    """Share of the speed of a copy of the same bytes; device time of both,
    from CUDA graphs replayed with an empty L2 cache; median."""
    M = height(int(rows), N, dtype)
    ours = device_time(work(M, N, dtype, mode, "triton"))[0]
    share = 100 * device_time(work(M, N, dtype, mode, "copy"))[0] / ours
    return share, share, share


def shares(mode):
    benchmark = triton.testing.Benchmark(
        x_names=["N"],
        x_vals=COLUMNS,
        x_log=True,
        line_arg="rows",
        line_vals=[str(rows) for rows in ROWS],
        line_names=[f"M = {rows}" for rows in ROWS],
        ylabel="% of copy",
        plot_name=f"layer-norm-map-{mode}",
        args={"dtype": torch.float16, "mode": mode},
    )
    return triton.testing.perf_report(benchmark)(measure_share)


def draw_map(table, mode):
    """The table as a map, rows by columns."""
    if table is None:
        return
    _, ax = plt.subplots(num=f"layer-norm-map-{mode}", figsize=(7.5, 3.4))
    values = table[[f"M = {rows} (% of copy)" for rows in ROWS]].to_numpy().T
    ax.imshow(values, cmap="Blues", vmin=0, vmax=180, aspect="auto")
    ax.set_xticks(range(len(COLUMNS)), COLUMNS)
    ax.set_yticks(range(len(ROWS)), ROWS)
    ax.set(xlabel="N", ylabel="M", title=f"{mode}: % of copy")
    for i, line in enumerate(values):
        for j, value in enumerate(line):
            ax.text(j, i, f"{value:.0f}", ha="center", va="center")
    plt.show()


table = run(shares("forward"))

# %%
draw_map(table, "forward")

# %%
table = run(shares("backward"))

# %%
draw_map(table, "backward")

# %%
# Where the cliffs come from
# --------------------------
#
# The well-known tutorial loses speed in four places.
# Each is made here on purpose, with the kernels of this page.
#
# **Padding.**
# One block for a whole row, a power of two wide, against chunks.

FORWARD_BLOCK = {"ROWS": 1, "HINT": "", "num_warps": 8}
BACKWARD_BLOCK = {"ROWS": 1, "num_warps": 8, "STAGES": 2, "per_sm": 1}


def by_plan(M, N, mode, plan):
    """A function that builds the call of one plan, to be timed."""

    def prepare():
        x, w, b, dy = (t.detach() for t in inputs(M, N, torch.float16))
        if mode == "forward":
            return lambda: forward(x, w, b, 1e-5, plan)
        _, mean, rstd = forward(x, w, b, 1e-5)
        into = [torch.empty_like(t) for t in (x, w, b)]
        return lambda: backward(dy, x, w, mean, rstd, *into, plan)

    return prepare


# %%


def measure_plan(N, mode, provider):
    """Share of the speed of a copy of the same bytes; device time of both,
    from CUDA graphs replayed with an empty L2 cache; median."""
    plan, M = None, height(4096, N, torch.float16)
    if provider == "one block":
        options = FORWARD_BLOCK if mode == "forward" else BACKWARD_BLOCK
        plan = "rows", options | {"CHUNK": triton.next_power_of_2(N)}
    if provider == "lanes from column 0":
        rule = plan_forward if mode == "forward" else plan_backward
        name, options = rule(N, 2, share=True)
        plan = name, options | ({} if mode == "forward" else {"STEP": 1})
    if provider == "no hints":
        plan = "sweeps", {"CHUNK": 8192, "num_warps": 16, "HINTS": False}
    if provider == "two sweeps":
        plan = "sweeps", {"CHUNK": 8192, "num_warps": 16}
    if provider == "two kernels":
        plan = plan_backward(N, 2, share=False)
    if not ON_GPU:
        raise NoGPU
    copy = device_time(work(M, N, torch.float16, mode, "copy"))[0]
    share = 100 * copy / device_time(by_plan(M, N, mode, plan))[0]
    return share, share, share


def compare(name, mode, widths, providers):
    benchmark = triton.testing.Benchmark(
        x_names=["N"],
        x_vals=widths,
        line_arg="provider",
        line_vals=["triton", *providers],
        line_names=["Triton", *providers],
        ylabel="% of copy",
        plot_name=f"layer-norm-{name}",
        args={"mode": mode},
    )
    return triton.testing.perf_report(benchmark)(measure_plan)


NEAR = [3584, 4096, 4608, 5120, 6144, 7168, 8192, 8704, 9728]
table = run(compare("padding", "forward", NEAR, ["one block"]))

# %%
# **Registers.**
# Backward with the whole row in one block: beyond 8192 columns the sums, the
# row and the padding no longer fit, and registers are spilled to memory.

NEAR = [4096, 6144, 8192, 10240, 12288, 16384]
table = run(compare("registers", "backward", NEAR, ["one block"]))

# %%
# **Narrow loads.**
# Widths next to each other, and the same with lanes that begin with the row,
# so that a thread loads one column at a time.

NEAR = [4094, 4095, 4096, 4097, 4098, 4100, 4104, 4112]
table = run(
    compare("narrow-loads-forward", "forward", NEAR, ["lanes from column 0"])
)

# %%


def drop(table, column):
    """Print how much lower the other widths are than 4096."""
    if table is not None:
        share = table.set_index("N")[f"{column} (% of copy)"]
        lost = share[4096] - share.drop(4096)
        print(
            f"{column}: {share[4096]:.0f} % at N = 4096, at worst "
            f"{lost.max():.0f} points less at N = {lost.idxmax():.0f}"
        )


drop(table, "Triton")
drop(table, "lanes from column 0")

# %%
table = run(
    compare("narrow-loads-backward", "backward", NEAR, ["lanes from column 0"])
)

# %%
drop(table, "Triton")
drop(table, "lanes from column 0")

# %%
# The loads are wide again, but a step remains.
# The first and the last lanes of a row need masks and single stores, a program
# starts with the weights in single loads, and one more column can mean one
# more chunk.
#
# **More partial rows than work.**
# More programs hide more of the latency, but each one has to store its sums,
# and the last kernel has to read them.


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["per_sm"],
        x_vals=[1, 2, 4, 8, 16],
        line_arg="provider",
        line_vals=["triton"],
        line_names=["Triton"],
        ylabel="µs",
        plot_name="layer-norm-partial-rows",
        args={"M": 4096, "N": 2048},
    )
)
def measure_programs(M, N, per_sm, provider):
    """Device time of the backward pass with a number of programs for each
    multiprocessor, from a CUDA graph replayed with an empty L2 cache; median,
    20 % and 80 % quantiles."""
    name, options = plan_backward(N, 2, share=False)
    plan = name, options | {"per_sm": per_sm}
    return [1000 * t for t in device_time(by_plan(M, N, "backward", plan))]


table = run(measure_programs)

# %%
# The compiled kernels say the rest.
# Compiling for a GPU needs no GPU, but a process in which Triton is not
# interpreted.

SCRIPT = """
import re, subprocess, tempfile
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

def look(title, kernel, warps, **known):
    known |= dict(M=4096) | dict(EVEN=True) | dict(PDL=False)
    known = {k: v for k, v in known.items() if k in kernel.arg_names}
    types, aligned = {}, {}
    for i, name in enumerate(kernel.arg_names):
        half = name in ("x_ptr", "dy_ptr", "w_ptr", "b_ptr", "y_ptr", "dx_ptr")
        types[name] = "*fp16" if half else "*fp32"
        types[name] = "constexpr" if name in known else types[name]
        if name not in known:
            aligned[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, types, known, aligned)
    target = GPUTarget("cuda", 90, 32)
    built = triton.compile(source, target, {"num_warps": warps})
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(built.asm["ptx"])
        file.flush()
        told = subprocess.run(
            [knobs.nvidia.ptxas.path, "-v", "-arch=sm_90a", file.name]
            + ["-o", "/dev/null"], capture_output=True, text=True,
        ).stderr
    registers = re.search(r"Used (\\d+) registers", told)[1]
    spilled = re.search(r"(\\d+) bytes spill stores", told)[1]
    loads = r"ld[.]global[^;{]*?(?:[.]v(\\d))?[.]b(\\d+) "
    sizes = [int(n or 1) * int(b) // 8 for n, b in
             re.findall(loads, built.asm["ptx"])]
    copies = r"cp[.]async[.]c.[.]shared[^;]*?], 0x(\\w+)"
    sizes += [int(n, 16) for n in re.findall(copies, built.asm["ptx"])]
    print(f"{title}: {registers} registers, {spilled} bytes spilled, "
          "loads of "
          + ", ".join(f"{size} bytes: {sizes.count(size)}"
                      for size in sorted(set(sizes))))

"""

# %%

CASES = """
def fwd(title, N, chunk, warps):
    look(title, _layer_norm_fwd_rows, warps, N=N, CHUNK=chunk, eps=1e-5,
         ROWS=1, HINT="")

def shifted(title, N, chunk, warps):
    look(title, _layer_norm_fwd_shifted, warps, N=N, CHUNK=chunk, eps=1e-5,
         ROWS=1, STEP=8, STAGES=4)

def bwd(title, N, chunk, warps, step=1):
    look(title, _layer_norm_bwd_rows, warps, N=N, CHUNK=chunk, ROWS=1,
         STAGES=2, STEP=step)

fwd("forward, N = 4608, one block        ", 4608, 8192, 8)
fwd("forward, N = 4608, chunks           ", 4608, 1024, 4)
fwd("forward, N = 4609, from column 0    ", 4609, 1024, 4)
shifted("forward, N = 4609, aligned lanes    ", 4609, 512, 4)
bwd("backward, N = 5120, one block       ", 5120, 8192, 4)
bwd("backward, N = 5120, chunks          ", 5120, 1024, 4)
bwd("backward, N = 4097, from column 0   ", 4097, 2048, 8)
bwd("backward, N = 4097, aligned lanes   ", 4097, 512, 4, 8)
"""


def compiled():
    """Run SCRIPT with the kernels it names, in a process of its own."""
    used = (
        _lanes, _load, _only_inside, _store, _load_vector, _statistics,
        _layer_norm_fwd_rows, _first, _layer_norm_fwd_shifted, _terms,
        _gradients, _add_pairs, _store_sums, _read_tile, _write_tile,
        _load_scalars, _layer_norm_bwd_rows,
    )  # fmt: skip
    parts = ["import triton", "import triton.language as tl"]
    parts += [inspect.getsource(kernel.fn) for kernel in used]
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "kernels.py")
        with open(path, "w") as file:
            file.write("\n\n".join([*parts, SCRIPT, CASES]))
        done = subprocess.run(
            [sys.executable, path], env=env, capture_output=True, text=True
        )
    print(done.stdout or done.stderr)


compiled()

# %%
# What pays for wide rows
# -----------------------
#
# Forward: the hints of the two sweeps, and sharing rows instead.

NEAR = [16384, 32768, 65536, 131072]
table = run(compare("wide-plans", "forward", NEAR, ["two sweeps", "no hints"]))

# %%
# Backward: sharing rows, against the two kernels that work on every device.

table = run(compare("portable", "backward", NEAR, ["two kernels"]))

# %%
# Triton 3.9 can also join a few programs to a cluster (``num_ctas``) that
# exchanges sums without going through memory.
# The version for which these figures are measured cannot compile that for
# kernels of this kind, so it is not used here.
#
# What the rule costs
# -------------------
#
# A rule of a few lines cannot be the best everywhere.
# Here it is compared with the best of several plans at each width, found by
# trying all of them.

CANDIDATES = {
    "forward": [
        ("shifted", {"ROWS": 1, "CHUNK": chunk, "num_warps": warps}
            | {"STAGES": stages, "per_sm": per_sm})
        for chunk, warps in (
            (256, 1), (256, 2), (512, 4), (1024, 8), (2048, 8)
        )
        for per_sm in (8 // warps, 16 // warps) for stages in (3, 4)
    ] + [
        ("rows", {"ROWS": rows, "CHUNK": 256 * warps, "HINT": hint}
            | {"num_warps": warps})
        for rows, warps in ((1, 2), (2, 2), (1, 4), (2, 4), (1, 8), (1, 16))
        for hint in ("", "evict_first")
    ] + [
        ("sweeps", {"CHUNK": 8192, "num_warps": 16}),
        ("slices", {"ROWS": 2, "CHUNK": 4096, "num_warps": 8, "per_sm": 2}),
        ("slices", {"ROWS": 2, "CHUNK": 8192, "num_warps": 8, "per_sm": 1}),
    ],
    "backward": [
        ("rows", {"ROWS": rows, "CHUNK": chunk, "STAGES": stages}
            | {"num_warps": warps, "per_sm": 8 // warps})
        for rows, chunk, warps in ((1, 512, 4), (1, 1024, 4), (2, 1024, 4),
                                   (4, 1024, 4), (1, 2048, 8), (2, 2048, 8))
        for stages in (3, 4)
    ] + [
        ("shared", {"ROWS": 4, "CHUNK": 1024, "num_warps": 4, "per_sm": 3}),
        ("shared", {"ROWS": 2, "CHUNK": 2048, "num_warps": 4, "per_sm": 2}),
        ("shared", {"ROWS": 2, "CHUNK": 4096, "num_warps": 8, "per_sm": 1}),
    ],
}  # fmt: skip

# %%


def sensible(plan, N, mode):
    """Neither idle chunks nor rows far too wide for the plan."""
    name, options = plan
    if mode == "forward" and (name == "shifted") != (N % 8 > 0):
        return False
    if name in ("rows", "shifted"):
        room = (64 if mode == "forward" else 40) * 32 * options["num_warps"]
        return options["CHUNK"] <= 2 * N and options["ROWS"] * N <= room
    if name == "sweeps":
        return N >= 8192
    return 8192 <= N <= NUM_SMS * options["per_sm"] * options["CHUNK"]


# %%


def measure_rule(N, mode, provider):
    """Device time from a CUDA graph replayed with an empty L2 cache, median:
    of the plan of the rule, or the shortest of all plans tried."""
    if not ON_GPU:
        raise NoGPU
    plans = [None]
    if provider == "best":
        plans += [p for p in CANDIDATES[mode] if sensible(p, N, mode)]
    M = height(4096, N, torch.float16)
    ms = min(device_time(by_plan(M, N, mode, plan))[0] for plan in plans)
    return 1000 * ms, 1000 * ms, 1000 * ms


ODD = [1151, 4097, 7777]


def rule(mode):
    benchmark = triton.testing.Benchmark(
        x_names=["N"],
        x_vals=sorted([512, 1024, 1536, 2560, 4608, 8192, 12288, 65536, *ODD]),
        line_arg="provider",
        line_vals=["triton", "best"],
        line_names=["Rule", "Best plan"],
        ylabel="µs",
        plot_name=f"layer-norm-rule-{mode}",
        args={"mode": mode},
    )
    return triton.testing.perf_report(benchmark)(measure_rule)


def cost(table):
    """Print by how much the rule is slower than the best plan."""
    if table is not None:
        loss = 100 * (table["Rule (µs)"] / table["Best plan (µs)"] - 1)
        print(
            f"the rule costs {loss.mean():.1f} % on average, at most "
            f"{loss.max():.1f} % at N = {table['N'][loss.idxmax()]:.0f}"
        )


table = run(rule("forward"))

# %%
cost(table)

# %%
table = run(rule("backward"))

# %%
cost(table)

# %%
# How exact is the variance?
# --------------------------
#
# A row with a large mean next to its standard deviation is the hard case.
# The figure shows the error of 1 / standard deviation for rows of 65536
# columns: by sums of ``x`` and of its square, by Welford's method in two
# sweeps, by slices that are merged, and by PyTorch.


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["ratio"],
        x_vals=[1, 10, 100, 1000, 10000],
        x_log=True,
        line_arg="provider",
        line_vals=["triton", "sweeps", "torch", "sums of squares"],
        line_names=["Triton", "Two sweeps", "PyTorch", "Sums of squares"],
        ylabel="relative error",
        y_log=True,
        plot_name="layer-norm-variance",
        args={"M": 64, "N": 65536},
    )
)
def measure_variance(M, N, ratio, provider):
    """Norm of the difference of rstd from float64, divided by its norm, for
    float32 rows with a mean of ratio standard deviations."""
    if not ON_GPU:
        raise NoGPU
    error = variance_error(M, N, ratio, provider)
    return error, error, error


def variance_error(M, N, ratio, provider):
    torch.manual_seed(0)
    x = ratio + torch.randn(M, N, device=DEVICE)
    exact = x.double().var(dim=1, correction=0) ** -0.5
    if provider == "torch":
        rstd = torch.native_layer_norm(x, (N,), None, None, 0.0)[2].flatten()
    elif provider == "sums of squares":
        variance = (x * x).mean(dim=1) - x.mean(dim=1) ** 2
        rstd = variance.clamp_min(1e-12) ** -0.5
    else:
        sweeps = "sweeps", {"CHUNK": min(8192, N), "num_warps": 8}
        plan = sweeps if provider == "sweeps" else None
        rstd = forward(x, None, None, 0.0, plan)[2]
    return ((rstd - exact).norm() / exact.norm()).item()


table = run(measure_variance)

# %%
# The same on a small matrix, here and now:

for ratio in 1, 100, 10000:
    print(f"mean / std = {ratio}:", end="")
    for provider in "triton", "sweeps", "torch", "sums of squares":
        error = variance_error(4, 1024, ratio, provider)
        print(f"  {provider} {error:.0e}", end="")
        if provider in ("triton", "sweeps"):
            assert error <= 1e-5
    print()

# %%
# The same bits every time
# ------------------------
#
# No result depends on which program is faster, not even where programs share
# rows: words are added in the order of the slices, not of their arrival.
# Each width here has another plan.


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=[256, 1000, 8192, 15872, 65536, 2**20],
        line_arg="provider",
        line_vals=["triton"],
        line_names=["Triton"],
        ylabel="different results of 100",
        plot_name="layer-norm-same-bits",
        args={"M": 512},
    )
)
def measure_bits(M, N, provider):
    """Runs, of 100, in which y, dx, dw or db is not that of the first run,
    bit for bit."""
    if not ON_GPU:
        raise NoGPU
    M = height(M, N * 8, torch.float16)
    given = [t.detach() for t in inputs(M, N, torch.float16)]
    first = planned(*given)
    different = 0
    for _ in range(100):
        again = planned(*given)
        different += not all(map(torch.equal, first, again))
    return different, different, different


table = run(measure_bits)

# %%
# What the user waits for
# -----------------------
#
# All this is device time.
# For narrow rows Python needs longer to start the kernels than the kernels
# run.
# Two things help a user of narrow rows.
#
# * A CUDA graph replays the kernels without Python.
# * An operator that is registered with PyTorch is one opaque step for
#   ``torch.compile``, which then does not look inside, so every plan can be
#   used there.


@torch.library.custom_op("both_passes::layer_norm", mutates_args=())
def registered(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
) -> list[torch.Tensor]:
    N = weight.numel()
    w, b = weight.reshape(N).contiguous(), bias.reshape(N).contiguous()
    y, *saved = forward(x.reshape(-1, N).contiguous(), w, b, eps)
    return [y.reshape(x.shape), *saved]


@registered.register_fake
def _(x, weight, bias, eps):
    acc = torch.promote_types(x.dtype, torch.float32)
    row = x.new_empty(x.numel() // weight.numel(), dtype=acc)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    return [y, row, torch.empty_like(row)]


@torch.library.custom_op("both_passes::layer_norm_bwd", mutates_args=())
def registered_bwd(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
) -> list[torch.Tensor]:
    rows = x.reshape(-1, weight.numel()).contiguous()
    w = weight.reshape(-1).contiguous()
    dx, dw = torch.empty_like(rows), torch.empty_like(w)
    db = torch.empty_like(w, dtype=bias.dtype)
    dy = dy.reshape(rows.shape).contiguous()
    backward(dy, rows, w, mean, rstd, dx, dw, db)
    return [dx.reshape(x.shape), dw.reshape(weight.shape), db.view(bias.shape)]


@registered_bwd.register_fake
def _(dy, x, weight, bias, mean, rstd):
    return [t.new_empty(t.shape) for t in (x, weight, bias)]


# %%
# Autograd is told how the two belong together:


def keep(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:3], *output[1:])


def registered_backward(ctx, grads):
    return *registered_bwd(grads[0], *ctx.saved_tensors), None


BOUND = registered.register_autograd(registered_backward, setup_context=keep)

x, w, b, dy = inputs(4, 40, torch.float32)
y = registered(x, w, b, 1e-5)[0]
pairs = zip(
    (y, *torch.autograd.grad(y, (x, w, b), dy)),
    results(F.layer_norm, x, w, b, dy),
    strict=True,
)
for got, expected in pairs:
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)

# %%
# The whole call, forward and backward, by the clock of a user.
# Registration alone saves no time: its bookkeeping runs in Python as well.

CALLS = {
    "triton": "Triton",
    "registered": "Triton, registered",
    "graph": "Triton, CUDA graph",
    "torch": "PyTorch",
}


# %%


def whole_call(M, N, provider):
    """The call to be timed."""
    given = inputs(M, N, torch.float16)
    if provider == "registered":
        return lambda: results(
            lambda x, _, w, b, eps: registered(x, w, b, eps)[0], *given
        )
    call = lambda: results(implementation(provider), *given)
    if provider != "graph":
        return call
    call = lambda: results(layer_norm, *given)
    with torch.cuda.stream(STREAM):
        call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=STREAM):
            call.results = call()
    call.kept = given
    return lambda: (graph.replay(), call)[0]


# %%


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=[1024, 2048, 4096, 8192, 15872],
        line_arg="provider",
        line_vals=list(CALLS),
        line_names=list(CALLS.values()),
        ylabel="µs",
        plot_name="layer-norm-whole-call",
        args={"M": 4096},
    )
)
def measure_whole_call(M, N, provider):
    """Forward and backward through autograd, host included: CUDA events
    around the call, empty L2 cache; median, 20 % and 80 % quantiles."""
    if not ON_GPU:
        raise NoGPU
    ms = triton.testing.do_bench(
        whole_call(M, N, provider), quantiles=[0.5, 0.2, 0.8]
    )
    return [1000 * t for t in ms]


table = run(measure_whole_call)

# %%
# What can go wrong
# -----------------
#
# **A variance from two sums.**
# The mean of the squares minus the square of the mean.

row = 10000 + torch.randn(4096, generator=torch.Generator().manual_seed(0))
print("wrong:", ((row**2).mean() - row.mean() ** 2).item())
print("right:", ((row - row.mean()) ** 2).mean().item())

# %%
# **Sums in the order of arrival.**
# Addition of floats depends on the order.
# Programs that add to one place as they come give other bits in every run;
# here every program has a row of its own, and the rows are added in order.

torch.manual_seed(0)
parts = torch.randn(132)
arrived = {sum(parts[torch.randperm(132)]).item() for _ in range(20)}
print("wrong:", len(arrived), "different sums in 20 runs")
in_order = {sum(parts).item() for _ in range(20)}
print("right:", len(in_order), "sum in 20 runs")

# %%
# **A column counted twice.**
# The last of the slices is moved to the left, so two slices hold some columns.
# Rows of ones have the mean 1.

row = torch.ones(200)
starts = [min(64 * s, 200 - 64) for s in range(4)]
slices = [row[start : start + 64] for start in starts]
print("wrong:", sum(part.sum() for part in slices).item() / 200)
counted = [
    row[max(start, 64 * s) : start + 64] for s, start in enumerate(starts)
]
print("right:", sum(part.sum() for part in counted).item() / 200)

# %%
# **Offsets of 32 bits.**
# Row 2048 of a matrix with a million columns starts at element 2 ** 31.

row = torch.tensor(2048, dtype=torch.int32)
print("wrong:", (row * 2**20).item())
print("right:", (row.to(torch.int64) * 2**20).item())

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


# %%
# **Exercise 1: merge two slices.**
# Two slices of a row, of different widths, know their mean and ``m2``.
# The stub averages the means and adds the ``m2``.


def merge(mean_a, m2_a, n_a, mean_b, m2_b, n_b):
    return (mean_a + mean_b) / 2, m2_a + m2_b  # to do


def exercise_1(merge):
    torch.manual_seed(0)
    x = torch.randn(4, 48) + torch.arange(48) / 4
    known = []
    for part in x[:, :32], x[:, 32:]:
        mean = part.mean(dim=1)
        m2 = ((part - mean[:, None]) ** 2).sum(dim=1)
        known += [mean, m2, part.shape[1]]
    mean, m2 = merge(*known)
    expected = torch.stack([x.mean(1), x.var(1, correction=0)], dim=1)
    return check(torch.stack([mean, m2 / 48], dim=1), expected)


exercise_1(merge)

# %%

# Solution 1


def merge_solved(mean_a, m2_a, n_a, mean_b, m2_b, n_b):
    n = n_a + n_b
    d = mean_b - mean_a
    # Each set lies beside the common mean, which adds to the squares.
    return mean_a + d * n_b / n, m2_a + m2_b + d * d * n_a * n_b / n


assert exercise_1(merge_solved)

# %%
# **Exercise 2: the second sweep.**
# This kernel centers rows that are wider than its block.
# The stub writes the first block only.
# Write the others, from the end of the row to its start.


@triton.jit
def _center(x_ptr, y_ptr, N: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * N
    cols = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, N, BLOCK):
        col = start + cols
        total += tl.load(x_ptr + at + col, mask=col < N, other=0)
    mean = tl.sum(total) / N
    x = tl.load(x_ptr + at + cols, mask=cols < N)
    tl.store(y_ptr + at + cols, x - mean, mask=cols < N)  # to do


def exercise_2(kernel):
    torch.manual_seed(0)
    x = torch.randn(3, 50, device=DEVICE)
    y = torch.zeros_like(x)
    kernel[(3,)](x, y, N=50, BLOCK=16)
    return check(y, x - x.mean(dim=1, keepdim=True))


exercise_2(_center)

# %%

# Solution 2


@triton.jit
def _center_solved(x_ptr, y_ptr, N: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * N
    cols = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, N, BLOCK):
        col = start + cols
        total += tl.load(x_ptr + at + col, mask=col < N, other=0)
    mean = tl.sum(total) / N
    BLOCKS: tl.constexpr = (N + BLOCK - 1) // BLOCK
    for i in range(BLOCKS):
        col = (BLOCKS - 1 - i) * BLOCK + cols
        x = tl.load(x_ptr + at + col, mask=col < N)
        tl.store(y_ptr + at + col, x - mean, mask=col < N)


assert exercise_2(_center_solved)

# %%
# **Exercise 3: aligned lanes.**
# Rows of 13 columns start anywhere, but wide loads need addresses that are
# multiples of 8 elements.
# Let the lanes of a row start at the multiple of 8 before the row: lane ``i``
# then holds column ``i - shift``.
# The stub has the right start, but takes lane ``i`` for column ``i``.
# It sums each row; which lanes belong to the row?


@triton.jit
def _sum_aligned(x_ptr, out_ptr, N: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    start = row * N // 8 * 8
    lanes = tl.arange(0, BLOCK)
    col = lanes  # to do
    x = tl.load(x_ptr + start + lanes, mask=col < N, other=0)
    tl.store(out_ptr + row, tl.sum(x))


def exercise_3(kernel):
    torch.manual_seed(0)
    x = torch.randn(5, 13, device=DEVICE)
    out = torch.zeros(5, device=DEVICE)
    kernel[(5,)](x, out, N=13, BLOCK=32)
    return check(out[:, None], x.sum(dim=1, keepdim=True))


exercise_3(_sum_aligned)

# %%

# Solution 3


@triton.jit
def _sum_aligned_solved(x_ptr, out_ptr, N: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    start = row * N // 8 * 8
    lanes = tl.arange(0, BLOCK)
    col = lanes - (row * N - start)
    # For wide loads the mask must be equal in each group of 8 lanes as well:
    # load whole groups, then set the lanes outside the row to 0.
    x = tl.load(x_ptr + start + lanes, mask=(col >= 0) & (col < N), other=0)
    tl.store(out_ptr + row, tl.sum(x))


assert exercise_3(_sum_aligned_solved)

# %%
# References
# ----------
#
# * Jimmy Lei Ba, Jamie Ryan Kiros and Geoffrey E. Hinton, `Layer
#   Normalization <https://arxiv.org/abs/1607.06450>`_, 2016.
# * Tony F. Chan, Gene H. Golub and Randall J. LeVeque, `Algorithms for
#   computing the sample variance
#   <https://doi.org/10.1080/00031305.1983.10483115>`_, 1983: the formula that
#   merges two sets.
# * B. P. Welford, `Note on a method for calculating corrected sums of squares
#   and products <https://doi.org/10.1080/00401706.1962.10490022>`_, 1962.
# * NVIDIA, `PTX: Parallel Thread Execution
#   <https://docs.nvidia.com/cuda/parallel-thread-execution/>`_, memory
#   consistency model: why a word of 64 bits arrives as a whole.
