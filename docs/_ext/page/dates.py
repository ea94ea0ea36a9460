"""When a page was published, and when what it shows was measured.

The first is said by the file of the page in tests/pages, ``PUBLISHED``: a
build need not know the history of the repository. The others stand in the
recordings, and are read from the figures that the page shows.
"""

import tutorial
from page import figures


def published(name):
    """The day on which a tutorial came, or "" if its file names none."""
    if not tutorial.file_of(name).exists():
        return ""
    return getattr(tutorial.loaded(name), "PUBLISHED", "")


def measured(srcdir, name):
    """{day: GPUs}: when each GPU last measured something of a tutorial."""
    last = {}
    for each in figures.of_page(srcdir, name):
        gpu, date = each.environment["gpu"], each.environment["date"]
        last[gpu] = max(date, last.get(gpu, ""))
    found = {}
    for gpu, date in last.items():
        found.setdefault(date, []).append(gpu)
    return dict(sorted(found.items()))


def modified(srcdir, name):
    """The last of all these days."""
    return max([published(name), *measured(srcdir, name)])
