"""Second round for layer-norm/09-two-passes: what the first lacks.

python tune/09.py [root of the checkout]; table on stdout, CSV in $OUT.
The dx kernel by itself; all designs as they are; parts at 4608 and 512 columns;
about 30 s.
"""
import csv, os, sys, time
from pathlib import Path

ROOT = Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve()
sys.path.insert(0, str(ROOT / "docs/_ext"))
import torch
from tutorial import load

page = load("layer-norm/09-two-passes", interpret=False)
torch.cuda.set_stream(torch.cuda.Stream())
START, rows = time.time(), []
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


for N in 1024, 2048, 4096, 8192:
    print(f"dx alone, N = {N}:", *(f"{p} {page.dx_speed.fn(4096, N, torch.float16, 'dx', p)[0]:.0f} GB/s" for p in ("triton", "tile", "copy")))
half, sizes = torch.float16, [(4096, 512 * i) for i in (2, 3, 4, 8, 9, 16, 17, 31)]
jobs = [(*s, half) for s in sizes] + [(1024, N, torch.float32) for N in (128, 512, 2048)] + [(1024, 2**i, half) for i in (15, 17, 20)]
for M, N, dtype in jobs:
    x, w, _, dy = (t.detach() for t in page.inputs(M, N, dtype))
    given = dy, x, w, *torch.rand(2, M, device="cuda"), dtype
    found = {"add": clock(lambda: torch.add(x, dy))}
    for name, design in page.DESIGNS.items():
        if N <= 16384 or name == "triton":
            found[name] = clock(lambda: design(*given))
    if (M, N) in ((4096, 4608), (1024, 512), (4096, 1536)):
        tile, columns, parts = page.wide_tiles(M, N)
        for other in (parts // 2, parts - 1, parts + 1, 2 * parts):
            found[f"parts {other}, not {parts}"] = clock(lambda: page.two_kernels(lambda *_: (tile, columns, other), *given))
    rows += [{"M": M, "N": N, "dtype": str(dtype), "what": what, "us": round(us, 2)} for what, us in found.items()]
    print(f"{M} x {N} {dtype}:", *(f"{what} {us:.1f}" for what, us in found.items()), sep="  ")
with open(Path(os.environ.get("OUT", ".")) / "tune-09.csv", "w", newline="") as file:
    writer = csv.DictWriter(file, rows[0])
    writer.writeheader()
    writer.writerows(rows)
print(f"{time.time() - START:.0f} s")
