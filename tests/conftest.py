"""What every test file needs to be true before it imports triton; and what
the tests of each tutorial share."""

import os
import subprocess
import sys

import pytest
import torch

from compiled.aot import Compilers
from tutorial import TUTORIALS

if not torch.cuda.is_available():
    # triton.language is interpreted or compiled, decided at its first import.
    os.environ["TRITON_INTERPRET"] = "1"

# Figures are drawn, never shown.
os.environ["MPLBACKEND"] = "Agg"


@pytest.fixture(scope="session")
def launches():
    """What compiles calls, in processes that stay: each takes seconds to
    start."""
    runs = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
    with Compilers(max(1, len(os.sched_getaffinity(0)) // runs)) as compilers:
        yield compilers.launches


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
