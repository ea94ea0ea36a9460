"""What is true of every tutorial, whatever it teaches."""

import ast
import itertools
import re

import pytest
from global_names import names_of
from project import ROOT

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
MEASURES = re.compile(r"^(report\(|judge\(|(\w+ = )?\w+\.run\()", re.MULTILINE)


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
        assert "\n# **Hint.** " in stub
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
# benchmark reaches the line.
CLOCKS = {
    *("do_bench", "do_bench_cudagraph", "perf_counter", "perf_counter_ns"),
    *("time", "time_ns", "monotonic", "monotonic_ns", "process_time"),
    *("process_time_ns", "timeit", "Timer", "Event", "elapsed_time"),
    *("profile", "get_summary"),
}


def timed_outside(text):
    """The lines that read a clock where no benchmark gets."""
    body = ast.parse(text).body
    names = {node: names_of(node) for node in body}
    makers, reached, before = {"perf_report"}, set(), None
    while before != len(reached):
        before = len(reached)
        used = set().union(*(names[n][1] | names[n][2] for n in reached))
        for node, (binds, reads, later) in names.items():
            if "perf_report" in ast.unparse(node) or makers & (reads | later):
                reached.add(node)
                if isinstance(node, ast.FunctionDef):
                    makers.add(node.name)
            if binds & used:
                reached.add(node)
    for node in body:
        for part in ast.walk(node) if node not in reached else ():
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
        "def f(): return torch.cuda.Event(enable_timing=True)",
    ],
)
def test_a_timing_outside_a_benchmark_is_found(clock):
    text = TEXTS["layer-norm/01-layer-norm"]
    assert len(list(timed_outside(f"{text}\n\n{clock}\n"))) == 1


@EVERY
def test_the_summary_is_one_sentence(stem):
    summary = " ".join(TEXTS[stem].split("\n\n")[1].split())
    assert re.fullmatch(r"[A-Z][^.]+\.", summary), summary


def prose(text):
    """Comments and docstrings of a script, each in one line."""
    script = ast.parse(text)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    for node in ast.walk(script):
        if isinstance(node, documented):
            yield " ".join((ast.get_docstring(node) or "").split())
    lines = [re.match(r"\s*#(?! %%) ?(.*)", x) for x in text.splitlines()]
    for block, found in itertools.groupby(lines, key=bool):
        if block:
            yield " ".join(" ".join(line[1] for line in found).split())


# Measured numbers stand in figures, tables and what a script prints.
NUMBER = (
    r"(?:\d+(?:[., ]\d+)*|two|three|four|five|six|seven|eight|nine|ten|"
    r"twenty|fifty|(?:a )?hundred|(?:a )?thousand|several|many|a few)"
)
PART = (
    r"(?:twice|double|half|thrice|(?:a|one|two|three|four)[ -]"
    r"(?:third|quarter|fifth|tenth)s?(?: of)?)"
)
TIMES = rf"(?:{PART}|{NUMBER} ?(?:x|×|times|-?fold|%|percent|per cent))"
QUICK = r"(?:fast|slow|quick)"
RATE = r"(?:speed|pace|time|bandwidth|throughput|performance)"
OURS = r"(?:copy|roof|peak|pytorch|torch|triton|liger|quack|apex)"
SPEED = re.compile(
    "|".join(
        (
            rf"{TIMES} (?:as {QUICK}\b|as long (?:as|to|for)|{QUICK}er)",
            rf"(?:takes?|took|needs?|lasts?) {TIMES} as long",
            rf"{TIMES} (?:of )?(?:the|its|their|that) (?:\w+ )?{RATE}\b",
            rf"{NUMBER} ?(?:%|percent|per cent) of (?:\w+'s? |the |a |its )*"
            rf"(?:{RATE}|{OURS})\b",
            rf"(?:third|quarter|fifth|tenth|half) {QUICK}er",
            rf"{QUICK}er (?:[^\s,.;:]+ ){{0,4}}by (?:about |nearly |almost |"
            rf"over |up to |more than |a factor of )*"
            rf"(?:{NUMBER}|{PART}|an order)",
            rf"(?:factor of|up to|by) {NUMBER} {QUICK}er",
            rf"(?:doubl|halv|tripl)(?:es|ed|ing|e) (?:the|its) {RATE}",
            rf"speed-?ups? (?:of|by) {NUMBER}",
            rf"{NUMBER} ?(?:x|×|times|-?fold) (?:the )?speed",
            rf"orders? of magnitude (?:{QUICK}er|more {RATE}|less {RATE})",
            rf"{NUMBER} ?(?:[kMGT]i?B/s|[GT]b/s|[GTP]FLOP)",
        )
    ),
    re.IGNORECASE,
)


