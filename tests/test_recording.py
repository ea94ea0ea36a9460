"""The recordings: their format, and what is wrong with one."""

import json
import math
import os
import re
import subprocess
import sys

import pytest
import torch
from project import ENVIRONMENT, ROOT, rows

import tutorial
from measurements import recording, replay
from measurements.measure import RefusedError
from measurements.stale import pick

GPU, NAME = "nvidia-h200", "01-double"
SCRIPT = "SCALE = 2.0\n# A comment.\n"


@pytest.fixture
def store(tmp_path, monkeypatch):
    """Tutorials and recordings in a folder of their own."""
    monkeypatch.setattr(tutorial, "TUTORIALS", tmp_path / "tutorials")
    monkeypatch.setattr(recording, "STORE", tmp_path / "measurements")
    (tmp_path / "tutorials").mkdir()
    (tmp_path / "tutorials" / "index.rst").touch()
    script = tmp_path / "tutorials" / f"{NAME}.py"
    script.write_text(SCRIPT)
    return script


def data(name=NAME, **changes):
    benchmark = {
        "unit": "GB/s",
        "args": {},
        "method": "by hand",
        "x_names": ["N"],
        "rows": rows(),
    } | changes
    return recording.sealed(
        {
            "code": recording.code_of(name),
            "environment": ENVIRONMENT | {"gpu": "NVIDIA H200"},
            "benchmarks": {"double": benchmark},
        }
    )


def test_what_is_saved_is_loaded(store):
    saved = data()
    path = recording.save(saved, GPU, NAME)
    assert recording.load(GPU, NAME) == saved
    assert path.read_text().endswith("}\n")
    # one line a row, so that a change to one number is a change to one line
    assert path.read_text().count('"provider"') == sum(
        '"provider"' in line for line in path.read_text().splitlines()
    )


def refused(match):
    """One sentence, with the file and what to do."""
    parts = (
        *(f"tutorials/{NAME}.py: the recording {GPU}/{NAME}.json {match}",),
        *("on a GPU run: make record TUTORIALS=01",),
    )
    with pytest.raises(recording.RecordingError) as error:
        recording.load(GPU, NAME)
    line = str(error.value)
    assert "\n" not in line
    assert all(part in line for part in parts), line
    return line


def test_code_makes_it_stale_and_prose_does_not(store):
    recording.save(data(), GPU, NAME)
    store.write_text(SCRIPT.replace("# A comment", "# %%\n# Prose"))
    assert recording.load(GPU, NAME)
    store.write_text(SCRIPT.replace("SCALE = 2.0", "SCALE = 3.0"))
    line = refused("is stale")
    assert f"found {recording.read(GPU, NAME)['code']}" in line
    assert f"expected {recording.code_of(NAME)}" in line


@pytest.mark.parametrize("text", ["x = (\n", 'x = """\n'])
def test_a_script_that_cannot_be_read_is_named(store, text):
    store.write_text(text)
    with pytest.raises(recording.RecordingError) as error:
        recording.code_of(NAME)
    assert str(error.value).startswith("tutorials/01-double.py: ")


