"""Page 03 compiled: what docs/kernels.toml has no limits for."""

import re

from compiled.aot import Call

NAME = "03-layer-norm-any-width"
INPUTS = "x, w, b, dy = (t.detach() for t in inputs(4096, N, dtype))\n"


def call(code, N, **more):
    return Call(NAME, INPUTS + code, {"N": N, "dtype": "float16"}, **more)


def test_shared_rows_stay_in_registers(launches):
    """No layout that moves whole tiles through shared memory."""
    widths = 10248, 65536, 262144, 524288, 1048576
    kernels = set()
    calls = [call("planned(x, w, b, dy)", N) for N in widths]
    for N, launched in zip(widths, launches(calls), strict=True):
        for built in launched:
            if built.kernel.endswith(("fwd_slices", "bwd_shared")):
                kernels.add(built.kernel)
                stores = built.text.count("st.shared")
                assert stores < 100, (built.kernel, N)
    assert kernels == {"_layer_norm_fwd_slices", "_layer_norm_bwd_shared"}


NARROW = [
    (
        "first = tl.cast(tl.program_id(0), tl.int64) * ROWS",
        "first = tl.program_id(0) * ROWS",
    )
]


def test_row_offsets_have_64_bits(launches):
    """M * N may pass 2**31; the mutant has offsets of 32 bits."""
    calls = [
        call("forward(x, w, b, 1e-5)", 8200, replace=replace)
        for replace in ((), NARROW)
    ]
    narrow = [
        re.search(r"mul\.lo\.s32\s.*\b8200;", built.text) is not None
        for (built,) in launches(calls)
    ]
    assert narrow == [False, True]
