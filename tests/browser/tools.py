"""What the tests of the site need beside Python, or how to get it."""

import fcntl
import os
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parents[1]
MODULES = HERE / "node_modules"
AXE = MODULES / "axe-core/axe.min.js"
NU = MODULES / "vnu-jar/build/dist/vnu.jar"


def missing(line):
    """Skip the test, with a line that says what to install; CI must not."""
    if os.environ.get("CI") == "true":
        pytest.fail(line, pytrace=False)
    pytest.skip(line)


def program(names, line):
    for name in names:
        if path := shutil.which(name):
            return path
    missing(line)


def chromium():
    return program(
        ("chromium", "chromium-browser", "google-chrome"),
        "no Chromium for the browser tests: apt install chromium",
    )


def java():
    return program(
        ("java",),
        "no Java for the HTML checker: apt install default-jre-headless",
    )


def npm_file(path):
    """A file of the packages in package.json, installed if need be."""
    if path.exists():
        return path
    npm = program(("npm",), "no npm for axe-core and vnu-jar: apt install npm")
    command = ["install", "--no-audit", "--no-fund", "--no-package-lock"]
    with (HERE / "package.json").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another worker may be installing
        if not path.exists():
            subprocess.run(
                [npm, *command, "--prefix", HERE], capture_output=True
            )
    if not path.exists():
        missing(f"npm cannot install: npm {' '.join(command)} --prefix tests")
    return path
