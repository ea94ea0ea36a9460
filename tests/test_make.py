"""What make says to someone who has not read its file."""

import os
import subprocess

import pytest
from project import ROOT

OFFLINE = (
    "WARNING: Retrying (Retry(total=4)) after connection broken by "
    "'NewConnectionError'\nERROR: No matching distribution found for torch"
)
CONFLICT = "ERROR: Cannot install this and that"


@pytest.fixture
def make(tmp_path):
    """Run make html with a pip that fails with some words."""

    def run(words):
        (tmp_path / "bin").mkdir()
        python = tmp_path / "bin/python"
        python.write_text(f"#!/bin/sh\ncat >&2 <<'END'\n{words}\nEND\nexit 1")
        python.chmod(0o755)
        return subprocess.run(
            ["make", "-s", "html", f"VENV={tmp_path}"],
            cwd=ROOT,
            env=os.environ,
            capture_output=True,
            text=True,
        )

    return run


def test_without_a_network_one_sentence_says_so(make):
    done = make(OFFLINE)
    assert done.returncode != 0
    assert "make: no network: pip reaches no package index" in done.stderr
    assert "Retrying" not in done.stderr


def test_what_else_pip_says_is_shown(make):
    done = make(CONFLICT)
    assert done.returncode != 0
    assert CONFLICT in done.stderr
    assert "no network" not in done.stderr
