"""Measure pages on a GPU: ``make record``, or a build that measures first.

    python -m measurements.record [--all] [01 layer-norm/03-lock ...]

Needs torch, triton, matplotlib, pandas and pytest, not Sphinx. Only pages
whose recording is missing or stale are measured. First their GPU checks run; a
page that fails one is not measured, and one whose times lie too far apart is
not recorded. Each page is written when it is done. Last it is said which
sentences the new numbers make wrong; the recordings are good all the same, and
so is the exit status.
"""

import argparse
import sys

import tutorial
from measurements import claims, gpus, recording
from measurements.gpu_checks import checked
from measurements.measure import RefusedError, measure
from measurements.progress import say
from measurements.stale import Kept, pick, with_enough_gpus


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="make record")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("tutorials", nargs="*")
    given = parser.parse_args(arguments)
    again = "make record goes on with what is left"
    tutorial.require_assertions()
    try:
        scripts = pick(given.tutorials)
        if not gpus.there():
            raise RefusedError(
                f"{gpus.none()}; run make record on a machine with a GPU "
                "(make html and make test need none)"
            )
        kept = Kept(recording.STORE)
        pages = kept.pages(scripts, every=given.all)
        if not pages:
            say("make record: every recording is fresh (ALL=1 measures all)")
            return
        pages, left_out = with_enough_gpus(pages)
        for sentence in left_out:
            say(f"make record: {sentence}")
        if not pages:
            sys.exit("make record: nothing was measured")
        kept.require_writable()
        announce(pages)
        pages, problems = checked(pages)
        if pages:
            problems += measure(pages, kept.keep, calm=True)
            say_what_is_wrong()
    except (RefusedError, recording.RecordingError, OSError) as error:
        sys.exit(f"make record: {error}")
    except KeyboardInterrupt:
        sys.exit(f"make record: interrupted; what is written stays; {again}")
    for problem in problems:
        say(f"make record: {problem}")
    if problems:
        sys.exit(f"make record: the rest is written; {again}")


def say_what_is_wrong():
    """The sentences that are not what the recordings say."""
    if sentences := list(claims.all_wrong()):
        say(
            "make record: what was measured is kept, and these sentences are "
            "not what it says; make test fails until they are mended:"
        )
    for sentence in sentences:
        say(f"  {sentence}")


def announce(pages):
    """Say what will be measured, and why."""
    for page in pages:
        say(f"{page.name}: {page.why}")


def for_a_build():
    """Measure what this build will show, without the GPU checks; what went
    wrong, a sentence each. What is there and fresh is not measured again."""
    left = "the next build measures what is left"
    try:
        kept = Kept(recording.BY_BUILD)
        pages = kept.pages(tutorial.scripts(), same_machine=True)
        pages, left_out = with_enough_gpus(pages)
        for sentence in left_out:
            say(f"{sentence}; its page shows what was recorded")
        if not pages:
            return []
        kept.require_writable()
        announce(pages)
        problems = measure(pages, kept.keep)
    except (RefusedError, recording.RecordingError, OSError) as error:
        problems = [str(error)]
    except KeyboardInterrupt:
        problems = ["interrupted; the pages that were measured are kept"]
    return [*problems, left] if problems else []


if __name__ == "__main__":
    main()
