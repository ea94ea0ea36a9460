"""Words of code: where a page first uses a function is a link to Triton's
documentation, and what looks like text is text."""

import functools
import re

import pytest
import triton
from browser import built
from docutils import nodes
from docutils.utils import new_document
from project import ROOT
from sphinx.util.inventory import InventoryFile

from page import code as words

HOME = "https://triton-lang.org/main/"
FILE = ROOT / "docs/inventories/triton.inv"
INVENTORY = InventoryFile.loads(FILE.read_bytes(), uri=HOME).data
KNOWN = {
    name: item.uri
    for kind in INVENTORY.values()
    for name, item in kind.items()
}
LOAD, SUM = (KNOWN[f"triton.language.{name}"] for name in ("load", "sum"))


def test_what_is_known_is_in_triton():
    for name in KNOWN:
        found = functools.reduce(getattr, name.split(".")[1:], triton)
        assert callable(found), name


@pytest.mark.parametrize("name", built.TUTORIALS)
def test_each_function_is_linked_once(name):
    page = (built.SITE / name).read_text(encoding="utf-8")
    links = re.findall(r'class="bp-reference[^>]* href="([^"]+)"', page)
    assert len(set(links)) == len(links)
    source = (ROOT / name).with_suffix(".py").read_text(encoding="utf-8")
    used = {
        f"triton.language.{function}"
        for function in re.findall(r"\btl\.(\w+)\(", source)
    }
    assert {KNOWN[function] for function in used & KNOWN.keys()} <= set(links)
    # Triton documents none of these.
    names = "constexpr", "philox", "pointer_type"
    undocumented = {f"triton.language.{name}" for name in names}
    assert used - KNOWN.keys() <= undocumented


def in_code(uri, *classes):
    return nodes.reference("", uri[-4:], refuri=uri, classes=list(classes))


def linked(*parts):
    """Where the links of a page that is made of these parts are left."""
    document = new_document("page")
    document += parts
    words.link_first_uses(document, KNOWN)
    return [
        (link.parent.tagname, link["refuri"])
        for link in document.findall(nodes.reference)
    ]


def folded(*inside):
    return nodes.container("", *inside, container_classes=["bp-folded"])


def test_prose_is_linked_before_code():
    prose = nodes.paragraph("", "", nodes.literal("", "tl.load"))
    code = nodes.literal_block("", "", in_code(LOAD), in_code(SUM))
    assert linked(prose, code) == [
        ("paragraph", LOAD),
        ("literal_block", SUM),
    ]


def test_what_is_folded_comes_last():
    code = nodes.literal_block("", "", in_code(LOAD), in_code(SUM))
    prose = nodes.paragraph("", "", nodes.literal("", "tl.sum"))
    assert linked(folded(code), prose) == [
        ("literal_block", LOAD),
        ("paragraph", SUM),
    ]


def test_a_value_is_not_its_class():
    its = in_code(LOAD, "sphx-glr-backref-instance")
    assert linked(nodes.literal_block("", "", its)) == []


def test_words_of_code_that_look_plain_are_one_text():
    tokens = [("k", "def"), ("w", " "), ("n", "f"), ("p", "("), ("", "x")]
    tokens += [("mi", "1"), ("p", ")")]
    given = [
        nodes.inline(text, text, classes=[name]) if name else nodes.Text(text)
        for name, text in tokens
    ]
    found = [(type(n), n.astext()) for n in words.joined(given)]
    assert found == [
        (nodes.inline, "def"),
        (nodes.Text, " f(x"),
        (nodes.inline, "1"),
        (nodes.Text, ")"),
    ]
