"""From a figure of a tutorial to what the page shows.

A measured figure gets its passport, a table of its numbers, and links to them
as CSV and JSON. Its alt text is made from the numbers. Where all of them are
0, a sentence stands in place of an empty chart. Any other figure is a
drawing: its alt text is the figure's own name, ``plt.figure("...")``.
"""

import math
import re
from pathlib import Path

import pandas as pd
from sphinx.errors import ExtensionError
from sphinx.util import logging, rst

import style
import tutorial
from measurements import live, recording
from measurements.replay import Measured, Missing
from page import headlines

logger = logging.getLogger(__name__)


def scraped(session, gallery_conf):
    """Save the open figures and give the reST that shows them."""
    import matplotlib.pyplot as plt

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
            _keep_for_card(session, results[0], gallery_conf)
            parts.append(_measured(session, results, gallery_conf))
            continue
        if measured := _drawn_from(figure, known.values()):
            for axes in figure.axes:
                axes.grid(not axes.images)  # no lines across a map
            parts.append(_measured(session, [measured], gallery_conf, figure))
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
        parts.append(_images(session, figure, name, gallery_conf))
    for results in session.results.values():
        if isinstance(results[0], Missing):
            parts.append(_missing(results[0]))
            results[0] = None
    session.results = {
        name: results
        for name, results in session.results.items()
        if results[0] is not None
    }
    plt.close("all")
    return "\n".join(parts)


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


def _images(session, figure, alt, gallery_conf):
    """Save both forms of a figure; the page shows the one of its theme."""
    session.pictures += 1
    name = f"{tutorial.file_name(session.name)}_{session.pictures:03}"
    folder = _folder(gallery_conf["src_dir"], "images")
    parts = []
    for text, ending, theme in zip(
        style.svg(figure), ("", "_dark"), ("light", "dark"), strict=True
    ):
        image = folder / f"{name}{ending}.svg"
        image.write_text(text, encoding="utf-8")
        uri = image.relative_to(gallery_conf["src_dir"]).as_posix()
        parts.append(
            f".. image:: /{uri}\n"
            f"   :alt: {alt}\n"
            f"   :class: only-{theme} bp-figure\n\n"
        )
    return "\n" + "".join(parts)


def _keep_for_card(session, measured, gallery_conf):
    """The picture of a page's card: a backward pass beside PyTorch's, or else
    the first figure that was measured."""
    compares = headlines.compares(measured.unit, measured.rows)
    backward = "backward" in str(measured.args.get("mode"))
    rank = 1 + 2 * compares + backward
    if rank <= session.card or measured.reason or _nothing_drawn(measured):
        return
    session.card = rank
    srcdir, name = gallery_conf["src_dir"], session.name
    light, dark, said = card_pictures(srcdir, name)
    for text, path in zip(
        style.svg(measured.figure), (light, dark), strict=True
    ):
        path.write_text(text, encoding="utf-8")
    said.write_text(caption(measured), encoding="utf-8")
    picture, said = social_picture(srcdir, name)
    title = tutorial.title(name)
    picture.write_bytes(
        style.social(measured.figure, title, caption(measured))
    )
    said.write_text(f"{title}. {shown(measured)}", encoding="utf-8")


def card_pictures(srcdir, name):
    """The light and the dark picture of a tutorial's card, its caption."""
    path = _folder(srcdir, "images") / f"card_{tutorial.file_name(name)}"
    return [Path(f"{path}{end}") for end in (".svg", "_dark.svg", ".txt")]


def social_picture(srcdir, name):
    """The picture of a tutorial where it is shared, and what it shows."""
    path = _folder(srcdir, "images") / f"social_{tutorial.file_name(name)}"
    return Path(f"{path}.png"), Path(f"{path}.txt")


def _folder(srcdir, name):
    """Where all tutorials put files of a kind, under names of their own."""
    folder = Path(srcdir) / "tutorials" / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _missing(missing):
    return (
        "\n.. admonition:: No figure in this preview\n"
        "   :class: warning\n\n"
        f"   ``{missing.name}``: {missing.reason}\n\n"
    )


def _not_counted(measured):
    """In place of a figure whose numbers only ncu knows."""
    return (
        "\n.. admonition:: Not counted\n"
        "   :class: warning\n\n"
        f"   On {measured.environment['gpu']} this figure could not be "
        f"drawn: {rst.escape(measured.reason)}.\n\n"
    )


def _nothing_drawn(measured):
    """Whether a figure would be empty: no number, or all of them 0."""
    return not any(row["median"] for row in measured.rows)


def _all_zero(measured):
    """In place of a figure in which all lines lie on the axis."""
    names = ", ".join(measured.names.values())
    return (
        "\n.. admonition:: All numbers are 0\n"
        "   :class: note\n\n"
        f"   {rst.escape(measured.unit)}: 0 at every size, of all: "
        f"{rst.escape(names)}.\n\n"
    )


def _shown(session, measured, figure, gallery_conf):
    """The figure, or a sentence that says why there is none."""
    if measured.reason:
        return _not_counted(measured)
    if _nothing_drawn(measured):
        return _all_zero(measured)
    figure = figure or measured.figure
    return _images(session, figure, alt_text(measured), gallery_conf)


