"""Live figures: a build on a GPU measures first, then shows what it measured.

The same code as for ``make record``, but into a folder of the build, without
the GPU checks. What is there and fresh is not measured again.
"""

import tutorial
from measurements import recording
from measurements.measure import RefusedError, measure
from measurements.progress import say
from measurements.todo import Kept, announce, jobs_for, without_gpus

STORE = tutorial.ROOT / "docs" / "_build" / "measurements"


def measure_what_is_stale():
    """Bring the folder up to date; what went wrong, a sentence each."""
    left = "the next build measures what is left"
    try:
        kept = Kept(STORE)
        jobs = jobs_for(tutorial.scripts(), kept, machine=kept.machine)
        jobs, left_out = without_gpus(jobs)
        for sentence in left_out:
            say(f"{sentence}; its page shows what was recorded")
        if not jobs:
            return []
        kept.require_writable()
        announce(jobs)
        problems = measure(jobs, kept.keep)
    except (RefusedError, recording.RecordingError, OSError) as error:
        problems = [str(error)]
    except KeyboardInterrupt:
        problems = ["interrupted; what was measured is kept"]
    return [*problems, left] if problems else []
