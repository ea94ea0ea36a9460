"""Recordings: what a GPU measured for a tutorial, as a file in the repository.

``docs/measurements/<gpu>/<tutorial>.json`` holds the numbers behind every
measured figure of a tutorial. Each benchmark in it stands alone: its numbers,
the environment they were measured in, a hash of the code that was measured,
and a digest of all that. This module reads, checks and writes these files. It
needs neither Sphinx nor a GPU.

A tutorial's name is its path below ``tutorials/`` without ``.py``:
``06-rms-norm``, or ``layer-norm/01-layer-norm`` in the folder of a section.
"""

import hashlib
import json
import math
import os
import platform
import re
import tempfile
import time
from pathlib import Path

import tutorial
from measurements import benchmarks
from tutorial import ROOT

STORE = ROOT / "docs" / "measurements"

# The units a benchmark may have (what its ylabel says), and their numbers.
POSITIVE = (math.ulp(0), math.inf)
UNITS = {
    "GB/s": POSITIVE,
    "% of copy": POSITIVE,
    "µs": POSITIVE,
    "relative error": (0, math.inf),
    "wrong runs of 100": (0, 100),
    "different results of 100": (0, 100),
    # What ncu counts. It may find both parts of a percentage in different
    # runs of a kernel, so a little more than all is no damage.
    "MB of DRAM": (0, math.inf),
    "GB of memory": POSITIVE,
    "bytes of DRAM per byte counted": (0, math.inf),
    "bytes of L2 per byte counted": (0, math.inf),
    "% of L2 requests hit": (0, 101),
    "% of warps": (0, 101),
    "load requests per row": (0, math.inf),
}
# What each benchmark of a recording says.
KEYS = {
    "code": str,
    "environment": dict,
    "unit": str,
    "args": dict,
    "method": str,
    "x_names": list,
    "rows": list,
    "digest": str,
}
ENVIRONMENT = (
    *("gpu", "driver", "cuda", "torch", "triton", "python"),
    *("date", "checks_passed"),
)
# What it says as well if several GPUs are measured together.
SEVERAL = ("gpus", "link", "nccl")
VALUES = ("median", "low", "high")


class RecordingError(Exception):
    """A recording is missing, damaged or does not fit; one line says why."""


def path_of(gpu, name, store=None):
    return (store or STORE) / gpu / f"{name}.json"


def number(name):
    """What is enough to name a tutorial: ``01`` or ``layer-norm/01``."""
    return re.sub(r"(\d\d)-[^/]*$", r"\1", name)


def pick(asked):
    """The tutorials meant by ``01``, ``03-lock``, ``layer-norm/01``, or
    ``layer-norm``, a section; all of them if nothing is asked for."""
    scripts = tutorial.scripts()
    means = {}
    for script in scripts:
        name = tutorial.name_of(script)
        section, _, stem = name.rpartition("/")
        for key in {name, number(name), stem, stem[:2], section} - {""}:
            means.setdefault(key, []).append(script)
    picked = {}
    for key in asked:
        found = means.get(key.strip("/").removesuffix(".py"), [])
        names = ", ".join(
            tutorial.name_of(script) for script in found or scripts
        )
        if not found:
            raise RecordingError(f"no tutorial {key!r}; there are: {names}")
        if len(found) > 1 and key[:2].isdigit():
            raise RecordingError(f"{key!r} means several tutorials: {names}")
        picked |= dict.fromkeys(found)
    return list(picked) or scripts


