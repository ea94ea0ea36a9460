"""``make record`` and live builds, with a stand-in for the GPU.

One project lives through all that may happen to ``make record``, a step a
fixture: a run costs seconds in imports alone.
"""

import ast
import os
import platform
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import triton
from measurable import GPU, Measurable, wait_for

import tutorial
from measurements import (
    environment,
    gpu_checks,
    measure,
    record,
    recording,
    run_page,
    spread,
    stale,
)
from measurements.children import beside, children, path

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


def wait_for_triple(project, child, name="02"):
    """Until a page is in its second benchmark."""
    wait_for(
        child,
        lambda: any("triple" in p for p, _ in project.points(name=name)),
    )


@pytest.fixture(scope="module")
def interrupted(project):
    """Ctrl+C while page 02 is in its second benchmark."""
    project.sign("wait", "02").touch()
    child = project.start_record()
    try:
        wait_for_triple(project, child)
        child.send_signal(signal.SIGINT)
        said = child.communicate()[0]
    finally:
        child.kill()
    return child.returncode, said


def test_an_interrupted_run_keeps_the_pages_that_are_done(
    project, interrupted
):
    status, said = interrupted
    assert status == 1
    assert list(project.recorded()["benchmarks"]) == ["double", "triple"]
    assert project.recorded(NAMES[1]) is None
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


def test_it_says_what_it_will_measure_and_how_far_it_is(interrupted):
    lines = interrupted[1].splitlines()
    assert lines[:2] == [f"{name}: not measured yet" for name in NAMES]
    assert all("2 GPU checks passed, 1 skipped" in li for li in lines[2:4])
    assert "compiling 2 pages first, in " in lines[4]
    done = [line for line in lines if "points in" in line]
    assert len(done) == 3
    assert done[-1].startswith("02-double: double: 6 points in ")
    assert "; 18 of 24 points, " in done[-1]
    assert done[-1].endswith(" left")


