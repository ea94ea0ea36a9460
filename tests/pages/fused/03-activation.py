"""What must hold of the page "A function as a constant"."""

import torch

from compiled.declared import Case, Kernel, Kernels


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
    ):
        y = page.activation_layer_norm(x, 24, None, b, function)
        torch.autograd.grad(y, (x, b), dy)
        page.apply(x.detach(), function, dy)
    page.forward(x.detach(), w, b, 1e-5, page._silu_plain)


def gelu(page, M, N, dtype):
    x, w, b, dy = page.inputs(M, N, dtype)
    for function in "gelu", "gelu_tanh":
        y = page.activation_layer_norm(x, (N,), w, b, function)
        torch.autograd.grad(y, (x, w, b), dy)


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
