"""Candidates for the plans of norms-and-losses/02-rms-norm-16-bits.

python tune/norms-02.py [root of the checkout]; table on stdout, CSV in $OUT.
With gemma's casting and an offset, alone and with a stream in float32:
forward warps, backward warps, programs a multiprocessor and stages. What the
page has now stands first. Without a GPU every call is tried once.
"""
import csv, itertools, multiprocessing, os, shutil, sys, time
from pathlib import Path

ROOT = Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve()
sys.path.insert(0, str(ROOT / "docs/_ext"))
# Not asked of torch: a process that has asked CUDA cannot be forked.
DRY = shutil.which("nvidia-smi") is None
if DRY:
    os.environ["TRITON_INTERPRET"] = "1"
import torch
import triton

M, SMS, START = 2 if DRY else 4096, 132, time.time()
WIDTHS = [64, 100] if DRY else [2048, 3072, 4096, 5120, 8192]
WORK = list(itertools.product(("forward", "backward"), ("alone", "stream"), WIDTHS))
page = None


def plans(mode, kind, N):
    yield "page"
    for warps in (2, 4, 8, 16, 32):
        chunk = min(256 * warps, triton.next_power_of_2(N))
        held = -(-N // chunk) * chunk / (32 * warps)  # columns a thread
        if not DRY and not 8 <= held <= 64:
            continue
        if mode == "forward":
            yield chunk, warps
            continue
        for per_sm, stages in itertools.product((1, 2, 3), (2, 3, 4)):
            tile = -(-N // chunk) * chunk * (4 if kind == "alone" else 10)
            if per_sm * warps <= 16 and per_sm * (stages - 1) * tile <= 228000:
                yield chunk, warps, per_sm, stages


def calls(mode, kind, N):
    stream = torch.float32 if kind == "stream" else torch.bfloat16
    x, residual, w, dy, ds = (t.detach() for t in page.inputs(M, N, torch.bfloat16, stream))
    residual, ds = (residual, ds) if kind == "stream" else (None, None)
    options = "gemma", 1.0
    y, s, rstd = page.forward(x, residual, w, 1e-6, *options)
    if mode == "forward":

        def call(plan):
            if plan == "page":
                return page.forward(x, residual, w, 1e-6, *options)
            chunk, warps = plan
            page._rms_norm_fwd[(M,)](x, residual, w, y, s, rstd, 1e-6, 1.0, "gemma", N, chunk, num_warps=warps)

        return call
    dx, dr = torch.empty_like(dy), torch.empty_like(s) if kind == "stream" else None
    sums = torch.empty(3 * SMS, N, device=x.device)

    def call(plan):
        if plan == "page":
            return page.backward(dy, ds, s, w, rstd, *options)
        chunk, warps, per_sm, stages = plan
        programs = triton.cdiv(M, triton.cdiv(M, SMS * per_sm))
        given = dy, ds, s, w, rstd, dx, dr, sums, M, 1.0, "gemma", N, chunk, stages
        page._rms_norm_bwd[(programs,)](*given, num_warps=warps)
        sums[:programs].sum(0)

    return call


def start():
    global page
    from tutorial import load

    page = load("norms-and-losses/02-rms-norm-16-bits", interpret=DRY)
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


def main():
    jobs = []
    for shape in WORK:
        kernels = list({str(p[:2] + p[3:] if p != "page" else p): p for p in plans(*shape)}.values())
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
    rows = []
    for shape in WORK:
        mode, kind, N = shape
        call, found = calls(*shape), []
        for plan in plans(*shape):
            try:
                us = page.device_time(lambda: call(plan))[0] * 1e3
            except Exception as e:  # noqa
                print("no", *shape, plan, str(e)[:80])
                continue
            found.append((us, plan))
            rows.append({"mode": mode, "kind": kind, "N": N, "us": round(us, 2), "plan": plan})
        print(f"{mode} {kind} N={N}: page {found[0][0]:.1f} us; chunk, warps, programs, stages:")
        for us, plan in sorted(found[1:], key=lambda f: f[0])[:5]:
            print(f"   {us:6.1f} us {plan}")
    with open(Path(os.environ.get("OUT", ".")) / "tune-norms-02.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, ["mode", "kind", "N", "us", "plan"])
        writer.writeheader()
        writer.writerows(rows)
    print(f"{len(rows)} timed, {time.time() - START:.0f} s")


if __name__ == "__main__":
    main()
