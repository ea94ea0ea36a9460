r"""
A loss without its logits
=========================

How does a model get its loss when the matrix of all logits is larger than
everything else?
TO BE WRITTEN.

**What you need:** `A linear layer, both passes <01-linear.html>`_.
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

import dataclasses
import functools

from triton.tools.tensor_descriptor import TensorDescriptor

# %%

# Scaffold: the order of tiles, and layouts, from page 01.


@triton.jit
def _place(tile, rows, columns, GROUP: tl.constexpr):
    """Row and column of a tile, by its number: groups of so many rows of
    tiles, and in a group column by column."""
    first = tile // (GROUP * columns) * GROUP
    # The last group may have fewer rows.
    height = tl.minimum(rows - first, GROUP)
    place = tile % (GROUP * columns)
    return first + place % height, place // height


GPU = torch.cuda.get_device_properties(DEVICE) if ON_GPU else None
NUM_SMS = GPU.multi_processor_count if ON_GPU else 4


def shared_memory():
    """Bytes that a program can have; without a GPU, those of an H200."""
    if not ON_GPU:
        return 232448
    return getattr(GPU, "shared_memory_per_block_optin", 65536)


SHARED = shared_memory()


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


# %%

LOG2E = tl.constexpr(1.4426950408889634)  # the logarithm of e, to the base 2
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)


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
def _keep_parts(
    sums,  # a tile of products
    row,  # where it begins
    column,
    powers_desc,  # (tokens, classes) in halves of a tile; or None
    parts_ptr,  # (2 or 3, columns of tiles, tokens)
    bias_ptr,
    weight_ptr,
    tokens,
    classes,
    SMOOTH: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
):
    """What is kept of a tile: of each token the largest logit and the sum of
    all powers; and, if somebody wants them, the powers."""
    pieces = _halves(sums)
    width: tl.constexpr = TILE_N // 2
    maximum = tl.full((TILE_M,), LOWEST, tl.float32)
    for i in tl.static_range(2):
        name = column + i * width + tl.arange(0, width)
        logit = _logits(pieces[i], bias_ptr, name, classes)
        maximum = tl.maximum(maximum, tl.max(logit, axis=1))

    total = tl.zeros((TILE_M,), tl.float32)
    weighted = tl.zeros((TILE_M,), tl.float32)
    for i in tl.static_range(2):
        name = column + i * width + tl.arange(0, width)
        logit = _logits(pieces[i], bias_ptr, name, classes)
        power = tl.exp2((logit - maximum[:, None]) * LOG2E)
        total += tl.sum(power, axis=1)
        if powers_desc is not None:
            power = power.to(powers_desc.dtype)
            powers_desc.store([row, column + i * width], power)
        if SMOOTH:
            # Minus infinity times a weight of 0 is not a number.
            weight = _weights(weight_ptr, name, classes)
            logit = tl.where(name[None, :] < classes, logit, 0)
            weighted += tl.sum(logit * weight[None, :], axis=1)

    token = row + tl.arange(0, TILE_M)
    columns = tl.cdiv(classes, TILE_N)
    at = parts_ptr + (column // TILE_N).to(tl.int64) * tokens + token
    step = columns.to(tl.int64) * tokens
    tl.store(at, maximum, mask=token < tokens)
    tl.store(at + step, total, mask=token < tokens)
    if SMOOTH:
        tl.store(at + 2 * step, weighted, mask=token < tokens)


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
def _keep_gradients(
    sums,  # a tile of products
    row,
    column,
    grads_desc,  # (tokens, classes) in halves of a tile
    rows_ptr,  # (6, batch): see _finish
    target_ptr,  # (tokens,)
    bias_ptr,
    weight_ptr,
    tokens,
    classes,
    first_class,  # the number of the first one
    batch,
    SMOOTH: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
):
    """The gradient of a tile of logits, stored; logsumexp is known."""
    token = row + tl.arange(0, TILE_M)
    mask = token < tokens
    rows_ptr += token
    step = tl.cast(batch, tl.int64)
    lse = tl.load(rows_ptr + 2 * step, mask=mask, other=0)
    p = tl.load(rows_ptr + 3 * step, mask=mask, other=0)
    a = tl.load(rows_ptr + 4 * step, mask=mask, other=0)
    e = tl.load(rows_ptr + 5 * step, mask=mask, other=0)
    target = tl.load(target_ptr + token, mask=mask, other=-1) - first_class
    pieces = _halves(sums)
    width: tl.constexpr = TILE_N // 2
    for i in tl.static_range(2):
        name = column + i * width + tl.arange(0, width)
        logit = _logits(pieces[i], bias_ptr, name, classes)
        power = tl.exp2((logit - lse[:, None]) * LOG2E)
        weight = _weights(weight_ptr, name, classes)
        grad = _gradient(power, p, a, e, target, name, weight, SMOOTH)
        grad = grad.to(grads_desc.dtype)
        grads_desc.store([row, column + i * width], grad)


@triton.jit
def _scores(
    x_desc,  # (tokens, features) in tiles of TILE_M and TILE_K
    w_desc,  # (classes, features) in tiles of TILE_N and TILE_K
    out_desc,  # (tokens, classes) in halves of a tile; None: nothing is kept
    parts_ptr,  # (2 or 3, columns of tiles, tokens), if logsumexp is not known
    rows_ptr,  # (6, batch) from our first token on, if it is
    target_ptr,  # (tokens,), if it is
    bias_ptr,  # (classes,), or None
    weight_ptr,  # (classes,), or None
    flags_ptr,  # (blocks of tokens, blocks of classes): wanted or not; or None
    tokens,
    classes,
    features,
    first_class,  # the number of our first class
    batch,  # all tokens
    flags_step,  # from a row of flags to the next
    SMOOTH: tl.constexpr,
    KNOWN: tl.constexpr,  # whether logsumexp is known
    BLOCK: tl.constexpr,  # tokens and classes of a flag
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    GROUP: tl.constexpr,  # rows of tiles in a group
    STAGES: tl.constexpr,  # num_stages of the inner loop
    STAY: tl.constexpr,  # whether programs take several tiles
    PRECISION: tl.constexpr,  # of float32: "tf32" or "ieee"
):
    tl.assume(features > 0)
    rows = tl.cdiv(tokens, TILE_M)
    columns = tl.cdiv(classes, TILE_N)
    for work in tl.range(
        tl.program_id(0), rows * columns, tl.num_programs(0), flatten=STAY
    ):
        row, column = _place(work, rows, columns, GROUP)
        row *= TILE_M
        column *= TILE_N
        end = features
        if flags_ptr is not None:
            # Is any block of this tile wanted?
            i = row // BLOCK + tl.arange(0, TILE_M // BLOCK)
            j = column // BLOCK + tl.arange(0, TILE_N // BLOCK)
            inside = i[:, None] < tl.cdiv(tokens, BLOCK)
            inside &= j[None, :] < tl.cdiv(classes, BLOCK)
            at = flags_ptr + i.to(tl.int64)[:, None] * flags_step + j[None, :]
            wanted = tl.load(at, mask=inside, other=0).to(tl.int32)
            end = tl.where(tl.max(tl.max(wanted, axis=1), axis=0) > 0, end, 0)

        sums = tl.zeros((TILE_M, TILE_N), tl.float32)
        for k in tl.range(0, end, TILE_K, num_stages=STAGES):
            x = x_desc.load([row, k])
            w = w_desc.load([column, k])
            sums = tl.dot(x, w.T, sums, input_precision=PRECISION)

        if KNOWN:
            # Who leaves a block out does not read it, either.
            if end > 0:
                _keep_gradients(
                    sums,
                    row,
                    column,
                    out_desc,
                    rows_ptr,
                    target_ptr,
                    bias_ptr,
                    weight_ptr,
                    tokens,
                    classes,
                    first_class,
                    batch,
                    SMOOTH,
                    TILE_M,
                    TILE_N,
                )
        else:
            _keep_parts(
                sums,
                row,
                column,
                out_desc,
                parts_ptr,
                bias_ptr,
                weight_ptr,
                tokens,
                classes,
                SMOOTH,
                TILE_M,
                TILE_N,
            )


# %%


@triton.jit
def _finish(
    parts_ptr,  # (2 or 3, columns, tokens), of _scores
    x_ptr,  # (tokens, features)
    w_ptr,  # (classes, features)
    bias_ptr,  # (classes,), or None
    weight_ptr,  # (classes,), or None: all weights are 1
    all_weights_ptr,  # their sum, if there are weights
    target_ptr,  # (tokens,)
    rows_ptr,  # (6, batch) from our first token on: what is computed here
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
    wide = tl.cast(tokens, tl.int64)

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
        power = tl.exp2((part_m - new[None, :]) * LOG2E)
        s = s * tl.exp2((m - new) * LOG2E) + tl.sum(part_s * power, axis=0)
        m = new
        if SMOOTH:
            at += columns * wide
            weighted += tl.sum(tl.load(at, mask=mask, other=0), axis=0)
    # A token that does not exist has no parts.
    m = tl.where(inside, m, 0)
    log = tl.log(tl.where(inside, s, 1))

    # The logit of the target: one row of x times one row of w.
    target = tl.load(target_ptr + token, mask=inside, other=ignore)
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
    all_weights = classes.to(tl.float32)
    if weight_ptr is not None:
        w_t = tl.load(weight_ptr + row, mask=exists, other=0).to(tl.float32)
        all_weights = tl.load(all_weights_ptr)
    w_t = tl.where(live, tl.where(exists, w_t, float("nan")), 0)

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


# %%


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

    # The powers are about the largest logit of their tile.
    part = (column // TILE_N).to(tl.int64) * tokens
    m = tl.load(parts_ptr + part + token, mask=mask, other=0)
    power = grads_desc.load([row, column]).to(tl.float32)
    power *= tl.exp2((m - lse) * LOG2E)[:, None]

    name = column + tl.arange(0, WIDTH)
    weight = _weights(weight_ptr, name, classes)
    grad = _gradient(power, p, a, e, target, name, weight, SMOOTH)
    grads_desc.store([row, column], grad.to(grads_desc.dtype))

    if flags_ptr is not None:
        # Not below, and not "above": NaN has to be seen.
        large = tl.abs(grad) < (skip_below * p)[:, None]
        large = tl.where(large | (p == 0)[:, None], 0, 1)
        blocks: tl.constexpr = WIDTH // BLOCK
        large = tl.max(large, axis=0).reshape(blocks, BLOCK)
        number = column // BLOCK + tl.arange(0, blocks)
        at = flags_ptr + (row // BLOCK).to(tl.int64) * flags_step + number
        exists = number < tl.cdiv(classes, BLOCK)
        tl.store(at, tl.max(large, axis=1).to(tl.int8), mask=exists)


# %%


@triton.jit
def _add_sums(sums, row, column, high_desc, low_desc):
    """Add what was summed before. A float32 lies in two halves of 16 bits, or
    in one piece if low_desc is None."""
    if low_desc is None:
        return sums + high_desc.load([row, column])
    else:
        high = high_desc.load([row, column]).to(tl.int32) << 16
        low = low_desc.load([row, column]).to(tl.int32) & 0xFFFF
        return sums + (high | low).to(tl.float32, bitcast=True)


@triton.jit
def _keep_sums(sums, row, column, high_desc, low_desc):
    """Store sums for the next chunk."""
    if low_desc is None:
        high_desc.store([row, column], sums)
    else:
        bits = sums.to(tl.int32, bitcast=True)
        high_desc.store([row, column], (bits >> 16).to(tl.int16))
        low_desc.store([row, column], bits.to(tl.int16))


@triton.jit
def _keep_product(
    sums,  # a tile of products
    row,  # where it begins
    column,
    c_desc,
    high_desc,
    low_desc,
    scale_ptr,
    FIRST: tl.constexpr,
):
    """Add what was summed before, and store the sum or the result."""
    pieces = _halves(sums)
    for i in tl.static_range(2):
        piece = pieces[i]
        at = column + i * piece.shape[1]
        if not FIRST:
            piece = _add_sums(piece, row, at, high_desc, low_desc)
        if c_desc is None:
            _keep_sums(piece, row, at, high_desc, low_desc)
        else:
            if scale_ptr is not None:
                piece *= tl.load(scale_ptr)
            c_desc.store([row, at], piece.to(c_desc.dtype))


@triton.jit
def _times(
    grads_desc,  # gradients of logits, (tokens, classes)
    b_desc,  # (K, N) in tiles of TILE_K and TILE_N
    c_desc,  # (M, N) in halves of a tile: the result; None: only a sum so far
    high_desc,  # the same: sums, or their upper halves; None: there are none
    low_desc,  # the same: their lower halves, or None
    scale_ptr,  # a number by which the result is multiplied; or None
    list_ptr,  # (rows of tiles, blocks of K): which blocks; or None: all
    count_ptr,  # (rows of tiles,): how many of them
    M,
    N,
    K,
    list_step,  # from a row of the list to the next
    TRANSPOSED: tl.constexpr,  # M are classes and K tokens; not the other way
    FIRST: tl.constexpr,  # whether nothing has been summed before
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
    for work in tl.range(
        tl.program_id(0), rows * columns, tl.num_programs(0), flatten=STAY
    ):
        tile, column = _place(work, rows, columns, GROUP)
        row = tile * TILE_M
        column *= TILE_N
        end = K
        ours = list_ptr
        if list_ptr is not None:
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

        if list_ptr is None or FIRST or c_desc is not None:
            _keep_product(
                sums,
                row,
                column,
                c_desc,
                high_desc,
                low_desc,
                scale_ptr,
                FIRST,
            )
        else:
            # If there is nothing to add, the sums stay as they are.
            if end > 0:
                _keep_product(
                    sums,
                    row,
                    column,
                    c_desc,
                    high_desc,
                    low_desc,
                    scale_ptr,
                    FIRST,
                )


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


# %%

# %%


@dataclasses.dataclass(frozen=True)
class Options:
    ignore: int = -100  # the target that does not count
    reduction: str = "mean"
    smooth: float = 0.0  # label smoothing
    recompute: bool = False  # whether dw computes the logits again
    skip_below: float = 0.0  # gradients that are left out, in whole blocks
    chunk: int = 0  # tokens of a chunk; 0: as many as the rule says


BLOCK = 64  # tokens and classes that are left out together
TOKENS = 4096  # of a chunk, at least, where dw is summed up

TILES = {
    # precision: rows, columns, numbers of a step, warps
    "16 bits": (128, 256, 64, 8),
    "short sums": (128, 128, 64, 4),
    "tf32": (128, 128, 32, 8),
    "ieee": (64, 64, 16, 4),
    "before H100": (64, 64, 32, 4),
}


def plan(dtype, length, room, blocks=False, short=False):
    """Tiles of a product: ``room`` is how many bytes of shared memory each
    number of half a tile needs behind the loop."""
    precision = "16 bits"
    if dtype == torch.float32:
        precision = "ieee"
        # PyTorch's switch: whether Tensor Cores may cut float32.
        if torch.backends.cuda.matmul.fp32_precision == "tf32":
            precision = "tf32"
    tiles = precision
    if precision == "16 bits" and short and length < 2048:
        tiles = "short sums"
    if precision != "ieee" and SHARED < 200_000:
        tiles = "before H100"
    tile_m, tile_n, tile_k, warps = TILES[tiles]
    stage = (tile_m + tile_n) * tile_k * dtype.itemsize
    left = SHARED - 1024 - tile_m * tile_n // 2 * room
    stages = 4
    if tiles == "short sums":
        stages = 3  # two programs share an SM
    return {
        "TILE_M": tile_m,
        "TILE_N": tile_n,
        "TILE_K": tile_k,
        "GROUP": 8,
        "STAGES": max(1, min(stages, left // stage)),
        "STAY": tiles != "short sums" and not blocks,
        "PRECISION": "tf32" if precision == "tf32" else "ieee",
        "num_warps": warps,
    }


def descriptor(t, rows, columns):
    return TensorDescriptor.from_tensor(t, [rows, columns])


def programs_of(M, N, tiles):
    count = triton.cdiv(M, tiles["TILE_M"]) * triton.cdiv(N, tiles["TILE_N"])
    if tiles["STAY"]:
        count = min(count, NUM_SMS)
    return (count,)


def plan_scores(x, blocks=False):
    return plan(x.dtype, x.shape[1], x.itemsize, blocks, short=True)


def scores(x, w, bias, weight, options, powers, parts):
    """The first visit: parts of logsumexp, and the powers, if there is a
    matrix to keep them."""
    tokens, features = x.shape
    classes = w.shape[0]
    tiles = plan_scores(x)
    powers_desc = None
    if powers is not None:
        powers_desc = descriptor(
            powers, tiles["TILE_M"], tiles["TILE_N"] // 2
        )
    _scores[programs_of(tokens, classes, tiles)](
        x_desc=descriptor(x, tiles["TILE_M"], tiles["TILE_K"]),
        w_desc=descriptor(w, tiles["TILE_N"], tiles["TILE_K"]),
        out_desc=powers_desc,
        parts_ptr=parts,
        rows_ptr=None,
        target_ptr=None,
        bias_ptr=bias,
        weight_ptr=weight,
        flags_ptr=None,
        tokens=tokens,
        classes=classes,
        features=features,
        first_class=0,
        batch=0,
        flags_step=0,
        SMOOTH=options.smooth > 0,
        KNOWN=False,
        BLOCK=BLOCK,
        **tiles,
    )


def scores_again(x, w, bias, weight, options, grads, rows, target, first, flags):
    """The second visit: gradients of the logits of some classes."""
    tokens, features = x.shape
    classes = w.shape[0]
    tiles = plan_scores(x, flags is not None)
    _scores[programs_of(tokens, classes, tiles)](
        x_desc=descriptor(x, tiles["TILE_M"], tiles["TILE_K"]),
        w_desc=descriptor(w, tiles["TILE_N"], tiles["TILE_K"]),
        out_desc=descriptor(grads, tiles["TILE_M"], tiles["TILE_N"] // 2),
        parts_ptr=None,
        rows_ptr=rows,
        target_ptr=target,
        bias_ptr=bias,
        weight_ptr=weight,
        flags_ptr=flags,
        tokens=tokens,
        classes=classes,
        features=features,
        first_class=first,
        batch=rows.stride(0),
        flags_step=0 if flags is None else flags.stride(0),
        SMOOTH=options.smooth > 0,
        KNOWN=True,
        BLOCK=BLOCK,
        **tiles,
    )


def finish(parts, x, w, bias, weight, all_weights, target, rows, options):
    """Put the parts together: six numbers of each token."""
    tokens, features = x.shape
    tile_n = plan_scores(x)["TILE_N"]
    _finish[(triton.cdiv(tokens, 16),)](
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


def in_place(grads, parts, x, rows, target, weight, flags, options):
    """Make gradients of the powers."""
    tokens, classes = grads.shape
    tile_n = plan_scores(x)["TILE_N"]
    width = min(2 * BLOCK, tile_n)  # of one part
    _in_place[(triton.cdiv(tokens, BLOCK) * triton.cdiv(classes, width),)](
        grads_desc=descriptor(grads, BLOCK, width),
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
        num_warps=4,
    )


def blocks_wanted(flags, tile, transposed):
    """For each row of tiles the numbers of the blocks that its product needs,
    those first, and how many they are."""
    if transposed:
        flags = flags.T
    blocks = tile // BLOCK
    rows = triton.cdiv(flags.shape[0], blocks)
    flags = F.pad(flags, (0, 0, 0, rows * blocks - flags.shape[0]))
    wanted = flags.view(rows, blocks, -1).amax(dim=1)
    order = wanted.argsort(dim=1, descending=True, stable=True)
    return order.int(), wanted.sum(dim=1, dtype=torch.int32)


def times(
    grads, b, out, transposed, sums=None, first=True, scale=None, flags=None
):
    """out = grads @ b, or grads.T @ b, and what was summed before if it is
    not the first; out is None if it is not the last. ``sums`` are the upper
    and the lower halves."""
    K, M = grads.shape if transposed else grads.shape[::-1]
    N = b.shape[1]
    high, low = sums or (None, None)
    room = grads.itemsize if sums is None else 4
    tiles = plan(grads.dtype, K, room, blocks=flags is not None)
    tile_m, tile_n, tile_k = tiles["TILE_M"], tiles["TILE_N"], tiles["TILE_K"]
    grads_tile = (tile_k, tile_m) if transposed else (tile_m, tile_k)
    order, count = None, None
    if flags is not None:
        order, count = blocks_wanted(flags, tile_m, transposed)
        # The number of a block is loaded two steps before its tiles are.
        tiles["STAGES"] += 2
    half = tile_m, tile_n // 2
    _times[programs_of(M, N, tiles)](
        grads_desc=descriptor(grads, *grads_tile),
        b_desc=descriptor(b, tile_k, tile_n),
        c_desc=None if out is None else descriptor(out, *half),
        high_desc=None if high is None else descriptor(high, *half),
        low_desc=None if low is None else descriptor(low, *half),
        scale_ptr=scale,
        list_ptr=order,
        count_ptr=count,
        M=M,
        N=N,
        K=K,
        list_step=0 if order is None else order.stride(0),
        TRANSPOSED=transposed,
        FIRST=first,
        BLOCK=BLOCK,
        **tiles,
    )


def sum_columns(grads, sums, first):
    """Add the columns of the gradients to the sums."""
    tokens, classes = grads.shape
    _sum_columns[(triton.cdiv(classes, 64),)](
        grads_desc=descriptor(grads, 64, 64),
        sums_ptr=sums,
        tokens=tokens,
        classes=classes,
        FIRST=first,
        ROWS=64,
        WIDTH=64,
        num_warps=4,
    )


# %%


def one_round(features, dtype):
    """So many rows, in whole tiles, give work to all SMs in a product with so
    many columns."""
    tiles = plan(dtype, features, dtype.itemsize)
    columns = triton.cdiv(features, tiles["TILE_N"])
    return tiles["TILE_M"] * max(1, NUM_SMS // columns)


def strip_of(features, dtype):
    """Classes of a strip."""
    most = min(one_round(features, dtype), 2 * TOKENS)
    return triton.cdiv(most, 2 * BLOCK) * 2 * BLOCK


def in_halves(dw, low):
    """Where float32 sums of dw are: all of them, or their two halves."""
    if low is None:
        return dw, None
    return dw.view(torch.int16), low


def chunk_of(tokens, features, dtype, summed):
    """Tokens of a chunk. All chunks are about as long."""
    most = one_round(features, dtype)
    if summed:
        most *= triton.cdiv(TOKENS, most)
    most = min(most, 2 * TOKENS)
    length = triton.cdiv(tokens, triton.cdiv(tokens, most))
    step = 2 * BLOCK
    return triton.cdiv(length, step) * step


class Step:
    """What a forward pass has computed for the backward pass."""

    rows = None  # (6, tokens): see _finish
    dx = None  # but for the factor that arrives, of each token
    db = None  # (classes,): sums of the gradients of logits, float32
    dw = None  # sums so far: their upper halves, or all
    low = None  # the lower halves
    grads = None  # gradients of the last chunk's logits, for dw
    first = 0  # the first token of the last chunk
    flags = None  # which blocks are wanted


def forward(x, w, bias, weight, target, options, wants):
    """The numbers of each token, and what ``wants`` says of dx, dw, db."""
    wants_dx, wants_dw, wants_db = wants
    tokens, features = x.shape
    classes = w.shape[0]
    like = {"dtype": x.dtype, "device": x.device}
    summed = wants_dw and not options.recompute
    step = Step()
    step.rows = torch.empty(6, tokens, device=x.device)
    if tokens == 0:
        return step
    all_weights = None
    if weight is not None:
        all_weights = weight.sum(dtype=torch.float32)
    chunk = min(
        options.chunk or chunk_of(tokens, features, x.dtype, summed), tokens
    )
    columns = triton.cdiv(classes, plan_scores(x)["TILE_N"])
    kinds = 3 if options.smooth > 0 else 2
    parts = torch.empty(kinds * columns * chunk, device=x.device)
    grads = None
    summed_db = wants_db and not options.recompute
    if wants_dx or summed or summed_db:
        grads = padded(chunk, classes, **like)
    if wants_dx:
        step.dx = padded(tokens, features, **like)
    if summed_db:
        step.db = torch.empty(classes, device=x.device)
    if options.skip_below > 0 and grads is not None:
        step.flags = torch.empty(
            triton.cdiv(tokens, BLOCK),
            triton.cdiv(classes, BLOCK),
            dtype=torch.int8,
            device=x.device,
        )
    sums = None
    if summed and chunk < tokens:
        step.dw = padded(classes, features, **like)
        if x.itemsize == 2:
            step.low = padded(classes, features, torch.int16, x.device)
        sums = in_halves(step.dw, step.low)

    for start in range(0, tokens, chunk):
        some = slice(start, min(start + chunk, tokens))
        x_some, target_some = x[some], target[some]
        rows = step.rows[:, some]
        grads_some = None if grads is None else grads[: len(x_some)]
        scores(x_some, w, bias, weight, options, grads_some, parts)
        finish(
            parts, x_some, w, bias, weight, all_weights, target_some, rows,
            options,
        )  # fmt: skip
        if grads is None:
            continue
        flags = None
        if step.flags is not None:
            flags = step.flags[
                start // BLOCK : triton.cdiv(some.stop, BLOCK)
            ]
        in_place(
            grads_some, parts, x_some, rows, target_some, weight, flags,
            options,
        )  # fmt: skip
        if wants_dx:
            times(grads_some, w, step.dx[some], False, flags=flags)
        if summed_db:
            sum_columns(grads_some, step.db, first=start == 0)
        if summed and some.stop < tokens:
            times(
                grads_some, x_some, None, True, sums, start == 0, flags=flags
            )
        step.first = start
    if summed:
        step.grads = grads[: tokens - step.first]
    return step


def last_of_dw(step, x, w, scale):
    """dw: the sums so far, and those of the last chunk."""
    dw = step.dw
    sums = None
    if dw is None:
        dw = padded(*w.shape, dtype=x.dtype, device=x.device)
    else:
        sums = in_halves(dw, step.low)
    flags = step.flags
    if flags is not None:
        flags = flags[step.first // BLOCK :]
    times(
        step.grads, x[step.first :], dw, True, sums, sums is None, scale,
        flags,
    )  # fmt: skip
    return dw


def in_strips(
    x, w, bias, weight, target, rows, flags, options, scale, wants
):
    """dw and db, some classes after the other: their logits are computed
    again, and nothing has to be summed up over chunks."""
    tokens, features = x.shape
    classes = w.shape[0]
    like = {"dtype": x.dtype, "device": x.device}
    dw = padded(classes, features, **like) if wants[1] else None
    db = torch.empty(classes, device=x.device) if wants[2] else None
    strip = min(strip_of(features, x.dtype), classes)
    grads = padded(tokens, strip, **like)
    for start in range(0, classes, strip):
        some = slice(start, min(start + strip, classes))
        grads_some = grads[:, : some.stop - start]
        flags_some = None
        if flags is not None:
            last = triton.cdiv(some.stop, BLOCK)
            flags_some = flags[:, start // BLOCK : last]
        scores_again(
            x,
            w[some],
            None if bias is None else bias[some],
            None if weight is None else weight[some],
            options,
            grads_some,
            rows,
            target,
            start,
            flags_some,
        )
        if wants[1]:
            times(
                grads_some, x, dw[some], True, scale=scale, flags=flags_some
            )
        if wants[2]:
            sum_columns(grads_some, db[some], first=True)
    return dw, db


# %%


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, bias, target, weight, options):
        wants = ctx.needs_input_grad[:3]
        if options.reduction == "none":
            # The factor of each token, which dw needs, is not known yet.
            options = dataclasses.replace(options, recompute=True)
        step = forward(x, w, bias, weight, target, options, wants)
        ctx.step = step
        ctx.options = options
        ctx.save_for_backward(x, w, bias, target, weight, step.rows)
        losses, weights = step.rows[0], step.rows[1]
        if options.reduction == "none":
            return losses.to(x.dtype)
        loss = losses.sum()
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
            grads = [torch.zeros_like(t) if want else None for t, want in given]
            return *grads, None, None, None
        options = ctx.options
        step = ctx.step
        ctx.step = None
        if step is None:
            # This is not the first backward pass, and the first has taken
            # what the forward pass had computed.
            step = forward(x, w, bias, weight, target, options, wants)

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
        dw, db = None, None
        if options.recompute:
            if wants[1] or wants[2]:
                dw, db = in_strips(
                    x, w, bias, weight, target, rows, step.flags, options,
                    scale, wants,
                )  # fmt: skip
        else:
            if wants[1]:
                dw = last_of_dw(step, x, w, scale)
            db = step.db
        if wants[1]:
            dw = dw.contiguous()
        if wants[2]:
            if scale is not None:
                db = db * scale
            db = db.to(bias.dtype)
        return dx, dw, db, None, None, None


def for_descriptors(t):
    """The matrix, or a copy of it in a layout that a descriptor takes."""
    if lies_in_rows(t):
        return t
    return padded(*t.shape, dtype=t.dtype, device=t.device).copy_(t)


def check_arguments(
    input,
    linear_weight,
    target,
    linear_bias,
    weight,
    reduction,
    ignore_index,
    label_smoothing,
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
    if not ON_GPU:
        wrong = (target != ignore_index) & (
            (target < 0) | (target >= classes)
        )
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
    of linear_weight, which takes longer and needs less memory. Blocks of
    logits whose gradients are all below skip_below, as a share of the weight
    of their token, add nothing to the gradients.
    """
    check_arguments(
        input, linear_weight, target, linear_bias, weight, reduction,
        ignore_index, label_smoothing, skip_below,
    )  # fmt: skip
    dtype = input.dtype
    x, w, bias = input.reshape(-1, input.shape[-1]), linear_weight, linear_bias
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
        for_descriptors(x),
        for_descriptors(w),
        None if bias is None else bias.contiguous(),
        target.reshape(-1).contiguous(),
        None if weight is None else weight.contiguous(),
        options,
    ).to(dtype)
    if reduction == "none":
        loss = loss.reshape(target.shape)
    return loss
