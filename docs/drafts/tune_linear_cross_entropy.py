"""Tunes matrix-products/03-linear-cross-entropy on one GPU.

    python docs/drafts/tune_linear_cross_entropy.py         on a GPU
    DRY=1 python docs/drafts/tune_linear_cross_entropy.py   without one

TUNE_S: seconds at most (225). PARTS: of "steps,kernels,small,skip", in order.
"""

import concurrent.futures as cf
import contextlib
import functools
import multiprocessing as mp
import os
import sys
import time
import traceback

START = time.time()
DRY = os.environ.get("DRY") == "1"
LIMIT = float(os.environ.get("TUNE_S", 10**4 if DRY else 225))
sys.path[:0] = ["docs/_ext", "tests"]
NAME = "matrix-products/03-linear-cross-entropy"
EDITS = (
    (
        "width = min(2 * BLOCK, tile_n)",
        "width = min(IN_PLACE[0] * BLOCK, tile_n)",
    ),
    (
        "        WIDTH=width,\n        num_warps=8,\n",
        "        WIDTH=width,\n        num_warps=IN_PLACE[1],\n",
    ),
    ("BLOCK = 64  #", "IN_PLACE = [2, 8]\nBLOCK = 64  #"),
)
if DRY:
    os.environ["TRITON_INTERPRET"] = "1"
_PAGE = None


def page():
    global _PAGE
    if _PAGE is None:
        import tutorial

        text = tutorial.source(NAME)
        edits = [e for e in EDITS if text.count(e[0]) == 1]
        if len(edits) < len(EDITS):
            say(
                "  the page has changed: edits that fail",
                [e[0] for e in EDITS if e not in edits],
            )
        _PAGE = tutorial.load(NAME, tuple(edits))
        if not hasattr(_PAGE, "IN_PLACE"):
            _PAGE.IN_PLACE = [2, 8]
    return _PAGE


def say(*words):
    print(*words, flush=True)


def left():
    return LIMIT - (time.time() - START)


def plan(m, n, k, warps, stages, stay=True, group=8, per_sm=1):
    return {
        "TILE_M": m,
        "TILE_N": n,
        "TILE_K": k,
        "GROUP": group,
        "STAGES": stages,
        "STAY": stay,
        "PRECISION": "ieee",
        "num_warps": warps,
        "PER_SM": per_sm,
    }


def short(p):
    s = f"{p['TILE_M']}x{p['TILE_N']}x{p['TILE_K']} w{p['num_warps']}"
    s += f" s{p['STAGES']} g{p['GROUP']}" + (" stay" if p["STAY"] else " come")
    return s + (f" {p['PER_SM']}/SM" if p["PER_SM"] > 1 else "")


PLANS = [
    plan(128, 256, 64, 8, 4),
    plan(128, 256, 64, 8, 4, group=4),
    plan(128, 256, 64, 8, 4, group=16),
    plan(128, 256, 64, 8, 4, group=32),
    plan(128, 256, 64, 8, 3),
    plan(128, 256, 64, 8, 3, group=16),
    plan(128, 256, 64, 8, 4, stay=False),
    plan(128, 256, 64, 8, 3, stay=False),
    plan(256, 128, 64, 8, 4),
    plan(256, 128, 64, 8, 3),
    plan(256, 128, 64, 8, 3, stay=False),
    plan(128, 128, 64, 8, 4),
    plan(128, 128, 64, 8, 5),
    plan(128, 128, 64, 4, 3, stay=False),
    plan(128, 128, 64, 4, 3, per_sm=2),
    plan(128, 128, 64, 4, 4),
    plan(64, 256, 64, 4, 2, stay=False),
    plan(64, 256, 64, 4, 2, per_sm=2),
    plan(128, 128, 64, 8, 3, stay=False),
]
DTYPE = "float16" if DRY else "bfloat16"
BIG = (4096, 4096, 128256)  # tokens of a chunk, features, classes
SMALL = (5504, 768, 32000)
TOKENS = (2048, 8192, 32768)
SMALL_TOKENS = (4096, 16384)
TINY = (512, 512, 4096)  # to compile with
if DRY:
    BIG, SMALL, TINY = (256, 64, 512), (256, 48, 300), (128, 64, 256)
    TOKENS, SMALL_TOKENS = (256,), (256,)
    PLANS = PLANS[:1] + PLANS[13:14]
