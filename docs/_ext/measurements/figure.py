"""What claims are written with: the numbers of a recorded figure.

See claims.py. Each number carries a mark into the sentence, so that what was
computed there is told from what was typed.
"""

import math
import re
import statistics

from measurements import recording

OPEN, CLOSE = "\ue000", "\ue001"  # stand in no text
MARKED = f"{OPEN}.*?{CLOSE}"
# How many times as fast, from numbers of these units.
FASTER = {
    "GB/s": lambda ours, theirs: ours / theirs,
    "TFLOP/s": lambda ours, theirs: ours / theirs,
    "µs": lambda ours, theirs: theirs / ours,
}
BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


class ClaimError(Exception):
    """Why a claim cannot be computed, in one sentence."""


class Measured(float):
    """A measured number. In a claim it is marked as one, and rounded as is
    usual for its kind where no format is given: ``{number:.2f}``."""

    def __new__(cls, value, rounding):
        number = super().__new__(cls, value)
        number.rounding = rounding
        return number

    def __format__(self, form):
        return OPEN + format(float(self), form or self.rounding) + CLOSE

    __str__ = __repr__ = lambda self: format(self)


def _computed(name):
    """What is computed from measured numbers is measured."""
    compute = getattr(float, name)

    def method(self, *others):
        value = compute(self, *others)
        if value is NotImplemented:
            return value
        return Measured(value, self.rounding)

    setattr(Measured, name, method)


for operation in ("add", "sub", "mul", "truediv"):
    _computed(f"__{operation}__")
    _computed(f"__r{operation}__")
_computed("__neg__")
_computed("__abs__")


class Several(list):
    """Measured numbers, one for each width."""

    least = property(min)
    most = property(max)
    median = property(statistics.median)


class Figure:
    """The numbers of one benchmark on one card."""

    def __init__(self, place, benchmark, kept=lambda x: True):
        self.place, self.benchmark = place, benchmark
        self.unit = benchmark["unit"]
        self.medians = {}  # provider -> {x: median or None}
        self.spans = {}  # provider -> {x: quantiles of 20% and 80%}
        for row in benchmark["rows"]:
            medians = self.medians.setdefault(row["provider"], {})
            spans = self.spans.setdefault(row["provider"], {})
            x = tuple(map(_number, recording.x_of(row, benchmark["x_names"])))
            if kept(x[0]):
                at = x[0] if len(x) == 1 else x
                medians[at] = row["median"]
                spans[at] = row["low"], row["high"]

    def at(self, *widths):
        """The same figure with these widths alone."""
        there = {x for medians in self.medians.values() for x in medians}
        for x in widths:
            if x not in there:
                raise ClaimError(
                    f"{self.place} has no {x}; it has {_listed(sorted(there))}"
                )
        return Figure(self.place, self.benchmark, widths.__contains__)

    def between(self, least=0, most=math.inf):
        """The same figure with the widths of a range alone."""
        return Figure(self.place, self.benchmark, lambda x: least <= x <= most)

    def median(self, provider, x):
        """What was measured, in the unit of the figure."""
        whole = ("GB/s", "TFLOP/s", "% of copy")
        rounding = dict.fromkeys(whole, ".0f") | {"µs": ".1f"}
        value = self._all(provider).get(x)
        if value is None:
            there = [x for x, v in self._all(provider).items() if v]
            raise ClaimError(
                f"{self.place} has no number of {provider} at {x}; it has "
                f"them at {_listed(there)}"
            )
        return Measured(value, rounding.get(self.unit, ".2f"))

    def all_medians(self, provider):
        return self._each(lambda x: self.median(provider, x), provider)

    def share(self, provider, x, of="copy"):
        """The speed in % of that of a copy."""
        if self.unit == "% of copy":
            return self.median(provider, x)
        return Measured(100 * self.ratio(provider, of, x), ".0f")

    def shares(self, provider, of="copy"):
        both = [provider] if self.unit == "% of copy" else [provider, of]
        return self._each(lambda x: self.share(provider, x, of), *both)

    def ratio(self, ours, theirs, x):
        """How many times as fast. Of several rivals the best counts."""
        if self.unit not in FASTER:
            raise ClaimError(
                f"{self.place} is in {self.unit}, in which nothing is faster"
            )
        theirs = [theirs] if isinstance(theirs, str) else theirs
        able = [each for each in theirs if self._all(each).get(x) is not None]
        faster = FASTER[self.unit]
        found = [
            faster(self.median(ours, x), self.median(each, x))
            for each in able or theirs[:1]
        ]
        return Measured(min(found), ".1f")

    def ratios(self, ours, theirs):
        return self._each(lambda x: self.ratio(ours, theirs, x), ours, theirs)

    def us(self, provider, x, matrices=None, rows=None):
        """µs of a call. Of a figure in GB/s: how many matrices does it move,
        and how many rows has each, if not M?"""
        if self.unit == "µs":
            return self.median(provider, x)
        args = self.benchmark["args"]
        moved = matrices * (rows or args["M"]) * x * BYTES[args["dtype"]]
        return Measured(moved / self.median(provider, x) / 1e3, ".1f")

    def _all(self, provider):
        if provider not in self.medians:
            raise ClaimError(
                f"{self.place} has no provider {provider}; it has "
                f"{_listed(self.medians)}"
            )
        return self.medians[provider]

    def _each(self, number, *providers):
        """A number at each width that all of these could do; of a list of
        providers one is enough."""
        widths = self._all(providers[0])
        for some in providers:
            some = [some] if isinstance(some, str) else some
            widths = [
                x
                for x in widths
                if any(self._all(each).get(x) is not None for each in some)
            ]
        found = list(map(number, widths))
        if not found:
            raise ClaimError(f"{self.place} has no such width")
        return Several(found)


