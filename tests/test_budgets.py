"""The report at the end of a run, and the runs that it fails."""

import subprocess
import sys

import pytest
from project import ROOT

import budgets

PAGES = {"01-layer-norm": "01", "fused/02-dropout": "fused/02"}


@pytest.mark.parametrize(("stem", "page"), PAGES.items())
def test_name_of_a_page(stem, page):
    assert budgets.page_of(stem) == page


@pytest.mark.parametrize(
    ("nodeid", "page"),
    [
        ("tests/test_01_compiled.py::test_it[float16]", "01"),
        ("tests/fused/test_02_dropout.py::test_it", "fused/02"),
        ("tests/fused/test_01_add.py::test_it", None),  # nor fused/01
        ("tests/test_03_compiled.py::test_it", None),  # there is no page 03
        ("tests/test_downloads.py::test_it[01-layer-norm]", "01"),
        ("tests/browser/test_it.py::test[light-tutorials/fused/02-dropout.html]",
         "fused/02"),
        ("tests/test_tutorials.py::test_it", None),
        ("tests/gpu/test_01_layer_norm.py::test_it", None),
    ],
)  # fmt: skip
def test_who_pays(nodeid, page):
    assert budgets.payer(nodeid, PAGES) == page


def test_the_budget_of_a_page():
    assert not list(budgets.over_budget({"01": 24.9, "fused/02": 24.9}))
    (line,) = budgets.over_budget({"01": 24.9, "fused/02": 25.6})
    assert "page fused/02: its tests take 26 s of a core" in line
    assert not list(budgets.over_budget({"01": 37}, times=1.5))


CONFTEST = f"""
import sys
sys.path.insert(0, {str(ROOT / "tests")!r})
import budgets

def pytest_configure(config):
    budgets.PAGE = BUDGET
    budgets.pages = lambda: {{"01-busy": "01"}}
    config.pluginmanager.register(budgets.Budgets(config))
"""
BUSY = """
import subprocess
import sys

import budgets
import pytest

sys.path.insert(0, TESTS)
WORK = f"import sys; sys.path.insert(0, {TESTS!r}); import budgets;"
WORK += "[budgets.lap() for _ in range(150)]; print(flush=True);"

def test_here():
    [budgets.lap() for _ in range(150)]

def test_child():
    subprocess.run([sys.executable, "-c", WORK])

@pytest.fixture(scope="module")
def child():
    command = [sys.executable, "-c", WORK + "input()"]
    with subprocess.Popen(command, stdin=-1, stdout=-1) as child:
        yield child
        child.kill()

def test_living(child):
    child.stdout.readline()
"""


@pytest.mark.parametrize(
    ("kind", "budget", "options", "code"),
    [
        ("here", 0.05, ["-m", "not long"], 1),
        ("here", 60, ["-m", "not long"], 0),
        ("here", 0.05, ["-m", ""], 0),
        ("child", 0.05, ["-m", "not long"], 1),
        ("living", 0.2, ["-m", "not long", "-n", "2"], 0),
    ],
)
def test_a_run(kind, budget, options, code, tmp_path):
    conftest = CONFTEST.replace("BUDGET", str(budget))
    (tmp_path / "conftest.py").write_text(conftest)
    busy = BUSY.replace("TESTS", repr(str(ROOT / "tests")))
    (tmp_path / "test_01_busy.py").write_text(busy)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-k", kind, *options],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == code, done.stdout
    assert "test_01_busy.py" in done.stdout
    assert ("page 01: its tests take" in done.stdout) == bool(code)
    assert "1 passed" in done.stdout
