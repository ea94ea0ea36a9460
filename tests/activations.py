"""Activations that only tests have: import this inside of functions, as
triton.language is interpreted or compiled, decided at its first import."""

import triton
import triton.language as tl


@triton.jit
def identity(x):
    return x, x * 0 + 1


@triton.jit
def sigmoid(x):
    y = tl.sigmoid(x)
    return y, y * (1 - y)
