"""What must hold of the page "Layer normalization, both passes"."""

import pytest
import torch
import torch.nn.functional as F

from compiled.declared import Kernel, Kernels
from conformance import (
    LayerNorm,
    LayerNormCase,
    Mistake,
    Page,
    guarded_allocations,
)
from tutorial import source


def run(page, M, N, dtype):
    x, w, b, dy = page.inputs(M, N, dtype)
    page.in_sweeps(x, w, b, 1e-5)
    y = page.layer_norm(x, (N,), w, b)
    torch.autograd.grad(y, (x, w, b), dy)


KERNELS = Kernels(
    run=run,
    M=4096,
    N=[4096, 15872],
    dtype="float16",
    sizes={
        "float16": [1024, 1536, 4096, 4608, 8192, 8704, 12288, 15872],
        "bfloat16": [4096, 8192],
        "float32": [1024, 4096, 8192],
    },
    kernels={
        "_layer_norm_fwd_streaming": Kernel(
            look="""
            Look for the sweeps: each has its own loads of ``x``, all of them
            by 16 bytes.
            Where the row is one tile, the first two are one.
            """,
            true=lambda code: [
                code.narrow("load") == 0,
                len(code.lines("load")) == 4,
            ],
            true_at={
                15872: lambda code: [
                    code.narrow("load") == 0,
                    len(code.lines("load")) == 5,
                ]
            },
            narrow_stores=2,  # mean and rstd
        ),
        "_layer_norm_fwd": Kernel(
            look="""
            ``x``, ``w`` and ``b`` are read once, all of them by 16 bytes.
            Threads wait for each other only in the two sums: look for the
            shuffles and the barriers.
            """,
            true=lambda code: [
                code.loaded == 3 * 2 * 4096,
                code.narrow("load") == 0,
                len(code.lines("shuffle")) == 2,
                code.lines("barrier") <= code.lines("shuffle"),
            ],
            narrow_stores=2,  # mean and rstd
        ),
        "_layer_norm_bwd": Kernel(
            look="""
            The two sums ``dw`` and ``db`` stay in registers over all rows of a
            program, and are stored once, at the end.
            At 15872 columns not all of them fit beside the row: a part is
            spilled.
            """,
            true=lambda code: [code.count("release") == 0, code.spills == 0],
            true_at={15872: lambda code: [code.spills > 0]},
            narrow_loads=2,  # mean and rstd
            spills={15872: 128},
        ),
        "_layer_norm_bwd_add_up": Kernel(
            look="""
            A program reads 256 buffers at a time, 16 columns of each, by 16
            bytes, and stores 16 sums.
            """,
            true=lambda code: [
                code.loaded == 256 * 16 * 4,
                code.narrow("load") == 0,
            ],
            narrow_stores=1,  # of 16 columns
        ),
    },
)


HALF, SINGLE, DOUBLE = torch.float16, torch.float32, torch.float64
at = LayerNorm.at


def errors_of_sweeps(page, N, dtype):
    """Relative errors of y, mean and rstd of the kernel with three sweeps."""
    x, w, b, _ = (t.detach() for t in page.inputs(3, N, dtype))
    with guarded_allocations():
        found = page.in_sweeps(x, w, b, 1e-5)
    x, w, b = x.double(), w.double(), b.double()
    rstd = (x.var(dim=1, correction=0) + 1e-5) ** -0.5
    expected = F.layer_norm(x, (N,), w, b), x.mean(dim=1), rstd
    return [
        ((a - b).norm() / b.norm()).item()
        for a, b in zip(found, expected, strict=True)
    ]


def three_sweeps(load):
    assert max(errors_of_sweeps(load(), 4608, SINGLE)) <= 1e-6


def wider(which):
    """Gradients of one of the arguments, at one column more than 16384."""

    def arguments(ones):
        tensors = {
            "x": ones(1, 16385), "weight": ones(16385), "bias": ones(16385)
        }  # fmt: skip
        tensors[which].requires_grad_()
        x, *parameters = tensors.values()
        return x, 16385, *parameters

    words = r"16385 columns.*16384.*Every width"
    return Mistake(ValueError, words, arguments)


