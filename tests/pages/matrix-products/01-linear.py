"""What must hold of the page "A linear layer, both passes"."""

from functools import partial

import torch

from compiled.declared import Case, Kernel, Kernels
from conformance import Linear, LinearCase, Page

HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32


def passes(page, M, N, dtype, activation="gelu", K=4096):
    """Both passes of a layer."""

    def empty(*shape):
        t = torch.empty(*shape, dtype=dtype, device=page.DEVICE)
        return t.requires_grad_()

    x, w, b = empty(M, K), empty(N, K), empty(N)
    y = page.linear(x, w, b, activation)
    torch.autograd.grad(y, (x, w, b), torch.empty_like(y))


def run(page, M, N, dtype):
    """The rungs by address; few tokens, in parts; and the layer."""
    x = torch.empty(M, 4096, dtype=dtype, device=page.DEVICE)
    w = torch.empty(N, 4096, dtype=dtype, device=page.DEVICE)
    for rung in page.RUNGS:
        page.by_address(x, w, rung)
    of_few(page, M, 256, dtype)
    dy = torch.empty(M, N, dtype=dtype, device=page.DEVICE)
    page.times_slope(dy, dy, False)
    passes(page, M, N, dtype)


def of_few(page, M, N, dtype):
    """16 tokens: small tiles, in parts."""
    passes(page, 16, N, dtype)


def of_one_layout(page, M, N, dtype, activation):
    """Weights that lie by columns, and a dy that does."""

    def empty(*shape):
        t = torch.empty(*shape, dtype=dtype, device=page.DEVICE)
        return t.requires_grad_()

    x, w, b = empty(M, 4096), empty(4096, N).mT, empty(N)
    y = page.linear(x, w, b, activation)
    dy = torch.empty(N, M, dtype=dtype, device=page.DEVICE).mT
    torch.autograd.grad(y, (x, w, b), dy)


def plain(page, M, N, dtype):
    passes(page, M, N, dtype, None)


def with_relu(page, M, N, dtype):
    passes(page, M, N, dtype, "relu")


def with_silu(page, M, N, dtype):
    passes(page, M, N, dtype, "silu")


def by_columns(page, M, N, dtype):
    of_one_layout(page, M, N, dtype, None)


def small(page, M, N, dtype):
    """4096 tokens of 1024 features, and layers with fewer tiles than SMs."""
    passes(page, 4096, N, dtype, K=1024)
    passes(page, 512, 1024, dtype, K=1024)


def all_rungs(page, M, N, dtype):
    """The rungs that are the kernel of all products, with other plans."""
    x = torch.empty(N, N, dtype=dtype, device=page.DEVICE)
    for rung in page.NAMES:
        if rung != "cublas":
            page.by_rung(rung)(x, x)


def also(page, M, N, dtype):
    """Where float32 is not cut to TF32, and where it is."""
    few = partial(passes, page, 16, 512, SINGLE, K=512)
    few(activation=None)
    few(activation="gelu")
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_tf32
    try:
        matmul.allow_tf32 = True
        passes(page, 1024, 1024, SINGLE, K=1024)
    finally:
        matmul.allow_tf32 = before


PUBLISHED = "2026-11-26"


def multiplies(code):
    """By Tensor Cores, with tiles from the TMA where there is one."""
    return [
        code.multiplies,
        code.fetches_tiles == (code.target in ("sm_90", "sm_100")),
    ]


KERNELS = Kernels(
    run=run,
    also=also,
    M=8192,
    N=[4096],
    dtype="bfloat16",
    sizes={"bfloat16": [1000, 4096, 14336], "float16": [4096]},
    kernels={
        "_linear_fwd_by_address": Kernel(
            look="""
            The last rung that computes addresses: three stages, so loads are
            asynchronous copies, ``cp.async``.
            """,
            true=lambda code: [code.multiplies],
            copies="any",
        ),
        "_linear_product": Kernel(
            look="""
            On sm_90 one instruction, ``wgmma``, multiplies for 4 warps, and
            ``cp.async.bulk.tensor`` fetches a tile.
            Nothing is spilled, though the sums take half of the registers.
            """,
            true=multiplies,
            shared=227 * 1024,
            copies="any",
            narrow_loads=64,  # the bias, once for a tile
            narrow_stores=2,  # db
        ),
        "_linear_bwd_slope": Kernel(
            look="Two numbers in, one out: no product.",
            true=lambda code: [not code.multiplies],
        ),
        "_linear_add_parts": Kernel(
            look="Sums of parts, in the order of their numbers.",
            true=lambda code: [not code.multiplies],
        ),
    },
    cases={
        "no activation": Case(run=plain, sizes={"bfloat16": [4096]}),
        "relu": Case(run=with_relu, sizes={"bfloat16": [4096]}),
        "silu": Case(run=with_silu, sizes={"bfloat16": [4096]}),
        "by columns": Case(run=by_columns, sizes={"bfloat16": [4096]}),
        "few tokens": Case(run=of_few, sizes={"bfloat16": [4096]}),
        "small": Case(run=small, sizes={"bfloat16": [4096]}),
        "rungs": Case(run=all_rungs, sizes={"bfloat16": [8192]}),
    },
)

