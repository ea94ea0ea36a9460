"""Tune the plans of layer-norm/03-lock, and look at the race.

python drafts/tune/03.py [root of the checkout]; table on stdout, CSV in $OUT.
"""
import csv, itertools, os, sys, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve()
sys.path.insert(0, str(ROOT / "docs/_ext"))
import torch
import triton
from tutorial import load

page = load("layer-norm/03-lock", interpret=False)
torch.cuda.set_stream(torch.cuda.Stream())
M = 4096
WIDTHS = [1024, 2048, 4096, 4608, 8192, 10240, 15872]
START = time.time()


def candidates(N):
    block = triton.next_power_of_2(N)
    warps = [w for w in (2, 4, 8, 16) if 256 <= block // w <= 2048 and (block < 16384 or w >= 8)]
    for w in warps:
        for p in (132, 256, 264, 396, 512, 528, 792, 1024):
            yield "own", (p, p, w)
        for p in (256, 264, 512, 1024):
            for g in (8, 32, 128, 256):
                if g < p:
                    yield "lock", (p, g, w)
        for g in (64, 128, 256):
            yield "each row", (M, g, w)


def compile_one(args):
    N, w, locked = args
    x = torch.empty(4, N, dtype=torch.float16, device="cuda")
    s = torch.empty(4, device="cuda")
    plan = (2, 1, w) if locked else (2, 2, w)
    try:
        page.stage_1(x, x, x[0], s, s, plan)
    except Exception as e:  # noqa
        print("no", args, e)


jobs = {(N, p[2], k != "own") for N in WIDTHS for k, p in candidates(N)}
with ThreadPoolExecutor(16) as pool:
    list(pool.map(compile_one, jobs))
torch.cuda.synchronize()
print(f"compiled {len(jobs)} in {time.time() - START:.0f} s")

flush = torch.empty(256 * 2**20, dtype=torch.int8, device="cuda")


def clock(fn, n=12):
    fn()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        fn()
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in "ab"] for _ in range(n)]
    for a, b in pairs:
        flush.zero_()
        a.record()
        graph.replay()
        b.record()
    torch.cuda.synchronize()
    return sorted(a.elapsed_time(b) for a, b in pairs)[n // 2] * 1e3


rows = []
for N in WIDTHS:
    x, w, b, dy = page.inputs(M, N, torch.float16)
    add = clock(lambda: torch.add(x.detach(), dy))
    found = []
    for kind, plan in candidates(N):
        y = page.layer_norm(x, (N,), w, b, plan=lambda M, block: plan)
        us = clock(lambda: torch.autograd.grad(y, (x, w, b), dy, retain_graph=True))
        found.append((us, kind, plan))
        rows.append({"N": N, "kind": kind, "programs": plan[0], "buffers": plan[1], "warps": plan[2], "us": round(us, 2), "add": round(add, 2)})
    print(f"N = {N}: add {add:.1f} µs")
    for name, plan in page.PLANS.items():
        y = page.layer_norm(x, (N,), w, b, plan=plan)
        us = clock(lambda: torch.autograd.grad(y, (x, w, b), dy, retain_graph=True))
        print(f"  now {name:9} {us:6.1f} {plan(M, triton.next_power_of_2(N))}")
    for kind in ("own", "lock", "each row"):
        best = sorted(f for f in found if f[1] == kind)[:4]
        print(f"  {kind:9}", *(f"{us:.1f} {p}" for us, _, p in best), sep="  ")
print("race: wrong runs of 100")
for N in 512, 1024, 2048, 4096:
    print(N, {v: page.race.fn(32768, N, torch.float16, v)[0] for v in page.FLAWS})
out = Path(os.environ.get("OUT", ".")) / "tune-03.csv"
with open(out, "w", newline="") as file:
    writer = csv.DictWriter(file, rows[0])
    writer.writeheader()
    writer.writerows(rows)
print(f"{time.time() - START:.0f} s")
