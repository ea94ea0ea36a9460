"""Every download runs by itself: an empty folder, four packages, no GPU.

It is the script of the repository behind a head, which says what it needs.
"""

import importlib.util
import re
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import nbformat
import pytest
import torch
import triton
import triton.testing
from nbclient import NotebookClient
from project import ROOT
from sphinx_gallery.py_source_parser import split_code_and_text_blocks

import tutorial
from alone import HIDDEN, NO_GPU, run_script
from page import downloads, module, notebooks, solutions

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


@pytest.mark.parametrize("page", downloads.MODULES)
def test_a_module_is_offered(page):
    """On the front page, and first of all on its own page."""
    name = downloads.MODULES[page]
    file = SITE / "tutorials" / f"{page}.html"
    text = file.with_name(name).read_text(encoding="utf-8")
    assert text.endswith(module.text(page))
    needs = "# Needs: pip install torch triton\n"
    assert needs in text.removesuffix(module.text(page))
    assert f'href="{name}"' in file.read_text(encoding="utf-8")
    front = (SITE / "index.html").read_text(encoding="utf-8")
    assert f'href="tutorials/{page.partition("/")[0]}/{name}"' in front


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
    assert first == notebooks.ready(downloads.PACKAGES).strip()
    if module := tutorial.beside(stem):  # it is written beside the notebook
        text = module.read_text(encoding="utf-8").strip()
        assert others.pop(0) == f"%%writefile {module.name}\n{text}"
    assert others == [cell for cell in code if cell]
    text = script.read_text(encoding="utf-8")
    # What torchrun starts is always a file, with arguments of its own.
    text = re.sub(r"^if TORCHRUN:\n(?: {4}.*\n)+", "", text, flags=re.M)
    assert not re.search(r"__file__|__main__|sys\.argv|sys\.path", text)


@pytest.mark.parametrize("stem", NAMES)
def test_a_notebook_says_where_it_comes_from_and_asks_for_a_gpu(stem):
    """What the head of the script says stands above its first cell."""
    notebook = nbformat.read(download(f"{stem}.ipynb"), as_version=4)
    first, ready, *_ = notebook.cells
    said = [line.removeprefix("# ") for line in head(stem).split("\n")[:-2]]
    assert first.cell_type == "markdown"
    assert first.source.split("  \n")[:-1] == said
    assert first.source.endswith("Change runtime type > GPU.")
    assert notebook.metadata.accelerator == "GPU"
    assert notebook.metadata.colab.gpuType == "T4"
    assert ready.source.startswith("# @title Install what is missing")
    assert ready.metadata.cellView == "form"
    assert ready.metadata.jupyter.source_hidden


class FakeShell:
    """What a notebook runs in, as far as its first cell asks."""

    def __init__(self):
        self.ran, self.after = [], []
        self.events = SimpleNamespace(callbacks={"post_execute": self.after})

    def run_line_magic(self, *magic):
        self.ran.append(magic)


@pytest.fixture
def start(monkeypatch):
    """Runs the first cell, and takes back what it changed."""
    monkeypatch.setattr(triton.testing.Mark, "run", triton.testing.Mark.run)

    def run():
        shell = FakeShell()
        code = notebooks.ready(downloads.PACKAGES)
        exec(code, {"get_ipython": lambda: shell})
        return shell

    return run


def test_the_first_cell_installs_what_is_missing(start, monkeypatch):
    assert not start().ran
    found = importlib.util.find_spec
    missing = "triton", "pandas"
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda n: None if n in missing else found(n),
    )
    assert start().ran == [("pip", "install --quiet triton pandas")]


def test_the_first_cell_says_which_gpu_there_is(start, monkeypatch, capsys):
    start()
    assert capsys.readouterr().out.startswith("No GPU: Triton interprets")
    gpu = SimpleNamespace(name="Tesla T4", total_memory=15.8e9)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: gpu)
    start()
    assert capsys.readouterr().out == "GPU: Tesla T4, 16 GB\n"


def lacking():
    raise torch.cuda.OutOfMemoryError("CUDA out of memory.")


def lacking_in_a_graph():
    """The error that ends the recording of a graph hides the first one."""
    try:
        lacking()
    finally:
        raise RuntimeError("operation failed due to a previous error")


def lacking_shared_memory():
    raise triton.runtime.errors.OutOfResources(99, 64, "shared memory")


def mistaken():
    raise ValueError("a mistake")


def run_until(fail):
    """A benchmark that fails at its second size."""

    def measure(N, provider):
        if N == 2:
            fail()
        return N, N, N

    bench = triton.testing.Benchmark(
        ["N"], [1, 2, 3], "provider", ["a"], ["A"], "chart", {}
    )
    marked = triton.testing.perf_report(bench)(measure)
    table = marked.run(return_df=True)
    assert marked.fn is measure
    return table.iloc[:, 1].tolist()


@pytest.mark.parametrize(
    "fail", [lacking, lacking_in_a_graph, lacking_shared_memory]
)
def test_where_memory_is_too_small_a_notebook_goes_on(fail, start, capsys):
    with pytest.raises((RuntimeError, triton.runtime.errors.OutOfResources)):
        run_until(fail)  # as a script does
    start()
    assert str(run_until(fail)) == "[1.0, nan, 3.0]"
    said = "Too little memory, so the figure has a gap: {'N': 2, "
    assert said in capsys.readouterr().out


def test_another_error_stops_a_notebook(start):
    start()
    with pytest.raises(ValueError, match="a mistake"):
        run_until(mistaken)


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
    assert printed.startswith("No GPU: Triton interprets the kernels")
    assert LINE.search(printed)
    assert "0 active drivers" not in printed
    module = tutorial.beside(stem)
    left = {module.name, "__pycache__"} if module else set()
    assert {p.name for p in tmp_path.iterdir()} == left


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
    notebook.cells[2:] = [nbformat.v4.new_code_cell(CHARTS % number)]
    execute(NotebookClient(notebook, timeout=600, kernel_name="python3"))
    kinds = [o.output_type for o in notebook.cells[2].outputs]
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
    assert "file:" not in text
    # Without an address of the site a link to another page leads nowhere.
    assert all(
        link.startswith("https://")
        for link in re.findall(r"\]\(([^)]*)", text)
    )
    has = any(mark in tutorial.source(stem) for mark in (":math:", ".. math"))
    assert ("$" in text or r"\begin{align}" in text) == has  # its formulas


def test_the_gate_refuses(tmp_path):
    """The four packages can be imported, sphinx cannot."""
    script = tmp_path / "script.py"
    script.write_text("import torch, triton, matplotlib, pandas\n")
    assert run_script(script).returncode == 0
    for name in ("sphinx", "pytest"):
        script.write_text(f"import {name}\n")
        done = run_script(script)
        assert done.returncode == 1
        assert f"No module named '{name}'" in done.stderr
