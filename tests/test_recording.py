"""The recordings: their format, and what is wrong with one."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from project import ENVIRONMENT, ROOT, rows

import tutorial
from measurements import recording

GPU, NAME = "nvidia-h200", "01-double"

MEASURED = """
import triton.testing

SCALE = 2.0


@triton.testing.perf_report(
    triton.testing.Benchmark(
        ["N"], [8, 16], "provider", ["triton"], ["Triton"], "double", {},
        ylabel="GB/s",
    )
)
def measure(N, provider):
    \"\"\"By hand.\"\"\"
    if N == 16:
        AT_16
    return SCALE * N, 1.0 * N, 3.0 * N


# A comment.
measure.run()
"""
SCRIPT = MEASURED.replace("AT_16", "pass")


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
        "code": recording.codes(name)["double"],
        "environment": ENVIRONMENT | {"gpu": "NVIDIA H200"},
        "unit": "GB/s",
        "args": {},
        "method": "by hand",
        "x_names": ["N"],
        "rows": rows(),
    } | changes
    return {"benchmarks": {"double": recording.sealed(benchmark)}}


def test_what_is_saved_is_loaded(store):
    saved = data()
    path = recording.save(saved, GPU, NAME)
    assert recording.load(GPU, NAME) == saved
    assert path.read_text().endswith("}\n")
    # one line a row, so that a change to one number is a change to one line
    assert path.read_text().count('"provider"') == sum(
        '"provider"' in line for line in path.read_text().splitlines()
    )


def test_other_sections_of_a_recording_are_kept(store):
    saved = data() | {"profile": {"ncu": "2026.1", "kernels": {}}}
    recording.save(saved, GPU, NAME)
    assert recording.load(GPU, NAME)["profile"] == saved["profile"]


def test_prose_does_not_make_a_recording_stale(store):
    recording.save(data(), GPU, NAME)
    store.write_text(SCRIPT.replace("# A comment", "# %%\n# Prose"))
    assert recording.load(GPU, NAME)


def test_code_makes_it_stale(store):
    recording.save(data(), GPU, NAME)
    store.write_text(SCRIPT.replace("SCALE = 2.0", "SCALE = 3.0"))
    with pytest.raises(recording.RecordingError, match="stale") as error:
        recording.load(GPU, NAME)
    found = recording.read(GPU, NAME)["benchmarks"]["double"]["code"]
    for part in (
        *("tutorials/01-double.py", "nvidia-h200/01-double.json"),
        *("benchmark double", f"found {found}"),
        f"expected {recording.codes(NAME)['double']}",
        "make record TUTORIALS=01",
    ):
        assert part in str(error.value)
    assert "\n" not in str(error.value)


def test_a_benchmark_more_or_less_makes_it_stale(store):
    recording.save(data(), GPU, NAME)
    store.write_text(SCRIPT.replace('"double"', '"triple"'))
    with pytest.raises(recording.RecordingError) as error:
        recording.load(GPU, NAME)
    assert "benchmark triple is not in it" in str(error.value)
    assert "the tutorial has no benchmark double" in str(error.value)
    problems = recording.stale(recording.read(GPU, NAME), NAME)
    assert list(problems) == ["triple", "double"]


def test_a_script_that_cannot_be_read_is_named(store):
    store.write_text(SCRIPT.replace('"double"', "input()"))
    with pytest.raises(recording.RecordingError, match="plot_name") as error:
        recording.codes(NAME)
    assert str(error.value).startswith("tutorials/01-double.py: line ")


def test_a_missing_file_is_named(store):
    with pytest.raises(recording.RecordingError, match="is missing"):
        recording.load(GPU, NAME)


# What is wrong with a recording: each is an edit of one of four kinds. -------

COMMITTED = sorted((ROOT / "docs/measurements").rglob("*.json"))
SPEED, CALL, ERROR, BITS = KINDS = {
    "speed": "GB/s",
    "call": "µs",
    "error": "relative error",
    "bits": "different results of 100",
}
FOUR = """
import triton.testing

def measure(N, provider):
    return 2.0 * N

def benchmark(name, unit):
    return triton.testing.perf_report(
        triton.testing.Benchmark(
            ["N"], [8, 16], "provider", ["triton"], ["Triton"], name, {},
            ylabel=unit,
        )
    )(measure)
