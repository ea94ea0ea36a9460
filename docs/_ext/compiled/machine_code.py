"""Find the lines of generated code that tell how a kernel works.

``marks(text)`` reads Triton IR, GPU IR, PTX, SASS or AMD assembly and gives
the loads and stores of global memory with their width, the shuffles of a
reduction, the barriers, the atomics; each with the line of the tutorial that
it came from.
"""

import re
from dataclasses import dataclass

# What a mark is called on the page.
KINDS = {
    "load": "load",
    "copy": "asynchronous copy",
    "store": "store",
    "shuffle": "shuffle between threads",
    "barrier": "barrier",
    "release": "release of the lock",
    "atomic": "atomic",
    "early": "early launch",
    "spill": "spilled register",
}
COMMENT = {"sass": "//", "ptx": "//", "ir": "//", "amdgcn": ";"}


@dataclass
class Mark:
    kind: str  # a key of KINDS
    bytes: int  # that one thread moves, or 0
    number: int  # of the line of the text, from 1
    text: str  # the instruction
    line: int | None  # of the tutorial

    @property
    def title(self):
        """``16-byte load``, for example."""
        width = f"{self.bytes}-byte " if self.bytes else ""
        return width + KINDS[self.kind]


def language(text):
    """Which of the languages a text is written in."""
    if re.search(r"^\s*\.amdgcn_target", text, re.MULTILINE):
        return "amdgcn"
    if re.search(r"^\.version \d", text, re.MULTILINE):
        return "ptx"
    return "ir" if re.search(r"^module\b", text, re.MULTILINE) else "sass"


def marks(text, script="", ptx=""):
    """All marks of a text. Lines are those of the file named script.

    SASS is read beside the PTX that it was made from.
    """
    name = language(text)
    lines = text.splitlines()
    if name == "sass":
        return _sass_marks(lines, ptx, script)
    sources = {"ptx": _ptx_sources, "amdgcn": _amd_sources, "ir": _ir_sources}
    sources = sources[name](lines, script)
    mark = {"ptx": _ptx, "amdgcn": _amd, "ir": _ir}[name]
    found = []
    for number, (line, source) in enumerate(
        zip(lines, sources, strict=True), 1
    ):
        code = _instruction(line, name)
        if code and (kind := mark(code)):
            found.append(Mark(*kind, number, code, source))
    return _releases(found, lines) if name == "amdgcn" else found


def _instruction(line, name):
    """A line without comments, labels and places."""
    if name == "ir":
        if line.startswith("#"):
            return ""
        line = re.sub(r" loc\(.*| \(\{$", "", line)
    if name == "sass":
        line = re.sub(r"/\*[0-9a-f]+\*/", "", line)
    if name == "ptx" and line.lstrip().startswith((".", "//")):
        return ""
    line = line.split(COMMENT[name])[0]
    return " ".join(line.split()).rstrip(" ;")


# What an instruction is ----------------------------------------------------


def _ptx(code):
    code = re.sub(r"^@\S+ ", "", code)
    if code.startswith(("ld.", "st.")) and ".global" in code:
        op = code.split()[0]
        lanes = re.search(r"\.v(\d)", op)
        bits = int(re.search(r"\.[bsuf](\d+)$", op)[1])
        kind = "load" if op.startswith("ld") else "store"
        return kind, int(lanes[1] if lanes else 1) * bits // 8
    if copy := re.match(r"cp\.async\.c[ag]\..*?\], (0x\w+|\d+)", code):
        return "copy", int(copy[1], 0)
    if code.startswith(("atom.", "red.")) and ".global" in code:
        release = ".release." in code and ".exch" in code
        return ("release" if release else "atomic"), 0
    for kind, starts in (
        ("shuffle", ("shfl.", "redux.")),
        ("barrier", ("bar.sync", "barrier.sync", "barrier.cta.sync")),
        ("early", ("griddepcontrol",)),
    ):
        if code.startswith(starts):
            return kind, 0
    return None


