"""What must hold of the page "Programs that share a row"."""

import re

import pytest
import torch

from compiled.declared import Kernel, Kernels
from conformance import LayerNorm, Mistake, Page, on_gpu, too_wide
from tutorial import source


def run(page, M, N, dtype):
    x, w, b, dy = page.inputs(M, N, dtype)
    torch.autograd.grad(page.LayerNorm.apply(x, w, b, 1e-5), (x, w, b), dy)
    page.shared_sums(
        page._shared_sums, torch.ones(4, 16, device=page.DEVICE), 100, 1
    )


def also(page, M, N, dtype):
    page.shared_sums(
        page._shared_sums, torch.ones(128, 16, device=page.DEVICE)
    )
    x, w, b, dy = page.inputs(3, 72, dtype)
    torch.autograd.grad(page.LayerNorm.apply(x, w, b, 1e-5), (x, w, b), dy)


SIZES = {
    "float16": [
        32768, 65536, 98304, 131072, 262144, 393216, 524288, 786432,
        1048576,
    ],
    "bfloat16": [65536, 524288],
    "float32": [65536, 262144],
}  # fmt: skip

PUBLISHED = "2026-11-22"

KERNELS = Kernels(
    run=run,
    also=also,
    M=4096,
    N=[65536, 524288],
    dtype="float16",
    sizes=SIZES,
    kernels={
        "_shared_sums": Kernel(
            look="""
            A word is stored, then four are awaited: the load of 8 bytes stands
            in a loop of its own.
            GPUs of AMD get no PTX; this page refuses them.
            """,
            true=lambda code: [
                code.amd or code.count("load", 8) == code.count("store", 8) > 0
            ],
            narrow_loads=3,
            narrow_stores=6,
        ),
        "_layer_norm_fwd_shared": Kernel(
            look="""
            ``x`` comes by asynchronous copies, two tiles ahead.
            The loads and stores of 8 bytes are the words by which programs
            tell each other their sums.
            At 524288 columns some registers are spilled.
            """,
            true=lambda code: [
                code.amd
                or (
                    code.count("load", 8) == 1 and code.count("store", 8) == 2
                ),
                (code.count("copy", 16) > 0) != code.amd,
            ],
            true_at={524288: lambda code: [code.spills > 0]},
            narrow_loads=2,  # words
            narrow_stores=4,  # words, mean and rstd
            copies=True,
            # 16 KB of a row in four warps: still faster than half of it in
            # eight.
            spills={524288: 56, 786432: 56, 1048576: 56},
        ),
        "_layer_norm_bwd_shared": Kernel(
            look="""
            Two matrices come by asynchronous copies, and the sums for ``dw``
            and ``db`` stay in registers: look at how many they are.
            """,
            true=lambda code: [
                code.registers > 128,
                code.count("load", 8) > 0,
            ],
            narrow_loads=2,  # words
            narrow_stores=4,  # words of 4 rows
            narrow_copies=12,  # mean and rstd
            copies=True,
        ),
    },
)


HALF, SINGLE = torch.float16, torch.float32
DTYPES = HALF, torch.bfloat16, SINGLE
at = LayerNorm.at


def three_turns(load):
    page = load()
    x = torch.ones(4, 16, device=page.DEVICE)
    page.shared_sums(page._shared_sums, x, 3, 1)


# Numbers with a unit that nothing has measured, and why they are right.
FACTS = {
    f"a million columns ({2 * 2**20 >> 20} MB)": "2 bytes a column",
    f"At most {2**29 >> 20} MB a matrix": "the rows that the benchmark takes",
}

