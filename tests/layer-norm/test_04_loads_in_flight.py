"""Loads in flight: in Triton's interpreter, or on a GPU."""

import functools
import re

import hypothesis
import pytest
import torch

import layer_norm_cases as cases
from any_case import any_layer_norm, examples
from compiled import occupancy
from compiled.aot import Call
from compiled.limits import Facts
from layer_norm_cases import Case
from tutorial import load

NAME = "layer-norm/04-loads-in-flight"
page = load(NAME)
page.NUM_SMS = 3  # a small GPU, so that a program has several rows


def run(case, plan=page.best_plan, module=page):
    function = functools.partial(module.layer_norm, plan=plan)
    cases.run(function, case, module.DEVICE)


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_shapes(dtype):
    for shape in (1, 1), (3, 129), (17, 40), (2, 257):
        run(Case(shape[:1], shape[1:], dtype))


@pytest.mark.parametrize("plan", page.PLANS.values())
def test_every_plan(plan):
    run(Case((17,), (65,), torch.float16), plan)


def test_wide_rows():
    run(Case((3,), (2049,), torch.float16))


@pytest.mark.parametrize("layout", cases.LAYOUTS)
@pytest.mark.parametrize("which", ["x", "dy", "parameters"])
def test_layouts(which, layout):
    run(Case((2, 3), (4, 7), torch.float32, **{which: layout}))


@pytest.mark.parametrize("lead", [(), (0,), (2, 0), (2, 1, 3)])
def test_dimensions(lead):
    run(Case(lead, (9,)))


def test_only_some_gradients():
    for number in range(8):
        wanted = tuple(bool(number >> i & 1) for i in range(3))
        run(Case((3,), (9,), wanted=wanted))
        run(Case((2,), (9,), weight=number < 4, bias=number % 4 < 2))


@examples(15)
@hypothesis.given(any_layer_norm())
def test_any_case(case):
    run(case)


def test_weight_and_bias_of_two_types():
    x, w, b, dy = Case((7,), (65,)).tensors(page.DEVICE)
    w, b = w.half().requires_grad_(), b.double().requires_grad_()
    y = page.layer_norm(x, (65,), w, b)
    dw, db = torch.autograd.grad(y, (w, b), dy)
    assert (dw.dtype, db.dtype) == (torch.float16, torch.float64)
    torch.testing.assert_close(db, dy.double().sum(0), rtol=1e-6, atol=1e-6)


def test_same_plan_same_bits():
    tensors = page.given(40, 24, torch.float32)
    first, again, other = (
        torch.cat([t.flatten() for t in page.backward(*tensors, plan, acc)])
        for plan, acc in (
            *2 * (((2, 1, 2), torch.float32),),
            ((3, 1, 2), torch.float32),
        )
    )
    assert torch.equal(first, again) and not torch.equal(first, other)


def _tensor(*shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype, device=page.DEVICE)


@pytest.mark.parametrize(
    ("error", "names", "arguments"),
    [
        (TypeError, "x", (_tensor(2, 8, dtype=torch.int32), (8,))),
        (TypeError, "weight", (_tensor(2, 8), (8,), _tensor(8).int())),
        (TypeError, "bias", (_tensor(2, 8), (8,), None, _tensor(8).bool())),
        (ValueError, "x.*7", (_tensor(2, 8), (7,))),
        (ValueError, "normalized_shape.*0", (_tensor(2, 0), (0,))),
        (ValueError, "normalized_shape", (_tensor(2), ())),
        (ValueError, "x is on", (_tensor(2, 8).to("meta"), (8,))),
        (ValueError, "weight", (_tensor(2, 8), (8,), _tensor(7))),
        (ValueError, "bias", (_tensor(2, 8), (8,), None, _tensor(2, 4))),
        (ValueError, "weight", (_tensor(2, 8), (8,), _tensor(8).to("meta"))),
        (ValueError, "1 to 16384", (_tensor(1, 16385), (16385,))),
    ],
)
def test_mistakes_are_named(error, names, arguments):
    with pytest.raises(error, match=names):
        page.layer_norm(*arguments)


