"""RMS norm in 16 bits: on a GPU, at full size."""

import pytest
import torch
import torch.nn.functional as F

import rms_norm_cases as cases
import sanitizer
from layer_norm_cases import STREAMS
from rms_norm_cases import Case
from tutorial import load

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

NAME = "norms-and-losses/02-rms-norm-16-bits"
page = load(NAME)
SIXTEEN_BITS = torch.float16, torch.bfloat16


def run(case):
    cases.run(page, case)


@pytest.mark.parametrize("N", [8, 37, 1000, 2048, 4096, 4104, 5120, 8192])
@pytest.mark.parametrize("dtype", SIXTEEN_BITS)
def test_widths(N, dtype):
    run(Case((1151,), (N,), dtype, offset=1.0))
    run(Case((1151,), (N,), dtype, fused=False))
    run(Case((1151,), (N,), dtype, stream_dtype=torch.float32))


def test_other_types():
    run(Case((1151,), (4096,), torch.float32))
    run(Case((301,), (2048,), torch.float64))
    run(Case((301,), (8192,), torch.float16, weight_dtype=torch.float32))


@pytest.mark.parametrize(("dtype", "stream"), STREAMS)
def test_types(dtype, stream):
    for N in 40, 1500:
        run(Case((301,), (N,), dtype, stream_dtype=stream))


@pytest.mark.parametrize("layout", cases.LAYOUTS)
@pytest.mark.parametrize("which", ["x", "residual", "dy", "ds", "parameters"])
def test_layouts(which, layout):
    run(Case((20, 3), (40, 25), torch.float16, **{which: layout}))


@pytest.mark.parametrize("dtype", SIXTEEN_BITS)
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("casting", ["gemma", "llama"])
def test_castings_are_those_of_the_models(casting, offset, dtype):
    """Nearly all bits are those of PyTorch's steps; sums round otherwise."""
    x = torch.randn(512, 4096, device="cuda").to(dtype)
    w = torch.rand(4096, device="cuda").to(dtype)
    y = page.rms_norm(x, 4096, w, 1e-6, casting, offset)
    expected = page.in_torch(x, w, 1e-6, casting, offset)
    assert (y == expected).double().mean() > 0.97


@pytest.mark.parametrize("N", [1000, 4096, 8192])
def test_same_bits_100_times(N):
    given = page.inputs(512, N, torch.float16, torch.float32)

    def again():
        return page.results(
            lambda *t: page.add_rms_norm(*t[:2], (N,), t[2]), *given
        )

    first = again()
    for _ in range(100):
        assert all(map(torch.equal, first, again()))


def test_more_than_2_31_elements():
    N = 8192
    M = 2**31 // N + 5
    x = torch.empty(M, N, dtype=torch.float16, device="cuda")
    for rows in x.split(16384):
        rows.normal_()
    y = page.rms_norm(x.requires_grad_(), (N,), None, 1e-6)
    (dx,) = torch.autograd.grad(y, x, x.detach())
    last = x.detach()[-64:].double().requires_grad_()
    expected = F.rms_norm(last, (N,), None, 1e-6)
    (grad,) = torch.autograd.grad(expected, last, last.detach())
    assert (y[-64:] - expected).norm() <= 2**-11 * expected.norm()
    # It is nearly 0: compared with the size of its terms.
    assert (dx[-64:] - grad).norm() <= 2**-11 * last.norm()


def test_a_block_trains_like_pytorch():
    """Loss and gradients of a block in bfloat16, against PyTorch's."""
    ours, theirs = (
        page.step(256, 128, norm, torch.bfloat16)()
        for norm in (page.RMSNorm, page.LlamaNorm)
    )
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).norm() <= 0.05 * b.norm()


def losses(norm, steps=20):
    torch.manual_seed(0)
    block = page.Block(128, norm).cuda()
    optimizer = torch.optim.SGD(block.parameters(), lr=0.1, momentum=0.9)
    x, s = torch.randn(2, 4, 32, 128, device="cuda")
    found = []
    for _ in range(steps):
        y, out = block(x, s)
        loss = F.mse_loss(y + out, s.roll(1, 1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return torch.stack(found)


def test_trains_like_pytorch():
    ours, theirs = losses(page.RMSNorm), losses(page.LlamaNorm)
    assert theirs[-1] < theirs[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=0)


SANITIZED = f"""
import torch
from tutorial import load
page = load("{NAME}")
for N in 1000, 8192:
    page.check(301, N, torch.float16, torch.float32, "llama")
torch.cuda.synchronize()
print("done")
"""


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_sanitizer(tool):
    sanitizer.run(tool, SANITIZED)
