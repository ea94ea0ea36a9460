"""From a figure of a tutorial to what the page shows.

A measured figure gets its passport, a table of its numbers, and links to them
as CSV and JSON. Its alt text is made from the numbers. Any other figure is a
drawing: its alt text is the figure's own name, ``plt.figure("...")``.
"""

import csv
import io
import json
import math
from pathlib import Path

from sphinx.errors import ExtensionError
from sphinx.util import logging

import style
from measurements import recording
from measurements.replay import Measured, Missing
from tutorial import file_name

logger = logging.getLogger(__name__)


def scraped(session, gallery_conf):
    """Save the open figures and give the reST that shows them."""
    import matplotlib.pyplot as plt

    known = {
        name: results
        for name, results in session.results.items()
        if isinstance(results[0], Measured)
    }
    parts, done = [], set()
    for number in plt.get_fignums():
        figure = plt.figure(number)
        name = figure.get_label()
        if name in known:
            if all(measured.figure is not figure for measured in known[name]):
                # drawn by the tutorial from the numbers of that benchmark
                for axes in figure.axes:
                    axes.grid(not axes.images)  # no lines across a map
                parts.append(
                    _measured([known[name][0]], session, gallery_conf, figure)
                )
            elif name not in done:
                done.add(name)
                _keep_for_card(session, known[name][0], gallery_conf)
                parts.append(_measured(known[name], session, gallery_conf))
            continue
        if session.timed_outside:
            raise ExtensionError(
                f"tutorials/{session.stem}.py: a figure without a passport: "
                "something was timed outside triton.testing.perf_report, so "
                "nobody can tell where its numbers come from"
            )
        if not name:
            logger.warning(
                "tutorials/%s.py: a figure without a description: name it, "
                "plt.figure('what the picture shows')",
                session.stem,
            )
        parts.append(_images(figure, name, session, gallery_conf))
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


def _images(figure, alt, session, gallery_conf):
    """Save both forms of a figure; the page shows the one of its theme."""
    session.pictures += 1
    name = f"{file_name(session.stem)}_{session.pictures:03}"
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
    """The first speed of a backward pass is the picture of the card."""
    if measured.unit != "GB/s" or measured.args.get("mode") != "backward":
        return
    if session.has_card:
        return
    session.has_card = True
    for text, path in zip(
        style.svg(measured.figure),
        card_pictures(gallery_conf["src_dir"], session.stem),
        strict=True,
    ):
        path.write_text(text, encoding="utf-8")


def card_pictures(srcdir, stem):
    """The light and the dark picture of a tutorial's card."""
    folder = _folder(srcdir, "images")
    name = f"card_{file_name(stem)}"
    return folder / f"{name}.svg", folder / f"{name}_dark.svg"


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


def _measured(results, session, gallery_conf, figure=None):
    """A measured figure with its passport; a tab for each GPU."""
    bodies = [
        _images(
            figure or measured.figure,
            alt_text(measured),
            session,
            gallery_conf,
        )
        + passport(measured, session.stem, gallery_conf)
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


def passport(measured, stem, gallery_conf):
    """Where the numbers of a figure come from, and the numbers."""
    folder = _folder(gallery_conf["src_dir"], "raw")
    # Page, benchmark and GPU in the name: no two downloads share it.
    name = f"{file_name(stem)}.{measured.name}.{measured.gpu}.csv"
    table = folder / name
    table.write_text(_csv(measured), encoding="utf-8")
    if measured.live:
        raw = folder / f"{file_name(stem)}.live.json"
        _add_live(raw, stem, measured)
        raw = f"/tutorials/raw/{raw.name}"
    else:
        raw = f"/measurements/{measured.gpu}/{stem}.json"
    env = measured.environment
    origin = (
        "Measured on this machine, by this build."
        if measured.live
        else "Recorded."
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
    )
    header, *rows = _table(measured)
    grid = "".join(
        f"   {','.join(_quoted(cell) for cell in row)}\n" for row in rows
    )
    return (
        ".. container:: passport\n\n"
        f"   **{origin}** {env['gpu']}, {env['date']}. {checks}\n\n"
        f"   :Versions: {versions}\n"
        f"   :Method: {measured.method}\n"
        f"   :Data: :download:`CSV </tutorials/raw/{table.name}>`\n"
        f"      :download:`JSON <{raw}>`\n\n"
        f"   .. dropdown:: The numbers ({measured.unit})\n"
        "      :class-container: bp-numbers\n\n"
        "      .. csv-table::\n"
        f"         :header: {','.join(_quoted(cell) for cell in header)}\n"
        "         :class: bp-table\n\n"
        + "".join(f"      {line}\n" for line in grid.splitlines())
        + "\n"
    )


def _quoted(cell):
    return '"' + str(cell).replace('"', '""') + '"'


def _add_live(path, stem, measured):
    """Keep the numbers of a live build in the format of a recording."""
    data = {
        "environment": measured.environment,
        "code": recording.code_hash(recording.TUTORIALS / f"{stem}.py"),
        "benchmarks": {},
    }
    if path.exists():
        old = json.loads(path.read_text(encoding="utf-8"))
        if old["code"] == data["code"]:
            data["benchmarks"] = old["benchmarks"]
    data["benchmarks"][measured.name] = {
        "unit": measured.unit,
        "args": measured.args,
        "method": measured.method,
        "rows": measured.rows,
    }
    path.write_text(recording.dump(data), encoding="utf-8")


def _csv(measured):
    out = io.StringIO()
    names = [*measured.x_names, "provider", *recording.VALUES]
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*names, "unit"])
    for row in measured.rows:
        writer.writerow([*(row[name] for name in names), measured.unit])
    return out.getvalue()


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
    """What the figure shows, in words made from its numbers."""
    table = _by_x(measured)
    xs = list(table)
    first, last = (", ".join(str(part) for part in x) for x in (xs[0], xs[-1]))
    args = ", ".join(f"{k} = {v}" for k, v in measured.args.items())
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
        + f": {'; '.join(lines)}. The table below has every number."
    )
