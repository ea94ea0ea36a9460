"""Candidates for the plans of norms-and-losses/05-wide-softmax.

python tune/norms-05.py; lines on stdout, CSV in $OUT. One H200, about 2 minutes.
slices: warps of a program, programs a multiprocessor, chunks of a slice, and
other forms of the kernels: "merge" reduces pairs at once, not a maximum and
then a sum; "convert" lets the compiler make float32 of bfloat16, where the page
shifts. To read a slice once more, from a cache, and to hint that nothing is
read again were slower or no faster.
shifted: warps and programs. page 03: as it is. Percentages are shares of the
fastest of several copies and additions. The last table has a line for each
plan: its share at each width, and how far the worst is from its bar. Without a
GPU every call is tried once, at toy size.
"""

import csv
import multiprocessing
import os
import shutil
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent / "fused")]
# Not asked of torch: a process that has asked CUDA cannot be forked.
DRY = shutil.which("nvidia-smi") is None
if DRY:
    os.environ["TRITON_INTERPRET"] = "1"
import torch
from candidates import ROOT, START, cdiv, clock

NAME, SECONDS = "norms-and-losses/05-wide-softmax", 1e9 if DRY else 120
# First those that a bar names and no plan was timed at.
WIDTHS = [301] if DRY else [2**18, 100_003, 65536, 49152, 2**20, 2**17, 50257, 80_001, 131_071, 2**19, 40_960]
BARS = {
    "forward": {49152: 95, 50257: 82, 65536: 88, 100_003: 73, 2**17: 84, 2**18: 77, 2**20: 75},
    "backward": {49152: 93, 50257: 89, 65536: 93, 100_003: 89, 2**17: 93, 2**18: 88, 2**20: 77},
}
FORMS = {
    "page": (),
    "merge": (
        ("    top = tl.max(m, 0)\n    return top, tl.sum(s * _exp(m - top), 0)\n", "    return tl.reduce((m, s), 0, _merge)\n"),
        ("    ms, sums = pairs\n    m = tl.max(ms, 0)\n    s = tl.sum(sums * _exp(ms - m), 0)\n", "    m, s = tl.reduce(pairs, 0, _merge)\n"),
        (
            "@triton.jit\ndef _pair(",
            "@triton.jit\ndef _merge(m1, s1, m2, s2):\n    m = tl.maximum(m1, m2)\n    return m, s1 * _exp(m1 - m) + s2 * _exp(m2 - m)\n\n\n@triton.jit\ndef _pair(",
        ),
    ),
    "convert": (
        ("if dtype == tl.bfloat16 else dtype", "if False else dtype"),
        ("    if dtype == tl.bfloat16:  # the", "    if False:  # the"),
    ),
}
# warps, programs a multiprocessor, chunks of a slice
FORWARD = [(4, 4, 8), (8, 4, 4), (4, 8, 4), (2, 16, 4), (16, 2, 4), (8, 2, 8), (4, 5, 6), (4, 6, 5)]
BACKWARD = [(4, 6, 4), (8, 3, 4), (2, 12, 4), (8, 2, 6), (16, 1, 6), (16, 1, 4), (16, 2, 2), (32, 1, 2)]
if DRY:
    FORWARD, BACKWARD = FORWARD[:3], BACKWARD[:2]
SHIFTED = [(32, 2), (32, 1)]


def candidates(mode, N):
    for form in FORMS if mode == "forward" else [f for f in FORMS if f != "merge"]:
        for rank, plan in enumerate(FORWARD if mode == "forward" else BACKWARD):
            warps, per_sm, chunks = plan
            parts = cdiv(N, chunks * 32 * warps * 8)
            if DRY or 1 < parts <= 132 * per_sm and (form == "page" or rank < 2):
                yield form, "slices", plan
    if mode == "forward" and (DRY or N <= 2**18):
        yield from (("page", "shifted", plan) for plan in SHIFTED)
    yield "page", "page 03", None


def load(form):
    sys.path[:0] = [str(ROOT / "docs/_ext")]
    from tutorial import load

    page = load(NAME, FORMS[form], interpret=DRY)
    if not DRY:
        torch.cuda.set_stream(torch.cuda.Stream())
    return page


def call(page, mode, kind, plan, x, y, log=False):
    if kind == "page 03":
        return lambda: page.forward(x, log) if mode == "forward" else page.backward(y, x, log)
    if kind == "shifted":
        return lambda: shifted(page, x, *plan)

    def run():
        out = torch.empty_like(x)
        given = (page._softmax_fwd_shared, x, out) if mode == "forward" else (page._softmax_bwd_shared, y, x, out)
        page.shared(*given, log=log, plan=plan)
        return out

    return run


