"""What every page must hold, said once; how: see declared.py.

The file of a page, tests/pages/<section>/<stem>.py, imports this package and
says in PAGE which operation the page computes, for which sizes and types, and
what else it promises. tests/test_conformance.py asks all of it of all pages,
in Triton's interpreter and on a GPU. Importing costs little: no tutorial is
loaded, and no triton.
"""

from conformance.add_norm import AddNorm, AddNormCase
from conformance.attention import AnyAttention, Attention, AttentionCase
from conformance.cross_entropy import CrossEntropy, CrossEntropyCase
from conformance.gate import Gate, GateCase
from conformance.layer_norm import LayerNorm, LayerNormCase
from conformance.linear import Linear, LinearCase
from conformance.linear_cross_entropy import (
    LinearCrossEntropy,
    LinearCrossEntropyCase,
)
from conformance.memory import LAYOUTS, guarded_allocations
from conformance.modules import takes_the_place
from conformance.operation import warm
from conformance.page_files import (
    Mistake,
    Page,
    below_zero,
    negative_eps,
    too_wide,
)
from conformance.rms_norm import RmsNorm, RmsNormCase
from conformance.rotary import Rotary, RotaryCase
from conformance.softmax import Softmax, SoftmaxCase

__all__ = [
    "LAYOUTS",
    "AddNorm",
    "AddNormCase",
    "AnyAttention",
    "Attention",
    "AttentionCase",
    "CrossEntropy",
    "CrossEntropyCase",
    "Gate",
    "GateCase",
    "LayerNorm",
    "LayerNormCase",
    "Linear",
    "LinearCase",
    "LinearCrossEntropy",
    "LinearCrossEntropyCase",
    "Mistake",
    "Page",
    "RmsNorm",
    "RmsNormCase",
    "Rotary",
    "RotaryCase",
    "Softmax",
    "SoftmaxCase",
    "below_zero",
    "guarded_allocations",
    "negative_eps",
    "takes_the_place",
    "too_wide",
    "warm",
]
