"""The recordings: their format, their hash, and how they are written."""

import json
import os
import subprocess
import sys

import pytest
from project import ENVIRONMENT, ROOT, rows

from measurements import recording

GPU, STEM = "nvidia-h200", "01-double"


@pytest.fixture
def store(tmp_path, monkeypatch):
    """Tutorials and recordings in a folder of their own."""
    monkeypatch.setattr(recording, "TUTORIALS", tmp_path / "tutorials")
    monkeypatch.setattr(recording, "STORE", tmp_path / "measurements")
    (tmp_path / "tutorials").mkdir()
    script = tmp_path / "tutorials" / f"{STEM}.py"
    script.write_text('"""Title"""\n\n# %%\n# Prose.\n\nx = 1  # why\n')
    return script


def data(script, **changes):
    return {
        "environment": ENVIRONMENT | {"gpu": "NVIDIA H200"},
        "code": recording.code_hash(script),
        "benchmarks": {
            "double": {
                "unit": "GB/s",
                "args": {"M": 1},
                "method": "by hand",
                "rows": rows(),
            }
        },
    } | changes


def test_what_is_saved_is_loaded(store):
    saved = data(store)
    path = recording.save(saved, GPU, STEM)
    assert recording.load(GPU, STEM) == saved
    assert path.read_text().endswith("}\n")
    # one line a row, so that a change to one number is a change to one line
    assert path.read_text().count('"provider"') == sum(
        '"provider"' in line for line in path.read_text().splitlines()
    )


@pytest.mark.parametrize(
    "text",
    [
        '"""Another title"""\n\n# %%\n# Prose.\n\nx = 1  # why\n',
        '"""Title"""\n\n# %%\n# Prose, translated.\n# Two lines.\n\nx = 1\n',
        '"""Title"""\n# %%\n\n\nx = 1   # another comment\n\n',
    ],
)
def test_prose_does_not_make_a_recording_stale(store, text):
    before = recording.code_hash(store)
    store.write_text(text)
    assert recording.code_hash(store) == before


def test_docstrings_are_prose(store):
    store.write_text('def f():\n    """One."""\n    return 1\n')
    before = recording.code_hash(store)
    store.write_text('def f():\n    """Eins.\n\n    Zwei."""\n    return 1\n')
    assert recording.code_hash(store) == before


@pytest.mark.parametrize(
    ("old", "new"), [("x = 1", "x = 2"), ("x = 1", "x = '#'"), ("x", "y")]
)
def test_code_makes_it_stale(store, old, new):
    recording.save(data(store), GPU, STEM)
    store.write_text(store.read_text().replace(old, new))
    with pytest.raises(recording.RecordingError, match="stale") as error:
        recording.load(GPU, STEM)
    assert "tutorials/01-double.py" in str(error.value)
    assert "make record TUTORIALS=01" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_string_that_looks_like_a_comment_is_code(store):
    store.write_text('x = "# one"\n')
    before = recording.code_hash(store)
    store.write_text('x = "# two"\n')
    assert recording.code_hash(store) != before


def test_the_hash_is_the_same_on_every_python(store):
    """Python 3.12 cuts f-strings into tokens, 3.11 does not."""
    store.write_text("x = f'{1 + 1:>{3}} # {2}'  # gone\n")
    assert recording.code_hash(store) == "b2e67f1c326c2f6c"


def test_a_missing_file_is_named(store):
    with pytest.raises(recording.RecordingError, match="is missing"):
        recording.load(GPU, STEM)


@pytest.mark.parametrize(
    "damage",
    [
        lambda d: d.pop("environment"),
        lambda d: d.pop("code"),
        lambda d: d["environment"].pop("driver"),
        lambda d: d["benchmarks"]["double"].update(unit="furlongs"),
        lambda d: d["benchmarks"]["double"].update(rows=[]),
        lambda d: d["benchmarks"]["double"]["rows"][0].pop("median"),
        lambda d: d["benchmarks"]["double"]["rows"][0].pop("provider"),
        lambda d: d["benchmarks"]["double"]["rows"][0].update(low="fast"),
        lambda d: d["benchmarks"]["double"]["rows"][0].update(low=True),
        lambda d: d["benchmarks"]["double"]["rows"][0].update(
            high=float("inf")
        ),
    ],
)
def test_damage_is_found(store, damage):
    broken = data(store)
    damage(broken)
    recording.save(broken, GPU, STEM)
    with pytest.raises(recording.RecordingError, match="damaged"):
        recording.load(GPU, STEM)


def test_a_file_cut_short_is_found(store):
    path = recording.save(data(store), GPU, STEM)
    path.write_text(path.read_text()[:200])
    with pytest.raises(recording.RecordingError, match="cannot be read"):
        recording.load(GPU, STEM)


def test_an_interrupted_write_leaves_the_old_file_whole(store, monkeypatch):
    path = recording.save(data(store), GPU, STEM)
    before = path.read_text()

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        recording.save(data(store, benchmarks={}), GPU, STEM)
    assert path.read_text() == before
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_unknown_tutorials_are_refused_in_one_line(store):
    with pytest.raises(recording.RecordingError, match="no tutorial '99'"):
        recording.pick(["99"])
    assert recording.pick(["01"]) == recording.pick([STEM]) == [store]


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


