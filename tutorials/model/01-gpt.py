r"""
A GPT whose every kernel is a page of this site
===============================================

Can a language model train with the kernels of this site alone, as well as with
PyTorch's, and faster?
It can: the losses follow PyTorch's, and a step, recorded as a CUDA graph,
takes less than three fifths of PyTorch's time and half of its memory, because
what stands between the products of matrices moves and keeps fewer bytes.

On the other pages we write one operation at a time, and measure it by itself.
Here they come together: embedding, blocks with attention and a gated MLP, and
a loss. Every kernel of the layers is one that a page explains, in both passes,
products of matrices included. PyTorch adds what these pages do not have: the
lookup of the embedding, the mean of the losses, the optimizer, some copies,
and the memory that tensors live in.
``torch.compile`` comes close: measured in one way we are 10% faster, in
another 1%, which may be noise. And we need less memory.

Do you only want the functions? Take ``both_passes.py``, which this page offers
under its title. It has the functions of many pages, with their kernels and all
that these need, each as it stands on its page: those of this model, and layer
norm, dropout, activations, softmax and cross-entropy, too.

**What you will learn**

- What a small GPT is made of, on two screens of code.
- How to train with weights in 16 bits, without losing small steps.
- How to compare two trainings: by gradients, by losses, and with other seeds.
- How a whole step becomes a CUDA graph, and where its microseconds go.
- How the same script trains on two GPUs, and what the second one brings.

**What you need:** a look at the pages whose functions we take. Most of all,
`RMS normalization and the residual stream
<../norms-and-losses/01-rms-norm.html>`_ and `Causal, grouped, any length
<../attention/03-any-attention.html>`_ explain what our norm and our attention
do. You don't need a GPU: without one, a tiny model trains for a few steps.
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

# Scaffold: more imports, and which GPU this process has.

import functools
import gc
import re
import subprocess
import sys
import sysconfig
import time
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

TORCHRUN = dist.is_torchelastic_launched()
if TORCHRUN and ON_GPU:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_stream(torch.cuda.Stream())

import both_passes

# %%
# What is a GPT made of?
# ----------------------
#
# A GPT reads tokens, which are pieces of text, and says for each of them which
# token will come next. Each token has a row of numbers, its *stream*. Each
# block of the model adds something to the stream twice:
#
# - *Attention* lets a token look at the tokens before it.
# - The *MLP*, which is two products with a gate between them, works on each
#   token by itself.
#
# Both read the stream through a norm. At the end a last product, the *head*,
# makes a number for each token of the vocabulary, which is called its *logit*.
# The loss compares these with the token that really came.

# %%

# Drawing: the functions of a block.

plt.figure(
    "A block. The stream goes from left to right, below. Above it are add and "
    "RMS norm, linear, rotary, attention, linear, and what comes out is added "
    "to the stream. Then again add and RMS norm, linear, SwiGLU, linear.",
    figsize=(7.5, 2.4),
)
BOXES = ("norm", "linear", "rotary", "attention", "linear")
for start, names in ((0, BOXES), (6.2, ("norm", "linear", "gate", "linear"))):
    for i, name in enumerate(names):
        color = {"linear": "C0", "norm": "C2", "attention": "C1"}
        plt.text(
            start + 1.15 * i,
            1.5,
            name,
            rotation=90,
            ha="center",
            va="center",
            color="white",
            bbox={"fc": color.get(name, "C3"), "ec": "none", "pad": 6},
        )
    last = start + 1.15 * (len(names) - 1)
    plt.annotate("", (start, 0.9), (start, 0), arrowprops={"arrowstyle": "->"})
    plt.annotate("", (last, 0), (last, 0.9), arrowprops={"arrowstyle": "->"})
plt.annotate("", (11, 0), (-1, 0), arrowprops={"arrowstyle": "->", "lw": 2})
plt.text(-1, -0.45, "stream", va="center")
plt.axis((-1.2, 11.2, -0.8, 2.6))
plt.axis("off")
plt.show()

# %%
# How large is ours? On a GPU it has about as many parameters as the smallest
# GPT-2. Without one it is tiny, because Triton's interpreter is slow.

LARGE = {
    "width": 768,  # numbers of a token
    "hidden": 2048,  # columns of the gate
    "heads": 12,  # of queries
    "key heads": 4,  # each of them serves three heads of queries
    "layers": 12,  # blocks
    "words": 32000,  # tokens of the vocabulary
    "length": 1024,  # tokens of a sequence
    "sequences": 16,  # of a step, which so has 16384 tokens
    "steps": 400,
}
TINY = {
    "width": 32,
    "hidden": 64,
    "heads": 2,
    "key heads": 1,
    "layers": 2,
    "words": 192,
    "length": 8,
    "sequences": 1,
    "steps": 2,
}
SIZES = LARGE if ON_GPU else TINY
WIDTH = SIZES["width"]
HIDDEN = SIZES["hidden"]
HEADS = SIZES["heads"]
KEY_HEADS = SIZES["key heads"]
LAYERS = SIZES["layers"]
WORDS = SIZES["words"]
LENGTH = SIZES["length"]
SEQUENCES = SIZES["sequences"]
STEPS = SIZES["steps"]
# The interpreter multiplies in float32.
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
DIM = WIDTH // HEADS  # numbers of a head

# %%
# Text that everybody has
# -----------------------
#
# A model needs text. Python comes with some: the source code of its standard
# library. Nothing has to be downloaded.

LETTERS = None if ON_GPU else 20_000  # of the text; None: all of them


def read_sources():
    """The source code of Python's standard library, as one text."""
    folder = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests", "idlelib"}
    files = [*folder.glob("*.py"), *folder.glob("[a-z]*/*.py")]
    parts = []
    for file in sorted(files):
        if file.parent.name not in left_out:
            parts.append(file.read_text(encoding="utf-8", errors="replace"))
    text = "".join(parts)[:LETTERS]
    return text.encode("ascii", errors="replace").decode()


TEXT = read_sources()
print(TEXT[:200])

# %%
# What is a token? We cut the text into pieces: words with the space before
# them, digits, blanks, and runs of other characters. The pieces that occur
# most often become tokens. All other pieces are spelled, character by
# character, for which 128 tokens are kept, one for each character of ASCII.
# What is not ASCII has become a question mark above.


PIECE = re.compile(r" ?[A-Za-z_]+|\d|\s+|[^\sA-Za-z_\d]+")


def make_tokens(text):
    """The text as numbers, and what each number stands for."""
    pieces = PIECE.findall(text)
    counts = Counter(piece for piece in pieces if len(piece) > 1)
    words = [chr(number) for number in range(128)]
    words += [piece for piece, _ in counts.most_common(WORDS - 128)]
    number_of = {word: number for number, word in enumerate(words)}
    numbers = []
    for piece in pieces:
        if piece in number_of:
            numbers.append(number_of[piece])
        else:
            numbers += [number_of[character] for character in piece]
    return torch.tensor(numbers), words


TOKENS, VOCABULARY = make_tokens(TEXT)
assert "".join(VOCABULARY[number] for number in TOKENS.tolist()) == TEXT
print(f"{len(TEXT)} characters are {len(TOKENS)} tokens. The first ones:")
print([VOCABULARY[number] for number in TOKENS[:12].tolist()])

# %%
# A step of the training takes some sequences that begin anywhere in the text.
# The target of each token is the token after it.


def batch(step, seed):
    """Tokens and targets of a step, as (sequences, length)."""
    generator = torch.Generator().manual_seed(1000 * seed + step)
    last = len(TOKENS) - LENGTH - 1
    starts = torch.randint(last, (SEQUENCES,), generator=generator)
    rows = torch.stack([TOKENS[i : i + LENGTH + 1] for i in starts.tolist()])
    return rows[:, :-1].to(DEVICE), rows[:, 1:].to(DEVICE)


# %%
# The functions
# -------------
#
# Which functions does the model call? There are six, and we have them twice:
# ours, and PyTorch's. Four of ours are functions of pages as they are. The
# other two need a few lines here, so we begin with them.
#
# **The loss.** The logits of 16384 tokens and 32000 words take 1 GB in 16
# bits. The function of `A loss without its logits
# <../matrix-products/03-linear-cross-entropy.html>`_ takes a *chunk* of tokens
# at a time, and turns their logits into gradients in the same place. By itself
# it would take all tokens in one chunk here. We tell it to take 4096, so only
# a quarter of the logits is there at a time. As PyTorch's does, the function
# returns the loss in the type of its input, and bfloat16 has less than three
# digits. That is too coarse for two curves that we want to compare. So we call
# two of the functions that it is made of, and keep the loss in float32.

# %%

# Scaffold: the loss in float32.


