"""Softmax, both passes: on a GPU, at full size."""

import pytest
import torch
import torch.nn.functional as F

import sanitizer
import softmax_cases as cases
from softmax_cases import LAYOUTS, NAMES, Case
from tutorial import load

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

NAME = "norms-and-losses/03-softmax"
page = load(NAME)


def run(case):
    cases.run(page, case)


def both(name, x, dy):
    """y and dx."""
    y = getattr(page, name)(x)
    return y, *torch.autograd.grad(y, x, dy)


# Both sides of each step of the rules, rows that begin anywhere; in other
# types a narrow row, the widest in registers and one above.
STEPS = [1, 2, 3, 7, 8, 31, 64, 127, 128, 129, 255, 256, 257, 1000, 1001]
STEPS += [2048, 2049, 4096, 4097, 8192, 8193, 16384, 16385, 16391, 32767]
STEPS += [32768, 32769, 49152, 50257, 65536, 100_003, 2**18, 2**20]
TYPES = [(N, torch.bfloat16) for N in STEPS]
TYPES += [(N, torch.float16) for N in (37, 4096, 16384, 32768, 40000)]
TYPES += [(N, torch.float32) for N in (37, 4096, 8192, 8193, 16384, 16385)]
TYPES += [(N, torch.float64) for N in (37, 4096, 4097, 8192, 8193)]


@pytest.mark.parametrize(("N", "dtype"), TYPES)
@pytest.mark.parametrize("name", NAMES)
def test_steps(N, dtype, name):
    M = 1151 if N <= 32768 else 37
    run(Case((M, N), dtype, name=name))
    run(Case((5, N), dtype, name=name, masked=0.5))


@pytest.mark.parametrize("N", [37, 4096, 8192, 16384, 40000])
@pytest.mark.parametrize("name", NAMES)
def test_another_type(N, name):
    for half in torch.float16, torch.bfloat16:
        run(Case((301, N), half, out=torch.float32, name=name))
        run(Case((301, N), torch.float32, out=half, name=name))
    run(Case((30, N), torch.bfloat16, out=torch.float64, name=name))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("which", ["x", "dy"])
def test_layouts(which, layout):
    for N in 40, 75, 40000, 70001:
        case = Case((2, 3, N), torch.float16, **{which: layout})
        run(case)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_dimensions(dim):
    for name in NAMES:
        run(Case((13, 150, 75), torch.float16, dim=dim, name=name))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("N", [21, 5000, 40000])
def test_what_pytorch_says_of_extremes(name, N):
    inf, nan = torch.inf, torch.nan
    low = torch.finfo(torch.float32).min
    x = torch.zeros(9, N, device="cuda")
    x[0], x[1], x[2] = -inf, low, -low
    x[3, N // 2], x[4, N // 2] = inf, nan
    x[5], x[6] = -inf, -inf
    x[5, -1], x[6, 0], x[7, 1::2], x[8, ::2] = 3.0, low, low, -inf
    x.requires_grad_()
    found, expected = getattr(page, name)(x), getattr(F, name)(x, 1)
    torch.testing.assert_close(found, expected, equal_nan=True)
    dy = torch.randn_like(x)
    found, expected = (
        torch.autograd.grad(y, x, dy)[0] for y in (found, expected)
    )
    close = {"rtol": 1e-4, "atol": 1e-4, "equal_nan": True}
    torch.testing.assert_close(found, expected, **close)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("N", [100, 1000, 4097, 16384, 40000, 100_000])
def test_same_bits_100_times(N, name):
    x, dy = page.inputs(512, N, torch.bfloat16)
    first = both(name, x, dy)
    for _ in range(100):
        assert all(map(torch.equal, first, both(name, x, dy)))


@pytest.mark.parametrize("N", [127, 8192, 40000, 100_000])
def test_more_than_2_31_elements(N):
    M = 2**31 // N + 5
    x = torch.empty(M, N, dtype=torch.bfloat16, device="cuda")
    for rows in x.split(2**27 // N):
        rows.normal_()
    x.requires_grad_()
    y, dx = both("softmax", x, x.detach())
    for rows in slice(0, 64), slice(M - 64, M):
        dy = x.detach()[rows].double()
        want = torch.softmax(dy, 1)
        assert (y[rows] - want).norm() <= 2**-8 * want.norm()
        kept = y.detach()[rows].double()
        want = kept * (dy - (kept * dy).sum(1, keepdim=True))
        assert (dx[rows] - want).norm() <= 2**-8 * want.norm()


@pytest.mark.parametrize("N", [1000, 1001, 40000])
def test_torch_compile(N):
    for name in NAMES:
        # Each width alone: page 05 is the one for shapes that vary.
        compiled = torch.compile(
            getattr(page, name), fullgraph=True, dynamic=False
        )
        x, dy = page.inputs(37, N, torch.float16)
        y = compiled(x)
        found = y, *torch.autograd.grad(y, x, dy)
        for a, b in zip(found, both(name, x, dy), strict=True):
            assert (a - b).norm() <= 2**-10 * b.norm()


@pytest.mark.parametrize("N", [1000, 16384, 40000])
def test_cuda_graph(N):
    x, dy = page.inputs(512, N, torch.float16)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        both("softmax", x, dy)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            found = both("softmax", x, dy)
    with torch.no_grad():
        x.normal_()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert all(map(torch.equal, found, both("softmax", x, dy)))


def test_every_tile_of_the_first_figure_is_right():
    x, _ = page.inputs(37, 40000, torch.bfloat16)
    for plan in page.TILES.values():
        y, want = page.in_sweeps(x.detach(), plan), x.double().softmax(1)
        assert (y - want).norm() <= 2**-8 * want.norm()


# The last group of a matrix may end outside of it, and memcheck objects; with
# 40 rows it does not.
SANITIZED = f"""
import torch
from tutorial import load
page = load("{NAME}")
for N in 100, 1000, 4097, 16384, 40000, 70000:
    page.check(40, N, torch.bfloat16)
torch.cuda.synchronize()
print("done")
"""


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_sanitizer(tool):
    sanitizer.run(tool, SANITIZED)
