r"""
A lock, and its race
====================

How can many programs add to one row of sums without losing an addition?
With a lock that an atomic exchange takes and another one frees; in between
all threads must have met at a barrier.

We leave out each part and see what happens, in a hundred runs.
Then we measure what a lock is worth beside a buffer for each program.
The backward formulas and the buffers come from
`Layer normalization, both passes <01-layer-norm.html>`_.
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

import functools

# %%
# Two stages
# ----------
#
# The gradients of weight and bias are sums over all rows: ``dw`` of
# ``dy * x_hat``, ``db`` of ``dy``.
# The layer norm page of Triton's tutorials sums in two stages.
# Row ``i`` is added to buffer ``i % buffers``; then the buffers are summed.
# In PyTorch, for ``db``:

rows = torch.arange(8.0).reshape(4, 2)
buffers = torch.zeros(2, 2)
for i in range(4):
    buffers[i % 2] += rows[i]  # stage 1: one row after the other
assert torch.equal(buffers.sum(0), rows.sum(0))  # stage 2

# %%
# On a GPU rows 0 and 2 may come to buffer 0 at the same time.
# To add is to read, and then to write.
# If both read before either has written, one addition is lost:

read_by_0 = read_by_2 = torch.zeros(2)
buffer = read_by_0 + rows[0]
buffer = read_by_2 + rows[2]
print("sum:", rows[0] + rows[2], "buffer:", buffer)

# %%

# Drawing: four rows add to two buffers; a second stage sums the buffers.

_, ax = plt.subplots(
    num="Four rows add to two buffers; a second stage sums the buffers",
    figsize=(7.5, 3.2),
)
ax.set(xlim=(0, 10), ylim=(-0.2, 4.4))
ax.axis("off")
boxes = [(0.1, 3 - i, f"row {i}", f"C{i % 2}") for i in range(4)]
boxes += [(3.9, 2.5 - 2 * i, f"buffer {i}", f"C{i}") for i in range(2)]
for left, low, text, color in [*boxes, (7.7, 1.5, "dw, db", "none")]:
    ax.add_patch(
        plt.Rectangle((left, low), 2.2, 0.7, fc=color, ec="black", alpha=0.6)
    )
    ax.text(left + 1.1, low + 0.35, text, ha="center", va="center")
arrows = [((2.4, 3.35 - i), (3.8, 2.85 - i % 2 * 2)) for i in range(4)]
for start, end in [*arrows, *(((6.2, y), (7.6, 1.85)) for y in (2.85, 0.85))]:
    ax.annotate("", end, start, arrowprops={"arrowstyle": "->"})
ax.text(3.1, 4.1, "stage 1: add, one at a time", ha="center")
ax.text(7.4, 3.3, "stage 2", ha="center")
plt.show()

# %%
# The lock
# --------
#
# Each buffer has a lock, an integer with three states: 0 is free and never
# written, 1 is taken, 2 is free and written.
# ``atomic_xchg`` writes a new value and returns the old one, in one step.
# A program writes 1 until the old value is not 1: now the lock is its own.
# The old value also says whether there is a sum to read, so the buffers need
# no zeros.
#
# A program is many threads, and each stores its own columns.
# *One* of them executes the exchange that frees the lock.
#
# * ``tl.debug_barrier()`` lets all threads meet first.
#   Without it the lock may be free while a thread has still to store.
# * ``release`` is an order in memory: who sees the 2 sees the stores before.
# * ``acquire`` is the other half: no load behind it reads older values.
#
# Nobody waits forever: who has a lock is running, and waits for nobody.


@triton.jit
def _add_behind_lock(
    dw, db,  # two rows to add, in registers
    sums_ptr,  # (buffers, 2, N)
    locks_ptr,  # (buffers,), 0 at the start
    buffer, cols, N: tl.constexpr,
    BARRIER: tl.constexpr, ACQUIRE: tl.constexpr, RELEASE: tl.constexpr,
):  # fmt: skip
    dw_ptr = sums_ptr + buffer * 2 * N + cols
    db_ptr = dw_ptr + N
    state = tl.atomic_xchg(locks_ptr + buffer, 1, sem=ACQUIRE)
    while state == 1:
        state = tl.atomic_xchg(locks_ptr + buffer, 1, sem=ACQUIRE)
    old = cols < tl.where(state == 2, N, 0)  # all columns, or none
    dw += tl.load(dw_ptr, mask=old, other=0)
    db += tl.load(db_ptr, mask=old, other=0)
    tl.store(dw_ptr, dw, mask=cols < N)
    tl.store(db_ptr, db, mask=cols < N)
    if BARRIER:
        tl.debug_barrier()  # every thread has stored its columns
    tl.atomic_xchg(locks_ptr + buffer, 2, sem=RELEASE)


# %%
# The last three arguments are there to leave a part out later.
#
# The kernel is that of page 01: a program sums several rows in registers.
# At its end it goes through the lock, or, if ``locks_ptr`` is None, stores to
# a buffer of its own.


@triton.jit
def _layer_norm_bwd(
    dy_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, dx_ptr, sums_ptr, locks_ptr,
    M, buffers, N: tl.constexpr, BLOCK: tl.constexpr,
    BARRIER: tl.constexpr = True,
    ACQUIRE: tl.constexpr = "acquire", RELEASE: tl.constexpr = "release",
):  # fmt: skip
    program, cols = tl.program_id(0), tl.arange(0, BLOCK)
    mask = cols < N
    acc = mean_ptr.dtype.element_ty  # float32; float64 for float64
    dw = tl.zeros((BLOCK,), acc)
    db = tl.zeros((BLOCK,), acc)
    for i in range(program, M, tl.num_programs(0)):
        at = tl.cast(i, tl.int64) * N + cols
        x = tl.load(x_ptr + at, mask=mask, other=0).to(acc)
        dy = tl.load(dy_ptr + at, mask=mask, other=0).to(acc)
        rstd = tl.load(rstd_ptr + i)
        x_hat = (x - tl.load(mean_ptr + i)) * rstd
        dw += dy * x_hat
        db += dy
        wdy = dy
        if w_ptr is not None:
            wdy *= tl.load(w_ptr + cols, mask=mask, other=0).to(acc)
        c1 = tl.sum(x_hat * wdy) / N
        c2 = tl.sum(wdy) / N
        tl.store(dx_ptr + at, (wdy - x_hat * c1 - c2) * rstd, mask=mask)
    if locks_ptr is not None:
        _add_behind_lock(
            dw, db, sums_ptr, locks_ptr, program % buffers, cols, N,
            BARRIER, ACQUIRE, RELEASE,
        )  # fmt: skip
    else:
        sums_ptr += program * 2 * N + cols
        tl.store(sums_ptr, dw, mask=mask)
        tl.store(sums_ptr + N, db, mask=mask)


# %%
# A *plan* is three numbers: programs, buffers, and warps (groups of 32
# threads) of a program.
# With a buffer for each program there are no locks.


def stage_1(dy, x, w, mean, rstd, dx, plan, dtype=None, **flaws):
    """Fill dx; the buffers, of that dtype, and what was compiled."""
    M, N = x.shape
    programs, buffers, warps = plan
    sums = torch.empty(
        buffers, 2, N, dtype=dtype or mean.dtype, device=x.device
    )
    locks = None
    if buffers < programs:
        locks = torch.zeros(buffers, dtype=torch.int32, device=x.device)
    compiled = _layer_norm_bwd[(programs,)](
        dy, x, w, mean, rstd, dx, sums, locks, M, buffers, N,
        BLOCK=triton.next_power_of_2(N), num_warps=warps, **flaws,
    )  # fmt: skip
    return sums, compiled


# %%
# We try it with a program for each row, as on Triton's page.
# ``dw`` and ``db`` are compared with sums in float64.


def given(M, N):
    """dy, x, w, mean, rstd and room for dx; then dw and db in float64."""
    torch.manual_seed(0)
    x, dy = torch.randn(2, M, N, device=DEVICE).half()
    w, mean = torch.rand(N, device=DEVICE).half(), x.float().mean(1)
    rstd = (x.float().var(1, correction=0) + 1e-5) ** -0.5
    x_hat = (x.double() - mean.double()[:, None]) * rstd.double()[:, None]
    sums = torch.stack([(dy * x_hat).sum(0), dy.double().sum(0)])
    return (dy, x, w, mean, rstd, torch.empty_like(x)), sums


def error(sums, expected):
    """Stage 2, and its relative error: norm of difference over norm."""
    return ((sums.double().sum(0) - expected).norm() / expected.norm()).item()


M, N = (4096, 1024) if ON_GPU else (70, 24)
tensors, expected = given(M, N)
sums, compiled = stage_1(*tensors, (M, 8, 4))
print(f"relative error of dw and db: {error(sums, expected):.1e}")
assert error(sums, expected) < 1e-6

# %%
# The race
# --------
#
# A *race* is a program whose result depends on who comes first.
# We run the kernel a hundred times as it is, and without each part.
# The barrier is left out twice, for it also matters how many warps a row has.

VARIANTS = {
    "right": {},
    "no barrier": {"BARRIER": False},
    "no barrier, few warps": {"BARRIER": False},
    "no acquire": {"ACQUIRE": "relaxed"},
    "no release": {"RELEASE": "relaxed"},
}


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=["512", "1024", "2048", "4096"],  # drawn as points
        line_arg="provider",
        line_vals=list(VARIANTS),
        line_names=list(VARIANTS),
        ylabel="wrong runs of 100",
        plot_name="layer-norm-lock-race",
        args={"M": 32768, "dtype": torch.float16},
    )
)
def race(M, N, dtype, provider):
    """Runs of 100 in which dw or db differs from float64 by a relative error
    above 1e-5; the order of additions explains less."""
    if not ON_GPU:
        return 3 * [float("nan")]  # here one program follows the other
    tensors, expected = given(M, N := int(N))
    plan = M, 256, N // (512 if "few" in provider else 128)
    wrong = 0
    for _ in range(100):
        sums, _ = stage_1(*tensors, plan, **VARIANTS[provider])
        wrong += error(sums, expected) > 1e-5
    return 3 * [wrong]


table = race.run(show_plots=ON_GPU, return_df=True).set_index("N")
if table.notna().all(axis=None):
    print(table.astype(int).T.to_string())

# %%
# With all parts no run is wrong.
# A part whose absence shows in no run is needed all the same: what shows
# depends on width, warps and GPU, so a test that passes proves nothing.
# Nor do the tools see the missing barrier; this was tried on an H200:
#
# * ``racecheck`` of compute-sanitizer watches shared memory, and the sums are
#   in global memory;
# * ``memcheck`` and ``synccheck`` find all addresses valid, and all barriers
#   that are there used well;
# * Triton's interpreter runs one program after the other, and is right.
#
# What always shows it is the code that Triton hands to NVIDIA's assembler,
# the PTX.
# Where the kernel was compiled, these are its last steps:

if compiled is None:
    print("The PTX needs a GPU; see the panels at the end of the page.")
else:
    print("triton", triton.__version__)
    for name in "right", "no barrier":
        _, compiled = stage_1(*tensors, (M, 8, 4), **VARIANTS[name])
        lines = compiled.asm["ptx"].splitlines()
        steps = [
            line.strip()
            for line in lines
            if any(s in line for s in ("st.global", "bar.sync", ".exch"))
        ]
        print(f"{name}:", *steps[-4:], sep="\n    ")

# %%
# ``st.global`` stores the sums and ``atom...release.exch`` frees the lock.
# In between stands ``bar.sync``, the barrier; without ``tl.debug_barrier()``
# the compilers of triton 3.6.0 and 3.7.1 put none there, that of 3.9.0 does.
#
# What a lock costs, and what it saves
# ------------------------------------
#
# Every program stores its sums, 8 bytes a column.
# Unless it is the first at its buffer, it loads as much before.
# Stage 2 loads each buffer once.
# For :math:`P` programs and :math:`B` buffers that is
# :math:`8 \, (P + (P - B) + B) = 16 \, P` bytes a column.
# :math:`B` is gone: **a lock saves no traffic, only memory.**
#
# Plans for a block of so many lanes, each with numbers that were fastest for
# it:


def lock_each_row(M, block):
    """A program for each row, as on Triton's page."""
    buffers = 256 if block <= 1024 else 128 if block <= 4096 else 64
    return M, min(M, buffers), min(max(block // 512, 4), 16)


def lock_once(M, block, buffers=128):
    """Programs of 8 or 16 rows, but no fewer than 256 programs."""
    rows = 8 if block <= 2048 else 16
    programs = min(M, max(256, triton.cdiv(M, rows)))
    return programs, min(programs, buffers), min(max(block // 1024, 4), 16)


def few_buffers(M, block):
    return lock_once(M, block, buffers=8)


def own_buffers(M, block):
    programs = min(M, 512 if block <= 2048 else 256)
    return programs, programs, min(max(block // 1024, 4), 8)


PLANS = {
    "triton": lock_once,
    "own": own_buffers,
    "few": few_buffers,
    "each row": lock_each_row,
}

for N in 1024, 8192:
    print(f"N = {N}, {4096 * N * 2 / 1e6:.0f} MB a matrix of 4096 rows")
    for plan in PLANS.values():
        programs, buffers, _ = plan(4096, N)
        share = 16 * programs / (3 * 4096 * 2)
        print(f"  {plan.__name__:14}{8 * buffers * N / 1e6:5.1f} MB", end=" ")
        print(f"of buffers, {share:.0%} of three matrices as traffic")

# %%
# A backward pass must move three matrices, ``x``, ``dy`` and ``dx``.
# A lock for each row moves more in sums than that, if partly in the cache
# that all programs share (L2).
# Of the other plans only the memory differs, and who waits for whom.
#
# **Sums in 16 bits.**
# On Triton's page the buffers have the type of ``x``.
# Each addition then rounds, and the more rows share a buffer, the more is
# lost, though the result is rounded to 16 bits in either case:

tensors, expected = given(*((4096, 1024) if ON_GPU else (200, 24)))
for dtype in torch.float16, torch.float32:
    sums, _ = stage_1(*tensors, (len(tensors[0]), 2, 4), dtype)
    total = sums.float().sum(0, keepdim=True).half()
    print(f"buffers in {dtype}: relative error {error(total, expected):.1e}")

# %%
# A function to train with
# ------------------------
#
# Stage 2 is one launch: each program sums 16 columns, always in one order.
# The forward kernel is that of page 01.


@triton.jit
def _layer_norm_bwd_add_up(
    sums_ptr, out_ptr, buffers,
    N: tl.constexpr,  # columns of dw and of db together
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    total = tl.zeros((ROWS, COLS), sums_ptr.dtype.element_ty)
    for first in range(0, buffers, ROWS):
        rows = first + tl.arange(0, ROWS)[:, None]
        mask = (rows < buffers) & (cols < N)
        total += tl.load(sums_ptr + rows * N + cols, mask=mask, other=0)
    tl.store(out_ptr + cols, tl.sum(total, 0), mask=cols < N)


@triton.jit
def _layer_norm_fwd(
    x_ptr, w_ptr, b_ptr, y_ptr, mean_ptr, rstd_ptr,
    eps: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    acc = mean_ptr.dtype.element_ty
    x = tl.load(x_ptr + row * N + cols, mask=cols < N, other=0).to(acc)
    mean = tl.sum(x) / N
    x = tl.where(cols < N, x - mean, 0)
    rstd = 1 / tl.sqrt(tl.sum(x * x) / N + eps)
    tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)
    y = x * rstd
    if w_ptr is not None:
        y *= tl.load(w_ptr + cols, mask=cols < N).to(acc)
    if b_ptr is not None:
        y += tl.load(b_ptr + cols, mask=cols < N).to(acc)
    tl.store(y_ptr + row * N + cols, y, mask=cols < N)


# %%
# An autograd function ties both passes together.
# It makes layouts right, for ``dy`` may have any strides, even 0.


class LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, b, eps, plan):
        x, w, b = (None if t is None else t.contiguous() for t in (x, w, b))
        M, N = x.shape
        acc = torch.promote_types(x.dtype, torch.float32)
        mean, rstd = torch.empty(2, M, dtype=acc, device=x.device)
        y, block = torch.empty_like(x), triton.next_power_of_2(N)
        warps = min(max(block * x.element_size() // 4096, 4), 16)
        _layer_norm_fwd[(M,)](
            x, w, b, y, mean, rstd, eps, N, BLOCK=block, num_warps=warps
        )
        ctx.save_for_backward(x, w, mean, rstd)
        ctx.plan = plan(M, block)
        ctx.dtype = x.dtype if w is None else w.dtype
        if b is not None:
            ctx.dtype = torch.promote_types(ctx.dtype, b.dtype)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        x, w, mean, rstd = ctx.saved_tensors
        dy, dx = dy.contiguous(), torch.empty_like(x)
        sums, _ = stage_1(dy, x, w, mean, rstd, dx, ctx.plan)
        out = dx.new_empty((2, x.shape[1]), dtype=ctx.dtype)
        _layer_norm_bwd_add_up[(triton.cdiv(out.numel(), 16),)](
            sums, out, len(sums), out.numel(), ROWS=128, COLS=16
        )
        found = zip((dx, *out), ctx.needs_input_grad, strict=False)
        return *(t if wanted else None for t, wanted in found), None, None


# %%
# ``plan`` is ours; the other arguments are those of PyTorch's function.


def layer_norm(
    x, normalized_shape, weight=None, bias=None, eps=1e-5, *, plan=lock_once
):
    """Normalize rows of up to 16384 columns; weight and bias may be None."""
    if isinstance(normalized_shape, int):
        normalized_shape = (normalized_shape,)
    shape = torch.Size(normalized_shape)
    for name, t in {"x": x, "weight": weight, "bias": bias}.items():
        if t is None:
            continue
        if not t.is_floating_point():
            raise TypeError(f"{name} has {t.dtype}, which is no float")
        if t.device.type != DEVICE.type or t.device != x.device:
            raise ValueError(f"{name} is on {t.device}, not on {DEVICE}")
        if (t.shape[-len(shape) :] if t is x else t.shape) != shape:
            raise ValueError(f"{name}: {t.shape} does not fit {shape}")
    if not 0 < shape.numel() <= 16384:
        raise ValueError(
            f"normalized_shape has {shape.numel()} columns: this page takes "
            "1 to 16384; page 11, every width, takes all"
        )
    w, b = (None if t is None else t.reshape(-1) for t in (weight, bias))
    rows = x.reshape(-1, shape.numel())
    return LayerNorm.apply(rows, w, b, eps, plan).reshape(x.shape)


# %%

# Scaffold: inputs, and a check against float64.


def inputs(M, N, dtype):
    """x, w, b and dy; the mean of x is far from 0."""
    torch.manual_seed(0)
    x = -2.3 + 0.5 * torch.randn(M, N, device=DEVICE)
    w, b = torch.rand(2, N, device=DEVICE)
    dy = 0.1 * torch.randn(M, N, device=DEVICE)
    return *(t.to(dtype).requires_grad_() for t in (x, w, b)), dy.to(dtype)


def check(function, M, N, dtype):
    """Compare y, dx, dw and db with those of PyTorch in float64."""
    given, results = inputs(M, N, dtype), []
    exact = [t.detach().double().requires_grad_() for t in given]
    for f, (x, w, b, dy) in (function, given), (F.layer_norm, exact):
        y = f(x, (N,), w, b)
        results.append((y, *torch.autograd.grad(y, (x, w, b), dy)))
    # 16 bits: one rounding of a result. float32: the sums round as well.
    limit = torch.finfo(dtype).eps * (8 if dtype == torch.float32 else 0.5)
    for name, got, want in zip(("y", "dx", "dw", "db"), *results, strict=True):
        error = ((got - want).norm() / want.norm()).item()
        assert error <= limit, f"{name}: {error:.1e} is above {limit:.1e}"
    print(f"{M} x {N}, {dtype}: errors below {limit:.1e}")


# %%
# All plans give the right gradients:

M, N = (1151, 8192) if ON_GPU else (9, 200)
for plan in PLANS.values():
    check(functools.partial(layer_norm, plan=plan), M, N, torch.float16)

# %%
# The lock, measured
# ------------------

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
    """Draw a benchmark; print how many times as fast as others we are."""
    table = benchmark.run(show_plots=ON_GPU, return_df=True).set_index("N")
    table.columns = [name.split(" (")[0] for name in table.columns]
    if table.isna().all(axis=None):
        return print("Timing needs a GPU; the page shows recorded figures.")
    ratio = table.rdiv(table.iloc[:, 0], axis=0).iloc[:, 1:]
    print(f"speed of {table.columns[0]} divided by that of")
    print(ratio.agg(["min", "median", "max"]).round(2).to_string())


# %%
# Beside the plans stand PyTorch, ``torch.compile``, and the addition of two
# matrices, which moves three and does nothing else.


OURS = {
    "triton": "Triton",
    "own": "own buffers",
    "few": "few buffers",
    "each row": "lock each row",
}
PEERS = {"torch": "PyTorch", "torch.compile": "torch.compile", "copy": "Copy"}


def compiled_by_torch():
    """PyTorch's layer norm, compiled for one shape."""
    from torch._functorch import config

    config.donated_buffer = False  # the backward pass runs many times
    torch._dynamo.reset()  # nothing is left of other shapes
    return torch.compile(lambda *args: F.layer_norm(*args), dynamic=False)


# %%
# Gradients are asked for with ``torch.autograd.grad``, so that nothing is
# accumulated.


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=[512 * i for i in (2, 3, 4, 6, 8, 9, 12, 16, 17, 20, 31)],
        line_arg="provider",
        line_vals=list(OURS | PEERS),
        line_names=list((OURS | PEERS).values()),
        ylabel="GB/s",
        plot_name="layer-norm-lock-backward",
        args={"M": 4096, "dtype": torch.float16, "mode": "backward"},
    )
)
def backward_speed(M, N, dtype, mode, provider):
    """Device time of a CUDA graph, replayed with an overwritten L2 cache;
    median, 20 % and 80 % quantiles."""
    if not ON_GPU:
        return 3 * [float("nan")]  # the interpreter cannot be timed
    x, w, b, dy = inputs(M, N, dtype)
    if provider == "copy":
        dx = torch.empty_like(dy)
        fn = lambda: torch.add(x.detach(), dy, out=dx)
    else:
        f = F.layer_norm
        if provider == "torch.compile":
            f = compiled_by_torch()
        if provider in PLANS:
            f = functools.partial(layer_norm, plan=PLANS[provider])
        y = f(x, (N,), w, b, 1e-5)
        fn = lambda: torch.autograd.grad(y, (x, w, b), dy, retain_graph=True)
    return speed(3 * x.nbytes, fn)


report(backward_speed)

# %%
# "Triton" takes the lock once a program and has 128 buffers, "few buffers"
# has 8, and "own buffers" is the same kernel without locks.
# Where the ratio to own buffers is below 1, the lock loses: it saves no bytes,
# and programs wait.
# With few buffers they queue up at the end of their work.
# "lock each row" pays for its traffic in L2 as well.
#
# So a lock pays where memory does not suffice for a buffer each: where there
# are many programs, or where each adds up much more than two rows.
# For layer normalization it does not.
# It also has a price that no clock shows: programs come to a lock in any
# order, a sum of floating point numbers depends on its order, and so the last
# bits of ``dw`` and ``db`` differ from run to run.
# The forward pass sums nothing over rows and needs no lock: it is that of page
# 01, measured there.
#
# Exercise
# --------
#
# **Exercise 1: one launch, no lock.**
# The last program to finish could do stage 2 itself; but which one is last?
# Here ``out`` shall be the sum of ``dy * dy`` over the rows.
# The stub stops when each program has stored its row to its buffer.
# Let the programs count themselves with ``tl.atomic_add``, and let the last
# one sum the buffers.
#
# **Hint.** The count is a release and an acquire in one: ``sem="acq_rel"``.
# And what must stand before it?


@triton.jit
def _one_launch(
    dy_ptr, buffers_ptr, count_ptr, out_ptr,
    N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program, cols = tl.program_id(0), tl.arange(0, BLOCK)
    row = tl.load(dy_ptr + program * N + cols, mask=cols < N, other=0)
    tl.store(buffers_ptr + program * N + cols, row * row, mask=cols < N)
    # to do: count; the last program sums the buffers


def exercise_1(kernel):
    dy = inputs(10, 24, torch.float32)[3]
    buffers, out = torch.empty_like(dy), torch.empty_like(dy[0])
    count = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    kernel[(10,)](dy, buffers, count, out.fill_(-1), N=24, BLOCK=32)
    wrong = ~torch.isclose(out, (dy * dy).sum(0))
    print("wrong columns:", wrong.nonzero().flatten().tolist())
    return not wrong.any()


exercise_1(_one_launch)

# %%

# Solution 1


@triton.jit
def _one_launch_1(
    dy_ptr, buffers_ptr, count_ptr, out_ptr,
    N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program, cols = tl.program_id(0), tl.arange(0, BLOCK)
    row = tl.load(dy_ptr + program * N + cols, mask=cols < N, other=0)
    tl.store(buffers_ptr + program * N + cols, row * row, mask=cols < N)
    tl.debug_barrier()  # all threads have stored, then one of them counts
    before = tl.atomic_add(count_ptr, 1, sem="acq_rel")
    if before == tl.num_programs(0) - 1:
        total = tl.zeros((BLOCK,), tl.float32)
        for buffer in range(tl.num_programs(0)):
            at = buffers_ptr + buffer * N + cols
            total += tl.load(at, mask=cols < N, other=0)
        tl.store(out_ptr + cols, total, mask=cols < N)


assert exercise_1(_one_launch_1)

# %%
# Whoever is last, the buffers are summed in one order: the same bits in every
# run.
#
# References
# ----------
#
# `Triton's tutorial on layer normalization
# <https://triton-lang.org/main/getting-started/tutorials/05-layer-norm.html>`_
# and `the change that gave it its barrier
# <https://github.com/triton-lang/triton/pull/6307>`_;
# `a report of the missing barrier in the wild
# <https://github.com/meta-pytorch/tritonbench/issues/1266>`_;
# `the memory model of PTX
# <https://docs.nvidia.com/cuda/parallel-thread-execution/>`_.
