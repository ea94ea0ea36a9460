"""Page 04 compiled: what docs/kernels.toml has no limits for."""

import re

import pytest

from compiled.aot import Call

NAME = "04-layer-norm-two-pass-backward"
INPUTS = """
x, w, b, dy = example(4096, N, dtype)
_, mean, rstd = forward(x, w, b, 1e-5)
"""
BACKWARD = "layer_norm_backward(dy, x, w, mean, rstd)"


def call(code, N, dtype="float16", **more):
    return Call(NAME, INPUTS + code, {"N": N, "dtype": dtype}, **more)


def test_one_pass_spills_where_the_page_says_so(launches):
    """The accumulators of wide rows do not fit."""
    (built,) = launches([call("one_pass(dy, x, w, mean, rstd)", 16384)])
    assert built[1].kernel == "_layer_norm_bwd_one_pass"
    assert built[1].spills > 0


def test_the_steps_of_the_ladder_compile(launches):
    code = "for name in STEPS: step(dy, x, w, mean, rstd, name)"
    (built,) = launches([call(code, 512, "float32")])
    assert len(built) > 6


NARROW = {
    "_layer_norm_fwd": (
        "first = tl.cast(tl.program_id(0), tl.int64) * ROWS",
        "first = tl.program_id(0) * ROWS",
    ),
    "_dx_tile": (
        "first = tl.cast(tile, tl.int64) * ROWS  # M * N may pass 2**31",
        "first = tile * ROWS",
    ),
    "_sum_columns": (
        "first = tl.cast(split, tl.int64) * SPLIT",
        "first = split * SPLIT",
    ),
}


@pytest.mark.parametrize("name", NARROW)
def test_row_offsets_have_64_bits(launches, name):
    """M * N may pass 2**31; the mutant multiplies by N in 32 bits."""
    at = 0 if name == "_layer_norm_fwd" else 1
    calls = [call(BACKWARD, 7001, replace=r) for r in ((), [NARROW[name]])]
    wide = r"(mul|mad)\.(lo\.s64|wide\.[us]32)\s.*\b(7001|14002)[,;]"
    right, mutant = (
        len(re.findall(wide, built[at].text)) for built in launches(calls)
    )
    assert mutant < right, (mutant, right)
