"""The Nu checker finds no error in the HTML of any page."""

import json
import subprocess

from browser import built, tools

# Errors that are let pass: the start of the message, and the reason for it.
ALLOWED = {}


def errors(pages):
    """What the checker says about some files."""
    java, nu = tools.java(), tools.npm_file(tools.NU)
    done = subprocess.run(
        [
            *(java, "-jar", nu, "--errors-only", "--format", "json"),
            *("--skip-non-html", *pages),
        ],
        capture_output=True,
        text=True,
    )
    # Java may write lines of its own first.
    report = json.loads(done.stderr[done.stderr.index("{") :])
    for message in report["messages"]:
        text = message["message"]
        if not text.startswith(tuple(ALLOWED)):
            where = f"{message['url']}:{message.get('lastLine', '?')}"
            yield f"{where}: {text} {message.get('extract', '')!r}"


def test_html_is_valid():
    pages = [built.SITE / page for page in built.PAGES]
    above = [built.WHOLE / page for page in ("index.html", "404.html")]
    found = list(errors([*pages, *above]))
    assert not found, "\n".join(found)


def test_no_page_names_a_path_of_the_machine_that_built_it():
    files = built.WHOLE.rglob("*.html")
    texts = {page: page.read_text(encoding="utf-8") for page in files}
    paths = str(built.ROOT), "/site-packages"
    found = {page for page in texts for path in paths if path in texts[page]}
    assert not found
