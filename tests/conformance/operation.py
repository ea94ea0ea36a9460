"""What the operations share: cases, filled tensors, one case run and judged.

An operation, e.g. layer_norm.LayerNorm, says

- Case: a frozen dataclass of what may vary, each field with its default;
- axes(on_gpu): field, or tuple of fields, -> values, for the table of pairs;
- tensors(case, device): what the function is given, by name, then what
  arrives in the backward pass;
- results(function, case, tensors): name -> result or gradient, only what the
  case asks for;
- exact(case, tensors, found): name -> Expected, of the same names;
- mistakes(): calls that must be refused;
- for the checks on a GPU, huge(...) and model(function), see there.
"""

import dataclasses

import torch

from conformance import bounds, pairs
from conformance.memory import LAYOUTS, guarded_allocations

DTYPES = torch.float16, torch.bfloat16, torch.float32, torch.float64
OWN_LAYOUTS = tuple(name for name in LAYOUTS if name != "one number")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnyCase:
    function: str = ""  # "": the first that the page names; so of the form
    form: str = ""
    seed: int = 0


def describe(case):
    """What of a case differs from the default, for the name of its test."""
    parts = []
    for field in dataclasses.fields(case):
        value = getattr(case, field.name)
        if value == field.default or (field.name == "seed" and value == 0):
            continue
        if isinstance(value, tuple):
            value = "x".join(str(int(part)) for part in value)
        name = str(value).removeprefix("torch.").replace(" ", "_")
        short = field.name in ("function", "form", "dtype")
        parts.append(name if short else f"{field.name}={name}")
    return ",".join(parts) or "default"


class Operation:
    Case = AnyCase
    named = ()  # what the function is given first, in order
    alone = False  # whether the page leaves out the norm of a sum

    def usual(self, **fields):
        """The case of a check that any case would do for."""
        return self.Case(**fields)

    def possible(self, case, on_gpu):
        """Whether there is such a case."""
        return True

    def random_axes(self):
        """Axis -> strategy of hypothesis, in place of its few values."""
        return {}

    def case(self, row):
        """Of an axis that is several fields, the value is a tuple of them."""
        fields = {}
        for axis, value in row.items():
            several = isinstance(axis, tuple)
            fields |= dict(zip(axis, value, strict=True)) if several else {
                axis: value
            }  # fmt: skip
        return self.Case(**fields)

    def cases(self, axes, on_gpu):
        def possible(row):
            return self.possible(self.case(row), on_gpu)

        return [self.case(row) for row in pairs.table(axes, possible)]

    def arithmetic(self, case):
        return bounds.arithmetic(case.dtype)

    def judge(self, case, tensors, found):
        expected = self.exact(case, tensors, found)
        assert list(found) == list(expected), (
            f"there are {list(found)}, not {list(expected)}"
        )
        for name, value in expected.items():
            compare = found[name]
            assert compare is not None, f"{name} is None"
            bounds.compare(name, compare, value, self.arithmetic(case))

    def run(self, function, case, device):
        """Run one case between guard bands and check everything about it."""
        tensors = self.tensors(case, device)
        copies = {
            name: None if t is None else t.clone()
            for name, t in tensors.items()
        }
        with guarded_allocations():
            found = self.results(function, case, tensors)
        for name, tensor in tensors.items():
            assert tensor is None or torch.equal(tensor, copies[name]), (
                f"{name} was written"
            )
        self.judge(case, tensors, found)


def run(page, case, module):
    page.operation.run(page.function(case, module), case, module.DEVICE)


def filler(device, seed=0):
    """filled(layout, shape, dtype, scale, shift): normal numbers."""
    generator = torch.Generator().manual_seed(seed)

    def filled(layout, shape, dtype, scale=1.0, shift=0.0):
        def fill(shape):
            value = torch.randn(shape, generator=generator)
            return (shift + scale * value).to(device, dtype)

        return LAYOUTS[layout](tuple(shape), fill)

    return filled


def leaves(tensors, wanted):
    """Of each tensor a leaf that wants a gradient or does not."""
    return [
        None if t is None else t.detach().requires_grad_(want)
        for t, want in zip(tensors, wanted, strict=True)
    ]


def warm(function):
    """Each call is the second of its kind, and its backward pass, too.

    For pages that keep of a first call what was planned and compiled.
    """

    def second(*arguments):
        y = function(*arguments)
        given = [t for t in arguments if torch.is_tensor(t)]
        if wanted := [t for t in given if t.requires_grad]:
            torch.autograd.grad(y, wanted, torch.zeros_like(y))
        return function(*arguments)

    return second


def gradients(outputs, arriving, inputs):
    """Name -> gradient, of the named leaves that want one."""
    asked = {
        name: t
        for name, t in inputs.items()
        if t is not None and t.requires_grad
    }
    if not asked:
        return {}
    found = torch.autograd.grad(
        outputs, list(asked.values()), arriving, allow_unused=True
    )
    return {"d" + name: t for name, t in zip(asked, found, strict=True)}
