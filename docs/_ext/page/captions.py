"""What a measured figure says, in words made from its numbers."""

import math

from sphinx.locale import _

import words_later as words
from measurements import recording
from page import headlines
from translation import sentences
from translation.lines import close


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


def alt_text(measured):
    return sentences.joined(
        [shown(measured), _("The table below has every number.")]
    )


def shown(measured):
    """What the figure shows, in words made from its numbers."""
    table = by_x(measured)
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
    line = said % {
        "unit": words.named(measured.unit, _),
        "x": words.in_a_row(x_names(measured), _),
        "first": first,
        "last": last,
        "circumstances": args,
        "lines": words.said(words.listed(lines, words.SEMICOLON), _),
    }
    return close(line)


def x_names(measured):
    """What its sizes are called."""
    return [words.named(name, _) for name in measured.x_names]


def number(value):
    """A number as people read it: three digits, or whole when large."""
    if value is None:
        return "–"
    if value == 0 or (abs(value) >= 100 and not math.isinf(value)):
        return f"{value:,.0f}"
    if abs(value) < 0.001:
        return f"{value:.1e}"
    return f"{value:.3g}"


def by_x(measured):
    """The rows by x: {x: {provider: row}}, in the order of the recording."""
    table = {}
    for row in measured.rows:
        x = recording.x_of(row, measured.x_names)
        table.setdefault(x, {})[row["provider"]] = row
    return table
