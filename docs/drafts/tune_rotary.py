"""Which tile does attention/04-rotary want? About a minute on an H100.

    python tune_rotary.py [folder of the repository] [rotary|attention]

Part one times the rotation (40 heads of 128 numbers, bfloat16) at 256, 1024
and 16384 positions with every tile of CONFIGS, with page.device_time, the
clock of the page; the copy is measured before and after. A line a
configuration, best first, in % of the copy, and last what the page's own rule
chooses. Part two times attention with the queries, or both, in its loads, with
every plan of ATTENTION, in turns with the rotation apart.

Kernels are compiled by all cores first. Nothing of the page is edited but its
plan, and for "evict" the hint of its loads.
"""

import itertools
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

REPOSITORY = sys.argv[1] if len(sys.argv) > 1 else os.getcwd()
PART = sys.argv[2] if len(sys.argv) > 2 else "both"
sys.path.insert(0, f"{REPOSITORY}/docs/_ext")

import torch

GPU = torch.cuda.is_available()
if not GPU:  # a dry run: times are nan
    os.environ["TRITON_INTERPRET"] = "1"

import tutorial

NAME = "attention/04-rotary"
LOADS = (
    ("tl.load(x_at, mask=mask, other=0)",
     "tl.load(x_at, mask=mask, other=0, eviction_policy='evict_first')"),
    ("tl.load(x_at + further * x_column, mask=mask, other=0)",
     "tl.load(x_at + further * x_column, mask=mask, other=0, "
     "eviction_policy='evict_first')"),
)  # fmt: skip
EDITS = {"": (), "evict": LOADS}
# warps, rows for each 16 bytes that a thread loads of a half, heads, edits
CONFIGS = [
    *((w, f, h, "") for w, f, h in
      itertools.product((1, 2, 4, 8), (1, 2), (1, 2, 4, 8))
      if f * h <= 8),
    (4, 1, 2, "evict"), (4, 1, 4, "evict"), (2, 1, 4, "evict"),
]  # fmt: skip
SIZES = (256, 1024, 16384) if GPU else (32,)
# rotate_keys, tile of queries, of keys, warps, stages
ATTENTION = [
    (False, 128, 64, 4, 2), (False, 128, 64, 8, 2), (False, 128, 64, 8, 3),
    (False, 128, 128, 8, 2), (False, 128, 32, 4, 3), (False, 64, 64, 4, 2),
    (True, 128, 64, 8, 2), (True, 128, 64, 8, 3), (True, 128, 64, 4, 2),
    (True, 128, 32, 4, 2), (True, 128, 32, 4, 3), (True, 128, 32, 8, 3),
    (True, 64, 64, 4, 2), (True, 256, 64, 8, 2), (True, 256, 32, 8, 2),
    (True, 128, 128, 8, 2),
]  # fmt: skip
_pages = {}


def page_of(edits):
    if edits not in _pages:
        _pages[edits] = tutorial.load(NAME, EDITS[edits])
    return _pages[edits]


