"""Triton's interpreter, with the same numbers in a fifth of the time.

Most of its time goes where nothing is computed: tables of types, shapes and
types of blocks are made anew for every tensor, shapes that are alike are
compared number by number, triton.language is searched at every call of a
device function, and every sum of integers is checked for an overflow that only
debugging reports.
test_quick_interpreter.py compares the bits. Readers never meet this module:
pages and downloads run in the interpreter as it is.
"""

import functools
import inspect

import triton.language as tl
from triton.runtime import interpreter

_semantic = interpreter.interpreter_semantic
# By place and name.
SLOW = {
    (place, name): getattr(place, name)
    for place, name in (
        (interpreter, "_get_np_dtype"),
        (interpreter, "_patch_lang"),
        (_semantic, "binary_op_sanitize_overflow_impl"),
        (_semantic, "broadcast_impl_value"),
        (tl.block_type, "__init__"),
        (tl.tensor, "__init__"),
    )
}
(
    _slow_np_dtype,
    _slow_patch_lang,
    _slow_overflow,
    _slow_broadcast,
    _slow_block,
    _slow_tensor,
) = SLOW.values()

_dtypes = {}  # by the name of a type of elements
_blocks = {}  # what a type of blocks knows, by type of element and shape
_patched = set()  # languages(...) of the launch that is running


def install(functions=None):
    for (place, name), function in (functions or QUICK).items():
        setattr(place, name, function)


def np_dtype(dtype):
    name = dtype.scalar.name
    if name not in _dtypes:
        _dtypes[name] = _slow_np_dtype(dtype)
    return _dtypes[name]


@functools.cache
def languages(function):
    """The modules that a device function takes the language from."""
    found = filter(inspect.ismodule, function.__globals__.values())
    return frozenset(m.__name__ for m in found if m in (tl, tl.core))


def patch_lang(function):
    """Patch a language once in a launch, not at every call in it."""
    if languages(function) in _patched:
        return None  # only a launch restores, and it comes first
    _patched.add(languages(function))
    scope = _slow_patch_lang(function)
    restore = scope.restore

    def restore_and_forget():
        _patched.clear()
        restore()

    scope.restore = restore_and_forget
    return scope


def overflow(lhs, rhs, operation):
    """The result is for device_assert, which does nothing but in debugging."""
    if _semantic.builder.options.debug:
        _slow_overflow(lhs, rhs, operation)


def broadcast(lhs, rhs):
    """Blocks of one shape stay as they are."""
    if lhs.type.is_block() and rhs.type.is_block():
        shapes = [t.type.get_block_shapes().values for t in (lhs, rhs)]
        if shapes[0] == shapes[1]:
            return lhs, rhs
    return _slow_broadcast(lhs, rhs)


def block(self, element_ty, shape):
    """Nobody changes a type: all of a shape share what they know."""
    key = (
        *(element_ty.name, getattr(element_ty, "address_space", None)),
        *(getattr(size, "value", size) for size in shape),
    )
    if key not in _blocks:
        _slow_block(self, element_ty, shape)
        _blocks[key] = self.__dict__
    self.__dict__ = _blocks[key]


def tensor(self, handle, type):
    """All tensors of a type have its shape."""
    if "of_tensors" not in type.__dict__:
        _slow_tensor(self, handle, type)
        type.__dict__["of_tensors"] = {
            name: getattr(self, name) for name in ("shape", "numel", "dtype")
        }
    self.__dict__ = {
        **type.__dict__["of_tensors"],
        "handle": handle,
        "type": type,
    }


QUICK = dict(
    zip(
        SLOW,
        (np_dtype, patch_lang, overflow, broadcast, block, tensor),
        strict=True,
    )
)
