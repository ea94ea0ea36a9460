"""``make record`` and live builds, with a stand-in for the GPU.

One project lives through all that may happen to ``make record``, a step a
fixture: a run costs seconds in imports alone.
"""

import os
import platform
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
from measurable import GPU, Measurable, wait_for

import tutorial
from measurements import (
    checks,
    gpus,
    measure,
    one_tutorial,
    part,
    record,
    recording,
    todo,
)
from measurements.reach import Script

NAMES = ("01-double", "02-double")
POINTS = {
    f"{plot}:{n}:{provider}"
    for plot in ("double", "triple")
    for n in (8, 16)
    for provider in ("triton", "torch", "copy")
}


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    return Measurable(tmp_path_factory.mktemp("measured") / "site", NAMES)


def recorded(project, name="01-double"):
    """The benchmarks of a recording that must be whole."""
    store = project.root / "docs/measurements"
    if not recording.path_of(GPU, name, store).exists():
        return {}
    return recording.read(GPU, name, store)["benchmarks"]


@pytest.fixture(scope="module")
def interrupted(project):
    """Two GPUs; Ctrl+C while page 01 is in its second benchmark."""
    sign = project.sign("wait", "01")
    sign.touch()
    child = project.start_record(gpus=2)
    try:
        wait_for(child, lambda: len(recorded(project, NAMES[1])) == 2)
        wait_for(
            child, lambda: any("triple" in p for p, *_ in project.points())
        )
        child.send_signal(signal.SIGINT)
        said = child.communicate()[0]
    finally:
        child.kill()
    return child.returncode, said


def test_an_interrupted_run_keeps_what_is_done(project, interrupted):
    status, said = interrupted
    assert status == 1
    assert list(recorded(project)) == ["double"]
    assert list(recorded(project, NAMES[1])) == ["double", "triple"]
    last = said.splitlines()[-1]
    assert "interrupted" in last and "make record goes on" in last
    assert "Traceback" not in said


def test_nothing_runs_on(project, interrupted):
    told = f"TOLD={project.told}".encode()
    left = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                left += [pid] * (told in file.read())
        except OSError:
            continue  # it has ended, or is another user's
    assert not left


def test_it_says_first_what_it_will_measure_and_why(interrupted):
    lines = interrupted[1].splitlines()
    assert lines[0] == "01-double: double, triple: not measured yet"
    assert lines[1] == "02-double: double, triple: not measured yet"
    assert all("2 GPU checks passed, 1 skipped" in li for li in lines[2:4])
    assert "4 benchmarks of 2 tutorials, on 2 GPUs" in lines[4]


def test_it_says_after_each_benchmark_how_far_it_is(interrupted):
    lines = [
        line for line in interrupted[1].splitlines() if "points in" in line
    ]
    assert len(lines) == 3
    assert lines[-1].startswith(("01-double: double: 6 points", "02-double: "))
    assert "; 18 of 24 points, " in lines[-1]
    assert lines[-1].endswith(" left")


def test_each_tutorial_has_a_gpu_of_its_own(project, interrupted):
    gpus = [
        {gpu for _, gpu, _ in project.points(name=n)} for n in ("01", "02")
    ]
    assert sorted(gpus, key=str) == [{"0"}, {"1"}]


@pytest.mark.parametrize("there", ["nothing", "a folder of that name"])
def test_gpu_checks_need_no_sphinx(there):
    """What all tests import first does without what builds the site."""
    stand = "None" if there == "nothing" else "types.ModuleType('sphinx')"
    code = (
        "import runpy, sys, types\n"
        f"sys.modules['sphinx'] = {stand}\n"
        "runpy.run_path('conftest.py')"
    )
    here = Path(__file__).parent
    paths = os.pathsep.join([str(here), gpus.path()])
    env = os.environ | {"PYTHONPATH": paths}
    subprocess.run([sys.executable, "-c", code], cwd=here, env=env, check=True)


@pytest.mark.parametrize("asked", [False, True])
def test_a_process_sees_the_gpu_that_it_is_given(project, asked):
    """Though torch counts GPUs when what torch.compile needs is imported."""
    env = project.env(gpus=2) | ({} if asked else gpus.ASK_NO_CUDA)
    env["PYTHONPATH"] += os.pathsep + gpus.path()
    code = (
        "import torch; assert torch.cuda.is_available()\n"
        "from measurements import gpus; gpus.take('1')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, text=True, capture_output=True
    )
    assert (done.returncode != 0) == asked, done.stderr
    assert ("was given GPU 1 sees 2 GPUs" in done.stderr) == asked


