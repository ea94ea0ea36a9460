"""Forward plans of fused/03-activation at 1536 and 7168 columns.

python tune/fused/03.py; table on stdout, CSV in $OUT; 60 to 90 s on one H200.
A chunk of 128 columns a warp has loads of 8 bytes and fewer idle lanes than
one of 256; registers; two rows a program. Other widths, with the same choice
of chunks, say what a rule for all would cost. The bar is 0.9 of the copy.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import race
import torch
from candidates import M, cdiv, power

NAME, HALF = "fused/03-activation", torch.float16
WIDTHS = 1536, 7168, 1024, 2048, 3072, 4096, 5120, 6144, 8192


def plans(N):
    for warps in (1, 2, 4, 8, 16):
        for share in (128, 256, 512):
            chunk = min(share * warps, power(N))
            columns = cdiv(N, chunk) * chunk // (32 * warps)
            if not 8 <= columns <= 64:
                continue
            for rows in (1, 2) if columns <= 24 and N <= 2048 else (1,):
                plan = {"ROWS": rows, "CHUNK": chunk, "num_warps": warps}
                yield plan
                if N in (1536, 7168):
                    for registers in (32, 40, 48, 56, 64, 72, 80, 96):
                        if rows * columns + 24 <= registers <= rows * columns + 40:
                            yield plan | {"maxnreg": registers}


def name_of(plan):
    return " ".join(f"{k}={v}" for k, v in plan.items())


def start():
    from tutorial import load

    page = load(NAME, interpret=False)
    torch.cuda.set_stream(torch.cuda.Stream())

    def calls(N):
        x, w, b, dy = (t.detach() for t in page.inputs(M, N, HALF))
        out = torch.empty_like(dy)
        run = lambda plan: page.forward(x, w, b, 1e-5, page._silu, rule=lambda *_: plan)
        found = {"page": lambda: page.forward(x, w, b, 1e-5, page._silu), "copy": lambda: out.copy_(dy)}
        found["plain"] = lambda: page.forward(x, w, b, 1e-5, page._silu_plain, page.plan_plain)
        return found | {name_of(p): lambda p=p: run(p) for p in plans(N)}

    return calls


if __name__ == "__main__":
    every = {N: ["page", "copy", "plain", *(name_of(p) for p in plans(N))] for N in WIDTHS}
    race.main("fused-03", start, every, ["copy", "plain"], 75)
