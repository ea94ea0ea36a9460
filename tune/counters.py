"""What ncu counts for a copy and for page 01's backward, beside bytes by hand.

    for c in all none; do
      ncu --nvtx --nvtx-include "regex:counted .*/" --csv --print-units base \
        --clock-control none --cache-control $c --log-file $OUT/$c.csv \
        --metrics dram__bytes_read.sum,dram__bytes_write.sum,\
lts__t_sector_hit_rate.pct,sm__warps_active.avg.pct_of_peak_sustained_active,\
gpu__time_duration.sum \
        python3 tune/counters.py; done

Questions: does the range of a name with spaces match; how much of what is
written stays in L2 at the end (50 MB on an H200), so that DRAM never sees it;
are all metrics counted in one replay, with the caches as the page left them.
"""

import os
import sys
from pathlib import Path

import torch

ROOT = Path(os.environ.get("ROOT", Path(__file__).parents[1]))
sys.path[:0] = [str(ROOT / "docs/_ext")]

import tutorial

page = tutorial.load("layer-norm/01-layer-norm", interpret=False)
flush = torch.empty(2**28, dtype=torch.int8, device="cuda")


def counted(name, by_hand, fn):
    fn()
    flush.zero_()
    torch.cuda.synchronize()
    with torch.cuda.nvtx.range(f"counted {name}"):
        fn()
    torch.cuda.synchronize()
    print(name, {k: f"{v / 1e6:.1f} MB" for k, v in by_hand.items()})


for N in 1024, 4096, 8192, 15872:
    x, w, b, dy = page.inputs(4096, N, torch.float16)
    out, size = torch.empty_like(dy), dy.nbytes
    counted(
        f"add {N}",
        {"read": 2 * size, "write": size},
        lambda: torch.add(x.detach(), dy, out=out),
    )
    y = page.layer_norm(x, (N,), w, b)
    counted(
        f"backward {N}",
        {"read": 2 * size, "write": size, "buffers": 8 * N * 256},
        lambda: torch.autograd.grad(y, (x, w, b), dy, retain_graph=True),
    )
