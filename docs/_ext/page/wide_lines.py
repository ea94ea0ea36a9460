"""Where lines of wide characters end, and where not.

A translated script breaks its lines between two of them, as others break at
spaces; on the page and in the notebook no space may come of it. A browser
would break a line between a number and what it counts.
"""

import re

from docutils import nodes

from translation.lines import END, counted, joined

# In Markdown the next line may be an item of a list, or none.
GOES_ON = re.compile(END.pattern + r"(?=[^\W\d_]|`|\$|\*\S|[^\x00-\x7f])")


def set_lines(app, doctree):
    for text in list(doctree.findall(nodes.Text)):
        if not is_code(text) and (new := counted(joined(text))) != text:
            text.parent.replace(text, nodes.Text(new))


def is_code(text):
    return isinstance(text.parent, nodes.literal_block | nodes.literal)


def join_in_notebook(cell):
    """The same in a cell of prose."""
    if cell["cell_type"] == "markdown":
        cell["source"] = [GOES_ON.sub("", "".join(cell["source"]))]


def setup(app):
    # Before the titles are collected.
    app.connect("doctree-read", set_lines, priority=400)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
