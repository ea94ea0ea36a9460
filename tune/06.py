"""Second round for layer-norm/06-unaligned-rows: what the first one did not try.

python tune/06.py [root of the checkout]; table on stdout, CSV in $OUT.
Backward: programs a multiprocessor, two warps, five stages; 16 warps, for rows
beyond 10232 columns. Forward: a few near the edges of the rule.
"""
import csv, multiprocessing, os, sys, time
from pathlib import Path

ROOT = Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve()
sys.path.insert(0, str(ROOT / "docs/_ext"))
import torch
import triton

M, START, SMS = 4096, time.time(), 132
FORWARD = [1151, 2047, 4097, 7777, 12345]
BACKWARD = [300, 1151, 2047, 3001, 4097, 5003, 7777, 12345, 16381]
page = None


def cdiv(a, b):
    return -(-a // b)


def lanes_of(N, chunk):
    return cdiv(N + 7, chunk) * chunk


def forward_plans(N):
    for warps in (1, 2, 4, 8):
        for piece in (128, 256):
            chunk = piece * warps
            lanes = lanes_of(N, chunk) / (32 * warps)
            if not 32 <= lanes <= 72 or (piece == 256) != (warps == 8):
                continue
            for stages in (3, 4, 5):
                for per_sm in (8 // warps, 12 // warps):
                    if 2 * N * per_sm * (stages - 1) <= 160000:
                        yield {"ROWS": 1, "CHUNK": chunk, "num_warps": warps, "STAGES": stages, "STEP": 8, "per_sm": per_sm}


def backward_plans(N):
    """With per_sm, which is not a part of the kernel."""
    wide = triton.next_power_of_2(N + 7)
    for warps in (2, 4, 8, 16):
        for piece in (128, 256):
            chunk = min(piece * warps, wide)
            for rows in (1, 2, 4) if N <= 2047 else (1,):
                lanes = rows * lanes_of(N, chunk) / (32 * warps)
                if N > 10240:
                    if warps < 8 or warps == 8 and N > 13000 or piece * warps < 2048:
                        continue
                elif warps == 16 or not 8 <= lanes <= 48 or N < 5000 and warps == 8 or N > 4500 and piece == 128:
                    continue
                for stages in (2, 3) if N > 10240 else (3, 4, 5):
                    for per_sm in (1, 2, 3):
                        flight = per_sm * (stages - 1) * 4 * rows * N
                        if per_sm > 1 and per_sm * warps > (8 if lanes > 24 else 12):
                            continue
                        if (8000 if N < 512 else 30000) <= flight <= 180000:
                            yield {"ROWS": rows, "CHUNK": chunk, "num_warps": warps, "STAGES": stages, "STEP": 8, "per_sm": per_sm}


def programs_of(plan):
    """Rows that are 8 apart have one shift: 8 programs are the least."""
    return min(plan.pop("per_sm") * SMS // 8, cdiv(M, 8 * plan["ROWS"])) * 8


def calls(mode, N):
    x, w, b, dy = (t.detach() for t in page.inputs(M, N, torch.float16))
    y, mean, rstd = torch.empty_like(x), torch.full((M,), -2.3, device="cuda"), torch.full((M,), 2.0, device="cuda")
    sums, grads = torch.empty(4 * SMS, 2, N, device="cuda"), torch.empty(2, N, dtype=x.dtype, device="cuda")

    def forward(plan):
        plan = dict(plan)
        programs = programs_of(plan)
        page._layer_norm_fwd_shifted[(programs,)](x, w, b, y, mean, rstd, M, N, 1e-5, N, **plan)

    def backward(plan):
        plan = dict(plan)
        programs = programs_of(plan)
        page._layer_norm_bwd_shifted[(programs,)](dy, x, w, mean, rstd, y, sums, M, N, N, EARLY=page.EARLY, **plan)
        rows = max(triton.next_power_of_2(programs), 256)
        page._add_up_chunks[(cdiv(2 * N, 16),)](sums, grads, programs, 2 * N, rows, 16, page.EARLY, launch_pdl=True)

    return forward if mode == "forward" else backward


def start():
    global page
    from tutorial import load

    page = load("layer-norm/06-unaligned-rows", interpret=False)
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
    with open(Path(os.environ.get("OUT", ".")) / "tune-06.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, sorted({k for r in rows for k in r}))
        writer.writeheader()
        writer.writerows(rows)
    print(f"{len(rows)} timed, {time.time() - START:.0f} s")


if __name__ == "__main__":
    main()
