r"""
Programs that share a row
=========================

How do you normalize a row of a million columns (2 MB) by reading it once?
Many programs hold it together, each of them a slice in registers, and they
tell each other their sums while they work.

No program has room for such a row, and `two sweeps <07-two-sweeps.html>`_ have
to read it twice. All programs of a GPU together have room for it.
But then each program needs to know what the others have found, while all of
them run. On this page they pass each other notes through memory. We start with
two programs, one row and a single note, and see what can go wrong with it.

**What you will learn**

- How programs tell each other numbers while they run, and how such a message
  can arrive too early, by halves, or not at all.
- How to write a load and a store in PTX, the assembly language of NVIDIA's
  GPUs, where Triton has none that fits.
- What a cooperative launch promises, how to ask before it whether all programs
  fit on the GPU, and what to do if they do not.
- How to hide the time that a message takes: work on one tile while the message
  about another one is on its way.

**What you need:** `Two sweeps, and a variance that stays right
<07-two-sweeps.html>`_ for the statistics, and `A lock <03-lock.html>`_ for
what may happen between programs. You don't need a GPU.
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
# Two programs, one row, and a note
# ---------------------------------
#
# Here is a row of eight numbers. Two programs share it: program 0 has the
# first four, and program 1 has the other four. Both want the sum of the row.

row = torch.arange(1.0, 9.0)
slices = row.reshape(2, 4)
print("program 0 has", slices[0].tolist(), "with sum", slices[0].sum().item())
print("program 1 has", slices[1].tolist(), "with sum", slices[1].sum().item())
print("both need", row.sum().item())

# %%
# Each of them adds up its own slice and needs one number from the other.
# So each one writes a note: there is a place in memory for the sum of program
# 0, and another one for the sum of program 1. A program writes its own sum
# and reads that of its neighbor.
#
# What can go wrong? We watch the note of program 0. Its place holds 0 at
# first, and program 1 reads it.
#
# **First try: just read it.** Nothing says that program 0 has got as far as
# program 1. If it is late, program 1 reads 0, and takes 0 + 26 = 26 for the
# sum of the row.
#
# **Second try: a flag beside the note.** Program 0 writes its sum, 10, and
# then a flag, 1. Program 1 reads the flag until it is 1, and then the sum. But
# stores may overtake each other, as we have seen in `A lock <03-lock.html>`_:
# program 1 may see the flag before the sum, and again it finds 0 + 26 = 26.
# A *release* on one side and an *acquire* on the other prevent that. They also
# cost time. A program is many threads, which have to meet at a barrier
# before the flag may be set, and a release waits until all that the program
# has stored so far, such as its part of ``y``, can be seen.
#
# **Third try: the note is its own flag.** Before the kernel starts, we fill
# the places with a value that no sum can ever have. Let's call it *empty*.
# Program 1 reads the place of program 0 until it is not empty any more, and
# what it has read then is the sum. There is no second thing to wait for, so
# it does not matter in which order stores arrive.

# %%

# Drawing: three ways to read a note, and what comes of them.

plt.figure(
    "Program 1 reads the sum of program 0. First try: it reads 0 before 10 is "
    "written, and finds 26. Second try: it sees the flag before the 10, reads "
    "0, and finds 26. Third try: it reads until the note is not empty, gets "
    "10, and finds 36",
    figsize=(7.5, 6),
)


def draw_step(start, height, text, color):
    plt.barh(height, 1.9, left=start, height=0.8, color=color, alpha=0.4)
    plt.text(start + 0.95, height, text, ha="center", va="center")


def draw_memory(height, values):
    """What program 1 would see in memory in each step."""
    for step, value in enumerate(values):
        plt.text(2 * step + 0.95, height, value, ha="center", va="center")


draw_step(0, 10, "add up", "C0")
draw_step(2, 10, "add up", "C0")
draw_step(4, 10, "write 10", "C0")
draw_step(2, 9, "read 0", "C1")
draw_step(4, 9, "0 + 26 = 26", "C1")
draw_memory(8, ["0", "0", "10", "10"])
draw_step(0, 6, "write 10", "C0")
draw_step(2, 6, "flag: 1", "C0")
draw_step(4, 5, "flag? 1", "C1")
draw_step(6, 5, "read 0: 26", "C1")
draw_memory(4, ["0, flag 0", "0, flag 0", "0, flag 1", "0, flag 1"])
draw_step(0, 2, "add up", "C0")
draw_step(2, 2, "write 10", "C0")
draw_step(0, 1, "read: empty", "C1")
draw_step(2, 1, "read: empty", "C1")
draw_step(4, 1, "read 10", "C1")
draw_step(6, 1, "10 + 26 = 36", "C1")
draw_memory(0, ["empty", "empty", "10", "10"])
plt.text(4, 10.8, "first try", ha="center", va="center")
plt.text(4, 6.8, "second try", ha="center", va="center")
plt.text(4, 2.8, "third try", ha="center", va="center")
plt.yticks(
    [10, 9, 8, 6, 5, 4, 2, 1, 0],
    3 * ["program 0", "program 1", "1 would see"],
)
plt.xticks([])
plt.xlabel("time")
plt.axis((0, 8, -0.7, 11.3))
plt.grid(visible=False)
plt.show()

# %%
# A word that says whether it has arrived
# ---------------------------------------
#
# Two questions are left: what if we need two numbers, and which value can no
# sum have?
#
# For a layer norm a program has to tell the others *two* float32 numbers, a
# mean and a sum of squared distances. If these were two notes, the reader
# would have to wait for each of them. But two float32 numbers have 64 bits,
# and a GPU can store and load 64 bits at once: others see all of them or none.
# So we put both numbers into one integer of 64 bits, a *word*.
#
# A float32 number whose eight exponent bits are all 1 is not a number (NaN),
# unless all bits of its fraction are 0. There are many NaNs, and they are of
# two kinds. If an operation gives NaN, it is a *quiet* one, with the highest
# bit of the fraction set. The others are called *signaling*, and no arithmetic
# gives them. Our empty word is two of these. So even a row that holds NaN or
# infinity gives words that differ from ``EMPTY``.

EMPTY = 0x7F800001_7F800001


def word_of(a, b):
    """Two float32 numbers as an integer of 64 bits: a is its lower half."""
    return torch.tensor([a, b]).view(torch.int64).item()


def numbers_of(word):
    return torch.tensor([word]).view(torch.float32).tolist()


print(f"10 and 30 are the word {word_of(10.0, 30.0):x}")
print("the word holds", numbers_of(word_of(10.0, 30.0)))
print(f"an empty word is {EMPTY:x}")
print("it would hold", numbers_of(EMPTY))

# %%
# A program *publishes* a word by storing it. ``tl.store`` does not promise
# what we need, so we write the instruction ourselves.
# `tl.inline_asm_elementwise
# <https://triton-lang.org/main/python-api/generated/triton.language.inline_asm_elementwise.html>`_
# puts lines of PTX into a kernel. Ours has two of them:
#
# - ``st.relaxed.gpu.global.b64 [$1], $2`` stores (``st``) 64 bits (``b64``) in
#   the memory of the GPU (``global``), at the address ``$1``. Others anywhere
#   on this GPU (``gpu``) see them as a whole or not at all. ``relaxed`` means
#   that the store promises nothing about other loads and stores. An acquire
#   and a release are there to protect other data, but our word protects
#   nothing: it is the message itself.
# - ``mov.b32 $0, 0``: the function has to return a number for each element.
#   Nobody needs ours, so it is 0.
#
# ``"=r,l,l"`` says where the operands are: ``$0`` is a result (``=``) in a
# register of 32 bits (``r``), and ``$1`` and ``$2`` are in registers of 64
# bits (``l``). ``is_pure=False`` tells the compiler that this has an effect,
# so that it neither leaves it out nor moves it. ``pack=1`` hands over one
# element at a time.
#
# A program has 128 threads or more, and only a few words. Then several threads
# store the same word, which does no harm, because they all store the same
# bits.
#
# Words stand in memory row by row: a row of the matrix has one for each of its
# slices.


@triton.jit
def _publish(
    words_ptr,  # (rows, SLICES)
    first,  # the first row of a tile
    s,  # our slice
    a,  # (ROWS,) float32: the lower halves of the words of a tile
    b,  # (ROWS,) float32: their upper halves
    SLICES: tl.constexpr,  # slices of a row
    PTX: tl.constexpr,  # False: in the interpreter
):
    """Store the word of slice s for each row of a tile."""
    row = first + tl.arange(0, a.shape[0])
    at = words_ptr + row * SLICES + s

    # The bits of both numbers, and then one beside the other. A number of 32
    # bits becomes one of 64 with zeros before it, because it is unsigned.
    low = a.to(tl.uint32, bitcast=True).to(tl.int64)
    high = b.to(tl.uint32, bitcast=True).to(tl.int64)
    word = low | (high << 32)

    if PTX:
        tl.inline_asm_elementwise(
            "st.relaxed.gpu.global.b64 [$1], $2; mov.b32 $0, 0;",
            constraints="=r,l,l",
            args=[at.to(tl.int64), word],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.store(at, word)


# %%
# The other programs *collect* the word: they load it until it is not empty.
# The load must really go to memory each time, and that is what ``relaxed`` and
# ``gpu`` say here: no old value from the L1 cache of this SM.
# This is what its lines do:
#
# - ``.reg .pred empty, again`` asks for two *predicates*, registers of one
#   bit, and ``.reg .b32 loads`` for a register that counts how often we have
#   loaded. ``mov.b32 loads, 0`` makes it 0.
# - ``LOAD:`` is a label, a place to jump to. The braces keep the label and the
#   registers apart from those of other places where the function is used.
# - ``ld.relaxed.gpu.global.b64 $0, [$1]`` loads the word.
# - ``setp.eq.b64`` compares it with the empty word. ``empty`` becomes true if
#   they are equal.
# - ``add.u32`` counts the load.
# - ``setp.lt.and.u32`` sets ``again`` if we have loaded less than ten million
#   times *and* the word is empty.
# - ``@again bra LOAD`` jumps back (*branches*) if ``again`` is true.
# - ``@empty trap`` is reached with an empty word only after ten million loads.
#   ``trap`` ends the kernel with an error. We come back to it.
#
# ``"=&l"`` is a result of 64 bits; ``&`` says that it is written before the
# last operand is read, because the loop reads ``$1`` again. So the two must
# not share a register.


@triton.jit
def _collect(
    words_ptr,  # (rows, SLICES)
    first,  # the first row of a tile
    ROWS: tl.constexpr,  # rows of a tile
    SLICES: tl.constexpr,  # slices of a row
    PADDED: tl.constexpr,  # a power of two, at least SLICES
    PTX: tl.constexpr,  # False: in the interpreter
):
    """For each row of a tile the numbers of all slices, then zeros."""
    row = first + tl.arange(0, ROWS)[:, None]
    s = tl.arange(0, PADDED)[None, :]
    # Lanes beyond the last slice load its word once more.
    at = words_ptr + row * SLICES + tl.minimum(s, SLICES - 1)

    if PTX:
        word = tl.inline_asm_elementwise(
            """{
            .reg .pred empty, again;
            .reg .b32 loads;
            mov.b32 loads, 0;
            LOAD:
            ld.relaxed.gpu.global.b64 $0, [$1];
            setp.eq.b64 empty, $0, 0x7F8000017F800001;
            add.u32 loads, loads, 1;
            setp.lt.and.u32 again, loads, 10000000, empty;
            @again bra LOAD;
            @empty trap;
            }""",
            constraints="=&l,l",
            args=[at.to(tl.int64)],
            dtype=tl.int64,
            is_pure=False,
            pack=1,
        )
    else:
        word = tl.load(at)

    # Both halves as float32 again.
    a = word.to(tl.uint32).to(tl.float32, bitcast=True)
    b = (word >> 32).to(tl.uint32).to(tl.float32, bitcast=True)
    return tl.where(s < SLICES, a, 0), tl.where(s < SLICES, b, 0)


# %%
# Since version 3.9, Triton has `tl.atomic_store
# <https://triton-lang.org/main/python-api/generated/triton.language.atomic_store.html>`_
# and `tl.atomic_load
# <https://triton-lang.org/main/python-api/generated/triton.language.atomic_load.html>`_.
# With ``sem="relaxed"`` they are these two instructions, and the loop around
# the load can be written in Triton. (Its ``tl.atomic_poll`` waits for one
# certain value. We wait for any value but one.) This page runs with older
# versions, too, so it has PTX.
#
# What if a word never comes?
# ---------------------------
#
# A program that waits keeps its place on an SM. Say that a GPU has room for
# three programs, and that four share a row. Three of them start, publish their
# words, and wait for the fourth. The fourth waits for a place, and nobody
# leaves. This is a *deadlock*, and the kernel would never end.
#
# Triton starts programs in any order and promises nothing about which of them
# run at the same time. CUDA has a *cooperative launch* for that: with
# ``launch_cooperative_grid=True`` either all programs of the kernel run at the
# same time, or the launch fails with an error.
#
# We do not want an error either, so we ask first. How many programs fit on an
# SM depends on their threads, registers and shared memory, and
# ``cuOccupancyMaxActiveBlocksPerMultiprocessor``, a function of CUDA's driver,
# knows the answer for a kernel that has been compiled. ``kernel.warmup``
# compiles a kernel without launching it.

import ctypes

CUDA = ON_GPU and torch.version.hip is None
GPU = torch.cuda.get_device_properties(DEVICE) if ON_GPU else None
NUM_SMS = GPU.multi_processor_count if ON_GPU else 4


def places(compiled):
    """How many programs of a compiled kernel the GPU can run at a time."""
    try:
        compiled._init_handles()  # load it onto the GPU, as a launch does
    except triton.OutOfResources:
        return 0  # not even one: it needs more than an SM has
    per_sm = ctypes.c_int(0)
    ctypes.CDLL("libcuda.so.1").cuOccupancyMaxActiveBlocksPerMultiprocessor(
        ctypes.byref(per_sm),
        ctypes.c_void_p(compiled.function),
        ctypes.c_int(32 * compiled.metadata.num_warps),  # threads
        ctypes.c_size_t(compiled.metadata.shared),  # bytes of shared memory
    )
    return per_sm.value * GPU.multi_processor_count


# %%
# A plan says how many programs it wants on each SM, ``per_sm``. An SM has
# 65536 registers, and ``maxnreg`` gives each thread no more than its share of
# them, so that programs never fail to fit because of registers.
#
# The interpreter runs one program after the other, so no program can wait for
# another one there. Instead ``together`` runs the kernel twice. The first time
# some words are missing, and the results are wrong. The second time all words
# are there. No program looks whether a word is empty there, so an empty one is
# simply 0.


def together(kernel, programs, per_sm, warps, **arguments):
    """Launch programs that wait for each other, if the GPU has room for all of
    them at a time; say whether it has."""
    options = {"num_warps": warps, "PTX": CUDA}
    if not CUDA:
        for _ in range(2):
            kernel[(programs,)](**arguments, **options)
        return True

    registers = 65536 // (32 * warps * per_sm)
    options["maxnreg"] = min(registers // 8 * 8, 255)  # a multiple of 8
    options["launch_cooperative_grid"] = True
    compiled = kernel.warmup(grid=(programs,), **arguments, **options)
    if programs > places(compiled):
        return False
    kernel[(programs,)](**arguments, **options)
    return True


def empty_words(rows, slices):
    """Words for one launch: nobody has published any of them."""
    empty = EMPTY if CUDA else 0
    return torch.full((rows, slices), empty, device=DEVICE)


# %%
# What does that mean in practice?
#
# - **A smaller GPU, or a part of one** (*MIG* divides an H100 into up to seven
#   parts): the page counts the SMs that are there, and CUDA says how many
#   programs fit on those. If they are too few, ``together`` returns ``False``,
#   and we take two sweeps instead.
# - **Another kernel on the same GPU**, in another stream, such as NCCL's when
#   gradients are sent to other GPUs: we count the places of the whole GPU,
#   even if somebody has taken some of them. A cooperative launch does not
#   fail then. It waits until there is room for all of its programs, which can
#   be as long as the other kernel takes. An ordinary launch would have used
#   the SMs that are free.
# - **A mistake**, such as a kernel that publishes fewer words than it
#   collects: ten million loads take some seconds, and then ``trap`` ends the
#   kernel with an error. Without it, the kernel would hang forever. CUDA
#   cannot go on after the error: the process has to be started again.
#
# What does an exchange cost?
# ---------------------------
#
# In the smallest example each program has a slice of 16 numbers of a single
# row. It needs the sum of the row, and the sum of its squares. To time that,
# we let it compute them many times. Each *turn* of that loop has its own
# words, because a word that is no longer empty says nothing about the next
# turn.
#
# ``later`` is 0 at first: a program publishes its word and waits at once for
# those of the others. With ``later=1`` it publishes a word and takes the words
# of the turn *before*, which the others have published a while ago.


@triton.jit
def _shared_sums(
    x_ptr,  # (SLICES, LANES)
    out_ptr,  # (SLICES, 2): what each program finds
    words_ptr,  # (turns, SLICES), empty
    turns,  # how often to ask
    later,  # 0: wait at once; 1: take the words of the turn before
    LANES: tl.constexpr,
    SLICES: tl.constexpr,
    PADDED: tl.constexpr,  # a power of two, at least SLICES
    PTX: tl.constexpr,
):
    s = tl.program_id(0)
    # A tile of one row.
    x = tl.load(x_ptr + s * LANES + tl.arange(0, LANES))[None, :]
    for turn in range(turns):
        # Our two numbers, as a column of one row each.
        a = tl.sum(x, axis=1)
        b = tl.sum(x * x, axis=1)
        _publish(words_ptr, turn, s, a, b, SLICES, PTX)

        # In the very first turn there is none before.
        due = tl.maximum(turn - later, 0)
        a, b = _collect(words_ptr, due, 1, SLICES, PADDED, PTX)
        tl.store(out_ptr + 2 * s, tl.sum(a))
        tl.store(out_ptr + 2 * s + 1, tl.sum(b))


def shared_sums(x, turns=1, later=0, warps=4):
    """The sum of all of x and that of its squares, as each program finds
    them."""
    slices, lanes = x.shape
    out = x.new_empty(slices, 2)
    launched = together(
        _shared_sums,
        programs=slices,
        per_sm=1,
        warps=warps,
        x_ptr=x,
        out_ptr=out,
        words_ptr=empty_words(turns, slices),
        turns=turns,
        later=later,
        LANES=lanes,
        SLICES=slices,
        PADDED=triton.next_power_of_2(slices),
    )
    if not launched:
        raise RuntimeError(f"{slices} programs do not fit on this GPU")
    return out


x = torch.arange(64.0, device=DEVICE).reshape(4, 16)
print("four programs know:", shared_sums(x).tolist())

# %%
# All of them have found the same. How long does it take?
# We let 2 to 128 programs run 1000 turns, once with words that they wait for
# at once, and once with those of the turn before. They have four warps each.
# In a third line, which waits at once, they have only one.
# We measure time as in `Layer normalization, both passes
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

# Scaffold: the exchange, a benchmark.


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["programs"],
        x_vals=[2, 4, 8, 16, 32, 64, 128],
        x_log=True,
        line_arg="provider",
        line_vals=["triton", "later", "one warp"],
        line_names=["At once", "A turn later", "At once, one warp"],
        ylabel="µs",
        plot_name="layer-norm-shared-rows-exchange",
        args={"turns": 1000},
    )
)
def bench_exchange(turns, programs, provider):
    """Device time of a launch, over the number of its turns: a CUDA graph of
    several launches, each after L2 was overwritten, less the graph without
    the launches; median, 20% and 80% quantiles."""
    later = 0
    warps = 4
    if provider == "later":
        later = 1
    if provider == "one warp":
        warps = 1

    def prepare():
        x = torch.ones(programs, 16, device=DEVICE)
        return lambda: shared_sums(x, turns, later, warps)

    return [us / turns for us in device_time(prepare)]


# %%

table = bench_exchange.run(show_plots=ON_GPU, return_df=True)
if not table.iloc[:, 1:].isna().all(axis=None):  # the interpreter: no times
    table = table.astype({"programs": int}).set_index("programs")
    print(table.to_string(float_format="%.2f"))

# %%
# **What the figure shows.**
# On the H100, with four warps, a turn that waits at once takes 0.44 µs with 2
# programs, 0.75 µs with 8, and 1.65 µs with 128. It takes longest with 32,
# 1.90 µs. With the words of the turn before, a turn takes 0.24 to 0.50 µs.
#
# On the H200 all of these times are the same, within 2.1%: an exchange goes
# through L2, and not to DRAM.
#
# **Why.**
# A program that waits at once waits for the slowest of all, whose word has to
# go to L2, and from there to each SM. The words of the turn before have been
# in L2 for a while. A turn then takes about as long as it takes to load them.
# Up to 32 programs, more words take longer in each of the three lines.
#
# Why do 32 programs need more time than 64? The compiled code gives a part of
# the answer. Up to 32 words fit into a single warp, one word for each lane.
# So each of the four warps loads all of them, over and over until they have
# come. Of 64 or 128 words, a warp loads only 32, and it meets the other warps
# before it goes on.
# With one warp, nothing is divided. Then 64 programs need 2.27 µs and 32 need
# 1.44 µs, so more words take more time, and there is no peak.
# But this does not explain everything: with four warps, each word is loaded by
# 128 warps in all, whether there are 32, 64 or 128 programs. In a trial,
# words that lay 128 bytes apart were faster at each number of programs, most
# of all at 32. So programs do get in each other's way at a cache line (the 128
# bytes that a cache holds as a unit). A small peak stayed even then, and we
# cannot explain it.
#
# **What follows.**
# Waiting at once is too slow: in 1.65 µs an H100 could move 38 KB for each of
# its SMs, and in 1.64 µs an H200 could even move 53 KB. A word that was
# published a turn ago has arrived by now, so a program that collects it only
# loads and does not wait. Our kernel will do this, too: it publishes the
# numbers of one tile, and finishes the tile *before* it.
#
# Rows in slices
# --------------
#
# How do many programs share many rows?
#
# A row is cut into *slices*, and as many programs as it has slices form a
# *group*. A *tile* is a slice of a few rows. Each program of a group has the
# tiles of its own slice, and takes one after the other. All programs of a
# group work on the same rows.
#
# Take 9 rows of 8 columns, tiles of 2 rows, slices of 4 columns, and six
# programs. That makes three groups of two programs.

print("program  slice  group  rows of its tiles")
for program in range(6):
    s = program % 2
    group = program // 2
    firsts = range(2 * group, 9, 2 * 3)
    rows = [f"{first} to {min(first + 1, 8)}" for first in firsts]
    print(f"{program:7}{s:7}{group:7}  " + ", ".join(rows))

# %%
# In each turn of its loop, a program publishes the numbers of one tile and
# finishes the tile before it. So there is one turn more than there are tiles:
# the last one has nothing to publish.

# %%

# Drawing: which tile is published and which is finished in each turn.

plt.figure(
    "Four turns of a program with three tiles: it publishes tile 0, then "
    "publishes tile 1 and finishes tile 0, publishes tile 2 and finishes tile "
    "1, and finishes tile 2",
    figsize=(7.5, 1.9),
)
for tile in range(3):
    plt.barh(1, 0.96, left=tile, color=f"C{tile}", alpha=0.5)
    plt.text(tile + 0.48, 1, f"tile {tile}", ha="center", va="center")
    plt.barh(0, 0.96, left=tile + 1, color=f"C{tile}", alpha=0.5)
    plt.text(tile + 1.48, 0, f"tile {tile}", ha="center", va="center")
plt.yticks([1, 0], ["publish", "finish"])
plt.xticks([0.48, 1.48, 2.48, 3.48], ["turn 0", "turn 1", "turn 2", "turn 3"])
plt.grid(visible=False)
plt.show()

# %%
# Two small functions say where a program is. A slice has ``WIDTH`` columns in
# ``LANES`` lanes, which are a power of two. The lanes that are left over are
# masked: they load 0 and store nothing.


@triton.jit
def _my_slice(
    N: tl.constexpr,  # columns
    ROWS: tl.constexpr,  # rows of a tile
    LANES: tl.constexpr,  # lanes of a slice: a power of two, at least WIDTH
    WIDTH: tl.constexpr,  # columns of a slice
):
    """Our slice, our first row, rows from one tile to the next, the columns of
    our lanes, and which of them exist."""
    SLICES: tl.constexpr = (N + WIDTH - 1) // WIDTH
    s = tl.program_id(0) % SLICES
    group = tl.program_id(0) // SLICES
    lane = tl.arange(0, LANES)[None, :]
    inside = (lane < WIDTH) & (s * WIDTH + lane < N)
    groups = tl.num_programs(0) // SLICES
    return s, group * ROWS, groups * ROWS, s * WIDTH + lane, inside


@triton.jit
def _tile(
    first,  # the first row of the tile
    cols,  # the columns of its lanes
    inside,  # which of the columns exist
    M,  # rows that exist
    N: tl.constexpr,  # columns
    ROWS: tl.constexpr,  # rows of a tile
):
    """Where a tile is in a matrix, and which of its elements exist."""
    row = tl.arange(0, ROWS)[:, None]
    # Only this is in 64 bits, once a tile: M * N may pass 2**31.
    start = tl.cast(first, tl.int64) * N
    return start, row * N + cols, inside & (row < M - first)


# %%
# What does a slice tell the others? Its mean, and ``m2``, the sum of the
# squared distances from it. From these the mean and the variance of the whole
# row are computed, as `Two sweeps <07-two-sweeps.html>`_ does with the means
# of its lanes.
# Take the row from the beginning of this page, 1 to 8: the slices have means
# 2.5 and 6.5, and ``m2`` is 5 for each. The mean of the row is 4.5, and the
# mean of each slice is 2 away from it. So the variance is (5 + 4 × 2² + 5 + 4
# × 2²) / 8 = 5.25.

mean = slices.mean(dim=1)
m2 = ((slices - mean[:, None]) ** 2).sum(dim=1)
distance = mean - mean.mean()
variance = (m2 + 4 * distance * distance).sum() / 8
print("means", mean.tolist(), "m2", m2.tolist())
print("variance", variance.item(), "PyTorch", row.var(correction=0).item())

# %%
# These sums are over words, and we want to use them with a tile of ``x``.
# The *layout* of a tensor says which thread has which element, and the words
# have another layout than the tile. So a column of sums over words has to go
# through shared memory to reach the threads that need it for the tile. (A sum
# over the tile itself needs no such way: the right threads have it already.)
# If a tile has a single row, there is a cheaper way: a plain number is the
# same for all threads. The function ``_column`` turns the number of a single
# row into a plain number, and the numbers of several rows into a column.


@triton.jit
def _column(t):
    return tl.sum(t) if t.shape[0] == 1 else t[:, None]


@triton.jit
def _statistics(
    means,  # (rows, PADDED): the mean of each slice
    m2s,  # (rows, PADDED): its squared distances from it, summed
    eps: tl.constexpr,  # added to the variance
    N: tl.constexpr,  # columns
    WIDTH: tl.constexpr,  # columns of a slice
):
    """Mean and 1 / standard deviation of each row."""
    # The columns of each slice: the last one may have fewer, and what is
    # beyond it has none.
    s = tl.arange(0, means.shape[1])[None, :]
    n = tl.maximum(tl.minimum(N - s * WIDTH, WIDTH), 0).to(tl.float32)
    mean = tl.sum(means * n, axis=1) / N
    d = means - _column(mean)
    variance = tl.sum(m2s + n * d * d, axis=1) / N
    return mean, 1 / tl.sqrt(variance + eps)


# %%
# The forward kernel
# ------------------
#
# Now we have all parts. These are the steps of a turn:
#
# 1. Load a tile of ``x``, compute mean and ``m2`` of our slice of its rows,
#    and publish them.
# 2. Collect the words of the tile before. All slices have published them a
#    turn ago.
# 3. With mean and rstd, compute ``y`` of the tile before and store it. Its
#    ``x`` is still in registers, as ``before``.
# 4. The tile of this turn becomes the tile before.
#
# The first turn has no tile before it, and the last one has no tile to load.
# The loop needs no special cases for them, because masks leave out what does
# not exist:
#
# - Only rows with a number below ``end`` are stored. In the first turn that is
#   0, so nothing is stored. The program collects the words of the tile that it
#   has just published. It waits for them once, and does not use them.
# - In the last turn all lanes of ``x`` are masked. The program publishes zeros
#   for rows beyond the last one of the matrix, and nobody collects them. There
#   must be words for these rows, too.
#
# `Stages <04-loads-in-flight.html>`_ request tiles ahead of time. With
# ``num_stages=3`` two of them are on their way while a third is in use.


@triton.jit
def _layer_norm_fwd_shared(
    x_ptr,  # (M, N), contiguous
    w_ptr,  # (N,)
    b_ptr,  # (N,)
    y_ptr,  # (M, N)
    mean_ptr,  # (M,) float32: saved for the backward pass
    rstd_ptr,  # (M,) float32: 1 / standard deviation, saved as well
    words_ptr,  # (more than M, SLICES), empty
    M,  # rows
    eps: tl.constexpr,  # added to the variance
    N: tl.constexpr,  # columns
    ROWS: tl.constexpr,  # rows of a tile
    LANES: tl.constexpr,  # lanes of a slice: a power of two, at least WIDTH
    WIDTH: tl.constexpr,  # columns of a slice
    PADDED: tl.constexpr,  # a power of two, at least the number of slices
    PTX: tl.constexpr,  # False: in the interpreter
):
    SLICES: tl.constexpr = (N + WIDTH - 1) // WIDTH
    s, start, step, cols, inside = _my_slice(N, ROWS, LANES, WIDTH)

    # A program always has the same columns, so it loads w and b once.
    w = tl.load(w_ptr + cols, mask=inside, other=0)
    b = tl.load(b_ptr + cols, mask=inside, other=0)

    before = tl.zeros((ROWS, LANES), x_ptr.dtype.element_ty)
    # Until M + step: one turn more than there are tiles.
    for first in tl.range(start, M + step, step, num_stages=3):
        # Load a tile.
        at, cell, mask = _tile(first, cols, inside, M, N, ROWS)
        x = tl.load(x_ptr + at + cell, mask=mask, other=0)

        # Mean and m2 of our slice of each row, and tell the others.
        count = tl.minimum(N - s * WIDTH, WIDTH)  # columns of our slice
        mean = tl.sum(x.to(tl.float32), axis=1) / count
        d = tl.where(inside, x.to(tl.float32) - mean[:, None], 0)
        m2 = tl.sum(d * d, axis=1)
        _publish(words_ptr, first, s, mean, m2, SLICES, PTX)

        # The tile before: its first row, and the row where storing ends. In
        # the first turn nothing is stored.
        done = tl.maximum(first - step, start)
        end = tl.where(first > start, M, 0)

        # What all slices of its rows have published, and the statistics. All
        # programs of the group compute the same.
        means, m2s = _collect(words_ptr, done, ROWS, SLICES, PADDED, PTX)
        mean, rstd = _statistics(means, m2s, eps, N, WIDTH)
        rows = done + tl.arange(0, ROWS)
        once = rows < tl.where(s == 0, end, 0)  # slice 0 stores them
        tl.store(mean_ptr + rows, mean, mask=once)
        tl.store(rstd_ptr + rows, rstd, mask=once)

        # Scale, shift and store.
        y = (before.to(tl.float32) - _column(mean)) * _column(rstd)
        y = y * w.to(tl.float32) + b.to(tl.float32)
        at, cell, mask = _tile(done, cols, inside, end, N, ROWS)
        tl.store(y_ptr + at + cell, y, mask=mask)
        before = x


# %%
# How many slices?
# ----------------
#
# A plan says how large a tile is, how many programs an SM gets, and how many
# warps a program has. ``SLICE`` is 8 KB.
#
# - **Up to 256 KB a row**, a program has an SM for itself, and a tile has two
#   rows of 16 KB. Wide slices mean few programs in a group, so there are few
#   words to wait for.
# - **Up to 768 KB**, an SM has two programs with half as much each. While one
#   of them waits, the other one works.
# - **Above that**, a tile has a single row of 16 KB, so that there are at most
#   as many slices as before: 128 for 2 MB.
#
# These limits come from trials, and your GPU may want others.

# Bytes. Without a GPU slices are narrow, so that small matrices have some.
SLICE = 8192 if ON_GPU else 256


def plan_shared(N, itemsize, forward):
    """Rows and lanes of a tile; programs on an SM, and warps of each."""
    row = N * itemsize
    if forward:
        if row <= 32 * SLICE:
            return (2, 2 * SLICE // itemsize), {"per_sm": 1, "warps": 8}
        if row <= 96 * SLICE:
            return (2, SLICE // itemsize), {"per_sm": 2, "warps": 8}
        return (1, 2 * SLICE // itemsize), {"per_sm": 2, "warps": 4}

    # The backward pass comes further down.
    # A quarter of SLICE each, in three programs on an SM, if that is enough.
    if row <= min(16, 3 * NUM_SMS // 4) * SLICE:
        return (4, SLICE // 4 // itemsize), {"per_sm": 3, "warps": 4}
    if row <= 128 * SLICE:
        return (1, SLICE // itemsize), {"per_sm": 2, "warps": 4}
    return (1, SLICE // itemsize), {"per_sm": 2, "warps": 8}


# %%
# The number of programs is fixed, because they all must run at the same time.
# We cut rows so that few places on the SMs stay empty. First we count the
# groups that fit. Then each group gets as many programs as there is room for,
# up to the next power of two, and its slices become narrower.


def divide(N, lanes, programs, tiles):
    """Groups, and columns of a slice, for so many programs, and so many tiles
    that stand one below the other."""
    least = triton.cdiv(N, lanes)  # slices that a row needs
    groups = max(min(programs // least, tiles), 1)

    # Slices may be narrower, in steps of 64 columns: 128 bytes in 16 bits.
    most = min(programs // groups, triton.next_power_of_2(least))
    unit = min(lanes, 64)
    return groups, triton.cdiv(N, most * unit) * unit


def cut(M, N, rows, lanes, per_sm):
    """Groups, programs, words, and the tiles of a kernel."""
    tiles = triton.cdiv(M, rows)
    groups, width = divide(N, lanes, NUM_SMS * per_sm, tiles)
    slices = triton.cdiv(N, width)
    # In its last turn each group publishes rows that do not exist.
    words = empty_words(M + (groups + 1) * rows, slices)
    tile = {
        "ROWS": rows,
        "LANES": lanes,
        "WIDTH": width,
        "PADDED": triton.next_power_of_2(triton.cdiv(N, lanes)),
    }
    return groups, groups * slices, words, tile


# %%
# This is how the forward pass divides 4096 rows in 16 bits, on a GPU with 132
# SMs, where one or two programs run on each of them. The last two columns of
# the table are those of a slice.

print("columns  programs that fit  groups  slices  columns  lanes")
for N, programs, lanes in (
    (65536, 132, 8192),
    (131072, 132, 8192),
    (262144, 264, 4096),
    (393216, 264, 4096),
    (524288, 264, 8192),
    (1048576, 264, 8192),
):
    groups, width = divide(N, lanes, programs, tiles=2048)
    slices = triton.cdiv(N, width)
    print(f"{N:7}{programs:19}{groups:8}{slices:8}{width:9}{lanes:7}")

# %%
# At 393216 columns 96 slices of 4096 columns would be enough. Then two groups
# would have 192 programs, and 72 places would stay empty. So a group gets 128
# programs, and each of them uses 3072 of its 4096 lanes. All places but eight
# are taken, and a quarter of the lanes is idle.
#
# Forward: launch and check
# -------------------------
#
# Where programs cannot share a row, we take two sweeps. Their kernels and
# launches are those of `Two sweeps <07-two-sweeps.html>`_, folded here, and
# take any width and any type.

# %%

# Scaffold: two sweeps, from page 07.

WARP = 64 if torch.version.hip else 32  # threads


@triton.jit
def _welford(
    x_ptr,  # where the row begins
    eps: tl.constexpr,  # added to the variance
    N: tl.constexpr,  # columns
    BLOCK: tl.constexpr,  # lanes of a tile: a power of two
    KEEP: tl.constexpr,  # what the caches should do with x
    acc: tl.constexpr,  # the type of the sums: float32, or float64
):
    """Mean of a row, and 1 / its standard deviation."""
    LAST: tl.constexpr = (N - 1) // BLOCK  # the number of the last tile
    lanes = tl.arange(0, BLOCK)

    # The first element of each lane is the mean of the lane so far.
    x = tl.load(x_ptr + lanes, mask=lanes < N, eviction_policy=KEEP)
    mean = tl.where(lanes < N, x.to(acc), 0)
    m2 = tl.zeros((BLOCK,), acc)
    for i in range(1, LAST + 1):
        cols = i * BLOCK + lanes
        x = tl.load(x_ptr + cols, mask=cols < N, eviction_policy=KEEP)
        # A masked lane may hold anything: with a distance of 0 it changes
        # neither of its two numbers.
        d = tl.where(cols < N, x.to(acc) - mean, 0)
        # One division for all lanes, and a multiplication in each.
        share = 1 / tl.cast(i + 1, acc)
        mean += d * share
        m2 += d * d * (1 - share)

    # Put the lanes together. A lane that was masked in the last tile has one
    # element less.
    count = tl.where(LAST * BLOCK + lanes < N, LAST + 1, LAST).to(acc)
    common = tl.sum(mean * count) / N
    d = mean - common
    variance = tl.sum(m2 + count * d * d) / N
    return common, 1 / tl.sqrt(variance + eps)


@triton.jit
def _layer_norm_fwd_sweeps(
    x_ptr,  # (M, N), contiguous
    w_ptr,  # (N,); None counts as 1
    b_ptr,  # (N,); None counts as 0
    y_ptr,  # (M, N)
    mean_ptr,  # (M,): saved for the backward pass
    rstd_ptr,  # (M,): 1 / standard deviation, saved as well
    eps: tl.constexpr,  # added to the variance
    N: tl.constexpr,  # columns
    BLOCK: tl.constexpr,  # lanes of a tile: a power of two
    CACHES: tl.constexpr,  # whether to help the caches
):
    KEEP: tl.constexpr = "evict_last" if CACHES else ""
    DROP: tl.constexpr = "evict_first" if CACHES else ""
    STREAM: tl.constexpr = ".cs" if CACHES else ""
    LAST: tl.constexpr = (N - 1) // BLOCK  # the number of the last tile
    acc: tl.constexpr = mean_ptr.dtype.element_ty  # float32, or float64

    # A program for each row. M * N may pass 2**31.
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * N

    # First sweep.
    mean, rstd = _welford(x_ptr, eps, N, BLOCK, KEEP, acc)
    tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)

    # Second sweep, from the last tile to the first.
    for i in range(LAST + 1):
        tile = LAST - i if CACHES else i
        cols = tile * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + cols, mask=cols < N, eviction_policy=DROP)
        y = (x.to(acc) - mean) * rstd
        if w_ptr is not None:
            y *= tl.load(w_ptr + cols, mask=cols < N).to(acc)
        if b_ptr is not None:
            y += tl.load(b_ptr + cols, mask=cols < N).to(acc)
        at = y_ptr + row * N + cols
        tl.store(at, y, mask=cols < N, cache_modifier=STREAM)


def plan_forward(N, itemsize):
    """Lanes of a tile, and warps of a program."""
    row_bytes = N * itemsize
    threads = 1024
    tile_bytes = 32768
    if row_bytes <= 65536:
        tile_bytes = 16384
    if row_bytes <= 32768:
        threads = 512
        tile_bytes = 8192
    if row_bytes % 16 > 0:
        threads = 256
        tile_bytes = 8192
    block = min(tile_bytes // itemsize, triton.next_power_of_2(N))
    # A narrow row does not need so many threads.
    threads = min(threads, block * itemsize // 16)
    return block, max(threads // WARP, 1)


def forward_in_sweeps(x, w, b, eps, caches=True):
    """y, mean and rstd for a contiguous (M, N) x; w and b may be None."""
    M, N = x.shape
    y = torch.empty_like(x)
    # 16-bit rows are summed in float32.
    acc_dtype = torch.promote_types(x.dtype, torch.float32)
    mean = torch.empty(M, dtype=acc_dtype, device=x.device)
    rstd = torch.empty(M, dtype=acc_dtype, device=x.device)
    block, warps = plan_forward(N, x.itemsize)
    _layer_norm_fwd_sweeps[(M,)](
        x_ptr=x,
        w_ptr=w,
        b_ptr=b,
        y_ptr=y,
        mean_ptr=mean,
        rstd_ptr=rstd,
        eps=eps,
        N=N,
        BLOCK=block,
        CACHES=caches,
        num_warps=warps,
    )
    return y, mean, rstd


@triton.jit
def _layer_norm_bwd_means(
    dy_ptr,  # (M, N), contiguous
    x_ptr,  # (M, N), contiguous
    w_ptr,  # (N,); None counts as 1
    mean_ptr,  # (M,), from the forward pass
    rstd_ptr,  # (M,), from the forward pass
    c_ptr,  # (2, M): c1 of all rows, then c2
    M,  # rows
    N: tl.constexpr,  # columns
    BLOCK: tl.constexpr,  # lanes of a tile: a power of two
):
    # A program for each row. M * N may pass 2**31.
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * N
    dy_ptr += row * N
    mean = tl.load(mean_ptr + row)
    rstd = tl.load(rstd_ptr + row)

    # Both sums, for each lane.
    acc: tl.constexpr = mean_ptr.dtype.element_ty  # float32, or float64
    c1 = tl.zeros((BLOCK,), acc)
    c2 = tl.zeros((BLOCK,), acc)
    for start in range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + cols, mask=cols < N, other=0).to(acc)
        dy = tl.load(dy_ptr + cols, mask=cols < N, other=0).to(acc)
        wdy = dy  # 0 in a masked lane, which then adds nothing
        if w_ptr is not None:
            wdy *= tl.load(w_ptr + cols, mask=cols < N, other=0).to(acc)
        # x_hat is (x - mean) * rstd. All of a row have the same factor rstd,
        # so one multiplication at the end is enough.
        c1 += (x - mean) * wdy
        c2 += wdy

    tl.store(c_ptr + row, tl.sum(c1) * rstd / N)
    tl.store(c_ptr + M + row, tl.sum(c2) / N)


def plan_means(N, itemsize):
    """Lanes of a tile of the first kernel, and warps of a program."""
    block = min(8192 // itemsize, triton.next_power_of_2(N))
    tiles = triton.cdiv(N, block)
    if tiles == 3 or 5 <= tiles <= 8:
        return block, 8
    return block, 16


def means_of_rows(dy, x, w, mean, rstd, warps=None):
    """c1 and c2 of each row, as a (2, M) tensor; warps: not by the rule."""
    M, N = x.shape
    c = torch.empty(2, M, dtype=mean.dtype, device=x.device)
    block, warps_by_rule = plan_means(N, x.itemsize)
    if warps is None:
        warps = warps_by_rule
    _layer_norm_bwd_means[(M,)](
        dy_ptr=dy,
        x_ptr=x,
        w_ptr=w,
        mean_ptr=mean,
        rstd_ptr=rstd,
        c_ptr=c,
        M=M,
        N=N,
        BLOCK=block,
        num_warps=warps,
    )
    return c


@triton.jit
def _layer_norm_bwd_slices(
    dy_ptr,  # (M, N), contiguous
    x_ptr,  # (M, N), contiguous
    w_ptr,  # (N,); None counts as 1
    mean_ptr,  # (M,), from the forward pass
    rstd_ptr,  # (M,), from the forward pass
    c_ptr,  # (2, M): c1 and c2 of all rows; None if dx is not wanted
    dx_ptr,  # (M, N), or None if dx is not wanted
    sums_ptr,  # (groups, 2, N), or None if neither dw nor db is wanted
    M,  # rows
    N: tl.constexpr,  # columns
    ROWS: tl.constexpr,  # rows of a tile
    COLS: tl.constexpr,  # columns of a slice: a power of two
):
    # Which slice is ours, and which group of rows? Neighboring programs have
    # neighboring slices of the same rows.
    SLICES: tl.constexpr = (N + COLS - 1) // COLS
    group = tl.program_id(0) // SLICES
    groups = tl.num_programs(0) // SLICES
    cols = tl.program_id(0) % SLICES * COLS + tl.arange(0, COLS)[None, :]

    # Our part of w stays in registers, and so do our sums.
    acc: tl.constexpr = mean_ptr.dtype.element_ty  # float32, or float64
    if w_ptr is not None:
        w = tl.load(w_ptr + cols, mask=cols < N, other=0)
    dw = tl.zeros((1, COLS), acc)
    db = tl.zeros((1, COLS), acc)

    # Where the elements of a tile are, from the beginning of its first row.
    # For two rows of up to 2**30 columns, 32 bits are enough.
    row = tl.arange(0, ROWS)[:, None]
    at = row * N + cols

    for first in tl.range(group * ROWS, M, groups * ROWS, num_stages=3):
        # Load a tile, and what is known of its rows.
        exists = row < M - first
        mask = exists & (cols < N)
        start = tl.cast(first, tl.int64) * N  # M * N may pass 2**31
        x = tl.load(x_ptr + start + at, mask=mask, other=0)
        dy = tl.load(dy_ptr + start + at, mask=mask, other=0)
        mean = tl.load(mean_ptr + first + row, mask=exists, other=0)
        rstd = tl.load(rstd_ptr + first + row, mask=exists, other=0)

        # The terms of dw and db, summed over the rows of the tile.
        x_hat = (x.to(acc) - mean) * rstd
        dy = dy.to(acc)
        dw += tl.sum(dy * x_hat, axis=0, keep_dims=True)
        db += tl.sum(dy, axis=0, keep_dims=True)

        if dx_ptr is not None:
            # The formula for dx, with the means of the first kernel.
            c1 = tl.load(c_ptr + first + row, mask=exists, other=0)
            c2 = tl.load(c_ptr + M + first + row, mask=exists, other=0)
            wdy = dy
            if w_ptr is not None:
                wdy = dy * w.to(acc)
            dx = (wdy - x_hat * c1 - c2) * rstd
            tl.store(dx_ptr + start + at, dx, mask=mask)

    if sums_ptr is not None:
        # Each group has a buffer of its own.
        sums_ptr += group * 2 * N + cols
        tl.store(sums_ptr, dw, mask=cols < N)
        tl.store(sums_ptr + N, db, mask=cols < N)


def backward_in_sweeps(dy, x, w, mean, rstd, wanted):
    """dx, dw and db for (M, N) matrices; None where not wanted."""
    wants_dx, wants_dw, wants_db = wanted
    M, N = x.shape
    dx = None
    c = None
    if wants_dx:
        dx = torch.empty_like(x)
        c = means_of_rows(dy, x, w, mean, rstd)

    # As many groups as fill two programs on each SM; at least one.
    rows = 2
    cols = min(4096 // x.itemsize, triton.next_power_of_2(N))
    slices = triton.cdiv(N, cols)
    groups = min(2 * NUM_SMS // slices, triton.cdiv(M, rows))
    groups = max(groups, 1)
    sums = None
    if wants_dw or wants_db:
        shape = (groups, 2, N)
        sums = torch.empty(shape, dtype=mean.dtype, device=x.device)
    _layer_norm_bwd_slices[(slices * groups,)](
        dy_ptr=dy,
        x_ptr=x,
        w_ptr=w,
        mean_ptr=mean,
        rstd_ptr=rstd,
        c_ptr=c,
        dx_ptr=dx,
        sums_ptr=sums,
        M=M,
        N=N,
        ROWS=rows,
        COLS=cols,
        num_warps=8,
    )

    dw = None
    db = None
    if sums is not None:
        both = sums.sum(dim=0)
        if wants_dw:
            dw = both[0]
        if wants_db:
            db = both[1]
    return dx, dw, db


# %%
# When can programs share a row? Not on GPUs of AMD, which have no PTX. Not in
# float64, because a word holds two numbers of float32. Rows must begin at a
# multiple of 16 bytes. And with two programs on each SM, a row can have 8 KB
# for each program, because the backward pass has no room for more.


def can_share(x):
    """Whether the kernels can do it; if they fit on the GPU is asked later."""
    N = x.shape[1]
    return (
        torch.version.hip is None
        and x.dtype in (torch.float16, torch.bfloat16, torch.float32)
        and N % 8 == 0
        and N * x.itemsize <= 2 * NUM_SMS * SLICE
    )


def forward_shared(x, w, b, eps):
    """y, mean and rstd of a contiguous (M, N) x; None if programs do not
    fit."""
    M, N = x.shape
    y = torch.empty_like(x)
    mean = torch.empty(M, dtype=torch.float32, device=x.device)
    rstd = torch.empty(M, dtype=torch.float32, device=x.device)
    (rows, lanes), places_wanted = plan_shared(N, x.itemsize, forward=True)
    _, programs, words, tile = cut(M, N, rows, lanes, places_wanted["per_sm"])
    launched = together(
        _layer_norm_fwd_shared,
        programs,
        **places_wanted,
        x_ptr=x,
        w_ptr=ones_if_none(w, x),
        b_ptr=zeros_if_none(b, x),
        y_ptr=y,
        mean_ptr=mean,
        rstd_ptr=rstd,
        words_ptr=words,
        M=M,
        eps=eps,
        N=N,
        **tile,
    )
    if not launched:
        return None
    return y, mean, rstd


def ones_if_none(w, x):
    """The kernel loads w once for all its rows, so ones cost next to
    nothing."""
    if w is None:
        return x.new_ones(x.shape[1])
    return w


def zeros_if_none(b, x):
    if b is None:
        return x.new_zeros(x.shape[1])
    return b


def forward(x, w, b, eps):
    """y, mean and rstd of a contiguous (M, N) x; w and b may be None."""
    if can_share(x):
        results = forward_shared(x, w, b, eps)
        if results is not None:
            return results
    return forward_in_sweeps(x, w, b, eps)


x = torch.randn(5, 72, device=DEVICE)
y, _, _ = forward(x, None, None, eps=1e-5)
print("72 columns:", torch.allclose(y, F.layer_norm(x, (72,)), atol=1e-5))

# %%
# How fast is the forward pass?
# -----------------------------
#
# We compare with two sweeps, with PyTorch's layer norm alone and through
# ``torch.compile``, and with a copy. A matrix has 4096 rows, or as many as 512
# MB have room for.

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

# Scaffold: the forward pass, a benchmark of shared rows.


def rows_of(M, N, dtype):
    """At most 512 MB a matrix."""
    return min(M, 2**29 // (N * dtype.itemsize))


def pytorch_layer_norm(x, w, b, eps):
    """PyTorch's function, with the arguments of our kernels."""
    return F.layer_norm(x, (x.shape[1],), w, b, eps)


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=[65536, 262144, 393216, 524288, 1048576],
        line_arg="provider",
        line_vals=["triton", "sweeps", "torch", "torch.compile", "copy"],
        line_names=[
            "Triton",
            "Two sweeps",
            "PyTorch",
            "torch.compile",
            "Copy",
        ],
        ylabel="GB/s",
        plot_name="layer-norm-shared-rows-forward",
        args={"M": 4096, "dtype": torch.float16, "mode": "forward"},
    )
)
def bench_forward(M, N, dtype, mode, provider):
    """Device time: a CUDA graph of several calls, each with inputs of its own
    and after L2 was overwritten, less the graph without the calls; median, 20%
    and 80% quantiles. At most 512 MB a matrix. Copy: the best of six tiles."""
    if not ON_GPU:
        return 3 * [float("nan")]  # the interpreter cannot be timed
    M = rows_of(M, N, dtype)

    def speed_of(function):
        def prepare():
            x, w, b, _ = inputs(M, N, dtype)
            return lambda: function(x, w, b, eps=1e-5)

        bytes_moved = 2 * M * N * dtype.itemsize  # read x, write y
        return speed(bytes_moved, prepare)

    if provider == "triton":
        return speed_of(forward_shared)
    if provider == "sweeps":
        return speed_of(forward_in_sweeps)
    if provider == "torch":
        return speed_of(pytorch_layer_norm)
    if provider == "torch.compile":
        return best_of_three_compilations(pytorch_layer_norm, speed_of)
    return ceiling(reads=1, writes=1, shape=(M, N), dtype=dtype)