def test_everything_is_compiled_once_before_anything_is_timed(
    project, interrupted
):
    compiled = [
        (name, point, float(when))
        for name in ("01", "02")
        for point, _, when in project.points("compiled", name)
    ]
    assert sorted((name, point) for name, point, _ in compiled) == sorted(
        (name, point) for name in ("01", "02") for point in POINTS
    )
    timed = project.points(name="01") + project.points(name="02")
    assert max(when for *_, when in compiled) < min(float(t[2]) for t in timed)


def test_what_is_timed_is_recorded(project, interrupted):
    benchmark = recorded(project)["double"]
    environment = benchmark["environment"]
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", environment.pop("date"))
    driver = environment.pop("driver")
    assert driver == "580.1.2" or Path("/proc/driver/nvidia").exists()
    assert environment == {
        "gpu": "NVIDIA Stand-in 100",
        "cuda": "13.0",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "checks_passed": 2,
    }
    assert benchmark["method"] == "By a stand-in for a clock."
    assert benchmark["args"] == {"M": 1}
    assert all(row["median"] != 1 for row in benchmark["rows"])


@pytest.fixture(scope="module")
def edited(project, interrupted):
    """The rest of page 01, whose code changes while it is measured."""
    before = recorded(project)
    project.forget()
    child = project.start_record("01")
    try:
        wait_for(
            child, lambda: any("triple" in p for p, *_ in project.points())
        )
        project.edit("x, y, 3, x.numel()", "x, y, 4, x.numel()")
        project.sign("wait", "01").unlink()
        said = child.communicate()[0]
    finally:
        child.kill()
    return child.returncode, said, before


def test_only_what_was_left_is_measured(project, edited):
    assert "01-double: triple: not measured yet" in edited[1]
    timed = {point for point, *_ in project.points()}
    assert timed == {point for point in POINTS if "triple" in point}


def test_what_passed_is_not_checked_again(edited):
    assert "01-double: 2 GPU checks passed before" in edited[1]


def test_a_script_edited_meanwhile_is_not_stamped(project, edited):
    status, said, before = edited
    assert status == 1
    assert recorded(project) == before
    assert (
        "tutorials/01-double.py was edited while triple was measured" in said
    )


@pytest.fixture(scope="module")
def failing(project, edited):
    """A page whose GPU check fails, and one that stops while measured."""
    before = [recorded(project, name) for name in NAMES]
    project.forget()
    project.sign("wrong", "02").touch()
    project.sign("fail", "01").touch()
    result = project.make_record("--all")
    project.sign("wrong", "02").unlink()
    project.sign("fail", "01").unlink()
    return *result, before


def test_a_failure_loses_nothing_else(project, failing):
    status, said, before = failing
    assert status == 1
    assert recorded(project, NAMES[1]) == before[1]
    assert not project.points(name="02")
    now = recorded(project)
    assert list(now) == ["double"]
    assert now["double"]["rows"] != before[0]["double"]["rows"]
    for part_of_it in (
        "a GPU check of tutorials/02-double.py failed, so it was not measured",
        "tutorials/01-double.py stopped: ValueError: no luck; "
        "not measured: triple",
    ):
        assert f"make record: {part_of_it}" in said


def test_a_folder_that_cannot_be_written_stops_with_a_sentence(
    project, failing, monkeypatch, capsys
):
    """Before anything is measured; or in the middle of a run."""
    store = project.root / "docs/measurements"
    benchmark = recorded(project)["double"]
    monkeypatch.setattr(tutorial, "TUTORIALS", project.root / "tutorials")
    monkeypatch.setattr(recording, "STORE", store)
    monkeypatch.setattr(gpus, "there", lambda: True)
    monkeypatch.setattr(
        recording, "environment", lambda _: benchmark["environment"]
    )
    monkeypatch.setattr(record, "without_gpus", lambda jobs: (jobs, []))
    monkeypatch.setattr(record, "checked", lambda jobs, again: (jobs, []))
    folder, kept = store / GPU, store / "kept"

    def measured(jobs, keep):
        """The folder takes nothing more."""
        folder.rename(kept)
        folder.symlink_to("/proc")
        given = {k: benchmark[k] for k in benchmark.keys() - {"digest"}}
        keep(jobs[0], "double", given)

    monkeypatch.setattr(record, "measure", measured)
    with pytest.raises(SystemExit, match=r"01-double\.json cannot be written"):
        record.main(["--all", "01"])
    capsys.readouterr()
    with pytest.raises(SystemExit, match=r"cannot be written.*nothing was"):
        record.main(["--all", "01"])
    assert not capsys.readouterr().out
    folder.unlink()
    kept.rename(folder)
    assert list(recorded(project)) == ["double"]
    assert list(recorded(project, NAMES[1])) == ["double", "triple"]


