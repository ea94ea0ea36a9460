"""The Nu checker finds no error in the HTML of any page."""

import json
import subprocess

from browser import built, tools

# Errors that are let pass, each as the start of its message, with the reason.
ALLOWED = {}


def test_html_is_valid():
    java, nu = tools.java(), tools.npm_file(tools.NU)
    done = subprocess.run(
        [
            *(java, "-jar", nu, "--errors-only", "--format", "json"),
            *("--skip-non-html", *(built.SITE / page for page in built.PAGES)),
        ],
        capture_output=True,
        text=True,
    )
    faults = []
    for message in json.loads(done.stderr)["messages"]:
        text = message["message"]
        if not text.startswith(tuple(ALLOWED)):
            page = message["url"].rpartition("/html/")[2]
            line = message.get("lastLine", "?")
            faults.append(
                f"{page}:{line}: {text} {message.get('extract', '')!r}"
            )
    assert not faults, "\n".join(faults)
