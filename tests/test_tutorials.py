"""What is true of every tutorial, whatever it teaches."""

import ast
import re

import pytest

import tutorial
from cells import shared

SCRIPTS = tutorial.scripts()
TEXTS = {tutorial.name_of(path): path.read_text("utf-8") for path in SCRIPTS}
EVERY = pytest.mark.parametrize("stem", TEXTS)


CELL = re.compile(r"^# %%.*\n", re.MULTILINE)
# A cell is folded by its first line, after an empty one: without that the
# comment would be prose.
FOLDED = re.compile(r"\n# (Scaffold: |Drawing: |Solution (?=\d))(.*)\n")
# A comment that was to fold a cell, perhaps.
NEARLY = re.compile(
    r"^ *# *(?:scaffold|drawing|solution)s?\b *[:\d]", re.I | re.M
)


def cells(text):
    """The cells of a script, the introduction before the first left out."""
    return CELL.split(text)[1:]


@EVERY
def test_the_first_cell_is_shared(stem):
    """Imports, the interpreter, and the device, as on every page."""
    found = FOLDED.match(cells(TEXTS[stem])[0])
    assert found and found[0].strip() in shared()


# The first line that draws a benchmark.
MEASURES = re.compile(
    r"^((report|judge|in_percent)\(|(\w+ = )?\w+\.run\()", re.MULTILINE
)


def share_before(text):
    """Of a text, before its first figure that is measured."""
    return text[: MEASURES.search(text).start()].count("\n") / text.count("\n")


@EVERY
def test_something_is_measured_in_the_first_third(stem):
    """Of the script, or of what a reader sees of it."""
    seen = "".join(c for c in cells(TEXTS[stem]) if not FOLDED.match(c))
    share = min(share_before(TEXTS[stem]), share_before(seen))
    assert share <= 1 / 3, (
        f"{share:.0%} of the lines stand before the first figure that is "
        "measured: measure the forward pass before the backward one is begun"
    )


@EVERY
def test_comments_that_fold_are_whole(stem):
    """Each that looks like one folds its cell and says what it gives."""
    folded = [m for c in cells(TEXTS[stem]) if (m := FOLDED.match(c))]
    assert len(NEARLY.findall(TEXTS[stem])) == len(folded)
    for found in folded:
        assert found[2].strip(), found[0]


@EVERY
def test_exercises_are_whole(stem):
    """One or two, each with a hint, a checker, a stub and a solution."""
    text = TEXTS[stem]
    folded = [m[1] for c in cells(text) if (m := FOLDED.match(c))]
    count = folded.count("Solution ")
    assert 1 <= count <= 2
    for number in range(1, count + 1):
        start = text.index(f"Exercise {number}")
        end = text.index(f"# %%\n\n# Solution {number}")
        stub, solution = text[start:end], text[end:]
        assert re.search(r"\n# \*\*Hint( 1)?\.\*\* ", stub)
        assert f"def exercise_{number}(" in stub
        # The stub is tried; the solution must pass.
        assert stub.count(f"exercise_{number}(") == 2
        assert f"\nassert exercise_{number}(" in solution


@EVERY
def test_drawings_are_folded(stem):
    for cell in cells(TEXTS[stem]):
        if re.search(r"^plt\.(figure|subplots)\(", cell, re.MULTILINE):
            found = FOLDED.match(cell)
            assert found and found[1] == "Drawing: ", cell[:200]


# What reads a clock. A number that it gives has no passport, unless a
# benchmark calls the function around it.
CLOCKS = {
    *("do_bench", "do_bench_cudagraph", "perf_counter", "perf_counter_ns"),
    *("time", "time_ns", "monotonic", "monotonic_ns", "process_time"),
    *("process_time_ns", "timeit", "Timer", "Event", "elapsed_time"),
    *("profile", "get_summary"),
}


def timed_outside(text):
    """The lines that read a clock in no function."""
    for node in ast.parse(text).body:
        within = isinstance(node, ast.FunctionDef | ast.ClassDef)
        for part in () if within else ast.walk(node):
            if isinstance(part, ast.Call):
                name = getattr(part.func, "attr", getattr(part.func, "id", ""))
                if name in CLOCKS:
                    yield part.lineno


@EVERY
def test_nothing_is_timed_outside_a_benchmark(stem):
    assert not list(timed_outside(TEXTS[stem]))


@pytest.mark.parametrize(
    "clock",
    [
        "triton.testing.do_bench(print)",
        "import time\nstart = time.perf_counter()",
        "print(torch.cuda.Event(enable_timing=True))",
    ],
)
def test_a_timing_outside_a_benchmark_is_found(clock):
    text = TEXTS["layer-norm/01-layer-norm"]
    assert len(list(timed_outside(f"{text}\n\n{clock}\n"))) == 1


@EVERY
def test_the_summary_is_one_sentence(stem):
    summary = " ".join(TEXTS[stem].split("\n\n")[1].split())
    assert re.fullmatch(r"[A-Z][^.]+\.", summary), summary
