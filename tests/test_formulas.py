"""Formulas become MathML, and what is not LaTeX stops the build."""

import io
import re

import formula_font
import pytest
from docutils.utils.math import MathError
from sphinx.application import Sphinx

from page.formulas import mathml


def test_a_script_stands_beside_an_accent():
    text = mathml(r"\hat{x}_j^2")
    assert "munder" not in text
    accent = (
        '<mover accent="true"><mi>x</mi><mo stretchy="false">ˆ</mo></mover>'
    )
    assert f"<msub>{accent}<mi>j</mi></msub>" in text


def test_a_name_stands_under_its_brace():
    text = mathml(r"\underbrace{x}_{c} + \overbrace{x}^{c} + x_c", block=True)
    brace = "<munder><mi>x</mi><mo>⏟</mo></munder>"
    assert f"<munder>{brace}<mi>c</mi></munder>" in text
    assert "⏞</mo></mover><mi>c</mi></mover>" in text
    assert "<msub><mi>x</mi><mi>c</mi></msub>" in text


def test_a_displayed_formula_may_break_where_it_has_room():
    text = mathml(r"a = b, \qquad c = d", block=True)
    first, second = text.split("</math>", 1)
    assert "<mi>b</mi><mo>,</mo>" in first
    assert second.startswith('<math display="block"><mi>c</mi>')


def test_words_are_words():
    assert "<mi>dropout</mi>" in mathml(r"\mathrm{dropout}(x)")


@pytest.mark.parametrize(
    "tex", [r"\nosuch{x}", r"\frac{1}", "x_", "{a", "a}", r"\hat{x"]
)
def test_what_is_not_latex_is_refused(tex):
    with pytest.raises(MathError):
        mathml(tex)


def test_a_build_names_the_place(tmp_path):
    page = "Title\n=====\n\nHere: :math:`\\mu + x`.\n\nOr :math:`\\nosuch{y}`."
    (tmp_path / "index.rst").write_text(page)
    said = io.StringIO()
    app = Sphinx(
        *(tmp_path, None, tmp_path / "html", tmp_path / "read", "html"),
        confoverrides={"extensions": ["page.formulas"]},
        status=None,
        warning=said,
    )
    app.build()
    (place,) = re.findall(
        r"(\S+:\d+): WARNING: a formula: .*\\nosuch", said.getvalue()
    )
    assert place.endswith("index.rst:6")
    assert "<math><mi>μ</mi>" in (app.outdir / "index.html").read_text("utf-8")


def test_the_font_has_every_letter_of_the_formulas():
    letters = formula_font.of_site()
    assert letters >= {"+", "x"}  # there is a site
    cut, whole = formula_font.has()
    missing = formula_font.shown(letters) & whole - cut
    assert not missing, f"{missing}: run python tests/formula_font.py"