"""
FOUR += "".join(
    f"benchmark({kind!r}, {KINDS[kind]!r}).run()\n" for kind in KINDS
)


@pytest.fixture
def edited(store):
    """What loading a recording says after an edit of one benchmark."""
    (its,) = data(rows=rows(0.02))["benchmarks"].values()
    store.write_text(FOUR)
    codes = recording.codes(NAME)
    whole = {"benchmarks": {}}
    for kind, unit in KINDS.items():
        benchmark = its | {"unit": unit, "code": codes[kind]}
        whole["benchmarks"][kind] = recording.sealed(benchmark)
    recording.save(whole, GPU, NAME)
    assert recording.load(GPU, NAME) == whole

    def said(edit, benchmark=SPEED, sealed=True, gpu=GPU):
        copy = json.loads(json.dumps(whole))
        its = copy["benchmarks"][benchmark]
        edit(its)
        if sealed:
            copy["benchmarks"][benchmark] = recording.sealed(its)
        recording.save(copy, gpu, NAME)
        with pytest.raises(recording.RecordingError) as error:
            recording.load(gpu, NAME)
        line = str(error.value)
        assert "\n" not in line
        for part in (
            f"tutorials/{NAME}.py: the recording {gpu}/{NAME}.json",
            *(" is damaged: ", "found ", "expected "),
            "on a GPU run: make record TUTORIALS=01",
        ):
            assert part in line
        return line

    return said


def first(**values):
    return lambda benchmark: benchmark["rows"][0].update(values)


def test_numbers_out_of_order(edited):
    for values in ({"median": 9999.0}, {"low": 9999.0}, {"high": 1.0}):
        line = edited(first(**values))
        assert "row 1 ((8,), 'triton'): low, median, high: found " in line
        assert "expected this order" in line


@pytest.mark.parametrize(
    ("benchmark", "value"),
    [
        *((SPEED, v) for v in (math.inf, math.nan, 0, -1.0, "fast", True, [])),
        (SPEED, None),  # the others are numbers
        (CALL, 0.0),
        (ERROR, -1e-9),
        (ERROR, math.inf),
    ],
)
@pytest.mark.parametrize("key", recording.VALUES)
def test_a_number_that_is_none(edited, benchmark, value, key):
    line = edited(first(**{key: value}), benchmark)
    assert f"{key}: found {value}, expected a finite number" in line


def test_an_error_may_be_zero_and_all_may_be_null(edited):
    """These two edits are not refused."""
    for values in (0, None):
        row = dict.fromkeys(recording.VALUES, values)
        with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
            edited(first(**row), ERROR)


def test_a_count_above_100(edited):
    line = edited(first(median=101, low=101, high=101), BITS)
    assert "found 101, expected a finite number, 0 or more, at most 100" in (
        line
    )


def test_a_gpu_that_is_not_its_folder(edited):
    line = edited(lambda b: b["environment"].update(gpu="NVIDIA H100"))
    assert "environment, gpu: found NVIDIA H100 in the folder nvidia-h200" in (
        line
    )
    line = edited(lambda b: None, gpu="nvidia-a100")
    assert "expected the folder nvidia-h200" in line


@pytest.mark.parametrize(
    "edit",
    [
        first(median=20.5),
        lambda b: b["args"].update(M=1024),
        lambda b: b["environment"].update(date="2026-11-20"),
        lambda b: b.update(method="By eye."),
        lambda b: b["rows"].reverse(),
    ],
)
def test_a_digest_that_does_not_fit(edited, edit):
    assert "digest: found " in edited(edit, sealed=False)


@pytest.mark.parametrize(
    ("edit", "place"),
    [
        *(
            (lambda b, key=key: b.pop(key), f"{key}: found None")
            for key in recording.KEYS
            if key != "digest"
        ),
        *(
            (
                lambda b, key=key: b["environment"].pop(key),
                f"environment, {key}: found nothing",
            )
            for key in recording.ENVIRONMENT
        ),
        (lambda b: b.update(unit="furlongs"), "unit: found 'furlongs'"),
        (lambda b: b.update(rows=[]), "rows: found []"),
        (lambda b: b.update(rows={"N": 1}), "rows: found {'N': 1}"),
        (lambda b: b["rows"].pop(), "rows: found nothing for ((16,), 'copy')"),
        (lambda b: b["rows"][3].pop("median"), "row 4: found {"),
        (lambda b: b["rows"][3].pop("N"), "row 4: found {"),
        (lambda b: b["rows"][3].update(more=1), "row 4: found {"),
        (lambda b: b["rows"].append(b["rows"][0]), "row 7: found ((8,)"),
    ],
)
def test_what_is_not_there(edited, edit, place):
    assert f"benchmark {SPEED}: {place}" in edited(edit)


def test_what_is_no_recording(store):
    for text in ("[]", "{}", '{"benchmarks": []}', '{"benchmarks": {"a": 1}}'):
        path = recording.save(data(), GPU, NAME)
        path.write_text(text)
        with pytest.raises(recording.RecordingError, match="damaged"):
            recording.load(GPU, NAME)


def test_a_file_cut_short_is_found(store):
    path = recording.save(data(), GPU, NAME)
    path.write_text(path.read_text()[:200])
    with pytest.raises(recording.RecordingError, match="cannot be read"):
        recording.load(GPU, NAME)


def counted(**changes):
    """What ncu counted for a benchmark, which has 4 numbers below 100."""
    return data(
        **{
            "environment": ENVIRONMENT | {"gpu": "NVIDIA H200", "ncu": "1.2"},
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
        (
            {"environment": ENVIRONMENT | {"gpu": "NVIDIA H200"}},
            "environment, ncu: found nothing",
        ),
        ({"rows": rows(0.06)}, "row 3 ((8,), 'copy'): median: found 120"),
        ({"digest": "0" * 16}, "digest: found 0000"),
    ],
)
def test_what_ncu_counted_is_held_to_the_same(store, changes, said):
    saved = counted(**changes)
    its = saved["benchmarks"]["double"]
    saved["benchmarks"]["double"] = its | changes
    recording.save(saved, GPU, NAME)
    with pytest.raises(recording.RecordingError, match="damaged") as error:
        recording.load(GPU, NAME)
    assert said in str(error.value)


def test_an_interrupted_write_leaves_the_old_file_whole(store, monkeypatch):
    path = recording.save(data(), GPU, NAME)
    before = path.read_text()

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        recording.save(data(method="another"), GPU, NAME)
    assert path.read_text() == before
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_unknown_tutorials_are_refused_in_one_line(store):
    with pytest.raises(recording.RecordingError, match="no tutorial '99'"):
        recording.pick(["99"])
    assert recording.pick(["01"]) == recording.pick([NAME]) == [store]
    assert recording.pick([]) == [store]


def test_tutorials_in_sections(store):
    names = ["layer-norm/01-a", "layer-norm/02-b", "norms/01-a", "norms/03-c"]
    for name in names:
        tutorial.script_of(name).parent.mkdir(exist_ok=True)
        tutorial.script_of(name).with_name("index.rst").touch()
        tutorial.script_of(name).write_text(SCRIPT)
    store.unlink()

    def picked(*asked):
        return [tutorial.name_of(script) for script in recording.pick(asked)]

    assert picked() == names
    assert picked("layer-norm") == picked("layer-norm/") == names[:2]
    assert picked("norms/01") == picked("norms/01-a") == ["norms/01-a"]
    assert picked("02", "03-c", "02") == ["layer-norm/02-b", "norms/03-c"]
    for key in ("01", "01-a"):
        with pytest.raises(recording.RecordingError, match="several") as error:
            picked(key)
        assert "layer-norm/01-a, norms/01-a" in str(error.value)
    with pytest.raises(recording.RecordingError, match="no tutorial 'norms/9"):
        picked("norms/99")

    path = recording.save(data("norms/01-a"), GPU, "norms/01-a")
    assert path == recording.STORE / GPU / "norms/01-a.json"
    assert recording.load(GPU, "norms/01-a")
    assert recording.gpus("norms/01-a") == [GPU]
    assert recording.gpus("layer-norm/01-a") == []
    with pytest.raises(recording.RecordingError) as error:
        recording.load(GPU, "layer-norm/01-a")
    assert "make record TUTORIALS=layer-norm/01 " in str(error.value)


@pytest.mark.parametrize(
    ("gpu", "folder"),
    [
        ("NVIDIA H200", "nvidia-h200"),
        ("NVIDIA GeForce RTX 4090", "nvidia-geforce-rtx-4090"),
        ("AMD Instinct MI300X (OAM)", "amd-instinct-mi300x-oam"),
    ],
)
def test_a_gpu_is_a_folder(gpu, folder):
    assert recording.slug(gpu) == folder


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
        assert benchmark["environment"]["checks_passed"] > 0


def test_every_tutorial_is_recorded_on_the_default_gpu():
    folder = recording.STORE / "nvidia-h200"
    recorded = {
        Path(path).relative_to(folder).with_suffix("").as_posix()
        for path in folder.rglob("*.json")
    }
    assert recorded == set(map(tutorial.name_of, tutorial.scripts()))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["99"], "no tutorial '99'; there are: layer-norm/01-layer-norm"),
        (["layer-norm/01"], "no GPU here"),
        ([], "no GPU here"),
    ],
)
def test_record_refuses_in_one_line(arguments, message):
    done = subprocess.run(
        [sys.executable, "-m", "measurements.record", *arguments],
        capture_output=True,
        text=True,
        env=os.environ
        | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT / "docs/_ext")},
    )
    assert done.returncode != 0
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_json_is_plain(store):
    path = recording.save(data(), GPU, NAME)
    assert json.loads(path.read_text())["benchmarks"]["double"]["unit"]
