"""What must hold of the page "Cross-entropy over a vocabulary"."""

import torch

from compiled.declared import Case, Kernel, Kernels


def run(page, M, N, dtype):
    x, target = page.inputs(M, N, dtype)
    x = x.detach()
    page.read(x, target)()
    given = x, target, None, (-100, 0.0, 0.0)
    g, dx = torch.ones((), device=page.DEVICE), torch.empty_like(x)
    page._scale[(1024,)](dx, g, dx.numel(), 2048)
    page.sweeps(*given, None, g, dx)


def loss(page, M, N, dtype):
    x, target = page.inputs(M, N, dtype)
    page.sweeps(x.detach(), target, None, (-100, 0.0, 0.0))


def gradient(page, M, N, dtype):
    x, target = page.inputs(M, N, dtype)
    x, given = x.detach(), (target, None, (-100, 0.0, 0.0))
    page.sweeps(x, *given, x.new_empty(4, M).float(), x.new_ones(()), x)


def smoothing(page, M, N, dtype):
    x, target = page.inputs(M, N, dtype)
    x, given = x.detach(), (target, None, (-100, 0.1, 1e-4))
    page.sweeps(x, *given)


def both_smoothing(page, M, N, dtype):
    x, target = page.inputs(M, N, dtype)
    x, given = x.detach(), (target, None, (-100, 0.1, 1e-4))
    page.sweeps(x, *given, None, x.new_ones(()), x)


def both_weights(page, M, N, dtype):
    x, target = page.inputs(M, N, dtype)
    w = x.new_ones(N + 1).float()
    x, given = x.detach(), (target, w, (-100, 0.1, 1e-4))
    page.sweeps(x, *given, None, x.new_ones(()), x)


KERNELS = Kernels(
    run=run,
    M=8192,
    N=[32000, 128256],
    dtype="bfloat16",
    sizes={
        "bfloat16": [32000, 50257, 65536, 128256, 262144],
        "float16": [128256],
        "float32": [16384, 32000, 50257, 128256],
    },
    kernels={
        "_read": Kernel(
            look="""
            Four loads of 16 bytes a thread, and one number that is stored:
            what it takes to read the logits.
            """,
            true=lambda code: [
                code.loaded == 2 * 8192 or code.amd,  # whose warps are wider
                code.narrow("load") == 0 or code.amd,
            ],
            narrow_stores=1,  # the largest
        ),
        "_cross_entropy": Kernel(
            look="""
            Shown with both sweeps.
            Each has its own loads, all of logits by 16 bytes; only the target,
            what a row keeps and words of other programs are narrower.
            Threads wait for each other once, between the sweeps, and where a
            row has slices once more, for all their words.
            """,
            true=lambda code: [
                (code.count("load", 16) > 0 and code.spills == 0)
                or code.target != "sm_90",
                len(code.lines("shuffle")) == 1 or code.amd,
            ],
            true_at={
                128256: lambda code: [
                    (code.registers <= 64 and code.spills == 0)
                    or code.target != "sm_90"
                ]
            },
            # The target, its logit, the factor, columns at the edges.
            narrow_loads=12,
            narrow_stores=8,  # what a row keeps, columns at the edges
        ),
        "_scale": Kernel(
            look="""
            The factor is loaded first, and a branch leads past everything else
            if it is 1.
            """,
            true=lambda code: [
                code.narrow("load") == 1 or code.amd,
                code.narrow("store") == 0 or code.amd,
            ],
            narrow_loads=1,  # the factor
        ),
    },
    cases={
        "loss": Case(
            run=loss,
            sizes={
                "bfloat16": [32000, 50257, 128256, 262144],
                "float32": [32000],
            },
        ),
        "gradient": Case(
            run=gradient,
            sizes={
                "bfloat16": [32000, 50257, 128256, 262144],
                "float32": [32000],
            },
        ),
        "smoothing": Case(
            run=smoothing,
            sizes={"bfloat16": [32000, 50257, 128256]},
        ),
        "both-smoothing": Case(
            run=both_smoothing,
            sizes={"bfloat16": [32000, 50257, 128256]},
        ),
        "both-weights": Case(
            run=both_weights,
            sizes={"bfloat16": [32000, 50257, 128256]},
            limits={
                "narrow_loads": 140,  # of weights, where rows begin anywhere
            },
        ),
    },
)
