"""What every test file needs to be true before it imports triton; and what
the tests of each tutorial share."""

import contextlib
import fcntl
import os

import pytest
import torch

from alone import run_tutorial

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


with contextlib.suppress(ImportError):  # a GPU machine lacks it, or has a
    from sphinx import locale  # folder of that name

    locale.init([], "en")  # as a build in English does


# What takes longest starts first, so that no core is idle at the end.
SLOWEST = (
    *("test_kernels_compiled.py", "test_pages.py", "test_build.py"),
    *(
        "test_downloads.py",
        "test_environment.py",
        "test_moving.py",
        "test_xray.py",
    ),
    *("test_controls.py", "test_counters.py", "test_sections.py"),
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Files stay together: their tests share what takes long to make."""
    items.sort(key=lambda item: rank(item.path.name))


def rank(file):
    return SLOWEST.index(file) if file in SLOWEST else len(SLOWEST)


@pytest.fixture(scope="session")
def launches():
    """What compiles calls, in processes that stay: each takes seconds to
    start."""
    from compiled.aot import Compilers

    runs = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
    with Compilers(max(1, len(os.sched_getaffinity(0)) // runs)) as compilers:
        yield compilers.launches


@pytest.fixture(scope="session")
def alone(tmp_path_factory):
    """What a tutorial prints when it runs alone: once in a run of pytest,
    whatever process asks."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def printed(name):
        kept = shared / name.replace("/", "-")
        with kept.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not kept.exists():
                folder = tmp_path_factory.mktemp("alone")
                kept.write_text(run_tutorial(folder, name))
        return kept.read_text()

    return printed


@pytest.fixture
def output(request, alone):
    """What the tutorial of the module prints."""
    return alone(request.module.NAME)
