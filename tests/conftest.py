"""What every test file needs to be true before it imports triton; and what
the tests of each tutorial share."""

import contextlib
import os
import subprocess
import sys

import pytest
import torch

from budgets import Budgets
from tutorial import TUTORIALS

if not torch.cuda.is_available():
    # triton.language is interpreted or compiled, decided at its first import.
    os.environ["TRITON_INTERPRET"] = "1"
    import quick_interpreter

    quick_interpreter.install()

# Figures are drawn, never shown.
os.environ["MPLBACKEND"] = "Agg"

with contextlib.suppress(ModuleNotFoundError):  # a GPU machine may lack it
    import hypothesis

    # make test tries the same cases every time; make test-all tries others,
    # and more of them, and prints what repeats a failure.
    hypothesis.settings.register_profile(
        "same", derandomize=True, deadline=None, max_examples=40
    )
    hypothesis.settings.register_profile(
        "random", print_blob=True, deadline=None, max_examples=200
    )
    hypothesis.settings.load_profile("same")


def pytest_configure(config):
    config.pluginmanager.register(Budgets(config))


@pytest.fixture(scope="module")
def output(request, tmp_path_factory):
    """What the module's tutorial prints when it runs alone, in an empty
    folder."""
    folder = tmp_path_factory.mktemp("alone")
    child = subprocess.run(
        [sys.executable, TUTORIALS / f"{request.module.NAME}.py"],
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert child.returncode == 0, child.stderr
    assert not list(folder.iterdir())
    return child.stdout