def _number(x):
    return int(x) if isinstance(x, str) and x.isdigit() else x


def _listed(things):
    return ", ".join(map(str, things)) or "none"


def figures(page):
    """What CLAIMS of a page is given."""

    def figure(benchmark, card, page=page):
        """The figure of a benchmark on a card, ``H200``, of a page."""
        known = sorted(path.name for path in recording.STORE.glob("*/"))
        of_card = [gpu for gpu in known if card.lower() in gpu.split("-")]
        if not of_card:
            raise ClaimError(
                f"{card} is no card that anything was recorded on; those are "
                f"{_listed(known)}"
            )
        there = [gpu for gpu in of_card if gpu in recording.gpus(page)]
        if len(there) != 1:
            said = "several recordings" if there else "no recording"
            raise ClaimError(
                f"there is {said} of {page} on an {card} "
                f"({_listed(there or of_card)}); a sentence that names this "
                "card needs one"
            )
        try:
            found = recording.read(there[0], page)["benchmarks"]
        except recording.RecordingError as error:
            raise ClaimError(str(error)) from None
        if benchmark not in found:
            raise ClaimError(
                f"the recording {there[0]}/{page}.json has no benchmark "
                f"{benchmark}; it has {_listed(found)}"
            )
        return Figure(f"{benchmark} on the {card}", found[benchmark])

    return figure


def overlap(*spans):
    """Whether quantiles have a part in common, which may be the noise."""
    lows, highs = zip(*spans, strict=True)
    return max(lows) < min(highs)


def from_to(numbers, unit="%"):
    """The least and the most of some numbers, as prose says them."""
    return f"{numbers.least}{unit} to {numbers.most}{unit}"


def series(numbers, unit=""):
    """Numbers as prose lists them: 1%, 2% and 3%."""
    *most, last = (f"{number}{unit}" for number in numbers)
    return f"{', '.join(most)} and {last}"


def unmarked(claim):
    return re.sub(f"[{OPEN}{CLOSE}]", "", claim)


def measured_in(claim):
    """The places of a claim, unmarked, that hold measured numbers."""
    position, inside = 0, False
    for sign in claim:
        if sign in (OPEN, CLOSE):
            inside = sign == OPEN
            continue
        if inside:
            yield position
        position += 1
