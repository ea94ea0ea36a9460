"""What a page says of itself, and how the suite finds and loads pages."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

import tutorial
from tutorial import FILES, loaded


@dataclasses.dataclass(frozen=True)
class Mistake:
    """A call that must be refused."""

    error: type
    words: str  # a regular expression that the message has
    # From ones(*shape, dtype=torch.float32): the arguments of the function.
    arguments: Callable
    options: Mapping = dataclasses.field(default_factory=dict)


def too_wide(columns, words, inputs=lambda x: (x,), wanted=False):
    """Rows of so many columns, which want a gradient or do not; inputs are
    the arguments before the normalized shape."""

    def arguments(ones):
        x = ones(2, columns).requires_grad_(wanted)
        return *inputs(x), (columns,)

    return Mistake(ValueError, words, arguments)


def below_zero(inputs=lambda x: (x,)):
    """Two calls, with a negative eps and with one that is no number; inputs
    are the arguments before the normalized shape."""

    def arguments(ones):
        return *inputs(ones(2, 8)), (8,)

    return tuple(
        Mistake(
            ValueError,
            rf"\beps is {eps}: .*0 or more",
            arguments,
            {"eps": eps},
        )
        for eps in (-1e-5, float("nan"))
    )


def negative_eps(load):
    """A step of `kills`: a page that takes a negative eps is found."""
    page = load()
    try:
        page.layer_norm(torch.ones(2, 8, device=page.DEVICE), 8, eps=-1e-5)
    except ValueError:
        return
    raise AssertionError("a negative eps is taken")


@dataclasses.dataclass(frozen=True, eq=False)
class Page:
    """PAGE = Page(__file__, operation, functions, ...), in a page's file.

    A case names a function and a form; "" is the first of each.
    """

    file: str
    operation: object  # e.g. LayerNorm(): its axes, reference, mistakes
    # What is tested: name -> what gives it, from the page that is loaded.
    functions: Mapping[str, Callable]
    # Edits of the page's text (old, new), in the interpreter alone: a program
    # takes milliseconds there, so fewer programs do more each.
    quick: tuple = ()
    # Further edits, after `quick`: with smaller tiles small cases have many.
    # The cases of the table run in each; on a GPU the page is as it is.
    forms: Mapping[str, tuple] = dataclasses.field(
        default_factory=lambda: {"": ()}
    )
    # Cases beside the table: at limits of the page's rules, for instance.
    cases: tuple = ()
    long_cases: tuple = ()  # the same, in make test-all
    full: tuple = ()  # at full size, on a GPU
    # Mistakes that the operation has not: of this page alone.
    mistakes: tuple = ()
    # Words of the refusal of a second derivative. None: there is one, and the
    # operation compares it.
    second_derivative: str | None = "once_differentiable"
    # Functions whose results have the same bits each time, and cases that
    # show it in a hundred runs on a GPU.
    repeatable: tuple = ()
    repeated: tuple = ()
    # On a GPU: functions that torch.compile takes whole, and its options.
    compiled: tuple = ()
    compile_options: Mapping = dataclasses.field(default_factory=dict)
    compiled_cases: tuple = ()
    graphs: tuple = ()  # cases that a CUDA graph replays
    trains: tuple = ()  # functions that a model trains with
    huge: tuple = ()  # columns at which M x N passes 2**31
    huge_functions: tuple = ()  # all, if none is named
    # Tools of compute-sanitizer, and what they watch: steps as in `kills`.
    sanitizers: tuple = ()
    sanitized: tuple = ()
    # Further steps for one tool alone: its name -> steps.
    sanitized_by: Mapping[str, tuple] = dataclasses.field(default_factory=dict)
    # With tensors on a GPU that is not the current one: "right", words of the
    # error, or nothing if the page promises nothing.
    elsewhere: str = ""
    # What the script prints, alone and without a GPU: words -> how often.
    prints: Mapping[str, int] = dataclasses.field(default_factory=dict)
    # Faults: name -> an edit (old, new) that some step of `kills` must notice.
    # A step is a case, or a function of `load`, as tests have it. The old text
    # occurs once, and says no more of the script than that takes. What a fault
    # writes beside a buffer must stay in its band (GUARD in memory.py), or the
    # process ends: make the tiles of `quick` small enough.
    mutants: Mapping[str, tuple] = dataclasses.field(default_factory=dict)
    kills: tuple = ()

    @property
    def name(self):
        """As tutorials are called, e.g. layer-norm/01-layer-norm."""
        return name_of(self.file)

    def load(self, form="", edits=()):
        """The page, as it is on a GPU, else in a form; edits come last."""
        form = form or next(iter(self.forms))
        return _load(self, form, tuple(edits))

    def function(self, case, module):
        name = case.function or next(iter(self.functions))
        return self.functions[name](module)

    def table(self, on_gpu):
        """The cases that every page of this operation must pass."""
        axes = {
            "function": tuple(self.functions),
            "form": ("",) if on_gpu else tuple(self.forms),
            **self.operation.axes(on_gpu),
        }
        return self.operation.cases(axes, on_gpu)


def name_of(file):
    return Path(file).relative_to(FILES).with_suffix("").as_posix()


@functools.cache
def _load(page, form, edits):
    if torch.cuda.is_available():
        return tutorial.load(page.name, edits)
    every = (*page.quick, *page.forms[form], *edits)
    return tutorial.load(page.name, every)


def loader(page, edits=()):
    """What a step of `kills` is given: load, with a fault in the page."""

    def load(form=""):
        return page.load(form, edits)

    return load


@functools.cache
def pages():
    """Name -> what the page declares, of all pages that do."""
    files = sorted(FILES.glob("*/[0-9][0-9]-*.py"))
    return {
        name: loaded(name).PAGE
        for name in map(name_of, files)
        if hasattr(loaded(name), "PAGE")
    }
