"""What may be done with a page, a script or the whole site."""

from sphinx.locale import _

LICENSE = "https://spdx.org/licenses/MIT.html"


def said(config):
    """In a line, which stands wherever a copy begins."""
    owner = {"copyright": config.copyright}
    return _("MIT license, copyright %(copyright)s") % owner
