"""The bars of several-gpus/01-layer-norm, and plans of its backward kernel.

python tune/several-gpus-01.py [root of the checkout]; tables on stdout, CSV in
$OUT. First what the page times, on as many ranks as there are GPUs, against
the bars; then candidates for the plan of backward, on the first GPU.
"""
import csv, itertools, os, sys, time
from pathlib import Path

ROOT = Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve()
sys.path.insert(0, str(ROOT / "docs/_ext"))
import torch

DRY = not torch.cuda.is_available()
if DRY:
    os.environ["TRITON_INTERPRET"] = "1"
else:
    torch.cuda.set_stream(torch.cuda.Stream())
import triton
from tutorial import load

START, NAME = time.time(), "several-gpus/01-layer-norm"
page, rows = load(NAME), []
M = 8 if DRY else 4096


def bars():
    ranks = page.Ranks()

    def us(function, N, mode, way):
        if DRY:
            return 1.0
        try:
            found = max(f for f in ranks(function, M, N, torch.bfloat16, mode, way) if f)
        except Exception as e:  # noqa
            print("no", function.__name__, N, mode, way, str(e)[:300])
            raise
        rows.append({"what": function.__name__, "N": N, "mode": mode, "way": way, "us": round(found[0], 2), "low": round(found[1], 2), "high": round(found[2], 2)})
        return found[0]

    print(f"rows: added by one all-reduce (bar 16 us), by two, beside a product (bar 10 us); {page.WORLD} ranks")
    for N in [2**i for i in range(10, 16)]:
        t = {way: us(page.time_rows, N, "backward", way) for way in ("alone", "one", "two", "then", "beside")}
        one, two, beside = t["one"] - t["alone"], t["two"] - t["alone"], t["beside"] - t["then"]
        print(f"  N={N}: alone {t['alone']:.1f}, one {one:+.1f} {'ok' if one <= 16 else 'ABOVE'}, two {two:+.1f}, product {t['then'] - t['alone']:.1f}, beside {beside:+.1f} {'ok' if beside <= 10 else 'ABOVE'}")
    print("columns: bars: gathered takes 6 times as long forward, 3.5 times backward")
    for mode, bar in ("forward", 6), ("backward", 3.5):
        for N in [2**i for i in range(11, 17)]:
            t = {way: us(page.time_columns, N, mode, way) for way in ("triton", "rows", "alone")}
            share = t["rows"] / t["triton"]
            print(f"  {mode} N={N}: ours {t['triton']:.1f}, alone {t['alone']:.1f}, rows gathered {t['rows']:.1f}: {share:.1f} times {'ok' if share >= bar else 'BELOW'}")
    for mode, N in itertools.product(("forward", "backward"), (2**11, 2**14)):
        print(f"  DTensor {mode} N={N}: {us(page.time_columns, N, mode, 'dtensor'):.1f}")
    for process in ranks.all:
        process.kill()


def timed(fn):
    if DRY:
        fn()
        return 1.0
    fn()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        fn()
    return triton.testing.do_bench(graph.replay, warmup=5, rep=20, return_mode="median") * 1e3


def plans():
    print("plans of backward: (ROWS, COLS), warps, programs a multiprocessor")
    for N, whole in itertools.product([64] if DRY else [1024, 2048, 4096, 8192, 16384, 32768], (True, False)):
        if whole and N > 8192:
            continue
        dtype = torch.bfloat16
        x, dy = torch.randn(2, M, N, device=page.DEVICE, dtype=dtype)
        w, b = torch.rand(2, N, device=page.DEVICE, dtype=dtype)
        _, stats = page.forward(x, w, b, 1e-5)
        counts, lanes = None if whole else (N,), page.lanes(N)["BLOCK"]
        tiles = [(1, lanes)] if whole else [(r, min(lanes, c)) for r, c in itertools.product((4, 8, 16), (256, 512))]
        found = [(timed(lambda: page.backward(dy, x, w, stats, counts)), "the page's")]
        for tile, warps, per_sm in itertools.product(tiles, (4, 8, 16) if whole else (4, 8), (1, 2, 3, 4)):
            if not DRY and (not 4 <= tile[0] * tile[1] / (32 * warps) <= 64 or per_sm * warps > 32 or time.time() - START > 260):
                continue
            plan = tile, warps, per_sm
            try:
                found.append((timed(lambda: page.backward(dy, x, w, stats, counts, None, plan)), plan))
            except Exception as e:  # noqa
                print("no", N, plan, str(e)[:80])
            rows.append({"what": f"backward whole={whole}", "N": N, "way": str(plan), "us": round(found[-1][0], 2)})
        print(f"N={N} whole={whole}: the page's {found[0][0]:.1f} us;", "; ".join(f"{us:.1f} {plan}" for us, plan in sorted(found, key=lambda f: f[0])[:4]))


bars()
plans()
with open(Path(os.environ.get("OUT", ".")) / "tune-several-gpus-01.csv", "w", newline="") as file:
    writer = csv.DictWriter(file, ["what", "N", "mode", "way", "us", "low", "high"])
    writer.writeheader()
    writer.writerows(rows)
print(f"{len(rows)} timed, {time.time() - START:.0f} s")
