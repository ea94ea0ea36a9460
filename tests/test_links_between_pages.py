"""Pages that name each other, or a library, link to it."""

import re

import pytest
from project import ROOT
from sphinx_gallery.py_source_parser import split_code_and_text_blocks

LITERAL = re.compile(r"``[^`]+``")
LINK = re.compile(r"(?::\w+:)?`[^`]+`_?")
# What names a page. "Page 05", where it is not a link, leads nowhere.
NAMED = re.compile(
    r"\bpages?\s+\d\d\b"
    r"|\b(?:first|second|third|fourth|fifth|last|next|previous|earlier)"
    r"\s+(?:page|tutorial)s?\b",
    re.IGNORECASE,
)
LIBRARIES = ("Liger", "quack", "Apex", "flash-attn", "Composable Kernel")


def prose(path):
    """What a page says, without its code and without literals."""
    if path.suffix == ".rst":
        text = path.read_text(encoding="utf-8")
    else:
        blocks = split_code_and_text_blocks(str(path))[1]
        text = "\n".join(b.content for b in blocks if b.type == "text")
    return LITERAL.sub("", text)


PAGES = {
    path.relative_to(ROOT).as_posix(): prose(path)
    for path in [
        *(ROOT / "tutorials").glob("*/[0-9][0-9]-*.py"),
        *(ROOT / "tutorials").rglob("index.rst"),
        *(ROOT / "docs").glob("*.rst"),
    ]
}
EVERY = pytest.mark.parametrize("name", sorted(PAGES))


def bare(text):
    """Pages that are named and not linked; a number is known once it was a
    link."""
    known = re.findall(r"`pages?\s+(\d\d)\s*<", text)
    return [
        name
        for name in NAMED.findall(LINK.sub("", text))
        if name[-2:] not in known
    ]


@EVERY
def test_a_page_that_is_named_is_linked(name):
    assert not bare(PAGES[name])


@pytest.mark.parametrize("name", sorted(n for n in PAGES if n.endswith(".py")))
def test_a_library_is_linked_where_it_is_first_named(name):
    text = PAGES[name]
    linked = {
        library
        for link in LINK.findall(text)
        for library in LIBRARIES
        if library in " ".join(link.split())
    }
    words = " ".join(text.split())
    assert linked == {each for each in LIBRARIES if each in words}


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("as on page 05, and on pages 06 and 07", 2),
        ("the first\npage", 1),
        ("The last tutorial", 1),
        ("as on `page 05 <05-chunks.html>`_", 0),
        ("as on `page 05 <05-chunks.html>`_: page 05, not page 06", 1),
        ("the page `Every width <11-every-width.html>`_", 0),
        (":doc:`the first page <index>`, this page", 0),
    ],
)
def test_a_bare_name_is_found(text, count):
    assert len(bare(text)) == count
