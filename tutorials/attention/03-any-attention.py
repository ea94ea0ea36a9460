r"""
Causal, grouped, any length
===========================

What must attention take before every model can use it?
Sequences of any length that must not look ahead, heads that share their keys,
rows of any width and tensors of any strides: each of these costs a few lines
in the kernels of both passes, and none of them needs a kernel of its own.

Do you only want to use it? Take ``any_attention.py``, which this page offers
under its title: it is a module with the kernels and functions of this page.
Put it beside your model, and write two lines:

.. code-block:: python

   from any_attention import attention

   y = attention(query, key, value, is_causal=True, enable_gqa=True)

Its arguments, their order and their defaults are those of PyTorch's
``F.scaled_dot_product_attention``, except that it takes no mask and no
dropout. It works under ``torch.autocast`` and ``torch.compile``, and gives the
same bits each time. On an H100 or an H200 take that of `Programs that stay
<07-programs-that-stay.html>`_, which is faster and takes the same.

**What you will learn**

- Which keys a query sees when queries and keys are not equally many.
- How a loop over tiles pays for its masks only where one is needed.
- How heads of queries share a head of keys, and who adds up its gradient.
- What a tensor descriptor does for rows of any width, and which tensors it
  can't take.
- How one function serves autograd, ``torch.compile`` and ``torch.autocast``.

**What you need:** `Attention without its matrix <01-attention.html>`_, whose
kernels we extend. You don't need a GPU.
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

import functools

from triton.tools.tensor_descriptor import TensorDescriptor

# %%
# Which keys does a query see?
# ----------------------------
#
# A language model predicts the next word, so no word may see a later one:
# query ``i`` attends to the keys up to ``i`` alone. This is *causal*
# attention.
#
# What if there are more keys than queries, or fewer? Then it matters where the
# counting begins. Let's ask PyTorch. We make all scores equal, so a query
# weighs all keys that it sees alike. And we take the rows of a unit matrix as
# values, so that the results are the weights.

for queries, keys in ((3, 5), (5, 3)):
    q = torch.zeros(1, 1, queries, keys)
    k = torch.zeros(1, 1, keys, keys)
    v = torch.eye(keys)[None, None]
    weights = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    print(f"{queries} queries, {keys} keys:")
    print(weights[0, 0].numpy().round(2))

# %%
# In both cases query 0 sees key 0, and each further query sees one key more.
# So the triangle of weights begins in the upper left corner. With 3 queries
# nobody sees the last two keys, and with 5 queries the last three see all
# keys.
#
# Others begin in the lower right corner, where the last query sees all keys:
# FlashAttention does, and so does ``causal_lower_right`` of PyTorch. That is
# what a model wants which has kept the keys of earlier words and asks for one
# word more. Our function does what its model does, and begins in the upper
# left corner. The exercise at the end is about the other one.
#
# All cases have one form. A query sees the first so many keys, and we call
# this number its *limit*:
#
# - Without causal attention it is the number of keys, for each query.
# - With it, the limit of query :math:`i` is :math:`i + 1`, or the number of
#   keys if that is smaller.
#
# A score beyond the limit becomes :math:`-\infty`, so its weight is 0.
# A limit is at least 1, so each query has something to attend to, unless
# there is no key at all. For that case PyTorch returns zeros, and so do we.
#
# A loop without a mask, and one with it
# --------------------------------------
#
# What does a mask cost? For each score we compare an index with the limit and
# select one of two numbers. That is little beside a product, but Tensor Cores
# wait for everything that is not a product, as we saw in `Attention without
# its matrix <01-attention.html>`_.
# Most tiles need no mask. In causal attention there are three kinds:
#
# - Tiles whose keys are seen by all queries need no mask.
# - Tiles on the diagonal need one.
# - Tiles whose keys are seen by no query are not computed.

# %%

# Drawing: which tiles need a mask, in causal attention and without it.

figure = plt.figure(
    "The matrix of scores in tiles, twice. In causal attention the tiles on "
    "the diagonal have a mask, those below it have none, and those above it "
    "are not computed. Otherwise only the last tile of each row has a mask, "
    "and only if it is not full.",
    figsize=(7.5, 3.2),
)
KINDS = {"no mask": "C0", "a mask": "C1", "not computed": "none"}
for axes, title in zip(
    figure.subplots(1, 2), ("Causal", "Not causal, any length"), strict=True
):
    for row in range(5):
        for column in range(5):
            kind = "no mask"
            if title == "Causal" and column == row:
                kind = "a mask"
            elif title == "Causal" and column > row:
                kind = "not computed"
            elif title != "Causal" and column == 4:
                kind = "a mask"
            axes.add_patch(
                plt.Rectangle(
                    (column, -row),
                    0.94,
                    0.9,
                    facecolor=KINDS[kind],
                    edgecolor="gray",
                )
            )
    axes.set_title(title)
    axes.text(2.5, 1, "keys", ha="center", va="bottom")
    axes.text(-0.2, -1.55, "queries", ha="right", va="center", rotation=90)
    axes.axis((-0.9, 5.1, -4.2, 1.6))
    axes.axis("off")
handles = [
    plt.Rectangle((0, 0), 1, 1, facecolor=color, edgecolor="gray")
    for color in KINDS.values()
]
figure.legend(handles, list(KINDS), ncols=3, loc="outside lower center")
plt.show()

# %%
# How many tiles is that? We count the tiles of one head, with 64 queries and
# 64 keys in each.

for length in (1024, 4096, 16384):
    rows = length // 64
    print(
        f"{length:5} keys: {rows**2:5} tiles, of which causal attention "
        f"computes {rows * (rows + 1) // 2:5}, {rows:3} with a mask"
    )

# %%
# So a causal program has two loops. The first one takes the tiles below the
# diagonal and knows nothing of masks, and the second one takes those on it. At
# 4096 keys only 64 of 2080 tiles are masked.
# Without causal attention a program has at most one tile with a mask, the last
# one, if it is not full. It needs no loop.
#
# The forward kernel
# ------------------
#
# What one step does is a function of its own, which Triton inlines wherever we
# call it. It is the body of the loop of `Attention without its matrix
# <01-attention.html>`_, with ``MASK`` as a constant: where that is false, the
# mask is not even compiled.


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


# %%
# The kernel around it has three things more that are new:
#
# - **Groups.** In many models several heads of queries share one head of keys
#   and values. This is called *grouped-query attention*, and it makes the keys
#   that a model must keep that many times smaller. With 6 heads of queries and
#   2 of keys a group has 3, and the heads 0 to 5 of queries use the heads 0,
#   0, 0, 1, 1 and 1 of keys: the head divided by 3, without the remainder.
#   That is all that the forward pass has to know.
# - **The longest program first.** In causal attention the last tile of queries
#   has most to do. A GPU usually starts programs in the order of their
#   numbers, though nothing promises that, so we count tiles from the end. Then
#   the last programs to start are short ones, and no SM is left with a long
#   one while the others have nothing to do.
# - **Lengths are not specialized.** Triton usually compiles a kernel anew when
#   a whole number becomes a multiple of 16, or stops being one.
#   ``do_not_specialize`` turns that off, so a sequence of a new length runs
#   what is there already. Only without causal attention there are two versions
#   to compile, because ``RAGGED`` is a constant: one for lengths whose last
#   tile of keys is full, and one for all others.


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


# %%
# Any head dimension
# ------------------
#
# A tile has a power of two of columns. What if a head has 80 numbers?
#
# A descriptor knows the shape of the tensor, so it can have tiles that are
# wider than a row. It fills in zeros when it loads, and it leaves out what is
# beyond the row when it stores. A zero adds nothing to a score, and columns of
# zeros in ``v`` give columns of ``y`` that nobody stores. So a head of 80
# numbers takes tiles of 128, and the kernel does not know it.
#
# It costs arithmetic: Tensor Cores multiply the zeros, too. With 80 numbers
# they do 1.6 times the work that counts, and with 96 numbers 1.33 times.
#
# Any strides
# -----------
#
# The Tensor Memory Accelerator (TMA), which fetches the tiles of a descriptor,
# asks for three things: the numbers of a row lie side by side, all other
# strides are multiples of 16 bytes, and so is the address of the first number.
# Tensors in models nearly always fulfill that, whatever the order of their
# dimensions. A projection gives (batch, length, heads, dimension), for
# instance, and swapping the middle dimensions only swaps two strides.
#
# A row of 80 numbers of 16 bits has 160 bytes, which is ten times 16. But one
# of 65 numbers has 130 bytes, and so does the stride between two rows. We copy
# such a tensor into rows of 144 bytes, of which 130 are used. We do the same
# with everything else that the TMA can't take.
#
# Results get the order of dimensions that their input has: ``y`` and ``dq``
# lie in memory as ``query`` does, ``dk`` as ``key``, and ``dv`` as ``value``.
# So what a projection gave can go into the next projection without a copy.

# %%

# Scaffold: tiles wider than a row, and layouts that a descriptor takes.

LOG2E = 1.4426950408889634  # the logarithm of e, to the base 2


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


def for_descriptors(t):
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


# %%
# Which tiles?
# ------------
#
# The tiles depend on the width and on whether attention is causal. With 128
# numbers in a head, a causal program has 64 queries and not 128, because half
# of each tile on the diagonal is computed in vain, and there is less of that
# with small tiles. That leaves room for a third stage, so two tiles of keys
# are on their way while one is multiplied.
#
# How did we find these numbers? We compiled every combination that made sense,
# left out those that spill, and timed the others.
#
# And float32? Tensor Cores don't take it. They take TF32, which cuts the
# fraction of a number to 10 bits. With ``input_precision="tf32x3"`` Triton
# writes each number as a sum of two of these and adds up three products, which
# is nearly as exact as float32. But both parts of all operands take registers.
# So the tiles are small, and with more than 64 numbers in a head the backward
# kernels spill all the same. That is right, and slow: train in 16 bits if you
# can.
#
# GPUs without a TMA, which are AMD's and those before the H100, also take
# operands from registers, and an address for each element. They get the small
# tiles, too.

TILES = {
    # width: queries, keys, warps and stages; then the same if causal
    16: ((128, 64, 4, 3), (128, 64, 4, 3)),
    32: ((128, 64, 4, 3), (128, 64, 4, 3)),
    64: ((64, 128, 4, 2), (64, 128, 4, 2)),
    128: ((128, 64, 4, 2), (64, 64, 4, 3)),
    256: ((128, 64, 8, 2), (128, 64, 8, 2)),
}

# %%

# Scaffold: what both passes hand to a kernel, and the plan of the forward one.


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


def plan_forward(dtype, D, is_causal):
    if small_tiles(dtype):
        return options(16, 32, 8, 2, dtype, D)
    usual, causal = TILES[width_of(D)]
    tiles = causal if is_causal else usual
    return options(*tiles, dtype, D)


# %%
# The host function is short. ``kernel`` is an argument only because the
# exercise hands in another one.
#
# The log-sum-exps of a head have room for whole tiles: a program also stores
# those of the queries that only fill up its tile. So the backward kernels can
# load them without a mask.


def empty_lse(query, is_causal):
    """(batch, heads, rows): room for whole tiles of queries."""
    batch, heads, queries, D = query.shape
    tile_q = plan_forward(query.dtype, D, is_causal)["TILE_Q"]
    rows = triton.cdiv(queries, tile_q) * tile_q
    return query.new_empty(batch, heads, rows, dtype=torch.float32)


def forward(query, key, value, is_causal, scale, kernel=_any_attention_fwd):
    """The results, and a log-sum-exp for each query."""
    batch, heads, queries, D = query.shape
    _, k_heads, keys, _ = key.shape
    plan = plan_forward(query.dtype, D, is_causal)
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
        q_desc=tiles_of(for_descriptors(query), tile_q),
        k_desc=tiles_of(for_descriptors(key), tile_k),
        v_desc=tiles_of(for_descriptors(value), tile_k),
        y_desc=tiles_of(y, tile_q),
        lse_ptr=lse,
        rows=lse.shape[-1],
        heads=heads,
        queries=queries,
        keys=keys,
        scale=scale * LOG2E,
        GROUP=heads // k_heads,
        CAUSAL=is_causal,
        RAGGED=not is_causal and keys % tile_k > 0,
        **plan,
    )
    return y, lse


# %%
# Is the forward pass right?
# --------------------------
#
# We try one case of each kind: causal with more keys than queries, groups of 3
# heads, and rows of 65 numbers.


def try_forward(queries, keys, D, group=1, is_causal=False):
    dtype = torch.float16
    q = torch.randn(2, 2 * group, queries, D, device=DEVICE, dtype=dtype)
    k, v = torch.randn(2, 2, 2, keys, D, device=DEVICE, dtype=dtype)
    y, _ = forward(q, k, v, is_causal, D**-0.5)
    wide = q.double(), k.double(), v.double()
    exact = F.scaled_dot_product_attention(
        *wide, is_causal=is_causal, enable_gqa=True
    )
    error = (y - exact).abs().max().item()
    print(f"largest error, forward: {error:.1e}")
    assert error < 4e-3


try_forward(queries=70, keys=150, D=64, is_causal=True)
try_forward(queries=70, keys=150, D=64, group=3)
try_forward(queries=20, keys=33, D=65)

# %%
# How fast is the forward pass?
# -----------------------------
#
# We measure as in `Attention without its matrix <01-attention.html>`_: 16
# heads of 128 numbers, and 16384 tokens in sequences of 1024 to 16384. All
# lines take turns. Of causal attention half of the operations count, as is
# usual, although the tiles on the diagonal are computed whole.
#
# There is one more rival. `FlexAttention
# <https://docs.pytorch.org/docs/stable/nn.attention.flex_attention.html>`_ is
# the attention of PyTorch that you can change: a function in Python says which
# keys a query sees, and torch.compile writes a kernel in Triton for it. We let
# it compile for a fixed length, which takes many seconds. So we ask it for
# 4096 keys alone. It takes the tiles that torch.compile has for it; we did not
# let it try others.

# %%

# Scaffold: the clock, in turns, from page 01.


def in_turns(calls):
    """µs of each call on the GPU: median, 20% and 80% quantiles.

    ``calls`` are functions by their names. Each is recorded as a CUDA graph
    that overwrites L2 and makes the call, and one more only overwrites L2.
    The graphs are replayed in turns; what the last one takes is subtracted.
    """
    larger_than_l2 = torch.empty(2**28, dtype=torch.int8, device=DEVICE)

    def recorded(call):
        call()  # compiles the kernels
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            larger_than_l2.zero_()
            result = call()
        graph.replay()  # the first replay takes longer
        return graph, result  # the memory of the result stays its own

    def elapsed(graph):
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        return 1000 * start.elapsed_time(end)

    graphs = {name: recorded(call) for name, call in calls.items()}
    without, _ = recorded(lambda: None)
    times = {name: [] for name in graphs}
    for _ in range(15):
        for name, (graph, _) in graphs.items():
            times[name].append(elapsed(graph) - elapsed(without))
    found = {}
    for name, each in times.items():
        each.sort()
        found[name] = each[7], each[3], each[11]
    return found


# %%

# Scaffold: inputs, and who attends.

TOKENS = 16384
LENGTHS = [1024, 2048, 4096, 8192, 16384]
FLEX_LENGTHS = (4096,)  # for which FlexAttention is compiled
NOTHING = 3 * [float("nan")]  # where a line has no point


def inputs(N, D, dtype):
    """query, key, value and dy: TOKENS tokens as sequences of N."""
    heads = 2048 // D
    return [
        torch.randn(
            TOKENS // N, heads, N, D, device=DEVICE, dtype=dtype
        ).requires_grad_()
        for _ in range(4)
    ]


def formula(query, key, value, is_causal):
    """Attention as it is written in a book."""
    scores = query @ key.mT * query.shape[-1] ** -0.5
    if is_causal:
        later = torch.ones(scores.shape[-2:], dtype=bool, device=DEVICE)
        scores = scores.masked_fill(later.triu(1), float("-inf"))
    return torch.softmax(scores, -1) @ value


def with_backend(backend, is_causal):
    """PyTorch's function, by a library of this name."""

    def function(query, key, value):
        with torch.nn.attention.sdpa_kernel(backend):
            return F.scaled_dot_product_attention(
                query, key, value, is_causal=is_causal
            )

    return function


