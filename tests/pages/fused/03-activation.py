"""What must hold of the page "A function as a constant"."""

import pytest
import torch
import torch.nn.functional as F

from compiled.declared import Case, Kernel, Kernels
from conformance import LayerNorm, Page, below_zero, too_wide
from conformance.operation import DTYPES
from measurements.figure import from_to


def run(page, M, N, dtype):
    x, w, b, dy = page.inputs(M, N, dtype)
    y = page.activation_layer_norm(x, (N,), w, b)
    torch.autograd.grad(y, (x, w, b), dy)
    page.apply(x.detach(), page._silu_plain)


def also(page, M, N, dtype):
    x, w, b, dy = page.inputs(5, 24, dtype)
    for function in (
        page._silu,
        page._gelu,
        page._gelu_tanh,
        page._squared_relu,
        page._squared_relu_1,
        page._square,
    ):
        y = page.activation_layer_norm(x, 24, None, b, function)
        torch.autograd.grad(y, (x, b), dy)
        page.apply(x.detach(), function, dy)
    page.forward(x.detach(), w, b, 1e-5, page._silu_plain)
    y = page.activation_layer_norm(x, 24)
    torch.autograd.grad(y, x, dy)
    page._move[(M,)](x, x, 64, 2, 1, BLOCK_SIZE=4096)  # the ceiling


def gelu(page, M, N, dtype):
    x, w, b, dy = page.inputs(M, N, dtype)
    for function in "gelu", "gelu_tanh":
        y = page.activation_layer_norm(x, (N,), w, b, function)
        torch.autograd.grad(y, (x, w, b), dy)


PUBLISHED = "2026-11-22"

KERNELS = Kernels(
    run=run,
    also=also,
    M=4096,
    N=[4096],
    dtype="float16",
    sizes={
        "float16": [1024, 1536, 3072, 4096, 5120, 6144, 7168, 8192],
        "bfloat16": [8192],
        "float32": [1024, 4096],
    },
    kernels={
        "_apply": Kernel(
            look="""
            One load and one store, and between them the function, in place of
            a call.
            """,
            true=lambda code: [
                code.loaded == code.stored == 2 * 2048,
                code.narrow("load") == 0,
            ],
        ),
        "_activation_layer_norm_fwd": Kernel(
            look="""
            Look for ``ex2`` and ``rcp``: one of each for an element, and
            hardly anything around them.
            The row is loaded once and nothing is spilled.
            """,
            true=lambda code: [
                code.loaded == 3 * 2 * 4096 or code.amd,
                code.narrow("store") == 2 or code.amd,  # mean and rstd
                code.spills == 0,
            ],
            narrow_loads={1536: 9, 7168: 42},  # of 8 bytes, no idle lane
            narrow_stores=16,  # mean and rstd, and y at 7168 columns
        ),
        "_activation_layer_norm_bwd": Kernel(
            look="""
            Two matrices come by asynchronous copies; the function stands in
            both halves of the loop.
            """,
            true=lambda code: [(code.count("copy", 16) > 0) != code.amd],
            copies=True,
            narrow_copies=8,  # mean and rstd
            narrow_stores=8,  # sums of narrow rows
            shared=232448,  # all that a program may have on sm_90
        ),
        "_add_up": Kernel(
            look="""
            A program reads the sums of all programs, 16 columns of each, by 16
            bytes.
            """,
            true=lambda code: [code.narrow("load") == 0],
            narrow_stores=1,  # of 16 columns
        ),
    },
    cases={
        "gelu": Case(
            run=gelu,
            sizes={"float16": [1024, 4096, 8192]},
        ),
    },
)


CARD = "H200"
FORWARD = "silu-layer-norm-forward"
BACKWARD = "silu-layer-norm-backward"


def gains(of, name):
    """How many times as fast as each rival, as a sentence."""
    pytorch, compiled = (
        of.ratios("triton", rival) for rival in ("torch", "torch.compile")
    )
    assert pytorch.least > 1
    assert compiled.least > 0.99  # else "where a library is better" says so
    return (
        f"{name}, ours is {pytorch.least} to {pytorch.most} times as fast as "
        f"PyTorch, and {compiled.least} to {compiled.most} times as fast as "
        "torch.compile"
    )