def slug(gpu):
    """``NVIDIA H200`` -> ``nvidia-h200``, the name of a folder."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")


def gpus(name):
    """The folders that hold a recording of a tutorial."""
    folders = sorted(p.name for p in STORE.glob("*/"))
    return [gpu for gpu in folders if path_of(gpu, name).exists()]


def mend(name):
    """The commands that bring a recording in order."""
    return (
        f"on a GPU run: make record TUTORIALS={number(name)} "
        "(to build without its figures: make preview)"
    )


def codes(name):
    """{benchmark: hash of the code it measures} of a tutorial as it stands."""
    try:
        return benchmarks.hashes(tutorial.script_of(name))
    except (benchmarks.UnclearError, SyntaxError) as error:
        raise RecordingError(f"tutorials/{name}.py: {error}") from None


def load(gpu, name, store=None):
    """A recording that is whole and fits the tutorial's code."""
    data = read(gpu, name, store)
    if problems := stale(data, name):
        raise RecordingError(
            f"{_where(gpu, name)} is stale: {'; '.join(problems.values())}; "
            f"{mend(name)}"
        )
    return data


def stale(data, name):
    """{benchmark: why} of what has to be measured again, or for once."""
    recorded, now = data["benchmarks"], codes(name)
    problems = {}
    for plot, code in now.items():
        if plot not in recorded:
            problems[plot] = f"benchmark {plot} is not in it"
        elif recorded[plot]["code"] != code:
            problems[plot] = (
                f"the code of benchmark {plot} has changed since (hash found "
                f"{recorded[plot]['code']}, expected {code})"
            )
    for plot in recorded.keys() - now.keys():
        problems[plot] = f"the tutorial has no benchmark {plot}"
    return problems


def read(gpu, name, store=None):
    """A recording that is whole, whether or not it fits the code."""
    where = _where(gpu, name)
    try:
        data = json.loads(
            path_of(gpu, name, store).read_text(encoding="utf-8")
        )
    except FileNotFoundError:
        raise RecordingError(f"{where} is missing; {mend(name)}") from None
    except (ValueError, OSError) as error:
        raise RecordingError(
            f"{where} cannot be read ({error}); {mend(name)}"
        ) from None
    if problem := _problem(data, gpu):
        raise RecordingError(f"{where} is damaged: {problem}; {mend(name)}")
    return data


def _where(gpu, name):
    return f"tutorials/{name}.py: the recording {gpu}/{name}.json"


def _problem(data, gpu):
    """What is wrong with the contents of a recording, or None."""
    if not isinstance(data, dict):
        return _differs("it", type(data).__name__, "an object")
    if not isinstance(data.get("benchmarks"), dict):
        return _differs("benchmarks", "none", "an object")
    for name, benchmark in data["benchmarks"].items():
        if problem := benchmark_problem(benchmark, gpu):
            return f"benchmark {name}: {problem}"
    return None


def _differs(place, found, expected):
    return f"{place}: found {found}, expected {expected}"


def benchmark_problem(benchmark, gpu):
    """What is wrong with one recorded benchmark, or None."""
    if not isinstance(benchmark, dict):
        return _differs("it", benchmark, "an object")
    for key, kind in KEYS.items():
        found = benchmark.get(key)
        if not isinstance(found, kind) or not (found or key == "args"):
            return _differs(key, found, f"a filled {kind.__name__}")
    environment = benchmark["environment"]
    for key in ENVIRONMENT:
        if environment.get(key) in (None, ""):
            return _differs(f"environment, {key}", "nothing", "what it was")
    if slug(environment["gpu"]) != gpu:
        return _differs(
            "environment, gpu",
            f"{environment['gpu']} in the folder {gpu}",
            f"the folder {slug(environment['gpu'])}",
        )
    if benchmark["unit"] not in UNITS:
        units = ", ".join(UNITS)
        return _differs("unit", repr(benchmark["unit"]), f"one of {units}")
    return (
        _counter_problem(benchmark)
        or _rows_problem(benchmark)
        or _ranks_problem(benchmark)
        or _digest_problem(benchmark)
    )


def _counter_problem(benchmark):
    """What is wrong with how a benchmark was counted, if ncu counts for it.

    Where it could not, it has a reason in place of numbers; what the script
    counted by hand is there all the same.
    """
    counted = "counter" in benchmark["args"]
    if counted and not benchmark["environment"].get("ncu"):
        return _differs("environment, ncu", "nothing", "what it was")
    if "reason" not in benchmark:
        return None
    reason = benchmark["reason"]
    if not counted or not isinstance(reason, str) or not reason:
        return _differs("reason", repr(reason), "why ncu counted nothing")
    return None


