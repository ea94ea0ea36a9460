"""Every link inside the site leads to a file, every anchor to an id."""

import functools
import re
from urllib.parse import unquote, urljoin, urlsplit

import pytest
from browser import built

from languages import TRANSLATED
from translation import root, update

ATTRIBUTES = ("href", "src", "poster", "data")
HOST = "http://site.invalid"


@pytest.fixture(scope="module", autouse=True)
def built_site():
    if not built.PAGES:
        pytest.fail(built.NO_SITE, pytrace=False)


@functools.cache
def anchors(page):
    soup = built.soup(page)
    ids = {tag["id"] for tag in soup.find_all(id=True)}
    return ids | {tag["name"] for tag in soup.find_all("a", {"name": True})}


def links(page):
    """Where the page's links lead, as addresses on an invented host."""
    here = f"{HOST}{built.prefix()}{page}"
    for tag in built.soup(page).find_all(True):
        for attribute in ATTRIBUTES:
            if attribute in tag.attrs:
                yield tag[attribute], urljoin(here, tag[attribute])
        for part in tag.get("srcset", "").split(","):
            if part.strip():
                yield part, urljoin(here, part.split()[0])


def fault(address):
    """What is wrong with an address, or None."""
    parts = urlsplit(address)
    if f"{parts.scheme}://{parts.netloc}" != HOST:
        return None  # another site, checked by make linkcheck
    path = unquote(parts.path)
    if not path.startswith(built.prefix(built.WHOLE)):
        return "outside the site"
    target = built.WHOLE / path.removeprefix(built.prefix(built.WHOLE))
    if target.is_dir():
        target /= "index.html"
    if not target.is_file():
        return "no such file"
    anchor = unquote(parts.fragment)
    if anchor and target.is_relative_to(built.SITE):
        page = target.relative_to(built.SITE).as_posix()
        if page in built.PAGES and anchor not in anchors(page):
            return "no such anchor"
    return None


@pytest.mark.parametrize("page", built.PAGES)
def test_links(page):
    found = {
        f"{link}: {wrong}"
        for link, address in links(page)
        if (wrong := fault(address))
    }
    assert not found, "\n".join(sorted(found))


def test_old_addresses_lead_on():
    """Where they lead is shown as a link too, whose file is there."""
    assert built.MOVED == [
        "tutorials/01-layer-norm.html",
        "tutorials/02-layer-norm-weight-gradients.html",
        "tutorials/03-layer-norm-any-width.html",
        "tutorials/04-layer-norm-two-pass-backward.html",
        "tutorials/05-fused-elementwise-layer-norm.html",
        "tutorials/06-rms-norm.html",
    ]
    for page in built.MOVED:
        soup = built.soup(page, built.WHOLE)
        (link,) = soup.select("a")
        (refresh,) = soup.select("meta[http-equiv=refresh]")
        assert refresh["content"] == f"0; url={link['href']}"
        target = urljoin(page, link["href"])
        heading = built.soup(target, built.WHOLE).h1.find(string=True)
        assert link.get_text() == heading


@pytest.mark.parametrize("page", built.PAGES)
def test_no_figure_is_shown_twice(page):
    """A drawing made from a benchmark's numbers is not its plot again. Only
    what two GPUs measure may be the same: they need the same memory."""
    shown = []
    for figure in built.soup(page).select("img.bp-figure.only-light"):
        path = built.SITE.joinpath(page).parent / figure["src"]
        shown.append((gpu_of(figure), path.read_text()))
    for gpu in {gpu for gpu, _ in shown}:
        texts = [text for of, text in shown if of in (gpu, None)]
        assert len(set(texts)) == len(texts)


def gpu_of(figure):
    """The GPU whose tab has a figure, or None."""
    tab = figure.find_parent(class_="sd-tab-content")
    return tab and tab.find_previous_sibling("label")["data-sync-id"]


@pytest.mark.parametrize(
    ("link", "wrong"),
    [
        ("index.html", None),
        ("tutorials/", None),
        ("https://example.org/nowhere", None),
        ("mailto:someone@example.org", None),
        ("no-such-page.html", "no such file"),
        ("index.html#no-such-anchor", "no such anchor"),
    ],
)
def test_a_broken_link_is_found(link, wrong):
    assert fault(urljoin(f"{HOST}{built.prefix()}", link)) == wrong


SECTION = re.compile(r'<section id="([^"]*)"')


@pytest.mark.parametrize("language", built.EDITIONS, ids=lambda x: x.folder)
def test_each_language_has_the_same_pages_and_sections(language):
    """And each page leads to the others."""
    folder = built.WHOLE / language.folder
    assert root.pages(folder) == [p for p in built.PAGES if p != "404.html"]
    assert len(built.EDITIONS) > 1
    for page in root.pages(folder):
        text, english = (
            (each / page).read_text("utf-8") for each in (folder, built.SITE)
        )
        assert SECTION.findall(text) == SECTION.findall(english) != [], page
        assert f'<html lang="{language.tag}"' in text, page
        site = built.prefix(built.WHOLE)
        address = {
            each.tag: f"{site}{each.folder}/{page.removesuffix('index.html')}"
            for each in built.EDITIONS
        }
        address["x-default"] = address["en"]
        others = re.findall(
            r'rel="alternate" hreflang="([^"]*)" href="([^"]*)"', text
        )
        assert {tag: path_of(link) for tag, link in others} == address
        assert len(others) == len(address)
        assert "bp-languages" in text, page


def path_of(address):
    return urlsplit(address).path


@pytest.mark.parametrize("language", TRANSLATED, ids=lambda each: each.tag)
def test_a_page_says_so_if_a_part_of_it_is_in_english(language):
    """And only then."""
    pages = built.WHOLE / language.folder
    say_so = {
        page.relative_to(pages).with_suffix("").as_posix()
        for page in pages.rglob("*.html")
        if "bp-untranslated" in page.read_text(encoding="utf-8")
    }
    missing = update.missing(update.wanted(), language.code)
    assert say_so == missing.keys() - {"sphinx"}
