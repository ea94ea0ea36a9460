"""Candidates for the plans of norms-and-losses/03-softmax, and simpler kernels.

python tune/norms-03.py; lines on stdout, CSV in $OUT. One H200, about 2 minutes.
pairs: whose is a pair, tiles and warps of each. forward, backward: rows in
registers, of the narrowest widths several a program. sweeps: in narrow rows,
too. Then the page's own plans, with its kernels and with simpler ones: tl.exp
for exp2, masks in all chunks, conversions that are not hidden, log_softmax.
Percentages are shares of the fastest of several copies and additions.
"""

import csv
import itertools
import multiprocessing
import os
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent / "fused")]
import torch
from candidates import ROOT, START, cdiv, clock, power

M, NAME, SECONDS = 4096, "norms-and-losses/03-softmax", 120
NARROW = [128, 256, 1000, 1024, 2048, 4096, 4097, 8192, 12288, 16384]
WIDE = [16384, 24576, 32768, 49152, 65536]
# A simpler kernel: what is replaced in the script.
EDGE = "if (STEP == 1 or c > 0) and (c + 1) * CHUNK <= N:"
VARIANTS = {
    "page": (),
    "exp": (("tl.exp2(x * LOG2E)", "tl.exp(x)"),),
    "masks": ((EDGE, "if False:"),),
    "kept": (("_hidden(ys[c], zero)", "ys[c]"), ("_hidden(dys[c], zero)", "dys[c]")),
    "no hints": (('eviction_policy="evict_last"', 'eviction_policy=""'), ('eviction_policy="evict_first"', 'eviction_policy=""')),
    "from the start": (("(N - 1) // TILE * TILE - start + lane", "start + lane"),),
}


