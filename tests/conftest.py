"""What every test file needs to be true before it imports triton; and what
the tests of each tutorial share."""

import contextlib
import fcntl
import os
import re
import tempfile
from pathlib import Path

import pytest
import torch

import tutorial
from alone import run_tutorial

tutorial.require_assertions()

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
        "test_two_stages.py",
        "test_xray.py",
    ),
    *("test_controls.py", "test_counters.py", "test_sections.py"),
)


PAGES = Path(__file__).with_name("pages")
# A page in the name of a test: of its own, or of those that all pages share.
PAGE_OF_ID = re.compile(
    r"\bpages/(.+)\.py::|\btest_conformance\.py::\w+\[([^:\]]+):"
)
# What a test asks for that only a machine without a GPU can give: kernels
# compiled for GPUs that are not there, what a reader without one sees.
WITHOUT_A_GPU = {"launches", "output", "alone"}
# On a GPU these start first; what takes much memory runs in turn.
LONG_ON_A_GPU = "2_31", "sanitizer", "100_times"


def pytest_addoption(parser):
    parser.addoption(
        "--page",
        action="append",
        default=[],
        metavar="SECTION/STEM",
        help="all checks of a page: those that it shares, and its own",
    )


def pytest_configure(config):
    """Who asks for a page collects what may have its tests."""
    for name in config.getoption("page"):
        if not (PAGES / f"{name}.py").exists():
            raise pytest.UsageError(f"--page {name}: no {PAGES}/{name}.py")
    if config.getoption("page"):
        own = [str(PAGES / f"{name}.py") for name in config.getoption("page")]
        config.args = [str(PAGES.with_name("test_conformance.py")), *own]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """What this machine cannot run is left out: marked gpu without a GPU, and
    marked cpu with one."""
    on_gpu = torch.cuda.is_available()
    other = "cpu" if on_gpu else "gpu"
    asked = config.getoption("page")
    kept, left = [], []
    for item in items:
        page = page_of(item)
        elsewhere = item.get_closest_marker(other) or (
            on_gpu and WITHOUT_A_GPU & set(getattr(item, "fixturenames", ()))
        )
        (left if elsewhere or (asked and page not in asked) else kept).append(
            item
        )
    if left:
        config.hook.pytest_deselected(items=left)
    items[:] = kept
    items.sort(key=rank)


def page_of(item):
    """The page that a test belongs to, or nothing."""
    if mark := item.get_closest_marker("page"):
        return mark.args[0]
    if item.path.is_relative_to(PAGES):
        return item.path.relative_to(PAGES).with_suffix("").as_posix()
    return ""


@pytest.hookimpl(optionalhook=True)  # a GPU machine may lack xdist
def pytest_xdist_make_scheduler(config, log):
    """Tests that share something run in one process, one after the other."""
    from xdist.scheduler import LoadScopeScheduling

    class Together(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return together(nodeid, torch.cuda.is_available())

    return Together(config, log)


def together(nodeid, on_gpu):
    """What a test has in common with those that stay with it.

    A page, wherever its tests stand, or a file: they share what takes long to
    make. On a GPU each test goes alone, but for those that ask for much
    memory, and for those that share what several GPUs gave.
    """
    page = PAGE_OF_ID.search(nodeid)
    page = page and (page[1] or page[2])
    if not on_gpu:
        return page or nodeid.partition("::")[0]
    if "2_31" in nodeid:
        return "memory"
    return page if page and page.startswith("several-gpus/") else nodeid


def rank(item):
    if torch.cuda.is_available():
        return not any(part in item.name for part in LONG_ON_A_GPU)
    file = item.path.name
    return SLOWEST.index(file) if file in SLOWEST else len(SLOWEST)


@pytest.fixture(autouse=True)
def memory(request):
    """Leave the memory of a GPU to the checks that run beside this one, of
    other pages, too: those that ask for much run in turn."""
    if not torch.cuda.is_available():
        yield
        return
    lock = Path(tempfile.gettempdir(), "both-passes-memory.lock")
    with lock.open("w") as turn:
        if "2_31" in request.node.name:
            fcntl.flock(turn, fcntl.LOCK_EX)
        yield
        torch.cuda.empty_cache()


@pytest.fixture
def load(request):
    """load(form="") gives the page of a file in tests/pages: in the
    interpreter with its quick edits and a form's, on a GPU as it is."""
    from conformance.page_files import loader

    return loader(request.module.PAGE)


@pytest.fixture
def page(load):
    """The page, in its first form."""
    return load()


@pytest.fixture
def unedited(request):
    """The page as readers have it."""
    from tutorial import load

    return load(page_of(request.node))


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
    name = getattr(request.module, "NAME", None)
    return alone(name or page_of(request.node))
