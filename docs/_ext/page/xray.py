"""X-ray panels: what the compiler made of each kernel, on its page.

For each kernel that the file of a page declares a folded panel follows the
cell that defines it. It is made from the code on the page, compiled for GPUs
that the machine does not have, as the page's own wrapper launches it. The
panel is added to the text that Sphinx reads: script and notebook know nothing
of it.
"""

import hashlib
import html
import io
import os
import pickle
import re
import tokenize
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

import joblib
from sphinx.errors import ExtensionError
from sphinx.locale import _
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx_design.tabs import sd_tab_label

import said
import tutorial
from compiled import aot, declared, limits, sheets
from page import figures
from translation import of_page, sentences

# The disassembler starts once for each page and target: only for these.
SASS = (limits.DEFAULT,)
# The modules that make the sheets.
MADE_BY = (
    *sorted(Path(aot.__file__).parent.glob("*.py")),
    *(Path(each.__file__) for each in (said, tutorial)),
    Path(__file__),
)
MADE_OF = hashlib.sha256(
    b"".join(path.read_bytes() for path in MADE_BY)
).hexdigest()


class XRays:
    """The sheets of all tutorials, from the start of a build to its end."""

    def __init__(self):
        self.files = {}  # of each tutorial
        self.work = None  # what writes those that are missing

    def start(self, app):
        """Begin to compile what is not known while the tutorials run.

        What that is, is found before: Python 3.11 cannot always parse in two
        threads at once.
        """
        folder = tutorial.BUILD / "xray"
        self.files = {
            name: folder / f"{tutorial.file_name(name)}.{_key(script, name)}"
            for script in tutorial.scripts()
            if declared.kernels(name := tutorial.name_of(script))
        }
        thread = ThreadPoolExecutor(1)
        missing = [n for n, file in self.files.items() if not file.exists()]
        self.work = thread.submit(self.make, missing)
        thread.shutdown(wait=False)

    def make(self, names):
        """Write the sheets of tutorials."""
        for name, found in made(names).items():
            _write(self.files[name], found)

    def sheets(self, name):
        """The sheets of a tutorial; damaged ones are made again."""
        self.work.result()
        file = self.files[name]
        if not (found := _read(file)):
            self.make([name])
            found = _read(file)
        return sheets.on_page(name, found)

    def add_panels(self, app, docname, source):
        """Put the panels of a tutorial into its text."""
        stem = docname.removeprefix("tutorials/")
        if stem == docname or not (page := declared.kernels(stem)):
            return
        app.env.note_dependency(str(declared.file_of(stem)))
        try:
            found = self.sheets(stem)
        except (RuntimeError, SyntaxError) as error:
            raise ExtensionError(
                "a tutorial cannot be compiled for its X-ray, as "
                f"{declared.file_of(stem)} says: {error}"
            ) from None
        lines = source[0].splitlines()
        timed = figures.timed_with(app.srcdir, source[0])
        for name, kernel in page.kernels.items():
            look = of_page.said(app, docname, kernel.look)
            panel = Panel(
                *(app.srcdir, stem, page, name, look, found, timed, lines)
            )
            at = _after_cell(lines, name)
            if at is None:
                raise ExtensionError(
                    f"{declared.file_of(stem)}: tutorials/{stem}.py has no "
                    f"kernel {name}"
                )
            lines[at:at] = panel.text().splitlines()
        source[0] = "\n".join(lines) + "\n"


def made(names):
    """The sheets of tutorials, of each {(kernel, target, N): Sheet}."""
    found = {name: {} for name in names}
    if not names:
        return found
    missing = [
        (name, target, N, page.N[0] == N)
        for name in names
        for page in [declared.kernels(name)]
        for target, N in limits.shown(page)
    ]
    calls = [
        limits.call(
            *(name, declared.kernels(name), N, target),
            sass=first and target in SASS,
            last=True,
            then=sheets.full if first else sheets.brief,
        )
        for name, target, N, first in missing
    ]
    # One core is left to the tutorials, which run meanwhile.
    with aot.Compilers(max(1, len(os.sched_getaffinity(0)) - 1)) as compilers:
        launched = compilers.launches(calls)
    for (name, *shape, _first), results in zip(missing, launched, strict=True):
        for kernel, sheet in limits.by_name(results).items():
            found[name][kernel, *shape] = sheet
    return found


def _read(file):
    """The sheets that a file holds; none if it is missing or damaged."""
    try:
        return pickle.loads(file.read_bytes())
    except Exception:  # damaged bytes may raise any
        return {}


def _write(file, found):
    """Keep sheets, whole or not at all, in place of older ones."""
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_suffix(".draft")
    draft.write_bytes(pickle.dumps(found))
    os.replace(draft, file)
    for old in file.parent.glob(f"{file.stem}.*"):
        if old != file:
            old.unlink()


