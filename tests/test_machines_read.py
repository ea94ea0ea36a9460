"""What assistants, feed readers and search engines read of the site: pages as
Markdown, llms.txt, the feed, JSON-LD, canonical addresses."""

import datetime
import json
import re
import xml.etree.ElementTree as ET
from urllib.parse import unquote, urlsplit

import pytest
from browser import built
from bs4 import BeautifulSoup
from project import Project

import tutorial
from measurements import recording
from page import dates
from translation import root

ADDRESS = "https://example.org/passes/"
ATOM = "{http://www.w3.org/2005/Atom}"
PAGES = [page for page in built.PAGES if page != "404.html"]
NAMES = list(map(tutorial.name_of, tutorial.scripts()))
EDITION = pytest.mark.parametrize(
    "language", built.EDITIONS, ids=lambda language: language.folder
)
LINK = re.compile(r"\]\(([^)\s]+)\)")


@pytest.fixture(scope="module", autouse=True)
def built_site():
    if not built.PAGES:
        pytest.fail(built.NO_SITE, pytrace=False)


def markdown(page, folder=built.SITE):
    return (folder / f"{page}.md").read_text("utf-8")


def without_blocks(text):
    return re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)


def prose(text):
    """Without code and formulas."""
    text = re.sub(r"\$\$.*?\$\$", "", without_blocks(text), flags=re.S)
    return re.sub(r"(`+).*?\1|(?<!\\)\$[^$]+\$", "", text, flags=re.S)


def remains(text):
    """What Markdown does not know: roles, directives, HTML."""
    roles = re.findall(r":[a-z]+:`", without_blocks(text))
    rest = re.compile(r"^\.\. |^ *:\w+:|</?[a-z!]|&[a-z]+;", re.M)
    return roles + rest.findall(LINK.sub("]", prose(text)))


def lost(text):
    """Addresses of this site that lead to no file, or to no anchor."""
    for address in set(LINK.findall(prose(text))):
        if not address.startswith(root.ADDRESS):
            assert urlsplit(address).scheme in ("https", "http"), address
            continue
        path, _, anchor = address.partition("#")
        file = built.WHOLE / unquote(path.removeprefix(root.ADDRESS))
        if file.is_dir():
            file /= "index.html"
        if not file.is_file():
            yield address
        elif anchor:
            soup = BeautifulSoup(file.read_text("utf-8"), "html.parser")
            if not soup.find(id=unquote(anchor)):
                yield address


@EDITION
@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_there_as_markdown(page, language):
    folder = built.WHOLE / language.folder
    text = markdown(page, folder)
    soup = built.soup(page, folder)
    title = soup.h1.find(string=True)
    first, empty, address, *_ = text.split("\n")
    assert (first, empty) == (f"# {title}", "")
    assert address.endswith(root.address(language, page))
    assert len(soup.select('link[type="text/markdown"]')) == 1
    assert soup.select_one('link[type="text/markdown"]')["href"] == (
        f"{page.rpartition('/')[2]}.md"
    )
    assert not remains(text)
    assert not list(lost(text))


@pytest.mark.parametrize("name", NAMES)
def test_the_markdown_of_a_tutorial_is_all_of_it(name):
    """Its code, and each number of each recording that the page shows."""
    page = f"tutorials/{name}.html"
    text, soup = markdown(page), built.soup(page)
    blocks = re.findall(r"^```python\n(.*?)\n```$", text, re.M | re.S)
    cells = soup.select("div.highlight-Python pre, div.highlight-python pre")
    assert blocks == [cell.get_text().strip("\n") for cell in cells]
    for table in soup.select("table.bp-table"):
        if table.find_parent(class_="bp-xray"):
            continue  # of a panel one tab is shown
        for row in table.select("tr"):
            said = [cell.get_text().strip() for cell in row.select("td")]
            pattern = r"\|\s*" + r"\s*\|\s*".join(map(re.escape, said))
            assert re.search(pattern, text), said
    figures = soup.select("img.bp-figure.only-light")
    assert len(re.findall(r"^\[Figure: ", text, re.M)) == len(figures)
    panels = soup.select(".bp-xray > summary .sd-summary-text")
    for panel in panels:
        kernel = panel.code.get_text()
        assert f"**X-ray of `{kernel}`**\n" in text


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("see :doc:`there`", [":doc:`"]),
        (".. note:: this", [".. "]),
        ("a <b>word</b>", ["<b", "</b"]),
        ("`<b>` and $a<b$ and\n```\n<b>\n```\n", []),
    ],
)
def test_what_markdown_does_not_know_is_found(text, found):
    assert remains(text) == found


