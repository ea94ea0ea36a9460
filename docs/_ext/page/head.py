"""What a page says of itself to browsers, searches and shared links.

sphinxext-opengraph writes it. Here it is told what it cannot know: the
subject of a tutorial, its picture, an address without index.html.
"""

import re
import shutil
from html import unescape
from pathlib import Path

from sphinx.locale import _

from languages import CURRENT
from page import captions, figures
from translation import sentences

# Where a language is spoken, for those who ask.
LOCALES = {"en": "en_US", "ja": "ja_JP"}


def describe(app, pagename, templatename, context, doctree):
    subject = section_of(context)
    if pagename == app.config.root_doc:
        context["docstitle"] = _(app.config.tagline)
    elif subject:
        context["docstitle"] = f"{subject} — {app.config.project}"
    if not context.get("pageurl") or doctree is None:
        return
    context["pageurl"] = context["pageurl"].removesuffix("index.html")
    title = plain(context["title"])
    context["meta"] = (context["meta"] or {}) | {
        "og:title": f"{title} — {subject}" if subject else title,
        "og:url": context["pageurl"],
        "og:locale": LOCALES.get(CURRENT.code, CURRENT.code),
        **picture_of(app, pagename, title),
    }


def section_of(context):
    """The title of the section of a tutorial, unless its own says it."""
    parents = context.get("parents", ())
    if len(parents) < 2:
        return ""
    subject = plain(parents[-1]["title"])
    return "" if subject in context["title"] else subject


def plain(title):
    return unescape(re.sub(r"<[^>]+>", "", title))


def picture_of(app, pagename, title):
    """The figure of a tutorial and its words, or the picture of the site."""
    name = pagename.removeprefix("tutorials/")
    measured = figures.of_card(app.srcdir, name)
    if name == pagename or measured is None:
        words = f"{app.config.project}: {_(app.config.tagline)}"
        return {"og:image:alt": words}
    file = figures.social_picture(app.srcdir, name)
    images = Path(app.outdir, app.builder.imagedir)
    images.mkdir(exist_ok=True)
    shutil.copy2(file, images)
    address = f"{app.config.html_baseurl}{app.builder.imagedir}/{file.name}"
    words = [_("%(title)s.") % {"title": title}, captions.shown(measured)]
    return {"og:image": address, "og:image:alt": sentences.joined(words)}


def name_links(app):
    """What leads out of the site, in its language: the theme asks no
    catalog for these names."""
    for link in app.config.html_theme_options["icon_links"]:
        link["name"] = _(link["name"])


def setup(app):
    app.add_config_value("tagline", "", "html", [str])
    app.connect("builder-inited", name_links)
    # Before sphinxext-opengraph reads it.
    app.connect("html-page-context", describe, priority=400)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
