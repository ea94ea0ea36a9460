"""What Sphinx-Gallery calls while it builds the tutorials.

``reset`` runs before and after each tutorial: it puts recorded numbers under
the benchmarks and takes everything back at the end. ``scraper`` turns figures
into reST. ``setup`` is the Sphinx extension: before anything runs it measures
(on a GPU) and checks all recordings, and it makes Sphinx-Gallery run a
tutorial again when something that its page depends on has changed.
"""

import hashlib
import os
import sys
import time
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path

from sphinx.errors import ExtensionError

import style
from measurements import gpus, live, recording, replay
from measurements.progress import clock, say
from page import figures

MODES = ("auto", "recorded", "live", "preview")

_open = ExitStack()
_session = None
_config = None
_started = 0.0


def measures():
    """Whether this build measures, rather than showing recordings."""
    mode = _config.measured_figures
    return mode == "live" or (mode == "auto" and gpus.there())


def reset(gallery_conf, fname, when):
    """Before a tutorial: put the numbers in place. After it: restore."""
    global _session, _started
    _open.close()
    _session = None
    if when == "after" and measures():
        took = clock(time.monotonic() - _started)
        say(f"{Path(fname).stem}: its cells ran in {took}")
    if when == "after" or fname is None:
        return
    import matplotlib.pyplot as plt

    plt.rcdefaults()
    plt.rcParams.update(style.rc_params())
    _session = session(tutorial_of(fname))
    _open.enter_context(replay.replaced(replay.Runner(_session)))
    _open.enter_context(replay.watching(_session))
    _started = time.monotonic()


def tutorial_of(file):
    """The name of the tutorial in a file: Sphinx-Gallery gives no folder."""
    (script,) = (s for s in recording.tutorials() if s.name == Path(file).name)
    return recording.name_of(script)


def session(name):
    """The numbers that a tutorial's benchmarks will be given."""
    made = replay.Session(name, measures())
    try:
        made.recordings = recordings(name)
    except recording.RecordingError as error:
        if _config.measured_figures != "preview":
            raise ExtensionError(str(error)) from None
        made.reason = str(error)
    made.default_gpu = next(iter(made.recordings), "")
    return made


def recordings(name):
    """What was measured for a tutorial: {GPU: recording}.

    By this build, or else by all GPUs, the default one first.
    """
    if measures():
        gpu = gpus.folder()
        return {gpu: recording.load(gpu, name, live.STORE)}
    default = _config.measured_gpu
    others = [gpu for gpu in recording.gpus(name) if gpu != default]
    return {gpu: recording.load(gpu, name) for gpu in (default, *others)}


def scraper(block, block_vars, gallery_conf):
    """Save the figures of a cell and give the reST that shows them."""
    return figures.scraped(_session, block_vars, gallery_conf)


def check_recordings(app, config):
    """Measure, or stop before anything runs if a recording does not fit."""
    global _config
    _config = config
    mode = config.measured_figures
    # A reader's mistake needs a sentence, not the report that Sphinx makes of
    # an error: hence sys.exit.
    if mode not in MODES:
        sys.exit(f"FIGURES={mode}: it must be one of {', '.join(MODES)}")
    if mode == "preview":
        # Never measures: its tutorials run as on a machine without a GPU.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if not gpus.there():
        # Before triton is imported: its language is interpreted or it is not.
        os.environ["TRITON_INTERPRET"] = "1"
        if mode == "live":
            sys.exit(
                "FIGURES=live measures every figure, and torch finds no GPU "
                "here; without FIGURES the recorded figures are shown"
            )
    if mode == "preview":
        return
    problems = live.measure_what_is_stale() if measures() else []
    for path in recording.tutorials() if not problems else ():
        try:
            recordings(recording.name_of(path))
        except recording.RecordingError as error:
            problems.append(str(error))
    if problems:
        sys.exit("\n".join(problems))


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
        gpus.there(),
    ):
        common.update(repr(part).encode())
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        common.update(path.read_bytes())
    folder = Path(app.srcdir) / "tutorials"
    folder.mkdir(exist_ok=True)
    for script in recording.tutorials():
        inputs = common.copy()
        name = recording.name_of(script)
        if measures():
            files = [recording.path_of(gpus.folder(), name, live.STORE)]
        else:
            files = [
                recording.path_of(gpu, name) for gpu in recording.gpus(name)
            ]
        for file in files:
            inputs.update(file.read_bytes())
        stamp = folder / f"{script.stem}.inputs"
        if not stamp.exists() or stamp.read_text() != inputs.hexdigest():
            (folder / f"{script.name}.md5").unlink(missing_ok=True)
            stamp.write_text(inputs.hexdigest())


def setup(app):
    figures_mode = os.environ.get("FIGURES", "auto")
    app.add_config_value("measured_figures", figures_mode, "env", [str])
    app.add_config_value("measured_gpu", "nvidia-h200", "env", [str])
    app.connect("config-inited", check_recordings)
    # Sphinx-Gallery builds the gallery at this event with priority 10.
    app.connect("builder-inited", forget_outdated, priority=5)
    return {"parallel_read_safe": False, "parallel_write_safe": True}