def registers(warps, most):
    """None, and what lets 1 to most programs fit; at least 32 a thread."""
    per_sm = {65536 // (32 * warps * n) // 8 * 8 for n in range(1, most + 1)}
    return [0, *sorted(n for n in per_sm if 32 <= n < min(255, 65536 // (32 * warps)))]


def pairs(N):
    """Whose is a pair; those that lose are tried at two widths."""
    for warps in (8, 16, 32):
        for regs in registers(warps, 64 // warps):
            for each in (8, 16):
                yield {"PAIRS": 32 * warps, "EACH": each, "num_warps": warps, "maxnreg": regs}
            for tile in (2048, 4096, 8192, 16384) if N in (32768, 65536) else ():
                if 8 <= tile / (32 * warps) <= 32:
                    yield {"PAIRS": 1, "EACH": tile, "num_warps": warps, "maxnreg": regs}
                    yield {"PAIRS": tile, "EACH": 1, "num_warps": warps, "maxnreg": regs}


def kind(plan):
    if "PAIRS" not in plan:
        return "sweeps" if "BLOCK" in plan else "rows"
    return "program" if plan["PAIRS"] == 1 else "lane" if plan["EACH"] == 1 else "thread"


def sweeps(N):
    for warps in (1, 2, 4, 8, 16, 32):
        for regs in (0, 32):
            if 256 * warps < 4 * N:
                yield {"PAIRS": 32 * warps, "EACH": 8, "num_warps": warps, "maxnreg": regs}


def rows(N, backward):
    step = 8 if N % 8 else 1
    for warps in (1, 2, 4, 8, 16, 32):
        chunk = min(256 * warps, power(N + step - 1))
        columns = cdiv(N, chunk) * chunk / (32 * warps)
        if not 4 <= columns <= 80 and N > 256:
            continue
        counts = (1,) if N > 1024 else (1, 2, 4, 8, 16, 32)
        for n in counts:
            if n > 1 and not 8 <= n * columns <= 32:
                continue
            limits = registers(warps, 3)[:3] if warps >= 8 else [0]
            for regs in limits:
                yield {"ROWS": n, "CHUNK": chunk, "STEP": step, "num_warps": warps, "maxnreg": regs}


def blocks(N):
    for block, warps in itertools.product((2048, 4096, 8192, 16384), (4, 8, 16, 32)):
        if 8 <= block / (32 * warps) <= 32:
            yield {"BLOCK": block, "num_warps": warps, "maxnreg": 0}


WORK = [("forward", N, list(rows(N, False))) for N in NARROW]
WORK += [("backward", N, list(rows(N, True))) for N in [*NARROW, 24576, 32768]]
WORK += [("forward", N, list(pairs(N))) for N in WIDE]
WORK += [("forward", N, list(sweeps(N))) for N in (128, 1024, 4096, 8192)]
WORK += [("backward", N, list(blocks(N))) for N in (49152, 65536)]


WIDTHS = [*NARROW, *WIDE[1:]]


def concerns(variant, mode, N):
    """Whether a variant is another kernel there."""
    return {"kept": mode == "backward" and N <= 32768, "masks": N <= 32768, "exp": mode == "forward"}.get(variant, variant == "page" or (mode == "forward" and N > 16384))


def load(variant):
    sys.path[:0] = [str(ROOT / "docs/_ext")]
    from tutorial import load

    page = load(NAME, VARIANTS[variant], interpret=False)
    torch.cuda.set_stream(torch.cuda.Stream())
    return page


def tensors(N):
    torch.manual_seed(0)
    x = torch.randn(M, N, device="cuda").bfloat16()
    return x, torch.softmax(x, 1)


def call(page, mode, x, y, plan=None, log=False):
    if plan:
        plan = {k: v for k, v in plan.items() if v or k != "maxnreg"}
    if mode == "forward":
        return lambda: page.forward(x, log, plan=plan)
    return lambda: page.backward(y, x, log, plan=plan)


def check(found, mode, x, y):
    """Wrong kernels are fast, too."""
    rows = slice(0, M, 97)
    want = torch.softmax(x[rows].double(), 1)
    if mode == "backward":
        y, dy = y[rows].double(), x[rows].double()
        want = y * (dy - (y * dy).sum(1, keepdim=True))
    error = ((found[rows] - want).norm() / want.norm()).item()
    return "" if error < 4e-3 else f"WRONG {error:.0e}"


def compile_some(job):
    variant, mode, N, plans, log = job
    page, (x, y) = load(variant), tensors(N)
    for plan in plans:
        try:
            call(page, mode, x, y, plan, log)()
        except Exception as e:
            print("no", variant, mode, N, plan, str(e)[:90])
    torch.cuda.synchronize()


def ceiling(mode, x, y, flush):
    out = torch.empty_like(x)
    ways = [lambda: torch.add(x, y, out=out)]
    if mode == "forward":
        ways = [lambda: torch.mul(x, 1, out=out), lambda: out.copy_(x)]
    return min(clock(way, flush) for way in 2 * ways)


def main():
    # log_softmax as the page has it, softmax in every form.
    forms = [*((v, False) for v in VARIANTS), ("page", True)]
    own = [(v, mode, N, log) for mode in ("forward", "backward") for N in WIDTHS for v, log in forms if concerns(v, mode, N)]
    jobs = [("page", mode, N, plans[i : i + 6], False) for mode, N, plans in WORK for i in range(0, len(plans), 6)]
    jobs += [(v, mode, N, [None], log) for v, mode, N, log in own]
    jobs.sort(key=lambda job: -job[2] * len(job[3]))
    with multiprocessing.get_context("fork").Pool(os.cpu_count()) as pool:
        pool.map(compile_some, jobs, 1)
    print(f"compiled {sum(len(job[3]) for job in jobs)} in {time.time() - START:.0f} s")
    pages = {v: load(v) for v in VARIANTS}
    flush, records = torch.empty(2**28, dtype=torch.int8, device="cuda"), []
    for mode in "forward", "backward":
        for N in WIDTHS:
            x, y = tensors(N)
            top, line = ceiling(mode, x, y, flush), []
            for v, _, _, log in (o for o in own if o[1:3] == (mode, N)):
                run = call(pages[v], mode, x, y, log=log)
                wrong = "" if log else check(run(), mode, x, y)
                us = min(clock(run, flush), clock(run, flush))
                line.append(f"{'log' if log else v} {100 * top / us:.1f}{wrong}")
                records.append({"what": "log" if log else v, "mode": mode, "N": N, "us": round(us, 2), "ceiling": round(top, 2)})
            print(f"{mode} {N}: ceiling {top:.2f} us;", ", ".join(line))
    for mode, N, plans in WORK:
        if time.time() - START > SECONDS:
            print("no time left for", mode, N)
            continue
        x, y = tensors(N)
        top, found = ceiling(mode, x, y, flush), []
        for plan in plans:
            try:
                run = call(pages["page"], mode, x, y, plan)
                wrong = check(run(), mode, x, y)
                us = clock(run, flush)
            except Exception as e:
                print("no", mode, N, plan, str(e)[:90])
                continue
            found.append((us, plan, wrong))
            records.append({"what": "candidate", "mode": mode, "N": N, "us": round(us, 2), "ceiling": round(top, 2), **plan})
        for name in sorted({kind(plan) for _, plan, _ in found}):
            same = [f for f in found if kind(f[1]) == name]
            print(f"{mode} {N} {name}: ceiling {top:.2f} us")
            for us, plan, wrong in sorted(same, key=lambda f: f[0])[:5]:
                print(f"   {us:7.2f} {100 * top / us:5.1f} %", *(f"{k}={v}" for k, v in plan.items()), wrong)
    with open(Path(os.environ.get("OUT", ".")) / "tune-norms-03.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, sorted({k for r in records for k in r}))
        writer.writeheader()
        writer.writerows(records)
    print(f"{len(records)} timed, {time.time() - START:.0f} s")


if __name__ == "__main__":
    main()