# %%

report(bench_forward)

# %%
# **What the figure shows.**
# On the H100 shared rows reach 73% to 95% of a copy, and two sweeps reach 63%
# to 100%. Forward, ours is 1.6 to 5.2 times as fast as PyTorch, and 1.4 to 1.5
# times as fast as torch.compile.
# We have not won everywhere: at 65536 columns two sweeps reach 100%, and we
# reach 95%. From 262144 columns on we are ahead of them, with 73% to 87%
# against 63% to 71%. At 393216 columns we reach 73%, which is our lowest
# share.
#
# On the H200 shared rows reach 60% to 86% of a copy, and two sweeps reach 61%
# to 88%. Ours is 1.6 to 5.9 times as fast as PyTorch, and 1.3 to 1.5 times as
# fast as torch.compile. Two sweeps are ahead of us at two widths there, by
# 1.4% at 65536 columns and by 1.2% at 393216, where we reach 60%. At the other
# three we are ahead, with 73% to 75% against 62% to 68%.
#
# **Why.**
# Each row moves once, as in the copy. Two sweeps, PyTorch and torch.compile
# read ``x`` twice. At 65536 columns that costs two sweeps nothing, because L2
# still holds the row (`Two sweeps <07-two-sweeps.html>`_ measures it). Where
# no cache holds what the first sweep has read, three matrices move instead of
# two, and that leaves 67% of the copy. From 393216 columns on, two sweeps are
# just below that. At 262144 they are a little above, so L2 may still hold a
# part of the row.
#
# PyTorch falls much further, to 16% at 1048576 columns. It has a thread block
# of only 128 threads for each row. With 512 MB a matrix there are 1024 rows of
# 262144 columns but only 256 rows of 1048576. So the wider the rows, the fewer
# threads there are, and the fewer bytes are on their way.
#
# And what do we lose? Not the bytes of the words: at 1048576 columns a row has
# 128 words, or 1 KB, beside the 4 MB that it moves.
# At 393216 columns a quarter of our lanes is idle, as the table above says. So
# there are fewer bytes on their way.
# At the other widths the tiles of an SM have 32 KB. But a row of 65536 columns
# has 8 slices, and the wider ones have 64 or 128. The more programs share a
# row, the more often one of them is late, and all others wait. From 524288
# columns on, the compiler also *spills*: it keeps some numbers in memory,
# because registers are full. These two reasons are likely, but we have not
# measured how much each of them costs.
#
# **What follows.**
# A message between programs can be cheap, if you send it early enough and have
# something else to do in the meantime. It pays where a row is too wide for the
# caches.
#
# What if another kernel is there?
# --------------------------------
#
# A cooperative launch waits until all its programs have a place. At 65536
# columns our plan has 16 groups of 8 programs, 128 in all, and each of them
# takes all registers of an SM. An H100 has 132 SMs, so four of them are free.
#
# We let a kernel that does nothing keep some SMs busy for 5 ms in another
# stream, and start ours 1 ms later.


