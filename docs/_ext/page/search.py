"""Search: Pagefind's index of the built pages, section by section.

What a reader looks for is a section, so each is a document of its own:
Pagefind ranks pages, and shows the sections of a page in their order. What
surrounds the tutorials' own words is left out. Where a section spells a word
in one way, readers may ask for the others that ``conf.py`` names, as it does
the pages that are written for authors, which search.js shows last. A formula
is indexed in words, and so is each term of the glossary by itself.

Chinese and Japanese have no spaces, and programs that look for their words
differ: what cuts a page and what cuts a question found different ones. So
every character is a word here, and a run of katakana is, which is read as one.
search.js cuts a question in the same way, and puts together what it shows.
Their sections are also found by the English titles.
"""

import html
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path

from sphinx.errors import ExtensionError

from languages import CURRENT, ENGLISH

# What stands on a page and is no answer.
LEFT_OUT = [
    *(".bp-xray", ".bp-scaffold", ".bp-drawing", ".bp-numbers", ".passport"),
    *(".bp-cards", ".bp-speeds", ".bp-downloads", ".bp-stages"),
    *(".bp-place", ".bp-way ol", ".bp-way-time"),
    *(".sphx-glr-script-out", ".sphx-glr-footer", ".sphx-glr-signature"),
    *(".headerlink", ".eqno", "svg"),
]
ARTICLE = re.compile(
    r'<article class="bd-article".*?'
    r'(?=</article>|<div class="sphx-glr-footer)',
    re.DOTALL,
)
# Of the first picture Pagefind would index the words.
PICTURE = re.compile(r"<img[^>]*>")
# A section, or a term of the glossary.
SECTION = re.compile(r'<(?:section\b[^>]*\bid="|dt id="(?=term-))([^"]*)">')
TITLE = re.compile(r'(.*?)<a class="headerlink".*?</(?:h\d|dt)>', re.DOTALL)
PROSE = re.compile(r"<p>(.*?)</p>", re.DOTALL)
# A word of prose counts as one; in a title Pagefind counts it more often.
CODE = '<pre data-pagefind-weight="0.3">'
MATH = re.compile(r"<math.*?</math>", re.DOTALL)
# A word of Chinese or Japanese, or a sign: search.js has the same.
WIDE = re.compile("[\u30a1-\u30fa\u30fc]+|[\u3000-\u9fff\uff01-\uff65]")
# How the parts of a formula are told in a line.
IN_A_LINE = {
    "mfrac": "{} / {}",
    "mover": "{}{}",
    "msub": "{}_{}",
    "msubsup": "{}_{}^{}",
    "msup": "{}^{}",
    "munder": "{}_{}",
    "munderover": "{}_{}^{}",
}


def start(app):
    app.builder.search = False  # Sphinx's own


def write(app, exception):
    if exception or app.builder.name != "html":
        return
    for name in ("searchtools.js", "sphinx_highlight.js"):
        Path(app.outdir, "_static", name).unlink(missing_ok=True)
    shutil.rmtree(app.outdir / "pagefind", ignore_errors=True)
    index(app)


def index(app):
    """Let Pagefind read a folder of files: ``page/anchor.html`` for a
    section, which search.js turns into an address, and ``page/index.html``
    for its top."""
    with tempfile.TemporaryDirectory() as site:
        for page in app.env.found_docs - {"404"}:
            text = Path(app.builder.get_output_path(page)).read_text("utf-8")
            Path(site, page).mkdir(parents=True, exist_ok=True)
            aside = page in app.config.search_aside
            spellings = app.config.search_spellings
            for anchor, content in sections(text, spellings, aside):
                file = Path(site, page, f"{anchor}.html")
                file.write_text(content, encoding="utf-8")
        command = [sys.executable, "-m", "pagefind", "--quiet", "--site", site]
        command += ["--output-path", str(app.outdir / "pagefind")]
        for selector in LEFT_OUT:
            command += ["--exclude-selectors", selector]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ExtensionError(f"pagefind: {done.stderr}")


def sections(page, spellings, aside=False):
    """The sections of a page: the anchor of each, and its own document."""
    article = PICTURE.sub("", ARTICLE.search(page)[0])
    article = MATH.sub(in_words, article)
    _, *parts = SECTION.split(article)
    top = None
    for anchor, content in zip(parts[::2], parts[1::2], strict=True):
        heading = TITLE.match(content)
        title, content = plain(heading[1]), content[heading.end() :]
        # An anchor has the words of the English title, in all languages.
        english = anchor.removeprefix("term-").replace("-", " ")
        english = english * (CURRENT is not ENGLISH)
        if top is None:
            top, anchor = title, "index"
        elif re.search('class="bp-(cards|path)', content):
            continue  # which lead to others
        page = "" if title is top else top
        yield anchor, document(title, english, page, content, spellings, aside)


def in_words(formula):
    """A formula in a line of text, which may be a part of a sentence."""
    words = words_of(ET.fromstring(formula[0]))
    words = words.replace("ˆ", "\N{COMBINING CIRCUMFLEX ACCENT}")
    return html.escape(words, quote=False)


def words_of(element):
    parts = [words_of(child) for child in element]
    if element.tag in IN_A_LINE:
        return IN_A_LINE[element.tag].format(*parts)
    parts = [part for part in (element.text or "", *parts) if part.strip()]
    text = " ".join(parts)
    return f"√({text})" if element.tag == "msqrt" else text


def document(title, english, page, content, spellings, aside):
    text = plain(" ".join([title, english, *PROSE.findall(content)]))
    titles = [english] * bool(english)
    titles += [other for other, _ in others(f"{title} {english}", spellings)]
    meta = {
        "title": title,
        "titled": "; ".join(titles),
        "also": "; ".join(map(" = ".join, others(text, spellings))),
        "page": page,
        "aside": "yes" if aside else "",
    }
    head = "".join(
        f'<meta data-pagefind-meta="{key}[content]" '
        f'content="{html.escape(apart(value))}">'
        for key, value in meta.items()
        if value
    )
    # Of a document in English, Pagefind takes what spaces part.
    return (
        f'<html lang="en"><head>{head}</head>'
        f"<body><h1>{html.escape(apart(title))}</h1>"
        f"{apart(content).replace('<pre>', CODE)}</body></html>"
    )


def apart(text):
    return WIDE.sub(r" \g<0> ", text)


def plain(text):
    return html.unescape(re.sub(r"<[^>]*>", "", text)).strip()


def others(text, spellings):
    """Other spellings of what a text says, each with the one it has."""
    for group in spellings:
        for spelling in group:
            begins = rf"(?<![A-Za-z0-9_]){re.escape(spelling)}"
            if re.search(begins, text, re.IGNORECASE):
                for other in group:
                    if other != spelling:
                        yield other, spelling


def setup(app):
    app.add_config_value("search_spellings", [], "env", [list])
    app.add_config_value("search_aside", [], "env", [list])
    app.connect("builder-inited", start)
    app.connect("build-finished", write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
