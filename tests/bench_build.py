"""Measure the budgets of the build: ``make bench-build``.

Builds a copy of the project, and writes what it measured to
docs/measurements/build.csv, which the page about the build shows.
"""

import csv
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from project import ROOT


def copied(root):
    """A copy of the project; how many tutorials it has."""
    ignore = shutil.ignore_patterns("_build", "__pycache__")
    shutil.copytree(ROOT / "docs", root / "docs", ignore=ignore)
    shutil.rmtree(root / "docs/tutorials", ignore_errors=True)
    shutil.copytree(ROOT / "tutorials", root / "tutorials")
    shutil.copy(ROOT / "conf.py", root)
    return len(list((root / "tutorials").rglob("[0-9][0-9]-*.py")))


def build(root):
    """Seconds of one build, and how many tutorials it executed."""
    start = time.monotonic()
    done = subprocess.run(
        [
            *(sys.executable, "-m", "sphinx", "-n", "-W", "--keep-going"),
            *("-c", ".", "-d", "doctrees", "docs", "html"),
        ],
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ
        | {"FIGURES": "recorded", "NO_COLOR": "1"}
        | {"TRITON_CACHE_DIR": str(root / "triton")},  # nothing compiled yet
    )
    seconds = time.monotonic() - start
    if done.returncode:
        wrong = [x for x in done.stdout.splitlines() if "WARNING" in x]
        sys.exit("\n".join(wrong) or done.stdout[-3000:])
    found = re.search(r"successfully executed (\d+) out of", done.stdout)
    return seconds, int(found[1]) if found else 0


def measure():
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "site"
        count = copied(root)
        full = build(root)
        nothing = build(root)
        script = min((root / "tutorials").rglob("[0-9][0-9]-*.py"))
        text = script.read_text(encoding="utf-8")
        script.write_text(
            text.replace("\n# %%\n# ", "\n# %%\n# Or so: ", 1),
            encoding="utf-8",
        )
        prose = build(root)
    yield "what", "budget", "measured", "tutorials executed"
    yield (
        f"full build, {count} tutorials",
        f"{15 * count} s",
        f"{full[0]:.1f} s",
        full[1],
    )
    yield "nothing changed", "6 s", f"{nothing[0]:.1f} s", nothing[1]
    yield "prose of one changed", "–", f"{prose[0]:.1f} s", prose[1]


def main():
    target = ROOT / "docs" / "measurements" / "build.csv"
    rows = list(measure())
    with target.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows(rows)
    for row in rows:
        print(*row, sep=" | ")


if __name__ == "__main__":
    main()
