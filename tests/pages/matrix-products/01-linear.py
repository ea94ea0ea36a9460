"""What must hold of the page "A linear layer, both passes"."""

import contextlib
import re

import pytest
import torch
import torch.nn.functional as F

from compiled.declared import Case, Kernel, Kernels
from conformance import Linear, LinearCase, Page
from measurements.figure import overlap

HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
EVERY = (True, True, True)


@contextlib.contextmanager
def on_132_sms(page):
    """The rule, as on an H200."""
    before, page.NUM_SMS = page.NUM_SMS, 132
    page.tile_and_parts.cache_clear()
    try:
        yield
    finally:
        page.NUM_SMS = before
        page.tile_and_parts.cache_clear()


def layer(page, M, N, K, dtype, activation="gelu"):
    """Both passes of a layer on empty tensors; x and w."""

    def empty(*shape):
        t = torch.empty(shape, dtype=dtype, device=page.DEVICE)
        return t.requires_grad_()

    x, w, b = empty(M, K), empty(N, K), empty(N)
    y = page.linear(x, w, b, activation)
    torch.autograd.grad(y, (x, w, b), torch.empty_like(y))
    return x.detach(), w.detach()


def run(page, M, N, dtype):
    x, w = layer(page, M, N, 4096, dtype)
    dy = torch.empty(M, N, dtype=dtype, device=page.DEVICE)
    page.backward_without_a_pass(dy, x, w, dy, page._times_slope, 2)
    page.one_tile_a_program(x, w, group=8, stages=3)
    # The last launch of a kernel is the one that its panel shows.
    bias = torch.empty(N, dtype=dtype, device=page.DEVICE)
    page.forward(x, w, bias, page._gelu, keeps_slope=True)


def also(page, M, N, dtype):
    """What is compared, the solution of the exercise, and sizes of 1."""
    x, w = layer(page, M, N, 4096, dtype)
    for act in (page._silu, page._relu):
        page.forward(x, w, None, act)
    page.forward(x, w, None, page._gelu_and_z, keeps_slope=True)
    for name in ("one tile", "groups", "stages", *page.RUNGS):
        page.climb(x, w, name)
    saved = page.padded(M, N, dtype, page.DEVICE)
    for chain in (page._through_gelu, page._where_positive):
        page.backward(saved, x, w, saved, chain, EVERY)
    for columns in (page.FIRST_COLUMNS, 2**20):
        page.backward_without_a_pass(
            saved, x, w, saved, page._times_slope, columns
        )
    order = torch.empty(70, 2, dtype=torch.int32, device=page.DEVICE)
    for place in (page._place, page._snake):
        page._visit[(70,)](order, 10, 7, GROUP=4, PLACE=place)
    for M, N, K in ((1, 1, 1), (1, 4096, 4096), (4096, 1, 64), (4096, 64, 1)):
        layer(page, M, N, K, dtype, "relu")


def plain(page, M, N, dtype):
    """Neither bias nor activation."""
    x = torch.empty(M, 4096, dtype=dtype, device=page.DEVICE)
    w = torch.empty(N, 4096, dtype=dtype, device=page.DEVICE)
    x.requires_grad_()
    w.requires_grad_()
    y = page.linear(x, w)
    torch.autograd.grad(y, (x, w), torch.empty_like(y))


def of_relu(page, M, N, dtype):
    layer(page, M, N, 1024, dtype, "relu")


def odd(page, M, N, dtype):
    """Results that no descriptor stores."""
    layer(page, M, N - 1, 1001, dtype)


def few(page, M, N, dtype):
    """Tokens for a small tile, and several parts."""
    with on_132_sms(page):
        for tokens in (16, 64, 128, 300):
            layer(page, tokens, N, 4096, dtype)


def long_sums(page, M, N, dtype):
    """The gradient of a small weight, from many tokens: three parts."""
    with on_132_sms(page):
        layer(page, 16384, 768, 768, dtype)


def of_float32(page, M, N, dtype):
    layer(page, M, N, 1024, dtype)


def tf32(page, M, N, dtype):
    switch = torch.backends.cuda.matmul
    before = switch.fp32_precision
    switch.fp32_precision = "tf32"
    try:
        layer(page, M, N, 1024, dtype)
    finally:
        switch.fp32_precision = before


PUBLISHED = "2026-11-27"


def multiplies(code):
    """By Tensor Cores, with tiles from the TMA where there is one."""
    return [
        code.multiplies,
        code.fetches_tiles == (code.target in ("sm_90", "sm_100")),
        code.spills == 0 or code.target == "sm_80",
    ]


LARGE = 227 * 1024

