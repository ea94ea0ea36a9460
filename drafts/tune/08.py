"""Tune the plans of layer-norm/08-shared-rows.

python drafts/tune/08.py [root of the checkout]; table on stdout, CSV in $OUT.
"""
import csv, os, sys, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve()
sys.path.insert(0, str(ROOT / "docs/_ext"))
import torch
import triton
from tutorial import load

NAME = "layer-norm/08-shared-rows"
page = load(NAME, interpret=False)
# Two numbers of 16 bits in one register while a tile waits.
PACK = '''
@triton.jit
def _pack(tile):
    bits = tile.to(tl.uint16, bitcast=True)
    pairs = tl.reshape(bits, [tile.shape[0], tile.shape[1] // 2, 2])
    low, high = tl.split(pairs)
    return low.to(tl.uint32) | high.to(tl.uint32) << 16


@triton.jit
def _unpack(words, kind: tl.constexpr):
    low = words.to(tl.uint16).to(kind, bitcast=True)
    high = (words >> 16).to(tl.uint16).to(kind, bitcast=True)
    pairs = tl.join(low.to(tl.float32), high.to(tl.float32))
    return tl.reshape(pairs, [words.shape[0], 2 * words.shape[1]])


@triton.jit
def _add_pairs('''
packed = load(NAME, [
    ("\n@triton.jit\ndef _add_pairs(", PACK),
    ("    x1 = tl.zeros((ROWS, LANES), x_ptr.dtype.element_ty)\n", "    x1 = _pack(tl.zeros((ROWS, LANES), x_ptr.dtype.element_ty))\n"),
    ("            x1, dy1, w, mean, rstd, sum1, sum2, dw, db, N\n", "            _unpack(x1, x_ptr.dtype.element_ty), _unpack(dy1, x_ptr.dtype.element_ty), w, mean, rstd, sum1, sum2, dw, db, N\n"),
    ("        x1, dy1 = x, dy\n", "        x1, dy1 = _pack(x), _pack(dy)\n"),
], interpret=False)
torch.cuda.set_stream(torch.cuda.Stream())
S = page.NUM_SMS
WIDTHS = [65536, 131072, 262144, 2**19, 2**20]
START = time.time()

# rows, lanes, warps, programs a multiprocessor
FORWARD = [(r, 4096, 8, 2) for r in (1, 2, 4)] + [(r, 8192, w, 1) for r in (1, 2, 4) for w in (8, 16)]
FORWARD += [(r, 2048, 4, 4) for r in (2, 4)] + [(4, 2048, 8, 2), (4, 4096, 16, 1)]
BACKWARD = [(r, 1024, 4, p) for r in (2, 4) for p in (3, 4)] + [(r, 2048, w, 2) for r in (1, 2, 4) for w in (4, 8)]
BACKWARD += [(r, 4096, w, 1) for r in (1, 2, 4) for w in (8, 16)] + [(r, 8192, w, 1) for r in (1, 2) for w in (8, 16)]


def tensors(M, N):
    x, dy = torch.randn(2, M, N, dtype=torch.float16, device="cuda")
    w, b = torch.rand(2, N, dtype=torch.float16, device="cuda")
    return x, dy, w, b, torch.empty_like(x), torch.randn(M, device="cuda"), torch.rand(M, device="cuda")


def sensible(N, plan):
    _, lanes, _, per_sm = plan
    return 1 < N / lanes <= S * per_sm


COMPILE = False  # only compile


def launch(kernel, programs, *args, per_sm, warps):
    """As together(); COMPILE does not run: several at a time might not fit."""
    registers = min(65536 // (32 * warps * per_sm) // 8 * 8, 255)
    options = {"num_warps": warps, "maxnreg": registers, "launch_cooperative_grid": True, "PTX": True}
    if COMPILE:
        return kernel.warmup(*args, grid=(programs,), **options)
    return kernel[(programs,)](*args, **options)


def forward(given, plan, later=True, module=page):
    x, _, w, b, y, mean, rstd = given
    M, N = x.shape
    rows, lanes, warps, per_sm = plan
    _, programs, words, tiles = module.cut(M, N, rows, lanes, per_sm)
    args = x, w, b, y, mean, rstd, words, M, 1e-5, N, *tiles, later
    launch(module._layer_norm_fwd_shared, programs, *args, per_sm=per_sm, warps=warps)


def backward(given, plan, module=page):
    x, dy, w, _, dx, mean, rstd = given
    M, N = x.shape
    rows, lanes, warps, per_sm = plan
    groups, programs, words, tiles = module.cut(M, N, rows, lanes, per_sm)
    sums = mean.new_empty(groups, 2, N)
    args = dy, x, w, mean, rstd, dx, words, sums, M, N, *tiles
    launch(module._layer_norm_bwd_shared, programs, *args, per_sm=per_sm, warps=warps)
    sums.sum(0)


STEPS = {
    "forward": (forward, FORWARD),
    "at once": (lambda g, p: forward(g, p, False), FORWARD[:3]),
    "backward": (backward, BACKWARD),
    "packed": (lambda g, p: backward(g, p, packed), [p for p in BACKWARD if p[0] * p[1] >= 8192]),
}


def rows_of(N):
    return min(4096, 2**28 // N)


flush = torch.empty(256 * 2**20, dtype=torch.int8, device="cuda")


def clock(fn, n=8):
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
    M = rows_of(N)
    given = tensors(M, N)
    x, dy, w, b, y, mean, rstd = given
    # Compile all of this width side by side, then time one after the other.
    jobs = [(name, plan) for name, (_, plans) in STEPS.items() for plan in plans if sensible(N, plan)]
    began = time.time()

    def attempt(job):
        try:
            STEPS[job[0]][0](given, job[1])
        except Exception as e:  # noqa
            print("no", N, job, str(e)[:150])

    COMPILE = True
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(attempt, jobs))
    torch.cuda.synchronize()
    COMPILE = False
    copy, add = clock(lambda: torch.mul(x, 1, out=y)), clock(lambda: torch.add(x, dy, out=y))
    now = clock(lambda: page.forward(x, w, b, 1e-5))
    once = clock(lambda: page.forward(x, w, b, 1e-5, False))
    back = clock(lambda: page.backward(dy, x, w, mean, rstd))
    print(f"N = {N}, M = {M}: copy {copy:.1f}, add {add:.1f} µs; compiled in {time.time() - began:.0f} s; now forward {now:.1f}"
          f" ({100 * copy / now:.0f} %), at once {once:.1f} ({100 * copy / once:.0f} %), backward {back:.1f} ({100 * add / back:.0f} %)")
    for name, (step, plans) in STEPS.items():
        found, best = [], add if name in ("backward", "packed") else copy
        for plan in plans:
            if not sensible(N, plan):
                continue
            try:
                found.append((clock(lambda: step(given, plan)), plan))
            except Exception as e:  # noqa
                print("no", name, N, plan, str(e)[:100])
                continue
            rows.append({"N": N, "kernel": name, "plan": plan, "us": round(found[-1][0], 2), "copy": round(copy, 2), "add": round(add, 2)})
        print(f"  {name:8}", *(f"{us:.1f} ({100 * best / us:.0f} %) {p}" for us, p in sorted(found)[:5]), sep="  ")
    del given, x, dy, y
out = Path(os.environ.get("OUT", ".")) / "tune-08.csv"
with open(out, "w", newline="") as file:
    writer = csv.DictWriter(file, rows[0])
    writer.writeheader()
    writer.writerows(rows)
print(f"{time.time() - START:.0f} s")
