"""Catalogs: what is asked of translators, and what becomes of their words."""

import json
import re

import checks_of_translations as checks
import first_uses
import names_in_figures
import pytest
from babel.messages.catalog import Catalog
from docutils import nodes
from docutils.core import publish_doctree

import tutorial
from languages import TRANSLATED
from translation import catalogs, lines, messages, pages, update

CODES = [language.code for language in TRANSLATED]
SCRIPTS = {tutorial.name_of(s): s.read_text() for s in tutorial.scripts()}
SCRIPT = '''r"""
A title
=======

A paragraph of
two lines.

.. math:: a + b, \\qquad
   c
"""

# %%

# Scaffold: imports.

import os  # behind code
           # it goes on

# %%
# A heading
# ---------
#
# 1. First, in
#    two lines.
# 2. Second.


def f(a):  # fmt: skip
    """What it does, in
    two lines.

    More.
    """
    # A comment in
    # two lines.
    return "# no comment"


f("%%")
'''
SAID = [
    "A title",
    "A paragraph of two lines.",
    "Scaffold: imports.",
    "behind code it goes on",
    "A heading",
    "First, in two lines.",
    "Second.",
    "What it does, in two lines.",
    "More.",
    "A comment in two lines.",
]


def test_what_a_script_says():
    assert messages.messages(SCRIPT) == SAID


def test_a_cell_may_have_comments_alone():
    assert messages.messages("# One.\n") == ["One."]


def test_a_number_at_the_end_of_a_sentence_begins_no_item():
    paragraph = "# It is as fast at 8192 and\n# 16384. There it ends.\n"
    said = "It is as fast at 8192 and 16384. There it ends."
    assert messages.messages("# %%\n" + paragraph) == [said]


def test_a_script_in_other_words():
    said = messages.translated(SCRIPT, lambda text: f"<{text}>")
    assert checks.same_code(SCRIPT, said)
    assert messages.messages(said) == [f"<{text}>" for text in SAID]
    back = messages.translated(said, lambda text: text[1:-1])
    bare = [text.replace("#", "").split() for text in (back, SCRIPT)]
    assert bare[0] == bare[1]
    long = messages.translated(SCRIPT, str.strip, width=10**6)
    assert "A paragraph of two lines." in long


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_tutorial_keeps_its_code_and_its_words(name):
    script = SCRIPTS[name]
    wide = messages.translated(script, lambda text: f"层。{text}，归一化")
    assert checks.same_code(script, wide)
    known = messages.messages(script)
    assert messages.messages(wide) == [f"层。{t}，归一化" for t in known]


def test_other_code_is_found():
    assert checks.same_code("f(1)  # one", "# two\nf(1)")
    assert checks.same_code('def f():\n    "a"', 'def f():\n    "b"')
    assert not checks.same_code("f(1)", "f(2)")
    assert not checks.same_code("f('a')", "f('b')")


def test_lines_of_wide_characters():
    text = "一个程序取一行，" * 8 + "读取 ``tl.load`` 一次。"
    wrapped = lines.wrapped(text, 40, "# ", "# ")
    assert len(wrapped) > 2
    assert all(lines.columns(line) <= 40 for line in wrapped)
    assert all(line.startswith("# ") for line in wrapped)
    assert lines.one([line[2:] for line in wrapped]) == text
    assert lines.columns("层 x") == 4
    joined = " ".join(line[2:] for line in wrapped)
    assert lines.tight(joined) == text
    assert lines.counted("取 16 列\nN = 8\n的 x 1 y 5 %") == (
        "取 16\xa0列\nN = 8\xa0的 x 1 y 5\xa0%"
    )
    assert lines.counted("共 4 MB，2 Bytes") == "共 4\xa0MB，2 Bytes"
    assert lines.close("最快的对手 的 2 倍 x 的") == "最快的对手的 2 倍 x 的"


