"""A benchmark that several GPUs share: where it is measured, and what its
recording and its page say of them. With a stand-in for the GPUs."""

import pytest
from measurable import GPU, HERE, Measurable
from project import ENVIRONMENT, rows

from measurements import benchmarks, gpus, links, recording, replay, todo
from page import figures

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
def measured(project):
    status, said = project.make_record(gpus=3)
    assert status == 0, said
    store = project.root / "docs/measurements"
    return recording.read(GPU, NAME, store)["benchmarks"]


def test_all_that_is_run_sees_all_gpus(project, measured):
    points = project.points()
    assert len(points) == 2 * 3 + 2 * 3
    assert {gpu for _, gpu, _ in points} == {"0,1,2"}
    assert not project.points("compiled")


def test_ranks_that_are_not_there_are_a_gap(measured):
    gaps = {
        r["ranks"]: r["median"] is None for r in measured["triple"]["rows"]
    }
    assert gaps == {2: False, 3: False, 8: True}


def test_what_they_are_is_recorded(measured):
    """Of those that are measured, not of all that are there."""
    both = ("double", 2, "NV99"), ("triple", 3, "NV99 and PHB")
    for name, count, link in both:
        environment = measured[name]["environment"]
        assert environment["gpus"] == count * ["NVIDIA Stand-in 100"]
        assert environment["link"] == link
        assert environment["nccl"].split()[0] == "2.99.1"
        assert environment["checks_passed"] == 2


@pytest.mark.parametrize("key", LINKED)
def test_a_recording_without_it_is_damaged(measured, key):
    benchmark = measured["double"]
    assert recording.benchmark_problem(benchmark, GPU) is None
    rest = benchmark["environment"] | {key: [] if key == "gpus" else ""}
    wrong = recording.sealed(benchmark | {"environment": rest})
    problem = recording.benchmark_problem(wrong, GPU)
    assert problem.startswith(f"environment, {key}: found nothing")


@pytest.mark.parametrize(("name", "ranks"), [("double", 2), ("triple", 3)])
def test_a_recording_of_too_few_is_damaged(measured, name, ranks):
    benchmark = measured[name]
    rest = benchmark["environment"] | {"gpus": ["NVIDIA Stand-in 100"]}
    problem = recording.benchmark_problem(
        benchmark | {"environment": rest}, GPU
    )
    assert "gpus" in problem and f"expected {ranks} of them" in problem


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
    assert links.link(count) == found


def test_no_table_of_links(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert links.link(2) == "unknown"


def test_settings_of_nccl_are_told(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    assert links.nccl().startswith("2.28.9 ")
    assert "NCCL_NVLS_ENABLE=0" in links.nccl()
    assert "DEBUG" not in links.nccl()


def test_the_passport_shows_it():
    said = {}
    for linked in {}, LINKED:
        found = replay.Measured(
            *("double", GPU, ENVIRONMENT | {"gpu": "A"} | linked, "µs"),
            *({"ranks": 2}, ["N"], {"triton": "Triton"}, "By hand.", rows()),
            code="",
            live=True,
        )
        said[bool(linked)] = figures.passport(NAME, found)
    assert ":GPUs: A, A; linked by NV99; NCCL 2.99.1\n" in said[True]
    assert ":GPUs:" not in said[False]
    assert "ranks \\= 2" in said[True]


def test_a_live_page_needs_enough_gpus(project, monkeypatch):
    script = project.script()
    assert benchmarks.gpus(script) == 2
    for there, lacking in ([], 2), (["0"], 1), (["0", "1", "2"], 0):
        monkeypatch.setattr(gpus, "usable", lambda there=there: there)
        assert gpus.lacking(script) == lacking


def test_a_build_on_fewer_gpus_shows_what_was_recorded(project, measured):
    conf = project.root / "conf.py"
    conf.write_text(conf.read_text().replace("nvidia-h200", GPU))
    done = project.build_on(1)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "here is 1: it was left out; its page shows what" in done.stdout
    page = project.page()
    assert "Recorded 20" in page and "by this build," not in page


def test_the_others_are_not_left_out(monkeypatch):
    monkeypatch.setattr(gpus, "usable", lambda: ["0"])
    jobs = [todo.Job(str(n), None, {}, {}, gpus=n) for n in (1, 2, 1)]
    kept, (sentence,) = todo.without_gpus(jobs)
    assert kept == [jobs[0], jobs[2]]
    assert sentence.startswith("tutorials/2.py is measured on 2 GPUs")


@pytest.mark.parametrize("ranks", ['"2"', "N_RANKS()", "None"])
def test_ranks_that_are_no_number_are_refused(ranks, project, tmp_path):
    text = project.script().read_text().replace("ranks=2", f"ranks={ranks}")
    script = tmp_path / "01-double.py"
    script.write_text(text)
    with pytest.raises(benchmarks.UnclearError, match="show the ranks"):
        benchmarks.gpus(script)
