"""What Nsight Compute counts, with a stand-in for it and for the GPU."""

import math
import os
import re
import shutil

import pytest
import torch
import triton.testing
from measurable import GPU, HERE
from project import ENVIRONMENT

import tutorial
from measurements import (
    counters,
    environment,
    measure,
    progress,
    recording,
    replay,
    stale,
)

NAME = "01-traffic"
SCRIPT = '''
import os
import threading

import torch
import triton.testing
from sitecustomize import launch

BYTES, HITS = "dram__bytes_read.sum", "lts__t_sector_hit_rate.pct"
NAN = (float("nan"),) * 3


def benchmark(name, ylabel, **args):
    return triton.testing.perf_report(
        triton.testing.Benchmark(
            ["N"], [8, 16], "provider", ["triton", "torch", "hand"],
            ["Triton", "PyTorch", "By hand"], name, args, ylabel=ylabel,
        )
    )


def kernel(read, ns, hits):
    given = {BYTES: read, "gpu__time_duration.sum": ns, HITS: hits}
    launch("kernel", **given)


def counted(N, provider, per=""):
    kernel(777, 1, 50)  # warms up
    with torch.cuda.nvtx.range(f"counted kernels{per}"):
        if provider == "triton":
            kernel(1000 * N, 100, 80.5)
            kernel(500 * N, 300, 60.5)
        else:  # as a backward pass does
            its = threading.Thread(target=kernel, args=(3000 * N, 100, 10))
            its.start()
            its.join()
    kernel(777, 1, 50)
    return NAN


@benchmark("seconds", "µs")
def seconds(N, provider):
    """Timed."""
    return 1.0 * N, 0.5 * N, 2.0 * N


@benchmark("hits", "% of L2 requests hit", counter=HITS)
def hits(N, counter, provider):
    """Counted."""
    return None if provider == "hand" else counted(N, provider)


@benchmark("traffic", "bytes of DRAM per byte counted", counter=BYTES, M=1)
def traffic(N, M, counter, provider):
    """Counted."""
    return 1.0 if provider == "hand" else counted(N, provider, f" per {2 * N}")


for each in seconds, hits, traffic:
    each.run()

if os.environ.get("STAND_IN_LAUNCHES"):
    raise SystemExit("under ncu, nothing runs after what that counts")
'''


class Site:
    """A tutorial that is measured by processes of its own, and by this one."""

    def __init__(self, root, patch):
        self.root, self.patch = root, patch
        (root / "tutorials").mkdir()
        (root / "tutorials" / "index.rst").touch()
        self.script = root / "tutorials" / f"{NAME}.py"
        self.script.write_text(SCRIPT)
        patch.setattr(tutorial, "TUTORIALS", self.script.parent)
        patch.setattr(measure, "LOGS", root / "logs")
        patch.setattr(os, "sched_getaffinity", lambda _: {0})
        there = ENVIRONMENT | {"gpu": "NVIDIA Stand-in 100"}
        patch.setattr(environment, "here", lambda _: dict(there))
        stand_in = str(HERE / "stand_in")
        patch.setenv("PYTHONPATH", stand_in)
        patch.setenv("PATH", stand_in, prepend=os.pathsep)
        patch.setenv("STAND_IN_GPUS", "1")
        patch.setattr(counters, "PLACES", ())
        self.said = []
        patch.setattr(progress, "say", self.said.append)

    def pages(self, **more):
        self.kept = stale.Kept(self.root)
        return self.kept.pages([self.script], **more)

    def measure(self):
        """What went wrong, and what was measured before and is now."""
        return measure.measure(self.pages(), self.kept.keep)

    def recorded(self):
        data = recording.read(GPU, NAME, self.root)
        return {
            plot: its | {"environment": recording.environment_of(data, its)}
            for plot, its in data["benchmarks"].items()
        }


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        yield Site(tmp_path_factory.mktemp("counted"), patch)


