"""Tune layer-norm/10-host-time: warps and programs, and the ladder itself.

python drafts/tune/10.py [root of the checkout]; table on stdout, CSV in $OUT.
"""
import csv, os, sys, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve()
sys.path.insert(0, str(ROOT / "docs/_ext"))
import torch
import triton
from tutorial import load

page = load("layer-norm/10-host-time", interpret=False)
torch.cuda.set_stream(torch.cuda.Stream())
M = 4096
WIDTHS = [1024, 2048, 4096, 8192, 15872]
START = time.time()
rows = []

# The bar first: forward and backward at N = 1024, times PyTorch eager.
for mode in (page.BOTH, "forward", "backward"):
    mark = page.benchmark("x", mode, page.LADDER)
    for N in WIDTHS if mode == page.BOTH else WIDTHS[:1]:
        us = {p: mark.fn(M, N, torch.float16, mode, p)[0] for p in page.LADDER}
        print(f"{mode}, N = {N}:", *(f"{p} {t:.0f} ({t / us['torch']:.2f})" for p, t in us.items()), sep="  ")
        rows += [{"what": mode, "N": N, "plan": p, "us": round(t, 2)} for p, t in us.items()]
mark = page.benchmark("x", page.BOTH, page.CLOCKS)
for N in WIDTHS:
    print(f"clocks, N = {N}:", *(f"{p} {mark.fn(M, N, torch.float16, page.BOTH, p)[0]:.0f}" for p in page.CLOCKS), sep="  ")
print(f"{time.time() - START:.0f} s")


def forward(N, warps):
    x, w, b, _ = (t.detach() for t in page.inputs(M, N, torch.float16))
    y, stats = torch.empty_like(x), torch.empty(M, 2, device="cuda")
    block = triton.next_power_of_2(N)
    return lambda: page._layer_norm_fwd[(M,)](x, w, b, y, stats, 1e-5, N, block, num_warps=warps)


def backward(N, programs, warps, m=M):
    x, w, b, dy = (t.detach() for t in page.inputs(m, N, torch.float16))
    dx, stats = torch.empty_like(x), torch.rand(m, 2, device="cuda")
    sums, grads = torch.empty(programs, 2, N, device="cuda"), torch.empty(2, N, dtype=x.dtype, device="cuda")
    block = triton.next_power_of_2(N)

    def call():
        page._layer_norm_bwd[(programs,)](dy, x, w, stats, dx, sums, m, N, block, num_warps=warps)
        page._layer_norm_bwd_add_up[(triton.cdiv(2 * N, 16),)](sums, grads, programs, 2 * N, 64, 16)

    return call


FWD, BWD, PROGRAMS = (2, 4, 8, 16), (4, 8, 16), (132, 256, 264, 396, 512, 528)
with ThreadPoolExecutor(16) as pool:
    jobs = [pool.submit(lambda N=N, w=w: forward(N, w)()) for N in WIDTHS for w in FWD]
    jobs += [pool.submit(lambda N=N, p=p, w=w: backward(N, p, w)()) for N in WIDTHS for w in BWD for p in PROGRAMS]
    [job.result() for job in jobs]
torch.cuda.synchronize()
print(f"compiled by {time.time() - START:.0f} s")
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


for N in WIDTHS:
    found = {("forward", w): clock(forward(N, w)) for w in FWD}
    found |= {("backward", p, w): clock(backward(N, p, w)) for p in PROGRAMS for w in BWD}
    rows += [{"what": what, "N": N, "plan": str(plan), "us": round(us, 2)} for (what, *plan), us in found.items()]
    block = triton.next_power_of_2(N)
    now = 512 if block <= 2048 else 256, min(max(block // 512, 4), 16)
    print(f"N = {N}: now forward {min(max(block * 2 // 4096, 4), 16)}, backward {now}: {found['backward', *now]:.1f} µs")
    for what in "forward", "backward":
        best = sorted((us, plan) for (kind, *plan), us in found.items() if kind == what)[:4]
        print(f"  {what:8}", *(f"{us:.1f} {plan}" for us, plan in best), sep="  ")
out = Path(os.environ.get("OUT", ".")) / "tune-10.csv"
with open(out, "w", newline="") as file:
    writer = csv.DictWriter(file, rows[0])
    writer.writeheader()
    writer.writerows(rows)
print(f"{time.time() - START:.0f} s")
