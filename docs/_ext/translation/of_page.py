"""What the mechanism says of one page alone, from that page's catalog."""

from languages import CURRENT, ENGLISH
from translation import catalogs


def said(app, docname, text):
    """A message of a page in the language of the site: a paragraph of a
    panel, or what a drawing shows. Its lines are joined, as in a catalog."""
    if CURRENT == ENGLISH:
        return text
    file = catalogs.path(CURRENT.code, docname)
    if file.exists():
        app.env.note_dependency(str(file))
    message = " ".join(text.split())
    found = catalogs.lookup(CURRENT.code, docname)(message)
    return text if found == message else found
