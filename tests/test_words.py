"""What the mechanism says on pages is said in the language of the site."""

import re
from types import SimpleNamespace

import pytest
import sphinx.locale
from bs4 import BeautifulSoup
from docutils import nodes
from project import ENVIRONMENT, ROOT, rows

import words_later as later
from compiled import limits
from compiled.sheets import Sheet
from languages import TRANSLATED
from measurements import recording, replay
from page import cards, figures, headlines, passports, shares, solutions
from page.xray import Panel
from translation import catalogs, sentences, words

TEMPLATES = ROOT / "docs" / "_templates"


@pytest.fixture
def says(monkeypatch):
    """Let Sphinx say what a translator does."""

    def install(translator):
        known = sphinx.locale.translators
        monkeypatch.setitem(known, ("general", "sphinx"), translator)
        return translator

    return install


# What begins a folded cell.
CHINESE = {
    "Solution": "解答",
    "Solution %(words)s": "解答 %(words)s",
    "Scaffold": "脚手架",
    "Hint": "提示",
    "Hint %(number)s": "提示 %(number)s",
}


@pytest.fixture
def chinese(says):
    says(SimpleNamespace(gettext=lambda text: CHINESE.get(text, text)))


def measured(**changes):
    """Where no value has a Latin letter, each word is the mechanism's."""
    values = {
        "name": "ж",
        "gpu": "ж",
        "environment": dict.fromkeys((*ENVIRONMENT, "gpu"), "ж")
        | {"checks_passed": 7, "date": "2026-01-02"},
        "unit": "µж",
        "args": {"M": 4096, "mode": "backward"},
        "x_names": ["N"],
        "names": {"triton": "Ж", "torch": "Б", "copy": "Д"},
        "method": "by hand, 20 % and 80 %",
        "rows": rows(),
        "picture": "ж_001",
    }
    return replay.Measured(**(values | changes))


def test_a_figure_names_the_libraries_that_it_shows():
    libraries = {"liger": "liger-kernel 0.6", "torch": "cuDNN 9.10.2"}
    environment = measured().environment | {"libraries": libraries}
    text = passports.with_passports(
        "ж", [measured(environment=environment)], {}
    )
    (versions,) = re.findall(":Versions: (.*)", text)
    assert ", cuDNN 9.10.2" in versions
    assert "liger" not in versions


def test_what_a_cell_saved_is_what_a_page_shows(tmp_path):
    kept = measured(reason="ж", environment=ENVIRONMENT)
    figures.save(tmp_path, "a", [kept, replay.Missing("ж", "none")])
    assert figures.saved(tmp_path, "a")[0] == kept
    assert isinstance(figures.saved(tmp_path, "a")[1], replay.Missing)
    text = "\n.. measured:: a\n\n"
    assert figures.timed_with(tmp_path, text) == [ENVIRONMENT["triton"]]


def test_a_line_of_the_page_becomes_its_figure(tmp_path):
    figures.save(tmp_path, "a", [measured()])
    app = SimpleNamespace(srcdir=tmp_path)
    source = ["Prose.\n\n.. measured:: a\n\n.. drawing:: b two lines\n"]
    passports.say(app, "tutorials/01-double", source)
    assert source[0].startswith("Prose.\n\n.. container:: measured\n")
    assert ":alt: Line plot of µж against N from 8 to 16 (B" in source[0]
    assert "/images/b_dark.svg\n   :alt: two lines\n" in source[0]


def sheet(**more):
    return Sheet(
        *("_f", "sm_90", 8, "triton 3"), programs=3, warps=4, registers=64,
        spills=0, shared=1024, stages=2,
        counts=[("load", 4, 1), ("load", 16, 2)], **more,
    )  # fmt: skip


def test_a_panel_shows_the_comments_of_the_page():
    commented = sheet(ways=[("x = 1  # one", [])])
    for code, shown in (
        ("    x = 1  # 一", "x = 1  # 一"),
        ("    x = 12  # 一\n    # x = 1", "x = 1  # one"),
    ):
        way = next(Panel(None, "_f", "", {}, (), code).ways(commented))
        assert way == f"<pre class='bp-way'>{shown}</pre>"


@pytest.mark.parametrize(
    ("first", "kind"),
    [
        ("# 解答 2：一趟。", ("solution", "解答 2：一趟")),
        ("# 解答2", ("solution", "解答 2")),
        ("# Solution 2", ("solution", "解答 2")),
        ("# 脚手架：时钟。", ("scaffold", "时钟")),
        ("# 脚手架: 时钟", ("scaffold", "时钟")),
        ("# 脚手架", None),
        ("# 解答", None),
    ],
)
def test_a_marker_in_a_translated_script(chinese, first, kind):
    assert solutions.marked(first) == kind


