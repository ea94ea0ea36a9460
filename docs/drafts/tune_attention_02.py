"""Tiles of attention/02-backward on a GPU, in turns with cuDNN and page 01.

    python3 docs/drafts/tune_attention_02.py check            # "turns" alone
    python3 docs/drafts/tune_attention_02.py tune [SECONDS]   # all designs

``check`` runs the design that takes turns: small cases against float64, two
at full size against PyTorch, and 100 runs for the same bits.

``tune`` compiles all configurations on all cores without running them, times
whole backward passes (CUDA graphs, all in turns, as the page's figures do) of
16384 tokens at four lengths, and prints the three best at each length, and
over all lengths with what they spill. Then it times the designs with the best
tiles, checks their gradients, and tries room for ds. A part that would begin
after SECONDS (190) is left out. "turns" is timed last, in a process of its own
that is ended after 60 s: a queue that waits for ever takes nothing along.

What to do with it: write the best (queries, keys, warps, stages) into TILES
of the page (up to 64, of 128), the group into `group=32,` of in_turns_of_keys.
"""

import contextlib
import functools
import math
import multiprocessing as mp
import os
import sys
import time
from pathlib import Path

T0 = time.time()
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "docs" / "_ext"), str(ROOT / "tests")]
LENGTHS = (512, 1024, 4096, 16384)

# queries, keys, warps, stages
ADDS = {
    128: [
        *((64, 128, 8, 3), (64, 128, 8, 2), (64, 64, 4, 1), (64, 128, 8, 4)),
        *((64, 64, 4, 2), (32, 128, 8, 3)),
    ],
    64: [
        *((64, 64, 4, 2), (64, 64, 4, 3), (64, 64, 4, 4), (64, 128, 8, 2)),
        *((64, 128, 8, 3), (64, 128, 8, 4), (128, 64, 8, 2), (128, 64, 4, 2)),
        *((128, 128, 8, 2), (128, 128, 8, 3), (64, 128, 4, 2)),
        *((32, 128, 4, 3), (32, 128, 8, 3)),
    ],
}
STORED = {
    128: [
        *((64, 64, 4, 2), (64, 64, 4, 3), (64, 64, 4, 1), (32, 64, 4, 3)),
        *((32, 64, 4, 4), (64, 128, 8, 2), (64, 128, 8, 3), (64, 128, 8, 4)),
        *((128, 64, 8, 2), (128, 128, 8, 2), (32, 128, 8, 3), (64, 64, 8, 2)),
    ],
    64: [
        *((64, 64, 4, 2), (64, 64, 4, 3), (64, 64, 4, 4), (64, 128, 8, 2)),
        *((64, 128, 8, 3), (64, 128, 8, 4), (128, 64, 8, 2), (128, 64, 4, 2)),
        *((128, 128, 8, 2), (128, 128, 8, 3), (64, 128, 4, 2)),
        *((32, 128, 4, 3), (64, 128, 4, 3)),
    ],
}
PRODUCT = {
    128: [
        *((128, 64, 4, 3), (128, 64, 4, 4), (128, 64, 8, 3), (128, 64, 8, 4)),
        *((128, 128, 4, 2), (128, 128, 8, 2), (128, 128, 8, 3)),
        *((256, 64, 8, 3), (256, 64, 8, 4), (256, 128, 8, 2)),
        *((64, 128, 4, 3), (64, 64, 4, 4)),
    ],
    64: [
        *((128, 64, 4, 3), (128, 64, 4, 4), (128, 64, 4, 5), (128, 128, 4, 3)),
        *(
            (128, 128, 4, 4),
            (128, 128, 8, 3),
            (256, 64, 8, 3),
            (256, 64, 8, 4),
        ),
        *((256, 128, 8, 2), (256, 128, 8, 3), (256, 64, 4, 3)),
        *((64, 128, 4, 3), (64, 128, 4, 4)),
    ],
}
TURNS = {  # and the group; no load runs ahead, so stages make no difference
    D: [(*plan, 1, group) for plan in plans for group in (8, 16, 32, 64)]
    for D, plans in {
        128: [
            *((64, 64, 4), (32, 64, 4), (64, 128, 8), (32, 128, 8)),
            *((64, 64, 8), (128, 64, 8)),
        ],
        64: [
            *((64, 64, 4), (32, 64, 4), (64, 128, 8), (128, 64, 8)),
            *((128, 128, 8), (64, 128, 4)),
        ],
    }.items()
}
DESIGNS = {
    "stored": STORED,
    "product": PRODUCT,
    "atomics": ADDS,
    "bulk": ADDS,
    "turns": TURNS,
}
KERNELS = ("_attention_bwd_all", "_attention_bwd_product")
OF_SEVEN = ("_attention_bwd_keys", "_attention_bwd_queries")