PAGE = Page(
    __file__,
    LayerNorm(),
    {"layer_norm": lambda page: page.layer_norm},
    # Few programs that take several rows, and in the second kernel few that
    # take many columns.
    quick=(
        ("per_sm * NUM_SMS", "7"),
        ("triton.cdiv(2 * N, 16), (", "triton.cdiv(2 * N, 512), ("),
        ("2 * N, 256, 16)", "2 * N, 8, 512)"),
    ),
    cases=(
        *(at(M, N, HALF) for M, N in ((2, 127), (17, 1023), (2, 4608))),
        # Both sides of the widest row that has gradients.
        at(1, 16384, HALF),
        at(2, 16385, HALF, wanted=3 * (False,)),
    ),
    long_cases=tuple(
        at(M, N, dtype)
        for M, N in ((1000, 2), (1, 1000), (1023, 17), (1151, 1))
        for dtype in LayerNorm.dtypes
    ),
    full=(
        *(
            at(4096, N, dtype)
            for N in (1000, 1023, 1151, 4096, 4608, 8192, 15872)
            for dtype in (HALF, torch.bfloat16)
        ),
        *(
            at(M, N, dtype)
            for M, N in ((1151, 8192), (300, 16383), (300, 16384))
            for dtype in LayerNorm.dtypes
        ),
    ),
    mistakes=(
        *map(wider, ("x", "weight", "bias")),
        Mistake(
            TypeError, "x", lambda ones: (ones(2, 8).to(torch.float8_e5m2), 8)
        ),
    ),
    repeatable=("layer_norm",),
    repeated=tuple(at(4096, N, HALF) for N in (1024, 4096, 12288)),
    compiled=("layer_norm",),
    compiled_cases=tuple(
        LayerNormCase(lead=(4, 37), shape=(1000,), dtype=dtype)
        for dtype in (HALF, SINGLE)
    ),
    graphs=(at(512, 1000, HALF),),
    trains=("layer_norm",),
    huge=(8192,),
    sanitizers=("memcheck",),
    sanitized=tuple(
        at(3, N, dtype, wanted=wanted)
        for N, wanted in ((1001, 3 * (True,)), (16385, 3 * (False,)))
        for dtype in (HALF, SINGLE)
    ),
    mutants={
        "c2 dropped": (
            "dx = (wdy - x_hat * c1 - c2) * rstd\n            tl",
            "dx = (wdy - x_hat * c1) * rstd\n            tl",
        ),
        "c1 dropped": (
            "dx = (wdy - x_hat * c1 - c2) * rstd\n            tl",
            "dx = (wdy - c2) * rstd\n            tl",
        ),
        "masked lanes in the variance": (
            "x = tl.where(cols < N, x - mean, 0)  # masked",
            "x = x - mean  # masked",
        ),
        "masked lanes in the variance of three sweeps": (
            "x = tl.where(cols < N, x - mean, 0)\n",
            "x = x - mean\n",
        ),
        "first tile in every sweep": (
            "cols = start + tl.arange(0, BLOCK)\n        total += tl.load",
            "cols = tl.arange(0, BLOCK)\n        total += tl.load",
        ),
        "store without mask": (
            "\n    tl.store(y_ptr + row * N + cols, y, mask=cols < N)",
            "\n    tl.store(y_ptr + row * N + cols, y)",
        ),
        "rows of other programs": (
            "range(tl.program_id(0), M, tl.num_programs(0))",
            "range(tl.program_id(0), M, tl.num_programs(0) + 1)",
        ),
        "all programs fill the first buffer": (
            "sums_ptr += tl.program_id(0) * 2 * N + cols",
            "sums_ptr += cols",
        ),
        "sums without mask": (
            "tl.store(sums_ptr + N, db, mask=mask)",
            "tl.store(sums_ptr + N, db)",
        ),
        "buffers that nobody wrote": (
            "mask = (rows < programs) & (cols < WIDTH)",
            "mask = cols < WIDTH",
        ),
        "second kernel without mask": (
            "tl.sum(total, axis=0), mask=cols < WIDTH",
            "tl.sum(total, axis=0)",
        ),
        "dy with strides of its own": ("dy.contiguous(), x, w", "dy, x, w"),
        "x, w and b with strides of their own": (
            "None if t is None else t.contiguous() for t",
            "t for t",
        ),
        "statistics in float32 only": (
            "acc = torch.promote_types(x.dtype, torch.float32)\n"
            "    mean, rstd = torch.empty(2, M, dtype=acc, device=x.device)\n"
            "    block = triton.next_power_of_2(N)\n",
            "acc = torch.float32\n"
            "    mean, rstd = torch.empty(2, M, dtype=acc, device=x.device)\n"
            "    block = triton.next_power_of_2(N)\n",
        ),
        "sums in 16 bits": (
            "dtype=mean.dtype, **new)",
            "dtype=x.dtype, **new)",
        ),
    },
    kills=(
        at(3, 129),
        at(3, 129, DOUBLE),
        at(3, 9, x="columns"),
        at(3, 9, dy="one number"),
        at(17, 3),  # more rows than programs
        at(40, 8, HALF),
        three_sweeps,
    ),
)


@pytest.mark.parametrize("N", [1, 7, 4096, 4097, 9000])
def test_three_sweeps(page, N):
    for dtype in HALF, SINGLE, DOUBLE:
        unit = torch.finfo(dtype).eps
        y, mean, rstd = errors_of_sweeps(page, N, dtype)
        wide = torch.finfo(torch.promote_types(dtype, SINGLE)).eps
        assert y <= max(unit / 2, 8 * wide)
        assert mean <= 8 * wide
        # A row of one column has no variance: rstd is that of eps.
        assert rstd <= 16 * wide