SASS_WIDTHS = (
    *((".256", 32), (".128", 16), (".64", 8)),
    *((".U16", 2), (".S16", 2), (".U8", 1), (".S8", 1)),
)


def _sass(code):
    code = re.sub(r"^@\S+ ", "", code)
    op = code.split()[0]
    name = op.split(".")[0]
    width = next((b for part, b in SASS_WIDTHS if part in op), 4)
    if kind := {"LDG": "load", "STG": "store", "LDGSTS": "copy"}.get(name):
        return kind, width
    if name in ("LDL", "STL"):
        return "spill", width
    if op == "BAR.ARV":
        return None
    for kind, names in (
        ("shuffle", ("SHFL", "REDUX", "CREDUX")),
        ("barrier", ("BAR",)),
        ("atomic", ("ATOM", "ATOMG", "RED", "REDG")),
        ("early", ("ACQBULK", "PREEXIT")),
    ):
        if name in names:
            return kind, 0
    return None


AMD_WIDTHS = {
    "dwordx4": 16,
    "dwordx3": 12,
    "dwordx2": 8,
    "dword": 4,
    "short": 2,
    "ushort": 2,
    "sshort": 2,
    "byte": 1,
    "ubyte": 1,
    "sbyte": 1,
}


def _amd(code):
    op = code.split()[0]
    if access := re.match(
        r"(?:buffer|global|flat)_(load|store)_([a-z]+?(?:x\d)?)(?:_|$)", op
    ):
        kind = "copy" if re.search(r"\blds$", code) else access[1]
        return kind, AMD_WIDTHS.get(access[2], 4)
    if op.startswith("scratch_"):
        return "spill", 4
    for kind, pattern in (
        ("atomic", r"(buffer|global|flat)_atomic_"),
        ("shuffle", r".*_dpp$|ds_swizzle|ds_bpermute|v_permlane"),
        ("barrier", "s_barrier"),
    ):
        if re.match(pattern, op):
            return kind, 0
    return None


def _releases(found, lines):
    """What tells the exchange that releases from the one that acquires.

    On gfx942 the caches are written back before a release. gfx90a only waits
    until all is stored; there what acquires empties a cache after it. An
    exchange that is relaxed does nothing of this.
    """
    older = any("gfx90a" in line for line in lines[:5])
    sign = "vmcnt(0)" if older else "buffer_wbl2"
    for mark in found:
        before = lines[max(mark.number - 8, 0) : mark.number]
        after = lines[mark.number : mark.number + 8]
        if (
            "_swap" in mark.text
            and any(sign in line for line in before)
            and not any("buffer_wbinvl1" in line for line in after)
        ):
            mark.kind = "release"
    return found


def _ir(code):
    if "tt.atomic_rmw exch, release" in code:
        return "release", 0
    for kind, pattern in (
        ("load", r"tt\.(load|descriptor_load)\b|amd\w*\.buffer_load\b"),
        ("store", r"tt\.(store|descriptor_store)\b|amd\w*\.buffer_store\b"),
        ("store", r"async_tma_copy_local_to_global"),  # by the TMA
        ("atomic", r"tt\.atomic_|amd\w*\.buffer_atomic"),
        ("shuffle", r'"tt\.reduce"'),
        ("barrier", r"(ttg|gpu)\.barrier"),
        ("copy", r"async_(tma_)?copy_global_to_local|buffer_load_to_local"),
        ("early", r"gdc_|griddepcontrol"),
    ):
        if re.search(pattern, code):
            return kind, 0
    return None


# Where an instruction comes from ---------------------------------------------


