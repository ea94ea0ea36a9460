"""What must hold of the page "A kernel that PyTorch knows"."""

import ast
import contextlib
import functools
import os
import subprocess
import sys
import types

import pytest
import torch
import torch.nn.functional as F

import tutorial
from compiled.declared import Kernel, Kernels
from conformance import LAYOUTS, Page, RmsNorm, too_wide
from measurements.figure import series

WAYS = "function", "custom_op", "triton_op"
HALF, SINGLE, DOUBLE = torch.float16, torch.float32, torch.float64
BRAIN = torch.bfloat16


def run(page, M, N, dtype):
    """The functions behind all four ways; their operators, called with
    tensors that have no numbers, would launch nothing."""
    x, w, dy = (t.detach() for t in page.inputs(M, N, dtype))
    _, rstd = page.forward(x, w, 1e-6)
    page.backward(dy, x, w, rstd)


def also(page, M, N, dtype):
    x = torch.empty(4, dtype=dtype, device=page.DEVICE)
    page._double[(1,)](x_ptr=x, y_ptr=x)
    for reads, writes in ((1, 1), (2, 1)):  # the ceilings of both passes
        page._move[(5,)](x, x, 5000 // 3, reads, writes, BLOCK_SIZE=4096)


PUBLISHED = "2026-11-27"

# Forward x is read and y is written; backward dy is read as well.
COPIES = {"rms-norm-forward": (1, 1), "rms-norm-backward": (2, 1)}

KERNELS = Kernels(
    run=run,
    also=also,
    M=4096,
    N=[4096],
    dtype="bfloat16",
    sizes={
        "bfloat16": [1024, 2048, 4096, 8192],
        "float16": [4096],
        "float32": [1024, 4096, 8192],
    },
    kernels={
        "_rms_norm_fwd": Kernel(
            look="""
            The row and the weights are loaded once, by 16 bytes.
            Threads wait for each other only in the one sum.
            """,
            true=lambda code: [
                code.loaded == 2 * 2 * 4096,
                code.narrow("load") == 0,
            ],
            narrow_stores=1,  # rstd
        ),
        "_rms_norm_bwd": Kernel(
            look="""
            The weights are loaded once, before the loop, and the sums for
            ``dw`` stay in registers until its end.
            """,
            true=lambda code: [
                code.count("load", 16) > 0 or code.amd,  # wider warps
                code.spills == 0,
            ],
            narrow_loads=1,  # rstd
        ),
    },
)

# Claims ----------------------------------------------------------------------

CARD = "H200"


def us(of, provider, N):
    number = of.median(provider, N)
    number.rounding = ".1f" if number < 100 else ".0f"
    return number


def names(figure):
    of = figure("operators-host-forward", CARD)
    pytorch, bare, custom, opened = (
        us(of, each, 1024)
        for each in ("torch", "bare", "custom_op", "triton_op")
    )
    # "A name is paid for at each call."
    assert min(custom, opened) > bare > pytorch
    yield (
        f"On the H200 PyTorch's RMS norm takes {pytorch} µs, and our bare "
        f"launch takes {bare} µs. As a custom operator the same launch takes "
        f"{custom} µs, and as a ``triton_op`` it takes {opened} µs. So a name "
        f"costs {custom - bare} µs and {opened - bare} µs a call."
    )


def device(figure):
    forward = figure("rms-norm-forward", CARD)
    ours, torch_, compiled = map(
        forward.shares, ("triton", "torch", "torch.compile")
    )
    yield (
        f"at 1024, 4096 and 8192 columns, our kernel reaches "
        f"{series(ours, '%')} of the copy. PyTorch reaches "
        f"{series(torch_, '%')}. ``torch.compile``, which writes a Triton "
        f"kernel of its own from PyTorch's norm, reaches "
        f"{series(compiled, '%')}."
    )
    # "torch.compile is ahead at 1024 and 8192, only at 4096 are we."
    assert [
        theirs > own for theirs, own in zip(compiled, ours, strict=True)
    ] == [
        True,
        False,
        True,
    ]
    backward = figure("rms-norm-backward", CARD)
    ours, torch_, compiled = map(
        backward.shares, ("triton", "torch", "torch.compile")
    )
    one, *wide = backward.ratios("triton", "torch.compile")
    # "torch.compile is ahead at 1024 columns."
    assert one < 1 < min(wide)
    # "Its kernels are slower", of a norm alone at 4096 columns.
    assert forward.ratio("triton", "torch.compile", 4096) > 1
    yield (
        f"at 1024, 4096 and 8192 columns, our backward pass reaches "
        f"{series(ours, '%')} of the copy. PyTorch reaches "
        f"{series(torch_, '%')}, and torch.compile {series(compiled, '%')}. "
        f"So torch.compile is ahead at 1024 columns, and from 4096 columns on "
        f"we are {wide[0]:.2f} and {wide[1]:.2f} times as fast."
    )

    def against(of, N):
        return (
            f"{of.share('torch.compile', N)}% against {of.share('triton', N)}%"
        )

    yield (
        f"with {against(forward, 1024)} of the copy forward and "
        f"{against(backward, 1024)} backward, and forward at 8192 columns, "
        f"with {against(forward, 8192)}."
    )


def gradients(figure):
    of = figure("operators-host", CARD)
    pytorch, function, custom, opened, graph = (
        us(of, each, 1024) for each in ("torch", *WAYS, "CUDA graph")
    )
    # "The cheapest of the three", and "the kernels alone".
    assert function < min(custom, opened)
    assert graph < min(pytorch, function)
    wide = [us(of, each, 8192) for each in WAYS]
    wide_graph = us(of, "CUDA graph", 8192)
    yield (
        f"On the H200, at 1024 columns, PyTorch takes {pytorch} µs for both "
        f"passes. The autograd function takes {function} µs, the custom "
        f"operator {custom} µs, and ``triton_op`` {opened} µs. The kernels "
        f"alone, in the graph, take {graph} µs. At 8192 columns PyTorch takes "
        f"{us(of, 'torch', 8192)} µs, our three ways take {series(wide)} µs, "
        f"and the graph takes {wide_graph} µs."
    )
    # "PyTorch waits for the device."
    kernels = sum(
        figure(f"rms-norm-{mode}", CARD).us("torch", 8192, matrices)
        for mode, matrices in (("forward", 2), ("backward", 3))
    )
    pytorch_wide = us(of, "torch", 8192)
    assert 0.9 < kernels / pytorch_wide < 1
    yield (
        f"by the two figures of speed above, its kernels take {kernels:.0f} "
        f"of the {pytorch_wide} µs."
    )
    # "Little more than half of that time", and "we wait for the host".
    assert 0.5 < wide_graph / kernels < 0.65
    assert min(wide) > 1.5 * wide_graph
    # "Slower than PyTorch's at all three widths."
    for N in (1024, 4096, 8192):
        assert us(of, "torch", N) < min(us(of, each, N) for each in WAYS)
    # "Begins between 8000 and 9000 rows", with "about twice the 112 µs".
    assert 8000 < 4096 * wide[0] / wide_graph < 9000
    yield (
        f"where the kernels would take about twice the {wide_graph} µs of "
        "4096 rows."
    )
    # "From about 5000 rows on".
    assert 4700 < 4096 * wide[0] / pytorch_wide < 5300
    yield f"its call takes longer than the {wide[0]} µs of ours from about"
    yield (
        f"of ours: {pytorch} µs for both passes on the H200 at 1024 columns, "
        f"against {function} µs."
    )
    # "As much as triton_op when Python calls it."
    assert 0.9 < custom / opened < 1.1
    blocks = figure("operators-compiled-host", CARD)
    for said, way, alone in (
        ("**PyTorch's own norm**", "torch", pytorch),
        ("**An autograd function**", "function", function),
        ("**A custom operator**", "custom_op", custom),
        ("**A triton_op**", "triton_op", opened),
    ):
        yield f"{said}, {alone} µs and {us(blocks, way, 1024)} µs, is for"


def kernels(figure):
    of = figure("operators-kernels", CARD)
    counts = []
    for way in ("torch", *WAYS):
        for provider in ("as it is", "compiled"):
            count = of.median(provider, way)
            count.rounding = ".0f"
            counts.append(count)
    # "One kernel forward and two backward", "the seven kernels are", "an
    # operator runs an eighth", "puts the last two into one", and "stay two
    # kernels in a custom operator".
    assert counts == [6, 3, 7, 6, 8, 7, 8, 6]
    yield (
        "On the H200 both passes of the block take {} kernels with PyTorch's "
        "norm and {} when they are compiled. With the autograd function they "
        "take {} and {}, with the custom operator {} and {}, and with "
        "``triton_op`` {} and {}."
    ).format(*counts)


def blocks(figure):
    of = figure("operators-compiled-forward", CARD)
    as_it_is, compiled, bare, custom, opened = (
        us(of, each, 1024)
        for each in ("as it is", "torch", "bare", "custom_op", "triton_op")
    )
    assert as_it_is < compiled < min(bare, opened)
    assert custom > max(bare, opened)
    assert 0.9 < opened / bare < 1.1  # "as cheap as the bare launch"
    yield (
        f"On the H200 the block takes {as_it_is} µs with PyTorch as it is, "
        f"and {compiled} µs when it is compiled. Compiled with our bare "
        f"launch it takes {bare} µs, with the custom operator {custom} µs, "
        f"and with ``triton_op`` {opened} µs."
    )
    alone = figure("operators-host-forward", CARD)
    exchanged = [
        as_it_is - us(alone, "torch", 1024) + us(alone, each, 1024)
        for each in ("bare", "custom_op", "triton_op")
    ]
    # "The one with the custom operator gets slower", "about twice as long".
    assert 1.8 < custom / exchanged[1] < 2.3
    # "Each takes longer when compiled", and "triton_op loses least".
    losses = [
        now - before
        for now, before in zip(
            (compiled, bare, custom, opened),
            (as_it_is, *exchanged),
            strict=True,
        )
    ]
    assert 0 < losses[3] == min(losses)
    cost = us(alone, "custom_op", 1024) - us(alone, "bare", 1024)
    yield (
        f"the custom operator takes {custom - bare:.0f} µs more than the bare "
        f"launch here, and called from Python its name cost {cost} µs."
    )
    yield (
        f"it would take {exchanged[0]} µs with the bare launch, "
        f"{exchanged[1]} µs with the custom operator, and {exchanged[2]} µs "
        "with ``triton_op``."
    )
    for place, N in (("host", 1024), ("device", 4096)):
        of = figure(f"operators-compiled-{place}", CARD)
        as_it_is, compiled, function, custom, opened = (
            us(of, each, N) for each in ("as it is", "torch", *WAYS)
        )
        with_ours = (
            f"function it takes {function} µs, with the custom operator "
            f"{custom} µs, and with ``triton_op`` {opened} µs."
        )
        begin = "Compiled with" if place == "host" else "With"
        yield (
            f"On the H200 the block takes {as_it_is} µs with PyTorch as it "
            f"is, and {compiled} µs when it is compiled. {begin} the autograd "
            f"{with_ours}"
        )
        if place == "host":
            # "Do not compile to save time on the host", and "about twice as
            # long".
            assert as_it_is < compiled < function < opened
            assert 1.8 < custom / opened < 2.2
            yield (
                f"Even PyTorch's block takes {compiled - as_it_is:.0f} µs "
                "more than as it is."
            )
            both = figure("operators-host", CARD)
            by_name = us(both, "custom_op", 1024)
            by_function = us(both, "function", 1024)
            yield (
                f"That does not explain all of the {custom} µs. They are "
                f"{(custom - opened) / 1e3:.2f} ms more than with "
                "``triton_op``, for two calls of an operator. Called from "
                "Python, in the figure of both passes above, the same two "
                f"calls cost {by_name - by_function:.1f} µs more than the "
                "autograd function."
            )
            host = compiled, function
            continue
        best = min(function, custom, opened)
        assert compiled < best < max(function, custom, opened) < as_it_is
        assert best == opened
        speed = 13 * 2 * 4096**2 / opened / 1e3
        copy = figure("rms-norm-forward", CARD).median("copy", 4096)
        assert 0.9 < speed / copy < 1  # "almost at the speed of a copy"
        yield f"436 MB in {opened:.1f} µs are {speed / 1e3:.2f} TB/s."
        yield (
            f"the compiled block takes {opened / compiled:.2f} times as long "
            "at best."
        )
        yield (
            f"block takes {compiled} µs on the device with 4096 columns, and "
            f"ours {opened} µs. On the host, with 16 rows, it takes {host[0]} "
            f"µs, and ours {host[1]} µs."
        )


def CLAIMS(figure):
    yield from names(figure)
    yield from device(figure)
    yield from gradients(figure)
    yield from kernels(figure)
    yield from blocks(figure)


# Numbers with a unit that nothing has measured, and why they are right.
FACTS = {
    f"applied to {2**22 * 8192 * 2 / 1e9:.0f} GB that": (
        "2**22 rows of 8192 numbers of 2 bytes"
    ),
    f"writes {132 * 8192 * 4 / 1e6:.1f} MB of them": (
        "8, 2 and 1 programs on each of 132 SMs, with a row of 1024, 4096 and "
        "8192 sums of 4 bytes"
    ),
    f"Beside the {3 * 4096 * 1024 * 2 / 1e6:.0f} MB of": "three matrices",
    f"beside the {3 * 4096 * 8192 * 2 / 1e6:.0f} MB at": "three matrices",
    f"13 in all, {13 * 4096**2 * 2 / 1e6:.0f} MB": "matrices of 2 bytes",
    "436 MB in": "as above",
}

# What the functions compute --------------------------------------------------


def by(way):
    """A page's norm in one of the ways, as the operation calls it."""

    def of(page):
        def function(x, residual, *args, **options):
            assert residual is None
            return page.rms_norm(x, *args, way=way, **options), None

        return function

    return of


def tiny_rows(load):
    """Without eps the cube of rstd is more than float32 holds, and dx is
    not."""
    page = load()
    torch.manual_seed(0)
    x, dy = torch.randn(2, 19, 40, device=page.DEVICE)
    w = torch.rand(40, device=page.DEVICE)
    results = []
    for function, kind in ((page.rms_norm, SINGLE), (F.rms_norm, DOUBLE)):
        given = [t.to(kind).requires_grad_() for t in (1e-13 * x, w)]
        y = function(given[0], (40,), given[1], 0.0)
        results.append(torch.autograd.grad(y, given, dy.to(kind)))
    for ours, exact in zip(*results, strict=True):
        assert ours.isfinite().all()
        assert (ours - exact).norm() <= 1e-5 * exact.norm()


def negative_eps(load):
    page = load()
    try:
        page.rms_norm(torch.ones(2, 8, device=page.DEVICE), 8, eps=-1e-5)
    except ValueError:
        return
    raise AssertionError("a negative eps is taken")


def shapes_are_true(load):
    """What is said of the results, and the results, of all layouts."""
    page = load()
    for x, w, dy in inputs_of_all_kinds(page):
        real = page.rms_norm_op(x, w, 1e-6)
        for said, true in zip(
            page.fake_forward(x, w, 1e-6), real, strict=True
        ):
            assert alike(said, true)
        _, rstd = real
        for said, true in zip(
            page.fake_backward(dy, x, w, rstd),
            page.rms_norm_bwd_op(dy, x, w, rstd),
            strict=True,
        ):
            assert alike(said, true)


def refused_in_words(load):
    """A second derivative, of each way."""
    page = load()
    for way in WAYS:
        words = page.words_of(
            functools.partial(page.second_derivative, page.WAYS[way])
        )
        assert ("once" if way == "function" else "rms_norm has no") in words


def batches(load):
    """vmap along each dimension, with one launch."""
    page = load()
    xs = torch.randn(3, 5, 2, 16, device=page.DEVICE)
    w = torch.rand(16, device=page.DEVICE)
    for dim in (0, 1, 2):
        with page.counted_launches() as launches:
            y = torch.vmap(
                lambda x: page.by_custom_op(x, w, 1e-6), in_dims=dim
            )(xs)
        assert len(launches) == 1
        exact = page.pytorch(xs.movedim(dim, 0), w, 1e-6)
        torch.testing.assert_close(y, exact)


def inputs_of_all_kinds(page):
    """x, w and dy of each layout and type."""

    def fill(shape, dtype):
        return torch.randn(shape, device=page.DEVICE).to(dtype)

    for layout in LAYOUTS.values():
        for shape in ((5, 12), (2, 3, 12)):
            for dtype in (HALF, SINGLE, DOUBLE):
                x, dy = (
                    layout(shape, functools.partial(fill, dtype=dtype))
                    for _ in "12"
                )
                yield x, layout((12,), lambda s: fill(s, SINGLE)), dy


def alike(said, true):
    return (
        said.shape == true.shape
        and said.dtype == true.dtype
        and said.stride() == true.stride()
        and said.device == true.device
    )


at = functools.partial(RmsNorm.at, fused=False)
OWN = 'NAMESPACE = "both_passes"'
QUICK = 'NAMESPACE = "quick"'


def planted(**faults):
    """Operators have a name in the whole process, so each fault has its own:
    else the page without faults would call what was planted."""
    return {
        name.replace("_", " "): (edit, (QUICK, f'NAMESPACE = "fault_{i}"'))
        for i, (name, edit) in enumerate(faults.items())
    }


PAGE = Page(
    __file__,
    RmsNorm(alone=True),
    {way: by(way) for way in WAYS},
    quick=(
        (OWN, QUICK),
        # So few programs that each has several rows.
        ("min(M, NUM_SMS * per_sm)", "min(M, 2)"),
    ),
    cases=(
        *(at(M, 40, HALF) for M in (1, 2, 27)),
        *(at(17, 65, HALF, function=way) for way in WAYS),
        *(at(3, 37, dy=dy, function=way) for dy in LAYOUTS for way in WAYS),
        at(1, 8192, HALF),
        at(2, 4097, HALF),
    ),
    full=(
        *(
            at(1151, N, dtype, function=way)
            for way in WAYS
            for N, dtype in (
                *((N, BRAIN) for N in (1000, 1024, 2048, 4096, 8192)),
                *((N, HALF) for N in (37, 8192)),
                *((N, SINGLE) for N in (520, 8192)),
                (264, DOUBLE),
            )
        ),
        *(
            at(301, N, half, weight_dtype=SINGLE, function=way)
            for way in WAYS
            for N in (37, 4096)
            for half in (HALF, BRAIN)
        ),
    ),
    mistakes=(too_wide(8193, "8193 columns.* 8192", lambda x: (x, None)),),
    second_derivative="once_differentiable|rms_norm has no second derivative",
    repeatable=WAYS,
    repeated=tuple(at(512, N, HALF) for N in (256, 1000, 4096, 8192)),
    elsewhere="is on cuda:1: not the current one",
    compiled=WAYS,
    compiled_cases=tuple(at(37, N, HALF) for N in (1000, 8192)),
    graphs=tuple(
        at(512, N, HALF, function=way) for way in WAYS for N in (1000, 8192)
    ),
    trains=WAYS,
    huge=(8192,),
    huge_functions=("function",),
    sanitizers=("memcheck", "racecheck"),
    sanitized=tuple(at(301, N, HALF) for N in (1000, 8192)),
    prints={
        "Timing needs a GPU": 3,
        "y has a gradient: False\n": 1,
        "equal to the bare launch: True\n": 2,
        "each element of y, dx and dw is right": 3,
        "custom_op: add, rms_norm, silu\n": 1,
        "custom_op: graph breaks: 0, whole: True\n": 1,
        ", whole: False\n": 2,
        "gradcheck of the right one: True\n": 1,
        "gradcheck of the forgetful one: True\n": 1,
        "custom_op, contiguous: faults: []\n": 1,
        "custom_op, transposed: faults: []\n": 1,
        "float32: []\nfloat16: ['test_faketensor']\n": 1,
        "Kernels can be counted on a GPU": 1,
        "another stream and a CUDA graph need a GPU\n": 3,
        "custom_op: (4194304, 8192), torch.bfloat16\n": 1,
        "custom_op: (2, 8)\nfunction: NotImplementedError: ": 1,
        "function: 2 launches, 2 where norms are kept\n": 1,
        "custom_op: 2 launches, 1 where norms are kept\n": 1,
        "triton_op: 2 launches, 1 where norms are kept\n": 1,
        "custom_op: 1 launch\ntriton_op: 5 launches\nfunction: Runt": 1,
        "rms_norm takes one w for a whole batch\n": 1,
        "RuntimeError: rms_norm has no second derivative\n": 2,
        "right with DDP: True, with FSDP: True\n": 3,
        "custom_op: both_passes.rms_norm.default\n": 1,
        "equal: True\nfunction: RuntimeError: Cannot access": 1,
        "wrong: transposed, 16 bits, three dimensions\nright: False\n": 1,
        "wrong: nothing\n": 1,
    },
    mutants=planted(
        the_mean_is_subtracted=("tl.sum(x * x) / N", "tl.sum(x * x - x) / N"),
        the_row_sum_dropped=("(wdy - x_hat * c) * rstd", "wdy * rstd"),
        one_factor_r_too_few=(
            "(wdy - x_hat * c) * rstd",
            "(wdy - x_hat * c)",
        ),
        only_the_last_row=("dw += dy * x_hat", "dw = dy * x_hat"),
        sums_without_a_place=(
            "sums_ptr + tl.program_id(0) * N + cols, dw",
            "sums_ptr + cols, dw",
        ),
        the_last_row_left_out=(
            "tl.program_id(0), M, tl.num_programs(0)",
            "tl.program_id(0), M - 1, tl.num_programs(0)",
        ),
        dy_with_strides_of_its_own=("    dy = dy.contiguous()\n", ""),
        y_with_the_strides_of_x=(
            "    x = x.contiguous()\n    w = w.contiguous()\n    N = ",
            "    w = w.contiguous()\n    N = ",
        ),
        dw_not_rounded=(".to(w.dtype).view(w.shape)", ".view(w.shape)"),
        store_without_mask=(
            "tl.store(y_ptr + row * N + cols, x * rstd * w, mask=mask)",
            "tl.store(y_ptr + row * N + cols, x * rstd * w)",
        ),
        rstd_cubed=(
            "(wdy - x_hat * c) * rstd",
            "wdy * rstd - x * (tl.sum(x * wdy) / N) * (rstd * rstd * rstd)",
        ),
        any_eps=("if not eps >= 0:", "if False:"),
        a_gradient_of_another_type=(
            "dw = torch.empty_like(w, memory_format",
            "dw = torch.empty_like(x[0], memory_format",
        ),
        y_said_to_have_the_strides_of_x=(
            "y = torch.empty_like(x, memory_format=torch.contiguous_format)",
            "y = torch.empty_like(x)",
        ),
        dx_said_to_have_the_strides_of_x=(
            "dx = torch.empty_like(x, memory_format=torch.contiguous_format)",
            "dx = torch.empty_like(x)",
        ),
        rstd_said_to_have_the_type_of_x=(
            "return y, x.new_empty(x.numel() // w.numel(), dtype=acc_dtype)\n"
            "\n\nprint",
            "return y, x.new_empty(x.numel() // w.numel())\n\n\nprint",
        ),
        the_wrong_tensor_saved=(
            "    _, rstd = output\n    ctx.save",
            "    rstd, _ = output\n    ctx.save",
        ),
        the_second_derivative_taken_for_0=(
            'raise RuntimeError("rms_norm has no second derivative")',
            "return None, None, None, None",
        ),
        the_batch_is_left_where_it_is=("x.movedim(x_dim, 0)", "x"),
    ),
    kills=(
        at(19, 43, HALF),
        at(19, 43, SINGLE, weight_dtype=HALF, function="triton_op"),
        at(19, 43, x="transposed"),
        at(3, 37, dy="one number"),
        tiny_rows,
        negative_eps,
        shapes_are_true,
        refused_in_words,
        batches,
    ),
)


# What the page says ----------------------------------------------------------


def test_a_name_is_of_one_page(page):
    """Two copies of the page in a process do not call each other, if each has
    a namespace of its own. On a GPU the page is not edited: its copy is."""
    copy = tutorial.load(PAGE.name, ((OWN, 'NAMESPACE = "a_copy"'),))
    assert page.NAMESPACE != copy.NAMESPACE
    x = torch.ones(2, 8, device=page.DEVICE)
    for each in (page, copy):
        each.rms_norm(x, 8)  # a first launch adds to the globals of a page
    for called, other in ((page, copy), (copy, page)):
        with (
            called.counted_launches() as launches,
            other.counted_launches() as of_the_other,
        ):
            called.rms_norm(x, 8)
        assert (launches, of_the_other) == (["forward"], [])


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_check_finds_what_is_wrong(page, scale):
    """One element of one result is enough."""

    def wrong(x, w, eps):
        y = page.by_function(x, w, eps)
        change = torch.zeros_like(y)
        change[1, 2] = 0.02 * scale
        return y + change

    page.check(page.by_function, 5, 40, SINGLE)
    with pytest.raises(AssertionError, match=r"y: .* times the allowed"):
        page.check(wrong, 5, 40, SINGLE)


def test_the_second_operator_of_a_name_replaces_the_first(page):
    """Without an error; and a name can be called from anywhere."""
    x, w, _ = page.inputs(2, 8, SINGLE)
    by_name = getattr(torch.ops, page.NAMESPACE).rms_norm
    assert torch.equal(by_name(x, w, 1e-6)[0], page.bare(x, w, 1e-6))

    def operator(number):
        @torch.library.custom_op("two_packages::add", mutates_args=())
        def add(x: torch.Tensor) -> torch.Tensor:
            return x + number

        return add

    operator(1), operator(2)
    assert torch.ops.two_packages.add(torch.zeros(())).item() == 2


def test_gradients_through_vmap(page):
    """backward after vmap is right, and torch.func.grad is refused."""
    xs = torch.randn(5, 3, 16, device=page.DEVICE)
    w = torch.rand(16, device=page.DEVICE)

    def total(norm, x):
        return norm(x, w, 1e-6).square().sum()

    for way, norm in page.WAYS.items():
        a_sample = functools.partial(total, norm)
        words = page.words_of(
            lambda a=a_sample: torch.vmap(torch.func.grad(a))(xs)
        )
        assert words.startswith("RuntimeError"), words
        if way == "function":
            continue
        exact, found = (xs.clone().requires_grad_() for _ in "12")
        total(page.pytorch, exact).backward()
        torch.vmap(a_sample)(found).sum().backward()
        torch.testing.assert_close(found.grad, exact.grad)


def test_what_a_forgetful_backward_does(page):
    """It is right for gradients that are contiguous, and for those alone."""
    x = torch.randn(4, 6, dtype=DOUBLE, device=page.DEVICE)
    w = torch.rand(6, dtype=DOUBLE, device=page.DEVICE)

    def dx(norm, after):
        leaf = x.clone().requires_grad_()
        after(norm(leaf, w, 1e-6)).backward()
        return leaf.grad

    weights = torch.randn(4, 12, dtype=DOUBLE, device=page.DEVICE)
    afters = {
        "a product": lambda y: (weights[:, :6] * y).sum(),
        "cat": lambda y: (weights * torch.cat([y, x], 1)).sum(),
        "transposed": lambda y: (
            weights[:, :6].T.contiguous() * y.T.contiguous()
        ).sum(),
    }
    for name, after in afters.items():
        exact = dx(page.pytorch, after)
        assert torch.allclose(dx(page.by_function, after), exact)
        same = torch.allclose(dx(page.forgetful, after), exact)
        assert same == (name == "a product"), name


def test_every_operator_keeps_its_promises(page):
    """opcheck, of each layout; without a GPU a triton_op cannot be opened."""
    x, w, _ = page.inputs(4, 6, SINGLE)
    _, rstd = page.rms_norm_op(x, w, 1e-6)
    for layout in LAYOUTS.values():
        given = layout((4, 6), lambda s: torch.randn(s, device=page.DEVICE))
        x = given.detach().requires_grad_()
        assert page.faults_of(page.rms_norm_op, x, w, 1e-6) == []
        arguments = given, x.detach(), w.detach(), rstd
        assert page.faults_of(page.rms_norm_bwd_op, *arguments) == []
        if page.ON_GPU:
            assert page.faults_of(page.rms_norm_open, x, w, 1e-6) == []
            assert page.faults_of(page.rms_norm_bwd_open, *arguments) == []


def test_which_way_can_do_what(page):
    """As it is drawn at the end; without a GPU no triton_op can be opened."""
    tree = ast.parse(tutorial.source(PAGE.name))
    (able,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign)
        and ast.unparse(node.targets[0]) == "ABLE"
    )
    xs = torch.randn(3, 5, 16, device=page.DEVICE)
    w = torch.rand(16, device=page.DEVICE)
    norms = {
        "bare launch": page.bare,
        "autograd.Function": page.by_function,
        "custom_op": page.by_custom_op,
        "triton_op": page.by_triton_op,
    }
    assert list(able) == list(norms)
    for way, norm in norms.items():
        if not page.ON_GPU and way != "custom_op":
            continue  # no compiler can read the interpreter
        assert page.is_one_graph(norm) == ("compile" in able[way])
        error = page.words_of(functools.partial(page.exported, norm))
        assert (error == "no error") == ("export" in able[way]), error
        if page.ON_GPU and "fake" not in able[way]:
            continue  # it would launch with the address 0
        error = page.words_of(functools.partial(page.shape_of_a_fake, norm))
        assert (error == "no error") == ("fake" in able[way]), error
    for way, norm in norms.items():
        x, weight, _ = page.inputs(2, 16, SINGLE)
        trains = norm(x, weight, 1e-6).requires_grad
        assert trains == ("train" in able[way])
        if not trains:
            continue
        launches = page.launches_in_a_checkpoint(
            norm, context_fn=page.KEEP_NORMS
        )
        assert (launches == 1) == ("choose" in able[way])
        if way != "autograd.Function":
            launches = page.launches_in_a_vmap(norm, xs, w)
            assert (launches == 1) == ("vmap" in able[way])
            continue
        error = page.words_of(
            functools.partial(page.launches_in_a_vmap, norm, xs, w)
        )
        assert error.startswith("RuntimeError") and "vmap" not in able[way]


