"""Run one page in a process of its own, to compile it or to measure it.

Standard input says what to do, as a line of JSON: the page, its script, where
compiled code is kept, to compile only which share of the points this process
does, and which points need not be measured again. A second line lets it begin;
until then another process may be using the GPU. What a benchmark gave is sent
as a line of JSON to standard output; what the page prints goes to standard
error.

What runs is what the hash of the page covers: all but drawings and solutions.
"""

import ast
import importlib
import itertools
import json
import os
import shutil
import sys
import tempfile
import time
import traceback
import types
from contextlib import contextmanager, nullcontext
from pathlib import Path

from measurements import code_hash, replay


def prepare(script):
    """Import what takes seconds, and asks nothing of a GPU."""
    names = ["matplotlib.pyplot", "pandas", "triton.testing"]
    if "torch.compile(" in Path(script).read_text(encoding="utf-8"):
        names.append("torch._inductor.compile_fx")
    for name in names:
        importlib.import_module(name)


def main(name, script, compiled, share, memory, kept):
    prepare(script)
    send = messages()
    send(ready=True)
    sys.stdin.readline()
    if share:
        import torch

        os.environ["TORCHINDUCTOR_CACHE_DIR"] = compiled
        torch.cuda.set_per_process_memory_fraction(memory)
        stand_in, choices = Compiling(send, name, share), nullcontext()
    else:
        stand_in = Measuring(send, name, kept)
        choices = choices_of_its_own(compiled)
    follow(script, stand_in, choices)


def messages():
    """A function that sends; from now on prints go to standard error."""
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def send(**message):
        print(json.dumps(message), file=lines, flush=True)

    return send


class EnoughError(BaseException):
    """All that was wanted of a script is there; no script may catch it."""


def follow(script, stand_in, choices):
    """Run a script with what stands for its benchmarks; send how it ends."""
    try:
        with (
            choices,
            replaced_clock(stand_in.clock),
            replay.replaced(stand_in),
        ):
            run(script, stand_in.execute)
    except EnoughError:
        pass
    except SystemExit:
        stand_in.send(error="it calls sys.exit, and would not run to its end")
        raise
    except Exception as error:
        reason = " ".join(str(error).split())
        stand_in.send(error=f"{type(error).__name__}: {reason}")
        raise
    stand_in.send(end=True, seconds=stand_in.seconds)


def run(script, execute):
    """Run a script as its own ``__main__``, beside what it imports.

    What it leaves behind in its folder is thrown away.
    """
    import matplotlib

    matplotlib.use("Agg")
    text = Path(script).read_text(encoding="utf-8")
    module = types.ModuleType("__main__")
    module.__file__ = script
    sys.modules["__main__"] = module
    sys.path.insert(0, str(Path(script).parent))
    home = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            tree = ast.parse(code_hash.measured(text), script)
            execute(tree, script, module.__dict__)
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


class OnePage:
    """Stands for Mark._run while a page runs in its own process."""

    seconds = 0.0  # in what the kind of run is about

    def __init__(self, send, name):
        self.send = send
        self.name = name
        self.seen = set()

    def __call__(
        self, original, mark, bench, save_path, show, print_data, **kwargs
    ):
        import matplotlib.pyplot as plt

        if bench.plot_name in self.seen:
            raise replay.runs_twice(self.name, bench.plot_name)
        self.seen.add(bench.plot_name)
        try:
            return self.run(original, mark, bench, **kwargs)
        finally:
            plt.close("all")

    def execute(self, tree, script, space):
        for node in tree.body:
            self.statement(node, script, space)

    def statement(self, node, script, space):
        exec(compile(ast.Module([node], []), script, "exec"), space)
        if getattr(node, "name", "") == "device_time":
            space["device_time"] = self.device_time(space["device_time"])

    def device_time(self, original):
        """What stands for the clock that a page defines."""

        def device_time(prepare):
            return self.clock(lambda prepare, **_: original(prepare), prepare)

        return device_time


class Compiling(OnePage):
    """Calls what would be timed once, and answers 1 everywhere."""

    def __init__(self, send, name, share):
        super().__init__(send, name)
        self.mine, self.shares = share

    def statement(self, node, script, space):
        """What a claim or a check says of such answers stops nothing."""
        try:
            super().statement(node, script, space)
        except Exception:
            traceback.print_exc()
        # The host's clock of a page, which it reads thousands of times.
        if getattr(node, "name", "") == "time_of_batch":
            space["time_of_batch"] = lambda call: (call(), 1.0)[1]
        if getattr(node, "name", "") == "in_rounds":
            space["in_rounds"] = lambda batches: [
                (1.0, 1.0, 1.0) for batch in batches for _ in batch()
            ]

    def device_time(self, original):
        def once(prepare):
            # Pages that are not yet written anew hand over the call itself.
            if callable(call := prepare()):
                call()

        return lambda prepare: self.clock(
            None, lambda: once(prepare), quantiles=(0.5, 0.2, 0.8)
        )

    def clock(self, do_bench, fn, *args, quantiles=None, **kwargs):
        import torch

        fn()
        # Its memory is used again: by then it must have ended.
        torch.cuda.synchronize()
        return [1.0 for _ in quantiles] if quantiles else 1.0

    def run(self, original, mark, bench, **kwargs):
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


class Measuring(OnePage):
    """Measures, and sends each benchmark when it is done."""

    ranges = ()  # what ncu is to count (see counters)

    def __init__(self, send, name, kept=None):
        super().__init__(send, name)
        self.kept = kept or {}  # benchmark -> points that are there already

    def clock(self, do_bench, *args, **kwargs):
        start = time.monotonic()
        try:
            return do_bench(*args, **kwargs)
        finally:
            self.seconds += time.monotonic() - start

    def run(self, original, mark, bench, **kwargs):
        if "counter" in bench.args:  # another process counts
            self.send(benchmark=bench.plot_name, counter=bench.args["counter"])
            return original(mark, bench, "", False, False, **kwargs)
        return self.measure(original, mark, bench, mark.fn, **kwargs)

    def measure(self, original, mark, bench, fn, **kwargs):
        """Run a benchmark with what is called for each point."""
        measured = replay.described(mark, bench)
        rows, start, before = [], time.monotonic(), self.seconds
        there = self.kept.get(bench.plot_name, [])
        fn = replay.keeping(replay.replaying(there, bench, fn), bench, rows)
        with replay.measuring_with(mark, fn):
            table = original(mark, bench, "", False, False, **kwargs)
        self.send(
            benchmark=bench.plot_name,
            measured=measured | {"rows": rows},
            seconds=time.monotonic() - start,
            timed=self.seconds - before,
            ranges=self.ranges,
        )
        return table


if __name__ == "__main__":
    main(**json.loads(sys.stdin.readline()))
