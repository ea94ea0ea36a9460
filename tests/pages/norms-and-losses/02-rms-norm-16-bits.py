"""What must hold of the page "RMS norm in 16 bits"."""

import pytest
import torch
import torch.nn.functional as F

from compiled.declared import Case, Kernel, Kernels
from conformance import Mistake, Page, RmsNorm, takes_the_place, too_wide
from conformance.add_norm import STREAMS
from conformance.rms_norm import both_norms


def run(page, M, N, dtype):
    x, residual, w, dy, ds = page.inputs(M, N, dtype)
    out = page.add_rms_norm(x, residual, (N,), w, 1e-6, "gemma", 1.0)
    torch.autograd.grad(out, (x, residual, w), (dy, ds))


def also(page, M, N, dtype):
    x, _residual, w, dy, _ds = page.inputs(5, 1000, dtype)
    for casting in page.CASTINGS:
        torch.autograd.grad(
            page.rms_norm(x, 1000, w, 1e-6, casting), (x, w), dy
        )
    for kernel in (page._add_norm, page._add_norm_1):
        kernel[(8,)](x.half(), x.half(), x.half(), x.float(), N=64)


def alone(page, M, N, dtype):
    x, _, w, dy, _ = page.inputs(M, N, dtype)
    torch.autograd.grad(page.rms_norm(x, (N,), w, 1e-6, "llama"), (x, w), dy)


def float32_stream(page, M, N, dtype):
    x, residual, w, dy, ds = page.inputs(M, N, dtype, torch.float32)
    out = page.add_rms_norm(x, residual, (N,), w, 1e-6, "gemma", 1.0)
    torch.autograd.grad(out, (x, residual, w), (dy, ds))


PUBLISHED = "2026-11-22"

KERNELS = Kernels(
    run=run,
    also=also,
    M=4096,
    N=[4096, 8192],
    dtype="bfloat16",
    sizes={
        "bfloat16": [2048, 2560, 3072, 3584, 4096, 5120, 7168, 8192],
        "float16": [8192],
        "float32": [4096],
    },
    kernels={
        "_rms_norm_fwd": Kernel(
            look="""
            Shown as Gemma rounds, with ``1 + w``: the same loads and stores,
            and no conversion between the product and the store of ``y``.
            """,
            true=lambda code: [
                code.loaded == 3 * 2 * 4096
                or code.amd,  # whose warps are wider
                code.narrow("load") == 0 or code.amd,
                len(code.lines("shuffle")) == 1,
            ],
            narrow_stores=1,  # rstd
        ),
        "_rms_norm_bwd": Kernel(
            look="""
            On NVIDIA GPUs asynchronous copies load ``s``, ``dy`` and ``ds``
            ahead.
            """,
            true=lambda code: [
                (code.count("copy", 16) > 0) != code.amd,
                code.spills == 0,
            ],
            copies=True,
            narrow_copies=4,  # rstd, of several rows
            shared=232448,  # all that a program may have on sm_90
        ),
    },
    cases={
        "alone": Case(
            run=alone,
            sizes={"bfloat16": [2048, 4096, 5120, 8192]},
        ),
        "float32-stream": Case(
            run=float32_stream,
            sizes={"bfloat16": [2048, 4096, 8192]},
        ),
    },
)


HALF, SINGLE = torch.float16, torch.float32
BOTH = HALF, torch.bfloat16
at = RmsNorm.at


def normalizes_the_sum_as_it_is_rounded(load):
    page = load()
    x, residual, w = page.inputs(5, 75, HALF)[:3]
    y, s = page.add_rms_norm(x, residual, 75, w, 1e-6)
    assert torch.equal(y, page.rms_norm(s, 75, w, 1e-6))


def a_small_weight_and_its_offset(load):
    page = load()
    x = torch.full((1, 75), 1.0, dtype=HALF, device=page.DEVICE)
    tiny = torch.full_like(x[0], 2.0**-13)
    y = page.rms_norm(3 * x, 75, tiny.requires_grad_(), 1e-6, offset=1.0)
    assert torch.equal(y, x)