@EVERY
def test_no_speed_is_typed_by_hand(stem):
    claims = [SPEED.search(part) for part in prose(TEXTS[stem])]
    assert not any(claims), [claim[0] for claim in claims if claim]


def test_no_speed_is_typed_in_the_other_pages():
    pages = [
        ROOT / "README.md",
        *(ROOT / "docs").glob("*.rst"),
        *(ROOT / "tutorials").rglob("*.rst"),
    ]
    for path in pages:
        text = " ".join(path.read_text(encoding="utf-8").split())
        claim = SPEED.search(text)
        assert not claim, (path.name, claim[0])


@pytest.mark.parametrize(
    "claim",
    [
        "It is 1.5 times as fast as PyTorch.",
        "The second kernel is faster by 30 %.",
        "It reaches 92 % of the copy.",
        "It moves 4200 GB/s.",
        "It moves 4.2 TB/s on this device.",
        "Ours is twice as fast.",
        "It takes half the time.",
        "It is an order of magnitude faster.",
        "It is slower by an order of magnitude.",
        "It is faster than the first one by more than two orders.",
        "1.3x faster",
        "3 × slower",
        "20 percent faster",
        "20 % slower than the copy",
        "It runs at 1.7 times the speed of torch.compile.",
        "A row takes twice as long as before.",
        "The wide one takes three times as long.",
        "It is a third faster.",
        "That doubles the bandwidth.",
        "a speedup of 1.8",
        "a 2x speedup",
        "faster by a factor of three",
        "a factor of 2 faster",
        "It has 60 percent of PyTorch's bandwidth.",
        "It runs at three quarters of the peak speed.",
        "It reaches 80% of peak.",
        "It is two times slower.",
        "This one is ten\n# times as fast.",
    ],
)
def test_a_speed_is_found(claim):
    assert any(map(SPEED.search, prose(f"# {claim}\nx = 1\n")))
    script = f'def f():\n    """{claim.replace("# ", "")}"""\n'
    assert any(map(SPEED.search, prose(script)))


@pytest.mark.parametrize(
    "words",
    [
        "An instruction loads 16 bytes.",
        "It leaves out half of the rows.",
        "The sum is read twice in a loop.",
        "The kernel goes over the chunks of a tile twice.",
        "Each runs 100 times on the same input.",
        "Median, 20 % and 80 % quantiles.",
        "We allow 16 times half a unit.",
        "A program keeps twice the registers of the other.",
        "The total is three times too large.",
        "Several programs run at the same time.",
        "It takes four rows at a time.",
        "The second kernel is faster where rows are narrow.",
        "Here the loss goes down, only slower.",
        "Two programs are slower than one.",
        "The block is nearly twice as wide as the row.",
        "The list is twice as long.",
        "90 % of the rows are of odd width.",
        "Its error is two orders of magnitude larger.",
        "Speed in GB/s is what the figure shows.",
        "Half a warp waits until the time has come.",
    ],
)
def test_what_is_no_speed_is_let_pass(words):
    assert not any(map(SPEED.search, prose(f"# {words}\nx = 1\n")))


def test_prose_is_not_code():
    script = "x = 1\n# One\n# two.\ny = '4200 GB/s'\n"
    assert list(prose(script)) == ["", "One two."]
