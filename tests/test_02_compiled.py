"""Page 02 compiled: what docs/kernels.toml has no limits for."""

import re

from compiled.aot import COMPILER_ADDS_BARRIER, TARGETS, Call
from compiled.limits import Facts

NAME = "02-layer-norm-weight-gradients"
MAX_COLUMNS = 10240
START = """
dy, x, w, b = example(4096, N, dtype)
_, mean, rstd = forward(x, w, b, 1e-5)
"""


def call(code, N=4096, dtype="float16", **more):
    return Call(NAME, START + code, {"N": N, "dtype": dtype}, **more)


LOCK = "lock(dy, x, w, mean, rstd, barrier=False)"
PIPELINED = "pipelined(dy, x, w, mean, rstd)"


def test_barrier_left_out(launches):
    """The race of the page: nothing between the stores and the release."""
    calls = [call(LOCK, target=target) for target in TARGETS]
    for target, built in zip(TARGETS, launches(calls), strict=True):
        facts = Facts(built[1])
        assert facts.count("release") == 1, target
        assert bool(facts.unsafe) != COMPILER_ADDS_BARRIER, target


def test_early_launch(launches):
    """The last kernel waits before its first load, where it starts early."""
    calls = [call(PIPELINED, target=t) for t in ("sm_80", "sm_90")]
    plain, early = launches(calls)
    _, main, last = early
    assert "griddepcontrol.launch_dependents" in main.text
    wait = last.text.index("griddepcontrol.wait")
    assert wait < last.text.index("ld.global")
    assert not any("griddepcontrol" in built.text for built in plain)


def test_float32_weights_of_float16_rows(launches):
    code = "pipelined(dy, x, w.float(), mean, rstd)"
    calls = [call(code, N) for N in (1024, 4096, MAX_COLUMNS)]
    for built in launches(calls):
        assert built[1].spills == 0


def test_every_width_and_type_compiles(launches):
    """Each with some of the other; docs/kernels.toml has common ones."""
    some = zip(
        (1, 129, 1151, 4097, 9999, MAX_COLUMNS),
        ("float64", "float32", "bfloat16", "float16", "float64", "float64"),
        strict=True,
    )
    for built in launches([call(PIPELINED, *one) for one in some]):
        assert len(built) == 3


NARROW = [("return tl.cast(tile, tl.int64) * (ROWS * N)", "return tile * N")]


def test_row_offsets_have_64_bits(launches):
    """The mutant multiplies in 32 bits; the page must not."""
    page, mutant = launches(
        [call(PIPELINED, 4097, replace=replace) for replace in ((), NARROW)]
    )
    narrow = [
        re.search(r"(mul|mad)\.lo\.s32\s.*\b4097\b", built.text) is not None
        for built in (*page[:2], *mutant[:2])
    ]
    assert narrow == [False, False, True, True]
