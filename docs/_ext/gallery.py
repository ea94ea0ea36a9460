"""What Sphinx-Gallery calls while it builds the tutorials.

``begin`` runs before each tutorial: it puts recorded numbers (or, on a GPU,
live ones) under the benchmarks. ``reset`` takes everything back. ``scraper``
turns figures into reST. ``setup`` is the Sphinx extension: it checks all
recordings before anything runs, and makes Sphinx-Gallery run a tutorial again
when something that its page depends on has changed.
"""

import hashlib
import os
import sys
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path

from sphinx.errors import ExtensionError

import style
import tutorial
from measurements import recording, replay
from page import figures, solutions

MODES = ("auto", "recorded", "live", "preview")

_open = ExitStack()
_session = None
_config = None


def gpu_present():
    """Whether the machine has a GPU, without importing torch."""
    dev = Path("/dev")
    return any(dev.glob("nvidia[0-9]*")) or any(
        (dev / name).exists() for name in ("kfd", "dxg")
    )


def live():
    """Whether this build measures, rather than showing recordings."""
    if _config.measured_figures != "auto":
        return _config.measured_figures == "live"
    if not gpu_present():
        return False
    import torch

    return torch.cuda.is_available()


def reset(gallery_conf, fname, when):
    """Before and after a tutorial: restore what begin has changed."""
    global _session
    _open.close()
    _session = None


def begin(gallery_conf, script_vars):
    """Before a tutorial, whose arguments this is asked for: it has none.

    Sphinx-Gallery tells the whole path nowhere else, and names are not unique.
    """
    global _session
    import matplotlib.pyplot as plt

    plt.rcdefaults()
    plt.rcParams.update(style.rc_params())
    script = Path(script_vars["src_file"]).resolve()
    _session = session(tutorial.name_of(script))
    _open.enter_context(replay.replaced(replay.Runner(_session)))
    _open.enter_context(replay.watching(_session))
    _open.enter_context(solutions.hidden_in_notebooks())
    return []


def session(stem):
    """The numbers that a tutorial's benchmarks will be given."""
    made = replay.Session(stem, live())
    if made.live:
        return made
    try:
        made.recordings = recordings(stem)
    except recording.RecordingError as error:
        if _config.measured_figures != "preview":
            raise ExtensionError(str(error)) from None
        made.reason = str(error)
    made.default_gpu = next(iter(made.recordings), "")
    return made


def recordings(stem):
    """All recordings of a tutorial, that of the default GPU first."""
    default = _config.measured_gpu
    others = [gpu for gpu in recording.gpus(stem) if gpu != default]
    return {gpu: recording.load(gpu, stem) for gpu in (default, *others)}


def scraper(block, block_vars, gallery_conf):
    """Save the figures of a cell and give the reST that shows them."""
    return figures.scraped(_session, gallery_conf)


def check_recordings(app, config):
    """Stop before anything runs if a recording is missing or stale."""
    global _config
    _config = config
    if not gpu_present():
        # Before triton is imported: its language is interpreted or it is not.
        os.environ["TRITON_INTERPRET"] = "1"
    mode = config.measured_figures
    if mode not in MODES:
        raise ExtensionError(
            f"FIGURES={mode}: it must be one of {', '.join(MODES)}"
        )
    if mode == "preview" or live():
        return
    problems = []
    for path in recording.tutorials():
        try:
            recordings(tutorial.name_of(path))
        except recording.RecordingError as error:
            problems.append(str(error))
    if problems:
        raise ExtensionError("\n".join(problems))


def forget_outdated(app):
    """Make tutorials run again whose page depends on something that changed.

    Sphinx-Gallery looks at the script only. A page depends also on its
    recordings, on these modules, on torch and triton, and on the mode.
    """
    packages = ("torch", "triton", "matplotlib", "sphinx-gallery")
    common = hashlib.sha256()
    for part in (
        sys.version_info[:2],
        [version(name) for name in packages],
        app.config.measured_figures,
        app.config.measured_gpu,
        gpu_present(),
    ):
        common.update(repr(part).encode())
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        common.update(path.read_bytes())
    folder = Path(app.srcdir) / "tutorials"
    folder.mkdir(exist_ok=True)
    for script in tutorial.TUTORIALS.glob("*/[0-9][0-9]-*.py"):
        if not script.with_name("index.rst").exists():
            raise ExtensionError(
                f"tutorials/{script.parent.name} has no index.rst: a section "
                "needs a title, a sentence and a toctree"
            )
    for script in recording.tutorials():
        inputs = common.copy()
        name = tutorial.name_of(script)
        for gpu in recording.gpus(name):
            file = recording.STORE / gpu / f"{name}.json"
            inputs.update(file.read_bytes())
        stamp = folder / f"{name}.inputs"
        if not stamp.exists() or stamp.read_text() != inputs.hexdigest():
            (folder / f"{name}.py.md5").unlink(missing_ok=True)
            stamp.parent.mkdir(exist_ok=True)
            stamp.write_text(inputs.hexdigest())


def setup(app):
    figures_mode = os.environ.get("FIGURES", "auto")
    app.add_config_value("measured_figures", figures_mode, "env", [str])
    app.add_config_value("measured_gpu", "nvidia-h200", "env", [str])
    app.connect("config-inited", check_recordings)
    # Sphinx-Gallery builds the gallery at this event with priority 10.
    app.connect("builder-inited", forget_outdated, priority=5)
    return {"parallel_read_safe": False, "parallel_write_safe": True}
