"""Tunes the page matrix-products/01-linear on one GPU.

    python docs/drafts/tune_linear.py         on a GPU, from the root
    DRY=1 python docs/drafts/tune_linear.py   without one: does all of it run?

It compiles candidates, then prints the layer with GELU against torch.compile,
few tokens with split-K, and y, dx and dw against cuBLAS, in turns: the rule of
the page, and the best plans. What linear.txt says of it is about the H200.

TUNE_S is how many seconds it may take (225), PARTS which parts, in order
("layers,few,products"). Each part has a share of the time that is left; a step
that would not fit is left out, which a line says, and a smaller one may come
after it.
"""

import concurrent.futures as cf
import contextlib
import multiprocessing as mp
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import NamedTuple

START = time.time()
DRY = os.environ.get("DRY") == "1"
LIMIT = float(os.environ.get("TUNE_S", 10**4 if DRY else 225))
sys.path[:0] = ["docs/_ext", "tests"]
NAME = "matrix-products/01-linear"
EDITS = (
    (
        "    PARTS: tl.constexpr,  # parts of K, each added up on its own\n",
        "    PARTS: tl.constexpr,  # parts of K, each added up on its own\n"
        "    WS: tl.constexpr,\n",
    ),
    (
        "tl.program_id(0), tiles * PARTS, tl.num_programs(0), flatten=STAY\n",
        "tl.program_id(0), tiles * PARTS, tl.num_programs(0),\n"
        "        flatten=STAY and not WS, warp_specialize=WS\n",
    ),
    (
        "        B_TRANSPOSED=b_transposed,\n"
        "        GROUP=8,\n"
        "        **plan,\n",
        "        B_TRANSPOSED=b_transposed,\n"
        "        **({'GROUP': 8, 'WS': False}\n"
        "           | {k: v for k, v in plan.items() if k != 'PER_SM'}),\n",
    ),
    (
        "    _product[(programs,)](\n",
        "    return _product[(programs,)](\n",
    ),
    (
        "        programs = min(programs, NUM_SMS)\n",
        "        programs = min(programs, NUM_SMS * plan.get('PER_SM', 1))\n",
    ),
)
_PAGE = None


def page():
    global _PAGE
    if _PAGE is None:
        import tutorial

        _PAGE = tutorial.load(NAME, EDITS)
        if DRY:
            dry(_PAGE)
    return _PAGE


def dry(m):
    """Clocks that make each call once, and find that all take a µs. The
    interpreter multiplies no bfloat16, so inputs are float16."""
    import torch

    def in_turns(calls):
        for call in calls.values():
            call()
        return dict.fromkeys(calls, (1.0, 1.0, 1.0))

    def device_time(prepare):
        prepare()()
        return 1.0, 1.0, 1.0

    m.inputs.__defaults__ = (torch.float16,)
    m.normal.__kwdefaults__["dtype"] = torch.float16
    m.in_turns = in_turns
    m.device_time = device_time


def left():
    return LIMIT - (time.time() - START)


def say(*words):
    print(*words, flush=True)


def edits_that_fail():
    """Edits that the page does not have once: it has changed since."""
    import tutorial

    text = tutorial.source(NAME)
    return [old for old, _ in EDITS if text.count(old) != 1]


REPLAYS = 1000  # calls of a step that are timed: 15 turns of all its lines
SLOW = 4e14  # operations a second, of a slow line


class Budget:
    """The time of a part, and which of its steps fit into it.

    The work of a step is how many operations one call has.
    """

    def __init__(self, seconds, first):
        self.end = left() - seconds  # what is left when the part is to end
        self.first = first  # seconds that the first step may take
        self.done = []  # work and seconds of steps

    def fits(self, name, work=0):
        """Whether a step does; it is judged by the slowest one so far."""
        needs = self.first
        if self.done:
            # What compiles, records and checks takes as long at any size.
            needs = max(
                seconds + max(0, REPLAYS * (work - other) / SLOW)
                for other, seconds in self.done
            )
        has = max(0, left() - self.end)
        if needs <= has:
            return True
        say(f"  left out: {name}; may take {needs:.0f} s, left {has:.0f} s")
        return False

    @contextlib.contextmanager
    def step(self, work=0):
        begin = time.time()
        yield
        self.done.append((work, time.time() - begin))


def plan(
    m,
    n,
    k,
    warps,
    stages,
    stay=True,
    halves=True,
    group=8,
    per_sm=1,
    ws=False,
    parts=1,
    k_part=0,
):
    return {
        "TILE_M": m,
        "TILE_N": n,
        "TILE_K": k,
        "STAGES": stages,
        "STAY": stay,
        "HALVES": halves,
        "PARTS": parts,
        "K_PART": k_part,
        "PRECISION": "ieee",
        "num_warps": warps,
        "GROUP": group,
        "PER_SM": per_sm,
        "WS": ws,
    }


