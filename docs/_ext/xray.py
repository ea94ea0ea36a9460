"""X-ray panels: what the compiler made of each kernel, on its page.

For each kernel in docs/kernels.toml a folded panel follows the cell that
defines it. It is made from the code on the page, compiled for GPUs that the
machine does not have, as the page's own wrapper launches it. The panel is
added to the text that Sphinx reads: script and notebook know nothing of it.
"""

import hashlib
import pickle
import re
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

import aot
import kernels
import machine_code
import recording
from occupancy import occupancy
from sphinx.errors import ExtensionError

CODES = {
    "ttir": "Triton IR",
    "ttgir": "GPU IR",
    "ptx": "PTX",
    "sass": "SASS",
    "amdgcn": "AMD assembly",
}
# The lines of a tutorial that a panel follows down: the first of each kind.
FOLLOWED = ("load", "copy", "shuffle", "store", "atomic", "release", "early")

_pool = ThreadPoolExecutor(1)
_work = {}  # stem -> what will be its builds


def start(app):
    """Begin to compile while the tutorials run; what is known is read."""
    folder = Path(app.doctreedir).parent / "xray"
    pages = kernels.pages()
    for script in recording.tutorials():
        if script.stem in pages:
            _work[script.stem] = _pool.submit(
                builds, script, pages[script.stem], folder
            )


