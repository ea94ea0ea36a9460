"""What Nsight Compute counts: bytes, hits, warps, which no clock tells.

A benchmark whose args name a metric of ncu as its ``counter`` is not timed.
Its measuring function runs what is to be counted in a range of NVTX, and
returns three times NaN, for only ncu knows the number:

    with torch.cuda.nvtx.range(f"counted {provider} {N} per {by_hand}"):
        fn()

Where the name of the range ends with ``per`` and a number, what ncu counts is
divided by it. A point that returns a number was counted by hand and keeps it;
one that cannot be done returns None.

Such benchmarks are run in a process of their own, under ncu, which runs the
page until the last of them is done. Where ncu cannot count, the process runs
without it, and the reason is recorded in place of what only ncu knows.
"""

import csv
import functools
import itertools
import json
import re
import shutil
import subprocess
import sys
import tempfile
from glob import glob
from pathlib import Path

from measurements import recording, replay, run_page
from measurements.children import kill

# Where installers put ncu, if it is not on the path.
PLACES = "/usr/local/cuda/bin/ncu", "/opt/nvidia/nsight-compute/*/ncu"
ABSENT = "not found"  # in place of a version
# In what state a kernel finds the GPU. A passport names them, but no recording
# is stale when they change: then make record ALL=1.
STATE = ("--clock-control", "none", "--cache-control", "all")
OPTIONS = (
    "--nvtx",
    *("--nvtx-include", "regex:counted .*/"),  # pushed in this thread
    *("--nvtx-include", "regex:counted .*"),  # started by any
    *("--csv", "--print-units", "base"),
    *STATE,
)
DURATION = "gpu__time_duration.sum"
LIMIT = 600  # seconds for the benchmarks of a page


def installed():
    """The path of ncu on this machine and its version, or None."""
    others = (sorted(glob(place), reverse=True) for place in PLACES)
    for path in filter(None, [shutil.which("ncu"), *itertools.chain(*others)]):
        try:
            said = subprocess.run(
                [path, "--version"], capture_output=True, text=True, timeout=60
            ).stdout
        except (OSError, subprocess.TimeoutExpired):
            continue
        if version := re.search(r"^Version (\S+)", said, re.MULTILINE):
            return path, version[1]
    return None


def version():
    """The version of ncu on this machine, or that it was not found."""
    ncu = installed()
    return ncu[1] if ncu else ABSENT


# The process that measures ---------------------------------------------------


def count(page, found, counters, process, log):
    """Run what ncu counts for in a page; what is to be sent of each.

    That is what a process that times would send. ``found`` are the benchmarks
    that were timed, ``counters`` the metrics of the others.
    """
    ncu = installed()
    metrics = ",".join(dict.fromkeys([*counters.values(), DURATION]))
    task = {"name": page.name, "script": str(page.script), "found": found}
    task |= {"compiled": process.compiled}
    sent, said, reason = [], "", "ncu, the profiler Nsight Compute, is missing"
    with tempfile.TemporaryDirectory() as folder, log.open("w") as output:
        table = Path(folder, "counted.csv")
        run = functools.partial(
            _run, task, process.running, output, Path(folder)
        )
        if ncu:
            options = [*OPTIONS, "--metrics", metrics, "--log-file", table]
            sent, failed = run([ncu[0], *map(str, options)])
            said = table.read_text() if table.exists() else ""
            reason = why_not(said + log.read_text(), failed)
        if reason and not process.running.ended:
            sent, _ = run([])
    if process.running.ended:
        return
    launches = launched(said)
    for message in sent:
        if "measured" in message:
            measured = message["measured"]
            measured["environment"] = {"ncu": ncu[1] if ncu else ABSENT}
            try:
                if reason:
                    measured["reason"] = reason
                else:
                    fill(measured, message["ranges"], launches)
            except recording.RecordingError as error:
                message = {"error": f"{message['benchmark']}: {error}"}
        yield message


