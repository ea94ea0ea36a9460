r"""
Host time: what the user waits for
==================================

Why does a call of layer norm take longer than its kernels, and what helps?
Python prepares every launch, and the GPU is often done first: remember what
calls have in common, and launch compiled kernels directly.

The other pages of this site make kernels faster. This one leaves the kernels
as they are. We take one call apart, microsecond by microsecond, and find that
its kernels are only a small part. Then we change three things, one after the
other, measure what each of them saves, and write down what it costs: each of
them trades some safety for time.

**What you will learn**

- What happens between the line that calls a function and the kernel on the
  GPU, and how long each part takes.
- Why the usual clock does not see this time, and how to measure it.
- How to remember what calls have in common, and how to launch a kernel that
  Triton has compiled before.
- What PyTorch itself offers: CUDA graphs, and ``torch.compile`` with
  ``mode="reduce-overhead"``.
- What can go wrong with each of them: other addresses, streams, GPUs, and
  versions of Triton.

**What you need:** `Layer normalization, both passes <01-layer-norm.html>`_,
above all its kernels and its autograd function. You don't need a GPU to run
the page, but only a GPU has times to show.
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

import contextlib
import functools
import time
from unittest import mock

# %%
# Who waits for whom?
# -------------------
#
# The *host* is the computer with its CPU and Python. The *device* is the GPU.
# A launch puts a kernel into a queue, a *stream*, and the host continues at
# once: it does not wait for the kernel. The device takes one kernel after the
# other from the queue.
#
# So both work at the same time. If you call a function again and again, who
# decides how long that takes?
# Here is a host that needs 10 µs for each call, with two devices: one needs 4
# µs for the kernel of a call, the other one needs 40.


def done_after(host, device, calls=4):
    """µs after which the device is done with each of some calls."""
    free = 0
    times = []
    for call in range(1, calls + 1):
        queued = call * host  # the host is never kept waiting
        free = max(queued, free) + device
        times.append(free)
    return times


print("narrow rows:", done_after(host=10, device=4))
print("wide rows:  ", done_after(host=10, device=40))

# %%

# Drawing: host and device, with narrow and with wide rows.

plt.figure(
    "Four calls of 10 µs on the host. With kernels of 4 µs the device waits "
    "for the host after each of them. With kernels of 40 µs it never waits, "
    "and the host is done long before",
    figsize=(7.5, 2.6),
)
for top, device in ((4, 4), (1, 40)):
    free = 0
    for call in range(4):
        start = max(10 * (call + 1), free)
        free = start + device
        color = f"C{call}"
        plt.barh(top, 10, left=10 * call, color=color, ec="k", alpha=0.6)
        plt.barh(top - 1, device, left=start, color=color, ec="k", alpha=0.6)
plt.text(80, 3.5, "narrow rows", va="center")
plt.text(80, 1, "wide rows", va="center")
plt.yticks((4, 3, 1, 0), 2 * ["host", "device"])
plt.xlabel("µs")
plt.grid(visible=False)
plt.show()

# %%
# In the first line each further call takes 10 µs, the time of the host. In the
# second it takes 40 µs, the time of the device. A faster kernel helps only in
# the second case, and less Python helps only in the first.
# Whoever is slower decides, and the other one waits.
#
# Which of the two is a layer norm? That depends on the size of the matrix, and
# on what the host does in a call. Let's look at the host.
#
# Forward: the kernel
# -------------------
#
# It is the kernel of `Layer normalization, both passes <01-layer-norm.html>`_
# with one change: mean and rstd of a row go into a single tensor, ``stats``.
# The reason is on the host, where each tensor costs time.


@triton.jit
def _layer_norm_fwd(
    x_ptr,  # (M, N), contiguous
    w_ptr,  # (N,); None counts as 1
    b_ptr,  # (N,); None counts as 0
    y_ptr,  # (M, N)
    stats_ptr,  # New: (M, 2), mean and rstd of each row
    eps: tl.constexpr,  # added to the variance
    N: tl.constexpr,  # columns
    BLOCK: tl.constexpr,  # tile width: a power of two, at least N
):
    row = tl.program_id(0).to(tl.int64)  # M * N may pass 2**31
    cols = tl.arange(0, BLOCK)
    mask = cols < N
    acc = stats_ptr.dtype.element_ty  # float32; float64 for float64

    # Load a row, and keep it in registers.
    x = tl.load(x_ptr + row * N + cols, mask=mask, other=0).to(acc)

    # Mean and variance. Masked lanes are set to 0 once more, because they
    # would add mean * mean to the variance.
    mean = tl.sum(x) / N
    x = tl.where(mask, x - mean, 0)
    rstd = 1 / tl.sqrt(tl.sum(x * x) / N + eps)

    # Both are needed in the backward pass.
    tl.store(stats_ptr + 2 * row, mean)
    tl.store(stats_ptr + 2 * row + 1, rstd)

    # Scale and shift, if there are w and b.
    y = x * rstd
    if w_ptr is not None:
        y *= tl.load(w_ptr + cols, mask=mask).to(acc)
    if b_ptr is not None:
        y += tl.load(b_ptr + cols, mask=mask).to(acc)
    tl.store(y_ptr + row * N + cols, y, mask=mask)


# %%
# Here it runs on two rows of four columns:

x = torch.tensor([[1.0, 2, 3, 6], [2, 2, 4, 4]], device=DEVICE)
y = torch.empty_like(x)
stats = torch.empty(2, 2, device=DEVICE)
_layer_norm_fwd[(2,)](
    x_ptr=x,
    w_ptr=None,
    b_ptr=None,
    y_ptr=y,
    stats_ptr=stats,
    eps=1e-5,
    N=4,
    BLOCK=4,
)
print("y:", y.cpu().numpy().round(2), sep="\n")
torch.testing.assert_close(y, F.layer_norm(x, (4,)))

# %%
# What a call is made of
# ----------------------
#
# To measure a host is simple: look at the clock, make some calls, wait until
# the device is done with all of them, and look again.
#
# But a host is noisy. The operating system has other work to do, so a call
# takes longer now and then. It never takes less than it must. Three things
# help:
#
# - All calls that we compare take turns, with batches of 20, or of 10 where
#   they are long. What slows the whole machine down for a while slows all of
#   them down.
# - Of 16 turns, the fastest batch counts. That is a round, and there are 9.
# - We compare within a round: a call's time is divided by that of PyTorch's
#   layer norm in the same round. The median of these ratios, times PyTorch's
#   own median, is what a figure shows.

# %%

# Scaffold: a clock of the host.


def in_rounds(batches):
    """Median, 20% and 80% quantiles of what some functions return.

    Each makes a batch of calls and returns a list of times in µs. The first
    one makes calls of PyTorch's layer norm, and returns one time.
    """
    rounds = []
    for _ in range(9):
        turns = []
        for _ in range(16):
            turn = []
            for batch in batches:
                turn += batch()
            turns.append(turn)
        fastest = torch.tensor(turns, dtype=torch.double).min(dim=0).values
        rounds.append(fastest)
    rounds = torch.stack(rounds)
    pytorch = rounds[:, :1].clone()
    rounds[:, 1:] *= pytorch.median() / pytorch
    quantiles = rounds.quantile(rounds.new_tensor([0.5, 0.2, 0.8]), dim=0)
    return [tuple(times) for times in quantiles.T.tolist()]


def batch_of(call, repeats):
    """A function that makes a batch of calls and returns µs of one."""

    def batch():
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        torch.cuda.synchronize()
        return [1e6 * (time.perf_counter() - start) / repeats]

    return batch


def in_turns(calls, repeats=20):
    """µs of each call on the host: median, 20% and 80% quantiles.

    The first call is PyTorch's layer norm.
    """
    for call in calls.values():
        for _ in range(3):  # compiles, and records graphs
            call()
    batches = [batch_of(call, repeats) for call in calls.values()]
    return dict(zip(calls, in_rounds(batches), strict=True))


# %%
# How long do the parts of a forward pass take, each by itself?
# We take 16 rows of 1024 columns. That is so little that the device is always
# done first, and the clock shows the host alone.
#
# - **A tensor.** Allocating the result, with ``torch.empty`` and with
#   ``torch.empty_like``. No memory is requested from the GPU: PyTorch keeps
#   what was freed, and hands it out again.
# - **A launch**, and a launch of a grid of no programs. Triton does all of its
#   work for the second one, too. Only at the very end it does not call the
#   *driver*, the library that talks to the GPU. The difference is the driver.
# - **An autograd function** that does nothing but return what it was given.
#   This is what PyTorch needs to call a function of ours, and to remember that
#   there is a backward pass.
# - **PyTorch's layer norm**, the whole forward pass.


class Nothing(torch.autograd.Function):
    """An autograd function that does nothing in either pass."""

    @staticmethod
    def forward(ctx, x, w, b):
        ctx.save_for_backward(x, w, b)
        return x

    @staticmethod
    def backward(ctx, dy):
        x, w, b = ctx.saved_tensors
        return x, w, b


def parts_of_a_call(M, N, dtype):
    """What a forward pass needs: {name: call}."""
    w = torch.ones(N, dtype=dtype, device=DEVICE, requires_grad=True)
    x = w.detach().expand(M, N).contiguous()
    y = torch.empty_like(x)
    stats = torch.empty(M, 2, device=DEVICE)

    def launch(programs):
        _layer_norm_fwd[(programs,)](
            x_ptr=x,
            w_ptr=w,
            b_ptr=w,
            y_ptr=y,
            stats_ptr=stats,
            eps=1e-5,
            N=N,
            BLOCK=triton.next_power_of_2(N),
            num_warps=4,
        )

    return {
        "torch": lambda: F.layer_norm(x, (N,), w, w),
        "empty": lambda: torch.empty(M, N, dtype=dtype, device=DEVICE),
        "empty_like": lambda: torch.empty_like(x),
        "no programs": lambda: launch(0),
        "a launch": lambda: launch(M),
        "nothing": lambda: Nothing.apply(x, w, w),
    }


# %%

# Scaffold: the parts of a forward pass, a benchmark.


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=[1024],
        line_arg="provider",
        line_vals=[
            "empty",
            "empty_like",
            "no programs",
            "a launch",
            "nothing",
            "torch",
        ],
        line_names=[
            "torch.empty",
            "torch.empty_like",
            "Launch of no programs",
            "Launch",
            "Autograd function",
            "PyTorch's forward pass",
        ],
        ylabel="µs",
        plot_name="layer-norm-host-parts",
        args={"M": 16, "dtype": torch.float16, "mode": "forward"},
    )
)
def bench_parts(M, N, dtype, mode, provider):
    """Calls on the host, all in turns: in each of 9 rounds the fastest of
    16 batches of 20, with L2 as they leave it. Median of PyTorch; another
    line's is that times its ratio to PyTorch in the same round, median, 20%
    and 80% quantiles."""
    if not ON_GPU:
        return 3 * [float("nan")]  # the interpreter cannot be timed
    return times_of_parts(M, N, dtype)[provider]


@functools.cache  # all calls in turns; then each line asks for its own
def times_of_parts(M, N, dtype):
    return in_turns(parts_of_a_call(M, N, dtype))


# %%

parts = bench_parts.run(return_df=True)
plt.close()  # one size makes no lines: we draw bars instead

# %%

# Drawing: the parts of a forward pass.

plt.figure("What the parts of a forward pass take on the host", (7.5, 3))
names = [name.split(" (")[0] for name in parts.columns[1:]]
plt.barh(names[::-1], parts.iloc[0, 1:].astype(float)[::-1])
plt.xlabel("µs")
plt.show()

# %%
# **What the figure shows.**
# On the H200 PyTorch's whole forward pass takes 13.3 µs. A single launch of
# ours takes 17.6 µs, which is longer than that. Before a function of ours can
# even begin, autograd takes 9.3 µs to call it. A tensor takes 2.7 µs with
# ``torch.empty`` and 2.2 µs with ``torch.empty_like``.
#
# **Why.**
# PyTorch's layer norm is C++ from the moment at which it is called. It
# allocates tensors, launches a kernel and notes a backward pass, as we do, but
# none of that is Python. Of our launch, the part without the driver takes 14.7
# µs. So the driver, which PyTorch needs as well, takes only about 3 µs.
#
# **What follows.**
# A launch is expensive because of what Triton does before it, most of it in
# Python, and not because of the GPU. So there is something to gain. But
# autograd's part is a floor for any function of ours in Python.
#
# We need a whole call now, with both passes, to see what else is in it.
#
# Backward: the kernels
# ---------------------
#
# As before, a program loops over rows and keeps its sums of ``dw`` and ``db``
# in registers. At the end it stores them in a buffer of its own.


@triton.jit
def _layer_norm_bwd(
    dy_ptr,  # (M, N), contiguous
    x_ptr,  # (M, N), contiguous
    w_ptr,  # (N,); None counts as 1
    stats_ptr,  # (M, 2), from the forward pass
    dx_ptr,  # (M, N), or None if dx is not wanted
    sums_ptr,  # (programs, 2, N), or None if neither dw nor db is wanted
    M,  # rows
    N: tl.constexpr,  # columns
    BLOCK: tl.constexpr,  # tile width: a power of two, at least N
):
    cols = tl.arange(0, BLOCK)
    mask = cols < N
    acc = stats_ptr.dtype.element_ty

    # The sums over our rows stay in registers from the first row to the last.
    dw = tl.zeros((BLOCK,), acc)
    db = tl.zeros((BLOCK,), acc)

    for row in range(tl.program_id(0), M, tl.num_programs(0)):
        # Load a row of x and of dy, and compute x_hat once more.
        at = tl.cast(row, tl.int64) * N + cols  # M * N may pass 2**31
        x = tl.load(x_ptr + at, mask=mask, other=0).to(acc)
        dy = tl.load(dy_ptr + at, mask=mask, other=0).to(acc)
        mean = tl.load(stats_ptr + 2 * row)
        rstd = tl.load(stats_ptr + 2 * row + 1)
        x_hat = (x - mean) * rstd

        # This row's terms of dw and db. Masked elements of dy are 0.
        dw += dy * x_hat
        db += dy

        if dx_ptr is not None:
            wdy = dy
            if w_ptr is not None:
                wdy *= tl.load(w_ptr + cols, mask=mask, other=0).to(acc)
            c1 = tl.sum(x_hat * wdy) / N
            c2 = tl.sum(wdy) / N
            dx = (wdy - x_hat * c1 - c2) * rstd
            tl.store(dx_ptr + at, dx, mask=mask)

    # Store both sums in the buffer of this program: dw first, then db.
    if sums_ptr is not None:
        sums_ptr += tl.program_id(0) * 2 * N + cols
        tl.store(sums_ptr, dw, mask=mask)
        tl.store(sums_ptr + N, db, mask=mask)


# %%
# The second kernel adds up the buffers. It stores ``dw`` and ``db`` in tensors
# of their own, so that the host need not cut one tensor in two.


@triton.jit
def _layer_norm_bwd_add_up(
    sums_ptr,  # (programs, 2, N)
    dw_ptr,  # (N,), or None if dw is not wanted
    db_ptr,  # (N,), or None if db is not wanted
    programs,  # how many buffers there are
    N: tl.constexpr,  # columns
    ROWS: tl.constexpr,  # buffers loaded at a time
    COLS: tl.constexpr,  # columns per program
):
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    acc = sums_ptr.dtype.element_ty

    # Each element of the tile has sums of its own.
    dw = tl.zeros((ROWS, COLS), acc)
    db = tl.zeros((ROWS, COLS), acc)
    for first in range(0, programs, ROWS):
        rows = first + tl.arange(0, ROWS)[:, None]
        mask = (rows < programs) & (cols < N)
        at = 2 * rows * N + cols
        dw += tl.load(sums_ptr + at, mask=mask, other=0)
        db += tl.load(sums_ptr + at + N, mask=mask, other=0)

    # Add up the rows of the tile, and round to the types of dw and db.
    if dw_ptr is not None:
        tl.store(dw_ptr + cols, tl.sum(dw, axis=0), mask=cols < N)
    if db_ptr is not None:
        tl.store(db_ptr + cols, tl.sum(db, axis=0), mask=cols < N)


# %%
# A plain function
# ----------------
#
# What does a call need beside its tensors? We call this its *plan*: how many
# programs to launch, how wide a tile is, how many warps a program has, and
# which tensors to allocate.
#
# A plan can launch in several ways. A *launcher* is a function that takes a
# kernel, the number of programs, the arguments that follow the tensors, and
# the number of warps. It returns the launch as a function of the tensors
# alone. The plain launcher leaves everything to Triton's just-in-time
# compiler, in short JIT:


def jit(kernel, programs, numbers, num_warps):
    """A launch by Triton's just-in-time compiler, as a function of tensors."""

    def launch(*tensors):
        return kernel[(programs,)](*tensors, *numbers, num_warps=num_warps)

    return launch