KINDS = ("scores", "loss", "again", "dx", "dw first", "dw add", "dw alone")


def sync():
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


class Work:
    """Matrices of a chunk, and the kernels as calls."""

    def __init__(self, tokens, features, classes):
        import torch

        m = page()
        self.m, self.dtype = m, getattr(torch, DTYPE)
        like = {"dtype": self.dtype, "device": m.DEVICE}
        torch.manual_seed(0)
        self.x = torch.randn(tokens, features, device=m.DEVICE).to(self.dtype)
        self.w = torch.randn(classes, features, **like) * features**-0.5
        self.target = torch.randint(classes, (tokens,), device=m.DEVICE)
        self.grads = m.padded(tokens, classes, **like)
        self.rows = torch.empty(6, tokens, device=m.DEVICE)
        self.parts = torch.empty(
            2 * tokens * m.triton.cdiv(classes, 64), device=m.DEVICE
        )
        self.dx = m.padded(tokens, features, **like)
        self.dw = m.padded(classes, features, **like)
        self.sums = m.padded(classes, features, torch.float32, m.DEVICE)
        self.options = m.Options()
        self.scale = torch.ones((), device=m.DEVICE)
        self.operations = 2 * tokens * features * classes

    @contextlib.contextmanager
    def planned(self, p):
        m = self.m
        before, sms = m.plan, m.NUM_SMS
        if p is not None:
            fixed = {k: v for k, v in p.items() if k != "PER_SM"}
            m.plan = lambda *_, **__: fixed
            m.NUM_SMS = sms * p["PER_SM"]
        try:
            yield
        finally:
            m.plan, m.NUM_SMS = before, sms

    def call(self, kind, p=None):
        m, x, w, g = self.m, self.x, self.w, self.grads
        times = m.multiply
        with self.planned(p):
            if kind in ("scores", "loss"):
                powers = g if kind == "scores" else None
                m.scores(x, w, None, None, self.options, powers, self.parts)
            elif kind == "finish":
                m.finish(
                    self.parts,
                    x,
                    w,
                    None,
                    None,
                    None,
                    self.target,
                    self.rows,
                    self.options,
                )
            elif kind == "in place":
                m.in_place(
                    g,
                    self.parts,
                    x,
                    self.rows,
                    self.target,
                    None,
                    None,
                    self.options,
                )
            elif kind == "again":
                m.scores_again(
                    x,
                    w,
                    None,
                    None,
                    self.options,
                    g,
                    self.rows,
                    self.target,
                    0,
                )
            elif kind == "dx":
                times(g, w, self.dx, False)
            elif kind == "dw first":
                times(g, x, self.sums, True)
            elif kind == "dw add":
                times(g, x, self.sums, True, add=True)
            elif kind == "dw alone":
                times(g, x, self.dw, True, scale=self.scale)
            elif kind == "round dw":
                step = m.Step()
                step.sums = self.sums
                m.finish_dw(step, x, w, self.scale)

    def sound(self):
        """Numbers that are gradients, so that power is as in a step."""
        for kind in ("scores", "finish", "in place"):
            self.call(kind)
        sync()


def compile_one(job):
    kind, p = job
    try:
        work = Work(*TINY)
        work.rows.zero_()
        work.grads.zero_()
        work.call(kind, p)
        sync()
        return None
    except Exception as e:
        return f"{type(e).__name__}: {str(e).strip()[-90:]}"


