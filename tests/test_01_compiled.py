"""Page 01 compiled for GPUs that this machine does not need to have."""

import re

import pytest

from aot import COMPILER_ADDS_BARRIER, TARGETS, Job, build

NAME = "01-layer-norm"
SIZES = [512 * i for i in range(2, 32)]  # of the benchmark
NO_BARRIER = (
    "    tl.debug_barrier()  # every thread has stored its columns\n",
    "",
)


def options(N, itemsize, warp_bytes):
    # The rule of the page, written out.
    block = 1 << (N - 1).bit_length()
    return block, min(max(block * itemsize // warp_bytes, 4), 16)


def forward(N, dtype="fp16", acc="fp32", size=2, **more):
    block, warps = options(N, size, 4096)
    signature = dict.fromkeys(("x_ptr", "w_ptr", "b_ptr", "y_ptr"), dtype)
    signature |= dict.fromkeys(("mean_ptr", "rstd_ptr"), acc)
    return Job(
        NAME,
        "_layer_norm_fwd",
        {name: f"*{kind}:16" for name, kind in signature.items()},
        {"eps": 1e-5, "N": N, "BLOCK": block},
        num_warps=warps,
        **more,
    )


def backward(N, dtype="fp16", acc="fp32", size=2, **more):
    block, warps = options(N, size, 2048)
    signature = dict.fromkeys(("dy_ptr", "x_ptr", "w_ptr", "dx_ptr"), dtype)
    sums = ("mean_ptr", "rstd_ptr", "sums_ptr")
    signature |= dict.fromkeys(sums, acc) | {"locks_ptr": "i32"}
    return Job(
        NAME,
        "_layer_norm_bwd_dx",
        {name: f"*{kind}:16" for name, kind in signature.items()}
        | {"M": "i32:16"},
        {"N": N, "GROUP_SIZE_M": 128, "BLOCK": block},
        num_warps=warps,
        **more,
    )


def reduce(N, dtype="fp16", acc="fp32", **more):
    signature = {"sums_ptr": acc, "dw_ptr": dtype, "db_ptr": dtype}
    return Job(
        NAME,
        "_layer_norm_bwd_dwdb",
        {name: f"*{kind}:16" for name, kind in signature.items()}
        | {"programs": "i32:16"},
        {"N": N, "GROUP_SIZE_M": 128, "BLOCK": 16},
        **more,
    )


def barrier_before_release(text):
    """Is there a barrier between the last store and the release?"""
    if "amdgcn" in text:
        store, release, barrier = "global_store", "global_atomic_swap", "s_bar"
    else:
        store, barrier = r"\bst\.global", r"\bbar(rier)?\.(cta\.)?sync"
        release = r"\batom\.global\.gpu\.release\.exch"
    # On AMD the exchanges that take the lock look alike and come before.
    before = text[: list(re.finditer(release, text))[-1].start()]
    last = list(re.finditer(store, before))[-1]
    return re.search(barrier, before[last.start() :]) is not None


@pytest.fixture(scope="module")
def everywhere():
    """Each kernel for each target, and the second without its barrier."""
    jobs = []
    for target in TARGETS:
        jobs += [
            forward(4096, target=target),
            backward(4096, target=target),
            reduce(4096, target=target),
            backward(4096, target=target, replace=[NO_BARRIER]),
        ]
    built = iter(build(jobs))
    return {t: [next(built) for _ in range(4)] for t in TARGETS}


@pytest.mark.parametrize("target", TARGETS)
def test_compiles(everywhere, target):
    for built in everywhere[target][:3]:
        assert built.registers > 0
        assert built.spills == 0


@pytest.mark.parametrize("target", TARGETS)
def test_barrier_before_release(everywhere, target):
    assert barrier_before_release(everywhere[target][1].text)


@pytest.mark.parametrize("target", TARGETS)
def test_missing_barrier_is_caught(everywhere, target):
    found = barrier_before_release(everywhere[target][3].text)
    assert found == COMPILER_ADDS_BARRIER


def test_no_spills_and_wide_loads_at_benchmark_sizes():
    jobs = [f(N) for N in SIZES for f in (forward, backward, reduce)]
    for job, built in zip(jobs, build(jobs), strict=True):
        what = job.kernel, job.constants["N"]
        # The page says so: the sums of the widest rows leave the registers.
        wide = job.kernel == "_layer_norm_bwd_dx" and what[1] > 12288
        assert built.spills <= (400 if wide else 0), (what, built.spills)
        if job.kernel != "_layer_norm_bwd_dwdb":
            # x, dy, w and b move by 16 bytes; nothing by 2 or 8.
            widths = built.widths()
            assert widths["ld", 16] >= 3, (what, widths)
            assert not any(widths[k, 2] for k in ("ld", "st")), what
            assert not any(widths[k, 8] for k in ("ld", "st")), what


def test_widest_rows_of_each_type():
    jobs = [
        f(16384, dtype, acc, size)
        for dtype, acc, size in (
            ("fp16", "fp32", 2),
            ("bf16", "fp32", 2),
            ("fp32", "fp32", 4),
            ("fp64", "fp64", 8),
        )
        for f in (forward, backward)
    ]
    for job, built in zip(jobs, build(jobs), strict=True):
        assert built.registers > 0
        if job.kernel == "_layer_norm_fwd" and "64" not in str(job.signature):
            assert built.spills == 0, job


NARROW = [
    # forward, then backward
    ("row = tl.program_id(0).to(tl.int64)", "row = tl.program_id(0)"),
    ("row = tl.cast(i, tl.int64)", "row = i"),
]


def test_row_offsets_have_64_bits():
    jobs = [
        f(4097, replace=replace)
        for replace in ((), NARROW)
        for f in (forward, backward)
    ]
    for job in jobs:
        if "locks_ptr" in job.signature:
            # Without the buffers: their offsets are small.
            job.constants |= {"sums_ptr": None, "locks_ptr": None}
    narrow = [
        re.search(r"mul\.lo\.s32\s.*\b4097;", built.text) is not None
        for built in build(jobs)
    ]
    assert narrow == [False, False, True, True]
