"""Recordings: what a GPU measured for a tutorial, as a file in the repository.

``docs/measurements/<gpu>/<tutorial>.json`` holds the numbers behind every
measured figure of a tutorial, with the environment they were measured in and
a hash of the code that was measured. This module reads, checks and writes
these files. It needs neither Sphinx nor a GPU.
"""

import ast
import hashlib
import io
import json
import math
import os
import platform
import re
import tempfile
import time
import tokenize
from pathlib import Path

import tutorial
from tutorial import ROOT, TUTORIALS

STORE = ROOT / "docs" / "measurements"

# The units a benchmark may have: what its ylabel says.
UNITS = (
    *("GB/s", "% of copy", "µs", "relative error"),
    *("wrong runs of 100", "different results of 100"),
)
ENVIRONMENT = (
    *("gpu", "driver", "cuda", "torch", "triton", "python"),
    *("date", "method", "checks_passed"),
)
VALUES = ("median", "low", "high")


class RecordingError(Exception):
    """A recording is missing, damaged or does not fit; one line says why."""


def tutorials():
    """The tutorials, in order."""
    return tutorial.scripts()


def pick(names):
    """The tutorials that names such as ``01`` or ``01-layer-norm`` mean."""
    known = {p.stem[:2]: p for p in tutorials() if p.parent == TUTORIALS}
    known |= {tutorial.name_of(p): p for p in tutorials()}
    for name in names:
        if name not in known:
            stems = ", ".join(map(tutorial.name_of, tutorials()))
            raise RecordingError(f"no tutorial {name!r}; there are: {stems}")
    return [known[name] for name in names] or tutorials()


def code_hash(path):
    """Hash the code of a script: not its comments, docstrings, blank lines.

    The text is hashed rather than a syntax tree, whose form differs between
    versions of Python.
    """
    source = Path(path).read_text(encoding="utf-8")
    lines = source.splitlines()
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    for token in tokens:
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    documented = (
        ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    )
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, documented) and ast.get_docstring(node):
            text = node.body[0]
            for row in range(text.lineno - 1, text.end_lineno):
                lines[row] = ""
    code = "\n".join(line.rstrip() for line in lines if line.strip())
    return hashlib.sha256(code.encode()).hexdigest()[:16]


def slug(gpu):
    """``NVIDIA H200`` -> ``nvidia-h200``, the name of a folder."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")


def gpus(stem):
    """The folders that hold a recording of a tutorial."""
    files = STORE.glob(f"*/{stem}.json")
    return sorted(p.relative_to(STORE).parts[0] for p in files)


def short(stem):
    """What names a tutorial on the command line."""
    return stem if "/" in stem else stem[:2]


def mend(stem):
    """The commands that bring a recording in order."""
    return (
        f"on a GPU run: make record TUTORIALS={short(stem)} "
        "(to build without its figures: make preview)"
    )


def load(gpu, stem):
    """Read one recording and check that it is whole and fits the code."""
    path = STORE / gpu / f"{stem}.json"
    where = f"tutorials/{stem}.py: the recording {gpu}/{stem}.json"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RecordingError(f"{where} is missing; {mend(stem)}") from None
    except (ValueError, OSError) as error:
        raise RecordingError(
            f"{where} cannot be read ({error}); {mend(stem)}"
        ) from None
    if problem := _problem(data):
        raise RecordingError(f"{where} is damaged: {problem}; {mend(stem)}")
    if data["code"] != code_hash(TUTORIALS / f"{stem}.py"):
        raise RecordingError(
            f"{where} is stale: the tutorial's code has changed since; "
            f"{mend(stem)}"
        )
    return data


def _problem(data):
    """What is wrong with the contents of a recording, or None."""
    if not isinstance(data, dict):
        return "not an object"
    for key, kind in (("environment", dict), ("benchmarks", dict)):
        if not isinstance(data.get(key), kind):
            return f"no {key}"
    if not isinstance(data.get("code"), str):
        return "no hash of the code"
    for key in ENVIRONMENT:
        if data["environment"].get(key) in (None, ""):
            return f"the environment does not say its {key}"
    for name, benchmark in data["benchmarks"].items():
        if problem := benchmark_problem(benchmark):
            return f"benchmark {name}: {problem}"
    return None


def benchmark_problem(benchmark):
    """What is wrong with one recorded benchmark, or None."""
    if not isinstance(benchmark, dict):
        return "not an object"
    if benchmark.get("unit") not in UNITS:
        return f"unknown unit {benchmark.get('unit')!r}"
    if not isinstance(benchmark.get("args"), dict):
        return "no args"
    if not isinstance(benchmark.get("rows"), list) or not benchmark["rows"]:
        return "no rows"
    for row in benchmark["rows"]:
        if not isinstance(row, dict) or "provider" not in row:
            return f"a row without a provider: {row}"
        for key in VALUES:
            value = row.get(key, "nothing")
            # null: this provider cannot do this size
            if value is None:
                continue
            number = isinstance(value, int | float) and value == value
            if not number or isinstance(value, bool) or math.isinf(value):
                return f"{key} is {value!r} in row {row}"
    return None


def save(data, gpu, stem):
    """Write a recording; an interrupted write leaves the old file whole."""
    path = STORE / gpu / f"{stem}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, draft = tempfile.mkstemp(dir=path.parent, suffix=".draft")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(dump(data))
        os.chmod(draft, 0o644)
        os.replace(draft, path)
    except BaseException:
        os.unlink(draft)
        raise
    return path


def dump(data):
    """The text of a recording: one line a row, so that changes read well."""
    text = json.dumps(data, indent=1, ensure_ascii=False)
    row = re.compile(r'\{[^{}]*"provider"[^{}]*\}')
    return row.sub(lambda m: re.sub(r"\s*\n\s*", " ", m[0]), text) + "\n"


def plain(value):
    """A benchmark's argument as JSON can hold it."""
    if isinstance(value, str | int | float | bool) or value is None:
        return value
    return str(value).removeprefix("torch.")


def point(result):
    """What a measuring function returned, as median, low and high."""
    values = result if isinstance(result, tuple | list) else (result,) * 3
    median, low, high = (
        None if v is None or v != v else float(v) for v in values
    )
    return {"median": median, "low": low, "high": high}


def environment(method, checks_passed):
    """Where and how a measurement was made."""
    import torch
    import triton

    driver = "unknown"
    proc = Path("/proc/driver/nvidia/version")
    if proc.exists():
        found = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", proc.read_text())
        driver = found[0] if found else driver
    if driver == "unknown":
        driver = _nvidia_smi("driver_version") or driver
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": driver,
        "cuda": torch.version.cuda or f"ROCm {torch.version.hip}",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "method": method,
        "checks_passed": checks_passed,
    }


def _nvidia_smi(field):
    import subprocess

    try:
        return subprocess.run(
            ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=30,
        ).stdout.split("\n")[0]
    except (OSError, subprocess.TimeoutExpired):
        return None