CARD = "H100"
CUBLAS = "cublas"
RUNGS = (
    "tiles of 128",
    "grouped",
    "stages",
    "descriptors",
    "large tiles",
    "triton",
)


def from_to(numbers, unit=""):
    return f"{numbers.least}{unit} to {numbers.most}{unit}"


def ladder(figure):
    first = figure("product-tensor-cores", CARD)
    yield (
        f"the plain kernel reaches {first.median('one tile', 4096)} TFLOP/s. "
        f"With Tensor Cores it reaches {first.median('Tensor Cores', 4096)}, "
        f"and with larger tiles {first.median('tiles of 128', 4096)}. "
        f"cuBLAS reaches {first.median(CUBLAS, 4096)}."
    )
    # "We are far from that", and each of the three is faster than the last.
    assert first.median("tiles of 128", 4096) < 989 / 2
    assert first.median("one tile", 4096) <= 67
    assert first.ratio("Tensor Cores", "one tile", 4096) > 1
    assert first.ratio("tiles of 128", "Tensor Cores", 4096) > 1

    hits = figure("product-l2", CARD)
    share = {form: hits.median(form, 8192) for form in RUNGS[:2]}
    for number in share.values():
        number.rounding = ".0f"
    yield (
        f"L2 has {share['tiles of 128']}% of what is asked for in rows, and "
        f"{share['grouped']}% in the grouped order."
    )
    assert share["grouped"] > share["tiles of 128"]

    of = figure("product-ladder", CARD)
    at = partial(of.median, x=8192)
    rows, grouped, stages, descriptors, large, ours = map(at, RUNGS)
    yield (
        f"tiles of 128 × 128 reach {rows} TFLOP/s, the grouped order "
        f"{grouped}, three stages {stages}, descriptors {descriptors}, tiles "
        f"of 128 × 256 {large} and persistent programs {ours}. cuBLAS "
        f"reaches {at(CUBLAS)}."
    )
    # "Each rung takes away something that Tensor Cores waited for."
    assert rows < grouped < stages < descriptors < large < ours
    shares = of.between(2048).shares("triton", CUBLAS)
    yield f"our last rung is at {from_to(shares, '%')} of cuBLAS."
    yield (
        f"with Tensor Cores, in rows: {rows} TFLOP/s. At 4096 rows and "
        f"columns it was {first.median('one tile', 4096)} without Tensor "
        "Cores."
    )
    yield f"so that L2 has what the neighbors need: {grouped}."
    yield f"loads run ahead while Tensor Cores work: {stages}."
    yield f"fetches tiles, threads compute no addresses: {descriptors}."
    yield f"use each number more often: {large}."
    yield f"load the next tile while they finish one: {ours}."
    yield f"**cuBLAS**: {at(CUBLAS)}."


def products(figure):
    of = figure("linear-products", CARD)
    y, dx, dw = (of.shares(p, f"cublas {p}") for p in ("y", "dx", "dw"))
    yield (
        f"``y`` reaches {from_to(y, '%')} of cuBLAS's speed in these three "
        f"layers, ``dx`` {from_to(dx, '%')} and ``dw`` {from_to(dw, '%')}."
    )
    # "The layout of an operand matters little."
    assert min(y.least, dx.least, dw.least) >= 88


def layers(figure):
    of, back = (figure(f"linear-{p}", CARD) for p in ("forward", "backward"))

    def faster(figure):
        torch, compiled = (
            from_to(figure.ratios("triton", rival))
            for rival in ("torch", "torch.compile")
        )
        return (
            f"It is {torch} times as fast as PyTorch's, and {compiled} times "
            "as fast as torch.compile's."
        )

    yield (
        f"our forward pass reaches {from_to(of.all_medians('triton'))} "
        f"TFLOP/s. {faster(of)}"
    )
    yield (
        "Our backward pass reaches "
        f"{from_to(back.all_medians('triton'))} TFLOP/s. {faster(back)}"
    )
    # What ``linear`` does is the faster of the two, but for 2%.
    assert back.shares("triton", "dz first").least >= 98
    yield (
        "our backward pass reaches "
        f"{from_to(back.all_medians('dz first'))} TFLOP/s."
    )
    for each in of, back:
        for rival in "torch", "torch.compile":
            assert each.ratios("triton", rival).least > 1