LAUNCHERS = {"jit": jit}  # two more are to come

# %%
# The numbers in the plan are those of `Layer normalization, both passes
# <01-layer-norm.html>`_: narrow rows have few warps, and in the backward pass
# as many programs share an SM as have room for their registers.

GPU = torch.cuda.get_device_properties(DEVICE) if ON_GPU else None
NUM_SMS = GPU.multi_processor_count if ON_GPU else 132
MAX_COLUMNS = 16384  # wider rows do not fit into registers


def programs_on_an_sm(N):
    """How many programs of the backward pass share an SM."""
    if N <= 1024:
        return 6
    if N <= 2048:
        return 4
    if N <= 4096:
        return 3
    if N < 8192:
        return 2
    return 1


class Plan:
    """What a call needs beside its tensors."""

    def __init__(self, shape, x, weight, bias, eps, launcher):
        self.launcher = LAUNCHERS[launcher]
        self.N = shape.numel()
        self.M = x.numel() // self.N
        self.block = triton.next_power_of_2(self.N)
        self.programs = min(self.M, NUM_SMS * programs_on_an_sm(self.N))

        # Patterns for torch.empty_like. They hold a single number each:
        # expand() gives it a shape, and takes no memory.
        acc_dtype = torch.promote_types(x.dtype, torch.float32)
        number = x.new_empty((), dtype=acc_dtype)
        self.stats = number.expand(self.M, 2)
        self.sums = number.expand(self.programs, 2, self.N)
        self.db = None
        if bias is not None:
            self.db = bias.new_empty(()).expand(shape)

        # 4096 bytes of a row for each warp, but from 4 to 16 warps.
        warps = self.block * x.element_size() // 4096
        self.forward = self.launcher(
            _layer_norm_fwd,
            programs=self.M,
            numbers=(eps, self.N, self.block),
            num_warps=min(max(warps, 4), 16),
        )
        self.backward_launches = {}

    def backward(self, wanted):
        """Both launches of the backward pass; wanted: which of dx, dw, db.

        They are made once for each choice, because which tensors are None is
        a part of a compiled kernel.
        """
        if wanted not in self.backward_launches:
            first = self.launcher(
                _layer_norm_bwd,
                programs=self.programs,
                numbers=(self.M, self.N, self.block),
                num_warps=4 if self.N < 8192 else 16,
            )
            columns_per_program = 16
            second = self.launcher(
                _layer_norm_bwd_add_up,
                programs=triton.cdiv(self.N, columns_per_program),
                numbers=(self.programs, self.N, 64, columns_per_program),
                num_warps=4,
            )
            self.backward_launches[wanted] = first, second
        return self.backward_launches[wanted]