def _ptx_sources(lines, script):
    """Follow .loc lines; a library's line leads to the one that called it.

    Triton 3.7 names each call in a comment, 3.9 with inlined_at.
    """
    files = _files("\n".join(lines), script)
    comment = re.compile(re.escape(script or "?") + r"\S*:(\d+):\d+")
    pattern = re.compile(
        r"\s*\.loc\s+(\d+) (\d+) (\d+)(?:,.*inlined_at (\d+) (\d+) (\d+))?"
    )
    callers, source, inline, found = {}, None, False, []
    for line in lines:
        # Inside, LLVM adds 1 to the line for each line of the assembly.
        if "inline asm" in line:
            inline = "begin" in line
        if not inline and (place := pattern.match(line)):
            at = place.group(1, 2, 3)
            if place[4]:
                callers[at] = place.group(4, 5, 6)
            for _ in range(20):
                if at in callers and at[0] not in files:
                    at = callers[at]
            named = comment.search(line)
            known = at[1] if at[0] in files else named and named[1]
            source = int(known or 0) or None
        found.append(source)
    return found


def _files(text, script):
    """The numbers that PTX or AMD assembly calls a script by."""
    named = re.findall(r'^\s*\.file\s+(\d+) "(.*)"', text, re.MULTILINE)
    return {number for number, path in named if script and script in path}


def _sass_marks(lines, ptx, script):
    """A comment before the instructions names their line of PTX."""
    sources = _ptx_sources(ptx.splitlines(), script)
    releases = {m.number for m in marks(ptx) if m.kind == "release"}
    at, found = 0, []
    for number, line in enumerate(lines, 1):
        if place := re.search(r"PTX line (\d+)", line):
            at = int(place[1])
            continue
        code = _instruction(line, "sass")
        if not code or code.startswith(".") or not (kind := _sass(code)):
            continue
        if kind[0] == "atomic" and at in releases:
            kind = "release", 0
        source = sources[at - 1] if 0 < at <= len(sources) else None
        found.append(Mark(*kind, number, code, source))
    return found


def _amd_sources(lines, script):
    """The comment of a .loc line names each call, the innermost first."""
    source, found = None, []
    pattern = re.compile(re.escape(script) + r"\S*:(\d+):\d+")
    for line in lines:
        if re.match(r"\s*\.loc\b", line):
            place = pattern.search(line) if script else None
            source = int(place[1]) or None if place else None
        found.append(source)
    return found


def _ir_sources(lines, script):
    """Follow the table of places at the ends of the text."""
    table = dict(
        re.findall(r"^(#loc\d*) = loc\((.*)\)$", "\n".join(lines), re.M)
    )

    def follow(place, depth=0):
        here = re.match(r'"([^"]*)":(\d+)', place)
        if here:
            return int(here[2]) if script and script in here[1] else None
        for name in re.findall(r"#loc\d*", place) if depth < 20 else ():
            if line := follow(table.get(name, ""), depth + 1):
                return line
        return None

    def source(line):
        names = re.findall(r"loc\((#loc\d*)\)$", line)
        return follow(names[0]) if names else None

    found = []
    for i, line in enumerate(lines):
        if line.rstrip().endswith("({"):  # the place stands at its end
            margin = line[: len(line) - len(line.lstrip())]
            rest = (x for x in lines[i:] if x.startswith(margin + "})"))
            line = next(rest, line)
        found.append(source(line))
    return found


# What is made of it ----------------------------------------------------------


def barrier_before(found, number):
    """Is there a barrier between a mark's line and what was written before
    it, by a store or by an atomic addition?"""
    kinds = [m.kind for m in found if m.number < number]
    written = [i for i, k in enumerate(kinds) if k in ("store", "atomic")]
    return bool(written) and "barrier" in kinds[written[-1] :]


def annotated(text, found, script_lines):
    """The text with a comment at each mark: what it is and whence it came."""
    sign = COMMENT[language(text)]
    lines = text.splitlines()
    for mark in found:
        said = mark.title
        if mark.line:
            source = script_lines[mark.line - 1].strip()
            said += f", line {mark.line}: {source}"
        lines[mark.number - 1] += f"  {sign} <== {said}"
    return "\n".join(lines) + "\n"
