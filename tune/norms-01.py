"""Is the forward pass of norms-and-losses/01-rms-norm ahead of Liger?

python tune/norms-01.py; table on stdout, CSV in $OUT; 60 to 90 s on one H200.
With a residual: warps, chunk, hint, and when the weight is loaded: at the end
(the page), with x and the residual, or after s is stored, as Liger does; stores
that ask to leave the cache first.
Liger must be importable; the ceiling is the page's best tile.
"""

import importlib.util

import race
import torch
from candidates import M, cdiv, power

NAME = "norms-and-losses/01-rms-norm"
WIDTHS = 2048, 2560, 3072, 3584, 4096, 5120, 7168, 8192, 12288, 16384
LATE = '''        w = _load(w_ptr, c, N, CHUNK, "evict_last").to(acc)
        _store(y_ptr + row * N, sums[c].to(acc) * rstd * w, c, N, CHUNK)
'''
EARLY = '''        w = ws[c].to(acc)
        _store(y_ptr + row * N, sums[c].to(acc) * rstd * w, c, N, CHUNK)
'''
MORE = "    xs, more, sums = (), (), ()\n"
FIRST = '''            more += (_load(residual_ptr + row * N, c, N, CHUNK, HINT),)
    squares'''
SECOND = "        sums += (s,)\n        squares"
LOAD = '{}ws += (_load(w_ptr, c, N, CHUNK, "evict_last"),)\n'
NO_WS = (MORE, "    xs, more, sums, ws = (), (), (), ()\n")
TILES = [(block, warps) for block in (1024, 2048, 8192) for warps in (2, 4, 8)]
VARIANTS = {
    "late": (),
    "first": (NO_WS, (LATE, EARLY), (FIRST, FIRST[: -len("    squares")] + LOAD.format(8 * " ") + "    squares")),
    "second": (NO_WS, (LATE, EARLY), (SECOND, "        sums += (s,)\n" + LOAD.format(8 * " ") + "        squares")),
}
STORE = "tl.store(ptr + col, value, mask=col < N)"
VARIANTS |= {f"{v} cs": (*VARIANTS[v], (STORE, STORE[:-1] + ', cache_modifier=".cs")')) for v in ("late", "first")}


def plans(N):
    for variant in VARIANTS:
        for warps in (4, 8, 16, 32):
            for chunk in (256 * warps, 512 * warps):
                held = cdiv(N, chunk) * chunk / (32 * warps)
                if not 8 <= held <= 48 or chunk > power(N) or "cs" in variant and chunk > 256 * warps:
                    continue
                for hint in ("", "evict_first") if N <= 3072 else ("",):
                    yield variant, {"CHUNK": chunk, "HINT": hint, "num_warps": warps}


def name_of(variant, plan):
    return " ".join([variant, *(f"{k}={v}" for k, v in plan.items())])


def start():
    from tutorial import load

    pages = {v: load(NAME, replace, interpret=False) for v, replace in VARIANTS.items()}
    torch.cuda.set_stream(torch.cuda.Stream())
    page = pages["late"]

    def calls(N):
        given = x, residual, w, dy, ds = page.inputs(M, N, torch.bfloat16)
        leaves = x.detach(), residual.detach(), w.detach()
        found = {"page": lambda: page.CALLS["triton"](x, residual, w)}
        for tile in TILES:
            found[f"ceiling {tile}"] = page.move(*tile, "forward", *given)
        if importlib.util.find_spec("liger_kernel"):
            found["liger"] = lambda: page.liger(x, residual, w)
        for variant, plan in plans(N):
            found[name_of(variant, plan)] = lambda f=pages[variant].forward, plan=plan: f(*leaves, 1e-6, plan)
        return found

    return calls


def names(N):
    liger = ["liger"] if importlib.util.find_spec("liger_kernel") else []
    return ["page", *(f"ceiling {t}" for t in TILES), *liger, *(name_of(*p) for p in plans(N))]


if __name__ == "__main__":
    every = {N: names(N) for N in WIDTHS}
    rivals = ["liger", *(f"ceiling {t}" for t in TILES)]
    rows = race.main("norms-01", start, every, rivals, 75)
    # One rule for all widths: what each variant loses against Liger, with the
    # page's plan.
    from tutorial import load

    rule = load(NAME, interpret=False).plan_forward
    times = {(r["N"], r["name"]): r["us"] for r in rows}
    for most in 2048, 4096, 8192:
        for variant in VARIANTS:
            said = []
            for N in WIDTHS:
                plan = {k: v for k, v in rule(N, (2, 2), most).items()}
                us, peer = times.get((N, name_of(variant, plan))), times.get((N, "liger"))
                said.append(f"{peer / us:.4f}" if us and peer else "-")
            print(f"most={most} {variant}: speed over Liger's", *said)
