"""The GPU checks of tutorials, which pass before anything is recorded.

What passed is kept until the script, its checks or what runs them changes:
a run that goes on where another was interrupted does not check again.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

import tutorial
from measurements import gpus, recording
from measurements.measure import LOGS
from measurements.progress import clock, say

CHECKS = tutorial.ROOT / "tests" / "gpu"
KEPT = tutorial.ROOT / "docs" / "_build" / "checks"


def checked(jobs, again):
    """Run the GPU checks; the jobs that passed, and what the others failed.

    Nothing is timed, so each GPU runs as many at a time as there are cores.
    Who asks for it runs those again that passed before.
    """
    LOGS.mkdir(parents=True, exist_ok=True)
    machine = recording.environment("not run")
    inputs = {job.name: digest(job, machine) for job in jobs}
    problems, left = {}, []
    for job in jobs:
        before = passed_before(job, inputs[job.name])
        if not files_of(job):
            problems[job.name] = (
                f"tutorials/{job.name}.py has no checks in {CHECKS}"
            )
        elif before and not again:
            job.checks = before
            say(f"{job.name}: {before} GPU checks passed before")
        else:
            left.append(job)
    problems |= run_all(left) if left else {}
    for job in left:
        if job.name not in problems:
            keep(job, inputs[job.name])
    passed = [job for job in jobs if job.name not in problems]
    return passed, list(problems.values())


def files_of(job):
    """The checks of a tutorial: gpu/fused/test_01_*.py of fused/01-*.py."""
    section, _, stem = job.name.rpartition("/")
    return sorted((CHECKS / section).glob(f"test_{stem[:2]}_*.py"))


def digest(job, machine):
    """A hash of what a run of the checks depends on."""
    tests = CHECKS.parent
    shared = (p for p in tests.glob("*.py") if not p.match("test_*.py"))
    files = job.script, *files_of(job), *sorted(shared)
    parts = [file.read_bytes() for file in files]
    lasting = {k: v for k, v in machine.items() if k != "date"}
    parts.append(repr(sorted(lasting.items())).encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def kept(job):
    return KEPT / f"{tutorial.file_name(job.name)}.json"


def passed_before(job, inputs):
    """How many passed when all was as it is now, or None."""
    if not kept(job).exists():
        return None
    before = json.loads(kept(job).read_text(encoding="utf-8"))
    return before["passed"] if before["inputs"] == inputs else None


def keep(job, inputs):
    kept(job).parent.mkdir(parents=True, exist_ok=True)
    kept(job).write_text(json.dumps({"inputs": inputs, "passed": job.checks}))


def run_all(jobs):
    """Deal the tutorials out to the GPUs; name -> what went wrong."""
    usable = gpus.usable()
    workers = len(os.sched_getaffinity(0)) // len(usable)
    alone = [job for job in jobs if job.gpus == 1]
    shares = [alone[i :: len(usable)] for i in range(len(usable))]
    with gpus.children() as children:
        found = gpus.each(
            lambda share, gpu: run(share, gpu, workers, children),
            [share for share in shares if share],
            usable,
        )
        found += [
            run([job], gpus.shared(), 1, children)
            for job in jobs
            if job.gpus > 1
        ]
    return {name: why for part in found for name, why in part.items()}


def run(jobs, gpu, workers, children):
    """Run the checks of some tutorials beside each other on one GPU.

    What passed is known to its job; name -> what went wrong.
    """
    log = LOGS / f"checks-on-gpu-{gpu}.log"
    files = {job.name: files_of(job) for job in jobs}
    # Those that ask for much memory are one group, so they run in turn.
    options = ["-n", str(workers), "--dist", "loadgroup"]
    options += ["-o", "junit_family=xunit1", "--durations=20"]
    with tempfile.TemporaryDirectory() as folder, log.open("w") as output:
        report = Path(folder) / "report.xml"
        child = children.start(
            [sys.executable, "-m", "pytest", "-q", *options]
            + [f"--rootdir={tutorial.ROOT}"]
            + ["--continue-on-collection-errors", f"--junitxml={report}"]
            + [str(file) for own in files.values() for file in own],
            {"CUDA_VISIBLE_DEVICES": gpu},
            cwd=tutorial.ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        ended = child.wait() in (0, 1)  # else what it did is not known
        cases = list(ET.parse(report).iter("testcase")) if ended else []
    problems = {}
    for job in jobs:
        own = {file.relative_to(tutorial.ROOT) for file in files[job.name]}
        mine = [case for case in cases if Path(case.get("file")) in own]
        counts = Counter(outcome(case) for case in mine)
        if counts["failed"] or not counts["passed"]:
            problems[job.name] = (
                f"a GPU check of tutorials/{job.name}.py failed, so it was "
                f"not measured (see {log}, or run make test-gpu)"
            )
            continue
        job.checks = counts["passed"]
        say(
            f"{job.name}: {job.checks} GPU checks passed, "
            f"{counts['skipped']} skipped, "
            f"{clock(sum(float(case.get('time')) for case in mine))} of a core"
        )
    return problems


def outcome(case):
    said = {part.tag for part in case}
    if said & {"failure", "error"}:
        return "failed"
    return "skipped" if "skipped" in said else "passed"
