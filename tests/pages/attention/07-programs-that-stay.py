"""What must hold of the page "Programs that stay"."""

import dataclasses
import functools

import pytest
import torch

from compiled.declared import Case, Kernel, Kernels, of_page
from measurements.figure import from_to
from tutorial import loaded

HALF, BRAIN = torch.float16, torch.bfloat16
ANY = "attention/03-any-attention"
WARPS = "attention/05-warp-specialization"
HALVES = "attention/06-two-programs"
THERE = loaded(ANY)
GLUON = loaded(WARPS)
BEFORE = loaded(HALVES)
both_passes = GLUON.both_passes
plain, float32 = GLUON.plain, GLUON.float32


def shown(page, M, N, dtype):
    """What is shown of the kernels: those in Gluon with heads of 128 numbers,
    the plain ones with heads of 32."""
    if page.in_gluon(page.torch.empty(1, 1, N, 128, dtype=dtype)):
        both_passes(page, M, N, dtype, 128)
    both_passes(page, M, N, dtype, 32)


def hopper(page, M, N, dtype):
    """All that is launched in Gluon, on a Hopper GPU."""
    for D in (128, 80, 64, 40):
        for is_causal in False, True:
            for group in 1, 4:
                both_passes(page, M, N, dtype, D, is_causal, group)
    for D in (128, 64):
        t = torch.empty(1, 2, N, D, dtype=dtype, device=page.DEVICE)
        for is_causal in False, True:
            for stays in False, True:
                page.forward(t, t, t, is_causal, 1.0, stays, pairs=False)


PUBLISHED = "2026-11-29"

KERNELS = Kernels(
    run=shown,
    also=BEFORE.also,
    M=4,
    N=[4096],
    dtype="float16",
    kernels={
        **of_page(WARPS, "_any_attention_fwd"),
        **of_page(WARPS, "_any_attention_bwd_queries"),
        **of_page(WARPS, "_any_attention_bwd_keys"),
        **of_page(HALVES, "_half_sm_bwd_queries"),
        **of_page(HALVES, "_half_sm_bwd_keys"),
        "_staying_fwd": Kernel(
            look="""
            Look in the machine code for a loop with 16 ``HGMMA``. The wait
            after them that ends in ``0x0`` comes before the powers,
            ``MUFU.EX2``, and in the PTX it comes after them.
            """,
            narrow_stores=4,  # lse
            **GLUON.IN_GLUON,
        ),
    },
    cases={
        "plain": Case(
            run=plain,
            sizes={"float16": [1000, 4096], "bfloat16": [1000, 4096]},
        ),
        "float32": Case(run=float32, sizes={"float32": [1000, 4096]}),
        "in Gluon": Case(
            run=hopper,
            sizes={"float16": [1000, 4096], "bfloat16": [1000, 4096]},
        ),
    },
)

CARD, LENGTHS = GLUON.CARD, (512, *GLUON.LENGTHS)
CUDNN, FLASH = GLUON.CUDNN, GLUON.FLASH


def CLAIMS(figure):
    yield from ()


FACTS = {}

# Its lengths are those of page 06, and some more: tiles of queries with and
# without a partner, and one query of each head.
case = THERE.case

PAGE = dataclasses.replace(
    BEFORE.PAGE,
    file=__file__,
    full=(
        *BEFORE.PAGE.full,
        *(
            case(*size, dtype=dtype, causal=causal)
            for size, causal in (
                (((3, 5), 640, 640, 128), True),
                (((3, 5), 320, 2100, 64), True),
                (((70, 6), 129, 65, 64), True),
                (((40, 8), 257, 300, 128), False),
            )
            for dtype in (HALF, BRAIN)
        ),
    ),
    prints={
        "errors below": 7,
        "Timing needs a GPU": 7,
        "right: False": 1,
    },
)

# Each of them asks for the PAGE of the file that it stands in.
test_scores_far_below_zero = THERE.test_scores_far_below_zero
test_heads_may_be_split = THERE.test_heads_may_be_split_without_a_copy
test_what_is_copied = THERE.test_what_is_copied_has_rows_of_16_bytes
test_what_is_loaded = THERE.test_no_kernel_loads_what_nobody_has_stored
test_limits_are_those_of_pytorch = THERE.test_limits_are_those_of_pytorch
test_arguments_are_those_of_pytorch = THERE.test_arguments_are_those_of_pytorch
test_torch_compile_sees_shapes = THERE.test_torch_compile_sees_shapes
test_autocast_is_compiled = THERE.test_autocast_is_compiled
test_operators = THERE.test_operators_are_what_they_promise
test_transforms = THERE.test_transforms_of_torch_func_are_refused
test_inputs_that_change = (
    THERE.test_inputs_that_change_before_the_backward_pass
)
test_the_module_is_right = THERE.test_the_module_is_right_by_itself
test_the_module_has_its_cells = THERE.test_the_module_has_the_cells_of_the_page


@pytest.fixture
def compiled(launches):
    return functools.partial(GLUON.on_hopper, launches, PAGE, KERNELS)


@pytest.mark.cpu  # what compiles for a GPU that is not there
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_as_many_programs_fit_as_are_started(compiled, dtype):
    """And a product is under way while something else is computed."""
    fits = set()
    for N in 1000, 4096:
        for built in compiled(N, hopper, dtype):
            if built.kernel != "_staying_fwd":
                continue
            assert "cp.async.bulk.tensor" in built.asm["ptx"]
            assert "1" in GLUON.waits(built)
            # With two groups that multiply there is one program on an SM.
            groups = 2 if built.registers == 168 else 1
            threads = 128 * (groups + 1)
            by_registers = 65536 // (threads * built.registers)
            by_memory = 228 * 1024 // (built.shared + 1024)
            fits.add((built.registers, min(by_registers, by_memory)))
    assert fits == {(168, 1), (128, 2), (80, 3)}


@pytest.mark.cpu  # what compiles for a GPU that is not there
def test_a_new_length_compiles_little(compiled):
    """For short causal sequences there is one version more."""
    assert GLUON.few_versions(compiled, hopper) == {
        *("_staying_fwd", "_half_sm_bwd_queries", "_half_sm_bwd_keys")
    }


@pytest.mark.cpu
def test_the_assembler_moves_a_wait_up(compiled):
    """In the loop of the machine code it waits for all products before the
    first power, and in the PTX after the last one."""
    (built,) = (
        one
        for one in compiled(4096, shown, sass=True)
        if one.kernel == "_staying_fwd"
    )
    assert built.asm["sass"]


def test_programs_get_equal_work(page):
    """As long as their number divides that of the pairs."""
    for length in 1024, 4096, 16384:
        steps = page.steps_of_programs(length, 128, True)
        assert min(steps) == max(steps)
        steps = page.steps_of_programs(length, 128, False)
        assert min(steps) < max(steps)


def test_the_exercise_asks_for_both(page):
    """Sums that are right do not make up for work dealt out unfairly."""
    assert not page.exercise_1(page._rows_of_triangle)
    assert page.exercise_1(page._rows_of_triangle_in_pairs)