PAGE = Page(
    __file__,
    LayerNorm(
        dtypes=DTYPES,  # words hold float32
        sizes=(
            ((5,), (40,)),
            ((2, 3), (5, 8)),
            ((), (40,)),
            ((0,), (40,)),
            ((2, 0), (40,)),
            ((2, 1, 3), (72,)),
            ((1,), (8,)),
        ),
        large=(
            ((20, 3), (130, 128)),
            ((2, 1, 3), (20_000,)),
            ((), (20_000,)),
            ((1,), (2**19,)),
        ),
        multiple=8,
        most=384,
    ),
    {"layer_norm": lambda page: page.layer_norm},
    # Slices of 8 to 128 lanes: small rows have several.
    quick=(
        ("8192 if ON_GPU else 256", "128"),
        ("if ON_GPU else 4", "if ON_GPU else 12"),
    ),
    cases=tuple(at(2, 96, dtype) for dtype in DTYPES),
    full=(
        *(
            at(M, N, dtype)
            for N in (8, 4104, 65536, 131_080, 393_216, 2**19)
            for M in (1, 37)
            for dtype in DTYPES
        ),
        at(7, 2**20, HALF),
        at(1, 2**20, torch.bfloat16),
        *(at(2**26 // N, N, HALF) for N in (32768, 65536, 262_144)),
    ),
    mistakes=(
        Mistake(
            TypeError,
            "x.*float64",
            lambda ones: (ones(2, 8, dtype=torch.float64), 8),
        ),
        too_wide(12, "12 columns.*multiples of 8"),
        too_wide(2**22, "Two sweeps"),
    ),
    repeatable=("layer_norm",),
    repeated=tuple(at(2**25 // N + 1, N, HALF) for N in (65536, 2**19, 2**20)),
    graphs=(at(64, 65536, HALF),),  # its words are filled anew
    trains=("layer_norm",),
    huge=(65536,),
    sanitizers=("memcheck",),
    sanitized=(at(5, 20_008, HALF), three_turns),
    prints={
        "Timing needs a GPU": 2,
        "[2016.0, 85344.0]": 4,
    },
    mutants={
        "slices are not put together": ("(m2s + n * d * d, 1)", "(m2s, 1)"),
        "slices count alike": ("tl.minimum(N - s * WIDTH, WIDTH),", "WIDTH,"),
        "words that do not exist": (
            "return tl.where(s < SLICES, a, 0), tl.where(s < SLICES, b, 0)",
            "return a, b",
        ),
        "one word for all slices": ("SLICES + s\n    low", "SLICES\n    low"),
        "masked lanes in m2": (
            "d = tl.where(inside, x.to(tl.float32) - mean[:, None], 0)",
            "d = x.to(tl.float32) - mean[:, None]",
        ),
        "the last tile is not finished": (
            "tl.range(start, M + step, step, num_stages=3):",
            "tl.range(start, M, step, num_stages=3):",
        ),
        "the last tile of gradients": (
            "tl.range(start, M + step, step, num_stages=3,\n",
            "tl.range(start, M, step, num_stages=3,\n",
        ),
        "the tile before is this one": ("y = (before.to", "y = (x.to"),
        "the gradients of this tile": ("_gradients(x1,", "_gradients(x,"),
        "c1 dropped": ("- (d * c1 + c2)", "- c2"),
        "c2 dropped": ("- (d * c1 + c2)", "- d * c1"),
        "rows that do not exist": ("(row < M - first)", "(row < ROWS)"),
        "sums without a place": ("start // ROWS * 2 * N + cols", "cols"),
        "dy with strides of its own": ("= dy.contiguous(),", "= dy,"),
    },
    kills=(at(5, 72), at(2, 8, dy="one number")),
)


def test_a_turn_later(unedited):
    x = torch.arange(64.0, device=unedited.DEVICE).reshape(4, 16)
    for later in 0, 1:
        found = unedited.shared_sums(unedited._shared_sums, x, 3, later)
        assert found.tolist() == 4 * [[2016.0, 85344.0]]


@pytest.mark.parametrize("itemsize", [2, 4])
def test_plans_fit(unedited, itemsize, monkeypatch):
    """A row has no more slices than programs fit, in powers of two."""
    monkeypatch.setattr(unedited, "NUM_SMS", 132)
    monkeypatch.setattr(unedited, "SLICE", 8192)
    for row in 16, 65536, 2**17 + 16, 2**18, 96 * 8192 + 16, 264 * 8192:
        for forward in True, False:
            found = unedited.plan_shared(row // itemsize, itemsize, forward)
            (rows, lanes), how = found
            assert lanes & (lanes - 1) == 0
            assert 132 * how["per_sm"] * lanes * itemsize >= row
            assert rows * lanes * itemsize <= 32768 // how["per_sm"]


@pytest.mark.parametrize("per_sm", [1, 2, 4])
def test_cuts(unedited, per_sm, monkeypatch):
    """All programs fit, all columns have a slice, and no slice is idle."""
    monkeypatch.setattr(unedited, "NUM_SMS", 132)
    monkeypatch.setattr(unedited, "empty_words", lambda *shape: shape)
    for N in [8, 4096, 65536, 131080, 393216, 600_000, 2**20]:
        for M, rows, lanes in (4096, 2, 4096), (3, 2, 4096), (256, 1, 8192):
            if lanes * 132 * per_sm < N:
                continue
            found = unedited.cut(M, N, rows, lanes, per_sm)
            groups, programs, words, (_, _, width, padded) = found
            slices = words[1]
            assert programs == groups * slices <= 132 * per_sm
            assert (slices - 1) * width < N <= slices * width
            assert width <= lanes and width % 64 == 0
            assert slices <= padded
            tiles = -(-M // rows)
            # One row more in every group, for the turn that only finishes.
            assert words[0] >= (tiles + groups) * rows
            if tiles >= groups + 1:
                assert programs >= 132 * per_sm // 2


def test_empty_is_no_number_and_stands_in_the_ptx(unedited):
    halves = torch.tensor([unedited.EMPTY]).view(torch.int32)
    assert halves[0] == halves[1]
    value = halves.view(SINGLE)[0]
    quiet = 1 << 22
    assert value.isnan() and not halves[0] & quiet
    assert f"0x{unedited.EMPTY:016X};" in source(PAGE.name)


def test_exercise(output):
    found = re.findall(r"^found=([\d.]+); exact: ([\d.]+)$", output, re.M)
    assert len(found) == 2
    assert found[0][0] != found[0][1] and found[1][0] == found[1][1]


def both_passes(page, M, N, dtype):
    x, w, b, dy = page.inputs(M, N, dtype)
    torch.autograd.grad(page.layer_norm(x, (N,), w, b), (x, w, b), dy)


def test_words_are_whole_in_ptx(launches):
    """Relaxed accesses of 64 bits, a loop with its trap, and two programs a
    multiprocessor by registers and shared memory."""
    from compiled.aot import Call

    values = {"M": 4096, "N": 2**19, "dtype": "float16"}
    forward, backward = launches([Call(PAGE.name, both_passes, values)])[0]
    for built, per_sm in (forward, 2), (backward, 1):
        text = built.text
        assert "st.relaxed.gpu.global.b64" in text
        load = r"ld\.relaxed\.gpu\.global\.b64[^@]*@again bra LOAD;\s*@empty"
        assert re.search(load + r" trap;", text)
        assert not re.search(r"ld\.relaxed\S*\.v2", text)
        threads = 32 * built.num_warps * per_sm
        assert built.registers * threads <= 65536
        assert per_sm * (built.shared + 1024) <= 233472
        assert "cp.async" in text


@pytest.mark.gpu
@pytest.mark.parametrize("later", [0, 1])
def test_a_thousand_turns_of_many_programs(page, later):
    x = torch.arange(2048.0, device="cuda").reshape(128, 16) / 2048
    found = page.shared_sums(page._shared_sums, x, 1000, later)
    expected = torch.stack([x.sum(), (x * x).sum()]).expand(128, 2)
    torch.testing.assert_close(found, expected)


@pytest.mark.gpu
def test_too_many_programs_are_refused(page):
    """A cooperative launch fails; it does not hang."""
    x, out = torch.zeros(2, 16 * 2**17, device="cuda")
    words = page.empty_words(1, 2**17)
    with pytest.raises(RuntimeError, match="cooperative"):
        args = x, out, words, 1, 0, 16, 4
        page.together(page._shared_sums, 2**17, *args, per_sm=1, warps=4)


ALONE = """
import torch
from tutorial import load
soon = "loads, 10000000,", "loads, 1000,"
page = load("layer-norm/08-shared-rows", [soon])
x, out = torch.zeros(64, device="cuda"), torch.zeros(8, device="cuda")
# Three programs, where four words are awaited.
args = x, out, page.empty_words(1, 4), 1, 0, 16, 4
page.together(page._shared_sums, 3, *args, per_sm=1, warps=4)
"""


@pytest.mark.gpu
def test_a_word_that_never_comes_is_an_error():
    on_gpu.dies(ALONE)
