"""The cells that pages share are the same everywhere, from one source."""

import re
import shutil

import pytest

import cells
import modules
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


# Modules ---------------------------------------------------------------------


def test_modules_are_what_their_pages_say():
    assert cells.changed_modules() == {}, "make cells writes them anew"


@pytest.mark.parametrize("module", modules.WRITTEN)
def test_functions_of_a_module_are_those_of_its_pages_to_the_byte(module):
    """But for the word before a name that several pages have."""
    parts = re.split(r"^# (\S+/\S+) -+\n", read(module), flags=re.MULTILINE)
    count = 0
    for page, part in zip(parts[1::2], parts[2::2], strict=True):
        word, _ = modules.WRITTEN[module][page]
        worded = re.compile(rf"\b(_?)(?:{word}|{word.upper()})_")

        def without(text, worded=worded):
            return worded.sub(r"\1", text)

        theirs = set(map(without, functions(read(page)).values()))
        ours = functions(part)
        assert set(map(without, ours.values())) - theirs == set(), page
        count += len(ours)
    assert count > 100


def test_an_edit_of_a_page_reaches_its_module(folder):
    page = "norms-and-losses/02-rms-norm-16-bits"
    edit(folder, page, "rows are summed in float32", "rows are summed so")
    (text,) = cells.changed_modules(folder).values()
    assert "rows are summed so" in text


FIRST = """
# %%
# Prose, which no module has.

SIZE = 3  # of all


# What is above a function belongs to it.
def helper(forward):
    return forward + SIZE, f"{SIZE} and {max(SIZE, 4)}"


class Box:
    def helper(self):
        return helper(SIZE)


def first(size=SIZE):
    return Box().helper(), size


print(first())
"""
SECOND = FIRST.replace("= 3", "= 4").replace("first", "second")


def test_what_pages_call_alike_gets_their_words():
    """Names of functions and constants, and not those of methods, arguments
    and local variables."""
    pages = {"a/01": FIRST, "a/02": SECOND}
    gathered = {"a/01": ("one", "first"), "a/02": ("two", "second")}
    text = modules.both_passes(gathered, pages.get)
    space = {}
    exec(text, space)
    assert space["first"]()[0] == (6, "3 and 4")
    assert space["second"]()[0] == (8, "4 and 4")
    assert {"ONE_SIZE", "TWO_SIZE", "one_helper", "two_helper"} <= {*space}
    assert "# What is above a function belongs to it.\ndef one_hel" in text
    assert "Prose" not in text and "print" not in text
    assert "def helper(self)" in text and "forward + ONE_SIZE" in text


def test_what_a_function_has_of_its_own_keeps_its_name():
    """And what it says to be global does not."""
    page = """
LIMIT = 4 * NUMBER


def helper():
    global LIMIT
    LIMIT = NUMBER


def inner():
    return NUMBER


def wanted():
    helper()

    def inner():
        return 1

    return inner(), LIMIT
"""
    texts = {f"a/0{i}": f"NUMBER = {i}\n{page}" for i in (1, 2)}
    texts["a/02"] = texts["a/02"].replace("wanted", "also")
    gathered = {"a/01": ("one", "wanted"), "a/02": ("two", "also")}
    text = modules.both_passes(gathered, texts.get)
    space = {}
    exec(text, space)
    assert space["wanted"]() == (1, 1)
    assert space["also"]() == (1, 2)
    assert "global ONE_LIMIT" in text and "return inner(), TWO_LIMIT" in text


def test_a_module_that_lacks_something_is_not_written():
    with pytest.raises(LookupError, match="no page has missing"):
        modules.text("", {"a/01": ("", "missing")}, {"a/01": FIRST}.get)
    lacking = FIRST.replace("def helper(forward)", "def other(forward)")
    with pytest.raises(LookupError, match="a module lacks helper"):
        modules.text("", {"a/01": ("", "first")}, {"a/01": lacking}.get)
