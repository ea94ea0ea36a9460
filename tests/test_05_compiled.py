"""Page 05 compiled: what docs/kernels.toml has no limits for."""

import re

import pytest

from compiled.aot import Call
from tutorial import load

NAME = "05-fused-elementwise-layer-norm"
page = load(NAME)
INPUTS = "x, residual, w, b, dy, ds = inputs(4096, N, dtype)\n"
ADD = """
y, s = add_layer_norm(x, residual, (N,), w, b, 1e-5, {p}, 1)
torch.autograd.grad((y, s), (x, residual, w, b), (dy, ds))
"""
WITHOUT, DROPOUT = ADD.format(p=0.0), ADD.format(p=0.25)
FORWARD = "forward(x, None, w, b, 1e-5, {activation!r})"
SILU, PLAIN = (FORWARD.format(activation=a) for a in ("silu", None))


def call(code, N, **more):
    return Call(NAME, INPUTS + code, {"N": N, "dtype": "float16"}, **more)


def test_what_is_on_its_way_fits_into_shared_memory(launches):
    """With the other programs of the multiprocessor."""
    widths = 1024, 4096, 5120, 10240, 16384
    calls = [call(WITHOUT, N) for N in widths]
    for N, (_, built, *_) in zip(widths, launches(calls), strict=True):
        programs = 2 if N <= 4096 else 1
        assert "_bwd" in built.kernel
        assert built.shared * programs <= 232448 - 1024 * programs, N


def test_without_dropout_no_random_bits_are_compiled(launches):
    philox = str(0xD2511F53 - 2**32)  # a constant of the generator
    without, with_it = launches([call(c, 2048) for c in (WITHOUT, DROPOUT)])
    for i in 0, 1:  # forward, backward
        assert philox not in without[i].text
        assert with_it[i].text.count(philox) >= 10  # once in each round


def test_no_mask_goes_through_memory(launches):
    """With dropout forward reads and writes the same bytes as without."""
    calls = [call(code, 4096) for code in (WITHOUT, DROPOUT)]
    counts = []
    for built, *_ in launches(calls):
        counts.append(
            {
                kind: sum(
                    size * n
                    for (k, size), n in built.widths().items()
                    if k == kind and size >= 4 and size != 8
                )
                for kind in ("ld", "st")
            }
        )
    assert counts[0] == counts[1]


def test_the_function_is_in_place_of_its_call(launches):
    calls = [call(code, 1024) for code in (SILU, PLAIN)]
    (silu,), (plain,) = launches(calls)
    assert "ex2.approx" in silu.text and "ex2.approx" not in plain.text
    assert not re.search(r"^\s*call", silu.text, re.MULTILINE)


# The kernel that only applies an activation, with 128 threads.
APPLY = """
x = x.float()
for block in 256, 128:
    _apply[(1,)](x, x, N, ACT=_silu, BLOCK=block)
"""


def test_two_numbers_share_a_reciprocal(launches):
    """Where a thread has two; else the other one would be any number."""
    row, *applied = launches([call(SILU + APPLY, 4096)])[0]
    shared = [b.text.count("rcp.approx.ftz.f32") for b in (row, *applied)]
    per_thread = 4096 // (32 * row.num_warps)
    assert shared == [per_thread // 2, 1, 0]


@pytest.fixture(scope="module")
def planned(launches):
    """The kernel with an activation at the end of each plan."""
    widths = [plan[0] for plan in page.ACTIVATION_PLANS]
    found = launches([call(SILU, N) for N in widths])
    return {N: built for N, (built,) in zip(widths, found, strict=True)}


@pytest.mark.parametrize("plan", page.ACTIVATION_PLANS, ids=str)
def test_activation_plans_fit(planned, plan):
    """As many programs as the table says, by registers and shared memory."""
    n, _, warps, per_sm, stages = plan
    built = planned[n]
    assert built.num_warps == warps
    assert built.registers * 32 * warps * per_sm <= 65536
    assert (built.shared + 1024) * per_sm <= 233472
    assert ("cp.async" in built.text) == (stages > 1)


FORGETS = [
    (
        "if PTX and x.dtype.primitive_bitwidth == 16:\n        x = tl.inl",
        "if False:\n        x = tl.inl",
    )
]


def test_forgetting_saves_registers(launches):
    calls = [call(WITHOUT, 14336, replace=r) for r in ((), FORGETS)]
    (_, forgets, _), (_, remembers, _) = launches(calls)
    assert forgets.spills == 0
    assert remembers.spills > 100


NARROW = [
    (
        "first = tl.cast(tile, tl.int64) * ROWS  # M",
        "first = tile * ROWS  # M",
    ),
    (
        "first, left = tl.cast(tile, tl.int64) * ROWS, M - tile * ROWS\n"
        "    mean = _load(",
        "first, left = tile * ROWS, M - tile * ROWS\n    mean = _load(",
    ),
]


def test_row_offsets_have_64_bits(launches):
    """M * N may pass 2**31; the mutant has offsets of 32 bits."""
    calls = [call(WITHOUT, 4097, replace=r) for r in ((), NARROW)]
    narrow = [
        re.search(r"(mul|mad)\.lo\.s32\s.*\b4097\b", built.text) is not None
        for launched in launches(calls)
        for built in launched[:2]
    ]
    assert narrow == [False, False, True, True]