def test_a_lost_address_is_found():
    lost_one = f"{root.ADDRESS}en/no-such-page.html"
    no_anchor = f"{root.ADDRESS}en/index.html#no-such-anchor"
    text = f"[a]({lost_one}), [b]({no_anchor}), [c]({root.ADDRESS}en/)"
    assert set(lost(text)) == {lost_one, no_anchor}


@EDITION
def test_llms_txt_leads_to_every_page(language):
    """Once to each, with a line that says what it is."""
    text = (built.WHOLE / language.folder / "llms.txt").read_text("utf-8")
    assert re.match(r"# .+\n\n> .+\n\n\S", text)
    assert not list(lost(text))
    found = re.findall(r"^- \[(.+?)\]\((\S+)\): (.+)$", text, re.M)
    here = f"{root.ADDRESS}{language.folder}/"
    listed = [there.removeprefix(here) for _, there, _ in found]
    assert sorted(listed) == sorted(f"{page}.md" for page in PAGES)
    for title, there, said in found:
        assert title and len(said) > 20, there
        assert not remains(said), there


def test_llms_txt_stands_at_the_root_too():
    texts = [
        (folder / "llms.txt").read_text("utf-8")
        for folder in (built.WHOLE, built.SITE)
    ]
    assert texts[0] == texts[1]


@EDITION
def test_the_feed_is_atom_and_the_latest_comes_first(language):
    folder = built.WHOLE / language.folder
    feed = ET.parse(folder / "feed.xml").getroot()
    assert feed.tag == f"{ATOM}feed"
    entries = feed.findall(f"{ATOM}entry")
    for each in (feed, *entries):
        for name in ("id", "title", "updated"):  # which Atom asks for
            assert each.findtext(ATOM + name), name
    assert feed.find(f"{ATOM}author/{ATOM}name").text
    ids = [entry.findtext(f"{ATOM}id") for entry in entries]
    assert len(set(ids)) == len(ids)
    moments = [entry.findtext(f"{ATOM}updated") for entry in entries]
    assert moments == sorted(moments, reverse=True)
    assert feed.findtext(f"{ATOM}updated") == moments[0]
    for moment in moments:
        datetime.datetime.fromisoformat(moment.replace("Z", "+00:00"))
    links = [entry.find(f"{ATOM}link").get("href") for entry in entries]
    here = f"{root.ADDRESS}{language.folder}/tutorials/"
    assert {link.removeprefix(here) for link in links} == {
        f"{name}.html" for name in NAMES
    }
    (self,) = [
        link.get("href")
        for link in feed.findall(f"{ATOM}link")
        if link.get("rel") == "self"
    ]
    assert self == f"{root.ADDRESS}{language.folder}/feed.xml"
    for page in PAGES:
        soup = built.soup(page, folder)
        (link,) = soup.select('link[type="application/atom+xml"]')
        there = (folder / page).parent / link["href"]
        assert there.resolve() == (folder / "feed.xml").resolve()