@pytest.fixture(scope="module")
def whole(project, failing):
    """At last nothing goes wrong; and once more, with nothing to do."""
    project.forget()
    first = project.make_record()
    points = project.points(), project.points(name="02")
    project.forget()
    return first, points, project.make_record(), project.points()


def test_the_next_run_measures_what_is_stale(project, whole):
    (status, said), (first, second), _, _ = whole
    assert status == 0, said
    assert {point.split(":")[0] for point, *_ in first} == {"triple"}
    assert not second
    assert [len(recorded(project, name)) for name in NAMES] == [2, 2]


def test_fresh_recordings_are_not_measured(whole):
    status, said = whole[2]
    assert status == 0
    assert said.strip() == (
        "make record: every recording is fresh (ALL=1 measures all)"
    )
    assert not whole[3]


def test_why_is_said(project, whole, monkeypatch):
    """Of a benchmark that is new, changed, of another machine or damaged."""
    store = project.root / "docs/measurements"
    monkeypatch.setattr(tutorial, "TUTORIALS", project.root / "tutorials")
    there = recorded(project)["double"]["environment"]
    monkeypatch.setattr(recording, "environment", lambda _: there)
    kept = todo.Kept(store)

    def why(**more):
        jobs = todo.jobs_for([project.script()], kept, **more)
        return jobs[0].why if jobs else {}

    assert why() == why(machine=there) == {}
    assert set(why(every=True).values()) == {"all are asked for"}
    other = there | {"torch": "9.9"}
    assert why(machine=other)["double"] == (
        f"torch was {there['torch']}, is 9.9"
    )
    text = project.script().read_text()
    project.edit("x, y, 2, x.numel()", "x, y, 5, x.numel()")
    assert why() == {"double": "its code has changed"}
    project.script().write_text(text)
    path = recording.path_of(GPU, "01-double", store)
    whole_file = path.read_text()
    path.write_text(whole_file[:300])
    assert "cannot be read" in why()["double"]
    path.write_text(whole_file)


def test_a_full_disk_leaves_the_old_recording(project, whole, monkeypatch):
    """A limit on the size of a file stands for the disk."""
    resource = pytest.importorskip("resource")
    store = project.root / "docs/measurements"
    monkeypatch.setattr(tutorial, "TUTORIALS", project.root / "tutorials")
    before = recorded(project)
    monkeypatch.setattr(
        recording, "environment", lambda _: before["double"]["environment"]
    )
    kept = todo.Kept(store)
    (job,) = todo.jobs_for([project.script()], kept, every=True)
    measured = {
        k: v
        for k, v in before["double"].items()
        if k not in ("code", "digest")
    }
    folder = store / GPU
    files = {path: path.read_bytes() for path in folder.iterdir()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, limits[1]))
    try:
        with pytest.raises(measure.RefusedError, match="cannot be written"):
            kept.keep(job, "double", measured)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert {path: path.read_bytes() for path in folder.iterdir()} == files
    assert kept.keep(job, "double", measured) is None
    assert "found 'knots'" in kept.keep(
        job, "double", measured | {"unit": "knots"}
    )


def test_a_tutorial_without_gpu_checks_is_not_measured(project, monkeypatch):
    monkeypatch.setattr(recording, "environment", lambda _: {})
    job = measure.Job("09-new", project.script(), {"new": "new"}, {})
    passed, (problem,) = checks.checked([job], again=False)
    assert not passed
    assert problem.startswith("tutorials/09-new.py has no checks in ")


@pytest.mark.parametrize("script", tutorial.scripts(), ids=lambda s: s.stem)
def test_what_is_run_to_measure_lacks_no_name(script):
    """Every global name that is used is bound there, or nowhere at all."""
    import builtins

    name = tutorial.name_of(script)
    text = script.read_text(encoding="utf-8")
    plots = list(recording.codes(name))
    whole = Script(text)
    kept = {node.lineno for node in part.of(text, plots).body}
    assert len(kept) < len(whole.body)
    used, bound = set(), set(vars(builtins))
    for node, names in zip(whole.body, whole.names, strict=True):
        if node.lineno in kept:
            used |= names.used
            bound |= names.bound
    assert used <= bound


