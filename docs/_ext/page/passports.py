"""A figure on its page: with its passport, and a tab for each GPU.

A measured figure gets its passport, a table of its numbers, and links to them
as CSV and JSON. Its alt text is made from the numbers.
A passport of which only the subject is new leads to the one that says the
rest.
"""

from textwrap import indent

from sphinx.locale import _
from sphinx.util import rst

import tutorial
import words_later as words
from measurements import recording
from measurements.replay import Missing
from page import captions, figures


def say(app, docname, source):
    """Put the figures of a tutorial, in words, into its text."""
    name = docname.removeprefix("tutorials/")
    if name == docname:
        return

    said = {}  # by the passports of this page

    def measured(line):
        return with_passports(name, figures.saved(app.srcdir, line[1]), said)

    def drawing(line):
        return image(line[1], line[2])  # Sphinx translates it

    source[0] = figures.DRAWING.sub(
        drawing, figures.MEASURED.sub(measured, source[0])
    )


def image(name, alt):
    """Both forms of a picture; the page shows the one of its theme."""
    return "".join(
        f".. image:: /tutorials/images/{name}{ending}.svg\n"
        f"   :alt: {alt}\n"
        f"   :class: only-{theme} bp-figure\n\n"
        for ending, theme in (("", "light"), ("_dark", "dark"))
    )


def with_passports(name, results, said):
    """A measured figure with its passport; a tab for each GPU.

    The tabs of a page change together, and the choice holds on other pages:
    sphinx-design keeps it in the browser.
    """
    if isinstance(results[0], Missing):
        return _missing(results[0])
    bodies = [_shown(each) + passport(name, each, said) for each in results]
    bodies[1:] = [body + _printed(results[0]) for body in bodies[1:]]
    if len(bodies) == 1:
        return ".. container:: measured\n\n" + indent(bodies[0], "   ")
    tabs = "".join(
        f"\n.. tab-item:: {rst.escape(measured.environment['gpu'])}\n"
        f"   :sync: {measured.gpu}\n\n" + indent(body, "   ")
        for measured, body in zip(results, bodies, strict=True)
    )
    return (
        ".. container:: measured\n\n"
        "   .. tab-set::\n      :sync-group: gpu\n\n" + indent(tabs, "      ")
    )


def _printed(default):
    """What the choice of another GPU does not change on a page."""
    said = _("What the cells of this page print is of %(gpu)s.") % {
        "gpu": rst.escape(default.environment["gpu"])
    }
    return f".. rst-class:: bp-note\n\n{said}\n"


def _missing(missing):
    return _admonition(
        _("No figure in this preview"),
        "warning",
        f"``{missing.name}``: {rst.escape(missing.reason)}",
    )


def _not_counted(measured):
    """In place of a figure whose numbers only ncu knows."""
    said = _("On %(gpu)s this figure could not be drawn: %(reason)s.") % {
        "gpu": rst.escape(measured.environment["gpu"]),
        "reason": rst.escape(measured.reason),
    }
    return _admonition(_("Not counted"), "warning", said)


def _admonition(title, kind, text):
    return f"\n.. admonition:: {title}\n   :class: {kind}\n\n   {text}\n\n"


def _shown(measured):
    """The figure, or a sentence that says why there is none."""
    if measured.reason:
        return _not_counted(measured)
    return "\n" + image(measured.picture, captions.alt_text(measured))


def passport(name, measured, said):
    """Where the numbers of a figure come from, and the numbers.

    ``said`` has what earlier passports of the page say, and their anchors.
    """
    store = recording.BY_BUILD if measured.live else recording.STORE
    links = [
        f":download:`CSV </tutorials/raw/{figures.csv_name(name, measured)}>`",
        json_of(measured.gpu, name, store),
    ]
    caption = rst.escape(captions.caption(measured))
    facts = [*_facts(measured)]
    new = f"passport-{len(said) + 1}"
    anchor = said.setdefault((measured.gpu, *facts), new)
    if anchor == new:
        recorded, checked, *fields = facts
        # Translators: of each figure; the part in stars is bold.
        origin = _("**%(caption)s.** %(recorded)s %(checked)s") % {
            "caption": caption,
            "recorded": recorded,
            "checked": checked,
        }
        lines = [f"   :name: {anchor}", "", f"   {origin}", ""]
        lines += [f"   {field}" for field in fields]
    else:
        rest = _("Date, checks, versions and method as above.")
        # Translators: of each figure; the part in stars is bold.
        origin = _("**%(caption)s.** %(rest)s") % {
            "caption": caption,
            "rest": f"`{rest} <#{anchor}>`_",
        }
        lines = ["", f"   {origin}"]
    table = indent(numbers(measured, links), "   ")
    return "\n".join([".. container:: passport", *lines, "", table])


