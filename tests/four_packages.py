"""Run a script where only the tutorials' four packages can be imported.

    python four_packages.py SCRIPT [allowed package ...]

Everything that is neither the standard library nor one of the packages, or
something that they need, is not found.
"""

import importlib.metadata as metadata
import re
import runpy
import sys

FOUR = ("torch", "triton", "matplotlib", "pandas")


def needed(packages):
    """The packages and what they need, by distribution name."""
    todo, found = list(packages), set()
    while todo:
        name = re.sub(r"[-_.]+", "-", todo.pop()).lower()
        if name in found:
            continue
        try:
            requires = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        found.add(name)
        todo += [
            re.match(r"[\w.-]+", line)[0]
            for line in requires
            if "extra ==" not in line
        ]
    return found


class Only:
    """A finder that does not find what is not allowed.

    It returns None rather than raise: torch asks find_spec whether some
    packages are there, and shall hear that they are not.
    """

    def __init__(self, finder, refused):
        self.finder, self.refused = finder, refused

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in self.refused:
            return None
        return self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)


def install(packages=()):
    allowed = needed([*FOUR, *packages])
    refused = {
        module
        for module, owners in metadata.packages_distributions().items()
        if not allowed & {re.sub(r"[-_.]+", "-", o).lower() for o in owners}
    }
    sys.meta_path[:] = [Only(finder, refused) for finder in sys.meta_path]


if __name__ == "__main__":
    script, *more = sys.argv[1:]
    install(more)
    sys.argv = [script]
    sys.path[0] = ""
    runpy.run_path(script, run_name="__main__")
