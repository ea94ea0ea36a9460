"""What the mechanism says on pages, as messages for the catalogs.

Words of templates and modules stand in ``_()``, ``N_()`` or ``Said()``; a
comment that begins with "Translators:" goes with them. Words that stand
elsewhere and are said by ``_()`` all the same are collected here.
"""

import ast
import json

from babel.messages.extract import extract

import tutorial
import words_later
from measurements import recording

DOCS = tutorial.ROOT / "docs"
KEYWORDS = {"_": None, "N_": None, "Said": None}
# Of the theme and of Sphinx: their own catalogs lack a language, or say it in
# English.
THEIRS = (
    "Breadcrumb",
    "Collapse Sidebar",
    "Color mode",
    "Expand Sidebar",
    "Link to this heading",
    "System Settings",
    "© Copyright %(copyright)s.",
    'Built with the <a href="%(PST_url)s">PyData Sphinx Theme</a> '
    "%(theme_version)s.",
    'Created using <a href="https://www.sphinx-doc.org/">Sphinx</a> '
    "%(sphinx_version)s.",
)


def messages():
    """Each message of the mechanism once: its text, a comment for those who
    translate it or "", and the file that says it."""
    seen = set()
    for text, comment, file in _all():
        if text not in seen:
            seen.add(text)
            yield text, comment, file


def _all():
    modules = (DOCS / "_ext").rglob("*.py")
    templates = (DOCS / "_templates").glob("*.html")
    for file in sorted([*modules, *templates]):
        way = "python" if file.suffix == ".py" else "jinja2"
        for text, comment in _extracted(file, way):
            yield text, comment, _name(file)
    yield _tagline(), "what the site is, in a title", "conf.py"
    for file in sorted(recording.STORE.rglob("*.json")):
        data = json.loads(file.read_text(encoding="utf-8"))
        for benchmark in data["benchmarks"].values():
            yield benchmark["method"], "how it was measured", _name(file)
            for name in filter(words_later.in_words, benchmark["x_names"]):
                yield name, "what an axis is called", _name(file)
            if "pass" in benchmark["args"]:
                yield benchmark["args"]["pass"], "of a pass", _name(file)
    for unit in filter(words_later.in_words, recording.UNITS):
        yield (
            unit,
            "the unit of a figure",
            "docs/_ext/measurements/recording.py",
        )
    for text in THEIRS:
        yield text, "of the theme or of Sphinx", _name(__file__)


def _extracted(file, way):
    with open(file, "rb") as source:
        found = extract(
            way,
            source,
            KEYWORDS,
            comment_tags=["Translators:"],
            options={"encoding": "utf-8", "silent": "false"},
            strip_comment_tags=True,
        )
        for _line, text, comments, _context in found:
            yield text, " ".join(comments)


def _name(file):
    return str(file).removeprefix(f"{tutorial.ROOT}/")


def _tagline():
    settings = ast.parse((tutorial.ROOT / "conf.py").read_text("utf-8"))
    for node in settings.body:
        if isinstance(node, ast.Assign) and node.targets[0].id == "tagline":
            return ast.literal_eval(node.value)
    raise LookupError("conf.py has no tagline")
