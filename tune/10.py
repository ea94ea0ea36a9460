"""layer-norm/10-host-time: parts of a call, clocks and the ladder; 25 s.

python tune/10.py [root of the checkout]; table on stdout, CSV in $OUT.
"""
import csv, os, sys, time
from pathlib import Path

ROOT = Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve()
sys.path.insert(0, str(ROOT / "docs/_ext"))
import torch
from tutorial import load

page = load("layer-norm/10-host-time", interpret=False)
torch.cuda.set_stream(torch.cuda.Stream())
START, rows = time.time(), []


def show(what, N, us, one):
    print(f"{what}, N = {N}:", *(f"{p} {t[0]:.1f} ({t[0] / us[one][0]:.2f})" for p, t in us.items()), sep="  ")
    rows.extend({"what": what, "N": N, "line": p, "us": round(t[0], 2)} for p, t in us.items())


for N in 256, 1024, 4096:
    show("parts", N, page.in_turns(page.parts(16, N, torch.float16)), "torch")
for lines, one in (page.CLOCKS, "in a row"), (page.LADDER, "torch"):
    mark = page.benchmark("x", "both", 4096, [], list(lines), lambda *s: {p: page.prepared(p, lines[p], *s) for p in lines})
    for N in 1024, 2048, 4096, 8192, 15872:
        show(one, N, {p: mark.fn(4096, N, torch.float16, "both", p) for p in lines}, one)
with open(Path(os.environ.get("OUT", ".")) / "tune-10.csv", "w", newline="") as file:
    writer = csv.DictWriter(file, rows[0])
    writer.writeheader()
    writer.writerows(rows)
print(f"{time.time() - START:.0f} s")