def bytes_read(figure):
    of = figure("linear-backward-dram", CARD)
    ours, theirs = (of.all_medians(p) for p in ("triton", "torch"))
    for number in (*ours, *theirs):
        number.rounding = ".1f"
    yield (
        f"our backward pass reads each byte {from_to(ours)} times, and "
        f"PyTorch's {from_to(theirs)} times."
    )


def few(figure):
    of = figure("linear-few-tokens", CARD)
    at = partial(of.median, x=16)
    yield (
        f"parts make the product {of.ratio('triton', 'one part', 16)} times "
        f"as fast: {at('triton')} TFLOP/s instead of {at('one part')}. "
        f"PyTorch reaches {at('torch')}."
    )
    # "With 4096 tokens both lines are the same."
    assert abs(of.share("triton", 4096, "one part") - 100) <= 3


def CLAIMS(figure):
    yield from ladder(figure)
    yield from products(figure)
    yield from layers(figure)
    yield from bytes_read(figure)
    yield from few(figure)


DATA_SHEET = "the data sheet of the H100"
FACTS = {
    "that is 1.7 TFLOP/s": "3.35 TB/s times half an operation for each byte",
    "up to 989 TFLOP/s": DATA_SHEET,
    "allows 67 TFLOP/s in float32": DATA_SHEET,
    "it would have to read ``z`` and write ``y``. With 8192 tokens and 14336 "
    "features that is 0.47 GB": "2 * 8192 * 14336 * 2 bytes",
    "takes at least 0.14 ms": "0.47 GB / 3.35 TB/s",
    "takes at least 0.97 ms": "2 * 8192 * 4096 * 14336 / 989e12",
    "these are 6% more to multiply": "16 / 256",
    "errors below 1%:": "what the check asserts",
    "all that moves: 34 MB": "4096 * 4096 * 2 bytes",
    "at least 10 µs at 3.35 TB/s": "33.6 MB / 3.35 TB/s",
}

# Tiles of 16, so that small cases have several; 4 programs run at a time.
SMALL = (
    ('"float32": (64, 64, 16, 3, 8),', '"float32": (16, 32, 16, 3, 8),'),
    ('"few rows": (64, 128, 64, 4, 4),', '"few rows": (16, 16, 32, 4, 4),'),
    ('"large": (128, 256, 64, 4, 8),', '"large": (16, 32, 16, 4, 8),'),
    (
        "tiles_of_256 = triton.cdiv(M, 128) * triton.cdiv(N, 256)",
        "tiles_of_256 = triton.cdiv(M, 16) * triton.cdiv(N, 32)",
    ),
    ("if M <= 64:", "if M <= 20:"),
    ("triton.cdiv(K, tile_k) // 4", "triton.cdiv(K, tile_k)"),
    ('"GROUP": 8,', '"GROUP": 2,'),
)


def layer(tokens, features_in, features_out, dtype=HALF, **more):
    return LinearCase((tokens,), features_in, features_out, dtype, **more)


