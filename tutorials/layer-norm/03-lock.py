r"""
A lock, and its race
====================

How can many programs add to one row of sums without losing an addition?
With a lock that one atomic exchange takes and another one frees, and a
barrier in between, where all threads of a program meet.

`Triton's own tutorial on layer normalization
<https://triton-lang.org/main/getting-started/tutorials/05-layer-norm.html>`_
sums its weight gradients behind such a lock.
On this page we build one, part by part.
Then we leave out one part at a time and count how often the result is wrong.
At the end we measure what the lock is worth.

**What you will learn**

- How an addition gets lost, value by value.
- How a lock is made of two atomic exchanges, a barrier, and two promises about
  the order of memory accesses.
- Why a test that passes does not prove that a lock is right, and where you can
  see that it is.
- How to tell apart what a lock costs: the lock itself, its traffic, and the
  time that programs wait for each other.

**What you need:** `Layer normalization, both passes <01-layer-norm.html>`_,
above all its backward kernel. You don't need a GPU.
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
# How does an addition get lost?
# ------------------------------
#
# On `Layer normalization, both passes <01-layer-norm.html>`_, each program of
# the backward pass has a buffer of its own for its sums.
# Now two programs share one. A number in it is 0. Program 0 wants to add 3 to
# this number, and program 1 wants to add 4, so it should become 7.
#
# Adding to a number in memory takes three steps: read it, add, and write the
# sum. So this can happen:
#
# 1. Program 0 reads 0.
# 2. Program 1 reads 0, too, because nothing has been written yet.
# 3. Program 0 adds 3 and writes 3.
# 4. Program 1 adds 4 and writes 4. The 3 is gone.

buffer = 0.0
read_by_0 = buffer
read_by_1 = buffer
buffer = read_by_0 + 3.0
buffer = read_by_1 + 4.0
print("sum:", 3.0 + 4.0, "buffer:", buffer)

# %%
# If program 1 had read the buffer after program 0 wrote to it, the result
# would be 7. It depends on who comes first, and this is called a *race*.

# %%

# Drawing: two programs add to a buffer, at the same time and in turns.

plt.figure(
    "Two programs add 3 and 4 to a buffer that holds 0. At the same time: "
    "both read 0, one writes 3, the other writes 4, and 3 is lost. In turns: "
    "one reads 0 and writes 3, then the other reads 3 and writes 7",
    figsize=(7.5, 4),
)


def draw_step(time, height, text, color):
    plt.barh(height, 1.9, left=time, height=0.8, color=color, alpha=0.4)
    plt.text(time + 0.95, height, text, ha="center", va="center")


def draw_buffer(values, height):
    """What the buffer holds after each step."""
    for time, value in enumerate(values):
        plt.text(2 * time + 0.95, height, value, ha="center", va="center")


at_the_same_time = ((0, 0, "read 0"), (1, 1, "read 0"),
                    (2, 0, "write 3"), (3, 1, "write 4"))  # fmt: skip
in_turns = ((0, 0, "read 0"), (1, 0, "write 3"),
            (2, 1, "read 3"), (3, 1, "write 7"))  # fmt: skip
for top, steps in ((6, at_the_same_time), (2, in_turns)):
    for time, program, text in steps:
        draw_step(2 * time, top - program, text, f"C{program}")
draw_buffer(["0", "0", "3", "4: wrong"], height=4)
draw_buffer(["0", "3", "3", "7: right"], height=0)
plt.text(4, 6.8, "at the same time", ha="center", va="center")
plt.text(4, 2.8, "in turns", ha="center", va="center")
plt.yticks(
    [6, 5, 4, 2, 1, 0], 2 * ["program 0", "program 1", "the buffer holds"]
)
plt.xticks([])
plt.xlabel("time")
plt.axis((0, 8, -0.7, 7.2))
plt.grid(visible=False)
plt.show()

# %%
# The lock
# --------
#
# How do we make the programs take turns?
#
# Each buffer gets a *lock*, an integer that says whether a program is adding
# to the buffer right now:
#
# - 0: it is free, and nobody has written to the buffer yet.
# - 1: it is taken.
# - 2: it is free, and the buffer holds a sum.
#
# Looking at the lock and then taking it would be two steps, and two programs
# could both find it free.
# So we need both in one step. ``tl.atomic_xchg`` exchanges a value: it writes
# a new one and returns the old one, and no other program comes in between.
# A program writes 1 and looks at what it gets back. If that is 1, another
# program has the lock, and writing 1 has changed nothing. So it tries again,
# until it gets 0 or 2 back. Then it has the lock.
# Here is the example from above once more:
#
# 1. Program 0 writes 1 and gets 0 back. It has the lock.
# 2. Program 1 writes 1 and gets 1 back. It tries again.
# 3. Program 0 writes 3 to the buffer, for there is nothing to read yet.
# 4. Program 0 writes 2 to the lock, which is free now.
# 5. Program 1 writes 1 and gets 2 back. It has the lock.
# 6. Program 1 reads 3, adds 4, writes 7, and frees the lock.
#
# Can a program wait forever? No. The program that has the lock is running, and
# it waits for nobody else before it frees the lock.
#
# That would be all if a program were a single thread, and if there were no
# caches. But on a GPU three more things can go wrong.
#
# **A program is many threads.** Each of them stores its own columns, but only
# *one* of them executes the exchange that frees the lock, and it does not wait
# for the others. If a warp is late, the lock is free before its columns are
# stored: the next program reads old values, and then the late store overwrites
# what that program has written.
# ``tl.debug_barrier()`` is a *barrier*: no thread goes past it before all
# threads of its program have reached it. Despite its name it is not only for
# debugging.
#
# **Stores may overtake each other.** Another SM may see the 2 in the lock
# before it sees the sums. So we free the lock with ``sem="release"``. It
# promises that whoever gets the 2 back can also see what was stored before it.
# The reader has to do its part, which comes next.
#
# **Loads may come from a cache.** Each SM has an L1 cache, and it may hold old
# values of the buffer. So we take the lock with ``sem="acquire"``. Then the
# loads after the exchange return what the last owner of the lock has stored,
# or something newer, but never an old value from the cache.


@triton.jit
def _add_behind_lock(
    dw,  # a row of sums in registers
    db,  # another one
    buffers_ptr,  # (buffers, 2, N): rows that dw and db are added to
    locks_ptr,  # (buffers,): 0 free, 1 taken, 2 free and written; 0 at first
    buffers,  # how many buffers there are
    cols,  # the columns of the tile
    N: tl.constexpr,  # columns
    FLAW: tl.constexpr,  # "", or what to leave out in an experiment
):
    # The programs take the buffers in turns. Each buffer has a lock.
    program = tl.program_id(0)
    buffer = program % buffers
    lock_ptr = locks_ptr + buffer
    if FLAW == "no waiting":
        lock_ptr = locks_ptr + program  # which nobody else takes

    # These two are right. The experiments also try "relaxed", which promises
    # nothing about other memory accesses.
    ACQUIRE: tl.constexpr = "relaxed" if FLAW == "no acquire" else "acquire"
    RELEASE: tl.constexpr = "relaxed" if FLAW == "no release" else "release"

    # Take the lock: write 1 until somebody else's 1 is no longer there.
    state = tl.atomic_xchg(lock_ptr, 1, sem=ACQUIRE)
    while state == 1:
        state = tl.atomic_xchg(lock_ptr, 1, sem=ACQUIRE)

    # Does the buffer hold sums? If not, a mask leaves out all the loads.
    written = state == 2
    if FLAW == "no waiting":
        written = program >= buffers  # as many loads as with the lock

    # Read, add, write.
    dw_ptr = buffers_ptr + buffer * 2 * N + cols
    db_ptr = dw_ptr + N
    old = cols < tl.where(written, N, 0)  # all columns, or none
    dw += tl.load(dw_ptr, mask=old, other=0)
    db += tl.load(db_ptr, mask=old, other=0)
    tl.store(dw_ptr, dw, mask=cols < N)
    tl.store(db_ptr, db, mask=cols < N)

    # Each thread has stored its own columns. Wait for all of them.
    if FLAW != "no barrier":
        tl.debug_barrier()

    # Free the lock. One thread does that for all.
    tl.atomic_xchg(lock_ptr, 2, sem=RELEASE)


# %%
# The website has a moving picture here, which steps through the lock. At first
# it has four programs of two warps each, four rows, and two buffers, and each
# row adds 1.
# Let it run once, and both warps find the right sum, 4.
# Then switch off the barrier and let it run again. Now warp 1 is late in
# programs 0 and 1. Programs 2 and 3 get the locks and find nothing in the
# columns of warp 1, and then the late stores overwrite what they have stored.
# The sum is still 4 in the columns of warp 0, but only 2 in those of warp 1.
#
# The argument ``FLAW`` is there for our experiments, and you don't need it in
# a lock of your own.
#
# Since version 3.9, Triton can free the lock with `tl.atomic_store
# <https://triton-lang.org/main/python-api/generated/triton.language.atomic_store.html>`_,
# for nobody needs the old value that our second exchange returns. To take the
# lock, it still needs the exchange. It also has `tl.atomic_load
# <https://triton-lang.org/main/python-api/generated/triton.language.atomic_load.html>`_,
# but a load takes no lock, and ``tl.atomic_poll``, which waits for one certain
# value. Our lock is free at two values, 0 and 2, and once we have seen one of
# them, somebody else may take the lock before we do.
# This page runs with older versions, too, so it only has exchanges.
#
# A backward pass with a lock
# ---------------------------
#
# Where in a backward pass does the lock belong?
#
# A backward pass has two *stages*. In the first, programs add up rows and
# leave their sums in buffers. In the second, another kernel adds up the
# buffers. The lock belongs in the first, where programs may share a buffer.
#
# The kernel is that of `Layer normalization, both passes
# <01-layer-norm.html>`_. A program takes row after row and keeps its sums in
# registers. Only its end is new: the program adds its sums to a buffer behind
# the lock. Without locks it stores them in a buffer of its own, as before.


@triton.jit
def _layer_norm_bwd(
    dy_ptr,  # (M, N), contiguous
    x_ptr,  # (M, N), contiguous
    w_ptr,  # (N,); None counts as 1
    mean_ptr,  # (M,), from the forward pass
    rstd_ptr,  # (M,), from the forward pass
    dx_ptr,  # (M, N), or None if dx is not wanted
    buffers_ptr,  # (buffers, 2, N), or None if neither dw nor db is wanted
    locks_ptr,  # New: (buffers,), or None if each program has its own buffer
    M,  # rows
    buffers,  # New: how many buffers there are
    N: tl.constexpr,  # columns
    BLOCK_SIZE: tl.constexpr,  # tile width: a power of two, at least N
    FLAW: tl.constexpr = "",  # New: what the lock leaves out
):
    cols = tl.arange(0, BLOCK_SIZE)
    mask = cols < N
    acc_dtype = mean_ptr.dtype.element_ty  # float32; float64 for float64

    # The sums over our rows stay in registers from the first row to the last.
    dw = tl.zeros((BLOCK_SIZE,), acc_dtype)
    db = tl.zeros((BLOCK_SIZE,), acc_dtype)

    for row in range(tl.program_id(0), M, tl.num_programs(0)):
        # Load a row of x and of dy. Masked elements of dy are 0 and add
        # nothing to any of the sums below.
        offsets = tl.cast(row, tl.int64) * N + cols  # M * N may pass 2**31
        x = tl.load(x_ptr + offsets, mask=mask, other=0).to(acc_dtype)
        dy = tl.load(dy_ptr + offsets, mask=mask, other=0).to(acc_dtype)

        # Recompute x_hat.
        mean = tl.load(mean_ptr + row)
        rstd = tl.load(rstd_ptr + row)
        x_hat = (x - mean) * rstd

        # This row's terms of dw and db.
        dw += dy * x_hat
        db += dy

        if dx_ptr is not None:
            wdy = dy
            if w_ptr is not None:
                w = tl.load(w_ptr + cols, mask=mask, other=0).to(acc_dtype)
                wdy = w * dy
            # The formula for dx.
            c1 = tl.sum(x_hat * wdy) / N
            c2 = tl.sum(wdy) / N
            dx = (wdy - x_hat * c1 - c2) * rstd
            tl.store(dx_ptr + offsets, dx, mask=mask)

    if buffers_ptr is not None:
        if locks_ptr is not None:
            # New: add to a buffer that other programs add to as well.
            _add_behind_lock(
                dw, db, buffers_ptr, locks_ptr, buffers, cols, N, FLAW
            )
        else:
            # Store both sums in the buffer of this program.
            buffer_ptr = buffers_ptr + tl.program_id(0) * 2 * N
            tl.store(buffer_ptr + cols, dw, mask=mask)
            tl.store(buffer_ptr + N + cols, db, mask=mask)


# %%
# A *plan* has four values: how many programs there are, how many buffers, how
# many warps a program has, and whether there are locks.
# The locks must be 0 at the start, so we clear them for each call. We need not
# clear the buffers: the first program at a buffer does not read it.


def stage_1(
    dy, x, w, mean, rstd, plan, flaw="", wants_dx=True, wants_sums=True
):
    """dx and the buffers; what is not wanted is None."""
    M, N = x.shape
    programs, buffer_count, warps, locked = plan
    dx = None
    buffers = None
    locks = None
    if wants_dx:
        dx = torch.empty_like(x)
    if wants_sums:
        shape = (buffer_count, 2, N)
        buffers = torch.empty(shape, dtype=mean.dtype, device=x.device)
    if wants_sums and locked:
        lock_count = buffer_count
        if flaw == "no waiting":  # an experiment: each program has its own
            lock_count = programs
        locks = torch.zeros(lock_count, dtype=torch.int32, device=x.device)
    _layer_norm_bwd[(programs,)](
        dy_ptr=dy,
        x_ptr=x,
        w_ptr=w,
        mean_ptr=mean,
        rstd_ptr=rstd,
        dx_ptr=dx,
        buffers_ptr=buffers,
        locks_ptr=locks,
        M=M,
        buffers=buffer_count,
        N=N,
        BLOCK_SIZE=triton.next_power_of_2(N),
        FLAW=flaw,
        num_warps=warps,
    )
    return dx, buffers


# %%

# Scaffold: tensors of a backward pass, and the error of its sums.


def given(M, N):
    """dy, x, w, mean and rstd; and dw and db in float64."""
    torch.manual_seed(0)
    x = torch.randn(M, N, device=DEVICE).half()
    dy = torch.randn(M, N, device=DEVICE).half()
    w = torch.rand(N, device=DEVICE).half()
    wide = x.double()
    mean = wide.mean(dim=1)
    rstd = (wide.var(dim=1, correction=0) + 1e-5) ** -0.5
    dw = (dy * F.layer_norm(wide, (N,))).sum(dim=0)
    db = dy.double().sum(dim=0)
    return (dy, x, w, mean.float(), rstd.float()), torch.stack([dw, db])


def error(buffers, exact):
    """Relative error of the sum of all buffers: norm over norm."""
    difference = buffers.double().sum(dim=0) - exact
    return (difference.norm() / exact.norm()).item()


# %%
# Does it lose an addition? We let 70 programs add to 8 buffers, so that eight
# or nine of them share a lock. Then we compare the sum of all buffers with
# float64.

tensors, exact = given(70, 24)
dx, buffers = stage_1(*tensors, plan=(70, 8, 4, True))
print(f"relative error, 70 rows in 8 buffers: {error(buffers, exact):.0e}")

# %%
# The race
# --------
#
# Do we really need all three parts, the barrier, acquire, and release?
#
# We leave them out, one at a time, and run the kernel a hundred times.
# 32768 programs, one for each row, share 256 locks, and each program has a
# warp for every 128 columns.
# A run counts as wrong if its sums are off by more than 1e-5. A lost row is a
# larger error, and another order of the additions is a smaller one.

FLAWS = ["right", "no barrier", "no acquire", "no release"]

# %%

# Scaffold: a benchmark of wrong runs.


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=["512", "1024", "2048", "4096"],  # as points
        line_arg="provider",
        line_vals=FLAWS,
        line_names=FLAWS,
        ylabel="wrong runs of 100",
        plot_name="layer-norm-lock-race",
        args={"M": 32768, "dtype": torch.float16, "mode": "backward"},
    )
)
def race(M, N, dtype, mode, provider):
    """Runs of 100 in which dw or db differs from float64 by a relative error
    above 1e-5; the order of additions explains less."""
    if not ON_GPU:
        return 3 * [float("nan")]  # here one program follows the other
    N = int(N)
    tensors, exact = given(M, N)
    plan = (M, 256, N // 128, True)
    wrong = 0
    for _ in range(100):
        _, buffers = stage_1(*tensors, plan, flaw=provider)
        wrong += error(buffers, exact) > 1e-5
    return 3 * [wrong]


# %%

table = race.run(show_plots=ON_GPU, return_df=True).set_index("N")
if table.notna().all(axis=None):
    assert not table.iloc[:, 0].any()  # with all its parts it is right

# %%
# **What the figure shows.**
# With all its parts the lock is right: not one of the runs is wrong, at any
# width. On the H100, at 512, 1024, 2048 and 4096 columns, 100, 100, 100 and
# 100 of 100 runs are wrong without acquire, 100, 100, 100 and 0 without
# release, and 100, 87, 0 and 0 without the barrier.
#
# On the H200, 100, 100, 100 and 100 of 100 runs are wrong without acquire,
# 100, 100, 79 and 0 without release, and 100, 6, 0 and 0 without the barrier.
#
# **Why.**
# Without acquire, a program reads its buffer from L1 if an earlier program on
# the same SM has left it there. Programs on other SMs have added to the buffer
# since then, but nothing tells this L1. In each run there are 32768 visits to
# 256 buffers, so an SM often comes back to a buffer soon, and one stale value
# is enough to make a run wrong.
#
# The other two mistakes show only if a store is so late that meanwhile another
# program takes the lock and reads the buffer. In this figure both of them show
# where rows are narrow, and hide where rows are wide and programs have many
# warps. We cannot say why: these numbers are what we counted.
#
# **What follows.**
# A test that passes does not prove that a lock is right. At 4096 columns the
# lock without the barrier passes a hundred runs, and so does the lock without
# release. At 512 columns both of them fail in every run.
# At 1024 columns, the lock without the barrier fails in 87 runs of 100 on the
# H100, and in 6 on the H200: a test on one GPU says little about another one.
#
# The usual tools do not find the missing barrier either. NVIDIA's
# compute-sanitizer has one for such mistakes, ``racecheck``, but it only
# watches shared memory, and our buffers are in global memory. Triton's
# interpreter runs one program after the other, so it has no race at all.
#
# So where can you see that the barrier is missing? In the *PTX*, the assembly
# language that Triton compiles a kernel to. It does not depend on luck.
# With triton 3.6.0 and 3.7.1, the kernel ends with these three instructions:
# the last store, the barrier, and the exchange that frees the lock.
#
# * ``st.global.v4.b32``, ``bar.sync``, ``atom.global.gpu.release.exch.b32``;
# * without ``tl.debug_barrier()``: ``st.global.v4.b32``,
#   ``atom.global.gpu.release.exch.b32``.
#
# So in these versions nothing but our call puts a barrier there.
# Triton 3.9.0 adds one by itself.
# Triton's own tutorial `had no barrier until 2025
# <https://github.com/triton-lang/triton/pull/6307>`_.
#
# How many bytes does a lock save?
# --------------------------------
#
# A lock makes programs wait, so it should save something. Does it save
# traffic? If programs share buffers, there are fewer of them, and the second
# stage has less to read.

# %%

# Drawing: four rows add to two buffers; a second stage sums the buffers.

plt.figure(
    "Four rows add to two buffers; a second stage sums the buffers",
    figsize=(7.5, 3.2),
)


def draw_box(x, y, text, color):
    style = {"fc": color, "alpha": 0.5, "boxstyle": "square,pad=0.6"}
    plt.text(x, y, text, bbox=style, ha="center", va="center")


def draw_arrow(start, end):
    plt.annotate("", xy=end, xytext=start, arrowprops={"arrowstyle": "->"})


for row in range(4):
    buffer = row % 2
    draw_box(1, 3 - row, f"row {row}", f"C{buffer}")
    draw_arrow((1.8, 3 - row), (4, 2.5 - 2 * buffer))
for buffer in range(2):
    draw_box(5, 2.5 - 2 * buffer, f"buffer {buffer}", f"C{buffer}")
    draw_arrow((6, 2.5 - 2 * buffer), (8.2, 1.5))
draw_box(9, 1.5, "dw, db", "gray")
plt.text(3, 3.9, "stage 1: add, one at a time", ha="center")
plt.text(7.2, 3, "stage 2", ha="center")
plt.axis((0, 10, -0.6, 4.4))
plt.axis("off")
plt.show()

# %%
# Let's count the bytes for one column, with 4 programs and 2 buffers as in the
# picture. A program has two sums for a column, 8 bytes.
#
# - Each of the 4 programs stores its sums: 32 bytes.
# - The 2 programs that come first at their buffer have nothing to load. The
#   other 2 load what is there: 16 bytes.
# - Stage 2 loads both buffers: 16 bytes.
#
# That is 64 bytes. And with 4 buffers and no lock? The 4 programs store 32
# bytes, load nothing, and stage 2 loads 4 buffers, 32 bytes. It is 64 bytes
# again, and this is no accident. For :math:`P` programs and :math:`B` buffers
# the bytes of a column are
#
# .. math:: 8 \, \bigl(P + (P - B) + B\bigr) = 16 \, P
#
# :math:`B` is gone. What a shared buffer saves in stage 2, it costs in stage
# 1: **a lock saves memory, but no traffic.**
#
# We compare four plans:
#
# - **Own buffers**: the plan of `Layer normalization, both passes
#   <01-layer-norm.html>`_, with a buffer for each program, and no lock.
# - **Own locks**: the same, but each buffer has a lock. Nobody waits for it,
#   so it shows what else a lock costs: its instructions, and one more kernel
#   that clears all locks.
# - **Two at a lock**: two programs share a buffer and its lock. This is the
#   plan of our function.
# - **Lock each row**: a program for each row, and 256 locks, or 128 for wide
#   rows. Triton's tutorial does it much like this.

# %%

# Scaffold: programs and warps, from page 01.


def plan_backward(N):
    """Programs on each SM, and warps of each program."""
    if N <= 1024:
        return 6, 4
    if N <= 2048:
        return 4, 4
    if N <= 4096:
        return 3, 4
    if N < 8192:
        return 2, 4
    return 1, 16


# %%

NUM_SMS = 132  # of an H100
if ON_GPU:
    GPU = torch.cuda.get_device_properties(DEVICE)
    NUM_SMS = GPU.multi_processor_count


def own_buffers(M, N):
    """As many buffers as programs, and no lock."""
    per_sm, warps = plan_backward(N)
    programs = min(M, NUM_SMS * per_sm)
    return programs, programs, warps, False


def own_locks(M, N):
    """As many buffers as programs, each with a lock for which nobody waits."""
    programs, buffers, warps, _ = own_buffers(M, N)
    return programs, buffers, warps, True


def two_at_a_lock(M, N):
    """Half as many buffers, so that two programs share one."""
    programs, _, warps, _ = own_buffers(M, N)
    return programs, triton.cdiv(programs, 2), warps, True


def lock_each_row(M, N):
    """A program for each row, and a fixed number of buffers."""
    if N <= 8192:
        return M, min(M, 256), 4, True
    return M, min(M, 128), 8, True


PLANS = {
    "triton": two_at_a_lock,
    "own buffers": own_buffers,
    "own locks": own_locks,
    "lock each row": lock_each_row,
}

# %%

for N in (1024, 8192):
    print(f"{N} columns, {4096 * N * 2 / 1e6:.0f} MB a matrix of 4096 rows")
    for plan in PLANS.values():
        programs, buffers, _, _ = plan(4096, N)
        stored = 8 * buffers * N / 1e6  # two sums of 4 bytes for each column
        moved = 16 * programs * N / 1e6
        print(
            f"  {plan.__name__:14}{stored:5.1f} MB of buffers,"
            f"{moved:6.1f} MB moved for them"
        )

# %%
# At 8192 columns, half of the buffers saves 4.3 MB of memory. That is little
# beside three matrices of 67 MB each.
# A program for each row is another matter. Its sums make :math:`16 \, M`
# bytes a column, and the three matrices, in 16 bits, make only
# :math:`6 \, M`.
#
# A function to train with
# ------------------------
#
# Stage 2 is the kernel that adds up the buffers on `Layer normalization, both
# passes <01-layer-norm.html>`_. To this kernel it makes no difference how many
# programs have added to a buffer.


@triton.jit
def _layer_norm_bwd_add_up(
    buffers_ptr,  # (programs, WIDTH)
    grads_ptr,  # (WIDTH,): dw, then db
    programs,  # how many buffers there are
    WIDTH: tl.constexpr,  # 2 * N
    ROWS: tl.constexpr,  # buffers loaded at a time
    COLS: tl.constexpr,  # columns per program
):
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)

    # Each element of the tile has a sum of its own.
    total = tl.zeros((ROWS, COLS), buffers_ptr.dtype.element_ty)
    for first in range(0, programs, ROWS):
        rows = first + tl.arange(0, ROWS)[:, None]
        mask = (rows < programs) & (cols < WIDTH)
        offsets = rows * WIDTH + cols
        total += tl.load(buffers_ptr + offsets, mask=mask, other=0)

    # Add up the rows of the tile. Only this store rounds to the type of grads.
    tl.store(grads_ptr + cols, tl.sum(total, axis=0), mask=cols < WIDTH)


# %%

# Scaffold: the launch of the second kernel.


def add_up_buffers(buffers, dtype):
    """dw and db, as a (2, N) tensor, from (programs, 2, N) buffers."""
    programs, _, N = buffers.shape
    grads = torch.empty(2, N, dtype=dtype, device=buffers.device)
    columns_per_program = 16
    grid = (triton.cdiv(2 * N, columns_per_program),)
    _layer_norm_bwd_add_up[grid](
        buffers_ptr=buffers,
        grads_ptr=grads,
        programs=programs,
        WIDTH=2 * N,
        ROWS=256,
        COLS=columns_per_program,
        num_warps=8,
    )
    return grads


# %%
# The forward pass needs no lock, and it is that of `Layer normalization, both
# passes <01-layer-norm.html>`_, which also measures it.

# %%

# Scaffold: the forward pass, from page 01.


@triton.jit
def _layer_norm_fwd(
    x_ptr,  # (M, N), contiguous
    w_ptr,  # (N,); None counts as 1
    b_ptr,  # (N,); None counts as 0
    y_ptr,  # (M, N)
    mean_ptr,  # (M,): saved for the backward pass
    rstd_ptr,  # (M,): 1 / standard deviation, saved as well
    eps: tl.constexpr,  # added to the variance
    N: tl.constexpr,  # columns
    BLOCK_SIZE: tl.constexpr,  # tile width: a power of two, at least N
):
    # Program i takes row i. The index is in 64 bits, because M * N may be more
    # than 2**31.
    row = tl.program_id(0).to(tl.int64)

    # The columns of the tile, and which of them belong to the row.
    cols = tl.arange(0, BLOCK_SIZE)
    mask = cols < N

    # Load the row once.
    # Neighboring threads read neighboring addresses. Such loads are called
    # coalesced: the hardware serves them together, in a few wide requests.
    # We compute in the type of mean: float32, or float64 if x is float64.
    acc_dtype = mean_ptr.dtype.element_ty
    x = tl.load(x_ptr + row * N + cols, mask=mask, other=0).to(acc_dtype)

    # Masked elements are 0 and add nothing to the sum.
    mean = tl.sum(x) / N

    # Subtract the mean before squaring. The shorter formula, the mean of the
    # squares minus the square of the mean, loses digits if the mean is large.
    # A masked element would now be -mean, so set it back to 0.
    x_centered = tl.where(mask, x - mean, 0)
    variance = tl.sum(x_centered * x_centered) / N
    rstd = 1 / tl.sqrt(variance + eps)

    # Save two numbers per row. With them, the backward pass gets x_hat back
    # from x.
    tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)

    # Scale and shift. If w_ptr is None, its lines are not even compiled.
    # Masked elements of w and b may hold anything, for they are never stored.
    y = x_centered * rstd
    if w_ptr is not None:
        w = tl.load(w_ptr + cols, mask=mask).to(acc_dtype)
        y = y * w
    if b_ptr is not None:
        b = tl.load(b_ptr + cols, mask=mask).to(acc_dtype)
        y = y + b

    # Store the row once. This rounds it to the type of y.
    tl.store(y_ptr + row * N + cols, y, mask=mask)


def warps_for(tile_bytes):
    """One warp for every 4 KB of a tile, but at least 4 and at most 16."""
    warps = tile_bytes // 4096
    return min(max(warps, 4), 16)


def forward_in_registers(x, w, b, eps):
    """y, mean and rstd of a contiguous (M, N) x; w and b may be None."""
    M, N = x.shape
    y = torch.empty_like(x)
    # 16-bit rows are summed in float32.
    acc_dtype = torch.promote_types(x.dtype, torch.float32)
    mean = torch.empty(M, dtype=acc_dtype, device=x.device)
    rstd = torch.empty(M, dtype=acc_dtype, device=x.device)
    block_size = triton.next_power_of_2(N)
    _layer_norm_fwd[(M,)](
        x_ptr=x,
        w_ptr=w,
        b_ptr=b,
        y_ptr=y,
        mean_ptr=mean,
        rstd_ptr=rstd,
        eps=eps,
        N=N,
        BLOCK_SIZE=block_size,
        num_warps=warps_for(block_size * x.element_size()),
    )
    return y, mean, rstd


# %%
# The autograd function ties both passes together.

# %%

# Scaffold: layouts and types of a call, as layer norm wants them.

MAX_COLUMNS = 16384  # wider rows do not fit into registers


def contiguous_or_none(tensor):
    """The tensor with its elements side by side; copied only if needed."""
    if tensor is None:
        return None
    return tensor.contiguous()


def dtype_of_weight_gradients(w, b, acc_dtype):
    """The type of w and b, if they agree; acc_dtype, if they do not.

    Autograd then rounds each gradient to the type of its parameter.
    """
    dtypes = {tensor.dtype for tensor in (w, b) if tensor is not None}
    if len(dtypes) == 1:
        return dtypes.pop()
    return acc_dtype


# %%


class LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, b, eps, plan):
        x = contiguous_or_none(x)
        w = contiguous_or_none(w)
        b = contiguous_or_none(b)
        y, mean, rstd = forward_in_registers(x, w, b, eps)
        ctx.save_for_backward(x, w, mean, rstd)
        ctx.plan = plan(*x.shape)
        ctx.grads_dtype = dtype_of_weight_gradients(w, b, mean.dtype)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable  # no second derivatives
    def backward(ctx, dy):
        wants_dx, wants_dw, wants_db, _, _ = ctx.needs_input_grad
        dx, buffers = stage_1(
            dy.contiguous(),
            *ctx.saved_tensors,
            plan=ctx.plan,
            wants_dx=wants_dx,
            wants_sums=wants_dw or wants_db,
        )
        dw = None
        db = None
        if buffers is not None:
            grads = add_up_buffers(buffers, ctx.grads_dtype)
            if wants_dw:
                dw = grads[0]
            if wants_db:
                db = grads[1]
        # One gradient for each argument of forward; eps and plan have none.
        return dx, dw, db, None, None


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


def layer_norm(
    x, normalized_shape, weight=None, bias=None, eps=1e-5, plan=two_at_a_lock
):
    """Normalize x over its last dimensions, at most 16384 numbers.

    The arguments are those of PyTorch's function. plan says how many programs
    of the backward pass share how many locks.
    """
    if isinstance(normalized_shape, int):
        normalized_shape = [normalized_shape]
    shape = torch.Size(normalized_shape)
    check_arguments(x, shape, weight, bias, eps)
    N = shape.numel()
    if N > MAX_COLUMNS:
        raise ValueError(
            f"normalized_shape has {N} columns: 1 to {MAX_COLUMNS} are taken"
        )

    # The kernels only know matrices, so all other dimensions become rows.
    if weight is not None:
        weight = weight.reshape(N)
    if bias is not None:
        bias = bias.reshape(N)
    y = LayerNorm.apply(x.reshape(-1, N), weight, bias, eps, plan)
    return y.reshape(x.shape)


# %%
# Is it right, with each of the plans? We compare each element with PyTorch's
# layer norm in float64, as on `Layer normalization, both passes
# <01-layer-norm.html>`_.

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
for plan in PLANS.values():
    print(plan.__name__, end=": ")
    check(lambda *t: layer_norm(*t, plan=plan), *shape, torch.float16)

# %%
# What does waiting cost?
# -----------------------
#
# How do we measure the waiting and nothing else?
# If we compare a shared lock with a buffer for each program, several things
# change at once: who waits, how many bytes are stored and loaded where, and
# what instructions the kernel has.
#
# So we change as little as possible. In this experiment each program takes a
# lock of its own, for which nobody waits, and then it adds to the same shared
# buffer as before, with as many loads and stores.
# Its sums are wrong, of course: that is the race. But its time tells us
# roughly what the kernel would take if nobody had to wait. The difference to
# the real lock is the waiting.
#
# We let 1, 2, 4 and up to 128 programs share a buffer. By our formula they all
# move the same bytes. The clock is that of `Layer normalization, both passes
# <01-layer-norm.html>`_.

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

# Scaffold: a benchmark of programs that share a lock.


def backward(dy, x, w, mean, rstd, plan, flaw=""):
    """dx, dw and db of both stages, without autograd."""
    dx, buffers = stage_1(dy, x, w, mean, rstd, plan, flaw)
    dw, db = add_up_buffers(buffers, w.dtype)
    return dx, dw, db


SHARED_BY = [1, 2, 4, 8, 16, 32, 64, 128]


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["programs"],
        x_vals=SHARED_BY,
        x_log=True,
        y_log=True,
        xlabel="programs that share a buffer",
        line_arg="provider",
        line_vals=["4096", "4096, no waiting", "1024", "1024, no waiting"],
        line_names=[
            "N = 4096",
            "N = 4096, no waiting",
            "N = 1024",
            "N = 1024, no waiting",
        ],
        ylabel="µs",
        plot_name="layer-norm-lock-waiting",
        args={"M": 4096, "dtype": torch.float16, "mode": "backward"},
    )
)
def bench_waiting(programs, M, dtype, mode, provider):
    """Device time: a CUDA graph of several calls, each with inputs of its own
    and after L2 was overwritten, less the graph without the calls; median, 20%
    and 80% quantiles. No waiting: each program takes a lock of its own, so
    that the sums are wrong."""
    if not ON_GPU:
        return 3 * [float("nan")]
    N, _, experiment = provider.partition(", ")
    N = int(N)
    all_programs, _, warps, _ = own_buffers(M, N)
    buffers = triton.cdiv(all_programs, int(programs))
    plan = (all_programs, buffers, warps, True)

    def prepare():
        tensors, _ = given(M, N)
        return lambda: backward(*tensors, plan, experiment)

    return device_time(prepare)


# %%

times = bench_waiting.run(show_plots=ON_GPU, return_df=True)
times = times.astype({"programs": int}).set_index("programs")
if times.notna().all(axis=None):  # it was measured
    print("µs of waiting, with so many programs at a lock")
    for column in (0, 2):
        waiting = times.iloc[:, column] - times.iloc[:, column + 1]
        print(times.columns[column].split(" (")[0])
        print(waiting.to_string(float_format="%.1f"))

# %%
# **What the figure shows.**
# On the H100, at 4096 columns, the backward pass takes 46.0 µs with one
# program at a lock, 45.5 µs with two, 67.0 µs with 16, and 212.2 µs with 128.
# Without waiting the four numbers are 46.0, 47.8, 45.8 and 50.3 µs. At 1024
# columns it takes 18.2, 17.7, 32.7 and 150.6 µs, and without waiting 18.4,
# 19.7, 18.1 and 22.5 µs.
#
# On the H200, at 4096 columns, the backward pass takes 37.5 µs with one
# program at a lock, 37.7 µs with two, 60.8 µs with 16, and 207.1 µs with 128.
# Without waiting the four numbers are 37.6, 39.1, 38.0 and 43.0 µs.
#
# Here and below, the speeds and times in the text are those of the H100
# wherever we do not speak of the H200.
#
# The last points have fewer programs at a lock than the axis says, because the
# number of buffers is rounded up. At 4096 columns 396 programs share 7 buffers
# at the point 64, and 4 at the point 128: at most 57 and 99 programs meet at a
# lock. At 1024 columns 792 programs share 13 and 7 buffers, and at most 61 and
# 114 meet.
#
# **How precise is this?**
# With one program at a lock nobody waits, so both lines of a width should
# begin at the same point. They differ by at most 0.9% there. With two
# programs, though, the pass takes 2.3 µs longer without waiting at 4096
# columns, and 1.9 µs longer at 1024 columns. So our experiment changes more
# than the waiting. One such change is this: behind a lock, a program only
# loads what another one has just stored, so it is in L2. Without waiting, it
# may load before anything has been stored. The clock has overwritten L2, so
# these loads have to come from DRAM. We have not measured whether this
# explains it. But a difference as small as that says nothing about waiting.
# With eight programs at a lock, waiting makes the pass longer by 8.1 µs and
# 4.8 µs, which is clearly more.
#
# **Why.**
# Without waiting, little changes. Up to 32 programs the pass takes 45.5 to
# 47.8 µs at 4096 columns, and 17.7 to 19.7 µs at 1024 columns. This is our
# formula: the number of buffers does not change the traffic. With fewer
# buffers the lines rise, to 50.3 and 22.5 µs. Perhaps that is because many
# programs load and store the same few addresses, but we have not measured it.
#
# With waiting, programs that share a lock go through it one after the other.
# If all of them come at the same time, the last one waits for all the others.
# At 4096 columns, from 57 to 99 programs, each program more makes the pass
# longer by 1.75 µs, and from 16 to 57 by 1.75 µs. At 1024 columns, it is 1.22
# µs from 61 to 114 programs, and 1.18 µs from 16 to 61. So that is what a turn
# takes: an exchange, loads that have to come from L2, stores, a barrier, and
# another exchange, each after the one before. A wide row takes longer, because
# a single SM has to load and store more bytes.
#
# On the H200, a turn takes just as long, 1.76 µs at 4096 columns and 1.21 µs
# at 1024: a turn is a trip to L2 and back, and the faster DRAM does not
# shorten it. But the rest of the pass is shorter there, so where 99 or 114
# programs share one lock, it takes 4.8 and 7.1 times as long as without
# waiting.
#
# With few programs at a lock the waiting is shorter than that. From two to
# four programs, each program more adds only 0.91 µs at 4096 columns, and 0.58
# µs at 1024 columns, because they do not come at the same time: one is still
# busy with its rows while another one has the lock.
#
# **What follows.**
# Two programs at a lock take no longer than one. Where 99 or 114 share one, it
# takes 4.2 and 6.7 times as long as without waiting, so they spend most of
# their time waiting.
#
# What is the lock worth?
# -----------------------
#
# Here are the four plans at many widths, and the experiment without waiting
# for the plan that locks each row. The other three lines are PyTorch's layer
# norm, the same function through ``torch.compile``, and the copy, which reads
# two matrices and writes one.

# %%

# Scaffold: the ceiling.


@triton.jit
def _move(
    source_ptr,  # (READS, count)
    target_ptr,  # (WRITES, count)
    count,
    READS: tl.constexpr,
    WRITES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    count = tl.cast(count, tl.int64)
    start = tl.program_id(0).to(tl.int64) * BLOCK_SIZE
    index = start + tl.arange(0, BLOCK_SIZE)
    mask = index < count
    total = tl.load(source_ptr + index, mask=mask)
    for i in tl.static_range(1, READS):
        total += tl.load(source_ptr + i * count + index, mask=mask)
    for i in tl.static_range(WRITES):
        tl.store(target_ptr + i * count + index, total, mask=mask)


def ceiling(reads, writes, shape, dtype):
    """GB/s of a kernel that reads and writes so many matrices and does nothing
    else. Several tiles are tried; the best one counts."""
    M, N = shape
    speeds = []
    for block_size, warps in (
        (1024, 1), (2048, 1), (4096, 2), (4096, 4), (8192, 4), (8192, 8)
    ):  # fmt: skip

        def prepare(block_size=block_size, warps=warps):
            source = torch.randn(reads, M, N, device=DEVICE).to(dtype)
            target = torch.empty(writes, M, N, dtype=dtype, device=DEVICE)

            def move():
                _move[(triton.cdiv(M * N, block_size),)](
                    source_ptr=source,
                    target_ptr=target,
                    count=M * N,
                    READS=reads,
                    WRITES=writes,
                    BLOCK_SIZE=block_size,
                    num_warps=warps,
                )

            return move

        bytes_moved = (reads + writes) * M * N * dtype.itemsize
        speeds.append(speed(bytes_moved, prepare))
    return max(speeds)


# %%

# Scaffold: torch.compile at its best.


def best_of_three_compilations(function, measure):
    """The best of what measure(compiled function) returns.

    torch.compile tries several forms of a kernel and keeps the fastest. Which
    one that is can depend on luck, so it chooses three times.
    """
    # A choice is not kept on disk, nor in memory.
    torch._inductor.config.autotune_local_cache = False
    # We run a backward pass many times, so torch.compile must not reuse the
    # memory of what the forward pass saved for it.
    torch._functorch.config.donated_buffer = False
    results = []
    for _ in range(3):
        torch._dynamo.reset()
        torch._inductor.utils.clear_caches()
        results.append(measure(torch.compile(function, dynamic=False)))
    return max(results)


# %%

# Scaffold: a report.


def report(benchmark):
    """Draw a benchmark, and print each speed in % of the ceiling."""
    table = benchmark.run(show_plots=ON_GPU, return_df=True)
    # perf_report writes 1024.0 and "Copy (GB/s)": we want 1024 and "Copy".
    table = table.astype({"N": int}).set_index("N")
    table.columns = [column.split(" (")[0] for column in table.columns]
    if table.isna().all(axis=None):
        print("Timing needs a GPU; the page shows recorded figures.")
        return
    percent = 100 * table.div(table["Copy"], axis="index")
    percent = percent.drop(columns="Copy")
    print("speed in % of the speed of the copy")
    print(percent.to_string(float_format="%.0f"))


# %%

# Scaffold: a benchmark of the backward pass.

NAMES = {
    "triton": "Two at a lock",
    "own buffers": "Own buffers",
    "own locks": "Own locks",
    "lock each row": "Lock each row",
    "lock each row, no waiting": "No waiting",
    "torch": "PyTorch",
    "torch.compile": "torch.compile",
    "copy": "Copy",
}


def pytorch(x, shape, w, b):
    return F.layer_norm(x, shape, w, b)


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=[512 * i for i in (2, 4, 6, 8, 9, 12, 16, 17, 31)],
        line_arg="provider",
        line_vals=list(NAMES),
        line_names=list(NAMES.values()),
        ylabel="GB/s",
        plot_name="layer-norm-lock-backward",
        args={"M": 4096, "dtype": torch.float16, "mode": "backward"},
    )
)
def bench_backward(M, N, dtype, mode, provider):
    """Device time: a CUDA graph of several calls, each with inputs of its own
    and after L2 was overwritten, less the graph without the calls; median, 20%
    and 80% quantiles. Copy: the best of six tiles. No waiting: each program
    takes a lock of its own, so that the sums are wrong."""
    if not ON_GPU:
        return 3 * [float("nan")]
    bytes_moved = 3 * M * N * dtype.itemsize  # read x and dy, write dx

    def measure(function):
        def prepare():
            x, w, b, dy = inputs(M, N, dtype)
            y = function(x, (N,), w, b)
            return lambda: torch.autograd.grad(
                y, (x, w, b), dy, retain_graph=True
            )

        return speed(bytes_moved, prepare)

    def prepare_without_waiting():
        tensors, _ = given(M, N)
        plan = lock_each_row(M, N)
        return lambda: backward(*tensors, plan, "no waiting")

    if provider == "copy":
        return ceiling(reads=2, writes=1, shape=(M, N), dtype=dtype)
    if provider == "torch":
        return measure(pytorch)
    if provider == "torch.compile":
        return best_of_three_compilations(pytorch, measure)
    if provider == "lock each row, no waiting":
        return speed(bytes_moved, prepare_without_waiting)
    plan = PLANS[provider]
    return measure(lambda *tensors: layer_norm(*tensors, plan=plan))


# %%

report(bench_backward)

# %%
# **What the figure shows.**
# On the H100, two at a lock reach 56% to 81% of the copy, own locks reach 54%
# to 80%, and own buffers 59% to 81%. A lock for each row reaches 27% to 43%,
# and without waiting it would be 33% to 43%. Up to 8704 columns no plan is
# faster than own buffers. They take up to 5% less time than two at a lock, the
# plan of our function. Two at a lock are 1.6 to 2.2 times as fast as PyTorch,
# and 1.6 to 2.1 times as fast as torch.compile. But a lock for each row is
# slower than PyTorch at 1024 and 2048 columns, and from 8192 columns on.
#
# On the H200, two at a lock reach 49% to 71% of the copy, own locks reach 47%
# to 70%, and own buffers 52% to 72%. A lock for each row reaches 23% to 36%,
# and without waiting it would be 25% to 36%. Two at a lock are 1.6 to 2.1
# times as fast as PyTorch, and 1.3 to 2.2 times as fast as torch.compile. A
# lock for each row is slower than PyTorch at every width there, and up to 8704
# columns no plan is faster than own buffers there either.
#
# **Is it the lock?**
# We compare two plans at a time.
#
# - *The lock itself.* Own buffers and own locks have as many buffers, and
#   nobody waits. But own locks must be cleared, by one more small kernel, and
#   then taken and freed. They take 1.5 µs longer at 1024 columns, 1.1 µs at
#   4096 columns, and 2.5 µs at 8192 columns.
# - *Waiting.* Own locks and two at a lock run the same compiled kernel, and by
#   our formula they move the same bytes. If two programs waited for each other
#   for long, two at a lock would take more time. But they take less, at each
#   of the nine widths, by 0.2 to 1.0 µs. Their second stage has half as many
#   buffers to load, which may be the reason. We have not timed the stages
#   apart.
#   On the H200, two at a lock take up to 0.5 µs less than own locks at some
#   widths, and up to 0.4 µs more at others. The latter is at most 0.5% of the
#   pass. None of this looks like waiting.
#
# At 15872 columns, though, two at a lock reach 71% of the copy, and own
# buffers reach 62%. Is this the merit of the lock? It is not: own locks, which
# nobody shares, reach 70%.
# The kernel with a lock is simply compiled in another way.
# A row of 15872 columns does not fit into the registers of a program, so the
# compiler spills: a thread of the kernel without a lock keeps 128 bytes in
# memory, and a thread of the kernel with a lock 80 bytes.
# Another version of the compiler may turn it around.
# On the H200 it is the same here: two at a lock reach 58%, own buffers 53%,
# and own locks 58%.
#
# **Why is a lock for each row so slow?**
# For each column, its sums make 16 bytes a row, and the matrices make 6 bytes.
# If all of that came from DRAM or went there, the plan could reach at most 6 /
# 22 = 27% of the copy. From 2048 columns on it reaches 33% to 43%, so a part
# of that traffic must stay in L2, into which its buffers fit.
# On the H200, it reaches 31% to 36% from 2048 to 8192 columns, but 25% and 27%
# at 8704 and 15872 columns. At those two widths its speed does not tell us
# where the traffic goes.
#
# At 1024 columns it reaches 27%. There programs wait for each other: without
# waiting, it would take 26% less time. At 2048 columns it would be 7% less,
# and at 3072 columns 3%. From 4096 columns on, the two differ by at most 2.3%,
# and at five of six widths the plan that waits is the faster one. So there it
# hardly waits, and what is left is traffic.
# On the H200, it would take 27%, 7% and 3% less time at these three widths,
# and from 4096 columns on the two plans differ as little as on the H100.
#
# Why do wide rows not wait? Their programs need more registers, so fewer of
# them fit into an SM at a time: nine at 1024 columns, three at 4096 columns,
# and two at 8192 columns. So at 1024 columns 1188 programs run at a time, more
# than four for each of the 256 locks. At 4096 columns 396 run at a time, one
# or two for each lock, and at 8192 columns 264, which is hardly more than one.
#
# Do they really move the same bytes?
# -----------------------------------
#
# We have counted bytes by hand. NVIDIA's profiler ``ncu`` counts what passes
# through L2, and we divide that by the bytes of the three matrices.

# %%

# Scaffold: a benchmark that ncu counts.

COUNTED = [*PLANS, "lock each row, no waiting", "copy"]


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=["1024", "4096", "8192", "15872"],  # as points
        line_arg="provider",
        line_vals=COUNTED,
        line_names=[NAMES[provider] for provider in COUNTED],
        ylabel="bytes of L2 per byte counted",
        plot_name="layer-norm-lock-l2",
        args={
            "M": 4096,
            "dtype": torch.float16,
            "mode": "backward",
            "counter": "lts__t_bytes.sum",
        },
    )
)
def traffic(M, N, dtype, mode, counter, provider):
    """Bytes that pass through L2 in a backward pass, over those of three
    matrices."""
    if not ON_GPU:
        return 3 * [float("nan")]
    N = int(N)
    tensors, _ = given(M, N)
    dy, x, *_ = tensors

    def call():
        if provider == "copy":
            return torch.add(x, dy)
        name, _, experiment = provider.partition(", ")
        plan = PLANS[name]
        return backward(*tensors, plan(M, N), experiment)

    call()  # compiles the kernels
    by_hand = 3 * x.nbytes
    with torch.cuda.nvtx.range(f"counted {provider} {N} per {by_hand}"):
        call()
    return 3 * [float("nan")]  # only ncu knows


# %%

traffic.run(show_plots=ON_GPU)

# %%
# **What the figure shows.**
# On the H100, at 4096 columns, the addition of two matrices, which is our copy
# here, is at 1.53 and not at 1: L2 moves about half as much again as a kernel
# asks for. Two at a lock are at 1.97 there, own locks at 1.97, and own buffers
# at 1.94. A lock for each row is at 5.67, and at 5.68 without waiting. At 1024
# columns the five numbers are 2.60, 2.57 and 2.42, and 6.43 and 5.79. At 15872
# columns two at a lock and own locks are at 2.42 and 2.43, and own buffers at
# 2.67.
# On the H200, at 1024 columns, the five numbers are 2.42, 2.44 and 2.37, and
# 5.90 and 5.61. At the other widths, the counts of the two cards differ by at
# most 1.5%.
#
# **Why.**
# At 4096 columns there are 396 programs, so the sums are 16 × 396 bytes a
# column beside 6 × 4096 bytes of the matrices, 26% more. A lock for each row
# has 16 × 4096 bytes, 267% more. Multiplied by the number of the copy, that is
# 1.92 for the first three and 5.59 for the last.
#
# At 1024 columns there are 792 programs, and our count is 2.40 for the first
# three. Own buffers are near that, but the two plans with locks have more.
# Own locks have 3.8 MB more than own buffers there, and 3.3 MB more at 4096
# columns, where it is a smaller part of the whole. A few hundred locks are a
# few KB, so what they hold does not explain it, and we do not know what does.
# On the H200, own locks have less of that, 1.7 MB at 1024 columns and 1.8 MB
# at 4096.
# A lock for each row has more traffic with waiting than without at 1024
# columns. That fits what we saw above: a program that waits exchanges again
# and again, each exchange goes through L2, and at 4096 columns it hardly
# waits.
#
# At 15872 columns our count is 1.67 for the first three. What they have above
# that are spilled values: each is written once for each row, and 512 threads
# with 128 bytes each make 64 KB beside the 93 KB that a row of the three
# matrices has. With 80 bytes it is 40 KB. Once we add them and multiply by the
# number of the copy, our count becomes 2.72 for own buffers, and 2.33 for the
# two plans with locks.
#
# **What follows.**
# The lock saves no traffic, as we have counted, and it even adds a little.
# Where the plans with locks are faster, at 15872 columns, their kernel moves
# fewer spilled bytes.
#
# Where PyTorch or a library is better
# ------------------------------------
#
# In our figure neither PyTorch nor torch.compile is faster than two at a lock
# at any width. But:
#
# - **You rarely need a lock.** Own buffers have no more traffic, nobody waits,
#   no plan is faster up to 8704 columns, and the sums are the same in every
#   run. Use a lock where there is not enough memory for a buffer for each
#   program. For layer norm there is.
# - **The last bits may change.** If three or more programs share a lock, they
#   come in any order. The sum of three numbers depends on their order, so
#   ``dw`` and ``db`` can differ from run to run. With two at a lock they
#   cannot: a + b is b + a.
# - **Atomic additions need no lock.** `Who adds up the rows?
#   <02-summing-rows.html>`_ measures ``tl.atomic_add``. A lock can protect
#   more than an addition, several rows at a time for instance, and that is
#   when you need one.
# - **PyTorch can do more.** It has second derivatives and rows of any width.
# - **Libraries have kernels of their own.** `Every width
#   <11-every-width.html>`_ measures them.
#
# Exercise 1: one launch, no lock
# -------------------------------
#
# Can stage 1 do the work of stage 2, too?
# The last program to finish could add up all the buffers. But how does a
# program know that it is the last one?
#
# In this exercise ``out`` should be the sum of ``dy * dy`` over the rows.
# The kernel below stops when each program has stored its row in its buffer.
# Let the programs count how many of them are done, and let the last one add up
# the buffers. It adds them in one order, so all runs give the same bits.
# The list of wrong columns should be empty. As we have seen, that does not
# prove that your barrier and ``sem`` are right, so compare them with the
# solution.
#
# **Hint 1.** ``tl.atomic_add`` adds to a number in memory and returns what was
# there before. What does the last of ten programs get back?
#
# **Hint 2.** The count tells others that your row is stored, and it tells you
# that theirs are. So it is a release and an acquire in one:
# ``sem="acq_rel"``.
#
# **Hint 3.** One thread counts for all. What must all the threads have done
# before?


@triton.jit
def _one_launch(
    dy_ptr,  # (programs, N)
    buffers_ptr,  # (programs, N): the row of each program, squared
    count_ptr,  # (1,): 0 at the start
    out_ptr,  # (N,): the sum of all buffers
    N: tl.constexpr,  # columns
    BLOCK: tl.constexpr,  # tile width: a power of two, at least N
):
    program = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    row = tl.load(dy_ptr + program * N + cols, mask=cols < N, other=0)
    tl.store(buffers_ptr + program * N + cols, row * row, mask=cols < N)
    # to do: count; the last program sums the buffers


def exercise_1(kernel):
    """Print the wrong columns, and say whether there is none."""
    _, _, _, dy = inputs(10, 24, torch.float32)
    buffers = torch.empty_like(dy)
    count = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    out = torch.full_like(dy[0], -1)
    kernel[(10,)](
        dy_ptr=dy,
        buffers_ptr=buffers,
        count_ptr=count,
        out_ptr=out,
        N=24,
        BLOCK=32,
    )
    wrong = ~torch.isclose(out, (dy * dy).sum(dim=0))
    print("wrong columns:", wrong.nonzero().flatten().tolist())
    return not wrong.any()


exercise_1(_one_launch)

# %%

# Solution 1


@triton.jit
def _one_launch_1(
    dy_ptr,
    buffers_ptr,
    count_ptr,
    out_ptr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    row = tl.load(dy_ptr + program * N + cols, mask=cols < N, other=0)
    tl.store(buffers_ptr + program * N + cols, row * row, mask=cols < N)
    # All threads of this program have stored, and then one of them counts.
    tl.debug_barrier()
    before = tl.atomic_add(count_ptr, 1, sem="acq_rel")
    # Are we the last one? Then all the others have stored.
    if before == tl.num_programs(0) - 1:
        total = tl.zeros((BLOCK,), tl.float32)
        for buffer in range(tl.num_programs(0)):
            offsets = buffers_ptr + buffer * N + cols
            total += tl.load(offsets, mask=cols < N, other=0)
        tl.store(out_ptr + cols, total, mask=cols < N)


assert exercise_1(_one_launch_1)

# %%
# What we learned
# ---------------
#
# These are the plans of this page: what their sums move for each column beside
# the 6 bytes a row of the matrices, how fast they are on the H100, and why.
#
# - **Own buffers** move 16 bytes a program and reach 59% to 81% of the copy.
#   Nobody waits.
# - **Own locks** move the same bytes and reach 54% to 80%. The lock itself
#   costs 1.1 to 2.8 µs up to 8704 columns.
# - **Two at a lock** move the same bytes and reach 56% to 81%. They need half
#   of the memory, and wait too little for us to see it.
# - **A lock for each row** moves 16 bytes a row and reaches 27% to 43%. There
#   is far more to move, and at 1024 columns programs wait for each other.
#
# And for kernels in general:
#
# - Adding to memory means to read, add and write. Without a lock or an atomic
#   addition, what another program writes in between is lost.
# - A lock is an exchange with acquire, the work, a barrier, and an exchange
#   with release. If a part is missing, tests may still pass: look at the PTX.
# - To find out what waiting costs, take it out and measure what is left, even
#   if the results are wrong then. Measure it where nobody should wait, too: it
#   shows what else the experiment changes.
# - Count bytes before you share buffers. Here it saved memory, but no traffic.
#
# **Next:** nobody waits for a lock any more, but programs still wait for
# memory. `Loads in flight <04-loads-in-flight.html>`_ keeps it busy.
