"""What ncu counts for pages 01 to 03, about 60 s. From the repository root:

python tune/ncu-01-03.py
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, "docs/_ext")
PAGES = (
    ("01-layer-norm", "traffic"),
    ("02-summing-rows", "dram"),
    ("03-lock", "traffic"),
)
METRICS = (
    "dram__bytes_read.sum,dram__bytes_write.sum,lts__t_bytes.sum,"
    "lts__t_sectors_srcunit_tex.sum,lts__t_sector_hit_rate.pct,"
    "gpu__time_duration.sum"
)


def child(path):
    import torch
    from tutorial import load

    torch.cuda.set_stream(torch.cuda.Stream())
    records, push = [], torch.cuda.nvtx.range_push

    def counted(name):
        records.append([*point, name.rpartition(" per ")[2]])
        return push(f"counted {len(records)}")

    torch.cuda.nvtx.range_push = counted
    for name, function in PAGES:
        mark = getattr(load(f"layer-norm/{name}", interpret=False), function)
        bench = mark.benchmarks
        for N in bench.x_vals:
            for provider in bench.line_vals:
                point = name, N, provider
                mark.fn(N=N, provider=provider, **bench.args)
            torch.cuda.empty_cache()
    torch.cuda.synchronize()
    Path(path).write_text(json.dumps(records))


if len(sys.argv) > 1:
    child(sys.argv[1])
    sys.exit()

from measurements import counters

start = time.time()
with tempfile.TemporaryDirectory() as folder:
    table, records = Path(folder, "table"), Path(folder, "records")
    run = subprocess.run(
        [counters.found()[0], *counters.OPTIONS, "--metrics", METRICS,
         "--log-file", table, sys.executable, __file__, records],
        env={**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1"},
    )  # fmt: skip
    print(run.returncode)
    said = table.read_text()
    launches = counters.launched(said)
    if not launches:
        print(said[-3000:])
    for number, (*point, per) in enumerate(json.loads(records.read_text()), 1):
        kernels = launches.get(number, [])
        print(*point, f"per {float(per):.4g}, {len(kernels)} kernels:", end=" ")
        for metric in METRICS.split(",")[:-1]:
            try:
                value = counters.over_all(kernels, metric)
            except (KeyError, ZeroDivisionError):
                value = float("nan")
            if "bytes" in metric:
                value /= float(per)
            if "sectors" in metric:
                value *= 32 / float(per)
            print(f"{metric.split('.')[0][5:]} {value:.3f}", end="  ")
        print()
print(f"{time.time() - start:.0f} s")
