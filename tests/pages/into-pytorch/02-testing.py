"""What must hold of the page "How to trust a gradient"."""

import contextlib
import functools
import re

import pytest
import torch
import torch.nn.functional as F

import tutorial
from compiled.declared import Kernel, Kernels
from conformance import LAYOUTS, Page, RmsNorm, too_wide

HALF, SINGLE, DOUBLE = torch.float16, torch.float32, torch.float64
BRAIN = torch.bfloat16


def run(page, M, N, dtype):
    x, w, dy = (t.detach() for t in page.inputs(M, N, dtype))
    _, rstd = page.forward(x, w, 1e-6)
    page.backward(dy, x, w, rstd)


def also(page, M, N, dtype):
    x = torch.empty(5000, dtype=dtype, device=page.DEVICE)
    for reads, writes in ((1, 1), (2, 1)):  # the ceilings of both passes
        page._move[(5,)](x, x, 5000 // 3, reads, writes, BLOCK_SIZE=4096)


PUBLISHED = "2026-11-28"

# Forward x is read and y is written; backward dy is read as well.
COPIES = {"testing-forward": (1, 1), "testing-backward": (2, 1)}

KERNELS = Kernels(
    run=run,
    also=also,
    M=4096,
    N=[4096],
    dtype="bfloat16",
    sizes={
        "bfloat16": [1024, 2048, 4096, 8192],
        "float16": [4096],
        "float32": [1024, 4096, 8192],
    },
    kernels={
        "_rms_norm_fwd": Kernel(
            look="""
            The row and the weights are loaded once, by 16 bytes.
            Threads wait for each other only in the one sum.
            """,
            true=lambda code: [
                code.loaded == 2 * 2 * 4096,
                code.narrow("load") == 0,
            ],
            narrow_stores=1,  # rstd
        ),
        "_rms_norm_bwd": Kernel(
            look="""
            The weights are loaded once, before the loop, and the sums for
            ``dw`` stay in registers until its end.
            """,
            true=lambda code: [
                code.count("load", 16) > 0 or code.amd,  # wider warps
                code.spills == 0,
            ],
            narrow_loads=1,  # rstd
        ),
    },
)

# Claims ----------------------------------------------------------------------

CARD = "H200"


def from_to(several):
    return f"{several.least}% to {several.most}%"


def device(figure):
    for mode, ours in (("forward", "kernel"), ("backward", "backward pass")):
        of = figure(f"testing-{mode}", CARD)
        triton, torch_, compiled = (
            from_to(of.shares(each))
            for each in ("triton", "torch", "torch.compile")
        )
        yield (
            f"On the H200 our {ours} reaches {triton} of the copy. PyTorch "
            f"reaches {torch_}, and torch.compile {compiled}."
        )


def compiler(figure):
    """Where torch.compile is ahead."""
    forward = figure("testing-forward", CARD)
    backward = figure("testing-backward", CARD)
    for of, widths in ((forward, (1024, 8192)), (backward, (1024,))):
        for N in of.medians["triton"]:
            ahead = of.ratio("torch.compile", "triton", N) > 1
            assert ahead == (N in widths)
    ours, theirs = (
        [forward.share(each, N) for N in (1024, 8192)]
        for each in ("triton", "torch.compile")
    )
    yield (
        "Still torch.compile is ahead of us at 1024 columns, with "
        f"{theirs[0]}% against {ours[0]}%, and at 8192 columns, with "
        f"{theirs[1]}% against {ours[1]}%."
    )
    yield (
        "At this width torch.compile is ahead of us, with "
        f"{backward.share('torch.compile', 1024)}% against "
        f"{backward.share('triton', 1024)}%."
    )


def requested(figure):
    """Why the backward pass is slower than the copy."""
    backward = figure("testing-backward", CARD)
    elsewhere = figure(
        "layer-norm-backward", CARD, page="layer-norm/01-layer-norm"
    )
    there = elsewhere.at(2048, 3072, 4608, 8192, 8704).shares("triton")
    yield (
        "has measured on the H200 that 32 to 36 KB reach between "
        f"{there.least}% and {there.most}% of the copy. Our "
        f"{backward.share('triton', 4096)}% at 4096 columns and "
        f"{backward.share('triton', 8192)}% at 8192 are no surprise then."
    )
    # "No surprise".
    for N in (4096, 8192):
        share = backward.share("triton", N)
        assert there.least - 1 < share < there.most + 1
    ours, copy = (backward.us(each, 1024, 3) for each in ("triton", "copy"))
    expected = 100 * copy / backward.share("triton", 4096)
    expected.rounding = ".1f"
    # "But": the sums and the other kernels take time.
    assert expected < 0.8 * ours
    yield (
        f"At 1024 columns a pass takes {ours} µs, and the copy {copy} µs. "
        f"With the share of 4096 columns it would take {expected} µs."
    )


def runs(figure):
    different = figure("testing-different", CARD)
    wrong = figure("testing-wrong", CARD)
    # "None of 100 runs": one of different bits, and no wrong ones but by the
    # race.
    assert different.all_medians("triton").most == 0
    assert wrong.all_medians("triton").most == 0
    assert wrong.all_medians("atomics").most == 0
    # "a + b is b + a": of two rows the order does not matter.
    assert different.median("atomics", 2) == 0
    counts = []
    for of, provider in ((different, "atomics"), (wrong, "race")):
        several = of.all_medians(provider)
        at_three = of.median(provider, 3)
        # "And at each larger number", "at each number of rows".
        assert all(count == at_three for count in several[1:])
        counts += [several[0], at_three]
    assert counts[2] == counts[3]
    # "At once".
    assert counts[1] > 50 and counts[3] > 50
    for count in counts:
        count.rounding = ".0f"
    yield (
        "With atomic additions {} of 100 do at two rows, and {} at three rows "
        "and at each larger number. With the race {} of 100 runs are wrong at "
        "each number of rows."
    ).format(*counts[:3])


def costs(figure):
    def ms(name, provider, N):
        value = figure(name, CARD).median(provider, N) / 1e3
        value.rounding = ".0f"
        if value < 10:
            value.rounding = ".1f"
        if value < 1:
            value.rounding = ".2f"
        return value

    both, reference, trust = (
        ms("testing-costs", each, 8192)
        for each in ("both passes", "reference", "trust")
    )
    assert both < reference < trust
    slow, fast, small = (
        ms("testing-gradcheck", each, 256)
        for each in ("gradcheck", "fast", "trust")
    )
    assert slow > 10 * small
    # "Most of the time", and "the fastest of the three".
    assert both + reference < trust / 10
    of = figure("testing-gradcheck", CARD)
    for N in (16, 64, 256):
        fastest = of.median("fast", N)
        assert fastest < min(of.median("trust", N), of.median("gradcheck", N))
    yield (
        "On the H200, at 4096 rows of 8192 columns, both passes take "
        f"{both} ms, the reference in float64 takes {reference} ms, and the "
        f"forty lines take {trust} ms. At three rows of 256 columns "
        f"gradcheck takes {slow} ms, its fast mode {fast} ms, and the "
        f"forty lines {small} ms."
    )
    # "Grows with the number of elements", and less where the host was faster.
    before, at_64, at_256 = (of.median("gradcheck", N) for N in (16, 64, 256))
    first, second = at_64 / before, at_256 / at_64
    assert 3.5 < first < 4.5 and 2 < second < 3.5
    slower = ms("testing-gradcheck", "trust", 64)
    assert slower > 1.05 * small
    yield (
        "From 16 to 64 columns there are four times as many elements, and "
        f"gradcheck takes {first} times as long. From 64 to 256 columns it "
        f"takes only {second} times as long. But the host was not equally "
        "fast in both measurements: the forty lines, which hardly depend on "
        f"these widths, took {slower} ms at 64 columns, and {small} ms at 256."
    )


def CLAIMS(figure):
    yield from device(figure)
    yield from compiler(figure)
    yield from requested(figure)
    yield from runs(figure)
    yield from costs(figure)


# Numbers with a unit that nothing has measured, and why they are right.
FACTS = {
    piece: "what the clock of whole calls is told"
    for piece in (
        "made for 1500 ms or longer",
        "a batch takes 2 ms or more",
        "in batches of 2 ms or more, for 1500 ms or longer",
    )
} | {
    "whole matrices, of 268 MB at 8192 columns": "8 * 4096 * 8192 bytes",
    "there are four times as many elements": "64 columns of 16",
    "one element of ``dw`` 1.5 times as large as it should be": (
        "test_fast_gradcheck_misses_one_element does that"
    ),
}

# What the functions compute --------------------------------------------------


def alone(page):
    """The page's norm, as the operation calls it."""

    def function(x, residual, *args, **options):
        assert residual is None
        return page.rms_norm(x, *args, **options), None

    return function


def negative_eps(load):
    page = load()
    try:
        page.rms_norm(torch.ones(2, 8, device=page.DEVICE), 8, eps=-1e-5)
    except ValueError:
        return
    raise AssertionError("a negative eps is taken")


at = functools.partial(RmsNorm.at, fused=False)

PAGE = Page(
    __file__,
    RmsNorm(alone=True),
    {"rms_norm": alone},
    # Few programs in all.
    quick=(("else 4\n", "else 2\n"),),
    cases=(
        *(at(M, 40, HALF) for M in (1, 2, 27)),
        at(17, 65, HALF),
        *(at(3, 37, dy=dy) for dy in LAYOUTS),
        at(1, 8192, HALF),
        at(2, 4097, HALF),
    ),
    full=(
        *(
            at(1151, N, dtype)
            for N, dtype in (
                *((N, BRAIN) for N in (1000, 1024, 2048, 4096, 8192)),
                *((N, HALF) for N in (37, 8192)),
                *((N, SINGLE) for N in (520, 8192)),
                (264, DOUBLE),
            )
        ),
        *(
            at(301, N, half, weight_dtype=SINGLE)
            for N in (37, 4096)
            for half in (HALF, BRAIN)
        ),
    ),
    mistakes=(too_wide(8193, "8193 columns.* 8192", lambda x: (x, None)),),
    repeatable=("rms_norm",),
    repeated=tuple(at(512, N, HALF) for N in (256, 1000, 4096, 8192)),
    elsewhere="is on cuda:1: not the current one",
    compiled=("rms_norm",),
    compiled_cases=tuple(at(37, N, HALF) for N in (1000, 8192)),
    graphs=tuple(at(512, N, HALF) for N in (1000, 8192)),
    trains=("rms_norm",),
    huge=(8192,),
    sanitizers=("memcheck", "racecheck"),
    # More rows than programs in the second: 132 on an H200. racecheck is slow.
    sanitized=(at(20, 1000, HALF), at(140, 8192, HALF)),
    prints={
        "Timing needs a GPU": 2,
        "the shapes of both fit\n": 1,
        "float64, right: True\nfloat64, without c: False\n": 1,
        "float32, right: False\nfloat32, right, loose: True\n": 1,
        "40 lines, and 19 that they call\n": 1,
        "ours: each element of y, dx and dw is right\n": 1,
        "shapes fit: finds 0 of 10\nloss falls: finds 0 of 10\n": 1,
        "gradcheck: finds 1 of 10\nallclose: finds 2 of 10\n": 1,
        "trust_all: finds 9 of 10\n": 1,
        "sums in one place: found by no test\n": 1,
        "(a + b) + c = 0.0\n(a + c) + b = 1.0\n": 1,
        "(4, 64) finds: nothing\nright: False\n": 1,
        "finds: c divided by the tile, dw of the last row, rows left over": 1,
    },
    mutants={
        "the mean is subtracted": (
            "tl.sum(x * x) / N",
            "tl.sum(x * x - x) / N",
        ),
        "the row sum dropped": (
            "wdy - x_hat * c) * rstd, mask",
            "wdy) * rstd, mask",
        ),
        "one factor r too few": (
            "(wdy - x_hat * c) * rstd, mask",
            "(wdy - x_hat * c), mask",
        ),
        "only the last row": ("dw += dy * x_hat\n", "dw = dy * x_hat\n"),
        "sums without a place": (
            "tl.program_id(0) * N + cols, dw, mask=mask)\n",
            "cols, dw, mask=mask)\n",
        ),
        "the last row left out": (
            "tl.program_id(0), M, tl.num_programs(0)",
            "tl.program_id(0), M - 1, tl.num_programs(0)",
        ),
        "dy with strides of its own": (
            "    dy = dy.contiguous()\n    x",
            "    x",
        ),
        "y with the strides of x": (
            "    x = x.contiguous()\n    w = w.contiguous()\n"
            "    N = w.numel()\n    M = x",
            "    w = w.contiguous()\n    N = w.numel()\n    M = x",
        ),
        "store without mask": (
            "tl.store(y_ptr + row * N + cols, x * rstd * w, mask=mask)",
            "tl.store(y_ptr + row * N + cols, x * rstd * w)",
        ),
        "any eps": ("if not eps >= 0:", "if False:"),
    },
    kills=(
        at(19, 43, HALF),
        at(19, 43, SINGLE, weight_dtype=HALF),
        at(19, 43, x="transposed"),
        at(3, 37, dy="one number"),
        negative_eps,
    ),
)

# What the page says ----------------------------------------------------------


def found_by(output):
    """The page's table: {fault: tests}."""
    rows = re.findall(r"^(.+): found by (.+)$", output, re.MULTILINE)
    return {fault: tests.split(", ") for fault, tests in rows}


def test_the_table(output):
    """What the prose says of single faults and tests."""
    table = {fault: set(tests) for fault, tests in found_by(output).items()}
    assert len(table) == 10
    everywhere = table.pop("dx without c")
    assert everywhere >= {"gradcheck", "allclose", "edges", "bands"}
    own = {
        "c divided by the tile": {
            "edges",
            "special rows",
            "bands",
            "trust_all",
        },
        "rows left over": {"edges", "trust_all"},
        "squares in 16 bits": {"the same in 16 bits", "trust_all"},
        "strides of dy": {"strides", "trust_all"},
        "no eps": {"special rows", "trust_all"},
        "y without a mask": {"bands", "trust_all"},
        "a row nobody writes": {"bands", "trust_all"},
        "sums in one place": {"no test"},
    }
    assert table.pop("dw of the last row") >= {"allclose", "edges", "strides"}
    assert table == own


def prose():
    """The page in one line."""
    return " ".join(tutorial.source(PAGE.name).replace("#", "").split())


def test_the_loss(output):
    """The wrong gradient is ahead at first, stops, and is passed."""
    rows = re.findall(r"step +\d+: right (\S+), wrong (\S+)", output)
    (_, _), early, middle, last = ([float(v) for v in row] for row in rows)
    assert early[1] < early[0] and middle[1] < middle[0]
    assert last[0] < last[1] / 5
    assert abs(last[1] / middle[1] - 1) < 0.05
    assert (
        f"at step 10 its loss is {early[1]:.2f}, and that of the right one "
        f"{early[0]:.2f}." in prose()
    )
    assert (
        f"at step 119 the losses are {last[1]:.3f} and {last[0]:.4f}."
        in prose()
    )


def test_finite_differences(output):
    """The best steps, about u**(1/3), and errors, about u**(2/3)."""
    rows = re.findall(
        r"torch.(float\d\d): the best step is 2\*\*(-\d+), and its error is "
        r"(\S+); with 1e-6 it is (\S+)",
        output,
    )
    for name, exponent, best, usual in rows:
        unit = torch.finfo(getattr(torch, name)).eps
        assert 1 / 6 < 2 ** int(exponent) / unit ** (1 / 3) < 6
        assert float(best) < unit ** (2 / 3)
        if name == "float32":
            assert float(usual) > 1e-2  # "gives noise"
            assert f"is {unit / 1e-6:.2f} in float32" in prose()
    steps = [exponent for _, exponent, _, _ in rows]
    assert f"the best steps: 2**{steps[0]} and 2**{steps[1]}." in prose()


def test_errors_of_sums(page):
    """A chain lies below the line, a tree below one half unit."""
    for count in page.COUNTS[1:]:
        chain = page.error_of_a_sum(count, "chain")
        assert count**0.5 / 8 < chain < count**0.5 / 3
        assert page.error_of_a_sum(count, "tree") < 1
    tree = page.error_of_a_sum(count, "tree")
    assert (
        f"At {count} terms it is off by {chain:.0f} half units, where the "
        f"line has {count**0.5 / 3:.0f}. The tree is off by {tree:.1f}."
        in prose()
    )


def test_a_number_between_two_neighbors():
    """The example of rounding, and its drawing."""
    eps = torch.finfo(HALF).eps
    stored = torch.tensor(1.0006, dtype=HALF).item()
    assert stored == 1 + eps
    assert (
        f"It is stored as {stored:.5f}, and is off by {stored - 1.0006:.4f}. "
        f"The nearest number is up to half a unit away, here {eps / 2:.4f}"
        in prose()
    )


def test_an_infinity(page):
    """As the page says: its own y, and dx of its row."""
    x, w, dy = page.inputs(3, 6, SINGLE)
    x = x.detach().clone()
    x[1, 2] = float("inf")
    for norm in (page.ours, page.pytorch):
        y, dx, _ = page.both_passes(norm, (x, w), dy)
        assert y.isnan().nonzero().tolist() == [[1, 2]]
        assert dx.isnan().all(dim=1).tolist() == [False, True, False]
        assert dx.isfinite().all(dim=1).tolist() == [True, False, True]
    page.trust(page.ours, page.pytorch, (x, w), dy)


def test_what_is_said_of_cancellation(output):
    value, sizes = re.search(
        r"worst error: (\d+) half units of its value,\n(\S+) half", output
    ).groups()
    assert int(value) > 1000 and float(sizes) < 3
    assert f"off by up to {value} half units" in prose()
    assert f"off by more than {sizes} half units" in prose()
    rows = dict(
        re.findall(r"^(y|dx|dw): off by up to (\d+) units", output, re.M)
    )
    assert int(rows["dx"]) > 100
    times = re.findall(r"by (\S+) times its spread", output)
    assert len(times) == 3 and max(map(float, times)) < 16


@pytest.mark.parametrize("dtype", [SINGLE, HALF])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_one_wrong_element_is_enough(page, dtype, number):
    """Of a result or of a gradient: by little, and where it is small."""
    x, w, dy = page.inputs(5, 40, dtype)
    exact, spread = page.shaken(page.pytorch, (x, w), dy)
    like = (dy, x, w)[number]
    right = exact[number].to(dtype)
    page.compare(right, exact[number], spread[number], like)
    at_least = right.abs().argmin()
    wrong = right.clone()
    change = 3 * torch.finfo(dtype).eps * right.abs().flatten()[at_least]
    change += 40 * spread[number].flatten()[at_least]
    wrong.view(-1)[at_least] += change.to(dtype)
    with pytest.raises(AssertionError, match="1 of"):
        page.compare(wrong, exact[number], spread[number], like)


def test_types_and_shapes_are_compared(page):
    exact = torch.ones(4, dtype=DOUBLE, device=page.DEVICE)
    like = torch.ones(4, device=page.DEVICE)
    page.compare(like, exact, 0 * exact, like)
    for found in (like.double(), like[:3], like[None]):
        with pytest.raises(AssertionError):
            page.compare(found, exact, 0 * exact, like)


@pytest.mark.parametrize(
    ("found", "exact", "spread", "right"),
    [
        (3.0, float("inf"), 0.0, False),
        (float("inf"), float("inf"), float("nan"), True),
        (-float("inf"), float("inf"), float("nan"), False),
        (float("inf"), 1e300, 0.0, True),  # beyond the type
        (float("inf"), 1.0, 0.0, False),
        (3.0, 1.0, float("inf"), False),
        (float("nan"), float("nan"), float("nan"), True),
        (3.0, float("nan"), float("nan"), False),
        (float("nan"), 3.0, 0.0, False),
    ],
)
def test_what_is_not_finite_is_compared(page, found, exact, spread, right):
    found, exact, spread = (
        torch.tensor([value], dtype=dtype, device=page.DEVICE)
        for value, dtype in (
            (found, SINGLE),
            (exact, DOUBLE),
            (spread, DOUBLE),
        )
    )
    if right:
        page.compare(found, exact, spread, found)
    else:
        with pytest.raises(AssertionError, match="1 of 1"):
            page.compare(found, exact, spread, found)


def test_any_call_of_empty_gets_bands(page):
    """Kernels of others allocate in all these ways."""
    like = torch.zeros(3, 4, device=page.DEVICE, dtype=HALF)
    memories = []
    with page.bands(memories):
        made = (
            torch.empty(3, 4, device=page.DEVICE),
            torch.empty((3, 4), device=page.DEVICE, dtype=HALF),
            torch.empty(like.shape, device=page.DEVICE),
            torch.empty_like(like, dtype=SINGLE),
            torch.empty_like(like.t()),
            torch.empty(0, 4, device=page.DEVICE),
        )
    assert len(memories) == len(made)
    for tensor, memory in zip(made, memories, strict=True):
        assert tensor.isnan().all()
        assert len(memory) == 2 * page.GUARD + tensor.numel() * tensor.itemsize
    assert made[3].dtype == SINGLE
    assert made[4].stride() == (1, 4)


def test_fast_gradcheck_misses_one_element(page):
    """As the page says; and the forty lines do not."""

    def backward(*tensors):
        dx, dw = page.backward(*tensors)
        dw[7] *= 1.5
        return dx, dw

    def norm(x, w):
        return wrong(x, w)

    wrong = page.norm_of(page.forward, backward)
    x, w, dy = page.inputs(3, 256, DOUBLE)
    assert torch.autograd.gradcheck(norm, (x, w), fast_mode=True)
    with pytest.raises(AssertionError, match="1 of 256"):
        page.trust(norm, page.pytorch, (x, w), dy)


@pytest.mark.parametrize("place", ["before", "behind"])
def test_bands_are_looked_at(page, place):
    def norm(x, w):
        y = torch.empty_like(x)
        y.copy_(F.rms_norm(x, w.shape, w, 1e-6))
        flat = y.detach().view(-1)
        offset = flat.storage_offset() + (
            -1 if place == "before" else flat.numel()
        )
        torch.as_strided(flat, (1,), (1,), offset).zero_()
        return y

    x, w, dy = page.inputs(3, 8, SINGLE)
    with pytest.raises(AssertionError, match="beside a tensor"):
        page.trust(norm, page.pytorch, (x, w), dy)


def test_trust_takes_other_functions(page):
    """As the page says: it knows nothing of norms."""
    x, _, dy = page.inputs(4, 6, SINGLE)
    page.trust(F.gelu, F.gelu, (x,), dy)
    with pytest.raises(AssertionError, match="are wrong"):
        page.trust(lambda x: F.gelu(x, approximate="tanh"), F.gelu, (x,), dy)


@pytest.mark.cpu
def test_the_bytes_of_the_sums():
    """On an H200: 1056 and 132 programs, a third and hardly any; and an SM
    requests 32 KB at a time at each width."""
    page = PAGE.load()
    before = page.ON_GPU
    page.ON_GPU = True
    try:
        for N, programs, least, most in (
            (1024, 1056, 0.3, 0.36),
            (4096, 264, 0, 0.1),
            (8192, 132, 0, 0.05),
        ):
            assert 132 * page.plan_backward(N)[0] == programs
            requested = page.plan_backward(N)[0] * 2 * N * BRAIN.itemsize
            assert requested == 32 * 1024
            moved = 2 * programs * SINGLE.itemsize  # written and read
            assert least < moved / (3 * 4096 * BRAIN.itemsize) < most
    finally:
        page.ON_GPU = before


def test_exercise(page):
    with contextlib.redirect_stdout(None):
        assert not page.exercise_1((page.PROGRAMS, 33))
        assert not page.exercise_1((2 * page.PROGRAMS, 33))
        assert not page.exercise_1((2 * page.PROGRAMS + 1, 32))
        assert page.exercise_1(page.SHAPE_1)


@pytest.mark.gpu
def test_a_gpu_finds_the_race(page):
    different, wrong = page.hundred_runs(4096, 4096, SINGLE, "race")
    assert different > 0 and wrong > 0
    assert page.hundred_runs(4096, 4096, SINGLE, "triton") == (0, 0)
    _, wrong = page.hundred_runs(4096, 4096, SINGLE, "atomics")
    assert wrong == 0


@pytest.mark.gpu
def test_faults_on_a_gpu(page):
    """All ten are found, and two of them by tests that miss them without."""
    for name, edits in page.FAULTS.items():
        assert page.finds(page.trust_all, page.with_fault(*edits)), name
    for name in ("y without a mask", "sums in one place"):
        norm = page.with_fault(*page.FAULTS[name])
        assert page.finds(page.shapes_agree, norm), name
    atomics = page.with_fault(*page.WITH_ATOMICS)
    assert not page.finds(page.trust_all, atomics)


@pytest.mark.cpu
def test_every_line_of_the_figures_measures_what_it_says():
    """A call of each provider, at one size: it moves what is counted."""
    moved = []

    def speed(bytes_moved, prepare):
        prepare()()
        moved.append(bytes_moved)
        return 2.0, 1.0, 3.0

    page = PAGE.load()
    before = page.ON_GPU, page.speed, page.best_of_three_compilations
    page.ON_GPU, page.speed = True, speed
    page.best_of_three_compilations = lambda function, measure: measure(
        function
    )
    try:
        for matrices, benchmark in (
            (2, page.bench_forward),
            (3, page.bench_backward),
        ):
            bench = benchmark.benchmarks
            for provider in bench.line_vals:
                if provider == "torch.compile":
                    continue
                del moved[:]
                values = {"M": 3, "N": 264, "provider": provider}
                found = benchmark.fn(**bench.args | values)
                assert found == (2.0, 1.0, 3.0)
                times = 6 if provider == "copy" else 1
                assert moved == times * [matrices * 3 * 264 * 2]
        del moved[:]
        assert page.of_compiled(3, 264, BRAIN) == dict.fromkeys(
            ("forward", "backward"), (2.0, 1.0, 3.0)
        )
        assert moved == [2 * 3 * 264 * 2, 3 * 3 * 264 * 2]
    finally:
        page.of_compiled.cache_clear()
        page.ON_GPU, page.speed, page.best_of_three_compilations = before


@pytest.mark.cpu
def test_every_call_of_the_costs_passes():
    """Of each line, at one size."""
    page = PAGE.load()
    before = page.ON_GPU, page.whole_call
    page.ON_GPU, page.whole_call = True, lambda call: call()
    try:
        for benchmark in (page.bench_costs, page.bench_gradcheck):
            bench = benchmark.benchmarks
            for provider in bench.line_vals:
                values = {"M": 2, "N": 8, "provider": provider}
                benchmark.fn(**bench.args | {"dtype": DOUBLE} | values)
    finally:
        page.ON_GPU, page.whole_call = before
