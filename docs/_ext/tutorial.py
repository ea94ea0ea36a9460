"""The tutorials, and their definitions without the cells that run.

Everything else of the mechanism builds on this module, so it also says where
compiled kernels are kept: in the checkout.
"""

import ast
import functools
import hashlib
import importlib.util
import linecache
import os
import re
import sys
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "docs" / "_build"
# What is measured, compiled and hashed: in English.
TUTORIALS = ROOT / "tutorials"
# What must hold of each, what it says of kernels, what its numbers rest on.
FILES = ROOT / "tests" / "pages"
# What Sphinx-Gallery makes of it.
MADE = ROOT / "docs" / "tutorials"

# Not under docs/_build: make test empties that, and CI keeps this.
CACHE = ROOT / ".cache"
# Who has set these himself shares kernels between checkouts, and may: no path
# is left in what the pages show (see compiled/aot.py).
KERNELS = Path(os.environ.setdefault("TRITON_CACHE_DIR", f"{CACHE}/triton"))
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(CACHE / "inductor"))


def require_assertions():
    """End with a sentence where Python leaves assertions out: what tutorials
    and their checks assert would all be true."""
    if sys.flags.optimize:
        sys.exit(
            "PYTHONOPTIMIZE (or python -O) lets no assertion run, and those "
            "of the tutorials must: unset it."
        )


def scripts():
    """The tutorials in the order in which they are read."""
    return [
        script
        for folder in _folders()
        for script in sorted((TUTORIALS / folder).glob("[0-9][0-9]-*.py"))
    ]


def sections():
    """The folders of tutorials, in the order of tutorials/index.rst."""
    return [folder for folder in _folders() if folder]


def _folders():
    """The same with "", which stands for no folder."""
    text = (TUTORIALS / "index.rst").read_text(encoding="utf-8")
    entry = r"^ +(?:(\S+)/index|\[0-9\]\[0-9\]-\*)$"
    listed = re.findall(entry, text, re.MULTILINE)
    indexes = TUTORIALS.glob("*/index.rst")
    found = {"", *(index.parent.name for index in indexes)}
    # Sphinx tells of a folder that is not listed.
    return [f for f in listed if f in found] + sorted(found - set(listed))


def name_of(script):
    """What a tutorial is called everywhere: its path below tutorials/."""
    return Path(script).relative_to(TUTORIALS).with_suffix("").as_posix()


def script_of(name):
    """The script of a tutorial."""
    return TUTORIALS / f"{name}.py"


def page_of(name):
    """What Sphinx calls the page of a tutorial."""
    return f"tutorials/{name}"


def of_page(page):
    """The tutorial of a page that Sphinx calls so, or None."""
    name = page.removeprefix("tutorials/")
    return name if name != page and script_of(name).exists() else None


def file_of(name):
    """The file of a page, for example of ``layer-norm/01-layer-norm``."""
    return FILES / f"{name}.py"


@functools.cache
def loaded(name):
    """The module of that file; it may import what stands in tests/."""
    path = file_of(name)
    if (tests := str(FILES.parent)) not in sys.path:
        sys.path.append(tests)
    spec = importlib.util.spec_from_file_location(f"of {name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def file_name(name):
    """The name of a tutorial as a part of the name of a file."""
    return name.replace("/", "-")


def source(name):
    """Text of a tutorial, e.g. source("layer-norm/01-layer-norm")."""
    return script_of(name).read_text(encoding="utf-8")


def title(name):
    """The title of a page, in its first lines."""
    return _head(name)[0].partition("\n")[0]


def summary(name):
    """The first paragraph of a page below its title, as one line."""
    return " ".join(_head(name)[1].split())


def _head(name):
    """The paragraphs that a page begins with."""
    found = re.match(r'r?"""\n(.+?)"""', source(name), re.DOTALL)
    return found[1].split("\n\n")


def load(name, replace=(), interpret=True):
    """Module with the definitions of a tutorial.

    Definitions are imports, the switch `if ON_GPU:` of the first cell (or
    `if not ON_GPU:`), assignments to UPPERCASE names, functions and classes.
    Everything else at module level (the cells that run and print) is left
    out. Line numbers stay, so Triton and tracebacks find the source.

    replace is a sequence of pairs (old, new) that edit the source text
    first: that is how a test makes a mutant. Each old must occur once.

    interpret=False leaves out the switch, for compiling without a GPU. The
    file is then named without its folder, mutant or not, for the name stands
    in what Triton makes and keeps.
    """
    path = TUTORIALS / f"{name}.py"
    edited = bool(replace or not interpret)
    text = source(name)
    filename = str(path)
    module_name = "tutorial_" + re.sub(r"\W", "_", name)
    for old, new in replace:
        if text.count(old) != 1:
            raise ValueError(
                f"{name}: {old!r} occurs {text.count(old)} times, not once"
            )
        text = text.replace(old, new)
    if edited:
        # inspect, and so Triton, reads the edited source from the line cache.
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        module_name += f"_{digest}"
        filename = f"{filename}.{digest}.py"
        if not interpret:
            filename = f"tutorials/{name}.py"
        lines = text.splitlines(keepends=True)
        linecache.cache[filename] = (len(text), None, lines, filename)
    tree = ast.parse(text, filename)
    tree.body = [node for node in tree.body if _defines(node, interpret)]
    module = types.ModuleType(module_name)
    module.__file__ = filename
    sys.modules[module_name] = module
    if (folder := str(path.parent)) not in sys.path:
        sys.path.append(folder)  # a script may import what stands beside it
    exec(compile(tree, filename, "exec"), module.__dict__)
    return module


def beside(name):
    """The module that a tutorial imports from its folder, or None."""
    folder = script_of(name).parent
    for path in sorted(folder.glob("[a-z]*.py")):
        if re.search(rf"^import {path.stem}$", source(name), re.MULTILINE):
            return path
    return None


def _defines(node, interpret):
    if isinstance(node, ast.If):
        switch = "ON_GPU", "not ON_GPU"
        return interpret and ast.unparse(node.test) in switch
    if isinstance(node, ast.Assign):
        names = [
            part
            for target in node.targets
            for part in (
                target.elts if isinstance(target, ast.Tuple) else [target]
            )
        ]
        return all(
            isinstance(part, ast.Name) and part.id.isupper() for part in names
        )
    return isinstance(
        node,
        (
            ast.Import,
            ast.ImportFrom,
            ast.FunctionDef,
            ast.ClassDef,
        ),
    )