KERNELS = Kernels(
    run=run,
    also=also,
    M=4096,
    N=[4096],
    dtype="bfloat16",
    sizes={
        "bfloat16": [1024, 14336],
        "float16": [4096],
    },
    kernels={
        "_one_tile": Kernel(
            look="""
            On sm_90 each thread copies its part of both tiles with
            ``cp.async``, and ``wgmma`` multiplies them.
            Look at how much of the loop is about addresses.
            """,
            true=lambda code: [
                code.multiplies,
                not code.fetches_tiles,
                (code.count("copy") > 0) != code.amd,
            ],
            shared=LARGE,
            copies="any",
        ),
        "_product": Kernel(
            look="""
            On sm_90 the loop has four ``wgmma``, each of which multiplies 64
            rows by 256 columns and 16 features for half of the warps, and two
            ``cp.async.bulk.tensor``, each of which fetches a tile.
            The powers of GELU stand behind the loop, and nothing is spilled.
            """,
            true=lambda code: [
                *multiplies(code),
                code.warps == 8 or code.target != "sm_90",
            ],
            shared=LARGE,
            copies="any",
            narrow_loads=32,  # the bias
            narrow_stores=64,  # where a row is no multiple of 16 bytes
        ),
        "_add_parts": Kernel(
            look="Few bytes, no product: the parts of ``db``, added up.",
            true=lambda code: [not code.multiplies],
            narrow_loads=8,
            narrow_stores=2,
        ),
        "_first_columns": Kernel(
            look="""
            On sm_90 ``wgmma`` takes its left operand from registers here:
            ``dy`` times the slope, multiplied two numbers at a time.
            """,
            true=multiplies,
            shared=LARGE,
            copies="any",
            narrow_stores=1,  # parts of db
        ),
        "_own_pass": Kernel(
            look="Two tiles in, one tile and a row of sums out.",
            true=lambda code: [not code.multiplies, code.spills == 0],
            narrow_stores=1,
        ),
    },
    cases={
        "neither bias nor activation": Case(
            run=plain, sizes={"bfloat16": [4096]}
        ),
        "relu": Case(run=of_relu, sizes={"bfloat16": [4096]}),
        "odd": Case(run=odd, sizes={"bfloat16": [4096]}),
        "few tokens": Case(run=few, sizes={"bfloat16": [4096]}),
        "long sums": Case(run=long_sums, sizes={"bfloat16": [4096]}),
        "float32": Case(run=of_float32, sizes={"float32": [1024]}),
        "TF32": Case(
            run=tf32,
            sizes={"float32": [4096]},
            true={"_product": lambda code: [code.multiplies]},
        ),
    },
)


CARD = "H200"
COMPILED = "torch.compile"
# At 8192 tokens of 4096 features; the third is at 4096 tokens of 1024.
SIZES = 4096, 14336
# Strips that a round of the last kernel reads, row by row and in groups, by
# the new features: a test counts them.
STRIPS = {
    1024: (41, 44),
    2048: (33, 36),
    4096: (41, 44),
    8192: (69, 42),
    14336: (115, 42),
}


def both(of, provider, share_of=""):
    """Two medians, or two shares in %, at both sizes."""
    if share_of:
        first, second = (of.share(provider, N, share_of) for N in SIZES)
        return f"{first}% and {second}%"
    first, second = (of.median(provider, N) for N in SIZES)
    return f"{first} and {second}"


def first_kernel(figure):
    of = figure("linear-first-kernel", CARD)
    single, cut, half, cublas = (
        of.median(name, 4096) for name in ("ieee", "tf32", "one tile", "torch")
    )
    assert single < cut < half < cublas
    yield (
        f"at 4096 new features, the kernel reaches {single} TFLOP/s in "
        f"float32, {cut} with TF32, and {half} in 16 bits."
    )
    yield (
        f"cuBLAS reaches {cublas} TFLOP/s in 16 bits, so we are at "
        f"{of.share('one tile', 4096, 'torch')}% of it."
    )


def hits(figure):
    of = figure("linear-l2-hits", CARD)

    def percent(provider, N):
        number = of.median(provider, N)
        number.rounding = ".0f"
        return number

    # "At 4096 features both orders fit into L2"; at 14336 one does not.
    assert percent("rows", 14336) < percent("triton", 14336) - 5
    yield (
        f"in groups of 8 rows, {percent('triton', 4096)}% of the requests hit "
        f"at 4096 new features and {percent('triton', 14336)}% at 14336. Row "
        f"by row it is {percent('rows', 4096)}% and {percent('rows', 14336)}%."
    )
    # "It even hits a little more often", and "a fifth of the requests miss at
    # best".
    assert 0 < percent("rows", 4096) - percent("triton", 4096) < 4
    assert max(of.all_medians("rows") + of.all_medians("triton")) < 84


def climbed(figure):
    of = figure("linear-ladder", CARD)

    def rung(name):
        return both(of, name, "torch")

    yield (
        "the kernel that we started with reaches "
        f"{of.share('one tile', 4096, 'torch')}% of cuBLAS at 4096 new "
        f"features and {of.share('one tile', 14336, 'torch')}% at 14336. At "
        f"these sizes groups make it {rung('groups')}, three stages "
        f"{rung('stages')}, descriptors {rung('descriptors')}, and tiles of "
        f"128 × 256 {rung('wide')}. Persistent programs reach "
        f"{rung('persistent')}, and with results in halves and a fourth stage "
        f"we are at {rung('triton')}. With its tiles row by row this kernel "
        f"would be at {rung('rows')}."
    )
    slower = {N: 100 * (1 - of.ratio("rows", "triton", N)) for N in STRIPS}
    for number in slower.values():
        number.rounding = ".0f"
    # "As fast as in groups up to 4096 new features, within 3%".
    assert max(abs(slower[N]) for N in (1024, 2048, 4096)) < 3
    yield (
        f"it is {slower[8192]}% slower at 8192 and {slower[14336]}% at 14336."
    )

    def terabytes(name, strips):
        """In a second: strips of 128 rows in each round of 132 tiles."""
        operations = 132 * 128 * 256 * 2 * 4096
        rounds_in_a_second = of.median(name, 14336) * 1e12 / operations
        found = strips * 128 * 4096 * 2 * rounds_in_a_second / 1e12
        found.rounding = ".1f"
        return found

    by_row, in_groups = STRIPS[14336]
    yield (
        f"at 14336 that is {terabytes('rows', by_row)} TB in a second, and in "
        f"groups {terabytes('triton', in_groups)}."
    )


