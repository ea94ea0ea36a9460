"""What must hold of the page "Dropout without a mask"."""

import torch

from compiled.declared import Case, Kernel, Kernels


def run(page, M, N, dtype):
    x, r, w, b, dy, ds = page.inputs(M, N, dtype)
    y, s = page.dropout_add_layer_norm(x, r, (N,), w, b, 0.1, seed=1)
    torch.autograd.grad((y, s), (x, r, w, b), (dy, ds))
    page.drop(x.detach(), 0.1, 1)


def also(page, M, N, dtype):
    x, r, _w, b, dy, _ds = page.inputs(5, 24, dtype)
    for p in 0.0, 1.0:
        y, _s = page.dropout_add_layer_norm(
            x, r.detach().float(), 24, None, b, p
        )
        torch.autograd.grad(y, (x, b), dy)
    page.drop(x.detach(), 0.1, 1, four=False)


def no_dropout(page, M, N, dtype):
    x, r, w, b, dy, ds = page.inputs(M, N, dtype)
    y, s = page.dropout_add_layer_norm(x, r, (N,), w, b, 0.0)
    torch.autograd.grad((y, s), (x, r, w, b), (dy, ds))


KERNELS = Kernels(
    run=run,
    also=also,
    M=4096,
    N=[4096],
    dtype="float16",
    sizes={
        "float16": [1024, 1536, 2560, 4096, 5120, 8192],
        "bfloat16": [8192],
        "float32": [1024, 4096],
    },
    kernels={
        "_dropout_only": Kernel(
            look="""
            Look for the multiplications of the generator, ten rounds of four,
            for every four elements; nothing but ``x`` is loaded.
            """,
            true=lambda code: [
                code.loaded == 2 * 4096,
                code.narrow("load") == 0,
            ],
        ),
        "_dropout_add_layer_norm_fwd": Kernel(
            look="""
            It loads and stores what the kernel without dropout does: no mask
            goes through memory.
            """,
            true=lambda code: [
                code.loaded == 4 * 2 * 4096,
                code.narrow("load") == 0,
                len(code.lines("store")) == 4,
            ],
            narrow_stores=2,  # mean and rstd
        ),
        "_dropout_add_layer_norm_bwd": Kernel(
            look="""
            Three matrices come by asynchronous copies, two are stored, and the
            generator stands in the second half of the loop.
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
        "no-dropout": Case(
            run=no_dropout,
            sizes={"float16": [1024, 4096, 8192]},
        ),
    },
)
