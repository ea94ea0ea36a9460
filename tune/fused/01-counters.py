"""Which metric of ncu counts reads and writes of fused/01-add-layer-norm?

    ncu --nvtx --nvtx-include "regex:counted .*/" --csv --print-units base \
        --clock-control none --cache-control all --log-file $OUT/fused-01.csv \
        --metrics dram__bytes_read.sum,dram__bytes_write.sum,\
lts__t_sectors_op_read.sum,lts__t_sectors_op_write.sum,\
lts__t_sectors_srcunit_tex.sum,lts__t_sectors_srcunit_tex_op_read.sum,\
lts__t_sectors_srcunit_tex_op_write.sum,gpu__time_duration.sum \
        python3 tune/fused/01-counters.py

then python3 tune/fused/01-counters.py $OUT/fused-01.csv, which prints each
metric in units, the bytes of one matrix: forward 4 are expected (5 in two
kernels), backward 4 (6).
"""

import csv
import sys
from collections import defaultdict

M = 4096


def table(path):
    lines = open(path).read().splitlines()
    while not lines[0].startswith('"ID"'):
        lines.pop(0)
    found = defaultdict(float)
    for row in csv.DictReader(lines):
        cells = " ".join(c for c in row.values() if isinstance(c, str))
        name = cells[cells.index("counted ") :].split('"')[0].split(":")[0]
        _, mode, way, N, *_ = name.split()
        size = 32 if "sectors" in row["Metric Name"] else 1
        if "duration" not in row["Metric Name"]:
            found[mode, way, int(N), row["Metric Name"]] += size * float(row["Metric Value"].replace(",", "")) / (2 * M * int(N))
    for key, value in sorted(found.items()):
        print(*key, f"{value:.3f} units")


def main():
    sys.path.insert(0, "docs/_ext")
    import torch

    from tutorial import load

    page = load("fused/01-add-layer-norm", interpret=False)
    for N in 1024, 4096, 12288:
        x, r, w, _, dy, ds = (t.detach() for t in page.inputs(M, N, torch.float16))
        _, s, mean, rstd = page.forward(x, r, None, None, 1e-5)
        dx, saved = torch.empty_like(s), (s, w, mean, rstd)
        runs = {
            "forward one": lambda: page.WAYS["triton"](x, r, N, None, None),
            "forward both": lambda: page.WAYS["both"](x, r, N, None, None),
            "backward one": lambda: page.backward(dy, ds, *saved, dx, None),
            "backward both": lambda: (page.backward(dy, None, *saved, dx, None), dx + ds),
        }
        for name, run in runs.items():
            run()
            with torch.cuda.nvtx.range(f"counted {name} {N}"):
                run()
    torch.cuda.synchronize()


if __name__ == "__main__":
    table(sys.argv[1]) if sys.argv[1:] else main()
