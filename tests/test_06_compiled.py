"""Page 06 compiled: what docs/kernels.toml has no limits for."""

import re

from compiled.aot import Call

NAME = "06-rms-norm"
INPUTS = (
    "x, residual, w, dy, ds = (t.detach() for t in inputs(4096, N, dtype))\n"
)
FORWARD = "_, s, rstd = forward(x, residual, w, N, 1e-6)\n"
HIDDEN = """
kind, options = plan_backward(N, 2, 3)
for hide in True, False:
    plan = kind, options | {"HIDE": hide}
    dx, dw = torch.empty_like(x), torch.empty_like(w)
    backward(dy, ds, s, w, rstd, dx, dw, 0.0, plan)
"""


def call(code, N, **more):
    return Call(NAME, INPUTS + code, {"N": N, "dtype": "bfloat16"}, **more)


def test_the_widest_rows_need_the_hidden_number(launches):
    """Without the exclusive or the same kernel spills."""
    (launched,) = launches([call(FORWARD + HIDDEN, 16384)])
    with_it, without = (b for b in launched if "_bwd_rows" in b.kernel)
    assert with_it.spills == 0 < without.spills


NARROW = [
    (
        "first = tl.cast(tl.program_id(0), tl.int64) * ROWS",
        "first = tl.program_id(0) * ROWS",
    )
]


def test_row_offsets_have_64_bits(launches):
    """M * N may pass 2**31; the mutant has offsets of 32 bits."""
    calls = [call(FORWARD, 8191, replace=r) for r in ((), NARROW)]
    narrow = [
        re.search(r"mul\.lo\.s32\s.*\b8191;", built.text) is not None
        for (built,) in launches(calls)
    ]
    assert narrow == [False, True]
