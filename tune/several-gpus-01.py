"""The bars of several-gpus/01-layer-norm, and what may bring it closer.

python tune/several-gpus-01.py [root of the checkout]; tables on stdout, CSV in
$OUT; at most 120 s. Trials of one set of ranks each, then a table:

  page       the page as it is
  backwards  the second kernel takes rows from the last: those are still in L2
  hints      the second kernel's input is kept in L2, its output is not
  both       both of them
  one CTA    the page, with NCCL's small messages moved by one CTA, no clusters

Then the bars of the rows, and the figure against the number of ranks.
"""
import csv, os, sys, time
from pathlib import Path

ROOT = Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve()
sys.path.insert(0, str(ROOT / "docs/_ext"))
import torch

DRY = not torch.cuda.is_available()
if DRY:
    os.environ["TRITON_INTERPRET"] = "1"
else:
    torch.cuda.set_stream(torch.cuda.Stream())
from tutorial import load

START, NAME, LIMIT = time.time(), "several-gpus/01-layer-norm", 95
M = 8 if DRY else 4096
WIDTHS = [64] if DRY else [2**i for i in range(11, 17)]
BACKWARDS = (
    ("    row = tl.program_id(0)\n    x = _load(x_ptr, row, N, BLOCK)\n    n, mean",
     "    row = M - 1 - tl.program_id(0)\n    x = _load(x_ptr, row, N, BLOCK)\n    n, mean"),
    ("        row = first + tl.arange(0, ROWS)[:, None]\n",
     "        row = M - 1 - first - tl.arange(0, ROWS)[:, None]\n"),
    ("at, mask = tl.cast(row, tl.int64) * N + col, (row < M) & (col < N)",
     "at, mask = tl.cast(row, tl.int64) * N + col, (row >= 0) & (col < N)"),
    ("mean = tl.load(stats_ptr + row, mask=row < M, other=0)", "mean = tl.load(stats_ptr + row, mask=row >= 0, other=0)"),
    ("rstd = tl.load(stats_ptr + M + row, mask=row < M, other=0)", "rstd = tl.load(stats_ptr + M + row, mask=row >= 0, other=0)"),
    ("c1 = tl.load(c_ptr + row, mask=row < M, other=0)", "c1 = tl.load(c_ptr + row, mask=row >= 0, other=0)"),
    ("c2 = tl.load(c_ptr + M + row, mask=row < M, other=0)", "c2 = tl.load(c_ptr + M + row, mask=row >= 0, other=0)"),
)
HINTS = (
    ("return tl.load(ptr + at, mask=cols < N, other=0).to(tl.float32)",
     "return tl.load(ptr + at, mask=cols < N, other=0, eviction_policy=\"evict_last\").to(tl.float32)"),
    ("tl.store(y_ptr + at, y, mask=tl.arange(0, BLOCK) < N)",
     "tl.store(y_ptr + at, y, mask=tl.arange(0, BLOCK) < N, eviction_policy=\"evict_first\")"),
    ("tl.store(dx_ptr + at, dx, mask=mask)", "tl.store(dx_ptr + at, dx, mask=mask, eviction_policy=\"evict_first\")"),
)
FEW = (("        torch.cuda.set_device(device)\n",
        "        torch.cuda.set_device(device)\n"
        "        os.environ |= {\"NCCL_MAX_CTAS\": \"1\", \"NCCL_CGA_CLUSTER_SIZE\": \"0\"}\n"),)
TRIALS = {"page": (), "backwards": BACKWARDS, "hints": HINTS, "both": BACKWARDS + HINTS, "one CTA": FEW}
rows = []


def us(ranks, what, trial, N, mode, count, way):
    if DRY:
        return 1.0
    found = [f for f in ranks(what, M, N, torch.bfloat16, mode, count, way) if f]
    if not found:
        return float("nan")
    median, low, high = max(found)
    rows.append({"trial": trial, "what": what.__name__, "N": N, "mode": mode, "ranks": count, "way": way,
                 "us": round(median, 2), "low": round(low, 2), "high": round(high, 2)})
    return median


def end(ranks):
    for process in ranks.all:
        process.kill()
        process.wait()


def late(what):
    if time.time() - START < LIMIT:
        return False
    print(f"  no time is left: {what} is left out")
    return True


pages, gathered = {}, {}
for trial, replace in TRIALS.items():
    try:
        pages[trial] = load(NAME, replace)
    except ValueError as error:
        print("no", trial, error)
BARS = {"forward": 6, "backward": 3.5}
print(f"columns, 2 of {pages['page'].WORLD} ranks: us, and how many times as long whole rows take (bars: {BARS})")
for trial, page in pages.items():
    if trial != "page" and late(trial):
        continue
    ranks = page.Ranks()
    try:
        for mode, bar in BARS.items():
            said = []
            for N in WIDTHS:
                took = us(ranks, page.time_columns, trial, N, mode, 2, "triton")
                if trial == "page":
                    both = [us(ranks, page.time_columns, trial, N, mode, 2, way) for way in ("rows", "alone")]
                    gathered[mode, N], alone = both
                    said.append(f"N={N}: {took:.1f} (alone {alone:.1f}, rows {both[0]:.1f})")
                else:
                    said.append(f"N={N}: {took:.1f}")
                share = gathered[mode, N] / took
                said[-1] += f" {share:.2f}x {'ok' if share >= bar else 'BELOW'}"
            print(f"  {trial:9} {mode:8}", "; ".join(said), flush=True)
        if trial == "page":
            for mode in BARS:
                both = [us(ranks, page.time_columns, trial, N, mode, 2, "dtensor") for N in WIDTHS[:2]]
                print(f"  DTensor {mode}: {both}", flush=True)
            print("rows, 2 ranks: what is added (us; bars: one 16, beside 10)")
            for N in WIDTHS[:5] if not DRY else WIDTHS:
                t = {way: us(ranks, page.time_rows, trial, N, "backward", 2, way) for way in ("alone", "one", "then", "beside")}
                one, beside = t["one"] - t["alone"], t["beside"] - t["then"]
                print(f"  N={N}: alone {t['alone']:.1f}, one {one:+.1f} {'ok' if one <= 16 else 'ABOVE'}, "
                      f"beside {beside:+.1f} {'ok' if beside <= 10 else 'ABOVE'}", flush=True)
            print("against the number of ranks, backward, N = 16384 and 8192")
            for N in (16384, 8192) if not DRY else (64,):
                for count in (2, 4, 8):
                    if count <= page.WORLD:
                        t = {way: us(ranks, page.time_ranks, trial, N, "backward", count, way) for way in ("triton", "rows", "adds")}
                        print(f"  N={N}, {count} ranks: ours {t['triton']:.1f}, rows gathered {t['rows']:.1f}, one all-reduce adds {t['adds']:.1f}", flush=True)
        elif trial == "one CTA":
            for N in WIDTHS[:3]:
                t = [us(ranks, page.time_rows, trial, N, "backward", 2, way) for way in ("alone", "one")]
                print(f"  one CTA   rows N={N}: one all-reduce {t[1] - t[0]:+.1f}", flush=True)
    except Exception as error:
        print("  no", trial, str(error)[:300], flush=True)
    finally:
        end(ranks)
with open(Path(os.environ.get("OUT", ".")) / "tune-several-gpus-01.csv", "w", newline="") as file:
    writer = csv.DictWriter(file, ["trial", "what", "N", "mode", "ranks", "way", "us", "low", "high"])
    writer.writeheader()
    writer.writerows(rows)
print(f"{len(rows)} timed, {time.time() - START:.0f} s")
