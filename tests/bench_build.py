"""Measure the budgets of the build, of a copy of the project:
``make bench-build``.
"""

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


# English alone, and all languages.
ENGLISH = "-m sphinx -n -W --keep-going -c . -d docs/_build/doctrees/en docs"
ENGLISH = [*ENGLISH.split(), "docs/_build/html/en"]
ALL = ["-m", "translation.build"]


def build(root, command):
    """Seconds of one build, and how many tutorials it executed."""
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, *command],
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ
        | {"FIGURES": "recorded", "NO_COLOR": "1"}
        | {"PYTHONPATH": str(root / "docs/_ext")}
        | {"TRITON_CACHE_DIR": str(root / "triton")},  # nothing compiled yet
    )
    seconds = time.monotonic() - start
    if done.returncode:
        wrong = [x for x in done.stdout.splitlines() if "WARNING" in x]
        sys.exit("\n".join(wrong) or done.stdout[-3000:])
    return seconds, done.stdout.count(": its cells ran in ")


def measure():
    """What was built, its budget, what it took, how many tutorials ran."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "site"
        count = copied(root)
        full, ran = build(root, ENGLISH)
        yield f"{count} tutorials", f"{15 * count} s", full, ran
        nothing, ran = build(root, ENGLISH)
        yield "nothing changed", "6 s", nothing, ran
        others, ran = build(root, ALL)
        several = full + others - nothing
        yield "from clean, all languages", f"{1.5 * full:.0f} s", several, ran
        yield "nothing changed, all languages", "10 s", *build(root, ALL)
        scripts = (root / "tutorials").rglob("[0-9][0-9]-*.py")
        script = max(scripts, key=lambda path: path.stat().st_size)
        text = script.read_text(encoding="utf-8")
        no_title = r"\n# %%\n# (?=[A-Z].*\n# \w)"
        changed = re.sub(no_title, "\n# %%\n# So it is. ", text, count=1)
        script.write_text(changed, encoding="utf-8")
        prose = build(root, ENGLISH)
        yield "prose of the longest changed", "8 s", *prose
        changed = changed.replace("# So it is. ", "# So it is.\n# ")
        script.write_text(changed, encoding="utf-8")
        prose = build(root, ENGLISH)
        yield "a line of its prose more", "8 s", *prose


def main():
    for what, budget, seconds, ran in measure():
        print(f"{what}: {seconds:.1f} s of {budget}, {ran} ran", flush=True)


if __name__ == "__main__":
    main()
