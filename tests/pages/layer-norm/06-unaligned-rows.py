"""What must hold of the page "Rows that begin anywhere"."""

import pytest
import torch

from compiled.declared import Kernel, Kernels
from conformance import LayerNorm, Mistake, Page, guarded_allocations, too_wide


def run(page, M, N, dtype):
    x, w, b, dy = page.inputs(M, N + 1, dtype)  # no multiple of 8
    torch.autograd.grad(page.layer_norm(x, (N + 1,), w, b), (x, w, b), dy)


def also(page, M, N, dtype):
    x, w, b, dy = page.inputs(13, 25, dtype)
    page.backward(dy, x, w, *page.forward(x, w, b, 1e-5, 1)[1:], x, None, 1)
    torch.autograd.grad(page.layer_norm(x, (25,), w, None), (x, w), dy)
    torch.autograd.grad(page.layer_norm(x[:, 3:], (22,)), x, dy[:, 3:])
    for plan in page.plans_from_column_0(25, 2):
        page.forward(x, w, b, 1e-5, 1, plan)
    for reads in 1, 2:  # the ceilings of both passes
        page._move[(5,)](x, dy, 13 * 25 // reads, reads, 1, BLOCK_SIZE=4096)
    x = x.detach().float()
    page._sum_of_row[(8,)](x, x, N=13, BLOCK=32, STEP=8)


SIZES = {
    "float16": [
        100, 512, 1150, 2046, 3000, 4096, 6000, 7776, 8190, 8192, 10230,
    ],
    "bfloat16": [4096, 10230],
    "float32": [512, 5110],
}  # fmt: skip

PUBLISHED = "2026-11-22"

KERNELS = Kernels(
    run=run,
    also=also,
    M=4096,
    N=[4096],
    dtype="float16",
    sizes=SIZES,
    kernels={
        "_layer_norm_fwd_shifted": Kernel(
            look="""
            ``x`` comes by asynchronous copies of 8 bytes, although rows begin
            anywhere; ``w`` and ``b`` are the loads of 2 bytes, before the
            loop.
            """,
            true=lambda code: [
                code.count("copy", 8) > 0 or code.amd,
                code.count("copy", 8) == code.count("copy"),
                code.count("load", 2) > 0,
            ],
            narrow_loads=136,  # w and b, before the loop
            narrow_stores=31,  # of 4 columns; mean and rstd; the ends of a row
            narrow_copies=68,  # of 4 columns
            copies=True,
        ),
        "_layer_norm_bwd_shifted": Kernel(
            look="""
            Rows come by copies of 8 bytes; the stores of 2 bytes are the ends
            of a row, those of 4 bytes the sums, after the loop.
            """,
            true=lambda code: [
                code.count("copy", 8) > 0 or code.amd,
                (code.registers > 128 and code.spills == 0)
                or code.target != "sm_90",
            ],
            narrow_loads=40,  # w, before the loop
            narrow_stores=104,  # sums, and the ends of a row
            narrow_copies=64,  # of 4 columns; mean and rstd
            copies=True,
        ),
        "_add_up_chunks": Kernel(
            look="That of page 05.",
            true=lambda code: [
                (code.count("early") == 1)
                == (code.target in ("sm_90", "sm_100"))
            ],
            narrow_loads=32,  # the sums of an odd width begin anywhere
            narrow_stores=1,  # of 16 columns
        ),
    },
)


HALF, BFLOAT, SINGLE, DOUBLE = LayerNorm.dtypes
at = LayerNorm.at
NO_GRADIENTS = 3 * (False,)

# Narrow chunks, so that narrow rows have several, and 8 programs, each with
# several tiles.
SMALL = (
    ("    rows = max(1024 // itemsize // lanes, 1)\n",
     "    rows = 2\n    chunk = min(chunk, 16)\n"),
    ("    rows = max(1024 // itemsize // chunk, 1)\n",
     "    rows = 2\n    chunk = min(chunk, 16)\n"),
    ("        return 4\n", "        return 1\n"),
)  # fmt: skip
# Columns on both sides of each step of the formulas.
STEPS = (1, 7, 507, 2047, 2101, 4097, 4609, 5099, 5101, 8401, 10231)
LOAD_W = "    ws = _load_vector(w_ptr, shift, N, ROWS, CHUNK, STEP)\n"
# Numbers with a unit that nothing has measured, and why they are right.
FACTS = {
    "eight times as often": "requests of 2 bytes in place of 16",
}

PAGE = Page(
    __file__,
    LayerNorm(),
    {"layer_norm": lambda page: page.layer_norm},
    # Few programs in the second kernel.
    quick=(
        ("columns_per_program = 16", "columns_per_program = 256"),
    ),
    forms={"": (), "small": SMALL},
    cases=(
        *(
            at(M, N, dtype, form="small")
            for dtype in LayerNorm.dtypes
            for M, N in ((19, 17), (20, 35), (5, 48))
        ),
        # The widest rows with gradients, and without.
        at(1, 10231, HALF),
        at(2, 16383, HALF, wanted=NO_GRADIENTS),
    ),
    # In other types, which have the same plans for as many bytes, a narrow row
    # and the widest one.
    full=(
        *(at(1151, N, HALF) for N in STEPS),
        *(
            at(1151, N, dtype)
            for dtype, widths in (
                (BFLOAT, (1151, 10231)),
                (SINGLE, (257, 5115)),
                (DOUBLE, (129, 2557)),
            )
            for N in widths
        ),
        *(
            at(301, N, HALF, wanted=NO_GRADIENTS)
            for N in (12345, 16381, 16384)
        ),
    ),
    mistakes=(
        *(
            Mistake(
                ValueError,
                "eps is .*0 or more",
                lambda ones: (ones(2, 8), 8),
                {"eps": eps},
            )
            for eps in (-1e-5, float("nan"))
        ),
        too_wide(8193, "8193 .* 8192 .*Every width"),
        too_wide(5117, "5117 .* 5116 .*Every width", wanted=True),
    ),
    elsewhere="is on cuda:1: not the current one",
    repeatable=("layer_norm",),
    repeated=tuple(at(4096, N, HALF) for N in (1151, 4097, 10231)),
    trains=("layer_norm",),
    huge=(8191,),
    sanitizers=("memcheck", "racecheck", "synccheck"),
    # 704 rows end at a multiple of 16 bytes: no load is out of bounds.
    sanitized=tuple(
        at(704, N, dtype)
        for N, dtype in ((1001, HALF), (4097, HALF), (41, SINGLE))
    ),
    prints={
        "Timing needs a GPU": 2,
        "each element of y, dx, dw and db is right": 2,
        f"13 ones: {8 * [13.0]}": 1,
        "so far apart: {13: 8, 14: 8, 20: 8, 24: 8}": 1,  # the stub
        "so far apart: {13: 8, 14: 4, 20: 2, 24: 1}": 1,
    },
    mutants={
        "columns of other rows in the sums": (
            "        x = tl.where(inside, x, 0)\n    return x",
            "        x = x\n    return x",
        ),
        "groups written as a whole": (
            "mask=mask & whole)",
            "mask=mask & (lane // STEP * STEP < N + shift))",
        ),
        "edges not written": ("inside & (whole == 0)", "inside & (lane < 0)"),
        "the shift of row 0": (
            f"    shift = i % STEP * N % STEP\n{LOAD_W}    bs",
            f"    shift = i * 0\n{LOAD_W}    bs",
        ),
        "w without the shift": ("lane - shift + tl.zeros", "lane + tl.zeros"),
        "sums with the shift": ("(0) * 2 * N - shift", "(0) * 2 * N"),
        "rows without a mask": ("mask = row < M - first", "mask = row < M"),
        "c1 dropped": ("wdy - (d * c1 + c2)", "wdy - c2"),
        "c2 dropped": ("wdy - (d * c1 + c2)", "wdy - d * c1"),
        "sums of the last tile": ("(dbs[c] + db,)", "(db,)"),
        "programs of other shifts": (
            "return step * min(max(at_a_time // step, 1), tiles)",
            "return min(3, tiles)",
        ),
        "dy with strides of its own": ("dy.contiguous()", "dy"),
    },
    kills=(
        at(20, 35, HALF, form="small"),
        at(3, 9, form="small", dy="one number"),
    ),
)


@pytest.mark.parametrize("first", [0, 3, 8])
@pytest.mark.parametrize("more", [0, 5, 8])
def test_columns_of_a_wider_matrix(load, first, more):
    """Views are read where they are; the other columns are NaN."""
    page, operation = load("small"), PAGE.operation
    M, N = (1151, 4097) if page.ON_GPU else (11, 21)
    case = at(M, N, HALF)
    tensors = operation.tensors(case, page.DEVICE)
    wide = tensors["x"].new_full((M, first + N + more), float("nan"))
    x = wide[:, first : first + N].copy_(tensors["x"])
    tensors["x"] = x
    assert more + first == 0 or x.stride(0) > N
    with guarded_allocations():
        found = operation.results(page.layer_norm, case, tensors)
    operation.judge(case, tensors, found)


def test_when_lanes_are_shifted(page):
    def step(*shape, first=0, dtype=HALF, cut=None):
        flat = torch.zeros(first + 4096, dtype=dtype)[first:]
        x = flat[: shape[0] * shape[1]].view(shape)
        return page.lane_step(cut or shape[1], x[:, :cut])

    assert step(3, 13) == 8 and step(3, 13, dtype=SINGLE) == 4
    assert step(3, 16) == 1  # all rows are aligned
    assert step(3, 13, first=1) == 1  # no row begins where y's does
    assert step(3, 21, cut=13) == 8 and step(3, 16, cut=13) == 1


@pytest.mark.parametrize("itemsize", [2, 4, 8])
def test_formulas_answer_for_every_width(page, itemsize):
    """Powers of two, and what a thread and a multiprocessor hold."""
    for step in 1, 16 // itemsize:
        for rule, most in (
            (page.plan_forward, 32768),
            (page.plan_backward, 20464),
        ):
            for N in {*range(1, 300), *range(301, most // itemsize + 1, 37)}:
                if step > 1 and N % step == 0:
                    continue
                plan = rule(N, itemsize, step)
                rows, chunk, warps = (
                    plan[key] for key in ("ROWS", "CHUNK", "num_warps")
                )
                assert all(v & (v - 1) == 0 for v in (rows, chunk, warps))
                assert warps <= 8
                lanes = -(-(N + step - 1) // chunk) * chunk
                assert lanes - N < chunk + step
                matrices = 2 if rule is page.plan_backward else 1
                tile = matrices * rows * lanes * itemsize
                ahead = (plan["STAGES"] - 1) * tile * (8 // warps)
                assert ahead <= 128 * 1024 or N < 64


@pytest.mark.parametrize("N", range(1, 33))
def test_distance_is_the_least(page, N):
    """Of the solution."""
    least = next(d for d in range(1, 9) if d * N % 8 == 0)
    assert page.distance_1(N) == least
