"""What must hold of the page "Attention with warps that only load"."""

import dataclasses
import functools
import itertools
import re

import pytest
import torch

from compiled.declared import Case, Kernel, Kernels, of_page
from measurements.figure import Measured, from_to
from tutorial import loaded

HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32


def both_passes(page, M, N, dtype, D=64, is_causal=True, group=1):
    def empty(heads):
        t = torch.empty(M, heads, N, D, dtype=dtype, device=page.DEVICE)
        return t.requires_grad_()

    q, k, v = empty(16), empty(16 // group), empty(16 // group)
    y = page.attention(q, k, v, is_causal, enable_gqa=True)
    torch.autograd.grad(y, (q, k, v), torch.empty_like(y))


def run(page, M, N, dtype):
    both_passes(page, M, N, dtype)


def plain(page, M, N, dtype):
    """All that is launched in plain Triton, on every GPU."""
    for D in (256, 64, 32, 16):
        for is_causal in False, True:
            both_passes(page, M, N, dtype, D, is_causal)
    both_passes(page, M, N, dtype, group=4)


def float32(page, M, N, dtype):
    for is_causal in False, True:
        both_passes(page, M, N, dtype, 64, is_causal)


def shown(page, M, N, dtype):
    """What is shown of the kernels: those in Gluon with heads of 128 numbers,
    the plain ones with heads of 64."""
    if page.by_warps(page.torch.empty(1, 1, N, 128, dtype=dtype)):
        both_passes(page, M, N, dtype, 128)
    run(page, M, N, dtype)


def hopper(page, M, N, dtype):
    """All that is launched in Gluon, on a Hopper GPU."""
    for D in (128, 80):
        for is_causal in False, True:
            for group in 1, 4:
                both_passes(page, M, N, dtype, D, is_causal, group)
    t = torch.empty(1, 2, N, 128, dtype=dtype, device=page.DEVICE)
    for how in {"LATER": False}, {"TURNS": True}:
        for is_causal in False, True:
            page.forward(t, t, t, is_causal, 1.0, **how)


def also(page, M, N, dtype):
    """Other forms on every GPU: heads of 128 numbers, where this is Hopper
    by the kernels in Gluon."""
    both_passes(page, M, 1000, dtype, 64, is_causal=False)
    both_passes(page, M, N, dtype, 128)
    both_passes(page, M, N, dtype, D=80, group=4)
    both_passes(page, M, N, torch.float32, D=64)


PUBLISHED = "2026-11-29"


IN_GLUON = {
    "true": loaded("attention/03-any-attention").multiplies,
    "only": "sm_90",
    "shared": 227 * 1024,
    "copies": "any",
}
KERNELS = Kernels(
    run=shown,
    also=also,
    M=4,
    N=[4096],
    dtype="float16",
    kernels={
        **of_page("attention/03-any-attention", "_any_attention_fwd"),
        **of_page(
            "attention/03-any-attention",
            "_any_attention_bwd_queries",
            look="""
            Of three products in a step, two stand together before the powers.
            """,
        ),
        **of_page(
            "attention/03-any-attention",
            "_any_attention_bwd_keys",
            look="""
            Four products in a step. On sm_90 look for ``wgmma.wait_group`` in
            the PTX: it follows the first product and the second, and then the
            last two are begun without a wait between them.
            """,
        ),
        "_warps_fwd": Kernel(
            look="""
            A kernel in Gluon is written for one kind of GPU, so there is one
            tab. Look for ``setmaxnreg`` in the PTX, which gives a warp more
            registers or fewer, and for ``wgmma.wait_group`` with a 1, which
            leaves a product under way. The table has the registers that each
            thread begins with.
            """,
            narrow_stores=4,  # lse
            **IN_GLUON,
        ),
        "_warps_bwd_queries": Kernel(
            look="""
            The step stands here three times: for the first tile of keys, for
            whole tiles, and with a mask. In each, two products begin together,
            and the third is under way when the step ends.
            """,
            narrow_loads=4,  # lse
            narrow_stores=4,  # delta
            **IN_GLUON,
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

CARD = "H200"
CUDNN, FLASH, CUBLAS = "sdpa-cudnn", "torch", "cublas"


ANY = "attention/03-any-attention"
LENGTHS = 1024, 2048, 4096, 8192, 16384


def both_of(figure, mode, of_64="", kind="warps", **page):
    """The figure of a pass, and that of causal attention."""
    return [
        figure(f"{kind}-{mode}{which}{of_64}", CARD, **page)
        for which in ("", "-causal")
    ]


def of_page_03(figure, mode, of_64=""):
    return both_of(figure, mode, of_64, "any-attention", page=ANY)


def of_cudnn(figures, first=1024, who="triton"):
    """From the least share to the most, of each figure."""
    return [
        from_to(of.between(first).shares(who, CUDNN), "%") for of in figures
    ]


def of_flash(figures):
    """How many times as fast as FlashAttention-2, of each figure."""
    return [from_to(of.ratios("triton", FLASH), "") for of in figures]


def seven_products(of):
    """What our kernels do, as they have seven products and five count."""
    ours = of.median("triton", 16384)
    seven = Measured(7 / 5 * ours, ".0f")
    share = Measured(100 * seven / of.median(CUBLAS, 16384), ".0f")
    return (
        f"With seven products our kernels do 7/5 of {ours}, which is {seven} "
        f"TFLOP/s at 16384 keys. That is {share}% of what the product of "
        "matrices reaches beside them."
    )


def forward(figure):
    usual, causal = both = both_of(figure, "forward")
    short = figure("warps-forward-causal-bfloat16", CARD)
    yield (
        f"our kernel reaches {usual.median('triton', 16384)} TFLOP/s at 16384 "
        f"keys, and {causal.median('triton', 16384)} if attention is causal."
    )
    shares = of_cudnn(both, 2048)
    yield (
        f"From 2048 keys on that is {shares[0]} of cuDNN's speed, and "
        f"{shares[1]} of it if causal. At 1024 keys it is "
        f"{usual.share('triton', 1024, CUDNN)}%, and "
        f"{causal.share('triton', 1024, CUDNN)}% if causal. In bfloat16, "
        f"causal, we reach {of_cudnn([short], 2048)[0]} of cuDNN's speed from "
        "2048 keys on."
    )
    plain = of_cudnn(both, who="plain")
    yield (
        f"The plain kernel is at {plain[0]} of cuDNN's speed over all "
        f"lengths, and at {plain[1]} if causal. At 4096 keys it does "
        f"{usual.median('plain', 4096)} TFLOP/s. With a warp that loads and "
        "two groups that multiply, but wait at once, these are "
        f"{usual.median('waits', 4096)}. Waiting later makes that "
        f"{usual.median('triton', 4096)}. If the groups take turns besides, "
        f"they do {usual.median('turns', 4096)}."
    )
    # "To split the work of the warps brings the most. Waiting later helps",
    # and "Taking turns does not help", at every length.
    for of in both:
        for N in LENGTHS:
            later = of.median("triton", N)
            waits = of.median("waits", N)
            assert later > waits
            assert later > of.median("turns", N)
            if (of, N) != (causal, 1024):
                assert waits > of.median("plain", N)
        at_4096 = [of.median(who, 4096) for who in ("plain", "waits")]
        assert at_4096[1] / at_4096[0] > of.ratio("triton", "waits", 4096)
    # "There we are as fast as the plain kernel."
    assert 0.99 < causal.ratio("triton", "plain", 1024) < 1.03
    yield (
        "Compared with the product of matrices it reaches "
        f"{usual.share('triton', 16384, CUBLAS)}% at 16384 keys."
    )
    # "With long sequences our kernel is faster", and where cuDNN is ahead:
    # up to 2048 keys, and up to 4096 if causal.
    for of, last in (usual, 2048), (causal, 4096):
        for N in LENGTHS:
            ahead = of.median(CUDNN, N) > of.median("triton", N)
            assert ahead == (last >= N)


def backward(figure):
    usual, causal = both = both_of(figure, "backward")
    short = figure("warps-backward-causal-bfloat16", CARD)
    ours = usual.median("triton", 16384)
    yield (
        f"our backward pass reaches {ours} TFLOP/s at 16384 keys, and "
        f"{causal.median('triton', 16384)} if causal."
    )
    shares = of_cudnn(both, 2048)
    flash = of_flash(both)
    yield (
        f"From 2048 keys on that is {shares[0]} of cuDNN's speed, and "
        f"{shares[1]} of it if causal. At 1024 keys it is "
        f"{usual.share('triton', 1024, CUDNN)}%, and "
        f"{causal.share('triton', 1024, CUDNN)}% if causal. In bfloat16, "
        f"causal, it is {of_cudnn([short])[0]} over all lengths. Ours is "
        f"{flash[0]} times as fast as FlashAttention-2, and {flash[1]} times "
        "if causal."
    )
    plain = of_cudnn(both, 2048, "plain")
    before = of_cudnn(of_page_03(figure, "backward"), 2048)
    yield (
        f"Plain kernels alone are at {plain[0]} of cuDNN's speed from 2048 "
        f"keys on, and at {plain[1]} if causal."
    )
    yield f"with the old order, these are {before[0]}, and {before[1]}."
    for of in both:
        for N in LENGTHS:
            assert of.median("triton", N) > of.median("plain", N)
    yield seven_products(usual)
    ceiling = usual.median(CUBLAS, 16384)
    cudnn = usual.median(CUDNN, 16384)
    yield (
        f"If cuDNN has five, its {cudnn} TFLOP/s are "
        f"{usual.share(CUDNN, 16384, CUBLAS)}% of it."
    )
    best = Measured(500 / 7 * ceiling / cudnn, ".0f")
    yield (
        "At the speed of the product of matrices, seven products would have "
        f"{best}% of cuDNN's speed."
    )
    # Where cuDNN is ahead: at every length but 1024 keys if causal.
    for of in both:
        for N in LENGTHS:
            ahead = of.median(CUDNN, N) > of.median("triton", N)
            assert ahead == ((of, N) != (causal, 1024))


def of_64_numbers(figure):
    both = both_of(figure, "backward", "-64")
    now = of_cudnn(both)
    before = of_cudnn(of_page_03(figure, "backward", "-64"))
    flash = of_flash(both)
    yield (
        f"the backward pass is at {now[0]} of cuDNN's speed, and at {now[1]} "
        "if causal."
    )
    yield f"it is at {before[0]}, and {before[1]}."
    yield (
        "another run, with the same rival. Ours is "
        f"{flash[0]} times as fast as FlashAttention-2, and {flash[1]} times "
        "if causal."
    )
    # Backward it is ahead "with 64 from 2048 keys on".
    for of in both:
        ahead = [N for N in LENGTHS if of.ratio("triton", CUDNN, N) < 1]
        assert ahead == [N for N in LENGTHS if N >= 2048]
    # "Forward cuDNN is ahead up to 2048 keys", with 64 numbers.
    for of in of_page_03(figure, "forward", "-64"):
        for N in 1024, 2048:
            assert of.share("triton", N, CUDNN) < 100


def designs(figure):
    passes = [both_of(figure, mode)[1] for mode in ("forward", "backward")]
    forward, backward = passes

    def speed(of, who):
        return of.median(who, 4096)

    yield (
        f"- **Plain Triton** reaches {speed(forward, 'plain')} TFLOP/s "
        "forward. Backward, with its products in a better order, it reaches "
        f"{speed(backward, 'plain')}."
    )
    yield (
        f"reach {speed(forward, 'waits')} forward if they wait for each "
        "product at once."
    )
    yield (
        f"- **Waiting later** makes that {speed(forward, 'triton')}, and "
        f"{speed(backward, 'triton')} backward"
    )
    yield (
        f"- **Taking turns** makes {speed(forward, 'turns')} forward, less "
        "than without."
    )
    yield (
        f"- **cuDNN** reaches {speed(forward, CUDNN)} and "
        f"{speed(backward, CUDNN)}."
    )


def CLAIMS(figure):
    yield from forward(figure)
    yield from backward(figure)
    yield from of_64_numbers(figure)
    yield from designs(figure)


FACTS = {
    "so 12.5% of the work is added": "4 of 32 tiles of one head",
    "with its 64 × 64 has 6%": "8 of 128 tiles, at 1024 keys",
    "up to 740 TFLOP/s forward": "the abstract of the paper",
    "32 KB for their queries": "128 rows of 128 numbers of 2 bytes",
    "need 128 KB": "twice keys and values, 128 rows each",
}

# The function is that of page 03, and all that holds of it holds here.
THERE = loaded(ANY)
case = THERE.case

PAGE = dataclasses.replace(
    THERE.PAGE,
    file=__file__,
    full=(
        *THERE.PAGE.full,
        *(
            case(*size, dtype=dtype, causal=causal, group=group)
            for size, causal, group in (
                (((1, 2), 700, 900, 128), False, 2),
                (((2, 2), 77, 1000, 128), True, 1),
                (((2, 2), 1000, 77, 128), True, 1),
                (((1, 3), 129, 129, 96), False, 1),
                (((2, 1), 1, 4096, 128), False, 4),
            )
            for dtype in (HALF, BRAIN, SINGLE)
        ),
    ),
    repeated=(*THERE.PAGE.repeated, case((1, 4), 1000, 1500, 128)),
    compiled_cases=(
        case((2, 2), 200, 300, 128, causal=True, group=2),
        *THERE.PAGE.compiled_cases,
    ),
    graphs=(
        *THERE.PAGE.graphs,
        case((1, 2), 200, 300, 128, causal=True, group=2),
    ),
    sanitizers=("memcheck",),
    sanitized=(
        *THERE.PAGE.sanitized,
        case((1, 2), 300, 333, 80, causal=True, group=2),
    ),
    prints={
        "largest error, forward": 3,
        "errors below": 7,
        "Timing needs a GPU": 8,
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


def on_hopper(launches, page, kernels, N, run, dtype="float16", **more):
    """What a page launches on a Hopper GPU."""
    from compiled import limits

    (builds,) = launches(
        [limits.call(page.name, kernels, N, "sm_90", dtype, run, **more)]
    )
    return builds


def few_versions(compiled, run):
    """The first three kernels of a run, of which no length needs a version of
    its own: 4096 is a multiple of the tiles, which is compiled for."""
    texts = {}
    for N in 1, 1007, 4096:
        for one in compiled(N, run)[:3]:
            texts.setdefault(one.kernel, []).append(one.asm["ptx"])
    for found in texts.values():
        assert len({*found}) <= 2 and found[0] == found[1]
    return texts.keys()


@pytest.fixture
def compiled(launches):
    return functools.partial(on_hopper, launches, PAGE, KERNELS)


@pytest.mark.cpu  # what compiles for a GPU that is not there
def test_a_new_length_compiles_nothing(compiled):
    assert few_versions(compiled, hopper) == {
        *("_warps_fwd", "_warps_bwd_queries", "_any_attention_bwd_keys")
    }


def waits(built):
    """In their order, each by how many products it leaves under way."""
    return re.findall(r"wait_group.sync.aligned (\d)", built.asm["ptx"])


def powers_between_waits(built):
    """In the PTX and in the machine code: how many powers are computed between
    each wait that leaves a product under way and the wait for all after it."""
    found = []
    for kind, waits, power in (
        ("ptx", r"wait_group.sync.aligned (\d)", "ex2.approx"),
        ("sass", r"WARPGROUP.DEPBAR.LE gsb0, 0x(\d)", "MUFU.EX2"),
    ):
        _, *parts = re.split(waits, built.asm[kind])
        order = parts[::2]
        found.append(
            [
                parts[2 * i + 1].count(power)
                for i in range(len(order) - 1)
                if order[i : i + 2] == ["1", "0"]
            ]
        )
    return found


def usual(page, M, N, dtype):
    """Both passes of heads of 128 numbers, not causal."""
    both_passes(page, M, N, dtype, 128, is_causal=False)


@pytest.mark.cpu
def test_the_assembler_moves_a_wait_up(compiled):
    """Of each group: by the source all powers of a step run beside a product,
    and in the machine code none."""
    built = compiled(4096, usual, sass=True)[0]
    assert built.kernel == "_warps_fwd"
    assert powers_between_waits(built) == [[66, 66], [0, 0]]


@pytest.mark.cpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_kernels_in_gluon(compiled, dtype):
    """They fetch tiles by the TMA, have warps with registers of their own, and
    leave a product under way where they are not told to wait at once."""
    found = {}
    for N in 1000, 4096:
        for built in compiled(N, hopper, dtype):
            if not built.kernel.startswith("_warps"):
                continue
            assert "cp.async.bulk.tensor" in built.asm["ptx"]
            assert built.asm["ptx"].count("setmaxnreg") >= 3
            found.setdefault(built.kernel, []).append({*waits(built)})
    assert found["_warps_bwd_queries"] == 16 * [{"0", "1"}]
    # LATER is False in two of twelve.
    later = [each == {"0", "1"} for each in found["_warps_fwd"]]
    assert len(later) == 24 and sum(later) == 20


@pytest.mark.cpu
def test_where_plain_kernels_wait(compiled):
    """As the page says: for all products that are under way. And the last two
    products of the step of the keys are begun without a wait between them."""
    runs = {}
    for built in compiled(4096, run):
        assert {*waits(built)} == {"0"}, built.kernel
        steps = re.findall(r"wgmma.(mma_async|wait_group)", built.asm["ptx"])
        runs[built.kernel] = [
            len([*run])
            for what, run in itertools.groupby(steps)
            if what == "mma_async"
        ]
    # Two loops, one of them with a mask. A product is four instructions.
    assert runs["_any_attention_bwd_queries"][:3] == [4, 4, 4]
    assert runs["_any_attention_bwd_keys"][:3] == [4, 4, 8]


def test_barriers_are_tried_in_many_orders(page):
    """A warp that waits for a phase which never comes is noticed, and so is
    one that gives a tile back too early or too late."""
    assert not page.exercise_1(page.group_of_dq)
    assert page.exercise_1(page.group_of_dq_later)

    def never(tiles, k_ring, full, free, used):
        for i in range(tiles):
            yield full[2 * (i % 2)], i // 2 % 2
            used.append(i)

    assert not page.exercise_1(never)


@pytest.mark.cpu
def test_a_wait_for_the_wrong_phase_never_ends(page):
    full, free = page.Barrier(1), page.Barrier(2)

    def warp(parity):
        yield free, parity
        full.arrive()

    assert page.run_warps([warp(1)], seed=0)
    assert not page.run_warps([warp(0)], seed=0)
