"""Every kernel of every tutorial keeps its limits, on GPUs nobody has here.

The limits stand in docs/kernels.toml, beside the sentences of the X-ray
panels, which are tested too.
"""

import ast
import re
import subprocess
from functools import cache

import pytest

import tutorial
from compiled import limits
from compiled.aot import COMPILER_ADDS_BARRIER, TARGETS, Call
from tutorial import rows, source

PAGES = limits.pages()
PUBLISHED = list(map(tutorial.name_of, tutorial.scripts()))
EVERY = pytest.mark.parametrize("stem", PUBLISHED)


def some(sizes):
    """The narrowest, one of the middle and the widest."""
    return sorted({sizes[0], sizes[len(sizes) // 2], sizes[-1]})


def shapes_of(page, sizes):
    """(N, dtype) at which limits hold. With some widths only: of other types
    than the page's own the widest, which needs the most registers."""
    return [
        (N, dtype)
        for dtype, given in page.get("sizes", {}).items()
        for N in (
            given[-1:]
            if sizes is some and dtype != page["dtype"]
            else sizes(given)
        )
    ]


SIZES = pytest.mark.parametrize(
    "sizes",
    [
        pytest.param(some, id="some widths"),
        pytest.param(sorted, id="all widths", marks=pytest.mark.long),
    ],
)


@pytest.fixture(scope="session")
def compiled(launches):
    """For each call the last launch of each kernel."""
    return lambda calls: [limits.by_name(made) for made in launches(calls)]


def over(stem, entry, built, N, dtype, replace=()):
    """The limits that a kernel breaks, and the lines of code that do."""
    if not (found := limits.broken(entry, built, N, dtype)):
        return []
    place = f"{built.kernel} of {stem}, N = {N}, {dtype}, {built.target}"
    lines = [place, *(f"  {problem}" for problem in found)]
    text = source(stem)
    for old, new in replace:
        text = text.replace(old, new)
    wrong = {m.line for problem in found for m in problem.where}
    for line in sorted(wrong - {None}):
        line = rows(text)[line - 1]
        code = text.splitlines()[line - 1].strip()
        lines.append(f"  line {line}: {code}")
    return lines


def all_over(stem, builds, N, dtype, compiled):
    """The same of every kernel, with all numbers of those that break one."""
    found = []
    for name, entry in limits.entries(PAGES[stem]).items():
        if lines := over(stem, entry, builds[name], N, dtype):
            found += lines + changes(stem, N, dtype, builds[name], compiled)
    return found


def changes(stem, N, dtype, now, compiled):
    """All numbers of a kernel, those of the version before beside them."""
    before = {}
    if text := earlier(stem):
        call = limits.call(
            stem, PAGES[stem], N, now.target, dtype, source=text
        )
        try:
            (builds,) = compiled([call])
            before = dict(limits.numbers(builds[now.kernel]))
        except (RuntimeError, KeyError):
            pass  # it had no such kernel
    lines = [f"  {'':27}{'before':31}now"]
    for what, value in limits.numbers(now):
        lines.append(f"  {what:27}{before.get(what, '?')!s:31}{value}")
    return lines


def earlier(stem):
    """The last committed text of a tutorial that differs from the file."""
    path = f"tutorials/{stem}.py"

    def git(*args):
        done = subprocess.run(
            ["git", *args],
            cwd=tutorial.ROOT,
            capture_output=True,
            text=True,
        )
        return done.stdout if done.returncode == 0 else ""

    for commit in git("log", "-2", "--format=%H", "--", path).split():
        text = git("show", f"{commit}:{path}")
        if text and text != source(stem):
            return text
    return None


# What the file says ----------------------------------------------------------


@EVERY
def test_every_kernel_stands_in_the_file(stem):
    """Each one is launched, or called by one that is."""
    assert stem in PAGES, f"docs/kernels.toml has no entry for {stem}"
    code = PAGES[stem]["run"] + PAGES[stem].get("also", "")
    named = set(re.findall(r"\b_\w+", code)) | set(limits.entries(PAGES[stem]))
    defined, called = set(), set()
    for node in ast.walk(ast.parse(source(stem))):
        if isinstance(node, ast.FunctionDef) and any(
            ast.unparse(d).startswith("triton.jit")
            for d in node.decorator_list
        ):
            defined.add(node.name)
            called |= {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    assert defined - called - named == set()


@pytest.mark.parametrize("stem", PAGES)
def test_entries_have_what_a_panel_needs(stem):
    page = PAGES[stem]
    assert {"run", "M", "N", "dtype"} <= page.keys()
    assert set(page) - set(limits.entries(page)) <= {
        *("run", "also", "M", "N", "dtype", "sizes", "cases"),
    }
    known = {"copies", "releases", *limits.LIMITS}
    for case in page.get("cases", {}).values():
        kernels = limits.entries(case)
        assert case.keys() - kernels <= {"run", *limits.DTYPES, *limits.LIMITS}
        assert kernels.keys() <= page.keys()
        for entry in kernels.values():
            assert entry.keys() <= {"true", "triton", *known}
    for name, entry in limits.entries(page).items():
        assert entry.keys() <= {"look", "true", "triton", *known}, name
        for changed in entry.get("triton", {}).values():
            assert changed.keys() <= known, name
        assert entry["look"].strip()
        assert str(page["N"][0]) in entry["true"], name


# What the compiler says ------------------------------------------------------


@pytest.fixture(scope="module")
def everywhere(compiled):
    """The builds of a tutorial: {(target, N, dtype): {kernel: Built}}."""

    @cache
    def builds(stem, sizes, targets):
        page = PAGES[stem]
        first, dtype = page["N"][0], page["dtype"]
        shapes = {(t, first, dtype) for t in targets}
        shapes |= {(t, N, dtype) for t, N in limits.shown(page)}
        shapes |= {
            (limits.DEFAULT, N, dtype) for N, dtype in shapes_of(page, sizes)
        }
        shapes = sorted(shapes)
        calls = [
            limits.call(stem, page, N, t, dtype) for t, N, dtype in shapes
        ]
        return dict(zip(shapes, compiled(calls), strict=True))

    # The same question is asked in several ways; each is compiled once.
    return lambda stem, sizes=some, targets=limits.SHOWN: builds(
        stem, sizes, targets
    )


@EVERY
def test_run_launches_what_has_a_panel(everywhere, stem):
    """At the widest rows, which may have kernels of their own."""
    page = PAGES[stem]
    N, dtype = page["N"][0], page["dtype"]
    N = max([N, *page.get("sizes", {}).get(dtype, ())])
    builds = everywhere(stem)["sm_90", N, dtype]
    assert set(builds) == set(limits.entries(page))


@pytest.mark.parametrize(
    "targets",
    [
        pytest.param([limits.DEFAULT], id="one target"),
        pytest.param(TARGETS, id="all targets", marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("stem", [s for s in PUBLISHED if "also" in PAGES[s]])
def test_what_else_is_launched_compiles(launches, stem, targets):
    page = PAGES[stem]
    calls = [
        limits.call(stem, page, page["N"][0], target, run="also")
        for target in targets
    ]
    for launched in launches(calls):
        assert launched


@pytest.mark.parametrize("target", TARGETS)
def test_a_script_is_not_told_of_this_machine(launches, target):
    """On a machine with NVIDIA GPUs torch cannot count those of AMD: it ends
    with an error."""
    code = "assert torch.cuda.device_count() == 2"
    assert launches([Call("layer-norm/01-layer-norm", code, {}, target)])


@EVERY
@pytest.mark.parametrize(
    "target",
    [
        pytest.param(t, marks=() if t in limits.SHOWN else pytest.mark.long)
        for t in TARGETS
    ],
)
def test_limits_on_every_target(everywhere, compiled, stem, target):
    N, dtype = PAGES[stem]["N"][0], PAGES[stem]["dtype"]
    targets = limits.SHOWN if target in limits.SHOWN else tuple(TARGETS)
    builds = everywhere(stem, targets=targets)[target, N, dtype]
    found = all_over(stem, builds, N, dtype, compiled)
    assert not found, "\n" + "\n".join(found)


@EVERY
@SIZES
def test_limits_at_every_size(everywhere, compiled, stem, sizes):
    found = []
    for N, dtype in shapes_of(PAGES[stem], sizes):
        builds = everywhere(stem, sizes)["sm_90", N, dtype]
        found += all_over(stem, builds, N, dtype, compiled)
    assert not found, "\n" + "\n".join(found)


CASES = [
    pytest.param(stem, name, id=f"{stem}-{name}")
    for stem in PUBLISHED
    for name in PAGES[stem].get("cases", ())
]


@SIZES
@pytest.mark.parametrize("stem, name", CASES)
def test_limits_in_every_case(launches, stem, name, sizes):
    case = PAGES[stem]["cases"][name]
    shapes, calls = zip(
        *limits.calls_of(stem, PAGES[stem], case, sizes), strict=True
    )
    seen, found = set(), []
    for (N, dtype), launched in zip(shapes, launches(calls), strict=True):
        for built in launched:
            seen.add(built.kernel)
            entry = limits.in_case(PAGES[stem], case, built.kernel)
            found += over(stem, entry, built, N, dtype)
            facts = limits.Facts(built)
            for sentence in case.get(built.kernel, {}).get("true", ()):
                if not facts.say(sentence, N):
                    found.append(f"{built.kernel}, {N}, {dtype}: {sentence}")
    assert not found, "\n" + "\n".join(found)
    assert seen >= limits.entries(case).keys()


@EVERY
def test_sentences_are_true(everywhere, stem):
    page = PAGES[stem]
    for name, entry in limits.entries(page).items():
        for N, sentences in entry["true"].items():
            for target, shape in limits.shown(page):
                if shape != int(N):
                    continue
                builds = everywhere(stem)[target, shape, page["dtype"]]
                facts = limits.Facts(builds[name])
                for sentence in sentences:
                    said = facts.say(sentence, shape)
                    assert said, (name, target, N, sentence)


# What is found ---------------------------------------------------------------

LOCK, AHEAD = "layer-norm/03-lock", "layer-norm/05-chunks"
# What is replaced, and what is said of it.
FAULTS = {
    "spill": (
        LOCK,
        "_layer_norm_bwd[(programs,)](*args, num_warps=warps)",
        "_layer_norm_bwd[(programs,)](*args, num_warps=1)",
        "spills",
    ),
    "scalar load": (
        LOCK,
        "    x = tl.load(x_ptr + row * N + cols, mask",
        "    x = tl.load(x_ptr + row * N + (cols ^ 1), mask",
        r"narrow_loads: limit 0, now 32\n"
        r"  line \d+: x = tl.load\(x_ptr \+ row \* N \+ \(cols \^ 1\), mask",
    ),
    "barrier": (
        LOCK,
        "        tl.debug_barrier()  # every thread has stored its columns\n",
        "        pass\n",
        "releases without a barrier: limit 0, now 1",
    ),
    "release": (
        LOCK,
        "tl.atomic_xchg(locks_ptr + buffer, 2, sem=RELEASE)",
        'tl.atomic_xchg(locks_ptr + buffer, 2, sem="relaxed")',
        "releases of a lock: limit 1, now 0",
    ),
    "float64": (
        LOCK,
        "rstd = 1 / tl.sqrt(tl.sum(x * x) / N + eps)",
        "rstd = 1 / tl.sqrt(tl.sum(x * x).to(tl.float64) / N + eps)",
        "arithmetic in float64: limit False, now True",
    ),
    "no loads ahead": (
        AHEAD,
        '{"STAGES": 1 + min(98304 // tile, 3)}',
        '{"STAGES": 1}',
        "loads ahead, by asynchronous copies: limit True, now False",
    ),
}


@pytest.fixture(scope="module")
def faulty(compiled):
    """Each tutorial with one fault, at the first shape on sm_90."""
    calls = [
        limits.call(
            stem, PAGES[stem], PAGES[stem]["N"][0], "sm_90",
            replace=[(old, new)],
        )
        for stem, old, new, _ in FAULTS.values()
    ]  # fmt: skip
    return dict(zip(FAULTS, compiled(calls), strict=True))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(faulty, fault):
    stem, old, new, said = FAULTS[fault]
    N, dtype = PAGES[stem]["N"][0], PAGES[stem]["dtype"]
    found = "\n".join(
        line
        for name, entry in limits.entries(PAGES[stem]).items()
        for line in over(
            stem, entry, faulty[fault][name], N, dtype, [(old, new)]
        )
    )
    if fault == "barrier" and COMPILER_ADDS_BARRIER:
        assert not found
    else:
        assert re.search(said, found)


def test_the_message_shows_before_and_after(faulty, compiled, monkeypatch):
    # The version before the fault is the file as it is.
    monkeypatch.setitem(globals(), "earlier", source)
    N, dtype = PAGES[LOCK]["N"][0], PAGES[LOCK]["dtype"]
    found = "\n".join(
        all_over(LOCK, faulty["scalar load"], N, dtype, compiled)
    )
    assert re.search(r"^ +before +now$", found, re.MULTILINE)
    loads = r"^ +Global loads +12 × 16 bytes +8 × 16 bytes, 32 × 2 bytes$"
    assert re.search(loads, found, re.MULTILINE)


def test_the_version_before_is_found():
    """In a clone that has history; an archive of the files has none."""
    text = earlier(LOCK)
    assert text is None or text != source(LOCK)