def _measured(session, results, gallery_conf, figure=None):
    """A measured figure with its passport; a tab for each GPU."""
    bodies = [
        _shown(session, measured, figure, gallery_conf)
        + passport(session.name, measured, gallery_conf)
        for measured in results
    ]
    if len(bodies) == 1:
        return "\n.. container:: measured\n" + _indent(bodies[0])
    tabs = "".join(
        f"\n.. tab-item:: {measured.environment['gpu']}\n"
        f"   :sync: {measured.gpu}\n" + _indent(body)
        for measured, body in zip(results, bodies, strict=True)
    )
    return (
        "\n.. container:: measured\n\n"
        "   .. tab-set::\n      :sync-group: gpu\n" + _indent(tabs, 6)
    )


def _indent(text, width=3):
    pad = " " * width
    return "\n" + "".join(
        pad + line if line.strip() else line
        for line in text.splitlines(keepends=True)
    )


def passport(name, measured, gallery_conf):
    """Where the numbers of a figure come from, and the numbers."""
    folder = _folder(gallery_conf["src_dir"], "raw")
    # Page, benchmark and GPU in the name: no two downloads share it.
    file = f"{tutorial.file_name(name)}.{measured.name}.{measured.gpu}.csv"
    (folder / file).write_text(_csv(measured), encoding="utf-8")
    store = live.STORE if measured.live else recording.STORE
    raw = recording.path_of(measured.gpu, name, store)
    raw = raw.relative_to(gallery_conf["src_dir"]).as_posix()
    env = measured.environment
    origin = (
        "Measured on this machine, by this build,"
        if measured.live
        else "Recorded"
    )
    checks = env["checks_passed"]
    checks = (
        f"{checks} GPU checks passed before recording."
        if isinstance(checks, int)
        else "GPU checks: not run in this build."
    )
    versions = (
        f"driver {env['driver']}, CUDA {env['cuda']}, "
        f"torch {env['torch']}, triton {env['triton']}, "
        f"Python {env['python']}"
        + (f", Nsight Compute {env['ncu']}" if "ncu" in env else "")
    )
    header, *rows = _table(measured)
    grid = "".join(
        f"   {','.join(_quoted(cell) for cell in row)}\n" for row in rows
    )
    return (
        ".. container:: passport\n\n"
        f"   **{rst.escape(caption(measured))}.** "
        f"{origin} {env['date']}. {checks}\n\n"
        f"   :Versions: {versions}\n"
        + "".join(
            f"   :GPUs: {', '.join(env['gpus'])}; linked by {env['link']}; "
            f"NCCL {rst.escape(env['nccl'])}\n"
            for _ in [env]
            if "gpus" in env
        )
        + f"   :Not counted: {rst.escape(measured.reason)}\n"
        * bool(measured.reason)
        + "".join(
            f"   :Counted: {rst.escape(counter)}\n"
            for counter in [measured.args.get("counter")]
            if counter
        )
        + f"   :Method: {measured.method}\n"
        f"\n   .. dropdown:: The numbers ({measured.unit})\n"
        "      :class-container: bp-numbers\n\n"
        f"      :Data: :download:`CSV </tutorials/raw/{file}>`\n"
        f"         :download:`JSON </{raw}>`\n\n"
        "      .. csv-table::\n"
        f"         :header: {','.join(_quoted(cell) for cell in header)}\n"
        "         :class: bp-table\n\n"
        + "".join(f"      {line}\n" for line in grid.splitlines())
        + "\n"
    )


def timed_with(text):
    """The versions of triton that the passports of a page's text name."""
    found = re.findall(r"^ +:Versions: .*\btriton ([^\s,]+)", text, re.M)
    return sorted(set(found))


def _quoted(cell):
    return '"' + str(cell).replace('"', '""') + '"'


def caption(measured):
    """What a figure shows of what: pass, sizes, type, and GPU."""
    words = circumstances(measured), measured.environment["gpu"]
    return ", ".join(filter(None, words))


def circumstances(measured):
    """Pass, sizes and types of a benchmark, in words."""
    args = dict(measured.args)
    mode = args.pop("mode", None)
    args.pop("counter", None)  # how it was counted, not what
    words = []
    if mode in headlines.PASSES:
        words = [f"{mode.capitalize()} pass"]
    elif mode:
        args = {"mode": mode} | args
    return ", ".join([*words, *headlines.said(args)])


def _csv(measured):
    names = [*measured.x_names, "provider", *recording.VALUES]
    table = pd.DataFrame(measured.rows, columns=names)
    return table.assign(unit=measured.unit).to_csv(index=False)


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
    return f"{shown(measured)} The table below has every number."


def shown(measured):
    """What the figure shows, in words made from its numbers."""
    table = _by_x(measured)
    xs = list(table)
    first, last = (", ".join(str(part) for part in x) for x in (xs[0], xs[-1]))
    args = circumstances(measured)
    lines = []
    for provider, name in measured.names.items():
        values = [
            table[x][provider]["median"]
            for x in xs
            if table[x][provider]["median"] is not None
        ]
        if values:
            lines.append(
                f"{name} from {number(min(values))} to {number(max(values))}"
            )
    return (
        f"Line plot of {measured.unit} against "
        f"{', '.join(measured.x_names)} from {first} to {last}"
        + (f" ({args})" if args else "")
        + f": {'; '.join(lines)}."
    )