def say(*words):
    print(*words, flush=True)


@functools.cache
def page():
    import tutorial

    return tutorial.load("attention/02-backward")


@contextlib.contextmanager
def tiles(design, D, plan):
    """The design has these tiles, and its programs this group."""
    p = page()
    before, launch = p.TILES[design], p.all_at_once
    small, large = before
    four = plan[:4]
    p.TILES[design] = (small, four) if D > 64 else (four, large)
    if design == "turns" and len(plan) > 4:

        def grouped(*args, **named):
            return launch(*args, **(named | {"group": plan[4]}))

        p.all_at_once = grouped
    try:
        yield
    finally:
        p.TILES[design] = before
        p.all_at_once = launch


def with_plan(design, D, plan):
    def call(*given):
        which = "stored" if design == "product" else design
        with tiles(design, D, plan):
            return page().DESIGNS[which](*given)

    return call


def given(N, D, batch=None):
    import torch

    p = page()
    shape = (batch or p.TOKENS // N, 2048 // D, N, D)
    q, k, v, dy = (
        torch.randn(shape, device=p.DEVICE, dtype=torch.float16)
        for _ in range(4)
    )
    y, lse = p.forward(q, k, v, D**-0.5, p.plan_forward(D))
    return dy, q, k, v, y, lse, D**-0.5


def watch(warmup, found):
    """Kernels are only compiled, or what they spill is kept in found."""
    p = page()
    for name in (*KERNELS, *(OF_SEVEN if warmup else ())):
        kernel = getattr(p, name)
        run = type(kernel).run

        def watched(*args, _run=run, _kernel=kernel, _name=name, **named):
            if warmup:
                named["warmup"] = True
            built = _run(_kernel, *args, **named)
            if not warmup:
                found[_name] = 4 * built.n_spills
            return built

        kernel.run = watched


def compile_one(job):
    design, D, plan = job
    try:
        import torch

        watch(True, {})
        if design == "seven":
            p = page()
            p.tiled(D, plan, *p.tensors_of(1, 1024, 128, torch.float16))
            return None
        with_plan(design, D, plan)(*given(1024, D, batch=1))
        return None
    except Exception as error:
        return job, f"{type(error).__name__}: {str(error)[:100]}"


def rivals(N, D):
    """cuDNN, FlashAttention-2, and the seven products of page 01."""
    import torch

    p = page()
    q, k, v, dy = p.inputs(N, D, torch.float16)
    calls = {}
    for name, backend in (
        ("cudnn", torch.nn.attention.SDPBackend.CUDNN_ATTENTION),
        ("flash", torch.nn.attention.SDPBackend.FLASH_ATTENTION),
    ):
        y = p.with_backend(backend)(q, k, v)
        calls[name] = functools.partial(
            torch.autograd.grad, y, (q, k, v), dy.detach(), retain_graph=True
        )
    return calls


def set_best(best):
    p = page()
    for (design, D), plan in best.items():
        small, large = p.TILES[design]
        four = plan[:4]
        p.TILES[design] = (small, four) if D > 64 else (four, large)
        if design == "turns":
            GROUP[D] = plan[4]


GROUP = {}


def tune(design, best, deadline=None):
    """The best tiles of both head dimensions, and lines on the others."""
    import torch

    p = page()
    set_best(best)
    found = {}
    watch(False, found)
    for D in (128, 64):
        if deadline and time.time() - T0 > deadline:
            say(f"D {D} {design}: left out, {time.time() - T0:.0f} s")
            continue
        speeds, spills, bad = {}, {}, {}
        for N in LENGTHS:
            tensors = given(N, D)
            calls = {"seven": functools.partial(p.DESIGNS["seven"], *tensors)}
            for plan in DESIGNS[design][D]:
                if plan in bad:
                    continue
                call = functools.partial(with_plan(design, D, plan), *tensors)
                try:
                    if plan not in spills:
                        call()
                        torch.cuda.synchronize()
                        spills[plan] = found[KERNELS[design == "product"]]
                    calls[plan] = call
                except Exception as error:
                    bad[plan] = f"{type(error).__name__}: {str(error)[:60]}"
            timed = p.speeds(5, calls, N)
            ours = {k: v[0] for k, v in timed.items() if isinstance(k, tuple)}
            for plan, speed in ours.items():
                speeds.setdefault(plan, []).append(speed)
            three = sorted(ours, key=ours.get, reverse=True)[:3]
            say(
                f"D {D} {design} N {N}: "
                + ", ".join(f"{plan} {ours[plan]:.0f}" for plan in three)
                + f"; seven {timed['seven'][0]:.0f}, "
                f"cuBLAS {timed['cublas'][0]:.0f}"
            )
            del calls, timed, tensors
            torch.cuda.empty_cache()
        mean = {
            plan: math.prod(each) ** (1 / len(each))
            for plan, each in speeds.items()
            if len(each) == len(LENGTHS)
        }
        three = sorted(mean, key=mean.get, reverse=True)[:3]
        for plan in three:
            each = " ".join(f"{speed:.0f}" for speed in speeds[plan])
            say(
                f"  all lengths {plan}: mean {mean[plan]:.0f} ({each}), "
                f"spills {spills[plan]}"
            )
        now = p.TILES[design][D > 64]
        if design == "turns":
            now = (*now, 32)
        if now in mean and now not in three:
            each = " ".join(f"{speed:.0f}" for speed in speeds[now])
            say(
                f"  as the page has {now}: mean {mean[now]:.0f} ({each}), "
                f"spills {spills[now]}"
            )
        if bad:
            say("  failed:", bad)
        if three:
            best[design, D] = three[0]
            set_best(best)
    return best


def tune_in(design, best, deadline, queue):
    queue.put(tune(design, best, deadline))


def finally_all(best, designs):
    """The designs with the best tiles: right, and how fast."""
    import torch

    attend = torch.nn.functional.scaled_dot_product_attention
    p = page()
    set_best(best)
    launch = p.all_at_once

    def grouped(*args, **named):
        if "group" in named:
            named["group"] = GROUP.get(args[0][1].shape[-1], named["group"])
        return launch(*args, **named)

    p.all_at_once = grouped
    for D in (128, 64):
        q, k, v, dy = p.inputs(1024, D, torch.float16)
        y = attend(q, k, v)
        exact = torch.autograd.grad(y, (q, k, v), dy.detach())
        for design in designs:
            y = p.attention(q, k, v, design=design)
            ours = torch.autograd.grad(y, (q, k, v), dy.detach())
            errors = [
                ((a - b).float().norm() / b.float().norm()).item()
                for a, b in zip(ours, exact, strict=True)
            ]
            if not max(errors) < 2e-3:
                say(f"D {D} {design} WRONG: {errors}")
    say(f"gradients compared; {time.time() - T0:.0f} s")
    for D in (128, 64):
        for N in (512, 1024, 2048, 4096, 8192, 16384):
            tensors = given(N, D)
            calls = rivals(N, D)
            for design in designs:
                calls[design] = functools.partial(p.DESIGNS[design], *tensors)
            timed = p.speeds(5, calls, N)
            say(
                f"D {D} N {N}:",
                " ".join(
                    f"{name} {each[0]:.0f}" for name, each in timed.items()
                ),
            )
            del calls, tensors, timed
            torch.cuda.empty_cache()
    say(f"{time.time() - T0:.0f} s")


def rooms():
    """How much room for ds, and the page's own tilings of seven products."""
    import torch

    p = page()
    for N in (1024, 4096, 16384):
        timed = p.room_speeds(N, 128, torch.float16)
        say(
            f"D 128 N {N} room in MB:",
            " ".join(f"{name} {each[0]:.0f}" for name, each in timed.items()),
        )
        p.room_speeds.cache_clear()
        torch.cuda.empty_cache()
    for kernel in ("keys", "queries"):
        timed = p.tile_speeds(4096, 128, torch.float16, kernel)
        say(
            f"seven products, {kernel}, D 128:",
            "; ".join(
                f"{name}: {each[0]:.0f}" for name, each in timed.items()
            ),
        )
    say(f"{time.time() - T0:.0f} s")


def main(limit):
    jobs = [
        (design, D, plan)
        for design, table in DESIGNS.items()
        for D in (128, 64)
        for plan in table[D]
    ]
    for tiling in page().TILINGS:
        jobs += [("seven", kernel, tiling) for kernel in ("keys", "queries")]
    context = mp.get_context("spawn")
    with context.Pool(max(1, (os.cpu_count() or 2) - 1)) as pool:
        result = pool.map_async(compile_one, jobs, chunksize=1)
        try:
            bad = [each for each in result.get(timeout=80) if each]
        except mp.TimeoutError:
            say("not all were compiled in 80 s; others are compiled later")
            bad = []
            pool.terminate()
    for number, (job, why) in enumerate(bad):
        if number < 12:
            say("failed to compile:", job, why)
        design, D, plan = job
        if design == "seven" or len(bad) > len(jobs) / 2:
            continue  # so many: then it is not the configurations
        DESIGNS[design] = {
            d: [each for each in plans if d != D or each != plan]
            for d, plans in DESIGNS[design].items()
        }
    say(
        f"{len(jobs)} configurations, {len(bad)} failed, "
        f"{time.time() - T0:.0f} s"
    )

    import torch

    p = page()
    say(
        torch.cuda.get_device_name(),
        "torch",
        torch.__version__,
        "triton",
        p.triton.__version__,
    )
    best = {}
    for design in ("stored", "product", "atomics", "bulk"):
        try:
            best = tune(design, best, limit - 40)
        except Exception as error:
            say(f"{design} stopped: {type(error).__name__}: {error}")
    designs = ["seven", "atomics", "bulk", "stored"]
    if os.environ.get("TURNS", "1") == "1" and time.time() - T0 < limit - 30:
        queue = context.Queue()
        given_to = (tune_in, ("turns", best, None, queue))
        process = context.Process(target=given_to[0], args=given_to[1])
        process.start()
        with contextlib.suppress(Exception):
            best = queue.get(timeout=60)
            designs.append("turns")
        process.join(5)
        if process.is_alive():
            process.kill()
            process.join()
            say("turns was ended after 60 s")
    say(f"{time.time() - T0:.0f} s; best: {best}")
    for last in (lambda: finally_all(best, designs), rooms):
        if time.time() - T0 < limit:
            try:
                last()
            except Exception as error:
                say(f"stopped: {type(error).__name__}: {error}")


def check():
    import torch

    attend = torch.nn.functional.scaled_dot_product_attention
    p = page()
    for queries, keys, D in (
        *((70, 200, 128), (200, 70, 64), (1, 300, 16), (1000, 2077, 128)),
        *((2048, 333, 64),),
    ):
        p.check("turns", queries, keys, D)
    say(f"small cases: {time.time() - T0:.0f} s")
    for D, N in ((128, 4096), (64, 4096), (128, 16384), (64, 512)):
        q, k, v, dy = p.inputs(N, D, torch.float16)
        y = attend(q, k, v)
        exact = torch.autograd.grad(y, (q, k, v), dy.detach())
        y = p.attention(q, k, v, design="turns")
        ours = torch.autograd.grad(y, (q, k, v), dy.detach())
        errors = [
            ((a - b).float().norm() / b.float().norm()).item()
            for a, b in zip(ours, exact, strict=True)
        ]
        right = "right" if max(errors) < 2e-3 else "WRONG"
        said = " ".join(f"{error:.1e}" for error in errors)
        say(f"D {D} N {N}: {right}, errors of dq, dk, dv: {said}")
        assert right == "right"
    for D, N in ((128, 2048), (64, 2048), (128, 512)):
        tensors = given(N, D)
        first = p.DESIGNS["turns"](*tensors)
        different = 0
        for _ in range(100):
            again = p.DESIGNS["turns"](*tensors)
            pairs = zip(again, first, strict=True)
            different += not all(torch.equal(a, b) for a, b in pairs)
        say(f"D {D} N {N}: {different} of 100 runs differ")
        assert not different
    say(f"turns: right, the same bits; {time.time() - T0:.0f} s")


if __name__ == "__main__":
    if sys.argv[1] == "check":
        check()
    else:
        main(float(sys.argv[2]) if len(sys.argv) > 2 else 190)
