"""What must hold of the page "Attention without its matrix"."""

import torch

from conformance import Attention, AttentionCase, Page

HALF, BRAIN = torch.float16, torch.bfloat16


def run(page, M, N, dtype, D=128):
    def empty():
        t = torch.empty(1, 16, N, D, dtype=dtype, device=page.DEVICE)
        return t.requires_grad_()

    q, k, v = empty(), empty(), empty()
    y = page.attention(q, k, v)
    torch.autograd.grad(y, (q, k, v), torch.empty_like(y))


PAGE = Page(
    __file__,
    Attention(),
    {"attention": lambda page: page.attention},
    quick=(),
    cases=(
        AttentionCase(large=900.0, dtype=HALF),
        AttentionCase(queries=128, keys=256, D=16),
        AttentionCase(queries=129, keys=65, D=64),
    ),
)
