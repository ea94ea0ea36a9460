"""A page in a language: what Sphinx's own translation does not do.

Sphinx translates prose. Here the comments and docstrings in cells of code
are, from the same catalog; and before either, the messages of a page are
collected: of the English pages for ``make translations``, of others to count
those that have no translation.
"""

import json
import os

from docutils import nodes
from sphinx.transforms import SphinxTransform
from sphinx.util.nodes import extract_messages

import tutorial
from languages import CURRENT, ENGLISH
from translation import catalogs, lines, messages

# What the English pages say, after a build: {page: [messages]}.
FILE = tutorial.BUILD / "messages.json"
# In these the mechanism speaks: its words are in another catalog.
OWN = {"measured", "bp-xray", "sphx-glr-footer"}
LAST = 10_000  # of those who listen to an event


class Messages(SphinxTransform):
    """Notes what a page says in English, and keeps Sphinx from what it says
    in the mechanism's words already."""

    default_priority = 19  # Sphinx translates at 20

    def apply(self, **kwargs):
        for node in self.document.findall(nodes.TextElement):
            if is_own(node):
                node["translatable"] = False
        found = list(dict.fromkeys(said_by(self.document)))
        if CURRENT is not ENGLISH:
            say = catalogs.translations(CURRENT.code, self.env.docname)
            # A title from another page is in this language already.
            found = [t for t in found if not (say(t) or lines.wide(t))]
        noted(self.env)[self.env.docname] = found


class Cells(SphinxTransform):
    """Says the comments and docstrings of cells, and keeps numbers with what
    they count."""

    default_priority = 21

    def apply(self, **kwargs):
        if CURRENT is ENGLISH:
            return
        say = catalogs.lookup(self.env.docname)
        for block in filter(is_cell, self.document.findall(nodes.Element)):
            text = messages.translated(block.astext(), say)
            block.rawsource = text
            block.children = []
            block += nodes.Text(text)
        for text in list(self.document.findall(nodes.Text)):
            is_code = isinstance(
                text.parent, nodes.literal_block | nodes.literal
            )
            if not is_code and (new := lines.counted(text)) != text:
                text.parent.replace(text, nodes.Text(new))


def said_by(document):
    """The messages of a page, in its order."""
    found = {}
    for node, text in extract_messages(document):
        found.setdefault(node, []).append(text)
    for node in document.findall(nodes.Element):
        if is_cell(node):
            yield from messages.messages(node.astext())
        elif not isinstance(node, nodes.math_block) and not is_own(node):
            yield from found.get(node, ())


def is_cell(node):
    """Whether this is code of a tutorial, not what it printed."""
    return isinstance(node, nodes.literal_block) and (
        node.get("language") == "Python"
    )


def is_own(node):
    """Whether the mechanism says this; what to look for in a panel, which is
    its first paragraph, belongs to the page."""
    inside = node
    while node := node.parent:
        of = {*node.get("classes", ()), *node.get("container_classes", ())}
        if of & OWN:
            paragraphs = node.findall(nodes.paragraph)
            return "bp-xray" not in of or inside is not next(paragraphs, None)
    return False


def noted(env):
    """{page: what it says}, or has no translation of: of pages read."""
    if not hasattr(env, "messages_of_pages"):
        env.messages_of_pages = {}
    return env.messages_of_pages


def tell(app, env):
    """Let the build go on with other languages: all is there for them."""
    if pipe := os.environ.get("PAGES_READ"):
        os.write(int(pipe), b".")


def write(app, exception):
    """Keep what the English pages say."""
    if exception or CURRENT is not ENGLISH or app.builder.name != "html":
        return
    found = dict(sorted(noted(app.env).items()))
    text = json.dumps(found, indent=1, ensure_ascii=False)
    FILE.write_text(text, encoding="utf-8")


def setup(app):
    app.add_transform(Messages)
    app.add_transform(Cells)
    app.connect("env-updated", tell, priority=LAST)
    app.connect("build-finished", write)
    return {"parallel_read_safe": False, "parallel_write_safe": True}
