"""Tune the plans of fused/01-add-layer-norm.

python tune/fused/01.py; table on stdout, CSV in $OUT; a minute.
Forward: warps of a tile, registers of a thread. Backward: warps, rows, stages,
programs a multiprocessor. Ceilings: PyTorch's, and a kernel that only moves.
"""

import candidates
import torch
import triton
import triton.language as tl

HALF = torch.float16


@triton.jit
def _move(a_ptr, b_ptr, c_ptr, d_ptr, e_ptr, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(a_ptr + at, mask=at < size) + tl.load(b_ptr + at, mask=at < size)
    if c_ptr is not None:
        total += tl.load(c_ptr + at, mask=at < size)
    tl.store(d_ptr + at, total, mask=at < size)
    if e_ptr is not None:
        tl.store(e_ptr + at, total, mask=at < size)


def start():
    page = candidates.load("fused/01-add-layer-norm")
    SMS = page.NUM_SMS

    def tensors(N):
        x, r, w, b, dy, ds = (t.detach() for t in page.inputs(candidates.M, N, HALF))
        mean, rstd = torch.zeros(candidates.M, device="cuda"), torch.ones(candidates.M, device="cuda")
        return x, r, w, b, dy, ds, mean, rstd, torch.empty_like(x), torch.empty(2, N, dtype=HALF, device="cuda")

    def call(mode, N):
        x, r, w, b, dy, ds, mean, rstd, dx, grads = tensors(N)
        if mode == "forward":
            return lambda plan: page.forward(x, r, w, b, 1e-5, rule=lambda *_: plan)

        def backward(plan):
            plan = dict(plan)
            page.NUM_SMS = SMS * plan.pop("per_sm")
            page.backward(dy, ds, r, w, mean, rstd, dx, grads, rule=lambda *_: plan)

        return backward

    def now(mode, N):
        page.NUM_SMS = SMS
        x, r, w, b, dy, ds, mean, rstd, dx, grads = tensors(N)
        if mode == "forward":
            return lambda: page.forward(x, r, w, b, 1e-5)
        return lambda: page.backward(dy, ds, r, w, mean, rstd, dx, grads)

    def ceilings(mode, N):
        x, r, _, _, dy, ds, *_ = tensors(N)
        a, b = torch.stack((dy, ds)), torch.stack((x, r))
        found = {"copy": lambda: b.copy_(a), "mul": lambda: torch.mul(a, 1, out=b)}
        third, second = None, r
        if mode == "backward":
            found = {"addcmul": lambda: torch.addcmul(dy, ds, x, out=b[0])}
            third, second = x, None
        for block, warps in (1024, 4), (2048, 4), (4096, 8):
            grid = (candidates.cdiv(x.numel(), block),)
            args = dy, ds, third, b[0], second, x.numel(), block
            found[f"move {block}"] = lambda grid=grid, args=args, warps=warps: _move[grid](*args, num_warps=warps)
        return found

    return call, now, ceilings


def forward_plans(N):
    block = candidates.power(N)
    for warps in (1, 2, 4, 8, 16):
        columns = block // (32 * warps)
        if 8 <= columns <= 64:
            yield {"BLOCK": block, "num_warps": warps}
            for registers in (40, 48, 64, 80):
                if columns + 24 <= registers < 2 * columns + 32:
                    yield {"BLOCK": block, "num_warps": warps, "maxnreg": registers}


FORWARD = 1024, 1536, 2048, 3072, 4096, 5120, 8192, 8704, 10240, 12288, 14336
BACKWARD = 1024, 1536, 2048, 3072, 4096, 5120, 8192, 10240, 12288, 14336
WORK = [("forward", N, forward_plans(N)) for N in FORWARD]
WORK += [("backward", N, candidates.backward_plans(N, 3)) for N in BACKWARD]

if __name__ == "__main__":
    candidates.main("fused-01", start, WORK)
