"""What must hold of the page "A loss without its logits"."""

import torch


def step(page, tokens, features, classes, dtype, bias=False, weight=False, **more):
    def empty(*shape):
        t = torch.empty(shape, dtype=dtype, device=page.DEVICE)
        return t.requires_grad_()

    x, w = empty(tokens, features), empty(classes, features)
    b = empty(classes) if bias else None
    target = torch.empty(tokens, dtype=torch.int64, device=page.DEVICE)
    given = [t for t in (x, w, b) if t is not None]
    if weight:
        more["weight"] = empty(classes).detach()
    loss = page.linear_cross_entropy(x, w, target, linear_bias=b, **more)
    torch.autograd.grad(loss, given, torch.empty_like(loss))


def run(page, M, N, dtype, features=4096, **more):
    step(page, M, features, N, dtype, **more)