PAGE = Page(
    __file__,
    Linear(),
    {"linear": lambda page: page.linear},
    quick=(),
    forms={"small": SMALL, "as it is": ()},
    cases=(
        layer(300, 200, 520, activation="gelu"),
        layer(150, 150, 150, SINGLE, activation="silu", large=30.0),
        layer(16, 1000, 40, activation="gelu"),
        layer(700, 20, 30, activation="relu"),
    ),
    full=(
        *(
            layer(*sizes, dtype, activation=activation)
            for sizes in (
                (8192, 4096, 4096),
                (4096, 1024, 4096),
                (1000, 2077, 3001),
                (16, 4096, 4096),
                (1, 4096, 1000),
                (20000, 64, 96),
            )
            for dtype, activation in (
                (BRAIN, "gelu"),
                (HALF, None),
                (HALF, "relu"),
            )
        ),
        layer(1000, 500, 700, SINGLE, activation="silu"),
    ),
    repeatable=("linear",),
    repeated=(
        layer(1000, 1500, 700, activation="gelu"),
        layer(16, 4096, 512, activation="gelu"),
    ),
    graphs=(
        layer(300, 200, 520, activation="gelu"),
        layer(16, 1000, 40),
    ),
    trains=("linear",),
    huge=(4096,),
    elsewhere="not the current GPU",
    sanitizers=("memcheck", "racecheck"),
    sanitized=(
        layer(37, 51, 300, activation="gelu"),
        layer(300, 200, 520, activation="relu"),
        layer(16, 1000, 40),
    ),
    prints={
        "errors below 1%": 3,
        "Timing needs a GPU": 5,
        "exercise 1: right": 1,
        "exercise 1: not yet": 1,
    },
    mutants={
        "rows beyond the input": (
            (
                "mask=(rows[:, None] < M) & (k[None, :] < K),",
                "mask=(rows[:, None] < M) & (k[None, :] < K + 8),",
            ),
            (
                "mask=(cols[:, None] < N) & (k[None, :] < K),",
                "mask=(cols[:, None] < N) & (k[None, :] < K + 8),",
            ),
        ),
        "a group at the end has as many rows": (
            "rows = min(tiles_m - first, GROUP)",
            "rows = GROUP",
        ),
        "the slope of gelu without that of u": (
            "return y, p + y * (1 - p) * du",
            "return y, p + y * (1 - p)",
        ),
        "an infinite slope of u": (
            "near = tl.minimum(tl.abs(z), 30)",
            "near = tl.abs(z) * 1e18",
        ),
        "no bias": (
            "z = z + bias.to(tl.float32)[None, :]",
            "z = z + 0 * bias.to(tl.float32)[None, :]",
        ),
        "no bias in parts": (
            "z += tl.load(bias_ptr + cols, mask=mask, other=0).to(tl.float32)",
            "z += 0.0",
        ),
        "both halves are the left one": (
            "            _finish(\n                right,",
            "            _finish(\n                left,",
        ),
        "the halves are mixed": (
            "halves = tl.reshape(total, (TILE_M, 2, TILE_N // 2))",
            "halves = tl.reshape(total, (TILE_M, TILE_N // 2, 2))\n"
            "            halves = tl.permute(halves, (0, 2, 1))",
        ),
        "a part begins where another does": (
            "k = (part * steps + step) * TILE_K",
            "k = (part + step) * TILE_K",
        ),
        "parts leave out what is left": (
            "steps = tl.cdiv(tl.cdiv(K, TILE_K), PARTS)",
            "steps = tl.cdiv(K, TILE_K) // PARTS",
        ),
        "the slope is not used": ("a = a * slope", "a = a * 1"),
        "relu passes everything": (
            "a = tl.where(slope <= 0, 0, a).to(a.dtype)",
            "a = tl.where(slope < 0, 0, a).to(a.dtype)",
        ),
        "relu of a part passes everything": (
            "        z = tl.where(z < 0, 0, z)\n"
            "    elif ACTIVATION is not None:\n"
            "        z, slope = _activate(z, ACTIVATION)\n"
            "        if save_ptr is not None:",
            "        z = tl.abs(z)\n"
            "    elif ACTIVATION is not None:\n"
            "        z, slope = _activate(z, ACTIVATION)\n"
            "        if save_ptr is not None:",
        ),
        "db of the first part alone": (
            "added = added.sum(0)",
            "added = added[0]",
        ),
        "the last tiles are left": (
            "tl.program_id(0), tiles * PARTS, tl.num_programs(0)",
            "tl.program_id(0), tiles * PARTS - 1, tl.num_programs(0)",
        ),
        "a layout by columns is read by rows": (
            "return TensorDescriptor.from_tensor(t.mT, tile), True",
            "return TensorDescriptor.from_tensor(t.mT, tile[::-1]), False",
        ),
        "memory that begins anywhere": (
            "        and t.data_ptr() % 16 == 0\n",
            "",
        ),
        "rows that begin anywhere": (
            "        and stride * t.itemsize % 16 == 0\n",
            "",
        ),
        "dy lies otherwise than its slope": (
            "dy = by_rows(dy)\n",
            "dy = readable(dy)\n",
        ),
        "db without the slope": (
            "            dz = dy * slope\n",
            "            dz = dy\n",
        ),
    },
    kills=(
        layer(70, 50, 100, activation="gelu"),
        layer(70, 40, 96, activation="relu"),
        layer(16, 300, 16, activation="silu"),
        layer(16, 300, 12, activation="relu"),
        layer(300, 16, 12, activation="gelu"),
        layer(200, 33, 20),
        layer(40, 40, 40, activation="gelu", dy="transposed"),
        layer(40, 40, 40, input="transposed", weight="transposed"),
        layer(40, 40, 40, input="unaligned", weight="columns"),
        layer(20, 20, 20, activation="gelu", wanted=(False, False, True)),
        lambda load: zeros_have_no_slope(load("small")),
        lambda load: large_numbers(load("small")),
        lambda load: rungs_agree(load("as it is")),
    ),
)


