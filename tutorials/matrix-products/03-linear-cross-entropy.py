r"""
A loss without its logits
=========================

How does a model get its loss and its gradients when the matrix of its logits
is larger than everything else?
It computes a few logits at a time, and keeps one number of each token beside
the gradients.

.. math:: z_{tj} = b_j + \sum_k x_{tk} w_{jk}, \qquad
   \text{loss}_t = \log \sum_j e^{z_{tj}} - z_{t,\text{target}}

The last layer of a language model is a linear layer with a row of weights for
each token of its vocabulary. It makes the *logits*, and cross-entropy makes
the loss of them. PyTorch writes all logits to memory, and several matrices of
the same size after them. For 32768 tokens and the vocabulary of Llama 3, one
such matrix takes 8.4 GB.
On this page we write a function that computes the layer and the loss together,
in both passes, so that this matrix never exists.

**What you will learn**

- What the logits cost, in bytes and in time.
- How to get the loss in the epilogue of a product, so that no logit is
  written.
- What three products cost that need gigabytes for sums, what four cost that
  need none, and why you cannot have the best of both.
- Why a sum that goes on from chunk to chunk is kept in float32, what that
  costs, and how its result has the same bits each time.
- What may be left out because it is too small to matter, how small that is,
  and who would notice.

**What you need:** `A linear layer, both passes <01-linear.html>`_ for products
by tensor descriptors, and `Cross-entropy over a vocabulary
<../norms-and-losses/04-cross-entropy.html>`_ for the loss and its gradient.
You don't need a GPU.
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
from importlib.util import find_spec

from triton.tools.tensor_descriptor import TensorDescriptor

# %%
# Two tokens, four classes
# ------------------------
#
# What has to be known of a token before its gradient can be computed?
#
# Like PyTorch, we call the tokens of the vocabulary *classes*, because the
# word token is taken: a *token* is a row of ``x`` here. Let's take two tokens
# with two features each, and four classes. The *target* of a token is the
# class that is right for it: 1 for the first token, and 3 for the second.

x = torch.tensor([[1.0, 2.0], [0.0, 1.0]], requires_grad=True)
w = torch.tensor(
    [[2.0, 0.0], [0.0, 1.0], [1.0, -1.0], [-1.0, 0.5]], requires_grad=True
)
target = torch.tensor([1, 3])

z = (x @ w.T).detach()
print("logits of the first token:", z[0].tolist())
print("logits of the second token:", z[1].tolist())

# %%
# Now we pretend that only two classes fit on the chip at a time. Of each such
# *tile* we keep two numbers a token: the largest logit ``m``, and the sum
# ``s`` of all powers :math:`e^{z - m}`. Two tiles are put together as in
# `Cross-entropy over a vocabulary
# <../norms-and-losses/04-cross-entropy.html>`_: where the maximum of a tile is
# not the largest one, its sum is made smaller by the power of the difference.

parts = []
for tile in (z[:, :2], z[:, 2:]):
    m = tile.max(dim=1).values
    s = (tile - m[:, None]).exp().sum(dim=1)
    parts.append((m, s))
    print("a tile: m =", m.tolist(), "s =", [round(i, 3) for i in s.tolist()])

(m1, s1), (m2, s2) = parts
m = torch.maximum(m1, m2)
lse = m + torch.log(s1 * (m1 - m).exp() + s2 * (m2 - m).exp())
loss = lse - z.gather(1, target[:, None])[:, 0]
print("losses:", [round(i, 3) for i in loss.tolist()])

# %%
# So the loss needs no logit but that of the target. The gradient of the logits
# is the softmax, minus 1 at the target. For that we need the logits once more,
# and one number a token: ``lse``, which is short for *logsumexp*. Then two
# products make the gradients of ``x`` and ``w`` from it.

dz = (z - lse[:, None]).exp() - F.one_hot(target, 4)
dx = dz @ w.detach()
dw = dz.T @ x.detach()
F.cross_entropy(x @ w.T, target, reduction="sum").backward()
rounded = [round(i, 3) for i in dz[0].tolist()]
print("gradient of the logits of the first token:", rounded)
assert torch.allclose(x.grad, dx) and torch.allclose(w.grad, dw)

# %%
# There is the difficulty. A gradient of a logit needs ``lse``, and ``lse``
# needs all logits of the token. So either we keep the logits of a token until
# the last one is there, or we compute them twice.
#
# What do the logits cost?
# ------------------------
#
# We count for 32768 tokens with 4096 features, and 128256 classes. ``x`` and
# its gradient take 0.27 GB each, and ``w`` and its gradient 1.05 GB each.
#
# If all logits are stored, matrices of this size are read and written so
# often:
#
# - The first product writes the logits.
# - The loss reads them, and writes the logarithm of the softmax.
# - The backward pass fills a matrix with the gradient of that logarithm, which
#   is one number a row and zeros.
# - It reads both, and writes the gradient of the logits.
# - The product for ``dx`` reads this gradient, and that for ``dw`` does, too.
#
# That makes nine reads and writes of a whole matrix. We call each of them a
# *pass* over the logits.

TOKENS, FEATURES, CLASSES = 32768, 4096, 128256
matrix = TOKENS * CLASSES * 2 / 1e9  # GB
product = 2 * TOKENS * FEATURES * CLASSES / 1e12  # TFLOP
print(f"a matrix of logits: {matrix:.1f} GB")
print(f"nine passes: {9 * matrix:.0f} GB, {9 * matrix / 4.8:.0f} ms")
print(f"a product: {product:.1f} TFLOP, {product / 0.75:.0f} ms")
print(f"three products: {3 * product / 0.75:.0f} ms")

# %%
# An H200 moves 4.8 TB in a second, and cuBLAS does about 750 TFLOP/s on it.
# So the products take most of the time, and the reads and writes a tenth of
# it. The memory is another matter: three of these matrices exist at a time in
# the backward pass, the logarithm of the softmax, its gradient, and the
# gradient of the logits. That is 25 GB, where the gradients that we want have
# 1.3 GB.
#
# How few may exist?
# ------------------
#
# Let's think about designs before we write one. We only count what has to be
# there beside ``dx`` and ``dw``.
#
# **Chunks of tokens.** Take 4096 tokens at a time, or 1024. Compute their
# logits, make gradients of them in place, and multiply. That is Exercise 2 of
# `Cross-entropy over a vocabulary
# <../norms-and-losses/04-cross-entropy.html>`_, and what `Liger
# <https://github.com/linkedin/Liger-Kernel>`_ does. ``dx`` of a chunk is done
# then. But ``dw`` is a sum over all tokens, so each chunk adds to it, and sums
# belong in float32: 2.1 GB that are read and written for each chunk.
#
# **Chunks of classes.** Take 1024 classes at a time, for all tokens: a *strip*
# of the matrix. Now ``dw`` of a strip is a single product, with nothing to add
# to. But no token knows its ``lse`` before the last class has come. So there
# must be a round before, in which all logits are computed once already: four
# products in place of three. This first round can take chunks of tokens, as
# above, and make their ``dx``. Then nothing has to be summed up over chunks.
# As it takes chunks of tokens first and of classes later, we call this design
# *chunks of both*.
#
# **No logits at all.** As in `Attention without its matrix
# <../attention/01-attention.html>`_, a tile of logits could stay in registers
# and be multiplied at once. In one kernel each program has some tokens and
# adds up their ``dx``; in another one it has some classes and adds up their
# ``dw``. Both compute the logits again, so with those of the loss there are
# five products. Attention does it, with 128 numbers in a head. A token has
# 4096 features: the sums of 128 tokens take 2 MB, eight times the registers of
# an SM. They would have to be fetched and stored for each tile of classes.
# `Cut Cross-Entropy <https://github.com/apple/ml-cross-entropy>`_ comes close
# to this design: one kernel makes both gradients, so it has only four
# products, and it adds each of them to ``dx`` and ``dw`` in memory, tile by
# tile.

# %%

# Drawing: the matrix of logits, in chunks of tokens and in strips of classes.

figure = plt.figure(
    "The matrix of logits twice. A chunk of tokens is a few whole rows, with "
    "all of dx of these tokens and a part of dw. A strip of classes is a few "
    "whole columns, with all of dw of these classes and a part of dx",
    figsize=(7.5, 2.6),
)
for axes, (title, chunk, row_label, column_label) in zip(
    figure.subplots(1, 2),
    (
        ("chunks of tokens", (0, 1, 8, 1), "all of dx", "a part of dw"),
        ("strips of classes", (2, 0, 1, 4), "a part of dx", "all of dw"),
    ),
    strict=True,
):
    axes.add_patch(
        plt.Rectangle((0, 0), 8, 4, facecolor="none", edgecolor="gray")
    )
    x0, y0, width, height = chunk
    axes.add_patch(
        plt.Rectangle((x0, y0), width, height, facecolor="C0", alpha=0.6)
    )
    axes.set_title(title)
    axes.text(8.2, y0 + height / 2, row_label, ha="left", va="center")
    axes.text(x0 + width / 2, -0.25, column_label, ha="center", va="top")
    axes.text(-0.2, 2, "tokens", ha="right", va="center", rotation=90)
    axes.axis((-1, 11.6, -1.1, 4.3))
    axes.axis("off")
plt.show()

# %%
# Let's count the operations and the bytes of all these designs.

# Without any logits: each tile of 128 by 128 of them fetches and stores the
# sums of 128 tokens, and those of 128 classes in the other kernel.
tiles = (TOKENS / 128) * (CLASSES / 128)
sums = 2 * 128 * FEATURES * 4  # bytes, of one kernel
no_logits = 2 * tiles * sums / 1e9  # GB

# In chunks, logits or gradients are written or read five times (written, read
# and written again, read by two products), and six times if there are chunks
# of both. The sums of dw are 2.1 GB, read and written.
for name, products, gigabytes in (
    ("whole logits", 3, 9 * matrix),
    ("chunks of 1024 tokens", 3, 5 * matrix + 32 * 4.2),
    ("chunks of 4096 tokens", 3, 5 * matrix + 8 * 4.2),
    ("chunks of both", 4, 6 * matrix),
    ("no logits at all", 5, no_logits),
):
    print(
        f"{name:22}: {products} products, {products * product / 0.75:3.0f} "
        f"ms, and {gigabytes:5.0f} GB, {gigabytes / 4.8:3.0f} ms"
    )

# %%
# Part of the bytes move while Tensor Cores multiply, so the two times need
# not be added up. By this count chunks of 4096 tokens move as many bytes as
# whole logits do: what they save in reads and writes of logits they pay for
# sums. The last design is out, unless most tiles can be left out. We come back
# to that.
#
# Between the others there is a real choice. Chunks of tokens need memory for
# sums, and chunks of both need a fourth product, which takes 46 ms. Can we
# have three products and no sums? With three products each logit is computed
# once. So it has to be kept until ``lse`` of its token is known, together with
# all other logits of this token. That makes chunks of tokens, and then ``dw``
# is a sum over chunks. So we cannot have both: whoever computes three products
# pays for sums.
#
# We build both. By default our function computes three products, because most
# people who train want time first, and have some gigabytes.
# ``recompute=True`` computes four.
#
# A loss, and no logit is written
# -------------------------------
#
# We begin with the loss alone.
#
# The kernel is the product of `A linear layer, both passes <01-linear.html>`_:
# persistent programs, tiles by descriptors, and a loop over the features.
# Behind the loop stand 128 × 256 logits in registers. There the page of the
# linear layer adds a bias and applies an activation. We compute ``m`` and
# ``s`` of each token, and store these two numbers. So of 256 logits two
# numbers are left, and the matrix of all parts is 64 times smaller than the
# logits in 16 bits would be.

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
# A GPU has an instruction for powers of 2, and none for powers of :math:`e`.
# So we multiply each exponent by ``LOG2E`` and take a power of 2. And a
# maximum begins with the lowest finite number, because minus infinity minus
# itself is not a number.

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


# %%

# Scaffold: weights of classes, and halves of a tile.


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


# %%
# Label smoothing, which PyTorch's loss can have, needs the sum of all logits
# of a token, each times the weight of its class. That is a third number to
# keep. And if somebody wants the powers themselves, they are stored as well.
# We need that for gradients, and ``None`` in place of a descriptor leaves it
# out.


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
        row, column = _place(work, rows, columns, GROUP)
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
            power = tl.exp2((logit - maximum[:, None]) * LOG2E)
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


# %%
# A second kernel puts the parts together. With 128256 classes there are 501
# parts for each token, so this is little work. The kernel also computes the
# one logit that the loss needs, that of the target: a row of ``x`` times a row
# of ``w``.
#
# The gradient of the logit of class :math:`j` is :math:`p \, y_j - e \, v_j`,
# and :math:`a` less if it is the target. Here :math:`y` is the softmax, and
# :math:`v` has the weights of the classes. The three factors follow from label
# smoothing and class weights as on `Cross-entropy over a vocabulary
# <../norms-and-losses/04-cross-entropy.html>`_: without both, :math:`p` and
# :math:`a` are 1, and :math:`e` is 0. We store them with ``lse``, so that
# nobody has to look them up again.
#
# A token whose target is ``ignore_index`` counts for nothing. A target that is
# no class at all is a mistake. Its loss and its gradients become NaN, so that
# nobody overlooks it.


@triton.jit
def _finish(
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
        power = tl.exp2((part_m - new[None, :]) * LOG2E)
        # What was summed so far is relative to an older maximum.
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


# %%
# On the host we need tiles. They are those of a linear layer: 128 × 256 sums
# for inputs in 16 bits. Only the groups have 16 rows of tiles in place of 8,
# which was a little faster when we tried it.

# %%

# Scaffold: options, and the tiles of a product.


@dataclasses.dataclass(frozen=True)
class Options:
    ignore: int = -100  # the target that does not count
    reduction: str = "mean"
    smooth: float = 0.0  # label smoothing
    recompute: bool = False  # whether dw computes the logits again
    skip_below: float = 0.0  # gradients that are left out, in whole blocks
    chunk: int = 0  # tokens of a chunk; 0: as many as the rule says


TILES = {
    # precision: rows, columns, numbers of a step, warps
    "16 bits": (128, 256, 64, 8),
    "tf32": (128, 128, 32, 8),
    "ieee": (64, 64, 16, 4),
    "before H100": (64, 64, 32, 4),
}


def plan(dtype, room, blocks=False):
    """Tiles of a product: ``room`` is how many bytes of shared memory each
    number of half a tile needs behind the loop."""
    precision = "16 bits"
    if dtype == torch.float32:
        precision = "ieee"
        # PyTorch's switch: whether Tensor Cores may cut float32.
        if torch.backends.cuda.matmul.fp32_precision == "tf32":
            precision = "tf32"
    tiles = precision
    if precision != "ieee" and SHARED < 200_000:
        tiles = "before H100"
    tile_m, tile_n, tile_k, warps = TILES[tiles]
    stage = (tile_m + tile_n) * tile_k * dtype.itemsize
    left = SHARED - 1024 - tile_m * tile_n // 2 * room
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


def descriptor(t, rows, columns):
    return TensorDescriptor.from_tensor(t, [rows, columns])


def programs_of(M, N, tiles):
    count = triton.cdiv(M, tiles["TILE_M"]) * triton.cdiv(N, tiles["TILE_N"])
    if tiles["STAY"]:
        count = min(count, NUM_SMS)
    return (count,)


# %%

# Scaffold: both kernels, launched.


def plan_scores(x):
    return plan(x.dtype, x.itemsize)


def scores(x, w, bias, weight, options, powers, parts):
    """Parts of logsumexp, and the powers, if there is a matrix for them."""
    tokens, features = x.shape
    classes = w.shape[0]
    tiles = plan_scores(x)
    half = tiles["TILE_M"], tiles["TILE_N"] // 2
    _scores[programs_of(tokens, classes, tiles)](
        x_desc=descriptor(x, tiles["TILE_M"], tiles["TILE_K"]),
        w_desc=descriptor(w, tiles["TILE_N"], tiles["TILE_K"]),
        powers_desc=None if powers is None else descriptor(powers, *half),
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


# %%
# The parts of a chunk of tokens are put together before the next chunk comes,
# so they take little memory.


def losses(x, w, target, chunk=4096):
    """The loss of each token. No logit is written."""
    tokens = x.shape[0]
    classes = w.shape[0]
    rows = torch.empty(6, tokens, device=x.device)
    columns = triton.cdiv(classes, plan_scores(x)["TILE_N"])
    parts = torch.empty(2 * columns * min(chunk, tokens), device=x.device)
    for start in range(0, tokens, chunk):
        some = slice(start, start + chunk)
        scores(
            x[some],
            w,
            bias=None,
            weight=None,
            options=Options(),
            powers=None,
            parts=parts,
        )
        finish(
            parts,
            x[some],
            w,
            bias=None,
            weight=None,
            all_weights=None,
            target=target[some],
            rows=rows[:, some],
            options=Options(),
        )
    return rows[0]


torch.manual_seed(0)
x = torch.randn(70, 40, device=DEVICE).half()
w = torch.randn(300, 40, device=DEVICE).half()
target = torch.randint(300, (70,), device=DEVICE)
expected = F.cross_entropy(x.double() @ w.double().T, target, reduction="none")
error = (losses(x, w, target) - expected).abs().max()
print(f"largest error of a loss: {error:.1e}")
assert error < 1e-4

# %%
# How fast is the loss?
# ---------------------
#
# We compare with PyTorch, which writes the logits and the logarithm of their
# softmax, and with Cut Cross-Entropy, which writes no logits, either. The
# ceiling is cuBLAS with the product alone. Our unit is TFLOP/s: the operations
# of the product, divided by the time.
#
# Some libraries wait for the GPU in each call, so a CUDA graph cannot record
# them. A step takes milliseconds here, so we can do without: the GPU gets some
# work first, and while it is busy with that, Python launches what is measured.

# %%

# Scaffold: the clock of steps that take milliseconds.


def steps_in_turns(calls, times=7):
    """ms of each call on the GPU: median, 20% and 80% quantiles.

    ``calls`` are functions by their names, and take turns. Each begins when
    the GPU is busy, so that it does not wait for Python, and behind work that
    overwrites L2.
    """
    larger_than_l2 = torch.empty(2**29, dtype=torch.int8, device=DEVICE)
    elapsed = {name: [] for name in calls}
    for call in calls.values():
        call()  # compiles the kernels
    for _ in range(times):
        for name, call in calls.items():
            start = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            # Once untimed: how fast the clock of the GPU runs depends on what
            # ran before.
            call()
            torch.cuda.synchronize()
            for _ in range(16):
                larger_than_l2.zero_()  # 2 ms, all in all
            start.record()
            call()
            end.record()
            torch.cuda.synchronize()
            elapsed[name].append(start.elapsed_time(end))
    found = {}
    for name, each in elapsed.items():
        each.sort()
        found[name] = each[times // 2], each[times // 5], each[-1 - times // 5]
    return found


def tflops(operations, calls, times=7):
    """Name -> TFLOP/s: median, low, high. All calls take turns."""
    return {
        name: [operations / ms * 1e-9 for ms in (median, long, short)]
        for name, (median, short, long) in steps_in_turns(calls, times).items()
    }


# %%

# Scaffold: inputs, the others, and a table.


def inputs(tokens, features, classes, dtype=torch.bfloat16):
    """x, w and target. Logits have a size of 1."""
    torch.manual_seed(0)
    x = torch.randn(tokens, features, device=DEVICE, dtype=dtype)
    w = torch.randn(classes, features, device=DEVICE, dtype=dtype)
    w *= features**-0.5
    target = torch.randint(classes, (tokens,), device=DEVICE)
    return x.requires_grad_(), w.requires_grad_(), target


def pytorch(x, w, target):
    return F.cross_entropy(F.linear(x, w), target)


def cut_cross_entropy(x, w, target):
    from cut_cross_entropy import linear_cross_entropy

    return linear_cross_entropy(x, w, target)


def liger(x, w, target, accum_dtype=None):
    from liger_kernel.transformers.fused_linear_cross_entropy import (
        LigerFusedLinearCrossEntropyLoss,
    )

    loss = LigerFusedLinearCrossEntropyLoss(accum_dtype=accum_dtype)
    return loss(w, x, target)


OTHERS = {}
NAMES = {}
if find_spec("liger_kernel"):
    OTHERS["liger"] = liger
    OTHERS["liger float32"] = functools.partial(
        liger, accum_dtype=torch.float32
    )
    NAMES["liger"] = "Liger"
    NAMES["liger float32"] = "Liger, float32 sums"
if find_spec("cut_cross_entropy"):
    OTHERS["cce"] = cut_cross_entropy
    NAMES["cce"] = "Cut Cross-Entropy"
if hasattr(F, "linear_cross_entropy"):
    # In chunks, as PyTorch chooses them. Before 2.13 there is none.
    def pytorch_in_chunks(x, w, target):
        options = torch.nn.LinearCrossEntropyOptions()
        return F.linear_cross_entropy(x, w, target, options=options)

    OTHERS["torch chunks"] = pytorch_in_chunks
    NAMES["torch chunks"] = "PyTorch, chunks"


def in_percent(benchmark, of):
    """Draw a benchmark, and print each speed in % of that of a line."""
    table = benchmark.run(show_plots=ON_GPU, return_df=True)
    table = table.astype({"N": int}).set_index("N")
    table.columns = [column.split(" (")[0] for column in table.columns]
    if table.isna().all(axis=None):
        print("Timing needs a GPU; the page shows recorded figures.")
        return
    percent = 100 * table.div(table[of], axis="index").drop(columns=of)
    print(f"speed in % of {of}")
    print(percent.to_string(float_format="%.0f"))


# %%

# Scaffold: the loss alone, a benchmark.


@functools.cache  # all lines in turns; then each is asked for its own
def forward_speeds(tokens, features, classes, dtype):
    x, w, target = inputs(tokens, features, classes, dtype)
    x, w = x.detach(), w.detach()
    calls = {
        "triton": lambda: losses(x, w, target).mean(),
        "torch": lambda: pytorch(x, w, target),
        "cublas": lambda: x @ w.T,
    }
    if "cce" in OTHERS:
        calls["cce"] = lambda: cut_cross_entropy(x, w, target)
    return tflops(2 * tokens * features * classes, calls)


WHO_LOSES = {
    "triton": "Triton",
    "torch": "PyTorch",
    **{name: NAMES[name] for name in NAMES if name == "cce"},
    "cublas": "cuBLAS, the product alone",
}


def benchmark_of(plot_name, mode, sizes, lines, unit="TFLOP/s", **more):
    return triton.testing.Benchmark(
        x_names=["N"],
        x_vals=sizes,
        x_log=True,
        xlabel="N (tokens)",
        line_arg="provider",
        line_vals=list(lines),
        line_names=list(lines.values()),
        ylabel=unit,
        plot_name=plot_name,
        args={"dtype": torch.bfloat16, "mode": mode, **more},
    )


LARGE = {"features": 4096, "classes": 128256}


@triton.testing.perf_report(
    benchmark_of(
        "lce-forward", "forward", [2048, 8192, 32768], WHO_LOSES, **LARGE
    )
)
def bench_forward(N, features, classes, dtype, mode, provider):
    """All lines in turns, 7 times, by events of the GPU around a call that
    begins while it is busy."""
    if not ON_GPU:
        return 3 * [float("nan")]  # the interpreter cannot be timed
    return forward_speeds(N, features, classes, dtype)[provider]


# %%

in_percent(bench_forward, "cuBLAS, the product alone")

# %%
# **What the figure shows.**
# On the H200 our loss reaches 796 TFLOP/s at 2048 tokens, 704 at 8192 and 669
# at 32768. That is 102%, 98% and 97% of the product alone. PyTorch reaches
# 654, 613 and 605 TFLOP/s, and Cut Cross-Entropy 528, 521 and 541. The 3%
# that are missing with 32768 tokens may be noise: a card under this load
# changes its clock all the time. With more tokens it works for longer without
# a pause, and cuBLAS gets slower, too.
#
# **Why.**
# Behind each tile stand 32768 powers, but its product has 4096 multiplications
# for each of them, so they hardly count. Of 256 logits, two numbers are
# written. cuBLAS writes all logits, and PyTorch reads them after that and
# writes the logarithm of their softmax: 17 GB with 32768 tokens, which take
# 3.5 ms at 4.8 TB/s. The product alone takes 50 ms, and PyTorch needs 7 ms
# more, so it must move more than that, or move it slowly. Cut Cross-Entropy
# loads its tiles by pointers, and not by descriptors as we do. How much of its
# time that costs, our figure doesn't say.
#
# **What follows.**
# Whoever only wants the loss needs no memory for logits, and waits for a
# few percent more than the product at most.
#
# Keep powers, not logits
# -----------------------
#
# For a chunk of tokens we keep a matrix, because ``lse`` is not known yet.
# Should we keep its logits?
#
# In 16 bits that is a bad idea. A logit near 20 has steps of 0.125 in
# bfloat16, so it can be off by 0.0625, and its power is off by 6%. If we keep
# the power itself in bfloat16, relative to the largest one of its tile, it is
# off by 0.4% at most, whatever the logit was.

z = torch.tensor([20.06, 19.3, 12.7])
power = (z - z.max()).exp()
of_logits = (z.bfloat16().float() - z.max()).exp()
print("powers:              ", [f"{i:.5f}" for i in power.tolist()])
print("of logits in 16 bits:", [f"{i:.5f}" for i in of_logits.tolist()])
kept = power.bfloat16().float()
print("kept in 16 bits:     ", [f"{i:.5f}" for i in kept.tolist()])

# %%
# PyTorch rounds its logits to 16 bits, and so do libraries that keep them.
# Here it costs nothing to do better.
#
# So this is a chunk: ``scores`` stores the powers of each tile, relative to
# the tile's own maximum, ``finish`` computes ``lse`` of each token, and a
# third kernel goes over the matrix once and makes gradients of the powers. It
# multiplies each power by :math:`e^{m - lse}`, which is one number for each
# token and tile, and subtracts what belongs to the target and to label
# smoothing. Nobody else needs the powers, so it writes the gradients over
# them.


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


# %%
# The kernel can also find out which *blocks* of 64 tokens and 64 classes have
# only small gradients, and store a flag for each block. Why we want that comes
# later; until then ``flags_ptr`` is None, and so are the lists of blocks in
# the products.


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
    power *= tl.exp2((m - lse) * LOG2E)[:, None]

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


# %%
# Two products, and sums in float32
# ---------------------------------
#
# How exact must a sum be that goes on from chunk to chunk?
#
# ``dx`` of a chunk is a sum over classes, and a program has all of it: the
# sums stay in registers, in float32, and only the result is rounded. ``dw`` is
# a sum over tokens, and a chunk has only some of them. So each chunk has to
# add its part to what is in memory. Let's do that 100 times with a part of
# 0.003, in both types:

for dtype in (torch.bfloat16, torch.float32):
    total = torch.ones((), dtype=dtype)
    for _ in range(100):
        total += 0.003
    print(f"1 + 100 * 0.003 in {dtype}: {total:.4f}")

# %%
# Next to 1, numbers in bfloat16 are 0.0078 apart. A part of 0.003 is less than
# half of that, so each addition rounds back to 1, and all parts are lost. That
# is why all sums on this site are float32.
#
# They cost memory: 2.1 GB for ``dw`` of 128256 × 4096 numbers, where Liger by
# default adds up in the 1.05 GB of the result itself, and so does Cut
# Cross-Entropy. We will measure what each way costs, in memory and in error.
#
# One kernel computes both products, and only the layout differs, as on
# `A linear layer, both passes <01-linear.html>`_. ``ADD`` adds the product to
# what is there. No number is added atomically: in each chunk a tile of ``dw``
# belongs to one program, and chunks come one after the other. So the bits are
# the same in each run.


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
        tile, column = _place(work, rows, columns, GROUP)
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


# %%
# A bias has a gradient, too, the sum of each column. A small kernel adds up
# the columns of a chunk, if the bias wants a gradient.

# %%

# Scaffold: the sums of columns.


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

# Scaffold: these three kernels, launched.


BLOCK = 64  # tokens and classes that are left out together


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
        num_warps=8,
    )


def blocks_wanted(flags, dtype, transposed):
    """For each row of tiles the numbers of the blocks that its product needs,
    those first, and how many they are."""
    if flags is None:
        return None
    if transposed:
        flags = flags.T
    blocks = plan(dtype, 4, blocks=True)["TILE_M"] // BLOCK
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
    tiles = plan(grads.dtype, out.itemsize, blocks=lists is not None)
    tile_m, tile_n, tile_k = tiles["TILE_M"], tiles["TILE_N"], tiles["TILE_K"]
    grads_tile = (tile_k, tile_m) if transposed else (tile_m, tile_k)
    order, count = lists or (None, None)
    if lists is not None:
        # The number of a block is loaded two steps before its tiles are.
        tiles["STAGES"] += 2
    _multiply[programs_of(M, N, tiles)](
        grads_desc=descriptor(grads, *grads_tile),
        b_desc=descriptor(b, tile_k, tile_n),
        out_desc=descriptor(out, tile_m, tile_n // 4),
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
# How long is a chunk?
# --------------------
#
# A long chunk needs memory, and a short one needs time, for two reasons.
#
# - **Sums are read and written for each chunk.** With ``dw`` of 128256 × 4096
#   numbers these are 4.2 GB, which take 0.9 ms at 4.8 TB/s. The three products
#   of 4096 tokens take 17 ms at 750 TFLOP/s, those of 512 tokens only 2.2 ms.
# - **Few tokens make few tiles.** ``dx`` of a chunk has a tile of 128 × 256
#   for each 128 tokens and 256 features. With 4096 features and 1024 tokens
#   there are 128 tiles for the 132 SMs of an H200. With 768 features it takes
#   5632 tokens until there are as many tiles as SMs.
#
# And how much memory is cheap? A chunk of 4096 tokens and 128256 classes takes
# 1.05 GB. When the last chunk is done, its memory is free, and ``dw`` in 16
# bits comes, which takes as much. So up to this size a chunk costs no memory.
#
# Therefore a chunk has at most :math:`2^{29}` logits, which is 1.07 GB, unless
# it takes more to give work to all SMs. With 32000 classes and 768 features
# that is 16384 tokens. Such a chunk takes far more than the sums of ``dw``,
# which have 0.1 GB there, but it is still a third of what PyTorch takes. And
# where all tokens fit in one chunk there is nothing to sum up.
#
# Whoever chooses ``recompute=True``, which we come to, wants to save memory.
# Then a chunk has :math:`2^{24}` logits, or more if it takes more to give work
# to all SMs.


def one_round(features, dtype):
    """So many rows, in whole tiles, give work to all SMs in a product with so
    many columns."""
    tiles = plan(dtype, dtype.itemsize)
    columns = triton.cdiv(features, tiles["TILE_N"])
    return tiles["TILE_M"] * max(1, NUM_SMS // columns)


LOGITS = 2**29  # at most so many in a chunk: 1.07 GB in 16 bits
FEW_LOGITS = 2**24  # the same with recompute=True: 34 MB


def length_of(count, across, features, dtype, logits):
    """How many of ``count`` tokens are a chunk, if each has ``across`` logits;
    or how many classes are a strip. All are about as long."""
    most = max(logits // across, one_round(features, dtype))
    length = triton.cdiv(count, triton.cdiv(count, most))
    step = 2 * BLOCK
    return triton.cdiv(length, step) * step


for tokens, features, classes in (
    (32768, 4096, 128256),
    (5000, 4096, 128256),
    (16384, 768, 32000),
):
    chunk = length_of(tokens, classes, features, torch.bfloat16, LOGITS)
    print(f"{tokens} tokens, {classes} classes: chunks of {chunk}")

# %%
# What is kept for the backward pass?
# -----------------------------------
#
# The gradients have to be computed where the powers are, and that is in the
# forward pass. But the gradient ``g`` of the loss only arrives in the backward
# pass. Does that matter?
#
# Every gradient is proportional to ``g``. So the forward pass computes all of
# them for ``g`` = 1, and the backward pass multiplies. There are three
# subtleties:
#
# - The mean over 32768 tokens divides everything by 32768. In float16 such
#   small numbers lose their digits, and somebody who trains in float16 sends a
#   large ``g`` to make up for that. So we do not divide before ``g`` is there:
#   ``dw`` waits as sums in float32, is multiplied, and is rounded once.
# - If there is only one chunk, there is nothing to sum up. Then the gradients
#   of its logits wait, and the product for ``dw`` is left to the backward
#   pass, which multiplies by ``g`` and stores the result. No sums are needed.
# - With ``reduction="none"`` each token has a ``g`` of its own. Then ``dx`` of
#   a token can still be multiplied later, but ``dw`` is a sum over tokens, and
#   cannot. So for that we need the other design.
#
# ``forward`` goes through the chunks: ``scores``, ``finish``, ``in_place``,
# ``multiply`` for ``dx``, and if there are several also ``multiply`` for
# ``dw``.

# %%

# Scaffold: the forward pass with gradients.


class Step:
    """What a forward pass has computed for the backward pass."""

    rows = None  # (6, tokens): see _finish
    dx = None  # (tokens, features), for g = 1
    db = None  # (classes,), float32, for g = 1
    sums = None  # (classes, features), float32: dw for g = 1
    grads = None  # if there is one chunk: the gradients of its logits
    lists = None  # which blocks of them dw needs; None: all


def forward(x, w, bias, weight, target, options, wants):
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


# %%
# And this is what the backward pass does for ``dw``, with ``scale`` for ``g``,
# divided by the number of tokens if the reduction is a mean. Where there are
# sums, a small kernel multiplies them by ``scale`` and rounds them.


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
        sums_desc=descriptor(step.sums, 64, 64),
        dw_desc=descriptor(dw, 64, 64),
        scale_ptr=scale,
        features=features,
        ROWS=64,
        WIDTH=64,
        num_warps=4,
    )
    return dw


# %%
# Or compute the logits again
# ---------------------------
#
# What if two gigabytes for sums, and another one for a chunk, are too much?
#
# When the forward pass is over, ``lse`` of each token is known. From then on
# the gradient of any logit can be computed from a row of ``x`` and a row of
# ``w``, at any time and in any order. `A gate between two products
# <02-swiglu.html>`_ computes again what is cheap, and this is not cheap, but
# it needs no memory.
#
# So with ``recompute=True`` the forward pass computes ``lse`` and ``dx`` in
# chunks of tokens. They can be short now, because there are no sums of ``dw``.
# The backward pass takes strips: all tokens, and some of the classes. It
# computes the gradients of their logits once more, and multiplies. A strip of
# ``dw`` is done then, in one product and with one rounding. With 32768 tokens
# a strip has 1024 classes and takes 67 MB.
#
# The kernel, ``_scores_again``, has the loop of ``_scores`` and another
# epilogue, which knows ``lse`` and stores gradients.


# %%

# Scaffold: the logits again.


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
        row, column = _place(work, rows, columns, GROUP)
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
            power = tl.exp2((logit - lse[:, None]) * LOG2E)
            weight = _weights(weight_ptr, name, classes)
            grad = _gradient(power, p, a, e, target, name, weight, SMOOTH)
            grad = grad.to(grads_desc.dtype)
            grads_desc.store([row, column + i * width], grad)


# %%

# Scaffold: the logits again, launched.


def scores_again(x, w, bias, weight, options, grads, rows, target, first):
    """The gradients of the logits of some classes, now that lse is known."""
    tokens, features = x.shape
    classes = w.shape[0]
    tiles = plan_scores(x)
    _scores_again[programs_of(tokens, classes, tiles)](
        x_desc=descriptor(x, tiles["TILE_M"], tiles["TILE_K"]),
        w_desc=descriptor(w, tiles["TILE_N"], tiles["TILE_K"]),
        grads_desc=descriptor(grads, tiles["TILE_M"], tiles["TILE_N"] // 2),
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


# %%
# ``in_strips`` goes through the classes with it, and computes ``dw`` and the
# gradient of the bias. How wide a strip is follows from the same rule, with
# tokens and classes in each other's place.


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


# %%
# What is too small to matter?
# ----------------------------
#
# A trained model is sure about most tokens. Then nearly all of its gradients
# of logits are tiny. May we leave them out?
#
# Cut Cross-Entropy does so by default: it leaves out each tile whose gradients
# are all below :math:`2^{-12}` in bfloat16. What does a token lose? If all
# 128256 probabilities were the same, each would be 0.0000078, far below
# :math:`2^{-12} = 0.00024`. So nearly everything would be left out, and the
# gradient would consist of the targets.
#
# We want a threshold with a promise. Let :math:`u` be half the step from 1 to
# the next number of the 16-bit type: :math:`2^{-8}` for bfloat16. Whoever
# rounds a gradient to 16 bits makes it wrong by up to :math:`u` times itself.
# The probabilities of a token add up to 1, so these errors together come to
# about :math:`u`. If we leave out, of :math:`N` classes, those whose gradients
# are below :math:`u / N`, then a token loses at most
# :math:`N \cdot u / N = u`. So what is left out is no more than what rounding
# costs anyway.
#
# And what does a class lose? At most :math:`u / N` for each token, or about
# :math:`u / 4` in all with 32768 tokens and 128256 classes. Where a class is
# the target of a token, that is nothing beside this token's gradient. But a
# class that is nobody's target has only small gradients. They may all be left
# out, and then its gradient is 0 and not small. An optimizer like Adam divides
# each gradient by its usual size. So a small gradient moves a weight as far as
# a large one does, and a gradient of 0 doesn't move it. So we leave nothing
# out unless we are told to.


def unnoticed(dtype, classes):
    """Gradients of logits below this cost no more than rounding does."""
    return torch.finfo(dtype).eps / 2 / classes


print(f"for 128256 classes: {unnoticed(torch.bfloat16, 128256):.1e}")

# %%
# ``skip_below`` takes such a number. ``_in_place`` finds the blocks of 64
# tokens and 64 classes in which nothing is as large, and ``blocks_wanted``
# makes lists of all others, a list for each row of tiles of a product.
# ``_multiply`` then takes one block of its list after the other. What can
# never be left out is the first product, because nobody knows what is small
# before it has been computed. To keep the other design plain, ``skip_below``
# does not go with ``recompute=True``.
#
# Into autograd
# -------------
#
# The rest is bookkeeping. Three things are worth a look:
#
# - The first backward pass takes what the forward pass has left, so that its
#   memory is free afterwards. If somebody asks for a second backward pass with
#   ``retain_graph``, everything is computed again.
# - Where all tokens are ignored, the mean is 0 / 0: PyTorch returns NaN for
#   the loss, and gradients of 0, and so do we.
# - Under ``torch.no_grad()`` nobody wants gradients, but ``needs_input_grad``
#   still says that the weight does. So our function detaches its inputs there,
#   and computes the loss alone.

# %%

# Scaffold: the loss as a function of autograd.


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


# %%
# The function takes what PyTorch's ``F.linear_cross_entropy`` takes, which is
# new in version 2.13, for targets that are classes. It leaves out ``options``,
# which tell PyTorch how long chunks are and in which type they are added up.
# If ``ignore_index`` is None, it is -100, as PyTorch has it for such targets.
# A matrix whose rows do not begin at multiples of 16 bytes is copied first,
# and so is one that lies transposed.

# %%

# Scaffold: layouts, and which arguments are taken.


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


# %%


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
    check_arguments(
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


# %%
# Is it right? We compare each number with PyTorch in float64. What we allow is
# a share of the largest number of each result, because powers and gradients
# were rounded to 16 bits before they were multiplied.

# %%

# Scaffold: a check against float64.


def check(tokens, features, classes, dtype=torch.float16, **options):
    """The largest error of loss, dx, dw and db, compared with float64."""
    torch.manual_seed(0)
    x = torch.randn(tokens, features, device=DEVICE).to(dtype)
    w = torch.randn(classes, features, device=DEVICE) * features**-0.5
    bias = torch.randn(classes, device=DEVICE).to(dtype)
    target = torch.randint(classes, (tokens,), device=DEVICE)
    target[::5] = -100
    ours = [t.clone().requires_grad_() for t in (x, w.to(dtype), bias)]
    exact = [t.detach().double().requires_grad_() for t in ours]

    loss = linear_cross_entropy(
        ours[0], ours[1], target, linear_bias=ours[2], **options
    )
    g = torch.randn(loss.shape, device=DEVICE).to(dtype)
    loss.backward(g)
    kept = ("reduction", "label_smoothing")
    options = {name: options[name] for name in kept if name in options}
    expected = F.cross_entropy(F.linear(*exact), target, **options)
    expected.backward(g.double())

    pairs = [(loss, expected)]
    pairs += [(t.grad, e.grad) for t, e in zip(ours, exact, strict=True)]
    errors = [((t - e).abs().max() / e.abs().max()).item() for t, e in pairs]
    for name, error in zip(("loss", "dx", "dw", "db"), errors, strict=True):
        assert error < 0.01, f"{name} is off by {error:.1%}"
    print("errors below 1%:", " ".join(f"{error:.2%}" for error in errors))


# %%

check(tokens=70, features=40, classes=300)
check(tokens=150, features=77, classes=203, recompute=True)
check(tokens=70, features=40, classes=99, reduction="none")
check(70, 40, 99, torch.bfloat16, reduction="sum", label_smoothing=0.1)
check(70, 40, 300, skip_below=unnoticed(torch.float16, 300))

# %%
# How fast is a step?
# -------------------
#
# Now the loss and both gradients. We give everybody credit for three products,
# even if they compute four. PyTorch writes all logits, Liger takes chunks of
# tokens, with sums in bfloat16 by default and in float32 if it is told to, and
# Cut Cross-Entropy computes all logits again, but leaves out what it thinks is
# too small. ``torch.compile`` compiles once for each number of tokens, where
# other pages take the best of three. PyTorch's own ``F.linear_cross_entropy``
# is missing: it came with PyTorch 2.13, and the page was recorded with 2.11.
# The dashed line is cuBLAS with the three products alone.

# %%

# Scaffold: both passes, speed, memory and errors, five benchmarks.


def step_of(function, x, w, target):
    """Both passes, as a call."""
    return lambda: torch.autograd.grad(function(x, w, target), (x, w))


def recomputing(x, w, target):
    return linear_cross_entropy(x, w, target, recompute=True)


OURS = {"triton": linear_cross_entropy, "recompute": recomputing}
STEPS = {
    "triton": "Triton",
    "recompute": "recompute=True",
    "torch": "PyTorch",
    "torch.compile": "torch.compile",
    **NAMES,
    "cublas": "cuBLAS, products alone",
}
FUNCTIONS = OURS | {"torch": pytorch} | OTHERS


def memory_of(call):
    """The most GB that tensors of a call take at a time, beyond its inputs."""
    call()  # compiles
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 1e9


def compiled_anew(function):
    """A function of PyTorch, compiled once more: nothing is left of other
    numbers of tokens."""
    torch._dynamo.reset()
    return torch.compile(function, dynamic=False)


@functools.cache
def of_steps(tokens, features, classes, dtype):
    """Name -> TFLOP/s: median, low, high; and name -> GB."""
    x, w, target = inputs(tokens, features, classes, dtype)
    operations = 6 * tokens * features * classes
    memory = {}
    calls = {}
    functions = FUNCTIONS | {"torch.compile": compiled_anew(pytorch)}
    for name, function in functions.items():
        calls[name] = step_of(function, x, w, target)
        memory[name] = memory_of(calls[name])

    def products():
        with torch.no_grad():
            z = x @ w.T
            return z @ w, z.T @ x

    calls["cublas"] = products
    return tflops(operations, calls, times=5), memory


@functools.cache
def of_errors(tokens, features, classes, dtype):
    """Name -> how far dw is from the exact one, in norm; and what rounding the
    exact one costs."""
    x, w, target = inputs(tokens, features, classes, dtype)
    exact = torch.zeros(classes, features, dtype=torch.float64, device=DEVICE)
    with torch.no_grad():
        exact_w = w.double()
        for x_some, target_some in zip(
            x.split(4096), target.split(4096), strict=True
        ):
            exact_x = x_some.double()
            dz = (exact_x @ exact_w.T).softmax(dim=1)
            dz[torch.arange(len(dz), device=DEVICE), target_some] -= 1
            exact += dz.T @ exact_x
        exact /= tokens
        del dz, exact_w

    def off(dw):
        return ((dw - exact).norm() / exact.norm()).item()

    errors = {"rounded": off(exact.to(dtype))}
    for name, function in FUNCTIONS.items():
        _, dw = step_of(function, x, w, target)()
        errors[name] = off(dw)
    return errors


BOTH = "forward and backward"
SMALL = {"features": 768, "classes": 32000}
WITH_MEMORY = {name: STEPS[name] for name in STEPS if name != "cublas"}


@triton.testing.perf_report(
    benchmark_of("lce-step", BOTH, [2048, 8192, 32768], STEPS, **LARGE)
)
def bench_step(N, features, classes, dtype, mode, provider):
    """All lines in turns, 5 times, by events of the GPU around a step that
    begins while it is busy; TFLOP/s of three products. torch.compile: compiled
    once."""
    if not ON_GPU:
        return 3 * [float("nan")]
    return of_steps(N, features, classes, dtype)[0][provider]


@triton.testing.perf_report(
    benchmark_of(
        "lce-memory",
        BOTH,
        [2048, 8192, 32768],
        WITH_MEMORY,
        "GB of memory",
        **LARGE,
    )
)
def bench_memory(N, features, classes, dtype, mode, provider):
    """The most that tensors of a step take at a time, beyond its inputs, by
    torch.cuda.max_memory_allocated; both gradients are part of it."""
    if not ON_GPU:
        return 3 * [float("nan")]
    return 3 * [of_steps(N, features, classes, dtype)[1][provider]]


@triton.testing.perf_report(
    benchmark_of("lce-step-small", BOTH, [4096, 16384], STEPS, **SMALL)
)
def bench_small(N, features, classes, dtype, mode, provider):
    """All lines in turns, 5 times, by events of the GPU around a step that
    begins while it is busy; TFLOP/s of three products. torch.compile: compiled
    once."""
    if not ON_GPU:
        return 3 * [float("nan")]
    return of_steps(N, features, classes, dtype)[0][provider]


@triton.testing.perf_report(
    benchmark_of(
        "lce-memory-small",
        BOTH,
        [4096, 16384],
        WITH_MEMORY,
        "GB of memory",
        **SMALL,
    )
)
def bench_small_memory(N, features, classes, dtype, mode, provider):
    """The most that tensors of a step take at a time, beyond its inputs, by
    torch.cuda.max_memory_allocated; both gradients are part of it."""
    if not ON_GPU:
        return 3 * [float("nan")]
    return 3 * [of_steps(N, features, classes, dtype)[1][provider]]


WITH_ERRORS = {name: STEPS[name] for name in FUNCTIONS}
WITH_ERRORS["rounded"] = "exact, rounded"


@triton.testing.perf_report(
    benchmark_of(
        "lce-error",
        BOTH,
        [2048, 8192, 32768],
        WITH_ERRORS,
        "relative error",
        **LARGE,
    )
)
def bench_error(N, features, classes, dtype, mode, provider):
    """How far dw is from the same in float64, in norm; and how far that is
    from itself if it is rounded to bfloat16."""
    if not ON_GPU:
        return 3 * [float("nan")]
    return 3 * [of_errors(N, features, classes, dtype)[provider]]


# %%

in_percent(bench_step, "PyTorch")

# %%

bench_memory.run(show_plots=ON_GPU)

# %%

bench_error.run(show_plots=ON_GPU)

# %%
# **What the three figures show.**
# On the H200, with 32768 tokens, a step reaches 614 TFLOP/s by default and 479
# with ``recompute=True``. PyTorch reaches 602, torch.compile 625, Liger 627
# with sums in bfloat16 and 570 with sums in float32, and Cut Cross-Entropy
# 271. So we take 0.98 and 1.26 times the time of PyTorch. With 8192 tokens it
# is 0.99 and 1.29 times, and with 2048 tokens 0.89 and 1.31 times.
#
# Of the three products alone, by cuBLAS, our default reaches 93%, 94% and 91%
# at 2048, 8192 and 32768 tokens, and torch.compile 94%, 95% and 92%.
#
# Beyond its inputs a step with 32768 tokens takes 3.44 GB by default and 1.39
# GB with ``recompute=True``. PyTorch takes 25.22 GB, torch.compile 9.72 GB,
# Liger 1.58 GB with sums in bfloat16 and 3.42 GB with sums in float32, and Cut
# Cross-Entropy 1.32 GB. The gradients alone are 1.32 GB of that. With 8192
# tokens our default takes half of PyTorch's 6.30 GB, and with 2048 tokens as
# much as PyTorch, 1.59 GB. At both torch.compile takes what we take.
#
# With 32768 tokens our ``dw`` is off by 0.16% in norm, by default and with
# ``recompute=True``. So is PyTorch's, and so is Liger's with sums in float32.
# Nobody can be below that, because to round the exact ``dw`` to bfloat16 costs
# as much. Liger's is off by 0.30% with sums in bfloat16, and that of Cut
# Cross-Entropy by 0.56%. With 2048 tokens rounding costs 0.06%, and these two
# are off by 0.06% and 0.33%.
#
# **Why.**
# By default we compute what PyTorch computes, and save most of its passes over
# the logits. torch.compile also computes three products, by cuBLAS, and its
# passes are fewer than PyTorch's. But it has all logits at a time, and we have
# chunks, whose sums of ``dw`` are read and written. With 2048 tokens there is
# one chunk, and we are as fast as torch.compile. With 32768 tokens there are
# eight. Their sums move 34 GB, which take 7 ms at 4.8 TB/s. All in all, our
# step takes 168 ms and that of torch.compile 165 ms.
#
# Four products should take four thirds of the time of three. With
# ``recompute=True`` a step takes 1.48, 1.30 and 1.28 times as long as by
# default, at 2048, 8192 and 32768 tokens. The fourth product costs more than
# all of PyTorch's passes, so this design is slower than PyTorch.
#
# With 2048 tokens Liger is slower than all others. It has 32 chunks here,
# however many tokens there are. So a chunk has only 64, and its products are
# too small for the GPU.
#
# With 8192 tokens or more our default needs 2.1 GB for sums. Beside them there
# are ``dx`` and 1.05 GB, first for a chunk and then for ``dw``. Liger needs as
# much if its sums are float32, too. By default it adds up in bfloat16, in the
# memory of ``dw``: it saves the 2.1 GB, and pays with its error. Cut
# Cross-Entropy adds up in bfloat16, too, a product for each tile of logits,
# under locks and in any order. So it needs the gradients and hardly anything
# else. Its error also comes from what it leaves out: with 2048 tokens Liger's
# sums cost hardly anything, and Cut Cross-Entropy is 5.1 times as far off as
# Liger. With ``recompute=True`` we have a strip of 67 MB at most beside the
# gradients, and no sums in memory at all.
#
# **What follows.**
# We had two aims: at most 1.1 times the time of PyTorch, and at most the
# memory of the most frugal library. No design of this page meets both.
#
# The default meets the first aim everywhere. With 32768 tokens it takes a
# seventh of PyTorch's memory, with 8192 tokens half of it, but with 2048
# tokens all of it. It misses the second aim by far: it takes 2.6 times the
# memory of Cut Cross-Entropy.
#
# ``recompute=True`` comes near to the second aim, but misses it by 5%, and it
# misses the first one. Whoever has no memory to spare takes it: with 32768
# tokens it is 1.77 times as fast as Cut Cross-Entropy, and leaves nothing out.
# If sums in bfloat16 are good enough, Liger is a good choice at 32768 tokens:
# it is 1.31 times as fast as ``recompute=True`` and takes 1.14 times its
# memory. At 8192 tokens it is slower and takes more memory.
#
# A small model
# -------------
#
# A small GPT has 768 features and a vocabulary of 32000. The sums of its
# products are short, so everything else counts for more.

# %%

in_percent(bench_small, "PyTorch")

# %%

bench_small_memory.run(show_plots=ON_GPU)

# %%
# **What both figures show.**
# On the H200, with 16384 tokens, a step reaches 604 TFLOP/s by default and 431
# with ``recompute=True``. PyTorch reaches 441, torch.compile 540, Liger 376,
# and Cut Cross-Entropy 154. We take 1.12 GB by default and 0.38 GB with
# ``recompute=True``, PyTorch 3.15 GB, torch.compile 1.12 GB, Liger 0.11 GB and
# Cut Cross-Entropy 0.07 GB.
#
# **Why.**
# A product of 16384 × 768 × 32000 takes 1.1 ms at 750 TFLOP/s, and a pass over
# the logits, which have 1.05 GB, takes 0.2 ms. PyTorch has nine of them. We
# have five: we write powers, read them and write gradients, and two products
# read these. All 16384 tokens are one chunk here, so there are no sums.
#
# With so few features, few tokens make too few tiles for all SMs. So even with
# ``recompute=True`` a chunk has 5504 tokens and takes 0.35 GB. Liger's has
# 512, and Cut Cross-Entropy has none: they take less memory, and are slower.
#
# **What follows.**
# By default we are the fastest here. Like torch.compile, which also writes the
# gradient over the logits, we take a third of PyTorch's memory. But
# ``recompute=True`` is no good choice: it is not faster than PyTorch, and
# takes 3.6 times the memory of Liger and 5.1 times that of Cut Cross-Entropy.
# Where memory counts more than time, take Liger: it takes 1.15 times as long
# as ``recompute=True`` with sums in bfloat16, and even with sums in float32 it
# needs only 0.17 GB.
#
# How fast are the products?
# --------------------------
#
# Here is each kernel of a chunk of 4096 tokens, beside cuBLAS with the same
# product. ``scores`` also computes powers and stores them, and ``dw`` adds to
# sums in float32.

# %%

# Scaffold: the products of a chunk, a benchmark.


@functools.cache
def product_speeds(tokens, features, classes, dtype):
    x, w, target = (t.detach() for t in inputs(tokens, features, classes))
    like = {"dtype": dtype, "device": DEVICE}
    grads = padded(tokens, classes, **like)
    rows = torch.empty(6, tokens, device=DEVICE)
    parts = torch.empty(tokens * classes // 32, device=DEVICE)
    dx = padded(tokens, features, **like)
    sums = padded(classes, features, torch.float32, DEVICE)
    options = Options()
    scores(x, w, None, None, options, grads, parts)
    finish(parts, x, w, None, None, None, target, rows, options)
    in_place(grads, parts, x, rows, target, None, None, options)
    multiply(grads, x, sums, transposed=True)
    powers = torch.empty_like(grads)
    calls = {
        "scores": lambda: scores(x, w, None, None, options, powers, parts),
        "scores cublas": lambda: torch.mm(x, w.T),
        "dx": lambda: multiply(grads, w, dx, transposed=False),
        "dx cublas": lambda: torch.mm(grads, w),
        "dw": lambda: multiply(grads, x, sums, transposed=True, add=True),
        "dw cublas": lambda: torch.mm(grads.T, x),
    }
    return tflops(2 * tokens * features * classes, calls)


PRODUCTS = {
    "scores": "scores",
    "scores cublas": "scores, cuBLAS",
    "dx": "dx",
    "dx cublas": "dx, cuBLAS",
    "dw": "dw",
    "dw cublas": "dw, cuBLAS",
}


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=[16384, 32000, 65536, 128256],
        x_log=True,
        xlabel="N (classes)",
        line_arg="provider",
        line_vals=list(PRODUCTS),
        line_names=list(PRODUCTS.values()),
        ylabel="TFLOP/s",
        plot_name="lce-products",
        args={
            "M": 4096,
            "features": 4096,
            "dtype": torch.bfloat16,
            "mode": BOTH,
        },
    )
)
def bench_products(N, M, features, dtype, mode, provider):
    """All lines in turns, 7 times, by events of the GPU around a call that
    begins while it is busy."""
    if not ON_GPU:
        return 3 * [float("nan")]
    return product_speeds(M, features, N, dtype)[provider]


# %%

bench_products.run(show_plots=ON_GPU)

# %%
# **What the figure shows.**
# On the H200, with 128256 classes, ``scores`` reaches 95% of cuBLAS, ``dx``
# 100% and ``dw`` 87%. With 32000 classes it is 99%, 98% and 86%.
#
# **Why.**
# As in the loss alone, the powers of ``scores`` cost little, 5% at most.
# ``dx`` has nothing to do beside its product.
#
# A tile of ``dw`` reads its old sums and writes new ones, 0.26 MB in all. With
# 128256 classes all tiles together move 4.2 GB, which take 0.9 ms at 4.8 TB/s,
# and cuBLAS needs 6.4 ms for the product. One after the other, that would be
# 88% of the speed of cuBLAS, and we measure about as much: Tensor Cores wait
# while a tile adds to its sums.
#
# How long should a chunk be?
# ---------------------------
#
# We try chunks of other lengths, with 16384 tokens.

# %%

# Scaffold: chunks of many lengths, a benchmark.


def in_chunks(chunk, recompute):
    options = Options(chunk=chunk, recompute=recompute)

    def function(x, w, target):
        return _LinearCrossEntropy.apply(x, w, None, target, None, options)

    return function


CHUNKS = [1024, 2048, 4096, 8192]


@functools.cache
def chunk_speeds(tokens, features, classes, dtype):
    given = inputs(tokens, features, classes, dtype)
    calls = {
        (chunk, recompute): step_of(in_chunks(chunk, recompute), *given)
        for chunk in CHUNKS
        for recompute in (False, True)
    }
    memory = {name: memory_of(call) for name, call in calls.items()}
    operations = 6 * tokens * features * classes
    return tflops(operations, calls, times=3), memory


CHUNK_LINES = {"triton": "Triton", "recompute": "recompute=True"}


def benchmark_of_chunks(plot_name, unit):
    return triton.testing.Benchmark(
        x_names=["N"],
        x_vals=CHUNKS,
        x_log=True,
        xlabel="N (tokens of a chunk)",
        line_arg="provider",
        line_vals=list(CHUNK_LINES),
        line_names=list(CHUNK_LINES.values()),
        ylabel=unit,
        plot_name=plot_name,
        args={
            "M": 16384,
            "dtype": torch.bfloat16,
            "mode": BOTH,
            **LARGE,
        },
    )


@triton.testing.perf_report(benchmark_of_chunks("lce-chunks", "TFLOP/s"))
def bench_chunks(N, M, features, classes, dtype, mode, provider):
    """All lengths in turns, 3 times, by events of the GPU around a step that
    begins while it is busy; TFLOP/s of three products."""
    if not ON_GPU:
        return 3 * [float("nan")]
    found, _ = chunk_speeds(M, features, classes, dtype)
    return found[N, provider == "recompute"]


@triton.testing.perf_report(
    benchmark_of_chunks("lce-chunks-memory", "GB of memory")
)
def bench_chunks_memory(N, M, features, classes, dtype, mode, provider):
    """The most that tensors of a step take at a time, beyond its inputs, by
    torch.cuda.max_memory_allocated; both gradients are part of it."""
    if not ON_GPU:
        return 3 * [float("nan")]
    _, memory = chunk_speeds(M, features, classes, dtype)
    return 3 * [memory[N, provider == "recompute"]]


# %%

bench_chunks.run(show_plots=ON_GPU)

# %%

bench_chunks_memory.run(show_plots=ON_GPU)

# %%
# **What both figures show.**
# On the H200, by default, chunks of 1024 tokens reach 543 TFLOP/s, those of
# 2048 reach 592, those of 4096 reach 610 and those of 8192 reach 622. They
# take 3.29, 3.29, 3.30 and 4.37 GB. With ``recompute=True`` it is 477, 478,
# 489 and 479 TFLOP/s, and 1.22 GB with chunks of 1024.
#
# **Why.**
# The sums of ``dw`` are read and written once for each chunk. Up to 4096
# tokens a chunk is no larger than ``dw``, which comes when the chunk is gone,
# so the memory stays the same. With ``recompute=True`` there are no such sums,
# so short chunks cost little: those of 1024 tokens are 2% slower than the
# fastest, where by default they are 13% slower. And what the chunk of the
# forward pass takes is gone before the backward pass makes ``dw``.
#
# **What follows.**
# Chunks of 8192 tokens would be 2% faster than those of 4096, but take 1.07 GB
# more. So our rule stops where longer chunks begin to need memory.
#
# Leaving out what is small
# -------------------------
#
# Whether there is anything to leave out depends on how sharp the distribution
# is. The words of a language have a sharp one: by *Zipf's law*, the second
# most frequent word comes about half as often as the first one, and the tenth
# a tenth as often. So we add a bias of :math:`-s \log(r)` to the logit of the
# class with the rank :math:`r`. With :math:`s` = 1 the probabilities follow
# Zipf's law, with larger :math:`s` they are sharper, as those of a model that
# has learned. Targets are drawn from the same distribution. As above, speeds
# are those of three products. Where most of two is left out, they may be above
# what the GPU can do.

# %%

# Scaffold: what is left out, and what that costs, two benchmarks.

KEPT = {
    "triton": 0.0,
    "unnoticed": unnoticed(torch.bfloat16, CLASSES),
    "as cce": 2.0**-12,
}
KEPT_NAMES = {
    "triton": "nothing left out",
    "unnoticed": "below rounding",
    "as cce": "below 2**-12",
}
STEEP = [1.0, 1.5, 2.0, 3.0]


@functools.cache
def of_skipping(steep, tokens, features, classes, dtype):
    """Name -> TFLOP/s; name -> how far dx or dw is off, the worse of both; and
    name -> how far dw of the classes is that are no target."""
    x, w, _ = inputs(tokens, features, classes, dtype)
    rank = torch.arange(1, classes + 1, device=DEVICE)
    bias = (-steep * rank.log()).to(dtype)
    target = torch.multinomial(
        bias.float().softmax(dim=0), tokens, replacement=True
    )
    calls = {}
    results = {}
    for name, skip_below in KEPT.items():
        function = functools.partial(
            linear_cross_entropy, linear_bias=bias, skip_below=skip_below
        )
        calls[name] = step_of(function, x, w, target)
        results[name] = calls[name]()
    whole = results["triton"]
    rare = torch.ones(classes, dtype=torch.bool, device=DEVICE)
    rare[target] = False

    def off(ours, exact):
        difference = (ours - exact).float().norm() / exact.float().norm()
        return difference.item()

    errors = {}
    for name, (dx, dw) in results.items():
        errors[name] = max(off(dx, whole[0]), off(dw, whole[1]))
        errors[f"{name} rare"] = off(dw[rare], whole[1][rare])
    operations = 6 * tokens * features * classes
    return tflops(operations, calls, times=5), errors


def benchmark_of_skipping(plot_name, unit, names):
    return triton.testing.Benchmark(
        x_names=["s"],
        x_vals=STEEP,
        xlabel="s (how sharp)",
        line_arg="provider",
        line_vals=list(names),
        line_names=list(names.values()),
        ylabel=unit,
        plot_name=plot_name,
        args={
            "M": 8192,
            "dtype": torch.bfloat16,
            "mode": BOTH,
            **LARGE,
        },
    )


@triton.testing.perf_report(
    benchmark_of_skipping("lce-skipping", "TFLOP/s", KEPT_NAMES)
)
def bench_skipping(s, M, features, classes, dtype, mode, provider):
    """All lines in turns, 5 times, by events of the GPU around a step that
    begins while it is busy; TFLOP/s of three products, whether they were
    computed or left out."""
    if not ON_GPU:
        return 3 * [float("nan")]
    return of_skipping(s, M, features, classes, dtype)[0][provider]


WRONG = {
    "unnoticed": "below rounding",
    "as cce": "below 2**-12",
    "unnoticed rare": "below rounding, no target",
    "as cce rare": "below 2**-12, no target",
}


@triton.testing.perf_report(
    benchmark_of_skipping("lce-skipping-error", "relative error", WRONG)
)
def bench_skipping_error(s, M, features, classes, dtype, mode, provider):
    """How far dx or dw, the worse of both, is from what it is when nothing is
    left out, in norm; and dw of the classes that are no target."""
    if not ON_GPU:
        return 3 * [float("nan")]
    return 3 * [of_skipping(s, M, features, classes, dtype)[1][provider]]


# %%

bench_skipping.run(show_plots=ON_GPU)

# %%

bench_skipping_error.run(show_plots=ON_GPU)

# %%
# **What both figures show.**
# On the H200, with 8192 tokens, a step reaches 632 TFLOP/s when nothing is
# left out. With the threshold of rounding it reaches 614 at :math:`s` = 1,
# where there is nothing to leave out, 1035 at 2 and 1403 at 3. With
# :math:`2^{-12}`, the threshold of Cut Cross-Entropy, our kernels reach 1277,
# 1466 and 1509.
#
# With the threshold of rounding, the gradients are off by 0.004% at most, the
# worse of both in norm, and those of classes that are no target by 0.008% at
# most. With :math:`2^{-12}` the gradients are off by 0.42% at :math:`s` = 1.
# But those of classes that are no target are off by 24%, and at :math:`s` = 3
# still by 0.5%.
#
# **Why.**
# At :math:`s` = 1 the sum of all :math:`1 / r` is 12.3, so the class with the
# rank 331 has a probability of about :math:`2^{-12}`. All 127925 classes
# behind it, which have nearly half of the probability together, are below. At
# :math:`s` = 2 the threshold of rounding is reached at a rank of about 4500,
# and 97% of all classes are behind it.
#
# In norm, even half of the probability hardly shows: the gradients of targets
# are so much larger, and weights that have been drawn at random cancel each
# other. The weights of a model that has learned need not.
#
# What cannot be left out is the first of three products, so a step could
# become three times as fast at most.
#
# **What follows.**
# A threshold that keeps its promise finds something to leave out once a model
# is quite sure. Where it finds nothing, at :math:`s` = 1 and 1.5, looking for
# it has cost 3% and 6% of the speed. A fixed threshold like :math:`2^{-12}`
# leaves out more, but what it loses depends on the vocabulary and on the
# model, and the user is not told.
#
# Where PyTorch or a library is better
# ------------------------------------
#
# - **Cut Cross-Entropy needs the least memory.** With ``recompute=True`` we
#   take 5% more at 32768 tokens, and 5.1 times as much for the small model.
#   Cut Cross-Entropy can also cap its logits.
# - **Liger needs less memory than our default**, and for the small model less
#   than ``recompute=True``, if sums in bfloat16 are good enough. At 32768
#   tokens it is also faster than both of our designs, at 1.02 times the speed
#   of our default. Liger also has a z-loss and capped logits.
# - **torch.compile is about as fast as our default**: it reaches 1.01, 1.01
#   and 1.02 times its speed with 2048, 8192 and 32768 tokens. With 32768
#   tokens it takes 2.8 times as much memory, because it has all logits.
# - **PyTorch is faster than recompute=True** at all sizes that we measured, by
#   2% to 31%. And with 2048 tokens and 128256 classes our default saves time,
#   but no memory, because ``dw`` is as large there as two matrices of logits.
# - **A loss without a backward pass**: PyTorch computes gradients in the
#   backward pass, so they cost nothing if nobody calls it. We compute ours in
#   the forward pass, unless it runs under ``torch.no_grad()``.
# - **PyTorch takes more**: probabilities as targets, float64, autocast, second
#   derivatives, and inputs on several GPUs. It stops at a wrong target; we
#   return NaN on a GPU.
# - **reduction="none" always takes four products.**
#
# Exercise
# --------
#
# **Exercise 1: a vocabulary in two halves.**
# When a weight is too large for one GPU, each of two GPUs can have half of the
# classes. Each computes ``lse`` of its own half, and the logit of the target
# if it has it. Write a function that makes the loss of both. It also returns,
# for each half, the factor by which the softmax of that half must be
# multiplied to become the softmax of all classes. All arguments and results
# have one number for each token. The checker prints the largest error of a
# loss, as a share of the largest logit, and that of a softmax, which should be
# below 1e-5 and 1e-2.
#
# **Hint 1.** The sum of all powers is the sum of both halves'. ``lse`` is the
# logarithm of such a sum.
#
# **Hint 2.** Do not take powers of ``lse`` itself, which may be large. Take
# the larger one away first. ``torch.logaddexp`` does that.
#
# **Hint 3.** The softmax of a half is :math:`e^{z - lse_{half}}`, and that of
# all classes is :math:`e^{z - lse}`. What is their quotient?


def combine(lse_left, lse_right, target_logit):
    """The losses, and the factors of both halves."""
    ones = torch.ones_like(lse_left)
    return lse_left - target_logit, ones, ones  # to do


def exercise_1(combine):
    """Print the largest error of a loss and of a softmax."""
    torch.manual_seed(0)
    x = (200 * torch.randn(5, 8, device=DEVICE)).requires_grad_()
    w = torch.randn(12, 8, device=DEVICE)
    target = torch.tensor([0, 3, 7, 11, 5], device=DEVICE)
    z = (x @ w.T).detach()

    def lse_of(half):
        """By our kernels: the loss, and the logit of class 0 in addition."""
        first = torch.zeros_like(target)
        return losses(x.detach(), half, first) + x.detach() @ half[0]

    lse_left = lse_of(w[:6])
    lse_right = lse_of(w[6:])
    loss, left, right = combine(
        lse_left, lse_right, z.gather(1, target[:, None])[:, 0]
    )
    exact = F.cross_entropy(z.double(), target, reduction="none")
    # A loss is a difference of numbers that may be in the thousands.
    error = ((loss - exact).abs() / z.abs().max()).max().item()
    softmax = torch.cat(
        (
            (z[:, :6] - lse_left[:, None]).exp() * left[:, None],
            (z[:, 6:] - lse_right[:, None]).exp() * right[:, None],
        ),
        dim=1,
    )
    other = (softmax - z.double().softmax(dim=1)).abs().max().item()
    print(f"errors of a vocabulary in halves: {error:.0e} and {other:.0e}")
    return error < 1e-5 and other < 1e-2


exercise_1(combine)

# %%

# Solution 1


def combine_1(lse_left, lse_right, target_logit):
    lse = torch.logaddexp(lse_left, lse_right)
    left = (lse_left - lse).exp()
    right = (lse_right - lse).exp()
    return lse - target_logit, left, right


assert exercise_1(combine_1)

# %%
# With the factors, each GPU makes gradients of its own half. ``dw`` of a half
# stays where it is. ``dx`` has a part from each half, and the two parts are
# added up.
#
# What we learned
# ---------------
#
# These are the designs of this page, with their products, their speed on the
# H200 with 32768 tokens, 4096 features and 128256 classes, and their memory
# beyond the inputs:
#
# - **Whole logits, by PyTorch:** 3 products, 602 TFLOP/s, 25.22 GB.
# - **Chunks of tokens, by Liger, sums in bfloat16:** 3 products, 627 TFLOP/s,
#   1.58 GB.
# - **Chunks of tokens, sums in float32, our default:** 3 products, 614
#   TFLOP/s, 3.44 GB.
# - **Chunks of both, our recompute=True:** 4 products, 479 TFLOP/s, 1.39 GB.
# - **No logits at all:** 5 products, and sums that do not fit on the chip. We
#   did not build it. Cut Cross-Entropy comes close, with 4 products, parts of
#   which it leaves out: 271 TFLOP/s, 1.32 GB.
#
# And for kernels in general:
#
# - An epilogue can turn a matrix into a few numbers before it is written.
# - Time and memory are traded product by product. Count both before you write
#   the first line.
# - Keep what rounds well. A power in 16 bits is worth more than its logarithm.
# - A sum that goes on over chunks belongs in float32, even if it is the
#   largest thing that you keep.
# - A threshold is honest if you can say what it loses.
#
# **Next:** `Attention without its matrix <../attention/01-attention.html>`_
# has the same problem. But a head has only 128 numbers, so there a tile is
# multiplied as soon as it has been computed, and never written.
