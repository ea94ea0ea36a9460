"""What the compiler made of a kernel, and whether it keeps its limits."""

import math
import re
from collections import Counter
from dataclasses import dataclass, replace

from compiled import aot, machine_code

SHOWN = ("sm_80", "sm_90", "sm_100", "gfx942")  # tabs of a panel
DEFAULT = "sm_90"
# A page says whether its kernels compile for this one, which has no tab: it
# is what a notebook gets for nothing.
SMALLEST = "sm_75"
SPILLS_ELSEWHERE = 16  # bytes more on other targets: compilers differ


def shown(page):
    """Pairs of target and N: the first N on all, more on the default."""
    first, *more = page.N
    for target in SHOWN:
        yield target, first
        if target == DEFAULT:
            yield from ((target, N) for N in more)


def kernels_for(target, page):
    """The names of a page's kernels that are for a GPU."""
    return {
        name
        for name, kernel in page.kernels.items()
        if kernel.only in ("", target)
    }


def call(name, page, N, target, dtype=None, run=None, **more):
    """The call of a tutorial's wrappers at one shape."""
    values = {"M": page.M, "N": N, "dtype": dtype or page.dtype}
    return aot.Call(name, run or page.run, values, target, **more)


def in_case(page, case, kernel):
    """A kernel with the limits that it has in a case."""
    others = case.limits | case.kernels.get(kernel, {})
    return replace(page.kernels[kernel], **others)


def by_name(launched):
    """The last launch of each kernel."""
    return {built.kernel: built for built in launched}


class Facts:
    """Numbers about one compiled kernel, by name."""

    def __init__(self, built):
        _, self.multiprocessors, _ = aot.DEVICES[built.target]
        *_, self.lanes = aot.TARGETS[built.target]
        self.target = built.target
        self.amd = built.target.startswith("gfx")
        self.registers = built.registers
        self.spills = built.spills
        self.shared = built.shared
        self.warps = built.num_warps
        self.stages = built.num_stages
        self.programs = math.prod(built.grid)
        self.marks = machine_code.marks(built.text, built.script)
        self.counts = Counter((m.kind, m.bytes) for m in self.marks)
        self.loaded = self.moved("load")  # bytes of a program
        self.stored = self.moved("store")
        self.float64 = bool(re.search(r"\.f64\b|_f64", built.text))
        # Whether matrices are multiplied, and tiles fetched by descriptors.
        self.multiplies = bool(
            re.search(r"\b(wgmma|mma\.sync|tcgen05\.mma|v_mfma)", built.text)
        )
        self.fetches_tiles = "cp.async.bulk.tensor" in built.text
        self.unsafe = [
            mark
            for mark in self.marks
            if mark.kind == "release"
            and not machine_code.barrier_before(self.marks, mark.number)
        ]

    def moved(self, kind):
        """Bytes that a program moves by such instructions, each done once."""
        each = sum(n * b for (k, b), n in self.counts.items() if k == kind)
        return each * self.lanes * self.warps

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

    def first(self, kind):
        """The line of the first of a kind; 0 without one."""
        return next((m.number for m in self.marks if m.kind == kind), 0)

    def lines(self, kind):
        """The lines of the tutorial that became instructions of a kind."""
        return {m.line for m in self.marks if m.kind == kind}


@dataclass
class Broken:
    """A limit that a kernel does not keep."""

    what: str
    limit: object
    now: object
    where: list  # the marks that break it

    def __str__(self):
        return f"{self.what}: limit {self.limit}, now {self.now}"


def broken(kernel, built, N, dtype):
    """The limits that a build of a kernel breaks."""
    facts = Facts(built)
    narrow = {
        f"narrow_{plural}": [
            m for m in facts.marks if m.kind == kind and m.bytes < 16
        ]
        for kind, plural in (
            *(("load", "loads"), ("store", "stores"), ("copy", "copies")),
        )
    }
    now = {"spills": facts.spills, "shared": facts.shared}
    if built.target == DEFAULT:
        now |= {what: len(marks) for what, marks in narrow.items()}
    found = []
    for what, value in now.items():
        limit = getattr(kernel, what)
        if isinstance(limit, dict):
            limit = limit.get(N, 0)
        if what == "spills" and built.target != DEFAULT:
            limit += SPILLS_ELSEWHERE
        if value > limit:
            found.append(Broken(what, limit, value, narrow.get(what, [])))
    can = built.target in ("sm_80", "sm_90", "sm_100")
    copies = facts.count("copy") > 0
    for what, limit, value, where in (
        (
            "releases of a lock",
            kernel.releases,
            facts.count("release"),
            [],
        ),
        ("releases without a barrier", 0, len(facts.unsafe), facts.unsafe),
        (
            "loads ahead, by asynchronous copies",
            copies if kernel.copies == "any" else kernel.copies and can,
            copies,
            [],
        ),
        ("arithmetic in float64", dtype == "float64", facts.float64, []),
    ):
        if value != limit:
            found.append(Broken(what, limit, value, where))
    return found