def test_as_many_programs_as_on_the_page(unedited):
    for dtype in LayerNorm.dtypes:
        case = at(5, 130, dtype)
        PAGE.operation.run(unedited.layer_norm, case, unedited.DEVICE)


def test_wide_rows_without_gradients_take_leaves_that_want_one(page):
    x, w, b, _ = page.inputs(1, 20000, SINGLE)
    with torch.no_grad():
        y = page.layer_norm(x, 20000, w, b)
    torch.testing.assert_close(y, F.layer_norm(x, (20000,), w, b))


@pytest.mark.parametrize("dtype", LayerNorm.dtypes)
def test_properties_without_reference(page, dtype):
    case = at(7, 129, dtype)
    x, w, b, dy = PAGE.operation.tensors(case, page.DEVICE).values()
    x, w, b = (t.requires_grad_() for t in (x, w, b))
    y = page.layer_norm(x, (129,), w, b)
    dx, dw, db = torch.autograd.grad(y, (x, w, b), dy)
    x, w, b, y, dy, dx, dw, db = (
        t.detach().double() for t in (x, w, b, y, dy, dx, dw, db)
    )
    eps = 4 * torch.finfo(dtype).eps
    x_hat = F.layer_norm(x, (129,))
    size = dx.abs().sum(1)
    assert (dx.sum(1).abs() <= eps * size).all()
    size = (dx * x_hat).abs().sum(1)
    # eps of the layer norm leaves a rest of relative size 1e-4.
    assert ((dx * x_hat).sum(1).abs() <= (eps + 1e-4) * size).all()
    total = (w * dw).sum() + (b * db).sum() - (dy * y).sum()
    assert total.abs() <= eps * (dy * y).abs().sum()


def test_constant_rows_and_constant_gradients(page):
    x = torch.full((3, 100), 7.0, device=page.DEVICE)
    assert (page.layer_norm(x, 100) == 0).all()
    x = torch.randn(4, 16, device=page.DEVICE, requires_grad=True)
    w = torch.rand(16, device=page.DEVICE) + 0.5
    y = page.layer_norm(x, (16,), w)
    (dx,) = torch.autograd.grad(y, x, (1 / w).expand(4, 16))
    assert dx.abs().max() < 1e-5


def test_defaults_are_those_of_pytorch(page):
    x = torch.randn(3, 5, device=page.DEVICE)
    torch.testing.assert_close(page.layer_norm(x, (5,)), F.layer_norm(x, (5,)))
    w, b = torch.rand(2, 5, device=page.DEVICE)
    y = page.layer_norm(x, normalized_shape=5, weight=w, bias=b, eps=0.1)
    torch.testing.assert_close(y, F.layer_norm(x, (5,), w, b, 0.1))


def test_script_runs_alone(output):
    for dtype in "float16", "float32":
        assert f"9 x 200, torch.{dtype}: errors below" in output
    assert "nan" not in output.lower()
    assert output.count("Timing needs a GPU") == 3


def test_stub_fails_and_solution_passes(output):
    # The solution stands in an assertion, so it passed.
    assert output.count("right: False") == 1
    assert output.count("sums of the rows:") == 2


def test_what_the_page_says_of_16_bits():
    text = " ".join(source(PAGE.name).replace("\n#", "").split())
    assert "in float16, 0.1 added 4096 times gives 256." in text
    assert sum(torch.full((4096,), 0.1, dtype=HALF)) == 256


def test_programs_are_few_enough_for_the_registers(launches):
    """Those of a multiprocessor run together: its registers are enough."""
    from compiled.aot import Call

    sizes = 1024, 1536, 2048, 4096, 4608, 8064, 8192, 16384
    values = {"M": 4096, "dtype": "float16"}
    calls = [Call(PAGE.name, run, values | {"N": N}) for N in sizes]
    for N, launched in zip(sizes, launches(calls), strict=True):
        (built,) = (b for b in launched if b.kernel == "_layer_norm_bwd")
        per_sm = built.grid[0] // 132
        assert 1 <= per_sm <= 65536 // (32 * built.num_warps * built.registers)
        assert N >= 4096 or built.spills == 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [HALF, torch.bfloat16, SINGLE])
def test_the_check_of_the_page(page, dtype):
    page.check(page.layer_norm, 1151, 8192, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("N", [7, 1000, 4609, 16385, 100_000])
def test_three_sweeps_of_many_rows(page, N):
    for dtype in HALF, SINGLE, DOUBLE:
        x, w, b, _ = (t.detach() for t in page.inputs(70, N, dtype))
        with guarded_allocations():
            y, *_ = page.in_sweeps(x, w, b, 1e-5)
        expected = F.layer_norm(x.double(), (N,), w.double(), b.double())
        unit = torch.finfo(dtype).eps * (0.5 if dtype.itemsize == 2 else 8)
        assert (y - expected).norm() <= unit * expected.norm()
