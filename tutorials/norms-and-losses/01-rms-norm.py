r"""
RMS normalization and the residual stream
=========================================

What does it cost to add a residual and to normalize the sum?
One kernel for each pass moves four matrices, where two steps move five
forward and six backward.

`RMS normalization <https://arxiv.org/abs/1910.07467>`_, without mean and bias,
stands before each block of Llama, Qwen, Mistral and Gemma:

.. math:: y = \hat{x} \cdot w, \qquad \hat{x} = x \, r, \qquad
   r = \bigl( \frac{1}{N} \sum_j x_j^2 + \epsilon \bigr)^{-1/2}

**What you need:** `Chunks instead of padding
<../layer-norm/05-chunks.html>`_.
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
# A *pre-norm* block adds its result ``x`` to the *residual stream* and
# normalizes the sum ``s``: the next block needs ``y`` now, and ``s`` later.
# In two steps the addition moves three matrices, and the normalization two.
# One kernel reads ``x`` and the residual, and writes ``s`` and ``y``: four.
#
# A program has a row, in *chunks* of ``CHUNK`` columns that stay in registers;
# only the last has idle lanes.


@triton.jit
def _load(ptr, c, N: tl.constexpr, CHUNK: tl.constexpr, HINT: tl.constexpr):
    col = c * CHUNK + tl.arange(0, CHUNK)
    return tl.load(ptr + col, mask=col < N, other=0, eviction_policy=HINT)


@triton.jit
def _store(ptr, value, c, N: tl.constexpr, CHUNK: tl.constexpr):
    col = c * CHUNK + tl.arange(0, CHUNK)
    tl.store(ptr + col, value, mask=col < N)


# %%
# Without a mean, one sum is enough; idle lanes add 0 to it.
# The sum ``s`` is rounded to its type before it is squared: ``y`` belongs to
# exactly the ``s`` that is returned, and that the backward pass reads.
# The `next page <02-rms-norm-16-bits.html>`_ has the other choice.
#
# All loads come before the first store: ``s`` and ``x`` might overlap, so the
# compiler never moves a load up over a store.


@triton.jit
def _rms_norm_fwd(
    x_ptr, residual_ptr, w_ptr,  # residual may be None: only normalize
    y_ptr, s_ptr, rstd_ptr,
    eps: tl.constexpr, N: tl.constexpr,
    CHUNK: tl.constexpr, HINT: tl.constexpr,
):  # fmt: skip
    acc: tl.constexpr = rstd_ptr.dtype.element_ty  # float32, or float64
    row = tl.program_id(0).to(tl.int64)  # M * N may pass 2**31
    xs, more, sums = (), (), ()
    for c in tl.static_range((N + CHUNK - 1) // CHUNK):
        xs += (_load(x_ptr + row * N, c, N, CHUNK, HINT),)
        if residual_ptr is not None:
            more += (_load(residual_ptr + row * N, c, N, CHUNK, HINT),)
    squares = tl.zeros((CHUNK,), acc)
    for c in tl.static_range(len(xs)):
        s = xs[c]
        if residual_ptr is not None:
            s = (s.to(acc) + more[c].to(acc)).to(more[c].dtype)
            _store(s_ptr + row * N, s, c, N, CHUNK)
        sums += (s,)
        squares += s.to(acc) * s.to(acc)
    rstd = tl.rsqrt(tl.sum(squares) / N + eps)
    tl.store(rstd_ptr + row, rstd)
    for c in tl.static_range(len(xs)):
        w = _load(w_ptr, c, N, CHUNK, "evict_last").to(acc)
        _store(y_ptr + row * N, sums[c].to(acc) * rstd * w, c, N, CHUNK)


# %%
# A thread loads 16 bytes of a chunk at once; a warp holds up to 4096 bytes, of
# ``x`` and the residual together (``sizes``); programs have 4 to 32 warps.


def plan_forward(N, sizes, most=4096, least=4):
    warps = triton.next_power_of_2(-(-N * sum(sizes) // most))
    warps = min(max(warps, least), 32)
    chunk = min(512 // min(sizes) * warps, triton.next_power_of_2(N))
    hint = "evict_first" if N * min(sizes) <= 4096 else ""
    return {"CHUNK": chunk, "HINT": hint, "num_warps": warps}


def forward(x, residual, w, eps, plan=None):
    """y, s (x without a residual) and 1 / rms; all are contiguous."""
    M, N = x.numel() // w.numel(), w.numel()
    sizes = [t.itemsize for t in (x, residual) if t is not None]
    y = torch.empty_like(x)
    s = x if residual is None else torch.empty_like(residual)
    acc = torch.promote_types(s.dtype, torch.float32)
    rstd = torch.empty(M, dtype=acc, device=x.device)
    given = x, residual, w, y, s, rstd, eps, N
    _rms_norm_fwd[(M,)](*given, **(plan or plan_forward(N, sizes)))
    return y, s, rstd


x, residual = torch.randn(2, 3, 10, device=DEVICE)
w, plan = torch.rand(10, device=DEVICE), {"CHUNK": 4, "HINT": ""}
y, s, _ = forward(x, residual, w, 1e-6, plan)
right = torch.allclose(y, F.rms_norm(s, (10,), w, 1e-6), atol=1e-5)
print("chunks of 4:", right and torch.equal(s, x + residual))

# %%
# Is the count right? ``ncu``, a profiler, counts what memory delivers. In the
# figure, 1 is two matrices, which one kernel must read; two steps read three.


@triton.testing.perf_report(triton.testing.Benchmark(
    ["N"], [2**i for i in range(10, 15)], "provider", ["triton", "steps"],
    ["Triton", "Two steps"], "rms-norm-dram", x_log=True,
    ylabel="bytes of DRAM per byte counted",
    args={"M": 4096, "dtype": torch.bfloat16, "mode": "forward",
          "counter": "dram__bytes_read.sum"},
))  # fmt: skip
def traffic(M, N, dtype, mode, counter, provider):
    """Bytes that DRAM delivers, over those of x and the residual."""
    if not ON_GPU:
        return 3 * [float("nan")]
    x, residual = torch.randn(2, M, N, device=DEVICE, dtype=dtype)
    w, size = torch.rand(N, device=DEVICE, dtype=dtype), 2 * x.nbytes
    run = lambda: forward(x, residual, w, 1e-6)
    if provider == "steps":
        run = lambda: forward(x + residual, None, w, 1e-6)
    run()  # compiles
    with torch.cuda.nvtx.range(f"counted {provider} {N} per {size}"):
        run()
    return 3 * [float("nan")]


traffic.run(show_plots=ON_GPU)

# %%
# It is, with caches that ``ncu`` empties before each kernel. Now a picture: a
# row of two numbers is a point in a plane, and its RMS norm lies on a circle.

# %%

# Drawing: rows of two numbers on their way.

plt.figure("RMS norm moves rows of two numbers onto a circle", (7.5, 3.5))
plt.gca().add_patch(plt.Circle((0, 0), 2**0.5, fill=False, color="gray"))
for x in torch.tensor([[2.2, 0.5], [0.4, 0.8], [-0.6, 2.1], [-0.9, -0.2]]):
    y, arrow = F.rms_norm(x, (2,)), {"arrowstyle": "->"}
    plt.annotate("", y.tolist(), x.tolist(), arrowprops=arrow)
plt.gca().set(xlim=(-2.6, 2.6), ylim=(-1.7, 2.3), aspect="equal")
plt.show()

# %%
# Backward: the formulas
# ----------------------
#
# ``dy`` arrives from ``y``, and ``ds`` from the stream:
#
# .. math:: dx = (w \, dy - \hat{s} \, c) \; r + ds, \qquad
#    c = \frac{1}{N} \sum_j \hat{s}_j \, w_j \, dy_j, \qquad
#    dw_j = \sum_\text{rows} \hat{s}_j \, dy_j
#
# An addition hands its gradient to both sides: one matrix is written for ``x``
# and for the residual. Autograd agrees, at toy size:

x, residual = torch.randn(2, 3, 4, dtype=torch.float64).requires_grad_()
w = torch.rand(4, dtype=torch.float64, requires_grad=True)
dy, ds = torch.randn(2, 3, 4, dtype=torch.float64)
s = x + residual
s_hat = s * (r := ((s**2).mean(1, keepdim=True) + 1e-6) ** -0.5)
dx, dw = torch.autograd.grad((s_hat * w * dy + s * ds).sum(), (x, w))
c = (s_hat * w * dy).mean(1, keepdim=True)
assert torch.allclose(dx, (w * dy - s_hat * c) * r + ds)
assert torch.allclose(dw, (s_hat * dy).sum(0))

# %%
# Backward: 16384 columns in registers
# ------------------------------------
#
# A program takes row after row, with loads `in flight
# <../layer-norm/04-loads-in-flight.html>`_, and keeps its sums for ``dw``.
# With 8 warps, a thread has 64 of 16384 columns: 96 registers for ``s``,
# ``dy`` and ``w`` in 16 bits, 64 for ``dw`` in float32, 160 of 255.
#
# But the compiler undoes it: ``s`` and ``dy`` are converted to float32 for the
# sum over the row, and again for ``dx``. It converts once and keeps the
# result. That takes two registers in place of one, until some go to memory.
# So, in rows of more than 24 KB, the second use goes through an exclusive or
# with an argument that is 0. No bit changes, but the compiler cannot know.


@triton.jit
def _hidden(x, zero):
    if x.dtype.primitive_bitwidth == 16:
        bits = x.to(tl.int16, bitcast=True) ^ tl.cast(zero, tl.int16)
        x = bits.to(x.dtype, bitcast=True)
    return x


# %%


@triton.jit
def _rms_norm_bwd(
    dy_ptr, ds_ptr, s_ptr, w_ptr, rstd_ptr,  # ds may be None
    dx_ptr, sums_ptr,  # (M, N) and (programs, N)
    zero, M, N: tl.constexpr, CHUNK: tl.constexpr,
    STAGES: tl.constexpr, HIDE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    acc: tl.constexpr = rstd_ptr.dtype.element_ty
    ws, dws = (), ()
    for c in tl.static_range((N + CHUNK - 1) // CHUNK):
        ws += (_load(w_ptr, c, N, CHUNK, ""),)
        dws += (tl.zeros((CHUNK,), acc),)
    for row in tl.range(tl.program_id(0), M, tl.num_programs(0),
                        num_stages=STAGES, disable_licm=True):  # fmt: skip
        at, rstd = tl.cast(row, tl.int64) * N, tl.load(rstd_ptr + row)
        ss, dys, total = (), (), tl.zeros((CHUNK,), acc)
        for c in tl.static_range(len(ws)):
            ss += (_load(s_ptr + at, c, N, CHUNK, ""),)
            dys += (_load(dy_ptr + at, c, N, CHUNK, ""),)
            total += ss[c].to(acc) * (dys[c].to(acc) * ws[c].to(acc))
        a, sums = tl.sum(total) / N * rstd * rstd * rstd, ()  # c * r**2
        for c in tl.static_range(len(ws)):
            s, dy = ss[c], dys[c]
            if HIDE:
                s, dy = _hidden(s, zero), _hidden(dy, zero)
            s, scaled = s.to(acc), dy.to(acc) * rstd
            sums += (dws[c] + scaled * s,)
            dx = scaled * ws[c].to(acc)
            if ds_ptr is not None:
                dx += _load(ds_ptr + at, c, N, CHUNK, "").to(acc)
            _store(dx_ptr + at, dx - s * a, c, N, CHUNK)
        dws = sums
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    for c in tl.static_range(len(dws)):
        _store(sums_ptr + tl.program_id(0) * N, dws[c], c, N, CHUNK)


# %%
# A second kernel adds up the sums. It starts ``EARLY``, as on the chunks page.


@triton.jit
def _add_up(
    sums_ptr, dw_ptr, programs, N: tl.constexpr,  # (programs, N); (N,)
    ROWS: tl.constexpr, COLS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        tl.extra.cuda.gdc_wait()
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    rows = tl.arange(0, ROWS)[:, None]
    mask = (rows < programs) & (cols < N)
    sums = tl.load(sums_ptr + rows * N + cols, mask=mask, other=0)
    tl.store(dw_ptr + cols, tl.sum(sums, axis=0), mask=cols < N)


# %%
# The rule: 8 warps on a multiprocessor, 16 if a row has more than 32 KB; up to
# 3 rows in flight; as few programs as take the same rounds, for fewer sums.

GPU = torch.cuda.get_device_properties(DEVICE) if ON_GPU else None
NUM_SMS = GPU.multi_processor_count if ON_GPU else 4
SHARED = getattr(GPU, "shared_memory_per_block_optin", 65536)
CUDA = ON_GPU and torch.version.hip is None
EARLY = CUDA and torch.cuda.get_device_capability() >= (9, 0)


def plan_backward(N, sizes):
    row = N * sizes[0]
    warps = 4 if row <= 8192 else 8 if row <= 32768 else 16
    per_sm = max(8 // warps, 1)
    chunk = min(512 // min(sizes) * warps, triton.next_power_of_2(N))
    in_flight = triton.cdiv(N, chunk) * chunk * sum(sizes)
    stages = 1 + min((SHARED - 2048) // per_sm // in_flight, 3)
    return {"CHUNK": chunk, "num_warps": warps, "per_sm": per_sm,
            "STAGES": stages, "HIDE": row > 24576}  # fmt: skip


def backward(dy, ds, s, w, rstd, plan=None):
    M, N = rstd.numel(), w.numel()
    dx, dw = torch.empty_like(s), torch.empty_like(w)
    sizes = [t.itemsize for t in (s, dy, ds) if t is not None]
    plan = dict(plan or plan_backward(N, sizes))
    rounds = triton.cdiv(M, NUM_SMS * plan.pop("per_sm"))
    programs = triton.cdiv(M, max(rounds, 1))
    sums = torch.empty(programs, N, dtype=rstd.dtype, device=s.device)
    early = EARLY and not torch.compiler.is_compiling()
    given = dy, ds, s, w, rstd, dx, sums, 0, M, N
    _rms_norm_bwd[(programs,)](*given, EARLY=early, **plan)
    option = {"launch_pdl": True} if early else {}
    given = sums, dw, programs, N, triton.next_power_of_2(max(programs, 1))
    _add_up[(triton.cdiv(N, 16),)](*given, 16, early, **option)
    return dx, dw


# %%
# The backward pass needs ``s``, which is a result anyway: no memory is added.


class Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, residual, w, eps):
        y, s, rstd = forward(x, residual, w, eps)
        ctx.save_for_backward(s, w, rstd)
        ctx.set_materialize_grads(False)
        return y if residual is None else (y, s)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy, ds=None):
        s, w, rstd = ctx.saved_tensors
        if dy is None:  # only s was used
            return ds, ds, None, None
        ds = None if ds is None else ds.contiguous()
        dx, dw = backward(dy.contiguous(), ds, s, w, rstd)
        return dx, dx if ctx.needs_input_grad[1] else None, dw, None


# %%
# ``s`` has the type of the residual: that of ``x``, or a wider one. A missing
# weight is ones. Without ``eps``, 16 bits take that of float32, as in PyTorch.


def rms_norm(x, normalized_shape, weight=None, eps=None):
    """x over its root mean square over the last dimensions, times weight."""
    return checked(x, None, normalized_shape, weight, eps)


def add_rms_norm(x, residual, normalized_shape, weight=None, eps=None):
    """The pair y, s: s = x + residual, and y = rms_norm(s)."""
    if residual is None:
        raise TypeError("residual is None: rms_norm takes none")
    return checked(x, residual, normalized_shape, weight, eps)


def checked(x, residual, normalized_shape, weight, eps):
    one = isinstance(normalized_shape, int)
    shape = torch.Size([normalized_shape] if one else normalized_shape)
    acc = torch.promote_types(x.dtype, torch.float32)
    N, most = len(shape) and shape.numel(), 32768 // x.itemsize
    eps = float(torch.finfo(acc).eps if eps is None else eps)
    ends = x.shape[: x.dim() - len(shape)] + shape
    wanted = {"x": ends, "residual": x.shape, "weight": shape}
    for name, t in zip(wanted, (x, residual, weight), strict=True):
        if t is None:
            continue
        types = x.dtype if t is residual else t.dtype, t.dtype
        wrong = not t.is_floating_point() or t.itemsize < 2
        if wrong or torch.promote_types(*types) != t.dtype:
            raise TypeError(f"{name} is {t.dtype}, and x is {x.dtype}")
        if t.device != x.device or t.device.type != DEVICE.type:
            raise ValueError(f"{name} is on {t.device}: all go on {DEVICE}")
        if t.shape != wanted[name]:
            wrong = f"{(*t.shape,)}, normalized_shape {(*shape,)}"
            raise ValueError(f"the shape of {name} is {wrong}")
    if not eps >= 0 or not 0 < N <= most:
        taken = f"this page takes eps from 0 on and 1 to {most} columns"
        raise ValueError(f"eps is {eps}, and {N} columns are asked: {taken}")
    w = x.new_ones(shape) if weight is None else weight.contiguous()
    more = None if residual is None else residual.contiguous()
    return Norm.apply(x.contiguous(), more, w, eps)


# %%


class RMSNorm(torch.nn.RMSNorm):  # takes the place of PyTorch's
    def forward(self, x, residual=None):
        given = self.normalized_shape, self.weight, self.eps
        return checked(x, residual, *given)


def inputs(M, N, dtype):
    """x, residual, w, dy and ds."""
    torch.manual_seed(0)
    x, residual, dy, ds = 0.5 + torch.randn(4, M, N, device=DEVICE)
    leaves = x, residual, torch.rand(N, device=DEVICE)
    leaves = (t.to(dtype).requires_grad_() for t in leaves)
    return *leaves, dy.to(dtype), ds.to(dtype)


CALLS = {
    "triton": lambda x, r, w: add_rms_norm(x, r, w.shape, w, 1e-6),
    "two steps": lambda x, r, w: (rms_norm(s := x + r, w.shape, w, 1e-6), s),
    "torch": lambda x, r, w: (F.rms_norm(s := x + r, w.shape, w, 1e-6), s),
}


def results(function, x, residual, w, dy, ds):
    out = function(x, residual, w)
    return *out, *torch.autograd.grad(out, (x, residual, w), (dy, ds))


def check(M, N, dtype):
    limit = torch.finfo(dtype).eps * (8 if dtype == torch.float32 else 0.5)
    given = inputs(M, N, dtype)
    exact = [t.detach().double().requires_grad_() for t in given]
    given = results(CALLS["triton"], *given), results(CALLS["torch"], *exact)
    for got, want in zip(*given, strict=True):
        error = ((got - want).norm() / want.norm()).item()
        assert error <= limit, f"{error:.1e} is above {limit:.1e}"
    print(f"{M} x {N}, {dtype}: errors below {limit:.1e}")


for dtype in torch.float16, torch.float32:
    check(*((1151, 8192) if ON_GPU else (9, 200)), dtype)

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
# Measured
# --------
#
# The ceiling reads and writes as many matrices, with the best of six tiles.

from importlib.util import find_spec


@triton.jit
def _move(a_ptr, b_ptr, c_ptr, d_ptr,
          WRITES: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(a_ptr + at) + tl.load(b_ptr + at)
    if WRITES == 2:
        tl.store(c_ptr + at, total)
    else:
        total += tl.load(c_ptr + at)
    tl.store(d_ptr + at, total)


def move(block, warps, mode, x, residual, w, dy, ds):
    given = x.detach(), residual.detach(), ds, dy
    grid, writes = (x.numel() // block,), 2 if mode == "forward" else 1
    return lambda: _move[grid](*given, writes, block, num_warps=warps)


def liger(x, residual, w):
    from liger_kernel.ops import fused_add_rms_norm as ops

    options = w, 1e-6, 0.0, "llama", False  # dx does not overwrite dy
    return ops.LigerFusedAddRMSNormFunction.apply(x, residual, *options)


def quack(x, residual, w):
    from quack.rmsnorm import rmsnorm

    return rmsnorm(x, w, residual=residual, eps=1e-6, prenorm=True)


# %%
# The widths are those of models, from Llama 3.2 1B to Llama 3.1 405B.

TILES = [(block, warps) for block in (1024, 2048) for warps in (2, 4, 8)]
WIDTHS = [2048, 2560, 3072, 3584, 4096, 5120, 7168, 8192, 12288, 16384]
CALLS |= {"torch.compile": CALLS["torch"]}
CALLS |= {"liger": liger} if find_spec("liger_kernel") else {}
CALLS |= {"quack": quack} if find_spec("quack") else {}


def speeds(mode):
    def measure(M, N, dtype, mode, provider):
        """Device time of a CUDA graph, replayed with an overwritten L2 cache;
        median, 20 % and 80 % quantiles. Copy: the best of six tiles."""
        if not ON_GPU:
            return 3 * [float("nan")]  # the interpreter cannot be timed
        *leaves, dy, ds = given = inputs(M, N, dtype)
        moved, f = 4 * dy.nbytes, CALLS.get(provider)
        if provider == "copy":
            ways = [move(*tile, mode, *given) for tile in TILES]
            return max(speed(moved, way) for way in ways)
        if provider == "torch.compile":
            torch._dynamo.reset()  # nothing is left of other shapes
            torch._functorch.config.donated_buffer = False  # runs many times
            f = torch.compile(lambda *t: CALLS["torch"](*t), dynamic=False)
        if mode == "forward":
            return speed(moved, lambda: f(*leaves))
        given, grad = (f(*leaves), leaves, (dy, ds)), torch.autograd.grad
        return speed(moved, lambda: grad(*given, retain_graph=True))

    lines, names = [*CALLS, "copy"], {"torch": "PyTorch"}
    return triton.testing.perf_report(triton.testing.Benchmark(
        ["N"], WIDTHS, "provider", lines,
        [names.get(line, line.capitalize()) for line in lines],
        f"add-rms-norm-{mode}", ylabel="GB/s",
        args={"M": 4096, "dtype": torch.bfloat16, "mode": mode},
    ))(measure)  # fmt: skip


report(speeds("forward"))

# %%
# Two steps take longer by about what was counted, five matrices to four.
# torch.compile, `Liger <https://github.com/linkedin/Liger-Kernel>`_ and `quack
# <https://github.com/Dao-AILab/quack>`_ fuse, too, and are close; Liger rounds
# once more, as Llama does. At 7168 and 8192 columns Liger is level with us.
# Backward, in two steps, autograd adds ``ds`` to what the normalization has
# written: six matrices, against four.

report(speeds("backward"))

# %%
# All others are behind at every width; Liger's gap is widest at narrow rows.
#
# Exercise 1: tangent to the circle
# ---------------------------------
#
# A longer row has the same ``y``, so without ``ds``, ``dx`` is orthogonal to
# its row. This one is not. Which factor is missing?
#
# **Hint.** What is subtracted is a part of ``w * dy``, along which vector?


def gradient(s, wdy, r):
    c = (s * r * wdy).mean(1, keepdim=True)
    return (wdy - s * c) * r  # to do


def exercise_1(function):
    s, wdy = torch.randn(2, 3, 8, dtype=torch.float64)
    r = s.square().mean(1, keepdim=True) ** -0.5
    product = (function(s, wdy, r) * s).sum(1).abs().max().item()
    print(f"largest product with a row: {product:.0e}")
    return product < 1e-12


exercise_1(gradient)

# %%

# Solution 1


def gradient_1(s, wdy, r):
    c = (s * r * wdy).mean(1, keepdim=True)
    return (wdy - s * r * c) * r


assert exercise_1(gradient_1)
