"""What a recording says of a page: over whom, of which sizes, how fast."""

import pytest
from project import ENVIRONMENT

from page import cards, headlines

GPU = "NVIDIA H200"
SIZES = [1024, 2048, 4096, 8192, 16384, 32768]
CALLS = "Whole calls, all lines in turns."


def benchmark(mode, speeds, **changes):
    """A benchmark with a list of medians for each provider."""
    rows = [
        {"N": n, "provider": provider, "median": median}
        for provider, medians in speeds.items()
        for n, median in zip(SIZES, medians, strict=False)
    ]
    return {
        "unit": "GB/s",
        "args": {"M": 4096, "dtype": "float16", "mode": mode},
        "method": "Device time.",
        "x_names": ["N"],
        "rows": rows,
    } | changes


def of(*benchmarks):
    return headlines.of(recording(*benchmarks))


def recording(*benchmarks):
    return {
        "environment": ENVIRONMENT | {"gpu": GPU},
        "benchmarks": {str(i): each for i, each in enumerate(benchmarks)},
    }


def card(data):
    """What a card says of speeds; some words of it stay in one line."""
    return " ".join(cards.speeds(data).astext().split())


def over(headline):
    return [each.over for each in headline.passes]


def test_it_is_the_median_over_all_sizes():
    speeds = {"triton": [90, 30, 20], "torch": [10, 10, 10]}
    found = of(benchmark("forward", speeds))
    assert over(found) == [[("PyTorch", 3)]]
    assert list(map(str, found.where)) == [
        *("median of 3 widths", "M = 4096", "float16", GPU)
    ]


def test_the_best_rival_is_another_at_each_size():
    speeds = {
        "triton": [20, 20, 20],
        "another design": [99, 99, 99],
        "copy": [50, 50, 50],
        "torch": [10, 10, 40],
        "torch.compile": [25, 5, 5],
        "liger": [5, 20, None],
    }
    found = of(benchmark("backward", speeds))
    assert over(found) == [[("PyTorch", 2), ("the best rival", 0.8)]]


def test_a_rival_that_is_always_the_best_is_named():
    speeds = {"triton": [9, 9], "torch": [6, 6], "torch.compile": [10, 10]}
    found = of(benchmark("forward", speeds))
    assert over(found) == [[("PyTorch", 1.5), ("torch.compile", 0.9)]]
    said = card(recording(benchmark("forward", speeds)))
    assert "Forward 1.50 × PyTorch, 0.90 × torch.compile" in said


def test_if_pytorch_is_the_best_nothing_is_said_twice():
    speeds = {"triton": [9, 9], "torch": [6, 6], "liger": [5, 5]}
    assert over(of(benchmark("forward", speeds))) == [[("PyTorch", 1.5)]]


def test_benchmarks_that_are_alike_count_together():
    """Those of another type do not, nor those without our kernel."""
    args = {"M": 4096, "dtype": "float32", "mode": "forward"}
    wide = benchmark("forward", {"triton": [10], "torch": [10]})
    wide["rows"] = [row | {"N": 65536} for row in wide["rows"]]
    found = of(
        benchmark("forward", {"triton": [30, 30], "torch": [10, 10]}),
        benchmark("forward", {"other": [9, 9], "torch": [1, 1]}),
        benchmark("forward", {"triton": [9], "torch": [1]}, args=args),
        wide,
    )
    assert over(found) == [[("PyTorch", 3)]]
    assert found.passes[0].sizes == [(1024,), (2048,), (65536,)]


def test_of_groups_the_one_with_most_rivals_counts():
    step = {"triton": [10], "torch": [20], "liger": [30]}
    both = benchmark("forward and backward", step, unit="µs")
    found = of(benchmark("forward", {"triton": [1], "torch": [1]}), both)
    assert [each.mode for each in found.passes] == ["forward and backward"]
    assert over(found) == [[("PyTorch", 2)]]


def test_sizes_that_passes_have_each_of_their_own_are_counted():
    found = of(
        benchmark("forward", {"triton": [1, 1, 1], "torch": [1, 1, 1]}),
        benchmark("backward", {"triton": [1, 1], "torch": [1, 1]}),
    )
    assert str(found.where[0]) == "median of 3 and 2 widths"


def test_one_size_is_named():
    found = of(benchmark("forward", {"triton": [1], "torch": [1]}))
    assert found.where[0] == "N = 1024"


@pytest.mark.parametrize(
    ("count", "size", "times"), [(6, "N = 4096", 0.5), (2, "N = 2048", 1)]
)
def test_whole_calls_are_told_at_one_size(count, size, times):
    calls = {"triton": [20, 20, 40, 9, 9, 9], "torch": [10, 20, 20, 9, 9, 9]}
    speeds = {"triton": [3, 3], "torch": [1, 1]}
    data = recording(
        benchmark("forward", speeds),
        benchmark(
            "forward and backward",
            {name: times[:count] for name, times in calls.items()},
            method=CALLS,
            unit="µs",
        ),
    )
    found = headlines.of(data)
    assert over(found) == [[("PyTorch", 3)]]
    assert found.calls[0].over == [("PyTorch", times)]
    said = card(data)
    assert f"both passes {times:.2f} × PyTorch at {size}" in said
    assert "Forward 3.00 × PyTorch" in said


def test_calls_of_another_size_say_it():
    speeds = {"triton": [1], "torch": [1]}
    args = {"M": 16, "dtype": "float16", "mode": "forward"}
    calls = benchmark("forward", speeds, method=CALLS, unit="µs", args=args)
    found = of(benchmark("forward", speeds), calls)
    assert found.called_at == ["N = 1024", "M = 16"]


def test_without_a_rival_there_is_no_headline():
    for speeds in (
        {"triton": [1], "copy": [1]},
        {"torch": [1], "copy": [1]},
        {"triton": [1], "torch": [None]},
    ):
        assert of(benchmark("forward", speeds)) is None
