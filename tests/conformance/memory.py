"""How tensors lie in memory, and bands around them that show a wrong access.

255 in every byte is NaN in each float type: a read of a band shows in the
result, a write to it is found at the end.
A kernel may also claim that a pointer is a multiple of 16 bytes. Where that is
false a load of a GPU fails, and the interpreter does not care: it is asked.
"""

import contextlib

import pytest
import torch

GUARD = 4096  # bytes of a band


def _contiguous(shape, fill):
    """Between two bands of NaN."""
    value = fill(shape)
    return guarded(shape, value.dtype, value.device)[0].copy_(value)


def _columns(shape, fill):
    """Columns of a wider tensor whose other columns are NaN."""
    value = fill(shape)
    wide = value.new_full((*shape[:-1], shape[-1] + 19), float("nan"))
    return wide[..., 7 : 7 + shape[-1]].copy_(value)


def _transposed(shape, fill):
    """The first and the last dimension swapped in memory."""
    return fill(shape).transpose(0, -1).contiguous().transpose(0, -1)


def _every_second(shape, fill):
    """Every second element of a tensor; the others are NaN."""
    value = fill(shape)
    return value.new_full((*shape, 2), float("nan"))[..., 0].copy_(value)


def _unaligned(shape, fill):
    """Contiguous, but not at the start of the memory."""
    value = fill(shape)
    flat = value.new_full((value.numel() + 1,), float("nan"))
    return flat[1:].view(shape).copy_(value)


def _one_number(shape, fill):
    """One number with strides of 0, as from sum().backward()."""
    return fill(()).expand(shape)


LAYOUTS = {
    "contiguous": _contiguous,
    "columns": _columns,
    "transposed": _transposed,
    "every second": _every_second,
    "unaligned": _unaligned,
    "one number": _one_number,
}


def guarded(shape, dtype, device):
    """A tensor of NaN between two bands, and the memory that holds all."""
    shape = torch.Size(shape)
    size = shape.numel() * dtype.itemsize
    memory = torch.full(
        (size + 2 * GUARD,), 255, dtype=torch.uint8, device=device
    )
    return memory[GUARD : GUARD + size].view(dtype).view(shape), memory


_empty = torch.empty
_running = []  # of each guarded_allocations that runs, its memories


def _allocate(*shape, dtype=None, device=None, like=None):
    if like is not None:
        shape = like.shape
        dtype = dtype or like.dtype
        device = device or like.device
    elif len(shape) == 1 and not isinstance(shape[0], int):
        shape = shape[0]
    dtype = dtype or torch.get_default_dtype()
    if not _running:  # a page has kept it, as a part of a plan
        return _empty(shape, dtype=dtype, device=device)
    tensor, memory = guarded(shape, dtype, device)
    _running[-1].append(memory)
    return tensor


def _new_empty(tensor, *shape, **given):
    like = {"dtype": tensor.dtype, "device": tensor.device}
    return _allocate(*shape, **like | given)


@contextlib.contextmanager
def guarded_allocations():
    """Put bands around every tensor that the code inside allocates.

    What torch.empty gives is NaN, so a read of it, or of a band, shows in the
    result. At the end the bands must be untouched.
    """
    memories, false = [], []

    def claim(handle, name, values):
        handle.attr[name] = values
        if name == "tt.divisibility" and handle.data.flat[0] % values[0]:
            false.append(f"{handle.data.flat[0]} as a multiple of {values[0]}")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", _allocate)
        patch.setattr(
            torch, "empty_like", lambda t, **k: _allocate(like=t, **k)
        )
        patch.setattr(
            torch, "zeros", lambda *s, **k: _allocate(*s, **k).zero_()
        )
        patch.setattr(torch.Tensor, "new_empty", _new_empty)
        if not torch.cuda.is_available():
            from triton.runtime.interpreter import TensorHandle

            patch.setattr(TensorHandle, "set_attr", claim)
        _running.append(memories)
        try:
            yield
        finally:
            _running.pop()
    assert not false, f"a kernel takes {false[0]}"
    assert memories, "nothing was allocated"
    for memory in memories:
        assert (memory[:GUARD] == 255).all(), "written before a buffer"
        assert (memory[-GUARD:] == 255).all(), "written behind a buffer"
