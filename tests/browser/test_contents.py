"""What stands on the pages: figures, passports, solutions, head matter."""

import json
import re
from urllib.parse import urlsplit

import pytest
from browser import built

import tutorial
from compiled import declared, limits
from measurements import recording

each_page = pytest.mark.parametrize("name", built.PAGES)
each_tutorial = pytest.mark.parametrize("name", built.TUTORIALS)


def test_there_are_tutorials():
    scripts = (built.ROOT / "tutorials").rglob("[0-9][0-9]-*.py")
    pages = (path.relative_to(built.ROOT) for path in scripts)
    expected = sorted(path.with_suffix(".html").as_posix() for path in pages)
    assert expected == built.TUTORIALS != []


@each_tutorial
def test_figures_have_both_forms_and_words(name):
    figures = built.soup(name).select("div.measured")
    assert figures
    for figure in figures:
        light, dark = (
            figure.select(f"img.only-{form}") for form in ("light", "dark")
        )
        passports = figure.select("div.passport")
        assert len(light) == len(dark) == len(passports) >= 1
        for a, b in zip(light, dark, strict=True):
            assert len(a["alt"].split()) > 10
            assert a["alt"] == b["alt"]
            assert b["src"] == a["src"].replace(".svg", "_dark.svg")


INDEXES = [page for page in built.PAGES if page.endswith("index.html")]


@pytest.mark.parametrize("page", INDEXES)
def test_what_leads_to_a_tutorial_has_its_picture(page):
    """In both forms; the words beside it say what it shows."""
    leading = built.soup(page).select(".bp-card, .bp-step")
    expected = len(built.TUTORIALS) if page == "index.html" else 1
    assert len(leading) >= expected
    for each in leading:
        for form in "light", "dark":
            (image,) = each.select(f"img.only-{form}")
            assert image["alt"] == ""
            assert image["loading"] == "lazy"
            file = (built.SITE / page).parent / image["src"]
            text = file.read_text(encoding="utf-8")
            # Wider ones would have small letters in a card.
            (width,) = re.findall(r'viewBox="0 0 (\S+) ', text)
            assert float(width) < 330


def circumstances(passport):
    """What a passport says, but its subject and the numbers."""
    when = passport.p.strong.next_sibling
    names = [dt.get_text(" ").strip(" :") for dt in passport.dl.select("dt")]
    values = [dd.get_text(" ").strip() for dd in passport.dl.select("dd")]
    fields = dict(zip(names, values, strict=True))
    return " ".join(when.get_text().split()), fields


@each_tutorial
def test_passports_are_complete(name):
    # A passport stands under a figure, never by itself.
    soup = built.soup(name)
    passports = soup.select("div.passport")
    assert passports == soup.select("div.measured div.passport")
    said = []  # of each GPU, once
    for passport in passports:
        subject = passport.strong.get_text()
        csv, data = passport.select("a.download")
        benchmark, gpu = csv["href"].split("/")[-1].split(".")[1:3]
        if above := passport.select_one('a[href^="#passport-"]'):
            source = soup.select_one(above["href"])
            when, fields = circumstances(source)
            assert (gpu, when, fields) in said
            assert not passport.find("dl", recursive=False)
        else:
            when, fields = circumstances(passport)
            assert (gpu, when, fields) not in said
            said.append((gpu, when, fields))
        kind = r"(Recorded|Measured on this machine, by this build,)"
        pattern = (
            rf"{kind} 20\d\d-\d\d-\d\d\. "
            r"(\d+ GPU checks passed before recording|GPU checks: not run)"
        )
        assert re.match(pattern, when), when
        counted = "Nsight Compute" in fields["Versions"]
        several = any(each in name for each in ("/several-gpus/", "/model/"))
        assert ("GPUs" in fields) <= several
        assert fields.keys() - {"Not counted", "GPUs"} == {
            *("Versions", "Method"),
            *(["Counted"] if counted else []),
        }
        versions, method = fields["Versions"], fields["Method"]
        assert re.fullmatch(
            r"driver \S+, CUDA \S+, torch \S+, triton \S+, Python \S+"
            r"(, Nsight Compute [\d.]+)?(, [\w-]+ \d[\w.]*)*",
            versions,
        ), versions
        assert len(method.split()) > 3, method
        file = (built.SITE / name).parent / data["href"]
        whole = json.loads(file.read_text())
        recorded = whole["benchmarks"][benchmark]
        assert recording.slug(whole["environment"]["gpu"]) == gpu
        # a benchmark's arguments and the GPU
        assert re.fullmatch(r"\S.*, \S.*\.", subject)
        assert whole["environment"]["gpu"] in subject
        for key, value in recorded["args"].items():
            at = fields["Counted"] if key == "counter" else subject.lower()
            value = str(value).lower()
            pattern = rf"\b(?i:{key}) = {value}\b|^{value} pass\b"
            there = value in at.split(", ") or re.search(pattern, at)
            assert there, f"{key} = {value}"
        rows = passport.select("details table tbody tr")
        assert rows
        columns = len(passport.select("thead th"))
        assert columns >= 2
        for row in rows:
            cells = [cell.get_text().strip() for cell in row.select("td")]
            assert len(cells) == columns
            assert all(cells)


@each_page
def test_what_is_folded_is_folded_once(name):
    inner = built.soup(name).select("article details details")
    assert not [each.summary.get_text() for each in inner]


@each_tutorial
def test_solutions_are_folded(name):
    soup = built.soup(name)
    assert soup.select(".sphx-glr-footer")
    assert not soup.select("details .sphx-glr-footer")
    solutions = soup.select("details.bp-solution")
    titles = [s.summary.get_text().strip() for s in solutions]
    assert any(re.match(r"Solution 1\b", title) for title in titles)
    for solution in solutions:
        assert "open" not in solution.attrs
        assert solution.select("div.highlight-Python pre")