@pytest.mark.parametrize(
    ("edit", "what"),
    [
        (lambda text: text[:200], "cannot be read"),
        (lambda text: "", "cannot be read"),
        (lambda text: "[" * 100_000, "cannot be read"),
        (
            lambda text: text.replace('"median"', '"median": 7, "median"', 1),
            "cannot be read (found 'median' twice, expected each key once)",
        ),
        (lambda text: "[]", "is damaged: it: found []"),
        (lambda text: "{}", "is damaged: code: found None"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(store, edit, what):
    """Missing, cut short, too deep, with a key that stands twice."""
    refused("is missing")
    path = recording.save(data(), GPU, NAME)
    path.write_text(edit(path.read_text()))
    refused(what)


# What is wrong with a recording: an edit of it, and what is said. ------------

SPEED, CALL, ERROR, BITS = KINDS = {
    "speed": "GB/s",
    "call": "µs",
    "error": "relative error",
    "bits": "different results of 100",
}
NONE = "expected a finite number"


@pytest.fixture
def edited(store):
    """What loading a recording says after an edit of one benchmark, or of
    the whole where none is named."""
    (its,) = data(rows=rows(0.02))["benchmarks"].values()
    whole = data()
    whole["benchmarks"] = {kind: its | {"unit": KINDS[kind]} for kind in KINDS}
    whole = recording.sealed(whole)
    recording.save(whole, GPU, NAME)
    assert recording.load(GPU, NAME) == whole

    def said(edit, benchmark, sealed=True):
        copy = json.loads(json.dumps(whole))
        edit(copy["benchmarks"][benchmark] if benchmark else copy)
        if sealed:
            copy = recording.sealed(copy)
        recording.save(copy, GPU, NAME)
        line = refused("is damaged: ")
        assert "found " in line and "expected " in line
        return line

    return said


def first(**values):
    return lambda benchmark: benchmark["rows"][0].update(values)


def fourth(**values):
    return lambda benchmark: benchmark["rows"][3].update(values)


def told(**values):
    return lambda whole: whole["environment"].update(values)


@pytest.mark.parametrize(
    ("benchmark", "value", "expected"),
    [
        *((SPEED, v, NONE) for v in (math.inf, math.nan, 0, -1.0, 10**400)),
        *((SPEED, v, NONE) for v in ("fast", True, [])),
        (SPEED, None, NONE),  # the others are numbers
        (CALL, 0.0, f"{NONE}, above 0"),
        (ERROR, -1e-9, f"{NONE}, 0 or more"),
        (ERROR, math.inf, NONE),
        (BITS, 101, f"{NONE}, 0 or more, at most 100"),
    ],
)
@pytest.mark.parametrize("key", recording.VALUES)
def test_a_number_that_is_none(edited, benchmark, value, expected, key):
    line = edited(first(**{key: value}), benchmark)
    assert f"{key}: found {value}, {expected}" in line


def test_an_error_may_be_zero_and_all_may_be_null(edited):
    """These two edits are not refused."""
    for values in (0, None):
        row = dict.fromkeys(recording.VALUES, values)
        with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
            edited(first(**row), ERROR)


ORDER = "row 1 ((8,), 'triton'): low, median, high: found "


@pytest.mark.parametrize(
    ("edit", "place"),
    [
        *(
            (lambda b, key=key: b.pop(key), f"{key}: found None")
            for key in recording.BENCHMARK
        ),
        *((first(**{k: 9999.0}), ORDER) for k in ("median", "low")),
        (first(high=1.0), ORDER),
        (lambda b: b.update(more=1), "it: found the key more"),
        (lambda b: b.update(environment=[1]), "environment: found [1]"),
        (lambda b: b.update(environment={"gpu": "H"}), "environment: found {"),
        (lambda b: b.update(environment={"link": 5}), "environment, link: f"),
        (lambda b: b.update(unit="furlongs"), "unit: found 'furlongs'"),
        (lambda b: b.update(rows=[]), "rows: found []"),
        (lambda b: b.update(rows={"N": 1}), "rows: found {'N': 1}"),
        (lambda b: b["rows"].pop(), "rows: found nothing for ((16,), 'copy')"),
        (lambda b: b["rows"].append(b["rows"][0]), "row 7: found ((8,)"),
        (lambda b: b["rows"][3].pop("median"), "row 4: found {"),
        (lambda b: b["rows"][3].pop("N"), "row 4: found {"),
        (fourth(more=1), "row 4: found {"),
        (fourth(N=math.nan), "row 4, N: found nan"),
        (fourth(N=[8]), "row 4, N: found [8]"),
    ],
)
def test_what_is_wrong_with_a_benchmark(edited, edit, place):
    assert f"benchmark {SPEED}: {place}" in edited(edit, SPEED)


@pytest.mark.parametrize(
    ("edit", "place"),
    [
        *(
            (lambda d, key=key: d.pop(key), f"{key}: found None")
            for key in ("code", "environment", "benchmarks")
        ),
        *(
            (
                lambda d, key=key: d["environment"].pop(key),
                f"environment, {key}: found nothing",
            )
            for key in recording.ENVIRONMENT
        ),
        (
            told(gpu="NVIDIA H100"),
            "environment, gpu: found NVIDIA H100 in the folder nvidia-h200, "
            "expected the folder nvidia-h100",
        ),
        (told(date="2099-13-45"), "environment, date: found 2099-13-45"),
        (told(checks_passed=-3), "environment, checks_passed: found -3"),
        (told(checks_passed=True), "environment, checks_passed: found True"),
        (told(driver=["1"]), "environment, driver: found ['1']"),
        (told(libraries="a"), "environment, libraries: found 'a'"),
        (told(libraries={"a": 1}), "environment, libraries: found {'a': 1}"),
        (told(libraries={"a": "1\n"}), "environment, libraries: found {'a'"),
        (told(cuda="1\n\n.. raw:: html"), "environment, cuda: found '1\\n"),
        (lambda d: d.update(profile={"a": 1}), "it: found the key profile"),
        (lambda d: d.update(benchmarks={}), "benchmarks: found {}"),
        (lambda d: d.update(benchmarks={"a": 1}), "benchmark a: it: found 1"),
    ],
)
def test_what_is_wrong_with_the_whole(edited, edit, place):
    assert place in edited(edit, None)


@pytest.mark.parametrize(
    "edit",
    [
        lambda d: d["benchmarks"][SPEED]["rows"][0].update(median=20.5),
        lambda d: d["benchmarks"][SPEED]["args"].update(M=1024),
        lambda d: d["benchmarks"][SPEED].update(method="By eye."),
        lambda d: d["benchmarks"][SPEED]["rows"].reverse(),
        lambda d: d["benchmarks"].pop(SPEED),
        told(date="2026-11-20"),
    ],
)
def test_a_digest_that_does_not_fit(edited, edit):
    assert "digest: found " in edited(edit, None, sealed=False)


def counted(**changes):
    """What ncu counted for a benchmark, which has 4 numbers below 100."""
    return data(
        **{
            "environment": {"ncu": "1.2"},
            "unit": "% of warps",
            "args": {"counter": "x.pct"},
            "rows": rows(0.02),
        }
        | changes
    )


def test_why_ncu_counted_nothing_is_recorded(store):
    nothing = [row | dict.fromkeys(recording.VALUES) for row in rows()]
    for saved in (
        counted(),
        counted(reason="no ncu", rows=nothing),
        counted(reason="no ncu"),  # counted by hand
    ):
        recording.save(saved, GPU, NAME)
        assert recording.load(GPU, NAME) == saved


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"reason": ""}, "reason: found '', expected why ncu"),
        ({"reason": None}, "reason: found None, expected why ncu"),
        ({"reason": "no ncu", "args": {}}, "reason: found 'no ncu'"),
        ({"environment": {}}, "environment, ncu: found nothing"),
        ({"rows": rows(0.06)}, "row 3 ((8,), 'copy'): median: found 120"),
    ],
)
def test_what_ncu_counted_is_held_to_the_same(store, changes, said):
    recording.save(counted(**changes), GPU, NAME)
    assert said in refused("is damaged")


