"""Which pages are to be measured, and why; where they are kept when done."""

import tempfile
from contextlib import suppress

import tutorial
from measurements import counters, environment, gpus, recording
from measurements.measure import Page, RefusedError

# What has to be the same for numbers to count as those of this machine.
MACHINE = ("gpu", "driver", "cuda", "torch", "triton", "python")


def pick(asked):
    """The pages meant by ``01``, ``03-lock``, ``layer-norm/01``, or
    ``layer-norm``, a section; all of them if nothing is asked for."""
    scripts = tutorial.scripts()
    means = {}
    for script in scripts:
        name = tutorial.name_of(script)
        section, _, stem = name.rpartition("/")
        keys = {name, recording.number(name), stem, stem[:2], section}
        for key in keys - {""}:
            means.setdefault(key, []).append(script)
    picked = {}
    for key in asked:
        found = means.get(key.strip("/").removesuffix(".py"), [])
        names = ", ".join(map(tutorial.name_of, found or scripts))
        if not found:
            raise RefusedError(f"no tutorial {key!r}; there are: {names}")
        if len(found) > 1 and key[:2].isdigit():
            raise RefusedError(f"{key!r} means several tutorials: {names}")
        picked |= dict.fromkeys(found)
    return list(picked) or scripts


class Kept:
    """The recordings of this machine's GPU in a folder."""

    def __init__(self, store):
        self.store = store
        self.machine = environment.here("not run")
        self.gpu = recording.slug(self.machine["gpu"])

    def pages(self, scripts, every=False, same_machine=False):
        """What has to be measured.

        With same_machine, numbers of another driver or compiler are stale.
        """
        found = []
        for script in scripts:
            name = tutorial.name_of(script)
            code = recording.code_of(name)
            why = self.why(name, code, same_machine)
            if every and not why:
                why = "all are asked for"
            if why:
                page = Page(name, script, why, code)
                page.gpus = gpus.needed(script)
                page.points = expected_points(name)
                found.append(page)
        return found

    def why(self, name, code, same_machine):
        """Why a page has to be measured, or None."""
        if not recording.path_of(self.gpu, name, self.store).exists():
            return "not measured yet"
        try:
            data = recording.read(self.gpu, name, self.store)
        except recording.RecordingError as error:
            return f"the recording is not whole: {error}"
        if data["code"] != code:
            return "its code has changed"
        for plot, benchmark in data["benchmarks"].items():
            then = recording.environment_of(data, benchmark)
            now = self.machine | {"ncu": counters.version()}
            if same_machine:
                keys = [key for key in (*MACHINE, "ncu") if key in then]
            elif "reason" in benchmark and now["ncu"] != counters.ABSENT:
                return f"{plot} was not counted: {benchmark['reason']}"
            else:
                keys = []
            for key in keys:
                if then[key] != now[key]:
                    return f"{key} was {then[key]}, is {now[key]}"
        return None

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

    def keep(self, page, machine, benchmarks):
        """Write what was measured of a page; why not, or None."""
        where = f"tutorials/{page.name}.py"
        try:
            now = recording.code_of(page.name)
        except recording.RecordingError as error:
            now = error
        if now != page.code:
            return f"{where} was edited while it was measured: it is not kept"
        data = {"code": page.code, "environment": machine}
        data = recording.sealed(data | {"benchmarks": benchmarks})
        if problem := recording.problem(data, self.gpu):
            return f"{where} is not kept: {problem}"
        path = recording.path_of(self.gpu, page.name, self.store)
        try:
            recording.save(data, self.gpu, page.name, self.store)
        except OSError as error:
            raise RefusedError(
                f"{path} cannot be written ({error.strerror}), so the "
                "measuring stopped; all files are whole, without what was "
                "not written; make room and run it again"
            ) from None
        return None


def with_enough_gpus(pages):
    """The pages that this machine has enough GPUs for; of the others a
    sentence each."""
    here = gpus.count()
    return [page for page in pages if page.gpus <= here], [
        f"tutorials/{page.name}.py is measured on {page.gpus} GPUs, and here "
        f"{'is' if here == 1 else 'are'} {here}: it was left out"
        for page in pages
        if page.gpus > here
    ]


def expected_points(name):
    """How many points a page has, as far as a recording of it tells."""
    for gpu in recording.gpus(name):
        with suppress(recording.RecordingError):
            its = recording.read(gpu, name)["benchmarks"].items()
            return {plot: len(benchmark["rows"]) for plot, benchmark in its}
    return {"": 50}
