"""What a page loads: one stylesheet, and no script that it does not call.

``docs/_templates/static/webpack-macros.html`` takes the place of the theme's
list of files. The stylesheet is what the theme and the extensions bring, one
after the other, without the rules of the icon font: two thirds of the theme's
are a letter of it each, and site.css draws the few icons that pages have.
"""

import hashlib
import re
from importlib.metadata import version
from pathlib import Path

from sphinx.errors import ExtensionError

# In the order in which pages would load them.
SHEETS = (
    "basic.css",
    "styles/pydata-sphinx-theme.css",
    "pygments.css",
    "copybutton.css",
    "sg_gallery.css",
    "sphinx-design.min.css",
    "site.css",
)
ONE = "all.css"
# Sphinx-Gallery's, of what no page has; search.js does what the last does.
NEEDLESS = (
    *("sg_gallery-binder.css", "sg_gallery-dataframe.css"),
    *("sg_gallery-rendered-html.css", "sg-tags.js", "sphinx_highlight.js"),
)
COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
GLYPH = re.compile(r"(?<=\})[^{}@]*\{--fa:[^{}]*\}")
FACE = re.compile(r"@font-face\s*\{[^}]*Font ?Awesome[^}]*\}")
# Without JavaScript nothing chooses a theme: the system's holds, by a second
# copy of the stylesheet in which its rules are those of a page without choice.
THEMES = "light", "dark"
NO_CHOICE = "[data-theme=auto]"
BY_PACKAGES = "pydata-sphinx-theme", "sphinx-gallery", "sphinx-design"


def choose(app, pagename, templatename, context, doctree):
    """Leave out what the one stylesheet has, and what is needless; let no
    script hold up the page."""
    gone = {f"_static/{name}" for name in (*SHEETS, *NEEDLESS)}
    for files in "css_files", "script_files":
        context[files] = [
            each for each in context[files] if each.filename not in gone
        ]
    for each in context["script_files"]:
        # What stands in the page itself changes these options at once.
        name = str(each.filename or "documentation_options.js")
        if not name.endswith("documentation_options.js"):
            each.attributes.setdefault("defer", "defer")
    context["stylesheet"] = f"_static/{ONE}"
    context["themes"] = {theme: f"_static/{theme}.css" for theme in THEMES}
    context["stylesheet_version"] = changes_with(app)


def changes_with(app):
    """What tells a browser that the stylesheet is another than it has."""
    own = Path(app.confdir, app.config.html_static_path[0], "site.css")
    made_by = " ".join(map(version, BY_PACKAGES)).encode()
    return hashlib.sha256(own.read_bytes() + made_by).hexdigest()[:8]


def join(app, exception):
    """Write the one stylesheet, when the theme has written its own."""
    if exception or app.builder.format != "html":
        return
    static = Path(app.outdir, "_static")
    text = "".join((static / name).read_text("utf-8") for name in SHEETS)
    text, glyphs = GLYPH.subn("", COMMENT.sub("", text))
    text, faces = FACE.subn("", text)
    if not glyphs or not faces:
        raise ExtensionError(
            "page/loaded_files.py: the theme's stylesheets have no icon font "
            f"in the form it takes out: {glyphs} letters, {faces} faces found"
        )
    (static / ONE).write_text(text, encoding="utf-8")
    for theme in THEMES:
        chosen = re.compile(rf'\[data-theme="?{theme}"?\]')
        copy = chosen.sub(NO_CHOICE, text)
        (static / f"{theme}.css").write_text(copy, encoding="utf-8")


def setup(app):
    # After others have added their files.
    app.connect("html-page-context", choose, priority=900)
    app.connect("build-finished", join, priority=900)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