def test_second_derivative_is_refused():
    x = torch.randn(2, 8, device=page.DEVICE, requires_grad=True)
    y = page.layer_norm(x, (8,)).square().sum()
    (dx,) = torch.autograd.grad(y, x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


# Each edit must make a check fail.
MUTANTS = {
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
    "dy with strides of its own": ("dy.contiguous(), x", "dy, x"),
}


def _suite(module):
    """A few cases that together catch every mutant."""
    module.NUM_SMS = 2
    one = module.PLANS["one program"]
    run(Case((3,), (129,)), one, module)
    run(Case((3,), (9,), dy="one number"), one, module)
    run(Case((9,), (9,)), module.best_plan, module)


def test_suite_passes():
    _suite(load(NAME))


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_fail(name):
    mutant = load(NAME, [MUTANTS[name]])
    with pytest.raises(AssertionError):
        _suite(mutant)


def test_every_lane_reads_what_its_last_load_says():
    """Also where what is read is not 0."""
    x = 8 * (torch.arange(200, dtype=torch.int32, device=page.DEVICE) % 3)
    expected = torch.arange(8, device=page.DEVICE)
    for _ in range(7):
        expected += 8 + x[expected]
    end = torch.zeros_like(x[:8])
    page._read[(2,)](x, end, 7, LANES=4)
    assert end.tolist() == expected.tolist()


def test_script_runs_alone(output):
    if not page.ON_GPU:
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


def test_plans_of_the_page():
    """Programs, warps, stages."""
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

BACKWARD = """
dy, x = torch.empty(2, M, N, dtype=dtype, device=DEVICE)
w, mean, rstd = dy[0], *torch.empty(2, M, device=DEVICE)
backward(dy, x, w, mean, rstd, plan, dtype)
"""


def test_counted_by_hand_and_compiled(launches):
    """What the page says of registers, and of shared memory."""
    plans = [(N, page.one_stage(N)) for N in page.WIDTHS]
    plans += [(N, page.best_plan(N)) for N in page.WIDTHS]
    calls = [
        Call(
            NAME,
            BACKWARD,
            {"M": 4096, "N": N, "dtype": "float16", "plan": plan},
        )
        for N, plan in plans
    ]
    for (N, plan), (built, _) in zip(plans, launches(calls), strict=True):
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
    plans = [(4096, (3, 8, 1)), (8192, (1, 4, 1)), (8704, (1, 16, 2))]
    calls = [
        Call(
            NAME,
            BACKWARD,
            {"M": 4096, "N": N, "dtype": "float16", "plan": plan},
        )
        for N, plan in plans
    ]
    ((eight, _), (four, _), (ahead, _)) = launches(calls)
    most, *_ = occupancy.occupancy("sm_90", eight.registers, eight.shared, 8)
    assert most // 8 == 2
    assert four.spills > 0 < ahead.spills


BEST = """
for N in widths:
    dy, x = torch.empty(2, M, N, dtype=dtype, device=DEVICE)
    w, mean, rstd = dy[0], *torch.empty(2, M, device=DEVICE)
    backward(dy, x, w, mean, rstd, best_plan(N, x.element_size()), dtype)
"""


def test_best_plan_fits_into_the_shared_memory_of_an_older_gpu(launches):
    values = {"M": 8, "widths": [8192, 16384], "dtype": "float16"}
    (built,) = launches([Call(NAME, BEST, values, "sm_80")])
    limits = occupancy.LIMITS["sm_80"]
    kernels = [b for b in built if b.kernel == "_layer_norm_bwd"]
    assert [b.num_stages for b in kernels] == [4, 1]
    for kernel in kernels:
        assert kernel.shared <= limits.shared - limits.reserved


def test_no_stages_are_tried_that_an_older_gpu_has_no_room_for(monkeypatch):
    """A launch that asks for too much would end the page there."""
    limits = occupancy.LIMITS["sm_80"]
    monkeypatch.setattr(page, "SHARED", limits.shared - limits.reserved)
    monkeypatch.setattr(page, "ON_GPU", True)
    launched = []

    def timed(function):
        function()
        return 1, 1, 1

    def backward(dy, x, w, mean, rstd, plan, dtype):
        launched.append((x.shape[1], plan[2]))

    monkeypatch.setattr(page, "device_time", timed)
    monkeypatch.setattr(page, "backward", backward)
    small = page.given
    monkeypatch.setattr(page, "given", lambda M, *of: small(2, *of))
    table = page.turn("stages", [1, 4, 5], page.best_plan)
    page.plt.close("all")
    tried = [(N, stages) for stages in (1, 4, 5) for N in page.WIDTHS]
    assert launched == [one for one in tried if one != (8192, 5)]
    assert table.isna().sum().tolist() == [0, 0, 1]


WIDER_WEIGHTS = """
x, dy = torch.empty(2, M, N, dtype=torch.float16, device=DEVICE)
w, b = torch.empty(2, N, device=DEVICE)
x, w, b = (t.clone().requires_grad_() for t in (x, w, b))
torch.autograd.grad(layer_norm(x, (N,), w, b), (x, w, b), dy)
"""


def test_weights_in_float32_fit_beside_rows_in_16_bits(launches):
    """The loop copies w ahead as well, whose numbers are wider here."""
    ((_, built, _),) = launches(
        [Call(NAME, WIDER_WEIGHTS, {"M": 8, "N": 8192})]
    )
    limits = occupancy.LIMITS["sm_90"]
    assert built.kernel == "_layer_norm_bwd" and built.num_stages == 3
    assert built.shared <= limits.shared - limits.reserved