def few_tokens(figure):
    of = figure("linear-few-tokens", CARD)

    def three(name):
        first, second, third = (of.median(name, N) for N in (1, 64, 512))
        return f"{first}, {second} and {third}"

    # "That is little as long as there are few tokens."
    for tokens in (1, 16):
        assert of.median("triton", tokens) < of.median("one part", tokens)
    # "What is between them is noise."
    for tokens in (64, 128, 256, 512):
        assert 0.98 < of.ratio("triton", "one part", tokens) < 1.02
    # "So our kernel takes nearly the same time up to 128 tokens."
    ours = [of.median("triton", tokens) for tokens in (1, 16, 64, 128)]
    assert max(ours) < 1.05 * min(ours)
    cublas = of.ratio("torch", "triton", 64)
    cublas.rounding = ".2f"
    assert cublas > 1
    yield f"With 64 tokens cuBLAS is {cublas} times as fast as we are."
    yield (
        f"our kernel takes {of.median('triton', 1)} µs with one token, "
        f"{of.median('triton', 64)} with 64 and {of.median('triton', 512)} "
        f"with 512. In one part it takes {three('one part')}. PyTorch takes "
        f"{three('torch')}."
    )


def times(of, narrow, rival):
    """How many times as fast at the three sizes."""
    found = [of.ratio("triton", rival, N) for N in SIZES]
    found.append(narrow.ratio("triton", rival, 4096))
    for number in found:
        number.rounding = ".2f"
    return found


def forward(figure):
    name = "linear-gelu-forward"
    of, narrow = figure(name, CARD), figure(f"{name}-narrow", CARD)
    wide, wider, short = times(of, narrow, COMPILED)
    assert min(wide, wider, short) > 1
    to_torch = times(of, narrow, "torch")
    # "Our line is above both of theirs at all three sizes."
    assert min(of.ratios("triton", [COMPILED, "torch"])) > 1
    yield (
        "the layer with 4096 old features reaches "
        f"{of.median('triton', 4096)} TFLOP/s at 4096 new ones, and "
        f"{of.median('triton', 14336)} at 14336. That is {wide} and {wider} "
        f"times the speed of torch.compile, and {to_torch[0]} and "
        f"{to_torch[1]} times that of PyTorch."
    )
    yield (
        f"With 1024 old features it reaches {narrow.median('triton', 4096)} "
        f"TFLOP/s at 4096 new ones, which is {short} times the speed of "
        "torch.compile."
    )
    faster = [
        100 * (each.ratio(name, "triton", 4096) - 1)
        for name in ("inference", "z saved")
        for each in (narrow, of)
    ]
    for number in faster:
        number.rounding = ".0f"
    yield (
        f"If we saved nothing, we would be {faster[0]}% faster there, and "
        f"{faster[1]}% at 4096 old and new features. If we saved ``z`` in "
        f"place of the slope, we would be {faster[2]}% and {faster[3]}% "
        "faster."
    )


def three(of, N):
    """Shares of cuBLAS of the three products."""
    return [of.share(name, N, f"{name} cublas") for name in ("y", "dx", "dw")]


def products(figure):
    name = "linear-products"
    of, narrow = figure(name, CARD), figure(f"{name}-narrow", CARD)
    y, dx, dw = three(of, 4096)
    wide_y, wide_dx, wide_dw = three(of, 14336)
    short_y, short_dx, short_dw = three(narrow, 4096)
    yield (
        f"``y`` reaches {y}% of cuBLAS, ``dx`` {dx}% and ``dw`` {dw}%. With "
        f"14336 new features it is {wide_y}%, {wide_dx}% and {wide_dw}%. With "
        "4096 tokens of 1024 features, and 4096 new ones, it is "
        f"{short_y}%, {short_dx}% and {short_dw}%."
    )
    # The bars.
    for N in SIZES:
        y, dx, dw = three(of, N)
        assert y >= 93 and dx >= 90 and dw >= 93
    assert min(three(narrow, 4096)) >= 95
    every = three(of, 4096) + three(of, 14336) + three(narrow, 4096)
    yield (
        "our three products reach between "
        f"{min(every)}% and {max(every)}% of cuBLAS."
    )
    yield (
        "``dw`` has 32 of them and reaches "
        f"{three(narrow, 1024)[2]}% of cuBLAS."
    )


def small_weight(figure):
    of = figure("linear-small-weight", CARD)

    def each(name):
        first, second, third, fourth = (
            of.median(name, tokens) for tokens in (4096, 8192, 16384, 32768)
        )
        return f"{first}, {second}, {third} and {fourth}"

    # Parts bring something where the rule takes them, and up to 4096 tokens
    # both lines are the same kernel.
    for tokens in (8192, 16384, 32768):
        assert of.ratio("triton", "one part", tokens) > 1
    for tokens in (2048, 4096):
        assert 0.97 < of.ratio("triton", "one part", tokens) < 1.03
    first, second, third, fourth = (
        of.median("triton", tokens) for tokens in (4096, 8192, 16384, 32768)
    )
    yield (
        f"our kernel reaches {first} TFLOP/s with 4096 tokens, {second} with "
        f"8192, {third} with 16384 and {fourth} with 32768. In one part it "
        f"reaches {each('one part')}, and cuBLAS reaches {each('torch')}."
    )

    def microseconds(name, tokens):
        found = 2 * tokens * 768**2 / of.median(name, tokens) * 1e-6
        found.rounding = ".0f"
        return found

    more = microseconds("one part", 32768) - microseconds("one part", 16384)
    yield f"From 16384 to 32768 tokens it takes {more} µs more"
    step = more / 128
    step.rounding = ".2f"
    gigabytes = 2 * (64 + 128) * 128 / step * 1e-3
    gigabytes.rounding = ".0f"
    yield (
        f"That is {step} µs a step, in which an SM loads 49 KB, or "
        f"{gigabytes} GB/s."
    )
    # An SM gets more than the 90 GB/s, and more than the rule counts on.
    assert gigabytes > 120
    yield (
        "58 µs of one part with 16384 tokens and 45 of three, where we "
        f"measure {microseconds('one part', 16384)} and "
        f"{microseconds('triton', 16384)}: too much, but in the right order."
    )
    # With 8192 tokens "the quantiles overlap"; else "cuBLAS is faster".
    assert overlap(*(of.spans[name][8192] for name in ("triton", "torch")))
    ahead = 100 * (of.ratio("triton", "torch", 8192) - 1)
    cublas = [
        of.ratio("torch", "triton", tokens)
        for tokens in (2048, 4096, 16384, 32768)
    ]
    assert ahead > 0 and min(cublas) > 1
    least, most = (100 * (each - 1) for each in (min(cublas), max(cublas)))
    ahead.rounding = least.rounding = most.rounding = ".0f"
    yield (
        f"cuBLAS is faster, by {least}% to {most}%, but not with 8192 tokens. "
        f"There our median is {ahead}% higher, and the quantiles overlap."
    )
    times = max(cublas)
    times.rounding = ".2f"
    yield f"it is up to {times} times as fast."


