"""Page 03 compiled for GPUs that this machine does not need to have."""

import re

import pytest
import torch

from compiled.aot import TARGETS, TRITON, Job, build
from tutorial import load

NAME = "03-layer-norm-any-width"
page = load(NAME)
SWEEP = [512 * i for i in range(2, 32)]
TYPES = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}


@pytest.fixture(autouse=True)
def one_h200(monkeypatch):
    """The rule as on a GPU with 132 multiprocessors."""
    monkeypatch.setattr(page, "NUM_SMS", 132)


def job(N, mode, dtype="fp16", share=True, plan=None, even=True, **more):
    """The kernel that the rule selects for a width, as it is launched."""
    rule = page.plan_forward if mode == "forward" else page.plan_backward
    itemsize = TYPES[dtype].itemsize
    step = 16 // itemsize if N * itemsize % 16 else 1
    kind, options = plan or rule(N, itemsize, share, step)
    options = {"HINTS": True} | options if kind == "sweeps" else dict(options)
    warps, per_sm = options.pop("num_warps"), options.pop("per_sm", 1)
    kernel = f"_layer_norm_{mode[0]}wd_{kind}"
    acc = "fp64" if dtype == "fp64" else "fp32"
    signature = dict.fromkeys(
        ("dy_ptr", "x_ptr", "w_ptr", "b_ptr", "y_ptr", "dx_ptr"), dtype
    )
    names = "mean_ptr", "rstd_ptr", "partial_ptr", "sums_ptr"
    signature |= dict.fromkeys(names, acc) | {"words_ptr": "i64"}
    signature = {name: f"*{kind}:16" for name, kind in signature.items()}
    slices = -(-(N + step - 1) // options["CHUNK"])
    # Early launches exist from sm_90 on, waiting by machine code on NVIDIA.
    target = more.get("target", "sm_90")
    constants = {
        "eps": 1e-5,
        "N": N,
        "STEP": step,
        "EVEN": even,
        "PADDED": 1 << (slices - 1).bit_length(),
        "DIRECT": target.startswith("sm"),
        "PDL": target in ("sm_90", "sm_100"),
    } | options
    names = page_arguments(kernel)
    fits = ("slices", "shared", "shifted")
    if kind in fits and kernel != "_layer_norm_bwd_slices":
        more["maxnreg"] = min(65536 // (32 * warps * per_sm) // 8 * 8, 255)
    return Job(
        NAME,
        kernel,
        signature | {"M": "i32:16"},
        {name: constants[name] for name in names if name in constants},
        num_warps=warps,
        **more,
    )


def page_arguments(kernel):
    return getattr(page, kernel).arg_names


def helper(kernel, dtype="fp16", acc="fp32", **more):
    """The two small kernels of the backward pass."""
    signature = dict.fromkeys(("dy_ptr", "x_ptr", "w_ptr"), dtype)
    signature |= dict.fromkeys(("dw_ptr", "db_ptr"), dtype)
    names = "mean_ptr", "sums_ptr", "partial_ptr"
    signature |= dict.fromkeys(names, acc)
    constants = {"N": 16384, "CHUNK": 4096}
    more_ints = {"M": "i32", "P": "i32"}
    if kernel == "_sum_rows":
        early = more.get("target", "sm_90") in ("sm_90", "sm_100")
        constants = {"N": 4096, "ROWS": 256, "COLS": 16, "PDL": early}
    signature = {name: f"*{kind}:16" for name, kind in signature.items()}
    warps = 4 if kernel == "_sum_rows" else 8
    return Job(
        NAME, kernel, signature | more_ints, constants,
        num_warps=warps, **more,
    )  # fmt: skip


@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_compiles(target):
    jobs = [
        job(1000, "forward", target=target),
        job(8192, "forward", target=target, even=False),
        job(40000, "forward", target=target),
        job(65536, "forward", target=target),
        job(1000, "backward", target=target, even=False),
        job(1001, "forward", target=target),
        job(1001, "backward", target=target, even=False),
        job(20001, "forward", target=target),
        job(20001, "backward", target=target),
        job(8192, "backward", target=target),
        job(16384, "backward", target=target),
        job(16384, "backward", target=target, share=False),
        helper("_layer_norm_bwd_sums", target=target),
        helper("_sum_rows", target=target),
    ]
    for built in build(jobs):
        assert built.registers > 0
        if not target.startswith("sm"):
            assert "ld.relaxed" not in built.text


# Bytes that may spill in rows that are not aligned, with a version of triton.
# Those that share rows have 168 registers a thread, the others all 255.
SPILLS = {
    "3.6": {"_layer_norm_fwd_shifted": 16, "_layer_norm_bwd_shared": 16},
    "3.7": {"_layer_norm_bwd_shared": 16},
    "3.9": {"_layer_norm_bwd_rows": 16, "_layer_norm_bwd_shared": 128},
}


def allowed(one):
    if one.constants.get("STEP", 1) == 1:
        return 0
    return SPILLS.get(TRITON, {}).get(one.kernel, 0)


def widths():
    """The sizes of the benchmarks, and both sides of every limit."""
    limits = (512, 1024, 1536, 2560, 3072, 4096, 5120, 10240, 14336, 20480)
    limits += (24576, 49152, 65536, 131072, 262144, 524288, 32768)
    near = [limit + d for limit in limits for d in (-8, 8)]
    wide = [2**i for i in range(14, 21)]
    return sorted({1, 128, 1000, *SWEEP, *limits, *near, *wide})


@pytest.mark.parametrize("mode", ["forward", "backward"])
def test_no_spills_and_wide_loads(mode):
    """Rows that all begin at a multiple of 16 bytes."""
    jobs = [job(N, mode) for N in widths() if N >= 128]
    for one, built in zip(jobs, build(jobs), strict=True):
        N = one.constants["N"]
        what = one.kernel, N
        assert built.spills <= allowed(one), (what, built.spills)
        if N % 8 == 0 and N >= 512 and "cp.async" not in built.text:
            assert built.widths()["ld", 16] >= 2, what
            assert built.widths()["ld", 2] <= 1, what  # the pivot


@pytest.mark.parametrize("mode", ["forward", "backward"])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_rows_that_start_anywhere(mode, dtype):
    """Loads stay asynchronous, by 8 bytes or 16."""
    some = [513, 1023, 1151, 2047, 2561, 4097, 5001, 7777, 8183, 9999, 12345]
    some += [16375, 16377, 20001, 65537]
    jobs = [job(N, mode, dtype) for N in some]
    for one, built in zip(jobs, build(jobs), strict=True):
        what = one.kernel, one.constants["N"], built.spills
        assert built.spills <= allowed(one), what
        copies = re.findall(r"cp\.async[^;]*, 0x(\w+)", built.text)
        narrow = [size for size in copies if size not in ("8", "10")]
        assert len(copies) > 1, what
        assert mode == "backward" or not narrow, (what, narrow)


@pytest.mark.parametrize("mode", ["forward", "backward"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_no_spills_in_other_types(mode, dtype):
    some = [1024, 5120, 8704, 10240, 15872, 24576, 65536, 131072, 2**18]
    jobs = [job(N, mode, dtype) for N in some]
    for one, built in zip(jobs, build(jobs), strict=True):
        what = one.kernel, one.constants["N"]
        assert built.spills <= allowed(one), (what, built.spills)


def test_portable_plans_do_not_spill():
    jobs = [job(N, "backward", share=False) for N in (16384, 2**20)]
    jobs += [job(N, "forward", share=False) for N in (65536, 2**20)]
    jobs += [job(16384, "backward", "fp32", share=False)]
    for one, built in zip(jobs, build(jobs), strict=True):
        assert built.spills == 0, (one.kernel, built.spills)


def test_loads_are_asynchronous():
    """Backward and shared rows load ahead, by 16 bytes."""
    jobs = [job(N, "backward") for N in (1024, 8192, 16384, 65536, 2**19)]
    jobs += [job(2**17, "forward"), job(16384, "backward", share=False)]
    for one, built in zip(jobs, build(jobs), strict=True):
        assert "cp.async.cg.shared.global" in built.text, one


def test_shared_rows_stay_in_registers():
    """No layout that moves whole tiles through shared memory."""
    jobs = [job(N, "forward") for N in (65536, 2**18, 2**20)]
    jobs += [job(N, "backward") for N in (10752, 65536, 2**19)]
    for one, built in zip(jobs, build(jobs), strict=True):
        assert built.text.count("st.shared") < 100, one


NARROW = [
    (
        "first = tl.cast(tl.program_id(0), tl.int64) * ROWS",
        "first = tl.program_id(0) * ROWS",
    )
]


def test_row_offsets_have_64_bits():
    """M * N may pass 2**31; the mutant has offsets of 32 bits."""
    jobs = [job(8200, "forward", replace=r) for r in ((), NARROW)]
    narrow = [
        re.search(r"mul\.lo\.s32\s.*\b8200;", built.text) is not None
        for built in build(jobs)
    ]
    assert narrow == [False, True]
