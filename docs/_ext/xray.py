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
from html import escape
from importlib.metadata import version
from pathlib import Path

import kernels
import machine_code
import recording
from sphinx.errors import ExtensionError
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx_design.tabs import sd_tab_label

import aot

CODES = {
    "ttir": "Triton IR",
    "ttgir": "GPU IR",
    "ptx": "PTX",
    "sass": "SASS",
    "amdgcn": "AMD assembly",
}
# A disassembler takes longer than the compiler: only for these.
SASS = (kernels.DEFAULT,)
# The lines of a tutorial that a panel follows down: the first of each kind.
FOLLOWED = ("load", "copy", "shuffle", "store", "atomic", "release", "early")

_pool = ThreadPoolExecutor(1)
_work = None  # what will be the builds of all tutorials


def start(app):
    """Begin to compile while the tutorials run; what is known is read."""
    global _work
    pages = kernels.pages()
    scripts = [s for s in recording.tutorials() if s.stem in pages]
    folder = Path(app.doctreedir).parent / "xray"
    _work = _pool.submit(builds, scripts, pages, folder)


def builds(scripts, pages, folder):
    """The shown builds of each tutorial: {(kernel, target, N): Built}."""
    files = {
        script.stem: folder / f"{script.stem}.{_key(script, pages)}"
        for script in scripts
    }
    missing = [
        (stem, target, N)
        for stem, file in files.items()
        if not file.exists()
        for target, N in kernels.shown(pages[stem])
    ]
    calls = [
        kernels.call(
            stem, pages[stem], N, target, sass=target in SASS, last=True
        )
        for stem, target, N in missing
    ]
    found = {}
    launched = aot.launches(calls) if calls else []
    for (stem, *shape), built in zip(missing, launched, strict=True):
        for name, one in kernels.by_name(built).items():
            found.setdefault(stem, {})[name, *shape] = one
    for stem, file in files.items():
        if stem not in found:
            found[stem] = pickle.loads(file.read_bytes())
            continue
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob(f"{stem}.*"):
            old.unlink()
        file.write_bytes(pickle.dumps(found[stem]))
    return found


def _key(script, pages):
    """A hash of everything that the builds of a tutorial depend on."""
    parts = [script.read_bytes(), repr(pages[script.stem]).encode()]
    parts += [version("triton").encode(), version("torch").encode()]
    for name in ("aot", "kernels", "occupancy", "tutorial", "xray"):
        parts.append(Path(__file__).with_name(f"{name}.py").read_bytes())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def add_panels(app, docname, source):
    """Put the panels of a tutorial into its text."""
    stem = docname.removeprefix("tutorials/")
    pages = kernels.pages()
    if stem not in pages or stem == docname:
        return
    app.env.note_dependency(str(kernels.FILE))
    page = pages[stem]
    try:
        found = _work.result()[stem]
    except RuntimeError as error:
        raise ExtensionError(
            "a tutorial cannot be compiled for its X-ray, as "
            f"docs/kernels.toml says: {error}"
        ) from None
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
            f"{self.page['M']} rows, {self.page['dtype']}, "
            f"triton {version('triton')}.\n"
            "Instructions are counted in the code, where a loop stands once."
            "\n\n.. tab-set::\n   :sync-group: target\n" + _indent(tabs)
        )
        return (
            f"\n.. dropdown:: X-ray of ``{self.name}``\n"
            "   :class-container: bp-xray\n" + _indent(body) + "\n"
        )

    def tab(self, target):
        builds = [
            self.found[self.name, shape, N]
            for shape, N in kernels.shown(self.page)
            if shape == target
        ]
        ways = _indent(self.ways(builds[0]))
        return (
            self.table(builds)
            + f"Where lines of the page went, at N = {self.page['N'][0]}:\n\n"
            + f".. raw:: html\n{ways}\n"
            + self.downloads(builds[0])
        )

    def table(self, builds):
        """What the compiler says, a column for each shape."""
        columns = [dict(kernels.numbers(built)) for built in builds]
        rows = [[aot.DEVICES[builds[0].target][0]]]
        rows[0] += [f"N = {N}" for N in self.page["N"][: len(builds)]]
        rows += [[key, *(c[key] for c in columns)] for key in columns[0]]
        text = (
            ".. list-table::\n   :header-rows: 1\n   :stub-columns: 1\n"
            "   :class: bp-table\n\n"
        )
        for row in rows:
            for i, cell in enumerate(row):
                text += f"   {' ' if i else '*'} - {cell}\n"
        return text + "\n"

    def ways(self, built):
        """What became of a few lines of the tutorial, level by level."""
        levels = {key: self.marks(built, key) for key in CODES}
        for line in followed(levels["ptx"] or levels["amdgcn"]):
            yield f"<pre class='bp-way'>{escape(self.source(line))}</pre>"
            yield "<dl class='bp-levels'>"
            for key, name in CODES.items():
                parts = list(steps(levels[key], line))
                if key == "ttgir":
                    code = built.asm[key]
                    parts += sorted(layouts(code, levels[key], line))
                if parts:
                    yield f"<dt>{name}</dt><dd>{'<br>'.join(parts)}</dd>"
            yield "</dl>"

    def source(self, line):
        return self.script[line - 1].strip()

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
        return (
            "The whole code, with these marks and their lines: "
            + ", ".join(links)
            + ".\n"
        )


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


def shortened(text):
    """Without debug data and without the folders of this machine."""
    text = re.split(r"^\s*\.section\s+\.debug", text, flags=re.MULTILINE)[0]
    text = text.replace(f"{recording.ROOT}/", "")
    return re.sub(r'"?[^\s"]*/(triton/language)', r"\1", text)


def _indent(text, width=3):
    """A block under a directive; text may come line by line."""
    text = text if isinstance(text, str) else "\n".join(text) + "\n"
    pad = " " * width
    return "\n" + "".join(
        pad + line if line.strip() else line
        for line in text.splitlines(keepends=True)
    )


class ValidTabs(SphinxPostTransform):
    """sphinx-design's labels of tabs have an attribute that HTML forbids."""

    default_priority = 201  # just after sphinx-design has made them

    def run(self, **kwargs):
        for label in self.document.findall(sd_tab_label):
            label.attributes.pop("aria_controls", None)


def setup(app):
    app.add_post_transform(ValidTabs)
    # Sphinx-Gallery runs the tutorials at this event with priority 10.
    app.connect("builder-inited", start, priority=6)
    app.connect("source-read", add_panels)
    return {"parallel_read_safe": False, "parallel_write_safe": True}
