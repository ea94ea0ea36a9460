"""How many messages of each page have no translation, as of the last build.

A build counts them when the English pages are made. Where a language lacks
one it is left out of the site, or a banner on the page says so in a preview.
"""

import json

import tutorial

FILE = tutorial.BUILD / "untranslated.json"


def known():
    """{language: {page: how many}}; nothing before the first build."""
    return json.loads(FILE.read_text("utf-8")) if FILE.exists() else {}


def keep(found):
    FILE.write_text(json.dumps(found, indent=1), encoding="utf-8")
