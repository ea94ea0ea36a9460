"""The written pages, read once for all that look at them.

``pages-written`` is an event with {path: text}, when a build has written
pages. Who listens may change the texts: afterwards they are written again.
"""


class Pages:
    """Whether a build writes pages, and what becomes of them."""

    def __init__(self):
        self.any = False

    def notice(self, app, pagename, templatename, context, doctree):
        self.any = True

    def show(self, app, exception):
        if exception or not self.any or app.builder.format != "html":
            return
        static = app.outdir / "_static"
        before = {
            path: path.read_text("utf-8")
            for path in sorted(app.outdir.rglob("*.html"))
            if not path.is_relative_to(static)
        }
        pages = dict(before)
        app.emit("pages-written", pages)
        for path, text in pages.items():
            if text != before[path]:
                path.write_text(text, encoding="utf-8")


def setup(app):
    pages = Pages()
    app.add_event("pages-written")
    app.connect("html-page-context", pages.notice)
    # After the theme has written its colors of code.
    app.connect("build-finished", pages.show, priority=900)
    # It is noticed where the pages are written.
    return {"parallel_read_safe": True, "parallel_write_safe": False}
