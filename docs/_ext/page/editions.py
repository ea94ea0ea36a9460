"""What a page says of its language and of the others that it is in.

A page is in all languages at the same place, below the folder of each.
"""

import re
from urllib.parse import urlsplit

from languages import BUILT, CURRENT, ENGLISH
from translation import pages


def describe(app, pagename, templatename, context, doctree):
    context["language"] = CURRENT.tag
    missing = [] if CURRENT is ENGLISH else pages.noted(app.env).get(pagename)
    context["untranslated"] = bool(missing)
    context["edition"] = CURRENT
    if len(BUILT) == 1:
        return
    site, path = app.config.site_url, app.builder.get_target_uri(pagename)
    above = "../" * (path.count("/") + 1)
    if pagename == app.config.notfound_pagename:
        # It is shown at any depth, and of no address is there another.
        above, path = urlsplit(site).path, "index.html"
    page = re.sub(r"(^|/)index\.html$", r"\1", path)
    context["editions"] = [
        {
            "name": each.name,
            "tag": each.tag,
            "folder": each.folder,
            "current": each is CURRENT,
            "link": f"{above}{each.folder}/{path}",
            "address": f"{site}{each.folder}/{page}",
        }
        for each in BUILT
    ]


def setup(app):
    app.add_config_value("site_url", "", "html", [str])
    app.connect("html-page-context", describe)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
