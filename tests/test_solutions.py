"""What is folded on a page, in a tutorial that has everything."""

import json
from types import SimpleNamespace

import pytest
from bs4 import BeautifulSoup
from docutils import nodes
from project import Project

from page import solutions

CELLS = """What it says.

# %%

# Scaffold: The words `a` and `b`, as every page needs them.
print("scaffold printed")

# %%

# Drawing: a straight line
import matplotlib.pyplot as plt

plt.figure("a straight line, drawn")
plt.plot([1, 2])
print("drawing printed")

# %%
# **Exercise 1.** Do it.
#
# **Hint 1.** Begin with ``tl.sum``,
# then go on.
#
# Try it.

print("stub printed")

# %%

# Solution 1
plt.figure("the solution's picture")
plt.plot([2, 1])
print("solution printed")

# %%
# An open cell.

print("open printed")
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    project = Project(tmp_path_factory.mktemp("folded"))
    project.edit("What it says.\n", CELLS)
    project.record()
    done = project.build()
    assert done.returncode == 0, done.stdout[-3000:]
    return project


@pytest.fixture
def page(project):
    article = BeautifulSoup(project.page(), "html.parser").article
    for block in article.select("details.bp-numbers"):
        block.decompose()
    return article


def folded(page, kind):
    (details,) = page.select(f"details.bp-{kind}")
    assert "open" not in details.attrs
    details.extract()
    return details.summary.get_text().strip(), details


def printed(part):
    return [
        out.get_text().strip() for out in part.select(".sphx-glr-script-out")
    ]


def test_a_scaffold_is_folded_with_what_it_printed(page):
    title, details = folded(page, "scaffold")
    assert title == "The words `a` and `b`, as every page needs them"
    assert "# Scaffold: The words" in details.get_text()
    assert printed(details) == ["scaffold printed"]
    assert "scaffold printed" not in page.get_text()


def scaffold(name, *made):
    code = nodes.literal_block(text=f"# Scaffold: {name}", language="Python")
    return [nodes.comment(text="GENERATED FROM PYTHON SOURCE"), code, *made]


def test_scaffolds_that_follow_each_other_are_under_one_line():
    """And what is folded, is folded once: panels stand behind."""
    words = nodes.paragraph(text="Words of the page.")
    own, panel, alone = (
        solutions.folded("panel", name, []) for name in ("own", "b", "d")
    )
    for each in own, panel, alone:
        each["container_classes"] = ["bp-xray"]
    printed = nodes.paragraph(text="printed")
    cells = [
        *(own, *scaffold("a"), *scaffold("b", panel, printed)),
        *(*scaffold("c"), nodes.comment(text="GENERATED"), words),
        *scaffold("d", alone),
    ]
    tree = nodes.section("", *cells)
    app = SimpleNamespace(env=SimpleNamespace(docname="tutorials/a"))
    solutions.fold(app, tree)
    shown = [child for child in tree if not isinstance(child, nodes.comment)]
    assert shown[0] is own
    assert shown[2:4] == [panel, words]
    assert shown[5:] == [alone]
    group, single = shown[1], shown[4]
    assert [part.astext() for part in group] == [
        *("3 cells of scaffold", "# Scaffold: a", "# Scaffold: b"),
        *("printed", "# Scaffold: c"),
    ]
    assert [part.astext() for part in single] == ["d", "# Scaffold: d"]


def test_a_drawing_is_shown_and_its_code_folded_under_it(page):
    picture = page.select_one('img[alt="a straight line, drawn"]')
    below = picture.find_next("details")
    title, details = folded(page, "drawing")
    assert details is below
    assert title == "Code of the drawing: a straight line"
    assert "plt.plot([1, 2])" in details.get_text()
    assert not details.select("img")
    assert page.select('img[alt="a straight line, drawn"]')
    assert printed(details) == []
    assert "drawing printed" in printed(page)


def test_a_solution_is_folded_with_all_that_it_made(page):
    title, details = folded(page, "solution")
    assert title == "Solution 1"
    assert printed(details) == ["solution printed"]
    assert len(details.select("img")) == 2  # light and dark
    assert not page.select('img[alt="the solution\'s picture"]')


def test_a_hint_is_folded_and_nothing_else(page):
    title, details = folded(page, "hint")
    assert title == "Hint 1"
    assert details.p.get_text() == "Begin with tl.sum,\nthen go on."
    rest = page.get_text()
    for shown in ("Exercise 1. Do it.", "Try it.", "stub printed"):
        assert shown in rest
    assert "stub printed" in printed(page)


def test_the_notebook_hides_the_code_of_these_cells_only(project):
    notebook = project.root / "docs/_build/downloads/en/01-double.ipynb"
    cells = json.loads(notebook.read_text())["cells"]
    for key, hides in (
        ("jupyter", {"source_hidden": True}),
        (
            "cellView",
            "form",
        ),
    ):
        hidden = [
            "".join(cell["source"]).split("\n")[0]
            for cell in cells
            if cell["metadata"].get(key) == hides
        ]
        assert hidden == [
            "# @title Install what is missing, and say which GPU there is",
            "# @title The words `a` and `b`, as every page needs them",
            "# @title Code of the drawing: a straight line",
            "# @title Solution 1",
        ]
    prose = ["".join(c["source"]) for c in cells if c["cell_type"][0] == "m"]
    assert any("**Hint 1.** Begin with ``tl.sum``," in text for text in prose)


@pytest.mark.parametrize(
    ("first", "kind"),
    [
        ("# Solution 12", ("solution", "Solution 12")),
        (
            "\n# Solution 2: in one sweep.",
            ("solution", "Solution 2: in one sweep"),
        ),
        ("# Scaffold: x_hat", ("scaffold", "x_hat")),
        ("# Solution", None),
        ("# Scaffolding: the clock", None),
        ("# drawing: a line", None),
        ("x = 1  # Solution 1", None),
        ("x = 1\n# Solution 1", None),
    ],
)
def test_markers(first, kind):
    assert solutions.marked(first + "\nprint()") == kind