def short(p):
    s = f"{p['TILE_M']}x{p['TILE_N']}x{p['TILE_K']}"
    s += f" w{p['num_warps']} s{p['STAGES']}"
    s += f" g{p.get('GROUP', 8)}"
    s += " stay" if p["STAY"] else " come"
    s += " halves" if p["HALVES"] else ""
    s += f" {p['PER_SM']}/SM" if p.get("PER_SM", 1) > 1 else ""
    s += " ws" if p.get("WS") else ""
    s += f" parts{p['PARTS']}" if p["PARTS"] > 1 else ""
    return s


# What fits shared memory and does not spill, as compiled for sm_90.
PLANS = [
    plan(128, 256, 64, 8, 4),
    plan(128, 256, 64, 8, 4, group=4),
    plan(128, 256, 64, 8, 4, group=16),
    plan(128, 256, 64, 8, 4, group=6),
    plan(128, 256, 64, 8, 4, stay=False),
    plan(128, 256, 64, 8, 3),
    plan(128, 256, 64, 8, 3, halves=False),
    plan(128, 256, 64, 8, 3, stay=False, halves=False),
    plan(128, 256, 32, 8, 6),
    plan(256, 128, 64, 8, 4),
    plan(256, 128, 64, 8, 4, group=4),
    plan(256, 128, 64, 8, 3),
    plan(256, 128, 64, 8, 3, halves=False),
    plan(256, 128, 64, 8, 4, stay=False),
    plan(128, 128, 64, 8, 4),
    plan(128, 128, 64, 8, 6),
    plan(128, 128, 64, 4, 5),
    plan(128, 128, 64, 4, 3, per_sm=2),
    plan(128, 128, 64, 4, 3, per_sm=2, group=16),
    plan(128, 128, 64, 4, 3, stay=False),
    plan(128, 128, 64, 8, 3, per_sm=2),
    plan(128, 128, 64, 8, 3, stay=False),
    plan(128, 128, 128, 8, 3),
    plan(64, 256, 64, 4, 5),
    plan(64, 256, 64, 4, 2, per_sm=2),
    plan(256, 64, 64, 4, 2, per_sm=2),
    plan(256, 64, 64, 8, 5),
]
# With warp_specialize=True and 4 warps triton 3.6 ends in an error of its pass
# NVGPUWarpSpecialization (all 8 tiles tried); with 8 warps it does nothing.
WS_PLANS = []
KINDS = ("y", "dx", "dw")
SHAPES = ((8192, 4096, 4096), (8192, 4096, 14336), (4096, 1024, 4096))
TOKENS = (16, 1, 64, 256, 512)
FEATURES = 4096
SIDE = 512  # of the matrices with which kernels are compiled
if DRY:
    SHAPES = ((256, 128, 256), (128, 128, 512))
    TOKENS = (16, 1)
    FEATURES = 512
    SIDE = 128


def operands(kind, x, w, dz):
    if kind == "dx":
        return dz, w
    if kind == "dw":
        return dz.T, x
    return x, w.T  # y, and few tokens


def compile_one(job):
    """Launch once at a small size, so that the kernel is kept on disk."""
    kind, p = job
    import torch

    m = page()
    x, w, b, dz = m.inputs(SIDE, SIDE, SIDE)
    try:
        if kind == "layer":
            y, slope = torch.empty_like(dz), torch.empty_like(dz)
            k = m.launch(x, w.T, y, p, b, m._gelu, slope)
        else:
            a, b = operands(kind, x, w, dz)
            if kind == "one token":  # a 1 is compiled in
                a = a[:1]
            c = torch.empty(a.shape[0], SIDE, dtype=x.dtype, device=x.device)
            if p["PARTS"] > 1:
                c = torch.empty(p["PARTS"], *c.shape, device=x.device)
            k = m.launch(a, b, c, p)
        if DRY:
            return 0, 0, 0
        torch.cuda.synchronize()
        return k.n_regs, k.n_spills, k.metadata.shared
    except Exception as e:
        return f"{type(e).__name__}: {str(e).strip()[-70:]}"