def ranks(benchmark):
    """How many GPUs gave the numbers of a benchmark together, or None.

    Against the number of ranks it is measured on as many as a machine has.
    """
    if "ranks" not in benchmark["x_names"]:
        return benchmark["args"].get("ranks")
    rows = benchmark["rows"]
    measured = (row["ranks"] for row in rows if row["median"] is not None)
    return max(measured, default=None)


def _ranks_problem(benchmark):
    """What is missing of GPUs that a benchmark has together."""
    if not (together := ranks(benchmark)):
        return None
    for key in SEVERAL:
        if not benchmark["environment"].get(key):
            return _differs(f"environment, {key}", "nothing", "what it was")
    there = benchmark["environment"]["gpus"]
    if len(there) != together:
        return _differs("environment, gpus", there, f"{together} of them")
    return None


def _rows_problem(benchmark):
    names = {*benchmark["x_names"], "provider", *VALUES}
    seen = set()
    for i, row in enumerate(benchmark["rows"], start=1):
        place = f"row {i}"
        if not isinstance(row, dict) or row.keys() != names:
            return _differs(place, row, f"the keys {', '.join(sorted(names))}")
        key = x_of(row, benchmark["x_names"]), row["provider"]
        if key in seen:
            return _differs(place, f"{key} again", "each size once")
        seen.add(key)
        if problem := _values_problem(row, benchmark["unit"]):
            return f"{place} {key}: {problem}"
    xs, providers = grid(benchmark)
    for key in ((x, provider) for x in xs for provider in providers):
        if key not in seen:
            return _differs("rows", f"nothing for {key}", "a measurement")
    return None


def _values_problem(row, unit):
    values = [row[key] for key in VALUES]
    if values == [None] * 3:  # this provider cannot do this size
        return None
    least, most = UNITS[unit]
    more_than = "0 or more" if least == 0 else "more than 0"
    for key, value in zip(VALUES, values, strict=True):
        number = isinstance(value, int | float) and not isinstance(value, bool)
        # not a number, infinite and too low or high fail alike
        if not number or not least <= value <= most or math.isinf(value):
            return _differs(
                key,
                value,
                f"a finite number, {more_than}"
                + (f", at most {most}" if most < math.inf else ""),
            )
    median, low, high = values
    if not low <= median <= high:
        return _differs(
            "low, median, high", f"{low}, {median}, {high}", "this order"
        )
    return None


def _digest_problem(benchmark):
    if benchmark["digest"] == digest(benchmark):
        return None
    return _differs(
        "digest", benchmark["digest"], f"{digest(benchmark)} for these numbers"
    )


def digest(benchmark):
    """A hash of all that a benchmark says: numbers edited later do not fit.

    That finds accidents. Whoever means to forge can compute it anew.
    """
    rest = {key: value for key, value in benchmark.items() if key != "digest"}
    text = json.dumps(
        rest, sort_keys=True, ensure_ascii=False, separators=(",", ":")
    )
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def sealed(benchmark):
    """A benchmark with its digest, as a recording holds it."""
    return benchmark | {"digest": digest(benchmark)}


def x_of(row, x_names):
    return tuple(row[name] for name in x_names)


def grid(benchmark):
    """The sizes and the providers of a recorded benchmark, in their order."""
    rows = benchmark["rows"]
    xs = dict.fromkeys(x_of(row, benchmark["x_names"]) for row in rows)
    return list(xs), list(dict.fromkeys(row["provider"] for row in rows))


def save(data, gpu, name, store=None):
    """Write a recording; an interrupted write leaves the old file whole."""
    path = path_of(gpu, name, store)
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


def environment(checks_passed):
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