class _MeanLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, target):
        # The losses of all tokens, and dx and dw of their sum.
        options = both_passes.Options(chunk=4096)
        step = both_passes.head_forward(
            x, weight, None, None, target, options, wants=(True, True, False)
        )
        losses = step.rows[0]
        ctx.step = step
        ctx.save_for_backward(x, weight)
        return losses.mean()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        x, weight = ctx.saved_tensors
        scale = g / len(x)  # of a mean
        dx = ctx.step.dx.mul_(scale)
        dw = both_passes.finish_dw(ctx.step, x, weight, scale)
        ctx.step = None
        return dx, dw, None


def mean_loss(x, weight, target):
    """The mean loss of x @ weight.T in float32, without all logits."""
    return _MeanLoss.apply(x.flatten(0, 1), weight, target.flatten())


# %%
# **The heads.** One product makes queries, keys and values, side by side.
# Queries and keys have to be rotated, and values stay as they are. If we left
# that to autograd, it would copy all three gradients to put them side by side
# again. In our backward pass the kernel of `Rotary embedding
# <../attention/04-rotary.html>`_ writes the gradients of queries and keys
# where they belong, and only those of the values, a fifth of all numbers here,
# are copied.


def split_heads(t):
    """Queries, keys and values: views of (batch, length, heads, DIM)."""
    parts = t.split((HEADS, KEY_HEADS, KEY_HEADS), dim=2)
    # (batch, heads, length, DIM), as attention wants them
    return [part.transpose(1, 2) for part in parts]


class _Heads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        y = torch.empty_like(x)
        q, k, v = split_heads(x)
        new_q, new_k, new_v = split_heads(y)
        both_passes.rotate([q, k], [new_q, new_k], cos, sin)
        new_v.copy_(v)  # so that nobody has to keep x
        return new_q, new_k, new_v

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dq, dk, dv):
        cos, sin = ctx.saved_tensors
        batches, _, length, _ = dq.shape
        dx = dq.new_empty(batches, length, HEADS + 2 * KEY_HEADS, DIM)
        new_q, new_k, new_v = split_heads(dx)
        both_passes.rotate([dq, dk], [new_q, new_k], cos, sin, back=True)
        new_v.copy_(dv)
        return dx, None, None


def heads(x, cos, sin):
    """Queries, keys and values; x is (batch, length, all heads * DIM)."""
    return _Heads.apply(x.unflatten(-1, (-1, DIM)), cos, sin)


# %%
# And here are ours, each with its page:


def add_and_norm(x, stream, weight):
    return both_passes.add_rms_norm(x, stream, weight.shape, weight, 1e-5)


def attend(q, k, v):
    return both_passes.attention(q, k, v, is_causal=True, enable_gqa=True)


OURS = {
    # norms-and-losses/02: adds x to the stream, and normalizes the sum.
    "add_and_norm": add_and_norm,
    # matrix-products/01: three products in all, for both passes.
    "linear": both_passes.linear,
    # attention/04: queries and keys are turned by their positions.
    "heads": heads,
    # attention/07: causal, with heads that share their keys. It takes what the
    # function of attention/03 takes.
    "attend": attend,
    # matrix-products/02: the SiLU of one half, times the other half.
    "gate": both_passes.swiglu,
    # matrix-products/03: the last product, and the loss.
    "loss": mean_loss,
}

# %%
# In PyTorch each is a line or a few. PyTorch has several *backends* for
# attention. We leave it only that of cuDNN, the fastest of them on the H200 in
# most figures of `Causal, grouped, any length
# <../attention/03-any-attention.html>`_.

# %%

# Scaffold: the same six in PyTorch.


def pytorch_add_and_norm(x, stream, weight):
    stream = x + stream
    return F.rms_norm(stream, weight.shape, weight, 1e-5), stream


def turned(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def pytorch_heads(x, cos, sin):
    q, k, v = split_heads(x.unflatten(-1, (-1, DIM)))
    cos = cos.to(q.dtype)
    sin = sin.to(q.dtype)
    return turned(q, cos, sin), turned(k, cos, sin), v


# What is left is cuDNN, and the formula for float64.
torch.backends.cuda.enable_flash_sdp(False)
torch.backends.cuda.enable_mem_efficient_sdp(False)


def pytorch_attend(q, k, v):
    return F.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=True
    )


def pytorch_gate(x):
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def pytorch_loss(x, weight, target):
    logits = F.linear(x, weight)
    if logits.itemsize == 2:
        logits = logits.float()  # as models do
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


PYTORCH = {
    "add_and_norm": pytorch_add_and_norm,
    "linear": F.linear,
    "heads": pytorch_heads,
    "attend": pytorch_attend,
    "gate": pytorch_gate,
    "loss": pytorch_loss,
}

# %%
# What does each function bring?
# ------------------------------
#
# Before we build the model, here are both passes of each function by itself,
# with the sizes that it has there. The clock is that of `Layer normalization,
# both passes <../layer-norm/01-layer-norm.html>`_. A block calls
# ``add_and_norm`` twice and ``linear`` four times. Of these we measure the
# largest: the first product of the MLP, which makes both halves of what the
# gate is given.

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

# Scaffold: each function by itself, a benchmark.


def given_to(name):
    """What a function of the model is called with, at the model's sizes."""

    def normal(*shape):
        return torch.randn(*shape, device=DEVICE).to(DTYPE)

    x = normal(SEQUENCES, LENGTH, WIDTH)
    # Heads, as they come out of a product.
    q = normal(SEQUENCES, LENGTH, HEADS, DIM).transpose(1, 2)
    k = normal(SEQUENCES, LENGTH, KEY_HEADS, DIM).transpose(1, 2)
    v = normal(SEQUENCES, LENGTH, KEY_HEADS, DIM).transpose(1, 2)
    targets = torch.randint(WORDS, (SEQUENCES, LENGTH), device=DEVICE)
    return {
        "add_and_norm": lambda: (x, normal(*x.shape), normal(WIDTH)),
        "linear": lambda: (x, normal(2 * HIDDEN, WIDTH)),
        "heads": lambda: (
            normal(SEQUENCES, LENGTH, (HEADS + 2 * KEY_HEADS) * DIM),
            *both_passes.tables(LENGTH, DIM),
        ),
        "attend": lambda: (q, k, v),
        "gate": lambda: (normal(SEQUENCES, LENGTH, 2 * HIDDEN),),
        "loss": lambda: (x, normal(WORDS, WIDTH), targets),
    }[name]()


def both_passes_of(function, name):
    """A call of both passes, without arguments."""
    given = given_to(name)
    wanted = [t for t in given if t.dtype == DTYPE]
    for tensor in wanted:
        tensor.requires_grad_()

    def forward():
        results = function(*given)
        return results if isinstance(results, tuple) else (results,)

    dys = [torch.randn_like(y) for y in forward()]
    if name == "loss":
        dys = None  # it is one number, and autograd begins with 1

    def call():
        return torch.autograd.grad(forward(), wanted, dys)

    return call


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["function"],
        x_vals=list(OURS),
        xlabel="",
        line_arg="provider",
        line_vals=["triton", "torch"],
        line_names=["Triton", "PyTorch"],
        ylabel="µs",
        plot_name="gpt-functions",
        args={"M": 16384, "dtype": torch.bfloat16, "pass": "both passes"},
    )
)
def bench_functions(function, M, dtype, provider, **_):
    """Device time: a CUDA graph of several calls, each with inputs of its own
    and after L2 was overwritten, less the graph without the calls; median, 20%
    and 80% quantiles."""
    if not ON_GPU or TORCHRUN:
        return 3 * [float("nan")]
    call = {"triton": OURS, "torch": PYTORCH}[provider][function]
    return device_time(lambda: both_passes_of(call, function))


# %%

bench_functions.run(show_plots=ON_GPU and not TORCHRUN)
if not ON_GPU:
    print("Timing needs a GPU; the page shows recorded figures.")

# %%
# **What the figure shows.**
# On the H200 both passes of our norm take 70 µs, and those of PyTorch's 148
# µs. For the gate it is 128 and 488 µs, for the rotary embedding 64 and 463
# µs, for attention 306 and 379 µs, for the product 433 and 406 µs, and for the
# loss 4285 and 9380 µs.
#
# **Why.**
# Norm, gate and rotary embedding wait for memory. PyTorch has several kernels
# for each of them, and what one writes the next one reads again. It is the
# same with its loss. Our loss is mostly its three products: they are 2.4 ·
# 10¹² operations, and take 3.8 ms in the profile further down. For products
# and attention PyTorch calls NVIDIA's libraries, cuBLAS and cuDNN, which are
# made to keep Tensor Cores busy. Our attention is ahead of cuDNN's here all
# the same. Its forward pass is that of `Programs that stay
# <../attention/07-programs-that-stay.html>`_, and its backward pass that of
# `Two programs on an SM <../attention/06-two-programs.html>`_. Both have
# kernels in Gluon for heads of 64 numbers, too.
#
# **What follows.**
# Where one waits for memory, one kernel in place of several brings most. Where
# one waits for Tensor Cores there is less to win, and something to lose.
#
# The model
# ---------
#
# Here is the whole model. It is given the functions, so the two models that we
# compare differ in nothing else.
#
# One thing is unusual. What attention or the MLP has computed is not added to
# the stream at once: this result, ``x``, and the stream are both handed on,
# and the kernel of the next norm adds them before it normalizes the sum.


