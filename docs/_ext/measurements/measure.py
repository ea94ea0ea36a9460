"""Measure benchmarks: compile everything, then time it, one tutorial a GPU.

While something is timed, nothing else runs on its GPU. Compiling needs no
such care, takes longer than timing, and is kept on disk: so all tutorials are
run once in advance, each in parts, on all cores (``one_tutorial.Compiling``).
What fails there is no failure; it is compiled when it is timed, and so is
what several GPUs share, in processes that the tutorial starts.
"""

import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import tutorial
from measurements import counters, gpus
from measurements.progress import Progress, clock, say

LOGS = tutorial.ROOT / "docs" / "_build" / "logs"
COMPILE_LIMIT = 300  # seconds: beyond, what is left is compiled when timed


class RefusedError(Exception):
    """Why nothing more is measured, in one line."""


@dataclass
class Job:
    """What is to be measured of one tutorial."""

    name: str
    script: Path
    why: dict  # benchmark -> why it is measured
    code: dict  # benchmark -> hash of its code, before anything ran
    fresh: dict = field(default_factory=dict)  # benchmark -> its recording
    checks: object = "not run"  # how many GPU checks passed
    points: dict = field(default_factory=dict)  # benchmark -> how many
    counters: dict = field(default_factory=dict)  # benchmark -> metric of ncu
    gpus: int = 1  # at a time, at least

    @property
    def timed(self):
        return [plot for plot in self.why if plot not in self.counters]

    @property
    def counted(self):
        return [plot for plot in self.why if plot in self.counters]

    @property
    def size(self):
        return sum(self.points.values())


def measure(jobs, keep):
    """Measure the benchmarks of jobs; what went wrong, a sentence each.

    keep(job, benchmark, measured) is called with each that is done; it gives
    None, or why it was not kept.
    """
    start = time.monotonic()
    LOGS.mkdir(parents=True, exist_ok=True)
    usable = gpus.usable()
    count = sum(len(job.why) for job in jobs)
    say(
        f"{count} benchmarks of {len(jobs)} tutorials, on {len(usable)} "
        f"{'GPU' if len(usable) == 1 else 'GPUs'}"
    )
    with (
        gpus.children() as children,
        tempfile.TemporaryDirectory() as compiled,  # by torch.compile
    ):
        alone = [job for job in jobs if job.gpus == 1]
        if alone:
            compile_in_advance(alone, usable, children, compiled)
            say(f"compiled in {clock(time.monotonic() - start)}")
        # Those that have several GPUs come last, one after the other.
        jobs = sorted(jobs, key=lambda job: (job.gpus, -job.size))
        progress = Progress(jobs)
        # All start at once: each is ready when its turn comes.
        started = [Child(job, children, compiled) for job in jobs]
        problems = gpus.each(
            lambda child, gpu: measure_one(child, gpu, progress, keep),
            started[: len(alone)],
            usable,
        )
        problems += [
            measure_one(child, gpus.shared(), progress, keep)
            for child in started[len(alone) :]
        ]
    say(f"measured in {clock(time.monotonic() - start)}")
    return [problem for part in problems for problem in part]


def compile_in_advance(jobs, usable, children, compiled):
    """Run all tutorials at once, each in as many shares as it has work for."""
    cores, points = len(os.sched_getaffinity(0)), sum(j.size for j in jobs)
    shares = [max(1, round(cores * job.size / points)) for job in jobs]
    items = [
        (job, i, n)
        for job, n in zip(jobs, shares, strict=True)
        for i in range(n)
    ]
    at_a_time = math.ceil(len(items) / len(usable))
    # Twice its share: few points need much memory, and not all at once.
    memory = min(1, 2 / at_a_time)
    say(f"compiling first, in {len(items)} processes")

    def work(item, gpu):
        job, i, n = item
        start, inside, failed = time.monotonic(), 0, None
        child = Child(job, children, compiled, (i, n), memory)
        limit = threading.Timer(COMPILE_LIMIT, child.process.kill)
        limit.start()
        for message in child.run(gpu):
            if "benchmark" in message:
                job.points[message["benchmark"]] = message["points"]
            inside = message.get("seconds", inside)
            failed = message.get("error", failed)
        limit.cancel()
        if children.ended:
            return
        say(
            f"  {job.name} {i + 1}/{n}: {clock(time.monotonic() - start)}, "
            f"{clock(inside)} of it in its points"
            + (f"; stopped: {failed} (see {child.log})" if failed else "")
        )

    gpus.each(work, items, usable, at_a_time)


def measure_one(child, gpu, progress, keep):
    """Measure one tutorial with the GPU to itself; what went wrong.

    First what is timed, then what ncu counts.
    """
    job, start = child.job, time.monotonic()
    problems, failed, inside = [], [], 0
    left = dict(job.why)
    for message in itertools.chain(child.run(gpu), child.count(gpu)):
        if "error" in message:
            failed.append(message["error"])
        if "benchmark" in message:
            plot, measured = message["benchmark"], message["measured"]
            left.pop(plot, None)
            inside += message["seconds"]
            problem = keep(job, plot, measured)
            if problem:
                problems.append(problem)
            else:
                job.fresh[plot] = measured
            progress.done(job, message, problem)
    if child.children.ended:
        return []
    spent = time.monotonic() - start
    say(
        f"{job.name}: {clock(spent)} on GPU {gpu}, {clock(inside)} of it in "
        "benchmarks"
    )
    if failed or left:
        problems.append(
            f"tutorials/{job.name}.py stopped: "
            f"{'; '.join(failed) or 'it does not run all of its benchmarks'}"
            "; not "
            f"measured: {', '.join(left) or 'nothing'} (see {child.log})"
        )
    return problems


class Child:
    """A process that runs one tutorial and sends what it finds."""

    def __init__(self, job, children, compiled, share=None, memory=1):
        self.job, self.children, self.compiled = job, children, compiled
        self.log = self.log_of(
            f"compile-{share[0] + 1}" if share else "measure"
        )
        self.process, plots = None, list(job.why) if share else job.timed
        if not plots:
            return
        task = {
            "name": job.name,
            "script": str(job.script),
            "plots": plots,
            "fresh": job.fresh,
            "compiled": compiled,
            "share": share,
            "memory": memory,
        }
        # One thread each: compiling already has a process for each core, and
        # timing is disturbed by none.
        env = {"TORCHINDUCTOR_COMPILE_THREADS": "1"} | gpus.ASK_NO_CUDA
        env |= {"OMP_NUM_THREADS": "1"} if share else {}
        with self.log.open("w") as log:
            self.process = children.start(
                [sys.executable, "-m", "measurements.one_tutorial"],
                env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        self.say(json.dumps(task))

    def log_of(self, what):
        return LOGS / f"{tutorial.file_name(self.job.name)}.{what}.log"

    def say(self, line):
        # A process that ended before it listened says why in its log.
        with suppress(BrokenPipeError):
            print(line, file=self.process.stdin, flush=True)

    def run(self, gpu):
        """Let it use a GPU; what it sends."""
        if not self.process:
            return
        self.say(gpu)
        failed = False
        for line in self.process.stdout:
            message = json.loads(line)
            failed |= "error" in message
            yield message
        status = self.process.wait()
        self.children.running.discard(self.process)
        if status and not failed:
            yield {"error": f"it ended with {status}"}

    def count(self, gpu):
        """Run the tutorial under ncu, if that counts for it; what it sends."""
        if self.job.counted and not self.children.ended:
            self.log = self.log_of("count")
            yield from counters.count(
                self.job, gpu, self.children, self.compiled, self.log
            )
