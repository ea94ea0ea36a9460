"""The addresses of all pages, for search engines.

Of every page that there is, not only of those that this build writes.
"""

from xml.sax.saxutils import escape

NAMESPACE = "http://www.sitemaps.org/schemas/sitemap/0.9"
NOT_FOUND = "404"


def write(app, exception):
    if exception or app.builder.format != "html":
        return
    pages = sorted(app.env.found_docs - {NOT_FOUND})
    lines = "".join(
        f"<url><loc>{address(app, p)}</loc></url>\n" for p in pages
    )
    (app.outdir / "sitemap.xml").write_text(
        f'<?xml version="1.0" encoding="utf-8"?>\n'
        f'<urlset xmlns="{NAMESPACE}">\n{lines}</urlset>\n',
        encoding="utf-8",
    )


def address(app, page):
    path = app.builder.get_target_uri(page)
    if path.rpartition("/")[2] == "index.html":
        path = path.removesuffix("index.html")
    return escape(app.config.html_baseurl + path)


def setup(app):
    app.connect("build-finished", write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