# %%
# With a plan, both passes are short. They allocate with ``torch.empty_like``,
# which takes a little less time than ``torch.empty``, as we have seen. That is
# what the patterns in the plan are for.
# Kernels trust their arguments, so we make all tensors contiguous. For one
# that is contiguous already, this does not copy anything.


def gradients(ctx, dy):
    """dx, dw and db, and None for the plan."""
    x, w, stats = ctx.saved_tensors
    plan = ctx.plan
    wanted = ctx.needs_input_grad[:3]
    wants_dx, wants_dw, wants_db = wanted
    launch, add_up = plan.backward(wanted)

    # A gradient that nobody wants is None, and its code is not compiled.
    dx = torch.empty_like(x) if wants_dx else None
    dw = torch.empty_like(w) if wants_dw else None
    db = torch.empty_like(plan.db) if wants_db else None
    sums = None
    if wants_dw or wants_db:
        sums = torch.empty_like(plan.sums)
    launch(dy.contiguous(), x, w, stats, dx, sums)
    if sums is not None:
        add_up(sums, dw, db)
    return dx, dw, db, None


class LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, b, plan):
        x = x.contiguous()
        if w is not None:
            w = w.contiguous()
        if b is not None:
            b = b.contiguous()
        y = torch.empty_like(x)
        stats = torch.empty_like(plan.stats)
        plan.forward(x, w, b, y, stats)
        ctx.save_for_backward(x, w, stats)
        ctx.plan = plan
        return y

    @staticmethod
    def backward(ctx, dy):
        # Second derivatives are refused. The decorator that does so takes a
        # while, so we use it only where somebody may ask for one.
        if torch.is_grad_enabled():
            refusing = torch.autograd.function.once_differentiable(gradients)
            return refusing(ctx, dy)
        return gradients(ctx, dy)


# %%

# Scaffold: the arguments of layer norm are checked.


def check_arguments(x, shape, weight, bias, eps):
    """Raise an error that names the wrong argument, and says why."""
    tensors = {"x": x, "weight": weight, "bias": bias}
    tensors = {name: t for name, t in tensors.items() if t is not None}

    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or tensor.itemsize == 1:
            raise TypeError(
                f"{name} is {tensor.dtype}: it must have floats of 16 bits or "
                "more"
            )
        if tensor.device != x.device or tensor.device.type != DEVICE.type:
            raise ValueError(
                f"{name} is on {tensor.device}: x, weight and bias must all "
                f"be on {DEVICE}"
            )
    # Triton starts a kernel on the current GPU, wherever its tensors are.
    if x.is_cuda and x.device.index != torch.cuda.current_device():
        raise ValueError(f"x is on {x.device}: not the current one")

    if shape.numel() == 0 or len(shape) == 0:
        raise ValueError(f"normalized_shape is {tuple(shape)}: it is empty")
    for name, tensor in tensors.items():
        last_dimensions = tensor.shape
        if name == "x":
            last_dimensions = tensor.shape[-len(shape) :]
        if last_dimensions != shape:
            raise ValueError(
                f"the shape of {name} is {tuple(tensor.shape)}, and "
                f"normalized_shape is {tuple(shape)}"
            )
    if not eps >= 0:  # negative, or NaN
        raise ValueError(f"eps is {eps}: it must be 0 or more")

    trains = any(tensor.requires_grad for tensor in tensors.values())
    if trains and torch.is_grad_enabled() and shape.numel() > MAX_COLUMNS:
        raise ValueError(
            f"normalized_shape has {shape.numel()} columns; with gradients, "
            f"at most {MAX_COLUMNS} are possible (the page Every width has no "
            "limit)"
        )


# %%
# The plain function checks its arguments and makes a plan, in each call.


def make_plan(shape, x, weight, bias, eps, launcher):
    """Check the arguments of a call, and make its plan."""
    check_arguments(x, shape, weight, bias, eps)
    if shape.numel() > MAX_COLUMNS:
        raise ValueError(
            f"normalized_shape has {shape.numel()} columns: 1 to "
            f"{MAX_COLUMNS} are taken (the page Every width has no limit)"
        )
    return Plan(shape, x, weight, bias, eps, launcher)


def plain(x, normalized_shape, weight=None, bias=None, eps=1e-5):
    """Normalize x over its last dimensions, at most 16384 numbers.

    The arguments are those of PyTorch's function.
    """
    if isinstance(normalized_shape, int):
        normalized_shape = [normalized_shape]
    shape = torch.Size(normalized_shape)
    plan = make_plan(shape, x, weight, bias, eps, "jit")
    return LayerNorm.apply(x, weight, bias, plan)


# %%
# Is it right? We compare each element with PyTorch's layer norm in float64.

# %%

# Scaffold: inputs.


def inputs(M, N, dtype):
    """x, w, b and dy. The mean of x is far from 0, as it may be in a model."""
    torch.manual_seed(0)
    x = -2.3 + 0.5 * torch.randn(M, N, device=DEVICE)
    w = torch.rand(N, device=DEVICE)
    b = torch.rand(N, device=DEVICE)
    dy = 0.1 * torch.randn(M, N, device=DEVICE)
    x = x.to(dtype).requires_grad_()
    w = w.to(dtype).requires_grad_()
    b = b.to(dtype).requires_grad_()
    return x, w, b, dy.to(dtype)


# %%

# Scaffold: a check of each element against float64.


def both_passes(function, x, w, b, dy):
    """y, dx, dw and db by name."""
    y = function(x, (x.shape[1],), w, b)
    dx, dw, db = torch.autograd.grad(y, (x, w, b), dy)
    return {"y": y, "dx": dx, "dw": dw, "db": db}


def in_float64(tensor):
    """The same numbers in float64, as a new input for autograd."""
    return tensor.detach().double().requires_grad_()


def check(function, M, N, dtype):
    """Compare each element of y, dx, dw and db with PyTorch's in float64."""
    arguments = inputs(M, N, dtype)
    ours = both_passes(function, *arguments)
    wide = [in_float64(tensor) for tensor in arguments]
    exact = both_passes(F.layer_norm, *wide)
    for name in ours:
        error = (ours[name] - exact[name]).abs()
        rounding = exact[name].abs() * torch.finfo(dtype).eps / 2
        typical_size = exact[name].square().mean().sqrt()
        sums = 64 * torch.finfo(torch.float32).eps * typical_size
        worst = (error / (rounding + sums)).max().item()
        assert worst <= 1, f"{name}: {worst:.1f} times the allowed error"
    print(f"{M} x {N}, {dtype}: each element of y, dx, dw and db is right")


# %%

shape = (9, 200)  # small, because the interpreter is slow
if ON_GPU:
    shape = (1151, 8192)
check(plain, *shape, torch.float16)

# %%
# Where does the time of a call go?
# ---------------------------------
#
# We let the call tell us. For a while, some functions are replaced by ones
# that do the same and also note how long they took: the one that makes a
# plan, ``torch.empty_like``, and the launches. To look at the clock takes a
# fraction of a microsecond each time.

PLANS = {}  # will hold plans that are remembered
NOTED = {"plan": [], "tensors": [], "launches": []}  # seconds


def timed(part, function):
    """The same function, which also notes how long it took."""

    def timed_function(*args, **kwargs):
        start = time.perf_counter()
        result = function(*args, **kwargs)
        NOTED[part].append(time.perf_counter() - start)
        return result

    return timed_function


