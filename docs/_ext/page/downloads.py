"""The script that a reader downloads, and the links to it on the page.

A download is the script of the repository behind a head: where it comes from,
what it needs, and a line that says so if that is missing. A notebook has such
a head as its first cell.
"""

import functools
import platform
import re
from importlib.metadata import version
from pathlib import Path
from unittest import mock
from urllib.parse import urlsplit

from sphinx.locale import _
from sphinx_gallery import gen_rst

import tutorial
from said import N_
from translation import lines

PACKAGES = "torch", "triton", "matplotlib", "pandas"
CHECK = """
import importlib.util
import sys

needed = "%(packages)s"
for package in needed.split():
    if importlib.util.find_spec(package) is None:
        sys.exit(f"%(missing)s")
"""
# A notebook shows every figure that a cell leaves open: without a GPU, charts
# without a line, or an error if they have a logarithmic scale.
NO_EMPTY_CHARTS = """

# %(words)s
def close_empty_charts():
    if plt := sys.modules.get("matplotlib.pyplot"):
        for number in plt.get_fignums():
            axes = plt.figure(number).axes
            lines = [line.get_ydata() for ax in axes for line in ax.lines]
            if lines and all(y != y for line in lines for y in line):  # NaN
                plt.close(number)


if "get_ipython" in globals():
    after = get_ipython().events.callbacks["post_execute"]
    after.insert(0, close_empty_charts)
"""
# What Sphinx-Gallery says above the downloads at the end of a page.
ABOVE_FILES = (
    N_("Download Jupyter notebook: %(file)s"),
    N_("Download Python source code: %(file)s"),
    N_("Download zipped: %(file)s"),
)
# What it says at the beginning: that is where our own links are.
TO_THE_END = re.compile(
    r"^\.\. only:: html\n\n    \.\. note::\n"
    r"        :class: sphx-glr-download-link-note\n\n(?: {8}.+\n)+\n",
    re.M,
)


def check():
    """Code that says which package is missing."""
    missing = _("%(package)s is missing: pip install %(packages)s") % {
        "package": "{package}",
        "packages": "{needed}",
    }
    return CHECK % {"packages": " ".join(PACKAGES), "missing": missing}


def head(script, config):
    """What stands before a script in its download."""
    name = tutorial.name_of(script)
    address = f"{config.html_baseurl}tutorials/{name}.html"
    public = urlsplit(address).hostname != "localhost"
    said = (
        _("%(title)s: a tutorial of %(project)s")
        % {"title": tutorial.title(name), "project": config.project},
        address if public else "",
        _("Needs: pip install %(packages)s")
        % {"packages": " ".join(PACKAGES)},
        _("Tried with: %(versions)s") % {"versions": versions()},
        _("MIT license, copyright %(copyright)s")
        % {"copyright": config.copyright},
    )
    comments = "".join(f"# {line}\n" for line in said if line)
    return f"{comments}{check()}\n"


def begin_notebooks(app, config):
    """The first cell of each notebook."""
    words = _(
        "Needs torch, triton, matplotlib and pandas, and a GPU for the "
        "timings. In Colab: Runtime > Change runtime type > GPU."
    )
    comment = "\n".join(lines.wrapped(words, 70, "# ", "# "))
    settings = config.sphinx_gallery_conf
    empty = _("Where nothing was measured, no chart is drawn.")
    settings["first_notebook_cell"] = (
        f"{comment}\n{check()}{NO_EMPTY_CHARTS % {'words': empty}}"
    )


def in_our_words(app, docname, source):
    """What Sphinx-Gallery says of downloads, in the language of the page."""
    text = TO_THE_END.sub("", source[0])
    for words in ABOVE_FILES:
        pattern = re.escape(words % {"file": "FILE"}).replace("FILE", "(.+)")
        text = re.sub(
            f"(?<=:download:`){pattern}(?= <)",
            lambda found, words=words: _(words) % {"file": found[1]},
            text,
        )
    source[0] = text


@functools.cache
def versions():
    """Of Python and of all that a script needs."""
    found = [f"{each} {version(each).partition('+')[0]}" for each in PACKAGES]
    return ", ".join([f"Python {platform.python_version()}", *found])


class Heads:
    """Lets Sphinx-Gallery copy each script behind its head."""

    def __init__(self):
        self.restore = None

    def start(self, app):
        original = gen_rst._replace_md5

        def _replace_md5(fname_new, fname_old=None, **how):
            path = Path(fname_new)
            if path.suffix != ".py" or how.get("method") != "copy":
                return original(fname_new, fname_old, **how)
            script = path.resolve()
            text = head(script, app.config) + script.read_text("utf-8")
            copy = Path(fname_old)
            if copy.exists() and copy.read_text("utf-8") == text:
                return False
            copy.write_text(text, "utf-8")
            return True

        patch = mock.patch.object(gen_rst, "_replace_md5", _replace_md5)
        patch.start()
        self.restore = patch.stop

    def stop(self, app):
        self.restore()


def under_title(app, pagename, templatename, context, doctree):
    """Put the links to the downloads of a tutorial under its title."""
    if doctree is None:
        return
    found = context["get_download_links"]()  # takes a while, on a long page
    context["get_download_links"] = lambda: found
    if not found:
        return
    context["packages"] = " ".join(PACKAGES)
    links = app.builder.templates.render("downloads.html", context)
    title = "</h1>\n"
    context["body"] = context["body"].replace(title, title + links, 1)


def setup(app):
    heads = Heads()
    # Before the settings of Sphinx-Gallery are looked at.
    app.connect("config-inited", begin_notebooks, priority=4)
    app.connect("source-read", in_our_words)
    # Sphinx-Gallery runs the tutorials at this event with priority 500.
    app.connect("builder-inited", heads.start, priority=490)
    app.connect("builder-inited", heads.stop, priority=510)
    # Behind Sphinx-Gallery, which finds the links.
    app.connect("html-page-context", under_title, priority=600)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
