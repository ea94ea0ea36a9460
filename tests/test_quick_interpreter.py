"""The quick interpreter computes what Triton's own does, bit for bit."""

import pytest
import torch
import triton
import triton.language as tl

import quick_interpreter
from conformance import LayerNorm
from tutorial import load

if torch.cuda.is_available():
    pytest.skip("kernels run on the GPU", allow_module_level=True)


@pytest.fixture
def both():
    """Run a function in the slow interpreter, then in the quick one."""

    def run(function):
        quick_interpreter.install(quick_interpreter.SLOW)
        slow = function()
        quick_interpreter.install()
        return slow, function()

    yield run
    quick_interpreter.install()


@pytest.mark.parametrize(
    ("N", "dtype"), [(33, torch.float16), (40, torch.bfloat16)]
)
def test_a_norm_has_the_same_bits(both, N, dtype):
    """This page has a reduction of its own."""
    page = load("layer-norm/06-unaligned-rows")
    operation, case = LayerNorm(), LayerNorm.at(2, N, dtype)
    given = operation.tensors(case, page.DEVICE)
    slow, quick = both(lambda: operation.results(page.layer_norm, case, given))
    assert list(slow) == list(quick) == ["y", "dx", "dweight", "dbias"]
    assert all(map(torch.equal, slow.values(), quick.values()))


@triton.jit
def _two_sums(a, b, c, d):
    return a + c, b + d * 0.5


@triton.jit
def _largest(a, b):
    if a > b:  # of one element, so it can branch
        return a
    else:
        return b


@triton.jit
def _inner_largest(a, b):
    return _largest(a, b)


@triton.jit
def _reduce(
    x_ptr, y_ptr, AXIS: tl.constexpr, KEEP: tl.constexpr, F: tl.constexpr
):
    at = tl.arange(0, 4)[:, None] * 8 + tl.arange(0, 8)
    x = tl.load(x_ptr + at)
    if F == "sums":
        one, two = tl.reduce((x, x * x), AXIS, _two_sums, keep_dims=KEEP)
        y = one - two
    elif F == "branch":
        y = tl.reduce(x, AXIS, _largest, keep_dims=KEEP)
    else:
        y = tl.reduce(x, AXIS, _inner_largest, keep_dims=KEEP)
    tl.store(y_ptr + at, x * 0 + y)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
@pytest.mark.parametrize("function", ["sums", "branch", "calls a branch"])
@pytest.mark.parametrize(("axis", "keep"), [(0, False), (0, True), (1, True)])
def test_a_reduction_has_the_same_bits(both, axis, keep, function, dtype):
    x = torch.randn(4, 8).to(dtype)

    def reduced():
        y = torch.full_like(x, float("nan"))
        _reduce[(1,)](x, y, axis, keep, function)
        return y

    slow, quick = both(reduced)
    assert torch.equal(slow, quick)
    if "branch" in function:
        assert torch.equal(quick, x.amax(axis, keepdim=True).expand(4, 8))
