"""What a recording says of a page in a few lines: its speed over its rivals'.

Nobody chooses a size: of a pass it is the median over all sizes that were
measured. Of whole calls, which the host delays in small sizes and the device
in large ones, a median would say little: there it is one size, the same on
all pages. Everything is computed from the recording.
"""

import re
from dataclasses import dataclass
from statistics import median

import style
import words_later as words
from measurements import recording
from measurements.figure import FASTER
from words_later import N_, Said

PASSES = {
    "forward": N_("Forward"),
    "backward": N_("Backward"),
    "forward and backward": N_("Forward and backward"),
}
CALLS = {
    "forward": N_("Whole call, forward"),
    "backward": N_("Whole call, backward"),
    "forward and backward": N_("Whole call, both passes"),
}
OURS = "triton"
# The first that a page is compared with, and its name. Of PyTorch's ways to
# attend it is the one that PyTorch takes by itself.
FIRST = {
    "sdpa-cudnn": N_("cuDNN, by PyTorch"),
    "torch": "PyTorch",
    "rows": N_("PyTorch on gathered rows"),
}
# Whoever else is no design of ours, and no ceiling.
RIVALS = FIRST | style.RIVALS | {"dtensor": "DTensor"}
BEST = N_("the best rival")
# The arguments of benchmarks whose names are words.
ARGUMENTS = {
    "classes": N_("classes = %(value)s"),
    "features": N_("features = %(value)s"),
    "heads": N_("heads = %(value)s"),
    "layers": N_("layers = %(value)s"),
    "mode": N_("mode = %(value)s"),
    "ranks": N_("ranks = %(value)s"),
    "turns": N_("turns = %(value)s"),
}
# How a benchmark of whole calls says what it times.
WHOLE_CALLS = re.compile(r"(whole )?calls\b", re.IGNORECASE)
# The size of theirs that a headline names, if it was measured.
CALLED_AT = (4096,)


@dataclass
class Speed:
    """Our speed in a pass over that of others, as medians of some sizes."""

    mode: str
    over: list  # (name, how many times as fast)
    sizes: list


@dataclass
class Headline:
    passes: list  # the speed in each pass, on the device
    calls: list  # and that of whole calls
    called_at: list  # the size of these, and what else differs
    where: list  # sizes, types and GPU
    date: str


def compares(unit, rows):
    """Whether a benchmark compares the speed of a page with a rival's."""
    providers = {row["provider"] for row in rows}
    return unit in FASTER and OURS in providers and bool(providers & {*FIRST})


def of(data):
    """The headline of a recording, or None."""
    on_device, whole_calls = [], []
    for benchmark in data["benchmarks"].values():
        if not _is_of_a_pass(benchmark):
            continue
        if WHOLE_CALLS.match(benchmark["method"]):
            whole_calls.append(benchmark)
        else:
            on_device.append(benchmark)
    on_device, whole_calls = _alike(on_device), _alike(whole_calls)
    if not on_device and not whole_calls:
        return None
    first = (on_device or whole_calls)[0]
    passes = [_speed(each, _sizes(each)) for each in _by_pass(on_device)]
    calls = [
        _speed(each, [_called_at(each)]) for each in _by_pass(whole_calls)
    ]
    return Headline(
        passes=passes,
        calls=calls,
        called_at=_circumstances_of_calls(whole_calls, first),
        where=[
            *_counted(passes, first),
            *said(_rest(first)),
            recording.environment_of(data, first)["gpu"],
        ],
        date=max(
            recording.environment_of(data, each)["date"]
            for each in on_device + whole_calls
        ),
    )


def said(args):
    """The arguments of a benchmark in words, e.g. M = 4096, float16."""
    for name, value in args.items():
        if name == "dtype":
            yield str(value)
        elif name == "pass":  # says by itself what it is
            yield Said(value)
        elif name in ARGUMENTS:
            yield Said(ARGUMENTS[name], {"value": value})
        else:
            yield f"{name} = {value}"


