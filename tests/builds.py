"""Sphinx, started where its imports are done: most of a small build's time.

A server imports them once, and each build is a fork of it: a process of its
own, in which nothing of the project has been imported.
"""

import multiprocessing
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

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
    log = root / "build.log"
    child = _context.Process(target=_build, args=(root, env, log))
    child.start()
    child.join()
    return subprocess.CompletedProcess(
        "sphinx", child.exitcode, log.read_text()
    )


def _build(root, env, log):
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(root)
    os.environ.clear()
    os.environ.update(env)
    # The project has its own copy of these, and conf.py knows where.
    sys.path = [path for path in sys.path if Path(path) != MECHANISM]
    for folder in filter(None, env.get("PYTHONPATH", "").split(os.pathsep)):
        if (start := Path(folder, "sitecustomize.py")).exists():
            runpy.run_path(str(start))  # as Python does where it starts
    own = {path.stem for path in MECHANISM.iterdir()}
    for name in [n for n in sys.modules if n.split(".")[0] in own]:
        del sys.modules[name]
    from sphinx.cmd.build import main

    doctrees, html = folders(env)
    shutil.rmtree(html, ignore_errors=True)  # as translation/build.py does
    how = "-E", "-n", "-W", "--keep-going", "-c", ".", "-d", str(doctrees)
    sys.exit(main([*how, "docs", str(html)]))


def folders(env):
    """Of a build in one of several languages, or of one in English alone: its
    doctrees, and its site."""
    if "SITE_LANGUAGES" not in env:
        return Path("doctrees"), Path("html")
    sys.path.insert(0, "docs/_ext")
    from languages import CURRENT
    from translation import catalogs

    catalogs.compile_all(CURRENT.code)
    made = Path("docs/_build")
    html = made / "html" / CURRENT.folder
    return made / "doctrees" / CURRENT.folder, html
