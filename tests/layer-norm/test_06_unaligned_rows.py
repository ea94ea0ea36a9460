"""Rows that begin anywhere: in Triton's interpreter, or on a GPU."""

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F

import layer_norm_cases as cases
from any_case import examples
from layer_norm_cases import Case
from tutorial import load

NAME = "layer-norm/06-unaligned-rows"
# Narrow chunks, so that narrow rows have several, and few programs in the
# second kernel.
FEW = (
    ("(triton.cdiv(2 * N, 16),)", "(triton.cdiv(2 * N, 256),)"),
    ("2 * N, rows, 16, EARLY", "2 * N, rows, 256, EARLY"),
)
SMALL = (
    ('"CHUNK": chunk, "ROWS": max(1024 // itemsize // tile, 1)',
     '"CHUNK": min(chunk, 16), "ROWS": 2'),
    ('"CHUNK": chunk, "ROWS": max(1024 // itemsize // chunk, 1)',
     '"CHUNK": min(chunk, 16), "ROWS": 2'),
    *FEW,
)  # fmt: skip
page = load(NAME, FEW)
small = load(NAME, SMALL)
small.NUM_SMS = 1  # 8 programs, each with several tiles


def run(case, module=small):
    cases.run(module.layer_norm, case, module.DEVICE)


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_shapes(dtype):
    for M, N in (1, 1), (20, 3), (2, 15), (19, 17), (3, 35), (5, 48):
        run(Case((M,), (N,), dtype))
    run(Case((1,), (129,), dtype), page)


@pytest.mark.parametrize("layout", cases.LAYOUTS)
@pytest.mark.parametrize("which", ["x", "dy", "parameters"])
def test_layouts(which, layout):
    """Two dimensions of rows and two of columns, of which 15 are odd."""
    run(Case((2, 3), (3, 5), torch.float16, **{which: layout}))


@pytest.mark.parametrize("first", [0, 3, 8])
@pytest.mark.parametrize("more", [0, 5, 8])
def test_columns_of_a_wider_matrix(first, more):
    """Views are read where they are; the other columns are NaN."""
    M, N = 11, 21
    wide = torch.full((M, first + N + more), float("nan")).half()
    x = wide[:, first : first + N].normal_().to(page.DEVICE)
    assert more + first == 0 or x.stride(0) > N or page.ON_GPU
    x, (w, b) = x.requires_grad_(), torch.rand(2, N, device=page.DEVICE).half()
    dy = torch.randn(M, N, device=page.DEVICE).half()
    y = small.layer_norm(x, N, w, b)
    (dx,) = torch.autograd.grad(y, x, dy)
    exact = x.detach().double().requires_grad_()
    expected = F.layer_norm(exact, (N,), w.double(), b.double())
    (grad,) = torch.autograd.grad(expected, exact, dy.double())
    for found, value in (y, expected), (dx, grad):
        assert (found - value).norm() <= 2**-11 * value.norm()


def test_when_lanes_are_shifted():
    def step(*shape, first=0, dtype=torch.float16, cut=None):
        flat = torch.zeros(first + 4096, dtype=dtype)[first:]
        x = flat[: shape[0] * shape[1]].view(shape)
        return page.lane_step(cut or shape[1], x[:, :cut])

    assert step(3, 13) == 8 and step(3, 13, dtype=torch.float32) == 4
    assert step(3, 16) == 1  # all rows are aligned
    assert step(3, 13, first=1) == 1  # no row begins where y's does
    assert step(3, 21, cut=13) == 8 and step(3, 16, cut=13) == 1


@pytest.mark.parametrize("lead", [(), (3,), (2, 1, 3), (0,), (2, 0)])
def test_dimensions(lead):
    for shape in (1,), (9,), (3, 5):
        run(Case(lead, shape))


def test_only_some_gradients():
    for number in range(0, 32, 3):
        *wanted, weight, bias = (bool(number >> i & 1) for i in range(5))
        run(Case((2,), (9,), weight=weight, bias=bias, wanted=tuple(wanted)))


def test_weight_and_bias_of_two_types():
    x, w, b, dy = Case((7,), (25,)).tensors(page.DEVICE)
    w, b = w.half().requires_grad_(), b.double().requires_grad_()
    dw, db = torch.autograd.grad(page.layer_norm(x, 25, w, b), (w, b), dy)
    assert (dw.dtype, db.dtype) == (torch.float16, torch.float64)
    torch.testing.assert_close(db, dy.double().sum(0), rtol=1e-6, atol=1e-6)


@hypothesis.settings(
    examples(8),
    phases=[hypothesis.Phase.generate],  # others trace, which is slow
)
@hypothesis.given(
    M=st.integers(0, 20),
    N=st.integers(1, 40),
    dtype=st.sampled_from(cases.DTYPES),
    x=st.sampled_from(sorted(cases.LAYOUTS)),
    dy=st.sampled_from(sorted(cases.LAYOUTS)),
    weight=st.booleans(),
    bias=st.booleans(),
)
def test_any_case(M, N, **more):
    run(Case((M,), (N,), **more))


