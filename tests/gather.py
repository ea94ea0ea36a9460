"""Write the functions that pages have from other pages of a section anew.

    python tests/gather.py

Tests of these pages hold them to be the same.
"""

import ast
import re
from pathlib import Path

TUTORIALS = Path(__file__).parents[1] / "tutorials"
GATHERING = "layer-norm/11-every-width", "norms-and-losses/05-wide-softmax"
# Functions that several pages of layer-norm have under one name.
RENAMED = {
    "plan_fwd_chunks": "plan_forward",
    "plan_bwd_chunks": "plan_backward",
    "plan_fwd_shifted": "plan_forward",
    "plan_bwd_shifted": "plan_backward",
    "plan_sweeps": "plan",
}
# The pages that a cell names; what it holds is the same on all of them.
CELL = re.compile(r"\n# Scaffold: .* from pages? ([^.]*)\.")


def functions(text):
    """{name: text}, with decorators."""
    lines = text.splitlines(keepends=True)
    return {
        node.name: "".join(
            lines[
                min(
                    [node.lineno, *(d.lineno for d in node.decorator_list)]
                ) - 1 : node.end_lineno
            ]
        )
        for node in ast.parse(text).body
        if isinstance(node, ast.FunctionDef)
    }  # fmt: skip


def gathered(text):
    """(name, number of a page) of all that a page has from others."""
    for cell in re.split(r"^# %%.*\n", text, flags=re.MULTILINE):
        if said := CELL.match(cell):
            for name in functions(cell):
                for number in re.findall(r"\d\d", said[1]):
                    yield name, number


def original(name, number, section="layer-norm"):
    """A function as its page has it, under its name here, or None."""
    (page,) = (TUTORIALS / section).glob(f"{number}-*.py")
    own = RENAMED.get(name, name) if section == "layer-norm" else name
    text = functions(page.read_text(encoding="utf-8")).get(own)
    return text and text.replace(f"def {own}(", f"def {name}(", 1)


def main():
    for page in GATHERING:
        section, path = page.split("/")[0], TUTORIALS / f"{page}.py"
        text = path.read_text(encoding="utf-8")
        here = functions(text)
        for name, number in list(gathered(text)):
            text = text.replace(here[name], original(name, number, section))
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
