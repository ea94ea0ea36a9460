"""What is missing is skipped with one line, and fails where CI is true."""

import shutil
import subprocess
import sys

import pytest
from browser import tools

NEEDS = {
    "apt install chromium": tools.chromium,
    "apt install default-jre-headless": tools.java,
    "apt install npm": lambda: tools.npm_file(tools.HERE / "no-such-file"),
}


@pytest.fixture(params=NEEDS.items(), ids=["chromium", "java", "npm"])
def need(request, monkeypatch, tmp_path):
    """A tool that is nowhere on the PATH, and what installs it."""
    monkeypatch.setenv("PATH", str(tmp_path))
    return request.param


@pytest.mark.parametrize("ci", [None, "false"])
def test_missing_is_skipped_with_one_line(need, ci, monkeypatch):
    command, find = need
    if ci is None:
        monkeypatch.delenv("CI", raising=False)
    else:
        monkeypatch.setenv("CI", ci)
    with pytest.raises(pytest.skip.Exception) as skipped:
        find()
    assert command in skipped.value.msg
    assert "\n" not in skipped.value.msg


def test_missing_fails_where_ci_is_true(need, monkeypatch):
    command, find = need
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception) as failed:
        find()
    assert command in failed.value.msg
    assert "\n" not in failed.value.msg


@pytest.mark.parametrize("names", [("other", "wanted"), ("wanted", "other")])
def test_a_program_on_the_path_is_found(names, monkeypatch, tmp_path):
    program = tmp_path / "wanted"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert tools.program(names, "not found") == str(program)


def test_failed_installation_is_one_line(monkeypatch, tmp_path):
    """Without a network, say."""
    npm = tmp_path / "npm"
    npm.write_text("#!/bin/sh\necho no network >&2\nexit 1\n")
    npm.chmod(0o755)
    shutil.copy(tools.HERE / "package.json", tmp_path)
    monkeypatch.setattr(tools, "HERE", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception) as skipped:
        tools.npm_file(tmp_path / "node_modules/axe.min.js")
    assert skipped.value.msg.startswith("npm cannot install")
    assert "\n" not in skipped.value.msg


def test_versions_are_pinned():
    listed = (tools.HERE / "package.json").read_text()
    assert '"axe-core": "4.14.1"' in listed
    assert '"vnu-jar": "26.9.27"' in listed


@pytest.mark.parametrize("ci", ["", "true"])
def test_a_run_without_tools(ci, monkeypatch, tmp_path):
    """A whole run of pytest: one line for many tests, or failures."""
    test = tmp_path / "test_it.py"
    test.write_text(
        "import pytest\n"
        "from browser import tools\n"
        "@pytest.mark.parametrize('n', range(3))\n"
        "def test_it(n):\n"
        "    tools.chromium()\n"
    )
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tools.HERE))
    monkeypatch.setenv("CI", ci)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rs", "--color=no", test],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    if ci:
        assert done.returncode == 1
        assert "3 failed" in done.stdout
    else:
        assert done.returncode == 0
        assert "3 skipped" in done.stdout
        assert done.stdout.count("apt install chromium") == 1
