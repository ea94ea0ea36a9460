"""Tune the plans of norms-and-losses/04-cross-entropy.

python tune/norms-04.py; table on stdout, CSV in $OUT; at most 150 seconds.
The loss, the gradient and both sweeps in one kernel: warps, groups that a
thread loads at once, slices of a row, registers. What smoothing, z-loss and
weights cost, and two other forms of the kernel with both sweeps.
Ceilings: a kernel that only reads, a product with 1, a copy.
"""

import multiprocessing
import sys
from functools import cache, partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "fused"))
import candidates
import torch

candidates.SECONDS = 130
NAME = "norms-and-losses/04-cross-entropy"
BARS = {"loss": {}, "gradient": {50257: 92}, "both": {32000: 97, 50257: 80, 65536: 89, 128256: 78, 262144: 75}}
REST = {"loss": 93, "gradient": 97, "both": None}
WIDTHS = [*BARS["both"]]
UNSEEN = [100003, 151936]  # not used to choose
TERMS = {"": (0.0, 0.0, False), "smooth z": (0.1, 1e-4, False), "smooth z weights": (0.1, 1e-4, True)}
STORE = "tl.store(dx_ptr + cols[u] + lane, dx, exist[u]"
FORMS = {
    "stores first": [(STORE, STORE + ', eviction_policy="evict_first"')],
    "stores streamed": [(STORE, STORE + ', cache_modifier=".cs"')],
    # Every block with a mask: the page could do without two lines of limits and a loop.
    "masks": [
        ("return slices, width, max(min(least, width), 0) // block * block", "return slices, width, 0"),
        (
            "blocks = _blocks(i, groups, T, V, U)",
            "blocks = _blocks(i if dx_ptr is None else (groups - 1) // (U * T) * (U * T) - i, groups, T, V, U)",
        ),
    ],
    # One instruction less for each exponential, wrong for logits near the largest float32.
    "fma": [
        ("(x - new[:, None]) * LOG2E", "x * LOG2E - (new * LOG2E)[:, None]"),
        ("(xs[u].to(tl.float32) - m) * LOG2E", "xs[u].to(tl.float32) * LOG2E - m * LOG2E"),
    ],
}


@cache
def form(edits):
    """The page, or another form of it."""
    from tutorial import load

    return load(NAME, list(edits), interpret=False)


def start():
    page = form(())
    torch.cuda.set_stream(torch.cuda.Stream())
    # Processes that only compile need few rows: their number is no constant.
    M = 8192 if multiprocessing.parent_process() is None else 16
    kept = {}

    def tensors(N):
        if N not in kept:
            kept.clear()
            x, target = page.inputs(M, N, torch.bfloat16)
            kept[N] = x.detach(), target, torch.empty_like(x)
        return kept[N]

    def call(mode, N):
        kernel, _, what = mode.partition(", ")
        x, target, dx = tensors(N)
        smooth, z, weighted = TERMS.get(what, TERMS[""])
        other = form(tuple(FORMS.get(what, ())))
        w = torch.ones(N + 1, device=page.DEVICE) if weighted else None
        given, one = (x, target, w, (-100, smooth, z)), torch.ones((), device=page.DEVICE)
        more = {"loss": (None, None, None), "both": (None, one, dx)}.get(kernel)
        more = more or (page.sweeps(*given), one, dx)
        return lambda plan: other.sweeps(*given, *more, plan and tuple(plan.values()))

    def ceilings(mode, N):
        x, target, dx = tensors(N)
        if mode.startswith("loss"):
            blocks = [b for b in (2048, 4096, 8192, 16384) if x.numel() % b == 0]
            return {f"read {b}": page.read(x, target, b) for b in blocks}
        return {"mul": partial(torch.mul, x, 1, out=dx), "copy": partial(dx.copy_, x)}

    return call, lambda mode, N: partial(call(mode, N), None), ceilings


def plans(mode, N):
    """The candidates; of other forms and terms the page's own plan, {}.

    Nothing here may ask for a GPU: processes that compile are forks.
    """
    kernel, _, form_or_terms = mode.partition(", ")
    names = "warps", "each", "slices", "registers"
    return [{}] if form_or_terms else [dict(zip(names, plan)) for plan in all_plans(kernel, N)]


def all_plans(kernel, N):
    if kernel != "both":
        for warps, most in (4, 8), (8, 4), (16, 2):
            for each in (1, 2, 4, 8):
                if each <= most and (kernel == "loss" or each < 8):
                    yield warps, each, 1, None
        return
    seen = set()
    for warps, each, registers, slices in FUSED:
        for size in slices:
            plan = warps, each, candidates.cdiv(2 * N, size), registers
            # Four groups and slices need more registers than there are.
            if plan not in seen and (each < 4 or plan[2] == 1):
                seen.add(plan)
                yield plan


KB = 1024
FUSED = [
    (32, 1, 32, (128 * KB, 96 * KB, 64 * KB)),
    (16, 1, 64, (128 * KB, 64 * KB)),
    (16, 2, 64, (128 * KB, 96 * KB, 64 * KB)),
    (16, 4, 64, (128 * KB, 96 * KB, 64 * KB)),
    (16, 1, 40, (96 * KB, 64 * KB)),
    (8, 2, 64, (64 * KB, 48 * KB)),
]


def work():
    for N in WIDTHS + UNSEEN:
        for mode in "both", "loss", "gradient":
            yield mode, N, plans(mode, N)
    for N in (128256, 32000, 50257, 262144):
        for name in FORMS:
            yield (mode := f"both, {name}"), N, plans(mode, N)
    for N in (32000, 128256):
        for name in [*TERMS][1:]:
            for kernel in "both", "loss", "gradient":
                yield (mode := f"{kernel}, {name}"), N, plans(mode, N)


def against_the_bars():
    """The page's share of the ceiling, once more, in one table."""
    import csv
    import os

    with open(Path(os.environ.get("OUT", ".")) / "tune-norms-04.csv") as file:
        rows = list(csv.DictReader(file))
    print("share of the ceiling, %: page, best plan, bar")
    for kernel, bars in BARS.items():
        for N in WIDTHS + UNSEEN:
            of = [r for r in rows if r["mode"] == kernel and r["N"] == str(N)]
            if of:
                best = min(of, key=lambda r: float(r["us"]))
                top = 100 * float(of[0]["ceiling"])
                plan = " ".join(f"{k}={best[k]}" for k in ("warps", "each", "slices", "registers"))
                print(f"{kernel:9} {N:7} {top / float(of[0]['page']):5.1f} {top / float(best['us']):5.1f}",
                      f" bar {bars.get(N, REST[kernel])}  best {plan}")


if __name__ == "__main__":
    candidates.main("norms-04", start, list(work()))
    against_the_bars()
