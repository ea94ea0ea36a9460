"""Page 04 compiled for GPUs that this machine does not need to have."""

import re

import pytest

from compiled.aot import TARGETS, TRITON, Job, build
from tutorial import load

NAME = "04-layer-norm-two-pass-backward"
page = load(NAME)
SIZE = {"fp16": 2, "bf16": 2, "fp32": 4, "fp64": 8}
# Rows at or just beyond the limits of the rules.
WIDTHS = [1032, 4104, 5128, 8192, 8200, 14344, 24584, 32776, 2**17]
MATRICES = ("dy_ptr", "x_ptr", "w_ptr", "b_ptr", "y_ptr", "dx_ptr")


def job(kernel, dtype, constants, options, **more):
    """A kernel as it is launched; pointers and sizes are aligned."""
    wide = "fp64" if dtype == "fp64" else "fp32"
    signature = dict.fromkeys((*MATRICES, "dw_ptr", "db_ptr"), f"*{dtype}:16")
    statistics = "mean_ptr", "rstd_ptr", "sums_ptr"
    signature |= dict.fromkeys(statistics, f"*{wide}:16")
    signature |= dict.fromkeys(("M", "SPLIT", "ONE", "TWO"), "i32:16")
    constants = constants | options
    warps = constants.pop("num_warps")
    return Job(NAME, kernel, signature, constants, num_warps=warps, **more)


def forward(N, dtype="fp16", **more):
    options = page.plan_forward(N, SIZE[dtype])
    kernel, constants = "_layer_norm_fwd_sweeps", {"N": N, "eps": 1e-5}
    if "ROWS" in options:
        kernel, constants = "_layer_norm_fwd", constants | {"EVEN": True}
    return job(kernel, dtype, constants, options, **more)


def two_pass(N, dtype="fp16", M=4096, plan=None, even=True, **more):
    options = page.plan_backward(M, N, SIZE[dtype]) | (plan or {})
    del options["band"], options["split"]
    constants = {"N": N, "EVEN": even}
    return job("_layer_norm_bwd_two_pass", dtype, constants, options, **more)


def one_pass(N, dtype="fp16", **more):
    options = page.plan_one_pass(N, SIZE[dtype])
    del options["per_sm"]
    constants = {"N": N, "EVEN": True}
    return job("_layer_norm_bwd_one_pass", dtype, constants, options, **more)


def test_what_the_panels_do_not_show():
    """Tiles that are not full, a type and a plan, for every target."""
    jobs = [
        job
        for target in TARGETS
        for job in (
            forward(1000, target=target),
            two_pass(1000, target=target, even=False),
            two_pass(32768, target=target),
            two_pass(4096, "fp64", target=target),
        )
    ]
    jobs.append(two_pass(512, "fp32", plan=page.CK | {"band": 1, "split": 1}))
    for built in build(jobs):
        assert built.registers > 0


@pytest.mark.parametrize("kernel", [forward, two_pass])
def test_no_spills_and_wide_accesses(kernel):
    jobs = [kernel(N) for N in WIDTHS]
    for one, built in zip(jobs, build(jobs), strict=True):
        what = one.kernel, one.constants["N"]
        # Triton 3.9 keeps two numbers in memory at one width.
        most = 8 if TRITON == "3.9" else 0
        assert built.spills <= most, (what, built.spills)
        # Fits into the shared memory of every GPU that loads ahead.
        assert built.shared <= 99 * 1024, (what, built.shared)
        accesses = built.widths()
        assert accesses["ld", 2] <= 1, (what, accesses)  # the pivot
        assert not accesses["st", 2], (what, accesses)
        assert accesses["ld", 16] and accesses["st", 16], what


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_no_spills_in_other_types(dtype):
    some = [1024, 5888, 15872, 65536]
    jobs = [f(N, dtype) for N in some for f in (forward, two_pass)]
    for one, built in zip(jobs, build(jobs), strict=True):
        what = one.kernel, one.constants["N"]
        assert built.spills == 0, (what, built.spills)
        assert built.shared <= 99 * 1024, (what, built.shared)


def test_tall_and_one_pass_do_not_spill():
    jobs = [two_pass(2**i, M=2**21) for i in range(5, 11)]
    jobs += [one_pass(N) for N in (32, 1024, 4096, 8192, 10240)]
    for one, built in zip(jobs, build(jobs), strict=True):
        assert built.spills == 0, (one.kernel, one.constants["N"])


def test_one_pass_spills_where_the_page_says_so():
    """The accumulators of wide rows do not fit."""
    (built,) = build([one_pass(16384)])
    assert built.spills > 0


NARROW = {
    "_layer_norm_fwd": (
        "first = tl.cast(tl.program_id(0), tl.int64) * ROWS",
        "first = tl.program_id(0) * ROWS",
    ),
    "_dx_tile": (
        "first = tl.cast(tile, tl.int64) * ROWS  # M * N may pass 2**31",
        "first = tile * ROWS",
    ),
    "_sum_columns": (
        "first = tl.cast(split, tl.int64) * SPLIT",
        "first = split * SPLIT",
    ),
}


@pytest.mark.parametrize("name", NARROW)
def test_row_offsets_have_64_bits(name):
    """M * N may pass 2**31; the mutant multiplies by N in 32 bits."""
    kernel = forward if name == "_layer_norm_fwd" else two_pass
    jobs = [kernel(7001, replace=r) for r in ((), [NARROW[name]])]
    wide = r"(mul|mad)\.(lo\.s64|wide\.[us]32)\s.*\b(7001|14002)[,;]"
    right, mutant = (
        len(re.findall(wide, built.text)) for built in build(jobs)
    )
    assert mutant < right, (mutant, right)