def _run(task, running, output, folder, ncu):
    """Run this module as a program; what it sent, and how it failed.

    It is told and sends in files, for ncu stands between it and us.
    """
    file, sent = folder / "task.json", folder / "sent.json"
    sent.write_text("")
    file.write_text(json.dumps(task | {"sent": str(sent)}))
    child = running.start(
        [*ncu, sys.executable, "-m", "measurements.counters", str(file)],
        {"TORCHINDUCTOR_COMPILE_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
    )
    try:
        status = child.wait(LIMIT)
        failed = f"it ended with {status}" if status else None
    except subprocess.TimeoutExpired:
        kill(child)
        child.wait()
        failed = f"it did not end within {LIMIT} s"
    running.running.discard(child)
    messages = list(map(json.loads, sent.read_text().splitlines()))
    if not any("error" in m or "end" in m for m in messages):
        failed = failed or "it ended before its last cell"
        messages.append({"error": failed})
    return messages, failed


def why_not(said, failed):
    """Why ncu counted nothing, from what it said and how it ended, or None."""
    if "ERR_NVGPUCTRPERM" in said:
        return "ncu may not read this GPU's counters (ERR_NVGPUCTRPERM)"
    error = re.search(r"^==ERROR== *(.*\S)", said, re.MULTILINE)
    if error or failed:
        return f"ncu failed: {error[1] if error else failed}"
    return None


def launched(said):
    """{number of a point: [{metric: value} of each kernel in its range]}.

    The table begins at its header. The columns that hold ranges have long
    names of their own, so a range is looked for in all.
    """
    lines = said.splitlines()
    while lines and not lines[0].startswith('"ID"'):
        lines.pop(0)
    found, kernels = {}, {}
    for row in csv.DictReader(lines):
        cells = " ".join(cell for cell in row.values() if type(cell) is str)
        number = re.search(r"\bcounted (\d+)\b", cells)
        if not number:
            continue
        kernel = row["Process ID"], row["ID"]
        if kernel not in kernels:
            kernels[kernel] = {}
            found.setdefault(int(number[1]), []).append(kernels[kernel])
        try:
            value = float(row["Metric Value"].replace(",", ""))
        except ValueError:  # n/a
            continue
        kernels[kernel][row["Metric Name"]] = value
    return found


def fill(measured, ranges, launches):
    """Put what ncu counted where only ncu knows the number."""
    counter = measured["args"]["counter"]
    for row, its_range in zip(measured["rows"], ranges, strict=True):
        if its_range is None:
            continue
        number, per = its_range
        kernels = launches.get(number, [])
        if not kernels or any(counter not in kernel for kernel in kernels):
            x = recording.x_of(row, measured["x_names"])
            raise recording.RecordingError(
                f"ncu counted no {counter} for {x}, {row['provider']}"
            )
        value = over_all(kernels, counter) / per
        row |= dict.fromkeys(recording.VALUES, value)
    measured["method"] += replay.counted_with(" ".join(STATE))


def over_all(kernels, metric):
    """A metric of several kernels: a sum, or else the mean over their time."""
    values = [kernel[metric] for kernel in kernels]
    if metric.endswith(".sum"):
        return sum(values)
    times = [kernel[DURATION] for kernel in kernels]
    pairs = zip(values, times, strict=True)
    return sum(value * time for value, time in pairs) / sum(times)


# The process that is counted -------------------------------------------------


class Counting(run_page.Measuring):
    """Runs what ncu counts for, and gives each point's range a number."""

    def __init__(self, send, name, found):
        super().__init__(send, name)
        self.found = found  # benchmark -> what was timed, None if ncu counts
        self.number = 0  # of the point
        self.range = None  # its number and what it is divided by

    def watch(self, nvtx):
        """Let ranges that are pushed have numbers, and be for all threads.

        Names of a script may be the same in two benchmarks. A backward pass
        launches its kernels in a thread of its own, where nothing was pushed;
        a range that is started is there as well.
        """
        push, pop, started = nvtx.range_push, nvtx.range_pop, []

        def range_push(name):
            counts = name.startswith("counted ")
            if counts:
                per = re.search(r" per (\S+)$", name)
                self.range = self.number, float(per[1]) if per else 1.0
                name = f"counted {self.number}"
            started.append(nvtx.range_start(name) if counts else None)
            return push(name)

        def range_pop():
            handle = started.pop()
            if handle is not None:
                nvtx.range_end(handle)
            return pop()

        nvtx.range_push, nvtx.range_pop = range_push, range_pop

    def run(self, original, mark, bench, **kwargs):
        if timed := self.found.get(bench.plot_name):
            fn = replay.replaying(timed["rows"], bench)
            with replay.measuring_with(mark, fn):
                return original(mark, bench, "", False, False, **kwargs)
        self.ranges = []
        fn = self.counting(mark.fn, bench)
        table = self.measure(original, mark, bench, fn, **kwargs)
        left = {plot for plot, timed in self.found.items() if not timed}
        if left <= self.seen:
            raise run_page.EnoughError
        return table

    def counting(self, fn, bench):
        """What is called for each point."""

        def measure(**values):
            self.number, self.range = self.number + 1, None
            result = fn(**values)
            by_hand = recording.point(result)["median"] is not None
            if not (by_hand or self.range or result is None):
                given = {
                    n: values[n] for n in (*bench.x_names, bench.line_arg)
                }
                raise recording.RecordingError(
                    f"{bench.plot_name}: nothing is counted for {given}: no "
                    "range of NVTX whose name begins with 'counted ' was "
                    "pushed, and no number returned"
                )
            self.ranges.append(None if by_hand else self.range)
            return result

        return measure


def main(file):
    task = json.loads(Path(file).read_text(encoding="utf-8"))
    run_page.prepare(task["script"])
    import torch

    with open(task["sent"], "w", encoding="utf-8") as lines:

        def send(**message):
            print(json.dumps(message), file=lines, flush=True)

        stand_in = Counting(send, task["name"], task["found"])
        stand_in.watch(torch.cuda.nvtx)
        choices = run_page.choices_of_its_own(task["compiled"])
        run_page.follow(task["script"], stand_in, choices)


if __name__ == "__main__":
    main(*sys.argv[1:])
