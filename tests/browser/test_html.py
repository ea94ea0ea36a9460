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
    found = list(errors(built.SITE / page for page in built.ALL))
    assert not found, "\n".join(found)


def test_an_error_is_found(tmp_path):
    bad = tmp_path / "bad.html"
    bad.write_text(
        "<!doctype html><html lang=en><title>Bad</title>"
        "<p id=one>One</p><p id=one>Two</p>"
    )
    (error,) = errors([bad])
    assert "Duplicate ID" in error