def new_matrix(rows, columns, scale=1.0):
    """A random weight: a product with it is about as large as its input."""
    weight = torch.randn(rows, columns, device=DEVICE)
    return torch.nn.Parameter(weight * scale * columns**-0.5)


def new_vector():
    return torch.nn.Parameter(torch.ones(WIDTH, device=DEVICE))


class Block(torch.nn.Module):
    """Attention and an MLP; x is what the block before adds to the stream."""

    def __init__(self, functions):
        super().__init__()
        self.do = SimpleNamespace(**functions)
        # All blocks add two results each to the stream. Their weights are
        # smaller where there are more blocks, so that the sum does not grow.
        small = (2 * LAYERS) ** -0.5
        self.norm_1 = new_vector()
        self.qkv = new_matrix((HEADS + 2 * KEY_HEADS) * DIM, WIDTH)
        self.out = new_matrix(WIDTH, WIDTH, small)
        self.norm_2 = new_vector()
        self.gate_and_up = new_matrix(2 * HIDDEN, WIDTH)
        self.down = new_matrix(WIDTH, HIDDEN, small)

    def forward(self, x, stream, cos, sin):
        do = self.do
        # Attention. The norm is from norms-and-losses/02.
        y, stream = do.add_and_norm(x, stream, self.norm_1)
        # The product is from matrix-products/01, the rotation: attention/04.
        q, k, v = do.heads(do.linear(y, self.qkv), cos, sin)
        y = do.attend(q, k, v)  # attention/07
        # The next product is from matrix-products/01, too.
        x = do.linear(y.transpose(1, 2).flatten(2), self.out)

        # The MLP. The norm is from norms-and-losses/02.
        y, stream = do.add_and_norm(x, stream, self.norm_2)
        # The product is from matrix-products/01, the gate: matrix-products/02.
        y = do.gate(do.linear(y, self.gate_and_up))
        return do.linear(y, self.down), stream  # matrix-products/01


