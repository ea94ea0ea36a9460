"""What must hold of the page "Chunks instead of padding"."""

import pytest
import torch

from compiled.declared import Case, Kernel, Kernels
from conformance import LayerNorm, Mistake, Page, too_wide


def run(page, M, N, dtype):
    x, w, b, dy = page.inputs(M, N, dtype)
    torch.autograd.grad(page.layer_norm(x, (N,), w, b), (x, w, b), dy)


def also(page, M, N, dtype):
    x, w, _, dy = page.inputs(13, 24, dtype)
    torch.autograd.grad(page.layer_norm(x, (24,), w, None), (x, w), dy)
    torch.autograd.grad(page.layer_norm(x, (24,)), x, dy)
    for kernel in (page._row_sums, page._row_sums_1):
        kernel[(3,)](x.float(), w.float(), N=13, CHUNK=8)
    page._move[(M,)](x, x, M * N // 2, 2, 1, BLOCK_SIZE=4096)  # the ceiling


def forward(page, M, N, dtype):
    x, w, b, _ = (t.detach() for t in page.inputs(M, N, dtype))
    page.layer_norm(x, (N,), w, b)


SIZES = {
    "float16": [
        256, 1024, 1280, 1536, 2048, 2816, 3584, 4096, 4608, 5120, 6656,
        8192, 8704, 10240,
    ],
    "bfloat16": [4096, 10240],
    "float32": [1024, 2304, 5120],
}  # fmt: skip

PUBLISHED = "2026-11-22"

KERNELS = Kernels(
    run=run,
    also=also,
    M=4096,
    N=[4096, 4608],
    dtype="float16",
    sizes=SIZES,
    kernels={
        "_layer_norm_fwd_chunks": Kernel(
            look="""
            Each chunk is one load of 16 bytes for each thread; ``x``, ``w``
            and ``b`` are read once.
            """,
            true=lambda code: [
                code.loaded == 3 * 2 * 4096
                or code.amd,  # whose warps are wider
                code.narrow("load") == 0 or code.amd,
            ],
            true_at={
                4608: lambda code: [
                    code.loaded == 3 * 2 * 5 * 1024,  # half a chunk is masked
                ]
            },
            narrow_stores=2,  # mean and rstd
        ),
        "_layer_norm_bwd_chunks": Kernel(
            look="""
            Look at the registers: two sums in float32 for each column, and
            nothing is spilled.
            The rows come by asynchronous copies of 16 bytes.
            """,
            true=lambda code: [code.registers > 128, code.spills == 0],
            copies=True,
            narrow_copies=8,  # mean and rstd
            narrow_stores=8,  # sums of narrow rows
            spills={8704: 8, 9216: 8, 9728: 8, 9984: 8},  # two registers
        ),
        "_add_up_chunks": Kernel(
            look="""
            A program reads the sums of all programs, 16 columns of each, by 16
            bytes.
            On sm_90 and sm_100 it starts early.
            """,
            true=lambda code: [
                code.narrow("load") == 0,
                (code.count("early") == 1)
                == (code.target in ("sm_90", "sm_100")),
            ],
            narrow_stores=1,  # of 16 columns
        ),
    },
    cases={
        "forward": Case(
            run=forward,
            sizes={
                "float16": [12288, 16384, 20480, 24576, 32768],
                "float32": [8192, 12288, 16384],
            },
            kernels={
                "_layer_norm_fwd_chunks": {
                    # Held to registers with which one program more fits.
                    "spills": {16384: 8, 24576: 8},
                },
            },
        ),
    },
)


HALF, BFLOAT, SINGLE, DOUBLE = LayerNorm.dtypes
at = LayerNorm.at
NO_GRADIENTS = 3 * (False,)


def tiny_rows(load):
    """Without eps the cube of rstd is more than float32 holds, and dx is
    not."""
    page = load("small")
    torch.manual_seed(0)
    x, dy = torch.randn(2, 19, 40, device=page.DEVICE)
    w = torch.rand(40, device=page.DEVICE)
    x = 1e-13 * x
    results = []
    for function, kind in (
        (page.layer_norm, SINGLE),
        (torch.nn.functional.layer_norm, DOUBLE),
    ):
        given = [t.to(kind).requires_grad_() for t in (x, w)]
        y = function(given[0], (40,), given[1], None, 0.0)
        results.append(torch.autograd.grad(y, given, dy.to(kind)))
    for ours, exact in zip(*results, strict=True):
        assert ours.isfinite().all()
        assert (ours - exact).norm() <= 1e-5 * exact.norm()


def negative_eps(load):
    page = load("small")
    try:
        page.layer_norm(torch.ones(2, 8, device=page.DEVICE), 8, eps=-1e-5)
    except ValueError:
        return
    raise AssertionError("a negative eps is taken")


# Chunks of 16 or 32 columns, so that narrow rows have several, and few
# programs, so that each has several tiles.
SMALL = (
    ("chunk = min(512 // itemsize * warps,", "chunk = min(8 * warps,"),
    ("rows = 512 // itemsize * warps // chunk", "rows = 16 * warps // chunk"),
    ("if ON_GPU else 4", "if ON_GPU else 2"),
)
PAGE = Page(
    __file__,
    LayerNorm(
        multiple=8,
        sizes=(
            ((5,), (40,)),
            ((2, 3), (4, 6)),
            ((), (8,)),
            ((2, 0), (2, 4)),
            ((17,), (24,)),
            ((2, 1, 3), (136,)),
            ((1,), (8,)),
        ),
        large=(((20, 30), (40, 25)), ((1000,), (8,)), ((130,), (1024,))),
        most=2560,  # in float64
    ),
    {"layer_norm": lambda page: page.layer_norm},
    # Few programs in the second kernel.
    quick=(("columns_per_program = 16", "columns_per_program = 256"),),
    forms={"": (), "small": SMALL},
    cases=(
        *(
            at(130, 8, dtype, form=form)
            for dtype in LayerNorm.dtypes
            for form in ("", "small")
        ),
        # The widest rows with gradients, and without.
        at(1, 10240, HALF),
        at(2, 32768, HALF, wanted=NO_GRADIENTS),
    ),
    # Both sides of each step of the formulas; in other types, which have the
    # same plans for as many bytes, a narrow row and the widest one.
    full=(
        *(
            at(1151, N, HALF)
            for N in (8, 520, 1024, 1032, 2048, 2056, 4096, 4104, 8200, 10240)
        ),
        *(
            at(1151, N, dtype)
            for dtype, widths in (
                (BFLOAT, (1032, 10240)),
                (SINGLE, (520, 5120)),
                (DOUBLE, (264, 2560)),
            )
            for N in widths
        ),
        *(
            at(301, N, HALF, wanted=NO_GRADIENTS)
            for N in (16384, 16392, 24576, 32768)
        ),
    ),
    mistakes=(
        *(
            Mistake(
                ValueError, "eps", lambda ones: (ones(2, 8), 8), {"eps": eps}
            )
            for eps in (-1e-5, float("nan"))
        ),
        too_wide(1151, "1151 .*multiples of 8.*Every width"),
        too_wide(16392, "16392 .*16384"),
        too_wide(5128, "5128 .*5120", wanted=True),
    ),
    repeatable=("layer_norm",),
    repeated=tuple(at(4096, N, HALF) for N in (1024, 4608, 10240)),
    trains=("layer_norm",),
    elsewhere="is on cuda:1: not the current one",
    huge=(8192,),
    sanitizers=("memcheck", "racecheck", "synccheck"),
    sanitized=tuple(
        at(701, N, dtype)
        for N, dtype in ((1000, HALF), (4608, HALF), (40, SINGLE))
    ),
    prints={
        "Timing needs a GPU": 6,
        "chunks of 4: True": 1,
        "each element of y, dx, dw and db is right": 2,
        "right: False": 1,
        "rows of 13 ones: [16.0": 1,  # the stub
        "rows of 13 ones: [13.0, 13.0, 13.0]": 1,
    },
    mutants={
        "idle lanes in the variance": (
            "d = tl.where(col < N, xs[c].to(acc) - mean, 0)",
            "d = xs[c].to(acc) - mean",
        ),
        "columns without a mask": ("mask = mask & (col < N)", "mask = mask"),
        "rows without a mask": ("mask = row < left", "mask = row < ROWS"),
        "the first chunk only": (
            "col = c * CHUNK + tl.arange(0, CHUNK)[None, :]",
            "col = tl.arange(0, CHUNK)[None, :]",
        ),
        "w of the first chunk": ("w_ptr + at", "w_ptr + at % CHUNK"),
        "c1 dropped": ("wdy - (d * c1 + c2)", "wdy - c2"),
        "c2 dropped": ("wdy - (d * c1 + c2)", "wdy - d * c1"),
        "sums of the last tile": ("(dws[c] + dw,)", "(dw,)"),
        "one buffer for all": ("ptr += tl.program_id(0) * 2 * N", "ptr += 0"),
        "one tile a program": ("(0) * ROWS, M, tl", "(0) * ROWS, 4, tl"),
        "the last buffer left out": ("rows < programs", "rows < programs - 1"),
        "dy with strides of its own": (
            "backward(dy.contiguous(), x",
            "backward(dy, x",
        ),
        "rstd cubed": (
            "sum1[:, None] * rstd * rstd * rstd / N",
            "sum1[:, None] * (rstd * rstd * rstd / N)",
        ),
        "any eps": ("if not eps >= 0:", "if False:"),
    },
    kills=(
        at(40, 24, form="small"),
        at(3, 40, form="small"),
        at(3, 24, form="small", dy="one number"),
        tiny_rows,
        negative_eps,
    ),
)


# Bytes of an element -> columns of the widest row without gradients, and with.
WIDEST = {2: (32768, 10240), 4: (16384, 5120), 8: (8192, 2560)}


@pytest.mark.parametrize("itemsize", WIDEST)
def test_formulas_answer_for_every_width(page, itemsize):
    """Powers of two, full warps, and what a thread holds within its limit."""
    for rule, most in zip(
        (page.plan_forward, page.plan_backward), WIDEST[itemsize], strict=True
    ):
        for N in range(8, most + 1, 8):
            plan = rule(N, itemsize)
            rows, chunk, warps = (
                plan[key] for key in ("ROWS", "CHUNK", "num_warps")
            )
            assert all(v & (v - 1) == 0 for v in (rows, chunk, warps))
            assert 2 <= warps <= 16 and rows * chunk * itemsize >= 64
            width = -(-N // chunk) * chunk
            assert width - N < chunk
            held = rows * width * itemsize // (32 * warps)
            if "STAGES" in plan:
                tiles = plan["STAGES"] - 1
                assert 1 <= tiles <= 3
                assert 2 * tiles * rows * width * itemsize <= 98304
                assert held <= 80  # 40 columns of 16 bits
                assert rows <= 8
            else:
                pairs = 2 if N * itemsize <= 2048 else 1
                assert held <= 128
                assert rows * chunk * itemsize == 512 * warps * pairs


def test_tiny_rows(load):
    tiny_rows(load)


def one_pass(page, M, N, dtype, mode, rule, more=None, times=None):
    """The kernels of one pass with a plan of the page."""
    rule = getattr(page, rule)
    if times is None:  # made by hand
        plan = rule(N)
    else:
        plan = rule(N, dtype.itemsize, times)
    plan |= more or {}
    dy, x = torch.empty(2, M, N, dtype=dtype, device=page.DEVICE)
    if mode == "forward":
        page.forward(x, dy[0], dy[1], 1e-5, plan)
        return
    mean, rstd = torch.empty(2, M, device=page.DEVICE)
    dx = torch.empty_like(x)
    page.backward(dy, x, dy[0], mean, rstd, dx, dy[:2], plan)


def calls(values, **same):
    from compiled.aot import Call

    same = {"M": 4096, "dtype": "float16"} | same
    return [Call(PAGE.name, one_pass, same | each) for each in values]


@pytest.mark.parametrize("plan", ["plan_by_hand", "plan_of_one_tile"])
def test_plans_by_hand_are_right(page, plan):
    """Also where a row has several chunks, or one with idle lanes."""
    M, widths = (1151, (4608, 8704)) if page.ON_GPU else (3, (2056,))
    for N in widths:
        x, w, b, dy = (t.detach() for t in page.inputs(M, N, SINGLE))
        _, mean, rstd = page.forward(x, w, b, 1e-5, page.plan_forward(N, 4))
        dx = torch.empty_like(x)
        grads = torch.empty(2, N, device=page.DEVICE)
        # In float32 a row takes twice the shared memory.
        more = {"STAGES": min(getattr(page, plan)(N)["STAGES"], 2)}
        page.backward(
            dy, x, w, mean, rstd, dx, grads, getattr(page, plan)(N) | more
        )
        exact = [t.double().requires_grad_() for t in (x, w, b)]
        expected = torch.nn.functional.layer_norm(exact[0], (N,), *exact[1:])
        for ours, right in zip(
            (dx, *grads),
            torch.autograd.grad(expected, exact, dy.double()),
            strict=True,
        ):
            assert (ours - right).norm() <= 1e-5 * right.norm()


def test_loads_ahead_would_spill_a_tile(launches):
    """Beyond 8192 columns, so there the tile has one stage."""
    wide = {"N": 8704, "mode": "backward"}
    tile = {"rule": "plan_of_one_tile"}
    plans = [
        tile,
        tile | {"more": {"STAGES": 3}},
        {"rule": "plan_by_hand"},
    ]
    (alone, _), (ahead, _), _ = launches(calls(plans, **wide))
    assert alone.spills == 0 < ahead.spills