LINKED = {"gpus": 2 * ["NVIDIA H200"], "link": "NV18", "nccl": "2.28"}
RANKS = [  # against the number of ranks; 8 are not there
    {"ranks": n, "provider": "triton"}
    | dict.fromkeys(recording.VALUES, None if n == 8 else 1.0)
    for n in (2, 8)
]


@pytest.mark.parametrize(
    "its", [{"args": {"ranks": 2}}, {"x_names": ["ranks"], "rows": RANKS}]
)
def test_several_gpus_are_named(store, its):
    saved = data(**its, environment=LINKED)
    recording.save(saved, GPU, NAME)
    assert recording.load(GPU, NAME) == saved
    (benchmark,) = saved["benchmarks"].values()
    found = recording.environment_of(saved, benchmark)
    assert found == saved["environment"] | LINKED
    for key, value in (
        *(("gpus", []), ("link", ""), ("nccl", "")),
        *(("gpus", ["NVIDIA H200"]), ("gpus", ["NVIDIA H200", "A100"])),
    ):
        wrong = data(**its, environment=LINKED | {key: value})
        recording.save(wrong, GPU, NAME)
        assert f"environment, {key}: found " in refused("is damaged")


# Benchmarks of all pages -----------------------------------------------------


def benchmarks_of(name, peers):
    """The benchmarks of a page by their names, each with its function, where
    all is there that it may compare with, or nothing is."""
    asks = re.findall(
        r"^if (?:find_spec|hasattr)\(.*\):$", tutorial.source(name), re.M
    )
    # What is asked before a peer is taken; what stands below is left out when
    # a page is loaded, unless it asks for a GPU.
    ask = "if ON_GPU:" if torch.cuda.is_available() else "if not ON_GPU:"
    page = tutorial.load(name, [(each, ask) for each in asks if peers])
    found = {}
    for mark in vars(page).values():
        several = getattr(mark, "benchmarks", [])
        several = several if isinstance(several, list) else [several]
        found |= {bench.plot_name: (mark, bench) for bench in several}
    return found


def as_recorded(mark, bench):
    """What a recording has of a benchmark, with invented numbers."""
    more = {}
    if "counter" in bench.args:
        more["ncu"] = "1.2"
    rows = [
        {
            **dict(zip(bench.x_names, x, strict=True)),
            "provider": provider,
            **dict.fromkeys(recording.VALUES, 1.0),
        }
        for x in replay.x_values(bench)
        for provider in bench.line_vals
    ]
    made = replay.described(mark, bench) | {"rows": rows}
    if ranks := recording.ranks(made):
        more |= LINKED | {"gpus": ranks * LINKED["gpus"][:1]}
    return made | {"environment": more}


