"""Tune the plans of fused/03-activation, and the form of its sigmoid.

python tune/fused/03.py; table on stdout, CSV in $OUT; a minute.
Forward: warps, registers, and three forms of SiLU: as everybody writes it, with
approximate instructions (the page's), and
with tanh, which is one instruction, but of 11 bits: for comparison only.
Backward: warps, rows, stages, programs a multiprocessor.
"""

import candidates
import torch
import triton
import triton.language as tl

HALF = torch.float16


@triton.jit
def _silu_tanh(x):
    half = 0.5 * x
    t = tl.inline_asm_elementwise(
        "tanh.approx.f32 $0, $1;",
        "=f,f",
        [half],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )
    sigmoid = 0.5 * t + 0.5
    return x * sigmoid, sigmoid * (1 + x * (1 - sigmoid))


def start():
    page = candidates.load("fused/03-activation")
    SMS, M = page.NUM_SMS, candidates.M
    FORMS = {"plain": page._silu_plain, "page": page._silu, "tanh": _silu_tanh}

    def tensors(N):
        x, w, b, dy = (t.detach() for t in page.inputs(M, N, HALF))
        return (
            x,
            w,
            b,
            dy,
            torch.zeros(M, device="cuda"),
            torch.ones(M, device="cuda"),
        )

    def call(mode, N):
        x, w, b, dy, mean, rstd = tensors(N)

        def run(plan):
            plan = dict(plan)
            form = FORMS[plan.pop("form")]
            if mode == "forward":
                return page.forward(x, w, b, 1e-5, form, rule=lambda *_: plan)
            page.NUM_SMS = SMS * plan.pop("per_sm")
            return page.backward(
                dy, x, w, mean, rstd, form, rule=lambda *_: plan
            )

        return run

    def now(mode, N):
        page.NUM_SMS = SMS
        x, w, b, dy, mean, rstd = tensors(N)
        if mode == "forward":
            return lambda: page.forward(x, w, b, 1e-5, page._silu)
        return lambda: page.backward(dy, x, w, mean, rstd, page._silu)

    def ceilings(mode, N):
        x, _, _, dy, *_ = tensors(N)
        out = torch.empty_like(x)
        return (
            {"copy": lambda: out.copy_(x)}
            if mode == "forward"
            else {"add": lambda: torch.add(x, dy, out=out)}
        )

    return call, now, ceilings


def forward_plans(N):
    for warps in (1, 2, 4, 8, 16):
        chunk = min(256 * warps, candidates.power(N))
        columns = candidates.cdiv(N, chunk) * chunk // (32 * warps)
        if not 8 <= columns <= 64:
            continue
        plan = {"ROWS": 1, "CHUNK": chunk, "num_warps": warps}
        for registers in (None, 32, 40, 48, 56, 64, 80):
            if registers and not columns + 16 <= registers <= columns + 40:
                continue
            limit = {"maxnreg": registers} if registers else {}
            for form in (
                ("plain", "page") if registers else ("plain", "page", "tanh")
            ):
                yield plan | limit | {"form": form}


WIDTHS = 1024, 2048, 3072, 4096, 5120, 6144, 7168, 8192
WORK = [("forward", N, forward_plans(N)) for N in WIDTHS]
WORK += [
    (
        "backward",
        N,
        [p | {"form": "page"} for p in candidates.backward_plans(N, 2, 40)],
    )
    for N in WIDTHS
]

if __name__ == "__main__":
    candidates.main("fused-03", start, WORK)
