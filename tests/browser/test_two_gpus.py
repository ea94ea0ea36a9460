"""Pages that were recorded on two GPUs: in a small site, in a browser.

The second GPU is invented, as all numbers here are.
"""

import pytest
from browser import built
from browser.conftest import PATIENCE
from bs4 import BeautifulSoup
from playwright.sync_api import expect
from project import Project

# Both GPUs have the first two, and each has one that the other lacks.
NAMES = ("01-double", "02-double", "03-double", "04-double")
H200, A100 = "nvidia-h200", "nvidia-a100"


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    project = Project(tmp_path_factory.mktemp("gpus"), NAMES)
    for name in NAMES[:2]:
        project.record(name, A100, scale=0.5)
    project.recording(NAMES[3]).unlink()
    project.record(NAMES[3], A100, scale=0.25)
    conf = project.root / "conf.py"
    page = 'compared_page = "layer-norm/01-layer-norm"'
    assert page in conf.read_text()
    conf.write_text(
        conf.read_text().replace(page, 'compared_page = "01-double"')
    )
    done = project.build()
    assert done.returncode == 0, done.stdout[-3000:]
    return project


@pytest.fixture(scope="module")
def address(project):
    with built.served(project.root / "html") as address:
        yield address


@pytest.fixture
def reader(browser, address):
    context = browser.new_context(base_url=address)
    page = context.new_page()
    page.set_default_timeout(PATIENCE)
    yield page
    context.close()


def tutorial(name):
    return f"tutorials/{name}.html"


def shown(page):
    """What is to be read of the figures of a page."""
    return page.locator(".measured .passport:visible")


def test_a_choice_changes_all_figures_and_is_remembered(reader):
    reader.goto(tutorial(NAMES[0]))
    expect(shown(reader)).to_contain_text("NVIDIA-H200")
    expect(reader.locator(".measured img:visible")).to_have_count(1)
    reader.get_by_text("NVIDIA-A100", exact=True).click()
    expect(shown(reader)).to_contain_text("float16, NVIDIA-A100.")
    expect(reader.locator(".measured .bp-note:visible")).to_have_text(
        "What the cells of this page print is of NVIDIA-H200."
    )
    expect(reader.locator(".measured img:visible")).to_have_attribute(
        "alt", r"Line plot of GB/s against N from 8 to 16 (Forward pass, "
        "M = 4096, float16): Triton from 500 to 1,000; PyTorch from 375 to "
        "750; Copy from 1,000 to 2,000. The table below has every number.",
    )  # fmt: skip
    reader.goto(tutorial(NAMES[1]))
    expect(shown(reader)).to_contain_text("NVIDIA-A100")
    reader.reload()
    expect(shown(reader)).to_contain_text("NVIDIA-A100")


def test_a_page_that_lacks_the_chosen_gpu_shows_its_own(reader):
    reader.goto(tutorial(NAMES[0]))
    reader.get_by_text("NVIDIA-A100", exact=True).click()
    reader.goto(tutorial(NAMES[2]))
    expect(reader.locator(".sd-tab-label")).to_have_count(0)
    expect(shown(reader)).to_contain_text("float16, NVIDIA-H200.")


def test_by_keyboard(reader):
    reader.goto(tutorial(NAMES[0]))
    reader.locator(".measured .sd-tab-set > input").first.focus()
    reader.keyboard.press("ArrowRight")
    expect(shown(reader)).to_contain_text("float16, NVIDIA-A100.")


def read(project, page):
    text = (project.root / "html" / f"{page}.html").read_text()
    return BeautifulSoup(text, "html.parser")


def said(tag):
    return " ".join(tag.get_text(" ").split())


def test_without_the_default_gpu_a_page_shows_what_there_is(project):
    page = read(project, f"tutorials/{NAMES[3]}")
    assert "float16, NVIDIA-A100." in said(page.select_one(".passport"))
    assert "H200" not in said(page.select_one("article"))
    step = read(project, "index").select(".bp-step")[3]
    assert "float16, NVIDIA-A100, 2026-01-02" in said(step)


def test_the_figure_of_all_gpus(project):
    """Ours has the same share of each copy, for the second is scaled."""
    page = read(project, "how-figures-are-made")
    (figure,) = page.select(".measured")
    text = said(figure.select_one(".passport"))
    for part in (
        "M = 4096, float16 . Computed from the recordings of Double 01 .",
        "NVIDIA-H200 : driver 1.2.3, CUDA 13.0",
        "Python 3.12.0. Recorded 2026-01-02. 7 GPU checks passed",
        "N Forward, NVIDIA-H200 Forward, NVIDIA-A100 8 50 50 16 50 50",
    ):
        assert part.replace(" .", ".").replace(" :", ":") in (
            text.replace(" .", ".").replace(" :", ":")
        ), (part, text)
    light, dark = figure.select("img")
    assert light["alt"] == dark["alt"]
    assert "Line plot of % of copy against N from 8 to 16" in light["alt"]
    assert {"only-light", "only-dark"} == {
        name for each in (light, dark) for name in each["class"]
        if name.startswith("only")
    }  # fmt: skip
    links = [a["href"] for a in figure.select("a.download")]
    assert len(links) == 2
    for link in links:
        assert (project.root / "html" / link).exists()


def test_an_unknown_gpu_is_named(project):
    """What follows is the last build of this project."""
    conf = project.root / "conf.py"
    conf.write_text(conf.read_text().replace('"nvidia-h200"', '"nvidia-h20"'))
    done = project.build()
    assert done.returncode != 0
    assert (
        "conf.py: measured_gpu: found 'nvidia-h20', expected a folder of "
        "docs/measurements: nvidia-a100, nvidia-h200" in done.stdout
    )