@pytest.mark.parametrize("itemsize", [2, 4, 8])
def test_formulas_answer_for_every_width(itemsize):
    """Powers of two, and what a thread and a multiprocessor hold."""
    for step in 1, 16 // itemsize:
        for rule, most in (
            (page.plan_forward, 32768),
            (page.plan_backward, 20464),
        ):
            for N in {*range(1, 300), *range(301, most // itemsize + 1, 37)}:
                if step > 1 and N % step == 0:
                    continue
                plan = rule(N, itemsize, step)
                rows, chunk, warps = (
                    plan[key] for key in ("ROWS", "CHUNK", "num_warps")
                )
                assert all(v & (v - 1) == 0 for v in (rows, chunk, warps))
                assert warps <= 8
                lanes = -(-(N + step - 1) // chunk) * chunk
                assert lanes - N < chunk + step
                matrices = 2 if rule is page.plan_backward else 1
                tile = matrices * rows * lanes * itemsize
                ahead = (plan["STAGES"] - 1) * tile * (8 // warps)
                assert ahead <= 128 * 1024 or N < 64


def test_widest_rows():
    run(Case((1,), (10231,), torch.float16), page)
    run(Case((2,), (16383,), torch.float16, wanted=3 * (False,)), page)


def test_same_plan_same_bits():
    x, w, b, dy = small.inputs(20, 21, torch.float16)
    y = small.layer_norm(x, 21, w, b)
    first, again = (
        torch.autograd.grad(y, (w, b), dy, retain_graph=True) for _ in "12"
    )
    assert all(map(torch.equal, first, again))


def test_second_derivative_is_refused():
    x = torch.randn(2, 9, device=page.DEVICE, requires_grad=True)
    y = page.layer_norm(x, (9,)).square().sum()
    (dx,) = torch.autograd.grad(y, x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


def _tensor(*shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype, device=page.DEVICE)


@pytest.mark.parametrize(
    ("error", "names", "arguments"),
    [
        (TypeError, "x is .*int32", (_tensor(2, 8, dtype=torch.int32), 8)),
        (TypeError, "weight", (_tensor(2, 8), 8, _tensor(8).int())),
        (ValueError, "x.*normalized_shape", (_tensor(2, 8), 7)),
        (ValueError, "normalized_shape", (_tensor(2, 8), ())),
        (ValueError, "normalized_shape", (_tensor(2, 0), 0)),
        (ValueError, "weight", (_tensor(2, 8), 8, _tensor(7))),
        (ValueError, "bias", (_tensor(2, 8), 8, None, _tensor(2, 4))),
        (ValueError, "eps", (_tensor(2, 8), 8, None, None, float("nan"))),
        (ValueError, "weight", (_tensor(2, 8), 8, _tensor(8).to("meta"))),
        (ValueError, "8193 .*11-every-width", (_tensor(2, 8193), 8193)),
        (
            ValueError,
            "5117 .*11-every-width",
            (_tensor(2, 5117).requires_grad_(), 5117),
        ),
    ],
)
def test_mistakes_are_named(error, names, arguments):
    with pytest.raises(error, match=names):
        page.layer_norm(*arguments)


# Each edit must make a check fail.
MUTANTS = {
    "columns of other rows in the sums": (
        "        x = tl.where(inside, x, 0)\n    return x",
        "        x = x\n    return x",
    ),
    "groups written as a whole": (
        "mask=mask & whole)",
        "mask=mask & (lane // STEP * STEP < N + shift))",
    ),
    "edges not written": (
        "mask=mask & inside & (whole == 0)",
        "mask=mask & inside & (lane < 0)",
    ),
    "the shift of row 0": (
        "    shift = i % STEP * N % STEP\n    ws = _load_vector(w_ptr, shift, "
        "N, ROWS, CHUNK, STEP)\n    bs",
        "    shift = i * 0\n    ws = _load_vector(w_ptr, shift, "
        "N, ROWS, CHUNK, STEP)\n    bs",
    ),
    "w without the shift": ("lane - shift + tl.zeros", "lane + tl.zeros"),
    "sums with the shift": (
        "ptr += tl.program_id(0) * 2 * N - shift",
        "ptr += tl.program_id(0) * 2 * N",
    ),
    "rows without a mask": ("mask = row < M - first\n        if",
                            "mask = row < M\n        if"),
    "c1 dropped": ("wdy - (d * c1 + c2)", "wdy - c2"),
    "c2 dropped": ("wdy - (d * c1 + c2)", "wdy - d * c1"),
    "sums of the last tile": ("new_dbs += (dbs[c] + db,)",
                              "new_dbs += (db,)"),
    "programs of other shifts": (
        "fit = max(NUM_SMS * warps // plan[\"num_warps\"] // step, 1)\n"
        "    return step *",
        "fit = 3\n    return 1 *",
    ),
    "dy with strides of its own": ("dy.contiguous()", "dy"),
}  # fmt: skip


def _suite(module):
    """A few cases that together catch every mutant."""
    module.NUM_SMS = 1
    run(Case((20,), (35,), torch.float16), module)
    run(Case((3,), (9,), dy="one number"), module)


def test_suite_passes():
    _suite(load(NAME, SMALL))


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_fail(name):
    mutant = load(NAME, [*SMALL, MUTANTS[name]])
    with pytest.raises(AssertionError):
        _suite(mutant)


def test_script_runs_alone(output):
    if not page.ON_GPU:
        assert output.count("Timing needs a GPU") == 2
    assert f"13 ones: {8 * [13.0]}" in output


def test_exercise(output):
    said = "so far apart: "
    assert output.count(said + str(dict.fromkeys((13, 14, 20, 24), 8))) == 1
    assert output.count(said + "{13: 8, 14: 4, 20: 2, 24: 1}") == 1


@pytest.mark.parametrize("N", range(1, 33))
def test_distance_is_the_least(N):
    """Of the solution."""
    least = next(d for d in range(1, 9) if d * N % 8 == 0)
    assert page.distance_1(N) == least
