"""Paths, needs and times: every page has a place, and says what it needs."""

import re
from pathlib import Path

import pytest
from browser import built
from project import ROOT

import tutorial
from page import paths
from translation import catalogs

NAMES = list(map(tutorial.name_of, tutorial.scripts()))
EVERY = pytest.mark.parametrize("name", NAMES)
NEEDS = re.compile(r"^\*\*What you need:\*\* (.+?)(?:\n\n|\Z)", re.M | re.S)
LINK = re.compile(r"<([^>\s]+)\.html>`_")
DRAFT = "section/01-page"


def needs(name):
    """The pages that a page asks its readers to know."""
    head = tutorial.source(name).partition('"""\n\n# %%')[0]
    found = NEEDS.findall(head)
    assert len(found) == 1, f"{len(found)} paragraphs begin: What you need"
    folder = (tutorial.TUTORIALS / name).parent
    return [
        Path(folder, link).resolve().relative_to(tutorial.TUTORIALS).as_posix()
        for link in LINK.findall(found[0])
    ]


@EVERY
def test_a_page_says_what_it_needs(name):
    """Above its first cell, with links to pages that are there."""
    assert set(needs(name)) <= set(NAMES) - {name}


@EVERY
def test_a_page_has_one_place(name):
    on = [path.title for path in paths.paths() if name in path.pages]
    assert len(on) == 1, (
        f"{name} stands on {len(on)} paths of docs/index.rst, not on one"
    )


@pytest.mark.parametrize("path", paths.paths(), ids=lambda path: path.title)
def test_a_path_names_pages_that_are_there(path):
    assert path.pages
    assert not set(path.pages) - set(NAMES)
    assert len(set(path.pages)) == len(path.pages)


@pytest.mark.parametrize("path", paths.paths(), ids=lambda path: path.title)
def test_what_a_page_needs_stands_before_it(path):
    for at, name in enumerate(path.pages):
        later = set(path.pages[at:]) & set(needs(name))
        assert not later, f"{name} needs {later}, which the path has later"


def test_all_paths_of_the_front_page_are_found():
    text = (ROOT / "docs/index.rst").read_text(encoding="utf-8")
    assert text.count(".. path::") == len(paths.paths()) == 3


# Time ------------------------------------------------------------------------


@EVERY
def test_no_page_says_its_time_itself(name):
    """It is computed, and would be said twice, or wrong."""
    assert "Reading time" not in tutorial.source(name)


@EVERY
def test_a_page_takes_a_sitting(name):
    assert 5 <= paths.minutes(name) <= 60


SCRIPT = '''r"""
A title of five words
=====================

Four words stand here.
"""

# %%

# Scaffold: what is folded.

FOLDED = 1

# %%
# Three more words - no sign counts.

ONE = 1

# A comment is a line of code.
TWO = 2
'''


def test_what_is_folded_takes_no_time():
    """Prose and code of a cell that is seen count; a line under a title, a
    sign, an empty line and a folded cell do not."""
    # r""" of the head is a word, too.
    assert paths.seen(SCRIPT) == (1 + 5 + 4 + 6, 3)
    seen = SCRIPT.replace("# Scaffold: what is folded.", "# It is seen.")
    assert paths.seen(seen) == (1 + 5 + 4 + 6, 5)


def test_the_front_page_says_the_rule():
    rule = f"{paths.WORDS} words, or for {paths.LINES} lines of code"
    assert rule in paths.INDEX.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("words", "lines", "minutes"),
    [(0, 0, 5), (2000, 0, 10), (0, 200, 10), (2000, 250, 20), (3000, 60, 20)],
)
def test_minutes(monkeypatch, words, lines, minutes):
    monkeypatch.setattr(paths, "seen", lambda script: (words, lines))
    assert paths.minutes(NAMES[0]) == minutes


# The front page is read ------------------------------------------------------

FRONT = """
Paths
-----

.. path:: Learn it, slowly
   :pages: a/01-one
           b/02-two

   **Who.** What it gives.

.. path:: Empty
   :pages:

   Words.

The tutorials
-------------
"""


def test_a_front_page_is_read():
    first, empty = paths.listed(FRONT)
    assert first.title == "Learn it, slowly"
    assert first.anchor == "path-learn-it-slowly"
    assert first.pages == ("a/01-one", "b/02-two")
    assert empty.pages == ()


def test_a_place_is_found(monkeypatch):
    monkeypatch.setattr(paths, "paths", lambda: paths.listed(FRONT))
    path, number = paths.place("b/02-two")
    assert (path.title, number) == ("Learn it, slowly", 2)
    assert paths.place(DRAFT) is None
    assert paths.neighbor(path, 2) is None
    assert paths.neighbor(path, -1) is None


# The built pages -------------------------------------------------------------


@pytest.fixture(scope="module")
def site():
    if not built.PAGES:
        pytest.fail(built.NO_SITE, pytrace=False)


@EVERY
def test_a_page_shows_its_place_its_time_and_what_it_was_checked_with(
    site, name
):
    page = built.soup(f"tutorials/{name}.html")
    path, number = paths.place(name)
    strip = page.select_one("h1 ~ .bp-place")
    words = " ".join(strip.get_text(" ").split())
    assert f"{path.title} , {number} of {len(path.pages)}" in words
    assert f"{paths.minutes(name)} min to read" in words
    assert strip.a["href"].endswith(f"index.html#{path.anchor}")
    for kind, other in (("prev", number - 2), ("next", number)):
        link = strip.select_one(f"[rel={kind}]")
        if neighbor := paths.neighbor(path, other):
            assert neighbor[1] in link.get_text()
            assert link["href"].endswith(f"{neighbor[0].split('/')[-1]}.html")
        else:
            assert link is None
    assert "Triton" in page.select_one(".bp-checked dt").get_text()


def test_the_front_page_lists_every_page_with_its_time(site):
    page = built.soup("index.html")
    shown = [
        (link["href"], link.find_parent("li").get_text().split("\xa0")[0])
        for link in page.select(".bp-way li a")
    ]
    assert sorted(shown) == sorted(
        (f"tutorials/{name}.html", f"{catalogs.title(name)} {minutes}")
        for name in NAMES
        for minutes in [paths.minutes(name)]
    )
    sections = page.select("section.bp-way")
    assert [section["id"] for section in sections] == [
        path.anchor for path in paths.paths()
    ]
