"""Write the cells that pages share into all scripts: make cells.

Every script runs by itself, so it holds a copy of each. There is one source:

- A cell that begins like one of page 01 of layer norm, which explains them
  (``# Scaffold: the clock, and what its figures say.``), is written anew from
  there; an import that a page does not use is left out.
- A cell that names a page (``# Scaffold: plans, from page 05.``) gets its
  functions from there: from the section that it names, its own, or layer norm.

A module that gathers functions of many pages is written, too: see
docs/_ext/modules.py.
"""

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(f"{ROOT}/docs/_ext")

import modules  # noqa: E402

TUTORIALS = ROOT / "tutorials"
EXPLAINED = "layer-norm/01-layer-norm"
# What these have from pages that were written anew since then is as it was
# when they were measured, and is written when they are measured again: the
# columns of layer-norm/02 on the page of two passes, and on the page of wide
# softmax the tiles of softmax backward from 32769 to 49152 columns.
WAITING = {
    "layer-norm/09-two-passes",
    "norms-and-losses/05-wide-softmax",
}
# Functions that have a name of their own on a page that gathers many.
RENAMED = {
    ("layer-norm/05-chunks", "plan_fwd_chunks"): "plan_forward",
    ("layer-norm/05-chunks", "plan_bwd_chunks"): "plan_backward",
    ("layer-norm/06-unaligned-rows", "plan_fwd_shifted"): "plan_forward",
    ("layer-norm/06-unaligned-rows", "plan_bwd_shifted"): "plan_backward",
    ("layer-norm/07-two-sweeps", "plan_sweeps"): "plan_forward",
    ("layer-norm/07-two-sweeps", "forward_in_sweeps"): "forward",
    ("layer-norm/07-two-sweeps", "backward_in_sweeps"): "backward",
}

CELL = re.compile(r"^(?=# %%)", re.MULTILINE)
TITLE = re.compile(r"# %%.*\n\n(# Scaffold: .*)\n")
ORIGIN = re.compile(r" from pages? (\d\d(?: and \d\d)*)(?: of ([^.]*))?\.$")


def read(name, folder=TUTORIALS):
    return (folder / f"{name}.py").read_text(encoding="utf-8")


def shared(folder=TUTORIALS):
    """The cells of the page that explains them: {first line: text}."""
    found = {}
    for cell in CELL.split(read(EXPLAINED, folder)):
        title = TITLE.match(cell)
        # What a page has from another one is not its own to explain.
        if title and not ORIGIN.search(title[1]):
            found[title[1]] = cell.strip()
    return found


def written(name, folder=TUTORIALS):
    """The text of a script, with its shared cells as their sources are."""
    cells = CELL.split(read(name, folder))
    known = shared(folder)
    for i, cell in enumerate(cells):
        title = TITLE.match(cell)
        if not title:
            for line in cell.splitlines():
                if line in known:
                    raise LookupError(
                        f"tutorials/{name}.py: no cell begins with "
                        f'"{line}": put # %% and an empty line before it'
                    )
            continue
        if title[1] in known:
            others = "".join(cells[:i] + cells[i + 1 :])
            end = cell[len(cell.rstrip()) :]
            cells[i] = _used(known[title[1]], others) + end
        elif name in WAITING:
            continue
        elif origin := ORIGIN.search(title[1]):
            for number in origin[1].split(" and "):
                page = _page(name, number, origin[2] or "", folder)
                cells[i] = _with_functions_of(page, cells[i], folder)
    return "".join(cells)


def _used(cell, others):
    """A cell without the imports under another name that nobody uses."""
    lines = cell.splitlines(keepends=True)
    named = re.compile(r"import \S+ as (\w+)$")
    return "".join(
        line
        for line in lines
        if not (m := named.match(line)) or re.search(rf"\b{m[1]}\.", others)
    )


def _page(name, number, words, folder):
    """The page with a number: of the section that words name, of the same
    one, or of layer norm."""
    own, first = name.split("/")[0], EXPLAINED.split("/")[0]
    called = words.replace(" ", "-")
    named = [
        path.name
        for path in folder.iterdir()
        if words and path.is_dir() and called.startswith(path.name)
    ]
    for section in named or (own, first):
        for path in (folder / section).glob(f"{number}-*.py"):
            return f"{section}/{path.stem}"
    raise LookupError(
        f"tutorials/{name}.py: a cell names page {number} "
        f"{words}, and there is no such page"
    )


def functions(text):
    """The functions of a text: {name: text, with decorators}."""
    lines, found = text.splitlines(keepends=True), {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef):
            starts = [node.lineno, *(d.lineno for d in node.decorator_list)]
            found[node.name] = "".join(
                lines[min(starts) - 1 : node.end_lineno]
            )
    return found


def _with_functions_of(page, cell, folder):
    theirs = functions(read(page, folder))
    for name, text in functions(cell).items():
        original = RENAMED.get((page, name), name)
        if original not in theirs:
            raise LookupError(
                f"tutorials/{page}.py has no function {original}"
                ", which another page has from it"
            )
        new = theirs[original].replace(f"def {original}(", f"def {name}(", 1)
        cell = cell.replace(text, new)
    return cell


def names(folder=TUTORIALS):
    """The scripts, drafts too."""
    for path in sorted(folder.glob("*/*[0-9][0-9]-*.py")):
        yield f"{path.parent.name}/{path.stem}"


def changed(folder=TUTORIALS):
    """The scripts whose cells are not those of their sources."""
    return [n for n in names(folder) if written(n, folder) != read(n, folder)]


def changed_modules(folder=TUTORIALS):
    """The modules that are not what their pages say, and what these say."""

    def of(page):
        return read(page, folder)

    texts = {
        name: modules.both_passes(gathered, of)
        for name, gathered in modules.WRITTEN.items()
    }
    return {name: text for name, text in texts.items() if text != of(name)}


def main():
    for name in changed():
        (TUTORIALS / f"{name}.py").write_text(written(name), encoding="utf-8")
        print(f"tutorials/{name}.py has its cells anew")
    for name, text in changed_modules().items():
        (TUTORIALS / f"{name}.py").write_text(text, encoding="utf-8")
        print(f"tutorials/{name}.py has its functions anew")


if __name__ == "__main__":
    try:
        main()
    except LookupError as error:
        sys.exit(f"make cells: {error}")
