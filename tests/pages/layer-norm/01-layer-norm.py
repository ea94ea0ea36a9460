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
    below_zero,
    guarded_allocations,
    negative_eps,
)


def run(page, M, N, dtype):
    x, w, b, dy = page.inputs(M, N, dtype)
    page.forward_in_sweeps(x, w, b, 1e-5)
    y = page.layer_norm(x, (N,), w, b)
    torch.autograd.grad(y, (x, w, b), dy)


def run_sweeps(page, M, N, dtype):
    """Three sweeps alone, which take rows of any width."""
    x, w, b, _ = page.inputs(M, N, dtype)
    page.forward_in_sweeps(x, w, b, 1e-5)


def run_ceiling(page, M, N, dtype):
    """A copy, as the ceiling of the page launches it."""
    source = torch.empty(M, N, dtype=dtype, device=page.DEVICE)
    page._move[(M,)](
        source_ptr=source,
        target_ptr=torch.empty_like(source),
        count=M * N,
        READS=1,
        WRITES=1,
        BLOCK_SIZE=8192,
        num_warps=8,
    )


PUBLISHED = "2026-11-22"

KERNELS = Kernels(
    run=run,
    also=run_ceiling,
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


FACTS = {
    "141 GB": "the data sheet of the H200",
    "60 MB": "what torch says of the L2 of the H200",
    "it has 80 GB of DRAM, which is also slower, and 50 MB of L2": (
        "the data sheet of the H100"
    ),
    "256 MB": "the tensor of the clock has 2**28 bytes",
    "on all 132 SMs take 17 MB": "test_..._rows_in_progress",
    "make 104 MB in all": "test_..._rows_in_progress",
    "6.5 MB of buffers": "6 * 132 programs, 2 * 1024 sums of 4 bytes",
    "matrices of 25 MB": "3 matrices of 4096 * 1024 elements of 2 bytes",
}


def CLAIMS(figure):
    forward = figure("layer-norm-forward", "H200")
    ours = forward.shares("triton")
    torch_s = forward.shares("torch")
    gain = forward.ratios("triton", "torch")
    compiled = forward.shares("torch.compile")
    yield (
        f"On the H200, our kernel reaches {forward.share('triton', 4096)}% of "
        f"a copy at 4096 columns, and between {ours.least}% and {ours.most}% "
        "over all widths. "
        f"PyTorch reaches {forward.share('torch', 4096)}% of a copy at 4096 "
        f"columns. Ours is {gain.least} to {gain.most} times as fast as "
        "PyTorch at every width."
    )
    yield (
        "With torch.compile, the speed changes from width to width: on the "
        f"H200 it is between {compiled.least}% and {compiled.most}% of a copy."
    )
    h100 = figure("layer-norm-forward", "H100")
    narrow = h100.shares("triton")
    theirs = h100.shares("torch")
    yield (
        f"On the H100, our kernel reaches between {narrow.least}% and "
        f"{narrow.most}% of a copy over all widths, and PyTorch reaches "
        f"between {theirs.least}% and {theirs.most}%."
    )

    sweeps = figure("layer-norm-sweeps", "H200")
    wide = sweeps.between(4608)
    three = wide.shares("sweeps")
    one = wide.shares("triton")
    narrow_three = sweeps.between(0, 4096).shares("sweeps")
    narrow_one = sweeps.between(0, 4096).shares("triton")
    yield (
        f"On the H200, three sweeps reach between {three.least}% and "
        f"{three.most}% of a copy from 4608 columns on, and a row in "
        f"registers reaches between {one.least}% and {one.most}%. Up to 4096 "
        "columns, where the row is a single tile, they reach between "
        f"{narrow_three.least}% and {narrow_three.most}%, and a row in "
        f"registers reaches between {narrow_one.least}% and "
        f"{narrow_one.most}%."
    )
    apart = {
        N: abs(forward.share("triton", N) - sweeps.share("triton", N))
        for N in forward.medians["triton"]
    }
    most = max(apart, key=apart.get)
    yield (
        "On the H200, its shares of the copy differ by up to "
        f"{apart[most]} points between the two, at {most} columns."
    )

    dram = figure("layer-norm-dram", "H200")
    yield (
        f"On the H200, three sweeps read {dram.median('sweeps', 65536)} times "
        "the bytes of ``x`` from DRAM at 65536 columns, and "
        f"{dram.median('sweeps', 131072)} times at 131072 columns."
    )

    backward = figure("layer-norm-backward", "H200")
    buffers = backward.shares("triton")
    pytorch = backward.shares("torch")
    inductor = backward.shares("torch.compile")
    over_torch = backward.ratios("triton", "torch")
    over_compiled = backward.ratios("triton", "torch.compile")
    yield (
        "On the H200, our backward pass reaches "
        f"{backward.share('triton', 4096)}% of the copy at 4096 columns, and "
        f"between {buffers.least}% and {buffers.most}% over all widths. "
        f"PyTorch reaches {backward.share('torch', 4096)}% of the copy at "
        f"4096 columns. Ours is {over_torch.least} to {over_torch.most} times "
        f"as fast as PyTorch at every width, and {over_compiled.least} to "
        f"{over_compiled.most} times as fast as torch.compile."
    )
    backward_h100 = figure("layer-norm-backward", "H100")
    h100 = backward_h100.shares("triton")
    yield (
        f"On the H100, our backward pass reaches between {h100.least}% and "
        f"{h100.most}% of the copy over all widths."
    )
    share = {
        N: backward.share("triton", N) for N in backward.medians["triton"]
    }
    yield (
        "With 24 KB, at 1024 and 1536 columns, we reach "
        f"{share[1024]}% and {share[1536]}% of the copy."
    )
    some = backward.at(2048, 3072, 4608, 8192, 8704).shares("triton")
    yield (
        "With 32 to 36 KB, at 2048, 3072, 4608, 8192 and 8704 columns, we "
        f"reach between {some.least}% and {some.most}%."
    )
    many = backward.at(4096, 6144, 12288).shares("triton")
    yield (
        f"With 48 KB, at 4096, 6144 and 12288 columns, we reach {many.least}% "
        f"to {many.most}%."
    )
    some = backward_h100.at(2048, 3072, 4608, 8192, 8704).shares("triton")
    many = backward_h100.at(4096, 6144, 12288).shares("triton")
    yield (
        "The H100 shows the same three groups: "
        f"{backward_h100.share('triton', 1024)}% and "
        f"{backward_h100.share('triton', 1536)}%, then between {some.least}% "
        f"and {some.most}%, then between {many.least}% and {many.most}%."
    )
    yield (
        "At 15872 columns the program requests 62 KB, more than at any other "
        f"width, and reaches {share[15872]}% of the copy on the H200."
    )
    faster = {
        card: [
            N
            for N in forward.medians["triton"]
            if figure("layer-norm-forward", card).ratio(
                "torch.compile", "triton", N
            )
            > 1
        ]
        for card in ("H200", "H100")
    }
    assert faster == {"H200": [1024], "H100": [1024, 6144, 8192]}

    yield (
        f"On the H200 it reaches {ours.least}% to {ours.most}% of a copy, "
        "because each byte moves once."
    )
    yield (
        f"On the H200 they reach {three.least}% to {three.most}% of a copy "
        "from 4608 columns on, because L2 still has the row."
    )
    yield (
        f"On the H200 it reaches {torch_s.least}% to {torch_s.most}% of a "
        "copy."
    )
    yield (
        f"**torch.compile** reaches {compiled.least}% to {compiled.most}% of "
        "a copy on the H200."
    )
    yield (
        f"On the H200 it reaches {buffers.least}% to {buffers.most}% of the "
        "copy, because programs wait for rows."
    )
    yield (
        f"On the H200 it reaches {pytorch.least}% to {pytorch.most}% of the "
        "copy."
    )
    yield (
        f"**torch.compile** reaches {inductor.least}% to {inductor.most}% of "
        "the copy on the H200."
    )


HALF, SINGLE, DOUBLE = torch.float16, torch.float32, torch.float64
at = LayerNorm.at


def errors_of_sweeps(page, N, dtype):
    """Relative errors of y, mean and rstd of the kernel with three sweeps."""
    x, w, b, _ = (t.detach() for t in page.inputs(3, N, dtype))
    with guarded_allocations():
        found = page.forward_in_sweeps(x, w, b, 1e-5)
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
        ("programs_per_sm * NUM_SMS", "7"),
        ("columns_per_program = 16", "columns_per_program = 512"),
        ("ROWS=256", "ROWS=8"),
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
        *below_zero(),
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
    elsewhere="is on cuda:1: not the current one",
    mutants={
        "c2 dropped": (
            "dx = (wdy - x_hat * c1 - c2) * rstd\n            tl",
            "dx = (wdy - x_hat * c1) * rstd\n            tl",
        ),
        "c1 dropped": (
            "dx = (wdy - x_hat * c1 - c2) * rstd\n            tl",
            "dx = (wdy - c2) * rstd\n            tl",
        ),
        "masked elements in the variance": (
            "x_centered = tl.where(mask, x - mean, 0)",
            "x_centered = x - mean",
        ),
        "masked elements in the variance of three sweeps": (
            "x_centered = tl.where(cols < N, x - mean, 0)",
            "x_centered = x - mean",
        ),
        "first tile in every sweep": (
            "cols = start + tl.arange(0, BLOCK_SIZE)\n"
            "        x = tl.load(x_ptr + cols, mask=cols < N, other=0)"
            ".to(acc_dtype)\n"
            "        total += x\n",
            "cols = tl.arange(0, BLOCK_SIZE)\n"
            "        x = tl.load(x_ptr + cols, mask=cols < N, other=0)"
            ".to(acc_dtype)\n"
            "        total += x\n",
        ),
        "store without mask": (
            "tl.store(y_ptr + row * N + cols, y, mask=mask)",
            "tl.store(y_ptr + row * N + cols, y)",
        ),
        "rows of other programs": (
            "range(tl.program_id(0), M, tl.num_programs(0))",
            "range(tl.program_id(0), M, tl.num_programs(0) + 1)",
        ),
        "all programs fill the first buffer": (
            "buffer_ptr = buffers_ptr + tl.program_id(0) * 2 * N",
            "buffer_ptr = buffers_ptr",
        ),
        "sums without mask": (
            "tl.store(buffer_ptr + N + cols, db, mask=mask)",
            "tl.store(buffer_ptr + N + cols, db)",
        ),
        "buffers that nobody wrote": (
            "mask = (rows < programs) & (cols < WIDTH)",
            "mask = cols < WIDTH",
        ),
        "second kernel without mask": (
            "tl.sum(total, axis=0), mask=cols < WIDTH",
            "tl.sum(total, axis=0)",
        ),
        "dy with strides of its own": ("dy_ptr=dy.contiguous()", "dy_ptr=dy"),
        "x, w and b with strides of their own": (
            "return tensor.contiguous()",
            "return tensor",
        ),
        "statistics in float32 only": (
            "    acc_dtype = torch.promote_types(x.dtype, torch.float32)\n"
            "    mean = torch.empty(M, dtype=acc_dtype, device=x.device)\n"
            "    rstd = torch.empty(M, dtype=acc_dtype, device=x.device)\n"
            "    block_size",
            "    acc_dtype = torch.float32\n"
            "    mean = torch.empty(M, dtype=acc_dtype, device=x.device)\n"
            "    rstd = torch.empty(M, dtype=acc_dtype, device=x.device)\n"
            "    block_size",
        ),
        "sums in 16 bits": (
            "buffers = torch.empty(shape, dtype=mean.dtype",
            "buffers = torch.empty(shape, dtype=x.dtype",
        ),
        "any eps": ("if not eps >= 0:", "if False:"),
    },
    kills=(
        at(3, 129),
        at(3, 129, DOUBLE),
        at(3, 9, x="columns"),
        at(3, 9, dy="one number"),
        at(17, 3),  # more rows than programs
        at(40, 8, HALF),
        three_sweeps,
        negative_eps,
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
        assert f"9 x 200, torch.{dtype}: each element" in output
    assert "nan" not in output.lower()
    assert output.count("Timing needs a GPU") == 3


def test_stub_fails_and_solution_passes(output):
    # The solution stands in an assertion, so it passed.
    assert output.count("right: False") == 1
    assert output.count("sums of the rows:") == 2


def test_what_the_page_says_of_16_bits(output):
    assert "0.1 added 4096 times in torch.float16: 256.0\n" in output
    assert "0.1 added 4096 times in torch.float32: 409.6\n" in output


class OneElement(torch.autograd.Function):
    """The tensor; but a single element is 0, of it or of its gradient."""

    @staticmethod
    def forward(ctx, tensor, backward):
        ctx.backward = backward
        return tensor.clone() if backward else without_one(tensor)

    @staticmethod
    def backward(ctx, gradient):
        if ctx.backward:
            gradient = without_one(gradient)
        return gradient, None


def without_one(tensor):
    tensor = tensor.clone()
    tensor.view(-1)[tensor.numel() // 2] = 0
    return tensor


@pytest.mark.parametrize("dtype", [HALF, SINGLE])
@pytest.mark.parametrize("name", ["y", "dx", "dw", "db"])
def test_the_check_of_the_page_finds_one_zeroed_element(page, name, dtype):
    def wrong(x, shape, w, b):
        if name == "dx":
            x = OneElement.apply(x, True)
        if name == "dw":
            w = OneElement.apply(w, True)
        if name == "db":
            b = OneElement.apply(b, True)
        y = F.layer_norm(x.float(), shape, w.float(), b.float()).to(dtype)
        return OneElement.apply(y, False) if name == "y" else y

    with pytest.raises(AssertionError, match=f"^{name}: "):
        page.check(wrong, 9, 200, dtype)


def test_the_check_of_the_page_finds_sums_in_16_bits():
    page = PAGE.load(edits=[PAGE.mutants["sums in 16 bits"]])
    with pytest.raises(AssertionError, match=r"^d[wb]: "):
        page.check(page.layer_norm, 300, 20, HALF)


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


def resident(built):
    """Programs of a kernel that an SM has registers and warps for."""
    registers = -(-built.registers // 8) * 8  # a thread gets a multiple of 8
    threads = 32 * built.num_warps
    return min(65536 // (registers * threads), 2048 // threads)


def test_what_the_page_says_of_rows_in_progress(launches):
    """Of three sweeps, on 132 SMs: at most 17 MB up to 65536 columns."""
    from compiled.aot import Call

    sizes = 8192, 16384, 32768, 65536, 131072
    values = {"M": 4096, "dtype": "float16"}
    calls = [Call(PAGE.name, run_sweeps, values | {"N": N}) for N in sizes]
    found = {
        N: resident(built)
        for N, (built,) in zip(sizes, launches(calls), strict=True)
    }
    assert (found[16384], found[65536], found[131072]) == (4, 1, 3)
    megabytes = {N: f"{132 * found[N] * 2 * N / 1e6:.0f}" for N in sizes}
    assert megabytes[16384] == megabytes[65536] == "17"
    assert int(megabytes[8192]) <= 17 >= int(megabytes[32768])
    assert megabytes[131072] == "104"


def test_what_the_page_says_of_programs_that_fit(launches):
    """More than are started where rows are narrow, elsewhere as many."""
    from compiled.aot import Call

    sizes = 1024, 2048, 4096, 4608, 6144, 8192, 12288
    values = {"M": 4096, "dtype": "float16"}
    calls = [Call(PAGE.name, run, values | {"N": N}) for N in sizes]
    for N, launched in zip(sizes, launches(calls), strict=True):
        (built,) = (b for b in launched if b.kernel == "_layer_norm_bwd")
        started = built.grid[0] // 132
        if N <= 2048:
            assert started < resident(built)
        else:
            assert started == resident(built)


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
            y, *_ = page.forward_in_sweeps(x, w, b, 1e-5)
        expected = F.layer_norm(x.double(), (N,), w.double(), b.double())
        unit = torch.finfo(dtype).eps * (0.5 if dtype.itemsize == 2 else 8)
        assert (y - expected).norm() <= unit * expected.norm()
