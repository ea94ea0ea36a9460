"""Every kernel of every tutorial keeps its limits, on GPUs nobody has here.

The limits stand in the file of each page in tests/pages, beside the sentences
of the X-ray panels, which are tested too.
"""

import ast
import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest

import tutorial
from compiled import declared, kept, limits
from compiled.aot import COMPILER_ADDS_BARRIER, TARGETS, Call

PUBLISHED = list(map(tutorial.name_of, tutorial.scripts()))
PAGES = {name: declared.kernels(name) for name in PUBLISHED}
EVERY = pytest.mark.parametrize("name", PUBLISHED)


def some(sizes):
    """The widest, which needs the most registers; panels have others."""
    return sizes[-1:]


# What is tried: which widths, and on which GPUs.
EXTENT = pytest.mark.parametrize(
    "chosen, targets",
    [
        pytest.param(some, limits.SHOWN, id="some"),
        pytest.param(sorted, TARGETS, id="all", marks=pytest.mark.long),
    ],
)


def shapes(page, chosen, targets):
    """Each (target, N, dtype) at which the kernels of a page are held."""
    found = {(target, page.N[0], page.dtype) for target in targets}
    found |= {(target, N, page.dtype) for target, N in limits.shown(page)}
    for dtype, sizes in page.sizes.items():
        found |= {(limits.DEFAULT, N, dtype) for N in chosen(sizes)}
    return sorted(found)


def broken(name, kernel, built, N, dtype, text=None):
    """What a compiled kernel breaks, with the lines of code that do, and all
    numbers of it."""
    found = limits.broken(kernel, built, N, dtype)
    if not found:
        return []
    place = f"{built.kernel} of {name}, N = {N}, {dtype}, {built.target}"
    lines = [place, *map(str, found)]
    code = (text or tutorial.source(name)).splitlines()
    for line in sorted({m.line for x in found for m in x.where} - {None}):
        lines.append(f"line {line}: {code[line - 1].strip()}")
    facts = vars(limits.Facts(built))
    numbers = ("registers", "spills", "shared", "warps", "stages", "counts")
    return [*lines, *(f"  {name}: {facts[name]}" for name in numbers)]


def untrue(claims, built, N, dtype):
    """What is not true of a compiled kernel, by its place in the list."""
    return [
        f"{built.kernel}, N = {N}, {dtype}, {built.target}: number {number} "
        "in the list of its ``true``, in the file of the page, does not hold"
        for number, true in enumerate(claims(limits.Facts(built)), 1)
        if not true
    ]


# What the files say ----------------------------------------------------------


@EVERY
def test_every_kernel_is_declared(name):
    """Each one has a panel, is launched by ``also``, or called by another."""
    assert PAGES[name], f"{declared.file_of(name)} declares no kernels"
    file = declared.file_of(name).read_text(encoding="utf-8")
    named = set(re.findall(r"\bpage\.(_\w+)", file)) | set(PAGES[name].kernels)
    defined, called = set(), set()
    for node in ast.walk(ast.parse(tutorial.source(name))):
        if isinstance(node, ast.FunctionDef) and any(
            ast.unparse(d).startswith(("triton.jit", "gluon.jit"))
            for d in node.decorator_list
        ):
            defined.add(node.name)
            called |= {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    assert defined - called - named == set()


@pytest.mark.parametrize(
    "file", sorted(tutorial.FILES.glob("*/*.py")), ids=lambda file: file.stem
)
def test_a_file_has_its_page(file):
    assert tutorial.script_of(
        file.relative_to(tutorial.FILES).with_suffix("").as_posix()
    ).exists()


def test_the_files_are_read_without_what_a_build_lacks():
    """Before Sphinx-Gallery runs a tutorial, which says whether triton
    interprets; and no package of the tests alone is there."""
    code = (
        "import sys, tutorial\n"
        "from compiled import declared\n"
        "for file in tutorial.FILES.glob('*/*.py'):\n"
        "    name = file.relative_to(tutorial.FILES).with_suffix('')\n"
        "    assert declared.kernels(name.as_posix())\n"
        "print([name for name in sys.modules if name in ('triton', "
        "'hypothesis') or name.startswith('tutorial_')])"
    )
    path = tutorial.ROOT / "docs/_ext"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(path)},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "[]\n", done.stderr[-2000:]


def test_a_kernel_of_another_page_is_what_its_file_says(monkeypatch, tmp_path):
    """And panels are made anew when that changes."""
    name, other = "fused/01-add-layer-norm", "layer-norm/07-two-sweeps"
    kernel = "_layer_norm_bwd_means"
    here, there = (PAGES[page].kernels[kernel] for page in (name, other))
    assert here == replace(there, page=other)
    before, file_of = kept.made_from(name), declared.file_of
    (tmp_path / "page.py").write_text("another")
    changed = {other: tmp_path / "page.py"}
    monkeypatch.setattr(
        declared, "file_of", lambda page: changed.get(page) or file_of(page)
    )
    assert kept.made_from(name) != before


# What the compiler says ------------------------------------------------------