def test_checks_of_pages_share_the_cores():
    cores = len(os.sched_getaffinity(0))
    page = measure.Page("a/01-b", Path("b.py"), "why", "code")

    def workers(pages):
        *_, count, _, _ = gpu_checks.command(page, pages)
        return int(count)

    assert workers(1) == cores
    assert workers(2) == max(1, cores // 2)
    assert workers(100) == max(1, cores // gpu_checks.AT_A_TIME)


def test_checks_of_pages_run_beside_each_other(monkeypatch):
    started = threading.Barrier(2, timeout=10)

    def run(page, pages, running):
        started.wait()  # for the other
        page.checks = 1

    monkeypatch.setattr(gpu_checks, "run", run)
    pages = [
        measure.Page(f"a/{i:02}-b", Path("b.py"), "why", "code")
        for i in (1, 2)
    ]
    assert gpu_checks.checked(pages) == (pages, [])


def test_everything_is_compiled_once_before_anything_is_timed(
    project, interrupted
):
    compiled = [
        (name, point, float(when))
        for name in ("01", "02")
        for point, when in project.points("compiled", name)
    ]
    assert sorted((name, point) for name, point, _ in compiled) == sorted(
        (name, point) for name in ("01", "02") for point in POINTS
    )
    timed = project.points(name="01") + project.points(name="02")
    assert max(when for *_, when in compiled) < min(float(t[1]) for t in timed)
    assert not Path(f"{project.told}.drawn").exists()  # nor do drawings run


def test_what_is_timed_is_recorded(project, interrupted):
    data = project.recorded()
    told = data["environment"]
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", told.pop("date"))
    driver = told.pop("driver")
    assert driver == "580.1.2" or Path("/proc/driver/nvidia").exists()
    assert told == {
        "gpu": "NVIDIA Stand-in 100",
        "cuda": "13.0",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "checks_passed": 2,
    }
    benchmark = data["benchmarks"]["double"]
    assert benchmark["method"] == "By a stand-in for a clock."
    assert benchmark["args"] == {"M": 1}
    assert all(row["median"] != 1 for row in benchmark["rows"])


@pytest.fixture(scope="module")
def edited(project, interrupted):
    """Page 02 once more, whose code changes while it is measured."""
    project.forget()
    child = project.start_record("02")
    try:
        wait_for_triple(project, child)
        project.edit("return 3 * x", "return 4 * x", NAMES[1])
        project.sign("wait", "02").unlink()
        said = child.communicate()[0]
    finally:
        child.kill()
    return child.returncode, said


def test_a_script_edited_meanwhile_is_not_stamped(project, edited):
    status, said = edited
    assert status == 1
    assert project.recorded(NAMES[1]) is None
    assert "tutorials/02-double.py was edited while it was measured" in said


# What two pages do at a time, and what is said of each. It fails, exits or
# dies in its second benchmark; or its checks fail, and it is not measured.
FAILURES = [
    {
        "fail-01": "tutorials/01-double.py stopped: ValueError: no luck; it ",
        "wrong-02": "the GPU checks of tutorials/02-double.py: found 1 that f",
    },
    {
        "exit-01": "tutorials/01-double.py stopped: it calls sys.exit, and w",
        "die-02": "tutorials/02-double.py stopped: it ended with 0 before it",
    },
]


@pytest.fixture(scope="module")
def failing(project, edited):
    """Both pages fail, and fail otherwise."""
    before, runs = project.recorded(), []
    for failures in FAILURES:
        project.forget()
        signs = [project.sign(*each.split("-")) for each in failures]
        for sign in signs:
            sign.touch()
        done = project.make_record("--all")
        for sign in signs:
            sign.unlink()
        timed = bool(project.points(name="02"))
        runs.append((*done, timed, project.recorded()))
    return before, runs


def test_a_failure_is_named_and_loses_nothing(project, failing):
    before, runs = failing
    for failures, run in zip(FAILURES, runs, strict=True):
        status, said, timed, recorded = run
        assert status == 1
        assert recorded == before
        assert timed == ("wrong-02" not in failures)
        for sentence in failures.values():
            assert f"make record: {sentence}" in said
    assert project.recorded(NAMES[1]) is None


@pytest.fixture(scope="module")
def whole(project, failing):
    """At last nothing goes wrong; and once more, with nothing to do."""
    project.forget()
    first = project.make_record()
    points = project.points(), project.points(name="02")
    project.forget()
    return first, points, project.make_record(), project.points()


def test_only_what_is_stale_is_measured(project, whole):
    (status, said), (first, second), (again, then), measured = whole
    assert status == again == 0, said
    assert not first
    assert {point for point, _ in second} == POINTS
    assert all(project.recorded(name) for name in NAMES)
    assert then.strip() == (
        "make record: every recording is fresh (ALL=1 measures all)"
    )
    assert not measured


@pytest.fixture(scope="module")
def disturbed(project, whole):
    """Points of one size lie far apart: once, and as often as they are
    measured."""
    before, runs = project.recorded(), []
    for times in "1", "99":
        project.forget()
        project.sign("disturb").write_text(times)
        done = project.make_record("--all", "01")
        runs.append((*done, project.points(), project.recorded()))
        project.sign("disturb").unlink()
    return before, runs


AGAIN = [f"triple:16:{each}" for each in ("triton", "torch", "copy")]
TOO_WIDE = (
    "triple, triton at N = 16: the spread, (high - low) / median, is 40%"
)


def test_a_size_whose_points_lie_far_apart_is_measured_again(disturbed):
    before, ((status, said, points, recorded), _) = disturbed
    assert status == 0, said
    assert f"01-double: {TOO_WIDE}; measured again" in said
    timed = [point for point, _ in points]
    assert timed[:12] == [*dict.fromkeys(timed)] and set(timed) == POINTS
    assert timed[12:] == AGAIN
    assert recorded != before
    rows = recorded["benchmarks"]["triple"]["rows"]
    assert not any(map(spread.wide, recorded["benchmarks"].values()))
    assert len(rows) == 6


def test_what_does_not_calm_down_is_refused(disturbed):
    _, ((*_, before), (status, said, points, recorded)) = disturbed
    assert status == 1
    assert (
        f"make record: tutorials/01-double.py stopped: {TOO_WIDE}, and 2 more,"
        " after 4 tries, and at most 15% is recorded; see what else runs on "
        "this machine; it is not recorded (see "
    ) in said
    assert [point for point, _ in points][12:] == 3 * AGAIN
    assert recorded == before


def row(N, provider, low, median, high):
    values = {"median": median, "low": low, "high": high}
    return {"N": N, "provider": provider} | values


def test_of_what_points_may_lie_apart():
    """Of what is no time or speed, and of old recordings, nothing is asked."""
    rows = [row(8, "a", 93, 100, 107), row(8, "b", 92, 100, 108)]
    rows += [row(16, "a", 93, 100, 107), row(16, "b", None, None, None)]
    timed = {"unit": "µs", "args": {}, "x_names": ["N"], "rows": rows}
    assert spread.wide(timed) == rows[1:2]
    assert spread.quiet(timed) == rows[2:]
    assert "b at N = 8: the spread, (high - low) / median, is 16%" in (
        spread.said("double", timed)
    )
    for other in {"unit": "relative error"}, {"args": {"counter": "dram"}}:
        assert not spread.wide(timed | other)


def test_measured_libraries_are_named_with_their_versions(monkeypatch):
    there = {"liger-kernel": "0.6", "nvidia-cudnn-frontend": "1.32"}

    def version(name):
        if name not in there:
            raise environment.PackageNotFoundError
        return there[name]

    monkeypatch.setattr(environment, "version", version)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    providers = ["triton", "liger", "cudnn", "quack", "copy"]
    rows = [row(8, provider, 1, 1, 1) for provider in providers]
    rows.append(row(8, "flash", None, None, None))
    assert environment.libraries([{"rows": rows}]) == {
        "liger": "liger-kernel 0.6",
        "cudnn": "nvidia-cudnn-frontend 1.32, cuDNN 9.10.2",
    }


@pytest.fixture
def kept(project, whole, monkeypatch):
    """The recordings of the project, in this process."""
    store = project.root / "docs/measurements"
    monkeypatch.setattr(tutorial, "TUTORIALS", project.root / "tutorials")
    monkeypatch.setattr(recording, "STORE", store)
    there = project.recorded()["environment"]
    monkeypatch.setattr(environment, "here", lambda _: dict(there))
    return stale.Kept(store)


def test_why_is_said(project, kept):
    """Of a page that is changed, of another machine or damaged."""

    def why(**more):
        pages = kept.pages([project.script()], **more)
        return pages[0].why if pages else None

    assert why() is why(same_machine=True) is None
    assert why(every=True) == "all are asked for"
    torch_there = kept.machine["torch"]
    kept.machine["torch"] = "9.9"
    assert why() is None
    assert why(same_machine=True) == f"torch was {torch_there}, is 9.9"
    text = project.script().read_text()
    project.edit("return 2 * x", "return 5 * x")
    assert why() == "its code has changed"
    project.script().write_text(text)
    file = recording.path_of(GPU, "01-double")
    whole_file = file.read_text()
    file.write_text(whole_file[:300])
    assert "cannot be read" in why()
    file.write_text(whole_file)


def test_a_folder_that_cannot_be_written_stops_with_a_sentence(
    project, kept, monkeypatch, capsys
):
    """Before anything is measured; or in the middle of a run."""
    data = project.recorded()
    monkeypatch.setattr(record.gpus, "there", lambda: True)
    monkeypatch.setattr(record, "with_enough_gpus", lambda pages: (pages, []))
    monkeypatch.setattr(record, "checked", lambda pages: (pages, []))
    folder, aside = kept.store / GPU, kept.store / "aside"

    def measured(pages, keep, calm):
        """The folder takes nothing more."""
        folder.rename(aside)
        folder.symlink_to("/proc")
        keep(pages[0], data["environment"], data["benchmarks"])

    monkeypatch.setattr(record, "measure", measured)
    with pytest.raises(SystemExit, match=r"01-double\.json cannot be written"):
        record.main(["--all", "01"])
    capsys.readouterr()
    with pytest.raises(SystemExit, match=r"cannot be written.*nothing was"):
        record.main(["--all", "01"])
    assert not capsys.readouterr().out
    folder.unlink()
    aside.rename(folder)
    assert project.recorded() == data


def test_a_full_disk_leaves_the_old_recording(project, kept):
    """A limit on the size of a file stands for the disk."""
    (page,) = kept.pages([project.script()], every=True)
    data = project.recorded()
    given = data["environment"], data["benchmarks"]
    folder = kept.store / GPU
    files = {path: path.read_bytes() for path in folder.iterdir()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, limits[1]))
    try:
        with pytest.raises(measure.RefusedError, match="cannot be written"):
            kept.keep(page, *given)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert {path: path.read_bytes() for path in folder.iterdir()} == files
    assert kept.keep(page, *given) is None
    given[1]["double"]["unit"] = "knots"
    assert "is not kept: benchmark double: unit" in kept.keep(page, *given)


def test_what_a_process_has_started_ends_with_it(tmp_path):
    """Under ncu, what measures is the child of a child."""
    with children() as running:
        shell = running.start(
            ["sh", "-c", "sleep 100 & echo $!; wait"],
            {},
            stdout=subprocess.PIPE,
        )
        pid = shell.stdout.readline().strip()
    for _ in range(50):
        state = Path("/proc", pid, "stat")
        if not state.exists() or state.read_text().split()[2] == "Z":
            return
        time.sleep(0.1)
    pytest.fail("it still runs")


def test_nobody_waits_for_what_runs_beside_a_failure():
    """As when Ctrl+C comes while all pages are compiled."""

    def work(item):
        if item:
            return running.start(["sleep", "100"], {}).wait()
        while not running.running:
            time.sleep(0.01)
        raise KeyboardInterrupt

    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt), children() as running:
        beside(running, work, [0, 1, 1], 2)
    assert time.monotonic() - start < 50