def pooled(jobs, seconds):
    """What each job gave; a crash or a hang loses only what is not done."""
    if DRY:
        return dict(enumerate(map(compile_one, jobs)))
    found = {}
    pool = cf.ProcessPoolExecutor(14, mp.get_context("spawn"))
    futures = {pool.submit(compile_one, job): i for i, job in enumerate(jobs)}
    try:
        for future in cf.as_completed(futures, timeout=seconds):
            try:
                found[futures[future]] = future.result()
            except Exception as e:
                found[futures[future]] = f"{type(e).__name__}"
    except cf.TimeoutError:
        say(f"  not all were compiled in {seconds:.0f} s")
    for process in list(getattr(pool, "_processes", {}).values()):
        process.kill()
    pool.shutdown(wait=False, cancel_futures=True)
    return found


def turns(calls, operations):
    """Name -> TFLOP/s, median of 15 turns."""
    return {
        name: operations / us[0] * 1e-6
        for name, us in page().in_turns(calls).items()
    }


def products(budget, numbers):
    import torch

    m = page()
    for M, K, N in SHAPES:
        x, w, _, dz = m.inputs(M, N, K)
        for kind in KINDS:
            operations = 2 * M * N * K
            if not budget.fits(f"{kind} of {M}x{K}->{N}", operations):
                continue
            with budget.step(operations):
                try:
                    one_product(numbers, kind, *operands(kind, x, w, dz))
                    if kind == "y":
                        ladder(x, w)
                except Exception:
                    error = traceback.format_exc()[-300:]
                    say("  FAILED", kind, M, K, N, error)
        if not DRY:
            torch.cuda.empty_cache()


def one_product(numbers, kind, a, b):
    import torch

    m = page()
    rows, along = a.shape
    cols = b.shape[1]
    rule = m.plan_product(rows, cols, along, a.dtype)
    ref = (a @ b).float()

    def call(p):
        c = torch.empty(rows, cols, dtype=a.dtype, device=a.device)
        if p["PARTS"] > 1:
            m.product(a, b, c)  # the rule alone has parts here
        else:
            m.launch(a, b, c, p)
        return c

    calls = {"cublas": lambda: torch.mm(a, b), "rule": lambda: call(rule)}
    plans = {}
    wrong = []
    for p in PLANS + WS_PLANS:
        if not isinstance(numbers.get((kind, str(p))), tuple):
            continue
        try:
            e = ((call(p).float() - ref).norm() / ref.norm()).item()
            if not e < 1e-2:
                wrong.append(short(p))
                continue
        except Exception as error:
            wrong.append(f"{short(p)} {str(error)[-60:]}")
            continue
        plans[short(p)] = p
        calls[short(p)] = lambda p=p: call(p)
    if DRY and (wrong or not plans):
        sys.exit(f"{kind}: not right: {wrong}; right: {list(plans)}")
    calls["cublas again"] = calls["cublas"]
    ops = 2 * rows * cols * along
    speed = turns(calls, ops)
    best = sorted(plans, key=speed.get, reverse=True)
    again = {n: calls[n] for n in ("cublas", "rule", *best[:4])}
    one, two = turns(again, ops), turns(again, ops)
    top = {n: (one[n] + two[n]) / 2 for n in again}
    cu = top["cublas"]
    say(
        f"{kind:2} of {rows} x {along} by {cols}: cuBLAS "
        f"{speed['cublas']:.0f}/{speed['cublas again']:.0f}, again {cu:.0f}; "
        f"rule [{short(rule)}] {100 * speed['rule'] / speed['cublas']:.1f}%, "
        f"again {100 * top['rule'] / cu:.1f}%"
        + (f"; WRONG {wrong}" if wrong else "")
    )
    for n in sorted(best[:4], key=top.get, reverse=True)[:3]:
        regs, spills, shared = numbers[kind, str(plans[n])]
        say(
            f"     {100 * top[n] / cu:5.1f}%  {n}  (regs {regs} "
            f"spills {spills} shared {shared})"
        )
    rest = " ".join(
        f"[{n}]{100 * speed[n] / speed['cublas']:.0f}" for n in best[3:]
    )
    say("     rest:", rest)


def ladder(x, w):
    m = page()
    rungs = {
        name: (lambda name=name: m.climb(x, w, name))
        for name in m.LADDER
        if name != "torch"
    }
    speed = turns(rungs, 2 * x.numel() * w.shape[0])
    said = " ".join(f"{name} {v:.0f}" for name, v in speed.items())
    say("     ladder:", said)


LAYER_PLANS = [
    PLANS[0],
    plan(128, 256, 64, 8, 4, group=4),
    plan(128, 256, 64, 8, 4, stay=False),
    plan(128, 256, 64, 8, 3),
    plan(256, 128, 64, 8, 4),
    plan(128, 128, 64, 8, 4),
    plan(128, 128, 64, 4, 3, per_sm=2),
    plan(128, 128, 64, 4, 3, stay=False),
    plan(128, 128, 64, 8, 3, per_sm=2),
    plan(128, 128, 64, 8, 3, stay=False),
    plan(64, 256, 64, 4, 2, per_sm=2),
]


