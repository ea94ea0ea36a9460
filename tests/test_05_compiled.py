"""Page 05 compiled for GPUs that this machine does not need to have."""

import re

import pytest
import torch

from compiled.aot import TARGETS, TRITON, Job, build
from tutorial import load

NAME = "05-fused-elementwise-layer-norm"
page = load(NAME)
SWEEP = [512 * i for i in range(2, 32)]
TYPES = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}
MATRICES = ("dy", "ds", "x", "r", "y", "s", "dr", "dx", "w", "b")


@pytest.fixture(autouse=True)
def one_h200(monkeypatch):
    """The rule as on a GPU with 132 multiprocessors."""
    monkeypatch.setattr(page, "NUM_SMS", 132)
    monkeypatch.setattr(page, "SHARED", 232448)
    monkeypatch.setattr(page, "CUDA", True)


PTX = [("PTX = tl.constexpr(CUDA)", "PTX = tl.constexpr(True)")]


def job(
    mode, N, dtype="fp16", weight=None, what="add", ds=True, even=True,
    plan=None, **more,
):  # fmt: skip
    """The kernel that the rule selects for a width, as it is launched."""
    act = None if what in ("add", "dropout", "plain") else f"@_{what}"
    acc = "fp64" if dtype == "fp64" else "fp32"
    drop = 2**30 if what == "dropout" else 0
    types = dict.fromkeys(MATRICES, dtype)
    types |= dict.fromkeys(("mean", "rstd", "partial", "sums"), acc)
    types["w"] = types["b"] = weight or dtype
    signature = {f"{k}_ptr": f"*{v}:16" for k, v in types.items()}
    signature |= {"M": "i32", "seed": "i64"}
    if plan is None:
        x = torch.empty(0, N, dtype=TYPES[dtype])
        w = torch.empty(0, dtype=TYPES[weight or dtype])
        name, p = act and act.removeprefix("@_"), 0.25 if drop else 0.0
        if mode == "forward":
            plan = page.default_forward_plan(x, x, w, w, name)
        else:
            ds_ = x if ds and act is None else None
            plan = page.default_plan(N, x, w, ds_, name, p)
    plan = dict(plan)
    per_sm = plan.pop("per_sm", None)
    warps, wide = plan.pop("num_warps"), plan.pop("SLICES", False)
    kernel = {
        "forward": "_fused_layer_norm_fwd"
        + ("" if "ROWS" in plan else "_sweeps"),
        "backward": "_fused_layer_norm_bwd" + ("_slices" if wide else ""),
    }[mode]
    target = more.get("target", "sm_90")
    constants = {"N": N, "eps": 1e-5, "EVEN": even, "ACT": act, "DROP": drop}
    constants |= {"PDL": target in ("sm_90", "sm_100")}
    constants |= {"STAGES": 1, "HIDE": True} | plan
    together = mode == "forward" and per_sm  # they share the registers
    if wide:
        slices = -(-N // plan["CHUNK"])
        constants["PADDED"] = 1 << (slices - 1).bit_length()
        direct = target.startswith("sm") and acc == "fp32"
        constants |= {"DIRECT": direct, "RUN": 0 if direct else 2}
        types["words"] = "i64" if direct else acc
        signature["words_ptr"] = f"*{types['words']}:16"
        together = direct
    if together and target.startswith("sm"):
        more |= page.registers(warps, per_sm)
    if target.startswith("sm"):  # known before the source is read
        more["replace"] = (*more.get("replace", ()), *PTX)
    if what != "add" and what != "dropout":
        constants |= dict.fromkeys(("r_ptr", "s_ptr", "ds_ptr", "dr_ptr"))
    elif not drop:
        constants["dx_ptr"] = None
    if not ds:
        constants["ds_ptr"] = None
    names = getattr(page, kernel).arg_names
    return Job(
        NAME,
        kernel,
        signature,
        {name: constants[name] for name in names if name in constants},
        num_warps=warps,
        **more,
    )


def helper(kernel, **more):
    """The small kernels of the backward pass, and the ceiling."""
    pointers = dict.fromkeys(
        ("dy", "x", "w", "a", "b", "c", "out1", "out2", "dw", "db"), "fp16"
    )
    pointers |= dict.fromkeys(("mean", "rstd", "sums", "partial"), "fp32")
    early = more.get("target", "sm_90") in ("sm_90", "sm_100")
    constants = {
        "_sum_rows": {"N": 4096, "ROWS": 256, "COLS": 16, "PDL": early},
        "_move": {"BLOCK": 2048},
    }[kernel]  # fmt: skip
    signature = {f"{k}_ptr": f"*{v}:16" for k, v in pointers.items()}
    signature |= {"P": "i32", "size": "i32:16"}
    return Job(NAME, kernel, signature, constants, **more)


HELPERS = ("_sum_rows", "_move")


@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_compiles(target):
    jobs = [
        job(mode, N, what=what, even=even, target=target)
        for mode in ("forward", "backward")
        for N, what, even in (
            (1000, "add", False),
            (4096, "dropout", True),
            (4097, "gelu_tanh", True),
            (40000, "dropout", True),
            (40000, "silu", True),
        )
    ]
    jobs += [helper(kernel, target=target) for kernel in HELPERS]
    for built in build(jobs):
        assert built.registers > 0
        assert ("xor.b32" in built.text) <= target.startswith("sm")


def allowed(one):
    """Bytes of a thread that the compiler may spill."""
    N = one.constants["N"] * (2 if "32" in one.signature["x_ptr"] else 1)
    if one.kernel == "_fused_layer_norm_bwd" and N >= 11264:
        return 80  # in bfloat16, with dropout
    if one.kernel == "_fused_layer_norm_bwd" and N >= 5120:
        return 48 if TRITON == "3.9" else 0
    if one.kernel == "_fused_layer_norm_fwd" and N > 14336:
        return 48  # with an activation
    if one.kernel == "_fused_layer_norm_fwd":
        return 16 if TRITON == "3.9" else 0
    if one.kernel == "_fused_layer_norm_fwd_sweeps":
        return 8 if TRITON == "3.6" else 0  # in bfloat16
    return 0


@pytest.mark.parametrize("mode", ["forward", "backward"])
def test_no_spills_and_wide_loads(mode):
    jobs = [job(mode, N) for N in (*SWEEP, 16384, 16392, 24576, 24584)]
    for one, built in zip(jobs, build(jobs), strict=True):
        N = one.constants["N"]
        what = one.kernel, N, built.spills
        assert built.spills == 0, what
        widths = built.widths()
        assert widths["st", 16] >= 1, what
        assert not any(widths[k, 2] for k in ("ld", "st")), what
        if "slices" not in one.kernel:  # they have words of 8 bytes
            assert not any(widths[k, 8] for k in ("ld", "st")), what


@pytest.mark.parametrize("what", ["dropout", "silu", "gelu", "gelu_tanh"])
def test_no_spills_with_a_stage(what):
    some = [1024, 2048, 4096, 5120, 6144, 7680, 8192, 9216, 10240, 12288]
    some += [14336, 15360, 15872, 20480]
    jobs = [job(mode, N, what=what) for N in some for mode in page.MODES]
    for one, built in zip(jobs, build(jobs), strict=True):
        what = one.kernel, one.constants["N"], built.spills
        assert built.spills <= allowed(one), what


@pytest.mark.parametrize("mode", page.MODES)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_no_spills_in_other_types(mode, dtype):
    some = [1024, 2560, 5120, 8192, 10240, 14336, 15872, 32768]
    jobs = [job(mode, N, dtype) for N in some]
    for one, built in zip(jobs, build(jobs), strict=True):
        what = one.kernel, one.constants["N"], built.spills
        assert built.spills <= allowed(one), what


def test_float32_weights_of_float16_rows():
    jobs = [job("backward", N, weight="fp32") for N in (1024, 4096, 8192)]
    jobs += [job("forward", N, weight="fp32") for N in (1024, 4096, 15872)]
    for one, built in zip(jobs, build(jobs), strict=True):
        what = one.kernel, one.constants["N"], built.spills
        assert built.spills == 0, what


def test_what_is_on_its_way_fits_into_shared_memory():
    jobs = [job("backward", N) for N in (1024, 4096, 5120, 10240, 16384)]
    for one, built in zip(jobs, build(jobs), strict=True):
        programs = 2 if one.constants["N"] <= 4096 else 1
        assert built.shared * programs <= 232448 - 1024 * programs
        assert "cp.async.cg.shared.global" in built.text


def test_without_dropout_no_random_bits_are_compiled():
    for mode in page.MODES:
        jobs = [job(mode, 2048, what=what) for what in ("add", "dropout")]
        without, with_it = build(jobs)
        philox = str(0xD2511F53 - 2**32)  # a constant of the generator
        assert philox not in without.text
        assert with_it.text.count(philox) >= 10  # once in each round


def test_no_mask_goes_through_memory():
    """With dropout forward reads and writes the same bytes as without."""
    jobs = [job("forward", 4096, what=what) for what in ("add", "dropout")]
    counts = []
    for built in build(jobs):
        counts.append(
            {
                kind: sum(
                    size * n
                    for (k, size), n in built.widths().items()
                    if k == kind and size >= 4 and size != 8
                )
                for kind in ("ld", "st")
            }
        )
    assert counts[0] == counts[1]


def test_forward_reads_and_writes_each_matrix_once():
    """16 bytes at a time: 4 chunks of x and residual, of s and y."""
    (built,) = build([job("forward", 4096)])
    widths = built.widths()
    chunks = 4096 // 1024
    assert widths["ld", 16] == 4 * chunks  # x, residual, w, b
    assert widths["st", 16] == 2 * chunks  # s, y


def test_the_function_is_in_place_of_its_call():
    silu, plain = build(
        [job("forward", 1024, what=w) for w in ("silu", "plain")]
    )
    assert "ex2.approx" in silu.text and "ex2.approx" not in plain.text
    assert not re.search(r"^\s*call", silu.text, re.MULTILINE)


def apply(block):
    """The kernel that only applies an activation, with 128 threads."""
    signature = {"x_ptr": "*fp32:16", "out_ptr": "*fp32:16", "N": "i32"}
    constants = {"ACT": "@_silu", "BLOCK": block}
    return Job(NAME, "_apply", signature, constants, replace=PTX)


def test_two_numbers_share_a_reciprocal():
    """Where a thread has two; else the other one would be any number."""
    row = job("forward", 4096, what="silu")
    built = build([row, apply(256), apply(128)])
    shared = [b.text.count("rcp.approx.ftz.f32") for b in built]
    per_thread = 4096 // (32 * row.num_warps)
    assert shared == [per_thread // 2, 1, 0]


@pytest.mark.parametrize("plan", page.ACTIVATION_PLANS, ids=str)
def test_activation_plans_fit(plan):
    """As many programs as the table says, by registers and shared memory."""
    n, _, warps, per_sm, stages = plan
    (built,) = build([job("forward", n, what="silu")])
    assert built.num_warps == warps
    assert built.registers * 32 * warps * per_sm <= 65536
    assert (built.shared + 1024) * per_sm <= 233472
    assert ("cp.async" in built.text) == (stages > 1)


FORGETS = [
    (
        "if PTX and x.dtype.primitive_bitwidth == 16:\n        x = tl.inl",
        "if False:\n        x = tl.inl",
    )
]


def test_forgetting_saves_registers():
    jobs = [job("backward", 14336, replace=r) for r in ((), FORGETS)]
    forgets, remembers = build(jobs)
    assert forgets.spills == 0
    assert remembers.spills > 100


NARROW = [
    (
        "first = tl.cast(tile, tl.int64) * ROWS  # M",
        "first = tile * ROWS  # M",
    ),
    (
        "first, left = tl.cast(tile, tl.int64) * ROWS, M - tile * ROWS\n"
        "    mean = _load(",
        "first, left = tile * ROWS, M - tile * ROWS\n    mean = _load(",
    ),
]


def test_row_offsets_have_64_bits():
    """M * N may pass 2**31; the mutant has offsets of 32 bits."""
    jobs = [
        job(mode, 4097, replace=r) for r in ((), NARROW) for mode in page.MODES
    ]
    narrow = [
        re.search(r"(mul|mad)\.lo\.s32\s.*\b4097\b", built.text) is not None
        for built in build(jobs)
    ]
    assert narrow == [False, False, True, True]
