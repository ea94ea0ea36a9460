"""What must hold of the page "A loss without its logits"."""

import torch

from conformance import LinearCrossEntropy, LinearCrossEntropyCase, Page

HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32

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


# Tiles of 16 and 32, so that small cases have several, and short chunks.
SMALL = (
    ("BLOCK = 64 ", "BLOCK = 16 "),
    ("TOKENS = 4096 ", "TOKENS = 16 "),
    ("(128, 256, 64, 8)", "(32, 32, 16, 8)"),
    ("(128, 128, 64, 4)", "(16, 32, 16, 4)"),
    ("(128, 128, 32, 8)", "(16, 32, 16, 8)"),
    ("(64, 64, 16, 4)", "(16, 32, 16, 4)"),
    ("length < 2048", "length < 40"),
)


def at(lead=(40,), ins=40, classes=99, dtype=HALF, **more):
    return LinearCrossEntropyCase(lead, ins, classes, dtype, **more)


PAGE = Page(
    __file__,
    LinearCrossEntropy(),
    {"linear_cross_entropy": lambda page: page.linear_cross_entropy},
    forms={"small": SMALL, "as it is": ()},
    repeatable=("linear_cross_entropy",),
)