@functools.cache
def flex(N, is_causal):
    """FlexAttention, compiled for sequences of N."""
    from torch.nn.attention import flex_attention

    # We run a backward pass many times, so torch.compile must not reuse the
    # memory of what the forward pass saved for it.
    torch._functorch.config.donated_buffer = False
    function = torch.compile(flex_attention.flex_attention, dynamic=False)
    if not is_causal:
        return function

    def sees(batch, head, query, key):
        return query >= key

    # Which tiles are to be computed, and which of them have a mask.
    mask = flex_attention.create_block_mask(
        sees, None, None, N, N, device=DEVICE
    )
    return functools.partial(function, block_mask=mask)


# %%

# Scaffold: lines, and speeds.

NAMES = {
    "triton": "Triton",
    "sdpa-cudnn": "cuDNN, by PyTorch",
    "torch": "FlashAttention-2, by PyTorch",
    "flex": "FlexAttention",
    "cublas": "A product of matrices",
}


def functions(ours, N, is_causal):
    """Name of a line -> a function of query, key and value."""
    backends = torch.nn.attention.SDPBackend
    found = {
        "triton": ours,
        "sdpa-cudnn": with_backend(backends.CUDNN_ATTENTION, is_causal),
        "torch": with_backend(backends.FLASH_ATTENTION, is_causal),
    }
    if N in FLEX_LENGTHS:
        found["flex"] = flex(N, is_causal)
    return found


