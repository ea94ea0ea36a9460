"""What is true of every tutorial, whatever it teaches."""

import ast
import re

import pytest
from project import ROOT

from measurements import benchmarks
from measurements.reach import Script, last_name, names

SCRIPTS = sorted((ROOT / "tutorials").glob("[0-9][0-9]-*.py"))
TEXTS = {path.stem: path.read_text(encoding="utf-8") for path in SCRIPTS}
EVERY = pytest.mark.parametrize("stem", TEXTS)

# These stand in every tutorial, the same to the letter: a download is alone.
SHARED = ("NoGPU", "STREAM", "device_time", "run", "claims")


def named(stem, name):
    """The source of a definition at the top level of a tutorial."""
    text = TEXTS[stem]
    for node in ast.parse(text).body:
        names = [getattr(node, "name", None)]
        if isinstance(node, ast.Assign):
            names = [getattr(target, "id", None) for target in node.targets]
        if name in names:
            first = min([node.lineno, *(d.lineno for d in decorators(node))])
            return "\n".join(text.splitlines()[first - 1 : node.end_lineno])
    return None


def decorators(node):
    return getattr(node, "decorator_list", [])


def cells(stem):
    """The code cells of a tutorial."""
    for cell in re.split(r"^# %%.*\n", TEXTS[stem], flags=re.MULTILINE)[1:]:
        lines = cell.splitlines()
        while lines and (not lines[0].strip() or lines[0].startswith("#")):
            lines.pop(0)
        yield [line for line in lines if line.strip()]


@EVERY
@pytest.mark.parametrize("name", SHARED)
def test_shared_cells_are_the_same(stem, name):
    assert named(stem, name) == named("01-layer-norm", name) is not None


@EVERY
def test_the_switch_is_the_same(stem):
    switch = re.compile(
        r"^ON_GPU = .*?^DEVICE = [^\n]*$", re.MULTILINE | re.DOTALL
    )
    first = switch.search(TEXTS["01-layer-norm"])[0]
    assert switch.search(TEXTS[stem])[0] == first


# A function cannot be cut into cells. This one is to be shortened when its
# page is measured again: an edit would make the recording stale.
LONGER = {"def _layer_norm_bwd_shared(": 41}


@EVERY
def test_cells_are_short(stem):
    for cell in cells(stem):
        most = max((LONGER.get(line, 40) for line in cell), default=40)
        assert len(cell) <= most, "\n".join(cell[:3])


def defined_by(node):
    """The functions, classes and CONSTANTS of a statement at the top level."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return {node.name}
    return {name for name in names(node).bound if name.isupper()}


def used_too_early(text):
    """(line, name) of what runs before all that it needs is defined.

    A module of definitions does not show it: there all of them come first.
    """
    body, early = ast.parse(text).body, set()
    known = set().union(*map(defined_by, body))
    needs = {}  # of what is defined so far
    for node in body:
        found = names(node)
        runs = found.used - found.bound
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            runs = found.used_now  # the rest runs when it is called
        left = list(runs & known)
        reached = set()
        while left:
            name = left.pop()
            if name not in needs:
                early.add((node.lineno, name))
            elif name not in reached:
                left += needs[name]
            reached.add(name)
        for name in defined_by(node):
            needs[name] = found.used & known
    return early


# Only a later benchmark asks for it.
LATER = {"registered"}


@EVERY
def test_nothing_runs_before_what_it_needs(stem):
    assert {name for _, name in used_too_early(TEXTS[stem])} <= LATER


def test_what_runs_too_early_is_found():
    kernel = "def f(x):\n    return g(x)\n\n"
    helper = "def g(x):\n    return x\n\n"
    assert used_too_early(kernel + "f(1)\n" + helper) == {(4, "g")}
    assert not used_too_early(kernel + helper + "f(1)\n")


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
    script = Script(text)
    reached = set()
    for root in benchmarks.made_by(script).values():
        reached.update((root, *script.reached(root)))
    for node in script.body:
        if node not in reached:
            for part in ast.walk(node):
                called = isinstance(part, ast.Call) and last_name(part.func)
                if called in CLOCKS:
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
    text = TEXTS["01-layer-norm"]
    assert len(list(timed_outside(f"{text}\n\n{clock}\n"))) == 1


@EVERY
def test_lines_are_short(stem):
    long = [line for line in TEXTS[stem].splitlines() if len(line) > 79]
    assert not long


@EVERY
def test_the_summary_is_one_sentence(stem):
    summary = " ".join(TEXTS[stem].split("\n\n")[1].split())
    assert re.fullmatch(r"[A-Z][^.]+\.", summary), summary


@EVERY
def test_it_imports_nothing_of_this_repository(stem):
    ours = {p.stem for p in (ROOT / "docs/_ext").iterdir()}
    for node in ast.walk(ast.parse(TEXTS[stem])):
        if isinstance(node, ast.Import):
            assert not ours & {a.name.split(".")[0] for a in node.names}
        if isinstance(node, ast.ImportFrom):
            assert node.module.split(".")[0] not in ours


@EVERY
def test_prose_renders_in_a_notebook(stem):
    """Roles other than math, and pictures from files, stay raw there."""
    prose = "\n".join(
        line[2:] for line in TEXTS[stem].splitlines() if line.startswith("# ")
    )
    prose += TEXTS[stem].split('"""')[1]
    assert not re.findall(r":(?!math:)[a-z]+:`", prose)
    directives = set(re.findall(r"^\.\. (\w+)::", prose, re.MULTILINE))
    assert directives <= {"math", "note", "warning"}
    assert r"\text{GROUP_" not in prose
    assert ">`__" not in prose  # sphinx-gallery leaves its second underscore


@EVERY
def test_no_speed_is_typed_by_hand(stem):
    claim = re.compile(
        r"^# .*\d(\.\d+)?\s?(x|×|times|%|percent) (faster|slower|speed)",
        re.MULTILINE,
    )
    assert not claim.search(TEXTS[stem])


def test_no_speed_is_typed_in_the_other_pages():
    claim = re.compile(r"\d(\.\d+)?\s?(x|×|times) (faster|slower|the speed)")
    for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.rst")):
        assert not claim.search(path.read_text(encoding="utf-8")), path


@EVERY
def test_solutions_follow_their_exercises(stem):
    # The empty line makes it the first line of the code, not prose.
    numbers = re.findall(r"^# %%\n\n# Solution (\d)", TEXTS[stem], re.M)
    assert len(numbers) == TEXTS[stem].count("\n# Solution")
    assert 3 <= len(numbers) <= 5
    assert numbers == [str(i + 1) for i in range(len(numbers))]
    for number in numbers:
        assert f"Exercise {number}" in TEXTS[stem]


@EVERY
def test_drawings_are_named(stem):
    """Their names become alt texts; measured figures make their own."""
    for node in ast.walk(ast.parse(TEXTS[stem])):
        if not isinstance(node, ast.Call):
            continue
        call = ast.unparse(node.func)
        if call == "plt.subplots":
            assert "num" in {k.arg for k in node.keywords}, node.lineno
        if call == "plt.figure":
            assert node.args, node.lineno
