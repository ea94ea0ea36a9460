"""Sections: folders of tutorials, beside tutorials in no folder."""

import json
import re
import zipfile
from urllib.parse import quote

import pytest
from bs4 import BeautifulSoup
from project import ROOT, Project

import tutorial

# In reading order: tutorials/index.rst lists z, then no section, then b.
NAMES = ("z-sums/01-double", "z-sums/02-double", "01-double", "b/01-double")
SCALES = {name: 1 + i for i, name in enumerate(NAMES)}
EACH = pytest.mark.parametrize("name", NAMES)


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    project = Project(tmp_path_factory.mktemp("sections"), NAMES)
    for name, scale in SCALES.items():
        # Backward, so that its figure is the picture of the card.
        project.edit('"mode": "forward"', '"mode": "backward"', name)
        project.record(name, scale=scale)
    done = project.build(GITHUB_REPOSITORY="someone/site")
    assert done.returncode == 0, done.stdout[-3000:]
    assert project.executed(done.stdout) == len(NAMES)
    return project


@pytest.fixture(scope="module")
def read(project):
    def read(page):
        text = (project.root / "html" / f"{page}.html").read_text()
        return BeautifulSoup(text, "html.parser")

    return read


def target(page, href):
    """The page that a link leads to, as a path below tutorials/."""
    parts = f"tutorials/{page}".split("/")[:-1]
    for part in href.removesuffix(".html").split("/"):
        parts = parts[:-1] if part == ".." else [*parts, part]
    return "/".join(parts).removeprefix("tutorials/")


@EACH
def test_a_page_has_its_own_numbers_and_files(project, read, name):
    page = read(f"tutorials/{name}")
    speed = 1000.25 * SCALES[name]
    assert f"rows: [{speed}, {2 * speed}]" in page.get_text()
    here = (project.root / "html/tutorials" / name).parent
    files = {
        a["href"].rpartition(".")[2]: here / a["href"]
        for a in page.select("article a.download")
    }
    recorded = project.recording(name).read_bytes()
    assert files["json"].read_bytes() == recorded
    names, first, *_ = files["csv"].read_text().splitlines()
    assert names == "N,provider,median,low,high,unit"
    assert first == f"8,triton,{speed},{speed - 1},{speed + 1},GB/s"
    script = files["py"].read_bytes()
    assert script.endswith(project.script(name).read_bytes())
    notebook = json.loads(files["ipynb"].read_text())
    title = "".join(notebook["cells"][2]["source"]).splitlines()
    assert f"# Double {name.removesuffix('-double')}" in title


def test_no_two_pages_share_a_picture(project, read):
    pictures = []
    for name in NAMES:
        here = (project.root / "html/tutorials" / name).parent
        images = read(f"tutorials/{name}").select("img.bp-figure")
        assert len(images) == 2  # light and dark
        pictures += [here.joinpath(i["src"]).resolve() for i in images]
    here = project.root / "html/tutorials"
    cards = read("tutorials/index").select("img.bp-card-picture")
    pictures += [here.joinpath(i["src"]).resolve() for i in cards]
    assert len(pictures) == 4 * len(NAMES)
    assert len(set(pictures)) == len(pictures)
    assert all(path.is_file() for path in pictures)


def cards(part):
    return [a["href"] for a in part.select(".bp-card-title a")]


def test_the_front_page_groups_cards_by_section(read):
    page = read("index")
    assert cards(page) == [f"tutorials/{name}.html" for name in NAMES]
    assert len(page.select(".bp-step")) == len(NAMES)
    sections = page.select('section[id^="section-"]')
    assert [s.h3.a["href"] for s in sections] == [
        "tutorials/z-sums/index.html",
        "tutorials/b/index.html",
    ]
    assert [s.h3.a.get_text() for s in sections] == ["About z-sums", "About b"]
    assert sections[0].p.get_text() == "What this section is about."
    assert cards(sections[0]) == [
        f"tutorials/{name}.html" for name in NAMES[:2]
    ]


def test_the_button_of_the_front_page_leads_to_the_first_tutorial():
    front = (ROOT / "docs/index.rst").read_text(encoding="utf-8")
    (there,) = re.findall(r":: bp-actions\n\n +:doc:`.*<(.*)>`", front)
    assert there == f"tutorials/{tutorial.name_of(tutorial.scripts()[0])}"


def test_a_section_has_its_own_cards_only(read):
    page = read("tutorials/z-sums/index")
    assert cards(page) == ["01-double.html", "02-double.html"]


@EACH
def test_the_sidebar_shows_a_section_and_titles_of_others(read, name):
    sidebar = read(f"tutorials/{name}").select_one(".bd-sidebar-primary")
    here = name
    links = [a["href"] for a in sidebar.select("nav a.internal")]
    found = [here if link == "#" else target(name, link) for link in links]
    everything = (
        *("z-sums/index", "z-sums/01-double", "z-sums/02-double"),
        "01-double",
        *("b/index", "b/01-double"),
    )
    section = name.rpartition("/")[0]
    assert found == [
        page
        for page in everything
        if page.rpartition("/")[0] in ("", section) or "index" in page
    ]
    for details in sidebar.select("details"):
        assert "open" in details.attrs
        assert details.summary["aria-label"]  # it shows an arrow, no word


