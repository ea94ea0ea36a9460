"""What stands between a benchmark and its measuring function."""

import math

import pytest
import triton.testing
from project import ENVIRONMENT, rows

from measurements import recording, replay


def benchmark(**changes):
    settings = {
        "x_names": ["N"],
        "x_vals": [8, 16],
        "line_arg": "provider",
        "line_vals": ["triton", "torch", "copy"],
        "line_names": ["Triton", "PyTorch", "Copy"],
        "ylabel": "GB/s",
        "plot_name": "double",
        "args": {"M": 4096},
    }
    return triton.testing.Benchmark(**(settings | changes))


def mark(fn, **changes):
    return triton.testing.perf_report(benchmark(**changes))(fn)


def unmeasurable(M, N, provider):
    """Never called in a replay."""
    raise AssertionError("the tutorial's own function was called")


def session(*gpus, names=None, **changes):
    stored = {
        "unit": "GB/s",
        "args": {"M": 4096},
        "method": "by hand",
        "rows": rows(),
    } | changes
    return replay.Session(
        "01-double",
        live=False,
        default_gpu=gpus[0],
        recordings={
            gpu: {
                "environment": ENVIRONMENT | {"gpu": gpu},
                "benchmarks": {"double": stored},
            }
            for gpu in gpus
        },
    )


@pytest.fixture(autouse=True)
def closed():
    import matplotlib.pyplot as plt

    yield
    plt.close("all")


def test_record_then_replay_gives_the_same_numbers():
    from measurements.record import Recorder

    def measure(M, N, provider):
        """By hand."""
        speed = N / len(provider)
        return speed, speed * 0.9, speed * 1.1

    recorder = Recorder("01-double")
    with replay.replaced(recorder):
        live = mark(measure).run(return_df=True)
    played = session("h200", **recorder.benchmarks["double"])
    with replay.replaced(replay.Runner(played)):
        again = mark(unmeasurable).run(return_df=True)
    assert live.equals(again)
    assert recorder.benchmarks["double"]["method"] == "By hand."


def test_the_patch_is_taken_back():
    run, do_bench = triton.testing.Mark._run, triton.testing.do_bench
    with replay.replaced(print), replay.watching(session("h200")):
        assert triton.testing.Mark._run is not run
        assert triton.testing.do_bench is not do_bench
    with pytest.raises(ZeroDivisionError), replay.replaced(print):
        1 / 0  # noqa: B018
    assert triton.testing.Mark._run is run
    assert triton.testing.do_bench is do_bench


def test_the_measuring_function_is_given_back():
    played = session("h200")
    ours = mark(unmeasurable)
    with replay.replaced(replay.Runner(played)):
        ours.run()
    assert ours.fn is unmeasurable


def test_a_missing_row_is_named():
    played = session("h200", rows=rows()[:-1])
    with (
        replay.replaced(replay.Runner(played)),
        pytest.raises(recording.RecordingError) as error,
    ):
        mark(unmeasurable).run()
    for part in ("tutorials/01-double.py", "double", "16", "copy", "make rec"):
        assert part in str(error.value)


def test_a_benchmark_that_was_not_recorded_is_named():
    with (
        replay.replaced(replay.Runner(session("h200"))),
        pytest.raises(recording.RecordingError, match="triple was not rec"),
    ):
        mark(unmeasurable, plot_name="triple").run()


def test_an_optional_peer_is_drawn_if_and_only_if_it_was_recorded():
    more = [row | {"provider": "liger"} for row in rows()[::3]]
    with replay.replaced(replay.Runner(session("h200", rows=rows() + more))):
        table = mark(unmeasurable).run(return_df=True)
    assert [c.removesuffix(" (GB/s)") for c in table.columns] == [
        *("N", "Triton", "PyTorch", "Liger", "Copy")
    ]
    apex = {
        "line_vals": ["triton", "apex", "copy"],
        "line_names": ["Triton", "Apex", "Copy"],
    }
    with replay.replaced(replay.Runner(session("h200"))):
        table = mark(unmeasurable, **apex).run(return_df=True)
    assert list(table.columns) == ["N", "Triton (GB/s)", "Copy (GB/s)"]


def test_null_is_a_gap():
    holes = rows()
    holes[0] |= {"median": None, "low": None, "high": None}
    with replay.replaced(replay.Runner(session("h200", rows=holes))):
        table = mark(unmeasurable).run(return_df=True)
    assert math.isnan(table["Triton (GB/s)"][0])
    assert recording.point(float("nan"))["median"] is None


def test_every_gpu_gets_a_figure_and_the_default_the_table():
    played = session("h200", "a100")
    with replay.replaced(replay.Runner(played)):
        table = mark(unmeasurable).run(return_df=True)
    assert [m.gpu for m in played.results["double"]] == ["h200", "a100"]
    assert table["Triton (GB/s)"][0] == 1000.25


def test_recording_an_unknown_unit_stops():
    from measurements.record import Recorder

    def measure(M, N, provider):
        """By hand."""
        return 1.0

    with (
        replay.replaced(Recorder("01-double")),
        pytest.raises(recording.RecordingError, match="unknown unit 'knots'"),
    ):
        mark(measure, ylabel="knots").run()


def test_a_measuring_function_must_say_its_method():
    from measurements.record import Recorder

    with (
        replay.replaced(Recorder("01-double")),
        pytest.raises(recording.RecordingError, match="without a docstring"),
    ):
        mark(lambda M, N, provider: 1.0).run()


def test_timing_outside_a_benchmark_is_noticed(monkeypatch):
    monkeypatch.setattr(triton.testing, "do_bench", lambda fn: 1.0)
    live = replay.Session("01-double", live=True)
    with replay.watching(live):
        triton.testing.do_bench(print)
    assert live.timed_outside
