"""Recordings: what a GPU measured for a page, as a file in the repository.

``docs/measurements/<gpu>/<page>.json`` holds the numbers behind every measured
figure of a page: one hash of the page's code, the environment in which it was
measured, its benchmarks, and one digest of all that. A benchmark says of the
environment only what concerns it alone: ncu, if that counted, or the GPUs that
it had together. This module reads, checks and writes these files. It needs
neither Sphinx nor a GPU.

A page's name is its path below ``tutorials/`` without ``.py``:
``layer-norm/01-layer-norm``.
"""

import datetime
import hashlib
import json
import math
import os
import re
import sys
import tempfile
import tokenize

import tutorial
from measurements import code_hash
from tutorial import ROOT

STORE = ROOT / "docs" / "measurements"
# What a build on a GPU measured, see measurements.record.
BY_BUILD = ROOT / "docs" / "_build" / "measurements"

# The units a benchmark may have (what its ylabel says), and their numbers.
POSITIVE = (math.ulp(0), math.inf)
UNITS = {
    "GB/s": POSITIVE,
    "TFLOP/s": POSITIVE,
    "% of copy": POSITIVE,
    "µs": POSITIVE,
    "relative error": (0, math.inf),
    "nats per token": (0, math.inf),
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
    "% of peak": (0, 101),
    "stalled warps per instruction": (0, math.inf),
    "load requests per row": (0, math.inf),
    # Of the compiled kernel.
    "bytes spilled per thread": (0, math.inf),
    "kernels": POSITIVE,  # that run on the device in a call
}
PAGE = {"code": str, "environment": dict, "benchmarks": dict, "digest": str}
BENCHMARK = {
    "unit": str,
    "args": dict,
    "method": str,
    "x_names": list,
    "rows": list,
}
# What is in one only where there is something to say.
OPTIONAL = {"environment": dict, "reason": str}
# What the environment of each benchmark says, its page's and its own together.
ENVIRONMENT = (
    *("gpu", "driver", "cuda", "torch", "triton", "python"),
    *("date", "checks_passed"),
)
SEVERAL = ("gpus", "link", "nccl")  # if it has several GPUs
VALUES = ("median", "low", "high")


class RecordingError(Exception):
    """A recording is missing, damaged or does not fit; one line says why."""


def path_of(gpu, name, store=None):
    return (store or STORE) / gpu / f"{name}.json"


def slug(gpu):
    """``NVIDIA H200`` -> ``nvidia-h200``, the name of a folder."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")


def gpus(name, first=""):
    """The folders that hold a recording of a page; one of them first."""
    folders = sorted(
        (folder.name for folder in STORE.glob("*/")),
        key=lambda gpu: (gpu != first, gpu),
    )
    return [gpu for gpu in folders if path_of(gpu, name).exists()]


def number(name):
    """What is enough to name a page: ``layer-norm/01``."""
    return re.sub(r"(\d\d)-[^/]*$", r"\1", name)


def mend(name):
    """The commands that bring a recording in order."""
    run = f"on a GPU run: make record TUTORIALS={number(name)}"
    if os.environ.get("FIGURES") == "preview":
        return run
    return f"{run} (to build without its figures: make preview)"


def where(gpu, name):
    return f"tutorials/{name}.py: the recording {gpu}/{name}.json"


# Reading ---------------------------------------------------------------------


def load(gpu, name, store=None):
    """A recording that is whole and fits the page's code."""
    data = read(gpu, name, store)
    now = code_of(name)
    if data["code"] != now:
        raise RecordingError(
            f"{where(gpu, name)} is stale: the code of the page has changed "
            f"since (hash found {data['code']}, expected {now}); {mend(name)}"
        )
    return data


def code_of(name):
    """The hash of a page's code as it stands."""
    try:
        return code_hash.of(tutorial.script_of(name))
    except (SyntaxError, tokenize.TokenError, ValueError) as error:
        raise RecordingError(f"tutorials/{name}.py: {error}") from None


def read(gpu, name, store=None):
    """A recording that is whole, whether or not it fits the code."""
    try:
        data = json.loads(
            path_of(gpu, name, store).read_text(encoding="utf-8"),
            object_pairs_hook=_each_once,
        )
    except FileNotFoundError:
        raise RecordingError(
            f"{where(gpu, name)} is missing; {mend(name)}"
        ) from None
    except (ValueError, OSError, RecursionError) as error:
        raise RecordingError(
            f"{where(gpu, name)} cannot be read ({error}); {mend(name)}"
        ) from None
    if found := problem(data, gpu):
        raise RecordingError(
            f"{where(gpu, name)} is damaged: {found}; {mend(name)}"
        )
    return data


def _each_once(pairs):
    """An object of JSON, in which no key may stand twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"found {twice!r} twice, expected each key once")
    return found


def environment_of(data, benchmark):
    """In what a benchmark was measured: its page's environment, its own."""
    return data["environment"] | benchmark.get("environment", {})


# What is wrong with one ------------------------------------------------------


def problem(data, gpu):
    """What is wrong with the contents of a recording, or None."""
    if found := _keys_problem(data, PAGE):
        return found
    for plot, benchmark in data["benchmarks"].items():
        if found := _benchmark_problem(data, benchmark, gpu):
            return f"benchmark {plot}: {found}"
    if data["digest"] != digest(data):
        return _differs("digest", data["digest"], f"{digest(data)} for these")
    return None


def _differs(place, found, expected):
    return f"{place}: found {found}, expected {expected}"


