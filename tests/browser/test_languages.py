"""The languages of the site, on a small copy of the project and in parts."""

import contextlib
import xml.etree.ElementTree as ET

import pytest
from babel.messages.catalog import Catalog
from browser import built
from browser.conftest import PATIENCE
from bs4 import BeautifulSoup
from docutils.core import publish_doctree
from playwright.sync_api import expect
from project import Project
from sphinx.util.nodes import extract_messages

from languages import ENGLISH, LANGUAGES
from translation import catalogs, root

CHINESE = LANGUAGES[1]
CODES = "en zh_CN"
NAME = "sums/01-double"
WHOLE = "translating.html"
PAGES = ("index.html", "tutorials/index.html", f"tutorials/{NAME}.html")
# What is translated: of a page, and of a tutorial.
WORDS = {
    "index": {"Paths": "学习路线"},
    f"tutorials/{NAME}": {
        "Double sums/01": "翻倍",
        "What it says.": "它说了什么。",
        "a comment": "一个注释",
        "Copy": "副本",  # the name of a line, which stays in the table
    },
    "translating": None,  # all of it
}


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """English, and a Chinese that has begun."""
    project = Project(tmp_path_factory.mktemp("languages"), (NAME,))
    for page, words in WORDS.items():
        catalog = Catalog()
        for message, said in (words or same(project, page)).items():
            catalog.add(message, said)
        file = project.root / f"docs/locale/zh_CN/LC_MESSAGES/{page}.po"
        file.parent.mkdir(parents=True, exist_ok=True)
        text = catalogs.text_of(catalog, "zh_CN")
        file.write_text(text, encoding="utf-8")
    project.said = {}
    for code in CODES.split():
        given = {"SITE_LANGUAGE": code, "SITE_LANGUAGES": CODES}
        done = project.build(GITHUB_REPOSITORY="someone/site", **given)
        assert done.returncode == 0, done.stdout[-3000:]
        project.said[code] = done.stdout
    root.write([ENGLISH, CHINESE], project.root / "docs/_build/html")
    return project


def same(project, page):
    """A translation that says all messages of a page as they are."""
    tree = publish_doctree((project.root / f"docs/{page}.rst").read_text())
    return {text: text for _node, text in extract_messages(tree)}


@pytest.fixture(scope="module")
def address(project):
    """Both languages, served from this machine."""
    with built.served(project.root / "docs/_build/html") as address:
        yield address


@pytest.fixture
def reader(browser, address):
    """Opens a window of a reader who has never been here."""
    with contextlib.ExitStack() as windows:

        def open_window(**settings):
            given = {"base_url": address, "reduced_motion": "reduce"}
            context = browser.new_context(**given | settings)
            windows.callback(context.close)
            page = context.new_page()
            page.set_default_timeout(PATIENCE)
            return page

        yield open_window


def read(project, language, page):
    file = project.root / "docs/_build/html" / language.folder / page
    return BeautifulSoup(file.read_text("utf-8"), "html.parser")


def test_the_cells_run_in_english_alone(project):
    assert "its cells ran in" in project.said["en"]
    assert "its cells ran in" not in project.said["zh_CN"]
    said = [
        read(project, language, PAGES[2]).select_one(".sphx-glr-script-out")
        for language in (ENGLISH, CHINESE)
    ]
    assert said[0].get_text() == said[1].get_text() != ""
    pictures = [
        [img["src"] for img in read(project, x, PAGES[2]).select("img")]
        for x in (ENGLISH, CHINESE)
    ]
    assert pictures[0] == pictures[1] != []


def test_a_sentence_without_a_translation_is_shown_under_a_banner(project):
    """And so is a comment; what is translated is said."""
    page = read(project, CHINESE, PAGES[2])
    assert page.select_one(".bp-untranslated")
    assert "它说了什么。" in page.get_text()
    assert "The kernel, in its shortest form." in page.get_text()
    assert "# 一个注释" in page.get_text()
    heads = page.select(".bp-numbers th")
    assert "Copy" in [head.get_text() for head in heads]
    assert not read(project, CHINESE, WHOLE).select(".bp-untranslated")
    for name in (*PAGES, WHOLE):
        assert not read(project, ENGLISH, name).select(".bp-untranslated")


def test_a_download_is_in_its_language(project):
    for language, words in ((ENGLISH, "a comment"), (CHINESE, "一个注释")):
        page = read(project, language, PAGES[2])
        folder = project.root / "docs/_build/html" / language.folder
        for link in page.select(".bp-downloads a[download]"):
            file = (folder / PAGES[2]).parent / link["href"]
            assert f"# {words}" in file.read_text("utf-8")
    links = page.select(".sphx-glr-footer a[download]")
    assert [link["href"].split(".")[-1] for link in links] == ["ipynb", "py"]


def test_a_translated_heading_has_the_english_id(project):
    english, chinese = (
        read(project, language, "index.html")
        for language in (ENGLISH, CHINESE)
    )
    assert english.select_one("#paths > h2")
    heading = chinese.select_one("#paths > h2")
    assert heading.find(string=True) == "学习路线"
    title = read(project, CHINESE, PAGES[2]).h1
    assert title.find(string=True) == "翻倍"
    assert title.parent["id"] == "double-sums-01"


