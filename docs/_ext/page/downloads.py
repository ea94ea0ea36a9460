"""The script that a reader downloads, and the links to it on the page.

A download is the script of the repository behind a head: where it comes from
and what it needs. A notebook says so in its first cell: see notebooks.py.
"""

import functools
import io
import platform
import re
import shutil
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path

from sphinx import addnodes
from sphinx.locale import _
from sphinx.transforms import SphinxTransform

import tutorial
from languages import CURRENT, ENGLISH
from page import gpu_needs, notebooks, rights
from translation import catalogs, messages, root
from words_later import N_

PACKAGES = "torch", "triton", "matplotlib", "pandas"
# What Sphinx-Gallery says of downloads: at the beginning, and at the end.
ITS_NOTE = re.compile(
    r"^\.\. only:: html\n\n    \.\. note::\n"
    r"        :class: sphx-glr-download-link-note\n\n(?: {8}.+\n)+\n",
    re.M,
)
ITS_FILES = re.compile(r"^\.\. _sphx_glr_download_.*", re.M | re.S)
# What a page offers: the ending of each file and what is said above it.
OFFERED = {
    "ipynb": N_("Download Jupyter notebook: %(file)s"),
    "py": N_("Download Python source code: %(file)s"),
}
# What a page offers to import: see module.py.
MODULES = {
    "layer-norm/11-every-width": "every_width.py",
    "attention/03-any-attention": "any_attention.py",
    "attention/07-programs-that-stay": "fast_attention.py",
    "model/01-gpt": "both_passes.py",
}
FOLDER = tutorial.BUILD / "downloads" / CURRENT.folder
# All of a kind in one file, offered above the cards of all tutorials.
OF_ALL = {"py": "tutorials_python.zip", "ipynb": "tutorials_jupyter.zip"}
A_DATE = 1980, 1, 1, 0, 0, 0  # in an archive, which shall not change


def address(name, config):
    """Of the page of a tutorial, or "" if nobody can reach it."""
    if not root.is_known(config.site_url):
        return ""
    return f"{config.html_baseurl}tutorials/{name}.html"


def origin(name, config):
    """Where a download comes from, what it needs, and its license."""
    said = (
        _("%(title)s: a tutorial of %(project)s")
        % {
            "title": catalogs.title(name),
            "project": config.project,
        },
        address(name, config),
        _("Needs: pip install %(packages)s")
        % {"packages": " ".join(PACKAGES)},
        _("Tried with: %(versions)s") % {"versions": versions()},
        rights.said(config),
    )
    return list(filter(None, said))


def head(said):
    """The same before a script."""
    return "".join(f"# {line}\n" for line in said) + "\n"


def module_head(name, config):
    """The same before a module of a page, which draws nothing."""
    said = head(origin(name, config))
    return said.replace(" ".join(PACKAGES), "torch triton")


def write(app, env, docnames):
    """Write the downloads of all tutorials in the language of this build."""
    if not docnames:
        return
    shutil.rmtree(FOLDER, ignore_errors=True)
    of_all = {ending: {} for ending in OF_ALL}
    for path in tutorial.scripts():
        name = tutorial.name_of(path)
        # In a notebook a line ends where a paragraph does.
        unwrapped = in_language(name, width=sys.maxsize)
        said = origin(name, app.config)
        module = tutorial.beside(name)
        files = {
            "py": head(said) + in_language(name),
            "ipynb": notebooks.of(
                *(unwrapped, said, address(name, app.config), PACKAGES),
                app.config.sphinx_gallery_conf,
                module,
            ),
        }
        for ending, text in files.items():
            put(f"{name}.{ending}", text.encode())
            of_all[ending][f"{name}.{ending}"] = text
        if module:
            inside = f"{Path(name).parent}/{module.name}"
            of_all["py"][inside] = module_head(name, app.config) + (
                module.read_text(encoding="utf-8")
            )
    for ending, texts in of_all.items():
        put(OF_ALL[ending], zipped(texts))


def in_language(name, **how):
    """The script of a tutorial, in the language of this build."""
    source = tutorial.source(name)
    if CURRENT is ENGLISH:
        return source
    words = catalogs.lookup(tutorial.page_of(name))
    return messages.translated(source, words, **how)


def put(name, content):
    """Write a file of the downloads."""
    file = FOLDER / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)


def zipped(texts):
    """An archive of texts by their names."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in texts.items():
            archive.writestr(zipfile.ZipInfo(name, A_DATE), text)
    return content.getvalue()


def offer(app, docname, source):
    """Let a page offer its files in our words."""
    if not (name := tutorial.of_page(docname)):
        return
    text = ITS_NOTE.sub("", source[0])
    # A comment, as before a cell: what is folded ends there.
    footer = ".. downloads\n\n.. container:: sphx-glr-footer\n"
    for ending, words in OFFERED.items():
        file = f"{name.rpartition('/')[2]}.{ending}"
        footer += (
            "\n  .. container:: sphx-glr-download\n\n"
            f"    :download:`{_(words) % {'file': file}} <{file}>`\n"
        )
    source[0] = ITS_FILES.sub(lambda found: footer, text)


class Lead(SphinxTransform):
    """Links to files of tutorials lead to those of this language."""

    default_priority = 22  # behind Sphinx's translation

    def apply(self, **kwargs):
        folder = FOLDER.relative_to(tutorial.ROOT / "docs").as_posix()
        for link in self.document.findall(addnodes.download_reference):
            name, _path = self.env.relfn2path(link["reftarget"])
            file = name.removeprefix("tutorials/")
            if file != name and (FOLDER / file).exists():
                link["reftarget"] = f"/{folder}/{file}"


@functools.cache
def versions():
    """Of Python and of all that a script needs."""
    found = [f"{each} {version(each).partition('+')[0]}" for each in PACKAGES]
    return ", ".join([f"Python {platform.python_version()}", *found])


def under_title(app, pagename, templatename, context, doctree):
    """Put the links to the downloads of a tutorial under its title."""
    name = tutorial.of_page(pagename)
    if doctree is None or not name:
        return
    context["downloads"] = {
        link["filename"].rpartition(".")[2]: f"_downloads/{link['filename']}"
        for link in doctree.findall(addnodes.download_reference)
        if link["reftarget"].rpartition(".")[0].endswith(f"/{name}")
    }
    context["packages"] = " ".join(PACKAGES)
    context["module"] = MODULES.get(name)
    context["gpu_needs"] = gpu_needs.said(app.srcdir, name)
    links = app.builder.templates.render("downloads.html", context)
    title = "</h1>\n"
    context["body"] = context["body"].replace(title, title + links, 1)


def setup(app):
    app.add_transform(Lead)
    app.connect("env-before-read-docs", write)
    app.connect("source-read", offer)
    app.connect("html-page-context", under_title, priority=600)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