@pytest.mark.parametrize("begins", ["提示 1。", "提示1", "Hint 1."])
def test_a_hint_in_a_translated_script(chinese, begins):
    hint = nodes.paragraph("", "", nodes.strong(text=begins))
    hint += nodes.Text(" 先求和。")
    parent = nodes.section("", hint)
    solutions.fold_hint(hint)
    assert parent[0][0].astext() == "提示 1"
    assert parent[0][1].astext() == "先求和。"


def test_sentences_without_spaces():
    chinese = "第一句。第二句！Third one? 第四。"
    parts = ["第一句。", "第二句！", "Third one?", "第四。"]
    assert sentences.split(chinese) == parts
    assert sentences.joined(parts) == chinese


MESSAGES = {text: (note, file) for text, note, file in words.messages()}


def test_the_messages_are_those_of_all_that_speaks():
    assert len(MESSAGES) == len(list(words.messages()))
    for text, file in (
        ("Close", "docs/_templates/close-drawer.html"),
        ("Recorded %(date)s.", "docs/_ext/page/passports.py"),
        ("Forward", "docs/_ext/page/headlines.py"),
        ("%(count)s × %(bytes)s bytes", "docs/_ext/page/xray.py"),
        ("Color mode", "docs/_ext/translation/words.py"),
    ):
        assert MESSAGES[text][1] == file
    methods = [f for _, f in MESSAGES.values() if f.endswith(".json")]
    assert len(methods) > 20
    assert any(file == "conf.py" for _, file in MESSAGES.values())
    comment, _ = MESSAGES["**%(caption)s.** %(recorded)s %(checked)s"]
    assert comment.startswith("of each figure")
    for text in MESSAGES:
        assert text == " ".join(text.split())


OF_FIGURES = {"what an axis is called", "of a pass"}


class Masked:
    """Says every word as signs, and knows what it was asked for."""

    def __init__(self):
        self.asked = set()

    def gettext(self, text):
        self.asked.add(text)
        placeholder = r"(%\(\w+\)s|%s|\{\w+\})"
        parts = re.split(placeholder, text)
        parts[::2] = [re.sub(r"[A-Za-z]", "ж", each) for each in parts[::2]]
        return "".join(parts)

    def ngettext(self, one, many, n):
        return self.gettext(one if n == 1 else many)


CODES = {"PTX", "SASS"}
# reStructuredText, and names that no language changes.
MARKUP = re.compile(
    r"\.\. [a-z-]+::|^ *:(?:[a-z-]+):.*(?<!ж)$|</[^>]*>|:download:|N/A"
    r"|\b(?:measured|passport|dtype|CUDA|torch|triton|Python|NCCL|Nsight"
    r"|Compute|CSV|JSON|Triton IR|GPU IR|PTX|SASS|NVIDIA H200|ptxas)\b",
    re.M,
)


def left(text):
    """English words of a page's text."""
    kept = "\n".join(
        line
        for line in text.splitlines()
        if not re.match(r" *(:(class|class-container|sync|header|sync-group"
                        r"|header-rows|stub-columns):|\.\. (image|raw)::)",
                        line)
    )  # fmt: skip
    return re.findall(r"[A-Za-z]{3,}", MARKUP.sub(" ", kept))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"args": {}, "live": True},
        {"args": {"mode": "forward", "counter": "ж"}},
        {"args": {"mode": "forward and backward"}},
        {"unit": "wrong runs of 100", "args": {"heads": 8, "turns": 3}},
        {"unit": "MB of DRAM", "x_names": ["programs"],
         "rows": [row | {"programs": row["N"]} for row in rows()]},
        {"reason": "ж", "picture": ""},
        {"environment": measured().environment
         | {"ncu": "1", "gpus": ["ж"], "link": "ж", "nccl": "2",
            "checks_passed": None}},
    ],
)  # fmt: skip
def test_no_word_of_a_figure_is_said_in_english_only(says, changes):
    translator = says(Masked())
    monkey = measured(**changes)
    store = pytest.MonkeyPatch()
    with store.context() as patch:
        patch.setattr(recording, "BY_BUILD", recording.STORE)
        text = passports.with_passports("жж", [monkey], {})
    assert left(text) == []
    own = {"by hand, 20 % and 80 %"}
    assert translator.asked - own <= MESSAGES.keys()


def test_a_table_says_what_an_axis_is_called(says):
    says(Masked())
    told = measured(
        x_names=["programs"],
        rows=[row | {"programs": row["N"]} for row in rows()],
    )
    assert ':header: "жжжжжжжж","Ж","Б","Д"' in passports.numbers(
        told, ["", ""]
    )