def plan_of(config):
    """In place of page.plan."""
    warps, factor, heads, _ = config

    def plan(tensors):
        D, itemsize = tensors[0].shape[-1], tensors[0].itemsize
        lanes = 32 * warps * 16 // itemsize
        rows = max(factor * lanes // (D // 2), 1)
        return {"PAIRS": D // 2, "ROWS": rows, "HEADS": heads,
                "num_warps": warps}  # fmt: skip

    return plan


def plan_of_attention(config):
    _, tile_q, tile_k, warps, stages = config

    def plan(rotate_keys):
        return {"TILE_Q": tile_q, "TILE_K": tile_k, "STAGES": stages,
                "ROTATE_KEYS": rotate_keys, "num_warps": warps}  # fmt: skip

    return plan


def with_plan(page, name, plan, call):
    """call(), with another plan in the page."""
    before = getattr(page, name)
    setattr(page, name, plan)
    try:
        return call()
    finally:
        setattr(page, name, before)


def both(page, N):
    q, k, _, _ = (t.detach() for t in page.inputs(N, torch.bfloat16))
    cos, sin = page.tables(N, page.D)
    outputs = [torch.empty_like(q), torch.empty_like(k)]
    return lambda: page.rotate([q, k], outputs, cos, sin)


def attention_inputs(page, N):
    shape = (page.TOKENS // N, 16, N, page.D)
    if not GPU:
        shape = (1, 1, N, page.D)
    given = [
        torch.randn(shape, device=page.DEVICE, dtype=torch.float16)
        for _ in range(3)
    ]
    return (*given, *page.tables(N, page.D))


def compiled(job):
    """In another process: the kernel is then kept on disk."""
    kind, config = job
    try:
        if kind == "rotary":
            page = page_of(config[-1])
            for N in SIZES[:1]:
                with_plan(page, "plan", plan_of(config), both(page, N))
        else:
            page = page_of("")
            given = attention_inputs(page, 512)
            function = (
                page.attention_fused if config[0] else page.attention_queries
            )
            with_plan(
                page,
                "plan_rotary",
                plan_of_attention(config),
                lambda: function(*given),
            )
        torch.cuda.synchronize()
    except Exception as error:
        return str(error).strip().splitlines()[-1][:90]
    return ""


def rotary(failed):
    for N in SIZES:
        plain = page_of("")
        dtype = torch.bfloat16
        moved = plain.bytes_moved(N, dtype)
        shape = (N, 40 * plain.D)
        before, _, _ = plain.ceiling(1, 1, shape, dtype)
        found = []
        for config in CONFIGS:
            if config in failed:
                continue
            page = page_of(config[-1])

            def prepare():
                call = both(page, N)
                return lambda: with_plan(page, "plan", plan_of(config), call)

            found.append((page.speed(moved, prepare)[0], config))
        rule, _, _ = plain.speed(moved, lambda: both(plain, N))
        after, _, _ = plain.ceiling(1, 1, shape, dtype)
        copy = max(before, after)
        print(f"\n{N} positions: copy {before:.0f} and {after:.0f} GB/s; "
              "warps, factor, heads, edit")  # fmt: skip
        for speed, config in sorted(found, reverse=True):
            print(f"  {100 * speed / copy:6.1f}%  {config}")
        q, k, *_ = plain.inputs(N, dtype)
        print(f"  {100 * rule / copy:6.1f}%  the rule: {plain.plan([q, k])}")


def attention(failed):
    page = page_of("")
    for N in (512, 4096) if GPU else (128,):
        given = attention_inputs(page, N)
        calls = {
            "alone": lambda: page.attention_alone(*given),
            "apart": lambda: page.attention_apart(*given),
        }
        for config in ATTENTION:
            if config in failed:
                continue
            function = (
                page.attention_fused if config[0] else page.attention_queries
            )
            calls[config] = lambda f=function, c=config: with_plan(
                page, "plan_rotary", plan_of_attention(c), lambda: f(*given)
            )
        operations = 4 * page.TOKENS * 16 * N * page.D
        times = page.in_turns(calls) if GPU else {
            name: (call() and 1.0,) for name, call in calls.items()
        }  # fmt: skip
        print(f"\n{N} keys, TFLOP/s in turns; keys rotated too, tile of "
              "queries, of keys, warps, stages")  # fmt: skip
        for name, (us, *_) in sorted(times.items(), key=lambda x: x[1][0]):
            print(f"  {operations / us * 1e-6:6.0f}  {name}")


def main():
    start = time.time()
    jobs = [("rotary", c) for c in CONFIGS] * (PART in ("both", "rotary"))
    jobs += [("attention", c) for c in ATTENTION] * (
        PART in ("both", "attention")
    )
    failed = set()
    if GPU:
        workers = min(12, os.cpu_count() or 1)
        spawn = get_context("spawn")
        with ProcessPoolExecutor(workers, mp_context=spawn) as pool:
            for (_, config), said in zip(jobs, pool.map(compiled, jobs)):
                if said:
                    failed.add(config)
                    print(f"{config}: {said}")
        print(torch.cuda.get_device_name(), f"{time.time() - start:.0f} s")
    if PART in ("both", "rotary"):
        rotary(failed)
    if PART in ("both", "attention"):
        attention(failed)
    print(f"{time.time() - start:.0f} s")


if __name__ == "__main__":
    main()
