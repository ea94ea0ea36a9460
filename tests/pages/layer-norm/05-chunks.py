"""What must hold of the page "Chunks instead of padding"."""

import pytest
import torch

from compiled.declared import Case, Kernel, Kernels
from conformance import LayerNorm, Mistake, Page, too_wide


def run(page, M, N, dtype):
    x, w, b, dy = page.inputs(M, N, dtype)
    torch.autograd.grad(page.layer_norm(x, (N,), w, b), (x, w, b), dy)


def also(page, M, N, dtype):
    x, w, b, dy = page.inputs(13, 24, dtype)
    torch.autograd.grad(page.layer_norm(x, (24,), w, None), (x, w), dy)
    torch.autograd.grad(page.layer_norm(x, (24,)), x, dy)
    y = page.trained_by(page.padded(page.plan_backward))(x, (24,), w, b)
    torch.autograd.grad(y, (w, b), dy)
    for kernel in (page._row_sums, page._row_sums_1):
        kernel[(3,)](x.float(), w.float(), N=13, CHUNK=8)


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
    quick=(
        ("(triton.cdiv(2 * N, 16),)", "(triton.cdiv(2 * N, 256),)"),
        ("2 * N, rows, 16, EARLY", "2 * N, rows, 256, EARLY"),
    ),
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
        too_wide(1151, "1151 .*multiples of 8.*11-every-width"),
        too_wide(16392, "16392 .*16384"),
        too_wide(5128, "5128 .*5120", wanted=True),
    ),
    repeatable=("layer_norm",),
    repeated=tuple(at(4096, N, HALF) for N in (1024, 4608, 10240)),
    trains=("layer_norm",),
    huge=(8192,),
    sanitizers=("memcheck", "racecheck", "synccheck"),
    sanitized=tuple(
        at(701, N, dtype)
        for N, dtype in ((1000, HALF), (4608, HALF), (40, SINGLE))
    ),
    prints={
        "Timing needs a GPU": 5,
        "chunks of 4: True": 1,
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
        "dy with strides of its own": ("dy.contiguous()", "dy"),
    },
    kills=(
        at(40, 24, form="small"),
        at(3, 40, form="small"),
        at(3, 24, form="small", dy="one number"),
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


def test_padded_is_one_tile(page):
    rule = page.padded(page.plan_backward)
    plan = rule(4608, 2)
    assert (plan["ROWS"], plan["CHUNK"], plan["STAGES"]) == (1, 8192, 4)

    def tile(x, shape, w, b, eps):
        return page.trained_by(rule)(x, shape, w, b)

    M, N = (1151, 4608) if page.ON_GPU else (3, 24)
    PAGE.operation.run(tile, at(M, N), page.DEVICE)


def one_tile(page, M, N, dtype, more):
    dy, x = torch.empty(2, M, N, dtype=dtype, device=page.DEVICE)
    mean, rstd = torch.empty(2, M, device=page.DEVICE)
    plan = page.padded(page.plan_backward)(N, x.itemsize) | more
    dx = torch.empty_like(x)
    page.backward(dy, x, dy[0], mean, rstd, dx, dy[:2], plan)


def test_loads_ahead_would_spill_a_tile(launches):
    """Beyond 8192 columns, so there the tile has one stage."""
    from compiled.aot import Call

    values = {"M": 4096, "N": 8704, "dtype": "float16"}
    (alone, _), (ahead, _) = launches(
        Call(PAGE.name, one_tile, values | {"more": more})
        for more in ({}, {"STAGES": 2})
    )
    assert alone.spills == 0 < ahead.spills
