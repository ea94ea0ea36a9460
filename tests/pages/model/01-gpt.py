"""What must hold of the page "A GPT whose every kernel is a page of this
site"."""

import torch

import tutorial
from compiled.declared import Kernels
from conformance import operation
from tutorial import load

NAME = "model/01-gpt"
PUBLISHED = "2026-11-28"


def run(page, M, N, dtype):
    """All kernels are those of other pages."""


def also(page, M, N, dtype):
    gate, up, y = torch.empty(3, M, N, dtype=dtype, device=page.DEVICE)
    for activation in (page._squared_relu, page._squared_relu_1):
        page.both_passes.gate_forward(gate, up, y, activation)
        page.both_passes.gate_backward(y, gate, up, gate, up, activation)


KERNELS = Kernels(
    run=run,
    also=also,
    M=4096,
    N=[2048],
    dtype="bfloat16",
    kernels={},
)

# Claims ----------------------------------------------------------------------

CARD = "H200"


def us(of, provider, x, form=".0f"):
    number = of.median(provider, x)
    number.rounding = form
    return number


def ms(of, provider, x):
    number = of.median(provider, x) / 1000
    number.rounding = ".1f"
    return number


def gb(of, provider):
    number = of.median(provider, 16384)
    number.rounding = ".1f"
    return number


def by_itself(figure):
    of = figure("gpt-functions", CARD)
    norm, gate, rotary, attention, product, loss = (
        (us(of, "triton", each), us(of, "torch", each))
        for each in (
            *("add_and_norm", "gate", "rotate", "attend", "linear", "loss"),
        )
    )
    yield (
        f"On the H200 both passes of our norm take {norm[0]} µs, and those of "
        f"PyTorch's {norm[1]} µs. For the gate it is {gate[0]} and {gate[1]} "
        f"µs, for the rotary embedding {rotary[0]} and {rotary[1]} µs, for "
        f"attention {attention[0]} and {attention[1]} µs, for the product "
        f"{product[0]} and {product[1]} µs, and for the loss {loss[0]} and "
        f"{loss[1]} µs."
    )
    assert norm[0] < norm[1], "one kernel in place of several"
    assert gate[0] < gate[1], "one kernel in place of several"
    assert rotary[0] < rotary[1], "one kernel in place of several"
    assert loss[0] < loss[1], "one kernel in place of several"


def of_gradients(figure):
    of = figure("gpt-gradients", CARD)
    ours, theirs = (of.all_medians(each) for each in ("triton", "torch"))
    least, most = (f"{each:.4f}" for each in (ours.least, ours.most))
    lowest, highest = (f"{each:.4f}" for each in (theirs.least, theirs.most))
    yield (
        "On the H200 the gradients of a block have a relative error of "
        f"{least} to {most} with our functions, and of {lowest} to {highest} "
        "with PyTorch's."
    )


CLAIMED = by_itself, of_gradients


def CLAIMS(figure):
    for claimed in CLAIMED:
        yield from claimed(figure)


FACTS = {}

# The module ------------------------------------------------------------------

FIRST = 2  # cases of a page's table, and of its own


def suite():
    """Cases of the suites of all pages that both_passes.py is made of."""
    import modules  # which a build lacks

    for name in modules.GATHERED["model/both_passes"]:
        page = tutorial.loaded(name).PAGE
        table = page.table(torch.cuda.is_available())
        for case in (*table[:FIRST], *page.cases[:FIRST]):
            # This one is of the page's check alone.
            if case.function != "geglu, tanh":
                yield page, case


def pytest_generate_tests(metafunc):
    if "case_of" in metafunc.fixturenames:
        cases = list(suite())
        names = [f"{p.name}:{operation.describe(c)}" for p, c in cases]
        metafunc.parametrize("case_of", cases, ids=names)


def test_its_functions_pass_the_suites_of_their_pages(case_of):
    """Nothing in it is another page's of the same name."""
    page, case = case_of
    operation.run(page, case, load(NAME).both_passes)