def timed_launcher(launcher):
    """The same launcher, whose launches also note how long they took."""

    def timed_version(*args, **kwargs):
        return timed("launches", launcher(*args, **kwargs))

    return timed_version


@contextlib.contextmanager
def parts_noted(planner):
    """For a while, parts of calls note how long they take.

    planner is the name of the function from which they get their plan.
    """
    ours = {planner: timed("plan", globals()[planner])}
    empty_like = timed("tensors", torch.empty_like)
    launchers = {name: timed_launcher(LAUNCHERS[name]) for name in LAUNCHERS}
    with (
        mock.patch.dict(globals(), ours),
        mock.patch.object(torch, "empty_like", empty_like),
        mock.patch.dict(LAUNCHERS, launchers),
    ):
        yield


# %%
# The rest of a pass is the work of autograd, with a few lines of our own
# between its calls.


def parts_of_a_pass(name, seconds):
    """{part: seconds} of a pass that took so long, from what was noted."""
    parts = {f"{name} {part}": sum(NOTED[part]) for part in NOTED}
    parts[f"{name} autograd"] = seconds - sum(parts.values())
    for noted in NOTED.values():
        noted.clear()
    return parts


def parts_of_both_passes(function, x, w, b, dy):
    """{pass and part: seconds} of one call and its backward pass."""
    start = time.perf_counter()
    y = function(x, (x.shape[1],), w, b)
    forward = parts_of_a_pass("forward", time.perf_counter() - start)
    start = time.perf_counter()
    torch.autograd.grad(y, (x, w, b), dy)
    backward = parts_of_a_pass("backward", time.perf_counter() - start)
    return forward | backward


# %%

# Scaffold: the parts of both passes, a benchmark.

PARTS = {
    "forward plan": "Forward: plan",
    "forward autograd": "Forward: autograd",
    "forward tensors": "Forward: tensors",
    "forward launches": "Forward: launch",
    "backward autograd": "Backward: autograd",
    "backward tensors": "Backward: tensors",
    "backward launches": "Backward: launches",
}


def times_of_both_passes(function, planner, M, N, dtype):
    """µs of each part: median, 20% and 80% quantiles."""
    x, w, b, dy = inputs(M, N, dtype)

    def pytorch():
        y = F.layer_norm(x, (N,), w, b)
        return torch.autograd.grad(y, (x, w, b), dy)

    def batch():
        """The mean of each part over 20 calls."""
        torch.cuda.synchronize()
        sums = dict.fromkeys(PARTS, 0.0)
        with parts_noted(planner):
            for _ in range(20):
                parts = parts_of_both_passes(function, x, w, b, dy)
                for part in PARTS:
                    sums[part] += parts[part]
        return [1e6 * sums[part] / 20 for part in PARTS]

    PLANS.clear()  # those that are remembered launch without taking notes
    batch()  # compiles
    _, *times = in_rounds([batch_of(pytorch, repeats=20), batch])
    PLANS.clear()
    return dict(zip(PARTS, times, strict=True))


def benchmark_of_parts(name):
    return triton.testing.Benchmark(
        x_names=["N"],
        x_vals=[1024],
        line_arg="provider",
        line_vals=list(PARTS),
        line_names=list(PARTS.values()),
        ylabel="µs",
        plot_name=name,
        args={
            "M": 16,
            "dtype": torch.float16,
            "mode": "forward and backward",
        },
    )


@functools.cache
def parts_of_plain_calls(M, N, dtype):
    return times_of_both_passes(plain, "make_plan", M, N, dtype)


@triton.testing.perf_report(benchmark_of_parts("layer-norm-host-plain"))
def bench_plain_parts(M, N, dtype, mode, provider):
    """Calls on the host: each part notes the time that it takes, and autograd
    is the rest of a pass. In each of 9 rounds, PyTorch's layer norm and ours
    take 16 turns with batches of 20, with L2 as they leave it, and each part
    has its smallest mean. It is multiplied by PyTorch's median over its time
    in the same round; median, 20% and 80% quantiles."""
    if not ON_GPU:
        return 3 * [float("nan")]
    return parts_of_plain_calls(M, N, dtype)[provider]


# %%

plain_parts = bench_plain_parts.run(return_df=True)
plt.close()

# %%

# Drawing: one call of the plain function, part by part.

plt.figure("One call of the plain function, part by part", (7.5, 2.6))
times = plain_parts.iloc[0, 1:].astype(float).tolist()
names = ("plan", "autograd", "tensors", "launches")
left = 0
for i in range(4):
    plt.barh(1, times[i], 0.6, left, color=f"C{i}", label=names[i])
    left += times[i]
left = 0
for i in range(4, 7):  # the backward pass makes no plan
    plt.barh(0, times[i], 0.6, left, color=f"C{i - 3}")
    left += times[i]
plt.yticks((0, 1), ("backward", "forward"))
plt.xlabel("µs")
plt.legend(ncols=4, loc="upper center", bbox_to_anchor=(0.5, 1.3))
plt.show()

# %%
# **What the figure shows.**
# On the H200 the bars are 231.5 µs long together: 93.3 µs forward and 138.2 µs
# backward. The plan takes 40 µs, the six tensors of both passes take 19 µs,
# and the three launches take 71 µs. Autograd takes 19 µs forward and 83 µs
# backward.
#
# **Why.**
# The plan is Python: it checks arguments, divides, and makes three patterns,
# for which it calls PyTorch five times.
# A launch by the JIT looks at each of its arguments: what is its type, and is
# its address a multiple of 16? The answers become a key, and under this key it
# finds the compiled kernel.
# Backward, autograd has more to do than forward. PyTorch runs a backward pass
# on a *thread* of its own, one for each GPU. The thread that called hands the
# work over and sleeps, and it has to be woken up at the end. Besides, our
# backward pass is Python, and only one thread at a time may run Python. So the
# right to do so has to change hands, too. PyTorch's own backward passes go
# through the same thread, without Python.
#
# A part takes longer here than by itself. In a loop that does nothing else, a
# launch finds its code and its data in the caches of the CPU. In a call, a lot
# of other code has run since the last launch. But the host itself may have
# been slower, too: we will see that it is not equally fast in all figures.
#
# **What follows.**
# Autograd is the largest part, but it belongs to PyTorch, so we leave it
# alone. The plan and the launches are ours.
#
# Three clocks, one call
# ----------------------
#
# Why has no page before this one shown these times?
#
# Because their clocks leave them out, on purpose. The usual clock of Triton,
# ``do_bench``, queues four things for each call: a kernel that overwrites the
# L2 cache, an event that notes the time, the call, and another event.

# %%

# Drawing: what host and device do in the clock of do_bench.

plt.figure(
    "do_bench: the host prepares the call while the device still overwrites "
    "L2. Only what is between two events counts",
    figsize=(7.5, 1.7),
)
for level, left, width, text in (
    (1, 0, 0.8, "queue"),
    (1, 0.8, 6.2, "prepare and queue the call"),
    (0, 0.4, 4.6, "overwrite L2"),
    (0, 7, 1.5, "kernels"),
):
    plt.barh(level, width, left=left, alpha=0.6)
    plt.text(left + width / 2, level, text, ha="center", va="center")
plt.vlines([5, 8.5], -0.5, 1.5, color="black")
plt.yticks([0, 1], ["device", "host"])
plt.xticks([])
plt.xlabel("time")
plt.show()

# %%
# The black lines are the events. What the host does while L2 is overwritten,
# left of the first line, is not counted.
#
# A *CUDA graph* is a recording of the kernels of a call. It is replayed with
# one launch, without Python and without PyTorch. So replays that follow each
# other take the time of the device.
#
# Here all three clocks look at the same thing: forward and backward pass of
# PyTorch's own layer norm, of 4096 rows.

# %%

# Scaffold: both passes as calls, and as a CUDA graph.


def prepare(function, M, N, dtype, mode):
    """A forward pass, or both passes, as a call without arguments."""
    x, w, b, dy = inputs(M, N, dtype)

    def forward():
        return function(x, (N,), w, b)

    def both():
        y = function(x, (N,), w, b)
        return torch.autograd.grad(y, (x, w, b), dy)

    return forward if mode == "forward" else both


def as_graph(call):
    """A call that replays what this one launches."""
    for _ in range(3):
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        results = call()

    def replay():
        graph.replay()
        # A graph knows addresses, and keeps nothing alive: neither what the
        # call reads nor what it returns.
        return call, results

    return replay


# %%

# Scaffold: three clocks, a benchmark.


def fastest_do_bench(call):
    """µs by do_bench in 9 rounds: median, 20% and 80% quantiles."""
    rounds = torch.empty(9)
    for i in range(9):
        # The smallest of ten medians, as for the other clocks.
        times = [
            triton.testing.do_bench(
                call, warmup=1, rep=5, return_mode="median"
            )
            for _ in range(10)
        ]
        rounds[i] = 1000 * min(times)
    return rounds.quantile(torch.tensor([0.5, 0.2, 0.8])).tolist()


