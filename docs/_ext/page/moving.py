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

from docutils import nodes
from sphinx.errors import ExtensionError

from page import templates
from translation import lines


def place(app, doctree):
    """Put the picture behind the cell that defines a function."""
    docname = app.env.docname
    wanted = app.config.moving_pictures.get(docname)
    if wanted is None:
        return
    first_line = re.compile(rf"^def {wanted['after']}\(", re.MULTILINE)
    for block in doctree.findall(nodes.literal_block):
        if first_line.search(block.astext()):
            picture = templates.given_by(app.env, "two-stages.html", **wanted)
            picture.children = [nodes.Text(lines.tight(picture.astext()))]
            block.parent.insert(block.parent.index(block) + 1, picture)
            return
    raise ExtensionError(
        f"{docname}: no cell defines {wanted['after']}, so its moving picture "
        "has no place"
    )


def add_files(app, pagename, templatename, context, doctree):
    """Only a page that has the picture loads its files."""
    if pagename in app.config.moving_pictures:
        app.add_css_file("two-stages.css")
        for name in ("two-stages-model.js", "two-stages.js"):
            app.add_js_file(name, loading_method="defer")


def setup(app):
    app.add_config_value("moving_pictures", {}, "env", [dict])
    app.connect("doctree-read", place)
    app.connect("html-page-context", add_files)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
