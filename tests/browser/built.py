"""The built site: where it is, its pages, and a server that shows it."""

import functools
import http.server
import os
import re
import threading
from pathlib import Path
from urllib.parse import urlsplit

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
    """The folder of the host where the site is to be published."""
    canonical = soup("index.html").find("link", rel="canonical")["href"]
    return urlsplit(canonical).path.rpartition("/")[0] + "/"


class Handler(http.server.SimpleHTTPRequestHandler):
    """Serves the site as GitHub Pages does: in its folder, 404 page too."""

    def translate_path(self, path):
        return super().translate_path("/" + path.removeprefix(prefix()))

    def send_error(self, code, message=None, explain=None):
        if code != 404:
            return super().send_error(code, message, explain)
        body = (SITE / "404.html").read_bytes()
        self.send_response(404)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


def serve():
    """Serve the site on a free local port."""
    handler = functools.partial(Handler, directory=str(SITE))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server
