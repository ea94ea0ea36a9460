"""What a page says of itself to browsers, searches and shared links.

A title that names the subject, a description of whole sentences, an address
without index.html, and a picture of its own.
"""

import re
from html import escape, unescape

from docutils import nodes

from page.figures import social_picture

MOST = 200  # characters of a description
SENTENCE = re.compile(r"(?<=[.?!])\s+(?=\S)")


def describe(app, pagename, templatename, context, doctree):
    subject = section_of(context)
    if pagename == app.config.root_doc:
        context["docstitle"] = app.config.tagline
    elif subject:
        context["docstitle"] = f"{subject} — {app.config.project}"
    if context.get("pageurl"):
        context["pageurl"] = context["pageurl"].removesuffix("index.html")
    if doctree is None:
        return
    meta = dict(context["meta"] or {})
    meta["og:url"] = context["pageurl"]
    if subject:
        meta["og:title"] = f"{plain(context['title'])} — {subject}"
    if said := description(doctree):
        meta["og:description"] = said
        tag = f'<meta name="description" content="{escape(said)}" />\n'
        context["metatags"] += tag
    if picture := of_page(app, pagename):
        file, words = picture
        app.builder.images[f"tutorials/images/{file.name}"] = file.name
        meta |= {
            "og:image": f"{app.config.html_baseurl}_images/{file.name}",
            "og:image:alt": words.read_text(encoding="utf-8"),
        }
    context["meta"] = meta


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
            continue  # Sphinx-Gallery's, which this site does not show
        text = " ".join(paragraph.astext().split())
        for sentence in SENTENCE.split(text):
            longer = f"{said} {sentence}".strip()
            if sentence[-1:] not in ".?!" or (said and len(longer) > MOST):
                return said
            said = longer
    return said


def of_page(app, pagename):
    """The picture of a tutorial and the file with its words."""
    name = pagename.removeprefix("tutorials/")
    paths = social_picture(app.srcdir, name)
    return paths if name != pagename and paths[0].exists() else None


def setup(app):
    app.add_config_value("tagline", "", "html", [str])
    app.connect("html-page-context", describe, priority=400)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