COMMITTED = sorted((ROOT / "docs/measurements").glob("*/*.json"))


@pytest.mark.parametrize("path", COMMITTED, ids=lambda p: p.stem)
def test_committed_recordings_are_whole_and_fresh(path):
    loaded = recording.load(path.parent.name, path.stem)
    speeds = [b for b in loaded["benchmarks"].values() if b["unit"] == "GB/s"]
    providers = [{row["provider"] for row in b["rows"]} for b in speeds]
    assert all("copy" in names for names in providers)  # the ceiling
    assert any("triton" in names for names in providers)
    for benchmark in speeds:
        for row in benchmark["rows"]:
            # A peer may refuse a size; we and the ceiling may not.
            refused = row["median"] is None
            assert not refused or row["provider"] not in ("triton", "copy")
            assert refused or row["median"] > 0
    assert loaded["environment"]["checks_passed"] > 0
    assert recording.slug(loaded["environment"]["gpu"]) == path.parent.name


def test_every_tutorial_is_recorded_on_the_default_gpu():
    default = "nvidia-h200"
    recorded = {p.stem for p in COMMITTED if p.parent.name == default}
    assert recorded == {p.stem for p in recording.tutorials()}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["99"], "no tutorial '99'; there are: 01-layer-norm"),
        (["01"], "no GPU here"),
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
    path = recording.save(data(store), GPU, STEM)
    assert json.loads(path.read_text())["benchmarks"]["double"]["unit"]


MEASURED = """
import triton.testing


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
    return 2.0 * N, 1.0 * N, 3.0 * N


measure.run()
"""


@pytest.fixture
def on_a_gpu(monkeypatch):
    """As if there were a GPU: only its description is made up."""

    def environment(method, checks_passed):
        made = {"method": method, "checks_passed": checks_passed}
        return ENVIRONMENT | {"gpu": "NVIDIA H200"} | made

    monkeypatch.setattr(recording, "environment", environment)


def test_a_tutorial_is_recorded(store, on_a_gpu):
    from measurements.record import record

    store.write_text(MEASURED.replace("AT_16", "pass"))
    path = record(store, checks_passed=3)
    loaded = recording.load(GPU, STEM)
    assert path == recording.STORE / GPU / f"{STEM}.json"
    assert loaded["environment"]["checks_passed"] == 3
    assert loaded["environment"]["method"] == "By hand."
    assert loaded["benchmarks"]["double"] == {
        "unit": "GB/s",
        "args": {},
        "method": "By hand.",
        "rows": [
            {
                "N": n,
                "provider": "triton",
                "median": 2.0 * n,
                "low": 1.0 * n,
                "high": 3.0 * n,
            }
            for n in (8, 16)
        ],
    }


@pytest.mark.parametrize(
    "accident", ["raise ValueError('no luck')", "raise KeyboardInterrupt"]
)
def test_an_interrupted_run_leaves_the_old_file_whole(
    store, on_a_gpu, accident
):
    from measurements.record import RefusedError, record

    path = recording.save(data(store), GPU, STEM)
    before = path.read_text()
    store.write_text(MEASURED.replace("AT_16", accident))
    with pytest.raises((RefusedError, KeyboardInterrupt)) as error:
        record(store, checks_passed=3)
    assert path.read_text() == before
    if error.type is RefusedError:
        assert "tutorials/01-double.py stopped with ValueError: no luck" in (
            str(error.value)
        )


def test_a_failed_check_refuses_to_record(tmp_path, monkeypatch):
    from measurements import record

    monkeypatch.setattr(recording, "ROOT", tmp_path)
    folder = tmp_path / "tests" / "gpu"
    folder.mkdir(parents=True)
    script = tmp_path / "tutorials" / "01-double.py"
    with pytest.raises(record.RefusedError, match="has no checks"):
        record.check(script)
    test = folder / "test_01_double.py"
    test.write_text("def test_a(): pass\ndef test_b(): assert False\n")
    with pytest.raises(record.RefusedError, match="check of tutorials/01"):
        record.check(script)
    test.write_text(
        "import pytest\ndef test_a(): pass\ndef test_b(): pass\n"
        "def test_c(): pytest.skip()\n"
    )
    assert record.check(script) == 2


def test_a_live_benchmark_is_measured_and_kept(on_a_gpu):
    import matplotlib.pyplot as plt
    import triton.testing

    from measurements import replay

    @triton.testing.perf_report(
        triton.testing.Benchmark(
            *(["N"], [8], "provider", ["triton"], ["Triton"], "double"),
            {"M": 2},
            ylabel="GB/s",
        )
    )
    def measure(M, N, provider):
        """By hand."""
        return 1.0 * N

    live = replay.Session(STEM, live=True)
    with replay.replaced(replay.Runner(live)):
        table = measure.run(return_df=True)
    plt.close("all")
    assert table["Triton (GB/s)"][0] == 8
    (measured,) = live.results["double"]
    assert measured.live
    assert measured.rows[0]["median"] == 8
    assert measured.environment["method"] == "By hand."
