"""Links to Triton's documentation, at the first use of a function on a page.

Sphinx-Gallery links every name in code that an inventory knows. Here the same
is done for ``tl.load`` and the like in prose; then one link of each remains:
the first that a reader sees, or the first in a folded cell if no other is.
"""

import re

from docutils import nodes
from sphinx.ext.intersphinx import InventoryAdapter
from sphinx.transforms.post_transforms import SphinxPostTransform

NAMES = re.compile(r"(tl|triton)((?:\.\w+)+)")
SHORT = {"tl": "triton.language"}


class FirstUse(SphinxPostTransform):
    default_priority = 6  # after Sphinx-Gallery has linked code
    formats = ("html",)

    def run(self, **kwargs):
        if not self.env.docname.startswith("tutorials/"):
            return
        known = {
            name: item.uri
            for kind in InventoryAdapter(self.env).main_inventory.values()
            for name, item in kind.items()
        }
        link_first_uses(self.document, known)


def link_first_uses(document, known):
    for literal in list(document.findall(nodes.literal)):
        link_prose(literal, known)
    uses = [
        link
        for link in document.findall(nodes.reference)
        if link.get("refuri") in known.values()
    ]
    seen = set()
    for link in sorted(uses, key=is_folded):
        a_value = "sphx-glr-backref-instance" in link["classes"]
        if a_value or link["refuri"] in seen:
            at = link.parent.index(link)
            link.parent[at : at + 1] = link.children
            continue
        seen.add(link["refuri"])
        link["classes"] = ["bp-reference"]


def link_prose(literal, known):
    """Let ``tl.load`` in prose lead to what an inventory says of it."""
    found = NAMES.match(literal.astext())
    if not found or isinstance(literal.parent, nodes.reference):
        return
    name = SHORT.get(found[1], found[1]) + found[2]
    if name in known:
        link = nodes.reference("", refuri=known[name], reftitle=name)
        literal.replace_self(link)
        link += literal


def is_folded(node):
    while node := node.parent:
        if "bp-folded" in node.get("container_classes", ()):
            return True
    return False


def setup(app):
    app.add_post_transform(FirstUse)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
