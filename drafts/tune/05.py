"""Tune the formulas of layer-norm/05-chunks.

python drafts/tune/05.py [root of the checkout]; table on stdout, CSV in $OUT.
"""
import csv, os, sys, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve()
sys.path.insert(0, str(ROOT / "docs/_ext"))
import torch
import triton
from tutorial import load

page = load("layer-norm/05-chunks", interpret=False)
torch.cuda.set_stream(torch.cuda.Stream())
M, START = 4096, time.time()
FORWARD = [256, 1024, 1536, 2560, 3584, 4608, 5120, 6656, 8192, 14848, 16384, 24576, 32768]
BACKWARD = [256, 1024, 1536, 2048, 2560, 3584, 4096, 4608, 5120, 6656, 8192, 8704, 10240]


def tiles(N, most, warps):
    """(row, warps): a row has row of a program's warps."""
    for w in warps:
        for row in (1, 2, 4, 8, 16):
            plan = page.tile_of(N, 2, row, w) if row <= w else None
            if plan and 8 <= plan["ROWS"] * triton.cdiv(N, plan["CHUNK"]) * plan["CHUNK"] // (32 * w) <= most:
                yield plan


def candidates(mode, N):
    if mode == "forward":
        for plan in tiles(N, 96, (1, 2, 4, 8, 16)):
            for hint in ("", "evict_first"):
                yield plan | {"HINT": hint}
            if N >= 16384:
                yield plan | {"HINT": "", "maxnreg": 64}
            if plan["ROWS"] == 1:  # half as wide chunks: fewer idle lanes
                yield plan | {"HINT": "", "CHUNK": plan["CHUNK"] // 2}
    else:
        for plan in tiles(N, 40, (4, 8)):
            for stages in (3, 4):
                tile = 4 * plan["ROWS"] * triton.cdiv(N, plan["CHUNK"]) * plan["CHUNK"]
                if (stages - 1) * tile <= 110000:
                    yield plan | {"STAGES": stages}


def calls(mode, N):
    x, w, b, dy = (t.detach() for t in page.inputs(M, N, torch.float16))
    if mode == "forward":
        return lambda plan: page.forward(x, w, b, 1e-5, plan)
    _, mean, rstd = page.forward(x, w, b, 1e-5, page.plan_forward(N, 2))
    dx, grads = torch.empty_like(x), torch.empty(2, N, dtype=x.dtype, device="cuda")
    return lambda plan: page.backward(dy, x, w, mean, rstd, dx, grads, plan)


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


WORK = [("forward", N) for N in FORWARD] + [("backward", N) for N in BACKWARD]
OURS = {"forward": page.plan_forward, "backward": page.plan_backward}


def compile_one(job):
    mode, N, plan = job
    try:
        with torch.cuda.stream(torch.cuda.Stream()):
            calls(mode, N)(plan)
    except Exception as e:  # noqa
        print("no", job, str(e)[:80])


jobs = [(mode, N, plan) for mode, N in WORK for plan in (*candidates(mode, N), OURS[mode](N, 2))]
with ThreadPoolExecutor(16) as pool:
    list(pool.map(compile_one, jobs))
torch.cuda.synchronize()
print(f"compiled {len(jobs)} in {time.time() - START:.0f} s")
flush = torch.empty(256 * 2**20, dtype=torch.int8, device="cuda")
rows = []
for mode, N in WORK:
    call, rule = calls(mode, N), OURS[mode]
    x, y, z = torch.empty(3, M, N, dtype=torch.float16, device="cuda")
    copy = clock((lambda: y.copy_(x)) if mode == "forward" else (lambda: torch.add(x, y, out=z)))
    found = []
    for name, plan in [("formula", rule(N, 2)), ("one tile", page.padded(rule)(N, 2)), *(("", p) for p in candidates(mode, N))]:
        try:
            us = clock(lambda: call(plan))
        except Exception as e:  # noqa
            print("no", N, plan, str(e)[:80])
            continue
        found.append((us, name, plan))
        rows.append({"mode": mode, "N": N, "name": name, "us": round(us, 2), "copy": round(copy, 2), **plan})
    print(f"{mode} N = {N}: copy {copy:.1f} µs;", *(f"{n} {us:.1f} ({100 * copy / us:.0f} %)" for us, n, _ in found if n))
    for us, _, plan in sorted(found, key=lambda f: f[0])[:4]:
        print(f"   {us:6.1f} {100 * copy / us:4.0f} %", *(f"{k}={v}" for k, v in plan.items()))
out = Path(os.environ.get("OUT", ".")) / "tune-05.csv"
with open(out, "w", newline="") as file:
    writer = csv.DictWriter(file, sorted({k for r in rows for k in r}))
    writer.writeheader()
    writer.writerows(rows)
print(f"{time.time() - START:.0f} s")