def _key(script, name):
    """A hash of everything that the sheets of a tutorial depend on."""
    text = script.read_text(encoding="utf-8")
    parts = [
        _code(text, MADE_OF).encode(),
        declared.file_of(name).read_bytes(),
    ]
    parts += [version("triton").encode(), version("torch").encode()]
    parts += [MADE_OF.encode()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


@joblib.Memory(tutorial.CACHE, verbose=0).cache
def _code(text, made_of):
    """The code of a script, with nothing in lines of comments. Their number
    stays: what is compiled names lines.

    Kept between builds, for each asks it of all scripts.
    """
    try:
        code = tutorial.packed(text)
    except SyntaxError:  # which is told where it is compiled
        return text
    lines = code.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        row, column = token.start
        if token.type == tokenize.COMMENT and not token.line[:column].strip():
            lines[row - 1] = ""
    return "\n".join(lines)


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

    def __init__(
        self, srcdir, stem, page, name, look, found, timed=(), lines=()
    ):
        self.folder = Path(srcdir) / "tutorials" / "xray"
        self.stem, self.page, self.name = stem, page, name
        self.look, self.found = look, found
        self.timed = timed  # by which versions of triton, the figures were
        self.lines = lines  # of the page

    def text(self):
        tabs = "".join(
            f".. tab-item:: {target}\n   :sync: {target}\n"
            + ("   :selected:\n" if target == limits.DEFAULT else "")
            + _indent(self.tab(target))
            for target in limits.SHOWN
        )
        body = (
            f"{self.look}\n\n{self.counted()}"
            "\n\n.. tab-set::\n   :sync-group: target\n" + _indent(tabs)
        )
        title = _("X-ray of ``%(kernel)s``") % {"kernel": self.name}
        return (
            f"\n.. dropdown:: {title}\n"
            "   :class-container: bp-xray\n" + _indent(body) + "\n"
        )

    def counted(self):
        """Of what the numbers are."""
        rows = _("%(M)s rows, %(dtype)s.") % {
            "M": self.page.M,
            "dtype": self.page.dtype,
        }
        counted = _(
            "Instructions are counted in the code, where a loop stands once."
        )
        return sentences.joined([rows, counted, self.versions()], "\n")

    def versions(self):
        """That the figures are not those of this code, if it is so."""
        if set(self.timed) <= {version("triton")}:
            return ""
        return _(
            "This is what triton %(version)s compiles; the figures of this "
            "page were timed with what triton %(others)s compiled."
        ) % {
            "version": version("triton"),
            "others": _said(said.listed(self.timed, said.AND)),
        }

    def tab(self, target):
        found = {}  # kernels for wide rows have the same columns at each N
        for shape, N in limits.shown(self.page):
            if shape == target:
                sheet = self.found[self.name, shape, N]
                found.setdefault(sheet.columns or N, sheet)
        columns, first = next(iter(found.items()))
        where = _("Where lines of the page went, at N = %(columns)s:") % {
            "columns": columns
        }
        ways = "\n".join(self.ways(first))
        return (
            f"{self.table(found)}{where}\n\n"
            f".. raw:: html\n{_indent(ways)}\n\n" + self.downloads(first)
        )

    def ways(self, sheet):
        """What became of a few lines of the page, level by level: HTML."""
        for line, levels in sheet.ways:
            line = html.escape(_with_its_comment(line, self.lines))
            yield f"<pre class='bp-way'>{line}</pre>"
            yield "<dl class='bp-levels'>"
            for key, parts in levels:
                name = _(sheets.CODES[key])
                yield f"<dt>{name}</dt><dd>{'<br>'.join(parts)}</dd>"
            yield "</dl>"

    def table(self, found):
        """What the compiler says, a column for each shape."""
        first = next(iter(found.values()))
        rows = [[aot.DEVICES[first.target][0], *(f"N = {N}" for N in found)]]
        rows += [
            [_(key), *(_said(sheet.numbers[key]) for sheet in found.values())]
            for key in first.numbers
        ]
        text = (
            ".. list-table::\n   :header-rows: 1\n   :stub-columns: 1\n"
            "   :class: bp-table\n\n"
        )
        for row in rows:
            for i, cell in enumerate(row):
                text += f"   {' ' if i else '*'} - {cell}\n"
        return text + "\n"

    def downloads(self, sheet):
        """Write the codes, with their marks; links to them."""
        self.folder.mkdir(parents=True, exist_ok=True)
        links = []
        for key, code in sheet.codes.items():
            page = tutorial.file_name(self.stem)
            file = f"{page}.{self.name}.{sheet.target}.{key}"
            (self.folder / file).write_text(code, encoding="utf-8")
            path = f"/tutorials/xray/{file}"
            links.append(f":download:`{_(sheets.CODES[key])} <{path}>`")
        code = _(
            "The whole code, with these marks and their lines: %(links)s."
        )
        return code % {"links": _said(said.listed(links))} + "\n"


def _said(value):
    return said.said(value, _)


def _with_its_comment(line, lines):
    """A line of the English script as a page has it."""
    code, hash_, _comment = line.partition("  # ")
    if not hash_:
        return line
    alike = (each.strip() for each in lines)
    return next((x for x in alike if x.startswith(code + hash_)), line)


def _indent(text, width=3):
    """A block under a directive."""
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
    xrays = XRays()
    app.add_post_transform(ValidTabs)
    # Sphinx-Gallery runs the tutorials at this event with priority 10.
    app.connect("builder-inited", xrays.start, priority=6)
    app.connect("source-read", xrays.add_panels)
    return {"parallel_read_safe": False, "parallel_write_safe": True}