def plain_figures(figure):
    """The function alone, and in a norm."""
    alone = figure("activation-alone", CARD).shares("triton")
    assert alone.least >= 90  # "little"
    lowest = figure("activation-alone", CARD).share("triton", 2048)
    assert lowest <= alone.least
    yield (
        f"On the H200 the kernel reaches {from_to(alone)} of a copy, and it "
        "is lowest at 2048 columns."
    )
    of = figure("silu-layer-norm-plain", CARD)
    plain = of.shares("plain")
    assert plain.least < alone.least - 3  # "the function shows"
    yield (
        f"On the H200 the kernel reaches {from_to(plain)} of a copy, where "
        f"the function alone reached {alone.least}% or more."
    )


def forward_figure(figure):
    of = figure(FORWARD, CARD)
    ours, plain = of.shares("triton"), of.shares("plain")
    gain = of.ratios("triton", "plain")
    assert gain.least > 0.99 and gain.most >= 1.03
    yield (
        f"On the H200 the short sigmoid reaches {from_to(ours)} of a copy, "
        f"and the plain one {from_to(plain)}. It is up to {gain.most} times "
        "as fast as the plain one."
    )
    yield gains(of, "Forward")
    before = figure("silu-layer-norm-plain", CARD).all_medians("plain")
    both = zip(before, of.all_medians("plain"), strict=True)
    apart = max(abs(100 * (first / second - 1)) for first, second in both)
    apart.rounding = ".1f"
    # The short sigmoid gains more than this noise.
    assert 100 * (gain.most - 1) > 1.5 * apart
    yield f"Its speeds in the two figures lie up to {apart}% apart,"
    gained = {
        N: 100 * (of.ratio("triton", "plain", N) - 1)
        for N in of.medians["triton"]
    }
    assert max(gained, key=gained.get) == 5120
    assert of.share("triton", 1024) < 75, "far from a copy"
    yield (
        "On the H200 the gain is largest at 5120 columns, where the plan is "
        f"the same for both, and the short one is {gained[5120]:.0f}% faster. "
        f"At 1024 columns it is {gained[1024]:.0f}% faster, and both are far "
        "from a copy."
    )
    together = of.shares("torch")
    assert together.most < 50
    yield f"and so on the H200 both together reach {from_to(together)}."
    # As fast as ours at 1024 columns, which the page tells as a loss, too.
    assert 0.97 < of.ratio("torch.compile", "triton", 1024) < 1.03
    compiled = of.between(2048).shares("torch.compile")
    yield (
        "On the H200 it is as fast as ours at 1024 columns, and from 2048 on "
        f"it reaches {from_to(compiled)} of a copy."
    )


def backward_figure(figure):
    of = figure(BACKWARD, CARD)
    ours = from_to(of.shares("triton"))
    yield f"On the H200 our backward pass reaches {ours} of a copy."
    yield f"{gains(of, 'Backward')}, although it computes the function twice."
    measured = of.share("torch", 8192)
    assert measured <= 41  # 3 of 8, and the noise
    yield f"and on the H200 we have measured {measured}% at 8192 columns."

    def longer(N):
        """µs that our call takes longer than a copy of its bytes."""
        times = [
            3 * 4096 * N * 2 / of.median(provider, N) / 1e3
            for provider in ("triton", "copy")
        ]
        return times[0] - times[1]

    lowest = of.share("triton", 1024)
    assert lowest <= of.shares("triton").least
    yield (
        f"On the H200 our lowest share is {lowest}%, at 1024 columns. There "
        f"our pass takes {longer(1024):.1f} µs longer than a copy, and at "
        f"8192 columns {longer(8192):.1f} µs."
    )


def ladder(figure):
    of = figure(FORWARD, CARD)
    pytorch, plain, ours, compiled = (
        of.share(provider, 4096)
        for provider in ("torch", "plain", "triton", "torch.compile")
    )
    yield (
        f"- **PyTorch's two functions** move four, and reach {pytorch}% of a "
        "copy. - **One kernel with a plain sigmoid** moves two, and reaches "
        f"{plain}%. - **One kernel with four instructions** moves two, and "
        f"reaches {ours}%. - **torch.compile** reaches {compiled}%."
    )
    of = figure(BACKWARD, CARD)
    pytorch, ours, compiled = (
        of.share(provider, 4096)
        for provider in ("torch", "triton", "torch.compile")
    )
    yield (
        "- **PyTorch's functions** move six for ``dx``, and reach "
        f"{pytorch}%. - **One kernel that recomputes** moves three, and "
        f"reaches {ours}%. - **torch.compile** reaches {compiled}%."
    )


