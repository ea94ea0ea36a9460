"""Catalogs: what is asked of translators, and what becomes of their words."""

from types import SimpleNamespace

import pytest
from babel.messages.catalog import Catalog

import tutorial
from languages import TRANSLATED
from translation import (
    build,
    catalogs,
    checks,
    lines,
    messages,
    pages,
    untranslated,
    update,
)

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
plt.figure("a picture")
'''
SAID = [
    ("A title", "heading"),
    ("A paragraph of two lines.", "prose"),
    ("Scaffold: imports.", "comment"),
    ("behind code it goes on", "comment"),
    ("A heading", "heading"),
    ("First, in two lines.", "item"),
    ("Second.", "item"),
    ("What it does, in two lines.", "docstring"),
    ("More.", "docstring"),
    ("A comment in two lines.", "comment"),
    ("a picture", "picture"),
]


def test_what_a_script_says():
    found = [(text, kind) for text, kind, _ in messages.messages(SCRIPT)]
    assert found == SAID


def test_a_script_in_other_words():
    said = messages.translated(SCRIPT, lambda text: f"<{text}>")
    assert messages.same_code(SCRIPT, said)
    kept = [("a picture", "picture")]  # the page says it, not the code
    found = [(text, kind) for text, kind, _ in messages.messages(said)]
    assert found == [(f"<{t}>", k) for t, k in SAID[:-1]] + kept
    back = messages.translated(said, lambda text: text[1:-1])
    bare = [text.replace("#", "").split() for text in (back, SCRIPT)]
    assert bare[0] == bare[1]


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_tutorial_keeps_its_code_and_its_words(name):
    def known(text):
        return [m.text for m in messages.messages(text) if m.kind != "picture"]

    script = SCRIPTS[name]
    wide = messages.translated(script, lambda text: f"层。{text}，归一化")
    assert messages.same_code(script, wide)
    assert known(wide) == [f"层。{text}，归一化" for text in known(script)]


def test_other_code_is_found():
    assert messages.same_code("f(1)  # one", "# two\nf(1)")
    assert messages.same_code('def f():\n    "a"', 'def f():\n    "b"')
    assert not messages.same_code("f(1)", "f(2)")
    assert not messages.same_code("f('a')", "f('b')")


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


def test_no_line_begins_with_a_space():
    text = "取 x，见 `各行由谁来加？ <02.html>`_。"
    for width in range(10, 40):
        wrapped = lines.wrapped(text, width)
        assert lines.one(wrapped) == text
        assert all(line == line.strip() for line in wrapped)


def catalog(*pairs, **more):
    made = Catalog()
    for text, said in pairs:
        made.add(text, said, **more)
    return made


def test_a_refreshed_catalog(tmp_path, monkeypatch):
    old = catalog(
        ("It stays.", "留下。"),
        ("A program takes one row.", "一个程序取一行。"),
        ("It goes.", "去。"),
    )
    wanted = [
        ("A program takes two rows.", "prose"),
        ("It stays.", "comment"),
        ("Said elsewhere.", ""),
        ("Something else entirely.", "heading"),
    ]
    new = catalogs.refreshed(old, wanted, {"Said elsewhere.": "别处。"})
    text = catalogs.text_of(new, "zh_CN")
    assert "It goes." not in text and "It stays." in text
    assert [text for text, _ in wanted] == [m.id for m in new if m.id]
    said = [catalogs.done(m) for m in new if m.id]
    assert said == [None, "留下。", "别处。", None]
    monkeypatch.setattr(catalogs, "LOCALE", tmp_path)
    file = catalogs.path("zh_CN", "a/page")
    file.parent.mkdir(parents=True)
    file.write_text(text)
    read = catalogs.read("zh_CN", "a/page")
    fuzzy = read.get("A program takes two rows.")
    assert fuzzy.fuzzy and fuzzy.string == "一个程序取一行。"
    assert fuzzy.previous_id == ["A program takes one row."]
    # Nothing has changed since: neither has the file.
    again = catalogs.refreshed(read, wanted, {})
    assert catalogs.text_of(again, "zh_CN") == text
    say = catalogs.lookup("zh_CN", "a/page")
    assert say("It stays.") == "留下。"
    assert say("A program takes two rows.") == "A program takes two rows."
    catalogs.of_file.cache_clear()


SOURCE = "Load ``x`` 16 times, as :math:`a` and `page 01 <01.html>`_ say."
GOOD = "读取 ``x`` 16 次，见 :math:`a` 与 `第 01 页 <01.html>`_。"


def test_a_good_translation(monkeypatch):
    monkeypatch.setattr(checks, "glossary", lambda code: [("page", ["页"])])
    assert list(checks.problems(SOURCE, GOOD, "zh_CN")) == []


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
    found = list(checks.problems(SOURCE, GOOD.replace(old, new), "zh_CN"))
    assert any(problem in each for each in found), found


@pytest.fixture
def builds(monkeypatch, tmp_path):
    """Builds that only note what they are of; a page with two sentences."""
    made = []

    def sphinx(language):
        made.append(language.code)
        return SimpleNamespace(wait=lambda: 0)

    said = {"tutorials/a": {"One.": "prose", "Two.": "prose"}}
    monkeypatch.setattr(build, "sphinx", sphinx)
    monkeypatch.setattr(untranslated, "FILE", tmp_path / "untranslated.json")
    monkeypatch.setattr(update, "of_tutorials", lambda: dict(said))
    for others in ("of_pages", "of_words"):
        monkeypatch.setattr(update, others, dict)
    return made


@pytest.mark.parametrize("mode", ["recorded", "preview"])
def test_a_language_with_a_sentence_in_english_is_left_out(
    builds, monkeypatch, capsys, mode
):
    whole = catalog(("One.", "一。"), ("Two.", "二。"))
    changed = catalog(("One.", "一。"), ("Zwei.", "二。"))
    found = {"zh_CN": whole, "ja": whole}
    monkeypatch.setattr(catalogs, "read", lambda code, name: found[code])
    codes = ["en", "zh_CN", "ja"]
    assert [each.code for each in build.english(mode)] == codes
    found["ja"] = changed
    fewer = codes if mode == "preview" else codes[:2]
    for _ in range(2):
        assert [each.code for each in build.english(mode)] == fewer
    assert untranslated.known() == {"zh_CN": {}, "ja": {"tutorials/a": 1}}
    said = capsys.readouterr().out
    left_out = "日本語 is left out" in said and "(tutorials/a)" in said
    assert left_out == (mode != "preview")
    found["ja"] = whole
    assert [each.code for each in build.english(mode)] == codes
    assert builds == ["en"] * 4  # each time once


def test_a_build_that_fails_ends_all_and_warns_again(monkeypatch, tmp_path):
    monkeypatch.setattr(build.stage, "doctrees", lambda each: tmp_path / each)
    codes, ended = {"en": 0, "zh": 2, "ja": 0}, []
    for each in codes:
        (tmp_path / each).mkdir()
        (tmp_path / each / "environment.pickle").touch()

    def wait(each):
        ended.append(each)
        return codes[each]

    with pytest.raises(SystemExit) as error:
        build.finish(
            {each: SimpleNamespace(wait=lambda each=each: wait(each))
             for each in codes}
        )  # fmt: skip
    assert error.value.code == 2 and ended == list(codes)
    left = [each for each in codes if any((tmp_path / each).iterdir())]
    assert left == ["en", "ja"]  # zh is read again, with all its warnings


# The catalogs of the project.


@pytest.mark.parametrize("code", CODES)
def test_a_sentence_is_said_alike_on_all_pages(code):
    """A label of one word may have another meaning elsewhere."""
    said = {}
    for file in (catalogs.LOCALE / code).rglob("*.po"):
        for message in catalogs.of_file(file):
            if " " in message.id:
                said.setdefault(message.id, set()).add(message.string)
    assert len(said) > 1000
    assert not {text: ways for text, ways in said.items() if len(ways) > 1}


@pytest.fixture(scope="module")
def wanted():
    if not (pages.READ / "index.doctree").exists():
        pytest.fail("build the site first: make html", pytrace=False)
    return update.wanted()


@pytest.mark.parametrize("code", CODES)
def test_catalogs_are_complete(code, wanted):
    assert not update.missing(wanted, code), "make translations"


@pytest.mark.parametrize("code", CODES)
def test_catalogs_are_those_of_the_pages(code, wanted):
    files = {
        path.as_posix() for path in catalogs.LOCALE.glob(f"{code}/**/*.po")
    }
    assert files == {catalogs.path(code, name).as_posix() for name in wanted}
    for name, texts in wanted.items():
        catalog = catalogs.read(code, name)
        assert [m.id for m in catalog if m.id] == list(texts), name
        said = catalogs.path(code, name).read_text(encoding="utf-8")
        assert said == catalogs.text_of(catalog, code), name


@pytest.mark.parametrize("code", CODES)
def test_translations_have_what_their_messages_have(code, wanted):
    found = [
        f"{name}: {problem}: {message.string}"
        for name in wanted
        for message in catalogs.read(code, name)
        if message.id and catalogs.done(message)
        for problem in checks.problems(message.id, message.string, code)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("code", CODES)
def test_translated_scripts_are_the_same_code(code):
    """And no comment makes a line too long; a link may."""
    wide = []
    for name, script in SCRIPTS.items():
        lookup = catalogs.lookup(code, f"tutorials/{name}")
        said = messages.translated(script, lookup)
        assert messages.same_code(script, said), name
        wide += [
            f"{name}: {line}"
            for line in said.split("\n")
            if lines.columns(line) > messages.WIDTH and ">`_" not in line
        ]
    assert not wide, "\n".join(wide)
