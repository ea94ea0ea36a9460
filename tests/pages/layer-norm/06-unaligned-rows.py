"""What must hold of the page "Rows that begin anywhere"."""

import torch

from compiled.declared import Kernel, Kernels


def run(page, M, N, dtype):
    x, w, b, dy = page.inputs(M, N + 1, dtype)  # no multiple of 8
    torch.autograd.grad(page.layer_norm(x, (N + 1,), w, b), (x, w, b), dy)


def also(page, M, N, dtype):
    x, w, b, dy = page.inputs(13, 25, dtype)
    page.backward(dy, x, w, *page.forward(x, w, b, 1e-5, 1)[1:], x, None, 1)
    torch.autograd.grad(page.layer_norm(x, (25,), w, None), (x, w), dy)
    torch.autograd.grad(page.layer_norm(x[:, 3:], (22,)), x, dy[:, 3:])
    x = x.detach().float()
    page._sum_of_row[(8,)](x, x, N=13, BLOCK=32, STEP=8)


SIZES = {
    "float16": [
        100, 512, 1150, 2046, 3000, 4096, 6000, 7776, 8190, 8192, 10230,
    ],
    "bfloat16": [4096, 10230],
    "float32": [512, 5110],
}  # fmt: skip

KERNELS = Kernels(
    run=run,
    also=also,
    M=4096,
    N=[4096],
    dtype="float16",
    sizes=SIZES,
    kernels={
        "_layer_norm_fwd_shifted": Kernel(
            look="""
            ``x`` comes by asynchronous copies of 8 bytes, although rows begin
            anywhere; ``w`` and ``b`` are the loads of 2 bytes, before the
            loop.
            """,
            true=lambda code: [
                code.count("copy", 8) > 0 or code.amd,
                code.count("copy", 8) == code.count("copy"),
                code.count("load", 2) > 0,
            ],
            narrow_loads=136,  # w and b, before the loop
            narrow_stores=31,  # of 4 columns; mean and rstd; the ends of a row
            narrow_copies=68,  # of 4 columns
            copies=True,
        ),
        "_layer_norm_bwd_shifted": Kernel(
            look="""
            Rows come by copies of 8 bytes; the stores of 2 bytes are the ends
            of a row, those of 4 bytes the sums, after the loop.
            """,
            true=lambda code: [
                code.count("copy", 8) > 0 or code.amd,
                (code.registers > 128 and code.spills == 0)
                or code.target != "sm_90",
            ],
            narrow_loads=40,  # w, before the loop
            narrow_stores=104,  # sums, and the ends of a row
            narrow_copies=64,  # of 4 columns; mean and rstd
            copies=True,
        ),
        "_add_up_chunks": Kernel(
            look="That of page 05.",
            true=lambda code: [
                (code.count("early") == 1)
                == (code.target in ("sm_90", "sm_100"))
            ],
            narrow_loads=32,  # the sums of an odd width begin anywhere
            narrow_stores=1,  # of 16 columns
        ),
    },
)
