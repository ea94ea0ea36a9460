"""The build's side of a benchmark: recorded, live or not there.

``triton.testing.perf_report`` turns a measuring function into a benchmark.
While a tutorial is built, this module stands between the two: without a GPU
the benchmark gets recorded numbers instead of calling the function, on a GPU
the function is called and its numbers are kept. Triton's own code makes the
table and the plot in either case, and the tutorial knows nothing of it.
"""

import copy
import inspect
import re
from contextlib import contextmanager
from dataclasses import dataclass, field

import style
from measurements import recording

# What may be said where a benchmark is run: nothing that it measures with.
OPTIONS = {
    *("save_path", "show_plots", "print_data", "diff_col", "save_precision"),
}


@dataclass
class Measured:
    """The numbers of one benchmark on one GPU, and their environment."""

    name: str
    gpu: str  # the folder of the recording
    environment: dict
    unit: str
    args: dict
    x_names: list
    names: dict  # provider -> the name of its line
    method: str
    rows: list
    reason: str = ""  # why ncu counted nothing
    live: bool = False
    picture: str = ""  # what it was saved as
    figure: object = None
    drawn: tuple = ()  # what the benchmark drew, as two SVG texts


@dataclass
class Missing:
    """A benchmark that a preview builds without: no figure, one reason."""

    name: str
    reason: str


@dataclass
class Session:
    """What was measured while one tutorial ran."""

    name: str  # of the tutorial
    live: bool
    default_gpu: str = ""
    recordings: dict = field(default_factory=dict)  # gpu -> recording
    reason: str = ""  # why there are no recordings, in a preview
    results: dict = field(default_factory=dict)  # plot name -> [Measured]
    seen: set = field(default_factory=set)  # the benchmarks that ran
    pictures: int = 0  # how many figures were saved
    figures: int = 0  # how many of them have numbers
    timed_outside: bool = False  # a clock was read by no benchmark
    inside: bool = False


@contextmanager
def replaced(replacement):
    """Let ``replacement(original, mark, bench, ...)`` stand for Mark._run."""
    import triton.testing

    original = triton.testing.Mark._run

    def _run(self, bench, *args, **kwargs):
        if more := kwargs.keys() - OPTIONS:
            raise recording.RecordingError(
                f"benchmark {bench.plot_name} is run with "
                f"{', '.join(sorted(more))}: say it in args of Benchmark, "
                "where a recording can hold it"
            )
        return replacement(original, self, bench, *args, **kwargs)

    triton.testing.Mark._run = _run
    try:
        yield
    finally:
        triton.testing.Mark._run = original


@contextmanager
def watching(session):
    """Notice a timing outside every benchmark: it has no passport."""
    import torch
    import triton.testing

    clocks = [(triton.testing, "do_bench"), (torch.cuda.Event, "elapsed_time")]
    originals = [getattr(owner, name) for owner, name in clocks]

    def watched(original):
        def clock(*args, **kwargs):
            session.timed_outside |= not session.inside
            return original(*args, **kwargs)

        return clock

    for (owner, name), original in zip(clocks, originals, strict=True):
        setattr(owner, name, watched(original))
    try:
        yield
    finally:
        for (owner, name), original in zip(clocks, originals, strict=True):
            setattr(owner, name, original)


@contextmanager
def measuring_with(mark, fn):
    """Let a benchmark measure with another function for a while."""
    original, mark.fn = mark.fn, fn
    try:
        yield
    finally:
        mark.fn = original


def method(mark):
    """How a benchmark measures: what its function's docstring says."""
    text = inspect.getdoc(mark.fn)
    if not text:
        raise recording.RecordingError(
            "a measuring function without a docstring: it must say which "
            "clock it uses, whether L2 is emptied and which quantiles it "
            "returns"
        )
    return " ".join(text.split())


def counted_with(options):
    """What the method says as well where ncu counted."""
    return f" Counted with ``ncu {options}``."


def keeping(fn, bench, rows):
    """The measuring function, with every number it returns kept in rows."""

    def measure(**values):
        result = fn(**values)
        names = (*bench.x_names, bench.line_arg)
        rows.append(
            {
                **{n: recording.plain(values[n]) for n in bench.x_names},
                "provider": values[names[-1]],
                **recording.point(result),
            }
        )
        return result

    return measure


def described(mark, bench):
    """What a recording says of a benchmark beside its numbers."""
    return {
        "unit": bench.ylabel,
        "args": {k: recording.plain(v) for k, v in bench.args.items()},
        "method": method(mark),
        "x_names": list(bench.x_names),
    }


def x_values(bench):
    """The sizes of a benchmark, as a recording holds them."""
    for x in bench.x_vals:
        each = x if isinstance(x, list | tuple) else [x] * len(bench.x_names)
        yield tuple(recording.plain(value) for value in each)


