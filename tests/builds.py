"""Sphinx, started where its imports are done: most of a small build's time.

A server imports them once, and each build is a fork of it: a process of its
own, in which nothing of the project has been imported.
"""

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

ARGUMENTS = (
    *("-n", "-W", "--keep-going", "-c", ".", "-d", "doctrees"),
    *("docs", "html"),
)
# Not triton: whether it interprets is decided by the build.
IMPORTS = [
    *("torch", "pandas", "matplotlib.pyplot"),
    *("sphinx.application", "sphinx.cmd.build", "sphinx.builders.html"),
    *("sphinx_gallery.gen_gallery", "sphinx_design", "pydata_sphinx_theme"),
]

MECHANISM = Path(__file__).resolve().parents[1] / "docs" / "_ext"

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(IMPORTS)


def build(root, env):
    """Build a project; the finished process, its output in one text."""
    if env.get("PYTHONPATH") != os.environ.get("PYTHONPATH"):
        # It may bring modules that stand in for others: start from nothing.
        return subprocess.run(
            [sys.executable, "-m", "sphinx", *ARGUMENTS],
            cwd=root,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    log = root / "build.log"
    child = _context.Process(target=_forked, args=(root, env, log))
    child.start()
    child.join()
    return subprocess.CompletedProcess(
        ARGUMENTS, child.exitcode, log.read_text()
    )


def _forked(root, env, log):
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(root)
    os.environ.clear()
    os.environ.update(env)
    # The project has its own copy of these, and conf.py knows where.
    sys.path = [path for path in sys.path if Path(path) != MECHANISM]
    own = {path.stem for path in MECHANISM.iterdir()}
    for name in [n for n in sys.modules if n.split(".")[0] in own]:
        del sys.modules[name]
    from sphinx.cmd.build import main

    sys.exit(main(ARGUMENTS))
