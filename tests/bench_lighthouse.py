"""What Lighthouse says of the built site on a phone: ``make lighthouse``.

Prints a table, and fails where a page misses a bar. Each number is the median
of three runs: on a busy machine they differ. ``PAGES`` picks: those with "en/"
are English, for example.
"""

import functools
import gzip
import http.server
import io
import json
import os
import statistics
import subprocess
import sys
import threading
from pathlib import Path

import serve
from browser import built, tools

LIGHTHOUSE = "lighthouse@13.5.0"
RUNS = int(os.environ.get("RUNS", 3))
ZIPPED = {".html", ".css", ".js", ".svg", ".json"}
# What a page must reach: the front page, and each tutorial.
FRONT, TUTORIAL = 90, 80
FULL = ("accessibility", "best-practices", "seo")
LONGEST = {"largest-contentful-paint": 3000, "total-blocking-time": 300}


class Zipping(serve.Handler):
    """Serves text as hosts do, zipped."""

    def send_head(self):
        path = Path(self.translate_path(self.path.partition("?")[0]))
        if not path.is_file() or path.suffix not in ZIPPED:
            return super().send_head()
        body = gzip.compress(path.read_bytes())
        self.send_response(200)
        self.send_header("Content-Type", self.guess_type(str(path)))
        self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        return io.BytesIO(body)


def serve_zipped():
    handler = functools.partial(Zipping, directory=str(built.WHOLE))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}"


def report(address):
    """What one run of Lighthouse finds: {name: number}."""
    done = subprocess.run(
        [
            *("npm", "exec", "--yes", f"--package={LIGHTHOUSE}", "--"),
            *("lighthouse", address, "--quiet", "--output=json"),
            "--chrome-flags=--headless=new --no-sandbox",
            "--only-categories=" + ",".join(("performance", *FULL)),
        ],
        env=os.environ | {"CHROME_PATH": tools.chromium()},
        stdout=subprocess.PIPE,
        text=True,
    )
    if done.returncode:
        sys.exit(f"Lighthouse failed at {address}")
    found = json.loads(done.stdout)
    return {
        name: round(100 * category["score"])
        for name, category in found["categories"].items()
    } | {name: found["audits"][name]["numericValue"] for name in LONGEST}


def missed(page, row):
    """The bars that a page does not reach."""
    least = dict.fromkeys(FULL, 100)
    front = page.count("/") == 1
    least["performance"] = FRONT if front else TUTORIAL
    return [name for name, bar in least.items() if row[name] < bar] + [
        name for name, bar in LONGEST.items() if row[name] > bar
    ]


def pages():
    """Front page and tutorials of each language, below its folder."""
    return [
        f"{each.folder}/{page}"
        for each in built.EDITIONS
        for page in ("index.html", *built.TUTORIALS)
    ]


def main(wanted):
    base, failed = serve_zipped(), False
    print("speed  paint s  blocked s  others  page")
    for page in pages():
        if wanted and not any(part in page for part in wanted):
            continue
        folder, _, name = page.partition("/")
        home = base + built.prefix(built.WHOLE / folder)
        runs = [report(home + name) for _ in range(RUNS)]
        row = {
            name: statistics.median(run[name] for run in runs)
            for name in runs[0]
        }
        paint, blocked = (row[name] / 1000 for name in LONGEST)
        others = min(row[name] for name in FULL)
        bad = missed(page, row)
        failed = failed or bool(bad)
        print(
            f"{row['performance']:5.0f}  {paint:7.1f}  {blocked:9.2f}  "
            f"{others:6.0f}  {page}" + (f": {', '.join(bad)}" if bad else ""),
            flush=True,
        )
    sys.exit(failed)


if __name__ == "__main__":
    main(sys.argv[1:])
