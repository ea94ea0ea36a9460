"""What pages say that they were checked with, and the file it comes from."""

import datetime
import json
import re
from importlib.metadata import version

import pytest
from packaging.version import Version
from triton_versions import chosen, keep, last_line

import tutorial
from measurements import recording
from page import checked

NAMES = list(map(tutorial.name_of, tutorial.scripts()))
KNOWN = checked.read()
CODE = "0123456789abcdef"
ENTRY = {
    "code": CODE,
    "date": "2026-11-25",
    "interpreter": "passed",
    "compiled": "passed",
    "beyond": [],
}


@pytest.mark.parametrize("version", KNOWN)
def test_a_version_was_tried_with_every_page(version):
    """Whether or not the code of a page has changed since."""
    missing = sorted(set(NAMES) - KNOWN[version].keys())
    assert not missing, (
        f'make test-triton-versions TRITON={version} TUTORIALS="'
        f'{" ".join(missing)}"'
    )
    gone = sorted(KNOWN[version].keys() - set(NAMES))
    assert not gone, f"{checked.FILE} tells of pages that are gone: {gone}"


@pytest.mark.parametrize("version", KNOWN)
def test_each_entry_is_whole(version):
    Version(version)
    for name, entry in KNOWN[version].items():
        assert entry.keys() == checked.ENTRY.keys(), name
        for key, kind in checked.ENTRY.items():
            assert isinstance(entry[key], kind), (name, key)
        assert len(entry["code"]) == 16
        int(entry["code"], 16)
        datetime.date.fromisoformat(entry["date"])
        for key in ("interpreter", "compiled"):
            assert entry[key].strip()
        assert all(map(str.strip, entry["beyond"]))


def test_a_later_version_than_that_of_make_test_was_tried():
    ours = Version(version("triton"))
    assert max(map(Version, KNOWN)) > ours


def test_nothing_of_a_machine_is_in_the_file():
    assert "/work" not in checked.FILE.read_text()
    assert str(tutorial.ROOT) not in checked.FILE.read_text()


def test_the_file_is_as_it_is_written(monkeypatch, tmp_path):
    """By the command, with a line for each page, and not by hand."""
    before = checked.FILE.read_text(encoding="utf-8")
    monkeypatch.setattr(checked, "FILE", tmp_path / "versions.json")
    checked.write(KNOWN)
    assert checked.FILE.read_text(encoding="utf-8") == before
    assert json.loads(before) == KNOWN


# What a page says ------------------------------------------------------------


def row(now=CODE, **changes):
    return checked.checked("3.9.0", ENTRY | changes, now)


def test_what_passed_is_told_with_its_day():
    said = "run in the interpreter and compiled for sm_90, 2026-11-25"
    assert row() == ("3.9.0", said, (), False)


@pytest.mark.parametrize("what", ["interpreter", "compiled"])
def test_what_broke_is_told_with_its_sentence(what):
    found = row(**{what: "ValueError: no"})
    assert found.said == "this page breaks with it, 2026-11-25"
    assert found.sentences == ("ValueError: no",)
    assert found.broke


def test_what_is_beyond_a_limit_is_told():
    found = row(beyond=["_kernel: spills: limit 0, now 8"])
    assert "but not within the limits" in found.said
    assert found.sentences == ("_kernel: spills: limit 0, now 8",)
    assert not found.broke


@pytest.mark.parametrize("changes", [{}, {"compiled": "ValueError: no"}])
def test_nothing_is_told_of_code_that_has_changed(changes):
    found = row(now="f" * 16, **changes)
    said = "an earlier version of this page was checked, 2026-11-25"
    assert found == ("3.9.0", said, (), False)


@pytest.fixture
def versions(monkeypatch, tmp_path):
    """A file of two versions, one of which was tried with today's code."""
    name = NAMES[0]
    monkeypatch.setattr(checked, "FILE", tmp_path / "versions.json")
    now = ENTRY | {"code": recording.code_of(name)}
    checked.write({"3.10.0": {name: now}, "3.9.0": {name: ENTRY}})
    return name


@pytest.mark.parametrize("name", NAMES)
def test_every_page_was_measured_and_checked(name):
    """On a GPU, and with every version that was tried."""
    by_gpu = checked.measured(name, "nvidia-h200")
    gpus = [each for its in by_gpu.values() for each in its]
    dated = re.compile(r"NVIDIA H[12]00\b.* \(2\d{3}-")
    assert any(map(dated.match, gpus))
    told = {row.triton for row in checked.rows(name, "nvidia-h200")}
    assert told == {*by_gpu, version("triton"), *KNOWN}


def test_versions_come_in_their_order(versions):
    *_, earlier, last = checked.rows(versions, "nvidia-h200")
    assert (earlier.triton, last.triton) == ("3.9.0", "3.10.0")
    assert "an earlier version" in earlier.said
    assert "run in the interpreter" in last.said


def test_the_gpus_of_the_recordings_are_named(versions):
    first, *_ = checked.rows(versions, "nvidia-h200")
    data = recording.load("nvidia-h200", versions)
    days = {
        recording.environment_of(data, benchmark)["date"]
        for benchmark in data["benchmarks"].values()
    }
    assert first.triton == data["environment"]["triton"]
    assert f"NVIDIA H200 ({max(days)})" in first.said


@pytest.mark.parametrize("sentence", ["passed", "ValueError: no"])
def test_a_version_that_ran_on_a_gpu_is_told_once(versions, sentence):
    data = recording.load("nvidia-h200", versions)
    triton = data["environment"]["triton"]
    entry = ENTRY | {"code": data["code"], "interpreter": sentence}
    checked.write({triton: {versions: entry}})
    found = [row.triton for row in checked.rows(versions, "nvidia-h200")]
    assert found.count(triton) == (1 if sentence == "passed" else 2)


def test_a_recording_that_is_stale_is_not_named(versions, monkeypatch):
    monkeypatch.setattr(recording, "code_of", lambda name: CODE)
    assert checked.measured(versions, "nvidia-h200") == {}


@pytest.mark.parametrize(
    ("version", "sorts_as"),
    [("3.9.0", [3, 9, 0]), ("3.10.0+git1a2b", [3, 10, 0])],
)
def test_versions_are_numbers(version, sorts_as):
    assert checked.numbers(version) == sorts_as


# The command -----------------------------------------------------------------


def test_pages_are_chosen_by_how_their_names_begin():
    assert chosen([]) == NAMES
    assert chosen(["fused/01"]) == ["fused/01-add-layer-norm"]
    assert chosen(["none"]) == []


def test_what_came_of_a_page_is_kept_and_what_is_gone_is_not(versions):
    checked.write({"3.9.0": {versions: ENTRY, "gone/01-page": ENTRY}})
    keep("3.10.0", versions, ENTRY)
    assert checked.read() == {
        "3.9.0": {versions: ENTRY},
        "3.10.0": {versions: ENTRY},
    }


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("Traceback:\n  f()\nValueError: no\n\n", "ValueError: no"),
        ("", "it ended without a word"),
    ],
)
def test_the_last_line_is_the_sentence(text, line):
    assert last_line(text) == line
