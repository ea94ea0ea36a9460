"""Measure tutorials on a GPU and write their recordings: ``make record``.

    python -m measurements.record [01 03-layer-norm-any-width ...]

Needs torch, triton, matplotlib, pandas and pytest, not Sphinx. First the GPU
checks of the tutorials run; if one fails, nothing is recorded. Then each
tutorial runs as it stands, with a progress bar under its benchmarks. A
recording is written when its tutorial has ended well, and never in part.
"""

import os
import runpy
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from pathlib import Path

from measurements import recording, replay


class RefusedError(Exception):
    """Why nothing is recorded, in one line."""


def main(names):
    try:
        scripts = recording.pick(names)
        require_gpu("make record")
        require_store()
        checked = {script: check(script) for script in scripts}
        for script in scripts:
            path = record(script, checked[script])
            print(f"wrote {path.relative_to(recording.ROOT)}")
    except (RefusedError, recording.RecordingError) as error:
        sys.exit(f"make record: {error}")


def require_gpu(command):
    import torch

    if not torch.cuda.is_available():
        raise RefusedError(
            f"no GPU here; run {command} on a machine with a GPU "
            "(make html and make test need none)"
        )


def require_store():
    """Find out before an hour of measuring that nothing can be written."""
    import torch

    folder = recording.STORE / recording.slug(torch.cuda.get_device_name())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise RefusedError(
            f"{folder} cannot be written ({error.strerror}); "
            "make it writable, then run make record again"
        ) from None


def check(script):
    """Run the GPU checks of a tutorial; the number that passed."""
    tests = recording.ROOT / "tests" / "gpu"
    mine = sorted(tests.glob(f"test_{script.stem[:2]}_*.py"))
    if not mine:
        raise RefusedError(
            f"tutorials/{script.name} has no checks in tests/gpu"
        )
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", *map(str, mine)]
        failed = subprocess.run(
            [*command, f"--junitxml={report}"], cwd=recording.ROOT
        ).returncode
        if failed:
            raise RefusedError(
                f"a GPU check of tutorials/{script.name} failed; nothing was "
                "recorded (run make test-gpu to see it again)"
            )
        suite = ET.parse(report).getroot().find("testsuite")
    counts = {
        name: int(suite.get(name))
        for name in ("tests", "failures", "errors", "skipped")
    }
    return counts["tests"] - sum(list(counts.values())[1:])


def record(script, checks_passed):
    """Run one tutorial and write what its benchmarks measured."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    name = recording.name_of(script)
    recorder = Recorder(name, checks_passed)
    home = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # what a tutorial may leave behind stays here
        try:
            with replay.replaced(recorder):
                runpy.run_path(str(script), run_name="__main__")
        except Exception as error:
            raise RefusedError(
                f"tutorials/{script.name} stopped with "
                f"{type(error).__name__}: {error}; nothing was written"
            ) from error
        finally:
            os.chdir(home)
            plt.close("all")
    if not recorder.benchmarks:
        raise RefusedError(
            f"tutorials/{script.name} has no benchmark to record"
        )
    data = {"benchmarks": recorder.benchmarks}
    return recording.save(data, recorder.gpu, name)


class Recorder:
    """Stands for Mark._run while a tutorial is recorded."""

    def __init__(self, name, checks_passed):
        self.name = name
        # Before anything is measured: of the text that is about to run.
        self.codes = recording.codes(name)
        self.environment = recording.environment(checks_passed)
        self.gpu = recording.slug(self.environment["gpu"])
        self.benchmarks = {}

    def __call__(
        self, original, mark, bench, save_path, show, print_data, **kwargs
    ):
        name = bench.plot_name
        where = f"tutorials/{self.name}.py: benchmark {name}"
        if name in self.benchmarks or name not in self.codes:
            known = ", ".join(self.codes.keys() - self.benchmarks.keys())
            raise recording.RecordingError(
                f"{where}: found it run, expected one of those left: {known}"
            )
        rows = []
        total = len(bench.x_vals) * len(bench.line_vals)
        progress = Progress(f"{self.name}: {name}", total)
        measure = progress.over(replay.keeping(mark.fn, bench, rows), bench)
        with replay.measuring_with(mark, measure):
            table = original(mark, bench, "", False, print_data, **kwargs)
        stored = recording.sealed(
            {"code": self.codes[name], "environment": self.environment}
            | replay.described(mark, bench)
            | {"rows": rows}
        )
        if problem := recording.benchmark_problem(stored, self.gpu):
            raise recording.RecordingError(f"{where}: {problem}")
        self.benchmarks[name] = stored
        return table


class Progress:
    """What is being measured, and how much is left."""

    def __init__(self, name, total):
        self.name, self.total, self.done = name, total, 0
        self.start = time.monotonic()

    def over(self, measure, bench):
        def measured(**values):
            what = " ".join(
                str(values[n]) for n in (*bench.x_names, bench.line_arg)
            )
            self.show(what)
            result = measure(**values)
            self.done += 1
            if self.done == self.total:
                self.show("", end="\n")
            return result

        return measured

    def show(self, what, end=""):
        filled = 24 * self.done // self.total
        bar = "#" * filled + "." * (24 - filled)
        spent = time.monotonic() - self.start
        left = spent / self.done * (self.total - self.done) if self.done else 0
        text = (
            f"{self.name} [{bar}] {self.done}/{self.total} "
            f"{left:3.0f} s left  {what}"
        )
        if sys.stderr.isatty():
            print(f"\r{text:<100}", end=end, file=sys.stderr, flush=True)
        elif self.done in (0, self.total) or self.done % 20 == 0:
            print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
