"""Measure benchmarks: compile everything, then time it, one tutorial a GPU.

While something is timed, nothing else runs on its GPU. Compiling needs no
such care, takes longer than timing, and is kept on disk: so all tutorials are
run once in advance, each in parts, on all cores (``one_tutorial.Compiling``).
What fails there is no failure; it is compiled when it is timed.
"""

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
from measurements import gpus
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
        compile_in_advance(jobs, usable, children, compiled)
        say(f"compiled in {clock(time.monotonic() - start)}")
        jobs = sorted(jobs, key=lambda job: -job.size)
        progress = Progress(jobs)
        # All start at once: each is ready when its turn comes.
        started = [Child(job, children, compiled) for job in jobs]
        problems = gpus.each(
            lambda child, gpu: time_one(child, gpu, progress, keep),
            started,
            usable,
        )
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
        if child.process.returncode and not failed:
            failed = f"it ended with {child.process.returncode}"
        say(
            f"  {job.name} {i + 1}/{n}: {clock(time.monotonic() - start)}, "
            f"{clock(inside)} of it in its points"
            + (f"; stopped: {failed} (see {child.log})" if failed else "")
        )

    gpus.each(work, items, usable, at_a_time)


def time_one(child, gpu, progress, keep):
    """Time one tutorial with the GPU to itself; what went wrong."""
    job, start = child.job, time.monotonic()
    problems, failed, inside = [], None, 0
    left = dict(job.why)
    for message in child.run(gpu):
        failed = message.get("error", failed)
        if "benchmark" in message:
            left.pop(message["benchmark"], None)
            inside += message["seconds"]
            problem = keep(job, message["benchmark"], message["measured"])
            if problem:
                problems.append(problem)
            progress.done(job, message, problem)
    if child.children.ended:
        return []
    spent = time.monotonic() - start
    say(
        f"{job.name}: {clock(spent)} on GPU {gpu}, {clock(inside)} of it in "
        "benchmarks"
    )
    if child.process.returncode:
        failed = failed or f"it ended with {child.process.returncode}"
    if failed or left:
        problems.append(
            f"tutorials/{job.name}.py stopped: "
            f"{failed or 'it does not run all of its benchmarks'}; not "
            f"measured: {', '.join(left) or 'nothing'} (see {child.log})"
        )
    return problems


class Child:
    """A process that runs one tutorial and sends what it finds."""

    def __init__(self, job, children, compiled, share=None, memory=1):
        self.job, self.children = job, children
        what = f"compile-{share[0] + 1}" if share else "measure"
        self.log = LOGS / f"{job.name.replace('/', '.')}.{what}.log"
        task = {
            "name": job.name,
            "script": str(job.script),
            "plots": list(job.why),
            "fresh": job.fresh,
            "compiled": compiled,
            "share": share,
            "memory": memory,
        }
        # One thread each: compiling already has a process for each core, and
        # timing is disturbed by none.
        env = {"PYTHONPATH": path(), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
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

    def say(self, line):
        # A process that ended before it listened says why in its log.
        with suppress(BrokenPipeError):
            print(line, file=self.process.stdin, flush=True)

    def run(self, gpu):
        """Let it use a GPU; what it sends."""
        self.say(gpu)
        for line in self.process.stdout:
            yield json.loads(line)
        self.process.wait()
        self.children.running.discard(self.process)


def path():
    """Where the children find these modules."""
    here = str(Path(__file__).resolve().parents[1])
    return os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
