"""After any change, an incremental build gives the files of a clean one."""

import shutil
import subprocess
import sys
import zipfile
from unittest import mock

import incremental
import pytest
from project import ROOT, Project

NAMES = ("01-double", "02-double", "03-double", "sums/01-double")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Four tutorials, one in a section; tabs for two GPUs on the first."""
    project = Project(tmp_path_factory.mktemp("folder") / "site", NAMES)
    project.record("01-double", "nvidia-a100", scale=0.5)
    done = project.build()
    assert done.returncode == 0, done.stdout[-3000:]
    shutil.copytree(project.root, kept(project))
    return project


def kept(project):
    return project.root.with_name("kept")


@pytest.fixture
def project(built):
    """As it was built, and where: in another folder Sphinx begins anew."""
    shutil.rmtree(built.root)
    shutil.copytree(kept(built), built.root)
    return built


def replace(file, old, new):
    def change(project):
        path = project.root / file
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new, 1))

    return change


def prose(project):
    """In one line more, so that all code below it moves."""
    project.edit("# What it says.", "# What the\n# table says.", "03-double")


def kernel(project):
    project.edit("2 * tl.load", "tl.load(x_ptr + cols) + tl.load")
    for gpu in ("nvidia-h200", "nvidia-a100"):
        project.record(gpu=gpu)


def recording(project):
    project.record("02-double", scale=2)


def deleted(project):
    project.script("02-double").unlink()
    project.recording("02-double").unlink()


def deleted_section(project):
    index = project.root / "tutorials/index.rst"
    index.write_text(index.read_text().replace("   sums/index\n", ""))
    shutil.rmtree(project.root / "tutorials/sums")


# What changes, and how many tutorials run again. A change of a group leaves
# alone what those before it have changed, or it would hide what they left.
ONE_FILE = {
    "a recording": (recording, 1),
    "a kernel": (kernel, 1),
    "a word": (prose, 1),
    "a title": (
        replace("tutorials/sums/01-double.py", "Double sums", "Twice sums"),
        1,
    ),
    "a template": (
        replace("docs/_templates/downloads.html", '_("Script")', '_("P")'),
        0,
    ),
    "a style sheet": (replace("docs/_static/site.css", "0.82rem", "1rem"), 0),
    "a page": (replace("docs/index.rst", "The tutorials", "Tutorials"), 0),
}
SETTINGS = {
    "conf.py": (replace("conf.py", "backward, measured", "back, measured"), 0),
    "conf.py, the gallery": (
        replace("conf.py", '"show_signature": F', '"show_signature": not F'),
        len(NAMES),
    ),
    "cards.py": (
        replace("docs/_ext/page/cards.py", "s × %", "s x %"),
        len(NAMES),
    ),
}
WHICH = {
    "added": (lambda project: project.add("04-double"), 1),
    "added to a section": (lambda project: project.add("new/01-double"), 1),
    "deleted": (deleted, 0),
    "a section deleted": (deleted_section, 0),
}
GROUPS = {"one file": ONE_FILE, "settings": SETTINGS, "which": WHICH}
EACH = {
    change: {change: its}
    for all_ in GROUPS.values()
    for change, its in all_.items()
}


def site(project):
    """All files of the site: their contents, without dates."""
    root = project.root / "html"
    return {
        path.relative_to(root).as_posix(): contents(path)
        for path in root.rglob("*")
        if path.is_file()
    }


def contents(path):
    if path.suffix == ".zip":
        with zipfile.ZipFile(path) as archive:
            return {name: archive.read(name) for name in archive.namelist()}
    return path.read_bytes()


LARGE = {"torch", "triton", "pandas", "matplotlib", "fontTools"}


def test_nothing_large_is_imported_before_it_is_needed():
    """To import them takes longer than a small build may."""
    imported = (
        "import importlib, sys; sys.path.insert(0, '.'); import conf; "
        "[importlib.import_module(name) for name in conf.extensions]; "
        "print(*sys.modules)"
    )
    run = subprocess.check_output(
        [sys.executable, "-c", imported], cwd=ROOT, text=True
    )
    assert "page.formulas" in run.split()
    assert not LARGE & set(run.split())


def test_after_no_change_nothing_is_made(project):
    before = site(project)
    done = project.build()
    assert done.returncode == 0, done.stdout[-3000:]
    assert project.executed(done.stdout) == 0
    assert " 0 added, 0 changed, 0 removed" in done.stdout
    assert "writing output... [" not in done.stdout
    assert site(project) == before


def test_copies_are_made_of_files_that_have_changed(tmp_path):
    """Those that are alike are not read again."""
    source, copy = tmp_path / "source", tmp_path / "copy"
    with pytest.raises(FileNotFoundError):
        incremental.copy_new(source, copy, force=True)
    for text in "one", "two", "three":
        source.write_text(text)
        incremental.copy_new(source, copy, force=True)
        assert copy.read_text() == text
    with mock.patch.object(incremental, "copyfile") as copyfile:
        incremental.copy_new(source, copy, force=True)
    assert not copyfile.called


@pytest.mark.parametrize(
    "changes",
    [
        *(pytest.param(its, id=name) for name, its in GROUPS.items()),
        *(
            pytest.param(its, id=name, marks=pytest.mark.long)
            for name, its in EACH.items()
        ),
    ],
)
def test_incremental_equals_clean(project, changes):
    """One after the other, each built; then all from clean."""
    latest = site(project)
    for change, (make, runs) in changes.items():
        before = latest
        make(project)
        done = project.build()
        assert done.returncode == 0, done.stdout[-3000:]
        assert project.executed(done.stdout) == runs, change
        assert "[new config]" not in done.stdout, change
        latest = site(project)
        assert incremental != before, change
    for folder in ("html", "doctrees", "docs/tutorials"):
        shutil.rmtree(project.root / folder)
    done = project.build()
    assert done.returncode == 0, done.stdout[-3000:]
    clean = site(project)
    assert latest.keys() == clean.keys()
    assert [name for name in clean if clean[name] != latest[name]] == []
