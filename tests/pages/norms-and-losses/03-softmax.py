"""What must hold of the page "Softmax, both passes"."""

import torch

from compiled.declared import Case, Kernel, Kernels


def run(page, M, N, dtype):
    x, dy = page.inputs(M, N, dtype)
    y = page.in_sweeps(x.detach(), page.plan_sweeps(N, x.itemsize))
    page.forward(x.detach(), plan=page.tile_of(N, x.itemsize, 1))
    page.backward(y, dy, plan=page.plan_backward(2**20, x.itemsize))
    torch.autograd.grad(page.softmax(x), x, dy)


def also(page, M, N, dtype):
    for plan in page.TILES.values():
        page.in_sweeps(page.inputs(5, 1000, dtype)[0], plan)
    for N in 100, 1001:
        x, dy = page.inputs(5, N, dtype)
        torch.autograd.grad(page.log_softmax(x), x, dy)
        torch.autograd.grad(page.softmax(x, 0, torch.float64), x, dy.double())


def log(page, M, N, dtype):
    x, dy = page.inputs(M, N, dtype)
    torch.autograd.grad(page.log_softmax(x), x, dy)


def begins_anywhere(page, M, N, dtype):
    x, dy = page.inputs(M, N, dtype)
    torch.autograd.grad(page.softmax(x), x, dy)


def wide_forward(page, M, N, dtype):
    page.forward(page.inputs(M, N, dtype)[0].detach())


def wide_backward(page, M, N, dtype):
    y, dy = page.inputs(M, N, dtype)
    page.backward(y.detach(), dy)


KERNELS = Kernels(
    run=run,
    also=also,
    M=4096,
    N=[4096, 16384],
    dtype="bfloat16",
    sizes={
        "bfloat16": [128, 256, 1024, 2048, 4096, 8192, 12288, 16384],
        "float16": [4096, 16384],
        "float32": [1024, 8192],
    },
    kernels={
        "_softmax_fwd_streaming": Kernel(
            look="""
            Each sweep has its own loads of ``x``, all of them by 16 bytes.
            Threads wait for each other only between the sweeps, in the two
            reductions that put their pairs together.
            """,
            true=lambda code: [code.narrow("load") == 0 or code.amd],
        ),
        "_softmax_fwd": Kernel(
            look="""
            ``x`` is read once, by 16 bytes, before the first store.
            There is one power for each element: the sum and ``y`` use the
            same.
            """,
            true=lambda code: [
                code.loaded == code.stored == 2 * 4096
                or code.amd,  # whose warps are wider
                code.narrow("load") == 0 or code.amd,
            ],
        ),
        "_softmax_bwd": Kernel(
            look="""
            ``y`` and ``dy`` are read once, by 16 bytes.
            At 16384 columns they take half of the 128 registers that a thread
            may have, and none is spilled.
            """,
            true=lambda code: [
                code.loaded == 2 * 2 * 4096 or code.amd,
                code.narrow("load") == 0 or code.amd,
            ],
            true_at={
                16384: lambda code: [code.registers <= 128, code.spills == 0]
            },
        ),
        "_softmax_bwd_streaming": Kernel(
            look="""
            Shown for rows of one tile: the second sweep has nothing to load
            again.
            """,
            true=lambda code: [len(code.lines("load")) == 2],
        ),
    },
    cases={
        "log": Case(
            run=log,
            sizes={"bfloat16": [256, 1024, 4096, 8192, 16384]},
        ),
        "begins-anywhere": Case(
            run=begins_anywhere,
            sizes={"bfloat16": [1001, 4097, 8191, 16383]},
            limits={
                "narrow_stores": 24,  # both ends of a row
            },
        ),
        "wide-forward": Case(
            run=wide_forward,
            sizes={
                "bfloat16": [24576, 32768, 49152, 65536],
                "float32": [16384, 65536],
            },
        ),
        "wide-backward": Case(
            run=wide_backward,
            sizes={"bfloat16": [24576, 32768], "float32": [16384]},
        ),
    },
)
