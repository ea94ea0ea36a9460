"""What a page says of the GPUs that it needs is what was compiled."""

from types import SimpleNamespace

import pytest
from browser import built

import tutorial
from compiled import aot, declared, kept, limits, occupancy
from compiled import sheets as made
from page import figures, gpu_needs

NAMES = list(map(tutorial.name_of, tutorial.scripts()))
EVERY = pytest.mark.parametrize("name", NAMES)
DOCS = tutorial.ROOT / "docs"
TARGETS = limits.SMALLEST, *limits.SHOWN


@EVERY
def test_a_page_says_for_which_gpus_its_kernels_compile(name):
    if not built.PAGES:
        pytest.fail(built.NO_SITE, pytrace=False)
    said = gpu_needs.said(DOCS, name)
    if not declared.kernels(name).kernels:  # all of them are other pages'
        return
    for target in TARGETS:
        gpu = aot.DEVICES[target][0].split()[-1]
        assert f"{gpu} ({target})" in said
    page = f"tutorials/{name}.html"
    assert built.soup(page).select_one(".bp-gpu-needs").string == said
    for language in built.EDITIONS:
        soup = built.soup(page, built.WHOLE / language.folder)
        line = soup.select_one(".bp-gpu-needs").string
        assert all(target in line for target in TARGETS)


def sheets(name, change):
    """What is kept of a page, but for a change."""
    return {
        (kernel, target, N): SimpleNamespace(shared=shared)
        for kernel in declared.kernels(name).kernels
        for target in TARGETS
        for N in declared.kernels(name).N
        if (shared := change(kernel, target)) is not None
    }


def test_a_gpu_for_which_a_page_does_not_compile_is_named(monkeypatch):
    """Of no kernel there is code, or one asks for more shared memory than
    a program can have."""
    name = "layer-norm/02-summing-rows"
    one, *_ = declared.kernels(name).kernels
    room = occupancy.LIMITS["sm_75"].shared

    def all_fit(kernel, target):
        return room if target == "sm_75" else 0

    def none_there(kernel, target):
        return None if target == "sm_75" else 0

    def one_too_large(kernel, target):
        return room + 1 if (kernel, target) == (one, "sm_75") else 0

    for change, fits in (
        (all_fit, True),
        (none_there, False),
        (one_too_large, False),
    ):
        found = sheets(name, change)
        monkeypatch.setattr(kept, "read", lambda page, found=found: found)
        assert kept.compiled_for(name) == {
            target: fits or target != "sm_75" for target in TARGETS
        }
        said = gpu_needs.said(DOCS, name)
        assert ("They do not for T4 (sm_75)." in said) != fits


def test_a_page_of_several_gpus_says_how_many():
    (name,) = [name for name in NAMES if name.startswith("several-gpus/")]
    assert "Timings need 2 GPUs at a time." in gpu_needs.said(DOCS, name)


def benchmark(args, *rows):
    return SimpleNamespace(args=args, rows=rows)


def test_how_large_a_matrix_is():
    half = {"dtype": "float16"}
    assert gpu_needs.largest_matrix(
        [
            benchmark(half | {"M": 4096}, {"N": 8}, {"N": 1 << 20}),
            benchmark(half | {"N": 16}, {"M": 4}),
            benchmark({"M": 1 << 20}, {"N": 1 << 20}),  # of no known type
            benchmark(half | {"M": 1 << 40}, {"N": "all"}),
            benchmark(half | {"ranks": 2}, {"N": 1 << 40}),
        ]
    ) == (2 * 4096 << 20)


@EVERY
def test_a_page_with_large_matrices_says_so(name):
    found = figures.of_page(DOCS, name)
    large = gpu_needs.largest_matrix(found) > 1e9
    assert ("several matrices" in gpu_needs.said(DOCS, name)) == large


@EVERY
@pytest.mark.long
def test_it_holds_at_the_narrowest_and_the_widest_rows_too(launches, name):
    page = declared.kernels(name)
    calls = [
        limits.call(name, page, N, target, dtype, last=True, then=made.brief)
        for target, compiles in kept.compiled_for(name).items()
        for dtype, sizes in page.sizes.items()
        for N in {min(sizes), max(sizes)}
        if compiles
    ]
    for call, found in zip(calls, launches(calls), strict=True):
        limit = occupancy.LIMITS[call.target]
        assert found
        for sheet in found:
            assert sheet.shared <= limit.shared - limit.reserved, sheet
