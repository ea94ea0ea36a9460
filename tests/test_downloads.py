"""Every download runs by itself: an empty folder, four packages, no GPU."""

import os
import subprocess
import sys
import zipfile

import nbformat
import pytest
from nbclient import NotebookClient
from project import ROOT

SITE = ROOT / "docs" / "_build" / "html"
GENERATED = ROOT / "docs" / "tutorials"
HERE = ROOT / "tests"
SCRIPTS = sorted((ROOT / "tutorials").glob("[0-9][0-9]-*.py"))
NAMES = [path.stem for path in SCRIPTS]
LINE = "Timing needs a GPU; recorded figures are on the page."
NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "MPLBACKEND": "Agg"}


@pytest.fixture(autouse=True)
def site():
    if not GENERATED.exists():
        pytest.fail("build the site first: make html")


def bare():
    """An environment without this project and without the interpreter's
    switch: the script must set that itself."""
    hidden = ("TRITON_INTERPRET", "PYTHONPATH")
    env = {k: v for k, v in os.environ.items() if k not in hidden}
    return env | NO_GPU


def run_script(folder, name):
    return subprocess.run(
        [sys.executable, HERE / "only_four.py", name],
        cwd=folder,
        capture_output=True,
        text=True,
        env=bare(),
    )


def download(name):
    """The file that the page offers, found by its name."""
    found = list((SITE / "_downloads").glob(f"*/{name}"))
    assert len(found) == 1, found
    return found[0]


@pytest.mark.parametrize("stem", NAMES)
def test_the_zip_runs(stem, tmp_path):
    with zipfile.ZipFile(download(f"{stem}.zip")) as archive:
        assert sorted(archive.namelist()) == [f"{stem}.ipynb", f"{stem}.py"]
        archive.extractall(tmp_path)
    for name in (f"{stem}.py", f"{stem}.ipynb"):
        unpacked = (tmp_path / name).read_bytes()
        assert unpacked == download(name).read_bytes()
    source = ROOT / "tutorials" / f"{stem}.py"
    assert (tmp_path / f"{stem}.py").read_bytes() == source.read_bytes()
    done = run_script(tmp_path, f"{stem}.py")
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count(LINE) == 1, done.stdout
    assert "0 active drivers" not in done.stdout + done.stderr
    leftovers = {p.name for p in tmp_path.iterdir()}
    assert leftovers == {f"{stem}.py", f"{stem}.ipynb"}


@pytest.mark.parametrize("stem", NAMES)
def test_the_notebook_runs(stem, tmp_path, monkeypatch):
    for name, value in NO_GPU.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    notebook = nbformat.read(download(f"{stem}.ipynb"), as_version=4)
    nbformat.validate(notebook)
    # The kernel needs packages of its own; sphinx and the like stay refused.
    gate = (
        f"import sys; sys.path.insert(0, {str(HERE)!r}); import only_four; "
        "only_four.install(['ipykernel', 'matplotlib-inline']); "
        f"sys.path.remove({str(HERE)!r})"
    )
    notebook.cells.insert(0, nbformat.v4.new_code_cell(gate))
    client = NotebookClient(
        notebook,
        timeout=600,
        kernel_name="python3",
        resources={"metadata": {"path": str(tmp_path)}},
    )
    client.execute()
    outputs = [
        output
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
    ]
    printed = "".join(o.get("text", "") for o in outputs)
    assert printed.count(LINE) == 1
    assert "0 active drivers" not in printed
    assert not [p for p in tmp_path.iterdir()]


@pytest.mark.parametrize("stem", NAMES)
def test_the_notebook_reads_like_the_page(stem):
    """No raw role, no directive, no picture that the file does not hold."""
    notebook = nbformat.read(download(f"{stem}.ipynb"), as_version=4)
    text = "\n".join(
        c.source for c in notebook.cells if c.cell_type == "markdown"
    )
    for raw in (":math:", ":func:", ":doc:", ":ref:", "\n.. ", ">`_", ")_"):
        assert raw not in text, f"{raw} in the notebook of {stem}"
    assert "](/" not in text
    assert "file:" not in text
    assert "$" in text or r"\begin{align}" in text  # its formulas


def test_the_gate_refuses(tmp_path):
    """The four packages can be imported, sphinx cannot."""
    script = tmp_path / "script.py"
    script.write_text("import torch, triton, matplotlib, pandas\n")
    assert run_script(tmp_path, script.name).returncode == 0
    for module in ("sphinx", "pytest"):
        script.write_text(f"import {module}\n")
        done = run_script(tmp_path, script.name)
        assert done.returncode == 1
        assert f"No module named '{module}'" in done.stderr
