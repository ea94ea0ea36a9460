"""Words of code: few elements, and one link for each of Triton's functions.

Sphinx-Gallery makes an element of each word of code, and links each that an
inventory knows. Here ``tl.load`` and the like in prose are linked, too; then
one link of each function remains on a page: the first that a reader sees, or
the first in a folded cell if no other is. Words that site.css shows as plain
text are one text: two of three are, and all that looks at the elements of a
page has less to look at.
"""

import re
from itertools import groupby

from docutils import nodes
from sphinx.ext.intersphinx import InventoryAdapter
from sphinx.transforms.post_transforms import SphinxPostTransform

NAMES = re.compile(r"(tl|triton)((?:\.\w+)+)")
SHORT = {"tl": "triton.language"}
# How Pygments marks what site.css shows as plain text.
PLAIN = {"n", "o", "p", "w", "nb", "bp", "nn", "fm", "vm"}


class WordsOfCode(SphinxPostTransform):
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
        for block in self.document.findall(nodes.TextElement):
            if any(map(is_word, block.children)):
                block[:] = list(joined(block.children))


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


def is_word(node):
    """Whether this is a word of code that looks like text."""
    return isinstance(node, nodes.inline) and not PLAIN.isdisjoint(
        node["classes"]
    )


def joined(words):
    for plain, some in groupby(
        words, lambda node: isinstance(node, nodes.Text) or is_word(node)
    ):
        if plain:
            yield nodes.Text("".join(node.astext() for node in some))
        else:
            yield from some


def setup(app):
    app.add_post_transform(WordsOfCode)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
