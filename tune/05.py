"""Second round for layer-norm/05-chunks: what the first one did not try.

python tune/05.py [root of the checkout]; table on stdout, CSV in $OUT.
Forward: rows of a tile and warps apart. Backward: programs a multiprocessor,
five stages, warps and rows apart, rows beyond 10240 columns.
"""
import csv, multiprocessing, os, sys, time
from pathlib import Path

ROOT = Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve()
sys.path.insert(0, str(ROOT / "docs/_ext"))
import torch
import triton

M, START, SMS = 4096, time.time(), 132
FORWARD = [512, 1024, 1536, 2560, 6656, 14848, 24576]
BACKWARD = [256, 1024, 1536, 2048, 2560, 3072, 10752, 12288]
page = None


def cdiv(a, b):
    return -(-a // b)


def forward_plans(N):
    wide = triton.next_power_of_2(N)
    for warps in (1, 2, 4, 8, 16):
        chunk = min(256 * warps, wide)
        for rows in (1, 2, 4, 8) if N <= 2560 else (1,):
            lanes = rows * cdiv(N, chunk) * chunk / (32 * warps)
            if 8 <= lanes <= (36 if N <= 2560 else 64):
                for hint in ("evict_first",) if N < 6000 else ("",):
                    yield {"ROWS": rows, "CHUNK": chunk, "HINT": hint, "num_warps": warps}
                if 14336 <= N and warps == 16 or N == 14848 and warps == 8:
                    yield {"ROWS": rows, "CHUNK": chunk, "HINT": "", "num_warps": warps, "maxnreg": 1024 // warps}


def backward_plans(N):
    """With per_sm, which is not a part of the kernel."""
    wide = triton.next_power_of_2(N)
    for warps in (2, 4, 8, 16):
        chunk = min(256 * warps, wide)
        for rows in (1, 2, 4, 8, 16):
            lanes = rows * cdiv(N, chunk) * chunk / (32 * warps)
            most = 48 if warps < 16 else 32
            if N > 10240:
                if rows > 1 or warps < 8 or lanes > 56:
                    continue
            elif warps == 16 or not 8 <= lanes <= most:
                continue
            for stages in (2, 3) if N > 10240 else (4, 5):
                tile = 4 * rows * cdiv(N, chunk) * chunk
                for per_sm in (1, 2, 3):
                    flight = per_sm * (stages - 1) * tile
                    if per_sm * warps > (8 if lanes > 16 else 16) and per_sm > 1:
                        continue
                    if (12000 if N < 512 else 30000) <= flight <= 200000:
                        yield {"ROWS": rows, "CHUNK": chunk, "num_warps": warps, "STAGES": stages, "per_sm": per_sm}


def calls(mode, N):
    x, w, b, dy = (t.detach() for t in page.inputs(M, N, torch.float16))
    if mode == "forward":
        return lambda plan: page.forward(x, w, b, 1e-5, plan)
    mean, rstd = -2.3 * torch.ones(M, device="cuda"), 2 * torch.ones(M, device="cuda")
    dx, grads = torch.empty_like(x), torch.empty(2, N, dtype=x.dtype, device="cuda")
    sums = torch.empty(4 * SMS, 2, N, device="cuda")

    def backward(plan):
        plan = dict(plan)
        programs = min(plan.pop("per_sm") * SMS, cdiv(M, plan["ROWS"]))
        page._layer_norm_bwd_chunks[(programs,)](dy, x, w, mean, rstd, dx, sums, M, N, EARLY=page.EARLY, **plan)
        rows = max(triton.next_power_of_2(programs), 256)
        page._add_up_chunks[(cdiv(2 * N, 16),)](sums, grads, programs, 2 * N, rows, 16, page.EARLY, launch_pdl=True)

    return backward


def start():
    global page
    from tutorial import load

    page = load("layer-norm/05-chunks", interpret=False)
    torch.cuda.set_stream(torch.cuda.Stream())


def compile_some(job):
    mode, N, plans = job
    call = calls(mode, N)
    for plan in plans:
        try:
            call(plan)
        except Exception as e:  # noqa
            print("no", mode, N, plan, str(e)[:80])
    torch.cuda.synchronize()


PLANS = {"forward": forward_plans, "backward": backward_plans}
WORK = [("forward", N) for N in FORWARD] + [("backward", N) for N in BACKWARD]


def main():
    jobs = []
    for mode, N in WORK:
        plans = list(PLANS[mode](N))
        # One of each kernel; of programs the last one only asks for a power of two.
        kernels = list({str(p | {"per_sm": p.get("per_sm", 1) > 1}): p for p in plans}.values())
        jobs += [(mode, N, kernels[i : i + 4]) for i in range(0, len(kernels), 4)]
    jobs.sort(key=lambda job: -job[1])
    with multiprocessing.get_context("fork").Pool(min(40, os.cpu_count()), start) as pool:
        pool.map(compile_some, jobs, 1)
    print(f"compiled {sum(len(j[2]) for j in jobs)} in {time.time() - START:.0f} s")
    start()
    rows = []
    for mode, N in WORK:
        call = calls(mode, N)
        x, dy, out = (torch.randn(M, N, device="cuda").half() for _ in range(3))
        copy = page.device_time((lambda: out.copy_(x)) if mode == "forward" else (lambda: torch.add(x, dy, out=out)))[0] * 1e3
        found = []
        for plan in PLANS[mode](N):
            try:
                us = page.device_time(lambda: call(plan))[0] * 1e3
            except Exception as e:  # noqa
                print("no", N, plan, str(e)[:80])
                continue
            found.append((us, plan))
            rows.append({"mode": mode, "N": N, "us": round(us, 2), "copy": round(copy, 2), **plan})
        print(f"{mode} N = {N}: copy {copy:.1f} µs")
        for us, plan in sorted(found, key=lambda f: f[0])[:7]:
            print(f"   {us:6.1f} {100 * copy / us:4.0f} %", *(f"{k}={v}" for k, v in plan.items()))
    with open(Path(os.environ.get("OUT", ".")) / "tune-05.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, sorted({k for r in rows for k in r}))
        writer.writeheader()
        writer.writerows(rows)
    print(f"{len(rows)} timed, {time.time() - START:.0f} s")


if __name__ == "__main__":
    main()
