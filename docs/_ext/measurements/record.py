"""Measure tutorials on a GPU and write their recordings: ``make record``.

    python -m measurements.record [--all] [01 layer-norm/03-lock ...]

Needs torch, triton, matplotlib, pandas, joblib and pytest, not Sphinx. Only
benchmarks whose recording is missing or stale are measured. First the GPU
checks of their tutorials run; a tutorial that fails one is not measured. Each
benchmark is written when it is done.
"""

import argparse
import sys

from measurements import gpus, recording
from measurements.checks import checked
from measurements.measure import RefusedError, measure
from measurements.progress import say
from measurements.todo import Kept, announce, jobs_for, without_gpus


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
        jobs, left_out = without_gpus(jobs)
        for sentence in left_out:
            say(f"make record: {sentence}")
        if not jobs:
            sys.exit("make record: nothing was measured")
        kept.require_writable()
        announce(jobs)
        jobs, problems = checked(jobs, again=given.all)
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


if __name__ == "__main__":
    main()
