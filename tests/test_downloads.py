"""Every download runs by itself: an empty folder, four packages, no GPU.

It is the script of the repository behind a head, which says what it needs.
"""

import re
from concurrent.futures import ThreadPoolExecutor

import nbformat
import pytest
from nbclient import NotebookClient
from project import ROOT
from sphinx_gallery.py_source_parser import split_code_and_text_blocks

import tutorial
from alone import HIDDEN, NO_GPU, run_script
from page import solutions

SITE = ROOT / "docs" / "_build" / "html" / "en"
HERE = ROOT / "tests"
NAMES = list(map(tutorial.name_of, tutorial.scripts()))
LINE = re.compile(r"Timing needs (a GPU|two GPUs); ")


@pytest.fixture(autouse=True)
def site():
    if not SITE.exists():
        pytest.fail("build the site first: make html")


def download(name):
    """The file of this ending that the tutorial's page offers."""
    tutorial, _, ending = name.rpartition(".")
    page = SITE / "tutorials" / f"{tutorial}.html"
    link = rf'href="([^"]*/_downloads/[^"]+\.{ending})"'
    (found,) = set(re.findall(link, page.read_text()))
    return page.parent / found


def head(stem):
    """What stands before the source, which follows byte for byte."""
    text = download(f"{stem}.py").read_text(encoding="utf-8")
    source = tutorial.source(stem)
    assert text.endswith(source)
    return text.removesuffix(source)


@pytest.mark.parametrize("stem", NAMES)
def test_the_script_runs(stem, alone):
    """Behind its head, which says what it is and needs."""
    assert LINE.search(alone(stem))
    title, *address, needs, tried, terms, empty = head(stem).split("\n")[:-1]
    assert not empty
    assert title == f"# {tutorial.title(stem)}: a tutorial of Both Passes"
    assert all(stem in line for line in address)
    assert needs == "# Needs: pip install torch triton matplotlib pandas"
    for name in ("Python", "torch", "triton", "matplotlib", "pandas"):
        assert re.search(rf"\b{name} \d+\.\d+", tried), tried
    assert terms.startswith("# MIT license")


def cells(notebook):
    return [c.source for c in notebook.cells if c.cell_type == "code"]


def titled(cell):
    """A folded cell has its title in the notebook, for Colab."""
    found = solutions.marked(cell)
    rest = cell.partition("\n")[2]
    return f"# @title {found[1]}\n{rest}" if found else cell


@pytest.mark.parametrize("stem", NAMES)
def test_the_notebook_is_the_script(stem):
    """Cell by cell; and a script does not ask where it runs."""
    script = ROOT / "tutorials" / f"{stem}.py"
    blocks = split_code_and_text_blocks(script)[1]
    code = [titled(b.content.strip()) for b in blocks if b.type == "code"]
    notebook = nbformat.read(download(f"{stem}.ipynb"), as_version=4)
    first, *others = (cell.strip() for cell in cells(notebook))
    comment, code_ = first.split("\n\n", 1)
    assert all(line.startswith("#") for line in comment.splitlines())
    assert "close_empty_charts" in code_
    assert others == [cell for cell in code if cell]
    text = script.read_text(encoding="utf-8")
    assert not re.search(r"__file__|__main__|sys\.argv|sys\.path", text)


def execute(client):
    """Beside the loop of events of a browser that is still open."""
    with ThreadPoolExecutor() as threads:
        threads.submit(client.execute).result()


# What runs is the script's code; one notebook shows that notebooks run.
@pytest.mark.parametrize(
    "stem",
    [NAMES[0], *(pytest.param(n, marks=pytest.mark.long) for n in NAMES[1:])],
)
def test_the_notebook_runs(stem, tmp_path, monkeypatch):
    for name, value in NO_GPU.items():
        monkeypatch.setenv(name, value)
    for name in HIDDEN:
        monkeypatch.delenv(name, raising=False)
    notebook = nbformat.read(download(f"{stem}.ipynb"), as_version=4)
    nbformat.validate(notebook)
    # The kernel needs packages of its own; sphinx and the like stay refused.
    # No import of the notebook: those its ranks repeat.
    gate = (
        f"import sys; sys.path.insert(0, {str(HERE)!r}); "
        "import four_packages; "
        "four_packages.install(['ipykernel', 'matplotlib-inline']); "
        f"sys.path.remove({str(HERE)!r})"
    )
    notebook.cells.insert(0, nbformat.v4.new_code_cell(f"exec({gate!r})"))
    client = NotebookClient(
        notebook,
        timeout=600,
        kernel_name="python3",
        resources={"metadata": {"path": str(tmp_path)}},
    )
    execute(client)
    outputs = []
    for cell in notebook.cells:
        if cell.cell_type == "code":
            outputs += cell.outputs
            shown = any("image/png" in o.get("data", ()) for o in cell.outputs)
            assert not shown or "plt." in cell.source, "an empty chart"
    assert not [o for o in outputs if o.output_type == "error"]
    printed = "".join(o.get("text", "") for o in outputs)
    assert LINE.search(printed)
    assert "0 active drivers" not in printed
    assert not [p for p in tmp_path.iterdir()]


CHARTS = """
import matplotlib.pyplot as plt
import triton.testing

bench = triton.testing.Benchmark(
    ["N"], [1, 2], "provider", ["a"], ["A"], "chart", {}, y_log=True
)
triton.testing.perf_report(bench)(lambda N, provider: %s).run()
"""


@pytest.mark.parametrize(
    ("number", "charts"), [("3 * [float('nan')]", 0), ("(2, 1, 3)", 1)]
)
def test_a_notebook_has_no_empty_chart(number, charts, monkeypatch):
    monkeypatch.delenv("MPLBACKEND")  # figures are shown, as to a reader
    notebook = nbformat.read(download(f"{NAMES[0]}.ipynb"), as_version=4)
    notebook.cells[1:] = [nbformat.v4.new_code_cell(CHARTS % number)]
    execute(NotebookClient(notebook, timeout=600, kernel_name="python3"))
    kinds = [o.output_type for o in notebook.cells[1].outputs]
    assert "error" not in kinds
    assert kinds.count("display_data") == charts


@pytest.mark.parametrize("stem", NAMES)
def test_the_notebook_reads_like_the_page(stem):
    """No raw role, no directive, no picture that the file does not hold."""
    notebook = nbformat.read(download(f"{stem}.ipynb"), as_version=4)
    text = "\n".join(
        c.source for c in notebook.cells if c.cell_type == "markdown"
    )
    assert not re.findall(r":[a-z]+:`", text)  # a role
    # sphinx-gallery leaves the second underscore of an anonymous link, and
    # no notebook knows how wide \text is with an underscore in it.
    for raw in ("\n.. ", ">`_", ")_", r"\text{GROUP_"):
        assert raw not in text, f"{raw} in the notebook of {stem}"
    assert "](/" not in text
    assert "file:" not in text
    has = any(mark in tutorial.source(stem) for mark in (":math:", ".. math"))
    assert ("$" in text or r"\begin{align}" in text) == has  # its formulas


def test_the_gate_refuses(tmp_path):
    """The four packages can be imported, sphinx cannot."""
    script = tmp_path / "script.py"
    script.write_text("import torch, triton, matplotlib, pandas\n")
    assert run_script(script).returncode == 0
    for module in ("sphinx", "pytest"):
        script.write_text(f"import {module}\n")
        done = run_script(script)
        assert done.returncode == 1
        assert f"No module named '{module}'" in done.stderr
