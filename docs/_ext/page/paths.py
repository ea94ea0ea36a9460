"""Paths through the tutorials, and how long it takes to read them.

The front page lists them: ``.. path::`` has a title, the pages in their
order, and what is said of it. Nothing else does. From there each tutorial
knows its place, which stands under its title.

How long a page takes is computed, so that no page has to say it: a minute for
so many words, or for so many lines of code, of what is not folded.
"""

import functools
import re
from dataclasses import dataclass
from typing import ClassVar

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.locale import _
from sphinx.util.docutils import SphinxDirective

import tutorial
from page import solutions
from page.cards import link_to
from translation import catalogs

INDEX = tutorial.ROOT / "docs" / "index.rst"
PATH = re.compile(r"^\.\. path:: (.+)\n((?:\n| {3}.*\n)+)", re.MULTILINE)
PAGES = re.compile(r"^ {3}:pages:((?:\s+\S+/\d\d-\S+)+)$", re.MULTILINE)
# A reader of technical prose has about so many words a minute, and of code
# that is new about so many lines.
WORDS, LINES = 200, 20
ROUNDED = 5  # minutes: nobody knows it better
CELL = re.compile(r"^# %%.*\n", re.MULTILINE)


@dataclass(frozen=True)
class Path:
    title: str
    pages: tuple

    @property
    def anchor(self):
        """Where the front page tells of it, in every language."""
        return "path-" + re.sub(r"\W+", "-", self.title.lower())


@functools.cache
def listed(text):
    """The paths of a front page."""
    return [
        Path(title, tuple(named(PAGES.search(body))))
        for title, body in PATH.findall(text)
    ]


def named(found):
    return found[1].split() if found else ()


def paths():
    """The paths of the site."""
    return listed(INDEX.read_text(encoding="utf-8"))


def place(name):
    """The path of a page, and its place there, from 1; or None."""
    for path in paths():
        if name in path.pages:
            return path, path.pages.index(name) + 1
    return None


# Time ------------------------------------------------------------------------


def minutes(name):
    """How long it takes to read a page, without what is folded."""
    words, lines = seen(tutorial.source(name))
    exact = words / WORDS + lines / LINES
    return max(ROUNDED, ROUNDED * round(exact / ROUNDED))


def seen(script):
    """Words of prose and lines of code that a page does not fold."""
    head, *cells = CELL.split(script)
    words, lines = count(head), 0
    for cell in cells:
        prose = re.match(r"(?:#.*\n)*", cell)[0]
        code = cell[len(prose) :].strip()
        words += count(prose)
        if not solutions.marked(code):
            lines += sum(1 for line in code.splitlines() if line.strip())
    return words, lines


def count(prose):
    """Words, which have a letter or a digit."""
    return sum(1 for word in prose.split() if re.search(r"\w", word))


def in_hours(pages):
    """The hours of some pages, in halves."""
    return f"{round(sum(map(minutes, pages)) / 30) / 2:g}"


# On the front page -----------------------------------------------------------


class PathDirective(SphinxDirective):
    """A path: its title, what is said of it, its pages with their times."""

    required_arguments = 1
    final_argument_whitespace = True
    has_content = True
    option_spec: ClassVar = {"pages": directives.unchanged_required}

    def run(self):
        path = Path(self.arguments[0], tuple(self.options["pages"].split()))
        section = nodes.section(ids=[path.anchor], classes=["bp-way"])
        title = nodes.title(path.title, path.title)
        self.set_source_info(title)  # for gettext
        section += title
        section += self.parse_content_to_nodes()
        # Translators: above the pages of a path; h are hours.
        said = _("%(count)s pages, about %(hours)s h") % {
            "count": len(path.pages),
            "hours": in_hours(path.pages),
        }
        section += nodes.paragraph("", said, classes=["bp-way-time"])
        pages = nodes.enumerated_list()
        pages += [self.entry(name) for name in path.pages]
        section += pages
        return [section]

    def entry(self, name):
        """A link to a page and its time."""
        script = tutorial.script_of(name)
        if not script.exists():
            raise self.error(f"a path names {name}, which is no tutorial")
        link = link_to(self.env, name, catalogs.title(name))
        time = nodes.inline("", said_minutes(name), classes=["bp-minutes"])
        words = nodes.paragraph("", "", link, nodes.Text(" "), time)
        return nodes.list_item("", words)


def said_minutes(name):
    """How long a page takes, in words that stay in one line."""
    # Translators: the same, beside the title of a page in a list.
    said = _("%(minutes)s min") % {"minutes": minutes(name)}
    return said.replace(" ", "\N{NO-BREAK SPACE}")


# On a tutorial ---------------------------------------------------------------


def show(app, pagename, templatename, context, doctree):
    """Put the place of a tutorial on its path under its title, and what
    comes next there to its end."""
    name = tutorial.of_page(pagename)
    if doctree is None or not name:
        return
    # Translators: how long it takes to read the page.
    time = _("%(minutes)s min to read") % {"minutes": minutes(name)}
    found = {"time": time}
    if here := place(name):
        path, number = here
        found |= {
            "path": catalogs.said("index", path.title),
            "anchor": path.anchor,
            "number": number,
            "count": len(path.pages),
            "before": neighbor(path, number - 2),
            "after": neighbor(path, number),
        }
    render, values = app.builder.templates.render, context | found
    strip = render("place.html", values)
    title = "</h1>\n"
    body = context["body"].replace(title, title + strip, 1)
    if found.get("after"):
        body += render("place.html", values | {"at_end": True})
    context["body"] = body


def neighbor(path, at):
    """What Sphinx calls a page of a path, and its title; or None."""
    if not 0 <= at < len(path.pages):
        return None
    name = path.pages[at]
    return tutorial.page_of(name), catalogs.title(name)


def setup(app):
    app.add_directive("path", PathDirective)
    # Before the downloads come, which stand above.
    app.connect("html-page-context", show, priority=590)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