def backward(figure):
    name = "linear-gelu-backward"
    of, narrow = figure(name, CARD), figure(f"{name}-narrow", CARD)
    wide, wider, short = times(of, narrow, COMPILED)
    assert min(wide, wider, short) > 1
    to_torch = times(of, narrow, "torch")
    yield (
        f"our backward pass reaches {of.median('triton', 4096)} TFLOP/s at "
        f"4096 new ones and {of.median('triton', 14336)} at 14336: {wide} and "
        f"{wider} times the speed of torch.compile, and {to_torch[0]} and "
        f"{to_torch[1]} times that of PyTorch. With 1024 old features it "
        f"reaches {narrow.median('triton', 4096)} at 4096 new ones, which is "
        f"{short} times the speed of torch.compile."
    )
    for N in SIZES:
        assert of.ratio("triton", "two columns", N) > 1
        assert of.ratio("triton", "all columns", N) > 1
    assert narrow.ratio("triton", "all columns", 4096) > 1
    yield (
        "If two columns of ``dx`` make ``dz``, the first two of these numbers "
        f"are {both(of, 'two columns')}. If all columns do, they are "
        f"{both(of, 'all columns')}, and with 1024 old features "
        f"{narrow.median('all columns', 4096)}."
    )
    yield (
        "If the forward pass had saved ``z``, the first two numbers would be "
        f"{both(of, 'z saved')}."
    )
    # "Whether we save the slope or z makes no difference here that is larger
    # than the noise."
    assert max(abs(each - 1) for each in of.ratios("triton", "z saved")) < 0.02
    forward = figure("linear-gelu-forward", CARD)
    gains = [
        100 * (each - 1)
        for passes in (forward, of)
        for each in passes.ratios("triton", COMPILED)
    ]
    for number in gains:
        number.rounding = ".0f"
    yield (
        f"both passes of the layer with GELU are {min(gains)}% to "
        f"{max(gains)}% faster than torch.compile"
    )


def traffic(figure):
    of = figure("linear-backward-traffic", CARD)

    def mb(provider, N=4096):
        number = of.median(provider, N)
        number.rounding = ".0f"
        return number

    assert mb("all columns") < mb("triton")
    yield (
        f"our backward pass moves {mb('triton')} MB, and {mb('five')} by "
        "hand. If all columns of ``dx`` make ``dz``, it moves "
        f"{mb('all columns')} MB, and {mb('four')} by hand. Without an "
        f"activation our backward pass moves {mb('no activation')} MB, and "
        f"{mb('three')} by hand."
    )
    assert mb("no activation") < mb("all columns")
    less = mb("five", 1024) - mb("triton", 1024)
    less.rounding = ".0f"
    # dz, dx and dw, which may all be in L2 when their kernels end.
    written = 2 * (4096 * 1024 + 4096 * 1024 + 1024 * 1024) / 1e6
    assert abs(less - written) < 1
    yield (
        f"our backward pass moves {mb('triton', 1024)} MB, {less} less than "
        "by hand"
    )


def ladder(figure):
    single = figure("linear-first-kernel", CARD).median("ieee", 4096)
    of = figure("linear-ladder", CARD)
    ours = [of.median(name, 4096) for name in (
        "one tile", "groups", "stages", "descriptors", "wide", "persistent",
        "triton", "torch",
    )]  # fmt: skip
    one, groups, stages, tma, wide, stay, halves, cublas = ours
    yield (
        f"- **Float32, without Tensor Cores:** {single} TFLOP/s. - **16 bits, "
        f"one tile a program:** {one}. - **Groups of 8 rows of tiles:** "
        f"{groups}. - **Three stages:** {stages}. - **Descriptors:** {tma}. - "
        f"**Tiles of 128 × 256:** {wide}. - **Persistent programs:** {stay}. "
        f"- **Results in halves, and a fourth stage:** {halves}. - "
        f"**cuBLAS:** {cublas}."
    )
    of = figure("linear-gelu-backward", CARD)
    torch_, compiled, every, two, ours = (
        of.median(name, 4096)
        for name in ("torch", COMPILED, "all columns", "two columns", "triton")
    )
    yield (
        f"- **PyTorch:** {torch_} TFLOP/s. - **torch.compile:** {compiled}. - "
        f"**Ours, dz in the reads of dx, all columns:** {every}. - **Ours, dz "
        f"in the reads of dx, two columns:** {two}. - **Ours, dz in a pass of "
        f"its own:** {ours}."
    )


def CLAIMS(figure):
    yield from first_kernel(figure)
    yield from hits(figure)
    yield from climbed(figure)
    yield from few_tokens(figure)
    yield from forward(figure)
    yield from products(figure)
    yield from small_weight(figure)
    yield from backward(figure)
    yield from traffic(figure)
    yield from ladder(figure)


