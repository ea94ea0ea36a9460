"""Run a script where only the tutorials' four packages can be imported.

    python only_four.py SCRIPT [allowed package ...]

Everything that is neither the standard library nor one of the packages, or
something that they need, is refused at import.
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


class Refuse:
    """An importer that finds only what is allowed."""

    def __init__(self, packages):
        allowed = needed(packages)
        self.refused = {
            module
            for module, owners in metadata.packages_distributions().items()
            if not allowed
            & {re.sub(r"[-_.]+", "-", o).lower() for o in owners}
        }

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in self.refused:
            raise ModuleNotFoundError(
                f"No module named {name!r} (not one of the four packages)",
                name=name,
            )
        return None


def install(packages=()):
    sys.meta_path.insert(0, Refuse([*FOUR, *packages]))


if __name__ == "__main__":
    script, *more = sys.argv[1:]
    install(more)
    sys.argv = [script]
    sys.path[0] = ""
    runpy.run_path(script, run_name="__main__")
