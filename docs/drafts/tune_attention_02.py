"""Tiles of attention/02-backward on a GPU, in turns with cuDNN and page 01.

    python3 tune_attention_02.py path/to/tutorials/attention/02-backward.py [DESIGNS [SECONDS_TO_COMPILE]]

DESIGNS are some of stored,product,atomics,bulk,turns (all, in this order, if none is named). Compiles all configurations
on all cores (spawned processes, tiny inputs), then times whole backward passes (CUDA graphs, all in turns, as the page's
figures do) at 16384 tokens of N = 4096, prints a line a configuration, the best of each design, checks those against
PyTorch, and prints them for N = 512 to 16384. About 60 to 90 s on an H100. Each design is timed in a process of its own
that is ended after 60 s: a queue that waits for ever must not take the others along.

What to do with it: write the best (queries, keys, warps, stages) into TILES of the page (up to 64, of 128), GROUP
into `group=32,` of in_turns_of_keys; if "stored" is not the fastest at N = 4096, see the end of the output.
"""
import functools, multiprocessing as mp, os, sys, time
from pathlib import Path

SCRIPT = Path(sys.argv[1]).resolve()
LIMIT = float(sys.argv[3]) if len(sys.argv) > 3 else 75
T0 = time.time()
ROOT = SCRIPT.parents[2]
sys.path[:0] = [str(ROOT / "docs" / "_ext"), str(ROOT / "tests")]

ADDS = {
    128: [(64, 64, 4, 2), (64, 64, 4, 1), (32, 64, 4, 2), (32, 64, 4, 3), (64, 128, 8, 2), (64, 128, 8, 1),
          (64, 128, 8, 3), (32, 128, 8, 2), (32, 128, 8, 3), (64, 64, 8, 2)],
    64: [(64, 64, 4, 2), (64, 64, 4, 3), (64, 128, 8, 2), (64, 128, 8, 3), (128, 64, 8, 2), (32, 128, 8, 3)],
}
STORED = {
    128: [(64, 64, 4, 2), (64, 64, 4, 3), (64, 128, 8, 2), (64, 128, 8, 3), (128, 64, 8, 2), (32, 128, 8, 3),
          (32, 64, 4, 3)],
    64: [(64, 64, 4, 2), (64, 64, 4, 3), (64, 64, 4, 4), (64, 128, 8, 2), (64, 128, 8, 3), (128, 64, 8, 2),
         (64, 128, 4, 2)],
}
PRODUCT = {
    128: [(128, 64, 4, 3), (128, 64, 4, 4), (128, 128, 4, 2), (128, 128, 8, 3), (256, 64, 8, 3), (256, 64, 8, 4),
          (64, 128, 4, 3), (128, 32, 4, 4)],
    64: [(128, 64, 4, 3), (128, 64, 4, 4), (128, 128, 4, 3), (128, 128, 8, 3), (256, 64, 8, 3), (256, 64, 8, 4),
         (64, 128, 4, 3)],
}
GROUPS = (1, 4, 16, 64)
TURNS = {  # no load runs ahead, so stages make no difference
    128: [(64, 64, 4, 1), (32, 64, 4, 1), (64, 128, 8, 1), (32, 128, 8, 1), (64, 64, 8, 1)],
    64: [(64, 64, 4, 1), (64, 128, 8, 1), (128, 64, 8, 1), (32, 64, 4, 1)],
}
DESIGNS = {"stored": STORED, "product": PRODUCT, "atomics": ADDS, "bulk": ADDS, "turns": TURNS}
if len(sys.argv) > 2:
    DESIGNS = {name: DESIGNS[name] for name in sys.argv[2].split(",")}
JOBS = [(design, D, plan) for D in (128, 64) for design, table in DESIGNS.items() for plan in table[D]]


@functools.cache
def page():
    import tutorial
    return tutorial.load("attention/02-backward")


def with_plan(p, design, D, plan):
    """The design's function with these tiles."""
    which = {"product": "stored"}.get(design, design)

    def call(*given):
        before = p.TILES[design]
        small, large = before
        p.TILES[design] = (small, plan) if D > 64 else (plan, large)
        try:
            return p.DESIGNS[which](*given)
        finally:
            p.TILES[design] = before
    return call


