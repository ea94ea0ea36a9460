"""A build after a change gives the pages of a clean one.

Two things are kept between builds, and each is made again when something that
it came from has changed:

- what a tutorial made when it ran: Sphinx-Gallery looks at the script, and
  ``forget_outdated`` at all else;
- what Sphinx has read and written in a language: all of it is made anew when
  ``mechanism`` has changed, and when the build before did not come to its
  end; otherwise the pages are whose sources have changed.

Whether a build came to its end is asked in ended.py.
"""

import gc
import hashlib
import os
import shutil
import sys
from pathlib import Path

import ended
from sphinx.errors import ExtensionError

import gallery
import tutorial
from languages import BUILT, CURRENT, ENGLISH
from measurements import gpus, recording

# What any page may show, beside its own sources.
FOLDERS = "_extra", "_fonts", "_static", "_templates", "inventories"
SETTINGS = "FIGURES", "GITHUB_REPOSITORY", "SITE_URL"
LAST = 10_000  # of those who listen to an event
# Documents leave little garbage: to look for it as often as Python does takes
# longer than the memory is worth.
GARBAGE = 50_000, 20, 100


def digest(*parts):
    """A hash of files' contents, given their paths, and of anything else."""
    found = hashlib.sha256()
    for part in parts:
        is_file = isinstance(part, Path) and part.is_file()
        text = part.read_bytes() if is_file else repr(part).encode()
        found.update(b"%d " % len(text) + text)
    return found.hexdigest()


def begin(app, config):
    """Forget all if it was made in another way, or never to its end."""
    modules = sorted(Path(__file__).parent.rglob("*.py"))
    # The names of these folders have the versions.
    installed = (Path(folder).glob("*.dist-info") for folder in sys.path)
    packages = sorted(path.name for each in installed for path in each)
    made_by = (*modules, sys.version_info[:2], packages, gpus.there())
    # Sphinx-Gallery has not added its objects to its settings yet.
    config.executed_by = digest(*made_by, config.sphinx_gallery_conf)
    config.mechanism = mechanism(app, made_by)
    folder = Path(app.doctreedir)
    if ended.known(folder) == config.mechanism:
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if (app.outdir / ".buildinfo").exists():  # else this is no site of ours
        for path in app.outdir.iterdir():
            remove(path)


def mechanism(app, made_by):
    """A hash of what all pages depend on, and of which pages are."""
    source = Path(app.srcdir)
    files = [Path(app.confdir, "conf.py")]
    for folder in FOLDERS:
        files += sorted(p for p in (source / folder).rglob("*") if p.is_file())
    words = source / f"locale/{CURRENT.code}/LC_MESSAGES/sphinx.po"
    pages = sorted(path.name for path in source.glob("*.rst"))
    names = list(map(tutorial.name_of, tutorial.scripts()))
    settings = [os.environ.get(name) for name in SETTINGS]
    places = [path.relative_to(app.confdir).as_posix() for path in files]
    return digest(*made_by, *files, words, places, pages, names, settings,
                  BUILT)  # fmt: skip


def remove(path):
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def forget_outdated(app):
    """Make tutorials run again whose page depends on what has changed, or
    that did not come to their end."""
    if CURRENT is not ENGLISH:
        return
    forget_deleted(tutorial.MADE)
    mode, gpu = app.config.measured_figures, app.config.measured_gpu
    for script in tutorial.scripts():
        name = tutorial.name_of(script)
        if gallery.measures_page(mode, name):
            files = [
                recording.path_of(gpus.folder(), name, recording.BY_BUILD)
            ]
        else:
            found = recording.gpus(name)
            files = [recording.path_of(each, name) for each in found]
        inputs = digest(*files, mode, gpu, app.config.executed_by)
        stamp = tutorial.MADE / f"{name}.inputs"
        same = stamp.exists() and stamp.read_text() == inputs
        if not same or gallery.mark(name).exists():
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


def outdated(app, env, added, changed, removed):
    """Pages whose sources have changed, whatever the times of files say."""
    ended.forget(Path(app.doctreedir))
    known = getattr(env, "contents", {})
    return [
        name
        for name in env.found_docs
        if known.get(name) != contents(app, env, name)
    ]


def contents(app, env, name):
    """A hash of all that a page is made from."""
    words = app.srcdir / f"locale/{CURRENT.code}/LC_MESSAGES/{name}.po"
    others = sorted(map(str, env.dependencies.get(name, ())))
    files = [Path(app.srcdir, each) for each in others]
    return digest(Path(env.doc2path(name)), words, *files)


def read(app, env):
    """What is written: all pages if a title, heading, label or term has
    changed, for others show it; else those that have been read."""
    env.contents = {name: contents(app, env, name) for name in env.found_docs}
    titles = {name: env.titles[name].astext() for name in env.found_docs}
    tocs = {name: env.tocs[name].pformat() for name in env.found_docs}
    labels = env.domains.standard_domain.anonlabels
    terms = env.domains.standard_domain.objects
    each = titles, tocs, labels, terms
    shown = digest(*(sorted(places.items()) for places in each))
    before, env.shown = getattr(env, "shown", None), shown
    return [] if before == shown else env.found_docs


def tell(app, env):
    """Let the build go on with other languages: all is there for them."""
    if pipe := os.environ.get("PAGES_READ"):
        os.write(int(pipe), b".")


def end(app, exception):
    if exception is None and app.builder.name == "html":
        ended.ready(Path(app.doctreedir), app.config.mechanism)


def setup(app):
    gc.set_threshold(*GARBAGE)
    app.add_config_value("executed_by", "", "", [str])
    app.add_config_value("mechanism", "", "", [str])
    app.connect("config-inited", begin, priority=5)
    # Sphinx-Gallery runs the tutorials at this event with priority 500.
    app.connect("builder-inited", forget_outdated, priority=5)
    app.connect("env-get-outdated", outdated)
    app.connect("env-updated", read)
    app.connect("env-updated", tell, priority=LAST)
    app.connect("build-finished", end, priority=LAST)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
