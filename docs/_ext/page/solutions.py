"""Worked solutions stand folded on the page.

A cell whose first line is ``# Solution ...`` is an ordinary cell of the script
and of the notebook. On the page it is folded, its output with it, so that a
reader can try first.
"""

from docutils import nodes
from sphinx_design.shared import create_component


def fold(app, doctree):
    """Put each solution, and what it printed, into a dropdown."""
    for block in list(doctree.findall(nodes.literal_block)):
        first = block.astext().lstrip().split("\n", 1)[0]
        if not first.startswith("# Solution"):
            continue
        parent = block.parent
        start = parent.index(block)
        end = start + 1
        while end < len(parent) and _is_output(parent[end]):
            end += 1
        inside = parent[start:end]
        title = first.lstrip("# ").rstrip(".")
        folded = create_component(
            "dropdown",
            opened=False,
            type="dropdown",
            has_title=True,
            icon=None,
            chevron=None,
            container_classes=["bp-solution", "sd-mb-3"],
            title_classes=[],
            body_classes=[],
        )
        folded += nodes.rubric(title, title)
        folded.extend(inside)
        parent[start:end] = [folded]


def _is_output(node):
    classes = node.get("classes", []) if hasattr(node, "get") else []
    if "sphx-glr-script-out" in classes:
        return True
    return isinstance(node, nodes.comment)


def setup(app):
    app.connect("doctree-read", fold)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
