"""Candidates for the plans and the rule of layer-norm/11-every-width.

python tune/11.py; lines on stdout, CSV in $OUT. One H200, a minute and a half.
Every plan of another kind than the page's is a candidate for the rule, too.
100 % is the fastest copy, or addition backward. The last table has a line for
each width: its bar, the page's plan, the best plan. Plans of chunks are those
of layer-norm/05-chunks, which has to be recorded anew if they change.
python tune/11.py dry: each plan once, in the interpreter, a few rows.
"""

import csv
import itertools
import os
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent / "fused")]
DRY = sys.argv[1:] == ["dry"]
if DRY:
    os.environ["TRITON_INTERPRET"] = "1"
import candidates
import torch
from candidates import cdiv, power

SIZE, SMS, MAIN = 2, 132, os.getpid()
# Recorded at or above their bars: timed with the page's plan alone.
MET = {"forward": [32768], "backward": [4097, 7777, 2**19, 2**20]}
BARS = {
    "forward": {1536: 92, 3584: 92, 4608: 92, 5120: 92, 6656: 92, 32768: 88, 2**19: 75, 2**20: 75, 1151: 85, 2047: 85, 4097: 85, 7777: 85, 12345: 85},
    "backward": {1024: None, 1536: 74, 2048: 74, 2560: None, 3072: None, 4096: None, 10752: 81, 12288: 81, 15360: 81, 2**19: 65, 2**20: 65, 1151: 70, 2047: 70, 4097: 70, 7777: 70, 12345: 70},
}
RULES = {
    "chunks": {"forward": "plan_fwd_chunks", "backward": "plan_bwd_chunks"},
    "shifted": {"forward": "plan_fwd_shifted", "backward": "plan_bwd_shifted"},
    "shared": {"forward": "plan_shared", "backward": "plan_shared"},
}