DATA_SHEET = "the data sheet of the H200"
ESTIMATE = "a number of the rule, chosen"
TRIAL = "an H200, with each tile and each number of parts; not recorded"
FACTS = {
    "lie two or three percent apart": "what a clock that changes may do",
    "a read of ``dy`` by itself: 34 MB": "4096 * 4096 * 2 bytes",
    "more than 400 times as long to read": "115 ms and 0.28 ms, printed above",
    "it is less than three times as long": "0.67 and 0.28 ms, printed above",
    "the units for float32 do 67 TFLOP/s": DATA_SHEET,
    "A strip of 4096 features takes 1 MB": "128 * 4096 * 2 bytes",
    "L2 of an H200 holds 60 MB": "what PyTorch says of the card",
    "row by row needs 114 MB": "2 + 112 strips, printed above",
    "new features it takes 67 MB": "8192 * 4096 * 2 bytes",
    "reads 67 MB and writes 67 MB": "8192 * 4096 * 2 bytes",
    "which takes 28 µs at 4.8 TB/s": "134 MB, at what the data sheet says",
    "needs 278 µs at 989 TFLOP/s": "2 * 8192 * 4096**2 operations",
    "it moves 201 MB, which takes 42 µs at 4.8 TB/s": "3 * 67 MB",
    "took at most 5% longer than the best": TRIAL,
    "``x`` and ``w`` have 101 MB": "2 * (8192 + 4096) * 4096 bytes",
    "the programs ask for 4.3 GB": "printed above: tiles of 128 x 128",
    "so 2% would have to miss": "101 MB of 4.3 GB",
    "up to 4096 new features, within 3%": "an order above",
    "The weight has 34 MB": "2 * 4096**2 bytes",
    "64 tokens and two parts it would be 4.2 MB": "8 * 2 * 64 * 4096 bytes",
    "in which an SM loads 49 KB": "2 * (64 + 128) * 128 bytes",
    "each would get about 90 GB/s": "12 000 GB/s, of the rule, for 132 SMs",
    "It expects 58 µs of one part": "a test says so",
    "``dw`` together have 19 MB": "2 * (2 * 4096 * 1024 + 1024**2) bytes",
    "sums are 17 MB in float32": "7 * 768 * 768 * 4 bytes",
    "which gives 12 000 GB/s to": ESTIMATE,
    "and 120 GB/s to one of them": ESTIMATE,
    "It gives 4200 GB/s to all SMs": ESTIMATE,
    "40 GB/s to one of them": ESTIMATE,
    "a µs has room for 2.3 MB": ESTIMATE,
    "three times as many new features": "K <= N // 3, in the rule",
    "errors below 1%:": "what the check asserts",
}

# Tiles of 16, so that small cases have several; parts of two steps.
SMALL = (
    (
        "(128, 256, 64, 8, 4),\n        (128, 128, 64, 4, 6),\n"
        "        (64, 128, 128, 4, 4),\n        (64, 64, 128, 4, 6),",
        "(32, 32, 16, 8, 2),\n        (16, 32, 16, 8, 2),\n"
        "        (16, 16, 16, 4, 2),",
    ),
    ("ROWS = 128, 128, 64, 8, 4", "ROWS = 16, 32, 16, 8, 2"),
    (
        "(128, 128, 32, 8, 4), (64, 64, 32, 4, 4)",
        "(32, 32, 16, 8, 4), (16, 16, 16, 4, 4)",
    ),
    ('"ieee": ((64, 64, 16, 4, 4),)', '"ieee": ((16, 32, 16, 4, 4),)'),
    # A second kernel costs nothing, so that small products have parts.
    ("time += 5 + 8", "time += 0 * 8"),
    ("tile = 64, 64\n", "tile = 16, 32\n"),
    ("K // tile[2] // 4", "K // tile[2] // 2"),
)


def at(lead, ins, outs, dtype=HALF, **more):
    return LinearCase(lead, ins, outs, dtype, **more)


def both_passes(page, M, N, K, activation, dtype=HALF):
    """One call of a layer, to see what it launches."""
    x, w, b, dy = page.inputs(M, N, K, dtype)
    for t in (x, w, b):
        t.requires_grad_()
    y = page.linear(x, w, b, activation)
    return torch.autograd.grad(y, (x, w, b), dy)


def divided_evenly(load):
    """Parts of K are whole, none is empty, and all are there."""
    page = load("as it is")
    with on_132_sms(page):
        for M, N, K in (
            (1, 4096, 4096),
            (16, 1000, 300),
            (16, 1024, 3200),
            (5, 7, 1_000_000),
            (64, 64, 65),
            (4096, 4096, 8192),
        ):
            for dtype in (HALF, SINGLE):
                plan = page.plan_product(M, N, K, dtype)
                parts, length = plan["PARTS"], plan["K_PART"]
                assert length % plan["TILE_K"] == 0
                assert (parts - 1) * length < K <= parts * length


def cut_as_pytorch_says(load):
    """float32 is cut to TF32 only where PyTorch's switch says so."""
    page = load("as it is")
    switch = torch.backends.cuda.matmul
    before = switch.fp32_precision
    try:
        for said, plain in (("tf32", "tf32"), ("ieee", "ieee")):
            switch.fp32_precision = said
            found = page.plan_product(4096, 4096, 4096, SINGLE)
            assert found["PRECISION"] == plain
            half = page.plan_product(4096, 4096, 4096, HALF)
            assert half["PRECISION"] == "ieee"
    finally:
        switch.fp32_precision = before


