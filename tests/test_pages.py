"""What is true of every page in the folder of a section.

tests/test_tutorials.py says what is true of all tutorials; this file holds
the form of the short ones.
"""

import ast
import itertools
import re

import pytest
from project import ROOT

PAGES = sorted((ROOT / "tutorials").glob("*/[0-9][0-9]-*.py"))
TEXTS = {
    f"{path.parent.name}/{path.stem}": path.read_text(encoding="utf-8")
    for path in PAGES
}
EVERY = pytest.mark.parametrize("name", TEXTS)
# It explains what the others fold.
FIRST = "layer-norm/01-layer-norm"
# They gather the kernels of pages before them, in cells that name these; their
# own tests compare them.
GATHERING = {"layer-norm/11-every-width", "norms-and-losses/05-wide-softmax"}
# They fold scaffold of their own, host code or how ranks are started, or
# kernels of another page: what counts there is what a reader sees.
LONG = GATHERING | {
    "several-gpus/01-layer-norm",
    "fused/01-add-layer-norm",
    "norms-and-losses/04-cross-entropy",
}
GATHERED = re.compile(r"from pages? \d\d")
MOST_LINES = 600

CELL = re.compile(r"^# %%.*\n", re.MULTILINE)
# A cell is folded by its first line, after an empty one: without that the
# comment would be prose.
MARKED = re.compile(r"\n# (Scaffold: |Drawing: |Solution (?=\d))(.*)\n")
# A comment that was to fold a cell, perhaps.
NEARLY = re.compile(
    r"^ *# *(?:scaffold|drawing|solution)s?\b *[:\d]", re.I | re.M
)


def cells(text):
    """The cells of a script, each with the number of its first line."""
    starts = [0, *(m.start() for m in CELL.finditer(text)), len(text)]
    for start, end in itertools.pairwise(starts):
        yield text.count("\n", 0, start) + 1, CELL.sub("", text[start:end])


def marked(text, kind):
    """The cells that are folded as this kind."""
    return [
        cell.rstrip()
        for _, cell in cells(text)
        if (found := MARKED.match(cell))
        and found[1].startswith(kind)
        and not GATHERED.search(found[2])
    ]


def seen(name, text=None):
    """How many lines are read of a page: of a long one, not what it folds."""
    text = text or TEXTS[name]
    if name not in LONG:
        return text.count("\n")
    return sum(
        cell.count("\n") + 1
        for _, cell in cells(text)
        if not MARKED.match(cell)
    )


def code(cell):
    """The lines of a cell without its prose, its marker, empty lines."""
    lines = [line for line in cell.splitlines() if line.strip()]
    while lines and lines[0].startswith("#"):
        lines.pop(0)
    return lines


def kernels(text):
    """{name: (first line, last line)} of what @triton.jit decorates."""
    return {
        node.name: (node.decorator_list[0].lineno, node.end_lineno)
        for node in ast.parse(text).body
        if isinstance(node, ast.FunctionDef)
        and "triton.jit" in map(ast.unparse, node.decorator_list)
    }


def first_run(text):
    """The line of the first statement that launches a kernel, by itself or
    through functions, or None."""
    body, launching = ast.parse(text).body, set(kernels(text))
    for node in body:
        is_kernel = getattr(node, "name", None) in launching
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not is_kernel:
            if _used(node) & launching:
                launching.add(node.name)
        elif not is_kernel and _calls(node, launching):
            return node.lineno
    return None


def _used(node):
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}


def _calls(node, names):
    """Whether a statement calls one of these or hands it to a call."""
    return any(
        isinstance(part, ast.Call) and _used(part) & names
        for part in ast.walk(node)
    )


def test_there_are_pages():
    assert PAGES


def test_scaffold_is_the_same_on_every_page():
    """To the byte; each stands where a page first needs it, once."""
    cells_of = {name: marked(text, "Scaffold") for name, text in TEXTS.items()}
    known = cells_of[FIRST]
    for name, found in cells_of.items():
        for cell in found:
            assert cell in known or name in LONG, (
                f"{name}:\n{cell.strip().splitlines()[0]}"
            )
        assert len(set(found)) == len(found), name


@EVERY
def test_scaffold_is_short(name):
    known = marked(TEXTS[FIRST], "Scaffold")
    lines = [
        line for cell in known if cell in TEXTS[name] for line in code(cell)
    ]
    assert 0 < len(lines) <= 70


@EVERY
def test_the_first_code_is_scaffold(name):
    first = next(cell for _, cell in list(cells(TEXTS[name]))[1:])
    assert first.rstrip() in marked(TEXTS[name], "Scaffold")


@EVERY
def test_script_is_short(name):
    assert seen(name) <= MOST_LINES


@EVERY
def test_cells_are_short(name):
    for line, cell in cells(TEXTS[name]):
        if not cell.startswith('r"""'):
            assert len(code(cell)) <= 40, line


@EVERY
def test_kernels_are_short(name):
    for kernel, (first, last) in kernels(TEXTS[name]).items():
        assert last - first + 1 <= 40, kernel


@EVERY
def test_a_kernel_runs_in_the_first_third(name):
    before = TEXTS[name].splitlines(keepends=True)[: first_run(TEXTS[name])]
    assert seen(name, "".join(before)) <= seen(name) / 3


@EVERY
def test_something_is_measured_in_the_first_third(name):
    text = TEXTS[name]
    runs = re.search(
        r"^(report\(|judge\(|(\w+ = )?\w+\.run\()", text, re.MULTILINE
    )
    assert seen(name, text[: runs.start()]) <= seen(name) / 3


@EVERY
def test_folding_comments_are_whole(name):
    """Each that looks like one folds its cell and says what it gives."""
    text = TEXTS[name]
    folded = [m for _, cell in cells(text) if (m := MARKED.match(cell))]
    assert len(NEARLY.findall(text)) == len(folded)
    for found in folded:
        assert found[2].strip(), found[0]


@EVERY
def test_exercises_are_whole(name):
    """One or two, each with a hint, a checker, a stub and a solution."""
    text = TEXTS[name]
    count = len(marked(text, "Solution"))
    assert 1 <= count <= 2
    for number in range(1, count + 1):
        start = text.index(f"Exercise {number}")
        end = text.index(f"# %%\n\n# Solution {number}")
        stub, solution = text[start:end], text[end:]
        assert "\n# **Hint.** " in stub
        assert f"def exercise_{number}(" in stub
        # The stub is tried; the solution must pass.
        assert stub.count(f"exercise_{number}(") == 2
        assert f"\nassert exercise_{number}(" in solution


@EVERY
def test_drawings_are_folded(name):
    for line, cell in cells(TEXTS[name]):
        if re.search(r"^plt\.(figure|subplots)\(", cell, re.M):
            found = MARKED.match(cell)
            assert found and found[1] == "Drawing: ", line
