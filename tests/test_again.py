"""A build after a change gives the pages of a clean one, whatever runs again.

What is kept between builds is what tutorials made when they ran.
"""

import shutil
import zipfile

import pytest
from project import Project

NAMES = ("01-double", "02-double", "03-double", "sums/01-double")


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """Four tutorials, one in a section; tabs for two GPUs on the first."""
    project = Project(tmp_path_factory.mktemp("folder") / "site", NAMES)
    project.record("01-double", "nvidia-a100", scale=0.5)
    assert runs(project) == len(NAMES)
    return project


def runs(project):
    """Build; how many tutorials ran."""
    done = project.build()
    assert done.returncode == 0, done.stdout[-3000:]
    return project.executed(done.stdout)


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


def test_what_depends_on_a_change_runs_again_and_nothing_else(project):
    before = site(project)
    assert runs(project) == 0
    assert site(project) == before
    # A kernel, a recording, and a line of prose that moves the code below it.
    project.edit("2 * tl.load", "tl.load(x_ptr + cols) + tl.load")
    for gpu in ("nvidia-h200", "nvidia-a100"):
        project.record(gpu=gpu)
    project.record("02-double", scale=2)
    project.edit("# What it says.", "# What the\n# table says.", "03-double")
    assert runs(project) == 3
    module = project.root / "docs/_ext/page/cards.py"
    module.write_text(module.read_text() + "\n# Another.\n")
    assert runs(project) == len(NAMES)
    # Which tutorials there are.
    project.add("04-double")
    project.add("new/01-double")
    project.script("03-double").unlink()
    shutil.rmtree(project.root / "docs/measurements/nvidia-h200/sums")
    shutil.rmtree(project.root / "tutorials/sums")
    index = project.root / "tutorials/index.rst"
    index.write_text(index.read_text().replace("   sums/index\n", ""))
    assert runs(project) == 2
    latest = site(project)
    assert "tutorials/03-double.html" not in latest
    shutil.rmtree(project.root / "docs/tutorials")
    assert runs(project) == 4
    assert site(project) == latest


def test_after_a_failing_tutorial_the_next_build_is_whole(project):
    """The script is as it was when all was well, but not what it made."""
    holds = "assert torch.equal(y, 2 * x)"
    project.change(
        holds,
        f'{holds} and "FAIL" not in os.environ',
        "02-double",
    )
    runs(project)
    before = site(project)
    text = project.script("02-double").read_text()
    project.edit("# What it says.", "# What it said.", "02-double")
    done = project.build(FAIL="1")
    assert "tutorials/02-double.py failed" in done.stdout
    project.script("02-double").write_text(text)
    assert runs(project) == 1
    assert site(project) == before
