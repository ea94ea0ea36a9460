"""Run scripts where only the tutorials' four packages can be imported.

Everything that is neither the standard library nor one of the packages, or
something that they need, is not found.

Each line of the input names a script; the answer is a line with its exit
status. A script runs in its folder, in a process of its own: a fork of this
one, where the imports that take long are done. What it says is in two files
beside the folder, which end in .out and .err.
"""

import importlib
import importlib.metadata as metadata
import os
import re
import runpy
import sys
from pathlib import Path

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


def serve():
    """Answer each line; a fork leaves here and runs its script."""
    # Not triton: a script says first whether it interprets.
    for name in ("torch", "pandas", "matplotlib.pyplot"):
        importlib.import_module(name)
    for line in sys.stdin:
        child = os.fork()
        if not child:
            return run(Path(line.rstrip("\n")))
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def run(script):
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, ending in ((1, ".out"), (2, ".err")):
        with script.parent.with_suffix(ending).open("w") as file:
            os.dup2(file.fileno(), number)
    os.chdir(script.parent)
    sys.argv = [script.name]
    sys.path[0] = ""
    runpy.run_path(script.name, run_name="__main__")


if __name__ == "__main__":
    install()
    serve()
