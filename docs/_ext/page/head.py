"""What a page says of itself to browsers, searches and shared links.

A title that names the subject, a description of whole sentences, an address
without index.html, and a picture of its own.
"""

import re
from html import unescape

from docutils import nodes
from sphinx.locale import _

from languages import CURRENT
from page import figures
from translation import sentences

PICTURE = "_static/social.png"
MOST = 200  # characters of a description
# Where a language is spoken, for those who ask.
LOCALES = {"en": "en_US", "ja": "ja_JP"}


def describe(app, pagename, templatename, context, doctree):
    subject = section_of(context)
    if pagename == app.config.root_doc:
        context["docstitle"] = _(app.config.tagline)
    elif subject:
        context["docstitle"] = f"{subject} — {app.config.project}"
    if context.get("pageurl"):
        context["pageurl"] = context["pageurl"].removesuffix("index.html")
    if doctree is None:
        return
    title = plain(context["title"])
    picture, words = picture_of(app, pagename, title)
    context["description"] = description(doctree)
    context["shared"] = {
        "og:title": f"{title} — {subject}" if subject else title,
        "og:type": "website",
        "og:locale": LOCALES.get(CURRENT.code, CURRENT.code),
        "og:url": context["pageurl"],
        "og:site_name": app.config.project,
        "og:description": context["description"],
        "og:image": app.config.html_baseurl + picture,
        "og:image:alt": words,
    }


def name_links(app):
    """What leads out of the site, in its language: the theme asks no
    catalog for these names."""
    for link in app.config.html_theme_options["icon_links"]:
        link["name"] = _(link["name"])


def section_of(context):
    """The title of the section of a tutorial, unless its own says it."""
    parents = context.get("parents", ())
    if len(parents) < 2:
        return ""
    subject = plain(parents[-1]["title"])
    return "" if subject in context["title"] else subject


def plain(title):
    return unescape(re.sub(r"<[^>]+>", "", title))


def description(doctree):
    """The first sentences of a page, as many as fit."""
    said = ""
    for paragraph in doctree.findall(nodes.paragraph):
        if isinstance(paragraph.parent, nodes.Admonition):
            continue  # in place of a figure
        text = " ".join(paragraph.astext().split())
        for sentence in sentences.split(text):
            longer = sentences.joined([said, sentence])
            ended = sentence.endswith(tuple(sentences.ENDS))
            if not ended or (said and len(longer) > MOST):
                return said
            said = longer
    return said


def picture_of(app, pagename, title):
    """A figure of a tutorial, or the picture of the site; and its words."""
    name = pagename.removeprefix("tutorials/")
    measured = figures.of_card(app.srcdir, name)
    if name == pagename or measured is None:
        return PICTURE, f"{app.config.project}: {_(app.config.tagline)}"
    file = figures.social_picture(app.srcdir, name).name
    app.builder.images[f"tutorials/images/{file}"] = file
    words = sentences.joined([_("%(title)s.") % {"title": title},
                              figures.shown(measured)])  # fmt: skip
    return f"_images/{file}", words


def setup(app):
    app.add_config_value("tagline", "", "html", [str])
    app.connect("builder-inited", name_links)
    app.connect("html-page-context", describe, priority=400)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