@functools.cache
def times_of_clocks(M, N, dtype, mode):
    call = prepare(F.layer_norm, M, N, dtype, mode)
    calls = {"torch": call, "CUDA graph": as_graph(call)}
    times = in_turns(calls)
    times["do_bench"] = fastest_do_bench(call)
    return times


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=[1024, 2048, 4096, 8192, 15872],
        line_arg="provider",
        line_vals=["torch", "do_bench", "CUDA graph"],
        line_names=["In a row", "do_bench", "CUDA graph"],
        ylabel="µs",
        plot_name="layer-norm-host-clocks",
        args={
            "M": 4096,
            "dtype": torch.float16,
            "mode": "forward and backward",
        },
    )
)
def bench_clocks(M, N, dtype, mode, provider):
    """Calls of PyTorch's layer norm. In a row and CUDA graph: calls in turns,
    in each of 9 rounds the fastest of 16 batches of 20, with L2 as they
    leave it; the graph's time is its ratio to the calls in the same round.
    do_bench: the smallest of ten medians by its own events, after L2 was
    overwritten, in 9 rounds. Median, 20% and 80% quantiles."""
    if not ON_GPU:
        return 3 * [float("nan")]
    return times_of_clocks(M, N, dtype, mode)[provider]


# %%

# Scaffold: a report of host times.


def report_host_times(benchmark):
    """Draw a benchmark, and print each time divided by PyTorch's."""
    table = benchmark.run(show_plots=ON_GPU, return_df=True)
    table = table.set_index(table.columns[0])
    table.index = table.index.astype(int)
    table.columns = [column.split(" (")[0] for column in table.columns]
    if table.isna().all(axis=None):
        print("Timing needs a GPU; the page shows recorded figures.")
        return
    first = "PyTorch" if "PyTorch" in table else table.columns[0]
    print(f"time divided by that of {first}")
    ratio = table.div(table[first], axis="index")
    print(ratio.T.round(2).to_string())


# %%

report_host_times(bench_clocks)

# %%
# **What the figure shows.**
# On the H200, at 1024 columns, calls in a row take 124 µs each, and their
# kernels, in the graph, take 35.9 µs. ``do_bench`` says 82.1 µs, which is
# neither. At 15872 columns the three clocks say 382, 381 and 373 µs.
#
# **Why.**
# The time of the graph grows with the width, because its kernels do. A call in
# a row takes as long as the host or the device, whoever is slower. Up to
# 4096 columns it takes at least 1.5 times as long as the graph, so there it is
# the host.
# ``do_bench`` does not count what the host has done while L2 was overwritten.
# What it counts is the rest of the host's work, or the kernels. At 1024
# columns it says more than at 2048, where the kernels have twice as much to
# do, so there it cannot be the kernels. That is no mistake of ``do_bench``: it
# is made for kernels. But where the host takes longer than overwriting L2, its
# number is about neither of the two.
#
# **What follows.**
# A fast kernel in a slow call does not help whoever waits for it. To compare
# kernels, use a clock of the device, as the pages before this one do. To find
# out what a user waits for, make calls in a row and count everything.
#
# Three changes
# -------------
#
# What does a call do that it need not do each time?
#
# - It makes its plan, and checks its arguments. Both depend on shapes, types
#   and devices, which are the same in each step of a training.
# - At each launch, the JIT looks for the kernel that fits. It finds the same
#   one each time.
# - A compiled kernel is launched by Triton's own Python code, which can do
#   more than we need.
#
# The next three sections change one of them each.
#
# First change: remember the plan
# -------------------------------
#
# What must two calls have in common, so that one plan serves both?
#
# A plan depends on shapes, types, devices and ``eps``. We put all of them into
# a *key*, and keep plans in a dictionary. Only a call with a new key makes a
# plan, and only such a call has its arguments checked: with the same shapes,
# types and devices the check would say the same again.
#
# Whatever is left out of the key will go wrong one day. Without ``bias.dtype``
# a call with a ``bias`` in float32 would find the plan of one in float16, and
# its gradient would be allocated in the wrong type.
# The values in the tensors and their strides are not in the key: no plan
# depends on the values, and tensors are made contiguous in each call.


def current_device():
    return torch.cuda.current_device() if ON_GPU else -1


def plan_of(shape, x, weight, bias, eps, launcher):
    """The plan of a call: remembered, or new."""
    of_weight = None
    if weight is not None:
        of_weight = (weight.shape, weight.dtype, weight.device)
    of_bias = None
    if bias is not None:
        of_bias = (bias.shape, bias.dtype, bias.device)
    of_x = (x.shape, x.dtype, x.device)
    key = (shape, of_x, of_weight, of_bias, eps, launcher, current_device())
    plan = PLANS.get(key)
    if plan is None:
        size = torch.Size(shape)
        plan = make_plan(size, x, weight, bias, eps, launcher)
        if len(PLANS) >= 4096:
            PLANS.clear()  # or they would fill the memory one day
        PLANS[key] = plan
    return plan


# %%
# Why is the current device in the key? Triton launches on the current GPU,
# whatever GPU the tensors are on. With another current GPU the plan is another
# one, its arguments are checked anew, and the check refuses them.
#
# **What it costs.**
# The number of rows is in the key, because the plan needs it. So each new
# number of rows costs a plan, as each call of the plain function does. In a
# training with batches of one size that happens once. A server that sees
# another length with each request gains little.
# The plan is also memory that nobody frees: a dictionary that only grows is a
# leak, so ours is emptied when it holds 4096 plans.
#
# Second change: keep the compiled kernel
# ---------------------------------------
#
# Why does the JIT look at all arguments in each launch?
#
# Because it compiles a kernel for their types, and even for some of their
# values. If an address is a multiple of 16, the kernel may load 16 bytes at a
# time. The same kernel would fail on a view that begins two bytes later. So
# the JIT keeps both, and looks each time which of them fits.
#
# In one plan nothing but addresses can change. So we look at these alone. If
# all of them are multiples of 16, one kernel fits, the one that the first such
# launch has compiled. A launch returns it, and ``compiled[grid]`` launches it
# again. If not, we go the plain way.


def remembering(relaunch, kernel, programs, numbers, num_warps):
    """Like jit; from the second launch on, by what the first has compiled.

    relaunch(compiled, programs) returns the second way to launch.
    """
    plain_launch = jit(kernel, programs, numbers, num_warps)
    again = None

    def launch(*tensors):
        nonlocal again
        addresses = []
        bits = 0  # that are set in any of the addresses
        for tensor in tensors:
            address = 0 if tensor is None else tensor.data_ptr()
            addresses.append(address)
            bits |= address
        if bits % 16 > 0:
            plain_launch(*tensors)
        elif again is None:
            compiled = plain_launch(*tensors)
            if compiled is not None:  # the interpreter compiles nothing
                again = relaunch(compiled, programs)
        else:
            again(*addresses, *numbers)

    return launch


def by_grid(compiled, programs):
    """The public way to launch a compiled kernel."""
    return compiled[(programs, 1, 1)]


# %%
# A pointer argument may be a tensor or its address. We have asked for the
# addresses already, so we hand them on. That saves more than it seems to: of
# a tensor Triton asks the driver whether the GPU can reach its memory, and an
# address it takes as it is.
# An argument that is ``None`` has been compiled into the kernel, so any number
# may stand in its place.
#
# **What it costs.**
# What Triton has checked, we must check. If the key misses something on which
# the compiled kernel depends, or if a tensor is on the CPU, nobody notices,
# and the kernel reads what it should not. That is why the device of each
# tensor is in the key.
# The JIT also looks whether a global variable that the kernel uses has
# changed since it was compiled, and raises an error if so. Now nobody looks.
#
# Third change: launch it bare
# ----------------------------
#
# What does ``compiled[grid]`` do in its turn?
#
# It asks for the current device and for its stream, collects what *hooks* may
# want to know, and calls ``compiled.run``. A hook is a function that Triton
# calls at each launch, for a profiler, for instance. We call ``compiled.run``
# ourselves. Then only the stream must be looked up each time, because the
# caller may have changed it.


def bare(compiled, programs):
    """A launch without hooks, by the function that Triton itself calls."""
    driver = triton.runtime.driver.active
    device = driver.get_current_device()
    stream_of = driver.get_current_stream
    run = compiled.run
    function = compiled.function  # what the driver launches
    packed = compiled.packed_metadata  # its warps and its shared memory

    def launch(*args):
        # Three times None: no data for hooks, no hook before, no hook after.
        run(
            *(programs, 1, 1, stream_of(device), function, packed),
            *(None, None, None, *args),
        )

    return launch


LAUNCHERS = {
    "jit": jit,
    "kept": functools.partial(remembering, by_grid),
    "bare": functools.partial(remembering, bare),
}