def on_the_other_card(figure):
    of = figure(FORWARD, "H100")
    ours, plain, pytorch, compiled = (
        from_to(of.shares(name))
        for name in ("triton", "plain", "torch", "torch.compile")
    )
    gained = 100 * (of.ratios("triton", "plain").most - 1)
    gained.rounding = ".0f"
    of_the_h200 = figure(FORWARD, CARD).ratios("triton", "plain").most
    assert gained < 100 * (of_the_h200 - 1)
    yield (
        f"On the H100 the short sigmoid reaches {ours} of a copy, the plain "
        f"one {plain}, PyTorch {pytorch}, and torch.compile {compiled}. The "
        f"short one is at most {gained}% faster there:"
    )
    of = figure(BACKWARD, "H100")
    ours, pytorch, compiled = (
        from_to(of.shares(name))
        for name in ("triton", "torch", "torch.compile")
    )
    yield (
        f"On the H100 ours reaches {ours} of a copy, PyTorch reaches "
        f"{pytorch}, and torch.compile reaches {compiled}."
    )


def CLAIMS(figure):
    yield from on_the_other_card(figure)
    yield from plain_figures(figure)
    yield from forward_figure(figure)
    yield from backward_figure(figure)
    yield from ladder(figure)


# Numbers with a unit that nothing has measured, and why they are right.
FACTS = {
    "50% of a copy at most": "2 matrices of 4",
    "three of eight are 38% of a copy at most": "3 matrices of 8",
    f"about {2**25 / 3.0e6:.0f} µs at 3.0 TB/s": (
        "4096 * 4096 numbers of 2 bytes, at what the glossary has measured"
    ),
    f"{2**25 >> 20} MiB until the backward pass": "the same matrix",
}


HALF, SINGLE, DOUBLE = torch.float16, torch.float32, torch.float64
NAMES = "silu", "gelu", "gelu_tanh"
at = LayerNorm.at


def of_identity(page):
    """A plain layer norm."""
    from activations import identity

    def norm(x, shape, weight=None, bias=None, eps=1e-5):
        given = x, shape, weight, bias, identity
        return page.activation_layer_norm(*given, eps=eps)

    return norm


def compare(page, name, M, N, dtype):
    """Against PyTorch in float64; the name of an activation, or sigmoid."""
    from activations import sigmoid

    ours = sigmoid if name == "sigmoid" else name
    theirs = torch.sigmoid if name == "sigmoid" else page.TORCH[name]
    given = [t.detach() for t in page.inputs(M, N, dtype)]
    given[0] = 3 * given[0]

    def results(norm, kind):
        x, w, b, dy = (t.to(kind) for t in given)
        for t in (x, w, b):
            t.requires_grad_()
        y = norm(x, w, b)
        return y, *torch.autograd.grad(y, (x, w, b), dy)

    found = results(
        lambda x, w, b: page.activation_layer_norm(x, N, w, b, ours), dtype
    )
    expected = results(
        lambda x, w, b: F.layer_norm(theirs(x), (N,), w, b), DOUBLE
    )
    unit = torch.finfo(dtype).eps / 2
    factor = {SINGLE: 32, DOUBLE: 64}.get(dtype, 1)
    if dtype == torch.bfloat16 and not page.ON_GPU:
        factor = 2  # the interpreter cuts
    # One column has no slope: dx is what rounding leaves of dy times rstd.
    wide = torch.finfo(torch.promote_types(dtype, SINGLE)).eps
    rest = wide * 1e5**0.5 * given[3].double().norm() * (N == 1)
    for got, want in zip(found, expected, strict=True):
        assert got.dtype == dtype
        limit = 1.1 * factor * unit * want.norm() + rest
        error = (got - want).norm()
        assert error <= limit, f"{error:.1e} > {limit:.1e}, {N} columns"


def silu_in_many_tiles(load):
    compare(load(), "silu", 41, 23, SINGLE)