def test_no_line_begins_with_a_space():
    text = "取 x，见 `各行由谁来加？ <02.html>`_。"
    for width in range(10, 40):
        wrapped = lines.wrapped(text, width)
        assert lines.one(wrapped) == text
        assert all(line == line.strip() for line in wrapped)


def test_no_line_becomes_an_item_of_a_list():
    text = "It takes 1.65 µs with 128. It takes longest with 32. So we ask."
    for width in range(10, 60):
        wrapped = lines.wrapped(text, width)
        assert lines.one(wrapped) == text
        assert not any(re.match(r"\d+\. ", line) for line in wrapped)


@pytest.mark.parametrize(
    ("source", "said", "fine"),
    [
        ("33 million numbers", "3300 万个数", True),
        ("33 million numbers", "33 万个数", False),
        ("1.98 billion cycles", "19.8 億サイクル", True),
        ("117 million", "1 億 1700 万", True),
        ("117 million", "1.17 亿", True),
        ("12 thousand rows", "1.2 万行", True),
        ("33 numbers of a million", "3300 万", False),
    ],
)
def test_large_numbers_as_the_language_counts(source, said, fine):
    assert (list(checks.problems(source, said)) == []) is fine


@pytest.fixture
def locale(tmp_path, monkeypatch):
    """A folder for the catalogs of a test."""
    monkeypatch.setattr(catalogs, "LOCALE", tmp_path / "locale")
    monkeypatch.setattr(catalogs, "COMPILED", tmp_path / "compiled")

    def write(name, catalog, code="zh_CN"):
        file = catalogs.path(code, name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(catalogs.text_of(catalog, code), encoding="utf-8")
        catalogs.compile_all(code)

    return write


def catalog(*pairs, **more):
    made = Catalog()
    for text, said in pairs:
        made.add(text, said, **more)
    return made


LONG = "and " * 30 + "more"


def test_a_refreshed_catalog(locale):
    old = catalog(
        ("It stays.", "留下。"),
        (f"A program takes one row {LONG}.", "一个程序取一行。"),
        ("It goes.", "去。"),
    )
    wanted = {
        f"A program takes two rows {LONG}.": "",
        "It stays.": "a note",
        "Said elsewhere.": "",
        "Something else entirely.": "",
    }
    new = update.refreshed(old, wanted, {"Said elsewhere.": "别处。"})
    text = catalogs.text_of(new, "zh_CN")
    assert "It goes." not in text and "#. a note" in text
    assert list(wanted) == [m.id for m in new if m.id]
    said = [catalogs.done(m) for m in new if m.id]
    assert said == [None, "留下。", "别处。", None]
    locale("a/page", new)
    read = catalogs.read("zh_CN", "a/page")
    fuzzy = read.get(f"A program takes two rows {LONG}.")
    assert fuzzy.fuzzy and fuzzy.string == "一个程序取一行。"
    assert fuzzy.previous_id == [f"A program takes one row {LONG}."]
    # Nothing has changed since: neither has the file.
    again = update.refreshed(read, wanted, {})
    assert catalogs.text_of(again, "zh_CN") == text
    say = catalogs.lookup("a/page", "zh_CN")
    assert say("It stays.") == "留下。"
    assert say(fuzzy.id) == fuzzy.id
    assert catalogs.translations("zh_CN", "a/page")("A comment") == ""


def test_a_broken_catalog_is_named(locale):
    locale("a/page", catalog(("One.", "一。")))
    file = catalogs.path("zh_CN", "a/page")
    file.write_text(file.read_text().replace("msgid", "msg", 2))
    with pytest.raises(SystemExit, match=r"a/page\.po is no catalog: "):
        catalogs.compile_all("zh_CN")


def test_what_has_no_translation_is_counted(locale, tmp_path, monkeypatch):
    file = tmp_path / "messages.json"
    file.write_text(json.dumps({"a/page": ["One.", "Two."]}))
    monkeypatch.setattr(pages, "FILE", file)
    monkeypatch.setattr(update.words, "messages", list)
    locale("a/page", catalog(("One.", "一。"), ("Two.", "二。")))
    locale("a/page", catalog(("One.", "いち。")), "ja")
    (line,) = update.summary()
    assert line.startswith("日本語: 1 messages are shown in English (a/page)")


PAGE = """
Title
=====

A paragraph
of two lines.

::

   def f():
       "What it does."
       return 1  # the first

::

   # printed

.. container:: measured

   Its passport.

.. container:: bp-xray

   What to look for.

   .. image:: a.png
      :alt: its words

.. image:: b.png
   :alt: A drawing
"""


def test_what_a_page_says():
    tree = publish_doctree(PAGE)
    cell, printed = tree.findall(nodes.literal_block)
    cell["language"], printed["language"] = "Python", "none"
    assert list(pages.said_by(tree)) == [
        "Title",
        "A paragraph of two lines.",
        "What it does.",
        "the first",
        "What to look for.",
        "A drawing",
    ]


SOURCE = "Load ``x`` 16 times, as :math:`a` and `page 01 <01.html>`_ say."
GOOD = "读取 ``x`` 16 次，见 :math:`a` 与 `第 01 页 <01.html>`_。"


def found(source, said):
    yield from checks.problems(source, said)
    yield from checks.style(source, said, "zh_CN")


def test_a_good_translation(monkeypatch):
    monkeypatch.setattr(checks, "glossary", lambda code: [("page", ["页"])])
    assert list(found(SOURCE, GOOD)) == []


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("``x``", "``y``", "literal ``x`` is missing"),
        ("``x`` ", "", "literal ``x`` is missing"),
        ("16", "十六", "number 16 is missing"),
        (":math:`a`", ":math:`b`", "role :math:`a` is missing"),
        ("<01.html>", "<02.html>", "link 01.html is missing"),
        ("`第 01 页 <01.html>`_", "第 01 页", "link 01.html is missing"),
        ("`第 01", "第 01", "broken"),
        ("16 次", "**16** 次", "bold"),
        ("。", ".", "half-width period"),
        ("，", ",", "half-width sign"),
        ("16 次", "16次", "no space behind"),
        ("读取 ", "读取", "no space before"),
        ("页", "章", "page is 页"),
        ("读取", "读\n取", "a line ends"),
        ("。", "（页）。", "opening bracket"),
        ("，", "， ", "a space beside"),
    ],
)
def test_a_bad_translation(old, new, problem, monkeypatch):
    monkeypatch.setattr(checks, "glossary", lambda code: [("page", ["页"])])
    assert old in GOOD
    each = list(found(SOURCE, GOOD.replace(old, new)))
    assert any(problem in one for one in each), each