class GPT(torch.nn.Module):
    def __init__(self, functions, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.do = SimpleNamespace(**functions)
        # PyTorch's: a lookup, and sums of gradients by token.
        self.embedding = torch.nn.Embedding(WORDS, WIDTH, device=DEVICE)
        self.blocks = torch.nn.ModuleList(
            Block(functions) for _ in range(LAYERS)
        )
        self.norm = new_vector()
        self.head = new_matrix(WORDS, WIDTH)
        # From attention/04. They are no parameters, so they stay in float32
        # whatever the model has.
        self.angles = both_passes.tables(LENGTH, DIM)

    def forward(self, tokens, target):
        x = self.embedding(tokens)
        # The first block adds x to zeros. A norm alone would move 75 MB less,
        # but then autograd would add two gradients of x, and move as much.
        stream = torch.zeros_like(x)
        for block in self.blocks:
            x, stream = block(x, stream, *self.angles)
        # The last norm: norms-and-losses/02.
        y, _ = self.do.add_and_norm(x, stream, self.norm)
        # A product and the loss: matrix-products/03.
        return self.do.loss(y, self.head, target)


def model_of(functions, seed=0, dtype=DTYPE):
    """A model whose weights are rounded to DTYPE, and kept in dtype."""
    return GPT(functions, seed).to(DTYPE).to(dtype)


parameters = sum(each.numel() for each in GPT(OURS).parameters())
print(f"{parameters:,} parameters")

# %%
# Weights in 16 bits, and their masters
# -------------------------------------
#
# Why not simply train the weights? They have 16 bits, and a step of the
# optimizer often changes a weight by less than its last place, as `RMS norm in
# 16 bits <../norms-and-losses/02-rms-norm-16-bits.html>`_ shows. Such a step
# is lost.
#
# So each weight has a *master* in float32. The optimizer changes the masters,
# and after each step the weights are set to them, rounded. The optimizer is
# PyTorch's AdamW. With ``fused`` a few kernels change all masters, and with
# ``capturable`` it keeps its count of steps on the GPU, where the learning
# rate is, too. The next section needs that.


class Training:
    """A model with its masters and its optimizer."""

    def __init__(self, model, call=None):
        self.call = model if call is None else call  # compiled, perhaps
        self.weights = list(model.parameters())
        self.masters = [each.detach().float() for each in self.weights]
        for master in self.masters:
            master.grad = torch.zeros_like(master)
        self.gradients = [master.grad for master in self.masters]
        self.rate = torch.zeros((), device=DEVICE)  # of learning
        self.adamw = torch.optim.AdamW(
            self.masters,
            lr=self.rate,
            betas=(0.9, 0.95),
            fused=ON_GPU,
            capturable=ON_GPU,
        )

    def step(self, tokens, target):
        """A step, and its loss."""
        loss = self.call(tokens, target)
        loss.backward()
        with torch.no_grad():
            # Many copies with few kernels.
            torch._foreach_copy_(
                self.gradients, [each.grad for each in self.weights]
            )
            for weight in self.weights:
                weight.grad = None
            # The rate grows over the first 20 steps, and then stays.
            self.rate.add_(1e-3 / 20).clamp_(max=1e-3)
            self.adamw.step()
            torch._foreach_copy_(self.weights, self.masters)
        return loss.detach()


# %%
# A step as a CUDA graph
# ----------------------
#
# A step launches hundreds of kernels, and each takes the host ten microseconds
# or more. `What the user waits for <../layer-norm/10-host-time.html>`_
# explains what helps. A *CUDA graph* records what a step launches, and
# launches all of it again with a single call. It wants three things of a step:
#
# - **The same addresses each time.** A new batch is copied to where the
#   recorded one was.
# - **The same kernels each time.** No size changes, and no decision depends on
#   a number that is on the GPU.
# - **Nobody waits for the GPU.** The loss stays there until somebody prints
#   it. That is also why the optimizer has to keep its count of steps there.
#
# The first three steps run as usual, because kernels are compiled then and
# the optimizer allocates its tensors.


class Recorded:
    """A training whose steps are replayed, from the fourth one on."""

    def __init__(self, training, usual=3):
        self.training = training
        self.usual = usual
        self.graph = None

    def step(self, tokens, target):
        if not ON_GPU or self.usual > 0:
            self.usual -= 1
            return self.training.step(tokens, target)
        if self.graph is None:
            self.record()
        self.tokens.copy_(tokens)
        self.target.copy_(target)
        self.graph.replay()
        return self.loss.clone()  # the next replay overwrites it

    def record(self):
        self.tokens, self.target = batch(0, seed=0)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(
            self.graph,
            stream=torch.cuda.current_stream(),
            # A thread of NCCL, if there is one, may go on meanwhile.
            capture_error_mode="thread_local",
        ):
            # Nothing runs yet: the launches are only recorded.
            self.loss = self.training.step(self.tokens, self.target)


# %%
# One script, several GPUs
# ------------------------
#
# A second GPU can take sequences of its own. Each GPU has a process, which is
# called a *rank*, and all of the model. After the backward pass the ranks take
# the mean of their gradients, so all of them change their masters in the same
# way. PyTorch's `DistributedDataParallel
# <https://docs.pytorch.org/docs/stable/notes/ddp.html>`_ (DDP) does that while
# the backward pass still runs, and our functions need not know of it.
#
# ``torchrun --nproc-per-node 2 01-gpt.py`` runs this page twice, as two ranks.
# They train some steps on one of them and on both, launched from Python and as
# graphs, say how long a step takes, and end here. Further down we start them
# from this page. Names behind the script tell which *designs* they are to
# train: whose functions a training has, and how they are launched.
#
# Two of these designs have to do with ``torch.compile``. It compiles PyTorch's
# model as it is. Of ours it can take attention into its graph, for this is an
# operator that it knows. It is told not to look into our other functions, but
# to call them as they are.

# %%

# Scaffold: what a rank does.

RANKED = ("eager", "torch", "triton", "torch graph")  # if no name is given
COMPILED = ("compile graph", "triton compiled")
RANKED_GRAPHS = ("triton", "torch graph", "compile graph")
NOT_TRACED = {
    name: function if name == "attend" else torch.compiler.disable(function)
    for name, function in OURS.items()
}
# Without a GPU it finds what to compile, and compiles nothing.
BACKEND = "inductor" if ON_GPU else "eager"


def training_of_ranks(name, ranks, group):
    """A training in the way of a design, on one rank or on several."""
    functions = {"triton compiled": NOT_TRACED, "eager": OURS, "triton": OURS}
    model = model_of(functions.get(name, PYTORCH))
    call = model
    if ranks > 1:
        call = DistributedDataParallel(
            model, process_group=group, gradient_as_bucket_view=True
        )
    if name in COMPILED:
        # The ranks share all cores, for nothing is timed yet.
        threads = max(1, os.cpu_count() // ranks)
        torch._inductor.config.compile_threads = threads
        call = torch.compile(call, dynamic=False, backend=BACKEND)
    training = Training(model, call)
    if name in RANKED_GRAPHS:
        # DDP wants eleven usual steps before it can be recorded.
        return Recorded(training, usual=11)
    return training


def time_of_ranks(name, ranks):
    """µs of a step on this many ranks, and the most GB that the tensors of a
    rank take; None on a rank that waits."""
    group = dist.new_group(list(range(ranks)))
    if dist.get_rank() >= ranks:
        return None
    before = torch.cuda.memory_allocated() if ON_GPU else 0
    training = training_of_ranks(name, ranks, group)
    # Each rank has batches of its own.
    batches = [batch(i, seed=dist.get_rank()) for i in range(3)]
    for turn in range(5 if ON_GPU else 0):  # not timed
        for each in batches:
            training.step(*each)
        if turn == 0:  # what compiling needs does not count
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
    fastest = float("inf")
    for _ in range(8 if ON_GPU else 1):
        dist.barrier(group)
        start = time.perf_counter()
        for each in batches:
            loss = training.step(*each)
        loss.item()  # waits for the GPU
        seconds = (time.perf_counter() - start) / len(batches)
        fastest = min(fastest, 1e6 * seconds)
    most = torch.cuda.max_memory_allocated() - before if ON_GPU else 0
    return fastest, most / 1e9


def run_as_a_rank(names):
    dist.init_process_group("nccl" if ON_GPU else "gloo")
    world = dist.get_world_size()
    for name in names:
        for ranks in sorted({1, world}):
            results = [None] * world
            dist.all_gather_object(results, time_of_ranks(name, ranks))
            if dist.get_rank() == 0:
                us, most = max(each for each in results if each)
                print(
                    f"{name}, ranks: {ranks}, {us:.0f} µs, {most:.3f} GB",
                    flush=True,
                )
    dist.destroy_process_group()


if TORCHRUN:
    run_as_a_rank(sys.argv[1:] or RANKED)
    sys.exit()


def said_by_ranks(ranks, names, seconds):
    """{(name, ranks): (µs of a step, GB)}, by torchrun; what goes wrong, or
    takes longer than so many seconds, is left out."""
    script = Path(run_as_a_rank.__code__.co_filename)
    if not ON_GPU or not script.exists():
        return {}  # a notebook has no file to start
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    process = subprocess.Popen(
        [*command, f"--nproc-per-node={ranks}", script, *names],
        stdout=subprocess.PIPE,
        encoding="utf-8",
    )
    try:
        said, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun ends its ranks, too
        said, _ = process.communicate()
    if process.returncode != 0:  # what is missing is a gap
        print(f"not all of {', '.join(names)} runs: {process.returncode}")
    line = r"([a-z ]+), ranks: (\d), (\d+) µs, (\S+) GB"
    found = {}
    for name, count, us, most in re.findall(line, said):
        found[name, int(count)] = float(us), float(most)
    return found


# %%
# Are the gradients right?
# ------------------------
#
# We compare the gradient of each parameter at the first step with that of the
# same model in float64, with PyTorch's functions. An error is the norm of the
# difference, divided by the norm of the exact gradient. On a GPU the numbers
# have 16 bits, so ours have errors, and so do PyTorch's: that is what we
# compare with.


def gradients_of(functions, dtype):
    """The gradient of each parameter at the first step, by name."""
    model = model_of(functions, dtype=dtype)
    tokens, target = batch(0, seed=0)
    few = slice(4)  # sequences: float64 takes much memory
    model(tokens[few], target[few]).backward()
    return {name: each.grad for name, each in model.named_parameters()}


def relative_errors(functions, exact):
    """By name: how far a gradient is from the exact one."""
    errors = {}
    for name, gradient in gradients_of(functions, DTYPE).items():
        difference = gradient.double() - exact[name]
        errors[name] = (difference.norm() / exact[name].norm()).item()
    return errors


@functools.cache
def errors_of_gradients():
    exact = gradients_of(PYTORCH, torch.float64)
    return {
        "triton": relative_errors(OURS, exact),
        "torch": relative_errors(PYTORCH, exact),
    }


for name, errors in errors_of_gradients().items():
    worst = max(errors, key=errors.get)
    print(
        f"{name}: {len(errors)} gradients, and the largest relative error is "
        f"{errors[worst]:.1e}, of {worst}"
    )
ours, theirs = errors_of_gradients().values()
for name, error in ours.items():
    # In float32 there is hardly any; in 16 bits, about as much as PyTorch has.
    allowed = 1.5 * theirs[name] + (0.0005 if ON_GPU else 1e-5)
    assert error < allowed, f"{name}: {error:.1e}"

# %%

# Scaffold: the errors in each block, a benchmark.


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["block"],
        x_vals=list(range(1, 13)),
        xlabel="block",
        line_arg="provider",
        line_vals=["triton", "torch"],
        line_names=["Triton", "PyTorch"],
        ylabel="relative error",
        plot_name="gpt-gradients",
        args={"M": 4096, "dtype": torch.bfloat16, "mode": "backward"},
    )
)
def bench_gradients(block, M, dtype, mode, provider):
    """The error of each gradient of a block at the first step, over 4
    sequences of 1024 tokens, against float64: the norm of the difference over
    that of the gradient. Median, least and largest of the 6 parameters."""
    if not ON_GPU:
        return 3 * [float("nan")]
    begin = f"blocks.{block - 1}."
    errors = errors_of_gradients()[provider]
    its = sorted(errors[name] for name in errors if name.startswith(begin))
    return its[len(its) // 2], its[0], its[-1]


# %%

bench_gradients.run(show_plots=ON_GPU)

# %%
# **What the figure shows.**
# On the H200 the median gradient of a block has a relative error of 0.29% to
# 0.35% with our functions, and of 0.30% to 0.35% with PyTorch's.
#
# **Why.**
# The weights and all that the functions hand to each other have 16 bits, with
# ours and with PyTorch's. That is where most of the error should come from. So
# ours count as right if their errors are not much larger than PyTorch's. In
# the mean of the twelve blocks they are 0.98 times as large. Two things should
# make ours smaller. Where we have one kernel for several operations, nothing
# is rounded between them. And the angles of our rotary embedding have 32 bits,
# where PyTorch's have 16.
#
# **What follows.**
# Our gradients are good enough to train with, if PyTorch's are.

# %%
# The same training?
# ------------------
#
# Now we train, with our functions and with PyTorch's: with the same weights to
# begin with, and the same batches. Two trainings that round differently drift
# apart, because each step begins with what the last one has left. Is a
# difference the noise of roundings, or a mistake? To have a measure we also
# train with other seeds: other weights to begin with, and other batches. They
# show how far trainings may lie apart in which nothing is wrong.
#
# A loss is a natural logarithm, and the unit of those is the *nat*.


def train(functions, seed):
    """The loss of each step, and the masters at the end."""
    training = Recorded(Training(model_of(functions, seed)))
    losses = [training.step(*batch(i, seed)) for i in range(STEPS)]
    return torch.stack(losses).tolist(), training.training.masters


@functools.cache
def trained(provider, seed):
    return train({"triton": OURS, "torch": PYTORCH}[provider], seed)


@functools.cache
def losses_of(provider, seed):
    return trained(provider, seed)[0]


for provider in ("triton", "torch"):
    losses = losses_of(provider, seed=0)
    print(f"{provider}:", [round(each, 4) for each in losses[:3]], "...")
pairs = zip(losses_of("triton", 0), losses_of("torch", 0), strict=True)
gap = max(abs(a - b) for a, b in pairs)
print(f"the two losses of a step differ by {gap:.4f} at most")
assert gap < 0.5

# %%

# Scaffold: losses, a benchmark.


def mean_of_ten(losses, step):
    return sum(losses[step - 10 : step]) / 10


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["step"],
        x_vals=list(range(10, 401, 10)),
        xlabel="step",
        line_arg="provider",
        line_vals=["triton", "torch", "seed 1", "seed 2", "seed 3"],
        line_names=["Triton", "PyTorch", "Seed 1", "Seed 2", "Seed 3"],
        ylabel="nats per token",
        plot_name="gpt-losses",
        args={
            "M": 16384,
            "dtype": torch.bfloat16,
            "mode": "forward and backward",
        },
    )
)
def bench_losses(step, M, dtype, mode, provider):
    """The mean loss of ten steps, the last of which is named. Triton and
    PyTorch have the same seed; the others are Triton with other weights to
    begin with, and other batches."""
    if not ON_GPU:
        return 3 * [float("nan")]
    if provider.startswith("seed "):
        losses = losses_of("triton", int(provider.removeprefix("seed ")))
    else:
        losses = losses_of(provider, seed=0)
    return mean_of_ten(losses, step)