def two_gradients_of_two_types(load):
    """That of x is the other, rounded."""
    page = load()
    out = page.results(
        lambda *t: page.add_rms_norm(*t[:2], 75, t[2], 1e-6),
        *page.inputs(5, 75, HALF, SINGLE),
    )
    exact = out[3].half()
    assert (out[2] - exact).abs().max() == 0
    assert not torch.equal(out[3], exact.float())


def bits_of_gemma(load):
    page = load()
    x = torch.randn(5, 75, device=page.DEVICE).half()
    w = torch.rand(75, device=page.DEVICE).half()
    y = page.rms_norm(x, 75, w, 1e-6)
    expected = page.in_torch(x, w, 1e-6, "gemma")
    assert (y == expected).double().mean() > 0.97


PAGE = Page(
    __file__,
    RmsNorm(more=(("offset", (0.0, 1.0)),)),
    {"rms_norm": both_norms},
    forms={
        # Chunks of 16 columns, so that narrow rows have several, and each
        # program has several rows.
        "small": (
            (
                "chunk = min(512 // x.itemsize * warps, "
                "triton.next_power_of_2(N))",
                "chunk = 16",
            ),
            (
                "chunk = min(512 // dy.itemsize * warps, "
                "triton.next_power_of_2(N))",
                "chunk = 16",
            ),
            ("if ON_GPU else 4", "if ON_GPU else 1"),
        ),
        "wide": (),
    },
    cases=tuple(at(1, N, HALF, form="wide") for N in (4096, 4097, 8192)),
    full=(
        *(
            at(1151, N, dtype, **more)
            for N in (8, 37, 1000, 2048, 4096, 4104, 5120, 8192)
            for dtype in BOTH
            for more in ({"offset": 1.0}, {"fused": False}, {"stream": SINGLE})
        ),
        at(1151, 4096),
        at(301, 2048, torch.float64),
        at(301, 8192, HALF, weight_dtype=SINGLE),
        *(
            at(301, N, dtype, stream=stream)
            for dtype, stream in STREAMS
            for N in (40, 1500)
        ),
    ),
    mistakes=(
        too_wide(4097, "4097 columns.* 4096", lambda x: (x, x)),
        too_wide(4097, "4097 columns.* 4096", lambda x: (x, None)),
        Mistake(
            ValueError,
            "casting bert",
            lambda ones: (ones(2, 8), ones(2, 8), 8, None, 0, "bert"),
        ),
    ),
    repeatable=("rms_norm",),
    repeated=tuple(
        at(512, N, HALF, stream=SINGLE) for N in (1000, 4096, 8192)
    ),
    trains=("rms_norm",),
    huge=(8192,),
    sanitizers=("memcheck", "racecheck"),
    sanitized=tuple(
        at(301, N, HALF, stream=SINGLE, offset=1.0, casting="llama")
        for N in (1000, 8192)
    ),
    prints={
        "Timing needs a GPU": 2,
        "factor: 1.0 1 + distance: 0.9": 1,
    },
    mutants={
        "offset rounded": ('w.dtype, CASTING != "gemma"', "w.dtype, True"),
        "x_hat rounded": ('half, CASTING != "gemma"', "half, True"),
        "offset dropped forward": ("w, offset,", "w, 0,"),
        "offset dropped backward": (
            "dx = scaled * _factor(ws[c], offset",
            "dx = scaled * _factor(ws[c], 0",
        ),
        "the row sum dropped": ("dx_ptr + at, dx - s * a", "dx_ptr + at, dx"),
        "the row sum dropped of the stream": (
            "_store(dr_ptr + at, dx - s * a,",
            "_store(dr_ptr + at, dx,",
        ),
        "ds dropped": ('_load(ds_ptr + at, c, N, CHUNK, "").to(acc)', "0"),
        "the sum is not rounded": (
            "(s.to(acc) + more[c].to(acc)).to(more[c].dtype)",
            "s.to(acc) + more[c].to(acc)",
        ),
        "store without mask": ("col, value, mask=col < N", "col, value"),
        "sums of the last row": ("(dws[c] + scaled * s,)", "(scaled * s,)"),
        "dr in the type of x": ("None if s.dtype == dy.dtype", "None if True"),
    },
    kills=(
        at(19, 43, HALF, stream=SINGLE, offset=1.0),
        at(19, 43, HALF),
        at(19, 43, HALF, offset=1.0),
        normalizes_the_sum_as_it_is_rounded,
        a_small_weight_and_its_offset,
        two_gradients_of_two_types,
        bits_of_gemma,
    ),
)