def given(p, N, D, batch=None):
    import torch
    shape = (batch or p.TOKENS // N, 2048 // D if batch is None else 2, N, D)
    q, k, v, dy = (torch.randn(shape, device=p.DEVICE, dtype=torch.float16) for _ in range(4))
    y, lse = p.forward(q, k, v, D**-0.5, p.plan_forward(D))
    return dy, q, k, v, y, lse, D**-0.5


def compile_one(job):
    design, D, plan = job
    try:
        import torch
        p = page()
        with_plan(p, design, D, plan)(*given(p, 1024, D, batch=1))
        torch.cuda.synchronize()
        return None
    except Exception as error:
        return job, f"{type(error).__name__}: {str(error)[:120]}"


def rivals(p, N, D):
    """cuDNN, and the seven products of page 01."""
    import torch
    q, k, v, dy = p.inputs(N, D, torch.float16)
    y = p.with_backend(torch.nn.attention.SDPBackend.CUDNN_ATTENTION)(q, k, v)
    return {"cudnn": functools.partial(torch.autograd.grad, y, (q, k, v), dy.detach(), retain_graph=True)}


def set_best(p, best):
    for (design, D), plan in best.items():
        small, large = p.TILES[design]
        p.TILES[design] = (small, plan) if D > 64 else (plan, large)


def time_design(design, failed, best, queue):
    """In a process of its own: a line a configuration, and the best of each head dimension."""
    import torch
    p, N = page(), 4096
    set_best(p, best)
    for D in (128, 64):
        tensors = given(p, N, D)
        calls = rivals(p, N, D) | {"seven": functools.partial(p.DESIGNS["seven"], *tensors)}
        for plan in DESIGNS[design][D]:
            if (design, D, plan) not in failed:
                calls[plan] = functools.partial(with_plan(p, design, D, plan), *tensors)
        found = p.speeds(5, calls, N)
        ours = {k: v[0] for k, v in found.items() if isinstance(k, tuple)}
        for plan, speed in sorted(ours.items(), key=lambda each: -each[1]):
            print(f"D {D:3} {design:8} {plan!s:18} {speed:5.0f} TFLOP/s; seven {found['seven'][0]:.0f}, "
                  f"cuDNN {found['cudnn'][0]:.0f}, cuBLAS {found['cublas'][0]:.0f}", flush=True)
        queue.put(((design, D), max(ours, key=ours.get)))
        if design == "turns":  # heads side by side
            set_best(p, {(design, D): max(ours, key=ours.get)})
            code, all_at_once, calls = p.in_turns_of_keys, p.all_at_once, {}
            for group in GROUPS:
                def grouped(*args, group=group):
                    p.all_at_once = lambda *a, **k: all_at_once(*a, **(k | {"group": group}))
                    try:
                        return code(*args)
                    finally:
                        p.all_at_once = all_at_once
                calls[f"group {group}"] = functools.partial(grouped, *tensors)
            calls["group 32"] = functools.partial(code, *tensors)
            for name, speed in p.speeds(5, calls, N).items():
                print(f"D {D:3} turns    {name:18} {speed[0]:5.0f} TFLOP/s", flush=True)
        torch.cuda.empty_cache()


def main():
    context = mp.get_context("spawn")
    with context.Pool(max(1, (os.cpu_count() or 2) - 1)) as pool:
        result = pool.map_async(compile_one, JOBS, chunksize=1)
        try:
            bad = [each for each in result.get(timeout=LIMIT) if each]
        except mp.TimeoutError:
            print("not all were compiled in time; the others are compiled one by one")
            bad = []
            pool.terminate()
    for job, why in bad:
        print("failed:", job, why)
    failed = {job for job, _ in bad}
    print(f"{len(JOBS)} configurations, {len(failed)} failed, {time.time() - T0:.0f} s", flush=True)
    best, hangs = {}, set()
    for design in DESIGNS:
        queue = context.Queue()
        process = context.Process(target=time_design, args=(design, failed, best, queue))
        process.start()
        process.join(60)
        if process.is_alive():
            process.kill()
            process.join()
            hangs.add(design)
            print(f"{design} was ended after 60 s", flush=True)
        while not queue.empty():
            name, plan = queue.get()
            best[name] = plan

    import torch
    import torch.nn.functional as F
    p = page()
    set_best(p, best)
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "triton", p.triton.__version__)
    print("TILES =", p.TILES)

    for D in (128, 64):
        q, k, v, dy = p.inputs(1024, D, torch.float16)
        y = F.scaled_dot_product_attention(q, k, v)
        exact = torch.autograd.grad(y, (q, k, v), dy.detach())
        for design in p.DESIGNS.keys() - hangs:
            y = p.attention(q, k, v, design=design)
            ours = torch.autograd.grad(y, (q, k, v), dy.detach())
            errors = [((a - b).float().norm() / b.float().norm()).item() for a, b in zip(ours, exact)]
            print(f"D {D:3} {design:8} errors of dq, dk, dv: {' '.join(f'{e:.1e}' for e in errors)}")
    print("with the best tiles, TFLOP/s of whole backward passes")
    for D in (128, 64):
        for N in (512, 1024, 2048, 4096, 8192, 16384):
            tensors = given(p, N, D)
            calls = rivals(p, N, D)
            for design in {"seven", "atomics", "bulk", "turns", "stored", "whole"} - hangs:
                calls[design] = functools.partial(p.DESIGNS[design], *tensors)
            found = p.speeds(5, calls, N)
            print(f"D {D:3} N {N:5}", " ".join(f"{name} {speed[0]:.0f}" for name, speed in found.items()), flush=True)
            torch.cuda.empty_cache()
    print(f"{time.time() - T0:.0f} s")
    print("If another design than 'stored' is the fastest: in the page, `design=\"stored\"` of attention, the first entry "
          "of NAMES (provider triton), `who['triton']`, different_bits and bench_memory name it; and DESIGNS in the page's "
          "file in tests.")


if __name__ == "__main__":
    main()