@pytest.mark.parametrize("name", map(tutorial.name_of, tutorial.scripts()))
def test_what_a_page_measures_can_be_recorded_and_shown(name):
    """Its units are known, say. And who was measured where all libraries are
    installed can be shown where none is, and the other way."""
    there, alone = (benchmarks_of(name, peers) for peers in (True, False))
    environment = ENVIRONMENT | {"gpu": "NVIDIA H200"}
    for recorded, shown in (there, alone), (alone, there):
        assert recorded.keys() == shown.keys()
        for plot, benchmark in recorded.items():
            made = {plot: as_recorded(*benchmark)}
            whole = recording.sealed(
                {
                    "code": recording.code_of(name),
                    "environment": environment,
                    "benchmarks": made,
                }
            )
            assert recording.problem(whole, GPU) is None
            misfit = replay.misfit(made[plot], *shown[plot])
            assert misfit is None, plot


# Files -----------------------------------------------------------------------


def test_tutorials_in_sections(store):
    assert pick(["01"]) == pick([NAME]) == pick([]) == [store]
    with pytest.raises(RefusedError, match="no tutorial '99'; there are: 01"):
        pick(["99"])
    names = ["layer-norm/01-a", "layer-norm/02-b", "norms/01-a", "norms/03-c"]
    for name in names:
        tutorial.script_of(name).parent.mkdir(exist_ok=True)
        tutorial.script_of(name).with_name("index.rst").touch()
        tutorial.script_of(name).write_text(SCRIPT)
    store.unlink()

    def picked(*asked):
        return [tutorial.name_of(script) for script in pick(asked)]

    assert picked() == names
    assert picked("layer-norm") == picked("layer-norm/") == names[:2]
    assert picked("norms/01") == picked("norms/01-a") == ["norms/01-a"]
    assert picked("02", "03-c", "02") == ["layer-norm/02-b", "norms/03-c"]
    for key in ("01", "01-a"):
        with pytest.raises(RefusedError, match="several") as error:
            picked(key)
        assert "layer-norm/01-a, norms/01-a" in str(error.value)
    with pytest.raises(RefusedError, match="no tutorial 'norms/9"):
        picked("norms/99")

    path = recording.save(data("norms/01-a"), GPU, "norms/01-a")
    assert path == recording.STORE / GPU / "norms/01-a.json"
    assert recording.load(GPU, "norms/01-a")
    assert recording.gpus("norms/01-a") == [GPU]
    assert recording.gpus("layer-norm/01-a") == []
    with pytest.raises(recording.RecordingError) as error:
        recording.load(GPU, "layer-norm/01-a")
    assert "make record TUTORIALS=layer-norm/01 " in str(error.value)


COMMITTED = sorted(recording.STORE.rglob("*.json"))


@pytest.mark.parametrize("path", COMMITTED, ids=lambda p: p.stem)
def test_committed_recordings_are_whole_and_fresh(path):
    gpu, *parts = path.relative_to(recording.STORE).with_suffix("").parts
    loaded = recording.load(gpu, "/".join(parts))
    speeds = [b for b in loaded["benchmarks"].values() if b["unit"] == "GB/s"]
    providers = [{row["provider"] for row in b["rows"]} for b in speeds]
    # A peer is drawn beside the ceiling, and somewhere our own.
    assert all("copy" in names for names in providers if "torch" in names)
    assert not speeds or any(
        {"triton", "copy"} <= names for names in providers
    )
    for benchmark in speeds:
        for row in benchmark["rows"]:
            # A peer may refuse a size; we and the ceiling may not.
            refused = row["median"] is None
            assert not refused or row["provider"] not in ("triton", "copy")
            assert refused or row["median"] > 0
    for benchmark in loaded["benchmarks"].values():
        environment = recording.environment_of(loaded, benchmark)
        assert environment["checks_passed"] > 0


def test_every_tutorial_is_recorded():
    """On some card: not each is to be had when a page is written anew."""
    recorded = {
        path.relative_to(folder).with_suffix("").as_posix()
        for folder in recording.STORE.iterdir()
        for path in folder.rglob("*.json")
    }
    assert recorded == set(map(tutorial.name_of, tutorial.scripts()))


RECORD = "-m", "measurements.record"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            [*RECORD, "99"],
            "no tutorial '99'; there are: layer-norm/01-layer-norm",
        ),
        (RECORD, "no GPU here"),
        (["-O", *RECORD], "lets no assertion run"),
        (["-O", "-m", "pytest"], "lets no assertion run"),
    ],
)
def test_what_is_refused_is_said_in_one_line(arguments, message):
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ
        | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT / "docs/_ext")},
    )
    assert done.returncode != 0
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