@pytest.mark.parametrize("name", NAMES)
def test_a_page_has_its_day(name):
    """On which it was published; the feed has it, and the days of its
    recordings since."""
    published = datetime.date.fromisoformat(dates.published(name))
    feed = ET.parse(built.SITE / "feed.xml").getroot()
    page = f"/tutorials/{name}.html"
    days = {
        entry.findtext(f"{ATOM}updated")[:10]
        for entry in feed.findall(f"{ATOM}entry")
        if entry.find(f"{ATOM}link").get("href").endswith(page)
    }
    assert published.isoformat() in days
    for gpu in recording.gpus(name):
        data = recording.load(gpu, name)
        last = max(
            recording.environment_of(data, each)["date"]
            for each in data["benchmarks"].values()
        )
        assert last in days or last < published.isoformat()


@EDITION
@pytest.mark.parametrize("name", NAMES)
def test_searches_are_told_what_a_tutorial_is(name, language):
    soup = built.soup(f"tutorials/{name}.html", built.WHOLE / language.folder)
    (script,) = soup.select('script[type="application/ld+json"]')
    said = json.loads(script.string)
    assert said["@context"] == "https://schema.org"
    assert said["@type"] == ["TechArticle", "LearningResource"]
    assert said["headline"] == soup.h1.find(string=True)
    assert said["inLanguage"] == language.tag == soup.html["lang"]
    assert said["author"]["name"] and said["license"].startswith("https://")
    assert said["datePublished"] == dates.published(name)
    assert said["dateModified"] >= said["datePublished"]
    meta = soup.find("meta", attrs={"name": "description"})["content"]
    assert said["description"] == meta


@EDITION
@pytest.mark.parametrize("name", NAMES)
def test_titles_and_descriptions_say_triton_and_the_pass(name, language):
    """A page has both passes or one; its heading stays as it was."""
    soup = built.soup(f"tutorials/{name}.html", built.WHOLE / language.folder)
    meta = soup.find("meta", attrs={"name": "description"})["content"]
    assert "Triton" in soup.title.string and "Triton" in meta
    assert meta.count("Triton kernels") <= 1
    if language.folder == "en":
        modes = " ".join(
            str(benchmark["args"].get("mode"))
            for gpu in recording.gpus(name)
            for benchmark in recording.load(gpu, name)["benchmarks"].values()
        )
        for each in ("forward", "backward"):
            said = f"Triton kernels, .*{each}"
            assert bool(re.search(said, soup.title.string)) == (each in modes)
            assert bool(re.search(said, meta)) == (each in modes)


@pytest.mark.parametrize(
    "page", [page for page in PAGES if re.match("tutorials/.*index", page)]
)
def test_a_list_of_tutorials_is_described_by_its_sentences(page):
    """Not by what its cards say."""
    soup = built.soup(page)
    meta = soup.find("meta", attrs={"name": "description"})["content"]
    first = soup.select_one("article p").get_text()
    assert meta == " ".join(first.split())


def test_titles_differ():
    titles = [built.soup(page).title.string for page in PAGES]
    assert len(set(titles)) == len(titles)


# A site that knows its address -----------------------------------------------


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    project = Project(tmp_path_factory.mktemp("published"))
    done = project.build(SITE_URL=ADDRESS)
    assert done.returncode == 0, done.stdout[-3000:]
    return project


def test_a_published_page_has_its_address(published):
    soup = BeautifulSoup(published.page(), "html.parser")
    address = f"{ADDRESS}en/tutorials/01-double.html"
    assert soup.find("link", rel="canonical")["href"] == address
    said = json.loads(soup.find("script", type="application/ld+json").string)
    assert said["url"] == address
    assert said["image"].startswith(f"{ADDRESS}en/_images/")
    assert "datePublished" not in said  # its file names none
    text = (published.root / "html/tutorials/01-double.html.md").read_text()
    assert f"- Address: {address}\n" in text


def test_a_page_without_an_address_claims_none():
    """A copy of the site would send searches to localhost."""
    for page in PAGES:
        soup = built.soup(page)
        assert not soup.find("link", rel="canonical"), page
        for script in soup.select('script[type="application/ld+json"]'):
            assert "localhost" not in script.string, page
    front = built.soup("index.html", built.WHOLE)
    assert not front.find("link", rel="canonical")
