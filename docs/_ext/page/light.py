"""A page loads what it uses, and one stylesheet.

When all pages are written, this takes out what none of them needs: rules of
stylesheets, scripts that nothing calls, and the elements around code that
looks like the text beside it. The name of a stylesheet is a hash of it, so no
browser shows an old one.
"""

import hashlib
import re

from page import stylesheets

# The first draws icons of one's own, the second filters galleries by tags.
NEEDLESS = ("fontawesome.js", "sg-tags.js")
# How Pygments marks what site.css shows as plain text.
PLAIN = re.compile(r'<span class="(?:n|o|p|w|nb|bp|nn|fm|vm)">([^<]*)</span>')
STYLESHEET = re.compile(
    r'<link (?=[^>]*rel="stylesheet")[^>]*'
    r'href="([^"]*?_static/)((?!bundle)[^"?]+)[^>]*>\s*'
)
SCRIPT = re.compile(
    r'<script (?=[^>]*src="[^"]*?([^"?/]+)[?"])[^>]*></script>'
)


def lighten(app, exception):
    if exception or app.builder.format != "html":
        return
    static = app.outdir / "_static"
    texts = {
        path: text
        for path in app.outdir.rglob("*.html")
        if not path.is_relative_to(static)
        and STYLESHEET.search(text := path.read_text("utf-8"))
    }
    if not texts:
        return  # no page was written
    known = stylesheets.words(static, texts.values())
    files = {file for t in texts.values() for _, file in STYLESHEET.findall(t)}
    sheets = {file: stylesheets.needed(static / file, known) for file in files}
    for path, text in texts.items():
        path.write_text(lightened(text, static, sheets), encoding="utf-8")


def lightened(text, static, sheets):
    """A page that loads one stylesheet, and scripts that wait for it."""
    links = STYLESHEET.findall(text)
    name = bundle(static, "".join(sheets[file] for _, file in links))
    one = f'<link rel="stylesheet" href="{links[0][0]}{name}" />\n'
    text = STYLESHEET.sub(one, text, count=1)
    text = STYLESHEET.sub("", text)
    text = SCRIPT.sub(lambda found: script(static, found), text)
    return PLAIN.sub(r"\1", text)


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


def setup(app):
    # After what else looks into the written pages.
    app.connect("build-finished", lighten, priority=900)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