def speeds(products, calls, N, is_causal):
    """TFLOP/s of each call: median, low, high; and of cuBLAS beside them.

    A call has so many products of (N, N) and D for each of 2048 / D heads.
    """
    a = torch.randn(8192, 8192, device=DEVICE, dtype=torch.float16)
    calls = calls | {"cublas": lambda: a @ a}
    found = {}
    for name, times in in_turns(calls).items():
        operations = products * 2 * N * 2048 * TOKENS
        if is_causal:
            operations /= 2
        if name == "cublas":
            operations = 2 * 8192**3
        median, short, long = times
        found[name] = [operations / us * 1e-6 for us in (median, long, short)]
    return found


def benchmark_of(plot_name, mode, D, is_causal):
    return triton.testing.Benchmark(
        x_names=["N"],
        x_vals=LENGTHS,
        x_log=True,
        xlabel="N (queries, and keys)",
        line_arg="provider",
        line_vals=list(NAMES),
        line_names=list(NAMES.values()),
        ylabel="TFLOP/s",
        plot_name=plot_name,
        args={
            "D": D,
            "is_causal": is_causal,
            "dtype": torch.float16,
            "mode": mode,
        },
    )


def in_percent(benchmark):
    """Draw a benchmark, and print each speed in % of that of cuDNN."""
    table = benchmark.run(show_plots=ON_GPU, return_df=True)
    table = table.astype({"N": int}).set_index("N")
    table.columns = [column.split(" (")[0] for column in table.columns]
    if table.isna().all(axis=None):
        print("Timing needs a GPU; the page shows recorded figures.")
        return
    cudnn = table[NAMES["sdpa-cudnn"]]
    percent = 100 * table.div(cudnn, axis="index")
    print("speed in % of that of cuDNN")
    print(percent.to_string(float_format="%.0f"))


# %%

# Scaffold: attention forward, two benchmarks.


@functools.cache  # all lines in turns; then each is asked for its own
def forward_speeds(N, D, dtype, is_causal):
    if not ON_GPU:
        return {}  # the interpreter cannot be timed
    q, k, v, _ = inputs(N, D, dtype)

    def ours(query, key, value):
        y, _ = forward(query, key, value, is_causal, D**-0.5)
        return y

    calls = {
        name: functools.partial(function, q, k, v)
        for name, function in functions(ours, N, is_causal).items()
    }
    return speeds(2, calls, N, is_causal)


