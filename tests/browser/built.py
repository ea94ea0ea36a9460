"""The built site: where it is, its pages, and a server that shows it."""

import functools
import os
import re
import threading
from pathlib import Path

import serve
from bs4 import BeautifulSoup

HERE = Path(__file__).resolve().parents[2]
SITE = Path(os.environ.get("SITE_DIR", HERE / "docs/_build/html")).resolve()
# A site lies in docs/_build of the repository that it was built from.
ROOT = SITE.parents[2]
ALL = sorted(
    path.relative_to(SITE).as_posix()
    for path in SITE.rglob("*.html")
    if path.relative_to(SITE).parts[0] != "_static"
)
# At an old address stands a few lines that lead on.
MOVED = [page for page in ALL if (ROOT / "docs/_extra" / page).exists()]
PAGES = [page for page in ALL if page not in MOVED]
TUTORIALS = [p for p in PAGES if re.match(r"tutorials/(.+/)?\d\d-[^/]*$", p)]
NO_SITE = f"no site in {SITE}: build it first, make html"


def stem(page):
    """The name of the tutorial on a page."""
    return page.removeprefix("tutorials/").removesuffix(".html")


@functools.cache
def soup(page):
    text = (SITE / page).read_text(encoding="utf-8")
    return BeautifulSoup(text, "html.parser")


def prefix():
    return serve.prefix(SITE)


def served():
    """Serve the site on a free local port."""
    server = serve.server(SITE)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server
