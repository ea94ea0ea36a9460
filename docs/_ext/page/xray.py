"""X-ray panels: what the compiler made of each kernel, on its page.

For each kernel that the file of a page declares a folded panel follows the
cell that defines it. It is made from the code on the page, compiled for GPUs
that the machine does not have, as the page's own wrapper launches it. The
panel is added to the text that Sphinx reads: script and notebook know nothing
of it.
"""

import html
import os
import re
from importlib.metadata import version
from textwrap import indent

from sphinx.errors import ExtensionError
from sphinx.locale import _
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx_design.tabs import sd_tab_label

import tutorial
import words_later
from compiled import aot, declared, kept, limits
from compiled.occupancy import occupancy
from languages import CURRENT, ENGLISH
from page import figures
from translation import catalogs, messages, sentences
from words_later import AND, N_

# What the levels of code are called.
CODES = {
    "ttir": "Triton IR",
    "ttgir": "GPU IR",
    "ptx": "PTX",
    "sass": "SASS",
    "amdgcn": N_("AMD assembly"),
}


class Compiling:
    """What the English build compiles while the tutorials run."""

    def __init__(self):
        self.pages = {}  # name -> pairs of a call and its result to come
        self.compilers = None

    def start(self, app):
        """Begin with the kernels of pages that have changed."""
        if CURRENT is not ENGLISH:
            return
        names = map(tutorial.name_of, tutorial.scripts())
        stale = [n for n in names if declared.kernels(n) and not kept.fresh(n)]
        if not stale:
            return
        try:
            tutorial.KERNELS.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ExtensionError(
                "There is no place for compiled kernels; name another as "
                f"TRITON_CACHE_DIR: {error}"
            ) from None
        # One core is left to the tutorials.
        cores = len(os.sched_getaffinity(0)) - 1
        self.compilers = aot.Compilers(max(1, cores))
        self.pages = {
            name: [
                (call, self.compilers.begin(call)) for call in kept.calls(name)
            ]
            for name in stale
        }

    def finish(self, app):
        """Keep what came of it."""
        if not self.compilers:
            return
        try:
            for name, begun in self.pages.items():
                self.keep(name, begun)
        finally:
            self.compilers.end()

    def keep(self, name, begun):
        found = []
        for call, result in begun:
            try:
                found.append((call, limits.by_name(result.result())))
            except (RuntimeError, SyntaxError) as error:
                if call.target == limits.SMALLEST:
                    continue  # the page says so
                raise ExtensionError(
                    "a tutorial cannot be compiled for its X-ray, as "
                    f"{declared.place(name)} says: {error}"
                ) from None
        try:
            kept.write(name, found)
        except LookupError as error:
            raise ExtensionError(str(error)) from None


