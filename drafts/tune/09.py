"""Tune layer-norm/09-two-passes: tiles, warps and parts of both kernels.

python drafts/tune/09.py [root of the checkout]; table on stdout, CSV in $OUT.
"""
import csv, os, sys, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve()
sys.path.insert(0, str(ROOT / "docs/_ext"))
import torch
import triton
from tutorial import load

page = load("layer-norm/09-two-passes", interpret=False)
torch.cuda.set_stream(torch.cuda.Stream())
START = time.time()
SIZES = [(4096, N, torch.float16) for N in (1024, 2048, 4096, 4608, 8192, 15872)]
SIZES += [(1024, N, torch.float16) for N in (2**15, 2**17, 2**20)] + [(1024, 512, torch.float32)]


def dx_tiles(N):
    block = triton.next_power_of_2(N)
    cols = [block] if block <= 16384 else [2048, 4096, 8192, 16384]
    for col in cols:
        for row in (1, 2, 4) if col <= 1024 else (1,):
            for warps in (2, 4, 8, 16, 32):
                if 4 <= row * col // (32 * warps) <= 64:
                    yield row, col, warps


def column_tiles(M, N):
    for tall, few, warps in (32, 64, 4), (64, 64, 4), (64, 64, 8), (16, 128, 4), (32, 128, 4), (32, 128, 8), (32, 32, 4), (128, 16, 8):
        yield tall, few, warps


def parts_of(M, N, few):
    return [p for p in (1, 2, 4, 8, 16, 32, 64) if 256 <= triton.cdiv(N, few) * p <= 65536 or p == 1]


def given(M, N, dtype):
    x, w, _, dy = (t.detach() for t in page.inputs(M, N, dtype))
    return dy, x, w, *torch.rand(2, M, device="cuda")


def launch_dx(t, M, N, tile, out):
    rows, cols, warps = tile
    page._layer_norm_bwd_dx[(triton.cdiv(M, rows),)](*t, out, M, N, rows, cols, num_warps=warps)


def launch_columns(t, M, N, tile, sums):
    dy, x, _, mean, rstd = t
    tall, few, warps = tile
    page._layer_norm_bwd_columns[(triton.cdiv(N, few), len(sums))](dy, x, mean, rstd, sums, M, N, tall, few, num_warps=warps)


def compile_one(job):
    what, M, N, dtype, tile = job
    t = given(8, N, dtype)
    try:
        if what == "dx":
            launch_dx(t, 8, N, tile, torch.empty_like(t[0]))
        else:
            launch_columns(t, 8, N, tile, torch.empty(2, 2, N, device="cuda"))
    except Exception as e:  # noqa
        print("no", job, e)


jobs = [("dx", M, N, d, t) for M, N, d in SIZES for t in dx_tiles(N)]
jobs += [("columns", M, N, d, t) for M, N, d in SIZES for t in column_tiles(M, N)]
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
for M, N, dtype in SIZES:
    t = given(M, N, dtype)
    dx = torch.empty_like(t[0])
    add = clock(lambda: torch.add(t[0], t[1], out=dx))
    found = {}
    for tile in dx_tiles(N):
        try:
            found["dx", tile] = clock(lambda: launch_dx(t, M, N, tile, dx))
        except Exception as e:  # noqa
            print("no", N, tile, e)
    for tile in column_tiles(M, N):
        for parts in parts_of(M, N, tile[1]):
            sums = torch.empty(parts, 2, N, device="cuda")

            def both():
                launch_columns(t, M, N, tile, sums)
                return page.add_up(sums, dtype) if parts > 1 else None

            try:
                found["columns", tile, parts] = clock(both)
            except Exception as e:  # noqa
                print("no", N, tile, parts, e)
    rows += [{"M": M, "N": N, "dtype": str(dtype), "kernel": k[0], "tile": str(k[1]), "parts": k[2] if len(k) > 2 else 0, "us": round(us, 2), "add": round(add, 2)} for k, us in found.items()]
    print(f"M = {M}, N = {N}, {dtype}: add {add:.1f} µs")
    for design, f in page.DESIGNS.items():
        if N <= 16384 or design == "triton":
            print(f"  {design:20} {clock(lambda: f(*t, dtype)):7.1f}")
    one, columns, parts = page.wide_tiles(M, N)
    print(f"  now: dx {one} {found.get(('dx', one), 0):.1f}, columns {columns} parts {parts} {found.get(('columns', columns, parts), 0):.1f}")
    for kernel in "dx", "columns":
        best = sorted((us, k[1:]) for k, us in found.items() if k[0] == kernel)[:5]
        print(f"  {kernel:8}", *(f"{us:.1f} {plan}" for us, plan in best), sep="  ")
    del t, dx
    torch.cuda.empty_cache()
out = Path(os.environ.get("OUT", ".")) / "tune-09.csv"
with open(out, "w", newline="") as file:
    writer = csv.DictWriter(file, rows[0])
    writer.writeheader()
    writer.writerows(rows)
print(f"{time.time() - START:.0f} s")
