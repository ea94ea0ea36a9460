"""The GPU checks of tutorials, which pass before anything is recorded.

What passed is kept until the script, its checks or what runs them changes:
a run that goes on where another was interrupted does not check again.
"""

import hashlib
import json
import math
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from pathlib import Path

import tutorial
from measurements import gpus, recording
from measurements.measure import LOGS, path
from measurements.progress import clock, say

KEPT = tutorial.ROOT / "docs" / "_build" / "checks"


def checked(jobs, again):
    """Run the GPU checks; the jobs that passed, and what the others failed.

    Nothing is timed, so all tutorials share the GPUs. Who asks for it runs
    them again.
    """
    LOGS.mkdir(parents=True, exist_ok=True)
    usable = gpus.usable()
    machine = recording.environment("not run")
    with gpus.children() as children:
        problems = gpus.each(
            lambda job, gpu: check(job, gpu, children, machine, again),
            jobs,
            usable,
            at_a_time=math.ceil(len(jobs) / len(usable)),
        )
    passed = [j for j, p in zip(jobs, problems, strict=True) if p is None]
    return passed, [problem for problem in problems if problem]


def check(job, gpu, children, machine, again):
    """Run the GPU checks of a tutorial; what went wrong, or None."""
    section, _, stem = job.name.rpartition("/")
    folder = tutorial.ROOT / "tests" / "gpu" / section
    mine = sorted(folder.glob(f"test_{stem[:2]}_*.py"))
    if not mine:
        return f"tutorials/{job.name}.py has no checks in {folder}"
    kept = KEPT / f"{job.name.replace('/', '.')}.json"
    inputs = digest(job, mine, machine)
    if kept.exists() and not again:
        before = json.loads(kept.read_text(encoding="utf-8"))
        if before["inputs"] == inputs:
            job.checks = before["passed"]
            say(f"{job.name}: {job.checks} GPU checks passed before")
            return None
    start = time.monotonic()
    log = LOGS / f"{job.name.replace('/', '.')}.checks.log"
    counts = run(mine, gpu, children, log)
    if counts is None:
        return (
            f"a GPU check of tutorials/{job.name}.py failed, so it was "
            f"not measured (see {log}, or run make test-gpu)"
        )
    job.checks, skipped = counts
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps({"inputs": inputs, "passed": job.checks}))
    say(
        f"{job.name}: {job.checks} GPU checks passed, {skipped} skipped, in "
        f"{clock(time.monotonic() - start)}"
    )
    return None


def digest(job, mine, machine):
    """A hash of what a run of the checks depends on."""
    tests = tutorial.ROOT / "tests"
    shared = (p for p in tests.glob("*.py") if not p.match("test_*.py"))
    parts = [p.read_bytes() for p in (job.script, *mine, *sorted(shared))]
    lasting = {k: v for k, v in machine.items() if k != "date"}
    parts.append(repr(sorted(lasting.items())).encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def run(tests, gpu, children, log):
    """How many passed and were skipped, or None if one failed."""
    with tempfile.TemporaryDirectory() as folder, log.open("w") as output:
        report = Path(folder) / "report.xml"
        child = children.start(
            [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}"]
            + [str(test) for test in tests],
            gpu,
            {"PYTHONPATH": path()},
            cwd=tutorial.ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        if child.wait():
            return None
        suite = ET.parse(report).getroot().find("testsuite")
    count, *others = (
        int(suite.get(key))
        for key in ("tests", "failures", "errors", "skipped")
    )
    return count - sum(others), others[2]
