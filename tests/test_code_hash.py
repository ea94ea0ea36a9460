"""The hash of a page's code: what it covers, and what it leaves out."""

import builtins
import symtable

import pytest

import tutorial
from measurements import code_hash

TEXT = '''"""Title."""

# %%
# Prose.

import helper
import torch

FACTOR = 2


def double(x, y=(1,)):  # a comment
    """A docstring."""
    return f"{x!r:>{FACTOR + 1}} {{y}} {x + {'a': 1}['a']}" "é"


# %%

# Drawing: two numbers.

drawn = [1, 2]

# %%
# Solution 1 is prose here.

if double(3):
    table = [
        double(2),
        # of three
    ]

# %%
# The answer.

# Solution 1

solved = 1
'''


@pytest.fixture
def hashed(tmp_path):
    """The hash of a script after an edit."""
    script = tmp_path / "01-page.py"

    def of(old="", new=""):
        assert old in TEXT
        script.write_text(TEXT.replace(old, new) if old else TEXT)
        return code_hash.of(script)

    of.folder = tmp_path
    return of


def test_it_is_the_same_in_all_versions_of_python(hashed):
    assert hashed() == "f2ffee5c2fc688b7"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Title.", "Another\ntitle."),
        ("# Prose.", "# Other prose,\n# of two lines."),
        ("# Prose.\n", ""),
        ("  # a comment", ""),
        ('    """A docstring."""\n', ""),
        ("A docstring", "Another"),
        ("(2),\n        # of three\n    ]", "( 2 ),]"),
        ("FACTOR = 2\n", "FACTOR  =  2\n\n\n"),
        ("two numbers.\n\ndrawn = [1, 2]", "three.\n\ndrawn = [1, 2, 3]"),
        ("solved = 1", "solved = 2"),
    ],
)
def test_what_changes_no_number_is_left_out(hashed, old, new):
    assert hashed(old, new) == hashed()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("FACTOR = 2", "FACTOR = 3"),
        ("import torch", "import torch as t"),
        ("FACTOR + 1", "FACTOR + 2"),
        ("'a': 1", "'a':  1"),  # a blank in an f-string may be shown
        ("{{y}} ", "{{y}}  "),
        ("é", "e"),
        ("(1,)", "(1)"),
        ("    return f", "    yield f"),
        ("        double(2),\n", ""),
        ("table = [", "table.x_names = ["),
        ("# Drawing: two", "# Two"),
        ("# Solution 1\n", "# The solution\n"),
        ("\n\n# Drawing:", "\n# Drawing:"),  # prose of a plain cell
        ("double(3):", "double(4):"),
    ],
)
def test_what_may_change_a_number_is_covered(hashed, old, new):
    assert hashed(old, new) != hashed()


def test_lines_belong_to_their_block(hashed):
    deep = "    ]\n    solved = 1\n"
    assert hashed("    ]\n", deep) != hashed(
        "    ]\n", deep.replace("    s", "s")
    )


def test_files_beside_it_are_covered_if_the_script_names_them(hashed):
    """By an import or a string, directly or by each other."""
    alone = hashed()
    helper = hashed.folder / "helper.py"
    helper.write_text("FACTOR = 2  # a comment\nDATA = 'more/table.json'\n")
    with_helper = hashed()
    assert with_helper != alone
    helper.write_text("FACTOR = 2\nDATA = 'more/table.json'\n")
    assert hashed() == with_helper
    more = hashed.folder / "more"
    more.mkdir()
    (more / "table.json").write_text("[1]")
    with_table = hashed()
    assert with_table != with_helper
    (more / "table.json").write_text("[2]")
    assert hashed() != with_table
    before = hashed()
    (hashed.folder / "another.py").write_text("FACTOR = 3\n")
    (hashed.folder / "02-next.py").write_text("helper = 3\n")
    assert hashed() == before
    helper.write_text("FACTOR = 3\nDATA = 'more/table.json'\n")
    assert hashed() != before


def test_what_is_measured_is_what_is_hashed():
    rows = code_hash.measured(TEXT).split("\n")
    assert len(rows) == len(TEXT.split("\n"))
    assert "FACTOR = 2" in rows and "import torch" in rows
    assert not any("drawn" in row or "solved" in row for row in rows)


# Cells that are left out -----------------------------------------------------


def table_of(text):
    return symtable.symtable(text, "script", "exec")


def globals_of(scope):
    """The global names that a scope uses, or one inside it."""
    found = {s.get_name() for s in scope.get_symbols() if s.is_global()}
    return found.union(*map(globals_of, scope.get_children()))


def bound_by(text):
    return {
        symbol.get_name()
        for symbol in table_of(text).get_symbols()
        if symbol.is_assigned() or symbol.is_imported()
    }


def missing(text):
    """The names that measured code uses, and only a cell that is left out
    gives: ``make record`` would stop there, for it runs none of these."""
    code = code_hash.measured(text)
    there = bound_by(code) | set(dir(builtins)) | {"__file__", "__name__"}
    return globals_of(table_of(code)) - there


@pytest.mark.parametrize("script", tutorial.scripts(), ids=tutorial.name_of)
def test_no_cell_needs_one_that_is_left_out(script):
    assert not missing(script.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ("table = [", "table = [drawn,", {"drawn"}),
        ("import torch", "import torch\nf = lambda: drawn", {"drawn"}),
        ("if double(3):", "if double(3) + solved:", {"solved"}),
        ("if double(3):", "drawn = 1\nif drawn:", set()),
    ],
)
def test_a_cell_that_needs_one_is_found(old, new, found):
    assert missing(TEXT.replace(old, new)) == found
