"""The GPU checks of pages, which pass before anything is recorded."""

import importlib
import os
import re
import subprocess
import sys
import time
from collections import Counter

import tutorial
from measurements.children import beside, children
from measurements.measure import LOGS
from measurements.progress import clock, say

# In the last line of pytest: 1 failed, 2 passed, 3 skipped in 4.56s
COUNTED = re.compile(r"(\d+) (failed|error|passed|skipped)")
# Pages beside each other: a process that has loaded a page runs more of its
# checks, and while one page waits for its longest, others use the cores.
AT_A_TIME = 4


def command(page, pages):
    """What runs the checks of a page, while those of some pages run: on all
    cores, for nothing is timed.

    tests/conftest.py lets those that need much memory run in turn.
    """
    run = [sys.executable, "-m", "pytest", "-q", "--page", page.name]
    try:
        importlib.import_module("xdist")
    except ImportError:
        return run  # one after the other
    cores = len(os.sched_getaffinity(0)) // min(pages, AT_A_TIME)
    return [*run, "-n", str(max(1, cores)), "--dist", "loadscope"]


def checked(pages):
    """Run the GPU checks; the pages that passed, and what the others failed.

    How many passed is known to the page.
    """
    LOGS.mkdir(parents=True, exist_ok=True)
    with children() as running:

        def check(page):
            return run(page, len(pages), running)

        found = beside(running, check, pages, AT_A_TIME)
    passed = [page for page in pages if page.checks != "not run"]
    return passed, [problem for problem in found if problem]


def run(page, pages, running):
    """Run the checks of a page, one of some; what went wrong, or None."""
    start, log = time.monotonic(), page.log("checks")
    with log.open("w") as output:
        child = running.start(
            [*command(page, pages), "--durations=20"],
            {},
            cwd=tutorial.ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        status = child.wait()
        running.running.discard(child)
    *_, last = log.read_text().splitlines() or [""]
    counts = Counter({what: int(n) for n, what in COUNTED.findall(last)})
    failed = counts["failed"] + counts["error"]
    if status or failed or not counts["passed"]:
        return (
            f"the GPU checks of tutorials/{page.name}.py: found {failed} that "
            f"failed and {counts['passed']} that passed, expected all to "
            f"pass, so it was not measured (see {log})"
        )
    page.checks = counts["passed"]
    say(
        f"{page.name}: {page.checks} GPU checks passed, {counts['skipped']} "
        f"skipped, {clock(time.monotonic() - start)}"
    )
    return None