def _is_of_a_pass(benchmark):
    """Whether a benchmark says how fast a pass is beside a rival's."""
    return (
        benchmark["args"].get("mode") in PASSES
        and compares(benchmark["unit"], benchmark["rows"])
        and bool(_sizes(benchmark))
    )


def _alike(benchmarks):
    """Those that differ in nothing but the pass and the sizes.

    If there are several such groups it is the one with the most rivals, and
    of these the first.
    """
    groups = {}
    for each in benchmarks:
        key = each["unit"], str(each["x_names"]), str(_rest(each))
        groups.setdefault(key, []).append(each)

    def rivals(group):
        return len({rival for each in group for rival in _rivals(each)})

    return max(groups.values(), key=rivals, default=[])


def _rest(benchmark):
    args = benchmark["args"].items()
    return {name: value for name, value in args if name != "mode"}


def _rivals(benchmark):
    providers = {row["provider"] for row in benchmark["rows"]}
    return [rival for rival in RIVALS if rival in providers]


def _by_pass(benchmarks):
    """The benchmarks of each pass as one."""
    for mode in PASSES:
        its = [each for each in benchmarks if each["args"]["mode"] == mode]
        if its:
            rows = [row for each in its for row in each["rows"]]
            yield its[0] | {"rows": rows}


def _table(benchmark):
    """{size: {provider: median}} of what providers could do.

    What was measured twice counts where it came first.
    """
    table = {}
    for row in benchmark["rows"]:
        if row["median"]:
            x = recording.x_of(row, benchmark["x_names"])
            table.setdefault(x, {}).setdefault(row["provider"], row["median"])
    return table


def _sizes(benchmark):
    """The sizes that ours and the first rival can do."""
    return [
        x
        for x, speeds in _table(benchmark).items()
        if OURS in speeds and _first(benchmark) in speeds
    ]


def _first(benchmark):
    return next(each for each in _rivals(benchmark) if each in FIRST)


def _called_at(benchmark):
    sizes = _sizes(benchmark)
    return CALLED_AT if CALLED_AT in sizes else sizes[len(sizes) // 2]


def _speed(benchmark, sizes):
    """Our speed at some sizes over the first rival's and over the best's."""
    table, first = _table(benchmark), _first(benchmark)
    faster = FASTER[benchmark["unit"]]
    over_first, over_best, best = [], [], set()
    for x in sizes:
        others = {
            rival: faster(table[x][OURS], table[x][rival])
            for rival in _rivals(benchmark)
            if rival in table[x]
        }
        least = min(others, key=others.get)
        best.add(least)
        over_first.append(others[first])
        over_best.append(others[least])
    over = [(RIVALS[first], median(over_first))]
    if best != {first}:
        name = RIVALS[best.pop()] if len(best) == 1 else BEST
        over.append((name, median(over_best)))
    return Speed(benchmark["args"]["mode"], over, sizes)


def _counted(passes, benchmark):
    """Of how many sizes the speeds are medians; of one, which it is."""
    x_names = benchmark["x_names"]
    counts = list(dict.fromkeys(len(each.sizes) for each in passes))
    if not counts:
        return []
    if counts == [1]:
        return _size(x_names, passes[0].sizes[0])
    text = (
        N_("median of %(count)s widths")
        if x_names == ["N"] and "D" not in benchmark["args"]
        else N_("median of %(count)s sizes")
    )
    return [Said(text, {"count": words.listed(counts, words.AND)})]


def _size(x_names, size):
    pairs = zip(x_names, size, strict=True)
    return [f"{name} = {value}" for name, value in pairs]


def _circumstances_of_calls(whole_calls, first):
    """The size that a headline names of calls, and which of their arguments
    are not those of the first benchmark."""
    if not whole_calls:
        return []
    calls, others = whole_calls[0], _rest(first)
    differs = {
        name: value
        for name, value in _rest(calls).items()
        if others.get(name) != value
    }
    return [*_size(calls["x_names"], _called_at(calls)), *said(differs)]
