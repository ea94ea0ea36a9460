"""Second round for layer-norm/04-loads-in-flight: what the first lacks.

python tune/04.py [root of the checkout]; table on stdout, CSV in $OUT.
The knee; the plans of the page at all its widths against 4 and 8 warps at
widths between powers of two; about 35 s.
"""
import csv, os, sys, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve()
sys.path.insert(0, str(ROOT / "docs/_ext"))
import torch
from tutorial import load

page = load("layer-norm/04-loads-in-flight", interpret=False)
torch.cuda.set_stream(torch.cuda.Stream())
M, START, rows = 4096, time.time(), []
for kb in (1, 2, 4, 8, 16, 32, 64):
    print(f"{kb} KB in flight: {page.reading.fn(kb, 256, 'reading')[0]:.0f} GB/s", end="  ")
print()
WIDTHS = [1024, 1536, 2048, 3072, 4096, 4608, 6144, 7680, 8192, 8704, 10240, 15872]
MORE = {
    1536: [(p, w, s) for p in (2, 3) for w in (2, 4) for s in (4, 5)],
    3072: [(p, w, s) for p in (1, 2) for w in (4, 8) for s in (3, 4, 5)],
    4608: [(p, w, s) for p in (1, 2) for w in (4, 8) for s in (1, 3, 4, 5)],
    6144: [(p, w, s) for p in (1, 2) for w in (4, 8) for s in (1, 3, 5)],
    7680: [(p, w, s) for p in (1, 2) for w in (4, 8) for s in (1, 3, 5)],
    8704: [(1, w, s) for w in (8, 16) for s in (1, 3)],
}
PLANS = {N: dict.fromkeys([*(plan(N, 2) for plan in page.PLANS.values()), *MORE.get(N, [])]) for N in WIDTHS}
PLANS = {N: [p for p in plans if p[0] * (p[2] - 1) * 6 * (1 << (N - 1).bit_length()) < 225000] for N, plans in PLANS.items()}


def compile_one(job):
    N, w, s = job
    x, t = torch.empty(4, N, dtype=torch.float16, device="cuda"), torch.empty(4, device="cuda")
    page.backward(x, x, x[0], t, t, (1, w, s), torch.float16)


with ThreadPoolExecutor(16) as pool:
    list(pool.map(compile_one, {(N, *p[1:]) for N in WIDTHS for p in PLANS[N]}))
torch.cuda.synchronize()
print(f"compiled by {time.time() - START:.0f} s")
flush = torch.empty(256 * 2**20, dtype=torch.int8, device="cuda")


def clock(fn, n=15):
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


for N in WIDTHS:
    tensors = page.given(M, N, torch.float16)
    add = clock(lambda: torch.add(tensors[0], tensors[1]))
    found = {p: clock(lambda: page.backward(*tensors, p, torch.float16)) for p in PLANS[N]}
    rows += [{"N": N, "per_sm": p[0], "warps": p[1], "stages": p[2], "us": round(us, 2), "add": round(add, 2)} for p, us in found.items()]
    print(f"N = {N}: add {add:.1f}", *(f"{name} {found[plan(N, 2)]:.1f} {plan(N, 2)}" for name, plan in page.PLANS.items()), sep="  ", end="; best ")
    print(*(f"{us:.1f} {p}" for us, p in sorted((us, p) for p, us in found.items())[:5]), sep="  ")
with open(Path(os.environ.get("OUT", ".")) / "tune-04.csv", "w", newline="") as file:
    writer = csv.DictWriter(file, rows[0])
    writer.writeheader()
    writer.writerows(rows)
print(f"{time.time() - START:.0f} s")
