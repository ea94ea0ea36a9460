"""A picture is loaded when it comes near the window, into its own place.

Of the light and the dark form of a figure one is hidden, and what is hidden
and lazy is never loaded.
"""

from pathlib import Path

from docutils import nodes
from sphinx.util.images import get_image_size


def prepare(app, doctree, docname):
    for image in doctree.findall(nodes.image):
        size = get_image_size(Path(app.srcdir, image["uri"]))
        if size:
            image["width"], image["height"] = (str(round(x)) for x in size)
        image.setdefault("loading", "lazy")


def setup(app):
    app.connect("doctree-resolved", prepare)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
