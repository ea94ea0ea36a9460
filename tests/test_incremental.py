"""After any change, an incremental build gives the files of a clean one."""

import os
import shutil
import zipfile

import pytest
from project import Project

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
# Alone, for what makes a page anew makes its links anew.
TERMS = {
    "a term": (
        replace("docs/glossary.rst", "also:: masked", "also:: benchmark"),
        0,
    ),
}
GROUPS = {
    "one file": ONE_FILE,
    "settings": SETTINGS,
    "which": WHICH,
    "terms": TERMS,
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


def test_after_no_change_nothing_is_made(project):
    before = site(project)
    done = project.build()
    assert done.returncode == 0, done.stdout[-3000:]
    assert project.executed(done.stdout) == 0
    assert " 0 added, 0 changed, 0 removed" in done.stdout
    assert "writing output... [" not in done.stdout
    assert site(project) == before


@pytest.mark.parametrize("group", GROUPS)
def test_incremental_equals_clean(project, group):
    """One after the other, each built; then all from clean."""
    latest = site(project)
    for change, (make, runs) in GROUPS[group].items():
        before = latest
        make(project)
        done = project.build()
        assert done.returncode == 0, done.stdout[-3000:]
        assert project.executed(done.stdout) == runs, change
        latest = site(project)
        assert latest != before, change
    equals_clean(project)


def equals_clean(project):
    """The site is that of a clean build; a picture that no page shows any
    more may be left."""
    latest = site(project)
    for folder in ("html", "doctrees", "docs/tutorials"):
        shutil.rmtree(project.root / folder)
    done = project.build()
    assert done.returncode == 0, done.stdout[-3000:]
    clean = site(project)
    assert differing(clean, latest) == set()
    left = latest.keys() - clean.keys()
    assert not [name for name in left if not name.startswith("_")]


def differing(clean, latest):
    return {name for name in clean if clean[name] != latest.get(name)}


def test_an_older_file_is_a_change(project):
    """A copy may keep its time, which is before that of the last build."""
    page = project.root / "docs/translating.rst"
    page.write_text(page.read_text().replace("plain gettext", "just gettext"))
    os.utime(page, (0, 0))
    assert project.build().returncode == 0
    assert (
        "just gettext" in (project.root / "html/translating.html").read_text()
    )


# Where a build is killed: an event and who listens to it before and after.
KILL = """

if event := os.environ.get("KILL_AT"):
    def setup(app):
        app.connect(event, lambda *given: os.kill(os.getpid(), 9), 700)
"""
MOMENTS = "env-before-read-docs", "html-page-context", "build-finished"


@pytest.fixture(scope="module")
def killable(tmp_path_factory):
    """A project that is built, with two sites of clean builds: before and
    after a change of a page whose title others show."""
    project = Project(tmp_path_factory.mktemp("killable") / "site")
    with (project.root / "conf.py").open("a") as conf:
        conf.write(KILL)
    holds = "assert torch.equal(y, 2 * x)"
    project.change(holds, f'{holds} and "FAIL" not in os.environ')
    change(project)
    assert project.build().returncode == 0
    project.after = site(project)
    change(project, back=True)
    for folder in ("html", "doctrees", "docs/tutorials"):
        shutil.rmtree(project.root / folder)
    assert project.build().returncode == 0
    project.before = site(project)
    shutil.copytree(project.root, kept(project))
    return project


@pytest.fixture
def whole(killable):
    """As it was built, before the change."""
    shutil.rmtree(killable.root)
    shutil.copytree(kept(killable), killable.root)
    return killable


TITLE, CHANGED = "How to translate", "How to transpose"


def change(project, back=False):
    page = project.root / "docs/translating.rst"
    old, new = (CHANGED, TITLE) if back else (TITLE, CHANGED)
    title, *rest = page.read_text().split("\n")
    assert title == old
    page.write_text("\n".join([new, *rest]))


@pytest.mark.parametrize("moment", MOMENTS)
def test_after_a_killed_build_the_next_is_whole(whole, moment):
    change(whole)
    assert whole.build(KILL_AT=moment).returncode == -9
    assert whole.build().returncode == 0
    assert differing(whole.after, site(whole)) == set()


def test_after_a_failing_tutorial_the_next_build_is_whole(whole):
    """The script is as it was when all was well, but not what it made."""
    text = whole.script().read_text()
    whole.edit("# What it says.", "# What it said.")
    for _ in range(2):
        done = whole.build(FAIL="1")
        assert "tutorials/01-double.py failed" in done.stdout
    whole.script().write_text(text)
    assert whole.build().returncode == 0
    assert differing(whole.before, site(whole)) == set()
