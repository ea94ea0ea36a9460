"""The GPU checks of pages, which pass before anything is recorded."""

import importlib
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

import tutorial
from measurements.children import children
from measurements.measure import LOGS
from measurements.progress import clock, say


def command(page):
    """What runs the checks of a page: on all cores, for nothing is timed.

    tests/conftest.py lets those that need much memory run in turn.
    """
    run = [sys.executable, "-m", "pytest", "-q", "--page", page.name]
    try:
        importlib.import_module("xdist")
    except ImportError:
        return run  # one after the other
    cores = len(os.sched_getaffinity(0))
    return [*run, "-n", str(cores), "--dist", "loadscope"]


def checked(pages):
    """Run the GPU checks; the pages that passed, and what the others failed.

    How many passed is known to the page.
    """
    LOGS.mkdir(parents=True, exist_ok=True)
    with children() as running:
        found = [run(page, running) for page in pages]
    passed = [page for page in pages if page.checks != "not run"]
    return passed, [problem for problem in found if problem]


def run(page, running):
    """Run the checks of a page; what went wrong, or None."""
    log = page.log("checks")
    with tempfile.TemporaryDirectory() as folder, log.open("w") as output:
        report = Path(folder) / "report.xml"
        child = running.start(
            [*command(page), f"--junitxml={report}", "--durations=20"],
            {},
            cwd=tutorial.ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        status = child.wait()
        running.running.discard(child)
        there = report.exists()
        cases = list(ET.parse(report).iter("testcase")) if there else []
    counts = Counter(outcome(case) for case in cases)
    if status or counts["failed"] or not counts["passed"]:
        return (
            f"the GPU checks of tutorials/{page.name}.py: found "
            f"{counts['failed']} that failed and {counts['passed']} that "
            f"passed, expected all to pass, so it was not measured (see {log})"
        )
    page.checks = counts["passed"]
    seconds = clock(sum(float(case.get("time")) for case in cases))
    say(
        f"{page.name}: {page.checks} GPU checks passed, {counts['skipped']} "
        f"skipped, {seconds}"
    )
    return None


def outcome(case):
    said = {part.tag for part in case}
    if said & {"failure", "error"}:
        return "failed"
    return "skipped" if "skipped" in said else "passed"
