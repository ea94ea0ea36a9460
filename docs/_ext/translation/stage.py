"""The sources of an edition: what Sphinx reads for a language.

A folder with ``tutorials`` and ``docs`` as the project has them: the scripts
with their catalogs applied, and beside the other pages what the English build
has made of the tutorials. A file is written when it has changed, so that
Sphinx finds what has.
"""

import hashlib
import json
import os
import sys
from importlib.metadata import distributions
from pathlib import Path

import tutorial
from languages import ENGLISH
from translation import catalogs, messages

ROOT = tutorial.ROOT
DOCS = ROOT / "docs"
BUILD = tutorial.BUILD
# What the site is not made from, or an edition has of its own.
APART = {"_build", "_ext", "_extra", "locale", "tutorials"}
# What the English build made of the tutorials for all languages: what cells
# gave and drew, what names in their code mean.
SHARED = ("images/*.*", "raw/*", "measured/*", "**/*.outputs")
SHARED += ("**/*.codeobj.json",)
# Environment variables that pages depend on.
SETTINGS = ("FIGURES", "GITHUB_REPOSITORY", "SITE_URL")


def sources(language):
    """The folder that holds docs and tutorials in a language."""
    return (
        ROOT if language is ENGLISH else BUILD / "editions" / language.folder
    )


def doctrees(language):
    """Where Sphinx keeps what it has read."""
    return BUILD / "doctrees" / language.folder


def anchors():
    """The ids of the sections of all pages, as the English build has them."""
    file = doctrees(ENGLISH) / "anchors.json"
    return json.loads(file.read_text("utf-8")) if file.exists() else {}


def aside(language):
    """Where the pages of an edition lie while the site does not have it."""
    return BUILD / "editions" / language.folder / "html"


def inputs(language):
    """A hash of all that an edition is made from."""
    folders = [
        *(path for path in DOCS.iterdir() if path.name not in APART),
        *(DOCS / "_ext", tutorial.TUTORIALS, catalogs.LOCALE / language.code),
    ]
    files = {ROOT / "conf.py", doctrees(ENGLISH) / "anchors.json", *shared()}
    for folder in folders:
        files.update(inside(folder))
    found = hashlib.sha256()
    packages = sorted((each.name, each.version) for each in distributions())
    settings = [os.environ.get(name) for name in SETTINGS]
    found.update(repr([settings, packages, sys.version]).encode())
    for path in sorted(files):
        if path.suffix in (".mo", ".pyc") or not path.is_file():
            continue
        content = path.read_bytes()
        found.update(f"{path} {len(content)} ".encode() + content)
    return found.hexdigest()


def shared():
    """The files of the English build that all editions take."""
    for pattern in SHARED:
        yield from tutorial.MADE.glob(pattern)


def inside(path):
    """The files of a folder, or the file itself."""
    return path.rglob("*") if path.is_dir() else [path]


def stage(language):
    """Write the sources of an edition."""
    folder, code = sources(language), language.code
    made = {}  # {path below the folder: content}
    for path in tutorial.TUTORIALS.rglob("*"):
        name = path.relative_to(tutorial.TUTORIALS)
        page = f"tutorials/{name.with_suffix('').as_posix()}"
        if name.name == "index.rst":
            text = path.read_text("utf-8")
            made["tutorials" / name] = section(
                text, catalogs.lookup(code, page)
            )
        elif name.suffix == ".py":
            made["tutorials" / name] = messages.translated(
                path.read_text("utf-8"), catalogs.lookup(code, page)
            )
    for entry in DOCS.iterdir():
        if entry.name not in APART:
            for path in inside(entry):
                made["docs" / path.relative_to(DOCS)] = path
    for path in inside(BUILD / "measurements"):  # of a machine with a GPU
        made["docs" / path.relative_to(DOCS)] = path
    for path in shared():
        made["docs" / path.relative_to(DOCS)] = path
    words = catalogs.LOCALE / code
    for path in words.rglob("*.po"):
        page = path.relative_to(words / "LC_MESSAGES").with_suffix("")
        # The scripts have theirs; Sphinx need not look again.
        if not (ROOT / page).with_suffix(".py").exists():
            made["docs" / path.relative_to(DOCS)] = path
    for page, ids in anchors().items():
        made[Path("anchors", f"{page}.json")] = json.dumps(ids)
    write(folder, made)


def section(text, word):
    """The index of a section, whose title and sentences cards show, too."""
    title, line, *rest = text.split("\n", 2)
    said = word(title)
    head = f"{said}\n{line[0] * max(len(line), 2 * len(said))}\n"
    lead, gap, others = "".join(rest).strip("\n").partition("\n\n")
    return f"{head}\n{word(' '.join(lead.split()))}{gap}{others}\n"


def write(folder, made):
    """Let a folder hold these files, and of others what a build made."""
    for name, content in made.items():
        path = folder / name
        if isinstance(content, Path):
            if not content.is_file():
                continue
            content = content.read_bytes()
        else:
            content = content.encode()
        if not path.exists() or path.read_bytes() != content:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    list_ = folder / "staged.json"
    names = sorted(Path(name).as_posix() for name in made)
    before = json.loads(list_.read_text()) if list_.exists() else []
    for name in set(before) - set(names):
        (folder / name).unlink(missing_ok=True)
        (folder / name).with_suffix(".mo").unlink(missing_ok=True)
    list_.parent.mkdir(parents=True, exist_ok=True)
    list_.write_text(json.dumps(names))