@triton.testing.perf_report(
    benchmark_of("any-attention-forward", "forward", 128, False)
)
def bench_forward(N, D, is_causal, dtype, mode, provider):
    """All lines in turns, 15 times, each a CUDA graph that overwrites L2
    first; the time of a graph that only overwrites L2 is subtracted."""
    return forward_speeds(N, D, dtype, is_causal).get(provider, NOTHING)


@triton.testing.perf_report(
    benchmark_of("any-attention-forward-causal", "forward", 128, True)
)
def bench_forward_causal(N, D, is_causal, dtype, mode, provider):
    """All lines in turns, 15 times, each a CUDA graph that overwrites L2
    first; the time of a graph that only overwrites L2 is subtracted."""
    return forward_speeds(N, D, dtype, is_causal).get(provider, NOTHING)


# %%

in_percent(bench_forward)

# %%

in_percent(bench_forward_causal)

# %%
# **What both figures show.**
# On the H200 our kernel reaches 528 TFLOP/s at 16384 keys, and 508 if
# attention is causal. From 2048 keys on that is 79% to 84% of cuDNN's speed,
# and 83% to 84% of it if causal. It is 1.4 to 1.6 times as fast as
# FlashAttention-2, and 1.4 to 1.7 times if causal. At 4096 keys FlexAttention
# reaches 451 TFLOP/s, and 371 if causal, so there ours is 1.2 and 1.3 times as
# fast.
#
# So cuDNN is ahead at every length. Near the end of this page we look at what
# it does that our kernel does not.
#
# **Why is causal attention slower for each operation?**
# It has three costs that the count of operations leaves out:
#
# - Half of each tile on the diagonal is computed in vain. At 1024 keys 136
#   tiles are computed for the 128 that count, so 6% of the work is lost. At
#   16384 keys it is 0.4%.
# - Each program loads its queries and stores its results, whatever it does in
#   between. In causal attention it does half as much in between.
# - Tiles of 64 queries use each key that they load 64 times. Those of 128
#   queries use it 128 times.
#
# The first two shrink when sequences grow, and the third one does not. Larger
# causal tiles would mend the third and make the first worse. How much of the
# difference each of them makes we have not measured.
#
# **What follows.**
# The mask itself is not in this list. Because it has a loop of its own, it
# costs nothing in the tiles that don't need it.
#
# Who adds up the gradient of a key that is shared?
# -------------------------------------------------
#
# In the backward pass a key gets a gradient from each query that sees it, and
# with groups these queries are in several heads. PyTorch's documentation
# explains groups with a repetition: the keys are repeated for each head of
# queries, and attention goes on as if each head had its own. Then the backward
# pass writes a ``dk`` and a ``dv`` for each of these heads, and another kernel
# adds them up for each group. What does that move?

heads, k_heads, dimension, tokens = 32, 8, 128, 16384
for heads_of_keys, name in ((heads, "repeated"), (k_heads, "shared")):
    megabytes = 2 * tokens * heads_of_keys * dimension * 2 / 1e6
    print(f"keys and values of 16 bits, {name}: {megabytes:.0f} MB")

# %%
# With four heads of queries for each head of keys, repeated keys and values
# have four times as many bytes. So have their gradients, which are first
# written, and then read again to be added up.
#
# The sum can also stand inside the kernel. A program has a tile of keys of one
# head, and adds up their gradients over all queries anyway. We only let it go
# on with the queries of the next head of the group. Its sums stay in
# registers, and ``dk`` and ``dv`` are written once.

# %%

# Drawing: a program with keys, and the heads of queries that it visits.

plt.figure(
    "One head of keys with four tiles, and three heads of queries of its "
    "group, one after the other. A program with the third tile of keys goes "
    "down a column of tiles in each of the three heads, below the diagonal.",
    figsize=(7.5, 2.9),
)
for member in range(3):
    for row in range(4):
        for column in range(4):
            color = "none"
            if column == 2 and row == 2:
                color = "C1"
            elif column == 2 and row == 3:
                color = "C0"
            plt.gca().add_patch(
                plt.Rectangle(
                    (5.5 * member + column, -row),
                    0.94,
                    0.9,
                    facecolor=color,
                    edgecolor="gray",
                )
            )
    plt.text(
        5.5 * member + 2,
        1,
        f"queries of head {member}",
        ha="center",
        va="bottom",
    )
    if member > 0:
        plt.annotate(
            "",
            xy=(5.5 * member + 1.9, -1.55),
            xytext=(5.5 * member - 2.5, -2.6),
            arrowprops={"arrowstyle": "->"},
        )
plt.annotate(
    "", xy=(15.7, -2.6), xytext=(14, -2.6), arrowprops={"arrowstyle": "->"}
)
plt.text(15.8, -2.6, "dk and dv", ha="left", va="center")
plt.axis((-0.3, 18.4, -3.3, 1.7))
plt.axis("off")
plt.show()

# %%
# The price is a smaller number of programs: there is one for each tile of each
# head of *keys*. With 8 heads of keys and a single sequence of 1024 these are
# 128 programs, fewer than the 132 SMs of an H200. The figures of this page
# have no groups, so they say nothing of what groups gain or cost.
#
# The backward kernels
# --------------------
#
# As in `Attention without its matrix <01-attention.html>`_ one kernel has
# queries and gives ``dq``, and the other one has keys and gives ``dk`` and
# ``dv``. So some products are computed twice, and nobody waits for anybody:
# each sum has one program, and the same bits each time. `Five products or
# seven <02-backward.html>`_ measures other designs, which have five products
# and must bring the parts of ``dq`` together.
#
# The first one has the loops of the forward kernel. It also computes
# :math:`\delta`, the dot product of a row of ``y`` and a row of ``dy``, which
# had a kernel of its own before. A program has both tiles at hand, and it
# stores :math:`\delta` for the kernel that comes after it.


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
    if MASK:
        key = start + tl.arange(0, TILE_K)
        score = tl.where(key[None, :] < limit, score, float("-inf"))
    p = tl.exp2(score * scale - lse[:, None])
    v = v_desc.load([batch, head, start, 0]).reshape(TILE_K, DIM)
    dp = tl.dot(dy, v.T, input_precision=PRECISION)
    ds = (p * (dp - delta[:, None])).to(k.dtype)
    return tl.dot(ds, k, dq, input_precision=PRECISION)


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


