"""How far the runs of a point lie apart, and how far is too far to record.

A disturbed host gives numbers that say nothing: its quantiles lie far apart.
Asked are times and speeds alone. What ncu counts has no quantiles, errors and
wrong results may be anything from 0 on, and the low and high of other figures
are no quantiles of a time.
"""

from measurements import recording

UNITS = "µs", "GB/s"
MOST = 0.15
TRIES = 3  # again, before a page is refused


def of(row):
    """(high - low) / median of a point."""
    if not row["median"]:  # a provider that cannot do this size
        return 0
    return (row["high"] - row["low"]) / row["median"]


def wide(measured):
    """The points of a benchmark that lie too far apart."""
    if measured["unit"] not in UNITS or "counter" in measured["args"]:
        return []
    return [row for row in measured["rows"] if of(row) > MOST]


def quiet(measured):
    """The points of all sizes at which none does: those that a figure
    compares are measured together."""
    names = measured["x_names"]
    disturbed = {recording.x_of(row, names) for row in wide(measured)}
    return [
        row
        for row in measured["rows"]
        if recording.x_of(row, names) not in disturbed
    ]


def said(plot, measured):
    """The widest point of a benchmark, and how many there are."""
    rows = wide(measured)
    widest = max(rows, key=of)
    at = ", ".join(f"{n} = {widest[n]}" for n in measured["x_names"])
    others = f", and {len(rows) - 1} more" if rows[1:] else ""
    return (
        f"{plot}, {widest['provider']} at {at}: the spread, (high - low) / "
        f"median, is {of(widest):.0%}{others}"
    )
