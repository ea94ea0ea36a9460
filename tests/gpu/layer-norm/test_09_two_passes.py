"""What a second pass costs: on a GPU, at full size."""

import functools

import pytest
import torch
import torch.nn.functional as F

import layer_norm_cases as cases
import sanitizer
from layer_norm_cases import Case
from tutorial import load

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

NAME = "layer-norm/09-two-passes"
page = load(NAME)
EVERY = pytest.mark.parametrize("design", page.DESIGNS)


def run(case, design="triton"):
    function = functools.partial(page.layer_norm, design=design)
    cases.run(function, case, page.DEVICE)


@EVERY
@pytest.mark.parametrize("N", [1000, 1023, 4096, 4608, 16384])
def test_full_size(design, N):
    run(Case((1151,), (N,), torch.float16), design)
    run(Case((300,), (N,), torch.bfloat16), design)
    run(Case((300,), (N,), torch.float32), design)


@pytest.mark.parametrize("N", [16385, 65536, 1048583])
def test_wide_rows(N):
    for design in "triton", "rows split", "example 53's tiling":
        run(Case((33,), (N,), torch.float16), design)


@pytest.mark.parametrize("N", [1, 17, 128])
def test_tall_matrices(N):
    run(Case((200_003,), (N,), torch.float16))


def test_float64():
    for design in page.DESIGNS:
        for N in 33, 1151, 4096:
            run(Case((300,), (N,), torch.float64), design)


@pytest.mark.parametrize("layout", cases.LAYOUTS)
@pytest.mark.parametrize("which", ["x", "dy", "parameters"])
def test_layouts(which, layout):
    run(Case((20, 30), (40, 25), torch.float16, **{which: layout}))


@EVERY
@pytest.mark.parametrize("lead", [(), (0,), (1,), (2, 1, 3)])
def test_dimensions(design, lead):
    run(Case(lead, (9,)), design)


@pytest.mark.parametrize("N", [1024, 4608, 8192, 65536])
def test_deterministic(N):
    """100 times the same bits, whatever the order of the programs."""
    designs = ["triton", "rows split", "one kernel"][: 2 if N > 16384 else 3]
    x, w, b, dy = page.inputs(1024, N, torch.float32)
    for design in designs:
        y = page.layer_norm(x, (N,), w, b, design=design)

        def again(y=y):
            found = torch.autograd.grad(y, (x, w, b), dy, retain_graph=True)
            return torch.cat([t.flatten() for t in found])

        first = again()
        assert all(torch.equal(again(), first) for _ in range(100))


def test_a_row_is_read_once():
    """What this compiler makes of two sweeps over one tile: 16 bytes of x, dy
    and w for each thread and tile, and the two numbers of a row."""
    for N in 1024, 4096, 8192, 16384:
        x, w, _, dy = (t.detach() for t in page.inputs(64, N, torch.float16))
        stats = torch.ones(2, 64, device="cuda")
        (rows, cols, warps), *_ = page.wide_tiles(4096, N)
        assert rows == 1
        compiled = page._layer_norm_bwd_dx[(64,)](
            dy, x, w, *stats, torch.empty_like(x), 64, N, 1, cols,
            num_warps=warps,
        )  # fmt: skip
        wide = compiled.asm["ptx"].count("ld.global.v4")
        assert wide * 16 * 32 * warps == 3 * 2 * N
        assert compiled.n_spills == 0


def test_more_than_2_31_elements():
    for M, N in (2**31 // 8192 + 5, 8192), (2049, 2**20):
        x = torch.empty(M, N, dtype=torch.float16, device="cuda")
        dy = torch.empty_like(x)
        chunk = 2**27 // N
        for part in x, dy:
            for rows in part.split(chunk):
                rows.normal_()
        x.requires_grad_()
        w, b = torch.rand(2, N, dtype=torch.float16, device="cuda")
        w, b = w.requires_grad_(), b.requires_grad_()
        y = page.layer_norm(x, (N,), w, b)
        dx, dw, db = torch.autograd.grad(y, (x, w, b), dy)
        sums = torch.zeros(2, N, dtype=torch.float64, device="cuda")
        for X, DY in zip(
            x.detach().split(chunk), dy.split(chunk), strict=True
        ):
            X, DY = X.double(), DY.double()
            sums += torch.stack(
                [(DY * F.layer_norm(X, (N,))).sum(0), DY.sum(0)]
            )
        for found, total in zip((dw, db), sums, strict=True):
            assert (found - total).norm() <= 2**-11 * total.norm()
        X = x.detach()[-9:].double().requires_grad_()
        expected = F.layer_norm(X, (N,), w.double(), b.double())
        (grad,) = torch.autograd.grad(expected, X, dy[-9:].double())
        assert (y[-9:] - expected).norm() <= 2**-11 * expected.norm()
        assert (dx[-9:] - grad).norm() <= 2**-11 * grad.norm()
        del x, dy, y, dx, X, DY, expected, grad
        torch.cuda.empty_cache()


def losses(norm, steps=20):
    torch.manual_seed(0)
    layers = [torch.nn.Linear(96, 96, device="cuda") for _ in range(3)]
    w = torch.ones(96, device="cuda", requires_grad=True)
    b = torch.zeros(96, device="cuda", requires_grad=True)
    parameters = [w, b, *(p for f in layers for p in f.parameters())]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    x = torch.randn(256, 96, device="cuda")
    found = []
    for _ in range(steps):
        h = x
        for layer in layers:
            h = h + F.gelu(layer(norm(h, (96,), w, b)))
        loss = F.mse_loss(h, x.roll(1, 0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return torch.stack(found)


def test_trains_like_pytorch():
    ours, theirs = losses(page.layer_norm), losses(F.layer_norm)
    assert theirs[-1] < 0.9 * theirs[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=0)


SANITIZED = """
import functools
import torch
from tutorial import load
page = load("layer-norm/09-two-passes")
for design in page.DESIGNS:
    f = functools.partial(page.layer_norm, design=design)
    page.check(f, 700, 1001, torch.float16)
page.check(page.layer_norm, 33, 20001, torch.float16)
torch.cuda.synchronize()
print("done")
"""


@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck"])
def test_sanitizer(tool):
    sanitizer.run(tool, SANITIZED)
