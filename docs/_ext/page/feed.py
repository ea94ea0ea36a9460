"""A feed (Atom) of tutorials that are new, or were measured again.

Its days are those of dates.py, so it is the same wherever it is built.
"""

import xml.etree.ElementTree as ET
from operator import itemgetter
from pathlib import Path

from sphinx.locale import _

import tutorial
import words_later as words
from languages import CURRENT
from page import dates, rights
from translation import catalogs, sentences

NAMESPACE = "http://www.w3.org/2005/Atom"
FILE = "feed.xml"


def entries(app):
    """What happened, the latest first."""
    found = []
    for script in tutorial.scripts():
        name = tutorial.name_of(script)
        title = catalogs.title(name)
        uri = app.builder.get_target_uri(tutorial.page_of(name))
        there = app.config.html_baseurl + uri
        entry = {"link": there, "summary": catalogs.summary(name)}
        published = dates.published(name)
        if published:
            new = _("New: %(title)s") % {"title": title}
            found.append(entry | {"date": published, "title": new})
        for date, gpus in dates.measured(app.srcdir, name).items():
            measured = _("%(title)s, measured on %(gpus)s") % {
                "title": title,
                "gpus": words.in_a_row(gpus, _),
            }
            if date > published:
                found.append(entry | {"date": date, "title": measured})
    return sorted(found, key=itemgetter("date"), reverse=True)


def feed(app):
    config, found = app.config, entries(app)
    ET.register_namespace("", NAMESPACE)
    root = ET.Element(f"{{{NAMESPACE}}}feed", {"xml:lang": CURRENT.tag})

    def add(parent, name, text=None, **attributes):
        element = ET.SubElement(parent, f"{{{NAMESPACE}}}{name}", attributes)
        element.text = text
        return element

    add(root, "id", config.html_baseurl)
    add(root, "title", config.project)
    add(root, "subtitle", sentences.ended(_(config.tagline)))
    last = found[0]["date"] if found else "1970-01-01"
    add(root, "updated", moment(last))
    add(add(root, "author"), "name", config.author)
    add(root, "rights", rights.said(config))
    add(root, "link", rel="self", href=config.html_baseurl + FILE)
    add(root, "link", href=config.html_baseurl)
    for each in found:
        entry = add(root, "entry")
        # A page has several: what happened on a day is one.
        add(entry, "id", f"{each['link']}#{each['date']}")
        add(entry, "title", each["title"])
        add(entry, "updated", moment(each["date"]))
        add(entry, "link", href=each["link"])
        add(entry, "summary", each["summary"])
    ET.indent(root)
    return ET.tostring(root, encoding="utf-8", xml_declaration=True)


def moment(date):
    """A day as Atom writes it."""
    return f"{date}T00:00:00Z"


def write(app, exception):
    if exception is None and app.builder.name == "html":
        Path(app.outdir, FILE).write_bytes(feed(app))


def lead(app, pagename, templatename, context, doctree):
    context["feed"] = FILE


def setup(app):
    app.connect("html-page-context", lead)
    app.connect("build-finished", write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