@triton.jit
def _keep_busy(ns):
    """Keep a place on an SM for so many nanoseconds."""
    end = tl.extra.cuda.globaltimer() + ns
    while tl.extra.cuda.globaltimer() < end:
        pass


# %%

# Scaffold: the forward pass beside another kernel, a benchmark.

import time


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["busy"],
        x_vals=[0, 2, 4, 5, 8, 16],
        line_arg="provider",
        line_vals=["triton", "sweeps"],
        line_names=["Triton", "Two sweeps"],
        xlabel="SMs that another kernel keeps busy for 5 ms",
        ylabel="µs",
        plot_name="layer-norm-shared-rows-beside",
        args={
            "M": 2048,
            "N": 65536,
            "dtype": torch.float16,
            "mode": "forward",
        },
    )
)
def bench_beside(busy, M, N, dtype, mode, provider):
    """CUDA events around a CUDA graph of one call, about 1 ms after programs
    of 1024 threads, one for each of these SMs, began to spin for 5 ms in
    another stream; median, 20% and 80% quantiles of 11 calls."""
    if not ON_GPU:
        return 3 * [float("nan")]
    function = forward_shared
    if provider == "sweeps":
        function = forward_in_sweeps
    x, w, b, _ = (t.detach() for t in inputs(M, N, dtype))

    # Both kernels are compiled before anything is timed.
    function(x, w, b, eps=1e-5)
    _keep_busy[(1,)](ns=5_000_000, num_warps=32)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        function(x, w, b, eps=1e-5)
    graph.replay()

    other = torch.cuda.Stream()
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    times = []
    for _ in range(11):
        torch.cuda.synchronize()
        if busy > 0:
            with torch.cuda.stream(other):
                _keep_busy[(busy,)](ns=5_000_000, num_warps=32)
        time.sleep(0.001)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1000 * start.elapsed_time(end))
    times.sort()
    return times[5], times[2], times[8]


