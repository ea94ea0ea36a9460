"""From a figure of a tutorial to what the page shows.

A measured figure gets its passport, a table of its numbers, and links to them
as CSV and JSON. Its alt text is made from the numbers. Where all of them are
0, a sentence stands in place of an empty chart. Any other figure is a
drawing: its alt text is the figure's own name, ``plt.figure("...")``.

When a cell has run, ``scraped`` saves pictures and numbers, and writes a line
for each figure. ``say`` puts the words in its place when Sphinx reads the
page: so the tutorials run once for all languages.
"""

import csv
import io
import json
import math
import re
from dataclasses import fields
from pathlib import Path

from sphinx.errors import ExtensionError
from sphinx.locale import _
from sphinx.util import logging, rst

import style
import tutorial
import words_later as words
from measurements import recording, replay
from measurements.replay import Measured, Missing
from page import headlines
from translation import sentences

# The line of a measured figure, with its file, and that of a drawing, with
# its picture and what it shows.
MEASURED = re.compile(r"^\.\. measured:: (\S+)$", re.M)
DRAWING = re.compile(r"^\.\. drawing:: (\S+) ?(.*)$", re.M)

logger = logging.getLogger(__name__)


def scraped(session, gallery_conf):
    """Save the open figures and give the lines that stand for them."""
    import matplotlib.pyplot as plt

    srcdir = gallery_conf["src_dir"]
    known = {
        id(results[0].figure): results
        for results in session.results.values()
        if isinstance(results[0], Measured)
    }
    # Tabs show the figures of the other GPUs.
    others = {id(m.figure) for results in known.values() for m in results[1:]}
    parts = []
    for number in plt.get_fignums():
        figure = plt.figure(number)
        if id(figure) in others:
            continue
        if results := known.get(id(figure)):
            _require_unchanged(session, results)
            _keep_for_card(session, results[0], srcdir)
            parts.append(_measured(session, results, srcdir))
            continue
        if measured := _drawn_from(figure, known.values()):
            for axes in figure.axes:
                axes.grid(not axes.images)  # no lines across a map
            parts.append(_measured(session, [measured], srcdir, figure))
            continue
        if session.timed_outside:
            raise ExtensionError(
                f"tutorials/{session.name}.py: a figure without a passport: "
                "something was timed outside triton.testing.perf_report, so "
                "nobody can tell where its numbers come from"
            )
        name = figure.get_label()
        if not name:
            logger.warning(
                "tutorials/%s.py: a figure without a description: name it, "
                "plt.figure('what the picture shows')",
                session.name,
            )
        picture = _picture(session, figure, srcdir)
        parts.append(f"\n.. drawing:: {picture} {name}\n\n")
    for results in session.results.values():
        if isinstance(results[0], Missing):
            parts.append(_saved(session, results, srcdir))
            results[0] = None
    session.results = {
        name: results
        for name, results in session.results.items()
        if results[0] is not None
    }
    plt.close("all")
    return "\n".join(parts)


def _require_unchanged(session, results):
    """A passport tells of what was measured, so nothing else may be shown."""
    for measured in results:
        if replay.contents(measured.figure) != measured.drawn:
            raise ExtensionError(
                f"tutorials/{session.name}.py: the figure of the benchmark "
                f"{measured.name}: found lines or words that were changed or "
                "added after it was measured, expected what the benchmark "
                "drew; draw a figure of your own, plt.figure('what it shows')"
            )


def _drawn_from(figure, known):
    """The benchmark whose numbers a figure of the tutorial shows, or None.

    Its picture (a heat map, say) must hold all of the benchmark's medians and
    no other number: a name proves nothing.
    """
    shown = {
        float(value)
        for axes in figure.axes
        for image in axes.get_images()
        for value in image.get_array().compressed()
    }
    for results in known:
        medians = {row["median"] for row in results[0].rows} - {None}
        if len(shown) > 1 and shown == medians:
            return results[0]
    return None