DRAWN = """all => all.map(a => [
  a.href, getComputedStyle(a, '::before').content,
  getComputedStyle(a).counterIncrement])"""


@pytest.mark.parametrize("name", [n for n in built.TUTORIALS if "/01-" in n])
def test_the_list_beside_a_page_has_the_numbers_of_pages(page, name):
    """Which are those of their files: what is counted is in their order."""
    page.goto(name)
    found = page.locator(".bd-docs-nav a").evaluate_all(DRAWN)
    counted = [each for each in found if each[2] != "none"]
    numbers = [address.rpartition("/")[2][:2] for address, *_ in counted]
    pages = sum(
        each.startswith(name.partition("01-")[0]) for each in built.TUTORIALS
    )
    assert numbers == [f"{i:02}" for i in range(1, pages + 1)]
    drawn = {content for _, content, _ in counted}
    assert drawn == {"counter(tutorial, decimal-leading-zero)"}


@each_tutorial
def test_kernels_have_their_xray(name):
    kernels = declared.kernels(built.stem(name)).kernels
    panels = built.soup(name).select("details.bp-xray")
    titles = [p.summary.get_text().strip() for p in panels]
    assert sorted(titles) == sorted(f"X-ray of {kernel}" for kernel in kernels)
    for panel in panels:
        assert "open" not in panel.attrs
        tabs = [t.get_text().strip() for t in panel.select("label")]
        only = kernels[panel.summary.get_text().split()[-1]].only
        named = ["H200 · sm_90"] if only else ["A100 · sm_80", "H200 · sm_90"]
        assert tabs[: len(named)] == named
        shown = tuple(tab.split(" · ")[1] for tab in tabs)
        assert shown == ((only,) if only else limits.SHOWN)
        for tab in panel.select(".sd-tab-content"):
            assert len(tab.select("tbody tr")) == 13
            assert tab.select("pre.bp-way")  # lines that do something
            levels = {dt.get_text() for dt in tab.select("dt")}
            # A kernel for one GPU is in Gluon, which begins with GPU IR.
            assert levels >= ({"GPU IR"} if only else {"Triton IR", "GPU IR"})
            assert len(tab.select("a.download")) == len(levels)


def meta(soup, name):
    found = soup.find("meta", {"name": name}) or soup.find(
        "meta", {"property": name}
    )
    return found["content"].strip() if found else ""


@each_page
def test_title_and_icon(name):
    soup = built.soup(name)
    assert soup.html["lang"] == "en"
    assert soup.title.get_text().strip()
    assert len(soup.find_all("title")) == 1
    icon = soup.find("link", rel="icon")["href"]
    folder = (built.SITE / name).parent
    if name == "404.html":
        icon, folder = icon.removeprefix(built.prefix()), built.SITE
    assert (folder / icon).is_file()


def test_titles_say_the_subject():
    """No two are the same, and none says one thing twice."""
    titles = {name: built.soup(name).title.get_text() for name in built.PAGES}
    assert len(set(titles.values())) == len(titles)
    for name, title in titles.items():
        parts = [part.strip() for part in re.split(" [-—] ", title)]
        assert len(set(parts)) == len(parts) > 1, title
        assert parts[0 if name == "index.html" else -1] == "Both Passes"
    for name in built.TUTORIALS:
        section = (built.SITE / name).with_name("index.html")
        if name.count("/") > 1:
            subject = built.soup(section.relative_to(built.SITE).as_posix())
            assert subject.h1.find(string=True) in titles[name]


PROPER = {
    *("Triton", "PyTorch", "GPU", "GPUs", "GPT", "RMS", "SM"),
    *("Composable", "Kernel"),
}


@pytest.mark.parametrize("name", [p for p in built.PAGES if p != "index.html"])
def test_titles_are_sentences(name):
    """No word but the first has a capital letter, names aside."""
    title = built.soup(name).h1.find(string=True)
    words = re.findall(r"[A-Za-z]\w*", title)[1:]
    capital = {word for word in words if word[0].isupper()}
    assert not capital - PROPER, title


@pytest.mark.parametrize("name", ["index.html", *built.TUTORIALS])
def test_what_a_shared_link_shows(name):
    soup = built.soup(name)
    for tag in ("description", "og:description"):
        assert 40 < len(meta(soup, tag)) <= 300, tag
        assert meta(soup, tag)[-1] in ".?!", tag
    assert meta(soup, "description") == meta(soup, "og:description")
    if name in built.TUTORIALS:  # its first sentence
        said = meta(soup, "description").split(" ")[:5]
        first = tutorial.source(built.stem(name)).split("\n\n")[1].split()
        assert said == [word.strip("`*") for word in first[:5]]
    for tag in ("og:title", "og:type", "og:site_name", "og:image:alt"):
        assert meta(soup, tag), tag
    address = meta(soup, "og:url")
    assert address.endswith("/" + name.removesuffix("index.html"))


def test_each_tutorial_has_a_picture_of_its_own():
    pictures = {}
    for name in ["index.html", *built.TUTORIALS]:
        address = urlsplit(meta(built.soup(name), "og:image")).path
        picture = built.SITE / address.removeprefix(built.prefix())
        data = picture.read_bytes()
        assert data.startswith(b"\x89PNG")
        width, height = (int.from_bytes(data[i : i + 4]) for i in (16, 20))
        assert width >= 1200
        assert 1.8 <= width / height <= 2.1
        pictures[name] = data
    assert len(set(pictures.values())) == len(pictures)
