"""What must hold of the page "A linear layer, both passes"."""

import torch

from compiled.declared import Case, Kernel, Kernels


def run(page, M, N, dtype, activation="gelu"):
    def empty(*shape):
        t = torch.empty(*shape, dtype=dtype, device=page.DEVICE)
        return t.requires_grad_()

    x, w, b = empty(M, 4096), empty(N, 4096), empty(N)
    for rung in page.RUNGS:
        page.by_address(x, w, rung)
    y = page.linear(x, w, b, activation)
    torch.autograd.grad(y, (x, w, b), torch.empty_like(y))


def plain(page, M, N, dtype):
    run(page, M, N, dtype, None)


KERNELS = Kernels(run=run, M=8192, N=[4096], dtype="bfloat16", kernels={})
