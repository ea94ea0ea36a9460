"""What the search is given to index of a page."""

import re

import pytest
from bs4 import BeautifulSoup

from languages import TRANSLATED
from page import search
from page.formulas import mathml

HEAD = '<a class="headerlink" href="#x">#</a>'
PAGE = f"""<article class="bd-article"><section id="terms">
<h1>Glossary{HEAD}</h1><p>All of them.</p><dl class="glossary">
<dt id="term-warp">warp{HEAD}</dt><dd><p>32 threads.</p></dd>
<dt id="term-SM">SM{HEAD}</dt><dd><p>It has warps.</p></dd></dl>
</section></article>"""


def test_each_term_of_the_glossary_is_found_by_itself():
    found = dict(search.sections(PAGE, [["warps", "num_warps"]], True))
    assert list(found) == ["index", "term-warp", "term-SM"]
    texts = [
        " ".join(BeautifulSoup(text, "html.parser").body.get_text(" ").split())
        for text in found.values()
    ]
    assert texts == [
        "Glossary All of them.",
        "warp 32 threads.",
        "SM It has warps.",
    ]
    for name, value in (
        ("title", "SM"),
        ("page", "Glossary"),
        ("also", "num_warps = warps"),
        ("aside", "yes"),
    ):
        meta = f'data-pagefind-meta="{name}[content]" content="{value}"'
        assert meta in found["term-SM"]


@pytest.mark.parametrize(
    ("tex", "words"),
    [
        (r"x_j^2", "x_j^2"),
        (r"\hat{x}_j", "x\N{COMBINING CIRCUMFLEX ACCENT}_j"),
        (r"a < \frac{1}{N}", "a &lt; 1 / N"),
        (r"\sqrt{a + b}", "√(a + b)"),
        (r"\sum_j x_j", "∑_j x_j"),
    ],
)
def test_a_formula_is_indexed_in_words(tex, words):
    formula = search.MATH.match(mathml(tex))
    assert re.sub(" +", " ", search.in_words(formula)) == words


def test_chinese_and_japanese_are_cut_into_words():
    cut = search.apart("不存矩阵的CUDA 图。ループのまわり").split()
    assert cut == [*"不存矩阵的", "CUDA", *"图。", "ループ", *"のまわり"]


def test_a_translated_section_is_found_by_its_english_title(monkeypatch):
    monkeypatch.setattr(search, "CURRENT", TRANSLATED[0])
    found = dict(search.sections(PAGE, [["warp", "32 threads"]]))
    assert (
        'meta="titled[content]" content="warp; 32 threads"'
        in (found["term-warp"])
    )