# %%

table = bench_beside.run(show_plots=ON_GPU, return_df=True)
if not table.iloc[:, 1:].isna().all(axis=None):  # the interpreter: no times
    table = table.astype({"busy": int}).set_index("busy")
    print(table.to_string(float_format="%.0f"))

# %%
# **What the figure shows.**
# Up to four busy SMs little happens: on the H100 shared rows take 201 µs alone
# and 216 µs beside four of them. With five, 127 SMs are left for 128 programs,
# and ours takes 4054 µs: it has waited until the other kernel ended. Two
# sweeps take 192 µs alone, and 216 µs beside 16 of them, because their
# programs run on the SMs that are free. They take 209 µs even beside two: both
# kernels take some µs longer as soon as another one runs, and we don't know
# why.
#
# On the H200 shared rows take 160 µs alone, 160 µs beside four busy SMs, and
# 4066 µs beside five. Two sweeps take 155 µs alone, and 163 µs beside 16.
#
# **What follows.**
# If something else runs beside your kernels all the time, such as the
# exchange of gradients between GPUs, a cooperative launch is a risk. The
# results stay right, but they may come much later.
#
# Backward: two more sums
# -----------------------
#
# What do programs have to tell each other in the backward pass?
#
# With :math:`g = w \, dy`, :math:`d = x - \mu` and :math:`r` for ``rstd``, the
# formula for ``dx`` needs two sums over a row, those of :math:`g \, d` and of
# :math:`g`. That is one word again:
#
# .. math:: c_1 = \frac{r^3}{N} \sum g \, d \qquad c_2 = \frac{r}{N} \sum g
#
# .. math:: dx = r \, g - (d \, c_1 + c_2)
#
# ``dw`` and ``db`` are sums over rows. A program always has the same columns,
# so it adds them up in registers, stores them at the end, and does not have to
# tell any other program.
#
# ``tl.reduce`` adds up two tiles at once, so that the warps of a program meet
# once and not twice.