def test_a_part_runs_what_it_is_asked_for(project):
    text = project.script().read_text()
    lines = text.splitlines()

    def kept(*plots):
        tree = part.of(text, plots)
        return "\n".join(lines[node.lineno - 1] for node in tree.body)

    assert "run(measure_double)" in kept("double")
    assert "run(measure_triple)" not in kept("double")
    assert "run(measure_triple)" in kept("double", "triple")
    assert "assert torch.equal" not in kept("double", "triple")


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    """A site built on a GPU, then once more."""
    project = Measurable(tmp_path_factory.mktemp("live") / "site")
    first = project.build_on(1)
    timed = project.points()
    project.forget()
    return project, first, timed, project.build_on(1)


def test_a_build_on_a_gpu_measures_and_shows_that(live):
    project, first, timed, _ = live
    assert first.returncode == 0, first.stdout[-3000:]
    assert {point for point, *_ in timed} == POINTS
    page = project.page()
    origins = re.findall(r'"passport[^>]*>.*?by this build,', page, re.S)
    assert len(origins) == 2
    assert "GPU checks: not run in this build." in page
    assert "NVIDIA Stand-in 100" in page
    store = project.root / "docs/_build/measurements"
    measured = recording.read(GPU, "01-double", store)["benchmarks"]
    medians = [
        row["median"]
        for row in measured["double"]["rows"]
        if row["provider"] == "triton"
    ]
    assert f"double: {medians}" in page
    assert not (project.root / "docs/measurements" / GPU).exists()


def test_its_numbers_can_be_downloaded(live):
    project, *_ = live
    source = project.root / "docs/_build/measurements" / GPU / "01-double.json"
    copies = list((project.root / "html/_downloads").glob("*/01-double.json"))
    assert [copy.read_bytes() for copy in copies] == [source.read_bytes()]


def test_what_is_fresh_is_not_measured_again(live):
    project, _, _, again = live
    assert again.returncode == 0, again.stdout[-3000:]
    assert not project.points()
    assert project.executed(again.stdout) == 0


def test_a_preview_never_measures(live):
    project, *_ = live
    done = project.build_on(1, "preview")
    assert done.returncode == 0, done.stdout[-3000:]
    assert not project.points()
    assert "No figure in this preview" in project.page()


def test_live_without_a_gpu_is_refused_in_a_sentence(live):
    project, *_ = live
    done = project.build_on(1, "live", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1
    assert (
        done.stdout.strip()
        .splitlines()[-1]
        .startswith(
            "FIGURES=live measures every figure, and torch finds no GPU here"
        )
    )
    assert "Traceback" not in done.stdout
    assert not project.points()


def test_a_live_build_that_fails_says_what_it_keeps(live, tmp_path):
    project, *_ = live
    shutil.rmtree(project.root / "docs/_build/measurements")
    project.sign("fail").touch()
    done = project.build_on(1)
    project.sign("fail").unlink()
    assert done.returncode == 1
    assert (
        "tutorials/01-double.py stopped: ValueError: no luck; "
        "not measured: triple" in done.stdout
    )
    assert done.stdout.strip().splitlines()[-1] == (
        "the next build measures what is left"
    )
    assert not project.began(done.stdout)
    store = project.root / "docs/_build/measurements"
    assert list(recording.read(GPU, "01-double", store)["benchmarks"]) == [
        "double"
    ]


def test_no_process_is_given_what_torch_compile_chose_in_another(
    monkeypatch, tmp_path
):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "of who runs the tests")
    (tmp_path / "ab").mkdir()
    for name in ("traced.py", "kernel.best_config"):
        (tmp_path / "ab" / name).touch()
    folders = set()
    for _ in range(2):
        with one_tutorial.choices_of_its_own(tmp_path):
            folder = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
            there = [path.name for path in folder.rglob("*.*")]
            assert there == ["traced.py"]
            (folder / "ab" / "kernel.best_config").touch()
        assert not folder.exists()
        folders.add(folder)
    assert len(folders) == 2


def test_a_choice_of_torch_compile_is_known_by_its_name(tmp_path):
    """What choices_of_its_own leaves out is what torch writes."""
    from torch._inductor.runtime.autotune_cache import AutotuneCache
    from torch._inductor.utils import fresh_cache

    with fresh_cache(dir=tmp_path):
        made = AutotuneCache.create({}, str(tmp_path / "ab" / "k.py"), "")
        made.save(triton.Config({"BLOCK": 8}), 1)
    (choice,) = (p for p in tmp_path.rglob("*") if p.is_file())
    assert choice.match("*.best_config")
