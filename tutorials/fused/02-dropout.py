r"""
Dropout without a mask
======================

How does the backward pass know what dropout has dropped, if nobody wrote it
down?
It draws the same random bits again, from a generator that has no state.

A transformer may drop a share :math:`p` of what it adds to the stream:
:math:`s = \mathrm{dropout}(x) + residual`.

**What you need:** `Add, then normalize <01-add-layer-norm.html>`_, whose
kernels these are.
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
# PyTorch keeps a matrix of booleans, half a *unit* (the bytes of one matrix of
# 16 bits): the forward pass writes it, and the backward pass reads it.
#
# * Forward, dropout moves 2.5 units, an addition 3, and a layer norm 2: 7.5.
#   One kernel reads two and writes two: 4.
# * Backward, the layer norm moves 3 units, the sum of two gradients 3, and
#   dropout 2.5: 8.5. One kernel reads three and writes two: 5.
#
# Random bits from a position
# ---------------------------
#
# `Philox <https://doi.org/10.1145/2063384.2063405>`_ turns a key and a counter
# into four random words of 32 bits, for four neighbors. The key is the seed;
# the counter is the row and a fourth of the column. A word below ``DROP``,
# which is ``p * 2**32``, drops its element; the rest is divided by ``1 - p``.


@triton.jit
def _dropout(x, seed, row, c, DROP: tl.constexpr, FOUR: tl.constexpr = True):
    """Chunk c of rows, dropped or scaled; its own derivative as well."""
    if DROP == 0:
        return x
    elif DROP == 2**32:
        return tl.zeros_like(x)
    else:
        SHARE: tl.constexpr = 4 if FOUR else 1
        WORDS: tl.constexpr = x.shape[1] // SHARE
        group = c * WORDS + tl.arange(0, WORDS)[None, :] + row * 0
        a, b, c, d = tl.philox(seed, group, row + group * 0, 0, 0)
        if FOUR:
            a = tl.join(tl.join(a, b), tl.join(c, d))
            a = tl.reshape(a, x.shape)
        scale: tl.constexpr = 2**32 / (2**32 - DROP)
        return tl.where(a >= DROP, x * scale, 0)


# %%
# This kernel does nothing else. Without ``do_not_specialize`` Triton would
# compile another one for a seed of 1, and for multiples of 16.


@triton.jit(do_not_specialize=["seed"])
def _dropout_only(
    x_ptr, y_ptr, seed, N: tl.constexpr, BLOCK: tl.constexpr,
    DROP: tl.constexpr, FOUR: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) + tl.zeros((1, 1), tl.int32)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    at = row.to(tl.int64) * N + cols  # M * N may pass 2**31
    x = tl.load(x_ptr + at, mask=cols < N)
    y = _dropout(x.to(tl.float32), seed, row, tl.program_id(1), DROP, FOUR)
    tl.store(y_ptr + at, y, mask=cols < N)


def drop(x, p, seed, four=True):
    (M, N), y = x.shape, torch.empty_like(x)
    block = min(max(triton.next_power_of_2(N), 512), 4096)
    args = x, y, seed, N, block, round(p * 2**32), four
    _dropout_only[(M, triton.cdiv(N, block))](*args, num_warps=block // 512)
    return y


print(drop(torch.ones(2, 8, device=DEVICE), 0.5, seed=1).int().tolist())

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
# How much does it help that four share a call? "Each" calls for each element.


@triton.testing.perf_report(triton.testing.Benchmark(
    ["N"], [1024, 2048, 4096, 8192, 16384], "provider",
    ["triton", "each", "native", "copy"],
    ["Four share", "Each", "PyTorch", "Copy"], "dropout-only",
    {"M": 4096, "dtype": torch.float16, "mode": "forward"}, ylabel="GB/s",
))  # fmt: skip
def dropout_only(M, N, dtype, mode, provider):
    """Device time of a CUDA graph, replayed with an overwritten L2 cache;
    median, 20 % and 80 % quantiles. GB/s: of two matrices."""
    x = torch.randn(M if ON_GPU else 1, N, device=DEVICE).to(dtype)
    y = torch.empty_like(x)
    ways = {
        "triton": lambda: drop(x, 0.1, 1),
        "each": lambda: drop(x, 0.1, 1, four=False),
        "native": lambda: torch.native_dropout(x, 0.1, True),
        "copy": lambda: y.copy_(x),
    }
    return speed(2 * x.nbytes, ways[provider])


report(dropout_only)

# %%
# A call is ten rounds of multiplications. Shared by four it hardly shows.
#
# Forward, with the addition and the norm
# ---------------------------------------


@triton.jit(do_not_specialize=["seed"])
def _dropout_add_layer_norm_fwd(
    x_ptr, r_ptr, w_ptr, b_ptr,  # r: the residual; w and b may be None
    y_ptr, s_ptr, mean_ptr, rstd_ptr, seed,
    eps: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr,
    DROP: tl.constexpr,
):  # fmt: skip
    acc: tl.constexpr = mean_ptr.dtype.element_ty  # float32, or float64
    row = tl.program_id(0) + tl.zeros((1, 1), tl.int32)
    cols = tl.arange(0, BLOCK)[None, :]
    mask = cols < N
    at = row.to(tl.int64) * N + cols
    x = tl.load(x_ptr + at, mask=mask, other=0)
    r = tl.load(r_ptr + at, mask=mask, other=0)
    s = _dropout(x.to(acc), seed, row, 0, DROP) + r.to(acc)
    s = s.to(r.dtype)
    tl.store(s_ptr + at, s, mask=mask)
    mean = tl.sum(s.to(acc), axis=1)[:, None] / N
    d = tl.where(mask, s.to(acc) - mean, 0)
    rstd = 1 / tl.sqrt(tl.sum(d * d, axis=1)[:, None] / N + eps)
    tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)
    y = (s.to(acc) - mean) * rstd
    if w_ptr is not None:
        w = tl.load(w_ptr + cols, mask=mask, eviction_policy="evict_last")
        y *= w.to(acc)
    if b_ptr is not None:
        b = tl.load(b_ptr + cols, mask=mask, eviction_policy="evict_last")
        y += b.to(acc)
    tl.store(y_ptr + at, y, mask=mask)


# %%

CUDA = ON_GPU and torch.version.hip is None


def plan_forward(N, itemsize, most=2048):
    block = max(triton.next_power_of_2(N), 16)
    warps = min(max(block * itemsize // most, 1), 16)
    held = {"maxnreg": 64} if CUDA and warps == 16 else {}
    return {"BLOCK": block, "num_warps": warps} | held


def forward(x, r, w, b, eps, p, seed, rule=plan_forward):
    """y, s, mean and rstd of contiguous matrices."""
    M, N = x.shape
    acc = torch.promote_types(r.dtype, torch.float32)
    y, s, plan = torch.empty_like(x), torch.empty_like(r), rule(N, r.itemsize)
    mean, rstd = torch.empty(2, M, dtype=acc, device=x.device)
    _dropout_add_layer_norm_fwd[(M,)](
        x, r, w, b, y, s, mean, rstd, seed, eps, N, DROP=round(p * 2**32),
        **plan,
    )  # fmt: skip
    return y, s, mean, rstd


# %%
# Backward: the same bits again
# -----------------------------
#
# ``dx`` is ``dresidual`` under the mask, which is drawn again. Bits depend on
# seed, row and column alone, so chunks get the bits that a whole row had.

# %%

# Drawing: the way of the gradients.

plt.figure("The mask is on the way to dx, and not to dresidual", (7.5, 1))
way = "dy → norm → + → dresidual → × mask → dx\n            ↑\n            ds"
plt.text(0, 0, way, family="monospace", size=17)
plt.axis("off")
plt.show()

# %%

# Scaffold: rows in chunks, from page 05 of layer normalization.


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


@triton.jit
def _add_two(a1, a2, b1, b2):
    return a1 + b1, a2 + b2


@triton.jit
def _one_tile(
    dy_ptr, ds_ptr, s_ptr, mean_ptr, rstd_ptr, dr_ptr, dx_ptr, seed, ws, dws,
    dbs, first, M, N: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
    DROP: tl.constexpr,
):  # fmt: skip
    acc: tl.constexpr = mean_ptr.dtype.element_ty
    row, left = first + tl.arange(0, ROWS)[:, None], M - first
    mean = tl.load(mean_ptr + row, mask=row < M, other=0)
    rstd = tl.load(rstd_ptr + row, mask=row < M, other=0)
    start = tl.cast(first, tl.int64) * N
    xs = _load_chunks(s_ptr + start, N, left, N, ROWS, CHUNK, "")
    dys = _load_chunks(dy_ptr + start, N, left, N, ROWS, CHUNK, "")
    c1, c2 = tl.zeros((ROWS, CHUNK), acc), tl.zeros((ROWS, CHUNK), acc)
    for c in tl.static_range(len(xs)):
        wdy = dys[c].to(acc) * ws[c].to(acc)
        c1 += wdy * (xs[c].to(acc) - mean)
        c2 += wdy
    c1, c2 = tl.reduce((c1, c2), 1, _add_two)
    c1, c2 = c1[:, None] * (rstd * rstd * rstd / N), c2[:, None] * (rstd / N)
    new_dws, new_dbs = (), ()
    for c in tl.static_range(len(xs)):
        i, j, mask = _chunk(c, left, N, ROWS, CHUNK)
        at = start + (i * N + j)
        d, dy = xs[c].to(acc) - mean, dys[c].to(acc)
        new_dws += (dws[c] + dy * rstd * d,)
        new_dbs += (dbs[c] + dy,)
        g = dy * rstd * ws[c].to(acc) - (d * c1 + c2)
        if ds_ptr is not None:
            g += tl.load(ds_ptr + at, mask=mask, other=0).to(acc)
        tl.store(dr_ptr + at, g, mask=mask)
        if dx_ptr is not None:
            g = _dropout(g, seed, row, c, DROP)
            tl.store(dx_ptr + at, g, mask=mask)
    return new_dws, new_dbs


# %%


@triton.jit(do_not_specialize=["seed"])
def _dropout_add_layer_norm_bwd(
    dy_ptr, ds_ptr, s_ptr, w_ptr, mean_ptr, rstd_ptr,  # ds may be None
    dr_ptr, dx_ptr,  # dx may be None: it is dr
    sums_ptr, seed,  # (programs, 2, N)
    M, N: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
    STAGES: tl.constexpr, DROP: tl.constexpr,
):  # fmt: skip
    zeros = tl.zeros((ROWS, CHUNK), mean_ptr.dtype.element_ty)
    dws, dbs = (), ()
    for _ in tl.static_range((N + CHUNK - 1) // CHUNK):
        dws += (zeros,)
        dbs += (zeros,)
    ws = _load_chunks(w_ptr, 0, ROWS, N, ROWS, CHUNK, "evict_last")
    for first in tl.range(
        tl.program_id(0) * ROWS, M, tl.num_programs(0) * ROWS,
        num_stages=STAGES, disable_licm=True,
    ):  # fmt: skip
        dws, dbs = _one_tile(
            dy_ptr, ds_ptr, s_ptr, mean_ptr, rstd_ptr, dr_ptr, dx_ptr, seed,
            ws, dws, dbs, first, M, N, ROWS, CHUNK, DROP,
        )  # fmt: skip
    sums_ptr += tl.program_id(0) * 2 * N
    for c in tl.static_range(len(dws)):
        col = c * CHUNK + tl.arange(0, CHUNK)
        tl.store(sums_ptr + col, tl.sum(dws[c], axis=0), mask=col < N)
        tl.store(sums_ptr + N + col, tl.sum(dbs[c], axis=0), mask=col < N)


# %%


@triton.jit
def _add_up(sums_ptr, grads_ptr, P, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    cols = tl.program_id(0) * 16 + tl.arange(0, 16)
    rows = tl.arange(0, ROWS)[:, None]
    mask = (rows < P) & (cols < WIDTH)
    sums = tl.load(sums_ptr + rows * WIDTH + cols, mask=mask, other=0)
    tl.store(grads_ptr + cols, tl.sum(sums, axis=0), mask=cols < WIDTH)


GPU = torch.cuda.get_device_properties(DEVICE) if ON_GPU else None
NUM_SMS = GPU.multi_processor_count if ON_GPU else 4
SHARED = getattr(GPU, "shared_memory_per_block_optin", 65536)


def plan_backward(N, itemsize):
    row = N * itemsize
    warps, per_sm = 4 if row <= 8192 else 8, 2 if row <= 4096 else 1
    chunk = min(512 // itemsize * warps, max(triton.next_power_of_2(N), 16))
    rows = min(1024 // itemsize * warps // chunk, 8) if row <= 2048 else 1
    tile = 3 * rows * triton.cdiv(N, chunk) * chunk * itemsize
    ahead = min((SHARED // per_sm - 8192) // tile, 3 if row <= 8192 else 2)
    return {"ROWS": rows, "CHUNK": chunk, "num_warps": warps,
            "per_sm": per_sm, "STAGES": 1 + ahead}  # fmt: skip


def backward(dy, ds, s, w, mean, rstd, dr, dx, p, seed, rule=plan_backward):
    """dw and db; fills dr, and dx unless it is None."""
    M, N = s.shape
    plan = dict(rule(N, max(s.itemsize, dy.itemsize)))
    programs = min(NUM_SMS * plan.pop("per_sm"), -(-M // plan["ROWS"]))
    sums = torch.empty(programs, 2, N, dtype=mean.dtype, device=s.device)
    grads = torch.empty(2, N, dtype=w.dtype, device=s.device)
    _dropout_add_layer_norm_bwd[(programs,)](
        dy, ds, s, w, mean, rstd, dr, dx, sums, seed, M, N,
        DROP=round(p * 2**32), **plan,
    )  # fmt: skip
    args = sums, grads, programs, 2 * N, triton.next_power_of_2(programs + 1)
    _add_up[(triton.cdiv(2 * N, 16),)](*args)
    return grads


# %%


class DropoutAddLayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, r, w, b, shape, eps, p, seed):
        ctx.set_materialize_grads(False)
        ctx.rest, N = (x.shape, x.dtype, shape, p, seed), shape.numel()
        x, r, w, b = (None if t is None else t.reshape(-1, N).contiguous()
                      for t in (x, r, w, b))  # fmt: skip
        y, s, mean, rstd = forward(x, r, w, b, eps, p, seed)
        ctx.save_for_backward(s, w, mean, rstd)
        return y.reshape(ctx.rest[0]), s.reshape(ctx.rest[0])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy, ds):
        s, w, mean, rstd = ctx.saved_tensors
        full, kind, shape, p, seed = ctx.rest
        dy = torch.zeros_like(s) if dy is None else dy
        dy, ds = (None if t is None else t.reshape(s.shape).contiguous()
                  for t in (dy, ds))  # fmt: skip
        w = s.new_ones(s.shape[1]) if w is None else w
        dr = dx = torch.empty_like(s).reshape(full)
        if p > 0:
            dx = torch.empty_like(s, dtype=kind).reshape(full)
        given = dy, ds, s, w, mean, rstd, dr, dx if p > 0 else None
        dw, db = backward(*given, p, seed).reshape(2, *shape)
        found = zip((dx, dr, dw, db), ctx.needs_input_grad[:4], strict=True)
        return *(t if wanted else None for t, wanted in found), *4 * (None,)


# %%
# Without ``seed`` a call draws one from PyTorch's generator of the CPU, so
# ``torch.manual_seed`` repeats a run. A CUDA graph repeats its seed and mask.


def dropout_add_layer_norm(
    x, residual, normalized_shape, weight=None, bias=None, p=0.5,
    training=True, seed=None, eps=1e-5,
):  # fmt: skip
    """(y, s): s = dropout(x) + residual, and y is the layer norm of s."""
    one = isinstance(normalized_shape, int)
    shape = torch.Size([normalized_shape] if one else normalized_shape)
    N, given = shape.numel(), (x, residual, weight, bias)
    names = "x", "residual", "weight", "bias"
    for name, t in zip(names, given, strict=True):
        if t is None and name in ("weight", "bias"):
            continue
        if not t.is_floating_point() or t.itemsize == 1:
            raise TypeError(f"{name} is {t.dtype}: floats of 16 bits or more")
        if t.device != x.device or t.device.type != DEVICE.type:
            raise ValueError(f"{name} is on {t.device}: all go on {DEVICE}")
        right = t.shape[-len(shape) :] if name == "x" else t.shape
        if N == 0 or right != (x.shape if name == "residual" else shape):
            shapes = f"{(*t.shape,)}, normalized_shape is {(*shape,)}"
            raise ValueError(f"the shape of {name} is {shapes}")
    if torch.promote_types(x.dtype, residual.dtype) != residual.dtype:
        raise TypeError(f"residual is {residual.dtype}, and x is {x.dtype}")
    if not 0 <= p <= 1:
        raise ValueError(f"p is {p}: it must be from 0 to 1")
    p = float(p) if training else 0.0
    if seed is None:
        seed = int(torch.randint(2**62, ())) if 0 < p < 1 else 0
    if N * residual.itemsize > 16384:
        raise ValueError(f"{N} columns: this page takes up to 16 KB a row")
    return DropoutAddLayerNorm.apply(*given, shape, eps, p, seed)


# %%
# Is it random? The kept share of elements, of pairs in rows, and in columns:


def kept(M, N, p, seed):
    """1 where an element survives."""
    x = torch.ones(M, N, dtype=torch.float16, device=DEVICE)
    s = dropout_add_layer_norm(x, 0 * x, N, p=p, seed=seed)[1]
    return (s != 0).double()


mask = kept(64, 1024, 0.25, seed=7)
for other, n in (1, 1), (mask.roll(1, 1), 2), (mask.roll(1, 0), 2):
    share = (mask * other).mean().item()
    print(f"kept: {share:.3f}, expected {0.75**n:.3f}")
    assert abs(share - 0.75**n) < 5 * mask.numel() ** -0.5

# %%
# The check takes the same mask, and does the rest in PyTorch, in float64.


def inputs(M, N, dtype):
    """x, residual, w and b, then dy and ds."""
    torch.manual_seed(0)
    x, residual, dy, ds = torch.randn(4, M, N, device=DEVICE)
    w, b = torch.rand(2, N, device=DEVICE)
    given = [0.5 * x, 0.5 * residual - 2.3, w, b]
    given = [t.to(dtype).requires_grad_() for t in given]
    return *given, (0.1 * dy).to(dtype), (0.1 * ds).to(dtype)


def chain(x, residual, shape, w, b, p=0.1, mask=None):
    s = residual + (F.dropout(x, p) if mask is None else x * mask / (1 - p))
    return F.layer_norm(s, shape, w, b), s


def check(M, N, dtype, p=0.25):
    *given, dy, ds = inputs(M, N, dtype)
    exact = [t.detach().double().requires_grad_() for t in given]
    got = dropout_add_layer_norm(*given[:2], N, *given[2:], p, seed=7)
    got += torch.autograd.grad(got, given, (dy, ds))
    want = chain(*exact[:2], (N,), *exact[2:], p, kept(M, N, p, 7))
    want += torch.autograd.grad(want, exact, (dy.double(), ds.double()))
    limit = torch.finfo(dtype).eps * (8 if dtype == torch.float32 else 1)
    for a, b in zip(got, want, strict=True):
        assert (a - b).norm() <= limit * b.norm()
    print(f"{M} x {N}, {dtype}: right")


for dtype in torch.float16, torch.float32:
    check(1151 if ON_GPU else 9, 200, dtype)

# %%
# The ceiling is the speed of a copy; backward, that of ``addcmul``.


def benchmark(mode, moved):
    def measure(M, N, dtype, mode, provider):
        """Device time of a CUDA graph, replayed with an overwritten L2 cache;
        median, 20 % and 80 % quantiles. p is 0.1."""
        if not ON_GPU:
            return 3 * [float("nan")]  # the interpreter cannot be timed
        *given, dy, ds = inputs(M, N, dtype)
        x, r, w, b = given
        if provider == "copy":
            a, b = torch.stack((dy, ds)), torch.stack((dy, ds))
            copy = lambda: b.copy_(a)
            if mode == "backward":
                copy = lambda: torch.addcmul(dy, ds, x.data, out=b[0])
            return speed(4 * dy.nbytes, copy)
        f = lambda: dropout_add_layer_norm(x, r, (N,), w, b, 0.1, seed=1)
        if provider == "torch":
            f = lambda: chain(x, r, (N,), w, b)
        elif provider == "torch.compile":
            torch._dynamo.reset()  # nothing is left of other shapes
            torch._functorch.config.donated_buffer = False  # runs many times
            compiled = torch.compile(lambda *t: chain(*t), dynamic=False)
            f = lambda: compiled(x, r, (N,), w, b)
        if mode == "backward":
            out, grad = f(), torch.autograd.grad
            f = lambda: grad(out, given, (dy, ds), retain_graph=True)
        return speed(moved * dy.nbytes, f)

    lines = ["triton", "torch", "torch.compile", "copy"]
    names = ["Triton", "PyTorch", "torch.compile", "Copy"]
    return triton.testing.perf_report(triton.testing.Benchmark(
        ["N"], [512 * i for i in (2, 3, 4, 6, 8, 10, 12, 16)], "provider",
        lines, names, f"dropout-add-layer-norm-{mode}",
        {"M": 4096, "dtype": torch.float16, "mode": mode}, ylabel="GB/s",
    ))(measure)  # fmt: skip


for mode, moved in ("forward", 4), ("backward", 5):
    report(benchmark(mode, moved))

# %%
# We are ahead by more than was counted: PyTorch's layer norm is slower, too.
# torch.compile fuses, but its ``tl.rand`` calls Philox for each element.
#
# Exercise 1: a module
# --------------------
#
# Write a module that takes the place of dropout, addition and layer norm.
#
# **Hint.** What does ``model.eval()`` change in a module?


class Norm(torch.nn.LayerNorm):
    def forward(self, x, residual):
        given = self.normalized_shape, self.weight, self.bias
        return dropout_add_layer_norm(x, residual, *given)  # to do


def exercise_1(module):
    x, norm = torch.randn(4, 8, device=DEVICE), module(8, device=DEVICE)
    norm.load_state_dict(torch.nn.LayerNorm(8).state_dict())
    fresh = not torch.equal(norm(x, x)[1], norm(x, x)[1])
    still = torch.equal(norm.eval()(x, x)[1], x + x)
    print("a new mask each time:", fresh, "- none in evaluation:", still)
    return fresh and still


exercise_1(Norm)

# %%

# Solution 1


class Norm1(torch.nn.LayerNorm):
    def forward(self, x, residual):
        return dropout_add_layer_norm(
            x, residual, self.normalized_shape, self.weight, self.bias,
            training=self.training, eps=self.eps,
        )  # fmt: skip


assert exercise_1(Norm1)