@pytest.fixture(scope="module")
def missing(site):
    """Everything is measured where there is no ncu; then ncu may count."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shutil, "which", lambda _: None)
        done = site.measure(), site.recorded()
    assert [page.why for page in site.pages()] == [
        "hits was not counted: " + MISSING
    ]
    assert [page.why for page in site.pages(same_machine=True)] == [
        "ncu was not found, is 2099.1.0.0"
    ]
    return done


@pytest.fixture(scope="module")
def refused(site, missing):
    """Then ncu is there, but may not read counters."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STAND_IN_NCU", "permission")
        return site.measure(), site.recorded()


NONE = (None,) * 3
BY_HAND = (1.0,) * 3
MISSING = "ncu, the profiler Nsight Compute, is missing"


def numbers(benchmark):
    """{(N, provider): (median, low, high)}"""
    return {
        (row["N"], row["provider"]): tuple(row[v] for v in recording.VALUES)
        for row in benchmark["rows"]
    }


@pytest.mark.parametrize(
    ("run", "reason", "ncu"),
    [
        ("missing", MISSING, "not found"),
        (
            "refused",
            "ncu may not read this GPU's counters (ERR_NVGPUCTRPERM)",
            "2099.1.0.0",
        ),
    ],
    ids=["no ncu", "no permission"],
)
def test_where_ncu_counts_nothing_the_recording_says_so(
    run, reason, ncu, request
):
    """And all is there but what only ncu knows."""
    problems, recorded = request.getfixturevalue(run)
    assert problems == []
    assert list(recorded) == ["seconds", "hits", "traffic"]
    for name in ("hits", "traffic"):
        assert recorded[name]["reason"] == reason
        assert recorded[name]["environment"]["ncu"] == ncu
    assert "reason" not in recorded["seconds"]
    assert "ncu" not in recorded["seconds"]["environment"]
    assert set(numbers(recorded["hits"]).values()) == {NONE}
    assert numbers(recorded["traffic"]) == {
        (n, provider): BY_HAND if provider == "hand" else NONE
        for n in (8, 16)
        for provider in ("triton", "torch", "hand")
    }
    assert numbers(recorded["seconds"])[8, "torch"] == (8.0, 4.0, 16.0)
    args = {"counter": "dram__bytes_read.sum", "M": 1}
    assert recorded["traffic"]["args"] == args


@pytest.fixture(scope="module")
def counted(site, refused):
    """At last ncu counts."""
    problems = site.measure()
    return problems, site.recorded()


def test_numbers_arrive_at_their_points(counted):
    """Bytes are added and divided; kernels at 80.5 % and 60.5 % for 100 and
    300 ns hit 65.5 %. What runs outside the range does not count."""
    problems, recorded = counted
    assert problems == []
    for name, values in {
        "traffic": {"triton": 1500 / 2, "torch": 3000 / 2, "hand": 1},
        "hits": {"triton": 65.5, "torch": 10, "hand": None},
    }.items():
        assert numbers(recorded[name]) == {
            (n, provider): (value,) * 3
            for n in (8, 16)
            for provider, value in values.items()
        }
        assert "reason" not in recorded[name]
        assert recorded[name]["environment"]["ncu"] == "2099.1.0.0"
        assert recorded[name]["method"] == (
            "Counted. Counted with ``ncu --clock-control none --cache-control "
            "all``."
        )


def test_another_ncu_makes_numbers_of_a_live_build_stale(
    site, counted, monkeypatch
):
    assert site.pages() == site.pages(same_machine=True) == []
    monkeypatch.setattr(counters, "version", lambda: "2100.1")
    assert site.pages() == []
    (page,) = site.pages(same_machine=True)
    assert page.why == "ncu was 2099.1.0.0, is 2100.1"


# What can go wrong, without processes. ---------------------------------------


def test_a_point_that_no_range_is_pushed_for_is_named(monkeypatch):
    def measure(N, counter, provider):
        """By ncu."""
        with torch.cuda.nvtx.range("another"):
            return 5.0 if N == 8 else (math.nan,) * 3

    nvtx = torch.cuda.nvtx
    monkeypatch.setattr(nvtx, "range_push", lambda name: None)
    monkeypatch.setattr(nvtx, "range_pop", lambda: None)
    stand_in = counters.Counting(None, NAME, {"name": None})
    stand_in.watch(nvtx)
    bench = triton.testing.Benchmark(
        *(["N"], [8, 16], "provider", ["triton"], ["T"], "name"),
        *({"counter": "dram__bytes_read.sum"}, "", "MB of DRAM"),
    )
    said = "name: nothing is counted for {'N': 16, 'provider': 'triton'}"
    with (
        replay.replaced(stand_in),
        pytest.raises(recording.RecordingError, match=re.escape(said)),
    ):
        triton.testing.perf_report(bench)(measure).run()