def test_exercise(page):
    """Each of the three faults is found by itself."""

    def strides(x, w, eps):
        return torch.empty_like(x), page.fake_1(x, w, eps)[1]

    def types(x, w, eps):
        return page.fake_1(x, w, eps)[0], x.new_empty(x.numel() // w.numel())

    def rows(x, w, eps):
        y, rstd = page.fake_1(x, w, eps)
        return y, rstd[: x.shape[0]]

    for fault in (strides, types, rows):
        with contextlib.redirect_stdout(None):
            assert not page.exercise_1(fault)


@pytest.mark.parametrize(
    ("triton", "numpy", "runs"),
    [
        ("3.6.0", "2.3.5", True),
        ("3.6.0", "2.4.0", False),
        ("3.6.0+git1", "2.10.1", False),
        ("3.7.0", "2.5.5", True),
        ("3.10.0", "2.5.5", True),
    ],
)
def test_ranks_that_cannot_run_a_loop_are_not_started(
    page, monkeypatch, triton, numpy, runs
):
    """Nor does a page end there that has a GPU, and could go on."""
    for name, version in (("triton", triton), ("numpy", numpy)):
        package = types.SimpleNamespace(__version__=version)
        monkeypatch.setattr(page, name, package)
    monkeypatch.setattr(page.subprocess, "Popen", None)
    assert page.interpreter_runs_loops() == runs
    if not runs:
        said = page.said_by_ranks()
        assert said.startswith(
            f"not tried: the interpreter of Triton {triton}"
        )
        assert f"NumPy {numpy}" in said


@pytest.mark.cpu
def test_a_library_of_compiled_code(page):
    """Where there is a compiler, AOTInductor calls the operator by name."""
    if not page.COMPILER:
        pytest.skip("there is no C++ compiler")
    x = torch.randn(7, 16)
    found = page.by_a_library(page.exported(page.by_custom_op), x)
    w = torch.linspace(0.5, 1.5, 16)
    torch.testing.assert_close(found, page.pytorch(x, w, 1e-6))


# What torch.compile sees, on a GPU and as if there were one -----------------

AS_ON_A_GPU = """
import sys
import torch
import tutorial
from compiled.aot import _stand_in
from triton.runtime.jit import KernelInterface

launch = KernelInterface.__getitem__
_stand_in("sm_90")
KernelInterface.__getitem__ = launch  # a compiler takes it for a kernel's
import torch.utils._triton

for module in list(sys.modules.values()):
    if hasattr(module, "has_triton"):
        module.has_triton = lambda: True
page = tutorial.load("into-pytorch/01-operators", interpret=False)
page.DEVICE = torch.device("cpu")
torch.cuda.is_available = lambda: False  # no state of it is to be kept
"""
SEEN = """
class Done(Exception):
    pass


def seen(norm):
    # What runs a graph would launch; what is in it is known before.
    names = []

    def stop(graph_function):
        def run(*arguments):
            raise Done
        return run

    page.make_boxed_func = stop
    kept = []
    original = page.aot_autograd

    def noted(fw_compiler, bw_compiler):
        def look(graph, inputs):
            kept.append(
                [
                    getattr(n.target, "__name__", str(n.target)).partition(
                        "."
                    )[0]
                    for n in graph.graph.nodes
                    if n.op == "call_function"
                ]
            )
            return fw_compiler(graph, inputs)
        return original(fw_compiler=look, bw_compiler=bw_compiler)

    page.aot_autograd = noted
    try:
        page.graph_of(norm)
    except Done:
        pass
    finally:
        page.aot_autograd = original
    breaks = sum(page.counters["graph_break"].values())
    return [n for n in kept[0] if n not in page.QUIET], breaks


for name, norm in {"bare": page.bare, **page.WAYS}.items():
    names, breaks = seen(norm)
    print(name, breaks, *names)
"""
LAUNCH = "add empty_like empty triton_kernel_wrapper_functional silu"
STRICT = """
import io

for name, norm in {"bare": page.bare, **page.WAYS}.items():
    for shapes in (None, ({0: torch.export.Dim("rows", min=2)},)):
        program = torch.export.export(
            page.Norm(norm, 16),
            (torch.randn(4, 16),),
            dynamic_shapes=shapes,
            strict=True,
        )
        file = io.BytesIO()
        try:
            torch.export.save(program, file)
        except Exception as error:
            print(name, type(error).__name__)
            continue
        saved = file.getvalue()
        print(name, b"kernel_idx" in saved, b"_rms_norm_fwd" in saved)
"""


def printed_as_on_a_gpu(script):
    """The lines that a script prints which takes the page for one on a GPU."""
    paths = tutorial.ROOT / "docs/_ext", tutorial.ROOT / "tests"
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join(map(str, paths))
    done = subprocess.run(
        [sys.executable, "-c", AS_ON_A_GPU + script],
        capture_output=True,
        text=True,
        env=env,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


@pytest.mark.cpu
def test_a_strict_export_has_no_kernel():
    """A file has a number in its place, or there is no file, as the page says
    of one version."""
    if not torch.__version__.startswith("2.13"):
        pytest.skip("the page says it of PyTorch 2.13")
    assert printed_as_on_a_gpu(STRICT) == [
        "bare True False",
        "bare SerializeError",
        "function True False",
        "function SerializeError",
        *2 * ["custom_op False False"],
        *2 * ["triton_op False False"],
    ]


@pytest.mark.cpu
def test_what_torch_compile_sees():
    """Of three ways the launch, of the custom operator its name; and there is
    no graph break."""
    assert printed_as_on_a_gpu(SEEN) == [
        f"bare 0 {LAUNCH}",
        f"function 0 {LAUNCH}",
        "custom_op 0 add rms_norm silu",
        f"triton_op 0 {LAUNCH}",
    ]


@pytest.mark.gpu
def test_what_torch_compile_sees_on_a_gpu(page):
    assert page.graph_of(page.by_custom_op) == ["add", "rms_norm", "silu"]
    for norm in (page.bare, page.by_function, page.by_triton_op):
        assert page.graph_of(norm) == LAUNCH.split()
    for norm in (page.bare, *page.WAYS.values()):
        assert page.graph_breaks(norm) == 0 and page.is_one_graph(norm)
    x, w, _ = page.inputs(4, 16, SINGLE)
    assert not page.block_of(page.bare, compiled=True)(x, x, w).requires_grad


def test_graph_breaks(page):
    """A look at numbers breaks the graph; one at an address breaks it or
    ends it, as the version of PyTorch has it."""
    assert page.graph_breaks(page.by_custom_op) == 0
    assert page.is_one_graph(page.by_custom_op)
    assert page.graph_breaks(page.look_at_numbers) > 0
    for looks in (page.look_at_numbers, page.look_at_an_address):
        assert not page.is_one_graph(looks)
    version = tuple(map(int, torch.__version__.split(".")[:2]))
    if version in ((2, 11), (2, 13)):  # as the page says of them
        counted = page.graph_breaks(page.look_at_an_address) > 0
        assert counted == (version == (2, 11))


def test_each_block_is_compiled(page, monkeypatch):
    """Also the ninth, of whose code torch.compile would keep no more."""
    seen = []

    def look(graph, _):
        seen.append(graph)
        return graph.forward

    torch._dynamo.reset()
    by_look = functools.partial(torch.compile, backend=look)
    monkeypatch.setattr(torch, "compile", by_look)
    for N in range(8, 18):
        x, w, _ = page.inputs(2, N, SINGLE)
        page.block_of(page.by_custom_op, compiled=True)(x, x, w)
    assert len(seen) == 10


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS)
def test_a_block_is_right_when_it_is_compiled(page, way):
    torch._dynamo.reset()
    x, w, dy = page.inputs(64, 256, HALF)
    compiled = page.block_of(page.WAYS[way], compiled=True)
    found = compiled(x, x, w)
    grads = torch.autograd.grad(found, (x, w), dy)
    wide = [t.detach().double().requires_grad_() for t in (x, w)]
    exact = page.block(page.pytorch, wide[0], wide[0], wide[1])
    wanted = torch.autograd.grad(exact, wide, dy.double())
    for ours, theirs in zip((found, *grads), (exact, *wanted), strict=True):
        assert (ours - theirs).norm() <= 2e-3 * theirs.norm()


@pytest.mark.gpu
def test_kernels_are_counted(page):
    x = torch.ones(8, device="cuda")
    assert page.count_kernels(lambda: x + 1) == 1
    assert page.count_kernels(lambda: (x + 1) * (x + 2)) == 3


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS)
def test_streams_and_graphs(page, way):
    assert page.right_on_another_stream(page.WAYS[way])
    assert page.right_in_a_graph(page.WAYS[way])


