r"""
RMS norm in 16 bits
===================

Where are the numbers rounded, and what does it cost?
Once at the end is best and takes no time; models round in other places, and
a residual stream in float32 moves more bytes.

**What you need:** `RMS normalization and the residual stream
<01-rms-norm.html>`_, whose kernels these are, for 1 to 8192 columns.
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
# Three orders
# ------------
#
# `Liger <https://github.com/linkedin/Liger-Kernel>`_ calls it *casting*.
# ``gemma``: all is in float32, and ``y`` is rounded once. ``llama``:
# :math:`\hat{x}` is rounded, too, before its product with ``w``. ``none``:
# nothing is cast to float32, and each step is rounded to 16 bits.

CASTINGS = "gemma", "llama", "none"


def in_torch(x, w, eps, casting, offset=0.0):
    wide = x if casting == "none" else x.float()
    x_hat = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if casting == "gemma":
        return (x_hat * (offset + w.float())).to(x.dtype)
    return x_hat.to(x.dtype) * (offset + w)


def error(found, exact):
    return ((found - exact).norm() / exact.norm()).item()


# %%
# Forward
# -------
#
# Two functions are new. ``_rounded`` rounds only where a casting asks for it.
# ``_factor`` adds an *offset* to the weight, as some models do.


@triton.jit
def _load(ptr, c, N: tl.constexpr, CHUNK: tl.constexpr, HINT: tl.constexpr):
    col = c * CHUNK + tl.arange(0, CHUNK)
    return tl.load(ptr + col, mask=col < N, other=0, eviction_policy=HINT)


@triton.jit
def _store(ptr, value, c, N: tl.constexpr, CHUNK: tl.constexpr):
    col = c * CHUNK + tl.arange(0, CHUNK)
    tl.store(ptr + col, value, mask=col < N)


@triton.jit
def _rounded(value, dtype: tl.constexpr, YES: tl.constexpr):
    return value.to(dtype).to(value.dtype) if YES else value


@triton.jit
def _factor(w, offset: tl.constexpr, CASTING: tl.constexpr, acc: tl.constexpr):
    return _rounded(w.to(acc) + offset, w.dtype, CASTING != "gemma")


# %%


@triton.jit
def _rms_norm_fwd(
    x_ptr, residual_ptr, w_ptr,  # residual may be None
    y_ptr, s_ptr, rstd_ptr,
    eps: tl.constexpr, offset: tl.constexpr, CASTING: tl.constexpr,
    N: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    acc: tl.constexpr = rstd_ptr.dtype.element_ty
    half: tl.constexpr = y_ptr.dtype.element_ty
    NONE: tl.constexpr = CASTING == "none"
    row = tl.program_id(0).to(tl.int64)
    xs, more, sums = (), (), ()
    for c in tl.static_range((N + CHUNK - 1) // CHUNK):
        xs += (_load(x_ptr + row * N, c, N, CHUNK, "evict_first"),)
        if residual_ptr is not None:
            more += (_load(residual_ptr + row * N, c, N, CHUNK, ""),)
    squares = tl.zeros((CHUNK,), acc)
    for c in tl.static_range(len(xs)):
        s = xs[c]
        if residual_ptr is not None:
            s = (s.to(acc) + more[c].to(acc)).to(more[c].dtype)
            _store(s_ptr + row * N, s, c, N, CHUNK)
        sums += (s,)
        squares += _rounded(s.to(acc) * s.to(acc), half, NONE)
    mean = _rounded(tl.sum(squares) / N, half, NONE)
    rstd = _rounded(tl.rsqrt(mean + eps), half, NONE)
    tl.store(rstd_ptr + row, rstd)
    for c in tl.static_range(len(xs)):
        w = _load(w_ptr, c, N, CHUNK, "evict_last")
        x_hat = _rounded(sums[c].to(acc) * rstd, half, CASTING != "gemma")
        y = x_hat * _factor(w, offset, CASTING, acc)
        _store(y_ptr + row * N, y, c, N, CHUNK)


# %%


def forward(x, residual, w, eps, casting, offset):
    M, N = x.numel() // w.numel(), w.numel()
    y = torch.empty_like(x)
    s = x if residual is None else torch.empty_like(residual)
    acc = torch.promote_types(s.dtype, torch.float32)
    rstd = torch.empty(M, dtype=acc, device=x.device)
    held = N * (x.itemsize + (0 if residual is None else residual.itemsize))
    warps = max(triton.next_power_of_2(-(-held // 4096)), 4)
    chunk = min(512 // x.itemsize * warps, triton.next_power_of_2(N))
    given = x, residual, w, y, s, rstd, eps, offset, casting, N, chunk
    _rms_norm_fwd[(M,)](*given, num_warps=warps)
    return y, s, rstd


# %%
# The errors in both types of 16 bits, of the kernel and of ``in_torch``:


@triton.testing.perf_report(triton.testing.Benchmark(
    ["case"], [f"{d} {c}" for d in ("float16", "bfloat16") for c in CASTINGS],
    "provider", ["triton", "torch"], ["Triton", "PyTorch"], "rms-norm-casting",
    {"M": 4096, "N": 8192, "mode": "forward"}, ylabel="relative error",
))  # fmt: skip
def errors(M, N, mode, case, provider):
    """Norm of the error of y, over that of the result in float64."""
    M, N = (M, N) if ON_GPU else (4, 200)  # the interpreter is slow
    dtype, casting = case.split()
    torch.manual_seed(0)
    x = torch.randn(M, N, device=DEVICE).to(getattr(torch, dtype))
    w = torch.rand(N, device=DEVICE).to(x.dtype)
    exact = F.rms_norm(x.double(), (N,), w.double(), 1e-6)
    y = in_torch(x, w, 1e-6, casting)
    if provider == "triton":
        y, _, _ = forward(x, None, w, 1e-6, casting, 0.0)
    return 3 * [error(y, exact)]


table = errors.run(show_plots=ON_GPU, return_df=True)
print(table.to_string(index=False, float_format="{:.1e}".format))

# %%
# One rounding less is a smaller error. With ``none`` even ``1 / rms`` is
# rounded: a row is wrong by one factor. In float16, 256 squared is infinite.
#
# Who rounds where, in Hugging Face's transformers and in Liger:
#
# - Llama, Mistral, Qwen 2 and 3: ``llama``, and a weight that starts at 1.
# - Gemma 1 to 3, Qwen3-Next: ``gemma``, ``offset=1``, and ``w`` starts at 0.
# - PyTorch's ``F.rms_norm`` and `quack <https://github.com/Dao-AILab/quack>`_:
#   ``gemma``, without offset.
#
# Why ``1 + w``? Just below 1 the numbers of bfloat16 are 1/256 apart, and a
# step of less than half of that is lost. Near 0 they are close. That helps if
# ``1 + w`` is not rounded, as in ``gemma``. Here are 100 steps of 0.001:

factor, distance = torch.tensor([1.0, 0.0]).bfloat16()
for _ in range(100):
    factor -= 0.001
    distance -= 0.001
print("factor:", factor.item(), "1 + distance:", 1 + distance.item())

# %%

# Drawing: numbers of bfloat16.

plt.figure("Numbers of bfloat16: close at 0, far apart at 1", (7.5, 1))
near = torch.arange(2**15).to(torch.int16).view(torch.bfloat16).float()
for level, center in (0, 1.0), (1, 0.0):
    numbers = torch.cat([near, -near]) - center
    numbers = numbers[(numbers.abs() < 0.03) & (numbers.abs() > 0.0005)]
    plt.plot(numbers, torch.full_like(numbers, level), "|", ms=12)
plt.yticks((0, 1), ("near 1", "near 0"))
plt.show()

# %%
# Backward
# --------
#
# Here a rounding counts as a function of slope 1. So no formula changes, but
# ``offset + w`` stands for ``w``. Where the stream is wider than ``x``, so is
# its gradient: the kernel stores it in both types.


@triton.jit
def _rms_norm_bwd(
    dy_ptr, ds_ptr, s_ptr, w_ptr, rstd_ptr,  # ds may be None
    dx_ptr, dr_ptr,  # the same in two types; dr may be None
    sums_ptr, M, offset: tl.constexpr, CASTING: tl.constexpr,
    N: tl.constexpr, CHUNK: tl.constexpr, STAGES: tl.constexpr,
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
            wdy = dys[c].to(acc) * _factor(ws[c], offset, CASTING, acc)
            total += ss[c].to(acc) * wdy
        a, sums = tl.sum(total) / N * rstd * rstd * rstd, ()
        for c in tl.static_range(len(ws)):
            s, scaled = ss[c].to(acc), dys[c].to(acc) * rstd
            sums += (dws[c] + scaled * s,)
            dx = scaled * _factor(ws[c], offset, CASTING, acc)
            if ds_ptr is not None:
                dx += _load(ds_ptr + at, c, N, CHUNK, "").to(acc)
            _store(dx_ptr + at, dx - s * a, c, N, CHUNK)
            if dr_ptr is not None:
                _store(dr_ptr + at, dx - s * a, c, N, CHUNK)
        dws = sums
    for c in tl.static_range(len(dws)):
        _store(sums_ptr + tl.program_id(0) * N, dws[c], c, N, CHUNK)


# %%

GPU = torch.cuda.get_device_properties(DEVICE) if ON_GPU else None
NUM_SMS = GPU.multi_processor_count if ON_GPU else 4
SHARED = getattr(GPU, "shared_memory_per_block_optin", 65536)


def backward(dy, ds, s, w, rstd, casting, offset):
    M, N, dx = rstd.numel(), w.numel(), torch.empty_like(dy)
    dr = None if s.dtype == dy.dtype else torch.empty_like(s)
    warps = 4 if N * s.itemsize <= 8192 else 8
    chunk = min(512 // dy.itemsize * warps, triton.next_power_of_2(N))
    sizes = sum(t.itemsize for t in (s, dy, ds) if t is not None)
    in_flight = triton.cdiv(N, chunk) * chunk * sizes * 8 // warps
    stages = 1 + min((SHARED - 4096) // in_flight, 3)
    rounds = triton.cdiv(M, NUM_SMS * 8 // warps)
    programs = triton.cdiv(M, max(rounds, 1))
    sums = torch.empty(programs, N, dtype=rstd.dtype, device=s.device)
    given = dy, ds, s, w, rstd, dx, dr, sums, M, offset, casting, N, chunk
    _rms_norm_bwd[(programs,)](*given, stages, num_warps=warps)
    return dx, dx if dr is None else dr, sums.sum(0).reshape(w.shape)


class Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, residual, w, eps, casting, offset):
        y, s, rstd = forward(x, residual, w, eps, casting, offset)
        ctx.save_for_backward(s, w, rstd)
        ctx.options = casting, offset
        ctx.set_materialize_grads(False)
        return y if residual is None else (y, s)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy, ds=None):
        if dy is None:  # only s was used
            return ds, ds, None, None, None, None
        ds = None if ds is None else ds.contiguous()
        given = *ctx.saved_tensors, *ctx.options
        dx, dr, dw = backward(dy.contiguous(), ds, *given)
        return dx, dr if ctx.needs_input_grad[1] else None, dw, *3 * [None]


# %%


def rms_norm(
    x, normalized_shape, weight=None, eps=None, casting="gemma", offset=0.0,
    residual=None,
):  # fmt: skip
    """x over its root mean square, times offset + weight."""
    one = isinstance(normalized_shape, int)
    shape = torch.Size([normalized_shape] if one else normalized_shape)
    acc = torch.promote_types(x.dtype, torch.float32)
    N, most = len(shape) and shape.numel(), 16384 // x.itemsize
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
    if not eps >= 0 or not 0 < N <= most or casting not in CASTINGS:
        wrong = f"eps is {eps}, casting {casting}, and {N} columns are asked"
        raise ValueError(f"{wrong}: 0 or more, one of {CASTINGS}, 1 to {most}")
    if weight is None:
        weight, offset = x.new_ones(shape), 0.0
    more = None if residual is None else residual.contiguous()
    options = eps, casting, float(offset)
    return Norm.apply(x.contiguous(), more, weight.contiguous(), *options)


def add_rms_norm(x, residual, *args, **more):
    """The pair y, s: s = x + residual, and y = rms_norm(s)."""
    if residual is None:
        raise TypeError("residual is None: rms_norm takes none")
    return rms_norm(x, *args, residual=residual, **more)


# %%
# Errors are counted in *half units*: one rounding makes one at most.


def inputs(M, N, dtype, stream=None):
    torch.manual_seed(0)
    x, residual, dy, ds = 0.5 + torch.randn(4, M, N, device=DEVICE)
    stream, w = stream or dtype, torch.rand(N, device=DEVICE)
    leaves = x.to(dtype), residual.to(stream), w.to(dtype)
    return *(t.requires_grad_() for t in leaves), dy.to(dtype), ds.to(stream)


def results(function, x, residual, w, dy, ds):
    out = function(x, residual, w)
    return *out, *torch.autograd.grad(out, (x, residual, w), (dy, ds))


def check(M, N, dtype, stream, casting):
    given, options = inputs(M, N, dtype, stream), (1e-6, casting, 1.0)
    exact = [t.detach().double().requires_grad_() for t in given]
    f = lambda x, r, w: add_rms_norm(x, r, w.shape, w, *options)
    g = lambda x, r, w: (F.rms_norm(s := x + r, w.shape, 1 + w, 1e-6), s)
    worst = max(map(error, results(f, *given), results(g, *exact)))
    worst /= torch.finfo(dtype).eps / 2
    print(f"{stream}, {casting}: {worst:.1f} half units")
    assert worst <= {"gemma": 1, "llama": 2, "none": 3}[casting]


M, N = (1151, 8192) if ON_GPU else (9, 200)
for stream in torch.float16, torch.float32:
    for casting in CASTINGS:
        check(M, N, torch.float16, stream, casting)

# %%
# The stream
# ----------
#
# 64 layers add to one stream, in bfloat16 or in float32:

types = torch.bfloat16, torch.float32, torch.float64
half, single, exact = (torch.zeros(64, 256).to(t) for t in types)
for x in torch.randn(64, 64, 256).bfloat16():
    half, single, exact = half + x, single + x, exact + x
print(f"bfloat16 {error(half, exact):.0e}, float32 {error(single, exact):.0e}")

# %%
# float32 costs bytes: forward 12 for each number, not 8; backward 16, not 8.
#
# quack has another remedy, for a stream in 16 bits: it stores the rounded sum,
# but normalizes the sum before it is rounded. So ``y`` is nearer to the exact
# result, but is not the norm of the ``s`` that the backward pass reads. And
# two kernels in its place give other bits. Liger and this page round first.

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
# Two lines are our kernel: Triton with ``gemma`` and an offset, and Llama.

from importlib.util import find_spec


def liger(x, w):
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    options = 1e-6, 0.0, "llama", False  # dx does not overwrite dy
    return LigerRMSNormFunction.apply(x, w, *options)


NORMS = {
    "triton": lambda x, w: rms_norm(x, w.shape, w, 1e-6, "gemma", 1.0),
    "llama": lambda x, w: rms_norm(x, w.shape, w, 1e-6, "llama"),
    "torch": lambda x, w: F.rms_norm(x, w.shape, w, 1e-6),
} | ({"liger": liger} if find_spec("liger_kernel") else {})


def speeds(mode):
    def measure(M, N, dtype, mode, provider):
        """Device time of a CUDA graph, replayed with an overwritten L2 cache;
        median, 20 % and 80 % quantiles."""
        if not ON_GPU:
            return 3 * [float("nan")]  # the interpreter cannot be timed
        x, more, w, dy, _ = inputs(M, N, dtype)
        if provider == "copy":  # of two matrices; an addition moves three
            forward = lambda: dy.copy_(more.data)
            backward = lambda: torch.add(x.data, more.data, out=dy)
        else:
            f, grad = NORMS[provider], torch.autograd.grad
            y, forward = f(x, w), lambda: f(x, w)
            backward = lambda: grad(y, (x, w), dy, retain_graph=True)
        moved, fn = (2, forward) if mode == "forward" else (3, backward)
        return speed(moved * dy.nbytes, fn)

    lines = [*NORMS, "copy"]
    return triton.testing.perf_report(triton.testing.Benchmark(
        ["N"], [2048, 2560, 3072, 3584, 4096, 5120, 7168, 8192], "provider",
        lines, [{"torch": "PyTorch"}.get(i, i.capitalize()) for i in lines],
        f"rms-norm-16-bits-{mode}", ylabel="GB/s",
        args={"M": 4096, "dtype": torch.bfloat16, "mode": mode},
    ))(measure)  # fmt: skip


report(speeds("forward"))
report(speeds("backward"))

# %%
# Casting and offset hardly show: memory sets the speed. Backward, the sums for
# ``dw``, and the kernel that adds them up, weigh most where rows are narrow.
#
# A Llama block
# -------------
#
# ``RMSNorm`` takes the place of PyTorch's, and loads its state; ``LlamaNorm``
# is Hugging Face's way. The block leaves out positions, which no norm sees.


class RMSNorm(torch.nn.RMSNorm):
    def forward(self, x, residual=None):
        options = self.normalized_shape, self.weight, self.eps, "llama"
        return rms_norm(x, *options, residual=residual)


class LlamaNorm(torch.nn.RMSNorm):
    def forward(self, x, residual):  # in PyTorch
        s = x + residual
        return in_torch(s, self.weight, self.eps, "llama"), s


class Block(torch.nn.Module):
    def __init__(self, N, norm):
        super().__init__()
        self.norms = torch.nn.ModuleList(norm(N, 1e-5) for _ in range(2))
        self.maps = torch.nn.ModuleList(
            torch.nn.Linear(*sizes, bias=False)
            for sizes in ((N, 3 * N), (N, N), (N, 7 * N), (7 * N // 2, N))
        )

    def forward(self, x, s):
        qkv, out, up, down = self.maps
        y, s = self.norms[0](x, s)
        q, k, v = qkv(y).unflatten(-1, (3, -1, 64)).transpose(1, 3).unbind(2)
        x = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y, s = self.norms[1](out(x.transpose(1, 2).flatten(2)), s)
        gate, x = up(y).chunk(2, -1)
        return down(F.silu(gate) * x), s


# %%


def step(N, tokens, norm, dtype):
    torch.manual_seed(0)
    with DEVICE:
        state, block = Block(N, LlamaNorm).state_dict(), Block(N, norm)
        given = torch.randn(2, 1, tokens, N, dtype=dtype)
    block.to(dtype).load_state_dict(state)

    def run():
        loss = sum(t.float().square().mean() for t in block(*given))
        return loss, *torch.autograd.grad(loss, list(block.parameters()))

    return run


found = [step(64, 24, n, torch.float32)() for n in (RMSNorm, LlamaNorm)]
torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)
print("loss with the module, and without:", *(f"{t[0]:.6f}" for t in found))


@triton.testing.perf_report(triton.testing.Benchmark(
    ["N"], [1024, 2048, 4096], "provider", ["triton", "torch"],
    ["Triton", "PyTorch"], "rms-norm-llama", ylabel="µs",
    args={"M": 4096, "dtype": torch.bfloat16, "mode": "forward and backward"},
))  # fmt: skip
def block_time(M, N, dtype, mode, provider):
    """Device time of both passes in a CUDA graph, replayed with an overwritten
    L2 cache; median, 20 % and 80 % quantiles."""
    if not ON_GPU:
        return 3 * [float("nan")]
    norm = RMSNorm if provider == "triton" else LlamaNorm
    return [1000 * t for t in device_time(step(N, M, norm, dtype))]


block_time.run(show_plots=ON_GPU)

# %%
# At 4096 columns the gain is smaller: matrix products grow with the square.
#
# Exercise 1: not rounded
# -----------------------
#
# Let this kernel do what quack does.
#
# **Hint.** ``tl.store`` rounds to the type of the pointer.


@triton.jit
def _add_norm(x_ptr, residual_ptr, s_ptr, y_ptr, N: tl.constexpr):
    at = tl.program_id(0) * N + tl.arange(0, N)
    s = tl.load(x_ptr + at) + tl.load(residual_ptr + at)  # to do
    tl.store(s_ptr + at, s)
    wide = s.to(tl.float32)
    tl.store(y_ptr + at, wide * tl.rsqrt(tl.sum(wide * wide) / N))


def exercise_1(kernel):
    x, residual = torch.randn(2, 8, 64, device=DEVICE).half()
    s, y = torch.empty_like(x), torch.empty(8, 64, device=DEVICE)
    kernel[(8,)](x, residual, s, y, N=64)
    exact = F.rms_norm(x.double() + residual, (64,), eps=0.0)
    print(f"error of y before it is rounded: {error(y, exact):.0e}")
    return error(y, exact) < 1e-6 and torch.equal(s, x + residual)


exercise_1(_add_norm)

# %%

# Solution 1


@triton.jit
def _add_norm_1(x_ptr, residual_ptr, s_ptr, y_ptr, N: tl.constexpr):
    at = tl.program_id(0) * N + tl.arange(0, N)
    wide = tl.load(x_ptr + at).to(tl.float32) + tl.load(residual_ptr + at)
    tl.store(s_ptr + at, wide)
    tl.store(y_ptr + at, wide * tl.rsqrt(tl.sum(wide * wide) / N))


assert exercise_1(_add_norm_1)