def add_panels(app, docname, source):
    """Put the panels of a tutorial into its text."""
    name = docname.removeprefix("tutorials/")
    if name == docname or not (page := declared.kernels(name)):
        return
    found = kept.read(name)
    lines = source[0].splitlines()
    timed = figures.timed_with(app.srcdir, source[0])
    # Sphinx translates prose; not the lines of code that a panel shows.
    code = messages.translated(tutorial.source(name), catalogs.lookup(docname))
    for kernel, entry in page.kernels.items():
        panel = Panel(page, kernel, entry.look, found, timed, code)
        at = _after_cell(lines, kernel)
        if at is None:
            raise ExtensionError(
                f"{declared.place(name)}: tutorials/{name}.py has no kernel "
                f"{kernel}"
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


def numbers(sheet):
    """What a panel says of a kernel, in pairs of name and value."""
    _name, multiprocessors, _capability = aot.DEVICES[sheet.target]
    warps, most, bounds = occupancy(
        *(sheet.target, sheet.registers, sheet.shared, sheet.warps),
        (sheet.programs, multiprocessors),
    )
    count = {kind: 0 for kind, _bytes, _n in sheet.counts}
    for kind, _bytes, n in sheet.counts:
        count[kind] += n
    programs = {"programs": f"{sheet.programs:,}", "warps": sheet.warps}
    shared = {"count": f"{sheet.shared:,}"}
    atomics = count.get("atomic", 0) + count.get("release", 0)
    none = _("none")
    yield _("Compiled by"), sheet.compiler
    yield _("Programs"), _("%(programs)s × %(warps)s warps") % programs
    yield _("Registers of a thread"), sheet.registers
    yield _("Spilled bytes of a thread"), sheet.spills
    yield _("Shared memory"), _("%(count)s bytes") % shared
    yield _("Stages asked for"), sheet.stages
    yield _("Global loads"), widths(sheet, "load") or none
    yield _("Global stores"), widths(sheet, "store") or none
    yield _("Asynchronous copies"), widths(sheet, "copy") or none
    yield _("Shuffles"), count.get("shuffle") or none
    yield _("Barriers"), count.get("barrier") or none
    yield _("Atomics"), atomics or none
    at_a_time = {"warps": warps, "most": most}
    if not bounds:
        yield _("Warps at a time"), _("%(warps)s of %(most)s") % at_a_time
        return
    at_a_time["limits"] = _listed([_(each) for each in bounds], AND)
    yield (
        _("Warps at a time"),
        _("%(warps)s of %(most)s, limited by %(limits)s") % at_a_time,
    )


def label(target):
    """A GPU and what its compiler calls it: ``A100 · sm_80``."""
    model = aot.DEVICES[target][0].split()[-1]
    return f"{model} · {target}"


def widths(sheet, kind):
    """Instructions by width: ``12 × 16 bytes, 2 × 4 bytes``."""
    return _listed(
        [
            _("%(count)s × %(bytes)s bytes") % {"count": n, "bytes": bytes}
            for which, bytes, n in reversed(sheet.counts)
            if which == kind
        ]
    )


def _listed(parts, how=words_later.COMMA):
    return words_later.said(words_later.listed(parts, how) or "", _)


class Panel:
    """The panel of one kernel, as reStructuredText."""

    def __init__(self, page, name, look, found, timed=(), code=""):
        self.page, self.name, self.look, self.found = page, name, look, found
        self.timed = timed  # by which versions of triton, the figures were
        self.lines = code.splitlines()  # in the language of the page

    def text(self):
        tabs = "".join(
            f".. tab-item:: {label(target)}\n   :sync: {target}\n"
            + ("   :selected:\n" if target == limits.DEFAULT else "")
            + f"\n{indent(self.tab(target), '   ')}"
            for target in limits.SHOWN
            if self.name in limits.kernels_for(target, self.page)
        )
        body = (
            f"{self.look}\n\n{self.counted()}"
            "\n\n.. tab-set::\n   :sync-group: target\n\n"
            + indent(tabs, "   ")
        )
        title = _("X-ray of ``%(kernel)s``") % {"kernel": self.name}
        return (
            f"\n.. dropdown:: {title}\n"
            "   :class-container: bp-xray\n\n" + indent(body, "   ") + "\n"
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
            "others": _listed(self.timed, AND),
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
            ".. raw:: html\n\n"
            + indent(ways, "   ")
            + "\n\n"
            + self.downloads(first)
        )

    def ways(self, sheet):
        """What became of a few lines of the page, level by level: HTML."""
        for line, levels in sheet.ways:
            line = html.escape(_with_its_comment(line, self.lines))
            yield f"<pre class='bp-way'>{line}</pre>"
            yield "<dl class='bp-levels'>"
            for key, parts in levels:
                yield f"<dt>{_(CODES[key])}</dt><dd>{'<br>'.join(parts)}</dd>"
            yield "</dl>"

    def table(self, found):
        """What the compiler says, a column for each shape."""
        first = next(iter(found.values()))
        columns = [list(numbers(sheet)) for sheet in found.values()]
        rows = [[aot.DEVICES[first.target][0], *(f"N = {N}" for N in found)]]
        for row in zip(*columns, strict=True):
            name, _value = row[0]
            rows.append([name, *(value for _name, value in row)])
        text = (
            ".. list-table::\n   :header-rows: 1\n   :stub-columns: 1\n"
            "   :class: bp-table\n\n"
        )
        for row in rows:
            for i, cell in enumerate(row):
                text += f"   {' ' if i else '*'} - {cell}\n"
        return text + "\n"

    def downloads(self, sheet):
        """Links to the codes, of which all languages have the same."""
        links = []
        for key, file in sheet.codes.items():
            path = f"/tutorials/xray/{file}"
            links.append(f":download:`{_(CODES[key])} <{path}>`")
        code = _(
            "The whole code, with these marks and their lines: %(links)s."
        )
        return code % {"links": _listed(links)} + "\n"


def _with_its_comment(line, lines):
    """A line of the English script as a page has it."""
    code, hash_, _comment = line.partition("  # ")
    if not hash_:
        return line
    alike = (each.strip() for each in lines)
    return next((x for x in alike if x.startswith(code + hash_)), line)


class ValidTabs(SphinxPostTransform):
    """sphinx-design's labels of tabs have an attribute that HTML forbids."""

    default_priority = 201  # just after sphinx-design has made them

    def run(self, **kwargs):
        for label in self.document.findall(sd_tab_label):
            label.attributes.pop("aria_controls", None)


def setup(app):
    compiling = Compiling()
    app.add_post_transform(ValidTabs)
    # Sphinx-Gallery runs the tutorials at this event with priority 10.
    app.connect("builder-inited", compiling.start, priority=6)
    app.connect("builder-inited", compiling.finish, priority=900)
    app.connect("source-read", add_panels)
    return {"parallel_read_safe": False, "parallel_write_safe": True}
