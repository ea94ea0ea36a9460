"""What is to be measured, and why; and where it is kept when it is done."""

import tempfile
from contextlib import suppress

import tutorial
from measurements import benchmarks, counters, gpus, recording
from measurements.measure import Job, RefusedError
from measurements.progress import say

# What has to be the same for numbers to count as those of this machine.
MACHINE = ("gpu", "driver", "cuda", "torch", "triton", "python", "ncu")


def jobs_for(scripts, kept, every=False, machine=None):
    """A job for each tutorial that has something to measure.

    With machine, an environment, numbers of another one are stale too.
    """
    jobs = []
    for script in scripts:
        name = tutorial.name_of(script)
        job = Job(name, script, {}, recording.codes(name))
        job.counters = benchmarks.counters(script)
        job.gpus = benchmarks.gpus(script)
        old, damage = kept.read(name)
        for plot, code in job.code.items():
            if every:
                why = "all are asked for"
            elif plot not in old:
                why = damage or "not measured yet"
            elif old[plot]["code"] != code:
                why = "its code has changed"
            elif machine and other(old[plot]["environment"], machine):
                why = other(old[plot]["environment"], machine)
            elif not machine and kept.may_count(old[plot]):
                why = f"it was not counted: {old[plot]['reason']}"
            else:
                job.fresh[plot] = old[plot]
                continue
            job.why[plot] = why
        job.points = expected_points(name, job.why, old)
        if job.why:
            jobs.append(job)
    return jobs


def without_gpus(jobs):
    """The jobs that this machine has enough GPUs for; of the others a
    sentence each."""
    here = len(gpus.usable())
    return [job for job in jobs if job.gpus <= here], [
        f"tutorials/{job.name}.py is measured on {job.gpus} GPUs, and here "
        f"{'is' if here == 1 else 'are'} {here}: it was left out"
        for job in jobs
        if job.gpus > here
    ]


def expected_points(name, plots, old):
    """How many points benchmarks have, as far as a recording tells."""
    for gpu in recording.gpus(name):
        with suppress(recording.RecordingError):
            old = recording.read(gpu, name)["benchmarks"] | old
    return {p: len(old[p]["rows"]) if p in old else 50 for p in plots}


def announce(jobs):
    """Say what will be measured, and why."""
    for job in jobs:
        for why in dict.fromkeys(job.why.values()):
            plots = ", ".join(p for p, its in job.why.items() if its == why)
            say(f"{job.name}: {plots}: {why}")


def other(environment, machine):
    """In what the machine differs from that of a measurement, or None."""
    for key in MACHINE:
        # ncu is asked about what it counts only.
        if key in environment and environment[key] != machine[key]:
            return f"{key} was {environment[key]}, is {machine[key]}"
    return None


class Kept:
    """The recordings of this machine's GPU in a folder."""

    def __init__(self, store):
        self.store = store
        self.machine = recording.environment("not run")
        self.machine["ncu"] = counters.version()
        self.gpu = recording.slug(self.machine["gpu"])

    def read(self, name):
        """The benchmarks of a tutorial, and why there are none."""
        if not recording.path_of(self.gpu, name, self.store).exists():
            return {}, None
        try:
            data = recording.read(self.gpu, name, self.store)
        except recording.RecordingError as error:
            return {}, f"the recording is not whole: {error}"
        return data["benchmarks"], None

    def may_count(self, benchmark):
        """Whether ncu is here, and counted nothing for a benchmark before."""
        here = self.machine["ncu"] != counters.ABSENT
        return here and "reason" in benchmark

    def require_writable(self):
        """Find out before the measuring that nothing can be written."""
        folder = self.store / self.gpu
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise RefusedError(
                f"{folder} cannot be written ({error.strerror}); nothing was "
                "measured; make it writable and try again"
            ) from None

    def keep(self, job, plot, measured):
        """Write a benchmark into its file; why not, or None."""
        try:
            now = recording.codes(job.name)
        except recording.RecordingError as error:
            now = {"": error}
        if now.get(plot) != job.code[plot]:
            return (
                f"tutorials/{job.name}.py was edited while {plot} was "
                "measured, so it is not kept"
            )
        measured["environment"]["checks_passed"] = job.checks
        done = recording.sealed({"code": job.code[plot]} | measured)
        if problem := recording.benchmark_problem(done, self.gpu):
            return f"tutorials/{job.name}.py: {plot} is not kept: {problem}"
        old = self.read(job.name)[0] | {plot: done}
        # In the order of the script; what it no longer has goes.
        benchmarks = {name: old[name] for name in job.code if name in old}
        path = recording.path_of(self.gpu, job.name, self.store)
        try:
            recording.save(
                {"benchmarks": benchmarks}, self.gpu, job.name, self.store
            )
        except OSError as error:
            raise RefusedError(
                f"{path} cannot be written ({error.strerror}), so the "
                "measuring stopped; all files are whole, without what was "
                "not written; make room and run it again"
            ) from None
        return None
