"""What an X-ray panel shows of one compiled kernel, as plain data.

It is made where the kernel is compiled, in another process, while the
tutorials run: reading generated code takes time.
"""

import re
from dataclasses import dataclass, field
from html import escape

from compiled import limits, machine_code
from tutorial import source

# Which codes there are, from the first level to the last. A kernel in Gluon
# begins with the second.
CODES = ("ttir", "ttgir", "ptx", "sass", "amdgcn")
# The lines of a tutorial that a panel follows down: the first of each kind.
FOLLOWED = ("load", "copy", "shuffle", "store", "atomic", "release", "early")


@dataclass
class Sheet:
    kernel: str
    target: str
    columns: int | None  # that the kernel was launched with
    compiler: str
    programs: int
    warps: int  # of a program
    registers: int  # of a thread
    spills: int  # bytes of a thread
    shared: int  # bytes
    stages: int
    counts: list  # of instructions: kind, bytes, how many
    # What became of a few lines: each, and its instructions at each level.
    ways: list = field(default_factory=list)
    codes: dict = field(default_factory=dict)  # one of CODES -> text, marked


def brief(built):
    """The sheet of a kernel, with its numbers and no code."""
    return _numbered(built, limits.Facts(built))


def full(built):
    """The sheet of a kernel, with its code."""
    facts = limits.Facts(built)
    found = {k: _marks(built, k, facts) for k in CODES if k in built.asm}
    if "amdgcn" in found:  # its release has no line of its own
        lines = {m.line for m in found["ttgir"] if m.kind == "release"}
        for mark in found["amdgcn"]:
            if mark.kind == "release" and len(lines) == 1:
                (mark.line,) = lines
    sheet = _numbered(built, facts)
    script = source(built.tutorial).splitlines()
    sheet.ways = list(_ways(built, found, script))
    sheet.codes = {
        key: machine_code.annotated(built.asm[key], marks, script)
        for key, marks in found.items()
    }
    return sheet


def _numbered(built, facts):
    counts = sorted((*which, n) for which, n in facts.counts.items())
    return Sheet(
        kernel=built.kernel,
        target=built.target,
        columns=built.columns,
        compiler=built.compiler,
        programs=facts.programs,
        warps=facts.warps,
        registers=facts.registers,
        spills=facts.spills,
        shared=facts.shared,
        stages=facts.stages,
        counts=counts,
    )


def _marks(built, key, facts):
    code = built.asm[key]
    if code is built.text:
        return facts.marks
    return machine_code.marks(code, built.script, built.asm.get("ptx", ""))


def _ways(built, found, script):
    """What became of a few lines of the tutorial, level by level."""
    lines = followed(found.get("ptx") or found["amdgcn"])
    # What the TMA loads and stores has its marks above PTX only.
    first = next(iter(found.values()))
    if not any(mark.line in lines for mark in first):
        lines = followed(first)
    for line in lines:
        levels = []
        for key, marks in found.items():
            parts = list(steps(marks, line))
            if key == "ttgir":
                parts += sorted(layouts(built.asm[key], marks, line))
            if parts:
                levels.append((key, parts))
        yield script[line - 1].strip(), levels


def followed(found):
    """Lines of the tutorial worth following, in the order of the code."""
    lines = {}
    for kind in FOLLOWED:
        some = [m for m in found if m.kind == kind and m.line]
        if some:
            mark = max(some, key=lambda m: m.bytes)
            lines.setdefault(mark.line, mark.number)
    for i, mark in enumerate(found):
        if mark.kind == "release":
            for before in found[max(i - 2, 0) : i]:
                if before.kind == "barrier" and before.line:
                    lines.setdefault(before.line, before.number)
    return sorted(lines, key=lines.get)


def steps(found, line):
    """The instructions of one level that a line became."""
    groups = {}
    for mark in found:
        if mark.line == line:
            groups.setdefault((mark.kind, mark.bytes), []).append(mark)
    for marks in groups.values():
        times = f" × {len(marks)}" if len(marks) > 1 else ""
        yield f"<code>{escape(marks[0].text)}</code>{times}"


def layouts(code, found, line):
    """How a tensor of GPU IR is spread over threads: what the # name means."""
    for name in {
        name
        for mark in found
        if mark.line == line
        for name in re.findall(r"#blocked\d*", mark.text)
    }:
        meant = re.search(rf"^{name} = .*<{{(.*), order.*}}>", code, re.M)
        if meant:
            yield f"<code>{name}: {escape(meant[1])}</code>"
