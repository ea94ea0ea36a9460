"""The build of the site, tried on a small copy of the project."""

import json
import re

import pytest
from bs4 import BeautifulSoup
from project import ENVIRONMENT, Project, rows

from measurements import recording

MEND = "on a GPU run: make record TUTORIALS=01"
NAMES = ("01-double", "02-double", "03-double")
SAYS = "# What it says.\n"


FIGURE = """

import matplotlib.pyplot as plt

if table is not None:
    plt.figure(num={name!r})
    plt.{drawn}
"""


NUMBERS = "table.set_index('N').to_numpy()"
DRAWN = {  # by a tutorial: its name, how, and passports on the page
    "04-double": ("a map", f"imshow({NUMBERS})", 2),
    "05-double": ("double", "imshow([[1.0, 2.0]])", 1),  # a name proves none
    "06-double": ("double", f"imshow({NUMBERS} + 1)", 1),
    "07-double": ("bars", f"barh(range(6), {NUMBERS}.ravel())", 2),
    "08-double": ("bars", f"barh(range(6), {NUMBERS}.ravel() + 1)", 1),
    "09-double": ("later", f"barh(range(6), {NUMBERS}.ravel(), left=1/3)", 2),
}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A project built once, with two GPUs for the first tutorial."""
    project = Project(tmp_path_factory.mktemp("site"), [*NAMES, *DRAWN])
    project.record("01-double", "nvidia-a100", scale=0.5)
    count(project, NAMES[2])
    for name, (label, drawn, _) in DRAWN.items():
        figure = FIGURE.format(name=label, drawn=drawn)
        project.change(SAYS, SAYS + figure, name)
    project.output = project.build().stdout
    return project


def count(project, name):
    """Let ncu count for a benchmark, which it can on the second GPU only."""
    script = project.script(name)
    text = script.read_text().replace("GB/s", "% of warps")
    script.write_text(
        text.replace('"M": 4096', '"counter": "hits", "M": 4096')
    )
    args = {"M": 4096, "dtype": "float16", "mode": "forward"}
    changes = {"unit": "% of warps", "args": {"counter": "hits", **args}}
    empty = dict.fromkeys(recording.VALUES)
    rest = [
        row if row["provider"] == "copy" else row | empty for row in rows(0.02)
    ]
    for gpu, more in {
        "nvidia-h200": {"reason": "ncu_ has *no* luck", "rows": rest},
        "nvidia-a100": {},
    }.items():
        its = {"gpu": gpu.upper(), "ncu": "2025.3"}
        project.record(
            *(name, gpu, 0.02),
            environment=ENVIRONMENT | its,
            **changes,
            **more,
        )


def test_it_builds_without_a_warning(built):
    assert "build succeeded." in built.output, built.output[-3000:]
    assert " INFO " not in built.output  # of a library that the build uses


def test_the_figure_is_drawn_from_the_recording(built):
    page = built.page("02-double")
    assert "rows: [1000.25, 2000.5]" in page
    assert "Triton from 1,000 to 2,000" in page  # the alt text


def test_the_figure_has_its_passport(built):
    page = built.page("02-double")
    for part in (
        "Recorded 2026-01-02.",
        "driver 1.2.3",
        "CUDA 13.0",
        "torch 2.0.0",
        "triton 3.0.0",
        "Invented for a test.",
        "7 GPU checks passed",
        "<strong>Forward pass, M = 4096, float16, NVIDIA-H200.</strong>",
    ):
        assert part in page, part


def test_without_a_repository_nothing_leads_to_one(built):
    for page in (built.root / "html").rglob("*.html"):
        text = page.read_text()
        assert "bp-feedback" not in text
        assert "github.com/edit" not in text


def test_two_gpus_are_two_tabs(built):
    first, second = built.page("01-double"), built.page("02-double")
    tabs = re.findall(r'data-sync-id="([^"]+)"', first)
    assert tabs == ["nvidia-h200", "nvidia-a100"]
    assert "rows: [1000.25, 2000.5]" in first  # the default's, not the other's
    assert "data-sync-id" not in second
    # Of the page that conf.py names, nothing was recorded on two.
    page = (built.root / "html/how-figures-are-made.html").read_text()
    assert 'class="measured' not in page


def test_where_ncu_could_not_count_the_page_says_so(built):
    page = built.page("03-double")
    without, with_it = page.split('data-sync-id="nvidia-a100"')
    assert "rows: [nan, nan]" in page
    assert without.count("ncu_ has *no* luck") == 2  # and in the passport
    assert "On NVIDIA-H200 this figure could not be drawn" in without
    assert "Line plot" not in without
    assert "ncu_ has" not in with_it
    assert "Line plot of % of warps" in with_it
    for part in without, with_it:
        assert "Nsight Compute 2025.3" in part
        assert re.search(r"Counted.*?<p>hits</p>", part, re.DOTALL)
    assert "Nsight Compute" not in built.page("02-double")


def test_the_front_page_computes_its_headline(built):
    """The median over both sizes of what compares with PyTorch."""
    page = (built.root / "html/index.html").read_text()
    steps = BeautifulSoup(page, "html.parser").select(".bp-step")
    said = [" ".join(step.get_text(" ").split()) for step in steps]
    for text in said[:2]:
        assert "Forward 1.33 × PyTorch" in text
        assert (
            "median of 2 widths, M = 4096, float16, NVIDIA-H200, 2026-01-02"
        ) in text
    assert "PyTorch" not in said[2]  # it has no speed


@pytest.fixture
def project(tmp_path):
    return Project(tmp_path)


def stops(project, *parts):
    """The build fails, and one line of it holds all the parts."""
    done = project.build()
    assert done.returncode != 0
    lines = done.stdout.splitlines()
    assert any(all(part in line for part in parts) for line in lines), (
        done.stdout[-3000:]
    )
    return done.stdout


def test_recordings_that_do_not_fit_stop_the_build(tmp_path):
    """All are named, before any tutorial runs."""
    project = Project(tmp_path, [f"{n:02}-double" for n in range(1, 5)])
    project.edit("2 * tl.load", "tl.load(x_ptr + cols) + tl.load")
    project.recording("02-double").unlink()
    damaged, edited = map(project.recording, ("03-double", "04-double"))
    damaged.write_text(damaged.read_text()[:300])
    edited.write_text(edited.read_text().replace("1000.25", "1000.5"))
    output = stops(project, "tutorials/01-double.py", "stale", MEND)
    assert not project.began(output)
    lines = output.splitlines()
    for number, problem in enumerate(("missing", "cannot be read", "digest")):
        name = f"{number + 2:02}"
        parts = f"tutorials/{name}-double.py", problem, f"TUTORIALS={name}"
        assert any(all(part in line for part in parts) for line in lines)


def without_copy(project, name):
    """Its providers are not in the text, so the hash knows nothing."""
    path = project.recording(name)
    data = json.loads(path.read_text())
    benchmark = data["benchmarks"]["double"]
    benchmark["rows"] = [
        row for row in benchmark["rows"] if row["provider"] != "copy"
    ]
    path.write_text(json.dumps(recording.sealed(data)))


DRAWS = "\nimport matplotlib.pyplot as plt\n\nplt.plot([1, 2])\n"
# What a tutorial does that stops the build, and what is said of it.
FAULTS = {
    "01": (without_copy, ["providers", "'copy'", MEND]),
    "02": (  # what the docstring says is part of the passport
        lambda project, name: project.edit(
            "Invented for a test.", "Timed with care.", name
        ),
        [
            "benchmark double: method: found ",
            "'Invented for a test.', expected 'Timed with care.'",
        ],
    ),
    "03": (
        lambda project, name: project.change(
            SAYS, "# Again.\n\nmeasure.run()\n", name
        ),
        ["the benchmark double runs twice"],
    ),
    "04": (
        lambda project, name: project.change(
            "assert torch.equal(y, 2 * x)", "assert torch.equal(y, x)", name
        ),
        [" failed"],
    ),
    "05": (
        lambda project, name: project.change(SAYS, SAYS + DRAWS, name),
        ["figure without a description"],
    ),
}


def test_each_fault_of_a_tutorial_stops_the_build_and_is_named(tmp_path):
    """All in one build: what fails in a cell stops no other tutorial."""
    project = Project(tmp_path, [f"{number}-double" for number in FAULTS])
    for number, (make, _) in FAULTS.items():
        make(project, f"{number}-double")
    done = project.build()
    assert done.returncode != 0
    lines = done.stdout.splitlines()
    for number, (_, parts) in FAULTS.items():
        parts = [f"tutorials/{number}-double.py", *parts]
        assert any(all(part in line for part in parts) for line in lines), (
            parts,
            done.stdout[-6000:],
        )


def test_a_figure_has_a_passport_if_it_shows_the_numbers(built):
    for tutorial, (name, _, count) in DRAWN.items():
        page = built.page(tutorial)
        assert page.count('<div class="passport ') == count
        assert page.count("GPU checks passed") == 1
        assert (f'alt="{name}"' in page) == (count == 1)


def test_a_measured_figure_that_was_changed_stops_the_build(project):
    """What counts as a change is in test_replay.py."""
    project.change(
        "except NoGPU:\n    table",
        "    import matplotlib.pyplot as plt\n\n"
        "    plt.gca().get_lines()[0].set_ydata([9000, 9999])\n"
        "except NoGPU:\n    table",
    )
    at = "tutorials/01-double.py: the figure of the benchmark double: found "
    stops(project, at, "expected what the benchmark drew")


def test_numbers_of_no_benchmark_stop_the_build(project):
    """Here its name is no longer in the text, so the hash knows nothing."""
    path = project.recording()
    data = json.loads(path.read_text())
    data["benchmarks"]["triple"] = data["benchmarks"]["double"]
    path.write_text(json.dumps(recording.sealed(data)))
    stops(
        *(project, "01-double.py", "does not fit", "benchmark triple", MEND),
        "found its numbers, expected none, for it did not run",
    )


def test_a_preview_marks_what_is_stale(project):
    project.edit("2 * tl.load", "tl.load(x_ptr + cols) + tl.load")
    done = project.build("preview")
    assert done.returncode == 0, done.stdout[-3000:]
    page = project.page()
    assert "No figure in this preview" in page
    assert "stale" in page
    assert "make record TUTORIALS=01" in page
    assert "Timing needs a GPU" in page
    assert 'class="measured' not in page


def test_a_timing_without_passport_stops_the_build(project):
    project.change(
        "# What it says.",
        "# What it says.\n\nimport matplotlib.pyplot as plt\n\n"
        "try:\n    triton.testing.do_bench(lambda: None)\n"
        "except Exception:\n    plt.figure('a figure with no passport')\n",
    )
    stops(project, "tutorials/01-double.py: a figure without a passport")
