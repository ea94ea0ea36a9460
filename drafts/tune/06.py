"""Tune the formulas of layer-norm/06-unaligned-rows.

python drafts/tune/06.py [root of the checkout]; table on stdout, CSV in $OUT.
"""
import csv, os, sys, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve()
sys.path.insert(0, str(ROOT / "docs/_ext"))
import torch
import triton
from tutorial import load

page = load("layer-norm/06-unaligned-rows", interpret=False)
torch.cuda.set_stream(torch.cuda.Stream())
M, START = 4096, time.time()
FORWARD = [300, 1151, 2047, 3001, 4097, 5003, 7777, 10235, 12345, 16381]
BACKWARD = [300, 1151, 2047, 3001, 4097, 5003, 7777, 10231]
STEP = 8


def candidates(mode, N):
    for per_warp in (128, 256):  # columns of a chunk
        for warps in (1, 2, 4, 8) if mode == "forward" else (4, 8):
            for row in (1, 2, 4, 8):
                if row > warps or (mode == "forward" and row < warps and N > 2048):
                    continue
                chunk = per_warp * row
                rows = warps // row
                lanes = rows * triton.cdiv(N + 7, chunk) * chunk
                most = 72 if mode == "forward" else 40
                if chunk > 2 * N or not 4 <= lanes // (32 * warps) <= most:
                    continue
                for stages in (3, 4):
                    bytes = (2 if mode == "forward" else 4) * lanes * (stages - 1) * (8 // warps)
                    if bytes <= 120000:
                        yield {"CHUNK": chunk, "ROWS": rows, "num_warps": warps, "STAGES": stages, "STEP": STEP}


def calls(mode, N):
    x, w, b, dy = (t.detach() for t in page.inputs(M, N, torch.float16))
    y, (mean, rstd) = torch.empty_like(x), torch.ones(2, M, device="cuda")
    sums, grads = torch.empty(264, 2, N, device="cuda"), torch.empty(2, N, dtype=x.dtype, device="cuda")
    early = {"launch_pdl": True} if page.EARLY else {}

    def forward(plan):
        grid = (page.programs_for(M, plan),)
        page._layer_norm_fwd_shifted[grid](x, w, b, y, mean, rstd, M, N, 1e-5, N, **plan)

    def backward(plan):
        programs = page.programs_for(M, plan)
        page._layer_norm_bwd_shifted[(programs,)](dy, x, w, mean, rstd, y, sums, M, N, N, EARLY=page.EARLY, **plan)
        rows = triton.next_power_of_2(programs)
        page._add_up_chunks[(triton.cdiv(2 * N, 16),)](sums, grads, programs, 2 * N, rows, 16, page.EARLY, **early)

    return forward if mode == "forward" else backward


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
OURS = {"forward": lambda N, size, step=STEP: page.plan_forward(N, size, step), "backward": lambda N, size, step=STEP: page.plan_backward(N, size, step)}


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
    for name, plan in [("formula", rule(N, 2)), ("from column 0", rule(N, 2, 1)), *(("", p) for p in candidates(mode, N))]:
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
out = Path(os.environ.get("OUT", ".")) / "tune-06.csv"
with open(out, "w", newline="") as file:
    writer = csv.DictWriter(file, sorted({k for r in rows for k in r}))
    writer.writeheader()
    writer.writerows(rows)
print(f"{time.time() - START:.0f} s")