def an_activation_of_0_that_is_not_0(load):
    compare(load(), "sigmoid", 3, 23, SINGLE)


def tiny_rows(load):
    """Without eps the cube of rstd is more than float32 holds, and dx is
    not."""
    page = load("small")
    torch.manual_seed(0)
    x, dy = torch.randn(2, 19, 40, device=page.DEVICE)
    w = torch.rand(40, device=page.DEVICE)
    x = 1e-13 * x
    results = []
    for function, kind in (
        (page.activation_layer_norm, SINGLE),
        (lambda x, *rest, eps: F.layer_norm(F.silu(x), *rest, eps), DOUBLE),
    ):
        given = [t.to(kind).requires_grad_() for t in (x, w)]
        y = function(given[0], (40,), given[1], None, eps=0.0)
        results.append(torch.autograd.grad(y, given, dy.to(kind)))
    for ours, exact in zip(*results, strict=True):
        assert ours.isfinite().all()
        assert (ours - exact).norm() <= 1e-5 * exact.norm()


def negative_eps(load):
    """A step of `kills`: a page that takes a negative eps is found."""
    page = load()
    x = torch.ones(2, 8, device=page.DEVICE)
    try:
        page.activation_layer_norm(x, 8, eps=-1e-5)
    except ValueError:
        return
    raise AssertionError("a negative eps is taken")


PAGE = Page(
    __file__,
    LayerNorm(),
    {"identity": of_identity},
    # Few programs in the last kernel.
    quick=(("columns_per_program = 16", "columns_per_program = 256"),),
    forms={
        # Chunks of 16 columns, so that narrow rows have several, and each
        # program has several tiles.
        "small": (
            ("chunk = min(512 // itemsize * warps,", "chunk = min(2 * warps,"),
            ("512 // itemsize * warps // chunk", "4 * warps // chunk"),
            ("if ON_GPU else 4", "if ON_GPU else 1"),
        ),
        "wide": (),
    },
    cases=(at(1, 8192, HALF, form="wide"), at(5, 72)),
    mistakes=(*below_zero(), too_wide(4097, "4097 .*16 KB")),
    repeatable=("identity",),
    repeated=tuple(at(1101, N, HALF) for N in (1000, 3072, 8192)),
    trains=("identity",),
    elsewhere="is on cuda:1: not the current one",
    huge=(8192,),
    sanitizers=("memcheck", "racecheck"),
    sanitized=(at(301, 1000, HALF), at(301, 4096, HALF), at(301, 40)),
    prints={
        "Timing needs a GPU": 4,
        "each element of y, dx, dw and db is right": 3,
        "SiLU is right: True": 1,
        "dx is right: False": 1,  # the stub
        "dx is right: True": 1,
    },
    mutants={
        "idle lanes in the mean": ("(tl.where(mask, value, 0),)", "(value,)"),
        "idle lanes in the variance": (
            "d = tl.where(mask, values[c] - mean, 0)",
            "d = values[c] - mean",
        ),
        "no slope": ("(wdy - (d * c1 + c2)) * slope", "wdy - (d * c1 + c2)"),
        "c1 dropped": ("wdy - (d * c1 + c2)", "wdy - c2"),
        "c2 dropped": ("wdy - (d * c1 + c2)", "wdy - d * c1"),
        "x in place of its function": (
            "d = value - mean\n            dy",
            "d = xs[c].to(acc) - mean\n            dy",
        ),
        "sums of the last tile": ("(dbs[c] + dy,)", "(dy,)"),
        "one buffer for all": ("tl.program_id(0) * 2 * N", "0"),
        "the last buffer left out": ("rows < programs", "rows < programs - 1"),
        "the slope of a sigmoid": (
            "    sigmoid = _sigmoid(x)\n"
            "    return x * sigmoid, sigmoid * (1 + x * (1 - sigmoid))",
            "    sigmoid = _sigmoid(x)\n"
            "    return x * sigmoid, sigmoid * (1 - sigmoid)",
        ),
        "dy with strides of its own": ("dy = dy.contiguous()", "dy = dy"),
        "rstd cubed": (
            "sum1[:, None] * rstd * rstd * rstd / N",
            "sum1[:, None] * (rstd * rstd * rstd / N)",
        ),
        "any eps": ("if not eps >= 0:", "if False:"),
    },
    kills=(
        silu_in_many_tiles,
        an_activation_of_0_that_is_not_0,
        at(3, 24, dy="one number"),
        tiny_rows,
        negative_eps,
    ),
)
ACTIVATION = pytest.mark.parametrize("name", NAMES)


