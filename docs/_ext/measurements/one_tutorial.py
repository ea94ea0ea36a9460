"""Run one tutorial in a process of its own, to compile it or to measure it.

Standard input says what to do, as a line of JSON: the script, which of its
benchmarks to measure, the recordings of the others, and, to compile only,
which share of the points this process does. A second line says on which GPU;
until it comes, another process may be using that. What a benchmark gave is
sent as a line of JSON to standard output; what the tutorial prints goes to
standard error.
"""

import importlib
import itertools
import json
import os
import shutil
import sys
import tempfile
import time
import types
from contextlib import contextmanager, nullcontext
from pathlib import Path

from measurements import gpus, links, part, recording, replay


def prepare(script):
    """Import what takes seconds, and asks nothing of a GPU."""
    names = ["matplotlib.pyplot", "pandas", "triton.testing"]
    if "torch.compile(" in Path(script).read_text(encoding="utf-8"):
        names.append("torch._inductor.compile_fx")
    for name in names:
        importlib.import_module(name)


def main(name, script, plots, fresh, compiled, share, memory):
    prepare(script)
    given = sys.stdin.readline().strip()
    send = messages()
    try:
        gpus.take(given)
    except RuntimeError as error:
        send(error=str(error))
        raise
    if share:
        import torch

        os.environ["TORCHINDUCTOR_CACHE_DIR"] = compiled
        torch.cuda.set_per_process_memory_fraction(memory)
        stand_in, choices = Compiling(send, name, fresh, share), nullcontext()
    else:
        stand_in = Measuring(send, name, fresh)
        choices = choices_of_its_own(compiled)
    follow(script, plots, stand_in, choices)


def messages():
    """A function that sends; from now on prints go to standard error."""
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def send(**message):
        print(json.dumps(message), file=lines, flush=True)

    return send


def follow(script, plots, stand_in, choices):
    """Run benchmarks with what stands for them, which sends how it ends."""
    try:
        with (
            choices,
            replaced_clock(stand_in.clock),
            replay.replaced(stand_in),
        ):
            run(script, plots)
    except Exception as error:
        reason = " ".join(str(error).split())
        stand_in.send(error=f"{type(error).__name__}: {reason}")
        raise
    finally:
        stand_in.send(seconds=stand_in.seconds)


def run(script, plots):
    """Run what benchmarks need of a tutorial, as its own ``__main__``.

    What it leaves behind in its folder is thrown away.
    """
    import matplotlib

    matplotlib.use("Agg")
    text = Path(script).read_text(encoding="utf-8")
    module = types.ModuleType("__main__")
    module.__file__ = script
    sys.modules["__main__"] = module
    home = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            code = compile(part.of(text, plots), script, "exec")
            exec(code, module.__dict__)
        finally:
            os.chdir(home)


@contextmanager
def choices_of_its_own(compiled):
    """What torch.compile finds to be fastest comes from this process only.

    A choice made while others use the GPU is a bad one, and a peer that was
    given it is not at its best. What was traced and compiled in advance is
    used: that takes most of the time, and is the same whoever does it.
    """
    with tempfile.TemporaryDirectory() as folder:
        choices = shutil.ignore_patterns("*.best_config")
        shutil.copytree(compiled, folder, ignore=choices, dirs_exist_ok=True)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        yield


@contextmanager
def replaced_clock(clock):
    """Let ``clock(do_bench, fn, ...)`` stand for triton.testing.do_bench."""
    import triton.testing

    original = triton.testing.do_bench

    def do_bench(fn, *args, **kwargs):
        return clock(original, fn, *args, **kwargs)

    triton.testing.do_bench = do_bench
    try:
        yield
    finally:
        triton.testing.do_bench = original


class OneTutorial:
    """Stands for Mark._run while a tutorial runs in its own process."""

    seconds = 0.0  # in what the kind of run is about

    def __init__(self, send, name, fresh):
        self.send = send
        self.name = name
        self.fresh = fresh
        self.seen = set()

    def __call__(
        self, original, mark, bench, save_path, show, print_data, **kwargs
    ):
        import matplotlib.pyplot as plt

        name = bench.plot_name
        if name in self.seen:
            raise recording.RecordingError(
                f"tutorials/{self.name}.py: the benchmark {name} runs twice"
            )
        self.seen.add(name)
        try:
            stored = self.fresh.get(name)
            if not stored or replay.misfit(stored, bench):
                return self.run(original, mark, bench, print_data, **kwargs)
            rows = stored["rows"]
            bench = replay.with_recorded_peers(bench, rows)
            with replay.measuring_with(mark, replay.replaying(rows, bench)):
                return original(mark, bench, "", False, print_data, **kwargs)
        finally:
            plt.close("all")


class Compiling(OneTutorial):
    """Calls what would be timed once, and answers 1 everywhere."""

    def __init__(self, send, name, fresh, share):
        super().__init__(send, name, fresh)
        self.mine, self.shares = share

    def clock(self, do_bench, fn, *args, quantiles=None, **kwargs):
        import torch

        fn()
        # Its memory is used again: by then it must have ended.
        torch.cuda.synchronize()
        return [1.0 for _ in quantiles] if quantiles else 1.0

    def run(self, original, mark, bench, print_data, **kwargs):
        points = len(bench.x_vals) * len(bench.line_vals)
        self.send(benchmark=bench.plot_name, points=points)
        with replay.measuring_with(mark, self.once(mark.fn, bench)):
            return original(mark, bench, "", False, False, **kwargs)

    def once(self, fn, bench):
        import torch

        count = itertools.count()

        def measure(**values):
            # The points of one size, and of one provider, go to all shares
            # in turn; in the same way in benchmarks of the same sizes, for
            # forward and backward have kernels in common.
            x, provider = divmod(next(count), len(bench.line_vals))
            if (x + provider) % self.shares == self.mine:
                start = time.monotonic()
                try:
                    fn(**values)
                except Exception as error:
                    # It is compiled when it is timed, then.
                    print(bench.plot_name, values, type(error), error)
                torch.cuda.empty_cache()
                self.seconds += time.monotonic() - start
            return 1.0, 1.0, 1.0

        return measure


class Measuring(OneTutorial):
    """Measures, and sends each benchmark when it is done."""

    counts = False  # whether it is for what ncu counts, or for all else
    ranges = ()  # what ncu is to count (see counters)

    def clock(self, do_bench, *args, **kwargs):
        start = time.monotonic()
        try:
            return do_bench(*args, **kwargs)
        finally:
            self.seconds += time.monotonic() - start

    def run(self, original, mark, bench, print_data, **kwargs):
        if ("counter" in bench.args) != self.counts:
            # Another process does; one that is asked for needs its table.
            return original(mark, bench, "", False, print_data, **kwargs)
        measured = replay.described(mark, bench)
        rows, start, before = [], time.monotonic(), self.seconds
        fn = self.measuring(mark.fn, bench)
        with replay.measuring_with(mark, replay.keeping(fn, bench, rows)):
            table = original(mark, bench, "", False, print_data, **kwargs)
        measured["environment"] = recording.environment("not run")
        measured["rows"] = rows
        if ranks := recording.ranks(measured):
            measured["environment"] |= links.environment(ranks)
        self.send(
            benchmark=bench.plot_name,
            measured=measured,
            seconds=time.monotonic() - start,
            timed=self.seconds - before,
            ranges=self.ranges,
        )
        return table

    def measuring(self, fn, bench):
        """What is called for each point."""
        return fn


if __name__ == "__main__":
    main(**json.loads(sys.stdin.readline()))
