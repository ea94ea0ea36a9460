"""What the file of a page declares of its kernels, for X-ray and for tests.

Beside each script there is ``tests/pages/<section>/<stem>.py``. It has a
function that calls the wrappers of the page, and with it

    KERNELS = Kernels(run=run, M=4096, N=[4096], dtype="float16", kernels={
        "_double": Kernel(
            look="Doubled by 16 bytes.",
            true=lambda code: [code.narrow("load") == 0],
        ),
    })
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field

from tutorial import ROOT, file_of, loaded

# A number, or {N: number} of those N that have one.
Limit = int | float | dict[int, int]


@dataclass(frozen=True)
class Kernel:
    """What to look for in the panel of a kernel, and what is held.

    The limits are those on sm_90. What makes ``look`` true holds on each GPU
    of its panel: a function of the ``Facts`` of the compiled kernel (see
    limits.py) gives a list in which all is true.
    """

    look: str  # reStructuredText
    true: Callable  # at the first N of the page
    true_at: dict[int, Callable] = field(default_factory=dict)  # at others
    # The most instructions that move fewer than 16 bytes.
    narrow_loads: Limit = 0
    narrow_stores: Limit = 0
    narrow_copies: Limit = 0
    # The most bytes that a thread spills; elsewhere a few more are let pass.
    spills: Limit = 0
    shared: Limit = 99 * 1024  # the most bytes of shared memory
    # Whether loads are asynchronous where the GPU can (sm_80 and later), or
    # "any" if they need not be.
    copies: bool | str = False
    releases: int = 0  # of a lock; each needs a barrier before it
    # The one GPU that it is for, if it is not for all: a kernel in Gluon names
    # what only that GPU has.
    only: str = ""
    page: str = ""  # whose file says this, if it is another one: see of_page

    def __post_init__(self):
        object.__setattr__(self, "look", inspect.cleandoc(self.look))


@dataclass(frozen=True)
class Case:
    """Another way to call the wrappers: the kernels keep their limits there,
    on sm_90."""

    run: Callable
    sizes: dict[str, list[int]]
    limits: dict = field(default_factory=dict)  # others, of all its kernels
    # Others of one kernel: name -> limits.
    kernels: dict[str, dict] = field(default_factory=dict)
    # What is true at every size: name -> a function as Kernel.true is.
    true: dict[str, Callable] = field(default_factory=dict)


@dataclass(frozen=True)
class Kernels:
    """All kernels of a page.

    ``run(page, M, N, dtype)`` calls the wrappers of the loaded page on
    tensors of the meta device. It must launch each kernel that is for the GPU
    in question: what it launches is compiled instead. ``also``, called the
    same way, launches more that must compile for every GPU and has neither
    panel nor limits: solutions of exercises, tiles that are not full.
    """

    run: Callable
    M: int
    # The first on every GPU of the panel and with its code, more on sm_90
    # only. A panel names what a kernel was given as N.
    N: list[int]
    dtype: str
    kernels: dict[str, Kernel]
    # At which columns the limits hold on sm_90, by type.
    sizes: dict[str, list[int]] = field(default_factory=dict)
    cases: dict[str, Case] = field(default_factory=dict)
    also: Callable | None = None


def place(name):
    """The file of a page, as a message names it."""
    return file_of(name).relative_to(ROOT)


def kernels(name):
    """What a page declares, or None if it has no file."""
    return loaded(name).KERNELS if file_of(name).exists() else None


def of_page(name, *kernels_of_it, **changes):
    """Kernels in a cell that a page has from another one, as the file of
    that page describes them, but for some changes: {name: Kernel}."""
    there, changes = kernels(name).kernels, {"page": name, **changes}
    return {
        kernel: Kernel(**vars(there[kernel]) | changes)
        for kernel in kernels_of_it
    }