def builds(script, page, folder):
    """Every shown build of a tutorial: {(kernel, target, N): Built}."""
    file = folder / f"{script.stem}.{_key(script, page)}"
    if file.exists():
        return pickle.loads(file.read_bytes())
    shapes = [(t, N) for N in page["N"] for t in kernels.SHOWN]
    calls = [
        kernels.call(script.stem, page, N, t, sass=N == page["N"][0])
        for t, N in shapes
    ]
    found = {
        (name, *shape): built
        for shape, launched in zip(shapes, aot.launches(calls), strict=True)
        for name, built in kernels.by_name(launched).items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob(f"{script.stem}.*"):
        old.unlink()
    file.write_bytes(pickle.dumps(found))
    return found


def _key(script, page):
    """A hash of everything that the builds depend on."""
    parts = [script.read_bytes(), repr(page).encode()]
    parts += [version("triton").encode(), version("torch").encode()]
    for name in ("aot.py", "kernels.py", "tutorial.py"):
        parts.append(Path(__file__).with_name(name).read_bytes())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def add_panels(app, docname, source):
    """Put the panels of a tutorial into its text."""
    stem = docname.removeprefix("tutorials/")
    if stem not in _work:
        return
    app.env.note_dependency(str(kernels.FILE))
    page = kernels.pages()[stem]
    found = _work[stem].result()
    lines = source[0].splitlines()
    for name, entry in kernels.entries(page).items():
        panel = Panel(app.srcdir, stem, page, name, entry, found)
        at = _after_cell(lines, name)
        if at is None:
            raise ExtensionError(
                f"docs/kernels.toml: tutorials/{stem}.py has no kernel {name}"
            )
        lines[at:at] = panel.text().splitlines()
    source[0] = "\n".join(lines) + "\n"


def _after_cell(lines, name):
    """The number of the line where the cell that defines a kernel ends."""
    start = re.compile(rf"    def {name}\(")
    for i, line in enumerate(lines):
        if start.match(line):
            for end in range(i, len(lines)):
                if lines[end].startswith(".. GENERATED FROM PYTHON"):
                    return end
                if lines[end].startswith(".. _sphx_glr_download"):
                    return end
            return len(lines)
    return None


class Panel:
    """The panel of one kernel, as reStructuredText."""

    def __init__(self, srcdir, stem, page, name, entry, found):
        self.folder = Path(srcdir) / "tutorials" / "xray"
        self.stem, self.page, self.name = stem, page, name
        self.entry, self.found = entry, found
        script = recording.TUTORIALS / f"{stem}.py"
        self.script = script.read_text(encoding="utf-8").splitlines()

    def text(self):
        tabs = "".join(
            f".. tab-item:: {target}\n   :sync: {target}\n"
            + ("   :selected:\n" if target == kernels.DEFAULT else "")
            + _indent(self.tab(target))
            for target in kernels.SHOWN
        )
        body = (
            f"{self.entry['look'].strip()}\n\n"
            ".. tab-set::\n   :sync-group: target\n" + _indent(tabs)
        )
        return (
            f"\n.. dropdown:: X-ray of ``{self.name}``\n"
            "   :class-container: bp-xray\n" + _indent(body) + "\n"
        )

    def tab(self, target):
        builds = [self.found[self.name, target, N] for N in self.page["N"]]
        first = builds[0]
        device, *_ = aot.DEVICES[target]
        shape = f"{self.page['M']} rows, {self.page['dtype']}"
        return (
            f"As launched on an {device}, {shape}.\n\n"
            + self.table(target, builds)
            + self.ways(first)
            + self.downloads(first)
        )

    def table(self, target, builds):
        """What the compiler says, a column for each shape."""
        columns = [list(numbers(target, built)) for built in builds]
        head = ["", *(f"N = {N}" for N in self.page["N"])]
        rows = [head]
        for parts in zip(*columns, strict=True):
            rows.append([parts[0][0], *(value for _, value in parts)])
        text = (
            ".. list-table::\n   :header-rows: 1\n   :stub-columns: 1\n"
            "   :class: bp-table\n\n"
        )
        for row in rows:
            for i, cell in enumerate(row):
                text += f"   {'*' if i == 0 else ' '} - {cell}\n"
        return text + "\n"

    def ways(self, built):
        """What became of a few lines of the tutorial, level by level."""
        levels = {key: self.marks(built, key) for key in CODES}
        machine = levels["ptx"] or levels["amdgcn"]
        text = ""
        for line in followed(machine):
            text += f"``{self.script[line - 1].strip()}``\n\n"
            for key, name in CODES.items():
                if parts := list(steps(levels[key], line)):
                    text += f":{name}: " + "\n   | ".join(["", *parts]) + "\n"
            text += "\n"
        return ".. container:: bp-ways\n" + _indent(text) + "\n"

    def marks(self, built, key):
        """The marks of a code that this build has, or none."""
        if key not in built.asm:
            return []
        ptx = built.asm.get("ptx", "")
        found = machine_code.marks(built.asm[key], self.stem, ptx)
        if key == "amdgcn":  # its release has no line of its own
            known = self.marks(built, "ttgir")
            lines = {m.line for m in known if m.kind == "release"}
            for mark in found:
                if mark.kind == "release" and len(lines) == 1:
                    (mark.line,) = lines
        return found

    def downloads(self, built):
        """Write the codes, with their marks; links to them."""
        self.folder.mkdir(parents=True, exist_ok=True)
        links = []
        for key, name in CODES.items():
            if key not in built.asm:
                continue
            file = f"{self.stem}.{self.name}.{built.target}.{key}"
            text = machine_code.annotated(
                built.asm[key], self.marks(built, key), self.script
            )
            (self.folder / file).write_text(shortened(text), encoding="utf-8")
            links.append(f":download:`{name} <xray/{file}>`")
        return "The whole code, with marks: " + ", ".join(links) + ".\n"


def numbers(target, built):
    """The rows of a panel's table."""
    facts = kernels.Facts(built)
    programs = 1
    for size in built.grid:
        programs *= size
    per_device = programs, aot.DEVICES[target][1]
    warps, most, limits = occupancy(
        target, built.registers, built.shared, built.num_warps, per_device
    )
    yield "Programs", f"{programs:,} of {facts.warps} warps"
    yield "Registers of a thread", facts.registers
    yield "Spilled bytes of a thread", facts.spills
    yield "Shared memory, bytes", f"{facts.shared:,}"
    yield "Stages", facts.stages
    for title, kind in (
        ("Global loads", "load"),
        ("Global stores", "store"),
        ("Asynchronous copies", "copy"),
    ):
        yield title, widths(facts, kind)
    yield "Exchanges between threads", facts.count("shuffle")
    yield "Barriers", facts.count("barrier")
    yield "Atomics", facts.count("atomic") + facts.count("release")
    limited = f", limited by {' and '.join(limits)}" if limits else ""
    yield "Warps at a time", f"{warps} of {most}{limited}"


def widths(facts, kind):
    """Instructions by width: ``12 of 16 bytes, 2 of 4``."""
    found = sorted(
        ((b, n) for (k, b), n in facts.counts.items() if k == kind),
        reverse=True,
    )
    return ", ".join(f"{n} of {b} bytes" for b, n in found) or "none"


def followed(found):
    """Lines of the tutorial worth following, in its order."""
    lines = set()
    for kind in FOLLOWED:
        some = [m for m in found if m.kind == kind and m.line]
        if some:
            lines.add(max(some, key=lambda m: m.bytes).line)
    for mark in found:
        if mark.kind == "release":
            before = [m for m in found if m.number < mark.number]
            lines |= {m.line for m in before[-3:] if m.kind == "barrier"}
    return sorted(line for line in lines if line)


def steps(found, line):
    """The instructions of one level that a line became."""
    groups = {}
    for mark in found:
        if mark.line == line:
            groups.setdefault((mark.kind, mark.bytes), []).append(mark)
    for marks in groups.values():
        times = f" × {len(marks)}" if len(marks) > 1 else ""
        yield f"``{marks[0].text}``{times}"


def shortened(text):
    """Without debug data and without the folders of this machine."""
    text = re.split(r"^\s*\.section\s+\.debug", text, flags=re.MULTILINE)[0]
    text = text.replace(f"{recording.ROOT}/", "")
    return re.sub(r'"?[^\s"]*/(triton/language)', r"\1", text)


def _indent(text, width=3):
    pad = " " * width
    return "\n" + "".join(
        pad + line if line.strip() else line
        for line in text.splitlines(keepends=True)
    )


def setup(app):
    # Sphinx-Gallery runs the tutorials at this event with priority 10.
    app.connect("builder-inited", start, priority=6)
    app.connect("source-read", add_panels)
    return {"parallel_read_safe": False, "parallel_write_safe": True}
