"""A build after a change gives the same files as a clean one.

Three things are kept between builds, and each is made again when something
that it came from has changed:

- what a tutorial made when it ran, where Sphinx-Gallery looks at the script
  only: ``forget_outdated``;
- the documents that Sphinx has read: ``mechanism``, a setting on which all of
  them depend;
- the written site, in which a page shows the titles of others: ``Site``
  writes nothing, the pages that have changed, or all of them.
"""

import atexit
import gc
import hashlib
import os
import re
import shutil
import sys
from importlib.metadata import version
from pathlib import Path
from urllib.parse import quote

from sphinx.builders import html
from sphinx.errors import ExtensionError
from sphinx.util.osutil import copyfile

import gallery
import tutorial
from languages import BUILT, CURRENT, ENGLISH
from measurements import gpus, recording

PACKAGES = (
    *("torch", "triton", "numpy", "pandas", "matplotlib"),
    *("sphinx", "docutils", "pygments", "sphinx-gallery", "sphinx-design"),
    *("pydata-sphinx-theme", "sphinx-copybutton", "fonttools", "tinycss2"),
)
# Folders of docs that hold nothing that the site is made from.
GENERATED = {"_build", "locale", "tutorials"}
# Documents that leave so little garbage that to look for it takes longer than
# the memory is worth: a sixth of a small build.
FEW = 8


def digest(*parts):
    """A hash of files' contents, given their paths, and of anything else."""
    found = hashlib.sha256()
    for part in parts:
        is_file = isinstance(part, Path)
        text = part.read_bytes() if is_file else repr(part).encode()
        found.update(b"%d " % len(text) + text)
    return found.hexdigest()


def depend_on_mechanism(app, config):
    """Let everything depend on what makes it, and on which tutorials are."""
    modules = sorted(Path(__file__).parent.rglob("*.py"))
    versions = [version(name) for name in PACKAGES]
    made_by = (*modules, sys.version_info[:2], versions, gpus.there())
    # Sphinx-Gallery has not added its objects to its settings yet.
    config.executed_by = digest(*made_by, config.sphinx_gallery_conf)
    names = list(map(tutorial.name_of, tutorial.scripts()))
    words = Path(app.srcdir, "locale", CURRENT.code, "LC_MESSAGES/sphinx.po")
    words = [words] if words.exists() else []
    conf = Path(app.confdir, "conf.py")
    config.read_by = digest(*made_by, *words, conf, names, BUILT)


def forget_outdated(app):
    """Make tutorials run again whose page depends on what has changed."""
    folder = Path(app.srcdir) / "tutorials"
    forget_deleted(folder)
    mode, gpu = app.config.measured_figures, app.config.measured_gpu
    for script in tutorial.scripts():
        name = tutorial.name_of(script)
        if CURRENT is not ENGLISH:
            files = [folder / f"{name}.outputs"]
        elif gallery.measures_page(mode, name):
            files = [
                recording.path_of(gpus.folder(), name, recording.BY_BUILD)
            ]
        else:
            found = recording.gpus(name)
            files = [recording.path_of(each, name) for each in found]
        inputs = digest(*files, mode, gpu, app.config.executed_by)
        stamp = folder / f"{name}.inputs"
        if not stamp.exists() or stamp.read_text() != inputs:
            (folder / f"{name}.py.md5").unlink(missing_ok=True)
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
    for page in folder.rglob("[0-9][0-9]-*.rst"):
        name = page.relative_to(folder).with_suffix("").as_posix()
        if not tutorial.script_of(name).exists():
            for made in page.parent.glob(f"{page.stem}.*"):
                made.unlink()


class Site:
    """The written site: which pages of it are written again."""

    def __init__(self):
        self.read = False  # whether a document was read
        self.stamps = None  # of all that the site is made from

    def notice(self, app, env, added, changed, removed):
        self.read = bool(added or changed or removed)
        if len(added) + len(changed) > FEW:
            gc.enable()
        return []

    def outdated(self, app, env):
        """All pages, into an empty folder; else Sphinx writes what it read.

        All, if something has changed that any page may show: a template, a
        style sheet, a setting, a title, a heading, which pages there are.
        """
        if app.builder.name != "html":
            return []
        self.stamps = [shared(app, env), made(app)]
        stamp = self.file(app)
        kept = stamp.read_text().split() if stamp.exists() else []
        stamp.unlink(missing_ok=True)
        pages = map(app.builder.get_output_path, env.found_docs)
        same = kept[:1] == self.stamps[:1] and all(map(Path.exists, pages))
        if same and (self.read or kept == self.stamps):
            return []
        gc.enable()
        for path in Path(app.outdir).iterdir():
            if path.name == ".buildinfo":
                continue  # by which Sphinx knows its folder
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        return env.found_docs

    def written(self, app, exception):
        if self.stamps and not exception:
            self.file(app).write_text(" ".join(self.stamps))

    @staticmethod
    def file(app):
        return Path(app.doctreedir) / "site.stamp"


def shared(app, env):
    """What a page may show that is not its own."""
    source = Path(app.srcdir)
    files = sorted(
        path
        for entry in source.iterdir()
        if entry.name not in GENERATED
        for path in (entry, *entry.rglob("*"))
        if path.is_file() and path.suffix not in (".rst", ".pyc")
    )
    names = [path.relative_to(source).as_posix() for path in files]
    titles = {name: env.titles[name].astext() for name in env.found_docs}
    contents = {name: env.tocs[name].pformat() for name in env.found_docs}
    labels = env.domains.standard_domain.anonlabels
    shown = map(sorted, (titles.items(), contents.items(), labels.items()))
    return digest(*files, names, app.config.read_by, *map(list, shown))


def made(app):
    """What Sphinx-Gallery has made of the tutorials."""
    folder = Path(app.srcdir, "tutorials")
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return digest(*files)


def remove_unused(app, pages):
    """Pictures and downloads of pages as they were before."""
    text = "".join(pages.values())
    used = set(re.findall(r"_(?:images|downloads)/([^\"'\s?#,)]+)", text))
    for folder in app.outdir / "_images", app.outdir / "_downloads":
        for place, _, names in os.walk(folder):
            for path in (f"{place}/{name}" for name in names):
                if quote(path.removeprefix(f"{folder}/")) not in used:
                    os.unlink(path)


def copy_new(source, dest, **how):
    """Sphinx's copyfile, which would read all files of the site to compare
    them: a copy has the time of its file, to the nanosecond."""
    made = os.stat(source)
    if os.path.exists(dest):
        copied = os.stat(dest)
        if (made.st_size, made.st_mtime_ns) == (
            copied.st_size,
            copied.st_mtime_ns,
        ):
            return
    copyfile(source, dest, **how)


def setup(app):
    html.copyfile = copy_new
    gc.disable()  # until cells run, or many documents are read or written
    atexit.register(gc.freeze)  # Python would look at the end of all
    app.add_config_value("executed_by", "", "", [str])
    app.add_config_value("read_by", "", "env", [str])
    app.connect("config-inited", depend_on_mechanism, priority=5)
    # Sphinx-Gallery runs the tutorials at this event with priority 500.
    app.connect("builder-inited", forget_outdated, priority=5)
    site = Site()
    app.connect("env-get-outdated", site.notice)
    app.connect("env-updated", site.outdated)
    app.setup_extension("page.written")
    app.connect("pages-written", remove_unused)
    app.connect("build-finished", site.written)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
