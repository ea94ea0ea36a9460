"""RMS norm in 16 bits: in Triton's interpreter, or on a GPU."""

import pytest
import torch
import torch.nn.functional as F

import rms_norm_cases as cases
from layer_norm_cases import STREAMS, takes_the_place
from rms_norm_cases import DTYPES, LAYOUTS, Case
from tutorial import load

NAME = "norms-and-losses/02-rms-norm-16-bits"
# Chunks of 16 columns, so that narrow rows have several.
SMALL = (
    ("chunk = min(512 // x.itemsize * warps, triton.next_power_of_2(N))",
     "chunk = 16"),
    ("chunk = min(512 // dy.itemsize * warps, triton.next_power_of_2(N))",
     "chunk = 16"),
)  # fmt: skip
page = load(NAME)
small = load(NAME, SMALL)
small.NUM_SMS = 1  # each program has several rows


def run(case, module=small):
    cases.run(module, case)


# Of x, of the residual and of the weight.
TYPES = [(dtype, stream, dtype) for dtype, stream in STREAMS]
TYPES += [(half, half, torch.float32) for half in DTYPES[:2]]


@pytest.mark.parametrize(("dtype", "stream", "weight"), TYPES)
def test_types(dtype, stream, weight):
    more = {"weight_dtype": weight, "stream_dtype": stream}
    run(Case((5,), (37,), dtype, offset=1.0, **more))
    run(Case((3,), (37,), dtype, **more), page)
    run(Case((3,), (37,), dtype, weight_dtype=weight, fused=False))


@pytest.mark.parametrize("which", ["x", "residual", "dy", "ds", "parameters"])
def test_layouts(which):
    for layout in LAYOUTS:
        run(Case((2, 3), (4, 7), torch.float16, **{which: layout}))


@pytest.mark.parametrize("lead", [(), (3,), (2, 1, 3), (0,)])
def test_dimensions(lead):
    for shape in (1,), (3, 5):
        run(Case(lead, shape))
        run(Case(lead, shape, fused=False))


@pytest.mark.parametrize("used", ["y", "s", "ys"])
def test_only_some_gradients(used):
    for number in 1, 4, 7, 15:
        *wanted, weight = (bool(number >> i & 1) for i in range(4))
        if any(wanted[:2]) or (wanted[2] and weight and "y" in used):
            wanted = tuple(wanted)
            wide = {"stream_dtype": torch.float32, "dtype": torch.float16}
            case = {"weight": weight, "wanted": wanted, "used": used}
            run(Case((5,), (40,), **case))
            run(Case((5,), (40,), **wide, **case))


def test_castings_are_those_of_the_models():
    """Nearly all bits are those of PyTorch's steps; sums round otherwise."""
    torch.manual_seed(0)
    x = torch.randn(40, 200, device=page.DEVICE).half()
    w = torch.rand(200, device=page.DEVICE).half()
    same = {}
    for ours in page.CASTINGS:
        for offset in 0.0, 1.0:
            y = small.rms_norm(x, 200, w, 1e-6, ours, offset)
            for theirs in page.CASTINGS:
                expected = page.in_torch(x, w, 1e-6, theirs, offset)
                share = (y == expected).double().mean().item()
                same[ours, theirs, offset] = share
    for (ours, theirs, offset), share in same.items():
        if ours == theirs:
            assert share > (0.8 if ours == "none" else 0.97), (ours, offset)
        else:
            assert share < 0.85, (ours, theirs, offset)


def test_offset_in_full_precision():
    """1 + w is not rounded to 16 bits with gemma, and is with llama."""
    x = torch.randn(5, 75, device=page.DEVICE).half()
    w = torch.full((75,), 2.0**-13, dtype=torch.float16, device=page.DEVICE)
    assert 1 + w[0] == 1
    expected = F.rms_norm(x.double(), (75,), 1 + w.double(), 1e-6)
    without = F.rms_norm(x.double(), (75,), None, 1e-6)

    def nearer(casting):
        y = page.rms_norm(x, 75, w, 1e-6, casting, 1.0)
        off, all_of_it = y - without, expected - without
        return (off * without).sum() / (all_of_it * without).sum()

    assert nearer("gemma") > 0.5 > nearer("llama")


def test_without_a_weight_the_factor_is_1():
    x = torch.randn(5, 75, device=page.DEVICE)
    plain = page.rms_norm(x, 75, offset=1.0)
    torch.testing.assert_close(plain, F.rms_norm(x, (75,)))


def test_none_leaves_the_range():
    """Each step in float16: the square of 300 is infinite."""
    x = torch.full((2, 40), 300.0, dtype=torch.float16, device=page.DEVICE)
    ones = torch.ones_like(x)
    for casting in "gemma", "llama":
        torch.testing.assert_close(page.rms_norm(x, 40, casting=casting), ones)
    assert not page.rms_norm(x, 40, casting="none").any()


def test_a_module_loads_what_pytorch_saved():
    options = {"eps": 1e-6, "device": page.DEVICE}
    takes_the_place(torch.nn.RMSNorm, page.RMSNorm, 24, **options)


@pytest.mark.parametrize("N", [4096, 4097, 8192])
def test_both_sides_of_a_limit(N):
    run(Case((1,), (N,), torch.float16), page)


