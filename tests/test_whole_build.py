"""The build of all languages: in order, alone in its checkout, and with a
sentence for whoever must do something when it stops."""

import fcntl
import os
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
from project import Project

from languages import LANGUAGES
from translation import build


def run(project, **env):
    """Build as make does; what ended, with all that it said."""
    given = {"FIGURES": "recorded", "PYTHONPATH": "docs/_ext", "NO_COLOR": "1"}
    return subprocess.run(
        [sys.executable, "-m", "translation.build"],
        cwd=project.root,
        env=os.environ | given | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def pages(project):
    """All pages of the site."""
    site = project.root / "docs/_build/html"
    return {path: path.read_text() for path in site.rglob("*.html")}


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    return Project(tmp_path_factory.mktemp("whole") / "site")


def test_all_languages_are_built_whatever_is_translated(project):
    done = run(project)
    assert done.returncode == 0, done.stdout[-3000:]
    site = project.root / "docs/_build/html"
    for language in LANGUAGES:
        page = site / language.folder / "tutorials/01-double.html"
        assert f'lang="{language.tag}"' in page.read_text()
    assert (site / "sitemap.xml").exists()
    assert "日本語" in done.stdout and "are shown in English" in done.stdout


ENDS = "os._exit(0)", "import sys; sys.exit()", "os.kill(os.getpid(), 9)"


def test_a_script_that_ends_the_build_is_named_and_the_site_stays(project):
    """And is the same again, when the script is as it was."""
    text, before = project.script().read_text(), pages(project)
    for end in ENDS:
        project.script().write_text(f"{text}\n{end}\n")
        project.record()
        done = run(project)
        assert done.returncode != 0
        assert "tutorials/01-double.py did not come to its end" in done.stdout
        assert pages(project) == before
    project.script().write_text(text)
    project.record()
    assert run(project).returncode == 0
    assert pages(project) == before


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"PYTHONOPTIMIZE": "1"}, "PYTHONOPTIMIZE (or python -O) lets no"),
        ({"FIGURES": "sometimes"}, "FIGURES=sometimes: it must be one of"),
        ({"SITE_URL": "not a url"}, "SITE_URL=not a url: it must begin with"),
        ({"SITE_URL": "https://a.org"}, "SITE_URL=https://a.org: it must"),
    ],
)
def test_what_is_refused_is_said_and_the_site_stays(project, asked, said):
    before = pages(project)
    done = run(project, **asked)
    assert done.returncode != 0
    assert done.stdout.startswith(said)
    assert len(done.stdout.splitlines()) == 1
    assert pages(project) == before != {}


@pytest.mark.parametrize("name", ["TRITON_CACHE_DIR", "docs/_build"])
def test_a_folder_that_cannot_be_written_is_named(tmp_path, name, monkeypatch):
    file = tmp_path / "file"
    file.touch()
    if name == "docs/_build":
        monkeypatch.setattr(build, "BUILD", file)
    else:
        monkeypatch.setenv(name, str(file / "below"))
    with pytest.raises(SystemExit, match=f"{file}.* must be a folder to wri"):
        build.main()


def test_a_folder_of_another_user_is_named(tmp_path, monkeypatch):
    (tmp_path / "kept" / "roots").mkdir(parents=True)
    build.must_write(tmp_path)
    monkeypatch.setattr(build.os, "access", lambda p, _: "roots" not in str(p))
    with pytest.raises(SystemExit, match="kept/roots must be a folder to wr"):
        build.must_write(tmp_path)


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """A build whose Sphinx ends with a code, and does nothing."""
    monkeypatch.setattr(build, "BUILD", tmp_path)
    monkeypatch.setattr(build.root, "write", lambda languages: None)
    monkeypatch.setattr(build.update, "summary", list)

    def ends(code):
        monkeypatch.setattr(
            build,
            "sphinx",
            lambda language, lock, **more: SimpleNamespace(wait=lambda: code),
        )

    return ends


def test_a_full_disk_is_said(fake, monkeypatch):
    fake(2)
    with pytest.raises(SystemExit) as error:
        build.build(None)
    assert error.value.code == 2
    monkeypatch.setattr(
        build.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000)
    )
    with pytest.raises(SystemExit, match=r"The disk that holds .* is full"):
        build.build(None)


def test_one_build_waits_for_another(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(build, "BUILD", tmp_path)
    entered = threading.Event()

    def enter():
        with build.locked():
            entered.set()

    with open(tmp_path / "lock", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        other = threading.Thread(target=enter)
        other.start()
        assert not entered.wait(0.3)
    other.join(5)
    assert entered.is_set()
    assert "Another build runs in this checkout" in capsys.readouterr().out