def test_next_runs_through_all(read):
    page, seen = "index", []
    while link := read(f"tutorials/{page}").select_one("a.right-next"):
        page = target(page, link["href"])
        if not page.startswith((*"0zb", "index")):
            break  # past the tutorials
        seen.append(page)
        assert len(seen) < 20
    tutorials = [page for page in seen if page in NAMES]
    assert tutorials == list(NAMES)
    assert seen[:2] == ["z-sums/index", "z-sums/01-double"]


@EACH
def test_a_page_has_its_downloads_and_its_notebook_on_colab(read, name):
    links = [
        a["href"] for a in read(f"tutorials/{name}").select(".bp-downloads a")
    ]
    assert [link.rpartition(".")[2] for link in links] == [
        *("py", "ipynb", "ipynb"),
    ]
    assert read(f"tutorials/{name}").h1.find_next_sibling()["class"] == [
        "bp-downloads"
    ]
    assert links[-1] == (
        "https://colab.research.google.com/github/someone/site/"
        f"blob/notebooks/en/{name}.ipynb"
    )


@EACH
def test_the_notebook_for_colab_is_where_its_link_leads(project, read, name):
    """In the folders that the workflow puts on the branch of notebooks."""
    link = read(f"tutorials/{name}").select(".bp-downloads a")[-1]["href"]
    there = link.partition("/blob/notebooks/")[2]
    assert (project.root / "docs/_build/downloads" / there).is_file()
    workflow = (ROOT / ".github/workflows/publish.yml").read_text()
    assert 'cd "docs/_build/downloads/$language"' in workflow
    assert "git init -q -b notebooks" in workflow


def test_every_page_links_to_the_repository(read):
    for page in ("index", "tutorials/z-sums/01-double"):
        header = read(page).select_one(".bd-header")
        assert header.select('a[href="https://github.com/someone/site"]')


@pytest.mark.parametrize(
    ("page", "source"),
    [
        ("index", "docs/index.rst"),
        ("how-it-is-built", "docs/how-it-is-built.rst"),
        ("tutorials/index", "tutorials/index.rst"),
        ("tutorials/b/index", "tutorials/b/index.rst"),
        ("tutorials/z-sums/01-double", "tutorials/z-sums/01-double.py"),
    ],
)
def test_a_reader_can_mend_a_page_or_report_it(project, read, page, source):
    mend, report, home = (
        a["href"] for a in read(page).select(".bp-feedback a")
    )
    assert home == "https://github.com/someone/site"
    assert mend == f"{home}/edit/main/{source}"
    assert (project.root / source).is_file()
    title = quote(read(page).h1.find(string=True))
    assert report == f"{home}/issues/new?title={title}%3A%20&body={page}"


def test_the_archives_hold_all(project):
    for kind, ending in (("python", "py"), ("jupyter", "ipynb")):
        (archive,) = project.root.glob(
            f"html/_downloads/*/tutorials_{kind}.zip"
        )
        names = zipfile.ZipFile(archive).namelist()
        assert sorted(names) == sorted(f"{name}.{ending}" for name in NAMES)


def test_a_section_that_is_not_listed_stops_the_build(tmp_path):
    project = Project(tmp_path, ("z/01-double",))
    index = project.root / "tutorials/index.rst"
    index.write_text(index.read_text().replace("   z/index\n", ""))
    done = project.build()
    assert done.returncode != 0
    assert "z/index.rst" in done.stdout
    assert "isn't included in any toctree" in done.stdout


def test_a_section_without_an_index_stops_the_build(tmp_path):
    project = Project(tmp_path, ("z/01-double",))
    (project.root / "tutorials/z/index.rst").unlink()
    done = project.build()
    assert done.returncode != 0
    assert "tutorials/z has no index.rst" in done.stdout


READMES = sorted(ROOT.glob("README*.md"))


@pytest.mark.parametrize("readme", READMES, ids=lambda path: path.name)
def test_the_readme_leads_to_every_section(readme):
    text = readme.read_text(encoding="utf-8")
    for section in tutorial.sections():
        assert f"](tutorials/{section})" in text


@pytest.mark.parametrize("readme", READMES, ids=lambda path: path.name)
def test_the_readmes_lead_to_each_other_and_say_the_same_commands(readme):
    blocks = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
    text = readme.read_text(encoding="utf-8")
    for other in READMES:
        assert (f"]({other.name})" in text) == (other != readme)
    for target in re.findall(r"\]\(([\w./-]+)", text):
        assert target.startswith("http") or (ROOT / target).exists(), target
    english = blocks.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    own = blocks.findall(text)
    assert own[0] == english[0]
    assert set(own) <= set(english)
