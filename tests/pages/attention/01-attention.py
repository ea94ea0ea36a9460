"""What must hold of the page "Attention without its matrix"."""

import torch
import torch.nn.functional as F

from compiled.declared import Case, Kernel, Kernels
from conformance import Attention, AttentionCase, Page

HALF, BRAIN = torch.float16, torch.bfloat16


def run(page, M, N, dtype, D=128):
    def empty():
        t = torch.empty(M, 16, N, D, dtype=dtype, device=page.DEVICE)
        return t.requires_grad_()

    q, k, v = empty(), empty(), empty()
    y = page.attention(q, k, v)
    torch.autograd.grad(y, (q, k, v), torch.empty_like(y))


def of_64(page, M, N, dtype):
    run(page, M, N, dtype, 64)


def of_32(page, M, N, dtype):
    run(page, M, N, dtype, 32)


def of_16(page, M, N, dtype):
    run(page, M, N, dtype, 16)


def also(page, M, N, dtype):
    """The solution of the exercise."""
    t = torch.empty(1, 2, 150, 32, dtype=dtype, device=page.DEVICE)
    plan = page.plan_forward(32)
    page._attention_fwd_causal[(4,)](
        q_desc=page.tiles_of(t, plan["TILE_Q"]),
        k_desc=page.tiles_of(t, plan["TILE_K"]),
        v_desc=page.tiles_of(t, plan["TILE_K"]),
        y_desc=page.tiles_of(t, plan["TILE_Q"]),
        lse_ptr=torch.empty(1, 2, 150, device=page.DEVICE),
        heads=2,
        queries=150,
        keys=150,
        scale=1.0,
        D=32,
        WHOLE=False,
        **plan,
    )


PUBLISHED = "2026-11-25"


def multiplies(code):
    """By Tensor Cores, with tiles from the TMA where there is one."""
    return [
        code.multiplies,
        code.fetches_tiles == (code.target in ("sm_90", "sm_100")),
        code.spills == 0 or code.target == "sm_80",
    ]


KERNELS = Kernels(
    run=run,
    also=also,
    M=4,
    N=[4096],
    dtype="float16",
    sizes={"float16": [512, 1000, 4096], "bfloat16": [4096]},
    kernels={
        "_attention_fwd": Kernel(
            look="""
            On sm_90 one instruction, ``wgmma``, multiplies for 4 warps, and
            ``cp.async.bulk.tensor`` fetches a tile.
            Nothing is spilled.
            """,
            true=multiplies,
            shared=227 * 1024,
            copies="any",
            narrow_stores=4,
            spills=16,  # 32 on sm_80 alone: see multiplies
        ),
        "_attention_bwd_delta": Kernel(
            look="Two rows in, one number out: no product, no Tensor Core.",
            true=lambda code: [not code.multiplies],
            narrow_stores=4,
        ),
        "_attention_bwd_keys": Kernel(
            look="""
            Four products in a step. The sums of ``dk`` and ``dv`` take 128
            registers of each thread at a head dimension of 128.
            """,
            true=multiplies,
            shared=227 * 1024,
            copies="any",
            narrow_copies=6,  # lse and delta
        ),
        "_attention_bwd_queries": Kernel(
            look="Three products in a step, and one sum: ``dq``.",
            true=multiplies,
            shared=227 * 1024,
            copies="any",
            narrow_loads=4,  # lse and delta
        ),
    },
    cases={
        "D = 64": Case(run=of_64, sizes={"float16": [1000, 4096]}),
        "D = 32": Case(run=of_32, sizes={"float16": [1000, 4096]}),
        "D = 16": Case(run=of_16, sizes={"float16": [1000, 4096]}),
    },
)

# Tiles of 16, so that small cases have several.
SMALL = (
    ("16: (128, 64, 4, 3),", "16: (16, 32, 4, 3),"),
    ("32: (128, 64, 4, 3),", "32: (32, 16, 4, 3),"),
    ("64: (64, 128, 4, 2),", "64: (16, 32, 4, 3),"),
    ("128: (128, 64, 4, 2),", "128: (16, 32, 4, 2),"),
    ('"TILE_Q": 64,\n        "TILE_K": 64,', '"TILE_Q": 16, "TILE_K": 32,'),
)


def half(*sizes, **more):
    (lead, queries, keys, D), dtype = sizes, HALF
    return AttentionCase(lead, queries, keys, D, dtype, **more)