def test_second_derivative_is_refused():
    x = torch.randn(2, 8, device=page.DEVICE, requires_grad=True)
    y = page.rms_norm(x, (8,)).square().sum()
    (dx,) = torch.autograd.grad(y, x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


def _tensor(*shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype, device=page.DEVICE)


@pytest.mark.parametrize(
    ("error", "names", "arguments"),
    [
        (TypeError, "x is .*int32", (_tensor(2, 8, dtype=torch.int32), 8)),
        (TypeError, "weight is .*int32", (_tensor(2, 8), 8, _tensor(8).int())),
        (ValueError, "of x.*normalized_shape", (_tensor(2, 8), 7)),
        (ValueError, "0 columns", (_tensor(2, 8), ())),
        (ValueError, "4097 columns.* 4096", (_tensor(2, 4097), 4097)),
        (ValueError, "weight", (_tensor(2, 8), 8, _tensor(7))),
        (ValueError, "eps", (_tensor(2, 8), 8, None, -1e-5)),
        (ValueError, "casting bert", (_tensor(2, 8), 8, None, 0, "bert")),
        (ValueError, "weight is", (_tensor(2, 8), 8, _tensor(8).to("meta"))),
    ],
)
def test_mistakes_are_named(error, names, arguments):
    with pytest.raises(error, match=names):
        page.rms_norm(*arguments)
    x, *others = arguments
    with pytest.raises(error, match=names):
        page.add_rms_norm(x, torch.empty_like(x), *others)


@pytest.mark.parametrize(
    ("error", "residual"),
    [
        (TypeError, None),
        (ValueError, _tensor(8)),
    ],
)
def test_mistakes_of_the_residual(error, residual):
    with pytest.raises(error, match="residual"):
        page.add_rms_norm(_tensor(2, 8), residual, 8)


# Each edit must make a check fail.
MUTANTS = {
    "offset rounded": ('w.dtype, CASTING != "gemma"', "w.dtype, True"),
    "x_hat rounded": ('half, CASTING != "gemma"', "half, True"),
    "offset dropped forward": (
        "y = x_hat * _factor(w, offset,", "y = x_hat * _factor(w, 0,"
    ),
    "offset dropped backward": (
        "dx = scaled * _factor(ws[c], offset", "dx = scaled * _factor(ws[c], 0"
    ),
    "the row sum dropped": (
        "_store(dx_ptr + at, dx - s * a,", "_store(dx_ptr + at, dx,"
    ),
    "the row sum dropped of the stream": (
        "_store(dr_ptr + at, dx - s * a,", "_store(dr_ptr + at, dx,"
    ),
    "ds dropped": (
        'dx += _load(ds_ptr + at, c, N, CHUNK, "").to(acc)', "dx += 0"
    ),
    "the sum is not rounded": (
        "(s.to(acc) + more[c].to(acc)).to(more[c].dtype)",
        "s.to(acc) + more[c].to(acc)",
    ),
    "store without mask": (
        "tl.store(ptr + col, value, mask=col < N)",
        "tl.store(ptr + col, value)",
    ),
    "sums of the last row": ("(dws[c] + scaled * s,)", "(scaled * s,)"),
    "dr in the type of x": (
        "dr = None if s.dtype == dy.dtype else", "dr = None if True else"
    ),
}  # fmt: skip


def _suite(module):
    """A few cases that together catch every mutant."""
    module.NUM_SMS = 1
    wide = {"stream_dtype": torch.float32, "offset": 1.0}
    run(Case((19,), (43,), torch.float16, **wide), module)
    run(Case((19,), (43,), torch.float16), module)
    run(Case((19,), (43,), torch.float16, offset=1.0), module)
    given = module.inputs(5, 75, torch.float16)[:3]
    x, residual, w = given
    y, s = module.add_rms_norm(x, residual, 75, w, 1e-6)
    assert torch.equal(y, module.rms_norm(s, 75, w, 1e-6))
    x = torch.full((1, 75), 1.0, dtype=torch.float16, device=module.DEVICE)
    tiny = torch.full_like(x[0], 2.0**-13)
    y = module.rms_norm(3 * x, 75, tiny.requires_grad_(), 1e-6, offset=1.0)
    assert torch.equal(y, x)
    out = module.results(
        lambda *t: module.add_rms_norm(*t[:2], 75, t[2], 1e-6),
        *module.inputs(5, 75, torch.float16, torch.float32),
    )
    x, w = torch.randn(5, 75, device=module.DEVICE).half(), w.detach()
    y = module.rms_norm(x, 75, w, 1e-6)
    expected = module.in_torch(x, w, 1e-6, "gemma")
    assert (y == expected).double().mean() > 0.97
    exact = out[3].half()
    assert (out[2] - exact).abs().max() == 0
    assert not torch.equal(out[3], exact.float())


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
    assert "factor: 1.0 1 + distance: 0.9" in output
    (line,) = (x for x in output.splitlines() if "loss with the module" in x)
    ours, theirs = map(float, line.split()[-2:])
    assert abs(ours - theirs) < 1e-5 * theirs


def test_exercise(output):
    stub, solution = (
        float(line.rpartition(" ")[2])
        for line in output.splitlines()
        if "error of y before" in line
    )
    assert stub > 1e-5 > 1e-6 > solution