def _picture(session, figure, srcdir):
    """Save a figure; what its picture is called."""
    session.pictures += 1
    name = f"{tutorial.file_name(session.name)}_{session.pictures:03}"
    _save_picture(figure, srcdir, name)
    return name


def _save_picture(figure, srcdir, name):
    for path, text in zip(
        pictures(srcdir, name), style.svg(figure), strict=True
    ):
        path.write_text(text, encoding="utf-8")


def pictures(srcdir, name):
    """The light and the dark form of a picture."""
    folder = _folder(srcdir, "images")
    return [folder / f"{name}{end}.svg" for end in ("", "_dark")]


def _measured(session, results, srcdir, figure=None):
    """Save a measured figure, with the numbers of one GPU or of several."""
    for measured in results:
        measured.picture = (
            ""
            if measured.reason or _nothing_drawn(measured)
            else _picture(session, figure or measured.figure, srcdir)
        )
        file = _folder(srcdir, "raw") / _csv_name(session.name, measured)
        file.write_text(_csv(measured), encoding="utf-8")
    return _saved(session, results, srcdir)


def _saved(session, results, srcdir):
    session.figures += 1
    name = f"{tutorial.file_name(session.name)}_{session.figures:03}"
    save(srcdir, name, results)
    return f"\n.. measured:: {name}\n\n"


def save(srcdir, name, results):
    """Keep what a page says of a figure."""
    kept = [
        {
            each.name: getattr(one, each.name)
            for each in fields(one)
            if each.name not in ("figure", "drawn")
        }
        for one in results
    ]
    text = json.dumps(kept, indent=1, ensure_ascii=False)
    file_of(srcdir, name).write_text(text, encoding="utf-8")


def saved(srcdir, name):
    """The results that a page shows in a figure; one for each GPU."""
    kept = json.loads(file_of(srcdir, name).read_text(encoding="utf-8"))
    return [(Measured if "rows" in one else Missing)(**one) for one in kept]


def file_of(srcdir, name):
    return _folder(srcdir, "measured") / f"{name}.json"


def _keep_for_card(session, measured, srcdir):
    """The picture of a page's card: a backward pass beside PyTorch's, or else
    the first figure that was measured."""
    compares = headlines.compares(measured.unit, measured.rows)
    backward = "backward" in str(measured.args.get("mode"))
    rank = 1 + 2 * compares + backward
    if rank <= session.card or measured.reason or _nothing_drawn(measured):
        return
    session.card, name = rank, session.name
    measured.picture = f"card_{tutorial.file_name(name)}"
    _save_picture(measured.figure, srcdir, measured.picture)
    save(srcdir, measured.picture, [measured])
    social_picture(srcdir, name).write_bytes(
        style.social(measured.figure, tutorial.title(name), caption(measured))
    )


def of_card(srcdir, name):
    """The figure of a tutorial's card, or None."""
    card = f"card_{tutorial.file_name(name)}"
    if not file_of(srcdir, card).exists():
        return None
    (measured,) = saved(srcdir, card)
    return measured


def social_picture(srcdir, name):
    """The picture of a tutorial where it is shared."""
    folder = _folder(srcdir, "images")
    return folder / f"social_{tutorial.file_name(name)}.png"


def _folder(srcdir, name):
    """Where all tutorials put files of a kind, under names of their own."""
    folder = Path(srcdir) / "tutorials" / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def say(app, docname, source):
    """Put the figures of a tutorial, in words, into its text."""
    name = docname.removeprefix("tutorials/")
    if name == docname:
        return

    def measured(line):
        app.env.note_dependency(str(file_of(app.srcdir, line[1])))
        return _said(name, saved(app.srcdir, line[1]))

    def drawing(line):
        return _image(line[1], line[2])  # Sphinx translates it

    source[0] = DRAWING.sub(drawing, MEASURED.sub(measured, source[0]))


