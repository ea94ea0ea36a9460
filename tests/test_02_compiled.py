"""Page 02 compiled for GPUs that this machine does not need to have."""

import re

import pytest

from aot import COMPILER_ADDS_BARRIER, TARGETS, Job, build

NAME = "02-layer-norm-weight-gradients"
SIZES = [512 * i for i in range(2, 21)]  # of the benchmark
MAX_COLUMNS = 10240
SIZE = {"fp16": 2, "bf16": 2, "fp32": 4, "fp64": 8}


def job(kernel, pointers, constants, acc=(), dtype="fp16", **more):
    wide = "fp64" if dtype == "fp64" else "fp32"
    signature = {
        f"{name}_ptr": f"*{wide if name in acc else dtype}:16"
        for name in pointers.split()
    }
    signature |= {"M": "i32:16", "locks_ptr": "*i32:16"}
    return Job(NAME, kernel, signature, constants, **more)


def tile(columns, dtype, narrow, wide):
    # The rule of the page, written out.
    size = SIZE[dtype]
    rows, chunk, warps = 1, 2048, 8
    if columns <= wide:
        chunk, warps = 1024, 4
    if columns <= narrow:
        chunk = min(max(1 << (columns - 1).bit_length(), 16), 1024)
        rows = 2048 // chunk
    warps = min(warps * size // 2, 16)
    chunks = -(-columns // chunk)
    room = max(8 // warps, 1) * 2 * rows * chunk * chunks * size
    sizes = {"N": columns, "ROWS": rows, "CHUNK": chunk, "CHUNKS": chunks}
    return sizes, warps, 1 + min(98304 // room, 3)


def forward(N, dtype="fp16", **more):
    sizes, warps, _ = tile(N, dtype, 1024, 5120)
    return job(
        "_layer_norm_fwd",
        "x w b y mean rstd",
        sizes | {"eps": 1e-5},
        ("mean", "rstd"),
        dtype,
        num_warps=warps,
        **more,
    )


def pipelined(N, dtype="fp16", **more):
    sizes, warps, stages = tile(N, dtype, 1536, 4096)
    return job(
        "_layer_norm_bwd_pipelined",
        "dy x w mean rstd dx sums",
        sizes | {"STAGES": stages, "PDL": False},
        ("mean", "rstd", "sums"),
        dtype,
        num_warps=warps,
        **more,
    )


def sum_rows(N, dtype="fp16", pdl=False, **more):
    constants = {"N": 2 * N, "ROWS": 256, "COLS": 16, "PDL": pdl}
    return job("_sum_rows", "sums out", constants, ("sums",), dtype, **more)


def rung(kernel, N, pointers, constants=(), **more):
    block = 1 << (N - 1).bit_length()
    return job(
        f"_layer_norm_bwd_{kernel}",
        f"dy x w mean rstd dx {pointers}",
        {"N": N, "BLOCK": block, **dict(constants)},
        ("mean", "rstd", "sums"),
        num_warps=min(max(block // 512, 1), 16),
        **more,
    )


def lock(N, barrier=True, **more):
    constants = {"GROUP_SIZE_M": 128, "BARRIER": barrier}
    return rung("lock", N, "sums", constants, **more)


def all_kernels(N, **more):
    columns = job(
        "_layer_norm_bwd_dwdb",
        "dy x mean rstd dw db",
        {"N": N, "ROWS": 32, "COLS": 128},
        ("mean", "rstd"),
        num_warps=8,
        **more,
    )
    return [
        forward(N, **more),
        pipelined(N, **more),
        sum_rows(N, **more),
        columns,
        rung("dx", N, "", **more),
        rung("atomic", N, "sums", **more),
        rung("persistent", N, "sums", **more),
        lock(N, **more),
        lock(N, barrier=False, **more),
    ]


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
    built = iter(
        build([j for t in TARGETS for j in all_kernels(4096, target=t)])
    )
    return {t: [next(built) for _ in all_kernels(1)] for t in TARGETS}


@pytest.mark.parametrize("target", TARGETS)
def test_compiles(everywhere, target):
    for number, built in enumerate(everywhere[target]):
        assert built.registers > 0
        # The first three are the final form. One rung spills a word.
        assert built.spills <= (0 if number < 3 else 8), (number, built.spills)


@pytest.mark.parametrize("target", TARGETS)
def test_barrier_before_release(everywhere, target):
    *_, right, wrong = everywhere[target]
    assert barrier_before_release(right.text)
    assert barrier_before_release(wrong.text) == COMPILER_ADDS_BARRIER


@pytest.mark.parametrize("target", TARGETS)
def test_asynchronous_copies(everywhere, target):
    """Rung 5 loads ahead where the GPU can; no other kernel does."""
    counts = [b.text.count("cp.async.cg") for b in everywhere[target]]
    pipelined_count = counts.pop(1)
    assert (pipelined_count > 0) == (target in ("sm_80", "sm_90", "sm_100"))
    assert not any(counts)


def test_one_stage_has_no_asynchronous_copies():
    one = pipelined(4096)
    one.constants["STAGES"] = 1
    (built,) = build([one])
    assert "cp.async" not in built.text


def test_early_launch():
    main = pipelined(4096)
    main.constants["PDL"] = True
    first, second, plain = build(
        [main, sum_rows(4096, pdl=True), sum_rows(4096)]
    )
    assert "griddepcontrol.launch_dependents" in first.text
    wait = second.text.index("griddepcontrol.wait")
    assert wait < second.text.index("ld.global")
    assert "griddepcontrol" not in plain.text


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_no_spills_and_wide_accesses_at_benchmark_sizes(dtype):
    sizes = SIZES if dtype == "fp16" else [1024, 1536, 4096, 4608, 8192, 10240]
    jobs = [f(N, dtype) for N in sizes for f in (forward, pipelined, sum_rows)]
    for job, built in zip(jobs, build(jobs), strict=True):
        what = job.kernel, job.constants["N"], built.spills
        assert built.spills == 0, what
        # What rung 5 has on its way fits into the memory of every GPU that
        # can load ahead.
        assert built.shared <= 99 * 1024, (what, built.shared)
        if job.kernel != "_sum_rows":
            widths = built.widths()
            assert widths["st", 16] >= 1, (what, widths)
            assert not any(widths[k, 2] for k in ("ld", "st")), what
            assert not any(widths[k, 8] for k in ("ld", "st")), what


def test_float32_weights_of_float16_rows():
    jobs = [pipelined(N) for N in (1024, 4096, 10240)]
    for job in jobs:
        job.signature["w_ptr"] = "*fp32:16"
    for job, built in zip(jobs, build(jobs), strict=True):
        assert built.spills == 0, job.constants


def test_every_width_and_type_compiles():
    jobs = [
        f(N, dtype)
        for dtype in SIZE
        for N in (1, 129, 1151, 4097, 9999, MAX_COLUMNS)
        for f in (forward, pipelined)
    ]
    for built in build(jobs):
        assert built.registers > 0


NARROW = [("return tl.cast(tile, tl.int64) * (ROWS * N)", "return tile * N")]


def test_row_offsets_have_64_bits():
    """The mutant multiplies in 32 bits; the page must not."""
    jobs = [
        f(4097, replace=replace)
        for replace in ((), NARROW)
        for f in (forward, pipelined)
    ]
    narrow = [
        re.search(r"(mul|mad)\.lo\.s32\s.*\b4097\b", built.text) is not None
        for built in build(jobs)
    ]
    assert narrow == [False, False, True, True]