def rows_of(N):
    if DRY:
        return 9
    most = candidates.M if os.getpid() == MAIN else 1056  # others compile
    return min(most, 2**29 // (N * SIZE))


def chunks_forward(N):
    for warps in (2, 4, 8, 16):
        chunk = min(256 * warps, power(N))
        columns = cdiv(N, chunk) * chunk / (32 * warps)
        for rows in (1, 2) if N <= 2048 else (1,):
            for limit in (None, 64, 80) if columns > 24 else (None,):
                if 8 <= rows * columns <= 40:
                    yield {"kind": "chunks", "ROWS": rows, "CHUNK": chunk, "num_warps": warps, "HINT": "evict_first" if N <= 3072 else ""} | ({"maxnreg": limit} if limit else {})


def chunks_backward(N):
    for warps in (4, 8) if N <= 8192 else (8, 16):
        for chunk in (128 * warps, 256 * warps) if N > 8192 else (256 * warps,):
            chunks = cdiv(N, chunk)
            for rows in (1, 2, 4) if N <= 2048 else (1,):
                columns, tile = rows * chunks * chunk / (32 * warps), 4 * rows * chunks * chunk
                if not 12 <= columns <= (64 if warps < 16 else 32):
                    continue
                for stages, per_sm in itertools.product((2, 3, 4), (1, 2) if N <= 4096 else (1,)):
                    if 60_000 <= per_sm * (stages - 1) * tile <= 200_000 and (N > 4096 or stages > 2):
                        yield {"kind": "chunks", "ROWS": rows, "CHUNK": chunk, "num_warps": warps, "STAGES": stages, "per_sm": per_sm}


def shifted(N, mode):
    """More rows at once in narrow rows; more warps, fewer columns a thread."""
    matrices, most = (1, 48) if mode == "forward" else (2, 50)
    for warps in (2, 4, 8, 16):
        for piece in (128,) if N < 5000 and warps < 8 else (256,):
            chunk = min(piece * warps, power(N + 7))
            columns = cdiv(N + 7, chunk) * chunk / (32 * warps)
            for rows in (1, 2) if N < 2048 else (1,):
                if not 16 <= rows * columns <= (most if warps < 16 else 32):
                    continue
                plan = {"kind": "shifted", "ROWS": rows, "CHUNK": chunk, "num_warps": warps}
                if mode == "forward":
                    yield plan | {"STAGES": 1, "per_sm": 1}
                for stages, per_sm in itertools.product((2, 3, 4), (1, 2) if N < 2048 and rows < 2 else (1,)):
                    programs = max((12 if N <= 1536 else 8) // warps, 1) * per_sm
                    tile = 2 * matrices * rows * columns * 32 * warps
                    if 32_000 <= (stages - 1) * tile * programs <= 200_000:
                        yield plan | {"STAGES": stages, "per_sm": per_sm}


def shared(N, mode):
    for rows, lanes, programs, warps in itertools.product((1, 2, 4), (1024, 2048, 4096, 8192), (1, 2, 3, 4), (4, 8)):
        columns, parts = rows * lanes / (32 * warps), cdiv(N, lanes)
        matrices, least = (1, 24) if mode == "forward" else (2, 16)
        waiting = programs * rows * lanes * SIZE * matrices
        if least <= columns <= (64 if mode == "forward" else 32) and parts <= SMS * programs:
            # What a multiprocessor holds, once in registers, twice on its way.
            if 32_000 <= waiting <= 50_000 and columns * matrices + 24 * (mode == "backward") <= 2048 / (warps * programs):
                yield {"kind": "shared", "ROWS": rows, "LANES": lanes, "programs": programs, "warps": warps}


def plans(mode, N):
    if N in MET[mode]:
        return
    if N % 8:
        yield from shifted(N, mode)
    elif N <= 8192 and mode == "forward":
        yield from chunks_forward(N)
    elif N <= 2**14 and mode == "backward":
        yield from chunks_backward(N)
    if 2**18 < N or (mode == "backward" and N > 10_000):
        yield from shared(N, mode)


def start():
    if DRY:
        sys.path[:0] = [str(candidates.ROOT / "docs/_ext")]
        from tutorial import load

        page = load("layer-norm/11-every-width", interpret=True)
    else:
        page = candidates.load("layer-norm/11-every-width")
    own = {name: getattr(page, name) for rules in RULES.values() for name in rules.values()}
    multiprocessors = page.NUM_SMS

    def chosen(plan, mode, N):
        """What the launches of a kind are made with."""
        plan = dict(plan)
        kind = plan.pop("kind")
        name = RULES[kind][mode]
        page.NUM_SMS = multiprocessors * plan.pop("per_sm", 1)
        if kind == "shifted":
            rule = lambda N, size, step: plan | {"STEP": step}
        elif kind == "shared":
            found = (plan["ROWS"], plan["LANES"]), {"per_sm": plan["programs"], "warps": plan["warps"]}
            rule = lambda *_: found
        else:
            rule = lambda *_: plan
        setattr(page, name, rule)
        return kind

    def made(plan, mode, N, tensors):
        M = rows_of(N)
        x, w, b, dy, y, mean, rstd, dx = tensors
        try:
            kind = chosen(plan, mode, N) if plan else page.pick(N * SIZE, page.can_share(x.dtype))[mode == "backward"]
            if mode == "forward":
                launch = page.FORWARD[kind](M, N, SIZE, 1e-5)
                return lambda: launch(x, w, b, y, mean, rstd)
            if plan and kind == "chunks":
                P = min(page.NUM_SMS, cdiv(M, plan["ROWS"]))
                tile = {k: v for k, v in plan.items() if k not in ("kind", "per_sm")}
                launch = page.launcher(page._layer_norm_bwd_chunks, P, M=M, N=N, EARLY=page.EARLY, **tile)
            else:
                P, launch = page.BACKWARD[kind](M, N, SIZE)
            add_up = page.add_up(P, N)

            def run():
                sums = mean.new_empty(P, 2, N)
                launch(dy, x, w, mean, rstd, dx, sums)
                grads = x.new_empty(2, N)
                add_up(sums, grads)
                return grads

            return run
        finally:
            page.NUM_SMS = multiprocessors
            for name, rule in own.items():
                setattr(page, name, rule)

    def tensors(N):
        x, w, b, dy = (t.detach() for t in page.inputs(rows_of(N), N, torch.float16))
        mean, variance = x.float().mean(1), x.float().var(1, correction=0)
        return x, w, b, dy, torch.empty_like(x), mean, (variance + 1e-5).rsqrt(), torch.empty_like(x)

    def call(mode, N):
        given, runs = tensors(N), {}
        x, w, b, dy, y, _, _, dx = given
        x = x.detach().requires_grad_()
        want = torch.nn.functional.layer_norm(x, (N,), w.requires_grad_(), b)
        if mode == "backward":
            *want, = torch.autograd.grad(want, (x, w), dy)

        def check(grads):
            for got, exact in ((dx, want[0]), (grads[0], want[1])) if mode == "backward" else ((y, want),):
                error = ((got - exact).norm() / exact.norm()).item()
                assert error < 2e-3, f"WRONG {error:.1e}"

        def run(plan):
            key = str(plan)
            if key not in runs:
                runs[key] = made(plan, mode, N, given)
                (dx if mode == "backward" else y).fill_(7)
                check(runs[key]())
            runs[key]()

        return run

    def now(mode, N):
        return made(None, mode, N, tensors(N))

    def ceilings(mode, N):
        x, _, _, dy, out, *_ = tensors(N)
        if mode == "backward":
            return {f"add {i}": lambda: torch.add(x, dy, out=out) for i in "12"}
        return {"copy": lambda: out.copy_(x), "mul": lambda: torch.mul(x, 1, out=out)}

    return call, now, ceilings


WORK = [(mode, N, list(plans(mode, N))) for mode in BARS for N in BARS[mode]]
WORK.sort(key=lambda work: (not work[2], -work[1]))  # should time run out


def dry():
    call, now, _ = start()
    for mode, N, found in WORK:
        print(mode, N, len(found), flush=True)
        if N <= 2**14:
            now(mode, N)()
            run = call(mode, N)
            for plan in found[:: len(found) // 3 or 1]:
                if plan["kind"] != "shared":  # whose words need a GPU
                    run(plan)


def table():
    with open(Path(os.environ.get("OUT", ".")) / "tune-11.csv", newline="") as file:
        found = list(csv.DictReader(file))
    share = lambda row, key: 100 * float(row["ceiling"]) / float(row[key])
    for mode, N in ((mode, N) for mode in BARS for N in BARS[mode]):
        some = [r for r in found if (r["mode"], int(r["N"])) == (mode, N)]
        if some:
            best = min(some, key=lambda r: float(r["us"]))
            plan = {k: v for k, v in best.items() if v and k not in ("mode", "N", "us", "page", "ceiling")}
            print(f"{mode:8} {N:7}: bar {BARS[mode][N]}, page {share(best, 'page'):.1f}, best {share(best, 'us'):.1f}", *(f"{k}={v}" for k, v in plan.items()))


if __name__ == "__main__":
    if DRY:
        dry()
    else:
        candidates.SECONDS = 75
        candidates.main("11", start, WORK)
        table()
