"""The build of the site, tried on a small copy of the project."""

import json
import re
import shutil
import xml.etree.ElementTree as ET

import pytest
from project import ROOT, Project

MEND = "on a GPU run: make record TUTORIALS=01"


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A project built once, with two tutorials and two GPUs for the first."""
    project = Project(tmp_path_factory.mktemp("site"), NAMES)
    project.record("01-double", "nvidia-a100", scale=0.5)
    project.output = project.build().stdout
    return project


NAMES = ("01-double", "02-double")


def test_it_builds_without_a_warning(built):
    assert "build succeeded." in built.output, built.output[-3000:]


def test_every_tutorial_ran_and_none_was_skipped(built):
    suite = ET.parse(built.root / "test-results/gallery.xml").getroot()
    suite = suite if suite.tag == "testsuite" else suite.find("testsuite")
    assert int(suite.get("tests")) == len(NAMES)
    for name in ("failures", "errors", "skipped"):
        assert int(suite.get(name) or 0) == 0


def test_the_real_site_ran_every_tutorial():
    """The junit report of the build that `make test` has just made."""
    report = ROOT / "docs/_build/test-results/gallery.xml"
    if not report.exists():
        pytest.fail("build the site first: make html")
    suite = ET.parse(report).getroot()
    suite = suite if suite.tag == "testsuite" else suite.find("testsuite")
    scripts = list((ROOT / "tutorials").glob("[0-9][0-9]-*.py"))
    assert int(suite.get("tests")) == len(scripts)
    for name in ("failures", "errors", "skipped"):
        assert int(suite.get(name) or 0) == 0


def test_the_figure_is_drawn_from_the_recording(built):
    page = built.page("02-double")
    assert "rows: [1000.25, 2000.5]" in page
    assert "Triton from 1,000 to 2,000" in page  # the alt text


def test_the_figure_has_its_passport(built):
    page = built.page("02-double")
    for part in (
        "Recorded.",
        "NVIDIA-H200",
        "driver 1.2.3",
        "CUDA 13.0",
        "torch 2.0.0",
        "triton 3.0.0",
        "2026-01-02",
        "Invented for a test.",
        "7 GPU checks passed",
    ):
        assert part in page, part


def test_the_raw_numbers_can_be_downloaded(built):
    page = built.page("02-double")
    files = {
        ending: built.root / "html/tutorials" / href
        for href, ending in re.findall(r'href="([^"]+\.(csv|json))"', page)
    }
    assert (
        files["json"].read_bytes() == built.recording("02-double").read_bytes()
    )
    lines = files["csv"].read_text().splitlines()
    assert lines[0] == "N,provider,median,low,high,unit"
    assert lines[1] == "8,triton,1000.25,999.25,1001.25,GB/s"


def test_two_gpus_are_two_tabs(built):
    first, second = built.page("01-double"), built.page("02-double")
    tabs = re.findall(r'data-sync-id="([^"]+)"', first)
    assert tabs == ["nvidia-h200", "nvidia-a100"]
    assert "rows: [1000.25, 2000.5]" in first  # the default's, not the other's
    assert "data-sync-id" not in second


def test_the_front_page_computes_its_headline(built):
    page = (built.root / "html/index.html").read_text()
    assert "1.33 × the speed of PyTorch" in page
    assert "50 % of the speed of a plain copy" in page


def test_nothing_changed_nothing_runs(built, tmp_path):
    again = built.build()
    assert again.returncode == 0, again.stdout[-2000:]
    assert built.executed(again.stdout) == 0, again.stdout[-2000:]


def copy(built, folder):
    """A project that is already built, to change something in it."""
    target = folder / "site"
    shutil.copytree(built.root, target)
    project = object.__new__(Project)
    project.root = target
    return project


def test_changed_prose_runs_that_tutorial_only(built, tmp_path):
    project = copy(built, tmp_path)
    project.edit("What it says.", "What the table says.")
    done = project.build()
    assert done.returncode == 0, done.stdout[-3000:]
    assert project.executed(done.stdout) == 1
    assert "What the table says." in project.page()


def test_a_new_recording_runs_that_tutorial_only(built, tmp_path):
    project = copy(built, tmp_path)
    project.record("02-double", scale=2)
    done = project.build()
    assert project.executed(done.stdout) == 1, done.stdout[-3000:]
    assert "rows: [2000.5, 4001.0]" in project.page("02-double")


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


def test_changed_code_stops_the_build(project):
    project.edit("2 * tl.load", "tl.load(x_ptr + cols) + tl.load")
    output = stops(project, "tutorials/01-double.py", "stale", MEND)
    assert project.executed(output) == 0  # before anything ran


def test_a_missing_recording_stops_the_build(project):
    project.recording().unlink()
    stops(project, "tutorials/01-double.py", "missing", MEND)


def test_a_damaged_recording_stops_the_build(project):
    path = project.recording()
    path.write_text(path.read_text()[:300])
    stops(project, "tutorials/01-double.py", "cannot be read", MEND)


def test_an_unknown_unit_stops_the_build(project):
    path = project.recording()
    path.write_text(path.read_text().replace("GB/s", "furlongs"))
    stops(project, "tutorials/01-double.py", "unknown unit 'furlongs'", MEND)


def test_a_missing_measurement_stops_the_build(project):
    path = project.recording()
    data = json.loads(path.read_text())
    del data["benchmarks"]["double"]["rows"][-1]
    path.write_text(json.dumps(data))
    stops(project, "tutorials/01-double.py", "(16, 'copy')", MEND)


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


def test_a_tutorial_that_raises_is_named(project):
    project.edit("assert torch.equal(y, 2 * x)", "assert torch.equal(y, x)")
    project.record()
    stops(project, "tutorials/01-double.py failed")


def test_an_unnamed_drawing_is_named(project):
    project.edit(
        "# What it says.",
        "# What it says.\n\nimport matplotlib.pyplot as plt\n\n"
        "plt.plot([1, 2])\n",
    )
    project.record()
    stops(project, "tutorials/01-double.py", "figure without a description")


def test_a_timing_without_passport_stops_the_build(project):
    project.edit(
        "# What it says.",
        "# What it says.\n\nimport matplotlib.pyplot as plt\n\n"
        "try:\n    triton.testing.do_bench(lambda: None)\n"
        "except Exception:\n    plt.figure('a figure with no passport')\n",
    )
    project.record()
    stops(project, "tutorials/01-double.py: a figure without a passport")


def test_an_unknown_mode_is_refused(project):
    done = project.build("sometimes")
    assert done.returncode != 0
    assert "FIGURES=sometimes" in done.stdout