# %%
# A program with keys sees the diagonal from the other side. Its keys are seen
# by no query before its first key. Then come tiles of queries on the diagonal,
# which need a mask, and then tiles whose queries see all of its keys.
# Keys that do not exist need no mask here: each key has sums of its own, and
# those of a key that does not exist are not stored.


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
    # A query that does not exist is a row of zeros, and so is its dy. It adds
    # nothing to dk and dv.
    q = q_desc.load([batch, head, start, 0]).reshape(TILE_Q, DIM)
    query = start + tl.arange(0, TILE_Q)
    score = tl.dot(k, q.T, input_precision=PRECISION)
    lse = tl.load(lse_ptr + query)
    if MASK:
        seen = key[:, None] <= query[None, :]
        score = tl.where(seen, score, float("-inf"))
    p = tl.exp2(score * scale - lse[None, :])
    dy = dy_desc.load([batch, head, start, 0]).reshape(TILE_Q, DIM)
    dv = tl.dot(p.to(dy.dtype), dy, dv, input_precision=PRECISION)
    delta = tl.load(delta_ptr + query)
    dp = tl.dot(v, dy.T, input_precision=PRECISION)
    ds = (p * (dp - delta[None, :])).to(q.dtype)
    dk = tl.dot(ds, q, dk, input_precision=PRECISION)
    return dk, dv


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


# %%
# Tiles are the same in both kernels, causal or not: a program *owns* 64
# queries, or 64 keys, and takes 64 of the others in a step. With 256 numbers
# in a head a step is 32, or its tiles would not fit beside the sums.
# A step divides what a program owns, and that divides the ``TILE_Q`` of the
# forward kernel. So no kernel loads a log-sum-exp that nobody has stored.

OWN_AND_STEP = {
    # width: what a program owns, what it takes in a step, warps, stages
    16: (64, 64, 4, 3),
    32: (64, 64, 4, 3),
    64: (64, 64, 4, 3),
    128: (64, 64, 4, 2),
    256: (64, 32, 8, 2),
}

# %%

# Scaffold: the plans of both backward kernels.


def plan_backward(dtype, D):
    """For the kernel of the queries, and for that of the keys."""
    own, step, warps, stages = OWN_AND_STEP[width_of(D)]
    if small_tiles(dtype):
        own, step, warps, stages = 16, 16, 8, 2
    return (
        options(own, step, warps, stages, dtype, D),
        options(step, own, warps, stages, dtype, D),
    )


# %%


def backward(dy, query, key, value, y, lse, is_causal, scale):
    """dq, dk and dv."""
    batch, heads, queries, D = query.shape
    _, k_heads, keys, _ = key.shape
    dq = rows_like(query)
    dk = rows_like(key)
    dv = rows_like(value)
    if dq.numel() == 0 or dk.numel() == 0:  # nobody attends to anything
        return dq.zero_(), dk.zero_(), dv.zero_()
    q = for_descriptors(query)
    k = for_descriptors(key)
    v = for_descriptors(value)
    dy = for_descriptors(dy)
    delta = torch.empty_like(lse)
    for_queries, for_keys = plan_backward(query.dtype, D)

    # First the queries, because the keys need their delta.
    tile_q = for_queries["TILE_Q"]
    tile_k = for_queries["TILE_K"]
    tiles = triton.cdiv(queries, tile_q)
    _any_attention_bwd_queries[(tiles * batch * heads,)](
        q_desc=tiles_of(q, tile_q),
        k_desc=tiles_of(k, tile_k),
        v_desc=tiles_of(v, tile_k),
        y_desc=tiles_of(y, tile_q),
        dy_desc=tiles_of(dy, tile_q),
        dq_desc=tiles_of(dq, tile_q),
        lse_ptr=lse,
        delta_ptr=delta,
        rows=lse.shape[-1],
        heads=heads,
        queries=queries,
        keys=keys,
        scale=scale,
        log2e=LOG2E,
        GROUP=heads // k_heads,
        CAUSAL=is_causal,
        RAGGED=not is_causal and keys % tile_k > 0,
        **for_queries,
    )

    tile_q = for_keys["TILE_Q"]
    tile_k = for_keys["TILE_K"]
    tiles = triton.cdiv(keys, tile_k)
    _any_attention_bwd_keys[(tiles * batch * k_heads,)](
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
        log2e=LOG2E,
        GROUP=heads // k_heads,
        CAUSAL=is_causal,
        **for_keys,
    )
    return dq, dk, dv


# %%
# The function
# ------------
#
# There are three who may call it: autograd, ``torch.compile`` and
# ``torch.autocast``.
#
# **Autograd** needs a function that saves what the backward pass asks for. We
# save the inputs as they came. If one of them had to be copied, it is copied
# again in the backward pass, and no copy stays in memory between both passes.


class _AnyAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, is_causal, scale):
        y, lse = forward(query, key, value, is_causal, scale)
        ctx.save_for_backward(query, key, value, y, lse)
        ctx.is_causal = is_causal
        ctx.scale = scale
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        grads = backward(dy, *ctx.saved_tensors, ctx.is_causal, ctx.scale)
        return *grads, None, None


# %%
# **torch.compile** can't look into our launches, and need not. We tell it that
# both passes are *operators*: what goes in, what comes out, and nothing of
# what is inside. For its plans it calls a *fake* version of each, which only
# makes empty tensors of the right shapes and strides. Our real functions make
# theirs with ``rows_like``, so the fake ones do, too.


@torch.library.custom_op("both_passes::any_attention", mutates_args=())
def operator_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    return forward(query, key, value, is_causal, scale)


@operator_forward.register_fake
def _(query, key, value, is_causal, scale):
    return rows_like(query), empty_lse(query, is_causal)


@torch.library.custom_op("both_passes::any_attention_bwd", mutates_args=())
def operator_backward(
    dy: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    y: torch.Tensor,
    lse: torch.Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return backward(dy, query, key, value, y, lse, is_causal, scale)


@operator_backward.register_fake
def _(dy, query, key, value, y, lse, is_causal, scale):
    return rows_like(query), rows_like(key), rows_like(value)


def keep(ctx, inputs, output):
    query, key, value, is_causal, scale = inputs
    y, lse = output
    ctx.save_for_backward(query, key, value, y, lse)
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)
    ctx.is_causal = is_causal
    ctx.scale = scale


def operator_gradients(ctx, dy, _):
    grads = operator_backward(dy, *ctx.saved_tensors, ctx.is_causal, ctx.scale)
    return *grads, None, None


BOUND = operator_forward.register_autograd(
    operator_gradients, setup_context=keep
)

# %%
# **torch.autocast** lets a model with parameters in float32 compute in 16
# bits. PyTorch's function is on its list of those that do: it converts its
# inputs. So does ours, before anything else, and autograd converts the
# gradients back.
#
# Wrong input gets an error that names what is wrong and what is taken.

# %%

# Scaffold: which arguments are taken.

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