@triton.jit
def _add_pairs(a1, a2, b1, b2):
    return a1 + b1, a2 + b2


@triton.jit
def _slice_sums(x, dy, w, mean):
    """The two sums over our slice of each row of a tile."""
    wdy = w.to(tl.float32) * dy.to(tl.float32)
    d = x.to(tl.float32) - _column(mean)
    return tl.reduce((wdy * d, wdy), 1, _add_pairs)


@triton.jit
def _slice_gradients(
    x,  # a tile
    dy,  # a tile
    w,  # (1, LANES)
    mean,  # (rows,)
    rstd,  # (rows,)
    sum1,  # (rows, PADDED): the first sum of each slice
    sum2,  # (rows, PADDED): the second
    dw,  # (1, LANES): the sums so far
    db,  # (1, LANES)
    N: tl.constexpr,  # columns
):
    """dx of a tile, and dw and db with its terms."""
    # The sums over whole rows.
    sum1, sum2 = tl.reduce((sum1, sum2), 1, _add_pairs)
    # From the left: rstd**3 alone may be too large for float32.
    c1 = _column(sum1 * rstd * rstd * rstd / N)
    c2 = _column(sum2 * rstd / N)

    d = x.to(tl.float32) - _column(mean)
    dy = dy.to(tl.float32)
    scaled = dy * _column(rstd)
    dx = scaled * w.to(tl.float32) - (d * c1 + c2)
    dw += tl.sum(scaled * d, axis=0)[None, :]
    db += tl.sum(dy, axis=0)[None, :]
    return dx, dw, db


