"""Tune the plans of layer-norm/04-loads-in-flight.

python drafts/tune/04.py [root of the checkout]; table on stdout, CSV in $OUT.
"""
import csv, os, sys, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve()
sys.path.insert(0, str(ROOT / "docs/_ext"))
import torch
import triton
from tutorial import load

page = load("layer-norm/04-loads-in-flight", interpret=False)
# w ahead of the loop, in 16 bits, instead of copied each row
variant = load(
    "layer-norm/04-loads-in-flight",
    [
        ("tl.range(first, M, step, num_stages=STAGES)", "tl.range(first, M, step, num_stages=STAGES, disable_licm=True)"),
        ("    first, step = tl.program_id(0), tl.num_programs(0)\n", "    first, step = tl.program_id(0), tl.num_programs(0)\n    w = tl.load(w_ptr + cols, mask=mask, other=0)\n"),
        ("wdy = dy * tl.load(w_ptr + cols, mask=mask, other=0).to(acc)", "wdy = dy * w.to(acc)"),
    ],
    interpret=False,
)
torch.cuda.set_stream(torch.cuda.Stream())
M, S = 4096, page.NUM_SMS
WIDTHS = [1024, 2048, 4096, 4608, 8192, 10240, 15872]
START = time.time()


def candidates(N):
    block = triton.next_power_of_2(N)
    for warps in (2, 4, 8, 16):
        if not 256 <= block // warps <= (1024 if block < 16384 else 2048):
            continue
        for per_sm in (1, 2, 3, 4, 6):
            if per_sm * block > 24576 and per_sm > 1:
                continue
            for stages in (1, 2, 3, 4, 5):
                if per_sm * (stages - 1) * 6 * block > 220000:
                    continue
                yield per_sm, warps, stages


def compile_one(args):
    module, N, w, s = args
    x = torch.empty(4, N, dtype=torch.float16, device="cuda")
    t = torch.empty(4, device="cuda")
    try:
        module.backward(x, x, x[0], t, t, (1, w, s), torch.float16)
    except Exception as e:  # noqa
        print("no", N, w, s, e)


jobs = {(m, N, p[1], p[2]) for m in (page, variant) for N in WIDTHS for p in candidates(N)}
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
    tensors = page.given(M, N, torch.float16)
    out = torch.empty_like(tensors[0])
    add = clock(lambda: torch.add(tensors[0], tensors[1], out=out))
    found = []
    for name, module in ("w in loop", page), ("w before", variant):
        for plan in candidates(N):
            try:
                us = clock(lambda: module.backward(*tensors, plan, torch.float16))
            except Exception as e:  # noqa
                print("no", N, plan, e)
                continue
            found.append((us, name, plan))
            rows.append({"N": N, "kernel": name, "per_sm": plan[0], "warps": plan[1], "stages": plan[2], "us": round(us, 2), "add": round(add, 2)})
    print(f"N = {N}: add {add:.1f} µs")
    for name, plan in page.PLANS.items():
        plan = plan(N, 2)
        print(f"  now {name:9} {clock(lambda: page.backward(*tensors, plan, torch.float16)):6.1f} {plan}")
    for name in ("w in loop", "w before"):
        for only_one in (True, False):
            best = sorted(f for f in found if f[1] == name and (f[2][2] == 1 or not only_one))[:4]
            print(f"  {name} {'1 stage ' if only_one else 'any     '}", *(f"{us:.1f} {p}" for us, _, p in best), sep="  ")
print("latency of 1000 loads, µs:", {mb: round(page.latency.fn(mb, "chain")[0]) for mb in (64, 256, 1024)},
      "copy:", {mb: round(page.latency.fn(mb, "copy")[0]) for mb in (64, 256, 1024)})
out = Path(os.environ.get("OUT", ".")) / "tune-04.csv"
with open(out, "w", newline="") as file:
    writer = csv.DictWriter(file, rows[0])
    writer.writeheader()
    writer.writerows(rows)
print(f"{time.time() - START:.0f} s")