def _image(name, alt):
    """Both forms of a picture; the page shows the one of its theme."""
    return "".join(
        f".. image:: /tutorials/images/{name}{ending}.svg\n"
        f"   :alt: {alt}\n"
        f"   :class: only-{theme} bp-figure\n\n"
        for ending, theme in (("", "light"), ("_dark", "dark"))
    )


def _said(name, results):
    """A measured figure with its passport; a tab for each GPU."""
    if isinstance(results[0], Missing):
        return _missing(results[0])
    bodies = [_shown(each) + passport(name, each) for each in results]
    if len(bodies) == 1:
        return ".. container:: measured\n" + _indent(bodies[0])
    tabs = "".join(
        f"\n.. tab-item:: {rst.escape(measured.environment['gpu'])}\n"
        f"   :sync: {measured.gpu}\n" + _indent(body)
        for measured, body in zip(results, bodies, strict=True)
    )
    return (
        ".. container:: measured\n\n"
        "   .. tab-set::\n      :sync-group: gpu\n" + _indent(tabs, 6)
    )


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


def _nothing_drawn(measured):
    """Whether a figure would be empty: no number, or all of them 0."""
    return not any(row["median"] for row in measured.rows)


def _all_zero(measured):
    """In place of a figure in which all lines lie on the axis."""
    said = _("%(unit)s: 0 at every size, of all: %(names)s.") % {
        "unit": rst.escape(measured.unit),
        "names": rst.escape(words.in_a_row(measured.names.values(), _)),
    }
    return _admonition(_("All numbers are 0"), "note", said)


def _admonition(title, kind, text):
    return f"\n.. admonition:: {title}\n   :class: {kind}\n\n   {text}\n\n"


def _shown(measured):
    """The figure, or a sentence that says why there is none."""
    if measured.reason:
        return _not_counted(measured)
    if _nothing_drawn(measured):
        return _all_zero(measured)
    return "\n" + _image(measured.picture, alt_text(measured))


def _indent(text, width=3):
    pad = " " * width
    return "\n" + "".join(
        pad + line if line.strip() else line
        for line in text.splitlines(keepends=True)
    )


def passport(name, measured):
    """Where the numbers of a figure come from, and the numbers."""
    store = recording.BY_BUILD if measured.live else recording.STORE
    raw = recording.path_of(measured.gpu, name, store)
    raw = raw.relative_to(tutorial.ROOT / "docs").as_posix()
    file = _csv_name(name, measured)
    header, *rows = (
        ",".join(_quoted(cell) for cell in row) for row in _table(measured)
    )
    lines = [
        ".. container:: passport",
        "",
        f"   {_origin(measured)}",
        "",
        *(f"   :{key}: {said}" for key, said in _circumstances(measured)),
        "",
        "   .. dropdown:: "
        + _("The numbers (%(unit)s)") % {"unit": measured.unit},
        "      :class-container: bp-numbers",
        "",
        # (gettext does not look into an f-string)
        "      :" + _("Data") + f": :download:`CSV </tutorials/raw/{file}>`",
        f"         :download:`JSON </{raw}>`",
        "",
        "      .. csv-table::",
        f"         :header: {header}",
        "         :class: bp-table",
        "",
        *(f"         {row}" for row in rows),
        "",
        "",
    ]
    return "\n".join(lines)


def _origin(measured):
    """What was measured, when, and what was checked before."""
    date = {"date": measured.environment["date"]}
    if measured.live:
        said = _("Measured on this machine, by this build, %(date)s.") % date
    else:
        said = _("Recorded %(date)s.") % date
    checks = measured.environment["checks_passed"]
    if isinstance(checks, int):
        checked = _("%(count)s GPU checks passed before recording.") % {
            "count": checks
        }
    else:
        checked = _("GPU checks: not run in this build.")
    # Translators: of each figure; the part in stars is bold.
    return _("**%(caption)s.** %(recorded)s %(checked)s") % {
        "caption": rst.escape(caption(measured)),
        "recorded": said,
        "checked": checked,
    }


