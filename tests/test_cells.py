"""The cells that pages share are the same everywhere, from one source."""

import shutil

import pytest

import cells
from cells import BEFORE, EXPLAINED, functions, read, shared, written

NAMES = list(cells.names())
GATHERING = "layer-norm/11-every-width"


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


@pytest.mark.parametrize("name", NAMES)
def test_cells_are_those_of_their_sources(name):
    assert written(name) == read(name), "make cells writes them anew"


def test_an_edit_of_a_copy_is_found_and_undone(folder):
    name = "fused/02-dropout"
    edit(folder, name, "warmup=10, rep=40", "warmup=1, rep=4")
    assert cells.changed(folder) == [name]
    assert written(name, folder) == read(name, cells.TUTORIALS)


def test_an_edit_of_the_source_reaches_every_copy(folder):
    having = [name for name in NAMES if "def device_time" in read(name)]
    assert len(having) > 10
    copies = set()
    # The clock of today, and that of the pages that still have the old one.
    for source, old, new in (
        (EXPLAINED, "range(25)", "range(35)"),
        (BEFORE, "warmup=10, rep=40", "warmup=10, rep=50"),
    ):
        edit(folder, source, old, new)
        copies |= {name for name in having if old in read(name, folder)}
    assert copies | {EXPLAINED, BEFORE} == set(having)
    assert set(cells.changed(folder)) == copies
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


def test_a_line_that_does_not_begin_its_cell_is_named(folder):
    """Under a heading nothing would be written for it."""
    name, line = "fused/02-dropout", "# Scaffold: the clock, and what"
    edit(folder, name, f"# %%\n\n{line}", f"# %%\n# Prose.\n\n{line}")
    with pytest.raises(LookupError, match=r"02-dropout.py: .* the clock"):
        cells.changed(folder)


def test_an_import_that_a_page_does_not_use_is_left_out():
    line = "import matplotlib.pyplot as plt\n"
    (cell,) = [cell for cell in shared().values() if line in cell]
    uses_torch = "F.relu(x), tl.load(x)"
    assert cells._used(cell, uses_torch) == cell.replace(line, "")
    assert cells._used(cell, f"{uses_torch}\nplt.show()") == cell


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
    theirs = [functions(read(source)) for source in (EXPLAINED, BEFORE)]
    for function in "device_time", "speed", "report":
        own = functions(read(name)).get(function)
        assert own in (None, *(each[function] for each in theirs))
