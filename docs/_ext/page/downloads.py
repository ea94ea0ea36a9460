"""The script that a reader downloads, and the links to it under the title.

A download is the script of the repository behind a head: where it comes from,
what it needs, and a line that says so if that is missing.
"""

import platform
from importlib.metadata import version
from pathlib import Path
from unittest import mock
from urllib.parse import urlsplit

from sphinx_gallery import gen_rst

import tutorial

PACKAGES = "torch", "triton", "matplotlib", "pandas"
CHECK = """
import importlib.util
import sys

needed = "torch triton matplotlib pandas"
for package in needed.split():
    if importlib.util.find_spec(package) is None:
        sys.exit(f"{package} is missing: pip install {needed}")
"""


def head(script, config):
    """What stands before a script in its download."""
    name = tutorial.name_of(script)
    address = f"{config.html_baseurl}tutorials/{name}.html"
    public = urlsplit(address).hostname != "localhost"
    versions = ", ".join(
        f"{each} {version(each).partition('+')[0]}" for each in PACKAGES
    )
    return "".join(
        (
            f"# {tutorial.title(name)}: a tutorial of {config.project}\n",
            f"# {address}\n" if public else "",
            f"# Needs: pip install {' '.join(PACKAGES)}\n",
            f"# Tried with: Python {platform.python_version()}, {versions}\n",
            f"# MIT license, copyright {config.copyright}\n",
            CHECK,
            "\n",
        )
    )


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
            script = tutorial.TUTORIALS / path.resolve().relative_to(
                tutorial.TUTORIALS
            )
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
    if doctree is None or not context["get_download_links"]():
        return
    links = app.builder.templates.render("downloads.html", context)
    title = "</h1>\n"
    context["body"] = context["body"].replace(title, title + links, 1)


def setup(app):
    heads = Heads()
    # Sphinx-Gallery runs the tutorials at this event with priority 500.
    app.connect("builder-inited", heads.start, priority=490)
    app.connect("builder-inited", heads.stop, priority=510)
    # Behind Sphinx-Gallery, which finds the links.
    app.connect("html-page-context", under_title, priority=600)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