def compiled_again(m):
    """A compilation of its own: it chooses anew, and forgets no other one."""
    if DRY:
        return m.pytorch_layer
    import types

    import torch

    torch._inductor.config.autotune_local_cache = False
    torch._functorch.config.donated_buffer = False
    torch._inductor.utils.clear_caches()

    def layer(x, w, b):
        return m.F.gelu(m.F.linear(x, w, b), approximate="tanh")

    # Dynamo keeps what it compiled by the code: each has its own.
    of_its_own = types.FunctionType(
        layer.__code__.replace(),
        layer.__globals__,
        "layer",
        None,
        layer.__closure__,
    )
    return torch.compile(of_its_own, dynamic=False)


def layers(budget, numbers):
    for M, K, N in sorted(SHAPES, key=lambda shape: shape[0] * shape[2]):
        operations = 4 * M * N * K  # of a pass, on average
        if budget.fits(f"the layer {M}x{K}->{N}", operations):
            with budget.step(operations):
                one_layer(numbers, M, K, N)


def one_layer(numbers, M, K, N):
    import torch

    m = page()
    try:
        t0 = time.time()
        torch._dynamo.reset()
        x, w, b, dy = m.inputs(M, N, K)
        given = [t.clone().requires_grad_() for t in (x, w, b)]
        saved = m.normal(M, N)
        calls = {
            "cublas": lambda: torch.mm(x, w.T),
            "ours": lambda: m.forward(x, w, b, m._gelu, True),
            "no slope": lambda: m.forward(x, w, b, m._gelu),
            "torch": lambda: m.pytorch_layer(*given),
        }
        back = {"cublas": lambda: (dy @ w, dy.T @ x)}
        layer_ours = m.linear(*given, "gelu")
        grad = torch.autograd.grad
        back["ours"] = lambda: grad(layer_ours, given, dy, retain_graph=True)
        y_torch = m.pytorch_layer(*given)
        back["torch"] = lambda: grad(y_torch, given, dy, retain_graph=True)
        for i in range(3):
            f = compiled_again(m)
            y = f(*given)
            calls[f"compile {i}"] = lambda f=f: f(*given)
            back[f"compile {i}"] = lambda y=y: grad(
                y, given, dy, retain_graph=True
            )
            back[f"compile {i}"]()
        t1 = time.time()
        for p in LAYER_PLANS:
            if not isinstance(numbers.get(("layer", str(p))), tuple):
                continue

            def fwd(p=p):
                y = torch.empty(M, N, dtype=x.dtype, device=x.device)
                s = torch.empty(M, N, dtype=x.dtype, device=x.device)
                m.launch(x, w.T, y, p, b, m._gelu, s)
                return y, s

            calls[f"[{short(p)}]"] = fwd
        for first in (0, 1, 2, 4, 8, 10**6):
            back[f"first {first}"] = lambda first=first: m.backward(
                dy, x, w, saved, m._times_slope, (True, True, True), first
            )
        back["first 4 through gelu"] = lambda: m.backward(
            dy, x, w, saved, m._through_gelu, (True, True, True), 4
        )
        for name, some, ops in (
            ("forward ", calls, 2 * M * N * K),
            ("backward", back, 4 * M * N * K),
        ):
            got = turns(some, ops)
            best = max(got[f"compile {i}"] for i in range(3))
            say(
                f"{M}x{K}->{N} gelu {name}: ours {got['ours']:.0f} = "
                f"{got['ours'] / best:.3f} x compile ({best:.0f}), "
                f"{got['ours'] / got['torch']:.3f} x torch; cuBLAS "
                f"{got['cublas']:.0f}"
            )
            rest = sorted(got, key=got.get, reverse=True)
            say(
                "     "
                + "; ".join(
                    f"{n} {got[n]:.0f}"
                    for n in rest
                    if n not in ("ours", "cublas")
                )
            )
        say(
            f"     (three compilations took {t1 - t0:.0f} s, times "
            f"{time.time() - t1:.0f} s)"
        )
    except Exception:
        say("  FAILED layer", M, K, N, traceback.format_exc()[-500:])
    if not DRY:
        torch.cuda.empty_cache()


FEW = [
    (64, 64, 128, 4, 4),
    (64, 64, 64, 4, 6),
    (64, 32, 128, 4, 5),
    (64, 128, 64, 4, 5),
    (64, 16, 256, 4, 4),
    (64, 32, 256, 4, 3),
]