# %%

losses = bench_losses.run(show_plots=ON_GPU, return_df=True)

# %%
# **What the figure shows.**
# On the H200 the loss falls from 7.98 nats per token in the first ten steps to
# 2.32 in the last ten with our functions, and to 2.32 with PyTorch's. At the
# forty points the two are 0.012 apart at most, and 0.001 at the end. Ours is
# the larger one at 24 of them. Trainings with other seeds end at 2.34, 2.46
# and 2.20, so the ends of our four trainings lie up to 0.26 apart, which is 22
# times as much.
#
# **What follows.**
# With the same seed, what separates the two is smaller than what separates one
# seed from another. A mistake in a kernel would have to be smaller than
# that to hide here, and the gradients above are the stricter check.
#
# The same bits
# -------------
#
# Do two trainings with the same seed give the same weights? No kernel of ours
# that this model calls adds with atomics, so the order of our sums is fixed.
# We train once more, and compare all masters.

losses, masters = train(OURS, seed=0)
pairs = zip(masters, trained("triton", 0)[1], strict=True)
same = all(torch.equal(a, b) for a, b in pairs)
print("the same bits in two trainings:", same)
assert same and losses == losses_of("triton", 0)

# %%
# Who is measured?
# ----------------
#
# Now the time of a step. Who takes part?
#
# - **Ours**, launched from Python and as a CUDA graph.
# - **PyTorch**, in the same two ways.
# - **torch.compile** of PyTorch's model, which fuses what stands between the
#   products, in the same two ways. A third design, *tuned*, is also a graph.
#   It has what ``mode="max-autotune"`` sets, but for ``max_autotune_gemm``,
#   which tries twenty kernels of Triton for each product. In a trial on the
#   H200 that took cuBLAS's kernel for twelve of the first thirteen products,
#   and was not done after three minutes. So we leave them to cuBLAS at once.
# - `Liger <https://github.com/linkedin/Liger-Kernel>`_, where it is installed:
#   its functions for norms, rotary embedding, gate and loss, and PyTorch's for
#   the rest. It waits for the GPU in its loss, so no graph can record it.
# - **Ours under torch.compile**, which calls all of our functions but
#   attention as they are. In a trial in which it looked into them, it cut the
#   model into 28 graphs. In an earlier one a step stopped with an illegal
#   memory access, and we do not know why. After such an error a process can do
#   nothing more with its GPU. So this design has a process of its own, and
#   does not take turns with the others.

# %%

# Scaffold: Liger's functions.


def liger_add_and_norm(x, stream, weight):
    from liger_kernel.transformers import functional

    return functional.liger_fused_add_rms_norm(
        x, stream, weight, 1e-5, casting_mode="gemma"
    )


def liger_heads(x, cos, sin):
    from liger_kernel.transformers import functional

    q, k, v = split_heads(x.unflatten(-1, (-1, DIM)))
    # Its tables are as wide as a head.
    cos = torch.cat((cos, cos), dim=-1)[None]
    sin = torch.cat((sin, sin), dim=-1)[None]
    return *functional.liger_rope(q, k, cos, sin), v


def liger_gate(x):
    from liger_kernel.ops import LigerFusedGateUpSiLUMulFunction

    # Its form for both halves in one tensor, which takes rows.
    y = LigerFusedGateUpSiLUMulFunction.apply(x.flatten(0, -2))
    return y.view(*x.shape[:-1], -1)


def liger_loss(x, weight, target):
    from liger_kernel.transformers import functional

    return functional.liger_fused_linear_cross_entropy(
        x.flatten(0, 1), weight, target.flatten()
    )


LIGER = PYTORCH | {
    "add_and_norm": liger_add_and_norm,
    "heads": liger_heads,
    "gate": liger_gate,
    "loss": liger_loss,
}

# %%

# Scaffold: all designs, their clock, their memory and their kernels.

DESIGNS = {
    "triton": "Triton, CUDA graph",
    "eager": "Triton",
    "torch": "PyTorch",
    "torch graph": "PyTorch, CUDA graph",
    "torch.compile": "torch.compile",
    "compile graph": "torch.compile, CUDA graph",
    "tuned": "torch.compile, tuned, CUDA graph",
}
if find_spec("liger_kernel"):
    DESIGNS["liger"] = "Liger"
# The last one, and by itself:
APART = "triton compiled"
DESIGNS[APART] = "Triton, torch.compile"
GRAPHS = "triton", "torch graph", "compile graph", "tuned"
# What mode="max-autotune" sets, but for max_autotune_gemm.
TUNED = {"max_autotune_pointwise": True, "coordinate_descent_tuning": True}
# Turns of each design, of three steps each; at most, if its times vary.
TURNS = 20
MOST_TURNS = 100


@functools.cache
def compiled():
    """A compiled model, and its parameters: to compile takes long."""
    # All cores may compile, for nothing is timed yet.
    torch._inductor.config.compile_threads = os.cpu_count()
    model = model_of(PYTORCH)
    return model, torch.compile(model, dynamic=False)


def training_of(provider):
    """A training that does its steps in the way of a design."""
    if provider in ("torch.compile", "compile graph"):
        training = Training(*compiled())
    elif provider == "tuned":
        model = model_of(PYTORCH)
        training = Training(
            model, torch.compile(model, dynamic=False, options=TUNED)
        )
    else:
        functions = {"triton": OURS, "eager": OURS, "liger": LIGER}
        training = Training(model_of(functions.get(provider, PYTORCH)))
    if provider in GRAPHS:
        return Recorded(training)
    return training


@functools.cache
def started(provider):
    """A training in the way of a design, which has done some steps, and the
    most GB that its tensors took meanwhile; None if it does not run here."""
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    try:
        training = training_of(provider)
        for i in range(6):
            if i == 2:  # what compiling needs does not count
                torch.cuda.reset_peak_memory_stats()
            training.step(*batch(i, seed=0))
        torch.cuda.synchronize()
    except Exception as error:  # it leaves a gap in the figures
        print(f"{DESIGNS[provider]} does not run here: {error}")
        return None
    most = torch.cuda.max_memory_allocated() - before
    if provider == "compile graph":  # its model was there before
        most += sum(each.nbytes for each in compiled()[0].parameters())
    return training, most / 1e9


@functools.cache
def measured_apart():
    """µs of a step of ours under torch.compile, and GB, in a process of its
    own; None if it does not run here."""
    return said_by_ranks(1, [APART], seconds=100).get((APART, 1))


def is_quiet(times):
    """Whether the three fastest of these turns hardly differ."""
    first, _, third = sorted(times)[:3]
    return third < 1.05 * first


@functools.cache
def step_times():
    """µs of a step of each design: the second, first and third fastest."""
    found = {}
    if measured_apart():  # before the others, whose GPU is then their own
        us, _ = measured_apart()
        found[APART] = us, us, us
    trainings = {}
    for provider in DESIGNS:
        if provider != APART and started(provider):
            trainings[provider], _ = started(provider)
    batches = [batch(i, seed=0) for i in range(3)]
    times = {provider: [] for provider in trainings}
    # From time to time Python looks for garbage among all objects, and a step
    # may have to wait for that. Not among these:
    gc.collect()
    gc.freeze()
    for turn in range(MOST_TURNS):
        for provider, training in trainings.items():
            if turn >= TURNS and is_quiet(times[provider]):
                continue
            torch.cuda.synchronize()
            start = time.perf_counter()
            for each in batches:
                training.step(*each)
            torch.cuda.synchronize()
            seconds = (time.perf_counter() - start) / len(batches)
            times[provider].append(1e6 * seconds)
    gc.unfreeze()
    for provider, its in times.items():
        first, second, third = sorted(its)[:3]
        found[provider] = second, first, third
    return found


