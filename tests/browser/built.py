"""The built site: where it is, its pages, and a server that shows it."""

import functools
import os
import re
import threading
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from bs4 import BeautifulSoup

from languages import ENGLISH, LANGUAGES

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
    """Where a folder of the site lies, on this machine."""
    return "/" if folder == WHOLE else f"/{ENGLISH.folder}/"


class Handler(SimpleHTTPRequestHandler):
    """As GitHub Pages does it: what is not there has the site's own page."""

    def send_error(self, code, message=None, explain=None):
        page = Path(self.directory, "404.html")
        if code != 404 or not page.exists():
            return super().send_error(code, message, explain)
        self.send_response(404)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.end_headers()
        self.wfile.write(page.read_bytes())

    def log_message(self, *args):
        """Nothing: a browser asks for dozens of files a page."""


@contextmanager
def served(folder=WHOLE):
    """The address of a folder, served on a free port of this machine."""
    handler = functools.partial(Handler, directory=str(folder))
    with ThreadingHTTPServer(("localhost", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