def pooled(jobs, seconds):
    if DRY:
        return dict(zip(map(str, jobs), map(compile_one, jobs), strict=False))
    found = {}
    pool = cf.ProcessPoolExecutor(14, mp.get_context("spawn"))
    futures = {pool.submit(compile_one, job): str(job) for job in jobs}
    try:
        for future in cf.as_completed(futures, timeout=seconds):
            try:
                found[futures[future]] = future.result()
            except Exception as e:
                found[futures[future]] = type(e).__name__
    except cf.TimeoutError:
        say(f"  not all were compiled in {seconds:.0f} s")
    for process in list(getattr(pool, "_processes", {}).values()):
        process.kill()
    pool.shutdown(wait=False, cancel_futures=True)
    return found


def turns(calls, times=7):
    """ms of each call: median, in turns, after some work of its own."""
    import torch

    if DRY:
        for call in calls.values():
            call()
        return dict.fromkeys(calls, 1.0)
    busy = torch.empty(2**29, dtype=torch.int8, device="cuda")
    found = {name: [] for name in calls}
    for call in calls.values():
        call()
    torch.cuda.synchronize()
    for _ in range(times):
        for name, call in calls.items():
            start = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            for _ in range(16):
                busy.zero_()
            start.record()
            call()
            end.record()
            torch.cuda.synchronize()
            found[name].append(start.elapsed_time(end))
    return {n: sorted(t)[len(t) // 2] for n, t in found.items()}


def kernels(shape):
    """Each kernel: the rule's plan, and others; cuBLAS beside the products."""
    import torch

    m = page()
    work = Work(*shape)
    work.sound()
    ops = work.operations
    T, D, V = shape
    again = ("scores", "dx", "dw add")
    say(
        f"== kernels, a chunk of {T} x {D} -> {V}; a product "
        f"{ops / 1e12:.2f} TFLOP"
    )
    x, w, g = work.x, work.w, work.grads
    calls = {
        "cublas scores": lambda: torch.mm(x, w.T, out=g),
        "cublas dx": lambda: torch.mm(g, w),
        "cublas dw": lambda: torch.mm(g.T, x),
    }
    for kind in (*KINDS, "round dw", "finish", "in place"):
        calls[kind] = functools.partial(work.call, kind)
    # Powers and gradients stand in one matrix: the numbers of what is timed
    # are what the call before has left.
    ms = turns(calls, 9)
    say(
        "  rule:",
        "; ".join(
            f"{n} {t:.3f} ms"
            + (f" {ops / t * 1e-9:.0f}" if t > 0.3 * ms["dx"] else "")
            for n, t in ms.items()
        ),
    )
    for width, warps in ((1, 4), (2, 4), (2, 8), (4, 4), (4, 8)):
        m.IN_PLACE[:] = width, warps
        try:
            t = turns(
                {"in place": functools.partial(work.call, "in place")}, 9
            )
            gb = 4 * T * V / t["in place"] * 1e-6
            say(
                f"  in place, width {width}, warps {warps}: "
                f"{t['in place']:.3f} ms {gb:.0f} GB/s"
            )
        except Exception as e:
            say("  in place", width, warps, "FAILED", str(e)[-80:])
    m.IN_PLACE[:] = 2, 8
    work.sound()
    for kind in again:
        calls, wrong = {}, []
        for p in PLANS:
            try:
                work.call(kind, p)
                sync()
            except Exception as e:
                wrong.append(f"{short(p)}: {type(e).__name__}")
                continue
            calls[short(p)] = functools.partial(work.call, kind, p)
        ms = turns(calls, 7)
        best = sorted(ms, key=ms.get)
        ms |= turns({n: calls[n] for n in best[:5]}, 11)
        say(
            f"  {kind}: "
            + " | ".join(
                f"{n} {ops / ms[n] * 1e-9:.0f}" for n in sorted(ms, key=ms.get)
            )
        )
        if wrong:
            say("    failed:", wrong)


def peers():
    found = {}
    try:
        import torch
        from liger_kernel.transformers.fused_linear_cross_entropy import (
            LigerFusedLinearCrossEntropyLoss as Liger,
        )

        found["liger"] = lambda x, w, t: Liger()(w, x, t)
        found["liger f32"] = lambda x, w, t: Liger(accum_dtype=torch.float32)(
            w, x, t
        )
    except Exception as e:
        say("  no Liger:", str(e)[-90:])
    try:
        from cut_cross_entropy import linear_cross_entropy as cce

        found["cce"] = lambda x, w, t: cce(x, w, t)
        found["cce exact"] = lambda x, w, t: cce(x, w, t, filter_eps=None)
    except Exception as e:
        say("  no Cut Cross-Entropy:", str(e)[-90:])
    return found


def step(function, x, w, t):
    import torch

    return torch.autograd.grad(function(x, w, t), (x, w))


def ours(**options):
    m = page()
    chunk = options.pop("chunk", 0)

    def function(x, w, t):
        if not chunk:
            return m.linear_cross_entropy(x, w, t, **options)
        return m._LinearCrossEntropy.apply(
            x, w, None, t, None, m.Options(chunk=chunk, **options)
        )

    return function


def memory(call):
    import torch

    if DRY:
        call()
        return 0.0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = call()
    torch.cuda.synchronize()
    del result
    return (torch.cuda.max_memory_allocated() - before) / 1e9


def steps(features, classes, all_tokens, chunks, compiled=()):
    import torch
    from torch.nn import functional

    m = page()
    dtype = getattr(torch, DTYPE)
    for T in all_tokens:
        if left() < 25:
            say(f"  left out: {T} tokens")
            continue
        torch.manual_seed(0)
        x = torch.randn(T, features, device=m.DEVICE).to(dtype)
        w = torch.randn(classes, features, device=m.DEVICE, dtype=dtype)
        w *= features**-0.5
        x.requires_grad_()
        w.requires_grad_()
        t = torch.randint(classes, (T,), device=m.DEVICE)

        def whole(x, w, t):
            return functional.cross_entropy(functional.linear(x, w), t)

        ways = {"ours": ours(), "ours again": ours(recompute=True)}
        for c in chunks:
            if c <= T:
                ways[f"chunk {c}"] = ours(chunk=c)
        ways["again 2048"] = ours(chunk=2048, recompute=True)
        ways["torch"] = whole
        if T in compiled and not DRY and left() > 60:
            ways["compile"] = torch.compile(whole, dynamic=False)
        ways |= peers() if not DRY else {}
        calls, used, errors = {}, {}, {}
        want = step(ways["torch"], x, w, t) if T * classes < 3e9 else None
        want = step(ways["ours again"], x, w, t) if want is None else want
        for name, way in ways.items():
            call = functools.partial(step, way, x, w, t)
            try:
                got = call()
                errors[name] = [
                    ((a.float() - b.float()).norm() / b.float().norm()).item()
                    if a.numel() < 3e8
                    else (
                        (a[:4096].float() - b[:4096].float()).norm()
                        / b[:4096].float().norm()
                    ).item()
                    for a, b in zip(got, want, strict=False)
                ]
                del got
                used[name] = memory(call)
            except Exception as e:
                say(
                    f"  {name} FAILED at {T}:",
                    type(e).__name__,
                    str(e)[-150:].replace("\n", " "),
                )
                continue
            calls[name] = call
        del want
        slow = 5 if T > 8192 else 9
        ms = turns(calls, slow)
        ops = 6 * T * features * classes
        say(
            f"== step, {T} x {features} -> {classes}: ms, TFLOP/s of three "
            "products, GB beyond inputs, errors of dx, dw beside PyTorch"
        )
        for name in ms:
            a, b = errors[name]
            say(
                f"  {name:12} {ms[name]:8.2f} {ops / ms[name] * 1e-9:5.0f} "
                f"{used[name]:7.3f}  {a:.1e} {b:.1e}"
            )
        if not DRY and T in (8192, 16384):
            for name in ("ours", "ours again"):
                profile(name, calls[name])
        calls.clear()
        if not DRY:
            torch.cuda.empty_cache()


def profile(name, call):
    import torch

    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CUDA]
    ) as prof:
        call()
        torch.cuda.synchronize()
    rows = sorted(prof.key_averages(), key=lambda e: -e.device_time_total)
    total = sum(e.device_time_total for e in rows)
    say(
        f"    {name}, kernels of {total:.0f} us: "
        + "; ".join(
            f"{e.key[:28]} {e.count}x {e.device_time_total:.0f}"
            for e in rows[:9]
        )
    )