# %%
# **What it costs.**
# ``run`` is Triton's own business. Its arguments are the same in the source of
# versions 3.6 to 3.9, and they may change with the next one. So we use it only
# where we know it, and ``compiled[grid]`` elsewhere.
# Profilers that hook into Triton, such as Proton, do not see these launches.

MAJOR_MINOR = tuple(map(int, triton.__version__.split(".")[:2]))
BEST_LAUNCHER = "bare" if (3, 6) <= MAJOR_MINOR <= (3, 9) else "kept"

# %%
# The lean function
# -----------------
#
# Here is all of it: the plan is looked up, and everything else is as before.


def layer_norm(
    x,
    normalized_shape,
    weight=None,
    bias=None,
    eps=1e-5,
    *,
    launcher=BEST_LAUNCHER,
):
    """Normalize x over its last dimensions, at most 16384 numbers.

    The arguments are those of PyTorch's function. launcher is "jit", "kept"
    or "bare".
    """
    if isinstance(normalized_shape, int):
        shape = (normalized_shape,)
    else:
        shape = tuple(normalized_shape)
    plan = plan_of(shape, x, weight, bias, eps, launcher)
    return LayerNorm.apply(x, weight, bias, plan)


def by(launcher):
    """layer_norm with another launcher."""
    return functools.partial(layer_norm, launcher=launcher)


for launcher in LAUNCHERS:
    print(end=f"{launcher}: ")
    check(by(launcher), 1151 if ON_GPU else 9, 200, torch.float16)

# %%
# How long does a launch take in each of the ways? Here is the forward kernel
# alone, once more with 16 rows.

# %%

# Scaffold: ways to launch, a benchmark.


@functools.cache
def times_of_launches(M, N, dtype):
    x, w, b, _ = inputs(M, N, dtype)
    y = torch.empty_like(x)
    stats = torch.empty(M, 2, device=DEVICE)
    calls = {"torch": lambda: F.layer_norm(x, (N,), w, b)}
    for name, launcher in LAUNCHERS.items():
        launch = launcher(
            _layer_norm_fwd,
            programs=M,
            numbers=(1e-5, N, triton.next_power_of_2(N)),
            num_warps=4,
        )
        calls[name] = functools.partial(launch, x, w, b, y, stats)
    return in_turns(calls)


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=[1024],
        line_arg="provider",
        line_vals=["jit", "kept", "bare", "torch"],
        line_names=["JIT", "Kept", "Bare", "PyTorch's forward pass"],
        ylabel="µs",
        plot_name="layer-norm-host-launches",
        args={"M": 16, "dtype": torch.float16, "mode": "forward"},
    )
)
def bench_launches(M, N, dtype, mode, provider):
    """Calls on the host, all in turns: in each of 9 rounds the fastest of
    16 batches of 20, with L2 as they leave it. Median of PyTorch; another
    line's is that times its ratio to PyTorch in the same round, median, 20%
    and 80% quantiles."""
    if not ON_GPU:
        return 3 * [float("nan")]
    return times_of_launches(M, N, dtype)[provider]


# %%

launches = bench_launches.run(return_df=True)
plt.close()

# %%

# Drawing: ways to launch a kernel.

plt.figure("What a launch takes in each of the ways", (7.5, 2.4))
names = [name.split(" (")[0] for name in launches.columns[1:]]
plt.barh(names[::-1], launches.iloc[0, 1:].astype(float)[::-1])
plt.xlabel("µs")
plt.show()

# %%
# **What the figure shows.**
# On the H200 a launch by the JIT takes 22.6 µs, a kept kernel takes 11.6 µs,
# and a bare launch takes 8.9 µs.
#
# **Why.**
# The kept kernel saves the search for it. A bare launch also saves some lines
# of Python around the same call. What is left is our loop over addresses, the
# C code of Triton that takes the arguments apart, and the driver.
#
# **Can we compare it with the first figure?**
# No. PyTorch's forward pass is nearly the same call in both; only here ``x``
# wants a gradient, too. It took 13.3 µs there and takes 23.7 µs here, where a
# launch by the JIT took 17.6 µs and takes 22.6 µs. Probably the host was
# slower when this figure was measured, but not by the same factor for both,
# and we don't know why. So compare what has taken turns: calls of one figure,
# at one size.
#
# **What follows.**
# A launch by the JIT takes about as long as PyTorch's forward pass here, and a
# bare launch takes less than half of that. A training step of a layer norm has
# three launches, so each microsecond counts three times.
#
# What each change buys
# ---------------------
#
# Now whole calls, first the forward pass. PyTorch has cures of its own, and
# they are in the figures too:
#
# - **torch.compile** makes its own kernels, and its own Python code to launch
#   them.
# - **reduce-overhead** is ``torch.compile(..., mode="reduce-overhead")``. It
#   puts the kernels into CUDA graphs.
# - **CUDA graph** is our lean function, recorded by hand.
#
# *Autograd alone* is the function from above that does nothing.

# %%

# Scaffold: whole calls, benchmarks.

DESIGNS = {
    "triton": "Triton",
    "kept": "Kernels kept",
    "plan": "Plan remembered",
    "plain": "Plain",
    "nothing": "Autograd alone",
    "torch": "PyTorch",
    "torch.compile": "torch.compile",
    "reduce-overhead": "reduce-overhead",
    "CUDA graph": "CUDA graph",
}


def nothing(x, shape, w, b):
    return Nothing.apply(x, w, b)


def pytorch_layer_norm(x, shape, w, b):
    return F.layer_norm(x, shape, w, b)


def functions_to_compare():
    """{design: function}, with torch.compile's made anew."""
    torch._dynamo.reset()  # nothing is left of other shapes
    compiled = torch.compile(pytorch_layer_norm, dynamic=False)
    with_graphs = torch.compile(
        pytorch_layer_norm, dynamic=False, mode="reduce-overhead"
    )
    return {
        "torch": F.layer_norm,
        "triton": layer_norm,
        "kept": by("kept"),
        "plan": by("jit"),
        "plain": plain,
        "nothing": nothing,
        "torch.compile": compiled,
        "reduce-overhead": with_graphs,
        "CUDA graph": layer_norm,
    }


def step_by_step(call):
    """The call, which tells torch.compile's graphs that a new step begins.

    Without that, a forward pass waits for its backward pass, and is not
    replayed.
    """

    def new_step():
        torch.compiler.cudagraph_mark_step_begin()
        return call()

    return new_step


@functools.cache  # both figures at once: torch.compile takes seconds
def times_of_designs(M, N, dtype):
    """{mode: {design: µs}}"""
    functions = functions_to_compare()
    times = {}
    for mode in ("forward and backward", "forward"):
        calls = {}
        for name, function in functions.items():
            calls[name] = prepare(function, M, N, dtype, mode)
        if mode == "forward":
            waiting = calls["reduce-overhead"]
            calls["reduce-overhead"] = step_by_step(waiting)
        calls["CUDA graph"] = as_graph(calls["CUDA graph"])
        times[mode] = in_turns(calls, repeats=20 if mode == "forward" else 10)
    return times


def benchmark_of_designs(name, mode):
    return triton.testing.Benchmark(
        x_names=["N"],
        x_vals=[1024, 2048, 4096, 15872],
        line_arg="provider",
        line_vals=list(DESIGNS),
        line_names=list(DESIGNS.values()),
        ylabel="µs",
        plot_name=name,
        args={"M": 4096, "dtype": torch.float16, "mode": mode},
    )


@triton.testing.perf_report(
    benchmark_of_designs("layer-norm-host-forward", mode="forward")
)
def bench_forward(M, N, dtype, mode, provider):
    """Calls on the host until the device is done, all in turns: in each of 9
    rounds the fastest of 16 batches of 20, with L2 as they leave it. Median
    of PyTorch; another line's is that times its ratio to PyTorch in the same
    round, median, 20% and 80% quantiles."""
    if not ON_GPU:
        return 3 * [float("nan")]
    return times_of_designs(M, N, dtype)[mode][provider]


@triton.testing.perf_report(
    benchmark_of_designs("layer-norm-host-ladder", mode="forward and backward")
)
def bench_both(M, N, dtype, mode, provider):
    """Calls on the host until the device is done, all in turns: in each of 9
    rounds the fastest of 16 batches of 10, with L2 as they leave it. Median
    of PyTorch; another line's is that times its ratio to PyTorch in the same
    round, median, 20% and 80% quantiles."""
    if not ON_GPU:
        return 3 * [float("nan")]
    return times_of_designs(M, N, dtype)[mode][provider]


# %%

report_host_times(bench_forward)

# %%
# **What the figure shows.**
# On the H200, at 1024 columns, PyTorch's forward pass takes 15.8 µs, our plain
# one takes 71.1 µs, and the lean one takes 26.0 µs. The graph takes 6.3 µs.
# torch.compile takes 87.9 µs, and with reduce-overhead it takes 110 µs.
# At 15872 columns it is 124 µs for PyTorch and 74.8 µs for the lean function.
#
# An autograd function that does nothing has the same work at each width. Yet
# it takes between 10.1 and 18.2 µs: the host was not equally fast while the
# widths were measured, one after the other. So compare the lines at one width,
# and not one line from width to width.
#
# And both passes:

