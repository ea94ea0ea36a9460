"""Plans of the backward pass of into-pytorch/01-operators, in turns with
PyTorch: run in the checkout on a GPU, about a minute.

    python tune_operators.py
"""

import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path("docs/_ext").resolve()))

import torch

import tutorial

page = tutorial.load("into-pytorch/01-operators")
M, DTYPE = 4096, torch.bfloat16
flush = torch.empty(2**28, dtype=torch.int8, device="cuda")


def us(call):
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    flush.zero_()
    start.record()
    call()
    end.record()
    return start, end


begin = time.monotonic()
for N in (1024, 2048, 4096, 8192):
    x, w, dy = page.inputs(M, N, DTYPE)
    with torch.no_grad():
        _, rstd = page.forward(x, w, 1e-6)
    y = page.pytorch(x, w, 1e-6)
    copied = torch.empty_like(x)
    xs, ws = x.detach(), w.detach()

    def rival():
        torch.autograd.grad(y, (x, w), dy, retain_graph=True)

    def ceiling():
        torch.add(xs, dy, out=copied)

    calls = {"pytorch": rival, "add": ceiling}
    for per_sm in (1, 2, 3, 4, 6, 8):
        for warps in (2, 4, 8, 16):
            if per_sm * warps > 48 or N // (32 * warps) > 64:
                continue

            def ours(per_sm=per_sm, warps=warps):
                page.plan_backward = lambda N: (per_sm, warps)
                page.backward(dy, xs, ws, rstd)

            calls[f"{per_sm} x {warps} warps"] = ours
    for call in calls.values():
        call()
    torch.cuda.synchronize()
    noted = {name: [] for name in calls}
    for _ in range(15):
        turn = {name: us(call) for name, call in calls.items()}
        torch.cuda.synchronize()
        for name, (start, end) in turn.items():
            noted[name].append(1000 * start.elapsed_time(end))
    medians = {n: statistics.median(times) for n, times in noted.items()}
    bound = 3 * M * N * 2
    for name, median in sorted(medians.items(), key=lambda pair: pair[1]):
        share = bound / median / 1e3
        print(f"{N:6} {name:16} {median:8.1f} us {share:8.0f} GB/s")
    print(f"       {time.monotonic() - begin:.0f} s", flush=True)