def test_a_point_that_ncu_saw_nothing_of_is_named(site, monkeypatch):
    """And no other benchmark is lost by that."""
    row = '"{0}","7","kernel","1  ""<default domain>:counted {1}:none""",'
    metric = '"dram__bytes_read.sum","byte","1,000,000"'
    said = "==PROF== Connected\n"
    said += '"ID","Process ID","Kernel Name","thread Domain:Push/Pop_Range",'
    said += '"Metric Name","Metric Unit","Metric Value"\n'
    said += row.format(0, 1) + metric + "\n"
    said += row.format(1, 2) + metric.replace("1,000,000", "n/a") + "\n"
    launches = counters.launched(said)
    assert launches == {1: [{"dram__bytes_read.sum": 1e6}], 2: [{}]}

    def filled(*ranges):
        rows = [
            {"N": n, "provider": "triton"} | dict.fromkeys(recording.VALUES)
            for n in range(len(ranges))
        ]
        measured = {"args": {"counter": "dram__bytes_read.sum"}, "rows": rows}
        measured |= {"x_names": ["N"], "method": "By ncu."}
        counters.fill(measured, ranges, launches)
        return rows

    assert filled((1, 1e6), None) == [
        {"N": 0, "provider": "triton", "median": 1, "low": 1, "high": 1},
        {"N": 1, "provider": "triton", "median": None, "low": None}
        | {"high": None},
    ]
    for number in (2, 3):
        with pytest.raises(
            recording.RecordingError,
            match=r"ncu counted no dram__bytes_read.sum for \(1,\), triton",
        ):
            filled((1, 1e6), (number, 1))


@pytest.mark.parametrize(
    ("said", "failed", "reason"),
    [
        ("==PROF== Disconnected\n", None, None),
        (
            "==ERROR== ERR_NVGPUCTRPERM - The user has no permission\n",
            None,
            "ncu may not read this GPU's counters (ERR_NVGPUCTRPERM)",
        ),
        (
            "==PROF== Connected\n==ERROR== Failed to find metric x\n",
            "it ended with 1",
            "ncu failed: Failed to find metric x",
        ),
        ("", "it ended with -9", "ncu failed: it ended with -9"),
    ],
)
def test_why_nothing_was_counted(said, failed, reason):
    assert counters.why_not(said, failed) == reason


def test_what_was_timed_is_replayed_while_others_are_counted():
    """Under ncu a clock would tell nothing."""
    rows = [{"N": 8, "provider": "triton", "median": 7.0, "low": 6.0}]
    rows[0]["high"] = 8.0
    found = {"timed": {"rows": rows}, "counted": None}
    stand_in = counters.Counting(None, NAME, found)
    bench = triton.testing.Benchmark(
        *(["N"], [8], "provider", ["triton"], ["T"], "timed", {}, "", "µs")
    )
    with replay.replaced(stand_in):
        table = triton.testing.perf_report(bench)(None).run(return_df=True)
    assert table["T (µs)"].tolist() == [7.0]


def test_ncu_is_found_where_installers_put_it(site, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", os.defpath)
    monkeypatch.setattr(counters, "PLACES", (str(tmp_path / "*/ncu"),))
    for name, version in {"2024.1": "2024.1.0", "2025.3": None}.items():
        path = tmp_path / name / "ncu"
        path.parent.mkdir()
        path.write_text(f"#!/bin/sh\necho Version {version}\n" * bool(version))
        path.chmod(0o755)
    path.write_text("#!/bin/sh\nexit 1\n")  # what it should start is gone
    assert counters.installed() == (str(tmp_path / "2024.1/ncu"), "2024.1.0")
    assert counters.version() == "2024.1.0"
