"""What a page says of itself to browsers, searches and shared links.

sphinxext-opengraph writes it. Here it is told what it cannot know: the
subject of a tutorial and its passes, its picture, an address without
index.html. Of a tutorial searches are told as schema.org has it, too.
"""

import json
import re
import shutil
from html import escape, unescape
from pathlib import Path

from docutils import nodes
from sphinx.locale import _

import tutorial
from languages import CURRENT
from page import captions, dates, figures, rights
from translation import catalogs, root, sentences

# Where a language is spoken, for those who ask.
LOCALES = {"en": "en_US", "ja": "ja_JP"}
DESCRIPTION = 300  # letters at most


def describe(app, pagename, templatename, context, doctree):
    subject = section_of(context)
    name = tutorial.of_page(pagename)
    kernels = kernels_of(app.srcdir, name) if name else ""
    parts = [part for part in (subject, kernels) if part]
    if pagename == app.config.root_doc:
        context["docstitle"] = _(app.config.tagline)
    elif parts:
        context["docstitle"] = " — ".join([*parts, app.config.project])
    there = (context.get("pageurl") or "").removesuffix("index.html")
    # The canonical address of the page, if it has one yet.
    context["pageurl"] = there if root.is_known(app.config.site_url) else ""
    if doctree is None:
        return
    title = plain(context["title"])
    context["meta"] = (context["meta"] or {}) | {
        "og:title": f"{title} — {subject}" if subject else title,
        "og:url": there,
        "og:locale": LOCALES.get(CURRENT.code, CURRENT.code),
        **picture_of(app, pagename, title),
    }
    if not pagename.startswith("tutorials/"):
        return
    if name:
        said = description(name, kernels)
        context["article"] = article(app, context, name, title, said)
    else:  # a list, whose cards are not a description
        said = next(doctree.findall(nodes.paragraph)).astext()
        said = " ".join(said.split())
    context["meta"]["og:description"] = said
    words = escape(said, quote=True)
    context["metatags"] += f'<meta name="description" content="{words}">'


def kernels_of(srcdir, name):
    """What a tutorial has: kernels in Triton, of the passes it measures."""
    modes = [str(m.args.get("mode")) for m in figures.of_page(srcdir, name)]
    forward, backward = (
        any(each in mode for mode in modes) for each in ("forward", "backward")
    )
    if forward and backward:
        return _("Triton kernels, forward and backward")
    if backward:
        return _("Triton kernels, backward pass")
    if forward:
        return _("Triton kernels, forward pass")
    return _("Triton kernels")


def description(name, kernels):
    """A page's question, its kernels, and of its answer what has room."""
    question, *answer = sentences.split(catalogs.summary(name))
    said = sentences.joined([question, sentences.ended(kernels)])
    for sentence in answer:
        longer = sentences.joined([said, sentence])
        if len(longer) > DESCRIPTION:
            break
        said = longer
    return said


def article(app, context, name, title, said):
    """A tutorial as schema.org describes it, for a page's JSON-LD."""
    config = app.config
    by = {"@type": "Organization", "name": config.author}
    found = {
        "@context": "https://schema.org",
        "@type": ["TechArticle", "LearningResource"],
        "learningResourceType": "tutorial",
        "headline": title,
        "description": said,
        "inLanguage": CURRENT.tag,
        "author": by,
        "license": rights.LICENSE,
        "isAccessibleForFree": True,
        "datePublished": dates.published(name),
        "dateModified": dates.modified(app.srcdir, name),
        "isPartOf": {"@type": "WebSite", "name": config.project},
    }
    if context["pageurl"]:
        found["url"] = context["pageurl"]
        found["isPartOf"]["url"] = config.html_baseurl
        found["image"] = context["meta"].get("og:image")
    found = {key: value for key, value in found.items() if value}
    return json.dumps(found, ensure_ascii=False).replace("<", r"\u003c")


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