def skip(features, classes, T):
    """Skipping, by how sharp: logits minus s times the log of the rank."""
    import torch

    m = page()
    dtype = getattr(torch, DTYPE)
    unit = torch.finfo(dtype).eps / 2
    for s in (1.0, 1.5, 2.0, 3.0):
        if left() < 12:
            say("  left out: skip", s)
            continue
        torch.manual_seed(0)
        x = torch.randn(T, features, device=m.DEVICE).to(dtype)
        w = torch.randn(classes, features, device=m.DEVICE, dtype=dtype)
        w *= features**-0.5
        bias = -s * torch.arange(1, classes + 1, device=m.DEVICE).log()
        bias = bias.to(dtype)
        t = torch.multinomial(bias.float().softmax(0), T, replacement=True)
        x.requires_grad_()
        w.requires_grad_()
        calls, results = {}, {}
        for name, kept in (
            ("all", 0.0),
            ("unit/V", unit / classes),
            ("2**-12", 2.0**-12),
        ):
            way = functools.partial(
                m.linear_cross_entropy, linear_bias=bias, skip_below=kept
            )
            try:
                results[name] = step(way, x, w, t)
                calls[name] = functools.partial(step, way, x, w, t)
            except Exception as e:
                say("  FAILED", name, str(e)[-120:])
        ms = turns(calls, 5)
        ref = results["all"]
        errors = {
            n: [
                ((a.float() - b.float()).norm() / b.float().norm()).item()
                for a, b in zip(r, ref, strict=False)
            ]
            for n, r in results.items()
        }
        say(
            f"== skip, s = {s}, {T} x {features} -> {classes}: "
            + "; ".join(
                f"{n} {ms[n]:.1f} ms, errors {errors[n][0]:.0e} "
                f"{errors[n][1]:.0e}"
                for n in ms
            )
        )
        calls.clear()
        results.clear()
        if not DRY:
            torch.cuda.empty_cache()