def _keys_problem(found, keys, optional=()):
    if not isinstance(found, dict):
        return _differs("it", found, "an object")
    for key, kind in keys.items():
        value = found.get(key)
        if not isinstance(value, kind) or not (value or key == "args"):
            return _differs(key, value, f"a filled {kind.__name__}")
    for key in found.keys() - keys.keys() - set(optional):
        return _differs("it", f"the key {key}", "none but those that are used")
    return None


def _benchmark_problem(data, benchmark, gpu):
    if found := _keys_problem(benchmark, BENCHMARK, OPTIONAL):
        return found
    own = benchmark.get("environment", {})
    if not isinstance(own, dict) or own.keys() & data["environment"].keys():
        return _differs("environment", own, "what the page's does not say")
    if benchmark["unit"] not in UNITS:
        units = ", ".join(UNITS)
        return _differs("unit", repr(benchmark["unit"]), f"one of {units}")
    environment = environment_of(data, benchmark)
    return (
        _environment_problem(environment, gpu)
        or _counter_problem(benchmark, environment)
        or _rows_problem(benchmark)
        or _ranks_problem(benchmark, environment)
    )


def _environment_problem(environment, gpu):
    for key in ENVIRONMENT:
        if environment.get(key) in (None, ""):
            return _differs(f"environment, {key}", "nothing", "what it was")
    for key, value in environment.items():
        each = [value]
        if key == "gpus" and isinstance(value, list):
            each = value
        if key == "libraries":
            its = isinstance(value, dict)
            each = [*value, *value.values()] if its else [None]
        count = isinstance(value, int) and value >= 0
        if key == "checks_passed" and count and value is not True:
            continue
        if not all(isinstance(v, str) and v.isprintable() for v in each):
            return _differs(f"environment, {key}", repr(value), "a line")
    try:
        datetime.date.fromisoformat(environment["date"])
    except ValueError:
        return _differs("environment, date", environment["date"], "a day")
    if slug(environment["gpu"]) != gpu:
        return _differs(
            "environment, gpu",
            f"{environment['gpu']} in the folder {gpu}",
            f"the folder {slug(environment['gpu'])}",
        )
    return None


def _counter_problem(benchmark, environment):
    """What is wrong with how a benchmark was counted, if ncu counts for it.

    Where it could not, it has a reason in place of numbers; what the script
    counted by hand is there all the same.
    """
    counted = "counter" in benchmark["args"]
    if counted and not environment.get("ncu"):
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


def _ranks_problem(benchmark, environment):
    """What is missing of GPUs that a benchmark has together."""
    if not (together := ranks(benchmark)):
        return None
    for key in SEVERAL:
        if not environment.get(key):
            return _differs(f"environment, {key}", "nothing", "what it was")
    there = environment["gpus"]
    if there != together * [environment["gpu"]]:
        expected = f"{together} of {environment['gpu']}"
        return _differs("environment, gpus", there, expected)
    return None


def _rows_problem(benchmark):
    names = {*benchmark["x_names"], "provider", *VALUES}
    seen = set()
    for i, row in enumerate(benchmark["rows"], start=1):
        place = f"row {i}"
        if not isinstance(row, dict) or row.keys() != names:
            return _differs(place, row, f"the keys {', '.join(sorted(names))}")
        key = x_of(row, benchmark["x_names"]), row["provider"]
        for name in (*benchmark["x_names"], "provider"):
            if not isinstance(row[name], str) and not _finite(row[name]):
                return _differs(f"{place}, {name}", row[name], "a plain value")
        if key in seen:
            return _differs(place, f"{key} again", "each size once")
        seen.add(key)
        if found := _values_problem(row, benchmark["unit"]):
            return f"{place} {key}: {found}"
    xs, providers = grid(benchmark)
    for key in ((x, provider) for x in xs for provider in providers):
        if key not in seen:
            return _differs("rows", f"nothing for {key}", "a measurement")
    return None


def _finite(value):
    most = sys.float_info.max  # of whole numbers, too
    return isinstance(value, int | float) and abs(value) <= most


def _values_problem(row, unit):
    values = [row[key] for key in VALUES]
    if values == [None] * 3:  # this provider cannot do this size
        return None
    least, most = UNITS[unit]
    expected = f"a finite number, {'0 or more' if least == 0 else 'above 0'}"
    expected += f", at most {most}" if most < math.inf else ""
    for key, value in zip(VALUES, values, strict=True):
        number = _finite(value) and not isinstance(value, bool)
        if not number or not least <= value <= most:
            return _differs(key, value, expected)
    median, low, high = values
    if not low <= median <= high:
        return _differs(
            "low, median, high", f"{low}, {median}, {high}", "this order"
        )
    return None


def digest(data):
    """A hash of all that a recording says: numbers edited later do not fit.

    That finds accidents. Whoever means to forge can compute it anew.
    """
    rest = {key: value for key, value in data.items() if key != "digest"}
    text = json.dumps(
        rest, sort_keys=True, ensure_ascii=False, separators=(",", ":")
    )
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def x_of(row, x_names):
    return tuple(row[name] for name in x_names)


def grid(benchmark):
    """The sizes and the providers of a recorded benchmark, in their order."""
    rows = benchmark["rows"]
    xs = dict.fromkeys(x_of(row, benchmark["x_names"]) for row in rows)
    return list(xs), list(dict.fromkeys(row["provider"] for row in rows))


# Writing ---------------------------------------------------------------------


def sealed(data):
    """A recording with its digest."""
    return data | {"digest": digest(data)}


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
