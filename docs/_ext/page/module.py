"""every_width.py: what a page defines, as a module that others import.

Its cells are those of the page, to the byte, from the rule to the operators.
What a script does beside that is left out: prose, drawings, checks, clocks.
Of the first cells only what is used stays: no stream is set, and no switch of
the interpreter.
"""

import ast
import re
from pathlib import Path

import tutorial
from page import downloads

((PAGE, FILE),) = downloads.MODULES.items()
# The headings of the first cell that is taken, and of the first that is not.
FIRST, BEYOND = "# The rule\n", "# How fast is it?\n"
ABOUT = '''"""Layer norm of any width in Triton, forward and backward.

    layer_norm(x, normalized_shape, weight, bias)  as torch's function
    LayerNorm(normalized_shape)                    as torch.nn.LayerNorm
    swap(model)                                    every torch.nn.LayerNorm

One kind of GPU a process. To try it without a GPU, set TRITON_INTERPRET=1.
"""
'''
SEPARATOR = re.compile(r"^# %%\n", re.MULTILINE)
PROSE = re.compile(r"(?:#.*\n)*")
TITLE = re.compile(r"^# Scaffold: (.)", re.MULTILINE)


def text():
    """The module, without the head of downloads."""
    _, *cells = SEPARATOR.split(tutorial.source(PAGE))
    starts = [cell.startswith(FIRST) for cell in cells]
    ends = [cell.startswith(BEYOND) for cell in cells]
    first = starts.index(True)
    taken = [
        PROSE.sub("", cell, count=1).strip()
        for cell in cells[first : ends.index(True)]
        if "\n# Drawing:" not in cell
    ]
    code = "\n\n\n".join(filter(None, taken)) + "\n"
    code = TITLE.sub(lambda found: f"# {found[1].upper()}", code)
    # Python's own modules stand in the second cell.
    begin = [
        *used(ast.Import, "".join(cells[1:first]), code),
        "",
        *used(ast.Import, cells[0], code),
        "",
        *used(ast.Assign, cells[0], code),
    ]
    return "\n".join([ABOUT, *begin, "", "", code])


def used(kind, cell, code):
    """The imports of a cell, or its constants, that some code uses."""
    names = {n.id for n in ast.walk(ast.parse(code)) if type(n) is ast.Name}
    for node in ast.parse(cell).body:
        if isinstance(node, kind):
            bound = {
                ast.unparse(each).split(" as ")[-1]
                for each in getattr(node, "names", None) or node.targets
            }
            if bound & names:
                yield ast.get_source_segment(cell, node)


def write(app, error):
    """Beside the page, in each language."""
    there = f"tutorials/{PAGE}" in app.env.found_docs
    if error is None and app.builder.format == "html" and there:
        needs = " ".join(downloads.PACKAGES)
        said = downloads.head(downloads.origin(PAGE, app.config))
        said = said.replace(needs, "torch triton")  # it draws nothing
        file = (Path(app.outdir) / "tutorials" / PAGE).with_name(FILE)
        file.write_text(said + text(), encoding="utf-8")


def setup(app):
    app.connect("build-finished", write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