# %%
# The kernel has the loop of the forward kernel, with two matrices: it
# publishes the sums of one tile, and finishes the tile before, whose ``x`` and
# ``dy`` it keeps in registers. Rows that do not exist have ``dy`` 0, so they
# add nothing to any sum.


@triton.jit
def _layer_norm_bwd_shared(
    dy_ptr,  # (M, N), contiguous
    x_ptr,  # (M, N), contiguous
    w_ptr,  # (N,)
    mean_ptr,  # (M,), from the forward pass
    rstd_ptr,  # (M,), from the forward pass
    dx_ptr,  # (M, N)
    words_ptr,  # (more than M, SLICES), empty
    sums_ptr,  # (groups, 2, N): dw and db of each group
    M,  # rows
    N: tl.constexpr,  # columns
    ROWS: tl.constexpr,  # rows of a tile
    LANES: tl.constexpr,  # lanes of a slice: a power of two, at least WIDTH
    WIDTH: tl.constexpr,  # columns of a slice
    PADDED: tl.constexpr,  # a power of two, at least the number of slices
    PTX: tl.constexpr,  # False: in the interpreter
):
    SLICES: tl.constexpr = (N + WIDTH - 1) // WIDTH
    s, start, step, cols, inside = _my_slice(N, ROWS, LANES, WIDTH)
    w = tl.load(w_ptr + cols, mask=inside, other=0)

    # The sums of our columns, over all rows of our group.
    dw = tl.zeros((1, LANES), tl.float32)
    db = tl.zeros((1, LANES), tl.float32)

    # The tile before.
    x_before = tl.zeros((ROWS, LANES), x_ptr.dtype.element_ty)
    dy_before = x_before

    for first in tl.range(
        start,
        M + step,  # one turn more than there are tiles
        step,
        num_stages=3,
        # The compiler would convert w to float32 before the loop, because the
        # result is always the same. That takes registers, and they are full.
        disable_licm=True,
    ):
        # Load a tile of both matrices, and the means of its rows.
        at, cell, mask = _tile(first, cols, inside, M, N, ROWS)
        x = tl.load(x_ptr + at + cell, mask=mask, other=0)
        dy = tl.load(dy_ptr + at + cell, mask=mask, other=0)
        rows = first + tl.arange(0, ROWS)
        mean = tl.load(mean_ptr + rows, mask=rows < M, other=0)

        # The sums of our slice, and tell the others.
        sum1, sum2 = _slice_sums(x, dy, w, mean)
        _publish(words_ptr, first, s, sum1, sum2, SLICES, PTX)

        # The tile before; in the first turn none of its rows is stored.
        done = tl.maximum(first - step, start)
        end = tl.where(first > start, M, 0)
        sum1, sum2 = _collect(words_ptr, done, ROWS, SLICES, PADDED, PTX)

        # Its statistics once more: registers are too few to keep them.
        rows = done + tl.arange(0, ROWS)
        mean = tl.load(mean_ptr + rows, mask=rows < end, other=0)
        rstd = tl.load(rstd_ptr + rows, mask=rows < end, other=0)

        dx, dw, db = _slice_gradients(
            x_before, dy_before, w, mean, rstd, sum1, sum2, dw, db, N
        )
        at, cell, mask = _tile(done, cols, inside, end, N, ROWS)
        tl.store(dx_ptr + at + cell, dx, mask=mask)
        x_before = x
        dy_before = dy

    # Each group has a row of sums, and each program its own columns of it.
    sums_ptr += start // ROWS * 2 * N + cols
    tl.store(sums_ptr, dw, mask=inside)
    tl.store(sums_ptr + N, db, mask=inside)