# What the figures measure ----------------------------------------------------


def test_every_line_of_the_host_is_the_same_work(page, monkeypatch):
    """Each call gives what PyTorch's gives, and PyTorch's is the first."""
    noted = []

    def in_turns(calls, repeats=20):
        noted.append({name: call() for name, call in calls.items()})
        return dict.fromkeys(calls, (1.0, 1.0, 1.0))

    monkeypatch.setattr(page, "in_turns", in_turns)
    monkeypatch.setattr(page, "as_graph", lambda call: call)
    page.times_without_gradients.__wrapped__(5, 24, SINGLE)
    page.times_of_both_passes.__wrapped__(5, 24, SINGLE)
    for results, bench in zip(
        noted, (page.bench_names, page.bench_gradients), strict=True
    ):
        assert next(iter(results)) == "torch"
        assert list(results) == bench.benchmarks.line_vals
        for name in results:
            torch.testing.assert_close(results[name], results["torch"])


def test_every_block_is_the_same_work(page, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    forward = {}

    def in_turns(calls, repeats=20):
        forward.update({name: call() for name, call in calls.items()})

    monkeypatch.setattr(page, "in_turns", in_turns)
    page.times_of_forward_blocks.__wrapped__(5, 24, SINGLE)
    lines = page.bench_compiled_forward.benchmarks.line_vals
    assert list(forward) == lines
    for found in forward.values():
        torch.testing.assert_close(found, forward["torch"])
    results = {}
    for line in page.COMPILED:
        call = page.call_of_line(line, 5, 24, SINGLE)
        torch.manual_seed(0)
        results[line] = call()
    for bench in (page.bench_compiled_host, page.bench_compiled_device):
        assert bench.benchmarks.line_vals == list(results)
    for found in results.values():
        torch.testing.assert_close(found, results["torch"])
    page.call_of_block.cache_clear()


def test_the_fastest_turn_of_a_round_counts(page):
    """And a round that is slow as a whole is slow for all."""
    turns = iter(range(1000))
    now = [0]

    def slow(turn):
        return 3 if turn // 16 == 4 else 1  # the fifth round

    def pytorch():
        now[0] = next(turns)
        return [slow(now[0]) * (20 if now[0] % 16 == 3 else 30)]

    def ours():
        return [slow(now[0]) * (40 if now[0] % 16 == 7 else 80)]

    found = page.in_rounds([pytorch, ours])
    assert [times[0] for times in found] == pytest.approx([20, 40])
    assert found[1] == pytest.approx((40, 40, 40))
    assert next(turns) == 9 * 16


@pytest.mark.cpu
def test_every_line_of_the_figures_measures_what_it_says():
    """A call of each provider, at one size: it moves what is counted."""
    moved = []

    def speed(bytes_moved, prepare):
        prepare()()
        moved.append(bytes_moved)
        return 2.0, 1.0, 3.0

    page = PAGE.load()
    before = page.ON_GPU, page.speed, page.compiled_pytorch
    page.ON_GPU, page.speed = True, speed
    page.compiled_pytorch = lambda: page.pytorch
    try:
        for matrices, benchmark in (
            (2, page.bench_forward),
            (3, page.bench_backward),
        ):
            bench = benchmark.benchmarks
            for provider in bench.line_vals:
                del moved[:]
                values = {"M": 3, "N": 264, "provider": provider}
                found = benchmark.fn(**bench.args | values)
                assert found == (2.0, 1.0, 3.0)
                times = 6 if provider == "copy" else 1
                assert moved == times * [matrices * 3 * 264 * 2]
    finally:
        page.ON_GPU, page.speed, page.compiled_pytorch = before
