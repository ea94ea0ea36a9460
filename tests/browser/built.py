"""The built site: where it is, its pages, and a server that shows it."""

import functools
import os
import re
import threading
from pathlib import Path

import serve
from bs4 import BeautifulSoup

from languages import LANGUAGES

HERE = Path(__file__).resolve().parents[2]
# All languages, and the English pages, which most tests are of.
WHOLE = Path(os.environ.get("SITE_DIR", HERE / "docs/_build/html")).resolve()
SITE = WHOLE / "en"
# A site lies in docs/_build of the repository that it was built from.
ROOT = WHOLE.parents[2]
EDITIONS = [
    each for each in LANGUAGES if (WHOLE / each.folder / "index.html").exists()
]
PAGES = sorted(
    path.relative_to(SITE).as_posix()
    for path in SITE.rglob("*.html")
    if path.relative_to(SITE).parts[0] != "_static"
)
# At an old address stands a few lines that lead on.
MOVED = sorted(
    path.relative_to(ROOT / "docs/_extra").as_posix()
    for path in (ROOT / "docs/_extra").rglob("*.html")
)
TUTORIALS = [p for p in PAGES if re.match(r"tutorials/(.+/)?\d\d-[^/]*$", p)]
NO_SITE = f"no site in {SITE}: build it first, make html"


def stem(page):
    """The name of the tutorial on a page."""
    return page.removeprefix("tutorials/").removesuffix(".html")


@functools.cache
def soup(page, folder=SITE):
    text = (folder / page).read_text(encoding="utf-8")
    return BeautifulSoup(text, "html.parser")


def prefix(folder=SITE):
    """The folder of the host where the site, or a language, is."""
    below = folder.relative_to(WHOLE).as_posix()
    return serve.prefix(WHOLE) + ("" if below == "." else f"{below}/")


def served():
    """Serve the site on a free local port."""
    server = serve.server(WHOLE)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server