@pytest.mark.parametrize("language", TRANSLATED)
def test_units_axes_and_arguments_have_a_word(language):
    catalog = catalogs.read(language.code, catalogs.WORDS)
    asked = [*filter(later.in_words, recording.UNITS)]
    asked += headlines.ARGUMENTS.values()
    asked += [
        text for text, (note, _) in MESSAGES.items() if note in OF_FIGURES
    ]
    assert {"MB of DRAM", "kernels", "stages"} <= {*asked}
    assert not {"GB/s", "TFLOP/s", "µs", "N", "KB"} & {*asked}
    assert [t for t in asked if not catalogs.done(catalog.get(t))] == []


def test_no_word_of_a_second_gpu_is_said_in_english_only(says):
    translator = says(Masked())
    text = passports.with_passports("жж", [measured(), measured()], {})
    assert left(re.sub(r"\.\. (tab-item|rst-class)::.*", "", text)) == []
    benchmark = {
        "unit": "GB/s",
        "args": {"M": 4096, "mode": "backward"},
        "x_names": ["N"],
        "method": "by hand, 20 % and 80 %",
        "rows": rows(),
    }
    environment = measured().environment
    data = {"environment": environment, "benchmarks": {"ж": benchmark}}
    recorded = {"ж": data, "б": data}
    text = shares.text("ж", recorded, shares.measured(recorded))
    assert left(re.sub(f":doc:.*|{shares.UNIT}", "", text)) == []
    own = {"by hand, 20 % and 80 %"}
    assert translator.asked - own <= MESSAGES.keys()


def test_no_word_of_a_panel_is_said_in_english_only(says):
    translator = says(Masked())
    made = sheet(ways=[("x", [("ptx", ["<code>x</code>"])])])
    made.codes = {"sass": "x", "amdgcn": "x"}
    kernels = {"_f": SimpleNamespace(only="")}
    page = SimpleNamespace(N=[8], M=4, dtype="ж", kernels=kernels)
    found = {("_f", target, 8): made for target in limits.SHOWN}
    panel = Panel(page, "_f", "ж", found, ("1", "2"))
    text = panel.text()
    html = r"<[^>]*>|gfx942|sm_\d+|\.\. raw:: html|:selected:"
    assert left(re.sub(html, "", text)) == []
    assert translator.asked - CODES <= MESSAGES.keys()


def test_no_word_of_a_card_is_said_in_english_only(says):
    translator = says(Masked())
    benchmark = {
        "unit": "GB/s",
        "args": {"mode": "forward"},
        "method": "",
        "rows": rows(),
    }
    text = cards.speeds(
        {
            "environment": measured().environment,
            "benchmarks": {"double": benchmark | {"x_names": ["N"]}},
        }
    ).astext()
    assert left(text) == [] and "1.33" in text
    assert translator.asked - {"PyTorch"} <= MESSAGES.keys()


@pytest.mark.parametrize(
    "name", [file.name for file in sorted(TEMPLATES.glob("*.html"))]
)
def test_no_word_of_a_template_is_said_in_english_only(name):
    text = (TEMPLATES / name).read_text(encoding="utf-8")
    translator = Masked()
    # What stands between tags, and what a reader is told of them.
    text = re.sub(r"{#.*?#}|{% extends.*?%}|<svg.*?</svg>|<code>.*?</code>"
                  r"|<kbd.*?</kbd>", "", text, flags=re.S)  # fmt: skip
    said_ = re.sub(r"""_\((["'])(.*?)\1\)""", "''", text, flags=re.S)
    bare = re.sub(r"{%.*?%}|{{.*?}}", "", said_, flags=re.S)
    soup = BeautifulSoup(bare, "html.parser")
    shown = soup.get_text(" ")
    for tag in soup.find_all(True):
        for key in ("aria-label", "title", "alt", "placeholder"):
            shown += " " + tag.get(key, "")
    names = r"Ctrl|Both Passes"
    assert re.findall(r"[A-Za-z]{3,}", re.sub(names, "", shown)) == []
    assert translator.asked <= MESSAGES.keys()


def test_a_value_is_english_to_all_but_a_page():
    text = later.Said("%(count)s bytes", {"count": later.Said("none")})
    assert str(text) == "none bytes"
    chinese = {"%(count)s bytes": "%(count)s 字节", "none": "无"}
    assert later.said(text, chinese.get) == "无 字节"
    assert later.listed([]) is None
    assert str(later.listed(["a", "b", "c"])) == "a, b, c"
    assert str(later.listed(["a", "b"], later.AND)) == "a and b"
    assert headlines.PASSES["forward"] == "Forward"