CHECKS = "sys.path.insert(0, '.'); runpy.run_path('conftest.py')"
RECORD = "from measurements import counters, record, run_page"


@pytest.mark.parametrize(
    ("code", "lacks"),
    [
        (CHECKS, {"sphinx": None}),
        (CHECKS, {"sphinx": "a folder of that name"}),
        (RECORD, dict.fromkeys(["sphinx", "joblib", "babel", "xdist"])),
    ],
)
def test_a_gpu_machine_needs_few_packages(code, lacks):
    """Those of the tutorials and pytest: nothing that builds the site."""
    code = (
        "import runpy, sys, types\n"
        f"for name, there in {lacks}.items():\n"
        "    sys.modules[name] = there and types.ModuleType(name)\n" + code
    )
    here = Path(__file__).parent
    env = os.environ | {"PYTHONPATH": path()}
    subprocess.run([sys.executable, "-c", code], cwd=here, env=env, check=True)


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
    assert page.count('<div class="passport ') == 2
    assert re.search(r'"passport[^>]*>.*?by this build,', page, re.S)
    assert "GPU checks: not run in this build." in page
    assert "NVIDIA Stand-in 100" in page
    store = project.root / "docs/_build/measurements"
    measured = project.recorded(store=store)["benchmarks"]
    medians = [
        row["median"]
        for row in measured["double"]["rows"]
        if row["provider"] == "triton"
    ]
    assert f"double: {medians}" in page
    assert not (project.root / "docs/measurements" / GPU).exists()
    copies = list((project.root / "html/_downloads").glob("*/01-double.json"))
    source = store / GPU / "01-double.json"
    assert [copy.read_bytes() for copy in copies] == [source.read_bytes()]


