"""The quick interpreter computes what Triton's own does, bit for bit."""

import pytest
import torch

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