def dz_in_the_reads_of_dx(load, form="small", sizes=(70, 56, 104)):
    """The design for comparison gives the same gradients, with some columns
    of dx and with all of them."""
    page = load(form)
    x, w, _, dy = page.inputs(*sizes, HALF)
    slope = page.normal(*sizes[:2], dtype=HALF)
    dz = (dy * slope).double()
    expected = dz @ w.double(), dz.T @ x.double(), dz.sum(0)
    for columns in (1, 2, 2**20):
        found = page.backward_without_a_pass(
            dy, x, w, slope, page._times_slope, columns
        )
        for one, other in zip(found, expected, strict=True):
            assert (one - other).abs().max() < 0.01 * other.abs().max()


def dz_in_reads_as_they_are(load):
    """With the tiles of a GPU, the last of which have too few tokens, and
    features of both kinds."""
    dz_in_the_reads_of_dx(load, "as it is", (300, 264, 520))


PAGE = Page(
    __file__,
    Linear(),
    {"linear": lambda page: page.linear},
    quick=(),
    forms={"small": SMALL, "as it is": ()},
    cases=(
        at((70,), 104, 56),
        at((70,), 104, 56, activation="relu", weight="transposed"),
        at((70,), 104, 50, activation=None, dy="columns"),
        at((150,), 24, 40, input="columns"),
        at((130,), 300, 260, form="as it is"),
        at((2, 3), 37, 24, form="as it is"),
    ),
    full=tuple(
        at((tokens,), ins, outs, dtype, activation=activation)
        for tokens, ins, outs, activation in (
            (4096, 1024, 4096, "gelu"),
            (1000, 2048, 1003, "relu"),
            (777, 333, 4096, "silu"),
            (16, 4096, 4096, "gelu"),
            (1, 1000, 50257, None),
            (20_000, 64, 128, "silu"),
        )
        for dtype in (HALF, BRAIN, SINGLE)
    ),
    repeatable=("linear",),
    repeated=(
        at((4096,), 1024, 2048, BRAIN),
        at((16,), 4096, 4096, BRAIN),
    ),
    graphs=(at((300,), 520, 1000),),
    trains=("linear",),
    huge=(4096,),
    elsewhere="not the current GPU",
    sanitizers=("memcheck", "racecheck"),
    sanitized=(
        at((300,), 264, 520, BRAIN),
        at((130,), 77, 35, HALF, activation="relu"),
        at((16,), 1024, 256, BRAIN),
    ),
    sanitized_by={"memcheck": (dz_in_reads_as_they_are,)},
    prints={
        "errors below 1%": 4,
        "Timing needs a GPU": 9,
        "each tile once: True": 2,
    },
    mutants={
        "the last group has as many rows": (
            "rows.\n    height = tl.minimum(rows - first, GROUP)",
            "rows.\n    height = GROUP",
        ),
        "no bias": (
            "sums += bias.to(tl.float32)[None, :]",
            "sums += 0 * bias.to(tl.float32)[None, :]",
        ),
        "both halves in one place": (
            "column=column + i * pieces[i].shape[1]",
            "column=column",
        ),
        "a slope of ReLU below 0": ("tl.where(y <= 0, 0.0, dy)", "dy"),
        "ReLU is flat at 0": (
            "tl.where(y <= 0, 0.0, dy)",
            "tl.where(y < 0, 0.0, dy)",
        ),
        "the slope of GELU lacks a term": (
            "return z * sigmoid, sigmoid * (1 + du * (1 - sigmoid))",
            "return z * sigmoid, sigmoid",
        ),
        "GELU without a limit": (
            "near = tl.minimum(tl.maximum(z, -30.0), 30.0)",
            "near = z",
        ),
        "every part begins at 0": ("begin = part * K_PART", "begin = 0"),
        "a part goes on to the end": (
            "end = tl.minimum(begin + K_PART, K)",
            "end = K",
        ),
        "all parts in one place": (
            "part_ptr += part.to(tl.int64) * M * N",
            "part_ptr += 0",
        ),
        "parts that do not exist": (
            "mask = (part[:, None] < parts) & inside[None, :]",
            "mask = (part[:, None] >= 0) & inside[None, :]",
        ),
        "slopes of parts, as if rows had no end": (
            "place = at // N * slope_stride + at % N",
            "place = at",
        ),
        "an empty part": (
            '"PARTS": triton.cdiv(steps, steps_of_a_part)',
            '"PARTS": parts',
        ),
        "dz is stored by the first column alone": (
            "if n // TILE_N % COLUMNS == column:",
            "if n // TILE_N == column:",
        ),
        "parts of db in one row": (
            "place = strip.to(tl.int64) * N + feature",
            "place = feature",
        ),
        "the right half of dx": (
            "right_at = left_at + TILE_K // 2",
            "right_at = left_at",
        ),
        "the first columns of dx alone": (
            "if done < K:",
            "if done < 0:",
        ),
        "each step stores where the first one does": (
            "row = (strip * STEPS + step) * TILE_M",
            "row = strip * STEPS * TILE_M",
        ),
        "dw of dy": (
            "product(dz.T, x, dw)\n    db = None",
            "product(dy.T, x, dw)\n    db = None",
        ),
        "no slope is saved for SiLU": (
            'activation in ("gelu", "silu")',
            'activation in ("gelu",)',
        ),
        "no tokens, and what was in memory": (
            "dy.new_zeros(shape) if want",
            "dy.new_empty(shape) if want",
        ),
        "rows of any length": (
            "width = triton.cdiv(columns, step) * step",
            "width = columns",
        ),
        "memory that begins anywhere": (
            "aligned = t.data_ptr() % 16 == 0 and step % 16 == 0",
            "aligned = step % 16 == 0",
        ),
        "float32 is cut": ('return "ieee"\n', 'return "tf32"\n'),
    },
    kills=(
        at((70,), 104, 50),
        at((70,), 104, 56, activation="silu", bias=None),
        at((70,), 104, 56, activation="relu"),
        at((5,), 200, 21, activation="silu"),
        at((5,), 200, 21, activation="gelu", large=30.0),
        at((33,), 24, 40, input="unaligned"),
        at((0,), 8, 5),
        at((6,), 40, 24, SINGLE, activation="gelu", large=1e14),
        divided_evenly,
        cut_as_pytorch_says,
        dz_in_the_reads_of_dx,
    ),
)