def misfit(stored, mark, bench):
    """How a recorded benchmark differs from the script's own, or None."""
    xs, providers = recording.grid(stored)
    its_method = stored["method"]
    if "counter" in bench.args:
        counted = re.escape(counted_with("OPTIONS")).replace(
            "OPTIONS", "[ a-z-]+"
        )
        its_method = re.sub(rf"{counted}$", "", its_method)
    own = described(mark, bench)
    for place, found, expected in (
        *((key, stored[key], own[key]) for key in ("unit", "args", "x_names")),
        ("x values", xs, list(x_values(bench))),
        ("providers", _own(providers), _own(bench.line_vals)),
        ("method", repr(its_method), repr(own["method"])),
    ):
        if found != expected:
            return f"{place}: found {found}, expected {expected}"
    return None


def _own(providers):
    """All but the peers that a machine may lack."""
    return sorted(set(providers) - set(style.OPTIONAL))


def replaying(rows, bench, otherwise=None):
    """A measuring function that answers from recorded rows; what is in none
    of them is measured with another."""
    known = {
        (recording.x_of(row, bench.x_names), row["provider"]): row
        for row in rows
    }

    def measure(**values):
        x = tuple(recording.plain(values[n]) for n in bench.x_names)
        if otherwise and (x, values[bench.line_arg]) not in known:
            return otherwise(**values)
        row = known[x, values[bench.line_arg]]
        numbers = (row[name] for name in recording.VALUES)
        return tuple(float("nan") if v is None else v for v in numbers)

    return measure


def with_recorded_peers(bench, rows):
    """The benchmark, with the optional peers that were recorded and no other.

    A tutorial draws Liger, for example, where Liger is installed. A page
    built from a recording shows the peers of the machine that recorded.
    """
    recorded = {row["provider"] for row in rows}
    names = {
        k: style.spelled(k, v)
        for k, v in zip(bench.line_vals, bench.line_names, strict=True)
        if k in recorded or k not in style.OPTIONAL
    }
    for peer in style.OPTIONAL:
        if peer in recorded and peer not in names:
            names[peer] = style.LINES[peer][0]
    if "copy" in names:  # the ceiling stays last
        names["copy"] = names.pop("copy")
    bench = copy.copy(bench)
    bench.line_vals, bench.line_names = list(names), list(names.values())
    return bench


def runs_twice(name, plot):
    return recording.RecordingError(
        f"tutorials/{name}.py: the benchmark {plot} runs twice: found a "
        "second figure, expected one of each name"
    )


def does_not_fit(gpu, name, plot, problem):
    return recording.RecordingError(
        f"{recording.where(gpu, name)} does not fit: benchmark {plot}: "
        f"{problem}; {recording.mend(name)}"
    )


def require_all(session):
    """When a page has run: nothing was recorded that it does not have."""
    for gpu, data in session.recordings.items():
        for plot in data["benchmarks"].keys() - session.seen:
            problem = "found its numbers, expected none, for it did not run"
            raise does_not_fit(gpu, session.name, plot, problem)


class Runner:
    """Stands for Mark._run while a tutorial is built."""

    def __init__(self, session):
        self.session = session

    def __call__(
        self, original, mark, bench, save_path, show, print_data, **kwargs
    ):
        session, plot = self.session, bench.plot_name
        if plot in session.seen:
            raise runs_twice(session.name, plot)
        session.seen.add(plot)
        if not session.recordings:
            session.results[plot] = [Missing(plot, session.reason)]
            return self.undrawn(
                original, mark, bench, save_path, show, False, **kwargs
            )
        tables = {
            gpu: self.replay(original, mark, bench, gpu, **kwargs)
            for gpu in session.recordings
        }
        return tables[session.default_gpu]

    def replay(self, original, mark, bench, gpu, **kwargs):
        name, plot = self.session.name, bench.plot_name
        data = self.session.recordings[gpu]
        stored = data["benchmarks"].get(plot)
        problem = (
            misfit(stored, mark, bench)
            if stored
            else f"found nothing, expected what {mark.fn.__name__} measured"
        )
        if problem:
            raise does_not_fit(gpu, name, plot, problem)
        environment = recording.environment_of(data, stored)
        bench = with_recorded_peers(bench, stored["rows"])
        with measuring_with(mark, replaying(stored["rows"], bench)):
            table, figure = self.draw(original, mark, bench, **kwargs)
        names = dict(zip(bench.line_vals, bench.line_names, strict=True))
        measured = Measured(
            name=plot,
            gpu=gpu,
            names=names,
            live=self.session.live,
            figure=figure,
            drawn=style.svg(figure),
            **(stored | {"environment": environment}),
        )
        self.session.results.setdefault(plot, []).append(measured)
        return table

    @staticmethod
    def undrawn(original, *args, **kwargs):
        """The table of a benchmark; its figure, of NaN, is not kept."""
        import matplotlib.pyplot as plt

        before = set(plt.get_fignums())
        try:
            return original(*args, **kwargs)
        finally:
            for drawn in set(plt.get_fignums()) - before:
                plt.close(drawn)

    @staticmethod
    def draw(original, mark, bench, **kwargs):
        """The table of a benchmark and the figure that it drew."""
        import matplotlib.pyplot as plt

        bench = copy.copy(bench)
        bench.styles = style.dressed(bench)
        before = set(plt.get_fignums())
        table = original(mark, bench, "", True, False, **kwargs)
        (drawn,) = set(plt.get_fignums()) - before
        figure = plt.figure(drawn)
        style.finish(figure, bench)
        return table, figure