def few_plans(tokens):
    """Tiles and parts that have work for all SMs, not for many rounds."""
    plans = []
    for tile_m, tile_n, tile_k, warps, stages in FEW:
        tiles = -(-tokens // tile_m) * (FEATURES // tile_n)
        for parts in (1, 2, 4, 8):
            if tiles * parts > 700:
                continue
            p = plan(tile_m, tile_n, tile_k, warps, stages, parts=parts)
            if parts > 1:
                p["K_PART"] = FEATURES // parts
            if tiles * parts > 132:
                p["PER_SM"] = 2
            plans.append(p)
    return plans


def few(budget, numbers):
    """Tokens, parts, tiles: GB/s of the weight and the tokens."""
    for tokens in TOKENS:
        if budget.fits(f"{tokens} tokens"):
            with budget.step():
                few_tokens(tokens)


def few_tokens(tokens):
    import torch

    m = page()
    features = FEATURES
    moved = 2 * features * (features + 2 * tokens)
    found = {}

    def add(name, make):
        def prepare():
            x, w, _, _ = m.inputs(tokens, features, features)
            return make(x, w)

        try:
            found[name] = moved / m.device_time(prepare)[0] * 1e-3
        except Exception as e:
            found[name] = 0
            say("  FAILED", name, str(e)[-80:])

    add("torch", lambda x, w: lambda: x @ w.T)
    add("rule", lambda x, w: lambda: m.forward(x, w))
    add("one", lambda x, w: lambda: m.forward(x, w, most_parts=1))
    for p in few_plans(tokens):

        def make(x, w, p=p, parts=p["PARTS"]):
            def run():
                y = torch.empty(
                    tokens, features, dtype=x.dtype, device=x.device
                )
                if parts == 1:
                    m.launch(x, w.T, y, p)
                    return y
                some = torch.empty(parts, *y.shape, device=x.device)
                m.launch(x, w.T, some, p)
                m.add_parts(some, y)
                return y

            return run

        add(f"[{short(p)}]", make)
    best = sorted(found, key=found.get, reverse=True)
    rule = m.plan_product(tokens, features, features, torch.bfloat16)
    say(
        f"{tokens} tokens: torch {found['torch']:.0f} GB/s, rule "
        f"{found['rule']:.0f} ({short(rule)}), one part "
        f"{found['one']:.0f}; best "
        + ", ".join(f"{n} {found[n]:.0f}" for n in best[:5])
    )


class Part(NamedTuple):
    run: Callable
    share: int  # of the time, beside those of the parts after it
    first: float  # seconds that its first step may take


PARTS = {
    "layers": Part(layers, 3, 12),
    "few": Part(few, 1, 4),
    "products": Part(products, 3, 8),
}


def main():
    if fail := edits_that_fail():
        sys.exit(f"the page has changed; mend EDITS, these: {fail}")
    t0 = time.time()
    jobs = [(kind, p) for kind in KINDS for p in PLANS]
    jobs += [("layer", p) for p in LAYER_PLANS]
    jobs += [("tokens", p) for p in few_plans(16)]
    jobs += [("one token", p) for p in few_plans(1)]
    got = pooled(jobs, min(75, left() / 2))
    numbers = {
        (kind, str(p)): got.get(i, "not compiled")
        for i, (kind, p) in enumerate(jobs)
    }
    say(f"{len(jobs)} kernels compiled in {time.time() - t0:.0f} s")
    jobs = [(kind, p) for kind in KINDS for p in WS_PLANS]
    if WS_PLANS:
        got = pooled(jobs, min(30, left() / 4))
        numbers |= {
            (kind, str(p)): got.get(i, "not compiled")
            for i, (kind, p) in enumerate(jobs)
        }
    for (kind, p), v in numbers.items():
        if not isinstance(v, tuple):
            q = eval(p)
            say(f"  {kind} {short(q)}: {v}")
        elif v[1]:
            q = eval(p)
            say(f"  {kind} {short(q)}: spills {v[1]}")
    names = os.environ.get("PARTS", "layers,few,products").split(",")
    while names:
        t0 = time.time()
        share = PARTS[names[0]].share / sum(PARTS[n].share for n in names)
        name = names.pop(0)
        part = PARTS[name]
        try:
            part.run(Budget(share * left(), part.first), numbers)
        except Exception:
            say("FAILED", name, traceback.format_exc()[-600:])
        say(f"({name} took {time.time() - t0:.0f} s; {left():.0f} s left)")


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