# The catalogs of the project.


def translated(code):
    """All messages that have a translation: the page, and the message."""
    for file in (catalogs.LOCALE / code / "LC_MESSAGES").rglob("*.po"):
        name = file.relative_to(catalogs.LOCALE / code / "LC_MESSAGES")
        page = name.with_suffix("").as_posix()
        for message in catalogs.read(code, page):
            if message.id and catalogs.done(message):
                yield page, message


@pytest.mark.parametrize("code", CODES)
def test_translations_keep_code_numbers_links_and_markup(code):
    found = [
        f"{page}: {problem}: {message.string}"
        for page, message in translated(code)
        for problem in checks.problems(message.id, message.string)
    ]
    assert not found, "\n".join(found)


def in_language(name, code):
    """A script with all translations of its catalog."""
    catalog = catalogs.read(code, f"tutorials/{name}")
    return messages.translated(
        SCRIPTS[name], lambda text: catalogs.done(catalog.get(text)) or text
    )


@pytest.mark.parametrize("code", CODES)
def test_translated_scripts_are_the_same_code(code):
    for name, script in SCRIPTS.items():
        assert checks.same_code(script, in_language(name, code)), name


@pytest.mark.long
@pytest.mark.parametrize("code", CODES)
def test_translations_have_the_style_of_the_site(code):
    """Its terms, its signs, the same words for the same sentence, and no
    comment that makes a line too long; a link may."""
    found = [
        f"{page}: {problem}: {message.string}"
        for page, message in translated(code)
        for problem in checks.style(message.id, message.string, code)
    ]
    said = {}
    for page, message in translated(code):
        # A word may have another meaning elsewhere, and the entries of the
        # glossary have the English behind them.
        if " " in message.id and page != "glossary":
            said.setdefault(message.id, set()).add(message.string)
    assert len(said) > 1000
    found += [
        f"{name}: {line}"
        for name in SCRIPTS
        for line in in_language(name, code).split("\n")
        if lines.columns(line) > messages.WIDTH and ">`_" not in line
    ]
    found += [f"said in two ways: {t}" for t in said if len(said[t]) > 1]
    assert not found, "\n".join(found)


