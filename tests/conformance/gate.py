"""A gate: function(gate, up), an activation of gate, times up."""

import dataclasses

import torch
import torch.nn.functional as F

from conformance.bounds import Expected
from conformance.memory import LAYOUTS
from conformance.operation import (
    DTYPES,
    AnyCase,
    Operation,
    filler,
    gradients,
    leaves,
)
from conformance.page_files import Mistake

SIZES = (
    (5, 37),
    (2, 3, 32),
    (9, 16),
    (7,),
    (),
    (0, 3),
    (3, 0),
    (4, 1),
    (2, 200),
    (3, 1, 2, 24),
)
WANTED = ((True, True), (True, False), (False, True), (False, False))


def gelu_tanh(x):
    """As F.gelu with approximate="tanh", whose 1 + tanh is 0 far below 0, in
    float64, too."""
    return x * torch.sigmoid((8 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))


def activation_of(name):
    """The name of a function begins with its activation."""
    if name.startswith("swiglu"):
        return F.silu
    return gelu_tanh if "tanh" in name else F.gelu


@dataclasses.dataclass(frozen=True)
class GateCase(AnyCase):
    shape: tuple = (5, 37)
    dtype: torch.dtype = torch.float32
    gate: str = "contiguous"  # a layout, as the next two
    up: str = "contiguous"
    dy: str = "contiguous"
    scale: float = 1.0  # the gate is so much larger
    wanted: tuple = (True, True)  # requires_grad of gate and up


@dataclasses.dataclass(frozen=True)
class Gate(Operation):
    dtypes: tuple = DTYPES
    sizes: tuple = SIZES
    Case = GateCase

    def axes(self, on_gpu):
        return {
            "shape": self.sizes,
            "dtype": self.dtypes,
            "gate": tuple(LAYOUTS),
            "up": tuple(LAYOUTS),
            "dy": tuple(LAYOUTS),
            "scale": (1.0, 30.0),
            "wanted": WANTED,
        }

    def random_axes(self):
        from hypothesis import strategies as st

        sizes = st.lists(st.integers(0, 40), max_size=4)
        return {"shape": sizes.map(tuple)}

    def possible(self, case, on_gpu):
        """The first and the last dimension are swapped: there is one."""
        layouts = case.gate, case.up, case.dy
        return len(case.shape) > 0 or not {"transposed", "columns"} & {
            *layouts
        }

    def tensors(self, case, device):
        filled = filler(device, case.seed)
        return {
            "gate": filled(case.gate, case.shape, case.dtype, case.scale),
            "up": filled(case.up, case.shape, case.dtype),
            "dy": filled(case.dy, case.shape, case.dtype),
        }

    def results(self, function, case, tensors):
        gate, up, dy = tensors.values()
        given = leaves([gate, up], case.wanted)
        y = function(*given)
        inputs = dict(zip(("gate", "up"), given, strict=True))
        return {"y": y.detach()} | gradients([y], [dy], inputs)

    def exact(self, case, tensors, found):
        gate, up, dy = (t.double() for t in tensors.values())
        activation = activation_of(case.function or "swiglu")
        with torch.enable_grad():
            leaf = gate.detach().requires_grad_()
            value = activation(leaf)
            (slope,) = torch.autograd.grad(value.sum(), leaf)
        value = value.detach()
        far = gate.abs()
        if activation is F.silu:
            # An exponent is off by its own size.
            sigmoid = torch.sigmoid(gate)
            value_size = value.abs() * (1 + far)
            slope_size = sigmoid * (1 + far * (1 - sigmoid)) * (1 + far)
        else:
            # GELU subtracts numbers near 1 far below 0.
            value_size = 2 * far
            slope_size = 2 * (1 + far)
        # A power below the normal numbers may count as 0.
        tiny = torch.finfo(torch.float32).smallest_normal
        largest = [1.0] + [t.abs().max().item() for t in (gate, up, dy)
                           if t.numel()]  # fmt: skip
        least = tiny
        for each in largest:
            least *= max(each, 1.0)
        want = {
            "y": (value * up, value_size * up.abs()),
            "dgate": (dy * up * slope, (dy * up).abs() * slope_size),
            "dup": (dy * value, dy.abs() * value_size),
        }
        asked = dict(zip(("dgate", "dup"), case.wanted, strict=True))
        return {
            name: Expected(value, size, case.dtype, 2, least=4 * least)
            for name, (value, size) in want.items()
            if asked.get(name, True)
        }

    def mistakes(self):
        def of(change):
            return lambda ones: change(ones(3, 8), ones(3, 8))

        refused = (
            (TypeError, "gate has torch.int64", lambda g, u: (g.long(), u)),
            (
                TypeError,
                "gate has torch.complex64",
                lambda g, u: (g.to(torch.complex64), u),
            ),
            (
                TypeError,
                "float8",
                lambda g, u: (g.to(torch.float8_e4m3fn), u),
            ),
            (
                TypeError,
                "up has torch.float16, and gate has torch.float32",
                lambda g, u: (g, u.half()),
            ),
            (ValueError, "gate is on meta", lambda g, u: (g.to("meta"), u)),
            (ValueError, "up is on meta", lambda g, u: (g, u.to("meta"))),
            (
                ValueError,
                r"up is \(2, 8\), and gate is \(3, 8\)",
                lambda g, u: (g, u[:2]),
            ),
            (
                ValueError,
                r"up is \(3, 1\), and gate is \(3, 8\)",
                lambda g, u: (g, u[:, :1]),
            ),
            (ValueError, r"up is \(8,\)", lambda g, u: (g, u[0])),
        )
        return tuple(Mistake(e, words, of(f)) for e, words, f in refused)

    def refusable(self, function, device):
        gate = torch.randn(5, 8, device=device, requires_grad=True)
        return function(gate, torch.randn(5, 8, device=device)), gate

    def huge(self, function, device, N, slack=5):
        """More than 2**31 elements; some of the first and last rows."""
        M, kind, some = 2**31 // N + slack, torch.bfloat16, max(2**27 // N, 1)
        gate, up = (
            torch.empty(M, N, dtype=kind, device=device) for _ in range(2)
        )
        for t in (gate, up):
            for part in t.split(some):
                part.normal_()
            t.requires_grad_()
        y = function(gate, up)
        dgate, dup = torch.autograd.grad(y, (gate, up), up.detach())
        name = getattr(function, "__name__", "swiglu")
        case = GateCase(dtype=kind, function=name)
        for rows in slice(0, 64), slice(M - 64, M):
            given = {"gate": gate, "up": up, "dy": up}
            given = {name: t.detach()[rows] for name, t in given.items()}
            found = {"y": y, "dgate": dgate, "dup": dup}
            found = {name: t.detach()[rows] for name, t in found.items()}
            self.judge(case, given, found)

    def model(self, function):
        """A layer of a model that computes so, and PyTorch's."""

        class Ours(torch.nn.Module):
            def __init__(self, N):
                super().__init__()
                self.gate = torch.nn.Linear(N, N)
                self.up = torch.nn.Linear(N, N)

            def both(self, gate, up):
                return function(gate, up)

            def forward(self, x):
                return x + self.both(self.gate(x), self.up(x))

        class Theirs(Ours):
            def both(self, gate, up):
                name = getattr(function, "__name__", "swiglu")
                return activation_of(name)(gate) * up

        return Ours, Theirs
