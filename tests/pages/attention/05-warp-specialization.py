"""What must hold of the page "Attention with warps that only load"."""

import itertools
import os
import re
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

import tutorial
from compiled.declared import Case, Kernels, of_page
from conformance import AnyAttention, AttentionCase, Page
from measurements.figure import Measured, from_to
from tutorial import load

HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32


def both_passes(page, M, N, dtype, D=64, is_causal=True, group=1):
    def empty(heads):
        t = torch.empty(M, heads, N, D, dtype=dtype, device=page.DEVICE)
        return t.requires_grad_()

    q, k, v = empty(16), empty(16 // group), empty(16 // group)
    y = page.attention(q, k, v, is_causal, enable_gqa=True)
    torch.autograd.grad(y, (q, k, v), torch.empty_like(y))


def run(page, M, N, dtype):
    both_passes(page, M, N, dtype)


def plain(page, M, N, dtype):
    """All that is launched in plain Triton, on every GPU."""
    for D in (256, 64, 32, 16):
        for is_causal in False, True:
            both_passes(page, M, N, dtype, D, is_causal)
    both_passes(page, M, N, dtype, group=4)


def float32(page, M, N, dtype):
    for is_causal in False, True:
        both_passes(page, M, N, dtype, 64, is_causal)


def hopper(page, M, N, dtype):
    """All that is launched in Gluon, on a Hopper GPU."""
    for D in (128, 80):
        for is_causal in False, True:
            for group in 1, 4:
                both_passes(page, M, N, dtype, D, is_causal, group)
    t = torch.empty(1, 2, N, 128, dtype=dtype, device=page.DEVICE)
    for how in {"LATER": False}, {"TURNS": True}:
        for is_causal in False, True:
            page.forward(t, t, t, is_causal, 1.0, **how)


def also(page, M, N, dtype):
    """Other forms on every GPU: heads of 128 numbers, where this is Hopper
    by the kernels in Gluon."""
    both_passes(page, M, 1000, dtype, 64, is_causal=False)
    both_passes(page, M, N, dtype, 128)
    both_passes(page, M, N, dtype, D=80, group=4)
    both_passes(page, M, N, torch.float32, D=64)


PUBLISHED = "2026-11-29"


KERNELS = Kernels(
    run=run,
    also=also,
    M=4,
    N=[4096],
    dtype="float16",
    # Those in Gluon compile for Hopper GPUs alone: they are tested below.
    kernels={
        **of_page("attention/03-any-attention", "_any_attention_fwd"),
        **of_page(
            "attention/03-any-attention",
            "_any_attention_bwd_queries",
            look="""
            Of three products in a step, two stand together before the powers.
            """,
        ),
        **of_page(
            "attention/03-any-attention",
            "_any_attention_bwd_keys",
            look="""
            Four products in a step. On sm_90 look for ``wgmma.wait_group`` in
            the PTX: it follows the first product and the second, and then the
            last two are begun without a wait between them.
            """,
        ),
    },
    cases={
        "plain": Case(
            run=plain,
            sizes={"float16": [1000, 4096], "bfloat16": [1000, 4096]},
        ),
        "float32": Case(run=float32, sizes={"float32": [1000, 4096]}),
    },
)

CARD = "H200"
CUDNN, FLASH, CUBLAS = "sdpa-cudnn", "torch", "cublas"


ANY = "attention/03-any-attention"
LENGTHS = 1024, 2048, 4096, 8192, 16384


def both_of(figure, mode, of_64=""):
    """The figure of a pass, and that of causal attention."""
    return [
        figure(f"warps-{mode}{which}{of_64}", CARD)
        for which in ("", "-causal")
    ]


def of_page_03(figure, mode, of_64=""):
    return [
        figure(f"any-attention-{mode}{which}{of_64}", CARD, page=ANY)
        for which in ("", "-causal")
    ]


def of_cudnn(figures, first=1024, who="triton"):
    """From the least share to the most, of each figure."""
    return [
        from_to(of.between(first).shares(who, CUDNN), "%") for of in figures
    ]


def forward(figure):
    usual, causal = both = both_of(figure, "forward")
    short = figure("warps-forward-causal-bfloat16", CARD)
    yield (
        f"our kernel reaches {usual.median('triton', 16384)} TFLOP/s at 16384 "
        f"keys, and {causal.median('triton', 16384)} if attention is causal."
    )
    shares = of_cudnn(both, 2048)
    yield (
        f"From 2048 keys on that is {shares[0]} of cuDNN's speed, and "
        f"{shares[1]} of it if causal. At 1024 keys it is "
        f"{usual.share('triton', 1024, CUDNN)}%, and "
        f"{causal.share('triton', 1024, CUDNN)}% if causal. In bfloat16, "
        f"causal, we reach {of_cudnn([short], 2048)[0]} of cuDNN's speed from "
        "2048 keys on."
    )
    plain = of_cudnn(both, who="plain")
    yield (
        f"The plain kernel is at {plain[0]} of cuDNN's speed over all "
        f"lengths, and at {plain[1]} if causal. At 4096 keys it does "
        f"{usual.median('plain', 4096)} TFLOP/s. With a warp that loads and "
        "two groups that multiply, but wait at once, these are "
        f"{usual.median('waits', 4096)}. Waiting later makes that "
        f"{usual.median('triton', 4096)}. If the groups take turns besides, "
        f"they do {usual.median('turns', 4096)}."
    )
    # "To split the work of the warps brings the most. Waiting later helps",
    # and "Taking turns does not help", at every length.
    for of in both:
        for N in LENGTHS:
            later = of.median("triton", N)
            waits = of.median("waits", N)
            assert later > waits
            assert later > of.median("turns", N)
            if (of, N) != (causal, 1024):
                assert waits > of.median("plain", N)
        at_4096 = [of.median(who, 4096) for who in ("plain", "waits")]
        assert at_4096[1] / at_4096[0] > of.ratio("triton", "waits", 4096)
    # "There we are as fast as the plain kernel."
    assert 0.99 < causal.ratio("triton", "plain", 1024) < 1.03
    yield (
        "Compared with the product of matrices it reaches "
        f"{usual.share('triton', 16384, CUBLAS)}% at 16384 keys."
    )
    # "With long sequences our kernel is faster", and where cuDNN is ahead:
    # up to 2048 keys, and up to 4096 if causal.
    for of, last in (usual, 2048), (causal, 4096):
        for N in LENGTHS:
            ahead = of.median(CUDNN, N) > of.median("triton", N)
            assert ahead == (last >= N)


def backward(figure):
    usual, causal = both = both_of(figure, "backward")
    short = figure("warps-backward-causal-bfloat16", CARD)
    ours = usual.median("triton", 16384)
    yield (
        f"our backward pass reaches {ours} TFLOP/s at 16384 keys, and "
        f"{causal.median('triton', 16384)} if causal."
    )
    shares = of_cudnn(both, 2048)
    flash = [from_to(of.ratios("triton", FLASH), "") for of in both]
    yield (
        f"From 2048 keys on that is {shares[0]} of cuDNN's speed, and "
        f"{shares[1]} of it if causal. At 1024 keys it is "
        f"{usual.share('triton', 1024, CUDNN)}%, and "
        f"{causal.share('triton', 1024, CUDNN)}% if causal. In bfloat16, "
        f"causal, it is {of_cudnn([short])[0]} over all lengths. Ours is "
        f"{flash[0]} times as fast as FlashAttention-2, and {flash[1]} times "
        "if causal."
    )
    plain = of_cudnn(both, 2048, "plain")
    before = of_cudnn(of_page_03(figure, "backward"), 2048)
    yield (
        f"Plain kernels alone are at {plain[0]} of cuDNN's speed from 2048 "
        f"keys on, and at {plain[1]} if causal."
    )
    yield f"with the old order, these are {before[0]}, and {before[1]}."
    for of in both:
        for N in LENGTHS:
            assert of.median("triton", N) > of.median("plain", N)
    seven = Measured(7 / 5 * ours, ".0f")
    ceiling = usual.median(CUBLAS, 16384)
    cudnn = usual.median(CUDNN, 16384)
    share = Measured(100 * seven / ceiling, ".0f")
    yield (
        f"With seven products our kernels do 7/5 of {ours}, which is {seven} "
        f"TFLOP/s at 16384 keys. That is {share}% of what the product of "
        f"matrices reaches beside them. If cuDNN has five, its {cudnn} "
        f"TFLOP/s are {usual.share(CUDNN, 16384, CUBLAS)}% of it."
    )
    best = Measured(500 / 7 * ceiling / cudnn, ".0f")
    yield (
        "At the speed of the product of matrices, seven products would have "
        f"{best}% of cuDNN's speed."
    )
    # Where cuDNN is ahead: at every length but 1024 keys if causal.
    for of in both:
        for N in LENGTHS:
            ahead = of.median(CUDNN, N) > of.median("triton", N)
            assert ahead == ((of, N) != (causal, 1024))


def of_64_numbers(figure):
    both = both_of(figure, "backward", "-64")
    now = of_cudnn(both)
    before = of_cudnn(of_page_03(figure, "backward", "-64"))
    flash = [from_to(of.ratios("triton", FLASH), "") for of in both]
    yield (
        f"the backward pass is at {now[0]} of cuDNN's speed, and at {now[1]} "
        "if causal."
    )
    yield f"it is at {before[0]}, and {before[1]}."
    yield (
        "another run, with the same rival. Ours is "
        f"{flash[0]} times as fast as FlashAttention-2, and {flash[1]} times "
        "if causal."
    )
    # "Forward cuDNN is ahead up to 2048 keys", with 64 numbers.
    for of in of_page_03(figure, "forward", "-64"):
        for N in 1024, 2048:
            assert of.share("triton", N, CUDNN) < 100


def designs(figure):
    passes = [both_of(figure, mode)[1] for mode in ("forward", "backward")]
    forward, backward = passes

    def speed(of, who):
        return of.median(who, 4096)

    yield (
        f"- **Plain Triton** reaches {speed(forward, 'plain')} TFLOP/s "
        "forward. Backward, with its products in a better order, it reaches "
        f"{speed(backward, 'plain')}."
    )
    yield (
        f"reach {speed(forward, 'waits')} forward if they wait for each "
        "product at once."
    )
    yield (
        f"- **Waiting later** makes that {speed(forward, 'triton')}, and "
        f"{speed(backward, 'triton')} backward"
    )
    yield (
        f"- **Taking turns** makes {speed(forward, 'turns')} forward, less "
        "than without."
    )
    yield (
        f"- **cuDNN** reaches {speed(forward, CUDNN)} and "
        f"{speed(backward, CUDNN)}."
    )


def CLAIMS(figure):
    yield from forward(figure)
    yield from backward(figure)
    yield from of_64_numbers(figure)
    yield from designs(figure)


FACTS = {
    "so 12.5% of the work is added": "4 of 32 tiles of one head",
    "with its 64 × 64 has 6%": "8 of 128 tiles, at 1024 keys",
    "up to 740 TFLOP/s forward": "the abstract of the paper",
    "32 KB for their queries": "128 rows of 128 numbers of 2 bytes",
    "need 128 KB": "twice keys and values, 128 rows each",
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
            (((1, 2), 700, 900, 128), False, 2),
            (((2, 2), 77, 1000, 128), True, 1),
            (((2, 2), 1000, 77, 128), True, 1),
            (((1, 3), 129, 129, 96), False, 1),
            (((2, 1), 1, 4096, 128), False, 4),
        )
        for dtype in (HALF, BRAIN, SINGLE)
    ),
    repeatable=("attention",),
    repeated=(
        case((1, 2), 1000, 1500, 128, causal=True, group=4),
        case((1, 4), 1000, 1500, 64),
        case((1, 4), 1000, 1500, 128),
        case((1, 2), 500, 300, 128, dtype=SINGLE, causal=True),
    ),
    compiled=("attention",),
    compiled_cases=(
        case((2, 2), 200, 300, 128, causal=True, group=2),
        case((2, 2), 200, 300, 64, causal=True, group=2),
        case((2, 2), 37, 51, 65),
    ),
    graphs=(
        case((1, 2), 200, 300, 64, causal=True, group=2),
        case((1, 2), 200, 300, 128, causal=True, group=2),
    ),
    trains=("attention",),
    huge=(4096,),
    elsewhere="not the current GPU",
    sanitizers=("memcheck",),
    sanitized=(
        case((1, 2), 37, 51, 32, causal=True, group=2),
        case((1, 1), 150, 100, 128, causal=True),
        case((1, 1), 70, 101, 128),
        case((1, 2), 300, 333, 80, causal=True, group=2),
        case((1, 1), 40, 33, 65),
        case((1, 1), 40, 50, 64, causal=True, dtype=SINGLE),
        case((1, 1), 70, 101, 256, causal=True),
    ),
    prints={
        "largest error, forward": 3,
        "errors below": 7,
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
def test_torch_compile_sees_shapes(given):
    """Of the operators the compiler sees shapes only; results are ours."""
    # Loaded last, as operators belong to who registers them last.
    page = load(PAGE.name, SMALL)
    torch._dynamo.reset()
    function = torch.compile(
        page.attention, fullgraph=True, backend="aot_eager"
    )
    tensors = PAGE.operation.tensors(given, page.DEVICE)
    found = PAGE.operation.results(function, given, tensors)
    PAGE.operation.judge(given, tensors, found)


@pytest.mark.cpu
def test_autocast_is_compiled():
    page = load(PAGE.name, SMALL)
    torch._dynamo.reset()

    def converted(q):
        with torch.autocast("cpu", dtype=HALF):
            return page.attention(q, q, q)

    q = torch.randn(1, 2, 20, 16)
    function = torch.compile(converted, fullgraph=True, backend="aot_eager")
    assert torch.equal(function(q), converted(q))


@pytest.mark.cpu
def test_operators_are_what_they_promise():
    """Shapes and strides of their fake versions, gradients, and no input that
    is written."""
    page = load(PAGE.name, SMALL)
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


def compiled(launches, N, run, dtype="float16"):
    """What is launched on a Hopper GPU."""
    from compiled import limits

    (builds,) = launches(
        [limits.call(PAGE.name, KERNELS, N, "sm_90", dtype, run)]
    )
    return builds


@pytest.mark.cpu  # what compiles for a GPU that is not there
def test_a_new_length_compiles_nothing(launches):
    texts = {}
    for N in 1, 1007, 4096:
        for one in compiled(launches, N, hopper)[:3]:
            texts.setdefault(one.kernel, []).append(one.asm["ptx"])
    assert texts.keys() == {
        *("_warps_fwd", "_warps_bwd_queries", "_any_attention_bwd_keys")
    }
    # 4096 is a multiple of the tiles, which is compiled for.
    for found in texts.values():
        assert len({*found}) <= 2 and found[0] == found[1]


def waits(built):
    """In their order, each by how many products it leaves under way."""
    return re.findall(r"wait_group.sync.aligned (\d)", built.asm["ptx"])


@pytest.mark.cpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_kernels_in_gluon(launches, dtype):
    """They spill nothing, fit into an SM, fetch tiles by the TMA, have warps
    with registers of their own, and leave a product under way where they are
    not told to wait at once."""
    found = {}
    for N in 1000, 4096:
        for built in compiled(launches, N, hopper, dtype):
            if not built.kernel.startswith("_warps"):
                continue
            assert built.spills == 0
            assert built.shared <= 227 * 1024
            assert "cp.async.bulk.tensor" in built.asm["ptx"]
            assert built.asm["ptx"].count("setmaxnreg") >= 3
            found.setdefault(built.kernel, []).append({*waits(built)})
    assert found["_warps_bwd_queries"] == 16 * [{"0", "1"}]
    # LATER is False in two of twelve.
    later = [each == {"0", "1"} for each in found["_warps_fwd"]]
    assert len(later) == 24 and sum(later) == 20


@pytest.mark.cpu
def test_where_plain_kernels_wait(launches):
    """As the page says: for all products that are under way. And the last two
    products of the step of the keys are begun without a wait between them."""
    runs = {}
    for built in compiled(launches, 4096, run):
        assert {*waits(built)} == {"0"}, built.kernel
        steps = re.findall(r"wgmma.(mma_async|wait_group)", built.asm["ptx"])
        runs[built.kernel] = [
            len([*run])
            for what, run in itertools.groupby(steps)
            if what == "mma_async"
        ]
    # Two loops, one of them with a mask. A product is four instructions.
    assert runs["_any_attention_bwd_queries"][:3] == [4, 4, 4]
    assert runs["_any_attention_bwd_keys"][:3] == [4, 4, 8]


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


def test_barriers_are_tried_in_many_orders(page):
    """A warp that waits for a phase which never comes is noticed, and so is
    one that gives a tile back too early or too late."""
    assert not page.exercise_1(page.group_of_dq)
    assert page.exercise_1(page.group_of_dq_later)

    def never(tiles, k_ring, full, free, used):
        for i in range(tiles):
            yield full[2 * (i % 2)], i // 2 % 2
            used.append(i)

    assert not page.exercise_1(never)


@pytest.mark.cpu
def test_a_wait_for_the_wrong_phase_never_ends(page):
    full, free = page.Barrier(1), page.Barrier(2)

    def warp(parity):
        yield free, parity
        full.arrive()

    assert page.run_warps([warp(1)], seed=0)
    assert not page.run_warps([warp(0)], seed=0)


# A module to import ----------------------------------------------------------

IN_A_PROCESS_OF_ITS_OWN = """
import os, sys

before = dict(os.environ)
import fast_attention

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
    AnyAttention().run(fast_attention.attention, case, device)
    print("is right")
"""


def module_text():
    from page import module

    return module.text(PAGE.name)


@pytest.mark.cpu  # what writes it needs Sphinx
def test_the_module_is_right_by_itself(tmp_path):
    """Imported where nothing of the page has run."""
    file = tmp_path / "fast_attention.py"
    file.write_text(module_text(), encoding="utf-8")
    switch = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    paths = [str(tutorial.FILES.parent), str(tutorial.ROOT / "docs/_ext")]
    done = subprocess.run(
        [sys.executable, "-c", IN_A_PROCESS_OF_ITS_OWN, *paths],
        cwd=tmp_path,
        env=os.environ | switch,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("is right") == 2


@pytest.mark.cpu  # what writes it needs Sphinx
def test_the_module_has_the_cells_of_the_page():
    """To the byte, and nothing that a script does beside them."""
    import cells

    text = module_text()
    for word in ("set_stream", "environ", "plt.", "print(", "perf_report"):
        assert word not in text, word
    page = tutorial.source(PAGE.name)
    ours, theirs = (cells.functions(each) for each in (text, page))
    assert len(ours) > 20
    assert ours.items() <= theirs.items()