def check_arguments(query, key, value, scale, enable_gqa):
    for name, t in (("query", query), ("key", key), ("value", value)):
        check_tensor(name, t, query)
    batch, heads, _, D = query.shape
    if not 1 <= D <= max(TILES):
        raise ValueError(
            f"the head dimension is {D}: 1 to {max(TILES)} are taken"
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


# %%


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
    check_arguments(query, key, value, scale, enable_gqa)
    if scale is None:
        scale = query.shape[-1] ** -0.5
    dtype = query.dtype
    if not ON_GPU and dtype == torch.bfloat16:
        # The interpreter multiplies the bits of bfloat16 as whole numbers.
        query, key, value = query.float(), key.float(), value.float()
    if torch.compiler.is_compiling():
        y, _ = operator_forward(query, key, value, is_causal, scale)
    else:
        y = _AnyAttention.apply(query, key, value, is_causal, scale)
    return y.to(dtype)


# %%
# Is it right?
# ------------
#
# We compare with PyTorch's function in float64, and print the largest error of
# each tensor, as a share of its largest number. The powers and ``ds`` are
# rounded to the type of the inputs before they are multiplied, so we allow a
# few times the error of one rounding. That the function works under
# ``torch.compile`` and ``torch.autocast`` and repeats its bits is not shown
# here: the tests of this site check it.


def check(
    queries, keys, D, dtype, *, heads=2, k_heads=2, is_causal=False, scale=None
):
    """The largest error of y, dq, dk and dv, compared with float64."""
    shapes = {
        "q": (2, heads, queries, D),
        "k": (2, k_heads, keys, D),
        "v": (2, k_heads, keys, D),
    }
    ours = []
    exact = []
    for shape in shapes.values():
        t = torch.randn(shape, device=DEVICE).to(dtype)
        ours.append(t.clone().requires_grad_())
        exact.append(t.double().requires_grad_())
    dy = torch.randn(shapes["q"], device=DEVICE).to(dtype)
    how = {"is_causal": is_causal, "scale": scale, "enable_gqa": True}
    y = attention(*ours, **how)
    y.backward(dy)
    expected = F.scaled_dot_product_attention(*exact, **how)
    expected.backward(dy.double())
    pairs = [(y, expected)]
    pairs += [(t.grad, e.grad) for t, e in zip(ours, exact, strict=True)]
    errors = [((t - e).abs().max() / e.abs().max()).item() for t, e in pairs]
    limit = max(4 * torch.finfo(dtype).eps, 1e-5)
    for name, error in zip(("y", "dq", "dk", "dv"), errors, strict=True):
        assert error < limit, f"{name} is off by {error:.1e}"
    said = " ".join(f"{error:.0e}" for error in errors)
    print(f"{str(dtype)[6:]:8} errors below {limit:.0e}: {said}")


HALF = torch.float16
check(37, 150, 64, HALF, is_causal=True)
check(150, 37, 64, HALF, is_causal=True)
check(70, 90, 128, HALF, heads=6, k_heads=2, is_causal=True)
check(1, 130, 80, HALF, heads=4, k_heads=1)
check(33, 17, 5, HALF, scale=2.0)
check(40, 50, 256, torch.bfloat16, is_causal=True)
check(40, 50, 65, torch.float32, is_causal=True)

# %%
# Another proof needs no other implementation. When we change the inputs by a
# small step, the loss must change by the dot product of this step and the
# gradients. In float32 we can take a small enough step.


def check_slope(is_causal):
    """The change of a loss along a random direction, found in two ways."""
    shape = (1, 2, 20, 16)
    given = [
        torch.randn(shape, device=DEVICE).requires_grad_() for _ in range(3)
    ]
    steps = [torch.randn_like(t) for t in given]
    dy = torch.randn(shape, device=DEVICE)
    y = attention(*given, is_causal=is_causal)
    grads = torch.autograd.grad(y, given, dy)
    by_gradients = sum(
        (g * step).sum() for g, step in zip(grads, steps, strict=True)
    )
    size = 2.0**-7
    ends = [
        attention(
            *(t + sign * size * s for t, s in zip(given, steps, strict=True)),
            is_causal=is_causal,
        )
        for sign in (1, -1)
    ]
    by_steps = ((ends[0] - ends[1]) * dy).sum() / (2 * size)
    print(f"slope {by_gradients:.4f} by gradients, {by_steps:.4f} by steps")
    assert (by_gradients - by_steps).abs() < 1e-2 * (1 + by_steps.abs())


check_slope(is_causal=False)
check_slope(is_causal=True)

# %%
# How fast is the backward pass?
# ------------------------------
#
# We count five products for each head, half of them if causal, although our
# kernels have seven.

# %%

# Scaffold: attention backward, two benchmarks.


@functools.cache  # all lines in turns; then each is asked for its own
def backward_speeds(N, D, dtype, is_causal):
    if not ON_GPU:
        return {}  # the interpreter cannot be timed
    q, k, v, dy = inputs(N, D, dtype)
    ours = functools.partial(attention, is_causal=is_causal)
    calls = {}
    for name, function in functions(ours, N, is_causal).items():
        y = function(q, k, v)
        calls[name] = functools.partial(
            torch.autograd.grad, y, (q, k, v), dy.detach(), retain_graph=True
        )
    return speeds(5, calls, N, is_causal)


@triton.testing.perf_report(
    benchmark_of("any-attention-backward", "backward", 128, False)
)
def bench_backward(N, D, is_causal, dtype, mode, provider):
    """All lines in turns, 15 times, each a CUDA graph that overwrites L2
    first; the time of a graph that only overwrites L2 is subtracted."""
    return backward_speeds(N, D, dtype, is_causal).get(provider, NOTHING)


@triton.testing.perf_report(
    benchmark_of("any-attention-backward-causal", "backward", 128, True)
)
def bench_backward_causal(N, D, is_causal, dtype, mode, provider):
    """All lines in turns, 15 times, each a CUDA graph that overwrites L2
    first; the time of a graph that only overwrites L2 is subtracted."""
    return backward_speeds(N, D, dtype, is_causal).get(provider, NOTHING)


# %%

in_percent(bench_backward)

# %%

in_percent(bench_backward_causal)

# %%
# **What both figures show.**
# On the H200 our backward pass reaches 444 TFLOP/s at 16384 keys, and 447 if
# causal. From 2048 keys on that is 78% to 82% of cuDNN's speed, and 80% to 90%
# of it if causal. The longer the sequences are, the further is cuDNN ahead: at
# 1024 keys we still have 84% of its speed, and 96% if causal. Over all lengths
# ours is 1.6 times as fast as FlashAttention-2, and 1.5 to 1.8 times if
# causal. At 4096 keys it is 1.1 times as fast as FlexAttention, and 1.2 times
# if causal.
#
# **Why.**
# Our kernels have seven products where five count. At 16384 keys they do 7/5
# of 444, which is 621 TFLOP/s, or 82% of what the product of matrices beside
# them reaches. cuDNN does 566 TFLOP/s, or 75% of the product of matrices if it
# has five products.
#
# **What follows.**
# If it has, we are not behind because our Tensor Cores wait for longer. They
# have more to do: two of the seven products are computed a second time. At the
# same rate, five products would be faster than cuDNN.
#
# `Five products or seven <02-backward.html>`_ tries four ways to save the two.
# With long sequences each of them costs more than it saves, so we stay with
# seven. And why does cuDNN gain more than we do as sequences grow? We do not
# know, because we have not looked into its backward kernels.
#
# Half as many numbers in a head
# ------------------------------
#
# These are the same four figures with 32 heads of 64 numbers in place of 16
# heads of 128.

# %%

# Scaffold: heads of 64 numbers, four benchmarks.


@triton.testing.perf_report(
    benchmark_of("any-attention-forward-64", "forward", 64, False)
)
def bench_forward_64(N, D, is_causal, dtype, mode, provider):
    """All lines in turns, 15 times, each a CUDA graph that overwrites L2
    first; the time of a graph that only overwrites L2 is subtracted."""
    return forward_speeds(N, D, dtype, is_causal).get(provider, NOTHING)


@triton.testing.perf_report(
    benchmark_of("any-attention-forward-causal-64", "forward", 64, True)
)
def bench_forward_causal_64(N, D, is_causal, dtype, mode, provider):
    """All lines in turns, 15 times, each a CUDA graph that overwrites L2
    first; the time of a graph that only overwrites L2 is subtracted."""
    return forward_speeds(N, D, dtype, is_causal).get(provider, NOTHING)


@triton.testing.perf_report(
    benchmark_of("any-attention-backward-64", "backward", 64, False)
)
def bench_backward_64(N, D, is_causal, dtype, mode, provider):
    """All lines in turns, 15 times, each a CUDA graph that overwrites L2
    first; the time of a graph that only overwrites L2 is subtracted."""
    return backward_speeds(N, D, dtype, is_causal).get(provider, NOTHING)


@triton.testing.perf_report(
    benchmark_of("any-attention-backward-causal-64", "backward", 64, True)
)
def bench_backward_causal_64(N, D, is_causal, dtype, mode, provider):
    """All lines in turns, 15 times, each a CUDA graph that overwrites L2
    first; the time of a graph that only overwrites L2 is subtracted."""
    return backward_speeds(N, D, dtype, is_causal).get(provider, NOTHING)


# %%

in_percent(bench_forward_64)

# %%

in_percent(bench_forward_causal_64)

# %%

in_percent(bench_backward_64)

# %%

in_percent(bench_backward_causal_64)

# %%
# **What the four figures show.**
# On the H200 the forward pass is at 96% to 104% of cuDNN's speed, and at 91%
# to 104% if causal. From 4096 keys on it is level with cuDNN or ahead of it.
#
# The backward pass is at 82% to 92%, and at 85% to 101% if causal. As with 128
# numbers, cuDNN gains on us as sequences grow.
#
# In all four figures and at every length, ours is 1.4 to 1.7 times as fast as
# FlashAttention-2. At 4096 keys it is 1.2 to 1.3 times as fast as
# FlexAttention.
#
# **Why.**
# A score of 64 products has half the operations and needs a power like one of
# 128. `Attention without its matrix <01-attention.html>`_ counts both: in the
# forward pass the powers take as long as the products then, for everybody. So
# it should help cuDNN less that it keeps its Tensor Cores busier than we do
# with 128 numbers. In the backward pass there are more products for each
# power, and our seven in place of five count as before.
#
# What a step needs of memory
# ---------------------------
#
# Here is the most memory that a forward and a backward pass of causal
# attention take at a time, beside their inputs.

# %%

# Scaffold: memory, a benchmark.


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=[1024, 2048, 4096, 8192],
        x_log=True,
        y_log=True,
        xlabel="N (queries, and keys)",
        line_arg="provider",
        line_vals=["triton", "formula"],
        line_names=["Triton", "The formula"],
        ylabel="GB of memory",
        plot_name="any-attention-memory",
        args={
            "D": 128,
            "is_causal": True,
            "dtype": torch.float16,
            "mode": "forward and backward",
        },
    )
)
def bench_memory(N, D, is_causal, dtype, mode, provider):
    """The most memory that PyTorch allocated while a forward and a backward
    pass ran, beside that of their inputs."""
    if not ON_GPU:
        return NOTHING
    function = {"triton": attention, "formula": formula}[provider]
    q, k, v, dy = inputs(N, D, dtype)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = function(q, k, v, is_causal=is_causal)
    torch.autograd.grad(y, (q, k, v), dy.detach())
    torch.cuda.synchronize()
    most = (torch.cuda.max_memory_allocated() - before) / 1e9
    return most, most, most


