"""Dropout without a mask: on a GPU, at full size."""

import functools

import add_norm_cases as cases
import pytest
import torch
from add_norm_cases import Case

import layer_norm_cases as layouts
import sanitizer
from tutorial import load

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

NAME = "fused/02-dropout"
page = load(NAME)
SEED = 2**40 + 1


def run(case, p=0.25):
    norm = functools.partial(page.dropout_add_layer_norm, p=p, seed=SEED)
    M, N = (torch.Size(shape).numel() for shape in (case.lead, case.shape))
    share = torch.zeros(M, N, device="cuda").double()
    if p < 1:
        share = page.kept(M, N, p, SEED) / (1 - p)
    share = share.reshape(case.lead + case.shape)
    cases.run(norm, case, page.DEVICE, share)


STEPS = [1, 31, 512, 1000, 1024, 1025, 2048, 4096, 4104, 8191, 8192]


@pytest.mark.parametrize("N", STEPS)
def test_steps(N):
    run(Case((1151,), (N,), torch.float16))
    run(Case((301,), (N,), torch.bfloat16))
    run(Case((301,), ((N + 1) // 2,), torch.float32))


@pytest.mark.parametrize(("dtype", "stream"), layouts.STREAMS)
def test_types(dtype, stream):
    for N in 650, 2000:
        run(Case((301,), (N,), dtype, stream))


@pytest.mark.parametrize("p", [0.0, 0.999, 1.0])
def test_any_share(p):
    run(Case((301,), (1000,), torch.float16), p)


@pytest.mark.parametrize("layout", layouts.LAYOUTS)
@pytest.mark.parametrize("which", ["x", "residual", "dy", "ds", "parameters"])
def test_layouts(which, layout):
    run(Case((20, 30), (40, 25), torch.float16, **{which: layout}))


@pytest.mark.parametrize("lead", [(), (0,), (1,), (2, 1, 3)])
def test_dimensions(lead):
    run(Case(lead, (24,)))


@pytest.mark.parametrize("p", [0.01, 0.25, 0.5])
def test_share_and_neighbors(p):
    mask = page.kept(4096, 8192, p, SEED)
    sigma = (p * (1 - p) / mask.numel()) ** 0.5
    assert abs(mask.mean() - (1 - p)) < 5 * sigma
    for other in (
        *(mask.roll(by, 1) for by in (1, 2, 3, 4)), mask.roll(1, 0),
    ):  # fmt: skip
        assert abs((mask * other).mean() - (1 - p) ** 2) < 6 * sigma


@pytest.mark.parametrize("N", [1000, 4096, 8192])
def test_same_bits_100_times(N):
    x, r, w, b, dy, ds = page.inputs(1024, N, torch.float16)

    def again():
        y, s = page.dropout_add_layer_norm(x, r, N, w, b, 0.1, seed=3)
        return y, s, *torch.autograd.grad((y, s), (x, r, w, b), (dy, ds))

    first = again()
    for _ in range(100):
        assert all(map(torch.equal, first, again()))


def test_two_calls_differ_and_a_seed_of_torch_repeats_them():
    x = torch.ones(64, 1000, device="cuda")
    found = []
    for _ in range(2):
        torch.manual_seed(3)
        found.append(
            [page.dropout_add_layer_norm(x, x, 1000)[1] for _ in range(2)]
        )
    assert all(map(torch.equal, *found))
    assert not torch.equal(*found[0])


def test_more_than_2_31_elements():
    """A position of 32 bits would repeat the mask."""
    M, N = 2**31 // 8192 + 5, 8192
    x = torch.ones(M, N, dtype=torch.float16, device="cuda")
    _, s, *_ = page.forward(x, torch.zeros_like(x), None, None, 1e-5, 0.5, 9)
    for rows in slice(0, 64), slice(M - 64, M):
        assert 0.49 < (s[rows] != 0).double().mean() < 0.51
    assert not torch.equal(s[:5], s[-5:])


SANITIZED = """
import torch
from tutorial import load
page = load("fused/02-dropout")
half, single = torch.float16, torch.float32
for N, dtype in (1000, half), (4096, half), (40, single):
    page.check(301, N, dtype)
torch.cuda.synchronize()
print("done")
"""


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_sanitizer(tool):
    sanitizer.run(tool, SANITIZED)
