"""The glossary: its entries, what they lead to, and what leads to them."""

import re

import pytest
from browser import built
from docutils import nodes
from docutils.core import publish_doctree
from project import ROOT
from sphinx_gallery.py_source_parser import split_code_and_text_blocks

import tutorial
from languages import ENGLISH
from measurements import claims
from page import terms

TEXT = (ROOT / "docs/glossary.rst").read_text(encoding="utf-8")
FIRST = "layer-norm/01-layer-norm"
# The words of the field that pages use.
NEEDED = """
    thread block, streaming multiprocessor, SM, warp, register, shared memory,
    L2, DRAM, coalesced, vectorized, occupancy, latency, pipelining,
    persistent, roofline, spill, Tensor Core, atomic, wave
"""
# What page 01 sets in italics for another reason than to define it. It says
# block for what Triton's documentation calls so.
NO_TERMS = "row column must asks_for together see epsilon RMS_norm blocks"


def entries():
    """{its terms: (more forms, definition)} of each entry, in their order."""
    body = TEXT.partition(".. glossary::\n\n")[2]
    found = {}
    for entry in re.split(r"\n\n(?=   \S)", body.rstrip()):
        lines = entry.split("\n")
        names = tuple(x.strip() for x in lines if re.match(r"   \S", x))
        more = re.findall(r"\.\. also:: (.*)", entry)
        forms = more[0].split(", ") if more else []
        assert names not in found
        found[names] = forms, entry
    return found


ENTRIES = entries()
NAMES = [name for names in ENTRIES for name in names]
FORMS = {
    form: names[0] if form in more else form
    for names, (more, _) in ENTRIES.items()
    for form in (*names, *more)
}


def headings(page):
    """The headings of a page, as labels have them."""
    script = tutorial.script_of(page.removeprefix("tutorials/"))
    if script.exists():
        blocks = split_code_and_text_blocks(str(script))[1]
        text = "\n".join(b.content for b in blocks if b.type == "text")
    else:
        text = (ROOT / "docs" / f"{page}.rst").read_text(encoding="utf-8")
    return re.findall(r"^(\S.*)\n[=-]{3,}$", text, re.MULTILINE)


def test_entries_are_sorted():
    firsts = [names[0] for names in ENTRIES]
    assert len(firsts) > 60 and firsts == sorted(firsts, key=str.lower)


@pytest.mark.parametrize("word", " ".join(NEEDED.split()).split(", "))
def test_a_word_of_the_field_has_an_entry(word):
    assert word in FORMS


@pytest.mark.parametrize("names", ENTRIES, ids=lambda names: names[0])
def test_an_entry_leads_to_a_section_that_exists(names):
    _, definition = ENTRIES[names]
    links = re.findall(r":(doc|ref):`[^`<]*<([^`>]*)>`", definition)
    assert links
    for role, target in links:
        page, _, heading = target.partition(":")
        assert headings(page)
        assert bool(heading) == (role == "ref")
        assert not heading or heading in headings(page), target


def test_a_letter_leads_to_its_first_entry():
    letters = re.findall(r":term:`(\w) <(.*?)>`", TEXT)
    firsts = {}
    for names in ENTRIES:
        firsts.setdefault(names[0][0].upper(), names[0])
    assert letters == list(firsts.items())


def test_the_drawing_has_the_numbers_of_the_table():
    drawing = (ROOT / "docs/_templates/gpu.html").read_text(encoding="utf-8")
    numbers = re.findall(r"\d[\d.]* (?:[KMG]B|TB/s|ns)\b", drawing)
    assert len(numbers) > 10
    assert list(claims.numbers(drawing))
    assert not [each for each in numbers if each not in TEXT]


ANY = terms.any_of(terms.forms(FORMS))


def test_the_first_page_calls_things_as_the_glossary_does():
    """What it sets in italics to define it is a term."""
    blocks = split_code_and_text_blocks(str(tutorial.script_of(FIRST)))[1]
    text = "\n".join(b.content for b in blocks if b.type == "text")
    italics = re.findall(r"(?<![*\w`])\*([^*\s`][^*`]*)\*(?![*\w])", text)
    defined = {" ".join(each.split()) for each in italics}
    defined -= {each.replace("_", " ") for each in NO_TERMS.split()}
    assert {"kernel", "warps", "dirty lines", "spill"} <= defined
    assert not {x for x in defined if not ANY.match(x)}