def test_what_is_fresh_is_not_measured_again(live):
    """And a preview never measures."""
    project, _, _, again = live
    assert again.returncode == 0, again.stdout[-3000:]
    assert project.executed(again.stdout) == 0
    done = project.build_on(1, "preview")
    assert done.returncode == 0, done.stdout[-3000:]
    assert not project.points()
    assert "No figure in this preview" in project.page()


def test_a_live_build_that_fails_says_so(live):
    project, *_ = live
    shutil.rmtree(project.root / "docs/_build/measurements")
    project.sign("fail").touch()
    done = project.build_on(1)
    project.sign("fail").unlink()
    assert done.returncode == 1
    assert (
        "tutorials/01-double.py stopped: ValueError: no luck; "
        "it is not recorded" in done.stdout
    )
    assert done.stdout.strip().splitlines()[-1] == (
        "the next build measures what is left"
    )
    assert not project.began(done.stdout)


def choose(cache):
    """Let torch note what is fastest, under a name of its own making."""
    from torch._inductor.runtime.autotune_cache import AutotuneCache
    from torch._inductor.utils import fresh_cache

    with fresh_cache(dir=cache):
        made = AutotuneCache.create({}, str(cache / "ab" / "k.py"), "")
        made.save(triton.Config({"BLOCK": 8}), 1)