# %%
# Its plan is the second half of ``plan_shared``. ``dw`` and ``db`` are two
# float32 numbers for each lane, which stay in registers. So a slice can only
# be half as wide as forward, 8 KB, and a tile has one row.
# Rows of up to 128 KB have slices of 2 KB and tiles of four rows, with three
# programs on an SM: fewer sums for a thread, and more rows at a time.
# Above 1 MB there are so many words that 8 warps collect them faster than 4.
# The launch is like that of the forward pass, and folded.

# %%

# Scaffold: launch the backward kernel.


def backward_shared(dy, x, w, mean, rstd):
    """dx, dw and db of contiguous (M, N) matrices; None if programs do not
    fit."""
    M, N = x.shape
    dx = torch.empty_like(x)
    (rows, lanes), places_wanted = plan_shared(N, x.itemsize, forward=False)
    groups, programs, words, tile = cut(
        M, N, rows, lanes, places_wanted["per_sm"]
    )
    sums = torch.empty(groups, 2, N, dtype=torch.float32, device=x.device)
    launched = together(
        _layer_norm_bwd_shared,
        programs,
        **places_wanted,
        dy_ptr=dy,
        x_ptr=x,
        w_ptr=ones_if_none(w, x),
        mean_ptr=mean,
        rstd_ptr=rstd,
        dx_ptr=dx,
        words_ptr=words,
        sums_ptr=sums,
        M=M,
        N=N,
        **tile,
    )
    if not launched:
        return None
    # The last step adds up a few rows: PyTorch does that.
    dw, db = sums.sum(dim=0)
    return dx, dw, db


# %%
# A function to train with
# ------------------------
#
# The autograd function takes shared rows where it can, and two sweeps
# otherwise, in each pass by itself. A row can have at most 2**30 columns,
# because the backward pass in two sweeps counts the columns of two rows in 32
# bits. The function does not check that. The checks of arguments are those of
# the pages before. Both are folded.

# %%

# Scaffold: the autograd function.


def contiguous_or_none(tensor):
    """The tensor with its elements side by side; copied only if needed."""
    if tensor is None:
        return None
    return tensor.contiguous()


class LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, b, eps):
        x = contiguous_or_none(x)
        w = contiguous_or_none(w)
        b = contiguous_or_none(b)
        y, mean, rstd = forward(x, w, b, eps)
        ctx.save_for_backward(x, w, mean, rstd)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable  # no second derivatives
    def backward(ctx, dy):
        x, w, mean, rstd = ctx.saved_tensors
        dy = dy.contiguous()
        wants_dx, wants_dw, wants_db, _ = ctx.needs_input_grad
        results = None
        if can_share(x):
            results = backward_shared(dy, x, w, mean, rstd)
        if results is None:
            wanted = (wants_dx, wants_dw, wants_db)
            results = backward_in_sweeps(dy, x, w, mean, rstd, wanted)
        dx, dw, db = results

        # The shared kernel makes all three: leave out what nobody wants.
        if not wants_dx:
            dx = None
        if not wants_dw:
            dw = None
        if not wants_db:
            db = None
        # Autograd rounds dw and db to the types of w and b. eps has none.
        return dx, dw, db, None


# %%

# Scaffold: which arguments are taken.


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


# %%


def layer_norm(x, normalized_shape, weight=None, bias=None, eps=1e-5):
    """Normalize x over its last dimensions; both passes run in Triton.

    x has floats of 16 bits or more, and any dimensions and strides.
    normalized_shape, a number or a shape, gives the last dimensions of x.
    weight and bias have that shape, or are None.
    """
    if isinstance(normalized_shape, int):
        normalized_shape = [normalized_shape]
    shape = torch.Size(normalized_shape)
    check_arguments(x, shape, weight, bias, eps)

    # The kernels only know matrices, so all other dimensions become rows.
    N = shape.numel()
    if weight is not None:
        weight = weight.reshape(N)
    if bias is not None:
        bias = bias.reshape(N)
    return LayerNorm.apply(x.reshape(-1, N), weight, bias, eps).reshape(
        x.shape
    )


# %%
# Is it right? We compare each element with PyTorch's layer norm in float64.

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

shape = (3, 72)  # small, because the interpreter is slow
if ON_GPU:
    shape = (37, 2**18)