report_host_times(bench_both)

# %%
# **What the figure shows.**
# On the H200, at 1024 columns, PyTorch takes 115 µs for both passes. The plain
# function takes 2.20 times as long, with plans that are remembered 1.68 times,
# with kernels that are kept 1.40 times, and the lean function 1.35 times. From
# 1024 to 4096 columns the lean function takes 1.30 to 1.37 times as long as
# PyTorch.
# At 15872 columns the lean function is 1.5 times as fast as PyTorch.
#
# **Why.**
# Each change takes away what the parts have shown: first the plan, then the
# search at each launch, then the lines around it. The last change saves least:
# at 1024 columns it is no more than what the times vary by. At 15872 columns
# the kernels, in the graph, take 245 µs, and our four functions take 252 to
# 270 µs. There the device decides, and our kernels are faster than PyTorch's.
# At 1024 columns the kernels, in the graph, take 25.2 µs, so nobody waits for
# them.
#
# **And torch.compile?**
# It takes 2.8 times as long as PyTorch at 1024 columns, and with
# reduce-overhead 2.9 times. A function that it has compiled checks in each
# call what it has assumed about its arguments. Then it goes through an
# autograd function in Python, like ours. With reduce-overhead it also looks
# for the right graph, and copies what is not where it was recorded. A single
# layer norm does not pay for all that. At 15872 columns torch.compile takes
# 358 µs, and 549 µs with reduce-overhead. Copies of wide matrices may be the
# reason, but we have not measured them by themselves.
#
# What is left?
# -------------
#
# Here is one call of the lean function, part by part, on the scale of the
# picture of the plain function.

# %%

# Scaffold: the parts of a lean call, a benchmark.


@functools.cache
def parts_of_lean_calls(M, N, dtype):
    return times_of_both_passes(layer_norm, "plan_of", M, N, dtype)


@triton.testing.perf_report(benchmark_of_parts("layer-norm-host-lean"))
def bench_lean_parts(M, N, dtype, mode, provider):
    """Calls on the host: each part notes the time that it takes, and autograd
    is the rest of a pass. In each of 9 rounds, PyTorch's layer norm and ours
    take 16 turns with batches of 20, with L2 as they leave it, and each part
    has its smallest mean. It is multiplied by PyTorch's median over its time
    in the same round; median, 20% and 80% quantiles."""
    if not ON_GPU:
        return 3 * [float("nan")]
    return parts_of_lean_calls(M, N, dtype)[provider]


# %%

lean_parts = bench_lean_parts.run(return_df=True)
plt.close()

# %%

# Drawing: one call of the lean function, part by part.

plt.figure("One call of the lean function, part by part", (7.5, 2.6))
times = lean_parts.iloc[0, 1:].astype(float).tolist()
names = ("plan", "autograd", "tensors", "launches")
left = 0
for i in range(4):
    plt.barh(1, times[i], 0.6, left, color=f"C{i}", label=names[i])
    left += times[i]
left = 0
for i in range(4, 7):  # the backward pass makes no plan
    plt.barh(0, times[i], 0.6, left, color=f"C{i - 3}")
    left += times[i]
before = plain_parts.iloc[0, 1:].astype(float).tolist()
if left > 0:  # and not NaN
    plt.xlim(0, 1.05 * max(sum(before[:4]), sum(before[4:])))
plt.yticks((0, 1), ("backward", "forward"))
plt.xlabel("µs")
plt.legend(ncols=4, loc="upper center", bbox_to_anchor=(0.5, 1.3))
plt.show()

# %%
# **What the figure shows.**
# On the H200 the plan takes 5 µs, where it took 40 µs, and the three launches
# take 31 µs, where they took 71 µs. Autograd was the largest part before, with
# 44% of the whole call. Now it is 62%, and the tensors are 13%.
# These are two figures, measured one after the other. But the tensors, in
# which nothing has changed, take 18 µs, where they took 19 µs. So the host was
# about as fast.
#
# **What follows.**
# Autograd and tensors are three quarters of what is left, and a function in
# Python cannot do without either. Who wants more has to leave Python: an
# operator in C++, or fewer and larger operations. Or the whole step has to
# become a graph.
#
# In a model
# ----------
#
# A model has many layers. Is the host as slow in each of them?
#
# Here 1, 4 and 16 layer norms follow each other, each with parameters of its
# own, and one backward pass goes through all of them. The figure shows the
# time for each layer. torch.compile sees all layers at once.

# %%

# Scaffold: layers that follow each other, a benchmark.

IN_MODELS = [
    "triton",
    "plain",
    "torch",
    "torch.compile",
    "reduce-overhead",
    "CUDA graph",
]


def model_of(function):
    """A function that applies another one with each pair of parameters."""

    def model(x, parameters):
        for w, b in parameters:
            x = function(x, w.shape, w, b)
        return x

    return model


def prepare_model(model, layers, M, N, dtype):
    """Both passes of layer norms in a row, as a call without arguments."""
    x, _, _, dy = inputs(M, N, dtype)
    parameters = []
    for _ in range(layers):
        _, w, b, _ = inputs(1, N, dtype)
        parameters.append((w, b))
    wanted = [x]
    for pair in parameters:
        wanted.extend(pair)

    def call():
        return torch.autograd.grad(model(x, parameters), wanted, dy)

    return call


@functools.cache
def times_of_models(layers, M, N, dtype):
    """{design: µs of each layer}"""
    torch._dynamo.reset()
    model = model_of(pytorch_layer_norm)
    models = {
        "torch": model_of(F.layer_norm),
        "triton": model_of(layer_norm),
        "plain": model_of(plain),
        "torch.compile": torch.compile(model, dynamic=False),
        "reduce-overhead": torch.compile(
            model, dynamic=False, mode="reduce-overhead"
        ),
        "CUDA graph": model_of(layer_norm),
    }
    calls = {}
    for name in models:
        calls[name] = prepare_model(models[name], layers, M, N, dtype)
    calls["CUDA graph"] = as_graph(calls["CUDA graph"])
    times = in_turns(calls, repeats=max(10 // layers, 1))
    return {name: [us / layers for us in times[name]] for name in times}


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["layers"],
        x_vals=[1, 4, 16],
        line_arg="provider",
        line_vals=IN_MODELS,
        line_names=[DESIGNS[name] for name in IN_MODELS],
        xlabel="layers",
        ylabel="µs",
        plot_name="layer-norm-host-layers",
        args={
            "M": 4096,
            "N": 1024,
            "dtype": torch.float16,
            "mode": "forward and backward",
        },
    )
)
def bench_layers(layers, M, N, dtype, mode, provider):
    """Calls on the host until the device is done, divided by their number of
    layers. All take turns, in each of 9 rounds with the fastest of 16
    batches of 10 layers or more, with L2 as they leave it. Median of PyTorch;
    another line's is that times its ratio to PyTorch in the same round,
    median, 20% and 80% quantiles."""
    if not ON_GPU:
        return 3 * [float("nan")]
    return times_of_models(layers, M, N, dtype)[provider]


# %%

report_host_times(bench_layers)

# %%
# **What the figure shows.**
# On the H200 PyTorch takes 157 µs for a single layer, and 87 µs for each
# of 16. The lean function takes 208 and 122 µs, the plain one 384 and 226 µs,
# torch.compile 464 and 189 µs, and reduce-overhead 475 and 188 µs.
#
# **Why.**
# What autograd does once for a backward pass, such as changing threads, is
# shared by all layers.
# The checks of torch.compile, too, are made once for all that it has compiled,
# and its graphs are launched as a whole. That fits 1 and 4 layers. It does not
# fit 16: with reduce-overhead each of them takes longer than each of 4, and we
# have not found out why.
#
# How much is shared we cannot tell exactly, because the host was not equally
# fast once more: a single layer is the call of the last figures, and takes
# longer here. With the same number of layers, the lean function takes 1.3 to
# 1.4 times as long as PyTorch, and the plain one 2.4 to 2.6 times.
#
# **What follows.**
# In a model a layer costs less than a single call. What a layer pays by
# itself stays: its plan, tensors and launches. This is where the three changes
# help, and where PyTorch's C++ is ahead of us.
#
# PyTorch's own cures
# -------------------
#
# A CUDA graph takes the host out of the call, so why is not everything one?
#
# A graph is a recording: it repeats the same kernels, with the same numbers of
# programs, at the same addresses. New inputs have to be copied to where the
# old ones were, and results are overwritten by the next replay. Another number
# of rows needs another recording, and ``if`` statements that look at a tensor
# cannot be recorded at all.
# Here is what happens if one forgets that:


def results_of_two_replays():
    """The first number of both results, after the second replay."""
    if not ON_GPU:
        return "needs a GPU"
    x = torch.ones(4, device=DEVICE)
    replay = as_graph(lambda: 2 * x)
    _, first = replay()
    x.fill_(3)
    _, second = replay()
    torch.cuda.synchronize()
    return first[0].item(), second[0].item()