def test_no_process_is_given_what_torch_compile_chose_in_another(
    monkeypatch, tmp_path
):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "of who runs the tests")
    choose(tmp_path)
    (choice,) = (file for file in tmp_path.rglob("*") if file.is_file())
    choice.with_name("traced.py").touch()
    folders = set()
    for _ in range(2):
        with run_page.choices_of_its_own(tmp_path):
            folder = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
            there = [path.name for path in folder.rglob("*.*")]
            assert there == ["traced.py"]
            (folder / choice.relative_to(tmp_path)).touch()
        assert not folder.exists()
        folders.add(folder)
    assert len(folders) == 2


def test_the_clock_of_a_page_is_not_read_in_advance(monkeypatch, capsys):
    """Each page has the same; what it would time is called once."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    script = (
        "calls = []\n"
        "def device_time(prepare):\n"
        "    raise AssertionError('it was read')\n"
        "def speed(prepare):\n"
        "    return device_time(prepare)\n"
        "times = speed(lambda: lambda: calls.append('called'))\n"
    )
    space = {}
    compiling = run_page.Compiling(print, "01", (0, 1))
    compiling.execute(ast.parse(script), "01.py", space)
    assert space["times"] == [1.0] * 3
    assert space["calls"] == ["called"]
    measuring, space = run_page.Measuring(print, "01"), {}
    with pytest.raises(AssertionError, match="it was read"):
        measuring.execute(ast.parse(script), "01.py", space)
    assert measuring.seconds > 0


def test_the_clock_of_the_host_is_not_read_in_advance():
    script = (
        "calls = []\n"
        "def time_of_batch(call):\n"
        "    raise AssertionError('it was read')\n"
        "taken = time_of_batch(lambda: calls.append('called'))\n"
        "def in_rounds(batches):\n"
        "    raise AssertionError('it was read')\n"
        "rounds = in_rounds([lambda: [2.0, 3.0], lambda: [4.0]])\n"
    )
    space = {}
    compiling = run_page.Compiling(print, "01", (0, 1))
    compiling.execute(ast.parse(script), "01.py", space)
    assert space["taken"] == 1.0 and space["calls"] == ["called"]
    assert space["rounds"] == 3 * [(1.0, 1.0, 1.0)]
    with pytest.raises(AssertionError, match="it was read"):
        measuring = run_page.Measuring(print, "01")
        measuring.execute(ast.parse(script), "01.py", {})