for dtype in (torch.float16, torch.float32):
    check(layer_norm, *shape, dtype)

# %%
# How fast is the backward pass?
# ------------------------------

# %%

# Scaffold: the backward pass, a benchmark of shared rows.


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=[65536, 524288, 1048576],
        line_arg="provider",
        line_vals=["triton", "sweeps", "torch", "torch.compile", "copy"],
        line_names=[
            "Triton",
            "Two sweeps",
            "PyTorch",
            "torch.compile",
            "Copy",
        ],
        ylabel="GB/s",
        plot_name="layer-norm-shared-rows-backward",
        args={"M": 4096, "dtype": torch.float16, "mode": "backward"},
    )
)
def bench_backward(M, N, dtype, mode, provider):
    """Device time: a CUDA graph of several calls, each with inputs of its own
    and after L2 was overwritten, less the graph without the calls; median, 20%
    and 80% quantiles. At most 512 MB a matrix. Copy: the best of six tiles."""
    if not ON_GPU:
        return 3 * [float("nan")]
    M = rows_of(M, N, dtype)
    bytes_moved = 3 * M * N * dtype.itemsize  # read x and dy, write dx

    def prepare_ours():
        x, w, b, dy = (t.detach() for t in inputs(M, N, dtype))
        _, mean, rstd = forward(x, w, b, eps=1e-5)
        if provider == "triton":
            return lambda: backward_shared(dy, x, w, mean, rstd)
        wanted = (True, True, True)
        return lambda: backward_in_sweeps(dy, x, w, mean, rstd, wanted)

    def speed_of(function):
        """Of the backward pass alone: the forward pass runs once, before."""

        def prepare():
            x, w, b, dy = inputs(M, N, dtype)
            y = function(x, w, b, eps=1e-5)

            def run():
                return torch.autograd.grad(y, (x, w, b), dy, retain_graph=True)

            return run

        return speed(bytes_moved, prepare)

    if provider in ("triton", "sweeps"):
        return speed(bytes_moved, prepare_ours)
    if provider == "torch":
        return speed_of(pytorch_layer_norm)
    if provider == "torch.compile":
        return best_of_three_compilations(pytorch_layer_norm, speed_of)
    return ceiling(reads=2, writes=1, shape=(M, N), dtype=dtype)


# %%

report(bench_backward)

# %%
# **What the figure shows.**
# On the H100 our backward pass reaches 85% to 94% of the copy, two sweeps
# reach 57% to 59%, PyTorch reaches 20% to 37%, and torch.compile reaches 37%
# to 51%. Backward, ours is 2.5 to 4.3 times as fast as PyTorch. It is 1.7 to
# 2.4 times as fast as torch.compile. The wider the rows, the less we reach:
# 94% at 65536 columns, 89% at 524288, and 85% at 1048576.
#
# On the H200 our backward pass reaches 84%, 79% and 73% of the copy at these
# three widths, two sweeps reach 57% to 58%, PyTorch reaches 15% to 35%, and
# torch.compile reaches 33% to 43%. Ours is 2.4 to 4.9 times as fast as
# PyTorch, and 1.7 to 2.4 times as fast as torch.compile.
#
# **Why.**
# Two sweeps read ``x`` and ``dy`` twice and move five matrices instead of
# three, which leaves them 60% of the copy. PyTorch reads both twice for ``dx``
# and once more for ``dw`` and ``db``. These seven matrices leave it 43%, and
# as in the forward pass it has fewer threads the wider the rows are.
# Why torch.compile does best in the widest rows, we have not looked into.
#
# Our slices have 8 KB at most, because ``dw`` and ``db`` take registers, too.
# So a row has more words than forward: 64 and not 8 at 65536 columns, 128 and
# not 64 at 524288, and 256 and not 128 at 1048576, where all programs share
# one row. And only at 65536 columns an SM has three programs, so that two can
# work while one waits. More words and fewer programs both fit what we see, but
# we have not measured how much each of them costs. All the same, we are about
# as near to the copy as forward, or nearer.
#
# **What follows.**
# One launch does all: no row is read twice, and ``dw`` and ``db`` need only a
# few rows of sums, one for each group.
#
# Where PyTorch or a library is better
# ------------------------------------
#
# - **In narrower rows.** A row that one program can hold needs no messages, as
#   in `Chunks instead of padding <05-chunks.html>`_. And where a cache holds a
#   row between its sweeps, the second sweep is cheap: forward, two sweeps are
#   ahead of us at 65536 columns. `Every width
#   <11-every-width.html>`_ measures which is best where.
#   On the H200 they are ahead of us at 393216 columns as well, where a quarter
#   of our lanes is idle.
# - **Beside other kernels.** A cooperative launch waits until it has all SMs
#   that it needs. PyTorch's kernels and two sweeps take those that are free.
# - **On other GPUs.** These kernels need NVIDIA's PTX, and what you see here
#   was measured on an H100 and an H200 only.
# - **PyTorch can do more.** It has second derivatives, and it does not compile
#   a kernel for each new width.
# - **Only some gradients.** Our backward kernel always makes ``dx``, ``dw``
#   and ``db``, even if you need only one of them.
#
# Exercise 1: a message of a softmax
# ----------------------------------
#
# A softmax needs the largest element of a row, and the sum of the exponentials
# of all distances from it. Here, four programs share a row. Each of them
# computes both numbers for its slice and publishes them in one word. The
# kernel below collects the words and just adds up the sums, which is wrong:
# each of them was computed with another largest element. Mend the line with
# ``to do``.
# ``largest`` and ``total`` have shape (1, SLICES) by then, and each program
# should store the sum of ``exp(x - m)`` over the whole row, where ``m`` is the
# largest element of the row.
#
# **Hint 1.** A slice with largest element 3 has told us the sum of
# ``exp(x - 3)``. The largest element of the row is 5. What is the sum of
# ``exp(x - 5)`` over the same slice?
#
# **Hint 2.** ``exp(x - 5)`` is ``exp(x - 3) * exp(3 - 5)``. So the sum of each
# slice needs one factor.


@triton.jit
def _shared_exponentials(
    x_ptr,  # (SLICES, LANES)
    out_ptr,  # (SLICES,): what each program finds
    words_ptr,  # (1, SLICES), empty
    LANES: tl.constexpr,
    SLICES: tl.constexpr,
    PTX: tl.constexpr,
):
    s = tl.program_id(0)
    x = tl.load(x_ptr + s * LANES + tl.arange(0, LANES))[None, :]
    largest = tl.max(x, axis=1)
    total = tl.sum(tl.exp(x - largest[:, None]), axis=1)
    _publish(words_ptr, 0, s, largest, total, SLICES, PTX)
    # largest and total become tiles of one row, with a lane for each slice.
    largest, total = _collect(words_ptr, 0, 1, SLICES, SLICES, PTX)
    tl.store(out_ptr + s, tl.sum(total))  # to do


def exercise_1(kernel):
    """Print what the programs find, and say whether it is right."""
    torch.manual_seed(0)
    x = 100 + 3 * torch.randn(4, 16, device=DEVICE)
    out = x.new_empty(4)
    together(
        kernel,
        programs=4,
        per_sm=1,
        warps=4,
        x_ptr=x,
        out_ptr=out,
        words_ptr=empty_words(1, 4),
        LANES=16,
        SLICES=4,
    )
    exact = (x.double() - x.max()).exp().sum()
    print("found:", [round(found, 3) for found in out.tolist()])
    print(f"exact: {exact:.3f}")
    return torch.allclose(out.double(), exact, rtol=1e-5)


print("right:", exercise_1(_shared_exponentials))

# %%

# Solution 1


@triton.jit
def _shared_exponentials_1(
    x_ptr,
    out_ptr,
    words_ptr,
    LANES: tl.constexpr,
    SLICES: tl.constexpr,
    PTX: tl.constexpr,
):
    s = tl.program_id(0)
    x = tl.load(x_ptr + s * LANES + tl.arange(0, LANES))[None, :]
    largest = tl.max(x, axis=1)
    total = tl.sum(tl.exp(x - largest[:, None]), axis=1)
    _publish(words_ptr, 0, s, largest, total, SLICES, PTX)
    largest, total = _collect(words_ptr, 0, 1, SLICES, SLICES, PTX)
    # Distances from the largest element of all, in place of our own.
    total *= tl.exp(largest - tl.max(largest, axis=1)[:, None])
    tl.store(out_ptr + s, tl.sum(total))


assert exercise_1(_shared_exponentials_1)

# %%
# What we learned
# ---------------
#
# These are the designs of this page: what they have to move, and what they
# reach at 1048576 columns on the H100.
#
# Forward:
#
# - **Two sweeps** read ``x`` twice: three matrices. They reach 63% of a copy.
# - **Shared rows** read it once, and reach 85%.
# - **PyTorch** reaches 16% forward, and **torch.compile** 62%.
#
# Backward:
#
# - **Two sweeps** read ``x`` and ``dy`` twice: five matrices. They reach 57%
#   of the copy.
# - **Shared rows** read both once, and reach 85%.
# - **PyTorch** reaches 20% backward, and **torch.compile** 51%.
#
# And an exchange between 128 programs takes 1.65 µs if they wait for the words
# at once, and 0.50 µs if they collect them a turn later.
#
# For kernels in general:
#
# - A message whose value says whether it has arrived needs no flag, no lock
#   and no promise about the order of other accesses. It must be stored and
#   loaded in one piece.
# - Programs that wait for each other must all run at the same time. Ask CUDA
#   whether they fit, launch them together, and have a way out if they don't.
# - Don't wait: do something else until the message is there. To finish a tile
#   one turn later takes registers for that tile, and little time.
# - A loop that waits needs an end, so that a mistake is an error and not a
#   kernel that hangs.
#
# **Next:** what does it cost if ``dx`` has a kernel of its own, and ``dw`` and
# ``db`` another one? `What a second pass costs <09-two-passes.html>`_ measures
# it.