def shifted(page, x, warps, per_sm):
    y, N = torch.empty_like(x), x.shape[1]
    limit = {} if DRY else {"maxnreg": 65536 // (32 * warps * per_sm) // 8 * 8}
    tile = (4 if DRY else 32 * warps), 8, page.step_of(N, x, y)
    page._softmax_fwd_shifted[(len(x),)](x, y, N, *tile, False, num_warps=warps, **limit)
    return y


def tensors(N, most=4096):
    torch.manual_seed(0)
    M = 3 if DRY else min(most, 2**30 // N) // 16 * 16
    x = torch.randn(M, N, device="cpu" if DRY else "cuda", dtype=torch.bfloat16)
    return x, torch.softmax(x, 1)


def check(found, mode, x, y, log):
    """Wrong kernels are fast, too."""
    rows = slice(0, None, 97)
    want = (torch.log_softmax if log else torch.softmax)(x[rows].double(), 1)
    if mode == "backward":
        y, dy = y[rows].double(), x[rows].double()
        want = y * (dy - (y * dy).sum(1, keepdim=True))
        want = dy - y.exp() * dy.sum(1, keepdim=True) if log else want
    error = ((found[rows] - want).norm() / want.norm()).item()
    return "" if error < 4e-3 else f"WRONG {error:.0e}"


def compile_some(job):
    form, mode, N, some = job
    page, (x, y) = load(form), tensors(N, 304)
    for kind, plan in some:
        try:
            call(page, mode, kind, plan, x, y)()
        except Exception as e:
            print("no", form, mode, N, kind, plan, str(e)[:90])
    if not DRY:
        torch.cuda.synchronize()


def ceiling(mode, x, y, flush):
    out = torch.empty_like(x)
    ways = [lambda: torch.add(x, y, out=out)]
    if mode == "forward":
        ways = [lambda: torch.mul(x, 1, out=out), lambda: out.copy_(x)]
    return min(clock(way, flush) for way in 3 * ways)


def at_each_width(mode, records):
    """A line for each plan; first those that are at or above all bars."""
    widths = sorted({r["N"] for r in records})
    shares, lines = {}, []
    for r in records:
        key = r["form"], r["kind"], r["plan"]
        shares.setdefault(key, {})[r["N"]] = 100 * r["ceiling"] / r["us"]
    for key, share in shares.items():
        above = [share[N] - bar for N, bar in BARS[mode].items() if N in share]
        lines.append((min(above, default=0), key, share))
    print(f"{mode}; bars", *(BARS[mode].get(N, "-") for N in widths))
    print(f"{'worst':>6} ", *(f"{N:7}" for N in widths))
    for worst, key, share in sorted(lines, key=lambda line: -line[0]):
        print(f"{worst:6.1f} ", *(f"{share[N]:7.1f}" if N in share else "      -" for N in widths), *key)


def main():
    work = [(mode, N, list(candidates(mode, N))) for N in WIDTHS for mode in ("forward", "backward")]
    jobs = []
    for mode, N, found in work:
        for form in FORMS:
            some = [c[1:] for c in found if c[0] == form]
            jobs += [(form, mode, N, some[i : i + 5]) for i in range(0, len(some), 5)]
    if DRY:
        list(map(compile_some, jobs))
    else:
        with multiprocessing.get_context("fork").Pool(os.cpu_count()) as pool:
            pool.map(compile_some, jobs, 1)
    print(f"compiled {sum(len(job[3]) for job in jobs)} in {time.time() - START:.0f} s")
    pages = {form: load(form) for form in FORMS}
    page, records = pages["page"], []
    flush = None if DRY else torch.empty(2**28, dtype=torch.int8, device="cuda")
    timed = (lambda run, _: (run(), 1.0)[1]) if DRY else clock
    for mode, N, found in work:
        if time.time() - START > SECONDS:
            print("no time left for", mode, N)
            continue
        x, y = tensors(N)
        rule = page.pick(mode == "backward", x.dtype, x)
        mine = {"slices": page.plan_shared(mode == "backward", 2 * N), "shifted": SHIFTED[4 * N > page.TWO_ROWS]}.get(rule)
        top, times = 1.0 if DRY else ceiling(mode, x, y, flush), []
        for form, kind, plan in found:
            try:
                run = call(pages[form], mode, kind, plan, x, y)
                wrong = check(run(), mode, x, y, False)
                us = timed(run, flush)
            except Exception as e:
                print("no", form, mode, N, kind, plan, str(e)[:90])
                continue
            said = " <- rule" if (form, kind, plan) == ("page", rule, mine) else ""
            times.append((us, f"{form:6} {kind:7} {plan} {wrong}{said}"))
            records.append({"mode": mode, "N": N, "form": form, "kind": kind, "plan": plan, "us": round(us, 2), "ceiling": round(top, 2), "wrong": wrong})
        log = ""
        if mine and rule == "slices":
            run = call(page, mode, rule, mine, x, y, log=True)
            wrong = check(run(), mode, x, y, True)
            log = f"; log_softmax {100 * top / timed(run, flush):.1f} % {wrong}"
        print(f"{mode} {N}, {len(x)} rows: ceiling {top:.1f} us{log}")
        for rank, (us, what) in enumerate(sorted(times)):
            if rank < 8 or "rule" in what or "03" in what or "WRONG" in what:
                print(f"   {us:8.1f} {100 * top / us:5.1f} %  {what}")
    for mode in BARS:
        at_each_width(mode, [r for r in records if r["mode"] == mode])
    with open(Path(os.environ.get("OUT", ".")) / "tune-norms-05.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, records[0])
        writer.writeheader()
        writer.writerows(records)
    print(f"{len(records)} timed, {time.time() - START:.0f} s")


if __name__ == "__main__":
    main()