PAGE = Page(
    __file__,
    Attention(),
    {"attention": lambda page: page.attention},
    quick=(),
    forms={"small": SMALL, "as it is": ()},
    cases=(
        half((1, 2), 64, 128, 32, large=900.0),
        half((2, 2), 128, 256, 16),
        half((1, 2), 129, 65, 64),
        half((1, 1), 1, 300, 128),
    ),
    full=tuple(
        AttentionCase(lead, queries, keys, D, dtype)
        for lead, queries, keys, D in (
            ((2, 4), 1024, 1024, 128),
            ((1, 3), 1000, 2077, 128),
            ((3, 2), 2048, 333, 64),
            ((1, 2), 4097, 4095, 32),
            ((5, 1), 511, 513, 16),
        )
        for dtype in (HALF, BRAIN)
    ),
    repeatable=("attention",),
    repeated=(half((1, 4), 1000, 1500, 128),),
    graphs=(half((1, 4), 200, 300, 64),),
    trains=("attention",),
    huge=(4096,),
    elsewhere="not the current GPU",
    sanitizers=("memcheck", "racecheck"),
    sanitized=(
        half((1, 2), 37, 51, 32),
        half((1, 2), 150, 100, 128),
    ),
    prints={
        "errors below 1%": 2,
        "Timing needs a GPU": 4,
        "exercise 1: largest error": 2,
    },
    mutants={
        "keys that are not there have a weight": (
            'score = tl.where(key[None, :] < keys, score, float("-inf"))',
            "score = tl.where(key[None, :] < keys, score, 0.0)",
        ),
        "sums do not shrink": (
            "total = total * shrink + tl.sum(power, axis=1)\n"
            "        weighted = weighted * shrink[:, None]\n\n"
            "        # The powers",
            "total = total + tl.sum(power, axis=1)\n\n        # The powers",
        ),
        "the weighted sum does not shrink": (
            "weighted = weighted * shrink[:, None]\n\n        # The powers",
            "weighted = weighted * 1.0\n\n        # The powers",
        ),
        "no maximum in the log-sum-exp": (
            "lse = maximum + tl.log2(total)\n"
            "    tl.store(lse_ptr + row + query, lse, mask=query < queries)"
            "\n\n\n# %%\n# ``tl.dot(p",
            "lse = tl.log2(total)\n"
            "    tl.store(lse_ptr + row + query, lse, mask=query < queries)"
            "\n\n\n# %%\n# ``tl.dot(p",
        ),
        "head and batch": (
            "batch = lead // heads\n    head = lead % heads\n    q = q_desc",
            "batch = lead % heads\n    head = lead // heads\n    q = q_desc",
        ),
        "delta is dropped for keys": (
            "ds = p * (dp - delta[None, :])",
            "ds = p * dp",
        ),
        "delta is dropped for queries": (
            "ds = p * (dp - delta[:, None])",
            "ds = p * dp",
        ),
        "dk without the scale": ("dk = (dk * scale)", "dk = (dk * 1)"),
        "dq without the scale": ("dq = (dq * scale)", "dq = (dq * 1)"),
        "the last keys get no gradient": (
            'tiles = triton.cdiv(keys, plan["TILE_K"])',
            'tiles = max(keys // plan["TILE_K"], 1)',
        ),
        "scale is not used": (
            "ctx.scale = scale",
            "ctx.scale = query.shape[-1] ** -0.5",
        ),
        "dy as it lies": (
            "dy = for_descriptors(dy.contiguous())",
            "dy = for_descriptors(dy)",
        ),
        "a stride that is no multiple of 16 bytes": (
            "stride <= 0 or stride * t.itemsize % 16",
            "stride <= 0",
        ),
        "memory that begins anywhere": (
            "t.data_ptr() % 16 == 0 and t.stride(-1) == 1",
            "t.stride(-1) == 1",
        ),
    },
    kills=(
        half((2, 3), 37, 51, 32),
        half((1, 2), 64, 64, 64, scale=2.0),
        half((1, 2), 33, 40, 16, large=30.0, scale=0.3),
        half((1, 2), 20, 40, 16, dy="transposed"),
        half((1, 2), 20, 40, 16, query="columns", key="unaligned"),
        half((1, 2), 20, 40, 16, value="unaligned"),
        lambda load: far_below(load("small")),
        lambda load: other_strides(load("small")),
    ),
)


def far_below(page):
    """All scores are far below 0: a key that is not there has a score of 0,
    and an infinite power."""
    D, dtype = 16, HALF
    q = torch.full((1, 1, 20, D), 30.0, dtype=dtype, device=page.DEVICE)
    k = torch.full((1, 1, 40, D), -30.0, dtype=dtype, device=page.DEVICE)
    v, dy = (torch.randn_like(t) for t in (k, q))
    given = [t.requires_grad_() for t in (q, k, v)]
    y = page.attention(*given)
    mean = v.detach().float().mean(2, keepdim=True)
    torch.testing.assert_close(
        y.float(), mean.expand(y.shape), atol=2e-3, rtol=0
    )
    for t in torch.autograd.grad(y, given, dy):
        assert t.isfinite().all()


def other_strides(page):
    """Heads are neighbors in memory, or a row is a part of a wider one."""

    def filled(*shape):
        return torch.randn(shape, device=page.DEVICE).to(HALF)

    swapped = [filled(1, 20, 3, 16).transpose(1, 2) for _ in range(4)]
    parts = [filled(1, 3, 20, 35)[..., :16] for _ in range(4)]
    for q, k, v, dy in swapped, parts:
        results = []
        for function, kind in (
            (page.attention, HALF),
            (F.scaled_dot_product_attention, torch.float64),
        ):
            given = [t.to(kind).requires_grad_() for t in (q, k, v)]
            y = function(*given)
            results.append(torch.autograd.grad(y, given, dy.to(kind)))
        for ours, exact in zip(*results, strict=True):
            assert (ours - exact).norm() <= 1e-2 * exact.norm()


def test_scores_far_below_zero(load):
    far_below(load("as it is"))


def test_heads_may_be_split_without_a_copy(page):
    """What a projection gives, (batch, length, heads, D), is taken as it
    lies."""
    t = torch.randn(2, 20, 3 * 2 * 16, device=page.DEVICE, dtype=HALF)
    for part in t.view(2, 20, 3, 2, 16).unbind(2):
        part = part.transpose(1, 2)
        assert page.for_descriptors(part) is part


def test_exercise(output):
    stub, solution = (
        float(line.rpartition(" ")[2])
        for line in output.splitlines()
        if "exercise 1: largest error" in line
    )
    assert stub > 0.1 > 2e-3 > solution