def part(name, *args):
    try:
        globals()[name](*args)
    except Exception:
        say("  FAILED", name, traceback.format_exc()[-700:])
    import torch

    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def main():
    parts = os.environ.get("PARTS", "steps,kernels,small,skip").split(",")
    if "kernels" in parts:
        jobs = [(kind, None) for kind in (*KINDS, "finish", "in place")]
        jobs += [(k, p) for k in ("scores", "dx", "dw add") for p in PLANS]
        begin = time.time()
        failed = {j: e for j, e in pooled(jobs, 60).items() if e}
        say(
            f"{len(jobs)} launches compiled in {time.time() - begin:.0f} s;",
            f"failed: {failed}" if failed else "none failed",
        )
    if "steps" in parts:
        part("steps", BIG[1], BIG[2], TOKENS, (2048, 8192), (8192,))
    if "small" in parts:
        part(
            "steps",
            SMALL[1],
            SMALL[2],
            SMALL_TOKENS,
            (2048, 4096, 8192),
            (16384,),
        )
    if "kernels" in parts and left() > 20:
        part("kernels", BIG)
    if "kernels" in parts and left() > 15:
        part("kernels", SMALL)
    if "skip" in parts and left() > 12:
        part("skip", BIG[1], BIG[2], 8192 if not DRY else 128)
    say(f"done after {time.time() - START:.0f} s")


if __name__ == "__main__":
    main()
