"""What Sphinx-Gallery calls while it builds the tutorials.

``begin`` runs before each tutorial: it puts recorded numbers under the
benchmarks. ``scraper`` turns figures into reST. ``reset`` takes everything
back. ``setup`` is the Sphinx extension: before anything runs it measures (on
a GPU) and checks all recordings.

What a tutorial made when it ran is kept between builds, for that takes long.
Sphinx-Gallery looks whether the script has changed, and ``forget_outdated`` at
all else that its page depends on.

What they share is kept where Sphinx-Gallery hands it to them, and nowhere
else: the mode in its settings, and a tutorial's session in its variables.
"""

import hashlib
import os
import shutil
import sys
import time
import warnings
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

from sphinx.errors import ExtensionError

import style
import tutorial
from languages import CURRENT, ENGLISH
from measurements import gpus, record, recording, replay
from measurements.progress import clock, say
from page import figures

MODES = ("auto", "recorded", "preview")


def measures(mode):
    """Whether this build measures, rather than showing recordings."""
    return mode == "auto" and gpus.there()


def measures_page(mode, name):
    """The same for one page: some need more GPUs than there are."""
    return measures(mode) and not gpus.lacking(tutorial.script_of(name))


def begin(gallery_conf, script_vars):
    """Before a tutorial, whose arguments this is asked for: it has none.

    Sphinx-Gallery tells the path nowhere else, and names are not unique.
    """
    name = tutorial.name_of(Path(script_vars["src_file"]).resolve())
    mark(name).touch()
    with ExitStack() as changes:
        session = open_session(name, **gallery_conf["measured"])
        script_vars["session"] = session
        changes.enter_context(replay.replaced(replay.Runner(session)))
        changes.enter_context(replay.watching(session))
        style.begin()
        changes.enter_context(
            mock.patch.object(warnings, "formatwarning", in_a_line)
        )
        # The interpreter warns of numbers that overflow as they are meant to.
        changes.enter_context(warnings.catch_warnings())
        warnings.filterwarnings(
            "ignore", module=r"triton\.runtime\.interpreter"
        )
        # PyTorch's export warns of PyTorch, from Python's own copyreg.
        warnings.filterwarnings(
            "ignore", category=FutureWarning, module="copyreg"
        )
        # plt.show() says that it shows nothing: figures are scraped.
        warnings.filterwarnings("ignore", message=".* is non-interactive")
        changes.callback(finish, name, script_vars, time.monotonic())
        gallery_conf["restore"] = changes.pop_all().close
    return []


def in_a_line(message, category, *where, **more):
    """A warning, without where this machine keeps what warns."""
    return f"{category.__name__}: {message}\n"


def reset(gallery_conf, fname, when):
    """After a tutorial, also after one that failed: restore everything."""
    restore = gallery_conf.pop("restore", None)
    if restore:
        restore()


def require_all_ran(session):
    """A recording holds nothing that its page does not have."""
    try:
        replay.require_all(session)
    except recording.RecordingError as error:
        raise ExtensionError(str(error)) from None


def finish(name, script_vars, started):
    """Say what was done; what a tutorial that failed has made is not kept."""
    if script_vars.get("passing"):
        require_all_ran(script_vars["session"])
        mark(name).unlink()
    spent = clock(time.monotonic() - started)
    say(f"{name}: its cells ran in {spent}")


def mark(name):
    """A file that is there while a tutorial runs, or if it did not end."""
    return tutorial.MADE / f"{name}.running"


def open_session(name, mode, gpu):
    """The numbers that a tutorial's benchmarks will be given."""
    session = replay.Session(name, measures_page(mode, name))
    try:
        session.recordings = recordings(name, mode, gpu)
    except recording.RecordingError as error:
        if mode != "preview":
            raise ExtensionError(str(error)) from None
        session.reason = str(error)
    session.default_gpu = next(iter(session.recordings), "")
    return session


def recordings(name, mode, gpu):
    """What was measured for a tutorial: {GPU: recording}.

    By this build, or else by all GPUs that have a recording of it, the
    default one first. If none has, the default one's is missing.
    """
    if measures_page(mode, name):
        mine = gpus.folder()
        return {mine: recording.load(mine, name, recording.BY_BUILD)}
    recorded = recording.gpus(name, gpu) or [gpu]
    return {each: recording.load(each, name) for each in recorded}


def scraper(block, block_vars, gallery_conf):
    """Save the figures of a cell and give the reST that shows them."""
    return figures.scraped(block_vars["session"], gallery_conf)


