"""What must hold of the page "Causal, grouped, any length"."""

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

import tutorial
from compiled.declared import Case, Kernel, Kernels
from conformance import AnyAttention, AttentionCase, Page
from measurements.figure import Measured, from_to
from tutorial import load

HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32


def both_passes(page, M, N, dtype, D=128, is_causal=True, group=1):
    def empty(heads):
        t = torch.empty(M, heads, N, D, dtype=dtype, device=page.DEVICE)
        return t.requires_grad_()

    q, k, v = empty(16), empty(16 // group), empty(16 // group)
    y = page.attention(q, k, v, is_causal, enable_gqa=True)
    torch.autograd.grad(y, (q, k, v), torch.empty_like(y))


def run(page, M, N, dtype):
    both_passes(page, M, N, dtype)


def not_causal(page, M, N, dtype):
    both_passes(page, M, N, dtype, is_causal=False)


def groups(page, M, N, dtype):
    for is_causal in False, True:
        both_passes(page, M, N, dtype, 128, is_causal, group=4)


def of_256(page, M, N, dtype):
    for is_causal in False, True:
        both_passes(page, M, N, dtype, 256, is_causal)


def of_64(page, M, N, dtype):
    for is_causal in False, True:
        for group in 1, 4:
            both_passes(page, M, N, dtype, 64, is_causal, group)


def of_32_or_fewer(page, M, N, dtype):
    for D in 32, 16:
        for is_causal in False, True:
            both_passes(page, M, N, dtype, D, is_causal)


def float32(page, M, N, dtype):
    for is_causal in False, True:
        both_passes(page, M, N, dtype, 64, is_causal)


def float32_of_128(page, M, N, dtype):
    for is_causal in False, True:
        both_passes(page, M, N, dtype, 128, is_causal)


def also(page, M, N, dtype):
    """Other forms on every GPU, and the solution of the exercise."""
    not_causal(page, M, 1000, dtype)
    both_passes(page, M, N, dtype, D=80, group=4)
    both_passes(page, M, N, torch.float32, D=64)
    t = torch.empty(1, 2, 150, 32, dtype=dtype, device=page.DEVICE)
    kernel = page._any_attention_fwd_lower_right
    page.forward(t, t, t, True, 1.0, kernel)


PUBLISHED = "2026-11-28"


def multiplies(code):
    """By Tensor Cores, with tiles from the TMA where there is one."""
    return [
        code.multiplies,
        code.fetches_tiles == (code.target in ("sm_90", "sm_100")),
        code.spills == 0,
    ]


KERNELS = Kernels(
    run=run,
    also=also,
    M=4,
    N=[4096],
    dtype="float16",
    kernels={
        "_any_attention_fwd": Kernel(
            look="""
            The body of the loop is there twice, without a mask and with one.
            Nothing is spilled, on any of these GPUs.
            """,
            true=multiplies,
            shared=227 * 1024,
            copies="any",
            narrow_stores=4,  # lse
        ),
        "_any_attention_bwd_queries": Kernel(
            look="Three products in a step, without a mask and with one.",
            true=multiplies,
            shared=227 * 1024,
            copies="any",
            narrow_loads=4,  # lse
            narrow_stores=4,  # delta
        ),
        "_any_attention_bwd_keys": Kernel(
            look="""
            Four products in a step, without a mask and with one. The sums of
            ``dk`` and ``dv`` take 128 registers of each thread on sm_90, so
            little is left for anything else.
            """,
            true=multiplies,
            shared=227 * 1024,
            copies="any",
            narrow_copies=12,  # lse and delta
        ),
    },
    cases={
        "causal": Case(
            run=run,
            sizes={"float16": [1000, 4096], "bfloat16": [1000, 4096]},
        ),
        "not causal": Case(
            run=not_causal,
            sizes={"float16": [1000, 4096], "bfloat16": [1000, 4096]},
        ),
        "groups": Case(run=groups, sizes={"float16": [1000, 4096]}),
        "D = 256": Case(run=of_256, sizes={"float16": [1000, 4096]}),
        "D = 64": Case(run=of_64, sizes={"float16": [1000, 4096]}),
        "D = 32 or 16": Case(
            run=of_32_or_fewer, sizes={"float16": [1000, 4096]}
        ),
        "float32": Case(run=float32, sizes={"float32": [1000, 4096]}),
        # The page says that the backward kernels spill here.
        "float32, D = 128": Case(
            run=float32_of_128,
            sizes={"float32": [1000, 4096]},
            kernels={
                "_any_attention_bwd_queries": {"spills": 800},
                "_any_attention_bwd_keys": {"spills": 800},
            },
        ),
    },
)

CARD = "H200"
CUDNN, FLASH, FLEX, CUBLAS = "sdpa-cudnn", "torch", "flex", "cublas"
USUAL, CAUSAL = "", "-causal"


def both_of(figure, mode, of_64=""):
    """The figure of a pass, and that of causal attention."""
    return [
        figure(f"any-attention-{mode}{which}{of_64}", CARD)
        for which in (USUAL, CAUSAL)
    ]


def times(several):
    """From the least to the most, or one number if both are the same."""
    least, most = several.least, several.most
    return least if str(least) == str(most) else from_to(several, "")


def gains_on_us(figure):
    """Whether cuDNN is further ahead at each further length."""
    shares = figure.shares("triton", CUDNN)
    return shares == sorted(shares, reverse=True)


def forward(figure):
    usual, causal = both_of(figure, "forward")
    yield (
        f"our kernel reaches {usual.median('triton', 16384)} TFLOP/s at 16384 "
        f"keys, and {causal.median('triton', 16384)} if attention is causal."
    )
    shares = [
        of.between(2048).shares("triton", CUDNN) for of in (usual, causal)
    ]
    yield (
        f"From 2048 keys on that is {from_to(shares[0], '%')} of cuDNN's "
        f"speed, and {from_to(shares[1], '%')} of it if causal."
    )
    ratios = [of.ratios("triton", FLASH) for of in (usual, causal)]
    assert min(each.least for each in ratios) > 1
    yield (
        f"It is {from_to(ratios[0], '')} times as fast as FlashAttention-2, "
        f"and {from_to(ratios[1], '')} times if causal."
    )
    theirs = [of.median(FLEX, 4096) for of in (usual, causal)]
    ratios = [of.ratio("triton", FLEX, 4096) for of in (usual, causal)]
    assert min(ratios) > 1
    yield (
        f"At 4096 keys FlexAttention reaches {theirs[0]} TFLOP/s, and "
        f"{theirs[1]} if causal, so there ours is {ratios[0]} and {ratios[1]} "
        "times as fast."
    )
    # "cuDNN is ahead at every length."
    for each in usual, causal:
        assert each.shares("triton", CUDNN).most < 100
    # "Why is causal attention slower for each operation?"
    for N in 1024, 2048, 4096, 8192, 16384:
        assert causal.median("triton", N) < usual.median("triton", N)


def backward(figure):
    usual, causal = both_of(figure, "backward")
    ours = [of.median("triton", 16384) for of in (usual, causal)]
    yield (
        f"our backward pass reaches {ours[0]} TFLOP/s at 16384 keys, and "
        f"{ours[1]} if causal."
    )
    shares = [
        of.between(2048).shares("triton", CUDNN) for of in (usual, causal)
    ]
    yield (
        f"From 2048 keys on that is {from_to(shares[0], '%')} of cuDNN's "
        f"speed, and {from_to(shares[1], '%')} of it if causal."
    )
    for each in usual, causal:
        assert each.shares("triton", CUDNN).most < 100
        assert gains_on_us(each)
    first = [of.share("triton", 1024, CUDNN) for of in (usual, causal)]
    yield (
        f"at 1024 keys we still have {first[0]}% of its speed, and "
        f"{first[1]}% if causal."
    )
    flash = [of.ratios("triton", FLASH) for of in (usual, causal)]
    flex = [of.ratio("triton", FLEX, 4096) for of in (usual, causal)]
    assert min(*(each.least for each in flash), *flex) > 1
    yield (
        f"Over all lengths ours is {times(flash[0])} times as fast as "
        f"FlashAttention-2, and {times(flash[1])} times if causal. "
        f"At 4096 keys it is {flex[0]} "
        f"times as fast as FlexAttention, and {flex[1]} times if causal."
    )
    all_seven = Measured(7 / 5 * ours[0], ".0f")
    ceiling = usual.median(CUBLAS, 16384)
    share = Measured(100 * all_seven / ceiling, ".0f")
    cudnn = usual.median(CUDNN, 16384)
    # "At the same rate, five would be faster than cuDNN."
    assert all_seven > cudnn > ours[0]
    yield (
        f"they do 7/5 of {ours[0]}, which is {all_seven} TFLOP/s, or {share}% "
        "of what the product of matrices beside them reaches. cuDNN does "
        f"{cudnn} TFLOP/s, or {usual.share(CUDNN, 16384, CUBLAS)}% of the "
        "product of matrices if it has five products."
    )


def of_64_numbers(figure):
    four = [
        *both_of(figure, "forward", "-64"),
        *both_of(figure, "backward", "-64"),
    ]
    shares = [from_to(of.shares("triton", CUDNN), "%") for of in four]
    yield (
        f"the forward pass is at {shares[0]} of cuDNN's speed, and at "
        f"{shares[1]} if causal."
    )
    yield (
        f"The backward pass is at {shares[2]}, and at {shares[3]} if causal."
    )
    # "From 4096 keys on it is level with cuDNN or ahead of it", and "it is
    # ahead of us forward up to 2048 keys".
    for of in four[:2]:
        assert of.between(4096).shares("triton", CUDNN).least > 99.5
        for N in 1024, 2048:
            assert of.share("triton", N, CUDNN) < 100
    # "Backward it is ahead there, too, except at 1024 keys if causal."
    assert four[2].shares("triton", CUDNN).most < 100
    assert four[3].share("triton", 1024, CUDNN) > 100
    assert four[3].between(2048).shares("triton", CUDNN).most < 100
    # "As with 128 numbers, cuDNN gains on us as sequences grow."
    assert all(gains_on_us(of) for of in four[2:])
    # "So it helps less to keep the Tensor Cores busy": forward.
    for half, whole in zip(four[:2], both_of(figure, "forward"), strict=True):
        for N in 1024, 2048, 4096, 8192, 16384:
            ours = half.share("triton", N, CUDNN)
            assert ours > whole.share("triton", N, CUDNN)
    flash = [of.ratios("triton", FLASH) for of in four]
    least, most = min(e.least for e in flash), max(e.most for e in flash)
    assert least > 1
    yield (f"ours is {least} to {most} times as fast as FlashAttention-2.")
    flex = [of.ratio("triton", FLEX, 4096) for of in four]
    assert min(flex) > 1
    yield (
        f"At 4096 keys it is {min(flex)} to {max(flex)} times as fast as "
        "FlexAttention."
    )


def memory(figure):
    of = figure("any-attention-memory", CARD)

    def gb(provider, N):
        number = of.median(provider, N)
        number.rounding = ".1f"
        return number

    ours = [of.median("triton", N) for N in (1024, 2048, 4096, 8192)]
    assert max(ours) - min(ours) < 0.005
    yield f"our function takes {ours[0]} GB at every length"
    yield (
        f"The formula takes {gb('formula', 1024)} GB at 1024 keys and "
        f"{gb('formula', 8192)} GB at 8192."
    )


def where_libraries_are_better(figure):
    shares = [
        of.share("triton", 4096, CUDNN)
        for mode in ("forward", "backward")
        for of in both_of(figure, mode)
    ]
    assert max(shares) < 100
    yield (
        f"At 4096 keys our speed is {shares[0]}% of cuDNN's forward and "
        f"{shares[1]}% if causal, {shares[2]}% backward and {shares[3]}% if "
        "causal."
    )


def ladder(figure):
    passes = [both_of(figure, mode)[1] for mode in ("forward", "backward")]

    def both(provider):
        forward, backward = (of.median(provider, 4096) for of in passes)
        return f"{forward} and {backward} TFLOP/s."

    yield f"- **FlashAttention-2** reaches {both(FLASH)}"
    yield f"is compiled for a rule that you write. It reaches {both(FLEX)}"
    yield f"and seven products backward. It reaches {both('triton')}"
    yield f"- **cuDNN** reaches {both(CUDNN)}"


def CLAIMS(figure):
    yield from forward(figure)
    yield from backward(figure)
    yield from of_64_numbers(figure)
    yield from memory(figure)
    yield from where_libraries_are_better(figure)
    yield from ladder(figure)


FACTS = {
    "have four times as many bytes": "32 heads of queries, 8 of keys",
    "1.6 times the work that counts": "128 / 80",
    "with 96 numbers 1.33 times": "128 / 96",
    "so 6% of the work is lost": "8 of 136 tiles of one head at 1024 keys",
    "At 16384 keys it is 0.4%": "128 of 32896 tiles",
    "up to 740 TFLOP/s forward": "the abstract of the paper",
}

# Tiles of 16 and 32, in all combinations that the page allows, so that small
# cases have several.
SMALL = (
    ("16: ((128, 64, 4, 3), (128, 64, 4, 3)),",
     "16: ((16, 32, 4, 3), (32, 16, 4, 3)),"),
    ("32: ((128, 64, 4, 3), (128, 64, 4, 3)),",
     "32: ((32, 16, 4, 3), (32, 32, 4, 3)),"),
    ("64: ((64, 128, 4, 2), (64, 128, 4, 2)),",
     "64: ((16, 32, 4, 2), (16, 16, 4, 2)),"),
    ("128: ((128, 64, 4, 2), (64, 64, 4, 3)),",
     "128: ((32, 32, 4, 2), (32, 16, 4, 2)),"),
    ("16: (64, 64, 4, 3),", "16: (16, 16, 4, 3),"),
    ("32: (64, 64, 4, 3),", "32: (32, 16, 4, 3),"),
    ("64: (64, 64, 4, 3),", "64: (16, 16, 4, 3),"),
    ("128: (64, 64, 4, 2),", "128: (32, 16, 4, 2),"),
)  # fmt: skip


def case(*sizes, **more):
    (lead, queries, keys, D), dtype = sizes, more.pop("dtype", HALF)
    return AttentionCase(lead, queries, keys, D, dtype, **more)


def wide(load):
    """The function is right, and so is where its results lie."""
    page = load()
    for D, dtype in (16, HALF), (5, HALF), (16, SINGLE):

        def filled(length, heads, D=D, dtype=dtype):
            t = torch.randn(2, length, heads, D, device=page.DEVICE)
            return t.to(dtype).transpose(1, 2).requires_grad_()

        q, k, v = filled(20, 4), filled(9, 2), filled(9, 2)
        y = page.attention(q, k, v, enable_gqa=True)
        grads = torch.autograd.grad(y, (q, k, v), torch.ones_like(y))
        for result, given in zip((y, *grads), (q, q, k, v), strict=True):
            rows = result.transpose(1, 2)
            assert rows.stride() == page.rows_like(rows).stride()
            assert result.shape == given.shape


def converts(load):
    """As PyTorch's function does under autocast."""
    page = load()
    kind = page.DEVICE.type
    given = [
        torch.randn(1, 2, 20, 16, device=page.DEVICE).requires_grad_()
        for _ in range(3)
    ]
    dy = torch.randn(1, 2, 20, 16, device=page.DEVICE)
    for dtype in HALF, BRAIN:
        results = []
        for function in page.attention, F.scaled_dot_product_attention:
            with torch.autocast(kind, dtype=dtype):
                y = function(*given, is_causal=True)
            assert y.dtype == dtype
            grads = torch.autograd.grad(y, given, dy.to(dtype))
            assert all(g.dtype == SINGLE for g in grads)
            results.append((y, *grads))
        for ours, theirs in zip(*results, strict=True):
            error = (ours.double() - theirs.double()).norm()
            assert error <= 4 * torch.finfo(dtype).eps * theirs.norm()
    with torch.autocast(kind, dtype=BRAIN):
        mixed = page.attention(given[0], given[1].half(), given[2])
    assert mixed.dtype == BRAIN


def far_below(load):
    """All scores are far below 0: a key that is not there has a score of 0,
    and an infinite power."""
    page = load()
    D = 16
    q = torch.full((1, 1, 20, D), 30.0, dtype=HALF, device=page.DEVICE)
    k = torch.full((1, 1, 40, D), -30.0, dtype=HALF, device=page.DEVICE)
    v, dy = (torch.randn_like(t) for t in (k, q))
    given = [t.requires_grad_() for t in (q, k, v)]
    for is_causal in False, True:
        y = page.attention(*given, is_causal=is_causal)
        seen = torch.ones(20, 40, device=page.DEVICE)
        if is_causal:
            seen = seen.tril()
        mean = seen / seen.sum(1, keepdim=True) @ v.detach().float()
        torch.testing.assert_close(y.float(), mean, atol=2e-3, rtol=0)
        for t in torch.autograd.grad(y, given, dy):
            assert t.isfinite().all()


def expanded(load):
    """Heads that are one in memory, and dimensions of one element."""
    page = load()
    q = torch.randn(3, 2, 20, 16, device=page.DEVICE).to(HALF)
    k = torch.randn(3, 1, 9, 16, device=page.DEVICE).to(HALF)
    for key in k.expand(3, 2, 9, 16), k[:1, :, :1].expand(3, 2, 1, 16):
        y = page.attention(q, key, key)
        exact = F.scaled_dot_product_attention(
            q.double(), key.double(), key.double()
        )
        torch.testing.assert_close(y.double(), exact, atol=4e-3, rtol=0)


PAGE = Page(
    __file__,
    AnyAttention(),
    {"attention": lambda page: page.attention},
    forms={"small": SMALL, "as it is": ()},
    cases=(
        case((1, 2), 64, 128, 32, large=900.0),
        case((1, 2), 70, 64, 32, large=900.0, causal=True),
        case((2, 2), 128, 256, 16, causal=True, group=2),
        case((1, 2), 129, 65, 64, causal=True),
        case((1, 1), 1, 300, 128, group=4),
        case((1, 1), 300, 1, 16, causal=True),
        case((1, 1), 40, 50, 256, causal=True, dtype=SINGLE),
    ),
    full=tuple(
        case(*size, dtype=dtype, causal=causal, group=group)
        for size, causal, group in (
            (((2, 4), 1024, 1024, 128), True, 1),
            (((1, 2), 1000, 2077, 128), False, 3),
            (((3, 1), 2048, 333, 64), True, 4),
            (((1, 2), 4097, 4095, 32), True, 1),
            (((2, 1), 511, 513, 80), True, 8),
            (((1, 2), 700, 900, 256), True, 2),
            (((1, 2), 700, 900, 256), False, 1),
            (((2, 2), 300, 700, 7), False, 1),
        )
        for dtype in (HALF, BRAIN, SINGLE)
    ),
    repeatable=("attention",),
    repeated=(
        case((1, 2), 1000, 1500, 128, causal=True, group=4),
        case((1, 4), 1000, 1500, 64),
        case((1, 2), 500, 300, 128, dtype=SINGLE, causal=True),
    ),
    compiled=("attention",),
    compiled_cases=(
        case((2, 2), 200, 300, 64, causal=True, group=2),
        case((2, 2), 37, 51, 65),
    ),
    graphs=(case((1, 2), 200, 300, 64, causal=True, group=2),),
    trains=("attention",),
    huge=(4096,),
    elsewhere="not the current GPU",
    sanitizers=("memcheck", "racecheck"),
    sanitized=(
        case((1, 2), 37, 51, 32, causal=True, group=2),
        case((1, 1), 150, 100, 128, causal=True),
        case((1, 1), 70, 101, 128),
        case((1, 1), 40, 33, 65),
        case((1, 1), 40, 50, 64, causal=True, dtype=SINGLE),
        case((1, 1), 70, 101, 256, causal=True),
    ),
    prints={
        "largest error, forward": 3,
        "errors below": 7,
        "by gradients": 2,
        "Timing needs a GPU": 8,
        "right: False": 1,
    },
    mutants={
        "forward: the mask is one key late": (
            "        score = tl.where(key[None, :] < limit, score, "
            'float("-inf"))\n    new =',
            "        score = tl.where(key[None, :] <= limit, score, "
            'float("-inf"))\n    new =',
        ),
        "forward: the diagonal is skipped": (
            "        end = tl.minimum(first + TILE_Q, keys)\n\n    q = q_desc",
            "        end = whole\n\n    q = q_desc",
        ),
        "forward: a tile too many without a mask": (
            "        whole = tl.minimum(first // TILE_K * TILE_K, whole)\n"
            "        end = tl.minimum(first + TILE_Q, keys)\n\n    q = q_desc",
            "        whole = tl.minimum((first + TILE_Q) // TILE_K * TILE_K,"
            " whole)\n"
            "        end = tl.minimum(first + TILE_Q, keys)\n\n    q = q_desc",
        ),
        "forward: the last tile has no mask": (
            "            limit, scale, DIM, TILE_K, True, PRECISION,\n"
            "        )  # fmt: skip\n\n    y = ",
            "            limit, scale, DIM, TILE_K, False, PRECISION,\n"
            "        )  # fmt: skip\n\n    y = ",
        ),
        "forward: groups are interleaved": (
            "k_head = head // GROUP\n\n    # How many",
            "k_head = head % (heads // GROUP)\n\n    # How many",
        ),
        "forward: tiles are counted wrong from the end": (
            "        tile = tiles - 1 - tile\n    first = tile * TILE_Q\n"
            "    query = first + tl.arange(0, TILE_Q)\n"
            "    lead = tl.program_id(0) // tiles\n    batch = lead // heads\n"
            "    head = lead % heads\n    k_head = head // GROUP\n\n",
            "        tile = tiles - tile\n    first = tile * TILE_Q\n"
            "    query = first + tl.arange(0, TILE_Q)\n"
            "    lead = tl.program_id(0) // tiles\n    batch = lead // heads\n"
            "    head = lead % heads\n    k_head = head // GROUP\n\n",
        ),
        "sums do not shrink": (
            "total = total * shrink + tl.sum(power, axis=1)",
            "total = total + tl.sum(power, axis=1)",
        ),
        "the weighted sum does not shrink": (
            "weighted = weighted * shrink[:, None]",
            "weighted = weighted * 1.0",
        ),
        "queries: the mask is one key late": (
            "        score = tl.where(key[None, :] < limit, score, "
            'float("-inf"))\n    p =',
            "        score = tl.where(key[None, :] <= limit, score, "
            'float("-inf"))\n    p =',
        ),
        "queries: the diagonal is skipped": (
            "        end = tl.minimum(first + TILE_Q, keys)\n\n    # delta",
            "        end = whole\n\n    # delta",
        ),
        "queries: the last tile has no mask": (
            "            scale * log2e, DIM, TILE_K, True, PRECISION,\n"
            "        )  # fmt: skip\n\n    dq = ",
            "            scale * log2e, DIM, TILE_K, False, PRECISION,\n"
            "        )  # fmt: skip\n\n    dq = ",
        ),
        "queries: groups are interleaved": (
            "k_head = head // GROUP\n    limit = keys",
            "k_head = head % (heads // GROUP)\n    limit = keys",
        ),
        "delta is dropped for queries": (
            "ds = (p * (dp - delta[:, None]))",
            "ds = (p * dp)",
        ),
        "dq without the scale": ("dq = (dq * scale)", "dq = (dq * 1)"),
        "keys: the mask begins one query late": (
            "seen = key[:, None] <= query[None, :]",
            "seen = key[:, None] < query[None, :]",
        ),
        "keys: nothing is masked": (
            "score = tl.where(seen, score, ",
            "score = tl.where(seen | True, score, ",
        ),
        "keys: the diagonal is skipped": (
            "first,\n                tl.minimum(whole, queries),",
            "whole,\n                tl.minimum(whole, queries),",
        ),
        "keys: the diagonal has no mask": (
            "        whole = first + TILE_K\n",
            "        whole = first\n",
        ),
        "keys: one head of a group": (
            "k_lead * GROUP, (k_lead + 1) * GROUP, disable_licm=True",
            "k_lead * GROUP, k_lead * GROUP + 1, disable_licm=True",
        ),
        "keys: heads of another group": (
            "        head = lead % heads\n        at =",
            "        head = (lead + 1) % heads\n        at =",
        ),
        "delta is dropped for keys": (
            "ds = (p * (dp - delta[None, :]))",
            "ds = (p * dp)",
        ),
        "dk without the scale": ("dk = (dk * scale)", "dk = (dk * 1)"),
        "rows that begin anywhere": (
            "padded = triton.cdiv(D, unit) * unit",
            "padded = D",
        ),
        "dimensions in another order": (
            "key=lambda dimension: -t.stride(dimension)",
            "key=lambda dimension: t.stride(dimension)",
        ),
        "places of another order": (
            "places = [order.index(dimension) for dimension in range(3)]",
            "places = order[::-1]",
        ),
        "a stride that is no multiple of 16 bytes": (
            "stride <= 0 or stride * t.itemsize % 16",
            "stride <= 0",
        ),
        "memory that begins anywhere": (
            "t.data_ptr() % 16 == 0 and t.stride(-1) == 1",
            "t.stride(-1) == 1",
        ),
        "dy as it lies": ("dy = for_descriptors(dy)", "dy = dy"),
        "nothing to attend to, forward": (
            "return y.zero_(), lse.zero_()",
            "return y, lse",
        ),
        "nothing to attend to, backward": (
            "return dq.zero_(), dk.zero_(), dv.zero_()",
            "return dq, dk, dv",
        ),
        "scale is not kept": (
            "        ctx.scale = scale\n        return y",
            "        ctx.scale = query.shape[-1] ** -0.5\n        return y",
        ),
        "causal forward alone": (
            "        ctx.is_causal = is_causal\n        ctx.scale",
            "        ctx.is_causal = False\n        ctx.scale",
        ),
        "autocast is not asked": (
            "    return [t.to(torch.get_autocast_dtype(kind)) for t in "
            "tensors]",
            "    return tensors",
        ),
        "too little room for log-sum-exps": (
            "rows = triton.cdiv(queries, tile_q) * tile_q",
            "rows = queries",
        ),
    },
    kills=(
        case((2, 2), 37, 51, 32),
        case((2, 2), 51, 37, 32, causal=True),
        case((1, 2), 37, 51, 16, causal=True, group=3),
        case((1, 2), 33, 40, 64, large=30.0, scale=0.3, causal=True),
        case((1, 1), 40, 20, 65, group=2),
        case((1, 2), 20, 40, 16, dy="transposed"),
        case((1, 2), 20, 40, 16, query="columns", key="unaligned"),
        case((1, 2), 20, 40, 16, value="unaligned"),
        case((1, 2), 5, 0, 16),
        case((1, 2), 0, 5, 16),
        far_below,
        wide,
        converts,
        expanded,
    ),
)


def test_scores_far_below_zero(load):
    far_below(lambda: load("as it is"))


def test_heads_may_be_split_without_a_copy(page):
    """What a projection gives, (batch, length, heads, D), is taken as it
    lies, and the result goes into the next one as it lies."""
    t = torch.randn(2, 20, 3 * 2 * 16, device=page.DEVICE, dtype=HALF)
    q, k, v = (
        part.transpose(1, 2) for part in t.view(2, 20, 3, 2, 16).unbind(2)
    )
    for part in q, k, v:
        assert page.for_descriptors(part) is part
    y = page.attention(q, k, v).transpose(1, 2)
    assert y.flatten(2).data_ptr() == y.data_ptr()


def test_what_is_copied_has_rows_of_16_bytes(page):
    for D, dtype in (65, HALF), (1, HALF), (3, SINGLE), (80, HALF):
        t = torch.randn(2, 3, 4, D, device=page.DEVICE).to(dtype)
        copy = page.for_descriptors(t)
        assert torch.equal(copy, t)
        assert (copy is t) == (D == 80)
        assert all(s * t.itemsize % 16 == 0 for s in copy.stride()[:-1])


@pytest.mark.parametrize("form", PAGE.forms)
def test_no_kernel_loads_what_nobody_has_stored(load, form):
    """Of log-sum-exps: a step divides what a program owns, and that divides
    the tile of queries of the forward kernel."""
    page = load(form)
    for dtype in HALF, BRAIN, SINGLE:
        for D in (1, 16, 17, 32, 64, 65, 80, 128, 129, 256):
            for_queries, for_keys = page.plan_backward(dtype, D)
            own = for_queries["TILE_Q"]
            assert own == for_keys["TILE_K"]
            assert own % for_keys["TILE_Q"] == 0
            for is_causal in False, True:
                plan = page.plan_forward(dtype, D, is_causal)
                assert plan["TILE_Q"] % own == 0
                assert plan["DIM"] >= max(D, 16)


def test_limits_are_those_of_pytorch(page):
    """Each pair of few queries and keys, with all weights."""
    for queries in range(1, 7):
        for keys in range(1, 7):
            q = torch.zeros(1, 1, queries, 8, dtype=HALF, device=page.DEVICE)
            k = torch.zeros(1, 1, keys, 8, dtype=HALF, device=page.DEVICE)
            v = torch.eye(keys, 8, dtype=HALF, device=page.DEVICE)[None, None]
            ours = page.attention(q, k, v, is_causal=True)
            theirs = F.scaled_dot_product_attention(
                q.double(), k.double(), v.double(), is_causal=True
            )
            torch.testing.assert_close(
                ours.double(), theirs, atol=1e-3, rtol=0
            )


def test_arguments_are_those_of_pytorch(page):
    """By place, and None where PyTorch takes None."""
    q, k, v = torch.randn(3, 1, 2, 9, 16, device=page.DEVICE).unbind()
    expected = page.attention(q, k, v, is_causal=True, scale=0.5)
    assert torch.equal(page.attention(q, k, v, True, 0.5, True), expected)
    plain = page.attention(q, k, v, False, None, False)
    assert torch.equal(plain, page.attention(query=q, key=k, value=v))


@pytest.mark.cpu
@pytest.mark.parametrize(
    "given",
    [
        case((1, 2), 20, 33, 16, causal=True, group=2),
        case((1, 2), 20, 33, 5, query="transposed", dy="columns"),
        case((1, 2), 9, 7, 16, dtype=BRAIN, scale=0.3),
    ],
    ids=["groups", "strides", "bfloat16"],
)
def test_torch_compile_sees_shapes(request, given):
    """Of the operators the compiler sees shapes only; results are ours."""
    # Loaded last, as operators belong to who registers them last.
    page = load(request.module.PAGE.name, SMALL)
    torch._dynamo.reset()
    function = torch.compile(
        page.attention, fullgraph=True, backend="aot_eager"
    )
    tensors = PAGE.operation.tensors(given, page.DEVICE)
    found = PAGE.operation.results(function, given, tensors)
    PAGE.operation.judge(given, tensors, found)


@pytest.mark.cpu
def test_autocast_is_compiled(request):
    page = load(request.module.PAGE.name, SMALL)
    torch._dynamo.reset()

    def converted(q):
        with torch.autocast("cpu", dtype=HALF):
            return page.attention(q, q, q)

    q = torch.randn(1, 2, 20, 16)
    function = torch.compile(converted, fullgraph=True, backend="aot_eager")
    assert torch.equal(function(q), converted(q))


@pytest.mark.cpu
def test_operators_are_what_they_promise(request):
    """Shapes and strides of their fake versions, gradients, and no input that
    is written."""
    page = load(request.module.PAGE.name, SMALL)
    for D, order in (16, (0, 1, 2, 3)), (5, (0, 2, 1, 3)):
        sizes = [(2, 2, 20, D)[place] for place in order]
        q, k, v = (
            torch.randn(sizes).permute(order).requires_grad_()
            for _ in range(3)
        )
        torch.library.opcheck(
            page.operator_forward,
            (q, k, v, True, 0.3),
            test_utils=("test_schema", "test_faketensor"),
        )
        with torch.no_grad():
            y, lse = page.operator_forward(q, k, v, True, 0.3)
            torch.library.opcheck(
                page.operator_backward,
                (torch.ones_like(y), q, k, v, y, lse, True, 0.3),
                test_utils=("test_schema", "test_faketensor"),
            )


@pytest.mark.cpu  # what compiles for a GPU that is not there
def test_a_new_length_compiles_nothing(launches):
    from compiled import limits

    texts = {}
    for built in launches(
        [limits.call(PAGE.name, KERNELS, N, "sm_90") for N in (1, 1007, 4096)]
    ):
        for one in built:
            texts.setdefault(one.kernel, set()).add(one.asm["ptx"])
    assert len(texts) == 3
    assert all(len(each) == 1 for each in texts.values())


def test_transforms_of_torch_func_are_refused(page):
    q = torch.randn(1, 1, 4, 16, device=page.DEVICE)

    def total(q):
        return page.attention(q, q, q).sum()

    with pytest.raises(RuntimeError):
        torch.func.grad(total)(q)


def test_inputs_that_change_before_the_backward_pass(page):
    """They are kept for it: overwriting one must be an error."""
    q, k, v = torch.randn(3, 1, 1, 4, 16, device=page.DEVICE).unbind()
    y = page.attention(q.requires_grad_(), k, v)
    k += 1
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        y.sum().backward()


def test_exercise(output):
    lines = [
        line for line in output.splitlines() if "keys: largest error" in line
    ]
    errors = [float(line.rpartition(" ")[2]) for line in lines]
    assert len(errors) == 6
    assert max(errors[:2]) > 0.1  # the stub
    assert max(errors[2:]) < 4e-3


# A module to import ----------------------------------------------------------

IN_A_PROCESS_OF_ITS_OWN = """
import os, sys

before = dict(os.environ)
import any_attention

assert dict(os.environ) == before
assert not {"matplotlib", "pandas"} & {*sys.modules}
import torch

if torch.cuda.is_available():
    assert not torch.cuda.is_initialized()
    assert torch.cuda.current_stream() == torch.cuda.default_stream()

sys.path[:0] = sys.argv[1:]
from conformance import AnyAttention, AttentionCase

device = "cuda" if torch.cuda.is_available() else "cpu"
for case in (
    AttentionCase(causal=True, group=2),
    AttentionCase(D=65, dtype=torch.float32),
):
    AnyAttention().run(any_attention.attention, case, device)
    print("is right")
"""


@pytest.mark.cpu  # what writes it needs Sphinx
def test_the_module_is_right_by_itself(request, tmp_path):
    """Imported where nothing of the page has run."""
    from page import downloads, module

    name = request.module.PAGE.name
    file = tmp_path / downloads.MODULES[name]
    file.write_text(module.text(name), encoding="utf-8")
    code = IN_A_PROCESS_OF_ITS_OWN.replace("any_attention", file.stem)
    switch = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    paths = [str(tutorial.FILES.parent), str(tutorial.ROOT / "docs/_ext")]
    done = subprocess.run(
        [sys.executable, "-c", code, *paths],
        cwd=tmp_path,
        env=os.environ | switch,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("is right") == 2


@pytest.mark.cpu  # what writes it needs Sphinx
def test_the_module_has_the_cells_of_the_page(request):
    """To the byte, and nothing that a script does beside them."""
    import cells
    from page import module

    name = request.module.PAGE.name
    text = module.text(name)
    for word in ("set_stream", "environ", "plt.", "print(", "perf_report"):
        assert word not in text, word
    page = tutorial.source(name)
    ours, theirs = (cells.functions(each) for each in (text, page))
    assert len(ours) > 20
    assert ours.items() <= theirs.items()
