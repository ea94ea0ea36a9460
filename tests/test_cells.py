"""The cells that pages share are the same everywhere, from one source."""

import shutil

import pytest

import cells
from cells import EXPLAINED, functions, read, shared, written

NAMES = list(cells.names())
GATHERING = "layer-norm/11-every-width"
IMPORTS = "# Scaffold: imports, and the interpreter where there is no GPU."
CLOCK = "# Scaffold: the clock."


@pytest.fixture
def folder(tmp_path):
    """A copy of the scripts, to edit."""
    scripts = tmp_path / "tutorials"
    shutil.copytree(cells.TUTORIALS, scripts)
    return scripts


def edit(folder, name, old, new):
    path = folder / f"{name}.py"
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


@pytest.fixture
def made_up(folder):
    """A page of shared cells that no other test of this file edits: which
    pages have them may change."""
    name = "layer-norm/99-made-up"
    cells_of_source = (
        cell
        for cell in cells.CELL.split(read(EXPLAINED, folder))
        if any(line in cell for line in (IMPORTS, CLOCK))
    )
    text = "".join(cells_of_source)
    path = folder / f"{name}.py"
    path.write_text(text, encoding="utf-8")
    # As make cells writes it: no import that it does not use.
    path.write_text(written(name, folder), encoding="utf-8")
    return name


@pytest.mark.parametrize("name", NAMES)
def test_cells_are_those_of_their_sources(name):
    assert written(name) == read(name), "make cells writes them anew"


def test_an_edit_of_a_copy_is_found_and_undone(folder, made_up):
    before = read(made_up, folder)
    assert cells.changed(folder) == []
    edit(folder, made_up, "range(25)", "range(2)")
    assert cells.changed(folder) == [made_up]
    assert written(made_up, folder) == before


def test_an_edit_of_the_source_reaches_every_copy(folder):
    having = [name for name in NAMES if "def device_time" in read(name)]
    assert len(having) > 10
    edit(folder, EXPLAINED, "range(25)", "range(35)")
    assert {EXPLAINED, *cells.changed(folder)} == set(having)
    edit(
        folder,
        "layer-norm/05-chunks",
        "mask = row < left",
        "mask = row <= left",
    )
    assert "fused/03-activation" in cells.changed(folder)
    assert "mask = row <= left" in written("fused/03-activation", folder)


def test_what_waits_is_not_as_its_sources_are(monkeypatch):
    """A page that needs not wait any longer is taken from the list."""
    waiting = cells.WAITING
    monkeypatch.setattr(cells, "WAITING", set())
    assert waiting == set(cells.changed())


def test_a_line_that_does_not_begin_its_cell_is_named(folder, made_up):
    """Under a heading nothing would be written for it."""
    edit(folder, made_up, f"# %%\n\n{CLOCK}", f"# %%\n# Prose.\n\n{CLOCK}")
    with pytest.raises(LookupError, match=r"99-made-up.py: .* the clock"):
        cells.changed(folder)


def test_an_import_that_a_page_does_not_use_is_left_out(folder, made_up):
    line = "import matplotlib.pyplot as plt\n"
    assert line in "".join(shared(folder).values())
    edit(folder, made_up, "import torch\n", f"{line}import torch\n")
    assert line not in written(made_up, folder)


def test_a_function_with_a_name_of_its_own(folder, monkeypatch):
    """Page 11 has one of page 05 under another name."""
    monkeypatch.setattr(cells, "WAITING", set())
    edit(folder, "layer-norm/05-chunks", "def plan_forward(", "def plan_fwd(")
    with pytest.raises(LookupError, match=r"05-chunks.py has no .* plan_forw"):
        cells.changed(folder)


def test_a_page_that_is_not_there_is_named(folder, monkeypatch):
    monkeypatch.setattr(cells, "WAITING", set())
    edit(folder, GATHERING, "lanes, from page 06.", "lanes, from page 66.")
    with pytest.raises(LookupError, match=r"11-every-width.py: .* page 66"):
        cells.changed(folder)


@pytest.mark.parametrize("name", NAMES)
def test_no_page_has_a_clock_of_its_own(name):
    """Copied without its first line a cell would be compared with nothing."""
    explained = functions(read(EXPLAINED))
    for function in "device_time", "speed", "report":
        own = functions(read(name)).get(function)
        assert own in (None, explained[function])
