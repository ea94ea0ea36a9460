"""Read docs/kernels.toml: the kernels of each tutorial, and their limits."""

import re
import tomllib
from collections import Counter

import aot
import machine_code
import recording

FILE = recording.ROOT / "docs" / "kernels.toml"
SHOWN = ("sm_80", "sm_90", "sm_100", "gfx942")  # tabs of a panel
DEFAULT = "sm_90"
LIMITS = {
    "narrow_loads": 0,
    "narrow_stores": 0,
    "narrow_copies": 0,
    "copies": False,
    "releases": 0,
    "spills": 0,
}


def pages(file=FILE):
    """The entry of each tutorial that has one."""
    return tomllib.loads(file.read_text(encoding="utf-8"))


def entries(page):
    """The kernels of a tutorial: name -> entry."""
    return {name: e for name, e in page.items() if name.startswith("_")}


def call(stem, page, N, target, dtype=None, **more):
    """The call of a tutorial's wrappers at one shape."""
    values = {"M": page["M"], "N": N, "dtype": dtype or page["dtype"]}
    return aot.Call(stem, page["run"], values, target, **more)


def by_name(built):
    """The first launch of each kernel."""
    return {b.kernel: b for b in reversed(built)}


class Facts:
    """Numbers about one compiled kernel, by name, for a panel or a limit."""

    def __init__(self, built):
        self.marks = machine_code.marks(built.text)
        self.counts = Counter((m.kind, m.bytes) for m in self.marks)
        self.registers = built.registers
        self.spills = built.spills
        self.shared = built.shared
        self.warps = built.num_warps
        self.stages = built.num_stages
        self.float64 = bool(re.search(r"\.f64\b|_f64", built.text))
        self.unsafe = [
            mark
            for mark in self.marks
            if mark.kind == "release"
            and not machine_code.barrier_before(self.marks, mark.number)
        ]

    def count(self, kind, bytes=None):
        """Instructions of a kind, of all widths or of one."""
        return sum(
            n
            for (k, b), n in self.counts.items()
            if k == kind and bytes in (None, b)
        )

    def narrow(self, kind):
        """Those that move fewer than 16 bytes."""
        return sum(
            n for (k, b), n in self.counts.items() if k == kind and b < 16
        )

    def says(self, sentence):
        """Whether an expression of numbers, as in the file, is true."""
        names = {
            name: value
            for name, value in vars(self).items()
            if name not in ("marks", "counts")
        }
        names |= {"count": self.count, "narrow": self.narrow}
        return eval(sentence, {"__builtins__": {}}, names)


def allowed(entry, what, N):
    """A limit of a kernel; one of spills may depend on N."""
    limit = entry.get(what, LIMITS[what])
    return limit.get(str(N), 0) if isinstance(limit, dict) else limit


def broken(entry, built, N, dtype):
    """The limits that a kernel breaks: (what, limit, now) of each."""
    facts = Facts(built)
    found = [
        (what, allowed(entry, what, N), now)
        for what, now in (
            ("spills", facts.spills),
            ("narrow_loads", facts.narrow("load")),
            ("narrow_stores", facts.narrow("store")),
            ("narrow_copies", facts.narrow("copy")),
        )
        if now > allowed(entry, what, N)
    ]
    releases = allowed(entry, "releases", N)
    if facts.count("release") != releases:
        found.append(("releases", releases, facts.count("release")))
    if facts.unsafe:
        found.append(("releases without a barrier", 0, len(facts.unsafe)))
    copies = allowed(entry, "copies", N)
    if copies != (facts.count("copy") > 0):
        found.append(("copies", copies, facts.count("copy") > 0))
    if facts.float64 and dtype != "float64":
        found.append(("float64", False, True))
    return found