def _facts(measured):
    """All that a passport says but its subject and the numbers."""
    yield from when(measured.environment, measured.live)
    for name, value in circumstances(measured):
        yield f":{name}: {value}"


def json_of(gpu, name, store=recording.STORE, text="JSON"):
    """A link to a recording."""
    path = recording.path_of(gpu, name, store)
    path = path.relative_to(tutorial.ROOT / "docs").as_posix()
    return f":download:`{text} </{path}>`"


def numbers(measured, links):
    """The numbers of a figure, folded, with links to them as files."""
    header, *rows = (
        ",".join(_quoted(cell) for cell in row) for row in _table(measured)
    )
    unit = words.named(measured.unit, _)
    lines = [
        ".. dropdown:: " + _("The numbers (%(unit)s)") % {"unit": unit},
        "   :class-container: bp-numbers",
        "",
        # (gettext does not look into an f-string)
        "   :" + _("Data") + f": {links[0]}",
        *(f"      {link}" for link in links[1:]),
        "",
        "   .. csv-table::",
        f"      :header: {header}",
        "      :class: bp-table",
        "",
        *(f"      {row}" for row in rows),
        "",
        "",
    ]
    return "\n".join(lines)


def when(environment, live=False):
    """When something was measured, and what was checked before."""
    date = {"date": environment["date"]}
    if live:
        said = _("Measured on this machine, by this build, %(date)s.") % date
    else:
        said = _("Recorded %(date)s.") % date
    checks = environment["checks_passed"]
    if isinstance(checks, int):
        checked = _("%(count)s GPU checks passed before recording.") % {
            "count": checks
        }
    else:
        checked = _("GPU checks: not run in this build.")
    return said, checked


def circumstances(measured):
    """What the numbers depend on: a name and what it was, for each.

    Of what others may have sent, nothing is markup; the method is what the
    script's own docstring says.
    """
    env = {
        key: rst.escape(value)
        for key, value in measured.environment.items()
        if isinstance(value, str)
    }
    versions = [
        _("driver %(version)s") % {"version": env["driver"]},
        f"CUDA {env['cuda']}",
        f"torch {env['torch']}",
        f"triton {env['triton']}",
        f"Python {env['python']}",
    ]
    libraries = measured.environment.get("libraries", {})
    # Two lines may be of one library.
    versions += dict.fromkeys(
        rst.escape(libraries[provider])
        for provider in measured.names
        if provider in libraries
    )
    if "ncu" in env:
        versions.append(f"Nsight Compute {env['ncu']}")
    yield _("Versions"), words.in_a_row(versions, _)
    if gpus := measured.environment.get("gpus"):
        yield (
            _("GPUs"),
            _("%(gpus)s; linked by %(link)s; NCCL %(nccl)s")
            % {
                "gpus": words.in_a_row(map(rst.escape, gpus), _),
                "link": env["link"],
                "nccl": env["nccl"],
            },
        )
    if measured.reason:
        yield _("Not counted"), rst.escape(measured.reason)
    if counter := measured.args.get("counter"):
        yield _("Counted"), rst.escape(counter)
    yield _("Method"), _(measured.method)


def _quoted(cell):
    return '"' + str(cell).replace('"', '""') + '"'


def _table(measured):
    """The medians as a table of texts, a row for each x."""
    yield [*captions.x_names(measured), *measured.names.values()]
    for x, rows in captions.by_x(measured).items():
        yield [
            *x,
            *(captions.number(rows[p]["median"]) for p in measured.names),
        ]


def setup(app):
    # Behind what looks for the lines of figures.
    app.connect("source-read", say, priority=600)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