@EVERY
@EXTENT
def test_kernels_keep_their_limits(launches, name, chosen, targets):
    """And what is said of them in their panels is true."""
    page = PAGES[name]
    tried = shapes(page, chosen, targets)
    calls = [limits.call(name, page, N, t, dtype) for t, N, dtype in tried]
    panels = {(t, N, page.dtype) for t, N in limits.shown(page)}
    found = []
    for shape, launched in zip(tried, launches(calls), strict=True):
        target, N, dtype = shape
        builds = limits.by_name(launched)
        assert builds.keys() == limits.kernels_for(target, page), shape
        for kernel, built in builds.items():
            facts = page.kernels[kernel]
            found += broken(name, facts, built, N, dtype)
            if shape in panels:
                claims = {page.N[0]: facts.true} | facts.true_at
                if N in claims:
                    found += untrue(claims[N], built, N, dtype)
    assert not found, "\n" + "\n".join(found)


@EVERY
@EXTENT
def test_what_else_is_launched_compiles(launches, name, chosen, targets):
    page = PAGES[name]
    if page.also:
        targets = [limits.DEFAULT] if chosen is some else targets
        calls = [
            limits.call(name, page, page.N[0], target, run=page.also)
            for target in targets
        ]
        assert all(launches(calls))


CASES = [(name, case) for name in PUBLISHED for case in PAGES[name].cases]


@EXTENT
@pytest.mark.parametrize("name, case", CASES)
def test_limits_in_every_case(launches, name, case, chosen, targets):
    page, case = PAGES[name], PAGES[name].cases[case]
    tried = [
        (N, dtype) for dtype in case.sizes for N in chosen(case.sizes[dtype])
    ]
    calls = [
        limits.call(name, page, N, limits.DEFAULT, dtype, case.run)
        for N, dtype in tried
    ]
    seen, found = set(), []
    for shape, launched in zip(tried, launches(calls), strict=True):
        for built in launched:
            seen.add(built.kernel)
            kernel = limits.in_case(page, case, built.kernel)
            found += broken(name, kernel, built, *shape)
            if built.kernel in case.true:
                found += untrue(case.true[built.kernel], built, *shape)
    assert not found, "\n" + "\n".join(found)
    assert seen >= case.kernels.keys() | case.true.keys()


@pytest.mark.parametrize("target", TARGETS)
def test_a_script_is_not_told_of_this_machine(launches, target):
    """On a machine with NVIDIA GPUs torch cannot count those of AMD: it ends
    with an error."""
    name = "several-gpus/01-layer-norm"
    assert launches([Call(name, "ask_for_gpus", {}, target)])


# What is found ---------------------------------------------------------------

LOCK, AHEAD = "layer-norm/03-lock", "layer-norm/05-chunks"
# What is replaced, and what is said of it.
FAULTS = {
    "spill": (
        LOCK,
        "        FLAW=flaw,\n        num_warps=warps,",
        "        FLAW=flaw,\n        num_warps=1,",
        "spills",
    ),
    "scalar load": (
        LOCK,
        "    x = tl.load(x_ptr + row * N + cols, mask",
        "    x = tl.load(x_ptr + row * N + (cols ^ 1), mask",
        r"narrow_loads: limit 0, now 32\n"
        r"line \d+: x = tl.load\(x_ptr \+ row \* N \+ \(cols \^ 1\), mask",
    ),
    "barrier": (
        LOCK,
        "        tl.debug_barrier()\n\n    # Free the lock.",
        "        pass\n\n    # Free the lock.",
        "releases without a barrier: limit 0, now 1",
    ),
    "release": (
        LOCK,
        "tl.atomic_xchg(lock_ptr, 2, sem=RELEASE)",
        'tl.atomic_xchg(lock_ptr, 2, sem="relaxed")',
        "releases of a lock: limit 1, now 0",
    ),
    "float64": (
        LOCK,
        "    rstd = 1 / tl.sqrt(variance + eps)",
        "    rstd = 1 / tl.sqrt(variance.to(tl.float64) + eps)",
        "arithmetic in float64: limit False, now True",
    ),
    "no loads ahead": (
        AHEAD,
        'plan["STAGES"] = 1 + min(98304 // tile, 3)',
        'plan["STAGES"] = 1',
        "loads ahead, by asynchronous copies: limit True, now False",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(launches, fault):
    name, old, new, said = FAULTS[fault]
    page, N = PAGES[name], PAGES[name].N[0]
    call = limits.call(name, page, N, "sm_90", replace=[(old, new)])
    text = tutorial.source(name).replace(old, new)
    (launched,) = launches([call])
    found = "\n".join(
        line
        for kernel, built in limits.by_name(launched).items()
        for line in broken(
            name, page.kernels[kernel], built, N, page.dtype, text
        )
    )
    if fault == "barrier" and COMPILER_ADDS_BARRIER:
        assert not found
    else:
        assert re.search(said, found)


def test_what_is_not_true_is_found(launches):
    """An empty list would be."""
    page = PAGES[LOCK]
    (launched,) = launches([limits.call(LOCK, page, page.N[0], "sm_90")])
    (built, *_) = launched
    found = untrue(lambda code: [True, code.loaded == 1], built, 4096, "half")
    assert re.search("number 2 in the list", *found)
    for each in PAGES.values():
        for kernel in each.kernels.values():
            assert kernel.true(limits.Facts(built))