def test_castings_are_those_of_the_models(page):
    """Nearly all bits are those of PyTorch's steps; sums round otherwise."""
    torch.manual_seed(0)
    x = torch.randn(40, 200, device=page.DEVICE).half()
    w = torch.rand(200, device=page.DEVICE).half()
    same = {}
    for ours in page.CASTINGS:
        for offset in 0.0, 1.0:
            y = page.rms_norm(x, 200, w, 1e-6, ours, offset)
            for theirs in page.CASTINGS:
                expected = page.in_torch(x, w, 1e-6, theirs, offset)
                share = (y == expected).double().mean().item()
                same[ours, theirs, offset] = share
    for (ours, theirs, offset), share in same.items():
        if ours == theirs:
            assert share > (0.8 if ours == "none" else 0.97), (ours, offset)
        else:
            assert share < 0.85, (ours, theirs, offset)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("casting", ["gemma", "llama"])
def test_castings_at_full_size(page, casting, offset, dtype):
    x = torch.randn(512, 4096, device="cuda").to(dtype)
    w = torch.rand(4096, device="cuda").to(dtype)
    y = page.rms_norm(x, 4096, w, 1e-6, casting, offset)
    expected = page.in_torch(x, w, 1e-6, casting, offset)
    assert (y == expected).double().mean() > 0.97


def test_offset_in_full_precision(page):
    """1 + w is not rounded to 16 bits with gemma, and is with llama."""
    x = torch.randn(5, 75, device=page.DEVICE).half()
    w = torch.full((75,), 2.0**-13, dtype=HALF, device=page.DEVICE)
    assert 1 + w[0] == 1
    expected = F.rms_norm(x.double(), (75,), 1 + w.double(), 1e-6)
    without = F.rms_norm(x.double(), (75,), None, 1e-6)

    def nearer(casting):
        y = page.rms_norm(x, 75, w, 1e-6, casting, 1.0)
        off, all_of_it = y - without, expected - without
        return (off * without).sum() / (all_of_it * without).sum()

    assert nearer("gemma") > 0.5 > nearer("llama")


def test_none_leaves_the_range(page):
    """Each step in float16: the square of 300 is infinite."""
    x = torch.full((2, 40), 300.0, dtype=HALF, device=page.DEVICE)
    ones = torch.ones_like(x)
    for casting in "gemma", "llama":
        torch.testing.assert_close(page.rms_norm(x, 40, casting=casting), ones)
    assert not page.rms_norm(x, 40, casting="none").any()


def test_a_module_loads_what_pytorch_saved(page):
    options = {"eps": 1e-6, "device": page.DEVICE}
    takes_the_place(torch.nn.RMSNorm, page.RMSNorm, 24, **options)


def test_a_residual_that_is_none_is_refused(page):
    x = torch.ones(2, 8, device=page.DEVICE)
    with pytest.raises(TypeError, match="residual"):
        page.add_rms_norm(x, None, 8)


def test_loss_of_the_module(output):
    (line,) = (x for x in output.splitlines() if "loss with the module" in x)
    ours, theirs = map(float, line.split()[-2:])
    assert abs(ours - theirs) < 1e-5 * theirs


def test_exercise(output):
    stub, solution = (
        float(line.rpartition(" ")[2])
        for line in output.splitlines()
        if "error of y before" in line
    )
    assert stub > 1e-5 > 1e-6 > solution


@pytest.mark.gpu
def test_a_block_trains_like_pytorch(page):
    """Loss and gradients of a block in bfloat16, against PyTorch's."""
    ours, theirs = (
        page.step(256, 128, norm, torch.bfloat16)()
        for norm in (page.RMSNorm, page.LlamaNorm)
    )
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).norm() <= 0.05 * b.norm()