FOUND = {
    "warp": "warp", "thread block": "block", "thread": "thread", "L1": "L1",
    "Little's law": "law", "masked": "mask", "mask": "mask",
    "ロック": "lock", "锁": "lock", "内核（kernel）": "kernel",
}  # fmt: skip


@pytest.mark.parametrize(
    ("text", "linked"),
    [
        ("A warp, and a warp.", {"warp": "warp"}),
        ("Warps have *threads*.", {"Warps": "warp", "threads": "thread"}),
        ("A thread\nblock.\n\nThreads.",
         {"thread\nblock": "block", "Threads": "thread"}),
        ("Masked lanes, a mask.", {"Masked": "mask"}),
        ("By Little’s law, l1, L1.", {"Little’s law": "law", "L1": "L1"}),
        ("Time-warp, `warp <x>`_, ``warp``, warped, unmasked.", {}),
        ("Warps\n=====\n\n:math:`warp`\n\n::\n\n   warp\n", {}),
        (".. rubric:: Warps\n\n*A* warp.", {"warp": "warp"}),
        (".. container:: measured\n\n   Warps.\n\nA warp.",
         {"warp": "warp"}),
        ("ブロックとロック", {"ロック": "lock"}),
        ("ブロックとブロック", {}),
        ("开锁的内核（kernel）。", {"内核": "kernel"}),
    ],
)  # fmt: skip
def test_the_first_use_in_prose_is_linked(text, linked):
    doctree = publish_doctree(text, settings_overrides={"report_level": 5})
    before = doctree.astext()
    found = terms.forms(FOUND)
    terms.link_first_uses(doctree, found, lambda place: f"#{place}")
    links = [
        x
        for x in doctree.findall(nodes.reference)
        if "bp-term" in x["classes"]
    ]
    assert {x.astext(): x["refuri"][1:] for x in links} == linked
    assert len(links) == len(linked)
    assert doctree.astext() == before


# The built site. What is no prose there, or links otherwise:
NO_PROSE = (
    "h1, h2, h3, a:not(.bp-term), code, pre, math, svg, style, summary, "
    ".measured, .bp-xray, .bp-downloads, .bp-stages, .bp-checked"
)


def anchors():
    """The anchor of each form, by its first term."""
    shown = built.soup("glossary.html").select("dl.glossary > dt")
    names = [dt.find(string=True).replace("’", "'") for dt in shown]
    assert names == NAMES
    found = dict(zip(names, (dt["id"] for dt in shown), strict=True))
    return [found[name] for name in terms.forms(FORMS).values()]


@pytest.mark.parametrize("page", built.TUTORIALS)
def test_the_first_use_of_a_term_on_a_page_is_a_link(page):
    article, places, linked = built.soup(page).article, anchors(), set()
    left_out = {
        id(text)
        for tag in article.select(NO_PROSE)
        for text in tag.find_all(string=True)
    }
    for text in article.find_all(string=True):
        if link := text.find_parent("a", class_="bp-term"):
            anchor = link["href"].removeprefix("../../glossary.html#")
            assert id(text) not in left_out and link.find_parent("p")
            assert anchor in places and anchor not in linked
            linked.add(anchor)
        elif id(text) not in left_out:
            for match in ANY.finditer(text):
                assert places[match.lastindex - 1] in linked, match[0]
    assert len(linked) > 5


@pytest.mark.parametrize("language", built.EDITIONS, ids=lambda x: x.folder)
def test_each_edition_links_its_words(language):
    site = built.WHOLE / language.folder
    soup = built.soup(f"tutorials/{FIRST}.html", site)
    links = soup.select("a.bp-term")
    words = {link["href"].rpartition("#")[2]: link.text for link in links}
    word = REGISTER[language.code]
    # A page that is not translated may be without it.
    if language is ENGLISH or word in soup.article.text:
        assert words["term-register"].startswith(word)


REGISTER = {"en": "register", "zh_CN": "寄存器", "ja": "レジスタ"}