print("2 * 1 and 2 * 3 by a graph:", results_of_two_replays())

# %%
# On a GPU it prints (6.0, 6.0): the second replay has overwritten the first
# result.
#
# ``mode="reduce-overhead"`` takes care of most of that. It records a graph for
# each new shape, copies inputs to the addresses that it has recorded, and
# checks in Python whether the graph still fits. For layer norms alone this
# takes longer than what the graph saves: PyTorch without it was faster with
# each number of layers.
# The memory of each graph stays taken. And its results, too, last only until
# the next call: whoever keeps one has to copy it. PyTorch raises an error if
# you read one that has been overwritten.
#
# A graph is the right cure for a whole step of a training, or for a model that
# makes one token after the other. Our lean function can be recorded in one, as
# the figures have shown: it asks for the stream at each launch, and while a
# graph is recorded, that is the stream of the recording.
#
# What each change costs
# ----------------------
#
# We have promised to write down what can go wrong. It is better to try it.
# What follows must hold for each launcher, and it is tried each time this page
# runs. What needs a GPU is left out without one.
#
# - **Views** that begin anywhere: a plan is used again for a tensor whose
#   address is not a multiple of 16.
# - **New numbers of rows** get plans of their own.
# - **Autocast.** PyTorch's layer norm returns float32 under
#   ``torch.autocast``. Ours returns the type of ``x``, as always on this site,
#   so a plan may be shared by calls with and without autocast.
# - **Other streams.** A plan that was made on one stream is used on another.
# - **CUDA graphs.** A call is recorded and replayed with new numbers.


def with_views(function):
    """Tensors of one kind; the second one begins two bytes later."""
    memory = torch.randn(8 * 64 + 1, device=DEVICE).half()
    for x in (memory[:-1].view(8, 64), memory[1:].view(8, 64)):
        torch.testing.assert_close(function(x, 64), F.layer_norm(x, (64,)))


def with_other_rows(function):
    """One plan more for each new number of rows."""
    plans = len(PLANS)
    for M in (3, 5, 3):
        x = torch.randn(M, 32, device=DEVICE)
        torch.testing.assert_close(function(x, 32), F.layer_norm(x, (32,)))
    assert len(PLANS) == plans + 2


def with_autocast(function):
    """The same plan and the same type, with autocast and without."""
    x = torch.randn(8, 64, device=DEVICE).bfloat16()
    expected = function(x, 64)
    plans = len(PLANS)
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        y = function(x, 64)
    assert torch.equal(y, expected) and len(PLANS) == plans


def with_streams(function):
    """The work of a call on another stream is done on that stream."""
    x = torch.randn(4096, 4096, device=DEVICE)
    expected = F.layer_norm(x, (4096,))
    function(x, 4096)
    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        late = torch.zeros_like(x)
        for _ in range(20):
            late += x / 20  # x, but only when this stream gets there
        y = function(late, 4096)
    torch.cuda.current_stream().wait_stream(other)
    torch.testing.assert_close(y, expected, atol=1e-3, rtol=1e-3)


def with_graphs(function):
    """A recorded call is replayed with other numbers at the same address."""
    x = torch.randn(8, 64, device=DEVICE)
    replay = as_graph(lambda: function(x, 64))
    x.copy_(torch.randn(8, 64, device=DEVICE))
    _, y = replay()
    torch.testing.assert_close(y, F.layer_norm(x, (64,)))


TRIALS = {
    "views": with_views,
    "rows": with_other_rows,
    "autocast": with_autocast,
}
GPU_TRIALS = {"streams": with_streams, "graphs": with_graphs}

trials = TRIALS | GPU_TRIALS if ON_GPU else TRIALS
for launcher in LAUNCHERS:
    for trial in trials.values():
        trial(by(launcher))
    print(f"{launcher}: right with {', '.join(trials)}")

# %%
# Other things do change:
#
# - **torch.compile** cannot look into any of the three. It compiles what comes
#   before and what comes after, and runs our function as usual in between. The
#   results are right, but nothing is fused across it. On `Every width
#   <11-every-width.html>`_ the function is an operator that torch.compile
#   knows.
# - **Hooks and profilers** see the launches of "jit" and of "kept", and none
#   of "bare".
# - **A changed global variable** that a kernel uses makes "jit" raise an
#   error. The other two go on with what was compiled.
# - **Another GPU.** All three refuse tensors that are not on the current GPU,
#   because the current device is in the key.
# - **Another version of Triton.** From 3.10 on, "bare" is not chosen by
#   itself.
#
# And a word on what is *not* in the list: several threads. Two of them may
# make the same plan at the same time. Then one plan is forgotten, and nothing
# else happens, because a plan holds no memory that calls share: each call
# allocates its own results and buffers.
#
# Where PyTorch or a library is better
# ------------------------------------
#
# - **PyTorch's own layer norm takes less time on the host.** On the H200, at
#   1024 columns, our lean function takes 1.65 times as long forward and 1.35
#   times as long in both passes. It is a function in Python, and PyTorch's is
#   C++.
# - **New shapes.** PyTorch makes no plans and compiles nothing, so it is as
#   quick with the first batch of a new size as with the hundredth.
# - **Whole models.** A CUDA graph takes the host out of all layers at once: it
#   takes 25 µs for each of 16 layers, where the lean function, called from
#   Python, takes 122 µs. And torch.compile can fuse a layer norm with what is
#   around it, of which there is nothing here.
# - **Safety.** PyTorch checks all arguments in each call. We check them once
#   for each key.
#
# Exercise 1: a key
# -----------------
#
# A key with too little in it finds wrong plans, one with too much makes
# needless ones. This stub does both: it leaves out five things on which a plan
# or its kernels depend, and has one in it that no plan needs. All tensors of
# the checker are on one device, so you may leave out devices here.
#
# **Hint 1.** Go through ``Plan.__init__``. From which properties of ``x``,
# ``weight`` and ``bias`` does it take something, and what does
# ``new_empty`` copy from its tensor?
#
# **Hint 2.** Whether ``weight`` is ``None`` is a part of the compiled kernel.
# So are the types of the tensors.
#
# **Hint 3.** What does ``contiguous`` do before a kernel sees a tensor? Do
# kernels depend on the strides that a caller's tensor had?


def key(x, weight, bias, eps):
    return x.shape, x.stride(), weight is None  # to do


def exercise_1(key):
    """Print which calls the key takes for others, or not for others."""
    x = torch.ones(8, 8, device=DEVICE)
    w = torch.ones(8, device=DEVICE)
    needs_another_plan = {
        "fewer rows": (x[:4], w, w, 1e-5),
        "x in 16 bits": (x.half(), w, w, 1e-5),
        "no weight": (x, None, w, 1e-5),
        "weight in 16 bits": (x, w.half(), w, 1e-5),
        "no bias": (x, w, None, 1e-5),
        "bias in 16 bits": (x, w, w.half(), 1e-5),
        "another eps": (x, w, w, 1e-3),
    }
    needs_the_same = {
        "transposed": (x.T, w, w, 1e-5),
        "other values": (x + 1, w, w, 1e-5),
    }
    first = key(x, w, w, 1e-5)
    wrong = []
    for name, arguments in needs_another_plan.items():
        if key(*arguments) == first:
            wrong.append(name)
    for name, arguments in needs_the_same.items():
        if key(*arguments) != first:
            wrong.append(name)
    print("wrong:", ", ".join(wrong) or "nothing")
    return not wrong


print("right:", exercise_1(key))

# %%

# Solution 1


def key_1(x, weight, bias, eps):
    kinds = []
    for tensor in (x, weight, bias):
        if tensor is None:
            kinds.append(None)
        else:
            kinds.append((tensor.shape, tensor.dtype))
    return *kinds, eps


assert exercise_1(key_1)

# %%
# What we learned
# ---------------
#
# These are the designs of this page, with what both passes take on the host of
# the H200, for 4096 rows of 1024 columns:
#
# - **Plain**: 252 µs. It makes a plan in each call, and launches by the JIT.
# - **Plan remembered**: 193 µs. Needs a key that misses nothing, and memory.
# - **Kernels kept**: 160 µs. Needs a check of addresses.
# - **Launched bare**, the lean function: 155 µs. Needs a version of Triton
#   that we know.
# - **Autograd alone**: 80 µs. This is the floor for a function in Python.
# - **PyTorch**: 115 µs. It is C++.
# - **CUDA graph** of the lean function: 25 µs. Needs fixed shapes and
#   addresses.
#
# And for functions that launch kernels:
#
# - Host and device work at the same time, and you wait for the slower one.
#   Find out which one that is before you make the other one faster.
# - A clock answers one question. Ask what it leaves out.
# - What is the same in each call can be remembered. The key has to hold
#   whatever makes a difference, and nothing else.
# - Whoever goes around a check has to make it.
#
# **Next:** `Every width <11-every-width.html>`_ puts the kernels of all pages
# behind one function, with what this page has taught about calls.