# Part of a kernel's name, and what it is for; the first that fits counts.
KINDS = {
    "cross_entropy": "loss",
    "softmax": "loss",
    "nll": "loss",
    "attention": "attention",
    "flash": "attention",
    "cudnn": "attention",
    "fmha": "attention",
    "_half_sm": "attention",
    "_staying": "attention",
    "rms_norm": "norms",
    "layer_norm": "norms",
    "gammabeta": "norms",
    "_rotary": "rotary",
    "_rope": "rotary",  # Liger's
    "_gate": "gate",
    "swiglu": "gate",
    "element_mul": "loss",
    "_finish": "loss",
    "_in_place": "loss",
    "_round": "loss",
    # The products of a loss count as such, with what is done to their tiles.
    "_scores": "products",
    "_multiply": "products",
    "_product": "products",
    "_add_parts": "products",
    "nvjet": "products",
    "gemm": "products",
    "cutlass": "products",
    "splitk": "products",
    "triton_tem": "products",
    "adam": "optimizer",
    "embedding": "embedding",
    "radix_sort": "embedding",  # and what follows, for its gradient
    "sum_and_scatter": "embedding",
    "compute_grad_weight": "embedding",
}
PARTS = [*dict.fromkeys(KINDS.values()), "copies and other"]


def kind_of(kernel):
    name = kernel.lower()
    return next((KINDS[part] for part in KINDS if part in name), PARTS[-1])


def kernels_of(training):
    """µs of a step of this training in each kernel, by name."""
    batches = [batch(i, seed=0) for i in range(3)]
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for each in batches:
            training.step(*each)
        torch.cuda.synchronize()
    return {
        event.key: event.self_device_time_total / len(batches)
        for event in profile.key_averages()
        if event.self_device_time_total > 0
    }


@functools.cache
def kernel_times(provider):
    """The same of a design."""
    if not started(provider):
        return {}
    training, _ = started(provider)
    return kernels_of(training)


def time_of_kind(times, kind):
    return sum(us for kernel, us in times.items() if kind_of(kernel) == kind)


# %%
# How long does a step take?
# --------------------------
#
# All designs but the last one take turns, so what changes slowly concerns all
# of them alike. But their order is fixed, so a design may find the GPU warm
# from the one before it.

# %%

# Scaffold: a step, a benchmark.


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=[16384],
        xlabel="N (tokens of a step)",
        line_arg="provider",
        line_vals=list(DESIGNS),
        line_names=list(DESIGNS.values()),
        ylabel="µs",
        plot_name="gpt-step",
        args={
            "layers": 12,
            "dtype": torch.bfloat16,
            "mode": "forward and backward",
        },
    )
)
def bench_step(N, layers, dtype, mode, provider):
    """Three steps that follow each other, with the optimizer, until the GPU is
    done with the last, on the host's clock. All designs take 20 turns. Of each
    the three fastest count, for what else runs on a host only makes it slower:
    median, least and most of these. A design whose three lie further apart
    than 5% takes up to 100 turns. Ours under torch.compile has eight turns in
    a process of its own, and the fastest counts."""
    if not ON_GPU:
        return 3 * [float("nan")]
    return step_times().get(provider, 3 * [float("nan")])


# %%

steps = bench_step.run(return_df=True)
plt.close()  # one size makes no lines: we draw bars instead
for name in steps.columns[1:]:
    us = float(steps[name].iloc[0])
    if us > 0:
        print(f"{us / 1000:6.2f} ms a step: {name.removesuffix(' (µs)')}")

# %%

# Drawing: how long a step takes.

plt.figure("How long a step of 16384 tokens takes in each design", (7.5, 3))
names = [name.split(" (")[0] for name in steps.columns[1:]]
plt.barh(names[::-1], steps.iloc[0, 1:].astype(float)[::-1] / 1000)
plt.xlabel("ms")
plt.show()

# %%
# **What the figure shows.**
# On the H200 a step of ours takes 24.7 ms as a CUDA graph, and 66.3 ms
# launched from Python. PyTorch takes 43.6 ms, and 42.1 ms as a graph.
# torch.compile takes 27.2 ms, 27.1 ms as a graph, and 27.1 ms tuned. Liger
# takes 37.6 ms. So our graph is 1.77 times as fast as PyTorch, 1.10 times as
# fast as the graph of torch.compile, and 1.10 times as fast as its tuned one.
# Ours under torch.compile takes 91.1 ms.
#
# **Why.**
# Our graph waits for its kernels and for nothing else. Launched from Python, a
# step with the same kernels takes 2.69 times as long, because the host cannot
# keep up. Our functions check what they are given, choose tiles, and describe
# matrices to the GPU, all in Python, where PyTorch does such things in C++. So
# without a graph ours is slower than PyTorch, torch.compile and Liger.
# torch.compile keeps its host ahead of the GPU, so a graph brings it hardly
# anything, and neither does tuning.
#
# Under torch.compile our functions run as before, and Python calls them one
# after the other. What is left to compile is a single graph, which serves all
# blocks: attention, and the change of layout after it. There is little else
# that one could fuse, for our kernels have done that already. So ours under
# torch.compile waits for the host, too. It waits even longer than ours
# launched from Python. A part of that is the process, which is another one:
# below, ours launched from Python takes 70.2 ms in a process of its own. The
# other 21 ms may come from entering and leaving the graph in each block.
#
# **What follows.**
# A model of kernels that Python launches needs a graph, or lean calls, before
# it needs faster kernels. And our lead over torch.compile depends on the way
# of measuring. We measure the graphs of both once more below, in other
# processes. On one GPU hardly anything is left of our lead there.
#
# Where do the microseconds go?
# -----------------------------
#
# PyTorch's profiler tells how long each kernel takes on the GPU. We add up
# kernels of one kind, by their names. Where PyTorch multiplies or adds numbers
# one by one, it uses the same few kernels everywhere, and their names don't
# tell what they are for. What it takes for gate, rotary embedding and the
# stream is therefore found under *copies and other*.

# %%

# Scaffold: the kinds of kernels, a benchmark.

PROFILED = {
    "triton": "Triton",
    "torch": "PyTorch",
    "torch.compile": "torch.compile",
}
if "liger" in DESIGNS:
    PROFILED["liger"] = "Liger"


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["kind"],
        x_vals=PARTS,
        xlabel="",
        line_arg="provider",
        line_vals=list(PROFILED),
        line_names=list(PROFILED.values()),
        ylabel="µs",
        plot_name="gpt-kernels",
        args={
            "M": 16384,
            "dtype": torch.bfloat16,
            "pass": "a whole step",
        },
    )
)
def bench_kernels(kind, M, dtype, provider, **_):
    """What the kernels of one kind take on the GPU in a step, by PyTorch's
    profiler: mean of three steps."""
    if not ON_GPU:
        return 3 * [float("nan")]
    return time_of_kind(kernel_times(provider), kind) or float("nan")


# %%

kernels = bench_kernels.run(show_plots=ON_GPU, return_df=True)

# %%

# Drawing: where the time of a step goes.

plt.figure(
    "A bar for each design, which is divided into kinds of kernels: products, "
    "attention, loss, norms, gate, rotary, optimizer, embedding, and copies "
    "and other",
    (7.5, 3),
)
designs = [name.split(" (")[0] for name in kernels.columns[1:]]
table = kernels.iloc[:, 1:].astype(float).fillna(0) / 1000
start = 0 * table.iloc[0].to_numpy()
for i, part in enumerate(kernels["kind"]):
    length = table.iloc[i].to_numpy()
    plt.barh(
        designs[::-1],
        length[::-1],
        left=start[::-1],
        label=part,
        color=f"C{i % 7}",
        alpha=1 if i < 7 else 0.4,  # there are seven colors
    )
    start = start + length
plt.xlabel("ms")
plt.legend(fontsize=8, ncols=5, loc="lower center", bbox_to_anchor=(0.4, 1))
plt.show()

# %%

# Scaffold: our kernels one by one, a benchmark.

OUR_KERNELS = [
    "_product",  # of a linear layer
    "_add_parts",  # the end of products whose sum is long
    "_scores",  # the first product of the loss
    "_multiply",  # its other two
    "_head_finish",
    "_in_place",
    "_round",
    "_staying_fwd",  # on Hopper, as the next two; plain ones elsewhere
    "_half_sm_bwd_queries",
    "_half_sm_bwd_keys",
    "_rms_norm_fwd",
    "_rms_norm_bwd",
    "_gate_fwd",
    "_gate_bwd",
    "_rotary",
]


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["kernel"],
        x_vals=OUR_KERNELS,
        xlabel="",
        line_arg="provider",
        line_vals=["triton"],
        line_names=["Triton"],
        ylabel="µs",
        plot_name="gpt-each-kernel",
        args={
            "M": 16384,
            "dtype": torch.bfloat16,
            "pass": "a whole step",
        },
    )
)
def bench_each_kernel(kernel, M, dtype, provider, **_):
    """What all launches of a kernel take on the GPU in a step, by PyTorch's
    profiler: mean of three steps."""
    if not ON_GPU:
        return 3 * [float("nan")]
    return kernel_times(provider).get(kernel, float("nan"))


