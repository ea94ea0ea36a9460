"""What a recording says of a page in a line: its speed over a rival's.

At one size: the one in the middle of those that all its figures have, so that
nobody chooses it. Everything is computed from the recording.
"""

from dataclasses import dataclass

from measurements import recording
from words_later import N_

# How many times as fast, from numbers of these units.
FASTER = {
    "GB/s": lambda ours, theirs: ours / theirs,
    "µs": lambda ours, theirs: theirs / ours,
}
PASSES = {
    "forward": N_("Forward"),
    "backward": N_("Backward"),
    "forward and backward": N_("Forward and backward"),
}
OURS = "triton"
# The first that a page is compared with, and its name.
RIVALS = {"torch": "PyTorch", "rows": N_("PyTorch on gathered rows")}


@dataclass
class Headline:
    where: list  # sizes, types and GPU
    date: str
    speeds: dict  # {pass: our speed over the rival's}
    rival: str


def compares(unit, rows, theirs="torch"):
    """Whether a benchmark compares the speed of a page with a rival's."""
    providers = {row["provider"] for row in rows}
    return unit in FASTER and {OURS, theirs} <= providers


def of(data):
    """The headline of a recording, or None."""
    compared = {theirs: _passes(data, theirs) for theirs in RIVALS}
    theirs = next((each for each in compared if compared[each]), None)
    if theirs is None:
        return None
    found = compared[theirs]
    sizes = _sizes(found, theirs)
    if not sizes:
        return None
    size = sizes[len(sizes) // 2]
    first = next(iter(found.values()))
    environment = recording.environment_of(data, first)
    names = zip(first["x_names"], size, strict=True)
    words = (f"{name} = {value}" for name, value in names)
    return Headline(
        [*words, *said(_rest(first)), environment["gpu"]],
        environment["date"],
        {mode: _faster(each, size, theirs) for mode, each in found.items()},
        RIVALS[theirs],
    )


def said(args):
    """The arguments of a benchmark in words, e.g. M = 4096, float16."""
    for name, value in args.items():
        yield str(value) if name == "dtype" else f"{name} = {value}"


def _passes(data, theirs):
    """{pass: the first benchmark that compares it with a rival}.

    What follows the first differs from it in nothing but the pass.
    """
    found = {}
    for benchmark in data["benchmarks"].values():
        mode = benchmark["args"].get("mode")
        if (
            mode in PASSES
            and compares(benchmark["unit"], benchmark["rows"], theirs)
            and all(_alike(benchmark, other) for other in found.values())
        ):
            found.setdefault(mode, benchmark)
    return {mode: found[mode] for mode in PASSES if mode in found}


def _alike(one, other):
    keys = "unit", "x_names"
    return all(one[key] == other[key] for key in keys) and (
        _rest(one) == _rest(other)
    )


def _rest(benchmark):
    args = benchmark["args"].items()
    return {name: value for name, value in args if name != "mode"}


def _medians(benchmark, provider):
    """{x: median} of what a provider could do."""
    return {
        recording.x_of(row, benchmark["x_names"]): row["median"]
        for row in benchmark["rows"]
        if row["provider"] == provider and row["median"]
    }


def _sizes(found, theirs):
    """The sizes that all benchmarks have of ours and of the rival."""
    tables = [
        _medians(benchmark, provider)
        for benchmark in found.values()
        for provider in (OURS, theirs)
    ]
    return [x for x in tables[0] if all(x in table for table in tables)]


def _faster(benchmark, size, theirs):
    faster = FASTER[benchmark["unit"]]
    return faster(
        *(_medians(benchmark, each)[size] for each in (OURS, theirs))
    )
