"""Every download of every page is its source, byte for byte.

A script is its source behind a head, see tests/test_downloads.py.
"""

from pathlib import PurePosixPath
from urllib.parse import urljoin
from urllib.request import urlopen

import pytest
from browser import built

DOCS = built.ROOT / "docs"


def source(page, link):
    """The file that a download link of a page must hand out."""
    folder = PurePosixPath(page).parent
    name = PurePosixPath(link["href"]).name
    ending = PurePosixPath(name).suffix
    if ending == ".py":
        own = built.ROOT / folder / name
        # The front page offers one of a section.
        return own if own.exists() else offered(link)
    if ending in (".ipynb", ".zip"):
        made = DOCS / "_build/downloads/en"
        return made / folder.relative_to("tutorials") / name
    if ending in (".ttir", ".ttgir", ".ptx", ".sass", ".amdgcn"):
        return DOCS / "tutorials/xray" / name
    if ending == ".csv" or name.endswith(".live.json"):
        return DOCS / "tutorials/raw" / name
    if ending == ".json":  # of the GPU that the table beside it names
        table = link.find_previous("a", class_="download")["href"]
        gpu = table.removesuffix(".csv").rpartition(".")[2]
        section = folder.relative_to("tutorials")
        return DOCS / "measurements" / gpu / section / name
    raise AssertionError(f"a download of an unknown kind: {name}")


def offered(link):
    """The script of the page that stands in the same sentence."""
    (page,) = link.find_parent("p").select("a.reference[href$='.html']")
    return built.ROOT / page["href"].replace(".html", ".py")


def downloads(name):
    return built.soup(name).select("a[download]")


def fetched(base, name, link):
    with urlopen(urljoin(base + name, link["href"])) as answer:
        assert answer.status == 200
        return answer.read()


@pytest.mark.parametrize("name", built.PAGES)
def test_downloads_are_their_sources(base, name):
    for link in downloads(name):
        expected = source(name, link)
        got, wanted = fetched(base, name, link), expected.read_bytes()
        script = expected.suffix == ".py"
        same = got.endswith(wanted) if script else got == wanted
        assert same, f"{link['href']} is not {expected}"


@pytest.mark.parametrize("name", built.TUTORIALS)
@pytest.mark.parametrize("ending", ["py", "ipynb"])
def test_tutorial_is_offered_twice(name, ending):
    """Under the title and at the end of the page."""
    wanted = f"{built.stem(name).split('/')[-1]}.{ending}"
    offers = [a for a in downloads(name) if a["href"].endswith("/" + wanted)]
    assert len(offers) == 2
    places = [bool(a.find_parent(class_="bp-downloads")) for a in offers]
    assert sorted(places) == [False, True]


def test_index_offers_everything():
    names = [
        a["href"].rpartition("/")[2] for a in downloads("tutorials/index.html")
    ]
    assert sorted(names) == ["tutorials_jupyter.zip", "tutorials_python.zip"]
