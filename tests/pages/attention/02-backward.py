"""What must hold of the page "Five products or seven"."""

from functools import partial

import torch

from compiled.declared import Case, Kernel, Kernels, of_page
from conformance import Attention, AttentionCase, Mistake, Page
from measurements.figure import Measured

HALF, BRAIN = torch.float16, torch.bfloat16
FIRST = "attention/01-attention"
DESIGNS = (
    "triton",
    "atomics",
    "reductions",
    "in-order",
    "in-order-while",
    "stored",
)
# The same bits each time.
OWNED = ("triton", "in-order", "in-order-while", "stored")


def run(page, M, N, dtype, D=128):
    def empty():
        t = torch.empty(M, 16, N, D, dtype=dtype, device=page.DEVICE)
        return t.requires_grad_()

    for design in DESIGNS:
        q, k, v = empty(), empty(), empty()
        y = page.attention(q, k, v, design=design)
        torch.autograd.grad(y, (q, k, v), torch.empty_like(y))


def of_64(page, M, N, dtype):
    run(page, M, N, dtype, 64)


def of_32(page, M, N, dtype):
    run(page, M, N, dtype, 32)


def of_16(page, M, N, dtype):
    run(page, M, N, dtype, 16)


def one_way(page, N, dtype, design):
    t = torch.empty(1, 16, N, 128, dtype=dtype, device=page.DEVICE)
    t = t.requires_grad_()
    y = page.attention(t, t, t, design=design)
    torch.autograd.grad(y, t, torch.empty_like(y))


def ptx_waits(page, M, N, dtype):
    one_way(page, N, dtype, "in-order")


def triton_waits(page, M, N, dtype):
    one_way(page, N, dtype, "in-order-while")


def keys_64_4(page, M, N, dtype):
    page.keys_alone(N, 64, page.TILES["32 × 128, 4 warps"])()


def keys_128_4(page, M, N, dtype):
    page.keys_alone(N, 128, page.TILES["32 × 128, 4 warps"])()


def keys_128_8(page, M, N, dtype):
    page.keys_alone(N, 128, page.TILES["32 × 128, 8 warps"])()


def also(page, M, N, dtype):
    """The solution of the exercise."""
    t = torch.empty(1, 2, 100, 32, dtype=dtype, device=page.DEVICE)
    lse = torch.empty(1, 2, 100, device=page.DEVICE)
    plan = {
        "TILE_Q": 16,
        "TILE_K": 32,
        "DP_FIRST": False,
        "STAGES": 1,
        "num_warps": 4,
    }
    arguments, programs = page.given_to_keys(
        t, t, t, t, t, lse, 1.0, t, t, plan
    )
    numbers = torch.zeros(64, dtype=torch.int32, device=page.DEVICE)
    page._attention_bwd_first_stores[programs](
        sums_ptr=t.float(),
        ticket_ptr=numbers[:1],
        turns_ptr=numbers[32:],
        PTX=page.HAS_PTX,
        **arguments,
    )


PUBLISHED = "2026-11-26"


