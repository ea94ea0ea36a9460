"""Tune the plans of layer-norm/07-two-sweeps.

python tune/07.py [root of the checkout]; table on stdout, CSV in $OUT.
"""
import csv, os, sys, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve()
sys.path.insert(0, str(ROOT / "docs/_ext"))
import torch
import triton
from tutorial import load

page = load("layer-norm/07-two-sweeps", interpret=False)
torch.cuda.set_stream(torch.cuda.Stream())
S = page.NUM_SMS
WIDTHS = [8192, 16384, 32768, 49152, 65536, 131072, 20001]
START = time.time()

FORWARD = [(b, w) for b in (2048, 4096, 8192, 16384) for w in (8, 16, 32) if 256 <= b // w <= 1024]
MEANS = [(b, w) for b in (2048, 4096, 8192) for w in (4, 8, 16) if 256 <= b // w <= 1024]
SLICES = [(r, c, w, p) for r in (1, 2, 4) for c in (1024, 2048, 4096) for w in (4, 8)
          for p in (1, 2, 3) if 8 <= r * c // (32 * w) <= 64]


def tensors(M, N):
    x, dy = torch.randn(2, M, N, dtype=torch.float16, device="cuda")
    w, b = torch.rand(2, N, dtype=torch.float16, device="cuda")
    return x, dy, w, b, torch.empty_like(x), torch.randn(M, device="cuda"), torch.rand(M, device="cuda")


def forward(given, plan, caches=True):
    x, _, w, b, y, mean, rstd = given
    M, N = x.shape
    block, warps = plan
    page._layer_norm_fwd_sweeps[(M,)](x, w, b, y, mean, rstd, 1e-5, N, block, caches, num_warps=warps)


def means(given, plan):
    x, dy, w, _, _, mean, rstd = given
    M, N = x.shape
    c = torch.empty(2, M, device="cuda")
    page._layer_norm_bwd_means[(M,)](dy, x, w, mean, rstd, c, M, N, plan[0], num_warps=plan[1])


def slices(given, plan):
    x, dy, w, _, dx, mean, rstd = given
    M, N = x.shape
    rows, cols, warps, per_sm = plan
    parts = triton.cdiv(N, cols)
    groups = max(min(per_sm * S // parts, triton.cdiv(M, rows)), 1)
    c, sums = torch.empty(2, M, device="cuda"), torch.empty(groups, 2, N, device="cuda")
    page._layer_norm_bwd_slices[(parts * groups,)](
        dy, x, w, mean, rstd, c, dx, sums, M, N, rows, cols, num_warps=warps)
    sums.sum(0)


STEPS = {"forward": (forward, FORWARD), "means": (means, MEANS), "slices": (slices, SLICES)}


def compile_one(job):
    name, N, plan = job
    try:
        STEPS[name][0](tensors(8, N), plan)
    except Exception as e:  # noqa
        print("no", job, str(e)[:200])


jobs = {(n, N, p if n != "slices" else (*p[:3], 1)) for n, (_, plans) in STEPS.items() for N in WIDTHS for p in plans}
with ThreadPoolExecutor(16) as pool:
    list(pool.map(compile_one, jobs))
torch.cuda.synchronize()
print(f"compiled {len(jobs)} in {time.time() - START:.0f} s")
flush = torch.empty(256 * 2**20, dtype=torch.int8, device="cuda")


def clock(fn, n=10):
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
    M = min(4096, 2**28 // N)
    given = tensors(M, N)
    x, dy, w, b, y, mean, rstd = given
    copy, add = clock(lambda: torch.mul(x, 1, out=y)), clock(lambda: torch.add(x, dy, out=y))
    plan = page.plan(N, 2)
    now = clock(lambda: forward(given, plan))
    plain = clock(lambda: forward(given, plan, False))
    back = clock(lambda: page.backward(dy, x, w, mean, rstd, 3 * [True]))
    print(f"N = {N}, M = {M}: copy {copy:.1f}, add {add:.1f} µs; now forward {now:.1f} ({100 * copy / now:.0f} %),"
          f" without help {plain:.1f} ({100 * copy / plain:.0f} %), backward {back:.1f} ({100 * add / back:.0f} %)")
    for name, (step, plans) in STEPS.items():
        found = []
        for plan in plans:
            try:
                found.append((clock(lambda: step(given, plan)), plan))
            except Exception as e:  # noqa
                print("no", name, N, plan, str(e)[:100])
                continue
            rows.append({"N": N, "kernel": name, "plan": plan, "us": round(found[-1][0], 2), "copy": round(copy, 2), "add": round(add, 2)})
        print(f"  {name:8}", *(f"{us:.1f} {p}" for us, p in sorted(found)[:5]), sep="  ")
    del given, x, dy, y
out = Path(os.environ.get("OUT", ".")) / "tune-07.csv"
with open(out, "w", newline="") as file:
    writer = csv.DictWriter(file, rows[0])
    writer.writeheader()
    writer.writerows(rows)
print(f"{time.time() - START:.0f} s")