@pytest.mark.parametrize("switch", ["allow_tf32", "for all products"])
def test_older_switches_say_the_same(switch):
    """Whether float32 is cut: PyTorch has three ways to say so."""
    page = PAGE.load("as it is")
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    precision = torch.get_float32_matmul_precision()
    try:
        for cut in (True, False):
            if switch == "allow_tf32":
                matmul.allow_tf32 = cut
            else:
                torch.set_float32_matmul_precision(
                    "high" if cut else "highest"
                )
            found = page.plan_product(4096, 4096, 4096, SINGLE)
            assert found["PRECISION"] == ("tf32" if cut else "ieee")
    finally:
        torch.set_float32_matmul_precision(precision)
        matmul.fp32_precision = before


def test_no_pass_is_left_that_makes_dz(monkeypatch):
    """If columns of dx do, there is no kernel of its own for dz and db; the
    function that is kept has one."""
    page = PAGE.load("small")
    x, w, _, dy = page.inputs(70, 56, 104, HALF)
    slope = page.normal(70, 56, dtype=HALF)
    given = dy, x, w, slope, page._times_slope
    monkeypatch.setattr(page, "_own_pass", None)
    for columns in (page.FIRST_COLUMNS, 2**20):
        page.backward_without_a_pass(*given, columns)
    with pytest.raises(TypeError, match="not subscriptable"):
        page.backward(*given, EVERY)
    # Neither slope nor bias: there is nothing to do for it.
    page.backward(dy, x, w, None, None, (True, True, False))


def test_transposed_matrices_are_taken_as_they_lie(page):
    t = torch.zeros(24, 40, dtype=HALF, device=page.DEVICE)
    assert page.for_descriptors(t) is t
    transposed = t.T
    assert page.for_descriptors(transposed) is transposed
    part = t[:, 8:32]
    assert page.for_descriptors(part) is part
    assert page.for_descriptors(t[:, 1:]) is not t


def test_what_is_saved(page):
    """A slope for GELU and SiLU, y itself for ReLU, and nothing where nobody
    trains."""
    x, w, b, _ = page.inputs(20, 24, 40, HALF)
    w.requires_grad_()
    kept = []

    def keep(t):
        kept.append(t)
        return t

    for activation, count in (
        (None, 1),
        ("relu", 2),
        ("gelu", 2),
        ("silu", 2),
    ):
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            y = page.linear(x, w, b, activation)
        assert len(kept) == count
        same = [t.data_ptr() == y.data_ptr() for t in kept]
        assert any(same) == (activation == "relu")
        kept.clear()
        with (
            torch.no_grad(),
            torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t),
        ):
            page.linear(x, w, b, activation)
        assert kept == []


def test_the_tiles_of_the_sizes_that_are_measured():
    """With 132 SMs all products at the sizes of the bars have the largest
    tile, one part, and four stages."""
    page = PAGE.load("as it is")
    with on_132_sms(page):
        for M, K, N in (
            (8192, 4096, 4096),
            (8192, 4096, 14336),
            (4096, 1024, 4096),
        ):
            for product in (M, N, K), (M, K, N), (N, K, M):
                plan = page.plan_product(*product, BRAIN)
                assert (plan["TILE_M"], plan["TILE_N"]) == (128, 256)
                assert (plan["PARTS"], plan["STAGES"]) == (1, 4)
                assert plan["PROGRAMS_PER_SM"] == 1


def test_two_programs_share_an_sm_where_sums_are_short():
    """And something stands behind them."""
    page = PAGE.load("as it is")
    with on_132_sms(page):
        for M, K, N, share in (
            (8192, 4096, 4096, False),
            (8192, 4096, 14336, True),
            (4096, 1024, 4096, True),
            (16, 1024, 4096, False),
        ):
            plan = page.plan_product(M, N, K, BRAIN, act=page._gelu)
            assert plan["PROGRAMS_PER_SM"] == 1 + share
            if share:
                # Two of them fit.
                tiles = plan["TILE_M"] * plan["TILE_K"]
                tiles += plan["TILE_K"] * plan["TILE_N"]
                half = plan["TILE_M"] * plan["TILE_N"] // 2
                taken = 2 * (plan["STAGES"] * tiles + half) + 1024
                assert 2 * taken <= 228 * 1024


def test_the_fewer_tokens_the_more_parts():
    page = PAGE.load("as it is")
    with on_132_sms(page):
        parts = [
            page.plan_product(M, 4096, 4096, BRAIN)["PARTS"]
            for M in (1, 16, 64, 256, 512)
        ]
    assert parts == sorted(parts, reverse=True)
    assert parts[0] > 1 == parts[-1]


