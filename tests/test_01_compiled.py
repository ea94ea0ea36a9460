"""Page 01 compiled: what docs/kernels.toml has no limits for."""

import re

from compiled.aot import Call

NAME = "01-layer-norm"


def call(code, N, dtype="float16", **more):
    code = f"x, w, b, dy = inputs(4096, N, dtype)\n{code}"
    return Call(NAME, code, {"N": N, "dtype": dtype}, **more)


def test_widest_rows_of_each_type(launches):
    types = "float16", "bfloat16", "float32", "float64"
    run = "results(layer_norm, x, w, b, dy)"
    for dtype, built in zip(
        types, launches([call(run, 16384, t) for t in types]), strict=True
    ):
        assert len(built) == 3
        if dtype != "float64":
            assert built[0].spills == 0, dtype


# Without weights: the offsets of the buffers are small.
PLAIN = """
y, mean, rstd = forward(x, None, None, 1e-5)
backward(dy, x, None, mean, rstd, x, None, None)
"""
NARROW = [
    # forward, then backward
    ("row = tl.program_id(0).to(tl.int64)", "row = tl.program_id(0)"),
    ("row = tl.cast(i, tl.int64)", "row = i"),
]


def test_row_offsets_have_64_bits(launches):
    """The mutant multiplies in 32 bits; the page must not."""
    page, mutant = launches(
        [call(PLAIN, 4097, replace=replace) for replace in ((), NARROW)]
    )
    narrow = [
        re.search(r"mul\.lo\.s32\s.*\b4097;", built.text) is not None
        for built in (*page, *mutant)
    ]
    assert narrow == [False, False, True, True]
