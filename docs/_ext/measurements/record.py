"""Measure tutorials on a GPU and write their recordings: ``make record``.

    python -m measurements.record [--all] [01 03-layer-norm-any-width ...]

Needs torch, triton, matplotlib, pandas, joblib and pytest, not Sphinx. Only
benchmarks whose recording is missing or stale are measured. First the GPU
checks of their tutorials run; a tutorial that fails one is not measured. Each
benchmark is written when it is done.
"""

import argparse
import math
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from pathlib import Path

from measurements import gpus, recording
from measurements.measure import LOGS, RefusedError, measure, path
from measurements.progress import clock, say
from measurements.todo import Kept, announce, jobs_for


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="make record")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("tutorials", nargs="*")
    given = parser.parse_args(arguments)
    again = "make record goes on with what is left"
    try:
        scripts = recording.pick(given.tutorials)
        require_gpu("make record")
        kept = Kept(recording.STORE)
        jobs = jobs_for(scripts, kept, every=given.all)
        if not jobs:
            say("make record: every recording is fresh (ALL=1 measures all)")
            return
        kept.require_writable()
        announce(jobs)
        jobs, problems = checked(jobs)
        problems += measure(jobs, kept.keep) if jobs else []
    except (RefusedError, recording.RecordingError, OSError) as error:
        sys.exit(f"make record: {error}")
    except KeyboardInterrupt:
        sys.exit(f"make record: interrupted; what is written stays; {again}")
    for problem in problems:
        say(f"make record: {problem}")
    if problems:
        sys.exit(f"make record: the rest is written; {again}")


def require_gpu(command):
    if not gpus.there():
        raise RefusedError(
            f"no GPU here; run {command} on a machine with a GPU "
            "(make html and make test need none)"
        )


def checked(jobs):
    """Run the GPU checks; the jobs that passed, and what the others failed.

    Nothing is timed, so all tutorials share the GPUs.
    """
    LOGS.mkdir(parents=True, exist_ok=True)
    usable = gpus.usable()
    with gpus.children() as children:
        problems = gpus.each(
            lambda job, gpu: check(job, gpu, children),
            jobs,
            usable,
            at_a_time=math.ceil(len(jobs) / len(usable)),
        )
    passed = [j for j, p in zip(jobs, problems, strict=True) if p is None]
    return passed, [problem for problem in problems if problem]


def check(job, gpu, children):
    """Run the GPU checks of a tutorial; what went wrong, or None."""
    start = time.monotonic()
    section, _, stem = job.name.rpartition("/")
    tests = recording.ROOT / "tests" / "gpu" / section
    mine = sorted(tests.glob(f"test_{stem[:2]}_*.py"))
    if not mine:
        return f"tutorials/{job.name}.py has no checks in {tests}"
    log = LOGS / f"{job.name.replace('/', '.')}.checks.log"
    with tempfile.TemporaryDirectory() as folder, log.open("w") as output:
        report = Path(folder) / "report.xml"
        child = children.start(
            [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}"]
            + [str(test) for test in mine],
            gpu,
            {"PYTHONPATH": path()},
            cwd=recording.ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        if child.wait():
            return (
                f"a GPU check of tutorials/{job.name}.py failed, so it was "
                f"not measured (see {log}, or run make test-gpu)"
            )
        suite = ET.parse(report).getroot().find("testsuite")
    tests, *others = (
        int(suite.get(key))
        for key in ("tests", "failures", "errors", "skipped")
    )
    job.checks = tests - sum(others)
    say(
        f"{job.name}: {job.checks} GPU checks passed, {others[2]} skipped, in "
        f"{clock(time.monotonic() - start)}"
    )
    return None


if __name__ == "__main__":
    main()
