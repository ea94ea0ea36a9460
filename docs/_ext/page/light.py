"""A page loads what it uses, and one stylesheet.

When pages are written, this takes out what none of the site's needs: rules of
stylesheets, scripts that nothing calls, and the elements around code that
looks like the text beside it. The name of a stylesheet is a hash of it, so no
browser shows an old one; pages that were written before get the new name.
"""

import hashlib
import json
import re
from itertools import groupby

from docutils import nodes
from sphinx_gallery import _doctree_links

from page import stylesheets

# The first draws icons of one's own, the second filters galleries by tags, and
# search.js does what the third does.
NEEDLESS = ("fontawesome.js", "sg-tags.js", "sphinx_highlight.js")
# How Pygments marks what site.css shows as plain text.
PLAIN_CLASSES = {"n", "o", "p", "w", "nb", "bp", "nn", "fm", "vm"}
PLAIN = re.compile(
    rf'<span class="(?:{"|".join(sorted(PLAIN_CLASSES))})">([^<]*)</span>'
)
STYLESHEET = re.compile(
    r'<link (?=[^>]*rel="stylesheet")[^>]*'
    r'href="([^"]*?_static/)((?!bundle)[^"?]+)[^>]*>\s*'
)
BUNDLE = re.compile(r"bundle-\w+\.css")
SCRIPT = re.compile(
    r'<script (?=[^>]*src="[^"]*?([^"?/]+)[?"])[^>]*></script>'
)


def lighten(app, pages):
    static, file = app.outdir / "_static", app.doctreedir / "bundles.json"
    kept = json.loads(file.read_text("utf-8")) if file.exists() else {}
    sheets = {}  # of each page
    for path, text in pages.items():
        if STYLESHEET.search(text):
            sheets[path], pages[path] = linked(text, static)
        elif name := BUNDLE.search(text):
            sheets[path] = kept["bundles"][name[0]]
    names = sorted({each for found in sheets.values() for each in found})
    known = stylesheets.words(static, pages.values())
    texts = {name: stylesheets.whole(static / name) for name in names}
    key = stylesheets.key(texts, known)
    if kept.get("key") != key:
        kept = {"key": key}
        kept["rules"] = {
            name: stylesheets.needed(name, text, known)
            for name, text in texts.items()
        }
    for path in static.glob("bundle-*.css"):
        path.unlink()
    kept["bundles"] = {}
    for path, found in sheets.items():
        name = bundle(static, "".join(kept["rules"][each] for each in found))
        kept["bundles"][name] = found
        pages[path] = BUNDLE.sub(name, pages[path], count=1)
    file.write_text(json.dumps(kept), encoding="utf-8")


def linked(text, static):
    """Stylesheets of a page, and the page with one in their place."""
    links = STYLESHEET.findall(text)
    one = f'<link rel="stylesheet" href="{links[0][0]}bundle-0.css" />\n'
    text = STYLESHEET.sub(one, text, count=1)
    text = STYLESHEET.sub("", text)
    text = SCRIPT.sub(lambda found: script(static, found), text)
    return [file for _, file in links], PLAIN.sub(r"\1", text)


def script(static, found):
    """A script that does not hold up the page, or none."""
    tag, name = found[0], found[1]
    if name in NEEDLESS:
        return ""
    if name == "documentation_options.js":  # the next one changes them
        return f"<script>{(static / name).read_text('utf-8')}</script>"
    if re.search(r"\b(defer|async)\b", tag):
        return tag
    return tag.replace("<script ", "<script defer ")


def bundle(static, text):
    name = f"bundle-{hashlib.sha256(text.encode()).hexdigest()[:10]}.css"
    (static / name).write_text(text, encoding="utf-8")
    return name


def joined(tokens):
    """Words of code, as nodes; those that look plain are one text.

    Two of three are plain: all that looks at the nodes of a page has less to
    look at.
    """
    for plain, some in groupby(tokens, is_plain):
        if plain:
            yield nodes.Text("".join(node.astext() for node in some))
        else:
            yield from some


def is_plain(node):
    return isinstance(node, nodes.Text) or (
        isinstance(node, nodes.inline)
        and not PLAIN_CLASSES.isdisjoint(node["classes"])
    )


def setup(app):
    # Sphinx-Gallery makes nodes of code, so that names in it are links.
    tokens = _doctree_links._tokenize_and_link
    _doctree_links._tokenize_and_link = lambda *given: joined(tokens(*given))
    app.setup_extension("page.written")
    # After what else looks into the written pages.
    app.connect("pages-written", lighten, priority=900)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