def _circumstances(measured):
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


def timed_with(srcdir, text):
    """The versions of triton that the passports of a page's text name."""
    return sorted(
        {
            each.environment["triton"]
            for name in MEASURED.findall(text)
            for each in saved(srcdir, name)
            if isinstance(each, Measured)
        }
    )


def _quoted(cell):
    return '"' + str(cell).replace('"', '""') + '"'


def caption(measured):
    """What a figure shows of what: pass, sizes, type, and GPU."""
    parts = circumstances(measured), measured.environment["gpu"]
    return words.in_a_row(filter(None, parts), _)


def circumstances(measured):
    """Pass, sizes and types of a benchmark, in words."""
    args = dict(measured.args)
    mode = args.pop("mode", None)
    args.pop("counter", None)  # how it was counted, not what
    passes = {
        "forward": _("Forward pass"),
        "backward": _("Backward pass"),
        "forward and backward": _("Forward and backward pass"),
    }
    parts = []
    if mode in passes:
        parts = [passes[mode]]
    elif mode:
        args = {"mode": mode} | args
    return words.in_a_row([*parts, *headlines.said(args)], _)


def _csv_name(name, measured):
    # Page, benchmark and GPU in the name: no two downloads share it.
    return f"{tutorial.file_name(name)}.{measured.name}.{measured.gpu}.csv"


def _csv(measured):
    names = [*measured.x_names, "provider", *recording.VALUES]
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow([*names, "unit"])
    for row in measured.rows:
        table.writerow([*map(row.get, names), measured.unit])
    return text.getvalue()


def _by_x(measured):
    """The rows by x: {x: {provider: row}}, in the order of the recording."""
    table = {}
    for row in measured.rows:
        x = tuple(row[name] for name in measured.x_names)
        table.setdefault(x, {})[row["provider"]] = row
    return table


def _table(measured):
    """The medians as a table of texts, a row for each x."""
    yield [*measured.x_names, *measured.names.values()]
    for x, rows in _by_x(measured).items():
        yield [
            *x,
            *(number(rows[p]["median"]) for p in measured.names),
        ]


def number(value):
    """A number as people read it: three digits, or whole when large."""
    if value is None:
        return "–"
    if value == 0 or (abs(value) >= 100 and not math.isinf(value)):
        return f"{value:,.0f}"
    if abs(value) < 0.001:
        return f"{value:.1e}"
    return f"{value:.3g}"


def alt_text(measured):
    return sentences.joined(
        [shown(measured), _("The table below has every number.")]
    )


def shown(measured):
    """What the figure shows, in words made from its numbers."""
    table = _by_x(measured)
    xs = list(table)
    first, last = (words.in_a_row(map(str, x), _) for x in (xs[0], xs[-1]))
    lines = []
    for provider, name in measured.names.items():
        values = [
            table[x][provider]["median"]
            for x in xs
            if table[x][provider]["median"] is not None
        ]
        if values:
            least, most = number(min(values)), number(max(values))
            lines.append(
                _("%(name)s from %(least)s to %(most)s")
                % {"name": name, "least": least, "most": most}
            )
    args = circumstances(measured)
    said = (
        _(
            "Line plot of %(unit)s against %(x)s from %(first)s to %(last)s "
            "(%(circumstances)s): %(lines)s."
        )
        if args
        else _(
            "Line plot of %(unit)s against %(x)s from %(first)s to %(last)s: "
            "%(lines)s."
        )
    )
    return said % {
        "unit": measured.unit,
        "x": words.in_a_row(measured.x_names, _),
        "first": first,
        "last": last,
        "circumstances": args,
        "lines": words.said(words.listed(lines, words.SEMICOLON), _),
    }


def setup(app):
    # Behind what looks for the lines of figures.
    app.connect("source-read", say, priority=600)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
