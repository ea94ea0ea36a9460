"""What must hold of the page "Every width: one layer norm for a model"."""

import torch

from compiled.declared import Case, Kernel, Kernels


# All kinds at one width; the kernels keep their limits on pages of their own.
def run(page, M, N, dtype):
    x, w, b, dy = page.inputs(M, N, dtype)
    for kind in page.FORWARD:
        plan = page.Plan(torch.Size([N]), x, w, b, 1e-5, (kind, kind))
        torch.autograd.grad(page.LayerNorm.apply(x, w, b, plan), (x, w, b), dy)


def also(page, M, N, dtype):
    for n, given in (
        (10232, torch.float16),
        (13, torch.float64),
        (12345, dtype),
    ):
        x, w, b, dy = page.inputs(37, n, given)
        for weight, bias in (w, b), (None, b), (None, None):
            plan = page.Plan(torch.Size([n]), x, weight, bias, 1e-5, None)
            y = page.LayerNorm.apply(x, weight, bias, plan)
            torch.autograd.grad(y, x, dy)


# Two programs on a multiprocessor.
def narrow(page, M, N, dtype):
    x, w, _b, dy = page.inputs(M, N, dtype)
    mean, rstd = torch.empty(2, M, device=page.DEVICE)
    P, launch = page.backward_chunks(M, N, x.itemsize)
    launch(dy, x, w, mean, rstd, x, torch.empty(P, 2, N, device=page.DEVICE))


def no_spills(code):
    return [code.spills == 0 or code.target != "sm_90"]


KERNELS = Kernels(
    run=run,
    also=also,
    M=4096,
    N=[4096],
    dtype="float16",
    kernels={
        "_layer_norm_fwd_chunks": Kernel(
            look="That of page 05: look there.",
            true=no_spills,
            narrow_stores=2,  # mean and rstd
        ),
        "_layer_norm_bwd_chunks": Kernel(
            look="That of page 05: look there.",
            true=no_spills,
            narrow_copies=8,  # mean and rstd
            copies=True,
        ),
        "_add_up_chunks": Kernel(
            look="That of page 05: look there.",
            true=no_spills,
            narrow_stores=1,
        ),
        "_layer_norm_fwd_shifted": Kernel(
            look="That of page 06: look there.",
            true=no_spills,
            narrow_loads=136,  # w and b column by column
            narrow_stores=27,
            narrow_copies=68,
            copies=True,
        ),
        "_layer_norm_bwd_shifted": Kernel(
            look="That of page 06: look there.",
            true=no_spills,
            narrow_loads=40,
            narrow_stores=89,
            narrow_copies=64,
            copies=True,
        ),
        "_layer_norm_fwd_sweeps": Kernel(
            look="That of page 07: look there.",
            true=no_spills,
            narrow_stores=2,  # mean and rstd
        ),
        "_layer_norm_bwd_means": Kernel(
            look="That of page 07: look there.",
            true=no_spills,
            narrow_loads=2,  # mean and rstd
            narrow_stores=2,  # c1 and c2
        ),
        "_layer_norm_bwd_slices": Kernel(
            look="That of page 07: look there.",
            true=no_spills,
            narrow_copies=12,  # statistics of the rows of a tile
            copies=True,
        ),
        "_layer_norm_fwd_shared": Kernel(
            look="That of page 08: look there.",
            true=no_spills,
            narrow_loads=37,  # words
            narrow_stores=4,  # mean, rstd and words
            copies=True,
        ),
        "_layer_norm_bwd_shared": Kernel(
            look="That of page 08: look there.",
            true=no_spills,
            narrow_loads=1,  # words
            narrow_stores=4,  # words
            narrow_copies=9,  # mean
            copies=True,
        ),
    },
    cases={
        "narrow": Case(
            run=narrow,
            sizes={"float16": [1536, 2048, 3072]},
            true={
                "_layer_norm_bwd_chunks": lambda code: [
                    2 * 128 * code.registers <= 65536
                ]
            },
        ),
    },
)