# %%

each_kernel = bench_each_kernel.run(return_df=True)
plt.close()  # bars say more
if ON_GPU:
    times = kernel_times("triton")
    others = sum(times[name] for name in times if name not in OUR_KERNELS)
    print(f"kernels that are not in the figure: {others:.0f} µs")
    for name in times:
        if name.startswith("_") and name not in OUR_KERNELS:
            print(f"one of ours is missing in the figure: {name}")

# %%

# Drawing: our kernels one by one.

plt.figure("How long each of our kernels takes in a step, sorted", (7.5, 4))
table = each_kernel.sort_values(each_kernel.columns[1])
plt.barh(table["kernel"], table.iloc[:, 1].astype(float) / 1000)
plt.xlabel("ms")
plt.tight_layout()
plt.show()

# %%
# **What both figures show.**
# On the H200 all kernels of a step take 25.0 ms with our functions, 42.4 ms
# with PyTorch's, 25.8 ms with torch.compile, and 29.6 ms with Liger. Our
# products take 14.9 ms, and those of PyTorch, which are cuBLAS's, take 13.6.
# Our attention takes 3.8 ms, and cuDNN's 4.5. The loss takes 0.6 ms, 3.8 in
# PyTorch, and 1.4 with torch.compile. Norms, gate, rotary embedding, and
# copies and other take 4.5 ms together with ours, 19.3 with PyTorch, 5.3 with
# torch.compile, and 8.1 with Liger.
#
# Of our own kernels the product of the linear layers takes 10.9 ms, and those
# of attention take 3.8 ms. The three products of the loss take 3.8 ms. No
# other kernel of ours takes more than 1 ms.
#
# **Why.**
# Between products PyTorch has a kernel for each operation, and each of them
# reads and writes all numbers. torch.compile fuses such operations nearly as
# well as our kernels do it by hand: ours gain 0.8 ms there. The loss brings
# 0.8 ms, for torch.compile has all logits, and reads them more than once.
# Attention brings 0.7 ms. And 1.4 ms are lost in the products. All in all our
# kernels are 0.8 ms ahead of its kernels. A step of our graph is 2.4 ms ahead
# of a step of its graph. Where the rest of that comes from, this profile does
# not say. It takes the mean of three steps, and the figure of whole steps
# counts the fastest ones only. So our kernels can add up to more than a step
# takes.
#
# The products are 9.8 · 10¹² operations, so ours do 662 TFLOP/s and cuBLAS
# does 725. By our figure of single functions, 0.3 ms of what we lose are in
# the layers that make gate and up: 27 µs in each of the twelve blocks. `A
# linear layer, both passes <../matrix-products/01-linear.html>`_ shows where
# ours lose most: in the gradient of a small weight, which has few tiles and
# long sums. Three of the four weights of a block have fewer tiles of 128 × 128
# than there are SMs: the last one of the MLP, for instance, has 96 for 132
# SMs. cuBLAS has many more tiles to choose from than we do. And in the loss
# our products have more to do: one of them takes a power of each number of its
# tiles.
#
# **What follows.**
# The longest bar is the place to begin. More than half of our time is in the
# products, so the next step has to be made on the page of the linear layer.
# Norms take 1.5 ms with ours, and 1.3 with torch.compile. These two are hard
# to compare, because the name of a fused kernel does not tell all that it
# does.
#
# How much memory?
# ----------------

# %%

# Scaffold: memory, a benchmark.


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=[16384],
        xlabel="N (tokens of a step)",
        line_arg="provider",
        line_vals=list(DESIGNS),
        line_names=list(DESIGNS.values()),
        ylabel="GB of memory",
        plot_name="gpt-memory",
        args={
            "layers": 12,
            "dtype": torch.bfloat16,
            "mode": "forward and backward",
        },
    )
)
def bench_memory(N, layers, dtype, mode, provider):
    """The most that the tensors of a training take at a time, from its third
    step on, by torch.cuda.max_memory_allocated."""
    if not ON_GPU:
        return 3 * [float("nan")]
    apart = provider == APART
    result = measured_apart() if apart else started(provider)
    if not result:
        return float("nan")
    _, most = result
    return most


# %%

memory = bench_memory.run(return_df=True)
plt.close()
for name in memory.columns[1:]:
    most = float(memory[name].iloc[0])
    if most > 0:
        print(f"{most:6.2f} GB: {name.removesuffix(' (GB of memory)')}")

# %%

# Drawing: how much memory a training takes.

plt.figure("How much memory a training takes in each design", (7.5, 3))
names = [name.split(" (")[0] for name in memory.columns[1:]]
plt.barh(names[::-1], memory.iloc[0, 1:].astype(float)[::-1])
plt.xlabel("GB")
plt.show()

# %%
# **What the figure shows.**
# On the H200 our training takes 7.16 GB, PyTorch's 14.55 GB, that of
# torch.compile 8.55 GB, that of Liger 7.32 GB, and ours under torch.compile
# 7.16 GB.
#
# **Why.**
# Every design has weights in 16 bits and, in 32 bits, masters, their gradients
# and two averages of AdamW. These are 18 bytes for each parameter, or 2.2 GB.
# The largest tensors are those of the loss. When PyTorch begins its backward
# pass, three of them have the size of the logits, in 32 bits: the logarithms
# of the softmax, which it has kept, the gradient that arrives there, and the
# gradient of the logits. Together these take 6.3 GB. Ours has a quarter of the
# logits in 16 bits, and the sums for the gradient of the head in 32 bits,
# which take 0.4 GB together. The rest is what each function keeps for its
# backward pass. Our norm keeps the sum that it has normalized, our rotary
# embedding keeps nothing but its angles, and our gate keeps what it was given.
# PyTorch keeps results between the steps of each of them.
#
# **What follows.**
# There is more to save. `A gate between two products
# <../matrix-products/02-swiglu.html>`_ has an MLP that computes the result of
# its gate again, in the backward pass, instead of keeping it.
#
# On two GPUs
# -----------
#
# How many tokens a second does a training read on one GPU, and on two?

# %%

# Scaffold: steps on several GPUs, a benchmark.


@functools.cache
def times_of_ranks():
    """{(name, ranks): (µs of a step, GB)}, by torchrun."""
    for kept in (trained, compiled, started):
        kept.cache_clear()  # and its memory is free for the ranks
    torch.cuda.empty_cache()
    ranks = min(torch.cuda.device_count(), 2)
    found = said_by_ranks(ranks, RANKED, seconds=120)
    # By itself, so that the others are there whatever becomes of it.
    return found | said_by_ranks(ranks, ["compile graph"], seconds=150)


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["ranks"],
        x_vals=[1, 2],
        xlabel="GPUs",
        line_arg="provider",
        line_vals=["triton", "eager", "torch", "torch graph", "compile graph"],
        line_names=[
            "Triton, CUDA graph",
            "Triton",
            "PyTorch",
            "PyTorch, CUDA graph",
            "torch.compile, CUDA graph",
        ],
        ylabel="µs",
        plot_name="gpt-ranks",
        args={
            "M": 16384,
            "dtype": torch.bfloat16,
            "mode": "forward and backward",
        },
    )
)
def bench_ranks(ranks, M, dtype, mode, provider):
    """A step of each of so many ranks, with 16384 tokens each and the
    optimizer: of eight turns of three steps that follow each other, on the
    host's clock, the fastest, on the slower rank."""
    if not ON_GPU:
        return float("nan")
    us, _ = times_of_ranks().get((provider, ranks), (float("nan"), None))
    return us


# %%

times = bench_ranks.run(show_plots=ON_GPU, return_df=True)
for line in times.columns[1:]:
    for ranks, us in zip((1, 2), times[line].astype(float), strict=True):
        if us > 0:
            tokens = ranks * 16384 / us * 1e6  # of the large model
            name = line.removesuffix(" (µs)")
            print(f"{name}, GPUs: {ranks}: {tokens:,.0f} tokens a second")