# %%

bench_memory.run(show_plots=ON_GPU)

# %%
# **What the figure shows.**
# On the H200 our function takes 0.27 GB at every length: the results, and the
# three gradients. The formula takes 2.3 GB at 1024 keys and 17.4 GB at 8192.
#
# Where PyTorch or a library is better
# ------------------------------------
#
# - **cuDNN is faster.** On the H200, with 128 numbers in a head, it is ahead
#   of us at every length. At 4096 keys our speed is 82% of cuDNN's forward and
#   84% if causal, 80% backward and 84% if causal. With 64 numbers it is ahead
#   of us forward up to 2048 keys. Backward it is ahead at every length, except
#   at 1024 keys if causal.
# - **FlashAttention-3** is fast, too. By its `paper
#   <https://arxiv.org/abs/2407.08608>`_ it reaches up to 740 TFLOP/s forward
#   on an H100. It can also multiply in 8 bits, which we do without.
# - **PyTorch takes more**: a mask of your own, dropout, values that are wider
#   than keys, a negative scale, and more than 256 numbers in a head.
# - **FlexAttention takes any rule** in place of the limit: windows, several
#   documents in a sequence, a bias that depends on the distance. It also skips
#   the tiles that nobody sees.
# - **One query at a time.** When a model writes word by word, there is one
#   query and many keys. Our program with this query goes through all keys
#   alone, while most SMs have nothing to do. Libraries split the keys among
#   programs then.
# - **float32.** Ours is right, and slow.
# - **The host.** A descriptor is made in Python for each tensor of each call.
#   Where sequences are short, a call waits for that, as `What the user waits
#   for <../layer-norm/10-host-time.html>`_ explains.
# - **Widths between powers of two.** A head of 80 numbers costs as much as one
#   of 128.
#
# What do the first two do that we do not? The paper describes it, and so does
# a forward kernel of cuDNN for these GPUs, which NVIDIA has `published
# <https://github.com/NVIDIA/cudnn-frontend/releases/tag/v1.19.0>`_. We suppose
# that what PyTorch calls does the same.
#
# - **Some warps only load.** In the kernel of cuDNN one group of four warps
#   does nothing but ask the TMA for tiles. It needs few registers, and gives
#   up most of its own to two other groups of four warps, which do all the
#   rest. This is called *warp specialization*.
# - **The others take turns.** Each of the two groups has 64 queries, and a
#   barrier lets only one of them at a time compute powers. Meanwhile the other
#   one can use the Tensor Cores. The paper calls this *ping-pong*. It is the
#   drawing of `Attention without its matrix <01-attention.html>`_, in which
#   two programs take turns.
# - **Programs stay.** In the kernel of cuDNN each SM has one program, which
#   takes another tile of queries when it has finished one. So the first tiles
#   of the next one are on their way while the last results are stored.
#
# On our page the compiler decides what each warp does, and programs that share
# an SM do not know of each other. For warps that only load, ``tl.range`` has
# an argument, ``warp_specialize=True``. We tried it in kernels like these,
# with Triton 3.6 on an H100. Even with the best tiles that we found for it
# they were slower than without it. `Attention with warps that only load
# <05-warp-specialization.html>`_ says itself what each warp does, and has the
# first two of these three ideas. `Programs that stay
# <07-programs-that-stay.html>`_ has the third.
#
# Exercise
# --------
#
# **Exercise 1: the other corner.**
# Write the forward kernel for causal attention that begins in the lower right
# corner: the last query sees all keys, and each query before it sees one key
# less. A query that sees none has a result of 0.
# Your kernel has the arguments of ``_any_attention_fwd``, and is only called
# for causal attention. ``exercise_1`` says whether it is right.
#
# **Hint 1.** The limit of query ``i`` is ``i + 1 + keys - queries``, and not
# below 0. Which three numbers of the kernel come from it?
#
# **Hint 2.** With 100 queries and 40 keys the limit of the first 60 queries
# is 0. For some programs ``whole`` and ``end`` would be negative.
#
# **Hint 3.** A query that sees nothing has a maximum of :math:`-\infty`, and
# :math:`-\infty - (-\infty)` is not a number. What if the maximum begins with
# a finite number far below all scores? And what is divided at the end?


