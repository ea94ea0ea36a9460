"""Candidates for the plans of norms-and-losses/01-rms-norm.

python tune/norms-01.py [root of the checkout]; table on stdout, CSV in $OUT.
Forward with and without a residual: warps and hints, and what each rule of
plan_forward loses. Backward, the same: warps, programs a multiprocessor,
stages, HIDE. The ceiling: size of a tile and warps. Without a GPU every call
is tried once, at toy size.
"""
import csv, itertools, math, multiprocessing, os, shutil, sys, time
from pathlib import Path

ROOT = Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve()
sys.path.insert(0, str(ROOT / "docs/_ext"))
# Not asked of torch: a process that has asked CUDA cannot be forked.
DRY = shutil.which("nvidia-smi") is None
if DRY:
    os.environ["TRITON_INTERPRET"] = "1"
import torch
import triton

M, START = 2 if DRY else 4096, time.time()
WIDTHS = [64, 100] if DRY else [2048, 3072, 4096, 5120, 8192, 12288, 16384]
WORK = [(f"ceiling {mode}", True, N) for mode in ("forward", "backward") for N in WIDTHS[::3]]
WORK += itertools.product(("forward", "backward"), (True, False), WIDTHS)
page = None


def plans(mode, fused, N):
    wide = triton.next_power_of_2(N)
    if mode.startswith("ceiling"):
        for block, warps in itertools.product((1024, 2048, 4096, 8192, 16384, 32768), (2, 4, 8, 16, 32)):
            if 8 <= block / (32 * warps) <= 64 and (M * N) % block == 0 or DRY and block == 1024:
                yield {"BLOCK": block, "num_warps": warps}
        return
    for warps in (2, 4, 8, 16, 32):
        chunk = min(256 * warps, wide)
        held = -(-N // chunk) * chunk / (32 * warps)  # columns a thread
        if mode == "forward":
            for hint in ("", "evict_first"):
                if DRY or 8 <= held <= (48 if fused else 72):
                    yield {"CHUNK": chunk, "HINT": hint, "num_warps": warps}
            continue
        for per_sm, stages, hide in itertools.product((1, 2, 3, 4), (2, 3, 4), (False, True)):
            tile = -(-N // chunk) * chunk * 2 * (3 if fused else 2)
            if hide != (N > 12288) and N != 12288 or per_sm * warps > 16 or not DRY and not 8 <= held <= 64:
                continue
            flight = per_sm * (stages - 1) * tile
            if DRY or 30000 <= flight <= 232448 - 2048 * per_sm:
                yield {"CHUNK": chunk, "num_warps": warps, "per_sm": per_sm, "STAGES": stages, "HIDE": hide}


def calls(mode, fused, N):
    given = x, residual, w, dy, ds = page.inputs(M, N, torch.bfloat16)
    if mode.startswith("ceiling"):
        a, b, writes = x.detach(), residual.detach(), 2 if mode.endswith("forward") else 1
        return lambda p: page._move[(max(x.numel() // p["BLOCK"], 0),)](a, b, ds, dy, writes, p["BLOCK"], num_warps=p["num_warps"])
    x, residual, w = x.detach(), residual.detach() if fused else None, w.detach()
    if mode == "forward":
        return lambda p: page.forward(x, residual, w, 1e-6, p)
    _, s, rstd = page.forward(x, residual, w, 1e-6)
    return lambda p: page.backward(dy, ds if fused else None, s, w, rstd, p)


def start():
    global page
    from tutorial import load

    page = load("norms-and-losses/01-rms-norm", interpret=DRY)
    if not DRY:
        torch.cuda.set_stream(torch.cuda.Stream())


def compile_some(job):
    *shape, some = job
    call = calls(*shape)
    for plan in some:
        try:
            call(plan)
        except Exception as e:  # noqa
            print("no", *shape, plan, str(e)[:80])
    if not DRY:
        torch.cuda.synchronize()


def rules(found):
    """What rules with these limits lose against the best, over all widths."""
    for fused in True, False:
        for most, least in itertools.product((1024, 2048, 4096, 8192), (2, 4, 8)):
            lost = []
            for N in WIDTHS:
                plan = page.plan_forward(N, (2, 2) if fused else (2,), most, least)
                times = {str(p): us for us, p in found["forward", fused, N]}
                lost.append(times.get(str(plan), math.nan) / min(times.values()))
            print(f"forward fused={fused} most={most} least={least}:", *(f"{v:.3f}" for v in lost), f"mean {math.prod(lost) ** (1 / len(lost)):.3f}")


def main():
    jobs = []
    for shape in WORK:
        all_of_it = list(plans(*shape))
        # Programs a multiprocessor are no part of the kernel.
        kernels = list({str({k: v for k, v in p.items() if k != "per_sm"}): p for p in all_of_it}.values())
        jobs += [(*shape, kernels[i : i + 4]) for i in range(0, len(kernels), 4)]
    jobs.sort(key=lambda job: -job[2])
    if DRY:
        start()
        list(map(compile_some, jobs))
    else:
        with multiprocessing.get_context("fork").Pool(min(40, os.cpu_count()), start) as pool:
            pool.map(compile_some, jobs, 1)
        start()
    print(f"compiled {sum(len(j[-1]) for j in jobs)} in {time.time() - START:.0f} s")
    rows, found = [], {}
    for shape in WORK:
        mode, fused, N = shape
        call, best = calls(*shape), []
        for plan in plans(*shape):
            try:
                us = page.device_time(lambda: call(plan))[0] * 1e3
            except Exception as e:  # noqa
                print("no", *shape, plan, str(e)[:80])
                continue
            best.append((us, plan))
            rows.append({"mode": mode, "fused": fused, "N": N, "us": round(us, 2), **plan})
        found[shape] = best
        moved = 4 if fused else 2 if mode == "forward" else 3
        rule = {"forward": lambda: page.plan_forward(N, (2, 2) if fused else (2,)), "backward": lambda: page.plan_backward(N, (2, 2, 2) if fused else (2, 2))}.get(mode)
        print(f"{mode} fused={fused} N={N}", f"rule {rule()}" if rule else "")
        for us, plan in sorted(best, key=lambda f: f[0])[:6]:
            print(f"   {us:6.1f} us {moved * 2 * M * N / us * 1e-3:5.0f} GB/s", *(f"{k}={v}" for k, v in plan.items()), "<- rule" if rule and plan == rule() else "")
        if rule:
            print(*(f"   rule {us:6.1f} us" for us, plan in best if plan == rule()))
    rules(found)
    with open(Path(os.environ.get("OUT", ".")) / "tune-norms-01.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, sorted({k for r in rows for k in r}))
        writer.writeheader()
        writer.writerows(rows)
    print(f"{len(rows)} timed, {time.time() - START:.0f} s")


if __name__ == "__main__":
    main()