# %%
# **What the figure shows.**
# On two H200s a step of ours takes 27.3 ms as a graph, where one takes 26.1.
# So two GPUs train with 1202 thousand tokens a second, and one with 628
# thousand: 1.91 times as many. Launched from Python, a step of ours takes 70.2
# ms on one and 73.4 ms on two. PyTorch has 731 thousand tokens a second on
# two, and 748 thousand as a graph. The graph of torch.compile takes 26.3 ms on
# one and 29.1 ms on two. Ours is 1.01 times as fast as it on one, and 1.07
# times as fast on two.
#
# **Why.**
# The ranks exchange 2 bytes for each parameter, which is a quarter of a GB.
# DDP should send most of that while the backward pass still runs. The second
# GPU costs a step of our graph 1.2 ms, and one of torch.compile's graph 2.8
# ms. torch.compile cuts a model under DDP into pieces, so that gradients can
# leave early. That may be why, but we have not measured it. Launched from
# Python, ours waits for the host, on two ranks as well as on one.
#
# On one GPU our graph takes 26.1 ms here, and 24.7 ms when it took turns with
# the other designs. PyTorch takes 43.7 ms here and 43.6 ms there. With the
# graph of torch.compile it is the other way round: it is faster here than
# there. Here each design takes all of its steps in a row, and that of
# torch.compile has processes of its own. The fastest of eight turns counts
# here, and the second fastest of twenty or more there. The kernels should be
# the same. The clock rate of the GPU may differ, for it falls when the
# products need more power than the GPU may take. We have not measured that,
# and it would not say why one design gains and the other loses. Ours launched
# from Python takes longer here, too, but it waits for the host.
#
# So on one GPU our graph is 10% faster than that of torch.compile if the
# designs take turns, and 1% faster if each runs by itself. The first is more
# than noise, for the three fastest turns of each differ far less. The second
# may be noise: of eight turns only the fastest is kept, which does not tell
# how much they vary. On two GPUs we have measured in this way only, and a lead
# of a few percent says little.
#
# **What follows.**
# Record the step before you add a GPU. Launched from Python, two GPUs train
# with 447 thousand tokens a second with our functions, and the graph does 628
# thousand on one. And do not choose between our graph and that of
# torch.compile by their times alone.
#
# Where PyTorch or a library is better
# ------------------------------------
#
# - **torch.compile needs no kernels of yours.** It fuses norms, gate and
#   rotary embedding by itself, in any model that you can write. What we gain
#   over it is 1.4 GB. On one GPU we are 10% or 1% faster, which depends on how
#   we measure.
# - **cuBLAS** is faster than our products in this model.
# - **cuDNN** is not faster than our attention here, where a head has 64
#   numbers and a sequence 1024 tokens, if we count both passes. Forward, with
#   128 numbers in a head, it is ahead with the shortest sequences that
#   `Programs that stay <../attention/07-programs-that-stay.html>`_ measures,
#   and with 64 it is hardly ahead anywhere. Backward, with 128 numbers, it is
#   ahead with long sequences, as `Two programs on an SM
#   <../attention/06-two-programs.html>`_ shows.
# - **Liger is faster without a graph.** Launched from Python it takes 0.57
#   times our time, and hardly more memory than ours.
# - **Shapes that change.** A graph replays one shape, and launched from Python
#   our functions let the GPU wait for the host.
# - **Our functions refuse what they do not know:** autocast, for most of them,
#   and second derivatives.
# - **What we left to PyTorch** may stay there: its AdamW is a few fused
#   kernels, and its embedding is a lookup.
#
# Exercise
# --------
#
# **Exercise 1: a gate of your own.** Change one kernel, and see what becomes
# of the training. The kernel of `A gate between two products
# <../matrix-products/02-swiglu.html>`_ takes the activation as a function that
# returns its value and its slope. Let the gate of the model be a squared ReLU:
# 0 below 0, and the square above. The stub has the value, and the slope is
# wrong.
#
# ``exercise_1`` compares the gradients of the whole model with those of
# PyTorch's operations. Where they are right, it trains some steps, and draws
# the losses beside those of SwiGLU. On a GPU it also draws where the time of a
# step goes with both gates. Without a GPU it trains two steps with a batch
# each, and the loss need not fall.
#
# **Hint 1.** What is the derivative of :math:`x^2`, and what is it below 0?
#
# **Hint 2.** ``positive`` is 0 below 0. So one expression with it can serve
# both sides.


@triton.jit
def _squared_relu(x):
    positive = tl.maximum(x, 0.0)
    return positive * positive, positive  # to do


def pytorch_squared_relu(x):
    gate, up = x.chunk(2, dim=-1)
    return F.relu(gate).square() * up


def draw_losses(losses):
    plt.figure("The losses with a squared ReLU and with SwiGLU", (7.5, 3))
    steps = range(1, len(losses) + 1)
    plt.plot(steps, losses, label="squared ReLU")
    plt.plot(steps, losses_of("triton", seed=0), label="SwiGLU")
    plt.xlabel("step")
    plt.ylabel("nats per token")
    plt.legend()
    plt.show()


def draw_bars(times):
    """The time of a step by kinds of kernels, beside that of SwiGLU."""
    plt.figure("Where the time of a step goes with both gates", (7.5, 3))
    gates = {"squared ReLU": times, "SwiGLU": kernel_times("triton")}
    for kind in PARTS:
        ms = {}
        before = {}
        for name, kernels in gates.items():
            ms[name] = time_of_kind(kernels, kind) / 1000
            kinds = PARTS[: PARTS.index(kind)]
            before[name] = sum(
                time_of_kind(kernels, each) / 1000 for each in kinds
            )
        plt.barh(
            list(ms), list(ms.values()), left=list(before.values()), label=kind
        )
    plt.xlabel("ms")
    plt.legend(fontsize=8, ncols=3)
    plt.show()


def exercise_1(activation):
    """Print the largest relative error of a gradient, and judge it."""

    def gate(x):
        return both_passes.gated(x, None, activation)

    functions = OURS | {"gate": gate}
    exact = gradients_of(
        PYTORCH | {"gate": pytorch_squared_relu}, torch.float64
    )
    errors = relative_errors(functions, exact)
    worst = max(errors, key=errors.get)
    print(f"largest relative error: {errors[worst]:.1e}, of {worst}")
    if errors[worst] > (0.02 if ON_GPU else 1e-4):
        return False
    losses, _ = train(functions, seed=0)
    print(f"the loss went from {losses[0]:.3f} to {losses[-1]:.3f}")
    draw_losses(losses)
    if ON_GPU:
        training = Recorded(Training(model_of(functions)))
        for i in range(6):  # kernels are compiled, and the graph is made
            training.step(*batch(i, seed=0))
        draw_bars(kernels_of(training))
    return True


print("right:", exercise_1(_squared_relu))

# %%

# Solution 1


@triton.jit
def _squared_relu_1(x):
    positive = tl.maximum(x, 0.0)
    return positive * positive, 2 * positive


assert exercise_1(_squared_relu_1)

# %%
# What we learned
# ---------------
#
# These are the designs of this page, with the time of a step of 16384 tokens
# and the memory of a training on the H200:
#
# - **Ours, under torch.compile:** 91.1 ms, and 7.16 GB. It calls our functions
#   as they are, and the host keeps up even less.
# - **Ours, launched from Python:** 66.3 ms, and 7.16 GB. The host cannot keep
#   up.
# - **PyTorch:** 43.6 ms, and 14.55 GB. Each operation is a kernel, and each
#   number of the logits is there three times.
# - **Liger:** 37.6 ms, and 7.32 GB. Fused kernels between cuBLAS's products.
# - **torch.compile:** 27.2 ms, and 8.55 GB. It writes fused kernels by itself,
#   but has all logits.
# - **torch.compile, tuned, as a CUDA graph:** 27.1 ms, and 8.55 GB.
# - **Ours, as a CUDA graph:** 24.7 ms, and 7.16 GB. Fused kernels, a quarter
#   of the logits, and products that are a little slower than cuBLAS's.
#
# How far we are ahead of the graphs of torch.compile depends on how we
# measure: in another way ours takes 26.1 ms, and the graph of torch.compile
# 26.3 ms.
#
# And for models in general:
#
# - Compare gradients first, at the first step, against float64. Losses hide
#   what gradients show.
# - Two trainings that round differently drift apart. Other seeds tell how far
#   is far.
# - Keep the host out of the step, and then look at the kernels.
# - What a model keeps for its backward pass is a choice of each function.
#   Memory is the sum of these choices.
# - Read a profile as a list of pages: each line says where to go next.
#
# **Next:** the course ends here. Take a function of ``both_passes.py`` into a
# model of yours. If you have not read it yet, `Layer norm over several GPUs
# <../several-gpus/01-layer-norm.html>`_ shows how GPUs share a row. `The
# glossary <../../glossary.html>`_ has the words of the field that these pages
# use, and where each of them is explained.
