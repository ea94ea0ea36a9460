"""What tuning scripts share that look for a per cent: compile, then time in turns.

A width's candidates are timed in turns, so that a clock that drifts meets all
of them; each is captured several times, so that none owes its time to where
its results lie.
"""

import functools
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent / "fused")]
import torch
from candidates import START, captured, compiled, replays, write


def race(calls, flush, captures=3, rounds=6, n=10):
    """{name: µs}, medians of captures * rounds * n replays, with L2 overwritten."""
    graphs = {}
    for name, fn in calls.items():
        try:
            graphs[name] = [captured(fn) for _ in range(captures)]
        except Exception as e:  # noqa
            print("   no", name, str(e)[:100])
    times = {name: [] for name in graphs}
    for _ in range(rounds):
        for turn in range(captures):
            for name, some in graphs.items():
                times[name] += replays(some[turn], flush, n)
    return {name: sorted(t)[len(t) // 2] for name, t in times.items()}


@functools.cache
def _started(start):
    return start()


def _compile(job):
    start, N, names = job
    calls = _started(start)(N)
    for name in names:
        try:
            calls[name]()
        except Exception as e:  # noqa
            print("no", N, name, str(e)[:100])
    torch.cuda.synchronize()


def main(name, start, names, rivals, seconds):
    """start() gives calls(N) -> {name: fn}; names is {N: [names]}.

    Of each width it prints the page, the best and the rivals, and writes all.
    """
    jobs = [(start, N, some[i : i + 4]) for N, some in names.items() for i in range(0, len(some), 4)]
    jobs.sort(key=lambda job: -job[1])
    compiled(_compile, jobs, sum(map(len, names.values())))
    calls, rows = start(), []
    flush = torch.empty(2**28, dtype=torch.int8, device="cuda")
    for N, some in names.items():
        if time.time() - START > seconds:
            print("no time left for", N)
            continue
        all_of_it = calls(N)
        times = race({n: all_of_it[n] for n in some}, flush)
        best = sorted(times, key=times.get)
        say = lambda n: f"{n} {times[n]:.2f} µs"
        print(f"N = {N}: page {say('page')};", "; ".join(f"{say(r)}, page takes {times['page'] / times[r]:.4f} of it" for r in rivals if r in times))
        for n in [b for b in best if b not in rivals][:6]:
            shares = " ".join(f"{times[r] / times[n]:.4f} of {r}" for r in rivals if r in times)
            print(f"   {times[n]:8.2f} µs, speed {shares}:  {n}")
        rows += [{"N": N, "name": n, "us": round(t, 3)} for n, t in times.items()]
        torch.cuda.empty_cache()
    write(name, ["N", "name", "us"], rows)
    return rows