def test_the_strips_of_a_round():
    """Of the last kernel, with tiles of 128 by 256."""
    page = PAGE.load("as it is")
    for N, expected in STRIPS.items():
        for group, strips in zip((1, 8), expected, strict=True):
            # A column of its tiles needs two strips of w.
            of_x, of_w = page.strips_of_a_round(N // 2, group)
            assert of_x + 2 * of_w == strips


def test_what_the_rule_expects_of_a_small_weight():
    """The page says so, beside what was measured."""
    page = PAGE.load("as it is")
    with on_132_sms(page):
        for tokens, most, tile, parts in (
            (2048, 32, (64, 128, 128), 1),
            (4096, 32, (64, 128, 128), 1),
            (8192, 32, (128, 128, 64), 3),
            (16384, 32, (128, 128, 64), 3),
            (32768, 32, (128, 128, 64), 3),
            (16384, 1, (64, 128, 128), 1),
        ):
            found, found_parts = page.tile_and_parts(
                768, 768, tokens, "16 bits", True, most
            )
            assert (found[:3], found_parts) == (tile, parts)
        for tile, parts, expected in (
            ((128, 128, 64), 3, 45),
            ((64, 128, 128), 1, 58),
        ):
            time = page.estimate(
                768, 768, 16384, "16 bits", (*tile, 4, 4), parts
            )
            assert round(time) == expected


def test_what_the_rule_takes_for_few_tokens():
    """The page says how many parts and programs that are."""
    page = PAGE.load("as it is")
    with on_132_sms(page):
        for tokens, tile, parts in (
            (1, (64, 128), 4),
            (16, (64, 64), 2),
            (64, (64, 64), 1),
            (128, (64, 64), 1),
            (512, (128, 128), 1),
        ):
            found, found_parts = page.tile_and_parts(
                tokens, 4096, 4096, "16 bits", True, 32
            )
            assert (found[:2], found_parts) == (tile, parts)
            single, _ = page.tile_and_parts(
                tokens, 4096, 4096, "16 bits", True, 1
            )
            if tokens <= 64:
                assert single[:2] == (64, 64)  # so 64 programs


def test_few_tiles_and_long_sums_are_divided():
    """The gradients of weights in a small model with 16384 tokens: they give
    work to 70% of all SMs in each round."""
    page = PAGE.load("as it is")
    with on_132_sms(page):
        for N, K, parts in (
            (2304, 768, (1, 8)),
            (768, 768, (3, 3)),
            (4096, 768, (2, 4)),
            (768, 2048, (1, 8)),
        ):
            plan = page.plan_product(N, K, 16384, BRAIN)
            least, most = parts
            assert least <= plan["PARTS"] <= most
            programs = plan["PARTS"]
            programs *= -(-N // plan["TILE_M"]) * -(-K // plan["TILE_N"])
            rounds = -(-programs // 132)
            assert programs / (132 * rounds) >= 0.7


@pytest.mark.parametrize("activation", [None, "relu", "gelu", "silu"])
def test_what_is_not_a_number_stays_so(activation):
    """In the result, as in PyTorch's; and ReLU passes the gradient of what is
    not a number on."""
    page = PAGE.load("small")
    x, w, b, dy = page.inputs(20, 24, 40, HALF)
    x[3] = float("nan")
    given = [t.clone().requires_grad_() for t in (x, w, b)]
    y = page.linear(*given, activation)
    assert y[3].isnan().all() and not y[4:].isnan().any()
    assert not y[:3].isnan().any()
    if activation != "relu":
        return
    found = torch.autograd.grad(y, given, dy)
    exact = [t.double().requires_grad_() for t in (x, w, b)]
    expected = F.relu(F.linear(*exact))
    expected = torch.autograd.grad(expected, exact, dy.double())
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(
            ours.double(), theirs, rtol=0.01, atol=0.01, equal_nan=True
        )


def test_relu_keeps_nan_on_a_gpu(launches):
    """As it is compiled: the instruction for a maximum has a form that does,
    and the interpreter might keep NaN where a GPU drops it."""
    from compiled.aot import Call

    values = {"M": 4096, "N": 4096, "dtype": "bfloat16"}
    (launched,) = launches([Call(PAGE.name, of_relu, values)])
    texts = [one.asm["ptx"] for one in launched if one.kernel == "_product"]
    found = [set(re.findall(r"max\.\S*f32", text)) for text in texts]
    # The product with ReLU comes first; gradients have none.
    assert found[0] == {"max.NaN.f32"} and not any(found[1:])


@pytest.mark.gpu
@pytest.mark.parametrize("activation", [None, "gelu"])
def test_tf32_is_as_exact_as_it_should_be(page, activation):
    """Each number of y, dx and dw: off by no more than operands that are cut
    to 10 bits of their fraction explain, and the worst by more than it would
    be in float32. (With ReLU a result near 0 may change its side.)"""
    switch = torch.backends.cuda.matmul
    before = switch.fp32_precision
    x, w, b, dy = page.inputs(1000, 520, 777, SINGLE)
    errors = {}
    try:
        for said in ("ieee", "tf32"):
            switch.fp32_precision = said
            given = [t.clone().requires_grad_() for t in (x, w, b)]
            y = page.linear(*given, activation)
            grads = torch.autograd.grad(y, given, dy)
            exact = [t.double().requires_grad_() for t in (x, w, b)]
            z = F.linear(*exact)
            z.retain_grad()
            expected = page.TORCH[activation](z)
            expected.backward(dy.double())
            # The size of the terms of each sum, whatever their signs.
            dz = z.grad.abs()
            sizes = {
                "y": exact[0].abs() @ exact[1].abs().T + exact[2].abs(),
                "dx": dz @ exact[1].abs(),
                "dw": dz.T @ exact[0].abs(),
            }
            pairs = {"y": (y, expected)}
            for name, t, e in zip(("dx", "dw"), grads, exact, strict=False):
                pairs[name] = (t, e.grad)
            for name, (ours, theirs) in pairs.items():
                off = ((ours - theirs).abs() / sizes[name]).max().item()
                errors[said, name] = off
    finally:
        switch.fp32_precision = before
    for name in ("y", "dx", "dw"):
        # Either operand is cut, so it is off by 2**-10 of itself at most. A
        # slope that was computed of z may be off by as much.
        assert errors["tf32", name] < 4 * 2**-10
        assert errors["ieee", name] < 2**-16 < errors["tf32", name]


def test_exercise(output):
    stub, solution = (
        int(line.rpartition(" ")[2])
        for line in output.splitlines()
        if "tiles in a row that share nothing" in line
    )
    assert stub > 0 == solution
