"""The words of the buttons that copy, in the language of the site.

sphinx-copybutton has words of its own for some languages, by what ``<html
lang>`` names; for all others it takes the English ones.
"""

from sphinx.locale import _

from said import N_

WORDS = (
    N_("Copy"),
    N_("Copy to clipboard"),
    N_("Copied!"),
    N_("Failed to copy"),
)


def say(app, exception):
    file = app.outdir / "_static" / "copybutton.js"
    if exception or not file.exists():
        return
    text = file.read_text(encoding="utf-8")
    for words in WORDS:
        text = text.replace(f"'{words}'", f"'{_(words)}'", 1)
    file.write_text(text, encoding="utf-8")


def setup(app):
    app.connect("build-finished", say)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
