"""What stands between a benchmark and its measuring function."""

import math

import pytest
import torch
import triton.testing
from project import ENVIRONMENT, rows
from sphinx.errors import ExtensionError

from measurements import recording, replay
from measurements.run_page import Measuring
from page import figures


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
    """By hand."""
    raise AssertionError("the tutorial's own function was called")


def session(*gpus, **changes):
    stored = {
        "unit": "GB/s",
        "args": {"M": 4096},
        "method": "By hand.",
        "x_names": ["N"],
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


def replayed(fn=unmeasurable, played=None, stored=None, **changes):
    """The table of a benchmark that gets what was recorded of another."""
    played = played or session("h200", **(stored or {}))
    with replay.replaced(replay.Runner(played)):
        return mark(fn, **changes).run(return_df=True)


def columns(table):
    return [name.removesuffix(" (GB/s)") for name in table.columns]


@pytest.fixture
def measuring():
    """What measures a page; it sends to a list."""
    sent = []
    found = Measuring(lambda **message: sent.append(message), "01-double")
    found.sent = sent
    return found


@pytest.fixture(autouse=True)
def closed():
    import matplotlib.pyplot as plt

    yield
    plt.close("all")


def test_record_then_replay_gives_the_same_numbers(measuring):
    def measure(M, N, provider):
        """By hand."""
        speed = N / len(provider)
        return speed, speed * 0.9, speed * 1.1

    with replay.replaced(measuring):
        live = mark(measure).run(return_df=True)
    (message,) = measuring.sent
    stored = message["measured"]
    assert message["benchmark"] == "double"
    data = {"code": "0", "environment": ENVIRONMENT | {"gpu": "H200"}}
    data = recording.sealed(data | {"benchmarks": {"double": stored}})
    assert recording.problem(data, "h200") is None
    played = session("h200", **stored)
    again = replayed(played=played)
    replay.require_all(played)
    assert live.equals(again)
    assert stored["method"] == "By hand."


def test_what_is_replaced_is_given_back():
    run, do_bench = triton.testing.Mark._run, triton.testing.do_bench
    with replay.replaced(print), replay.watching(session("h200")):
        assert triton.testing.Mark._run is not run
        assert triton.testing.do_bench is not do_bench
    with pytest.raises(ZeroDivisionError), replay.replaced(print):
        1 / 0  # noqa: B018
    ours = mark(unmeasurable)
    with replay.replaced(replay.Runner(session("h200"))):
        ours.run()
    assert ours.fn is unmeasurable
    assert triton.testing.Mark._run is run
    assert triton.testing.do_bench is do_bench


def by_eye(M, N, provider):
    """By eye."""


SIZES = {"x_vals": [8, 16, 32]}
RENAMED = {"line_vals": ["a", "b"], "line_names": ["A", "B"]}


@pytest.mark.parametrize(
    ("own", "place", "found", "expected"),
    [
        (SIZES, "x values", "[(8,), (16,)]", "[(8,), (16,), (32,)]"),
        ({"x_vals": [16, 8]}, "x values", "[(8,), (16,)]", "[(16,), (8,)]"),
        (RENAMED, "providers", "['copy', 'torch', 'triton']", "['a', 'b']"),
        ({"args": {"M": 1}}, "args", "{'M': 4096}", "{'M': 1}"),
        ({"x_names": ["K"]}, "x_names", "['N']", "['K']"),
        ({"ylabel": "µs"}, "unit", "GB/s", "µs"),
        ({"fn": by_eye}, "method", "'By hand.'", "'By eye.'"),
    ],
)
def test_a_recording_of_another_benchmark_is_named(
    own, place, found, expected
):
    with pytest.raises(recording.RecordingError) as error:
        replayed(**own)
    line = str(error.value)
    assert "\n" not in line
    for part in (
        "tutorials/01-double.py: the recording h200/01-double.json",
        f"benchmark double: {place}: found {found}, expected {expected}",
        "make record TUTORIALS=01",
    ):
        assert part in line


COUNTED = "By hand. Counted with ``ncu --clock-control none``."


@pytest.mark.parametrize(
    ("method", "fits"),
    [
        (COUNTED, True),
        ("By hand.", True),  # where ncu counted nothing
        (COUNTED + " And more.", False),
        ("By hand. Counted with ``ncu``.\n\n.. raw:: html", False),
    ],
)
def test_the_method_says_what_ncu_was_told(method, fits):
    args = {"counter": "hits"}
    stored = {"args": args, "method": method, "unit": "% of warps"}
    stored |= {"x_names": ["N"], "rows": rows(0.02)}
    bench = benchmark(args=args, ylabel="% of warps")
    problem = replay.misfit(stored, mark(unmeasurable), bench)
    assert (problem is None) == fits, problem


def test_a_removed_benchmark_and_a_new_one_are_named():
    played = session("h200")
    with pytest.raises(recording.RecordingError, match="double: found its n"):
        replay.require_all(played)
    with pytest.raises(recording.RecordingError, match="triple: found nothi"):
        replayed(plot_name="triple")
    replayed(played=played)
    replay.require_all(played)


def test_two_x_names_are_two_numbers():
    two = [
        {"M": m, **row} for m, row in zip((1, 1, 1, 2, 2, 2), rows(), strict=1)
    ]
    stored = {"rows": two, "x_names": ["M", "N"], "args": {}}
    own = {"x_names": ["M", "N"], "x_vals": [(1, 8), (2, 16)], "args": {}}
    table = replayed(stored=stored, **own)
    assert table["Triton (GB/s)"].tolist() == [1000.25, 2000.5]


def test_what_a_benchmark_is_run_with_must_be_in_its_args():
    with (
        replay.replaced(replay.Runner(session("h200"))),
        pytest.raises(recording.RecordingError, match="run with warps"),
    ):
        mark(unmeasurable).run(warps=4)


def test_the_figure_is_the_one_that_the_benchmark_drew():
    import matplotlib.pyplot as plt

    plt.figure("double")  # a name proves nothing
    played = session("h200")
    replayed(played=played)
    (measured,) = played.results["double"]
    assert measured.figure is plt.gcf()
    assert measured.figure is not plt.figure("double")


def test_an_optional_peer_is_drawn_if_and_only_if_it_was_recorded():
    more = [row | {"provider": "liger"} for row in rows()[::3]]
    table = replayed(stored={"rows": rows() + more})
    assert columns(table) == ["N", "Triton", "PyTorch", "Liger", "Copy"]
    apex = {
        "line_vals": ["triton", "torch", "apex", "copy"],
        "line_names": ["Triton", "PyTorch", "Apex", "Copy"],
    }
    assert "Apex" not in columns(replayed(**apex))


def test_peers_have_the_capitals_of_their_makers():
    """A page may call its own lines as it likes."""
    typed = {
        "line_vals": ["triton", "torch.compile", "quack"],
        "line_names": ["Two At A Lock", "Torch.compile", "Quack"],
    }
    found = [
        row | {"provider": name}
        for row in rows()[::3]
        for name in typed["line_vals"]
    ]
    table = replayed(stored={"rows": found}, **typed)
    assert columns(table) == ["N", "Two At A Lock", "torch.compile", "quack"]


def test_without_a_recording_there_is_no_figure():
    """In a preview: a tutorial whose function gives NaN has drawn one."""
    import matplotlib.pyplot as plt

    empty = replay.Session("01-double", live=False, reason="none")
    mine = plt.figure("a drawing").number
    table = replayed(lambda M, N, provider: 3 * [math.nan], played=empty)
    assert table["Triton (GB/s)"].isna().all()
    assert plt.get_fignums() == [mine]
    (missing,) = empty.results["double"]
    assert missing.reason == "none"


def test_null_is_a_gap():
    holes = rows()
    holes[0] |= {"median": None, "low": None, "high": None}
    table = replayed(stored={"rows": holes})
    assert math.isnan(table["Triton (GB/s)"][0])
    assert recording.point(float("nan"))["median"] is None


def test_every_gpu_gets_a_figure_and_the_default_the_table():
    played = session("h200", "a100")
    table = replayed(played=played)
    assert [m.gpu for m in played.results["double"]] == ["h200", "a100"]
    assert table["Triton (GB/s)"][0] == 1000.25


def test_a_measuring_function_must_say_its_method(measuring):
    """That is found before anything is measured."""
    with (
        replay.replaced(measuring),
        pytest.raises(recording.RecordingError, match="without a docstring"),
    ):
        mark(lambda M, N, provider: 1 / 0).run()


def test_a_benchmark_that_runs_twice_is_named(measuring):
    """Where it is measured, and where it is replayed."""

    def measure(M, N, provider):
        """By hand."""
        return 1.0

    for stand_in in measuring, replay.Runner(session("h200")):
        with replay.replaced(stand_in):
            mark(measure).run()
            with pytest.raises(recording.RecordingError, match="runs twice"):
                mark(measure).run()


@pytest.mark.parametrize(
    ("owner", "clock"),
    [(triton.testing, "do_bench"), (torch.cuda.Event, "elapsed_time")],
)
def test_timing_outside_a_benchmark_is_noticed(monkeypatch, owner, clock):
    monkeypatch.setattr(owner, clock, lambda fn: 1.0)
    live = replay.Session("01-double", live=True)
    with replay.watching(live):
        getattr(owner, clock)(print)
    assert live.timed_outside


@pytest.mark.parametrize(
    "change",
    [
        "plt.gca().get_lines()[0].set_ydata([9000, 9999])",
        "plt.gca().get_lines()[0].set_color('green')",
        "plt.gca().set_ylabel('TB/s')",
        "plt.gcf().legends[0].get_texts()[0].set_text('PyTorch')",
        "plt.gcf().text(0.5, 0.5, '9000 GB/s')",
        "plt.plot([8, 16], [9000, 9999])",
        "plt.gca().get_lines()[0].set_alpha(0)",
        "plt.gca().get_lines()[0].set_transform(plt.gca().transAxes)",
        "plt.gca().legend(plt.gca().get_lines(), ['PyTorch', 'Triton', ''])",
        "plt.gca().set_ylim(900, 1001)",
        "plt.gca().table([['9000 GB/s']])",
        "plt.gca().yaxis.set_major_formatter(lambda y, at: f'{2 * y:.0f}')",
        "plt.gcf().add_artist(plt.Line2D([0, 1], [0, 1]))",
        "plt.gcf().figimage([[1.0] * 9] * 9)",
    ],
)
def test_a_measured_figure_that_was_changed_is_refused(change):
    import matplotlib.pyplot as plt

    played = session("h200")
    with replay.replaced(replay.Runner(played)):
        mark(unmeasurable).run(show_plots=True)
    (results,) = played.results.values()
    figures._require_unchanged(played, results)
    exec(change, {"plt": plt})
    with pytest.raises(ExtensionError, match="expected what the benchmark"):
        figures._require_unchanged(played, results)
