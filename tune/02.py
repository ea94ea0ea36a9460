"""Second round for pages 01 to 03 on a GPU, < 45 s. From the repository root:

OUT=... python tune/02.py
"""

import csv
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor

sys.path.insert(0, "docs/_ext")
import torch
import triton
from tutorial import load

START, LIMIT = time.time(), float(os.environ.get("LIMIT", 60))
torch.cuda.set_stream(torch.cuda.Stream())
one, two, three = (
    load(f"layer-norm/{name}", interpret=False)
    for name in ("01-layer-norm", "02-summing-rows", "03-lock")
)
M, SMS = 4096, two.NUM_SMS
WIDTHS = [1024, 1536, 2048, 3072, 4096, 4608, 6144, 8192, 8704, 12288, 15872]
cdiv, half = triton.cdiv, torch.float16


def us(fn):
    fn()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        fn()
    return 1e3 * triton.testing.do_bench(
        graph.replay, warmup=2, rep=10, return_mode="median"
    )


def add_up(sums, rows, warps):
    P, _, N = sums.shape
    grads = torch.empty(2, N, dtype=half, device="cuda")
    two._layer_norm_bwd_add_up[(cdiv(2 * N, 16),)](
        sums, grads, P, 2 * N, rows, 16, num_warps=warps
    )


def candidates(N, t):
    """(design, options, function)."""
    dy, x, w, mean, rstd = t
    P, warps = two.plan(M, N)
    per_sm = P // SMS

    def buffers(P, warps, rows, add_warps):
        sums = torch.empty(P, 2, N, device="cuda")
        two.by_rows(*t, P, warps, sums, two._store)
        add_up(sums, rows, add_warps)

    for p in sorted({P, (per_sm + 1) * SMS}):
        for rows, add_warps in (256, 8), (64, 4), (128, 4):
            o = p, warps, rows, add_warps
            yield "buffers", o, lambda o=o: buffers(*o)

    def atomics(P, warps):
        sums = torch.zeros(1, 2, N, device="cuda")
        two.by_rows(*t, P, warps, sums, two._atomic_add)
        add_up(sums, 16, 4)

    for p in range(1, per_sm + 1):
        for w in sorted({warps, 8}):
            yield "atomics", (p, w), lambda o=(p * SMS, w): atomics(*o)
    for w in (2, 4, 8, 16):
        if 4 <= triton.next_power_of_2(N) // (32 * w) <= 64:
            yield "rows", (w,), lambda w=w: atomics(M, w)

    def columns(r, c, w, parts):
        two.by_rows(*t)
        dtype = torch.float32 if parts > 1 else half
        sums = torch.empty(parts, 2, N, dtype=dtype, device="cuda")
        two._layer_norm_bwd_columns[(cdiv(N, c), parts)](
            dy, x, mean, rstd, sums, M, N, r, c, num_warps=w
        )
        if parts > 1:
            add_up(sums, 16, 4)

    for r, c in (128, 16), (64, 32):
        yield "columns", (r, c, 8), lambda o=(r, c, 8, 1): columns(*o)
    rule = max(1, min(16, 32768 // N))
    parts = {rule, rule + 1, rule - 1, 2 * rule, 4, 8, 16} - {0, 1}
    for p in sorted(p for p in parts if p <= 32):
        for o in (32, 32, 4, p), (16, 64, 4, p):
            yield "split", o, lambda o=o: columns(*o)

    def lock(*plan):
        three.backward(*t, plan, half)

    own = three.own_buffers(M, N)
    yield "own", own, lambda: lock(*own)
    block = triton.next_power_of_2(N)
    for p in {own[0]} | ({2 * SMS} if N >= 8192 else set()):
        for b in sorted({p // 8, p // 4, p // 2, min(256, p - 1)}):
            for w in (4, 8, 16):
                if 8 <= block // (32 * w) <= 64 and (N >= 8192 or w < 16):
                    o = p, b, w
                    yield "lock", o, lambda o=o: lock(*o)
    for b in (128, 256):
        for w in (4, 8):
            if block // (32 * w) <= 64:
                o = M, b, w
                yield "each row", o, lambda o=o: lock(*o)


def warm(c):
    try:
        c[2]()
    except Exception as error:
        print("no", c[:2], str(error)[:80])


given = {N: two.given(M, N, half) for N in WIDTHS}
found = {N: list(candidates(N, given[N])) for N in WIDTHS}
everything = [c for N in WIDTHS for c in found[N]]
with ThreadPoolExecutor(32) as pool:
    list(pool.map(warm, everything))
torch.cuda.synchronize()
print(f"{len(everything)}, compiled in {time.time() - START:.0f} s", flush=True)
table = []
for N in WIDTHS:
    t, rows = given[N], {}
    add = us(lambda: torch.add(t[1], t[0]))
    for design, options, fn in found[N]:
        if time.time() - START < LIMIT:
            try:
                time_us = us(fn)
            except Exception as error:
                print("no", design, options, str(error)[:80])
                continue
            rows.setdefault(design, []).append((time_us, options))
            table.append((N, design, *options, f"{time_us:.2f}"))
    rules = {k: f for k, f in two.DESIGNS.items()}
    now = {k: us(lambda: f(*t, half)) for k, f in rules.items()}
    leaves = [v.detach().requires_grad_() for v in (t[1], t[2], t[2].clone())]
    y = one.layer_norm(leaves[0], N, *leaves[1:])
    grad = torch.autograd.grad
    now["page 01"] = us(lambda: grad(y, leaves, t[0], retain_graph=True))
    for name, plan in three.PLANS.items():
        y3 = three.layer_norm(leaves[0], (N,), *leaves[1:], plan=plan)
        now[f"03 {name}"] = us(
            lambda: grad(y3, leaves, t[0], retain_graph=True)
        )
    print(f"N {N:5} add {add:.1f}; now", *(f"{k} {v:.1f}" for k, v in now.items()), sep="  ")
    for design, times in rows.items():
        best = sorted(times)[:5]
        print(f"  {design:9}", *(f"{v:.1f} {o}" for v, o in best), sep="  ")
    sys.stdout.flush()
with open(os.path.join(os.environ.get("OUT", "."), "tune-02.csv"), "w") as f:
    csv.writer(f).writerows([("N", "design", "options...", "us"), *table])
print(f"{time.time() - START:.0f} s")
