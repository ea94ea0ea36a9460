"""Measure pages: compile everything, then time it, one page after the other.

While something is timed, nothing else runs. Compiling needs no such care,
takes longer than timing, and is kept on disk: so all pages are run once in
advance, each in parts, on all cores (``run_page.Compiling``). What fails there
is no failure; it is compiled when it is timed, and so is what several GPUs
share, in processes that the page starts.
"""

import json
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
from measurements import counters, environment, recording, spread
from measurements.children import beside, children
from measurements.progress import Progress, clock, say

LOGS = tutorial.ROOT / "docs" / "_build" / "logs"
COMPILE_LIMIT = 300  # seconds: beyond, what is left is compiled when timed
READY_LIMIT = 300  # seconds to import torch, all pages at once


class RefusedError(Exception):
    """Why nothing more is measured, in one line."""


@dataclass
class Page:
    """A page that is to be measured."""

    name: str
    script: Path
    why: str
    code: str  # the hash of its code, before anything ran
    checks: object = "not run"  # how many GPU checks passed
    gpus: int = 1  # at a time, at least
    points: dict = field(default_factory=dict)  # benchmark -> how many

    def log(self, what):
        return LOGS / f"{tutorial.file_name(self.name)}.{what}.log"


def measure(pages, keep, calm=False):
    """Measure pages; what went wrong, a sentence each.

    keep(page, benchmarks) is called with each page that is done; it gives
    None, or why it was not kept. With calm, a page whose points lie too far
    apart is not (see spread).
    """
    start = time.monotonic()
    LOGS.mkdir(parents=True, exist_ok=True)
    # Those that have several GPUs come last.
    pages = sorted(pages, key=lambda page: page.gpus)
    with (
        children() as running,
        tempfile.TemporaryDirectory() as compiled,  # by torch.compile
    ):
        if alone := [page for page in pages if page.gpus == 1]:
            compile_in_advance(alone, running, compiled)
            say(f"compiled in {clock(time.monotonic() - start)}")
        # All start at once: each is ready when its turn comes, and none
        # imports anything while another is timed.
        processes = [Process(page, running, compiled) for page in pages]
        wait_until_ready(processes)
        progress = Progress(pages)
        problems = [
            measure_page(process, progress, keep, calm)
            for process in processes
        ]
    say(f"measured in {clock(time.monotonic() - start)}")
    return [problem for problem in problems if problem]


def compile_in_advance(pages, running, compiled):
    """Run all pages at once, each in as many shares as it has work for."""
    cores = len(os.sched_getaffinity(0))
    expected = {page.name: sum(page.points.values()) for page in pages}
    work = cores / sum(expected.values())
    shares = [
        (page, i, count)
        for page in pages
        for count in [max(1, round(work * expected[page.name]))]
        for i in range(count)
    ]
    # Twice its share: few points need much memory, and not all at once.
    memory = min(1, 2 / len(shares))
    seen = {page.name: {} for page in pages}
    say(f"compiling {len(pages)} pages first, in {len(shares)} processes")

    def compile_share(share):
        page, i, count = share
        start, inside, failed = time.monotonic(), 0, None
        process = Process(page, running, compiled, (i, count), memory)
        limit = threading.Timer(COMPILE_LIMIT, process.child.kill)
        limit.start()
        for message in process.run():
            if "points" in message:
                seen[page.name][message["benchmark"]] = message["points"]
            inside = message.get("seconds", inside)
            failed = message.get("error", failed)
        limit.cancel()
        if running.ended:
            return
        say(
            f"  {page.name} {i + 1}/{count}: "
            f"{clock(time.monotonic() - start)}, {clock(inside)} of it in its "
            f"points" + (f"; {failed} (see {process.log})" if failed else "")
        )

    beside(running, compile_share, shares, len(shares))
    for page in pages:
        page.points = seen[page.name] or page.points


def wait_until_ready(processes):
    limit = threading.Timer(
        READY_LIMIT, lambda: [each.child.kill() for each in processes]
    )
    limit.start()
    for process in processes:
        process.await_ready()
    limit.cancel()


