"""The moving picture is on its pages, in words that can be translated."""

import json
import re
from types import SimpleNamespace

import jinja2
import pytest
from bs4 import BeautifulSoup
from docutils import nodes
from project import ROOT
from sphinx.errors import ExtensionError

import style
from page import moving

SITE = ROOT / "docs/_build/html/en"
STATIC = ROOT / "docs/_static"
TEMPLATE = ROOT / "docs/_templates" / "two-stages.html"
PAGE, FUNCTION = "layer-norm/03-lock", "_add_behind_lock"


@pytest.fixture(autouse=True)
def site():
    if not SITE.exists():
        pytest.fail("build the site first: make html")


def test_it_stands_behind_the_cell_that_it_shows():
    text = (SITE / "tutorials" / f"{PAGE}.html").read_text(encoding="utf-8")
    soup = BeautifulSoup(text, "html.parser")
    (figure,) = soup.select("figure.bp-stages")
    cell = figure.find_previous_sibling()
    assert f"def {FUNCTION}(" in cell.get_text()
    # Without JavaScript nothing but the drawing is shown.
    assert "hidden" in figure.attrs


def test_other_pages_load_nothing_of_it():
    for page in SITE.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        its = page == SITE / "tutorials" / f"{PAGE}.html"
        assert ("_static/two-stages.js?" in text) == its, page


def rendered(translate=str):
    """The picture, its words passed through a function."""
    env = jinja2.Environment(extensions=["jinja2.ext.i18n"])
    env.install_gettext_callables(translate, lambda a, b, n: translate(a))
    env.filters["forceescape"] = lambda s: str(jinja2.filters.escape(str(s)))
    html = env.from_string(TEMPLATE.read_text(encoding="utf-8"))
    text = html.render(rows=16, programs=4)
    return BeautifulSoup(text, "html.parser").figure


def test_every_word_can_be_translated():
    figure = rendered(lambda text: f"«{text}»")
    for word in json.loads(figure["data-words"]).values():
        assert re.fullmatch("«[^«»]+»", word)
    for tag in figure.find_all(string=True):
        # Digits need no translation.
        if re.search("[a-z]", tag):
            assert tag.strip().startswith("«") and tag.strip().endswith("»")
    for tag in figure.select("[aria-label]"):
        assert tag["aria-label"].startswith("«")


def test_words_and_states_fit_together():
    """No state without a sentence, no sentence without a state."""
    model = (STATIC / "two-stages-model.js").read_text(encoding="utf-8")
    words = json.loads(rendered()["data-words"])
    shown = re.compile(r"state-|lock-\d|(row|program|buffer|warp|result)$")
    sentences = {
        name.removesuffix(".one")
        for name in words
        if not shown.match(name) and name not in ("play", "pause")
    }
    missing = {name for name in sentences if f'"{name}"' not in model}
    assert not missing


def test_the_colors_are_those_of_the_figures():
    css = (STATIC / "two-stages.css").read_text(encoding="utf-8")
    found = re.findall(r"--b(\d): (#\w+);", css)
    series = style.SERIES[:4]
    expected = [
        (str(i), style.PALETTE[name][form])
        for form in (0, 1)
        for i, name in enumerate(series)
    ]
    assert found == expected


@pytest.mark.parametrize("code", ["def ff():", "    def f():", "f()"])
def test_a_page_without_the_cell_stops_the_build(code):
    block = nodes.literal_block(code, code)
    config = SimpleNamespace(moving_pictures={"page": {"after": "f"}})
    app = SimpleNamespace(config=config, env=SimpleNamespace(docname="page"))
    with pytest.raises(ExtensionError, match="page: no cell defines f"):
        moving.place(app, nodes.section("", block))
