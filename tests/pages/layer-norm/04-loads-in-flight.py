"""What must hold of the page "Loads in flight"."""

import functools
import re

import pytest
import torch

import tutorial
from compiled.declared import Kernel, Kernels
from conformance import LayerNorm, Mistake, Page


def run(page, M, N, dtype):
    x, w, b, dy = page.inputs(M, N, dtype)
    torch.autograd.grad(page.layer_norm(x, (N,), w, b), (x, w, b), dy)
    page._read[(page.NUM_SMS,)](
        x.int(), x.int(), 100, LANES=16384, num_warps=16
    )


def also(page, M, N, dtype):
    x, w, b, dy = page.inputs(M, N, dtype)
    for plan in page.PLANS.values():
        y = page.layer_norm(x, (N,), w, b, plan=plan)
        torch.autograd.grad(y, (x, w, b), dy)
    for kernel in (page._read_two, page._read_two_1):
        kernel[(1,)](x.int(), x.int(), 3, LANES=4)
    page._move[(M,)](x, x, M * N // 2, 2, 1, BLOCK_SIZE=4096)  # the ceiling


KERNELS = Kernels(
    run=run,
    also=also,
    M=4096,
    N=[4096],
    dtype="float16",
    sizes={
        "float16": [1024, 4096, 4608, 8192, 8704, 15872],
        "bfloat16": [4096],
        "float32": [1024, 4096],
    },
    kernels={
        "_layer_norm_fwd": Kernel(
            look="That of page 01: one read of the row, by 16 bytes.",
            true=lambda code: [
                code.loaded == 3 * 2 * 4096,
                code.narrow("load") == 0,
            ],
            narrow_stores=2,  # mean and rstd
        ),
        "_layer_norm_bwd": Kernel(
            look="""
            On NVIDIA GPUs no load of 16 bytes is left: rows come by
            asynchronous copies into shared memory, some before the loop and
            some in it.
            """,
            true=lambda code: [(code.count("copy", 16) > 0) != code.amd],
            narrow_copies=10,  # mean and rstd
            narrow_loads=2,
            copies="any",  # one stage above 8192 columns
            shared=232448,
            spills={15872: 144},  # as the page says: 16384 lanes
        ),
        "_layer_norm_bwd_add_up": Kernel(
            look="""
            A program reads 256 rows of sums of 16 columns, by 16 bytes.
            """,
            true=lambda code: [code.narrow("load") == 0],
            narrow_stores=1,  # of 16 columns
        ),
        "_read": Kernel(
            look="""
            A loop of loads of 4 bytes; where each reads is the value of the
            one before.
            """,
            true=lambda code: [code.count("barrier") == 0, code.spills == 0],
            narrow_loads=32,  # 16384 lanes, 512 threads
            narrow_stores=32,
        ),
    },
)


HALF, BFLOAT, SINGLE, DOUBLE = LayerNorm.dtypes
at = LayerNorm.at
PLANS = ("triton", "more programs", "one program")


def by(plan):
    """Layer norm whose backward pass has this plan."""

    def function(page):
        return functools.partial(page.layer_norm, plan=page.PLANS[plan])

    return function


def read_two(load):
    page = load()
    page.exercise_1(page._read_two_1)


def CLAIMS(figure):
    knee = figure("layer-norm-loads-knee", "H200")
    slower = figure("layer-norm-loads-knee", "H100")
    for each in knee, slower:
        speeds = each.medians["reading"]
        most = max(speeds.values())
        # The knee of the page is 16 KB on both cards.
        assert min(KB for KB in speeds if speeds[KB] >= 0.9 * most) == 16
        assert speeds[64] < speeds[16] < speeds[32]
    yield (
        f"On the H200, 16 KB in flight give {knee.median('reading', 16)} "
        f"GB/s, 32 KB give {knee.median('reading', 32)} GB/s, and 64 KB only "
        f"{knee.median('reading', 64)} GB/s. "
        f"On the H100, they give {slower.median('reading', 16)} GB/s, "
        f"{slower.median('reading', 32)} GB/s and "
        f"{slower.median('reading', 64)} GB/s."
    )
    programs = figure("layer-norm-loads-programs", "H200")
    of_h100 = figure("layer-norm-loads-programs", "H100")
    for each in programs, of_h100:
        for N, most in ((1024, 8), (4096, 3), (8192, 1)):
            found = each.medians[str(N)]
            assert max(found, key=found.get) == most
    yield (
        "On the H200 the best number of programs is 8 at 1024 columns, where "
        f"8 reach {programs.share('1024', 8)}% of the copy and 6 reach "
        f"{programs.share('1024', 6)}%, and 3 at 4096 columns and 1 at 8192."
    )
    yield (
        "On the H100 the best numbers are the same; at 1024 columns 8 reach "
        f"{of_h100.share('1024', 8)}% there and 6 reach "
        f"{of_h100.share('1024', 6)}%."
    )
    for card in "H200", "H100":
        stages = figure("layer-norm-loads-stages", card)
        middle = [stages.share("4096", number) for number in (1, 2, 3, 5)]
        wide = [stages.share("8192", number) for number in (1, 2, 3, 5)]
        yield (
            f"On the {card}, at 4096 columns, one stage reaches {middle[0]}% "
            f"of the copy, two reach {middle[1]}%, three {middle[2]}% and "
            f"five {middle[3]}%; at 8192 columns one reaches {wide[0]}%, two "
            f"{wide[1]}%, three {wide[2]}% and five {wide[3]}%."
        )
        # What the page says of stages without numbers.
        programs = figure("layer-norm-loads-programs", card)
        for N, many in ((1024, 6), (4096, 3), (8192, 1)):
            speeds = stages.medians[str(N)]
            assert speeds[2] < speeds[1]
            assert (speeds[5] > speeds[3]) == (N < 8192)
            # Fewer warps run, and it is faster all the same.
            assert speeds[5] > programs.medians[str(N)][many]
    warps = figure("layer-norm-loads-occupancy", "H200")
    yield (
        "With stages (Triton) fewer warps run: on the H200 "
        f"{warps.median('triton', 4096):.0f}% at 4096 columns, where more "
        f"programs have {warps.median('more programs', 4096):.0f}%."
    )
    backward = figure("layer-norm-loads-backward", "H200")
    of_h100 = figure("layer-norm-loads-backward", "H100")
    yield (
        "The knee is that of the kernel above, which on the H200 reads "
        f"{knee.all_medians('reading').most} GB/s; the copy moves "
        f"{backward.median('copy', 8192)} GB/s at 8192 columns, and must have "
        "more in flight. On the H100 the kernel reads "
        f"{slower.all_medians('reading').most} GB/s, and the copy moves "
        f"{of_h100.median('copy', 8192)} GB/s."
    )
    narrow, wide = backward.between(0, 8192), backward.between(8193)
    ahead, many = narrow.shares("triton"), narrow.shares("more programs")
    same = wide.shares("triton")
    compiled = backward.shares("torch.compile")
    pytorch = backward.shares("torch")
    yield (
        f"On the H200 stages reach {ahead.least}% to {ahead.most}% of the "
        f"copy up to 8192 columns, and more programs {many.least}% to "
        f"{many.most}%; above, the three plans are the same and reach "
        f"{same.least}% to {same.most}%. torch.compile, the best of three "
        f"compilations, reaches {compiled.least}% to {compiled.most}% at all "
        f"widths, PyTorch {pytorch.least}% to {pytorch.most}%."
    )
    gains = narrow.ratios("triton", "more programs")
    assert gains.least == narrow.ratio("triton", "more programs", 4608) > 1
    yield (
        "At 4608 columns stages gain least: "
        f"{narrow.share('triton', 4608)}%, and more programs reach "
        f"{narrow.share('more programs', 4608)}%."
    )
    narrow, wide = of_h100.between(0, 8192), of_h100.between(8193)
    ahead, many = narrow.shares("triton"), narrow.shares("more programs")
    assert narrow.ratios("triton", "more programs").least > 1
    same = wide.shares("triton")
    compiled = of_h100.shares("torch.compile")
    pytorch = of_h100.shares("torch")
    yield (
        "On the H100, whose memory is slower, stages reach "
        f"{ahead.least}% to {ahead.most}% of its copy up to 8192 columns, and "
        f"more programs {many.least}% to {many.most}%; above, the three plans "
        f"reach {same.least}% to {same.most}%. torch.compile reaches "
        f"{compiled.least}% to {compiled.most}%, PyTorch {pytorch.least}% to "
        f"{pytorch.most}%."
    )


# Numbers with a unit that nothing has measured, and why they are right.
FACTS = {
    "all of them read 256 MB": "the argument MB of the benchmark",
    "90% of {} GB/s": "from which speed on the cell looks for its answer",
}

PAGE = Page(
    __file__,
    LayerNorm(),
    {plan: by(plan) for plan in PLANS},
    # A small GPU, so that a program has several rows, and several turns of
    # the loop that adds up the programs' sums.
    quick=(
        ("if ON_GPU else 132  # of an H200", "if ON_GPU else 2"),
        ("(programs, 2 * N, 256, 16)", "(programs, 2 * N, 4, 16)"),
    ),
    cases=(
        at(3, 2049, HALF),
        at(2, 257),
        *(at(17, 65, HALF, function=plan) for plan in PLANS),
    ),
    full=(
        *(
            at(M, N, dtype, function=plan)
            for N in (1000, 1023, 4096, 4608, 16384)
            # More rows than programs, but few: random numbers take most of
            # the time.
            for M, dtype in ((1151, HALF), (300, BFLOAT), (300, SINGLE))
            for plan in PLANS
        ),
        *(at(300, N, DOUBLE) for N in (33, 1151, 8192)),
    ),
    mistakes=(
        Mistake(
            ValueError, "1 to 16384", lambda ones: (ones(1, 16385), (16385,))
        ),
        *(
            Mistake(
                ValueError,
                "eps is .*0 or more",
                lambda ones: (ones(2, 4), (4,)),
                {"eps": eps},
            )
            for eps in (-1e-5, float("nan"))
        ),
    ),
    elsewhere="is on cuda:1: not the current one",
    repeatable=PLANS,
    repeated=tuple(
        at(4096, N, function=plan)
        for N in (1024, 4608, 8192, 15872)
        for plan in PLANS
    ),
    trains=("triton",),
    huge=(8192,),
    huge_functions=("triton",),
    sanitizers=("memcheck", "racecheck", "synccheck"),
    sanitized=(
        *(
            at(700, N, HALF, function=plan)
            for N in (1000, 1001)  # copied ahead, and not
            for plan in PLANS[:2]
        ),
        read_two,
    ),
    mutants={
        "c1 dropped": ("(wdy - x_hat * c1 - c2) * rstd", "(wdy - c2) * rstd"),
        "c2 dropped": (
            "(wdy - x_hat * c1 - c2) * rstd",
            "(wdy - x_hat * c1) * rstd",
        ),
        "masked lanes in the variance": (
            "x = tl.where(cols < N, x - mean, 0)",
            "x = x - mean",
        ),
        "sums without a place": (
            "sums_ptr += tl.program_id(0) * 2 * N + cols",
            "sums_ptr += cols",
        ),
        "every program once": (
            "tl.range(first, M, step, num_stages=STAGES)",
            "tl.range(first, step, step, num_stages=STAGES)",
        ),
        "only the last row": (
            "        dw += dy * x_hat",
            "        dw = dy * x_hat",
        ),
        "stage 2 stops early": (
            "mask = (rows < programs) & (cols < WIDTH)",
            "mask = (rows < programs - 1) & (cols < WIDTH)",
        ),
        "stage 2 has one turn": (
            "for first in range(0, programs, ROWS):",
            "for first in range(0, 1, ROWS):",
        ),
        "dy with strides of its own": ("dy.contiguous(), x", "dy, x"),
    },
    kills=tuple(
        at(M, N, dy=dy, function=plan)
        for plan in PLANS
        for M, N, dy in (
            (3, 129, "contiguous"),
            (3, 9, "one number"),
            (9, 9, "contiguous"),
        )
    ),
)


def test_the_page_as_it_is(unedited):
    for plan in PLANS:
        case = at(17, 40, HALF)
        PAGE.operation.run(by(plan)(unedited), case, unedited.DEVICE)


@pytest.mark.cpu  # with two multiprocessors there are fewer programs than rows
def test_the_order_of_additions_follows_the_programs(page):
    """Why the same bits are promised for the same plan."""
    tensors = page.given(40, 24, SINGLE)
    first, again, other = (
        page.backward(*tensors, (programs, 1, 2), SINGLE)[1]
        for programs in (2, 2, 3)
    )
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_every_lane_reads_what_its_last_load_says(page):
    """Also where what is read is not 0."""
    x = 8 * (torch.arange(200, dtype=torch.int32, device=page.DEVICE) % 3)
    expected = torch.arange(8, device=page.DEVICE)
    for _ in range(7):
        expected += 8 + x[expected]
    end = torch.zeros_like(x[:8])
    page._read[(2,)](x, end, 7, LANES=4)
    assert end.tolist() == expected.tolist()


def test_script_runs_alone(output):
    assert output.count("Timing needs a GPU") == 1
    places = "[40, 41, 42, 43, 44, 45, 46, 47]"
    assert f"5 steps of 2 × 4 lanes, and at {places}" in output
    assert output.count("errors below") == 2


def test_counted_bytes_in_flight(output):
    """Of x and dy: a row more for each stage above one."""
    line = r"N = (\d+), programs (\d), stages (\d): +(\d+) KB"
    found = re.findall(line, output)
    assert len(found) == 8
    for N, programs, stages, kilobytes in (map(int, line) for line in found):
        rows = programs * (1 if stages == 1 else stages - 1)
        assert kilobytes == rows * 2 * 2 * N // 1024


def test_exercise(output):
    right = output.split("right lanes: ")[1:]
    stub, solution = (line.splitlines()[0] for line in right)
    assert "False" in stub and "False" not in solution


@pytest.mark.cpu
def test_plans_of_the_page(unedited):
    """Programs, warps, stages, on an H200."""
    page = unedited
    found = {N: page.best_plan(N) for N in (200, 1024, 2048, 4096, 8192, 9000)}
    assert found == {
        200: (3, 4, 5),
        1024: (3, 4, 5),
        2048: (2, 4, 5),
        4096: (1, 4, 5),
        8192: (1, 8, 5),
        9000: (1, 16, 1),
    }


# What is counted by hand, beside what is compiled ----------------------------


def backward(page, M, N, dtype, plan):
    dy, x = torch.empty(2, M, N, dtype=dtype, device=page.DEVICE)
    mean, rstd = torch.empty(2, M, device=page.DEVICE)
    page.backward(dy, x, dy[0], mean, rstd, plan, dtype)


def backward_calls(plans):
    from compiled.aot import Call

    values = {"M": 4096, "dtype": "float16"}
    return [
        Call(PAGE.name, backward, values | {"N": N, "plan": plan})
        for N, plan in plans
    ]


def test_counted_by_hand_and_compiled(launches, unedited):
    """What the page says of registers, and of shared memory."""
    from compiled import occupancy
    from compiled.limits import Facts

    page = unedited
    plans = [(N, page.one_stage(N)) for N in page.WIDTHS]
    plans += [(N, page.best_plan(N)) for N in page.WIDTHS]
    every = launches(backward_calls(plans))
    for (N, plan), (built, _) in zip(plans, every, strict=True):
        per_sm, warps, stages = plan
        assert built.spills == 0
        most, *_ = occupancy.occupancy(
            "sm_90", built.registers, built.shared, warps
        )
        assert most // warps >= per_sm, N  # all run at a time
        if stages == 1:  # four numbers a lane, and 32 more a thread
            by_hand = 65536 // (4 * N + 32 * 32 * warps)
            assert abs(most // warps - min(by_hand, 64 // warps)) <= 1, N
            assert N < 8192 or most // warps == by_hand == 1
        assert (Facts(built).count("copy") > 0) == (stages > 1)
        rows = 3 * N * 2 * (stages - 1)  # x, dy and w
        assert stages == 1 or rows <= built.shared <= rows + 1024


def test_what_the_page_says_of_warps(launches):
    """4096 columns: three programs of 4 warps fit, of 8 they do not; 8192
    columns in 4 warps: some numbers are kept in memory. So are some of wider
    rows, if their loop copies ahead."""
    from compiled import occupancy

    plans = [(4096, (3, 8, 1)), (8192, (1, 4, 1)), (8704, (1, 16, 2))]
    ((eight, _), (four, _), (ahead, _)) = launches(backward_calls(plans))
    most, *_ = occupancy.occupancy("sm_90", eight.registers, eight.shared, 8)
    assert most // 8 == 2
    assert four.spills > 0 < ahead.spills


def best_plans(page, M, widths, dtype):
    for N in widths:
        backward(page, M, N, dtype, page.best_plan(N, dtype.itemsize))


def test_best_plan_fits_into_the_shared_memory_of_an_older_gpu(launches):
    from compiled import occupancy
    from compiled.aot import Call

    values = {"M": 8, "widths": [8192, 16384], "dtype": "float16"}
    (built,) = launches([Call(PAGE.name, best_plans, values, "sm_80")])
    limits = occupancy.LIMITS["sm_80"]
    kernels = [b for b in built if b.kernel == "_layer_norm_bwd"]
    assert [b.num_stages for b in kernels] == [4, 1]
    for kernel in kernels:
        assert kernel.shared <= limits.shared - limits.reserved


def test_no_stages_are_tried_that_an_older_gpu_has_no_room_for(
    unedited, monkeypatch
):
    """A launch that asks for too much would end the page there."""
    from compiled import occupancy

    page = unedited
    limits = occupancy.LIMITS["sm_80"]
    monkeypatch.setattr(page, "SHARED", limits.shared - limits.reserved)
    monkeypatch.setattr(page, "ON_GPU", True)
    launched = []

    def timed(prepare):
        prepare()()
        return 2, 1, 4

    def launch(dy, x, w, mean, rstd, plan, dtype):
        launched.append((x.shape[1], plan[2]))

    monkeypatch.setattr(page, "device_time", timed)
    monkeypatch.setattr(page, "backward", launch)
    small = page.given
    monkeypatch.setattr(page, "given", lambda M, *of: small(2, *of))
    bytes_moved = 3 * 4096 * 2 * 8192
    speed = bytes_moved / 2 * 1e-3
    monkeypatch.setattr(page, "ceiling", lambda **of: (2 * speed, 0, 0))
    measure = page.bench_stages.fn
    given = {"M": 4096, "dtype": HALF, "mode": "backward"}
    tried = [(N, stages) for stages in (1, 4, 5) for N in page.WIDTHS]
    for N, stages in tried:
        found = measure(stages=stages, provider=str(N), **given)
        if N == 8192 and stages == 4:  # half of the copy, and its quantiles
            assert found == pytest.approx([50, 25, 100])
        assert (found[0] != found[0]) == ((N, stages) == (8192, 5))
    assert launched == [one for one in tried if one != (8192, 5)]


def wider_weights(page, M, N):
    x, dy = torch.empty(2, M, N, dtype=HALF, device=page.DEVICE)
    w, b = torch.empty(2, N, device=page.DEVICE)
    x, w, b = (t.clone().requires_grad_() for t in (x, w, b))
    torch.autograd.grad(page.layer_norm(x, (N,), w, b), (x, w, b), dy)


def test_weights_in_float32_fit_beside_rows_in_16_bits(launches):
    """The loop copies w ahead as well, whose numbers are wider here."""
    from compiled import occupancy
    from compiled.aot import Call

    ((_, built, _),) = launches(
        [Call(PAGE.name, wider_weights, {"M": 8, "N": 8192})]
    )
    limits = occupancy.LIMITS["sm_90"]
    assert built.kernel == "_layer_norm_bwd" and built.num_stages == 3
    assert built.shared <= limits.shared - limits.reserved


@pytest.mark.gpu
def test_every_knob_is_right(page):
    for N in page.WIDTHS:
        tensors = page.given(1151, N, HALF)
        dy, x, _, mean, rstd = (t.double() for t in tensors)
        x_hat = (x - mean) * rstd  # mean and rstd are columns
        expected = torch.stack([(dy * x_hat).sum(0), dy.sum(0)])
        few, warps, _ = page.best_plan(N)
        for plan in (
            page.one_stage(N),
            (8, 8, 1),
            *((few, warps, stages) for stages in (2, 3, 4, 5)),
        ):
            _, out = page.backward(*tensors, plan, SINGLE)
            difference = (out - expected).norm()
            assert difference <= 1e-5 * expected.norm(), (N, plan)


def compiled(page, N, warps, stages):
    dy, x, w, mean, rstd = page.given(64, N, HALF)
    sums = torch.empty(8, 2, N, device=page.DEVICE)
    return page._layer_norm_bwd[(8,)](
        dy, x, w, mean, rstd, torch.empty_like(x), sums, 64, N, N, stages,
        num_warps=warps,
    )  # fmt: skip


@pytest.mark.gpu
def test_compiled_as_the_page_says(page):
    """Four numbers a lane and some 32 more a thread; copies ahead."""
    for N in page.WIDTHS:
        _, warps, _ = page.one_stage(N)
        built = compiled(page, N, warps, 1)
        assert built.n_regs == pytest.approx(32 + N // (8 * warps), rel=0.25)
        assert built.n_spills == 0
        assert "cp.async.c" not in built.asm["ptx"]
        assert "cp.async.c" in compiled(page, N, warps, 4).asm["ptx"]
    assert compiled(page, 8192, 4, 1).n_spills > 0


@pytest.mark.gpu
def test_reading(page):
    """Every program has read its part of the last rows."""
    x = torch.zeros(50, 7, 1024, dtype=torch.int32, device=page.DEVICE)
    lanes = torch.arange(x[0].numel(), device=page.DEVICE)
    for steps in 49, 50:
        page._read[(7,)](x, end := x[0].clone(), steps, LANES=1024)
        assert torch.equal(end.flatten(), (lanes + steps * 7168).int())


@pytest.mark.cpu
def test_every_line_of_the_figures_measures_what_it_says():
    """A call of each provider, at one size: it moves what is counted."""
    calls = []

    def speed(bytes_moved, prepare):
        prepare()()
        calls.append(bytes_moved)
        return 2.0, 1.0, 3.0

    page = tutorial.load(
        PAGE.name, (("if ON_GPU else 132  # of an H200", "if ON_GPU else 2"),)
    )
    page.ON_GPU, page.speed = True, speed
    page.best_of_three_compilations = lambda function, measure: measure(
        function
    )
    bench = page.bench_backward.benchmarks
    for provider in bench.line_vals:
        del calls[:]
        values = {"M": 5, "N": 24, "provider": provider}
        assert page.bench_backward.fn(**bench.args | values) == (2, 1, 3)
        tiles = 6 if provider == "copy" else 1
        assert calls == tiles * [3 * 5 * 24 * 2]
    for benchmark, knob in (
        (page.bench_programs, "programs"),
        (page.bench_warps, "warps"),
        (page.bench_stages, "stages"),
    ):
        bench = benchmark.benchmarks
        for N in bench.line_vals:
            del calls[:]
            values = {"M": 2, knob: bench.x_vals[-1], "provider": N}
            assert benchmark.fn(**bench.args | values) == [100, 50, 150]
            assert calls == 7 * [3 * 2 * int(N) * 2]
    del calls[:]
    assert page.bench_reading.fn(KB=1, MB=1, provider="reading") == (2, 1, 3)
    assert calls == [488 * 2 * 1024]
