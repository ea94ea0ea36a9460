"""What the tuning scripts of the fused pages share: compile, time, write."""

import csv
import multiprocessing
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs/_ext"))
import torch

START, M, SECONDS = time.time(), 4096, 100


def cdiv(a, b):
    return -(-a // b)


def power(n):
    return 1 << (n - 1).bit_length()


def load(name):
    """The page, on a stream of its own, as its benchmarks run."""
    from tutorial import load

    page = load(name, interpret=False)
    torch.cuda.set_stream(torch.cuda.Stream())
    return page


def captured(fn):
    fn()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        fn()
    return graph


def replays(graph, flush, n):
    """µs of replays of a CUDA graph, L2 overwritten before each."""
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in "ab"] for _ in range(n)]
    for a, b in pairs:
        flush.zero_()
        a.record()
        graph.replay()
        b.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) * 1e3 for a, b in pairs]


def clock(fn, flush, n=15):
    """µs: the median of replays."""
    return sorted(replays(captured(fn), flush, n))[n // 2]


def compiled(compile, jobs, many):
    """Runs compile(job) for all jobs, on all cores."""
    with multiprocessing.get_context("fork").Pool(os.cpu_count()) as pool:
        pool.map(compile, jobs, 1)
    print(f"compiled {many} in {time.time() - START:.0f} s")


def write(name, fields, rows):
    with open(Path(os.environ.get("OUT", ".")) / f"tune-{name}.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, fields)
        writer.writeheader()
        writer.writerows(rows)
    print(f"{len(rows)} timed, {time.time() - START:.0f} s")


def backward_plans(N, matrices, most=56):
    """Of 16 bits; per_sm is programs a multiprocessor, no part of a kernel."""
    for warps in (4, 8, 16):
        chunk = min(256 * warps, max(power(N), 16))
        chunks = cdiv(N, chunk)
        for rows in (1, 2, 4, 8):
            columns = rows * chunks * chunk / (32 * warps)
            if not 16 <= columns <= (most if warps < 16 else 28):
                continue
            tile = matrices * rows * chunks * chunk * 2
            for stages in (2, 3, 4) if N > 8192 else (3, 4):
                for per_sm in (1, 2) if warps * columns <= 160 else (1,):
                    if 48000 <= per_sm * (stages - 1) * tile <= 220000:
                        yield {"ROWS": rows, "CHUNK": chunk, "num_warps": warps, "STAGES": stages, "per_sm": per_sm}


def _compile(job):
    start, mode, N, plans = job
    call = start()[0](mode, N)
    for plan in plans:
        try:
            call(plan)
        except Exception as e:  # noqa
            print("no", mode, N, plan, str(e)[:100])
    torch.cuda.synchronize()


def main(name, start, work):
    """start() gives call(mode, N) -> fn(plan), now(mode, N) -> fn() as the
    page has it, and ceilings(mode, N) -> {name: fn}; work is (mode, N, plans).
    The ceilings are listed first: the fastest of them is 100 %.
    """
    work = [(mode, N, list(plans)) for mode, N, plans in work]
    jobs = []
    for mode, N, plans in work:
        kernels = list({str(p | {"per_sm": 1}): p for p in plans}.values())
        jobs += [(start, mode, N, kernels[i : i + 3]) for i in range(0, len(kernels), 3)]
    jobs.sort(key=lambda job: -job[2])
    compiled(_compile, jobs, sum(len(p) for *_, p in work))
    call, now, ceilings = start()
    flush, rows = torch.empty(2**28, dtype=torch.int8, device="cuda"), []
    for mode, N, plans in work:
        if time.time() - START > SECONDS:
            print("no time left for", mode, N)
            continue
        tops = {k: clock(fn, flush) for k, fn in ceilings(mode, N).items()}
        top, mine = min(tops.values()), clock(now(mode, N), flush)
        run, found = call(mode, N), []
        for plan in plans:
            try:
                us = clock(lambda: run(plan), flush)
            except Exception as e:  # noqa
                print("no", mode, N, plan, str(e)[:100])
                continue
            found.append((us, plan))
            rows.append({"mode": mode, "N": N, "us": round(us, 2), "page": round(mine, 2), "ceiling": round(top, 2), **plan})
        print(f"{mode} N = {N}: page {mine:.1f} µs, {100 * top / mine:.0f} %;", *(f"{k} {v:.1f}" for k, v in tops.items()))
        for us, plan in sorted(found, key=lambda f: f[0])[:5]:
            print(f"   {us:6.1f} {100 * top / us:4.0f} %", *(f"{k}={v}" for k, v in plan.items()))
    write(name, sorted({k for r in rows for k in r}), rows)