def test_who_mends_a_translation_mends_its_catalog(project):
    for language, file in (
        (ENGLISH, f"tutorials/{NAME}.py"),
        (CHINESE, f"docs/locale/zh_CN/LC_MESSAGES/tutorials/{NAME}.po"),
    ):
        mend = read(project, language, PAGES[2]).select(".bp-feedback a")[0]
        assert mend["href"].endswith(f"/edit/main/{file}")


@pytest.fixture(scope="module")
def above(project):
    """What stands above the languages."""
    site = project.root / "docs/_build/html"
    return lambda name: BeautifulSoup((site / name).read_text(), "html.parser")


def test_the_root_offers_the_languages(project, above):
    links = above("index.html").select("nav a")
    assert {link["href"]: link.get_text() for link in links} == {
        "en/": "English",
        "zh-cn/": "简体中文",
    }
    site = project.root / "docs/_build/html"
    assert (site / ".nojekyll").exists()
    assert (site / "tutorials/01-layer-norm.html").exists()


def test_an_address_that_leads_nowhere_is_said_in_each_language(above):
    soup = above("404.html")
    assert soup.h1.find(string=True) == "This page does not exist"
    assert soup.select_one("article div[lang=zh-Hans] h2")
    ids = [each["id"] for each in soup.select("article [id]")]
    assert len(ids) == len(set(ids)) > 0
    links = [a["href"] for a in soup.select("article section p a")]
    assert links == [
        "/en/tutorials/index.html",
        "/zh-cn/tutorials/index.html",
    ]


def test_the_map_names_all_pages_with_the_others(project):
    found = {
        url.find("{*}loc").text: {
            link.get("hreflang"): link.get("href")
            for link in url.findall("{*}link")
        }
        for url in ET.parse(
            project.root / "docs/_build/html/sitemap.xml"
        ).getroot()
    }
    home = "http://localhost:8000"
    pages = "", "tutorials/", f"tutorials/{NAME}.html", WHOLE
    assert found.keys() >= {
        f"{home}/{language}/{page}"
        for language in ("en", "zh-cn")
        for page in pages
    }
    assert not any("404" in address for address in found)
    both = {"en": f"{home}/en/", "zh-Hans": f"{home}/zh-cn/"}
    assert found[f"{home}/en/"] == found[f"{home}/zh-cn/"] == both


def test_the_root_sends_by_the_browsers_language_once(reader, address):
    page = reader(locale="zh-TW")
    page.goto("")
    page.wait_for_url("**/zh-cn/")
    page.goto("")
    page.wait_for_timeout(300)
    assert page.url == address
    page.get_by_role("link", name="English").click()
    page.wait_for_url("**/en/")


def test_the_root_sends_nobody_who_has_chosen(reader, address):
    page = reader(locale="zh-CN")
    page.goto("zh-cn/index.html")
    page.locator(".bp-languages:visible summary").click()
    page.locator(".bp-languages:visible a").click()
    page.wait_for_url("**/en/index.html")
    page.goto("")
    page.wait_for_timeout(300)
    assert page.url == address


TO = "document.querySelector('#paths').scrollIntoView()"


@pytest.mark.parametrize(
    ("width", "at", "section"),
    [(390, "", "paths"), (1280, "#what-to-expect", "what-to-expect")],
)
def test_the_switch_stays_at_the_section(reader, width, at, section):
    """By the keyboard; nothing of it stands beside the window."""
    page = reader(viewport={"width": width, "height": 800})
    page.goto(f"en/index.html{at}")
    if not at:
        page.evaluate(TO)
    page.locator(".bp-languages:visible summary").focus()
    page.keyboard.press("Enter")
    link = page.get_by_role("link", name="简体中文")
    box = link.bounding_box()
    assert box["x"] >= 0 and box["x"] + box["width"] <= width
    assert box["height"] >= 24
    wide = "document.documentElement.scrollWidth"
    assert page.evaluate(wide) <= width
    page.keyboard.press("Escape")
    expect(link).to_be_hidden()
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.wait_for_url(f"**/zh-cn/index.html#{section}")


def test_without_a_script_the_switch_and_the_root_lead_on(reader):
    page = reader(java_script_enabled=False, locale="zh-CN")
    page.goto("")
    page.get_by_role("link", name="简体中文").click()
    page.wait_for_url("**/zh-cn/")
    page.locator(".bp-languages:visible summary").click()
    page.locator(".bp-languages:visible a").click()
    page.wait_for_url("**/en/index.html")


def test_an_address_without_a_language_leads_to_english(reader):
    page = reader()
    page.goto(f"tutorials/{NAME}.html?a=b#the-kernel", wait_until="commit")
    page.wait_for_url(f"**/en/tutorials/{NAME}.html?a=b#the-kernel")
    answer = page.goto("zh-cn/no/such/page.html")
    assert answer.status == 404
    expect(page.locator("[lang=zh-Hans] h2")).to_be_visible()
    page.locator("[lang=zh-Hans] p a").click()
    page.wait_for_url("**/zh-cn/tutorials/index.html")
