"""The moving picture of the two stages: on the page, and nowhere else.

``moving_pictures`` in conf.py names a page, the function behind whose cell
the picture stands, and its sizes. A script and its notebook are made before
this module looks at a page, so they know nothing of it. Without JavaScript
the picture stays hidden: the drawing that the script made is there.

The words are in ``docs/_templates/two-stages.html``, the machine of states
in ``docs/_static/two-stages-model.js``, and what is drawn and clicked in
``docs/_static/two-stages.js``.
"""

import re
from pathlib import Path

from docutils import nodes
from sphinx.util import logging

from translation import lines

TEMPLATE = "two-stages.html"
logger = logging.getLogger(__name__)


class TwoStages(nodes.General, nodes.Element):
    """Where the picture stands; its attribute holds the sizes."""


def place(app, doctree):
    """Put the picture behind the cell that defines a function."""
    docname = app.env.docname
    wanted = app.config.moving_pictures.get(docname)
    if wanted is None:
        return
    for folder in app.config.templates_path:
        template = Path(app.confdir, folder, TEMPLATE)
        if template.exists():  # a missing file would always count as changed
            app.env.note_dependency(str(template))
    first_line = re.compile(rf"^def {wanted['after']}\(", re.MULTILINE)
    for block in doctree.findall(nodes.literal_block):
        if first_line.search(block.astext()):
            parent = block.parent
            picture = TwoStages(sizes=wanted)
            parent.insert(parent.index(block) + 1, picture)
            return
    logger.warning(
        "%s: no cell defines %s, so its moving picture has no place",
        docname,
        wanted["after"],
    )


def add_files(app, pagename, templatename, context, doctree):
    """Only a page that has the picture loads its files."""
    if doctree is not None and any(doctree.findall(TwoStages)):
        app.add_css_file("two-stages.css")
        for name in ("two-stages-model.js", "two-stages.js"):
            app.add_js_file(name, loading_method="defer")


def visit(translator, node):
    html = translator.builder.templates.render(TEMPLATE, node["sizes"])
    translator.body.append(lines.tight(html))
    raise nodes.SkipNode


def setup(app):
    app.add_config_value("moving_pictures", {}, "env", [dict])
    app.add_node(TwoStages, html=(visit, None))
    app.connect("doctree-read", place)
    app.connect("html-page-context", add_files)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
