"""GPUs that are measured together: what a recording and a page say of them,
and where there are too few. With a stand-in for the GPUs."""

from dataclasses import replace

import pytest
from measurable import GPU, HERE, Measurable
from project import ENVIRONMENT, rows

from measurements import environment, gpus, replay
from page import passports

NAME = "01-double"
LINKED = {"gpus": ["A", "A"], "link": "NV99", "nccl": "2.99.1"}


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    project = Measurable(tmp_path_factory.mktemp("links") / "site")
    project.edit("def benchmark(name):", "def benchmark(name, x, xs, **args):")
    project.edit('x_names=["N"]', "x_names=[x]")
    project.edit("x_vals=[8, 16]", "x_vals=xs")
    project.edit('args={"M": 1}', "args=args")
    project.edit(
        '@benchmark("double")', '@benchmark("double", "N", [8, 16], ranks=2)'
    )
    project.edit("measure_double(M, N", "measure_double(ranks, N")
    # As many ranks as this machine has GPUs.
    project.edit(
        '@benchmark("triple")', '@benchmark("triple", "ranks", [2, 3, 8], N=8)'
    )
    project.edit("measure_triple(M, N", "measure_triple(ranks, N")
    project.edit(
        "return timed(triple, N, provider)",
        "if ranks > torch.cuda.device_count():\n"
        '        return 3 * [float("nan")]\n'
        "    return timed(triple, N, provider)",
    )
    return project


def test_one_gpu_is_not_enough(project):
    status, said = project.make_record(gpus=1)
    assert status == 1
    assert said.splitlines() == [
        "make record: tutorials/01-double.py is measured on 2 GPUs, and here "
        "is 1: it was left out",
        "make record: nothing was measured",
    ]
    assert not project.told.exists()


@pytest.fixture(scope="module")
def recorded(project):
    status, said = project.make_record(gpus=3)
    assert status == 0, said
    return project.recorded()["benchmarks"]


def test_what_they_share_is_not_compiled_in_advance(project, recorded):
    assert len(project.points()) == 2 * 3 + 2 * 3
    assert not project.points("compiled")


def test_what_they_are_is_recorded(recorded):
    """Of those that are measured, not of all that are there."""
    both = ("double", 2, "NV99"), ("triple", 3, "NV99 and PHB")
    for name, count, link in both:
        its = recorded[name]["environment"]
        assert its["gpus"] == count * ["NVIDIA Stand-in 100"]
        assert its["link"] == link
        assert its["nccl"].split()[0] == "2.99.1"
    # Ranks that are not there are a gap.
    assert {
        (row["ranks"], row["median"] is None)
        for row in recorded["triple"]["rows"]
    } == {(2, False), (3, False), (8, True)}


@pytest.mark.parametrize(
    ("visible", "count", "found"),
    [
        ("0,1", 2, "NV99"),
        ("1,0", 2, "NV99"),
        ("1,2", 2, "PHB"),
        ("0,1,2", 3, "NV99 and PHB"),
        ("", 2, "NV99"),
        ("GPU-4f2a", 1, "unknown"),
        ("0,7", 2, "unknown"),
    ],
)
def test_links_are_those_of_the_gpus_in_use(
    visible, count, found, monkeypatch
):
    monkeypatch.setenv("PATH", str(HERE / "stand_in"), prepend=":")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert environment.link(count) == found
    monkeypatch.setenv("PATH", "")  # without nvidia-smi
    assert environment.link(count) == "unknown"


def test_settings_of_nccl_are_told(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    assert environment.nccl().startswith("2.28.9 ")
    assert "NCCL_NVLS_ENABLE=0" in environment.nccl()
    assert "DEBUG" not in environment.nccl()


def measured(told, **more):
    return replay.Measured(
        name="double",
        gpu=GPU,
        environment=ENVIRONMENT | {"gpu": "A"} | told,
        unit="µs",
        x_names=["N"],
        names={"triton": "Triton"},
        method="By hand.",
        rows=rows(),
        **more,
    )


def test_the_passport_shows_it():
    args = {"ranks": 2}
    said = passports.passport(NAME, measured(LINKED, args=args, live=True), {})
    assert ":GPUs: A, A; linked by NV99; NCCL 2.99.1\n" in said
    assert "ranks \\= 2" in said
    said = passports.passport(NAME, measured({}, args=args, live=True), {})
    assert ":GPUs:" not in said


def test_what_an_earlier_passport_says_is_said_once():
    said = {}
    texts = [
        passports.passport(NAME, measured(told, args={"ranks": ranks}), said)
        for told, ranks in (
            ({}, 1),
            ({}, 2),
            ({"date": "2026-03-04"}, 1),
            ({}, 3),
        )
    ]
    first, second, other, third = texts
    assert ":name: passport-1\n" in first
    assert ":name: passport-2\n" in other
    for text in first, other:
        assert ":Versions: driver" in text
    for ranks, text in ((2, second), (3, third)):
        assert f"ranks \\= {ranks}" in text
        assert "as above. <#passport-1>`_" in text
        assert ":Versions:" not in text
        assert "checks passed" not in text
        assert ".. csv-table::" in text


def test_what_a_recording_says_is_no_markup():
    """It may come from someone else's machine."""
    link = "`x <javascript:f()>`_"
    told = dict.fromkeys(ENVIRONMENT, link) | LINKED | {"gpu": link}
    told |= {"date": "2026-01-02", "checks_passed": 7, "link": link}
    found = measured(told, args={"counter": link}, reason=link)
    other = replace(found, gpu="b")
    said = passports.with_passports(NAME, [found, other], {})
    assert said.count("javascript") > 20
    assert "`x <javascript" not in said.replace("\\`", "")


def test_a_live_page_needs_enough_gpus(project, monkeypatch):
    script = project.script()
    assert gpus.needed(script) == 2
    for there, lacking in (0, 1), (1, 1), (2, 0), (3, 0):
        monkeypatch.setattr(gpus, "count", lambda there=there: there)
        assert gpus.lacking(script) == lacking


@pytest.mark.parametrize(
    ("code", "count"),
    [
        ("f(ranks=4)", 4),
        ("f({'ranks': 3, 'M': 1})", 3),
        ("Benchmark(['ranks'], [2, 4, 8])", 2),
        ("f(ranks=ranks)\ng(ranks=2)", 2),
        ("ranks = 8", 1),
    ],
)
def test_how_many_a_page_needs(tmp_path, code, count):
    (tmp_path / "page.py").write_text(code)
    assert gpus.needed(tmp_path / "page.py") == count


def test_a_build_on_fewer_gpus_shows_what_was_recorded(project, recorded):
    conf = project.root / "conf.py"
    conf.write_text(conf.read_text().replace("nvidia-h200", GPU))
    done = project.build_on(1)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "here is 1: it was left out; its page shows what" in done.stdout
    page = project.page()
    assert "Recorded 20" in page and "by this build," not in page


def test_ranks_that_the_text_does_not_show_are_refused(project):
    text = project.script().read_text()
    project.edit("ranks=2)", "**TOGETHER)")
    project.edit('"ranks", [2, 3, 8]', 'str("ranks"), [2, 3, 8]')
    project.edit(
        "def benchmark(", 'TOGETHER = {"r" + "anks": 2}\n\n\ndef benchmark('
    )
    status, said = project.make_record(gpus=3)
    project.script().write_text(text)
    assert status == 1
    assert "double has 2 ranks, which the text of the script does not" in said