@pytest.mark.parametrize("dtype", DTYPES)
@ACTIVATION
def test_activations(page, name, dtype):
    compare(page, name, 5, 45, dtype)


def test_tiny_rows(load):
    tiny_rows(load)


def test_an_activation_that_is_not_there_is_named(page):
    x = torch.ones(2, 8, device=page.DEVICE)
    with pytest.raises(ValueError, match="relu is none of"):
        page.activation_layer_norm(x, 8, activation="relu")


@ACTIVATION
def test_value_and_slope_far_out(page, name):
    count = 2048 if page.ON_GPU else 64
    near = torch.linspace(-50, 50, count, dtype=DOUBLE)
    far = torch.tensor([-1e30, -1e4, -90.0, -43.1, 20.1, 90.0, 1e4, 1e30])
    x = torch.cat([near, far.double()]).requires_grad_()
    want = page.TORCH[name](x)
    (slope_of,) = torch.autograd.grad(want.sum(), x)
    slope_of = slope_of.nan_to_num(0, 0, 0)
    x = x.detach().float().to(page.DEVICE)
    slope = torch.empty_like(x)
    y = page.apply(x, page.ACTIVATIONS[name], slope)
    # A GPU approximates powers.
    close = {"rtol": 1e-5, "atol": 1e-6}
    if page.ON_GPU:
        close = {"rtol": 2e-5, "atol": 2e-6}
    for got, expected in (y, want.detach()), (slope, slope_of):
        torch.testing.assert_close(got.double().cpu(), expected, **close)


@ACTIVATION
def test_nan_stays_nan(page, name):
    x = torch.tensor([1.0, float("nan"), 2.0, 3.0], device=page.DEVICE)
    y = page.apply(x, page.ACTIVATIONS[name])
    assert y.isnan().tolist() == [False, True, False, False]


def test_plain_and_fast_agree(page):
    x = torch.linspace(-20, 20, 999, device=page.DEVICE)
    slopes = torch.empty(2, 999, device=page.DEVICE)
    y = page.apply(x, page._silu_plain, slopes[0])
    torch.testing.assert_close(page.apply(x, page._silu, slopes[1]), y)
    torch.testing.assert_close(*slopes)


@pytest.mark.parametrize("itemsize", [2, 4, 8])
def test_formulas_answer_for_every_width(unedited, itemsize):
    page = unedited
    for N in range(1, 16384 // itemsize + 1):
        for rule in page.plan_forward, page.plan_backward:
            plan = rule(N, itemsize)
            rows, chunk, warps = (
                plan[key] for key in ("ROWS", "CHUNK", "num_warps")
            )
            assert all(v & (v - 1) == 0 for v in (rows, chunk, warps))
            assert 2 <= warps <= 16 and rows >= 1
            width = -(-N // chunk) * chunk
            assert width - N < chunk
            if rule is page.plan_forward and N * itemsize > 512:
                # 60 columns of 16 bits a thread
                assert width * itemsize <= 3840 * warps
                # Of wide rows at most a ninth of the lanes are idle, or one
                # chunk of 1 KB.
                idle = (width - N) * itemsize
                assert N * itemsize <= 2048 or (
                    8 * idle <= N * itemsize or idle < 1024
                )
            assert 1 <= plan.get("STAGES", 1) <= 4


STEPS = (1, 31, 512, 768, 1000, 1024, 1536, 1544, 3072, 3080, 4096, 6152)


@pytest.mark.gpu
@pytest.mark.parametrize("N", [*STEPS, 7168, 7281, 8191, 8192])
@ACTIVATION
def test_activations_at_full_size(page, name, N):
    """Both sides of each step of the formulas."""
    compare(page, name, 1101, N, HALF)
    compare(page, name, 301, N, torch.bfloat16)
    compare(page, name, 301, (N + 1) // 2, SINGLE)
    compare(page, name, 301, (N + 3) // 4, DOUBLE)