@pytest.mark.long
@pytest.mark.parametrize("code", CODES)
def test_the_names_in_figures_stand_in_the_text_in_both_forms(code):
    found = [
        f"{name}: {each}: {', '.join(lacking)} has no meaning beside it"
        for name in SCRIPTS
        if catalogs.path(code, tutorial.page_of(name)).exists()
        for each, (lacking, _) in names_in_figures.unnamed(name, code).items()
    ]
    assert not found, "\n".join(found)


@pytest.mark.long
@pytest.mark.parametrize("code", CODES)
def test_a_term_has_its_english_where_a_page_first_uses_it(code):
    found = [
        f"{name}: {term}, first in: {text}"
        for name in SCRIPTS
        for term, (text, _) in first_uses.without_english(name, code).items()
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("name", "text", "named"),
    [
        ("Copy", "曲线 Copy（复制）", True),
        ("Copy", "「Copy」（コピー）の線", True),
        ("Copy", "复制（Copy）达到", True),
        ("Copy", "Copy 最快（见上）", False),
        ("Copy", "Copy（see above）", False),
        ("columns", "横轴 N (columns)（列数）", True),
        ("columns", "N（列数，columns）", True),
        ("columns", "Split columns（拆分列）", False),
        ("programs", "程序（program）", True),
        ("Seed 1", "Seed（种子）", True),
    ],
)
def test_a_name_in_both_forms(name, text, named):
    text = names_in_figures.MARKS.sub("", text)
    assert names_in_figures.is_named(name, text) is named


def test_what_has_words():
    def worded(name, code="ja"):
        parts = names_in_figures.parts(name)
        return [p for p in parts if names_in_figures.has_words(p, code)]

    assert worded("N (queries, and keys)") == ["queries, and keys"]
    assert worded("dk and dv: four products") == ["four products"]
    assert worded("cuDNN, by PyTorch") == ["by PyTorch"]
    for name in ("Triton", "torch.compile", "Cut Cross-Entropy", "N = 1024"):
        assert worded(name) == []
    assert worded("warps") and not worded("warps", "zh_CN")


@pytest.mark.parametrize(
    ("term", "text", "has"),
    [
        ("tile", "一个分块（tile）有", True),
        ("tile", "一个“分块”（tiles）", True),
        ("tile", "分块，见（tile）", False),
        ("atomic", "用原子加法（atomic addition）", True),
        ("backward pass", "Backward pass（反向传播）", True),
        ("thread", "每个线程（thread）", True),
        ("thread", "每个线程（见下）", False),
    ],
)
def test_a_term_with_its_english(term, text, has):
    assert first_uses.has_english(term, text, "zh_CN") is has


def test_the_terms_that_have_their_english():
    chinese, japanese = map(first_uses.terms, CODES)
    assert {"tile", "kernel", "thread", "gradient"} <= chinese.keys()
    assert "warp" in japanese and "warp" not in chinese  # it stays
    assert "compiler" not in chinese  # which any engineer knows
    uses = first_uses.first_uses("layer-norm/01-layer-norm", "zh_CN")
    assert {"kernel", "gradient"} <= uses.keys()
