"""Tune page 02 on a GPU. From the repository root:

    OUT=... python 02.py [widths...]

Prints the best options of each design at each width, then a line for each of
the choices around it; writes all times to $OUT/tune-02.csv. About 80 s.
"""

import csv
import itertools
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor

sys.path.insert(0, "docs/_ext")
M = 4096
WIDTHS = [int(a) for a in sys.argv[1:]] or [1024, 1536, 2048, 4096, 6144, 8192, 8704, 12288]
ROW_WARPS = (1, 2, 4, 8, 16)
TILES = [  # ROWS, COLS, warps of the column kernel
    (r, c, w)
    for r, c, w in itertools.product((16, 32, 64, 128, 256), (16, 32, 64, 128), (4, 8))
    if 8 <= r * c // (32 * w) <= 16
]
PARTS = (4, 8, 16, 32, 64)
PROGRAMS = (128, 132, 256, 264, 396, 512, 528, 1024)
SUMS = ((64, 16, 4), (128, 16, 4), (256, 16, 4), (256, 16, 8), (64, 32, 4), (128, 8, 4), (64, 8, 2))


def row_warps(N):
    """Not so few warps that a thread has more than 64 lanes."""
    import triton

    block = triton.next_power_of_2(N)
    return [w for w in ROW_WARPS if 4 <= block // (32 * w) <= 64]


def page():
    from tutorial import load

    return load("layer-norm/02-summing-rows", interpret=False)


def warm(task):
    import torch

    p = warm.page = getattr(warm, "page", None) or page()
    kind, N, *rest = task
    h, f = torch.float16, torch.float32
    try:
        if kind == "rows":
            keep, w = rest
            block = p.triton.next_power_of_2(N)
            fn = {"none": None, "store": p._store, "atomic": p._atomic_add}[keep]
            p._layer_norm_bwd.warmup(h, h, h, f, f, h, f if fn else None, M, N, block, fn, num_warps=w, grid=(1,))
        elif kind == "columns":
            out, r, c, w = rest
            p._layer_norm_bwd_columns.warmup(h, h, f, f, out, M, N, r, c, num_warps=w, grid=(1,))
        else:
            P, r, c, w = rest
            p._layer_norm_bwd_add_up.warmup(f, h, P, 2 * N, r, c, num_warps=w, grid=(1,))
    except Exception as error:
        return f"{task}: {error}"


def main():
    import torch

    start = time.time()
    torch.cuda.set_stream(torch.cuda.Stream())
    tasks = []
    for N in WIDTHS:
        tasks += [("rows", N, k, w) for k in ("none", "store", "atomic") for w in row_warps(N)]
        tasks += [("columns", N, o, *t) for o in (torch.float16, torch.float32) for t in TILES]
        tasks += [("sum", N, P, *s) for P in (264, 256, 1, 4) for s in SUMS]
    pool = ProcessPoolExecutor(min(os.cpu_count(), 14), mp_context=multiprocessing.get_context("spawn"))
    with pool:
        for problem in pool.map(warm, tasks, chunksize=4):
            if problem:
                print(problem, flush=True)
    print(f"{len(tasks)} compiled in {time.time() - start:.0f} s", flush=True)
    p = page()
    tl_cdiv = p.triton.cdiv
    table = []

    def us(fn, quick=True):
        fn()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            fn()
        return 1e3 * p.triton.testing.do_bench(graph.replay, warmup=2, rep=8 if quick else 40, quantiles=[0.5])

    def rows(given, programs, w, sums=None, keep=None):
        dy, x, wt, mean, rstd, _ = given
        dx = torch.empty_like(x)
        p._layer_norm_bwd[(programs,)](
            dy, x, wt, mean, rstd, dx, sums, M, x.shape[1],
            p.triton.next_power_of_2(x.shape[1]), keep, num_warps=w)
        return dx

    def add(sums, o=(256, 16, 4)):
        P, _, N = sums.shape
        grads = torch.empty(2, N, dtype=torch.float16, device="cuda")
        grid = (tl_cdiv(2 * N, o[1]),)
        p._layer_norm_bwd_add_up[grid](sums, grads, P, 2 * N, o[0], o[1], num_warps=o[2])

    def note(design, N, options, fn):
        try:
            t = us(fn)
        except Exception as error:
            print(design, N, options, type(error).__name__, str(error)[:80])
            return
        table.append((design, N, " ".join(f"{k}={v}" for k, v in options.items()), round(t, 2)))

    def best(design, N):
        mine = [r for r in table if r[0] == design and r[1] == N]
        r = min(mine, key=lambda r: r[3])
        return {k: int(v) for k, v in (part.split("=") for part in r[2].split())}

    for N in WIDTHS:
        given = (*p.given(M, N, torch.float16), torch.float16)
        dy, x, wt, mean, rstd, _ = given
        note("copy", N, {}, lambda: torch.add(x, dy))
        note("torch", N, {}, lambda: p.pytorch(*given))
        for w in row_warps(N):
            note("dx", N, {"w": w}, lambda: rows(given, M, w))
        w0 = best("dx", N)["w"]

        def columns(r, c, w, parts):
            rows(given, M, w0)
            if parts == 1:
                sums = torch.empty(2, N, dtype=torch.float16, device="cuda")
            else:
                sums = torch.empty(parts, 2, N, device="cuda")
            p._layer_norm_bwd_columns[(tl_cdiv(N, c), parts)](
                dy, x, mean, rstd, sums, M, N, r, c, num_warps=w)
            if parts > 1:
                add(sums, (16 if parts <= 16 else 64, 16, 4))

        for r, c, w in TILES:
            note("columns", N, {"r": r, "c": c, "w": w}, lambda: columns(r, c, w, 1))
            if c >= 32:
                for parts in PARTS:
                    if parts * r <= M and 64 <= parts * N // c <= 4096:
                        note("split", N, {"r": r, "c": c, "w": w, "parts": parts}, lambda: columns(r, c, w, parts))

        def kept(P, w, keep, o=(256, 16, 4)):
            if keep is p._store:
                sums = torch.empty(P, 2, N, device="cuda")
            else:
                sums = torch.zeros(1, 2, N, device="cuda")
                o = (16, 16, 4)
            rows(given, P, w, sums, keep)
            add(sums, o)

        for name, keep in ("buffers", p._store), ("atomics", p._atomic_add):
            for P, w in itertools.product(PROGRAMS, row_warps(N)):
                note(name, N, {"P": P, "w": w}, lambda: kept(P, w, keep))
        b = best("buffers", N)
        for o in SUMS:
            note("sum", N, dict(zip("rcw", o)), lambda: kept(b["P"], b["w"], p._store, o))
        note("rows", N, {}, lambda: kept(M, best("atomics", N)["w"], p._atomic_add))
        line = [f"{N:6}"]
        for design in ("copy", "torch", "dx", "columns", "split", "buffers", "sum", "atomics", "rows"):
            r = min((r for r in table if r[0] == design and r[1] == N), key=lambda r: r[3])
            line.append(f"{design} {r[3]:.1f} {r[2]}")
        print(" | ".join(line), f"[{time.time() - start:.0f} s]", flush=True)
        del given, dy, x, wt, mean, rstd
    with open(os.path.join(os.environ.get("OUT", "."), "tune-02.csv"), "w") as f:
        csv.writer(f).writerows([("design", "N", "options", "us"), *table])
    # One set of options for all widths: what does each lose against the best?
    for design in ("dx", "columns", "split", "buffers", "atomics", "sum"):
        options = {}
        for d, N, o, t in table:
            if d == design:
                options.setdefault(o, {})[N] = t
        least = {N: min(v[N] for v in options.values() if N in v) for N in WIDTHS}
        print(f"\n{design}: % slower than its best at {WIDTHS}")
        ranked = sorted(options.items(), key=lambda i: sum(min(i[1].get(N, 9e9) / least[N], 3) for N in WIDTHS))
        for o, v in ranked[:12]:
            print(f"  {o:24}", *(f"{100 * (v[N] / least[N] - 1):5.0f}" if N in v else "    -" for N in WIDTHS))


if __name__ == "__main__":
    main()