def measure_page(process, progress, keep, calm=False):
    """Measure a page: what is timed, then what ncu counts; what went wrong."""
    page, start, failed = process.page, time.monotonic(), []
    found, counted = {}, {}  # by benchmark, in the order of the page
    machine = environment.here(page.checks)

    def take(messages):
        for message in messages:
            if "error" in message:
                failed.append(message["error"])
            if "counter" in message:
                counted[message["benchmark"]] = message["counter"]
                found[message["benchmark"]] = None
            if "measured" in message:
                found[message["benchmark"]] = message["measured"]
                progress.done(page, message)

    take(process.run())
    log = process.log
    if calm and not failed:
        failed += measure_again(process, found)
    if counted and not failed:
        log = page.log("count")
        take(counters.count(page, found, counted, process, log))
    if process.running.ended:
        return None
    say(f"{page.name}: {clock(time.monotonic() - start)}")
    left = [plot for plot, measured in found.items() if not measured]
    if not failed and left:
        failed = [f"nothing came of {', '.join(left)}"]
    if failed:
        return (
            f"tutorials/{page.name}.py stopped: {'; '.join(failed)}; it is "
            f"not recorded (see {log})"
        )
    for plot, measured in found.items():
        own = measured.get("environment", {})
        if count := recording.ranks(measured):
            if page.gpus == 1:
                return (
                    f"tutorials/{page.name}.py: {plot} has {count} ranks, "
                    "which the text of the script does not show; write "
                    "ranks=2 where it is made"
                )
            own |= environment.linked(count)
        if own:
            measured["environment"] = own
    if libraries := environment.libraries(found.values()):
        machine["libraries"] = libraries
    return keep(page, machine, found)


def measure_again(process, found):
    """Measure anew, some times, the sizes at which points lie too far apart;
    why that did not help, if so. What is quiet is kept."""

    def disturbed():
        timed = {plot: each for plot, each in found.items() if each}
        return [
            spread.said(plot, each)
            for plot, each in timed.items()
            if spread.wide(each)
        ]

    for _ in range(spread.TRIES):
        if not (sentences := disturbed()) or process.running.ended:
            return []
        for sentence in sentences:
            say(f"{process.page.name}: {sentence}; measured again")
        kept = {p: spread.quiet(each) for p, each in found.items() if each}
        again = Process(
            process.page, process.running, process.compiled, kept=kept
        )
        again.await_ready()
        for message in again.run():
            if "error" in message:
                return [message["error"]]
            if "measured" in message:
                found[message["benchmark"]] = message["measured"]
    return [
        f"{sentence}, after {spread.TRIES + 1} tries, and at most "
        f"{spread.MOST:.0%} is recorded; see what else runs on this machine"
        for sentence in disturbed()
    ]


class Process:
    """A process that runs one page and sends what it finds."""

    def __init__(
        self, page, running, compiled, share=None, memory=1, kept=None
    ):
        self.page, self.running, self.compiled = page, running, compiled
        self.log = page.log(f"compile-{share[0] + 1}" if share else "measure")
        # One thread each: compiling already has a process for each core, and
        # timing is disturbed by none.
        env = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
        env |= {"OMP_NUM_THREADS": "1"} if share else {}
        with self.log.open("a" if kept else "w") as log:
            self.child = running.start(
                [sys.executable, "-m", "measurements.run_page"],
                env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        task = {"name": page.name, "script": str(page.script)}
        task |= {"compiled": compiled, "share": share, "memory": memory}
        task |= {"kept": kept or {}}
        self.say(json.dumps(task))

    def say(self, line):
        # A process that ended before it listened says why in its log.
        with suppress(BrokenPipeError):
            print(line, file=self.child.stdin, flush=True)

    def await_ready(self):
        self.child.stdout.readline()

    def run(self):
        """Let it use the GPU; what it sends."""
        self.say("begin")
        ended = False
        for line in self.child.stdout:
            message = json.loads(line)
            ended |= "error" in message or "end" in message
            yield message
        status = self.child.wait()
        self.running.running.discard(self.child)
        if not ended:  # os._exit, a signal, or no memory
            yield {
                "error": f"it ended with {status} before its last cell, as if "
                "it called os._exit or was killed"
            }
