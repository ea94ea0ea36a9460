"""A section has the same id in all languages, so that links to it fit.

Sphinx makes ids of titles. The English build notes those of each page, in
their order, and the other editions give them to their sections.
"""

import json
from pathlib import Path

from docutils import nodes
from sphinx.errors import ExtensionError

import tutorial
from languages import CURRENT, ENGLISH

FILE = "anchors.json"


def note_or_give(app, doctree):
    """What the language asks for; toctrees look at the ids afterwards."""
    sections = list(doctree.findall(nodes.section))
    name = app.env.docname
    if CURRENT is ENGLISH:
        known(app.env)[name] = [section["ids"] for section in sections]
        return
    file = tutorial.SHOWN.parent / "anchors" / f"{name}.json"
    app.env.note_dependency(str(file))
    give(doctree, sections, json.loads(file.read_text("utf-8")))


def give(doctree, sections, wanted):
    """Sections get the ids that are wanted, and what leads to them follows."""
    found = [len(ids) for ids in (sections, wanted)]
    if found[0] != found[1]:
        raise ExtensionError(
            f"{doctree['source']}: {found[0]} sections, the English page has "
            f"{found[1]}"
        )
    now = {}  # {old id: new id}
    for section, ids in zip(sections, wanted, strict=True):
        for old in section["ids"]:
            now[old] = old if old in ids else ids[0]
        section["ids"] = list(ids)
    for node in doctree.findall(nodes.Element):
        if (old := node.get("refid")) in now:
            node["refid"] = now[old]
    for name, old in doctree.nameids.items():
        doctree.nameids[name] = now.get(old, old)


def known(env):
    """{page: ids of each section} of the pages that have been read."""
    if not hasattr(env, "anchors"):
        env.anchors = {}
    return env.anchors


def forget(app, env, docname):
    known(env).pop(docname, None)


def write(app, exception):
    if exception or CURRENT is not ENGLISH or app.builder.name != "html":
        return
    pages = known(app.env)
    text = json.dumps({page: pages[page] for page in sorted(pages)})
    Path(app.doctreedir, FILE).write_text(text, encoding="utf-8")


def setup(app):
    # Before Sphinx notes the contents of a page.
    app.connect("doctree-read", note_or_give, priority=400)
    app.connect("env-purge-doc", forget)
    app.connect("build-finished", write)
    return {"parallel_read_safe": False, "parallel_write_safe": True}