def programs_of_an_sm(code):
    """How many fit, by the registers and the shared memory of an H100."""
    registers = -(-code.registers // 8) * 8
    return min(
        65536 // (registers * 32 * code.warps),
        228 * 1024 // (code.shared + 1024),
    )


def multiplies(code):
    """By Tensor Cores, with tiles from the TMA where there is one."""
    return [
        code.multiplies,
        code.fetches_tiles == (code.target in ("sm_90", "sm_100")),
    ]


def five(look, true=multiplies, spills=0, **limits):
    """The tiles were tried on an H100, where the fastest ones spill a little.
    Other GPUs have other tiles, which spill more."""

    def holds(code):
        few = code.target != "sm_90" or code.spills <= spills
        return [*true(code), few]

    return Kernel(
        look=look,
        true=holds,
        spills=520,
        shared=227 * 1024,
        copies="any",
        narrow_copies=6,  # lse and delta
        **limits,
    )


KERNELS = Kernels(
    run=run,
    also=also,
    M=4,
    N=[4096],
    dtype="float16",
    sizes={"float16": [1000, 4096], "bfloat16": [4096]},
    kernels={
        **of_page(
            FIRST,
            "_attention_fwd",
            "_attention_bwd_delta",
            "_attention_bwd_keys",
            "_attention_bwd_queries",
        ),
        "_attention_bwd_atomics": five(
            """
            Five products in a step. On sm_90 an atomic addition adds four
            numbers at a time: ``atom.global.add.v4.f32``.
            """,
            spills=64,
        ),
        "_attention_bwd_reductions": five(
            """
            ``cp.reduce.async.bulk.tensor`` adds a whole tile on sm_90, from
            shared memory. One thread of a program starts it.
            """,
            lambda code: [*multiplies(code), code.count("release") == 0],
            spills=24,
        ),
        "_attention_bwd_in_order": five(
            """
            Whose turn is it? Where PTX waits, it is loaded with ``acquire``,
            and where Triton waits, 0 is added with ``acquire``. After the
            additions there is a barrier, and then the exchange with
            ``release`` that passes the turn on.
            """,
            lambda code: [
                code.multiplies,
                code.count("release") == 1,
                not code.unsafe,
            ],
            spills=264,
            releases=1,
            narrow_loads=33,  # of lse and delta, and whose turn it is
        ),
        "_attention_bwd_stored": five(
            "Four products in a step, and a tile of ``ds`` that is stored.",
        ),
        "_attention_bwd_product": Kernel(
            look="One product in a step, of two tiles from memory.",
            true=multiplies,
            shared=227 * 1024,
            copies="any",
        ),
        "_attention_bwd_round": Kernel(
            look="Read by 16 bytes, multiplied, and rounded.",
            true=lambda code: [not code.multiplies],
        ),
    },
    cases={
        "D = 128": Case(
            run=run,
            sizes={"float16": [4096]},
            true={
                name: lambda code, fit=fit: [programs_of_an_sm(code) == fit]
                for name, fit in {
                    "_attention_bwd_keys": 2,
                    "_attention_bwd_queries": 2,
                    "_attention_bwd_atomics": 1,
                    "_attention_bwd_reductions": 1,
                    "_attention_bwd_stored": 2,
                }.items()
            },
        ),
        "D = 64": Case(
            run=of_64,
            sizes={"float16": [4096]},
            true={
                "_attention_bwd_keys": lambda code: [
                    programs_of_an_sm(code) == 2,
                ],
                # "128 threads with 190 registers each".
                "_attention_bwd_reductions": lambda code: [
                    code.warps == 4,
                    code.registers == 190,
                    programs_of_an_sm(code) == 2,
                ],
            },
        ),
        "D = 32": Case(run=of_32, sizes={"float16": [4096]}),
        "D = 16": Case(run=of_16, sizes={"float16": [4096]}),
        "PTX waits": Case(
            run=ptx_waits,
            sizes={"float16": [4096]},
            true={
                # "164 KB": loads run ahead.
                "_attention_bwd_in_order": lambda code: [
                    round(code.shared / 1000) == 164,
                ],
            },
        ),
        "Triton waits": Case(
            run=triton_waits,
            sizes={"float16": [4096]},
            true={
                # "98 KB": they do not.
                "_attention_bwd_in_order": lambda code: [
                    round(code.shared / 1000) == 98,
                ],
            },
        ),
        "tile of 128 keys, D = 64": Case(
            run=keys_64_4,
            sizes={"float16": [4096]},
            true={
                # "About 240 registers."
                "_attention_bwd_keys": lambda code: [
                    230 <= code.registers <= 250,
                ],
            },
        ),
        "tile of 128 keys, D = 128": Case(
            run=keys_128_4,
            sizes={"float16": [4096]},
            kernels={"_attention_bwd_keys": {"spills": 2000}},
            true={
                # "More than 600 bytes."
                "_attention_bwd_keys": lambda code: [
                    code.registers == 255,
                    code.spills > 600,
                ],
            },
        ),
        "tile of 128 keys, D = 128, 8 warps": Case(
            run=keys_128_8,
            sizes={"float16": [4096]},
            true={
                # "About 200 registers."
                "_attention_bwd_keys": lambda code: [
                    190 <= code.registers <= 215,
                ],
            },
        ),
    },
)


CARD = "H100"
CUDNN, FLASH = "sdpa-cudnn", "torch"


def series(numbers):
    *most, last = map(str, numbers)
    return f"{', '.join(most)} and {last}"


def milliseconds(of, name, N):
    """Of a backward pass of 16384 tokens: five products are counted."""
    return Measured(10 * N * 2048 * 16384 / of.median(name, N) / 1e9, ".1f")


def atomics(figure):
    of = figure("attention-backward-atomics", CARD)
    lengths = 1024, 4096, 16384
    ours, seven = (
        [of.median(name, N) for N in lengths] for name in ("atomics", "triton")
    )
    a, b, c = ours
    yield (
        f"On the H100 atomic additions reach {a} TFLOP/s at 1024 keys, {b} at "
        f"4096 and {c} at 16384. Seven products reach {series(seven)}."
    )
    faster = of.ratios("triton", "atomics")
    assert faster.least > 1, "seven products are faster at every length"
    yield (
        "So the design that computes two products twice is "
        f"{faster.least} to {faster.most} times as fast."
    )
    # 4 N D bytes for each 128 keys, of 10 N N D operations.
    added = Measured(b / 320, ".1f")
    yield f"so at 4096 keys {added} TB of numbers to add go to L2"
    yield f"and 1024 keys take {milliseconds(of, 'atomics', 1024)} ms in all."


def designs(figure):
    of, small = (
        figure(f"attention-backward-designs{name}", CARD)
        for name in ("", "-64")
    )

    def both(name):
        return f"{of.median(name, 4096)} and {small.median(name, 16384)}"

    seven, added, reduced, ordered, waiting, stored = (
        of.median(name, 4096) for name in DESIGNS
    )
    yield (
        "with 128 numbers in a head and 4096 keys, seven products reach "
        f"{seven} TFLOP/s, atomic additions {added}, reductions {reduced}, "
        f"the design in order {ordered} where PTX waits and {waiting} where "
        f"Triton waits, and the one with ``ds`` in memory {stored}. At 16384 "
        f"keys it is {series(of.median(name, 16384) for name in DESIGNS)}."
    )
    for name in DESIGNS[1:]:
        assert of.ratios("triton", name).least > 1, f"the fastest, not {name}"
    faster = small.ratio("reductions", "triton", 16384)
    assert faster > 1.02, "reductions are faster there"
    yield (
        "At 4096 keys we measure "
        f"{series(small.median(name, 4096) for name in DESIGNS)} TFLOP/s in "
        "the same order, and at 16384 keys "
        f"{series(small.median(name, 16384) for name in DESIGNS)}. There "
        f"reductions are {faster:.2f} times as fast as seven products."
    )
    ahead = of.ratio("in-order", "in-order-while", 4096)
    assert of.ratios("in-order", "in-order-while").least > 1, "PTX is faster"
    for each in of, small:
        behind = each.ratios("atomics", "in-order").least
        assert behind > 1, "order is slower than none"
    yield f"and 4096 keys that makes it {ahead} times as fast."
    ms = milliseconds(of, "triton", 16384)
    assert ms < 3 * 5.1, "ds is a large share of it"
    yield f"Seven products take {ms} ms there in all."
    yield (
        "and 16384 keys it costs some speed: seven products reach "
        f"{small.share('triton', 16384, 'reductions')}% of that of reductions."
    )

    cudnn, flash = (of.median(name, 4096) for name in (CUDNN, FLASH))
    assert cudnn > seven > flash
    yield (
        f"On the H100 cuDNN reaches {cudnn} TFLOP/s with 128 numbers in a "
        "head and 4096 keys, and seven products reach "
        f"{of.share('triton', 4096, CUDNN)}% of that. With 64 numbers it is "
        f"{small.share('triton', 4096, CUDNN)}%, and "
        f"{small.share('triton', 16384, CUDNN)}% at 16384 keys, where "
        f"reductions reach {small.share('reductions', 16384, CUDNN)}%."
    )
    yield f"reaches {flash} TFLOP/s at 128 numbers."
    yield f"Other runs give other bits. {both('atomics')} TFLOP/s."
    yield f"one instruction adds a tile. {both('reductions')} TFLOP/s."
    yield (
        f"{both('in-order')} TFLOP/s where PTX waits, and "
        f"{both('in-order-while')} where Triton waits."
    )
    yield f"for 16 heads of 16384 tokens. {both('stored')} TFLOP/s."
    yield f"and need nothing else. {both('triton')} TFLOP/s."
    yield (
        f"**cuDNN** reaches {both(CUDNN)} TFLOP/s, and **FlashAttention-2** "
        f"{both(FLASH)}."
    )


def bits(figure):
    of = figure("attention-backward-bits", CARD)

    def runs(name):
        found = [of.median(name, N) for N in (1024, 4096)]
        for number in found:
            number.rounding = ".0f"
        return found

    for name in OWNED:
        assert not any(runs(name)), f"the same bits each time: {name}"
    for name in "atomics", "reductions":
        assert min(runs(name)) > 0, f"other bits in some runs: {name}"
    a, b = runs("atomics")
    yield (
        f"On the H100, {a} of 100 runs with atomic additions differ from the "
        f"first one at 1024 keys, and {b} at 4096 keys. With reductions it is "
        f"{series(runs('reductions'))}."
    )
    yield (
        f"Of cuDNN {series(runs(CUDNN))} runs differ, and of FlashAttention-2 "
        f"{series(runs(FLASH))}."
    )


def tiles(figure):
    of = figure("attention-backward-tiles", CARD)
    few, many, half = (
        "32 × 128, 4 warps",
        "32 × 128, 8 warps",
        "64 × 64, 4 warps",
    )
    yield (
        "On the H100, with 64 numbers in a head, this tile with 4 warps "
        f"reaches {of.median(few, 64)} TFLOP/s, and the one that we took for "
        f"seven products, 64 × 64, reaches {of.median(half, 64)}. With 128 "
        f"numbers it reaches {of.median(few, 128)} TFLOP/s, and 64 × 64 "
        f"reaches {of.median(half, 128)}. With 8 warps it is "
        f"{of.median(many, 128)} TFLOP/s."
    )
    # What the page says of it: it fits for 64, and fails for 128.
    assert of.ratio(few, half, 64) > 0.7
    assert of.ratio(few, half, 128) < 0.5
    assert of.ratio(many, few, 128) > 1.5


def CLAIMS(figure):
    yield from atomics(figure)
    yield from designs(figure)
    yield from bits(figure)
    yield from tiles(figure)


DATA_SHEET = "the data sheet of the H100"
FACTS = {
    "Five products take at least 5.6 ms": "5 * 1.1 TFLOP / 989 TFLOP/s",
    "by the 989 TFLOP/s of its data sheet": DATA_SHEET,
    "its memory moves 18.6 GB, at 3.35 TB/s": "5.56 ms of 3.35 TB/s",
    "takes 17.2 GB of loads and 17.2 GB": "4 * 16384 * 128 * 128 * 16 bytes",
    "``dq`` of a head has 8.4 MB in float32": "4 * 16384 * 128 bytes",
    "and L2 has 50 MB": DATA_SHEET,
    "And ``ds`` with its 8.6 GB": "2 * 16384**2 * 16 bytes",
    "That takes 5.1 ms": "2 * 8.6 GB / 3.35 TB/s",
    "memory moves at most 3.35 TB/s": DATA_SHEET,
    "Together they move 336 MB": "(4 + 4 + 2) * 16384 * 2048 bytes",
    "takes at least 0.1 ms": "336 MB / 3.35 TB/s",
    "16384 keys take 5.1 ms for it at 3.35 TB/s": "2 * 8.6 GB / 3.35 TB/s",
    "so it takes 10.3 ms": "4 * 16384**2 * 32 bytes / 3.35 TB/s",
    "which is 1.5 times as much": "(7 + 2) / (5 + 1)",
    "is 3.5/16 and 5.5/16, which is 1.57 times": "(3.5 + 2) / (2.5 + 1)",
    "a matrix: 8.6 GB for 16 heads": "2 * 16384**2 * 16 bytes",
}

# Tiles of 16, so that small cases have several.
SMALL = (
    ("16: (128, 64, 4, 3),", "16: (16, 32, 4, 3),"),
    ("32: (128, 64, 4, 3),", "32: (32, 16, 4, 3),"),
    ("64: (64, 128, 4, 2),", "64: (16, 32, 4, 3),"),
    ("128: (128, 64, 4, 2),", "128: (16, 32, 4, 2),"),
    ('"TILE_Q": 64,\n        "TILE_K": 64,', '"TILE_Q": 16, "TILE_K": 32,'),
    ('("atomics", 64): (128, 128, 8', '("atomics", 64): (16, 32, 8'),
    ('("atomics", 128): (64, 128, 8', '("atomics", 128): (16, 32, 8'),
    ('("reductions", 64): (64, 64, 4', '("reductions", 64): (16, 32, 4'),
    ('("reductions", 128): (64, 128, 8', '("reductions", 128): (16, 32, 8'),
    ('("in-order", 64): (128, 128, 8', '("in-order", 64): (16, 32, 8'),
    ('("in-order", 128): (64, 128, 8', '("in-order", 128): (16, 32, 8'),
    ('-while", 64): (128, 128, 8', '-while", 64): (16, 32, 8'),
    ('-while", 128): (64, 128, 8', '-while", 128): (16, 32, 8'),
    ('("stored", 64): (64, 64, 4', '("stored", 64): (32, 16, 4'),
    ('("stored", 128): (64, 64, 4', '("stored", 128): (16, 32, 4'),
    ("tile_q = 128\n    tile_k = 64", "tile_q = 32\n    tile_k = 16"),
)


def half(*sizes, **more):
    (lead, queries, keys, D), dtype = sizes, HALF
    return AttentionCase(lead, queries, keys, D, dtype, **more)


def of_all(*sizes, **more):
    return tuple(half(*sizes, function=name, **more) for name in DESIGNS)


def attention_of(design):
    return lambda page: partial(page.attention, design=design)


PAGE = Page(
    __file__,
    Attention(),
    {design: attention_of(design) for design in DESIGNS},
    quick=(),
    forms={"small": SMALL, "as it is": ()},
    mistakes=(
        Mistake(
            ValueError,
            "design is 'eight'",
            lambda ones: [ones(1, 1, 8, 16, dtype=HALF)] * 3,
            {"design": "eight"},
        ),
    ),
    cases=(
        half((1, 2), 64, 128, 32, large=900.0, function="atomics"),
        half((1, 2), 33, 65, 64, large=900.0, function="in-order"),
        half((2, 2), 128, 256, 16, function="stored"),
        half((1, 2), 129, 65, 64, function="reductions"),
        half((1, 1), 1, 300, 128, function="stored"),
    ),
    full=tuple(
        AttentionCase(lead, queries, keys, D, dtype, function=design)
        for lead, queries, keys, D in (
            ((2, 4), 1024, 1024, 128),
            ((1, 3), 1000, 2077, 128),
            ((3, 2), 2048, 333, 64),
            ((1, 2), 4097, 4095, 32),
            ((5, 1), 511, 513, 16),
        )
        for dtype in (HALF, BRAIN)
        for design in DESIGNS
    ),
    repeatable=OWNED,
    repeated=tuple(
        half((1, 4), 1000, 1500, 128, function=design) for design in OWNED
    ),
    graphs=of_all((1, 4), 200, 300, 64),
    trains=DESIGNS,
    huge=(4096,),
    # ds alone would take 274 GB.
    huge_functions=tuple(d for d in DESIGNS if d != "stored"),
    elsewhere="not the current GPU",
    sanitizers=("memcheck", "racecheck"),
    sanitized=of_all((1, 2), 37, 51, 32),
    prints={
        "errors:": 5,
        "dq adds up to": 6,
        "Timing needs a GPU": 3,
        "Registers are those of a GPU": 1,
        "exercise 1: largest error": 2,
    },
    mutants={
        "keys that are not there add to dq": (
            "p = tl.where(key[:, None] < keys, p, 0)",
            "p = tl.where(key[:, None] < keys + 64, p, 0)",
        ),
        "delta is dropped": (
            "ds = (p * (dp - delta[None, :])).to(q.dtype)",
            "ds = (p * dp).to(q.dtype)",
        ),
        "the sums are not scaled": (
            "tl.store(dq_ptr + at, total * scale, mask=mask)",
            "tl.store(dq_ptr + at, total, mask=mask)",
        ),
        "ds is read as it lies": (
            "ds_desc.store([batch, head, first, start], ds)",
            "ds_desc.store([batch, head, start, first], ds)",
        ),
        "the tile stores and does not add": (
            "before + part",
            "part",
        ),
        "the first keys are left out of dq": (
            "for start in tl.range(0, keys, TILE_K, num_stages=STAGES):\n"
            "        ds = ds_desc",
            "for start in tl.range(TILE_K, keys, TILE_K, num_stages=STAGES):\n"
            "        ds = ds_desc",
        ),
    },
    kills=(
        half((2, 3), 37, 51, 32, function="atomics"),
        half((2, 3), 37, 51, 32, function="reductions"),
        half((1, 2), 33, 40, 16, function="stored"),
        half((1, 2), 33, 40, 16, function="in-order"),
        lambda load: far_below(load("small")),
    ),
)


def far_below(page):
    """All scores are far below 0: a key that is not there has a score of 0,
    and an infinite power."""
    D, dtype = 16, HALF
    q = torch.full((1, 1, 20, D), 30.0, dtype=dtype, device=page.DEVICE)
    k = torch.full((1, 1, 40, D), -30.0, dtype=dtype, device=page.DEVICE)
    v, dy = (torch.randn_like(t) for t in (k, q))
    for design in DESIGNS:
        given = [t.clone().requires_grad_() for t in (q, k, v)]
        y = page.attention(*given, design=design)
        for t in torch.autograd.grad(y, given, dy):
            assert t.isfinite().all(), design


def test_scores_far_below_zero(load):
    far_below(load("as it is"))


def test_exercise(output):
    stub, solution = (
        float(line.rpartition(" ")[2])
        for line in output.splitlines()
        if "exercise 1: largest error" in line
    )
    assert stub != stub  # not a number
    assert solution < 1e-2
