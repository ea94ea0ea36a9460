"""From a cell that has run to files: pictures, numbers, and a line for each.

A figure that a benchmark has measured gets a line with the file of its
numbers, as page/passports.py shows them. Any other figure is a drawing: its
alt text is the figure's own name, ``plt.figure("...")``.

The words come when Sphinx reads the page: so the tutorials run once for all
languages.
"""

import csv
import io
import json
import re
from dataclasses import fields
from pathlib import Path

from sphinx.errors import ExtensionError
from sphinx.util import logging

import style
import tutorial
from measurements import recording
from measurements.replay import Measured, Missing
from page import captions, headlines

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
            parts.append(_measured(session, results, srcdir))
            _keep_for_card(session, results[0], srcdir)
        elif measured := _drawn_from(figure, known.values()):
            for axes in figure.axes:
                axes.grid(not axes.images)  # no lines across a map
            drawn = style.svg(figure)
            parts.append(_measured(session, [measured], srcdir, drawn))
        else:
            parts.append(_drawing(session, figure, srcdir))
    for name, results in list(session.results.items()):
        if isinstance(results[0], Missing):
            parts.append(_saved(session, results, srcdir))
            del session.results[name]
    plt.close("all")
    return "\n".join(parts)


def _drawing(session, figure, srcdir):
    """Save a figure that shows no measured number."""
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
    picture = _picture(session, style.svg(figure), srcdir)
    return f"\n.. drawing:: {picture} {name}\n\n"


def _require_unchanged(session, results):
    """A passport tells of what was measured, so nothing else may be shown."""
    for measured in results:
        if style.svg(measured.figure) != measured.drawn:
            raise ExtensionError(
                f"tutorials/{session.name}.py: the figure of the benchmark "
                f"{measured.name}: found a figure that was changed after it "
                "was measured, expected what the benchmark drew; draw a "
                "figure of your own, plt.figure('what it shows')"
            )


def _drawn_from(figure, known):
    """The benchmark whose numbers a figure of the tutorial shows, or None.

    Its picture, a heat map or bars, must hold all of the benchmark's medians
    and no other number: a name proves nothing.
    """
    shown = {
        _nine_digits(number)
        for axes in figure.axes
        for number in _numbers(axes)
    }
    for results in known:
        medians = {row["median"] for row in results[0].rows} - {None}
        if len(shown) > 1 and shown == set(map(_nine_digits, medians)):
            return results[0]
    return None


def _nine_digits(number):
    """matplotlib keeps the ends of a bar, and rounds its length."""
    return f"{number:.9g}"


def _numbers(axes):
    """The numbers that maps and bars show."""
    for image in axes.get_images():
        yield from map(float, image.get_array().compressed())
    for bars in axes.containers:
        sideways = getattr(bars, "orientation", None) == "horizontal"
        for bar in bars.patches if hasattr(bars, "patches") else ():
            yield float(bar.get_width() if sideways else bar.get_height())


def _picture(session, drawn, srcdir):
    """Save the two forms of a figure; what its picture is called."""
    session.pictures += 1
    name = f"{tutorial.file_name(session.name)}_{session.pictures:03}"
    _save_picture(drawn, srcdir, name)
    return name


def _save_picture(drawn, srcdir, name):
    for path, text in zip(pictures(srcdir, name), drawn, strict=True):
        path.write_text(text, encoding="utf-8")


def pictures(srcdir, name):
    """The light and the dark form of a picture."""
    folder = _folder(srcdir, "images")
    return [folder / f"{name}{end}.svg" for end in ("", "_dark")]


def _measured(session, results, srcdir, drawn=None):
    """Save a measured figure, with the numbers of one GPU or of several."""
    for measured in results:
        measured.picture = (
            ""
            if measured.reason
            else _picture(session, drawn or measured.drawn, srcdir)
        )
        file = _folder(srcdir, "raw") / csv_name(session.name, measured)
        file.write_text(_csv(measured), encoding="utf-8")
    return _saved(session, results, srcdir)


def _saved(session, results, srcdir):
    session.figures += 1
    name = f"{tutorial.file_name(session.name)}_{session.figures:03}"
    save(srcdir, name, results)
    return f"\n.. measured:: {name}\n\n"


def save(srcdir, name, results):
    """Keep what a page says of a figure."""
    file_of(srcdir, name).write_text(text_of(results), encoding="utf-8")


def text_of(results):
    """What is kept of a figure."""
    kept = [
        {
            each.name: getattr(one, each.name)
            for each in fields(one)
            if each.name not in ("figure", "drawn")
        }
        for one in results
    ]
    return json.dumps(kept, indent=1, ensure_ascii=False)


def saved(srcdir, name):
    """The results that a page shows in a figure; one for each GPU."""
    kept = json.loads(file_of(srcdir, name).read_text(encoding="utf-8"))
    return [(Measured if "rows" in one else Missing)(**one) for one in kept]


def file_of(srcdir, name):
    return _folder(srcdir, "measured") / f"{name}.json"


def _plot_of_card(session):
    """The benchmark whose figure a page's card has: the first of a backward
    pass beside PyTorch's, or else the first of the most that there is. One
    with a single size has no lines to show."""
    data = session.recordings[session.default_gpu]

    def rank(plot):
        its = data["benchmarks"][plot]
        compares = headlines.compares(its["unit"], its["rows"])
        backward = "backward" in str(its["args"].get("mode"))
        sizes, _ = recording.grid(its)
        return "reason" not in its, len(sizes) > 1, 2 * compares + backward

    return max(data["benchmarks"], key=rank)


def _keep_for_card(session, measured, srcdir):
    """The pictures of a page's card: smaller forms of one of its figures,
    which must have been saved before."""
    if measured.reason or measured.name != _plot_of_card(session):
        return
    name = session.name
    social_picture(srcdir, name).write_bytes(
        style.social(
            measured.figure, tutorial.title(name), captions.caption(measured)
        )
    )
    measured.picture = f"card_{tutorial.file_name(name)}"
    style.for_a_card(measured.figure)
    _save_picture(style.svg(measured.figure), srcdir, measured.picture)
    save(srcdir, measured.picture, [measured])
    style.outlined(measured.figure)
    _save_picture(style.svg(measured.figure), srcdir, outline(name))


def outline(name):
    """What the smallest picture of a tutorial is called."""
    return f"outline_{tutorial.file_name(name)}"


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


def of_page(srcdir, name):
    """All that a tutorial shows of what was measured, on all GPUs."""
    page = Path(srcdir, "tutorials", f"{name}.rst")
    return measured_in(srcdir, page.read_text(encoding="utf-8"))


def measured_in(srcdir, text):
    """The same of the text of a page."""
    return [
        each
        for name in MEASURED.findall(text)
        for each in saved(srcdir, name)
        if isinstance(each, Measured)
    ]


def timed_with(srcdir, text):
    """The versions of triton that the passports of a page's text name."""
    found = measured_in(srcdir, text)
    return sorted({each.environment["triton"] for each in found})


def csv_name(name, measured):
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
