"""What must hold of the page "Weight gradients: who adds up the rows?"."""

import functools
import re

import pytest
import torch

from compiled.declared import Kernel, Kernels
from conformance import LayerNorm, Page, below_zero, too_wide
from conformance.layer_norm import full_size


def run(page, M, N, dtype):
    x, w, b, dy = (t.detach() for t in page.inputs(M, N, dtype))
    mean, rstd = torch.empty(2, M, device=page.DEVICE)
    for name in "columns", "split", "atomics", "triton":
        page.DESIGNS[name](dy, x, w, mean, rstd, dtype)
    page.layer_norm(x, (N,), w, b)


def also(page, M, N, dtype):
    tensors = page.given(10, 24, torch.float32)
    for keep in page._store, page._atomic_add, page._add_to_few:
        page.by_rows(*tensors, 6, 4, torch.empty(3, 2, 24), keep)
    x, *_ = page.inputs(M, N, dtype)
    for reads in 1, 2:  # the ceilings
        page._move[(M,)](x, x, M * N // 2, reads, 1, BLOCK_SIZE=4096)


PUBLISHED = "2026-11-22"

KERNELS = Kernels(
    run=run,
    also=also,
    M=4096,
    N=[4096],
    dtype="float16",
    sizes={
        "float16": [1024, 1536, 4096, 4608, 8192, 8704, 12288],
        "bfloat16": [4096],
        "float32": [1024, 4096],
    },
    kernels={
        "_layer_norm_bwd": Kernel(
            look="""
            Shown with a buffer for each program.
            The loop loads ``x``, ``dy`` and ``w`` by 16 bytes and stores
            ``dx``; the two sums stay in registers and are stored once, after
            it.
            """,
            true=lambda code: [
                code.count("atomic") == 0,
                code.loaded >= 3 * 2 * 4096,
            ],
            narrow_loads=2,  # mean and rstd
        ),
        "_layer_norm_bwd_columns": Kernel(
            look="""
            Shown split over rows.
            A warp reads a few rows of 32 columns, and threads add up the rows
            of a tile only at the end: look for the shuffles after the loop.
            """,
            true=lambda code: [
                code.count("load", 16) > 0 or code.amd,
                code.count("shuffle") > 0,
            ],
            narrow_loads=64,  # mean and rstd of the rows of a tile
            narrow_stores=2,  # one column a thread
        ),
        "_layer_norm_bwd_add_up": Kernel(
            look="""
            16 columns of all buffers a program: 64 bytes side by side, by 16
            bytes.
            """,
            true=lambda code: [
                code.count("load", 16) > 0,
                code.narrow("load") == 0,
            ],
            narrow_loads=1,  # of few buffers
            narrow_stores=1,  # of 16 columns
        ),
        "_layer_norm_fwd": Kernel(
            look="``x``, ``w`` and ``b`` are read once, all by 16 bytes.",
            true=lambda code: [
                code.loaded == 3 * 2 * 4096,
                code.narrow("load") == 0,
            ],
            narrow_stores=2,  # mean and rstd
        ),
    },
)


COPIES = {"layer-norm-rows-sums": (1, 1)}
# What our rules start on each multiprocessor, of those that were tried.
OURS = {
    ("buffers", 4096): 3,
    ("atomics", 4096): 3,
    ("split", 4096): 8,
    ("buffers", 1024): 6,
    ("atomics", 1024): 4,
    ("split", 1024): 4,
}


def CLAIMS(figure):
    sums, programs, designs, dram, bits = (
        figure(f"layer-norm-rows-{name}", "H100")
        for name in ("sums", "programs", "designs", "dram", "bits")
    )
    # Parts help where there are few programs, and less and less.
    assert sums.ratio("split", "columns", 1024) > 1.3
    assert 0.9 < sums.ratio("split", "columns", 12288) < 1.1
    yield (
        f"On the H100, columns reach {sums.share('columns', 1024)}% of a copy "
        f"at 1024 columns and {sums.share('columns', 12288)}% at 12288 "
        f"columns. Split columns reach {sums.share('split', 1024)}% and "
        f"{sums.share('split', 12288)}%."
    )
    # PyTorch wins at 12288 columns, and loses to split columns elsewhere.
    assert sums.ratio("torch", "columns", 12288) > 1.05
    assert sums.ratio("torch", "split", 12288) > 1.05
    for N in 1024, 2048, 4096, 6144, 8192:
        assert sums.ratio("split", "torch", N) > 1.01
        assert sums.ratio("split", "columns", N) > 1.01
    yield (
        f"PyTorch's sums reach {sums.share('torch', 1024)}% and "
        f"{sums.share('torch', 12288)}%."
    )

    # Each rule is within 3% of the best number.
    for (design, N), ours in OURS.items():
        speeds = programs.medians[f"{design}, {N}"]
        assert speeds[ours] >= 0.97 * max(speeds.values()), (design, N)

    def of_rule(design, N):
        line = f"{design}, {N}"
        ours = programs.median(line, OURS[design, N])
        return ours, programs.all_medians(line).most

    (a, b), (c, d), (e, f) = (
        of_rule(design, 4096) for design in ("buffers", "atomics", "split")
    )
    yield (
        f"On the H100, at 4096 columns, buffers reach {a} GB/s with three "
        f"programs on each SM, and the best of the six numbers gives {b} "
        f"GB/s. Atomics reach {c} GB/s with three, and {d} GB/s at best. "
        f"Split columns reach {e} GB/s with eight, and {f} GB/s at best."
    )
    (a, b), (c, d), (e, f) = (
        of_rule(design, 1024) for design in ("buffers", "atomics", "split")
    )
    yield (
        f"At 1024 columns, buffers reach {a} GB/s with six, and {b} GB/s at "
        f"best. Atomics reach {c} GB/s with four, and {d} GB/s at best. Split "
        f"columns reach {e} GB/s with four, and {f} GB/s at best."
    )

    def shares(provider):
        found = designs.shares(provider)
        return f"{found.least}% to {found.most}%"

    # Buffers win over columns everywhere, rows lose to all of ours.
    assert designs.ratios("triton", ["columns", "split"]).least > 1
    assert designs.ratios("triton", ["torch", "torch.compile"]).least > 1
    assert designs.ratios("atomics", "rows").least > 1
    # At most three fifths of the copy, at all widths.
    assert designs.shares("columns").most <= 60
    assert designs.shares("split").most <= 60
    # The queue costs more than buffers in narrow rows, and little later.
    assert designs.ratio("triton", "atomics", 1024) > 1
    assert 0.9 < designs.ratio("triton", "atomics", 12288) < 1.1
    yield (
        f"On the H100, buffers reach {shares('triton')} of the copy, "
        f"atomics {shares('atomics')}, split columns "
        f"{shares('split')}, and columns {shares('columns')}. "
        f"An atomic addition for each row reaches {shares('rows')}, "
        f"and PyTorch {shares('torch')}."
    )
    yield (
        f"Buffers are {designs.ratio('triton', 'atomics', 1024)} "
        f"times as fast as atomics at 1024 columns"
    )
    assert 0.97 < designs.ratio("atomics", "split", 1024) < 1.03
    # Atomics are ahead of buffers in wide rows, by less than 5%.
    medians = designs.medians
    for N in 4096, 6144, 8192, 12288:
        assert 1 < medians["atomics"][N] / medians["triton"][N] < 1.05
    for name in "columns", "split":
        assert designs.ratio("torch.compile", name, 12288) > 1.05
    over_torch = designs.ratios("triton", "torch")
    over_compiled = designs.ratios("triton", "torch.compile")
    yield (
        f"On the H100, buffers are {over_torch.least} to {over_torch.most} "
        f"times as fast as PyTorch, and {over_compiled.least} to "
        f"{over_compiled.most} times as fast as torch.compile."
    )

    # What has no number: the count is right, and the bits.
    for medians in dram.medians.values():
        known = [value for value in medians.values() if value is not None]
        assert all(0.95 <= value <= 1.05 for value in known)
    for name in REPEATABLE:
        assert set(bits.medians[name].values()) == {0}
    for name in "atomics", "rows":
        assert set(bits.medians[name].values()) == {100}

    at_4096 = {
        name: designs.share(name, 4096)
        for name in ("columns", "split", "triton", "atomics", "rows")
    }
    yield f"They reach {at_4096['columns']}%: ``x`` and ``dy`` are read twice"
    yield f"They reach {at_4096['split']}%: there are enough programs"
    yield f"They reach {at_4096['triton']}%, with the same bits every time"
    yield f"They reach {at_4096['atomics']}%, with other bits every time"
    yield f"It reaches {at_4096['rows']}%, because additions queue up"


HALF, SINGLE = torch.float16, torch.float32
at = LayerNorm.at
DESIGNS = ("triton", "columns", "split", "atomics", "rows")
REPEATABLE = ("triton", "columns", "split")


def by(design):
    """Layer norm whose backward pass is of this design."""

    def function(page):
        backward = page.DESIGNS[design]
        return functools.partial(page.layer_norm, backward=backward)

    return function


WIDTHS = (1000, 1024, 1151, 4608, 8192, 16384)
FIRST_TILES = "for start in range(part * ROWS, M, parts * ROWS):"
PAGE = Page(
    __file__,
    LayerNorm(),
    {design: by(design) for design in DESIGNS},
    # A program of the interpreter takes 15 ms. With few programs, parts and
    # rows in a tile, few rows are enough for several turns of every loop.
    quick=(
        ("return min(M, programs_per_sm * NUM_SMS)", "return 4"),
        ("ROWS=2048 // cols", "ROWS=128 // cols"),
        ("ROWS=32,", "ROWS=4,"),
        ("return max(1, min(16, parts))", "return 2"),
    ),
    cases=(
        *(at(M, N, HALF) for M, N in ((2, 127), (17, 1023), (2, 4608))),
        *(at(M, N, function=f) for M, N in ((18, 3), (0, 9)) for f in DESIGNS),
    ),
    full=full_size(DESIGNS, WIDTHS, WIDTHS),
    mistakes=(
        too_wide(16385, "1 to 16384"),
        *below_zero(),
    ),
    elsewhere="is on cuda:1: not the current one",
    repeatable=REPEATABLE,
    repeated=tuple(
        at(4096, N, HALF, function=design)
        for N in (1024, 4608, 12288)
        for design in REPEATABLE
    ),
    trains=("triton",),
    huge=(8192,),
    huge_functions=DESIGNS[:-1],
    sanitizers=("memcheck", "racecheck"),
    sanitized=tuple(
        at(300, 1001, dtype, function=design)
        for dtype in (HALF, SINGLE)
        for design in DESIGNS
    ),
    prints={
        "Timing needs a GPU": 2,
        "each element of y, dx, dw and db is right": 6,
        "right buffers: []": 1,
        "right buffers: [0, 1, 2]": 1,
    },
    mutants={
        "c1 dropped": ("(wdy - x_hat * c1 - c2)", "(wdy - c2)"),
        "c2 dropped": ("(wdy - x_hat * c1 - c2)", "(wdy - x_hat * c1)"),
        "only the last row": ("dw += dy * x_hat", "dw = dy * x_hat"),
        "every program a row": (
            "range(tl.program_id(0), M, tl.num",
            "range(tl.program_id(0), 4, tl.num",
        ),
        "masked lanes in the variance": (
            "x = tl.where(cols < N, x - mean, 0)",
            "x = x - mean",
        ),
        "all in the first buffer": (
            "sums_ptr += tl.program_id(0) * 2 * N\n    tl.store(sums_ptr, dw",
            "tl.store(sums_ptr, dw",
        ),
        "first buffers only": ("(rows < programs)", "(rows < 3)"),
        "a store without its mask": ("N, db, mask=mask)", "N, db)"),
        "sums not cleared": ("sums = torch.zeros(1", "sums = torch.empty(1"),
        "a store for an addition": (
            'tl.atomic_add(sums_ptr + N, db, mask=mask, sem="relaxed")',
            "tl.store(sums_ptr + N, db, mask=mask)",
        ),
        "one tile a program": (
            FIRST_TILES,
            "for start in range(part * ROWS, part * ROWS + 1, parts * ROWS):",
        ),
        "no mask on rows": ("mask = (rows < M)", "mask = (rows >= 0)"),
        "parts overlap": (
            FIRST_TILES,
            "for start in range(part * ROWS, M, ROWS):",
        ),
        "parts write over each other": ("part * 2 * N + cols", "cols"),
        "statistics in float32 only": (
            "acc = torch.promote_types(x.dtype, torch.float32)",
            "acc = torch.float32",
        ),
    },
    kills=tuple(
        at(M, N, dtype, function=design)
        for design in DESIGNS[:-1]
        for M, N, dtype in ((3, 129, torch.float64), (18, 5, SINGLE))
    ),
)


def test_the_page_as_it_is(unedited):
    function = by("columns")(unedited)
    PAGE.operation.run(function, at(140, 17, HALF), unedited.DEVICE)


def test_the_order_of_additions_follows_the_programs(unedited):
    """Why the same bits are promised for the same number of programs."""
    page = unedited
    given = page.given(40, 130, SINGLE)

    def dw(programs):
        sums = torch.empty(programs, 2, 130, device=page.DEVICE)
        page.by_rows(*given, programs, 4, sums, page._store)
        return page.add_up(sums, SINGLE)[0]

    assert torch.equal(dw(4), dw(4))
    assert not torch.equal(dw(4), dw(3))


def test_table_counts_what_is_launched(output, unedited, monkeypatch):
    """Its rows of sums are those that the designs write at 4096 columns on a
    GPU of 132 SMs."""
    written = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda *args, **options: None

    def by_rows(dy, x, w, mean, rstd, programs, warps, sums=None, keep=None):
        if sums is not None:
            written.append(programs)
        return x

    def add_up(sums, dtype):
        written.append(len(sums))
        return sums[0]  # which unpacks into dw and db

    monkeypatch.setattr(unedited, "NUM_SMS", 132)
    monkeypatch.setattr(unedited, "by_rows", by_rows)
    monkeypatch.setattr(unedited, "add_up", add_up)
    monkeypatch.setattr(unedited, "_layer_norm_bwd_columns", Kernel())
    dy, stats = torch.empty(4096, 4096, device="meta"), torch.empty(4096)
    table = {
        line[:22].strip(): line.split()[-2:]
        for line in output.splitlines()
        if re.match(r".{22} +[35] +\d+ +\d\.\d\d$", line)
    }
    assert len(table) == 5
    for name, design in (
        ("split, 8 parts", "split"),
        ("396 buffers", "triton"),
        ("396 programs, atomics", "atomics"),
        ("atomics for each row", "rows"),
    ):
        written.clear()
        unedited.DESIGNS[design](dy, dy, dy[0], stats, stats, torch.float16)
        if design == "split":
            written *= 2  # by the columns' kernel, which is left out here
        rows, units = table[name]
        assert sum(written) == int(rows), name
        matrices = 5 if design == "split" else 3
        assert float(units) == round(matrices + int(rows) / 1024, 2)


def test_columns_of_the_toy(output):
    toy = re.search(r"dw by columns: error (.*)", output)
    assert float(toy[1]) < 1e-6


@pytest.mark.gpu
def test_atomic_additions_differ(page):
    given = page.given(4096, 1024, HALF)
    first = page.atomics(*given, SINGLE)
    assert any(
        not torch.equal(first[1], page.atomics(*given, SINGLE)[1])
        for _ in range(100)
    )
