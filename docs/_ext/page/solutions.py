"""What a reader need not see at first stands folded on the page.

A cell is folded when its first line is one of these comments:

- ``# Solution 1``: a reader may try first.
- ``# Scaffold: the clock``: what every page repeats.
- ``# Drawing: who adds which rows``: only its code is folded, under its
  picture.

What the cell of a solution or a scaffold printed and drew is folded with it,
and scaffolds that follow each other are under one line. Nothing that is
folded has a folded part: the X-ray panels of such a cell stand behind it.
A paragraph that begins with ``**Hint.**`` is folded too.

To the script all of it is plain code and prose. The notebook hides the code
of these cells until a reader asks for it.

A translated script may say these words in its language.
"""

import re

from docutils import nodes
from sphinx.locale import _
from sphinx_design.shared import create_component


def marked(code):
    """The kind of a folded cell and the line that it is folded under."""
    for kind, (beginning, title) in markers().items():
        if found := re.match(rf"# {beginning}(.+)", code.lstrip()):
            return kind, title % {"words": found[1].strip().rstrip(".。")}
    return None


def markers():
    """What begins the first line of a folded cell, and what it is folded
    under, by its kind."""
    solution = either("Solution", _("Solution"))
    scaffold = either("Scaffold", _("Scaffold"))
    drawing = either("Drawing", _("Drawing"))
    return {
        "solution": (rf"{solution} ?(?=\d)", _("Solution %(words)s")),
        "scaffold": (rf"{scaffold}(?:: |：)", "%(words)s"),
        "drawing": (
            rf"{drawing}(?:: |：)",
            _("Code of the drawing: %(words)s"),
        ),
    }


def either(word, translated):
    """A word in English or as the page says it."""
    return f"(?:{re.escape(word)}|{re.escape(translated)})"


def fold(app, doctree):
    """Put the marked cells and the hints of a tutorial into dropdowns."""
    docname = app.env.docname
    if not docname.startswith("tutorials/"):
        return
    for block in list(doctree.findall(nodes.literal_block)):
        if block.get("language") != "Python":  # an error has none
            continue
        code = block.astext().lstrip()
        if found := marked(code):
            fold_cell(block, *found)
    for paragraph in list(doctree.findall(nodes.paragraph)):
        fold_hint(paragraph)
    for section in list(doctree.findall(nodes.section)):
        gather(section)


def gather(section):
    """Put scaffolds that follow each other under one line, when none of the
    page's own words stands between them; panels follow that line."""
    run, panels = [], []
    for child in [*section.children, None]:
        if isinstance(child, nodes.comment | nodes.target):
            continue
        if child and "bp-scaffold" in child.get("container_classes", ()):
            run.append(child)
            continue
        if run and child and is_panel(child):
            panels.append(child)
            continue
        if len(run) > 1:
            at = section.index(run[0])
            for each in run + panels:
                section.remove(each)
            title = _("%(count)s cells of scaffold") % {"count": len(run)}
            cells = [part for cell in run for part in cell[1:]]
            group = folded("scaffold", title, cells)
            section[at:at] = [group, *panels]
        run, panels = [], []


def fold_cell(block, kind, title):
    parent = block.parent
    start = parent.index(block)
    end = start + 1
    # Up to the comment that begins the next cell, or the page's end.
    while end < len(parent) and not isinstance(
        parent[end], nodes.comment | nodes.target
    ):
        end += 1
    made = parent[start + 1 : end]
    if kind == "drawing":
        cell = [*made, folded(kind, title, [block])]
    else:
        panels = [each for each in made if is_panel(each)]
        made = [each for each in made if not is_panel(each)]
        cell = [folded(kind, title, [block, *made]), *panels]
    parent[start:end] = cell


def is_panel(node):
    return "bp-xray" in node.get("container_classes", ())


def fold_hint(paragraph):
    first = next(iter(paragraph.children), None)
    if not isinstance(first, nodes.strong):
        return
    hint = rf"{either('Hint', _('Hint'))} ?(\d*)[.。]?$"
    if found := re.match(hint, first.astext()):
        title = (
            _("Hint %(number)s") % {"number": found[1]}
            if found[1]
            else _("Hint")
        )
        parent, at = paragraph.parent, paragraph.parent.index(paragraph)
        paragraph.remove(first)
        text = paragraph[0]
        paragraph[0] = nodes.Text(text.lstrip())
        parent[at] = folded("hint", title, [paragraph])


def folded(kind, title, inside):
    dropdown = create_component(
        "dropdown",
        opened=False,
        type="dropdown",
        has_title=True,
        icon=None,
        chevron=None,
        container_classes=["bp-folded", f"bp-{kind}", "sd-mb-3"],
        title_classes=[],
        body_classes=[],
    )
    dropdown += nodes.rubric(title, title)
    dropdown.extend(inside)
    return dropdown


def hide_in_notebook(cell):
    """The same of a notebook: its reader sees the first line alone."""
    source = "".join(cell["source"]).lstrip()
    found = cell["cell_type"] == "code" and marked(source)
    if not found:
        return
    hide_code(cell)
    rest = source.partition("\n")[2]
    cell["source"] = [f"# @title {found[1]}\n{rest}"]


def hide_code(cell):
    """JupyterLab hides the code by the one, Colab by the other, and by a
    first line that is the title."""
    cell["metadata"]["jupyter"] = {"source_hidden": True}
    cell["metadata"]["cellView"] = "form"


def setup(app):
    app.connect("doctree-read", fold)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
