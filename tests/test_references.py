"""Functions lead to Triton's documentation, where a page first uses them."""

import functools
import re

import pytest
import triton
import triton.language as tl
from browser import built
from project import ROOT
from sphinx.util.inventory import InventoryFile

HOME = "https://triton-lang.org/main/"
FILE = ROOT / "docs/inventories/triton.inv"
KNOWN = {
    name: item.uri
    for kind in InventoryFile.loads(FILE.read_bytes(), uri=HOME).data.values()
    for name, item in kind.items()
}


def test_what_is_known_is_in_triton():
    for name in KNOWN:
        found = functools.reduce(getattr, name.split(".")[1:], triton)
        assert callable(found), name


def test_most_that_the_tutorials_use_is_known():
    """Types are written as tl.int64: they have no page of their own."""
    used = set()
    for script in (ROOT / "tutorials").rglob("[0-9][0-9]-*.py"):
        used |= set(re.findall(r"\btl\.(\w+)\(", script.read_text()))
    missing = {n for n in used if f"triton.language.{n}" not in KNOWN}
    # Triton documents neither.
    assert missing <= {"constexpr", "philox"}
    assert all(hasattr(tl, name) for name in used)


def links(part):
    return [a for a in part.select("a[href]") if a["href"].startswith(HOME)]


@pytest.mark.parametrize("name", built.TUTORIALS)
def test_each_function_is_linked_once(name):
    article = built.soup(name).article
    found = [a["href"] for a in links(article) if a["href"] in KNOWN.values()]
    assert len(set(found)) == len(found)
    source = (ROOT / name).with_suffix(".py").read_text()
    for function in set(re.findall(r"\btl\.(\w+)\(", source)):
        uri = KNOWN.get(f"triton.language.{function}")
        assert uri is None or uri in found, function


@pytest.mark.parametrize("name", built.TUTORIALS)
def test_it_is_the_first_that_is_not_folded(name):
    article = built.soup(name).article
    for link in links(article):
        # Decorators are not linked: Pygments takes them for one word.
        if "triton.language" not in link["href"].rpartition("#")[2]:
            continue
        words = re.compile(rf"\b{re.escape(link.get_text())}\b")
        texts = [
            node
            for node in article.find_all(["pre", "code"])
            if words.search(node.get_text())
            and not node.find_parent("details")
            and not node.find_parent("summary")
        ]
        if texts and not link.find_parent("details"):
            first = texts[0]
            assert first is link.find_parent("pre") or first in (
                *link.find_all("code"),
                link.find_parent("code"),
            )