def hide_gpus(app, config):
    """A preview never measures: its tutorials run as without a GPU.

    CUDA looks at this once, when something first asks for GPUs.
    """
    if config.measured_figures == "preview":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def check_recordings(app, config):
    """Measure, or stop if a recording does not fit: before anything runs."""
    tutorial.require_assertions()
    mode, gpu = config.measured_figures, config.measured_gpu
    # A reader's mistake needs a sentence, not the report that Sphinx makes of
    # an error: hence sys.exit.
    if mode not in MODES:
        sys.exit(f"FIGURES={mode}: it must be one of {', '.join(MODES)}")
    if not gpus.there():
        # Before triton is imported: its language is interpreted or it is not.
        os.environ["TRITON_INTERPRET"] = "1"
    if mode == "preview" or CURRENT is not ENGLISH:
        return
    if os.environ.get("CUDA_VISIBLE_DEVICES") and not gpus.there():
        say(f"{gpus.none()}: the recorded figures are shown")
    problems = record.for_a_build() if measures(mode) else unknown(gpu)
    for path in tutorial.scripts() if not problems else ():
        try:
            recordings(tutorial.name_of(path), mode, gpu)
        except recording.RecordingError as error:
            problems.append(str(error))
    if problems:
        sys.exit("\n".join(problems))


def unknown(gpu):
    """That nothing was recorded on the GPU that pages show first, if others
    have recordings: then its name is wrong."""
    known = sorted(folder.name for folder in recording.STORE.glob("*/"))
    if gpu in known or not known:
        return []
    return [
        f"conf.py: measured_gpu: found {gpu!r}, expected a folder of "
        f"docs/measurements: {', '.join(known)}"
    ]


def hand_over(app, config):
    """Where begin finds it; Sphinx-Gallery has checked its settings."""
    mode, gpu = config.measured_figures, config.measured_gpu
    config.sphinx_gallery_conf["measured"] = {"mode": mode, "gpu": gpu}


def digest(*parts):
    """A hash of files' contents, given their paths, and of anything else."""
    found = hashlib.sha256()
    for part in parts:
        is_file = isinstance(part, Path) and part.is_file()
        text = part.read_bytes() if is_file else repr(part).encode()
        found.update(b"%d " % len(text) + text)
    return found.hexdigest()


def note_what_executes(app, config):
    """A hash of what all tutorials are executed by."""
    modules = sorted(Path(__file__).parent.rglob("*.py"))
    # The names of these folders have the versions.
    installed = (Path(folder).glob("*.dist-info") for folder in sys.path)
    packages = sorted(path.name for each in installed for path in each)
    # Sphinx-Gallery has not added its objects to its settings yet.
    config.executed_by = digest(
        *(*modules, sys.version_info[:2], packages, gpus.there()),
        config.sphinx_gallery_conf,
    )


def forget_outdated(app):
    """Make tutorials run again whose page depends on what has changed, or
    that did not come to their end."""
    if CURRENT is not ENGLISH:
        return
    forget_deleted(tutorial.MADE)
    mode, gpu = app.config.measured_figures, app.config.measured_gpu
    for script in tutorial.scripts():
        name = tutorial.name_of(script)
        if measures_page(mode, name):
            files = [
                recording.path_of(gpus.folder(), name, recording.BY_BUILD)
            ]
        else:
            found = recording.gpus(name)
            files = [recording.path_of(each, name) for each in found]
        files.append(tutorial.beside(name))  # what the script imports
        inputs = digest(*files, mode, gpu, app.config.executed_by)
        stamp = tutorial.MADE / f"{name}.inputs"
        same = stamp.exists() and stamp.read_text() == inputs
        if not same or mark(name).exists():
            (tutorial.MADE / f"{name}.py.md5").unlink(missing_ok=True)
            stamp.parent.mkdir(parents=True, exist_ok=True)
            stamp.write_text(inputs)


def forget_deleted(folder):
    """Remove what was made of tutorials and sections that are gone."""
    sections = tutorial.sections()
    for script in tutorial.TUTORIALS.glob("*/[0-9][0-9]-*.py"):
        if script.parent.name not in sections:
            raise ExtensionError(
                f"tutorials/{script.parent.name} has no index.rst: a section "
                "needs a title, a sentence and a toctree"
            )
    for index in folder.glob("*/index.rst"):
        if index.parent.name not in sections:
            shutil.rmtree(index.parent)
    for ending in ("rst", "running"):
        for page in folder.rglob(f"[0-9][0-9]-*.{ending}"):
            name = page.relative_to(folder).with_suffix("").as_posix()
            if not tutorial.script_of(name).exists():
                for made in page.parent.glob(f"{page.stem}.*"):
                    made.unlink()


def setup(app):
    figures_mode = os.environ.get("FIGURES", "auto")
    app.add_config_value("measured_figures", figures_mode, "env", [str])
    app.add_config_value("measured_gpu", "nvidia-h200", "env", [str])
    app.connect("config-inited", hide_gpus, priority=1)
    app.connect("config-inited", check_recordings, priority=2)
    app.add_config_value("executed_by", "", "", [str])
    app.connect("config-inited", note_what_executes, priority=5)
    app.connect("config-inited", hand_over)
    # Sphinx-Gallery runs the tutorials at this event with priority 10.
    app.connect("builder-inited", forget_outdated, priority=5)
    return {"parallel_read_safe": False, "parallel_write_safe": True}
