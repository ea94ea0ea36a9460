"""Search: an index of the sections of all pages, made by Pagefind.

What a reader looks for is a section, so each is a document of its own: its
title, its prose, its code. What surrounds the tutorials' own words is left
out. Where a section spells a word in one way, readers may ask for the others
that ``conf.py`` names.
"""

import html
import json
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from docutils import nodes
from sphinx.errors import ExtensionError

from languages import CURRENT

# What stands on a page and is no answer: classes of nodes, and nodes.
LEFT_OUT = {
    *("bp-xray", "bp-scaffold", "bp-drawing", "bp-numbers", "passport"),
    *("bp-cards", "bp-speeds", "sphx-glr-script-out", "sphx-glr-footer"),
}
SILENT = (
    *(nodes.Invisible, nodes.image, nodes.math, nodes.math_block, nodes.raw),
    *(nodes.section, nodes.title),
)
# A word of prose counts as one; in a title Pagefind counts it more often.
CODE = 0.2


class Index:
    """The index of the site: what pages say is kept until they are written."""

    def __init__(self):
        self.records = {}  # of each page that is written
        self.work = None  # what writes the index

    def start(self, app):
        app.builder.search = False  # Sphinx's own

    def add(self, app, pagename, templatename, context, doctree):
        """Note the sections of a page that is written."""
        if doctree is not None and pagename != "404":
            spellings = app.config.search_spellings
            self.records[pagename] = dict(
                document(section, doctree, CURRENT.tag, spellings)
                for section in doctree.findall(nodes.section)
                if not leads_on(section)
            )

    def write(self, app, exception):
        if exception:
            return
        # Sphinx puts them there in every build.
        for name in ("searchtools.js", "sphinx_highlight.js"):
            (app.outdir / "_static" / name).unlink(missing_ok=True)
        if not self.records:
            return
        file = Path(app.doctreedir, "search.json")
        kept = json.loads(file.read_text("utf-8")) if file.exists() else {}
        pages = {
            page: records
            for page, records in sorted((kept | self.records).items())
            if page in app.env.found_docs
        }
        file.write_text(json.dumps(pages), encoding="utf-8")
        folder = app.outdir / "pagefind"
        shutil.rmtree(folder, ignore_errors=True)
        # Meanwhile others look at the written pages.
        thread = ThreadPoolExecutor(1)
        self.work = thread.submit(written, pages, folder)
        thread.shutdown(wait=False)

    def wait(self, app, exception):
        if self.work:
            self.work.result()


def written(pages, folder):
    """Let Pagefind write the index of {page: {anchor: document}}.

    It reads a folder of files: ``page/anchor.html`` for a section, which
    search.js turns into an address, and ``page/index.html`` for its top.
    """
    with tempfile.TemporaryDirectory() as site:
        for page, records in pages.items():
            for anchor, content in records.items():
                file = Path(site, page, f"{anchor}.html")
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(content, encoding="utf-8")
        command = [sys.executable, "-m", "pagefind", "--quiet"]
        files = ["--site", site, "--output-path", folder]
        done = subprocess.run([*command, *files], capture_output=True)
    if done.returncode:
        raise ExtensionError(f"pagefind: {done.stderr.decode()}")


def leads_on(section):
    """Whether a part of a page is a list of cards, which lead to others."""
    return isinstance(section.parent, nodes.section) and any(
        "bp-cards" in child.get("classes", ()) for child in section.children
    )


def document(section, doctree, language, spellings):
    """Where a section is, and what Pagefind is to know of it."""
    top = doctree.next_node(nodes.section)
    title, page = (
        words(each.next_node(nodes.title)) for each in (section, top)
    )
    blocks = list(said(section))
    text = " ".join([title, *(text for _, text in blocks)])
    meta = {
        "title": title,
        "titled": "; ".join(other for other, _ in others(title, spellings)),
        "also": "; ".join(map(" = ".join, others(text, spellings))),
        "page": "" if section is top else page,
    }
    head = "".join(
        f'<meta data-pagefind-meta="{key}[content]" '
        f'content="{html.escape(value)}">'
        for key, value in meta.items()
        if value
    )
    body = "\n".join(f"{tag}{html.escape(text)}" for tag, text in blocks)
    return (
        "index" if section is top else section["ids"][0],
        f'<html lang="{language}"><head>{head}</head>'
        f"<body><h1>{html.escape(title)}</h1>{body}</body></html>",
    )


def said(node):
    """The blocks of a section: the tag that begins each, and its text."""
    for child in node.children:
        classes = {
            *child.get("classes", ()),
            *child.get("container_classes", ()),
        }
        if isinstance(child, SILENT) or classes & LEFT_OUT:
            continue
        if isinstance(child, nodes.literal_block):
            yield f'<pre data-pagefind-weight="{CODE}">', child.astext()
        elif isinstance(child, nodes.TextElement):
            yield "<p>", words(child)
        else:
            yield from said(child)


def words(node):
    """The text of a paragraph, without its formulas."""
    if isinstance(node, nodes.Text):
        return node.astext()
    return "".join(
        words(child)
        for child in node.children
        if not isinstance(child, SILENT)
    )


def others(text, spellings):
    """Other spellings of what a text says, each with the one it has."""
    for group in spellings:
        for spelling in group:
            if re.search(rf"\b{re.escape(spelling)}", text, re.IGNORECASE):
                for other in group:
                    if other != spelling:
                        yield other, spelling


def setup(app):
    app.add_config_value("search_spellings", [], "env", [list])
    index = Index()
    app.connect("builder-inited", index.start)
    app.connect("html-page-context", index.add)
    app.connect("build-finished", index.write)
    app.connect("build-finished", index.wait, priority=950)
    # The sections are collected where the pages are written.
    return {"parallel_read_safe": True, "parallel_write_safe": False}