def exercise_1(kernel):
    """Whether a kernel begins in the lower right corner."""
    right = True
    for queries, keys in ((40, 100), (100, 40), (70, 70)):
        q = torch.randn(1, 2, queries, 32, device=DEVICE, dtype=HALF)
        k, v = torch.randn(2, 1, 2, keys, 32, device=DEVICE, dtype=HALF)
        y, _ = forward(q, k, v, True, 32**-0.5, kernel)
        scores = q.double() @ k.double().mT * 32**-0.5
        unseen = torch.ones(queries, keys, dtype=bool, device=DEVICE)
        unseen = unseen.triu(1 + keys - queries)
        weights = scores.masked_fill(unseen, float("-inf")).softmax(-1)
        # A row without a key is 0 / 0 here.
        exact = weights.nan_to_num() @ v.double()
        error = (y - exact).abs().max().item()
        print(f"{queries} queries, {keys} keys: largest error {error:.1e}")
        right = right and error < 4e-3
    return right


print("right:", exercise_1(_any_attention_fwd))  # begins in the upper left

# %%

# Solution 1


@triton.jit(do_not_specialize=["heads", "queries", "keys"])
def _any_attention_fwd_lower_right(
    q_desc,
    k_desc,
    v_desc,
    y_desc,
    lse_ptr,
    rows,
    heads,
    queries,
    keys,
    scale,
    GROUP: tl.constexpr,
    CAUSAL: tl.constexpr,
    RAGGED: tl.constexpr,
    DIM: tl.constexpr,
    TILE_Q: tl.constexpr,
    TILE_K: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    tiles = tl.cdiv(queries, TILE_Q)
    first = (tiles - 1 - tl.program_id(0) % tiles) * TILE_Q
    query = first + tl.arange(0, TILE_Q)
    lead = tl.program_id(0) // tiles
    batch = lead // heads
    head = lead % heads
    k_head = head // GROUP

    # New: the limit of all queries is larger by ``more``, or smaller.
    more = keys - queries
    limit = tl.minimum(tl.maximum(query + 1 + more, 0), keys)[:, None]
    whole = tl.maximum(first + 1 + more, 0) // TILE_K * TILE_K
    whole = tl.minimum(whole, keys // TILE_K * TILE_K)
    end = tl.minimum(tl.maximum(first + TILE_Q + more, 0), keys)

    q = q_desc.load([batch, head, first, 0]).reshape(TILE_Q, DIM)
    # New: finite. A score of -infinity minus this is still -infinity.
    maximum = tl.full((TILE_Q,), -1e30, tl.float32)
    total = tl.zeros((TILE_Q,), tl.float32)
    weighted = tl.zeros((TILE_Q, DIM), tl.float32)
    for start in tl.range(0, whole, TILE_K, num_stages=STAGES):
        maximum, total, weighted = _attend(
            maximum, total, weighted, q, k_desc, v_desc, batch, k_head, start,
            limit, scale, DIM, TILE_K, False, PRECISION,
        )  # fmt: skip
    for start in tl.range(whole, end, TILE_K, num_stages=STAGES):
        maximum, total, weighted = _attend(
            maximum, total, weighted, q, k_desc, v_desc, batch, k_head, start,
            limit, scale, DIM, TILE_K, True, PRECISION,
        )  # fmt: skip

    # New: a query that saw no key has a sum of 0, and 0 / 1 is 0.
    total = tl.where(limit.reshape(TILE_Q) > 0, total, 1)
    y = (weighted / total[:, None]).to(y_desc.dtype)
    y_desc.store([batch, head, first, 0], y.reshape(1, 1, TILE_Q, DIM))
    at = lead.to(tl.int64) * rows + query
    tl.store(lse_ptr + at, maximum + tl.log2(total))


assert exercise_1(_any_attention_fwd_lower_right)

# %%
# What we learned
# ---------------
#
# These are the ways to compute causal attention on this page, with their
# speeds on the H200 at 4096 keys and 128 numbers in a head, forward and
# backward:
#
# - **FlashAttention-2** reaches 310 and 245 TFLOP/s.
# - **FlexAttention** is compiled for a rule that you write. It reaches 371 and
#   343 TFLOP/s.
# - **Ours** has a loop without masks and one with them, and seven products
#   backward. It reaches 480 and 398 TFLOP/s.
# - **cuDNN** reaches 571 and 472 TFLOP/s.
#
# And for kernels that take any input:
#
# - Give every case one form, such as a limit for each query. Then one mask
#   serves all of them.
# - Let most steps have no mask, and give a loop of its own to those that need
#   one.
# - Who owns a sum should visit everybody who adds to it, also across heads.
#   Then nothing is repeated, and nothing is added up later.
# - Padding may be left to the loads. What it costs is arithmetic.
# - Return results in the layout of the inputs, and the next operation needs no
#   copy.
#
# **Next:** a model tells attention where a word stands by turning queries and
# keys. `Rotary embedding <04-rotary.html>`_ does it in both passes.