def zeros_have_no_slope(page):
    """Of relu at 0, as PyTorch has it."""
    x = torch.ones(16, 16, dtype=HALF, device=page.DEVICE).requires_grad_()
    w = torch.zeros(16, 16, dtype=HALF, device=page.DEVICE)
    page.linear(x, w + 0, activation="relu").sum().backward()
    assert not x.grad.any()
    w = w.requires_grad_()
    page.linear(x.detach(), w, activation="relu").sum().backward()
    assert not w.grad.any()


def large_numbers(page):
    """The slopes of large numbers are 0 or 1, and not NaN."""
    numbers = [-3e4, -60.0, 60.0, 3e4]
    x = torch.tensor(numbers, dtype=HALF, device=page.DEVICE)
    x = x.repeat(4, 4).requires_grad_()
    w = torch.eye(16, dtype=HALF, device=page.DEVICE)
    page.linear(x, w, activation="gelu").sum().backward()
    assert torch.equal(x.grad, (x > 0).to(HALF))


def rungs_agree(page):
    """Each rung of the ladder computes the same product, whatever the sizes:
    the first ones by address, the others by descriptors."""
    wide = torch.randn(200, 48, device=page.DEVICE).to(HALF)
    x = wide[:, :41].contiguous()
    w = torch.randn(300, 41, device=page.DEVICE).to(HALF)
    expected = x.double() @ w.double().T
    for rung in page.RUNGS:
        y = page.by_address(x, w, rung)
        assert (y - expected).norm() <= 1e-3 * expected.norm(), rung


def test_rungs(load):
    page = load("as it is")
    rungs_agree(page)
    x = torch.randn(80, 40, device=page.DEVICE).to(HALF)
    w = torch.randn(48, 40, device=page.DEVICE).to(HALF)
    expected = x.double() @ w.double().T
    for rung in page.NAMES:
        y = page.by_rung(rung)(x, w)
        assert (y - expected).norm() <= 1e-3 * expected.norm(), rung


def test_zeros_have_no_slope(load):
    zeros_have_no_slope(load("small"))


def test_large_numbers(load):
    large_numbers(load("small"))


def test_layouts_are_taken_as_they_lie(page):
    """By rows, by columns, and as columns of a wider matrix: no copy."""
    t = torch.randn(32, 64, device=page.DEVICE).to(HALF)
    for same in t, t.mT, t[:, 8:40], t[::2]:
        assert page.readable(same) is same
    for other in t[:, ::2], t[:, 1:33], t[:, :1].expand(32, 64):
        assert page.readable(other) is not other


def test_products_of_float32_follow_the_switch(load):
    """As PyTorch's: TF32 only if one asks for it."""
    page, matmul = load("as it is"), torch.backends.cuda.matmul
    before = matmul.allow_tf32
    try:
        for tf32 in False, True:
            matmul.allow_tf32 = tf32
            assert page.precision_of(SINGLE) == ("tf32" if tf32 else "ieee")
            assert page.precision_of(HALF) == "tf32"
    finally:
        matmul.allow_tf32 = before


def test_nothing_is_saved_that_nobody_needs(page):
    """Without gradients no slope is computed, and a relu saves none."""
    x, w = (torch.randn(24, 24, device=page.DEVICE).to(HALF) for _ in range(2))
    y, slope = page.forward(x, w, None, "gelu", save=False)
    assert slope is None
    y, slope = page.forward(x, w, None, "relu", save=True)
    assert slope is y


def test_nan_stays_nan(page):
    x = torch.full((4, 16), float("nan"), device=page.DEVICE, dtype=HALF)
    w = torch.randn(16, 16, device=page.DEVICE).to(HALF)
    for activation in None, "relu", "gelu", "silu":
        assert page.linear(x, w, activation=activation).isnan().all()


def test_dz_first_is_the_same(load):
    """A kernel that writes dz: the same gradients, whatever the sizes."""
    page = load("small")
    for activation, columns in (("gelu", 40), ("relu", 33), ("silu", 2100)):
        x = torch.randn(70, 24, device=page.DEVICE).to(HALF)
        w = torch.randn(columns, 24, device=page.DEVICE).to(HALF)
        dy = torch.randn(70, columns, device=page.DEVICE).to(HALF)
        _, slope = page.forward(x, w, None, activation, save=True)
        given = dy, x, w, slope, activation == "relu", 3 * (True,)
        for one, other in zip(
            page.backward(*given),
            page.backward(*given, dz_first=True),
            strict=True,
        ):
            assert torch.equal(one, other)
