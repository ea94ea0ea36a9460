"""What a page defines, as a module that others import: every_width.py.

Its cells are those of the page, to the byte. What a script does beside that is
left out: prose, drawings, checks, clocks.
Of the first cells only what is used stays: no stream is set, and no switch of
the interpreter.
"""

import ast
import re
from dataclasses import dataclass
from pathlib import Path

import tutorial
from page import downloads


@dataclass(frozen=True)
class Module:
    about: str  # how it begins
    # The headings of the first cell that is taken, and of the first that is
    # not, of each part of the page.
    parts: tuple


IN_ONE_PROCESS = """One kind of GPU a process. To try it without a GPU, set \
TRITON_INTERPRET=1."""
MODULES = {
    "layer-norm/11-every-width": Module(
        f'''"""Layer norm of any width in Triton, forward and backward.

    layer_norm(x, normalized_shape, weight, bias)  as torch's function
    LayerNorm(normalized_shape)                    as torch.nn.LayerNorm
    swap(model)                                    every torch.nn.LayerNorm

{IN_ONE_PROCESS}
"""
''',
        (("The rule", "How fast is it?"),),
    ),
    "attention/03-any-attention": Module(
        f'''"""Attention of any lengths in Triton, forward and backward.

    attention(query, key, value, is_causal, scale, enable_gqa)

as torch's scaled_dot_product_attention, without a mask and without dropout.

{IN_ONE_PROCESS}
"""
''',
        (
            ("The forward kernel", "Is the forward pass right?"),
            ("The backward kernels", "Is it right?"),
        ),
    ),
}
SEPARATOR = re.compile(r"^# %%\n", re.MULTILINE)
PROSE = re.compile(r"(?:#.*\n)*")
TITLE = re.compile(r"^# Scaffold: (.)", re.MULTILINE)


def text(page):
    """The module, without the head of downloads."""
    _, *cells = SEPARATOR.split(tutorial.source(page))
    first, taken = len(cells), []
    for begins, beyond in MODULES[page].parts:
        begin, end = (
            next(i for i, c in enumerate(cells) if f"# {title}\n# --" in c)
            for title in (begins, beyond)
        )
        first = min(first, begin)
        taken += [
            PROSE.sub("", cell, count=1).strip()
            for cell in cells[begin:end]
            if "\n# Drawing:" not in cell
        ]
    code = "\n\n\n".join(filter(None, taken)) + "\n"
    code = TITLE.sub(lambda found: f"# {found[1].upper()}", code)
    # Python's own modules, and parts of others, stand in the second cell.
    more = "".join(cells[1:first])
    own = [*used(ast.Import, more, code)]
    begin = [
        *own,
        *([""] if own else []),
        *used(ast.Import, cells[0], code),
        *used(ast.ImportFrom, more, code),
        "",
        *used(ast.Assign, cells[0], code),
    ]
    return "\n".join([MODULES[page].about, *begin, "", "", code])


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
    """Beside its page, in each language."""
    if error is not None or app.builder.format != "html":
        return
    for page, name in downloads.MODULES.items():
        if f"tutorials/{page}" not in app.env.found_docs:
            continue
        needs = " ".join(downloads.PACKAGES)
        said = downloads.head(downloads.origin(page, app.config))
        said = said.replace(needs, "torch triton")  # it draws nothing
        file = (Path(app.outdir) / "tutorials" / page).with_name(name)
        file.write_text(said + text(page), encoding="utf-8")


def setup(app):
    app.connect("build-finished", write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
