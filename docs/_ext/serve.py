"""Show a built site: ``python serve.py FOLDER PORT``, as make serve does.

As GitHub Pages does it: below the folder of the host that the site was built
for, and with the site's own page for an address that leads nowhere.
"""

import contextlib
import functools
import re
import sys
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit


@functools.cache
def prefix(site):
    """The folder of the host where a site is to be published; the host's own
    if the site does not know its address."""
    front = (Path(site) / "index.html").read_text(encoding="utf-8")
    found = re.findall(r'<link rel="canonical" href="([^"]*)"', front)
    return urlsplit(found[0]).path if found else "/"


class Handler(SimpleHTTPRequestHandler):
    """Answers for the folder that it is given."""

    def translate_path(self, path):
        below = path.removeprefix(prefix(self.directory))
        return super().translate_path("/" + below)

    def send_error(self, code, message=None, explain=None):
        page = Path(self.directory, "404.html")
        if code != 404 or not page.exists():
            return super().send_error(code, message, explain)
        body = page.read_bytes()
        self.send_response(404)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *args):
        """Nothing: a reader's browser asks for dozens of files a page."""


def server(site, port=0):
    """What will serve a site on this machine, on a free port if none."""
    handler = functools.partial(Handler, directory=str(site))
    return ThreadingHTTPServer(("localhost", port), handler)


def main(site, port):
    try:
        shown = server(site, port)
    except OSError as error:
        sys.exit(
            f"make serve: {error.strerror}: try make serve PORT={port + 1}"
        )
    address = f"http://localhost:{port}{prefix(site)}"
    print(f"The site is at {address}; stop with Ctrl+C.", flush=True)
    with shown, contextlib.suppress(KeyboardInterrupt):
        shown.serve_forever()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
