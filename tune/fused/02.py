"""Tune the plans of fused/02-dropout.

python tune/fused/02.py; table on stdout, CSV in $OUT; a minute.
Dropout alone: block and warps, and a call of Philox for each element. Forward:
warps, registers. Backward: warps, rows, stages, programs a multiprocessor.
"""

import candidates
import torch

HALF, P, DROP = torch.float16, 0.1, round(0.1 * 2**32)


def start():
    page = candidates.load("fused/02-dropout")
    SMS, M = page.NUM_SMS, candidates.M

    def tensors(N):
        x, r, w, b, dy, ds = (t.detach() for t in page.inputs(M, N, HALF))
        mean, rstd = torch.zeros(M, device="cuda"), torch.ones(M, device="cuda")
        return x, r, w, b, dy, ds, mean, rstd, torch.empty_like(x), torch.empty_like(x)

    def call(mode, N):
        x, r, w, b, dy, ds, mean, rstd, dr, dx = tensors(N)
        if mode == "forward":
            return lambda plan: page.forward(x, r, w, b, 1e-5, P, 1, rule=lambda *_: plan)
        if mode == "alone":
            return lambda plan: page._dropout_only[(M, candidates.cdiv(N, plan["BLOCK"]))](x, dx, 1, N, DROP=DROP, **plan)

        def backward(plan):
            plan = dict(plan)
            page.NUM_SMS = SMS * plan.pop("per_sm")
            page.backward(dy, ds, r, w, mean, rstd, dr, dx, P, 1, rule=lambda *_: plan)

        return backward

    def now(mode, N):
        page.NUM_SMS = SMS
        x, r, w, b, dy, ds, mean, rstd, dr, dx = tensors(N)
        return {
            "forward": lambda: page.forward(x, r, w, b, 1e-5, P, 1),
            "alone": lambda: page.drop(x, P, 1),
            "backward": lambda: page.backward(dy, ds, r, w, mean, rstd, dr, dx, P, 1),
        }[mode]

    def ceilings(mode, N):
        x, r, _, _, dy, ds, *_ = tensors(N)
        a, b = torch.stack((dy, ds)), torch.stack((x, r))
        if mode == "alone":
            return {"copy": lambda: x.copy_(dy)}
        # backward: five units; of these addcmul moves four
        return {"copy": lambda: b.copy_(a)} if mode == "forward" else {"addcmul": lambda: torch.addcmul(dy, ds, x, out=b[0])}

    return call, now, ceilings


def alone_plans(N):
    for block in (1024, 2048, 4096):
        for warps in (2, 4, 8):
            yield {"BLOCK": block, "num_warps": warps, "FOUR": True}
    yield {"BLOCK": 2048, "num_warps": 4, "FOUR": False}


def forward_plans(N):
    block = candidates.power(N)
    for warps in (1, 2, 4, 8, 16):
        columns = block // (32 * warps)
        if 8 <= columns <= 64:
            yield {"BLOCK": block, "num_warps": warps}
            for registers in (40, 48, 64, 80):
                if columns + 24 <= registers < 2 * columns + 32:
                    yield {"BLOCK": block, "num_warps": warps, "maxnreg": registers}


WIDTHS = 1024, 2048, 3072, 4096, 5120, 8192
WORK = [("alone", N, alone_plans(N)) for N in (1024, 4096, 16384)]
WORK += [("forward", N, forward_plans(N)) for N in WIDTHS]
WORK += [("backward", N, candidates.backward_plans(N, 3, 32)) for N in WIDTHS]

if __name__ == "__main__":
    candidates.main("fused-02", start, WORK)
